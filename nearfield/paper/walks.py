"""Gradients by random walks of one step: from a row to a key drawn from its softmax.

A product with P, the softmax matrix, is an expectation over the softmax of a row. A product with its transpose is estimated
by the keys that walks from the rows reach. `RandomWalk` draws a few walks from every row and uses them for D^Q, D^K and D^V in
all columns at once. `PrintedWalk` follows the paper, which draws separate walks for each column, and for D^K for each entry; it
is there for the record and for small inputs. Where the printed algorithm cannot run or is wrong, it is mended, and a
docstring says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfield.checks import MOST, check_fraction, check_index, check_not_negative, check_positive
from nearfield.chunks import row_blocks
from nearfield.kernels import backends
from nearfield.knn.index.base import PADDING, Index, default_k
from nearfield.knn.index.exact import ExactIndex
from nearfield.paper.budgets import Budget, budget
from nearfield.paper.lazy import LazyRows, RowDraws, index_that_pays, prepare
from nearfield.problem import Rows
from nearfield.results import Gradients
from nearfield.sampling import Dropout, Seeds, categorical, median_of_means, uniform

TABLE_BYTES = 2 << 30
"""The most that the cumulative sums of the printed D^K may take."""

WALKS_AT_A_TIME = 1 << 18
"""Walks of the printed D^K that are taken together."""


@dataclass(frozen=True)
class RandomWalk:
    """Monte-Carlo gradients: `walks` keys j_t drawn from the softmax of every row i, g_t = <D^O_i, V_{j_t}>, g the mean of g_t:

        D^V_{j_t} += D^O_i / walks
        D^Q_i      = sum_t (g_t - g) K_{j_t} / (walks - 1)
        D^K_{j_t} += (g_t - g) Q_i / (walks - 1)

    All three are exactly unbiased: with P_i the softmax of row i, the last two are sample covariances of D^P_i with K and
    with the indicator of a key. The error falls as 1/sqrt(walks); `budget` with `theorem="dq"` or `"dk"` says how many walks
    promise which error, and `docs/guarantees.md` proves it.

    With dropout, a walk carries the factor m_t of its pair (i, j_t): g_t = m_t <D^O_i, V_{j_t}>, D^V_{j_t} += m_t D^O_i / walks.
    It is drawn from P_i all the same, because dropout does not touch the normaliser. All three are unbiased estimates of the
    gradients for the pairs that the forward pass dropped.

    Args:
        walks: draws per row, at least 2.
        k, index: near keys of the lazy Gumbel sampler (None: ceil(sqrt(Lk))), and what finds them, built already or not.
        slack: how far a key that the index left out may lie above the smallest near one (see `LazyGumbel`).

    Cost: one search per row, plus O(walks * (E[m] + 1) * dim) per row; memory O(inputs). In a window with bounds on both sides
    walks are drawn from the full softmax of its keys.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 256, 16, requires_grad=True) for _ in range(3))
        >>> nearfield.attention(q, k, v, gradient=RandomWalk(walks=16)).square().sum().backward()
    """

    walks: int = 64
    k: int | None = None
    index: Index = field(default_factory=ExactIndex)
    slack: float | None = None

    any_window = True

    def __post_init__(self) -> None:
        check_positive("walks", self.walks, least=2, most=MOST)
        check_positive("k", self.k, optional=True)
        check_index("index", self.index)
        check_not_negative("slack", self.slack, optional=True)

    @torch.no_grad()
    def estimate(self, rows: Rows, grad_output: Tensor, seeds: Seeds, dropout: Dropout | None = None) -> Gradients:
        return shared_walks(Walker(rows, self.index, self.k, self.walks, self.slack), grad_output, self.walks, seeds, dropout)


@dataclass(frozen=True)
class PrintedWalk:
    """The paper's Monte-Carlo gradients, with the walks and draws that the corrected theorems ask for at (eps, delta).

    D^V: EstimateProduct per column. D^Q: three medians of means per row. D^K: walks per entry, and EstimateProduct. Sizes are
    those of `budget` (`dq` and `dk` in their tight form, `walks`), which also says what is promised: of each of the three, that
    all entries in all heads are right at once with probability 1 - delta. Medians of means are biased, so D^Q and D^K are.
    The error of the walks is eps times an l1 norm over all rows, at realistic sizes far more than the gradient itself. Use
    `RandomWalk` to train. With dropout a walk carries the factor of its pair, up to 1 / (1 - p), and so do the errors.

    Args:
        eps, delta: the parameters of the theorems.
        k, index: near keys of the lazy Gumbel sampler (None: ceil(sqrt(Lk))), and what finds them.
        walks: overrides the number of walks per column (and per entry of D^K).
    """

    eps: float = 0.1
    delta: float = 0.1
    k: int | None = None
    index: Index = field(default_factory=ExactIndex)
    walks: int | None = None

    def __post_init__(self) -> None:
        check_fraction("eps", self.eps)
        check_fraction("delta", self.delta)
        check_positive("k", self.k, optional=True)
        check_positive("walks", self.walks, optional=True, most=MOST)
        check_index("index", self.index)

    @torch.no_grad()
    def estimate(self, rows: Rows, grad_output: Tensor, seeds: Seeds, dropout: Dropout | None = None) -> Gradients:
        generator = seeds.generator(-3)
        for_query, for_key, for_value = self.sizes(rows)
        walker = Walker(rows, self.index, self.k, (for_query.draws or 1) + (for_key.draws or 1))
        key_walks, value_walks = self.walks or for_key.walks or 1, self.walks or for_value.walks or 1
        ones, most = torch.ones_like(grad_output[..., :1]), max(key_walks, value_walks)
        row_sums = kept_sums = positive_product(walker, ones, most, generator)
        if dropout is not None:
            kept_sums = positive_product(walker, ones, most, generator, dropout)
        groups, size = for_key.groups or 1, for_key.group_size or 1
        return Gradients(
            query=printed_dq(walker, grad_output, for_query.groups or 1, for_query.group_size or 1, generator, dropout),
            key=printed_dk(walker, grad_output, key_walks, groups, size, row_sums, generator, kept_sums, dropout),
            value=shifted_product(walker, grad_output, value_walks, generator, kept_sums, dropout),
        )

    def sizes(self, rows: Rows) -> tuple[Budget, Budget, Budget]:
        """What the theorems on D^Q, D^K and D^V ask for, so that all entries of a gradient, in all heads, are right at once."""
        dim, value_dim = rows.keys.shape[-1], rows.values.shape[-1]
        keys = rows.keys.shape[0] * rows.length
        return (
            budget(rows.count, self.eps, self.delta, d=dim, theorem="dq", form="tight"),
            budget(max(rows.count, keys), self.eps, self.delta, d=dim, theorem="dk", form="tight"),
            budget(keys, self.eps, self.delta, d=value_dim, theorem="walks", form="corrected"),
        )


class Walker:
    """Takes steps from rows to keys, with an index that is built once, if it pays for so many `walks` from a row."""

    def __init__(self, rows: Rows, index: Index, k: int | None, walks: float, slack: float | None = None) -> None:
        self.rows = rows
        self.k = default_k(k, rows.length)
        self.slack = slack
        self.built = index_that_pays(rows, index, self.k, walks, slack=slack)

    def blocks(self, walks: int) -> Iterator[slice]:
        """Ranges of rows for which `walks` walks each fit into memory."""
        groups = 1 if self.built is None else self.built.groups
        return row_blocks(self.rows.visible.shape, 80 * max(walks, self.k, groups))

    def prepare(self, block: slice, draws: int | Tensor) -> LazyRows:
        return prepare(self.rows.at(block), self.built, self.k, draws=draws, slack=self.slack)

    def carried(self, block: slice, lazy: LazyRows, drawn: RowDraws, dropout: Dropout | None) -> Tensor:
        """What walks from the rows of a block carry, `[seen, draws]`: the dropout factors of their pairs, or ones."""
        if dropout is None:
            return self.rows.queries.new_ones(drawn.ids.shape)
        row = self.rows.numbers(block).flatten()[lazy.seen]
        return dropout.factors(row[:, None], drawn.ids, self.rows.queries.dtype)

    def step(self, source: Tensor, generator: torch.Generator) -> Tensor:
        """One step from every flat row number of `source` (batch entry * rows + row): the key it reaches, or `PADDING`."""
        count = self.rows.visible.shape[1]
        entry, row = source // count, source % count
        by_row, order = row.sort(stable=True)
        reached = torch.full_like(source, PADDING)
        sees_keys = self.rows.visible[entry, row] > 0
        for block in self.blocks(1):
            first, last = torch.searchsorted(by_row, torch.tensor([block.start, block.stop], device=source.device)).tolist()
            here = order[first:last]
            here = here[sees_keys[here]]
            if len(here) == 0:
                continue
            local = entry[here] * (block.stop - block.start) + row[here] - block.start
            draws = torch.bincount(local, minlength=len(self.rows.visible) * (block.stop - block.start))
            reached[here] = self.prepare(block, draws).draw(local, generator).ids
        return reached


def shared_walks(walker: Walker, grad_output: Tensor, walks: int, seeds: Seeds, dropout: Dropout | None = None) -> Gradients:
    """The estimators of `RandomWalk`."""
    rows = walker.rows
    kernel = backends.pair_kernels("auto", rows.keys.device)
    key_table, value_table = rows.keys.flatten(0, 1), rows.values.flatten(0, 1)
    grad = Gradients(torch.zeros_like(rows.queries), torch.zeros_like(key_table), torch.zeros_like(value_table))
    for block in walker.blocks(walks):
        lazy = walker.prepare(block, walks)
        drawn = lazy.draw_each(walks, seeds.generator(-2, block.start))
        place, carried = drawn.place, walker.carried(block, lazy, drawn, dropout)
        upstream = grad_output[:, block].flatten(0, 1)[lazy.seen]
        query_rows = lazy.rows.queries.flatten(0, 1)[lazy.seen]

        scores = carried * kernel.pair_scores(upstream, value_table, place)
        centred = (scores - scores.mean(-1, keepdim=True)) / (walks - 1)
        grad.query[:, block] = lazy.spread(kernel.pair_sums(centred, key_table, place))
        kernel.pair_scatter_(grad.key, centred, query_rows, place)
        kernel.pair_scatter_(grad.value, carried / walks, upstream, place)
    return Gradients(grad.query, grad.key.view_as(rows.keys), grad.value.view_as(rows.values))


def positive_product(walker: Walker, x: Tensor, walks: int, generator: torch.Generator, dropout: Dropout | None = None) -> Tensor:
    """ApproxPosProd: P^T x for x >= 0. x `[batch, rows, columns]` -> `[batch, length, columns]`. With dropout, P is what is left.

    `walks` walks per column start in row i with probability x_i / sum x. The share that ends in key v, times sum x, is an
    unbiased estimate of (P^T x)_v, with an error of at most eps sum x for `budget(theorem="walks")` walks; with dropout, where a
    walk counts as the factor of its pair, of at most eps sum x / (1 - p).
    """
    if bool((x < 0).any()):
        raise ValueError("approx_pos_prod needs x >= 0; use estimate_product for x of any sign")
    return signed_product(walker, x, walks, generator, dropout)


def signed_product(walker: Walker, x: Tensor, walks: int, generator: torch.Generator, dropout: Dropout | None = None) -> Tensor:
    """P^T x for any x: a walk starts in row i with probability |x_i| / ||x||_1 and carries the sign of x_i.

    Variance of entry v: (||x||_1 (P^T |x|)_v - (P^T x)_v^2) / walks. The estimate for a column of zeros is zero. The error is at
    most eps ||x||_1 for `budget(theorem="walks", form="signed")` walks.
    """
    batch, rows, columns = x.shape
    by_column = x.transpose(1, 2).reshape(batch * columns, rows)
    weight = by_column.abs().double()
    # Rows that see no key lead nowhere: their row of P is zero.
    weight = weight * (walker.rows.visible > 0).repeat_interleave(columns, 0)
    total = weight.sum(-1)
    alive = (total > 0).nonzero()[:, 0]
    out = torch.zeros(batch * walker.rows.length * columns, dtype=torch.float64, device=x.device)
    if len(alive) == 0:
        return out.view(batch, -1, columns).to(x.dtype)
    start = categorical(weight[alive], walks, generator)
    entry, column = alive // columns, alive % columns
    source = entry[:, None] * rows + start
    key = walker.step(source.reshape(-1), generator).view(start.shape)
    place = (entry[:, None] * walker.rows.length + key) * columns + column[:, None]
    carried = by_column[alive].gather(1, start).sign().double() * total[alive, None] / walks
    if dropout is not None:
        carried = carried * dropout.factors(source, key, carried.dtype)
    out.index_add_(0, place.reshape(-1), carried.reshape(-1))
    return out.view(batch, walker.rows.length, columns).to(x.dtype)


def shifted_product(
    walker: Walker,
    x: Tensor,
    walks: int,
    generator: torch.Generator,
    row_sums: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """EstimateProduct as printed: lift every column by its most negative entry, walk, and subtract the lift again.

    P^T x = P^T (x + M) - M P^T 1, with P^T 1 estimated once (`row_sums`, `[batch, length, 1]`). Unbiased, but with many times the
    variance of `signed_product` for x of mixed sign. With dropout, P is the matrix that is left, in all three places.
    """
    if row_sums is None:
        row_sums = positive_product(walker, torch.ones_like(x[..., :1]), walks, generator, dropout)
    lift = (-x).clamp(min=0).amax(1, keepdim=True)
    return positive_product(walker, x + lift, walks, generator, dropout) - lift * row_sums


def printed_dq(
    walker: Walker, grad_output: Tensor, groups: int, size: int, generator: torch.Generator, dropout: Dropout | None = None
) -> Tensor:
    """Algorithm on D^Q: E1 - E2 E3, each by its own median of means.

    E1 = E[D^P_ik K_k], E2 = E[K_k], E3 = E[D^P_ik] over k ~ softmax of row i. Mended: E3 does not depend on the column, so it is
    estimated once per row. The columns share their draws.
    """
    rows = walker.rows
    key_table, value_table = rows.keys.flatten(0, 1), rows.values.flatten(0, 1)
    kernel = backends.pair_kernels("auto", key_table.device)
    grad = torch.zeros_like(rows.queries)
    draws = groups * size
    for block in walker.blocks(draws * rows.keys.shape[-1]):
        lazy = walker.prepare(block, 3 * draws)
        upstream = grad_output[:, block].flatten(0, 1)[lazy.seen]
        one, two, three = (lazy.draw_each(draws, generator) for _ in range(3))
        first, second, third = one.place, two.place, three.place
        with_values = walker.carried(block, lazy, one, dropout) * kernel.pair_scores(upstream, value_table, first)
        with_keys = with_values[..., None] * key_table[first]
        e1 = median_of_means(with_keys.unflatten(1, (groups, size)))
        e2 = median_of_means(key_table[second].unflatten(1, (groups, size)))
        scores = walker.carried(block, lazy, three, dropout) * kernel.pair_scores(upstream, value_table, third)
        e3 = median_of_means(scores.view(-1, groups, size, 1))
        grad[:, block] = lazy.spread(e1 - e2 * e3)
    return grad


def printed_dk(
    walker: Walker,
    grad_output: Tensor,
    walks: int,
    groups: int,
    size: int,
    row_sums: Tensor,
    generator: torch.Generator,
    kept_sums: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Algorithm on D^K: A - B, with A entry by entry (part 1) and B column by column (part 2).

    `row_sums` estimates P^T 1. With dropout, A is a product with what is left of P, for which `kept_sums` takes the place of
    `row_sums`, and B is one with the whole of P.
    """
    kept_sums = row_sums if kept_sums is None else kept_sums
    positive = _printed_a(walker, grad_output, walks, kept_sums, generator, dropout)
    mean_scores = _mean_scores(walker, grad_output, groups, size, generator, dropout)
    negative = shifted_product(walker, walker.rows.queries * mean_scores, walks, generator, row_sums)
    return positive - negative


def _printed_a(
    walker: Walker,
    grad_output: Tensor,
    walks: int,
    row_sums: Tensor,
    generator: torch.Generator,
    dropout: Dropout | None = None,
) -> Tensor:
    """A_ij = sum_k P_ki Y_kj with Y_kj = Q_kj <D^O_k, V_i>, by walks that start in row k in proportion to Y_kj + M.

    A start is found by bisection in cumulative sums <V_i, sum_{s<=l} Q_sj D^O_s> + l M, whose table serves every i. Mended: the
    step leaves from the sampled row k (the paper draws it from row i, with the near keys of row i); the sums are float64; M is
    not assumed but computed, max |Q_kj| ||D^O_k|| max ||V_i||; a causal walk starts only from rows that see key i.
    """
    rows = walker.rows
    batch, count, dim = rows.queries.shape
    value_dim, length = rows.values.shape[-1], rows.length
    needed = 2 * batch * count * dim * value_dim * 8  # products and their sums
    if needed > TABLE_BYTES:
        raise ValueError(
            f"the printed D^K needs {needed / 2**30:.1f} GiB of cumulative sums for {count} rows of dimension {dim}; "
            "use RandomWalk"
        )
    queries, upstream, values = rows.queries.double(), grad_output.double(), rows.values.double()
    table = (queries[..., :, None] * upstream[..., None, :]).cumsum(1)  # [batch, rows, dim, value_dim]
    largest = (queries.abs().amax(-1) * upstream.norm(dim=-1)).amax(-1)
    lift = largest * values.norm(dim=-1).amax(-1)  # [batch]
    first_row = _first_row_that_sees(rows)

    out = torch.zeros(batch * length * dim, dtype=torch.float64, device=queries.device)
    entries = torch.arange(batch * length * dim, device=queries.device)
    for part in entries.split(max(1, WALKS_AT_A_TIME // walks)):
        entry, key, column = part // (length * dim), part // dim % length, part % dim
        value, shift, low = values[entry, key], lift[entry], first_row[entry, key]

        def mass(
            upto: Tensor, entry: Tensor = entry, column: Tensor = column, value: Tensor = value, shift: Tensor = shift
        ) -> Tensor:
            """Cumulative sum over rows 0..upto, `[entries, walks]`; zero at -1."""
            sums = table[entry[:, None], upto.clamp(min=0), column[:, None]]
            total = torch.einsum("ewv,ev->ew", sums, value) + (upto + 1) * shift[:, None]
            return total.masked_fill(upto < 0, 0.0)

        below = mass(low[:, None] - 1)
        total = mass(torch.full_like(low, count - 1)[:, None]) - below
        target = below + uniform((len(part), walks), generator) * total
        lower, upper = low[:, None].expand_as(target), torch.full_like(target, count - 1, dtype=torch.long)
        for _ in range(max(1, count).bit_length()):
            middle = (lower + upper) // 2
            enough = mass(middle) >= target
            lower, upper = torch.where(enough, lower, middle + 1), torch.where(enough, middle, upper)
            lower = torch.minimum(lower, upper)
        start = upper
        source = entry[:, None] * count + start
        reached = walker.step(source.reshape(-1), generator).view(start.shape)
        hits = (reached == key[:, None]).double()
        if dropout is not None:
            hits = hits * dropout.factors(source, key[:, None], hits.dtype)
        share = hits.mean(1)
        out[part] = share * total[:, 0] - shift * row_sums[entry, key, 0].double()
    return out.view(batch, length, dim).to(rows.keys.dtype)


def _first_row_that_sees(rows: Rows) -> Tensor:
    """For every key the first row that sees it, if every later row sees it too (visibility only grows); otherwise 0."""
    monotone = bool((rows.visible[:, 1:] >= rows.visible[:, :-1]).all())
    keys = torch.arange(rows.length, device=rows.visible.device).expand(rows.keys.shape[0], -1).contiguous()
    if not monotone:
        return torch.zeros_like(keys)
    return torch.searchsorted(rows.visible.contiguous(), keys, right=True).clamp(max=rows.visible.shape[1] - 1)


def _mean_scores(
    walker: Walker, grad_output: Tensor, groups: int, size: int, generator: torch.Generator, dropout: Dropout | None = None
) -> Tensor:
    """<D^P_k, P_k> of every row k by median of means, `[batch, rows, 1]`. Mended: with the near keys of row k, not of row i."""
    rows = walker.rows
    value_table = rows.values.flatten(0, 1)
    kernel = backends.pair_kernels("auto", value_table.device)
    out = rows.queries.new_zeros(*rows.visible.shape, 1)
    draws = groups * size
    for block in walker.blocks(draws):
        lazy = walker.prepare(block, draws)
        drawn = lazy.draw_each(draws, generator)
        upstream = grad_output[:, block].flatten(0, 1)[lazy.seen]
        scores = walker.carried(block, lazy, drawn, dropout) * kernel.pair_scores(upstream, value_table, drawn.place)
        out[:, block] = lazy.spread(median_of_means(scores.view(-1, groups, size, 1)))
    return out

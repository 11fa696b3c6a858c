"""D^V, D^Q and D^K as the paper prints them, for the record and for small inputs.

The cost is what the paper's is: walks per column for D^V and per entry for D^K. Where the printed algorithm cannot run or
is wrong, it is mended and the place is marked. `walks.py` has the estimators to use.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfield.checks import check_fraction, check_index, check_positive
from nearfield.kernels import backends
from nearfield.knn.index.base import Index
from nearfield.knn.index.exact import ExactIndex
from nearfield.paper.budgets import budget
from nearfield.paper.walks import Walker, positive_product, shifted_product
from nearfield.problem import Rows
from nearfield.results import Gradients
from nearfield.sampling import Seeds, median_of_means, uniform

TABLE_BYTES = 2 << 30

PAIRS_AT_A_TIME = 1 << 18


@dataclass(frozen=True)
class PrintedWalk:
    """The paper's Monte-Carlo gradients, with the walks and draws that the corrected theorems ask for at (eps, delta).

    D^V: EstimateProduct per column. D^Q: three medians of means per row. D^K: walks per entry, and EstimateProduct. The walks
    give an error of eps times an l1 norm over all rows, which at realistic sizes is far more than the gradient itself:
    use `RandomWalk` to train.

    Args:
        eps, delta: the theorems' parameters.
        k, index: for the lazy Gumbel sampler; None: ceil(sqrt(Lk)).
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
        check_positive("walks", self.walks, optional=True)
        check_index("index", self.index)

    @torch.no_grad()
    def estimate(self, rows: Rows, grad_output: Tensor, seeds: Seeds) -> Gradients:
        walker = Walker(rows, self.index, self.k)
        generator = seeds.generator(-3)
        count, dim = rows.visible.shape[1], max(rows.queries.shape[-1], rows.values.shape[-1])
        walks = self.walks or budget(count, self.eps, self.delta, d=dim, theorem="walks").walks or 1
        sizes = budget(count, self.eps, self.delta, d=dim, theorem="median-of-means", form="tight")
        groups, size = sizes.groups or 1, sizes.group_size or 1
        row_sums = positive_product(walker, torch.ones_like(grad_output[..., :1]), walks, generator)
        return Gradients(
            query=printed_dq(walker, grad_output, groups, size, generator),
            key=printed_dk(walker, grad_output, walks, groups, size, row_sums, generator),
            value=shifted_product(walker, grad_output, walks, generator, row_sums),
        )


def printed_dq(walker: Walker, grad_output: Tensor, groups: int, size: int, generator: torch.Generator) -> Tensor:
    """Algorithm on D^Q: E1 - E2 E3, each by its own median of means.

    E1 = E[D^P_ik K_k], E2 = E[K_k], E3 = E[D^P_ik] over k ~ softmax of row i. Mended: E3 does not depend on the column, so it is
    estimated once per row; draws are shared by the columns.
    """
    rows = walker.rows
    key_table, value_table = rows.keys.flatten(0, 1), rows.values.flatten(0, 1)
    kernel = backends.pair_kernels("auto", key_table.device)
    grad = torch.zeros_like(rows.queries)
    draws = groups * size
    for block in walker.blocks(draws * rows.keys.shape[-1]):
        lazy = walker.prepare(block)
        upstream = grad_output[:, block].flatten(0, 1)[lazy.seen]
        first, second, third = (lazy.draw_each(draws, generator).place for _ in range(3))
        with_keys = kernel.pair_scores(upstream, value_table, first)[..., None] * key_table[first]
        e1 = median_of_means(with_keys.unflatten(1, (groups, size)))
        e2 = median_of_means(key_table[second].unflatten(1, (groups, size)))
        scores = kernel.pair_scores(upstream, value_table, third)
        e3 = median_of_means(scores.view(-1, groups, size, 1))
        grad[:, block] = lazy.spread(e1 - e2 * e3)
    return grad


def printed_dk(
    walker: Walker, grad_output: Tensor, walks: int, groups: int, size: int, row_sums: Tensor, generator: torch.Generator
) -> Tensor:
    """Algorithm on D^K: A - B, A entry by entry (part 1), B column by column (part 2)."""
    positive = _printed_a(walker, grad_output, walks, row_sums, generator)
    mean_scores = _mean_scores(walker, grad_output, groups, size, generator)
    negative = shifted_product(walker, walker.rows.queries * mean_scores, walks, generator, row_sums)
    return positive - negative


def _printed_a(walker: Walker, grad_output: Tensor, walks: int, row_sums: Tensor, generator: torch.Generator) -> Tensor:
    """A_ij = sum_k P_ki Y_kj with Y_kj = Q_kj <D^O_k, V_i>, by walks that start in row k in proportion to Y_kj + M.

    A start is found by bisection in cumulative sums <V_i, sum_{s<=l} Q_sj D^O_s> + l M, whose table serves every i. Mended: the
    step goes from the sampled row k (the paper draws it from row i, with row i's near keys); the sums are float64; M is
    computed, max |Q_kj| ||D^O_k|| max ||V_i||, instead of assumed; a causal walk starts only from rows that see key i.
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
    for part in entries.split(max(1, PAIRS_AT_A_TIME // walks)):
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
        reached = walker.step((entry[:, None] * count + start).reshape(-1), generator).view(start.shape)
        share = (reached == key[:, None]).double().mean(1)
        out[part] = share * total[:, 0] - shift * row_sums[entry, key, 0].double()
    return out.view(batch, length, dim).to(rows.keys.dtype)


def _first_row_that_sees(rows: Rows) -> Tensor:
    """For every key the first row from which on all rows see it, if visibility only grows with the row; else 0."""
    monotone = bool((rows.visible[:, 1:] >= rows.visible[:, :-1]).all())
    keys = torch.arange(rows.length, device=rows.visible.device).expand(rows.keys.shape[0], -1).contiguous()
    if not monotone:
        return torch.zeros_like(keys)
    return torch.searchsorted(rows.visible.contiguous(), keys, right=True).clamp(max=rows.visible.shape[1] - 1)


def _mean_scores(walker: Walker, grad_output: Tensor, groups: int, size: int, generator: torch.Generator) -> Tensor:
    """<D^P_k, P_k> of every row k by median of means, `[batch, rows, 1]`. Mended: with row k's near keys, not row i's."""
    rows = walker.rows
    value_table = rows.values.flatten(0, 1)
    kernel = backends.pair_kernels("auto", value_table.device)
    out = rows.queries.new_zeros(*rows.visible.shape, 1)
    draws = groups * size
    for block in walker.blocks(draws):
        lazy = walker.prepare(block)
        place = lazy.draw_each(draws, generator).place
        scores = kernel.pair_scores(grad_output[:, block].flatten(0, 1)[lazy.seen], value_table, place)
        out[:, block] = lazy.spread(median_of_means(scores.view(-1, groups, size, 1)))
    return out

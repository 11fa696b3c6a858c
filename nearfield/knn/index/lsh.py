"""Concentric locality-sensitive hashing: a ladder of radii, each with its own hash tables."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.checks import check_generator_seed, check_positive
from nearfield.chunks import row_chunks
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import PADDING, Found
from nearfield.knn.index.candidates import best_of_lists
from nearfield.knn.index.file import Learned
from nearfield.knn.index.lift import lift_keys
from nearfield.knn.index.lsh_theory import lsh_budget, radius
from nearfield.knn.index.prefixes import LEAF, PrefixBuilt, restored

MOST_TABLES = (1 << 15) - 1
"""The number of a table is kept in 16 bits."""

MOST_RUNGS = 1 << 10

MOST_HASHES = 1 << 8
"""Of a table. There would have to be 2^256 keys for as many by default."""

MOST_HASHES_IN_ALL = 1 << 25
"""rungs * tables * hashes: each has a shift, which is a number of 64 bits while it is drawn."""

LOOKUPS_PER_PASS = 1 << 20
"""Bucket look-ups of one pass over some rows (8 MB for each of about ten int64 tables of them)."""


@dataclass(frozen=True)
class ConcentricLSH:
    """k-MIPS by concentric LSH (paper, Appendix on concentric LSH; the construction of Mussmann, Levy and Ermon).

    Inner products become distances by the lift k' = [k, sqrt(R^2 - ||k||^2)] / R, with queries rescaled to norm 1 (which
    keeps the ranking of the keys and maximises the contrast): ||q' - k'||^2 = 2 - 2 q.k / (||q|| R). For each radius r of a
    geometric ladder there are `tables` tables; one table concatenates m hashes of E2LSH,

        h(x) = floor((a.x + b) / w),   a ~ N(0, I),  b ~ U[0, w),  w = width * r,

    which two points at distance w / s share with probability p(s) = 1 - 2 Phi(-s) - sqrt(2/pi)/s (1 - e^{-s^2/2}). There are
    by default m = ceil(log2(n)) hashes: of the keys so far away that p = 1/2 a bucket then holds n 2^-m <= 1, while a near key
    stays in the bucket of the query with probability p^m = n^-rho, rho = log2(1/p) < 1; tables and flips (below) repeat the
    attempt.

    A query climbs the ladder and stops at the first radius at which its buckets hold at least `enough * max(k, sqrt(n))`
    candidates, counted over tables, duplicates included. It scores them exactly and keeps the top k. If fewer than min(k, n)
    of them are distinct, it climbs on. The last rung holds all keys, so a row always finds min(k, n). The radii run from the
    typical distance of sqrt(n)/2 neighbours to the median distance, measured on a sample of the keys.

    Departures from the construction:
    - shells: keys are split by norm into `shells` equal parts. Each part is lifted with its own R, all onto the unit sphere.
      With a single R the added coordinate pushes short keys away from every query, and near and far distances hardly differ.
      Across shells a bucket groups keys by angle, so many shells suit keys of similar norm, and few suit keys whose norms decide.
    - flips: besides its own bucket a query opens those across the nearest boundaries of `flips` hashes, 2^flips in all.
    - enough > 1: the first k candidates are not yet the best ones, and several tables list the same key.
    - The rungs share the vectors a (not the shifts b): one projection serves the whole ladder.
    - Keys are centred first, which shifts all scores of a query by the same amount.

    Causal rows search ladders made of visible keys only, block by block (`nearfield.knn.index.prefixes`). This index knows no
    bound on the keys it misses, so `cutoffs` is None.

    Args:
        rungs: radii of the ladder, at most 1,024.
        tables: hash tables per radius, at most 32,767.
        width: w / r.
        enough: how many candidates end the climb, in units of max(k, sqrt(n)).
        flips: hashes perturbed per table (multi-probe).
        shells: parts into which keys are split by norm; at most one for each key.
        seed: seed of the hashes and of the sample; the global generator is not used.
        leaf: keys of the smallest block of a causal search.
        hashes: per table, at most 256, and 2^25 in all tables of all radii; None: ceil(log2(n)).
        nearest, farthest: first and last radius on the unit sphere; None: measured on the keys.

    `ConcentricLSH.from_theory` gives all of them the values that a promise asks for.

    Cost: build O(n log n tables (dim + rungs)), and 8 bytes per key, table and rung (480 per key by default). Search takes
    tables * 2^flips look-ups of O(log n) on each rung, plus O(dim) per candidate. Causal search takes log2(n / leaf) times as
    much of everything.

    >>> keys = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    >>> scores, ids = ConcentricLSH().build(keys).search(keys[:, :5], k=3)
    >>> ids[0, :, 0].tolist()
    [0, 1, 2, 3, 4]
    """

    rungs: int = 6
    tables: int = 10
    width: float = 5.5
    enough: float = 4.0
    flips: int = 4
    shells: int = 16
    seed: int = 0
    leaf: int = LEAF
    hashes: int | None = None
    nearest: float | None = None
    farthest: float | None = None

    @classmethod
    def from_theory(
        cls, n: int, s1: float, s2: float, *, delta: float | None = None, every: int = 1, seed: int = 0, leaf: int = LEAF
    ) -> ConcentricLSH:
        """The index with the sizes of `lsh_budget(n, s1, s2, delta=delta, every=every)`, and one of the departures above.

        A key k with cosine q.k / (||q|| R) >= s1 is among the candidates of q with probability 1 - delta (None: 1 - 1/n^2, the
        paper's), where k is a key minus the mean of all keys (centring is the departure that stays) and R the largest norm of
        these. A query stops at the first radius with max(k, sqrt(n)) candidates.

        The promise is dear: `docs/guarantees.md` says from which n on it costs less than to score all keys.

        >>> ConcentricLSH.from_theory(4096, 0.95, 0.3, delta=0.1).tables
        22
        """
        sizes = lsh_budget(n, s1, s2, delta=delta, every=every)
        assert sizes.width is not None
        near, step = radius("s1", s1), radius("s2", s2) / radius("s1", s1)
        in_all = sizes.rungs * sizes.tables * sizes.hashes
        for asked, most, what in (
            (sizes.tables, MOST_TABLES, "tables"),
            (sizes.rungs, MOST_RUNGS, "radii"),
            (sizes.hashes, MOST_HASHES, "hashes in a table"),
            (in_all, MOST_HASHES_IN_ALL, "hashes in all"),
        ):
            if asked > most:
                raise ValueError(
                    f"these promises ask for {asked:,} {what}, and there can be {most:,}; "
                    "raise delta, or the distance between s1 and s2"
                )
        return cls(
            rungs=sizes.rungs,
            tables=sizes.tables,
            width=sizes.width,
            enough=1.0,
            flips=0,
            shells=1,
            seed=seed,
            leaf=leaf,
            hashes=sizes.hashes,
            nearest=near,
            farthest=near * step ** (sizes.rungs - 1),
        )

    def __post_init__(self) -> None:
        check_positive("rungs", self.rungs, most=MOST_RUNGS)
        check_positive("tables", self.tables, most=MOST_TABLES)
        check_positive("flips", self.flips, least=0)
        check_positive("shells", self.shells)
        check_positive("leaf", self.leaf)
        check_generator_seed("seed", self.seed)
        check_positive("hashes", self.hashes, optional=True, most=MOST_HASHES)
        if self.rungs * self.tables * (self.hashes or 1) > MOST_HASHES_IN_ALL:
            raise ValueError(
                f"rungs * tables * hashes must be at most {MOST_HASHES_IN_ALL:,}, got rungs={self.rungs!r}, "
                f"tables={self.tables!r}, hashes={self.hashes!r}; take fewer of one of them"
            )
        if (self.nearest is None) != (self.farthest is None):
            raise ValueError(f"give both radii or neither, got nearest={self.nearest!r}, farthest={self.farthest!r}")
        if self.nearest is not None and self.farthest is not None and not 0 < self.nearest <= self.farthest < math.inf:
            raise ValueError(f"0 < nearest <= farthest must hold, got nearest={self.nearest!r}, farthest={self.farthest!r}")
        if self.flips > 8:
            raise ValueError(f"flips must be at most 8 (256 buckets per table), got {self.flips!r}")
        for name in ("width", "enough"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= torch.finfo(torch.float64).max:
                raise ValueError(f"{name} must be a positive number, got {value!r}")

    def build(self, keys: Tensor) -> BuiltConcentricLSH:
        with full_precision(keys):
            return BuiltConcentricLSH(keys, self)

    def _restored(self, keys: Tensor, learned: Learned) -> PrefixBuilt:
        def made(some: Tensor, part: Learned) -> BuiltConcentricLSH:
            return BuiltConcentricLSH(some, self, part)

        return restored(keys, learned, made, made)


class BuiltConcentricLSH(PrefixBuilt):
    """Per rung and table, the keys sorted by (bucket, id): `codes` and `order`, both int32 `[rungs, batch, tables, length]`."""

    advice = (
        "Buckets held too many keys or too few: these keys may have no near neighbours that hashing could tell from the others "
        "(use ExactIndex() or KMeansIndex()), or other values of width, enough and tables suit them better."
    )

    kind = ConcentricLSH

    def __init__(self, keys: Tensor, recipe: ConcentricLSH, learned: Learned | None = None) -> None:
        super().__init__(keys, recipe.leaf)
        batch, length, dim = self.keys.shape
        device, dtype = self.keys.device, self.keys.dtype
        self.recipe = recipe
        if learned is not None:
            self._restore(learned)
            return
        self.hashes = recipe.hashes or max(1, math.ceil(math.log2(max(2, length))))
        generator = torch.Generator("cpu").manual_seed(recipe.seed)
        shape = (recipe.tables, self.hashes)
        self.directions = torch.randn(dim + 1, *shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
        self.shifts = torch.rand(recipe.rungs, *shape, generator=generator, dtype=torch.float64, device="cpu").to(device, dtype)
        # Odd multipliers of a multiply-shift hash: the bucket of a vector of integers is the upper half of its weighted sum.
        self.weights = (torch.randint(-(1 << 62), 1 << 62, (self.hashes,), generator=generator, device="cpu") * 2 + 1).to(device)
        self.codes = torch.empty(recipe.rungs, batch, recipe.tables, length, dtype=torch.int32, device=device)
        self.order = torch.empty_like(self.codes)
        if length == 0:
            return
        self.middle = self.keys.mean(1, keepdim=True)
        centred = self.keys - self.middle
        norms = centred.norm(dim=-1)
        shells = min(recipe.shells, length)
        shell = norms.argsort(dim=1).argsort(dim=1) * shells // length
        longest = torch.zeros(batch, shells, dtype=dtype, device=device).scatter_reduce(1, shell, norms, "amax")
        self.limits = longest.cummax(1).values
        """`[batch, shells]`: the largest norm of each shell, ascending"""
        limit = longest.gather(1, shell)
        if recipe.nearest is None or recipe.farthest is None:
            nearest, farthest = _measured_radii(centred / _scale(limit), generator)
        else:
            nearest, farthest = (torch.full_like(norms[:, 0], x) for x in (recipe.nearest, recipe.farthest))
        self.widths = float(recipe.width) * _ladder(nearest, farthest, recipe.rungs)
        """`[rungs, batch]`"""
        for place, code in self._hashed(centred, limit):
            self.codes[place], self.order[place] = torch.sort(code, stable=True)

    def _lessons(self) -> dict[str, Tensor]:
        learned = ("directions", "shifts", "weights", "codes", "order", "middle", "limits", "widths")
        # The last three were not learned where there were no keys.
        return {name: getattr(self, name) for name in learned if hasattr(self, name)}

    def _restore(self, learned: Learned) -> None:
        recipe, (batch, length, dim), dtype = self.recipe, self.keys.shape, self.keys.dtype
        self.directions = learned.take("directions", (dim + 1, recipe.tables, None), dtype)
        self.hashes = self.directions.shape[2]
        self.shifts = learned.take("shifts", (recipe.rungs, recipe.tables, self.hashes), dtype)
        self.weights = learned.take("weights", (self.hashes,), torch.int64)
        shape = (recipe.rungs, batch, recipe.tables, length)
        self.codes = learned.take("codes", shape, torch.int32)
        learned.check("codes", bool((self.codes[..., 1:] >= self.codes[..., :-1]).all()))
        self.order = learned.permutation("order", shape, torch.int32)
        if length or "middle" in learned.names():
            self.middle = learned.take("middle", (batch, 1, dim), dtype)
            # One for each shell; fewer where there were fewer keys to learn from.
            self.limits = learned.take("limits", (batch, None), dtype)
            learned.check("limits", 0 < self.limits.shape[1] <= recipe.shells)
            self.widths = learned.take("widths", (recipe.rungs, batch), dtype)

    def _hashed(self, centred: Tensor, limit: Tensor) -> Iterator[tuple[tuple[int, int, int], Tensor]]:
        """The codes of keys with the limits `[batch, length]` of their shells, for every rung, entry and table."""
        lifted = lift_keys(centred, limit) / _scale(limit)
        # One entry and table at a time: the hashes of a table take 8 log2(n) bytes per key before they become a code.
        for entry in range(len(centred)):
            for table in range(self.recipe.tables):
                projected = lifted[entry] @ self.directions[:, table]
                for rung in range(self.recipe.rungs):
                    cell = torch.floor(projected / self.widths[rung, entry] + self.shifts[rung, table]).long()
                    yield (rung, entry, table), self._code((cell * self.weights).sum(-1))

    def _take_in(self, start: int) -> None:
        centred = self.keys[:, start:] - self.middle
        norms = centred.norm(dim=-1)
        # A key longer than all before goes to the last shell. It may be hard to find there, but when it is found it is scored.
        shell = torch.searchsorted(self.limits, norms).clamp(max=self.limits.shape[1] - 1)
        joined = torch.empty(*self.codes.shape[:-1], centred.shape[1], dtype=torch.int32, device=self.codes.device)
        for place, code in self._hashed(centred, self.limits.gather(1, shell)):
            joined[place] = code
        number = torch.arange(start, self.length, dtype=torch.int32, device=joined.device).expand_as(joined)
        self.codes, at = torch.cat([self.codes, joined], -1).sort(dim=-1, stable=True)
        self.order = torch.cat([self.order, number], -1).gather(-1, at)

    def _leave_out(self, kept: Tensor) -> None:
        number = torch.full((self.order.shape[-1],), PADDING, dtype=torch.int32, device=kept.device)
        number[kept] = torch.arange(len(kept), dtype=torch.int32, device=kept.device)
        order = number[self.order.long()]
        stays = order != PADDING
        shape = (*order.shape[:-1], len(kept))
        self.codes, self.order = self.codes[stays].view(shape), order[stays].view(shape)

    @staticmethod
    def _code(mixed: Tensor) -> Tensor:
        return (mixed >> 32).to(torch.int32)

    def _anew(self, keys: Tensor) -> BuiltConcentricLSH:
        return BuiltConcentricLSH(keys, self.recipe)

    def _search_all(self, queries: Tensor, k: int) -> Found:
        batch, rows, _ = queries.shape
        scores = queries.new_empty(batch, rows, k)
        ids = torch.empty(batch, rows, k, dtype=torch.int64, device=queries.device)
        scored = ids.new_empty(batch, rows)
        lookups = self.recipe.tables << self.recipe.flips
        for entries, part in row_chunks(batch, rows, lookups, LOOKUPS_PER_PASS):
            some = queries[entries, part]
            entry = torch.arange(batch, device=queries.device)[entries, None].expand(some.shape[:2])
            best, near, count = self._climb(some.reshape(-1, some.shape[-1]), entry.reshape(-1), k)
            scores[entries, part], ids[entries, part] = best.view(*some.shape[:2], k), near.view(*some.shape[:2], k)
            scored[entries, part] = count.view(some.shape[:2])
        return Found(scores, ids, scored)

    def _climb(self, queries: Tensor, entry: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Winners of the given rows `[rows, dim]`, rung by rung, and how many keys were scored; a row leaves the ladder once it
        has its answer."""
        recipe, rows, length = self.recipe, queries.shape[0], self.length
        scores = queries.new_full((rows, k), -torch.inf)
        ids = torch.full((rows, k), PADDING, device=queries.device)
        scored = ids.new_zeros(rows)
        enough = recipe.enough * max(k, math.sqrt(length))
        # With no more keys than that, a row may as well score them all.
        left = torch.arange(rows if length > enough else 0, device=queries.device)
        exhaustive = torch.arange(0 if length > enough else rows, device=queries.device)
        unit = torch.nn.functional.normalize(queries, dim=-1)
        projected = torch.einsum("rd,dth->rth", unit, self.directions[:-1])
        small = torch.uint8 if recipe.tables <= 256 else torch.int16
        table = torch.arange(recipe.tables, dtype=small, device=queries.device)
        table = table.repeat_interleave(1 << min(recipe.flips, self.hashes))
        for rung in range(recipe.rungs):
            if left.numel() == 0:
                break
            starts, counts = self._buckets(projected[left], entry[left], rung)
            total = counts.sum(-1)
            hit = total >= enough
            # As many candidates as keys: the last rung is cheaper, and exact.
            dense = hit & (total >= length)
            exhaustive = torch.cat([exhaustive, left[dense]])
            chosen = (hit & ~dense).nonzero().squeeze(1)
            here = left[chosen]
            order = self.order[rung].view(-1)
            best, near, found = best_of_lists(
                queries[here], self.keys, entry[here], order, starts[chosen], counts[chosen], k, table=table
            )
            scored[here] += counts[chosen].sum(-1)
            done = found >= k
            scores[here[done]], ids[here[done]] = best[done], near[done]
            stays = ~hit
            stays[chosen] = ~done
            left = left[stays]
        rest = torch.cat([exhaustive, left])
        first = (entry[rest] * length)[:, None]
        scores[rest], ids[rest], _ = best_of_lists(
            queries[rest], self.keys, entry[rest], None, first, torch.full_like(first, length), k
        )
        scored[rest] += length
        return scores, ids, scored

    def _buckets(self, projected: Tensor, entry: Tensor, rung: int) -> tuple[Tensor, Tensor]:
        """Where the buckets of each row start in the order of the rung, and how many keys they hold, `[rows, look-ups]`.

        `projected` `[rows, tables, hashes]` are the projections of the unit queries. Look-ups are listed table by table.
        """
        position = projected / self.widths[rung, entry, None, None] + self.shifts[rung]
        cell = torch.floor(position)
        part = position - cell
        mixed = (cell.long() * self.weights).sum(-1, keepdim=True)
        flips = min(self.recipe.flips, self.hashes)
        across = torch.where(part < 0.5, -self.weights, self.weights)
        nearest = torch.minimum(part, 1 - part).topk(flips, dim=-1, largest=False).indices
        for step in across.gather(-1, nearest).unbind(-1):
            mixed = torch.cat([mixed, mixed + step[..., None]], -1)
        starts, ends = self._bucket_ends(self._code(mixed), entry, rung)
        return starts, ends - starts

    def _bucket_ends(self, code: Tensor, entry: Tensor, rung: int) -> tuple[Tensor, Tensor]:
        """The range of each bucket in the flat order of the rung, `[rows, look-ups]`, for codes `[rows, tables, 2^flips]`.

        Rows come in ascending order of their batch entry; they are padded to a rectangle, one line per entry.
        """
        rows, tables, lookups = code.shape
        device = code.device
        low, high = int(entry[0]), int(entry[-1]) + 1
        per_entry = torch.bincount(entry - low, minlength=high - low)
        most = int(per_entry.amax())
        seat = (entry - low) * most + torch.arange(rows, device=device) - (per_entry.cumsum(0) - per_entry)[entry - low]
        padded = torch.zeros((high - low) * most, tables, lookups, dtype=code.dtype, device=device)
        padded[seat] = code
        wanted = padded.view(high - low, most, tables, lookups).transpose(1, 2).reshape(high - low, tables, -1).contiguous()
        base = torch.arange(low * tables, high * tables, device=device).view(-1, tables, 1) * self.length

        def flat(found: Tensor) -> Tensor:
            return (found + base).view(high - low, tables, most, lookups).transpose(1, 2).reshape(-1, tables * lookups)[seat]

        codes = self.codes[rung, low:high]
        return flat(torch.searchsorted(codes, wanted)), flat(torch.searchsorted(codes, wanted, right=True))


def _scale(limit: Tensor) -> Tensor:
    """What the coordinates of keys are divided by, `[..., 1]`."""
    return torch.where(limit > 0, limit, 1.0)[..., None]


def _ladder(nearest: Tensor, farthest: Tensor, rungs: int) -> Tensor:
    """Radii `[rungs, batch]`, a geometric sequence between two `[batch]`."""
    steps = torch.linspace(0, 1, rungs, dtype=nearest.dtype, device=nearest.device)[:, None]
    return nearest * (farthest / nearest) ** steps


def _measured_radii(scaled: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The distance of sqrt(n)/2 neighbours and the median distance, each `[batch]`.

    Both are medians over sampled keys. Distances are those of the lifted problem, with sampled keys as queries:
    ||q' - k'||^2 = 2 - 2 q.k / (||q|| R), for keys `scaled` by 1 / R.
    """
    length = scaled.shape[1]
    picked = torch.randperm(length, generator=generator, device="cpu")[:8192].to(scaled.device)
    keys = scaled[:, picked]
    queries = torch.nn.functional.normalize(keys[:, :64], dim=-1)
    cosine = torch.bmm(queries, keys.transpose(1, 2))
    distance = (2 - 2 * cosine).clamp(min=0).sqrt().sort(dim=-1).values
    # The sampled key itself comes first, and is no neighbour.
    near = min(picked.shape[0] - 1, max(1, round(math.sqrt(length) / 2 * picked.shape[0] / length)))
    typical = distance.median(1).values
    nearest, farthest = typical[:, near], typical[:, typical.shape[1] // 2]
    # Identical keys set no scale; any width will do.
    farthest = torch.where(farthest > 0, farthest, 1.0)
    return torch.minimum(torch.maximum(nearest, 1e-3 * farthest), farthest), farthest

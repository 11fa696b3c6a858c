"""Concentric locality-sensitive hashing: a ladder of radii, each with its own hash tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.index.base import PADDING, BuiltIndex
from nearfield.index.candidates import best_of_lists, row_chunks, visible_in_runs
from nearfield.index.mips import lift_keys

LOOKUPS_PER_PASS = 1 << 20
"""Bucket look-ups of one pass over some rows (8 MB per int64 table of them, of which there are about ten)."""

_INTEGERS = {"rungs": 1, "tables": 1, "flips": 0, "shells": 1}


@dataclass(frozen=True)
class ConcentricLSH:
    """k-MIPS by concentric LSH (paper, Appendix on concentric LSH; the construction of Mussmann, Levy and Ermon).

    Inner products become distances by the lift k' = [k, sqrt(R^2 - ||k||^2)], with queries rescaled to norm R (which leaves
    their ranking alone and maximises the contrast): ||q' - k'||^2 = 2 R^2 - 2 R q.k / ||q||. For each radius r of a
    geometric ladder there are `tables` tables; one table concatenates m hashes of E2LSH,

        h(x) = floor((a.x + b) / w),   a ~ N(0, I),  b ~ U[0, w),  w = width * r,

    which two points at distance w / s share with probability p(s) = 1 - 2 Phi(-s) - sqrt(2/pi)/s (1 - e^{-s^2/2}). There are
    m = ceil(log2(n)) of them: of the keys so far away that p = 1/2 a bucket then holds n 2^-m <= 1, while a near key stays in
    the query's bucket with probability p^m = n^-rho, rho = log2(1/p) < 1; tables and flips (below) repeat the attempt.

    A query climbs the ladder and stops at the first radius at which its buckets hold at least `enough * max(k, sqrt(n))`
    candidates it can see, n being the keys it sees, counted over tables, duplicates included. It scores them exactly and
    keeps the top k. Should fewer than min(k, n) be distinct it climbs on. The last rung is everything, so a row always
    gets min(k, n) keys. The radii run from the typical distance of sqrt(n)/2 neighbours to the median distance, measured on
    a sample of the keys.

    Departures from the construction, each measured to cut the candidates needed for the same recall:
    - shells: keys are split by norm into `shells` equal parts, each lifted with its own R. With a single R the added
      coordinate pushes short keys away from every query, and near and far distances hardly differ.
    - flips: besides its own bucket a query opens those across the nearest boundaries of `flips` hashes, 2^flips in all.
    - enough > 1: the first k candidates found are not yet the best.
    - The rungs share the vectors a (not the shifts b): one projection serves the ladder.
    - Keys are centred first, which shifts all scores of a query alike.

    Norms, mean and radii are taken over all keys, so in a causal search *which* visible keys a row finds depends on later
    keys too. No bound on missed keys is known: `cutoffs` is None.

    Args:
        rungs: radii of the ladder.
        tables: hash tables per radius, at most 255.
        width: w / r.
        enough: candidates that end the climb, in units of max(k, sqrt(n)).
        flips: hashes perturbed per table (multi-probe).
        shells: parts by norm.
        seed: of the hashes and the sample; the global generator is not used.

    Cost: build O(n log n tables (dim + rungs)), and 8 bytes per key, table and rung; search O(log n) per look-up, of which there
    are shells * tables * 2^flips per rung climbed, plus O(dim) per candidate.

    >>> keys = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    >>> scores, ids = ConcentricLSH().build(keys).search(keys[:, :5], k=3)
    >>> ids[0, :, 0].tolist()
    [0, 1, 2, 3, 4]
    """

    rungs: int = 6
    tables: int = 8
    width: float = 4.0
    enough: float = 4.0
    flips: int = 3
    shells: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _INTEGERS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.tables > 255:
            raise ValueError(f"tables must be at most 255, got {self.tables!r}")
        if self.flips > 8:
            raise ValueError(f"flips must be at most 8 (256 buckets per table), got {self.flips!r}")
        for name in ("width", "enough"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")

    def build(self, keys: Tensor) -> BuiltConcentricLSH:
        return BuiltConcentricLSH(keys, self)


class BuiltConcentricLSH(BuiltIndex):
    """Per rung and table, the keys sorted by (bucket, id): `codes` and `order`, both int32 `[rungs, tables, batch, length]`."""

    def __init__(self, keys: Tensor, recipe: ConcentricLSH) -> None:
        super().__init__(keys)
        batch, length, dim = self.keys.shape
        device, dtype = self.keys.device, self.keys.dtype
        self.recipe = recipe
        self.hashes = max(1, math.ceil(math.log2(max(2, length))))
        self.shells = max(1, min(recipe.shells, length))
        generator = torch.Generator().manual_seed(recipe.seed)
        shape = (recipe.tables, self.hashes)
        self.directions = torch.randn(dim + 1, *shape, generator=generator, dtype=torch.float64).to(device, dtype)
        self.shifts = torch.rand(recipe.rungs, *shape, generator=generator, dtype=torch.float64).to(device, dtype)
        # Odd multipliers of a multiply-shift hash: the bucket of a vector of integers is the high half of their weighted sum.
        self.weights = (torch.randint(-(1 << 62), 1 << 62, (self.hashes + 1,), generator=generator) * 2 + 1).to(device)
        self.codes = torch.empty(recipe.rungs, recipe.tables, batch, length, dtype=torch.int32, device=device)
        self.order = torch.empty_like(self.codes)
        if length == 0:
            return
        centred = self.keys - self.keys.mean(1, keepdim=True)
        norms = centred.norm(dim=-1)
        rank = norms.argsort(dim=1).argsort(dim=1)
        shell = rank * self.shells // length
        self.norms = torch.zeros(batch, self.shells, dtype=dtype, device=device).scatter_reduce(1, shell, norms, "amax")
        """R of each shell, `[batch, shells]`"""
        limit = self.norms.gather(1, shell)
        self.widths = recipe.width * _ladder(centred, limit, recipe.rungs, generator)
        """`[rungs, batch]`"""
        lifted = lift_keys(centred, limit)
        for table in range(recipe.tables):
            projected = lifted @ self.directions[:, table]
            for rung in range(recipe.rungs):
                cell = torch.floor(projected / self.widths[rung, :, None, None] + self.shifts[rung, table]).long()
                code = self._code((cell * self.weights[:-1]).sum(-1) + shell * self.weights[-1])
                sorted_code, order = torch.sort(code, dim=1, stable=True)
                self.codes[rung, table], self.order[rung, table] = sorted_code, order

    @staticmethod
    def _code(mixed: Tensor) -> Tensor:
        return (mixed >> 32).to(torch.int32)

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        batch, rows, _ = queries.shape
        scores = queries.new_empty(batch, rows, k)
        ids = torch.empty(batch, rows, k, dtype=torch.int64, device=queries.device)
        lookups = self.shells * self.recipe.tables << self.recipe.flips
        for entries, part in row_chunks(batch, rows, lookups, LOOKUPS_PER_PASS):
            some = queries[entries, part]
            entry = torch.arange(batch, device=queries.device)[entries, None].expand(some.shape[:2])
            best, near = self._climb(some.reshape(-1, some.shape[-1]), entry.reshape(-1), visible[entries, part].reshape(-1), k)
            scores[entries, part], ids[entries, part] = best.view(*some.shape[:2], k), near.view(*some.shape[:2], k)
        return scores, ids

    def _climb(self, queries: Tensor, entry: Tensor, visible: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Winners of the given rows `[rows, dim]`, rung by rung; a row leaves the ladder with its answer."""
        recipe, rows = self.recipe, queries.shape[0]
        scores = queries.new_full((rows, k), -torch.inf)
        ids = torch.full((rows, k), PADDING, device=queries.device)
        wanted = visible.clamp(max=k)
        enough = recipe.enough * visible.double().sqrt().clamp(min=k)
        # A row that sees no more than that may as well look at all of it.
        left, all_of = (visible > enough).nonzero().squeeze(1), (visible <= enough).nonzero().squeeze(1)
        unit = torch.nn.functional.normalize(queries, dim=-1)
        projected = torch.einsum("rd,dth->rth", unit, self.directions[:-1])
        table = torch.arange(recipe.tables, device=queries.device).repeat_interleave(self.shells << recipe.flips)
        for rung in range(recipe.rungs):
            if left.numel() == 0:
                break
            starts, counts = self._buckets(projected[left], entry[left], visible[left], rung)
            total = counts.sum(-1)
            hit = total >= enough[left]
            # More candidates than keys: the last rung is cheaper, and exact.
            dense = hit & (total >= visible[left])
            all_of = torch.cat([all_of, left[dense]])
            chosen = (hit & ~dense).nonzero().squeeze(1)
            here = left[chosen]
            order = self.order[rung].view(-1)
            best, near, found = best_of_lists(
                queries[here], self.keys, entry[here], order, starts[chosen], counts[chosen], k, table=table
            )
            done = found >= wanted[here]
            scores[here[done]], ids[here[done]] = best[done], near[done]
            stays = ~hit
            stays[chosen] = ~done
            left = left[stays]
        rest = torch.cat([all_of, left])
        first = (entry[rest] * self.length)[:, None]
        scores[rest], ids[rest], _ = best_of_lists(queries[rest], self.keys, entry[rest], None, first, visible[rest, None], k)
        return scores, ids

    def _buckets(self, projected: Tensor, entry: Tensor, visible: Tensor, rung: int) -> tuple[Tensor, Tensor]:
        """Where the buckets of each row start in the rung's order, and how many keys the row sees in them, `[rows, look-ups]`.

        `projected` `[rows, tables, hashes]` are the projections of the unit queries. Look-ups are table by table.
        """
        rows, tables, _ = projected.shape
        length, device = self.length, projected.device
        scale = self.norms[entry] / self.widths[rung, entry, None]
        position = projected[:, :, None] * scale[:, None, :, None] + self.shifts[rung][:, None]
        cell = torch.floor(position)
        part = position - cell
        mixed = (cell.long() * self.weights[:-1]).sum(-1) + torch.arange(self.shells, device=device) * self.weights[-1]
        flips = min(self.recipe.flips, self.hashes)
        across = torch.where(part < 0.5, -self.weights[:-1], self.weights[:-1])
        nearest = torch.minimum(part, 1 - part).topk(flips, dim=-1, largest=False).indices
        mixed = mixed[..., None]
        for step in across.gather(-1, nearest).unbind(-1):
            mixed = torch.cat([mixed, mixed + step[..., None]], -1)
        code = self._code(mixed).view(rows, tables, -1)
        starts, ends = self._bucket_ends(code, entry, rung)
        if bool((visible == length).all()):
            return starts, ends - starts
        return starts, visible_in_runs(self.order[rung].view(-1), starts, ends, visible[:, None])

    def _bucket_ends(self, code: Tensor, entry: Tensor, rung: int) -> tuple[Tensor, Tensor]:
        """The range of each bucket in the flat order of the rung, `[rows, look-ups]`, for codes `[rows, tables, ...]`.

        Rows come in ascending order of their batch entry; they are padded to a rectangle, one line per entry.
        """
        rows, tables, lookups = code.shape
        batch, length, device = self.keys.shape[0], self.length, code.device
        low, high = int(entry[0]), int(entry[-1]) + 1
        per_entry = torch.bincount(entry - low, minlength=high - low)
        most = int(per_entry.amax())
        seat = (entry - low) * most + torch.arange(rows, device=device) - (per_entry.cumsum(0) - per_entry)[entry - low]
        padded = torch.zeros(tables, (high - low) * most, lookups, dtype=code.dtype, device=device)
        padded[:, seat] = code.transpose(0, 1)
        sorted_codes, wanted = self.codes[rung, :, low:high], padded.view(tables, high - low, -1)
        base = (torch.arange(tables, device=device)[:, None] * batch + torch.arange(low, high, device=device)) * length
        found = [
            (torch.searchsorted(sorted_codes, wanted, right=right) + base[..., None]).view(tables, -1, lookups)[:, seat]
            for right in (False, True)
        ]
        starts, ends = (side.transpose(0, 1).reshape(rows, -1) for side in found)
        return starts, ends


def _ladder(centred: Tensor, limit: Tensor, rungs: int, generator: torch.Generator) -> Tensor:
    """Radii `[rungs, batch]`, geometric from the distance of sqrt(n)/2 neighbours to the median distance.

    Both are medians over sampled keys. Distances are those of the lifted problem, with sampled keys as queries:
    ||q' - k'||^2 = 2 R^2 - 2 R q.k / ||q||.
    """
    _, length, _ = centred.shape
    picked = torch.randperm(length, generator=generator)[:8192].to(centred.device)
    keys, limit = centred[:, picked], limit[:, picked]
    queries = torch.nn.functional.normalize(keys[:, :64], dim=-1)
    cosine = torch.bmm(queries, keys.transpose(1, 2))
    squared = (2 * limit * limit)[:, None] - 2 * limit[:, None] * cosine
    distance = squared.clamp(min=0).sqrt().sort(dim=-1).values
    # The sampled key itself comes first and is no neighbour.
    near = min(picked.shape[0] - 1, max(1, round(math.sqrt(length) / 2 * picked.shape[0] / length)))
    typical = distance.median(1).values
    nearest, farthest = typical[:, near], typical[:, typical.shape[1] // 2]
    # Identical keys have no scale of their own; any width does.
    farthest = torch.where(farthest > 0, farthest, 1.0)
    nearest = torch.minimum(torch.maximum(nearest, 1e-3 * farthest), farthest)
    steps = torch.linspace(0, 1, rungs, dtype=centred.dtype, device=centred.device)[:, None]
    return nearest * (farthest / nearest) ** steps

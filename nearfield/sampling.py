"""Samplers: Gumbel noise, categorical draws, draws without replacement, medians of means, and the seeds of a call.

Every sampler takes a `torch.Generator` and touches no global state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Uniform on (0, 1], float64. 0 is excluded so that logarithms are finite."""
    # In place: for many numbers, new memory costs as much as to fill it.
    below = torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float64)
    return torch.sub(below.new_ones(()), below, out=below)


def exponential(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard exponential, float64."""
    return -uniform(shape, generator).log()


def gumbel(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard Gumbel: density exp(-x - exp(-x)), float64.

    The paper's definition prints the distribution function in place of the density.
    """
    # An exponential of 0 would be a draw of +inf; 2^-54 is below every other value that `exponential` returns.
    return -exponential(shape, generator).clamp(min=2.0**-54).log()


def conditional_gumbel(cutoff: Tensor, generator: torch.Generator) -> Tensor:
    """Standard Gumbel given that it exceeds `cutoff`; float64, same shape.

    G = -log E with E exponential given E < exp(-cutoff), that is E = -log1p(u expm1(-exp(-cutoff))). The textbook form
    -log(-log(u)) with u rescaled returns inf, or values below the cutoff, from cutoff 36 on (15 in float32).
    """
    u = uniform(tuple(cutoff.shape), generator)
    rate = torch.exp(-cutoff.double())
    below = -torch.log1p(u * torch.expm1(-rate))
    # Where the rate underflows, the conditional law is cutoff + exponential. u = 1 gives the cutoff itself, up to rounding.
    return torch.where(rate > 1e-290, -below.clamp(min=1e-300).log(), cutoff - u.log()).clamp(min=cutoff)


def categorical(weights: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Indices drawn in proportion to each row of `weights`: `[rows, m]` -> `[rows, draws]`, O(m + draws log m).

    By cumulative sums in float64 (float32 sums are measurably wrong from some 10^6 entries on). Entries of weight zero are
    never drawn.
    """
    total = weights.double().cumsum(-1)
    point = uniform((weights.shape[0], draws), generator) * total[:, -1:]
    # Entry i has the interval (total[i-1], total[i]], which searchsorted finds with right=False. Rounding may put a point
    # above the last sum; clamp it to the last entry that has weight.
    last = weights.shape[-1] - 1 - weights.flip(-1).gt(0).int().argmax(-1, keepdim=True)
    return torch.minimum(torch.searchsorted(total, point), last)


def segmented_categorical(weights: Tensor, segment: Tensor, generator: torch.Generator) -> Tensor:
    """One draw per entry of `segment` (flat row numbers) in proportion to that row of `weights` `[rows, m]`."""
    return segmented_search(weights.double().cumsum(-1), segment, generator)


def segmented_search(sums: Tensor, segment: Tensor, generator: torch.Generator) -> Tensor:
    """`segmented_categorical` for the cumulative sums of the weights, float64."""
    rows, width = sums.shape
    # No draw asks for a row without weight, but such a row must not break the ladder.
    share = torch.where(sums[:, -1:] > 0, sums / sums[:, -1:], 1.0)
    # Row r occupies (r, r + 1] of one long ladder, so a single search serves rows with different numbers of draws.
    ladder = (share + torch.arange(rows, device=sums.device)[:, None]).reshape(-1)
    start = segment.double()
    # A uniform number so small that it vanishes in the sum would give the last entry of the row before.
    point = torch.maximum(start + uniform(tuple(segment.shape), generator), start.nextafter(start + 1))
    found = torch.searchsorted(ladder, point)
    return (found - segment * width).clamp(0, width - 1)


FEW = 32
"""Up to this many draws per row, comparing each with all earlier ones is faster than sorting."""


def without_replacement(population: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Simple random samples: row r gets min(size, population[r]) distinct numbers below population[r], in no particular order.

    Returns `[rows, size]`, int64, -1 where there is nothing left to draw. The cost of a row does not depend on its population:
    O(size^2) up to `FEW`, without waiting for a GPU, and O(size log size) beyond.
    """
    if population.shape[0] == 0 or size == 0:
        return torch.full((population.shape[0], size), -1, dtype=torch.long, device=population.device)
    return _by_comparison(population, size, generator) if size <= FEW else _by_sorting(population, size, generator)


def _by_comparison(population: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Floyd's algorithm: for each of the last `size` numbers j in turn draw from 0..j, and use j itself if that one is taken."""
    last = population - size + torch.arange(size, device=population.device)[:, None]
    picked = uniform((size, population.shape[0]), generator).mul_(last + 1).ceil_().sub_(1).long()
    # A row of fewer than `size` numbers starts below 0, where there is nothing to draw; from 0 on it uses every j.
    picked.clamp_(min=-1)
    last.clamp_(min=-1)
    for step in range(1, size):
        taken = (picked[:step] == picked[step]).any(0)
        picked[step] = torch.where(taken, last[step], picked[step])
    return picked.T.contiguous()


def _by_sorting(population: Tensor, size: int, generator: torch.Generator) -> Tensor:
    rows = population.shape[0]
    picked = torch.full((rows, size), -1, dtype=torch.long, device=population.device)
    crowded = population <= 4 * size
    small = crowded.nonzero()[:, 0]
    if len(small):
        width = max(size, int(population[small].max()))
        order = torch.rand((len(small), width), generator=generator, device=generator.device, dtype=torch.float32)
        absent = torch.arange(width, device=population.device) >= population[small, None]
        best = order.masked_fill_(absent, -1.0).topk(size, sorted=False)
        picked[small] = best.indices.masked_fill(best.values < 0, -1)
    open_rows = crowded.logical_not().nonzero()[:, 0]
    # Draw with replacement and keep a random `size` of the distinct values. By symmetry all such sets are equally likely,
    # also given that there were enough distinct values, so a row that fell short is simply drawn again.
    width = size + size // 2 + 16
    while len(open_rows):
        drawn = uniform((len(open_rows), width), generator).mul_(population[open_rows, None]).ceil_().sub_(1).long()
        drawn = drawn.sort(-1).values
        repeated = torch.zeros_like(drawn, dtype=torch.bool)
        repeated[:, 1:] = drawn[:, 1:] == drawn[:, :-1]
        order = torch.rand(drawn.shape, generator=generator, device=generator.device, dtype=torch.float32).masked_fill_(
            repeated, -1.0
        )
        best = order.topk(size, sorted=False)
        done = best.values.amin(-1) >= 0
        picked[open_rows[done]] = drawn.gather(-1, best.indices)[done]
        open_rows = open_rows[done.logical_not()]
    return picked


def skip(ranks: Tensor, taken: Tensor) -> Tensor:
    """The `ranks[r, t]`-th number that is not among `taken[r]` (ascending, distinct): `[rows, t]`, -1 stays -1.

    The j-th taken number s_j has s_j - j free numbers below it, so rank x is pushed up by the taken numbers
    with s_j - j <= x.
    """
    below = taken - torch.arange(taken.shape[-1], device=taken.device)
    pushed = ranks + torch.searchsorted(below, ranks, right=True)
    return pushed.masked_fill(ranks < 0, -1)


def hashed_uniform(seed: int, *counters: Tensor) -> Tensor:
    """A uniform number in [0, 1) for every combination of counters, always the same one.

    So a mask can be evaluated only where it is needed, in any order, in the forward and in the backward pass. The mixing
    function is the finaliser of splitmix64, once per counter.
    """
    state = torch.full((), seed, dtype=torch.long, device=counters[0].device)
    for counter in counters:
        state = _mix(state ^ _mix(counter.long() * _GOLDEN + 1))
    return _shift(state, 11).double() * 2.0**-53


def dropout_factors(p: float, dtype: torch.dtype, seed: int, *counters: Tensor) -> Tensor:
    """0 with probability p, else 1 / (1 - p): a function of seed and counters, so the backward pass sees the same ones."""
    return (hashed_uniform(seed, *counters) >= p).to(dtype) / (1.0 - p)


_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed number


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64 (>> keeps the sign)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * -4658895280553007687
    x = (x ^ _shift(x, 27)) * -7723592293110705685
    return x ^ _shift(x, 31)


def median_of_means(draws: Tensor) -> Tensor:
    """Median over groups of the mean within a group: `[..., groups, size, columns]` -> `[..., columns]`."""
    return draws.mean(-2).median(-2).values


class Seeds:
    """Seeds for the generators of one call, so that each part of it can be repeated, in any order.

    It draws a single number from the caller's generator (or from the default generator of torch), and only if something random
    is asked for.
    """

    def __init__(self, generator: torch.Generator | None, device: torch.device) -> None:
        self._generator = generator
        self._device = device
        self._drawn: Tensor | None = None
        self._part_of: tuple[Seeds, int] | None = None

    @staticmethod
    def given(seed: Tensor, device: torch.device) -> Seeds:
        """The seeds of a call that has drawn its number: see `tensor`."""
        seeds = Seeds(None, device)
        seeds._drawn = seed
        return seeds

    def part(self, number: int) -> Seeds:
        """The seeds of a part of the call that is served as a call of its own. They follow from the number of the whole."""
        seeds = Seeds(self._generator, self._device)
        seeds._part_of = self, number
        return seeds

    def tensor(self) -> Tensor:
        """`base` as a tensor: a program that torch.compile traces draws its number when it runs."""
        if self._drawn is None and self._part_of is not None:
            whole, number = self._part_of
            mixed = _mix(whole.tensor() ^ _mix(torch.tensor(number) * _GOLDEN + 1))
            self._drawn = mixed & torch.iinfo(torch.int64).max
        if self._drawn is None:
            self.check_traceable()
            device = self._generator.device if self._generator is not None else "cpu"
            high = torch.iinfo(torch.int64).max
            self._drawn = torch.randint(high, (), generator=self._generator, device=device).cpu()
        return self._drawn

    def check_traceable(self) -> None:
        """Raise where a generator would be ignored: a traced program cannot draw from one (torch.compile then runs eagerly)."""
        if self._generator is not None and torch.compiler.is_compiling():
            raise RuntimeError(
                "generator= cannot be traced by torch.compile; without fullgraph=True the call runs eagerly and honours it, "
                "with generator=None a compiled program draws from torch's default generator"
            )

    @property
    def base(self) -> int:
        return int(self.tensor())

    def generator(self, *counters: int) -> torch.Generator:
        """A new generator for the part of the work that the counters name."""
        state = torch.tensor(self.base)
        for counter in counters:
            state = _mix(state ^ _mix(torch.tensor(counter) * _GOLDEN + 1))
        return torch.Generator(self._device).manual_seed(int(state))

    def repeated(self, *counters: int, seed: int) -> torch.Generator:
        """As `generator`, on the host; where the caller gave no generator it is that of `seed`, and nothing is drawn."""
        if self._generator is not None:
            return torch.Generator().manual_seed(self.generator(*counters).initial_seed())
        return torch.Generator().manual_seed(seed)


@dataclass(frozen=True)
class Dropout:
    """The dropout of one call: the weight of a (row, key) pair is multiplied by 0 or 1 / (1 - p), and its seeds say by which.

    Whoever asks for the factor of a pair gets the same one: the forward pass, its plans, and the walks of the backward pass.
    """

    p: float
    seeds: Seeds
    """not asked before the first factor is: a call that fails before has drawn nothing"""

    def factors(self, row: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """The factors of pairs, broadcast together: rows by their `Rows.numbers`, keys by their place in `Rows.keys`."""
        return dropout_factors(self.p, dtype, self.seeds.base, row, key)


def pair_dropout(p: float, seeds: Seeds) -> Dropout | None:
    """The dropout of the call that these seeds belong to; None: nothing is dropped."""
    return Dropout(p, seeds) if p else None

"""The units of the experiment on the theory."""

from __future__ import annotations

from experiments.digest import digest
from experiments.experiment import Unit
from experiments.settings import Settings
from experiments.theory import coverage, gradients, indices, lazy, sizes, walks

SPREADS = (0.0, 1.0, 3.0)
SHARES = (1 / 1024, 1 / 64, 1 / 16, 1 / 4, 1.0)
"""At the smallest share every promise should break; otherwise its trial could never fail."""
GAPS = (0.0, 0.65, 1.3, 2.0, 3.0, 4.0, 5.0, 6.0)
PROBES = (1, 2, 4, 8, 16)


def plan(settings: Settings) -> list[Unit]:
    quick, base = settings.quick, settings.seed
    lengths = (256,) if quick else (1_024, 16_384)
    draws, trials, seeds = (100, 12, 2) if quick else (300, 400, 5)
    many, walked, few = (2_000, 4, 2) if quick else (50_000, 50, 20)
    gaps, probes = (GAPS[::3], PROBES[::3]) if quick else (GAPS, PROBES)
    walk_lengths, gradient_lengths = (x[:2] if quick else x for x in (walks.LENGTHS, gradients.LENGTHS))

    def lazy_draws(n: int, spread: float, seed: int) -> Unit:
        near = lazy.around_root(n)
        return Unit(
            f"lazy draws, n={n}, sd={spread:g}, seed={seed}",
            lambda done: [lazy.looked_at(n, k, spread, draws, base + seed) for k in near],
            digest=digest(n, spread, near, draws, lazy.DIM, lazy.QUERIES),
        )

    def promise(name: str, share: float) -> Unit:
        made = gradients.SIZES if name in coverage.GRADIENTS else coverage.SIZES
        return Unit(
            f"{name}, {share:g} of the draws",
            lambda done: [coverage.failures(name, share, trials, base)],
            digest=digest(name, share, trials, coverage.PROMISES[name].allowed, made),
        )

    def missed(gap: float) -> Unit:
        return Unit(
            f"missed key, gap={gap:g}",
            lambda done: [
                indices.missed_key(gap, certify, many, base + seed) for certify in (True, False) for seed in range(seeds)
            ],
            digest=digest(gap, many, seeds, indices.SIZES),
        )

    def lists(probe: int) -> Unit:
        return Unit(
            f"k-means index, probes={probe}",
            lambda done: [
                indices.kmeans(probe, certify, many // 2, base + seed) for certify in (True, False) for seed in range(seeds)
            ],
            digest=digest(probe, many // 2, seeds, indices.SIZES),
        )

    def query_and_key(n: int) -> Unit:
        return Unit(
            f"D^Q and D^K, n={n}",
            lambda done: [gradients.usual(n, which, form, few, base) for which in gradients.SYMBOLS for form in gradients.FORMS],
            digest=digest(n, few, gradients.FORMS, gradients.DIM, gradients.SIZES),
        )

    def gradient(n: int) -> Unit:
        return Unit(
            f"walks, n={n}",
            lambda done: [walks.usual(n, form, walked, base) for form in walks.FORMS],
            digest=digest(n, walked, walks.FORMS, walks.EPS, walks.DELTA, walks.DIM),
        )

    return [
        *(lazy_draws(n, spread, seed) for n in lengths for spread in SPREADS for seed in range(seeds)),
        *(promise(name, share) for name in coverage.PROMISES for share in SHARES),
        *(gradient(n) for n in walk_lengths),
        *(query_and_key(n) for n in gradient_lengths),
        Unit("sizes", lambda done: sizes.tail_sizes(), digest=digest(sizes.LENGTHS, sizes.EPS, sizes.DELTA)),
        *(missed(gap) for gap in gaps),
        *(lists(probe) for probe in probes),
    ]

"""The units of the experiment on the theory."""

from __future__ import annotations

from experiments.experiment import Unit
from experiments.settings import Settings
from experiments.theory.coverage import PROMISES, failures
from experiments.theory.indices import kmeans, missed_key
from experiments.theory.lazy import around_root, looked_at
from experiments.theory.sizes import tail_sizes

SPREADS = (0.0, 1.0, 3.0)
SHARES = (1 / 64, 1 / 16, 1 / 4, 1.0)
GAPS = (0.0, 0.65, 1.3, 2.0, 3.0, 4.0, 5.0, 6.0)
PROBES = (1, 2, 4, 8, 16)


def plan(settings: Settings) -> list[Unit]:
    quick, base = settings.quick, settings.seed
    lengths = (256,) if quick else (1_024, 16_384)
    draws, trials, seeds = (100, 12, 2) if quick else (300, 400, 5)
    many = 2_000 if quick else 50_000
    gaps, probes = (GAPS[::3], PROBES[::3]) if quick else (GAPS, PROBES)

    def lazy(n: int, spread: float, seed: int) -> Unit:
        return Unit(
            f"lazy draws, n={n}, sd={spread:g}, seed={seed}",
            lambda done: [looked_at(n, k, spread, draws, base + seed) for k in around_root(n)],
        )

    def promise(name: str, share: float) -> Unit:
        return Unit(f"{name}, {share:g} of the draws", lambda done: [failures(name, share, trials, base)])

    def missed(gap: float) -> Unit:
        return Unit(
            f"missed key, gap={gap:g}",
            lambda done: [missed_key(gap, certify, many, base + seed) for certify in (True, False) for seed in range(seeds)],
        )

    def lists(probe: int) -> Unit:
        return Unit(
            f"k-means index, probes={probe}",
            lambda done: [kmeans(probe, certify, many // 2, base + seed) for certify in (True, False) for seed in range(seeds)],
        )

    return [
        *(lazy(n, spread, seed) for n in lengths for spread in SPREADS for seed in range(seeds)),
        *(promise(name, share) for name in PROMISES for share in SHARES),
        Unit("sizes", lambda done: tail_sizes()),
        *(missed(gap) for gap in gaps),
        *(lists(probe) for probe in probes),
    ]

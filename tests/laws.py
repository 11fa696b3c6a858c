"""Statistical assertions. Each is wrong about a correct sampler with probability `ALPHA`; seeds are fixed, nothing is retried."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from by_hand import seeded as seeded
from scipy import stats
from torch import Tensor

ALPHA = 1e-6
Z = float(stats.norm.isf(ALPHA / 2))


def assert_follows(sample: Tensor, cdf: Callable[[np.ndarray], np.ndarray]) -> None:
    """Kolmogorov-Smirnov."""
    p = stats.kstest(sample.double().reshape(-1).numpy(), cdf).pvalue
    assert p > ALPHA, f"Kolmogorov-Smirnov p = {p:.2g}"


def assert_uniform(sample: Tensor) -> None:
    assert_follows(sample, stats.uniform.cdf)


def assert_frequencies(counts: Tensor, probabilities: Tensor) -> None:
    """Chi-square; categories of probability zero must be empty, those expected fewer than ten times are taken together."""
    counts, probabilities = counts.double().reshape(-1), probabilities.double().reshape(-1)
    assert counts.shape == probabilities.shape
    assert float(counts[probabilities == 0].sum()) == 0, "an impossible category was drawn"
    expected = probabilities / probabilities.sum() * counts.sum()
    rare = expected < 10
    observed, expected = (torch.cat([x[~rare], x[rare].sum(0, keepdim=True)]) for x in (counts, expected))
    observed, expected = observed[expected > 0], expected[expected > 0]
    if len(observed) == 1:
        return
    p = stats.chisquare(observed.numpy(), (expected * (observed.sum() / expected.sum())).numpy()).pvalue
    assert p > ALPHA, f"chi-square p = {p:.2g} over {len(observed)} categories"


def assert_mean(sample: Tensor, expected: Tensor | float) -> None:
    """z-test of every column of `[replicates, ...]`, with the union bound over the columns."""
    sample = sample.double()
    expected = torch.as_tensor(expected, dtype=torch.float64)
    error = sample.std(0) / len(sample) ** 0.5
    columns = max(1, sample[0].numel())
    limit = float(stats.norm.isf(ALPHA / 2 / columns))
    gap = (sample.mean(0) - expected).abs()
    # A column without any spread must be exact, up to rounding.
    z = gap / (error + 1e-9 * expected.abs() + 1e-12)
    assert float(z.max()) < limit, f"the mean is {float(z.max()):.1f} standard errors off (limit {limit:.1f})"


def total_variation(counts: Tensor, probabilities: Tensor) -> float:
    counts = counts.double()
    return float((counts / counts.sum() - probabilities / probabilities.sum()).abs().sum() / 2)

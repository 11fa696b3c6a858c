"""How large everything is: GPT-2 XL on a GPU, a small relative of it on a CPU, a tiny one to see that everything runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.settings import Settings

WINDOW = 1_024
"""Positions that GPT-2 was trained with."""
PAPERS_GPU = 48
"""Gigabytes of the GPU that the paper trained on, an L40."""


@dataclass(frozen=True)
class Shape:
    name: str
    width: int
    layers: int
    heads: int
    words: int
    """of the vocabulary"""


@dataclass(frozen=True)
class Tuning:
    """Of a model with real weights."""

    n: int
    steps: int
    held_out: int
    """windows of n tokens that are read before and after"""
    rate: float = 3e-5


@dataclass(frozen=True)
class Size:
    shape: Shape
    contexts: tuple[int, ...]
    longest: Mapping[str, int]
    """the last context of a method that does not go through all of them"""
    curves: Mapping[int, int]
    """steps of the loss curves, by context"""
    tuning: Tuning
    sampled: int
    """tokens of a sample"""
    rate: float = 1e-4
    """of learning, from random weights"""
    stored: int = WINDOW
    """the last context at which training keeps all activations; beyond, layers are computed again in the backward pass"""


XL = Size(
    Shape("GPT-2 XL", 1_600, 48, 25, 50_257),
    (1_024, 4_096, 8_192, 16_384, 32_768, 65_536),
    {"naive": 4_096, "topk": 4_096},
    {1_024: 60, 8_192: 30},
    Tuning(4_096, 40, 8),
    sampled=64,
)
SMALL = Size(
    Shape("a small GPT-2", 256, 4, 4, 256),
    (512, 1_024, 2_048),
    {"naive": 1_024, "topk": 1_024},
    {1_024: 24},
    Tuning(1_024, 6, 2),
    sampled=96,
    rate=5e-4,
)
TINY = Size(
    Shape("a tiny GPT-2", 32, 2, 4, 256),
    (128, 256),
    {"naive": 128, "topk": 128},
    {256: 3},
    Tuning(256, 2, 1),
    sampled=8,
    rate=1e-3,
    stored=128,
)


def size_of(settings: Settings) -> Size:
    return TINY if settings.quick else SMALL if settings.device == "cpu" else XL

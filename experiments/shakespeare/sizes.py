"""How large everything is: the model, the text it reads at a time, how long it is trained."""

from __future__ import annotations

from dataclasses import dataclass, field

SECONDS, SECONDS_ON_GPU = 300.0, 600.0
"""A unit that takes longer stops there, and says so. On a GPU all of them are done by then."""


@dataclass(frozen=True)
class Sizes:
    """The model and its training; the defaults are nanoGPT's for Shakespeare in characters."""

    context: int
    batch: int
    iterations: int
    interval: int
    """iterations from one evaluation to the next"""
    methods: tuple[str, ...]
    layers: int = 6
    heads: int = 6
    width: int = 384
    dropout: float = 0.2
    rotary: bool = False
    """positions turn queries and keys, and are not learned: in a long window, a place is seen too rarely to be learned"""
    warm_up: int = 100
    """iterations in which the learning rate rises"""
    evaluated: int = 7
    """batches of windows, evenly spaced, that a perplexity is taken over: at the full sizes about all of the validation text"""
    written: int = 224
    """characters of the sample; it continues a prompt that fills the rest of the context"""
    seconds: float = SECONDS
    only_used: tuple[str, ...] = field(default=(), repr=False)
    """methods that a model trained with exact attention is used with, and none is trained with"""
    seeds: int = field(default=3, repr=False)
    """how often everything is trained, each time with the next seed; not shown, for a unit is about one of them"""


SHORT = ("exact", "topk-5", "topk", "tail", "cells")
LONG = (*SHORT, "cells-default")
ON_GPU = (
    Sizes(256, 64, 5000, 250, SHORT, seconds=SECONDS_ON_GPU),
    Sizes(4096, 4, 1500, 150, LONG, rotary=True, seconds=SECONDS_ON_GPU),  # as many characters in a step
)
ON_CPU = (
    # On a CPU, cells of so few keys are nearly all overhead: 2,000 steps would take hours.
    Sizes(
        64, 12, 2000, 100, SHORT[:-1], only_used=("cells",), layers=4, heads=4, width=128, dropout=0.0, evaluated=4, written=40
    ),
    Sizes(1024, 1, 500, 50, LONG, layers=4, heads=4, width=128, dropout=0.0, rotary=True, evaluated=4),
)
"""As nanoGPT does without a GPU."""
QUICK = (
    Sizes(64, 2, 8, 4, SHORT[:-1], layers=2, heads=1, width=32, warm_up=4, evaluated=2, written=16, seeds=2),
    Sizes(144, 2, 8, 4, LONG[:-1], layers=2, heads=1, width=32, rotary=True, warm_up=4, evaluated=2, written=16, seeds=1),
)

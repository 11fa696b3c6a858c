"""Problems for the cells engine, each described by a few words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from by_hand import QKV, inputs, seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells import sizes as cells_sizes

PADDED = {"batch": 3, "kv_heads": 2}
"""Entries of different length, the second one without any key."""
FIELDS = {field.name for field in dataclasses.fields(nf.Cells)}


def problem(case: dict[str, Any], dtype: torch.dtype) -> tuple[QKV, Tensor | None]:
    batch, kv_heads, keys = case.get("batch", 1), case.get("kv_heads", 1), case.get("keys") or case.get("queries", 100)
    q, k, v = inputs(
        batch, kv_heads * case.get("group", 1), queries=case.get("queries", 100), keys=keys, dim=case.get("dim", 8),
        value_dim=case.get("value_dim"), kv_heads=kv_heads, dtype=dtype, seed=4,
    )  # fmt: skip
    if "kind" in case:
        places = {"few-places": 3, "duplicates": keys // 4, "identical": 1}[case["kind"]]
        k = k[:, :, torch.randint(places, (keys,), generator=seeded(1))]
    lengths = torch.tensor([keys - 9, 0, keys // 2])[:, None, None, None]
    position = torch.arange(keys)
    masks = {
        "right": (position < lengths),
        "left": (position >= keys - lengths),
        "anywhere": (torch.rand(3, 1, 1, keys, generator=seeded(2)) < 0.6) & (lengths > 0),
    }
    return (q * case.get("spread", 1.0), k, v), masks.get(case.get("mask", ""))


def method_of(case: dict[str, Any]) -> nf.Cells:
    options = {"cell_size": 8, "probes": 2, "segment": 16, "sinks": 3} | {x: y for x, y in case.items() if x in FIELDS}
    return nf.Cells(**options)


@contextmanager
def span_levels_at_most(levels: int | None) -> Iterator[None]:
    """Spans of at most so many different lengths; None: as many as the library has."""
    with pytest.MonkeyPatch.context() as patch:
        if levels is not None:
            patch.setattr(cells_sizes, "MOST_SPAN_LEVELS", levels)
        yield

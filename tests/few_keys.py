"""Sizes of a cache for tests with few keys: segments and cells grow after a few of them."""

from __future__ import annotations

import pytest

from nearfield.cells import sizes


def few_keys(monkeypatch: pytest.MonkeyPatch, segment: int = 16, end_multiple: int = 4) -> None:
    """Segments of so many keys at first, in cells of four, grouped from the first one on."""
    small = {"SEGMENT": segment, "FIXED_SEGMENTS": 2, "GROUP_FROM": 0, "GROUP_FROM_ON_GPU": 0, "CELL_SIZE": 4}
    for name, size in {**small, "END_MULTIPLE": end_multiple}.items():
        monkeypatch.setattr(sizes, name, size)

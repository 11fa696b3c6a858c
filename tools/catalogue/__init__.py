"""The known ways to break the package, area by area."""

from __future__ import annotations

from catalogue import (
    cache,
    calibrate,
    cells,
    chat,
    commands,
    dropin,
    examples,
    indices,
    masks,
    methods,
    peers,
    pilot,
    ready,
    stores,
    theory,
    triton,
)
from catalogue.mutant import Mutant

AREAS = (
    methods,
    masks,
    indices,
    stores,
    cells,
    triton,
    ready,
    cache,
    calibrate,
    commands,
    chat,
    pilot,
    theory,
    dropin,
    peers,
    examples,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for area in AREAS for mutant in area.MUTANTS)

__all__ = ["MUTANTS", "Mutant"]

"""The known ways to break the package, area by area."""

from __future__ import annotations

from catalogue import (
    by_queries,
    cache,
    calibrate,
    cells,
    chat,
    commands,
    distributed,
    distributed_store,
    dropin,
    examples,
    indices,
    masks,
    methods,
    min_weight,
    pages,
    peers,
    pilot,
    ready,
    stores,
    theory,
    triton,
    tuning,
)
from catalogue.mutant import Mutant

AREAS = (
    methods,
    masks,
    indices,
    stores,
    cells,
    by_queries,
    triton,
    ready,
    cache,
    min_weight,
    calibrate,
    commands,
    tuning,
    chat,
    pilot,
    theory,
    distributed,
    dropin,
    peers,
    examples,
    distributed_store,
    pages,
)
MUTANTS: tuple[Mutant, ...] = tuple(mutant for area in AREAS for mutant in area.MUTANTS)

__all__ = ["MUTANTS", "Mutant"]

"""The known ways to break the package, area by area."""

from __future__ import annotations

from catalogue import cache, calibrate, cells, indices, methods, ready, triton
from catalogue.mutant import Mutant

MUTANTS = methods.MUTANTS + indices.MUTANTS + cells.MUTANTS + triton.MUTANTS + ready.MUTANTS + cache.MUTANTS + calibrate.MUTANTS

__all__ = ["MUTANTS", "Mutant"]

"""A key-value cache that retrieves: closed segments live in cells, and a step reads the cells it opens and the moments of all."""

from __future__ import annotations

from nearfield.cells.cache.graph import StepGraph
from nearfield.cells.cache.store import CellStore, StepError

__all__ = ["CellStore", "StepError", "StepGraph"]

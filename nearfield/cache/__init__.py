"""A key-value cache that retrieves: closed segments live in cells, and a step reads the cells it opens and the moments of all."""

from nearfield.cache.errors import StepError
from nearfield.cache.graph import StepGraph
from nearfield.cache.store import CellStore

__all__ = ["CellStore", "StepError", "StepGraph"]

"""nearfield: kNN attention for PyTorch that trains, and tells you its error."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

from nearfield import _moved, nn, synthetic
from nearfield.attention import attention, estimate
from nearfield.audit import audit_rows
from nearfield.auto import Auto
from nearfield.cells.method import Cells
from nearfield.cells.partition import Partition
from nearfield.cells.partition.equal import Blocks, HashBuckets
from nearfield.cells.partition.kmeans import KMeans
from nearfield.exact import Exact
from nearfield.knn import index
from nearfield.knn.index.base import BuiltIndex, Index
from nearfield.knn.index.cells import CellIndex
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.faiss import FaissIndex
from nearfield.knn.index.kmeans import KMeansIndex
from nearfield.knn.index.lsh import ConcentricLSH
from nearfield.knn.index.lsh_theory import LSHBudget, lsh_budget
from nearfield.knn.needed import needed_k
from nearfield.knn.topk import TopK
from nearfield.merge import merge
from nearfield.paper import gradients
from nearfield.paper.budgets import Budget, budget
from nearfield.paper.gumbel import LazyGumbel
from nearfield.paper.sample import sample
from nearfield.plans import Explanation, explain, explain_sizes, plan
from nearfield.problem import Call, Method, Problem
from nearfield.results import Audit, Estimate, Outcome, Samples
from nearfield.varlen import attention_varlen

if TYPE_CHECKING:
    from nearfield import distributed as distributed
    from nearfield import hf as hf

__version__ = "0.2.0"

WHEN_ASKED = ("distributed", "hf")

__all__ = [
    "Audit",
    "Auto",
    "Blocks",
    "Budget",
    "BuiltIndex",
    "Call",
    "CellIndex",
    "Cells",
    "ConcentricLSH",
    "Estimate",
    "Exact",
    "ExactIndex",
    "Explanation",
    "FaissIndex",
    "HashBuckets",
    "Index",
    "KMeans",
    "KMeansIndex",
    "LSHBudget",
    "LazyGumbel",
    "Method",
    "Outcome",
    "Partition",
    "Problem",
    "Samples",
    "TopK",
    "attention",
    "attention_varlen",
    "audit_rows",
    "budget",
    "estimate",
    "explain",
    "explain_sizes",
    "gradients",
    "index",
    "lsh_budget",
    "merge",
    "needed_k",
    "nn",
    "plan",
    "sample",
    "synthetic",
]

_moved.redirect()


def __getattr__(name: str) -> ModuleType:
    """Two packages are imported when they are asked for, and so are modules under their names of version 0.1."""
    return importlib.import_module(f"nearfield.{name}") if name in WHEN_ASKED else _moved.attribute(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *WHEN_ASKED})

"""nearfield: kNN attention for PyTorch that trains, and tells you its error."""

from nearfield import gradients, nn
from nearfield.attention import attention, estimate
from nearfield.budgets import Budget, audit_rows, budget
from nearfield.estimate import Audit, Estimate
from nearfield.index.exact import ExactIndex
from nearfield.index.faiss import FaissIndex
from nearfield.index.kmeans import KMeansIndex
from nearfield.index.lsh import ConcentricLSH
from nearfield.methods.auto import Auto
from nearfield.methods.cells import Cells
from nearfield.methods.exact import Exact
from nearfield.methods.gumbel import LazyGumbel
from nearfield.methods.topk import TopK
from nearfield.partition import Blocks, HashBuckets, KMeans

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Auto",
    "Blocks",
    "Budget",
    "Cells",
    "ConcentricLSH",
    "Estimate",
    "Exact",
    "ExactIndex",
    "FaissIndex",
    "HashBuckets",
    "KMeans",
    "KMeansIndex",
    "LazyGumbel",
    "TopK",
    "attention",
    "audit_rows",
    "budget",
    "estimate",
    "gradients",
    "nn",
]

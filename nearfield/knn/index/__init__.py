"""Indices: which k keys have the largest inner product with a query?

`base` has the contract, `own` checks your own index. `exact` scores every key, `kmeans` and `lsh` score candidates, `cells`
those of `Cells`, `faiss` wraps Faiss. `lsh_theory` has the sizes that hashing needs for a promise. `candidates` finds the best of
listed keys; `prefixes` makes an index that learns from its keys causal, and lets it grow; `file` is the format in which an index
is saved, and `loaded` reads it; `missed` measures what an index leaves out.
"""

from nearfield.knn.index.base import PADDING, BuiltIndex, Cutoffs, Index, Searchable, gathered_scores
from nearfield.knn.index.cells import CellIndex
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.faiss import FaissIndex
from nearfield.knn.index.kmeans import KMeansIndex
from nearfield.knn.index.loaded import BUILT_IN, load
from nearfield.knn.index.lsh import ConcentricLSH
from nearfield.knn.index.missed import Slack, slack
from nearfield.knn.index.own import build_index

__all__ = [
    "BUILT_IN",
    "PADDING",
    "BuiltIndex",
    "CellIndex",
    "ConcentricLSH",
    "Cutoffs",
    "ExactIndex",
    "FaissIndex",
    "Index",
    "KMeansIndex",
    "Searchable",
    "Slack",
    "build_index",
    "gathered_scores",
    "load",
    "slack",
]

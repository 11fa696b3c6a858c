"""Indices: which k keys have the largest inner product with a query?

`base` has the contracts, for built-in indices and for your own. `exact` scores every key, `kmeans` and `lsh` score candidates,
`faiss` wraps Faiss. `candidates` finds the best of listed keys; `prefixes` makes an index that learns from its keys causal;
`missed` measures what an index leaves out.
"""

from nearfield.knn.index.base import PADDING, BuiltIndex, Cutoffs, Index, Searchable, gathered_scores
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.faiss import FaissIndex
from nearfield.knn.index.kmeans import KMeansIndex
from nearfield.knn.index.lsh import ConcentricLSH
from nearfield.knn.index.missed import Slack, slack

BUILT_IN: dict[str, type] = {kind.__name__: kind for kind in (ExactIndex, KMeansIndex, ConcentricLSH, FaissIndex)}

__all__ = [
    "BUILT_IN",
    "PADDING",
    "BuiltIndex",
    "ConcentricLSH",
    "Cutoffs",
    "ExactIndex",
    "FaissIndex",
    "Index",
    "KMeansIndex",
    "Searchable",
    "Slack",
    "gathered_scores",
    "slack",
]

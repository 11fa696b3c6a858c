"""Partitions: who lives together? Each one groups keys into cells."""

from __future__ import annotations

from nearfield.partition.blocks import Blocks
from nearfield.partition.hashing import HashBuckets
from nearfield.partition.kmeans import KMeans

BY_NAME: dict[str, type[KMeans] | type[Blocks] | type[HashBuckets]] = {
    kind.__name__: kind for kind in (KMeans, Blocks, HashBuckets)
}
"""Operators take plain numbers and words: a partition travels as its name and its fields."""

"""kNN attention: top-k, and the indices that find the keys."""

"""kNN attention: `topk` is the method, `index` has the indices that find its keys."""

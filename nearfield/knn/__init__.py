"""kNN attention: `topk` is the method, `index` has the indices that find its keys.

`tail` has the sizes that a promise asks for, `needed` the k that each row needs.
"""

"""The paper's own algorithms.

`budgets`: the sizes that its theorems ask for. `lazy`: exact draws from the softmax of a row without scoring every key.
`gumbel`: the method `LazyGumbel`, attention from such draws. `walks`: Monte-Carlo gradients, shared and as printed.
`gradients`: the public functions and strategies for gradients, and the exact formulas.
"""

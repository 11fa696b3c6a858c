"""Kernels in Triton. First of all the cells engine, forward and backward, held to the reference by tests/test_triton.py.

`Cells` takes it on CUDA cards of compute capability 9.0 or later, where it serves a call; see docs/gpu.md. A file is a pass:
cells are made (`assign`, `limit`, `sort`, `tables`), chosen (`route`) and attended to (`local`, `far`, `group`, `near`, `merge`),
and the same backwards (`rows`, `mark`, `local_queries`, `local_backward`, `near_backward`, `far_queries`, `far_cells`, `spread`).
`cells_gpu` and `cells_gpu_backward` start them one after the other, and no number goes back to the host.

`decode` and `choose` serve one new token of a cell cache, `pairs` the methods that attend to a list of keys per row.
"""

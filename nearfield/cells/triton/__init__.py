"""The cells engine in Triton, for GPUs.

forward, backward    what to launch, on what, in which order
layout               where spans and cells are, by shape alone
cluster              which key is in which cell: k-means, a limit to the size of cells, keys sorted by cell
moments              what is known of each cell, and its gradients
far_field            the formula: score, boost, mass and derivative of a cell
route                which cells a row opens
local, near, far     attention to keys seen one by one, to keys of opened cells, to closed cells; and the gradients
decode               one step of a cache
memory, tuning       how work is cut to fit; block sizes by card
limits               what the kernels do not serve
"""

"""The cells engine in Triton, for GPUs.

forward, backward    what to launch, on what, in which order
layout               where spans and cells are, by shape alone
cluster              which key is in which cell: k-means, a limit to the size of cells, keys sorted by cell
moments              what is known of each cell, and its gradients
far_field            the formula: score, boost, mass and derivative of a cell
route, share         which cells a row opens, or a block of rows together
order                which rows are a block, where there is no mask
attend               attention to all but the cells that a row opened; to everything, for a block of rows
near                 attention to the keys of opened cells, cell by cell, and its gradients
local, far           gradients of attention to keys seen one by one, and to closed cells
merge_two            results of the same rows over two sets of keys, as one
decode               one step of a cache
resident             which offloaded cells are on the card
memory               how work is cut to fit
tiles, tuning        block sizes, and those of a card
candidates           which block sizes are right, and worth a try
measured             what the user has found on a card
limits               what the kernels do not serve
"""

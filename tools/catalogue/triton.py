"""Breaks of the cells engine in Triton."""

from __future__ import annotations

from catalogue.mutant import Mutant

PARITY = "test_triton.py::test_kernels_compute_what_the_reference_says"
BEST = "test_triton.py::test_the_best_cells_are_opened"
MANY = "test_triton.py::test_of_many_cells_nearly_all_of_the_best_are_opened"
ALIKE = "test_triton.py::test_keys_that_are_alike_do_not_share_one_cell"
GROUPED = "test_triton_paths.py::test_heads_grouped_together_and_computed_in_turn"
LATER = "test_triton_paths.py::test_earlier_rows_have_gradients_whatever_follows"

MUTANTS = (
    Mutant(
        "triton: opened cells also in the far field",
        "kernels/triton/far.py",
        "power = tl.where(taken, 0.0, power * (boost * boost))",
        "power = power * (boost * boost)",
        (PARITY,),
    ),
    Mutant(
        "triton: number of keys missing in the mass of a cell",
        "kernels/triton/far.py",
        "logit = first * (scale * LOG2E) + count[None, :]",
        "logit = first * (scale * LOG2E) + tl.minimum(count, 0.0)[None, :]",
        (PARITY,),
    ),
    Mutant(
        "triton: second order missing in the mass of a cell",
        "kernels/triton/far.py",
        "boost = 1.0 + 0.25 * tl.minimum(spread, MOST)",
        "boost = 1.0 + 0.0 * tl.minimum(spread, MOST)",
        (PARITY,),
    ),
    Mutant(
        "triton: values of far cells not tilted",
        "kernels/triton/far.py",
        "total += tl.where(mine[:, None], (far * scale)[:, None] * tilt, 0.0)",
        "total += 0.0 * tilt",
        (PARITY,),
    ),
    Mutant(
        "triton: covariance pooled over all spans",
        "kernels/triton/tables.py",
        "cross = torch.matmul(layout.seen_chunks(CHUNK), found.flatten(2))",
        "cross = torch.matmul(torch.ones_like(layout.seen_chunks(CHUNK)), found.flatten(2))",
        (PARITY,),
    ),
    Mutant(
        "triton: keys beyond the end of a cell are near",
        "kernels/triton/near.py",
        'product = tl.where(real[None, :], tl.dot(query, key, input_precision=IP), -float("inf"))',
        "product = tl.dot(query, key, input_precision=IP)",
        (PARITY,),
    ),
    Mutant(
        "triton: far field forgotten when parts are merged",
        "kernels/triton/merge.py",
        "mass = tl.exp2(closed - base)",
        "mass = 0.0 * tl.exp2(closed - base)",
        (PARITY,),
    ),
    Mutant(
        "triton: sinks also live in cells",
        "kernels/cells_gpu.py",
        "cell_of[:, :, : settings.sinks] = -1",
        "pass",
        (PARITY,),
    ),
    Mutant(
        "triton: sinks of a row's own segment counted twice",
        "kernels/triton/local.py",
        "(ahead == (position[None, :] < local[:, None]))",
        "(ahead | (position[None, :] >= local[:, None]))",
        (PARITY,),
    ),
    Mutant(
        "triton: a row sees the key after its own",
        "kernels/triton/local.py",
        "seen = real[None, :] & (position[None, :] < sees[:, None])",
        "seen = real[None, :] & (position[None, :] <= sees[:, None])",
        (PARITY,),
    ),
    Mutant(
        "triton: a row sees its own segment closed once it is full",
        "kernels/triton/route.py",
        "own = (visible - 1) // segment",
        "own = visible // segment",
        (PARITY,),
    ),
    Mutant(
        "triton: routing without the spread of logits",
        "kernels/triton/route.py",
        "score = first * scale + (spread * tl.rsqrt(spread) + none[None, :])",
        "score = first * scale + none[None, :]",
        (BEST,),
    ),
    Mutant(
        "triton: routing of few probes takes a cell again",
        "kernels/triton/route.py",
        "best = tl.where(gone, second, best)",
        "best = tl.where(gone, best, best)",
        (BEST,),
    ),
    Mutant(
        "triton: routing of many probes lists one cell too few",
        "kernels/triton/route.py",
        "taken = taken & (slot < probes)",
        "taken = taken & (slot < probes - 1)",
        (MANY,),
    ),
    Mutant(
        "triton: cells without a limit to their size",
        "kernels/cells_gpu.py",
        "    limit_sizes(cell_of, layout)\n",
        "",
        (ALIKE,),
    ),
    Mutant(
        "triton: backward: opened cells also in the far field of queries",
        "kernels/triton/far_queries.py",
        "weight = tl.where(taken, 0.0, tl.exp2(logit) * (boost * boost))",
        "weight = tl.exp2(logit) * (boost * boost)",
        (PARITY,),
    ),
    Mutant(
        "triton: backward: opened cells also in the far field of cells",
        "kernels/triton/far_cells.py",
        "weight = tl.where((taken != 0) | (there == 0)[None, :], 0.0, weight)",
        "weight = tl.where((there == 0)[None, :], 0.0, weight)",
        (PARITY,),
    ),
    Mutant(
        "triton: backward: columns taken to begin with a word",
        "kernels/triton/far_cells.py",
        "by = here % 32",
        "by = here * 0",
        (PARITY,),
    ),
    Mutant(
        "triton: backward: every key gets the whole gradient of a mean",
        "kernels/triton/spread.py",
        "share = 1.0 / tl.load(size + cell, mask=inside, other=1.0)",
        "share = 1.0 / tl.minimum(tl.load(size + cell, mask=inside, other=1.0), 1.0)",
        (PARITY,),
    ),
    Mutant(
        "triton: backward: half the gradient of a variance",
        "kernels/triton/spread.py",
        "own += 2.0 * tl.load(variance_grad + at, mask=load, other=0.0) * off_key",
        "own += tl.load(variance_grad + at, mask=load, other=0.0) * off_key",
        (PARITY,),
    ),
    Mutant(
        "triton: backward: gradients of keys all go to the first entry",
        "kernels/triton/near_backward.py",
        "place = entry * length + position",
        "place = position",
        (PARITY,),
    ),
    Mutant(
        "triton: hidden keys live in cells",
        "kernels/cells_gpu.py",
        "cell_of.masked_fill_(beyond[:, None], -1)",
        "pass",
        (PARITY,),
    ),
    Mutant(
        "triton: k-means without iterations",
        "kernels/triton/assign.py",
        "moving.step(turn)",
        "pass",
        ("test_triton.py::test_cells_are_as_tight_as_on_a_cpu",),
    ),
    Mutant(
        "triton: the last head of a part is left out",
        "kernels/triton/near.py",
        "if (begin >= end) | (cell >= beyond * cells):",
        "if (begin >= end) | (cell >= (beyond - 1) * cells):",
        (GROUPED,),
    ),
    Mutant(
        "triton: results of later heads where those of the first belong",
        "kernels/triton/near.py",
        "own = own.to(tl.int64) - first_entry.to(tl.int64) * rows * SLOTS",
        "own = (own.to(tl.int64) - first_entry.to(tl.int64) * rows * SLOTS) * (first_entry == 0)",
        (GROUPED,),
    ),
    Mutant(
        "triton: rows of a block take gradients from cells that they do not see",
        "kernels/triton/far_queries.py",
        "mine = (closed == past) & there",
        "mine = (closed >= past) & there",
        (PARITY,),
    ),
    Mutant(
        "triton: later keys that are not finite in the gradient of queries",
        "kernels/triton/local_queries.py",
        "key = tl.where(key.to(tl.float32) * 0.0 == 0.0, key, 0.0).to(key.dtype)",
        "key = key.to(key.dtype)",
        (LATER,),
    ),
    Mutant(
        "triton: large cells cut by odd and even",
        "kernels/triton/limit.py",
        "part = (mixed % (count + 1)).to(tl.int32)",
        "part = (lane % length % (count + 1)).to(tl.int32)",
        ("test_triton_paths.py::test_cells_of_equal_keys_at_equal_distances_are_cut",),
    ),
    Mutant(
        "triton: heads that share keys are one head",
        "kernels/triton/local.py",
        "return (number // per_head).to(tl.int64) * positions + position, position < positions",
        "return (number // per_head).to(tl.int64) * 0 + position, position < positions",
        ("test_triton_paths.py::test_blocks_of_rows_belong_to_one_head",),
    ),
    Mutant(
        "triton: a kernel compiled for one grid serves another",
        "kernels/triton/launch.py",
        "key = (device, grid, *constants.items(), *same)",
        "key = (device, *constants.items(), *same)",
        ("test_triton_paths.py::test_a_call_that_was_made_before_is_not_compiled_again",),
    ),
    Mutant(
        "triton: a kernel compiled for aligned tensors serves others",
        "kernels/triton/launch.py",
        "same = [(x.dtype, x.data_ptr() & 15) if type(x) is Tensor else x for x in arguments]",
        "same = [(x.dtype, 0) if type(x) is Tensor else x for x in arguments]",
        ("test_triton_paths.py::test_tensors_of_another_dtype_or_alignment_are_another_call",),
    ),
)

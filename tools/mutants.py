"""Break the package in known ways, one at a time, and see that the tests notice.

Each mutant is a textual change. It is made in a temporary copy of the package, and the tests that should notice are run there
until the first failure. A mutant that no test notices has survived; that is an error of the test suite, and the exit status is 1.

    make mutants                                    # all of them
    python tools/mutants.py --only causal --jobs 2  # those whose name contains "causal"
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("nearfield", "tests", "benchmarks", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
TIME_LIMIT = 600

FAILED = 1
"""pytest's exit status when tests ran and some failed. Any other one but 0 says that they could not be run as asked."""


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    """below `nearfield/`"""
    old: str
    """must occur exactly once"""
    new: str
    tests: tuple[str, ...]
    """what should notice: arguments of pytest, below `tests/`"""

    def apply(self, source: str) -> str:
        count = source.count(self.old)
        if count != 1:
            raise SystemExit(
                f"mutant {self.name!r}: the text to replace occurs {count} times in nearfield/{self.file}:\n{self.old}"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    status: int
    noticed_by: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.status == FAILED


MUTANTS = (
    Mutant(
        "tail drawn with replacement",
        "methods/topk.py",
        "ranks = without_replacement(left_out.reshape(-1), self.tail, generator)",
        "ranks = (torch.rand(left_out.numel(), self.tail, generator=generator) * left_out.reshape(-1, 1)).long()",
        ("test_topk.py",),
    ),
    Mutant(
        "repeated numbers kept in a sample without replacement",
        "sampling.py",
        "repeated[:, 1:] = drawn[:, 1:] == drawn[:, :-1]",
        "repeated[:, 1:] = False",
        ("test_sampling.py",),
    ),
    Mutant(
        "lazy Gumbel: keys drawn with replacement",
        "lazy_gumbel.py",
        "first[1:] = pair[1:] != pair[:-1]",
        "first[1:] = True",
        ("test_lazy_gumbel.py",),
    ),
    Mutant(
        "smallest near score used as the bound of unopened cells",
        "index/kmeans.py",
        "bound = torch.where(hits > 0, smallest[entries, part, None], bound)",
        "bound = smallest[entries, part, None].expand_as(bound)",
        ("test_lazy_gumbel.py",),
    ),
    Mutant(
        "log weight of drawn keys missing",
        "kernels/reference.py",
        "shifted = logits if log_weight is None else logits + log_weight",
        "shifted = logits",
        ("test_topk.py",),
    ),
    Mutant(
        "n for n - k in the weight of the tail",
        "methods/topk.py",
        "weight = (left_out.to(logits.dtype) / count.clamp(min=1))",
        "weight = (rows.visible.to(logits.dtype) / count.clamp(min=1))",
        ("test_topk.py",),
    ),
    Mutant(
        "scale omitted",
        "problem.py",
        "(self.query.to(self.compute_dtype) * self.scale)",
        "self.query.to(self.compute_dtype)",
        ("test_gumbel.py::test_scale", "test_topk.py"),
    ),
    Mutant(
        "scale applied twice",
        "problem.py",
        "(self.query.to(self.compute_dtype) * self.scale)",
        "(self.query.to(self.compute_dtype) * self.scale * self.scale)",
        ("test_gumbel.py::test_scale", "test_topk.py"),
    ),
    Mutant(
        "scale missing from the gradient of the queries",
        "gradients/__init__.py",
        "(grads.query * problem.scale)",
        "grads.query",
        ("test_gradients.py",),
    ),
    Mutant(
        "softmax over the wrong dimension",
        "gradients/exact.py",
        "masked_fill(hidden, -torch.inf).softmax(-1)",
        "masked_fill(hidden, -torch.inf).softmax(-2)",
        ("test_gradients.py",),
    ),
    Mutant(
        "causal off by one: a row sees the next key",
        "problem.py",
        "visible = (position + 1).clamp(max=length)",
        "visible = (position + 2).clamp(max=length)",
        ("test_gumbel.py::test_matches_exact_attention_within_the_promise", "test_topk.py"),
    ),
    Mutant(
        "causal off by one: a row misses its own key",
        "problem.py",
        "visible = (position + 1).clamp(max=length)",
        "visible = position.clamp(max=length)",
        ("test_gumbel.py::test_matches_exact_attention_within_the_promise", "test_topk.py"),
    ),
    Mutant(
        "causal off by one in an index",
        "index/base.py",
        "return (last + 1).clamp(0, self.length).expand(batch, rows)",
        "return (last + 2).clamp(0, self.length).expand(batch, rows)",
        ("test_lazy_gumbel.py::test_causal_draws", "test_topk.py"),
    ),
    Mutant(
        "future keys counted as members of a group",
        "index/prefixes.py",
        "counts.append(((visible - part.start).clamp(min=0) * part.uses)[..., None])",
        "counts.append(((part.stop - part.start) * part.uses)[..., None])",
        ("test_lazy_gumbel.py::test_causal_draws",),
    ),
    Mutant(
        "future leak through cell statistics",
        "index/kmeans.py",
        "return BuiltKMeans(keys, replace(self.recipe, cells=None))",
        "return BuiltKMeans(keys, replace(self.recipe, cells=None, seed=int(self.keys.sum() * 1000) % 1000))",
        ("test_index.py::test_the_future_has_no_influence",),
    ),
    Mutant(
        "future leak: every row searches the index over all keys",
        "index/prefixes.py",
        "whole = (visible == self.length) & (visible > 0)",
        "whole = visible > 0",
        ("test_index.py::test_contract",),
    ),
    Mutant(
        "autocast reaches into the backward pass",
        "gradients/weighted.py",
        "with full_precision(grad_output):",
        "if grad_output is not None:",
        ("test_modes.py",),
    ),
    Mutant(
        "walks seeded in the backward pass",
        "gradients/base.py",
        "_ = seeds.base  #",
        "pass  #",
        ("test_modes.py",),
    ),
    Mutant(
        "index over all keys kept alive by a cycle",
        "index/prefixes.py",
        "self._blocks: dict[tuple[int, int], PrefixBuilt] = {}",
        "self._blocks: dict[tuple[int, int], PrefixBuilt] = {(0, 0): self}",
        ("test_modes.py",),
    ),
    Mutant(
        "detached scores: no gradient to queries and keys",
        "gradients/weighted.py",
        "grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))",
        "grad_logits = torch.zeros_like(weights)",
        ("test_gradients.py",),
    ),
    Mutant(
        "D^K: step from row i instead of row k",
        "gradients/printed.py",
        "walker.step((entry[:, None] * count + start).reshape(-1), generator)",
        "walker.step((entry[:, None] * count + key[:, None].expand_as(start)).reshape(-1), generator)",
        ("test_gradients.py::test_printed_dk_is_unbiased",),
    ),
    Mutant(
        "dropout before normalisation",
        "gradients/weighted.py",
        "applied = weights if plan.keep is None else weights * plan.keep\n",
        "applied = weights if plan.keep is None else torch.nn.functional.normalize(weights * plan.keep, p=1.0, dim=-1)\n",
        ("test_topk.py", "test_gradients.py::test_planned_keys_with_dropout_pass_gradcheck"),
    ),
    Mutant(
        "padding counted as the first key",
        "index/base.py",
        "return scores.view(batch, rows, width).masked_fill(ids == PADDING, -torch.inf)",
        "return scores.view(batch, rows, width)",
        ("test_topk.py", "test_index.py"),
    ),
    Mutant(
        "padding used as an index",
        "index/base.py",
        "return (ids.clamp(min=0) + start[:, None, None])",
        "return (ids + start[:, None, None])",
        ("test_offsets.py",),
    ),
    Mutant(
        "naive conditional Gumbel",
        "sampling.py",
        "below = -torch.log1p(u * torch.expm1(-rate))",
        "below = -torch.log(1 - u * (1 - torch.exp(-rate)))",
        ("test_sampling.py::test_conditional_gumbel_law",),
    ),
    Mutant(
        "float32 cumulative sums",
        "sampling.py",
        "total = weights.double().cumsum(-1)",
        "total = weights.float().cumsum(-1).double()",
        ("test_sampling.py::test_a_million_entries",),
    ),
    Mutant(
        "float32 cumulative sums, segmented",
        "sampling.py",
        "share = weights.double().cumsum(-1)",
        "share = weights.float().cumsum(-1).double()",
        ("test_sampling.py::test_a_million_entries_segmented",),
    ),
    Mutant(
        "int32 offsets",
        "index/base.py",
        "start = torch.arange(ids.shape[0], dtype=torch.long, device=ids.device) * length",
        "start = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device) * length",
        ("test_offsets.py",),
    ),
    Mutant(
        "stale index: changed keys not noticed",
        "index/base.py",
        "if self._version is not None and self._source._version != self._version:",
        "if False:",
        ("test_index.py",),
    ),
    Mutant(
        "one seed reused across heads: tail",
        "methods/topk.py",
        "ranks = without_replacement(left_out.reshape(-1), self.tail, generator)",
        "ranks = without_replacement(left_out[0], self.tail, generator).repeat(len(left_out), 1)",
        ("test_gumbel.py::test_heads_and_batch_entries_draw_apart",),
    ),
    Mutant(
        "one seed reused across heads: dropout of TopK",
        "methods/topk.py",
        "batch = torch.arange(ids.shape[0], device=device)[:, None] * count",
        "batch = torch.arange(ids.shape[0], device=device)[:, None] * 0",
        ("test_topk.py",),
    ),
    Mutant(
        "one seed reused across heads: dropout of LazyGumbel",
        "methods/gumbel.py",
        "row = lazy.seen // part.visible.shape[1] * count + block.start + lazy.seen % part.visible.shape[1]",
        "row = block.start + lazy.seen % part.visible.shape[1]",
        ("test_gumbel.py::test_dropout_acts_on_the_weights_and_not_on_the_draws",),
    ),
    Mutant(
        "one seed reused across blocks of rows",
        "methods/gumbel.py",
        "call.seeds.generator(block.start)",
        "call.seeds.generator(0)",
        ("test_gumbel.py::test_blocks_of_rows_draw_apart",),
    ),
    Mutant(
        "Gumbel of the minimum",
        "sampling.py",
        "return -exponential(shape, generator).clamp(min=2.0**-54).log()",
        "return exponential(shape, generator).clamp(min=2.0**-54).log()",
        ("test_sampling.py::test_gumbel_law",),
    ),
    Mutant(
        "skipped numbers off by one",
        "sampling.py",
        "torch.searchsorted(below, ranks, right=True)",
        "torch.searchsorted(below, ranks, right=False)",
        ("test_sampling.py",),
    ),
    Mutant(
        "lazy Gumbel: unconditional noise for the far keys",
        "lazy_gumbel.py",
        "self._logits(row, key) + conditional_gumbel(cutoff, generator)",
        "self._logits(row, key) + gumbel(tuple(cutoff.shape), generator)",
        ("test_lazy_gumbel.py",),
    ),
    Mutant(
        "lazy Gumbel: near keys drawn a second time",
        "lazy_gumbel.py",
        "fresh = self._is_far(row, key)",
        "fresh = torch.ones_like(row, dtype=torch.bool)",
        ("test_lazy_gumbel.py",),
    ),
    Mutant(
        "lazy Gumbel: cells of the first batch entry for all",
        "lazy_gumbel.py",
        "batch = row // self.rows.queries.shape[1]\n        count",
        "batch = torch.zeros_like(row)\n        count",
        ("test_lazy_gumbel.py::test_batch_entries_draw_from_their_own_keys",),
    ),
    Mutant(
        "lazy Gumbel: dense rows see the future",
        "lazy_gumbel.py",
        "logits = exact_logits(self.rows.queries[:, chosen], self.rows.keys, self.rows.visible[:, chosen]).double()",
        "logits = (self.rows.queries[:, chosen] @ self.rows.keys.transpose(1, 2)).double()",
        ("test_lazy_gumbel.py::test_dense_rows",),
    ),
    Mutant(
        "expected evaluations count the near keys",
        "lazy_gumbel.py",
        "expected = total - near * torch.sigmoid(smallest - self.log_near)",
        "expected = total + 0 * near * torch.sigmoid(smallest - self.log_near)",
        ("test_lazy_gumbel.py",),
    ),
    Mutant(
        "largest of the means instead of their median",
        "methods/gumbel.py",
        "lazy.spread(means.median(1).values)",
        "lazy.spread(means.amax(1))",
        ("test_gumbel.py::test_matches_exact_attention_within_the_promise",),
    ),
    Mutant(
        "biased normaliser",
        "methods/gumbel.py",
        "log_total = math.log(max(1, draws - 1))",
        "log_total = math.log(draws)",
        ("test_gumbel.py::test_the_normaliser_is_unbiased",),
    ),
    Mutant(
        "dropout not compensated",
        "methods/gumbel.py",
        "weights = weights * keep.view(weights.shape) / (1 - problem.dropout_p)",
        "weights = weights * keep.view(weights.shape)",
        ("test_gumbel.py::test_dropout_is_unbiased_and_repeatable",),
    ),
    Mutant(
        "random walks: covariance divided by N",
        "gradients/walks.py",
        "centred = (scores - scores.mean(-1, keepdim=True)) / (walks - 1)",
        "centred = (scores - scores.mean(-1, keepdim=True)) / walks",
        ("test_gradients.py::test_random_walks_are_unbiased",),
    ),
    Mutant(
        "random walks: scores not centred",
        "gradients/walks.py",
        "centred = (scores - scores.mean(-1, keepdim=True)) / (walks - 1)",
        "centred = scores / walks",
        ("test_gradients.py::test_random_walks_are_unbiased",),
    ),
    Mutant(
        "signed walks: signs lost",
        "gradients/products.py",
        "by_column[alive].gather(1, start).sign().double()",
        "by_column[alive].gather(1, start).sign().abs().double()",
        ("test_gradients.py::test_products_are_unbiased",),
    ),
    Mutant(
        "shift not taken out again",
        "gradients/products.py",
        "return positive_product(walker, x + lift, walks, generator) - lift * row_sums",
        "return positive_product(walker, x + lift, walks, generator)",
        ("test_gradients.py::test_products_are_unbiased",),
    ),
    Mutant(
        "D^Q: product of the means left out",
        "gradients/printed.py",
        "lazy.spread(e1 - e2 * e3)",
        "lazy.spread(e1)",
        ("test_gradients.py::test_printed_dq_is_unbiased",),
    ),
    Mutant(
        "gradient= cut off by no_grad",
        "attention.py",
        "rows = problem.rows  # cached: made outside no_grad, or the gradients would end here",
        "rows = problem.rows.detach()",
        ("test_gradients.py::test_random_walks_with_grouped_queries_and_padding",),
    ),
    Mutant(
        "double backward silently wrong",
        "gradients/base.py",
        "    if torch.is_grad_enabled():\n        raise",
        "    if False:\n        raise",
        ("test_gradients.py::test_double_backward_is_refused",),
    ),
    Mutant(
        "cells: routing without the spread of logits",
        "kernels/cells_far.py",
        "scores = torch.add(first, spread.sqrt(), alpha=ROUTE_SPREADS)",
        "scores = first.clone()",
        ("test_cells_estimate.py::test_one_level_by_hand",),
    ),
    Mutant(
        "cells: number of keys missing in the mass of a cell",
        "kernels/cells_far.py",
        "return weight.mul_((0.25 * spread).add_(1.0).square_()).mul_(size), top",
        "return weight.mul_((0.25 * spread).add_(1.0).square_()), top",
        ("test_cells.py::test_the_engine_computes_what_the_reference_says",),
    ),
    Mutant(
        "cells: second order missing in the mass of a cell",
        "kernels/cells_far.py",
        "return weight.mul_((0.25 * spread).add_(1.0).square_()).mul_(size), top",
        "return weight.mul_(size), top",
        ("test_cells.py::test_the_engine_computes_what_the_reference_says",),
    ),
    Mutant(
        "cells: second order missing in engine and reference",
        "partition/cells.py",
        "variance.mul_(share)",
        "variance.mul_(0.0)",
        ("test_partition.py::test_moments", "test_cells_estimate.py::test_one_level_by_hand"),
    ),
    Mutant(
        "cells: opened cells counted twice",
        "kernels/cells_far.py",
        "first.scatter_(1, taken.clamp(min=0)[:, : first.shape[1]], -torch.inf)",
        "pass",
        ("test_cells.py::test_the_engine_computes_what_the_reference_says",),
    ),
    Mutant(
        "cells: tilt pooled over all segments",
        "kernels/cells_far.py",
        "return Strata(table, weight, top, queries @ table.cross[piece.segments].T, keep=keep)",
        "return Strata(table, weight, top, queries @ table.cross[-1].T, keep=keep)",
        ("test_cells.py::test_the_future_has_no_influence_on_any_bit",),
    ),
    Mutant(
        "cells: statistics include the open segment",
        "partition/cells.py",
        "cross[segment + 1].addmm_(near.T, key)",
        "cross[segment].addmm_(near.T, key)",
        ("test_cells.py::test_the_future_has_no_influence_on_any_bit",),
    ),
    Mutant(
        "cells: a row sees the cells of one more segment",
        "kernels/cells_far.py",
        "cells = piece.segments * table.per_segment\n        queries",
        "cells = (piece.segments + 1) * table.per_segment\n        queries",
        ("test_cells.py::test_the_future_has_no_influence_on_any_bit",),
    ),
    Mutant(
        "cells: a row sees its own segment closed once it is full",
        "kernels/cells_plan.py",
        'own = (visible - 1).div(settings.segment, rounding_mode="floor")',
        'own = visible.div(settings.segment, rounding_mode="floor")',
        ("test_partition.py::test_pieces_and_blocks_of_rows",),
    ),
    Mutant(
        "cells: k-means weighs coordinates by all segments",
        "partition/kmeans.py",
        "/ math.sqrt(max(1, length))\n",
        "/ math.sqrt(max(1, length))\n        weight = weight.sum(0, keepdim=True).expand(len(keys), -1, -1)\n",
        ("test_cells.py::test_the_future_has_no_influence_on_any_bit",),
    ),
    Mutant(
        "cells: k-means without weights",
        "partition/kmeans.py",
        "return lloyd(keys, cells, self.iterations, 32 * cells, self.seed, weight)",
        "return lloyd(keys, cells, self.iterations, 32 * cells, self.seed)",
        ("test_partition.py",),
    ),
    Mutant(
        "cells: width of the tables of children by all cells",
        "kernels/cells_far.py",
        "int(edges[: piece.segments * self.head.coarse.per_segment + 1].diff().max())",
        "int(edges.diff().max())",
        ("test_cells.py::test_the_future_has_no_influence_on_any_bit",),
    ),
    Mutant(
        "cells: columns not filled up",
        "kernels/cells_engine.py",
        "wide = max(8, -(-columns // 8) * 8)",
        "wide = columns",
        ("test_cells.py::test_the_future_has_no_influence_on_any_bit",),
    ),
    Mutant(
        "cells: sinks also live in cells",
        "kernels/cells_assign.py",
        "fine_of[: settings.sinks] = -1",
        "pass",
        ("test_partition.py", "test_cells.py::test_the_engine_computes_what_the_reference_says"),
    ),
    Mutant(
        "cells: coarse covariance used for fine cells",
        "kernels/cells_far.py",
        "self.block.scaled(rows) @ table.cross[piece.segments].T, ids, keep)",
        "self.block.scaled(rows) @ self.head.coarse.cross[piece.segments].T, ids, keep)",
        ("test_cells.py::test_the_engine_computes_what_the_reference_says",),
    ),
    Mutant(
        "cells: gradient of a centroid not shared out",
        "partition/cells.py",
        "to_key, to_value, stretch = self.centroid * share,",
        "to_key, to_value, stretch = self.centroid,",
        ("test_partition.py", "test_cells_gradients.py"),
    ),
    Mutant(
        "cells: factor 2 missing in the gradient of a variance",
        "partition/cells.py",
        "2 * self.variance * share",
        "self.variance * share",
        ("test_cells_gradients.py",),
    ),
    Mutant(
        "cells: derivative of e^(u/2) for that of (1 + u/4)^2",
        "kernels/cells_cpu_backward.py",
        "grad = logit_grad.div_((0.5 * spread).add_(2.0))",
        "grad = logit_grad.mul_(0.5)",
        ("test_cells_gradients.py",),
    ),
    Mutant(
        "cells: gradient of spreads that were cut off",
        "kernels/cells_cpu_backward.py",
        "return grad.masked_fill_(spread >= MOST_SPREAD, 0.0) if bool(spread.amax() >= MOST_SPREAD) else grad",
        "return grad",
        ("test_cells_gradients.py::test_spreads_that_were_cut_off_have_no_gradient",),
    ),
    Mutant(
        "cells: no gradient through the tilt to the queries",
        "kernels/cells_cpu_backward.py",
        "query_grad = tilt_grad @ matrix\n",
        "query_grad = torch.zeros_like(queries)\n",
        ("test_cells_gradients.py",),
    ),
    Mutant(
        "cells: drawn keys leave their cells whole in the gradient",
        "kernels/cells_cpu_backward.py",
        "return 1.0 - used[:, :cells]",
        "return 1.0 - 0.0 * used[:, :cells]",
        (
            "test_cells_gradients.py::test_a_shift_of_all_keys_has_no_gradient",
            "test_cells_gradients.py::test_gradcheck_with_the_plan_frozen",
        ),
    ),
    Mutant(
        "cells: dropout before normalisation",
        "kernels/cells_near.py",
        "mass.index_add_(0, row, weight.sum(-1).view(-1))\n        keep = head.keep(number.view(shape), position[:, None])",
        "keep = head.keep(number.view(shape), position[:, None])\n"
        "        mass.index_add_(0, row, (weight if keep is None else weight * keep).sum(-1).view(-1))",
        (
            "test_cells_estimate.py::test_dropout_takes_near_keys_and_far_cells",
            "test_cells_estimate.py::test_dropout_leaves_the_denominator",
        ),
    ),
    Mutant(
        "cells: dropout of far cells before normalisation",
        "kernels/cells_far.py",
        "self.total.add(rows, level.sums(level.weight), level.top, level.weight.sum(1))",
        "self.total.add(\n"
        "                rows,\n"
        "                level.sums(level.weight),\n"
        "                level.top,\n"
        "                (level.weight if level.keep is None else level.weight * level.keep).sum(1),\n"
        "            )",
        (
            "test_cells_estimate.py::test_dropout_takes_near_keys_and_far_cells",
            "test_cells_estimate.py::test_dropout_leaves_the_denominator",
        ),
    ),
    Mutant(
        "cells: one seed reused across heads: dropout",
        "kernels/cells_head.py",
        "draw = hashed_uniform(self.seed, rows + self.first_row, items)",
        "draw = hashed_uniform(self.seed, rows, items)",
        ("test_cells_estimate.py::test_dropout_belongs_to_rows",),
    ),
    Mutant(
        "cells: one seed reused across heads: draws",
        "kernels/cells_far.py",
        "counters = (numbers + head.first_row)[:, None]",
        "counters = numbers[:, None]",
        ("test_cells_estimate.py::test_draws_belong_to_rows",),
    ),
    Mutant(
        "cells: factor of a drawn key without 1/l",
        "kernels/cells_far.py",
        "log_factor = (log_mass[:, None] - log_key - math.log(samples))",
        "log_factor = (log_mass[:, None] - log_key)",
        ("test_cells_estimate.py::test_both_sums_are_unbiased",),
    ),
    Mutant(
        "cells: keys drawn evenly over cells of one size only",
        "kernels/cells_far.py",
        "log_key = (weight.gather(1, place) / size.clamp(min=1)).log() + top[:, None]",
        "log_key = (weight.gather(1, place) / head.settings.cell_size).log() + top[:, None]",
        ("test_cells_estimate.py::test_both_sums_are_unbiased",),
    ),
    Mutant(
        "cells: standard error of one draw",
        "kernels/cells_far.py",
        "return (term.var(1).sum(-1) / samples).sqrt()",
        "return term.var(1).sum(-1).sqrt()",
        ("test_cells_estimate.py::test_standard_error_is_calibrated",),
    ),
    Mutant(
        "cells: window rounded down",
        "methods/cells.py",
        "window=-(-(self.window or 0) // segment) if causal else 0,",
        "window=(self.window or 0) // segment if causal else 0,",
        ("test_cells_estimate.py::test_windows_are_whole_segments",),
    ),
    Mutant(
        "cells: window one segment short",
        "kernels/cells_plan.py",
        "return (own - settings.window).clamp(min=0) * settings.segment",
        "return (own - settings.window + (settings.window > 0)).clamp(min=0) * settings.segment",
        ("test_partition.py::test_pieces_and_blocks_of_rows",),
    ),
    Mutant(
        "cells: fillers of tiles counted as the first row",
        "kernels/tiles.py",
        "row[place].masked_fill_(beyond, rows)",
        "row[place]",
        ("test_tiles.py",),
    ),
    Mutant(
        "cells: fillers of pages counted as keys",
        "kernels/cells_near.py",
        "logits.masked_fill_(stack.missing[:, None], -torch.inf)",
        "pass",
        ("test_cells.py::test_the_engine_computes_what_the_reference_says",),
    ),
    Mutant(
        "cells: height of a tile by what was chosen",
        "kernels/tiles.py",
        "tile_rows = height or rows_of_a_tile(rows * slots / cells)",
        "tile_rows = height or int(count.max())",
        ("test_tiles.py",),
    ),
    Mutant(
        "cells: no second attempt around a better reference",
        "kernels/cells_near.py",
        "if len(low):",
        "if False:",
        ("test_cells.py::test_rows_whose_reference_was_too_low",),
    ),
)


def copy_to(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Exit status, and the first failed test (or the end of the output where there is none)."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--no-header", "--tb=no")
    paths = [f"tests/{test}" for test in tests]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *paths],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no answer within {TIME_LIMIT} s"
    lines = done.stdout.strip().splitlines()
    failed = [line.split(" - ")[0].removeprefix("FAILED tests/") for line in lines if line.startswith("FAILED")]
    return done.returncode, failed[0] if failed else "\n".join(lines[-3:])


def attempt(mutant: Mutant) -> Verdict:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_to(folder)
        target = folder / "nearfield" / mutant.file
        target.write_text(mutant.apply(target.read_text()))
        status, noticed_by = run_tests(folder, mutant.tests)
    return Verdict(mutant, status, noticed_by, time.perf_counter() - start)


def unbroken(mutants: tuple[Mutant, ...]) -> Verdict:
    """The same tests on the package as it is: a test that always fails kills nothing."""
    tests = {test for mutant in mutants for test in mutant.tests}
    # A file given as a whole covers its tests given by name.
    tests = {test for test in tests if "::" not in test or test.split("::")[0] not in tests}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_to(Path(name))
        status, said = run_tests(Path(name), tuple(sorted(tests)))
    return Verdict(Mutant("(none)", "", "", "", tuple(tests)), status, said, time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    mutants = tuple(mutant for mutant in MUTANTS if arguments.only in mutant.name)
    for mutant in mutants:
        mutant.apply((ROOT / "nearfield" / mutant.file).read_text())

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    verdicts = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the unbroken package", total=len(mutants) + 1)
        healthy = unbroken(mutants)
        progress.advance(task)
        if healthy.status != 0:
            console.print(f"the tests fail without any mutant (status {healthy.status}): {healthy.noticed_by}")
            return 1
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for verdict in pool.map(attempt, mutants):
                verdicts.append(verdict)
                progress.update(task, advance=1, description=verdict.mutant.name)

    table = Table("mutant", "file", "verdict", Column("noticed by", overflow="fold"), "seconds")
    for verdict in verdicts:
        if verdict.killed:
            word = "[green]killed"
        elif verdict.status == 0:
            word = "[red]survived"
        else:
            word = f"[red]tests did not run (status {verdict.status})"
        table.add_row(verdict.mutant.name, verdict.mutant.file, word, escape(verdict.noticed_by), f"{verdict.seconds:.0f}")
    console.print(table)
    killed = sum(verdict.killed for verdict in verdicts)
    console.print(f"{killed} of {len(verdicts)} killed")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Exact attention: torch's scaled_dot_product_attention as a method."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nearfield import _compat
from nearfield._compat import sdpa
from nearfield.bands import Band
from nearfield.chunks import row_blocks
from nearfield.kernels import reference
from nearfield.kernels.dense import capped, dense_attention, sink_share
from nearfield.problem import Call, Problem, is_traced, needs_grad, with_positive_scale
from nearfield.results import Outcome
from nearfield.sampling import Dropout, Seeds, pair_dropout

WINDOW_ROWS = {False: 128, True: 512}
"""Rows at a time in a window, on a CPU, and on a GPU at least. Fewer rows see fewer keys together; more are fewer calls."""


def window_rows(reach: int, on_gpu: bool) -> int:
    """How many rows of a window, each of which sees `reach` keys, to take at a time."""
    return max(WINDOW_ROWS[True], reach // 4) if on_gpu else WINDOW_ROWS[False]


@dataclass(frozen=True)
class Exact:
    """`F.scaled_dot_product_attention`: every key is near. It honours any `attn_mask`. Time O(Lq Lk dim).

    In a window (`window_size`) blocks of rows attend to the keys that some of them see: time O(Lq (left + right + 128) dim).
    A causal mask with key padding or an offset, and a window, are matrices to torch, made for some rows at a time. Where all of
    them take more memory than the inputs, the backward pass makes them, and attends, again.
    With `softcap` or `s_aux`, which torch's kernels do not have, it is written out in torch, some rows at a time, and the
    backward pass computes the weights again: memory stays bounded, and it takes longer.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
        >>> torch.allclose(nearfield.attention(q, k, v, method=Exact()), F.scaled_dot_product_attention(q, k, v))
        True
    """

    any_mask = True
    any_logits = True
    any_window = True
    gives_lse = True
    drops_pairs = True

    def is_async(self, problem: Problem, backend: str) -> bool:
        """On a GPU, NaN and inf are left to SDPA."""
        return problem.query.is_cuda

    def run(self, problem: Problem, call: Call) -> Outcome:
        if call.return_lse and not call.diagnostics and call.gradient is None and problem.query.is_cuda:
            keys = flash_keys(problem)
            if keys is not None:
                return _flash(problem, keys)
        dropout = pair_dropout(problem.dropout_p, call.seeds) if call.gradient is not None else None
        if dropout is not None:
            # SDPA does not tell which pairs it dropped, and the gradient has to know.
            output = _with_dropped_pairs(problem, dropout)
        else:
            output = _sdpa(problem, call.seeds)
        if not (call.diagnostics or call.return_lse):
            return Outcome(output)
        with torch.set_grad_enabled(call.return_lse and torch.is_grad_enabled()):
            lse = problem.by_head(_lse(problem))
        if not call.diagnostics:
            return Outcome(output, lse)
        seen = float(problem.key.shape[2]) if problem.has_general_mask else float(problem.visible.double().mean())
        return Outcome(output, lse, torch.zeros_like(lse), {"keys_per_query": seen})


def zeros(problem: Problem) -> Outcome:
    """The outcome where there are no rows, no keys or no columns; connected to the inputs, so that these get zero gradients."""
    lse = torch.full(problem.query.shape[:3], -torch.inf, dtype=problem.compute_dtype, device=problem.query.device)
    inputs = [problem.query, problem.key, problem.value]
    if problem.sink is not None:
        inputs, lse = [*inputs, problem.sink], problem.sink[:, None].expand_as(lse).clone()
    # Sums of nothing are zero whatever the inputs hold. Those of zero times an input are NaN where it is infinite.
    nothing = torch.stack([x[..., :0].sum(dtype=lse.dtype) for x in inputs]).sum()
    output = nothing.expand(*lse.shape, problem.value.shape[-1]).clone()
    return Outcome(output, lse, torch.zeros_like(lse), {"keys_per_query": 0.0})


def _sdpa(problem: Problem, seeds: Seeds) -> Tensor:
    query, key, value, mask = problem.query, problem.key, problem.value, problem.attn_mask
    # Torch's CPU kernel multiplies the -inf of a causal mask by the scale: NaN for 0, +inf for a negative one.
    query, scale = with_positive_scale(query, problem.scale)
    offset = problem.offset
    # From some offset on the first row, and so every one, sees all keys. Without one, a program of any length is not asked.
    is_causal = problem.is_causal and not (offset > 0 and offset >= key.shape[2] - 1)
    has_band = is_causal or problem.window is not None
    plain = problem.has_plain_logits
    if plain and (not has_band or (mask is None and problem.window is None and offset == 0)):
        with _seeded(seeds, problem):
            return _grouped(query, key, value, mask, problem, scale, is_causal)
    # Torch takes a mask or is_causal, not both, and knows no offset or window. Then it is a matrix: make it for some rows at a
    # time.
    entries = 1 if mask is None else mask.shape[0] * mask.shape[1]
    # With other logits the weights are a table too, and a few more while they are computed.
    per_key = entries if plain else 4 * query.shape[0] * query.shape[1] * problem.compute_dtype.itemsize
    again = not is_traced() and not (plain and _keeps_masks(problem, entries))
    parts = []
    for number, block in enumerate(_blocks(problem, (1, query.shape[2]), per_key, query.is_cuda, has_band)):
        attend = partial(_attend_block, block, problem, scale, seeds.part(number))
        inputs = query[:, :, block.rows], key[:, :, block.keys], value[:, :, block.keys], block.mask, problem.sink
        parts.append(_recomputed(attend, *inputs) if again else attend(*inputs))
    return torch.cat(parts, 2)


def flash_keys(problem: Problem) -> int | None:
    """How many of the keys torch's flash attention is to have for it to serve a problem; None: it does not.

    Its causal mask lets the last row see the last key, so keys that no row sees are left out. If only the last rows see all keys,
    there is no such number. It has no gradient of the log-normaliser.
    """
    query, key, value = problem.query, problem.key, problem.value
    has_mask = problem.attn_mask is not None or problem.window is not None or problem.dropout_p > 0
    if has_mask or not problem.has_plain_logits or is_traced() or _compat.in_functorch_transform():
        return None
    if not fits_flash(query, key, value):
        return None
    if needs_grad(query, key, value) or problem.scale <= 0:
        return None
    rows, length, offset = query.shape[2], key.shape[2], problem.offset
    if not problem.is_causal or offset >= length - 1:
        return length
    return rows + offset if offset >= 0 and rows + offset <= length else None


def fits_flash(query: Tensor, key: Tensor, value: Tensor, trained: bool = False) -> bool:
    """Whether torch's flash attention of GPUs takes such inputs, and with `trained` its backward pass too."""
    if query.is_cuda and not _compat.has_gpu_flash(query.device):
        return False
    dims = {x.shape[3] for x in (query, key, value)}
    dtypes = {x.dtype for x in (query, key, value)}
    dim = max(dims)
    if len(dims) > 1 or not 0 < dim <= 256 or dim % 8 or len(dtypes) > 1 or not dtypes <= {torch.float16, torch.bfloat16}:
        return False
    return not (trained and query.is_cuda) or _compat.has_gpu_flash_backward(query.device, dim)


def as_flash_reads(x: Tensor) -> Tensor:
    """The same numbers in rows whose columns are neighbours, and which begin at multiples of 16 bytes."""
    is_aligned = not any(n % 8 for n in x.stride()[:3]) and x.data_ptr() % 16 == 0
    return x if x.stride(3) == 1 and is_aligned else x.clone(memory_format=torch.contiguous_format)


def _flash(problem: Problem, keys: int) -> Outcome:
    """Output and log-normalisers in one pass: in torch it would take a table of logits in float32 beside it."""
    group = problem.query.shape[1] // problem.key.shape[1]
    key, value = (x[:, :, :keys] for x in (problem.key, problem.value))
    if group > 1:
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    is_causal = problem.is_causal and problem.offset < keys - 1
    inputs = map(as_flash_reads, (problem.query, key, value))
    output, lse, *_ = _compat.gpu_flash(*inputs, 0.0, is_causal, False, scale=problem.scale)
    return Outcome(output, lse)


def _keeps_masks(problem: Problem, entries: int) -> bool:
    """Whether the masks of all blocks take no more memory than the inputs, so that the backward pass may have them.

    Torch keeps every mask that it was given, as numbers. To make them again takes a second forward pass.
    """
    inputs = problem.query.numel() + problem.key.numel() + problem.value.numel()
    return entries * problem.query.shape[2] * _width(problem)[0] <= inputs


def _attend_block(
    block: _Block,
    problem: Problem,
    scale: float,
    seeds: Seeds,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sink: Tensor | None,
) -> Tensor:
    mask = block.whole_mask(mask, key.device)
    with _seeded(seeds, problem):
        if problem.has_plain_logits:
            return _grouped(query, key, value, mask, problem, scale, False)
        return dense_attention(query, key, value, mask, scale, problem.softcap, sink, problem.dropout_p)


@dataclass(frozen=True)
class _Block:
    """Some rows, and the range of keys that they see."""

    rows: slice
    keys: slice
    mask: Tensor | None
    """their part of `attn_mask`: a view"""
    band: Band | None

    def whole_mask(self, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """`mask`, which is that of the block, with the band; a matrix of rows times keys."""
        if self.band is None:
            return mask
        inside = self.band.mask(self.rows, self.keys, device)[None, None]
        return inside if mask is None else mask & inside


def _blocks(problem: Problem, shape: tuple[int, int], per_key: int, on_gpu: bool, has_band: bool = True) -> Iterator[_Block]:
    """Some rows at a time.

    `per_key`: the bytes that a row of `[batch, rows]` takes for each key. `has_band`: whether the problem has a band that hides
    something.
    """
    length, mask, band = problem.key.shape[2], problem.attn_mask, problem.band if has_band else None
    width, most = _width(problem)
    for rows in row_blocks(shape, per_key * max(1, width), on_gpu, most):
        keys = slice(0, length) if band is None else band.keys_of(rows, length)
        part = None if mask is None else (mask if mask.shape[2] == 1 else mask[:, :, rows])[..., keys]
        yield _Block(rows, keys, part, band)


def _width(problem: Problem) -> tuple[int, int | None]:
    """How many keys a block of rows sees at most, and of how many rows it is in a window."""
    length = problem.key.shape[2]
    if problem.window is None:
        return length, None
    most = window_rows(problem.reach, problem.key.is_cuda)
    return min(length, most + problem.reach), most


@torch.no_grad()
def _with_dropped_pairs(problem: Problem, dropout: Dropout) -> Tensor:
    """Attention without the pairs that `dropout` drops, some rows at a time."""
    rows = problem.rows.detach()
    keys = torch.arange(rows.length, device=rows.keys.device)
    output = rows.values.new_empty(*rows.visible.shape, rows.values.shape[2])
    for block in row_blocks(rows.visible.shape, 8 * max(1, rows.length) * rows.queries.element_size()):
        part = rows.at(block)
        weights, _ = reference.weighted_softmax(reference.exact_logits(part.queries, part.keys, part.visible), None)
        keep = dropout.factors(rows.numbers(block)[..., None], keys, weights.dtype)
        output[:, block] = (weights * keep) @ rows.values
    return problem.by_head(output)


def _grouped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, problem: Problem, scale: float, causal: bool
) -> Tensor:
    """SDPA with grouped queries, keys not repeated in memory."""

    def attend(query: Tensor, mask: Tensor | None, gqa: bool) -> Tensor:
        return sdpa(query, key, value, mask, problem.dropout_p, causal, scale=scale, enable_gqa=gqa)

    group = problem.group_size
    if group == 1:
        return attend(query, mask, False)
    if fuses_groups(query, value, mask, problem.dropout_p):
        return attend(query, mask, True)
    # Where torch has no fused kernel for grouped queries it repeats the keys in memory. One call per member of a group does not.
    members = query.unflatten(1, (-1, group)).unbind(2)
    if mask is None or mask.shape[1] == 1:
        masks = [mask] * group
    else:
        masks = list(mask.unflatten(1, (-1, group)).unbind(2))
    return torch.stack([attend(q, m, False) for q, m in zip(members, masks, strict=True)], 2).flatten(1, 2)


def fuses_groups(query: Tensor, value: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0) -> bool:
    """Whether torch serves grouped queries without repeating keys, and sums the gradients of a group in float32."""
    if query.shape[3] != value.shape[3]:
        return False
    if query.device.type == "cpu":
        return not dropout_p and (mask is None or not mask.requires_grad)
    return mask is None and query.dtype in (torch.float16, torch.bfloat16)


_default_generator = threading.Lock()
"""Held while torch's default generator is borrowed, so that concurrent calls do not take each other's numbers."""


@contextmanager
def _seeded(seeds: Seeds, problem: Problem) -> Iterator[None]:
    """SDPA draws dropout from torch's default generator. Seed that for the call, and put it back as it was."""
    if problem.dropout_p == 0.0:
        yield
        return
    if torch.compiler.is_compiling():
        seeds.check_traceable()
        yield
        return
    device = problem.query.device
    # Drawn before the fork: a number drawn inside it would be drawn again by the next call.
    seed = seeds.base
    with _default_generator, torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            # Not torch.manual_seed, which seeds the generators of all devices.
            torch.default_generator.manual_seed(seed)
        yield


def _lse(problem: Problem) -> Tensor:
    """Log-normalisers in the layout of `Rows`, block by block. SDPA does not return them.

    Where gradients are recorded, a block keeps its inputs alone, and the backward pass computes its logits again.
    """
    if problem.has_general_mask or problem.window is not None:
        return _masked_lse(problem)
    rows = problem.rows

    def of_rows(queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
        logits = capped(queries @ keys.mT, problem.softcap)
        return reference.log_normaliser(reference.hidden_beyond(logits, visible))

    parts = []
    for block in row_blocks(rows.visible.shape, 4 * max(1, rows.length) * rows.queries.element_size()):
        part = rows.at(block)
        parts.append(_recomputed(of_rows, part.queries, part.keys, part.visible))
    return _beside_sinks(torch.cat(parts, 1), problem)


def _beside_sinks(lse: Tensor, problem: Problem) -> Tensor:
    """Log-normalisers `[batch * kv_heads, group * length]` with the sinks of the problem, if it has some."""
    return lse if problem.row_sinks is None else sink_share(lse, problem.row_sinks)[1]


def _recomputed(make: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """`make(*inputs)`, of which nothing is kept for the backward pass. Transforms of torch.func keep what they need."""
    if not needs_grad(*(x for x in inputs if x is not None)) or _compat.in_functorch_transform():
        return make(*inputs)
    return checkpoint(make, *inputs, use_reentrant=False, preserve_rng_state=False)


def _masked_lse(problem: Problem) -> Tensor:
    batch, kv_heads, _, dim = problem.key.shape
    dtype = problem.compute_dtype
    heads, count = problem.query.shape[1:3]

    def of_rows(block: _Block, query: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        mask = block.whole_mask(mask, keys.device)
        assert mask is not None
        queries = query.to(dtype) * problem.scale
        logits = (queries.reshape(batch, kv_heads, -1, dim) @ keys.to(dtype).mT).view(*queries.shape[:3], keys.shape[2])
        return reference.log_normaliser(reference.masked(capped(logits, problem.softcap), mask))

    parts = []
    for block in _blocks(problem, (batch * heads, count), 4 * dtype.itemsize, False):
        inputs = problem.query[:, :, block.rows], problem.key[:, :, block.keys], block.mask
        parts.append(_recomputed(partial(of_rows, block), *inputs))
    return _beside_sinks(torch.cat(parts, 2).reshape(batch * kv_heads, -1), problem)

"""A call over ranks: what all ranks say of it before they begin, and which way it goes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nearfield import bands
from nearfield._compat import in_functorch_transform
from nearfield.cells.method import Cells
from nearfield.checks import check_logits, general_mask_error
from nearfield.distributed.cells import ByCells
from nearfield.distributed.context import context_of, layout_for, ranks_of
from nearfield.distributed.flash import Flash
from nearfield.distributed.group import Ranks, told
from nearfield.distributed.layout import Layout
from nearfield.distributed.passes import Passes, run
from nearfield.distributed.ways import Again, Facts, Way, Work
from nearfield.exact import Exact
from nearfield.kernels import backends
from nearfield.problem import Call, Method, Problem, check
from nearfield.sampling import Seeds


@dataclass(frozen=True)
class Asked:
    """The arguments of a call that are no tensors of a sequence, as `attention` takes them."""

    method: Method
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False
    offset: int | None = None
    softcap: float | None = None
    s_aux: Tensor | None = None
    window_size: tuple[int, int] | None = None
    backend: str = "auto"
    check_finite: bool = False
    return_lse: bool = False


@dataclass(frozen=True)
class Above:
    """What lies above this package."""

    attention: Callable[..., Any]
    """`nearfield.attention`"""
    settle: Callable[[Method, Problem], Method]
    """what a method is for inputs of such a shape, whatever their numbers"""
    told: str
    """what has to be the same on all ranks for methods to be"""
    layer: int | None = None
    """the number of the layer of a model that calls"""


def attend(
    mesh: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    asked: Asked,
    above: Above,
    layouts: tuple[Layout, Layout] | None = None,
    packed: tuple[Sequence[int], Sequence[int]] | None = None,
    wrong: Exception | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Output and, if it is wanted, log-normaliser of this rank's rows.

    Args:
        query, key, value: `[..., heads, tokens of this rank, dim]`.
        attn_mask: key padding of this rank's keys.
        layouts: of rows and keys, where they are known; None: in zig-zag.
        packed: where packed sequences begin among all rows, and among all keys, and where the last one ends.
        wrong: what is wrong with the arguments of this rank already, to be raised when the others have been told.
    """
    if in_functorch_transform():
        raise RuntimeError("attention over ranks (mesh=...) cannot be traced by torch.func; call it outside of the transform")
    ranks = ranks_of(mesh)
    problem: Problem | None = None
    if wrong is None:
        try:
            problem = _checked(query, key, value, attn_mask, asked)
        except (TypeError, ValueError, RuntimeError) as error:
            wrong = error
    with ranks.together("attention"):
        found = _agreed(ranks, query, key, value, attn_mask, asked, above, problem, wrong, layouts, packed)
        if found is not None:
            assert problem is not None
            return _attend(ranks, problem, *found, asked, above, packed)
    assert wrong is not None
    raise wrong


def _attend(
    ranks: Ranks,
    problem: Problem,
    rows: Layout,
    keys: Layout,
    asked: Asked,
    above: Above,
    packed: tuple[Sequence[int], Sequence[int]] | None,
) -> tuple[Tensor, Tensor | None]:
    whole = _whole(problem, rows.length, keys.length)
    window = bands.check_window(asked.window_size)
    is_causal, offset = asked.is_causal, asked.offset or 0
    if packed is None:
        window, is_causal, offset = bands.resolve(window, is_causal, offset, rows.length, keys.length)
        whole = replace(whole, window=window, is_causal=is_causal, offset=offset)
    has_places = is_causal or window is not None

    def settled(at: Problem) -> Method:
        method = above.settle(asked.method, at)
        _check_serves(method, window)
        return method

    if packed is None:
        work = tuple(_in_pieces(rows, keys, ranks.rank, settled(whole), is_causal, window, offset))
    else:
        work = tuple(_in_sequences(rows, ranks.rank, packed, whole, settled, is_causal, has_places))
    given = problem.scale, problem.softcap, window, asked.backend, asked.return_lse
    facts = Facts(settled(whole), is_causal, offset, *given, above.attention, work)
    way = _way(facts, whole, problem, ranks, rows, keys, packed is not None)
    passes = Passes(ranks, rows, keys, way, _padding(ranks, keys, problem), asked.return_lse)
    output, lse = run(passes, problem.query, problem.key, problem.value, problem.sink)
    return problem.like_inputs(output), None if lse is None else problem.like_inputs(lse)


def _checked(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, asked: Asked) -> Problem:
    """What can be said of this rank's inputs. No mask but key padding: which keys rows see, depends on their places."""
    scale, gqa, softcap = asked.scale, asked.enable_gqa, asked.softcap
    problem = check(query, key, value, attn_mask, 0.0, False, scale, gqa, None, softcap, asked.s_aux)
    if problem.has_general_mask:
        assert problem.attn_mask is not None
        raise general_mask_error("attention over ranks (mesh=...)", problem.attn_mask, "Each rank passes that of its own keys.")
    backends.check_backend(asked.backend, query.device)
    check_logits(asked.method, None, problem.softcap, "" if problem.sink is None else "s_aux")
    if asked.return_lse and not getattr(asked.method, "gives_lse", False):
        raise ValueError(f"method={asked.method!r} has no log-normaliser with a gradient; leave out return_lse")
    if asked.check_finite:
        for name in ("query", "key", "value"):
            if not bool(getattr(problem, name).detach().isfinite().all()):
                raise ValueError(f"check_finite=True: NaN or inf in {name}")
    return problem


def _agreed(
    ranks: Ranks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    asked: Asked,
    above: Above,
    problem: Problem | None,
    wrong: Exception | None,
    layouts: tuple[Layout, Layout] | None,
    packed: tuple[Sequence[int], Sequence[int]] | None,
) -> tuple[Layout, Layout] | None:
    """Where rows and keys are, once all ranks have said that they make the same call. None: on all ranks, the same is `wrong`."""
    counts = [0, 0] if problem is None else [problem.query.shape[2], problem.key.shape[2]]
    context = context_of(ranks)
    fits: object = None
    if layouts is None and context is not None:
        layouts = context.layout, context.layout
    if layouts is not None and problem is not None:
        wanted = [layout.on(ranks.rank) for layout in layouts]
        fits = [layout.length for layout in layouts] if counts == wanted else f"{counts} tokens in place of {wanted}"
    tensors = {"query": query, "key": key, "value": value}
    if problem is not None:  # as they go over: autocast may have cast them
        tensors = {"query": problem.query, "key": problem.key, "value": problem.value}
    leaves = [*tensors.values(), asked.s_aux]
    described: dict[str, Any] = {name: _described(x, 2) for name, x in tensors.items()}
    found = ranks.agree(
        "attention",
        [] if layouts is not None else counts,
        **described,
        mask=_described(attn_mask, 1),
        s_aux=_described(asked.s_aux, 0),
        arguments=_plain(str(replace(asked, s_aux=None))),
        method=_plain(above.told),
        layer=above.layer,
        triton=problem is not None and backends.prefers_triton(asked.backend, problem.query.device),
        packed=packed and [list(edges) for edges in packed],
        tokens=fits,
        gradients=[isinstance(x, Tensor) and x.requires_grad for x in leaves] if torch.is_grad_enabled() else None,
        error=told(wrong),
    )
    if wrong is not None:
        return None
    if layouts is None:
        names = "the queries", "the keys"
        rows, keys = (layout_for(ranks, [row[i] for row in found], name) for i, name in enumerate(names))
        layouts = rows, keys
    elif isinstance(fits, str):
        raise ValueError(f"this rank has {fits}; inside of context_parallel all sequences are as long as its buffers")
    if packed is not None:
        for name, edges, layout in zip(("cu_seqlens_q", "cu_seqlens_k"), packed, layouts, strict=True):
            if edges[-1] != layout.length:
                raise ValueError(f"{name} must end with the number of rows of all ranks, {layout.length}; got {edges[-1]}")
    return layouts


def _described(x: object, without: int) -> object:
    """What has to be alike on all ranks: the dtype, the kind of device, and the shape but for the sequence."""
    if not isinstance(x, Tensor):
        return None if x is None else type(x).__name__
    shape = list(x.shape)
    if without and x.dim() >= without:
        shape[-without] = -1
    return [str(x.dtype), x.device.type, shape]


def shown(method: Method) -> str:
    """What has to be alike of a method. One that shows only where it lies in memory is what its attributes are; those whose names
    begin with an underscore are its own affair."""
    if type(method).__repr__ is not object.__repr__:
        return repr(method)
    public = {name: x for name, x in sorted(getattr(method, "__dict__", {}).items()) if not name.startswith("_")}
    # The numbers of a tensor may be many, and on a GPU.
    given = {name: _described(x, 0) if isinstance(x, Tensor) else x for name, x in public.items()}
    return f"{type(method).__name__} with {given}"


def _plain(text: str) -> str:
    """Without the addresses that objects of one's own show."""
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _whole(problem: Problem, rows: int, keys: int) -> Problem:
    """A problem with the shapes of all ranks together. It holds no numbers."""
    shapes = ((problem.query, rows), (problem.key, keys), (problem.value, keys))
    query, key, value = (x.new_zeros(()).expand(*x.shape[:2], count, x.shape[3]) for x, count in shapes)
    padding = problem.key_padding
    if padding is not None:
        padding = padding.new_ones(()).expand(*padding.shape[:2], keys)
    mask = None if padding is None else padding[:, :1, None]
    return replace(problem, query=query, key=key, value=value, attn_mask=mask, key_padding=padding)


def _padding(ranks: Ranks, keys: Layout, problem: Problem) -> Tensor | None:
    """`[batch, 1 or kv_heads, n]`: that of all ranks."""
    if problem.attn_mask is None:
        return None
    assert problem.key_padding is not None
    own = problem.key_padding[:, : problem.attn_mask.shape[1]].to(torch.uint8)
    return keys.joined(ranks.gather("padding", keys.padded(own, 2)), 2).bool()


def _check_serves(method: Method, window: tuple[int, int] | None) -> None:
    if window is not None and not isinstance(method, Exact):
        raise ValueError(
            f"window_size={window}: {type(method).__name__} reads windows in blocks that begin with the first row of a call, and "
            "ranks begin elsewhere; over ranks (mesh=...) use Exact(), or leave out window_size"
        )


def _in_pieces(
    rows: Layout, keys: Layout, rank: int, method: Method, is_causal: bool, window: tuple[int, int] | None, offset: int
) -> Iterator[Work]:
    """The rows of a rank, piece by piece where it matters where they stand."""
    if not is_causal and window is None:
        if rows.on(rank):
            yield Work(slice(0, rows.on(rank)), slice(0, keys.length), None, method)
        return
    first = 0
    for piece in rows.pieces(rank):
        count = piece.stop - piece.start
        if count:
            stop = keys.length
            if is_causal and isinstance(method, Exact):
                stop = max(0, min(stop, piece.stop + offset))
            yield Work(slice(first, first + count), slice(0, stop), piece.start + offset, method)
        first += count


def _in_sequences(
    rows: Layout,
    rank: int,
    packed: tuple[Sequence[int], Sequence[int]],
    whole: Problem,
    settled: Callable[[Problem], Method],
    is_causal: bool,
    has_places: bool,
) -> Iterator[Work]:
    """The rows of a rank, sequence by sequence. The last row of a sequence stands at its last key."""
    first = 0
    for piece in rows.pieces(rank):
        for (start, stop), (key_start, key_stop) in zip(pairwise(packed[0]), pairwise(packed[1]), strict=True):
            begin, end = max(start, piece.start), min(stop, piece.stop)
            if begin >= end:
                continue
            at = replace(whole, query=whole.query[:, :, : stop - start], key=whole.key[:, :, : key_stop - key_start])
            place = begin - start + (key_stop - key_start) - (stop - start)
            own = slice(first + begin - piece.start, first + end - piece.start)
            shift = place if has_places else None
            yield Work(own, slice(key_start, key_stop), shift, settled(replace(at, is_causal=is_causal)))
        first += piece.stop - piece.start


def _way(facts: Facts, whole: Problem, problem: Problem, ranks: Ranks, rows: Layout, keys: Layout, is_packed: bool) -> Way:
    method = facts.method
    empty = math.prod(whole.query.shape) == 0 or math.prod(whole.value.shape) == 0
    if isinstance(method, Exact) and not is_packed:
        return Flash(facts)
    if not isinstance(method, Cells) or is_packed or empty:
        return Again(facts)
    if method.window is not None and not facts.is_causal:
        raise ValueError(f"window={method.window} needs is_causal=True: without it there are no latest keys")
    recipe = method.recipe(whole, Call(Seeds(None, whole.query.device), facts.backend))
    return ByCells(facts, recipe._replace(memory=recipe.memory._replace(heads=0)), ranks, rows, keys)

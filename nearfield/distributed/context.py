"""Sequences that are shared out over ranks: `context_parallel`, `shard`, `unshard`, and who knows how long they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from nearfield.checks import check_integer, double_backward_error
from nearfield.distributed.group import Ranks, told
from nearfield.distributed.layout import ZigZag

_RANKS: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()
_OPEN: WeakKeyDictionary[dist.ProcessGroup, list[Context]] = WeakKeyDictionary()
"""The contexts that are open for each group, the innermost last. Backward passes of GPUs, which may compute a layer again, run on
threads of their own, so these are not by thread."""


@dataclass(frozen=True)
class Context:
    """What is known inside of `context_parallel`."""

    ranks: Ranks
    layout: ZigZag


def ranks_of(mesh: Any) -> Ranks:
    """The ranks of a mesh; the same ones in every call, so that they count what they send and know what they agreed on."""
    context = context_of(mesh)
    if context is not None:
        return context.ranks
    if isinstance(mesh, Ranks):
        return mesh
    made = Ranks(mesh)
    return _RANKS.setdefault(made.group, made)


def context_of(mesh: Any) -> Context | None:
    """The innermost context of a mesh; None: there is none."""
    if not len(_OPEN):
        return None
    found = _OPEN.get((mesh if isinstance(mesh, Ranks) else Ranks(mesh)).group)
    return found[-1] if found else None


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[Tensor] | None = None,
    check: bool = True,
) -> Iterator[None]:
    """Inside, each of `buffers` holds this rank's share of a sequence, and `attention(..., mesh=mesh)` knows how long it is.

    The signature is that of `torch.distributed.tensor.experimental.context_parallel`. Nothing is put in the place of
    `F.scaled_dot_product_attention`: what is to attend over all ranks says `mesh=mesh`. Sequences of any length are shared out,
    in zig-zag as there; some ranks then have fewer tokens than others, or none.

    Args:
        mesh: a `DeviceMesh` of one dimension, such as `mesh["cp"]`, a process group, or `Ranks`.
        buffers: tensors with the whole sequence, alike on all ranks: tokens, labels, positions. They are changed in place, and
            get back what they held at the end. No parameters. They are contiguous, and none has memory of another.
        buffer_seq_dims: along which dimension of each buffer the sequence lies.
        no_restore_buffers: those that need not be restored.
        check: compare what ranks are called with, so that ranks that disagree raise a `RankError` that says in what. False saves
            a small message for each call. `Ranks` say so themselves.

    Example:
        >>> x, positions = torch.randn(1, 4, 1001, 64), torch.arange(1001)
        >>> with nearfield.distributed.context_parallel(mesh, buffers=[x, positions], buffer_seq_dims=[2, 0]):
        ...     output = nearfield.attention(x, x, x, is_causal=True, mesh=mesh)  # of four ranks: [1, 4, 251, 64]
    """
    ranks = mesh if isinstance(mesh, Ranks) else Ranks(mesh, check=check)
    given, dims, left = list(buffers or ()), list(buffer_seq_dims or ()), list(no_restore_buffers or ())
    length, wrong = 0, None
    try:
        length = _checked_length(given, dims, left)
    except (TypeError, ValueError) as error:
        wrong = error
    ranks.agree("context_parallel", length=length, buffers=[str(getattr(x, "dtype", None)) for x in given], error=told(wrong))
    if wrong is not None:
        raise wrong
    layout = ZigZag(length, ranks.size)
    whole = [None if any(x is y for y in left) else x.detach().clone() for x in given]
    stack = _OPEN.setdefault(ranks.group, [])
    try:
        with torch.no_grad():
            for x, dim in zip(given, dims, strict=True):
                own = layout.own(x, dim, ranks.rank)
                x.resize_(own.shape).copy_(own)
        stack.append(Context(ranks, layout))
        try:
            yield
        finally:
            stack.pop()
    finally:
        with torch.no_grad():
            for x, before in zip(given, whole, strict=True):
                if before is not None:
                    x.resize_(before.shape).copy_(before)


def _checked_length(buffers: list[Tensor], dims: list[int], left: list[Tensor]) -> int:
    """That of the sequence which these hold, `left` of which are not restored."""
    if len(buffers) != len(dims):
        raise ValueError(f"buffer_seq_dims must name a dimension for each of the {len(buffers)} buffers, got {dims}")
    if not buffers:
        raise ValueError("buffers must hold at least one tensor: its length is that of the sequence")
    for number, (x, dim) in enumerate(zip(buffers, dims, strict=True)):
        if not isinstance(x, Tensor):
            raise TypeError(f"buffers must be tensors, got buffer {number} of type {type(x).__name__}")
        if not -x.dim() <= dim < x.dim():
            raise ValueError(f"buffer_seq_dims must name dimensions that there are, got {dim} for buffer {number} of {x.dim()}")
        if x.requires_grad:
            raise ValueError(
                f"buffers are changed in place, so that none may require a gradient, got buffer {number}; share it out with "
                "nearfield.distributed.shard, which is differentiable"
            )
    if not all(any(x is buffer for buffer in buffers) for x in left):
        raise ValueError("no_restore_buffers must be some of buffers")
    _check_apart(buffers)
    lengths = {x.shape[dim] for x, dim in zip(buffers, dims, strict=True)}
    if len(lengths) > 1:
        raise ValueError(f"buffers must hold one sequence, got lengths of {sorted(lengths)}; check buffer_seq_dims={dims}")
    return lengths.pop()


def _check_apart(buffers: Sequence[Tensor]) -> None:
    """A share is written to where its buffer begins: to nothing that belongs to others."""
    for number, x in enumerate(buffers):
        if not x.is_contiguous():
            raise ValueError(f"buffers must be contiguous, got buffer {number} with strides {x.stride()}; pass .contiguous()")
    ranges = sorted((x.data_ptr(), x.data_ptr() + x.nbytes, number) for number, x in enumerate(buffers) if x.numel())
    for (_, stop, number), (start, _, other) in pairwise(ranges):
        if start < stop:
            raise ValueError(f"buffers {number} and {other} have memory in common, and both are written to; pass .clone() of one")


def shard(x: Tensor, mesh: Any, dim: int) -> Tensor:
    """This rank's share of a tensor with a whole sequence along `dim`, in zig-zag; differentiable. Nothing is sent.

    Each rank's copy of `x` gets the gradient of its own share, zero elsewhere: their sum is that of one process.

    Example:
        >>> x = nearfield.distributed.shard(torch.randn(1, 4, 1001, 64), mesh, dim=2)
    """
    ranks, dim = ranks_of(mesh), _checked_dim(x, dim)
    return ZigZag(x.shape[dim], ranks.size).own(x, dim, ranks.rank)


def unshard(x: Tensor, mesh: Any, dim: int) -> Tensor:
    """A whole sequence along `dim`, on every rank, from the shares of all; differentiable.

    As with all collectives here, what is differentiated is the sum of the losses of all ranks: a loss that every rank computes
    from the whole sequence counts as often as there are ranks. Divide it by their number, or compute it of shares.

    Example:
        >>> own = nearfield.distributed.shard(q, mesh, dim=2)
        >>> torch.equal(nearfield.distributed.unshard(own, mesh, dim=2), q)
        True
    """
    ranks = ranks_of(mesh)
    facts: dict[str, Any] = {"error": None}
    own, wrong = 0, None
    try:
        dim = _checked_dim(x, dim)
        own, shape = x.shape[dim], [*x.shape[:dim], *x.shape[dim + 1 :]]
        has_gradient = x.requires_grad and torch.is_grad_enabled()
        facts |= {"shape": shape, "dtype": str(x.dtype), "dim": dim, "gradient": has_gradient}
    except (TypeError, ValueError) as error:
        wrong, facts["error"] = error, told(error)
    with ranks.together("unshard"):
        counts = [row[0] for row in ranks.agree("unshard", [own], **facts)]
        if wrong is not None:
            raise wrong
        return _Unshard.apply(x, ranks, layout_for(ranks, counts), dim)


def _checked_dim(x: object, dim: object) -> int:
    """Along which dimension of a tensor a sequence lies, counted from the first one."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
    check_integer("dim", dim)
    assert isinstance(dim, int)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be one of the {x.dim()} dimensions of x, got {dim}")
    return dim % x.dim()


def layout_for(ranks: Ranks, counts: list[int], name: str = "the sequence") -> ZigZag:
    """The layout of a sequence of which ranks have so many tokens; raises the same on all ranks if it is another one."""
    layout = ZigZag(sum(counts), ranks.size)
    if layout.counts != counts:
        raise ValueError(
            f"ranks have {counts} tokens of {name}, but {layout.length} tokens are shared out as {layout.counts}; make shares "
            "with nearfield.distributed.context_parallel or shard"
        )
    return layout


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, layout: ZigZag, dim: int) -> Tensor:
        ctx.ranks, ctx.layout, ctx.dim = ranks, layout, dim
        found = layout.joined(ranks.gather("whole sequences", layout.padded(x, dim)), dim)
        ctx.number = ranks.exchanges
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        wrong = double_backward_error() if torch.is_grad_enabled() else None
        with ctx.ranks.together("a backward pass"):
            ctx.ranks.agree("a backward pass of unshard", moving={"number": ctx.number}, error=told(wrong))
            if wrong is None:
                found = ctx.ranks.start_sum("gradients of whole sequences", ctx.layout.dealt(grad, ctx.dim)).wait()
                return found.narrow(ctx.dim, 0, ctx.layout.on(ctx.ranks.rank)), None, None, None
        raise wrong

"""The entry points: `attention` returns a tensor, `estimate` the same tensor with what is known about its error."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from nearfield import _compat, bands, causal, crossover, windows
from nearfield._compat import sdpa
from nearfield.audit import run_audit
from nearfield.auto import Auto, is_exact_faster, tell_if_unmeasured
from nearfield.cells.method import Cells
from nearfield.cells.trial import Prepared
from nearfield.checks import (
    check_dropped_gradient,
    check_flag,
    check_generator,
    check_gradient,
    check_logits,
    check_method,
    check_scalars,
    general_mask_error,
)
from nearfield.exact import fuses_groups, zeros
from nearfield.kernels import backends, ready
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import BuiltIndex
from nearfield.knn.topk import TopK
from nearfield.packed import Packed, is_jagged, jagged
from nearfield.paper.gradients import with_gradient
from nearfield.paper.gumbel import LazyGumbel
from nearfield.problem import DTYPES, Call, Gradient, Method, Problem, check, is_traced, isolate_non_finite
from nearfield.results import Estimate, Outcome, mean_info
from nearfield.sampling import Seeds, pair_dropout

if TYPE_CHECKING:
    from nearfield.distributed.call import Asked


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: Method | None = None,
    gradient: Gradient | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
    return_lse: Literal[False] = False,
    offset: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    mesh: Any = None,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: Method | None = None,
    gradient: Gradient | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
    return_lse: Literal[True],
    offset: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    mesh: Any = None,
) -> tuple[Tensor, Tensor]: ...


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: Method | None = None,
    gradient: Gradient | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
    return_lse: bool = False,
    offset: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
    mesh: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale Q K^T) V, computed by `method`. Arguments and shapes are those of `F.scaled_dot_product_attention`.

    Args:
        query: `[..., heads, Lq, dim]`, float64, float32, float16 or bfloat16. All three may be jagged nested tensors
            `[batch, heads, Lq, dim]`; see `attention_varlen` for what these cost.
        key, value: `[..., kv_heads, Lk, dim]` and `[..., kv_heads, Lk, value_dim]`.
        attn_mask: a boolean key-padding mask, True where a key counts, broadcastable from `[batch, 1, 1, Lk]`. It may be
            combined with `is_causal`. `Exact` and `Auto` take any mask that SDPA takes. Or a bias of torch's,
            `causal_upper_left(Lq, Lk)` or `causal_lower_right(Lq, Lk)` of `torch.nn.attention.bias`, which every method takes.
        dropout_p: applied to the normalised weights (the normaliser is not dropped).
        is_causal: row i sees keys 0..i (aligned at the first key, as in SDPA); see `offset`.
        scale: 1/sqrt(dim) if None.
        enable_gqa: query heads may be a multiple of the key-value heads; keys are not repeated in memory.
        method: `Auto()` (the default: SDPA where that is faster; beyond, cells where a look at some rows says that the output is
            within 0.1 of it, in pooled relative error over 95% of the rows, and SDPA otherwise), `Cells(...)`, `Exact()`,
            `TopK(...)`, `LazyGumbel(...)`, or a `Method` of your own.
        gradient: how to differentiate. None: the method's own way (the exact gradient of the estimator, where there is one).
            `gradients.RandomWalk(...)`: the Monte-Carlo gradients of the paper. With `dropout_p`, they are those of the
            attention that the forward pass dropped; `Exact`, `Auto`, `TopK` and `LazyGumbel` can have both.
        generator: the source of all randomness; None: torch's default generator. One number is drawn from it, and only if the
            call is random (with `gradient=` it is). The same generator state gives the same result, and the same gradients.
        backend: `"auto"`, or a set of kernels by name (`"reference"`, `"cpu"`, `"triton"`).
        check_finite: raise ValueError on NaN or inf. Without it the rows that see a NaN come out NaN (for plain short inputs
            without a mask: in the columns that hold it), and all other rows are untouched, but for the choice of cells where rows
            open them together with a bad query (see `Cells`). On a GPU, where nothing waits to look at inputs, a NaN may spoil
            just its own column of the rows that see it, and exact attention does what SDPA does.
            Nothing is raised under torch.compile or inside a transform of torch.func, where values cannot be looked at.
        return_lse: return the log of the softmax normaliser as well, with its gradient, so that results over disjoint keys can be
            merged (`merge`) and trained through. `Exact`, `Auto`, `Cells` and `TopK` give it; the latter two that of their
            estimate. It is not changed by dropout, and it includes `s_aux`: of parts to merge, only one may have it. Not with
            `gradient=`. With `Exact` the logits are computed a second time.
        offset: with `is_causal`: row i sees keys 0..i + offset; with `window_size`: row i stands at key i + offset; None: 0. The
            last Lq rows of a sequence of Lk tokens have the offset Lk - Lq, which is `causal_lower_right`. Queries that are not
            there cost nothing.
        softcap: logits z (scale times q.k) count as softcap tanh(z / softcap); None or 0: as they are. For `Exact`, `Auto`,
            `TopK` and `Cells`.
        s_aux: `[heads]`, a logit for each query head that counts in the denominator alone, as an additional key with value zero
            would. It has a gradient. For the same methods.
        window_size: (left, right): row i stands at key p = i + offset and sees the keys from p - left to p + right; -1: all on
            that side. With `is_causal`, none after p. FlashAttention lets the last row stand at the last key, which is the offset
            Lk - Lq. `Exact` and `Auto` read the window in O(Lq (left + right)). `Cells` and `TopK` serve the keys that a block of
            rows has in common, and exact attention those at the edges of their windows (all keys of windows of fewer than 256);
            memory is that of about ten copies of keys and values. `LazyGumbel` and `gradients.RandomWalk` draw from the full
            softmax over the keys of a window with bounds on both sides, in O(Lq (left + right)) too. `Cells(window=...)` is
            another thing: the latest keys exactly, and the rest by cells.
        mesh: a `DeviceMesh` of one dimension, or a process group, over whose ranks the sequence is shared out: query, key, value
            and a key-padding mask are this rank's, as `nearfield.distributed.context_parallel` or `shard` makes them, and rows
            see the keys of all ranks. Output and gradients are those of one process. Not with dropout, `gradient`, methods that
            draw keys, or, unless the method is exact, windows; `Auto` looks at the length alone. `DTensor`s sharded along their
            length need no mesh. See `docs/distributed.md`.

    Returns:
        `[..., heads, Lq, value_dim]` in the dtype of the inputs. Rows that see no key are zero. With `return_lse`, that and
        `[..., heads, Lq]` in float32 (float64 for float64 inputs), -inf for rows that see no key
        (`s_aux` where there is one).

    Example:
        >>> q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
        >>> out = nearfield.attention(q, k, v, is_causal=True, method=nearfield.TopK(k=64, tail=64))
    """
    if mesh is not None or _compat.is_dtensor(query):
        # Before anything is checked: other ranks have to be told what is wrong here.
        alone = {"dropout_p": dropout_p, "gradient": gradient}
        given = is_causal, scale, enable_gqa, offset, softcap, s_aux, window_size, backend, check_finite, return_lse
        return over_ranks(mesh, query, key, value, attn_mask, method, *given, alone=alone)
    is_causal, enable_gqa = check_scalars(dropout_p, is_causal, scale, enable_gqa, offset, softcap)
    check_finite = check_flag("check_finite", check_finite)
    return_lse = check_flag("return_lse", return_lse)
    given_window, window_size = window_size, bands.check_window(window_size)
    if is_jagged(query):
        arguments: dict[str, Any] = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "method": method,
            "gradient": gradient,
            "generator": generator,
            "backend": backend,
            "check_finite": check_finite,
            "return_lse": return_lse,
            "offset": offset,
            "softcap": softcap,
            "s_aux": s_aux,
            "window_size": given_window,
        }
        packed = _unpacked(query, key, value, attn_mask)
        found: list[Any] = [attention(*rows, **arguments) for rows in packed.calls]
        if not return_lse:
            return packed.nested(found)
        return packed.nested([output for output, _ in found]), packed.nested([lse for _, lse in found])
    if isinstance(query, Tensor) and isinstance(key, Tensor) and min(query.dim(), key.dim()) > 1:
        attn_mask, is_causal, offset = causal.resolve(attn_mask, is_causal, offset, query, key, given_window is not None)
    is_plain = attn_mask is None and gradient is None and generator is None and dropout_p == 0.0 and not check_finite
    is_plain = is_plain and not return_lse and not softcap and s_aux is None and window_size is None
    if is_plain and (method is None or method == DEFAULT) and backend == "auto" and not offset:
        output = _sdpa_if_faster(query, key, value, is_causal, scale, enable_gqa)
        if output is not None:
            return output
    signature = None
    method = DEFAULT if method is None else method
    # Only these: a method of one's own may do more than the cells that it calls.
    if is_plain and type(method) in (Cells, Auto):
        signature = ready.signature(query, key, value, backend, is_causal, offset, scale, enable_gqa, method, crossover.edition())
        make = None if signature is None else ready.known(signature)
        if make is not None:
            return make(query, key, value)
    offset = offset if is_causal or window_size is not None else None
    problem = check(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, offset, softcap, s_aux, window_size)
    call = replace(_call(problem, generator, backend, gradient), return_lse=return_lse, signature=signature)
    problem = _screened(problem, method, call, check_finite)
    if return_lse:
        _check_gives_lse(method, gradient)
    outcome = _run(problem, method, call)
    output = _finish(problem, outcome.output)
    if not return_lse:
        return output
    if outcome.lse is None:
        raise ValueError(f"{method!r}.run must return an Outcome with lse where call.return_lse is set, got None")
    return output, _spoil(problem, outcome.lse)


@_compat.outside_of_compiled
def over_ranks(
    mesh: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    method: Method | None,
    *given: Any,
    alone: dict[str, Any],
    packed: tuple[list[int], list[int]] | None = None,
    layer: int | None = None,
    wrong: Exception | None = None,
) -> Any:
    """`attention` of what is shared out over the ranks of a mesh. Internal.

    `given`: as `distributed.call.Asked` has them, after the method. `alone`: what only one process knows how to do. `layer`: the
    number of the layer of a model that calls. `wrong`: what the caller has found wrong with its arguments. Whatever is wrong is
    raised when all ranks have been told of it.
    """
    from nearfield.distributed.call import Above, Asked, attend, shown

    asked, limit = Asked(DEFAULT if method is None else method, *given), None
    if wrong is None:
        try:
            asked = _checked_over_ranks(asked, alone, attn_mask)
            if isinstance(asked.method, Auto) and isinstance(query, Tensor):  # what is none is refused further down
                limit = crossover.length(query.device, query.dtype, asked.is_causal)
        except (TypeError, ValueError) as error:
            wrong = error
    above = Above(attention, _settled, f"{shown(asked.method)} with a crossover length of {limit}", layer)
    run: Any = attend
    if _compat.is_dtensor(query):  # whoever has one has spent the seconds that importing them takes
        from nearfield.distributed.dtensors import over_tensors as run
    output, lse = run(mesh, query, key, value, attn_mask, asked, above, packed=packed, wrong=wrong)
    return (output, lse) if asked.return_lse else output


def _checked_over_ranks(asked: Asked, alone: dict[str, Any], attn_mask: Tensor | None) -> Asked:
    """The arguments of a call over ranks that can be checked without the others, flags as bools."""
    is_causal, enable_gqa = check_scalars(
        alone["dropout_p"], asked.is_causal, asked.scale, asked.enable_gqa, asked.offset, asked.softcap
    )
    check_finite, return_lse = check_flag("check_finite", asked.check_finite), check_flag("return_lse", asked.return_lse)
    for name, value_of in alone.items():
        if value_of:
            raise ValueError(f"{name}={value_of!r} cannot be combined with mesh: ranks do not draw together; leave it out")
    method = asked.method
    check_method("method", method)
    if _draws_keys(method):
        raise ValueError(
            f"method={method!r} draws keys, and ranks would draw others than one process does; with mesh use Exact(), TopK(k), "
            "Cells() or Auto()"
        )
    if isinstance(getattr(method, "index", None), BuiltIndex):
        raise ValueError(
            f"{type(method).__name__} has an index that is built already, and ranks search the keys of some heads at a time; let "
            "the call build it: pass index=KMeansIndex(), say"
        )
    for name, x in (("attn_mask", attn_mask), ("s_aux", asked.s_aux)):
        if _compat.is_dtensor(x):
            raise TypeError(f"{name} must be a plain tensor, this rank's part of it, got a DTensor; pass {name}.to_local()")
    return replace(asked, is_causal=is_causal, enable_gqa=enable_gqa, check_finite=check_finite, return_lse=return_lse)


def _draws_keys(method: Method) -> bool:
    if isinstance(method, TopK):
        return bool(method.tail) or method.eps is not None
    return isinstance(method, LazyGumbel) or (isinstance(method, Cells) and method.samples > 0)


def _settled(method: Method, problem: Problem) -> Method:
    return method.without_looking(problem) if isinstance(method, Auto) else method


class CausalResult(NamedTuple):
    """What `causal_attention` returns."""

    output: Tensor
    lse: Tensor | None
    prepared: Prepared | None
    """the keys as the method has grouped them into cells; None: it has not, or they are not kept"""


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    method: Method,
    offset: int = 0,
    return_lse: bool = False,
    keep_cells: bool = False,
) -> CausalResult:
    """`attention` with a causal mask and nothing else, and if asked for, what it has found out about the keys. Internal."""
    problem = check(query, key, value, None, 0.0, True, scale, True, offset, None, None, None)
    groups: list[Prepared] | None = [] if keep_cells else None
    call = replace(_call(problem, None, "auto", None), groups=groups, return_lse=return_lse)
    problem = _screened(problem, method, call, False)
    outcome = _run(problem, method, call)
    lse = None if outcome.lse is None or not return_lse else _spoil(problem, outcome.lse)
    return CausalResult(_finish(problem, outcome.output), lse, groups[-1] if groups else None)


def _unpacked(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Packed:
    """Jagged nested tensors as calls of which each has one length."""
    if attn_mask is not None:
        raise ValueError("nested tensors have no padding to mask, got attn_mask; leave it out, or pass padded tensors")
    if is_traced():
        raise RuntimeError("nested tensors cannot be traced by torch.compile or torch.func; pass padded tensors and attn_mask")
    return jagged(query, key, value)


def estimate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: Method | None = None,
    gradient: Gradient | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
    audit: int = 0,
    per_head: bool = False,
    offset: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window_size: tuple[int, int] | None = None,
) -> Estimate:
    """`attention`, with its log-normaliser, standard error and audit.

    Args:
        audit: how many random rows to recompute exactly. The largest error among s of them bounds the error of a fraction
            0.05^(1/s) of all rows with 95% confidence, for any data and any method: 59 rows speak for 95% of them, 299 for 99%.
        per_head: audit so many rows of each head, so that `est.audit.heads` says the same of every head by itself.

    The other arguments are those of `attention`. For jagged nested tensors, `output`, `lse` and `stderr` are jagged as well, rows
    are audited among those of all sequences, and `info["parts"]` says of the sequences of each length how they were served.

    Example:
        >>> est = nearfield.estimate(q, k, v, method=nearfield.TopK(k=16, tail=16), audit=59)
        >>> est.audit.rows, round(est.audit.quantile, 2), est.audit.confidence
        (59, 0.95, 0.95)
    """
    is_causal, enable_gqa = check_scalars(dropout_p, is_causal, scale, enable_gqa, offset, softcap)
    check_finite = check_flag("check_finite", check_finite)
    per_head = check_flag("per_head", per_head)
    if isinstance(audit, bool) or not isinstance(audit, int) or audit < 0:
        raise ValueError(f"audit must be a non-negative integer, got {audit!r}")
    if audit and dropout_p:
        raise ValueError(f"audit compares with attention without dropout; got audit={audit} and dropout_p={dropout_p}")
    if per_head and not audit:
        raise ValueError(f"per_head={per_head!r} needs an audit: pass audit=59, say, to recompute 59 rows of each head")
    method = Auto() if method is None else method
    given = dropout_p, is_causal, scale, enable_gqa, offset, softcap, s_aux, window_size
    how = method, gradient, generator, backend, check_finite
    if not is_jagged(query):
        one = _computed((query, key, value), attn_mask, given, how)
        looked = run_audit([(one.problem, one.output)], audit, one.call.seeds.generator(-1), per_head) if audit else None
        info = {"method": repr(method), "backend": backends.without_triton(backend, query.device), **one.info}
        return Estimate(one.output, one.lse, one.stderr, looked or one.info.get("audit"), info)
    packed = _unpacked(query, key, value, attn_mask)
    found = [_computed(rows, None, given, how) for rows in packed.calls]
    audited = [(x.problem, x.output) for x in found]
    stderrs = [x.stderr for x in found if x.stderr is not None]
    parts = [{"shape": tuple(x.output.shape[:3]), "rows": x.output.shape[:3].numel(), **x.info} for x in found]
    return Estimate(
        output=packed.nested([x.output for x in found]),
        lse=packed.nested([x.lse for x in found]),
        stderr=packed.nested(stderrs) if len(stderrs) == len(found) else None,
        # The looks of a method at its own calls are no sample of all rows.
        audit=run_audit(audited, audit, found[0].call.seeds.generator(-1), per_head) if audit else None,
        info={
            "method": repr(method),
            "backend": backends.without_triton(backend, query.device),
            **mean_info([part for part in parts if part["rows"]]),
            "parts": parts,
        },
    )


@dataclass(frozen=True)
class _Computed:
    """What one call computed, with all that is known about it."""

    problem: Problem
    call: Call
    output: Tensor
    lse: Tensor
    stderr: Tensor | None
    info: dict[str, Any]


def _computed(
    inputs: tuple[Tensor, Tensor, Tensor], attn_mask: Tensor | None, given: tuple[Any, ...], how: tuple[Any, ...]
) -> _Computed:
    """`given`: the arguments of `check` after the mask. `how`: method, gradient, generator, backend and check_finite."""
    method, gradient, generator, backend, check_finite = how
    problem = check(*inputs, attn_mask, *given)
    call = _call(problem, generator, backend, gradient, diagnostics=True)
    problem = _screened(problem, method, call, check_finite)
    outcome = _run(problem, method, call)
    output = _finish(problem, outcome.output)
    if outcome.lse is None:
        raise ValueError(f"{method!r}.run must return an Outcome with lse where call.diagnostics is set, got None")
    stderr = None if outcome.stderr is None else _spoil(problem, outcome.stderr)
    info = {**_keys_used(outcome), **outcome.info}
    return _Computed(problem, call, output, _spoil(problem, outcome.lse.detach()), stderr, info)


def _keys_used(outcome: Outcome) -> dict[str, float]:
    """How many keys count one by one in a row: those that were looked at, unless the method says that it chose among them."""
    looked_at = outcome.info.get("keys_per_query")
    return {} if looked_at is None else {"keys_used": looked_at}


MOST = torch.finfo(torch.float32).max
"""Scales beyond it are looked at: see `problem.check`."""

DEFAULT = Auto()
"""What `method=None` means."""

FEW, SHORT = 16, 2048
"""Up to the second number of keys no method beats SDPA on any device. With fewer keys than the first, which is a vector of the
processor, torch's CPU kernel makes zeros of a NaN."""


def _sdpa_if_faster(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor | None:
    """SDPA straight away for plain inputs that `Auto` gives to it: the long way can take longer than SDPA does.

    None for all others, also for those that something is wrong with.
    """
    if type(query) is not Tensor or type(key) is not Tensor or type(value) is not Tensor or is_traced():
        return None
    if query.is_nested or key.is_nested or value.is_nested:
        return None
    if not query.layout == key.layout == value.layout == torch.strided:
        return None
    rows, shape, dtype = query.shape, key.shape, key.dtype
    if len(shape) != 4 or value.shape != shape or query.dtype != dtype or value.dtype != dtype or dtype not in DTYPES:
        return None
    if len(rows) != 4 or rows[0] != shape[0] or rows[3] != shape[3] or 0 in shape or 0 in rows:
        return None
    grouped = rows[1] != shape[1]
    if grouped and (not enable_gqa or rows[1] % shape[1]):
        return None
    if not (scale is None or (type(scale) is float and 0.0 < scale < MOST)):
        return None
    if query.is_cuda:
        if query.device != key.device or query.device != value.device or torch.is_autocast_enabled("cuda"):
            return None
        if (shape[2] > SHORT and not is_exact_faster(query, key, is_causal)) or (grouped and not fuses_groups(query, value)):
            return None
        tell_if_unmeasured(query, key, is_causal)
        return sdpa(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    if not (query.is_cpu and key.is_cpu and value.is_cpu) or torch.is_autocast_enabled("cpu"):
        return None
    if not FEW <= shape[2] <= SHORT:
        return None
    output = sdpa(query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped)
    # Torch multiplies hidden values by zero, so a later NaN or inf would reach earlier rows. The last row reads every key that
    # any row reads: where it is not finite, go the long way.
    if is_causal and not math.isfinite(output.detach().select(2, -1).sum().item()):
        return None
    return output


def _screened(problem: Problem, method: Method, call: Call, check_finite: bool) -> Problem:
    """The problem with NaN and inf isolated, unless that would wait for a GPU and the method copes with them by itself."""
    check_method("method", method)
    may_be_async = call.gradient is None and call.backend != "reference" and not check_finite
    # Parts of the keys are put together by their normalisers, through which a NaN would spread.
    may_be_async = may_be_async and (problem.window is None or getattr(method, "any_window", False))
    if may_be_async and method.is_async(problem, call.backend):
        return replace(problem, sync=False)
    return isolate_non_finite(problem, check_finite)


def _call(
    problem: Problem, generator: torch.Generator | None, backend: str, gradient: Gradient | None, diagnostics: bool = False
) -> Call:
    """How to compute, from arguments that are checked here."""
    backends.check_backend(backend, problem.query.device)
    check_generator(generator)
    if gradient is not None:
        check_gradient("gradient", gradient)
    if gradient is not None and torch.compiler.is_compiling():
        raise RuntimeError(
            "gradient= cannot be traced by torch.compile; without fullgraph=True the call runs eagerly, "
            "with gradient=None and Cells, Exact or Auto it is a part of the compiled program"
        )
    return Call(Seeds(generator, problem.query.device), backend, gradient, diagnostics)


def _check_gives_lse(method: Method, gradient: Gradient | None) -> None:
    """Raise where a log-normaliser would come without its gradient."""
    if gradient is not None:
        raise ValueError(
            f"gradient={gradient!r} estimates the gradient of the output alone; with return_lse=True leave gradient out, "
            "or use estimate(...).lse, which has no gradient"
        )
    if not getattr(method, "gives_lse", False):
        raise ValueError(
            f"method={method!r} has no log-normaliser with a gradient; with return_lse=True use Exact(), Cells(...) or "
            "TopK(...), or estimate(...).lse, which has no gradient"
        )


def _run(problem: Problem, method: Method, call: Call) -> Outcome:
    """What the method computes, with the gradient that is asked for."""
    if problem.has_general_mask and call.gradient is not None:
        assert problem.attn_mask is not None
        raise general_mask_error(f"gradient={call.gradient!r}", problem.attn_mask, "With any other mask use gradient=None.")
    check_logits(method, call.gradient, problem.softcap, "" if problem.sink is None else "s_aux")
    if call.gradient is not None:
        check_dropped_gradient(method, call.gradient, problem.dropout_p)
    if problem.has_general_mask and not method.any_mask:
        assert problem.attn_mask is not None
        raise general_mask_error(type(method).__name__, problem.attn_mask, "Exact() takes any mask.")
    if problem.window is not None:
        _check_window(problem, method, call)
        if problem.window[1] < 0:
            return windows.reversed_outcome(_run(windows.reversed_problem(problem), method, call))
    if problem.is_empty:
        return zeros(problem)
    with full_precision(problem.query):
        if call.gradient is None:
            return _forward(problem, method, call)
        # Made here, outside of no_grad: gradients have to reach the inputs.
        layout = problem if problem.window is None else windows.in_blocks(problem)
        rows = layout.rows
        with torch.no_grad():
            outcome = _forward(problem, method, call)
        dropout = pair_dropout(problem.dropout_p, call.seeds)
        output = with_gradient(layout.by_row(outcome.output), rows, call.gradient, call.seeds, dropout)
        return replace(outcome, output=layout.by_head(output))


def _forward(problem: Problem, method: Method, call: Call) -> Outcome:
    if problem.window is not None and not getattr(method, "any_window", False):
        return windows.run(method, problem, call)
    return _checked(method.run(problem, call), problem, method)


def _check_window(problem: Problem, method: Method, call: Call) -> None:
    """Raise where the method, or the gradient, cannot honour a window."""
    assert problem.window is not None
    window = problem.window
    for who in (method, call.gradient):
        if isinstance(getattr(who, "index", None), BuiltIndex):
            raise ValueError(
                f"{type(who).__name__} has an index that is built already, of all keys; window_size={window} hides some of "
                "them, so let the call build it: pass index=KMeansIndex(), say"
            )
    if isinstance(method, Cells) and method.window is not None:
        raise ValueError(
            f"{method!r} reads the latest keys one by one and all keys before them by cells, and window_size={window} hides some "
            "of those; leave out window or window_size"
        )
    if window[1] < 0:
        return
    both = f"window_size={window}, with bounds on both sides"
    if call.gradient is not None and not getattr(call.gradient, "any_window", False):
        raise ValueError(
            f"gradient={call.gradient!r} knows rows that see the first keys alone, got {both}; use gradients.RandomWalk(...), or "
            "gradient=None"
        )
    if call.gradient is not None and problem.dropout_p:
        raise ValueError(
            f"gradient={call.gradient!r} is not told which pairs are dropped in {both}, got dropout_p={problem.dropout_p}; "
            "use gradient=None, or leave out dropout_p"
        )
    windows.check_serves(method, window, problem.reach)


def _checked(outcome: Outcome, problem: Problem, method: Method) -> Outcome:
    """What a method returned, if it keeps to the contract; raises otherwise."""
    if not isinstance(outcome, Outcome):
        raise TypeError(f"{method!r}.run must return a nearfield.Outcome, got {type(outcome).__name__}")
    rows = problem.query.shape[:3]
    wanted = {"output": (*rows, problem.value.shape[3]), "lse": rows, "stderr": rows}
    for name, shape in wanted.items():
        found = getattr(outcome, name)
        if name == "output" and not isinstance(found, Tensor):
            raise TypeError(f"{method!r}.run must return an Outcome with a tensor as output, got {type(found).__name__}")
        if found is not None and found.shape != shape:
            raise ValueError(
                f"{method!r}.run must return an Outcome whose {name} has shape {tuple(shape)}, got {tuple(found.shape)}; "
                "problem.by_head converts from the layout of problem.rows"
            )
    return outcome


def _finish(problem: Problem, output: Tensor) -> Tensor:
    """The output as the caller gets it."""
    return _spoil(problem, output.to(problem.query.dtype))


def _spoil(problem: Problem, x: Tensor) -> Tensor:
    """From `[batch, heads, length, ...]` to the leading dimensions of the inputs, NaN in the rows that see a non-finite input."""
    if problem.poison is not None:
        # A product, so that the gradients of these rows are NaN as well.
        x = x * (problem.poison if x.dim() == 3 else problem.poison[..., None])
    return problem.like_inputs(x)

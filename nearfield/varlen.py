"""`attention_varlen`: attention of packed sequences, with the arguments of FlashAttention."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from nearfield.attention import attention, over_ranks
from nearfield.bands import check_window
from nearfield.checks import (
    check_dropout,
    check_flag,
    check_generator,
    check_gradient,
    check_method,
    check_scale,
    check_softcap,
)
from nearfield.kernels.backends import check_backend
from nearfield.packed import Packed, check_longest, edges_of
from nearfield.problem import Gradient, Method, check_sink


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    method: Method | None = None,
    gradient: Gradient | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
    return_lse: Literal[False] = False,
    mesh: Any = None,
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    method: Method | None = None,
    gradient: Gradient | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
    return_lse: Literal[True],
    mesh: Any = None,
) -> tuple[Tensor, Tensor]: ...


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    *,
    window_size: tuple[int, int] | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    method: Method | None = None,
    gradient: Gradient | None = None,
    generator: torch.Generator | None = None,
    backend: str = "auto",
    check_finite: bool = False,
    return_lse: bool = False,
    mesh: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of sequences laid end to end, each to itself alone, by any method.

    Args:
        q: `[total_q, heads, dim]`.
        k, v: `[total_k, kv_heads, dim]` and `[total_k, kv_heads, value_dim]`; heads may be a multiple of kv_heads.
        cu_seqlens_q, cu_seqlens_k: `[sequences + 1]`, int32 or int64: sequence i has the rows from entry i to entry i + 1.
        max_seqlen_q, max_seqlen_k: the longest sequence, checked where given; not needed.
        causal: the last query of a sequence sees all of its keys (aligned at the lower right, as in FlashAttention). Rows that
            see no key are zero.
        window_size: (left, right), see `attention`; the last query of a sequence stands at its last key, as in FlashAttention.
        return_lse: return the log of the softmax normaliser as well, with its gradient; see `attention`.
        mesh: as in `attention`: q, k and v are this rank's share of all rows, in zig-zag, and `cu_seqlens` counts the rows of all
            ranks. A rank attends to the sequences that it has rows of; keys of a sequence that lies on several ranks are grouped
            by each of them.
        dropout_p, softmax_scale, softcap, s_aux, method, gradient, generator, backend, check_finite: as in `attention`, where
            the scale is called `scale`.

    Returns:
        `[total_q, heads, value_dim]`. With `return_lse`, that and `[total_q, heads]` in float32 (float64 for float64 inputs), as
        `merge` takes them; FlashAttention has the transpose, `[heads, total_q]`.

    Sequences of equal lengths are one call of `attention`; the others follow each other. So this costs as much as these calls,
    and one copy of the rows. With many different lengths a GPU is not filled. The entries of `cu_seqlens` are looked at, which
    waits for a GPU, and cannot be traced by torch.compile.

    Example:
        >>> q, k, v = torch.randn(3, 300, 4, 64).unbind(0)
        >>> edges = torch.tensor([0, 100, 200, 300])
        >>> nearfield.attention_varlen(q, k, v, edges, edges, 100, 100, causal=True, method=nearfield.Cells()).shape
        torch.Size([300, 4, 64])
    """
    edges: list[int] = []
    key_edges: list[int] = []
    wrong: Exception | None = None
    try:
        causal = check_flag("causal", causal)
        check_finite = check_flag("check_finite", check_finite)
        return_lse = check_flag("return_lse", return_lse)
        check_dropout("dropout_p", dropout_p)
        check_scale("softmax_scale", softmax_scale)
        check_softcap(softcap)
        check_generator(generator)
        if method is not None:
            check_method("method", method)
        if gradient is not None:
            check_gradient("gradient", gradient)
        window_size = check_window(window_size)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if not isinstance(x, Tensor) or x.dim() != 3:
                got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                raise ValueError(f"{name} must be a tensor [total, heads, dim], got {got}; `attention` takes padded batches")
        if len(k) != len(v):
            raise ValueError(f"k and v must have the same number of rows, got {len(k)} and {len(v)}")
        totals = (None, None) if mesh is not None else (len(q), len(k))
        edges, key_edges = edges_of("cu_seqlens_q", cu_seqlens_q, totals[0]), edges_of("cu_seqlens_k", cu_seqlens_k, totals[1])
        if len(edges) != len(key_edges):
            raise ValueError(
                f"cu_seqlens_q and cu_seqlens_k must be for as many sequences, got {len(edges) - 1} and {len(key_edges) - 1}"
            )
        check_longest("max_seqlen_q", max_seqlen_q, edges)
        check_longest("max_seqlen_k", max_seqlen_k, key_edges)
        check_backend(backend, q.device)
        if s_aux is not None:
            check_sink(s_aux, q)
    except (TypeError, ValueError, RuntimeError) as error:
        if mesh is None:
            raise
        wrong = error  # raised when the other ranks have been told
    if mesh is not None:
        alone = {"dropout_p": dropout_p, "gradient": gradient}
        heads = [x.transpose(0, 1)[None] if wrong is None else x for x in (q, k, v)]
        given = causal, softmax_scale, True, None, softcap, s_aux, window_size, backend, check_finite, return_lse
        at = edges, key_edges
        result = over_ranks(mesh, heads[0], heads[1], heads[2], None, method, *given, alone=alone, packed=at, wrong=wrong)
        if not return_lse:
            return result[0].transpose(0, 1)
        return result[0][0].transpose(0, 1), result[1][0].transpose(0, 1)
    packed = Packed.of(q, k, v, edges, key_edges, cu_seqlens_q)
    arguments: dict[str, Any] = {
        "dropout_p": dropout_p,
        "is_causal": causal,
        "scale": softmax_scale,
        "enable_gqa": True,
        "method": method,
        "gradient": gradient,
        "generator": generator,
        "backend": backend,
        "check_finite": check_finite,
        "return_lse": return_lse,
        "softcap": softcap,
        "s_aux": s_aux,
        "window_size": window_size,
    }
    found: list[Any] = []
    for rows in packed.calls:
        offset = rows[1].shape[2] - rows[0].shape[2] if causal or window_size is not None else None
        found.append(attention(*rows, offset=offset, **arguments))
    if not return_lse:
        return packed.joined(found)
    return packed.joined([output for output, _ in found]), packed.joined([lse for _, lse in found])

"""`DTensor`s: sequences that torch has cut into one contiguous piece for each rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from nearfield.distributed.call import Above, Asked, attend
from nearfield.distributed.layout import Contiguous


def over_tensors(
    mesh: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    asked: Asked,
    above: Above,
    packed: Any = None,
    wrong: Exception | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Attention of `DTensor`s `[batch, heads, length, dim]`; the results are sharded as the query is.

    Along one dimension of their mesh they may be sharded by length, along others by heads or batch, or replicated.
    """
    assert isinstance(query, DTensor)
    # The dimension of the mesh along which sequences are sharded, where other ranks wait for what this one says.
    by_length = next((i for i, x in enumerate(query.placements) if isinstance(x, Shard) and x.dim == 2), None)
    if wrong is None:
        try:
            _check(query, key, value, mesh, packed)
        except (TypeError, ValueError) as error:
            wrong = error
    rows, keys, values = (x.to_local() if isinstance(x, DTensor) else x for x in (query, key, value))
    own_mesh, whole = query.device_mesh, query.shape
    if by_length is None and wrong is not None:
        raise wrong
    if by_length is None:
        found = above.attention(
            rows,
            keys,
            values,
            attn_mask,
            is_causal=asked.is_causal,
            scale=asked.scale,
            enable_gqa=asked.enable_gqa,
            method=asked.method,
            backend=asked.backend,
            check_finite=asked.check_finite,
            return_lse=asked.return_lse,
            offset=asked.offset,
            softcap=asked.softcap,
            s_aux=asked.s_aux,
            window_size=asked.window_size,
        )
        output, lse = found if asked.return_lse else (found, None)
    else:
        group, size = own_mesh.get_group(by_length), own_mesh.size(by_length)
        layouts = None if wrong is not None else (Contiguous(whole[2], size), Contiguous(key.shape[2], size))
        output, lse = attend(group, rows, keys, values, attn_mask, asked, above, layouts, wrong=wrong)
    shape = (*whole[:3], value.shape[3])
    return _wrapped(output, query, shape), None if lse is None else _wrapped(lse, query, shape[:3])


def _wrapped(x: Tensor, query: DTensor, shape: tuple[int, ...]) -> Tensor:
    """Local results as a tensor of this shape, which is sharded as the query is."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    whole = torch.Size(shape)
    return DTensor.from_local(x.contiguous(), query.device_mesh, query.placements, run_check=False, shape=whole, stride=stride)


def _check(query: DTensor, key: Tensor, value: Tensor, mesh: Any, packed: Any) -> None:
    if mesh is not None:
        raise ValueError("mesh is that of the DTensors; leave it out")
    if packed is not None:
        raise ValueError("packed sequences must be plain tensors with mesh=..., got DTensors; pass q.to_local() in zig-zag")
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, DTensor) or x.device_mesh != query.device_mesh or x.placements != query.placements:
            got = f"placements {x.placements}" if isinstance(x, DTensor) else "a plain tensor"
            raise ValueError(f"{name} must be sharded as query is, by {query.placements}, got {got}; redistribute it")
    if query.dim() != 4 or not all(_is_served(x) for x in query.placements):
        raise ValueError(
            "DTensors must be [batch, heads, length, dim], sharded by Shard(0), Shard(1) or Shard(2), or replicated; got "
            f"{query.dim()} dimensions and {query.placements}; redistribute them"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    parts = math.prod(query.device_mesh.size(i) for i, x in enumerate(query.placements) if isinstance(x, Shard) and x.dim == 1)
    if heads != kv_heads and (heads % parts or kv_heads % parts):
        raise ValueError(
            f"{heads} query heads that share {kv_heads} heads of keys cannot be sharded over {parts} ranks: keys would be on "
            "other ranks than their queries; replicate them"
        )
    if sum(isinstance(x, Shard) and x.dim == 2 for x in query.placements) > 1:
        raise ValueError(f"sequences must be sharded along one dimension of the mesh, got {query.placements}")


def _is_served(x: Placement) -> bool:
    return isinstance(x, Replicate) or (isinstance(x, Shard) and x.dim in (0, 1, 2))

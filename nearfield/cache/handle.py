"""What a cache gives to a layer in place of keys and values: a name for them, and an error for whoever takes it for numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.cache.store import CellStore

_TOLD = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "requires_grad", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.get_device}
"""What may be asked of a handle: nothing that needs numbers."""


class StoredKeys(Tensor):
    """Keys (or values) of a store `[batch, heads, length, dim]`, which has shape, dtype and device but no numbers.

    Attributes:
        store: where they are.
        latest: those that the layer has just appended, `[batch, heads, rows, dim]`.
    """

    store: CellStore
    latest: Tensor

    @staticmethod
    def __new__(cls, store: CellStore, latest: Tensor) -> StoredKeys:
        shape = (*latest.shape[:2], store.length, latest.shape[3])
        made: StoredKeys = Tensor._make_wrapper_subclass(cls, shape, dtype=latest.dtype, device=latest.device)
        made.store, made.latest = store, latest
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredKeys(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        return refuse(func)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return refuse(func)


def refuse(func: Any) -> Any:
    # Not a TypeError: Python takes that, of an operator, for a hint to try the other operand.
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} was called on the keys or values of a CellCache, which only attention registered by "
        'nearfield can read: hf.register(); model.set_attn_implementation("nearfield"). Where a model changes them before it '
        "attends, use Transformers' DynamicCache"
    )

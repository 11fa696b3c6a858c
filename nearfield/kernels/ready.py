"""Calls that need no preparation: what follows from shapes and arguments was decided when such a call was made before.

Checking arguments, choosing a method and its sizes takes longer on the host than attention at moderate lengths does on a GPU.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.kernels import cards

MOST_KNOWN = 128
"""Calls that are remembered; those that were not made for the longest time are forgotten."""

Ready = Callable[[Tensor, Tensor, Tensor], Tensor]

_KNOWN: OrderedDict[Hashable, Ready] = OrderedDict()
_LOCK = threading.Lock()


def signature(query: Tensor, key: Tensor, value: Tensor, backend: str, *arguments: Any) -> Hashable:
    """All that a plain call depends on besides the numbers in its inputs; None for a call that is not remembered."""
    if torch.compiler.is_compiling() or _compat.in_functorch_transform():
        return None
    if _compat.in_dispatch_mode() or _compat.in_forward_mode():
        return None
    for x in (query, key, value):
        # A view that begins at an odd place would need other kernels.
        if type(x) is not Tensor or x.is_nested or not (x.is_cuda or backend == "triton") or x.data_ptr() & 15:
            return None
    device, dtype = query.device, query.dtype
    if torch.are_deterministic_algorithms_enabled():
        return None
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) != dtype:
        return None
    grads = torch.is_grad_enabled() and (query.requires_grad, key.requires_grad, value.requires_grad)
    forms = tuple((x.shape, x.stride(), x.dtype, x.device) for x in (query, key, value))
    found = (forms, grads, backend, cards.imposed_class(), *arguments)
    try:
        hash(found)
    except TypeError:  # a method of one's own, or a partition in it
        return None
    return found


def known(call: Hashable) -> Ready | None:
    """What makes such a call, if one was made before."""
    ready = _KNOWN.get(call)
    if ready is not None:
        with _LOCK:
            if call in _KNOWN:
                _KNOWN.move_to_end(call)
    return ready


def remember(call: Hashable, ready: Ready) -> None:
    with _LOCK:
        _KNOWN[call] = ready
        while len(_KNOWN) > MOST_KNOWN:
            _KNOWN.popitem(last=False)


def forget() -> None:
    with _LOCK:
        _KNOWN.clear()

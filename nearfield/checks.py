"""Checks of arguments, shared by methods, indices, partitions and gradients."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch


def check_positive(name: str, value: object, optional: bool = False, least: int = 1, most: float = math.inf) -> None:
    """An integer of at least `least` and at most `most`, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {kind}{' or None' if optional else ''}, got {value!r}")
    if value > most:
        raise ValueError(f"{name} must be at most {most}, got {value!r}")


MOST = 2**31 - 1
"""For sizes that nothing bounds but memory: beyond, numbers would not fit into 64 bits."""


def check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")


def check_generator_seed(name: str, value: object) -> None:
    """An integer that torch.Generator takes as its seed."""
    check_integer(name, value)
    if not -(2**63) <= value < 2**64:  # type: ignore[operator]
        raise ValueError(f"{name} must be from -2^63 to 2^64 - 1, got {value!r}")


FLAGS = (bool, torch.SymBool)
"""What may say yes or no; the second is a comparison of sizes that torch.compile does not know."""


def check_flag(name: str, value: object) -> bool:
    """What says yes or no as a bool: True, False, 1, 0, and a boolean tensor of one entry. It waits for a GPU for the latter."""
    if isinstance(value, FLAGS):
        return value  # type: ignore[return-value]
    is_one = isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.numel() == 1
    if is_one or (isinstance(value, int) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {value!r}")


def check_dropout(name: str, value: object) -> None:
    """A probability below 1. False counts as 0, as `self.training and 0.1` has it."""
    if not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ValueError(f"{name} must be in [0, 1), got {value!r}")


def check_scale(name: str, value: object) -> None:
    """A finite number, or None."""
    # A comparison and not `math.isfinite`: torch.compile can trace it where the scale is a symbol.
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf):
        raise ValueError(f"{name} must be a finite number, or None for 1/sqrt(dim), got {value!r}")


def check_softcap(value: object) -> float:
    """The argument `softcap` of a call as a number; 0 for none, as in FlashAttention."""
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"softcap must be a positive number, or 0 or None for no cap, got {value!r}")
    return float(min(value, torch.finfo(torch.float64).max))  # Integers may be larger.


def check_offset(value: object) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | torch.SymInt)):
        raise ValueError(f"offset must be an integer or None, got {value!r}")


def check_scalars(
    dropout_p: object, is_causal: object, scale: object, enable_gqa: object, offset: object, softcap: object
) -> tuple[bool, bool]:
    """The arguments of a call that are no tensors: each by itself, and before anything asks whether they are set.

    Returns `is_causal` and `enable_gqa` as bools.
    """
    check_dropout("dropout_p", dropout_p)
    check_scale("scale", scale)
    check_offset(offset)
    check_softcap(softcap)
    return check_flag("is_causal", is_causal), check_flag("enable_gqa", enable_gqa)


def check_generator(value: object) -> None:
    if value is not None and not isinstance(value, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator or None, got {value!r}; make one by torch.Generator().manual_seed(0)"
        )


def check_fraction(name: str, value: object) -> None:
    """A number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")


def check_not_negative(name: str, value: object, optional: bool = False) -> None:
    """A finite number of at least 0, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0{' or None' if optional else ''}, got {value!r}")


def check_has(name: str, value: object, function: str, example: str) -> None:
    """An object, and not a class, that has a function of this name."""
    if isinstance(value, type) or not callable(getattr(value, function, None)):
        hint = f"; write {value.__name__}(), with parentheses" if isinstance(value, type) and hasattr(value, function) else ""
        raise TypeError(f"{name} must be {example}, got {value!r}{hint}")


def check_method(name: str, value: object) -> None:
    """What `nearfield.Method` asks for."""
    check_has(name, value, "run", "a method such as Exact() or TopK(k=64)")
    missing = [attribute for attribute in ("any_mask", "is_async") if not hasattr(value, attribute)]
    if missing:
        raise TypeError(f"{name}={value!r} has no {' and no '.join(missing)}; subclass nearfield.Method, which has defaults")


def check_index(name: str, value: object) -> None:
    check_has(name, value, "build", "an index such as ExactIndex()")


def check_gradient(name: str, value: object) -> None:
    check_has(name, value, "estimate", "a gradient such as gradients.RandomWalk()")


def check_dropped_gradient(method: object, gradient: Any, dropout_p: float) -> None:
    """Raise where a backward pass by `gradient` would not know which pairs the forward pass of `method` dropped."""
    if not dropout_p:
        return
    if not getattr(method, "drops_pairs", False):
        raise ValueError(
            f"method={method!r} does not say which pairs of rows and keys it drops, so gradient={gradient!r} cannot be combined "
            f"with dropout; got dropout_p={dropout_p}. Use Exact(), TopK(...) or LazyGumbel(...), or gradient=None"
        )
    if "dropout" not in inspect.signature(gradient.estimate).parameters:
        raise ValueError(
            f"gradient={gradient!r} cannot be combined with dropout: its estimate has no argument named dropout; "
            f"got dropout_p={dropout_p}"
        )


def check_logits(method: object, gradient: object, softcap: float, sink: str) -> None:
    """Raise where a cap or a sink is asked for that the method, or the gradient, would ignore. `sink`: what asks for one."""
    if not softcap and not sink:
        return
    asked = f"softcap={softcap:g}" if softcap else sink
    if gradient is not None:
        raise ValueError(f"gradient={gradient!r} knows plain logits only, got {asked}; use gradient=None")
    if not getattr(method, "any_logits", False):
        raise ValueError(
            f"{type(method).__name__} knows plain logits only, got {asked}; use Exact(), TopK(...), Cells(...) or Auto()"
        )


def general_mask_error(who: str, attn_mask: torch.Tensor, remedy: str) -> ValueError:
    """For a mask beyond key padding that `who` cannot honour."""
    if _looks_causal(attn_mask):
        remedy = f"It looks lower-triangular: pass is_causal=True in place of attn_mask. {remedy}"
    return ValueError(
        f"{who} honours only boolean key-padding masks, broadcastable from [batch, 1, 1, key_length]; got {attn_mask.dtype} of "
        f"shape {tuple(attn_mask.shape)}. {remedy}"
    )


def _looks_causal(mask: torch.Tensor) -> bool:
    """Whether a square boolean mask shows all keys to the last row, its own to each row, and the next one to none. O(n)."""
    if torch.compiler.is_compiling() or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return False
    if mask.dtype != torch.bool:
        return False
    parts = mask[..., -1, :], mask.diagonal(dim1=-2, dim2=-1), ~mask.diagonal(1, dim1=-2, dim2=-1), ~mask[..., 0, 1:]
    return all(bool(part.all()) for part in parts)


def double_backward_error() -> NotImplementedError:
    return NotImplementedError(
        "nearfield does not support double backward (create_graph=True); "
        "use torch.nn.functional.scaled_dot_product_attention with the math backend for second derivatives"
    )


def refuse_double_backward() -> None:
    """For backward passes: gradients are recorded there only if somebody wants to differentiate them."""
    if torch.is_grad_enabled():
        raise double_backward_error()


def check_seed(name: str, value: object) -> None:
    """A number that seeds a generator."""
    check_integer(name, value)
    if not 0 <= value < 2**63:  # type: ignore[operator]
        raise ValueError(f"{name} must be between 0 and 2^63 - 1, got {value!r}")

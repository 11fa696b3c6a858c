"""Checks of plain arguments, shared by the strategy objects."""

from __future__ import annotations

import torch


def check_positive(name: str, value: object, optional: bool = False, least: int = 1) -> None:
    """An integer of at least `least`, or None where that is allowed."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{name} must be {kind}{' or None' if optional else ''}, got {value!r}")


def check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, got {value!r}")


def check_fraction(name: str, value: object) -> None:
    """A number strictly between 0 and 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1.0:
        raise ValueError(f"{name} must be a number between 0 and 1, got {value!r}")


def check_strategy(name: str, value: object, contract: str, verb: str, example: str, *more: str) -> None:
    """An object (not a class) with the method `verb`, and with all that `nearfield.<contract>` asks for besides."""
    if isinstance(value, type) or not callable(getattr(value, verb, None)):
        raise TypeError(f"{name} must be {example}, got {value!r}")
    for attribute in more:
        if not hasattr(value, attribute):
            raise TypeError(
                f"{name} must have the attribute {attribute!r}, got {value!r}; subclass nearfield.{contract}, which has it"
            )


def check_method(name: str, value: object) -> None:
    check_strategy(name, value, "Method", "run", "a method such as Exact() or TopK(k=64)", "is_async", "any_mask")


def check_index(name: str, value: object) -> None:
    check_strategy(name, value, "Index", "build", "an index such as ExactIndex()")


def check_gradient(name: str, value: object) -> None:
    check_strategy(name, value, "Gradient", "estimate", "a gradient such as gradients.RandomWalk()")


def refuse_double_backward() -> None:
    """Called in a backward pass, where gradients are being recorded only if somebody wants to differentiate them."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "nearfield does not support double backward (create_graph=True); "
            "use torch.nn.functional.scaled_dot_product_attention with the math backend for second derivatives"
        )


def check_seed(name: str, value: object) -> None:
    """A number that a generator takes."""
    check_integer(name, value)
    if not 0 <= value < 2**63:  # type: ignore[operator]
        raise ValueError(f"{name} must be between 0 and 2^63 - 1, got {value!r}")

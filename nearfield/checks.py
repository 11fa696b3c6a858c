"""Checks of plain arguments, shared by the strategy objects."""

from __future__ import annotations


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


def check_strategy(name: str, value: object, verb: str, example: str) -> None:
    """An object (not a class) with the method `verb`."""
    if isinstance(value, type) or not callable(getattr(value, verb, None)):
        raise TypeError(f"{name} must be {example}, got {value!r}")


def check_seed(name: str, value: object) -> None:
    """A number that a generator takes."""
    check_integer(name, value)
    if not 0 <= value < 2**63:  # type: ignore[operator]
        raise ValueError(f"{name} must be between 0 and 2^63 - 1, got {value!r}")

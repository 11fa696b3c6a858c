"""Hugging Face Transformers: `register()`, then `model.set_attn_implementation("nearfield")`; `CellCache` for long contexts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nearfield.hf.register import register

if TYPE_CHECKING:
    from nearfield.hf.cache import CellCache
    from nearfield.hf.generation import generate
    from nearfield.hf.memory import Memory

__all__ = ["CellCache", "Memory", "generate", "register"]


def __getattr__(name: str) -> Any:
    # These need Transformers, which is imported when they are asked for.
    if name == "CellCache":
        from nearfield.hf.cache import CellCache

        return CellCache
    if name == "generate":
        from nearfield.hf.generation import generate

        return generate
    if name == "Memory":
        from nearfield.hf.memory import Memory

        return Memory
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

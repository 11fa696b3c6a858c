"""Hugging Face Transformers: `register()`, then `model.set_attn_implementation("nearfield")`."""

from nearfield.hf.register import register

__all__ = ["register"]

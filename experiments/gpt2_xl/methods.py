"""The ways to attend, as Transformers knows them."""

from __future__ import annotations

from typing import Any

import nearfield as nf
from nearfield import hf

OWN = {"naive": "eager", "exact": "sdpa"}
"""Those that Transformers has: the whole matrix, and torch's SDPA."""
OURS = {"topk": nf.TopK(), "cells": nf.Cells()}
"""TopK with the paper's k = sqrt(n), by a search among all keys."""
METHODS = (*OWN, *OURS)


def attend(model: Any, method: str) -> None:
    """Let the layers of a model attend by a method."""
    if method in OURS:
        hf.register(f"nearfield-{method}", OURS[method])
    model.set_attn_implementation(OWN.get(method, f"nearfield-{method}"))

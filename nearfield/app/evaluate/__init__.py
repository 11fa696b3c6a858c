"""`nearfield eval`: what attention methods do to a language model, and the cheapest mixture that does little harm."""

from __future__ import annotations

from nearfield.app.evaluate.measure import attending, token_losses
from nearfield.app.evaluate.models import load_model, token_ids
from nearfield.app.evaluate.run import evaluate

__all__ = ["attending", "evaluate", "load_model", "token_ids", "token_losses"]

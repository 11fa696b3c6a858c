"""`nearfield eval`: what methods and budgets do to the perplexity of a language model, and the cheapest that does little."""

from __future__ import annotations

from nearfield.app.evaluate.measure import attending, token_losses
from nearfield.app.evaluate.models import load_model, token_ids
from nearfield.app.evaluate.run import evaluate

__all__ = ["attending", "evaluate", "load_model", "token_ids", "token_losses"]

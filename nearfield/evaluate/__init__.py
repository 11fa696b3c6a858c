"""`nearfield eval`: what methods and budgets do to the perplexity of a language model, and the cheapest that does little."""

from nearfield.evaluate.models import load_model, token_ids
from nearfield.evaluate.perplexity import attending, token_losses
from nearfield.evaluate.run import evaluate

__all__ = ["attending", "evaluate", "load_model", "token_ids", "token_losses"]

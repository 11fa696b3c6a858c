"""Error against the number of keys on uniform inputs (paper, Figure on the role of k)."""

from experiments.error_vs_k.draw import draw
from experiments.error_vs_k.plan import plan
from experiments.error_vs_k.tell import tell
from experiments.experiment import Experiment

EXPERIMENT = Experiment("error-vs-k", "The role of k in the error", plan, draw, tell)

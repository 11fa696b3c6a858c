"""Time, memory, recall and error of kNN attention with indices that do not score every key, to a million keys."""

from experiments.experiment import Experiment
from experiments.indices.draw import draw
from experiments.indices.plan import plan
from experiments.indices.tell import tell

EXPERIMENT = Experiment("indices", "kNN attention with an index", plan, draw, tell, devices=("cpu", "cuda"))

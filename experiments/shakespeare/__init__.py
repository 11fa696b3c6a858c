"""A small language model of characters, trained with exact and with kNN attention (paper, experiments on LLMs)."""

from experiments.experiment import Experiment
from experiments.shakespeare.draw import draw
from experiments.shakespeare.plan import plan
from experiments.shakespeare.tell import tell

EXPERIMENT = Experiment("shakespeare", "A model of characters, trained with kNN attention", plan, draw, tell)

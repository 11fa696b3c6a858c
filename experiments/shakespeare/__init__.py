"""A small language model of characters, trained with exact and with kNN attention (paper, experiments on LLMs)."""

from experiments.experiment import Experiment
from experiments.shakespeare.draw import draw
from experiments.shakespeare.plan import plan
from experiments.shakespeare.tell import tell

TITLE = "A model of characters, trained with kNN attention"
EXPERIMENT = Experiment("shakespeare", TITLE, plan, draw, tell, devices=("cuda", "cpu"), side_by_side=True)

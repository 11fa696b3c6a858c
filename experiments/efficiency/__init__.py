"""Time and memory against length on random inputs (paper, Figure on efficiency)."""

from experiments.efficiency.draw import draw
from experiments.efficiency.plan import plan
from experiments.efficiency.tell import tell
from experiments.experiment import Experiment

EXPERIMENT = Experiment("efficiency", "Efficiency on random inputs", plan, draw, tell, devices=("cpu", "cuda"))

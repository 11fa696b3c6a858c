"""The paper's theorems, run: lazy draws, promises, sizes, approximate indices."""

from experiments.experiment import Experiment
from experiments.theory.draw import draw
from experiments.theory.plan import plan
from experiments.theory.tell import tell

EXPERIMENT = Experiment("theory", "The theorems, run", plan, draw, tell)

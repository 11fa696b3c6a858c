"""Gradient descent with Monte-Carlo gradients (paper, Backward Pass Approximation Quality)."""

from experiments.experiment import Experiment
from experiments.gradient_descent.draw import draw
from experiments.gradient_descent.plan import plan
from experiments.gradient_descent.tell import tell

EXPERIMENT = Experiment("gradient-descent", "Gradient descent with estimated gradients", plan, draw, tell)

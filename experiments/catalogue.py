"""Every experiment, in the order of the report."""

from __future__ import annotations

from experiments import efficiency, error_vs_k, gpt2_xl, gradient_descent, indices, shakespeare, theory
from experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (efficiency, indices, error_vs_k, gradient_descent, theory, shakespeare, gpt2_xl)
}

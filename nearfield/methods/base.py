"""What every method promises."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from nearfield.gradients.base import Gradient
from nearfield.problem import Problem
from nearfield.sampling import Seeds


@dataclass(frozen=True)
class Call:
    """What a method is asked for, beyond the problem itself."""

    seeds: Seeds
    backend: str = "auto"
    gradient: Gradient | None = None
    """how to differentiate; None: the method's own way"""
    diagnostics: bool = False
    """whether log-normaliser and standard error are wanted"""


@dataclass(frozen=True)
class Outcome:
    """What a method returns: tensors in the layout of `Rows`."""

    output: Tensor
    """`[batch, rows, value_dim]`"""
    lse: Tensor | None = None
    stderr: Tensor | None = None
    info: dict[str, Any] = field(default_factory=dict)
    backend: str = ""
    """the kernels that ran, where that is not what `kernels.name` says"""


class Method(Protocol):
    """A strategy for the whole estimate."""

    def run(self, problem: Problem, call: Call) -> Outcome: ...

"""What an experiment is made of: a plan of units of work, pictures of their rows, and what they say about the paper."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from experiments.corpus import Corpus
from experiments.settings import Settings

Row = dict[str, Any]
"""One measurement: plain numbers and words, the settings it was made with among them."""
Rows = list[Row]
Done = Mapping[str, Rows]
"""The rows of the units that are done, by the units' keys."""
Verdict = Literal["confirmed", "refuted", "partly", "untested", "beyond"]


def judged(holds: Sequence[bool]) -> Verdict:
    """By the cases that there are numbers for: whether a claim holds in all of them, in some, or in none."""
    return "untested" if not holds else "confirmed" if all(holds) else "partly" if any(holds) else "refuted"


@dataclass(frozen=True)
class Unit:
    """A piece of work that is saved as a whole."""

    key: str
    measure: Callable[[Done], Rows]
    """is given what is done so far: some units depend on earlier ones"""
    stale: Callable[[Rows], bool] = lambda rows: False
    """whether saved rows of this unit are to be measured again"""
    digest: str = ""
    """of the sizes that it is measured with (`digest.digest`): saved rows of another one are measured again"""
    corpus: Corpus | None = None
    """the text that it reads, where rows depend on it: they then hold its `sha256`, and its name as `corpus`"""


@dataclass(frozen=True)
class Finding:
    """A claim, and what the numbers say about it. Texts may use `code`, ^{superscripts} and _{subscripts}."""

    claim: str
    verdict: Verdict
    """"untested": the runs never came to what the claim is about; "beyond": the paper makes no claim here"""
    evidence: str
    why: str = ""


@dataclass(frozen=True)
class Table:
    title: str
    head: Sequence[str]
    body: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """What the report says about one experiment; every number in it comes from the rows."""

    paper: str
    """what the paper did and says"""
    here: str
    """what was done here"""
    findings: Sequence[Finding]
    captions: Mapping[str, str]
    """by figure"""
    tables: Sequence[Table] = ()
    notes: Sequence[str] = field(default=())


@dataclass(frozen=True)
class Experiment:
    name: str
    title: str
    plan: Callable[[Settings], list[Unit]]
    draw: Callable[[Rows], Mapping[str, Any]]
    """rows -> matplotlib figures by name"""
    tell: Callable[[Rows], Section]
    keep: Callable[[Rows], bool] = lambda rows: False
    """whether saved rows of a unit that is not planned this time are still told and drawn; others are dropped"""
    devices: Sequence[str] = ("cpu",)
    """where it can run; the first is where it has the sizes of the paper, and whose verdicts count"""
    side_by_side: bool = False
    """whether units need nothing of each other, and say something where they share the machine (`Settings.jobs`)"""

"""The results of `nearfield ruler`: as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from nearfield.app.ruler.official import TASKS
from nearfield.app.ruler.record import Key
from nearfield.app.ruler.scores import Place, Score, summarised
from nearfield.app.ruler.ways import WAYS

LEGEND = (
    "Scores are means of the official scorers, from 0 to 100, each task with the same weight; beside them the ends of 95% "
    "intervals. loss: the score of exact attention less this one on the same prompts, with the p-value of an exact paired "
    "sign-flip test (* below 5%, ** below 1%; each for itself, of many). keys: read by a token of the answer, of all there are."
)


@dataclass(frozen=True)
class Heads:
    """How often heads opened the needles, over all watched answers of one way."""

    way: str
    answers: int
    steps: int
    layers: list[int]
    opened: list[list[float]]
    """by layer and head, as a share of the steps"""
    looked: list[list[float]]


@dataclass(frozen=True)
class Results:
    """What there is on record, and what it says."""

    answers: Mapping[Key, Mapping[str, Any]]
    scores: Mapping[Place, Score]
    heads: list[Heads]

    @staticmethod
    def of(answers: Mapping[Key, Mapping[str, Any]]) -> Results:
        return Results(answers, summarised(answers), _heads(answers))

    def score(self, place: Place) -> Score | None:
        """None: there is none, or it leaves out tasks or lengths that exact attention has, and cannot stand beside it."""
        found, exact = self.scores.get(place), self.scores.get(replace(place, way="exact"))
        return None if found is None or (exact is not None and found.parts < exact.parts) else found

    @property
    def templates(self) -> list[str]:
        return list(dict.fromkeys(key.template for key in self.answers))

    @property
    def ways(self) -> list[str]:
        """In the order in which they are known, exact attention first."""
        found = dict.fromkeys(key.way for key in self.answers)
        return sorted(found, key=lambda way: list(WAYS).index(way) if way in WAYS else len(WAYS))

    @property
    def lengths(self) -> list[int]:
        return sorted({key.length for key in self.answers})

    @property
    def tasks(self) -> list[str]:
        found = {key.task for key in self.answers}
        return [task for task in TASKS if task in found]


def _heads(answers: Mapping[Key, Mapping[str, Any]]) -> list[Heads]:
    found: dict[str, list[Mapping[str, Any]]] = {}
    for key, one in answers.items():
        if one.get("needle"):
            found.setdefault(key.way, []).append(one["needle"])
    return [_sum(way, parts) for way, parts in found.items()]


def _sum(way: str, parts: Sequence[Mapping[str, Any]]) -> Heads:
    layers = parts[0]["layers"]
    parts = [part for part in parts if part["layers"] == layers]
    steps = sum(part["steps"] for part in parts)

    def shares(what: str) -> list[list[float]]:
        whole = [part[what] for part in parts]
        return [[sum(x) / steps for x in zip(*heads, strict=True)] for heads in zip(*whole, strict=True)]

    return Heads(way, len(parts), steps, layers, shares("opened"), shares("looked"))


def tabulated(found: Results, template: str) -> list[Table]:
    """Ways by length; and, for each way, tasks by length."""
    tables = [_by_length(found, template)]
    for way in found.ways:
        table = _table(f"{way}, {template}: by task")
        table.add_column("task", no_wrap=True)
        for length in found.lengths:
            table.add_column(f"{length:,}", justify="right", no_wrap=True)
        for task in found.tasks:
            table.add_row(task, *(_cell(found.score(Place(template, way, length, task))) for length in found.lengths))
        tables.append(table)
    return tables


def _by_length(found: Results, template: str) -> Table:
    table = _table(f"{template}: all tasks")
    table.add_column("way", no_wrap=True)
    for length in found.lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
        table.add_column("loss", justify="right", no_wrap=True)
    for name in ("all", "loss", "keys", "s/prompt", "s/answer"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in found.ways:
        row = [way]
        for score in [found.score(Place(template, way, length, None)) for length in (*found.lengths, None)]:
            row += [_cell(score, with_loss=False), loss(score)]
        whole = found.score(Place(template, way, None, None))
        row += [""] * 3 if whole is None else [f"{whole.share:.1%}", f"{whole.reading:.2f}", f"{whole.writing:.2f}"]
        table.add_row(*row)
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))


def _cell(score: Score | None, with_loss: bool = True) -> str:
    if score is None:
        return ""
    mark = stars(score.p) if with_loss else ""
    return f"{score.mean:.1f} [dim]{score.low:.0f}-{score.high:.0f}[/]{mark}"


def loss(score: Score | None) -> str:
    return "" if score is None or score.loss is None or score.p is None else f"{score.loss:+.1f}{stars(score.p)}"


def stars(p: float | None) -> str:
    return "" if p is None or p >= 0.05 else "**" if p < 0.01 else "*"


def as_json(found: Results, about: Mapping[str, Any]) -> dict[str, Any]:
    """All scores with what they are of, and the heads. The answers themselves are in the record."""
    scores = [{**asdict(place), **asdict(score)} for place, score in found.scores.items()]
    return {**about, "answers": len(found.answers), "scores": scores, "needles": [asdict(heads) for heads in found.heads]}

"""Run an experiment: its units one by one with a bar, then its findings and figures."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import look
from experiments.experiment import Experiment, Section, Unit
from experiments.settings import Settings
from experiments.store import Store, all_rows


def run(experiment: Experiment, settings: Settings, console: Console, fresh: bool = False) -> Section:
    """Do what is not yet there, save it as it comes, draw. What the results say is returned and saved with them."""
    store = Store(experiment.name, settings, fresh)
    plan = experiment.plan(settings)
    todo = [unit for unit in plan if is_due(unit, store)]
    corpus = next((unit.corpus for unit in plan if unit.corpus is not None), None)
    if corpus is not None:
        store.check_text(corpus)
        console.print(f"{experiment.name}: reads {corpus}", markup=False, highlight=False)
    if len(todo) < len(plan):
        console.print(f"{experiment.name}: {len(plan) - len(todo)} of {len(plan)} units are there already ({store.path})")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not todo) as progress:
        bar = progress.add_task("", total=len(plan), completed=len(plan) - len(todo))
        for unit in todo:
            progress.update(bar, description=f"{experiment.name}: {unit.key}")
            start = time.perf_counter()
            rows = unit.measure(store)
            store.save(unit.key, rows, time.perf_counter() - start, unit.digest)
            progress.advance(bar)
        progress.update(bar, description=experiment.name)
    told = {unit.key: store[unit.key] for unit in plan}
    told |= {key: rows for key, rows in store.items() if key not in told and experiment.keep(rows)}
    section = experiment.tell(all_rows(told))
    store.finish(list(told), section.findings)
    figures = settings.folder / "figures"
    if todo or not all((figures / f"{name}.svg").exists() for name in section.captions):
        look.save(experiment.draw(all_rows(told)), figures)
    return section


def is_due(unit: Unit, store: Store) -> bool:
    return unit.key not in store or store.digest(unit.key) != unit.digest or unit.stale(store[unit.key])

"""Run an experiment: its units one by one with a bar, then its findings and figures."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import look
from experiments.experiment import Experiment, Section
from experiments.settings import Settings
from experiments.store import Store, all_rows


def run(experiment: Experiment, settings: Settings, console: Console, fresh: bool = False) -> Section:
    """Do what is not yet there, save it as it comes, draw. What the results say is returned and saved with them."""
    store = Store(experiment.name, settings, fresh)
    plan = experiment.plan(settings)
    todo = [unit for unit in plan if unit.key not in store or unit.stale(store[unit.key])]
    if len(todo) < len(plan):
        console.print(f"{experiment.name}: {len(plan) - len(todo)} of {len(plan)} units are there already ({store.path})")
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, disable=not todo) as progress:
        bar = progress.add_task("", total=len(plan), completed=len(plan) - len(todo))
        for unit in todo:
            progress.update(bar, description=f"{experiment.name}: {unit.key}")
            start = time.perf_counter()
            rows = unit.measure(store)
            store.save(unit.key, rows, time.perf_counter() - start)
            progress.advance(bar)
        progress.update(bar, description=experiment.name)
    planned = {unit.key: store[unit.key] for unit in plan}
    section = experiment.tell(all_rows(planned))
    store.finish([unit.key for unit in plan], section.findings)
    figures = settings.folder / "figures"
    if todo or not all((figures / f"{name}.svg").exists() for name in section.captions):
        look.save(experiment.draw(all_rows(planned)), figures)
    return section

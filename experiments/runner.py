"""Run an experiment: its units one by one with a bar, then its findings and figures."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments import look
from experiments.experiment import Experiment, Rows, Section, Unit
from experiments.settings import Settings
from experiments.store import Store, all_rows


def run(experiment: Experiment, settings: Settings, console: Console, fresh: bool = False) -> Section:
    """Do what is not yet there, save it as it comes, draw. What the results say is returned and saved with them."""
    settings = replace(settings, began=time.perf_counter())
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

        def say(text: str) -> None:
            progress.update(bar, description=f"{experiment.name}: {text}")

        together = settings.jobs > 1 and experiment.side_by_side
        done = side_by_side(experiment, settings, todo, say) if together else in_turn(todo, store, say)
        for unit, rows, seconds in done:
            store.save(unit.key, rows, seconds, unit.digest)
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


Measured = Iterator[tuple[Unit, Rows, float]]
"""A unit, its rows, and the seconds they took."""


def in_turn(todo: list[Unit], store: Store, say: Callable[[str], None]) -> Measured:
    for unit in todo:
        say(unit.key)
        start = time.perf_counter()
        rows = unit.measure(store)
        yield unit, rows, time.perf_counter() - start


def side_by_side(experiment: Experiment, settings: Settings, todo: list[Unit], say: Callable[[str], None]) -> Measured:
    """As they end. A unit is measured by a process that makes the plan again: what it calls cannot be sent there.

    Where one fails, the others come to their end first.
    """
    say(f"{settings.jobs} at a time")
    with ProcessPoolExecutor(settings.jobs, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(alone, experiment.plan, settings, unit.key): unit for unit in todo}
        try:
            ended = list[Future[tuple[Rows, float]]]()
            for future in as_completed(running):
                if future.exception() is None:
                    yield running[future], *future.result()
                ended.append(future)
            for future in ended:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def alone(plan: Callable[[Settings], list[Unit]], settings: Settings, key: str) -> tuple[Rows, float]:
    """Measure one unit of a plan with this process's share of the cores."""
    torch.set_num_threads(max(1, multiprocessing.cpu_count() // settings.jobs))
    unit = next(unit for unit in plan(settings) if unit.key == key)
    start = time.perf_counter()
    return unit.measure({}), time.perf_counter() - start


def is_due(unit: Unit, store: Store) -> bool:
    return unit.key not in store or store.digest(unit.key) != unit.digest or unit.stale(store[unit.key])

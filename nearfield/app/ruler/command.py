"""`nearfield ruler` on a terminal: make the prompts, let the model answer them, and print and save what came of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import nearfield
from nearfield.app import wide_console
from nearfield.app.arguments import check_folder, check_model
from nearfield.app.evaluate.models import known_positions, load_config, load_model, load_tokenizer, longest_context, placement
from nearfield.app.evaluate.report import environment, json_text
from nearfield.app.ruler import official
from nearfield.app.ruler.generators import Generators
from nearfield.app.ruler.page import page
from nearfield.app.ruler.prompts import Prompt, Prompts, check_template, tokenizer_digest
from nearfield.app.ruler.record import Record
from nearfield.app.ruler.report import LEGEND, Results, as_json, tabulated
from nearfield.app.ruler.run import OutOfTime, Plan, answer_all, make_prompts
from nearfield.app.ruler.ways import ALGORITHM, WAYS, Way
from nearfield.hf.memory_file import fingerprint
from nearfield.user_cache import folder as user_folder
from nearfield.user_cache import replace_bytes

WRITTEN = ("ruler.json", "ruler.html")


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    model: str
    tasks: Sequence[str]
    lengths: Sequence[int]
    samples: int
    methods: Sequence[str]
    templates: Sequence[str]
    seed: int
    batch: int
    watch: int
    minutes: float | None
    out: Path
    prompts: Path | None
    device: torch.device | None
    dtype: torch.dtype | None
    download: bool
    only_prompts: bool = False


class Stopped(Exception):
    """The run has ended before all was done; its text says how to go on."""


def run(asked: Asked) -> None:
    """All of `nearfield ruler`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done, or Stopped."""
    started = time.monotonic()
    console = wide_console(150)
    official.check()
    check_model(asked.model)
    check_folder("--out", asked.out)
    place = asked.prompts or user_folder() / "ruler"
    check_folder("--prompts", place)
    with console.status(f"reading the configuration of {asked.model}"):
        config = load_config(asked.model, asked.download)
    if config is not None:
        _check_lengths(asked.lengths, known_positions(config))
    if asked.only_prompts:
        _only_prompts(asked, place, console)
        return
    with console.status(f"loading {asked.model}"):
        model, tokenizer = load_model(asked.model, *placement(asked.device, asked.dtype), asked.download)
    for template in asked.templates:
        check_template(tokenizer, template)
    _check_lengths(asked.lengths, longest_context(model))  # The configuration may be in the file with the weights.
    name = Path(asked.model).stem if asked.model.endswith(".gguf") else Path(asked.model).name
    where = environment(model)
    about = {
        "nearfield": nearfield.__version__,
        "algorithm": ALGORITHM,
        "model": name,
        "fingerprint": fingerprint(model),
        "dtype": where["dtype"],
        "device": model.device.type,
        "tokenizer": tokenizer_digest(tokenizer),
        "seed": asked.seed,
        "versions": official.versions(),
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    record = Record(asked.out / "answers.jsonl", about, {way.name: way.digest for way in WAYS.values()})
    if record.unreadable:
        console.print(f"{record.unreadable} damaged answers in {record.path} are written anew", highlight=False, soft_wrap=True)
    ways = [WAYS[method] for method in dict.fromkeys(["exact", *asked.methods])]
    plan = _plan(asked, ways)
    told = {"environment": where, **about, "ways": {way.name: way.about for way in WAYS.values()}}
    reason = None
    try:
        _measure(asked, plan, model, tokenizer, place, record, console, started, told)
    except KeyboardInterrupt:
        reason = "stopped"
    except OutOfTime:
        reason = f"the {asked.minutes:g} minutes are over"
    except torch.OutOfMemoryError as error:
        lacking = str(error).partition("\n")[0].partition(". ")[0]
        reason = f"{model.device} has too little memory ({lacking}); use a smaller --batch, or shorter --lengths"
    _show(record, console, told)
    if reason is not None:
        kept = f"{len(record.answers):,} answers are in {record.path}, and the same command goes on from there"
        raise Stopped(f"{reason}: {kept}")


def _check_lengths(lengths: Sequence[int], known: int | None) -> None:
    """Raises if a length is more than the model's positions."""
    if known is None or max(lengths) <= known:
        return
    fit = ",".join(str(length) for length in lengths if length <= known)
    remedy = f"use --lengths {fit}" if fit else f"give lengths of at most {known}"
    raise ValueError(f"--lengths {max(lengths)} is more than the {known:,} positions that this model knows; {remedy}")


def _only_prompts(asked: Asked, place: Path, console: Console) -> None:
    """Make the prompts, for which the tokenizer is enough."""
    with console.status(f"loading the tokenizer of {asked.model}"):
        tokenizer = load_tokenizer(asked.model, asked.download)
    for template in asked.templates:
        check_template(tokenizer, template)
    with _bars(console) as progress, Generators(tokenizer) as generators:
        prompts = Prompts(place, tokenizer, asked.seed, generators)
        made = _made(asked, _plan(asked, []), prompts, progress)
    count = sum(map(len, made.values()))
    console.print(f"{count:,} prompts are in {place / prompts.fingerprint[:16]}", highlight=False, markup=False, soft_wrap=True)


def _plan(asked: Asked, ways: Sequence[Way]) -> Plan:
    tasks = [official.tasks()[task] for task in asked.tasks]
    return Plan(tasks, asked.lengths, asked.templates, asked.samples, ways, asked.batch, asked.watch)


def _bars(console: Console) -> Progress:
    columns = (
        TextColumn("{task.description:<38}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


def _made(asked: Asked, plan: Plan, prompts: Prompts, progress: Progress) -> dict[tuple[str, int, str], list[Prompt]]:
    """All prompts, behind a bar for one task at a time."""
    bar = progress.add_task("prompts", total=asked.samples)
    found = make_prompts(plan, prompts, lambda what, count: progress.update(bar, description=what, completed=count))
    progress.remove_task(bar)
    return found


SAVED_EVERY = 60.0
"""Seconds after which the page and the scores are written anew, so that a run that is killed leaves them, too."""


def _measure(
    asked: Asked,
    plan: Plan,
    model: Any,
    tokenizer: Any,
    place: Path,
    record: Record,
    console: Console,
    started: float,
    about: dict[str, Any],
) -> None:
    """Behind two bars: the prompts of one task at a time, then all answers."""
    with _bars(console) as progress, Generators(tokenizer) as generators:
        prompts = _made(asked, plan, Prompts(place, tokenizer, asked.seed, generators), progress)
        every = progress.add_task("", total=plan.answers)

        def told(what: str, more: int) -> None:
            progress.update(every, description=what, advance=more)

        last = time.monotonic()

        def saved() -> None:
            nonlocal last
            if time.monotonic() > last + SAVED_EVERY:
                save(record, about)
                last = time.monotonic()

        until = None if asked.minutes is None else started + 60 * asked.minutes
        answer_all(plan, model, tokenizer, prompts, record, told, until, saved)


def save(record: Record, about: dict[str, Any]) -> Results:
    """Write what the answers on record say."""
    found = Results.of(record.answers)
    for name, text in zip(WRITTEN, (json_text(as_json(found, about)), page(found, about)), strict=True):
        path = record.path.parent / name
        try:
            replace_bytes(path, text.encode())
        except OSError as error:
            raise OSError(
                f"{path} cannot be written ({error.strerror}); the answers in {record.path} are kept: free some space, and run "
                "the same command again"
            ) from error
    return found


def _show(record: Record, console: Console, about: dict[str, Any]) -> None:
    """Write it and print it."""
    if not record.answers:
        return
    found = save(record, about)
    for template in found.templates:
        for table in tabulated(found, template):
            console.print(table)
            console.print()
    console.print(LEGEND, highlight=False)
    paths = ", ".join(str(record.path.parent / name) for name in WRITTEN)
    console.print(f"written: {paths}; all answers: {record.path}", highlight=False, markup=False, soft_wrap=True)

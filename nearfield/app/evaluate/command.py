"""`nearfield eval` on a terminal: load, measure with a bar, print, save."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nearfield.app.evaluate.models import load_model, token_ids
from nearfield.app.evaluate.report import environment, legend, save, save_plot, sentence, tabulated
from nearfield.app.evaluate.run import Evaluation, evaluate
from nearfield.hf.config import read_config


@dataclass
class Bar:
    """Steps shown as a bar."""

    progress: Progress
    task: TaskID

    def start(self, steps: int) -> None:
        self.progress.update(self.task, total=steps)

    def step(self) -> None:
        self.progress.advance(self.task)

    def at(self, what: str) -> None:
        self.progress.update(self.task, description=what)


def run(
    model_name: str,
    texts: Sequence[Path],
    *,
    out: Path,
    tokens: int,
    methods: Sequence[str],
    budgets: Sequence[float],
    cell_size: int,
    segment: int | None,
    sinks: int,
    ladder: Sequence[float],
    tolerance: float | None,
    config: Path | None,
    device: str | None,
    dtype: torch.dtype | None,
    download: bool,
) -> Evaluation:
    """Everything that `nearfield eval` does. Raises ValueError or OSError, with a remedy, on what cannot be."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width; the default of 80 would cut the table
    given = None if config is None else read_config(config)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    number = dtype or (torch.bfloat16 if place.type == "cuda" else torch.float32)
    with console.status(f"loading {model_name}"):
        model, tokenizer = load_model(model_name, place, number, download)
        ids = {name: token_ids(tokenizer, path) for name, path in _named(texts).items()}
    columns = (SpinnerColumn(), TextColumn("{task.description:<22}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        found = evaluate(
            model,
            ids,
            tokens=tokens,
            methods=methods,
            budgets=budgets,
            cell_size=cell_size,
            segment=segment,
            sinks=sinks,
            config=given,
            tolerance=tolerance,
            ladder=ladder,
            progress=Bar(progress, progress.add_task("", total=None)),
        )
    name = Path(model_name).stem if model_name.endswith(".gguf") else Path(model_name).name
    where = environment(model)
    title = f"{name}, {found.geometry.tokens:,} tokens of {', '.join(found.texts)}; {place}, {where['dtype']}"
    console.print(title, highlight=False, markup=False)
    if found.geometry.tokens < tokens:
        console.print(f"(--tokens {tokens:,} was cut to what the texts and the model have)", highlight=False)
    console.print(tabulated(found))
    console.print(legend(found), highlight=False)
    if found.recommendation is not None:
        console.print(sentence(found.recommendation, found.exact.keys or 1.0), highlight=False, style="bold green")
    else:
        console.print("With --tolerance 0.4 the cheapest budget of each layer within 0.4% is chosen as well.", highlight=False)
    written = save(found, {"environment": where, "model": name}, out)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("No plot: matplotlib is not installed. Install it with: pip install 'nearfield[plots]'", markup=False)
    else:
        written.append(out / "eval.png")
        save_plot(found, title, written[-1])
    console.print("written: " + ", ".join(map(str, written)), highlight=False, markup=False, soft_wrap=True)
    if found.recommendation is not None:
        console.print(f'use it: nearfield.hf.register(config="{out / "config.json"}")', highlight=False, markup=False)
    return found


def _named(texts: Sequence[Path]) -> dict[str, Path]:
    """By short names, which are whole paths where those would be the same."""
    names = [path.name for path in texts]
    return {path.name if names.count(path.name) == 1 else str(path): path for path in texts}

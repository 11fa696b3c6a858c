"""`nearfield eval` on a terminal: load a model, measure it behind a progress bar, print and save the results."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nearfield.app import wide_console
from nearfield.app.arguments import check_folder, check_model
from nearfield.app.evaluate.models import load_model, placement, read_text, token_ids
from nearfield.app.evaluate.report import environment, legend, save, save_plot, sentence, tabulated
from nearfield.app.evaluate.run import Evaluation, evaluate
from nearfield.app.evaluate.settings import Geometry, usual_segment
from nearfield.hf.config import read_config


@dataclass
class Bar:
    """Progress of an evaluation as a bar on the terminal."""

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
    device: torch.device | None,
    dtype: torch.dtype | None,
    download: bool,
) -> Evaluation:
    """All of `nearfield eval`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
    console = wide_console(120)
    for path in texts:
        read_text(path)
    given = None if config is None else read_config(config)
    Geometry(tokens, segment or usual_segment(tokens), sinks, cell_size)  # raises if even that many tokens are too few
    check_model(model_name)
    check_folder("--out", out)
    with console.status(f"loading {model_name}"):
        model, tokenizer = load_model(model_name, *placement(device, dtype), download)
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
    title = f"{name}, {found.geometry.tokens:,} tokens of {', '.join(found.texts)}; {where['device']}, {where['dtype']}"
    console.print(title, highlight=False, markup=False)
    if found.geometry.tokens < tokens:
        console.print(f"(--tokens {tokens:,} is more than the shortest text or the model allows)", highlight=False)
    console.print(tabulated(found))
    console.print(legend(found), highlight=False)
    if found.recommendation is not None:
        console.print(sentence(found.recommendation, found.exact.keys or 1.0), highlight=False, style="bold green")
    else:
        console.print(
            "`nearfield tune`, or --tolerance 0.4, also chooses budgets by layer that raise perplexity by at most 0.4%.",
            highlight=False,
        )
    written = save(found, {"environment": where, "model": name}, out)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plot: it needs matplotlib: pip install 'nearfield[plots]'", markup=False)
    else:
        written.append(out / "eval.png")
        save_plot(found, title, written[-1])
    console.print("written: " + ", ".join(map(str, written)), highlight=False, markup=False, soft_wrap=True)
    if found.recommendation is not None:
        console.print(f'use it: nearfield.hf.register(config="{out / "config.json"}")', highlight=False, markup=False)
    return found


def _named(texts: Sequence[Path]) -> dict[str, Path]:
    """Texts by name: the file name, or the whole path if two have the same file name."""
    names = [path.name for path in texts]
    return {path.name if names.count(path.name) == 1 else str(path): path for path in texts}

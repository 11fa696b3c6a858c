"""`nearfield eval` on a terminal: load a model, measure it behind a progress bar, print and save the results."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nearfield.app import wide_console
from nearfield.app.arguments import check_folder, check_model
from nearfield.app.evaluate.models import layer_count, load_model, placement, read_text, token_ids
from nearfield.app.evaluate.report import environment, save, save_config, save_plot, sentence, tabulated
from nearfield.app.evaluate.run import Evaluation, evaluate
from nearfield.app.evaluate.settings import AnswerGeometry, Geometry, usual_segment
from nearfield.cells.sizes import GROUP_FROM, GROUP_FROM_ON_GPU
from nearfield.hf.config import LayerConfig, read_config


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
    given = None if config is None else read_config(config)
    Geometry(tokens, segment or usual_segment(tokens), sinks, cell_size)  # raises if even that many tokens are too few
    loaded = _load(model_name, texts, out, device, dtype, download, chooses=tolerance is not None)
    with _bar(loaded.console) as bar:
        found = evaluate(
            loaded.model,
            loaded.ids,
            tokens=tokens,
            methods=methods,
            budgets=budgets,
            cell_size=cell_size,
            segment=segment,
            sinks=sinks,
            config=given,
            tolerance=tolerance,
            ladder=ladder,
            progress=bar,
        )
    _tell(found, loaded, tokens, out)
    return found


def run_answers(
    model_name: str,
    texts: Sequence[Path],
    *,
    out: Path,
    tokens: int,
    written: int,
    ladder: Sequence[float],
    tolerance: float,
    device: torch.device | None,
    dtype: torch.dtype | None,
    download: bool,
) -> Evaluation:
    """All of `nearfield tune --cache`, likewise."""
    from nearfield.app.evaluate.answer import evaluate_answers  # says what to install where Transformers is missing

    AnswerGeometry(tokens, written)  # raises if even that many tokens are too few
    loaded = _load(model_name, texts, out, device, dtype, download, chooses=True)
    with _bar(loaded.console) as bar:
        found = evaluate_answers(
            loaded.model, loaded.ids, tokens=tokens, written=written, tolerance=tolerance, ladder=ladder, progress=bar
        )
    _tell(found, loaded, tokens, out)
    return found


class _Loaded(NamedTuple):
    name: str
    console: Console
    model: Any
    ids: dict[str, torch.Tensor]


def _kept(out: Path, name: str, layers: int | None = None) -> LayerConfig | None:
    """What earlier runs have chosen for this model, which has so many layers if that is known already; None: there were none.
    Raises ValueError where the file is another one."""
    path = out / "config.json"
    if not path.exists():
        return None
    try:
        found = read_config(path)
        _check_model(found, path, name, layers)
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; give another folder with --out") from error
    return found


def _check_model(found: LayerConfig, path: Path, name: str, layers: int | None) -> None:
    for about in (found.about, found.cache_about):
        if isinstance(about, Mapping) and about.get("model", name) != name:
            raise ValueError(f"{path} is for {about['model']}, not for {name}")
    if layers is None:
        return
    if found.num_hidden_layers not in (None, layers):
        raise ValueError(f"{path} is for a model of {found.num_hidden_layers} layers, but {name} has {layers}")
    last = max((layer for layer in (*found.methods, *(found.cache or ())) if isinstance(layer, int)), default=0)
    if last >= layers:
        raise ValueError(f"{path} names layer {last}, but {name} has {layers} layers, counted from 0")


def _load(
    model_name: str,
    texts: Sequence[Path],
    out: Path,
    device: torch.device | None,
    dtype: torch.dtype | None,
    download: bool,
    chooses: bool,
) -> _Loaded:
    """A model, and texts as its tokens. `chooses`: a config will be written, beside which nothing of another model may lie."""
    console, name = wide_console(120), _name(model_name)
    for path in texts:
        read_text(path)
    if chooses:
        _kept(out, name)
    check_model(model_name)
    check_folder("--out", out)
    with console.status(f"loading {model_name}"):
        model, tokenizer = load_model(model_name, *placement(device, dtype), download)
        ids = {title: token_ids(tokenizer, path) for title, path in _named(texts).items()}
    if chooses:
        _kept(out, name, layer_count(model))
    return _Loaded(name, console, model, ids)


def _name(model_name: str) -> str:
    return Path(model_name).stem if model_name.endswith(".gguf") else Path(model_name).name


@contextmanager
def _bar(console: Console) -> Iterator[Bar]:
    columns = (SpinnerColumn(), TextColumn("{task.description:<22}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task("", total=None))


def _tell(found: Evaluation, loaded: _Loaded, tokens: int, out: Path) -> None:
    """Print and save the results."""
    console, name = loaded.console, loaded.name
    where = environment(loaded.model)
    title = f"{name}, {found.geometry.tokens:,} tokens of {', '.join(found.texts)}; {where['device']}, {where['dtype']}"
    console.print(title, highlight=False, markup=False)
    if found.geometry.tokens < tokens:
        console.print(f"(--tokens {tokens:,} is more than the shortest text or the model allows)", highlight=False)
    console.print(tabulated(found))
    console.print(found.geometry.legend, highlight=False)
    if found.recommendation is not None:
        console.print(sentence(found), highlight=False, style="bold green")
    else:
        console.print(
            "`nearfield tune`, or --tolerance 0.4, also chooses budgets by layer that raise perplexity by at most 0.4%.",
            highlight=False,
        )
    about = {"environment": where, "model": name}
    written = [save(found, about, out)]
    if found.recommendation is not None:
        written.append(out / "config.json")
        # Another run may have written there since this one began.
        save_config(found, about, written[-1], _kept(out, name, found.layers))
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plot: it needs matplotlib: pip install 'nearfield[plots]'", markup=False)
    else:
        written.append(out / f"{found.geometry.name}.png")
        save_plot(found, title, written[-1])
    console.print("written: " + ", ".join(map(str, written)), highlight=False, markup=False, soft_wrap=True)
    if found.recommendation is not None:
        console.print(_how_to_use(found.geometry, out, loaded.model.device), highlight=False, markup=False, soft_wrap=True)


def _how_to_use(geometry: Geometry | AnswerGeometry, out: Path, device: torch.device) -> str:
    told = f'use it: nearfield.hf.register(config="{out / "config.json"}")'
    if isinstance(geometry, Geometry):
        return told
    group_from = GROUP_FROM_ON_GPU if device.type == "cuda" else GROUP_FROM
    if geometry.prompt >= group_from:
        return f"{told}, then CellCache(config=model.config)"
    exact = f"without group_from, a cache is exact up to {group_from:,} keys"
    return f"{told}, then CellCache(config=model.config, group_from=0); {exact}"


def _named(texts: Sequence[Path]) -> dict[str, Path]:
    """Texts by name: the file name, or the whole path if two have the same file name."""
    names = [path.name for path in texts]
    return {path.name if names.count(path.name) == 1 else str(path): path for path in texts}

"""The command line: `nearfield plan`, `explain`, `demo`, `bench`, `eval`, `tune`, `ruler`, `remember`, `ask`, `chat`, `serve`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nearfield import __version__, crossover, user_cache
from nearfield.app import arguments, wide_console
from nearfield.knn.index.lsh_theory import LSHBudget, lsh_budget
from nearfield.paper.budgets import Budget, every_budget, keys_read, sublinear_from
from nearfield.synthetic import FAMILIES

try:
    import typer
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from nearfield.app.whole_help import Commands
except ImportError as error:
    NEEDS = "the nearfield command needs typer and rich: pip install 'nearfield[cli]'"
    if __name__ == "__main__":
        sys.exit(NEEDS)
    raise ImportError(NEEDS) from error

if TYPE_CHECKING:
    from nearfield.app.chat.start import Start

app = typer.Typer(
    cls=Commands,
    help="kNN attention for PyTorch that tells you its error.",
    add_completion=False,
    rich_markup_mode=None,
    invoke_without_command=True,
    context_settings={"max_content_width": 110},
)

MODEL = "Folder or .gguf file of a causal language model, or anything else that from_pretrained takes."

TEXTS = "Text files in UTF-8."

TOKENS = "Tokens to read of each text, at most."

CELL_SIZE = "Keys per cell."

SEGMENT = "Keys per segment; a row reads its own segment exactly. Default: 1024, or an eighth of a short text."

SINKS = "First keys, which every row reads exactly."

WRITTEN = "With --cache: the last tokens of each text, which are predicted as steps of an answer. Default: 512."

LADDER = "Budgets to choose from for each layer, in per cent."

DEVICE = "cpu, cuda, cuda:1, ... Default: cuda if there is one."

DTYPE = "Of the model. Default: float32, or bfloat16 on CUDA."

DOWNLOAD = "Let Transformers look for the model on the hub."


@app.callback()
def nearfield(
    context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if version:
        typer.echo(f"nearfield {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def plan(
    n: int = typer.Option(131072, metavar="N", help="Keys that a query sees."),
    eps: float = typer.Option(0.05, metavar="X", help="Error, in the unit that each promise states."),
    delta: float = typer.Option(0.01, metavar="X", help="Probability of failure."),
    d: int = typer.Option(64, metavar="N", help="Dimension of the values."),
    near: float = typer.Option(
        0.9, metavar="X", help="Hashing: cosine of a key that must be found (after the reduction of MIPS to kNN)."
    ),
    far: float = typer.Option(0.5, metavar="X", help="Hashing: cosine of a key that need not be looked at."),
) -> None:
    """Print the sizes that the theorems of the paper ask for, as printed and as corrected."""
    with _one_line_errors():
        budgets = every_budget(n, eps, delta, d)
        arguments.check_cosines(near, far)
        hashing = lsh_budget(n, near, far)
    console = wide_console(110)
    console.print(_size_table(budgets, n, f"Sizes for n = {n:,}, eps = {eps:g}, delta = {delta:g}, d = {d}"))
    console.print(
        "k, ell and draws are per query; draws are split into groups. Walks are per column of the product (dk: see below). "
        "[yellow]Yellow[/]: at least as much work as reading all n keys.\n"
    )
    console.print(_promise_table(budgets))
    console.print(_hashing(hashing, near, far))
    console.print(
        "\nThe running time of Algorithm 2: with k = sqrt(n), at this eps and delta, LazyGumbel reads fewer than n keys a query "
        f"from n = {sublinear_from(eps, delta, d=d):,} on. At n = {n:,} it would look at keys "
        f"{keys_read(n, eps, delta, d=d):,.0f} times."
    )


@app.command()
def explain(
    n: int = typer.Option(131072, min=1, metavar="N", help="Queries and keys."),
    heads: int = typer.Option(8, min=1, metavar="N", help="Heads."),
    dim: int = typer.Option(64, min=1, metavar="N", help="Dimension of a head."),
    device: str = typer.Option("cpu", metavar="NAME", help="cpu, cuda, cuda:1, ..."),
    dtype: str = typer.Option("", metavar="NAME", help="Default: float32, or bfloat16 on CUDA."),
    causal: bool = typer.Option(False, "--causal", help="Each query sees the keys up to its own position."),
    family: str = typer.Option(
        "", metavar="NAME", help=f"Look at such values (see nearfield.synthetic): {', '.join(FAMILIES)}. Default: sizes alone."
    ),
) -> None:
    """Say what attention would do with inputs of some sizes, and why: method, budget, time, error and memory."""
    import nearfield as nf
    from nearfield.app import sweep
    from nearfield.synthetic import make

    console = wide_console(110)
    with _one_line_errors():
        place = arguments.device(device)
        kind = arguments.dtype(dtype) if dtype else sweep.usual_dtype(place)
        arguments.check_memory(place, kind, [n], [heads] if family else [1], [dim])
        if not family:
            told = nf.explain_sizes(n, heads, dim, place, kind, causal)
        else:
            arguments.known("--family", family, FAMILIES)
            with console.status(f"making {n:,} keys and looking at some rows"):
                query, key, value = (x.to(place) for x in make(family, 1, heads, n, dim, dtype=kind))
                told = nf.explain(query, key, value, is_causal=causal)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, text in told.rows.items():
        table.add_row(name, text)
    console.print(table)


@app.command()
def demo(
    out: Path = typer.Option(Path("demo.png"), metavar="FILE", help="File for the plot."),
    length: int = typer.Option(4096, min=1, metavar="N", help="Keys and queries per head."),
    family: str = typer.Option(
        "clustered", metavar="NAME", help=f"Input family (see nearfield.synthetic): {', '.join(FAMILIES)}."
    ),
    seed: int = typer.Option(0, metavar="N", help="Seed of the inputs and of all estimates."),
) -> None:
    """Compare every method with exact attention, in a table and a plot."""
    import torch

    from nearfield.app.demo import DIM, HEADS, run

    with _one_line_errors():
        arguments.check_picture("--out", out)
        arguments.known("--family", family, FAMILIES)
        arguments.check_seed(seed)
        arguments.check_memory(torch.device("cpu"), torch.float32, [length], [HEADS], [DIM])
        run(out=out, length=length, family=family, seed=seed)


@app.command()
def bench(
    calibrate: bool = typer.Option(
        False, "--calibrate", help="Save the result; the default method and, on CUDA, the kernels use it from now on."
    ),
    device: str = typer.Option("cpu", metavar="NAME", help="Device to measure on: cpu, cuda, cuda:1, ..."),
    dtype: list[str] = typer.Option(
        [],
        metavar="NAME",
        help="float32, bfloat16, float16 or float64; may be repeated. Default: float32, or bfloat16 on CUDA; with --calibrate "
        "float32 and bfloat16, and float16 on CUDA.",
    ),
    length: str = typer.Option(
        "", metavar="N,N,...", help="Queries and keys. Default: 2048,4096,8192,16384; on CUDA up to 131072."
    ),
    heads: str = typer.Option("", metavar="N,N,...", help="Heads. Default: 1, or 8 on CUDA."),
    dim: str = typer.Option("64", metavar="N,N,...", help="Dimensions of a head."),
    out: Path = typer.Option(Path("bench.png"), metavar="FILE", help="File for the plot, without --calibrate."),
    minutes: float = typer.Option(3.0, min=0.1, metavar="N", help="With --calibrate on CUDA: how long it may take."),
    blocks: bool = typer.Option(
        False, "--blocks", help="With --calibrate on CUDA: find block sizes also for a card that they are shipped for."
    ),
) -> None:
    """Time cells against exact attention on this machine, at all lengths, heads and dimensions that are given.

    With --calibrate, find the length from which they are faster; on CUDA, find the block sizes of the kernels first.
    """
    from nearfield.app import calibrate as measurement
    from nearfield.app import sweep

    with _one_line_errors():
        dtypes = [arguments.dtype(name) for name in dict.fromkeys(dtype)]
        place = arguments.device(device)
        if calibrate:
            for option, given in (("--length", length), ("--heads", heads)):
                if given:
                    raise ValueError(
                        f"{option} {given} has no meaning with --calibrate, which looks for lengths itself; leave it out"
                    )
            arguments.check_folder("NEARFIELD_CACHE", user_cache.folder())
            measurement.calibrate_all(place, dtypes or measurement.usual_dtypes(place), minutes, blocks)
            return
        sizes = sweep.Sizes(
            arguments.counts("--length", length) if length else sweep.usual_lengths(place),
            arguments.counts("--heads", heads) if heads else [crossover.heads(place)],
            arguments.counts("--dim", dim),
            dtypes or [sweep.usual_dtype(place)],
        )
        arguments.check_picture("--out", out)
        for one in sizes.dtypes:
            arguments.check_memory(place, one, sizes.lengths, sizes.heads, sizes.dims)
        sweep.run(place, sizes, out)


@app.command("eval")
def evaluate(
    model: str = typer.Argument(help=MODEL),
    texts: list[Path] = typer.Argument(help=TEXTS),
    tokens: int = typer.Option(8192, min=1, metavar="N", help=TOKENS),
    methods: str = typer.Option(
        "cells,topk", metavar="NAME,...", help="What to compare with exact attention: cells, topk, auto."
    ),
    budgets: str = typer.Option("4,7,10", metavar="%,%,...", help="Shares of the past keys to read, in per cent."),
    cell_size: int = typer.Option(16, min=1, metavar="N", help=CELL_SIZE),
    segment: int = typer.Option(0, min=0, metavar="N", show_default=False, help=SEGMENT),
    sinks: int = typer.Option(16, min=0, metavar="N", help=SINKS),
    tolerance: str = typer.Option(
        "",
        metavar="%",
        help="Allowed excess of perplexity in per cent, such as 0.4: choose a budget per layer, as `nearfield tune`.",
    ),
    ladder: str = typer.Option("1,2,4,7,10,15,25", metavar="%,%,...", help=LADDER),
    config: Path = typer.Option(None, metavar="FILE", help="A config.json of an earlier run, to compare as well."),
    out: Path = typer.Option(Path("nearfield-eval"), metavar="FOLDER", help="Folder for eval.json, eval.png and config.json."),
    device: str = typer.Option("", metavar="NAME", help=DEVICE),
    dtype: str = typer.Option("", metavar="NAME", help=DTYPE),
    download: bool = typer.Option(False, "--download", help=DOWNLOAD),
) -> None:
    """Measure what attention methods do to a language model: perplexity, the error of every head, and a choice per layer."""
    from nearfield.app.evaluate.command import run
    from nearfield.app.evaluate.settings import KINDS

    with _one_line_errors():
        run(
            model,
            texts,
            out=out,
            tokens=tokens,
            methods=arguments.known("--methods", methods, KINDS),
            budgets=arguments.percents("--budgets", budgets),
            cell_size=cell_size,
            segment=segment or None,
            sinks=sinks,
            ladder=arguments.percents("--ladder", ladder),
            tolerance=arguments.percent("--tolerance", tolerance) if tolerance else None,
            config=config,
            device=arguments.device(device) if device else None,
            dtype=arguments.dtype(dtype) if dtype else None,
            download=download,
        )


@app.command()
def tune(
    model: str = typer.Argument(help=MODEL),
    texts: list[Path] = typer.Argument(help=TEXTS),
    tolerance: str = typer.Option("0.4", metavar="%", help="Allowed excess of perplexity in per cent."),
    tokens: int = typer.Option(8192, min=1, metavar="N", help=TOKENS),
    cell_size: int = typer.Option(16, min=1, metavar="N", help=CELL_SIZE),
    segment: int = typer.Option(0, min=0, metavar="N", show_default=False, help=SEGMENT),
    sinks: int = typer.Option(16, min=0, metavar="N", help=SINKS),
    ladder: str = typer.Option("1,2,4,7,10,15,25", metavar="%,%,...", help=LADDER),
    cache: bool = typer.Option(False, "--cache", help="For the steps of an answer, and not for prompts."),
    written: int = typer.Option(0, min=0, metavar="N", show_default=False, help=WRITTEN),
    out: Path = typer.Option(
        Path("nearfield-tune"), metavar="FOLDER", help="Folder for config.json, eval.json and eval.png (cache.json, cache.png)."
    ),
    device: str = typer.Option("", metavar="NAME", help=DEVICE),
    dtype: str = typer.Option("", metavar="NAME", help=DTYPE),
    download: bool = typer.Option(False, "--download", help=DOWNLOAD),
) -> None:
    """Choose the cheapest budget of every layer that keeps a language model's perplexity within a tolerance.

    The same as `nearfield eval --tolerance`, with cells alone. The config.json that it writes is for nearfield.hf.register. With
    --cache it does the same for the steps of an answer, which read a nearfield.hf.CellCache, and adds that to the config.json.
    """
    from nearfield.app.evaluate import settings
    from nearfield.app.evaluate.command import run_answers

    with _one_line_errors():
        if cache:
            for option, given, usual in (("--cell-size", cell_size, 16), ("--segment", segment, 0), ("--sinks", sinks, 16)):
                if given != usual:
                    raise ValueError(
                        f"{option} {given} is for prompts, and --cache chooses for the steps of an answer; leave it out"
                    )
            run_answers(
                model,
                texts,
                out=out,
                tokens=tokens,
                written=written or settings.WRITTEN,
                ladder=arguments.percents("--ladder", ladder),
                tolerance=arguments.percent("--tolerance", tolerance or "0.4"),
                device=arguments.device(device) if device else None,
                dtype=arguments.dtype(dtype) if dtype else None,
                download=download,
            )
            return
        if written:
            raise ValueError(f"--written {written} is for the steps of an answer; give --cache, too, or leave it out")
    evaluate(
        model,
        texts,
        tokens=tokens,
        methods="cells",
        budgets="4,7,10",
        cell_size=cell_size,
        segment=segment,
        sinks=sinks,
        tolerance=tolerance or "0.4",
        ladder=ladder,
        config=None,  # type: ignore[arg-type]  # typer's way to say that a path is optional
        out=out,
        device=device,
        dtype=dtype,
        download=download,
    )


@app.command()
def ruler(
    model: str = typer.Argument(help=MODEL),
    tasks: str = typer.Option("all", metavar="NAME,...", help="Tasks of RULER, such as niah_single_1,vt,qa_1; all: the 13."),
    lengths: str = typer.Option("4096,8192,16384,32768", metavar="N,N,...", help="Tokens of a prompt with its answer."),
    samples: int = typer.Option(100, min=1, metavar="N", help="Prompts of each task at each length."),
    methods: str = typer.Option(
        "default",
        metavar="NAME,...",
        help="What to compare with exact attention, such as default,cells,cells-6,quest-6,topk-6-both; docs/ruler.md lists all.",
    ),
    templates: str = typer.Option("raw", metavar="NAME,...", help="raw, chat (the model's template), or both."),
    seed: int = typer.Option(42, metavar="N", help="Of the prompts. RULER's own is 42."),
    batch: int = typer.Option(1, min=1, metavar="N", help="Answers that are written together; each prompt is read by itself."),
    watch: int = typer.Option(5, min=0, metavar="N", help="Of so many samples, see which heads open the needles."),
    minutes: float = typer.Option(
        0.0, min=0.0, metavar="N", show_default=False, help="Stop after so long; the same command goes on. Default: never."
    ),
    out: Path = typer.Option(
        Path("nearfield-ruler"), metavar="FOLDER", help="Folder for answers.jsonl, ruler.json and ruler.html."
    ),
    prompts: Path = typer.Option(None, metavar="FOLDER", help="Where prompts are kept. Default: the user's cache folder."),
    only_prompts: bool = typer.Option(False, "--only-prompts", help="Make the prompts and stop; the weights are not loaded."),
    device: str = typer.Option("", metavar="NAME", help=DEVICE),
    dtype: str = typer.Option("", metavar="NAME", help=DTYPE),
    download: bool = typer.Option(False, "--download", help=DOWNLOAD),
) -> None:
    """See whether a language model still reads: the 13 tasks of RULER, methods side by side on the same prompts.

    Every answer is written to a file at once: an interrupted run goes on where it was, and one with more samples or methods adds
    to it.
    """
    with _one_line_errors():
        from nearfield.app.ruler.command import Asked, Stopped, run
        from nearfield.app.ruler.official import TASKS
        from nearfield.app.ruler.prompts import TEMPLATES
        from nearfield.app.ruler.ways import WAYS

        arguments.check_seed(seed, 32)
        asked = Asked(
            model,
            arguments.known("--tasks", ",".join(TASKS) if tasks.strip() == "all" else tasks, TASKS),
            arguments.counts("--lengths", lengths),
            samples,
            arguments.known("--methods", methods, WAYS),
            arguments.known("--templates", templates, TEMPLATES),
            seed,
            batch,
            watch,
            minutes or None,
            out,
            prompts,
            arguments.device(device) if device else None,
            arguments.dtype(dtype) if dtype else None,
            download,
            only_prompts,
        )
        try:
            run(asked)
        except Stopped as stopped:
            typer.echo(str(stopped), err=True)
            raise typer.Exit(130) from stopped


@app.command()
def remember(
    model: str = typer.Argument(help=MODEL),
    text: Path = typer.Argument(help="A text file in UTF-8."),
    out: Path = typer.Option(
        ..., "--out", "-o", metavar="FILE", help="File for the memory. An existing one is replaced once all is written."
    ),
    chunk: int = typer.Option(
        0,
        min=0,
        metavar="N",
        show_default=False,
        help="Tokens to read at a time. Default: all; for texts too long for the model, a length that suits it.",
    ),
    positions: str = typer.Option(
        "",
        metavar="NAME",
        help="running or restart (see docs/cache.md). Default: running if the model knows enough positions, else restart.",
    ),
    device: str = typer.Option("", metavar="NAME", help=DEVICE),
    dtype: str = typer.Option("", metavar="NAME", help=DTYPE),
    download: bool = typer.Option(False, "--download", help=DOWNLOAD),
) -> None:
    """Let a language model read a text once, and save what it remembers for `nearfield ask`."""
    from nearfield.app import remember as memories

    with _one_line_errors():
        memories.remember(
            model,
            text,
            out,
            positions=positions or None,
            chunk=chunk or None,
            device=arguments.device(device) if device else None,
            dtype=arguments.dtype(dtype) if dtype else None,
            download=download,
        )


@app.command()
def ask(
    model: str = typer.Argument(help="The model that has read the text."),
    question: str = typer.Argument(help="What to ask about the text."),
    memory: Path = typer.Option(..., "--memory", "-m", metavar="FILE", help="A file that `nearfield remember` has written."),
    tokens: int = typer.Option(64, min=1, metavar="N", help="Tokens of the answer, at most."),
    plain: bool = typer.Option(
        False,
        "--plain",
        help="No chat template: the model continues the question. It is the default for models without a template.",
    ),
    device: str = typer.Option("", metavar="NAME", help=DEVICE),
    dtype: str = typer.Option("", metavar="NAME", help="Of the model. Default: the one that the text was read in."),
    download: bool = typer.Option(False, "--download", help=DOWNLOAD),
) -> None:
    """Ask a language model about a text that it remembers. The answer is printed word by word."""
    from nearfield.app import remember as memories

    with _one_line_errors():
        memories.ask(
            model,
            memory,
            question,
            tokens=tokens,
            plain=plain,
            device=arguments.device(device) if device else None,
            dtype=arguments.dtype(dtype) if dtype else None,
            download=download,
        )


DOCUMENTS = "A text file in UTF-8 to answer questions about; may be repeated. It is read once, before the first question."

KEPT = "File for what is kept of the documents. Default: beside the first one, with .memory after its name."

KEEP = "Keep what was read in a file, so that the next start finds it."

OPENED = "Cells that a token opens, of 16 keys and more."


@app.command()
def chat(
    model: str = typer.Argument(help=MODEL),
    document: list[Path] = typer.Option([], "--document", metavar="FILE", help=DOCUMENTS),
    memory: Path = typer.Option(None, "--memory", "-m", metavar="FILE", help=KEPT),
    keep: bool = typer.Option(True, "--keep/--no-keep", help=KEEP),
    probes: int = typer.Option(256, min=1, metavar="N", help=OPENED),
    tokens: int = typer.Option(512, min=1, metavar="N", help="Tokens of an answer, at most."),
    temperature: float = typer.Option(0.0, min=0.0, max=2.0, metavar="X", help="0 takes the likeliest token."),
    top_p: float = typer.Option(1.0, min=0.01, max=1.0, metavar="X", help="Draw from the likeliest tokens of this weight."),
    seed: int = typer.Option(0, metavar="N", help="Seed of what is drawn."),
    system: str = typer.Option("", metavar="TEXT", help="What the model is told before the chat, if its template knows that."),
    device: str = typer.Option("", metavar="NAME", help=DEVICE),
    dtype: str = typer.Option("", metavar="NAME", help=DTYPE),
    download: bool = typer.Option(False, "--download", help=DOWNLOAD),
) -> None:
    """Chat with a language model about long documents. Each answer comes with the passages that it looked at.

    One question per line; /reset begins a new chat, /quit leaves, and Ctrl-C stops an answer.
    """
    from nearfield.app.chat import terminal

    with _one_line_errors():
        arguments.check_seed(seed)
        sampling = {"max_tokens": tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
        terminal.chat(_start(model, document, memory, keep, probes, device, dtype, download), sampling, system)


@app.command()
def serve(
    model: str = typer.Argument(help=MODEL),
    document: list[Path] = typer.Option([], "--document", metavar="FILE", help=DOCUMENTS),
    memory: Path = typer.Option(None, "--memory", "-m", metavar="FILE", help=KEPT),
    keep: bool = typer.Option(True, "--keep/--no-keep", help=KEEP),
    probes: int = typer.Option(256, min=1, metavar="N", help=OPENED),
    host: str = typer.Option(
        "127.0.0.1", metavar="NAME", help="Where to listen. Others can reach it if that is not this machine."
    ),
    port: int = typer.Option(8000, min=0, max=65535, metavar="N", help="0 takes one that is free."),
    waiting: int = typer.Option(8, min=0, metavar="N", help="Requests that may wait while another one is answered."),
    seconds: float = typer.Option(300.0, min=0.1, metavar="X", help="Time for an answer, at most."),
    tokens: int = typer.Option(512, min=1, metavar="N", help="Tokens of an answer, if a request does not say."),
    most_tokens: int = typer.Option(4096, min=1, metavar="N", help="Tokens of any answer, at most."),
    body: int = typer.Option(1_000_000, min=1, metavar="N", help="Bytes of a request, at most."),
    device: str = typer.Option("", metavar="NAME", help=DEVICE),
    dtype: str = typer.Option("", metavar="NAME", help=DTYPE),
    download: bool = typer.Option(False, "--download", help=DOWNLOAD),
) -> None:
    """Serve a language model and long documents: a page to ask questions, and /v1/chat/completions as OpenAI has it."""
    from nearfield.app.serve import command

    with _one_line_errors():
        start = _start(model, document, memory, keep, probes, device, dtype, download)
        command.serve(start, host, port, waiting, seconds, tokens, most_tokens, body)


def _start(
    model: str, documents: list[Path], memory: Path | None, keep: bool, probes: int, device: str, dtype: str, download: bool
) -> Start:
    from nearfield.app.chat.start import Start

    place, kind = arguments.device(device) if device else None, arguments.dtype(dtype) if dtype else None
    return Start(model, documents, memory, keep, probes, place, kind, download)


def main() -> None:
    """Run the command."""
    app(prog_name="nearfield")


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Show errors about arguments, and missing packages, without a traceback."""
    try:
        yield
    except ImportError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error


def _size_table(budgets: list[Budget], n: int, title: str) -> Table:
    table = _table(title)
    for name in ("k", "ell", "draws", "groups", "walks", "buffer"):
        table.add_column(name, justify="right", no_wrap=True)
    for sizes, name, last in _blocks(budgets):
        # A draw reads at least one key.
        wasteful = sizes.takes_everything(n) or (sizes.draws or 0) >= n
        counts = (sizes.k, sizes.ell, sizes.draws, sizes.groups, sizes.walks, sizes.buffer)
        style = "yellow" if wasteful else None
        table.add_row(name, sizes.form, *map(_count, counts), style=style, end_section=last)
    return table


def _hashing(sizes: LSHBudget, near: float, far: float) -> str:
    work = f"{sizes.projections:,} projections per query"
    if sizes.projections >= sizes.n:
        work = f"[yellow]{work}[/]"
    return (
        f"\n[bold]Concentric LSH for cosines {near:g} (near) and {far:g} (far)[/]: rho = {sizes.rho:.2f}, "
        f"{sizes.hashes} hashes in each of {sizes.tables:,} tables at {sizes.rungs} radii, {work}, "
        f"{sizes.bytes_per_key:,} bytes per key. "
        f"With these {sizes.promise} ({sizes.label})."
    )


def _promise_table(budgets: list[Budget]) -> Table:
    table = _table("What they promise, with probability 1 - delta unless they say otherwise")
    table.add_column("promise")
    for sizes, name, last in _blocks(budgets):
        table.add_row(name, sizes.form, f"{sizes.promise} ({sizes.label})", end_section=last)
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("theorem")
    table.add_column("form", no_wrap=True)
    return table


def _blocks(budgets: list[Budget]) -> Iterator[tuple[Budget, str, bool]]:
    """Each budget with the name to print (once per theorem), and whether it is the last of its theorem."""
    names = ["", *(sizes.theorem for sizes in budgets), ""]
    for i, sizes in enumerate(budgets, 1):
        yield sizes, sizes.theorem if names[i - 1] != sizes.theorem else "", names[i + 1] != sizes.theorem


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


if __name__ == "__main__":
    main()

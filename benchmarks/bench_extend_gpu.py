"""SmolLM2 extended from 8,192 positions by examples/extend_context.py on a GPU: loss by position and needles, before and after.

python benchmarks/bench_extend_gpu.py --haystack TEXT       # results/extend_gpu.json, docs/figures/extend.png; five minutes
python benchmarks/bench_extend_gpu.py --method exact        # the same with SDPA; the other section of the file stays as it is
python benchmarks/bench_extend_gpu.py --quick               # a tiny random model, on a CPU too; written only with --out
python benchmarks/bench_extend_gpu.py --plot-only

The texts are on every machine that has torch and Transformers: sources of the standard library and of these two to train on, and
those of SymPy, which torch brings along, held out. Needles are hidden in --haystack, or else in the held-out text. The file has
what was measured after every stage, and --minutes holds for everything but loading.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import statistics
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import record
import torch
from cells_plot import CELLS, QUIET, SDPA
from gpu_timing import CUDA, DEVICE, card
from real import SMOLLM2

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import extend_context as example

from nearfield.app.evaluate.models import load_model, longest_context, read_text

TRAINED, HELD_OUT = ("python", "transformers", "torch"), ("sympy",)
CHARACTERS = 16_000_000
"""of each package at most: together they are more than 200 windows of 65,536 tokens"""
NAME = "extend_gpu"
SMALL = 30_000
"""characters of a package with --quick"""


def sources(package: str) -> Iterator[Path]:
    """The Python files of an installed package, in order; of the standard library without what is installed below it."""
    if package == "python":
        folder = Path(sysconfig.get_path("stdlib"))
    else:
        found = importlib.util.find_spec(package)
        if found is None or found.origin is None:
            raise SystemExit(f"{package} is not installed, and its sources are needed as a text")
        folder = Path(found.origin).parent
    return (path for path in sorted(folder.rglob("*.py")) if package != "python" or "site-packages" not in path.parts)


def text_of(package: str, most: int) -> list[str]:
    """The first files, about `most` characters."""
    texts: list[str] = []
    characters = 0
    for path in sources(package):
        if characters >= most:
            break
        try:
            texts.append(read_text(path))
        except ValueError:
            continue  # some tests of the standard library are no UTF-8 on purpose
        characters += len(texts[-1])
    return texts


def version(package: str) -> str:
    return platform.python_version() if package == "python" else importlib.metadata.version(package)


def texts(encode: example.Encode, end: int | None, haystack: Path | None, quick: bool) -> tuple[example.Texts, dict[str, Any]]:
    """As tokens, and where they are from."""
    most = SMALL if quick else CHARACTERS
    held_out = [text for package in HELD_OUT for text in text_of(package, most // 4)]
    trained = example.distinct([text for package in TRAINED for text in text_of(package, most)], held_out)
    train, judge = (torch.cat(example.encoded(encode, some, end)) for some in (trained, held_out))
    hay = judge if haystack is None else torch.cat(example.encoded(encode, [read_text(haystack)], end))
    about = {
        "train": {package: version(package) for package in TRAINED},
        "held_out": {package: version(package) for package in HELD_OUT},
        "haystack": None if haystack is None else haystack.name,
        "files": {"train": len(trained), "held_out": len(held_out)},
    }
    return example.Texts(train, judge, hay), about


def show(found: dict[str, Any]) -> None:
    """Losses in the first and the last bin and where it was trained to, needles by length, and the two kinds of step."""
    stages = [(stage, way) for stage in ("as_it_was", "before", "after") for way in found.get(stage, {})]
    lengths = [str(x) for x in found["plan"]["lengths"]]
    titles = ("model", "attention", "loss, first bin", "last bin", *(f"needles, {int(n):,}" for n in lengths))
    shown = record.table(*titles, title=f"{found['plan']['positions']:,} positions", words=titles[:2])
    for stage, way in stages:
        own = found[stage][way]
        losses = [f"{own['loss'][i]:.3f}" for i in (0, -1)] if "loss" in own else ["", ""]
        shown.add_row(stage.replace("_", " "), way, *losses, *(share(own.get("needles", {}).get(n, [])) for n in lengths))
    record.show(shown)
    if "step" in found:
        step = found["step"]
        shown = record.table("a step with", "seconds", "peak MB", title=f"{step['tokens']:,} tokens", words=("a step with",))
        for name, seconds in step["seconds"].items():
            memory = step["peak_megabytes"][name]
            shown.add_row(name, f"{seconds:.3f}", f"{memory:,.0f}" if memory else "")
        record.show(shown)
    if found.get("training", {}).get("losses"):
        done = found["training"]
        print(f"{len(done['losses'])} steps of {statistics.median(done['seconds']):.3f} s; stopped early: {found['stopped']}")


def share(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['found'] for row in rows)} of {len(rows)}" if rows else ""


LOOKS = {"as_it_was": (QUIET, "as it was"), "before": (SDPA, "base raised"), "after": (CELLS, "base raised, trained")}


def plot(found: dict[str, Any], path: Path) -> None:
    """Loss against position, and needles against length; exact attention as lines, cells dashed."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    positions = found["plan"]["positions"]
    for stage, (color, label) in LOOKS.items():
        for way, own in found.get(stage, {}).items():
            looks = {"color": color, "linestyle": "-" if way == "exact" else "--", "label": f"{label}; {way}"}
            if "loss" in own:
                middles = [(i + 0.5) * positions / len(own["loss"]) for i in range(len(own["loss"]))]
                left.plot(middles, own["loss"], **looks)
            if any(own.get("needles", {}).values()):
                rates = {int(n): statistics.fmean(x["found"] for x in rows) for n, rows in own["needles"].items() if rows}
                right.plot(list(rates), [100 * rate for rate in rates.values()], marker="o", **looks)
    trained = found["plan"]["tokens"]
    left.axvline(trained, color=QUIET, linewidth=0.8, linestyle=":")
    left.annotate(
        "longest window", (trained, 1), xycoords=("data", "axes fraction"), ha="right", va="top", rotation=90, fontsize=8
    )
    left.set(xlabel="position", ylabel="loss (nats per token)", title="Held-out text, by position")
    left.set_ylim(top=min(left.get_ylim()[1], 3 * min(line.get_ydata()[0] for line in left.lines[:-1])))
    right.set(xlabel="tokens", ylabel="numbers found, %", title="A number told once", ylim=(-3, 103), xscale="log")
    lengths = found["plan"]["lengths"]
    right.set_xticks(lengths, [f"{n:,}" for n in lengths])
    right.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print("drawn:", path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of a causal language model")
    parser.add_argument("--haystack", type=Path, help="a text in which needles are hidden; default: the held-out text")
    parser.add_argument("--tokens", type=int, default=65_536, help="per step")
    parser.add_argument("--positions", type=int, default=131_072, help="that the model is to know")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=2e-4, help="peak of the learning rate")
    parser.add_argument("--method", choices=("cells", "exact"), default="cells", help="attention to train with")
    parser.add_argument("--cases", type=int, default=12, help="needles per length")
    parser.add_argument("--minutes", type=float, default=4.25, help="for everything but loading")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again instead of keeping them")
    parser.add_argument("--out", type=Path, help=f"folder for {NAME}.json and extend.png")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, nothing written unless --out says where")
    parser.add_argument("--plot-only", action="store_true", help="draw the figure from the saved results")
    options = parser.parse_args()
    figures = options.out or record.FIGURES
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record.RESULTS = options.out
    if options.plot_only:
        plot(record.read_sections(NAME)["cells"], figures / "extend.png")
        return
    if not CUDA and not options.quick:
        print("skipped: there is no CUDA device (--quick runs without one)")
        return
    if not options.quick and not options.model.exists():
        print(f"skipped: no model in {options.model} (`make smollm2` fetches one)")
        return
    start = time.monotonic()
    if options.quick:
        model, tokenizer = example.tiny_model().to(DEVICE), None
        plan = example.Plan(256, 512, (256, 512), 2, 3e-3, options.method, options.minutes, cases=1, windows=1, rounds=1)
    else:
        model, tokenizer = load_model(options.model, DEVICE)
        lengths = example.default_lengths(longest_context(model) or options.tokens, options.positions)
        plan = example.Plan(
            options.tokens,
            options.positions,
            lengths,
            options.steps,
            options.rate,
            options.method,
            options.minutes,
            cases=options.cases,
            checkpointing=options.checkpointing,
        )
    encode = example.encoder(tokenizer)
    given, about = texts(encode, None if tokenizer is None else tokenizer.eos_token_id, options.haystack, options.quick)
    print(f"loaded in {time.monotonic() - start:.0f} s", flush=True)
    found: dict[str, Any] = {"model": "tiny, random" if options.quick else options.model.name, "texts": about, "card": card()}
    saves = options.out is not None or not options.quick

    def keep() -> None:
        found["seconds"] = round(time.monotonic() - start, 1)
        if saves:
            record.merge(NAME, options.method, found)

    try:
        example.run(model, encode, given, plan, found, keep)
    finally:
        if "step" in found:
            show(found)
        if saves and options.method == "cells" and "before" in found:
            plot(found, figures / "extend.png")


if __name__ == "__main__":
    main()

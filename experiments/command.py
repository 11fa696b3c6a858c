"""The command line: run one experiment, all of them, or build the report."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from experiments.catalogue import EXPERIMENTS
from experiments.experiment import Section
from experiments.report import build
from experiments.runner import run
from experiments.settings import DEVICES, HERE, Settings

COLORS = {"confirmed": "green", "refuted": "red", "partly": "yellow", "untested": "magenta", "beyond": "cyan"}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=_about(), formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "name", nargs="?", choices=[*EXPERIMENTS, "all", "report"], help="an experiment, all of them, or the page about them"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds; results go to experiments/quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the results (default: experiments/results); report: of the page too")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="results of cuda have a folder of their own")
    parser.add_argument("--time-limit", type=_positive, default=60.0, metavar="S", help="of one timed call (efficiency, indices)")
    parser.add_argument(
        "--memory-limit",
        type=_positive,
        default=8.0,
        metavar="GB",
        help="of one timed call beyond its inputs (efficiency, indices)",
    )
    parser.add_argument(
        "--total-limit",
        type=_positive,
        default=math.inf,
        metavar="S",
        help="begin nothing after so many seconds; the same command goes on with the others (indices, shakespeare)",
    )
    parser.add_argument(
        "--jobs",
        type=_count,
        default=1,
        metavar="N",
        help="models trained at a time, each in a process of its own; the time of a step is not taken then (shakespeare)",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="what language models are trained on (default: tiny Shakespeare)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="folder or .gguf of a causal language model to fine-tune as well (gpt2-xl)"
    )
    parser.add_argument("--fresh", action="store_true", help="forget what is saved and start over")
    asked = parser.parse_args(arguments)
    if asked.name is None:
        parser.print_help()
        return
    if asked.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and torch sees none; leave it out to run on the CPU")
    able = [name for name, experiment in EXPERIMENTS.items() if asked.device in experiment.devices]
    if asked.name in EXPERIMENTS and asked.name not in able:
        parser.error(f"{asked.name} does not run on {asked.device}; leave --device out")
    threads = torch.get_num_threads()
    if asked.quick:
        torch.set_num_threads(1)  # more are no faster at small sizes, and much slower where cores are busy
    limits = (asked.time_limit, asked.memory_limit, asked.total_limit)
    settings = Settings(asked.quick, asked.seed, asked.device, *limits, asked.out, asked.text, asked.model, asked.jobs)
    console = Console()
    try:
        if asked.name == "report":
            results = replace(settings, device="cpu").folder  # with those of a GPU in it
            console.print(f"written: {build(results, (results if asked.out or asked.quick else HERE) / 'report.html')}")
            return
        if asked.name == "all" and len(able) < len(EXPERIMENTS):
            console.print(f"not on {asked.device}: {', '.join(name for name in EXPERIMENTS if name not in able)}")
        for name in able if asked.name == "all" else [asked.name]:
            _show(name, run(EXPERIMENTS[name], settings, console, asked.fresh), console)
        console.print(f"written: {settings.folder}")
    except ValueError as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "stopped; what was done is saved, and the same command goes on from there\n")
    finally:
        torch.set_num_threads(threads)


def _positive(text: str) -> float:
    """For argparse, which tells why."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return found


def _count(text: str) -> int:
    """For argparse, which tells why."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def _about() -> str:
    lines = "\n".join(f"  {name:18} {experiment.title}" for name, experiment in EXPERIMENTS.items())
    return f"The experiments of the paper, run again.\n\n{lines}"


def _show(name: str, section: Section, console: Console) -> None:
    console.rule(name, align="left")
    for finding in section.findings:
        color = COLORS[finding.verdict]
        console.print(f"[{color}]{finding.verdict}[/{color}] ", end="")
        console.print(f"{finding.claim} {finding.evidence} {finding.why}", markup=False, highlight=False)

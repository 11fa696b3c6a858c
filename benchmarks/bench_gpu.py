"""Cells on a GPU against the fastest backend of SDPA; bfloat16, batch 1, 8 heads unless said otherwise.

python benchmarks/bench_gpu.py                            # all sections: results/gpu.json, docs/figures/gpu.png
python benchmarks/bench_gpu.py --only forward training    # these only; the others stay in the file as they are
python benchmarks/bench_gpu.py --out FOLDER               # gpu.json and gpu.png go there
python benchmarks/bench_gpu.py --quick                    # small sizes, on a CPU where there is no GPU; written only with --out
python benchmarks/bench_gpu.py --plot-only                # the figure from the saved results

forward     8,192 to 1,048,576 keys, no mask and causal, d = 64 and 128: time, memory, error        about 3 minutes on an H200
training    forward and backward, causal, 16,384 to 131,072 keys (no mask: 32,768); gradients          1 minute
parts       where the time goes at 131,072 keys, kernel by kernel; a captured graph                 30 seconds
floor       bytes and operations of three kernels, next to what the card can do                     10 seconds
accuracy    error next to exact top-k with as many keys: 131,072 in clusters, and real inputs       2 minutes
model       4 layers of 512 on 65,536 bytes: time and memory of a step, losses over 200 steps       2 minutes

These estimates include compiling the Triton kernels, which is done once. Every section is written as soon as it is measured;
those that fail are named at the end. `accuracy` looks at real inputs where gpu_capture.py has saved some (--captured); `model`
reads --text. `floor` takes the times of kernels from `parts` where that is in the file.
"""

from __future__ import annotations

import argparse
import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_accuracy
import gpu_model
import gpu_parts
import gpu_plot
import gpu_speed
import torch
from gpu_timing import CUDA, card
from record import FIGURES, RESULTS, merge, read_sections, show
from rich.table import Table

SECTIONS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], Table]]] = {
    "forward": (gpu_speed.forward, gpu_speed.show_forward),
    "training": (gpu_speed.training, gpu_speed.show_training),
    "parts": (gpu_parts.parts, gpu_parts.show_parts),
    "floor": (gpu_parts.floor, gpu_parts.show_floor),
    "accuracy": (gpu_accuracy.accuracy, gpu_accuracy.show_accuracy),
    "model": (gpu_model.model, gpu_model.show_model),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help="these sections")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written unless --out says where")
    parser.add_argument("--plot-only", action="store_true", help="draw the figure from the saved results")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.png")
    parser.add_argument("--text", type=Path, help="what the model reads; without it, docstrings of the standard library")
    parser.add_argument("--captured", type=Path, help="folder with real inputs that gpu_capture.py has saved")
    options = parser.parse_args()
    if not (CUDA or options.quick or options.plot_only):
        print("skipped: there is no CUDA device (--quick runs small sizes on the CPU)")
        return
    saves = options.plot_only or options.out is not None or not options.quick
    # Absolute: record.py would put a relative path below its own folder.
    path = (options.out or RESULTS).absolute() / "gpu"
    path.parent.mkdir(parents=True, exist_ok=True)
    failed = [] if options.plot_only else [section for section in options.only if not _measure(section, options, path, saves)]
    if saves and (options.plot_only or path.with_suffix(".json").exists()):
        figures = options.out or FIGURES
        figures.mkdir(parents=True, exist_ok=True)
        gpu_plot.plot(read_sections(str(path)), figures)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}; the reasons are above")


def _measure(section: str, options: argparse.Namespace, path: Path, saves: bool) -> bool:
    """Measure, show and save one section. Returns whether it succeeded; the others run anyway: time on a card is expensive."""
    measure, tabulate = SECTIONS[section]
    more = {"accuracy": {"captured": options.captured}, "model": {"text": options.text}, "floor": {"known": _parts(path, saves)}}
    try:
        results = functools.partial(measure, **more.get(section, {}))(options.quick)
        show(tabulate(results))
        if saves:
            print("written:", merge(str(path), section, {"card": card(), **results}), flush=True)
        return True
    except Exception:
        traceback.print_exc()
        return False
    finally:
        if CUDA:
            torch.cuda.empty_cache()


def _parts(path: Path, saves: bool) -> dict[str, Any] | None:
    """What the section `parts` has found, if that is in the file."""
    if not (saves and path.with_suffix(".json").exists()):
        return None
    found: dict[str, Any] | None = read_sections(str(path)).get("parts")
    return found


if __name__ == "__main__":
    main()

"""Cells, the default engine, against SDPA, exact top-k and others; float32 and one head of 64 unless stated otherwise.

python benchmarks/bench_cells.py                            # all sections: results/cells.json, docs/figures/cells.png
python benchmarks/bench_cells.py --only forward training    # only these; the other sections stay as they are
python benchmarks/bench_cells.py --quick                    # small sizes, nothing written

forward     SDPA and Cells() at 4,096 to 131,072 keys, no mask, and where they are equally fast     about 3 minutes on two cores
training    the same, forward and backward, causal, from 8,192 keys on                              5 minutes
scaling     Cells() alone, 16,384 to 1,048,576 keys: the exponent                                   7 minutes
million     a million keys and queries, ten heads: time, memory (15 GB in total), error             10 minutes
accuracy    error at equal numbers of keys: Cells, exact top-k, exact top-k with a drawn tail       2 minutes
auto        the default method over SDPA at 64 to 131,072 keys: time and memory                     9 minutes
honoured    an independent audit of Auto(eps=0.05), on eight families and real inputs               6 minutes
peers       Faiss, reformer-pytorch (both optional) and TopK with a k-means index: time and error   5 minutes

`honoured` also takes real inputs, if there is a model (`make smollm2`), which reads --text, or --captured.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cells_accuracy
import cells_auto
import cells_plot
import cells_speed
from record import FIGURES, merge, read_sections, show
from rich.table import Table

SECTIONS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[dict[str, Any]], Table]]] = {
    "forward": (cells_speed.forward, cells_speed.show_forward),
    "training": (cells_speed.training, cells_speed.show_training),
    "scaling": (cells_speed.scaling, cells_speed.show_scaling),
    "million": (cells_speed.million, cells_speed.show_million),
    "accuracy": (cells_accuracy.accuracy, cells_accuracy.show_accuracy),
    "auto": (cells_auto.auto, cells_auto.show_auto),
    "honoured": (cells_auto.honoured, cells_auto.show_honoured),
    "peers": (cells_accuracy.peers, cells_accuracy.show_peers),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help="these sections")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--plot-only", action="store_true", help="draw the figure from the saved results")
    parser.add_argument("--text", type=Path, help="text for the real inputs; without it, docstrings of the standard library")
    parser.add_argument("--captured", type=Path, help="folder with real inputs that real.py has saved, instead of a model")
    options = parser.parse_args()
    for section in () if options.plot_only else options.only:
        measure, tabulate = SECTIONS[section]
        if section == "honoured":
            measure = functools.partial(measure, options=options)
        results = measure(options.quick)
        show(tabulate(results))
        if not options.quick:
            print("written:", merge("cells", section, results))
    if not options.quick:
        FIGURES.mkdir(parents=True, exist_ok=True)
        cells_plot.plot(read_sections("cells"), FIGURES)


if __name__ == "__main__":
    main()

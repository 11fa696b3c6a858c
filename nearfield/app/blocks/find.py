"""Block sizes of all kernels for one card, within a deadline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import cast

import torch

from nearfield.app.blocks.compilers import Compilers, Job
from nearfield.app.blocks.passes import Setting, other_passes, setting_of
from nearfield.app.blocks.search import Found, Place, Trial, search
from nearfield.app.blocks.times import Timer
from nearfield.app.deadline import Deadline
from nearfield.cells.triton import measured, tuning
from nearfield.cells.triton.candidates import KERNELS, plain
from nearfield.cells.triton.tiles import TileSizes

DIMS = (64, 128)

AHEAD = 2
"""Trials that wait for a process, so that none waits for a trial."""


@dataclass
class CardBench:
    """Compiles in other processes, and times on the card. See `search.Bench`."""

    dtype: torch.dtype
    timer: Timer
    compilers: Compilers

    def setting(self, place: Place) -> Setting:
        return setting_of(place.kernel, self.dtype, place.dim, place.cell_size)

    def start(self, trial: Trial) -> None:
        place, blocks = trial.place, trial.blocks
        passes = self.setting(place).passes(self.timer.length)
        if trial.elsewhere:
            passes = other_passes(place.kernel, place.kind, place.dim)
        now = tuning.all_blocks(place.dim, self.dtype, self.timer.device, place.cell_size) | {place.kernel: blocks}
        self.compilers.start(trial, Job(tuple((one, now) for one in passes), place.kernel))

    def finished(self, seconds: float) -> tuple[Trial, bool] | None:
        return cast("tuple[Trial, bool] | None", self.compilers.finished(seconds))

    def milliseconds(self, trial: Trial) -> float | None:
        took = self.timer.milliseconds(self.setting(trial.place), {trial.place.kernel: trial.blocks})
        return None if took is None else took.get(trial.place.kernel)

    def runs(self, trial: Trial) -> bool:
        place = trial.place
        return self.timer.runs(other_passes(place.kernel, place.kind, place.dim), {place.kernel: trial.blocks})

    def starts(self, kind: str, dim: int, deadline: Deadline) -> dict[Place, tuple[TileSizes, float]]:
        """Current block sizes and their times; empty if their kernels are not compiled in time."""
        table = tuning.table_for(self.timer.device)["blocks"]
        places = [Place(kernel, kind, dim, int(size)) for kernel in KERNELS for size in table[kernel][f"{kind}, {dim}"]]
        settings = dict.fromkeys(self.setting(place) for place in places)
        work = []
        for setting in settings:
            blocks = tuning.all_blocks(dim, self.dtype, self.timer.device, setting.cell_size)
            work += [(one, blocks) for one in setting.passes(self.timer.length)]
        if not self.compilers.compile_all(work, deadline):
            return {}
        found = {}
        for setting in settings:
            took = self.timer.milliseconds(setting, {}) or {}
            for place in places:
                if self.setting(place) == setting and place.kernel in took:
                    now = tuning.blocks_for(place.kernel, dim, self.dtype, self.timer.device, place.cell_size)
                    found[place] = plain(place.kernel, now), took[place.kernel]
        return found


def find(
    dtypes: Sequence[torch.dtype],
    timer: Timer,
    compilers: Compilers,
    deadline: Deadline,
    report: Callable[[str], None],
) -> list[Found]:
    """Search kind by kind and dimension by dimension, keep what is faster, and use it from now on."""
    card = torch.cuda.get_device_name(timer.device)
    # Dtypes of one kind share their block sizes: the first one that is asked for is timed.
    first = {kind: dtype for kind in measured.KINDS for dtype in reversed(dtypes) if dtype in measured.KINDS[kind]}
    jobs = list(product(first, DIMS))
    found: list[Found] = []
    for number, (kind, dim) in enumerate(jobs):
        own = deadline.part(1 / (len(jobs) - number))
        bench = CardBench(first[kind], timer, compilers)
        report(f"compiling, {kind}, {dim}")
        starts = bench.starts(kind, dim, own)
        results = search(starts, bench, own, compilers.workers + AHEAD, partial(_say, report, kind, dim))
        compilers.forget()
        found += results
        faster = {(x.place.kernel, dim, x.place.cell_size): x.after for x in results if x.changed}
        if faster:
            tuning.keep(card, kind, faster)
    return found


def _say(report: Callable[[str], None], kind: str, dim: int, kernel: str) -> None:
    report(f"{kernel}, {kind}, {dim}")

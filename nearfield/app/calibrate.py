"""`nearfield bench --calibrate`: find the length from which cells are faster than exact attention on this machine.

On a GPU, block sizes of the kernels come first, see `app.blocks`, unless those of this very card are shipped.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from nearfield import crossover
from nearfield._compat import sdpa
from nearfield.app import wide_console
from nearfield.app.deadline import Deadline
from nearfield.attention import attention
from nearfield.cells.method import Cells
from nearfield.cells.triton.limits import unsupported
from nearfield.kernels import backends, cards
from nearfield.problem import check
from nearfield.synthetic import QKV, make

if TYPE_CHECKING:
    from nearfield.app.blocks.compilers import Compilers

LENGTHS = tuple(2**k for k in range(12, 18))

DIM, WIDTH = 64, 110

MARGIN = 1.05
"""Cells must be faster by this factor, so that noise does not make `Auto` slower than SDPA."""

MINUTES = 3.0
"""What calibrating may take on a GPU."""

SHARE_OF_BLOCKS = 0.4
"""How much of the time is for block sizes. The lengths are measured with what was found."""

HALVES = (torch.bfloat16, torch.float16)
"""On a GPU both take the same time: one of them is measured, for both."""

FIRST = 16_384
"""Where the search for a length begins on a GPU that none is known of. Every length takes kernels of its own, which have to be
compiled, so few should be looked at."""

GROWTH = 4
"""How much longer exact attention takes at the next length."""

Prepare = Callable[[int, str, Deadline], bool]
"""Makes a length and a kind of call ready to be timed; says whether that was done in time."""


def usual_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that are common on a device."""
    both = (torch.float32, torch.bfloat16)
    return (*both, torch.float16) if device.type == "cuda" else both


def calibrate_all(device: torch.device, dtypes: Sequence[torch.dtype], minutes: float = MINUTES, blocks: bool = False) -> None:
    """The crossover lengths of all dtypes. On a GPU, block sizes of the kernels first, and all of it in so many minutes.

    Args:
        blocks: look for block sizes also on a card whose own are shipped.
    """
    if device.type != "cuda":
        for dtype in dtypes:
            calibrate(device, dtype)
        return
    deadline = Deadline.after(60 * minutes)
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    # The short ones first: they leave the rest of their time to the others.
    dtypes = sorted(dtypes, key=lambda dtype: dtype.itemsize)
    if not backends.runs_triton(device):
        _all_lengths(device, dtypes, deadline, None)
        return
    from nearfield.app.blocks import report
    from nearfield.app.blocks.compilers import Compilers, workers_here
    from nearfield.cells.triton.tuning import is_measured

    with Compilers(device, workers_here()) as compilers:
        if cards.imposed_class():
            said = f"{cards.SWITCH} is set: block sizes stay those of class {cards.imposed_class()}"
            wide_console(WIDTH).print(said, highlight=False)
        elif not blocks and is_measured(device):
            said = f"block sizes of {torch.cuda.get_device_name(device)} are shipped; --blocks looks for better ones"
            wide_console(WIDTH).print(said, highlight=False)
        else:
            report.find_blocks(wide_console(WIDTH), device, dtypes, compilers, deadline.part(SHARE_OF_BLOCKS))
        _all_lengths(device, dtypes, deadline, compilers)


def _all_lengths(device: torch.device, dtypes: Sequence[torch.dtype], deadline: Deadline, compilers: Compilers | None) -> None:
    halves = [dtype for dtype in dtypes if dtype in HALVES]
    left = [dtype for dtype in dtypes if dtype not in halves[1:]]
    for number, dtype in enumerate(left):
        prepare = None
        if compilers is not None and unsupported(torch.empty(0, DIM, dtype=dtype)) is None:
            prepare = functools.partial(_compile_cells, compilers, device, dtype)
        alike = halves[1:] if dtype in halves else ()
        calibrate(device, dtype, alike=alike, deadline=deadline.part(1 / (len(left) - number)), prepare=prepare)


def calibrate(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    rounds: int = 3,
    alike: Sequence[torch.dtype] = (),
    deadline: Deadline | None = None,
    prepare: Prepare | None = None,
) -> dict[str, float]:
    """The crossover length of every kind of call. Prints a table, and saves the lengths for `Auto`, also for dtypes `alike`.

    A kind that there is no time for keeps the length that it had, or the shortest at which cells were seen to be faster.
    """
    console = wide_console(WIDTH)
    table = Table("kind", "keys", "SDPA, s", "Cells, s", "SDPA / Cells", box=SIMPLE_HEAD, title=describe(device, dtype))
    known = crossover.known(device, dtype)
    lengths: dict[str, float] = {}
    late = []
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(crossover.KINDS) * len(LENGTHS))
        for number, kind in enumerate(crossover.KINDS):
            search = Search.on(device, known.get(kind, math.inf))
            own = None if deadline is None else deadline.part(1 / (len(crossover.KINDS) - number))
            expected = 0.0
            while (length := search.next()) is not None:
                left = "" if deadline is None else f", {deadline.left:.0f} s left"
                done = number * len(LENGTHS) + len(search.faster)
                progress.update(bar, description=f"{kind}, {length:,} keys{left}", completed=done)
                if own is not None and (expected >= own.left or (prepare is not None and not prepare(length, kind, own))):
                    late.append(kind)
                    break
                exact, cells = _seconds(length, device, dtype, kind, rounds)
                expected = GROWTH * (rounds + _warm_up(device)) * (exact + cells)
                table.add_row(kind, f"{length:,}", f"{exact:.3g}", f"{cells:.3g}", f"{exact / cells:.2f}")
                search.faster[length] = exact > MARGIN * cells
            lengths[kind] = search.first(known.get(kind, math.inf) if kind in late else math.inf)
        progress.update(bar, completed=len(crossover.KINDS) * len(LENGTHS))
    _inputs.cache_clear()
    console.print(table)
    if late:
        console.print(f"no time to go on, lengths may be too large: {'; '.join(late)} (--minutes gives more)", highlight=False)
    for one in (dtype, *alike):
        path = crossover.keep(device, one, lengths)
    also = f", for {' and '.join(map(crossover.dtype_name, alike))} too" if alike else ""
    console.print(f"saved to {path}{also}", highlight=False, soft_wrap=True)
    return lengths


@dataclass
class Search:
    """The shortest length at which cells are faster: from a first one down while they are, or up until they are."""

    begin: int
    faster: dict[int, bool] = field(default_factory=dict)

    @staticmethod
    def on(device: torch.device, known: float) -> Search:
        """On a CPU from the shortest on, which takes no time; on a GPU from what is known."""
        if device.type != "cuda":
            return Search(LENGTHS[0])
        return Search(int(known) if known in LENGTHS else FIRST)

    def next(self) -> int | None:
        """The length to look at; None: it is found, or there is none."""
        place = LENGTHS.index(self.begin)
        down = self.faster.get(self.begin, False)
        order = LENGTHS[place::-1] if down else LENGTHS[place:]
        ahead = [length for length in order if length not in self.faster]
        found = any(self.faster[length] != down for length in order if length in self.faster)
        return ahead[0] if ahead and not found else None

    def first(self, otherwise: float) -> float:
        """The shortest at which they were faster; else what is known, unless they were slower there."""
        slower = max((length for length, faster in self.faster.items() if not faster), default=0)
        shortest = min((length for length, faster in self.faster.items() if faster), default=otherwise)
        return shortest if shortest > slower else math.inf


def _compile_cells(
    compilers: Compilers, device: torch.device, dtype: torch.dtype, length: int, kind: str, deadline: Deadline
) -> bool:
    """What `Cells()` launches in such a call, compiled by several processes; whether that was done in time."""
    from nearfield.app.blocks.passes import Pass
    from nearfield.cells.sizes import MemoryPolicy
    from nearfield.cells.triton.tuning import all_blocks

    heads, training = crossover.heads(device), kind.startswith("training")
    like = torch.empty(1, dtype=dtype, device=device).expand(1, heads, length, DIM)
    query, key, value = (like.detach().requires_grad_(training) for _ in range(3))
    problem = check(query, key, value, is_causal=kind.endswith("causal"))
    sizes = Cells().sizes(problem)
    one = Pass(dtype, DIM, heads, length, sizes, training, MemoryPolicy.of(problem))
    return compilers.compile_all([(one, all_blocks(DIM, dtype, device, sizes.cell_size))], deadline)


def _warm_up(device: torch.device) -> int:
    """Calls before those that count. On a GPU the first ones compile, make tables and record what later ones replay."""
    return 3 if device.type == "cuda" else 1


def _seconds(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
    inputs = [x.to(device, dtype) for x in _inputs(length, crossover.heads(device))]
    return compare(inputs, kind, rounds)


def compare(inputs: Sequence[Tensor], kind: str, rounds: int) -> tuple[float, float]:
    """Median seconds of exact attention and of cells on queries, keys and values, measured in turn."""
    training, causal = kind.startswith("training"), kind.endswith("causal")
    query, key, value = (x.detach().requires_grad_(training) for x in inputs)
    device = query.device

    def exact() -> Tensor:
        return sdpa(query, key, value, is_causal=causal)

    def cells() -> Tensor:
        return attention(query, key, value, is_causal=causal, method=Cells())

    def timed(call: Callable[[], Tensor]) -> float:
        _wait(device)
        start = time.perf_counter()
        output = call()
        if training:
            torch.autograd.grad(output.sum(), (query, key, value))
        _wait(device)
        return time.perf_counter() - start

    for _ in range(_warm_up(device)):
        timed(exact)
        timed(cells)
    pairs = [(timed(exact), timed(cells)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


@functools.lru_cache(maxsize=len(LENGTHS))
def _inputs(length: int, heads: int) -> QKV:
    """Made once for all kinds: at the largest lengths that takes longer than attention does on a GPU."""
    return make("clustered", 1, heads, length, DIM)


def describe(device: torch.device, dtype: torch.dtype, dim: int = DIM) -> str:
    """The device and the dtype, and whether a GPU runs without the Triton kernels: its times then say little about cells."""
    title = f"{crossover.place(device)}, {crossover.dtype_name(dtype)}"
    if device.type != "cuda":
        return title
    missing = "this GPU" if not backends.runs_triton(device) else unsupported(torch.empty(0, dim, dtype=dtype))
    return title if missing is None else f"{title} (the Triton kernels do not serve {missing}: cells run in plain torch)"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

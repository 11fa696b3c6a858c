"""Section of bench_cache.py: random operations on a `CellStore`, checked against lists of keys.

20 seeds of 2,000 operations: append, crop, reorder, select, repeat, save and load. After each of them, keys and values must be
those of the lists, bit for bit. After every append, attention with all cells opened must be exact attention over the lists. Every
second store is offloaded.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import each, table
from rich.table import Table
from torch import Tensor, nn

import nearfield as nf
from nearfield.cells.cache.saved import tensors_of
from nearfield.cells.cache.store import CellStore
from nearfield.hf.memory_file import Contents, Reading, fingerprint

SEEDS, OPERATIONS = 20, 2000
QUICK_SEEDS, QUICK_OPERATIONS = 1, 60
HEADS, GROUP, DIM, VALUE_DIM = 2, 2, 8, 6
MOST_KEYS, MOST_ENTRIES, TABLE = 400, 4, 4096
TOLERANCE = 1e-10
WEIGHTS = {"append": 10, "crop": 4, "reorder": 2, "select": 2, "repeat": 3, "save": 1, "load": 1}
OPENS_ALL = 10**6
METHODS = (
    nf.Cells(segment=16, cell_size=4, probes=OPENS_ALL, sinks=5, window=0),
    nf.Cells(segment=24, cell_size=5, probes=OPENS_ALL, sinks=0, window=10),
    nf.Cells(segment=64, probes=OPENS_ALL, sinks=16),
)


class ListOfKeys:
    """What a store should hold: for every batch entry, a list of row numbers in a table of keys."""

    def __init__(self, entries: int) -> None:
        self.rows: list[list[int]] = [[] for _ in range(entries)]

    def __len__(self) -> int:
        return len(self.rows[0])

    def taken(self, entries: list[int]) -> ListOfKeys:
        found = ListOfKeys(0)
        found.rows = [list(self.rows[entry]) for entry in entries]
        return found

    def of(self, numbers: Tensor) -> Tensor:
        """The rows `[entries, heads, length, dim]` of a table `[heads, rows, dim]`."""
        return numbers[:, torch.tensor(self.rows, dtype=torch.int64)].transpose(0, 1)


class Trial:
    """A store, the lists it is checked against, and the operations on both."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        widths = (HEADS, DIM), (HEADS, VALUE_DIM), (HEADS * GROUP, DIM)
        shapes = [(heads, TABLE, wide) for heads, wide in widths]
        self.keys, self.values, self.queries = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        self.method, self.offload = METHODS[seed % len(METHODS)], seed % 2 == 1
        self.path, self.model = folder / f"{seed}.safetensors", _Model()
        self.saved: ListOfKeys | None = None
        self.done: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        self.store = CellStore(self.method, offload=self.offload, group_from=0)
        self.lists = ListOfKeys(self.draw.randint(1, 3))
        self.append()

    def step(self) -> None:
        """One operation, at random. Some find nothing to do."""
        if len(self.lists) > MOST_KEYS:
            self.start()
            return
        name = self.draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        getattr(self, name)()
        self.done[name] += 1

    def append(self) -> None:
        new = self.draw.choice((1, 1, 1, 2, 7, 30))
        for rows in self.lists.rows:
            rows.extend(self.draw.randrange(TABLE) for _ in range(new))
        own = slice(len(self.lists) - new, None)
        self.store.append(self.lists.of(self.keys)[:, :, own], self.lists.of(self.values)[:, :, own])
        self.attend(new)

    def crop(self) -> None:
        kept = self.draw.randint(max(1, len(self.lists) - self.draw.choice((1, 5, 60))), len(self.lists))
        try:
            self.store.crop(kept)
        except ValueError as error:
            # A store that began as a memory cannot be cropped into it.
            if "belong to a memory" not in str(error):
                raise
            return
        self.lists.rows = [rows[:kept] for rows in self.lists.rows]

    def reorder(self) -> None:
        entries = list(range(len(self.lists.rows)))
        self.draw.shuffle(entries)
        self._take(entries, torch.tensor(entries))

    def select(self) -> None:
        entries = sorted(self.draw.sample(range(len(self.lists.rows)), self.draw.randint(1, len(self.lists.rows))))
        chosen = torch.zeros(len(self.lists.rows), dtype=torch.bool)
        chosen[entries] = True
        self._take(entries, chosen if self.draw.random() < 0.5 else torch.tensor(entries))

    def _take(self, entries: list[int], argument: Tensor) -> None:
        self.store.select(argument)
        self.lists = self.lists.taken(entries)

    def repeat(self) -> None:
        if 2 * len(self.lists.rows) <= MOST_ENTRIES:
            self.store.repeat(2)
            self.lists = self.lists.taken([entry for entry in range(len(self.lists.rows)) for _ in range(2)])

    def save(self) -> None:
        """Save one batch entry, since memories have one. The store goes on with this entry alone."""
        entry = self.draw.randrange(len(self.lists.rows))
        self._take([entry], torch.tensor([entry]))
        state = self.store.state
        assert state is not None
        tokens, reading = torch.tensor(self.lists.rows), Reading("running", len(self.lists))
        bounds, layers = torch.tensor(state.bounds), [tensors_of(state)]
        contents = Contents(tokens, self.method, reading, fingerprint(self.model), "float32", bounds, layers)
        nf.hf.Memory(contents).save(self.path)
        self.saved = self.lists.taken([0])

    def load(self) -> None:
        if self.saved is not None:
            self.store = nf.hf.Memory.load(self.path, self.model).cache().layers[0].store
            self.lists = self.saved.taken([0])

    def attend(self, rows: int) -> None:
        """Compare the latest rows with exact attention."""
        own = slice(len(self.lists) - rows, None)
        query = self.lists.of(self.queries)[:, :, own]
        seen = torch.ones(len(self.lists), len(self.lists), dtype=torch.bool).tril()[own]
        keys, values = self.lists.of(self.keys), self.lists.of(self.values)
        exact = F.scaled_dot_product_attention(query, keys, values, seen, enable_gqa=True)
        off = float((self.store.attend(query) - exact).abs().max())
        if not off < TOLERANCE:
            raise AssertionError(f"attention with all cells opened is off by {off} after {dict(self.done)}")

    def check(self) -> None:
        ours = self.store.length, self.store.keys, self.store.values
        theirs = len(self.lists), self.lists.of(self.keys), self.lists.of(self.values)
        same = ours[0] == theirs[0] and all(torch.equal(a, b) for a, b in zip(ours[1:], theirs[1:], strict=True))
        if not same:
            raise AssertionError(f"keys or values differ from the lists after {dict(self.done)}")


class _Model(nn.Module):
    """All that a memory needs to know about its model."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.config = _Config()


class _Config:
    def to_dict(self) -> dict[str, Any]:
        return {"model_type": "lists"}


def run_trial(seed: int, operations: int) -> Counter[str]:
    """How often each operation was done. Raises AssertionError if store and lists differ."""
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(seed, Path(folder))
        for _ in range(operations):
            trial.step()
            trial.check()
        return trial.done


def operations(quick: bool) -> dict[str, Any]:
    seeds, count = (QUICK_SEEDS, QUICK_OPERATIONS) if quick else (SEEDS, OPERATIONS)
    done: Counter[str] = Counter()
    failed = {}
    for seed in each(range(seeds), lambda seed: f"operations, seed {seed}"):
        try:
            done += run_trial(seed, count)
        except AssertionError as error:
            failed[seed] = str(error)
    return {"seeds": seeds, "operations": count, "done": dict(done), "tolerance": TOLERANCE, "failed": failed}


def show_operations(results: dict[str, Any]) -> Table:
    title = f"{results['operations']:,} random operations, {results['seeds']} seeds, checked against lists of keys"
    found = table(*results["done"], "seeds that differ", title=title)
    found.add_row(*(f"{count:,}" for count in results["done"].values()), str(len(results["failed"])))
    return found

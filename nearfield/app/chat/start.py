"""From arguments to an engine that can answer: what both `nearfield chat` and `nearfield serve` do first."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from nearfield.app.arguments import check_file, check_model
from nearfield.app.chat.documents import Documents, read_documents
from nearfield.app.remember import loaded
from nearfield.cells.method import Cells

if TYPE_CHECKING:
    from nearfield.app.chat.engine import Engine

PROBES = 256
"""Cells that a token opens, as in `hf.Memory`."""


@dataclass(frozen=True)
class Start:
    """What to load and to read.

    Attributes:
        place: the file for what is kept of the documents; None: beside the first one.
        keep: whether anything is kept in a file.
        probes: cells that a token opens.
    """

    model: str
    documents: list[Path]
    place: Path | None
    keep: bool
    probes: int
    device: torch.device | None
    dtype: torch.dtype | None
    download: bool

    def engine(self, console: Console) -> Engine:
        """Load and read everything. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
        texts = read_documents(self.documents)
        if self.place is not None and not (self.keep and self.documents):
            raise ValueError(f"--memory {self.place} has no meaning with --no-keep or without --document; leave it out")
        check_model(self.model)
        place = self._place()
        with console.status("importing Transformers"):
            # This first: without Transformers it says what to install.
            from nearfield.app.chat import kept
            from nearfield.app.chat.engine import Engine
        if place is not None:
            kept.check_place(place)
        model, tokenizer = loaded(console, self.model, self.device, self.dtype, self.download)
        if not texts:
            return Engine(model, tokenizer, None, None)
        documents, method = Documents(tokenizer, texts), Cells(probes=self.probes)
        with console.status("looking for what was read before"):
            memory, other = kept.load_kept(place, model, documents.tokens, method)
        length = documents.tokens.shape[1]
        if memory is not None:
            console.print(f"{length:,} tokens, read before: {place}", style="dim", highlight=False, soft_wrap=True)
            return Engine(model, tokenizer, documents, memory)
        if other:
            console.print(f"{place} is of {other}; reading again", style="dim", highlight=False, soft_wrap=True)
        columns = (TextColumn(f"reading {length:,} tokens"), BarColumn(), TaskProgressColumn())
        with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
            bar = bars.add_task("", total=1.0)
            memory = kept.read_new(model, documents.tokens, method, place, lambda done: bars.update(bar, completed=done))
        where = "kept nowhere" if place is None else f"kept in {place}, {place.stat().st_size / 1e6:,.0f} MB"
        console.print(f"{length:,} tokens read, {where}", style="dim", highlight=False, soft_wrap=True)
        return Engine(model, tokenizer, documents, memory)

    def _place(self) -> Path | None:
        """The file for what is kept; raises if it cannot be written."""
        if not self.keep or not self.documents:
            return None
        place = self.place or usual_place(self.documents)
        try:
            check_file("--memory", place)
        except ValueError as error:
            raise ValueError(f"{error}; --memory FILE names one, and --no-keep keeps nothing") from error
        return place


def usual_place(documents: list[Path]) -> Path:
    """Beside the first document: `book.txt.memory`; for several, with a digest of all their paths."""
    first = documents[0]
    if len(documents) == 1:
        return first.with_name(f"{first.name}.memory")
    names = "\n".join(str(path.resolve()) for path in documents)
    return first.with_name(f"{first.name}+{len(documents) - 1}-{hashlib.sha256(names.encode()).hexdigest()[:8]}.memory")

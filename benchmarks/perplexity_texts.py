"""Long texts of three kinds that are found on any machine with Python and some packages, for bench_perplexity_gpu.py.

book            the files given with --text, and the essays of RULER where it is installed
code            the sources of Python's standard library, without tests
documentation   Python's language reference, and the docstrings of torch

What they say depends on the versions that are installed, so results have a digest of the tokens of each text.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

KINDS = ("book", "code", "documentation")
CHARACTERS = 6
"""So many are given to a tokenizer for each token that is wanted: more than there are in one on average."""


@dataclass(frozen=True)
class Text:
    name: str
    kind: str
    source: str
    ids: Tensor
    """`[1, tokens]`"""

    @property
    def sha256(self) -> str:
        """Of the tokens, as numbers with spaces between them."""
        return hashlib.sha256(" ".join(map(str, self.ids[0].tolist())).encode()).hexdigest()

    @property
    def about(self) -> dict[str, str]:
        return {"kind": self.kind, "source": self.source, "sha256": self.sha256}


def save(texts: list[Text], path: Path) -> None:
    """Their tokens, for a machine that has neither the tokenizer nor the texts."""
    torch.save([(text.name, text.kind, text.source, text.ids.int()) for text in texts], path)


def load(path: Path, tokens: int) -> list[Text]:
    """What `save` has written, the first tokens of each."""
    texts = [Text(name, kind, source, ids.long()[:, :tokens]) for name, kind, source, ids in torch.load(path)]
    if short := [text.name for text in texts if text.ids.shape[1] < tokens]:
        raise ValueError(f"{path} has fewer than {tokens:,} tokens of {', '.join(short)}; make it again with --prepare")
    return texts


def find(tokenizer: Any, files: list[Path], tokens: int, count: int) -> list[Text]:
    """`count` texts of each kind, passages of its sources in turn; kinds without a source are left out, and said."""
    found = []
    for kind, sources in (("book", books(files)), ("code", code()), ("documentation", documentation())):
        if not sources:
            print("no book: give one with --text, or install RULER, which has essays")
        for number, (source, text, part, parts) in enumerate(islice(_passages(sources, count), count if sources else 0)):
            start = text.find("\n", part * len(text) // parts) + 1 if part else 0
            ids = tokenizer(text[start : start + CHARACTERS * tokens], return_tensors="pt", verbose=False)["input_ids"]
            if ids.shape[1] < tokens:
                raise ValueError(
                    f"{source} has {ids.shape[1]:,} tokens from its passage {part + 1} on, and {tokens:,} are needed"
                )
            found.append(Text(f"{kind} {number + 1}", kind, source, ids[:, :tokens]))
    return found


def _passages(sources: dict[str, str], count: int) -> Iterator[tuple[str, str, int, int]]:
    """(source, text, passage, passages of this source): the first passage of each source, then the second, ..."""
    rounds = -(-count // max(1, len(sources)))
    for number, (source, text) in enumerate(cycle(sources.items())):
        yield source, text, number // len(sources), rounds


def books(files: list[Path]) -> dict[str, str]:
    found = {path.name: path.read_text(encoding="utf-8") for path in files}
    return found | essays()


@functools.cache
def essays() -> dict[str, str]:
    """Those that RULER hides its needles in."""
    from nearfield.app.ruler import official

    try:
        place = official.folder()
    except ImportError:
        return {}
    text = json.loads((place / "data/synthetic/json/PaulGrahamEssays.json").read_text(encoding="utf-8"))["text"]
    return {"essays of RULER": text}


@functools.cache
def code() -> dict[str, str]:
    """Public modules of the standard library by name, without its packages: tests are packages."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    return {"sources of Python's standard library": "\n\n".join(path.read_text(encoding="utf-8") for path in files)}


@functools.cache
def documentation() -> dict[str, str]:
    from pydoc_data.topics import topics

    reference = "\n\n".join(topics[name].strip() for name in sorted(topics))
    place = Path(torch.__file__).parent
    files = [path for folder in ("nn/modules", "optim", "distributions") for path in sorted((place / folder).glob("*.py"))]
    return {"Python's language reference": reference, "docstrings of torch": "\n\n".join(filter(None, map(docstrings, files)))}


def docstrings(path: Path) -> str:
    """Of a module, its classes and functions, each under its name."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (said := ast.get_docstring(node)):
            found.append(said if isinstance(node, ast.Module) else f"{node.name}\n\n{said}")
    return "\n\n".join(found)

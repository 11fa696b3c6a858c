"""A text to train on: a file that is named, tiny Shakespeare, or, offline, the text of Python's own standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from experiments.settings import Settings
from nearfield.crossover import cache_file

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
PATIENCE = 20.0
"""Seconds that a download may stand still."""
LIBRARY_CHARACTERS = 1 << 20
"""About the length of tiny Shakespeare."""


@dataclass(frozen=True)
class Corpus:
    name: str
    """says which text it is, in words"""
    text: str
    sha256: str

    def __str__(self) -> str:
        return named(self.name, self.sha256)


def load_corpus(settings: Settings) -> Corpus:
    """`settings.text`, or tiny Shakespeare (kept in the cache folder once downloaded), or what a Python without a network has.

    Small runs take the standard library without asking the network, so that they are the same everywhere.
    """
    if settings.text is not None:
        return from_file(settings.text)
    if settings.quick:
        return standard_library()
    content = kept() or download()
    return corpus("tiny Shakespeare", content) if content else standard_library()


def from_file(path: Path) -> Corpus:
    """A file of the user's; tiny Shakespeare is recognised."""
    try:
        content = path.read_bytes()
        found = corpus(path.name, content)
    except OSError as error:
        raise ValueError(f"--text {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {path} must be text in UTF-8: {error}") from None
    return Corpus("tiny Shakespeare", found.text, SHA256) if found.sha256 == SHA256 else found


def kept() -> bytes | None:
    """The copy in the cache folder, if it is whole."""
    try:
        content = cached_copy().read_bytes()
    except (OSError, RuntimeError):
        return None
    return content if hashlib.sha256(content).hexdigest() == SHA256 else None


def download() -> bytes | None:
    """Tiny Shakespeare from the network, checked and kept; None offline, or where another text came."""
    try:
        with urllib.request.urlopen(URL, timeout=PATIENCE) as answer:
            content = answer.read()
    except (OSError, ValueError):
        return None
    if hashlib.sha256(content).hexdigest() != SHA256:
        return None
    keep(content)
    return content


def keep(content: bytes) -> None:
    """In the cache folder, whole or not at all. Without a place to write, the next run downloads again."""
    try:
        path = cached_copy()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            draft = Path(folder) / path.name
            draft.write_bytes(content)
            os.replace(draft, path)
    except (OSError, RuntimeError):
        return


def cached_copy() -> Path:
    return cache_file().parent / "tinyshakespeare.txt"


def standard_library() -> Corpus:
    """The modules of the running Python, in the order of their names, as far as about a million characters."""
    parts, length = [], 0
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        part = path.read_text(encoding="utf-8", errors="replace")
        parts.append(part)
        length += len(part)
        if length >= LIBRARY_CHARACTERS:
            break
    version = sysconfig.get_python_version()
    return corpus(f"the standard library of Python {version}", "".join(parts)[:LIBRARY_CHARACTERS].encode())


def named(name: str, sha256: str) -> str:
    return f"{name} (sha256 {sha256[:12]})"


def corpus(name: str, content: bytes) -> Corpus:
    return Corpus(name, content.decode(), hashlib.sha256(content).hexdigest())

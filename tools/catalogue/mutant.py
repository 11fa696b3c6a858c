"""One way to break the package, named by the place in the code that it breaks and not by a file."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("nearfield", "examples")
"""with code that can be broken; the name of a place in an example begins with `examples.` and its module"""

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Place:
    """Lines `[start, stop)` of a file."""

    file: str
    start: int
    stop: int


def _is_overload(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    """A signature for type checkers, without a body."""
    return any(isinstance(x, ast.Name) and x.id == "overload" for x in node.decorator_list)


@functools.cache
def places() -> dict[str, list[Place]]:
    """Every function, class, method and constant by its name: `masses`, `Spans.seen`, `ROUTE_SPREADS`."""
    found: dict[str, list[Place]] = {}

    def note(name: str, node: ast.stmt, file: str) -> None:
        first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))])
        found.setdefault(name, []).append(Place(file, first - 1, node.end_lineno or node.lineno))

    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        file = str(path.relative_to(ROOT))
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)):
                    note(name, node, file)
            elif isinstance(node, FUNCTIONS | ast.ClassDef) and not _is_overload(node):
                note(node.name, node, file)
                for inner in ast.iter_child_nodes(node) if isinstance(node, ast.ClassDef) else ():
                    if isinstance(inner, FUNCTIONS):
                        note(f"{node.name}.{inner.name}", inner, file)
    return found


@functools.cache
def test_files() -> dict[str, list[str]]:
    """Where every test is, and every file of tests by its own name: arguments of pytest, below `tests/`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        file = str(path.relative_to(ROOT / "tests"))
        found.setdefault(path.name, []).append(file)
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found.setdefault(node.name, []).append(f"{file}::{node.name}")
                found.setdefault(f"{path.name}::{node.name}", []).append(f"{file}::{node.name}")
    return found


@dataclass(frozen=True)
class Mutant:
    name: str
    place: str
    """a function, class, method or constant, wherever it is defined: `masses`, `Spans.seen`; where several modules have one of
    that name, with the end of the module's name before it: `triton.near:near_dq`"""
    old: str
    """must occur exactly once there"""
    new: str
    tests: tuple[str, ...]
    """what should notice: names of tests or of files of tests, wherever they are; `test_file.py::test_name` if need be"""

    def where(self) -> Place:
        module, _, name = self.place.rpartition(":")
        ending = module.replace(".", "/") + ".py"
        named = [x for x in places().get(name, []) if not module or f"/{x.file}".endswith(f"/{ending}")]
        found = [x for x in named if x.file.startswith("examples/") == module.startswith("examples.")]
        if len(found) != 1:
            files = ", ".join(x.file for x in found) or "no file"
            raise SystemExit(f"mutant {self.name!r}: the place {self.place!r} is in {files}")
        return found[0]

    def apply(self, source: str) -> str:
        """The source of the file with the change made in the place."""
        place = self.where()
        lines = source.splitlines(keepends=True)
        text = "".join(lines[place.start : place.stop])
        if text.count(self.old) != 1:
            raise SystemExit(
                f"mutant {self.name!r}: the text to replace occurs {text.count(self.old)} times in {self.place} "
                f"({place.file}):\n{self.old}"
            )
        return "".join([*lines[: place.start], text.replace(self.old, self.new), *lines[place.stop :]])

    def arguments(self) -> list[str]:
        """What pytest is told."""
        chosen = []
        for test in self.tests:
            name, *case = test.partition("[")
            found = test_files().get(name, [])
            if len(found) != 1:
                raise SystemExit(f"mutant {self.name!r}: the test {name} is in {', '.join(found) or 'no file'}")
            chosen.append(found[0] + "".join(case))
        return chosen

"""Break the package in known ways, one at a time, and see that the tests notice.

Each mutant is a textual change in a named place, listed in `catalogue/`. It is made in a temporary copy of the package, and the
tests that should notice are run there until the first failure. A mutant that no test notices has survived; that is an error of
the test suite, and the exit status is 1.

    make mutants                                    # all of them
    python tools/mutants.py --only causal --jobs 2  # those whose name contains "causal"
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from catalogue import MUTANTS, Mutant
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("nearfield", "tests", "benchmarks", "examples", "docs", "mkdocs.yml", "pyproject.toml", "README.md", "CHANGELOG.md")
TIME_LIMIT = 600

FAILED = 1
"""pytest's exit status when tests ran and some failed. Any other one but 0 says that they could not be run as asked."""


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    status: int
    noticed_by: str
    seconds: float

    @property
    def killed(self) -> bool:
        return self.status == FAILED


def copy_to(folder: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)


def run_tests(folder: Path, tests: list[str]) -> tuple[int, str]:
    """Exit status, and the first failed test (or the end of the output where there is none)."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    options = ("-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--no-header", "--tb=no")
    paths = [f"tests/{test}" for test in tests]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *paths],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no answer within {TIME_LIMIT} s"
    lines = done.stdout.strip().splitlines()
    failed = [line.split(" - ")[0].removeprefix("FAILED tests/") for line in lines if line.startswith("FAILED")]
    return done.returncode, failed[0] if failed else "\n".join(lines[-3:])


def attempt(mutant: Mutant) -> Verdict:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        copy_to(folder)
        target = folder / mutant.where().file
        target.write_text(mutant.apply(target.read_text()))
        status, noticed_by = run_tests(folder, mutant.arguments())
    return Verdict(mutant, status, noticed_by, time.perf_counter() - start)


def unbroken(mutants: tuple[Mutant, ...]) -> Verdict:
    """The same tests on the package as it is: a test that always fails kills nothing."""
    tests = {test for mutant in mutants for test in mutant.arguments()}
    # A file given as a whole covers its tests given by name.
    tests = {test for test in tests if "::" not in test or test.split("::")[0] not in tests}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_to(Path(name))
        status, said = run_tests(Path(name), sorted(tests))
    return Verdict(Mutant("(none)", "", "", "", tuple(tests)), status, said, time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run the mutants whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time")
    arguments = parser.parse_args()
    console = Console() if sys.stdout.isatty() else Console(width=150)
    mutants = tuple(mutant for mutant in MUTANTS if arguments.only in mutant.name)
    for mutant in mutants:  # before anything runs: all of them can be made
        mutant.apply((ROOT / mutant.where().file).read_text())
        mutant.arguments()

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    verdicts = []
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("the unbroken package", total=len(mutants) + 1)
        healthy = unbroken(mutants)
        progress.advance(task)
        if healthy.status != 0:
            console.print(f"the tests fail without any mutant (status {healthy.status}): {healthy.noticed_by}")
            return 1
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for verdict in pool.map(attempt, mutants):
                verdicts.append(verdict)
                progress.update(task, advance=1, description=verdict.mutant.name)

    table = Table("mutant", "place", "verdict", Column("noticed by", overflow="fold"), "seconds")
    for verdict in verdicts:
        if verdict.killed:
            word = "[green]killed"
        elif verdict.status == 0:
            word = "[red]survived"
        else:
            word = f"[red]tests did not run (status {verdict.status})"
        table.add_row(verdict.mutant.name, verdict.mutant.place, word, escape(verdict.noticed_by), f"{verdict.seconds:.0f}")
    console.print(table)
    killed = sum(verdict.killed for verdict in verdicts)
    console.print(f"{killed} of {len(verdicts)} killed")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())

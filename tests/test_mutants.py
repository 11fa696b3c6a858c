"""The catalogue of ways to break the package: each finds its place in the code, and the tests that should notice."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_mutant_applies_and_names_tests_that_exist() -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        from catalogue import AREAS
    finally:
        sys.path.remove(str(ROOT / "tools"))
    mutants = [mutant for area in AREAS for mutant in area.MUTANTS]
    assert len(mutants) > 700
    sources: dict[str, str] = {}
    stale = []
    for mutant in mutants:
        try:
            file = mutant.where().file
            source = sources.setdefault(file, (ROOT / file).read_text())
            assert mutant.apply(source) != source, mutant.name
            assert mutant.arguments(), mutant.name
        except SystemExit as error:
            stale.append(str(error))
    assert not stale, "\n".join(stale)

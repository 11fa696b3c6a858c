"""docs/paper: the tables name functions, tests, numbers and places that exist, and the figures are what the page says."""

from __future__ import annotations

import inspect
import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

import nearfield

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "paper"
PAGES = sorted(FOLDER.glob("*.md"))
README = (FOLDER / "README.md").read_text()
STATUS = {"runs", "corrected", "refuted", "not claimed here"}


def rows() -> list[list[str]]:
    """The cells of the tables with six columns, without their heads."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in README.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in cells] for cells in lines if len(cells) == 6 and cells[1].strip() not in HEADS]


HEADS = {"what it does", "what it says"}
ROWS = rows()
NAMED = sorted({found for row in ROWS for found in re.findall(r"\[`([^`]+)`\]\(([^)]+)\)", row[2])})
TESTS = sorted({name for row in ROWS for name in re.findall(r"`([^`]+::[^`]+)`", row[3])})


def place(page: Path, target: str) -> str:
    """Where a link leads, from the root of the repository."""
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve().relative_to(ROOT) if path else page.relative_to(ROOT)
    return f"{there}#{anchor}" if anchor else str(there)


def test_every_number_of_the_paper_has_one_row() -> None:
    numbers = [row[0] for row in ROWS]
    assert [name for name in numbers if name.startswith("Algorithm")] == [f"Algorithm {n}" for n in range(1, 10)]
    shared = [name.split() for name in numbers if name.startswith(("Theorem", "Lemma", "Definition", "Remark"))]
    assert [int(number) for _, number in shared] == list(range(1, 33))
    kinds = {kind: [int(number) for name, number in shared if name == kind] for kind in ("Theorem", "Lemma", "Definition")}
    assert kinds["Theorem"] == [2, 3, 4, 5, 7, 8, 10, 20, 26, 28, 29, 32]
    assert kinds["Lemma"] == [1, 6, 9, 16, 18, 19, 22, 23, 24]
    assert kinds["Definition"] == [12, 15, 17, 21, 25]


def test_every_row_has_a_status_and_a_correction_its_reason() -> None:
    for row in ROWS:
        said = re.findall(r"(?<!\*)\*([a-z ]+)\*", row[5])
        assert said, row[0]
        assert set(said) <= STATUS, row[0]
        if "corrected" in said:
            again = row[2].startswith("as ") or "as Theorem" in row[5]
            assert again or "](../" in row[5], f"{row[0]}: what was wrong?"


@pytest.mark.parametrize(("name", "target"), NAMED, ids=[name for name, _ in NAMED])
def test_functions_and_classes_exist(name: str, target: str) -> None:
    path = ROOT / place(FOLDER / "README.md", target)
    if path == ROOT / "experiments" / name:
        return  # a folder of that name
    call, _, arguments = name.partition("(")
    *_, last = call.split(".")
    sources = "".join(file.read_text() for file in ([path] if path.is_file() else path.glob("*.py")))
    assert re.search(rf"\b(def|class) {last}\b", sources), f"{target} does not define {last}"
    if call.startswith("nf."):
        parameters = inspect.signature(reduce(getattr, call.split(".")[1:], nearfield)).parameters
        for argument in re.findall(r"(\w+)=", arguments):
            assert argument in parameters, f"{call} has no argument {argument}"


def test_the_notation_names_what_there_is() -> None:
    """Every name in the last column is a word of the sources; what is called `nf.` can be called so."""
    sources = "\n".join(file.read_text() for folder in ("nearfield", "experiments") for file in (ROOT / folder).rglob("*.py"))
    words = set(re.findall(r"\w+", sources))
    lines = [line for line in (FOLDER / "notation.md").read_text().splitlines() if line.startswith("| ")]
    names = {name for line in lines for name in re.findall(r"`([^`]+)`", re.split(r"(?<!\\)\|", line)[4])}
    assert len(names) > 60
    for name in names:
        if name.startswith("nf."):
            reduce(getattr, name.split(".")[1:], nearfield)
        path = name.startswith("experiments/")
        assert (ROOT / name).exists() if path else set(re.findall(r"[A-Za-z_]\w*", name)) <= words, name


@pytest.mark.parametrize("name", TESTS)
def test_tests_exist(name: str) -> None:
    path, _, function = name.partition("::")
    pattern = r"def test_\w+\(" if function == "test_*" else rf"def {function}\("
    assert re.search(pattern, (ROOT / "tests" / path).read_text())


def headings(page: Path) -> set[str]:
    """The anchors that GitHub makes of the headings of a page."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)]+)\)", page.read_text())
    for target in targets:
        there = place(page, target)
        path, _, anchor = there.partition("#")
        assert (ROOT / path).exists(), target
        assert not anchor or anchor in headings(ROOT / path), target
    assert targets


def test_the_first_screen_links_to_the_folder() -> None:
    first = (ROOT / "README.md").read_text().partition("## Install")[0]
    assert "(docs/paper/README.md)" in first


def numbers_in(path: Path) -> tuple[set[str], list[float]]:
    """What a page may quote of a results file: numbers as the findings write them, and numbers that may be rounded."""
    results = json.loads(path.read_text())
    if "findings" in results:
        words = " ".join(finding["evidence"] for finding in results["findings"])
        return set(re.findall(NUMBER, words)), []
    flat: list[float] = []

    def collect(x: Any) -> None:
        if isinstance(x, dict | list):
            for value in x.values() if isinstance(x, dict) else x:
                collect(value)
        elif isinstance(x, int | float):
            flat.append(float(x))

    # Some files have sections, each with results of its own.
    for section in (results,) if "results" in results else results.values():
        collect(section["results"])
    return set(), flat


NUMBER = r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?"


def quotes() -> list[tuple[str, str, str]]:
    """Row, text and results file, for every link to a JSON file in the column of measurements."""
    found = []
    for row in ROWS:
        for text, target in re.findall(r"([^\]]*?)\(\[[^\]]*\]\(([^)]+\.json)\)\)", row[4]):
            found.append((row[0], text, place(FOLDER / "README.md", target)))
    return found


def test_measured_numbers_are_in_the_results() -> None:
    checked = 0
    for row, text, path in quotes():
        written, values = numbers_in(ROOT / path)
        for number in re.findall(NUMBER, text):
            digits = len(number.partition(".")[2])
            value = float(number.replace(",", ""))
            rounded = any(abs(round(one, digits) - value) < 1e-9 for one in values)
            assert number in written or rounded, f"{row}: {number} is not in {path}"
            checked += 1
    assert checked > 60


@pytest.mark.long
def test_figures_are_drawn_and_the_page_quotes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(ROOT))
    from docs.paper.draw import draw

    page = (FOLDER / "explained.md").read_text()
    for name, facts in draw(tmp_path).items():
        assert (tmp_path / f"{name}.png").stat().st_size > 20_000
        assert (ROOT / "docs" / "figures" / f"{name}.png").exists()
        assert f"(../figures/{name}.png)" in page
        for what, fact in facts.items():
            assert fact in page, f"{name}, {what}: {fact}; draw the figures again and mend the page"


def test_shakespeare_is_told_as_it_was_found() -> None:
    results = json.loads((ROOT / "experiments/results/cuda/shakespeare.json").read_text())
    page = (FOLDER / "experiments.md").read_text()
    evidence = {found["claim"]: found["evidence"] for found in results["findings"]}
    swapped = evidence["A model trained with exact attention, used with kNN attention."]
    for name in ("top 5", "top √n", "cells"):
        changes = re.findall(rf"(?<!/2 \+ ){name} \+([\d.]+% ± [\d.]+%)", swapped)
        assert len(changes) == 2, "one for each context"
        for change in changes:
            assert f"by {change} with" in page, (name, change)
    best, final = (
        (
            min(row["validation"] for row in results["units"][f"context=256, {name}"]["rows"] if row["kind"] == "evaluation")
            for name in ("topk-5", "exact")
        ),
        re.search(r"perplexity is ([\d.]+) against ([\d.]+)", evidence["kNN attention maintains a small perplexity gap."]),
    )
    assert final is not None
    assert "at their best {:.2f} and {:.2f} at a context of 256".format(*best) in page
    assert f"to {final[1]} and {final[2]})" in page


def test_three_seeds_of_shakespeare_are_told_as_they_were_found() -> None:
    results = json.loads((ROOT / "experiments/results/shakespeare.json").read_text())
    evidence = {found["claim"]: found["evidence"] for found in results["findings"]}
    page = (FOLDER / "experiments.md").read_text()
    gaps = re.findall(r"[+−][\d.]+% ± [\d.]+%", evidence["Context 64: more keys, drawn keys, and cells."].partition("After")[0])
    assert len(gaps) == 3
    assert f"top 5 {gaps[0]}, top √n {gaps[1]}, top √n/2 + √n/2 drawn {gaps[2]}, each" in page
    assert gaps[0] in (FOLDER / "README.md").read_text()
    swapped = evidence["A model trained with exact attention, used with kNN attention."].partition("context 1,024")[0]
    rises = re.findall(r"\+([\d.]+% ± [\d.]+%)", swapped)
    assert f"rises by {rises[0]}, with the top 8 by {rises[1]}, and with cells by {rises[3]}." in page
    done = [unit["rows"][-1] for key, unit in results["units"].items() if key.startswith("context=64")]
    assert len(done) == 12
    assert not any(row["stopped"] for row in done)

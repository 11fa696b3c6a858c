"""The documentation site: all pages are in it, the reference has every public name, and links that leave docs/ are dealt with."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

import nearfield

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
NAMED = {name for page in (DOCS / "api").glob("*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)}


def site_links() -> Any:
    spec = util.spec_from_file_location("site_links", DOCS / "site_links.py")
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages(nav: Any) -> Iterator[str]:
    for entry in nav:
        for value in entry.values():
            yield from [value] if isinstance(value, str) else pages(value)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(pages(SITE["nav"]))
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_the_reference_names_what_there_is(name: str) -> None:
    if name.startswith("nearfield.hf"):
        pytest.importorskip("transformers")
    module, _, attribute = name.rpartition(".")
    assert resolve_name(f"{module}:{attribute}").__doc__


def test_the_reference_has_every_public_name() -> None:
    modules = {name for name in nearfield.__all__ if isinstance(getattr(nearfield, name), type(sys))}
    written = {name.rpartition(".")[2] for name in NAMED}
    assert set(nearfield.__all__) - modules <= written, set(nearfield.__all__) - modules - written


def test_links_that_leave_the_folder() -> None:
    rewritten = site_links().rewritten
    text = "[a](guide.md#x) ![b](../experiments/b.png) [`c`](../nearfield/c.py) [d](https://x.org) [e](#e) ![f](figures/f.png)"
    shown, pictures = rewritten(text, "page.md")
    assert shown == ("[a](guide.md#x) ![b](outside/experiments/b.png) `c` [d](https://x.org) [e](#e) ![f](figures/f.png)")
    assert pictures == {"experiments/b.png"}
    shown, pictures = rewritten(
        "[a](../guide.md) [b](../../nearfield/b.py) ![c](../../c.png) ![d](../figures/d.png)", "paper/page.md"
    )
    assert shown == "[a](../guide.md) b ![c](../outside/c.png) ![d](../figures/d.png)"
    assert pictures == {"c.png"}


def test_pictures_from_elsewhere_exist() -> None:
    rewritten = site_links().rewritten
    found = [rewritten(path.read_text(), path.relative_to(DOCS).as_posix())[1] for path in DOCS.rglob("*.md")]
    wanted = set().union(*found)
    assert wanted
    assert all((ROOT / path).is_file() for path in wanted)


def peer_rows() -> dict[str, list[list[str]]]:
    """The rows of the two tables of peers.md that the comparison quotes, by table."""
    text = (DOCS / "peers.md").read_text()
    found = {}
    for inputs, table in (("real", "peers forward/32768/128 real"), ("strewn", "peers forward/131072/128 strewn")):
        lines = text.partition(f"<!-- table {table} -->")[2].partition("<!-- end")[0].splitlines()
        found[inputs] = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return found


def test_the_comparison_quotes_the_measured_figures() -> None:
    rows, inputs, quoted = peer_rows(), "", 0
    for line in (DOCS / "comparison.md").read_text().splitlines():
        cells = [cell.strip(" *`") for cell in line.split("|")[1:-1]]
        if len(cells) != 4 or not re.fullmatch(r"[\d.]+", cells[2]):
            continue
        inputs = cells[0].partition(" ")[0].rstrip(",") or inputs
        name = "MoBA (fla), 3 x 2048" if cells[1].startswith("MoBA") else cells[1]
        (row,) = (row for row in rows[inputs] if row[0] == name)
        assert (row[2], f"{float(row[3]):.3f}") == (cells[2], cells[3]), line
        quoted += 1
    assert quoted == 11

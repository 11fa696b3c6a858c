"""The files that people look for: they parse, agree with each other, and name no place that packages come from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import nearfield

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def section(name: str) -> str:
    """A table of pyproject.toml, as text: Python 3.10 cannot parse TOML."""
    return (ROOT / "pyproject.toml").read_text().partition(f"[{name}]\n")[2].partition("\n[")[0]


def test_the_citation_is_of_this_version_and_of_the_paper() -> None:
    cited = load(ROOT / "CITATION.cff")
    assert cited["version"] == nearfield.__version__
    assert cited["authors"] == [{"name": "the nearfield authors"}]
    assert 'authors = [{ name = "the nearfield authors" }]' in section("project")
    paper = cited["references"][0]
    assert paper["title"].startswith("kNN Attention Demystified")
    assert paper["url"] in section("project.urls")
    assert f"## [{nearfield.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflows(path: Path) -> None:
    text = path.read_text()
    flow = load(path)
    assert flow["permissions"] == {"contents": "read"}
    for job in flow["jobs"].values():
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
    assert not re.search(r"https?://|index-url|secrets\.", text)


def test_tests_run_on_all_pythons_with_torch_first() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]
    assert set(jobs) == {"lint", "tests", "docs", "wheel"}
    pythons = jobs["tests"]["strategy"]["matrix"]["python"]
    assert pythons == ["3.10", "3.11", "3.12", "3.13"]
    assert all(f"Python :: {version}" in section("project") for version in pythons)
    steps = [step.get("run", "") for step in jobs["tests"]["steps"]]
    first, rest = (next(i for i, step in enumerate(steps) if word in step) for word in ("install torch -c", "-e '.[dev]'"))
    assert first < rest
    assert re.search(r"^torch==", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_a_release_is_published_without_a_token_and_only_after_the_build() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert jobs["publish"]["needs"] == "build"
    assert "id-token" not in str(jobs["build"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_issue_forms(path: Path) -> None:
    form = load(path)
    if path.name == "config.yml":
        assert form["blank_issues_enabled"] is True
        return
    assert form["name"]
    assert form["description"]
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids)) > 0
    assert all(field["attributes"]["label"] for field in form["body"])


def test_make_docs_installs_the_extra_and_all_of_it_is_pinned() -> None:
    extra = re.search(r'^docs = \["(.*?)"\]', section("project.optional-dependencies"), re.MULTILINE)
    assert extra
    wanted = extra[1].split('", "')
    recipe = (ROOT / "Makefile").read_text()
    assert f"install -q {wanted[0]} '{wanted[1]}' {wanted[2]} -c constraints.txt" in recipe
    pinned = (ROOT / "constraints.txt").read_text()
    for name in wanted:
        assert re.search(rf"^{name.partition('[')[0]}==", pinned, re.MULTILINE)

"""The experiments run in their quick form, go on after an interrupt, and say what their numbers say."""

from __future__ import annotations

import ast
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

pytest.importorskip("matplotlib")

from rich.console import Console

from experiments import look, runner
from experiments.catalogue import EXPERIMENTS
from experiments.command import COLORS, main
from experiments.corpus import Corpus
from experiments.digest import digest
from experiments.efficiency.plan import measured
from experiments.error_vs_k.tell import minimal
from experiments.experiment import Experiment, Rows, Section, Unit, Verdict
from experiments.growth import extrapolated
from experiments.isolate import Rounds
from experiments.page import STYLE, VERDICTS, figure, table, text
from experiments.page import finding as page_of
from experiments.printed_law import printed_gradients, sizes
from experiments.settings import HERE, RESULTS, Settings, place
from experiments.shakespeare.sizes import QUICK
from experiments.store import Store, plain, read
from experiments.theory.indices import missed_key
from experiments.words import change, finite, fixed, number, percent
from nearfield.paper.gradients import PrintedWalk, estimate, exact

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    """Sizes below the quick ones, to the end of the file: how long anything takes, and how well it learns, is not looked at."""
    shorter = {"iterations": 5, "interval": 3, "warm_up": 2, "evaluated": 1, "written": 4}
    changes = {
        "shakespeare.train": {"TIMED": 1},
        "shakespeare.plan": {"QUICK": tuple(replace(sizes, **shorter) for sizes in QUICK)},
        "efficiency.plan": {"ON_CPU": Rounds(1)},
        "indices.plan": {"ON_CPU": Rounds(1)},
        "gpt2_xl.cost": {"TURNS": 1},
        "error_vs_k.plan": {"ROWS": 128},
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, values in changes.items():
            for name, value in values.items():
                patch.setattr(import_module(f"experiments.{module}"), name, value)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small: None) -> Path:
    """Every experiment, quick."""
    where = tmp_path_factory.mktemp("experiments")
    main(["all", "--quick", "--seed", "3", "--out", str(where)])
    return where


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_quick_results_carry_their_environment_and_seed(folder: Path, name: str) -> None:
    saved = json.loads((folder / f"{name}.json").read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert saved["complete"]
    assert saved["seed"] == 3
    assert saved["quick"]
    assert saved["findings"]
    for where in saved["environments"]:
        assert where.keys() >= {"nearfield", "torch", "python", "processor", "cpus", "threads", "date"}
    for unit in saved["units"].values():
        assert unit["rows"]
        assert 0 <= unit["environment"] < len(saved["environments"])
    rows = [row for unit in saved["units"].values() for row in unit["rows"]]
    for drawn in EXPERIMENTS[name].tell(rows).captions:
        assert (folder / "figures" / f"{drawn}.png").stat().st_size > 10_000
        assert (folder / "figures" / f"{drawn}.svg").stat().st_size > 10_000


def test_the_report_stands_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "save", lambda *_: look.plt.close("all"))  # the figures are there
    main(["report", "--quick", "--out", str(folder)])
    page = (folder / "report.html").read_text()
    assert page.count("<figure") == page.count("<svg") >= len(EXPERIMENTS)
    for name in EXPERIMENTS:
        assert f'id="{name}"' in page
    stands_alone(page)


def stands_alone(page: str) -> None:
    """It loads nothing, and its links lead to one place each."""
    assert not re.search(r'(src|href|url)\s*[=(]\s*["\']?\s*(https?:)?//', page)
    assert "@import" not in page
    assert "<script" not in page
    references = set(re.findall(r'href="#([^"]+)"', page))
    assert references <= set(re.findall(r'id="([^"]+)"', page))
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


def test_a_second_run_does_nothing_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.json")}
    monkeypatch.setattr(Store, "save", lambda *_: pytest.fail("measured again"))
    main(["all", "--quick", "--seed", "3", "--out", str(folder)])
    assert before == {path: path.read_bytes() for path in folder.rglob("*.json")}


def test_results_of_a_second_device_have_a_folder_and_a_section_of_their_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of the paper's sizes come first, which a GPU has where models are trained."""
    monkeypatch.setattr(look, "save", lambda *_: look.plt.close("all"))  # the figures are copied
    assert Settings(device="cuda").folder == Settings().folder / "cuda"
    assert Settings(device="cuda", out=tmp_path).folder == tmp_path / "cuda"
    for results in (tmp_path, place(tmp_path, "cuda")):
        results.mkdir(exist_ok=True)
        for name in ("efficiency", "shakespeare"):
            (results / f"{name}.json").write_text((folder / f"{name}.json").read_text())
        shutil.copytree(folder / "figures", results / "figures")
    main(["report", "--out", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    found = re.findall(r'<section id="([^"]+)"', page)
    assert found == ["efficiency", "efficiency-cuda", "shakespeare", "shakespeare-cpu"]
    counted = sum(int(count) for count in re.findall(r'<span class="[a-z]+">(\d+) ', page))
    assert counted == page.count("<article") / 2
    ids = re.findall(r'id="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_unit_knows_what_it_was_measured_with(name: str) -> None:
    assert all(unit.digest for unit in EXPERIMENTS[name].plan(Settings(quick=True)))


def kept(name: str) -> dict[str, Path]:
    """The results of an experiment that are kept with the code, by device."""
    paths = {device: place(RESULTS, device) / f"{name}.json" for device in EXPERIMENTS[name].devices}
    return {device: path for device, path in paths.items() if path.exists()}


def told_by(path: Path) -> Section:
    return EXPERIMENTS[path.stem].tell([row for unit in read(path)["units"].values() for row in unit["rows"]])


@pytest.mark.parametrize(("name", "device"), [(name, device) for name in EXPERIMENTS for device in kept(name)])
def test_kept_results_say_what_their_rows_say(name: str, device: str) -> None:
    path = kept(name)[device]
    saved = read(path)
    assert saved["complete"]
    assert [asdict(finding) for finding in told_by(path).findings] == saved["findings"]


def test_the_page_says_what_the_results_say(tmp_path: Path) -> None:
    """Built as on a fresh clone, from nothing but the kept results. One test: building takes several seconds."""
    for path in RESULTS.rglob("*.json"):
        copy = tmp_path / path.relative_to(RESULTS)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(path.read_bytes())
    main(["report", "--out", str(tmp_path)])
    page = (tmp_path / "report.html").read_text()
    stands_alone(page)
    sections = dict(re.findall(r'<section id="([^"]+)">(.*?)</section>', page, re.DOTALL))
    for name in EXPERIMENTS:
        assert name in sections
        for i, (device, path) in enumerate(kept(name).items()):
            section = sections.pop(f"{name}-{device}" if i else name)
            told = told_by(path)
            for words in [told.paper, told.here, *told.captions.values(), *told.notes]:
                assert text(words) in section
            for said in [*map(page_of, told.findings), *map(table, told.tables)]:
                assert said in section
            assert section.count("<svg") == len(told.captions) > 0
            for drawn in told.captions:
                for kind in ("png", "svg"):
                    assert (place(tmp_path, device) / "figures" / f"{drawn}.{kind}").stat().st_size > 10_000
    assert not sections


def test_a_report_without_results_says_what_to_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--out", str(tmp_path)])
    assert "python -m experiments all" in capsys.readouterr().err


def toy(measure: Callable[[int], Rows], stale: Callable[[Rows], bool] = lambda rows: False) -> Experiment:
    """Five units."""

    def plan(settings: Settings) -> list[Unit]:
        return [Unit(f"unit {i}", lambda done, i=i: measure(i), stale) for i in range(5)]

    return Experiment("toy", "Toy", plan, lambda rows: {}, lambda rows: Section("", "", [], {}))


def test_environments_are_those_of_the_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the date of the last one, and without those that nothing was measured in."""
    found = {"threads": 1, "date": "monday"}
    monkeypatch.setattr("experiments.store.environment", lambda device: dict(found))
    settings = Settings(quick=True, out=tmp_path)
    store = Store("toy", settings)
    for i, (threads, date) in enumerate([(1, "monday"), (2, "monday"), (2, "tuesday"), (4, "tuesday")]):
        found |= {"threads": threads, "date": date}
        store.save(f"unit {i}", [{"x": i}], 0.1)
    assert [unit["environment"] for unit in read(store.path)["units"].values()] == [0, 1, 1, 2]
    assert read(store.path)["environments"][1] == {"threads": 2, "date": "tuesday"}
    store.finish(["unit 3", "unit 1"], [])
    saved = read(store.path)
    assert [saved["environments"][unit["environment"]]["threads"] for unit in saved["units"].values()] == [4, 2]
    assert [where["threads"] for where in saved["environments"]] == [2, 4]


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    settings = Settings(quick=True, out=tmp_path)
    seen: list[int] = []

    def stops_at_three(i: int) -> Rows:
        if i == 3:
            raise KeyboardInterrupt
        seen.append(i)
        return [{"i": i}]

    with pytest.raises(KeyboardInterrupt):
        runner.run(toy(stops_at_three), settings, QUIET)
    assert seen == [0, 1, 2]
    assert not read(tmp_path / "toy.json")["complete"]

    def goes_on(i: int) -> Rows:
        seen.append(i)
        return [{"i": i}]

    runner.run(toy(goes_on), settings, QUIET)
    assert seen == [0, 1, 2, 3, 4]
    saved = read(tmp_path / "toy.json")
    assert saved["complete"]
    assert [row["i"] for unit in saved["units"].values() for row in unit["rows"]] == [0, 1, 2, 3, 4]
    runner.run(toy(goes_on, stale=lambda rows: rows[0]["i"] == 2), settings, QUIET)
    assert seen == [0, 1, 2, 3, 4, 2]
    runner.run(toy(goes_on), settings, QUIET, fresh=True)
    assert seen[6:] == [0, 1, 2, 3, 4]


def test_results_of_another_seed_are_not_mixed_in(tmp_path: Path) -> None:
    settings = Settings(quick=True, out=tmp_path)
    runner.run(toy(lambda i: [{"i": i}]), settings, QUIET)
    with pytest.raises(ValueError, match=r"seed=0.*seed=1.*--fresh"):
        runner.run(toy(lambda i: [{"i": i}]), replace(settings, seed=1), QUIET)


def test_other_sizes_are_measured_again(tmp_path: Path) -> None:
    settings, seen = Settings(quick=True, out=tmp_path), list[str]()

    def sized(*digests: str) -> Experiment:
        def measured(name: str) -> Rows:
            seen.append(name)
            return [{"i": 0}]

        units = [Unit(f"unit {i}", lambda done, x=x: measured(x), digest=x) for i, x in enumerate(digests)]
        return replace(toy(lambda i: []), plan=lambda settings: units)

    for digests in (("", ""), ("", "b"), ("", "b"), ("", "c")):
        runner.run(sized(*digests), settings, QUIET)
    assert seen == ["", "", "b", "c"]
    assert digest(Settings(), [1.0]) == digest(Settings(), [1.0]) != digest(Settings(), [1.5])


def test_units_of_an_older_plan_are_dropped_and_those_to_keep_are_told(tmp_path: Path) -> None:
    settings, told = Settings(quick=True, out=tmp_path), list[list[int]]()

    def some(*numbers: int) -> Experiment:
        def tell(rows: Rows) -> Section:
            told.append([row["i"] for row in rows])
            return Section("", "", [], {})

        units = [Unit(f"unit {i}", lambda done, i=i: [{"i": i}]) for i in numbers]
        return Experiment("toy", "Toy", lambda _: units, lambda rows: {}, tell, keep=lambda rows: rows[0]["i"] == 7)

    for numbers, fresh in (((1, 7, 2), False), ((2, 3), False), ((2, 3), True)):
        runner.run(some(*numbers), settings, QUIET, fresh)
        assert [row["i"] for unit in read(tmp_path / "toy.json")["units"].values() for row in unit["rows"]] == told[-1]
    assert told == [[1, 7, 2], [2, 3, 7], [2, 3]]


def test_the_text_is_said_and_another_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = Settings(quick=True, out=tmp_path)

    def reads(name: str, sha256: str) -> Experiment:
        corpus = Corpus(name, "", sha256)
        unit = Unit("unit", lambda done: [{"corpus": name, "sha256": sha256}], corpus=corpus)
        return replace(toy(lambda i: []), plan=lambda settings: [unit])

    runner.run(reads("a play", "0123456789abcdef"), settings, Console(width=200))
    assert "toy: reads a play (sha256 0123456789ab)" in capsys.readouterr().out
    before = (tmp_path / "toy.json").read_bytes()
    with pytest.raises(ValueError, match=r"a play \(sha256 0123.*reads a poem \(sha256 fedc.*--text.*--out.*--fresh"):
        runner.run(reads("a poem", "fedcba9876543210"), settings, QUIET)
    assert (tmp_path / "toy.json").read_bytes() == before
    runner.run(reads("a poem", "fedcba9876543210"), settings, QUIET, fresh=True)


def test_every_verdict_has_a_name_and_a_colour() -> None:
    assert set(get_args(Verdict)) == VERDICTS.keys() == COLORS.keys()
    for verdict in get_args(Verdict):
        assert f".tally .{verdict} " in STYLE


def test_numbers_that_are_not_finite_are_said_in_words() -> None:
    for x in (finite(None), change(1.0, finite(None)), change(finite(None), 1.0), change(finite(None), finite(None))):
        assert number(x) == percent(x) == fixed(x) == "not finite"
    assert change(finite(3.0), finite(2.0)) == 0.5


def test_what_is_saved_is_plain() -> None:
    assert plain({"a": [1, 2.00000001, float("nan"), float("-inf"), True, None, "b"]}) == {
        "a": [1, 2.0, None, None, True, None, "b"]
    }
    with pytest.raises(TypeError, match="Tensor"):
        plain([torch.ones(1)])


def test_imports_point_one_way() -> None:
    """The framework knows no experiment but through the catalogue, and experiments do not know each other."""
    packages = {path.parent.name for path in HERE.glob("*/__init__.py")}
    above = {"catalogue", "report", "command", "__main__"}
    for path in HERE.rglob("*.py"):
        module = path.relative_to(HERE).with_suffix("").parts
        found = [node.module or "" for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        parts = {name.split(".")[1] for name in found if name.startswith("experiments.")}
        if module[0] in packages:
            assert not parts & (above | (packages - {module[0]})), path
        elif module[0] not in above:
            assert not parts & (above | packages), path


def test_lengths_that_would_pass_a_limit_are_not_tried() -> None:
    ran = [{"status": "ok", "n": n, "seconds": 1e-6 * n**1.5, "megabytes": n / 100} for n in (1000, 2000)]
    assert extrapolated(ran, 4000, "seconds") == pytest.approx(1e-6 * 4000**1.5)
    assert extrapolated(ran[:1], 2000, "seconds") == pytest.approx(4 * ran[0]["seconds"])
    assert extrapolated([], 2000, "seconds") is None
    assert extrapolated(ran[:1], 2000, "megabytes") is None
    row = measured(Settings(time_limit=0.2), "naive", True, 4000, ran)
    assert (row["status"], row["limit"]) == ("time", 0.2)
    assert row["predicted"] == pytest.approx(1e-6 * 4000**1.5)
    row = measured(Settings(memory_limit=0.03), "naive", True, 4000, ran)
    assert (row["status"], row["limit"]) == ("memory", 0.03)
    stopped = [*ran, {"status": "time", "n": 4000, "limit": 1.0, "predicted": None, "tried": True}]
    assert measured(Settings(), "naive", True, 8000, stopped)["status"] == "time"


def rows_of_errors(at_eighth: float, at_root: float) -> Rows:
    def row(power: str, k: int, error: float) -> dict[str, Any]:
        about = {"n": 512, "B": 10.0, "seed": 0, "power": power, "k": k, "method": "topk"}
        return {**about, "mass": 0.5, "mean_additive": error, "max_additive": 2 * error}

    return [row("n^{1/8}", 3, at_eighth), row("n^{1/2}", 23, at_root)]


@pytest.mark.parametrize(
    ("at_eighth", "at_root", "verdict"), [(0.4, 0.05, "refuted"), (0.05, 0.05, "confirmed"), (0.009, 1e-6, "confirmed")]
)
def test_the_verdict_on_k_follows_the_numbers(at_eighth: float, at_root: float, verdict: str) -> None:
    assert minimal(rows_of_errors(at_eighth, at_root)).verdict == verdict


def test_printed_gradients_by_their_law_have_the_moments_of_the_walks() -> None:
    """Means agree with the exact gradient, and standard deviations with those of the library's own walks."""
    generator = torch.Generator().manual_seed(0)
    point = [torch.randn(1, 1, 6, 2, generator=generator, dtype=torch.float64) for _ in range(4)]
    eps, delta, trials = 0.5, 0.1, 50
    asked, random = sizes(6, 2, eps, delta), np.random.default_rng(0)
    ours = [printed_gradients(*point, asked, random) for _ in range(600)]
    walk = PrintedWalk(eps, delta, walks=asked.walks)
    theirs = [estimate(*point, walk, generator=generator) for _ in range(trials)]
    right = exact(*point)
    for name in right._fields:
        mine, walked = (torch.stack([getattr(found, name) for found in many]) for many in (ours, theirs))
        spread = mine.std(0)
        assert bool(((mine.mean(0) - getattr(right, name)).abs() < 5 * spread / 600**0.5 + 0.03 * spread).all()), name
        assert bool(((walked.mean(0) - mine.mean(0)).abs() < 5 * spread * (1 / trials + 1 / 600) ** 0.5).all()), name
        assert float(walked.std(0).norm() / spread.norm()) == pytest.approx(1.0, abs=0.15), name


def test_a_missed_key_spoils_only_the_printed_cutoff() -> None:
    assert missed_key(5.0, certify=False, draws=4000, seed=0)["tv"] > 0.3
    assert missed_key(5.0, certify=True, draws=4000, seed=0)["tv"] < 0.06


def test_text_is_escaped_and_marked_up() -> None:
    assert text("a < b & `n^2`, n^{1/8}, S_{min}") == "a &lt; b &amp; <code>n^2</code>, n<sup>1/8</sup>, S<sub>min</sub>"


def test_a_figure_keeps_to_itself(tmp_path: Path) -> None:
    drawn = (
        '<?xml version="1.0"?><!DOCTYPE svg><svg width="10pt" height="5pt" viewBox="0 0 10 5" xmlns="http://www.w3.org/2000/svg">'
    )
    (tmp_path / "one.svg").write_text(drawn + '<defs><path id="m"/></defs><use xlink:href="#m"/></svg>')
    page = figure(tmp_path / "one.svg", "caption")
    assert '<use href="#one-m"/>' in page
    assert 'id="one-m"' in page
    assert "http" not in page
    assert 'width="10pt"' not in page


def test_an_interrupt_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.command.run", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main(["theory", "--quick", "--out", str(tmp_path)])
    assert stopped.value.code == 130
    assert "the same command goes on" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["efficiency", "--device", "cuda"])
    assert "--device cuda needs a CUDA device" in capsys.readouterr().err


def test_an_experiment_of_the_cpu_is_not_run_as_if_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("experiments.command.run", lambda experiment, *_: ran.append(experiment.name) or Section("", "", [], {}))
    with pytest.raises(SystemExit):
        main(["theory", "--device", "cuda", "--quick"])
    assert "theory does not run on cuda; leave --device out" in capsys.readouterr().err
    main(["all", "--device", "cuda", "--quick"])
    assert ran == ["efficiency", "indices", "shakespeare", "gpt2-xl"]
    assert "not on cuda: error-vs-k, gradient-descent, theory" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [("--device", "mps"), ("--time-limit", "-5"), ("--memory-limit", "much")])
def test_bad_arguments_are_refused(arguments: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["efficiency", "--quick", *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_without_a_name_it_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPERIMENTS)

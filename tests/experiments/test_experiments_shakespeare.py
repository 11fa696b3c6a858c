"""The experiment on Shakespeare: its text, its model, its training, and that what it says follows the numbers."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from rich.console import Console

import nearfield as nf
from experiments import corpus as texts
from experiments import look, runner
from experiments.corpus import Corpus, load_corpus
from experiments.experiment import Rows
from experiments.page import entry
from experiments.settings import RESULTS, Settings, place
from experiments.shakespeare import EXPERIMENT
from experiments.shakespeare.draw import COLORS, draw
from experiments.shakespeare.evaluate import attention_errors, keys, perplexity, write
from experiments.shakespeare.methods import CAPTURED, NAMES, keys_per_query, method
from experiments.shakespeare.model import GPT, Rotary
from experiments.shakespeare.plan import made_with, measure, plan, stale
from experiments.shakespeare.sizes import ON_GPU, QUICK, Sizes
from experiments.shakespeare.tables import table
from experiments.shakespeare.tell import cost, growing_error, more_keys, small_gap, tell, widening
from experiments.shakespeare.text import at, numbered, windows
from experiments.shakespeare.train import EAGER_STEPS, LEAST_RATE, RATE, Trainer, rate
from experiments.store import plain, read

SMALL = Sizes(16, 4, 40, 20, ("exact",), layers=1, heads=2, width=32, dropout=0.0, warm_up=4, evaluated=2, written=8)
COUNTING = Corpus("counting", "0123456789" * 400, "none")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test asks the network, nor looks into the user's cache."""

    def refused(*_: object, **__: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr("urllib.request.urlopen", refused)
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path / "cache"))


def model_of(sizes: Sizes, symbols: int = 10) -> GPT:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return GPT(sizes, symbols).eval()


def test_a_text_that_is_named_is_read_and_hashed(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("to be or not")
    found = load_corpus(Settings(text=path))
    assert found == Corpus("own.txt", "to be or not", hashlib.sha256(b"to be or not").hexdigest())


@pytest.mark.parametrize(("content", "problem"), [(None, "cannot be read"), (b"\xff\xfe\xff", "must be text in UTF-8")])
def test_a_text_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, problem: str) -> None:
    path = tmp_path / "own.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"own.txt {problem}"):
        load_corpus(Settings(text=path))


def test_offline_there_is_the_standard_library_and_it_says_so() -> None:
    found = load_corpus(Settings())
    assert found.name.startswith("the standard library of Python 3.")
    assert found == load_corpus(Settings(quick=True))
    assert found.sha256 == hashlib.sha256(found.text.encode()).hexdigest()
    assert "def " in found.text


def test_a_download_is_checked_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def __enter__(self) -> Answer:
            return self

        def __exit__(self, *_: object) -> None: ...

        def read(self) -> bytes:
            return self.content

    monkeypatch.setattr(texts, "SHA256", hashlib.sha256(b"a play").hexdigest())
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Answer(b"another page"))
    assert load_corpus(Settings()).name.startswith("the standard library")
    assert not texts.cached_copy().exists()
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Answer(b"a play"))
    assert load_corpus(Settings()).text == "a play"

    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: pytest.fail("it is in the cache"))
    assert load_corpus(Settings()).name == "tiny Shakespeare"
    assert load_corpus(Settings(quick=True)).name.startswith("the standard library")
    assert load_corpus(Settings(text=texts.cached_copy())).name == "tiny Shakespeare"
    texts.cached_copy().write_text("a pl")
    monkeypatch.setattr("urllib.request.urlopen", lambda *_, **__: Answer(b"a play"))
    assert load_corpus(Settings()).text == "a play"


def test_windows_cover_the_text_and_the_next_character() -> None:
    text = numbered(COUNTING, 16, "cpu")
    assert (text.symbols, len(text.train), len(text.validation)) == ("0123456789", 3600, 400)
    found = windows(text.validation, 16, 30)
    assert found.shape == (30, 17)
    assert torch.equal(found[0], text.validation[:17])
    assert torch.equal(found[-1], text.validation[-17:])
    assert text.characters(at(text.train, torch.tensor([3]), 4)[0]) == "34567"
    with pytest.raises(ValueError, match=r"counting has 4,000 characters.*4,096 needs 40,98.*--text"):
        numbered(COUNTING, 4096, "cpu")


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_no_character_sees_those_after_it(name: str, rotary: bool) -> None:
    """Which the paper's model did."""
    sizes = replace(SMALL, context=64, rotary=rotary)
    model = model_of(sizes)
    model.attend_with(method(name, 64))
    ids = torch.arange(64)[None] % 10
    changed = ids.clone()
    changed[:, 40:] = 7
    with torch.random.fork_rng(devices=[]):
        before, after = (torch.manual_seed(0) and model(x) for x in (ids, changed))
    assert torch.equal(before[:, :40], after[:, :40])
    assert not torch.equal(before[:, 40:], after[:, 40:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_positions_tell_distances_and_nothing_else(dtype: torch.dtype) -> None:
    """One query and one key, at every place: their products are the same along diagonals, and lengths stay."""
    turn = Rotary(replace(SMALL, context=40, width=32, heads=2))
    query, key = torch.randn(2, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    everywhere = [turn(x.expand(3, 40, 16)) for x in (query, key)]
    assert all(x.dtype == dtype for x in everywhere)
    turned, other = (x[0].float() for x in everywhere)
    products = turned @ other.T
    near = {"atol": 1e-5, "rtol": 0} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0}
    for distance in range(-39, 40):
        along = products.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), **near)
    assert float((products[:, 0] - products[0, 0]).abs().max()) > 1
    torch.testing.assert_close(turned.norm(dim=-1), query.float().norm().expand(40), **near)
    assert torch.equal(everywhere[0][0, 0], query)


def test_attention_of_a_model_with_rotary_positions_sees_distances() -> None:
    """One character at every place: scores of its queries and keys differ, and are the same along diagonals."""
    model, scores = model_of(replace(SMALL, rotary=True)), list[torch.Tensor]()
    assert model.size() == model_of(SMALL).size() - SMALL.context * SMALL.width
    model.show(lambda query, key, value, output: scores.append((query @ key.mT)[0, 0].detach()))
    model(torch.full((1, SMALL.context), 3))
    found = scores[0] / scores[0].abs().max()
    assert float(found.std()) > 0.1
    for distance in range(1 - SMALL.context, SMALL.context):
        along = found.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), atol=1e-4, rtol=0)


def test_methods_of_a_context_look_at_about_as_many_keys() -> None:
    inputs = torch.randn(3, 1, 2, 256, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    found = {name: keys_per_query(*inputs, method(name, 256)) for name in ("topk", "tail", "cells")}
    assert max(found.values()) < 1.25 * min(found.values()), found
    assert [sizes.batch * sizes.context for sizes in ON_GPU] == [16384, 16384]


def test_errors_are_those_of_attention() -> None:
    sizes = replace(SMALL, context=64, layers=2)
    model = model_of(sizes)
    read = windows(numbered(COUNTING, 64, "cpu").validation, 64, 2)
    assert attention_errors(model, read)["max"] == 0.0
    model.attend_with(nf.TopK(5))
    few = attention_errors(model, read)
    model.attend_with(nf.TopK(40))
    many = attention_errors(model, read)
    assert len(few["means"]) == 2
    assert few["max"] > few["mean"] > many["mean"] > 0
    assert keys(model, read, nf.TopK(5)) == pytest.approx((1 + 2 + 3 + 4 + 60 * 5) / 64)
    assert keys(model, read, None) == 32.5
    assert model.blocks[0].attention.watch is None


@pytest.mark.parametrize(("name", "rotary"), [("exact", False), ("topk-5", False), ("topk-5", True)])
def test_a_model_learns_to_count(name: str, rotary: bool) -> None:
    text = numbered(COUNTING, 16, "cpu")
    model = model_of(replace(SMALL, rotary=rotary)).train()
    model.attend_with(method(name, 16))
    judged = windows(text.validation, 16, 8)
    before = perplexity(model, judged, 4)
    trainer = Trainer(model, text.train, replace(SMALL, iterations=200), 0, captured=False)
    for i in range(200):
        trainer.step(i)
    model.eval()
    assert before > 8
    assert perplexity(model, judged, 4) < 1.5
    assert text.characters(write(model, text.validation[:8], 8, 0)) == "89012345"


def test_the_rate_rises_and_falls() -> None:
    sizes = ON_GPU[0]
    rates = [rate(i, sizes) for i in range(sizes.iterations)]
    assert max(rates) == pytest.approx(RATE)
    assert rates.index(max(rates)) == sizes.warm_up
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(LEAST_RATE, rel=0.01)


def test_a_unit_is_the_same_again_and_stops_in_time() -> None:
    text = numbered(COUNTING, 16, "cpu")

    def unit(**changed: Any) -> Rows:
        return measure(COUNTING, text, replace(SMALL, **changed), "exact", seed=1)

    state = torch.get_rng_state()
    rows, again = unit(), unit()
    assert torch.equal(torch.get_rng_state(), state)
    assert [row["iteration"] for row in rows[:-1]] == [0, 20, 40]
    assert rows[:-1] == again[:-1]
    assert (rows[-1]["sample"], rows[-1]["stopped"]) == (again[-1]["sample"], False)
    assert len(rows[-1]["sample"]) == SMALL.written
    assert rows[-1]["prompt"] == "01234567"
    late = unit(seconds=0.0)
    assert (late[-1]["stopped"], late[-1]["limit"]) == (True, 0.0)
    assert late[-1]["iterations"] == late[-2]["iteration"] < 40


def test_more_time_is_measured_again() -> None:
    end = {"kind": "end", "stopped": False, "limit": 1.0}
    assert not stale(end, replace(SMALL, seconds=2.0))
    assert stale({**end, "stopped": True}, replace(SMALL, seconds=2.0))
    assert not stale({**end, "stopped": True}, replace(SMALL, seconds=1.0))
    assert stale({"kind": "left", "limit": 1.0}, SMALL)


def test_other_sizes_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = replace(SMALL, methods=("exact", "topk", "cells"))
    before = {name: made_with(sizes, name) for name in sizes.methods}
    assert before == {name: made_with(replace(sizes, seconds=1.0), name) for name in sizes.methods}
    for changed in ({"batch": 5}, {"width": 64}, {"iterations": 41}, {"dropout": 0.1}, {"rotary": True}):
        after = {name: made_with(replace(sizes, **changed), name) for name in sizes.methods}
        assert all(after[name] != before[name] for name in sizes.methods), changed
    # What a model of exact attention is used with afterwards is its own affair.
    fewer = replace(sizes, methods=("exact", "topk"))
    assert [made_with(fewer, name) == before[name] for name in ("exact", "topk")] == [False, True]
    monkeypatch.setattr(import_module("experiments.shakespeare.plan"), "RATE", 2e-3)
    assert made_with(sizes, "topk") != before["topk"]


def test_steps_of_every_method_are_timed_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a graph, and without what comes before the steps that count."""
    text, clock, made = numbered(COUNTING, 16, "cpu"), [0.0], list[int]()
    update = Trainer.update

    def slow_at_first(trainer: Trainer) -> None:
        made.append(0)
        clock[0] += 1.0 if len(made) > EAGER_STEPS else 100.0
        update(trainer)

    trainer = Trainer(model_of(SMALL).train(), text.train, SMALL, 0, captured=False)
    monkeypatch.setattr(Trainer, "update", slow_at_first)
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert trainer.seconds(trainer.update) == 1.0
    made.clear()
    rows = measure(COUNTING, text, replace(SMALL, seconds=50.0), "exact", seed=0)
    assert (rows[-1]["seconds"], rows[-1]["graph_seconds"], rows[-1]["stopped"]) == (1.0, None, False)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CAPTURED)
def test_captured_steps_are_those_of_a_loop(name: str) -> None:
    sizes = replace(SMALL, context=256, iterations=10, layers=2, width=128)
    text = numbered(COUNTING, 256, "cuda")
    start = [parameter.clone() for parameter in model_of(sizes).cuda().parameters()]
    ends = []
    for captured in (False, True):
        model = model_of(sizes).cuda().train()
        model.attend_with(method(name, 256))
        trainer = Trainer(model, text.train, sizes, 0, captured)
        for i in range(sizes.iterations):
            trainer.step(i)
        assert (trainer.graph is not None) == captured
        ends.append(list(model.parameters()))
    steps, others = (torch.cat([(now - then).detach().flatten() for now, then in zip(end, start, strict=True)]) for end in ends)
    # AdamW makes much of small gradients, and sums have another order from run to run.
    assert float((steps - others).norm() / steps.norm()) < 0.1
    assert trainer.seconds(trainer.graph.replay) > 0
    assert trainer.seconds(trainer.update) > 0


def test_there_is_a_unit_for_every_method_context_and_seed() -> None:
    short, long = ([f"context={sizes.context}, {name}" for name in sizes.methods] for sizes in QUICK)
    keys = [unit.key for unit in plan(Settings(quick=True, seed=3))]
    # Those of the first seed have the names that they had when it was the only one.
    assert keys == [*short, *(f"{key}, seed=4" for key in short), *long]


def test_three_seeds_are_whole_one_after_the_other() -> None:
    keys = [unit.key for unit in plan(Settings())]
    assert len(keys) == len(set(keys)) == 3 * 10
    for own, first in ((keys[:12], keys[:4]), (keys[12:], keys[12:18])):
        assert own == [*first, *(f"{key}, seed=1" for key in first), *(f"{key}, seed=2" for key in first)]


def test_the_number_of_seeds_makes_no_unit_due() -> None:
    assert made_with(replace(SMALL, seeds=1), "topk") == made_with(replace(SMALL, seeds=5), "topk")
    units = plan(Settings(quick=True))
    assert [unit.digest for unit in units if unit.key.endswith("seed=1")] == [unit.digest for unit in units][:4]


def test_kept_results_of_top_k_are_not_measured_again() -> None:
    """They were saved when there was one seed; their sizes are those of today."""
    saved = read(place(RESULTS, "cuda") / "shakespeare.json")["units"]
    for sizes in ON_GPU:
        for name in ("topk-5", "topk", "tail"):
            unit = saved[f"context={sizes.context}, {name}"]
            assert unit["digest"] == made_with(sizes, name)
            assert not stale(unit["rows"][-1], sizes)


@pytest.mark.long
def test_a_run_ends_in_time_names_what_is_left_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here after two units of the second seed."""
    one = replace(SMALL, iterations=2, interval=1, methods=("exact", "topk-5", "topk"), seeds=2)
    module, clock, begun = import_module("experiments.shakespeare.plan"), [0.0], list[tuple[str, int]]()

    def counted(corpus: Corpus, text: Any, sizes: Sizes, name: str, seed: int, timed: bool) -> Rows:
        assert timed
        clock[0] += 10.0
        begun.append((name, seed))
        return measure(corpus, text, sizes, name, seed)

    def ticking() -> float:
        clock[0] += 1e-4
        return clock[0]

    monkeypatch.setattr(module, "QUICK", (one,))
    monkeypatch.setattr(module, "measure", counted)
    monkeypatch.setattr(module, "load_corpus", lambda settings: COUNTING)
    monkeypatch.setattr(module.time, "perf_counter", ticking)
    settings = Settings(quick=True, seed=7, out=tmp_path)
    section = runner.run(EXPERIMENT, replace(settings, total_limit=1e-9), Console(quiet=True))
    assert not begun
    assert [finding.verdict for finding in section.findings] == ["untested"] * 4
    assert "Not begun within the 1e-09 s of the whole run: of seed 7 all at context 16; of seed 8 all" in section.here
    section = runner.run(EXPERIMENT, replace(settings, total_limit=45.0), Console(quiet=True))
    everything = [(name, seed) for seed in (7, 8) for name in one.methods]
    assert begun == everything[:5]
    assert "Not begun within the 45 s of the whole run: of seed 8 top √n at context 16." in section.here
    assert "top √n, one seed" in [line[0] for line in section.tables[0].body]
    assert "where one seed was run, a difference of up to 2% does not count" in section.here
    section = runner.run(EXPERIMENT, settings, Console(quiet=True))
    assert begun == everything
    assert "Not begun" not in section.here
    assert {row["seed"] for unit in read(tmp_path / "shakespeare.json")["units"].values() for row in unit["rows"]} == {7, 8}


def rows_of(exact: list[Any], few: list[Any], largest: list[Any], seed: int | None = None) -> Rows:
    """Perplexities with exact attention and with five keys, and the largest error of these, over training; without a seed, as
    rows were when there was one."""
    rows: Rows = []
    about = {"context": 64} | ({} if seed is None else {"seed": seed})
    for name, curve in (("exact", exact), ("topk-5", few)):
        for i, (validation, most) in enumerate(zip(curve, largest, strict=True)):
            errors = {"mean": most and most / 4, "max": most, "means": [most and most / 4]}
            at_time = {"iteration": 10 * i, "train": validation and validation / 2, "validation": validation}
            rows.append({"kind": "evaluation", **about, "method": name, **at_time, **errors})
        last = {"asked": 30, "iterations": 30, "stopped": False, "limit": 9.0, "parameters": 1000, "keys": 5.0, "rotary": False}
        text = {"corpus": "made up", "characters": 99, "prompt": "to", "sample": "be", "swapped": dict.fromkeys(PAIR, exact[-1])}
        shape = {"layers": 1, "heads": 1, "width": 8, "dropout": 0.0, "batch": 2, "seconds": 1.0, "graph_seconds": None}
        rows.append({"kind": "end", **about, "method": name, **last, **text, **shape})
    return rows


PAIR = ("exact", "topk-5")
PAPERS = (small_gap, widening, growing_error)


@pytest.mark.parametrize(
    ("exact", "few", "largest", "verdicts"),
    [
        ([9, 5, 4, 5], [9, 5.1, 4.1, 5.5], [2, 1, 1, 1.5], ("partly", "confirmed", "confirmed")),
        ([9, 5, 4, 5], [9, 5.1, 4.1, 4.6], [2, 1, 1, 1.5], ("partly", "partly", "untested")),
        ([9, 5, 4, 5], [9, 6.0, 5.0, 5.5], [2, 1, 1, 0.9], ("refuted", "refuted", "refuted")),
        ([9, 5, 4, 3], [9, 5.1, 4.1, 3.05], [2, 1, 1, 1.5], ("confirmed", "untested", "untested")),
        ([9, 5, 4, 5], [9, 5.1, 4.1, 5.1], [2, 1, 1, 1.5], ("confirmed", "untested", "untested")),
        ([9, 5, 4, 5], [9, 5.1, 4.1, None], [2, 1, 1, None], ("partly", "untested", "untested")),
        ([9, 5, 4, None], [9, 5.1, 4.1, 5.1], [2, 1, 1, 1.5], ("untested", "untested", "untested")),
    ],
)
def test_verdicts_follow_the_numbers(exact: list[Any], few: list[Any], largest: list[Any], verdicts: tuple[str, ...]) -> None:
    """Of one seed."""
    rows = rows_of(exact, few, largest)
    assert tuple(finding(rows).verdict for finding in PAPERS) == verdicts


def test_rows_without_a_seed_are_of_the_first() -> None:
    """As those that were saved when there was one: beside exact attention that is measured again, they are its pair."""
    numbers: Any = ([9, 5, 4, 5], [9, 5.1, 4.1, 5.5], [2, 1, 1, 1.5])
    named, old = rows_of(*numbers, 0), rows_of(*numbers)
    both = [new if new["method"] == "exact" else row for new, row in zip(named, old, strict=True)]
    assert tell(named) == tell(old) == tell(both)
    assert "one seed" in small_gap(both).evidence


def seeds_of(*last: tuple[float, float, float], best: float = 4.0) -> Rows:
    """Three numbers a seed: the last perplexity of exact attention, of kNN attention, and the last of its largest errors."""
    rows: Rows = []
    for seed, (exact, few, error) in enumerate(last):
        rows += rows_of([9, 5, 4, exact], [9, 5.1, best, few], [2, 1, 1, error], seed)
    return rows


@pytest.mark.parametrize(
    ("last", "verdicts"),
    [
        # Gaps of 20, 21 and 19% at the end, and errors that grow: clear, in every seed.
        (((5, 6.0, 1.5), (5, 6.05, 1.6), (5, 5.95, 1.4)), ("partly", "confirmed", "confirmed")),
        # 2, 20 and 8%: a mean of 10%, and a range of 18; errors grow by 10% and shrink by as much.
        (((5, 5.1, 1.1), (5, 6.0, 0.9), (5, 5.4, 1.0)), ("partly", "untested", "untested")),
        # Seeds differ in perplexity and agree about the gap.
        (((5, 6.0, 1.5), (6, 7.2, 1.5), (7, 8.4, 1.5)), ("partly", "confirmed", "confirmed")),
        # No gap at all, with every seed.
        (((5, 5.0, 0.8), (6, 6.0, 0.8), (7, 7.0, 0.8)), ("confirmed", "refuted", "refuted")),
        # In favour of kNN attention.
        (((5, 4.5, 0.8), (5, 4.4, 0.8), (5, 4.45, 0.8)), ("partly", "partly", "refuted")),
        # One seed does not overfit.
        (((5, 5.0, 0.8), (4.02, 4.02, 0.8), (5, 5.0, 0.8)), ("confirmed", "untested", "untested")),
    ],
)
def test_a_difference_counts_if_it_is_larger_than_what_seeds_make(last: Any, verdicts: tuple[str, ...]) -> None:
    rows = seeds_of(*last)
    findings = [finding(rows) for finding in PAPERS]
    assert tuple(finding.verdict for finding in findings) == verdicts
    for finding in findings:
        assert "This rests on a character-level GPT of 1,000 parameters, 30 steps, 3 seeds." in finding.evidence
        assert "one seed was run" not in finding.why.lower()
    assert "larger than the range over seeds, from the least to the largest." in tell(rows).here


def test_what_seeds_leave_open_is_not_refuted() -> None:
    """Gaps of 2, 20 and 8% at the end, and of 28% at the best."""
    rows = seeds_of((5, 5.1, 1.1), (5, 6.0, 0.9), (5, 5.4, 1.0), best=5.1)
    assert small_gap(rows).verdict == "untested"
    assert small_gap(rows).why == "The gap at the end is too close to 5% to say. Seeds make more than that."
    assert "Of these gaps count: none." in more_keys(rows, 64).evidence
    clear = seeds_of((5, 5.9, 1.1), (5, 6.0, 0.9), (5, 6.1, 1.0), best=5.1)
    assert small_gap(clear).verdict == "refuted"
    assert "Of these gaps count: top 5." in more_keys(clear, 64).evidence


def test_one_seed_confirms_nothing_by_a_hair() -> None:
    """A gap of 4%, where 5% is small: with one seed it is open, and with three that agree it is small."""
    alone, three = seeds_of((5, 5.2, 1.0), best=4.16), seeds_of(*[(5, 5.2, 1.0)] * 3, best=4.16)
    found = small_gap(alone)
    assert found.verdict == "untested"
    assert found.evidence.endswith("30 steps, one seed.")
    assert found.why == (
        "The gap at the end and of the best is too close to 5% to say. One seed was run, and less than 2% does not count."
    )
    assert small_gap(three).verdict == "confirmed"
    assert widening(alone).verdict == "untested"
    assert widening(three).verdict == "refuted"
    assert "One seed was run" in tell(alone).here
    assert "One seed." in tell(alone).captions["shakespeare"]


def test_a_seed_that_diverges_is_named() -> None:
    rows = seeds_of((5, 5.2, 1.0), (5, math.nan, 1.0), (5, 5.2, 1.0))
    found = small_gap(plain(rows))
    assert found.verdict == "partly"
    assert found.evidence.startswith("Training with kNN attention diverged with seed 1: at iteration 30")
    assert not found.why, "a gap that is not finite is large"
    assert widening(plain(rows)).verdict == "untested"


def test_tables_are_means_with_half_the_range() -> None:
    rows = seeds_of((5, 6.0, 1.5), (5, 6.2, 1.5), (5, 5.8, 1.5))
    found = table(rows, 64)
    assert "mean ± half the range from the least to the largest of 3 seeds" in found.title
    assert found.body[1][3] == "6 ± 0.2"
    assert found.body[0][3] == "5"
    assert table(rows_of([9, 5], [9, 6], [1, 1]), 64).body[1][3] == "6"
    assert "one seed" in table(rows_of([9, 5], [9, 6], [1, 1]), 64).title
    rows[-1]["seconds"] = 0.5
    assert table(rows, 64).body[1][8] == "0.5 s", "the least of all seeds"


def test_bands_reach_from_the_least_to_the_largest_seed() -> None:
    rows = seeds_of((5, 6.0, 1.5), (5, 6.3, 1.6), (5, 5.4, 1.4))
    figures = draw(rows)
    above, below = figures["shakespeare"].axes
    line = next(line for line in above.lines if line.get_color() == COLORS["topk-5"])
    assert list(line.get_xdata()) == [0, 10, 20, 30]
    assert line.get_ydata()[-1] == pytest.approx(5.9)
    for axis, low, high in ((above, 5.4, 6.3), (below, 8.0, 26.0)):
        ends = [y for x, y in axis.collections[-1].get_paths()[0].vertices if x == 30]
        assert (min(ends), max(ends)) == (pytest.approx(low), pytest.approx(high))
    labels = [text.get_text() for text in figures["shakespeare"].legends[0].get_texts()]
    assert labels[-1] == "mean, least and largest of 3 seeds"
    alone = draw(rows_of([9, 5, 4, 5], [9, 5.1, 4.1, 5.5], [2, 1, 1, 1.5]))
    for figure in alone.values():
        assert not any(axis.collections for axis in figure.axes)
        assert "seeds" not in figure.legends[0].get_texts()[-1].get_text()


@pytest.mark.parametrize(
    ("five", "root", "verdict"), [(0.9, 0.5, "confirmed"), (0.999, 0.5, "partly"), (0.999, 2.0, "refuted"), (2.0, 2.0, "refuted")]
)
def test_the_verdict_on_cost_is_about_top_k_and_has_a_margin(five: float, root: float, verdict: str) -> None:
    """Cells may be as fast as they like."""
    taken = {"exact": 1.0, "topk-5": five, "topk": root, "cells": 0.1}
    about = {"kind": "end", "context": 64, "asked": 30, "parameters": 1000}
    rows = [{**about, "method": name, "seed": 0, "seconds": x, "graph_seconds": None} for name, x in taken.items()]
    assert cost(rows).verdict == verdict
    assert "graph" not in cost(rows).evidence
    rows[0]["graph_seconds"] = 0.02
    assert "CUDA graph" in cost(rows).evidence
    assert "20 ms with exact at context 64" in cost(rows).evidence
    assert cost([rows[0], rows[-1]]).verdict == "untested"
    side_by_side = [{**row, "seed": 1, "seconds": None, "graph_seconds": None} for row in rows]
    assert cost(side_by_side).verdict == "untested"
    assert cost([*rows, *side_by_side]).verdict == verdict, "times of models trained alone are used"


def test_training_that_diverges_is_told_and_drawn(tmp_path: Path) -> None:
    sizes = replace(SMALL, context=64, iterations=4, interval=2, methods=("exact", "topk-5"))
    text = numbered(COUNTING, 64, "cpu")
    good = {name: measure(COUNTING, text, sizes, name, seed=0) for name in sizes.methods}
    lost = dict.fromkeys(("train", "validation", "mean", "max"), math.nan)
    for broken in (("topk-5",), ("exact",), ("exact", "topk-5")):
        rows: Rows = []
        for name, (first, *later, end) in good.items():
            bad = name in broken
            rows += [first, *({**row, **lost} if bad else row for row in later)]
            rows.append({**end, "swapped": dict.fromkeys(end["swapped"], math.inf)} if bad else end)
        saved = plain(rows)
        assert "not finite" in tell(saved).findings[0].evidence
        look.save(draw(saved), tmp_path)


def test_a_method_that_stopped_early_is_compared_where_it_stopped() -> None:
    """Its last evaluation lies between those of exact attention, and counts for neither."""
    rows = rows_of([9, 5, 4, 5], [9, 5, 8, 8], [1, 1, 1, 1])
    rows = [row for row in rows if row["method"] == "exact" or row.get("iteration", 0) < 20]
    rows.append({**rows[-2], "iteration": 17, "validation": 8.0})
    found = small_gap(rows)
    assert found.verdict == "confirmed"
    assert "after 10 iterations the validation perplexity is 5 against 5" in found.evidence


def test_the_section_names_the_text_and_shows_samples() -> None:
    runs = [
        replace(SMALL, iterations=4, interval=2, methods=("exact", "topk-5")),
        replace(SMALL, context=32, iterations=2, rotary=True),
    ]
    rows: Rows = []
    for sizes in (runs[0], replace(runs[1], methods=("exact", "cells"), interval=1)):
        text = numbered(COUNTING, sizes.context, "cpu")
        for name in sizes.methods:
            rows += measure(COUNTING, text, sizes, name, seed=0)
    section = tell(rows)
    assert "counting (4,000 characters" in section.here
    assert "learned positions, one seed) and 32 (batches of 4, 2 iterations, rotary positions, one seed)" in section.here
    samples = [line[1] for table in section.tables if table.head[-1] == "sample" for line in table.body]
    assert len(samples) == 4
    for sample in samples:
        assert entry(sample).count(sample.strip()) == 1


def test_cells_of_several_lines_are_shown_as_they_are() -> None:
    assert entry("`a` < b") == "<code>a</code> &lt; b"
    assert entry("`a`\n< b").endswith(">`a`\n&lt; b</pre>")


@pytest.mark.slow
def test_models_trained_side_by_side_are_those_trained_in_turn_but_for_times(tmp_path: Path) -> None:
    text = tmp_path / "counting.txt"
    text.write_text(COUNTING.text)
    settings = Settings(quick=True, out=tmp_path, text=text)
    todo = plan(settings)[:2]
    together = {
        unit.key: rows for unit, rows, _ in runner.side_by_side(EXPERIMENT, replace(settings, jobs=2), todo, lambda text: None)
    }
    assert together.keys() == {unit.key for unit in todo}
    for unit in todo:
        (*expected, last), (*found, end) = unit.measure({}), together[unit.key]
        assert last["seconds"] > 0
        assert end["seconds"] is None
        assert end["limit"] == 2 * last["limit"], "those beside it take their share"
        assert plain(found) == plain(expected)
        assert plain({**end, "seconds": 0, "limit": 0}) == plain({**last, "seconds": 0, "limit": 0})


def test_a_process_that_comes_too_late_leaves_its_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module, threads = import_module("experiments.shakespeare.plan"), torch.get_num_threads()
    monkeypatch.setattr(module, "load_corpus", lambda settings: COUNTING)
    late = Settings(quick=True, out=tmp_path, jobs=2, total_limit=100.0)
    first = plan(late)[0].key
    try:
        rows, _ = runner.alone(plan, replace(late, began=late.began - 101.0), first)
    finally:
        torch.set_num_threads(threads)
    assert [row["kind"] for row in rows] == ["left"]

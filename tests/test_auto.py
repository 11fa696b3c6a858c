"""Auto: SDPA where it is faster, cells beyond, and a tolerance that is honoured."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import inputs, seeded
from typer.testing import CliRunner

import nearfield as nf
from nearfield import crossover
from nearfield.app import calibrate
from nearfield.app.cli import app
from nearfield.app.deadline import Deadline
from nearfield.audit import audit_quantile, summary
from nearfield.problem import check
from nearfield.synthetic import make

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path))
    crossover.forget()
    yield tmp_path / "crossover.json"
    crossover.forget()


def test_short_inputs_get_sdpa_bit_for_bit() -> None:
    for length in (1, 2, 64, 300, 2100):
        q, k, v = inputs(1, 2, queries=length, dim=16)
        for causal in (False, True):
            expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            assert torch.equal(nf.attention(q, k, v, is_causal=causal), expected)
            assert nf.estimate(q, k, v, is_causal=causal).info["chosen"] == nf.Exact()


def no_long_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the long way")

    monkeypatch.setattr(sys.modules["nearfield.attention"], "check", refuse)


SHORT_CALLS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "all-rows": ({"queries": 60}, {}),
    "causal": ({"queries": 60}, {"is_causal": True}),
    "one-row": ({"queries": 1, "keys": 60}, {}),
    "more-rows": ({"queries": 70, "keys": 60}, {}),
    "scale": ({"queries": 60}, {"scale": 0.7}),
    "grouped": ({"heads": 4, "queries": 60}, {"enable_gqa": True, "is_causal": True}),
    "not-grouped": ({"queries": 60}, {"enable_gqa": True}),
}


@pytest.mark.parametrize("name", SHORT_CALLS)
def test_plain_short_calls_go_straight_to_sdpa(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, options = SHORT_CALLS[name]
    q, k, v = inputs(2, 2, dim=16, **{k: v for k, v in shape.items() if k != "heads"})
    q = q.repeat(1, shape.get("heads", 2) // 2, 1, 1)
    long_way = nf.attention(q, k, v, method=nf.Exact(), **options)
    no_long_way(monkeypatch)
    assert torch.equal(nf.attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))
    torch.testing.assert_close(nf.attention(q, k, v, **options), long_way)


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_a_scale_that_sdpa_cannot_do_goes_the_long_way(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 2, queries=60, dim=16)
    expected = nf.attention(q, k, v, is_causal=True, method=nf.Exact(), scale=scale)
    assert torch.equal(nf.attention(q, k, v, is_causal=True, scale=scale), expected)
    no_long_way(monkeypatch)
    with pytest.raises(AssertionError, match="the long way"):
        nf.attention(q, k, v, is_causal=True, scale=scale)


def test_few_rows_see_what_the_first_of_many_see() -> None:
    q, k, v = inputs(1, 2, queries=60, dim=16)
    few = nf.attention(q[:, :, :20], k, v, is_causal=True)
    torch.testing.assert_close(few, nf.attention(q, k, v, is_causal=True)[:, :, :20])


@pytest.mark.parametrize("causal", [1, 0, torch.tensor(True)])
def test_is_causal_may_be_anything_that_is_true_or_false(causal: Any) -> None:
    q, k, v = inputs(1, 2, queries=60, dim=16)
    expected = F.scaled_dot_product_attention(q[:, :, :20], k, v, is_causal=bool(causal))
    torch.testing.assert_close(nf.attention(q[:, :, :20], k, v, is_causal=causal), expected)


@pytest.mark.parametrize("keys", [1, 5, 15, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_nan_among_few_keys_is_not_lost(keys: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 2, queries=3, keys=keys, dim=16, dtype=dtype)
    q[:, 1, 1] = math.nan
    for causal in (False, True):
        found = nf.attention(q, k, v, is_causal=causal)
        assert bool(found[:, 1, 1].isnan().all())
        assert int(found.isnan().any(-1).sum()) == 1
    q[:, 1, 1] = 0
    k[:, 1, 0] = math.nan
    assert nf.attention(q, k, v, is_causal=True).isnan().any(-1).tolist() == [[[False] * 3, [True] * 3]]


def test_a_nan_that_few_rows_do_not_see_does_not_reach_them() -> None:
    q, k, v = inputs(1, 2, queries=60, dim=16)
    clean = nf.attention(q[:, :, :20], k, v, is_causal=True)
    v[:, :, 25] = math.nan
    torch.testing.assert_close(nf.attention(q[:, :, :20], k, v, is_causal=True), clean)


@pytest.mark.parametrize(
    "shapes", [((1, 4, 20, 8), (1, 2, 20, 8)), ((1, 3, 20, 8), (1, 2, 20, 8)), ((2, 2, 20, 8), (1, 2, 20, 8))]
)
def test_short_inputs_that_do_not_fit_are_told(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    query, key = (torch.randn(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"heads|batch"):
        nf.attention(query, key, key, enable_gqa=shapes[0][1] == 3)
    with pytest.raises(ValueError, match="last dimension"):
        nf.attention(key[..., :4], key, key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHORT_CALLS)
def test_plain_calls_on_a_card_go_straight_to_sdpa(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the crossover length, and a single row beyond it."""
    shape, options = SHORT_CALLS[name]
    times = 2000 if name == "one-row" else 100
    long = {k: times * v if v > 1 and k != "heads" else v for k, v in shape.items()}
    q, k, v = (x.cuda().bfloat16() for x in inputs(1, 2, dim=64, **{k: v for k, v in long.items() if k != "heads"}))
    q = q.repeat(1, long.get("heads", 2) // 2, 1, 1)
    no_long_way(monkeypatch)
    assert torch.equal(nf.attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options))
    with pytest.raises(AssertionError, match="the long way"), torch.autocast("cuda", torch.float16):
        nf.attention(q, k, v, **options)
    with pytest.raises(AssertionError, match="the long way"):
        nf.attention(q, k.cpu(), v, **options)


def test_long_inputs_get_cells() -> None:
    q, k, v = inputs(1, 1, queries=200, dim=8)
    est = nf.estimate(q, k, v, method=nf.Auto(crossover=100, check=False))
    assert est.info["chosen"] == nf.Cells()
    assert torch.equal(est.output, nf.attention(q, k, v, method=nf.Cells()))


@pytest.mark.parametrize("check", [False, True])
def test_its_cells_have_the_share_that_is_given(check: bool) -> None:
    q, k, v = make("clustered", 1, 1, 8192, 32, seed=3)
    est = nf.estimate(q, k, v, method=nf.Auto(crossover=512, share=32, check=check), generator=seeded(0))
    chosen = nf.Cells(share=32, probes=est.info["probes"] if check else None)
    assert est.info["chosen"] == chosen
    assert torch.equal(est.output, nf.attention(q, k, v, method=chosen))
    with pytest.raises(ValueError, match="share must be 1"):
        nf.Auto(share=3)


def test_few_queries_do_not_repay_cells() -> None:
    q, k, v = inputs(1, 1, queries=20, keys=200, dim=8)
    assert nf.estimate(q, k, v, method=nf.Auto(crossover=100)).info["chosen"] == nf.Exact()


def test_masks_and_monte_carlo_gradients_get_exact_attention() -> None:
    q, k, v = inputs(1, 1, queries=200, dim=8)
    mask = torch.rand(200, 200, generator=seeded(0)) < 0.5
    est = nf.estimate(q, k, v, mask, method=nf.Auto(crossover=100))
    assert est.info["chosen"] == nf.Exact()
    torch.testing.assert_close(est.output, F.scaled_dot_product_attention(q, k, v, mask))
    walk = nf.gradients.RandomWalk(walks=4)
    assert nf.estimate(q, k, v, method=nf.Auto(crossover=100), gradient=walk).info["chosen"] == nf.Exact()
    padding = torch.arange(200) < 150
    chosen = nf.estimate(q, k, v, padding, method=nf.Auto(crossover=100, check=False)).info["chosen"]
    assert isinstance(chosen, nf.Cells)


def test_a_later_nan_does_not_reach_earlier_rows_on_the_short_way() -> None:
    q, k, v = inputs(1, 2, queries=40, dim=16)
    clean = nf.attention(q, k, v, is_causal=True)
    for spoiled in (k, v):
        kept = spoiled[0, 1, 30].clone()
        spoiled[0, 1, 30] = math.nan
        out = nf.attention(q, k, v, is_causal=True)
        assert torch.equal(out[0, 0], clean[0, 0])
        torch.testing.assert_close(out[0, 1, :30], clean[0, 1, :30])
        assert bool(out[0, 1, 30:].isnan().all())
        spoiled[0, 1, 30] = kept


def test_inf_on_the_short_way_shows_and_does_not_reach_earlier_rows() -> None:
    for place in (1, 2):
        tensors = list(inputs(1, 1, queries=40, dim=16))
        clean = nf.attention(*tensors, is_causal=True)
        tensors[place][0, 0, 30] = math.inf
        assert not bool(nf.attention(*tensors).isfinite().any())
        causal = nf.attention(*tensors, is_causal=True)
        torch.testing.assert_close(causal[:, :, :30], clean[:, :, :30])
        assert not bool(causal[:, :, 30:].isfinite().any())


def test_nan_on_the_short_way_is_nan_in_every_row_that_sees_it() -> None:
    for place in (1, 2):
        tensors = list(inputs(1, 1, queries=40, dim=16))
        tensors[place][0, 0, 30, 3] = math.nan
        hit = nf.attention(*tensors).isnan()
        assert bool(hit.all() if place == 1 else hit[..., 3].all())


def test_eps_keeps_gradients_and_repeats_with_its_generator() -> None:
    q, k, v = (x.requires_grad_() for x in make("clustered", 1, 2, 1500, 16, seed=0))
    method = nf.Auto(eps=0.1, crossover=512)
    first = nf.attention(q, k, v, is_causal=True, method=method, generator=seeded(5))
    grads = torch.autograd.grad(first.sum(), (q, k, v))
    assert all(bool(x.isfinite().all()) and float(x.detach().abs().sum()) > 0 for x in grads)
    assert torch.equal(first, nf.attention(q, k, v, is_causal=True, method=method, generator=seeded(5)))


def test_a_non_finite_row_does_not_spoil_the_audit() -> None:
    q, k, v = make("clustered", 1, 1, 1024, 16, seed=0)
    q[0, 0, 7] = math.nan
    est = nf.estimate(q, k, v, method=nf.Auto(eps=0.1, crossover=256), generator=seeded(0))
    assert math.isfinite(est.info["audit"].additive)
    assert bool(est.output[0, 0, 7].isnan().all())
    assert bool(est.output[0, 0, 8:].isfinite().all())


@pytest.mark.parametrize("eps", [0, 1, -0.1, 1.5, "0.1", math.nan])
def test_bad_eps(eps: Any) -> None:
    with pytest.raises(ValueError, match="eps"):
        nf.Auto(eps=eps)


def test_bad_crossover() -> None:
    with pytest.raises(ValueError, match="crossover"):
        nf.Auto(crossover=0)


def test_several_looks_make_an_audit_claim_less() -> None:
    error, size, unit = torch.rand(3, 59, generator=seeded(0))
    once, four = (summary(error, size + 1, unit + 1, looks) for looks in (1, 4))
    assert once.quantile == audit_quantile(59, 0.95)
    assert four.quantile == audit_quantile(59, 1 - 0.05 / 4) < once.quantile
    assert once.confidence == four.confidence == 0.95


def test_shipped_lengths() -> None:
    for causal in (False, True):
        assert 4096 <= crossover.length(CPU, torch.float32, causal) <= 131_072
    assert crossover.length(CPU, torch.float64, False) == math.inf, "nobody has measured it"


def test_measured_lengths_are_kept_and_preferred(own_cache: Path) -> None:
    crossover.keep(CPU, torch.float32, {"forward": 5000.0, "training": 6000.0})
    assert crossover.length(CPU, torch.float32, False) == 6000, "one length with and without gradients"
    assert crossover.length(CPU, torch.float32, True) == math.inf, "a machine that has measured is not told by another"
    crossover.keep(CPU, torch.float64, {"forward": 70.0, "training": 70.0})
    assert json.loads(own_cache.read_text())["lengths"][crossover.place(CPU)].keys() == {"float32", "float64"}
    q, k, v = inputs(1, 1, queries=100, dim=8, dtype=torch.float64)
    assert isinstance(nf.estimate(q, k, v, method=nf.Auto(check=False)).info["chosen"], nf.Cells)


def test_the_choice_does_not_depend_on_recording_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, queries=100, dim=8, dtype=torch.float64))
    crossover.keep(CPU, torch.float64, {"forward": 200.0, "training": 50.0})
    with torch.no_grad():
        still = nf.attention(q, k, v)
    assert torch.equal(still, nf.attention(q, k, v))


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossover, "cache_file", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert crossover.length(CPU, torch.float32, False) < math.inf


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, which a test gives back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_measured_lengths_hold_for_the_number_of_threads(threads: Callable[[int], None], own_cache: Path) -> None:
    shipped = crossover.length(CPU, torch.float32, False)
    for count, measured in ((1, 5000.0), (2, 7000.0)):
        threads(count)
        assert crossover.length(CPU, torch.float32, False) == shipped, "measured with another number of threads"
        crossover.keep(CPU, torch.float32, {"forward": measured, "training": measured})
        assert crossover.length(CPU, torch.float32, False) == measured
    threads(1)
    assert crossover.length(CPU, torch.float32, False) == 5000
    threads(3)
    assert crossover.length(CPU, torch.float32, False) == shipped
    assert len(json.loads(own_cache.read_text())["lengths"]) == 2


def test_measured_lengths_hold_for_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = crossover.length(CPU, torch.float32, False)
    crossover.keep(CPU, torch.float32, {"forward": 5000.0, "training": 5000.0})
    monkeypatch.setattr(crossover, "processor", lambda: "another one")
    assert crossover.length(CPU, torch.float32, False) == shipped


def test_places_are_told_in_words(monkeypatch: pytest.MonkeyPatch, threads: Callable[[int], None]) -> None:
    assert crossover.processor()
    monkeypatch.setattr(crossover, "processor", lambda: "Abacus 3")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"card {device.index}")
    threads(1)
    assert crossover.place(CPU) == "cpu, Abacus 3, 1 thread"
    threads(2)
    assert crossover.place(CPU) == "cpu, Abacus 3, 2 threads"
    assert crossover.place(torch.device("cuda:1")) == "cuda, card 1", "the card does the work"


def test_shipped_lengths_are_for_any_cpu_and_one_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(crossover, "_shipped", lambda: {"a card": {"float16": {"forward": 90, "training": 80}}})
    assert crossover.length(torch.device("cuda"), torch.float16, False) == 90
    assert crossover.length(torch.device("cuda"), torch.bfloat16, False) == math.inf
    crossover.keep(torch.device("cuda"), torch.float16, {"forward": 70.0, "training": 60.0})
    assert crossover.length(torch.device("cuda"), torch.float16, False) == 70


BROKEN = {
    "empty": b"",
    "cut": b'{"lengths": {"cpu',
    "not text": b"\xff\xfe\x00",
    "a list": b"[]",
    "a number": b"5",
    "another table": b'{"sizes": {}}',
    "lengths in a list": b'{"lengths": []}',
    "no dtypes": b'{"lengths": {"HERE": 5}}',
    "no kinds": b'{"lengths": {"HERE": {"float32": 5}}}',
    "a word": b'{"lengths": {"HERE": {"float32": {"forward": "5000", "training": "5000"}}}}',
    "nothing": b'{"lengths": {"HERE": {"float32": {"forward": null}}}}',
    "not a number": b'{"lengths": {"HERE": {"float32": {"forward": NaN, "training": NaN}}}}',
    "negative": b'{"lengths": {"HERE": {"float32": {"forward": -1, "training": -1}}}}',
    "too large": b'{"lengths": {"HERE": {"float32": {"forward": 1' + b"0" * 400 + b"}}}}",
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.filterwarnings("error")
def test_a_broken_cache_is_ignored_and_named(case: str, own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    shipped = crossover.length(CPU, torch.float32, False)
    own_cache.write_bytes(BROKEN[case].replace(b"HERE", crossover.place(CPU).encode()))
    crossover.forget()
    for _ in range(2):
        assert crossover.length(CPU, torch.float32, False) == shipped
    (said,) = caplog.messages
    assert str(own_cache) in said
    assert "calibrate" in said
    q, k, v = inputs(1, 1, queries=100, dim=8)
    assert torch.equal(nf.attention(q, k, v, method=nf.Auto()), F.scaled_dot_product_attention(q, k, v))
    crossover.keep(CPU, torch.float32, {"forward": 5000.0, "training": 5000.0})
    assert crossover.length(CPU, torch.float32, False) == 5000, "a new measurement mends it"


def test_a_cache_that_names_no_threads_is_not_used(own_cache: Path) -> None:
    """What earlier versions wrote, filed under the device alone, is left in peace."""
    shipped = crossover.length(CPU, torch.float32, False)
    older = {"cpu": {"float32": {"forward": 70.0, "training": 70.0}}}
    own_cache.write_text(json.dumps({"lengths": older}))
    crossover.forget()
    assert crossover.length(CPU, torch.float32, False) == shipped
    crossover.keep(CPU, torch.float32, {"forward": 5000.0, "training": 5000.0})
    assert crossover.length(CPU, torch.float32, False) == 5000
    assert json.loads(own_cache.read_text())["lengths"]["cpu"] == older["cpu"]


def test_a_folder_in_place_of_the_cache_is_no_error(own_cache: Path) -> None:
    own_cache.mkdir()
    assert crossover.length(CPU, torch.float32, False) < math.inf


def test_an_interrupted_calibration_leaves_the_old_file(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crossover.keep(CPU, torch.float32, {"forward": 5000.0})

    def half(path: Path, content: bytes) -> int:
        with path.open("wb") as file:
            file.write(content[:5])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        crossover.keep(CPU, torch.float32, {"forward": 1.0})
    assert json.loads(own_cache.read_text())["lengths"][crossover.place(CPU)]["float32"] == {"forward": 5000.0}


def test_calibrate_finds_the_first_length_at_which_cells_win(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def seconds(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
        seen.append((kind, length))
        return (length / 16384 if kind == "forward" else 0.01), 1.0

    monkeypatch.setattr(calibrate, "_seconds", seconds)
    result = CliRunner().invoke(app, ["bench", "--calibrate", "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    kept = json.loads(own_cache.read_text())["lengths"][crossover.place(CPU)]["float32"]
    assert kept["forward"] == 32768
    assert all(kept[kind] == math.inf for kind in crossover.KINDS[1:]), "cells never won there"
    assert ("forward", 65536) not in seen


@pytest.mark.parametrize(
    ("asked", "measured"),
    [
        ((), ("float32", "bfloat16")),
        (("float16",), ("float16",)),
        (("float64", "float32", "float64"), ("float64", "float32")),
    ],
)
def test_calibrate_measures_what_it_is_asked_for(
    asked: tuple[str, ...], measured: tuple[str, ...], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def seconds(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
        seen.append(dtype)
        return 2.0, 1.0

    monkeypatch.setattr(calibrate, "_seconds", seconds)
    result = CliRunner().invoke(app, ["bench", "--calibrate", *(x for name in asked for x in ("--dtype", name))])
    assert result.exit_code == 0, result.output
    assert seen == [getattr(torch, name) for name in measured for _ in crossover.KINDS]
    kept = json.loads(own_cache.read_text())["lengths"][crossover.place(CPU)]
    assert kept.keys() == {*measured}
    for name in measured:
        assert f"{crossover.place(CPU)}, {name}" in result.output
        assert crossover.length(CPU, getattr(torch, name), True) == calibrate.LENGTHS[0]


@pytest.mark.parametrize("begin", calibrate.LENGTHS)
@pytest.mark.parametrize("crossing", [*calibrate.LENGTHS, math.inf])
def test_a_length_is_found_from_wherever_the_search_begins(begin: int, crossing: float) -> None:
    """Up or down, and no length twice. What was seen when time was up is not contradicted."""
    search, seen = calibrate.Search(begin), []
    while (length := search.next()) is not None:
        assert length not in seen
        seen.append(length)
        search.faster[length] = length >= crossing
        assert search.first(begin) == min((x for x in seen if x >= crossing), default=math.inf)
    assert search.first(math.inf) == crossing
    assert len(seen) <= 1 + abs(calibrate.LENGTHS.index(begin) - [*calibrate.LENGTHS, math.inf].index(crossing)) + 1


def test_the_search_begins_where_something_is_known() -> None:
    card = torch.device("cuda", 0)
    assert calibrate.Search.on(card, 65536).begin == 65536
    assert calibrate.Search.on(card, math.inf).begin == calibrate.Search.on(card, 5000.0).begin == calibrate.FIRST
    assert calibrate.Search.on(CPU, 65536).begin == calibrate.LENGTHS[0]


class Clock:
    """Seconds pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_dtypes_that_are_alike_are_measured_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def took(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
        seen.append(dtype)
        return 2.0, 1.0

    monkeypatch.setattr(calibrate, "_seconds", took)
    found = calibrate.calibrate(CPU, torch.bfloat16, alike=[torch.float16])
    assert set(seen) == {torch.bfloat16}
    assert crossover.known(CPU, torch.float16) == crossover.known(CPU, torch.bfloat16) == found


@pytest.mark.parametrize("seconds", [0.0, 100.0, 1e6])
def test_lengths_are_measured_in_time_and_others_stay(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact attention takes four times as long at each length, and never loses but in the first kind."""
    clock, seen = Clock(), []
    deadline = Deadline.after(seconds, clock)

    def took(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
        seen.append((kind, length))
        exact = (length / 4096) ** 2 / 10
        cells = exact / 10 if kind == "forward" else exact
        clock.now += (rounds + 1) * (exact + cells)
        return exact, cells

    monkeypatch.setattr(calibrate, "_seconds", took)
    crossover.keep(CPU, torch.float64, {"forward": 70.0, "training": 2e6, "training, causal": 90.0})
    found = calibrate.calibrate(CPU, torch.float64, deadline=deadline)
    assert clock.now <= seconds
    if not seconds:
        assert not seen
        assert found == {"forward": 70, "forward, causal": math.inf, "training": 2e6, "training, causal": 90}
    elif seconds == 100.0:
        assert found["forward"] == calibrate.LENGTHS[0]
        assert found["training"] == 2e6
        assert found["training, causal"] == math.inf, "they were slower there"
        assert {length for kind, length in seen if kind == "forward, causal"} == set(calibrate.LENGTHS[:3])
    else:
        assert list(found.values()) == [calibrate.LENGTHS[0], *[math.inf] * 3]
    assert crossover.known(CPU, torch.float64) == found


def test_what_is_not_compiled_in_time_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, seen = [], []

    def prepare(length: int, kind: str, deadline: Deadline) -> bool:
        asked.append((kind, length))
        assert deadline.left > 0
        return kind == "training"

    def took(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
        seen.append(kind)
        return 2.0, 1.0

    monkeypatch.setattr(calibrate, "_seconds", took)
    found = calibrate.calibrate(CPU, torch.float64, deadline=Deadline.after(1e6), prepare=prepare)
    assert asked == [(kind, calibrate.LENGTHS[0]) for kind in crossover.KINDS]
    assert seen == ["training"]
    assert {kind: length for kind, length in found.items() if length < math.inf} == {"training": calibrate.LENGTHS[0]}


def test_calls_go_by_new_lengths_at_once() -> None:
    """What remembers how a call was made forgets it."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("needs Triton's interpreter")
    q, k, v = inputs(1, 1, queries=40, dim=16)
    exact = F.scaled_dot_product_attention(q, k, v)
    for length, is_exact in ((10.0, False), (1e6, True), (10.0, False)):
        crossover.keep(CPU, torch.float32, {"forward": length, "training": length})
        for _ in range(2):
            found = nf.attention(q, k, v, method=nf.Auto(check=False), backend="triton")
            assert torch.equal(found, exact) == is_exact


def test_inputs_are_made_once_and_record_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(calibrate, "make", lambda *x: made.append(x) or make(*x))
    monkeypatch.setattr(calibrate, "LENGTHS", (64, 128))
    calibrate._inputs.cache_clear()
    calibrate.calibrate(CPU, torch.float32, rounds=1)
    assert [x[3] for x in made] in ([64], [64, 128])
    assert calibrate._inputs.cache_info().currsize == 0, "they take memory"


def test_a_card_is_measured_in_both_halves() -> None:
    assert calibrate.usual_dtypes(torch.device("cuda")) == (torch.float32, torch.bfloat16, torch.float16)


def test_bench_refuses_a_device_that_is_not_there() -> None:
    result = CliRunner().invoke(app, ["bench", "--device", "warp"])
    assert result.exit_code == 2
    assert "warp" in result.output


def test_bench_refuses_a_dtype_that_it_does_not_know() -> None:
    result = CliRunner().invoke(app, ["bench", "--dtype", "float32", "--dtype", "int8"])
    assert result.exit_code == 2
    assert "int8" in result.output
    assert "bfloat16" in result.output


def test_auto_is_a_value() -> None:
    assert nf.Auto(eps=0.1) == nf.Auto(eps=0.1)
    assert replace(nf.Auto(), eps=0.2).eps == 0.2


@pytest.mark.parametrize(("dtype", "options"), [(torch.float64, {}), (torch.float32, {"dropout_p": 0.1})])
def test_being_asked_whether_cells_wait_refuses_nothing(
    dtype: torch.dtype, options: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short inputs get exact attention, whatever the Triton kernels would say of them."""
    from nearfield.kernels import backends

    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    query, key, value = torch.randn(3, 1, 1, 40, 8, dtype=dtype).unbind(0)
    problem = check(query, key, value, dropout_p=options.get("dropout_p", 0.0))
    assert not nf.Auto().is_async(problem, "triton")
    assert nf.attention(query, key, value, backend="triton", **options).shape == query.shape
    with pytest.raises(ValueError, match="the Triton kernels do not serve"):
        nf.attention(query, key, value, backend="triton", method=nf.Cells(), **options)

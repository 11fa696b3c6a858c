"""The pilot: what nobody configured is never far from SDPA; budgets, units, heads, plans, and what is said about it."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield import auto, crossover, pilot
from nearfield.cells.sizes import CellSizes
from nearfield.problem import check
from nearfield.synthetic import FAMILIES, make


def off(output: Tensor, exact: Tensor) -> float:
    """The pooled relative error."""
    return float((output.detach().double() - exact.detach().double()).norm() / exact.detach().double().norm())


@pytest.mark.long
@pytest.mark.parametrize("name", ["randn", "sharp"])
def test_a_call_that_nobody_configured_is_close_to_sdpa(name: str) -> None:
    q, k, v = torch.randn(3, 1, 1, 16384, 64, generator=seeded(0)) if name == "randn" else make("sharp", 1, 1, 16384, 64)
    exact = F.scaled_dot_product_attention(q, k, v)
    assert off(nf.attention(q, k, v, method=nf.Cells()), exact) > 0.4, "cells alone are not"
    assert off(nf.attention(q, k, v), exact) <= 0.1


@pytest.mark.long
def test_the_default_keeps_cells_where_they_are_good() -> None:
    q, k, v = make("clustered", 1, 1, 32768, 32)
    est = nf.estimate(q, k, v)
    assert isinstance(est.info["chosen"], nf.Cells)
    assert 0 < off(est.output, F.scaled_dot_product_attention(q, k, v)) <= 0.1
    assert torch.equal(nf.attention(q, k, v), est.output), "nothing is drawn from torch's generator"


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("unit", ["values", "output"])
@pytest.mark.parametrize("family", FAMILIES)
def test_eps_is_honoured(family: str, unit: str, causal: bool) -> None:
    q, k, v = make(family, 1, 2, 2048, 32, seed=3)
    method = nf.Auto(eps=0.05, crossover=128, unit=unit)
    est = nf.estimate(q, k, v, is_causal=causal, method=method, generator=seeded(1))
    exact = nf.attention(q, k, v, is_causal=causal, method=nf.Exact())
    error = (est.output - exact).norm(dim=-1)
    if unit == "values":
        norm = v.square().sum(-1).mean(-1).sqrt()[..., None]
        assert float((error / norm <= 0.05).double().mean()) >= 0.95
    else:
        assert off(est.output, exact) <= 0.05
    audit: nf.Audit | None = est.info["audit"]
    if audit is None:
        assert est.info["chosen"] == nf.Exact()
        torch.testing.assert_close(est.output, exact)
        assert all(step["error"] > 0.05 for step in est.info["steps"])
    else:
        assert (audit.additive if unit == "values" else audit.pooled_bound) <= 0.05
        assert (audit.rows, audit.confidence) == (pilot.ROWS, 0.95)
        assert audit.quantile >= 0.95
        assert est.audit is audit


def test_units_differ() -> None:
    """Flat attention averages values away: an error that is small beside a value is large beside the output."""
    q, k, v = make("gaussian", 1, 1, 2048, 32)
    chosen = {unit: nf.estimate(q, k, v, method=nf.Auto(0.1, 128, unit=unit)).info["chosen"] for unit in pilot.UNITS}
    assert chosen["output"] == nf.Exact()
    assert isinstance(chosen["values"], nf.Cells)


@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_call_with_the_budget_it_chose(causal: bool) -> None:
    """Bit for bit, output and gradients; and the smallest budget that passes is chosen."""
    leaves = [x.requires_grad_() for x in make("local", 1, 2, 2048, 32, seed=0)]
    method = nf.Auto(eps=0.1, crossover=64)
    est = nf.estimate(*leaves, is_causal=causal, method=method)
    steps = est.info["steps"]
    first = next(i for i, step in enumerate(steps) if step["error"] <= 0.1)
    assert repr(est.info["chosen"]) == steps[first]["method"]
    cells = nf.Cells(probes=est.info["probes"])
    plain = nf.attention(*leaves, is_causal=causal, method=cells)
    assert torch.equal(est.output, plain)
    ours = torch.autograd.grad(est.output.square().sum(), leaves)
    theirs = torch.autograd.grad(plain.square().sum(), leaves)
    assert all(map(torch.equal, ours, theirs))


def test_steps_tell_what_each_budget_does() -> None:
    """The errors of a pilot are those that an audit of the whole call finds on the same rows, up to rounding."""
    q, k, v = make("gaussian", 1, 2, 2048, 32, seed=0)
    est = nf.estimate(q, k, v, method=nf.Auto(eps=0.01, crossover=64))
    exact = nf.attention(q, k, v, method=nf.Exact())
    problem = check(q, k, v)
    rows = pilot.draw_rows(problem, seeded(pilot.fingerprint(problem)), per_head=False)[0]
    sizes = nf.Cells().sizes(problem)
    budgets = pilot.faster_budgets(sizes, 2048, 64, on_gpu=False)
    assert len(budgets) == len(est.info["steps"]) >= 2
    for budget, step in zip(budgets, est.info["steps"], strict=True):
        output = nf.attention(q, k, v, method=nf.Cells(probes=budget))
        found = off(output.reshape(-1, 32)[rows], exact.reshape(-1, 32)[rows])
        assert step["pooled"] == pytest.approx(found, rel=1e-3, abs=1e-6)


def test_causal_rows_do_not_depend_on_later_keys_given_the_budget() -> None:
    q, k, v = make("clustered", 1, 1, 2048, 32, seed=0)
    method = nf.Auto(eps=0.5, crossover=64)
    first = nf.estimate(q, k, v, is_causal=True, method=method)
    k[:, :, 1500:] += 1.0
    second = nf.estimate(q, k, v, is_causal=True, method=method)
    assert first.info["probes"] == second.info["probes"]
    assert torch.equal(first.output[:, :, :1500], second.output[:, :, :1500])
    assert not torch.equal(first.output, second.output)


def test_grouped_queries_padding_and_dropout() -> None:
    q, k, v = make("clustered", 2, 4, 1024, 16, seed=0, kv_heads=2)
    padding = torch.arange(1024) < torch.tensor([1000, 700])[:, None, None, None]
    method = nf.Auto(crossover=128)
    est = nf.estimate(q, k, v, padding, enable_gqa=True, method=method)
    exact = nf.attention(q, k, v, padding, enable_gqa=True, method=nf.Exact())
    assert isinstance(est.info["chosen"], nf.Cells)
    assert off(est.output, exact) <= 0.1
    dropped = nf.attention(q, k, v, padding, 0.3, enable_gqa=True, method=method, generator=seeded(0))
    again = nf.attention(q, k, v, padding, 0.3, enable_gqa=True, method=nf.Cells(probes=est.info["probes"]), generator=seeded(0))
    assert torch.equal(dropped, again)


@pytest.mark.parametrize("causal", [False, True])
def test_a_pilot_knows_caps_sinks_and_offsets(causal: bool) -> None:
    """What it looks at is what runs: the call with the budget that it chose, and errors as an audit finds them."""
    q, k, v = make("local", 1, 2, 1024, 16, seed=0)
    leaves = [x.requires_grad_() for x in (q[:, :, 100:].clone() if causal else q, k, v, torch.tensor([-1.0, 3.0]))]
    query, key, value, sink = leaves
    more: dict[str, Any] = {"is_causal": causal, "offset": 100 if causal else None, "softcap": 4.0, "s_aux": sink + 5.0}
    est = nf.estimate(query, key, value, **more, method=nf.Auto(eps=0.5, crossover=64))
    probes = est.info["probes"]
    plain = nf.estimate(query, key, value, **more, method=nf.Cells(probes=probes))
    torch.testing.assert_close(est.output, plain.output)
    torch.testing.assert_close(est.lse, plain.lse)
    exact = nf.attention(query, key, value, **more, method=nf.Exact())
    problem = check(query, key, value, is_causal=causal, offset=more["offset"])
    rows = pilot.draw_rows(problem, seeded(pilot.fingerprint(problem)), per_head=False)[0]
    step = next(x for x in est.info["steps"] if x["method"] == repr(est.info["chosen"]))
    found = off(plain.output.reshape(-1, 16)[rows], exact.reshape(-1, 16)[rows])
    assert step["pooled"] == pytest.approx(found, rel=1e-3)
    grads = [torch.autograd.grad(x.output.square().sum(), leaves) for x in (est, plain)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    plan = nf.plan(query, key, value, **more, eps=0.5, crossover=64)
    torch.testing.assert_close(nf.attention(query, key, value, **more, method=plan), est.output)


@pytest.mark.parametrize("group", [1, 2])
def test_per_head_gives_exact_attention_to_the_heads_that_need_it(group: int) -> None:
    good, bad = (
        make("clustered", 2, 2 * group, 2048, 32, seed=0, kv_heads=2),
        make("sharp", 2, group, 2048, 32, seed=0, kv_heads=1),
    )
    # The head that is sharp comes first, so that heads have to be put back in their order.
    q, k, v = (torch.cat([b, g], 1).requires_grad_() for g, b in zip(good, bad, strict=True))
    est = nf.estimate(q, k, v, enable_gqa=True, method=nf.Auto(crossover=128, per_head=True))
    exact = nf.attention(q, k, v, enable_gqa=True, method=nf.Exact())
    assert est.info["exact_heads"] == [*range(group)]
    assert est.info["chosen"] != nf.Exact()
    torch.testing.assert_close(est.output[:, :group], exact[:, :group])
    assert all(0 < off(est.output[:, head], exact[:, head]) <= 0.1 for head in range(group, 3 * group))
    assert all(bool(x.any()) for x in torch.autograd.grad(est.output.square().sum(), (q, k, v)))
    torch.testing.assert_close(est.lse[:, :group], nf.estimate(q, k, v, enable_gqa=True, method=nf.Exact()).lse[:, :group])
    whole = nf.estimate(q, k, v, enable_gqa=True, method=nf.Auto(eps=0.02, crossover=128))
    assert whole.info["chosen"] == nf.Exact(), "heads together do not pass"


def test_rows_are_drawn_over_all_heads_and_positions() -> None:
    problem = check(*torch.zeros(3, 2, 3, 50, 4).unbind(0))
    rows = pilot.draw_rows(problem, seeded(0), per_head=False)
    assert rows.shape == (1, pilot.ROWS)
    assert int(rows.max()) < 300
    assert len((rows // 50).unique()) == 6
    each = pilot.draw_rows(problem, seeded(0), per_head=True)
    assert each.shape == (3, pilot.ROWS)
    assert torch.equal(each // 50 % 3, torch.arange(3)[:, None].expand_as(each))
    assert all(set((run // 150).tolist()) == {0, 1} for run in each)
    assert len((each % 50).unique()) > 45


def test_budgets_that_are_tried() -> None:
    sizes = CellSizes(group=1, segment=0, window=0, sinks=16, cell_size=32, probes=19, samples=0)
    assert pilot.faster_budgets(sizes, 16384, 16384, False) == [9, 19]
    assert pilot.faster_budgets(sizes, 16384, 4 * 16384, False) == []
    many = pilot.faster_budgets(sizes, 16384, 1024, False)
    assert many == [9, 19, 38, 76, 152]
    assert all(budget * 32 <= pilot.MOST_NEAR * 16384 for budget in many)
    assert len(pilot.faster_budgets(sizes._replace(cell_size=1), 10**9, 64, False)) == pilot.MOST_BUDGETS
    assert pilot.expected_time(sizes, 16384, 16384, False) == pytest.approx(pilot.AT_CROSSOVER, rel=0.02)


def test_enough_rows_for_all_budgets() -> None:
    """What is left out of the pooled error is at most 5% of the rows, whichever budget passes."""
    miss = 0.05 / pilot.MOST_BUDGETS / 2
    assert miss ** (1 / pilot.ROWS) >= 0.95


def test_a_pilot_shares_its_confidence_among_budgets() -> None:
    """Each of several budgets, and of several heads, may be the one that passes by chance."""
    q, k, v = make("clustered", 1, 2, 2048, 32, seed=0)
    found = [nf.estimate(q, k, v, method=nf.Auto(0.9, 128, per_head=each)) for each in (False, True)]
    for est, runs in zip(found, (1, 2), strict=True):
        looks = runs * len(est.info["steps"])
        assert looks > 1
        assert est.info["audit"].quantile == pytest.approx((0.05 / looks) ** (1 / pilot.ROWS))


def test_a_pilot_draws_nothing_from_torch() -> None:
    q, k, v = make("local", 1, 1, 1024, 16, seed=0)
    method = nf.Auto(crossover=128)
    state = torch.get_rng_state()
    first = nf.attention(q, k, v, method=method)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(5)
    assert torch.equal(nf.attention(q, k, v, method=method), first)
    rows = [nf.estimate(q, k, v, method=method, generator=seeded(seed)).info["steps"][0]["pooled"] for seed in (0, 0, 1)]
    assert rows[0] == rows[1] != rows[2]


@pytest.mark.parametrize("causal", [False, True])
def test_a_plan_has_all_sizes(causal: bool) -> None:
    q, k, v = make("clustered", 1, 1, 2048, 32, seed=0)
    plan = nf.plan(q, k, v, is_causal=causal, crossover=128, eps=0.5)
    assert isinstance(plan, nf.Cells)
    sizes = (plan.cell_size, plan.probes, plan.share, plan.segment if causal else 1)
    assert all(isinstance(size, int) for size in sizes)
    # It goes on meaning the same for other lengths.
    shorter = check(q[:, :, :1500], k[:, :, :1500], v[:, :, :1500], is_causal=causal)
    assert plan.sizes(shorter).cell_size == plan.cell_size
    assert plan.sizes(shorter).probes == plan.probes


def test_where_nothing_can_be_looked_at_it_is_exact_attention() -> None:
    q, k, v = make("clustered", 1, 2, 1024, 16, seed=0)
    method = nf.Auto(crossover=128)
    exact = F.scaled_dot_product_attention(q, k, v)
    eager = nf.attention(q, k, v, method=method)
    assert not torch.equal(eager, exact)
    compiled = torch.compile(nf.attention, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, method=method), exact, atol=1e-6, rtol=1e-5)
    mapped = torch.func.vmap(lambda *x: nf.attention(*x, method=method))(q[None], k[None], v[None])
    torch.testing.assert_close(mapped[0], exact, atol=1e-6, rtol=1e-5)
    # A plan that was made before is what ran.
    plan = nf.plan(q, k, v, crossover=128)
    assert isinstance(plan, nf.Cells)
    assert torch.equal(nf.attention(q, k, v, method=plan), eager)
    torch.testing.assert_close(compiled(q, k, v, method=plan), eager)
    assert nf.plan(*make("gaussian", 1, 2, 1024, 64), crossover=128) == nf.Exact()
    assert nf.plan(q[:, :, :40], k[:, :, :40], v[:, :, :40]) == nf.Exact()
    with pytest.raises(RuntimeError, match="call it before"):
        torch.func.vmap(lambda *x: nf.plan(*x))(q, k, v)


def test_the_first_fallback_of_a_kind_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(auto, "_TOLD", set())
    monkeypatch.setattr(auto, "LONG", 500)
    q, k, v = make("gaussian", 1, 1, 600, 64)
    with caplog.at_level(logging.WARNING, "nearfield"):
        for _ in range(2):
            nf.attention(q, k, v, method=nf.Auto(crossover=128))
        (said,) = caplog.messages
        assert "exact attention ran for 600 keys" in said
        assert "nearfield.explain" in said
        caplog.clear()
        long = [x.double() for x in make("gaussian", 1, 1, 2100, 64)]  # up to 2,048 keys nobody need measure anything
        for _ in range(2):
            nf.attention(*long, method=nf.Auto())
        (said,) = caplog.messages
        assert "`nearfield bench --calibrate`" in said
        assert "float64" in said
        caplog.clear()
        nf.attention(q, k, v)
        torch.func.vmap(lambda *x: nf.attention(*x, method=nf.Auto(crossover=128)))(q[None], k[None], v[None])
        (said,) = caplog.messages
        assert "nearfield.plan" in said


def test_explain() -> None:
    q, k, v = make("clustered", 1, 2, 1024, 16, seed=0)
    told = nf.explain(q, k, v, method=nf.Auto(crossover=128))
    assert isinstance(told.method, nf.Cells)
    assert told.method == nf.estimate(q, k, v, method=nf.Auto(crossover=128)).info["chosen"]
    assert told.data["audit"].pooled_bound <= 0.1 == told.data["eps"]
    assert 0 < told.data["time_ratio"] < 1
    assert told.data["seconds_exact"] > 0
    assert [line.split()[0] for line in str(told).splitlines()] == [*told.rows]
    refused = nf.explain(*make("gaussian", 1, 2, 1024, 64), method=nf.Auto(crossover=128))
    assert refused.method == nf.Exact()
    assert "no budget" in refused.rows["why"]
    assert nf.explain(q, k, v, method=nf.Auto(crossover=128, check=False)).method == nf.Cells()
    assert "mask" in nf.explain(q, k, v, torch.rand(1024, 1024) < 0.5).rows["why"]
    with pytest.raises(TypeError, match="method must be a nearfield"):
        nf.explain(q, k, v, method=nf.Cells())  # type: ignore[arg-type]


def test_explain_names_the_one_reason() -> None:
    q, k, v = torch.randn(3, 1, 2, 300, 16).unbind(0)
    assert (
        nf.explain(q, k, v, method=nf.Auto(crossover=200)).rows["why"].startswith("below 400 keys exact attention is faster than")
    )
    alone = nf.explain(q, k, v, method=nf.Auto(crossover=400, check=False))
    assert alone.rows["why"] == "below 400 keys exact attention is faster"
    few = nf.explain(q[:, :, :25], k, v, method=nf.Auto(crossover=101, check=False))
    assert few.rows["why"] == "25 queries are too few to repay grouping the keys; it takes 26"


def test_explain_where_cells_were_never_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.crossover.known", lambda device, dtype: dict.fromkeys(crossover.KINDS, math.inf))
    assert nf.explain_sizes(32768, 2, 16).rows["why"] == "cells were not faster here at any length that was measured"


def test_explain_sizes() -> None:
    assert nf.explain_sizes(300, 2, 16).method == nf.Exact()
    long = nf.explain_sizes(32768, 2, 16)
    assert long.method is None
    assert long.data["budgets"]
    assert nf.explain_sizes(32768, 2, 16, dtype=torch.float64).data["crossover"] == math.inf
    with pytest.raises(ValueError, match="heads must be a positive integer, got 0"):
        nf.explain_sizes(300, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "rows"}, "unit must be"),
        ({"check": False, "eps": 0.1}, "check=False promises no error"),
        ({"check": False, "per_head": True}, "check=False promises no error"),
        ({"per_head": 1}, "per_head must be True or False"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        nf.Auto(**arguments)


def test_explain_where_nobody_has_measured_and_where_there_is_nothing() -> None:
    told = nf.explain(*torch.randn(3, 1, 2, 300, 16, dtype=torch.float64).unbind(0))
    assert told.method == nf.Exact()
    assert told.data["crossover"] == math.inf
    assert "nobody has measured" in told.rows["why"]
    q, k, v = torch.randn(3, 1, 2, 30, 16).unbind(0)
    nothing = nf.explain(q, k[:, :, :0], v[:, :, :0])
    assert nothing.method == nf.Exact()
    assert nothing.rows["why"] == "there are no queries or no keys"
    assert nf.explain(q, k, v, method=nf.Auto(crossover=8)).method == nf.Exact()
    with pytest.raises(ValueError, match="dtype must be one of"):
        nf.explain_sizes(300, dtype=torch.int32)


def test_with_dropout_the_pilot_groups_keys_for_the_call_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, rows open cells together without dropout and one by one with it."""
    sizes = nf.Cells.sizes

    def by_dropout(self: nf.Cells, problem: nf.Problem) -> CellSizes:
        found = sizes(self, problem)
        return found if problem.dropout_p or self.probes else found._replace(share=64)

    monkeypatch.setattr(nf.Cells, "sizes", by_dropout)
    q, k, v = make("clustered", 1, 1, 1024, 16)
    method = nf.Auto(eps=0.5, crossover=64)
    assert isinstance(nf.estimate(q, k, v, method=method).info["chosen"], nf.Cells)
    est = nf.estimate(q, k, v, dropout_p=0.1, method=method, generator=seeded(0))
    again = nf.attention(q, k, v, dropout_p=0.1, method=nf.Cells(probes=est.info["probes"]), generator=seeded(0))
    assert torch.equal(est.output, again)


def test_budgets_that_the_engine_has_no_room_for_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = make("gaussian", 1, 1, 2048, 16)
    method = nf.Auto(eps=0.01, crossover=64)
    probes = [
        int(re.findall(r"probes=(\d+)", x["method"].replace("None", "0"))[0])
        for x in nf.estimate(q, k, v, method=method).info["steps"]
    ]
    most = max(probes)
    engine = nf.Cells.engine
    monkeypatch.setattr(nf.Cells, "engine", lambda self, *rest: "other" if self.probes == most else engine(self, *rest))
    fewer = nf.estimate(q, k, v, method=method).info["steps"]
    assert len(fewer) == len(probes) - 1
    assert f"probes={most}" not in "".join(x["method"] for x in fewer)


def test_heads_that_hide_other_keys() -> None:
    """The head that sees most keys gets exact attention; the others go on with the cells that were made."""
    good, bad = make("clustered", 1, 1, 1024, 16), make("gaussian", 1, 1, 1024, 16)
    q, k, v = (torch.cat(pair, 1) for pair in zip(good, bad, strict=True))
    mask = torch.ones(1, 2, 1, 1024, dtype=torch.bool)
    mask[:, 0, :, 900:] = False
    est = nf.estimate(q, k, v, mask, method=nf.Auto(eps=0.05, crossover=64, per_head=True))
    exact = F.scaled_dot_product_attention(q, k, v, mask)
    assert est.info["exact_heads"] == [1]
    torch.testing.assert_close(est.output[:, 1], exact[:, 1])
    assert 0 < off(est.output[:, 0], exact[:, 0]) <= 0.05


def test_each_head_keeps_its_share_however_many_there_are() -> None:
    problem = check(*torch.zeros(3, 1, 64, 50, 4).unbind(0))
    rows = pilot.draw_rows(problem, seeded(0), per_head=True, budgets=6).shape[1]
    assert (0.05 / (64 * 6) / 2) ** (1 / rows) >= 0.95
    assert pilot.draw_rows(problem, seeded(0), per_head=False, budgets=6).shape[1] == pilot.ROWS
    q, k, v = make("clustered", 1, 3, 1024, 16)
    audit = nf.estimate(q, k, v, method=nf.Auto(eps=0.5, crossover=64, per_head=True)).audit
    assert audit is not None
    assert audit.heads is not None
    assert len(audit.heads) == 3
    assert max(x.pooled_bound for x in audit.heads) == audit.pooled_bound


def test_other_inputs_are_looked_at_in_other_places() -> None:
    """Layers and steps of one shape do not all miss the same rows."""
    seeds = {
        pilot.fingerprint(check(*torch.randn(3, 1, 2, 40, 8, generator=seeded(i), dtype=dtype).unbind(0)))
        for i in range(4)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
    }
    assert len(seeds) == 12
    q, k, v = make("clustered", 1, 1, 40, 8)
    assert pilot.fingerprint(check(q, k, v)) == pilot.fingerprint(check(q.clone(), k.clone(), v.clone()))

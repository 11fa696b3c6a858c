"""What results say of themselves: audits by head, print, plots."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import inputs, seeded

import nearfield as nf

pytest.importorskip("matplotlib")

PNG = b"\x89PNG"


class OneBadHead(nf.Method):
    """Exact attention, but for one head."""

    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        outcome = nf.Exact().run(problem, call)
        output = outcome.output.clone()
        output[:, 2] += 1.0
        return nf.Outcome(output, outcome.lse)


def estimate(audit: int = 20, **options: Any) -> nf.Estimate:
    q, k, v = inputs(2, 4, queries=30, dim=8, kv_heads=2)
    given = {"method": nf.TopK(k=6, tail=4), "enable_gqa": True, "generator": seeded(0)}
    return nf.estimate(q, k, v, audit=audit, **given | options)


def test_every_head_is_audited_by_itself() -> None:
    audit = estimate(method=OneBadHead(), per_head=True).audit
    assert audit is not None
    assert audit.heads is not None
    assert [head.rows for head in audit.heads] == [20] * 4
    assert [head.relative > 0.1 for head in audit.heads] == [False, False, True, False]
    assert [round(head.quantile, 6) for head in audit.heads] == [round(0.05 ** (1 / 20), 6)] * 4
    assert audit.rows == 80
    assert audit.quantile == pytest.approx(0.05 ** (1 / 80))
    assert audit.additive == max(head.additive for head in audit.heads)
    assert torch.equal(torch.cat([x.additive_errors for x in audit.heads]).sort().values, audit.additive_errors.sort().values)


def test_all_rows_of_every_head() -> None:
    """Every row is audited once, and those of a head are all of its rows: nothing is left to chance."""
    est, plain = estimate(1000, per_head=True), estimate(1000)
    assert est.audit is not None
    assert plain.audit is not None
    assert est.audit.heads is not None
    assert torch.equal(est.audit.relative_errors, plain.audit.relative_errors)
    assert (est.audit.quantile, est.audit.confidence) == (1.0, 1.0)
    by_head = plain.audit.relative_errors.view(2, 4, 30).transpose(0, 1).flatten(1)
    assert torch.equal(torch.stack([head.relative_errors for head in est.audit.heads]), by_head)
    assert {(head.quantile, head.confidence, head.heads) for head in est.audit.heads} == {(1.0, 1.0, None)}


def test_rows_of_a_head_are_drawn_from_all_entries_and_positions() -> None:
    """A row is drawn with probability 1/3; one that none of 60 audits looks at would be there by chance in one of 10^9 cases."""
    from nearfield.audit import _rows_of_heads

    parts = [torch.Size([2, 3, 3]), torch.Size([1, 3, 6])]
    head = torch.cat([torch.arange(18) // 3 % 3, torch.arange(18) // 6 % 3])
    seen = [_rows_of_heads(parts, 4, seeded(seed)) for seed in range(60)]
    assert all(len(rows) == len(rows.unique()) == 12 for rows in seen)
    assert all(head[rows].bincount().tolist() == [4, 4, 4] for rows in seen)
    assert set(torch.cat(seen).tolist()) == set(range(36))


def test_an_audit_per_head_needs_rows() -> None:
    with pytest.raises(ValueError, match="per_head=True needs an audit: pass audit=59"):
        estimate(0, per_head=True)


def test_no_heads_and_no_rows() -> None:
    empty = torch.zeros(1, 2, 0, 4)
    audit = nf.estimate(empty, empty, empty, audit=5, per_head=True).audit
    assert audit is not None
    assert audit.heads is not None
    assert [head.rows for head in audit.heads] == [0, 0]


def test_the_table_by_head() -> None:
    lines = str(estimate(method=OneBadHead(), per_head=True).audit).splitlines()
    assert lines[0].startswith("with confidence 95%")
    assert lines[1].startswith("pooled over rows")
    assert lines[2].split() == ["head", "rows", "additive", "relative"]
    assert [line.split()[:2] for line in lines[3:]] == [[str(head), "20"] for head in range(4)]
    assert len(str(estimate().audit).splitlines()) == 2


class Talkative(nf.Method):
    """A method with a long name and much to say."""

    def __repr__(self) -> str:
        return "\n".join(["Talkative"] * 40)

    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        outcome = nf.Exact().run(problem, call)
        return nf.Outcome(outcome.output, outcome.lse, outcome.stderr, {f"fact{i}": "so\nit is" for i in range(50)})


@pytest.mark.parametrize("method", [nf.TopK(k=6, tail=4), nf.Cells(4, 2), nf.Auto(eps=0.1, crossover=4), Talkative()])
def test_an_estimate_is_printed_in_ten_lines(method: nf.Method) -> None:
    est = estimate(method=method, per_head=True)
    lines = str(est).splitlines()
    assert len(lines) <= 10
    assert all(len(line) < 180 for line in lines)
    assert repr(est) == str(est)
    assert lines[0].startswith(f"Estimate by {type(method).__name__}")
    assert "  output   [2, 4, 30, 8], torch.float32, cpu" in lines
    assert any(line.startswith("  audit    with confidence 95%") for line in lines)


def test_what_an_estimate_says() -> None:
    text = str(estimate(method=OneBadHead(), per_head=True))
    assert "by head  the worst is head 2" in text
    assert "audit    none: pass audit=59 to know the error" in str(estimate(0))
    assert "chosen   Exact()" in str(estimate(method=None))
    empty = torch.zeros(1, 2, 0, 4)
    assert "output   [1, 2, 0, 4]" in str(nf.estimate(empty, empty, empty))


def picture(figure: Any, path: Path) -> bytes:
    figure.savefig(path, format="png", dpi=40)
    return path.read_bytes()


def test_plots(tmp_path: Path) -> None:
    whole, plain = estimate(per_head=True), estimate(0, method=nf.Cells(4, 2))
    assert len(whole.plot().axes) == 3
    assert len(plain.plot().axes) == 1
    for number, figure in enumerate((whole.plot(), plain.plot(), estimate().audit.plot())):
        assert picture(figure, tmp_path / str(number)).startswith(PNG)


def test_what_the_plot_of_an_audit_shows() -> None:
    audit = estimate(method=OneBadHead(), per_head=True).audit
    assert audit is not None
    rows, heads = audit.plot().axes
    additive, relative, bound = rows.lines
    assert list(additive.get_xdata()) == audit.additive_errors.sort().values.tolist()
    assert list(relative.get_xdata()) == audit.relative_errors.sort().values.tolist()
    assert additive.get_ydata()[-1] == 1.0
    assert bound.get_xdata()[0] == audit.additive
    largest = heads.lines[-1].get_ydata()
    assert largest.argmax() == 2
    assert len(heads.lines) == 5


def test_rows_that_see_nothing_are_left_out_of_plots(tmp_path: Path) -> None:
    q, k, v = inputs(1, 2, queries=5, dim=4)
    mask = torch.zeros(1, 1, 1, 5, dtype=torch.bool)
    mask[..., 3:] = True
    figure = nf.estimate(q, k, v, mask, is_causal=True).plot()
    line = torch.tensor(figure.axes[0].lines[0].get_ydata())
    assert torch.equal(line.isnan(), torch.tensor([True, True, True, False, False]))
    assert picture(figure, tmp_path / "plot").startswith(PNG)


def test_no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return plain(name, *rest)

    est = estimate()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"plots need matplotlib: pip install 'nearfield\[plots\]'"):
        est.plot()


def test_the_chosen_method_is_one_to_use() -> None:
    q, k, v = inputs(1, 2, queries=40, dim=8)
    est = nf.estimate(q, k, v, method=nf.Auto(crossover=16))
    assert torch.equal(nf.attention(q, k, v, method=est.info["chosen"]), est.output)

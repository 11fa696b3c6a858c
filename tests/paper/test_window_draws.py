"""Draws and walks in windows with bounds on both sides: the law is the softmax of the keys that a row sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import inputs
from laws import assert_frequencies, assert_mean, seeded
from torch import Tensor

import nearfield as nf
from nearfield import windows
from nearfield.paper import lazy
from nearfield.problem import check

CASES: dict[str, tuple[int, int, tuple[int, int], int, bool]] = {
    "one block": (20, 20, (3, 2), 0, False),
    "blocks": (41, 41, (3, 2), 0, False),
    "padding": (41, 41, (9, 4), 0, True),
    "more keys": (19, 60, (5, 7), 40, True),
    "more queries": (60, 19, (4, 4), -7, False),
    "more queries, padding": (60, 19, (4, 4), -7, True),
    "causal": (41, 41, (6, 0), 0, True),
}
"""Queries, keys, the window, the offset, and whether keys are hidden. Some rows of some see no key."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "LEAST_ROWS", 8)


def problem_of(case: str, copies: int = 1) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Inputs with two heads for each key-value head, what to ask for, and which keys each row sees `[1, 1, rows, keys]`."""
    queries, keys, (left, right), offset, is_padded = CASES[case]
    q, k, v = inputs(1, 4, queries=queries, keys=keys, kv_heads=2, dim=4, value_dim=3, dtype=torch.float64)
    row, key = torch.arange(queries)[:, None] + offset, torch.arange(keys)
    mask = ((key >= row - left) & (key <= row + right))[None, None]
    padding = (torch.rand(1, 1, 1, keys, generator=seeded(5)) < 0.7) if is_padded else None
    asked = {"window_size": (left, right), "offset": offset, "attn_mask": padding, "enable_gqa": True}
    return [x.repeat(copies, 1, 1, 1) for x in (q, k, v)], asked, mask if padding is None else mask & padding


def weights_of(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    logits = (q @ k.repeat_interleave(2, 1).mT / 2).masked_fill(~mask, -torch.inf)
    return logits.softmax(-1).nan_to_num(0.0)


@pytest.mark.parametrize("case", CASES)
def test_keys_are_drawn_from_the_softmax_of_their_window(case: str) -> None:
    """With the unit vectors as values, the output says how often each key was drawn."""
    (q, k, _), asked, mask = problem_of(case)
    draws = 500
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(1, 2, -1, -1)
    est = nf.estimate(q, k, eye, method=nf.LazyGumbel(draws=draws, estimator="mean"), generator=seeded(0), **asked)
    weights = weights_of(q, k, mask)
    assert_frequencies((est.output * draws).round(), weights)
    assert bool((est.output[~mask.expand_as(weights)] == 0).all())
    exact = nf.estimate(q, k, eye, method=nf.Exact(), **asked)
    torch.testing.assert_close(est.lse, exact.lse)
    assert est.info["keys_per_query"] == pytest.approx(exact.info["keys_per_query"])
    assert est.info["dense_rows"] == q.shape[:3].numel()
    assert est.info["certified"]


@pytest.mark.parametrize("how", [{"method": nf.LazyGumbel(draws=2)}, {"method": nf.Exact()}, {"method": nf.TopK(k=2)}], ids=str)
@pytest.mark.parametrize("case", ["padding", "more keys", "more queries"])
def test_walks_in_windows_are_unbiased(case: str, how: dict[str, Any]) -> None:
    """The gradient does not depend on what the method computed."""
    tensors, asked, _ = problem_of(case, copies=300)
    leaves = [x.requires_grad_() for x in tensors]
    if not isinstance(how["method"], nf.LazyGumbel):
        how = how | {"gradient": nf.gradients.RandomWalk(walks=4)}
    output = nf.attention(*leaves, generator=seeded(1), **how, **asked)
    upstream = torch.randn(output[:1].shape, generator=seeded(2), dtype=output.dtype)
    found = torch.autograd.grad(output, leaves, upstream.expand_as(output))
    one = [x[:1].detach().requires_grad_() for x in leaves]
    exact = nf.attention(*one, method=nf.Exact(), **asked)
    for got, want in zip(found, torch.autograd.grad(exact, one, upstream), strict=True):
        assert_mean(got, want[0])
    if "gradient" in how:
        torch.testing.assert_close(output[:1], nf.attention(*one, method=how["method"], **asked))


def test_drops_are_those_of_the_forward_pass() -> None:
    """The walks of LazyGumbel reach no value that was dropped. All six keys of a window are as likely, and all are drawn."""
    (q, k, _), asked, _ = problem_of("blocks", copies=50)
    q = torch.zeros_like(q)
    eye = torch.eye(k.shape[2], dtype=q.dtype).expand(50, 2, -1, -1).clone().requires_grad_()
    method = nf.LazyGumbel(draws=300, estimator="mean")
    output = nf.attention(q, k, eye, dropout_p=0.5, method=method, generator=seeded(3), **asked)[:, :, 20]
    # Two query heads read the same values.
    kept = (output != 0).unflatten(1, (2, 2)).any(2)
    assert_mean(output.detach()[..., 17:23], 1 / 6)
    assert kept.any()
    assert not kept[..., 17:23].all()
    (found,) = torch.autograd.grad(output.sum(), eye)
    reached = (found != 0).any(-1)
    assert reached.any()
    assert not (reached & ~kept).any()


@pytest.mark.parametrize("offset", [-500, 500])
def test_windows_beyond_all_keys_are_empty(offset: int) -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 2, queries=30, dim=4)]
    output = nf.attention(*leaves, window_size=(3, 3), offset=offset, method=nf.LazyGumbel(draws=5))
    output.sum().backward()
    assert not output.any()
    assert not any(bool(x.grad.any()) for x in leaves if x.grad is not None)


def test_a_causal_mask_that_hides_everything_is_served_too() -> None:
    q, k, v = inputs(1, 2, queries=30, dim=4)
    assert not nf.attention(q, k, v, is_causal=True, offset=-100, method=nf.LazyGumbel(draws=5)).any()


def test_blocks_copy_keys_about_twice_and_ask_no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        def build(self, keys: Tensor) -> Any:
            raise AssertionError("rows in a window do not see the first keys alone")

    monkeypatch.setattr(lazy, "LEAST_KEYS", 0)
    monkeypatch.setattr(lazy, "BUILD_COST", 0.0)
    x = torch.randn(1, 1, 4000, 4)
    rows = windows.in_blocks(check(x, x, x, window_size=(100, 27))).rows
    assert rows.keys.shape[:2].numel() < 2.1 * 4000
    assert rows.visible.numel() < 4100
    assert int(rows.visible.max()) == 128
    assert lazy.index_that_pays(rows, Asked(), 4, draws=1.0) is None
    with pytest.raises(AssertionError, match="first keys alone"):
        lazy.index_that_pays(check(x, x, x).rows, Asked(), 4, draws=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_normaliser_of_rows_drawn_from_their_full_softmax_is_known(dtype: torch.dtype) -> None:
    q, k, v = inputs(1, 2, queries=30, dim=4, dtype=dtype)
    for asked in ({}, {"is_causal": True}):
        got, want = (nf.estimate(q, k, v, method=method, **asked).lse for method in (nf.LazyGumbel(draws=5), nf.Exact()))
        torch.testing.assert_close(got, want)


def test_what_is_refused() -> None:
    q, k, v = inputs(1, 1, queries=60, dim=4)
    asked: dict[str, Any] = {"window_size": (5, 1), "method": nf.Exact()}
    with pytest.raises(ValueError, match=r"gradient=PrintedWalk.*both sides; use gradients.RandomWalk\(...\), or gradient=None"):
        nf.attention(q, k, v, gradient=nf.gradients.PrintedWalk(), **asked)
    with pytest.raises(ValueError, match=r"pairs are dropped in window_size=\(5, 1\).*got dropout_p=0.1; use gradient=None"):
        nf.attention(q, k, v, None, 0.1, gradient=nf.gradients.RandomWalk(), **asked)
    with pytest.raises(ValueError, match=r"always_lazy=True asks for an index.*window_size=\(5, 1\).*leave out always_lazy"):
        nf.attention(q, k, v, **asked | {"method": nf.LazyGumbel(always_lazy=True)})
    with pytest.raises(ValueError, match=r"LazyGumbel has an index that is built already.*pass index=KMeansIndex\(\)"):
        nf.attention(q, k, v, **asked | {"method": nf.LazyGumbel(index=nf.ExactIndex().build(k[0]))})

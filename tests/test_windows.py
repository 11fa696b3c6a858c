"""Sliding windows: rows that see the keys around their own place, by every method."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import inputs, seeded, softmax64
from laws import assert_mean
from operator_calls import compiled
from partitions import PARTITIONS
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import TorchDispatchMode

import nearfield as nf
from nearfield import exact, windows
from nearfield.cells import sizes
from nearfield.kernels import backends
from nearfield.problem import Call, Problem
from nearfield.results import Outcome
from nearfield.sampling import Seeds

SHAPES = [(45, 45), (24, 60), (60, 24)]
WINDOWS = [(0, 0), (1, 0), (0, 3), (9, 12), (20, 0), (13, -1), (-1, 3), (12, 30), (1000, 5), (5, 1000)]
ALL_OPEN = nf.Cells(cell_size=4, probes=200, segment=8)
METHODS = [nf.Exact(), nf.TopK(k=400), nf.TopK(k=2, tail=400), ALL_OPEN]
"""All of them read every key."""

Window = tuple[int, int]


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let methods serve windows that would be exact attention otherwise, and that in small blocks, so that tests are small."""
    monkeypatch.setattr(windows, "LEAST", 8)
    monkeypatch.setattr(windows, "BLOCKS", 4)
    monkeypatch.setattr(exact, "WINDOW_ROWS", {False: 16, True: 16})


def seen(queries: int, keys: int, window: Window, causal: bool = False, offset: int = 0) -> Tensor:
    """Entry by entry, as the documentation says it."""
    left, right = window
    rows = []
    for i in range(queries):
        p = i + offset
        last = p if causal else keys - 1
        rows.append([(left < 0 or j >= p - left) and (right < 0 or j <= p + right) and j <= last for j in range(keys)])
    return torch.tensor(rows)


def by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None = None, s_aux: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser, by autograd."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if s_aux is not None:
        logits = torch.cat([logits, s_aux[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
        v = F.pad(v, (0, 0, 0, 1))
    blind = (logits == -torch.inf).all(-1)
    return softmax64(logits) @ v, logits.masked_fill(blind[..., None], 0.0).logsumexp(-1).masked_fill(blind, -torch.inf)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], leaves: list[Tensor]) -> None:
    """Outputs, log-normalisers and the gradients of both."""
    torch.testing.assert_close(found, expected)
    upstream = torch.randn(expected[0].shape, generator=seeded(1), dtype=torch.float64)
    own = torch.randn(expected[1].shape, generator=seeded(2), dtype=torch.float64)

    def gradients(output: Tensor, lse: Tensor) -> list[Tensor]:
        loss = (output * upstream).sum() + (torch.where(lse > -torch.inf, lse, 0.0) * own).sum()
        return list(torch.autograd.grad(loss, leaves))

    torch.testing.assert_close(gradients(*found), gradients(*expected))


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_methods_that_read_all_keys_are_exact(shape: tuple[int, int], method: nf.Method) -> None:
    queries, keys = shape
    leaves = [x.requires_grad_() for x in inputs(1, 2, queries=queries, keys=keys, kv_heads=1, value_dim=5, dtype=torch.float64)]
    q, k, v = leaves
    for window, (causal, offset) in itertools.product(WINDOWS, [(False, 0), (True, keys - queries), (False, -7), (True, 200)]):
        expected = by_hand(q, k, v, seen(queries, keys, window, causal, offset))
        found = nf.attention(
            q, k, v, None, 0.0, causal, enable_gqa=True, method=method, window_size=window, offset=offset, return_lse=True
        )
        assert_same(found, expected, leaves)


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("window", [(9, 12), (20, 0), (13, -1)], ids=str)
def test_with_padding_caps_and_sinks(method: nf.Method, window: Window) -> None:
    tensors = inputs(2, 4, queries=40, keys=60, kv_heads=2, value_dim=5, dtype=torch.float64)
    padding = torch.rand(2, 1, 1, 60, generator=seeded(3)) < 0.5
    padding[1] = False  # an entry of which nothing counts
    sinks = torch.randn(4, generator=seeded(4), dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*tensors, sinks)]
    q, k, v, s_aux = leaves
    mask = padding & seen(40, 60, window, offset=20)
    call: dict[str, Any] = {"window_size": window, "offset": 20, "enable_gqa": True, "method": method, "return_lse": True}
    assert_same(nf.attention(q, k, v, padding, **call), by_hand(q, k, v, mask), leaves[:3])
    found = nf.attention(q, k, v, padding, softcap=1.5, s_aux=s_aux, **call)
    assert_same(found, by_hand(q, k, v, mask, 1.5, s_aux), leaves)
    found = nf.attention(q, k, v, s_aux=s_aux, **call)
    assert_same(found, by_hand(q, k, v, seen(40, 60, window, offset=20), None, s_aux), leaves)


@pytest.mark.parametrize("method", [nf.Exact(), nf.Auto(), nf.TopK(k=5), nf.Cells(cell_size=4, probes=2, segment=8)], ids=repr)
def test_a_window_that_hides_nothing_is_none(method: nf.Method) -> None:
    q, k, v = inputs(1, 2, queries=30, keys=40)
    plain = nf.attention(q, k, v, method=method)
    for window in (None, (-1, -1), (29, 39), (1000, -1)):
        assert torch.equal(nf.attention(q, k, v, method=method, window_size=window), plain)
    causal = nf.attention(q, k, v, is_causal=True, offset=10, method=method)
    for window in ((-1, -1), (-1, 0), (-1, 7), (39, 7)):
        assert torch.equal(nf.attention(q, k, v, is_causal=True, offset=10, method=method, window_size=window), causal)
    # Places do not matter where there are no bounds.
    for window in ((-1, -1), (700, 700)):
        assert torch.equal(nf.attention(q, k, v, method=method, offset=3, window_size=window), plain)
        assert torch.equal(nf.estimate(q, k, v, method=method, offset=3, window_size=window).output, plain)
    # A bound on the right alone is a causal mask.
    assert torch.equal(nf.attention(q, k, v, method=method, offset=7, window_size=(-1, 3)), causal)


def test_a_left_bound_may_hide_one_key() -> None:
    """The last row does not see the first key; all others see the same keys as with a causal mask."""
    q, k, v = inputs(1, 1, queries=30)
    for method in (nf.Exact(), nf.TopK(k=400)):
        plain = nf.attention(q, k, v, is_causal=True, method=method)
        got = nf.attention(q, k, v, is_causal=True, window_size=(28, 0), method=method)
        torch.testing.assert_close(got[:, :, :-1], plain[:, :, :-1])
        assert not torch.allclose(got[:, :, -1], plain[:, :, -1])


def test_parts_of_a_call_draw_their_own_numbers() -> None:
    seeds = Seeds(seeded(0), torch.device("cpu"))
    found = {seeds.base, *(seeds.part(i).base for i in range(4)), seeds.part(1).part(0).base}
    assert len(found) == 6
    assert seeds.part(2).base == Seeds(seeded(0), torch.device("cpu")).part(2).base


def test_where_rows_stand() -> None:
    """FlashAttention's last row stands at the last key; so do those of torch's bias and of `attention_varlen`."""
    q, k, v = inputs(1, 2, queries=20, keys=50)
    want = nf.attention(q, k, v, is_causal=True, offset=30, window_size=(6, -1), method=nf.Exact())
    assert torch.equal(nf.attention(q, k, v, causal_lower_right(20, 50), window_size=(6, -1), method=nf.Exact()), want)
    assert torch.equal(nf.attention(q, k, v, offset=30, window_size=(6, 0), method=nf.Exact()), want)
    by_place = by_hand(*(x.double() for x in (q, k, v)), seen(20, 50, (6, 0), offset=30))[0]
    torch.testing.assert_close(want, by_place.float())


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("causal", [False, True])
def test_windows_of_packed_sequences(causal: bool) -> None:
    lengths, key_lengths, window = [20, 33, 20], [40, 30, 40], (7, 4)
    edges, key_edges = (F.pad(torch.tensor(x).cumsum(0), (1, 0)) for x in (lengths, key_lengths))
    q, k, v = torch.randn(73, 2, 8, generator=seeded(0)), *torch.randn(2, 110, 2, 8, generator=seeded(1)).unbind(0)
    got = nf.attention_varlen(q, k, v, edges, key_edges, causal=causal, window_size=window, method=ALL_OPEN)
    for i, (n, m) in enumerate(zip(lengths, key_lengths, strict=True)):
        rows, own = slice(edges[i], edges[i + 1]), slice(key_edges[i], key_edges[i + 1])
        one = [x.double().transpose(0, 1)[None] for x in (q[rows], k[own], v[own])]
        want = by_hand(*one, seen(n, m, window, causal, m - n))[0]
        torch.testing.assert_close(got[rows].double(), want[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    nothing = nf.attention_varlen(q, k, v, edges, key_edges, causal=causal, window_size=(-1, -1), method=ALL_OPEN)
    assert torch.equal(nothing, nf.attention_varlen(q, k, v, edges, key_edges, causal=causal, method=ALL_OPEN))
    nested = [
        torch.nested.nested_tensor_from_jagged(x, e).transpose(1, 2) for x, e in ((q, edges), (k, key_edges), (v, key_edges))
    ]
    same = nf.attention(*nested, window_size=window, offset=3, method=nf.Exact())
    first = nf.attention(*(x[0][None] for x in nested), window_size=window, offset=3, method=nf.Exact())
    torch.testing.assert_close(same[0], first[0])


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("window", [(7, 4), (7, -1)], ids=str)
def test_a_nan_reaches_the_rows_whose_window_it_is_in(method: nf.Method, window: Window) -> None:
    q, k, v = inputs(1, 1, queries=40)
    k[0, 0, 17, 3] = torch.nan
    q[0, 0, 35, 1] = torch.inf
    got = nf.attention(q, k, v, method=method, window_size=window)
    bad = seen(40, 40, window)[:, 17].tolist()
    bad[35] = True
    assert got.isnan().all(-1)[0, 0].tolist() == bad
    assert bool(got[got.isnan().logical_not()].isfinite().all())


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=3, tail=400), ALL_OPEN], ids=repr)
def test_dropout_in_windows(method: nf.Method) -> None:
    """Each pair is dropped by itself, after the softmax over the whole window."""
    copies, rows, window, p = 8, 60, (19, 6), 0.4
    q, k, _ = inputs(1, 1, queries=rows, dim=4)
    v = torch.eye(rows)[None, None]  # so that the output is the weights
    many = [x.expand(copies, -1, -1, -1) for x in (q, k, v)]

    def drop(seed: int) -> Tensor:
        call: dict[str, Any] = {"dropout_p": p, "method": method, "window_size": window}
        return nf.attention(*many, generator=seeded(seed), **call)[:, 0]

    weights = drop(0)
    assert torch.equal(weights, drop(0))
    assert not torch.equal(weights, drop(1))
    mask = seen(rows, rows, window)
    whole = by_hand(*(x.double() for x in (q, k, v)), mask)[0][0, 0].float() / (1 - p)
    kept = weights > 0
    torch.testing.assert_close(weights, torch.where(kept, whole, 0.0))
    assert_mean(kept[:, mask].flatten(), 1 - p)
    # Blocks of rows, and entries, do not share their drops: five rows of 26 keys are never the same twice.
    patterns = [kept[c, i + d, i + d - 19 : i + d + 7].tolist() for c in range(copies) for i in range(20, 49) for d in range(5)]
    blocks = {str(patterns[5 * i : 5 * i + 5]) for i in range(len(patterns) // 5)}
    assert len(blocks) == copies * 29


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for x in found if isinstance(found, tuple | list) else [found]:
            if isinstance(x, Tensor) and x.layout == torch.strided:
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return found


@pytest.mark.parametrize(
    ("method", "window"), [(nf.Exact(), (60, 3)), (nf.Auto(), (300, 0)), (nf.Cells(), (400, 100)), (nf.TopK(k=8), (300, 0))]
)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_no_table_of_all_pairs(method: nf.Method, window: Window, softcap: float | None) -> None:
    n = 3000
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, queries=n, dim=4))
    with Largest() as largest:
        output, lse = nf.attention(q, k, v, method=method, window_size=window, softcap=softcap, return_lse=True)
        (output.sum() + lse.sum()).backward()
    assert n * 4 <= largest.entries < n * n / 4


BANDS: dict[str, dict[str, Any]] = {
    "padding": {"is_causal": True, "attn_mask": (torch.arange(600) % 7 > 0).view(1, 1, 1, 600)},
    "offset": {"is_causal": True, "offset": -3},
    "right": {"window_size": (-1, 5)},
    "left": {"window_size": (5, -1)},
    "both": {"window_size": (400, 3)},
}


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("case", BANDS)
def test_exact_attention_keeps_no_table(case: str, softcap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass makes masks again, for one block of rows and for several, and drops the same pairs."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, queries=600, dim=4))
    for block in (64 << 20, 1 << 17):
        monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", block)
        saved: list[Tensor] = []
        call: dict[str, Any] = {"dropout_p": 0.5, "softcap": softcap, "method": nf.Exact(), "generator": seeded(1)}
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            output, lse = nf.attention(q, k, v, return_lse=True, **call, **BANDS[case])
        kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in saved}
        assert sum(kept.values()) < 600 * 600 / 2
        # Each output is linear in the values, with the pairs that were dropped.
        (slope,) = torch.autograd.grad(output.sum(), v)
        torch.testing.assert_close((slope * v).sum(), output.sum())
        assert torch.autograd.grad(torch.where(lse > -torch.inf, lse, 0.0).sum(), q)[0].isfinite().all()


@pytest.mark.usefixtures("short_windows")
def test_audits_know_windows() -> None:
    q, k, v = inputs(2, 4, queries=60, kv_heads=2, dtype=torch.float64)
    padding = torch.rand(2, 1, 1, 60, generator=seeded(3)) < 0.8
    for window, causal in (((9, 12), False), ((20, -1), True), ((13, -1), False)):
        mask = padding & seen(60, 60, window, causal)
        want = by_hand(q, k, v, mask)
        counted = mask.sum(-1).double().mean()
        for method in (nf.Exact(), nf.TopK(k=400), ALL_OPEN):
            est = nf.estimate(q, k, v, padding, 0.0, causal, enable_gqa=True, method=method, window_size=window, audit=480)
            assert est.audit is not None
            assert est.audit.additive < 1e-9
            torch.testing.assert_close((est.output, est.lse), want)
            assert est.info["keys_per_query"] == pytest.approx(float(counted), rel=1e-9)
    bad = nf.estimate(q, k, v, enable_gqa=True, method=nf.TopK(k=1), window_size=(9, 12), audit=480)
    assert bad.audit is not None
    off = torch.linalg.vector_norm(bad.output - by_hand(q, k, v, seen(60, 60, (9, 12)))[0], dim=-1)
    unit = v.square().sum(-1).mean(-1).sqrt().repeat_interleave(2, 1)[..., None]
    assert bad.audit.additive == pytest.approx(float((off / unit).max()), rel=1e-6)


def test_what_served_a_window() -> None:
    q, k, v = nf.synthetic.make("clustered", 1, 2, 2000, 16, seed=0)
    for method in (nf.Cells(), nf.Auto(check=False, crossover=200)):
        est = nf.estimate(q, k, v, method=method, window_size=(500, 100), audit=59)
        parts = est.info["parts"]
        assert [part["served"] for part in parts if part["rows"] > 16] == ["causal", "blocks", "reversed"]
        assert sum(part["rows"] for part in parts) == 2000
        assert est.info["keys_per_query"] < 450
        assert est.audit is not None
        assert 0.0 < est.audit.pooled < 0.1
    short = nf.estimate(q, k, v, method=nf.Cells(), window_size=(200, 0))
    assert short.info["parts"] == [{"rows": 2000, "served": "exact"}]
    torch.testing.assert_close(short.output, nf.attention(q, k, v, method=nf.Exact(), window_size=(200, 0)))


@pytest.mark.parametrize("name", PARTITIONS)
@pytest.mark.parametrize("rows", [300, 420])
def test_no_row_of_a_window_depends_on_a_later_query(name: str, rows: int, short_windows: None) -> None:
    """Nor where rows stand behind all keys, and are served in reverse order."""
    q, k, v = inputs(1, 2, queries=rows, keys=300, dtype=torch.float64)
    method = nf.Cells(4, 2, segment=16, partition=PARTITIONS[name])
    found = nf.attention(q, k, v, method=method, window_size=(99, 0))
    for first in (160, 280):
        # Large along other coordinates.
        later = torch.cat([q[:, :, :first], q[:, :, first:].flip(3) * torch.linspace(0.1, 5, q.shape[3])], 2)
        again = nf.attention(later, k, v, method=method, window_size=(99, 0))
        assert torch.equal(found[:, :, :first], again[:, :, :first])
        assert not torch.equal(found[:, :, first:], again[:, :, first:])


def test_rows_of_a_window_open_cells_by_themselves(short_windows: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows without a mask open cells together by default, on a GPU."""
    monkeypatch.setattr(sizes, "LEAST_QUERIES", 1)
    may_share: list[tuple[bool, bool]] = []

    class Asked(nf.Cells):
        def run(self, problem: Problem, call: Call) -> Outcome:
            with pytest.MonkeyPatch.context() as here:
                here.setattr(backends, "runs_triton", lambda device: True)
                may_share.append((problem.is_causal, self._may_share(problem)))
            return super().run(problem, call)

    q, k, v = inputs(1, 2, queries=300)
    nf.attention(q, k, v, method=Asked())
    assert may_share == [(False, True)]
    may_share.clear()
    nf.attention(q, k, v, method=Asked(), window_size=(99, 0))
    assert {causal for causal, _ in may_share} == {False, True}
    assert not any(share for _, share in may_share)


def test_the_default_is_exact_in_windows() -> None:
    """A pilot would look at parts of the keys; with a bound on one side, there are no parts."""
    q, k, v = nf.synthetic.make("clustered", 1, 2, 2000, 16, seed=0)
    auto = nf.Auto(crossover=100)
    est = nf.estimate(q, k, v, method=auto, window_size=(900, 0))
    assert est.info["chosen"] == nf.Exact() == nf.plan(q, k, v, window_size=(900, 0), crossover=100)
    assert torch.equal(est.output, nf.attention(q, k, v, window_size=(900, 0)))
    one_sided = nf.estimate(q, k, v, method=auto, window_size=(900, -1), audit=59)
    assert isinstance(one_sided.info["chosen"], nf.Cells)
    assert isinstance(nf.plan(q, k, v, window_size=(900, -1), crossover=100), nf.Cells)
    assert one_sided.audit is not None
    assert one_sided.audit.pooled < 0.1
    text = str(nf.explain(q, k, v, window_size=(900, 0)))
    assert "window (900, 0)" in text
    assert "which reads the keys inside alone" in text


def test_draws_come_from_windows_with_one_bound() -> None:
    q, k, v = inputs(1, 1, queries=40, dim=4)
    method = nf.LazyGumbel(eps=0.2, delta=1e-6, estimator="mean")
    got = nf.attention(q, k, v, window_size=(5, -1), method=method, generator=seeded(0))
    want = nf.attention(q, k, v, window_size=(5, -1), method=nf.Exact())
    assert bool(((got - want).abs() <= 0.2 * (v.amax(2) - v.amin(2))[:, :, None]).all())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    walk = nf.gradients.RandomWalk()
    row = nf.attention(*leaves, window_size=(5, -1), method=nf.Exact(), gradient=walk)[:, :, 30]
    _, dk, dv = torch.autograd.grad(row.sum(), leaves)
    assert bool((dk[:, :, :25] == 0).all() and (dv[:, :, :25] == 0).all())
    assert bool((dv[:, :, 25:] != 0).any())


@pytest.mark.long
@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("method", [nf.Exact(), nf.Cells(cell_size=4, probes=2, segment=8)], ids=repr)
def test_windows_compiled(method: nf.Method) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nf.attention(q, k, v, window_size=(9, 12), method=method)

    results = []
    for function in (model, compiled(model)):
        q, k, v = inputs(1, 1, queries=40)
        output = function(q.requires_grad_(), k, v)
        results.append((output, *torch.autograd.grad(output.square().sum(), q)))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.long
@pytest.mark.usefixtures("short_windows")
def test_windows_in_triton() -> None:
    pytest.importorskip("triton")
    leaves = [x.requires_grad_() for x in inputs(1, 1, queries=14, dim=16)]
    outputs = [nf.attention(*leaves, window_size=(7, 2), method=ALL_OPEN, backend=name) for name in ("triton", "cpu")]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-4, atol=1e-5)
    first, second = (torch.autograd.grad(x.square().sum(), leaves) for x in outputs)
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("short_windows")
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_windows_in_half_precision(method: nf.Method) -> None:
    q, k, v = inputs(1, 2, queries=40, dtype=torch.bfloat16)
    got, lse = nf.attention(q, k, v, method=method, window_size=(9, 12), return_lse=True)
    assert (got.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    want = by_hand(*(x.double() for x in (q, k, v)), seen(40, 40, (9, 12)))[0]
    torch.testing.assert_close(got.double(), want, rtol=0.03, atol=0.03)


@pytest.mark.usefixtures("short_windows")
def test_windows_of_methods_of_ones_own() -> None:
    """One that knows no windows gets rows without them, and needs a normaliser."""

    class Own(nf.Method):
        gives_lse = True

        def run(self, problem: Any, call: Any) -> nf.Outcome:
            assert problem.window is None
            return nf.Exact().run(problem, call)

    q, k, v = inputs(1, 2, queries=50)
    want = nf.attention(q, k, v, window_size=(9, 12), method=nf.Exact())
    torch.testing.assert_close(nf.attention(q, k, v, window_size=(9, 12), method=Own()), want)

    class Without(Own):
        gives_lse = False

    with pytest.raises(ValueError, match=r"Without.* gives none with a gradient; use Exact\(\), Cells"):
        nf.attention(q, k, v, window_size=(9, 12), method=Without())

    class Lies(nf.Method):
        any_window = True

        def run(self, problem: Any, call: Any) -> nf.Outcome:
            return nf.Outcome(problem.by_head(problem.rows.queries))

    with pytest.raises(ValueError, match=r"Problem\.rows and Problem\.grouped do not describe them"):
        nf.attention(q, k, v, window_size=(9, 12), method=Lies())


def test_the_window_exactly_and_the_rest_by_cells() -> None:
    """`Cells(window=...)` hides nothing: the latest keys have their own weights, and older ones those of their cells."""
    n, latest = 96, 20
    q, k, v = inputs(1, 1, queries=n, dim=4, dtype=torch.float64)
    v.requires_grad_()
    method = nf.Cells(cell_size=4, probes=1, segment=8, sinks=0, window=latest)
    output, lse = nf.attention(q, k, v, is_causal=True, method=method, return_lse=True)
    own = (q[0, 0] @ k[0, 0].T / 2 - lse[0, 0, :, None].detach()).exp()
    for i in (15, 40, 63, 95):
        weights = torch.autograd.grad(output[0, 0, i, 0], v, retain_graph=True)[0][0, 0, :, 0]
        near = slice(max(0, i + 1 - latest), i + 1)
        torch.testing.assert_close(weights[near], own[i, near])
        assert bool((weights[i + 1 :] == 0).all())
        if i >= 63:
            # Not those of a window that hides them, and not all of them their own.
            older = weights[: i - latest - 16]
            assert bool((older != 0).all())
            assert float((older - own[i, : len(older)]).abs().max()) > 1e-4


def test_windows_that_are_refused() -> None:
    q, k, v = inputs(1, 1, queries=600, dim=4)
    attend: Callable[..., Any] = nf.attention
    for window in (5, (5,), (5, -2), (5.0, 1), (True, 1), "ab", (1, 2, 3)):
        with pytest.raises(ValueError, match=r"window_size must be two integers \(left, right\).*-1 for no bound.*got"):
            attend(q, k, v, window_size=window)
    table = torch.zeros(600, 600)
    with pytest.raises(ValueError, match=r"window_size=\(5, 1\) can be combined only.*Put the window into the mask"):
        attend(q, k, v, table, window_size=(5, 1))
    for window in ((300, 0), (300, 1), (300, -1), (3, 3)):
        with pytest.raises(ValueError, match=r"hides some of those; leave out window or window_size"):
            attend(q, k, v, window_size=window, method=nf.Cells(window=64))
    with pytest.raises(ValueError, match=r"joint=True promises.*leave out joint, or use Exact"):
        attend(q, k, v, window_size=(300, 1), method=nf.TopK(eps=0.4, delta=0.1, joint=True))
    # Exact attention serves these, at once.
    short = attend(q, k, v, window_size=(200, 1), method=nf.TopK(eps=0.4, delta=0.1, joint=True))
    assert torch.equal(short, attend(q, k, v, window_size=(200, 1), method=nf.Exact()))
    for window in ((300, 1), (300, -1)):
        with pytest.raises(ValueError, match=r"TopK has an index that is built already.*pass index=KMeansIndex\(\)"):
            attend(q, k, v, window_size=window, method=nf.TopK(k=4, index=nf.ExactIndex().build(k[0])))

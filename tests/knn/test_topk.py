"""TopK: the near field is the true top k, the tail is weighted and drawn as promised, gradients are those of the estimator."""

from __future__ import annotations

import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import QKV, attention64, causal_mask, gradients, inputs, logits64, seeded, softmax64
from scipy import stats
from torch import Tensor

import nearfield as nf
from nearfield import synthetic
from nearfield.knn import topk
from nearfield.knn.topk import _Planner

ALPHA = 1e-6


def z_limit(tests: int) -> float:
    """What |z| of any of so many normal variables exceeds with probability `ALPHA` at most."""
    return float(stats.norm.isf(ALPHA / 2 / tests))


def copies(tensors: QKV, count: int) -> QKV:
    """The same problem `count` times in one batch: so many independent draws."""
    q, k, v = (x.expand(count, *x.shape[1:]) for x in tensors)
    return q, k, v


def top_k_by_hand(q: Tensor, k: Tensor, v: Tensor, near: int, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """Softmax over the `near` largest logits of each row, the rest masked."""
    logits = logits64(q, k, mask, causal)
    least = logits.topk(min(near, logits.shape[-1])).values[..., -1:]
    values = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return softmax64(logits.masked_fill(logits < least, -torch.inf)) @ values


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("near", [1, 2, 7, 39])
def test_no_tail_is_a_softmax_over_the_top_k(near: int, causal: bool, masked: bool, group: int) -> None:
    tensors = inputs(2, 2 * group, queries=40, dim=4, kv_heads=2, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 40, generator=seeded(1)) < 0.7 if masked else None
    upstream = torch.randn(2, 2 * group, 40, 4, generator=seeded(2), dtype=torch.float64)
    expected, expected_grads = gradients(lambda q, k, v: top_k_by_hand(q, k, v, near, mask, causal), tensors, upstream)
    got, grads = gradients(
        lambda q, k, v: nf.attention(q, k, v, mask, is_causal=causal, enable_gqa=True, method=nf.TopK(k=near)), tensors, upstream
    )
    torch.testing.assert_close(got, expected)
    for x, y in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(x, y)
    est = nf.estimate(*tensors, mask, is_causal=causal, enable_gqa=True, method=nf.TopK(k=near))
    everything = mask is not None and int(mask.sum(-1).max()) <= near
    assert (est.stderr is not None) == everything, "an error is known only where nothing is left out"
    kept = logits64(tensors[0], tensors[1], mask, causal).topk(near).values
    torch.testing.assert_close(est.lse, kept.logsumexp(-1))


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> list[_Planner]:
    """The planners of the calls that a test makes, for the ids in their plans."""
    seen: list[_Planner] = []
    plain = topk.weighted_attention

    def spy(queries: Tensor, keys: Tensor, values: Tensor, planner: _Planner, *rest: Any, **options: Any) -> Any:
        seen.append(planner)
        return plain(queries, keys, values, planner, *rest, **options)

    monkeypatch.setattr(topk, "weighted_attention", spy)
    return seen


def estimate_by_hand(logits: Tensor, values: Tensor, ids: list[int], near: int, total: int) -> tuple[Tensor, float]:
    """One row: near keys with weight 1, drawn keys with (n - k) / l; output and log-normaliser."""
    head, drawn = [j for j in ids[:near] if j >= 0], [j for j in ids[near:] if j >= 0]
    weight = (total - len(head)) / len(drawn) if drawn else 0.0
    peak = max(float(logits[j]) for j in head + drawn)
    numerator, denominator = torch.zeros(values.shape[-1], dtype=torch.float64), 0.0
    for j, w in [(j, 1.0) for j in head] + [(j, weight) for j in drawn]:
        mass = w * float((logits[j] - peak).exp())
        numerator += mass * values[j]
        denominator += mass
    return numerator / denominator, peak + float(torch.tensor(denominator, dtype=torch.float64).log())


@pytest.mark.parametrize("index", [nf.ExactIndex(), nf.KMeansIndex(cells=6, probes=1)], ids=["exact", "kmeans"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_weights_of_the_tail(causal: bool, masked: bool, index: Any, planners: list[_Planner]) -> None:
    """A slow loop over the ids of the plan, with every row's own number of keys."""
    near, tail, length = 4, 3, 30
    q, k, v = inputs(1, 2, queries=length, dim=4, kv_heads=1, dtype=torch.float64)
    mask = torch.rand(length, generator=seeded(4)) < 0.7 if masked else torch.ones(length, dtype=torch.bool)
    mask[0] = True
    est = nf.estimate(q, k, v, mask, is_causal=causal, enable_gqa=True, method=nf.TopK(near, tail, index), generator=seeded(3))
    ids = planners[0].plan(slice(0, 2 * length)).ids.view(2, length, -1)
    kept = mask.nonzero()[:, 0]
    logits = logits64(q, k)[0][..., kept]
    for head in range(2):
        for row in range(length):
            total = int(mask[: row + 1].sum()) if causal else len(kept)
            chosen = ids[head, row].tolist()
            used = [j for j in chosen if j >= 0]
            assert len(set(used)) == len(used) == min(total, near + tail), "distinct, and as many as there are"
            assert all(j < total for j in used), "only visible keys"
            expected, lse = estimate_by_hand(logits[head, row], v[0, 0, kept], chosen, near, total)
            torch.testing.assert_close(est.output[0, head, row], expected)
            assert float(est.lse[0, head, row]) == pytest.approx(lse)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("near", "tail"), [(1, 1), (3, 2), (3, 5), (5, 1)])
def test_both_sums_are_unbiased(near: int, tail: int, causal: bool) -> None:
    """Numerator and denominator over many draws, against their exact mean and variance (sampling without replacement)."""
    count, length = 3000, 12
    problem = inputs(1, 1, queries=length, dim=4, dtype=torch.float64)
    est = nf.estimate(*copies(problem, count), is_causal=causal, method=nf.TopK(near, tail), generator=seeded(5))
    logits = logits64(*problem[:2], causal=causal)[0, 0]
    columns = torch.cat([problem[2][0, 0], torch.ones(length, 1, dtype=torch.float64)], 1)
    sums = torch.cat([est.output[:, 0], torch.ones(count, length, 1, dtype=torch.float64)], 2) * est.lse[:, 0, :, None].exp()
    worst = 0.0
    for row in range(length):
        visible = row + 1 if causal else length
        terms = logits[row, :visible, None].exp() * columns[:visible]
        total, rest = terms.sum(0), terms[logits[row, :visible].argsort(descending=True)[near:]]
        left, drawn = len(rest), min(tail, len(rest))
        if left == drawn:
            torch.testing.assert_close(sums[:, row], total.expand(count, -1))
            continue
        spread = rest.var(0) * left**2 / drawn * (1 - drawn / left)
        z = (sums[:, row].mean(0) - total) / (spread / count).sqrt()
        worst = max(worst, float(z.abs().max()))
    assert worst < z_limit(length * columns.shape[1]), worst


@pytest.mark.parametrize("causal", [False, True])
def test_standard_error_is_calibrated_on_flat_inputs(causal: bool) -> None:
    """Root mean square error over root mean square standard error: 1, up to the bias of a ratio, which is O(1/tail)."""
    problem = synthetic.make("gaussian", 1, 1, 256, 16, dtype=torch.float64)
    q, k, v = copies(problem, 40)
    est = nf.estimate(q, k, v, is_causal=causal, method=nf.TopK(k=16, tail=48), generator=seeded(6))
    assert est.stderr is not None
    error = est.output - attention64(*problem, causal=causal)
    rows = slice(128, None)
    ratio = error[:, 0, rows].square().sum(-1).mean().sqrt() / est.stderr[:, 0, rows].square().mean().sqrt()
    assert 0.95 < float(ratio) < 1.05, float(ratio)


@pytest.mark.parametrize("causal", [False, True])
def test_standard_error_vanishes_at_full_budget(causal: bool) -> None:
    tensors = inputs(2, 2, queries=30, dim=4)
    for near, tail in ((1, 29), (10, 20), (10, 500), (30, 1), (99, 4)):
        est = nf.estimate(*tensors, is_causal=causal, method=nf.TopK(near, tail), generator=seeded(0))
        assert est.stderr is not None
        assert bool((est.stderr == 0).all())
    partial = nf.estimate(*tensors, is_causal=causal, method=nf.TopK(10, 5), generator=seeded(0)).stderr
    assert partial is not None
    if causal:
        assert bool((partial[:, :, :15] == 0).all()), "rows that see no more keys than are used"
        assert bool((partial[:, :, 15:] > 0).all())
    else:
        assert bool((partial > 0).all())


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout_p": 0.4},
    "negative-scale": {"scale": -0.7},
    "tail": {"tail": 2},
    "tail-causal": {"tail": 2, "causal": True},
    "tail-dropout": {"tail": 2, "dropout_p": 0.4},
    "tail-covers-all": {"tail": 9, "causal": True},
    "tail-everything": {"tail": 2, "causal": True, "padding": True, "dropout_p": 0.3, "heads": 4, "scale": 0.6},
    "kmeans-everything": {
        "index": nf.KMeansIndex(cells=3, probes=1), "tail": 2, "causal": True, "padding": True, "dropout_p": 0.3, "heads": 4,
    },
    "lsh-tail": {"index": nf.ConcentricLSH(rungs=2, tables=2), "tail": 2},
    "reference-backend": {"tail": 2, "causal": True, "backend": "reference"},
    "reference-dropout": {"tail": 2, "dropout_p": 0.3, "backend": "reference"},
    "cross-long": {"tail": 2, "keys": 9, "causal": True},
    "cross-short": {"tail": 1, "keys": 4, "causal": True},
    "exact-path": {"near": 50, "causal": True},
    "exact-method": {"near": None, "heads": 4, "padding": True},
    "exact-dropout": {"near": None, "heads": 4, "dropout_p": 0.4},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_gradcheck_with_the_plan_frozen(name: str) -> None:
    """The same generator state for every evaluation freezes plan and dropout mask, which the backward pass must share.

    Causal and padded rows and grouped heads without a tail: `test_no_tail_is_a_softmax_over_the_top_k` has their gradients.
    """
    it = {"near": 2, "tail": 0, "index": nf.ExactIndex(), "causal": False, "heads": 2, "padding": False, "keys": 6} | {
        "dropout_p": 0.0, "scale": None, "backend": "auto", **CONFIGURATIONS[name],
    }  # fmt: skip
    tensors = inputs(1, it["heads"], queries=6, keys=it["keys"], dim=2, value_dim=2, kv_heads=2, dtype=torch.float64, seed=11)
    mask = torch.arange(it["keys"]) != 1 if it["padding"] else None
    method = nf.Exact() if it["near"] is None else nf.TopK(it["near"], it["tail"], it["index"])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nf.attention(
            q, k, v, mask, it["dropout_p"], it["causal"], it["scale"], True,
            method=method, generator=seeded(7), backend=it["backend"],
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, [x.requires_grad_() for x in tensors])


DROPPING = {"topk": nf.TopK(k=20), "tail": nf.TopK(k=8, tail=8), "everything": nf.TopK(k=64), "exact": nf.Exact()}
dropping = pytest.mark.parametrize("method", DROPPING.values(), ids=DROPPING)


@pytest.mark.parametrize("method", [nf.TopK(k=5), nf.TopK(k=24), nf.Exact()], ids=["topk", "everything", "exact"])
def test_dropout_does_not_change_the_mean(method: Any) -> None:
    """Mean over many masks, against the output without dropout and the exact variance p/(1-p) sum_j w_j^2 v_j^2."""
    count, p = 4000, 0.3
    problem = inputs(1, 1, queries=6, keys=24, dim=4, dtype=torch.float64)
    dropped = nf.attention(*copies(problem, count), dropout_p=p, method=method, generator=seeded(8))
    weights = nf.attention(*problem[:2], torch.eye(24, dtype=torch.float64)[None, None], method=method)[0, 0]
    expected = weights @ problem[2][0, 0]
    spread = p / (1 - p) * weights.square() @ problem[2][0, 0].square()
    z = (dropped[:, 0].mean(0) - expected) / (spread / count).sqrt()
    assert float(z.abs().max()) < z_limit(z.numel())


@dropping
def test_dropout_comes_after_normalisation(method: Any) -> None:
    """With V = 1 an undropped denominator shows: single outputs differ from 1, their mean does not."""
    q, k, _ = inputs(2, 2, queries=100, dim=4, dtype=torch.float64)
    ones = torch.ones(2, 2, 100, 1, dtype=torch.float64)
    out = nf.attention(q, k, ones, dropout_p=0.5, method=method, generator=seeded(9))
    assert float(((out - 1).abs() > 1e-6).double().mean()) > 0.95
    weights = out.flatten()
    z = (weights.mean() - 1) / (weights.std() / weights.numel() ** 0.5)
    assert abs(float(z)) < z_limit(1)


@dropping
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_a_fraction_and_scales_it(p: float, method: Any) -> None:
    q, k, _ = inputs(1, 2, queries=64, dim=4, dtype=torch.float64)
    eye = torch.eye(64, dtype=torch.float64).expand(1, 2, -1, -1)
    weights = nf.attention(q, k, eye, method=method, generator=seeded(3))
    dropped = nf.attention(q, k, eye, dropout_p=p, method=method, generator=seeded(3))
    used = weights > 0
    kept = (dropped > 0)[used]
    torch.testing.assert_close(dropped[used][kept], weights[used][kept] / (1 - p))
    assert bool((dropped[~used] == 0).all())
    z = (kept.double().mean() - (1 - p)) / (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(float(z)) < z_limit(1)


@dropping
def test_dropout_differs_between_heads_and_calls(method: Any) -> None:
    q, k, v = inputs(1, 1, queries=64, dim=4)
    q, k, v = (x.expand(2, 3, -1, -1) for x in (q, k, v))
    torch.manual_seed(0)
    first, second = (nf.attention(q, k, v, dropout_p=0.5, method=method) for _ in range(2))
    assert not torch.equal(first, second), "the next call must draw another mask"
    flat = first.flatten(0, 1)
    for i in range(6):
        for j in range(i):
            assert not torch.equal(flat[i], flat[j])


def test_heads_draw_different_tails(planners: list[_Planner]) -> None:
    """The same problem in every head, batch entry and group member: if two shared a seed, their draws would be the same."""
    q, k, v = inputs(1, 1, queries=40, dim=4)
    q, k, v = q.expand(2, 6, -1, -1), k.expand(2, 3, -1, -1), v.expand(2, 3, -1, -1)
    nf.attention(q, k, v, enable_gqa=True, method=nf.TopK(k=4, tail=3), generator=seeded(0))
    ids = planners[0].plan(slice(0, 80)).ids.view(6, 2, 40, 7)
    near, drawn = ids[..., :4].flatten(0, 1), ids[..., 4:].sort(-1).values.flatten(0, 1)
    assert bool((near == near[:1]).all())
    # Two heads agree on a row's 3 of 36 keys with probability 1/7140, so on more than 3 of 40 rows hardly ever.
    for i in range(12):
        for j in range(i):
            assert int((drawn[i] == drawn[j]).all(-1).sum()) <= 3


def test_blocks_draw_different_tails(monkeypatch: pytest.MonkeyPatch, planners: list[_Planner]) -> None:
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 4000)
    q, k, v = inputs(1, 1, queries=1, keys=40, dim=4)
    q = q.expand(-1, -1, 60, -1)
    nf.attention(q, k, v, method=nf.TopK(k=4, tail=3), generator=seeded(0))
    blocks = list(planners[0].blocks())
    assert len(blocks) > 4
    drawn = [planners[0].plan(block).ids[0, :, 4:].sort(-1).values for block in blocks]
    for x in drawn[1:-1]:
        assert int((x == drawn[0]).all(-1).sum()) <= 1


def test_blocks_do_not_change_what_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = inputs(2, 4, queries=50, dim=4, kv_heads=2, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 50, generator=seeded(1)) < 0.7
    upstream = torch.randn(2, 4, 50, 4, generator=seeded(2), dtype=torch.float64)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Dropout is a function of (row, key), so it may not depend on the blocks either.
        return nf.attention(q, k, v, mask, 0.3, True, enable_gqa=True, method=nf.TopK(k=5), generator=seeded(0))

    whole = gradients(run, tensors, upstream)
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 5000)
    parts = gradients(run, tensors, upstream)
    torch.testing.assert_close(parts[0], whole[0])
    for x, y in zip(parts[1], whole[1], strict=True):
        torch.testing.assert_close(x, y)


INDICES = {
    "exact": nf.ExactIndex(),
    "kmeans": nf.KMeansIndex(cells=5, probes=2),
    "lsh": nf.ConcentricLSH(rungs=2, tables=2),
}


def global_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tail", [0, 4])
@pytest.mark.parametrize("index", INDICES)
def test_same_generator_state_same_result(index: str, tail: int, causal: bool, dropout_p: float) -> None:
    tensors = inputs(2, 4, queries=24, dim=4, kv_heads=2)
    upstream = torch.randn(2, 4, 24, 4, generator=seeded(1))
    method = nf.TopK(k=5, tail=tail, index=INDICES[index])

    def run(q: Tensor, k: Tensor, v: Tensor, seed: int = 5) -> Tensor:
        return nf.attention(q, k, v, None, dropout_p, causal, enable_gqa=True, method=method, generator=seeded(seed))

    before = global_states()
    first, first_grads = gradients(run, tensors, upstream)
    for _ in range(3):
        again, again_grads = gradients(run, tensors, upstream)
        assert torch.equal(again, first)
        for x, y in zip(again_grads, first_grads, strict=True):
            assert torch.equal(x, y)
    assert global_states() == before, "the generator is an argument"
    other = run(*tensors, seed=6)
    assert torch.equal(other, first) == (tail == 0 and dropout_p == 0.0)


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=5), nf.TopK(k=50, tail=4)], ids=["exact", "topk", "all-near"])
def test_deterministic_methods_draw_nothing(method: Any) -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 2, queries=24, dim=4)]
    generator = seeded(0)
    before = global_states(), generator.get_state().tolist()
    nf.attention(*leaves, method=method).sum().backward()
    nf.estimate(*leaves, method=method, generator=generator)
    assert (global_states(), generator.get_state().tolist()) == before


@pytest.mark.parametrize(
    ("method", "dropout_p"),
    [(nf.TopK(k=5, tail=4), 0.0), (nf.TopK(k=5), 0.2), (nf.Exact(), 0.2), (nf.TopK(k=5, tail=4), 0.2)],
)
def test_random_methods_draw_one_number(method: Any, dropout_p: float) -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 2, queries=24, dim=4)]
    high = torch.iinfo(torch.int64).max
    expected = seeded(0)
    torch.randint(high, (), generator=expected)
    generator = seeded(0)
    before = global_states()
    nf.attention(*leaves, dropout_p=dropout_p, method=method, generator=generator).sum().backward()
    assert torch.equal(generator.get_state(), expected.get_state())
    assert global_states() == before
    torch.manual_seed(0)
    nf.attention(*leaves, dropout_p=dropout_p, method=method).sum().backward()
    assert torch.equal(torch.get_rng_state(), expected.get_state()), "without one, torch's default generator"


def test_dropout_follows_a_generator_the_same_way_as_the_default_one() -> None:
    tensors = inputs(1, 2, queries=24, dim=4)
    for method in (nf.Exact(), nf.TopK(k=5, tail=4)):
        torch.manual_seed(12)
        implicit = nf.attention(*tensors, dropout_p=0.5, method=method)
        assert torch.equal(implicit, nf.attention(*tensors, dropout_p=0.5, method=method, generator=seeded(12)))


MEMORY = """
import torch
import nearfield as nf
torch.set_num_threads(1)

def peak():
    # Not resource.getrusage, whose peak includes that of the parent process.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024

def run(length):
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    nf.attention(q, k, v, is_causal=True, method=nf.TopK(k=32, tail=32)).sum().backward()

run(300)
before = peak()
run(20_000)
print(peak() - before)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_memory_is_bounded() -> None:
    """20,000 keys: the logits alone would be 1,600 MB, and so would the weights."""
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    assert 10 < float(done.stdout) < 300, f"{done.stdout} MB"


def test_causal_mask_by_hand_is_aligned_at_the_first_key() -> None:
    """What the tests of this file compare with."""
    assert causal_mask(2, 4).tolist() == [[True, False, False, False], [True, True, False, False]]

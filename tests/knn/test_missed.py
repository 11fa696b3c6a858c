"""The measured slack of an index is that of its rows, and telling it to lazy draws makes them exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws import assert_frequencies, seeded
from own_indices import OwnIndex, Skipping
from torch import Tensor

import nearfield as nf
from nearfield.knn.index.own import build_index

LENGTH, K = 300, 12
INDICES = {
    "exact": nf.ExactIndex(),
    "k-means": nf.KMeansIndex(cells=16, probes=1),
    "LSH": nf.ConcentricLSH(),
    "faiss": nf.FaissIndex("IVF8,Flat", nprobe=1),
    "own": OwnIndex(),
    "skipping": Skipping(3),
}


def inputs(seed: int, batch: int = 2, rows: int = 40) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    return torch.randn(batch, LENGTH, 6, generator=generator), 2 * torch.randn(batch, rows, 6, generator=generator)


def by_hand(index: nf.Index, keys: Tensor, queries: Tensor, offset: int | None) -> Tensor:
    """The slack of every row, one at a time."""
    scaled = queries / 6**0.5
    scores, ids = build_index(index, keys).search(scaled, K, offset)
    found = torch.zeros(*ids.shape[:2], dtype=torch.float64)
    for b, r in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        seen = LENGTH if offset is None else r + offset + 1
        near = [key for key in ids[b, r].tolist() if key >= 0]
        left = [key for key in range(seen) if key not in near]
        if near and left:
            best = max(float(keys[b, key].double() @ scaled[b, r].double()) for key in left)
            found[b, r] = max(0.0, best - min(scores[b, r, : len(near)].tolist()))
    return found


@pytest.mark.parametrize("offset", [None, 100])
@pytest.mark.parametrize("name", INDICES)
def test_slack_by_hand(name: str, offset: int | None) -> None:
    if name == "faiss":
        pytest.importorskip("faiss")
    keys, queries = inputs(0, rows=15)
    found = nf.index.slack(INDICES[name], keys=keys, queries=queries, k=K, rows=15, causal_offset=offset)
    torch.testing.assert_close(found.per_row, by_hand(INDICES[name], keys, queries, offset), atol=1e-6, rtol=1e-6)
    assert found.share == 1.0
    assert found.largest == float(found.per_row.max())
    if offset is None:
        assert (found.largest > 0.1) == (name in ("k-means", "faiss", "skipping"))
    if name in ("exact", "own"):
        assert found.largest < 1e-6


def test_some_rows_at_random() -> None:
    keys, queries = inputs(1)
    everything = nf.index.slack(INDICES["skipping"], keys=keys, queries=queries, k=K, rows=100)
    one, two, other = (
        nf.index.slack(INDICES["skipping"], keys=keys, queries=queries, k=K, rows=9, generator=seeded(s)) for s in (1, 1, 2)
    )
    assert one.chosen.shape == one.per_row.shape == (2, 9)
    assert torch.equal(one.chosen, two.chosen)
    assert not torch.equal(one.chosen, other.chosen)
    assert not torch.equal(one.chosen[0], one.chosen[1])
    torch.testing.assert_close(one.per_row, everything.per_row.gather(1, one.chosen))
    assert one.share == pytest.approx(0.05 ** (1 / 18))
    assert "which bounds 84.7% of all rows" in str(one)
    assert "bounds" not in str(everything)


def test_quantiles_are_measured_slacks() -> None:
    keys, queries = inputs(2)
    found = nf.index.slack(INDICES["skipping"], keys=keys, queries=queries, k=K, rows=40)
    for q in (0.5, 0.9):
        assert float((found.per_row <= found.quantile(q)).double().mean()) >= q
        assert found.quantile(q) in found.per_row.flatten().tolist()
    assert found.quantile(0.5) < found.quantile(0.9) < found.largest


def test_the_unit_is_that_of_the_logits() -> None:
    keys, queries = inputs(3)
    plain = nf.index.slack(INDICES["skipping"], keys=keys, queries=queries, k=K, rows=40)
    scaled = nf.index.slack(INDICES["skipping"], keys=keys, queries=queries, k=K, rows=40, scale=3 * 6**-0.5)
    torch.testing.assert_close(scaled.per_row, 3 * plain.per_row, rtol=1e-5, atol=1e-6)
    heads = nf.index.slack(INDICES["skipping"], keys=keys[:, None], queries=queries[:, None], k=K, rows=40)
    torch.testing.assert_close(heads.per_row, plain.per_row)


@pytest.mark.usefixtures("lazy_draws")
@pytest.mark.parametrize("name", ["k-means", "skipping"])
def test_a_measured_slack_makes_draws_exact(name: str) -> None:
    keys, queries = inputs(4, batch=1, rows=3)
    queries = queries / 3
    slack = nf.index.slack(INDICES[name], keys=keys, queries=queries, k=40, rows=3).largest
    assert slack > 0.5
    how: dict[str, Any] = {"k": 40, "certify": False, "always_lazy": True, "generator": seeded(5)}
    found = nf.sample(queries, keys, 20_000, INDICES[name], slack=slack, **how)
    assert bool(found.certified.all())
    assert not bool(found.dense.any())
    for drawn, expected in zip(found.ids[0], (queries @ keys.mT / 6**0.5)[0].double().softmax(-1), strict=True):
        assert_frequencies(drawn.bincount(minlength=LENGTH), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"index": nf.ExactIndex}, TypeError, "^index must"),
        ({"k": 0}, ValueError, "^k must"),
        ({"rows": 0}, ValueError, "^rows must"),
        ({"scale": float("inf")}, ValueError, "^scale must"),
        ({"generator": 3}, TypeError, "^generator must"),
        ({"keys": None}, TypeError, "^keys must"),
        ({"queries": torch.ones(2, 5, 6, dtype=torch.long)}, TypeError, "^queries must"),
        ({"queries": torch.ones(6)}, ValueError, "^queries must"),
        ({"queries": torch.ones(3, 5, 6)}, ValueError, "^queries must"),
        ({"queries": torch.ones(2, 5, 7)}, ValueError, "^queries must"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    keys, queries = inputs(5)
    with pytest.raises(error, match=message):
        nf.index.slack(**{"index": nf.ExactIndex(), "keys": keys, "queries": queries, "k": K, **arguments})


def test_nothing_to_measure() -> None:
    for keys, queries in ((torch.randn(2, 0, 4), torch.randn(2, 3, 4)), (torch.randn(2, 9, 4), torch.randn(2, 0, 4))):
        assert nf.index.slack(nf.ExactIndex(), keys=keys, queries=queries, k=3).largest == 0.0

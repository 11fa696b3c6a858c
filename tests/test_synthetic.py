"""The input families: shapes, determinism, and that each stresses what it says."""

from __future__ import annotations

import pytest
import torch

from nearfield.synthetic import FAMILIES, make


def logits(family: str, length: int = 512, dim: int = 64) -> torch.Tensor:
    q, k, _ = make(family, 1, 2, length, dim, dtype=torch.float64)
    return q @ k.mT / dim**0.5


def top_share(family: str, count: int) -> float:
    """Mean softmax mass of the `count` largest weights of a row."""
    return logits(family).softmax(-1).topk(count).values.sum(-1).mean().item()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "length", "dim"), [(2, 6, 2, 33, 8), (1, 3, None, 1, 16), (1, 4, 1, 2, 1)]
)
def test_shapes(family: str, batch: int, heads: int, kv_heads: int | None, length: int, dim: int) -> None:
    q, k, v = make(family, batch, heads, length, dim, kv_heads=kv_heads)
    assert q.shape == (batch, heads, length, dim)
    assert k.shape == v.shape == (batch, kv_heads or heads, length, dim)
    for x in (q, k, v):
        assert x.isfinite().all()
        assert x.is_contiguous()


@pytest.mark.parametrize("family", FAMILIES)
def test_deterministic_and_global_generator_untouched(family: str) -> None:
    before = torch.random.get_rng_state()
    first = make(family, 1, 2, 40, 8, seed=3)
    again = make(family, 1, 2, 40, 8, seed=3)
    other = make(family, 1, 2, 40, 8, seed=4)
    assert torch.equal(before, torch.random.get_rng_state())
    for x, y, z in zip(first, again, other, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, z)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_dtype_only_rounds(family: str, dtype: torch.dtype) -> None:
    for x, y in zip(make(family, 1, 1, 64, 16), make(family, 1, 1, 64, 16, dtype=dtype), strict=True):
        assert y.dtype == dtype
        assert torch.equal(x.to(dtype), y)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_differ(family: str) -> None:
    for x in make(family, 2, 2, 16, 8):
        assert not torch.equal(x[0, 0], x[0, 1])
        assert not torch.equal(x[0, 0], x[1, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_documented(family: str) -> None:
    docstring = FAMILIES[family].__doc__
    assert docstring is not None
    assert "\n" not in docstring.strip()


def test_there_are_eight() -> None:
    assert len(FAMILIES) == 8


def test_gaussian_is_flat_and_sharp_is_sharp() -> None:
    assert logits("gaussian").std().item() == pytest.approx(1.0, rel=0.05)
    assert logits("sharp").std().item() == pytest.approx(6.0, rel=0.05)
    assert top_share("gaussian", 8) < 0.2
    assert top_share("sharp", 8) > 0.9


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_clustered_mass_lies_in_one_cluster(dim: int) -> None:
    weights = logits("clustered", 1024, dim).softmax(-1)
    cluster = weights.topk(48).values.sum(-1).mean().item()
    single = weights.topk(1).values.sum(-1).mean().item()
    assert cluster > 0.6
    assert single < 0.4


def test_heavy_tails() -> None:
    for x in make("heavy_tailed", 1, 1, 4096, 64)[1:]:
        norms = x.norm(dim=-1)
        assert norms.max() > 8 * norms.median()


def test_mixture_spans_flat_and_sharp_rows() -> None:
    spread = logits("mixture_of_scales").std(-1)
    assert spread.min() < 0.4
    assert spread.max() > 5


def test_local_weights_are_recent() -> None:
    weights = logits("local").softmax(-1)
    near = torch.ones(512, 512, dtype=torch.bool).triu(-32).tril(32)
    assert (weights * near).sum(-1).mean() > 0.5


def test_local_keys_have_unit_variance() -> None:
    key = make("local", 1, 2, 8192, 32)[1]
    assert key.var().item() == pytest.approx(1.0, rel=0.1)


def test_duplicates_repeat_exactly() -> None:
    key, value = make("duplicates", 1, 1, 1024, 16)[1:]
    assert len(key[0, 0].unique(dim=0)) <= 32
    assert len(value[0, 0].unique(dim=0)) == 1024


@pytest.mark.parametrize("dim", [8, 64])
def test_anisotropic_keys_share_a_mean_and_few_directions(dim: int) -> None:
    q, key, _ = make("anisotropic", 1, 1, 2048, dim, dtype=torch.float64)
    centred = key - key.mean(2, keepdim=True)
    assert key.mean(2).norm() > 2 * centred.norm(dim=-1).mean()
    variance = torch.linalg.svdvals(centred[0, 0]).square()
    assert variance[:4].sum() > 0.8 * variance.sum()
    assert (q @ centred.mT / dim**0.5).std().item() == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "nope"}, "family must be one of gaussian"),
        ({"length": 0}, "length must be a positive integer, got 0"),
        ({"dim": 2.5}, "dim must be a positive integer, got 2.5"),
        ({"batch": True}, "batch must be a positive integer, got True"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads must divide heads=4, got 3"),
        ({"heads": 4, "kv_heads": 0}, "kv_heads must divide heads=4, got 0"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**({"family": "gaussian", "batch": 1, "heads": 2, "length": 4, "dim": 4} | change))

"""What a method is asked and what it answers: built-in ones keep the contract, and a user's own works wherever they do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import QKV, attention64, causal_mask, gradients, inputs, logits64, seeded
from torch import Tensor

import nearfield as nf
from nearfield.problem import check
from nearfield.sampling import Seeds

BUILT_IN: dict[str, Any] = {
    "exact": nf.Exact(),
    "auto": nf.Auto(),
    "auto-cells": nf.Auto(crossover=4),
    "auto-eps": nf.Auto(eps=0.5, crossover=4),
    "cells": nf.Cells(cell_size=2, probes=2, segment=4, sinks=1),
    "cells-samples": nf.Cells(cell_size=2, probes=2, segment=4, sinks=1, samples=3),
    "topk": nf.TopK(k=4),
    "tail": nf.TopK(k=3, tail=3),
    "topk-all": nf.TopK(k=99),
    "gumbel": nf.LazyGumbel(draws=9),
}


@pytest.mark.parametrize("gradient", [None, nf.gradients.RandomWalk(walks=4)], ids=["own", "walk"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", BUILT_IN)
def test_outcomes_have_the_shapes_of_the_contract(name: str, causal: bool, gradient: Any) -> None:
    q, k, v = inputs(2, 3, 4, queries=11, keys=13, dim=4, value_dim=6, kv_heads=2)
    problem = check(q, k, v, torch.rand(3, 1, 1, 13, generator=seeded(2)) < 0.8, is_causal=causal, enable_gqa=True)
    method = BUILT_IN[name]
    for diagnostics in (False, True):
        outcome = method.run(problem, nf.Call(Seeds(seeded(0), q.device), gradient=gradient, diagnostics=diagnostics))
        assert outcome.output.shape == (6, 4, 11, 6)
        for x in (outcome.lse, outcome.stderr):
            assert x is None or x.shape == (6, 4, 11)
        assert outcome.lse is not None or not diagnostics
    assert outcome.info["keys_per_query"] > 0
    assert method.any_mask is (name in ("exact", "auto", "auto-cells", "auto-eps"))
    assert method.is_async(problem, "auto") is False, "nothing waits for a CPU"


def softmax_of(problem: nf.Problem, call: nf.Call) -> nf.Outcome:
    """Exact attention as a user may write it."""
    rows = problem.rows
    hidden = torch.arange(rows.length) >= rows.visible[..., None]
    logits = (rows.queries @ rows.keys.mT).masked_fill(hidden, -torch.inf)
    weights = logits.softmax(-1).masked_fill(hidden, 0.0)
    return nf.Outcome(problem.by_head(weights @ rows.values), problem.by_head(logits.logsumexp(-1)), info={"mine": True})


class Subclass(nf.Method):
    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        return softmax_of(problem, call)


class Duck:
    any_mask = False

    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        return softmax_of(problem, call)

    def is_async(self, problem: nf.Problem, backend: str) -> bool:
        return False

    def __len__(self) -> int:
        return 0  # what is false is a method all the same


OWN = {"subclass": Subclass(), "duck": Duck()}
own = pytest.mark.parametrize("method", OWN.values(), ids=OWN)


@pytest.mark.parametrize("causal", [False, True])
@own
def test_own_methods(method: Any, causal: bool) -> None:
    tensors = inputs(2, 4, queries=9, keys=12, dim=4, value_dim=6, kv_heads=2, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 12, generator=seeded(5)) < 0.7
    mask[0, ..., 0] = False  # so that a causal row sees nothing
    options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": True}
    combined = mask & causal_mask(9, 12) if causal else mask
    upstream = torch.randn(2, 4, 9, 6, generator=seeded(1), dtype=torch.float64)
    true, true_grads = gradients(lambda q, k, v: attention64(q, k, v, combined), tensors, upstream)
    got, grads = gradients(lambda q, k, v: nf.attention(q, k, v, method=method, **options), tensors, upstream)
    torch.testing.assert_close(got, true)
    torch.testing.assert_close(grads, true_grads)
    est = nf.estimate(*tensors, method=method, audit=20, generator=seeded(0), **options)
    torch.testing.assert_close(est.output, true)
    torch.testing.assert_close(est.lse, logits64(*tensors[:2], combined).logsumexp(-1))
    assert est.stderr is None
    assert est.audit is not None
    assert est.audit.additive < 1e-12
    assert est.info["mine"]
    assert type(method).__name__ in est.info["method"]


@own
def test_own_methods_with_another_gradient(method: Any) -> None:
    """`gradient=` does not look at the method of the forward pass."""
    tensors = inputs(1, 2, queries=9, dim=4, dtype=torch.float64)
    walk = nf.gradients.RandomWalk(walks=8)
    upstream = torch.randn(1, 2, 9, 4, generator=seeded(1), dtype=torch.float64)

    def run(method: Any) -> tuple[Tensor, QKV]:
        options = {"method": method, "gradient": walk, "generator": seeded(3)}
        return gradients(lambda q, k, v: nf.attention(q, k, v, **options), tensors, upstream)

    (mine, my_grads), (exact, exact_grads) = run(method), run(nf.Exact())
    torch.testing.assert_close(mine, exact)
    assert all(torch.equal(x, y) for x, y in zip(my_grads, exact_grads, strict=True))


@own
def test_own_methods_in_modules_and_models(method: Any) -> None:
    layer = nf.nn.Attention(16, 4, num_kv_heads=2, method=method)
    exact = nf.nn.Attention(16, 4, num_kv_heads=2, method=nf.Exact())
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 10, 16, generator=seeded(0))
    torch.testing.assert_close(layer(x, is_causal=True)[0], exact(x, is_causal=True)[0])

    transformers = pytest.importorskip("transformers")
    from nearfield import hf

    seen = []

    class Counted(type(method)):  # type: ignore[misc]
        def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
            seen.append(problem.query.shape)
            return super().run(problem, call)

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **sizes)).eval()
    ids = torch.randint(50, (2, 12), generator=seeded(0))
    with torch.no_grad():
        expected = model(ids).logits
        hf.register("nearfield-own-method", Counted())
        model.set_attn_implementation("nearfield-own-method")
        torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=1e-5)
    assert seen == [(2, 4, 12, 8)] * 2


@pytest.mark.parametrize(
    ("attributes", "missing"), [((), "any_mask and no is_async"), (("any_mask",), "is_async"), (("is_async",), "any_mask")]
)
def test_methods_that_lack_something(attributes: tuple[str, ...], missing: str) -> None:
    method = type("Bare", (), {name: getattr(Duck, name) for name in ("run", *attributes)})()
    message = rf"method=.*Bare object.* has no {missing}; subclass nearfield\.Method"
    tensors = inputs(1, 1, queries=4)
    for call in (nf.attention, nf.estimate):
        with pytest.raises(TypeError, match=message):
            call(*tensors, method=method)
    with pytest.raises(TypeError, match=message):
        nf.nn.Attention(8, 2, method=method)
    pytest.importorskip("transformers")
    from nearfield import hf

    with pytest.raises(TypeError, match=message):
        hf.register("nearfield-bare", method)


def test_own_methods_and_general_masks() -> None:
    """Refused unless the method says that it honours them; then it is given the mask."""
    tensors = inputs(2, 4, queries=6, keys=9, dtype=torch.float64)
    mask = torch.randn(2, 4, 6, 9, generator=seeded(4), dtype=torch.float64)
    with pytest.raises(ValueError, match="Subclass honours only boolean key-padding masks"):
        nf.attention(*tensors, mask, method=Subclass())

    class Masked(nf.Method):
        any_mask = True

        def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
            assert problem.attn_mask is not None
            logits = problem.query @ problem.key.mT * problem.scale + problem.attn_mask
            return nf.Outcome(logits.softmax(-1) @ problem.value)

    torch.testing.assert_close(nf.attention(*tensors, mask, method=Masked()), attention64(*tensors, mask))


WRONG: dict[str, tuple[Any, str]] = {
    "rows": (lambda p: (p.rows.queries, None), r"output has shape \(2, 4, 9, 8\), got \(4, 18, 8\)"),
    "too few rows": (lambda p: (p.query[:, :, 1:], None), r"output has shape \(2, 4, 9, 8\), got \(2, 4, 8, 8\)"),
    "lse": (lambda p: (p.query, p.visible), r"lse has shape \(2, 4, 9\), got \(4, 18\)"),
    "no lse": (lambda p: (p.query, None), "with lse where call.diagnostics is set, got None"),
}


def test_methods_that_return_a_tensor() -> None:
    class Wrong(Subclass):
        def run(self, problem: nf.Problem, call: nf.Call) -> Any:
            return problem.query

    with pytest.raises(TypeError, match=r"Wrong object.*run must return a nearfield\.Outcome, got Tensor"):
        nf.attention(*inputs(1, 1, queries=4), method=Wrong())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_of_own_methods(name: str) -> None:
    answer, message = WRONG[name]

    class Wrong(Subclass):
        def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
            return nf.Outcome(*answer(problem))

    tensors = inputs(2, 4, queries=9, dim=8, kv_heads=2)
    with pytest.raises(ValueError, match=f"Wrong object.*run must return an Outcome .*{message}"):
        nf.estimate(*tensors, enable_gqa=True, method=Wrong())
    if name == "no lse":
        assert torch.equal(nf.attention(*tensors, enable_gqa=True, method=Wrong()), tensors[0]), "only estimates need one"
    else:
        with pytest.raises(ValueError, match=message):
            nf.attention(*tensors, enable_gqa=True, method=Wrong())

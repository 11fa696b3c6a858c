"""`nn.Attention(gradient=...)`: a module that is trained with estimated gradients."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nearfield as nf
from nearfield.nn import Attention
from nearfield.paper.gradients import PrintedWalk, RandomWalk

WALK = RandomWalk(walks=3)
X = torch.randn(2, 9, 12, generator=torch.Generator().manual_seed(0))


def layer(gradient: Any = WALK, **options: Any) -> Attention:
    torch.manual_seed(1)
    return Attention(12, 4, gradient=gradient, **options)


def trained(module: nn.Module, seed: int = 2, x: Tensor = X) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    output = module(x, is_causal=True)[0]
    return [output.detach(), *torch.autograd.grad(output.float().square().sum(), [x, *module.parameters()])]


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("method", [None, nf.Exact(), nf.TopK(k=3, tail=2), nf.LazyGumbel(draws=5)], ids=repr)
def test_a_module_is_its_functional_form(method: Any, dropout: float) -> None:
    ours = layer(dropout=dropout, method=method)
    x = X.clone().requires_grad_()
    torch.manual_seed(2)
    q, k, v = (p(x).unflatten(-1, (4, 3)).transpose(1, 2) for p in (ours.q_proj, ours.k_proj, ours.v_proj))
    output = nf.attention(q, k, v, None, dropout, True, method=method, gradient=WALK)
    output = ours.out_proj(output.transpose(1, 2).flatten(2))
    want = [output, *torch.autograd.grad(output.square().sum(), [x, *ours.parameters()])]
    assert same(trained(ours), want)
    ours.gradient = RandomWalk(walks=4)
    got = trained(ours)
    assert torch.equal(got[0], want[0]), "the forward pass does not depend on the walks"
    assert not torch.equal(got[1], want[1]), "it may be changed at any time"


def test_the_seed_of_torch_makes_training_repeatable() -> None:
    ours = layer(dropout=0.3)
    assert same(trained(ours), trained(ours))
    other = trained(ours, seed=3)
    assert not any(torch.equal(a, b) for a, b in zip(trained(ours)[:-1], other[:-1], strict=True))
    one, two = (ours(X, generator=torch.Generator().manual_seed(5))[0] for _ in range(2))
    assert torch.equal(one, two)


def test_the_gradient_is_kept_and_shown() -> None:
    walk = PrintedWalk(eps=0.5, walks=7)
    ours = layer(walk, dropout=0.2, method=nf.TopK(k=3))
    assert ours.extra_repr().endswith(f"dropout=0.2, method={nf.TopK(k=3)!r}, gradient={walk!r}")
    assert "gradient" not in layer(None).extra_repr()
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for twin in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert twin.gradient == walk
        assert same(trained(twin), trained(ours))
    theirs = nn.MultiheadAttention(12, 4, batch_first=True)
    assert Attention.from_torch(theirs, gradient=walk).gradient == walk


@pytest.mark.parametrize("wrong", ["walks", RandomWalk, 3])
def test_a_wrong_gradient_is_refused_when_the_module_is_made(wrong: Any) -> None:
    with pytest.raises(TypeError, match="gradient must be a gradient such as"):
        layer(wrong)


def test_masks_beyond_padding_are_refused() -> None:
    ours = layer(method=nf.Exact())
    hidden = torch.zeros(9, 9, dtype=torch.bool)
    hidden[2, 1] = True
    with pytest.raises(ValueError, match=r"honours only boolean key-padding masks.* use gradient=None"):
        ours(X, attn_mask=hidden)
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 5:] = True
    ours(X, key_padding_mask=padding)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in ours.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_other_dtypes_and_autocast(dropout: float) -> None:
    ours = layer(dropout=dropout)
    exact = trained(ours.double(), x=X.double())
    assert all(x.dtype == torch.float64 for x in exact)
    low = trained(copy.deepcopy(ours).bfloat16(), x=X.bfloat16())
    assert all(x.dtype == torch.bfloat16 for x in low)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = trained(ours.float())
    assert mixed[0].dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in mixed[1:])
    for name, found in (("bfloat16", low), ("autocast", mixed)):
        # The same mask, but logits are rounded and some walks end elsewhere.
        assert float((found[0].double() - exact[0]).norm() / exact[0].norm()) < 0.03, name
        assert all(x.isfinite().all() for x in found)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=3, tail=2), nf.LazyGumbel(draws=5)], ids=repr)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_checkpointing_walks_the_same_way_again(dropout: float, method: Any, reentrant: bool) -> None:
    """Both for this layer and for whatever draws numbers after it."""
    block = nn.Sequential(Only(layer(dropout=dropout, method=method)), nn.Dropout(0.5), Only(layer(method=method)))

    def run(through_checkpoint: bool) -> list[Tensor]:
        torch.manual_seed(4)
        x = X.clone().requires_grad_()
        output = checkpoint(block, x, use_reentrant=reentrant) if through_checkpoint else block(x)
        block.zero_grad()
        output.square().sum().backward()
        assert x.grad is not None
        return [output, x.grad, *(p.grad for p in block.parameters() if p.grad is not None), torch.rand(3)]

    assert same(run(True), run(False))


class Only(nn.Module):
    """The output of an attention module, without its weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x, is_causal=True)[0]


@pytest.mark.long
def test_a_compiled_module_breaks_its_graph_or_says_why() -> None:
    ours = layer(dropout=0.3)
    want = trained(ours)
    torch.compiler.reset()
    assert same(trained(torch.compile(ours, backend="eager")), want)  # type: ignore[arg-type]
    torch.compiler.reset()
    with pytest.raises(RuntimeError, match=r"gradient= cannot be traced by torch\.compile"):
        trained(torch.compile(ours, backend="eager", fullgraph=True))  # type: ignore[arg-type]
    torch.compiler.reset()

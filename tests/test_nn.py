"""`nearfield.nn.Attention` is `torch.nn.MultiheadAttention`, computed by a method."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from laws import assert_follows
from scipy import stats
from torch import Tensor, nn

import nearfield as nf
from nearfield.nn import Attention

BATCH, QUERIES, KEYS, EMBED, HEADS = 2, 7, 5, 12, 4
EXACT = nf.Exact()


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def randomise(module: Any) -> Any:
    """Move every parameter away from its initial value: zero biases would hide mistakes."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / 3)
    return module


def torch_module(**options: Any) -> nn.MultiheadAttention:
    return randomise(nn.MultiheadAttention(EMBED, HEADS, **{"batch_first": True, "dtype": torch.float64} | options))


def encoder_layer(**options: Any) -> nn.TransformerEncoderLayer:
    return randomise(nn.TransformerEncoderLayer(EMBED, HEADS, 16, batch_first=True, dtype=torch.float64, **options))


def hides(*shape: int, seed: int = 3) -> Tensor:
    """A random boolean mask that leaves every row its first key."""
    mask = normal(*shape, seed=seed) > 0
    mask[..., 0] = False
    return mask


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)


def outcome(module: nn.Module, tensors: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs and parameters, under the names of `Attention`."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    output, weights = module(*(leaves * 3 if len(leaves) == 1 else leaves), need_weights=False, **options)
    assert weights is None
    named = {f"input {i}": x for i, x in enumerate(leaves)} | dict(module.named_parameters())
    grads = torch.autograd.grad(output, list(named.values()), normal(*output.shape, seed=9))
    return {"output": output} | Attention.state_dict_from_torch(dict(zip(named, grads, strict=True)))


def assert_same(ours: Attention, theirs: nn.MultiheadAttention, tensors: list[Tensor], **options: Any) -> None:
    torch.testing.assert_close(outcome(ours, tensors, **options), outcome(theirs, tensors, **options))


CROSS = [normal(BATCH, QUERIES, EMBED, seed=10), normal(BATCH, KEYS, EMBED, seed=11), normal(BATCH, KEYS, EMBED, seed=12)]
CAUSAL = torch.ones(QUERIES, QUERIES, dtype=torch.bool).triu(1)
MASKS: dict[str, dict[str, Tensor]] = {
    "none": {},
    "padding": {"key_padding_mask": hides(BATCH, KEYS)},
    "float padding": {"key_padding_mask": additive(hides(BATCH, KEYS))},
    "2d": {"attn_mask": hides(QUERIES, KEYS)},
    "3d": {"attn_mask": hides(BATCH * HEADS, QUERIES, KEYS)},
    "float 2d": {"attn_mask": normal(QUERIES, KEYS, seed=4)},
    "2d and padding": {"attn_mask": hides(QUERIES, KEYS), "key_padding_mask": hides(BATCH, KEYS, seed=5)},
    "3d and padding": {"attn_mask": hides(BATCH * HEADS, QUERIES, KEYS), "key_padding_mask": hides(BATCH, KEYS, seed=5)},
    "floats": {"attn_mask": normal(QUERIES, KEYS, seed=4), "key_padding_mask": additive(hides(BATCH, KEYS))},
}


@pytest.mark.parametrize("masks", MASKS)
def test_equals_torch_under_every_mask(masks: str) -> None:
    theirs = torch_module()
    assert_same(Attention.from_torch(theirs, EXACT), theirs, CROSS, **MASKS[masks])


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 9}, {"vdim": 9, "bias": False}], ids=str)
def test_equals_torch_in_every_form(options: dict[str, Any]) -> None:
    theirs = torch_module(**options)
    ours = Attention.from_torch(theirs, EXACT)
    key, value = (normal(BATCH, KEYS, options.get(dim, EMBED), seed=11) for dim in ("kdim", "vdim"))
    assert_same(ours, theirs, [CROSS[0], key, value])
    assert_same(ours, theirs, [CROSS[0][0], key[0], value[0]], key_padding_mask=hides(KEYS))
    assert_same(ours, theirs, [CROSS[0][0], key[0], value[0]], attn_mask=hides(HEADS, QUERIES, KEYS))
    if "vdim" not in options:
        assert_same(ours, theirs, CROSS[:1])
        assert torch.equal(ours(CROSS[0])[0], ours(CROSS[0], CROSS[0], CROSS[0])[0])
        assert torch.equal(ours(CROSS[0], CROSS[1])[0], ours(CROSS[0], CROSS[1], CROSS[1])[0])


def test_causal_needs_no_mask_and_looks_into_none() -> None:
    theirs = torch_module()
    ours = Attention.from_torch(theirs, EXACT)
    assert_same(ours, theirs, CROSS[:1], attn_mask=CAUSAL, is_causal=True)
    assert_same(ours, theirs, CROSS[:1], attn_mask=CAUSAL, is_causal=True, key_padding_mask=hides(BATCH, QUERIES))
    want = theirs(*CROSS[:1] * 3, attn_mask=CAUSAL, need_weights=False)[0]
    torch.testing.assert_close(ours(CROSS[0], is_causal=True)[0], want)
    torch.testing.assert_close(ours(CROSS[0], attn_mask=~CAUSAL, is_causal=True)[0], want)


@pytest.mark.parametrize("mask", [torch.ones(QUERIES, KEYS, dtype=torch.bool), additive(torch.ones(QUERIES, KEYS) > 0), None])
def test_rows_that_see_nothing_are_the_bias(mask: Tensor | None) -> None:
    ours = Attention.from_torch(torch_module(), EXACT)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[0] = True
    query = CROSS[0].clone().requires_grad_()
    output = ours(query, *CROSS[1:], attn_mask=mask, key_padding_mask=padding)[0]
    output.sum().backward()
    assert torch.equal(output[0], ours.out_proj.bias.expand(QUERIES, EMBED))
    assert query.grad is not None
    assert not query.grad[0].any()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in ours.parameters())


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_queries_are_repeated_heads(kv_heads: int) -> None:
    grouped = randomise(Attention(EMBED, HEADS, num_kv_heads=kv_heads, method=EXACT, dtype=torch.float64))
    full = Attention(EMBED, HEADS, method=EXACT, dtype=torch.float64)
    state = grouped.state_dict()
    for name in ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
        state[name] = state[name].unflatten(0, (kv_heads, -1)).repeat_interleave(HEADS // kv_heads, 0).flatten(0, 1)
    full.load_state_dict(state)
    for masks in ("none", "padding", "3d"):
        torch.testing.assert_close(grouped(*CROSS, **MASKS[masks])[0], full(*CROSS, **MASKS[masks])[0])


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 10, "vdim": 9}], ids=str)
def test_state_dicts_go_both_ways(options: dict[str, Any]) -> None:
    theirs = torch_module(dropout=0.1, **options).eval()
    theirs.out_proj.weight.requires_grad_(False)
    before = torch.get_rng_state()
    ours = Attention.from_torch(theirs, EXACT)
    back = ours.to_torch()
    assert torch.equal(torch.get_rng_state(), before)
    assert (back.dropout, back.training, back.batch_first) == (0.1, False, True)
    assert {name for name, p in back.named_parameters() if not p.requires_grad} == {"out_proj.weight"}
    assert {name for name, p in ours.named_parameters() if not p.requires_grad} == {"out_proj.weight"}
    want = theirs.state_dict()
    for got in (back.state_dict(), Attention.state_dict_to_torch(ours.state_dict())):
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want)
    # Copies: nothing is shared with the module it came from, nor between the projections.
    pointers = {p.untyped_storage().data_ptr() for module in (theirs, ours, back) for p in module.parameters()}
    assert len(pointers) == sum(len(list(module.parameters())) for module in (theirs, ours, back))


@pytest.mark.parametrize("assign", [False, True])
def test_a_larger_model_loads_the_state_of_torch(assign: bool) -> None:
    theirs = nn.ModuleDict({"block": encoder_layer(), "head": nn.Linear(EMBED, 2, dtype=torch.float64)})
    ours = copy.deepcopy(theirs)
    ours["block"].self_attn = Attention(EMBED, HEADS, dtype=torch.float64)
    state = theirs.state_dict()
    names = list(state)
    ours.load_state_dict(state, strict=True, assign=assign)
    assert list(state) == names  # the caller's dict is left alone
    storages = [p.untyped_storage().data_ptr() for p in ours["block"].self_attn.parameters()]
    assert len({*storages}) == len(storages)  # parameters that share memory cannot be saved separately
    back = Attention.state_dict_to_torch(ours.state_dict(), prefix="block.self_attn.")
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], state[name]) for name in state)
    again = Attention.state_dict_from_torch(back, prefix="block.self_attn.")
    assert again.keys() == ours.state_dict().keys()
    ours.load_state_dict(ours.state_dict(), strict=True)
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*block\.self_attn\.v_proj\.weight"):
        ours.load_state_dict({name: x for name, x in state.items() if "in_proj" not in name})
    with pytest.raises(ValueError, match="prefix must name an Attention"):
        Attention.state_dict_to_torch(ours.state_dict(), prefix="block")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_inside_an_encoder_layer(norm_first: bool, training: bool) -> None:
    theirs = encoder_layer(norm_first=norm_first, dropout=0.0).train(training)
    ours = copy.deepcopy(theirs)
    ours.self_attn = Attention.from_torch(theirs.self_attn, nf.TopK(k=QUERIES))  # all keys: exact
    padding: dict[str, Any] = {"src_key_padding_mask": hides(BATCH, QUERIES)}
    causal: dict[str, Any] = {"src_mask": CAUSAL, "is_causal": True}
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for options in ({}, padding, causal, causal | padding):
                torch.testing.assert_close(ours(CROSS[0], **options), theirs(CROSS[0], **options))
    # The fused kernel of the layer would bypass the module and its method.
    ours.self_attn.method = nf.TopK(k=1)
    with torch.no_grad():
        assert not torch.allclose(ours(CROSS[0]), theirs(CROSS[0]))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:The PyTorch API of nested tensors")
def test_inside_an_encoder() -> None:
    """Even if the encoder was made first, in which case torch would hand nested tensors to its layers."""
    theirs = nn.TransformerEncoder(encoder_layer(dropout=0.0), 2).eval()
    ours = copy.deepcopy(theirs)
    for block in ours.layers:
        block.self_attn = Attention.from_torch(block.self_attn, nf.TopK(k=QUERIES))
    padding = torch.arange(QUERIES) >= torch.tensor([QUERIES, 4])[:, None]
    for module in (ours, nn.TransformerEncoder(ours.layers[0], 2).eval()):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                want, got = (each(CROSS[0], src_key_padding_mask=padding) for each in (theirs, module))
                torch.testing.assert_close(got[~padding], want[~padding])  # torch zeroes padded queries
                torch.testing.assert_close(module(CROSS[0], mask=CAUSAL), theirs(CROSS[0], mask=CAUSAL))


def test_inside_a_decoder_layer() -> None:
    theirs = randomise(nn.TransformerDecoderLayer(EMBED, HEADS, 16, dropout=0.0, batch_first=True, dtype=torch.float64))
    ours = copy.deepcopy(theirs)
    ours.self_attn, ours.multihead_attn = (Attention.from_torch(each) for each in (theirs.self_attn, theirs.multihead_attn))
    torch.testing.assert_close(*(each(CROSS[0], CROSS[1], CAUSAL, tgt_is_causal=True) for each in (ours, theirs)))


@pytest.mark.parametrize("method", [EXACT, nf.TopK(k=3, tail=2)], ids=str)
def test_dropout_in_training_only_and_by_the_generator(method: Any) -> None:
    layer = Attention(EMBED, HEADS, dropout=0.5, method=method, dtype=torch.float64)

    def run(seed: int) -> Tensor:
        before = torch.get_rng_state()
        output = layer(*CROSS, generator=torch.Generator().manual_seed(seed))[0]
        assert torch.equal(torch.get_rng_state(), before)
        return output

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    layer.eval()
    same = Attention(EMBED, HEADS, method=method, dtype=torch.float64)
    same.load_state_dict(layer.state_dict())
    assert torch.equal(run(1), same(*CROSS, generator=torch.Generator().manual_seed(1))[0])


@pytest.mark.parametrize("options", [{}, {"kdim": 40}], ids=str)
def test_initial_parameters_are_distributed_as_torch_has_them(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, theirs = Attention(60, 4, **options), nn.MultiheadAttention(60, 4, **options)
    state = Attention.state_dict_from_torch(theirs.state_dict())
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(7.0)
    layer.reset_parameters()
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
            continue
        fans = sum(parameter.shape) if options else 4 * 60
        bound = 1 / math.sqrt(60) if name == "out_proj.weight" else math.sqrt(6 / fans)
        for sample in (parameter.detach(), state[name]):
            assert_follows(sample, stats.uniform(-bound, 2 * bound).cdf)


def test_low_precision_and_autocast() -> None:
    """The error is at most twice that of torch in bfloat16."""
    theirs = torch_module(dtype=torch.float32)
    ours, low, x = Attention.from_torch(theirs, EXACT), copy.deepcopy(theirs).bfloat16(), CROSS[0].float()
    for options in ({}, {"key_padding_mask": hides(BATCH, QUERIES)}, {"attn_mask": additive(CAUSAL).float()}):
        want = theirs(x, x, x, need_weights=False, **options)[0]
        cast = {name: mask if mask.dtype == torch.bool else mask.bfloat16() for name, mask in options.items()}
        limit = 2 * (low(*[x.bfloat16()] * 3, need_weights=False, **cast)[0] - want).abs().max().item()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = ours(x, **options)[0]
        for got in (mixed, copy.deepcopy(ours).bfloat16()(x.bfloat16(), **options)[0]):
            assert got.dtype == torch.bfloat16
            torch.testing.assert_close(got.float(), want, atol=limit, rtol=0)


ERRORS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (ValueError, "pass need_weights=False", {"need_weights": True}),
    (ValueError, r"key must have shape \[batch, length, 12\]", {"key": normal(BATCH, KEYS, 11)}),
    (ValueError, "must agree in batch", {"key": normal(KEYS, EMBED)}),
    (ValueError, "must agree in batch", {"key": CROSS[1], "value": CROSS[0]}),
    (ValueError, "enable_nested_tensor=False", {"key": torch.nested.nested_tensor([normal(3, EMBED)], layout=torch.jagged)}),
    (ValueError, r"key_padding_mask must have shape \(2, 7\)", {"key_padding_mask": hides(BATCH, KEYS)}),
    (ValueError, r"transpose\(0, 1\) if yours are \[length, batch, dim\]", {"key_padding_mask": hides(QUERIES, BATCH)}),
    (ValueError, r"transpose\(0, 1\) if yours are", {"key": normal(9, QUERIES, EMBED), "value": normal(9, QUERIES, EMBED)}),
    (ValueError, "pass a boolean mask", {"key_padding_mask": normal(BATCH, QUERIES)}),
    (TypeError, "boolean or floating point", {"key_padding_mask": hides(BATCH, QUERIES).int()}),
    (ValueError, r"attn_mask must have shape \(7, 7\) or \(8, 7, 7\)", {"attn_mask": hides(BATCH, QUERIES, QUERIES)}),
    (ValueError, "TopK honours only boolean key-padding masks", {"attn_mask": CAUSAL}),
    (TypeError, r"attn_mask must be a torch\.Tensor or None", {"attn_mask": [True]}),
    (ValueError, "transpose inputs and outputs", {"batch_first": False}),
    (ValueError, "multiple of num_heads", {"num_heads": 5}),
    (ValueError, "multiple of num_kv_heads", {"num_kv_heads": 3}),
    (ValueError, "dropout must be in", {"dropout": 1.0}),
    (TypeError, "method must be a method such as", {"method": nf.Exact}),
    (TypeError, "add_bias_kv", {"add_bias_kv": True}),
]


@pytest.mark.parametrize(("error", "message", "options"), ERRORS, ids=lambda x: "-".join(x) if isinstance(x, dict) else "")
def test_errors_say_what_to_do(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    of_call = not {*options}.isdisjoint(inspect.signature(Attention.forward).parameters)
    made = {"embed_dim": EMBED, "num_heads": HEADS, "method": nf.TopK(k=3), "dtype": torch.float64}
    with pytest.raises(error, match=message):
        Attention(**made | ({} if of_call else options))(CROSS[0], **options if of_call else {})


def test_what_has_no_counterpart_is_not_converted() -> None:
    for option in ("add_bias_kv", "add_zero_attn"):
        with pytest.raises(ValueError, match="add_bias_kv or add_zero_attn"):
            Attention.from_torch(torch_module(**{option: True}))
    with pytest.raises(ValueError, match=r"set module\.batch_first = True"):
        Attention.from_torch(torch_module(batch_first=False))
    grouped = Attention(EMBED, HEADS, 0.1, num_kv_heads=2, method=EXACT)
    assert grouped.extra_repr() == "embed_dim=12, num_heads=4, num_kv_heads=2, dropout=0.1, method=Exact()"
    with pytest.raises(ValueError, match="no grouped queries"):
        grouped.to_torch()
    with pytest.raises(RuntimeError, match="size mismatch for k_proj"):
        grouped.load_state_dict(torch_module().state_dict())
    with pytest.raises(TypeError, match="no in_proj_weight: its weights are q_proj"):
        torch.add(grouped.in_proj_weight, 1)  # type: ignore[call-overload]

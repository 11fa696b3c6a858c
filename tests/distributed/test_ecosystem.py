"""Sequences over ranks together with what people train by: DTensor, FSDP, DDP, tensor parallel, compile, checkpoints, models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from crew import Crew, crew
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import nearfield as nf
from nearfield.distributed import context_parallel, passes, shard, unshard

CELLS = nf.Cells(cell_size=4, probes=3, segment=16, sinks=2)
LENGTH = 70


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Model(nn.Module):
    """A layer that attends, and one that does not."""

    def __init__(self, mesh: Any = None, method: nf.Method = CELLS) -> None:
        super().__init__()
        self.attend = nf.nn.Attention(16, 4, num_kv_heads=2, method=method, mesh=mesh, dtype=torch.float64)
        self.feed = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x, is_causal=True)[0]
        return x + self.feed(F.gelu(x))


def model(mesh: Any = None) -> Model:
    torch.manual_seed(7)
    return Model(mesh)


def one_process() -> tuple[Tensor, list[Tensor]]:
    """The output of the whole sequence, and the gradients of the sum of its squares."""
    whole = model()
    output = whole(draw(1, LENGTH, 16))
    return output.detach(), list(torch.autograd.grad(output.square().sum(), list(whole.parameters())))


def apart(found: list[Tensor], wanted: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def summed(grads: list[Tensor], group: Any) -> list[Tensor]:
    for grad in grads:
        torch.distributed.all_reduce(grad, group=group)
    return grads


def mesh_of(group: Any) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu")


def by_ddp(group: Any) -> float:
    from torch.nn.parallel import DistributedDataParallel

    output, wanted = one_process()
    wrapped = DistributedDataParallel(model(group), process_group=group)
    own = wrapped(shard(draw(1, LENGTH, 16), group, 1))
    own.square().sum().backward()
    # DDP takes the mean over ranks.
    grads = [x.grad * torch.distributed.get_world_size(group) for x in wrapped.parameters() if x.grad is not None]
    return max(apart([own.detach()], [shard(output, group, 1)]), apart(grads, wanted))


def by_fsdp(group: Any) -> float:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    output, wanted = one_process()
    mesh = mesh_of(group)
    wrapped = model(mesh)
    fully_shard(wrapped.attend, mesh=mesh)
    fully_shard(wrapped, mesh=mesh)
    own = wrapped(shard(draw(1, LENGTH, 16), mesh, 1))
    own.square().sum().backward()
    grads = []
    for x in wrapped.parameters():
        assert isinstance(x.grad, DTensor)
        grads.append(x.grad.full_tensor() * mesh.size())
    return max(apart([own.detach()], [shard(output, group, 1)]), apart(grads, wanted))


def compiled(group: Any) -> float:
    output, wanted = one_process()
    own_model = model(group)
    program = torch.compile(own_model, backend="aot_eager")
    own = program(shard(draw(1, LENGTH, 16), group, 1))
    grads = list(torch.autograd.grad(own.square().sum(), list(own_model.parameters())))
    return max(apart([own.detach()], [shard(output, group, 1)]), apart(summed(grads, group), wanted))


def checkpointed(group: Any) -> float:
    from torch.utils.checkpoint import checkpoint

    output, wanted = one_process()
    own_model = model(group)
    packed = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        own = checkpoint(own_model, shard(draw(1, LENGTH, 16), group, 1), use_reentrant=False)
    # Nothing but the input: what attention keeps is computed again too.
    assert [tuple(x.shape) for x in packed] == [(1, own.shape[1], 16)], [tuple(x.shape) for x in packed]
    grads = list(torch.autograd.grad(own.square().sum(), list(own_model.parameters())))
    return max(apart([own.detach()], [shard(output, group, 1)]), apart(summed(grads, group), wanted))


@pytest.mark.parametrize("how", [by_ddp, by_fsdp, compiled, checkpointed], ids=lambda how: how.__name__)
def test_training(ranks: Crew, how: Any) -> None:
    assert max(ranks.run(how, ranks=2)) < 1e-10


def over_heads(group: Any) -> float:
    """Two ranks share the sequence, and two the heads."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    q, k, v, weight = (draw(1, heads, LENGTH, 8) for heads in (4, 2, 2, 4))
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    output = nf.attention(*whole, is_causal=True, enable_gqa=True, method=CELLS)
    (output * weight).sum().backward()
    place = mesh["tp"].get_local_rank()

    def own(x: Tensor) -> Tensor:
        return shard(x.chunk(2, 1)[place], mesh["cp"], 2).detach()

    parts = [own(x).requires_grad_() for x in (q, k, v)]
    part = nf.attention(*parts, is_causal=True, enable_gqa=True, method=CELLS, mesh=mesh["cp"])
    (part * own(weight)).sum().backward()
    grads = [x.grad for x in parts if x.grad is not None]
    return max(apart([part.detach()], [own(output)]), apart(grads, [own(x.grad) for x in whole if x.grad is not None]))


def test_tensor_parallel_over_heads(ranks: Crew) -> None:
    assert max(ranks.run(over_heads)) < 1e-12


def by_dtensor(group: Any) -> float:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = mesh_of(group)
    q, k, v, weight = (draw(1, heads, LENGTH + 1, 8) for heads in (4, 2, 2, 4))
    found = []
    for method, placement in ((CELLS, Shard(2)), (nf.Exact(), Shard(2)), (nf.Exact(), Shard(1)), (nf.Exact(), Replicate())):
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        options = {"is_causal": True, "enable_gqa": True, "method": method, "return_lse": True}
        output, lse = nf.attention(*whole, **options)
        (output * weight).sum().backward()
        parts = [distribute_tensor(x, mesh, [placement]).detach().requires_grad_() for x in (q, k, v)]
        part, part_lse = nf.attention(*parts, **options)
        assert isinstance(part, DTensor)
        assert part.shape == output.shape
        assert part.placements == (placement,)
        (part * distribute_tensor(weight, mesh, [placement])).sum().backward()
        pairs = [(part, output), (part_lse, lse), *((a.grad, b.grad) for a, b in zip(parts, whole, strict=True))]
        for ours, one in pairs:
            assert isinstance(ours, DTensor)
            found.append(float((ours.full_tensor() - one).abs().max()))
    with pytest.raises(ValueError, match="6 query heads that share 3 heads of keys cannot be sharded over 2 ranks"):
        nf.attention(*(distribute_tensor(draw(1, n, 8, 8), mesh, [Shard(1)]) for n in (6, 3, 3)), enable_gqa=True)
    sinks = distribute_tensor(draw(4), mesh, [Replicate()])
    for placement in (Shard(1), Shard(2)):
        parts = [distribute_tensor(draw(1, 4, 8, 8), mesh, [placement]) for _ in range(3)]
        with pytest.raises(TypeError, match="s_aux must be a plain tensor"):
            nf.attention(*parts, s_aux=sinks)
    # What one rank has found wrong is told to the others, and all go on.
    mixed = [parts[0], *(x.to_local() for x in parts[1:])] if mesh.get_local_rank() == 1 else parts
    with pytest.raises(RuntimeError, match="rank 1 has error 'ValueError: key must be sharded as query is"):
        nf.attention(*mixed)
    assert nf.attention(*parts).shape == (1, 4, 8, 8)
    return max(found)


def test_dtensors(ranks: Crew) -> None:
    assert max(ranks.run(by_dtensor, ranks=2)) < 1e-12


def transformed(group: Any, family: str, padded: bool, length: int) -> list[float]:
    """The largest differences of logits and of the gradients of a loss."""
    from hf_models import model as random_model

    from nearfield import hf

    passes.GROUP_BYTES = 1
    network = random_model(family).double().eval()
    tokens = torch.randint(2, 90, (2, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, -5:] = 0
    own_mask = {"attention_mask": mask} if padded else {}
    hf.register("nearfield-one", CELLS)
    hf.register("nearfield-ranks", CELLS, mesh=group)
    network.set_attn_implementation("nearfield-one")
    positions = torch.arange(length)[None]
    logits = network(tokens, position_ids=positions, use_cache=False, **own_mask).logits
    kept = mask.bool()[..., None]
    network.zero_grad()
    (logits * kept).square().sum().backward()
    wanted = [x.grad.clone() for x in network.parameters() if x.grad is not None]
    network.set_attn_implementation("nearfield-ranks")
    network.zero_grad()
    with context_parallel(group, buffers=[tokens, positions, mask, kept], buffer_seq_dims=[1, 1, 1, 1]):
        own = network(tokens, position_ids=positions, use_cache=False, **own_mask).logits
        (own * kept).square().sum().backward()
        found = summed([x.grad for x in network.parameters() if x.grad is not None], group)
        whole = unshard(own.detach(), group, 1)
        for options in ({}, {"attention_mask": mask}):
            with pytest.raises((RuntimeError, ValueError), match="position_ids"):
                network(tokens, use_cache=False, **options)
    few, places = tokens[:, :1].clone(), positions[:, :1].clone()
    with context_parallel(group, buffers=[few, places], buffer_seq_dims=[1, 1]), pytest.raises((ValueError, IndexError)) as told:
        network(few, position_ids=places, use_cache=False)
    assert torch.distributed.get_rank(group) or "a model needs a token on every rank" in str(told.value)
    return [float(((whole - logits) * kept).abs().max()), apart(found, wanted)]


@pytest.mark.parametrize(
    ("family", "padded", "length"), [("llama", False, 45), ("llama", True, 46), ("mistral", False, 45), ("gemma2", False, 9)]
)
def test_models_of_transformers(ranks: Crew, family: str, padded: bool, length: int) -> None:
    pytest.importorskip("transformers")
    for found in ranks.run(transformed, family, padded, length, ranks=2):
        # Gemma has norms in float32.
        assert max(found) < (1e-4 if family == "gemma2" else 1e-9), found


def not_handed_on(group: Any) -> str:
    """BERT makes up positions of its own, and tells its layers of none."""
    from hf_models import model as random_model

    from nearfield import hf

    hf.register("nearfield-ranks", nf.Exact(), mesh=group)
    network = random_model("bert").eval()
    network.set_attn_implementation("nearfield-ranks")
    tokens = torch.ones(1, 12, dtype=torch.long)
    with context_parallel(group, buffers=[tokens], buffer_seq_dims=[1]):
        try:
            network(tokens)
        except ValueError as error:
            return str(error)
    return "nothing"


def test_a_model_that_hands_on_no_positions(ranks: Crew) -> None:
    pytest.importorskip("transformers")
    assert all("the model does not hand them on" in said for said in ranks.run(not_handed_on, ranks=2))


def in_other_layers(group: Any) -> list[str]:
    """What ranks are told where rank 1 is in another layer, and where it alone asks for attention weights."""
    from hf_models import model as random_model

    from nearfield import hf

    hf.register("nearfield-ranks", nf.Exact(), mesh=group)
    network, said, is_off = random_model("llama").eval(), [], torch.distributed.get_rank(group) == 1
    network.set_attn_implementation("nearfield-ranks")
    last = network.model.layers[1].self_attn
    tokens, positions = torch.ones(1, 12, dtype=torch.long), torch.arange(12)[None]
    with context_parallel(group, buffers=[tokens, positions], buffer_seq_dims=[1, 1]):
        for layer, options in ((5, {}), (1, {"output_attentions": True}), (1, {})):
            last.layer_idx = layer if is_off else 1
            try:
                logits = network(tokens, position_ids=positions, use_cache=False, **options if is_off else {}).logits
                said.append(str(tuple(logits.shape)))
            except (RuntimeError, ValueError) as error:
                said.append(str(error))
    return said


def test_models_whose_ranks_are_in_other_layers(ranks: Crew) -> None:
    pytest.importorskip("transformers")
    for said in ranks.run(in_other_layers, ranks=2):
        assert "rank 1 has layer 5, but rank 0 1" in said[0]
        assert "error 'ValueError: this model asks for attention weights as an output" in said[1]
        assert said[2] == "(1, 6, 97)"


def without_context(group: Any) -> str:
    from hf_models import model as random_model

    from nearfield import hf

    hf.register("nearfield-ranks", mesh=group)
    network = random_model("llama")
    network.set_attn_implementation("nearfield-ranks")
    try:
        network(torch.ones(1, 8, dtype=torch.long))
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_model_over_ranks_is_called_in_a_context(ranks: Crew) -> None:
    pytest.importorskip("transformers")
    assert all("inside of nearfield.distributed.context_parallel" in said for said in ranks.run(without_context, ranks=2))

"""Exact attention over ranks by the kernels of GPUs: on a GPU, and on a CPU by its own kernels in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from crew import Crew, crew
from torch import Tensor

import nearfield as nf
from nearfield import _compat
from nearfield.distributed import context_parallel, flash, passes, shard
from nearfield.distributed.ways import Again
from nearfield.exact import as_flash_reads


@dataclass(frozen=True)
class Case:
    rows: int
    keys: int
    causal: bool = True
    heads: tuple[int, int] = (4, 2)
    dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    unaligned: bool = False
    """whether rows begin anywhere in memory"""

    @property
    def options(self) -> dict[str, Any]:
        offset = self.keys - self.rows
        return {"enable_gqa": True, "is_causal": self.causal, "offset": offset if self.causal and offset else None}

    @property
    def seen(self) -> Tensor:
        """`[rows, keys]`: which row sees which key."""
        seen = torch.ones(self.rows, self.keys, dtype=torch.bool)
        return seen.tril(self.keys - self.rows) if self.causal else seen


CASES = {
    "causal": Case(300, 300),
    "not causal": Case(300, 300, causal=False),
    "uneven": Case(257, 257, heads=(3, 3)),
    "few": Case(3, 3),
    "one": Case(1, 1, heads=(8, 1)),
    "offset": Case(130, 301),
    "one row": Case(1, 90, heads=(8, 2)),
    "float16": Case(301, 301, dtype=torch.float16, dim=72),
    "wide heads": Case(140, 140, dim=256),
    "unaligned": Case(130, 130, unaligned=True),
}


def inputs(case: Case) -> list[Tensor]:
    """Queries, keys, values, and a weight for each number of the output."""
    heads, kv_heads = case.heads
    generator = torch.Generator().manual_seed(5)
    shapes = [(heads, case.rows), (kv_heads, case.keys), (kv_heads, case.keys), (heads, case.rows)]
    return [torch.randn(2, *shape, case.dim, generator=generator, dtype=torch.float64).to(case.dtype) for shape in shapes]


def results(given: list[Tensor], attend: Callable[..., Tensor]) -> list[Tensor]:
    """Output and gradients of queries, keys and values."""
    leaves = [x.detach().requires_grad_() for x in given[:3]]
    output = attend(*leaves)
    return [output.detach(), *torch.autograd.grad((output * given[3]).sum(), leaves)]


def compared(group: Any, case: Case, device: str = "cpu", heads_apart: bool = True) -> dict[str, tuple[float, float]]:
    """How far results of this rank, and those of torch in one process, are from float64."""
    passes.GROUP_BYTES = 1 if heads_apart else 64 << 20
    given, mask = [x.to(device) for x in inputs(case)], case.seen.to(device)

    def torchs(query: Tensor, *others: Tensor) -> Tensor:
        # Grouped queries with a mask would be served by no fused kernel, which rounds less.
        every = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in others)
        return F.scaled_dot_product_attention(query, *every, attn_mask=mask)

    def ours(*own: Tensor) -> Tensor:
        parts = (_unaligned(x) for x in own) if case.unaligned else own
        return nf.attention(*parts, method=nf.Exact(), mesh=group, **case.options)

    wanted = results([x.double() for x in given], torchs)
    plain = results(given, torchs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Again, "attend", _not_here)
        found = results([shard(x, group, 2) for x in given], ours)
    apart = {}
    for name, own, one, exact in zip(("output", "query", "key", "value"), found, plain, wanted, strict=True):
        share = shard(exact, group, 2)
        assert own.dtype == case.dtype
        apart[name] = float((own - share).norm()), float((shard(one, group, 2) - share).norm())
    return apart


def check_close(apart: dict[str, tuple[float, float]]) -> None:
    for name, (ours, plain) in apart.items():
        assert ours <= (2 if name == "output" else 3) * plain + 1e-4, apart


def _not_here(*_: Any) -> Any:
    raise AssertionError("this goes by calls")


def _unaligned(x: Tensor) -> Tensor:
    return F.pad(x, (1, 2))[..., 1:-2]


class Kernels:
    """Those of CPUs with the arguments of those of GPUs, and with what these ask for: memory as they read it, groups of query
    heads, and a causal mask whose last row sees the last key."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.forwards = self.backwards = 0
        patch.setattr(flash, "_is_on_gpu", lambda part: True)
        patch.setattr(_compat, "gpu_flash", self.forward)
        patch.setattr(_compat, "_gpu_flash_backward", self.backward)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        assert dropout_p == 0
        self.forwards += 1
        mask = self._mask(query, key, value, is_causal)
        group = query.shape[1] // key.shape[1]
        every = (x.repeat_interleave(group, 1) for x in (key, value))
        output, lse = _compat.cpu_flash(query, *every, 0.0, False, attn_mask=mask, scale=scale)
        return output, lse, None, None, query.shape[2], key.shape[2], None, None, None

    def backward(
        self,
        grad_out: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        logsumexp: Tensor,
        cum_seq_q: Tensor | None,
        cum_seq_k: Tensor | None,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Tensor,
        philox_offset: Tensor,
        *,
        scale: float | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert (dropout_p, cum_seq_q, cum_seq_k, max_q, max_k) == (0.0, None, None, query.shape[2], key.shape[2])
        assert logsumexp.is_contiguous()
        assert logsumexp.shape == query.shape[:3]
        assert logsumexp.dtype == torch.float32
        assert grad_out.shape == out.shape == query.shape
        assert grad_out.dtype == out.dtype == query.dtype
        self.backwards += 1
        mask = self._mask(query, key, value, is_causal)
        group = query.shape[1] // key.shape[1]
        every = (x.repeat_interleave(group, 1) for x in (key, value))
        found = _compat.cpu_flash_backward(grad_out, query, *every, out, logsumexp, 0.0, False, attn_mask=mask, scale=scale)
        return found[0], *(x.unflatten(1, (-1, group)).sum(2) for x in found[1:])

    def _mask(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor | None:
        assert query.dtype in (torch.float16, torch.bfloat16)
        for x in (query, key, value):
            assert x.stride(3) == 1
            assert not any(stride % 8 for stride in x.stride()[:3])
            assert x.data_ptr() % 16 == 0
        rows, keys = query.shape[2], key.shape[2]
        seen = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
        return torch.zeros(rows, keys).masked_fill(~seen, -torch.inf) if is_causal else None


def compared_by_kernels(group: Any, case: Case, heads_apart: bool) -> dict[str, tuple[float, float]]:
    with pytest.MonkeyPatch.context() as patch:
        kernels = Kernels(patch)
        found = compared(group, case, heads_apart=heads_apart)
    assert kernels.forwards == kernels.backwards
    assert bool(kernels.forwards) == bool(shard(torch.empty(case.rows), group, 0).numel())
    return found


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_of_a_gpu_over_ranks(ranks: Crew, name: str) -> None:
    for size in (1, 3):
        for apart in ranks.run(compared_by_kernels, CASES[name], size == 1, ranks=size):
            check_close(apart)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Any]:
    """A group of one rank, which knows NCCL where there is a GPU."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


BY_CALLS: dict[str, tuple[Case, dict[str, Any]]] = {
    "32 bits": (Case(60, 60, dtype=torch.float32), {}),
    "odd columns": (Case(60, 60, dim=12), {}),
    "no columns": (Case(60, 60, dim=0), {}),
    "sinks": (Case(60, 60), {"s_aux": torch.zeros(4, dtype=torch.bfloat16)}),
    "a cap": (Case(60, 60), {"softcap": 3.0}),
    "a window": (Case(60, 60), {"window_size": (9, 0)}),
    "padding": (Case(60, 60), {"attn_mask": torch.ones(2, 1, 1, 60, dtype=torch.bool).tril(-1)}),
    "a negative scale": (Case(60, 60), {"scale": -0.2}),
    "the reference": (Case(60, 60), {"backend": "reference"}),
    "rows that see nothing": (Case(60, 40), {}),
}


@pytest.mark.parametrize("name", BY_CALLS)
def test_what_the_kernels_of_a_gpu_do_not_serve(alone: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, more = BY_CALLS[name]
    given, options = inputs(case), case.options | {"method": nf.Exact()} | more
    whole = results(given, lambda *own: nf.attention(*own, **options))
    kernels = Kernels(monkeypatch)
    found = results(given, lambda *own: nf.attention(*own, mesh=alone, **options))
    assert kernels.forwards == kernels.backwards == 0
    for ours, one in zip(found, whole, strict=True):
        torch.testing.assert_close(ours.float(), one.float(), atol=0.02, rtol=0.05)


def test_gradients_of_log_normalisers_go_by_calls(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["offset"]
    given, options = inputs(case), case.options | {"method": nf.Exact(), "return_lse": True}

    def attend(*own: Tensor, mesh: Any = None) -> Tensor:
        output, lse = nf.attention(*own, mesh=mesh, **options)
        return output + lse[..., None].to(output.dtype)

    whole = results(given, attend)
    kernels = Kernels(monkeypatch)
    found = results(given, lambda *own: attend(*own, mesh=alone))
    assert kernels.forwards > kernels.backwards == 0
    for ours, one in zip(found, whole, strict=True):
        torch.testing.assert_close(ours.float(), one.float(), atol=0.05, rtol=0.05)


def test_arguments_of_the_backward_pass_are_those_of_torch() -> None:
    """Tensors without numbers are only checked."""
    query, key = (torch.empty(2, heads, length, 64, dtype=torch.bfloat16, device="meta") for heads, length in ((4, 9), (2, 20)))
    lse = torch.empty(2, 4, 9, device="meta")
    found = _compat.gpu_flash_backward(query, query, key, key, query, lse, True, 0.1)
    assert [x.shape for x in found] == [query.shape, key.shape, key.shape]


def test_heads_that_a_card_has_no_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    device, fits = torch.device("cuda", 0), _compat.has_gpu_flash_backward.__wrapped__
    for capability, wanted in (
        ((8, 0), True),
        ((8, 6), False),
        ((8, 9), False),
        ((9, 0), True),
        ((10, 0), True),
        ((12, 0), False),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert [fits(device, dim) for dim in (64, 192, 200, 224, 256)] == [True, True, wanted, wanted, True]


def test_rows_as_kernels_read_them() -> None:
    x = torch.randn(2, 3, 40, 64).bfloat16()
    assert as_flash_reads(x) is x
    every_other = x[:, ::2, 5:]
    assert as_flash_reads(every_other) is every_other
    for other in (x[..., 1:33], x[..., ::2], x.mT, _unaligned(x)):
        read = as_flash_reads(other)
        assert torch.equal(read, other)
        assert read.is_contiguous()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(alone: Any, name: str) -> None:
    for heads_apart in (True, False):
        check_close(compared(alone, CASES[name], "cuda", heads_apart))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
def test_long_inputs_on_a_gpu(alone: Any, causal: bool) -> None:
    check_close(compared(alone, Case(4999, 4999, causal, heads=(8, 2), dim=128), "cuda"))


@pytest.mark.gpu
def test_log_normalisers_on_a_gpu(alone: Any) -> None:
    case = CASES["offset"]
    q, k, v, _ = (x.cuda() for x in inputs(case))
    _, lse = nf.attention(q, k, v, method=nf.Exact(), mesh=alone, return_lse=True, **case.options)
    logits = q.double() @ k.double().repeat_interleave(2, 1).mT / 8
    wanted = logits.masked_fill(~case.seen.cuda(), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse.double(), wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_a_nan_reaches_the_rows_that_see_it_on_a_gpu(alone: Any) -> None:
    q, k, v, _ = (x.cuda() for x in inputs(CASES["causal"]))
    k[0, 0, 140] = torch.nan
    v[1, 1, 200] = torch.nan
    q[1, 3, 20] = torch.nan
    found = nf.attention(q, k, v, method=nf.Exact(), mesh=alone, **CASES["causal"].options)
    assert bool(found[0, :2, 140:].isnan().all())
    assert bool(found[1, 2:, 200:].isnan().all())
    assert bool(found[1, 3, 20].isnan().all())
    assert bool(found[0, 2:].isfinite().all())
    assert bool(found[1, :2].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("method", [nf.Exact(), nf.Cells(), nf.Cells(partition=nf.KMeans(by_queries=True))], ids=repr)
def test_nothing_waits_for_a_gpu(alone: Any, method: nf.Method) -> None:
    """What waits raises: that is what the last run asserts."""
    case = Case(5001, 5001, heads=(4, 4))
    given = [x.cuda() for x in inputs(case)]

    def run() -> None:
        results(given, lambda *own: nf.attention(*own, method=method, mesh=alone, **case.options))

    with context_parallel(alone, buffers=given, buffer_seq_dims=[2, 2, 2, 2]):
        for _ in range(2):  # what is made at first calls
            run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

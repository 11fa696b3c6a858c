"""Paths through the engine in Triton that shapes of everyday do not take, under the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from by_hand import seeded
from test_triton import DEVICE, Case, run
from torch import Tensor

import nearfield as nf

pytest.importorskip("triton")

from nearfield.cells.triton import backward as triton_backward
from nearfield.cells.triton import forward as triton_forward
from nearfield.cells.triton import memory as triton_memory

SMALL = {
    "plain": Case(entries=2, length=20, keys=24, cell_size=6, probes=2),
    "causal": Case(entries=2, group=2, length=20, keys=20, segment=8, heights=2, probes=2),
}


def assert_right(case: Case) -> None:
    found = run(case)
    output, lse, grads = found.expected()
    torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(found.lse.double(), lse, atol=5e-6, rtol=5e-6)
    for mine, true in zip(found.gradients(), grads, strict=True):
        torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", SMALL)
def test_heads_and_rows_in_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for partial results."""
    monkeypatch.setattr(triton_memory, "LEAST_BYTES", 1)
    for module in (triton_memory, triton_backward):
        monkeypatch.setattr(module, "BEYOND", 0.0)
    monkeypatch.setattr(triton_memory, "LEAST", 0.0)
    monkeypatch.setattr(triton_memory, "LEAST_ROWS", 16)
    monkeypatch.setattr(triton_backward, "LEAST_BACKWARD_BYTES", 1)
    monkeypatch.setattr(triton_backward, "_bytes", lambda tensors: 0)
    assert_right(SMALL[name])


@pytest.mark.parametrize("name", SMALL)
def test_heads_grouped_together_and_computed_in_turn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the partial results of one head, and for the pairs of all."""

    case = SMALL[name]
    room = triton_memory.Room(case.group * case.length * case.probes * (4 * case.dim + 4), 1 << 30)
    for module in (triton_forward, triton_backward):
        monkeypatch.setattr(module, "room_for", lambda *_: room)
    slabs = list(
        triton_memory.slabs_of(case.entries, case.group * case.length, case.probes, case.probes * (4 * case.dim + 4), room)
    )
    assert [slab.parts for slab in slabs] == [[slice(0, 1), slice(1, 2)]]
    assert_right(case)


@pytest.mark.parametrize(("needed", "recorded", "share"), [(True, True, 1.0), (True, False, 0.48), (False, True, 0.48)])
def test_a_forward_pass_that_is_trained_may_use_the_memory_of_the_backward_pass(
    needed: bool, recorded: bool, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:

    asked: list[float] = []
    room_for = triton_memory.room_for

    def watched(inputs: tuple[Tensor, ...], held: tuple[Tensor, ...], beyond: float) -> triton_memory.Room:
        asked.append(beyond)
        return room_for(inputs, held, beyond)

    monkeypatch.setattr(triton_forward, "room_for", watched)
    query, key, value = torch.randn(3, 1, 1, 48, 16, generator=seeded(0)).to(DEVICE).unbind(0)
    with torch.set_grad_enabled(recorded):
        nf.attention(query, key.requires_grad_(needed), value, method=nf.Cells(8, 2), backend="triton")
    assert asked == [share]


def test_more_room_means_fewer_parts() -> None:

    inputs, held = (torch.empty(4, 1 << 20, 64),), (torch.empty(1 << 20, 80),)
    few, more = (triton_memory.room_for(inputs, held, share) for share in (triton_memory.BEYOND, triton_memory.BEYOND_TRAINED))
    total, ours = inputs[0].nbytes, held[0].nbytes
    assert few.parts + few.pairs + ours == pytest.approx(0.48 * total, rel=1e-6)
    assert more.parts + more.pairs + ours == pytest.approx(total, rel=1e-6)
    parts = [len(list(triton_memory.parts_of(4, 1 << 20, 2048, room.parts))) for room in (few, more)]
    assert parts[1] < parts[0]


@pytest.mark.parametrize("name", SMALL)
def test_sums_in_a_fixed_order_are_the_same_sums(deterministic: None, name: str) -> None:
    assert_right(SMALL[name])


def inputs(length: int = 32, dim: int = 16) -> list[Tensor]:
    return [torch.randn(1, 1, length, dim, generator=seeded(i)).to(DEVICE).requires_grad_() for i in range(3)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_scales_that_are_not_positive(scale: float, causal: bool) -> None:
    """With all cells opened it is exact attention, whatever the scale."""
    method = nf.Cells(cell_size=4, probes=40, segment=8 if causal else None)
    upstream = torch.randn(1, 1, 32, 16, generator=seeded(9)).to(DEVICE)
    found = []
    for way, backend in ((method, "triton"), (nf.Exact(), "auto")):
        values = inputs()
        output = nf.attention(*values, is_causal=causal, scale=scale, method=way, backend=backend)
        found.append([output, *torch.autograd.grad(output, values, upstream)])
    for mine, true in zip(*found, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("limit", "method", "causal", "remedy"),
    [
        ("MOST_SEGMENTS", nf.Cells(cell_size=4, segment=8), True, "larger segment"),
        ("MOST_PROBES", nf.Cells(cell_size=4, probes=3), False, "larger cells"),
        ("MOST_CELLS", nf.Cells(cell_size=4), False, "larger ones"),
    ],
)
def test_limits_name_the_remedy(monkeypatch: pytest.MonkeyPatch, limit: str, method: nf.Cells, causal: bool, remedy: str) -> None:
    monkeypatch.setattr(f"nearfield.cells.method.{limit}", 2)
    with pytest.raises(ValueError, match=remedy):
        nf.attention(*inputs(), is_causal=causal, method=method, backend="triton")


@pytest.mark.parametrize("which", [1, 2], ids=["key", "value"])
def test_earlier_rows_have_gradients_whatever_follows(which: int) -> None:
    """A block of rows that do not all see the same segments: what is not finite in a later one stays there."""
    case = Case(length=24, keys=24, segment=8, heights=1, sinks=2, probes=1)
    clean = run(case)
    spoilt = run(case)
    (clean.keys, clean.values)[which - 1][:, 20:] = torch.inf
    (spoilt.keys, spoilt.values)[which - 1][:, 20:] = torch.nan
    for found in (clean, spoilt):
        forward_again(found)
        found.upstream[:, 20:] = 0.0
    first, second = clean.gradients()[0][:, :20], spoilt.gradients()[0][:, :20]
    assert torch.isfinite(clean.output[:, :20]).all()
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


def forward_again(found: Any) -> None:

    plan = found.case.settings, found.scale, 3, 0
    results = found.output, found.lse, found.cell_of, found.opened
    triton_forward.forward(found.queries, found.keys, found.values, found.case.visible(), *plan, *results, triton_memory.BEYOND)


def test_cells_of_equal_keys_at_equal_distances_are_cut() -> None:
    """Half of all keys are one and the same, every other one: a cut by odd and even would move all of them, or none."""
    from nearfield.cells.triton.cluster import limit_sizes
    from nearfield.cells.triton.layout import layout_of

    case = Case(length=1, keys=512, cell_size=4, sinks=0)
    layout = layout_of(case.keys, case.settings, DEVICE)
    cell_of = torch.arange(512, dtype=torch.int32, device=DEVICE)[None, None] % layout.cells
    cell_of[..., ::2] = 0
    limit_sizes(cell_of, layout)
    sizes = torch.bincount(cell_of.flatten().long(), minlength=layout.cells)
    assert int(sizes.sum()) == 512
    assert int(sizes.max()) <= 12 * 4


def test_blocks_of_rows_belong_to_one_head() -> None:
    """Grouped heads whose length is no multiple of a block."""
    assert_right(replace(SMALL["causal"], entries=1, group=3, length=70, keys=70, segment=32, cell_size=8))


def test_tensors_of_another_dtype_or_alignment_are_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    from nearfield.kernels.launch import Kernel

    @Kernel
    def kernel(x):
        pass

    compiled: list[Any] = []

    def compile_and_start(self: Any, grid: tuple[int, ...]) -> Any:
        return lambda x: compiled.append(x) or {(1, 1, 1): lambda *_, stream: None}

    jitted = MagicMock(spec=JITFunction, arg_names=["x"])
    jitted.__getitem__ = compile_and_start
    monkeypatch.setattr(kernel, "jitted", jitted)
    monkeypatch.setattr("nearfield.kernels.launch.KNOWN", True)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    aligned = torch.zeros(64)
    subclass = torch.nn.Parameter(aligned)
    different = [aligned, aligned[1:], aligned.double(), aligned.int()]
    for _ in range(3):
        for x in (*different, subclass):
            kernel[(1,)](x)
    assert [id(x) for x in compiled[:4]] == [id(x) for x in different]
    assert all(x is subclass for x in compiled[4:])
    assert len(compiled) == 4 + 3  # what is no plain tensor is compiled by Triton's own rules, every time


class OnACard:
    """Stands in for a tensor."""

    def get_device(self) -> int:
        return 0


def test_a_call_that_was_made_before_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled is started with all arguments in the order of the signature, on the stream of the moment."""
    from triton.runtime.jit import JITFunction

    from nearfield.kernels.launch import Kernel

    @Kernel
    def kernel(x, size, FIRST, SECOND):
        pass

    compiled: list[Any] = []
    started: list[Any] = []

    def compile_and_start(grid: tuple[int, ...]) -> Any:
        def start(*arguments: Any, **constants: Any) -> Any:
            compiled.append((grid, arguments, constants))
            return {(*grid, 1, 1)[:3]: lambda *arguments, stream: started.append((grid, arguments, stream))}

        return start

    jitted = MagicMock(spec=JITFunction, arg_names=["x", "size", "FIRST", "SECOND"])
    jitted.__getitem__ = lambda self, grid: compile_and_start(grid)
    monkeypatch.setattr(kernel, "jitted", jitted)
    monkeypatch.setattr("nearfield.kernels.launch.KNOWN", True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    x = OnACard()
    for size in (5, 5, 6, 6, 5):
        kernel[(3,)](x, size, SECOND=2, FIRST=1, num_warps=4)
    kernel[(4, 2)](x, 5, SECOND=2, FIRST=1, num_warps=4)
    kernel[(3,)](x, 5, SECOND=2, FIRST=1, num_warps=8)
    assert [(grid, arguments[1], constants["num_warps"]) for grid, arguments, constants in compiled] == [
        ((3,), 5, 4),
        ((3,), 6, 4),
        ((4, 2), 5, 4),
        ((3,), 5, 8),
    ]
    assert started == [((3,), (x, size, 1, 2), 77) for size in (5, 6, 5)]


@pytest.mark.parametrize("fused", [False, True], ids=["apart", "fused"])
@pytest.mark.parametrize("causal", [False, True])
def test_an_output_as_models_want_it_is_kept_once(causal: bool, fused: bool) -> None:
    """Queries of a projection `[batch, length, heads, dim]`: the output lies the same way, and is what the gradient keeps."""
    method = nf.Cells(cell_size=4, probes=2, segment=16 if causal else None, partition=nf.KMeans(iterations=1))
    options: dict[str, Any] = {"method": method, "is_causal": causal, "enable_gqa": True, "backend": "triton"}
    laid = [torch.randn(2, 24, heads, 16, generator=seeded(heads + i)).to(DEVICE) for i, heads in enumerate((2, 1, 1))]
    plain = [x.transpose(1, 2).contiguous().requires_grad_() for x in laid]
    # One projection may make queries and something else.
    laid[0] = torch.cat([laid[0], laid[0]], 2)[:, :, :2] if fused else laid[0]
    laid = [x.requires_grad_() for x in laid]
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        output = nf.attention(*(x.transpose(1, 2) for x in laid), **options)
    expected = nf.attention(*plain, **options)
    assert output.transpose(1, 2).is_contiguous()
    assert expected.is_contiguous()
    torch.testing.assert_close(output, expected, atol=0, rtol=0)
    place = output.untyped_storage().data_ptr()
    assert sum(x.untyped_storage().data_ptr() == place for x in kept) == 1
    upstream = torch.randn(output.shape, generator=seeded(9)).to(DEVICE)
    found = torch.autograd.grad(output, laid, upstream)
    for mine, true in zip(found, torch.autograd.grad(expected, plain, upstream), strict=True):
        torch.testing.assert_close(mine.transpose(1, 2), true, atol=1e-5, rtol=1e-5)

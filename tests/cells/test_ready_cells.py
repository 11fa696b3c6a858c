"""Calls of the Triton engine that were made before: the same bits as those that are prepared, whatever is around them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nearfield as nf
from nearfield.kernels import ready

pytest.importorskip("triton")

import triton.language as tl

from nearfield.cells import ready as ready_cells
from nearfield.kernels import replay
from nearfield.kernels.launch import Kernel, dense, strides
from nearfield.kernels.replay import Tape

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LENGTH, DIM = 33, 16
METHOD = nf.Cells(cell_size=8, probes=2, segment=16, sinks=4, partition=nf.KMeans(iterations=1))


def inputs(heads: int = 1, kv_heads: int | None = None, seed: int = 0) -> list[Tensor]:
    generator, counts = seeded(seed), (heads, kv_heads or heads, kv_heads or heads)
    return [torch.randn(1, count, LENGTH, DIM, generator=generator).to(DEVICE) for count in counts]


def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return nf.attention(q, k, v, **{"method": METHOD, "is_causal": True, "enable_gqa": True, "backend": "triton", **options})


def prepared(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same, by way of the operator: `estimate` remembers nothing."""
    options = {"method": METHOD, "is_causal": True, "enable_gqa": True, "backend": "triton", **options}
    return nf.estimate(q, k, v, **options).output


def tapes() -> list[Tape]:
    return [x for x in replay._TAPES.values() if isinstance(x, Tape)]


# With all kernels

KINDS: dict[str, tuple[dict[str, Any], int, int | None]] = {
    "causal": ({}, 2, 1),
    "not causal": ({"is_causal": False, "method": nf.Cells(8, 2, sinks=4, partition=nf.KMeans(iterations=1))}, 1, None),
    "shared, causal": ({"method": nf.Cells(8, 2, segment=16, sinks=4, partition=nf.KMeans(iterations=1), share=16)}, 1, None),
    "shared": ({"is_causal": False, "method": nf.Cells(8, 2, sinks=4, partition=nf.KMeans(iterations=1), share=16)}, 2, 1),
}


@pytest.mark.parametrize("name", KINDS)
def test_replayed_calls_have_the_same_bits(name: str) -> None:
    options, heads, kv_heads = KINDS[name]
    for seed in range(2):
        attend(*inputs(heads, kv_heads, seed), **options)
    (tape,) = tapes()
    fresh = inputs(heads, kv_heads, 2)
    assert torch.equal(attend(*fresh, **options), prepared(*fresh, **options))
    # Another iteration of k-means is two launches more.
    assert len(tape.launches) + 2 == {"causal": 23, "not causal": 22, "shared, causal": 16, "shared": 20}[name]


def test_replayed_training_has_the_same_bits() -> None:
    upstream = torch.randn(1, 1, LENGTH, DIM, generator=seeded(9)).to(DEVICE)
    for seed in range(2):
        attend(*(x.requires_grad_() for x in inputs(seed=seed)))
    (tape,) = tapes()
    assert len(tape.results) == 4
    mine, theirs = ([x.requires_grad_() for x in inputs(seed=2)] for _ in range(2))
    output, expected = attend(*mine), prepared(*theirs)
    assert torch.equal(output, expected)
    grads = torch.autograd.grad(output, mine, upstream)
    for one, other in zip(grads, torch.autograd.grad(expected, theirs, upstream), strict=True):
        # On a card, sums are in no fixed order.
        torch.testing.assert_close(one, other, **({"atol": 0, "rtol": 0} if DEVICE == "cpu" else {}))


def test_a_nan_spoils_the_rows_that_see_it() -> None:
    """In calls made before nobody looks for it: the kernels cope with it."""
    for seed in range(2):
        attend(*inputs(seed=seed))
    (tape,) = tapes()
    q, k, v = inputs(seed=2)
    clean = attend(q, k, v)
    k[0, 0, 21, 3] = torch.nan
    found = attend(q, k, v)
    assert tapes() == [tape]
    assert torch.equal(found[:, :, :21], clean[:, :, :21])
    assert bool(found[:, :, 21:].isnan().all())


def test_other_default_dtypes_change_nothing() -> None:
    fresh = inputs()
    expected = prepared(*fresh)
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = attend(*fresh)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)


def test_tangents_are_refused() -> None:
    q, k, v = inputs()
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        attend(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)), k, v)


# With one kernel in place of all, so that many calls take little time


@Kernel
def _mix(
    queries, keys, values, visible, mixed, rows, key_rows, dim, query_entry, query_row, key_entry, key_row, value_entry,
    value_row, B: tl.constexpr,
):  # fmt: skip
    """q + 2 k + 4 v + 8 times how many keys a row sees; keys and values are those of its position."""
    row, entry = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, B)
    there = column < dim
    own = row % key_rows
    q = tl.load(queries + entry * query_entry + row * query_row + column, mask=there)
    k = tl.load(keys + entry * key_entry + own * key_row + column, mask=there)
    v = tl.load(values + entry * value_entry + own * value_row + column, mask=there)
    sees = tl.load(visible + row)
    tl.store(mixed + (entry * rows + row) * dim + column, q + 2 * k + 4 * v + 8 * sees, mask=there)


class Engine:
    """Notes how often it is asked, and under what circumstances."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.autocast: list[bool] = []
        self.error: BaseException | None = None

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *_: Any) -> tuple[Tensor, ...]:
        self.forwards += 1
        self.autocast.append(torch.is_autocast_enabled(DEVICE))
        queries, keys, values = (dense(x) for x in (queries, keys, values))
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        plan = [torch.empty(queries.shape[:2], device=queries.device) for _ in range(4)]
        self.launch(queries, keys, values, visible, output)
        if self.error is not None:
            raise self.error
        return output, plan[0], plan[1], plan[2], plan[3]

    def backward(
        self, do: Tensor, lse_grad: None, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, *_: Any
    ) -> tuple[Tensor, ...]:
        """Not gradients of anything, but functions of everything that gradients depend on."""
        self.backwards += 1
        self.autocast.append(torch.is_autocast_enabled(DEVICE))
        found = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (queries, keys, values))
        for number, into in enumerate(found):
            self.launch(*map(dense, (do, queries, keys, values)[number : number + 2]), dense(values), visible, into)
        return found

    @staticmethod
    def launch(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, into: Tensor) -> None:
        entries, rows, dim = queries.shape
        _mix[(rows, entries)](
            queries=queries,
            keys=keys,
            values=values,
            visible=visible,
            mixed=into,
            rows=rows,
            key_rows=keys.shape[1],
            dim=dim,
            **strides(query=queries),
            **strides(key=keys),
            **strides(value=values),
            B=16,
            num_warps=1,
        )


def mixed(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    group = q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1
    k, v = (x.repeat_interleave(group, -3) if group > 1 else x for x in (k, v))
    sees = (
        torch.arange(1.0, q.shape[-2] + 1, device=q.device)
        if causal
        else torch.full(q.shape[-2:-1], k.shape[-2], device=q.device)
    )
    return q + 2 * k + 4 * v + 8 * sees[:, None].to(q.dtype)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    found = Engine()
    monkeypatch.setattr(ready_cells, "forward", found.forward)
    monkeypatch.setattr(ready_cells, "backward", found.backward)
    return found


def small(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: sums of them are exact."""
    return torch.randint(-9, 9, shape, generator=seeded(seed)).to(DEVICE, dtype)


def three(seed: int, *shape: int) -> list[Tensor]:
    return [small(*(shape or (1, 1, 6, 8)), seed=3 * seed + i) for i in range(3)]


def packed(seed: int) -> tuple[Tensor, ...]:
    """As one projection leaves them: parts of one tensor."""
    return small(1, 6, 3, 2, 8, seed=seed).permute(2, 0, 3, 1, 4).unbind(0)


def one_for_all(seed: int) -> tuple[Tensor, ...]:
    return 3 * (small(1, 2, 6, 8, seed=seed),)


def at_first_one_for_all(seed: int) -> tuple[Tensor, ...]:
    """Alike by their signature, but two calls with three different tensors follow."""
    return one_for_all(seed) if seed < 2 else tuple(three(seed, 1, 2, 6, 8))


def expanded(seed: int) -> tuple[Tensor, ...]:
    x, y, z = three(seed, 1, 1, 6, 8)
    return x.expand(1, 4, 6, 8), y[:, :, :1].expand(1, 4, 6, 8), z.expand(1, 4, 6, 8)


def overlapping(seed: int) -> tuple[Tensor, ...]:
    x = small(64, seed=seed)
    return tuple(x[4 * i :].as_strided((1, 1, 6, 8), (64, 64, 4, 1)) for i in range(3))


def grouped(seed: int) -> tuple[Tensor, ...]:
    return small(2, 4, 6, 8, seed=seed), small(2, 2, 6, 8, seed=seed + 10), small(2, 2, 6, 8, seed=seed + 20)


REPLAYED: dict[str, Callable[[int], Any]] = {
    "plain": three,
    "two dimensions": lambda seed: three(seed, 6, 8),
    "three dimensions": lambda seed: three(seed, 2, 6, 8),
    "five dimensions": lambda seed: three(seed, 2, 2, 2, 6, 8),
    "packed": packed,
    "one for all": one_for_all,
    "one for all, three dimensions": lambda seed: 3 * (small(2, 6, 8, seed=seed),),
    "at first one for all": at_first_one_for_all,
    "expanded": expanded,
    "overlapping": overlapping,
    "grouped": grouped,
    "one key": lambda seed: three(seed, 1, 2, 1, 8),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", REPLAYED)
def test_inputs_of_all_kinds_are_replayed(name: str, causal: bool, engine: Engine) -> None:
    for seed in range(4):
        q, k, v = REPLAYED[name](seed)
        found = attend(q, k, v, is_causal=causal, method=nf.Cells(4, 1, segment=4 if causal else None))
        assert torch.equal(found, mixed(q, k, v, causal))
    assert engine.forwards == 2
    assert len(tapes()) == 1


def test_columns_that_are_apart_are_copied_every_time(engine: Engine) -> None:
    with torch.inference_mode():
        for seed in range(4):
            q, k, v = three(seed)
            k = k.mT.contiguous().mT
            assert torch.equal(attend(q, k, v), mixed(q, k, v))
    assert engine.forwards == 4
    assert list(replay._TAPES.values()) == ["aten.contiguous.default"]


@pytest.mark.parametrize("shape", [(0, 2, 6, 8), (1, 2, 0, 8), (1, 0, 6, 8)])
def test_nothing_to_compute(shape: tuple[int, ...], engine: Engine) -> None:
    for _ in range(3):
        assert attend(*torch.zeros(3, *shape, device=DEVICE).unbind(0)).shape == shape
    assert not ready._KNOWN


def test_grad_modes_are_different_calls(engine: Engine) -> None:
    for seed in range(12):
        q, k, v = three(seed)
        q.requires_grad_()
        with [torch.enable_grad, torch.no_grad, torch.inference_mode][seed % 3]():
            found = attend(q, k, v)
        assert found.requires_grad == (seed % 3 == 0)
        assert found.is_inference() == (seed % 3 == 2)
        assert torch.equal(found, mixed(q, k, v))
    assert len(ready._KNOWN) == 2


def test_calls_keep_nothing_alive(engine: Engine) -> None:
    seen = []
    for seed in range(8):
        given = three(seed)
        given[0].requires_grad_(seed % 2 == 0)
        found = attend(*given)
        if seed % 2 == 0:
            found.sum().backward()
        seen += [weakref.ref(x) for x in (*given, found)]
        seen += [weakref.ref(x.untyped_storage()) for x in (*given, found)]
        del given, found
    gc.collect()
    assert not [x for x in seen if x() is not None]


def train(given: list[Tensor], upstream: Tensor, **options: Any) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in given]
    return torch.autograd.grad(attend(*leaves, **options), leaves, upstream)


def gradients(given: list[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """What `Engine.backward` says."""
    q, k, v = given
    return mixed(upstream, q, v), mixed(q, k, v), mixed(k, v, v)


def assert_gradients(found: tuple[Tensor, ...], given: list[Tensor], upstream: Tensor) -> None:
    for mine, true in zip(found, gradients(given, upstream), strict=True):
        assert torch.equal(mine, true)


def test_backward_passes_are_replayed(engine: Engine) -> None:
    """Upstream gradients of several kinds; those that begin at an odd place are different calls."""
    shape, kinds = (1, 1, 6, 8), 5
    for seed in range(4 * kinds):
        given, wide = three(seed), small(64, seed=seed)
        upstream = (
            wide[:48].view(shape),
            wide[1:49].view(shape),
            wide[:6].view(1, 1, 6, 1).expand(shape),
            wide[:48].view(1, 1, 8, 6).mT,
            small(1, 1, 6, 16, seed=seed)[..., 8:],
        )[seed % kinds]
        assert_gradients(train(given, upstream), given, upstream)
    # Packed columns are those of the first kind; the other three are recorded once each.
    assert engine.backwards == 2 * 3
    assert engine.forwards == 2


def test_hooks_may_lay_out_saved_tensors_anew(engine: Engine) -> None:
    """As torch's `save_on_cpu` does: strides of the forward pass are not those of the backward pass."""

    def odd(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    hooks = (lambda x: x, lambda x: x.contiguous(), odd)
    for seed in range(9):
        given, upstream = list(packed(seed)), small(1, 2, 6, 8, seed=90 + seed)
        leaves = [x.detach().requires_grad_() for x in given]
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, hooks[seed % 3]):
            output = attend(*leaves)
        assert_gradients(torch.autograd.grad(output, leaves, upstream), given, upstream)
    assert len({key[2:] for key in replay._TAPES if len(key) > 2}) == 3


def test_determinism_asked_for_after_the_forward_pass(engine: Engine) -> None:
    given, upstream = three(0), small(1, 1, 6, 8)
    for asked in (False, False, False, True, True):
        leaves = [x.detach().requires_grad_() for x in given]
        output = attend(*leaves)
        torch.use_deterministic_algorithms(asked)
        try:
            torch.autograd.grad(output, leaves, upstream)
        finally:
            torch.use_deterministic_algorithms(False)
    assert engine.backwards == 4


def test_autocast_is_off_inside(engine: Engine) -> None:
    given, upstream = [x.bfloat16() for x in three(0)], small(1, 1, 6, 8, dtype=torch.bfloat16)
    for _ in range(3):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            train(given, upstream)
    assert (engine.forwards, engine.backwards) == (2, 2)
    assert not any(engine.autocast)


def test_two_backward_passes(engine: Engine) -> None:
    given, upstream = three(0), small(1, 1, 6, 8)
    for _ in range(3):
        leaves = [x.detach().requires_grad_() for x in given]
        output = attend(*leaves)
        for again in (True, False):
            assert_gradients(torch.autograd.grad(output, leaves, upstream, retain_graph=again), given, upstream)
        with pytest.raises(RuntimeError, match="second time"):
            output.backward(upstream)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_what_was_saved_must_not_change(which: int, engine: Engine) -> None:
    for seed in range(3):
        leaves = [x.requires_grad_() for x in three(seed)]
        output = attend(*leaves)
        with torch.no_grad():
            [*leaves, output][which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_an_output_may_be_changed_in_place_until_it_is_differentiated(engine: Engine) -> None:
    """As with any output that a gradient needs: torch says so in the backward pass, and not before."""
    for seed in range(3):
        given = three(seed)
        expected = 2 * mixed(*given)
        output = attend(*(x.requires_grad_() for x in given))
        assert torch.equal(output.mul_(2), expected)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_checkpointing(engine: Engine) -> None:
    for seed in range(4):
        given, upstream = three(seed), small(1, 1, 6, 8, seed=9 + seed)
        leaves = [x.detach().requires_grad_() for x in given]
        output = checkpoint(attend, *leaves, use_reentrant=False)
        assert_gradients(torch.autograd.grad(output, leaves, upstream), given, upstream)
    assert (engine.forwards, engine.backwards) == (2, 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no room")], ids=repr)
@pytest.mark.parametrize("when", [0, 1])
def test_interrupted(when: int, error: BaseException, engine: Engine) -> None:
    """In the first call, and in the one that is recorded."""
    for seed in range(when):
        attend(*three(seed))
    engine.error = error
    with pytest.raises(type(error)):
        attend(*three(7))
    engine.error = None
    for seed in range(4):
        q, k, v = three(seed)
        assert torch.equal(attend(q, k, v), mixed(q, k, v))
    assert engine.forwards == 3
    assert len(tapes()) == 1


@pytest.mark.parametrize("scale", [None, 0.5, -0.5, 0.0])
def test_a_scale_is_part_of_the_call(scale: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative one turns queries around, which is no kernel of ours: recorded with that, the call runs as it is written."""
    seen: list[float] = []

    class Enough(Exception):
        pass

    def forward(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, sizes: Any, scale: float, *_: Any) -> None:
        seen.append(scale)
        raise Enough

    monkeypatch.setattr("nearfield.cells.triton.forward.forward", forward)
    for wanted in (scale, 0.125, scale):
        with pytest.raises(Enough):
            attend(*three(0), scale=wanted)
    assert seen == pytest.approx([8**-0.5 if scale is None else scale, 0.125, seen[0]])


def test_second_derivatives_are_refused() -> None:
    """With the operators themselves: they refuse."""
    from nearfield.cells import operator

    calls: list[int] = []

    def fake(*arguments: Any) -> tuple[Tensor, ...]:
        calls.append(1)
        return tuple(x.clone() for x in arguments[2:5])

    with pytest.MonkeyPatch.context() as patched:
        engine = Engine()
        patched.setattr(ready_cells, "forward", engine.forward)
        patched.setattr(ready_cells, "backward", engine.backward)
        patched.setattr(operator.CellsBackward, "forward", staticmethod(fake))
        for seed in range(3):
            leaves = [x.requires_grad_() for x in three(seed)]
            grads = torch.autograd.grad(attend(*leaves).sum(), leaves, create_graph=True)
            with pytest.raises(NotImplementedError, match="double backward"):
                grads[0].sum().backward()
    assert (len(calls), engine.backwards) == (3, 0)

"""The block sizes of every class of cards, on whatever card there is: the kernels are right with them, and stay within what a
card of the class has. Without a card, in Triton's interpreter, they are right."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_triton import CASES, DEVICE, Case, off, run

import nearfield as nf
from nearfield import _compat
from nearfield.kernels import cards

pytest.importorskip("triton")

from nearfield.cells.cache.store import CellStore
from nearfield.kernels.launch import Kernel

PASSES = {"_nearest", "_means", "_moments", "_products", "_local_dq", "_far_dq", "_far_dmoments", "_near_dkv"}
BY_ROW = {"_route", "_attend_rows", "_near_fwd", "_merge", "_near_dq"}
SHARED_BLOCKS = {"_vote", "_list_keys", "_attend", "_listed_dq"}
IN_ORDER = SHARED_BLOCKS | {"_best_cells"}
STEP = {"score_cells", "choose_and_read_open_end", "read_cells", "merge_parts"}


@pytest.fixture(params=cards.SHARED)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A class whose block sizes are used, if there is room for them."""
    if cards.SHARED[request.param] > cards.SHARED[cards.class_of(DEVICE, "")]:
        pytest.skip(f"{DEVICE} has less shared memory than cards of class {request.param}")
    monkeypatch.setenv(cards.SWITCH, request.param)
    return request.param


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """What Triton made of every kernel that is launched. Nothing is remembered from launch to launch."""
    found: dict[str, list[Any]] = defaultdict(list)
    launch = Kernel.launch

    def forgetful(kernel: Kernel, grid: tuple[int, ...], /, **arguments: Any) -> None:
        kernel.remembered.clear()
        launch(kernel, grid, **arguments)

    def noted(function: Any, compiled: Any, grid: tuple[int, ...]) -> None:
        found[function.fn.__name__].append(compiled.metadata)

    monkeypatch.setattr(Kernel, "launch", forgetful)
    monkeypatch.setattr(_compat, "launcher", noted)
    return found


def assert_within(name: str, launched: dict[str, list[Any]], expected: set[str]) -> None:
    assert set(launched) >= expected
    most = {kernel: max(made.shared for made in versions) for kernel, versions in launched.items()}
    assert {kernel: size for kernel, size in most.items() if size > cards.SHARED[name]} == {}


@pytest.mark.long
@pytest.mark.parametrize("case", ["causal", pytest.param("shared-causal", marks=pytest.mark.slow)])
def test_block_sizes_of_every_class_are_right(name: str, case: str) -> None:
    found = run(replace(CASES[case], length=36, keys=36, segment=8))
    output, lse, grads = found.expected()
    torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(found.lse.double(), lse, atol=5e-6, rtol=5e-6)
    for mine, true in zip(found.gradients(), grads, strict=True):
        torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("segment", "share"), [(0, 1), (128, 1), (128, 32), (0, 32)], ids=["plain", "causal", "shared", "in-order"]
)
@pytest.mark.parametrize(
    ("dtype", "dim"),
    [(torch.bfloat16, 64), (torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 64), (torch.float32, 128)],
    ids=["bfloat16-64", "bfloat16-128", "bfloat16-256", "float32-64", "float32-128"],
)
def test_passes_stay_within_the_class(
    name: str, dtype: torch.dtype, dim: int, segment: int, share: int, launched: dict[str, list[Any]]
) -> None:
    """Off by no more than twice what plain torch in the same dtype is off by."""
    case = Case(2, 2, 300, 417, dim, dim, segment, 1 if segment else 0, 16, 16, 8, 3 if segment else 1, padding=9, share=share)
    found = run(case, dtype)
    output, _, grads = found.expected()
    plain, _, plain_grads = found.expected(dtype)
    floor = 2e-6 if dtype == torch.float32 else 0.0
    assert off(found.output, output) <= 2 * off(plain, output) + floor
    for mine, eager, true in zip(found.gradients(), plain_grads, grads, strict=True):
        assert off(mine, true) <= 2 * off(eager, true) + floor
    assert_within(name, launched, PASSES | (BY_ROW if share == 1 else SHARED_BLOCKS if segment else IN_ORDER))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_steps_stay_within_the_class(name: str, dtype: torch.dtype, dim: int, launched: dict[str, list[Any]]) -> None:
    """The same step as with the card's own block sizes, up to the order of sums; without dependent launches where it has none."""
    store = CellStore(nf.Cells(segment=1024, cell_size=32, probes=8))
    store.append(*torch.randn(2, 1, 2, 5000, dim, device=DEVICE).to(dtype))
    query = torch.randn(1, 8, 1, dim, device=DEVICE).to(dtype)
    found = store.attend(query)
    assert_within(name, launched, STEP)
    waits = any(getattr(made, "launch_pdl", False) for made in launched["merge_parts"])
    assert waits == (_compat.has_dependent_launch() and cards.capability_of(name) >= cards.LEAST_DEPENDENT)
    with pytest.MonkeyPatch.context() as unset:
        unset.delenv(cards.SWITCH)
        own = store.attend(query)
    assert off(found, own) < {torch.float32: 1e-4, torch.bfloat16: 1e-2}[dtype]

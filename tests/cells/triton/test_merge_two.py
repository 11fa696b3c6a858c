"""Two outputs merged by one kernel, held to `nearfield.merge`: under Triton's interpreter on a CPU, for real on a GPU."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache import chunks
from nearfield.kernels import backends

pytest.importorskip("triton")

from nearfield.cells.triton import merge_two as module
from nearfield.cells.triton.merge_two import merge_two

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF, BF16, FLOAT = torch.float16, torch.bfloat16, torch.float32
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def drawn(*shape: int, dtypes: tuple[torch.dtype, torch.dtype] = (FLOAT, FLOAT)) -> Parts:
    """Two outputs and their normalisers, of which either may be much larger."""
    first, second = (torch.randn(shape, generator=seeded(i)).to(DEVICE, dtype) for i, dtype in enumerate(dtypes))
    lses = [8 * torch.randn(shape[:3], generator=seeded(i + 2)).to(DEVICE) for i in range(2)]
    return first, second, *lses


def in_double(first: Tensor, second: Tensor, *lses: Tensor) -> Tensor:
    return nf.merge([first.double(), second.double()], [x.double() for x in lses])[0]


def assert_merged(parts: Parts, dtype: torch.dtype) -> Tensor:
    """As the specification has it in float64, up to one rounding."""
    found, wanted = merge_two(*parts, dtype), in_double(*parts)
    assert (found.dtype, found.shape) == (dtype, parts[0].shape)
    # Half the distance between numbers; the interpreter cuts bfloat16 off. Shares are in float32, and the two terms may cancel.
    eps = torch.finfo(dtype).eps / (1 if dtype == BF16 and DEVICE.type == "cpu" else 2)
    torch.testing.assert_close(found.double(), wanted, rtol=1.01 * eps, atol=2e-6, equal_nan=True)
    return found


@pytest.mark.parametrize("dtypes", [*product((HALF, BF16, FLOAT), repeat=3)], ids=lambda x: "-".join(str(y)[6:] for y in x))
def test_in_any_dtypes(dtypes: tuple[torch.dtype, ...], poisoned: None) -> None:
    assert_merged(drawn(2, 3, 9, 16, dtypes=dtypes[:2]), dtypes[2])


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 3, 37, 20), (1, 2, 130, 7), (3, 1, 5, 300), (1, 2, 64, 64)], ids=str)
def test_of_any_size(shape: tuple[int, ...], poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_merged(drawn(*shape), FLOAT)
    monkeypatch.setattr(module, "NUMBERS", 256)  # more than one program for a head
    assert_merged(drawn(*shape, dtypes=(BF16, BF16)), BF16)


@pytest.mark.parametrize("shape", [(0, 2, 3, 4), (1, 2, 0, 4), (1, 2, 3, 0)], ids=str)
def test_of_nothing(shape: tuple[int, ...]) -> None:
    assert merge_two(*drawn(*shape), BF16).shape == shape


def test_each_lies_in_memory_as_it_may(poisoned: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NUMBERS", 128)
    parts = drawn(2, 3, 21, 12)
    wanted = merge_two(*parts, FLOAT)
    # Heads within rows; columns apart; a part of something larger; normalisers of rows, heads and batch entries in turn.
    by_rows = parts[0].transpose(1, 2).contiguous().transpose(1, 2)
    apart = parts[1].mT.contiguous().mT
    wider = torch.full((2, 4, 30, 17), torch.nan, device=DEVICE)
    wider[:, 1:, 5:26, 3:15] = parts[0]
    part = wider[:, 1:, 5:26, 3:15]
    turned = parts[2].permute(2, 1, 0).contiguous().permute(2, 1, 0)
    strewn = parts[3].repeat_interleave(2, 2)[:, :, ::2]
    assert apart.stride(3) != 1
    for first, second in product((parts[0], by_rows, part), (parts[1], apart)):
        found = merge_two(first, second, turned, strewn, FLOAT)
        assert torch.equal(found, wanted)
        if first is not part:
            assert found.stride() == first.stride()
    assert torch.equal(merge_two(apart, part, strewn, turned, FLOAT), wanted)
    one_for_all = parts[1][:, :1].expand(-1, 3, -1, -1)
    overlapping = parts[1].flatten().as_strided(parts[1].shape, (60, 40, 1, 1))
    for first in (one_for_all, overlapping):
        assert_merged((first, parts[0], *parts[2:]), BF16)


def test_rows_that_see_nothing_of_a_part(poisoned: None) -> None:
    """They are the other one, bit for bit, whatever this one holds; zero if neither sees anything."""
    first, second, *lses = drawn(1, 2, 12, 16, dtypes=(BF16, FLOAT))
    rows = [slice(i, i + 3) for i in range(0, 12, 3)]
    lses[0][:, :, rows[0]] = lses[0][:, :, rows[2]] = -torch.inf
    lses[1][:, :, rows[1]] = lses[1][:, :, rows[2]] = -torch.inf
    for x, own in ((first, (rows[0], rows[2])), (second, (rows[1], rows[2]))):
        for some, what in zip(own, (torch.nan, torch.inf), strict=True):
            x[:, :, some] = what
    found = assert_merged((first, second, *lses), FLOAT)
    assert torch.equal(found[:, :, rows[0]], second[:, :, rows[0]])
    assert torch.equal(found[:, :, rows[1]], first[:, :, rows[1]].float())
    assert bool((found[:, :, rows[2]] == 0).all())
    assert bool(found.isfinite().all())


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_what_is_no_number_stays_so() -> None:
    """NaN and infinities of outputs that count, a normaliser that is NaN, and one of +inf; no other row changes."""
    first, second, *lses = drawn(1, 1, 9, 4)
    wanted = merge_two(first, second, *lses, FLOAT)
    first[0, 0, 0, 1], second[0, 0, 1, 2], second[0, 0, 2, 3] = torch.nan, torch.nan, torch.inf
    lses[0][0, 0, 3], lses[1][0, 0, 4] = torch.nan, torch.nan
    lses[0][0, 0, 5] = torch.inf
    lses[0][0, 0, 6], lses[1][0, 0, 6] = torch.nan, -torch.inf
    lses[0][0, 0, 7], lses[1][0, 0, 7] = -torch.inf, torch.inf
    found, spec = merge_two(first, second, *lses, FLOAT), nf.merge([first, second], lses)[0]
    torch.testing.assert_close(found, spec, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert torch.equal(found[0, 0].isnan().sum(1), torch.tensor([1, 1, 0, 4, 4, 4, 4, 4, 0], device=DEVICE))
    assert torch.equal(found[0, 0, 8], wanted[0, 0, 8])


def test_it_is_rounded_once() -> None:
    parts = drawn(2, 2, 64, 32)
    for dtype in (HALF,) if DEVICE.type == "cpu" else (HALF, BF16):
        found, wanted = merge_two(*parts, dtype), in_double(*parts)
        assert float((found.double() - wanted).norm()) < 1.001 * float((wanted.to(dtype).double() - wanted).norm())


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 128])
def test_a_chunk_on_a_gpu(dim: int) -> None:
    near, past, *lses = drawn(2, 8, 2051, dim, dtypes=(BF16, BF16))
    near = near.transpose(1, 2).contiguous().transpose(1, 2)
    found = assert_merged((near, past, *lses), BF16)
    assert found.stride() == near.stride()


def test_normalisers_far_from_zero(poisoned: None) -> None:
    first, second, *lses = drawn(1, 2, 8, 16)
    for shift in (-3e4, 3e4):
        near = [x / 8 + shift for x in lses]
        assert_merged((first, second, *near), FLOAT)
    assert_merged((first, second, lses[0] - 1e30, lses[1] + 1e30), FLOAT)


def test_offsets_beyond_int32() -> None:
    """The last head begins 2^31 numbers after the first. Nothing between them is touched, so a CPU has no memory for it."""
    parts = drawn(1, 3, 5, 16, dtypes=(BF16, BF16))
    far = torch.empty(2**31 + 5 * 16, dtype=BF16, device=DEVICE).as_strided((1, 3, 5, 16), (0, 2**30, 16, 1))
    far.copy_(parts[0])
    wanted = merge_two(*parts, BF16)
    assert torch.equal(merge_two(far, *parts[1:], BF16), wanted)
    assert torch.equal(merge_two(parts[1], far, parts[3], parts[2], BF16), wanted)


def test_which_chunks_the_kernel_merges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Triton runs: those in dtypes that it has, which need no gradient. For all others `merge` does, or refuses."""
    calls: list[torch.dtype] = []

    def counted(*arguments: Tensor) -> Tensor:
        calls.append(arguments[-1])  # type: ignore[arg-type]
        return merge_two(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "merge_two", counted)
    first, second, *lses = drawn(1, 2, 6, 8, dtypes=(BF16, FLOAT))
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    plain = chunks.merged(first, second, *lses, BF16)
    assert not calls
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    torch.testing.assert_close(chunks.merged(first, second, *lses, BF16), plain, rtol=torch.finfo(BF16).eps, atol=1e-6)
    assert calls == [BF16]
    in_float64 = chunks.merged(first.double(), second, *lses, torch.float64)
    torch.testing.assert_close(in_float64, in_double(first, second, *lses), rtol=1e-6, atol=1e-6)
    chunks.merged(first, second, lses[0].double(), lses[1].double(), BF16)
    trained = second.clone().requires_grad_()
    assert chunks.merged(first, trained, *lses, BF16).requires_grad
    with pytest.raises(ValueError, match="all outputs must have one shape"):
        chunks.merged(first, second[:, :, 1:], *lses, BF16)
    with pytest.raises(ValueError, match="must have the shape of its output"):
        chunks.merged(first, second, lses[0], lses[1][:, :, 1:], BF16)
    assert calls == [BF16]
    with torch.no_grad():
        chunks.merged(first, trained, *lses, HALF)
    assert calls == [BF16, HALF]

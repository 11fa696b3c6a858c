"""Calls over ranks: who is told what when ranks disagree, what is sent, what is kept, and what is refused."""

from __future__ import annotations

import gc
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from crew import Crew, crew
from quick_interpreter import make_quick
from torch import Tensor

import nearfield as nf
from nearfield.distributed import Ranks, context_parallel, passes, shard, unshard
from nearfield.distributed.context import ranks_of
from nearfield.distributed.flash import Flash
from nearfield.distributed.layout import Layout

CELLS = nf.Cells(cell_size=4, probes=3, segment=16, sinks=2)


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


@pytest.fixture
def impatient() -> Iterator[Crew]:
    made = Crew(3, timeout=3)
    yield made
    made.close()


def rows(group: Any, length: int = 60, heads: int = 2, dim: int = 8) -> list[Tensor]:
    made = torch.randn(3, 1, heads, length, dim, generator=torch.Generator().manual_seed(0))
    return [shard(x, group, 2) for x in made]


def differs(group: Any, how: str) -> str:
    """What this rank is told when rank 1 does something else."""
    q, k, v = rows(group)
    options: dict[str, Any] = {"method": CELLS, "is_causal": True}
    if torch.distributed.get_rank(group) == 1:
        if how == "dim":
            q, k = (x[..., :4] for x in (q, k))
        if how == "dtype":
            q, k, v = q.double(), k.double(), v.double()
        if how == "method":
            options["method"] = nf.Cells(cell_size=8)
        if how == "causal":
            options["is_causal"] = False
        if how == "mask":
            options["attn_mask"] = torch.ones(1, 1, 1, k.shape[2], dtype=torch.bool)
        if how == "wrong":
            v = v.half()
        if how == "tokens":
            k, v = k[:, :, 1:], v[:, :, 1:]
        if how == "gradients":
            q.requires_grad_()
        if how.endswith("no tensor"):
            q, k, v = (x.tolist() if how.startswith(name) else x for name, x in (("query", q), ("key", k), ("value", v)))
    if how == "sinks":
        options |= {"method": nf.Exact(), "s_aux": torch.zeros(2, requires_grad=torch.distributed.get_rank(group) == 1)}
    is_cast = how == "autocast" and torch.distributed.get_rank(group) == 1
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
            nf.attention(q, k, v, mesh=group, **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


SAID = {
    "dim": "rank 1 has key ['torch.float32', 'cpu', [1, 2, -1, 4]], but rank 0 ['torch.float32', 'cpu', [1, 2, -1, 8]]",
    "dtype": "rank 1 has key ['torch.float64'",
    "method": "Cells(cell_size=8",
    "causal": "is_causal=False",
    "mask": "rank 1 has mask ['torch.bool', 'cpu', [1, 1, 1, -1]], but rank 0 None",
    "wrong": "query and value must have the same dtype",
    "query is no tensor": "TypeError: query must be a torch.Tensor, got list",
    "key is no tensor": "TypeError: key must be a torch.Tensor, got list",
    "value is no tensor": "TypeError: value must be a torch.Tensor, got list",
    "gradients": "rank 1 has gradients [True, False, False, False], but rank 0 [False, False, False, False]",
    "sinks": "rank 1 has gradients [False, False, False, True], but rank 0 [False, False, False, False]",
    "autocast": "rank 1 has key ['torch.bfloat16'",
}


@pytest.mark.parametrize("how", SAID)
def test_all_ranks_are_told_that_one_makes_another_call(ranks: Crew, how: str) -> None:
    for found in ranks.run(differs, how, ranks=3):
        assert found.startswith("RankError"), found
        assert SAID[how] in found


class Nearest(nf.Method):
    """A method of one's own, which shows nothing of itself."""

    def __init__(self, k: int, weights: Tensor | None = None) -> None:
        self.k, self.weights = k, weights
        self._calls = 0

    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        self._calls += 1  # as many as a rank has pieces
        return nf.TopK(self.k).run(problem, call)


WRONG: dict[str, dict[str, Any]] = {
    "dropout_p=0.1 cannot be combined with mesh": {"dropout_p": 0.1},
    "dropout_p must be in": {"dropout_p": 2},
    "gradient=RandomWalk": {"gradient": nf.gradients.RandomWalk()},
    "draws keys": {"method": nf.LazyGumbel()},
    "method must be a method": {"method": "cells"},
    "scale must be a finite number": {"scale": "a"},
    "is_causal must be True or False": {"is_causal": "a"},
    "return_lse must be True or False": {"return_lse": 3},
}


def wrong_alone(group: Any, which: str) -> list[str]:
    """What this rank is told where rank 1 has arguments that nobody could take, and whether the next call is right."""
    is_off, said = torch.distributed.get_rank(group) == 1, []
    q, k, v = rows(group)
    edges = torch.tensor([0, 30, 20, 60] if is_off else [0, 20, 60])
    module = nf.nn.Attention(8, 2, method=CELLS, mesh=group)

    def attend(**options: Any) -> Tensor:
        return nf.attention(q, k, v, mesh=group, **{"method": CELLS, "is_causal": True} | options)

    calls = [lambda options=options: attend(**options if is_off else {}) for options in WRONG.values()]
    if which == "others":
        calls = [
            lambda: nf.attention_varlen(*(x[0].transpose(0, 1) for x in (q, k, v)), edges, edges, method=CELLS, mesh=group),
            lambda: module(q[0, 0, :, :4] if is_off else q[0, 0]),
            lambda: module(q[0, 0], need_weights=is_off),
            lambda: module(q[0, 0].double() if is_off else q[0, 0]),
            lambda: unshard(q, group, 9 if is_off else 2),
            lambda: unshard(q.tolist() if is_off else q, group, 2),  # type: ignore[arg-type]
            lambda: attend(method=Nearest(4 if is_off else 8)),
        ]
    wanted = [shard(x, group, 2) for x in one_process()]
    for call in calls:
        try:
            call()
            said.append("nothing")
        except (RuntimeError, ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        assert torch.allclose(attend(), wanted[0], atol=1e-5)
    for _ in range(2):  # not off, however often it was called and wherever its parts are
        attend(method=Nearest(8, weights=q[: 1 + is_off].clone()))
    return said


def one_process() -> list[Tensor]:
    made = torch.randn(3, 1, 2, 60, 8, generator=torch.Generator().manual_seed(0))
    return [nf.attention(*made, method=CELLS, is_causal=True)]


OTHERS = [
    "cu_seqlens_q must begin with 0, never decrease",
    "query must have shape [batch, length, 8] or [length, 8], got (30, 4)",
    "need_weights=True: attention weights are never formed",
    "RuntimeError: mat1 and mat2",
    "dim must be one of the 4 dimensions of x, got 9",
    "TypeError: x must be a torch.Tensor, got list",
    "rank 1 has method \"Nearest with {'k': 4, 'weights': None}",
]


@pytest.mark.parametrize("which", ["attention", "others"])
def test_what_is_wrong_with_the_arguments_of_one_rank_is_told_to_all(ranks: Crew, which: str) -> None:
    """Otherwise its next call would be taken for the one that it has not made."""
    wanted = [*WRONG] if which == "attention" else OTHERS
    for said in ranks.run(wrong_alone, which, ranks=2):
        for found, part in zip(said, wanted, strict=True):
            assert found.startswith("RankError: rank 1 has "), found
            assert part in found


def no_tensors(group: Any) -> list[str]:
    """What all ranks are told that pass no tensor, with the default method, and whether they can go on."""
    given, said = rows(group), []
    for number in range(3):
        found: list[Any] = [*given]
        found[number] = None
        try:
            nf.attention(*found, mesh=group)
        except TypeError as error:
            said.append(str(error))
    return [*said, str(nf.attention(*given, mesh=group).shape == given[0].shape)]


def test_no_tensors(ranks: Crew) -> None:
    wanted = [f"{name} must be a torch.Tensor, got NoneType" for name in ("query", "key", "value")]
    assert ranks.run(no_tensors, ranks=2) == [[*wanted, "True"]] * 2


def test_tokens_that_are_shared_out_otherwise(ranks: Crew) -> None:
    for found in ranks.run(differs, "tokens", ranks=3):
        assert "ranks have [20, 19, 20] tokens of the keys, but 59 tokens are shared out as [19, 20, 20]" in found


def misfits(group: Any) -> str:
    x = torch.randn(1, 2, 60, 8)
    with context_parallel(group, buffers=[x], buffer_seq_dims=[2]):
        own = x[:, :, 1:] if torch.distributed.get_rank(group) == 1 else x
        try:
            nf.attention(own, own, own, mesh=group)
        except RuntimeError as error:
            return str(error)
    return "nothing"


def test_tokens_of_another_sequence_inside_of_a_context(ranks: Crew) -> None:
    for found in ranks.run(misfits, ranks=2):
        assert "rank 1 has tokens '[29, 29] tokens in place of [30, 30]'" in found


def misfit_context(group: Any, how: str) -> str:
    """What this rank is told where rank 1 shares out something else."""
    first: Any = torch.zeros(1, 60)
    buffers, dims = [first, torch.zeros(1, 60)], [1, 1]
    if torch.distributed.get_rank(group) == 1:
        if how == "length":
            buffers = [torch.zeros(1, 61) for _ in buffers]
        elif how == "lengths":
            buffers[1] = torch.zeros(1, 61)
        elif how == "dims":
            dims = [1]
        elif how == "no such dim":
            dims = [1, 2]
        elif how == "memory":
            buffers[1] = buffers[0]
        else:
            buffers[0] = [0] * 60
    try:
        with context_parallel(group, buffers=buffers, buffer_seq_dims=dims):
            return "nothing"
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("length", "rank 1 has length 61, but rank 0 60"),
        ("lengths", "buffers must hold one sequence, got lengths of [60, 61]"),
        ("dims", "buffer_seq_dims must name a dimension for each of the 2 buffers, got [1]"),
        ("no such dim", "got 2 for buffer 1 of 2"),
        ("memory", "buffers 0 and 1 have memory in common"),
        ("no tensor", "got buffer 0 of type list"),
    ],
)
def test_all_ranks_are_told_that_one_shares_out_something_else(ranks: Crew, how: str, told: str) -> None:
    for found in ranks.run(misfit_context, how, ranks=3):
        assert found.startswith("rank 1 has ")
        assert told in found


def enters_again(group: Any) -> tuple[str, bool]:
    """Rank 1 is interrupted between two layers, leaves the context and starts again by itself. What all are told, and whether
    they can go on once all of them start again."""
    made = torch.randn(1, 2, 60, 8, generator=torch.Generator().manual_seed(0))

    def forward(stops: bool = False) -> Tensor:
        x = made.clone()
        with context_parallel(group, buffers=[x], buffer_seq_dims=[2]):
            for _ in range(2):
                x = nf.attention(x, x, x, method=nf.Exact(), mesh=group)
                if stops:
                    raise KeyboardInterrupt
        return x

    said = ""
    try:
        try:
            forward(stops=torch.distributed.get_rank(group) == 1)
        except KeyboardInterrupt:
            forward()
    except RuntimeError as error:
        said = str(error)
    first = nf.attention(made, made, made, method=nf.Exact())
    return said, torch.allclose(forward(), shard(nf.attention(first, first, first, method=nf.Exact()), group, 2), atol=1e-5)


def test_a_rank_that_starts_again_by_itself_is_named(ranks: Crew) -> None:
    for said, goes_on in ranks.run(enters_again, ranks=3):
        assert "rank 1 has" in said
        assert "call 'context_parallel', but rank 0 'attention'" in said
        assert goes_on


class Interrupted(nf.Method):
    """Exact attention that rank 1 is interrupted in, or dies in."""

    def __init__(self, how: str) -> None:
        self.how = how

    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        if torch.distributed.get_rank() == 1:
            if self.how == "dies":
                os._exit(1)
            raise KeyboardInterrupt
        return nf.Exact().run(problem, call)


def interrupted(group: Any, how: str) -> str:
    passes.GROUP_BYTES = 1
    started = time.monotonic()
    said = ""
    for _ in range(2 if torch.distributed.get_rank() == 1 else 1):
        try:
            nf.attention(*rows(group, heads=4), method=Interrupted(how), mesh=group)
        except RuntimeError as error:
            said += f"{type(error).__name__}: {error} ({time.monotonic() - started < 15})"
        except KeyboardInterrupt:
            said += "interrupted, and then "
    return said


@pytest.mark.parametrize("how", ["is interrupted", pytest.param("dies", marks=pytest.mark.slow)])
def test_the_others_are_told_of_a_rank_that(impatient: Crew, how: str) -> None:
    impatient.start(interrupted, how)
    for rank in (0, 2):
        found = impatient.outcome(rank)[1]
        assert found.startswith("RankError"), found
        assert "rank 1 did not answer" in found
        assert found.endswith("(True)")
    if how == "is interrupted":
        told = impatient.outcome(1)[1]
        assert "interrupted, and then RankError: rank 1 has left attention (KeyboardInterrupt) half-way" in told


def test_the_others_are_told_of_an_interrupt_in_a_backward_pass(impatient: Crew) -> None:
    impatient.start(interrupted_later, ranks=2)
    assert "rank 1 did not answer" in impatient.outcome(0)[1]
    told = impatient.outcome(1)[1]
    assert "interrupted, and then rank 1 has left a backward pass (KeyboardInterrupt) half-way" in told


def interrupted_later(group: Any) -> str:
    """Rank 1 is interrupted in the backward pass, and calls again."""
    passes.GROUP_BYTES = 1
    said = ""
    output = nf.attention(*(x.requires_grad_() for x in rows(group, heads=4)), method=nf.Exact(), mesh=group)
    if torch.distributed.get_rank() == 1:

        def interrupt(*arguments: Any) -> Any:
            raise KeyboardInterrupt

        Flash.backward = interrupt  # type: ignore[method-assign]
    try:
        output.sum().backward()
    except KeyboardInterrupt:
        said = "interrupted, and then "
    except RuntimeError as error:
        return str(error)
    try:
        unshard(output.detach(), group, 2)
    except RuntimeError as error:
        said += str(error)
    return said


def out_of_step(group: Any, how: str) -> tuple[list[str], bool]:
    """What ranks are told where rank 1 does not make the backward pass of the others, and whether they can go on."""
    inputs = [x.requires_grad_() for x in rows(group)]
    options: dict[str, Any] = {"method": CELLS, "is_causal": True, "mesh": group}
    outputs = [nf.attention(*inputs, **options) for _ in range(2)]
    if how == "unshard":
        outputs = [unshard(x, group, 2) for x in inputs]
    if torch.distributed.get_rank(group) == 1:
        if how == "a hook":
            outputs[0].register_hook(lambda grad: 1 / 0)
        elif how == "nothing":
            outputs = []
        else:
            outputs.reverse()
    said = []
    for output in outputs:
        try:
            output.sum().backward()
        except (RuntimeError, ZeroDivisionError) as error:
            said.append(f"{type(error).__name__}: {error}")
        if said:
            break
    try:
        if torch.distributed.get_rank(group) == 1 and how in ("a hook", "nothing"):
            nf.attention(*inputs, **options)
    except RuntimeError as error:
        said.append(f"{type(error).__name__}: {error}")
    again = nf.attention(*(x.detach() for x in inputs), **options)
    return said, torch.equal(again, nf.attention(*(x.detach() for x in inputs), **options))


@pytest.mark.parametrize("how", ["the other one", "unshard", "a hook", "nothing"])
def test_a_rank_that_makes_another_backward_pass_is_named(ranks: Crew, how: str) -> None:
    """It would send something of the same size, and nobody would know, or of another size, which ends its process."""
    for rank, (said, goes_on) in enumerate(ranks.run(out_of_step, how, ranks=3)):
        assert said[-1].startswith("RankError: rank 1 has ")
        if how in ("the other one", "unshard"):
            assert "has number" in said[0]
        else:
            assert "call 'attention', but rank 0 'a backward pass'" in said[-1]
            assert len(said) == 1 + (rank == 1 and how == "a hook")
        assert goes_on


def differentiated_twice(group: Any) -> list[str]:
    """What ranks are told that ask for a gradient of a gradient, first all of them and then rank 1 alone."""
    said = []
    for number in range(6):
        alone, (q, k, v) = number >= 3, (x.requires_grad_() for x in rows(group))
        methods = nf.Exact(), CELLS
        output = nf.attention(q, k, v, method=methods[number % 3], mesh=group) if number % 3 < 2 else unshard(q, group, 2)
        twice = not alone or torch.distributed.get_rank(group) == 1
        try:
            found = torch.autograd.grad(output.square().sum(), q, create_graph=twice)
            said.append(f"{found[0].requires_grad}")
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_double_backward_is_refused(ranks: Crew) -> None:
    """The gradient would have no graph, and a penalty on it would do nothing."""
    for said in ranks.run(differentiated_twice, ranks=2):
        for found in said[:3]:
            assert found.startswith("NotImplementedError: nearfield does not support double backward"), found
        for found in said[3:]:
            assert "rank 1 has error 'NotImplementedError: nearfield does not support double backward" in found


class Watched(nf.Method):
    """Exact attention that notes when it attends."""

    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        EVENTS.append("attend")
        return nf.Exact().run(problem, call)


EVENTS: list[str] = []


def order_of_events(group: Any) -> list[str]:
    passes.GROUP_BYTES = 1
    EVENTS.clear()
    inputs = rows(group, heads=3)
    start, start_sum = Ranks.start_gather, Ranks.start_sum

    def note(self: Ranks, what: str, x: Tensor) -> Any:
        EVENTS.append(what)
        return start(self, what, x)

    def note_sum(self: Ranks, what: str, x: Tensor) -> Any:
        EVENTS.append(what)
        return start_sum(self, what, x)

    Ranks.start_gather, Ranks.start_sum = note, note_sum  # type: ignore[method-assign]
    try:
        output = nf.attention(*(x.requires_grad_() for x in inputs), method=Watched(), mesh=group)
        output.sum().backward()
    finally:
        Ranks.start_gather, Ranks.start_sum = start, start_sum  # type: ignore[method-assign]
    return EVENTS


def test_what_is_needed_next_is_on_its_way_while_rows_attend(ranks: Crew) -> None:
    pair = ["keys", "values"]
    sums = ["gradients of keys", "gradients of values"]
    forward = ["checks", *pair, *pair, "attend", *pair, "attend", "attend"]
    backward = ["checks", *pair, *pair, "attend", *sums, *pair, "attend", *sums, "attend", *sums]
    assert ranks.run(order_of_events, ranks=2)[0] == forward + backward


def sent(group: Any, name: str) -> dict[str, int]:
    passes.GROUP_BYTES = 1
    method = {"exact": nf.Exact(), "cells": CELLS}[name]
    inputs = rows(group, 64, heads=4)
    counted = ranks_of(group).sent
    counted.clear()
    nf.attention(*(x.requires_grad_() for x in inputs), method=method, is_causal=True, mesh=group).sum().backward()
    return dict(counted)


def test_bytes_that_are_sent(ranks: Crew) -> None:
    own = 4 * 16 * 8 * 4  # heads, tokens of a rank, dim, bytes: to each of three others, and again for the backward pass
    exchanged = {"keys": 2 * 3 * own, "values": 2 * 3 * own, "gradients of keys": 3 * own, "gradients of values": 3 * own}
    for found in ranks.run(sent, "exact", ranks=4):
        assert {name: x for name, x in found.items() if name != "checks"} == exchanged
    for rank, found in enumerate(ranks.run(sent, "cells", ranks=4)):
        # Each rank groups one head, for which three others send their keys in the three closed segments, up to key 48, which some
        # have 8 of and some 16; it sends the cells of these, seen as spans of one (the first and the third) and of two.
        keys = 8 if rank < 2 else 16
        more = {"keys to group": 3 * keys * 8 * 4, "cells": 2 * 3 * (2 * 16 + 32) * 4}
        # Of the 16 cells of each head a rank sums up some: two means and variances, and the products of one or two spans.
        moments, of_moments = found.pop("moments"), found.pop("gradients of moments")
        assert moments == 2 * of_moments <= 2 * 3 * 4 * (5 * 3 * 8 + 2 * 8 * 8) * 4
        assert {name: x for name, x in found.items() if name != "checks"} == exchanged | more


def most_gathered(group: Any) -> float:
    """How much of gathered keys and values there is at most, in units of those of a head."""
    passes.GROUP_BYTES = 1
    alive: list[weakref.ref[Tensor]] = []
    most, one = 0, 2 * 60 * 8 * 4
    start, joined = Ranks.start_gather, Layout.joined

    def note(x: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(x))
        # A thread of gloo lets go of what has come a moment after whoever waited for it goes on.
        deadline = time.monotonic() + 1
        while (
            there := sum(y.nbytes for y in (ref() for ref in alive) if y is not None)
        ) > 2 * one and time.monotonic() < deadline:
            time.sleep(0.001)
        most = max(most, there)

    def note_start(self: Ranks, what: str, x: Tensor) -> Any:
        pending = start(self, what, x)
        if what in ("keys", "values"):
            note(pending._result)
        return pending

    def note_joined(self: Layout, parts: Any, dim: int) -> Tensor:
        found = joined(self, parts, dim)
        note(found)
        return found

    inputs = [x.requires_grad_() for x in rows(group, heads=6)]
    Ranks.start_gather, Layout.joined = note_start, note_joined  # type: ignore[assignment, method-assign]
    try:
        nf.attention(*inputs, method=nf.Exact(), mesh=group).sum().backward()
    finally:
        Ranks.start_gather, Layout.joined = start, joined  # type: ignore[method-assign]
    return most / one


def test_keys_and_values_of_two_groups_of_heads_at_a_time(ranks: Crew) -> None:
    assert ranks.run(most_gathered, ranks=2) == [2.0, 2.0]


def kept(group: Any, name: str, length: int) -> tuple[int, int, int]:
    """Bytes that the graph keeps, those of the inputs, and how many gathered tensors are still there."""
    passes.GROUP_BYTES = 1
    method = {"exact": nf.Exact(), "cells": CELLS, "topk": nf.TopK(8)}[name]
    storages: dict[int, int] = {}
    whole: list[weakref.ref[Tensor]] = []
    joined = Layout.joined

    def note(self: Layout, parts: Any, dim: int) -> Tensor:
        found = joined(self, parts, dim)
        whole.append(weakref.ref(found))
        return found

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    inputs = [x.clone().requires_grad_() for x in rows(group, length, heads=4)]
    Layout.joined = note  # type: ignore[method-assign]
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            output = nf.attention(*inputs, method=method, is_causal=True, mesh=group)
    finally:
        Layout.joined = joined  # type: ignore[method-assign]
    gc.collect()
    assert output.grad_fn is not None
    return sum(storages.values()), sum(x.nbytes for x in inputs), sum(x() is not None for x in whole)


@pytest.mark.parametrize("name", ["exact", "cells", "topk"])
def test_a_rank_keeps_what_is_its_own(ranks: Crew, name: str) -> None:
    for saved, own, gathered in ranks.run(kept, name, 960, ranks=4):
        assert gathered == 0
        # Inputs and output, log-normalisers, and of cells the opened ones of each row and what this rank has grouped.
        assert saved < 2.5 * own


def refused(group: Any) -> list[str]:
    q, k, v = rows(group)
    whole = torch.randn(1, 2, 60, 8)
    calls: list[dict[str, Any]] = [
        {"dropout_p": 0.1},
        {"gradient": nf.gradients.RandomWalk()},
        {"method": nf.LazyGumbel()},
        {"method": nf.TopK(8, tail=8)},
        {"method": nf.Cells(samples=4)},
        {"method": CELLS, "window_size": (8, 0)},
        {"attn_mask": torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)},
        {"check_finite": True, "attn_mask": None},
        {"method": nf.TopK(8, index=nf.ExactIndex().build(whole))},
    ]
    q[0, 0, 0, 0] = torch.nan
    said = []
    for options in calls:
        try:
            nf.attention(q, k, v, mesh=group, **options)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    alike = torch.zeros(1, 61)
    contexts: list[tuple[list[Tensor], list[int]]] = [
        ([whole], [2, 1]),
        ([*torch.zeros(1, 60, 48).chunk(3, -1)], [1, 1, 1]),
        ([alike[:, :-1], alike[:, 1:]], [1, 1]),
        ([alike, alike], [1, 1]),
        ([alike, torch.zeros(1, 61, requires_grad=True)], [1, 1]),
    ]
    for buffers, dims in contexts:
        try:
            with context_parallel(group, buffers=buffers, buffer_seq_dims=dims):
                said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    for share_out in (shard, unshard):
        try:
            share_out(whole, group, 9)
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_is_refused(ranks: Crew) -> None:
    wanted = ["dropout_p=0.1", "gradient=RandomWalk", "LazyGumbel", "TopK(k=8, tail=8", "Cells(", "window_size=(8, 0)"]
    wanted += ["key-padding masks", "NaN or inf in query", "TopK has an index that is built already", "buffer_seq_dims"]
    wanted += ["buffers must be contiguous, got buffer 0", *["buffers 0 and 1 have memory in common"] * 2]
    wanted += ["none may require a gradient, got buffer 1", *["dim must be one of the 4 dimensions of x, got 9"] * 2]
    for said in ranks.run(refused, ranks=2):
        assert len(said) == len(wanted)
        for found, part in zip(said, wanted, strict=True):
            assert part in found


def by_kernels(group: Any, by_queries: bool) -> float:
    make_quick()
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(1, 2, 40, 16, generator=generator) for _ in range(4)]
    partition = nf.KMeans(by_queries=by_queries)
    method = nf.Cells(cell_size=8, probes=1, segment=16, share=1, partition=partition)
    options = {"is_causal": True, "method": method, "backend": "triton"}
    whole = [x.clone().requires_grad_() for x in made[:3]]
    output = nf.attention(*whole, **options)
    (output * made[3]).sum().backward()
    own = [shard(x, group, 2).requires_grad_() for x in made[:3]]
    part = nf.attention(*own, mesh=group, **options)
    (part * shard(made[3], group, 2)).sum().backward()
    pairs = [(part, output), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return max(float((a - shard(b, group, 2)).abs().max()) for a, b in pairs)


@pytest.mark.parametrize("by_queries", [False, True])
def test_kernels_in_triton_over_ranks(ranks: Crew, by_queries: bool) -> None:
    pytest.importorskip("triton")
    assert max(ranks.run(by_kernels, by_queries, ranks=2)) < 1e-4

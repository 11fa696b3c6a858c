"""The ranks that share out keys: what goes from one to the others, and what is said where one of them fails."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearfield._compat import meeting_store

HEADER = 8
"""Numbers that ranks exchange before a call: a digest of its arguments, the length of their text, and up to six of its own."""
MARK = 0x6E666E66
"""in the upper half of the second of these numbers, to tell them from anything else"""
LONGEST = 1 << 24
"""Bytes of a text. A rank that sends something else than a length seldom sends so small a number."""
CARRIED = 1 << 15
"""Up to so many bytes are a small message. Each rank sends its own straight to all others, from the thread that asks for it, and
what the others will send next has its place already. For a collective, gloo wakes a thread of its own first."""
SMALL = 1 << 18
"""Up to so many bytes in all go straight to all others too, in one collective. Gloo gathers in a ring, from one to the next,
which is for what takes longer to send than to arrive."""
TAG = 0x6E66
"""of small messages, apart from what whoever else uses the group sends"""
PATIENCE = timedelta(seconds=3)
"""How long to wait for an answer of the others, to say which rank has failed."""
NEAR = 16
"""Ranks that see a failure are at most so many calls apart."""

ALIKE = "All ranks must make the same calls with the same arguments"

_LEFT: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By process group, what this rank has left while the others were still at it."""

_AHEAD: weakref.WeakKeyDictionary[Any, tuple[Tensor, list[Any]]] = weakref.WeakKeyDictionary()
"""By process group, where the next small message of each rank comes, and what to wait for until it is there. A message that
nobody expects yet has to wait for threads of both ranks, one after the other."""

_GOING: weakref.WeakKeyDictionary[Any, deque[Any]] = weakref.WeakKeyDictionary()
"""By process group, the latest small messages of this rank: they go on their way even if it leaves half-way what they are of."""

_CALM: weakref.WeakSet[Any] = weakref.WeakSet()
"""Process groups whose threads give way, see `_give_way`."""


class RankError(RuntimeError):
    """Another rank has failed, does not answer, or makes another call."""


class CommonError(ValueError):
    """What all ranks have failed in together, and know it: they can go on."""


def told(error: Exception | None) -> str | None:
    """What a rank has found wrong with its own arguments, as a fact to agree on: the others need not wait for it in vain."""
    return None if error is None else f"{type(error).__name__}: {error}"


class Pending:
    """A tensor that is on its way."""

    def __init__(self, ranks: Ranks, what: str, result: Tensor, *works: Any) -> None:
        self._ranks, self._what, self._result, self._works = ranks, what, result, works

    def wait(self) -> Tensor:
        """The tensor. On a GPU, it is the current stream that waits."""
        with self._ranks.guarded(self._what):
            for work in self._works:
                work.wait()
        return self._result


class Unchecked(Pending):
    """A small tensor that is on its way to a rank which compares nothing. If others do, they have sent what they compare."""

    def __init__(self, ranks: Ranks, what: str, result: Tensor, rows: Tensor, *works: Any) -> None:
        super().__init__(ranks, what, result, *works)
        self._rows = rows

    def wait(self) -> Tensor:
        result = super().wait()
        self._ranks._compare_kinds(self._rows[:, 8:16].view(torch.int64).flatten().tolist())
        return result


class Carried(Pending):
    """A tensor that is on its way together with what ranks say of the call: it is there if they agree."""

    def __init__(self, agreement: Agreement, result: Tensor) -> None:
        self._agreement, self._result = agreement, result

    def wait(self) -> Tensor:
        self._agreement.wait()
        return self._result


class Agreement:
    """What all ranks say of a call."""

    def __init__(self, ranks: Ranks, text: str, said: list[int], numbers: int) -> None:
        self._ranks, self._text, self._numbers = ranks, text, numbers
        self._said = said + [0] * (HEADER - len(said))
        self._pending: Pending | None = None
        self._found: list[list[int]] | None = None

    def start(self) -> None:
        """Send it to the others."""
        header = torch.tensor(self._said, device="cpu")
        self._pending = self._ranks.start_gather("checks", header.to(self._ranks._place).view(torch.uint8))

    def start_with(self, what: str, x: Tensor) -> Pending:
        """Send it together with a small tensor that ranks gather; see `Ranks.start_gather`.

        Ranks that disagree may send messages of other sizes: nobody looks at more than the headers then.
        """
        ranks = self._ranks
        self._said[1] += 1  # of a rank that sends a tensor, and of one that does not
        header = torch.tensor(self._said, device="cpu").view(torch.uint8)
        ranks.sent["checks"] += len(header) * (ranks.size - 1)
        ranks.sent[what] += x.nbytes * (ranks.size - 1)
        self._pending = ranks._start_small("checks", torch.cat([header, _bytes(x)]))
        return Carried(self, _like(x, self._pending._result[:, len(header) :]))

    def wait(self) -> list[list[int]]:
        """The numbers of all ranks. Raises on every rank unless all make the same call."""
        if self._found is None:
            ranks = self._ranks
            ranks._unsettled = None
            if self._pending is None:
                self.start()
            assert self._pending is not None
            self._found = self._pending.wait()[:, : 8 * HEADER].cpu().view(torch.int64).tolist()
            if any(row[:2] != self._found[0][:2] for row in self._found):
                ranks._tell_differences([row[1] for row in self._found], self._text)
            # With a tensor, ranks have exchanged something since.
            ranks._agreed = ranks._calls - self._said[1] % 2
        return [row[2 : 2 + self._numbers] for row in self._found]


class Ranks:
    """A process group, for collectives that say who has failed.

    Args:
        mesh: a `torch.distributed.ProcessGroup`, or a `DeviceMesh` of one dimension, such as `mesh["cp"]`.
        check: compare what the ranks are called with before they exchange anything; see `agree`.
    """

    def __init__(self, mesh: Any, check: bool = True) -> None:
        self._group = weakref.ref(_group_of(mesh))
        self.check = check
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.sent: Counter[str] = Counter()
        """bytes that this rank has sent, by what they were; a gathered tensor goes once to each other rank"""
        if self.group not in _CALM:
            _give_way()
            _CALM.add(self.group)
        self._calls = 0
        self._agreed = 0
        """how many calls there were when the ranks last agreed"""
        self._unsettled: Agreement | None = None
        """waited for before anything else is exchanged"""

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group, as long as torch.distributed has it."""
        found = self._group()
        if found is None:
            raise RuntimeError("the process group of these ranks was destroyed; make Ranks of another one")
        return found

    @staticmethod
    def of(mesh: Any, check: bool = True) -> Ranks:
        """These ranks; those of a group or mesh that are `Ranks` already stay what they are, with their counts."""
        return mesh if isinstance(mesh, Ranks) else Ranks(mesh, check)

    @property
    def exchanges(self) -> int:
        """How many there were so far: as many on all ranks, so that one call can be told from another."""
        return self._calls

    def __deepcopy__(self, memo: Any) -> Ranks:
        return self  # A group of processes is where it is.

    def name(self, rank: int) -> str:
        """In words; the number is that in the whole job."""
        return f"rank {dist.get_global_rank(self.group, rank)}"

    def start_gather(self, what: str, x: Tensor) -> Pending:
        """The tensors of all ranks, of one shape, as `[size, ...]`."""
        is_small = x.device.type == "cpu" and self._place.type == "cpu" and x.nbytes <= CARRIED and x.nbytes * self.size <= SMALL
        if is_small and self._unsettled is not None and self._unsettled._pending is None:
            return self._unsettled.start_with(what, x)
        self.settle()
        self.sent[what] += x.nbytes * (self.size - 1)
        if is_small:
            pending = self._start_small(what, _bytes(x))
            rows, result = pending._result, _like(x, pending._result)
            if not self.check:
                return Unchecked(self, what, result, rows, *pending._works)
            return Pending(self, what, result, *pending._works)
        found = x.new_empty((self.size, *x.shape))
        with self.guarded(what):
            if x.device.type == "cpu" and found.nbytes <= SMALL:
                work = dist.all_to_all_single(found.view(-1), x.reshape(-1).repeat(self.size), group=self.group, async_op=True)
            else:
                # The names since torch 2.13; older ones know the others. A torch without torch.distributed knows none.
                all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                work = all_gather(found.view(-1), x.contiguous().view(-1), group=self.group, async_op=True)
            return Pending(self, what, found, work)

    def _start_small(self, what: str, own: Tensor) -> Pending:
        """The bytes of all ranks, each row with room for more."""
        with self.guarded(what):
            found, coming = _AHEAD.pop(self.group) if self.group in _AHEAD else self._expect()
            _AHEAD[self.group] = self._expect()
            found[self.rank, : len(own)] = own
            going = [dist.isend(own, group=self.group, group_dst=rank, tag=TAG) for rank in self._others]
            _GOING.setdefault(self.group, deque(maxlen=32 * self.size)).extend(going)
            return Pending(self, what, found, *going, *coming)

    def _expect(self) -> tuple[Tensor, list[Any]]:
        # The next call writes there, and may be in no inference mode, nor have the default device of this one.
        with torch.inference_mode(False):
            found = torch.empty(self.size, 8 * HEADER + CARRIED, dtype=torch.uint8, device="cpu")
            found[:, : 8 * HEADER] = 0  # A shorter message leaves the rest as it is: that must not be what was there before.
        return found, [dist.irecv(found[rank], group=self.group, group_src=rank, tag=TAG) for rank in self._others]

    def gather(self, what: str, x: Tensor) -> Tensor:
        """`start_gather`, at once. With one rank nothing goes anywhere, and this is a view."""
        return x[None] if self.size == 1 else self.start_gather(what, x).wait()

    def start_sum(self, what: str, x: Tensor) -> Pending:
        """The sum over all ranks of what each has for this one, of `x` `[size, ...]`."""
        self.settle()
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        found = x.new_empty(x.shape[1:])
        self.sent[what] += found.nbytes * (self.size - 1)
        with self.guarded(what):
            work = reduce_scatter(found.view(-1), x.contiguous().view(-1), group=self.group, async_op=True)
            return Pending(self, what, found, work)

    def start_exchange(self, what: str, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Pending]:
        """Part r of `parts` goes to rank r; from each rank comes one of `shapes`. All of one dtype and device."""
        self.settle()
        flat = torch.cat([part.reshape(-1) for part in parts])
        sizes, wanted = [part.numel() for part in parts], [math.prod(shape) for shape in shapes]
        found = flat.new_empty(sum(wanted))
        self.sent[what] += (flat.numel() - sizes[self.rank]) * flat.element_size()
        with self.guarded(what):
            work = dist.all_to_all_single(found, flat, wanted, sizes, group=self.group, async_op=True)
            pieces = found.split(wanted)
            return [Pending(self, what, part.view(*shape), work) for part, shape in zip(pieces, shapes, strict=True)]

    def texts(self, what: str, text: str) -> list[str]:
        """What each rank says."""
        length = torch.tensor([len(text.encode())], device=self._place)
        return self._texts(what, text, self.gather(what, length).flatten().tolist())

    def _texts(self, what: str, text: str, lengths: list[int]) -> list[str]:
        """Likewise, of so many bytes."""
        strange = [rank for rank, length in enumerate(lengths) if not 0 <= length <= LONGEST]
        if strange:
            raise self._out_of_step(f"{self._names(strange)} sent something else than a text ({what})")
        padded = torch.frombuffer(bytearray(text.encode().ljust(max(1, *lengths))), dtype=torch.uint8).to(self._place)
        rows = self.gather(what, padded)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """For a call in which ranks exchange something more than once.

        Where this rank leaves it half-way, such as by an interrupt or because memory ran out, the others wait for what it does
        not send any more. Whatever it sent later would be taken for that: from then on it sends nothing.
        """
        calls = self._calls
        try:
            yield
        except (RankError, CommonError):
            raise
        except (TypeError, ValueError) as error:
            # Ranks that have agreed, and exchanged nothing since, refuse the same.
            if self._calls > max(calls, self._agreed):
                _LEFT[self.group] = f"{what} ({type(error).__name__})"
            raise
        except BaseException as error:
            if self._calls > calls:
                _LEFT[self.group] = f"{what} ({type(error).__name__})"
            raise
        finally:
            self._unsettled = None

    def agree(
        self, call: str, numbers: Sequence[int] = (), moving: Mapping[str, Any] | None = None, **facts: Any
    ) -> list[list[int]]:
        """Raise on every rank unless all make the same call with the same `facts`; returns the `numbers` of all ranks.

        What goes over first has the same size whatever the ranks do, so that ranks that disagree find out, before any of them
        exchanges something else: all wait for it, also where it has to come from a GPU. `moving`: facts that are others in every
        call, such as a length. Without `check`, nothing is compared, and nothing is sent but numbers.
        """
        with self.together(call):
            return self.start_agree(call, numbers, moving, **facts).wait()

    def start_agree(
        self,
        call: str,
        numbers: Sequence[int] = (),
        moving: Mapping[str, Any] | None = None,
        held: bool = False,
        **facts: Any,
    ) -> Agreement:
        """`agree`, whose answer is on its way. It is waited for where it is asked for, and at the latest before ranks exchange
        anything else. The call must `settle` before it ends.

        `held`: what this rank says goes together with the first tensor that is gathered, if that is small, and is compared before
        anybody gets to see the tensor.
        """
        text = json.dumps({"call": call, **facts, **(moving or {})}, default=str, sort_keys=True) if self.check else ""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        agreement = Agreement(self, text, [digest, (MARK << 32) + 2 * len(text), *numbers], len(numbers))
        if self.size == 1 or not (self.check or numbers):
            agreement._found = [agreement._said] * self.size
            return agreement
        if not held:
            agreement.start()
        self._unsettled = agreement
        return agreement

    def settle(self) -> None:
        """Wait for what ranks say of the call that is under way, unless somebody has waited for it."""
        if self._unsettled is not None:
            self._unsettled.wait()

    @cached_property
    def _place(self) -> torch.device:
        """Where ranks can exchange numbers that are read at once."""
        on_cpu = "cpu:gloo" in dist.get_backend_config(self.group) or dist.get_backend(self.group) == "gloo"
        return torch.device("cpu" if on_cpu else torch.accelerator.current_accelerator() or "cpu")

    @cached_property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _tell_differences(self, kinds: list[int], facts: str) -> None:
        """Raise and say who makes another call, unless all have found something wrong with their own arguments: then each says
        what. `kinds`: the second number of what each rank says of its call."""
        self._compare_kinds(kinds)
        lengths = [kind % (1 << 32) // 2 for kind in kinds]
        silent = [rank for rank, length in enumerate(lengths) if not length]
        if silent and any(lengths):
            raise RankError(f"{self._names(silent)} has check=False, unlike the others. {ALIKE}")
        calls = [json.loads(text or "{}") for text in self._texts("checks", facts, lengths)]
        right = [rank for rank, call in enumerate(calls) if call.get("error") is None]
        if not right:
            return
        # What most ranks do, and of as many the lowest; what is wrong may be the same on most.
        alike = Counter(json.dumps(calls[rank]) for rank in right)
        usual = max(right, key=lambda rank: alike[json.dumps(calls[rank])])
        names = sorted({name for call in calls for name in call})
        for rank, call in enumerate(calls):
            differ = [name for name in names if call.get(name) != calls[usual].get(name)]
            if differ:
                told = "; ".join(f"{x} {call.get(x)!r}, but {self.name(usual)} {calls[usual].get(x)!r}" for x in differ)
                raise RankError(f"{self.name(rank)} has {told}. {ALIKE}")
        raise RankError("the ranks make different calls")

    def _compare_kinds(self, kinds: list[int]) -> None:
        """Raise where some ranks say what they are called with, and others send something else."""
        strange = [rank for rank, kind in enumerate(kinds) if kind >> 32 != MARK]
        if 0 < len(strange) < self.size:
            said = self._names([rank for rank in range(self.size) if rank not in strange])
            raise self._out_of_step(
                f"{said} told what the call is, and {self._names(strange)} sent something else: it makes another call, or "
                f"one has check=False and others have not. {ALIKE}"
            )

    def _out_of_step(self, told: str) -> RankError:
        """Nobody knows what comes next: what this rank sent could be taken for something else."""
        _LEFT[self.group] = "a call that others do not make"
        return RankError(f"{told}. This group of processes cannot go on; start it again")

    def _names(self, ranks: Sequence[int]) -> str:
        return ", ".join(map(self.name, ranks))

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Say which rank has failed where a collective does."""
        if self.group in _LEFT:
            raise RankError(
                f"{self.name(self.rank)} has left {_LEFT[self.group]} half-way, while others waited for it: this group of "
                "processes cannot go on; start it again"
            )
        self._calls += 1
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"{self.name(self.rank)} waited for others ({what}) in vain: {self._about_others(what)}. This group of processes "
                "cannot go on; start it again"
            ) from error

    def _about_others(self, what: str) -> str:
        """Which ranks do not say that they have seen this failure too, or else what each waited for."""
        # Ranks count alike what they do together: what they said of one failure says nothing of another.
        asked = meeting_store(), f"nearfield/{self.group.group_name}", self._calls, what + " (check=False)" * (not self.check)
        answers: list[dict[int, str]] = []
        # torch waits without an end for a store that is kept by a process which hangs.
        asking = threading.Thread(target=lambda: answers.append(self._answers(*asked)), daemon=True)
        asking.start()
        asking.join(3 * PATIENCE.total_seconds())
        found = answers[0] if answers else {}
        if self.rank not in found:
            return (
                "the store by which the ranks found each other did not answer; whoever keeps it has failed or ended, which is "
                "rank 0 unless torchrun or another process does"
            )
        missing = self._names([rank for rank in self._others if rank not in found])
        if missing:
            return f"{missing} did not answer"
        if len(set(found.values())) == 1:
            return "all ranks still answer; one of them may have come too late"
        waited = [f"{self.name(rank)} {'waited ' * (not rank)}for {found[rank]}" for rank in range(self.size)]
        return f"all ranks still answer, but {', '.join(waited)}"

    def _answers(self, store: Any, failure: str, calls: int, what: str) -> dict[int, str]:
        """What the ranks that say so waited for; of this one too, if the store can be asked."""
        found = {}
        with suppress(RuntimeError):
            # What was sent last has reached some of the others and not all, who have got further or less far.
            for near in range(calls - NEAR, calls + NEAR + 1):
                store.set(f"{failure}/{near}/{self.rank}", what)
        # However many are silent: twice as long in all, as some see a failure later than others.
        deadline = time.monotonic() + 2 * PATIENCE.total_seconds()
        # This rank itself comes last. What it has said is there, unless the store is gone, which then has no news of others.
        for rank in [*self._others, self.rank]:
            key, left = f"{failure}/{calls}/{rank}", min(deadline - time.monotonic(), PATIENCE.total_seconds())
            with suppress(RuntimeError):
                if left > 0.1:  # To wait for less than a millisecond would be without an end.
                    store.wait([key], timedelta(seconds=left))
                elif not store.check([key]):
                    continue
                found[rank] = store.get(key).decode()
        return found


def _give_way() -> None:
    """Let no thread in which gloo receives push aside the one that sends. It would wait for the lock that the other holds, and
    that in a loop which never sleeps: Linux lets it go on so for some 3 ms. Such a thread runs where a core is free, or when the
    other waits."""
    if not hasattr(os, "SCHED_BATCH"):
        return
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # It may have ended, and not everybody may do this.
            if (task / "comm").read_text().strip() == "gloo_tcp_loop":
                os.sched_setscheduler(int(task.name), os.SCHED_BATCH, os.sched_param(0))


def _bytes(x: Tensor) -> Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _like(x: Tensor, rows: Tensor) -> Tensor:
    """Tensors like this one, in rows of bytes that have room for more."""
    return rows[:, : x.nbytes].view(x.dtype).view(len(rows), *x.shape)


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if mesh is not None and not (dist.is_available() and isinstance(mesh, dist.ProcessGroup | dist.DeviceMesh)):
        raise TypeError(f"mesh must be a DeviceMesh or a ProcessGroup of torch.distributed, got {mesh!r:.80}")
    if mesh is None or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; call torch.distributed.init_process_group(...) first")
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh must have one dimension, got {mesh.mesh_dim_names or mesh.ndim}; pass the one along which keys are "
            'sharded, such as mesh["cp"]'
        )
    return mesh.get_group()

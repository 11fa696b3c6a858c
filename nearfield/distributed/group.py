"""The ranks that share out keys: what goes from one to the others, and what is said where one of them fails."""

from __future__ import annotations

import hashlib
import json
import math
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nearfield._compat import meeting_store

HEADER = 8
"""Numbers that ranks exchange before a call: a digest of its arguments, the length of their text, and up to six of its own."""
SMALL = 1 << 18
"""Up to so many bytes in all, each rank sends its own straight to all others. Gloo gathers in a ring, from one to the next, which
is for what takes longer to send than to arrive."""
PATIENCE = timedelta(seconds=3)
"""How long to wait for an answer of the others, to say which rank has failed."""


_LEFT: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""By process group, what this rank has left while the others were still at it."""


class RankError(RuntimeError):
    """Another rank has failed, does not answer, or makes another call."""


class CommonError(ValueError):
    """What all ranks have failed in together, and know it: they can go on."""


def told(error: Exception | None) -> str | None:
    """What a rank has found wrong with its own arguments, as a fact to agree on: the others need not wait for it in vain."""
    return None if error is None else f"{type(error).__name__}: {error}"


class Pending:
    """A tensor that is on its way."""

    def __init__(self, ranks: Ranks, what: str, result: Tensor, work: Any) -> None:
        self._ranks, self._what, self._result, self._work = ranks, what, result, work

    def wait(self) -> Tensor:
        """The tensor. On a GPU, it is the current stream that waits."""
        with self._ranks.guarded(self._what):
            self._work.wait()
        return self._result


class Agreement:
    """What all ranks say of a call, on its way."""

    def __init__(self, ranks: Ranks, text: str, header: Tensor | Pending, numbers: int) -> None:
        self._ranks, self._text, self._header, self._numbers = ranks, text, header, numbers

    def wait(self) -> list[list[int]]:
        """The numbers of all ranks. Raises on every rank unless all make the same call."""
        if isinstance(self._header, Pending):
            ranks, pending = self._ranks, self._header
            ranks._unsettled = None
            self._header = pending.wait().cpu()
            if bool((self._header[:, :2] != self._header[0, :2]).any()):
                ranks._tell_differences(self._text or "{}")
            ranks._agreed = ranks._calls
        return [row[2 : 2 + self._numbers] for row in self._header.tolist()]


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
        self.settle()
        found = x.new_empty((self.size, *x.shape))
        self.sent[what] += x.nbytes * (self.size - 1)
        with self.guarded(what):
            if x.device.type == "cpu" and found.nbytes <= SMALL:
                work = dist.all_to_all_single(found.view(-1), x.reshape(-1).repeat(self.size), group=self.group, async_op=True)
            else:
                # The names since torch 2.13; older ones know the others. A torch without torch.distributed knows none.
                all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                work = all_gather(found.view(-1), x.contiguous().view(-1), group=self.group, async_op=True)
            return Pending(self, what, found, work)

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
        said = text.encode()
        lengths = self.gather(what, torch.tensor([len(said)], device=self._place)).flatten().tolist()
        padded = torch.frombuffer(bytearray(said.ljust(max(1, *lengths))), dtype=torch.uint8).to(self._place)
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
        self, call: str, numbers: Sequence[int] = (), moving: Mapping[str, Any] | None = None, **facts: Any
    ) -> Agreement:
        """`agree`, whose answer is on its way. It is waited for where it is asked for, and at the latest before ranks exchange
        anything else. The call must `settle` before it ends."""
        text = json.dumps({"call": call, **facts, **(moving or {})}, default=str, sort_keys=True) if self.check else ""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        said = [digest, len(text), *numbers]
        header = torch.tensor(said + [0] * (HEADER - len(said)), dtype=torch.int64)
        if self.size == 1 or not (self.check or numbers):
            return Agreement(self, text, header.expand(self.size, -1), len(numbers))
        self._unsettled = Agreement(self, text, self.start_gather("checks", header.to(self._place)), len(numbers))
        return self._unsettled

    def settle(self) -> None:
        """Wait for what ranks say of the call that is under way, unless somebody has waited for it."""
        if self._unsettled is not None:
            self._unsettled.wait()

    @cached_property
    def _place(self) -> torch.device:
        """Where ranks can exchange numbers that are read at once."""
        on_cpu = "cpu:gloo" in dist.get_backend_config(self.group) or dist.get_backend(self.group) == "gloo"
        return torch.device("cpu" if on_cpu else torch.accelerator.current_accelerator() or "cpu")

    def _tell_differences(self, facts: str) -> None:
        calls = [json.loads(text) for text in self.texts("checks", facts)]
        usual = calls[0]
        names = sorted({name for call in calls for name in call})
        for rank, call in enumerate(calls):
            differ = [name for name in names if call.get(name) != usual.get(name)]
            if differ:
                told = "; ".join(f"{name} {call.get(name)!r}, but {self.name(0)} {usual.get(name)!r}" for name in differ)
                raise RankError(f"{self.name(rank)} has {told}. All ranks must make the same calls with the same arguments")
        raise RankError("the ranks make different calls")

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
            missing = ", ".join(map(self.name, self._silent(what)))
            told = f"{missing} did not answer" if missing else "all ranks still answer; one of them may have come too late"
            raise RankError(
                f"{self.name(self.rank)} waited for others ({what}) in vain: {told}. This group of processes cannot go on; start "
                f"it again"
            ) from error

    def _silent(self, what: str) -> list[int]:
        """The ranks that do not say that they have seen this failure too."""
        store = meeting_store()
        # Ranks count alike what they do together: what they said of one failure says nothing of another.
        failure = f"nearfield/{self.group.group_name}/{what}/{self._calls}"
        keys = [f"{failure}/{rank}" for rank in range(self.size)]
        silent = []
        try:
            store.set(keys[self.rank], "seen")
        except RuntimeError:
            return [0]  # Who keeps the store is gone.
        # However many are silent: twice as long in all, as some see a failure later than others.
        deadline = time.monotonic() + 2 * PATIENCE.total_seconds()
        for rank, key in enumerate(keys):
            left = max(min(deadline - time.monotonic(), PATIENCE.total_seconds()), 0.1)
            try:
                store.wait([key], timedelta(seconds=left))
            except RuntimeError:
                silent.append(rank)
        return silent


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

"""Calls with inputs of the same shapes launch the same kernels: the first is recorded, the others launch them from a list.

What Python does between two launches takes longer than many of the kernels. A call can be replayed if between its allocations
and views it starts nothing but kernels of ours; one that does anything else runs as it is written, every time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nearfield import _compat
from nearfield.kernels import backends, launch

ALIGNMENT = 512
"""Buffers begin at multiples of so many bytes, as those of torch do."""

MOST_TAPES = 128
"""Calls that are remembered; those that were not made for the longest time are forgotten."""

_ALLOCATIONS = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
_FROM_HOST = torch.ops.aten.lift_fresh.default
"""`torch.tensor`, whose memory no operation allocates."""


def _address(x: Tensor) -> int:
    """Of the memory that it is a part of."""
    return x.untyped_storage().data_ptr()


def _tensors_in(x: Any) -> list[Tensor]:
    """Those that an operation takes or returns."""
    if isinstance(x, list | tuple):
        return [tensor for item in x for tensor in _tensors_in(item)]
    return [x] if isinstance(x, Tensor) else []


class Buffer:
    """Memory that a call allocates, and which of its launches use it."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.strides, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.bytes = tensor.untyped_storage().nbytes()
        self.first, self.last = -1, -1
        """the numbers of these launches; -1: none yet"""

    def used(self, now: int) -> None:
        self.first = now if self.first < 0 else self.first
        self.last = now


class Pointer(NamedTuple):
    """A tensor that a kernel is given: where it is, and its form."""

    source: Buffer | int | None
    """what it is a part of: memory of the call, or one of the given tensors by number; None: always the same memory"""
    offset: int
    """bytes from the beginning of its source; its address if there is none"""
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class Launch(NamedTuple):
    kernel: launch.Kernel
    grid: launch.Grid
    run: Callable[..., None] | None
    """see `_compat.launcher`; None in Triton's interpreter"""
    pointers: tuple[Pointer, ...]
    arguments: dict[str, Any]


class Recorder(_compat.DispatchMode):
    """Notes what a call allocates and launches, and whether it does anything else."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.given = given
        self.launches: list[Launch] = []
        self.buffers: dict[int, Buffer] = {}
        """by address: the latest that was allocated there"""
        self.constants: list[Tensor] = []
        self.obstacle = (
            None if len(set(map(id, given))) == len(given) else "one tensor given twice, which may be two the next time"
        )
        """what cannot be replayed, if there is something"""
        # Tensors that share their memory with others are told apart by what they are views of.
        self._root = {id(x): number for number, x in enumerate(given)}
        self._kept: list[Tensor] = []
        self._launching = False
        self._storages = {_address(x) for x in given}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._launching:  # Triton's interpreter copies tensors.
            return result
        made = _tensors_in(result)
        if func in _ALLOCATIONS:
            if result.numel():
                self.buffers[_address(result)] = Buffer(result)
        # In inference mode `contiguous` and `to` are said to be views, and copy all the same.
        elif func.is_view and func is not _FROM_HOST and all(_address(x) == _address(args[0]) for x in made):
            root = self._root.get(id(args[0]))
            if root is not None:
                self._kept += made  # or another tensor could get its number
                self._root.update((id(x), root) for x in made)
        elif made or _tensors_in(args) or _tensors_in(tuple((kwargs or {}).values())):
            self.obstacle = str(func)
        return result

    def start(self, kernel: launch.Kernel, grid: launch.Grid, arguments: dict[str, Any]) -> None:
        """Launches a kernel and notes it."""
        self._launching = True
        run = kernel.start(grid, arguments)
        self._launching = False
        items, now = list(arguments.items()), len(self.launches)
        pointers = tuple(self._pointer(x, now) for _, x in items[: kernel.tensors])
        if run is None and items[0][1].is_cuda:
            self.obstacle = "a launch that this version of Triton keeps to itself"
        self.launches.append(Launch(kernel, grid, run, pointers, dict(items[kernel.tensors :])))

    def tape(self, results: Sequence[Tensor]) -> Tape | str:
        """What was recorded; in words, why it cannot be replayed."""
        if self.obstacle:
            return self.obstacle
        made: list[Buffer] = []
        for x in results:
            buffer = self.buffers.get(_address(x))
            if buffer is None or buffer in made or (x.shape, x.stride(), x.dtype) != (buffer.shape, buffer.strides, buffer.dtype):
                return "a result is not memory of its own"
            made.append(buffer)
        return Tape(self, made)

    def _pointer(self, x: Tensor, now: int) -> Pointer:
        form = x.shape, x.stride(), x.dtype
        if not x.numel():  # It is nowhere, and kept as it is: without the memory that it may be a part of.
            x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        elif (root := self._root.get(id(x))) is not None:
            return Pointer(root, x.data_ptr() - self.given[root].data_ptr(), *form)
        elif (buffer := self.buffers.get(_address(x))) is not None:
            buffer.used(now)
            return Pointer(buffer, x.data_ptr() - _address(x), *form)
        elif _address(x) in self._storages:
            self.obstacle = "a tensor that is no view of one input, but lies in its memory"
        self.constants.append(x)
        return Pointer(None, x.data_ptr(), *form)


class Tape:
    """What a call launched, to be launched again for other tensors of the same shapes, strides and alignment."""

    def __init__(self, recorder: Recorder, results: Sequence[Buffer]) -> None:
        self.device = recorder.given[0].device
        self.results = results
        self.launches = recorder.launches
        self._constants = recorder.constants
        pointers = [pointer for one in self.launches for pointer in one.pointers]
        # All that pointers lead to, in one list: given tensors, results, the workspace, and last what stays where it is.
        number = {id(buffer): len(recorder.given) + i for i, buffer in enumerate(results)}
        workspace = len(recorder.given) + len(results)
        temporary = {id(x.source): x.source for x in pointers if isinstance(x.source, Buffer) and id(x.source) not in number}
        offsets, self.bytes = placed(list(temporary.values()))
        self._source = np.array([_number_of(x.source, number, workspace) for x in pointers], dtype=np.intp)
        self._offset = np.array([x.offset + offsets.get(id(x.source), 0) for x in pointers], dtype=np.uint64)
        self._starts: list[tuple[Any, int, int, tuple[Any, ...]]] = []
        first = 0
        for one in self.launches:
            last = first + len(one.pointers)
            numbers = tuple(one.arguments[name] for name in one.kernel.parameters[len(one.pointers) :])
            self._starts.append((one.run, first, last, numbers))
            first = last

    def play(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Launches everything on `given`. Returns the results."""
        device = self.device
        results = [torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=device) for x in self.results]
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=device)
        if not workspace.is_cuda:
            self._interpret([*given, *results, workspace])
            return results
        if torch.cuda.is_current_stream_capturing():
            _IN_GRAPHS.add(self)
        bases = np.array([*(x.data_ptr() for x in (*given, *results, workspace)), 0], dtype=np.uint64)
        addresses = (bases[self._source] + self._offset).tolist()
        stream = _compat.raw_stream(device.index)
        for run, first, last, numbers in self._starts:
            run(stream, addresses[first:last], numbers)
        return results

    def _interpret(self, sources: list[Tensor]) -> None:
        """The same in Triton's interpreter, which takes tensors."""
        at = 0
        for one in self.launches:
            tensors = []
            for pointer in one.pointers:
                tensors.append(self._tensor(pointer, sources, int(self._source[at]), int(self._offset[at])))
                at += 1
            names = one.kernel.parameters[: len(tensors)]
            one.kernel.jitted[one.grid](**dict(zip(names, tensors, strict=True)), **one.arguments)

    def _tensor(self, pointer: Pointer, sources: list[Tensor], number: int, offset: int) -> Tensor:
        if number == len(sources):
            return next(x for x in self._constants if (x.data_ptr(), x.shape, x.stride(), x.dtype) == pointer[1:])
        source = sources[number]
        start = (source.storage_offset() * source.element_size() + offset) // pointer.dtype.itemsize
        found = torch.empty(0, dtype=pointer.dtype, device=source.device)
        return found.set_(source.untyped_storage(), start, pointer.shape, pointer.strides)


def _number_of(source: Buffer | int | None, numbers: dict[int, int], workspace: int) -> int:
    if isinstance(source, Buffer):
        return numbers.get(id(source), workspace)
    return workspace + 1 if source is None else source


_IN_GRAPHS: set[Hashable] = set()
"""Tapes and keys that hold tables which a captured graph goes on reading."""


def placed(buffers: Sequence[Buffer]) -> tuple[dict[int, int], int]:
    """Where each buffer begins in one piece of memory, and the size of that: buffers may share a place at different times."""
    offsets: dict[int, int] = {}
    there: list[tuple[int, int, Buffer]] = []
    for buffer in sorted(buffers, key=lambda x: -x.bytes):
        start = 0
        for begin, end, other in sorted(there, key=lambda x: x[0]):
            apart = other.last < buffer.first or buffer.last < other.first
            if not apart and begin < start + buffer.bytes and start < end:
                start = -(-end // ALIGNMENT) * ALIGNMENT
        offsets[id(buffer)] = start
        there.append((start, start + buffer.bytes, buffer))
    return offsets, max((end for _, end, _ in there), default=0)


_TAPES: OrderedDict[Hashable, Tape | str] = OrderedDict()
"""By key. Words in place of a tape: why there is none."""

_FIRST = "not recorded yet"
"""The first call of a kind makes tables, which it keeps, and compiles kernels. The second is recorded."""

_LOCK = threading.Lock()


def forget() -> None:
    """Record all calls anew."""
    with _LOCK:
        _TAPES.clear()


def _found(key: Hashable) -> Tape | str | None:
    with _LOCK:
        tape = _TAPES.get(key)
        if tape is not None:
            _TAPES.move_to_end(key)
        return tape


def _keep(key: Hashable, tape: Tape | str) -> None:
    with _LOCK:
        _TAPES[key] = tape
        _TAPES.move_to_end(key)
        while len(_TAPES) > MOST_TAPES:
            _TAPES.popitem(last=False)


def replayed(key: Hashable, given: Sequence[Tensor], run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
    """`run()`, which returns tensors that it allocates; from its launches, once it was called with this key before.

    The key has to say everything that the launches depend on besides `given`, with the shapes, strides and alignment of those:
    see `form`. What else the launches read has to last as long as the key.
    """
    tape, device = _found(key), given[0].device
    with backends.device_guard(device):
        if isinstance(tape, Tape):
            try:
                return tape.play(given)
            except torch.OutOfMemoryError:  # before anything was launched; in pieces it may fit
                return run()
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            # What is made now is the graph's own, and nothing to remember.
            _IN_GRAPHS.add(key)
            return run()
        if tape is not _FIRST:
            results = run()
            if tape is None:
                _keep(key, _FIRST)
            return results
        with Recorder(given) as recorder, launch.recording(recorder):
            results = run()
        _keep(key, recorder.tape(results))
        return results


def form(x: Tensor) -> Hashable:
    """What launches depend on in a tensor of a known shape."""
    return x.stride(), x.dtype, x.device, x.data_ptr() & 15

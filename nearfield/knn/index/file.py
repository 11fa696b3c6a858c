"""The file of an index: what it was built by, its keys or their fingerprint, and what it has learned."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.crossover import dtype_name
from nearfield.tensor_file import check_digest, check_format, read_tensors, write_tensors

FORMAT, VERSION = "nearfield-index", "1"

KEYS, LEARNED = "keys", "learned."

DTYPES = {dtype_name(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    kind: str
    """the name of the recipe's class"""
    settings: Mapping[str, Any]
    """its arguments"""
    shape: tuple[int, ...]
    """of the keys: batch entries times heads, length, dim"""
    dtype: torch.dtype
    """of the keys as they were given"""
    held: torch.dtype
    """of the keys as the index holds them"""
    fingerprint: str
    """of the keys"""
    keys: Tensor | None
    """None: they are not in the file"""
    learned: Mapping[str, Tensor]


class Learned:
    """What an index has learned, as a file says: every tensor is checked when it is taken."""

    def __init__(self, where: str, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self.where, self._tensors, self._device = where, tensors, device
        self._taken: set[str] = set()
        self._prefix = ""

    def part(self, name: str) -> Learned:
        """Those whose names begin with `name` and a dot, without that."""
        part = Learned(self.where, self._tensors, self._device)
        part._taken, part._prefix = self._taken, f"{self._prefix}{name}."
        return part

    def names(self) -> list[str]:
        """The first words of the names."""
        inside = (name.removeprefix(self._prefix) for name in self._tensors if name.startswith(self._prefix))
        return sorted({name.partition(".")[0] for name in inside})

    def take(self, name: str, shape: Sequence[int | None], dtype: torch.dtype, on_cpu: bool = False) -> Tensor:
        """A tensor of this shape (None: any size) and dtype, copied to the device of the index."""
        full = self._prefix + name
        found = self._tensors.get(full)
        self.check(name, found is not None and found.dtype == dtype and found.dim() == len(shape))
        assert found is not None
        self.check(name, all(want in (None, size) for want, size in zip(shape, found.shape, strict=True)))
        self._taken.add(full)
        return found.to("cpu" if on_cpu else self._device, copy=True)

    def permutation(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor whose last dimension lists 0, 1, ... in any order."""
        order = self.take(name, shape, dtype)
        length = shape[-1]
        self.check(name, order.numel() == 0 or bool(((order >= 0) & (order < length)).all()))
        for row in order.reshape(-1, length) if order.numel() else ():
            self.check(name, bool((torch.bincount(row, minlength=length) == 1).all()))
        return order

    def check(self, name: str, fine: bool) -> None:
        if not fine:
            raise ValueError(f"{self.where} is damaged: {self._prefix}{name}; build the index again")

    def finish(self) -> None:
        """Raises ValueError where something was not taken."""
        unknown = sorted(set(self._tensors) - self._taken)
        if unknown:
            raise ValueError(f"{self.where} is damaged: it has unknown tensors, {unknown[:3]}; build the index again")


def write_index(path: str | os.PathLike[str], contents: Contents) -> None:
    about = {
        "format": FORMAT,
        "version": VERSION,
        "index": json.dumps({"kind": contents.kind, "settings": dict(contents.settings)}),
        "keys": json.dumps(
            {
                "shape": list(contents.shape),
                "dtype": dtype_name(contents.dtype),
                "held": dtype_name(contents.held),
                "fingerprint": contents.fingerprint,
            }
        ),
    }
    tensors = {LEARNED + name: x for name, x in contents.learned.items()}
    write_tensors("index", as_path(path), about, tensors if contents.keys is None else {KEYS: contents.keys, **tensors})


def read_index(path: str | os.PathLike[str]) -> Contents:
    """What `write_index` has written. Raises ValueError on any other file, and on one that was damaged since."""
    place = as_path(path)
    about, tensors = read_tensors("index", place, "index.build(keys).save(path)")
    remedy = "update nearfield if the file is from a newer one, or build the index again"
    check_format("index", place, about, (FORMAT, VERSION), remedy)
    check_digest("index", place, about, tensors)
    try:
        index, keys = json.loads(about["index"]), json.loads(about["keys"])
        contents = Contents(
            kind=index["kind"],
            settings=dict(index["settings"]),
            shape=tuple(keys["shape"]),
            dtype=DTYPES[keys["dtype"]],
            held=DTYPES[keys["held"]],
            fingerprint=keys["fingerprint"],
            keys=tensors.pop(KEYS, None),
            learned={name.removeprefix(LEARNED): x for name, x in tensors.items()},
        )
        _check_keys(contents)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"index {path} has an invalid header: {error!r}; build the index again") from error
    return contents


def _check_keys(contents: Contents) -> None:
    shape, keys = contents.shape, contents.keys
    if len(shape) != 3 or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise ValueError(f"shape {shape}")
    if contents.held not in (contents.dtype, torch.promote_types(contents.dtype, torch.float32)):
        raise ValueError(f"keys of {contents.dtype} as {contents.held}")
    if keys is not None and (keys.shape != shape or keys.dtype != contents.dtype):
        raise ValueError(f"keys of shape {tuple(keys.shape)} and {keys.dtype}")


def as_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path must be the name of a file, got {path!r}")
    return Path(path)


def fingerprint(keys: Tensor) -> str:
    """Of keys `[batch, length, dim]` in the dtype in which an index compares them: the same if and only if all numbers are."""
    digest = hashlib.sha256(f"{tuple(keys.shape)} {keys.dtype}".encode())
    for entry in keys.detach():
        # Zero has two signs, and they are the same number.
        digest.update((entry.cpu() + 0.0).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

"""Files in the safetensors format with a header and a digest: written whole or not at all, and checked when they are read.

We read and write them ourselves. So a file is opened once, and what is read is one file even while another process replaces it;
and the same tensors make the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import secrets
import stat
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows, where nobody can remove a file that is open
    fcntl = None  # type: ignore[assignment]

DIGEST = "digest"

UNFINISHED = ".nearfield-"
"""How the names of all unfinished files begin."""

ABOUT = "__metadata__"
"""The part of a header that is about no tensor."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

MOST_HEADER = 2 << 20
"""Bytes. A memory takes about 1,200 for each layer of its model."""

MOST_TENSORS = 1 << 14
"""A memory has 14 for each layer of its model, an index up to 8 for each block of keys."""

MOST_DIMS = 64


def write_tensors(what: str, path: Path, about: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write a file beside `path`, then rename it: until that last step, what was there stays as it was.

    `what` it is, such as "memory", begins every error. `about` is the header, to which a digest of everything is added. Tensors
    may be anywhere and have any layout. What an earlier write has left behind, because it was killed, is removed.
    """
    target = Path(os.path.realpath(path))  # of a link, the file it leads to
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    about = {**about, DIGEST: digest_of(about, tensors)}
    try:
        _remove_leftovers(target)
        descriptor, partial = _begin(target)
        try:
            with os.fdopen(descriptor, "wb") as file:
                if target.exists():
                    partial.chmod(stat.S_IMODE(target.stat().st_mode))
                _write(file, about, tensors)
                file.flush()
                os.fsync(descriptor)
                if fcntl is None:
                    file.close()
                os.replace(partial, target)  # while it is locked: nobody takes it for a leftover
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(
            f"{what} {path} cannot be written: {error}; what was there is unchanged. It needs a name in a folder that exists, "
            "where you may write and where there is space"
        ) from error


def _write(file: BinaryIO, about: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """All of a file. Wide numbers come first, so that each tensor begins at a multiple of their size."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header: dict[str, Any] = {ABOUT: dict(sorted(about.items()))}
    start = 0
    for name, x in ordered:
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": [start, start + x.nbytes]}
        start += x.nbytes
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MOST_HEADER or len(ordered) > MOST_TENSORS:
        raise OSError(
            f"it would have {len(ordered)} tensors and a header of {len(encoded)} bytes, and may have {MOST_TENSORS} and "
            f"{MOST_HEADER}"
        )
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for _, x in ordered:
        file.write(_bytes_of(x))


def _bytes_of(x: Tensor) -> memoryview:
    """Of a tensor on the CPU that is contiguous."""
    found: memoryview = x.reshape(-1).view(torch.uint8).numpy().data
    return found


def _leftover(target: Path) -> str:
    """How the names of unfinished files for this one begin. They are short however long its own name is."""
    return f"{UNFINISHED}{hashlib.sha256(os.fsencode(target.name)).hexdigest()[:16]}-"


def _begin(target: Path) -> tuple[int, Path]:
    """A new file beside this one, opened and locked, so that nobody takes it for a leftover; and its name."""
    while True:
        partial = target.with_name(f"{_leftover(target)}{secrets.token_hex(4)}.part")
        descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
        if fcntl is None:
            return descriptor, partial
        # Where files cannot be locked, nobody removes leftovers either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Somebody may have come before the lock, and removed it.
        if partial.exists():
            return descriptor, partial
        os.close(descriptor)


def _remove_leftovers(target: Path) -> None:
    remove_unfinished(target.parent, _leftover(target))


def remove_unfinished(folder: Path, prefix: str = UNFINISHED) -> None:
    """Remove unfinished files that nobody is writing: a lock goes when the process that has it ends, however it ends."""
    for left in folder.glob(f"{prefix}*.part"):
        # It may be gone by now, be locked, or belong to somebody else.
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDWR)
            try:
                if fcntl is not None:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.unlink(missing_ok=True)
            finally:
                os.close(descriptor)
            if fcntl is None:
                left.unlink(missing_ok=True)


def read_tensors(what: str, path: Path, maker: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a file, which are read where they lie. `maker` says how one is made. The digest is not checked."""
    with _reading(what, path, maker), path.open("rb") as file:
        about, entries, start = _read_header(file)
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return about, {name: _tensor(data, start, *entry) for name, entry in entries.items()}


def read_about(what: str, path: Path, maker: str) -> dict[str, str]:
    """The header of a file alone."""
    with _reading(what, path, maker), path.open("rb") as file:
        return _read_header(file)[0]


@contextlib.contextmanager
def _reading(what: str, path: Path, maker: str) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"{what} {path} is not a file; {maker} makes one")
    try:
        yield
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} {path} cannot be read: {error}; {maker} makes such a file") from error
    except OSError as error:
        raise OSError(f"{what} {path} cannot be read: {error}; it needs a file that you may read") from error


Entry = tuple[torch.dtype, list[int], int, int]
"""Dtype and shape of a tensor, and where its bytes begin and end, counted from the end of the header."""


def _read_header(file: BinaryIO) -> tuple[dict[str, str], dict[str, Entry], int]:
    """What a file says about itself and about its tensors, and where the header ends. Raises ValueError unless all of it fits.

    The time and memory it takes depend on the size of the header, not on what it says.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if not 0 < length <= min(MOST_HEADER, size - 8):
        raise ValueError(f"a header of {length} bytes is not possible in a file of {size}")
    header = json.loads(file.read(length).decode())
    if not isinstance(header, dict):
        raise ValueError("the header is not an object")
    about = header.pop(ABOUT, {})
    if not isinstance(about, dict) or not all(isinstance(x, str) for x in about.values()):
        raise ValueError(f"{ABOUT} is not a list of texts")
    if len(header) > MOST_TENSORS:
        raise ValueError(f"{len(header)} tensors are announced, and there may be {MOST_TENSORS}")
    entries = {name: _entry(name, entry) for name, entry in header.items()}
    end = 0
    for name, (*_, start, stop) in sorted(entries.items(), key=lambda item: item[1][2:]):
        if start != end:
            raise ValueError(f"tensor {name!r} does not begin where the one before it ends")
        end = stop
    if end != size - 8 - length:
        raise ValueError(f"{end} bytes of tensors are announced, and {size - 8 - length} are there")
    return about, entries, 8 + length


def _entry(name: str, entry: object) -> Entry:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} needs dtype, shape and data_offsets")
    dtype = DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise ValueError(f"tensor {name!r} has an unknown dtype")
    shape, offsets = entry["shape"], entry["data_offsets"]
    for numbers, most in ((shape, MOST_DIMS), (offsets, 2)):
        if not isinstance(numbers, list) or len(numbers) > most or not all(type(x) is int and 0 <= x < 2**63 for x in numbers):
            raise ValueError(f"tensor {name!r} has sizes or places that cannot be")
    if math.prod(max(1, x) for x in shape) >= 2**63 or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has sizes or places that cannot be")
    if offsets[1] - offsets[0] != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"tensor {name!r} has more or fewer bytes than its shape says")
    return dtype, shape, offsets[0], offsets[1]


def _tensor(data: mmap.mmap, base: int, dtype: torch.dtype, shape: list[int], start: int, stop: int) -> Tensor:
    if start == stop:
        return torch.empty(shape, dtype=dtype)
    found = torch.frombuffer(data, dtype=torch.uint8, count=stop - start, offset=base + start)
    if (base + start) % dtype.itemsize:
        found = found.clone()  # Numbers must begin at a multiple of their size.
    return found.view(dtype).view(shape)


def check_format(what: str, path: Path, about: dict[str, str], expected: tuple[str, str], remedy: str) -> None:
    """Raises ValueError unless the header names this format and version."""
    found = about.get("format"), about.get("version")
    if found != expected:
        raise ValueError(
            f"{what} {path} must be a file of format {expected[0]!r}, version {expected[1]!r}, got {found[0]!r}, version "
            f"{found[1]!r}; {remedy}"
        )


def check_digest(what: str, path: Path, about: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Raises ValueError unless everything is as it was written."""
    rest = {name: x for name, x in about.items() if name != DIGEST}
    if about.get(DIGEST) != digest_of(rest, tensors):
        raise ValueError(f"{what} {path} is damaged: it does not match its digest; take another copy of it, or make it again")


def digest_of(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(_bytes_of(x.detach().cpu().contiguous()))
    return digest.hexdigest()

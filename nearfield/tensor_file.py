"""Safetensors files with a header and a digest: written whole or not at all, and checked when they are read."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import stat
from pathlib import Path

import torch
from torch import Tensor

DIGEST = "digest"

MISSING = "files need safetensors: pip install 'nearfield[files]'"


def write_tensors(what: str, path: Path, about: dict[str, str], tensors: dict[str, Tensor]) -> None:
    """Write a file beside `path`, then rename it: until that last step, what was there stays as it was.

    `what` it is, such as "memory", begins every error. `about` is the header, to which a digest of everything is added. Tensors
    may be anywhere and have any layout.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError(MISSING) from error

    target = Path(os.path.realpath(path))  # of a link, the file it leads to
    tensors = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    made = False
    try:
        partial.touch(exist_ok=False)
        made = True
        # An empty file has the mode that the umask allows. Safetensors would make a file for its owner only.
        mode = stat.S_IMODE((target if target.exists() else partial).stat().st_mode)
        save_file(tensors, str(partial), metadata={**about, DIGEST: digest_of(about, tensors)})
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.chmod(mode)
        os.replace(partial, target)
    except (SafetensorError, OSError) as error:
        raise OSError(
            f"{what} {path} cannot be written: {error}; what was there is unchanged. It needs a name in a folder that exists, "
            "where you may write and where there is space"
        ) from error
    finally:
        if made:
            partial.unlink(missing_ok=True)


def read_tensors(what: str, path: Path, maker: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a file, which are read where they lie. `maker` says how one is made. The digest is not checked."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(MISSING) from error

    if not path.is_file():
        raise FileNotFoundError(f"{what} {path} is not a file; {maker} makes one")
    try:
        # Safetensors says of a file that may not be read that it is not there.
        path.open("rb").close()
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{what} {path} cannot be read: {error}; {maker} makes such a file") from error
    except OSError as error:
        raise OSError(f"{what} {path} cannot be read: {error}; it needs a file that you may read") from error


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
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()

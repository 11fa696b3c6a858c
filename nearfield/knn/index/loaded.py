"""An index from a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch
from torch import Tensor

from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import BuiltIndex
from nearfield.knn.index.cells import CellIndex
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.faiss import FaissIndex
from nearfield.knn.index.file import Contents, Learned, fingerprint, read_index
from nearfield.knn.index.kmeans import KMeansIndex
from nearfield.knn.index.lsh import ConcentricLSH

Recipe = ExactIndex | KMeansIndex | CellIndex | ConcentricLSH | FaissIndex

BUILT_IN: Mapping[str, type[Recipe]] = {
    kind.__name__: kind for kind in (ExactIndex, KMeansIndex, CellIndex, ConcentricLSH, FaissIndex)
}


def load(
    path: str | os.PathLike[str], *, keys: Tensor | None = None, device: torch.device | str | int | None = None
) -> BuiltIndex:
    """The index that `BuiltIndex.save` has written: nothing is learned again.

    It finds what the saved one found, to the last bit on the same kind of device; keys can be added to it and removed, and it
    goes wherever an index goes. Other keys than its own are refused as before.

    Args:
        path: the file. It is read whole and compared with its digest. What is wrong with a file is a ValueError, and if it cannot
            be read an OSError. Nothing in it is executed, but `FaissIndex` hands it to Faiss: take those from people you trust.
        keys: its keys, if you have them: `[batch, heads, length, dim]` or `[batch * heads, length, dim]`. They are compared with
            the fingerprint in the file, and the index then has no copy of them. Needed for a file that was saved without keys.
        device: where the index goes; None: where `keys` are, or to the CPU.

    Cost: O(length dim), and what was learned is read.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "memory.safetensors")
        >>> built = nearfield.KMeansIndex(probes=4).build(k)
        >>> built.save(path)
        >>> loaded = nearfield.index.load(path)
        >>> torch.equal(loaded.search(q[0], 5)[1], built.search(q[0], 5)[1])
        True
        >>> nearfield.attention(q, k, v, method=nearfield.TopK(k=8, index=loaded)).shape
        torch.Size([1, 2, 64, 8])
    """
    where = _checked_device(keys, device)
    contents = read_index(path)
    if contents.kind not in BUILT_IN:
        raise ValueError(f"index {path} has an invalid header: kind {contents.kind!r} is none of {', '.join(BUILT_IN)}")
    try:
        recipe = BUILT_IN[contents.kind](**contents.settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"index {path} has an invalid header: {error}; build the index again") from error
    # Tensors made in inference mode could not be used outside of it.
    with torch.inference_mode(False), torch.no_grad():
        has = _given_keys(path, contents, keys) if keys is not None else _stored_keys(path, contents)
        has = has.to(where, contents.held)
        learned = Learned(f"index {path}", contents.learned, where)
        with full_precision(has):
            built = recipe._restored(has, learned)
    learned.finish()
    built.dtype = contents.dtype
    return built


def _checked_device(keys: Tensor | None, device: torch.device | str | int | None) -> torch.device:
    if keys is not None and not isinstance(keys, Tensor):
        raise TypeError(f"keys must be a tensor or None, got {type(keys).__name__}")
    if device is None:
        return torch.device("cpu") if keys is None else keys.device
    try:
        where = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"device must be one that torch has here, such as 'cpu', got {device!r}: {error}") from error
    if where.type == "meta":
        raise ValueError(f"device must be one with memory, such as 'cpu', got {device!r}")
    if keys is not None and keys.device != where:
        raise ValueError(f"device must be that of keys, {keys.device}, got {device!r}; leave it out, or move the keys")
    return where


def _stored_keys(path: object, contents: Contents) -> Tensor:
    if contents.keys is None:
        raise ValueError(f"index {path} was saved without its keys; give them: load(path, keys=...)")
    # The file may be changed while the index is in use.
    return contents.keys.clone()


def _given_keys(path: object, contents: Contents, keys: Tensor) -> Tensor:
    flat = keys.detach().flatten(0, -3) if keys.dim() >= 3 else keys.detach()
    if flat.shape != contents.shape:
        raise ValueError(
            f"index {path} has keys of shape {contents.shape}, [batch * heads, length, dim], and those given have shape "
            f"{tuple(keys.shape)}; build an index of these keys, or leave them out"
        )
    compared = _as_compared(flat) if flat.is_floating_point() else flat
    if compared.dtype != torch.promote_types(contents.dtype, torch.float32):
        raise TypeError(f"index {path} has keys of {contents.dtype}, and those given are {keys.dtype}; build it of these keys")
    if fingerprint(compared) != contents.fingerprint:
        raise ValueError(
            f"index {path} was built of other keys than those given; build an index of these keys, or leave them out and take "
            "the keys of the file"
        )
    return flat


def _as_compared(keys: Tensor) -> Tensor:
    """As `BuiltIndex.keys`."""
    return keys if keys.dtype == torch.float64 else keys.float()

"""Block sizes that `nearfield bench --calibrate` has found on the user's card, in a file beside that of the crossover lengths.

They are filed under the name of the card, Triton's version and the kind of dtype, with a mark of the kernels that were timed:
sizes that suit one kernel may be too large for another. Only what `candidates.is_allowed` allows is used.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import triton

from nearfield import user_cache
from nearfield.cells.triton import candidates
from nearfield.cells.triton.tiles import TileSizes

_log = logging.getLogger(__name__)

KINDS = {"half": (torch.bfloat16, torch.float16), "float32": (torch.float32,)}
"""Dtypes that have the same block sizes."""

Sizes = dict[tuple[str, str], dict[str, list[int]]]
"""By kernel and by kind and dimension (`"half, 64"`): block sizes by cell size, as in tuning.json."""


def kind_of(dtype: torch.dtype) -> str:
    return "float32" if dtype == torch.float32 else "half"


def cache_file() -> Path:
    """The file that `keep` writes."""
    return user_cache.folder() / "blocks.json"


@functools.cache
def blocks_of(card: str) -> Sizes:
    """What was found on such a card with this version of Triton and these kernels; empty where nothing was."""
    good: Sizes = {}
    bad = []
    for (kind, kernel, dim, cell_size), sizes in _flat(_own(_read(), card)):
        if _is_valid(kind, kernel, dim, cell_size, sizes):
            good.setdefault((kernel, f"{kind}, {dim}"), {})[cell_size] = sizes
        else:
            bad.append(f"{', '.join(x for x in (kind, kernel, dim, cell_size) if x)}: {sizes}"[:100])
    if bad:
        # Not warnings.warn, which a filter can turn into an error: a bad file is no reason to refuse a call.
        _log.warning("%s has block sizes that no kernel can use; they are ignored: %s", cache_file(), "; ".join(bad[:3]))
    return good


def keep(card: str, kind: str, found: dict[tuple[str, int, int], TileSizes]) -> Path:
    """Add block sizes, by kernel, dimension and cell size, to the file, and keep what it holds for others."""
    path, table = cache_file(), _read()
    own: dict[str, Any] = {}
    known = {names: sizes for names, sizes in _flat(_own(table, card)) if _is_valid(*names, sizes)}
    new = {(kind, kernel, str(dim), str(cell_size)): list(blocks) for (kernel, dim, cell_size), blocks in found.items()}
    for (of, kernel, dim, cell_size), sizes in (known | new).items():
        own.setdefault(of, {}).setdefault(kernel, {}).setdefault(dim, {})[cell_size] = sizes
    table.setdefault(card, {})[_version()] = {"kernels": fingerprint(), "blocks": own}
    user_cache.replace(path, {"cards": table})
    return path


def _read() -> dict[str, dict[str, Any]]:
    """All cards of the file; empty if it is missing, has no folder, or holds something else."""
    try:
        path = cache_file()
        text = path.read_bytes()
    except (OSError, RuntimeError):
        return {}
    try:
        table = json.loads(text)["cards"]
        valid = all(isinstance(versions, dict) for versions in table.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        valid = False
    if not valid:
        _log.warning("%s is not a table of block sizes and is ignored; `nearfield bench --calibrate` writes one", path)
        return {}
    return table


def _own(table: dict[str, dict[str, Any]], card: str) -> Any:
    """What the table has for this card and this version of Triton, if it was measured with these kernels."""
    entry = table.get(card, {}).get(_version())
    if not isinstance(entry, dict) or "blocks" not in entry:
        return {}
    if entry.get("kernels") != fingerprint():
        _log.info("block sizes in %s are of other kernels; `nearfield bench --calibrate` measures again", cache_file())
        return {}
    return entry["blocks"]


Names = tuple[str, str, str, str]


def _flat(found: Any, names: tuple[str, ...] = ()) -> Iterator[tuple[Names, Any]]:
    """Kind, kernel, dimension and cell size of all entries; where one is not that deep, the last names are empty."""
    if isinstance(found, dict) and len(names) < 4:
        for name, inner in found.items():
            yield from _flat(inner, (*names, name))
    else:
        kind, kernel, dim, cell_size = (*names, "", "", "", "")[:4]
        yield (kind, kernel, dim, cell_size), found


def _is_valid(kind: str, kernel: str, dim: str, cell_size: str, sizes: Any) -> bool:
    named = kind in KINDS and dim in map(str, candidates.DIMS) and re.fullmatch("[1-9][0-9]{0,5}", cell_size)
    if not named or not isinstance(sizes, list) or len(sizes) != len(TileSizes._fields):
        return False
    return all(type(x) is int for x in sizes) and candidates.is_allowed(kernel, TileSizes(*sizes))


@functools.cache
def fingerprint() -> str:
    """A mark of the kernels' source."""
    files = [x for folder in ("cells/triton", "kernels") for x in resources.files("nearfield").joinpath(folder).iterdir()]
    sources = sorted((x.name, x.read_bytes()) for x in files if x.name.endswith(".py"))
    return hashlib.sha256(b"".join(text for _, text in sources)).hexdigest()[:16]


def _version() -> str:
    return f"Triton {triton.__version__}"

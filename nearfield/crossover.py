"""From which length on cells beat exact attention: measured per device, dtype and kind of call, shipped as data.

`nearfield bench --calibrate` measures again and keeps the result in the user's cache folder. There it is filed under the machine
and its number of threads, and preferred where both are the same.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
import platform
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from nearfield import _compat

_log = logging.getLogger(__name__)

KINDS = ("forward", "forward, causal", "training", "training, causal")


def kind(causal: bool, training: bool) -> str:
    return KINDS[2 * training + causal]


def heads(device: torch.device) -> int:
    """Heads (of 64) that lengths are measured with: it takes several to keep a GPU busy."""
    return 8 if device.type == "cuda" else 1


def device_name(device: torch.device) -> str:
    """What shipped measurements are filed under: `cpu`, or the name of the card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def place(device: torch.device) -> str:
    """What the user's measurements are filed under: what was measured, in words, and on a CPU with how many threads."""
    if device.type == "cuda":
        return f"cuda, {device_name(device)}"
    threads = torch.get_num_threads()
    return f"{device.type}, {processor()}, {threads} thread{'s' if threads > 1 else ''}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


@_compat.constant_for_compile
def length(device: torch.device, dtype: torch.dtype, causal: bool) -> float:
    """Keys from which on cells are faster, with and without a backward pass; infinity where nobody has measured it.

    One number for both: a call has to mean the same whether or not gradients are being recorded, or a model would compute
    something else when it is evaluated, and checkpointing would differentiate another function than it ran.
    """
    known = _lengths(place(device), device_name(device), dtype_name(dtype))
    return max(known.get(kind(causal, training), math.inf) for training in (False, True))


@functools.cache
def _lengths(here: str, device: str, dtype: str) -> dict[str, float]:
    measured = _measured().get(here, {}).get(dtype)
    return measured if measured is not None else _shipped().get(device, {}).get(dtype, {})


def _shipped() -> dict[str, Any]:
    return json.loads(resources.files("nearfield").joinpath("crossover.json").read_text())["lengths"]


def _measured() -> dict[str, Any]:
    """What the user's machine has measured. Nothing where there is no such file, no place for one, or another thing in it."""
    try:
        path = cache_file()
        text = path.read_bytes()
    except (OSError, RuntimeError):
        return {}
    try:
        table = json.loads(text)["lengths"]
        found = [x for dtypes in table.values() for kinds in dtypes.values() for x in kinds.values()]
        valid = all(isinstance(x, int | float) and float(x) > 0 for x in found)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        valid = False
    if not valid:
        # Not warnings.warn, which a filter can turn into an error: a bad file is no reason to refuse a call.
        _log.warning("%s is not a table of crossover lengths and is ignored; `nearfield bench --calibrate` writes one", path)
        return {}
    return table


def cache_file() -> Path:
    """Where `calibrate` keeps its measurements: `NEARFIELD_CACHE`, or the platform's folder for caches."""
    if "NEARFIELD_CACHE" in os.environ:
        return Path(os.environ["NEARFIELD_CACHE"]) / "crossover.json"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nearfield" / "crossover.json"


def keep(device: torch.device, dtype: torch.dtype, lengths: dict[str, float]) -> Path:
    """File measured lengths in the cache, beside what is there for other places. A crash leaves the old file whole."""
    path = cache_file()
    table = _measured()
    table.setdefault(place(device), {})[dtype_name(dtype)] = lengths
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        with draft.open("w") as file:
            json.dump({"lengths": table}, file, indent=2)
        os.replace(draft, path)
    _lengths.cache_clear()
    return path

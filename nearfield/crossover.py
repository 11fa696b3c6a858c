"""From which length on cells beat exact attention: measured for devices, dtypes and kinds of calls, and shipped as data.

`nearfield bench --calibrate` measures again and keeps the result in the user's cache folder, filed under the machine and its
number of threads. Where both are the same, it is preferred to what is shipped.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import platform
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from nearfield import _compat, user_cache

_log = logging.getLogger(__name__)

KINDS = ("forward", "forward, causal", "training", "training, causal")


def kind(causal: bool, training: bool) -> str:
    return KINDS[2 * training + causal]


def heads(device: torch.device) -> int:
    """How many heads, of dimension 64, lengths are measured with. It takes several to keep a GPU busy."""
    return 8 if device.type == "cuda" else 1


def device_name(device: torch.device) -> str:
    """What shipped measurements are filed under: `cpu`, or the name of the card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def place(device: torch.device) -> str:
    """What the user's measurements are filed under: the device in words and, on a CPU, the number of threads."""
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
    """The number of keys from which on cells are faster, with and without a backward pass; infinity where nobody has measured it.

    One number for both: a call has to mean the same whether or not gradients are recorded. Otherwise a model would compute
    something else in evaluation than in training, and checkpointing would differentiate another function than it ran.
    """
    # Asking the driver for the name of a card takes longer than attention does at short lengths.
    return _remembered(device, dtype, causal) if device.type == "cuda" else _find(device, dtype, causal)


def _find(device: torch.device, dtype: torch.dtype, causal: bool) -> float:
    found = known(device, dtype)
    return max(found.get(kind(causal, training), math.inf) for training in (False, True))


_remembered = functools.cache(_find)


def is_measured(device: torch.device, dtype: torch.dtype, causal: bool) -> bool:
    """Whether somebody has looked for that length, though cells may not have been faster at any."""
    found = known(device, dtype)
    return all(kind(causal, training) in found for training in (False, True))


def known(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """The lengths that hold here, by kind: the user's or, where there are none, those that are shipped."""
    return _lengths(place(device), device_name(device), dtype_name(dtype))


@functools.cache
def _lengths(here: str, device: str, dtype: str) -> dict[str, float]:
    measured = _measured().get(here, {}).get(dtype)
    return measured if measured is not None else _shipped().get(device, {}).get(dtype, {})


def _shipped() -> dict[str, Any]:
    return json.loads(resources.files("nearfield").joinpath("crossover.json").read_text())["lengths"]


def _measured() -> dict[str, Any]:
    """What was measured on the user's machine; empty if the file is missing, has no folder, or holds something else."""
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


_EDITIONS: list[Path] = []
"""What `keep` has written."""


def edition() -> int:
    """Another number whenever `length` may say something else."""
    return len(_EDITIONS)


def cache_file() -> Path:
    """The file that `keep` writes."""
    return user_cache.folder() / "crossover.json"


def keep(device: torch.device, dtype: torch.dtype, lengths: dict[str, float]) -> Path:
    """Add measured lengths to the cache file, and keep what it holds for other places. Calls in this process go by them."""
    path = cache_file()
    table = _measured()
    table.setdefault(place(device), {})[dtype_name(dtype)] = lengths
    user_cache.replace(path, {"lengths": table})
    forget()
    _EDITIONS.append(path)
    return path


def forget() -> None:
    """What the files say is looked up again."""
    _lengths.cache_clear()
    _remembered.cache_clear()

"""From which length on cells beat exact attention: measured per device, dtype and kind of call, shipped as data.

`nearfield bench --calibrate` measures again and keeps the result in the user's cache folder, where it is preferred.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch

KINDS = ("forward", "forward, causal", "training", "training, causal")


def kind(causal: bool, training: bool) -> str:
    return KINDS[2 * training + causal]


def device_name(device: torch.device) -> str:
    """What measurements are filed under: `cpu`, or the name of the card."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@torch.compiler.assume_constant_result
def length(device: torch.device, dtype: torch.dtype, causal: bool) -> float:
    """Keys from which on cells are faster, with and without a backward pass; infinity where nobody has measured it.

    One number for both: a call has to mean the same whether or not gradients are being recorded, or a model would compute
    something else when it is evaluated, and checkpointing would differentiate another function than it ran.
    """
    known = _lengths(device_name(device), str(dtype).removeprefix("torch."))
    return max(known.get(kind(causal, training), math.inf) for training in (False, True))


@functools.cache
def _lengths(device: str, dtype: str) -> dict[str, float]:
    measured = _measured().get(device, {}).get(dtype)
    return measured if measured is not None else _shipped().get(device, {}).get(dtype, {})


def _shipped() -> dict[str, Any]:
    return json.loads(resources.files("nearfield").joinpath("crossover.json").read_text())["lengths"]


def _measured() -> dict[str, Any]:
    """What the user's machine has measured; nothing where there is no such file, or no place for one."""
    try:
        path = cache_file()
        text = path.read_text()
    except (OSError, RuntimeError):
        return {}
    try:
        table = json.loads(text)["lengths"]
        valid = all(isinstance(x, int | float) for dtypes in table.values() for kinds in dtypes.values() for x in kinds.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(f"{path} is not a table of crossover lengths; remove it, or run `nearfield bench --calibrate`")
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
    """File measured lengths in the cache, beside what is there for other devices. A crash leaves the old file whole."""
    path = cache_file()
    try:
        table = _measured()
    except ValueError:  # a broken file is what a new measurement replaces
        table = {}
    table.setdefault(device_name(device), {})[str(dtype).removeprefix("torch.")] = lengths
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        with draft.open("w") as file:
            json.dump({"lengths": table}, file, indent=2)
        os.replace(draft, path)
    _lengths.cache_clear()
    return path

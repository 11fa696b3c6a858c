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
def length(device: torch.device, dtype: torch.dtype, causal: bool, training: bool) -> float:
    """Keys from which on cells are faster; infinity where nobody has measured it."""
    return _lengths(device_name(device), str(dtype).removeprefix("torch.")).get(kind(causal, training), math.inf)


@functools.cache
def _lengths(device: str, dtype: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for table in (_shipped(), _measured()):
        found.update(table.get(device, {}).get(dtype, {}))
    return found


def _shipped() -> dict[str, Any]:
    return json.loads(resources.files("nearfield").joinpath("crossover.json").read_text())["lengths"]


def _measured() -> dict[str, Any]:
    path = cache_file()
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())["lengths"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a table of crossover lengths; remove it, or run `nearfield bench --calibrate`"
        ) from error


def cache_file() -> Path:
    """Where `calibrate` keeps its measurements: `NEARFIELD_CACHE`, or the platform's folder for caches."""
    if "NEARFIELD_CACHE" in os.environ:
        return Path(os.environ["NEARFIELD_CACHE"]) / "crossover.json"
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return base / "nearfield" / "crossover.json"


def keep(device: torch.device, dtype: torch.dtype, lengths: dict[str, float]) -> Path:
    """File measured lengths in the cache, beside what is there for other devices. A crash leaves the old file whole."""
    path = cache_file()
    table = _measured()
    table.setdefault(device_name(device), {})[str(dtype).removeprefix("torch.")] = lengths
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        with draft.open("w") as file:
            json.dump({"lengths": table}, file, indent=2)
        os.replace(draft, path)
    _lengths.cache_clear()
    return path

"""Where results were measured."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import nearfield


def environment(device: str = "cpu") -> dict[str, Any]:
    """Versions, machine and threads, as every result carries them."""
    found: dict[str, Any] = {
        "nearfield": nearfield.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    found["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two environments differ in nothing but the date."""
    return {**one, "date": ""} == {**other, "date": ""}


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()

"""Where numbers were measured: saved with every result."""

from __future__ import annotations

import os
import platform
from datetime import datetime, timezone
from typing import Any

import torch

import nearfield
from nearfield.crossover import processor


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Versions, machine and threads; and the GPU if `device` is one."""
    found: dict[str, Any] = {
        "nearfield": nearfield.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.device(device).type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return {**found, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}

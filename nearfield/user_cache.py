"""Where calibrating keeps what it measures on a user's machine, and other commands what they made: files in one folder."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any


def folder() -> Path:
    """`NEARFIELD_CACHE`, or the platform's folder for caches. Raises RuntimeError where there is no home."""
    if "NEARFIELD_CACHE" in os.environ:
        return Path(os.environ["NEARFIELD_CACHE"])
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "nearfield"


def replace(path: Path, content: dict[str, Any]) -> None:
    """Write a file of JSON in place of the one that is there. A crash leaves the old file whole."""
    replace_bytes(path, json.dumps(content, indent=2).encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Likewise, any file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        draft = Path(place) / path.name
        draft.write_bytes(content)
        os.replace(draft, path)

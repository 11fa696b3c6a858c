"""`nearfield ruler` for a model whose weights are packed, as `fetch_model.py --gguf` leaves them, and unpacked where it runs.

python benchmarks/fetch_model.py qwen --gguf
python benchmarks/ruler_packed.py models/qwen2.5-coder-1.5b-gguf --lengths 32768 --samples 50 --batch 33 --watch 0

For machines to which a model has to be carried. Whatever `nearfield ruler` takes may follow the folder, and answers are the same
as with the folder that `fetch_model.py` writes without `--gguf`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf_qwen
import torch

from nearfield.app.cli import app
from nearfield.app.evaluate.models import load_tokenizer
from nearfield.app.ruler import command


def load(name: str, device: torch.device, dtype: torch.dtype, download: bool = False) -> tuple[Any, Any]:
    """As `nearfield.app.evaluate.models.load_model`."""
    return gguf_qwen.load(Path(name), device, dtype), load_tokenizer(name, download)


def main(arguments: list[str]) -> None:
    command.load_model = load
    app(["ruler", *arguments])


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
    else:
        main(sys.argv[1:])

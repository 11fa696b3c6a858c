"""Where the spreads of cells are cut off: the error of a cache's steps on questions about long prompts, for several cut-offs.

python benchmarks/bench_spread.py                      # all models in models/; writes results/spread.json
python benchmarks/bench_spread.py --models models/gemma-3-270m --lengths 32768
python benchmarks/bench_spread.py --quick              # random inputs, nothing written

A model reads a prompt of RULER (one of several needles, `niah_multikey_1`) with the number that is asked for, by exact attention.
The last rows of some layers, those of Gemma that have no window, then attend to a `CellStore` with the prompt in cells of 16
keys, of which they open 6% of the keys. Errors are relative to the norm of a row of exact attention's output. Models and lengths
that are not measured again stay as they are in the file.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import record
import torch
from real import SMOLLM2
from torch import Tensor

import nearfield as nf
from nearfield import hf
from nearfield.cells import far_field
from nearfield.cells.cache import CellStore, attention, segments

TASK, NAME = "niah_multikey_1", "bench-spread"
MODELS = {"smollm2-135m": (3, 9, 15, 21, 27), "gemma-3-270m": (5, 11, 17), "qwen2.5-coder-1.5b": (2, 7, 12, 17, 22, 26)}
"""by folder, with the layers that are measured"""
LENGTHS = {"gemma-3-270m": (8192, 16_384, 32_768)}
"""Others have 8,192."""
CUT_OFFS = (4.0, 9.0, 16.0, math.inf)
ROWS, CELL_SIZE, SHARE, LARGE = 24, 16, 0.06, 0.3
"""Rows of a head, keys of a cell, the share of keys that a row opens, and the error from which on one counts as far off."""

Layer = tuple[Tensor, Tensor, Tensor, float]
"""The last queries `[1, heads, rows, dim]`, keys and values `[1, kv_heads, length, dim]`, and the scale."""


@torch.no_grad()
def captured(folder: Path, length: int, layers: tuple[int, ...]) -> dict[int, Layer]:
    """Of some layers, at the end of a prompt with its answer."""
    from transformers import AttentionInterface

    from nearfield.app.evaluate.models import load_model
    from nearfield.app.ruler import official
    from nearfield.app.ruler.generators import Generators
    from nearfield.app.ruler.prompts import Prompts
    from nearfield.user_cache import folder as user_folder

    model, tokenizer = load_model(folder)
    with Generators(tokenizer) as generators:
        prompts = Prompts(user_folder() / "ruler", tokenizer, 42, generators)
        prompt = prompts.get(official.tasks()[TASK], length, "raw", 1, lambda *_: None)[0]
    answer = tokenizer(f" {prompt.outputs[0]}", add_special_tokens=False)["input_ids"]
    name = f"{NAME}-{folder.name}-{length}"  # One that is taken already cannot be registered.
    hf.register(name, nf.Exact())
    inner, found = AttentionInterface()[name], {}

    def record_rows(module: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        if module.layer_idx in layers:
            found[module.layer_idx] = query[:, :, -ROWS:].clone(), key.clone(), value.clone(), options["scaling"]
        return inner(module, query, key, value, *rest, **options)

    AttentionInterface.register(name, record_rows)
    model.set_attn_implementation(name)
    model.base_model(torch.tensor([prompt.encode(tokenizer) + answer]), use_cache=False)
    return found


def errors(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Of the last rows, `[rows, heads]`."""
    rows, length = query.shape[2], key.shape[2]
    store = CellStore(nf.Cells(cell_size=CELL_SIZE, probes=max(1, int(SHARE * length / CELL_SIZE))), audit=True, group_from=0)
    store.append(key[:, :, : length - rows], value[:, :, : length - rows])
    store.close()
    for row in range(length - rows, length):
        store.append(key[:, :, row : row + 1], value[:, :, row : row + 1])
        store.attend(query[:, :, row - length : row - length + 1 or None], scale)
    return torch.stack([step.relative.flatten() for step in store.errors])


def study(layers: dict[int, Layer]) -> dict[str, Any]:
    """Mean error and share of rows that are far off, by cut-off."""
    usual, found = far_field.MOST_SPREAD, {}
    try:
        for cut in CUT_OFFS:
            attention.MOST_SPREAD = segments.MOST_SPREAD = min(cut, 1e8)
            each = [errors(*layer) for layer in layers.values()]
            found["none" if cut == math.inf else f"{cut:g}"] = {
                "error": torch.stack([x.mean() for x in each]).mean().item(),
                "worst_layer": max(x.mean().item() for x in each),
                "far_off": torch.stack([(x > LARGE).double().mean() for x in each]).mean().item(),
            }
    finally:
        attention.MOST_SPREAD = segments.MOST_SPREAD = usual
    return found


def show(name: str, found: dict[str, Any]) -> None:
    titles = ("cut off at", "error", "worst layer", f"rows over {LARGE:.0%}")
    shown = record.table(*titles, title=name, words=titles[:1])
    for cut, row in found.items():
        shown.add_row(cut, f"{row['error']:.3f}", f"{row['worst_layer']:.3f}", f"{row['far_off']:.1%}")
    record.show(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folders = [SMOLLM2.parent / name for name in MODELS]
    parser.add_argument("--models", nargs="+", type=Path, default=folders, metavar="FOLDER", help="of those in models/")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS")
    parser.add_argument("--quick", action="store_true", help="random inputs, nothing written")
    options = parser.parse_args()
    if options.quick:
        query, key, value = nf.synthetic.make("sharp", 1, 2, 2048, 16, seed=0)
        show("random", study({0: (query[:, :, -ROWS:], key, value, 0.25)}))
        return
    for folder in options.models:
        if folder.name not in MODELS:
            parser.error(f"--models must be folders of {', '.join(MODELS)}, got {folder}")
        if not folder.exists():
            print(f"skipped: no model in {folder} (`make help` says how to fetch it)")
            continue
        for length in options.lengths or LENGTHS.get(folder.name, (8192,)):
            found = study(captured(folder, length, MODELS[folder.name]))
            show(f"{folder.name}, {length:,} tokens", found)
            record.merge("spread", f"{folder.name}/{length}", {"layers": MODELS[folder.name], "rows": ROWS, "cut_off": found})


if __name__ == "__main__":
    main()

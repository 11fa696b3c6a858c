"""Queries, keys and values of a real model on a real text, for the benchmarks: any causal language model that Transformers loads.

python benchmarks/real.py TEXT --tokens 8192 --out FOLDER    # saves layer_00.pt, ... and prints the perplexity

`make smollm2` fetches a small model. Nothing here uses the network.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import sysconfig
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import FIGURES, read, write
from torch import Tensor

from nearfield import _compat

os.environ["HF_HUB_OFFLINE"] = "1"  # Transformers reads it when it is imported, by the functions below

SMOLLM2 = Path(__file__).parent.parent / "models" / "smollm2-135m"
NAME = "nearfield_capture"

Visit = Callable[[int, Tensor, Tensor, Tensor], None]


def load(model_folder: str | Path) -> Any:
    """The model in float32, ready for inference."""
    from transformers import AutoModelForCausalLM

    _check(model_folder)
    return AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, local_files_only=True).eval()


def token_ids(model_folder: str | Path, text_file: str | Path, tokens: int) -> Tensor:
    """The first `tokens` tokens of the text, [1, tokens]."""
    from transformers import AutoTokenizer

    _check(model_folder)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    ids = tokenizer(Path(text_file).read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"]
    if ids.shape[1] < tokens:
        raise ValueError(f"tokens={tokens}, but {text_file} has only {ids.shape[1]}; ask for fewer or give a longer text")
    return ids[:, :tokens]


def capture(
    model_folder: str | Path, text_file: str | Path, tokens: int, layers: Collection[int] | None = None
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(query, key, value) of each layer in `layers` (None: all), in order; see `visit_layers`.

    It keeps them all: 31 MB a layer for SmolLM2 at 8,192 tokens. `visit_layers` keeps none.
    """
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    ids = token_ids(model_folder, text_file, tokens)
    visit_layers(load(model_folder), ids, lambda _, *tensors: kept.append(tensors), layers)
    return kept


def visit_layers(model: Any, ids: Tensor, visit: Visit, layers: Collection[int] | None = None) -> None:
    """Run the model over `ids` [1, n] and call `visit(layer, query, key, value)` at each layer in `layers` (None: all).

    The tensors are the inputs of attention, after the rotary embedding: float32, query [1, heads, n, dim], key and value
    [1, kv_heads, n, dim], not repeated. A model's own scale is folded into the query, so that causal attention with the default
    scale of 1/sqrt(dim) is the model's attention. A layer that hides more than the future (a sliding window) raises an error:
    its attention is not a function of these three.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    count = model.config.get_text_config().num_hidden_layers
    wanted = set(range(count) if layers is None else layers)
    if not wanted <= set(range(count)):
        raise ValueError(f"layers={layers}, but the model has layers 0 to {count - 1}")
    sdpa = AttentionInterface()["sdpa"]

    def record(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any) -> Any:
        if module.layer_idx in wanted:
            if attention_mask is not None:
                raise ValueError(f"layer {module.layer_idx} hides more than the future (a window?); leave it out of layers=")
            wanted.remove(module.layer_idx)
            default = 1 / math.sqrt(query.shape[-1])
            scale = default if rest.get("scaling") is None else rest["scaling"]
            scaled = query if math.isclose(scale, default) else query * (scale / default)
            visit(module.layer_idx, *(tensor.detach().float().contiguous() for tensor in (scaled, key, value)))
        return sdpa(module, query, key, value, attention_mask, **rest)

    before = _compat.attention_name(model)
    AttentionInterface.register(NAME, record)
    # Without a mask function of this name Transformers makes no masks, and a window would go unnoticed.
    AttentionMaskInterface.register(NAME, AttentionMaskInterface()["sdpa"])
    try:
        model.set_attn_implementation(NAME)
        with torch.inference_mode():
            model.base_model(ids, use_cache=False)
    finally:
        model.set_attn_implementation(before)
        AttentionInterface.register(NAME, sdpa)  # it cannot be unregistered, but this drops the reference to `visit`
    if wanted:
        raise ValueError(f"layers {sorted(wanted)} of {type(model).__name__} did not call Transformers' attention interface")


def layer_count(model_folder: str | Path) -> int:
    from transformers import AutoConfig

    _check(model_folder)
    return AutoConfig.from_pretrained(model_folder, local_files_only=True).get_text_config().num_hidden_layers


def saved(folder: Path, layers: Collection[int] | None = None) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
    """(layer, query, key, value) from a folder that `main` has written."""
    for layer in range(saved_layers(folder)) if layers is None else layers:
        tensors = torch.load(folder / f"layer_{layer:02}.pt")
        yield layer, tensors["q"], tensors["k"], tensors["v"]


def saved_layers(folder: Path) -> int:
    count = len(list(folder.glob("layer_*.pt")))
    if count == 0:
        raise FileNotFoundError(f"{folder} holds no layer_00.pt, ...; `python benchmarks/real.py TEXT --out {folder}` makes them")
    return count


def command_line(
    doc: str | None,
    name: str,
    rows: int,
    most: int,
    measure: Callable[[Collection[tuple[int, Tensor, Tensor, Tensor]], int], dict[str, Any]],
    report: Callable[[dict[str, Any]], None],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """Run a benchmark on the layers of a model: measure some of the last `most` rows of each head, report, save, draw."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of a causal language model")
    parser.add_argument("--text", type=Path, help="what it reads; default: docstrings of Python's standard library")
    parser.add_argument("--captured", type=Path, help="folder with inputs that real.py has saved, instead of a model and a text")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=rows, help=f"rows per head, spread evenly over the last {most}")
    parser.add_argument("--quick", action="store_true", help="two layers, nothing written")
    parser.add_argument("--plot-only", action="store_true", help="draw the figure from the saved results")
    options = parser.parse_args()
    if not 1 <= options.rows <= most:
        parser.error(f"--rows must be between 1 and {most}, got {options.rows}")
    if not options.plot_only:
        if options.captured is None and not (options.model / "config.json").exists():
            print(f"skipped: no model in {options.model} (`make smollm2` fetches one)")
            return
        results = {"source": source(options), **measure(layers(options), options.rows)}
        report(results)
        if options.quick:
            return
        print("written:", write(name, results))
    FIGURES.mkdir(parents=True, exist_ok=True)
    plot(read(name), FIGURES)


def source(options: argparse.Namespace) -> str:
    """Where `layers` takes its inputs from, in words."""
    if options.captured is not None:
        return f"captured: {options.captured.name}"
    return f"{options.model.name}, {options.text.name if options.text else 'docstrings of the standard library'}"


def layers(options: argparse.Namespace) -> list[tuple[int, Tensor, Tensor, Tensor]]:
    """(layer, query, key, value) for the options captured, model, text, tokens and quick (two layers) of a benchmark."""
    wanted = range(2) if options.quick else None
    if options.captured is not None:
        return list(saved(options.captured, wanted))
    with text_file(options.text) as text:
        found = capture(options.model, text, options.tokens, wanted)
    return [(layer, *tensors) for layer, tensors in enumerate(found)]


@contextmanager
def text_file(given: Path | None) -> Iterator[Path]:
    """The given text, or else a temporary file with the docstrings of Python's standard library."""
    if given is not None:
        yield given
        return
    print("no --text: taking the docstrings of Python's standard library")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "docstrings.txt"
        path.write_text(standard_library_text(), encoding="utf-8")
        yield path


def standard_library_text(characters: int = 400_000) -> str:
    """The docstrings of modules, classes and functions of the standard library, in order."""
    pieces: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                pieces.append(ast.get_docstring(node) or "")
        if sum(map(len, pieces)) >= characters:
            break
    return "\n\n".join(piece for piece in pieces if piece)[:characters]


def perplexity(model: Any, ids: Tensor) -> float:
    """exp of the mean loss over all positions but the first. It holds all logits: 1.6 GB for SmolLM2 at 8,192 tokens."""
    with torch.inference_mode():
        logits = model(ids, use_cache=False).logits[0, :-1]
        pieces = zip(logits.split(512), ids[0, 1:].split(512), strict=True)
        total = sum(float(F.cross_entropy(scores.float(), following, reduction="sum")) for scores, following in pieces)
    return math.exp(total / (ids.shape[1] - 1))


def _check(model_folder: str | Path) -> None:
    if not (Path(model_folder) / "config.json").exists():
        raise FileNotFoundError(f"{model_folder} holds no Transformers model (no config.json); `make smollm2` makes {SMOLLM2}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, help="folder to save a dict of q, k, v in, for every layer")
    arguments = parser.parse_args()
    ids = token_ids(arguments.model, arguments.text, arguments.tokens)
    model = load(arguments.model)

    def save(layer: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        path = arguments.out / f"layer_{layer:02}.pt"
        torch.save({"q": query, "k": key, "v": value}, path)
        print(path, tuple(query.shape), tuple(key.shape), flush=True)

    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        visit_layers(model, ids, save)
    print(f"perplexity of {ids.shape[1]:,} tokens: {perplexity(model, ids):.2f}")


if __name__ == "__main__":
    main()

"""The file of a memory: safetensors and a header. It is written whole or not at all, and checked when it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from fnmatch import fnmatchcase
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.saved import BY_QUERIES, SIZES, TENSORS, grouped_by_keys
from nearfield.cells.cache.store import check_method
from nearfield.cells.method import Cells
from nearfield.cells.sizes import CacheSizes
from nearfield.checks import check_positive
from nearfield.crossover import dtype_name
from nearfield.hf.config import describe, parse_method
from nearfield.tensor_file import check_digest, check_format, read_about, read_tensors, write_tensors

FORMAT, VERSION = "nearfield-memory", "4"
BEFORE = "3"
"""The version before, whose files do not say how large queries are."""

TOKENS, BOUNDS = "tokens", "bounds"

POSITIONS = ("running", "restart")

SAMPLE = 64
"""Entries of each weight that go into the fingerprint of a model."""

IRRELEVANT = (
    *("_*", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("*_token_id", "tokenizer_class", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
    *("output_*", "return_dict", "use_return_dict", "use_cache", "chunk_size_feed_forward", "initializer_range"),
    *("task_specific_params", "pretraining_tp"),
)
"""Entries of a configuration that do not affect keys and values: where a model comes from, and what becomes of its output."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a text was read.

    Attributes:
        positions: "running" or "restart".
        chunk: how many tokens were read at a time.
        gap: positions between the chunks and a question. Heads that look at the last few tokens find the question's own there,
            and not the end of every chunk.
        sharpness: factor on the keys after they were read, sinks apart: log(tokens) / log(known positions). Over more keys than
            the model was trained on, attention would be flatter without it.
    """

    positions: str
    chunk: int
    gap: int = 0
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {self.positions!r}")
        check_positive("chunk", self.chunk)
        check_positive("gap", self.gap, least=0)
        if not isinstance(self.sharpness, float) or not 1.0 <= self.sharpness < math.inf:
            raise ValueError(f"sharpness must be a number of at least 1, got {self.sharpness!r}")


@dataclasses.dataclass(frozen=True)
class Contents:
    """What a file holds."""

    tokens: Tensor
    """`[1, length]`"""
    method: Cells
    reading: Reading
    fingerprint: str
    """of the model"""
    dtype: str
    """of the model, such as "float32\""""
    bounds: Tensor
    """`[segments + 1]`: 0, and where each closed segment ends; the same in all layers"""
    layers: list[dict[str, Tensor]]
    """the tensors of every layer, by name"""


def write_memory(path: Path, contents: Contents) -> None:
    tensors = {TOKENS: contents.tokens, BOUNDS: contents.bounds}
    for number, layer in enumerate(contents.layers):
        tensors |= {f"layers.{number}.{name}": x for name, x in layer.items()}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": contents.fingerprint,
        "dtype": contents.dtype,
        "method": json.dumps(describe(contents.method)),
        "reading": json.dumps(dataclasses.asdict(contents.reading)),
        "layers": str(len(contents.layers)),
    }
    write_tensors("memory", path, about, tensors)


def read_header(path: Path) -> dict[str, str]:
    """What a file says about itself: its model's fingerprint and dtype, among others. Raises ValueError if it is no memory."""
    about = read_about("memory", path, _maker(path))
    _checked_header(path, about)
    return about


def read_memory(path: Path, model: Any, verify: bool) -> Contents:
    """Read what `write_memory` has written, of a text that this model has read. Raises ValueError on any other file."""
    about, tensors = read_tensors("memory", path, _maker(path))
    method, reading, layers = _checked_header(path, about)
    check_model(f"memory {path}", about["fingerprint"], about["dtype"], model)
    if verify:
        check_digest("memory", path, about, tensors)
    by_layer = _checked_tensors(path, tensors, layers, method, about["version"] != BEFORE)
    return Contents(tensors[TOKENS], method, reading, about["fingerprint"], about["dtype"], tensors[BOUNDS], by_layer)


def fingerprint(model: Any) -> str:
    """Of a model: a digest of the relevant configuration, and one of some entries of every weight and their dtype."""
    config = json.dumps([type(model).__name__, _relevant(model.config.to_dict())], sort_keys=True, default=str)
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLE)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return f"{hashlib.sha256(config.encode()).hexdigest()}-{digest.hexdigest()}"


def _relevant(config: Any) -> Any:
    """A configuration, nested ones included, without its irrelevant entries."""
    if not isinstance(config, dict):
        return config
    kept = {str(name): x for name, x in config.items() if not any(fnmatchcase(str(name), pattern) for pattern in IRRELEVANT)}
    return {name: _relevant(x) for name, x in kept.items()}


def check_model(what: str, made_with: str, dtype: str, model: Any) -> None:
    """Raises ValueError unless the model has this fingerprint and dtype."""
    found, here = fingerprint(model), dtype_name(model.dtype)
    if found == made_with:
        return
    if here != dtype and found.partition("-")[0] == made_with.partition("-")[0]:
        raise ValueError(
            f"{what} was made with the model in {dtype}, but this one is in {here}; load it in {dtype} (--dtype {dtype}), or let "
            "it read the text, with Memory.read"
        )
    raise ValueError(f"{what} was made with another model; let this one read the text, with Memory.read")


def _maker(path: Path) -> str:
    return f"Memory.read(...).save({str(path)!r})"


def _checked_header(path: Path, about: dict[str, str]) -> tuple[Cells, Reading, int]:
    version = BEFORE if about.get("version") == BEFORE else VERSION
    check_format("memory", path, about, (FORMAT, version), "let the model read the text again, with Memory.read")
    try:
        method = parse_method("method", json.loads(about["method"]))
        check_method(method)
        reading, layers = Reading(**json.loads(about["reading"])), int(about["layers"])
        if not 0 < layers < 10**5 or not {"fingerprint", "dtype"} <= set(about):
            raise ValueError("layers, fingerprint or dtype missing")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"memory {path} has an invalid header: {error}") from error
    return method, reading, layers


def _checked_tensors(
    path: Any, tensors: dict[str, Tensor], layers: int, method: Cells, has_sizes: bool
) -> list[dict[str, Tensor]]:
    names = [name for name in TENSORS if has_sizes or name not in (SIZES, BY_QUERIES)]
    # No more names are made than there are tensors, however many layers the header speaks of.
    named = (f"layers.{number}.{name}" for number in range(layers) for name in names)
    wrong = list(islice((name for name in chain((TOKENS, BOUNDS), named) if name not in tensors), 3))
    if not wrong and len(tensors) > 2 + layers * len(names):
        of_layers = {f"layers.{number}.{name}" for number in range(layers) for name in names}
        wrong = sorted(set(tensors) - {TOKENS, BOUNDS} - of_layers)[:3]
    if wrong:
        raise ValueError(f"memory {path} has the wrong tensors; {wrong} are missing or unknown")
    shape, dtype = tuple(tensors[TOKENS].shape), tensors[TOKENS].dtype
    if len(shape) != 2 or shape[0] != 1 or dtype != torch.int64:
        raise ValueError(f"memory {path} has tokens of shape {shape} and {dtype}, not [1, length] and torch.int64")
    length, bounds = shape[1], tensors[BOUNDS]
    sizes = CacheSizes.of(method.segment, method.cell_size, method.window, method.sinks)
    if not _are_bounds(bounds, max(0, length - sizes.window)):
        raise ValueError(f"memory {path} is damaged: bounds")
    found = []
    for number in range(layers):
        layer = {name: tensors[f"layers.{number}.{name}"] for name in names}
        if not has_sizes and layer["keys"].dim() == 4:
            layer |= grouped_by_keys(layer["keys"])
        damaged = _damaged(layer, length, bounds, sizes)
        if damaged:
            raise ValueError(f"memory {path} is damaged: layer {number}, {damaged}")
        found.append(layer)
    return found


def _are_bounds(bounds: Tensor, most: int) -> bool:
    """Whether they begin at 0, ascend, and end at `most` (where the window begins) or before."""
    if bounds.dim() != 1 or len(bounds) == 0 or bounds.dtype != torch.int64:
        return False
    return bool(bounds[0] == 0) and bool((bounds[1:] > bounds[:-1]).all()) and bool(bounds[-1] <= most)


def _damaged(layer: dict[str, Tensor], length: int, bounds: Tensor, sizes: CacheSizes) -> str | None:
    """The first tensor of a layer that has a wrong shape or dtype, or places that do not exist; None: all are right."""
    keys, values = layer["keys"], layer["values"]
    if keys.dim() != 4 or values.dim() != 4 or not keys.is_floating_point():
        return "keys"
    heads, dim, value_dim = keys.shape[1], keys.shape[3], values.shape[3]
    closed, cells = int(bounds[-1]), sum(sizes.cells(*ends) for ends in pairwise(bounds.tolist()))
    compute = torch.promote_types(keys.dtype, torch.float32)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "keys": ((1, heads, length, dim), keys.dtype),
        "values": ((1, heads, length, value_dim), keys.dtype),
        "order": ((1, heads, closed), torch.int32),
        "sinks": ((1, sizes.sinks), torch.int64),
        "start": ((1, heads, cells), torch.int32),
        "size": ((1, heads, cells), compute),
        "void": ((1, heads, cells), compute),
        "centroid": ((1, heads, cells, dim), compute),
        "variance": ((1, heads, cells, dim), compute),
        "value": ((1, heads, cells, value_dim), compute),
        "cross": ((1, heads, value_dim, dim), compute),
        "pooled": ((1, heads), compute),
        SIZES: ((1, heads, dim if layer[SIZES].numel() else 0), compute),
        BY_QUERIES: ((1,), torch.bool),
    }
    for name, (shape, dtype) in expected.items():
        if layer[name].shape != shape or layer[name].dtype != dtype:
            return name
    lengths = bounds.diff()
    places: dict[str, tuple[Tensor, int, int | Tensor]] = {
        "order": (layer["order"], 0, lengths.repeat_interleave(lengths) - 1),
        "start": (layer["start"], 0, closed),
        "size": (layer["size"], 0, closed),
        "sinks": (layer["sinks"], -1, closed - 1),
        "start and size": (layer["start"] + layer["size"], 0, closed),
    }
    for name, (place, least, most) in places.items():
        if place.numel() and not bool(((place >= least) & (place <= most)).all()):
            return name
    # Within each segment, `order` must be a permutation.
    key = layer["order"] + bounds[:-1].repeat_interleave(lengths)
    is_there = torch.zeros(key.shape, dtype=torch.bool).scatter_(2, key, True)
    return None if bool(is_there.all()) else "order"

"""The file of a memory: safetensors with a header that says what it is, written whole or not at all, checked when it is read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import secrets
import stat
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.store import check_method
from nearfield.cells.method import Cells
from nearfield.cells.partition import BUILT_IN
from nearfield.cells.sizes import CacheSizes
from nearfield.crossover import dtype_name
from nearfield.hf.config import describe
from nearfield.hf.reading import Reading

FORMAT, VERSION = "nearfield-memory", "3"

TOKENS, BOUNDS = "tokens", "bounds"

MOMENTS = ("start", "size", "void", "centroid", "variance", "value")

TENSORS = ("keys", "values", "order", "sinks", *MOMENTS, "cross", "pooled")
"""Of every layer."""

SAMPLE = 64
"""Numbers of every weight that go into the fingerprint of a model."""

NOT_OF_THE_MODEL = (
    *("_*", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype"),
    *("*_token_id", "tokenizer_class", "id2label", "label2id", "num_labels", "problem_type", "finetuning_task"),
    *("output_*", "return_dict", "use_return_dict", "use_cache", "chunk_size_feed_forward", "initializer_range"),
    *("task_specific_params", "pretraining_tp"),
)
"""Makes no difference to keys and values: where a model comes from, how it was made, and what becomes of its output."""


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
    """`[segments + 1]`: where closed segments end, after where the first one begins; the same in all layers"""
    layers: list[dict[str, Tensor]]
    """the tensors of every layer, by name"""


def write_memory(path: Path, contents: Contents) -> None:
    """Write beside the file and then take its place: whatever happens before that, what was there stays as it was."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    target = Path(os.path.realpath(path))  # where a link leads
    tensors = {TOKENS: contents.tokens.contiguous(), BOUNDS: contents.bounds}
    for number, kept in enumerate(contents.layers):
        tensors |= {f"layers.{number}.{name}": x.contiguous() for name, x in kept.items()}
    about = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": contents.fingerprint,
        "dtype": contents.dtype,
        "method": json.dumps(describe(contents.method)),
        "reading": json.dumps(dataclasses.asdict(contents.reading)),
        "layers": str(len(contents.layers)),
    }
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        beside.touch(exist_ok=False)
        # That of an empty file is what the umask leaves; safetensors makes a file of its own, for the owner only.
        mode = stat.S_IMODE((target if target.exists() else beside).stat().st_mode)
        save_file(tensors, str(beside), metadata={**about, "digest": _digest(about, tensors)})
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.chmod(mode)
        os.replace(beside, target)
    except (SafetensorError, OSError) as error:
        raise OSError(f"memory {path} cannot be written: {error}; what was there is unchanged") from error
    finally:
        beside.unlink(missing_ok=True)


def read_memory(path: Path, model: Any, verify: bool) -> Contents:
    """What `write_memory` has written of a text that this model has read. Raises ValueError on any other file."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"memory {path} is not a file; Memory.read(...).save({str(path)!r}) makes one")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"memory {path} cannot be read: {error}") from error
    method, reading, layers = _checked_header(path, about)
    check_model(f"memory {path}", about["fingerprint"], about["dtype"], model)
    if verify and about.pop("digest", None) != _digest(about, tensors):
        raise ValueError(f"memory {path} is damaged: its digest is another one")
    kept = _checked_tensors(path, tensors, layers, method)
    return Contents(tensors[TOKENS], method, reading, about["fingerprint"], about["dtype"], tensors[BOUNDS], kept)


def fingerprint(model: Any) -> str:
    """Of a model: what its configuration says of the computation, and then, with its dtype, some numbers of every weight."""
    config = json.dumps([type(model).__name__, _of_the_model(model.config.to_dict())], sort_keys=True, default=str)
    digest = hashlib.sha256()
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLE)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return f"{hashlib.sha256(config.encode()).hexdigest()}-{digest.hexdigest()}"


def _of_the_model(config: Any) -> Any:
    """A configuration, also one inside of another, without what is not of the model."""
    if not isinstance(config, dict):
        return config
    kept = {str(name): x for name, x in config.items() if not any(fnmatchcase(str(name), other) for other in NOT_OF_THE_MODEL)}
    return {name: _of_the_model(x) for name, x in kept.items()}


def check_model(what: str, made_with: str, dtype: str, model: Any) -> None:
    """Raises ValueError on a model other than the one of this fingerprint and dtype."""
    found, here = fingerprint(model), dtype_name(model.dtype)
    if found == made_with:
        return
    if here != dtype and found.partition("-")[0] == made_with.partition("-")[0]:
        raise ValueError(
            f"{what} was made with the model in {dtype}, and this one is in {here}; load it in {dtype} (--dtype {dtype}), or let "
            "it read the text, with Memory.read"
        )
    raise ValueError(f"{what} was made with another model; let this one read the text, with Memory.read")


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _checked_header(path: Any, about: dict[str, str]) -> tuple[Cells, Reading, int]:
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        found = f"{about.get('format')!r}, version {about.get('version')!r}"
        raise ValueError(f"memory {path} must be a file of format {FORMAT!r}, version {VERSION!r}, got {found}")
    try:
        given = json.loads(about["method"])
        if given.pop("method") != "Cells":
            raise ValueError("method must be Cells")
        if "partition" in given:
            part = given["partition"]
            given["partition"] = BUILT_IN[part.pop("name")](**part)
        known = {field.name for field in dataclasses.fields(Cells)}
        if not set(given) <= known:
            raise ValueError(f"unknown arguments {sorted(set(given) - known)}")
        method, reading, layers = Cells(**given), Reading(**json.loads(about["reading"])), int(about["layers"])
        check_method(method)
        if not 0 < layers < 10**5 or not {"fingerprint", "dtype"} <= set(about):
            raise ValueError("layers, fingerprint or dtype missing")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"memory {path} has a header that makes no sense: {error}") from error
    return method, reading, layers


def _checked_tensors(path: Any, tensors: dict[str, Tensor], layers: int, method: Cells) -> list[dict[str, Tensor]]:
    wanted = {TOKENS, BOUNDS} | {f"layers.{number}.{name}" for number in range(layers) for name in TENSORS}
    if set(tensors) != wanted:
        raise ValueError(f"memory {path} should have other tensors; {sorted(set(tensors) ^ wanted)[:3]} are missing or unknown")
    shape, dtype = tuple(tensors[TOKENS].shape), tensors[TOKENS].dtype
    if len(shape) != 2 or shape[0] != 1 or dtype != torch.int64:
        raise ValueError(f"memory {path} has tokens of shape {shape} and {dtype}, not [1, length] and torch.int64")
    length, bounds = shape[1], tensors[BOUNDS]
    if not _are_bounds(
        bounds, max(0, length - CacheSizes.of(method.segment, method.cell_size, method.window, method.sinks).window)
    ):
        raise ValueError(f"memory {path} is damaged: bounds")
    found = []
    for number in range(layers):
        kept = {name: tensors[f"layers.{number}.{name}"] for name in TENSORS}
        wrong = _wrong(kept, length, bounds, method)
        if wrong:
            raise ValueError(f"memory {path} is damaged: layer {number}, {wrong}")
        found.append(kept)
    return found


def _are_bounds(bounds: Tensor, most: int) -> bool:
    """Whether they begin at 0, ascend, and end at `most`, where the window begins, or before."""
    if bounds.dim() != 1 or len(bounds) == 0 or bounds.dtype != torch.int64:
        return False
    return bool(bounds[0] == 0) and bool((bounds[1:] > bounds[:-1]).all()) and bool(bounds[-1] <= most)


def _wrong(kept: dict[str, Tensor], length: int, bounds: Tensor, method: Cells) -> str | None:
    """What is wrong with the tensors of a layer, if anything: shapes, dtypes, and places that are not there."""
    sizes = CacheSizes.of(method.segment, method.cell_size, method.window, method.sinks)
    keys, values = kept["keys"], kept["values"]
    if keys.dim() != 4 or values.dim() != 4 or not keys.is_floating_point():
        return "keys"
    heads, dim, wide = keys.shape[1], keys.shape[3], values.shape[3]
    closed, cells = int(bounds[-1]), sum(sizes.cells(*ends) for ends in pairwise(bounds.tolist()))
    compute = torch.promote_types(keys.dtype, torch.float32)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "keys": ((1, heads, length, dim), keys.dtype),
        "values": ((1, heads, length, wide), keys.dtype),
        "order": ((1, heads, closed), torch.int32),
        "sinks": ((1, sizes.sinks), torch.int64),
        "start": ((1, heads, cells), torch.int32),
        "size": ((1, heads, cells), compute),
        "void": ((1, heads, cells), compute),
        "centroid": ((1, heads, cells, dim), compute),
        "variance": ((1, heads, cells, dim), compute),
        "value": ((1, heads, cells, wide), compute),
        "cross": ((1, heads, wide, dim), compute),
        "pooled": ((1, heads), compute),
    }
    for name, (shape, dtype) in expected.items():
        if kept[name].shape != shape or kept[name].dtype != dtype:
            return name
    lengths = bounds.diff()
    places: dict[str, tuple[Tensor, int, int | Tensor]] = {
        "order": (kept["order"], 0, lengths.repeat_interleave(lengths) - 1),
        "start": (kept["start"], 0, closed),
        "size": (kept["size"], 0, closed),
        "sinks": (kept["sinks"], -1, closed - 1),
        "start and size": (kept["start"] + kept["size"], 0, closed),
    }
    for name, (place, least, most) in places.items():
        if place.numel() and not bool(((place >= least) & (place <= most)).all()):
            return name
    came_from = kept["order"] + bounds[:-1].repeat_interleave(lengths)
    is_there = torch.zeros(came_from.shape, dtype=torch.bool).scatter_(2, came_from, True)
    return None if bool(is_there.all()) else "order"

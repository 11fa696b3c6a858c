"""A file that says by which method each layer attends: small, for people to read, checked in full when it is read.

{
  "format": "nearfield-layers", "version": 1,
  "num_hidden_layers": 3,
  "default": {"method": "Exact"},
  "layers": {
    "0": {"method": "Cells", "cell_size": 16, "probes": 18, "sinks": 16, "segment": 1024}
  }
}

`num_hidden_layers` (optional) keeps the file from being used with another model, `default` (optional: `Auto`) is for layers that
are not listed, and `about` (optional) may hold anything, such as how the file was made. The arguments of a method are those of
its class; a partition or an index is written likewise, `{"index": {"name": "KMeansIndex", ...}}`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfield.auto import Auto
from nearfield.cells.method import Cells
from nearfield.cells.partition import BUILT_IN
from nearfield.checks import check_positive
from nearfield.exact import Exact
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.faiss import FaissIndex
from nearfield.knn.index.kmeans import KMeansIndex
from nearfield.knn.index.lsh import ConcentricLSH
from nearfield.knn.topk import TopK
from nearfield.paper.gumbel import LazyGumbel
from nearfield.problem import Method

FORMAT, VERSION = "nearfield-layers", 1

ENTRIES = ("format", "version", "about", "num_hidden_layers", "default", "layers")

METHODS: dict[str, type] = {one.__name__: one for one in (Exact, TopK, LazyGumbel, Cells, Auto)}

PARTS: dict[str, dict[str, type]] = {
    "partition": {**BUILT_IN},
    "index": {one.__name__: one for one in (ExactIndex, KMeansIndex, ConcentricLSH, FaissIndex)},
}
"""What arguments of a method may be, beyond plain values."""

REMEDY = "`nearfield eval MODEL TEXT --tolerance 0.4` writes such a file"


@dataclass(frozen=True)
class LayerConfig:
    """What a file says: methods by the number of a layer and for `"default"`, and how many layers the model has, if told."""

    methods: Mapping[int | str, Method]
    num_hidden_layers: int | None = None


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> LayerConfig:
    """The methods of a file, or of what such a file holds. Raises ValueError, with the place and the remedy, on anything else."""
    if isinstance(config, Mapping):
        return _parsed(config, "config")
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"config must be a path or a dictionary, got {config!r}")
    path = Path(config)
    if not path.is_file():
        raise FileNotFoundError(f"config {path} is not a file; {REMEDY}")
    try:
        given = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, something twice, or too deep
        raise ValueError(f"config {path} cannot be read: {error}; {REMEDY}") from error
    return _parsed(given, f"config {path}")


def write_config(path: Path, config: LayerConfig, about: Mapping[str, Any] | None = None) -> None:
    """Write a file that `read_config` takes, a line per layer."""
    layers = {str(layer): describe(method) for layer, method in sorted(_numbered(config.methods).items())}
    lines = [f'  "format": "{FORMAT}", "version": {VERSION}']
    if about:
        lines.append('  "about": ' + json.dumps(about, indent=2).replace("\n", "\n  "))
    if config.num_hidden_layers is not None:
        lines.append(f'  "num_hidden_layers": {config.num_hidden_layers}')
    if "default" in config.methods:
        lines.append(f'  "default": {json.dumps(describe(config.methods["default"]))}')
    listed = ",\n".join(f'    "{layer}": {json.dumps(method)}' for layer, method in layers.items())
    lines.append('  "layers": {\n' + listed + "\n  }" if layers else '  "layers": {}')
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def describe(method: Method) -> dict[str, Any]:
    """A method as the file has it: its name and arguments, without those that are None and parts that are as usual."""
    if type(method) not in METHODS.values():
        raise TypeError(f"only {', '.join(METHODS)} can be written to a file, got {method!r}")
    return {"method": type(method).__name__, **_arguments(method)}


def _arguments(strategy: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(strategy):
        value = getattr(strategy, field.name)
        if dataclasses.is_dataclass(value):
            usual = field.default_factory() if callable(field.default_factory) else field.default
            if value == usual:
                continue
            value = {"name": type(value).__name__, **_arguments(value)}
        if value is not None:
            found[field.name] = value
    return found


def _numbered(methods: Mapping[int | str, Method]) -> dict[int, Method]:
    return {layer: method for layer, method in methods.items() if isinstance(layer, int)}


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} is there twice, remove one of them")
        found[name] = value
    return found


def _parsed(given: object, where: str) -> LayerConfig:
    if not isinstance(given, Mapping) or given.get("format") != FORMAT:
        raise ValueError(f'{where} must be an object with "format": "{FORMAT}"; {REMEDY}')
    if given.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {given.get('version')!r}, and this nearfield reads version {VERSION}; "
            "write it again with `nearfield eval`, or use the nearfield that wrote it"
        )
    _check_known(where, given, ENTRIES)
    count = given.get("num_hidden_layers")
    _checked(where, check_positive, "num_hidden_layers", count, optional=True)
    layers = given.get("layers", {})
    if not isinstance(layers, Mapping):
        raise ValueError(f'{where}: "layers" must be an object from numbers of layers to methods, got {layers!r}')
    methods: dict[int | str, Method] = {}
    if "default" in given:
        methods["default"] = _strategy(f"{where}, default", given["default"], "method", METHODS)
    for name, method in layers.items():
        layer = _layer(where, name, count)
        if layer in methods:
            raise ValueError(f"{where}: layer {layer} is there twice, remove one of them")
        methods[layer] = _strategy(f"{where}, layer {layer}", method, "method", METHODS)
    return LayerConfig(methods, count)


def _layer(where: str, name: object, count: int | None) -> int:
    if isinstance(name, str) and name.isdecimal():
        name = int(name)
    if isinstance(name, bool) or not isinstance(name, int) or name < 0:
        raise ValueError(f'{where}: "layers" must have the numbers of layers as names, such as "0"; got {name!r}')
    if count is not None and name >= count:
        raise ValueError(f"{where}: there is no layer {name} in a model of {count}; they are counted from 0")
    return name


def _strategy(where: str, given: object, title: str, known: Mapping[str, type]) -> Any:
    """An object of one of the `known` classes, named by the entry `title`; the other entries are its arguments."""
    if not isinstance(given, Mapping) or title not in given:
        raise ValueError(f'{where} must be an object such as {{"{title}": "{next(iter(known))}"}}, got {given!r}')
    name = given[title]
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{where}: {title} must be one of {', '.join(known)}; got {name!r}{_meant(name, known)}")
    arguments = {key: value for key, value in given.items() if key != title}
    _check_known(f"{where}, {name}", arguments, [field.name for field in dataclasses.fields(known[name]) if field.init])
    for key, value in arguments.items():
        if key in PARTS:
            arguments[key] = _strategy(f"{where}, {key}", value, "name", PARTS[key])
    return _checked(f"{where}, {name}", known[name], **arguments)


def _checked(where: str, make: Any, *arguments: Any, **options: Any) -> Any:
    """What the call returns; what it has to say against its arguments is told with the place in the file."""
    try:
        return make(*arguments, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _check_known(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{where} takes {', '.join(known) or 'no arguments'}; got {name!r}{_meant(name, known)}")


def _meant(name: object, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f", did you mean {close[0]!r}?" if close else ""

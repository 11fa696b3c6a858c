"""The file that says which method each layer attends by: short, readable, and checked in full when it is read.

{
  "format": "nearfield-layers", "version": 1,
  "num_hidden_layers": 3,
  "default": {"method": "Exact"},
  "layers": {
    "0": {"method": "Cells", "cell_size": 16, "probes": 18, "sinks": 16, "segment": 1024}
  },
  "cache": {
    "default": {"method": "Exact"},
    "layers": {
      "0": {"method": "Cells", "probes": 30}
    }
  }
}

Optional are `num_hidden_layers`, which keeps the file from being used with a model of another depth; `default`, for layers that
are not listed (`Auto` if it is missing); `prefill`, as in `hf.register`; `cache`, which says the same of the steps of an answer,
with an `hf.CellCache` (`Cells` for layers that it does not list); and `about`, here and in `cache`, which may hold anything, such
as how the file was made. A method takes the arguments of its class. A partition or an index is written the same way:
`{"index": {"name": "KMeansIndex", ...}}`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from nearfield import user_cache
from nearfield.auto import Auto
from nearfield.cells.cache.store import check_method
from nearfield.cells.method import Cells
from nearfield.cells.partition import BUILT_IN
from nearfield.checks import check_positive
from nearfield.exact import Exact
from nearfield.knn import index as indices
from nearfield.knn.topk import TopK
from nearfield.paper.gumbel import LazyGumbel
from nearfield.problem import Method

FORMAT, VERSION = "nearfield-layers", 1

ENTRIES = ("format", "version", "about", "num_hidden_layers", "prefill", "default", "layers", "cache")
CACHE_ENTRIES = ("about", "default", "layers")

PREFILLS = ("strict", "shared")

PREFILL_SHARE = 128
"""How many rows of a prompt open cells together with `prefill="shared"`."""

METHODS: dict[str, type] = {one.__name__: one for one in (Exact, TopK, LazyGumbel, Cells, Auto)}

CACHE_METHODS: dict[str, type] = {name: one for name, one in METHODS.items() if one is not Auto}
"""What the steps of an answer attend by."""

PARTS: dict[str, dict[str, type]] = {
    "partition": {**BUILT_IN},
    "index": {**indices.BUILT_IN},
}
"""Arguments of methods that are objects themselves, and the classes they may have."""

REMEDY = "`nearfield tune MODEL TEXT` writes such a file, for a CellCache with --cache"

M = TypeVar("M")


@dataclass(frozen=True)
class LayerConfig:
    """What a file says: methods by layer number, one for `"default"`; depth of the model and `prefill` if they are given."""

    methods: Mapping[int | str, Method]
    num_hidden_layers: int | None = None
    prefill: str | None = None
    cache: Mapping[int | str, Method] | None = None
    """what the steps of an answer attend by, like `methods`; None: nothing is said about them"""
    about: Any = dataclasses.field(default=None, compare=False)
    """how `methods` were chosen"""
    cache_about: Any = dataclasses.field(default=None, compare=False)
    """how those of `cache` were"""


def check_prefill(prefill: object) -> None:
    if prefill not in PREFILLS:
        raise ValueError(
            "prefill must be 'strict' (each row opens cells by itself) or 'shared' "
            f"({PREFILL_SHARE} rows of a prompt open cells together), got {prefill!r}; leave it out for 'strict'"
        )


def sharing_rows(methods: Mapping[int | str, Method]) -> dict[int | str, Method]:
    """Those of the methods that open cells row by row because nothing else was asked for, with `PREFILL_SHARE`."""
    return {
        layer: dataclasses.replace(method, share=PREFILL_SHARE)
        for layer, method in methods.items()
        if isinstance(method, Cells | Auto) and method.share is None
    }


def by_layer(methods: M | Mapping[int | str, M] | None, default: M) -> dict[int | str, M]:
    """Methods by layer number, and one for `"default"`. A single method serves all layers; None means `default`."""
    if not isinstance(methods, Mapping):
        return {"default": default if methods is None else methods}
    for layer in methods:
        if layer != "default" and not _is_layer_number(layer):
            raise ValueError(f"method must map layer numbers, or 'default', to methods; got {layer!r}")
    return {"default": default, **methods}


def _is_layer_number(key: object) -> bool:
    return isinstance(key, int) and not isinstance(key, bool) and key >= 0


def read_config(config: str | os.PathLike[str] | Mapping[str, Any]) -> LayerConfig:
    """Read a file, or the contents of one. Raises ValueError, with the place and a remedy, if anything is wrong."""
    if isinstance(config, Mapping):
        return _parse_config(config, "config")
    if not isinstance(config, str | os.PathLike):
        raise TypeError(f"config must be a path or a dictionary, got {config!r}")
    path = Path(config)
    if not path.is_file():
        raise FileNotFoundError(f"config {path} is not a file; {REMEDY}")
    try:
        given = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, a name twice, or nested too deeply
        raise ValueError(f"config {path} cannot be read: {error}; {REMEDY}") from error
    return _parse_config(given, f"config {path}")


def write_config(path: Path, config: LayerConfig) -> None:
    """Write a file for `read_config`, with one line per layer. Until all of it is written, what was there stays as it was."""
    lines = [f'"format": "{FORMAT}", "version": {VERSION}', *_about(config.about)]
    if config.num_hidden_layers is not None:
        lines.append(f'"num_hidden_layers": {config.num_hidden_layers}')
    if config.prefill is not None:
        lines.append(f'"prefill": "{config.prefill}"')
    lines += _written(config.methods)
    if config.cache is not None:
        lines.append('"cache": ' + _block([*_about(config.cache_about), *_written(config.cache)]))
    target = Path(os.path.realpath(path))  # of a link, the file it leads to
    user_cache.replace_bytes(target, (_block(lines) + "\n").encode())


def _about(about: Any) -> list[str]:
    return ['"about": ' + json.dumps(about, indent=2)] if about else []


def _written(methods: Mapping[int | str, Method]) -> list[str]:
    """The entries "default" and "layers"."""
    described = {layer: json.dumps(describe(method)) for layer, method in methods.items()}
    listed = [f'"{layer}": {described[layer]}' for layer in sorted(layer for layer in described if isinstance(layer, int))]
    default = [f'"default": {described["default"]}'] if "default" in described else []
    return [*default, '"layers": ' + (_block(listed) if listed else "{}")]


def _block(lines: list[str]) -> str:
    """An object of these entries, further in than what it is in."""
    return "{\n  " + ",\n".join(lines).replace("\n", "\n  ") + "\n}"


def describe(method: Method) -> dict[str, Any]:
    """A method as it is written: its name and arguments, without those that are None, switches that are off, and default parts.

    So a file that asks for nothing new can be read by older versions too.
    """
    if type(method) not in METHODS.values():
        raise TypeError(f"only {', '.join(METHODS)} can be written to a file, got {method!r}")
    return {"method": type(method).__name__, **_arguments(method)}


def parse_method(where: str, given: object) -> Any:
    """The method that `describe` described; errors name the place, `where`."""
    return _parse(where, given, "method", METHODS)


def _arguments(strategy: Any) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(strategy):
        value = getattr(strategy, field.name)
        known = PARTS.get(field.name)
        if known is not None and type(value) not in known.values():
            raise TypeError(f"as {field.name} only {', '.join(known)} can be written to a file, got {value!r}")
        if dataclasses.is_dataclass(value):
            default = field.default_factory() if callable(field.default_factory) else field.default
            if value == default:
                continue
            value = {"name": type(value).__name__, **_arguments(value)}
        if value is not None and not (value is False and field.default is False):
            found[field.name] = value
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name!r} appears twice; remove one of them")
        found[name] = value
    return found


def _parse_config(given: object, where: str) -> LayerConfig:
    if not isinstance(given, Mapping) or given.get("format") != FORMAT:
        raise ValueError(f'{where} must be an object with "format": "{FORMAT}"; {REMEDY}')
    if given.get("version") != VERSION:
        raise ValueError(
            f"{where} has version {given.get('version')!r}, and this nearfield reads version {VERSION}; "
            "write it again with `nearfield tune`, or use the nearfield that wrote it"
        )
    _check_known(where, given, ENTRIES)
    depth = given.get("num_hidden_layers")
    with _errors_naming(where):
        check_positive("num_hidden_layers", depth, optional=True)
        if "prefill" in given:
            check_prefill(given["prefill"])
    methods = _parse_methods(where, given, depth, METHODS)
    found = LayerConfig(methods, depth, given.get("prefill"), about=given.get("about"))
    if "cache" not in given:
        return found
    cache = given["cache"]
    return dataclasses.replace(found, cache=_parse_cache(f"{where}, cache", cache, depth), cache_about=cache.get("about"))


def _parse_cache(where: str, given: object, depth: int | None) -> dict[int | str, Method]:
    if not isinstance(given, Mapping):
        raise ValueError(f'{where} must be an object such as {{"layers": {{"0": {{"method": "Cells"}}}}}}, got {given!r}')
    _check_known(where, given, CACHE_ENTRIES)
    methods = _parse_methods(where, given, depth, CACHE_METHODS)
    for layer, method in methods.items():
        if isinstance(method, Cells):
            with _errors_naming(f"{where}, {layer if layer == 'default' else f'layer {layer}'}"):
                check_method(method)
    return methods


def _parse_methods(where: str, given: Mapping[str, Any], depth: int | None, known: Mapping[str, type]) -> dict[int | str, Method]:
    """What the entries "default" and "layers" say."""
    layers = given.get("layers", {})
    if not isinstance(layers, Mapping):
        raise ValueError(f'{where}: "layers" must be an object from layer numbers to methods, got {layers!r}')
    methods: dict[int | str, Method] = {}
    if "default" in given:
        methods["default"] = _parse(f"{where}, default", given["default"], "method", known)
    for name, method in layers.items():
        layer = _parse_layer(where, name, depth)
        if layer in methods:
            raise ValueError(f"{where}: layer {layer} appears twice; remove one of them")
        methods[layer] = _parse(f"{where}, layer {layer}", method, "method", known)
    return methods


def _parse_layer(where: str, name: Any, depth: int | None) -> int:
    layer = int(name) if isinstance(name, str) and name.isdecimal() else name
    if not _is_layer_number(layer):
        raise ValueError(f'{where}: the names in "layers" must be layer numbers, such as "0"; got {name!r}')
    if depth is not None and layer >= depth:
        raise ValueError(f"{where}: a model of {depth} layers has no layer {layer}; layers are counted from 0")
    return layer


def _parse(where: str, given: object, title: str, known: Mapping[str, type]) -> Any:
    """An object of one of the `known` classes. The entry `title` names the class, the others are its arguments."""
    if not isinstance(given, Mapping) or title not in given:
        raise ValueError(f'{where} must be an object such as {{"{title}": "{next(iter(known))}"}}, got {given!r}')
    name = given[title]
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{where}: {title} must be one of {', '.join(known)}; got {name!r}{_suggestion(name, known)}")
    arguments = {key: value for key, value in given.items() if key != title}
    _check_known(f"{where}, {name}", arguments, [field.name for field in dataclasses.fields(known[name]) if field.init])
    for key, value in arguments.items():
        if key in PARTS:
            arguments[key] = _parse(f"{where}, {key}", value, "name", PARTS[key])
    with _errors_naming(f"{where}, {name}"):
        return known[name](**arguments)


@contextmanager
def _errors_naming(where: str) -> Iterator[None]:
    """Let errors about arguments name the place in the file."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _check_known(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    for name in given:
        if name not in known:
            raise ValueError(f"{where} takes {', '.join(known) or 'no arguments'}; got {name!r}{_suggestion(name, known)}")


def _suggestion(name: object, known: Collection[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f", did you mean {close[0]!r}?" if close else ""

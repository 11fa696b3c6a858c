"""`Memory`: a text that a model has read once, kept in cells in a file, for later questions to attend to."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.cache.held import Held
from nearfield.hf.cache import CellCache, CellLayer
from nearfield.hf.config import describe
from nearfield.methods.cells import Cells
from nearfield.partition import BY_NAME

FORMAT, VERSION = "nearfield-memory", "1"
MOMENTS = ("start", "size", "void", "centroid", "variance", "value")
TOKENS = "tokens"
SAMPLE = 64
"""Numbers of every weight that go into the fingerprint of a model."""
NOT_OF_THE_MODEL = ("transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "name_or_path")


class Memory:
    """What a model keeps of a text: its tokens, and per layer its keys and values, in cells as far as segments are closed.

    Attributes:
        tokens: `[1, length]`, the text.
        method: the `Cells(...)` by which it is kept, and attended to.
        fingerprint: of the model; no other one may use it.

    Questions come after the text. Their tokens attend to it as later tokens attend to a `CellCache`, and nothing of it is
    computed again. A memory that was loaded leaves keys and values of closed segments in its file, of which a step reads what it
    opens; the moments of all cells are in memory.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from nearfield import hf
        >>> small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **small)).eval()
        >>> hf.register()
        >>> model.set_attn_implementation("nearfield")
        >>> memory = hf.Memory.read(model, torch.arange(40)[None], nearfield.Cells(segment=8, window=0, probes=2))
        >>> question = torch.cat([memory.tokens, torch.tensor([[7, 8, 9]])], 1)
        >>> answer = model.generate(question, past_key_values=memory.cache(), max_new_tokens=5, do_sample=False)
    """

    def __init__(self, tokens: Tensor, method: Cells, fingerprint: str, layers: list[dict[str, Tensor]]) -> None:
        self.tokens, self.method, self.fingerprint = tokens, method, fingerprint
        self._layers = layers

    @staticmethod
    @torch.no_grad()
    def read(model: Any, tokens: Tensor, method: Cells | None = None, chunk: int | None = None) -> Memory:
        """Let a model read a text `[1, length]`, at once or `chunk` tokens at a time."""
        if tokens.dim() != 2 or len(tokens) != 1 or tokens.shape[1] == 0:
            raise ValueError(f"tokens must be [1, length], got {tuple(tokens.shape)}")
        method = Cells() if method is None else method
        cache = CellCache(method, config=model.config)
        other = {type(layer).__name__ for layer in cache.layers if not isinstance(layer, CellLayer)}
        if other:
            raise ValueError(f"a memory needs full attention in all layers, and this model has a {other.pop()}")
        for part in tokens.split(chunk or tokens.shape[1], 1):
            model.base_model(part, past_key_values=cache)
        layers = [_kept(layer.store.held) for layer in cache.layers if isinstance(layer, CellLayer) and layer.store.held]
        return Memory(tokens.cpu(), method, fingerprint(model), layers)

    def cache(self, audit: bool = False, device: torch.device | str | None = None) -> CellCache:
        """A cache that has the text in it; pass it with the tokens of text and question. The memory stays as it is.

        `device`: where the model is; None: where the memory is, which is the CPU for one that was loaded.
        """
        cache = CellCache(self.method, audit=audit)
        for kept in self._layers:
            layer = CellLayer(self.method, audit)
            layer.store.held = _held({name: x.to(device) for name, x in kept.items()}, layer)
            cache.layers.append(layer)
        return cache

    def ask(self, model: Any, tokenizer: Any, question: str, max_new_tokens: int = 64, **options: Any) -> str:
        """What the model says after the text and a question; `options` go to `generate`, which is greedy if they say nothing."""
        more = tokenizer(question, return_tensors="pt", add_special_tokens=False)["input_ids"].long()
        if more.shape[1] == 0:
            raise ValueError(f"question must have at least one token, got {question!r}")
        given = torch.cat([self.tokens, more], 1).to(model.device)
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self.cache(device=model.device),
            max_new_tokens=max_new_tokens,
            **{"do_sample": False, **options},
        )
        answer: str = tokenizer.decode(found[0, given.shape[1] :], skip_special_tokens=True)
        return answer

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file of safetensors."""
        from safetensors.torch import save_file

        tensors = {TOKENS: self.tokens.contiguous()}
        for number, kept in enumerate(self._layers):
            tensors |= {f"layers.{number}.{name}": x.contiguous() for name, x in kept.items()}
        about = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "method": json.dumps(describe(self.method)),
            "layers": str(len(self._layers)),
        }
        save_file(tensors, str(path), metadata={**about, "digest": _digest(about, tensors)})

    @staticmethod
    def load(path: str | os.PathLike[str], model: Any, verify: bool = True) -> Memory:
        """Read a file that `save` has written of a text that this model has read. Raises ValueError on any other.

        `verify`: look at every byte once, and compare with the digest that the file has of itself. Without it a large file is
        there at once, and a damaged one may go unnoticed; shapes, sizes and places are checked in any case.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(f"memory {path} is not a file; Memory.read(...).save({str(path)!r}) makes one")
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"memory {path} cannot be read: {error}") from error
        method, layers = _checked_header(path, about)
        if about["fingerprint"] != fingerprint(model):
            raise ValueError(f"memory {path} was made with another model; let this one read the text, with Memory.read")
        if verify and about.pop("digest", None) != _digest(about, tensors):
            raise ValueError(f"memory {path} is damaged: its digest is another one")
        kept = _checked_tensors(path, tensors, layers, method)
        return Memory(tensors[TOKENS], method, about["fingerprint"], kept)


def fingerprint(model: Any) -> str:
    """Of a model: what its configuration says of the computation, and some numbers of every weight."""
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k not in NOT_OF_THE_MODEL}
    digest = hashlib.sha256(json.dumps([type(model).__name__, config], sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        flat = weight.detach().reshape(-1)
        step = max(1, len(flat) // SAMPLE)
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        digest.update(flat[::step].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _digest(about: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}".encode())
        digest.update(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _kept(held: Held) -> dict[str, Tensor]:
    """The tensors of a layer, of a cache that nobody uses any more."""
    found = {"keys": held.keys.filled, "values": held.values.filled, "order": held.order.filled, "sinks": held.sinks}
    found |= {name: getattr(held.tables, name).filled for name in MOMENTS}
    found |= {"cross": held.tables.cross, "pooled": held.tables.pooled}
    return {name: x.contiguous() for name, x in found.items()}


def _held(kept: dict[str, Tensor], layer: CellLayer) -> Held:
    """What a store holds after it has read the text: closed segments stay where they are."""
    settings = layer.store.settings
    keys, values = kept["keys"], kept["values"]
    closed = kept["order"].shape[2]
    held = Held(keys, values, settings, layer.store.method.partition, base=closed)
    held.keys.append(keys[:, :, closed:])
    held.values.append(values[:, :, closed:])
    held.order.append(kept["order"])
    for name in MOMENTS:
        getattr(held.tables, name).append(kept[name])
    held.tables.cross, held.tables.pooled = kept["cross"].clone(), kept["pooled"].clone()
    held.sinks = kept["sinks"].clone()
    held.segments = closed // settings.segment
    held.mark(None)
    return held


def _checked_header(path: Any, about: dict[str, str]) -> tuple[Cells, int]:
    if about.get("format") != FORMAT or about.get("version") != VERSION:
        found = f"{about.get('format')!r}, version {about.get('version')!r}"
        raise ValueError(f"memory {path} must be a file of format {FORMAT!r}, version {VERSION!r}, got {found}")
    try:
        given = json.loads(about["method"])
        if given.pop("method") != "Cells":
            raise ValueError("method must be Cells")
        if "partition" in given:
            part = given["partition"]
            given["partition"] = BY_NAME[part.pop("name")](**part)
        known = {field.name for field in dataclasses.fields(Cells)}
        if not set(given) <= known:
            raise ValueError(f"unknown arguments {sorted(set(given) - known)}")
        method, layers = Cells(**given), int(about["layers"])
        if not 0 < layers < 10**5 or "fingerprint" not in about:
            raise ValueError("layers or fingerprint missing")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"memory {path} has a header that makes no sense: {error}") from error
    return method, layers


def _checked_tensors(path: Any, tensors: dict[str, Tensor], layers: int, method: Cells) -> list[dict[str, Tensor]]:
    names = ("keys", "values", "order", "sinks", *MOMENTS, "cross", "pooled")
    wanted = {TOKENS} | {f"layers.{number}.{name}" for number in range(layers) for name in names}
    if set(tensors) != wanted:
        raise ValueError(f"memory {path} should have other tensors; {sorted(set(tensors) ^ wanted)[:3]} are missing or unknown")
    length = tensors[TOKENS].shape[-1]
    if tensors[TOKENS].shape != (1, length) or tensors[TOKENS].dtype != torch.int64:
        raise ValueError(f"memory {path} has tokens of shape {tuple(tensors[TOKENS].shape)}, not [1, length]")
    found = []
    for number in range(layers):
        kept = {name: tensors[f"layers.{number}.{name}"] for name in names}
        wrong = _wrong(kept, length, method)
        if wrong:
            raise ValueError(f"memory {path} is damaged: layer {number}, {wrong}")
        found.append(kept)
    return found


def _wrong(kept: dict[str, Tensor], length: int, method: Cells) -> str | None:
    """What is wrong with the tensors of a layer, if anything: shapes, dtypes, and places that are not there."""
    settings = CellLayer(method).store.settings
    keys, values = kept["keys"], kept["values"]
    if keys.dim() != 4 or values.dim() != 4 or not keys.is_floating_point():
        return "keys"
    heads, dim, wide = keys.shape[1], keys.shape[3], values.shape[3]
    closed = kept["order"].shape[2] if kept["order"].dim() == 3 else -1
    cells = kept["size"].shape[2] if kept["size"].dim() == 3 else -1
    own, _ = settings.per_segment(settings.segment)
    if closed < 0 or closed % settings.segment or closed > length or cells != closed // settings.segment * own:
        return "order"
    compute = torch.promote_types(keys.dtype, torch.float32)
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "keys": ((1, heads, length, dim), keys.dtype),
        "values": ((1, heads, length, wide), keys.dtype),
        "order": ((1, heads, closed), torch.int32),
        "sinks": ((1, settings.sinks), torch.int64),
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
    places = {
        "order": (kept["order"], 0, settings.segment - 1),
        "start": (kept["start"], 0, closed),
        "size": (kept["size"], 0, closed),
        "sinks": (kept["sinks"], -1, closed - 1),
        "start and size": (kept["start"] + kept["size"], 0, closed),
    }
    for name, (place, least, most) in places.items():
        if place.numel() and not bool(((place >= least) & (place <= most)).all()):
            return name
    return None

"""`register`: make nearfield an `attn_implementation` of Transformers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from nearfield._compat import outside_of_compiled
from nearfield.auto import Auto
from nearfield.checks import check_method
from nearfield.hf.calls import LayerCall, serve
from nearfield.hf.config import LayerConfig, by_layer, check_prefill, read_config, sharing_rows
from nearfield.hf.masks import LazyMask, make_mask, make_sharded_mask
from nearfield.hf.stored import StoredKeys, serve_stored
from nearfield.problem import Method, to_autocast_dtype

REFUSED = {
    "indices": "keys chosen by the model",
    "block_indices": "blocks of keys chosen by the model",
    "cache": "the paged cache of continuous batching",
    "output_attentions": "attention weights as an output",
}
"""Arguments of layers that change the result, or ask for another kind of result, and that nearfield cannot honour."""

REMEDY = {
    "cache": 'attn_implementation="sdpa", or generate()',
}


def register(
    name: str = "nearfield",
    method: Method | Mapping[int | str, Method] | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    prefill: str | None = None,
    mesh: Any = None,
) -> None:
    """Make `attn_implementation=name` mean attention by `method` in all models of Transformers.

    Args:
        name: what to call it. A name may be registered again; it then means the new method.
        method: as in `nearfield.attention`; None: its default. A mapping gives layers methods of their own: its keys are layer
            numbers, and `"default"` for all other layers (`Auto()` if it is missing).
        config: instead of `method`, the path of a file that names the methods, or its contents as a dictionary. `nearfield tune`
            writes such files; `nearfield.hf.config` describes them. What a file says about steps of an answer (`"cache"`) is for
            `CellCache(config=model.config)`. A file that says nothing else leaves prompts to `Auto()`, as `register()` does.
        prefill: `"strict"`, the default: every row opens cells by itself, unless its method says otherwise. `"shared"`: where a
            model in eval mode reads several tokens under a causal mask, and no gradient is wanted, `Cells` without a `share` of
            their own (also those of `Auto`) take `share=128`. Positions 0 to 127 open the same cells then, 128 to 255, and so
            on: the choice depends on later tokens of a block, and on nothing after it. Single tokens and training are as with
            `"strict"`. None: what `config` says.
        mesh: a `DeviceMesh` of one dimension, or a process group, over whose ranks the tokens of a model are shared out. A model
            is then called inside of `nearfield.distributed.context_parallel(mesh, buffers=[input_ids, position_ids], ...)`, gets
            these (and `attention_mask` [batch, n], if there is one, as a buffer too), and its rows attend to the keys of all
            ranks, as in `nearfield.attention(mesh=...)`. Layers with sliding windows attend exactly. No tokens before these,
            no packed sequences, no `CellCache`.

    The method serves bidirectional and causal attention, with any padding, of whole sequences (packed ones each by itself) and
    of the last half or more of a sequence. Everything else is exact attention, with the mask of a bounded number of rows at a
    time: single queries, sliding windows (only keys within reach are read), and all other masks. Soft-capping (Gemma 2) and
    attention sinks that are parameters (gpt-oss) are honoured by `Exact`, `TopK`, `Cells` and `Auto`; what else a model asks for
    beyond masks raises an error.

    New tokens after a prompt attend by `TopK` or `LazyGumbel`, with an index that grows, if the cache is made for it:
    `generate(..., past_key_values=hf.CellCache(config=model.config))`. With a cache of Transformers, also the one that `generate`
    makes by itself, they attend exactly, whatever the method; with these two methods a line in the log says so, once.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from nearfield import hf
        >>> small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **small))
        >>> hf.register()
        >>> model.set_attn_implementation("nearfield")
        >>> hf.register("nearfield-top64", nearfield.TopK(64))
        >>> hf.register("nearfield-mixed", {0: nearfield.Exact(), "default": nearfield.Cells()})
        >>> hf.register("nearfield-shared", prefill="shared")
        >>> layers = {"1": {"method": "Cells", "cell_size": 16, "probes": 18}}
        >>> hf.register("nearfield-tuned", config={"format": "nearfield-layers", "version": 1, "layers": layers})
    """
    if config is not None and method is not None:
        raise ValueError("config and method both say which methods to use; give one of them")
    attentions, masks = _interfaces()
    _check_name(name, attentions)
    if prefill is not None:
        check_prefill(prefill)
    found = LayerConfig(_methods(method)) if config is None else read_config(config)
    methods = {"default": Auto(), **found.methods}
    shared = (prefill or found.prefill) == "shared"
    prompts = sharing_rows(methods) if shared else {}
    function = AttentionFunction(methods, found.num_hidden_layers, prompts, mesh, found.cache)
    attentions.register(name, function)
    masks.register(name, make_mask if mesh is None else make_sharded_mask)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("nearfield.hf needs Transformers 5.5 or later: pip install 'nearfield[transformers]'") from error
    return AttentionInterface, AttentionMaskInterface


def is_registered(name: str) -> bool:
    """Whether `register` has made this name known."""
    return registered_methods(name) is not None


def registered_methods(name: str) -> Mapping[int | str, Method] | None:
    """The methods by layer that this name means; None: `register` has not made it known."""
    function = registered_function(name)
    return None if function is None else function.methods


def registered_function(name: str) -> AttentionFunction | None:
    """What `register` has made of this name; None: it has not made it known."""
    attentions, _ = _interfaces()
    function = attentions().get(name)
    return function if isinstance(function, AttentionFunction) else None


def _check_name(name: object, attentions: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a string such as 'nearfield-top64', got {name!r}")
    # To Transformers these mean kernels on the hub, flash attention, or paged attention.
    for sign in ("flash", "/", "|", ":", "@"):
        if sign in name:
            raise ValueError(f"name must not contain {sign!r}, which has a meaning to Transformers; got {name!r}")
    if name == "eager" or (attentions().get(name) is not None and not is_registered(name)):
        raise ValueError(f"name {name!r} is taken by Transformers or another library; choose another one")


def _methods(method: Method | Mapping[int | str, Method] | None) -> dict[int | str, Method]:
    methods: dict[int | str, Method] = by_layer(method, Auto())
    for layer, one in methods.items():
        check_method(f"method[{layer!r}]" if isinstance(method, Mapping) else "method", one)
    return methods


@dataclass(frozen=True)
class AttentionFunction:
    """The attention function that layers call, in the interface of Transformers."""

    methods: Mapping[int | str, Method]
    num_hidden_layers: int | None = None
    """of the model that the methods were chosen for, if known"""
    prefill: Mapping[int | str, Method] = field(default_factory=dict)
    """methods that serve prompts in place of those of the same layer in `methods`"""
    mesh: Any = None
    """over whose ranks tokens are shared out; None: this process has all of them"""
    cache: Mapping[int | str, Method] | None = None
    """what a `CellCache` attends by that is told no method; None: what `methods` say"""

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        """See `_serve`. What a compiled program cannot hold, the keys of a cell cache, is served outside of it."""
        serve = self._serve_outside if isinstance(key, StoredKeys) else self._serve
        return serve(module, query, key, *args, **options)

    @outside_of_compiled
    def _serve_outside(self, *args: Any, **options: Any) -> tuple[Tensor, None]:
        return self._serve(*args, **options)

    def _serve(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: LazyMask | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        position_bias: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """The output `[batch, rows, heads, dim]` for query, key and value `[batch, heads, length, dim]`."""
        if self.mesh is None:
            _check_options(options)
        # Under autocast, rotary embeddings leave queries and keys in another dtype than values. A cell cache has cast its own.
        stored = isinstance(key, StoredKeys)
        query, key, value = (*to_autocast_dtype(query), key, value) if stored else to_autocast_dtype(query, key, value)
        layer = self._layer(module)
        # Checkpointing may compute a training step once without gradients and once with them: both by the same method.
        prefill = self.prefill.get(layer) if query.shape[2] > 1 and not module.training else None
        has_window = (options.get("sliding_window") or getattr(module, "sliding_window", None)) is not None
        scale = _scale(scaling, query.shape[-1])
        call = LayerCall(query, key, value, self.methods[layer], scale, dropout, prefill, has_window, softcap, s_aux)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        if self.mesh is not None:
            output = self._over_ranks(module, call, attention_mask, position_bias, options)
        else:
            output = (serve_stored if stored else serve)(call, attention_mask, causal, position_bias)
        return output.transpose(1, 2).contiguous(), None

    def _over_ranks(
        self, module: nn.Module, call: LayerCall, mask: Any, bias: Tensor | None, options: Mapping[str, Any]
    ) -> Tensor:
        from nearfield.hf.sharded import serve_sharded

        wrong: Exception | None = None
        try:
            _check_options(options)
            if bias is not None or isinstance(call.key, StoredKeys):
                what = "CellCache" if bias is None else "bias of positions"
                raise ValueError(f"over ranks (hf.register(mesh=...)) layers have no {what}; register without mesh")
        except ValueError as error:
            wrong = error
        return serve_sharded(call, mask, self.mesh, options.get("position_ids"), getattr(module, "layer_idx", None), wrong)

    def _layer(self, module: nn.Module) -> int | str:
        """The name in `methods` of the method for this layer."""
        if self.num_hidden_layers is not None:
            self._check_model(module)
        if len(self.methods) == 1:
            return "default"
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ValueError(
                f"{type(module).__name__} does not know its layer number (layer_idx), so it cannot choose a method by layer; "
                "register one method for all layers"
            )
        return layer if layer in self.methods else "default"

    def _check_model(self, module: nn.Module) -> None:
        layers = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        if layers is not None and layers != self.num_hidden_layers:
            raise ValueError(
                f"the registered config is for a model of {self.num_hidden_layers} layers, but this one has {layers}; make one "
                "for it with `nearfield tune MODEL TEXT`, or leave num_hidden_layers out of the config"
            )


def _check_options(options: Mapping[str, Any]) -> None:
    for option, meaning in REFUSED.items():
        given = options.get(option)
        if given is not None and given is not False:
            remedy = REMEDY.get(option, 'attn_implementation="eager"')
            raise ValueError(f"this model asks for {meaning} ({option}), which nearfield does not compute; use {remedy}")


def _scale(scaling: float | None, dim: int) -> float | None:
    """None for the default of 1/sqrt(dim), so that simple calls take the shortest path and torch.compile sees a constant."""
    return None if scaling is None or scaling == dim**-0.5 else float(scaling)

"""`register`: make nearfield known to Transformers, under a name for `attn_implementation`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nearfield.auto import Auto
from nearfield.checks import check_method
from nearfield.hf.calls import LayerCall, serve
from nearfield.hf.config import LayerConfig, read_config
from nearfield.hf.masks import LazyMask, make_mask
from nearfield.hf.stored import StoredKeys, serve_stored
from nearfield.problem import Method

REFUSED = {
    "softcap": "soft-capping of the logits",
    "s_aux": "attention sinks that are parameters of the model",
    "indices": "keys chosen by the model",
    "block_indices": "blocks of keys chosen by the model",
    "cache": "the paged cache of continuous batching",
    "output_attentions": "attention weights as an output",
}
"""Arguments of layers that change the result, or ask for another one, and cannot be honoured."""

REMEDY = {
    "softcap": 'attn_implementation="eager", or a config without attn_logit_softcapping if the model does well without',
    "cache": 'attn_implementation="sdpa", or generate()',
}


def register(
    name: str = "nearfield",
    method: Method | Mapping[int | str, Method] | None = None,
    *,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> None:
    """Make `attn_implementation=name` mean attention by `method` in all models of Transformers.

    Args:
        name: what to call it; a name may be registered again, and then means the new method.
        method: as in `nearfield.attention`; None: its default. A mapping gives layers methods of their own: from the number of a
            layer, and `"default"` for all others (`Auto()` where there is none).
        config: instead of `method`: the path of a file that says the same, or what it holds. `nearfield eval` writes such files;
            `nearfield.hf.config` describes them.

    The method serves what it can: bidirectional and causal attention, with any padding, of whole sequences (packed ones each by
    itself) and of at least the last half of them. All else is exact attention with the mask made for a bounded number of rows at
    a time: single queries, sliding windows (only keys within reach are looked at), and masks of any other kind. What a model asks
    for beyond masks and cannot be had, soft-capping or attention sinks, is an error.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from nearfield import hf
        >>> small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **small))
        >>> hf.register()
        >>> model.set_attn_implementation("nearfield")
        >>> hf.register("nearfield-top64", nearfield.TopK(64))
        >>> hf.register("nearfield-mixed", {0: nearfield.Exact(), "default": nearfield.Cells()})
        >>> layers = {"1": {"method": "Cells", "cell_size": 16, "probes": 18}}
        >>> hf.register("nearfield-tuned", config={"format": "nearfield-layers", "version": 1, "layers": layers})
    """
    if config is not None and method is not None:
        raise ValueError("config says which methods to use, and so does method; give one of them")
    attentions, masks = _interfaces()
    _check_name(name, attentions)
    found = LayerConfig(_by_layer(method)) if config is None else read_config(config)
    function = AttentionFunction({"default": Auto(), **found.methods}, found.num_hidden_layers)
    attentions.register(name, function)
    masks.register(name, make_mask)


def _interfaces() -> tuple[Any, Any]:
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("nearfield.hf needs a recent Transformers: pip install 'nearfield[transformers]'") from error
    return AttentionInterface, AttentionMaskInterface


def _check_name(name: object, attentions: Any) -> None:
    if not isinstance(name, str) or not name:
        raise ValueError(f"name must be a string such as 'nearfield-top64', got {name!r}")
    # Transformers reads these as the names of kernels on the hub, of flash attention, and of paged attention.
    for sign in ("flash", "/", "|", ":", "@"):
        if sign in name:
            raise ValueError(f"name must not contain {sign!r}, which has a meaning to Transformers; got {name!r}")
    there = attentions().get(name)
    if name == "eager" or (there is not None and not isinstance(there, AttentionFunction)):
        raise ValueError(f"name {name!r} is taken by Transformers or another library; choose another one")


def _by_layer(method: Method | Mapping[int | str, Method] | None) -> dict[int | str, Method]:
    methods: dict[int | str, Method] = {"default": Auto()}
    methods |= method if isinstance(method, Mapping) else {} if method is None else {"default": method}
    for layer, one in methods.items():
        if layer != "default" and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
            raise ValueError(f"method must have the numbers of layers as keys, or 'default'; got {layer!r}")
        where = f"method[{layer!r}]" if isinstance(method, Mapping) else "method"
        check_method(where, one)
    return methods


@dataclass(frozen=True)
class AttentionFunction:
    """The attention function that layers call, in the interface of Transformers."""

    methods: Mapping[int | str, Method]
    num_hidden_layers: int | None = None
    """of the model that the methods were chosen for, where that is known"""

    def __call__(
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
        **options: Any,
    ) -> tuple[Tensor, None]:
        """`[batch, rows, heads, dim]` of query, key and value `[batch, heads, length, dim]`."""
        _refuse(options)
        # The keys of a cell cache are in one dtype already, and not tensors that anything can be done with.
        stored = isinstance(key, StoredKeys)
        query, key, value = (*in_one_dtype(query), key, value) if stored else in_one_dtype(query, key, value)
        call = LayerCall(query, key, value, self._method(module), _scale(scaling, query.shape[-1]), dropout)
        causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
        output = (serve_stored if stored else serve)(call, attention_mask, causal, position_bias)
        return output.transpose(1, 2).contiguous(), None

    def _method(self, module: nn.Module) -> Method:
        if self.num_hidden_layers is not None:
            self._check_model(module)
        if len(self.methods) == 1:
            return self.methods["default"]
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise ValueError(
                f"{type(module).__name__} does not know the number of its layer, so methods cannot be chosen by it; "
                "register one method for all layers"
            )
        return self.methods.get(layer, self.methods["default"])

    def _check_model(self, module: nn.Module) -> None:
        layers = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        if layers is not None and layers != self.num_hidden_layers:
            raise ValueError(
                f"the registered config is for a model of {self.num_hidden_layers} layers, and this one has {layers}; make one "
                "for it with `nearfield eval MODEL TEXT --tolerance 0.4`, or leave num_hidden_layers out of the config"
            )


def _refuse(options: Mapping[str, Any]) -> None:
    for option, meaning in REFUSED.items():
        given = options.get(option)
        if given is not None and given is not False:
            remedy = REMEDY.get(option, 'attn_implementation="eager"')
            raise ValueError(f"this model asks for {meaning} ({option}), which nearfield does not compute; use {remedy}")


def _scale(scaling: float | None, dim: int) -> float | None:
    """None for the usual 1/sqrt(dim), which the plainest calls need not check, and which is a number to the compiler as well."""
    return None if scaling is None or scaling == dim**-0.5 else float(scaling)


def in_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, rotary embeddings leave queries and keys in another dtype than values."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)

"""`Attention`: a module that takes the place of `torch.nn.MultiheadAttention`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from nearfield import _compat
from nearfield.attention import attention, over_ranks
from nearfield.auto import Auto
from nearfield.bands import check_window
from nearfield.checks import (
    check_dropout,
    check_dropped_gradient,
    check_flag,
    check_generator,
    check_gradient,
    check_logits,
    check_method,
    check_offset,
    check_positive,
    check_softcap,
)
from nearfield.problem import Gradient, Method, is_traced

TURNED = "; inputs are [batch, length, dim] (batch_first): transpose(0, 1) if yours are [length, batch, dim]"


class Attention(_compat.NoFusedEncoder, nn.Module):
    """Multi-head attention with the interface of `torch.nn.MultiheadAttention(..., batch_first=True)`, computed by `method`.

    With X the queries, Y the keys, Z the values, and head h of H reading the key-value head g(h) = floor(h G / H) of G:

        O_h = softmax(Q_h K_g^T / sqrt(head_dim)) V_g,    Q = X W_Q + b_Q,  K = Y W_K + b_K,  V = Z W_V + b_V
        output = [O_1, ..., O_H] W_O + b_O

    It differs from torch in five ways. Attention weights are never formed: `need_weights` is False by default, and True is an
    error. A row that sees no key gets attention zero, hence the output b_O; torch gives that or NaN, depending on its code path.
    `is_causal` needs no mask beside it. There is no `add_bias_kv` and no `add_zero_attn`. Nested tensors are refused.

    Args:
        embed_dim: dimension of the queries and of the output; a multiple of `num_heads`.
        num_heads: query heads, each of `head_dim = embed_dim / num_heads`.
        dropout: probability on the attention weights, in training mode only.
        bias: whether the four projections have biases.
        kdim, vdim: dimensions of the keys and the values; None: `embed_dim`.
        batch_first: True. It is an argument so that calls written for torch can name it.
        num_kv_heads: heads of keys and values, a divisor of `num_heads` (grouped-query attention); None: `num_heads`.
        method: how attention is computed, as in `nearfield.attention`; None: its default. It may be changed at any time.
        gradient: how it is differentiated, as in `nearfield.attention`, such as `gradients.RandomWalk()`; None: the method's own
            way. It may be changed at any time. With dropout it goes with `Exact`, `Auto`, `TopK` and `LazyGumbel`.
        softcap: logits z count as softcap tanh(z / softcap), as in `nearfield.attention`; None or 0: as they are.
        sink_logits: whether the module has a parameter `s_aux`, `[num_heads]`, zero at first: a logit of each head that counts in
            the denominator alone, as in `nearfield.attention`. Neither of the two goes with `gradient` or `LazyGumbel`.
        window_size: (left, right): the window of keys that a row sees, as in `nearfield.attention`; None: all keys.
        mesh: over whose ranks sequences are shared out, as in `nearfield.attention`; inputs and masks are this rank's. A module
            with a `DeviceMesh` can be copied, one with a process group cannot.
        device, dtype: of the parameters.

    Parameters are `q_proj`, `k_proj`, `v_proj` and `out_proj`, initialised like torch's; with `sink_logits` also `s_aux`.
    `load_state_dict` also takes the state dict of a `torch.nn.MultiheadAttention`, alone or as a part of a larger model;
    `state_dict_to_torch` converts back, unless there is something that torch does not have. It works
    as the `self_attn` or `multihead_attn` of an `nn.TransformerEncoderLayer` or `nn.TransformerDecoderLayer`; these then do not
    take their fused inference path, which would bypass it.

    Cost: O(L embed_dim^2) for the projections, plus that of the method, and in the backward pass that of `gradient`.

    Example:
        >>> layer = nearfield.nn.Attention(64, 8, method=nearfield.TopK(k=16, tail=16))
        >>> x = torch.randn(2, 100, 64)
        >>> output, _ = layer(x, is_causal=True)
        >>> output.shape
        torch.Size([2, 100, 64])

        As a replacement for a trained module:

        >>> block = torch.nn.TransformerEncoderLayer(64, 8, batch_first=True).eval()
        >>> want = block(x)
        >>> block.self_attn = nearfield.nn.Attention.from_torch(block.self_attn, method=nearfield.Exact())
        >>> torch.allclose(block(x), want, atol=1e-5)
        True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,  # torch's next two are add_bias_kv and add_zero_attn
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = True,
        num_kv_heads: int | None = None,
        method: Method | None = None,
        gradient: Gradient | None = None,
        softcap: float | None = None,
        sink_logits: bool = False,
        window_size: tuple[int, int] | None = None,
        mesh: Any = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive("embed_dim", embed_dim)
        check_positive("num_heads", num_heads)
        for name, value in (("kdim", kdim), ("vdim", vdim), ("num_kv_heads", num_kv_heads)):
            check_positive(name, value, optional=True)
        if embed_dim % num_heads:
            raise ValueError(f"embed_dim must be a multiple of num_heads, got {embed_dim} and {num_heads}")
        if num_kv_heads is not None and num_heads % num_kv_heads:
            raise ValueError(f"num_heads must be a multiple of num_kv_heads, got {num_heads} and {num_kv_heads}")
        check_dropout("dropout", dropout)
        bias, batch_first = check_flag("bias", bias), check_flag("batch_first", batch_first)
        sink_logits = check_flag("sink_logits", sink_logits)
        cap, window_size = check_softcap(softcap), check_window(window_size)
        if not batch_first:
            raise ValueError("batch_first must be True, got False; transpose inputs and outputs to [batch, length, dim]")
        if method is not None:
            check_method("method", method)
        if gradient is not None:
            check_gradient("gradient", gradient)
            check_dropped_gradient(Auto() if method is None else method, gradient, dropout)
        check_logits(Auto() if method is None else method, gradient, cap, "sink_logits=True" if sink_logits else "")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.dropout = dropout
        self.method = method
        self.gradient = gradient
        self.softcap = softcap
        self.window_size = window_size
        self.mesh = mesh
        kv_dim = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.k_proj = nn.Linear(self.kdim, kv_dim, bias, device, dtype)
        self.v_proj = nn.Linear(self.vdim, kv_dim, bias, device, dtype)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias, device, dtype)
        self.s_aux = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype)) if sink_logits else None
        self.register_load_state_dict_pre_hook(_unpack_on_load)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters again, from the distributions of `nn.MultiheadAttention`.

        W_Q, W_K and W_V are Xavier uniform: as one matrix if all three read `embed_dim` columns, else one by one. W_O is as in
        `nn.Linear`. Biases and sinks are zero.
        """
        weights = [layer.weight for layer in (self.q_proj, self.k_proj, self.v_proj)]
        packed = self.kdim == self.vdim == self.embed_dim
        together = sum(weight.shape[0] for weight in weights)
        for weight in weights:
            bound = math.sqrt(6.0 / (weight.shape[1] + (together if packed else weight.shape[0])))
            nn.init.uniform_(weight, -bound, bound)
        self.out_proj.reset_parameters()
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        if self.s_aux is not None:
            nn.init.zeros_(self.s_aux)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        generator: torch.Generator | None = None,
        offset: int | None = None,
    ) -> tuple[Tensor, None]:
        """Attend. As in `nn.MultiheadAttention`, True in a mask hides.

        Args:
            query: `[batch, L, embed_dim]`, or `[L, embed_dim]`; without a batch, key and value have none either.
            key: `[batch, S, kdim]`; None: the query.
            value: `[batch, S, vdim]`; None: the key.
            key_padding_mask: `[batch, S]`, True where a key is ignored; or floating point, -inf where it is ignored and 0
                elsewhere. Other entries are an error, except under torch.compile, which cannot look at them.
            need_weights: False.
            attn_mask: `[L, S]` or `[batch * num_heads, L, S]`, True where a query does not see a key; or floating point, added
                to the logits. Only `Exact` takes a mask beyond key padding.
            average_attn_weights: no effect, as in torch without `need_weights`.
            is_causal: row i sees keys 0..i (aligned at the first key). As in torch, it declares that `attn_mask` is the causal
                mask: a mask given beside it is ignored.
            generator: source of all randomness, dropout and the walks of a `gradient` included; None: torch's default generator,
                so that `torch.manual_seed` makes a training run repeatable. Checkpointing runs a forward pass twice and resets
                only the default generator in between: pass none there.
            offset: with `is_causal`: row i sees keys 0..i + offset; with `window_size`: row i stands at key i + offset; None: 0.
                The last L of S tokens have the offset S - L.

        Returns:
            `[batch, L, embed_dim]` or `[L, embed_dim]`; and None, where torch returns weights.
        """
        key = query if key is None else key
        value = key if value is None else value
        dropout = self.dropout if self.training else 0.0
        given = query, key, value, key_padding_mask, need_weights, attn_mask, is_causal, generator, offset
        if self.mesh is None:
            q, k, v, mask, is_causal = self._inputs(*given)
        else:
            try:
                q, k, v, mask, is_causal = self._inputs(*given)
            except (TypeError, ValueError, RuntimeError) as error:  # raised when the other ranks have been told
                asked = is_causal, None, True, offset, self.softcap, self.s_aux, self.window_size
                alone = {"dropout_p": dropout, "gradient": self.gradient}
                over_ranks(self.mesh, query, key, value, attn_mask, self.method, *asked, alone=alone, wrong=error)
                raise
        output = attention(
            q,
            k,
            v,
            mask,
            dropout,
            is_causal,
            enable_gqa=True,
            method=self.method,
            gradient=self.gradient,
            generator=generator,
            offset=offset,
            softcap=self.softcap,
            s_aux=self.s_aux,
            window_size=self.window_size,
            mesh=self.mesh,
        )
        return self.out_proj(output.transpose(-2, -3).flatten(-2)), None

    def _inputs(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None,
        need_weights: bool,
        attn_mask: Tensor | None,
        is_causal: bool,
        generator: torch.Generator | None,
        offset: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """Queries, keys, values and mask for `nearfield.attention`, and whether it is causal, from the arguments of `forward`."""
        is_causal = check_flag("is_causal", is_causal)
        check_offset(offset)
        check_generator(generator)
        if need_weights:
            raise ValueError("need_weights=True: attention weights are never formed; pass need_weights=False")
        self._check_inputs(query, key, value)
        seen = _seen_keys(key_padding_mask, key)
        q, k, v = self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))
        return q, k, v, self._combined_mask(attn_mask, seen, is_causal, q, k), is_causal

    def _heads(self, x: Tensor) -> Tensor:
        """`[..., length, heads * head_dim]` as `[..., heads, length, head_dim]`."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(-2, -3)

    def _check_inputs(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        named = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
        for name, x, dim in named:
            if not isinstance(x, Tensor):
                raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
            if x.is_nested:
                raise ValueError(
                    f"{name} must not be a nested tensor; pass a padded one with key_padding_mask "
                    "(in an nn.TransformerEncoder: enable_nested_tensor=False)"
                )
            if x.dim() not in (2, 3) or x.shape[-1] != dim:
                raise ValueError(f"{name} must have shape [batch, length, {dim}] or [length, {dim}], got {tuple(x.shape)}")
        if query.shape[:-2] != key.shape[:-2] or key.shape[:-1] != value.shape[:-1]:
            shapes = ", ".join(str(tuple(x.shape)) for _, x, _ in named)
            turned = query.dim() == key.dim() == 3 and query.shape[1] == key.shape[1] and key.shape[:-1] == value.shape[:-1]
            raise ValueError(
                f"query, key and value must agree in batch, key and value also in length; got {shapes}"
                + (TURNED if turned else "")
            )

    def _combined_mask(
        self, mask: Tensor | None, seen: Tensor | None, is_causal: bool, query: Tensor, key: Tensor
    ) -> Tensor | None:
        """The mask for `nearfield.attention`, True where a row sees a key, from torch's `attn_mask` and the seen keys."""
        if mask is None:
            return seen
        _check_mask_type("attn_mask", mask)
        pairs = (query.shape[-2], key.shape[-2])
        batch = query.shape[0] if query.dim() == 4 else 1
        if mask.shape not in (pairs, (batch * self.num_heads, *pairs)):
            full = (batch * self.num_heads, *pairs)
            raise ValueError(f"attn_mask must have shape {pairs} or {full}, got {tuple(mask.shape)}")
        if is_causal:
            return seen
        if mask.dim() == 3 and query.dim() == 4:
            mask = mask.unflatten(0, (batch, self.num_heads))
        if mask.dtype == torch.bool:
            return ~mask if seen is None else ~mask & seen
        mask = mask.to(query.dtype)  # autocast may have changed that of the queries
        return mask if seen is None else mask.masked_fill(~seen, -torch.inf)

    @classmethod
    def from_torch(
        cls, module: nn.MultiheadAttention, method: Method | None = None, gradient: Gradient | None = None
    ) -> Attention:
        """The same attention with copies of the parameters, computed by `method` and differentiated by `gradient`."""
        if not isinstance(module, nn.MultiheadAttention):
            raise TypeError(f"module must be a torch.nn.MultiheadAttention, got {type(module).__name__}")
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("module has add_bias_kv or add_zero_attn, which Attention does not have")
        if not module.batch_first:
            raise ValueError(
                "module has batch_first=False, but Attention takes [batch, length, dim] only; if you can pass its inputs that "
                "way, set module.batch_first = True first"
            )
        layer = skip_init(
            cls,
            module.embed_dim,
            module.num_heads,
            module.dropout,
            module.in_proj_bias is not None,
            kdim=module.kdim,
            vdim=module.vdim,
            method=method,
            gradient=gradient,
            device=module.out_proj.weight.device,
            dtype=module.out_proj.weight.dtype,
        )
        layer.load_state_dict(module.state_dict())
        theirs = dict(module.named_parameters())
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(theirs[_name_in_torch(name, theirs)].requires_grad)
        return layer.train(module.training)

    def to_torch(self) -> nn.MultiheadAttention:
        """The same attention, exact, as a torch module with copies of the parameters."""
        own = {"softcap": self.softcap, "window_size": self.window_size}
        extra = [f"{name}={value}" for name, value in own.items() if value]
        if extra:
            raise ValueError(f"nn.MultiheadAttention has no {' and no '.join(own)}; this module has {', '.join(extra)}")
        state = self.state_dict_to_torch(self.state_dict())
        module = skip_init(
            nn.MultiheadAttention,
            self.embed_dim,
            self.num_heads,
            self.dropout,
            self.q_proj.bias is not None,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=True,
            device=self.out_proj.weight.device,
            dtype=self.out_proj.weight.dtype,
        )
        module.load_state_dict(state)
        theirs = dict(module.requires_grad_(False).named_parameters())
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                theirs[_name_in_torch(name, theirs)].requires_grad_()
        return module.train(self.training)

    @staticmethod
    def state_dict_from_torch(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """A copy of `state_dict` in which the `nn.MultiheadAttention` at `prefix` (such as `"self_attn."`) is an `Attention`.

        `load_state_dict` does this itself.
        """
        state = dict(state_dict)
        _unpack(state, prefix)
        return state

    @staticmethod
    def state_dict_to_torch(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
        """A copy of `state_dict` in which the `Attention` at `prefix` (such as `"self_attn."`) is an `nn.MultiheadAttention`."""
        state = dict(state_dict)
        names = {letter: f"{prefix}{letter}_proj.weight" for letter in "qkv"}
        missing = [name for name in names.values() if name not in state]
        if missing:
            raise ValueError(f"state_dict lacks {missing}; prefix must name an Attention and end in a dot, got {prefix!r}")
        if f"{prefix}s_aux" in state:
            raise ValueError(f"nn.MultiheadAttention has no sinks; got {prefix}s_aux (sink_logits)")
        weights = {letter: state.pop(name) for letter, name in names.items()}
        rows = [weight.shape[0] for weight in weights.values()]
        if len(set(rows)) > 1:
            raise ValueError(f"nn.MultiheadAttention has no grouped queries; got projections to {rows} columns (num_kv_heads)")
        if len({weight.shape for weight in weights.values()}) == 1:
            state[f"{prefix}in_proj_weight"] = torch.cat(list(weights.values()))
        else:
            state |= {f"{prefix}{letter}_proj_weight": weight for letter, weight in weights.items()}
        if f"{prefix}q_proj.bias" in state:
            state[f"{prefix}in_proj_bias"] = torch.cat([state.pop(f"{prefix}{letter}_proj.bias") for letter in "qkv"])
        return state

    def extra_repr(self) -> str:
        parts = [f"embed_dim={self.embed_dim}", f"num_heads={self.num_heads}"]
        if self.num_kv_heads != self.num_heads:
            parts.append(f"num_kv_heads={self.num_kv_heads}")
        if self.dropout:
            parts.append(f"dropout={self.dropout}")
        parts.append(f"method={self.method!r}")
        if self.gradient is not None:
            parts.append(f"gradient={self.gradient!r}")
        if self.softcap:
            parts.append(f"softcap={self.softcap}")
        if self.s_aux is not None:
            parts.append("sink_logits=True")
        if self.window_size is not None:
            parts.append(f"window_size={self.window_size}")
        return ", ".join(parts)


def _seen_keys(mask: Tensor | None, key: Tensor) -> Tensor | None:
    """`[..., 1, 1, S]`, True where a key is seen, from a `key_padding_mask` in torch's convention."""
    if mask is None:
        return None
    _check_mask_type("key_padding_mask", mask)
    if mask.shape != key.shape[:-1]:
        turned = mask.dim() == 2 and mask.shape == key.shape[:-1][::-1]
        raise ValueError(
            f"key_padding_mask must have shape {tuple(key.shape[:-1])}, got {tuple(mask.shape)}" + (TURNED if turned else "")
        )
    # torch's encoder makes every mask floating point. Methods other than Exact need a boolean one.
    seen = mask.logical_not()
    if mask.dtype != torch.bool and not is_traced() and not bool((seen | (mask == -torch.inf)).all()):
        raise ValueError(
            "a float key_padding_mask must be 0 where a key is seen and -inf where it is ignored, got other entries; "
            "pass a boolean mask, True where a key is ignored"
        )
    return seen[..., None, None, :]


def _check_mask_type(name: str, mask: object) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"{name} must be boolean or floating point, got {mask.dtype}")


def _name_in_torch(name: str, theirs: Mapping[str, Any]) -> str:
    """The parameter of an `nn.MultiheadAttention` (with parameters `theirs`) that is, or contains, the parameter `name`."""
    layer, kind = name.split(".")
    if layer == "out_proj":
        return name
    return f"{layer}_{kind}" if f"{layer}_{kind}" in theirs else f"in_proj_{kind}"


def _unpack_on_load(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """A hook of `load_state_dict`, which hands over a copy of the caller's dict."""
    _unpack(state_dict, prefix)


def _unpack(state: dict[str, Any], prefix: str) -> None:
    """Rename and split, in place, the entries of an `nn.MultiheadAttention` at `prefix` of a state dict."""
    for kind in ("weight", "bias"):
        if f"{prefix}in_proj_{kind}" in state:
            # Copies: parameters that share memory cannot be saved separately.
            for letter, part in zip("qkv", state.pop(f"{prefix}in_proj_{kind}").chunk(3), strict=True):
                state[f"{prefix}{letter}_proj.{kind}"] = part.clone()
        for letter in "qkv":
            if f"{prefix}{letter}_proj_{kind}" in state:
                state[f"{prefix}{letter}_proj.{kind}"] = state.pop(f"{prefix}{letter}_proj_{kind}")

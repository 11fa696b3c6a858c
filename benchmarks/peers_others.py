"""The peers of bench_peers_gpu.py that others have written, each called as its authors do. None of their code is kept here."""

from __future__ import annotations

import importlib
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peers_flex
import torch
from gpu_timing import QKV
from peers_find import bare_package, in_present_triton, stand_in, torch_varlen_backward, torch_varlen_forward
from peers_methods import TARGET, Arguments, Ours, Peer, PooledBlocks, blocks_for, share_of_blocks
from torch import Tensor


def _lengths(n: int, device: torch.device) -> Tensor:
    """One sequence of n, the way functions for several sequences in one tensor are told."""
    return torch.tensor([0, n], dtype=torch.int32, device=device)


class BlockSparse(Peer):
    """MInference's block-sparse pattern: blocks of 64 x 64 by the product of mean query and mean key."""

    name = "MInference block-sparse"

    def __init__(self) -> None:
        bare_package("minference", "ops")
        self._module = importlib.import_module("minference.ops.block_sparse_flash_attention")

    def settings(self, n: int) -> dict[str, Arguments]:
        return {"100 blocks": {"top_k": 100}, f"{TARGET:.0%}": {"top_k": blocks_for(n, 64)}}

    def everything(self, n: int) -> Arguments:
        return {"top_k": n // 64 + 1}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return self._module.block_sparse_attention(query, key, value, **arguments)

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        return share_of_blocks(inputs[0].shape[2], 64, arguments["top_k"])


class VerticalSlash(Peer):
    """MInference's vertical-slash pattern, chosen by the last 64 rows; `peers_slash` makes its lists, not its extension."""

    name = "MInference vertical-slash"

    def __init__(self) -> None:
        import peers_slash

        bare_package("minference", "ops")
        stand_in("minference.cuda", convert_vertical_slash_indexes=peers_slash.convert_vertical_slash_indexes)
        self._module = importlib.import_module("minference.ops.pit_sparse_flash_attention_v2")
        self._slash = peers_slash

    def settings(self, n: int) -> dict[str, Arguments]:
        half = round(TARGET / 2 * n)
        # A slash that stands alone is read as a block of 64, so that 1/64 of the keys have as much as the columns.
        few = {"columns": half, "slashes": self._slash.LATEST_KEYS + half // 64}
        return {"1000 + 6096": {"columns": 1000, "slashes": 6096}, f"at most {TARGET:.0%}": few}

    def everything(self, n: int) -> Arguments:
        return {"columns": n, "slashes": n}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        columns, slashes = self._slash.chosen(query, key, **arguments)
        return self._module.vertical_slash_sparse_attention(query, key, value, columns, slashes)

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        return self._slash.share_read(*inputs[:2], **arguments)


class FlexPrefill(Peer):
    name = "FlexPrefill"
    heads_first = False
    takes_groups = True

    def __init__(self) -> None:
        bare_package("flex_prefill", "ops")
        self._attention = importlib.import_module("flex_prefill.ops.flex_prefill_attention").flex_prefill_attention

    def settings(self, n: int) -> dict[str, Arguments]:
        return {
            "gamma 0.9": {"gamma": 0.9, "tau": 0.1, "min_budget": 1024},
            f"at most {TARGET:.0%}": {"gamma": 0.9, "tau": 0.0, "max_budget": round(TARGET / 2 * n)},
        }

    def everything(self, n: int) -> Arguments:
        return {"gamma": 2.0}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return self._attention(query, key, value, **arguments)

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        n = inputs[0].shape[1]
        blocks = -(-n // 128)
        _, ratio = self._attention(*inputs, **arguments, return_computational_ratio=True)
        read = (ratio * blocks - 1) * blocks * 128**2 + n * 129 / 2
        return read / (n * (n + 1) / 2)


class XAttention(Peer):
    """Its own choice of blocks; FlexAttention's kernel in place of the compiled one that it asks for."""

    name = "XAttention"

    def __init__(self) -> None:
        stand_in("block_sparse_attn", block_sparse_attn_func=_over_mask)
        self._module = importlib.import_module("xattn.src.Xattention")
        choose = self._module.xattn_estimate
        if not hasattr(choose, "on_any_card"):
            self._module.xattn_estimate = _on_any_card(choose)

    def settings(self, n: int) -> dict[str, Arguments]:
        return {
            "stride 16, 0.9": {"stride": 16, "threshold": 0.9},
            f"stride 16, {TARGET:.0%}": {"stride": 16, "threshold": None},
        }

    def everything(self, n: int) -> Arguments:
        return {"stride": 16, "threshold": 2.0}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return self._module.Xattention_prefill(query, key, value, norm=1, use_triton=True, **arguments)

    def fitted(self, inputs: QKV, arguments: Arguments) -> Arguments:
        """The threshold that reads the target share, by bisection."""
        if arguments["threshold"] is not None:
            return arguments
        low, high = 0.0, 1.0
        for _ in range(10):
            middle = (low + high) / 2
            read = self.share(inputs, arguments | {"threshold": middle})
            assert read is not None
            low, high = (middle, high) if read < TARGET else (low, middle)
        return arguments | {"threshold": high}

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        seen: list[Tensor] = []
        replaced = mock.patch.object(self._module, "block_sparse_attn_func", lambda *some, **_: seen.append(some[7]) or some[0])
        with replaced:
            self.attend(*inputs, **arguments)
        return peers_flex.share_read(peers_flex.by_mask(seen[0]), inputs[0].shape[2])


def _over_mask(query: Tensor, key: Tensor, value: Tensor, *more: Any, **ignored: Any) -> Tensor:
    """The function that XAttention expects: inputs `[n, heads, dim]`, the fifth of the others is a mask of blocks."""
    usual = [x.transpose(0, 1)[None].contiguous() for x in (query, key, value)]
    return peers_flex.attend(*usual, peers_flex.by_mask(more[4]))[0].transpose(0, 1)


def _on_any_card(choose: Callable[..., Any]) -> Callable[..., Any]:
    """XAttention uses its Triton kernels only on cards with "100" in their name, and its other way needs padded inputs."""
    properties = torch.cuda.get_device_properties

    def chosen(*inputs: Any, **options: Any) -> Any:
        with mock.patch.object(torch.cuda, "get_device_properties", lambda *card: _Renamed(properties(*card))):
            return choose(*inputs, **options)

    chosen.on_any_card = True  # type: ignore[attr-defined]
    return chosen


class _Renamed:
    """The properties of a card, but for its name."""

    name = "100"

    def __init__(self, properties: Any) -> None:
        self._properties = properties

    def __getattr__(self, name: str) -> Any:
        return getattr(self._properties, name)


class MoBA(Peer):
    """flash-linear-attention's, with the flash kernels that torch brings where flash-attn is not installed."""

    name = "MoBA (fla)"
    heads_first = False
    trains = True

    def __init__(self) -> None:
        bare_package("fla", "ops")
        module = importlib.import_module("fla.ops.moba.parallel")
        if module.flash_attn_varlen_func is None:
            module.flash_attn_varlen_func = _unused
            module._flash_attn_varlen_forward = torch_varlen_forward
            module._flash_attn_varlen_backward = torch_varlen_backward
        self._attention = module.parallel_moba

    def settings(self, n: int) -> dict[str, Arguments]:
        block = max(64, 2 ** round(math.log2(n / 256)))
        return {
            "3 x 2048": {"chunk_size": 2048, "topk": 3},
            f"{TARGET:.0%}": {"chunk_size": block, "topk": blocks_for(n, block)},
        }

    def everything(self, n: int) -> Arguments:
        return {"chunk_size": n // 8, "topk": 8}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        n = query.shape[1]
        return self._attention(query, key, value, _lengths(n, query.device), n, **arguments)

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        return share_of_blocks(inputs[0].shape[1], arguments["chunk_size"], arguments["topk"])


def _unused(*inputs: Any, **options: Any) -> Tensor:
    raise NotImplementedError("without selected blocks there is nothing to measure")


class NSA(Peer):
    """flash-linear-attention's native sparse attention, the selected blocks alone: its gates for the other branches are 0."""

    name = "NSA (fla)"
    heads_first = False
    takes_groups = True
    group = 16
    trains = True

    def __init__(self) -> None:
        bare_package("fla", "ops")
        self._attention = importlib.import_module("fla.ops.nsa.parallel").parallel_nsa

    def settings(self, n: int) -> dict[str, Arguments]:
        # Powers of two, at most half the size of a block.
        count = min(64, 2 ** round(math.log2(blocks_for(n, 128))))
        return {"16 x 64": {"block_counts": 16, "block_size": 64}, f"{count} x 128": {"block_counts": count, "block_size": 128}}

    def everything(self, n: int) -> Arguments:
        return {"block_counts": n // 64, "block_size": 64}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        closed = torch.zeros(query.shape[:3], dtype=query.dtype, device=query.device)
        return self._attention(query, key, value, g_cmp=closed, g_slc=torch.ones_like(closed), **arguments)

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        return share_of_blocks(inputs[0].shape[1], arguments["block_size"], arguments["block_counts"])


class NSATriton(Peer):
    """XunhaoLai's native sparse attention, the selected blocks alone."""

    name = "NSA (XunhaoLai)"
    heads_first = False
    takes_groups = True
    group = 16
    trains = True

    def __init__(self) -> None:
        bare_package("native_sparse_attention")
        self._ops = importlib.import_module("native_sparse_attention.ops")

    def settings(self, n: int) -> dict[str, Arguments]:
        return {"16 x 64": {"top_k": 16}, f"{TARGET:.0%}": {"top_k": max(4, blocks_for(n, 64))}}

    def everything(self, n: int) -> Arguments:
        return {"top_k": n // 64}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, top_k: int = 16) -> Tensor:
        (query,), (key,), (value,) = query, key, value
        n = len(query)
        whole = _lengths(n, query.device)
        pooled, lengths = zip(*(self._ops.avgpool_compress(x, None, whole, 32, 16) for x in (key, value)), strict=True)
        scale = query.shape[2] ** -0.5
        _, chosen = self._ops.compressed_attention(
            query, *pooled, 32, 16, 64, top_k, whole, lengths[0], n, pooled[0].shape[0], scale, init_blocks=1, local_blocks=2
        )
        return self._ops.topk_sparse_attention(query, key, value, chosen, 64, whole, scale)[None]

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        return share_of_blocks(inputs[0].shape[1], 64, arguments["top_k"])


class HyperAttention(Peer):
    name = "HyperAttention"
    trains = True

    def __init__(self) -> None:
        in_present_triton("models.attention.flash_attn_triton_for_hyper")
        self._class = importlib.import_module("models.attention.hyper_attn").HyperAttention
        self._made: dict[tuple[Any, ...], torch.nn.Module] = {}

    def settings(self, n: int) -> dict[str, Arguments]:
        few = max(128, n // 512)
        return {
            "256 + 256": {"block_size": 256, "sample_size": 256, "min_seq_len": 4096},
            f"{few} + {few}, leaves of {n // 32}": {"block_size": few, "sample_size": few, "min_seq_len": n // 32},
        }

    def everything(self, n: int) -> Arguments:
        return {"block_size": n // 2, "sample_size": 0, "min_seq_len": n // 2}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        made = (query.shape[3], query.device, query.dtype, *arguments.items())
        if made not in self._made:
            torch.manual_seed(0)
            self._made[made] = self._class(input_dim=query.shape[3], lsh_num_projs=7, **arguments).to(query.device, query.dtype)
        return self._made[made](query, key, value, causal=True)

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        """It halves the keys until they are few; half of the rows of each half read a block and a sample of the other half."""
        n = leaf = inputs[0].shape[2]
        halvings = 0
        while leaf > arguments["min_seq_len"]:
            leaf, halvings = leaf // 2, halvings + 1
        both = arguments["block_size"] + arguments["sample_size"]
        return ((leaf + 1) / 2 + halvings / 2 * both) / ((n + 1) / 2)


class FlashSparse(Peer):
    """flash-sparse-attn skips the values of tiles whose weights are small; it reads all keys. Tuned over two tiles, not 54."""

    name = "flash-sparse-attn"
    heads_first = False
    takes_groups = True
    trains = True

    def __init__(self) -> None:
        os.environ.setdefault("FLASH_SPARSE_ATTENTION_LAUNCH_CONFIG_DIR", tempfile.mkdtemp())
        names = ("matmul_ogs", "PrecisionConfig", "FlexCtx")
        stand_in("triton_kernels.matmul_ogs", **dict.fromkeys(names))  # for a projection that is not used here
        stand_in("triton_kernels.numerics", InFlexData=None, OutFlexData=None)
        _locks()
        tuner = importlib.import_module("flash_sparse_attn.ops.triton.autotuner")
        for name in ("get_fwd_sparse_autotune_configs", "get_bwd_sparse_autotune_configs"):
            setattr(tuner, name, _few(getattr(tuner, name)))
        self._attention = importlib.import_module("flash_sparse_attn.ops.triton.interface").flash_sparse_attn_func

    def settings(self, n: int) -> dict[str, Arguments]:
        return {f"threshold {threshold}": {"softmax_threshold": float(threshold)} for threshold in (1, 64)}

    def everything(self, n: int) -> Arguments:
        return {"softmax_threshold": 1e-30}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return self._attention(query, key, value, is_causal=True, **arguments)

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        return 1.0


def _few(configs: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Those of many configurations that suit a card with much shared memory."""

    def chosen(*inputs: Any, **options: Any) -> list[Any]:
        every = configs(*inputs, **options)
        sizes = ((128, 64), (64, 64))
        some = [x for x in every if (x.kwargs["TILE_M"], x.kwargs["TILE_N"]) in sizes and x.num_stages == 2]
        return [x for x in some if x.num_warps == (8 if x.kwargs["TILE_M"] == 128 else 4)] or every

    return chosen


def _locks() -> None:
    """A lock for several processes, which older versions of filelock do not have; here is one process."""
    import filelock

    if not hasattr(filelock, "ReadWriteLock"):
        free = SimpleNamespace(read_lock=nullcontext, write_lock=nullcontext)
        filelock.ReadWriteLock = lambda *_, **__: free


PEERS: tuple[type[Peer], ...] = (
    Ours,
    PooledBlocks,
    BlockSparse,
    VerticalSlash,
    FlexPrefill,
    XAttention,
    MoBA,
    HyperAttention,
    FlashSparse,
    NSA,
    NSATriton,
)
"""Ours and what torch brings first: a peer that breaks the card's context costs those after it a new start."""

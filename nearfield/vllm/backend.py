"""vLLM's interface for attention backends. The only module that imports vLLM, and that knows its names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from nearfield.vllm import SUPPORTED, check_version

check_version()

from vllm.config import get_current_vllm_config  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402

from nearfield.vllm.attend import Reach, attend  # noqa: E402
from nearfield.vllm.blocks import full_blocks, write_cells, write_keys  # noqa: E402
from nearfield.vllm.pages import PageLayout  # noqa: E402
from nearfield.vllm.settings import Settings  # noqa: E402


class CellsBackend(AttentionBackend):
    """Attention through cells. What it does not serve, vLLM refuses at start-up with the reason."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CellsImpl]:
        return CellsImpl

    @staticmethod
    def get_builder_cls() -> type[CellsMetadataBuilder]:
        return CellsMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """The pages of a layer, with room for cells behind keys and values."""
        if spec.page_size_padded is not None:
            raise ValueError(f"cells need the padding of pages, and something else has taken it: {spec}")
        layout = PageLayout(spec.num_kv_heads, spec.block_size, spec.head_size, spec.head_size_v)
        return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + layout.bytes_per_page)


@dataclass
class CellsMetadata(AttentionMetadata):
    """What a step is asked for. All layers share it."""

    tokens: int
    starts: list[int]
    """of the rows of each request, and the end of the last one's"""
    lengths: list[int]
    """keys of each request, those of this step included"""
    reads_prompt: list[bool]
    block_table: Tensor
    """`[requests, most blocks]`"""


class CellsMetadataBuilder(AttentionMetadataBuilder[CellsMetadata]):
    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refused = {
            "speculative decoding": vllm_config.speculative_config is not None,
            "a KV connector": vllm_config.kv_transfer_config is not None,
            "decode context parallelism": vllm_config.parallel_config.decode_context_parallel_size > 1,
            "a GPU: its kernels are still to come": device.type != "cpu",
        }
        for what, is_there in refused.items():
            if is_there:
                raise ValueError(f"nearfield's backend for vLLM {SUPPORTED} does not serve {what}; choose another backend")

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CellsMetadata:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        if common.is_prefilling is None:
            reads_prompt = [stop - start > 1 for start, stop in pairwise(starts)]
        else:
            reads_prompt = common.is_prefilling[:count].tolist()
        lengths = common.seq_lens[:count].tolist()
        return CellsMetadata(common.num_actual_tokens, starts, lengths, reads_prompt, common.block_table_tensor)


class CellsImpl(AttentionImpl[CellsMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        refused = {
            "ALiBi": alibi_slopes is not None,
            "sliding windows": sliding_window is not None,
            "soft-capped logits": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "layers that share the cache of another one": kv_sharing_target_layer_name is not None,
            f"a cache of {kv_cache_dtype}": kv_cache_dtype not in CellsBackend.supported_kv_cache_dtypes,
        } | {name: value is not None for name, value in others.items()}
        for what, is_there in refused.items():
            if is_there:
                raise ValueError(f"nearfield's backend for vLLM {SUPPORTED} does not serve {what}; choose another backend")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.settings = settings = Settings.of(get_current_vllm_config().additional_config)
        self.reach = Reach(settings.window, settings.exact_below, settings.probes)
        self.exactly = replace(self.reach, exact_below=1 << 62)

    def _layout(self, kv_cache: Tensor) -> PageLayout:
        _, heads, size, wide = kv_cache.shape
        return PageLayout(heads, size, self.head_size, wide - self.head_size)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        slots = slot_mapping[: len(key)]
        write_keys(kv_cache, key[: len(slots)], value[: len(slots)], slots)
        write_cells(kv_cache, self._layout(kv_cache), full_blocks(slots, kv_cache.shape[2]))

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CellsMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM looks how much memory a step takes.
            return output.fill_(0)
        layout, size = self._layout(kv_cache), kv_cache.shape[2]
        for request, (start, stop) in enumerate(pairwise(attn_metadata.starts)):
            if stop > start:
                length = attn_metadata.lengths[request]
                blocks = attn_metadata.block_table[request, : -(-length // size)].long()
                is_exact = attn_metadata.reads_prompt[request] and self.settings.prefill == "exact"
                reach = self.exactly if is_exact else self.reach
                found = attend(query[start:stop], kv_cache, layout, blocks, length, reach, self.scale)
                output[start:stop] = found.reshape(output[start:stop].shape)
        return output

"""vLLM's own kernel for CPUs, for rows that read all of their keys: in C++, and fast. It has several forms, each with an order of
its own for the numbers of a page."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from vllm import _custom_ops as ops
from vllm import envs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

from nearfield.vllm.pages import READABLE, PageLayout


@functools.cache
def form_of(kv_cache_dtype: str, dtype: torch.dtype, size: int, dim: int, value_dim: int, is_alone: bool) -> str | None:
    """The form that serves blocks of so many keys on this CPU; None: it does not. `is_alone`: nothing else reads these pages."""
    served = value_dim == dim and dim in CPUAttentionBackend.get_supported_head_sizes()
    if not served or kv_cache_dtype != "auto" or size % 32:
        return None
    own: str = _get_attn_isa(dtype, size, dim)
    return own if is_alone else READABLE if own in (READABLE, "amx") else None


def write(pages: Tensor, layout: PageLayout, key: Tensor, value: Tensor, slots: Tensor, form: str = READABLE) -> None:
    """`write_keys`."""
    ops.cpu_attn_reshape_and_cache(key, value, *_halves(pages, layout), slots, form)


@dataclass(frozen=True)
class ExactRows:
    """Consecutive requests of a step whose rows read all of their keys. All layers share it."""

    rows: slice
    query_start: Tensor
    lengths: Tensor
    block_table: Tensor
    scheduled: Tensor

    @staticmethod
    def of(
        starts: Tensor,
        lengths: Tensor,
        block_table: Tensor,
        layout: PageLayout,
        heads: int,
        dtype: torch.dtype,
        form: str = READABLE,
    ) -> ExactRows:
        """
        Args:
            starts: int32 `[requests + 1]`, of the rows of each request, and the end of the last one's.
            lengths: int32 `[requests]`, keys of each.
        """
        first, stop = int(starts[0]), int(starts[-1])
        own = starts - first
        scheduled = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=len(lengths),
            num_heads=heads,
            num_kv_heads=layout.heads,
            head_dim=layout.dim,
            seq_lens=lengths,
            dtype=dtype,
            query_start_loc=own,
            causal=True,
            sliding_window_size=-1,
            isa=form,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        return ExactRows(slice(first, stop), own, lengths, block_table, scheduled)

    def attend(self, query: Tensor, pages: Tensor, layout: PageLayout, scale: float, output: Tensor) -> None:
        """`query`, `output`: of all rows of the step, `[tokens, heads, dim]`."""
        keys, values = _halves(pages, layout)
        ops.cpu_attention_with_kv_cache(
            query=query[self.rows],
            key_cache=keys,
            value_cache=values,
            output=output[self.rows],
            query_start_loc=self.query_start,
            seq_lens=self.lengths,
            scale=scale,
            causal=True,
            alibi_slopes=None,
            sliding_window=-1,
            block_table=self.block_table,
            softcap=0,
            scheduler_metadata=self.scheduled,
            s_aux=None,
        )


def _halves(pages: Tensor, layout: PageLayout) -> tuple[Tensor, Tensor]:
    """Keys and values as the kernel takes them: `[blocks, heads, size, dim]` each, whatever lies where in them."""
    keys, values = pages.flatten(2).unflatten(2, (2 * layout.size, layout.dim)).chunk(2, dim=2)
    return keys, values

"""vLLM's interface for attention backends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from nearfield.kernels.cards import LEAST_CAPABILITY
from nearfield.vllm import SUPPORTED, check_version

check_version()

from vllm.config import get_current_vllm_config  # noqa: E402
from vllm.v1.attention.backend import (  # noqa: E402
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.utils import get_num_attention_heads_from_layers  # noqa: E402
from vllm.v1.kv_cache_interface import KVCacheLayout  # noqa: E402

from nearfield.vllm.attend import Reach, attend  # noqa: E402
from nearfield.vllm.blocks import full_blocks, write_cells, write_keys  # noqa: E402
from nearfield.vllm.pages import MOST_KEYS, READABLE, PageLayout  # noqa: E402
from nearfield.vllm.settings import NEVER, Settings  # noqa: E402

if TYPE_CHECKING:
    from nearfield.vllm.steps import Prompts, StepRows
    from nearfield.vllm.stock import ExactRows


class CellsBackend(AttentionBackend):
    """Attention through cells. What it does not serve, vLLM refuses at start-up with the reason."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16"]
    bounds: ClassVar[tuple[Reach, int] | None] = None
    """What rows read key by key, and how many keys they see at most. vLLM asks for the size of pages without saying for which
    engine: layers say it when they are made, in the same process and just before."""

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
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """The largest blocks there can be: cells are made inside of one."""
        return MOST_KEYS

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability >= LEAST_CAPABILITY)

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
        """The pages of a layer, with room for cells behind keys and values where a row may read some. From here on, the room that
        there is says whether there are cells."""
        if spec.page_size_padded is not None:
            raise ValueError(f"cells need the padding of pages, and something else has taken it: {spec}")
        layout = PageLayout(spec.num_kv_heads, spec.block_size, spec.head_size, spec.head_size_v)
        if cls.bounds is not None and not _may_read_cells(*cls.bounds, spec.block_size):
            return spec
        return replace(spec, page_size_padded=spec.unpadded_page_size_bytes + layout.bytes_per_page)


def _may_read_cells(reach: Reach, most: int, size: int) -> bool:
    """Whether a row that sees at most so many keys may, with blocks of this size."""
    return reach.first_near(most - 1, size) > 1


@dataclass
class CellsMetadata(AttentionMetadata):
    """What a step is asked for. All layers share it. On a CPU each request is served by itself, on a GPU rows are."""

    tokens: int
    starts: list[int]
    """of the rows of each request, and the end of the last one's"""
    is_exact: list[bool]
    """whether all rows of a request read all of their keys: at its prompt, where prompts are read exactly; on a CPU also where it
    is short"""
    block_table: Tensor
    """`[requests, most blocks]`"""
    lengths: list[int]
    """on a CPU: keys of each request, those of this step included"""
    exactly: Sequence[ExactRows] = ()
    """on a CPU: requests that vLLM's own kernel serves"""
    rows: StepRows | None = None
    """on a GPU: those that attend by cells, where they are long enough"""
    prompts: Prompts | None = None
    """on a GPU: those that are read exactly"""
    probes_of: Tensor | None = None


class CellsMetadataBuilder(AttentionMetadataBuilder[CellsMetadata]):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refused = {
            "speculative decoding": vllm_config.speculative_config is not None,
            "a KV connector": vllm_config.kv_transfer_config is not None,
            "decode context parallelism": vllm_config.parallel_config.decode_context_parallel_size > 1,
            f"the device {device}": device.type not in ("cpu", "cuda"),
        }
        for what, is_there in refused.items():
            if is_there:
                raise ValueError(f"nearfield's backend for vLLM {SUPPORTED} does not serve {what}; choose another backend")
        self.settings = Settings.of(vllm_config.additional_config)
        self.on_card = device.type == "cuda"
        self.reach, self.most = self.settings.reach(self.on_card), vllm_config.model_config.max_model_len
        # Layers may have other numbers of heads than the model's usual one, by which vLLM's kernel for CPUs lays its work out.
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        own = get_num_attention_heads_from_layers(vllm_config, layer_names)
        self.heads = model.get_num_attention_heads(parallel) if own is None else own
        spec, cache_dtype = kv_cache_spec, vllm_config.cache_config.cache_dtype
        sizes = spec.num_kv_heads, spec.block_size, spec.head_size, spec.head_size_v
        self.about = _about(spec.page_size_bytes, cache_dtype, spec.dtype, *sizes, device)
        if _may_read_cells(self.reach, self.most, spec.block_size) and not self.about.has_cells:
            raise ValueError(f"rows that see {self.most} keys may read cells, and pages were made without room for them: {spec}")
        if self.on_card:
            self.prepare_card()

    def prepare_card(self) -> None:
        """Makes what a step needs there. Raises where the kernels cannot serve such requests."""
        from nearfield.vllm.steps import StepBuffers, first_keys, probes_table, unsupported

        spec, vllm_config, device = self.kv_cache_spec, self.vllm_config, self.device
        reach, most = self.settings.reach(on_card=True), self.most
        layout = PageLayout(spec.num_kv_heads, spec.block_size, spec.head_size, spec.head_size_v)
        reason = unsupported(reach, layout, self.heads // spec.num_kv_heads, most)
        if reason is not None:
            raise ValueError(f"nearfield's backend for vLLM {SUPPORTED} does not serve {reason}")
        self.buffers = StepBuffers(vllm_config.scheduler_config.max_num_batched_tokens, device)
        self.probes_of = probes_table(reach, layout, most, device)
        first_keys(layout, device)  # Now, since a captured step cannot wait for what is sent to a card.

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CellsMetadata:
        common, count = common_attn_metadata, common_attn_metadata.num_reqs
        starts = common.query_start_loc_cpu[: count + 1].tolist()
        is_exact = [False] * count
        if self.settings.prefill == "exact":
            # Requests that pad a captured step may be missing.
            said = [] if common.is_prefilling is None else common.is_prefilling[:count].tolist()
            said += [False] * (count - len(said))
            # An answer comes row by row. Several of its rows at once are read again after a preemption: one runner of vLLM calls
            # them a prompt, and the other, which runs on CPUs, does not.
            is_exact = [prompt or stop - start > 1 for prompt, (start, stop) in zip(said, pairwise(starts), strict=True)]
        lengths = [] if self.on_card else common.seq_lens[:count].tolist()
        made = CellsMetadata(common.num_actual_tokens, starts, is_exact, common.block_table_tensor, lengths)
        if self.on_card:
            self._ask_card(made, common)
        else:
            self._ask_cpu(made, common)
        return made

    def _ask_cpu(self, made: CellsMetadata, common: CommonAttentionMetadata) -> None:
        """Says which requests vLLM's own kernel serves, all that come one after the other at once."""
        layout, form = self.about.layout, self.about.form
        is_short = [self.reach.first_near(length - 1, layout.size) == 1 for length in made.lengths]
        made.is_exact = [exact or short for exact, short in zip(made.is_exact, is_short, strict=True)]
        if form is None:
            return
        from nearfield.vllm.stock import ExactRows

        has_rows = [stop > start for start, stop in pairwise(made.starts)]
        served = [exact and some for exact, some in zip(made.is_exact, has_rows, strict=True)]
        made.exactly = [
            ExactRows.of(
                common.query_start_loc[first : stop + 1],
                common.seq_lens[first:stop],
                made.block_table[first:stop],
                layout,
                self.heads,
                self.kv_cache_spec.dtype,
                form,
            )
            for first, stop in _stretches(served)
        ]

    def _ask_card(self, made: CellsMetadata, common: CommonAttentionMetadata) -> None:
        """Says what rows there are without waiting for the card, in buffers that a captured graph reads again."""
        from nearfield.kernels.launch import next_power_of_2
        from nearfield.vllm.steps import Prompts, StepRows

        query_start, seq_lens = common.query_start_loc[: common.num_reqs + 1], common.seq_lens[: common.num_reqs]
        spans = list(pairwise(made.starts))
        # A row of a prompt that comes alone may be a part of a captured step, which has no tiles of prompts.
        alone = [exact and stop - start == 1 for (start, stop), exact in zip(spans, made.is_exact, strict=True)]
        tiled = [exact and stop - start > 1 for (start, stop), exact in zip(spans, made.is_exact, strict=True)]
        self.buffers.fill(query_start, seq_lens, _sent(alone, torch.int8, self.device) if any(alone) else None)
        tokens = self.buffers.numbers[: made.tokens]
        if any(tiled):
            others = [row for (start, stop), apart in zip(spans, tiled, strict=True) if not apart for row in range(start, stop)]
            tokens = _sent(others, torch.int32, self.device)
            counts = tuple(stop - start for start, stop in compress(spans, tiled))
            made.prompts = Prompts(query_start, _sent(tiled, torch.int8, self.device), counts)
        # Rounded up, so that the kernels of a step are those of the step before.
        most = min(self.most, next_power_of_2(common.max_seq_len))
        made.rows = StepRows(tokens, self.buffers.request_of, self.buffers.length_of, made.block_table, most)
        made.probes_of = self.probes_of

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> CellsMetadata:
        made = self.build(0, common_attn_metadata)
        if made.rows is not None:  # Kernels warm up on pages that hold nothing yet.
            made.rows.length_of.fill_(1)
            made.rows = made.rows._replace(most=self.most)
        return made


class _About(NamedTuple):
    """How the pages of a layer lie."""

    layout: PageLayout
    form: str | None
    """in which vLLM's own kernel for CPUs reads and writes them; None: it does not"""
    has_cells: bool
    """whether pages have room for cells: no row reads any where they have not"""


@functools.cache
def _about(
    page: int,
    cache_dtype: str,
    dtype: torch.dtype,
    heads: int,
    size: int,
    dim: int,
    value_dim: int,
    device: torch.device,
) -> _About:
    """Pages of `page` bytes. The builder of a step and the layers have these sizes from one source, so they agree."""
    has_cells = PageLayout(heads, size, dim, value_dim).has_room(page, dtype.itemsize)
    form = _form_of(cache_dtype, dtype, size, dim, value_dim, not has_cells) if device.type == "cpu" else None
    layout = PageLayout(heads, size, dim, value_dim, by_columns=form == READABLE, is_packed=form not in (None, READABLE))
    return _About(layout, form, has_cells)


def _form_of(*asked: Any) -> str | None:
    """See `stock.form_of`."""
    from nearfield.vllm.stock import form_of

    return form_of(*asked)


def _stretches(which: Sequence[bool]) -> list[tuple[int, int]]:
    """Where stretches of what is true begin and end."""
    edges = [place for place, (before, after) in enumerate(pairwise([False, *which, False])) if before != after]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _sent(numbers: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a card; nobody waits until they are there."""
    return torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


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
        vllm_config = get_current_vllm_config()
        self.settings = Settings.of(vllm_config.additional_config)
        self.reach = self.settings.reach(vllm_config.device_config.device_type == "cuda")
        self.exactly = replace(self.reach, exact_below=NEVER)
        CellsBackend.bounds = self.reach, vllm_config.model_config.max_model_len

    def _about(self, kv_cache: Tensor) -> _About:
        _, heads, size, wide = kv_cache.shape
        sizes = heads, size, self.head_size, wide - self.head_size
        page = kv_cache.stride(0) * kv_cache.element_size()
        return _about(page, self.kv_cache_dtype, kv_cache.dtype, *sizes, kv_cache.device)

    def do_kv_cache_update(self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor) -> None:
        slots = slot_mapping[: len(key)]
        key, value = key[: len(slots)], value[: len(slots)]
        layout, form, has_cells = self._about(kv_cache)
        if kv_cache.is_cuda:
            from nearfield.vllm.steps import write

            write(kv_cache, layout, key, value, slots, has_cells)
            return
        if form is not None:
            from nearfield.vllm import stock

            stock.write(kv_cache, layout, key, value, slots, form)
        else:
            write_keys(kv_cache, layout, key, value, slots)
        if has_cells:
            write_cells(kv_cache, layout, full_blocks(slots, layout.size))

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
            if output.is_cuda:
                from nearfield.vllm.steps import SCRATCH_BYTES

                torch.empty(SCRATCH_BYTES, dtype=torch.uint8, device=output.device)
            return output.fill_(0)
        layout, form, _ = self._about(kv_cache)
        if attn_metadata.rows is not None:
            self._forward_on_card(query, kv_cache, layout, attn_metadata, attn_metadata.rows, output)
            return output
        query = query.view(len(query), self.num_heads, self.head_size)
        into = output.view(len(output), self.num_heads, layout.value_dim)
        for some in attn_metadata.exactly:
            some.attend(query, kv_cache, layout, self.scale, into)
        for request, (start, stop) in enumerate(pairwise(attn_metadata.starts)):
            if stop > start and not (form is not None and attn_metadata.is_exact[request]):
                length = attn_metadata.lengths[request]
                blocks = attn_metadata.block_table[request, : -(-length // layout.size)].long()
                reach = self.exactly if attn_metadata.is_exact[request] else self.reach
                into[start:stop] = attend(query[start:stop], kv_cache, layout, blocks, length, reach, self.scale)
        return output

    def _forward_on_card(
        self, query: Tensor, pages: Tensor, layout: PageLayout, asked: CellsMetadata, rows: StepRows, output: Tensor
    ) -> None:
        from nearfield.vllm.steps import decode, read_exactly

        query = query.view(len(query), self.num_heads, self.head_size)
        into = output.view(len(output), self.num_heads, layout.value_dim)
        assert asked.probes_of is not None
        if asked.prompts is not None:
            read_exactly(query, pages, layout, rows, asked.prompts, self.scale, into)
        decode(query, pages, layout, rows, self.reach, asked.probes_of, self.scale, into)

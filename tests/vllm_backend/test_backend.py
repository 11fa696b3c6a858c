"""What vLLM's interface gets, where vLLM is installed: refusals, sizes of pages, and the way of a GPU, interpreted on a CPU."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from storage_bytes import fill_bytes
from torch import Tensor

from nearfield.vllm import installed, register

if installed() is None:
    pytest.skip("vLLM is not installed: make test-vllm", allow_module_level=True)

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nearfield.vllm import backend
from nearfield.vllm.cpu_platform import CpuPlatformWithCells
from nearfield.vllm.pages import PageLayout

LAYOUT = PageLayout(heads=2, size=32, dim=16, value_dim=16)
PLAIN = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=16, dtype=torch.float32)
SPEC = backend.CellsBackend.customize_spec(PLAIN)
CPU = torch.device("cpu")
SETTINGS = {"exact_below": 60, "probes": 3, "window": 16}


@pytest.fixture(autouse=True)
def nothing_is_said_of_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers say it when they are made."""
    monkeypatch.setattr(backend.CellsBackend, "bounds", None)


def config(**nearfield: Any) -> Any:
    return SimpleNamespace(
        speculative_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
        kv_transfer_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        device_config=SimpleNamespace(device_type="cpu"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        additional_config={"nearfield": {**SETTINGS, **nearfield}},
        model_config=SimpleNamespace(max_model_len=400, get_num_attention_heads=lambda _: 6, get_num_kv_heads=lambda _: 2),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
    )


def impl(monkeypatch: pytest.MonkeyPatch, vllm_config: Any, **changes: Any) -> Any:
    monkeypatch.setattr(backend, "get_current_vllm_config", lambda: vllm_config)
    return backend.CellsImpl(**{"num_heads": 6, "head_size": 16, "scale": 0.3, "num_kv_heads": 2, **changes})


class Step:
    """Requests of several lengths, of which the last rows are asked for."""

    lengths, rows, prefilling = (333, 90, 40, 250), (1, 9, 7, 1), (False, True, True, False)

    def __init__(self, layer: Any, pages: Tensor | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.pages = LAYOUT.empty(40, torch.float32) if pages is None else pages
        fill_bytes(self.pages, 255)
        free = torch.randperm(40, generator=generator).tolist()
        self.table = torch.zeros(len(self.lengths), 12, dtype=torch.int32)
        for request, length in enumerate(self.lengths):
            own = torch.tensor([free.pop() for _ in range(-(-length // 32))])
            self.table[request, : len(own)] = own
            key, value = torch.randn(2, length, 2, 16, generator=generator)
            place = torch.arange(length)
            layer.do_kv_cache_update(None, key, value, self.pages, own[place // 32] * 32 + place % 32)
        self.query = torch.randn(sum(self.rows), 6, 16, generator=generator)

    def asked(self) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *accumulate(self.rows)], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.lengths, dtype=torch.int32),
            num_reqs=len(self.lengths),
            num_actual_tokens=len(self.query),
            max_query_len=max(self.rows),
            max_seq_len=max(self.lengths),
            block_table_tensor=self.table,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            is_prefilling=torch.tensor(self.prefilling),
        )

    def forward(self, layer: Any, metadata: Any) -> Tensor:
        output = torch.full((len(self.query), 6, 16), torch.nan)
        return layer.forward(None, self.query, None, None, self.pages, metadata, output)


@pytest.mark.parametrize("prefill", ["exact", "cells"])
def test_a_card_is_asked_for_what_a_cpu_does(prefill: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    vllm_config = config(prefill=prefill)
    layer = impl(monkeypatch, vllm_config)
    builder = backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU)
    step = Step(layer)
    expected = step.forward(layer, builder.build(0, step.asked()))
    exactly = step.forward(impl(monkeypatch, config(exact_below=1 << 40)), builder.build(0, step.asked()))
    assert torch.allclose(expected[1:17], exactly[1:17]) == (prefill == "exact")
    assert not torch.allclose(expected[[0, 17]], exactly[[0, 17]], atol=1e-3)
    builder.prepare_card()
    builder.on_card = True
    metadata = builder.build(0, step.asked())
    assert metadata.lengths == []  # nobody asked the card how long requests are
    assert (metadata.prompts is None) == (prefill == "cells")
    torch.testing.assert_close(step.forward(layer, metadata), expected, rtol=2e-5, atol=2e-5)


def test_an_answer_that_is_read_again_is_read_like_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's runner for CPUs does not call it one, after a preemption."""
    vllm_config = config(exact_below=0)
    step = Step(impl(monkeypatch, vllm_config))
    builder = backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU)
    for said in (step.prefilling, (False,) * 4):
        step.prefilling = said
        assert builder.build(0, step.asked()).is_exact == [False, True, True, False]
    assert builder.build(0, step.asked().replace(is_prefilling=None)).is_exact == [False, True, True, False]


def test_what_a_graph_is_captured_with_reads_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    vllm_config = config()
    builder = backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU)
    builder.prepare_card()
    builder.on_card = True
    step = Step(impl(monkeypatch, vllm_config))
    step.rows, step.query, step.prefilling = (1,) * 4, step.query[:4], (False,) * 4
    metadata = builder.build_for_cudagraph_capture(step.asked())
    assert metadata.rows.length_of.tolist() == [1] * 64
    before = metadata.rows.length_of.data_ptr()
    metadata = builder.build(0, step.asked())
    assert metadata.rows.length_of.data_ptr() == before  # where the graph reads it again
    assert metadata.rows.length_of.tolist()[:5] == [333, 90, 40, 250, 0]
    assert metadata.rows.tokens.data_ptr() == builder.buffers.numbers.data_ptr()


def test_the_last_row_of_a_prompt_may_be_in_a_captured_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests have one row, one of them the end of a prompt, and two more tokens pad the step: vLLM 0.32 says of these
    neither that they are at a prompt nor that they are not."""
    pytest.importorskip("triton")
    vllm_config = config()
    layer = impl(monkeypatch, vllm_config)
    builder = backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU)
    step = Step(layer)
    step.rows, step.query, step.prefilling = (1, 1, 1, 1), step.query[:6], (False, False, False, True)
    asked = step.asked()
    asked.num_actual_tokens = 4
    expected = step.forward(layer, builder.build(0, asked))[:4]
    builder.prepare_card()
    builder.on_card = True
    starts = torch.tensor([0, 1, 2, 3, 4, 4, 4], dtype=torch.int32)
    lengths, table = torch.tensor([*step.lengths, 0, 0], dtype=torch.int32), torch.cat([step.table, step.table[:2] * 0])
    padded = {"query_start_loc": starts, "query_start_loc_cpu": starts, "seq_lens": lengths, "block_table_tensor": table}
    metadata = builder.build(0, asked.replace(num_reqs=6, num_actual_tokens=6, **padded))
    assert metadata.prompts is None
    assert metadata.rows.tokens.data_ptr() == builder.buffers.numbers.data_ptr()  # what the captured step has
    found = step.forward(layer, metadata)
    torch.testing.assert_close(found[:4], expected, rtol=2e-5, atol=2e-5)
    assert bool((found[4:] == 0).all())


def test_requests_that_are_too_long_for_the_kernels_are_refused_at_once() -> None:
    pytest.importorskip("triton")
    vllm_config = config(exact_below=0, probes=None)
    vllm_config.model_config.max_model_len = 1 << 24
    builder = backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU)
    with pytest.raises(ValueError, match="allow shorter requests, or fewer probes"):
        builder.prepare_card()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": 128}, "sliding windows"),
        ({"logits_soft_cap": 30.0}, "soft-capped logits"),
        ({"attn_type": "encoder_only"}, "attention of type encoder_only"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "layers that share the cache of another one"),
        ({"kv_cache_dtype": "fp8"}, "a cache of fp8"),
        ({"sinks": torch.zeros(6)}, "sinks"),
    ],
)
def test_what_a_layer_may_not_have(given: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"does not serve {told}; choose another backend"):
        impl(monkeypatch, config(), **given)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"use_mla": True}, "MLA not supported"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"has_sink": True}, "attention sinks not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"attn_type": "encoder_only"}, "attention type encoder_only not supported"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype not supported.*'?fp8"),
        ({"block_size": 24}, "block_size not supported"),
        ({"use_kv_connector": True}, "KV connector not supported"),
        ({"use_pcp": True}, "PCP not supported"),
        ({"use_dcp": True}, "DCP not supported"),
    ],
)
def test_what_a_model_may_not_have_on_a_cpu(given: dict[str, Any], told: str) -> None:
    """vLLM's platform for CPUs asks no backend, and other platforms do."""
    usual = AttentionSelectorConfig(head_size=64, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None)
    custom = AttentionBackendEnum.CUSTOM
    register()
    assert CpuPlatformWithCells.get_attn_backend_cls(custom, usual) == custom.get_path()
    with pytest.raises(ValueError, match=f"does not serve this model: .*{told}"):
        CpuPlatformWithCells.get_attn_backend_cls(custom, usual._replace(**given))
    other = AttentionBackendEnum.CPU_ATTN
    assert CpuPlatformWithCells.get_attn_backend_cls(other, usual) == CpuPlatform.get_attn_backend_cls(other, usual)


def test_heads_are_those_of_the_layers() -> None:
    class Layer(AttentionLayerBase):
        impl = SimpleNamespace(num_heads=4)

        def get_attn_backend(self) -> Any:
            return backend.CellsBackend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:
            return SPEC

    vllm_config = config()
    assert backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU).heads == 6
    vllm_config.compilation_config.static_forward_context["layer"] = Layer()
    assert backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU).heads == 4


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"speculative_config": object()}, "speculative decoding"),
        ({"kv_transfer_config": object()}, "a KV connector"),
        ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2)}, "decode context parallelism"),
    ],
)
def test_what_an_engine_may_not_do(change: dict[str, Any], told: str) -> None:
    vllm_config = config()
    vars(vllm_config).update(change)
    with pytest.raises(ValueError, match=f"does not serve {told}; choose another backend"):
        backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU)
    with pytest.raises(ValueError, match="does not serve the device meta"):
        backend.CellsMetadataBuilder(SPEC, ["layer"], config(), torch.device("meta"))
    with pytest.raises(ValueError, match="must have some of"):
        backend.CellsMetadataBuilder(SPEC, ["layer"], config(probe=3), CPU)


def test_pages_have_room_for_their_cells() -> None:
    assert SPEC.page_size_bytes == PLAIN.page_size_bytes + LAYOUT.bytes_per_page
    assert backend.CellsBackend.get_preferred_block_size(16) == 256
    with pytest.raises(ValueError, match="something else has taken it"):
        backend.CellsBackend.customize_spec(SPEC)
    with pytest.raises(ValueError, match="blocks must have a multiple of 16 keys, at most 256, got 512"):
        backend.CellsBackend.customize_spec(FullAttentionSpec(block_size=512, num_kv_heads=2, head_size=16, dtype=torch.float32))


def test_pages_have_no_room_for_cells_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With blocks of 32 and a window of 16, a row that sees 79 keys reads all of them, and one that sees 80 may read cells."""
    for change, is_needed in (({}, True), ({"exact_below": 401}, False), ({"exact_below": 400}, True), ({"window": 337}, False)):
        vllm_config = config(**change)
        layer = impl(monkeypatch, vllm_config)
        spec = backend.CellsBackend.customize_spec(PLAIN)
        assert spec == (SPEC if is_needed else PLAIN)
        builder = backend.CellsMetadataBuilder(spec, ["layer"], vllm_config, CPU)
        pages = LAYOUT.empty(3, torch.float32) if is_needed else torch.zeros(3, 2, 32, 32)
        assert builder.about == layer._about(pages)
        assert builder.about.has_cells is is_needed
        if is_needed:
            with pytest.raises(ValueError, match="pages were made without room for them"):
                backend.CellsMetadataBuilder(PLAIN, ["layer"], vllm_config, CPU)


@pytest.mark.parametrize("on_card", [False, True])
def test_steps_over_pages_without_cells(on_card: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if on_card:
        pytest.importorskip("triton")
    vllm_config = config(exact_below=401)
    layer = impl(monkeypatch, vllm_config)
    step, builder = Step(layer), backend.CellsMetadataBuilder(SPEC, ["layer"], vllm_config, CPU)
    expected = step.forward(layer, builder.build(0, step.asked()))
    builder = backend.CellsMetadataBuilder(PLAIN, ["layer"], vllm_config, CPU)
    if on_card:
        builder.prepare_card()
        builder.on_card = True
    step = Step(layer, torch.empty(40, 2, 32, 32))
    torch.testing.assert_close(step.forward(layer, builder.build(0, step.asked())), expected, rtol=2e-5, atol=2e-5)


def test_a_step_that_only_measures_memory_writes_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    output = torch.full((3, 6, 16), torch.nan)
    assert bool((impl(monkeypatch, config()).forward(None, output, None, None, None, None, output) == 0).all())

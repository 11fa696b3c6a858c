"""One run of vLLM, in a process of its own: python engine.py SETTINGS OUT, both JSON files. See test_engine.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ROUNDS = (
    ((0, 7), (100, 150), (0, 300), (1000, 1310)),
    ((0, 304), (1000, 1200), (0, 200)),
    ((2000, 2250), (1000, 1290), (0, 300)),
)
"""Prompts, as parts of a text, of requests that run together; later rounds find beginnings of earlier ones in the cache. One with
three numbers is the next turn of a chat: the prompt and the answer of that request come before the part of the text."""
TOKENS = 12


def watch(once: bool) -> dict[str, float]:
    """Compare the cells of all blocks that a step may read with what their keys make of them. `once`: a control, in which cells
    are written only when a block fills for the first time."""
    import torch

    from nearfield.vllm import backend
    from nearfield.vllm.blocks import full_blocks, summarise, write_cells

    seen = {"blocks": 0, "furthest": 0.0}
    forward = backend.CellsImpl.forward

    def watched(self: Any, layer: Any, q: Any, k: Any, v: Any, kv_cache: Any, metadata: Any, *rest: Any, **more: Any) -> Any:
        if metadata is not None and self._about(kv_cache).has_cells:
            layout, _, _ = self._about(kv_cache)
            size = kv_cache.shape[2]
            for request, length in enumerate(metadata.lengths):
                full = metadata.block_table[request, : length // size].long()
                if len(full):
                    stored, made = layout.summaries(kv_cache), summarise(kv_cache[full], layout)
                    pairs = zip(stored, made, strict=True)
                    off = max(float((a[full].double() - b.double()).abs().max()) for a, b in pairs)
                    seen["blocks"] += len(full)
                    seen["furthest"] = max(seen["furthest"], off if off == off else torch.inf)
        return forward(self, layer, q, k, v, kv_cache, metadata, *rest, **more)

    backend.CellsImpl.forward = watched
    if once:
        filled: dict[int, set[int]] = {}

        def only_once(pages: Any, layout: Any, blocks: Any, *rest: Any) -> None:
            known = filled.setdefault(pages.data_ptr(), set())
            new = [block for block in blocks.tolist() if block not in known]
            known.update(new)
            write_cells(pages, layout, torch.tensor(new, dtype=torch.int64), *rest)

        backend.write_cells = only_once
        assert backend.full_blocks is full_blocks
    return seen


def go_the_way_of_a_card() -> None:
    """Steps are asked for as on a GPU, and kernels run in Triton's interpreter."""
    from nearfield.vllm import backend

    original = backend.CellsMetadataBuilder.__init__

    def made(self: Any, *given: Any) -> None:
        original(self, *given)
        self.on_card = True
        self.prepare_card()

    backend.CellsMetadataBuilder.__init__ = made
    backend._form_of = lambda *_: None  # Pages are those of a card, too.


def main(asked: dict[str, Any]) -> dict[str, Any]:
    if asked.get("card"):
        go_the_way_of_a_card()
    from vllm import LLM, SamplingParams

    by_cells = asked["nearfield"] is not None
    usual = {"enforce_eager": True, "dtype": "float32", "max_model_len": 512, "block_size": 32, "max_num_seqs": 4, "seed": 0}
    ours = {"attention_config": {"backend": "CUSTOM"}, "additional_config": {"nearfield": asked["nearfield"]}} if by_cells else {}
    llm = LLM(model=asked["model"], disable_log_stats=False, **{**usual, **ours, **asked["engine"]})
    # What runs in another process, or says nothing of lengths, is not looked at. To look takes longer than the steps themselves.
    is_watched = by_cells and not any(asked.get(way) for way in ("processes", "card", "quick"))
    seen = watch(asked.get("once", False)) if is_watched else {}
    ids = llm.get_tokenizer()(Path(asked["text"]).read_text()[:12_000])["input_ids"]
    sampling = SamplingParams(temperature=0, max_tokens=asked.get("tokens", TOKENS), ignore_eos=True, logprobs=1)
    found: dict[str, Any] = {"prompts": [], "tokens": [], "logprobs": [], "cached": [], "seen": seen}
    turns: list[list[int]] = []
    for number, prompts in enumerate(asked.get("prompts", ROUNDS)):
        if number == asked.get("forgets"):
            llm.reset_prefix_cache()
        given = [[token for turn in earlier for token in turns[turn]] + ids[start:stop] for *earlier, start, stop in prompts]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in given], sampling, use_tqdm=False)
        own = [list(output.outputs[0].token_ids) for output in outputs]
        turns += [prompt + answer for prompt, answer in zip(given, own, strict=True)]
        found["prompts"].append(given)
        found["tokens"].append(own)
        steps = [zip(output.outputs[0].logprobs, tokens, strict=True) for output, tokens in zip(outputs, own, strict=True)]
        found["logprobs"].append([[step[token].logprob for step, token in each] for each in steps])
        found["cached"].append([output.num_cached_tokens for output in outputs])
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    found["preemptions"] = metrics.get("vllm:num_preemptions")
    if not asked.get("processes"):
        vllm_config = llm.llm_engine.vllm_config
        found["blocks"] = vllm_config.cache_config.num_gpu_blocks
        layer = next(iter(vllm_config.compilation_config.static_forward_context.values()))
        found["backend"] = type(layer.impl).__name__
    return found


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    processes = "1" if given.get("processes") else "0"
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": processes, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    if given.get("card"):
        os.environ["TRITON_INTERPRET"] = "1"
    if given["nearfield"] is not None:
        os.environ["NEARFIELD_VLLM_CPU"] = "1"
    Path(sys.argv[2]).write_text(json.dumps(main(given)))

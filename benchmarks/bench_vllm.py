"""The backend inside of vLLM on a CPU, next to vLLM's own: time of a prompt and of a token, and perplexity.

make .venv-vllm/.installed smollm2
.venv-vllm/bin/python benchmarks/bench_vllm.py                      # writes results/vllm.json, section by section; 25 minutes
.venv-vllm/bin/python benchmarks/bench_vllm.py --section quality --text BOOK
.venv-vllm/bin/python benchmarks/bench_vllm.py --quick              # one short case of each, nothing written

Each engine is a process of its own, one after the other; of several rounds the shortest counts. With `quality`, all rows of texts
attend as those of an answer do ("prefill": "cells"), and vLLM tells the logarithm of each token's probability. "default" reads
all keys where that is faster, which on a CPU it always was; "cells" are used with `exact_below` = 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import perplexity_texts
import record
import torch
from perplexity_measure import stderr
from real import SMOLLM2

LENGTHS, TOKENS, ROUNDS = (2048, 4096, 8192, 16_384), 32, 2
LONG = 16_384
"""Prompts of so many tokens are read once."""
QUALITY_TOKENS, FIRST = 8191, 1024
STOCK: dict[str, Any] | None = None
SPEED = {"vLLM": STOCK, "default": {}, "cells": {"exact_below": 0}}
QUALITY = {
    "vLLM": STOCK,
    "default": {"prefill": "cells", "exact_below": 0},
    "51 cells": {"prefill": "cells", "exact_below": 0, "probes": 51},
    "102 cells": {"prefill": "cells", "exact_below": 0, "probes": 102},
}


def engine(asked: dict[str, Any], length: int, **options: Any) -> Any:
    from vllm import LLM

    ours = {}
    if asked["nearfield"] is not None:
        ours = {"attention_config": {"backend": "CUSTOM"}, "additional_config": {"nearfield": asked["nearfield"]}}
    overrides = {"hf_overrides": {"max_position_embeddings": max(8192, length)}}
    return LLM(
        model=asked["model"], max_model_len=length, max_num_seqs=2, enforce_eager=True, seed=0, **overrides, **options, **ours
    )


def speed(asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a prompt, and milliseconds of a token, at each length."""
    from vllm import SamplingParams

    lengths = asked["lengths"]
    llm = engine(
        asked, max(lengths) + 2 * TOKENS, enable_prefix_caching=False, max_num_batched_tokens=2048, disable_log_stats=False
    )
    ids = (asked["ids"] * (1 + max(lengths) // len(asked["ids"])))[: max(lengths)]
    found: dict[str, Any] = {}
    sampling = SamplingParams(temperature=0, max_tokens=1 + TOKENS, ignore_eos=True)
    llm.generate([{"prompt_token_ids": ids[:300]}], sampling, use_tqdm=False)  # everything is loaded
    for length in lengths:
        prompts, tokens = [], []
        for _ in range(asked["rounds"] if length < LONG else 1):
            told = llm.generate([{"prompt_token_ids": ids[:length]}], sampling, use_tqdm=False)[0].metrics
            prompts.append(told.first_token_ts - told.scheduled_ts)
            tokens.append(1e3 * (told.last_token_ts - told.first_token_ts) / TOKENS)
        found[str(length)] = {
            "prompt_s": min(prompts),
            "token_ms": min(tokens),
            "runs": {"prompt_s": prompts, "token_ms": tokens},
        }
    return found


def quality(asked: dict[str, Any]) -> dict[str, Any]:
    """The loss of every token of every text."""
    from vllm import SamplingParams

    texts = asked["texts"]
    length = max(map(len, texts.values())) + 8
    options = {"enable_prefix_caching": False, "max_num_batched_tokens": 1024, "dtype": "float32"}
    llm = engine(asked, length, **options)
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    found = {}
    for name, ids in texts.items():
        output = llm.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)[0]
        found[name] = [-step[own].logprob for step, own in zip(output.prompt_logprobs[1:], ids[1:], strict=True)]
    return found


def run(what: str, asked: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        given, out = Path(folder) / "given.json", Path(folder) / "out.json"
        given.write_text(json.dumps(asked))
        usual = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "4", "HF_HUB_OFFLINE": "1"}
        switch = {} if asked["nearfield"] is None else {"NEARFIELD_VLLM_CPU": "1"}
        command = [sys.executable, __file__, "--case", what, str(given), str(out)]
        done = subprocess.run(command, env=os.environ | usual | switch, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{what} with {asked['nearfield']}: {done.stderr[-2000:]}")
        return json.loads(out.read_text())


def measure_speed(model: Path, ids: list[int], lengths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    asked = {"model": str(model), "ids": ids, "lengths": lengths, "rounds": rounds}
    runs = {name: run("speed", {**asked, "nearfield": settings}) for name, settings in record.each(SPEED.items(), str)}
    found: dict[str, Any] = {}
    for length in map(str, lengths):
        found[length] = {name: own[length] for name, own in runs.items()}
    return found


def measure_quality(model: Path, texts: list[perplexity_texts.Text], first: int) -> dict[str, Any]:
    asked = {"model": str(model), "texts": {text.name: text.ids[0].tolist() for text in texts}}
    runs = {name: run("quality", {**asked, "nearfield": settings}) for name, settings in record.each(QUALITY.items(), str)}
    found: dict[str, Any] = {"texts": {text.name: text.about for text in texts}, "tokens": texts[0].ids.shape[1], "first": first}
    found["ways"] = {}
    for name, losses in runs.items():
        off = {text: torch.tensor(own[first:]) - torch.tensor(runs["vLLM"][text][first:]) for text, own in losses.items()}
        mean = statistics.fmean(float(x.mean()) for x in off.values())
        wide = math.sqrt(sum(stderr(x) ** 2 for x in off.values())) / len(off)
        each = {text: math.expm1(float(x.mean())) for text, x in off.items()}
        excess = math.expm1(mean)
        found["ways"][name] = {"excess": excess, "stderr": (1 + excess) * wide, "by_text": each}
    return found


def main() -> None:
    if sys.argv[1:2] == ["--case"]:
        what, given, out = sys.argv[2:]
        Path(out).write_text(json.dumps({"speed": speed, "quality": quality}[what](json.loads(Path(given).read_text()))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=("speed", "quality"), default=("speed", "quality"))
    parser.add_argument("--model", type=Path, default=SMOLLM2)
    parser.add_argument("--text", type=Path, action="append", default=[], help="a book")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--quick", action="store_true", help="one short case of each, nothing written")
    options = parser.parse_args()
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = perplexity_texts.find(tokenizer, options.text, 600 if options.quick else QUALITY_TOKENS, 1)
    if "speed" in options.section:
        lengths, rounds = ((256,), 1) if options.quick else (tuple(options.lengths), ROUNDS)
        found = measure_speed(options.model, texts[-1].ids[0].tolist(), lengths, rounds)
        table = record.table("keys", "vLLM, ms", "default, ms", "cells, ms", title="a token")
        for length, row in found.items():
            table.add_row(length, *(f"{row[name]['token_ms']:.1f}" for name in SPEED))
        record.show(table)
        if not options.quick:
            record.merge("vllm", f"speed/{options.model.name}", found)
    if "quality" in options.section:
        found = measure_quality(options.model, texts, 100 if options.quick else FIRST)
        table = record.table("", "excess", *found["texts"], words=("",))
        for name, way in found["ways"].items():
            each = [f"{x:+.2%}" for x in way["by_text"].values()]
            table.add_row(name, f"{way['excess']:+.2%} ± {way['stderr']:.2%}", *each)
        record.show(table)
        if not options.quick:
            record.merge("vllm", f"quality/{options.model.name}", found)


if __name__ == "__main__":
    main()

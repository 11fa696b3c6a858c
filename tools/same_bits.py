"""Does a change leave every result as it was? 200 calls, here and at another commit, compared bit for bit.

    python tools/same_bits.py --against v0.1.0          # outputs, gradients, audits, indices, caches: on the CPU
    python tools/same_bits.py --against main --device cuda --tolerance 0.01

Both sides run in processes of their own. The calls use public names only, so that any two versions can be compared.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
Results = dict[str, Any]


def calls(device: str) -> Iterator[tuple[str, Callable[[], Results]]]:
    """(name, call) pairs; a call returns tensors and numbers by name."""
    import torch

    import nearfield as nf

    def inputs(
        seed: int,
        batch: int = 1,
        heads: int = 2,
        length: int = 600,
        dim: int = 32,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        keys: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        centres = torch.randn(24, dim, generator=generator)
        kv = kv_heads or heads

        def some(count, columns, spread):
            label = torch.randint(24, count, generator=generator)
            return 1.5 * centres[label][..., :columns] + spread * torch.randn(*count, min(columns, dim), generator=generator)

        query, key = some((batch, heads, length), dim, 0.7), some((batch, kv, keys or length), dim, 0.5)
        value = torch.randn(batch, kv, keys or length, value_dim or dim, generator=generator)
        return [x.to(device, dtype).requires_grad_() for x in (query, key, value)]

    def attend(
        seed: int, method: Any, shape: dict[str, Any] | None = None, draw: int = 7, **options: Any
    ) -> Callable[[], Results]:
        def run() -> Results:
            tensors = inputs(seed, **(shape or {}))
            group = tensors[0].shape[1] != tensors[1].shape[1]
            if options.get("attn_mask") == "padding":
                mask = torch.rand(len(tensors[1]), 1, 1, tensors[1].shape[2], generator=torch.Generator().manual_seed(seed)) > 0.2
                chosen = {**options, "attn_mask": mask.to(device)}
            else:
                chosen = options
            generator = torch.Generator(device).manual_seed(draw)
            output = nf.attention(*tensors, method=method, enable_gqa=group, generator=generator, **chosen)
            upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
            grads = torch.autograd.grad(output, tensors, upstream)
            return {"output": output, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}

        return run

    def diagnose(
        seed: int, method: Any, shape: dict[str, Any] | None = None, audit: int = 20, **options: Any
    ) -> Callable[[], Results]:
        def run() -> Results:
            tensors = [x.detach() for x in inputs(seed, **(shape or {}))]
            generator = torch.Generator(device).manual_seed(3)
            found = nf.estimate(*tensors, method=method, audit=audit, generator=generator, **options)
            kept = {"output": found.output, "lse": found.lse, "keys": found.info.get("keys_per_query")}
            if found.stderr is not None:
                kept["stderr"] = found.stderr
            if found.audit is not None:
                kept["audit"] = found.audit.additive_errors
            return kept

        return run

    seed = 0
    half = (torch.float16, torch.bfloat16)
    small = {"cell_size": 8, "probes": 5, "sinks": 3}
    causal_cells = [
        nf.Cells(**small, segment=64),
        nf.Cells(**small, segment=32, window=40),
        nf.Cells(**small, segment=100),
        nf.Cells(),
        nf.Cells(cell_size=4, probes=1, segment=16, sinks=0),
        nf.Cells(cell_size=16, probes=200, segment=128),
        nf.Cells(**small, segment=64, partition=nf.Blocks()),
        nf.Cells(**small, segment=64, partition=nf.HashBuckets(bits=6, seed=2)),
        nf.Cells(**small, segment=64, partition=nf.KMeans(iterations=2, seed=5)),
        nf.Cells(**small, segment=64, samples=6),
    ]
    shapes: list[dict[str, Any]] = [
        {},
        {"heads": 4, "kv_heads": 2, "length": 333},
        {"batch": 2, "heads": 1, "length": 257, "dim": 20, "value_dim": 12},
        {"length": 1500, "heads": 1, "dim": 64},
        {"batch": 3, "heads": 1, "length": 97, "dim": 8},
    ]
    for method in causal_cells:
        for number, shape in enumerate(shapes):
            seed += 1
            yield f"cells causal {method} {shape}", attend(seed, method, shape, is_causal=True)
            if number < 2 and method.window is None:
                yield f"cells open {method} {shape}", attend(seed, method, shape)
    for dtype in (torch.float64, *half):
        for causal in (False, True):
            seed += 1
            yield f"cells {dtype} {causal}", attend(seed, causal_cells[0], {"dtype": dtype}, is_causal=causal)
    for options in (
        {"dropout_p": 0.2},
        {"dropout_p": 0.2, "is_causal": True},
        {"attn_mask": "padding"},
        {"attn_mask": "padding", "is_causal": True},
        {"scale": -0.3, "is_causal": True},
        {"scale": 0.0},
        {"scale": 2.0},
    ):
        seed += 1
        yield f"cells {options}", attend(seed, causal_cells[0], {"batch": 2}, **options)
        yield f"cells drawn {options}", attend(seed, nf.Cells(**small, samples=4), {"batch": 2}, **options)
    yield "cells cross", attend(90, causal_cells[0], {"length": 100, "keys": 700})
    yield "cells large logits", attend(91, nf.Cells(**small), {"length": 400}, scale=300.0)
    backends = ("reference", "cpu") if device == "cpu" else ("reference", "triton")
    for backend in backends:
        yield f"cells {backend}", attend(92, causal_cells[0], {"length": 300}, is_causal=True, backend=backend)
        yield f"cells open {backend}", attend(93, causal_cells[0], {"length": 300}, backend=backend)
        yield f"topk {backend}", attend(94, nf.TopK(k=9, tail=7), {"length": 300}, backend=backend)
        yield f"gumbel {backend}", diagnose(95, nf.LazyGumbel(eps=0.5, delta=0.3), {"length": 64}, backend=backend)
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        for options in ({}, {"is_causal": True}, {"is_causal": True, "scale": -0.4}):
            seed += 1
            shape = {"length": 140, "dim": 16, "heads": 1}
            method = nf.Cells(cell_size=8, probes=3, segment=32, sinks=2)
            yield f"cells triton {options}", attend(seed, method, shape, backend="triton", **options)
        yield "topk triton", attend(seed, nf.TopK(k=5, tail=4), {"length": 100, "dim": 16}, backend="triton")
    for method in (nf.Cells(**small, segment=64, samples=4), nf.Cells(**small, segment=64), nf.Cells()):
        for causal in (False, True):
            seed += 1
            yield f"estimate {method} {causal}", diagnose(seed, method, is_causal=causal)

    indices = [
        nf.ExactIndex(),
        nf.KMeansIndex(probes=3, leaf=64),
        nf.ConcentricLSH(leaf=64),
    ]
    if importlib.util.find_spec("faiss") is not None and device == "cpu":
        indices += [nf.FaissIndex("IVF16,Flat", nprobe=4, leaf=64), nf.FaissIndex("Flat", metric="l2")]
    for index in indices:
        for causal in (False, True):
            for tail in (0, 12):
                seed += 1
                yield f"topk {index} {causal} {tail}", attend(seed, nf.TopK(k=10, tail=tail, index=index), is_causal=causal)
        seed += 1
        yield f"estimate topk {index}", diagnose(seed, nf.TopK(tail=8, index=index), is_causal=True)
        yield f"search {index}", _search(index, [x.detach() for x in inputs(seed, length=300)], None)
        yield f"search causal {index}", _search(index, [x.detach() for x in inputs(seed, length=300)], 0)
        yield f"gumbel {index}", diagnose(seed, nf.LazyGumbel(eps=0.5, delta=0.3, index=index), {"length": 80}, is_causal=True)
    for options in ({"dropout_p": 0.3}, {"attn_mask": "padding", "is_causal": True}, {"scale": -1.0}):
        seed += 1
        yield f"topk {options}", attend(seed, nf.TopK(k=12, tail=40), **options)
        yield f"exact {options}", attend(seed, nf.Exact(), {"heads": 4, "kv_heads": 2}, **options)
    yield "topk all keys", attend(100, nf.TopK(k=1000), {"length": 50})
    for dtype in half:
        yield f"topk {dtype}", attend(101, nf.TopK(k=8, tail=8), {"dtype": dtype}, is_causal=True)
        yield f"exact {dtype}", attend(102, nf.Exact(), {"dtype": dtype}, is_causal=True)
    for estimator in ("median", "mean"):
        for options in ({}, {"is_causal": True}):
            method = nf.LazyGumbel(eps=0.4, delta=0.2, estimator=estimator)
            yield f"gumbel {estimator} {options}", attend(103, method, {"length": 90, "dim": 8}, **options)
    yield "gumbel dropout", diagnose(104, nf.LazyGumbel(draws=40), {"length": 90}, audit=0, dropout_p=0.2)
    yield "gumbel printed", diagnose(105, nf.LazyGumbel(draws=40, certify=False), {"length": 90})
    walks = nf.gradients.RandomWalk(walks=12)
    yield "walks", attend(106, nf.Exact(), {"length": 120, "dim": 8}, gradient=walks)
    yield "walks causal", attend(107, nf.TopK(k=9), {"length": 120, "dim": 8}, gradient=walks, is_causal=True)
    printed = nf.gradients.PrintedWalk(eps=0.7, delta=0.5, walks=10)
    yield "printed walks", attend(108, nf.Exact(), {"length": 24, "dim": 4, "heads": 1}, gradient=printed)

    def of_gradients() -> Results:
        query, key, value = (x.detach() for x in inputs(109, length=60, dim=8))
        upstream = torch.randn(value.shape, generator=torch.Generator().manual_seed(2)).to(value)
        generator = torch.Generator(device).manual_seed(5)
        found = nf.gradients.exact(query, key, value, upstream, is_causal=True)
        guessed = nf.gradients.estimate(query, key, value, upstream, walks, generator=generator)
        positive = nf.gradients.approx_pos_prod(query, key, upstream.abs(), 30, generator=generator)
        signed = nf.gradients.estimate_product(query, key, upstream, 30, form="signed", generator=generator)
        shifted = nf.gradients.estimate_product(query, key, upstream, 30, form="shifted", generator=generator)
        return {"exact": found.key, "guessed": guessed.key, "positive": positive, "signed": signed, "shifted": shifted}

    yield "gradients", of_gradients
    for method in (nf.Auto(), nf.Auto(crossover=256), nf.Auto(eps=0.1, crossover=256), nf.Auto(eps=0.01, crossover=64)):
        for causal in (False, True):
            seed += 1
            yield f"{method} {causal}", diagnose(seed, method, {"length": 700}, audit=0, is_causal=causal)
    yield "auto as it comes", attend(110, None, {"length": 300}, is_causal=True)
    yield "auto beyond the crossover", attend(111, nf.Auto(crossover=512), {"length": 900}, is_causal=True)

    def of_partitions() -> Results:
        keys = inputs(112, batch=3, heads=1, length=900)[1].detach()[:, 0]
        partitions = (nf.KMeans(), nf.KMeans(2, 4), nf.Blocks(), nf.HashBuckets())
        return {f"{x}, {cells}": x.build(keys, cells) for x in partitions for cells in (7, 60, 300)}

    yield "partitions", of_partitions
    for method in (None, nf.Cells(segment=64, cell_size=8, probes=4), nf.Cells(segment=50, window=0, partition=nf.Blocks())):
        for dtype in (torch.float32, torch.bfloat16):
            for offload in (False, True):
                given = [x.detach() for x in inputs(113, 2, 4, 2300, kv_heads=2, dtype=dtype)]
                yield f"store {method} {dtype} {offload}", _store(method, given, offload)

    def of_modules() -> Results:
        torch.manual_seed(0)
        module = nf.nn.Attention(48, 4, num_kv_heads=2, method=nf.Cells(**small, segment=64)).to(device)
        x = torch.randn(2, 200, 48, generator=torch.Generator().manual_seed(3)).to(device)
        output, _ = module(x, is_causal=True)
        output.sum().backward()
        return {"output": output, **{name: weight.grad for name, weight in module.named_parameters()}}

    yield "nn.Attention", of_modules
    if importlib.util.find_spec("transformers") is not None:
        for method in (None, nf.Cells(segment=32, cell_size=8, probes=3), nf.TopK(k=6)):
            for cached in (False, True):
                yield f"generate {method} {cached}", _generate(method, cached, device)
    for theorem in ("tail", "median-of-means", "mean", "walks"):
        yield f"budget {theorem}", _budget(theorem)


def _search(index: Any, tensors: list[Any], offset: int | None) -> Callable[[], Results]:
    def run() -> Results:
        query, key, _ = (x[0] for x in tensors)
        built = index.build(key)
        scores, ids = built.search(query, 7, offset)
        bound = built.upper_bound(query, ids, offset)
        return {"scores": scores, "ids": ids, **({} if bound is None else {"bound": bound})}

    return run


def _store(method: Any, tensors: list[Any], offload: bool) -> Callable[[], Results]:
    import torch

    try:
        from nearfield.cells.cache import CellStore
    except ImportError:  # versions up to 0.1
        from nearfield.cache import CellStore

    def run() -> Results:
        query, key, value = tensors
        store = CellStore(method, audit=True, offload=offload)
        found = {}
        counts = torch.ones(2, 1500, dtype=torch.bool)
        counts[1, :40] = False
        store.append(key[:, :, :1500], value[:, :, :1500], counts)
        store.close()
        for step in range(1500, 2300, 100):
            store.append(key[:, :, step : step + 100], value[:, :, step : step + 100])
            found[f"several {step}"] = store.attend(query[:, :, step + 90 : step + 100])
            found[f"one {step}"] = store.attend(query[:, :, step + 99 : step + 100])
        store.crop(1700)
        store.append(key[:, :, 1700:1701], value[:, :, 1700:1701])
        store.select(torch.tensor([1, 0, 1], device=key.device))
        found["cropped"] = store.attend(query[[1, 0, 1], :, 1700:1701])
        found["keys"], found["error"] = store.keys, torch.stack([x.relative.mean() for x in store.errors])
        return found

    return run


def _generate(method: Any, cached: bool, device: str) -> Callable[[], Results]:
    def run() -> Results:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        from nearfield import hf

        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, **sizes)).to(device).eval()
        hf.register(method=method)
        model.set_attn_implementation("nearfield")
        import nearfield as nf

        cells = method if isinstance(method, nf.Cells) else nf.Cells(segment=32, probes=2)
        cache = hf.CellCache(cells, config=model.config) if cached else None
        prompt = torch.randint(50, (2, 120), generator=torch.Generator().manual_seed(4)).to(device)
        mask = torch.ones_like(prompt)
        mask[1, :9] = 0
        found = model.generate(
            prompt,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            past_key_values=cache,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return {"tokens": found.sequences, "logits": torch.stack(found.logits)}

    return run


def _budget(theorem: str) -> Callable[[], Results]:
    def run() -> Results:
        import nearfield as nf

        return {"budget": repr(nf.budget(4096, 0.1, 0.05, theorem=theorem))}

    return run


def record(path: Path, device: str) -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    found = {}
    # By number: how a method is printed may change.
    for number, (name, call) in enumerate(calls(device)):
        results = {"name": name.partition("(")[0], **call()}
        found[f"{number}, {name}"] = {key: x.detach().cpu() if isinstance(x, torch.Tensor) else x for key, x in results.items()}
    torch.save(found, path)
    print(f"{len(found)} calls, {sum(map(len, found.values()))} results")


def differences(one: dict[str, Results], two: dict[str, Results], tolerance: float) -> list[str]:
    import torch

    found = [] if len(one) == len(two) else [f"{len(one)} calls and {len(two)}"]
    for (name, then), now in zip(one.items(), two.values(), strict=False):
        for key in then.keys() | now.keys():
            a, b = then.get(key), now.get(key)
            if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                if a != b:
                    found.append(f"{name}, {key}: {a} and {b}")
                continue
            if a.dtype != b.dtype or a.shape != b.shape:
                found.append(f"{name}, {key}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}")
            elif not torch.equal(a.nan_to_num(nan=1.25e30), b.nan_to_num(nan=1.25e30)):
                off = (a.double() - b.double()).norm() / a.double().norm().clamp(min=1e-30)
                if not float(off) <= tolerance:
                    found.append(f"{name}, {key}: off by {float(off):.2g} of its norm")
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", help="a commit, a tag or a branch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tolerance", type=float, default=0.0, help="allowed difference, as a share of a result's norm")
    parser.add_argument("--record", type=Path, help="run the calls with the nearfield on the path, and keep the results here")
    parser.add_argument("--compare", type=Path, nargs=2, help="compare two such files")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record, arguments.device)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = arguments.compare or [folder / "then.pt", folder / "now.pt"]
        if not arguments.compare:
            if not arguments.against:
                parser.error("say what to compare with: --against COMMIT, or --compare FILE FILE")
            subprocess.run(["git", "worktree", "add", "--detach", folder / "then", arguments.against], cwd=ROOT, check=True)
            try:
                for place, file in ((folder / "then", files[0]), (ROOT, files[1])):
                    interpreted = "1" if arguments.device == "cpu" else "0"
                    environment = os.environ | {"PYTHONPATH": str(place), "TRITON_INTERPRET": interpreted}
                    command = [sys.executable, __file__, "--record", file, "--device", arguments.device]
                    subprocess.run(command, cwd=folder, env=environment, check=True)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", folder / "then"], cwd=ROOT, check=True)
        import torch

        then, now = (torch.load(file) for file in files)
        found = differences(then, now, arguments.tolerance)
    print(*found, sep="\n")
    print(f"{len(then)} calls, {sum(map(len, then.values()))} results: {len(found)} differ")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

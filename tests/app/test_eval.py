"""`nearfield eval`: losses, errors and costs are right, the choice is near the best, and the command writes it to a file."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

pytest.importorskip("transformers")

import transformers
from hf_models import GROUPED, VOCABULARY, model, tokens

import nearfield as nf
from nearfield import hf
from nearfield.app.cli import app
from nearfield.app.evaluate import measure, report
from nearfield.app.evaluate.measure import LayerErrors, attending, compared, measure_errors, measure_sensitivity, token_losses
from nearfield.app.evaluate.models import gguf_tokenizer, load_model
from nearfield.app.evaluate.run import Evaluation, SettingResult, evaluate, recommend
from nearfield.app.evaluate.settings import Geometry, Ladder, PastTopK, Setting, Trial, choose_budgets, usual_segment
from nearfield.hf.config import LayerConfig

PNG = b"\x89PNG\r\n\x1a\n"
TOKENS = 200


# Losses.


def scaled(name: str) -> Any:
    """Models that change the logits of their head."""
    if name == "capped":
        return model("gemma2", final_logit_softcapping=0.5)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.GraniteConfig(**GROUPED, logits_scaling=0.2)).eval()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "capped", "scaled"])
def test_losses_are_the_models_own(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    net = scaled(family) if family in ("capped", "scaled") else model(family)
    ids = tokens(1, TOKENS)
    monkeypatch.setattr(measure, "HEAD_BYTES", 8 * VOCABULARY * 23)  # 23 tokens at a time
    ticks: list[None] = []
    losses = token_losses(net, ids, lambda: ticks.append(None))
    with torch.no_grad():
        expected = F.cross_entropy(net(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    torch.testing.assert_close(losses, expected.double(), rtol=1e-5, atol=1e-5)
    assert len(ticks) == measure.ticks_per_pass(net) == 2


class NothingLarge(TorchDispatchMode):
    """No operator may return more than `limit` numbers."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            assert not isinstance(x, Tensor) or x.numel() <= self.limit, f"{func} made {tuple(x.shape)}"
        return out


def test_neither_masks_nor_logits_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    length = 4096
    net = model("llama", num_hidden_layers=1, hidden_size=8, vocab_size=5000, max_position_embeddings=length)
    monkeypatch.setattr(measure, "HEAD_BYTES", 8 << 20)
    ids = tokens(1, length)
    with attending(net, nf.Cells(segment=256)), NothingLarge(length * 512):
        assert token_losses(net, ids).isfinite().all()
    assert length * 512 < min(length * 5000, length**2)


def test_attention_is_put_back_even_after_an_error() -> None:
    net = model("llama")
    with pytest.raises(TypeError, match="method must be"), attending(net, "exact"):  # type: ignore[arg-type]
        pass
    assert net.config._attn_implementation == "sdpa"
    with pytest.raises(IndexError), attending(net, nf.Exact()):
        net(torch.tensor([[VOCABULARY]]))
    assert net.config._attn_implementation == "sdpa"


def test_excess_is_paired() -> None:
    exact = torch.rand(500, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 10
    same = compared(exact + 0.01, exact)
    assert same.excess == pytest.approx(math.exp(0.01) - 1)
    assert same.stderr < 1e-12
    assert same.perplexity == pytest.approx(math.exp(float(exact.mean()) + 0.01))
    shift = torch.where(torch.arange(500) % 2 == 0, 0.3, -0.1).double()
    assert compared(exact + shift, exact).stderr == pytest.approx(1.105 * 0.2 / math.sqrt(500), rel=1e-2)


def test_what_is_not_a_number_is_never_within_a_tolerance() -> None:
    fine, broken = torch.ones(9, dtype=torch.float64), torch.full((9,), torch.nan, dtype=torch.float64)
    for losses in (broken, torch.full_like(fine, 800.0)):
        assert compared(losses, fine).excess == compared(losses, fine).perplexity == math.inf
    first, second = compared(fine, fine), compared(broken, fine)
    for order in ([first, second], [second, first]):
        assert SettingResult(Setting("cells", nf.Cells()), order, 0.0).excess == math.inf


def test_one_method_at_a_time() -> None:
    net = model("llama")
    with attending(net, nf.Exact()), pytest.raises(RuntimeError, match="leave the outer one first"), attending(net, nf.TopK(3)):
        pass


def test_the_worst_text_counts() -> None:
    losses = torch.rand(50, dtype=torch.float64)
    texts = [compared(losses + more, losses) for more in (0.01, 0.02, 0.005)]
    assert SettingResult(Setting("cells", nf.Cells()), texts, 1.0).excess == pytest.approx(math.exp(0.02) - 1)


# What is compared.


def test_top_k_of_the_past_by_hand() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (2 * torch.randn(1, heads, 90, 8, generator=generator) for heads in (4, 2, 2))
    found = nf.estimate(query, key, value, is_causal=True, enable_gqa=True, method=PastTopK(5, 16, 3))
    read = 0
    for head, row in itertools.product(range(4), range(90)):
        scores = key[0, head // 2] @ query[0, head, row] / math.sqrt(8)
        own = row // 16 * 16
        past = sorted(range(3, own), key=lambda j: -float(scores[j]))[:5]
        near = sorted({*range(min(3, row + 1)), *range(own, row + 1), *past})
        read += len(near)
        torch.testing.assert_close(found.output[0, head, row], scores[near].softmax(0) @ value[0, head // 2, near])
    assert found.info["keys_per_query"] == pytest.approx(read / 360)
    everything = nf.attention(query, key, value, is_causal=True, enable_gqa=True, method=PastTopK(90, 16, 3))
    torch.testing.assert_close(everything, F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
    with pytest.raises(ValueError, match="needs is_causal=True"):
        nf.attention(query, key, value, enable_gqa=True, method=PastTopK(5))


def test_budgets_are_shares_of_the_past() -> None:
    geometry = Geometry(8192, 1024, 16, 16)
    rows = torch.arange(8192)
    past = (rows // 1024 * 1024 - 16).clamp(min=0)
    assert geometry.past == pytest.approx(float(past[past > 0].double().mean()))
    for budget, probes in ((0.04, 10), (0.07, 18), (0.10, 26)):
        share = float(past.clamp(max=16 * probes).sum() / past.sum())
        assert geometry.probes(budget) == probes
        assert geometry.share(16 * probes) == pytest.approx(share, rel=1e-6)
        assert share == pytest.approx(budget, abs=0.002)
        assert geometry.cells(budget).method == nf.Cells(16, probes, segment=1024, sinks=16)
        assert geometry.topk(budget).method == PastTopK(16 * probes, 1024, 16)
    assert geometry.share(geometry.probes(1.0) * 16) == 1.0
    assert [one.label for one in geometry.settings(("topk", "auto"), (0.1, 0.07))] == ["topk, 7%", "topk, 10%", "auto"]
    assert [usual_segment(n) for n in (256, 1000, 8191, 8192, 10**6)] == [32, 64, 512, 1024, 1024]


def test_cells_read_as_many_keys_as_top_k() -> None:
    """Up to 5%: cells differ a little in size."""
    geometry = Geometry(2048, 256, 16, 16)
    query, key, value = torch.randn(3, 1, 2, 2048, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    read = [
        nf.estimate(query, key, value, is_causal=True, method=setting.method).info["keys_per_query"]
        for setting in (geometry.cells(0.1), geometry.topk(0.1))
    ]
    assert read[0] == pytest.approx(read[1], rel=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Geometry(1500, 1024), "segment of at most 750"),
        (lambda: Geometry(1500, 16, 16), "sinks must be fewer than the 16 keys"),
        (lambda: Geometry(8192).probes(0.0), "more than 0%"),
        (lambda: Geometry(8192).settings(("cells", "lsh"), (0.1,)), "among cells, topk, auto; got lsh"),
        (lambda: usual_segment(100), "at least 256 tokens"),
        (lambda: evaluate(model("llama"), {}), "at least one text"),
        (
            lambda: evaluate(model("llama"), {"one": tokens(1, 256)}, config=LayerConfig({}, 3)),
            "for a model of 3 layers, but this one has 2",
        ),
    ],
)
def test_what_cannot_be_compared(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_a_config_is_measured_as_it_would_be_registered() -> None:
    one = nf.Cells(4, 2, segment=16, sinks=2)
    losses = []
    for method, prefill in ((one, None), (one, "shared"), (replace(one, share=128), None)):
        texts, config = {"one": tokens(1, 256)}, LayerConfig({1: method}, 2, prefill)
        found = evaluate(model("llama"), texts, budgets=(0.2,), config=config).results[-1]
        assert found.setting.kind == "config"
        losses.append(found.perplexities[0].perplexity)
    strict, shared, by_hand = losses
    assert shared == by_hand != strict


# Errors of heads.


def test_errors_are_those_of_the_layers_own_tensors() -> None:
    net, ids = model("llama"), tokens(1, TOKENS)
    method = nf.Cells(4, 2, segment=32, sinks=2)
    seen: list[tuple[Tensor, ...]] = []

    class Keep(nf.Method):
        def run(self, problem: Any, call: Any) -> Any:
            seen.append((problem.query, problem.key, problem.value))
            return nf.Exact().run(problem, call)

    with attending(net, Keep()):
        losses = token_losses(net, ids)
    found, exact = measure_errors(net, ids, [Setting("cells", method), Setting("topk", PastTopK(8, 32, 2))], 32)
    assert torch.equal(exact, losses)
    for layer, tensors in enumerate(seen):
        right = F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)[0, :, 32:]
        estimate = nf.estimate(*tensors, is_causal=True, enable_gqa=True, method=method)
        error = (estimate.output[0, :, 32:] - right).norm(dim=-1)
        torch.testing.assert_close(found.relative[0, layer], (error / right.norm(dim=-1)).mean(-1).double(), rtol=1e-3, atol=1e-6)
        squared = float(error.square().sum() / right.square().sum())
        assert float(found.squared[0, layer]) == pytest.approx(squared, rel=1e-3)
        assert float(found.keys[0, layer]) == pytest.approx(estimate.info["keys_per_query"])
    assert found.relative.shape == (2, 2, 4)
    assert found.all_keys == (TOKENS + 1) / 2


def test_windows_are_exact_anyway() -> None:
    net = model("gemma3")  # a window, then full attention
    found, _ = measure_errors(net, tokens(1, TOKENS), [Setting("cells", nf.Cells(4, 2, segment=32))], 32)
    assert found.relative[0].isnan().all(1).tolist() == [True, False]
    with pytest.raises(ValueError, match="without sliding windows"):
        measure_errors(model("mistral"), tokens(1, TOKENS), [Setting("cells", nf.Cells(4, 2, segment=32))], 32)
    chosen = evaluate(net, {"one": tokens(1, 256)}, budgets=(0.2,), tolerance=0.5).recommendation
    assert chosen is not None
    assert set(chosen.config.methods) == {1, "default"}


def test_layers_that_do_nothing_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    net = model("llama", num_hidden_layers=3)
    with torch.no_grad():
        net.model.layers[1].self_attn.o_proj.weight.zero_()
        net.model.layers[2].self_attn.o_proj.weight.mul_(0.1)
    found = measure_sensitivity(net, tokens(1, TOKENS), [0, 1, 2])
    assert float(found[1]) == pytest.approx(0.0, abs=1e-6)
    assert float(found[0]) > 5 * float(found[2]) > 0.0
    monkeypatch.setattr(measure, "NOISE", 0.1)  # effects grow with the square of an error
    again = measure_sensitivity(net, tokens(1, TOKENS), [0, 2])
    torch.testing.assert_close(again[[0, 2]], found[[0, 2]], rtol=0.1, atol=0.0)


# The choice.


def random_ladder(seed: int, layers: int = 4, rungs: int = 3) -> Ladder:
    generator = torch.Generator().manual_seed(seed)
    keys = (torch.rand(rungs, layers, generator=generator) * 90).sort(0).values.double()
    effects = torch.rand(rungs, layers, generator=generator).sort(0, descending=True).values.double()
    return Ladder(effects, keys, 100.0)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_mixture_is_better_in_both(seed: int) -> None:
    ladder = random_ladder(seed)
    every = [ladder.mixture(rungs) for rungs in itertools.product(range(-1, 3), repeat=4)]
    path = ladder.mixtures()
    assert path[0].rungs == (-1,) * 4
    assert path[-1].rungs == (0,) * 4
    for mixture in path:
        assert not any(one.keys < mixture.keys and one.predicted < mixture.predicted for one in every)
    assert all(a.keys > b.keys and a.predicted <= b.predicted for a, b in itertools.pairwise(path))


def test_layers_that_a_config_does_not_name_attend_as_they_do_where_it_is_registered() -> None:
    found = evaluate(model("llama"), {"one": tokens(1, 256)}, methods=["auto"], config=LayerConfig({1: nf.TopK(3)}))
    assert found.results[-1].setting.method == {"default": nf.Auto(), 1: nf.TopK(3)}


def test_layers_that_cannot_be_replaced_cost_nothing() -> None:
    ladder = random_ladder(0)
    ladder.keys[:, 2] = ladder.effects[:, 2] = torch.nan
    path = ladder.mixtures()
    assert all(mixture.rungs[2] == -1 and math.isfinite(mixture.keys) for mixture in path)
    assert path[0].keys == 100.0


def test_each_layer_gets_the_rung_that_was_chosen_for_it() -> None:
    ladder = [Setting("cells", nf.Cells(probes=1), 0.1), Setting("cells", nf.Cells(probes=5), 0.5)]
    squared = torch.tensor([[0.01, 1.0, 9.0, torch.nan], [0.005, 0.1, 5.0, torch.nan]])
    keys = torch.tensor([[10.0], [50.0]]).expand(2, 4).masked_fill(squared.isnan(), torch.nan)
    effects: dict[tuple[Any, int], float] = {
        (ladder[rung].method, layer): float(squared[rung, layer]) for rung in range(2) for layer in range(3)
    }

    class Passes:
        def sensitivity(self, layers: Any) -> Tensor:
            assert layers == [0, 1, 2]
            return torch.tensor([1.0, 1.0, 1.0, torch.nan])

        def result_of(self, setting: Setting) -> SettingResult:
            assert isinstance(setting.method, dict)
            excess = sum(effects.get((method, layer), 0.0) for layer, method in setting.method.items())
            return SettingResult(setting, [measure.Perplexity(1.0, excess, 0.0)], 0.0)

    found = recommend(Passes(), ladder, LayerErrors(squared[..., None], keys, squared, 100.0), 0.3, [])
    assert found.chosen.mixture.rungs == (0, 1, -1, -1)
    assert found.chosen.mixture.keys == pytest.approx((10 + 50 + 100) / 3)
    assert found.config.methods == {"default": nf.Exact(), 0: ladder[0].method, 1: ladder[1].method, 2: nf.Exact()}


@pytest.mark.parametrize("scale", [0.01, 0.3, 5.0])
def test_the_choice_is_measured_and_near_the_best(scale: float) -> None:
    """However far off the predictions are, as long as their order is right."""
    ladder, asked = random_ladder(7, layers=12), []

    def verify(rungs: tuple[int, ...]) -> float:
        asked.append(rungs)
        return scale * ladder.mixture(rungs).predicted ** 1.5

    chosen, trials = choose_budgets(ladder, 0.4, verify)
    assert chosen.excess <= 0.4
    assert len(asked) == len(trials) - 1 <= 7
    tried = trials[1:]
    for i, one in enumerate(tried):  # each trial lies between what has passed and what has failed
        assert all((later.mixture.keys < one.mixture.keys) == (one.excess <= 0.4) for later in tried[i + 1 :])
    best = min(mixture.keys for mixture in ladder.mixtures() if scale * mixture.predicted**1.5 <= 0.4)
    assert chosen.mixture.keys <= best + 5.0


def test_exact_where_nothing_else_does_and_alike_where_that_is_cheaper() -> None:
    ladder = random_ladder(1)
    chosen, _ = choose_budgets(ladder, 0.004, lambda rungs: 1.0)
    assert chosen.mixture.rungs == (-1,) * 4
    alike = Trial(ladder.mixture((1,) * 4), 0.003)
    assert choose_budgets(ladder, 0.004, lambda rungs: 1.0, [alike])[0] is alike


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer that knows the words w0, w1, ..., and two texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("eval")
    model("llama", max_position_embeddings=512).save_pretrained(folder / "model")
    words = {"?": 0, **{f"w{i}": i + 1 for i in range(VOCABULARY - 1)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder / "model")
    for name, step in (("one.txt", 7), ("two.txt", 11)):
        (folder / name).write_text(" ".join(f"w{step * i * i % 89}" for i in range(300)))
    return folder


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["eval", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.mark.long
def test_the_command_hands_over_a_config_that_does_what_it_says(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "found"
    small = ("--methods", "cells,topk", "--budgets", "20,40", "--cell-size", "4", "--sinks", "2", "--device", "cpu")
    given = (folder / "model", folder / "one.txt", folder / "two.txt", *small)
    code, printed = invoke(*given, "--tolerance", "2%", "--ladder", "10,60", "--out", out)
    assert code == 0
    for word in ("cells, 20%", "topk, 40%", "by layer", "--tokens 8,192 is more than", "300 tokens", "hf.register(config="):
        assert word in printed, word
    assert (out / "eval.png").read_bytes().startswith(PNG)
    saved = json.loads((out / "eval.json").read_text())
    assert saved["environment"]["dtype"] == "float32"
    assert [len(one["relative_error_by_layer_and_head"] or []) for one in saved["settings"]] == [0, 2, 2, 2, 2]
    chosen = saved["recommendation"]
    assert max(chosen["excess"]) <= 0.02
    assert chosen["keys_per_query"] == min(x["keys_per_query"] for x in chosen["trials"] if x["excess"] <= 0.02)
    assert chosen["keys_per_query"] < saved["settings"][0]["keys_per_query"]

    net, tokenizer = load_model(folder / "model")
    ids = tokenizer((folder / "two.txt").read_text(), return_tensors="pt")["input_ids"]
    hf.register("nearfield-chosen", config=out / "config.json")
    net.set_attn_implementation("nearfield-chosen")
    assert float(token_losses(net, ids).mean().exp()) == pytest.approx(chosen["perplexity"][1], rel=1e-6)

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    code, printed = invoke(*given, "--methods", "cells,auto", "--config", out / "config.json", "--out", tmp_path / "again")
    assert code == 0
    assert "pip install 'nearfield[plots]'" in printed
    assert not (tmp_path / "again" / "eval.png").exists()
    again = json.loads((tmp_path / "again" / "eval.json").read_text())
    assert [one["label"] for one in again["settings"]] == ["exact", "cells, 20%", "cells, 40%", "auto", "config"]
    assert again["settings"][-2]["excess"] == pytest.approx([0.0, 0.0], abs=1e-6)  # auto is exact for so short a text
    assert again["settings"][-1]["perplexity"] == pytest.approx(chosen["perplexity"], rel=1e-6)
    assert again["recommendation"] is None
    assert not (tmp_path / "again" / "config.json").exists()


@pytest.mark.long
def test_tune_is_the_choice_of_eval_alone(folder: Path, tmp_path: Path) -> None:
    small = ("--ladder", "10,60", "--cell-size", "4", "--sinks", "2", "--device", "cpu", "--out", str(tmp_path))
    result = CliRunner().invoke(app, ["tune", str(folder / "model"), str(folder / "one.txt"), "--tolerance", "2", *small])
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "eval.json").read_text())
    assert {one["label"].partition(",")[0] for one in saved["settings"]} <= {"exact", "cells"}
    assert max(saved["recommendation"]["excess"]) <= 0.02
    assert "hf.register(config=" in " ".join(result.output.split())
    hf.register("nearfield-tuned", config=tmp_path / "config.json")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "one.txt"), "give the folder of one or a .gguf file"),
        (("model", "nothing.txt"), "not a text file in UTF-8"),
        (("model", "one.txt", "--tolerance", "many"), "--tolerance must be between 0 and 100 per cent, got 'many'"),
        (("model", "one.txt", "--budgets", "7,-1"), "got '-1'"),
        (("model", "one.txt", "--methods", "lsh"), "among cells, topk, auto; got lsh"),
        (("model", "one.txt", "--tokens", "50"), "at least 256 tokens"),
        (("model", "one.txt", "--segment", "256"), "segment of at most 150"),
        (("model", "one.txt", "--dtype", "int8"), "--dtype must be one of"),
        (("model", "one.txt", "--config", "nothing.json"), "is not a file; `nearfield tune"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    paths = [folder / word if word.endswith(".txt") or word in ("model", "nothing") else word for word in arguments]
    code, printed = invoke(*paths, "--out", folder / "unused")
    assert code == 2
    # Rich breaks lines in a box.
    assert message in printed.replace("│ │ ", "").replace("│", "")
    assert not (folder / "unused").exists()


def test_what_was_measured_is_json_whatever_it_is(tmp_path: Path) -> None:
    numbers = [0.00123456789012345, 0.002345678901234568, math.nan, math.inf, 17.25]
    geometry = Geometry(512, 64)
    perplexities = [measure.Perplexity(x, x, x) for x in numbers]
    exact = SettingResult(Setting("exact", nf.Exact()), perplexities, 1.0, keys=256.5)
    found = Evaluation([str(x) for x in numbers], geometry, 2, exact, [], None)
    path = report.save(found, {"model": "some"}, tmp_path)
    assert json.loads(path.read_text())["settings"][0]["perplexity"] == [*numbers[:2], None, None, numbers[4]]
    assert '"excess": [0.00123456789012345, 0.002345678901234568, null, null, 17.25]' in path.read_text()


def test_of_several_gguf_files_one_must_be_named(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=r"2 GGUF files; name one of them, such as .*a\.gguf"):
        load_model(tmp_path)


def test_a_model_that_is_damaged_or_not_whole_is_no_model_that_is_not_there(folder: Path, tmp_path: Path) -> None:
    """Nobody is sent to download what is there."""
    net, _ = load_model(folder / "model")
    half = (folder / "model" / "config.json").read_text()[:100]
    for name, content in (("config.json", half), ("config.json", ""), ("model.safetensors", None), ("model-00002", None)):
        broken = tmp_path / "broken"
        shutil.copytree(folder / "model", broken)
        if name == "model-00002":
            (broken / "model.safetensors").unlink()
            net.save_pretrained(broken, max_shard_size="20KB")
        (path,) = broken.glob(f"{name}*")
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
        with pytest.raises(
            OSError, match=r"cannot be read \(.*the download is incomplete or damaged: remove the folder"
        ) as raised:
            load_model(broken)
        assert "--download" not in str(raised.value)
        shutil.rmtree(broken)
    with pytest.raises(FileNotFoundError, match="or allow a download with --download"):
        load_model("no-such/model")


@pytest.mark.parametrize(("said", "added"), [(True, True), (False, False), (None, False)])
def test_a_gguf_file_says_whether_texts_begin_with_a_token(
    said: bool | None, added: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers does not look. The package that does is not among what tests need, so a stub says it."""
    field = None if said is None else SimpleNamespace(contents=lambda: said)
    stub: Any = ModuleType("gguf")
    stub.GGUFReader = lambda path: SimpleNamespace(get_field={"tokenizer.ggml.add_bos_token": field}.__getitem__)
    monkeypatch.setitem(sys.modules, "gguf", stub)
    found = SimpleNamespace(add_bos_token=False)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder, gguf_file, **_: found)
    assert gguf_tokenizer(tmp_path / "tiny.gguf") is found
    assert found.add_bos_token is added

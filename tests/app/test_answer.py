"""`nearfield tune --cache`: losses, errors and costs of steps are those of a cache, and the choice reaches the cache."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

pytest.importorskip("transformers")

import transformers
from hf_models import VOCABULARY, model, tokens

import nearfield as nf
from nearfield import hf
from nearfield.app.cli import app
from nearfield.app.evaluate import answer, command
from nearfield.app.evaluate.answer import Prompt, evaluate_answers
from nearfield.app.evaluate.measure import Perplexity, attending, ticks_per_pass, token_losses
from nearfield.app.evaluate.models import load_model
from nearfield.app.evaluate.report import save_config, sentence
from nearfield.app.evaluate.run import Evaluation, Silent
from nearfield.app.evaluate.settings import FEWEST_GROUPED, AnswerGeometry, Setting, half_cell_size
from nearfield.cells.cache.store import CellStore
from nearfield.hf.cache import UNGROUPED
from nearfield.hf.config import LayerConfig, read_config

WRITTEN = 150
TOKENS = FEWEST_GROUPED + 200 + WRITTEN
FEW, SMALL = nf.Cells(probes=3), nf.Cells(8, 5)


def net(family: str = "llama", **changes: Any) -> Any:
    """A model whose heads are sharp enough for cells to matter."""
    made = model(family, max_position_embeddings=4096, **changes)
    with torch.no_grad():
        for part in made.modules():
            if hasattr(part, "q_proj"):
                part.q_proj.weight.mul_(20.0)
    return made


def steps_of_a_cache(made: Any, ids: Tensor, method: Any) -> Tensor:
    """Losses of the written tokens, each a step of its own, after a prompt that was read exactly."""
    cache = hf.CellCache(method, config=made.config, group_from=0)
    start, states = ids.shape[1] - WRITTEN - 1, []
    with torch.no_grad(), attending(made, nf.Exact()):
        made(ids[:, :start], past_key_values=cache)
        for place in range(start, ids.shape[1] - 1):
            states.append(made(ids[:, place : place + 1], past_key_values=cache).logits[0, 0])
    return F.cross_entropy(torch.stack(states), ids[0, start + 1 :], reduction="none").double()


# Losses.


@pytest.mark.parametrize("family", ["llama", "gemma3", "lfm2"])
def test_losses_are_those_of_a_cache_that_answers_step_by_step(family: str) -> None:
    made, ids = net(family), tokens(1, TOKENS)
    prompt = Prompt(made, ids, WRITTEN, [None, 8])
    exact = token_losses(made, ids)[-WRITTEN:]
    # A window, or a state that is changed in place; then full attention.
    assert list(prompt.grouped) == ([0, 1] if family == "llama" else [1])
    for _ in range(2):  # a pass leaves everything as it was
        for method in (nf.Exact(), FEW, SMALL):
            found = prompt.losses(made, {layer: prompt.store(layer, method) for layer in prompt.grouped})
            expected = exact if isinstance(method, nf.Exact) else steps_of_a_cache(made, ids, method)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert isinstance(method, nf.Exact) or (found - exact).abs().max() > 1e-2
    mixture = {0: nf.Exact(), 1: FEW}
    mixed = prompt.losses(made, {layer: prompt.store(layer, mixture[layer]) for layer in prompt.grouped})
    torch.testing.assert_close(mixed, steps_of_a_cache(made, ids, mixture), rtol=1e-4, atol=1e-4)


def stateful() -> Any:
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1))


def unregistered() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=1, n_head=2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: net("mistral"), "no layer of MistralForCausalLM keeps all of its keys"),
        (stateful, "no layer of MambaForCausalLM keeps all of its keys"),
        (unregistered, "the layers of BloomForCausalLM do not leave the keys .* give another model"),
    ],
)
def test_models_whose_layers_take_no_cells_are_refused(make: Any, message: str) -> None:
    made = make().eval()
    with pytest.raises(ValueError, match=message):
        Prompt(made, tokens(1, TOKENS), WRITTEN, [None])


def test_an_exact_cache_reads_all_keys() -> None:
    made, ids = net(), tokens(1, TOKENS)
    torch.testing.assert_close(steps_of_a_cache(made, ids, nf.Exact()), token_losses(made, ids)[-WRITTEN:], rtol=1e-4, atol=1e-4)


# What is measured.


class Ticks(Silent):
    def __init__(self) -> None:
        self.planned = self.done = 0

    def start(self, steps: int) -> None:
        self.planned = steps

    def step(self) -> None:
        self.done += 1


def evaluated(made: Any, texts: Sequence[Tensor], tolerance: float = 0.02, **options: Any) -> Evaluation:
    named = {str(number): ids for number, ids in enumerate(texts)}
    return evaluate_answers(made, named, tokens=TOKENS, written=WRITTEN, tolerance=tolerance, **options)


@pytest.fixture(scope="module")
def found() -> tuple[Any, Tensor, Evaluation, Ticks]:
    made, ids, ticks = net(), tokens(1, TOKENS), Ticks()
    return made, ids, evaluated(made, [ids], budgets=(0.1, 0.3), ladder=(0.05, 0.6), progress=ticks), ticks


def test_errors_are_those_of_steps(found: tuple[Any, Tensor, Evaluation, Ticks]) -> None:
    """A store of the layer's own keys, and each step by itself."""
    made, ids, measured, _ = found
    seen: dict[int, list[Tensor]] = {}

    class Keep(nf.Method):
        def run(self, problem: Any, call: Any) -> Any:
            seen.setdefault(len(seen), [problem.query, problem.key, problem.value])
            return nf.Exact().run(problem, call)

    with attending(made, Keep()):
        token_losses(made, ids)
    start = TOKENS - WRITTEN - 1
    for setting in measured.results:
        assert setting.errors is not None
        for layer, (query, key, value) in seen.items():
            cells = CellStore(setting.setting.method, group_from=0)
            cells.append(key[:, :, :start], value[:, :, :start])
            cells.close(query=query[:, :, :start])
            off = []
            for place in range(start, TOKENS - 1):
                now = slice(place, place + 1)
                cells.append(key[:, :, now], value[:, :, now])
                own = query[:, :, now]
                right = F.scaled_dot_product_attention(own, key[:, :, : place + 1], value[:, :, : place + 1], enable_gqa=True)
                off.append(((cells.attend(own) - right).norm(dim=-1) / right.norm(dim=-1))[0, :, 0])
            torch.testing.assert_close(setting.errors[layer], torch.stack(off).mean(0).double(), rtol=1e-3, atol=1e-5)


def keys_of_a_step(method: Any) -> float:
    """What a step by this method reads, mean over the answer, by the cells of a cache with as many keys."""
    start = TOKENS - WRITTEN - 1
    new = sum(place + 1 - start for place in range(start, TOKENS - 1)) / WRITTEN
    if isinstance(method, nf.Exact):
        return start + new
    cache = CellStore(method, group_from=0)
    keys = torch.randn(1, 2, start, 8, generator=torch.Generator().manual_seed(0))
    cache.append(keys, keys)
    cache.close()
    cells, opened = cache.cells, min(cache.cells, cache.probes)
    assert cells == round(cache.closed / (method.cell_size or 16))
    # The end that is in no cell, the first keys, opened cells of the mean size, and a centroid, variances and a mean value.
    return start - cache.closed + 16 + opened * cache.closed / cells + 1.5 * cells + new


def test_what_a_step_reads_is_counted(found: tuple[Any, Tensor, Evaluation, Ticks]) -> None:
    measured = found[2]
    for result in (measured.exact, *measured.results):
        assert result.keys == pytest.approx(keys_of_a_step(result.setting.method))


def test_progress_ends_with_what_it_was_said_to_be(found: tuple[Any, Tensor, Evaluation, Ticks]) -> None:
    made, _, measured, ticks = found
    assert measured.recommendation is not None
    steps = math.ceil(WRITTEN / 128)
    # The prompt; errors, exact, five settings; and of seven trials those that there were.
    trials = len({trial.mixture.rungs for trial in measured.recommendation.trials}) - 1
    most = (1 + steps * (2 + len(measured.results) + 7)) * ticks_per_pass(made)
    assert ticks.planned == most
    assert (1 + steps * (2 + len(measured.results))) * ticks_per_pass(made) <= ticks.done <= most
    assert trials <= 7 + len(measured.results)


def test_the_choice_holds_in_a_cache(found: tuple[Any, Tensor, Evaluation, Ticks]) -> None:
    made, ids, measured, _ = found
    chosen = measured.recommendation
    assert chosen is not None
    assert chosen.config.methods == {}
    assert chosen.config.cache is not None
    assert chosen.result.excess <= 0.02
    by_layer = [chosen.ladder[rung].method if rung >= 0 else nf.Exact() for rung in chosen.chosen.mixture.rungs]
    assert chosen.config.cache == {"default": nf.Exact(), **dict(enumerate(by_layer))}
    assert chosen.chosen.mixture.keys == pytest.approx(sum(map(keys_of_a_step, by_layer)) / len(by_layer))
    assert chosen.chosen.mixture.keys < (measured.exact.keys or 0.0)
    exact = float(token_losses(made, ids)[-WRITTEN:].mean())
    losses = steps_of_a_cache(made, ids, dict(chosen.config.cache))
    assert math.expm1(float(losses.mean()) - exact) == pytest.approx(chosen.result.excess, abs=1e-4)


def test_where_nothing_is_good_enough_all_steps_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    # Some mixture is better than exact attention by chance, so here whatever changes a loss does harm.
    monkeypatch.setattr(answer, "compared", lambda ours, exact: Perplexity(1.0, float((ours - exact).abs().max()), 0.0))
    measured = evaluated(net(), [tokens(1, TOKENS)], tolerance=1e-4, budgets=(0.05,), ladder=(0.1,))
    assert "exact attention only. A larger --tolerance, or larger budgets on the --ladder" in sentence(measured)
    assert measured.recommendation is not None
    assert measured.recommendation.config.cache is not None
    assert set(measured.recommendation.config.cache.values()) == {nf.Exact()}


def test_of_several_texts_the_worst_one_counts() -> None:
    texts = [tokens(1, TOKENS), tokens(1, TOKENS + 50).flip(1)]
    both = evaluated(net(), texts, budgets=(0.1,), ladder=(0.3,))
    alone = [evaluated(net(), [ids[:, :TOKENS]], budgets=(0.1,), ladder=(0.3,)) for ids in texts]
    for number, result in enumerate(both.results):
        each = [one.results[number] for one in alone]
        assert result.excess == pytest.approx(max(one.excess for one in each), abs=1e-5)
        assert result.errors is not None
        torch.testing.assert_close(result.errors, torch.stack([one.errors for one in each if one.errors is not None]).mean(0))


def test_a_config_keeps_what_it_says_of_the_other_part(found: tuple[Any, Tensor, Evaluation, Ticks], tmp_path: Path) -> None:
    measured, path = found[2], tmp_path / "config.json"
    answers = measured.recommendation
    assert answers is not None
    prompts = replace(answers, config=LayerConfig({0: nf.Cells(4, 2)}, 2))
    kept = None
    for chosen, tokens_read in ((answers, 1), (prompts, 2), (answers, 3), (prompts, 4)):
        geometry = replace(measured.geometry, tokens=TOKENS + tokens_read)
        save_config(replace(measured, geometry=geometry, recommendation=chosen), {"model": "some"}, path, kept)
        kept = read_config(path)
        assert kept.cache == answers.config.cache
        assert kept.methods == ({} if tokens_read == 1 else prompts.config.methods)
        assert kept.cache_about["tokens"] == TOKENS + (1 if tokens_read < 3 else 3)
        assert tokens_read == 1 or kept.about["tokens"] == TOKENS + (2 if tokens_read < 4 else 4)


# Sizes.


def test_budgets_are_shares_of_the_prompt() -> None:
    geometry = AnswerGeometry(8192, 512)
    assert geometry.prompt == 7679
    assert geometry.all_keys == sum(range(7680, 8192)) / 512
    cells = {setting.kind: setting for setting in geometry.settings([0.1])}
    assert cells["cells"].method == nf.Cells(None, 48)
    assert cells["small cells"].method == nf.Cells(8, 96)
    assert half_cell_size(131_072) * 2 == pytest.approx(131_072 / cells_of_a_cache(131_072), rel=0.05)
    assert [one.label for one in geometry.settings([0.3, 0.1, 0.1])] == [
        "cells, 10%",
        "cells, 30%",
        "small cells, 10%",
        "small cells, 30%",
    ]


def cells_of_a_cache(count: int) -> int:
    store, keys = CellStore(nf.Cells(partition=nf.Blocks()), group_from=0), torch.zeros(1, 1, count, 1)
    store.append(keys, keys)
    store.close()
    return store.cells


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: AnswerGeometry(8192, 0), "written must be 1 to 1,000 tokens, got 0"),
        (lambda: AnswerGeometry(8192, 1001), "1 to 1,000 tokens, got 1,001"),
        (lambda: AnswerGeometry(1000, 512), "leave a prompt of 487, but a cache has cells from"),
        (lambda: AnswerGeometry(FEWEST_GROUPED + 512, 512), f"leave a prompt of {FEWEST_GROUPED - 1:,}, but"),
        (lambda: AnswerGeometry(8192).settings([0.0]), "more than 0% and at most 100%, got 0%"),
        (lambda: evaluate_answers(net(), {}, tokens=4096), "at least one text"),
    ],
)
def test_what_cannot_be_compared(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_fewest_keys_have_a_cell() -> None:
    assert cells_of_a_cache(FEWEST_GROUPED - 1) == 0 < cells_of_a_cache(FEWEST_GROUPED)
    assert AnswerGeometry(FEWEST_GROUPED + 513, 512).prompt == FEWEST_GROUPED


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a tokenizer that knows the words w0, w1, ..., and a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("answer")
    net().save_pretrained(folder / "model")
    words = {"?": 0, **{f"w{i}": i + 1 for i in range(VOCABULARY - 1)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder / "model")
    (folder / "one.txt").write_text(" ".join(f"w{7 * i * i % 89}" for i in range(1600)))
    return folder


def config_of(tmp_path: Path, **entries: Any) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"format": "nearfield-layers", "version": 1, **entries}))
    return path


def tune(folder: Path, out: Path, *more: str) -> tuple[int, str]:
    given = ["tune", str(folder / "model"), str(folder / "one.txt"), "--device", "cpu", "--out", str(out), *more]
    result = CliRunner().invoke(app, given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.replace("│", "").split())


EXACT = {"method": "Exact"}
CACHE = ("--cache", "--written", "100", "--ladder", "10,60", "--tolerance", "2")
PROMPTS = ("--tokens", "512", "--ladder", "10,60", "--cell-size", "4", "--tolerance", "2")


@pytest.mark.long
def test_the_command_adds_to_a_config_what_a_cache_reads(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, printed = tune(folder, tmp_path, *CACHE)
    assert code == 0, printed
    for word in ("default", "small cells, 7%", "by layer", "CellCache(config=model.config, group_from=0)", "up to 8,192 keys"):
        assert word in printed, word
    assert (tmp_path / "cache.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    saved = json.loads((tmp_path / "cache.json").read_text())
    assert (saved["tokens"], saved["written"]) == (1600, 100)
    chosen = saved["recommendation"]
    assert max(chosen["excess"]) <= 0.02
    first = read_config(tmp_path / "config.json")
    assert first.methods == {}
    assert first.cache is not None
    assert first.cache_about["model"] == "model"

    made, tokenizer = load_model(folder / "model")
    ids = tokenizer((folder / "one.txt").read_text(), return_tensors="pt")["input_ids"]
    hf.register("nearfield-answers", nf.Exact())
    made.set_attn_implementation("nearfield-answers")
    losses = []
    for given in (tmp_path / "config.json", str(tmp_path / "config.json")):
        cache = hf.CellCache(given, config=made.config, group_from=0)
        expected = [UNGROUPED if first.cache[number] == nf.Exact() else first.cache[number] for number in range(2)]
        assert [layer.store.method for layer in cache.layers] == expected
        with torch.no_grad():
            made(ids[:, :1499], past_key_values=cache)
            # So many rows at a time are steps of an answer.
            logits = [made(part, past_key_values=cache).logits[0] for part in ids[:, 1499:-1].split(50, 1)]
        losses.append(F.cross_entropy(torch.cat(logits), ids[0, 1500:]))
    assert losses[0] == losses[1]
    assert float(losses[0].exp()) == pytest.approx(chosen["perplexity"][0], rel=1e-4)

    code, printed = tune(folder, tmp_path, *PROMPTS)
    assert code == 0, printed
    second = read_config(tmp_path / "config.json")
    assert second.cache == first.cache
    assert second.cache_about == first.cache_about
    assert set(second.methods) == {0, 1, "default"}
    assert second.about["tokens"] == 512
    code, printed = tune(folder, tmp_path, *CACHE)
    third = read_config(tmp_path / "config.json")
    assert code == 0
    assert (third.methods, third.about, third.cache) == (second.methods, second.about, first.cache)

    hf.register("nearfield-both", config=tmp_path / "config.json")
    made.set_attn_implementation("nearfield-both")
    both = hf.CellCache(config=made.config)
    assert [layer.store.method for layer in both.layers] == [layer.store.method for layer in cache.layers]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--written", "100"), "--written 100 is for the steps of an answer; give --cache, too, or leave it out"),
        (("--cache", "--segment", "64"), "--segment 64 is for prompts, and --cache chooses for the steps of an answer"),
        (("--cache", "--cell-size", "8"), "--cell-size 8 is for prompts"),
        (("--cache", "--sinks", "4"), "--sinks 4 is for prompts"),
        (("--cache", "--written", "2000"), "1 to 1,000 tokens, got 2,000"),
        (("--cache", "--tokens", "1000"), "leave a prompt of 487"),
        (("--cache", "--tolerance", "many"), "--tolerance must be between 0 and 100 per cent, got 'many'"),
        (("--cache", "--ladder", "7,-1"), "got '-1'"),
    ],
)
def test_the_command_says_what_is_wrong(more: tuple[str, ...], message: str, folder: Path, tmp_path: Path) -> None:
    code, printed = tune(folder, tmp_path / "unused", *more)
    assert code == 2
    assert message in printed
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("options", [CACHE, PROMPTS], ids=["cache", "prompts"])
@pytest.mark.parametrize(
    ("there", "message"),
    [
        ("{", "cannot be read"),
        ('{"model_type": "llama"}', 'must be an object with "format": "nearfield-layers"'),
        ({"about": {"model": "gpt"}, "layers": {}}, "is for gpt, not for model"),
        ({"cache": {"about": {"model": "gpt"}}}, "is for gpt, not for model"),
        ({"num_hidden_layers": 3, "cache": {}}, "is for a model of 3 layers, but model has 2"),
        ({"layers": {"0": EXACT, "2": EXACT}}, "names layer 2, but model has 2 layers, counted from 0"),
        ({"cache": {"layers": {"7": EXACT}}}, "names layer 7, but model has 2 layers"),
    ],
)
def test_a_config_of_another_model_stays_as_it_is(
    there: Any, message: str, options: tuple[str, ...], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("evaluate.command.evaluate", "evaluate.answer.evaluate_answers"):
        monkeypatch.setattr(f"nearfield.app.{name}", lambda *x, **more: pytest.fail("work began"))
    path = config_of(tmp_path, **there) if isinstance(there, dict) else tmp_path / "config.json"
    if isinstance(there, str):
        path.write_text(there)
    before = path.read_bytes()
    code, printed = tune(folder, tmp_path, *options)
    assert code == 2
    assert message in printed
    assert "give another folder with --out" in printed
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_in_the_place_of_a_config_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    code, printed = tune(folder, tmp_path, *CACHE)
    assert code == 2
    assert "is not a file" in printed
    assert "give another folder with --out" in printed


@pytest.mark.parametrize("meanwhile", ["prompts", "another model"])
def test_what_another_run_has_written_meanwhile_is_kept(
    meanwhile: str, found: tuple[Any, Tensor, Evaluation, Ticks], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measuring(*arguments: Any, **options: Any) -> Evaluation:
        about = {"model": "model" if meanwhile == "prompts" else "gpt"}
        config_of(tmp_path, about=about, layers={"1": {"method": "TopK", "k": 3}})
        return found[2]

    monkeypatch.setattr(answer, "evaluate_answers", measuring)
    monkeypatch.setattr(command, "save_plot", lambda *arguments: None)
    code, printed = tune(folder, tmp_path, *CACHE)
    assert (tmp_path / "cache.json").exists()
    made = read_config(tmp_path / "config.json")
    assert made.methods == {1: nf.TopK(3)}
    if meanwhile == "prompts":
        assert code == 0, printed
        assert found[2].recommendation is not None
        assert made.cache == found[2].recommendation.config.cache
    else:
        assert code == 2
        assert "is for gpt, not for model" in printed
        assert made.cache is None


# What a cache makes of a file.


def test_a_file_without_a_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="says nothing about a cache; `nearfield tune MODEL TEXT --cache` adds"):
        hf.CellCache(config_of(tmp_path, layers={"0": {"method": "Exact"}}))


def test_a_file_is_for_one_model(tmp_path: Path) -> None:
    path = config_of(tmp_path, num_hidden_layers=3, cache={"default": {"method": "Cells"}})
    with pytest.raises(ValueError, match="for a model of 3 layers, but this one has 2; make one for it with `nearfield tune"):
        hf.CellCache(path, config=model("llama").config)
    assert len(hf.CellCache(path, config=model("llama", num_hidden_layers=3).config).layers) == 3


def test_layers_that_a_file_does_not_name_have_cells(tmp_path: Path) -> None:
    cache = hf.CellCache(config_of(tmp_path, cache={"layers": {"1": {"method": "TopK", "k": 3}}}), config=model("llama").config)
    assert [layer.store.method for layer in cache.layers] == [nf.Cells(), nf.TopK(3)]
    assert Setting("cells", nf.Cells()) == Setting("cells", cache.layers[0].store.method)

"""examples/extend_context.py: its losses, its windows, its needles, and what is left of a run that ends early."""

from __future__ import annotations

import importlib
import json
import math
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("transformers")

from hf_models import model as small_model

import nearfield as nf

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("extend_context")


def tokens(count: int, seed: int = 0) -> Tensor:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


@pytest.fixture
def small(example: Any) -> tuple[Any, Any, Any]:
    """A model, texts and a plan of a second."""
    texts = example.Texts(tokens(400), tokens(600, 1), tokens(300, 2))
    return example.tiny_model(), texts, example.Plan(64, 512, (96,), 4, 1e-3, cases=2, windows=1, rounds=1)


def gradients(model: Any) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("rows", [1, 7, 40, 1000])
def test_losses_in_parts_are_those_of_all_at_once(rows: int, example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "HEAD_ROWS", rows)
    model, ids = example.tiny_model(), tokens(41)
    plain = F.cross_entropy(model(ids[None], use_cache=False).logits[0, :-1], ids[1:].long(), reduction="none")
    ours = example.token_losses(model, ids)
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    plain.mean().backward()
    wanted = gradients(model)
    ours.mean().backward()
    torch.testing.assert_close(gradients(model), wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(example.token_losses(model, ids), ours)


def test_logits_exist_for_some_positions_at_a_time(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(example, "HEAD_ROWS", 16)
    model, seen = example.tiny_model(), []
    model.get_output_embeddings().register_forward_hook(lambda _, __, output: seen.append(output.shape[-2]))
    example.token_losses(model, tokens(100)).mean().backward()
    assert max(seen) == 16
    assert sum(seen) == 2 * 99  # once, and again for the gradient


def test_a_model_that_caps_its_logits_is_refused(example: Any) -> None:
    example.check_head(example.tiny_model())
    with pytest.raises(ValueError, match="caps its logits"):
        example.check_head(small_model("gemma2", final_logit_softcapping=0.01))


def test_every_token_is_in_one_window(example: Any) -> None:
    documents = [[1, 2, 3], [], [4, 5, 6, 7, 8], [9]]

    def encode(texts: list[str]) -> list[list[int]]:
        return [documents[int(text)] for text in texts]

    rows = example.encoded(encode, ["0", "1", "2", "3"], 0)
    stream = torch.cat(rows)
    assert stream.tolist() == [1, 2, 3, 0, 0, 4, 5, 6, 7, 8, 0, 9, 0]
    windows = example.packed(stream, 4)
    assert torch.cat(windows).equal(stream)
    assert [len(window) for window in windows] == [4, 4, 4, 1]
    assert [len(window) for window in example.whole_windows(stream, 4, "it")] == [4, 4, 4]
    assert torch.cat(example.encoded(encode, ["0", "3"], None)).tolist() == [1, 2, 3, 9]
    with pytest.raises(ValueError, match="it has 13 tokens, and a window 14; give more text"):
        example.whole_windows(stream, 14, "it")


def test_what_is_held_out_is_not_trained_on(example: Any) -> None:
    assert example.distinct(["a", "b", "a", " ", "c"], ["c", "d"]) == ["a", "b"]
    documents = [torch.full((size,), i) for i, size in enumerate((5, 4, 3, 2))]
    for needed, first in ((1, 3), (2, 3), (3, 2), (5, 2), (6, 1), (100, 1)):
        train, held_out = example.split_off(documents, needed)
        assert [int(x[0]) for x in (*train, *held_out)] == [0, 1, 2, 3]
        assert len(train) == first
    with pytest.raises(ValueError, match="one text cannot be both"):
        example.split_off(documents[:1], 1)


def test_texts_of_folders(example: Any, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, words in (("b/z.md", b"second"), ("b/a.txt", b"first"), ("b/c.txt", b"\xff"), ("b/d.bin", b"no text")):
        (tmp_path / name).write_bytes(words)
    (tmp_path / "own").write_text("own")
    assert example.read_texts([tmp_path / "own", tmp_path / "b", tmp_path / "b" / "z.md"]) == ["own", "first", "second"]
    with pytest.raises(ValueError, match="is not a text file in UTF-8"):
        example.read_texts([tmp_path / "b" / "c.txt"])


def test_the_slowest_pair_turns_as_far_as_before(example: Any) -> None:
    base, dim, factor = 100_000.0, 64, 8.0
    raised = example.raised_base(base, dim, factor)
    slowest, neighbours = (dim - 2) / dim, 0.0
    assert raised**-slowest * factor == pytest.approx(base**-slowest)
    assert raised**-neighbours == base**-neighbours == 1.0
    assert example.raised_base(base, dim, 0.5) == base


def test_the_model_turns_by_the_new_base(example: Any) -> None:
    model = example.tiny_model()
    before = model.base_model.rotary_emb.inv_freq.clone()
    found = example.lengthen(model, 1024)
    after = model.base_model.rotary_emb.inv_freq
    assert float(before[-1] / after[-1]) == pytest.approx(8.0, rel=1e-5)
    assert after[0] == before[0] == 1.0
    assert found == {"base_before": 10_000.0, "base": pytest.approx(10_000 * 8 ** (32 / 30)), "positions_before": 128}
    assert model.config.max_position_embeddings == 1024
    assert example.lengthen(model, 1024, base=5e6)["base"] == model.config.rope_parameters["rope_theta"] == 5e6


def test_positions_that_cannot_be_stretched(example: Any) -> None:
    with pytest.raises(ValueError, match="GPT2LMHeadModel has no rotary positions"):
        example.lengthen(small_model("gpt2"), 1024)
    model = example.tiny_model()
    model.config.rope_parameters["rope_type"] = "yarn"
    with pytest.raises(ValueError, match="stretched already"):
        example.lengthen(model, 1024)


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_a_needle_is_where_it_should_be(depth: float, example: Any) -> None:
    encode, hay = example.encoder(None), torch.zeros(500, dtype=torch.int32)
    ids, answer, place = example.hide(encode, hay, 300, depth, random.Random(1))
    assert len(ids) == 300
    words = bytes(ids.tolist()).decode()
    assert words.count(words[-answer:]) == 2  # told, and asked for
    assert words[place:].startswith("\n\nThe secret code of")
    assert answer == 6  # a space and five digits
    room = words.count("\0")
    assert place == round(depth * room)
    with pytest.raises(ValueError, match="give more of it"):
        example.hide(encode, hay, 600, depth, random.Random(1))


class Oracle(nn.Module):
    """Knows what comes next, but for one token so many before the end."""

    device = torch.device("cpu")

    def __init__(self, wrong: int | None) -> None:
        super().__init__()
        self.wrong = wrong

    def set_attn_implementation(self, name: str) -> None: ...

    def get_output_embeddings(self) -> nn.Module:
        return nn.Identity()

    def base_model(self, ids: Tensor, use_cache: bool) -> Any:
        following = ids.roll(-1, 1).long()
        if self.wrong is not None:
            following[0, -1 - self.wrong] += 1
        return SimpleNamespace(last_hidden_state=F.one_hot(following, 256).float())


@pytest.mark.parametrize(("wrong", "right"), [(None, True), (0, True), (1, False), (6, False), (7, True)])
def test_a_number_is_found_if_all_its_tokens_are(wrong: int | None, right: bool, example: Any) -> None:
    plan = example.Plan(64, 128, (100, 128), 1, 1e-3, cases=3)
    found: dict[str, Any] = {}
    example.find_needles(Oracle(wrong), "exact", example.encoder(None), tokens(300), plan, example.Clock(math.inf), found)
    assert {name: [row["found"] for row in rows] for name, rows in found.items()} == {"100": [right] * 3, "128": [right] * 3}
    places = [row["position"] for row in found["128"]]
    assert places == sorted(places)
    assert places[0] < 15 < places[1] < 35 < places[2]


def test_losses_by_position(example: Any) -> None:
    model, windows = example.tiny_model(), [tokens(129), tokens(129, 1)]
    found = example.loss_by_position(model, "exact", windows, example.Clock(math.inf))
    assert len(found) == example.BINS
    with torch.no_grad():
        plain = torch.stack([example.token_losses(model, window) for window in windows]).mean(0)
    assert found == pytest.approx(plain.view(example.BINS, -1).mean(1).tolist(), abs=1e-6)


def test_who_attends(example: Any) -> None:
    from nearfield.hf.register import registered_methods

    model = example.tiny_model()
    for way, name in (("cells", example.NAME), ("exact", "sdpa"), ("cpu", "sdpa")):
        with example.attending(model, way):
            assert model.config._attn_implementation == name
    assert registered_methods(example.NAME) == {"default": nf.Cells()}


def test_the_rate_rises_and_falls(example: Any) -> None:
    rates = [example.rate_at(step, 100, 1.0) for step in range(100)]
    assert rates[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[10] == 1.0
    assert 0.1 < rates[-1] < 0.11
    assert example.rate_at(0, 1, 1.0) == 1.0


def test_steps_that_fit(example: Any) -> None:
    assert [example.affordable(50, *given) for given in ((math.inf, 1.0), (60.0, 1.0), (10.0, 1.0), (-5.0, 1.0))] == [
        50,
        50,
        10,
        1,
    ]


def test_timing_a_step_leaves_the_weights(example: Any, small: Any) -> None:
    model, texts, plan = small
    before = [parameter.detach().clone() for parameter in model.parameters()]
    found = example.step_times(model, texts.train[:64], plan, example.Clock(math.inf))
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert set(found["seconds"]) == {"sdpa", "cells"}
    assert found["sdpa_over_cells"] == pytest.approx(found["seconds"]["sdpa"] / found["seconds"]["cells"])


def test_a_whole_run(example: Any, small: Any) -> None:
    model, texts, plan = small
    found: dict[str, Any] = {}
    stages: list[set[str]] = []
    assert example.run(model, example.encoder(None), texts, plan, found, lambda: stages.append(set(found)))
    assert len(found["training"]["losses"]) == 4
    for stage in ("before", "after"):
        assert set(found[stage]) == {"exact", "cells"}
        assert all(len(own["loss"]) == 16 and len(own["needles"]["96"]) == 2 for own in found[stage].values())
    assert found["stopped"] is None
    assert found["as_it_was"]["exact"]["loss"] != found["before"]["exact"]["loss"] != found["after"]["exact"]["loss"]
    first = [next(i for i, seen in enumerate(stages) if stage in seen) for stage in ("step", "before", "training", "after")]
    assert first == sorted(set(first))  # one after the other, each kept when it is done
    json.dumps(found, allow_nan=False)


def test_an_interrupted_run_keeps_what_it_has(example: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts, plan = small

    def interrupted(step: int, steps: int, rate: float) -> float:
        if step == 2:
            raise KeyboardInterrupt
        return rate

    monkeypatch.setattr(example, "rate_at", interrupted)
    found: dict[str, Any] = {}
    kept: list[str] = []
    assert example.run(model, example.encoder(None), texts, plan, found, lambda: kept.append(json.dumps(found)))
    last = json.loads(kept[-1])
    assert last["stopped"] == "interrupted"
    assert len(last["training"]["losses"]) == 2
    assert len(last["before"]["cells"]["needles"]["96"]) == 2
    assert "after" not in last


def test_an_interruption_before_training_has_nothing_to_save(example: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(example, "find_needles", interrupted)
    found: dict[str, Any] = {}
    assert not example.run(small[0], example.encoder(None), *small[1:], found, lambda: None)
    assert len(found["before"]["exact"]["loss"]) == 16


def test_the_time_is_kept(example: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    found: dict[str, Any] = {}
    assert not example.run(small[0], example.encoder(None), small[1], replace(small[2], minutes=1e-9), found, lambda: None)
    assert found["stopped"] == "the 1e-09 minutes were over"
    done: dict[str, Any] = {}
    example.train(small[0], "exact", [small[1].train[:64]], 5, small[2], example.Clock(0.0), done)
    assert done["losses"] == []


def test_a_loss_that_is_no_number_changes_nothing(example: Any, small: Any) -> None:
    model, texts, plan = small
    with torch.no_grad():
        model.base_model.norm.weight[0] = math.nan
    before = [parameter.detach().clone() for parameter in model.parameters()]
    done: dict[str, Any] = {}
    with pytest.raises(FloatingPointError, match=r"the loss is nan at step 1 of 4; lower --rate, which is 0\.001"):
        example.train(model, "exact", [texts.train[:64]], 4, plan, example.Clock(math.inf), done)
    torch.testing.assert_close(list(model.parameters()), before, equal_nan=True, rtol=0, atol=0)


def test_a_folder_appears_when_it_is_complete(example: Any, tmp_path: Path) -> None:
    class Broken:
        def save_pretrained(self, folder: Path) -> None:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        example.save(example.tiny_model(), Broken(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def run(example: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the example says when it exits with an error."""

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["extend_context.py", *map(str, arguments)])
        capsys.readouterr()  # what saving a model has said
        with pytest.raises(SystemExit) as stopped:
            example.main()
        assert stopped.value.code
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return said

    return run


def test_errors_are_one_line(run: Callable[..., str], tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    (tmp_path / "short.txt").write_text("a few words")
    (tmp_path / "other.txt").write_text("some others")
    text = ("--text", tmp_path / "short.txt", tmp_path / "other.txt")
    assert "there is no model at /nowhere" in run("--model", "/nowhere")
    assert "there is no text at /nowhere" in run("--text", "/nowhere")
    assert "the text to train on has 11 tokens, and a window 512; give more text" in run(*text)
    assert "one text cannot be both trained on and held out" in run("--text", tmp_path / "short.txt")
    assert "--save must be a new folder" in run("--save", tmp_path)
    assert "--needles must be positive integers" in run("--needles", "many")
    assert "a trained model needs --text" in run("--model", tmp_path)
    assert "lower --rate" in run("--rate", "1e30", "--tokens", 64, "--positions", 160, "--cases", 1, "--windows", 1)
    GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=8, n_layer=1, n_head=1)).save_pretrained(tmp_path / "gpt2")
    assert run("--model", tmp_path / "gpt2", *text)  # it has no tokenizer either


def test_a_full_disk_ends_nothing_and_weights_are_saved(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writes: list[str] = []

    def full(path: Path, words: str) -> None:
        writes.append(words)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(example, "write_atomically", full)
    sizes = ("--tokens", "64", "--positions", "160", "--steps", "1", "--cases", "1", "--windows", "1")
    places = ("--save", str(tmp_path / "longer"), "--out", str(tmp_path / "found.json"))
    monkeypatch.setattr(sys, "argv", ["extend_context.py", *sizes, *places])
    with pytest.raises(SystemExit) as stopped:
        example.main()
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert said.count("No space left on device") == 2  # when it was seen first, and at the end
    assert "free some space" in said
    assert '"after"' in writes[-1]
    assert (tmp_path / "longer" / "config.json").exists()


def test_the_saved_model_knows_its_positions(
    example: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    given = ("--tokens", 160, "--positions", 256, "--steps", 2, "--cases", 1, "--windows", 1)
    out = ("--save", tmp_path / "longer", "--out", tmp_path / "extend.json", "--device", "cpu")
    monkeypatch.setattr(sys, "argv", ["extend_context.py", *map(str, (*given, *out))])
    example.main()
    assert "after 2 steps" in capsys.readouterr().out
    found = json.loads((tmp_path / "extend.json").read_text())
    assert found["environment"]["torch"] == torch.__version__
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "longer", local_files_only=True)
    assert model.config.max_position_embeddings == 256
    assert model.config.rope_parameters["rope_theta"] == pytest.approx(found["rope"]["base"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["extend.json", "longer"]

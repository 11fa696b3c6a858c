"""`nearfield remember` and `nearfield ask`: the same answer as from Python, and errors with a remedy."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from hf_models import VOCABULARY, model
from typer.testing import CliRunner

from nearfield import hf
from nearfield.app.cli import app
from nearfield.app.evaluate.models import load_model, token_ids

KNOWN = 512
QUESTION = "w5 w6 w7"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model that knows 512 positions, with a tokenizer that knows the words w0, w1, ..., and two texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("memory")
    model("llama", max_position_embeddings=KNOWN).save_pretrained(folder / "model")
    model("llama", max_position_embeddings=KNOWN, rms_norm_eps=1e-3).save_pretrained(folder / "other")
    words = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ("model", "other"):
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder / name)
    for name, length in (("short.txt", 60), ("long.txt", 700)):
        (folder / name).write_text(" ".join(f"w{7 * i * i % 89 + 3}" for i in range(length)))
    (folder / "empty.txt").touch()
    (folder / "noise").write_bytes(b"\xff" * 100)
    return folder


def invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    # Rich breaks lines in a box.
    return result.exit_code, result.stdout.strip(), " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "options", "said", "positions"),
    [
        ("short.txt", (), "60 tokens of short.txt, read as one sequence", "running"),
        ("long.txt", (), "700 tokens of long.txt, read in chunks of 256, each by itself", "restart"),
        ("short.txt", ("--chunk", "40", "--positions", "restart"), "60 tokens of short.txt, read in chunks of 40", "restart"),
    ],
)
def test_an_answer_is_that_of_the_memory(
    text: str, options: tuple[str, ...], said: str, positions: str, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "memory"
    code, printed, _ = invoke("remember", folder / "model", folder / text, "-o", out, "--device", "cpu", *options)
    assert code == 0
    assert said in printed
    assert printed.endswith("MB")
    code, answer, _ = invoke("ask", folder / "model", QUESTION, "--memory", out, "--tokens", 6, "--device", "cpu")
    assert code == 0

    net, tokenizer = load_model(folder / "model")
    hf.register("nearfield-cli")
    net.set_attn_implementation("nearfield-cli")
    memory = hf.Memory.load(out, net)
    assert torch.equal(memory.tokens, token_ids(tokenizer, folder / text))
    assert memory.reading.positions == positions
    assert answer == memory.ask(net, tokenizer, QUESTION, max_new_tokens=6).strip()
    assert len(answer.split()) == 6


def test_a_question_is_asked_by_the_chat_template_and_answered_word_by_word(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, tokenizer = load_model(folder / "model")
    net.save_pretrained(tmp_path / "chat")
    tokenizer.chat_template = "w9 {{ messages[0]['content'] }} {% if add_generation_prompt %}w8 w8{% endif %}"
    tokenizer.save_pretrained(tmp_path / "chat")
    out = tmp_path / "memory"
    assert invoke("remember", tmp_path / "chat", folder / "short.txt", "-o", out, "--device", "cpu")[0] == 0
    put, puts = transformers.TextStreamer.put, []
    monkeypatch.setattr(transformers.TextStreamer, "put", lambda self, value: puts.append(value.numel()) or put(self, value))
    given = ("ask", tmp_path / "chat", QUESTION, "--memory", out, "--tokens", 5, "--device", "cpu")
    answers = [invoke(*given, *more)[1] for more in ((), ("--plain",))]
    assert puts == [60 + 6, *[1] * 5, 60 + 3, *[1] * 5]

    hf.register("nearfield-cli")
    net.set_attn_implementation("nearfield-cli")
    memory = hf.Memory.load(out, net)
    asked = (f"w9 {QUESTION} w8 w8", QUESTION)
    assert answers == [memory.ask(net, tokenizer, words, max_new_tokens=5).strip() for words in asked]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("remember", "nothing", "short.txt", "-o", "unused"), "give the folder of one or a .gguf file"),
        (("remember", "model", "nothing.txt", "-o", "unused"), "not a text file in UTF-8"),
        (("remember", "model", "empty.txt", "-o", "unused"), "has no tokens; give a text to read"),
        (("remember", "model", "short.txt", "-o", "nowhere/unused"), "--out must be a file in an existing folder"),
        (("remember", "model", "short.txt", "-o", "model"), "--out must be a file in an existing folder"),
        (("remember", "model", "short.txt", "-o", "unused", "--positions", "both"), "one of running, restart, got 'both'"),
        (
            ("remember", "model", "long.txt", "-o", "unused", "--chunk", "500"),
            "chunk must be more than 16 and at most 368, got 500",
        ),
        (("remember", "model", "short.txt", "-o", "unused", "--dtype", "int8"), "--dtype must be one of"),
        (("ask", "model", QUESTION, "--memory", "unused"), "is not a file; `nearfield remember MODEL TEXT -o"),
        (("ask", "model", QUESTION, "--memory", "noise"), "cannot be read"),
        (("ask", "other", QUESTION, "--memory", "memory"), "made with another model"),
        (("ask", "model", QUESTION, "--memory", "memory", "--dtype", "bfloat16"), "load it in float32 (--dtype float32)"),
        (("ask", "model", "", "--memory", "memory"), "at least one token, got ''"),
    ],
)
def test_what_is_wrong_is_said(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    if not (folder / "memory").exists():
        assert invoke("remember", folder / "model", folder / "short.txt", "-o", folder / "memory", "--device", "cpu")[0] == 0
    paths = ("nothing", "model", "other", "memory", "noise", "unused", "nowhere/unused")
    given = [folder / word if word in paths or word.endswith(".txt") else word for word in arguments]
    code, _, printed = invoke(*given, "--device", "cpu")
    assert code == 2
    assert message in printed
    assert not (folder / "unused").exists()

"""For tests of chats: a small random model with a chat template, its tokenizer of words, and documents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest.importorskip("transformers")

import torch
import transformers
from hf_models import VOCABULARY, model

from nearfield import hf
from nearfield.app.chat.documents import Documents
from nearfield.app.chat.engine import Engine
from nearfield.cells.method import Cells

KNOWN = 1024
TEMPLATE = (
    "{% for m in messages %}{{ 'w90' if m.role == 'user' else 'w91' if m.role == 'assistant' else 'w92' }} {{ m.content }} "
    "{% endfor %}{% if add_generation_prompt %}w91 {{ messages[-1].content }}{% endif %}"
)
"""It ends with the question, because what a random model says depends most on the last few words."""

NEEDLE = "w80 w81 w82 w83"


def words(length: int, step: int = 7) -> str:
    return " ".join(f"w{step * i * i % 71 + 3}" for i in range(length))


def tokenizer(template: str | None = TEMPLATE) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"?": 0} | {f"w{i}": i for i in range(1, VOCABULARY)}, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="?")
    found.chat_template = template
    return found


def save_model(folder: Path, template: str | None = TEMPLATE, **changes: Any) -> Path:
    model("llama", max_position_embeddings=KNOWN, **changes).save_pretrained(folder)
    tokenizer(template).save_pretrained(folder)
    return folder


def engine(template: str | None = TEMPLATE, texts: dict[str, str] | None = None, method: Cells | None = None) -> Engine:
    """An engine with two documents, one of which has a needle, or with none if `texts` is empty."""
    hf.register("nearfield-chat")
    net, speaks = model("llama", max_position_embeddings=KNOWN), tokenizer(template)
    net.set_attn_implementation("nearfield-chat")
    if texts is None:
        texts = {"one.txt": words(120), "two.txt": f"{words(90, 5)} {NEEDLE} {words(90, 3)}"}
    if not texts:
        return Engine(net, speaks, None, None)
    documents = Documents(speaks, texts)
    torch.manual_seed(0)
    method = method or Cells(probes=4, segment=64, cell_size=4, window=0, sinks=2)
    return Engine(net, speaks, documents, hf.Memory.read(net, documents.tokens, method))

"""Text from prompts: the paper's two, and one in the manner of what the models are trained on."""

from __future__ import annotations

from typing import Any

import torch

from experiments.gpt2_xl.model import seeded
from experiments.gpt2_xl.tokens import Vocabulary
from experiments.gpt2_xl.train import in_half

PROMPTS = ("My favorite thing in the world is:", "I like being in nature because", "ROMEO:\nIf I")
TEMPERATURE, CHOICES = 0.8, 200
"""What nanoGPT samples with."""


@torch.no_grad()
def sampled(model: Any, vocabulary: Vocabulary, count: int, seed: int) -> list[dict[str, str]]:
    """`count` tokens after every prompt, by `generate` with its usual cache; nothing for 0."""
    model.eval()
    found = []
    for prompt in PROMPTS if count else ():
        ids = torch.tensor([vocabulary.encode(prompt)], device=model.device)
        how = {"do_sample": True, "temperature": TEMPERATURE, "top_k": CHOICES, "pad_token_id": 0, "min_new_tokens": count}
        with seeded(seed), in_half(str(model.device)):
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **how)
        found.append({"prompt": prompt, "sample": clean(vocabulary.decode(text[0, ids.shape[1] :].tolist()))})
    return found


def clean(text: str) -> str:
    """Without characters that have no picture."""
    return "".join(sign if sign.isprintable() or sign == "\n" else "\N{MIDDLE DOT}" for sign in text)

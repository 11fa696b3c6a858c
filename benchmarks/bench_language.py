"""Cells in a whole language model: perplexity, and facts to find again in a long text, next to exact attention and top-k.

python benchmarks/bench_language.py --text TEXT                            # results/language.json, docs/figures/language.png
python benchmarks/bench_language.py --model DIR --text TEXT --out DIR --device cuda --dtype bfloat16
python benchmarks/bench_language.py --only needle                          # the other sections stay as they are
python benchmarks/bench_language.py --quick                                # short texts, few cases; saved only with --out

perplexity  8,192 tokens of each --text and of the prose of Python's language reference, in all layers: exact attention, Cells,
            and as many of the heaviest keys (a perfect index), at 4, 7 and 10% of the past; errors of all heads
needle      50 times: a number, told once or twice in a row somewhere in 7,000 tokens, is to be completed at the end
prefill     131,072 tokens of all texts, positions extended, bfloat16: time of a forward pass, and perplexity, next to SDPA
finetune    100 steps of 4,096 tokens, float32 weights, bfloat16 arithmetic: losses, memory and time next to SDPA

In the first two sections a row's own segment (1,024 keys) and the first 16 keys are exact for all methods. The model is the one
that `make smollm2` fetches, or a folder with its .gguf file and no other weights. It takes a few minutes on a GPU and hours on
two cores, so without a GPU it runs only with --device cpu.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from language_long import finetune, prefill, show_finetune, show_prefill
from real import SMOLLM2
from record import FIGURES, RESULTS, each, merge, show, table
from rich.table import Table
from torch import Tensor

from nearfield.app.evaluate.measure import attending
from nearfield.app.evaluate.models import load_model
from nearfield.app.evaluate.report import as_json, environment, save_plot, tabulated
from nearfield.app.evaluate.run import evaluate
from nearfield.app.evaluate.settings import Geometry, Setting, usual_segment
from nearfield.exact import Exact

TOKENS, BUDGETS = 8192, (0.04, 0.07, 0.10)
NEEDLE_TOKENS, CASES, DIGITS = 7000, 50, 5
NEEDLE = "The secret code of {place} is {number}."
NEEDLES = {"once": NEEDLE, "twice": f"{NEEDLE} Again: the secret code of {{place}} is {{number}}."}
QUESTION = "The secret code of {place} is"
PLACES = (
    "Lisbon Oslo Cairo Lima Quito Hanoi Perth Turin Bergen Malmo Porto Seville Krakow Tbilisi Dakar Nairobi Kyoto Osaka Bogota "
    "Havana Denver Boston Dallas Toronto Geneva Zurich Vienna Prague Warsaw Athens Dublin Madrid Naples Munich Leipzig Riga "
    "Tallinn Ankara Beirut Amman Baghdad Tehran Delhi Mumbai Manila Jakarta Seoul Sydney Auckland Santiago"
)


def reference_prose() -> str:
    """The prose of Python's language reference: paragraphs that are no lists, grammar or examples, each once."""
    from pydoc_data.topics import topics

    paragraphs = (part for name in sorted(topics) for part in re.split(r"\n\s*\n", topics[name]))
    prose = (" ".join(part.split()) for part in paragraphs if not part.startswith((" ", "*", "-", "=")) and "::=" not in part)
    return "\n\n".join(dict.fromkeys(part for part in prose if len(part) > 120 and part.endswith(".")))


def read_texts(files: list[Path]) -> dict[str, str]:
    return {**{path.name: path.read_text(encoding="utf-8") for path in files}, "Python's language reference": reference_prose()}


def ids_of(tokenizer: Any, text: str) -> Tensor:
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False, add_special_tokens=False)["input_ids"]
    return ids


def perplexity(model: Any, tokenizer: Any, texts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    tokens = options.tokens or (512 if options.quick else TOKENS)
    budgets = [0.1] if options.quick else BUDGETS
    ids = {name: ids_of(tokenizer, text[: 8 * tokens]) for name, text in texts.items()}
    tolerance = None if options.tolerance is None else options.tolerance / 100
    found = evaluate(model, ids, tokens=tokens, budgets=budgets, tolerance=tolerance, progress=_Bar())
    print()
    show(tabulated(found))
    if options.saves and importlib.util.find_spec("matplotlib") is not None:
        folder = options.out or FIGURES
        folder.mkdir(parents=True, exist_ok=True)
        title = f"{options.model.name}, {found.geometry.tokens:,} tokens of {', '.join(found.texts)}"
        save_plot(found, title, folder / "language.png")
    return as_json(found, {"sha256": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}})


class _Bar:
    """Progress as lines of text."""

    def start(self, steps: int) -> None:
        self.done, self.steps = 0, steps

    def step(self) -> None:
        self.done += 1

    def at(self, what: str) -> None:
        print(f"{self.done / self.steps:4.0%} {what}", flush=True)


def needle(model: Any, tokenizer: Any, texts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    """Whether each token of the number is the model's first choice given those before it, as in greedy generation.

    It takes one pass: the question and the number, too, attend to the past by the method.
    """
    cases = options.cases or (2 if options.quick else CASES)
    tokens = options.tokens or (512 if options.quick else NEEDLE_TOKENS)
    text_name, text = next(iter(texts.items()))
    segment = usual_segment(TOKENS if tokens > TOKENS // 2 else tokens)
    geometry = Geometry(tokens, segment)
    budgets = [0.1] if options.quick else BUDGETS
    settings = [Setting("exact", Exact()), *geometry.settings(("cells",), budgets)]
    paragraphs = [ids_of(tokenizer, part + "\n\n")[0] for part in re.split(r"\n\s*\n", text[: 40 * tokens]) if part.strip()]
    found = {}
    for name, sentence in NEEDLES.items():
        rows = []
        for case in each(range(cases), lambda case, name=name: f"told {name}, case {case + 1}"):
            ids, answer, depth = hidden(tokenizer, paragraphs, tokens, segment, random.Random(case), sentence)
            row: dict[str, Any] = {"tokens": ids.shape[1], "depth": depth}
            for setting in settings:
                with attending(model, setting.method), torch.no_grad():
                    logits = model(ids.to(model.device), use_cache=False, logits_to_keep=answer + 1).logits[0, :-1]
                row[setting.label] = bool((logits.argmax(-1).cpu() == ids[0, -answer:]).all())
            rows.append(row)
        count = {setting.label: sum(row[setting.label] for row in rows) for setting in settings}
        found[name] = {"needle": sentence, "found": count, "by_case": rows}
    return {
        "text": text_name,
        "question": QUESTION,
        "tokens": tokens,
        "segment": segment,
        "cases": cases,
        "methods": {setting.label: repr(setting.method) for setting in settings},
        "told": found,
    }


def hidden(
    tokenizer: Any, paragraphs: list[Tensor], tokens: int, segment: int, draw: random.Random, needle: str = NEEDLE
) -> tuple[Tensor, int, int]:
    """Token ids `[1, tokens]` that end with a number, the number of its tokens, and the position of the needle.

    The needle stands between two paragraphs, anywhere before the last segment.
    """
    words = {"place": draw.choice(PLACES.split()), "number": str(draw.randrange(10 ** (DIGITS - 1), 10**DIGITS))}
    sentence = ids_of(tokenizer, needle.format(**words) + "\n\n")[0]
    question = ids_of(tokenizer, QUESTION.format(**words))[0]
    both = ids_of(tokenizer, f"{QUESTION} {{number}}".format(**words))[0]
    answer = len(both) - len(question)
    if answer < 1 or not torch.equal(both[: len(question)], question):
        raise ValueError(f"the tokenizer does not cut {QUESTION!r} before the number; change the question")
    room = tokens - len(sentence) - len(both)
    start = draw.randrange(len(paragraphs))
    chosen, length = [], 0
    while length < room:
        part = paragraphs[(start + len(chosen)) % len(paragraphs)][: room - length]
        chosen.append(part)
        length += len(part)
    boundaries = [0, *torch.tensor([len(part) for part in chosen]).cumsum(0).tolist()]
    last = (tokens - 1) // segment * segment - len(sentence)
    place = draw.choice([i for i, boundary in enumerate(boundaries) if boundary <= last])
    ids = torch.cat([*chosen[:place], sentence, *chosen[place:], both])
    return ids[None], answer, boundaries[place]


def show_needle(results: dict[str, Any]) -> Table:
    title = f"numbers found of {results['cases']}, {results['tokens']:,} tokens of {results['text']}"
    found = table("attention", *(f"told {name}" for name in results["told"]), title=title, words=("attention",))
    for label in results["methods"]:
        found.add_row(label, *(str(one["found"][label]) for one in results["told"].values()))
    return found


def long(measure: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """A section of language_long.py; it takes the tokens of all texts, one after the other."""

    def run(model: Any, tokenizer: Any, texts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
        ids = torch.cat([ids_of(tokenizer, text) for text in texts.values()], 1).to(model.device)
        return {"texts": list(texts), **measure(model, ids, options)}

    return run


SECTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "perplexity": perplexity,
    "needle": needle,
    "prefill": long(prefill),
    "finetune": long(finetune),
}
SHOWN: dict[str, Callable[[dict[str, Any]], Table]] = {"needle": show_needle, "prefill": show_prefill, "finetune": show_finetune}
DTYPES = {"prefill": torch.bfloat16, "finetune": torch.float32}
"""Of the weights, in these sections; --dtype is for the others."""
FEWEST_CHARACTERS = 600_000
"""They make 131,072 tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SMOLLM2, help="folder of a causal language model")
    parser.add_argument("--text", type=Path, action="append", default=[], help="an English text; may be repeated")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION", help="these sections")
    parser.add_argument("--out", type=Path, help="folder for language.json and language.png")
    parser.add_argument("--device", help="cpu, cuda, ...; default: a GPU if there is one")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="perplexity and needle")
    parser.add_argument("--tokens", type=int, help="per text, window or case, instead of the numbers above")
    parser.add_argument("--cases", type=int, help=f"needles, instead of {CASES}")
    parser.add_argument("--tolerance", type=float, help="excess of perplexity in per cent: also choose a budget per layer")
    parser.add_argument("--quick", action="store_true", help="short texts, few cases, nothing saved without --out")
    options = parser.parse_args()
    if not (options.quick or options.device or torch.cuda.is_available()):
        print("skipped: there is no CUDA device (--device cpu takes hours, --quick a minute)")
        return
    if not options.model.exists():
        print(f"skipped: no model in {options.model} (`make smollm2` fetches one)")
        return
    options.saves = options.out is not None or not options.quick
    path = (options.out or RESULTS).absolute() / "language"
    path.parent.mkdir(parents=True, exist_ok=True)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    texts = read_texts(options.text)
    long_sections = [section for section in options.only if section in DTYPES]
    if long_sections and not options.quick and sum(map(len, texts.values())) < FEWEST_CHARACTERS:
        sys.exit(f"{' and '.join(long_sections)} need more text; give about {FEWEST_CHARACTERS:,} characters with --text")
    for section in options.only:
        # A fresh model for each section: two of them change theirs.
        model, tokenizer = load_model(options.model, device, DTYPES.get(section, getattr(torch, options.dtype)))
        results = SECTIONS[section](model, tokenizer, texts, options)
        if section in SHOWN:
            show(SHOWN[section](results))
        if options.saves:
            saved = {"model": options.model.name, "where": environment(model), **results}
            print("written:", merge(str(path), section, saved), flush=True)


if __name__ == "__main__":
    sys.exit(main())

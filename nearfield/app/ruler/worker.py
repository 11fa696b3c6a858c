"""A process that runs the official generators of RULER: `python -m nearfield.app.ruler.worker FOLDER_OF_A_TOKENIZER`.

They are scripts: they read the command line when they are imported, write files, print, ask for NLTK's sentence data, load
tokenizers by themselves, and, if a prompt can never fit, try for ever and catch every exception, Ctrl-C too. So they run in a
process that can be ended. Three modules that they import are stood in for: `nltk` (sentences are split here), `tokenizer` (the
model's own is there already, and nothing is fetched) and `tqdm` (which tells how far they are).

Requests come as lines of JSON on the standard input, and what there is to tell goes to the standard output, likewise.
"""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from types import ModuleType
from typing import Any

TRIES = 200
"""Prompts that a generator may make for one sample before it is clear that none will fit."""

KEPT = {"niah.py": {"nouns", "adjs", "words"}}
"""Six million pairs of words, the same every time, take seconds to sort: of a script's statements, these run once."""

SENTENCE_END = re.compile(r"(?<=[.!?])\s+|(?<=[.!?][\"')\]”’])\s+")


def sentences(text: str) -> list[str]:
    """The sentences of a text: they end with a full stop, an exclamation or a question mark, perhaps in quotes, and a space."""
    return [part for part in SENTENCE_END.split(text) if part]


class Counting:
    """The model's tokenizer, as the generators call theirs."""

    def __init__(self, tokenizer: Any, tell: Callable[..., None]) -> None:
        self.tokenizer, self.tell = tokenizer, tell
        self.sample, self.tries = -1, 0

    def text_to_tokens(self, text: str) -> list[str]:
        self.tries += 1
        if self.sample >= 0 and self.tries > TRIES:
            # An exception would be caught, and another prompt tried.
            self.tell(too_short=True)
            os._exit(1)
        self.tell()
        return self.tokenizer.tokenize(text)

    def tokens_to_text(self, tokens: list[str]) -> str:
        return self.tokenizer.convert_tokens_to_string(tokens)

    def counted(self, samples: Iterable[int]) -> Iterator[int]:
        """In place of a progress bar."""
        for self.sample in samples:
            self.tries = 0
            self.tell(sample=self.sample)
            yield self.sample
        self.sample = -1


def stand_in(counting: Counting) -> None:
    """Put modules in the place of those that the generators ask for."""
    made = {name: ModuleType(name) for name in ("nltk", "nltk.tokenize", "tokenizer", "long_context_eval.data.tokenizer", "tqdm")}
    made["nltk.tokenize"].sent_tokenize = sentences  # type: ignore[attr-defined]
    made["tqdm"].tqdm = counting.counted  # type: ignore[attr-defined]
    for name in ("tokenizer", "long_context_eval.data.tokenizer"):
        made[name].select_tokenizer = lambda *_: counting  # type: ignore[attr-defined]
    sys.modules.update(made)


def run_script(path: str, arguments: list[str], kept: dict[str, dict[str, Any]]) -> None:
    """Run a script as `python path arguments` would; what is `kept` of an earlier run of it is not computed again."""
    name, place = os.path.basename(path), os.path.dirname(path)
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    before = kept.get(name, {})
    tree.body = [part for part in tree.body if not (isinstance(part, ast.Assign) and _targets(part) <= before.keys() and before)]
    names: dict[str, Any] = {"__name__": "__main__", "__file__": path, **before}
    sys.argv, known = [path, *arguments], list(sys.path)
    sys.path.insert(0, place)
    try:
        exec(compile(tree, path, "exec"), names)
    finally:
        sys.path[:] = known
    kept[name] = {word: names[word] for word in KEPT.get(name, ())}


def _targets(part: ast.Assign) -> set[str]:
    return {target.id if isinstance(target, ast.Name) else "" for target in part.targets}


def main() -> None:
    # The other end decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    requests: SimpleQueue[dict[str, Any]] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)

    def tell(**what: Any) -> None:
        out.write(json.dumps(what) + "\n")
        out.flush()

    threading.Thread(target=read, daemon=True).start()
    from transformers import AutoTokenizer

    stand_in(Counting(AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True), tell))
    kept: dict[str, dict[str, Any]] = {}
    while True:
        asked = requests.get()
        try:
            run_script(asked["script"], asked["arguments"], kept)
        except BaseException as error:
            tell(error=f"{type(error).__name__}: {error}", full=isinstance(error, OSError))
        else:
            tell(done=True)


if __name__ == "__main__":
    main()

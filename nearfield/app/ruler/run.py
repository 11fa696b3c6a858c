"""All prompts by all ways: what is on record already is left as it is, and every new answer is put on record at once."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from nearfield.app.ruler.answers import Reading, answer, read
from nearfield.app.ruler.needles import opened_by_heads, places
from nearfield.app.ruler.official import Task
from nearfield.app.ruler.prompts import Prompt, Prompts
from nearfield.app.ruler.record import Key, Record
from nearfield.app.ruler.ways import Way

ROUND = 10
"""Samples of every task and length that are answered before more of any are: a run that is stopped has some of everything."""


FULL = 100.0


@dataclass(frozen=True)
class Plan:
    """What to ask, and how."""

    tasks: Sequence[Task]
    lengths: Sequence[int]
    templates: Sequence[str]
    samples: int
    ways: Sequence[Way]
    batch: int = 1
    watched: int = 5
    """of the samples of a task with needles, so many are answered again to see which heads open them"""

    @property
    def answers(self) -> int:
        return len(self.tasks) * len(self.lengths) * len(self.templates) * self.samples * len(self.ways)

    def parts(self) -> Iterator[tuple[str, int, Task]]:
        for template in self.templates:
            for length in self.lengths:
                for task in self.tasks:
                    yield template, length, task


class OutOfTime(Exception):
    """The time that was given is over."""


def make_prompts(plan: Plan, prompts: Prompts, told: Callable[[str, int], None]) -> dict[tuple[str, int, str], list[Prompt]]:
    """All prompts by template, length and task. `told` hears what is made, and how many samples there are of it."""
    found = {}
    for template, length, task in plan.parts():
        made = partial(told, f"prompts: {task.name}, {length:,}")
        made(0)
        found[template, length, task.name] = prompts.get(task, length, template, plan.samples, made)
    return found


def answer_all(
    plan: Plan,
    model: Any,
    tokenizer: Any,
    prompts: dict[tuple[str, int, str], list[Prompt]],
    record: Record,
    told: Callable[[str, int], None],
    until: float | None = None,
    saved: Callable[[], None] = lambda: None,
) -> None:
    """Answer what is not on record. `told` hears what is done, and how many answers there are more; `saved` is called after each
    batch.

    Raises OutOfTime soon after `until` (of `time.monotonic`); answers that are not whole by then are lost. The first ones are
    finished whatever the time, so that each run comes a step further.
    """
    before = len(record.answers)

    def in_time() -> None:
        if until is not None and time.monotonic() > until and len(record.answers) > before:
            raise OutOfTime

    names = {task.name: task for task in plan.tasks}
    for length, batch in _batches(plan, prompts):
        encoded: dict[Asked, list[int]] = {}
        readings: dict[tuple[str, Asked], Reading] = {}
        for way in plan.ways:
            asked = [prompt for prompt in batch if not _is_answered(prompt, way, record)]
            tasks = dict.fromkeys(prompt.task for prompt in batch)
            what = f"{way.name}: {next(iter(tasks)) if len(tasks) == 1 else f'{len(tasks)} tasks'}, {length:,}"
            told(what, len(batch) - len(asked))
            if not asked:
                continue
            for prompt in asked:
                if _asked(prompt) not in encoded:
                    encoded[_asked(prompt)] = prompt.encode(tokenizer)
            done = _readings(model, way, asked, encoded, readings, in_time)
            _answer(plan, model, tokenizer, way, names, asked, encoded, record, done, in_time)
            del done  # Keys of many prompts fill a card.
            told(what, len(asked))
            in_time()
        saved()


Asked = tuple[str, int]
"""Which prompt of a length and a template: the task, and its number."""


def _asked(prompt: Prompt) -> Asked:
    return prompt.task, prompt.index


def _batches(plan: Plan, prompts: dict[tuple[str, int, str], list[Prompt]]) -> Iterator[tuple[int, list[Prompt]]]:
    """Prompts of one length and template that are answered together, of one task or of several."""
    for start in range(0, plan.samples, ROUND):
        for template in plan.templates:
            for length in plan.lengths:
                found = [
                    prompts[template, length, task.name][sample]
                    for sample in range(start, min(start + ROUND, plan.samples))
                    for task in plan.tasks
                ]
                for first in range(0, len(found), plan.batch):
                    yield length, found[first : first + plan.batch]


def _readings(
    model: Any,
    way: Way,
    asked: Sequence[Prompt],
    encoded: dict[Asked, list[int]],
    readings: dict[tuple[str, Asked], Reading],
    in_time: Callable[[], None],
) -> list[Reading] | None:
    """Prompts as the source of a way has read them, from `readings` or put there; None: the way reads them itself."""
    sources = {_asked(prompt): way.source_for(model, len(encoded[_asked(prompt)])) for prompt in asked}
    if None in sources.values():
        return None
    found = []
    for prompt, source in sources.items():
        assert source is not None
        if (source.name, prompt) not in readings:
            in_time()
            readings[source.name, prompt] = read(model, way, torch.tensor(encoded[prompt], device=model.device))
        found.append(readings[source.name, prompt])
    return found


def _answer(
    plan: Plan,
    model: Any,
    tokenizer: Any,
    way: Way,
    tasks: dict[str, Task],
    asked: Sequence[Prompt],
    encoded: dict[Asked, list[int]],
    record: Record,
    readings: Sequence[Reading] | None,
    in_time: Callable[[], None],
) -> None:
    ids = [encoded[_asked(prompt)] for prompt in asked]

    def score(number: int, text: str) -> float:
        return tasks[asked[number].task].score(text, asked[number].outputs)

    # Scores count what is asked for and stands in an answer, so more words never take any away.
    answers = answer(
        model,
        tokenizer,
        way,
        ids,
        [tasks[prompt.task].tokens for prompt in asked],
        readings,
        lambda number, text: score(number, text) >= FULL,
        in_time,
    )
    for number, (prompt, tokens, found) in enumerate(zip(asked, ids, answers, strict=True)):
        entry: dict[str, Any] = {
            "score": score(number, found.text),
            "answer": found.text,
            "outputs": list(prompt.outputs),
            "prompt_sha256": _digest(prompt),
            "way_sha256": way.digest,
            "prompt_tokens": len(tokens),
            "tokens": len(found.tokens),
            "keys_read": found.keys_read,
            "reading": round(found.reading, 4),
            "writing": round(found.writing, 4),
        }
        if way.opens_cells and prompt.index < plan.watched:
            wanted = places(prompt, tokenizer)
            opened = opened_by_heads(model, way, tokens, found.tokens, wanted) if wanted else None
            entry["needle"] = None if opened is None else asdict(opened)
        record.add(_key(prompt, way), entry)


def _is_answered(prompt: Prompt, way: Way, record: Record) -> bool:
    """Whether there is an answer to this very prompt; a model's template may have changed."""
    found = record.answers.get(_key(prompt, way))
    return found is not None and found.get("prompt_sha256") == _digest(prompt)


def _key(prompt: Prompt, way: Way) -> Key:
    return Key(prompt.template, prompt.length, prompt.task, prompt.index, way.name)


def _digest(prompt: Prompt) -> str:
    return hashlib.sha256(prompt.text.encode()).hexdigest()[:16]

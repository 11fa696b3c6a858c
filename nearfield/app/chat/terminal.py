"""`nearfield chat`: questions and answers on a terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from nearfield.app.chat.start import Start

if TYPE_CHECKING:
    from nearfield.app.chat.engine import Answer, Engine, Message, Sampling

COMMANDS = "/reset begins a new chat, /quit leaves, Ctrl-C stops an answer"


def chat(start: Start, sampling: dict[str, float], system: str) -> None:
    """All of `nearfield chat`. Raises ValueError, OSError or ImportError with a remedy if it cannot be done."""
    console = Console(stderr=True)
    engine = start.engine(console)
    from nearfield.app.chat.engine import Message, Sampling

    console.print(f"documents: {len(start.documents)}; {COMMANDS}", style="dim", highlight=False)
    talk(engine, Sampling(**sampling), [Message("system", system)] if system else [], console)  # type: ignore[arg-type]


def talk(engine: Engine, sampling: Sampling, before: list[Message], console: Console) -> None:
    """Read questions until there are no more, and answer each."""
    from nearfield.app.chat.engine import Message, Session, TooLong, Unanswerable

    session, messages = Session(), list(before)
    while (said := _question(console)) is not None:
        if said in ("/quit", "/exit"):
            return
        if said == "/reset":
            session, messages = Session(), list(before)
            console.print("a new chat", style="dim")
        elif said.startswith("/"):
            console.print(f"there is no {said.split()[0]}; {COMMANDS}", style="dim", highlight=False, markup=False)
        elif said:
            asked = [*messages, Message("user", said)]
            try:
                with _interrupted() as is_interrupted:
                    answer = engine.answer(asked, sampling, _write, is_interrupted, session)
            except KeyboardInterrupt:
                console.print("\nstopped; the question is forgotten", style="dim")
            except TooLong as error:
                console.print(f"{error}; /reset begins a new chat", style="yellow", highlight=False)
            except Unanswerable as error:
                console.print(str(error), style="yellow", highlight=False, markup=False)
            else:
                _write("\n")
                _report(answer, engine.documents is not None, console)
                messages = [*asked, Message("assistant", answer.text)]


def _question(console: Console) -> str | None:
    """What a person types; None at the end of input."""
    while True:
        try:
            if sys.stdin.isatty():
                console.print("[bold]> [/]", end="")
            return input().strip()
        except KeyboardInterrupt:
            console.print(f"\n{COMMANDS}", style="dim", highlight=False)
        except EOFError:
            return None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def _interrupted() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed, so that the answer ends after a token. Pressed again, it interrupts at once."""
    pressed = False

    def press(*_: object) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _report(answer: Answer, has_documents: bool, console: Console) -> None:
    """What the answer's heads looked at, how fast it was, and how far attention was off."""
    if has_documents and not answer.citations:
        console.print("no passage of the documents stood out", style="dim")
    for number, found in enumerate(answer.citations, 1):
        where = f"{found.document}, line {found.line} ({found.position:.0%}), {found.share:.0%} of looks"
        console.print(f"[{number}] {where}: {found.excerpt}", style="cyan", highlight=False, markup=False, soft_wrap=True)
    console.print(escape(summary(answer)), style="dim", highlight=False, soft_wrap=True)


def summary(answer: Answer) -> str:
    """One line about an answer."""
    ended = {"stop": "", "length": ", cut at the limit", "cut": ", stopped"}[answer.finish]
    parts = [f"tokens: {answer.tokens}{ended}", f"the first after {answer.seconds:.1f} s"]
    if answer.rate is not None:
        parts.append(f"{answer.rate:.1f} tokens per second")
    if answer.error is not None:
        error = answer.error
        parts.append(
            f"error of attention {error.mean:.2%} on average, {error.worst:.2%} in the worst head (audited: {error.steps})"
        )
    return "; ".join(parts)

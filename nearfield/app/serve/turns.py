"""One model, many requests: they wait for their turn, and one that nobody waits for any more stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from nearfield.app.chat.engine import Answer, Engine, TooLong, Unanswerable
from nearfield.app.serve.body import Asked, Refused


@dataclass(frozen=True)
class Limits:
    """Of one server.

    Attributes:
        waiting: requests that may wait while another one is answered.
        seconds: for an answer, once it is its turn.
        tokens: of an answer, if the request does not say.
        most_tokens: of any answer.
        body: bytes of a request.
        arrival: seconds until all of them are there.
    """

    waiting: int = 8
    seconds: float = 300.0
    tokens: int = 512
    most_tokens: int = 4096
    body: int = 1_000_000
    arrival: float = 30.0


class Turns:
    """Runs an engine in a thread of its own, for one request at a time, in the order in which they came."""

    def __init__(self, engine: Engine, limits: Limits) -> None:
        self.engine, self.limits = engine, limits
        self._thread = ThreadPoolExecutor(1, "nearfield-model")
        self._turn = asyncio.Lock()
        self._is_closed = threading.Event()
        self.present = 0
        """requests that are answered or wait"""

    def enter(self, asked: Asked) -> Turn:
        """A turn for a request, which must be entered by `async with`. Raises `Refused` if too many wait."""
        if self.present > self.limits.waiting:
            raise Refused(429, f"{self.present} requests are being answered or wait; try again later", "busy")
        return Turn(self, asked)

    def close(self) -> None:
        """Stop the answer that is being given, and wait for the model's thread to end."""
        self._is_closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)

    async def run(self, asked: Asked, heard: Callable[[str], None]) -> Answer:
        """The answer to a request, when it is its turn; cancelled, it stops the model. `heard` is called in its thread."""
        is_left = threading.Event()
        async with self._turn:
            end = time.monotonic() + self.limits.seconds
            work = asyncio.get_running_loop().run_in_executor(
                self._thread,
                lambda: self.engine.answer(
                    asked.messages,
                    asked.sampling,
                    heard,
                    lambda: is_left.is_set() or self._is_closed.is_set() or time.monotonic() > end,
                ),
            )
            # The turn ends when the thread is free, also if this is cancelled, and never before.
            while not work.done():
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    is_left.set()
                except Exception:
                    break  # `result` raises it again
            return work.result()


class Turn:
    """One request: its words, then its answer. Whoever leaves before the end stops the model."""

    def __init__(self, turns: Turns, asked: Asked) -> None:
        self._turns, self._asked = turns, asked
        self._said: asyncio.Queue[str | None] = asyncio.Queue()
        self._work: asyncio.Task[Answer] | None = None

    async def __aenter__(self) -> Turn:
        self._turns.present += 1
        loop = asyncio.get_running_loop()

        def heard(text: str) -> None:
            loop.call_soon_threadsafe(self._said.put_nowait, text)

        # The work goes on while words are sent: a client that reads slowly does not keep others waiting.
        self._work = asyncio.create_task(self._turns.run(self._asked, heard))
        self._work.add_done_callback(self._done)
        return self

    def _done(self, work: asyncio.Task[Answer]) -> None:
        self._turns.present -= 1
        self._said.put_nowait(None)
        if not work.cancelled():
            work.exception()  # whoever has left does not ask for it

    async def __aexit__(self, *error: object) -> None:
        if self._work is not None:
            self._work.cancel()

    async def words(self) -> AsyncIterator[str]:
        while (text := await self._said.get()) is not None:
            yield text

    async def answer(self) -> Answer:
        """The whole of it. Raises `Refused` if the model cannot answer."""
        assert self._work is not None
        try:
            return await asyncio.shield(self._work)
        except TooLong as error:
            raise Refused(400, str(error), "context_length_exceeded", "messages") from error
        except Unanswerable as error:
            raise Refused(400, str(error), parameter="messages") from error

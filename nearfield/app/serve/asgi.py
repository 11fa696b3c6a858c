"""The server: one page, and an endpoint for chat completions. No path leads to a file."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from nearfield.app.chat.engine import Answer, Engine
from nearfield.app.serve.body import Asked, Refused, parse
from nearfield.app.serve.turns import Limits, Turn, Turns

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send
except ImportError as error:
    raise ImportError("nearfield serve needs starlette and uvicorn: pip install 'nearfield[serve]'") from error

PAGE = {"/": ("index.html", "text/html"), "/page.css": ("page.css", "text/css"), "/page.js": ("page.js", "text/javascript")}
"""All that is shown: the paths, and files of this package that are read once, when the server starts."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""Names under which a browser on the same machine finds the server."""

log = logging.getLogger("uvicorn.error")


def make_app(engine: Engine, name: str, limits: Limits, hosts: Sequence[str] = LOCAL) -> ASGIApp:
    """The application for a model called `name`; it answers requests to `hosts` only, or to any if there are none."""
    turns = Turns(engine, limits)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.get_running_loop().run_in_executor(None, turns.close)

    def models(_: Request) -> Response:
        one = {"id": name, "object": "model", "created": 0, "owned_by": "nearfield"}
        return Said({"object": "list", "data": [one]})

    def documents(_: Request) -> Response:
        listed = [] if engine.documents is None else engine.documents.listed
        data = [{"name": one.name, "tokens": one.stop - one.first} for one in listed]
        return Said({"object": "list", "data": data, "room": engine.room})

    def health(_: Request) -> Response:
        return Said({"status": "ok", "requests": turns.present})

    routes = [
        *(_page_route(path, *page) for path, page in PAGE.items()),
        Route("/health", _plain(health), methods=["GET"]),
        Route("/v1/models", _plain(models), methods=["GET"]),
        Route("/v1/documents", _plain(documents), methods=["GET"]),
        Route("/v1/chat/completions", Completions(turns, name), methods=["POST"]),
    ]
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _http_error})
    return Guarded(app, hosts)


def _plain(answer: Any) -> Any:
    async def endpoint(request: Request) -> Response:
        found: Response = answer(request)
        return found

    return endpoint


def _page_route(path: str, file: str, kind: str) -> Route:
    content = (files("nearfield.app.serve") / "page" / file).read_bytes()
    return Route(path, _plain(lambda _: Response(content, media_type=kind)), methods=["GET"])


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return Said(Refused(error.status_code, str(error.detail), "no_such_path").content, error.status_code)


class Said(JSONResponse):
    """JSON in ASCII, as in a stream: a request may name half a character, which has no bytes in UTF-8."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False).encode()


class Guarded:
    """Answers only requests to known hosts, so that no page elsewhere can reach the server by a name of its own."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, tuple(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        given = dict(scope["headers"]).get(b"host", b"").decode("latin-1").lower()
        host = given if given.endswith("]") else given.rpartition(":")[0] or given
        if self._hosts and host not in self._hosts:
            refused = Refused(421, f"this server does not answer for the host {host!r}", "unknown_host")
            await Said(refused.content, refused.status)(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)


class Completions:
    """`POST /v1/chat/completions`, as whole or as a stream of server-sent events."""

    def __init__(self, turns: Turns, model: str) -> None:
        self._turns, self._model = turns, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        limits = self._turns.limits
        try:
            raw = await _body(Request(scope, receive), limits)
            asked = parse(raw, self._model, limits.tokens, limits.most_tokens)
            turn = self._turns.enter(asked)
        except ClientDisconnect:
            return
        except Refused as refused:
            await _refusal(refused)(scope, receive, send)
            return
        async with turn:
            sending = asyncio.create_task(self._send(turn, asked, scope, receive, send))
            leaving = asyncio.create_task(_left(receive))
            try:
                await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                leaving.cancel()
                sending.cancel()
            if sending.done() and not sending.cancelled():
                sending.result()

    async def _send(self, turn: Turn, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        reply = _Reply(self._model)
        words, started = turn.words(), False
        try:
            if asked.stream:
                async for text in words:
                    if not started:
                        started = True
                        await _start_stream(send)
                        await _event(send, reply.part({"role": "assistant", "content": ""}))
                    await _event(send, reply.part({"content": text}))
            answer = await turn.answer()
        except Refused as refused:
            await _refusal(refused)(scope, receive, send)
            return
        except Exception:
            log.exception("the model failed")
            failed = Refused(500, "the model failed; the server's log says why", "model_failed")
            if started:
                await _event(send, failed.content)
                await _end_stream(send)
            else:
                await _refusal(failed)(scope, receive, send)
            return
        if not asked.stream:
            await Said(reply.whole(answer))(scope, receive, send)
            return
        if not started:
            await _start_stream(send)
        await _event(send, reply.last(answer))
        if asked.with_usage:
            await _event(send, reply.usage_part(answer))
        await _end_stream(send)


class _Reply:
    """What is sent of an answer."""

    def __init__(self, model: str) -> None:
        self._about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def part(self, delta: dict[str, str], finish: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {**self._about, "object": "chat.completion.chunk", "choices": [choice]}

    def last(self, answer: Answer) -> dict[str, Any]:
        return self.part({}, _finish(answer)) | {"nearfield": _details(answer)}

    def usage_part(self, answer: Answer) -> dict[str, Any]:
        return {**self._about, "object": "chat.completion.chunk", "choices": [], "usage": _usage(answer)}

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.text}
        choice = {"index": 0, "message": message, "finish_reason": _finish(answer)}
        more = {"usage": _usage(answer), "nearfield": _details(answer)}
        return {**self._about, "object": "chat.completion", "choices": [choice], **more}


def _finish(answer: Answer) -> str:
    return "stop" if answer.finish == "stop" else "length"


def _usage(answer: Answer) -> dict[str, int]:
    total = answer.prompt_tokens + answer.tokens
    return {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.tokens, "total_tokens": total}


def _details(answer: Answer) -> dict[str, Any]:
    return {
        "citations": [asdict(one) for one in answer.citations],
        "seconds_to_first_token": answer.seconds,
        "tokens_per_second": answer.rate,
        "attention_error": None if answer.error is None else _as_json(asdict(answer.error)),
        "out_of_time": answer.finish == "cut",
    }


def _as_json(numbers: dict[str, float]) -> dict[str, float | None]:
    """JSON has no NaN, which is what a model that gives none has for an error."""
    return {name: number if math.isfinite(number) else None for name, number in numbers.items()}


async def _body(request: Request, limits: Limits) -> bytes:
    """The body of a request that says it is JSON. A page elsewhere cannot send that without asking, and is not allowed to."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise Refused(415, f"the content type must be application/json, got {kind[:60] or 'none'!r}", "not_json")
    try:
        return await asyncio.wait_for(_received(request, limits.body), limits.arrival)
    except asyncio.TimeoutError as error:
        raise Refused(408, f"the body did not come within {limits.arrival:g} seconds", "too_slow") from error


async def _received(request: Request, most: int) -> bytes:
    found = bytearray()
    async for part in request.stream():
        found += part
        if len(found) > most:
            raise Refused(413, f"the body has more than {most:,} bytes", "too_large")
    return bytes(found)


async def _left(receive: Receive) -> None:
    """Ends when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _refusal(refused: Refused) -> Response:
    # What is left of a body that was not read to its end is no request.
    headers = {429: {"retry-after": "5"}, 408: {"connection": "close"}, 413: {"connection": "close"}}
    return Said(refused.content, refused.status, headers.get(refused.status))


async def _start_stream(send: Send) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _event(send: Send, content: dict[str, Any]) -> None:
    await send({"type": "http.response.body", "body": f"data: {json.dumps(content)}\n\n".encode(), "more_body": True})


async def _end_stream(send: Send) -> None:
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})

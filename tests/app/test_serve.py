"""`nearfield serve`: the endpoint, its limits and errors, requests side by side, clients that leave, and the page."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")

from chats import engine, words
from test_cli_memory import invoke

from nearfield.app.chat.engine import Answer, AttentionError, Engine, Message, Sampling
from nearfield.app.serve.asgi import HEADERS, make_app
from nearfield.app.serve.body import Refused, parse
from nearfield.app.serve.turns import Limits
from nearfield.hf.cache import CellCache

ASKED = [{"role": "user", "content": "w5 w6 w7"}]
LIMITS = Limits(waiting=2, seconds=60.0, tokens=8, most_tokens=12, body=20_000)


@pytest.fixture(scope="module")
def talker() -> Engine:
    return engine()


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        parts = self.body.decode().split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


class Client:
    """Calls an ASGI application as a server would. `leave` is what a client does that goes away."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.leave = asyncio.Event()
        self.heard = asyncio.Event()

    async def call(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        given = {"host": "localhost:8000", "content-type": "application/json"} | {
            k.replace("_", "-"): v for k, v in headers.items()
        }
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        }
        sent, reply = False, Reply()

        async def receive() -> Any:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await self.leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode().lower(): value.decode() for name, value in message["headers"]}
            else:
                reply.body += message.get("body", b"")
                self.heard.set()

        await self.app(scope, receive, send)
        return reply

    async def ask(self, **options: Any) -> Reply:
        return await self.call("POST", "/v1/chat/completions", json.dumps({"messages": ASKED} | options).encode())


def with_app(engine: Any, test: Callable[[Any], Coroutine[Any, Any, None]], limits: Limits = LIMITS) -> None:
    asyncio.run(asyncio.wait_for(test(make_app(engine, "tiny", limits)), 60))


def get(app: Any, path: str, **headers: str) -> Reply:
    return asyncio.run(Client(app).call("GET", path, **headers))


def test_whole_and_in_parts_the_answer_is_that_of_the_engine(talker: Engine) -> None:
    expected = talker.answer([Message("user", "w5 w6 w7")], Sampling(max_tokens=8), lambda text: None)
    usage = {
        "prompt_tokens": expected.prompt_tokens,
        "completion_tokens": 8,
        "total_tokens": expected.prompt_tokens + 8,
    }

    async def test(app: Any) -> None:
        whole = await Client(app).ask(model="tiny")
        assert whole.status == 200
        (choice,) = whole.json["choices"]
        assert choice["message"] == {"role": "assistant", "content": expected.text}
        assert choice["finish_reason"] == "length"
        assert whole.json["usage"] == usage
        assert (whole.json["object"], whole.json["model"]) == ("chat.completion", "tiny")
        assert whole.json["nearfield"]["attention_error"]["steps"] == 1

        parts = await Client(app).ask(stream=True, stream_options={"include_usage": True})
        assert parts.headers["content-type"].startswith("text/event-stream")
        *text, last, counted = parts.events
        assert "".join(event["choices"][0]["delta"]["content"] for event in text) == expected.text
        assert len(text) == 1 + 8
        assert all(event["choices"][0]["finish_reason"] is None for event in text)
        assert last["choices"][0]["finish_reason"] == "length"
        assert set(last["nearfield"]) == set(whole.json["nearfield"])
        assert (counted["choices"], counted["usage"]) == ([], usage)
        assert {event["id"] for event in parts.events} == {last["id"]} != {whole.json["id"]}

        stop = expected.text.split()[3]
        stopped = (await Client(app).ask(stop=[stop])).json["choices"][0]
        assert (stopped["message"]["content"], stopped["finish_reason"]) == (expected.text[: expected.text.find(stop)], "stop")
        drawn = [(await Client(app).ask(temperature=1.5, seed=seed)).json["choices"][0] for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]
        short, long = [(await Client(app).ask(max_tokens=n)).json["usage"]["completion_tokens"] for n in (3, 10**6)]
        assert (short, long) == (3, 12)

    with_app(talker, test)


def test_requests_wait_for_their_turn_and_never_mix(talker: Engine) -> None:
    questions = [f"w{i} w{i + 1} w{i + 2}" for i in (10, 20, 30)]
    alone = [talker.answer([Message("user", q)], Sampling(max_tokens=8), lambda text: None).text for q in questions]
    assert len(set(alone)) == 3

    async def test(app: Any) -> None:
        asked = [Client(app).ask(messages=[{"role": "user", "content": q}], stream=i == 1) for i, q in enumerate(questions)]
        replies = await asyncio.gather(*asked)
        assert [replies[i].json["choices"][0]["message"]["content"] for i in (0, 2)] == [alone[0], alone[2]]
        assert "".join(event["choices"][0]["delta"].get("content", "") for event in replies[1].events) == alone[1]

    with_app(talker, test)


class Slow:
    """An engine that says a word at a time until it is told to stop."""

    documents, room = None, 100

    def __init__(self) -> None:
        self.running, self.most, self.stopped = 0, 0, 0
        self.may_end = threading.Event()
        self.wakes = threading.Event()

    def answer(self, messages: Any, sampling: Any, heard: Callable[[str], None], should_stop: Callable[[], bool]) -> Answer:
        self.running += 1
        self.most = max(self.most, self.running)
        finish = "length"
        while not self.may_end.is_set():
            heard("word ")
            self.wakes.wait(0.01)
            if should_stop():
                self.stopped += 1
                finish = "cut"
                break
        self.running -= 1
        return Answer("word", finish, 3, 1, 0.1, None, None, [])


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def present(app: Any) -> int:
    count: int = (await Client(app).call("GET", "/health")).json["requests"]
    return count


class Lost(Slow):
    """Its model gives no numbers."""

    def answer(self, *_: Any) -> Answer:
        return Answer("word", "stop", 3, 1, 0.1, None, AttentionError(2, float("nan"), float("nan")), [])


@pytest.mark.parametrize("stream", [True, False])
def test_errors_that_are_no_numbers_are_null(stream: bool) -> None:
    async def test(app: Any) -> None:
        reply = await Client(app).ask(stream=stream)
        assert reply.status == 200
        assert b"NaN" not in reply.body
        details = reply.events[-1]["nearfield"] if stream else reply.json["nearfield"]
        assert details["attention_error"] == {"steps": 2, "mean": None, "worst": None}

    with_app(Lost(), test)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_the_model_and_gives_its_place_away(stream: bool) -> None:
    slow = Slow()

    async def test(app: Any) -> None:
        first, waiting, last = (Client(app) for _ in range(3))
        calls = [asyncio.create_task(first.ask(stream=stream))]
        await until(lambda: slow.running == 1)
        calls += [asyncio.create_task(client.ask(stream=stream)) for client in (waiting, last)]
        while await present(app) < 3:
            await asyncio.sleep(0.005)
        # One that only waits leaves, and is not answered at all.
        waiting.leave.set()
        await calls[1]
        while await present(app) > 2:
            await asyncio.sleep(0.005)
        assert (slow.running, slow.stopped) == (1, 0)
        first.leave.set()
        await calls[0]
        await until(lambda: slow.stopped == 1 and slow.running == 1)
        slow.may_end.set()
        assert (await calls[2]).status == 200
        while await present(app):
            await asyncio.sleep(0.005)
        assert (slow.most, slow.stopped) == (1, 1)

    with_app(slow, test)


def test_the_cache_of_a_client_that_leaves_is_gone_at_once(talker: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for the garbage collector, which may come by much later."""
    caches = weakref.WeakSet[CellCache]()
    begin = CellCache.__init__

    def counted(cache: CellCache, *given: Any, **options: Any) -> None:
        caches.add(cache)
        begin(cache, *given, **options)

    monkeypatch.setattr(CellCache, "__init__", counted)

    async def test(app: Any) -> None:
        client = Client(app)
        asking = asyncio.create_task(client.ask(stream=True))
        await client.heard.wait()
        assert len(caches) == 1
        client.leave.set()
        await asking
        while await present(app):
            await asyncio.sleep(0.005)
        assert len(caches) == 0

    gc.collect()
    gc.disable()
    try:
        with_app(talker, test, Limits(waiting=2, seconds=60.0, tokens=500, most_tokens=500))
    finally:
        gc.enable()


def test_a_body_that_does_not_come() -> None:
    slow = Slow()
    slow.may_end.set()

    async def test(app: Any) -> None:
        reply, parts = Reply(), [b"{", b'"messages": ']

        async def receive() -> Any:
            if not parts:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": parts.pop(0), "more_body": True}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                reply.status = message["status"]
                reply.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                reply.body += message["body"]

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
        await asyncio.wait_for(app(scope, receive, send), 10)
        assert (reply.status, reply.headers["connection"]) == (408, "close")
        assert reply.json["error"]["message"] == "the body did not come within 0.1 seconds"
        assert await present(app) == 0
        assert (await Client(app).ask()).status == 200

    with_app(slow, test, Limits(arrival=0.1))


def test_too_many_requests_and_too_much_time() -> None:
    slow = Slow()

    async def test(app: Any) -> None:
        calls = [asyncio.create_task(Client(app).ask()) for _ in range(3)]
        while await present(app) < 3:
            await asyncio.sleep(0.005)
        refused = await Client(app).ask(stream=True)
        assert refused.status == 429
        assert refused.json["error"]["code"] == "busy"
        assert refused.headers["retry-after"]
        replies = await asyncio.gather(*calls)
        assert all(reply.json["nearfield"]["out_of_time"] for reply in replies)
        assert all(reply.json["choices"][0]["finish_reason"] == "length" for reply in replies)

    with_app(slow, test, Limits(waiting=2, seconds=0.1))
    assert (slow.most, slow.stopped) == (1, 3)


def test_a_client_that_reads_slowly_keeps_nobody_waiting() -> None:
    slow = Slow()
    slow.may_end.set()

    async def test(app: Any) -> None:
        never = asyncio.Event()

        async def receive() -> Any:
            if not never.is_set():
                never.set()
                return {
                    "type": "http.request",
                    "body": json.dumps({"messages": ASKED, "stream": True}).encode(),
                    "more_body": False,
                }
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            await asyncio.Event().wait()

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
        stuck = asyncio.create_task(app(scope, receive, send))
        await until(never.is_set)
        assert (await Client(app).ask()).status == 200
        assert not stuck.done()
        stuck.cancel()

    with_app(slow, test)


def test_a_model_that_fails_is_said_and_the_next_request_is_answered(talker: Engine, caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        documents, room, fails = None, 100, "at once"

        def answer(self, messages: Any, sampling: Any, heard: Callable[[str], None], *_: Any) -> Answer:
            if self.fails == "later":
                heard("word")
            if self.fails:
                raise RuntimeError("out of memory at /secret/place")
            return talker.answer(messages, sampling, heard)

    failing = Failing()

    async def test(app: Any) -> None:
        for stream in (True, False):
            reply = await Client(app).ask(stream=stream)
            assert (reply.status, reply.json["error"]["code"]) == (500, "model_failed")
            assert b"secret" not in reply.body
        failing.fails = "later"
        reply = await Client(app).ask(stream=True)
        assert reply.events[-1]["error"]["code"] == "model_failed"
        failing.fails = ""
        assert (await Client(app).ask()).status == 200

    with_app(failing, test)
    assert "out of memory" in caplog.text


@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        ({"messages": None}, 400, "messages must be a list of 1 to 1024 messages, got null"),
        ({"messages": []}, 400, "messages must be a list"),
        ({"messages": ["hello"]}, 400, "messages[0] must be an object with role and content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role must be one of system, user, assistant"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content must be a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "parts of type text"),
        ({"messages": [*ASKED, {"role": "assistant", "content": "x"}]}, 400, "the last message must be of the role user"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, 400, "half a character"),
        ({"model": "gpt"}, 404, "there is no model 'gpt' here, only 'tiny'"),
        ({"temperature": 2.5}, 400, "temperature must be a number from 0 to 2, got 2.5"),
        ({"temperature": True}, 400, "temperature must be a number"),
        ({"temperature": float("nan")}, 400, "temperature must be a number"),
        ({"temperature": 10**400}, 400, "temperature must be a number from 0 to 2"),
        ({"temperature": float("inf")}, 400, "temperature must be a number from 0 to 2"),
        ({"top_p": -(10**400)}, 400, "top_p must be a number from 0 to 1"),
        ({"\ud800": 1}, 400, "there is no option '\\ud800'"),
        ({"model": "\ud800"}, 404, "there is no model '\\ud800' here"),
        ({"top_p": 0}, 400, "top_p must be above 0"),
        ({"max_tokens": 0}, 400, "max_tokens must be a whole number of at least 1, got 0"),
        ({"max_completion_tokens": 1.5}, 400, "max_completion_tokens must be a whole number"),
        ({"seed": -1}, 400, "seed must be a whole number from 0"),
        ({"seed": 2**63}, 400, "seed must be a whole number from 0"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "stop must be a text, or at most 4 of them"),
        ({"stop": ""}, 400, "stop must be a text"),
        ({"stream": "yes"}, 400, "stream must be true or false"),
        ({"stream_options": {"include_usage": 1}}, 400, "stream_options must be an object"),
        ({"n": 2}, 400, "n is not supported, got 2; leave it out"),
        ({"tools": [{"type": "function"}]}, 400, "tools is not supported"),
        ({"logprobs": True}, 400, "logprobs is not supported"),
        ({"file": "/etc/passwd"}, 400, "there is no option 'file'"),
        ({"messages": [{"role": "user", "content": words(2000)}]}, 400, "but there is room for"),
    ],
)
def test_bad_requests_get_a_reason(change: dict[str, Any], status: int, said: str, talker: Engine) -> None:
    reply: list[Reply] = []

    async def test(app: Any) -> None:
        reply.append(await Client(app).ask(**change))
        reply.append(await Client(app).ask(stream=True, **change) if "stream" not in change else reply[0])

    with_app(talker, test)
    for one in reply:
        assert one.status == status
        assert said in one.json["error"]["message"]
        assert one.headers["content-type"] == "application/json"


@pytest.mark.parametrize("stream", [True, False])
def test_any_temperature_in_the_range_gets_an_answer(stream: bool, talker: Engine) -> None:
    async def test(app: Any) -> None:
        for temperature in (1e-38, 1e-40, 1e-45, 1e-320, 2.0):
            reply = await Client(app).ask(temperature=temperature, seed=1, stream=stream)
            assert reply.status == 200
            choices = reply.events[-1]["choices"] if stream else reply.json["choices"]
            assert choices[0]["finish_reason"] == "length"

    with_app(talker, test)


def test_bodies_that_are_no_request(talker: Engine) -> None:
    async def test(app: Any) -> None:
        async def post(body: bytes, **headers: str) -> tuple[int, str]:
            reply = await Client(app).call("POST", "/v1/chat/completions", body, **headers)
            return reply.status, reply.json["error"]["message"]

        assert await post(b"{") == (400, "the body is not JSON in UTF-8: " + _reason(b"{"))
        assert (await post(b"[" * 15_000))[0] == 400
        assert (await post(b"\xff\xfe"))[0] == 400
        assert await post(b"[]") == (400, "the body must be a JSON object, got a list")
        assert await post(b" " * 20_001) == (413, "the body has more than 20,000 bytes")
        assert (await post(b"{}", content_type="text/plain"))[0] == 415
        assert (await post(b"{}", host="example.org"))[0] == 421

    with_app(talker, test)


def _reason(body: bytes) -> str:
    try:
        json.loads(body)
    except ValueError as error:
        return str(error)
    raise AssertionError


def test_options_that_ask_for_nothing_are_taken() -> None:
    given = {"messages": ASKED, "n": 1, "presence_penalty": 0, "tools": [], "user": "me", "temperature": None, "logprobs": False}
    asked = parse(json.dumps(given).encode(), "tiny", 8, 12)
    assert asked.messages == [Message("user", "w5 w6 w7")]
    assert asked.sampling == Sampling(max_tokens=8)
    parts = [{"type": "text", "text": "w5 "}, {"type": "text", "text": "w6"}]
    told = {"messages": [{"role": "developer", "content": "w1"}, {"role": "user", "content": parts}], "stop": "x"}
    asked = parse(json.dumps(told).encode(), "tiny", 8, 12)
    assert asked.messages == [Message("system", "w1"), Message("user", "w5 w6")]
    assert asked.sampling.stop == ("x",)
    with pytest.raises(Refused, match="n is not supported, got true"):
        parse(json.dumps({"messages": ASKED, "n": True}).encode(), "tiny", 8, 12)


def test_the_page_and_what_it_asks_for(talker: Engine) -> None:
    app = make_app(talker, "tiny", LIMITS)
    page = get(app, "/")
    assert page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    # Everything comes from the server itself, by a path that it has.
    assert "http://" not in text
    assert "https://" not in text
    for path, kind in (("/page.css", "text/css"), ("/page.js", "text/javascript")):
        assert f'"{path}"' in text
        assert get(app, path).headers["content-type"].startswith(kind)
    assert all(get(app, "/").headers[name] == value for name, value in HEADERS.items())
    assert get(app, "/v1/models").json["data"][0]["id"] == "tiny"
    listed = get(app, "/v1/documents").json
    assert [one["name"] for one in listed["data"]] == ["one.txt", "two.txt"]
    assert listed["room"] == talker.room
    assert get(app, "/health").json == {"status": "ok", "requests": 0}
    assert get(app, "/", host="[::1]:80").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/index.html",
        "/../pyproject.toml",
        "//etc/passwd",
        "/%2e%2e/etc/passwd",
        "/page.css/../asgi.py",
        "/v1",
        "/docs",
    ],
)
def test_no_other_path_leads_anywhere(path: str, talker: Engine) -> None:
    reply = get(make_app(talker, "tiny", LIMITS), path)
    assert reply.status == 404
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_other_methods_are_refused(talker: Engine) -> None:
    app = make_app(talker, "tiny", LIMITS)
    assert get(app, "/v1/chat/completions").status == 405
    assert asyncio.run(Client(app).call("OPTIONS", "/v1/chat/completions", origin="http://example.org")).status == 405
    assert asyncio.run(Client(app).call("DELETE", "/health")).status == 405


def test_the_command_says_what_is_wrong_before_a_model_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("nearfield.app.chat.start.loaded", lambda *_: pytest.fail("a model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, printed = invoke("serve", tmp_path, "--port", taken.getsockname()[1])
        assert code == 2
        assert "cannot listen at --host 127.0.0.1" in printed
    for options, said in (
        (("--document", tmp_path / "nothing.txt"), "not a text file in UTF-8"),
        (("--tokens", 9, "--most-tokens", 8), "--tokens 9 is more than --most-tokens 8"),
        (("--host", "no such host", "--port", 0), "cannot listen at"),
    ):
        code, _, printed = invoke("serve", tmp_path, *options)
        assert code == 2
        assert said in printed

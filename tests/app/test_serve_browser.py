"""The page of `nearfield serve` in a real browser: Chromium, told what to do by chromedriver. Skipped where there is none."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("uvicorn")

import uvicorn
from chats import NEEDLE, engine, words

from nearfield.app.serve.asgi import make_app
from nearfield.app.serve.turns import Limits

DRIVER = shutil.which("chromedriver")
PATIENCE = 60.0
QUIET = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
pytestmark = [pytest.mark.long, pytest.mark.skipif(DRIVER is None, reason="needs Chromium and chromedriver")]


class Browser:
    """One window, by the protocol of WebDriver."""

    def __init__(self, place: str, folder: Path) -> None:
        self.place = place
        options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}", *QUIET]
        wanted = {"alwaysMatch": {"goog:chromeOptions": {"args": options}, "goog:loggingPrefs": {"browser": "ALL"}}}
        self.session = self._ask("POST", "/session", {"capabilities": wanted})["sessionId"]

    def _ask(self, kind: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(self.place + path, data, {"content-type": "application/json"}, method=kind)
        try:
            with urlopen(request, timeout=PATIENCE) as reply:
                return json.load(reply)["value"]
        except HTTPError as error:
            raise AssertionError(error.read().decode()[:500]) from error

    def open(self, address: str) -> None:
        self._ask("POST", f"/session/{self.session}/url", {"url": address})

    def run(self, script: str) -> Any:
        """What a function with this body returns in the page."""
        return self._ask("POST", f"/session/{self.session}/execute/sync", {"script": script, "args": []})

    def _find(self, selector: str) -> str:
        (found,) = self._ask("POST", f"/session/{self.session}/element", {"using": "css selector", "value": selector}).values()
        return found

    def type(self, selector: str, text: str) -> None:
        self._ask("POST", f"/session/{self.session}/element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str) -> None:
        self._ask("POST", f"/session/{self.session}/element/{self._find(selector)}/click", {})

    def wait(self, script: str) -> Any:
        """What the script returns, once that is true."""
        end = time.monotonic() + PATIENCE
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"not so after {PATIENCE} s: {script}\n{self.run('return document.body.innerText')}"
            time.sleep(0.05)
        return found

    @property
    def complaints(self) -> list[str]:
        """What the page has written to the console."""
        return [x["message"] for x in self._ask("POST", f"/session/{self.session}/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._ask("DELETE", f"/session/{self.session}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    """The address of a server with two documents."""
    limits = Limits(waiting=2, seconds=60.0, tokens=8, most_tokens=12, body=20_000)
    port = free_port()
    app = make_app(engine(), "<b>tiny</b>", limits)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + PATIENCE
    while not server.started:
        assert thread.is_alive()
        assert time.monotonic() < end
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def open_page(page: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Browser]]:
    """Makes the page anew."""
    assert DRIVER is not None
    port = free_port()
    with contextlib.ExitStack() as stack:
        driver = stack.enter_context(subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL))
        stack.callback(driver.kill)
        place, end = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
        while True:
            try:
                urlopen(f"{place}/status", timeout=5).close()
                break
            except URLError:
                assert time.monotonic() < end
                time.sleep(0.1)
        browser = Browser(place, tmp_path_factory.mktemp("browser"))
        stack.callback(browser.close)

        def opened() -> Browser:
            browser.open(page)
            browser.wait("return document.querySelectorAll('#documents li').length == 2")
            return browser

        yield opened


ANSWERED = "return document.querySelectorAll('#chat li.assistant .facts').length"


def test_the_page_shows_model_and_documents(open_page: Callable[[], Browser]) -> None:
    browser = open_page()
    assert browser.run("return document.getElementById('model').textContent") == "<b>tiny</b>"  # text, no markup
    told = browser.run("return document.getElementById('documents').innerText")
    assert "one.txt" in told
    assert "two.txt" in told
    assert browser.complaints == []


def test_an_answer_streams_with_its_citations(open_page: Callable[[], Browser]) -> None:
    browser = open_page()
    browser.type("#question", f"w5 {NEEDLE}\n")  # Enter sends
    assert browser.wait(ANSWERED) == 1
    shown = browser.run("return document.querySelector('#chat li.assistant .text').textContent")
    assert shown.split()
    facts = browser.run("return document.querySelector('#chat li.assistant .facts').textContent")
    assert "first token after" in facts
    assert "error of attention" in facts
    # The next question goes with what was said before, and is answered below.
    browser.type("#question", "w9")
    browser.click("#send")
    assert browser.wait(f"{ANSWERED} == 2 && 2") == 2
    assert browser.run("return document.querySelectorAll('#chat li').length") == 4
    assert not browser.run("return document.getElementById('send').disabled")
    assert browser.complaints == []


def test_a_question_that_is_refused_is_given_back_with_the_reason(open_page: Callable[[], Browser]) -> None:
    browser = open_page()
    long = words(1500)
    browser.run(f"document.getElementById('question').value = {json.dumps(long)}; return 1")
    browser.click("#send")
    reason = browser.wait("const e = document.getElementById('error'); return !e.hidden && e.textContent")
    assert "tokens" in reason
    assert browser.run("return document.getElementById('question').value") == long
    assert browser.run("return document.querySelectorAll('#chat li').length") == 0
    (complaint,) = browser.complaints  # a browser notes every status of 400
    assert "400" in complaint


def test_a_new_chat_is_empty_and_what_is_typed_is_no_markup(open_page: Callable[[], Browser]) -> None:
    browser = open_page()
    browser.type("#question", "<img src=x onerror=document.title=1> w5\n")
    browser.wait(ANSWERED)
    assert browser.run("return document.querySelectorAll('#chat img').length") == 0
    browser.click("#reset")
    assert browser.run("return document.querySelectorAll('#chat li').length") == 0
    assert browser.run("return document.title") == "nearfield: ask the documents"
    assert browser.complaints == []

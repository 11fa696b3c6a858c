"""What a request for a chat completion may say. Anything else is refused with a reason, before the model is asked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from nearfield.app.chat.engine import Message, Sampling

ROLES = ("system", "user", "assistant")

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
"""Options of other servers that this one does not have, and the values with which they ask for nothing."""

NO_EFFECT = ("user", "metadata", "store", "parallel_tool_calls", "service_tier", "safety_identifier")
"""Options that have no effect on an answer."""

MOST_STOPS, STOP_LENGTH = 4, 256

MOST_MESSAGES = 1024


class Refused(Exception):
    """A request that is answered with an error: its status, a reason for people, and a code for programs."""

    def __init__(self, status: int, reason: str, code: str = "invalid_request_error", parameter: str | None = None) -> None:
        super().__init__(reason)
        self.status, self.reason, self.code, self.parameter = status, reason, code, parameter

    @property
    def content(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        return {"error": {"message": self.reason, "type": kind, "param": self.parameter, "code": self.code}}


@dataclass(frozen=True)
class Asked:
    """A request that can be answered."""

    messages: list[Message]
    sampling: Sampling
    stream: bool
    with_usage: bool


def parse(raw: bytes, model: str, usual_tokens: int, most_tokens: int) -> Asked:
    """The request in a body. Raises `Refused` if it is none."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON in UTF-8: {error}") from error
    if not isinstance(body, dict):
        raise Refused(400, f"the body must be a JSON object, got {_kind(body)}")
    # A null says what leaving the option out says.
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("model", model) != model:
        raise Refused(404, f"there is no model {given['model']!r} here, only {model!r}", "model_not_found", "model")
    known = {"model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens"}
    known |= {"temperature", "top_p", "seed", "stop", *NEUTRAL, *NO_EFFECT}
    for name, value in given.items():
        if name not in known:
            raise Refused(400, f"there is no option {name!r}", "unknown_parameter", name)
        if name in NEUTRAL and (value not in NEUTRAL[name] or isinstance(value, bool) != isinstance(NEUTRAL[name][0], bool)):
            raise Refused(400, f"{name} is not supported, got {_short(value)}; leave it out", "unsupported_parameter", name)
    limit = "max_completion_tokens" if "max_completion_tokens" in given else "max_tokens"
    options = given.get("stream_options", {})
    if not isinstance(options, dict) or not isinstance(options.get("include_usage", False), bool):
        raise Refused(
            400, f"stream_options must be an object with include_usage, got {_short(options)}", parameter="stream_options"
        )
    sampling = Sampling(
        max_tokens=min(_whole(given, limit, usual_tokens, 1, None), most_tokens),
        temperature=_number(given, "temperature", 0.0, 0.0, 2.0),
        top_p=_number(given, "top_p", 1.0, 0.0, 1.0),
        seed=_whole(given, "seed", 0, 0, 2**63 - 1) if "seed" in given else None,
        stop=_stops(given.get("stop", [])),
    )
    if sampling.top_p == 0.0:
        raise Refused(400, "top_p must be above 0 and at most 1, got 0", parameter="top_p")
    stream = given.get("stream", False)
    if not isinstance(stream, bool):
        raise Refused(400, f"stream must be true or false, got {_short(stream)}", parameter="stream")
    return Asked(_messages(given.get("messages")), sampling, stream, bool(options.get("include_usage", False)))


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise Refused(400, f"messages must be a list of 1 to {MOST_MESSAGES} messages, got {_short(given)}", parameter="messages")
    found = []
    for number, one in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(one, dict):
            raise Refused(400, f"{where} must be an object with role and content, got {_short(one)}", parameter=where)
        role = "system" if one.get("role") == "developer" else one.get("role")
        if role not in ROLES:
            raise Refused(400, f"{where}.role must be one of {', '.join(ROLES)}, got {_short(role)}", parameter=where)
        found.append(Message(role, _content(one.get("content"), where)))
    if found[-1].role != "user":
        raise Refused(400, f"the last message must be of the role user, got {found[-1].role}", parameter="messages")
    return found


def _content(given: Any, where: str) -> str:
    """A text, or a list of parts that are texts."""
    parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
    if not isinstance(parts, list) or not all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in parts
    ):
        raise Refused(
            400, f"{where}.content must be a text or a list of parts of type text, got {_short(given)}", parameter=where
        )
    text = "".join(part["text"] for part in parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(400, f"{where}.content has half a character: {error.reason}", parameter=where) from error
    return text


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if (
        not isinstance(stops, list)
        or len(stops) > MOST_STOPS
        or not all(isinstance(stop, str) and 0 < len(stop) <= STOP_LENGTH for stop in stops)
    ):
        reason = f"stop must be a text, or at most {MOST_STOPS} of them, of 1 to {STOP_LENGTH} characters each"
        raise Refused(400, f"{reason}, got {_short(given)}", parameter="stop")
    return tuple(stops)


def _whole(given: dict[str, Any], name: str, usual: int, least: int, most: int | None) -> int:
    value = given.get(name, usual)
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise Refused(400, f"{name} must be a whole number {limits}, got {_short(value)}", parameter=name)
    return value


def _number(given: dict[str, Any], name: str, usual: float, least: float, most: float) -> float:
    value = given.get(name, usual)
    # No conversion before the limits: a whole number may be too large for it. What is no number is not within them.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise Refused(400, f"{name} must be a number from {least:g} to {most:g}, got {_short(value)}", parameter=name)
    return float(value)


def _kind(value: Any) -> str:
    return {dict: "an object", list: "a list", str: "a text", type(None): "nothing"}.get(type(value), "a number or truth value")


def _short(value: Any) -> str:
    """A value as it was received, if it is short."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{_kind(value)} of {len(value) if hasattr(value, '__len__') else len(text)}"

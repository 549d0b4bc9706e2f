"""What must be true of a session, judged from what it shows: the prompts it would send and the transcript it gives back.

The rules of both wire forms and the weight of a prompt are written down here a second time, from the providers'
references. Nothing of the kernel or of the wire code, and no figure that they give, is used.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kilburn.errors import KilburnError
from kilburn.kernel.session import Session
from kilburn.page import parse_address

__all__ = ["RULER", "Book", "Look", "Turn", "faults_of_chat", "faults_of_messages", "look", "weight"]

RULER = "chars/1"
"""One character is one token here, so that no rounding hides an overflow."""

_SYNTAX = {"role", "type", "media_type", "cache_control"}
_ROLES = {"system", "developer", "user", "assistant", "tool"}


class Turn(msgspec.Struct, kw_only=True):
    """What is appended in one call.

    Args:
        texts: the text of each page that it must become, in order; of a tool's input as a dict, the dict.
        opens: ids of calls that it makes; `closes` of those that it answers.
    """

    messages: list[dict[str, Any]]
    texts: list[Any]
    opens: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()


class Look(msgspec.Struct, kw_only=True):
    """What somebody saw of a session: the transcript, the prompt in the chat form, and what is wrong with any of it."""

    messages: list[Any] = []
    prompt: list[Any] = []
    faults: list[str] = []
    error: str = ""


def weight(value: Any, key: str = "") -> int:
    """Characters of all strings that a model is sent; a tool's input as a dict counts as compact JSON."""
    if key == "input" and isinstance(value, dict):
        return len(json.dumps(value, ensure_ascii=False, separators=(",", ":")))
    if isinstance(value, str):
        return len(value) if key not in _SYNTAX else 0
    if isinstance(value, dict):
        return sum(weight(inner, name) for name, inner in value.items() if name not in _SYNTAX)
    return sum(weight(inner, key) for inner in value) if isinstance(value, list) else 0


def faults_of_chat(prompt: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where a prompt breaks the rules of OpenAI's chat form: calls are answered at once, by tool messages, once each."""
    waiting: set[str] = set()
    for at, message in enumerate(prompt):
        role, calls = message.get("role"), [call["id"] for call in message.get("tool_calls") or ()]
        if role not in _ROLES:
            yield f"message {at} has the role {role!r}"
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                yield f"message {at} answers no call that waits"
            waiting.discard(str(message.get("tool_call_id")))
            continue
        if waiting:
            yield f"calls before message {at} have no result"
        if len(set(calls)) != len(calls) or (calls and role != "assistant"):
            yield f"message {at} makes calls that it may not make"
        waiting = set(calls)
    if waiting:
        yield "calls at the end have no result"


def faults_of_messages(prompt: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Where a prompt breaks the rules of Anthropic's form: turns alternate, and each tool use is answered first thing."""
    waiting: set[str] = set()
    for at, message in enumerate(prompt):
        if message.get("role") != ("assistant" if at % 2 else "user"):
            yield f"message {at} is by {message.get('role')!r}: turns do not alternate"
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())
        if not blocks:
            yield f"message {at} is empty"
        if any(block.get("type") == "text" and not block.get("text") for block in blocks):
            yield f"message {at} has an empty text"
        kinds = [block.get("type") == "tool_result" for block in blocks]
        answered = [str(block.get("tool_use_id")) for block in blocks if block.get("type") == "tool_result"]
        if set(answered) != waiting or len(answered) != len(waiting):
            yield f"message {at} answers {sorted(answered)} where {sorted(waiting)} wait"
        if kinds != sorted(kinds, reverse=True):
            yield f"message {at} has something before its tool results"
        waiting = {str(block.get("id")) for block in blocks if block.get("type") == "tool_use"}
    if waiting:
        yield "tool uses at the end have no result"


def look(session: Session, window: int) -> Look:
    """Render in both forms and read the transcript; whatever is wrong is in `faults`, and nothing is raised."""
    seen = Look()
    try:
        for form, rules in (("chat", faults_of_chat), ("messages", faults_of_messages)):
            prompt = session.render(form)
            size = weight(list(prompt)) + weight(prompt.system or "")
            if size > window:
                seen.faults.append(f"over: a prompt of {size} in a window of {window} ({form})")
            seen.faults += [f"invalid: {fault} ({form})" for fault in rules(prompt)]
            seen.prompt = seen.prompt or list(prompt)
        seen.messages = session.contents.messages()
    except KilburnError as error:
        seen.error = f"{type(error).__name__}: {error}"
    except BaseException as error:
        if not isinstance(error, Exception):
            raise
        seen.faults.append(f"untyped: reading raises {type(error).__name__}: {error}")
    return seen


class Book:
    """What was acknowledged, in the order of its addresses, and what was refused or forgotten since."""

    def __init__(self) -> None:
        self.admitted: dict[int, Turn] = {}
        self.forgotten: set[int] = set()
        self.lock = threading.Lock()

    def admit(self, address: str, turn: Turn) -> Iterator[str]:
        """Note an acknowledged turn; yields what is wrong with its address."""
        first, last = parse_address(address)
        with self.lock:
            self.admitted[first] = turn
        if last - first + 1 != len(turn.texts):
            yield f"address: {address} for {len(turn.texts)} parts"

    def expected(self) -> list[dict[str, Any]]:
        """The whole transcript as it must come back."""
        with self.lock:
            kept = [turn for first, turn in sorted(self.admitted.items()) if first not in self.forgotten]
        return [message for turn in kept for message in turn.messages]

    def open_calls(self) -> list[str]:
        """Calls without a result."""
        with self.lock:
            closed = {call for turn in self.admitted.values() for call in turn.closes}
            return [call for _, turn in sorted(self.admitted.items()) for call in turn.opens if call not in closed]

    def single(self) -> list[int]:
        """Addresses of turns that are one plain page and were not forgotten."""
        with self.lock:
            found = [(first, turn) for first, turn in sorted(self.admitted.items()) if first not in self.forgotten]
        return [first for first, turn in found if len(turn.texts) == 1 and not turn.opens and not turn.closes]

    def faults(self, messages: Sequence[Any]) -> Iterator[str]:
        """Where a transcript is not exactly what was acknowledged."""
        expected = self.expected()
        if list(messages) == expected:
            return
        said = [json.dumps(message, sort_keys=True) for message in messages]
        wanted = [json.dumps(message, sort_keys=True) for message in expected]
        missing, more = [one for one in wanted if one not in said], [one for one in said if one not in wanted]
        if more:
            yield f"admitted, and no append returned: {len(more)} messages, such as {more[0][:80]}"
        if missing:
            yield f"lost, and its append returned: {len(missing)} messages, such as {missing[0][:80]}"
        if len(said) != len(set(said)):
            yield "doubled: a message stands in the transcript twice"
        elif not missing and not more:
            yield "disorder: the transcript is not in the order of its addresses"

    def unreadable(self, session: Session) -> Iterator[str]:
        """Pages that do not come back as they were given, by address."""
        with self.lock:
            admitted = sorted(self.admitted.items())
        for first, turn in admitted:
            for at, text in enumerate(turn.texts):
                address = f"p{first + at}"
                try:
                    back: Any = str(session.recall(address))
                except KilburnError as error:
                    if type(error).__name__ != "Forgotten" or first not in self.forgotten:
                        yield f"recall: {address} raises {type(error).__name__}"
                    continue
                if first in self.forgotten:
                    yield f"recall: {address} was forgotten and comes back"
                elif back != text and (not isinstance(text, dict) or json.loads(back) != text):
                    yield f"recall: {address} is not what was given"

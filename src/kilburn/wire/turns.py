"""Messages in the order that providers require: each tool result directly after the message that called.

No content is added or removed. Tool messages are split into single results, and whatever came between a call and its
results is put after them.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kilburn.message import Kind, Message, Part, Role
from kilburn.wire.plain import unpack

PROSE = frozenset({Kind.TEXT, Kind.FOLD, Kind.EXCERPT})
"""Kinds that are rendered as text."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message, or one result of a tool message with what is attached to it.

    Args:
        role: who speaks.
        parts: of a result: the RESULT first, then its attached parts.
        extra: the message's extra, decoded; a fresh copy for each turn.
    """

    role: Role
    parts: tuple[Part, ...]
    extra: dict[str, Any]

    @property
    def form(self) -> str | None:
        """The wire form that the message came in, or None for Kilburn's own."""
        form = self.extra.get("form")
        return form if isinstance(form, str) else None

    @property
    def result(self) -> Part | None:
        """The one tool result, if this turn is one."""
        return self.parts[0] if self.role is Role.TOOL and self.parts[0].kind is Kind.RESULT else None


def turns(messages: Sequence[Message]) -> list[Turn]:
    """Return all messages as turns, each result after its call; messages without parts are left out.

    A result without a call stays where it is; `kilburn.wire.validity` reports it.
    """
    split = [turn for message in messages for turn in _split(message)]
    results: dict[str | None, deque[int]] = defaultdict(deque)
    for index, turn in enumerate(split):
        if turn.result is not None:
            results[turn.result.call].append(index)
    ordered: list[Turn] = []
    placed: set[int] = set()
    for index, turn in enumerate(split):
        if index in placed:
            continue
        ordered.append(turn)
        placed.add(index)
        if turn.result is not None:
            results[turn.result.call].popleft()
        elif turn.role is Role.ASSISTANT:
            calls = [part.call for part in turn.parts if part.kind is Kind.CALL]
            answers = sorted(results[call].popleft() for call in calls if results.get(call))
            ordered.extend(split[answer] for answer in answers)
            placed.update(answers)
    return ordered


def _split(message: Message) -> list[Turn]:
    if not message.parts:
        return []
    if message.role is not Role.TOOL:
        return [Turn(message.role, message.parts, unpack(message.extra))]
    runs: list[list[Part]] = []
    for part in message.parts:
        attached = part.kind is not Kind.RESULT and runs and runs[-1][0].kind is Kind.RESULT and part.call == runs[-1][0].call
        if attached or (runs and part.kind is not Kind.RESULT and runs[-1][0].kind is not Kind.RESULT):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [Turn(message.role, tuple(run), unpack(message.extra)) for run in runs]


CHAT_ID = re.compile(r"(?s).{1,40}\Z")
"""OpenAI refuses call ids of more than 40 characters."""
MESSAGES_ID = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")
_UNSAFE = re.compile(r"[^a-zA-Z0-9_-]")
_HASHED = re.compile(r"kilburn-[0-9a-f]{32}\Z")


def safe_id(call: str | None, accepted: re.Pattern[str]) -> str:
    """Return the call id itself if the provider accepts it, else 40 characters with a part of its SHA-256.

    Ids that look like such a substitute are hashed too, so two ids never become one (short of a
    collision of 128 bits).
    """
    name = call or ""
    if accepted.match(name) and not _HASHED.match(name):
        return name
    return f"kilburn-{hashlib.sha256(name.encode('utf-8')).hexdigest()[:32]}"


@lru_cache(maxsize=1024)
def safe_name(name: str | None) -> str:
    """Return a tool's name in a form that providers accept: a model may have called a name that no tool can have."""
    return _UNSAFE.sub("_", name or "")[:64] or "_"

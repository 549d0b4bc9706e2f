"""Whether a client has made a history of an earlier session by itself: with a summary in its place, or with the middle left out.

Conversations share much by chance: greetings, the same files read by the same calls, the examples of a template. Two things they
do not share by chance, and only these count:

- the end of the session, with what its assistant said there in many words, in a history that leaves out more of the session
  than it puts in its place;
- a summary, word for word, that was the session's last reply, that nobody else had said there, and that is much shorter than
  the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from kilburn.message import Kind, Message, Role

MIN_OWN_CHARS = 200
"""Characters of an assistant, in texts and arguments, that no two conversations have by chance."""

MIN_OMITTED = 4
"""Messages that a client leaves out at least. Of one exchange less we say that the client took it back."""

MIN_SUMMARY_CHARS = 500
"""Characters of a summary."""

STRETCHES, STRETCH, MIN_STRETCHES = 16, 60, 6
"""A reply is recognised by so many stretches, of so many characters, of which so many are found: some clients leave out what the
model thought before it summed up."""

SHORTER = 2
"""The rest of the session is at least so many times longer than its summary."""

OPENING = 4
"""Messages at the beginning of a history of which one may be a summary."""

PLACES = 8
"""Places in a history that are tried for the end of a session."""


def end_of(session: Sequence[bytes], digests: Sequence[bytes], places: Mapping[bytes, Sequence[int]], common: int) -> range:
    """The stretch of a history that is the end of a session, if a compaction can have put it there; else an empty range.

    Args:
        session, digests: of the session's messages, and of the history's.
        places: of each digest in the history.
        common: messages with which both begin.
    """
    best = range(0)
    for last in places.get(session[-1], ())[-PLACES:] if session else ():
        size = 1
        while size <= min(last, len(session) - 1) and digests[last - size] == session[-1 - size]:
            size += 1
        if size > len(best):
            best = range(last + 1 - size, last + 1)
    left_out = len(session) - len(best) - common
    return best if left_out >= MIN_OMITTED and left_out > best.start - common else range(0)


def is_own(messages: Iterable[Message]) -> bool:
    """Return whether an assistant says so much in these messages that it is no chance. No more are read than needed."""
    parts = (part for message in messages if message.role is Role.ASSISTANT for part in message.parts)
    sizes = accumulate(len(part.text) for part in parts if part.kind in (Kind.TEXT, Kind.CALL))
    return any(size >= MIN_OWN_CHARS for size in sizes)


def quotes(reply: str, text: str) -> list[str]:
    """The stretches of a reply that a text has; none, if they are too few for a quotation."""
    if len(reply) < MIN_SUMMARY_CHARS or len(text) * STRETCHES < len(reply) * MIN_STRETCHES:
        return []
    stretches: list[str] = []
    for number in range(STRETCHES):
        start = number * (len(reply) - STRETCH) // (STRETCHES - 1)
        stretch = reply[start : start + STRETCH].strip()
        if stretch in text:
            stretches.append(stretch)
        elif len(stretches) + STRETCHES - 1 - number < MIN_STRETCHES:
            return []
    return stretches


def is_summary(reply: str, quoted: Sequence[str], session: Iterable[Message]) -> bool:
    """Whether a session's last reply, of which these stretches are quoted, can be its summary: they are its own words, and the
    session is longer."""
    size, texts = 0, []
    for message in session:
        size += sum(len(part.text) for part in message.parts)
        if message.role is not Role.ASSISTANT:
            texts += [part.text for part in message.parts]
    new_stretches = [stretch for stretch in quoted if not any(stretch in text for text in texts)]
    return len(new_stretches) >= MIN_STRETCHES and size >= (1 + SHORTER) * len(reply)


def texts_of(raw: bytes) -> Iterator[str]:
    """The strings in a piece of JSON that was read before."""
    waiting: list[Any] = [msgspec.json.decode(raw)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value

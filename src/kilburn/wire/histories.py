"""The identity of histories: chains of digests, and histories that a client has compacted by itself.

A client or a framework sends its whole history with each request. The chain of its digests identifies the session that it
continues, for one user and one root; sessions of others never have the same links.

A client may also compact its history: it puts a summary in the place of old messages, or omits the middle. Conversations share
much by chance: greetings, the same files read by the same calls, the examples of a template. Two things identify a session:

- its end, with many words of its assistant, in a history that omits more of the session than it puts in its place;
- a summary, word for word, that was the session's last reply, that occurs nowhere else in it, and that is much shorter than the
  session.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from kilburn.message import Kind, Message, Role
from kilburn.wire.digests import is_spoken

OF_WORDS = re.compile("chat-[0-9a-f]{16}")
"""Name of a session to which its client gave no name."""

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


def is_linkable(first: str, second: str) -> bool:
    """Return whether two sessions of one user may be linked, by their roots. A session with a client's name is linked only to
    others of that name."""
    return first == second or bool(OF_WORDS.fullmatch(first) and OF_WORDS.fullmatch(second))


def chained(digests: Iterable[bytes], start: bytes = b"") -> Iterator[bytes]:
    """Yield for each digest a digest of it and all earlier ones."""
    for digest in digests:
        start = hashlib.blake2b(start + digest, digest_size=16).digest()
        yield start


def tails(digests: Sequence[bytes], root: str, user: str, start: int = 0) -> Iterator[bytes | None]:
    """Yield for each digest from `start` on: for an assistant's message, a digest of it and of the assistant's previous message;
    None for others. It finds the user's sessions that may be linked to a session of this root."""
    seed = chain_seed("" if OF_WORDS.fullmatch(root) else root, user)
    last = next(filter(is_spoken, reversed(digests[:start])), b"")
    for digest in digests[start:]:
        if is_spoken(digest):
            yield hashlib.blake2b(seed + last + digest, digest_size=16).digest()
            last = digest
        else:
            yield None


def chain_seed(root: str, user: str) -> bytes:
    """Return the start value of the chains of a user's sessions of one root, which no other user shares."""
    return hashlib.blake2b(f"{user}\0{root}".encode(), digest_size=16).digest()


def shared(first: Sequence[bytes], second: Sequence[bytes]) -> int:
    """Return the length of the common prefix of two chains; equal links have equal predecessors."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[middle - 1] == second[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def session_end(session: Sequence[bytes], digests: Sequence[bytes], places: Mapping[bytes, Sequence[int]], common: int) -> range:
    """Return the range of a history that is the end of a session, if a compaction can have put it there; else an empty range.

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


def index_places(digests: Sequence[bytes]) -> dict[bytes, list[int]]:
    """Return the positions of each digest."""
    places: dict[bytes, list[int]] = {}
    for at, digest in enumerate(digests):
        places.setdefault(digest, []).append(at)
    return places


def is_own(messages: Iterable[Message]) -> bool:
    """Return whether an assistant's text in these messages is too long to be equal by chance. No more messages are read than
    needed."""
    parts = (part for message in messages if message.role is Role.ASSISTANT for part in message.parts)
    sizes = accumulate(len(part.text) for part in parts if part.kind in (Kind.TEXT, Kind.CALL))
    return any(size >= MIN_OWN_CHARS for size in sizes)


def find_summary(reply: str, texts: Iterable[str], session: Callable[[], Iterable[Message]]) -> int | None:
    """Return the index of the first text that has a session's last reply as its summary; None if there is none.

    Args:
        session: returns the session's messages.
    """
    for at, text in enumerate(texts):
        quoted = quotes(reply, text)
        if quoted and is_summary(reply, quoted, session()):
            return at
    return None


def quotes(reply: str, text: str) -> list[str]:
    """Return the stretches of a reply that a text contains; none if they are too few for a quotation."""
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
    """Return whether a session's last reply, of which these stretches are quoted, can be its summary: only the reply has them,
    and the session is longer."""
    size, texts = 0, []
    for message in session:
        size += sum(len(part.text) for part in message.parts)
        if message.role is not Role.ASSISTANT:
            texts += [part.text for part in message.parts]
    new_stretches = [stretch for stretch in quoted if not any(stretch in text for text in texts)]
    return len(new_stretches) >= MIN_STRETCHES and size >= (1 + SHORTER) * len(reply)


def json_texts(raw: bytes) -> Iterator[str]:
    """Yield the strings in JSON that was decoded before."""
    waiting: list[Any] = [msgspec.json.decode(raw)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value

"""What everybody does when the window is full: cut the front off, or keep a summary of it.

Both get the same transcript in the same window, and the same answerer over what they kept, through
the same two functions; there is nothing below their window. They refuse nothing else: their search
is over all they hold and returns all that matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kilburn.message import Kind, Role
from kilburn.page import Page, address_of
from kilburn.text.extract import Piece, extract

__all__ = ["Kept", "summarised", "truncated"]

SEGMENT = 800
"""Characters of a passage, as in the stores."""

FULL, TAIL, SUMMARY = 3 / 4, 1 / 4, 1 / 8
"""Shares of the window: when a summary is made, what it leaves alone, and what it may take."""

Count = Callable[[str], int]
Said = tuple[Page, str]

_WORD = re.compile(r"\w+")


class _Part(NamedTuple):
    address: str
    speaker: str
    text: str


class Kept:
    """Texts that a rival still has, with the two functions of `kilburn.demo.memory.Memory` over them."""

    def __init__(self, parts: Iterable[tuple[str, str, str]]) -> None:
        self._parts = {part[0]: _Part(*part) for part in parts}

    @property
    def text(self) -> str:
        """All of it."""
        return "\n".join(part.text for part in self._parts.values())

    def recall(self, address: str, offset: int = 0, limit: int | None = None) -> str:
        """See `Memory`."""
        part = self._parts.get(address)
        if part is None:
            return f"error: {address} is gone"
        return f"[{address}, {part.speaker}]\n{part.text[offset : None if limit is None else offset + limit]}"

    def search_memory(self, query: str, tokens: int = 1000) -> str:
        """See `Memory`; every passage with any of the words, most words first, whatever `tokens` says."""
        words = set(_WORD.findall(query.lower()))
        hits: list[tuple[int, str]] = []
        for part in self._parts.values():
            for start, end in _segments(part.text):
                shared = len(words & set(_WORD.findall(part.text[start:end].lower())))
                if shared:
                    hits.append((shared, f"[{part.address} characters {start}-{end}, {part.speaker}]\n{part.text[start:end]}"))
        hits.sort(key=lambda hit: -hit[0])
        return "\n".join(text for _, text in hits) or "nothing found"


def _segments(text: str) -> Iterable[tuple[int, int]]:
    start = 0
    while start < len(text):
        end = min(start + SEGMENT, len(text))
        line = text.rfind("\n", start, end)
        end = line + 1 if end < len(text) and line > start else end
        yield start, end
        start = end


def truncated(said: Sequence[Said], capacity: int, count: Count) -> Kept:
    """The last `capacity` tokens of a transcript; of the page on the edge, its end."""
    parts: list[tuple[str, str, str]] = []
    left = capacity
    for page, text in reversed(said):
        if page.tokens > left:
            # The share of characters that the room left is worth, and less until it fits.
            end = text[len(text) - int(len(text) * left / page.tokens) :]
            while end and count(end) > left:
                end = end[len(end) // 8 + 1 :]
            if end:
                parts.append((page.address, str(page.role), end))
            break
        left -= page.tokens
        parts.append((page.address, str(page.role), text))
    return Kept(reversed(parts))


def summarised(said: Iterable[Said], capacity: int, count: Count, told: Callable[[int], None] = lambda page: None) -> Kept:
    """A rolling summary and the newest pages: when the window is three quarters full, all but its newest
    quarter and the summary so far become the next summary, extracted verbatim.

    Args:
        told: called with the number of each page as it is taken in.
    """
    summary = ""
    recent: list[Said] = []
    used = 0
    for page, text in said:
        told(page.id)
        recent.append((page, text))
        used += page.tokens
        if used + count(summary) <= capacity * FULL:
            continue
        old, used = [], sum(page.tokens for page, _ in recent)
        while len(recent) > 1 and used > capacity * TAIL:
            old.append(recent.pop(0))
            used -= old[-1][0].tokens
        pieces = [Piece(page.id, str(page.role), str(page.kind), text, page.label) for page, text in old]
        before = [Piece(0, str(Role.USER), str(Kind.FOLD), summary)] if summary else []
        summary = extract([*before, *pieces], int(capacity * SUMMARY), count).text
        if recent and used > capacity * FULL:
            page, text = recent[0]
            end = text[-len(text) * int(capacity * TAIL) // page.tokens :]
            recent, used = [(page, end)], int(capacity * TAIL)
    kept = [("s1", "summary", summary)] if summary else []
    return Kept([*kept, *((address_of(page.id), str(page.role), text) for page, text in recent)])

"""How much of what a prompt shows of older outputs stands in whole sections, and not in scattered pieces.

A *section* is a whole output; a record (a line that begins with its own path, place, time, level or mark, with the
deeper lines under it); or, if it has three lines or 200 characters, a block (a line with the deeper lines under it: a
definition, a loop, a traceback), a hunk of a diff, or a paragraph (the lines between two blank ones). A character
counts if its line is part of a section of which all lines stand in the prompt, one directly after the other.

Only indentation, blank lines and the beginnings of lines are read, and no policy's code takes part. The line numbers
of a file view are no part of its indentation. Blank lines count nowhere, so a section may be shown without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

LEAST_LINES, LEAST_CHARACTERS = 3, 200
"""One of these is what a block, a hunk or a paragraph has at least: two short lines side by side are still scattered."""

_NUMBER = re.compile(r"\s*\d+[:|\t→]")
_HUNK = re.compile(r"@@ -\d+(?:,\d+)? \+\d+")
_CLOSES = re.compile(r"[)\]}]")
_TRACEBACK = "Traceback (most recent call last)"
_RECORD = re.compile(
    r"""[\[(]?(?:
      [-•]\ \S | \d+[.)]\ \S | \|.*\|$                              # an item, a row of a table
    | \d{2,4}[-:/]\d\d[-:/]\d\d                                     # a time
    | (?:DEBUG|INFO|WARN|ERROR|CRITICAL|FAIL|PASS|OK)[A-Z]*\b       # a level, a result
    | /?(?:[\w.@+-]+/)+[\w.@+-]+(?=$|[\s:(,])                       # a path
    | [\w-]+\.\w+[:\s]\d+\b | [Ll]ine\ \d+:                         # a place
    )""",
    re.VERBOSE,
)


class _Line(NamedTuple):
    """A line that is not blank: all of it, its text behind number and indentation, the indentation, and whether a blank
    line stands before it."""

    whole: str
    text: str
    depth: int
    gap: bool


class Sections:
    """The outputs that an agent has seen so far, and which of their sections a prompt shows whole.

    What the agent says itself is left out: its paragraphs are mostly of one line, which cannot be torn.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._lines: list[str] = []
        self._ends: list[list[int]] = []
        self._places: dict[str, list[int]] = {}

    def add(self, text: str) -> None:
        """One more output."""
        start = len(self._lines)
        self._texts.append(text)
        self._lines += [*(line.whole for line in _lines(text)), ""]
        self._ends += [[] for _ in self._lines[start:]]
        for at, line in enumerate(self._lines[start:-1], start):
            self._places.setdefault(line, []).append(at)
        for first, end in sections(text):
            self._ends[start + first].insert(0, start + end)

    def count(self, prompt: str) -> tuple[int, int]:
        """Characters of the prompt that stand in whole sections of outputs, and all that are lines of outputs or parts of
        lines.

        Blank lines and whatever else a prompt has (marks, handles, words of a model) are in neither.
        """
        shown = [line.whole for line in _lines(prompt)]
        whole = [False] * len(shown)
        for here, line in enumerate(shown):
            for there in self._places.get(line, ()):
                if here == 0 or shown[here - 1] != self._lines[there - 1]:
                    self._mark(shown, here, there, whole)
        known = (line in self._places or any(line.strip() in text for text in self._texts) for line in shown)
        return (
            sum(len(line) for line, inside in zip(shown, whole, strict=True) if inside),
            sum(len(line) for line, own in zip(shown, known, strict=True) if own),
        )

    def _mark(self, shown: Sequence[str], here: int, there: int, whole: list[bool]) -> None:
        """Mark what stands in whole sections of the longest run of lines that begins at two places."""
        length = 0
        while here + length < len(shown) and shown[here + length] == self._lines[there + length]:
            length += 1
        for at in range(there, there + length):
            end = next((end for end in self._ends[at] if end <= there + length), at)
            whole[here + at - there : here + end - there] = [True] * (end - at)


def sections(text: str) -> list[tuple[int, int]]:
    """The sections of a text: the number of the first line and of the line after the last one, blank lines not counted."""
    lines = list(_lines(text))
    found = {(0, len(lines))} if lines else set()
    start = 0
    for head, line in enumerate(lines):
        if head >= start and _HUNK.match(line.whole):
            found |= _plain(lines, start, head)
            start = next((at for at in range(head + 1, len(lines)) if lines[at].whole[0] not in " +-\\"), len(lines))
            found |= {(head, start)} if _is_long(lines[head:start]) else set()
    return sorted(found | _plain(lines, start, len(lines)))


def _lines(text: str) -> Iterator[_Line]:
    gap = False
    for line in text.split("\n"):
        whole = line.rstrip()
        number = _NUMBER.match(whole) if not _RECORD.match(whole) else None
        inner = whole[number.end() :] if number else whole
        own = inner.lstrip()
        if own:
            yield _Line(whole, own, len(inner) - len(own), gap)
        gap = not own


def _plain(lines: Sequence[_Line], start: int, stop: int) -> set[tuple[int, int]]:
    """The paragraphs, blocks and records of a stretch without hunks."""
    cuts = [start, *(at for at in range(start + 1, stop) if lines[at].gap), stop]
    found = set(pairwise(cuts)) | {(at, _end_of_block(lines, at, stop)) for at in range(start, stop)}
    return {(at, end) for at, end in found if at < end and (_is_long(lines[at:end]) or _RECORD.match(lines[at].text))}


def _end_of_block(lines: Sequence[_Line], head: int, stop: int) -> int:
    """Where the lines end that are deeper than the head, or only close its brackets; the error of a traceback is part of
    it."""
    end = head + 1
    while end < stop and lines[end].depth >= lines[head].depth + (_CLOSES.match(lines[end].text) is None):
        end += 1
    return min(stop, end + lines[head].text.startswith(_TRACEBACK))


def _is_long(lines: Sequence[_Line]) -> bool:
    return len(lines) >= LEAST_LINES or sum(len(line.whole) for line in lines) >= LEAST_CHARACTERS

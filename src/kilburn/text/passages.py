"""Passages: the parts of a text that are read together, such as a function, a hunk, a paragraph or a few log lines.

A text is cut where a reader would cut it: before a definition or a heading, at a blank line, at the smallest indentation.
No language is parsed, so it works for numbered views of files, search hits, tracebacks, logs and prose alike.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from kilburn.page import Span

__all__ = ["Passage", "passages_of", "words_of"]

LEAST = 0.25
"""Share of the largest passage that a part of a longer text has at least."""

# A line's number in a view of a file, which says nothing of the line itself.
_NUMBER = re.compile(r"\s*\d+[:|\t]")
_BEGINS = re.compile(
    r"(?:(?:export|public|private|protected|static|async|pub|abstract|final)\s+)*(?:def|class|fn|func|function|struct|enum|trait|"
    r"impl|interface|type|module|namespace|package)\b|@@|diff |Traceback |#+ |[=_*-]{3,}"
)
_WORD = re.compile(r"\w+")
_PIECE = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_BLANK, _BEGINNING, _INDENT = 1.0, 1.5, 0.025
"""What a line before, a beginning, and a space of indentation are worth for a cut; an uneven cut costs up to 1."""


class Passage(NamedTuple):
    """A part of a text.

    Args:
        start, end: its span.
        words: how often each word occurs, in lower case; a name counts as a whole and in its pieces.
        size: all these together.
        lines: its lines without numbers and white space, but for the tiny ones: equal for the same line in two views.
    """

    start: int
    end: int
    words: Mapping[str, int]
    size: int
    lines: tuple[str, ...]


class _Line(NamedTuple):
    start: int
    end: int
    indent: int
    blank: bool
    begins: bool


@lru_cache(maxsize=1024)
def passages_of(text: str, most: int, span: Span | None = None) -> tuple[Passage, ...]:
    """The passages of a text, or of a span of it, in order; what is blank belongs to none.

    Args:
        most: characters of a passage. One that is longer is cut again, in the middle of a line only if that is too long.
    """
    start, stop = span or (0, len(text))
    lines = _lines(text[start:stop], start, most)
    return tuple(_passage(text, *found) for found in _cut(lines, 0, len(lines), most) if text[slice(*found)].strip())


def words_of(text: str) -> Counter[str]:
    """How often each word occurs, in lower case: names as a whole, and in their pieces."""
    found: Counter[str] = Counter()
    for word, times in Counter(_WORD.findall(text)).items():
        found[word.lower()] += times
        pieces = _PIECE.findall(word)
        for piece in pieces if len(pieces) > 1 else ():
            found[piece.lower()] += times
    return found


def bare(line: str) -> str:
    """A line without its number and outer white space."""
    return _NUMBER.sub("", line, count=1).strip() if line[:1].isdigit() or line[:1].isspace() else line.strip()


def _passage(text: str, start: int, end: int) -> Passage:
    own = text[start:end]
    own = own.rstrip()
    words = words_of(own)
    lines = tuple([line for line in map(bare, own.split("\n")) if len(line) >= 4])
    return Passage(start, start + len(own), words, words.total(), lines)


def _lines(text: str, at: int, most: int) -> list[_Line]:
    lines: list[_Line] = []
    for raw in text.split("\n"):
        end = at + len(raw) + 1
        while end - at > most:
            lines.append(_Line(at, at + most, 0, False, False))
            at += most
        number = _NUMBER.match(raw)
        told = raw[number.end() :] if number else raw
        inner = told.lstrip()
        lines.append(_Line(at, end, len(told) - len(inner), not inner, bool(_BEGINS.match(inner))))
        at = end
    # The last line has no line end.
    lines[-1] = lines[-1]._replace(end=at - 1)
    return lines


def _cut(lines: list[_Line], first: int, last: int, most: int) -> list[Span]:
    """The spans of the lines from `first` to `last`, cut in two at the best place until each is short enough."""
    start, end = lines[first].start, lines[last - 1].end
    size = end - start
    if size <= most or last - first < 2:
        return [(start, end)]
    least = most * LEAST
    best, at = -100.0, (first + last) // 2
    for place in range(first + 1, last):
        line = lines[place]
        left = line.start - start
        if min(left, size - left) < least:
            continue
        worth = _BEGINNING * line.begins - abs(2 * left - size) / size
        worth += _BLANK * lines[place - 1].blank - (0.0 if line.blank else _INDENT * min(line.indent, 20))
        if worth > best:
            best, at = worth, place
    return [*_cut(lines, first, at, most), *_cut(lines, at, last, most)]

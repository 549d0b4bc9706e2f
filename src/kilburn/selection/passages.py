"""Passages: the parts of a text that are read together, such as a function, a hunk, a paragraph or a few log lines.

A text is cut where a reader would cut it: before a definition or a heading, at a blank line, at the smallest indentation.
No language is parsed, so it works for numbered views of files, search hits, tracebacks, logs and prose alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from sys import getsizeof
from typing import NamedTuple

from kilburn.page import Span
from kilburn.remembered import remembered
from kilburn.selection.identifiers import identifiers
from kilburn.selection.lines import outline, sample, skeleton, units
from kilburn.selection.signs import Sign, classify_line, failed_test, sign_of_prose

LONG = 64
"""Characters of a word above which its parts are not remembered: it hardly comes again."""

MIN_SHARE = 0.25
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


class TextPassage(NamedTuple):
    """A part of a text.

    Args:
        start, end: its span.
        words: how often each word occurs, in lower case; a name counts as a whole and in its pieces.
        size: all these together.
        lines: what it says, for comparison: its lines without numbers and white space, but for the tiny ones: equal for
            the same line in two views. Of a row its shape, its outline and its words. `letters`: of all these lines.
        sign: what it tells, if it is a row; `shape`: equal for rows that say the same; `names`: mentions of names in it.
    """

    start: int
    end: int
    words: Mapping[str, int]
    size: int
    lines: tuple[str, ...]
    letters: int
    sign: Sign = Sign.NONE
    shape: str = ""
    names: int = 0


class _Line(NamedTuple):
    start: int
    end: int
    indent: int
    blank: bool
    begins: bool


def memory_size(passages: Iterable[TextPassage]) -> int:
    """Estimate the memory that passages take in bytes, with their words and lines."""
    return sum(
        560 + 85 * len(passage.words) + 60 * len(passage.lines) + 2 * (passage.letters + passage.end - passage.start)
        for passage in passages
    )


@remembered(memory_size)
def split_passages(text: str, max_chars: int, span: Span | None = None) -> tuple[TextPassage, ...]:
    """Return the passages of a text, or of a span of it, in order; blank text belongs to none.

    Args:
        max_chars: characters of a passage. One that is longer is cut again, in the middle of a line only if that is too long.
    """
    start, stop = span or (0, len(text))
    lines = _lines(text[start:stop], start, max_chars)
    return tuple(
        _passage(text, *span_cut) for span_cut in _cut(lines, 0, len(lines), max_chars) if text[slice(*span_cut)].strip()
    )


ROW, PROSE = 320, 240
"""Characters of a row of tool output at most, and of prose."""
CACHED = 64_000
"""Rows of a text of up to this many characters are cached."""


def split_lines(text: str, prose: bool, max_chars: int) -> tuple[TextPassage, ...]:
    """Return the lines of a text as passages with a sign; of near-duplicates only the last. Long lines are cut.

    Args:
        prose: whether a person or a model wrote it: a tool's output is read by other signs.
        max_chars: a text of more characters is sampled: head, tail, and what surrounds error words.
    """
    return _cached_rows(text, prose) if len(text) <= min(max_chars, CACHED) else _rows(text, prose, max_chars)


@remembered(memory_size)
def _cached_rows(text: str, prose: bool) -> tuple[TextPassage, ...]:
    return _rows(text, prose, len(text))


def _rows(text: str, prose: bool, max_chars: int) -> tuple[TextPassage, ...]:
    sign_by = sign_of_prose if prose else classify_line
    rows: dict[str, tuple[int, int, Sign]] = {}
    signs: dict[str, Sign] = {}
    for low, high in sample(text, max_chars):
        for start, end in units(text, PROSE if prose else ROW, low, high):
            line = text[start:end]
            shape = skeleton(line)
            if len(shape) < 3:
                continue
            sign = signs.get(shape)
            if sign is None:
                sign = signs[shape] = sign_by(line)
            if sign is Sign.FAILED:
                shape = ".".join(("failed", *failed_test(line)))
            rows.pop(shape, None)
            rows[shape] = (start, end, sign)
    return tuple([_row(text[start:end], start, end, sign, shape) for shape, (start, end, sign) in rows.items()])


def _row(line: str, start: int, end: int, sign: Sign, shape: str) -> TextPassage:
    words = count_words(line)
    lines = (shape, outline(shape), *[word for word in words if len(word) >= 4])
    names = sum(1 for _ in identifiers(line))
    return TextPassage(start, end, words, sum(words.values()), lines, sum(map(len, lines)), sign, shape, names)


def count_words(text: str) -> dict[str, int]:
    """Count how often each word occurs, in lower case: names as a whole, and in their parts."""
    counts: dict[str, int] = {}
    for word in _WORD.findall(text):
        for part in _split_word(word) if len(word) <= LONG else _split_word.__wrapped__(word):
            counts[part] = counts.get(part, 0) + 1
    return counts


@lru_cache(maxsize=16384)
def _split_word(word: str) -> tuple[str, ...]:
    pieces = _PIECE.findall(word)
    return (word.lower(), *[piece.lower() for piece in pieces if len(pieces) > 1])


def bare(line: str) -> str:
    """A line without its number and outer white space."""
    return _NUMBER.sub("", line, count=1).strip() if line[:1].isdigit() or line[:1].isspace() else line.strip()


@remembered(lambda lines: getsizeof(lines) + 60 * len(lines))
def comparable_lines(text: str) -> frozenset[str]:
    """Return the lines of a text in the form in which they are compared, without tiny ones."""
    return frozenset(line for line in map(bare, text.split("\n")) if len(line) >= 4)


@remembered(lambda runs: getsizeof(runs) + sum(map(getsizeof, runs)))
def word_runs(text: str) -> frozenset[str]:
    """Return the runs of letters and digits of a text in lower case. A word stands in the text if it stands in one of them."""
    return frozenset(_WORD.findall(text.lower()))


def _passage(text: str, start: int, end: int) -> TextPassage:
    content = text[start:end]
    content = content.rstrip()
    words = count_words(content)
    lines = tuple([line for line in map(bare, content.split("\n")) if len(line) >= 4])
    return TextPassage(start, start + len(content), words, sum(words.values()), lines, sum(map(len, lines)))


def _lines(text: str, at: int, max_chars: int) -> list[_Line]:
    lines: list[_Line] = []
    for raw in text.split("\n"):
        end = at + len(raw) + 1
        while end - at > max_chars:
            lines.append(_Line(at, at + max_chars, 0, False, False))
            at += max_chars
        number = _NUMBER.match(raw)
        content = raw[number.end() :] if number else raw
        inner = content.lstrip()
        lines.append(_Line(at, end, len(content) - len(inner), not inner, bool(_BEGINS.match(inner))))
        at = end
    # The last line has no line end.
    lines[-1] = lines[-1]._replace(end=at - 1)
    return lines


def _cut(lines: list[_Line], first: int, last: int, max_chars: int) -> list[Span]:
    """The spans of the lines from `first` to `last`, cut in two at the best place until each is short enough."""
    start, end = lines[first].start, lines[last - 1].end
    size = end - start
    if size <= max_chars or last - first < 2:
        return [(start, end)]
    min_chars = max_chars * MIN_SHARE
    best, at = -100.0, (first + last) // 2
    for place in range(first + 1, last):
        line = lines[place]
        head_chars = line.start - start
        if min(head_chars, size - head_chars) < min_chars:
            continue
        worth = _BEGINNING * line.begins - abs(2 * head_chars - size) / size
        worth += _BLANK * lines[place - 1].blank - (0.0 if line.blank else _INDENT * min(line.indent, 20))
        if worth > best:
            best, at = worth, place
    return [*_cut(lines, first, at, max_chars), *_cut(lines, at, last, max_chars)]

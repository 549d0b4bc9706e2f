"""Lines and spans of a text: where the units are that an excerpt keeps or leaves out.

All functions work with half-open ranges of characters of the original, so that whatever is kept is
byte-identical. What a line means is found in `signs`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from kilburn.page import OMITTED, Span

OMISSION = f"{OMITTED}\n"

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# A number that stands alone, with its unit; `name_2` is a name. The set first, then the look back: it scans faster.
_NUMBER = re.compile(r"[0-9](?<!\w[0-9])\w*")
_HASH = re.compile(r"\b[a-f][0-9a-f]{6,63}\b")
_LOUD = ("rror", "FAIL", "xception", "ailed", "assed", "anic", "raceback", "atal", "FATAL", "ERROR")


def units(text: str, max_chars: int = 320, start: int = 0, end: int | None = None) -> list[Span]:
    """Spans of the lines of `text[start:end]`, line ends included; they cover it exactly, in order.

    A line longer than `max_chars` characters is cut behind a sentence, a comma or a space, or hard where
    there is none; all line ends that `str.splitlines` knows count.
    """
    spans: list[Span] = []
    at = start
    for line in text[start:end].splitlines(keepends=True):
        length = len(line)
        if length <= max_chars:
            spans.append((at, at + length))
        else:
            spans.extend((at + low, at + high) for low, high in _cut(line, max_chars))
        at += length
    return spans


def _cut(line: str, max_chars: int) -> Iterator[Span]:
    """A long line in pieces of at most `max_chars` characters; a sentence's end is the best place."""
    at, length = 0, len(line)
    while length - at > max_chars:
        best = 0
        low, high = at + max_chars // 3, at + max_chars
        for mark in (". ", "; ", ", ", " ", ","):
            place = line.rfind(mark, low, high)
            if place >= 0:
                best = place + len(mark)
                break
        stop = best or high
        yield at, stop
        at = stop
    if at < length:
        yield at, length


def plain(line: str) -> str:
    """The line without terminal colours and outer white space, for analysis only."""
    return (_ANSI.sub("", line) if "\x1b" in line else line).strip()


def skeleton(line: str) -> str:
    """A line without numbers, hashes and white space: equal for repeated log lines."""
    line = _NUMBER.sub("", _ANSI.sub("", line) if "\x1b" in line else line)
    if len(line) > 40:
        line = _HASH.sub("", line)
    return "".join(line.split())


_NO_DIGITS = {ord(digit): None for digit in "0123456789"}


def outline(shape: str) -> str:
    """A skeleton without the digits in its names too: equal for `file1.c` and `file2.c`."""
    return shape.translate(_NO_DIGITS)


def merge(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Sorted and joined where they touch or overlap; empty ones are dropped."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def complement(spans: Sequence[Span], cuts: Sequence[Span]) -> tuple[Span, ...]:
    """What is left of sorted `spans` without the sorted `cuts`."""
    remaining: list[Span] = []
    for start, stop in spans:
        at = start
        for low, high in cuts:
            if high <= at or low >= stop:
                continue
            if low > at:
                remaining.append((at, low))
            at = max(at, high)
        if at < stop:
            remaining.append((at, stop))
    return tuple(remaining)


def join(text: str, spans: Sequence[Span]) -> str:
    """The kept spans with a mark for each gap, the outer ones included; every piece ends its line."""
    parts: list[str] = []
    at = 0
    for start, end in spans:
        if start > at:
            parts.append(OMISSION)
        piece = text[start:end]
        parts.append(piece)
        at = end
        if end < len(text) and piece[-1:] != "\n":
            parts.append("\n")
    if at < len(text):
        parts.append(OMISSION)
    return "".join(parts)


def sample(text: str, max_chars: int) -> list[Span]:
    """Line-aligned regions of a huge text, about `max_chars` characters in all: its head, its tail and what
    surrounds error words between. The whole text where it is short enough."""
    length = len(text)
    if length <= max_chars:
        return [(0, length)] if length else []
    quarter = max_chars // 4
    regions = [(0, quarter), (length - quarter, length)]
    width = 600
    per_word = max(1, (max_chars // 2) // (2 * width) // len(_LOUD))
    for word in _LOUD:
        at, low, high = quarter, quarter, length - quarter
        stride = max(width, (high - low) // (per_word * 4))
        for _ in range(per_word):
            at = text.find(word, at, high)
            if at < 0:
                break
            regions.append((max(low, at - width), min(high, at + width)))
            at += stride
    return list(merge(_aligned(text, region) for region in regions))


def _aligned(text: str, region: Span) -> Span:
    """The region grown to whole lines where a line end is near (within 2,000 characters)."""
    start, end = region
    line_start = text.rfind("\n", max(0, start - 2000), start)
    line_end = text.find("\n", end, end + 2000)
    return (line_start + 1 if line_start >= 0 else start), (line_end + 1 if line_end >= 0 else end)


def whole_sentences(text: str, min_share: float = 0.0) -> str:
    """A reply that was cut at its cap, without the sentence or line that it was cut in.

    Args:
        min_share: share of the text that must be left; else it stays as it was cut.
    """
    end = max(text.rfind("\n"), text.rfind(". ")) + 1
    return text if min_share and end <= min_share * len(text) else text[:end].rstrip()

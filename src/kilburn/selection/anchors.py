"""Deletions named by what they begin and end with, found exactly or not at all.

A directive `{"prefix", "suffix"}` names the stretch from its prefix to its suffix, both included. It
counts only where it can mean one stretch alone; everything else is a counted no-op. Letters must match
exactly, case and white space included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kilburn.page import Span
from kilburn.selection.lines import merge


@dataclass(frozen=True, slots=True)
class Scanned:
    """What may be cleaned of one page.

    Args:
        page: the page's id.
        text: the original's exact text.
        spans: the parts of it that are in the window, sorted, not overlapping; one span for a whole page.
        name: for a result, the tool's name; else "".
        key: for a result, equal for calls of the same tool with the same arguments; else "".
        fixed: nothing of it may be deleted; it is only for comparison.
    """

    page: int
    text: str
    spans: tuple[Span, ...]
    name: str = ""
    key: str = ""
    fixed: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether all of it is in the window."""
        return self.spans == ((0, len(self.text)),)


class Anchors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delete from the only occurrence of `prefix` to the only occurrence of `suffix` after it."""

    prefix: str
    suffix: str


MAX_DIRECTIVES = 64
_DECODER = msgspec.json.Decoder(list[Anchors] | dict[str, list[Anchors]])


@dataclass(frozen=True, slots=True)
class Exact:
    """Delete `text[start:stop]` of a page's original."""

    page: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """The result of resolving directives.

    Args:
        cuts: by page, the spans of its original's text to delete, sorted, not overlapping.
        counts: how many directives had each `Match`, by its value. All keys are always there.
    """

    cuts: Mapping[int, tuple[Span, ...]]
    counts: dict[str, int] = field(default_factory=dict)


class Match(StrEnum):
    """What came of a directive: the span that it means, or why it is a no-op."""

    DELETED = "deleted"
    UNMATCHED = "unmatched"
    """The prefix, or the suffix, stands nowhere."""
    AMBIGUOUS = "ambiguous"
    """One of them stands in several places."""
    REVERSED = "reversed"
    """The suffix stands only before the prefix."""
    EMPTY = "empty"
    """An anchor has no character that is no white space."""
    CROSSING = "crossing"
    """The suffix stands only behind a border."""
    OVERLAPPING = "overlapping"
    """An earlier directive deletes a part of it already."""


def resolve_anchors(directives: Sequence[Anchors | Exact], scanned: Sequence[Scanned]) -> Resolved:
    """The spans that the directives delete, taken in the order in which they are given.

    A prefix must occur exactly once in all scanned text. Its suffix must occur exactly once after it, in the same
    page, with no omission in between: a span crosses neither a page's border nor a place where something was deleted
    before. If prefix and suffix are the same, that one occurrence is the span. Overlapping occurrences count as
    several. Of two spans that overlap, the later directive is a no-op; two that only touch do not overlap.
    """
    pages = {page.page: page for page in scanned}
    deletions: dict[int, list[Span]] = {}
    counts = {match.value: 0 for match in Match}
    for directive in directives:
        if isinstance(directive, Exact):
            match, page, span = _exact(directive, pages)
        else:
            match, page, span = _anchored(directive, scanned)
        if match is Match.DELETED and not _take(deletions.setdefault(page, []), span):
            match = Match.OVERLAPPING
        counts[match.value] += 1
    return Resolved({page: merge(spans) for page, spans in deletions.items() if spans}, counts)


def _exact(directive: Exact, pages: Mapping[int, Scanned]) -> tuple[Match, int, Span]:
    span = (directive.start, directive.stop)
    page = pages.get(directive.page)
    if page is None:
        return Match.UNMATCHED, 0, span
    if directive.start >= directive.stop:
        return Match.EMPTY if directive.start == directive.stop else Match.REVERSED, 0, span
    inside = any(start <= directive.start and directive.stop <= stop for start, stop in page.spans)
    return (Match.DELETED if inside else Match.CROSSING), page.page, span


def _anchored(directive: Anchors, scanned: Sequence[Scanned]) -> tuple[Match, int, Span]:
    prefix, suffix = directive.prefix, directive.suffix
    nothing = (0, 0)
    if not prefix.strip() or not suffix.strip():
        return Match.EMPTY, 0, nothing
    places = _places(prefix, scanned, 2)
    if len(places) != 1:
        return (Match.AMBIGUOUS if places else Match.UNMATCHED), 0, nothing
    at, start, end = places[0]
    page = scanned[at]
    if prefix == suffix:
        return Match.DELETED, page.page, (start, start + len(prefix))
    behind = start + len(prefix)
    first = page.text.find(suffix, behind, end)
    if first < 0:
        return _missing(suffix, scanned, places[0]), 0, nothing
    if page.text.find(suffix, first + 1, end) >= 0:
        return Match.AMBIGUOUS, 0, nothing
    return Match.DELETED, page.page, (start, first + len(suffix))


def _missing(suffix: str, scanned: Sequence[Scanned], prefix: tuple[int, int, int]) -> Match:
    """Why a suffix is not where it should be."""
    places = [(at, start) for at, start, _ in _places(suffix, scanned, None)]
    if not places:
        return Match.UNMATCHED
    return Match.CROSSING if any(place > prefix[:2] for place in places) else Match.REVERSED


def _places(text: str, scanned: Sequence[Scanned], max_places: int | None) -> list[tuple[int, int, int]]:
    """The places of a string: page, start, and the end of the stretch that contains it."""
    places: list[tuple[int, int, int]] = []
    for at, page in enumerate(scanned):
        for low, high in page.spans:
            start = page.text.find(text, low, high)
            while start >= 0:
                places.append((at, start, high))
                if max_places is not None and len(places) >= max_places:
                    return places
                start = page.text.find(text, start + 1, high)
    return places


def _take(spans: list[Span], span: Span) -> bool:
    """Insert a span between its neighbours; False if it overlaps one of them."""
    at = bisect_left(spans, span)
    if (at and spans[at - 1][1] > span[0]) or (at < len(spans) and spans[at][0] < span[1]):
        return False
    spans.insert(at, span)
    return True


def parse_anchors(reply: str) -> list[Anchors] | None:
    """The directives of a model's reply: a JSON list of objects with `prefix` and `suffix`, or an object whose only
    value is such a list. None if the reply is anything else; a code fence around it is allowed.
    Neither may have more than `MAX_DIRECTIVES`.
    """
    try:
        directives = _DECODER.decode(_unfenced(reply))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if isinstance(directives, dict):
        if len(directives) != 1:
            return None
        (directives,) = directives.values()
    return directives if len(directives) <= MAX_DIRECTIVES else None


def _unfenced(reply: str) -> str:
    lines = reply.strip().splitlines()
    if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return reply

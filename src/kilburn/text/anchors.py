"""Deletions named by what they begin and end with, found exactly or not at all.

A directive `{"prefix", "suffix"}` names the stretch from its prefix to its suffix, both included. It
counts only where it can mean one stretch alone; everything else is a counted no-op. The module refuses
to guess: no case folding, no white space forgiven, no nearest match.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kilburn.page import Span
from kilburn.text.lines import merge

__all__ = ["Anchors", "Exact", "Resolved", "Scanned", "parse_anchors", "resolve_anchors"]


@dataclass(frozen=True, slots=True)
class Scanned:
    """What may be cleaned of one page.

    Args:
        page: the page's id.
        text: the original's exact text.
        spans: what of it is in the window, sorted and apart; all of it for a whole page.
        name: of a result, the tool's name; else "".
        key: of a result, equal for calls of the same tool with the same arguments; else "".
        fixed: nothing of it may be deleted; it is there for comparison.
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


@dataclass(frozen=True, slots=True)
class Anchors:
    """Delete from the one place where `prefix` stands to the one place behind it where `suffix` stands."""

    prefix: str
    suffix: str


@dataclass(frozen=True, slots=True)
class Exact:
    """Delete `text[start:stop]` of a page's original."""

    page: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """What directives mean.

    Args:
        cuts: by page, what is deleted of its original's text, sorted and apart.
        counts: how many directives were "deleted" (carried out), and how many were no-ops: "unmatched",
            "ambiguous", "reversed", "empty", "crossing", "overlapping". All keys are always there.
    """

    cuts: Mapping[int, tuple[Span, ...]]
    counts: dict[str, int] = field(default_factory=dict)


NOOPS = ("unmatched", "ambiguous", "reversed", "empty", "crossing", "overlapping")


def resolve_anchors(directives: Sequence[Anchors | Exact], scanned: Sequence[Scanned]) -> Resolved:
    """The spans that the directives delete, taken in the order in which they are given.

    A prefix must occur exactly once in all scanned text. Its suffix must occur exactly once in what is
    shown behind the prefix without a gap, in the same page: a span crosses neither a page's border nor
    a place where something is out already. Where prefix and suffix are the same, that one occurrence is
    the span. Occurrences that overlap each other are several. Of two spans that overlap, the later
    directive is the no-op; two that touch do not overlap.

    Counted as "empty": an anchor without a character that is no white space. "crossing": the suffix
    stands only behind a border. "reversed": it stands only before the prefix. "unmatched": the prefix,
    or the suffix, stands nowhere.
    """
    known = {page.page: page for page in scanned}
    found: dict[int, list[Span]] = {}
    counts = dict.fromkeys(("deleted", *NOOPS), 0)
    for directive in directives:
        if isinstance(directive, Exact):
            outcome, page, span = _exact(directive, known)
        else:
            outcome, page, span = _anchored(directive, scanned)
        if outcome == "deleted" and not _take(found.setdefault(page, []), span):
            outcome = "overlapping"
        counts[outcome] += 1
    return Resolved({page: merge(spans) for page, spans in found.items() if spans}, counts)


def _exact(directive: Exact, known: Mapping[int, Scanned]) -> tuple[str, int, Span]:
    span = (directive.start, directive.stop)
    page = known.get(directive.page)
    if page is None:
        return "unmatched", 0, span
    if directive.start >= directive.stop:
        return "empty" if directive.start == directive.stop else "reversed", 0, span
    inside = any(start <= directive.start and directive.stop <= stop for start, stop in page.spans)
    return ("deleted" if inside else "crossing"), page.page, span


def _anchored(directive: Anchors, scanned: Sequence[Scanned]) -> tuple[str, int, Span]:
    prefix, suffix = directive.prefix, directive.suffix
    nothing = (0, 0)
    if not prefix.strip() or not suffix.strip():
        return "empty", 0, nothing
    places = _places(prefix, scanned, 2)
    if len(places) != 1:
        return ("ambiguous" if places else "unmatched"), 0, nothing
    at, start, end = places[0]
    page = scanned[at]
    if prefix == suffix:
        return "deleted", page.page, (start, start + len(prefix))
    behind = start + len(prefix)
    first = page.text.find(suffix, behind, end)
    if first < 0:
        return _missing(suffix, scanned, places[0]), 0, nothing
    if page.text.find(suffix, first + 1, end) >= 0:
        return "ambiguous", 0, nothing
    return "deleted", page.page, (start, first + len(suffix))


def _missing(suffix: str, scanned: Sequence[Scanned], prefix: tuple[int, int, int]) -> str:
    """Why a suffix is not where it should be."""
    places = [(at, start) for at, start, _ in _places(suffix, scanned, None)]
    if not places:
        return "unmatched"
    return "crossing" if any(place > prefix[:2] for place in places) else "reversed"


def _places(wanted: str, scanned: Sequence[Scanned], most: int | None) -> list[tuple[int, int, int]]:
    """Where a string stands: which page, from where, and where the stretch that it stands in ends."""
    found: list[tuple[int, int, int]] = []
    for at, page in enumerate(scanned):
        for low, high in page.spans:
            start = page.text.find(wanted, low, high)
            while start >= 0:
                found.append((at, start, high))
                if most is not None and len(found) >= most:
                    return found
                start = page.text.find(wanted, start + 1, high)
    return found


def _take(spans: list[Span], span: Span) -> bool:
    """Put a span between its neighbours; False where it overlaps one of them."""
    at = bisect_left(spans, span)
    if (at and spans[at - 1][1] > span[0]) or (at < len(spans) and spans[at][0] < span[1]):
        return False
    spans.insert(at, span)
    return True


def parse_anchors(reply: str, most: int = 64) -> list[Anchors] | None:
    """The directives of a model's reply: a JSON list of objects with `prefix` and `suffix`, or an object
    whose only value is such a list. None where the reply is anything else; a fence around it is allowed.

    Args:
        most: directives that one reply may have; a reply with more is rejected whole.
    """
    try:
        value = json.loads(_unfenced(reply))
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.values()))
    if not isinstance(value, list) or len(value) > most:
        return None
    found = []
    for entry in value:
        if not isinstance(entry, dict) or set(entry) != {"prefix", "suffix"}:
            return None
        prefix, suffix = entry["prefix"], entry["suffix"]
        if not isinstance(prefix, str) or not isinstance(suffix, str):
            return None
        found.append(Anchors(prefix, suffix))
    return found


def _unfenced(reply: str) -> str:
    lines = reply.strip().splitlines()
    if len(lines) >= 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1])
    return reply

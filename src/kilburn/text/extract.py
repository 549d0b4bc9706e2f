"""A stretch of a transcript, condensed to verbatim lines under a token budget.

Kept are decisions, paths, errors, numbers, test states, open tasks, and with a query what is
relevant to it; near-duplicates once. Lines compete by what they tell for their tokens, each new
line of a kind and of a page being worth a little less. Nothing is rephrased.
"""

from __future__ import annotations

import heapq
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from kilburn.message import Kind, Role
from kilburn.page import Page, Span, address_of
from kilburn.text.identifiers import rare_words
from kilburn.text.lines import OMISSION, merge, sample, skeleton, units
from kilburn.text.signs import Sign, sign_of, sign_of_prose
from kilburn.wire.quotation import with_headings

__all__ = ["Extract", "Piece", "extract", "piece_of", "read_ahead", "weighed"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One page's text as the policies hand it over.

    Args:
        page: the page's id.
        role: who speaks; `kind` what it is. Tool output is read by other signs than prose.
        text: the exact content.
        label: what the origin mark says behind the address, e.g. `read(src/x.py)`.
    """

    page: int
    role: str
    kind: str
    text: str
    label: str = ""

    @property
    def is_prose(self) -> bool:
        """Whether a person or a model wrote it: a tool's output is read by other signs."""
        return self.kind in (Kind.TEXT, Kind.REASONING, Kind.FOLD) and self.role != Role.TOOL


def piece_of(page: Page, text: str, label: str = "") -> Piece:
    """A page as a piece. A derived page is its own speaker, whatever message it stands in."""
    made = page.depth and not page.message
    role = f"{page.kind}, {page.trust.name.lower()} trust" if made else str(page.role)
    return Piece(page.id, role, str(page.kind), text, label)


@dataclass(frozen=True, slots=True)
class Extract:
    """What was kept.

    Args:
        text: the rendered lines, each page's under a heading that no page can write, within the budget; "" where
            nothing fits.
        spans: for each page with kept lines, in order, its spans, sorted and apart.
        tokens: what `text` costs by the counter that was given.
        parts: who speaks and the kept words, by page: what `text` is made of.
    """

    text: str
    spans: tuple[tuple[int, tuple[Span, ...]], ...]
    tokens: int
    parts: tuple[tuple[str, str], ...] = ()


CACHED = 20_000
"""The analysis of a text of up to this many characters is cached."""

_WEIGHT = {
    Sign.NONE: 1.0,
    Sign.PASSED: 0.4,
    Sign.WARNING: 1.5,
    Sign.DEFINITION: 4.0,
    Sign.FRAME: 4.0,
    Sign.LEAN: 4.0,
    Sign.TASK: 7.0,
    Sign.DECISION: 9.0,
    Sign.ERROR: 8.0,
    Sign.FAILED: 10.0,
    Sign.SUMMARY: 12.0,
}
_TERM = re.compile(r"[^\W\d]\w{3,}|\d+\.\d+|\d{2,}")
_NAME = re.compile(r"[A-Za-z]\w*(?:[._/]\w+)+|[A-Z]?[a-z]+[A-Z]\w+")


class _Reading(NamedTuple):
    """One line of a text, with what depends only on the text."""

    start: int
    end: int
    text: str
    shape: str
    sign: Sign
    names: float


@dataclass(slots=True)
class _Line:
    """A candidate: the latest of lines of one shape, with the worth of the first."""

    piece: int
    at: _Reading
    worth: float
    cost: float
    sign: Sign


def extract(
    pieces: Sequence[Piece],
    tokens: int,
    count: Callable[[str], int],
    query: str = "",
    reach: int = 1_000_000,
    held: Mapping[int, Sequence[Span]] | None = None,
) -> Extract:
    """The most informative verbatim lines of the pieces, grouped by page in the pieces' order.

    `count(result.text)` never exceeds `tokens`. The result is deterministic. The analysis of texts of `CACHED`
    characters or less is cached, so that a text in a later summary costs little.

    Args:
        pieces: in the order of the transcript; later ones are worth a little more.
        tokens: the budget for the rendered text, marks included.
        count: tokens of a text.
        query: what will be asked or done next; lines that share rare words with it come first.
        reach: characters in all beyond which pieces are sampled (head, tail, surroundings of error words
            of each piece, 4,000 characters of a piece at least), so that time stays bounded.
        held: spans by page that an earlier summary had: they do not lose worth with age.
    """
    if tokens <= 0:
        return Extract("", (), 0)
    lines = _candidates(pieces, reach, held or {})
    if sum(line.at.end - line.at.start for line in lines) <= 4 * tokens:
        whole = _rendered(pieces, lines, tokens, count)
        if whole is not None:
            return whole
    if query:
        _ask(lines, query)
    order = _choose(pieces, lines, tokens, count)
    keep = len(order)
    while keep > 0:
        spans = _spans(pieces, order[:keep])
        made = _render(pieces, spans, count)
        if made.tokens <= tokens:
            return made
        used = made.tokens
        keep = min(keep - 1, int(keep * tokens / used))
    return Extract("", (), 0)


def _rendered(pieces: Sequence[Piece], lines: Sequence[_Line], tokens: int, count: Callable[[str], int]) -> Extract | None:
    """All candidates, if they fit; then no choice is needed."""
    made = _render(pieces, _spans(pieces, lines), count)
    return made if 0 < made.tokens <= tokens else None


HELD = 1.25
"""Worth of the newest piece's lines, and of `held` ones; those of the oldest are worth 0.75."""


def _candidates(pieces: Sequence[Piece], reach: int, held: Mapping[int, Sequence[Span]]) -> list[_Line]:
    """All candidate lines, the latest of each set of near-duplicates."""
    total = sum(len(piece.text) for piece in pieces)
    found: dict[str, _Line] = {}
    many = max(1, len(pieces))
    for at, piece in enumerate(pieces):
        share = len(piece.text) if total <= reach else max(4000, reach * len(piece.text) // total)
        prose = piece.is_prose
        recent = 0.75 + 0.5 * (at + 1) / many
        speaker = _SPEAKER.get(piece.role, 1.0) if prose else 1.0
        known = held.get(piece.page, ())
        whole = len(piece.text) <= min(share, CACHED)
        for reading in _readings(piece.text, prose) if whole else _read(piece.text, prose, share):
            old = found.get(reading.shape)
            if old is not None:
                old.piece, old.at = at, reading
                continue
            factor = HELD if known and any(start < reading.end and reading.start < end for start, end in known) else recent
            worth = _WEIGHT[reading.sign] * factor * speaker + reading.names
            found[reading.shape] = _Line(at, reading, worth, (reading.end - reading.start) / 4 + 2, reading.sign)
    return list(found.values())


_SPEAKER: dict[str, float] = {Role.USER: 1.5, Role.ASSISTANT: 1.0, Role.SYSTEM: 1.2}


def read_ahead(piece: Piece) -> None:
    """Analyse a text now that will be needed later. Only the time of the later call depends on it."""
    if len(piece.text) <= CACHED:
        _readings(piece.text, piece.is_prose)


def weighed(piece: Piece, most: int) -> list[tuple[float, Span]]:
    """How informative each line of about `most` characters of a text is for its length, in order."""
    factor = _SPEAKER.get(piece.role, 1.0) if piece.is_prose else 1.0
    once = {reading.shape: reading for reading in _read(piece.text, piece.is_prose, most)}
    return [
        ((_WEIGHT[reading.sign] * factor + reading.names) / ((reading.end - reading.start) / 4 + 2) ** 0.7, reading[:2])
        for reading in once.values()
    ]


@lru_cache(maxsize=2048)
def _readings(text: str, prose: bool) -> tuple[_Reading, ...]:
    return tuple(_read(text, prose, len(text)))


def _read(text: str, prose: bool, share: int) -> Iterator[_Reading]:
    """The lines of about `share` characters of a text, with their signs."""
    most = 240 if prose else 320
    sign_by = sign_of_prose if prose else sign_of
    for low, high in sample(text, share):
        for start, end in units(text, most, low, high):
            line = text[start:end]
            shape = skeleton(line)
            if len(shape) < 3:
                continue
            sign = sign_by(line)
            names = 0.0 if sign == Sign.PASSED else 2.0 * min(4, len(_NAME.findall(line)))
            yield _Reading(start, end, line, shape, sign, names)


@lru_cache(maxsize=65536)
def _terms(line: str) -> frozenset[str]:
    return frozenset(_TERM.findall(line))


@lru_cache(maxsize=64)
def _wanted(query: str) -> tuple[str, ...]:
    return tuple(term.lower() for term in rare_words(query, 32))


def _ask(lines: list[_Line], query: str) -> None:
    """Add to each line what it shares with the query, rarer terms weighing more."""
    low = [line.at.text.lower() for line in lines]
    ends = list(accumulate(len(text) + 1 for text in low))
    joined = "\n".join(low)
    for wanted in _wanted(query):
        hits: list[int] = []
        place = joined.find(wanted)
        while place >= 0:
            hits.append(bisect_right(ends, place))
            place = joined.find(wanted, ends[hits[-1]])
        if hits:
            weight = 4.0 * math.log1p(len(lines) / len(hits))
            for index in hits:
                lines[index].worth += weight


def _choose(pieces: Sequence[Piece], lines: list[_Line], tokens: int, count: Callable[[str], int]) -> list[_Line]:
    """Greedy by worth for cost, lazily re-valued as kinds, pages and terms are used up."""
    headers: set[int] = set()
    kinds: dict[tuple[int, Sign], int] = {}
    covered: set[str] = set()
    heap = [(-line.worth / line.cost**0.7, index) for index, line in enumerate(lines)]
    heapq.heapify(heap)
    order: list[_Line] = []
    gap = max(1, count(OMISSION))
    spent = refused = 0
    while heap and refused < 40:
        value, index = heap[0]
        line = lines[index]
        terms = _terms(line.at.text)
        fresh = len(terms - covered) / len(terms) if terms else 0.3
        used = kinds.get((line.piece, line.sign), 0)
        cost = line.cost + (0 if line.piece in headers else 8)
        now = -line.worth * (0.15 + 0.85 * fresh) / (1 + used / 12) / cost**0.7
        if now > value + 1e-12:
            # A line that has lost worth is put back, behind lines that are worth more now.
            heapq.heapreplace(heap, (now, index))
            if heap[0][1] != index:
                continue
        heapq.heappop(heap)
        price = max(1, count(line.at.text)) + 1 + gap
        if line.piece not in headers:
            price += max(1, count(with_headings([(_header(pieces[line.piece]), "")]))) + gap
        if spent + price > tokens:
            refused += 1
            continue
        headers.add(line.piece)
        kinds[line.piece, line.sign] = used + 1
        covered |= terms
        spent += price
        order.append(line)
    return order


def _spans(pieces: Sequence[Piece], lines: Sequence[_Line]) -> list[tuple[int, tuple[Span, ...]]]:
    """The chosen lines as merged spans by piece; a short gap of blanks between two is kept with them."""
    by_piece: dict[int, list[Span]] = {}
    for line in lines:
        by_piece.setdefault(line.piece, []).append((line.at.start, line.at.end))
    result = []
    for at in sorted(by_piece):
        joined: list[Span] = []
        for start, end in merge(by_piece[at]):
            if joined and start - joined[-1][1] <= 8 and not pieces[at].text[joined[-1][1] : start].strip():
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        result.append((at, tuple(joined)))
    return result


def _header(piece: Piece) -> str:
    """The origin: address and label, or the speaker where there is no label."""
    return f"{address_of(piece.page)} {' '.join(piece.label.split())[:80] or piece.role}"


def _render(pieces: Sequence[Piece], spans: Sequence[tuple[int, tuple[Span, ...]]], count: Callable[[str], int]) -> Extract:
    parts: list[tuple[str, str]] = []
    for at, kept in spans:
        text = pieces[at].text
        words: list[str] = []
        for place, (start, end) in enumerate(kept):
            if place and text[kept[place - 1][1] : start].strip():
                words.append(OMISSION)
            piece = text[start:end]
            words.append(piece if piece.endswith("\n") else piece + "\n")
        parts.append((_header(pieces[at]), "".join(words)))
    text = with_headings(parts)
    return Extract(text, tuple((pieces[at].page, kept) for at, kept in spans), count(text), tuple(parts))

"""A stretch of a transcript, condensed to verbatim lines under a token budget.

Kept are decisions, paths, errors, numbers, test states, open tasks, and with a query what is
relevant to it; near-duplicates once. Lines compete by what they tell for their tokens, each new
line of a kind and of a page being worth a little less. It refuses to rephrase anything.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kilburn.message import Kind, Role
from kilburn.page import Span, address_of
from kilburn.policies.text.identifiers import rare_words
from kilburn.policies.text.lines import OMISSION, merge, sample, skeleton, units
from kilburn.policies.text.signs import Sign, sign_of, sign_of_prose

__all__ = ["Extract", "Piece", "extract"]


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


@dataclass(frozen=True, slots=True)
class Extract:
    """What was kept.

    Args:
        text: the rendered lines under origin marks, within the budget; "" where nothing fits.
        spans: for each page with kept lines, in order, its spans, sorted and apart.
        tokens: what `text` costs by the counter that was given.
    """

    text: str
    spans: tuple[tuple[int, tuple[Span, ...]], ...]
    tokens: int


_LARGE = 1_000_000
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


@dataclass(slots=True)
class _Line:
    """A candidate."""

    piece: int
    start: int
    end: int
    worth: float
    asked: float
    cost: float
    sign: Sign
    terms: frozenset[str] | None = None


def extract(pieces: Sequence[Piece], tokens: int, count: Callable[[str], int], query: str = "") -> Extract:
    """The most telling verbatim lines of the pieces, grouped by page in the pieces' order.

    `count(result.text)` never exceeds `tokens`. Deterministic. More than a million characters in all
    are sampled (head, tail, surroundings of error words of each piece), so time stays bounded.

    Args:
        pieces: in the order of the transcript; later ones are worth a little more.
        tokens: the budget for the rendered text, marks included.
        count: tokens of a text.
        query: what will be asked or done next; lines that share rare words with it come first.
    """
    if tokens <= 0:
        return Extract("", (), 0)
    candidates = _candidates(pieces, query)
    order = _choose(pieces, candidates, tokens, count)
    keep = len(order)
    while keep > 0:
        spans = _spans(pieces, order[:keep])
        text = _render(pieces, spans)
        used = count(text)
        if used <= tokens:
            return Extract(text, tuple((pieces[at].page, kept) for at, kept in spans), used)
        keep = min(keep - 1, int(keep * tokens / used))
    return Extract("", (), 0)


def _candidates(pieces: Sequence[Piece], query: str) -> list[_Line]:
    """All lines worth a thought, the latest of each set of near-duplicates."""
    total = sum(len(piece.text) for piece in pieces)
    found: dict[str, _Line] = {}
    many = max(1, len(pieces))
    for at, piece in enumerate(pieces):
        share = len(piece.text) if total <= _LARGE else max(4000, _LARGE * len(piece.text) // total)
        prose = piece.kind in (Kind.TEXT, Kind.REASONING, Kind.FOLD) and piece.role != Role.TOOL
        recent = 0.75 + 0.5 * (at + 1) / many
        speaker = _SPEAKER.get(piece.role, 1.0) if prose else 1.0
        for low, high in sample(piece.text, share):
            for start, end in units(piece.text, 240 if prose else 320, low, high):
                line = piece.text[start:end]
                shape = skeleton(line)
                if len(shape) < 3:
                    continue
                old = found.get(shape)
                if old is not None:
                    old.piece, old.start, old.end = at, start, end
                    continue
                sign = sign_of_prose(line) if prose else sign_of(line)
                worth = _WEIGHT[sign] * recent * speaker
                if sign != Sign.PASSED:
                    worth += 2.0 * min(4, len(_NAME.findall(line)))
                found[shape] = _Line(at, start, end, worth, 0.0, (end - start) / 4 + 2, sign)
    lines = list(found.values())
    if query:
        _ask(pieces, lines, query)
    return lines


_SPEAKER: dict[str, float] = {Role.USER: 1.5, Role.ASSISTANT: 1.0, Role.SYSTEM: 1.2}


def _ask(pieces: Sequence[Piece], lines: list[_Line], query: str) -> None:
    """Add to each line what it shares with the query, rarer terms weighing more."""
    terms = [term.lower() for term in rare_words(query, 32)]
    low = [pieces[line.piece].text[line.start : line.end].lower() for line in lines]
    for term in terms:
        hits = [index for index, line in enumerate(low) if term in line]
        if hits:
            weight = 4.0 * math.log1p(len(lines) / len(hits))
            for index in hits:
                lines[index].asked += weight
    for line in lines:
        line.worth += line.asked


def _choose(pieces: Sequence[Piece], lines: list[_Line], tokens: int, count: Callable[[str], int]) -> list[_Line]:
    """Greedy by worth for cost, lazily re-valued as kinds, pages and terms are used up."""
    headers: dict[int, int] = {}
    kinds: dict[tuple[int, Sign], int] = {}
    covered: set[str] = set()
    heap = [(-line.worth / line.cost**0.7, index) for index, line in enumerate(lines)]
    heapq.heapify(heap)
    order: list[_Line] = []
    gap = max(1, count(OMISSION))
    spent = refused = 0
    while heap and refused < 40:
        value, index = heapq.heappop(heap)
        line = lines[index]
        text = pieces[line.piece].text[line.start : line.end]
        if line.terms is None:
            line.terms = frozenset(_TERM.findall(text))
        fresh = sum(term not in covered for term in line.terms) / len(line.terms) if line.terms else 0.3
        used = kinds.get((line.piece, line.sign), 0)
        cost = line.cost + (0 if line.piece in headers else 8)
        now = -line.worth * (0.15 + 0.85 * fresh) / (1 + used / 12) / cost**0.7
        if heap and now > heap[0][0] + 1e-12 and now > value + 1e-12:
            heapq.heappush(heap, (now, index))
            continue
        price = max(1, count(text)) + 1 + gap
        if line.piece not in headers:
            price += max(1, count(_header(pieces[line.piece]))) + gap
        if spent + price > tokens:
            refused += 1
            continue
        headers.setdefault(line.piece, 1)
        kinds[line.piece, line.sign] = used + 1
        covered |= line.terms
        spent += price
        order.append(line)
    return order


def _spans(pieces: Sequence[Piece], lines: Sequence[_Line]) -> list[tuple[int, tuple[Span, ...]]]:
    """The chosen lines as merged spans by piece; a short gap of blanks between two is kept with them."""
    by_piece: dict[int, list[Span]] = {}
    for line in lines:
        by_piece.setdefault(line.piece, []).append((line.start, line.end))
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
    """The origin mark: address and label, or the speaker where there is no label."""
    return f"{address_of(piece.page)} {' '.join(piece.label.split())[:80] or piece.role}:\n"


def _render(pieces: Sequence[Piece], spans: Sequence[tuple[int, tuple[Span, ...]]]) -> str:
    parts: list[str] = []
    for at, kept in spans:
        text = pieces[at].text
        parts.append(_header(pieces[at]))
        for place, (start, end) in enumerate(kept):
            if place and text[kept[place - 1][1] : start].strip():
                parts.append(OMISSION)
            piece = text[start:end]
            parts.append(piece if piece.endswith("\n") else piece + "\n")
    return "".join(parts)

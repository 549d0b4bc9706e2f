"""Texts shortened to verbatim lines under a token budget: a stretch of a transcript, or one long tool output.

Kept are decisions, errors, test states, open tasks, definitions, head and tail, and with a query what is relevant to it;
near-duplicates once. The choice is that of `selection`, among single lines. Nothing is rephrased.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from kilburn.message import Kind, Role
from kilburn.page import Page, Parts, Span, address_of
from kilburn.policy import View
from kilburn.selection.lines import OMISSION, join, merge
from kilburn.selection.passages import CACHED, TextPassage, split_lines, split_passages
from kilburn.selection.selection import GRAINS, PagePassage, focus_words, select
from kilburn.selection.signs import Sign
from kilburn.wire.quotation import with_headings


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


def page_piece(page: Page, text: str, label: str = "") -> Piece:
    """Return a page as a piece. A derived page is its own speaker, whatever its message."""
    is_derived = page.depth and not page.message
    role = f"{page.kind}, {page.trust.name.lower()} trust" if is_derived else str(page.role)
    return Piece(page.id, role, str(page.kind), text, label)


def view_pieces(view: View, pages: Iterable[int]) -> list[Piece]:
    """Return pages of a view as whole pieces."""
    return [page_piece(view.page(page), view.text(page)) for page in pages]


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


SIGNS = {
    Sign.NONE: 0.0,
    Sign.PASSED: 0.0,
    Sign.WARNING: 0.15,
    Sign.DEFINITION: 0.45,
    Sign.FRAME: 0.45,
    Sign.LEAN: 0.45,
    Sign.TASK: 0.9,
    Sign.DECISION: 1.1,
    Sign.ERROR: 1.0,
    Sign.FAILED: 1.2,
    Sign.SUMMARY: 1.5,
}
"""Worth of a line with a sign, compared with 1 for the likest to the query."""
NAME_WEIGHT, MAX_NAMES = 0.15, 4
"""Worth of each name, path or number in a line, and of how many at most."""
SPEAKER: Mapping[str, float] = {Role.USER: 1.5, Role.SYSTEM: 1.2}
"""Weight of a speaker's prose, compared with the agent's and with tool output."""
EDGE, NEAR = 0.2, 100
"""Worth of the first and the last line of a text; characters after which it is half as much."""
MIN_QUERY_WORD_CHARS = 4
"""Characters of a word of the query at least."""
MESSAGES = 0.6
"""Share of the room above which failed tests are named without their messages."""
THRIFT = 0.7
"""Power of its length by which a line's worth is divided."""
LARGE = 4_000_000
"""Characters of a text that `condense` reads; a longer one is sampled."""
SAMPLED = 4000
"""Characters of a piece that are read at least."""


def extract(
    pieces: Sequence[Piece],
    tokens: int,
    count: Callable[[str], int],
    query: str = "",
    reach: int = 1_000_000,
    retained: Mapping[int, Sequence[Span]] | None = None,
) -> Extract:
    """Return the most informative verbatim lines of the pieces, grouped by page in the pieces' order.

    `count(result.text)` never exceeds `tokens`. The result is deterministic.

    Args:
        pieces: in the order of the transcript; later ones are worth a little more.
        tokens: the budget for the rendered text, marks included.
        count: tokens of a text.
        query: what will be asked or done next; lines that are like it come first.
        reach: characters in all beyond which pieces are sampled (head, tail, surroundings of error words
            of each piece, 4,000 characters of a piece at least), so that time stays bounded.
        retained: spans by page that an earlier summary had: they do not lose worth with age.
    """
    parts = _chosen(pieces, tokens, count, query, reach, retained or {}, lambda parts: _render(pieces, parts, count).tokens)
    return _render(pieces, parts, count)


def condense(text: str, tokens: int, count: Callable[[str], int], query: str = "") -> tuple[Span, ...]:
    """Spans of a tool output to keep, sorted and apart, so that `join(text, spans)` is within `tokens`.

    The whole text if it fits; no span if not even one line does. Lines are kept whole, except those over 320
    characters, which are cut. A text of more than 4 million characters is sampled: head, tail, and what surrounds
    error words between.

    Args:
        tokens: the budget, marks included, in the unit of `count`.
        query: what the reader wants to know.
    """
    if tokens <= 0 or not text:
        return ()
    if len(text) <= 40 * tokens + 200 and count(text) <= tokens:
        return ((0, len(text)),)
    piece = Piece(0, Role.TOOL, Kind.RESULT, text)

    def cost(parts: Parts) -> int:
        return count(join(text, parts[0][1])) if parts else 0

    parts = _chosen([piece], tokens, count, query, LARGE, {}, cost)
    spans = parts[0][1] if parts else ()
    return _filled(text, spans, tokens, count, query) if parts and 2 * cost(parts) < tokens else spans


def _filled(text: str, spans: tuple[Span, ...], tokens: int, count: Callable[[str], int], query: str) -> tuple[Span, ...]:
    """The spans, and more of head and tail in the room that is left: in a list of like lines, few tell anything new."""
    grain, reach = GRAINS[0], min(4 * tokens, len(text) // 2)
    passages = [*split_passages(text, grain, (0, reach)), *split_passages(text, grain, (len(text) - reach, len(text)))]
    more = select(
        [PagePassage(0, 1, passage, text, base=_edge(passage, len(text))) for passage in passages],
        [],
        _asked(query),
        tokens,
        count,
        heading=join(text, spans),
        cost=lambda parts: count(join(text, merge([*spans, *(parts[0][1] if parts else ())]))),
    )
    return merge([*spans, *more[0][1]]) if more else spans


def _edge(passage: TextPassage, length: int) -> float:
    """Worth of a place near the head or the tail of a text."""
    near = min(passage.start, length - passage.end) / NEAR
    return EDGE * 0.5**near if near < 8 else 0.0


def read_ahead(view: View) -> None:
    """Analyse the new texts now, which will be needed later. Only the time of the later call depends on it."""
    for piece in view_pieces(view, [page for page in view.wanted if not view.page(page).is_atomic]):
        if len(piece.text) <= CACHED:
            split_lines(piece.text, piece.is_prose, CACHED)


def _chosen(
    pieces: Sequence[Piece],
    tokens: int,
    count: Callable[[str], int],
    query: str,
    reach: int,
    lasting: Mapping[int, Sequence[Span]],
    cost: Callable[[Parts], int],
) -> Parts:
    """The spans to keep of each piece, by its index; of near-duplicates the latest is a candidate."""
    total = sum(len(piece.text) for piece in pieces)
    candidates: dict[str, PagePassage] = {}
    for at, piece in enumerate(pieces):
        text, prose = piece.text, piece.is_prose
        share = len(text) if total <= reach else max(SAMPLED, reach * len(text) // total)
        weight = SPEAKER.get(piece.role, 1.0) if prose else 1.0
        lasting_spans = lasting.get(piece.page, ())
        for row in split_lines(text, prose, share):
            new = lasting_spans and any(start < row.end and row.start < end for start, end in lasting_spans)
            worth = SIGNS[row.sign] + NAME_WEIGHT * min(row.names, MAX_NAMES)
            worth += _edge(row, len(text))
            candidates.pop(row.shape, None)
            candidates[row.shape] = PagePassage(at, len(pieces) if new else at + 1, row, text, weight, worth)
    begins = "".join([piece.text[:500] for piece in pieces[-16:]])
    ratio = len(begins) / max(1, count(begins))
    failed = {shape: candidate for shape, candidate in candidates.items() if candidate.passage.sign is Sign.FAILED}
    if sum([candidate.passage.end - candidate.passage.start for candidate in failed.values()]) > MESSAGES * tokens * ratio:
        candidates |= {shape: _named(candidate) for shape, candidate in failed.items()}
    return select(
        list(candidates.values()),
        [],
        _asked(query),
        tokens,
        count,
        ratio=ratio,
        heading="",
        life=max(1.0, len(pieces) / 40),
        thrift=THRIFT,
        cost=cost,
    )


def _named(failed: PagePassage) -> PagePassage:
    """The line of a failed test without its message."""
    start, end = failed.passage.start, failed.passage.end
    name, mark, _ = failed.text[start:end].partition(" - ")
    return failed._replace(passage=failed.passage._replace(end=start + len(name))) if mark and "::" in name else failed


@lru_cache(maxsize=64)
def _asked(query: str) -> Mapping[str, float]:
    return {word: weight for word, weight in focus_words([(query, 1.0)]).items() if len(word) >= MIN_QUERY_WORD_CHARS}


def _header(piece: Piece) -> str:
    """The origin: address and label, or the speaker where there is no label."""
    return f"{address_of(piece.page)} {' '.join(piece.label.split())[:80] or piece.role}"


def _render(pieces: Sequence[Piece], chosen: Parts, count: Callable[[str], int]) -> Extract:
    parts: list[tuple[str, str]] = []
    for at, page_spans in chosen:
        text = pieces[at].text
        words: list[str] = []
        for place, (start, end) in enumerate(page_spans):
            if place and text[page_spans[place - 1][1] : start].strip():
                words.append(OMISSION)
            piece = text[start:end]
            words.append(piece if piece.endswith("\n") else piece + "\n")
        parts.append((_header(pieces[at]), "".join(words)))
    text = with_headings(parts)
    return Extract(text, tuple((pieces[at].page, page_spans) for at, page_spans in chosen), count(text), tuple(parts))

"""Excerpts for a view: which pages they replace, which originals they cite, and which lines they keep.

Policies decide when one is made, and how large it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from itertools import islice

from kilburn.message import Kind, Role
from kilburn.move import Evict, Fold, Move
from kilburn.page import Page, Parts, Span
from kilburn.policy import Stretch, View
from kilburn.text.lines import merge
from kilburn.text.selection import BASE, Line, lines_of, select

__all__ = [
    "cited_stretch",
    "excerpt_moves",
    "far_of",
    "flow_of",
    "focus_of",
    "old_pages",
    "parts_of",
    "shorten_latest",
    "split_excerpts",
]

CITED = 1024
"""An excerpt cites at least this many originals. Beyond that, originals of which it keeps no line have only a handle."""

READ = 200_000
"""Tokens of leaving pages, newest first, from whose lines one excerpt is chosen, besides those of earlier excerpts: all
in a window of 200,000 or less. It bounds the time of a plan."""

LATEST = 128
"""Newest pages in which the agent's latest words are looked for."""
LIFE = 64
"""In a window with up to this many messages, a line loses worth with age at the usual rate; in a larger window more
slowly."""

SHOWN = 40_000
"""Characters of the pages that stay whole, newest first, whose names and lines need not be kept again: all of them in a
window of 8,000 tokens, and the newest in a larger one."""

MARKED = 0.5
"""Importance from which on a page belongs to the core."""


def old_pages(view: View, tail: int, core: int) -> list[Page]:
    """The pages before a tail of so many tokens that may leave; important ones stay, up to `core` tokens."""
    stays: set[int] = set()
    marked = [page for page in view.pages if view.importance.get(page.id, 0.0) >= MARKED] if view.importance else []
    for page in sorted(marked, key=lambda page: (-view.importance[page.id], -page.id)):
        if page.tokens <= core:
            core -= page.tokens
            stays.add(page.id)
    return view.movable([page for page in view.front(tail) if page.id not in stays])


def split_excerpts(pages: Sequence[Page]) -> tuple[Sequence[Page], Sequence[Page]]:
    """The excerpts of several pages that stand in front, and what came after them."""
    front = 0
    while front < len(pages) and pages[front].kind is Kind.EXCERPT and pages[front].parts:
        front += 1
    return pages[:front], pages[front:]


def cited_stretch(view: View, pages: Iterable[Page]) -> Stretch:
    """What an excerpt in place of pages cites: of very many originals the newest, and those of which an earlier
    excerpt keeps something."""
    going = [page.id for page in pages]
    stretch = view.stretch(going)
    most = max(CITED, view.budget.capacity // 8)
    if len(stretch.sources) <= most:
        return stretch
    kept = {source for page in stretch.pages for source, _ in _kept(page)}
    return view.stretch(going, within=kept.union(stretch.sources[most // 4 - most :]))


def excerpt_moves(
    stretch: Stretch, parts: Parts, why: str, *, nothing: str, torn: str = "beyond the excerpt's reach"
) -> list[Move]:
    """The moves that put an excerpt in place of a stretch; its eviction if nothing of it is kept.

    Args:
        nothing: the reason in the ledger if all of it leaves.
        torn: the reason in the ledger for pages that the excerpt does not stand for.
    """
    if parts and stretch.leaving:
        return stretch.fold(why, parts=parts, torn=torn)
    return [Evict(pages=tuple([page.id for page in stretch.pages]), why=nothing)]


def shorten_latest(view: View, whole: int) -> tuple[list[Move], int]:
    """Excerpts of new pages that are too long to stay whole, and the tokens that they save."""
    folds: list[Move] = []
    saved = 0
    for page in view.latest():
        if page.tokens <= whole or page.id in view.pins or page.kind not in (Kind.RESULT, Kind.TEXT):
            continue
        text = view.text(page.id)
        # Of a user's message head and tail stay, because the request is usually there.
        ends = _ends(text, whole // 4) if page.role is Role.USER else ()
        room = whole - view.handle - sum(view.count(text[start:end]) for start, end in ends)
        parts = select(lines_of(text, page.id, page.message, str(page.role)), [], focus_of(view), room, view.count)
        if parts:
            keep = merge([*ends, *parts[0][1]])
            folds.append(Fold(pages=(page.id,), keep=keep, why=f"{page.tokens} tokens, too long to stay whole"))
            saved += page.tokens - whole
    return folds, saved


def _ends(text: str, size: int) -> tuple[Span, ...]:
    """Head and tail of a text, of about so many characters each, cut at a line end if one is near."""
    head = text.rfind("\n", size // 2, size) + 1 or min(size, len(text))
    tail = text.find("\n", len(text) - size, len(text) - size // 2) + 1 or max(head, len(text) - size)
    return ((0, head), (max(head, tail), len(text))) if tail < len(text) else ((0, len(text)),)


def parts_of(
    view: View, stretch: Stretch, room: int, far: int, *, least: float = 0.0, floor: int = 0, base: float = BASE
) -> Parts:
    """The spans to keep of each original that an excerpt of a stretch cites, within the room, marks included.

    Args:
        far: tokens of the room that are kept for the far past.
        least: the gain under which a line is not worth its tokens once `floor` tokens are taken; `base`: the weight of a
            line as such (see `select`).
    """
    if room <= view.handle:
        return ()
    sources = set(stretch.sources)
    # The lines of an excerpt that leaves are candidates again, if their originals are still cited.
    near = [page for page in stretch.pages if page.depth or page.id not in stretch.torn]
    first, left = len(near), READ
    while first and left > 0:
        first -= 1
        left -= near[first].tokens
    near = [*(page for page in near[:first] if page.depth), *near[first:]]
    lines = [line for page in near for line in _lines(view, page) if line.page in sources]
    life = max(1.0, view.budget.capacity / flow_of(view) / LIFE)
    texts = _shown(view, {page.id for page in stretch.pages})
    return select(lines, texts, focus_of(view), room, view.count, far=far, least=least, floor=floor, base=base, life=life)


def flow_of(view: View) -> float:
    """Tokens of a message, on average."""
    return max(1.0, view.seen / max(1, view.turn))


def far_of(room: int) -> int:
    """Tokens of an excerpt that are kept for the far past: a fifth; none in a small excerpt, because the present needs
    all of it."""
    return max(0, min(room // 5, (room - 600) * 2 // 5))


def _lines(view: View, page: Page) -> list[Line]:
    """The lines of a page; of an excerpt, the lines that it kept of its originals."""
    if page.kind is Kind.FOLD:
        return []
    if page.kind is Kind.EXCERPT and page.message and len(page.sources) == 1:
        # It was made because its page did not fit; what it kept was chosen for that moment.
        page = view.page(page.sources[0])
    elif page.kind is Kind.EXCERPT:
        return [line for source, spans in _kept(page) for line in _within(view, source, spans)]
    return [] if page.kind is Kind.IMAGE else list(lines_of(view.text(page.id), page.id, page.message, str(page.role)))


def _kept(page: Page) -> Parts:
    """What an excerpt keeps of each of its sources."""
    return page.parts or ((page.sources[0], page.spans),) if page.kind is Kind.EXCERPT and page.sources else ()


def _within(view: View, source: int, spans: Sequence[Span]) -> list[Line]:
    """The lines of the kept spans of a page; the text between them is not read again."""
    page, text = view.page(source), view.text(source)
    return [line for span in spans for line in lines_of(text, source, page.message, str(page.role), span)]


def _shown(view: View, going: Set[int]) -> list[str]:
    """The newest texts that stay in the prompt whole."""
    texts: list[str] = []
    left = SHOWN
    for page in reversed(view.pages):
        if left <= 0:
            break
        if page.id not in going and page.kind is not Kind.IMAGE:
            texts.append(view.text(page.id))
            left -= len(texts[-1])
    return texts


def focus_of(view: View) -> str:
    """What the agent is working on: its latest words, or the task."""
    for page in islice(reversed(view.pages), LATEST):
        if page.role is Role.ASSISTANT and page.kind in (Kind.TEXT, Kind.REASONING):
            return view.text(page.id)
    return view.task

"""What policies of excerpts share: which pages may leave, which originals an excerpt reaches, and its lines.

Functions of a view; they decide nothing about when, or how much.
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

__all__ = ["far_of", "flow_of", "focus_of", "older", "parts_of", "put", "reach", "shortened"]

CITED = 1024
"""Originals that one excerpt stands for, at least, before those of which it keeps nothing stay behind their handle."""

READ = 200_000
"""Tokens of leaving pages, newest first, whose lines one excerpt is chosen from, beside those of the excerpts before it: all
in a window of 200,000 or less. It bounds the time of a plan."""

LATEST = 128
"""Newest pages among which the agent's latest words are looked for."""
LIFE = 64
"""Messages that a window holds up to which a line loses worth with age at the usual pace; in a larger one it loses it slower."""

SHOWN = 40_000
"""Characters of what stays whole, newest first, whose names and lines count as said already: all of it in a
window of 8,000 tokens, and in a large one what is near."""

MARKED = 0.5
"""Importance from which on a page belongs to the core."""


def older(view: View, tail: int, core: int) -> list[Page]:
    """Pages in front of a tail of so many tokens that may leave; marked ones stay while `core` tokens hold them."""
    stays: set[int] = set()
    marked = [page for page in view.pages if view.marks.get(page.id, 0.0) >= MARKED] if view.marks else []
    for page in sorted(marked, key=lambda page: (-view.marks[page.id], -page.id)):
        if page.tokens <= core:
            core -= page.tokens
            stays.add(page.id)
    return view.movable([page for page in view.front(tail) if page.id not in stays])


def reach(view: View, pages: Iterable[Page]) -> Stretch:
    """What an excerpt in the place of pages stands for: of very many originals the newest, and those of which an
    excerpt before it keeps something."""
    going = [page.id for page in pages]
    stretch = view.stretch(going)
    most = max(CITED, view.budget.capacity // 8)
    if len(stretch.sources) <= most:
        return stretch
    kept = {source for page in stretch.pages for source, _ in _kept(page)}
    return view.stretch(going, within=kept.union(stretch.sources[most // 4 - most :]))


def put(stretch: Stretch, parts: Parts, why: str, *, nothing: str, torn: str = "beyond the excerpt's reach") -> list[Move]:
    """The moves that put an excerpt in the place of a stretch; its eviction where nothing of it is kept.

    Args:
        nothing: why all of it leaves then.
        torn: why pages leave that the excerpt does not stand for.
    """
    if parts and stretch.leaving:
        return stretch.fold(why, parts=parts, torn=torn)
    return [Evict(pages=tuple([page.id for page in stretch.pages]), why=nothing)]


def shortened(view: View, whole: int) -> tuple[list[Move], int]:
    """Excerpts of what just came and is too long to stay whole, and the tokens that they save."""
    folds: list[Move] = []
    saved = 0
    for page in view.latest():
        if page.tokens <= whole or page.id in view.pins or page.kind not in (Kind.RESULT, Kind.TEXT):
            continue
        text = view.text(page.id)
        # Of a user's words head and tail stay: what is asked for usually stands there.
        ends = _ends(text, whole // 4) if page.role is Role.USER else ()
        room = whole - view.handle - sum(view.count(text[start:end]) for start, end in ends)
        parts = select(lines_of(text, page.id, page.message, str(page.role)), [], focus_of(view), room, view.count)
        if parts:
            keep = merge([*ends, *parts[0][1]])
            folds.append(Fold(pages=(page.id,), keep=keep, why=f"{page.tokens} tokens, too long to stay whole"))
            saved += page.tokens - whole
    return folds, saved


def _ends(text: str, size: int) -> tuple[Span, ...]:
    """Head and tail of a text, of about so many characters each, whole lines where one ends near."""
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
    # An excerpt that leaves hands on those of its lines whose originals are still cited.
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
    """Tokens of an excerpt that are kept for the far past: a fifth, and of a small one none, for what is at hand needs it."""
    return max(0, min(room // 5, (room - 600) * 2 // 5))


def _lines(view: View, page: Page) -> list[Line]:
    """The lines of a page; of an excerpt, the lines that it kept of its originals."""
    if page.kind is Kind.FOLD:
        return []
    if page.kind is Kind.EXCERPT and page.message and len(page.sources) == 1:
        # It stands in its page's place for want of room: what it kept was chosen for then.
        page = view.page(page.sources[0])
    elif page.kind is Kind.EXCERPT:
        return [line for source, spans in _kept(page) for line in _within(view, source, spans)]
    return [] if page.kind is Kind.IMAGE else list(lines_of(view.text(page.id), page.id, page.message, str(page.role)))


def _kept(page: Page) -> Parts:
    """What an excerpt keeps of each of its sources."""
    return page.parts or ((page.sources[0], page.spans),) if page.kind is Kind.EXCERPT and page.sources else ()


def _within(view: View, source: int, spans: Sequence[Span]) -> list[Line]:
    """The lines of the kept spans of a page: what is between them is not looked at again."""
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
    """What the agent is at: its latest words, or the task."""
    for page in islice(reversed(view.pages), LATEST):
        if page.role is Role.ASSISTANT and page.kind in (Kind.TEXT, Kind.REASONING):
            return view.text(page.id)
    return view.task

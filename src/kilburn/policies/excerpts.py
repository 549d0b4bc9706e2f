"""What policies of excerpts share: which pages may leave, which originals an excerpt reaches, and its lines.

Functions of a view; they decide nothing about when, or how much.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from itertools import islice
from operator import attrgetter

from kilburn.message import Kind, Role
from kilburn.move import Fold, Move
from kilburn.page import Page, Parts, Span
from kilburn.policies.text.coverage import BASE, Line, choose, lines_of
from kilburn.policies.text.lines import merge
from kilburn.policy import View

__all__ = ["came_back", "far_of", "flow_of", "focus_of", "older", "parts_of", "reach", "shortened"]

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
    first = len(view.pages)
    while first and tail >= view.pages[first - 1].tokens:
        first -= 1
        tail -= view.pages[first].tokens
    stays = view.held()
    groups = {page.group for page in view.pages[first:]} - {0}
    marked = [page for page in view.pages if view.marks.get(page.id, 0.0) >= MARKED] if view.marks else []
    for page in sorted(marked, key=lambda page: (-view.marks[page.id], -page.id)):
        if page.tokens <= core:
            core -= page.tokens
            stays.update(view.group(page.id))
    return [page for page in view.pages[:first] if page.id not in stays and page.group not in groups]


def reach(view: View, going: Sequence[int]) -> tuple[tuple[int, ...], set[int]]:
    """The originals that the excerpt will stand for, and the pages that leave because it does not reach
    them. Of ten thousand pages only those near the border are looked at closely."""
    sources, stale = _near(view, going)
    torn, apart = came_back(view, going)
    if not apart:
        return sources, stale
    stale |= torn
    return tuple([source for source in sources if source not in apart]) if not stale.issuperset(going) else (), stale


def came_back(view: View, going: Sequence[int]) -> tuple[set[int], set[int]]:
    """Where a page was brought back, or a fold stays, an original may be shown beside a fold of it. Of the
    pages that are going, those that must be evicted ahead of a new fold because of that, and the originals
    that it may not cite, since they stay or are cited by what stays."""
    if min(map(attrgetter("id"), view.pages), default=0) >= 0:
        return set(), set()
    folds = [page for page in view.pages if page.id < 0 and not page.message]
    leaving = set(going)
    roots = {source for page in folds for source in page.sources}
    stays = roots.intersection([page.id for page in view.pages if page.id not in leaving])
    for page in view.pages:
        if page.id < 0 and page.id not in leaving:
            stays.update(roots.intersection(page.sources))
    stays.update(stub for stub in roots & view.stubs if leaving.isdisjoint(view.group(stub)))
    apart = {member for source in stays for member in view.group(source)}
    torn = {page for page in going if page in apart or (page < 0 and not apart.isdisjoint(view.page(page).sources))}
    torn.update(member for page in torn.copy() for member in view.group(page) if member in leaving)
    return torn, apart


def _near(view: View, going: Sequence[int]) -> tuple[tuple[int, ...], set[int]]:
    """As `reach`, where no page is shown beside a fold of it."""
    derived = [view.page(page) for page in going if page < 0]
    plain = [page for page in going if page > 0] if derived else going
    most = max(CITED, view.budget.capacity // 8)
    near = plain[-most - 1 :]
    border = near[0] if len(near) > most else 0
    leaving = set(plain)
    sources = {*near, *(source for page in derived for source in view.originals(page))}
    sources.update([stub for stub in view.stubs if stub >= border and not leaving.isdisjoint(view.group(stub))])
    if len(sources) <= most:
        return tuple(sorted(sources)), set()
    chosen = set(sorted(sources)[most // 4 - most :])
    chosen.update(source for page in derived for source, _ in _kept(page))
    close = [*derived, *map(view.page, near)]
    stale = set(plain[: bisect_left(plain, min(chosen))])
    stale |= {page.id for page in close if not chosen.issuperset(view.originals(page))}
    stale |= {page.id for page in close if not stale.isdisjoint(view.group(page.id))}
    # What a page that leaves whole would be cited by is not the excerpt's to stand for.
    whole = {
        source
        for source in chosen
        if (source in stale or source in view.stubs) and any(page in stale and page in leaving for page in view.group(source))
    }
    return tuple(sorted(chosen - whole)), stale


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
        parts = choose(lines_of(text, page.id, page.message, str(page.role)), [], focus_of(view), room, view.count)
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
    view: View,
    going: Sequence[int],
    stale: Set[int],
    sources: Set[int],
    room: int,
    far: int,
    *,
    least: float = 0.0,
    floor: int = 0,
    base: float = BASE,
) -> Parts:
    """The spans to keep of each original that an excerpt of these pages reaches, within the room, marks included.

    Args:
        far: tokens of the room that are kept for the far past.
        least: the gain under which a line is not worth its tokens once `floor` tokens are taken; `base`: the weight of a
            line as such (see `choose`).
    """
    if room <= view.handle:
        return ()
    # An excerpt that leaves hands on those of its lines whose originals are still reached.
    near = [view.page(page) for page in going if page < 0 or page not in stale]
    first, left = len(near), READ
    while first and left > 0:
        first -= 1
        left -= near[first].tokens
    near = [*(page for page in near[:first] if page.id < 0), *near[first:]]
    lines = [line for page in near for line in _lines(view, page) if line.page in sources]
    life = max(1.0, view.budget.capacity / flow_of(view) / LIFE)
    texts = _shown(view, set(going))
    return choose(lines, texts, focus_of(view), room, view.count, far=far, least=least, floor=floor, base=base, life=life)


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

"""The common part of `hybrid` and `cost`: excerpts in front that rarely change, and copies behind for the newest request.

When the window is full, what is older than a tail is replaced by an excerpt, which is put after the excerpts that are there:
all before it keeps its bytes, and is read from the provider's cache. When the excerpts take too much of the window, they are
remade as one. Each edit frees more than it must, so edits are seldom. What a question needs beside, or the agent's latest words,
is brought to before the last message (see `bringing`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from kilburn.effect import Answer, Effect
from kilburn.move import Move
from kilburn.page import Page, Parts
from kilburn.policy import Cause, View
from kilburn.prices import Prices
from kilburn.selection.bringing import (
    cached_behind,
    copy_moves,
    described,
    fitting,
    is_chat,
    is_due,
    largeness,
    leaves,
    passages_asked,
    removable_copies,
    unshown,
)
from kilburn.selection.excerpts import (
    cited_stretch,
    excerpt_moves,
    excerpt_parts,
    is_asked,
    mean_message_tokens,
    old_pages,
    shorten_latest,
    split_excerpts,
    unread,
)

LASTING, MORE_LASTING = 0.6, 0.4
"""Worth of a new passage as such: an excerpt stands for several prompts, whose thoughts are not known yet; what is added in a
window of 4,000 tokens, which holds the last outputs."""

MARKS = 12
"""Tokens of the frame around each page's passages in an excerpt, and a third of the frame around all."""


MIN_COPY_TOKENS, COPY_SHARE, MAX_COPY_TOKENS = 200, 0.16, 4000
"""Tokens of a copy at most: so many, this share of the window more, and in no window more than so many."""


HELD_ROOM = 0.75
"""Share of a copy's room that other pages leave free while people talk. An edit makes room for a whole copy; with less than that
left, a question has a smaller copy rather than an edit. A larger share edits more often, and shows no more."""

UNCACHED = 1200
"""Tokens of a window up to which the beginning is worth little: the providers cache none of less than 1,024 tokens. There
`hybrid` leaves less free at an edit and remakes the excerpts sooner, and no room is held for questions."""

FILL = 0.68
"""Minimum filled share of a window of 8,000 tokens or more after an edit; for a window of 4,000 tokens it is 0."""


COLD = 0.75
"""Filled share from which a window is edited early if the provider's cache has expired: the next prompt is written to the cache
as a whole in any case, so the edit costs nothing."""


@dataclass(frozen=True)
class WindowShape:
    """How a window is divided, in tokens.

    Args:
        capacity: from which on it is full.
        tail: of the newest pages, before what the agent has not read, that stay whole.
        whole: of the latest message, up to which it stays whole.
        spare: that an edit leaves free.
        added, excerpts, remade: maximum tokens of one excerpt; of all excerpts before they are remade; of the remade one.
        copy: of a copy at most; while people talk, other pages leave most of it free (`HELD_ROOM`).
        floor: that the window holds after an edit, at least, as far as there is text for it.
    """

    capacity: int
    tail: int
    whole: int
    spare: int
    copy: int
    added: int = 0
    excerpts: int = 0
    remade: int = 0
    floor: int = 0


@dataclass(frozen=True)
class Economy:
    """What tokens in the window cost until the next edit, in tokens of fresh input.

    Args:
        prices: of the model; `input` is above 0.
        flow: tokens that come between two prompts, on average; above 0.
        capacity: tokens at which the next edit comes.
        chance: worth that a passage must have for each token that it costs.
    """

    prices: Prices
    flow: float
    capacity: int
    chance: float

    def bar(self, stays: int, excerpt: int) -> float:
        """The worth that a passage must have if the window holds `stays` tokens beside an excerpt that has `excerpt` without it.

        A token more is written once, is read from the cache with each prompt, and takes room: the next edit comes sooner, and
        reads all that it leaves again. Of a window that is almost full the edits are so frequent that nothing is worth its place.
        """
        prices, free = self.prices, max(1.0, self.capacity - stays - excerpt)
        rewriting = max(0.0, prices.written - prices.cached) * self.flow * self.capacity / free**2
        return self.chance * (prices.cached + prices.written * 2 * self.flow / self.capacity + rewriting) / prices.input

    def rate(self, rewritten: int, use: int) -> float:
        """Return what a prompt costs after an edit that rewrites `rewritten` tokens and leaves `use` in the window."""
        prices, until = self.prices, max(1.0, (self.capacity - use) / self.flow)
        return rewritten * max(0.0, prices.written - prices.cached) / until + prices.cached * (use + self.capacity) / 2


class _Edit(NamedTuple):
    """Moves in front, the pages that stay, and what excerpts then keep, and take about, together with these pages."""

    moves: list[Move]
    staying: Sequence[Page]
    excerpt: Parts
    use: int


def max_copy_tokens(capacity: int) -> int:
    """Return the maximum number of tokens of a copy in a window of that capacity."""
    return min(MAX_COPY_TOKENS, MIN_COPY_TOKENS + int(COPY_SHARE * capacity))


def middleness(capacity: int) -> float:
    """Return 0 for a window of 2,000 tokens or less, 1 for a window of 4,000 or more, with linear interpolation."""
    return largeness(2 * capacity)


def min_window_tokens(capacity: int) -> int:
    """Return the minimum number of tokens that a window has after an edit: two thirds of a window of 8,000 or more, 0 for a
    window of 4,000."""
    return int(FILL * capacity * largeness(capacity))


def keep(
    view: View, shape: WindowShape, prices: Prices, economy: Callable[[Sequence[Page]], Economy] | None = None
) -> Generator[Effect, Answer, list[Move]]:
    """The moves at a window: an edit in front if it is full, or has no room for what the user asked, and what was asked behind.

    Args:
        economy: decides how much of these leaving pages an edit keeps, and whether it remakes the excerpts; None for the shares
            of `shape`.
    """
    copies = removable_copies(view)
    free_edit = economy is not None and view.use > COLD * shape.capacity and _is_cold(view, prices)
    copied = sum([page.tokens for page in copies])
    free = shape.capacity - view.use + copied
    reserve = max(copied, int(HELD_ROOM * shape.copy)) if _holds_room(view, shape) else copied
    edit: _Edit | None = None
    if free >= reserve and not free_edit:
        if view.cause is not Cause.ADMIT or not is_due(view):
            return []
        cached = shape.capacity > UNCACHED
        passages = yield from passages_asked(view, min(shape.copy, free) if cached else shape.copy)
        leaving = [page for page in copies if leaves(view, page, passages, prices)]
        missing = unshown(passages, [page for page in copies if page not in leaving])
        fit = fitting(view, missing, free - copied + sum([page.tokens for page in leaving]))
        if len(fit) < len(missing):
            # The copies that would stay leave no room for it.
            leaving, missing, fit = copies, passages, fitting(view, passages, free)
            edit = _edit(view, shape, economy) if cached else None
        fits = cached or len(fit) == len(missing) or not is_asked(view)
        if fits and (edit is None or not _is_edit_cheaper(view, prices, copies, edit.use)):
            return copy_moves(leaving, fit)
    edit = edit or _edit(view, shape, economy)
    # No copy can stand between a call and its result.
    room = 0 if view.open else min(shape.copy, shape.capacity - edit.use)
    passages = (yield from passages_asked(view, room, staying=edit.staying, excerpt=edit.excerpt)) if is_due(view) else []
    return [*edit.moves, *copy_moves(copies, passages)]


def _is_edit_cheaper(view: View, prices: Prices, copies: Sequence[Page], use: int) -> bool:
    """Return whether an edit in front, after which the window holds `use` tokens, makes the next prompts cheaper than the
    eviction of all copies, behind which the window is written to the cache again."""
    economy = Economy(prices, 2 * mean_message_tokens(view), view.budget.capacity, 0.0)
    remaining = view.use - sum([page.tokens for page in copies])
    rewritten = max([cached_behind(view, page) for page in copies], default=0)
    return economy.rate(use, use) < economy.rate(rewritten, remaining)


def _holds_room(view: View, shape: WindowShape) -> bool:
    """Return whether the other pages leave room for a copy, so that a question needs no edit of a cached beginning."""
    return shape.capacity > UNCACHED and is_chat(view)


def _is_cold(view: View, prices: Prices) -> bool:
    """Return whether the provider's cache has expired: the last two messages are further apart than its lifetime."""
    if view.cause is not Cause.ADMIT:
        return False
    times = [view.uses[page.id].time for page in view.pages if page.message < view.turn and page.id in view.uses]
    return bool(times) and view.now - max(times) > prices.ttl


def _edit(view: View, shape: WindowShape, economy: Callable[[Sequence[Page]], Economy] | None) -> _Edit:
    """Add an excerpt after the existing ones, or replace all of them by one."""
    capacity = shape.capacity
    third = capacity // 3
    tail = min(unread(view, third, int(third * middleness(capacity))), max(shape.whole, capacity // 2)) + shape.tail
    leaving = old_pages(view, tail, capacity // 4)
    latest, saved = shorten_latest(view, shape.whole)
    use = view.use - saved - sum([page.tokens for page in removable_copies(view)])
    if not leaving:
        return _Edit(latest, [page for page in view.pages if page.id not in view.copies], (), use)
    excerpts, young = split_excerpts(leaving)
    excerpt_tokens = sum([page.tokens for page in excerpts])
    stays = use - excerpt_tokens - sum([page.tokens for page in young])
    spare = shape.spare + shape.copy if _holds_room(view, shape) else max(shape.spare, shape.copy * is_asked(view))
    room = capacity - stays - spare - 2 * view.handle
    if economy is not None:
        return _cheapest(view, shape, economy(leaving), latest, excerpts, young, room, stays)
    floor = shape.floor - stays if shape.floor else 0
    max_added = min(room, max(shape.excerpts, floor + capacity // 5)) - excerpt_tokens
    if young and max_added > capacity // 20:
        size = min(max(shape.added, floor), room - excerpt_tokens)
        if size > max_added > capacity // 10:
            size = max_added
        moves, parts = _excerpt(view, young, shape, size)
        if _size(parts) <= max_added:
            return _made(view, [*latest, *moves], young, parts, stays + excerpt_tokens)
    moves, parts = _excerpt(view, leaving, shape, min(max(shape.remade, floor), room))
    return _made(view, [*latest, *moves], leaving, parts, stays)


def _cheapest(
    view: View,
    shape: WindowShape,
    economy: Economy,
    latest: list[Move],
    excerpts: Sequence[Page],
    young: Sequence[Page],
    room: int,
    stays: int,
) -> _Edit:
    """An excerpt of what is young after the others, or one in place of all, whichever makes the next prompts cheaper."""
    excerpt_tokens = sum([page.tokens for page in excerpts])
    edits: list[tuple[float, _Edit]] = []
    for leaving, front in ((young, excerpt_tokens), ([*excerpts, *young], 0)):
        # Without room for an excerpt, all leaves.
        if leaving and (room > front or not front):
            moves, parts = _excerpt(view, leaving, shape, room - front, partial(economy.bar, stays + front))
            edit = _made(view, [*latest, *moves], leaving, parts, stays + front)
            edits.append((economy.rate(edit.use - front, edit.use), edit))
        if not excerpts:
            break
    return min(edits, key=lambda priced: priced[0])[1]


def _made(view: View, moves: list[Move], leaving: Sequence[Page], parts: Parts, use: int) -> _Edit:
    leaving_ids = {page.id for page in leaving} | view.copies
    staying = [page for page in view.pages if page.id not in leaving_ids]
    return _Edit(moves, staying, parts, use + _size(parts) + MARKS * (len(parts) + 3) + 2 * view.handle)


def _excerpt(
    view: View, pages: Sequence[Page], shape: WindowShape, room: int, bar: Callable[[int], float] | None = None
) -> tuple[list[Move], Parts]:
    """Replace pages by one excerpt, or evict them if no passage is worth its tokens."""
    stretch = cited_stretch(view, pages)
    recent = LASTING + MORE_LASTING * middleness(shape.capacity)
    parts = excerpt_parts(view, stretch, room, bar=bar, recent=recent)
    why = f"{described(parts)} that are worth most"
    return excerpt_moves(stretch, parts, why, nothing="nothing that is worth its tokens"), parts


def _size(parts: Parts) -> int:
    """Estimate the tokens of an excerpt. An exact count is not needed here."""
    return sum([stop - start + 4 for _, spans in parts for start, stop in spans]) // 4

"""Excerpts for a view: which pages they replace, which originals they cite, and which lines they keep.

Policies decide when one is made, and how large it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from kilburn.kernel.pending import NOT_INDEXED
from kilburn.message import Kind, Role
from kilburn.move import Evict, Fold, Move
from kilburn.page import Page, Parts, Span
from kilburn.policy import Stretch, View
from kilburn.selection.lines import join, merge
from kilburn.selection.selection import RECENT, TALK_WEIGHT, PagePassage, focus_words, max_passage_chars, page_candidates, select

CITED = 1024
"""An excerpt cites at least this many originals. Beyond that, originals of which it keeps no line have only a handle."""

MAX_TOKENS_READ = 200_000
"""Tokens of leaving pages, newest first, from whose lines one excerpt is chosen, besides those of earlier excerpts: all
in a window of 200,000 or less. It bounds the time of a plan."""

LATEST_SHARE = 0.75
"""Share of the window, without its pins, that is left to the latest message if it does not fit."""

LATEST = 128
"""Newest pages in which the agent's latest words are looked for."""
LIFE = 38
"""In a window with up to this many messages, a line loses worth with age at the usual rate; in a larger window more
slowly."""

SHORT_REQUEST_WORDS = 40
"""Words of a request up to which each counts as much in the focus as the agent's latest words; of one twice as long, a
quarter of it."""

REPLY_WEIGHT = 0.3
"""Weight in the focus of what the agent said before a short request."""

ANSWERS = 0.7
"""Weight of the agent's own words compared with tool output, when the user just asked something."""

MAX_VISIBLE_CHARS = 40_000
"""Characters of the pages that stay whole, newest first, whose names and lines need not be kept again: all of them in a
window of 8,000 tokens, and the newest in a larger one."""

IMPORTANT = 0.5
"""Importance from which on a page belongs to the core."""


def old_pages(view: View, tail: int, core: int) -> list[Page]:
    """The pages before a tail of so many tokens that may leave; important ones stay, up to `core` tokens. Copies are not among
    them: they leave by themselves."""
    stays: set[int] = set()
    important = [page for page in view.pages if view.importance.get(page.id, 0.0) >= IMPORTANT] if view.importance else []
    for page in sorted(important, key=lambda page: (-view.importance[page.id], -page.id)):
        if page.tokens <= core:
            core -= page.tokens
            stays.add(page.id)
    return view.movable([page for page in view.front(tail) if page.id not in stays and page.id not in view.copies])


def split_excerpts(pages: Sequence[Page]) -> tuple[Sequence[Page], Sequence[Page]]:
    """The excerpts of several pages that stand in front, and what came after them."""
    front = 0
    while front < len(pages) and pages[front].kind is Kind.EXCERPT and pages[front].parts:
        front += 1
    return pages[:front], pages[front:]


def cited_stretch(view: View, pages: Iterable[Page]) -> Stretch:
    """What an excerpt in place of pages cites: these, and what left before them without an excerpt; of very many originals
    the newest, and those of which an earlier excerpt keeps something."""
    going = list(pages)
    max_sources = max(CITED, view.budget.capacity // 8)
    last = max([source for page in going for source in (page.sources or (page.id,))], default=0)
    resident = {page.id for page in view.pages}
    out = [number for number in range(max(1, last - max_sources), last) if number not in resident and not view.gone(number)]
    stretch = view.stretch([*out, *(page.id for page in going)])
    if len(stretch.sources) <= max_sources:
        return stretch
    excerpted = {source for page in stretch.pages for source, _ in _kept(page)}
    return view.stretch(
        [*out, *(page.id for page in going)], within=excerpted.union(stretch.sources[max_sources // 4 - max_sources :])
    )


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


def unread(view: View, recalled: int, answered: int) -> int:
    """Count the tokens of the newest pages that an edit must leave whole: what the agent has not read, which is the latest
    message and before it the results of parallel calls, and what it still works with.

    Args:
        recalled: tokens from which on what it recalled since the user's latest message may leave; the answer that it is
            recalled for has not been given.
        answered: tokens from which on an output may leave that the agent just answered with a call. The result of that call
            is read beside it.
    """
    tokens = whole = 0
    has_output = is_old = False
    newest_by_assistant: bool | None = None
    for page in reversed(view.pages):
        if page.id in view.copies:
            continue
        by_assistant = page.role is Role.ASSISTANT
        if newest_by_assistant is None:
            newest_by_assistant = by_assistant
        is_old = is_old or page.id <= 0 or (by_assistant and has_output)
        has_output = has_output or not by_assistant
        tokens += page.tokens
        if is_old and (page.role is Role.USER or tokens > recalled):
            break
        if _is_brought(view, page) if is_old else (not newest_by_assistant or tokens <= answered):
            whole = tokens
    return whole


def shorten_latest(view: View, whole: int) -> tuple[list[Move], int]:
    """Excerpts of new pages that are too long to stay whole, and the tokens that they save. What memory brought stays whole: it
    was asked for, and its tool has a bound of its own. The results of parallel calls share the room: if more stayed than the
    window holds, the whole exchange would leave, and the agent would read nothing of it."""
    folds: list[Move] = []
    saved = 0
    latest = view.latest()
    capacity = view.budget.capacity
    room = capacity - sum([view.page(page).tokens for page in view.pins])
    # What the user wrote stays whole up to half of the window under any policy: passages that a client retrieved stand there.
    limits = {page.id: max(whole, capacity // 2) if page.role is Role.USER else whole for page in latest}
    if sum([min(page.tokens, limits[page.id]) for page in latest]) > room:
        share = min(whole, max(_equal_share([page.tokens for page in latest], LATEST_SHARE * room), whole // 8))
        limits = dict.fromkeys(limits, share)
    for page in latest:
        limit = limits[page.id]
        if page.tokens <= limit or page.id in view.pins or page.kind not in (Kind.RESULT, Kind.TEXT) or _is_brought(view, page):
            continue
        text = view.text(page.id)
        # Of a user's message head and tail stay, because the request is usually there.
        ends = _ends(text, limit // 4) if page.role is Role.USER else ()
        room = limit - view.handle - sum([view.count(text[start:end]) for start, end in ends])
        passages = page_candidates(text, page.id, page.message, str(page.role), max_passage_chars(room))
        parts = select(passages, [], focus_weights(view), room, view.count, ratio=len(text) / max(1, page.tokens), heading="")
        if parts:
            keep = merge([*ends, *parts[0][1]])
            folds.append(Fold(pages=(page.id,), keep=keep, why=f"{page.tokens} tokens, too long to stay whole"))
            saved += page.tokens - view.handle - view.count(join(text, keep))
    return folds, saved


def _equal_share(sizes: Sequence[int], room: float) -> int:
    """Return the size to which the largest of these must be cut so that all fit into the room."""
    for index, size in enumerate(sorted(sizes)):
        share = room / (len(sizes) - index)
        if size > share:
            return int(share)
        room -= size
    return max(sizes, default=0)


def _is_brought(view: View, page: Page) -> bool:
    """Whether memory brought it, of this session or of others; what a branch returned is not that."""
    return bool(page.sources) or (bool(page.cites and page.answers) and view.page(page.answers).name in NOT_INDEXED)


def _ends(text: str, size: int) -> tuple[Span, ...]:
    """Head and tail of a text, of about so many characters each, cut at a line end if one is near."""
    head = text.rfind("\n", size // 2, size) + 1 or min(size, len(text))
    tail = text.find("\n", len(text) - size, len(text) - size // 2) + 1 or max(head, len(text) - size)
    return ((0, head), (max(head, tail), len(text))) if tail < len(text) else ((0, len(text)),)


def excerpt_parts(
    view: View, stretch: Stretch, room: int, *, bar: Callable[[int], float] | None = None, recent: float = RECENT
) -> Parts:
    """Return the spans to keep of each original that an excerpt of a stretch cites, within the room, marks included.

    Args:
        bar, recent: see `select`.
    """
    if room <= view.handle:
        return ()
    grain = max_passage_chars(room)
    talk = ANSWERS if is_asked(view) else TALK_WEIGHT
    candidates: list[PagePassage] = []
    characters = tokens = 0
    excerpted = {source: spans for page in stretch.pages for source, spans in _kept(page)}
    older = iter(reversed(stretch.sources))
    for number in older:
        page = view.page(number)
        if page.kind is Kind.FOLD or page.is_atomic:
            continue
        text = view.text(number)
        characters, tokens = characters + len(text), tokens + page.tokens
        candidates += reversed(page_candidates(text, number, page.message, str(page.role), grain, talk=talk))
        if tokens >= MAX_TOKENS_READ:
            break
    for number in [number for number in older if number in excerpted]:
        page = view.page(number)
        for span in reversed(excerpted[number]):
            candidates += reversed(
                page_candidates(view.text(number), number, page.message, str(page.role), grain, span, talk=talk)
            )
    candidates.reverse()
    leaving = {page.id for page in stretch.pages} | view.copies
    life = max(1.0, view.budget.capacity / mean_message_tokens(view) / LIFE)
    return select(
        candidates,
        shown_texts(view, (page for page in reversed(view.pages) if page.id not in leaving)),
        focus_weights(view),
        room,
        view.count,
        ratio=characters / max(1, tokens),
        bar=bar,
        recent=recent,
        life=life,
    )


def mean_message_tokens(view: View) -> float:
    """Return the mean number of tokens of a message."""
    return max(1.0, view.seen / max(1, view.turn))


def _kept(page: Page) -> Parts:
    """What an excerpt keeps of each of its sources."""
    return page.parts or ((page.sources[0], page.spans),) if page.kind is Kind.EXCERPT and page.sources else ()


def shown_texts(view: View, staying: Iterable[Page]) -> list[str]:
    """The newest texts of the pages that stay in the prompt whole, which are given newest first."""
    texts: list[str] = []
    remaining = MAX_VISIBLE_CHARS
    for page in staying:
        if remaining <= 0:
            break
        if not page.is_atomic:
            texts.append(view.text(page.id))
            remaining -= len(texts[-1])
    return texts


def focus_weights(view: View) -> dict[str, float]:
    """Return the words that the agent is working on, with weights: its latest words and those of the request. A new request
    weighs most, unless it is long."""
    return focus_words(focus_texts(view))


def focus_texts(view: View) -> list[tuple[str, float]]:
    """Return the request and the agent's latest words, each with its weight."""
    newest = islice(reversed(view.pages), LATEST)
    latest = next((page for page in newest if page.role is Role.ASSISTANT and page.kind in (Kind.TEXT, Kind.REASONING)), None)
    task_weight = min(1.0, SHORT_REQUEST_WORDS / max(1, len(view.task.split()))) ** 2
    # The agent may have said nothing since the request, and still be at work on it.
    reply_weight = 1.0 - (1.0 - REPLY_WEIGHT) * task_weight if latest is None or latest.id < view.task_page else 1.0
    return [(view.task, task_weight), (view.text(latest.id) if latest else "", reply_weight)]


def is_asked(view: View) -> bool:
    """Whether the newest message is a short request of the user."""
    return _is_newest(view, view.task_page) and len(view.task.split()) <= 2 * SHORT_REQUEST_WORDS


def _is_newest(view: View, number: int) -> bool:
    return any(page.id == number for page in view.latest())

"""Renders the prompts of one session, and records what each costs an engine that caches prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kilburn.budget import text_cost
from kilburn.event import Act, Data
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.receipts import Difference, ranges
from kilburn.kernel.render import Item, Prompt, behind_compaction, items, part_of, render, transcript
from kilburn.kernel.window import WindowState
from kilburn.message import Part
from kilburn.page import Page
from kilburn.policy import Cause


class Prompts:
    """Renders prompts, and keeps the last one to compare the next with it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        # Cached parts of messages, by page; the pieces of the last prompt; all pages that were in any prompt.
        self._parts: dict[int, tuple[Part, str | None]] = {}
        self._shipped: list[Piece] = []
        self._seen: set[int] = set()
        # The last page of a prompt that was all of the session, if nobody rendered it.
        self._whole = 0

    def clear(self) -> None:
        """Forget everything: the session was read again."""
        self._parts.clear()
        self._shipped.clear()
        self._seen.clear()
        self._whole = 0

    def forget(self, pages: list[int]) -> None:
        """Remove forgotten pages."""
        for page in pages:
            self._parts.pop(page, None)
        self._seen.difference_update(pages)
        self._shipped.clear()

    def render(self, form: str, origin: Data | None = None) -> Prompt:
        """The prompt, in a provider's form; its cost is recorded in the ledger, with what is known of who asked for it."""
        kernel = self._kernel
        entries = items(kernel.window)
        if form == "messages" and kernel.window.compactions:
            entries = behind_compaction(entries, kernel.window)
        self._bring(entries)
        prompt = render(
            transcript(entries, lambda page: self._parts[page.id], kernel.window, kernel.unsigned_to), form, kernel.window.use
        )
        prompt.pages = tuple(page.id for _, page, instead in entries if page is not None and not instead)
        if not kernel.backend.readonly:
            self._ship(entries, origin or {})
        return prompt

    def render_once(self, form: str, origin: Data | None = None) -> Prompt:
        """The prompt of a window that is about to be undone."""
        try:
            return self.render(form, origin)
        finally:
            self._parts.clear()

    def sent_whole(self, origin: Data) -> None:
        """Record a prompt that was sent without being rendered, because nothing has ever left the window."""
        self._whole = self._kernel.window.last
        self._record(origin, {"again": 0})

    def _bring(self, entries: list[Item]) -> None:
        """Cache the parts of all visible pages, and remove others if there are many."""
        kernel = self._kernel
        fresh = [page for _, page, instead in entries if page is not None and not instead and page.id not in self._parts]
        kernel.contents.fetch(digest for page in fresh for digest in (page.digest, page.extra))
        for page in fresh:
            self._parts[page.id] = part_of(page, kernel.contents.get(page.digest), kernel.contents.get(page.extra))
        if len(self._parts) > 2 * len(entries) + 64:
            visible = {page.id for _, page, _ in entries if page is not None}
            self._parts = {number: part for number, part in self._parts.items() if number in visible}

    def _ship(self, entries: list[Item], origin: Data) -> None:
        """Record what this prompt costs: all of it, and what an engine must process again after the first difference."""
        kernel = self._kernel
        if self._whole:
            pages = [page for page in kernel.window.pages.originals() if page.id <= self._whole]
            self._shipped = pieces(kernel.window, [((*page.order, page.id), page, "") for page in pages])
            self._seen.update(page.id for page in pages)
            self._whole = 0
        current = pieces(kernel.window, entries)
        same = in_common(self._shipped, current)
        repeated = sum(
            cost
            for (_, page, _), (_, cost) in zip(entries[same:], current[same:], strict=True)
            if page is not None and self._was_shipped(page)
        )
        cost: Data = {"again": repeated}
        if self._shipped:
            cost["fresh"] = sum(tokens for _, tokens in current[same:]) - repeated
        self._seen.update(page.id for _, page, _ in entries if page is not None)
        self._shipped = current
        self._record(origin, cost)

    def _record(self, origin: Data, cost: Data) -> None:
        kernel = self._kernel
        budget, room = kernel.budget, kernel.capacity
        cost["window"] = room
        if budget.window != room:
            cost["whole"], cost["beside"] = budget.window, budget.reserve + budget.overhead
        data: Data = {**cost, **origin}
        kernel.observe(Act.SHIP, cause=Cause.IDLE, **data)

    def _was_shipped(self, page: Page) -> bool:
        """Whether a page was in an earlier prompt, itself or, of a derived page, any of its sources."""
        return page.id in self._seen or not self._seen.isdisjoint(page.sources if page.depth else ())


Piece = tuple[tuple[tuple[int, int, int], int, str], int]
"""One thing in a prompt: its place, its page or 0, the text in place of the page's own; and what it costs."""


def pieces(window: WindowState, entries: Sequence[Item]) -> list[Piece]:
    """What is in a prompt, in order, with the tokens of each."""
    return [((key, 0 if page is None else page.id, instead), _cost_of(window, page, instead)) for key, page, instead in entries]


def _cost_of(window: WindowState, page: Page | None, instead: str) -> int:
    if page is None:
        return text_cost(window.counter, instead)
    return window.stubs[page.id] if instead else window.cost(page.id)


def in_common(old: Sequence[object], new: Sequence[object]) -> int:
    """How many pieces two prompts have in common at their beginning."""
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (left_piece, right_piece) in pairs if left_piece != right_piece), min(len(old), len(new)))


class Snapshot(NamedTuple):
    """A prompt as it was at one moment: its tokens, and what was in it."""

    use: int
    pieces: Sequence[Piece]


def snapshot(window: WindowState) -> Snapshot:
    """The prompt of a window as it is now."""
    return Snapshot(window.use, pieces(window, items(window)))


def difference(earlier: Snapshot, later: Snapshot) -> Difference:
    """How a prompt differs from an earlier one of the same session."""
    old, new = earlier.pieces, later.pieces
    old_texts, new_texts = ({page: instead for (_, page, instead), _ in prompt if page} for prompt in (old, new))
    return Difference(
        before=earlier.use,
        after=later.use,
        kept=sum(cost for _, cost in new[: in_common(old, new)]),
        left=ranges(old_texts.keys() - new_texts.keys()),
        came=ranges(new_texts.keys() - old_texts.keys()),
        changed=ranges(page for page in old_texts.keys() & new_texts.keys() if old_texts[page] != new_texts[page]),
    )

"""Renders the prompts of one process, and records what each costs an engine that caches prefixes."""

from __future__ import annotations

from typing import Any

from kilburn.event import Act
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.render import Item, Prompt, cost_of, items, part_of, render, transcript
from kilburn.message import Part
from kilburn.page import Page
from kilburn.policy import Cause


class Prompts:
    """Renders prompts, and keeps the last one to compare the next with it."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        # Cached parts of messages, by page; the pieces of the last prompt; all pages that were in any prompt.
        self._parts: dict[int, tuple[Part, str | None]] = {}
        self._shipped: list[tuple[Any, int]] = []
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

    def render(self, form: str) -> Prompt:
        """The prompt, in a provider's form; its cost is recorded in the ledger."""
        kernel = self._kernel
        shown = items(kernel.window)
        self._bring(shown)
        prompt = render(transcript(shown, lambda page: self._parts[page.id], kernel.window), form, kernel.use)
        prompt.pages = tuple(page.id for _, page, instead in shown if page is not None and not instead)
        if not kernel.backend.readonly:
            self._ship(shown)
        return prompt

    def render_once(self, form: str) -> Prompt:
        """The prompt of a window that is about to be undone."""
        try:
            return self.render(form)
        finally:
            self._parts.clear()

    def sent_whole(self) -> None:
        """Record a prompt that was sent without being rendered, because nothing has ever left the window."""
        self._whole = self._kernel.window.last
        self._kernel.observe(Act.SHIP, cause=Cause.IDLE, again=0, window=self._kernel.capacity)

    def _bring(self, shown: list[Item]) -> None:
        """Cache the parts of all visible pages, and remove others if there are many."""
        kernel = self._kernel
        fresh = [page for _, page, instead in shown if page is not None and not instead and page.id not in self._parts]
        kernel.contents.fetch(digest for page in fresh for digest in (page.digest, page.extra))
        for page in fresh:
            self._parts[page.id] = part_of(page, kernel.contents.get(page.digest), kernel.contents.get(page.extra))
        if len(self._parts) > 2 * len(shown) + 64:
            kept = {page.id for _, page, _ in shown if page is not None}
            self._parts = {number: part for number, part in self._parts.items() if number in kept}

    def _ship(self, shown: list[Item]) -> None:
        """Record what this prompt costs: all of it, and what an engine must process again after the first difference."""
        kernel = self._kernel
        if self._whole:
            pages = [page for page in kernel.window.pages.originals() if page.id <= self._whole]
            self._shipped = [(((*page.order, page.id), ""), kernel.window.cost(page.id)) for page in pages]
            self._seen.update(page.id for page in pages)
            self._whole = 0
        now = [((key, instead), cost_of(kernel.window, page, instead)) for key, page, instead in shown]
        same = 0
        for old, new in zip(self._shipped, now, strict=False):
            if old != new:
                break
            same += 1
        again = sum(
            cost
            for (_, page, _), (_, cost) in zip(shown[same:], now[same:], strict=True)
            if page is not None and self._was_shipped(page)
        )
        self._seen.update(page.id for _, page, _ in shown if page is not None)
        self._shipped = now
        kernel.observe(Act.SHIP, cause=Cause.IDLE, again=again, window=kernel.capacity)

    def _was_shipped(self, page: Page) -> bool:
        """Whether a page was in an earlier prompt, itself or, of a derived page, any of its sources."""
        return page.id in self._seen or not self._seen.isdisjoint(page.sources if page.depth else ())

"""Reading a process: recall, search, render, figures, and the whole transcript.

Nothing here changes where a page is. What was read is noted in the ledger, unless the store was
opened for reading.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import msgspec

from kilburn.event import Act, Event
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.ledger import Stats
from kilburn.kernel.render import Item, Prompt, items, part_of, render, transcript
from kilburn.kernel.search import Found, found
from kilburn.message import Message, Part
from kilburn.page import Page, parse_address
from kilburn.policy import Cause
from kilburn.store import State
from kilburn.wire.form import dump

__all__ = ["HitRateWarning", "Reader", "Recalled"]


class HitRateWarning(UserWarning):
    """The window misses too much of what the agent asks for (see `Stats`)."""


class Recalled(str):
    """Recalled text, exact: the concatenation of its pages' texts.

    `parts` holds the pages' texts one by one, `pages` the pages.
    """

    pages: tuple[Page, ...]
    parts: tuple[str, ...]

    def __new__(cls, pages: tuple[Page, ...], parts: tuple[str, ...]) -> Recalled:
        made = super().__new__(cls, "".join(parts))
        made.pages, made.parts = pages, parts
        return made


class Reader:
    """What can be read of a session; `Process` adds the writing."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self._parts: dict[int, tuple[Part, str | None]] = {}
        self._shipped: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        self._warned = False

    @property
    def name(self) -> str:
        """The session's name."""
        return self.kernel.info.name

    def recall(self, address: str) -> Recalled:
        """The exact text at an address: a page fault, answered from whichever level has it.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        kernel = self.kernel
        with kernel.lock:
            numbers = self.kernel.resolve(address)
            pages = tuple(kernel.tier.pages[number] for number in numbers)
            kernel.contents.fetch(page.digest for page in pages)
            recalled = Recalled(pages, tuple(kernel.contents.get(page.digest) for page in pages))
            if not kernel.store.readonly:
                kernel.observe(
                    Act.FAULT, numbers, policy="user", cause=Cause.FAULT, missed=[n for n in numbers if kernel.tier.at(n) != "in"]
                )
            return recalled

    def search(self, query: str, tokens: int = 1000, limit: int = 20) -> list[Found]:
        """Passages of this process that match a query, best first, within a token budget."""
        kernel = self.kernel
        with kernel.lock:
            passages = kernel.store.search(query, process=kernel.info.number, limit=limit)
            hits = found(passages, {kernel.info.number: self}, kernel.counter, tokens, kernel.clock())
            if not kernel.store.readonly:
                kernel.observe(Act.SEARCH, [parse_address(hit.address)[0] for hit in hits], policy="user", cause=Cause.FAULT)
        return hits

    def render(self, format: str = "chat") -> Prompt:
        """The prompt: what is in the window, as messages for OpenAI ("chat") or Anthropic ("messages").

        A list of dicts; for "messages" the system prompt stands beside it, in `.system`. Never over
        the window; grows only at its end until something is edited.
        """
        kernel = self.kernel
        with kernel.lock:
            shown = items(kernel.tier)
            fresh = [page for _, page, instead in shown if page is not None and not instead and page.id not in self._parts]
            kernel.contents.fetch(digest for page in fresh for digest in (page.digest, page.extra))
            for page in fresh:
                self._parts[page.id] = part_of(page, kernel.contents.get(page.digest), kernel.contents.get(page.extra))
            if len(self._parts) > 2 * len(shown) + 64:
                kept = {page.id for _, page, _ in shown if page is not None}
                self._parts = {number: part for number, part in self._parts.items() if number in kept}
            prompt = render(transcript(kernel.tier, lambda page: self._parts[page.id]), format, kernel.use)
            if not kernel.store.readonly:
                self._ship(shown)
        return prompt

    def _ship(self, shown: list[Item]) -> None:
        kernel = self.kernel
        now = [((key, instead), _cost(page, instead, kernel)) for key, page, instead in shown]
        same = 0
        for old, new in zip(self._shipped, now, strict=False):
            if old != new:
                break
            same += 1
        again = sum(cost for (key, _), cost in now[same:] if key[2] in self._seen)
        self._seen.update(key[2] for (key, _), _ in now)
        self._shipped = now
        kernel.observe(Act.SHIP, cause=Cause.IDLE, again=again, window=kernel.capacity)

    def stats(self) -> Stats:
        """The ledger's figures; a hit rate under 60% also raises a `HitRateWarning`, once."""
        kernel = self.kernel
        with kernel.lock:
            if not kernel.store.readonly:
                kernel.flush()
            stats = kernel.ledger.report(use=kernel.use, window=kernel.capacity)
        if stats.warnings and not self._warned:
            self._warned = True
            warnings.warn(stats.warnings[0], HitRateWarning, stacklevel=2)
        return stats

    def pages(self) -> list[tuple[Page, State]]:
        """All pages with where they are: originals in order, then derived ones."""
        tier = self.kernel.tier
        return [(tier.pages[page], tier.states[page]) for page in sorted(tier.pages, key=lambda page: (page < 0, abs(page)))]

    def events(self) -> Iterator[Event]:
        """The ledger, oldest first."""
        with self.kernel.lock:
            if not self.kernel.store.readonly:
                self.kernel.flush()
        return self.kernel.store.events(self.kernel.info.number)

    def messages(self) -> list[dict[str, Any]]:
        """The whole transcript as it was appended, exactly; forgotten pages are missing from it."""
        kernel = self.kernel
        made: list[Message] = []
        current = 0
        with kernel.lock:
            for number in range(1, kernel.tier.last + 1):
                page = kernel.tier.pages[number]
                if kernel.tier.at(number) == "dropped":
                    continue
                part, leftovers = part_of(page, kernel.contents.get(page.digest), kernel.contents.get(page.extra))
                if page.message == current:
                    made[-1] = msgspec.structs.replace(made[-1], parts=(*made[-1].parts, part))
                else:
                    made.append(Message(role=page.role, parts=(part,), extra=leftovers, sources=page.sources))
                current = page.message
        return dump(made)


def _cost(page: Page | None, instead: str, kernel: Kernel) -> int:
    if page is None:
        return kernel.counter.count(instead) + kernel.counter.envelope
    return kernel.tier.stubs[page.id] if instead else kernel.tier.cost(page.id)

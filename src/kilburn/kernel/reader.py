"""Reading a process: recall, search, render, figures, and the whole transcript.

Each answer is that of the ledger as it now is: where another writer went on with the session (or a
person forgot a page), all is read anew first. Nothing here changes where a page is. What was read is
noted in the ledger, unless the store was opened for reading, and nobody waits or fails for that.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from kilburn.budget import Budget, Counter
from kilburn.errors import KernelError, StoreCorrupt
from kilburn.event import STATE, Act, Event
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.ledger import Stats
from kilburn.kernel.receipts import Receipt, receipts
from kilburn.kernel.render import Item, Prompt, items, part_of, render, transcript
from kilburn.kernel.search import Found, found
from kilburn.kernel.tier import Tier
from kilburn.message import Message, Part
from kilburn.page import Page, Place, parse_address
from kilburn.policy import Cause
from kilburn.store import State
from kilburn.wire.form import dump

__all__ = ["HitRateWarning", "Reader", "Recalled"]

READ = 500
"""Pages whose texts are read at a time."""


class HitRateWarning(UserWarning):
    """The window misses too much of what the agent asks for (see `Stats`)."""


class Recalled(str):
    """Recalled text, exact: the concatenation of its pages' texts.

    `parts` holds the pages' texts one by one, `pages` the pages.
    """

    pages: tuple[Page, ...]
    parts: tuple[str, ...]

    def __new__(cls, pages: tuple[Page, ...], parts: tuple[str, ...]) -> Recalled:
        """Join the parts into the text."""
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

    @property
    def tenant(self) -> str:
        """The tenant of the store that it lives in."""
        return self.kernel.store.tenant

    @property
    def readonly(self) -> bool:
        """Whether the store was opened for reading: then nothing is written, not even what was read."""
        return self.kernel.store.readonly

    @property
    def lock(self) -> threading.RLock:
        """Hold it to read several things of one state; every call here holds it."""
        return self.kernel.lock

    @property
    def window(self) -> Tier:
        """What stands where, at what cost, as this process last saw it. Only the kernel changes it."""
        return self.kernel.tier

    @property
    def budget(self) -> Budget:
        """What its window may hold."""
        return self.kernel.budget

    @property
    def counter(self) -> Counter:
        """Counts its tokens."""
        return self.kernel.counter

    @property
    def capacity(self) -> int:
        """Tokens that the pages of a prompt may take: the budget's, corrected by what providers reported."""
        return self.kernel.capacity

    @property
    def use(self) -> int:
        """Tokens that the prompt takes now."""
        return self.kernel.use

    @property
    def turn(self) -> int:
        """Number of the message that was admitted last; 0 before the first."""
        return self.kernel.tier.turn

    @contextmanager
    def _current(self) -> Iterator[Kernel]:
        """The kernel, locked, and as the ledger now is.

        Raises:
            StoreStale: another writer went on while changes here are not written.
        """
        with self.kernel.lock:
            self.kernel.check_free()
            self.refresh()
            yield self.kernel

    def refresh(self) -> None:
        """See what other writers did meanwhile; every reading here begins with it.

        Raises:
            StoreStale: another writer went on while changes here are not written.
        """
        with self.kernel.lock:
            if self.kernel.refresh():
                self._renewed()

    def _renewed(self) -> None:
        """All was read anew: let go of what is known of the state before."""
        self._parts.clear()
        self._shipped.clear()
        self._seen.clear()

    def recall(self, address: str) -> Recalled:
        """The exact text at an address: a page fault, answered from whichever level has it.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        with self._current() as kernel:
            try:
                numbers, recalled = self._read(address)
            except StoreCorrupt:
                # It may have been forgotten between the two looks at the store.
                if not kernel.refresh():
                    raise
                self._renewed()
                numbers, recalled = self._read(address)
            if not kernel.store.readonly:
                kernel.observe(
                    Act.FAULT,
                    numbers,
                    policy="user",
                    cause=Cause.FAULT,
                    missed=[n for n in numbers if kernel.tier.at(n) != Place.IN],
                )
            return recalled

    def _read(self, address: str) -> tuple[list[int], Recalled]:
        kernel = self.kernel
        numbers = kernel.resolve(address)
        pages = tuple(kernel.tier.pages[number] for number in numbers)
        kernel.contents.fetch(page.digest for page in pages)
        return numbers, Recalled(pages, tuple(kernel.contents.get(page.digest) for page in pages))

    def resolve(self, address: str) -> list[int]:
        """The ids of the pages that an address names, those that were retired included.

        Raises:
            UnknownAddress: not an address, or beyond the last page. Forgotten: all of it was forgotten.
        """
        return self.kernel.resolve(address)

    def closure(self, address: str) -> list[Page]:
        """All pages that a forget of this address would forget: those, and what was derived or recalled from them.

        Raises:
            UnknownAddress, Forgotten.
        """
        return [self.window.pages[page] for page in self.kernel.closure(self.kernel.resolve(address))]

    def fetch(self, pages: Iterable[Page]) -> None:
        """Bring the texts of pages to hand in one read of the store; forgotten ones have none."""
        self.kernel.contents.fetch(digest for page in pages for digest in (page.digest, page.extra))

    def text(self, page: int) -> str:
        """The exact text of a page, by its id. Unlike `recall` it leaves no trace in the ledger.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        return self.kernel.text(page)

    def part(self, page: Page) -> tuple[Part, str | None]:
        """The message part that a page came from; and what else its message had, with the first of its parts.

        Raises:
            StoreCorrupt.
        """
        contents = self.kernel.contents
        return part_of(page, contents.get(page.digest), contents.get(page.extra))

    def shown(self) -> list[Item]:
        """All that stands in the prompt, in order: pages, and the lines that stand for what is out."""
        with self.lock:
            return items(self.window)

    def search(self, query: str, tokens: int = 1000, limit: int = 20, *, record: bool = True) -> list[Found]:
        """Passages of this process that match a query, best first, within a token budget.

        Args:
            record: whether the ledger remembers it; a measurement must not change what policies see.
        """
        with self._current() as kernel:
            passages = kernel.store.search(query, process=kernel.info.number, limit=limit)
            hits = found(passages, {kernel.info.number: self}, kernel.counter, tokens, kernel.clock())
            if record and not kernel.store.readonly:
                kernel.observe(Act.SEARCH, [parse_address(hit.address)[0] for hit in hits], policy="user", cause=Cause.FAULT)
        return hits

    def render(self, format: str = "chat") -> Prompt:
        """The prompt: what is in the window, as messages for OpenAI ("chat") or Anthropic ("messages").

        A list of dicts; for "messages" the system prompt stands beside it, in `.system`. Never over
        the window; grows only at its end until something is edited.
        """
        with self._current():
            return self._prompt(format)

    def _prompt(self, format: str) -> Prompt:
        kernel = self.kernel
        with kernel.lock:
            shown = items(kernel.tier)
            fresh = [page for _, page, instead in shown if page is not None and not instead and page.id not in self._parts]
            self.fetch(fresh)
            for page in fresh:
                self._parts[page.id] = self.part(page)
            if len(self._parts) > 2 * len(shown) + 64:
                kept = {page.id for _, page, _ in shown if page is not None}
                self._parts = {number: part for number, part in self._parts.items() if number in kept}
            prompt = render(transcript(kernel.tier, lambda page: self._parts[page.id]), format, kernel.use)
            if not kernel.store.readonly:
                self._ship(shown)
        return prompt

    def _ship(self, shown: list[Item]) -> None:
        """Note what this prompt costs: all of it, and what an engine must process again behind the first difference."""
        kernel = self.kernel
        now = [((key, instead), _cost(page, instead, kernel)) for key, page, instead in shown]
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

    def stats(self) -> Stats:
        """The ledger's figures; a hit rate under 60% also raises a `HitRateWarning`, once.

        What was observed and cannot be written at once (a full disk, another writer) is counted when it is.
        """
        with self._current() as kernel:
            if not kernel.store.readonly:
                kernel.flush_observed()
            stats = kernel.ledger.report(use=kernel.use, window=kernel.capacity)
        if stats.warnings and not self._warned:
            self._warned = True
            warnings.warn(stats.warnings[0], HitRateWarning, stacklevel=2)
        return stats

    def pages(self) -> list[tuple[Page, State]]:
        """All pages with where they are, as this process last saw them: originals in order, then derived ones."""
        with self.kernel.lock:
            tier = self.kernel.tier
            return [(tier.pages[page], tier.states[page]) for page in sorted(tier.pages, key=lambda page: (page < 0, abs(page)))]

    def record(self, act: Act, pages: Iterable[int] = (), *, policy: str, cause: str = "", **data: Any) -> None:
        """Write an observation into the ledger, such as what left another level; it waits for the next commit.

        Nothing happens where the store was opened for reading.

        Args:
            data: what is particular to the act, as plain JSON; `why` in words.

        Raises:
            KernelError: an act that changes state.
        """
        if act in STATE:
            raise KernelError(f"{act} changes the state of pages", advice="give a move to `apply`")
        with self.lock:
            if not self.readonly:
                self.kernel.observe(act, tuple(pages), policy=policy, cause=cause, **data)

    def events(self, after: int = 0) -> Iterator[Event]:
        """The ledger behind event `after`, oldest first; at its end what was observed and cannot be written at once."""
        with self._current() as kernel:
            if not kernel.store.readonly:
                kernel.flush_observed()
            waiting = [event for event in kernel.pending.events if event.number > after]
            written = kernel.store.events(kernel.info.number, after)
        return (event for events in (written, waiting) for event in events)

    def receipts(self) -> list[Receipt]:
        """What each compaction took out of the window, why, by which policy, and how to get it back; oldest first."""
        return list(receipts(self.events()))

    def messages(self) -> list[dict[str, Any]]:
        """The whole transcript as it was appended, exactly.

        Forgotten pages are missing from it; what is left of a message that had some comes in the chat form.
        """
        made: dict[int, Message] = {}
        with self._current() as kernel:
            tier = kernel.tier
            kept = [page for page in tier.pages.values() if page.id > 0 and tier.at(page.id) != Place.DROPPED]
            for at, page in enumerate(kept):
                if at % READ == 0:
                    self.fetch(kept[at : at + READ])
                part, leftovers = self.part(page)
                known = made.get(page.message)
                if known is None:
                    made[page.message] = Message(role=page.role, parts=(part,), extra=leftovers, sources=page.sources)
                else:
                    made[page.message] = msgspec.structs.replace(known, parts=(*known.parts, part))
            damaged = {page.message for page in tier.pages.values() if page.id > 0 and tier.at(page.id) == Place.DROPPED}
        return dump(list(_without_form(made, damaged).values() if damaged else made.values()))


def _without_form(made: dict[int, Message], damaged: set[int]) -> dict[int, Message]:
    """What is left of messages that lost a part has no original dict any more, nor have those that came in the same dict."""
    chain: list[int] = []
    for number in sorted(made.keys() | damaged):
        chain.append(number)
        known = made.get(number)
        more = known is not None and known.extra is not None and '"more":true' in known.extra
        if not more:
            if damaged & set(chain):
                made.update({each: msgspec.structs.replace(made[each], extra=None) for each in chain if each in made})
            chain = []
    return made


def _cost(page: Page | None, instead: str, kernel: Kernel) -> int:
    if page is None:
        return kernel.counter.count(instead) + kernel.counter.envelope
    return kernel.tier.stubs[page.id] if instead else kernel.tier.cost(page.id)

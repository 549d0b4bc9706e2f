"""A segment: what has a name, pages and a ledger. A session is one, and so are a user's memory and a document.

The word is Multics': there a segment has a name and an address for each of its words, whichever level holds them at the
moment. What is the same for all of them is here: reading by address, forgetting, marks, and the ledger.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Unpack

from kilburn.arguments import checked
from kilburn.backend import SegmentInfo
from kilburn.budget import Counter
from kilburn.collections.collecting import LARGEST
from kilburn.errors import KernelError, StoreCorrupt, StoreReadOnly, StoreStale
from kilburn.event import STATE, Act, Data, Event
from kilburn.forgetting.closure import Home, addresses, forget, named_closure
from kilburn.kernel.drive import aside
from kilburn.page import Page
from kilburn.policy import Cause

__all__ = ["Recalled"]

FREE = 5
"""How often another writer may be faster than a change before all others wait for it."""

ALONE = 3
"""How often it is tried then: a database may give up one of two transactions that wait for each other."""


class Recalled(str):
    """Recalled text, exact: the concatenation of its pages' texts.

    `parts` holds the pages' texts one by one, `pages` the pages, and `session` the session that has them: a branch, for an
    address such as `b1/p17`.
    """

    pages: tuple[Page, ...]
    parts: tuple[str, ...]
    session: Any

    def __new__(cls, pages: tuple[Page, ...], parts: tuple[str, ...], session: Any) -> Recalled:
        """Join the parts into the text."""
        recalled = super().__new__(cls, "".join(parts))
        recalled.pages, recalled.parts, recalled.session = pages, parts, session
        return recalled


@checked
class Segment(ABC):
    """What has a name, pages and a ledger.

    Args:
        home: what it needs of the store that it is in.
        lock: held by every call here.
        counter: counts its tokens.
    """

    def __init__(self, home: Home, lock: threading.RLock, counter: Counter) -> None:
        self._home, self.backend, self.lock, self.counter = home, home.backend, lock, counter

    @property
    @abstractmethod
    def info(self) -> SegmentInfo:
        """Its row in the store, as it was last read."""

    @property
    def name(self) -> str:
        """Its name."""
        return self.info.name

    @property
    def number(self) -> int:
        """Its number in the store: `cites` names it by this."""
        return self.info.number

    @property
    def ledger(self) -> SegmentLedger:
        """What happened here."""
        return SegmentLedger(self)

    @property
    def contents(self) -> SegmentContents:
        """Its pages and their texts."""
        return SegmentContents(self)

    def _check_writable(self) -> None:
        if self.backend.readonly:
            raise StoreReadOnly("this store was opened for reading", advice="open it without readonly=True to write")

    def recall(self, address: str) -> Recalled:
        """The exact text at an address, from whichever level has it, of pages that were retired too. In a session it is a
        fault if the page is not in the window.

        Args:
            address: of a page here, such as `p17`; in a session also of a branch, such as `b1/p17`.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        whose, rest = self._located(address)
        if whose is not self:
            return whose.recall(rest)
        with self.lock:
            self._refresh()
            try:
                pages, texts, missed = self._read(rest)
            except (StoreCorrupt, StoreStale):
                # It may have been forgotten between the two reads of the store.
                if not self._refresh():
                    raise
                pages, texts, missed = self._read(rest)
            self.ledger.record(Act.FAULT, [page.id for page in pages], policy="user", cause=Cause.FAULT, missed=missed)
            return Recalled(tuple(pages), tuple(texts), self)

    async def arecall(self, address: str) -> Recalled:
        """`recall` for async callers, in a worker thread."""
        return await aside(partial(self.recall, address))

    @abstractmethod
    def _read(self, address: str) -> tuple[Sequence[Page], Sequence[str], list[int]]:
        """The pages at an address, their texts, and the ids of those that no window has."""

    def _located(self, address: str) -> tuple[Segment, str]:
        """The segment that an address names, this one or a branch of it, and the address there."""
        return self, address

    # What is known of pages' worth

    def pin(self, address: str) -> None:
        """Pin pages: no policy takes them away until they are unpinned (law 3). In a session they come back into the window
        first, and stay there byte-identical.

        Raises:
            UnknownAddress, Forgotten. PinsExceedWindow: nothing was pinned.
        """
        self._mark(Act.PIN, address)

    def unpin(self, address: str) -> None:
        """Let pages move again. It also works where a session was opened with a smaller window than its pins need, one pin
        after the other."""
        self._mark(Act.UNPIN, address)

    def rate(self, address: str, importance: float = 1.0) -> None:
        """Set the importance of pages, 0 to 1: policies that weigh importance keep them longer."""
        if not 0.0 <= importance <= 1.0:
            raise KernelError(f"importance {importance} is not between 0 and 1", advice="use 1.0 for what must stay longest")
        self._mark(Act.RATE, address, importance=float(importance))

    @abstractmethod
    def _mark(self, act: Act, address: str, **data: Unpack[Data]) -> None:
        """Pin or unpin pages, or set their importance, in one transaction."""

    # Forgetting

    def forget(self, address: str, why: str = "") -> list[str]:
        """Forget pages and everything that was made from them, in every place and in every segment of the tenant. What a
        branch inherited is forgotten where it was made, too.

        All places that registered in the `erasers` of a session (a folder of spilled keys and values) are called, even if
        one fails. Its error is raised afterwards, and the pages are forgotten here all the same.

        Not reached are the places in `kilburn.forgetting.erasure.UNREACHED`, and exports.

        Args:
            address: of pages here, such as `p17` or `p17-p20`; in a session also of a branch, such as `b1/p17`.

        Returns:
            What was forgotten: addresses here, and those of other segments after their name.

        Raises:
            UnknownAddress, Forgotten. StoreStale: others kept adding to it. StoreError.
        """
        self._check_writable()
        return addresses(forget(self._home, self._forgettable(address), why), self.number)

    # What a kind of segment does in its own way: see `SegmentContents` and `SegmentLedger`

    @property
    @abstractmethod
    def _head(self) -> int: ...

    @abstractmethod
    def _refresh(self) -> bool: ...

    @abstractmethod
    def _resolve(self, address: str) -> list[int]: ...

    @abstractmethod
    def _text(self, page: int) -> str: ...

    def _forgettable(self, address: str) -> dict[int, list[int]]:
        return {self.number: self._resolve(address)}

    @abstractmethod
    def _made_from(self, pages: Iterable[int]) -> list[int]: ...

    @abstractmethod
    def _alone(self, beside: Iterable[int] = ()) -> AbstractContextManager[None]: ...

    @abstractmethod
    def _drop(self, pages: Sequence[int], why: str = "") -> list[int]: ...

    def _erase_elsewhere(self, pages: Sequence[int]) -> list[Exception]:
        return []

    @abstractmethod
    def _observe(self, act: Act, pages: Sequence[int], *, policy: str, cause: str, why: str, **data: Unpack[Data]) -> None:
        """Keep an observation until it can be written; where there are too many, the older half is lost."""

    @abstractmethod
    def _flush(self) -> bool: ...

    @abstractmethod
    def close(self) -> None:
        """Write what waits; called when the store closes, or releases it."""

    @abstractmethod
    def _waiting(self) -> Sequence[Event]:
        """The events that are not written yet."""


@checked
class SegmentContents:
    """The pages of a segment and their texts; nothing here is recorded in the ledger. The second half is what forgetting asks of
    each segment that it reaches."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def resolve(self, address: str) -> list[int]:
        """Return the ids of the pages that an address names, those that were retired included.

        Raises:
            UnknownAddress: not an address, or beyond the last page. Forgotten: all of it was forgotten.
        """
        return self._segment._resolve(address)

    def text(self, page: int) -> str:
        """Return the exact text of a page, by its id. Unlike `recall` it records nothing.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        return self._segment._text(page)

    def forgettable(self, address: str) -> dict[int, list[int]]:
        """Return the pages that an address names, for `forget`: the number of the segment that has them, this one or a branch of
        it -> their ids. What is forgotten there is among them: if an earlier forgetting broke off, others may still have it.

        Raises:
            UnknownAddress. Forgotten: all of it was forgotten, everywhere.
        """
        return self._segment._forgettable(address)

    def closure(self, address: str) -> list[tuple[str, Page]]:
        """Return all pages that forgetting this address would forget, here and in any segment of the tenant: these, and what was
        derived or recalled from them. Each comes with the name of its segment.

        Raises:
            UnknownAddress, Forgotten.
        """
        segment, rest = self._segment._located(address)
        return named_closure(segment._home, segment.number, segment._resolve(rest))

    def made_from(self, pages: Iterable[int]) -> list[int]:
        """Return these pages and what was derived or recalled from them here, without those that are forgotten. In a collection
        these pages alone: what was made from them is found by the store's index.

        Raises:
            UnknownAddress: there is no such page in a session.
        """
        return self._segment._made_from(pages)

    def alone(self, beside: Iterable[int] = ()) -> AbstractContextManager[None]:
        """Within this nobody else writes here, and all that is written is one transaction. If it fails, everything here is as the
        store has it, and what waited to be written waits again.

        Args:
            beside: other segments, of which pages are cited.

        Raises:
            StoreStale: another transaction was in the way; it can be tried again. StoreBusy, StoreFull, StoreReadOnly.
        """
        return self._segment._alone(beside)

    def drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        """Forget pages of this segment alone, with all that it made from them; `forget` reaches what others made from them first,
        and calls the `erasers` of sessions.

        Returns:
            The pages that are gone by this.

        Raises:
            UnknownAddress: there is no such page in a session.
            StoreStale: a page of another segment still cites one of them.
        """
        return self._segment._drop(pages, why)

    def erase_elsewhere(self, pages: Sequence[int]) -> list[Exception]:
        """Have pages that are gone erased where copies of them are outside the store, which only sessions know. Return what was
        raised there, which is logged too: a forgetting that breaks off after that raises something else."""
        return self._segment._erase_elsewhere(pages)


@checked
class SegmentLedger:
    """The ledger of a segment: what happened to its pages."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    @property
    def head(self) -> int:
        """Number of the last event: in a session as it was last seen, in a collection now."""
        return self._segment._head

    def refresh(self) -> bool:
        """Read what other writers have done; every read of a segment begins with this. Return whether they did anything.

        Raises:
            StoreStale: it is gone; or another writer went on while changes here are not written.
        """
        return self._segment._refresh()

    def flush(self) -> bool:
        """Write the observations that wait, if that is possible at once and this is no moment within a change. Return whether
        none waits any more."""
        return self._segment._flush()

    def events(self, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """Return the events after number `after`, oldest first; at the end, observations that cannot be written yet.

        Args:
            act: only the events of this act; None for all.
        """
        segment = self._segment
        with segment.lock:
            segment._refresh()
            segment._flush()
            waiting = [event for event in segment._waiting() if event.number > after and act in (None, event.act)]
            recorded = segment.backend.events(segment.number, max(-LARGEST, min(after, LARGEST)), act)
        return (event for events in (recorded, waiting) for event in events)

    def record(
        self, act: Act, pages: Iterable[int] = (), *, policy: str = "user", cause: str = "", why: str = "", **data: Unpack[Data]
    ) -> None:
        """Write an observation into the ledger, such as that a search found pages. It waits for the next change, or until
        there are many; nobody waits or fails because it cannot be written. If the store was opened for reading, nothing
        happens.

        Args:
            why: in words.
            data: what is particular to the act, as plain JSON.

        Raises:
            KernelError: an act that changes state, or data named `new` or `texts`.
        """
        if act in STATE:
            raise KernelError(f"{act} changes the state of pages", advice="give a change to `apply`")
        if reserved := data.keys() & {"new", "texts"}:
            raise KernelError(f"{min(reserved)!r} is the kernel's own name", advice="give this part of the data another name")
        segment = self._segment
        with segment.lock:
            if not segment.backend.readonly:
                segment._observe(act, tuple(pages), policy=policy, cause=cause, why=why, **data)

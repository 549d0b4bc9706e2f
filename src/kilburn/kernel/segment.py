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
from typing import Unpack

from kilburn.arguments import checked
from kilburn.backend import SegmentInfo, SegmentKind
from kilburn.budget import Counter
from kilburn.collections.collecting import LARGEST
from kilburn.errors import KernelError, StoreCorrupt, StoreReadOnly
from kilburn.event import STATE, Act, Data, Event
from kilburn.forgetting.closure import Home, addresses, forget, named_closure
from kilburn.kernel.drive import aside
from kilburn.kernel.recalled import Recalled
from kilburn.page import Page
from kilburn.policy import Cause

FREE = 5
"""How often another writer may be faster than a change before all others wait for it."""

ALONE = 3
"""How often it is tried then: a database may give up one of two transactions that wait for each other."""


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
    def user(self) -> str:
        """The user of the tenant whose it is; "" for all users, or nobody in particular."""
        return self.info.user

    @property
    def kind(self) -> SegmentKind:
        """What it is: a session, a memory or a document."""
        return self.info.kind

    @property
    def tenant(self) -> str:
        """The tenant of the store that it lives in."""
        return self.backend.tenant

    @property
    def readonly(self) -> bool:
        """Whether the store was opened for reading: then nothing is written, not even that something was read."""
        return self.backend.readonly

    @abstractmethod
    def refresh(self) -> bool:
        """Read what other writers have done; every read here begins with this. Returns whether they did anything.

        Raises:
            StoreStale: it is gone; or another writer went on while changes here are not written.
        """

    def _check_writable(self) -> None:
        if self.readonly:
            raise StoreReadOnly("this store was opened for reading", advice="open it without readonly=True to write")

    # What is in it

    @abstractmethod
    def resolve(self, address: str) -> list[int]:
        """The ids of the pages that an address names, those that were retired included.

        Raises:
            UnknownAddress: not an address, or beyond the last page. Forgotten: all of it was forgotten.
        """

    @abstractmethod
    def text(self, page: int) -> str:
        """The exact text of a page, by its id. Unlike `recall` it records nothing.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """

    def recall(self, address: str) -> Recalled:
        """The exact text at an address, from whichever level has it, of pages that were retired too. In a session it is a
        fault if the page is not in the window.

        Args:
            address: of a page here, such as `p17`; in a session also of a branch, such as `b1/p17`.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        whose, there = self._located(address)
        if whose is not self:
            return whose.recall(there)
        with self.lock:
            self.refresh()
            try:
                pages, texts, missed = self._read(there)
            except StoreCorrupt:
                # It may have been forgotten between the two reads of the store.
                if not self.refresh():
                    raise
                pages, texts, missed = self._read(there)
            self.record(Act.FAULT, [page.id for page in pages], policy="user", cause=Cause.FAULT, missed=missed)
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

        Not reached are providers' caches, file-system snapshots, and exports.

        Args:
            address: of pages here, such as `p17` or `p17-p20`; in a session also of a branch, such as `b1/p17`.

        Returns:
            What was forgotten: addresses here, and those of other segments after their name.

        Raises:
            UnknownAddress, Forgotten. StoreStale: others kept adding to it. StoreError.
        """
        self._check_writable()
        return addresses(forget(self._home, self.forgettable(address), why), self.number)

    def forgettable(self, address: str) -> dict[int, list[int]]:
        """The pages that an address names, for `forget`: the number of the segment that has them, this one or a branch of
        it -> their ids.

        Raises:
            UnknownAddress. Forgotten: all of it was forgotten, everywhere.
        """
        return {self.number: self.resolve(address)}

    def closure(self, address: str) -> list[tuple[str, Page]]:
        """All pages that forgetting this address would forget, here and in any segment of the tenant: these, and what was
        derived or recalled from them. Each comes with the name of its segment.

        Raises:
            UnknownAddress, Forgotten.
        """
        whose, there = self._located(address)
        return named_closure(self._home, whose.number, whose.resolve(there))

    @abstractmethod
    def made_from(self, pages: Iterable[int]) -> list[int]:
        """These pages and what was made from them here, without those that are forgotten. In a collection these pages alone:
        what was made from them is found by the store's index."""

    @abstractmethod
    def alone(self, beside: Iterable[int] = ()) -> AbstractContextManager[None]:
        """Within this nobody else writes here, and all that is written is one transaction. If it fails, everything here is as the
        store has it, and what waited to be written waits again.

        Args:
            beside: other segments, of which pages are cited.

        Raises:
            StoreStale: another transaction was in the way; it can be tried again. StoreBusy, StoreFull, StoreReadOnly.
        """

    @abstractmethod
    def drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        """Forget pages of this segment alone, with all that it made from them; `forget` reaches what others made from them first.

        Returns:
            The pages that are gone by this.

        Raises:
            StoreStale: a page of another segment still cites one of them.
        """

    def erase_elsewhere(self, pages: Sequence[int]) -> list[Exception]:
        """Have pages that are gone erased where copies of them are outside the store, which only sessions know; returns what was
        raised there."""
        return []

    # The ledger

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
        if taken := data.keys() & {"new", "texts"}:
            raise KernelError(f"{min(taken)!r} is the kernel's own name", advice="give this part of the data another name")
        with self.lock:
            if not self.readonly:
                self._observe(act, tuple(pages), policy=policy, cause=cause, why=why, **data)

    @abstractmethod
    def _observe(self, act: Act, pages: Sequence[int], *, policy: str, cause: str, why: str, **data: Unpack[Data]) -> None:
        """Keep an observation until it can be written; where there are too many, the older half is lost."""

    @abstractmethod
    def flush(self) -> bool:
        """Write the observations that wait, if that is possible at once; whether none waits any more."""

    @abstractmethod
    def close(self) -> None:
        """Write what waits; called when the store closes, or releases it."""

    @abstractmethod
    def _waiting(self) -> Sequence[Event]:
        """The events that are not written yet."""

    def events(self, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """The ledger after event `after`, oldest first; at its end, observations that cannot be written yet.

        Args:
            act: only the events of this act; None for all.
        """
        with self.lock:
            self.refresh()
            self.flush()
            waiting = [event for event in self._waiting() if event.number > after and act in (None, event.act)]
            written = self.backend.events(self.number, max(-LARGEST, min(after, LARGEST)), act)
        return (event for events in (written, waiting) for event in events)

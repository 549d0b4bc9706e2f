"""The store without a disk: plain dicts, for tests and throw-away sessions.

It keeps the whole contract except durability. A search compares every passage.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Iterable, Iterator

import msgspec

from kilburn.errors import StoreCorrupt, StoreError
from kilburn.event import Event
from kilburn.page import Page, Place, tombstone_of
from kilburn.store import Batch, Passage, ProcessInfo, State, check_name
from kilburn.stores.codec import encode_text, key_of
from kilburn.stores.passages import passages, searchable
from kilburn.stores.records import record_of_event, record_of_page, scrub, telling_words

__all__ = ["Memory"]

_WORD = re.compile(r"\w+")


class _Process(msgspec.Struct):
    info: ProcessInfo
    pages: dict[int, Page] = {}
    states: dict[int, State] = {}
    events: list[Event] = []
    indexed: set[int] = set()


class Memory:
    """A store in memory, for one tenant; another object shares nothing with it."""

    def __init__(self, tenant: str = "default") -> None:
        self.tenant = check_name(tenant, "tenant")
        self.readonly = False
        self._lock = threading.RLock()
        self._processes: dict[int, _Process] = {}
        self._texts: dict[str, str] = {}
        self._closed = False

    def process(self, name: str, *, time: float, create: bool = True) -> ProcessInfo | None:
        """The process of that name. If there is none and `create` is set, it is created at `time`."""
        with self._lock:
            self._check_open()
            for known in self._processes.values():
                if known.info.name == name:
                    return known.info
            if not create:
                return None
            info = ProcessInfo(number=len(self._processes) + 1, name=name, created=time, used=time)
            self._processes[info.number] = _Process(info)
            return info

    def processes(self) -> list[ProcessInfo]:
        """All processes, oldest first."""
        with self._lock:
            self._check_open()
            return [known.info for known in self._processes.values()]

    def commit(self, process: int, batch: Batch) -> None:
        """Do the whole batch, or raise and do nothing.

        Raises:
            StoreStale: the process's ledger has moved on. StoreError: a batch that contradicts itself.
        """
        with self._lock:
            self._check_open()
            known = self._process_of(process)
            texts = self._check(known, batch)
            # Nothing below raises.
            self._texts.update(texts)
            known.pages.update({page.id: page for page in batch.pages})
            known.states.update({page.id: State() for page in batch.pages})
            known.states.update(batch.states)
            known.events.extend(batch.events)
            known.indexed.update(batch.index)
            known.indexed.difference_update(batch.unindex)
            self._erase(known, batch.erase)
            known.info = msgspec.structs.replace(
                known.info,
                head=batch.head + len(batch.events),
                pages=len(known.pages),
                tokens=known.info.tokens + sum(page.tokens for page in batch.pages),
                used=max([known.info.used, *(event.time for event in batch.events)]),
            )

    def _check(self, known: _Process, batch: Batch) -> dict[str, str]:
        """The batch's new texts, after the batch was checked."""
        batch.check_continues(known.info.number, known.info.head)
        for event in batch.events:
            record_of_event(event)
        for page in batch.pages:
            record_of_page(page)
        new = [page.id for page in batch.pages]
        if len({*new, *known.pages}) != len(new) + len(known.pages):
            raise StoreError("a new page has the id of one that exists", advice="pages are immutable; give it its own id")
        strange = {*batch.states, *batch.index, *batch.unindex, *batch.erase} - {*new, *known.pages}
        if strange or any(number in known.pages and not known.pages[number].digest for number in batch.index):
            raise StoreError("the batch names a page that does not exist, or has no text", advice="add it in the same batch")
        texts: dict[str, str] = {}
        for digest in {digest for page in batch.pages for digest in (page.digest, page.extra) if digest or digest is page.digest}:
            key_of(digest)
            if digest not in self._texts:
                if digest not in batch.texts:
                    raise StoreError(f"no text for digest {digest}", advice="put it into the batch's texts")
                encode_text(batch.texts[digest], digest)
                texts[digest] = batch.texts[digest]
        return texts

    def _erase(self, known: _Process, pages: Iterable[int]) -> None:
        erased = set(pages)
        words: set[str] = set()
        for number in erased:
            page = known.pages[number]
            words.update(telling_words(page))
            known.pages[number] = tombstone_of(page)
            known.states[number] = State(Place.DROPPED)
            known.indexed.discard(number)
        if erased:
            kept = {
                digest
                for other in self._processes.values()
                for page in other.pages.values()
                for digest in (page.digest, page.extra)
            }
            self._texts = {digest: text for digest, text in self._texts.items() if digest in kept}
            known.events = [event if erased.isdisjoint(event.pages) else scrub(event, words) for event in known.events]

    def pages(self, process: int) -> Iterator[tuple[Page, State]]:
        """All pages of a process with their states: p1, p2, ..., then f1, f2, ..."""
        with self._lock:
            self._check_open()
            known = self._processes.get(process)
            rows = [(known.pages[number], known.states[number]) for number in known.pages] if known else []
        yield from sorted(rows, key=lambda row: (row[0].id < 0, abs(row[0].id)))

    def events(self, process: int, after: int = 0) -> Iterator[Event]:
        """The ledger from event `after` + 1 on."""
        with self._lock:
            self._check_open()
            known = self._processes.get(process)
            rows = known.events[after:] if known else []
        yield from rows

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """The texts of these digests.

        Raises:
            StoreCorrupt: one is missing.
        """
        with self._lock:
            self._check_open()
            wanted = list(digests)
            missing = [digest for digest in wanted if digest not in self._texts]
            if missing:
                raise StoreCorrupt(f"content {missing[0]} is missing", advice="run `kilburn fsck`")
            return {digest: self._texts[digest] for digest in wanted}

    def search(self, query: str, *, process: int | None = None, limit: int = 20) -> list[Passage]:
        """Passages that share words with the query, those with the most and rarest first."""
        with self._lock:
            self._check_open()
            wanted = _words(query)
            entries: list[tuple[Passage, set[str]]] = []
            for number, known in self._processes.items():
                for page in sorted(known.indexed) if process in (None, number) else ():
                    text = self._texts[known.pages[page].digest]
                    for start, stop in passages(text):
                        hit = Passage(process=number, page=page, span=(start, stop), score=0.0)
                        entries.append((hit, wanted & _words(text[start:stop])))
        having = {word: sum(word in words for _, words in entries) for word in wanted}
        rarity = {word: math.log(1 + len(entries) / count) for word, count in having.items() if count}
        hits = [msgspec.structs.replace(hit, score=sum(rarity[word] for word in words)) for hit, words in entries if words]
        hits.sort(key=lambda hit: (hit.score, hit.process, hit.page), reverse=True)
        return hits[: max(0, limit)]

    def close(self) -> None:
        """Refuse further use; idempotent."""
        self._closed = True

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _process_of(self, process: int) -> _Process:
        if process not in self._processes:
            raise StoreError(f"no process {process} here", advice="open it by name with `process`")
        return self._processes[process]

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the store was closed", advice="open it again")


def _words(text: str) -> set[str]:
    return set(_WORD.findall(searchable(text).lower()))

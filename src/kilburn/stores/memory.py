"""The store without a disk: plain dicts, for tests and throw-away sessions.

It keeps the whole contract except durability. A search compares every passage.
"""

from __future__ import annotations

import copy
import math
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec

from kilburn.errors import StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of, tombstone_of
from kilburn.store import Batch, Digests, Passage, ProcessInfo, ProcessKind, Said, State, Vector, check_name, root_of
from kilburn.stores.codec import encode_text, key_of
from kilburn.stores.passages import passages, searchable
from kilburn.stores.records import concerns, record_of_event, record_of_page, scrub, telling_words

__all__ = ["Memory"]

_WORD = re.compile(r"\w+")


class _Process(msgspec.Struct):
    info: ProcessInfo
    pages: dict[int, Page] = {}
    states: dict[int, State] = {}
    events: list[Event] = []
    first: dict[int, int] = {}
    """The first passage of each page that is indexed, counted as they were made."""
    passages: int = 0
    checkpoints: dict[int, bytes] = {}
    said: list[bytes] = []
    """What it has said, as digests; `said_until` is its last page then."""
    said_until: int = 0

    @property
    def last(self) -> int:
        """Its last original page."""
        return max((number for number in self.pages if number > 0), default=0)


class Memory:
    """A store in memory, for one tenant; another object shares nothing with it."""

    def __repr__(self) -> str:
        """For whom it is, and how much it holds."""
        return f"<Memory of tenant {self.tenant!r}: {len(self._processes)} processes>"

    def __init__(self, tenant: str = "default") -> None:
        self.tenant = check_name(tenant, "tenant")
        self.readonly = False
        self._lock = threading.RLock()
        self._processes: dict[int, _Process] = {}
        self._texts: dict[str, str] = {}
        self._vectors: dict[str, dict[int, Vector]] = {}
        self._stored = 0
        self._closed = False

    def process(
        self, name: str, *, time: float, create: bool = True, kind: ProcessKind = ProcessKind.SESSION, user: str = ""
    ) -> ProcessInfo | None:
        """The process of that name. If there is none and `create` is set, it is created at `time`."""
        if user:
            check_name(user, "user")
        with self._lock:
            self._check_open()
            for known in self._processes.values():
                if known.info.name == name:
                    return known.info
            if not create:
                return None
            info = ProcessInfo(number=len(self._processes) + 1, name=name, created=time, used=time, kind=kind, user=user)
            self._processes[info.number] = _Process(info)
            return info

    def processes(self, under: str = "") -> list[ProcessInfo]:
        """All processes, oldest first, or those under a name."""
        with self._lock:
            self._check_open()
            infos = [known.info for known in self._processes.values()]
        return [info for info in infos if not under or info.name.startswith(f"{under}/")]

    def commit(self, process: int, batch: Batch) -> None:
        """Do the whole batch, or raise and do nothing.

        Raises:
            StoreStale: the process's ledger has moved on. StoreError: a batch that contradicts itself.
        """
        with self._lock:
            self._check_open()
            known = self._process_of(process)
            if known.info.kind is ProcessKind.FORGOTTEN:
                raise StoreStale(f"process {process} was forgotten", advice="open it again, as a new one")
            self._do(known, batch)

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> ProcessInfo:
        """Create a session at `time`, for this user, and do its first batch: both, or nothing.

        Raises:
            StoreStale: the name is taken by now. StoreError: a batch that contradicts itself. SpecError: no name of a user.
        """
        if user:
            check_name(user, "user")
        with self._lock:
            self._check_open()
            if any(known.info.name == name for known in self._processes.values()):
                raise StoreStale(f"there is a session {name!r} already", advice="take another name")
            made = _Process(ProcessInfo(number=len(self._processes) + 1, name=name, created=time, used=time, user=user))
            self._do(made, batch)
            self._processes[made.info.number] = made
            return made.info

    def _do(self, known: _Process, batch: Batch) -> None:
        texts = self._check(known, batch)
        # Nothing below raises.
        self._texts.update(texts)
        known.pages.update({page.id: page for page in batch.pages})
        known.states.update({page.id: State() for page in batch.pages})
        known.states.update(batch.states)
        known.events.extend(batch.events)
        for number in dict.fromkeys(batch.index):
            if number not in known.first:
                known.first[number] = known.passages
                known.passages += len(passages(self._texts[known.pages[number].digest]))
        for number in batch.unindex:
            self._unindex(known, number)
        self._erase(known, batch)
        if batch.said is not None and (new := [page.id for page in batch.pages if page.id > 0]):
            self._add_said(known, batch.said, min(new), max(new))
        if batch.checkpoint is not None:
            known.checkpoints[batch.head + len(batch.events)] = batch.checkpoint
        known.info = msgspec.structs.replace(
            known.info,
            head=batch.head + len(batch.events),
            pages=len(known.pages),
            tokens=known.info.tokens + sum(page.tokens for page in batch.pages),
            used=max([known.info.used, *(event.time for event in batch.events)]),
        )

    def _add_said(self, known: _Process, said: Digests, first: int, last: int) -> None:
        kept = len(known.said) == said.after and known.said_until == first - 1
        whole = not said.after and all(page.digest for page in known.pages.values())
        if (said.after and kept) or whole:
            known.said[said.after :] = said.added
            known.said_until = last

    def _check(self, known: _Process, batch: Batch) -> dict[str, str]:
        """The batch's new texts, after the batch was checked."""
        batch.check_continues(known.info.number, known.info.head)
        if batch.above is not None:
            batch.check_above(self._process_of(batch.above[0]).info.head)
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
        self._check_cited(known, batch)
        texts: dict[str, str] = {}
        for digest in {digest for page in batch.pages for digest in (page.digest, page.extra) if digest or digest is page.digest}:
            key_of(digest)
            if digest not in self._texts:
                if digest not in batch.texts:
                    raise StoreError(f"no text for digest {digest}", advice="put it into the batch's texts")
                encode_text(batch.texts[digest], digest)
                texts[digest] = batch.texts[digest]
        return texts

    def _check_cited(self, known: _Process, batch: Batch) -> None:
        for process, number in {key for page in batch.pages for key in page.cites}:
            cited = self._processes[process].pages.get(number) if process in self._processes else None
            if cited is None:
                raise StoreError(f"no page {address_of(number)} in process {process}", advice="cite pages that exist")
            if not cited.digest:
                what = f"{address_of(number)} of process {process}, which a new page cites, is forgotten"
                raise StoreStale(what, advice="read what is there now, then do it again without this page")
        citers = [one for one in self._citing(known.info.number, batch.erase) if one[0] != known.info.number]
        if citers:
            what = f"a page to forget is cited by {address_of(citers[0][1])} of process {citers[0][0]}"
            raise StoreStale(what, advice="forget what cites it first, then do it again")

    def _unindex(self, known: _Process, number: int) -> None:
        for entry, *_ in self._entries(known, number):
            for vectors in self._vectors.values():
                vectors.pop(entry, None)
        known.first.pop(number, None)

    def _entries(self, known: _Process, number: int) -> Iterator[tuple[int, tuple[int, int], str]]:
        """Entry, span and text of a page's passages."""
        if number in known.first:
            text = self._texts[known.pages[number].digest]
            for at, (start, stop) in enumerate(passages(text), known.first[number]):
                yield known.info.number << 32 | at, (start, stop), text[start:stop]

    def _erase(self, known: _Process, batch: Batch) -> None:
        erased = {*batch.erase, *(page.id for page in batch.inherited)}
        words = {word for page in batch.inherited for word in telling_words(page)}
        if batch.erase:
            known.said, known.said_until = [], 0
        for number in batch.erase:
            page = known.pages[number]
            self._unindex(known, number)
            words.update(telling_words(page))
            known.pages[number] = tombstone_of(page)
            known.states[number] = State(Place.DROPPED)
        if erased:
            kept = {
                digest
                for other in self._processes.values()
                for page in other.pages.values()
                for digest in (page.digest, page.extra)
            }
            self._texts = {digest: text for digest, text in self._texts.items() if digest in kept}
            known.events = [scrub(event, words) if concerns(event, erased) else event for event in known.events]

    def erase(self, process: int) -> None:
        """Erase what is left of a process of which every page is forgotten.

        Raises:
            StoreError: no such process, or it has pages that are not forgotten.
        """
        with self._lock:
            self._check_open()
            known = self._process_of(process)
            if any(state.at is not Place.DROPPED for state in known.states.values()):
                raise StoreError(f"process {process} has pages that are not forgotten", advice="forget them first")
            info = ProcessInfo(number=process, name=f"@forgotten/{process}", created=0.0, kind=ProcessKind.FORGOTTEN)
            self._processes[process] = _Process(info)

    def pages(self, process: int) -> Iterator[tuple[Page, State]]:
        """All pages of a process with their states: p1, p2, ..., then f1, f2, ..."""
        with self._lock:
            self._check_open()
            known = self._processes.get(process)
            rows = [(known.pages[number], known.states[number]) for number in known.pages] if known else []
        yield from sorted(rows, key=lambda row: (row[0].id < 0, abs(row[0].id)))

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Single pages with their states; what does not exist is left out."""
        with self._lock:
            self._check_open()
            there = [(process, page) for process, page in keys if page in self._pages_of(process)]
            return {
                (process, page): (self._pages_of(process)[page], self._processes[process].states[page]) for process, page in there
            }

    def _pages_of(self, process: int) -> dict[int, Page]:
        return self._processes[process].pages if process in self._processes else {}

    def citing(self, process: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """The pages that directly cite any of these pages of a process."""
        with self._lock:
            self._check_open()
            return self._citing(process, pages)

    def _citing(self, process: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        cited = set(pages)
        return sorted(
            (number, page.id)
            for number, known in self._processes.items()
            for page in known.pages.values()
            if page.digest
            and (
                any(other == process and one in cited for other, one in page.cites)
                or (number == process and not cited.isdisjoint(page.sources))
            )
        )

    def calls(self, process: int, among: Iterable[str] | None = None) -> dict[str, int]:
        """The calls of a process by their ids, with the ids of their pages: all, or those with these ids."""
        with self._lock:
            self._check_open()
            pages = sorted(self._pages_of(process).items())
            known = {page.call: number for number, page in pages if page.kind is Kind.CALL and page.call is not None}
            return known if among is None else {call: known[call] for call in among if call in known}

    def forgotten(self, process: int) -> list[int]:
        """The ids of the pages of a process that are forgotten, in order."""
        with self._lock:
            self._check_open()
            return sorted(number for number, page in self._pages_of(process).items() if not page.digest)

    def checkpoint(self, process: int, until: int | None = None) -> tuple[int, bytes] | None:
        """The newest checkpoint of a process, at event `until` or before it, with the number of its last event."""
        with self._lock:
            self._check_open()
            known = self._processes[process].checkpoints if process in self._processes else {}
            heads = [head for head in known if until is None or head <= until]
            return (max(heads), known[max(heads)]) if heads else None

    def events(self, process: int, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """The ledger from event `after` + 1 on; only the events of one act, if it is given."""
        with self._lock:
            self._check_open()
            known = self._processes.get(process)
            rows = known.events[after:] if known else []
        yield from (event for event in rows if act is None or event.act is act)

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

    def search(self, query: str, *, processes: Collection[int] | None = None, limit: int = 20) -> list[Passage]:
        """Passages that share words with the query, those with the most and rarest first."""
        with self._lock:
            self._check_open()
            wanted = _words(query)
            entries = [
                (hit, wanted & _words(text)) for hit, text in self._indexed() if processes is None or hit.process in processes
            ]
        having = {word: sum(word in words for _, words in entries) for word in wanted}
        rarity = {word: math.log(1 + len(entries) / count) for word, count in having.items() if count}
        hits = [msgspec.structs.replace(hit, score=sum(rarity[word] for word in words)) for hit, words in entries if words]
        hits.sort(key=lambda hit: (hit.score, hit.process, hit.page), reverse=True)
        return hits[: max(0, limit)]

    def _indexed(self) -> Iterator[tuple[Passage, str]]:
        """Every passage with its text."""
        for number, known in self._processes.items():
            for page in sorted(known.first):
                for entry, span, text in self._entries(known, page):
                    yield Passage(process=number, page=page, span=span, score=0.0, entry=entry), text

    def entries(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[Passage]]:
        """The passages of pages, in reading order; a page that is not indexed is left out."""
        with self._lock:
            self._check_open()
            found = {}
            for process, page in keys:
                if process in self._processes and page in self._processes[process].first:
                    of_page = self._entries(self._processes[process], page)
                    made = [Passage(process=process, page=page, span=span, score=0.0, entry=entry) for entry, span, _ in of_page]
                    found.update({(process, page): made} if made else {})
            return found

    def passages(self, entries: Iterable[int]) -> dict[int, Passage]:
        """The passages with these numbers; those that do not exist any more are left out."""
        wanted = set(entries)
        with self._lock:
            self._check_open()
            return {hit.entry: hit for hit, _ in self._indexed() if hit.entry in wanted}

    def unembedded(self, embedder: str, limit: int) -> list[tuple[int, str]]:
        """At most so many passages that have no vector of this embedder: (entry, text), newest processes first."""
        check_name(embedder, "embedder")
        with self._lock:
            self._check_open()
            known = self._vectors.get(embedder, {})
            waiting = [(hit.entry, text) for hit, text in self._indexed() if hit.entry not in known]
        return sorted(waiting, key=lambda one: (-(one[0] >> 32), one[0]))[: max(0, limit)]

    def keep_vectors(self, embedder: str, rows: Sequence[tuple[int, bytes]]) -> None:
        """Store vectors of passages, by entry, all or none; those of passages that are forgotten by now are not stored.

        Raises:
            StoreError: vectors of different length than this embedder's others.
        """
        check_name(embedder, "embedder")
        with self._lock:
            self._check_open()
            known = dict(self._vectors.get(embedder, {}))
            sizes = {len(vector.data) for vector in known.values()} | {len(data) for _, data in rows}
            if len(sizes) > 1 or 0 in sizes:
                raise StoreError(f"vectors of {sizes} bytes of {embedder!r}", advice="give another model another name")
            there = {hit.entry for hit, _ in self._indexed()}
            for entry, data in rows:
                if entry in there:
                    self._stored += 1
                    known.pop(entry, None)
                    known[entry] = Vector(number=self._stored, entry=entry, data=data)
            self._vectors[embedder] = known

    def vectors(self, embedder: str, after: int = 0) -> Iterator[Vector]:
        """The vectors of this embedder in the order in which they were stored, those whose number is greater than `after`."""
        with self._lock:
            self._check_open()
            found = [vector for vector in self._vectors.get(embedder, {}).values() if vector.number > after]
        yield from found

    def embedders(self) -> list[str]:
        """The names of the embedders that vectors are kept of, in the order in which they first came."""
        with self._lock:
            self._check_open()
            return list(self._vectors)

    def drop_vectors(self, embedder: str) -> None:
        """Remove all vectors of this embedder."""
        with self._lock:
            self._check_open()
            self._vectors.pop(embedder, None)

    def keep_history(self, process: int, digests: Sequence[bytes], *, after: int, page: int) -> bool:
        """See `Store`."""
        with self._lock:
            self._check_open()
            known = self._processes.get(process)
            if known is None or known.last != page or not all(each.digest for each in known.pages.values()):
                return False
            if after and after != len(known.said):
                return False
            known.said[after:] = digests
            known.said_until = page
            return bool(known.said)

    def said_by(self, digest: bytes, limit: int) -> list[Said]:
        """See `Store`."""
        with self._lock:
            self._check_open()
            found = [
                Said(name=known.info.name, at=known.said.index(digest) + 1, count=len(known.said))
                for known in reversed(self._processes.values())
                if digest in known.said
            ]
        return sorted(found, key=lambda one: one.at != one.count)[: max(0, limit)]

    def unkept(self, root: str, user: str, limit: int) -> list[str]:
        """See `Store`."""
        with self._lock:
            self._check_open()
            infos = [
                known.info
                for known in self._processes.values()
                if known.pages and (not known.said or known.said_until != known.last) and known.info.kind is ProcessKind.SESSION
            ]
        wanted = [info for info in infos if info.user == user and root_of(info.name) == root]
        return [info.name for info in sorted(wanted, key=lambda info: -info.used)][: max(0, limit)]

    @contextmanager
    def together(self) -> Iterator[None]:
        """See `Store`. Other threads wait."""
        with self._lock:
            self._check_open()
            before = copy.deepcopy((self._processes, self._texts, self._vectors))
            try:
                yield
            except BaseException:
                self._processes, self._texts, self._vectors = before
                raise

    def erasing(self) -> AbstractContextManager[None]:
        """What is erased here is gone at once."""
        return nullcontext()

    def sync(self) -> None:
        """Nothing of this store is ever durable."""
        self._check_open()

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

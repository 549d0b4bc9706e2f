"""The parts of the SQLite store beside its segments. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import apsw

from kilburn.backend import Digests, HistoryOwner, Vector, check_name
from kilburn.backends import histories
from kilburn.backends.chilling import ChangesRows, Chilling, ReadsRows
from kilburn.backends.codec import key_of, sound_passages
from kilburn.backends.connection import rows, rows_of_each
from kilburn.backends.contenttable import ContentTable, searchable_of
from kilburn.backends.directory import Directory
from kilburn.backends.durable import READ_ROWS, IndexView
from kilburn.backends.ranked import Extents
from kilburn.backends.records import seal_of
from kilburn.backends.textindex import TextIndex
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import StoreCorrupt, StoreStale
from kilburn.page import Span

if TYPE_CHECKING:
    from kilburn.backends.sqlite import Sqlite

T = TypeVar("T")

MAX_READS = 20
"""How often cold texts are read again while another program moves them."""

Reading = Callable[[str], AbstractContextManager[None]]
"""One snapshot for a block, named in errors by what it does."""


class Writing(Protocol):
    """Opens a write transaction for a block."""

    def __call__(self, doing: str, *, wait: bool = True, to: Collection[int] | None = None) -> AbstractContextManager[None]:
        """See `StoreFile._writing`."""
        ...


class SqliteContents(Chilling):
    """See `kilburn.backend.ContentStore`."""

    def __init__(self, store: Sqlite, table: ContentTable, read: ReadsRows, change: ChangesRows) -> None:
        super().__init__(store.path, read, change, store.sync, store._keeps_objects)
        self._store, self._table = store, table

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """See `ContentStore`."""
        keys = {digest: key_of(digest) for digest in digests}
        with self._store._lock:
            texts = self._read_texts(keys)
        if len(texts) < len(keys):
            missing = next(digest for digest in keys if digest not in texts)
            raise StoreCorrupt(f"content {missing} is missing", advice="run `kilburn fsck`")
        return texts

    def _read_texts(self, digests: Mapping[str, bytes]) -> dict[str, str]:
        for attempt in range(MAX_READS + 1):
            version = self._store._written_by_others()
            try:
                with self._store._reading("reading"):
                    return dict(self._table.texts(digests))
            except StoreCorrupt as error:
                # The object of a cold text is gone if another program has just brought the text back, or forgotten it.
                if self._store._is_joined() and self._is_superseded(digests.values()):
                    what = "another program has forgotten or moved a cold text since this snapshot began"
                    raise StoreStale(what, advice="do it again from the beginning") from error
                if attempt == MAX_READS or self._store._written_by_others() == version:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _is_superseded(self, keys: Iterable[bytes]) -> bool:
        """Whether others have changed the rows of these texts since the present snapshot began."""
        store, select = self._store, "SELECT codec, data FROM content WHERE tenant = ? AND digest = ?"
        values = [(store._number, key) for key in keys]
        present = apsw.Connection(store.path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return list(rows_of_each(present, select, values)) != list(rows_of_each(store._db, select, values))
        finally:
            present.close()


class SqliteView:
    """See `kilburn.backends.durable.IndexView`."""

    def __init__(self, index: TextIndex, directory: Directory, reading: Reading) -> None:
        self.index, self._table, self._directory, self._reading = index, index, directory, reading

    def read(self, do: Callable[[IndexView], T]) -> T:
        """Call a function with the passages in one snapshot."""
        with self._reading("searching"):
            return do(self)

    def extents(self, segments: Collection[int] | None) -> Extents:
        """See `IndexView`."""
        return self._directory.extents() if segments is None else self._directory.extents_of(list(segments))

    def whole(self, segments: Iterable[int]) -> set[int]:
        """See `IndexView`."""
        return {number for number, segment in self._directory.numbered(set(segments)).items() if not segment.damaged}

    def page_entries(self, keys: Sequence[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], int, Span]]:
        """See `IndexView`."""
        return self._table.of_pages(keys)


class SqliteVectors:
    """See `kilburn.backend.VectorIndex`."""

    def __init__(self, db: apsw.Connection, table: VectorTable, directory: Directory, reading: Reading, writing: Writing) -> None:
        self._db, self._table, self._directory, self._reading, self._writing = db, table, directory, reading, writing

    def unembedded(
        self, embedder: str, limit: int, damaged: MutableMapping[int, StoreCorrupt] | None = None
    ) -> list[tuple[int, str]]:
        """See `VectorIndex`."""
        name, errors = check_name(embedder, "embedder"), damaged if damaged is not None else {}
        with self._reading("reading"):
            # A search asks this every time: after "none waits" nothing is looked at until somebody writes.
            segments = self._directory.waits_in(embedder)
            if segments is not None and not segments:
                return []
            passages = sound_passages(
                limit, lambda most: self._table.waiting(name, most, segments), partial(searchable_of, self._db), errors
            )
            if not passages and not errors and limit > 0:
                self._directory.nothing_waits(embedder)
        return passages

    def add(self, embedder: str, rows: Sequence[tuple[int, bytes]]) -> None:
        """See `VectorIndex`."""
        with self._writing("writing", to=()):
            self._table.keep(check_name(embedder, "embedder"), rows)

    def read(self, embedder: str, after: int = 0) -> Iterator[Vector]:
        """See `VectorIndex`. `fsck --repair` drops damaged vectors; their passages then wait for new ones."""
        while True:
            with self._reading("reading"):
                vectors, after = self._table.read(embedder, after, READ_ROWS)
            yield from vectors
            if not after:
                return

    def embedders(self) -> list[str]:
        """See `VectorIndex`."""
        with self._reading("reading"):
            return self._table.names()

    def drop(self, embedder: str) -> None:
        """See `VectorIndex`."""
        with self._writing("writing"):
            self._table.drop(embedder)


class SqliteSettings:
    """See `kilburn.backend.SettingStore`."""

    def __init__(self, db: apsw.Connection, tenant: int, reading: Reading, writing: Writing) -> None:
        self._db, self._tenant, self._reading, self._writing = db, tenant, reading, writing

    def all(self) -> dict[str, str]:
        """See `SettingStore`. A damaged setting is left out; `fsck` reports it."""
        with self._reading("reading"):
            return self._all()

    def put(self, name: str, value: str | None) -> None:
        """See `SettingStore`."""
        with self._writing("writing", to=()):
            self._put(name, value)

    def replace(self, name: str, known: str | None, value: str | None) -> bool:
        """See `SettingStore`."""
        with self._writing("writing", to=()):
            is_known = self._all().get(name) == known
            if is_known:
                self._put(name, value)
            return is_known

    def _all(self) -> dict[str, str]:
        select = "SELECT name, value, seal FROM setting WHERE tenant = ? ORDER BY name"
        return {
            name: value
            for name, value, seal in rows(self._db, select, self._tenant)
            if seal == seal_of("setting", self._tenant, name, value)
        }

    def _put(self, name: str, value: str | None) -> None:
        if value is None:
            self._db.execute("DELETE FROM setting WHERE tenant = ? AND name = ?", (self._tenant, name))
            return
        insert = (
            "INSERT INTO setting(tenant, name, value, seal) VALUES(?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET value = excluded.value, seal = excluded.seal"
        )
        self._db.execute(insert, (self._tenant, name, value, seal_of("setting", self._tenant, name, value)))


class SqliteHistories:
    """See `kilburn.backend.HistoryIndex`."""

    def __init__(self, db: apsw.Connection, tenant: int, reading: Reading, writing: Writing) -> None:
        self._db, self._tenant, self._reading, self._writing = db, tenant, reading, writing

    def put(self, segment: int, digests: Digests, *, page: int) -> bool:
        """See `HistoryIndex`."""
        with self._writing("writing", to=()):
            return histories.put(self._db, self._tenant, segment, digests, page)

    def owners(self, digest: bytes, limit: int, *, tail: bool = False) -> list[HistoryOwner]:
        """See `HistoryIndex`."""
        with self._reading("reading"):
            return histories.owners(self._db, self._tenant, digest, limit, tail=tail)

    def missing(self, root: str, user: str, limit: int) -> list[str]:
        """See `HistoryIndex`."""
        with self._reading("reading"):
            return histories.missing(self._db, self._tenant, root, user, limit)

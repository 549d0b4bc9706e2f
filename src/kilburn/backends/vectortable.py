"""The vectors of one tenant's passages, by embedder, and the passages that wait for one.

Vectors are derived from the passages. The passages of a segment get their vectors in the order in which they were indexed, so
one number for each segment and embedder tells which are waiting, and a commit need not queue anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import apsw

from kilburn.backend import Vector
from kilburn.backends.connection import listed, row, rows, rows_of_each
from kilburn.backends.ranked import last_entry, passage_number
from kilburn.backends.records import compute_seal
from kilburn.errors import StoreError


class VectorTable:
    """Stores, reads and removes vectors within the caller's transactions."""

    def __init__(self, db: apsw.Connection, tenant: int) -> None:
        self._db, self._tenant = db, tenant

    def embedder(self, name: str) -> int:
        """Return the number of an embedder; 0 if it has no vectors here."""
        embedder_row = row(self._db, "SELECT id FROM embedder WHERE tenant = ? AND name = ?", self._tenant, name)
        return embedder_row[0] if embedder_row else 0

    def _seal(self, name: str, entry: int, data: bytes) -> bytes:
        return compute_seal("vector", self._tenant, name, entry, data)

    def names(self) -> list[str]:
        """Return the embedders in the order of their first vectors."""
        return [name for (name,) in rows(self._db, "SELECT name FROM embedder WHERE tenant = ? ORDER BY id", self._tenant)]

    def waiting(self, name: str, limit: int, among: Collection[int] | None = None) -> list[tuple[int, int, int, int]]:
        """Return at most `limit` passages without a vector of this embedder, newest segments first: entry, page, start, stop.

        Args:
            among: the segments that may have waiting passages; None for all.
        """
        embedder = self.embedder(name)
        joined = "LEFT JOIN embedded ON embedded.segment = segment.id AND embedder = ?1"
        where = "tenant = ?2 AND NOT quarantined AND passages > coalesce(passages_done, 0) ORDER BY segment.id DESC"
        select = "SELECT segment.id, coalesce(passages_done, 0) FROM"
        in_segments = f"{select} json_each(?3) CROSS JOIN segment ON segment.id = value {joined} WHERE {where}"
        every = f"{select} segment NOT INDEXED {joined} WHERE {where}"
        passages: list[tuple[int, int, int, int]] = []
        sql, more = (every, ()) if among is None else (in_segments, (listed(among),))
        # Read lazily: there may be very many.
        for segment, count in rows_of_each(self._db, sql, [(embedder, self._tenant, *more)]):
            if len(passages) >= limit:
                break
            passages += self._without(embedder, segment, count, limit - len(passages))
        return passages

    def _without(self, embedder: int, segment: int, count: int, limit: int) -> list[tuple[int, int, int, int]]:
        select = (
            "SELECT id, page, start, stop FROM passage WHERE id BETWEEN ? AND ?"
            " AND NOT EXISTS(SELECT 1 FROM vector WHERE entry = passage.id AND embedder = ?) ORDER BY id DESC LIMIT ?"
        )
        return rows(self._db, select, segment << 32, last_entry(segment, count), embedder, limit)

    def keep(self, name: str, vectors: Sequence[tuple[int, bytes]]) -> None:
        """Store vectors. Those of missing passages are left out.

        Raises:
            StoreError: a vector has another length.
        """
        if not vectors:
            return
        embedder = self.embedder(name)
        if not embedder:
            self._db.execute("INSERT INTO embedder(tenant, name) VALUES(?, ?)", (self._tenant, name))
            embedder = self._db.last_insert_rowid()
        last = row(self._db, "SELECT length(data) FROM vector WHERE embedder = ? ORDER BY id DESC LIMIT 1", embedder)
        size = last[0] if last else len(vectors[0][1])
        wrong = next((len(data) for _, data in vectors if len(data) != size), None)
        if wrong is not None or not size:
            message = f"a vector of {wrong or 0} bytes among those of {name!r}, which have {size}"
            raise StoreError(message, advice="give another model another name")
        segments = listed({entry >> 32 for entry, _ in vectors})
        select = "SELECT segment.id FROM json_each(?) CROSS JOIN segment ON segment.id = value WHERE tenant = ?"
        owned = {number for (number,) in rows(self._db, select, segments, self._tenant)}
        # Numbers ascend, also that of a vector that replaces another.
        insert = (
            "INSERT OR REPLACE INTO vector(embedder, entry, data, seal) SELECT ?1, ?2, ?3, ?4"
            " WHERE EXISTS(SELECT 1 FROM passage WHERE id = ?2)"
        )
        vector_rows = [(embedder, entry, data, self._seal(name, entry, data)) for entry, data in vectors if entry >> 32 in owned]
        self._db.executemany(insert, vector_rows)
        for segment in sorted({entry >> 32 for _, entry, *_ in vector_rows}):
            self._advance(embedder, segment)

    def _advance(self, embedder: int, segment: int) -> None:
        """Record how many of a segment's first passages have vectors."""
        progress = row(self._db, "SELECT passages_done FROM embedded WHERE embedder = ? AND segment = ?", embedder, segment)
        count = progress[0] if progress else 0
        waiting = self._without(embedder, segment, count, 1)
        if waiting:
            count = passage_number(waiting[0][0])
        else:
            ((count,),) = rows(self._db, "SELECT passages FROM segment WHERE id = ?", segment)
        insert = (
            "INSERT INTO embedded(embedder, segment, passages_done) VALUES(?, ?, ?)"
            " ON CONFLICT DO UPDATE SET passages_done = excluded.passages_done"
        )
        self._db.execute(insert, (embedder, segment, count))

    def read(self, name: str, after: int, limit: int) -> tuple[list[Vector], int]:
        """Return the undamaged ones of at most `limit` vectors with a number greater than `after`, and the number of the last one
        examined; 0 if there are no more."""
        embedder = self.embedder(name)
        select = "SELECT id, entry, data, seal FROM vector WHERE embedder = ? AND id > ? ORDER BY id LIMIT ?"
        vector_rows = rows(self._db, select, embedder, after, limit)
        whole = [
            Vector(number=number, entry=entry, data=data)
            for number, entry, data, seal in vector_rows
            if seal == self._seal(name, entry, data)
        ]
        return whole, vector_rows[-1][0] if vector_rows else 0

    def remove(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Remove every embedder's vectors of ranges of entries."""
        self._db.executemany("DELETE FROM vector WHERE entry BETWEEN ? AND ?", ranges)

    def drop(self, name: str) -> None:
        """Remove all vectors of an embedder, and its name."""
        embedder = self.embedder(name)
        if embedder:
            for statement in (
                "DELETE FROM vector WHERE embedder = ?",
                "DELETE FROM embedded WHERE embedder = ?",
                "DELETE FROM embedder WHERE id = ?",
            ):
                self._db.execute(statement, (embedder,))

    def mistaken(self) -> Iterator[tuple[int, str]]:
        """Yield segments and embedders with a waiting passage that the table does not list."""
        select = (
            "SELECT embedder.id, name, segment, passages_done FROM embedded"
            " JOIN embedder ON embedder.id = embedder WHERE tenant = ?"
        )
        for embedder, name, segment, count in rows(self._db, select, self._tenant):
            waiting = self._without(embedder, segment, 0, 1)
            if waiting and passage_number(waiting[0][0]) < count:
                yield segment, name

    def clean(self) -> None:
        """Remove damaged vectors and those of missing passages, and recompute which passages wait."""
        self._db.executemany("DELETE FROM vector WHERE id = ?", [(number,) for number, _ in list(self.damaged())])
        self._db.execute("DELETE FROM vector WHERE embedder NOT IN (SELECT id FROM embedder NOT INDEXED)")
        select = "SELECT id FROM embedder WHERE tenant = ?"
        for (embedder,) in rows(self._db, select, self._tenant):
            self._db.execute("DELETE FROM embedded WHERE embedder = ?", (embedder,))
            # For a segment whose passages all have vectors, the next added vector does this.
            indexed_segments = "SELECT DISTINCT entry >> 32 FROM vector WHERE embedder = ?"
            for (segment,) in rows(self._db, indexed_segments, embedder):
                self._advance(embedder, segment)
        # A name without vectors may be damaged.
        unused = "DELETE FROM embedder WHERE tenant = ? AND id NOT IN (SELECT embedder FROM vector NOT INDEXED)"
        self._db.execute(unused, (self._tenant,))

    def damaged(self) -> Iterator[tuple[int, int]]:
        """Yield number and entry of the vectors that are altered or whose passage is missing."""
        select = (
            "SELECT vector.id, entry, name, data, seal, passage.id IS NOT NULL FROM vector"
            " LEFT JOIN passage ON passage.id = entry JOIN embedder ON embedder.id = embedder WHERE tenant = ?"
        )
        for number, entry, name, data, seal, has_passage in rows_of_each(self._db, select, [(self._tenant,)]):
            if not has_passage or seal != self._seal(name, entry, data):
                yield number, entry

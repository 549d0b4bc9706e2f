"""The parts of the PostgreSQL store beside its segments. Each method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kilburn.backend import Digests, Finding, HistoryOwner, Moved, Vector, check_name, root_name
from kilburn.backends.chilling import Chilling, required
from kilburn.backends.codec import check_storable, digest_bytes, sound_passages
from kilburn.backends.durable import READ_ROWS, IndexView
from kilburn.backends.findings import cold_findings
from kilburn.backends.postgres import halves, writing
from kilburn.backends.postgres.coldrows import ROW, PostgresColdRows, searchable_in, text_at
from kilburn.backends.postgres.connection import connected
from kilburn.backends.postgres.erasing import held
from kilburn.backends.postgres.inspection import Inspection, orphans
from kilburn.backends.postgres.postings import Postings
from kilburn.backends.postgres.statements import Row, Statements
from kilburn.backends.ranked import PLACES, Extents, passage_number
from kilburn.backends.records import compute_seal
from kilburn.backends.sealed import ADVICE, SegmentRow
from kilburn.errors import StoreCorrupt, StoreError
from kilburn.page import Span
from kilburn.retrieval import EXACT

if TYPE_CHECKING:
    from kilburn.backends.postgres.store import Postgres

T = TypeVar("T")

PAGE = "page.segment, page.id, record, page.seal, convert_to(place, 'UTF8'), pinned, importance, valid_until, state_seal"
"""The columns of a page with its state."""

NUMBERS = range(-(1 << 63), 1 << 63)
"""Numbers that a column can hold."""

MAX_TEXT_AHEAD = 4000
"""Bytes of a text that is read together with its page."""

# Each is looked up by itself (OFFSET 0): as long as the tables have no statistics, a join would read all of the tenant's.
PAGES_BY_KEY = (
    "unnest(%s::bigint[], %s::bigint[]) AS wanted(segment, id) CROSS JOIN LATERAL (SELECT * FROM kilburn.page WHERE tenant = %s"
    " AND page.segment = wanted.segment AND page.id = wanted.id OFFSET 0) AS page"
)

_WITH_TEXTS = (
    f"SELECT {PAGE}, size, codec, data, digest FROM {PAGES_BY_KEY} LEFT JOIN LATERAL (SELECT size, codec, data, digest"
    " FROM kilburn.content WHERE content.tenant = page.tenant AND digest = page.content AND size <= %s OFFSET 0) AS text ON true"
)
# With the texts of the pages, where these are short: each page and its text once, for the first of its passages.
_HITS = (
    "SELECT hit.id, hit.page, start, stop, page.segment, record, page.seal, place, pinned, importance, valid_until, state_seal,"
    " size, codec, data, digest FROM (SELECT own.*,"
    " row_number() OVER (PARTITION BY own.id >> 32, own.page ORDER BY place) AS turn"
    " FROM unnest(%s::bigint[]) WITH ORDINALITY AS wanted(id, place) CROSS JOIN LATERAL (SELECT id, page, start, stop"
    " FROM kilburn.passage WHERE tenant = %s AND passage.id = wanted.id OFFSET 0) AS own) AS hit"
    " LEFT JOIN LATERAL (SELECT segment, record, seal, convert_to(place, 'UTF8') AS place, pinned, importance, valid_until,"
    " state_seal, content FROM kilburn.page WHERE tenant = %s AND segment = hit.id >> 32 AND page.id = hit.page OFFSET 0) AS page"
    " ON turn = 1 LEFT JOIN LATERAL (SELECT size, codec, data, digest FROM kilburn.content WHERE tenant = %s"
    " AND digest = page.content AND size <= %s OFFSET 0) AS text ON true"
)

# Each passage is looked up by itself (OFFSET 0), as most often the first few are enough: a join would read all of the tenant's.
_WAITING = (
    "SELECT waits.id, waits.page, waits.start, waits.stop FROM kilburn.segment"
    " LEFT JOIN kilburn.embedded ON embedded.tenant = segment.tenant AND embedded.segment = segment.id AND embedder = %s"
    " CROSS JOIN LATERAL (SELECT id, page, start, stop FROM kilburn.passage WHERE passage.tenant = segment.tenant"
    " AND passage.id BETWEEN (segment.id << 32) AND ((segment.id << 32) | ((%s - coalesce(passages_done, 0)) << 5) | 31)"
    " AND NOT EXISTS(SELECT FROM kilburn.vector WHERE vector.tenant = passage.tenant AND entry = passage.id AND embedder = %s"
    " OFFSET 0)"
    " ORDER BY passage.id DESC LIMIT %s) AS waits"
    " WHERE segment.tenant = %s AND passages > coalesce(passages_done, 0){among} ORDER BY segment.id DESC, waits.id DESC LIMIT %s"
)


class SnapshotReads:
    """Keeps the rows that were read in a snapshot.

    Args:
        ahead: whether pages and short texts are read with the passages that are found in them.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self.ahead = ahead
        self.segments: dict[int, SegmentRow] = {}
        self.has_all_segments = False
        self.pages: dict[tuple[int, int], Row] = {}
        self.texts: dict[bytes, Row] = {}

    def add(self, segment: int, page: int, row: Sequence[Any]) -> None:
        """Keep a page, and its text if that was read: the rest of its row, then size, codec, data and digest."""
        self.pages[segment, page] = (segment, page, *row[:-4])
        if row[-1] is not None:
            self.texts[row[-1]] = tuple(row[-4:])


class _Part:
    """A part of a store, with the store's database."""

    def __init__(self, store: Postgres) -> None:
        self._store, self._db, self._number = store, store._db, store._number


class PostgresContents(Chilling):
    """See `kilburn.backend.ContentStore`."""

    def __init__(self, store: Postgres) -> None:
        super().__init__(store.path, store._read_cold, store._change_cold, store.sync, store._keeps_objects)
        self._store, self._number = store, store._number

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """See `ContentStore`."""
        keys = {digest: digest_bytes(digest) for digest in digests}
        if not keys:
            return {}
        select = "SELECT size, codec, data, digest FROM kilburn.content WHERE tenant = %s AND digest = ANY(%s::bytea[])"
        cached = self._store._reads.texts if self._store._reads is not None else {}
        missing = [key for key in keys.values() if key not in cached]
        rows = self._store._ask(select, self._number, missing) if missing else []
        texts = {row[-1]: self.text_at(row) for row in (*rows, *(cached[key] for key in keys.values() if key in cached))}
        for digest, key in keys.items():
            if key not in texts:
                raise StoreCorrupt(f"content {digest} is missing", advice=ADVICE)
        return {digest: texts[key] for digest, key in keys.items()}

    def chill(self, digests: Iterable[str]) -> Moved:
        """See `ContentStore`."""
        self._store._check_writes()
        return super().chill(digests)

    def warm(self, digests: Iterable[str] | None = None) -> Moved:
        """See `ContentStore`."""
        self._store._check_writes()
        return super().warm(digests)

    def unreached(self) -> tuple[str, ...]:
        """See `ContentStore`."""
        places = self._store._db.read("reading", lambda statements: held(statements, self._number, self._store._hindrance))
        return places + super().unreached()

    def text_at(self, row: Row) -> str:
        """Return the text of a row (size, codec, data, digest), verified, cold texts too."""

        def fetch(name: str, digest: bytes) -> bytes:
            return required(self._store._read_cold(lambda rows: rows.place())).get(name, digest)

        return text_at(row, fetch, lambda digest: next(iter(self._store._ask(ROW, self._number, digest)), None))


class _PostingsAhead(Postings):
    """Reads the pages and short texts of passages with them, as a search asks for these next."""

    def __init__(self, statements: Statements, tenant: int, reads: SnapshotReads) -> None:
        super().__init__(statements, tenant)
        self._reads = reads

    def spans(self, numbers: Iterable[int]) -> dict[int, tuple[int, Span]]:
        """See `Postings`."""
        spans = {}
        values = list(numbers), *[self._tenant] * 3, MAX_TEXT_AHEAD
        for entry, page, start, stop, segment, *row in self._statements.rows(_HITS, *values):
            spans[entry] = page, (start, stop)
            if segment is not None:
                self._reads.add(segment, page, row)
        return spans


class PostgresView:
    """See `kilburn.backends.durable.IndexView`."""

    def __init__(self, store: Postgres, statements: Statements) -> None:
        self._store, self._statements = store, statements
        reads = store._reads
        self._reads = reads if reads is not None and reads.ahead else None
        self.index = Postings(statements, store._number)
        if self._reads is not None:
            self.index = _PostingsAhead(statements, store._number, self._reads)
        self._known: dict[int, SegmentRow] = {}

    def extents(self, segments: Collection[int] | None) -> Extents:
        """See `IndexView`."""
        if segments is None:
            self._known = {row.number: row for row in self._store._segments(self._statements)}
            rows = list(self._known.values())
        else:
            self._known = self._store._numbered(self._statements, segments)
            rows = [row for row in self._known.values() if not row.damaged]
        return Extents((row.number, row.passages, row.characters) for row in rows)

    def whole(self, segments: Iterable[int]) -> set[int]:
        """See `IndexView`."""
        requested = set(segments)
        if unread := requested - self._known.keys():
            self._known |= self._store._numbered(self._statements, unread)
        return {number for number in requested & self._known.keys() if not self._known[number].damaged}

    def page_entries(self, keys: Sequence[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], int, Span]]:
        """See `IndexView`."""
        select = (
            f"SELECT page.segment, page.id, passage.id, start, stop FROM {PAGES_BY_KEY}"
            " JOIN kilburn.passage ON passage.tenant = page.tenant AND passage.id BETWEEN first_passage AND last_passage"
            " WHERE passage.page = page.id ORDER BY passage.id DESC"
        )
        valid_keys = [key for key in keys if all(part in NUMBERS for part in key)]
        values = [segment for segment, _ in valid_keys], [page for _, page in valid_keys], self._store._number
        ahead = self._statements.send(_WITH_TEXTS, *values, MAX_TEXT_AHEAD) if self._reads is not None else None
        rows = self._statements.rows(select, *values)
        if self._reads is not None and ahead is not None:
            for segment, page, *row in ahead.fetchall():
                self._reads.add(segment, page, row)
        return (((segment, page), entry, (start, stop)) for segment, page, entry, start, stop in rows)


def read_index(store: Postgres, do: Callable[[IndexView], T]) -> T:
    """Call a function with the passages of a store in one snapshot."""
    return store._db.read("searching", lambda statements: do(PostgresView(store, statements)))


class PostgresVectors(_Part):
    """See `kilburn.backend.VectorIndex`, and `kilburn.search.vectors.Nearby`."""

    def unembedded(
        self, embedder: str, limit: int, damaged: MutableMapping[int, StoreCorrupt] | None = None
    ) -> list[tuple[int, str]]:
        """See `VectorIndex`."""
        name = check_name(embedder, "embedder").encode()
        texts = (
            "SELECT page.segment, page.id, text.size, text.codec, text.data, text.digest,"
            f" own.size, own.codec, own.data, own.digest FROM {PAGES_BY_KEY} CROSS JOIN LATERAL (SELECT * FROM kilburn.content"
            " WHERE content.tenant = page.tenant AND content.digest = page.content OFFSET 0) AS text"
            " LEFT JOIN LATERAL (SELECT * FROM kilburn.content"
            " WHERE content.tenant = page.tenant AND content.digest = page.extra OFFSET 0) AS own ON true"
        )

        rows_by_page: dict[tuple[int, int], Row] = {}

        def waiting(limit: int) -> list[Row]:
            def do(statements: Statements) -> tuple[list[Row], list[Row]]:
                number = self._embedder(statements, name)
                waits = statements.rows(_WAITING.format(among=""), number, PLACES, number, limit, self._number, limit)
                keys = sorted({(entry >> 32, page) for entry, page, *_ in waits} - rows_by_page.keys())
                text_rows = (
                    statements.rows(texts, [segment for segment, _ in keys], [page for _, page in keys], self._number)
                    if keys
                    else []
                )
                return waits, text_rows

            waits, rows = self._db.read("reading", do)
            rows_by_page.update({(segment, page): tuple(row) for segment, page, *row in rows})
            return waits

        def read_text(segment: int, page: int) -> str:
            row = rows_by_page.get((segment, page))
            text = None if row is None else searchable_in(row[:4], row[4:], self._store._chilling.text_at)
            if text is None:
                raise StoreCorrupt(f"the content of page {page} is missing", advice=ADVICE)
            return text

        return sound_passages(limit, waiting, read_text, damaged if damaged is not None else {})

    def add(self, embedder: str, rows: Sequence[tuple[int, bytes]]) -> None:
        """See `VectorIndex`."""
        name = check_name(embedder, "embedder")
        self._store._check_writes()
        if rows:
            self._db.write("writing", lambda statements: self._add(statements, name, dict(rows)))

    def read(self, embedder: str, after: int = 0) -> Iterator[Vector]:
        """See `VectorIndex`."""
        select = (
            "SELECT vector.id, entry, data, seal FROM kilburn.vector"
            " JOIN kilburn.embedder ON embedder.tenant = vector.tenant AND embedder.id = vector.embedder"
            " WHERE vector.tenant = %s AND name = %s AND vector.id > %s ORDER BY vector.id LIMIT %s"
        )
        while True:
            rows = self._store._ask(select, self._number, embedder.encode("utf-8", "surrogatepass"), after, READ_ROWS)
            for number, entry, data, seal in rows:
                if seal == self._seal(embedder, entry, data):
                    yield Vector(number=number, entry=entry, data=data)
            if not rows:
                return
            after = rows[-1][0]

    def embedders(self) -> list[str]:
        """See `VectorIndex`."""
        select = "SELECT name FROM kilburn.embedder WHERE tenant = %s ORDER BY id"
        return [name.decode() for (name,) in self._store._ask(select, self._number)]

    def drop(self, embedder: str) -> None:
        """See `VectorIndex`."""
        self._store._check_writes()
        delete = "DELETE FROM kilburn.embedder WHERE tenant = %s AND name = %s"
        name = embedder.encode("utf-8", "surrogatepass")
        self._db.write("writing", lambda statements: statements.send(delete, self._number, name))

    def near(
        self, embedder: str, vector: Sequence[float], limit: int, segments: Collection[int] | None = None
    ) -> list[tuple[int, bytes]] | None:
        """See `kilburn.search.vectors.Nearby`."""
        if not self._store._halves:
            return None
        name = embedder.encode("utf-8", "surrogatepass")
        rows = self._db.read(
            "searching",
            lambda statements: self._half_vectors(statements).near(name, vector, limit, segments),
        )
        return self._whole_vectors(embedder, rows) if rows is not None else None

    def lookup(self, embedder: str, entries: Iterable[int]) -> list[tuple[int, bytes]]:
        """See `kilburn.search.vectors.Nearby`."""
        name, unique_entries = embedder.encode("utf-8", "surrogatepass"), sorted(set(entries))
        rows = self._db.read("reading", lambda statements: self._half_vectors(statements).of(name, unique_entries))
        return self._whole_vectors(embedder, rows)

    def tend(self, above: int = EXACT) -> list[str]:
        """See `kilburn.search.vectors.Nearby`; `above` so many vectors of an embedder there is an index."""
        self._store._check_writes()
        actions = halves.tend(self._db, self._store._halves, above) if self._store._halves else []
        if actions:
            # What was forgotten meanwhile could not be removed.
            self._store._wipe()
        return actions

    def _add(self, statements: Statements, name: str, rows: Mapping[int, bytes]) -> None:
        key, first = name.encode(), len(next(iter(rows.values())))
        # Who stores vectors of an embedder holds its row: so their numbers come in the order of their commits.
        statements.send(
            "INSERT INTO kilburn.embedder(tenant, name, size, vectors) VALUES(%s, %s, %s, 0) ON CONFLICT DO NOTHING",
            *(self._number, key, first),
        )
        ((number, size, count),) = statements.rows(
            "SELECT id, size, vectors FROM kilburn.embedder WHERE tenant = %s AND name = %s FOR UPDATE", self._number, key
        )
        wrong = next((len(data) for data in rows.values() if len(data) != size), None)
        if wrong is not None or not size:
            problem = f"a vector of {wrong or 0} bytes among those of {name!r}, which have {size}"
            raise StoreError(problem, advice="give another model another name")
        # A passage that is being forgotten is waited for.
        segments = sorted({entry >> 32 for entry in rows})
        statements.send(
            "SELECT FROM unnest(%s::bigint[]) AS wanted(id) CROSS JOIN LATERAL"
            " (SELECT FROM kilburn.segment WHERE tenant = %s AND segment.id = wanted.id FOR SHARE) AS own",
            segments,
            self._number,
        )
        passage_rows = statements.rows(
            "SELECT id FROM kilburn.passage WHERE tenant = %s AND id = ANY(%s::bigint[])", self._number, list(rows)
        )
        passage_ids = {entry for (entry,) in passage_rows}
        entries = [entry for entry in rows if entry in passage_ids]
        if entries:
            statements.send(
                # Most often there is none. Each is looked up by itself: without statistics all of the tenant's would be read.
                "DELETE FROM kilburn.vector WHERE tenant = %s AND embedder = %s AND entry = ANY(%s::bigint[])"
                " AND EXISTS(SELECT FROM unnest(%s::bigint[]) AS wanted(entry) CROSS JOIN LATERAL (SELECT id"
                " FROM kilburn.vector WHERE tenant = %s AND embedder = %s AND vector.entry = wanted.entry OFFSET 0) AS own)",
                *(self._number, number, entries, entries, self._number, number),
            )
            statements.send(
                "INSERT INTO kilburn.vector(tenant, embedder, id, entry, data, seal)"
                " SELECT %s, %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::bytea[], %s::bytea[])",
                *(
                    self._number,
                    number,
                    list(range(count + 1, count + len(entries) + 1)),
                    entries,
                    [rows[entry] for entry in entries],
                ),
                [self._seal(name, entry, rows[entry]) for entry in entries],
            )
            statements.send(
                "UPDATE kilburn.embedder SET vectors = %s WHERE tenant = %s AND id = %s",
                count + len(entries),
                self._number,
                number,
            )
        for segment in sorted({entry >> 32 for entry in entries}):
            self._advance(statements, number, segment)

    def _embedder(self, statements: Statements, name: bytes) -> int:
        """The number of an embedder; 0 if it has no vectors here."""
        row = statements.row("SELECT id FROM kilburn.embedder WHERE tenant = %s AND name = %s", self._number, name)
        return row[0] if row is not None else 0

    def _seal(self, name: str, entry: int, data: bytes) -> bytes:
        return compute_seal("vector", self._number, name, entry, data)

    def _advance(self, statements: Statements, embedder: int, segment: int) -> None:
        """Note how many of a segment's first passages do not wait any more."""
        among = _WAITING.format(among=" AND segment.id = %s")
        waits = statements.row(among, embedder, PLACES, embedder, 1, self._number, segment, 1)
        if waits is not None:
            passages_done = passage_number(waits[0])
        else:
            select = "SELECT passages FROM kilburn.segment WHERE tenant = %s AND id = %s"
            ((passages_done,),) = statements.rows(select, self._number, segment)
        statements.send(
            "INSERT INTO kilburn.embedded(tenant, embedder, segment, passages_done) VALUES(%s, %s, %s, %s)"
            " ON CONFLICT(tenant, embedder, segment) DO UPDATE SET passages_done = excluded.passages_done",
            *(self._number, embedder, segment, passages_done),
        )

    def _half_vectors(self, statements: Statements) -> halves.HalfVectors:
        return halves.HalfVectors(statements, self._number, self._store._halves)

    def _whole_vectors(self, embedder: str, rows: Iterable[halves.VectorRow]) -> list[tuple[int, bytes]]:
        return [(entry, data) for entry, data, seal in rows if seal == self._seal(embedder, entry, data)]


class PostgresSettings(_Part):
    """See `kilburn.backend.SettingStore`."""

    def all(self) -> dict[str, str]:
        """See `SettingStore`."""
        select = "SELECT name, value, seal FROM kilburn.setting WHERE tenant = %s ORDER BY name"
        return {
            name.decode(): value.decode()
            for name, value, seal in self._store._ask(select, self._number)
            if seal == compute_seal("setting", self._number, name, value)
        }

    def put(self, name: str, value: str | None) -> None:
        """See `SettingStore`."""
        check_storable(name, value)
        self._store._check_writes()
        key, stored_value = name.encode(), None if value is None else value.encode()
        insert = (
            "INSERT INTO kilburn.setting(tenant, name, value, seal) VALUES(%s, %s, %s, %s)"
            " ON CONFLICT(tenant, name) DO UPDATE SET value = excluded.value, seal = excluded.seal"
        )

        def do(statements: Statements) -> None:
            if stored_value is None:
                statements.send("DELETE FROM kilburn.setting WHERE tenant = %s AND name = %s", self._number, key)
            else:
                statements.send(insert, self._number, key, stored_value, compute_seal("setting", self._number, key, stored_value))

        self._db.write("writing", do)

    def replace(self, name: str, expected: str | None, value: str | None) -> bool:
        """See `SettingStore`."""
        check_storable(name, expected, value)
        self._store._check_writes()
        key, seal = name.encode(), b"" if value is None else compute_seal("setting", self._number, name.encode(), value.encode())

        def do(statements: Statements) -> bool:
            setting_key = self._number, key
            if expected is None and value is None:
                row = statements.row(
                    "SELECT 1 WHERE NOT EXISTS(SELECT FROM kilburn.setting WHERE tenant = %s AND name = %s)", *setting_key
                )
            elif expected is None:
                insert = (
                    "INSERT INTO kilburn.setting(tenant, name, value, seal) VALUES(%s, %s, %s, %s)"
                    " ON CONFLICT DO NOTHING RETURNING 1"
                )
                row = statements.row(insert, *setting_key, (value or "").encode(), seal)
            elif value is None:
                delete = "DELETE FROM kilburn.setting WHERE tenant = %s AND name = %s AND value = %s RETURNING 1"
                row = statements.row(delete, *setting_key, expected.encode())
            else:
                # Who waits here for another's transaction looks again at what that has written.
                update = (
                    "UPDATE kilburn.setting SET value = %s, seal = %s WHERE tenant = %s AND name = %s AND value = %s RETURNING 1"
                )
                row = statements.row(update, value.encode(), seal, *setting_key, expected.encode())
            return row is not None

        return self._db.write("writing", do)


class PostgresHistories(_Part):
    """See `kilburn.backend.HistoryIndex`."""

    def put(self, segment: int, digests: Digests, *, page: int) -> bool:
        """See `HistoryIndex`."""
        self._store._check_writes()
        fits = (
            "SELECT 1 WHERE %s = (SELECT max(id) FROM kilburn.page WHERE tenant = %s AND segment = %s)"
            " AND NOT EXISTS(SELECT FROM kilburn.page WHERE tenant = %s AND segment = %s AND content IS NULL)"
            " AND (%s = 0 OR EXISTS(SELECT FROM kilburn.history WHERE tenant = %s AND segment = %s AND message = %s AND is_last))"
        )
        segment_key = self._number, segment

        def do(statements: Statements) -> bool:
            # Who writes to the session waits; its next write is not this one's concern.
            select = "SELECT 1 FROM kilburn.segment WHERE tenant = %s AND id = %s FOR UPDATE"
            segment_row = statements.send(select, *segment_key)
            answer = statements.send(fits, page, *segment_key, *segment_key, digests.offset, *segment_key, digests.offset)
            if segment_row.fetchone() is None or answer.fetchone() is None:
                return False
            writing.put_history(statements, *segment_key, digests, page)
            return len(digests.added) + digests.offset > 0

        return self._db.write("writing", do)

    def owners(self, digest: bytes, limit: int, *, tail: bool = False) -> list[HistoryOwner]:
        """See `HistoryIndex`."""
        select = (
            "SELECT name, message, (SELECT max(message) FROM kilburn.history AS own"
            " WHERE own.tenant = history.tenant AND own.segment = history.segment)"
            " FROM kilburn.history JOIN kilburn.segment ON segment.tenant = history.tenant AND segment.id = history.segment"
            f" WHERE history.tenant = %s AND {'tail' if tail else 'digest'} = %s"
            " ORDER BY is_last DESC, history.segment DESC LIMIT %s"
        )
        return [
            HistoryOwner(name=name.decode(), at=message, count=count)
            for name, message, count in self._store._ask(select, self._number, digest, limit)
        ]

    def missing(self, root: str, user: str, limit: int) -> list[str]:
        """See `HistoryIndex`."""
        select = (
            "SELECT name FROM kilburn.segment"
            " WHERE tenant = %s AND (name = %s OR (name > %s AND name < %s) OR (name > %s AND name < %s))"
            " AND owner = %s AND kind = 'session' AND pages > 0"
            " AND NOT EXISTS(SELECT FROM kilburn.history WHERE history.tenant = segment.tenant AND history.segment = segment.id"
            " AND is_last AND last_page = (SELECT max(page.id) FROM kilburn.page"
            " WHERE page.tenant = segment.tenant AND page.segment = segment.id)) ORDER BY used DESC LIMIT %s"
        )
        names = [name.encode() for name in (root, f"{root}~", f"{root}~:", f"{root}/b", f"{root}/b:", user)]
        candidates = [name.decode() for (name,) in self._store._ask(select, self._number, *names, limit)]
        return [name for name in candidates if root_name(name) == root]


def findings_in(store: Postgres) -> list[Finding]:
    """Everything that is wrong with this tenant's rows, and with what holds tenants apart; empty if nothing is. Nothing is
    repaired, and nobody waits meanwhile but who would wipe what is forgotten."""

    def do(statements: Statements) -> list[Finding]:
        cold = PostgresColdRows(statements, store._number, store._opened)
        return Inspection(statements, store._number, cold).findings()

    findings = store._db.read("checking", do, long=True)
    with connected(store._url, "checking") as connection:
        findings += orphans(connection)
    findings += cold_findings(store._chilling)
    return findings

"""Finds what is wrong with a tenant's rows in PostgreSQL, and with the walls between tenants. Nothing is repaired.

All is read in one snapshot, a stretch of a table at a time: writers go on meanwhile, and what they do is not among it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from psycopg import sql

from kilburn.backend import Finding, SegmentKind, State
from kilburn.backends import citations, histories, mentions
from kilburn.backends.citations import cited_by
from kilburn.backends.findings import (
    IndexedWords,
    gather,
    of_page,
    wrong_calls,
    wrong_checkpoints,
    wrong_citations,
    wrong_events,
    wrong_mentions,
    wrong_names,
    wrong_pages,
    wrong_replies,
    wrong_segments,
    wrong_setting,
)
from kilburn.backends.postgres.coldrows import PostgresColdRows, searchable_in
from kilburn.backends.postgres.connection import Connection
from kilburn.backends.postgres.postings import BITS, entries_in, word_keys
from kilburn.backends.postgres.statements import Row, Statements
from kilburn.backends.postgres.writing import SEALS, SEGMENT
from kilburn.backends.ranked import PLACES
from kilburn.backends.records import UNREADABLE, compute_seal, decode_event
from kilburn.backends.sealed import PageRows, SegmentRow
from kilburn.errors import MissingExtra, SpecError, StoreError
from kilburn.event import Act
from kilburn.page import Page

TEXTS = 200
"""Texts that are read at a time."""

ROWS = 10_000
"""Rows of a word or of a number that are read at a time."""

FIRST = -1 << 63
"""Before every number."""

OF_SEGMENTS = {
    **dict.fromkeys(("page", "event", "mention", "history", "checkpoint", "embedded"), "segment"),
    "passage": "id >> 32",
    "posting": f"block >> {32 - BITS}",
    "vector": "entry >> 32",
    "citation": "citing_segment",
}
"""Tables whose rows belong to a segment, and where its number is."""

TRIGGERS = ("segment_fenced", "content_deleted", "content_warmed")
"""The triggers without which writers could damage a store."""

_TABLES = """
SELECT relname, relrowsecurity AND relforcerowsecurity, policies, coalesce(ours, false)
FROM pg_class CROSS JOIN LATERAL (
    SELECT count(*) AS policies, bool_and(pg_get_expr(polqual, polrelid) LIKE '%%kilburn.%%') AS ours
    FROM pg_policy WHERE polrelid = pg_class.oid
) AS walls
WHERE relnamespace = to_regnamespace('kilburn') AND relkind IN ('r', 'p') AND (relname = 'tenant' OR EXISTS(
    SELECT FROM pg_attribute WHERE attrelid = pg_class.oid AND attname = 'tenant' AND NOT attisdropped
))
ORDER BY relname
"""
_TRIGGERS = """
SELECT tgname, relname, tgisinternal, tgenabled IN ('O', 'A') FROM pg_trigger JOIN pg_class ON pg_class.oid = tgrelid
WHERE relnamespace = to_regnamespace('kilburn') ORDER BY tgname
"""
_INDEXES = """
SELECT index.relname FROM pg_index JOIN pg_class AS index ON index.oid = indexrelid
WHERE index.relnamespace = to_regnamespace('kilburn') AND NOT (indisvalid AND indisready) ORDER BY index.relname
"""
_ROLE = (
    "SELECT rolsuper OR rolbypassrls, EXISTS(SELECT FROM pg_class WHERE relowner = pg_roles.oid"
    " AND relnamespace = to_regnamespace('kilburn')) FROM pg_roles WHERE rolname = current_user"
)


class Inspection:
    """Reads the rows of a tenant, in a transaction that its caller ends."""

    def __init__(self, statements: Statements, tenant: int, cold: PostgresColdRows) -> None:
        self._statements, self._tenant, self._cold = statements, tenant, cold
        self._words = IndexedWords(word_keys)
        self._cited: set[citations.Citation] = set()

    def findings(self) -> list[Finding]:
        """Everything that is wrong; empty when all is well. Damage is never raised."""
        findings: list[Finding] = []
        segments: list[SegmentRow] = []
        gather(findings, "schema", self._walls())
        gather(findings, "session", self._segments(segments))
        gather(findings, "content", self._contents())
        for segment in segments:
            pages = self._each_page(segment)
            gather(findings, "page", self._pages(segment, pages), segment.number)
            gather(findings, "ledger", self._ledger(segment, pages), segment.number)
            if segment.kind is SegmentKind.NOTES:
                gather(findings, "page", wrong_names(segment, pages), segment.number)
            gather(findings, "index", self._passages(segment), segment.number)
            gather(findings, "index", self._mentions(segment, pages), segment.number)
            gather(findings, "checkpoint", self._checkpoints(segment), segment.number)
            if not segment.damaged:
                self._cited |= cited_by([(segment, pages)])
        gather(findings, "orphan", self._strays(segments))
        gather(findings, "index", self._entries(segments))
        gather(findings, "index", self._citations(segments))
        gather(findings, "vector", self._vectors())
        return findings

    def _own(self, sql: str, *values: object) -> list[Row]:
        """The rows of a question that begins with the tenant."""
        return self._statements.rows(sql, self._tenant, *values)

    def _walls(self) -> Iterator[Finding]:
        """What holds tenants apart, and writers to their order."""
        for table, forced, policies, ours in self._statements.rows(_TABLES):
            if not forced or policies != 1 or not ours:
                problem = f"table {table} may show rows of other tenants: its row-level security is not as it was made"
                yield Finding(kind="schema", what=problem)
        ((mighty, owner),) = self._statements.rows(_ROLE)
        if mighty or owner:
            yield Finding(kind="schema", what="the role of a program may see rows of other tenants: take its attributes away")
        triggers = self._statements.rows(_TRIGGERS)
        trigger_names = {name for name, *_ in triggers}
        for name in TRIGGERS:
            if name not in trigger_names:
                yield Finding(kind="schema", what=f"trigger {name} is missing")
        for name, table, internal, enabled in triggers:
            if not enabled:
                problem = f"a foreign key of table {table} is off" if internal else f"trigger {name} is off"
                yield Finding(kind="schema", what=problem)
        for (index,) in self._statements.rows(_INDEXES):
            yield Finding(kind="schema", what=f"index {index} is not complete: REINDEX INDEX kilburn.{index}", derived=True)

    def _segments(self, segments: list[SegmentRow]) -> Iterator[Finding]:
        segments += [
            SEALS.parse_segment(row) for row in self._own(f"SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s ORDER BY id")
        ]
        yield from wrong_segments(segments)
        counted = self._own("SELECT segments FROM kilburn.counter WHERE tenant = %s")
        last_number = counted[0][0] if counted else 0
        numbers = {segment.number for segment in segments}
        if numbers != set(range(1, last_number + 1)):
            lost = sorted(set(range(1, last_number + 1)) - numbers)
            missing = f"; number {', '.join(map(str, lost[:5]))} is missing" if lost else ""
            yield Finding(kind="session", what=f"{len(segments)} sessions are here where {last_number} were made{missing}")
        for row in self._own("SELECT name, value, seal FROM kilburn.setting WHERE tenant = %s ORDER BY name"):
            yield from wrong_setting(self._tenant, *row)

    def _contents(self) -> Iterator[Finding]:
        select = (
            "SELECT size, codec, data, digest FROM kilburn.content WHERE tenant = %s AND digest > %s ORDER BY digest LIMIT %s"
        )
        first = (
            "SELECT segment, id FROM kilburn.page WHERE tenant = %s AND (content = %s OR extra = %s)"
            " ORDER BY segment, abs(id) LIMIT 1"
        )
        last = b""
        while rows := self._own(select, last, TEXTS):
            for row in rows:
                try:
                    self._cold.text(row)
                except (StoreError, SpecError, MissingExtra) as error:
                    yield of_page(error.what, self._own(first, row[-1], row[-1]))
            last = rows[-1][-1]
        unused = (
            "SELECT digest FROM kilburn.content WHERE tenant = %s"
            " AND NOT EXISTS(SELECT FROM kilburn.page WHERE page.tenant = content.tenant AND page.content = content.digest)"
            " AND NOT EXISTS(SELECT FROM kilburn.page WHERE page.tenant = content.tenant AND page.extra = content.digest)"
        )
        for (digest,) in self._own(unused):
            yield Finding(kind="orphan", what=f"content {digest.hex()} belongs to no page", derived=True)

    def _each_page(self, segment: SegmentRow) -> list[tuple[int, Page | str, State | str]]:
        select = (
            "SELECT id, record, seal, convert_to(place, 'UTF8'), pinned, importance, valid_until, state_seal FROM kilburn.page"
            " WHERE tenant = %s AND segment = %s AND id > %s ORDER BY id LIMIT %s"
        )
        return [
            (number, SEALS.parse_page(segment.number, number, record, seal), SEALS.parse_state(segment.number, number, *state))
            for number, record, seal, *state in self._after(select, segment.number)
        ]

    def _after(self, select: str, *values: object) -> Iterator[Row]:
        """The rows of a question that is asked a stretch at a time, each behind the number with which the last one ended."""
        last = FIRST
        while rows := self._own(select, *values, last, ROWS):
            yield from rows
            last = rows[-1][0]

    def _pages(self, segment: SegmentRow, pages: PageRows) -> Iterator[Finding]:
        select = (
            "SELECT page.id, text.digest, extra.digest FROM kilburn.page"
            " LEFT JOIN kilburn.content AS text ON text.tenant = page.tenant AND text.digest = page.content"
            " LEFT JOIN kilburn.content AS extra ON extra.tenant = page.tenant AND extra.digest = page.extra"
            " WHERE page.tenant = %s AND page.segment = %s AND page.id > %s ORDER BY page.id LIMIT %s"
        )
        contents = {number: (text, extra) for number, text, extra in self._after(select, segment.number)}

        def there(digest: str) -> bool:
            select = "SELECT 1 FROM kilburn.content WHERE tenant = %s AND digest = %s"
            return bool(self._own(select, bytes.fromhex(digest)))

        yield from wrong_pages(segment, pages, contents, there)

    def _events(self, segment: SegmentRow) -> Iterator[tuple[int, bytes, bytes, object]]:
        select = (
            "SELECT number, convert_to(act, 'UTF8'), body, seal FROM kilburn.event"
            " WHERE tenant = %s AND segment = %s AND number > %s ORDER BY number LIMIT %s"
        )
        return ((number, act, body, seal) for number, act, body, seal in self._after(select, segment.number))

    def _ledger(self, segment: SegmentRow, pages: PageRows) -> Iterator[Finding]:
        # A branch's own pages are numbered on from those that it inherited.
        inherits = min((number for number, *_ in pages if number > 0), default=1) > 1
        yield from wrong_events(SEALS, segment, self._events(segment), lambda number: inherits and number == 1)

    def _mentions(self, segment: SegmentRow, pages: PageRows) -> Iterator[Finding]:
        """The index of mentions, that of replies, and that of calls."""
        pages_by_id = {number: page for number, page, _ in pages if isinstance(page, Page)}
        expected, noted, unread = set[tuple[int, int]](), list[tuple[int, bytes]](), set[int]()
        for number, _, body, _ in self._events(segment):
            try:
                event = decode_event(body)
            except UNREADABLE:
                unread.add(number)
                continue
            admitted = {page: pages_by_id[page] for page in event.pages if page in pages_by_id} if event.act is Act.ADMIT else {}
            expected.update((node, number) for node in mentions.event_nodes(event, admitted))
            noted += histories.reply_rows([event])
        stored_mentions = set(
            self._own("SELECT node, event FROM kilburn.mention WHERE tenant = %s AND segment = %s", segment.number)
        )
        yield from wrong_mentions(segment, expected ^ stored_mentions, unread)
        replies = (
            "SELECT message, digest, is_last, last_page FROM kilburn.history WHERE tenant = %s AND segment = %s AND message <= 0"
        )
        expected_replies = {(at, key, False, 0) for at, key in noted}
        yield from wrong_replies(segment, expected_replies ^ set(self._own(replies, segment.number)), unread)
        calls = self._own(
            "SELECT id, call FROM kilburn.page WHERE tenant = %s AND segment = %s AND call IS NOT NULL", segment.number
        )
        yield from wrong_calls(segment, pages, {number: call.decode("utf-8", "replace") for number, call in calls})

    def _checkpoints(self, segment: SegmentRow) -> Iterator[Finding]:
        select = "SELECT head, size, codec, data, seal FROM kilburn.checkpoint WHERE tenant = %s AND segment = %s ORDER BY head"
        yield from wrong_checkpoints(segment, self._own(select, segment.number))

    def _passages(self, segment: SegmentRow) -> Iterator[Finding]:
        """Compares the passages of each page with its text."""
        select = (
            "SELECT page.id, first_passage, last_passage, text.size, text.codec, text.data, text.digest, own.size, own.codec,"
            " own.data, own.digest FROM kilburn.page"
            " LEFT JOIN kilburn.content AS text ON text.tenant = page.tenant AND text.digest = page.content"
            " LEFT JOIN kilburn.content AS own ON own.tenant = page.tenant AND own.digest = page.extra"
            " WHERE page.tenant = %s AND page.segment = %s AND page.id > %s AND first_passage IS NOT NULL"
            " ORDER BY page.id LIMIT %s"
        )
        entries = "SELECT id, page, start, stop FROM kilburn.passage WHERE tenant = %s AND id BETWEEN %s AND %s ORDER BY id DESC"
        last = FIRST
        while page_rows := self._own(select, segment.number, last, TEXTS):
            answers = [self._statements.send(entries, self._tenant, row[1], row[2]) for row in page_rows]
            for (number, _, _, *rows), answer in zip(page_rows, answers, strict=True):
                try:
                    text = searchable_in(tuple(rows[:4]), tuple(rows[4:]), self._cold.text)
                except StoreError:
                    text = None
                yield from self._words.wrong_passages(segment.number, number, text, answer.fetchall())
            last = page_rows[-1][0]

    def _entries(self, segments: Iterable[SegmentRow]) -> Iterator[Finding]:
        """Compares the words of the index with those of the pages."""
        entries = self._after("SELECT id FROM kilburn.passage WHERE tenant = %s AND id > %s ORDER BY id LIMIT %s")
        yield from self._words.wrong_entries((entry for (entry,) in entries), {segment.number for segment in segments})
        yield from self._words.wrong_words(self._postings())

    def _postings(self) -> Iterator[tuple[bytes, int]]:
        select = (
            "SELECT word, block, lows FROM kilburn.posting WHERE tenant = %s"
            " AND (word, block) > (%s, %s) ORDER BY word, block LIMIT %s"
        )
        last: Row = b"", FIRST
        while rows := self._own(select, *last, ROWS):
            for word, block, lows in rows:
                for entry in entries_in(block, lows):
                    yield word, entry
            last = rows[-1][:2]

    def _citations(self, segments: Iterable[SegmentRow]) -> Iterator[Finding]:
        """Compares the index of citations with the pages, and looks for what they cite."""
        numbers = {segment_row.number for segment_row in segments}
        damaged = {segment_row.number for segment_row in segments if segment_row.damaged}
        select = "SELECT segment, page, citing_segment, citing_page FROM kilburn.citation WHERE tenant = %s"
        stored_citations = {
            (segment, page, by, citer) for segment, page, by, citer in self._own(select) if by in numbers - damaged
        }

        def content(segment: int, page: int) -> tuple[object] | None:
            rows = self._own("SELECT content FROM kilburn.page WHERE tenant = %s AND segment = %s AND id = %s", segment, page)
            return (rows[0][0],) if rows else None

        yield from wrong_citations(self._cited, stored_citations, damaged, content)

    def _strays(self, segments: Iterable[SegmentRow]) -> Iterator[Finding]:
        """Rows whose segment is not there."""
        numbers = [segment_row.number for segment_row in segments]
        for table, segment in OF_SEGMENTS.items():
            select = (
                f"SELECT DISTINCT {segment} FROM kilburn.{table} WHERE tenant = %s AND {segment} <> ALL(%s::bigint[]) ORDER BY 1"
            )
            for (number,) in self._own(select, numbers):
                yield Finding(kind="orphan", what=f"rows of {table} whose session is not there: {number}")

    def _vectors(self) -> Iterator[Finding]:
        embedders = "SELECT id, name, size, vectors FROM kilburn.embedder WHERE tenant = %s ORDER BY id"
        select = (
            "SELECT vector.id, entry, data, seal, passage.id IS NOT NULL FROM kilburn.vector"
            " LEFT JOIN kilburn.passage ON passage.tenant = vector.tenant AND passage.id = entry"
            " WHERE vector.tenant = %s AND embedder = %s AND vector.id > %s ORDER BY vector.id LIMIT %s"
        )
        for embedder, stored_name, size, count in self._own(embedders):
            name, last = stored_name.decode("utf-8", "replace"), 0
            for number, entry, data, seal, has_passage in self._after(select, embedder):
                last = number
                if not has_passage or len(data) != size or seal != compute_seal("vector", self._tenant, name, entry, data):
                    problem = f"vector {number} of {name!r} is not what was written, or its passage is not there"
                    yield Finding(kind="vector", what=problem, derived=True, segment=entry >> 32)
            if last > count:
                problem = f"{count} vectors of {name!r} were counted, and there is number {last}"
                yield Finding(kind="vector", what=problem, derived=True)
            yield from self._unembedded(embedder, name)

    def _unembedded(self, embedder: int, name: str) -> Iterator[Finding]:
        select = (
            "SELECT segment FROM kilburn.embedded WHERE tenant = %s AND embedder = %s AND EXISTS(SELECT FROM kilburn.passage"
            " WHERE passage.tenant = embedded.tenant AND passage.id > ((segment << 32) | ((%s - passages_done) << 5) | 31)"
            " AND passage.id < (segment + 1) << 32 AND NOT EXISTS(SELECT FROM kilburn.vector"
            " WHERE vector.tenant = passage.tenant AND vector.entry = passage.id AND vector.embedder = embedded.embedder))"
        )
        for (segment,) in self._own(select, embedder, PLACES):
            problem = f"passages wait for a vector of {name!r}, and nobody knows"
            yield Finding(kind="vector", what=problem, derived=True, segment=segment)


def orphans(connection: Connection) -> Iterator[Finding]:
    """Rows whose tenant is not there. Only who sees all of the database finds them; nobody else asks."""
    ((walled,),) = connection.execute("SELECT row_security_active('kilburn.page')").fetchall()
    tables = connection.execute(_TABLES_OF_TENANTS).fetchall() if not walled else []
    for (table,) in tables:
        select = sql.SQL("SELECT DISTINCT tenant FROM {table} WHERE tenant NOT IN (SELECT id FROM kilburn.tenant)")
        for (tenant,) in connection.execute(select.format(table=sql.Identifier("kilburn", table))).fetchall():
            yield Finding(kind="orphan", what=f"rows of {table} whose tenant is not there: {tenant}")


_TABLES_OF_TENANTS = """
SELECT relname FROM pg_class JOIN pg_attribute ON attrelid = pg_class.oid AND attname = 'tenant' AND NOT attisdropped
WHERE relnamespace = to_regnamespace('kilburn') AND relkind = 'r' ORDER BY relname
"""

"""Inspects stores, and repairs those in a file.

Lost or altered content is reported, never replaced by a guess. Derived data (the text index, counters) is made again.
Records that cannot be read are quarantined, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import apsw

from kilburn.backend import Backend, Finding, SegmentKind
from kilburn.backends import citations, histories, mentions
from kilburn.backends.codec import unpack
from kilburn.backends.connection import row, rows, rows_of_each
from kilburn.backends.contenttable import OF_NO_PAGE, Wholes, searchable_text, thawed
from kilburn.backends.findings import (
    IndexedWords,
    cold_findings,
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
from kilburn.backends.records import UNREADABLE, compute_seal
from kilburn.backends.repair import OF_NO_SESSION, content_row, is_fork_note, quarantine_session, rebuild, stored_events
from kilburn.backends.sealed import SealedRows, SegmentRow
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.textindex import TextIndex
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import MissingExtra, SpecError, StoreCorrupt, StoreError


def inspect_store(backend: Backend) -> list[Finding]:
    """Return everything that is wrong with a store, as far as its tenant can see.

    Raises:
        SpecError: neither SQLite nor PostgreSQL.
    """
    if isinstance(backend, Sqlite):
        with backend._reading("checking"):
            findings = inspect(backend._db, backend._sealed, backend._index, backend._vector_table, backend._number)
        return findings + cold_findings(backend._chilling)
    from kilburn.backends.postgres.parts import findings_in
    from kilburn.backends.postgres.store import Postgres

    if isinstance(backend, Postgres):
        return findings_in(backend)
    raise SpecError(f"{backend!r} cannot be inspected", advice="give a store in SQLite or PostgreSQL")


def repair_store(backend: Sqlite) -> list[Finding]:
    """Rebuild derived data (text index, counters), remove unused content, and quarantine records that cannot be read.

    A note replaces an observation that cannot be read, and its bytes stay in quarantine. Nothing that was admitted is deleted.

    Returns:
        The remaining findings: lost content cannot be restored.
    """
    # The bytes of removed rows are wiped afterwards.
    with backend._removing("repairing"):
        try:
            rebuild(backend._db, backend._sealed, backend._index, backend._vector_table, backend._number)
        except UNREADABLE as error:
            raise StoreCorrupt(f"{backend.path} cannot be repaired: {error}", advice="restore it from a copy") from error
    return inspect_store(backend)


def quarantine_segment(backend: Sqlite, segment: int) -> str:
    """Quarantine a session that cannot be read, under a new name, which is returned. Its old name becomes free; nothing is
    deleted."""
    with backend._writing("repairing"):
        return quarantine_session(backend._db, backend._number, segment)


def inspect(db: apsw.Connection, sealed: SealedRows, index: TextIndex, vectors: VectorTable, tenant: int) -> list[Finding]:
    """Return everything that is wrong, except in quarantined segments. Damage never raises."""
    findings: list[Finding] = []
    segments: list[SegmentRow] = []
    gather(findings, "session", _sessions(db, sealed, tenant, segments))
    whole = [segment for segment in segments if not segment.quarantined]
    gather(findings, "file", _file(db, index))
    gather(findings, "content", _contents(db, tenant))
    for segment in whole:
        gather(findings, "page", _pages(db, sealed, tenant, segment), segment.number)
        gather(findings, "ledger", _ledger(db, sealed, segment), segment.number)
        if segment.kind is SegmentKind.NOTES:
            gather(findings, "page", wrong_names(segment, sealed.each_page(segment)), segment.number)
    gather(findings, "orphan", _strays(db))
    gather(findings, "index", _entries(db, index, tenant, whole))
    gather(findings, "index", _citations(db, sealed, tenant, whole))
    for segment in whole:
        gather(findings, "index", _mentions(db, sealed, segment), segment.number)
        gather(findings, "index", _replies(db, tenant, segment), segment.number)
        gather(findings, "checkpoint", _checkpoints(db, segment), segment.number)
    gather(findings, "vector", _vectors(vectors))
    return findings


def _file(db: apsw.Connection, index: TextIndex) -> Iterator[Finding]:
    index.look_again()
    for (line,) in rows(db, "PRAGMA integrity_check"):
        if line != "ok":
            yield Finding(kind="file", what=str(line), derived="fts5" in str(line).lower() or "index" in str(line).lower())


def _sessions(db: apsw.Connection, sealed: SealedRows, tenant: int, segments: list[SegmentRow]) -> Iterator[Finding]:
    segments += sealed.segments(tenant)
    yield from wrong_segments(segments)
    tenant_row = row(db, "SELECT sessions FROM tenant WHERE id = ?", tenant)
    if tenant_row is not None and tenant_row[0] != len(segments):
        yield Finding(kind="session", what=f"{len(segments)} sessions are here where {tenant_row[0]} were made", derived=True)
    for number, name, seal in rows(db, "SELECT id, CAST(name AS BLOB), seal FROM tenant NOT INDEXED"):
        if seal != compute_seal("tenant", number, name):
            yield Finding(kind="session", what=f"the row of tenant {number} is not what was written")
    for name, value, seal in rows(db, "SELECT name, value, seal FROM setting WHERE tenant = ?", tenant):
        yield from wrong_setting(tenant, name, value, seal)


def _strays(db: apsw.Connection) -> Iterator[Finding]:
    """Yield rows of missing segments, and segments and texts of missing tenants."""
    for kind, select in (
        ("pages", f"SELECT DISTINCT segment FROM page NOT INDEXED {OF_NO_SESSION}"),
        ("events", f"SELECT DISTINCT segment FROM event NOT INDEXED {OF_NO_SESSION}"),
        (
            "vectors",
            "SELECT DISTINCT embedder FROM vector NOT INDEXED WHERE embedder NOT IN (SELECT id FROM embedder NOT INDEXED)",
        ),
        ("histories", f"SELECT DISTINCT segment FROM history {OF_NO_SESSION}"),
        ("sessions", "SELECT id FROM segment NOT INDEXED WHERE tenant NOT IN (SELECT id FROM tenant NOT INDEXED)"),
        ("texts", "SELECT id FROM content NOT INDEXED WHERE tenant NOT IN (SELECT id FROM tenant NOT INDEXED)"),
    ):
        for (number,) in rows(db, select):
            owner = "tenant" if kind in ("sessions", "texts") else "embedder" if kind == "vectors" else "session"
            yield Finding(kind="orphan", what=f"{kind} whose {owner} is not there: {number}", derived=kind == "histories")


def _contents(db: apsw.Connection, tenant: int) -> Iterator[Finding]:
    select = "SELECT id, digest, size, codec, data FROM content NOT INDEXED WHERE tenant = ?"
    first = "SELECT segment, id FROM page WHERE content = ?1 OR extra = ?1 ORDER BY segment, abs(id) LIMIT 1"
    for number, digest, size, codec, data in rows_of_each(db, select, [(tenant,)]):
        try:
            unpack(*thawed(db, codec, data, digest), size, digest, Wholes(db).text)
        except (StoreError, SpecError, MissingExtra) as error:
            yield of_page(error.what, rows(db, first, number))
    for (digest,) in rows(db, f"SELECT CAST(digest AS BLOB) FROM content WHERE tenant = ? AND {OF_NO_PAGE}", tenant):
        yield Finding(kind="orphan", what=f"content {digest.hex()} belongs to no page", derived=True)


def _pages(db: apsw.Connection, sealed: SealedRows, tenant: int, segment: SegmentRow) -> Iterator[Finding]:
    select = (
        "SELECT page.id, CAST(text.digest AS BLOB), CAST(extra.digest AS BLOB) FROM page"
        " LEFT JOIN content AS text ON text.id = page.content AND text.tenant = ?1"
        " LEFT JOIN content AS extra ON extra.id = page.extra AND extra.tenant = ?1 WHERE page.segment = ?2"
    )
    contents = {number: (text, extra) for number, text, extra in rows(db, select, tenant, segment.number)}
    exists = partial(content_row, db, tenant)
    yield from wrong_pages(segment, sealed.each_page(segment), contents, lambda digest: exists(digest) is not None)


def _ledger(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> Iterator[Finding]:
    yield from wrong_events(sealed, segment, stored_events(db, segment), lambda number: is_fork_note(db, segment, number))


def _entries(db: apsw.Connection, index: TextIndex, tenant: int, segments: list[SegmentRow]) -> Iterator[Finding]:
    owners = {segment_.number for segment_ in segments}
    segment_numbers = {number for (number,) in rows(db, "SELECT id FROM segment NOT INDEXED")}
    words = IndexedWords(index.stems)
    select = "SELECT segment, id, first_passage, last_passage FROM page WHERE segment = ? AND first_passage IS NOT NULL"
    for segment, number, first, last in [page_row for segment_ in segments for page_row in rows(db, select, segment_.number)]:
        entries = rows(db, "SELECT id, page, start, stop FROM passage WHERE id BETWEEN ? AND ? ORDER BY id DESC", first, last)
        try:
            text: str | None = searchable_text(db, segment, number)
        except StoreCorrupt:
            text = None
        yield from words.wrong_passages(segment, number, text, entries)
    if tenant and not index.is_configured():
        yield Finding(kind="index", what="the text index has lost its settings", derived=True)
    stored_entries = [entry for (entry,) in rows(db, "SELECT id FROM passage")]
    yield from words.wrong_entries(
        [entry for entry in stored_entries if entry >> 32 in owners or entry >> 32 not in segment_numbers], owners
    )
    quarantined = {number for (number,) in rows(db, "SELECT id FROM segment WHERE tenant = ? AND quarantined", tenant)}
    # A tenant that is missing in a read-only file has no index.
    yield from words.wrong_words(index.postings() if tenant else (), quarantined)


def _citations(db: apsw.Connection, sealed: SealedRows, tenant: int, segments: list[SegmentRow]) -> Iterator[Finding]:
    """Compare the index of citations with the pages, and look up the cited pages."""
    segments = [session for session in segments if not session.damaged]
    expected = citations.cited_by((session, sealed.each_page(session)) for session in segments)
    names = {session.number for session in segments}
    indexed = {session for number in names for session in rows(db, f"{citations.SELECT} WHERE citing_segment = ?", number)}
    segment_numbers = {number for (number,) in rows(db, "SELECT id FROM segment NOT INDEXED WHERE tenant = ?", tenant)}

    def content(segment: int, page: int) -> tuple[object] | None:
        page_row = (
            row(db, "SELECT content FROM page WHERE segment = ? AND id = ?", segment, page)
            if segment in segment_numbers
            else None
        )
        return (page_row[0],) if page_row is not None else None

    yield from wrong_citations(expected, indexed, segment_numbers - names, content)


def _mentions(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> Iterator[Finding]:
    """Compare the indexes of mentions and of calls with ledger and pages."""
    expected, unread = mentions.mentions_in(db, segment.number)
    yield from wrong_mentions(segment, expected ^ set(rows(db, mentions.SELECT, segment.number)), unread)
    calls: dict[object, object] = dict(rows(db, "SELECT id, call FROM page NOT INDEXED WHERE segment = ?", segment.number))
    yield from wrong_calls(segment, sealed.each_page(segment), calls)


def _replies(db: apsw.Connection, tenant: int, segment: SegmentRow) -> Iterator[Finding]:
    """Compare the rows of replies with the ledger."""
    noted, unread = histories.replies_in(db, segment.number)
    select = "SELECT message, digest, tenant, is_last, last_page FROM history WHERE segment = ? AND message <= 0"
    indexed = set(rows(db, select, segment.number))
    yield from wrong_replies(segment, {(at, key, tenant, 0, 0) for at, key in noted} ^ indexed, unread)


def _checkpoints(db: apsw.Connection, segment: SegmentRow) -> Iterator[Finding]:
    select = "SELECT head, size, codec, data, seal FROM checkpoint WHERE segment = ?"
    yield from wrong_checkpoints(segment, rows(db, select, segment.number))


def _vectors(vectors: VectorTable) -> Iterator[Finding]:
    for number, entry in vectors.damaged():
        problem = f"vector {number} is altered, or its passage is missing"
        yield Finding(kind="vector", what=problem, derived=True, segment=entry >> 32 if isinstance(entry, int) else 0)
    for segment, name in vectors.mistaken():
        problem = f"passages without a vector of {name!r} are not listed as waiting"
        yield Finding(kind="vector", what=problem, derived=True, segment=segment)

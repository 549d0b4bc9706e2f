"""Repairs what can be repaired in a file, and removes what stays of erased sessions.

Derived data (the text index, counters) is made again. Records that cannot be read are quarantined, byte for byte.
"""

from __future__ import annotations

import apsw

from kilburn.backend import MAX_NAME_CHARS, SegmentKind, State
from kilburn.backends import citations, histories, mentions
from kilburn.backends.codec import COLD, digest_of_stored
from kilburn.backends.connection import row, rows
from kilburn.backends.contenttable import OF_NO_PAGE, Wholes, remove_unused, searchable_text
from kilburn.backends.passages import passages
from kilburn.backends.ranked import make_entry, passage_number
from kilburn.backends.records import (
    UNREADABLE,
    act_name,
    compute_seal,
    decode_page,
    is_observation,
    page_call_id,
    record_of_event,
)
from kilburn.backends.sealed import COUNTERS, SealedRows, SegmentRow, seal_of_segment, shown
from kilburn.backends.textindex import PassageWords, TextIndex, passage_words
from kilburn.backends.transaction import index_pages, sealed_event, set_counters, set_states
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.page import Page, Place

KINDS = frozenset(kind.encode() for kind in SegmentKind)


OF_NO_SESSION = "WHERE segment NOT IN (SELECT id FROM segment NOT INDEXED)"


DELETE_REMAINS = (
    "DELETE FROM page WHERE segment = ?",
    "DELETE FROM event WHERE segment = ?",
    "DELETE FROM mention WHERE segment = ?",
    "DELETE FROM history WHERE segment = ?",
    "DELETE FROM checkpoint WHERE segment = ?",
    "DELETE FROM embedded WHERE segment = ?",
    "DELETE FROM quarantine WHERE segment = ?",
)
"""Statements that remove the rest of a segment after its texts, passages, vectors and citations."""


def rebuild(db: apsw.Connection, sealed: SealedRows, index: TextIndex, vectors: VectorTable, tenant: int) -> None:
    """Rebuild text index, index of citations and counters from pages and ledger, remove damaged vectors and unused content, and
    quarantine stray rows and unreadable observations."""
    _redigest(db, tenant)
    db.execute("REINDEX")
    index.drop()
    index.create()
    # These belong to no segment; those of segments are rebuilt below.
    db.execute("DELETE FROM passage WHERE id >> 32 NOT IN (SELECT id FROM segment NOT INDEXED)")
    digests: set[str] | None = set()
    db.execute("DELETE FROM checkpoint WHERE segment IN (SELECT id FROM segment NOT INDEXED WHERE tenant = ?)", (tenant,))
    # Whoever recognises histories derives the digests from the pages again. The rows of replies are rebuilt below.
    db.execute(f"DELETE FROM history {OF_NO_SESSION}")
    delete_digests = "DELETE FROM history WHERE message > 0 AND segment IN (SELECT id FROM segment NOT INDEXED WHERE tenant = ?)"
    db.execute(delete_digests, (tenant,))
    for segment in sealed.segments(tenant):
        digests = _relink(db, sealed, tenant, segment, digests)
        if segment.quarantined:
            continue
        if not segment.damaged:
            _quarantine_strays(db, sealed, segment)
        _quarantine_observations(db, sealed, segment)
        _restate(db, sealed, segment)
        entries, characters = _rebuild_segment(db, index, segment)
        _recount(db, sealed, segment, entries, characters)
    segments = [segment for segment in sealed.segments(tenant) if not segment.damaged]
    db.executemany("DELETE FROM citation WHERE citing_segment = ?", [(segment.number,) for segment in segments])
    citations.add(db, citations.cited_by((segment, sealed.each_page(segment)) for segment in segments))
    mentions.fill(db, [segment.number for segment in segments])
    for session in segments:
        histories.fill_replies(db, tenant, session.number)
        calls = [
            (page_call_id(page), session.number, number)
            for number, page, _ in sealed.each_page(session)
            if isinstance(page, Page)
        ]
        db.executemany("UPDATE page SET call = ?1 WHERE segment = ?2 AND id = ?3 AND call IS NOT ?1", calls)
    vectors.clean()
    # The text of an unreadable page is unknown, so nothing is removed then.
    for number, digest in rows(db, f"SELECT id, CAST(digest AS BLOB) FROM content WHERE tenant = ? AND {OF_NO_PAGE}", tenant):
        if digests is not None and not (isinstance(digest, bytes) and digest.hex() in digests):
            db.execute("DELETE FROM content WHERE id = ?", (number,))
    db.execute(
        "UPDATE tenant SET sessions = (SELECT count(*) FROM segment NOT INDEXED WHERE tenant = ?1) WHERE id = ?1", (tenant,)
    )


def _redigest(db: apsw.Connection, tenant: int) -> None:
    """Store texts with damaged digests under their actual digests."""
    for number, digest, size, codec, data in rows(
        db, "SELECT id, digest, size, codec, data FROM content NOT INDEXED WHERE tenant = ? AND codec <> ?", tenant, COLD
    ):
        try:
            actual = digest_of_stored(codec, data, size, Wholes(db).text)
        except StoreCorrupt:
            continue
        if actual != digest:
            db.execute("UPDATE OR IGNORE content SET digest = ? WHERE id = ?", (actual, number))


def content_row(db: apsw.Connection, tenant: int, digest: str) -> int | None:
    """Return the number of a text's row."""
    content = row(db, "SELECT id FROM content WHERE tenant = ? AND digest = ?", tenant, bytes.fromhex(digest)) if digest else None
    return content[0] if content else None


def _relink(
    db: apsw.Connection, sealed: SealedRows, tenant: int, segment: SegmentRow, digests: set[str] | None
) -> set[str] | None:
    """Let a segment's pages refer to the rows of the texts that they name. Return the digests named so far, or None once a page
    is unreadable."""
    for number, page, _ in sealed.each_page(segment):
        if isinstance(page, str):
            digests = None
            continue
        db.execute(
            "UPDATE page SET content = ?1, extra = ?2 WHERE segment = ?3 AND id = ?4 AND (content IS NOT ?1 OR extra IS NOT ?2)",
            (content_row(db, tenant, page.digest), content_row(db, tenant, page.extra), segment.number, number),
        )
        if digests is not None:
            digests |= {page.digest, page.extra}
    return digests


def _quarantine(db: apsw.Connection, segment: int, kind: str, number: int, record: object) -> None:
    data = record if isinstance(record, bytes) else repr(record).encode()
    db.execute(
        "INSERT INTO quarantine(segment, kind, number, record) VALUES(?, ?, ?, ?)",
        (segment, kind, number if isinstance(number, int) else 0, data),
    )


def _quarantine_strays(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> None:
    """Quarantine rows that came from elsewhere: events after the head, and damaged pages if all of the segment's own pages are
    present."""
    for number, _, body, _ in stored_events(db, segment):
        if not isinstance(number, int) or number > segment.head:
            _quarantine(db, segment.number, "event", number, body)
            db.execute("DELETE FROM event WHERE segment = ? AND number IS ?", (segment.number, number))
    page_rows = list(sealed.each_page(segment))
    strays = [number for number, page, _ in page_rows if isinstance(page, str)]
    if len(page_rows) - len(strays) != segment.pages:
        return
    for number in strays:
        ((record,),) = rows(db, "SELECT record FROM page WHERE segment = ? AND id IS ?", segment.number, number)
        _quarantine(db, segment.number, "page", number, record)
        db.execute("DELETE FROM page WHERE segment = ? AND id IS ?", (segment.number, number))


def _quarantine_observations(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> None:
    """Replace unreadable observations by notes."""
    time = 0.0
    for number, act, body, seal in stored_events(db, segment):
        event = sealed.event(segment.number, number, act, body, seal)
        if isinstance(event, Event):
            time = event.time
        elif is_observation(act, body) and not is_fork_note(db, segment, number):
            _quarantine(db, segment.number, "event", number, body)
            note = Event(number=number, act=Act.NOTE, time=time, policy="user", cause="user", data={"quarantined": act_name(act)})
            *_, stands, note_body, sealing = sealed_event(segment.number, note, record_of_event(note))
            db.execute(
                "UPDATE event SET act = ?, body = ?, seal = ? WHERE segment = ? AND number = ?",
                (stands, note_body, sealing, segment.number, number),
            )


def _restate(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> None:
    """Replace altered states of pages by readable ones. The right state follows from the ledger (see `kilburn fsck`)."""
    wrong = [number for number, page, state in sealed.each_page(segment) if isinstance(page, Page) and isinstance(state, str)]
    set_states(db, segment.number, dict.fromkeys(wrong, State()))


def _rebuild_segment(db: apsw.Connection, index: TextIndex, segment_row: SegmentRow) -> tuple[int, int]:
    """Rebuild the index of a segment. A page keeps the numbers of its passages if they fit its text, because its vectors have
    these numbers; otherwise it gets new ones.

    Returns:
        The number of entries ever added, and their total characters.
    """
    segment = segment_row.number
    select = (
        "SELECT id, first_passage, last_passage, record FROM page"
        " WHERE segment = ? AND first_passage IS NOT NULL AND content IS NOT NULL ORDER BY first_passage DESC"
    )
    reused: list[tuple[int, int, int, int]] = []
    words: list[tuple[int, str]] = []
    unindexed: list[tuple[int, list[PassageWords]]] = []
    for page, first, last, record in rows(db, select, segment):
        try:
            text, by_user = searchable_text(db, segment, page), decode_page(record).is_by_user
        except (StoreCorrupt, *UNREADABLE):
            # The inspection reports it; an unreadable page cannot be searched.
            continue
        expected = [
            (make_entry(segment, number, stop - start, by_user=by_user), page, start, stop)
            for number, (start, stop) in enumerate(passages(text), passage_number(last))
        ]
        intruders = {owner for (owner,) in rows(db, "SELECT page FROM passage WHERE id BETWEEN ? AND ?", first, last)} - {page}
        if expected and (expected[0][0], expected[-1][0]) == (last, first) and not intruders:
            reused += expected
            words += [(entry, text[start:stop]) for entry, _, start, stop in expected]
        else:
            unindexed.append((page, passage_words(text, by_user=by_user)))
    db.execute("DELETE FROM passage WHERE id BETWEEN ? AND ?", (segment << 32, (segment + 1 << 32) - 1))
    db.executemany("INSERT INTO passage(id, page, start, stop) VALUES(?, ?, ?, ?)", reused)
    whole = {page for _, page, _, _ in reused}
    for (page,) in rows(db, "SELECT id FROM page WHERE segment = ? AND first_passage IS NOT NULL", segment):
        if page not in whole:
            db.execute("UPDATE page SET first_passage = NULL, last_passage = NULL WHERE segment = ? AND id = ?", (segment, page))
    index.put(words)
    count = max([segment_row.passages, *(passage_number(entry) + 1 for entry, *_ in reused)])
    characters = segment_row.characters or sum(stop - start for *_, start, stop in reused)
    entries = index_pages(db, index, segment, count, unindexed)
    return count + len(entries), characters + sum(entry.stop - entry.start for entry in entries)


def _recount(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow, entries: int, characters: int) -> None:
    """Store a segment's counters: all recounted if they were altered, otherwise only the given ones of the index."""
    ((last_used, head, pages, tokens, _, _, created),) = rows(
        db, f"SELECT {', '.join(COUNTERS)}, created FROM segment WHERE id = ?", segment.number
    )
    if "counters" in segment.damaged:
        pages_read = [page for _, page, _ in sealed.each_page(segment) if isinstance(page, Page)]
        events = [sealed.event(segment.number, *stored_event) for stored_event in stored_events(db, segment)]
        head, pages, tokens = len(events), len(pages_read), sum(page.tokens for page in pages_read)
        last_used = max([created, *(event.time for event in events if isinstance(event, Event))])
    elif segment.damaged:
        return
    set_counters(db, segment.number, (last_used, head, pages, tokens, entries, characters))


def stored_events(db: apsw.Connection, segment: SegmentRow) -> list[tuple[int, bytes, bytes, object]]:
    """Return the rows of a ledger in order: number, act, body, seal."""
    select = "SELECT number, CAST(act AS BLOB), body, seal FROM event WHERE segment = ? ORDER BY number"
    return [(number, act, body, seal) for number, act, body, seal in rows(db, select, segment.number)]


def is_fork_note(db: apsw.Connection, segment: SegmentRow, number: int) -> bool:
    """Whether an event is a branch's note of the pages that it inherited: its own pages are numbered from there."""
    first = row(db, "SELECT min(id) FROM page WHERE segment = ? AND id > 0", segment.number) if number == 1 else None
    return first is not None and (first[0] or 0) > 1


def erase_session(db: apsw.Connection, segment: int) -> None:
    """Delete a segment's rows and the texts that no other segment has; `rebuild` removes its words from the index.

    Raises:
        StoreStale: a page of another segment cites one of it.
    """
    select = "SELECT citing_segment, citing_page FROM citation WHERE segment = ?1 AND citing_segment <> ?1 LIMIT 1"
    citer = row(db, select, segment)
    if citer is not None:
        message = f"segment {segment} is cited by {shown(citer[1])} of segment {citer[0]}"
        raise StoreStale(message, advice="forget what cites it first, then do it again")
    texts = "SELECT content FROM page WHERE segment = ?1 UNION SELECT extra FROM page WHERE segment = ?1"
    contents = [number for (number,) in rows(db, texts, segment) if number is not None]
    for statement in (
        *DELETE_REMAINS,
        "DELETE FROM passage WHERE id >> 32 = ?",
        "DELETE FROM vector WHERE entry >> 32 = ?",
        "DELETE FROM citation WHERE citing_segment = ?",
        "DELETE FROM segment WHERE id = ?",
    ):
        db.execute(statement, (segment,))
    remove_unused(db, contents)


def erase_segment(db: apsw.Connection, segment_row: SegmentRow, tenant: int) -> None:
    """Delete the rest of a segment whose pages are all forgotten. An empty row keeps its number, which other ledgers contain.

    Raises:
        StoreError: it has pages that are not forgotten.
    """
    segment = segment_row.number
    remaining = row(db, "SELECT count(*) FROM page WHERE segment = ? AND place != ?", segment, Place.DROPPED)
    if remaining is None or remaining[0]:
        raise StoreError(f"segment {segment} has pages that are not forgotten", advice="forget them first")
    for statement in DELETE_REMAINS:
        db.execute(statement, (segment,))
    citations.remove(db, [citations.forgotten_mark(segment, citations.WHOLE)])
    name, kind = f"@forgotten/{segment}", SegmentKind.FORGOTTEN.value
    seal = seal_of_segment(segment, tenant, name.encode(), 0.0, 0, kind.encode(), b"")
    db.execute(
        "UPDATE segment SET name = ?, created = 0.0, kind = ?, owner = '', seal = ? WHERE id = ?", (name, kind, seal, segment)
    )
    set_counters(db, segment, (0.0, 0, 0, 0, 0, 0))


def quarantine_session(db: apsw.Connection, tenant: int, segment: int) -> str:
    """Rename an unreadable segment to a quarantine name, which is returned. Its other rows stay as they are."""
    select = (
        "SELECT CAST(name AS BLOB), created, CAST(kind AS BLOB), CAST(owner AS BLOB) FROM segment WHERE id = ? AND tenant = ?"
    )
    segment_row = row(db, select, segment, tenant)
    if segment_row is None:
        raise StoreError(f"no segment {segment} here", advice="open it by name with `segment`")
    old_name, created, kind, owner = segment_row
    old_name = old_name.decode("utf-8", "replace") if isinstance(old_name, bytes) else f"session {segment}"
    created = created if isinstance(created, float) else 0.0
    suffix = f" (quarantined, {segment})"
    name = old_name[: MAX_NAME_CHARS - len(suffix)] + suffix
    kind = kind if kind in KINDS else b"session"
    owner = owner if isinstance(owner, bytes) else b""
    seal = seal_of_segment(segment, tenant, name.encode(), created, 1, kind, owner)
    db.execute(
        "UPDATE segment SET name = ?, created = ?, quarantined = 1, kind = ?, owner = ?, seal = ? WHERE id = ?",
        (name, created, kind.decode(), owner.decode("utf-8", "replace"), seal, segment),
    )
    ((*counters,),) = rows(db, f"SELECT {', '.join(COUNTERS)} FROM segment WHERE id = ?", segment)
    db.execute("UPDATE segment SET counters_seal = ? WHERE id = ?", (compute_seal("counters", segment, *counters), segment))
    return name

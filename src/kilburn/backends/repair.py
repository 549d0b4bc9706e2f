"""Repairs what can be repaired in a file, and removes what stays of erased sessions.

Derived data (the text index, counters) is made again. Records that cannot be read are quarantined, byte for byte.
"""

from __future__ import annotations

import apsw

from kilburn.backend import LONGEST_NAME, SegmentKind, State
from kilburn.backends import citations, histories, mentions
from kilburn.backends.codec import COLD, digest_of_stored
from kilburn.backends.connection import row, rows
from kilburn.backends.contenttable import OF_NO_PAGE, Wholes, remove_unused, searchable_of
from kilburn.backends.passages import passages
from kilburn.backends.ranked import entry_of, length_class, number_of
from kilburn.backends.records import act_name, call_of, is_observation, seal_of
from kilburn.backends.sealed import COUNTERS, SealedRows, SegmentRow, seal_of_segment, shown
from kilburn.backends.textindex import TextIndex, words_of
from kilburn.backends.transaction import index_pages, sealed_event, set_counters, set_states
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.page import Page, Place

KINDS = frozenset(kind.encode() for kind in SegmentKind)


OF_NO_SESSION = "WHERE segment NOT IN (SELECT id FROM segment NOT INDEXED)"


LEFT = (
    "DELETE FROM page WHERE segment = ?",
    "DELETE FROM event WHERE segment = ?",
    "DELETE FROM mention WHERE segment = ?",
    "DELETE FROM history WHERE segment = ?",
    "DELETE FROM checkpoint WHERE segment = ?",
    "DELETE FROM embedded WHERE segment = ?",
    "DELETE FROM quarantine WHERE segment = ?",
)
"""Removes what stays of a segment when its texts, their passages and vectors, and what they cite are gone."""


def rebuild(db: apsw.Connection, sealed: SealedRows, index: TextIndex, vectors: VectorTable, tenant: int) -> None:
    """Make text index, index of citations and counters again from pages and ledger, remove damaged vectors and content that
    no page uses, and quarantine stray rows and observations that cannot be read."""
    _redigest(db, tenant)
    db.execute("REINDEX")
    index.drop()
    index.create()
    # No session has these; those of a session are made again below.
    db.execute("DELETE FROM passage WHERE id >> 32 NOT IN (SELECT id FROM segment NOT INDEXED)")
    named: set[str] | None = set()
    db.execute("DELETE FROM checkpoint WHERE segment IN (SELECT id FROM segment NOT INDEXED WHERE tenant = ?)", (tenant,))
    # Whoever recognises histories makes them again from the pages. Where a reply is, the ledger says: see below.
    db.execute(f"DELETE FROM history {OF_NO_SESSION}")
    said = "DELETE FROM history WHERE message > 0 AND segment IN (SELECT id FROM segment NOT INDEXED WHERE tenant = ?)"
    db.execute(said, (tenant,))
    for segment in sealed.segments(tenant):
        named = _relink(db, sealed, tenant, segment, named)
        if segment.quarantined:
            continue
        if not segment.damaged:
            _quarantine_strays(db, sealed, segment)
        _quarantine_observations(db, sealed, segment)
        _restate(db, sealed, segment)
        made, characters = _rebuild_segment(db, index, segment)
        _recount(db, sealed, segment, made, characters)
    segments = [one for one in sealed.segments(tenant) if not one.damaged]
    db.executemany("DELETE FROM citation WHERE citing_segment = ?", [(one.number,) for one in segments])
    citations.add(db, citations.cited_by((one, sealed.each_page(one)) for one in segments))
    mentions.fill(db, [one.number for one in segments])
    for one in segments:
        histories.fill_replies(db, tenant, one.number)
        calls = [(call_of(page), one.number, number) for number, page, _ in sealed.each_page(one) if isinstance(page, Page)]
        db.executemany("UPDATE page SET call = ?1 WHERE segment = ?2 AND id = ?3 AND call IS NOT ?1", calls)
    vectors.clean()
    # If a page cannot be read, its text is not known either.
    for number, digest in rows(db, f"SELECT id, CAST(digest AS BLOB) FROM content WHERE tenant = ? AND {OF_NO_PAGE}", tenant):
        if named is not None and not (isinstance(digest, bytes) and digest.hex() in named):
            db.execute("DELETE FROM content WHERE id = ?", (number,))
    db.execute(
        "UPDATE tenant SET sessions = (SELECT count(*) FROM segment NOT INDEXED WHERE tenant = ?1) WHERE id = ?1", (tenant,)
    )


def _redigest(db: apsw.Connection, tenant: int) -> None:
    """Store texts whose digest was damaged under their real digest again."""
    for number, digest, size, codec, data in rows(
        db, "SELECT id, digest, size, codec, data FROM content NOT INDEXED WHERE tenant = ? AND codec <> ?", tenant, COLD
    ):
        try:
            own = digest_of_stored(codec, data, size, Wholes(db).text)
        except StoreCorrupt:
            continue
        if own != digest:
            db.execute("UPDATE OR IGNORE content SET digest = ? WHERE id = ?", (own, number))


def content_row(db: apsw.Connection, tenant: int, digest: str) -> int | None:
    """Return the number of a text's row."""
    found = row(db, "SELECT id FROM content WHERE tenant = ? AND digest = ?", tenant, bytes.fromhex(digest)) if digest else None
    return found[0] if found else None


def _relink(db: apsw.Connection, sealed: SealedRows, tenant: int, segment: SegmentRow, named: set[str] | None) -> set[str] | None:
    """Let a session's pages refer to the rows of the texts that they name; returns the digests named so far, or None
    once a page cannot be read."""
    for number, page, _ in sealed.each_page(segment):
        if isinstance(page, str):
            named = None
            continue
        db.execute(
            "UPDATE page SET content = ?1, extra = ?2 WHERE segment = ?3 AND id = ?4 AND (content IS NOT ?1 OR extra IS NOT ?2)",
            (content_row(db, tenant, page.digest), content_row(db, tenant, page.extra), segment.number, number),
        )
        if named is not None:
            named |= {page.digest, page.extra}
    return named


def _quarantine(db: apsw.Connection, segment: int, kind: str, number: int, record: object) -> None:
    stored = record if isinstance(record, bytes) else repr(record).encode()
    db.execute(
        "INSERT INTO quarantine(segment, kind, number, record) VALUES(?, ?, ?, ?)",
        (segment, kind, number if isinstance(number, int) else 0, stored),
    )


def _quarantine_strays(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> None:
    """Quarantine rows that came from elsewhere: events after the head, and damaged pages if all of the session's own
    pages are here."""
    for number, _, body, _ in stored_events(db, segment):
        if not isinstance(number, int) or number > segment.head:
            _quarantine(db, segment.number, "event", number, body)
            db.execute("DELETE FROM event WHERE segment = ? AND number IS ?", (segment.number, number))
    read = list(sealed.each_page(segment))
    strays = [number for number, page, _ in read if isinstance(page, str)]
    if len(read) - len(strays) != segment.pages:
        return
    for number in strays:
        ((record,),) = rows(db, "SELECT record FROM page WHERE segment = ? AND id IS ?", segment.number, number)
        _quarantine(db, segment.number, "page", number, record)
        db.execute("DELETE FROM page WHERE segment = ? AND id IS ?", (segment.number, number))


def _quarantine_observations(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> None:
    """Replace an observation that cannot be read by a note."""
    time = 0.0
    for number, act, body, seal in stored_events(db, segment):
        event = sealed.event(segment.number, number, act, body, seal)
        if isinstance(event, Event):
            time = event.time
        elif is_observation(act, body) and not is_fork_note(db, segment, number):
            _quarantine(db, segment.number, "event", number, body)
            note = Event(number=number, act=Act.NOTE, time=time, policy="user", cause="user", data={"quarantined": act_name(act)})
            *_, stands, again, sealing = sealed_event(segment.number, note)
            db.execute(
                "UPDATE event SET act = ?, body = ?, seal = ? WHERE segment = ? AND number = ?",
                (stands, again, sealing, segment.number, number),
            )


def _restate(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow) -> None:
    """Replace a page's state that was altered by a readable one. The right state follows from the ledger (see `kilburn
    fsck`)."""
    wrong = [number for number, page, state in sealed.each_page(segment) if isinstance(page, Page) and isinstance(state, str)]
    set_states(db, segment.number, dict.fromkeys(wrong, State()))


def _rebuild_segment(db: apsw.Connection, index: TextIndex, stored: SegmentRow) -> tuple[int, int]:
    """Index a session's pages again. A page whose passages have numbers that fit its text keeps them, because their vectors
    are known by them; any other gets new ones.

    Returns:
        Entries ever made, and their characters together.
    """
    segment = stored.number
    select = (
        "SELECT id, first_passage, last_passage FROM page"
        " WHERE segment = ? AND first_passage IS NOT NULL AND content IS NOT NULL ORDER BY first_passage DESC"
    )
    kept: list[tuple[int, int, int, int]] = []
    words: list[tuple[int, str]] = []
    again: list[tuple[int, str]] = []
    for page, first, last in rows(db, select, segment):
        try:
            text = searchable_of(db, segment, page)
        except StoreCorrupt:
            # Reported by `inspect`; what cannot be read cannot be searched.
            continue
        own = [
            (entry_of(segment, number, length_class(stop - start)), page, start, stop)
            for number, (start, stop) in enumerate(passages(text), number_of(last))
        ]
        others = {other for (other,) in rows(db, "SELECT page FROM passage WHERE id BETWEEN ? AND ?", first, last)} - {page}
        if own and (own[0][0], own[-1][0]) == (last, first) and not others:
            kept += own
            words += [(entry, text[start:stop]) for entry, _, start, stop in own]
        else:
            again.append((page, text))
    db.execute("DELETE FROM passage WHERE id BETWEEN ? AND ?", (segment << 32, (segment + 1 << 32) - 1))
    db.executemany("INSERT INTO passage(id, page, start, stop) VALUES(?, ?, ?, ?)", kept)
    whole = {page for _, page, _, _ in kept}
    for (page,) in rows(db, "SELECT id FROM page WHERE segment = ? AND first_passage IS NOT NULL", segment):
        if page not in whole:
            db.execute("UPDATE page SET first_passage = NULL, last_passage = NULL WHERE segment = ? AND id = ?", (segment, page))
    index.put(words)
    made = max([stored.passages, *(number_of(entry) + 1 for entry, *_ in kept)])
    characters = stored.characters or sum(stop - start for *_, start, stop in kept)
    entries = index_pages(db, index, segment, made, [(page, words_of(text)) for page, text in again])
    return made + len(entries), characters + sum(one.stop - one.start for one in entries)


def _recount(db: apsw.Connection, sealed: SealedRows, segment: SegmentRow, entries: int, characters: int) -> None:
    """Count a session again: all counters if they were altered, else only those of the index, which are given."""
    ((used, head, pages, tokens, _, _, created),) = rows(
        db, f"SELECT {', '.join(COUNTERS)}, created FROM segment WHERE id = ?", segment.number
    )
    if "counters" in segment.damaged:
        read = [page for _, page, _ in sealed.each_page(segment) if isinstance(page, Page)]
        events = [sealed.event(segment.number, *one) for one in stored_events(db, segment)]
        head, pages, tokens = len(events), len(read), sum(page.tokens for page in read)
        used = max([created, *(event.time for event in events if isinstance(event, Event))])
    elif segment.damaged:
        return
    set_counters(db, segment.number, (used, head, pages, tokens, entries, characters))


def stored_events(db: apsw.Connection, segment: SegmentRow) -> list[tuple[int, bytes, bytes, object]]:
    """Return the rows of a ledger in order: number, act, body, seal."""
    select = "SELECT number, CAST(act AS BLOB), body, seal FROM event WHERE segment = ? ORDER BY number"
    return [(number, act, body, seal) for number, act, body, seal in rows(db, select, segment.number)]


def is_fork_note(db: apsw.Connection, segment: SegmentRow, number: int) -> bool:
    """Whether an event is the note of a branch that says which pages it inherited: its own are numbered on from these."""
    first = row(db, "SELECT min(id) FROM page WHERE segment = ? AND id > 0", segment.number) if number == 1 else None
    return first is not None and (first[0] or 0) > 1


def erase_session(db: apsw.Connection, segment: int) -> None:
    """Delete a session's rows and the texts that no other session has; `rebuild` takes its words out of the index.

    Raises:
        StoreStale: a page of another segment cites one of it.
    """
    select = "SELECT citing_segment, citing_page FROM citation WHERE segment = ?1 AND citing_segment <> ?1 LIMIT 1"
    citer = row(db, select, segment)
    if citer is not None:
        what = f"segment {segment} is cited by {shown(citer[1])} of segment {citer[0]}"
        raise StoreStale(what, advice="forget what cites it first, then do it again")
    texts = "SELECT content FROM page WHERE segment = ?1 UNION SELECT extra FROM page WHERE segment = ?1"
    contents = [number for (number,) in rows(db, texts, segment) if number is not None]
    for statement in (
        *LEFT,
        "DELETE FROM passage WHERE id >> 32 = ?",
        "DELETE FROM vector WHERE entry >> 32 = ?",
        "DELETE FROM citation WHERE citing_segment = ?",
        "DELETE FROM segment WHERE id = ?",
    ):
        db.execute(statement, (segment,))
    remove_unused(db, contents)


def erase_segment(db: apsw.Connection, stored: SegmentRow, tenant: int) -> None:
    """Delete what is left of a segment of which every page is forgotten. An empty row keeps its number, which is in
    the ledgers of others.

    Raises:
        StoreError: it has pages that are not forgotten.
    """
    segment = stored.number
    left = row(db, "SELECT count(*) FROM page WHERE segment = ? AND place != ?", segment, Place.DROPPED)
    if left is None or left[0]:
        raise StoreError(f"segment {segment} has pages that are not forgotten", advice="forget them first")
    for statement in LEFT:
        db.execute(statement, (segment,))
    citations.remove(db, [citations.mark_of(segment, citations.WHOLE)])
    name, kind = f"@forgotten/{segment}", SegmentKind.FORGOTTEN.value
    seal = seal_of_segment(segment, tenant, name.encode(), 0.0, 0, kind.encode(), b"")
    db.execute(
        "UPDATE segment SET name = ?, created = 0.0, kind = ?, owner = '', seal = ? WHERE id = ?", (name, kind, seal, segment)
    )
    set_counters(db, segment, (0.0, 0, 0, 0, 0, 0))


def quarantine_session(db: apsw.Connection, tenant: int, segment: int) -> str:
    """Give a session that cannot be read a name that says so; returns it. Its rows stay as they are."""
    select = (
        "SELECT CAST(name AS BLOB), created, CAST(kind AS BLOB), CAST(owner AS BLOB) FROM segment WHERE id = ? AND tenant = ?"
    )
    found = row(db, select, segment, tenant)
    if found is None:
        raise StoreError(f"no segment {segment} here", advice="open it by name with `segment`")
    before, created, kind, owner = found
    before = before.decode("utf-8", "replace") if isinstance(before, bytes) else f"session {segment}"
    created = created if isinstance(created, float) else 0.0
    suffix = f" (quarantined, {segment})"
    name = before[: LONGEST_NAME - len(suffix)] + suffix
    kind = kind if kind in KINDS else b"session"
    owner = owner if isinstance(owner, bytes) else b""
    seal = seal_of_segment(segment, tenant, name.encode(), created, 1, kind, owner)
    db.execute(
        "UPDATE segment SET name = ?, created = ?, quarantined = 1, kind = ?, owner = ?, seal = ? WHERE id = ?",
        (name, created, kind.decode(), owner.decode("utf-8", "replace"), seal, segment),
    )
    ((*counters,),) = rows(db, f"SELECT {', '.join(COUNTERS)} FROM segment WHERE id = ?", segment)
    db.execute("UPDATE segment SET counters_seal = ? WHERE id = ?", (seal_of("counters", segment, *counters), segment))
    return name

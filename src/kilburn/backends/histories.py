"""The index of histories: digests of each session's messages, by which a client's history is recognised.

Each digest covers a message and all messages before it. Whoever recognises histories derives them from the pages. A session with
a forgotten page has none: a trigger in the file removes them.

A client may also name the reply that it continues. The note of such a reply has a row whose `message` is the negated number of
the note. These rows are derived from the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import apsw

from kilburn.backend import Digests, HistoryOwner, root_name
from kilburn.backends.connection import insert, row, rows
from kilburn.backends.records import UNREADABLE, decode_event
from kilburn.event import Act, Event

KEY_CHARS = 24
"""Characters of a reply's key; the digests of a history have another length."""


_UP_TO = "WHERE segment = ?1 AND message = ?2 AND is_last AND last_page = ifnull(?3, last_page)"


def reply_rows(events: Iterable[Event]) -> list[tuple[int, bytes]]:
    """Return the rows of the replies that these events note: negated number, key."""
    noted = [(event.number, event.data.get("reply")) for event in events if event.act is Act.NOTE]
    return [(-number, key.encode()) for number, key in noted if isinstance(key, str) and len(key) == KEY_CHARS and key.isascii()]


def add_replies(db: apsw.Connection, tenant: int, segment: int, replies: Sequence[tuple[int, bytes]]) -> None:
    """Add the rows of replies; existing ones stay."""
    db.executemany(
        "INSERT INTO history(segment, message, tenant, digest, is_last, last_page) VALUES(?, ?, ?, ?, 0, 0)"
        " ON CONFLICT DO NOTHING",
        [(segment, at, tenant, key) for at, key in replies],
    )


def replies(db: apsw.Connection, segment: int) -> list[tuple[int, bytes]]:
    """Return the rows of a session's replies."""
    select = "SELECT message, digest FROM history WHERE segment = ? AND message < 0"
    return [(message, key) for message, key in rows(db, select, segment)]


def replies_in(db: apsw.Connection, segment: int) -> tuple[list[tuple[int, bytes]], set[int]]:
    """Return the rows of replies according to a session's ledger, and the numbers of the unreadable events."""
    noted, unread = list[Event](), set[int]()
    for number, body in rows(db, "SELECT number, body FROM event WHERE segment = ? AND act = ?", segment, Act.NOTE.value):
        try:
            noted.append(decode_event(body))
        except UNREADABLE:
            unread.add(number)
    return reply_rows(noted), unread


def fill_replies(db: apsw.Connection, tenant: int, segment: int) -> None:
    """Rebuild the rows of a session's replies."""
    db.execute("DELETE FROM history WHERE segment = ? AND message <= 0", (segment,))
    add_replies(db, tenant, segment, replies_in(db, segment)[0])


def put(db: apsw.Connection, tenant: int, segment: int, digests: Digests, page: int) -> bool:
    """Store a session's digests behind its first ones. Return whether they were stored."""
    fits = (
        "SELECT 1 FROM segment WHERE id = ?1 AND tenant = ?2"
        " AND ?3 = (SELECT max(page.id) FROM page WHERE page.segment = ?1)"
        " AND NOT EXISTS(SELECT 1 FROM page WHERE content IS NULL AND page.segment = ?1)"
        " AND (?4 = 0 OR EXISTS(SELECT 1 FROM history WHERE history.segment = ?1 AND message = ?4 AND is_last))"
    )
    if row(db, fits, segment, tenant, page, digests.offset) is None:
        return False
    _put(db, tenant, segment, digests, None, page)
    return len(digests.added) + digests.offset > 0


def add(db: apsw.Connection, tenant: int, segment: int, digests: Digests, first: int, last: int) -> None:
    """Store the digests of new pages in the transaction that adds them, if the digests before them are complete and no page was
    forgotten."""
    if (
        not digests.offset
        and first > 1
        and row(db, "SELECT 1 FROM page WHERE content IS NULL AND segment = ?", segment) is not None
    ):
        return
    _put(db, tenant, segment, digests, first - 1, last)


def _put(db: apsw.Connection, tenant: int, segment: int, history: Digests, last_page: int | None, page: int) -> None:
    """Store digests behind the first ones, if these are complete up to page `last_page`; None for any page."""
    count, digests = history.offset, history.added
    if not count:
        db.execute("DELETE FROM history WHERE segment = ? AND message > 0", (segment,))
    elif not history.inherits:
        changes = db.total_changes()
        if digests:
            db.execute(f"UPDATE history SET is_last = 0 {_UP_TO}", (segment, count, last_page))
        else:
            db.execute(f"UPDATE history SET last_page = ?4 {_UP_TO}", (segment, count, last_page, page))
        if db.total_changes() == changes:
            return
    end = count + len(digests)
    numbered = enumerate(zip_longest(digests, history.tails), count + 1)
    new = [(segment, at, tenant, digest, int(at == end), page, tail) for at, (digest, tail) in numbered]
    insert(db, "INSERT INTO history(segment, message, tenant, digest, is_last, last_page, tail) VALUES(?, ?, ?, ?, ?, ?, ?)", new)


def owners(db: apsw.Connection, tenant: int, digest: bytes, limit: int, *, tail: bool) -> list[HistoryOwner]:
    """See `kilburn.backend.HistoryIndex`."""
    select = (
        "SELECT name, message, (SELECT max(message) FROM history AS own WHERE own.segment = history.segment) FROM history"
        " JOIN segment ON segment.id = history.segment AND NOT quarantined"
        f" WHERE history.tenant = ? AND {'tail' if tail else 'digest'} = ?"
        " ORDER BY is_last DESC, history.segment DESC LIMIT ?"
    )
    return [HistoryOwner(name=name, at=at, count=count) for name, at, count in rows(db, select, tenant, digest, limit)]


def missing(db: apsw.Connection, tenant: int, root: str, user: str, limit: int) -> list[str]:
    """See `kilburn.backend.HistoryIndex`."""
    select = (
        "SELECT name FROM segment WHERE tenant = ?1 AND (name = ?2 OR (name > ?2 || '~' AND name < ?2 || '~:')"
        " OR (name > ?2 || '/b' AND name < ?2 || '/b:'))"
        " AND owner = ?3 AND kind = 'session' AND pages > 0 AND NOT quarantined"
        " AND NOT EXISTS(SELECT 1 FROM history WHERE segment = segment.id AND is_last"
        " AND last_page = (SELECT max(page.id) FROM page WHERE page.segment = segment.id))"
        " ORDER BY used DESC LIMIT ?4"
    )
    names = [name for (name,) in rows(db, select, tenant, root, user, limit)]
    return [name for name in names if root_name(name) == root]

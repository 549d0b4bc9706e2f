"""The index of histories: what each session has said, as digests by which a history is recognised that a client hands over.

Each digest is over a message and all that came before it. Whoever recognises histories derives them from the pages. A session of
which anything was forgotten has none: a trigger of the file sees to that.

A client may also name the reply from which it goes on. The note of such a reply has a row of its own; there `message` is the
number of the note, negated. These rows are derived from the ledger, and stay as long as it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import apsw

from kilburn.backend import Digests, HistoryOwner, root_of
from kilburn.backends.connection import insert, row, rows
from kilburn.backends.records import UNREADABLE, event_of
from kilburn.event import Act, Event

KEY = 24
"""Letters of a reply's key; the digests of a history have another length."""


_UP_TO = "WHERE segment = ?1 AND message = ?2 AND is_last AND last_page = ifnull(?3, last_page)"


def replies_of(events: Iterable[Event]) -> list[tuple[int, bytes]]:
    """The rows of the replies that these events note."""
    noted = [(event.number, event.data.get("reply")) for event in events if event.act is Act.NOTE]
    return [(-number, key.encode()) for number, key in noted if isinstance(key, str) and len(key) == KEY and key.isascii()]


def add_replies(db: apsw.Connection, tenant: int, segment: int, replies: Sequence[tuple[int, bytes]]) -> None:
    """Keep the rows of replies; those that are there stay."""
    db.executemany(
        "INSERT INTO history(segment, message, tenant, digest, is_last, last_page) VALUES(?, ?, ?, ?, 0, 0)"
        " ON CONFLICT DO NOTHING",
        [(segment, at, tenant, key) for at, key in replies],
    )


def replies(db: apsw.Connection, segment: int) -> list[tuple[int, bytes]]:
    """The rows of a session's replies."""
    select = "SELECT message, digest FROM history WHERE segment = ? AND message < 0"
    return [(message, key) for message, key in rows(db, select, segment)]


def replies_in(db: apsw.Connection, segment: int) -> tuple[list[tuple[int, bytes]], set[int]]:
    """The rows of replies that a session's ledger says, and the events that cannot be read: of these nobody knows."""
    noted, unread = list[Event](), set[int]()
    for number, body in rows(db, "SELECT number, body FROM event WHERE segment = ? AND act = ?", segment, Act.NOTE.value):
        try:
            noted.append(event_of(body))
        except UNREADABLE:
            unread.add(number)
    return replies_of(noted), unread


def fill_replies(db: apsw.Connection, tenant: int, segment: int) -> None:
    """Make the rows of a session's replies again."""
    db.execute("DELETE FROM history WHERE segment = ? AND message <= 0", (segment,))
    add_replies(db, tenant, segment, replies_in(db, segment)[0])


def put(db: apsw.Connection, tenant: int, segment: int, said: Digests, page: int) -> bool:
    """Keep the digests of a session behind its first ones, which are kept; returns whether they are what belongs there."""
    fits = (
        "SELECT 1 FROM segment WHERE id = ?1 AND tenant = ?2"
        " AND ?3 = (SELECT max(page.id) FROM page WHERE page.segment = ?1)"
        " AND NOT EXISTS(SELECT 1 FROM page WHERE content IS NULL AND page.segment = ?1)"
        " AND (?4 = 0 OR EXISTS(SELECT 1 FROM history WHERE history.segment = ?1 AND message = ?4 AND is_last))"
    )
    if row(db, fits, segment, tenant, page, said.after) is None:
        return False
    _put(db, tenant, segment, said, None, page)
    return len(said.added) + said.after > 0


def add(db: apsw.Connection, tenant: int, segment: int, said: Digests, first: int, last: int) -> None:
    """Keep the digests that come with new pages, in the transaction that adds them; if those before are kept up to the first of
    these pages, and nothing was forgotten."""
    if not said.after and first > 1 and row(db, "SELECT 1 FROM page WHERE content IS NULL AND segment = ?", segment) is not None:
        return
    _put(db, tenant, segment, said, first - 1, last)


def _put(db: apsw.Connection, tenant: int, segment: int, said: Digests, before: int | None, page: int) -> None:
    """Put digests behind the first ones, if these are kept up to the page `before`; None for any. Where something is forgotten
    none are kept."""
    after, digests = said.after, said.added
    if not after:
        db.execute("DELETE FROM history WHERE segment = ? AND message > 0", (segment,))
    elif not said.inherits:
        changes = db.total_changes()
        if digests:
            db.execute(f"UPDATE history SET is_last = 0 {_UP_TO}", (segment, after, before))
        else:
            db.execute(f"UPDATE history SET last_page = ?4 {_UP_TO}", (segment, after, before, page))
        if db.total_changes() == changes:
            return
    end = after + len(digests)
    both = enumerate(zip_longest(digests, said.tails), after + 1)
    new = [(segment, at, tenant, digest, int(at == end), page, tail) for at, (digest, tail) in both]
    insert(db, "INSERT INTO history(segment, message, tenant, digest, is_last, last_page, tail) VALUES(?, ?, ?, ?, ?, ?, ?)", new)


def owners(db: apsw.Connection, tenant: int, digest: bytes, limit: int, *, tail: bool) -> list[HistoryOwner]:
    """The sessions that have said this, or these last messages: first those that end with it, then the newest."""
    select = (
        "SELECT name, message, (SELECT max(message) FROM history AS own WHERE own.segment = history.segment) FROM history"
        " JOIN segment ON segment.id = history.segment AND NOT quarantined"
        f" WHERE history.tenant = ? AND {'tail' if tail else 'digest'} = ?"
        " ORDER BY is_last DESC, history.segment DESC LIMIT ?"
    )
    return [HistoryOwner(name=name, at=at, count=count) for name, at, count in rows(db, select, tenant, digest, limit)]


def missing(db: apsw.Connection, tenant: int, root: str, user: str, limit: int) -> list[str]:
    """The names of a user's sessions of a root whose digests are not kept whole, those that were used last first."""
    select = (
        "SELECT name FROM segment WHERE tenant = ?1 AND (name = ?2 OR (name > ?2 || '~' AND name < ?2 || '~:')"
        " OR (name > ?2 || '/b' AND name < ?2 || '/b:'))"
        " AND owner = ?3 AND kind = 'session' AND pages > 0 AND NOT quarantined"
        " AND NOT EXISTS(SELECT 1 FROM history WHERE segment = segment.id AND is_last"
        " AND last_page = (SELECT max(page.id) FROM page WHERE page.segment = segment.id))"
        " ORDER BY used DESC LIMIT ?4"
    )
    found = [name for (name,) in rows(db, select, tenant, root, user, limit)]
    return [name for name in found if root_of(name) == root]

"""The SQLite file: its identity, its tables, and the migration of files with an older schema.

`application_id` says that a file is a Kilburn store, and `user_version` is the number of its schema. A file with a newer schema,
a file of a development version before the first release, and a file of another program are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import apsw

from kilburn.backends.connection import transaction_scope, write_transaction
from kilburn.errors import StoreCorrupt, StoreVersion

APPLICATION = 0x4B696C62
"""`Kilb`, in the file's header."""

DEVELOPMENT = 0x4B494C42
"""`KILB`: the files of development versions, whose tables had other names."""

OLDEST = (3, 51, 3)
"""The first SQLite with the fix for the WAL-reset race that loses committed data."""

SCHEMA = 1
"""The number of the schema in `TABLES`."""

MIGRATIONS: Mapping[int, Callable[[apsw.Connection], None]] = {}
"""Functions that change a file with this schema number to the next one; `prepare_schema` calls them in one transaction."""

FLAG = "INSERT INTO erasure(id) VALUES(1) ON CONFLICT DO NOTHING"
"""Flags the file: it or its write-ahead log may contain erased bytes."""

TABLES = """
-- seal: a checksum of the columns that never change. counters_seal, state_seal: of those that do.
-- sessions: the number of segments of the tenant, by which a lost row is detected.
CREATE TABLE tenant(
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    sessions INTEGER NOT NULL DEFAULT 0,
    seal BLOB NOT NULL DEFAULT x''
) STRICT;

-- quarantined: set by `fsck --repair`. passages: passages ever added to the text index; characters: their total length, for the
-- mean that ranking needs.
CREATE TABLE segment(
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    name TEXT NOT NULL,
    created REAL NOT NULL,
    kind TEXT NOT NULL,
    owner TEXT NOT NULL,
    quarantined INTEGER NOT NULL DEFAULT 0,
    seal BLOB NOT NULL DEFAULT x'',
    used REAL NOT NULL,
    head INTEGER NOT NULL DEFAULT 0,
    pages INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    passages INTEGER NOT NULL DEFAULT 0,
    characters INTEGER NOT NULL DEFAULT 0,
    counters_seal BLOB NOT NULL DEFAULT x'',
    UNIQUE(tenant, name)
) STRICT;

-- One row per text and tenant: two tenants with the same text have a row each, so that neither can learn from time or size that
-- the other has it.
CREATE TABLE content(
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    digest BLOB NOT NULL,
    size INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE(tenant, digest)
) STRICT;

-- call: the id of a call; derived from the record. first_passage, last_passage: its passages in the text index, or NULL.
CREATE TABLE page(
    segment INTEGER NOT NULL REFERENCES segment(id),
    id INTEGER NOT NULL,
    content INTEGER REFERENCES content(id),
    extra INTEGER REFERENCES content(id),
    call TEXT,
    place TEXT NOT NULL,
    pinned INTEGER NOT NULL,
    importance REAL NOT NULL,
    valid_until REAL,
    state_seal BLOB NOT NULL,
    first_passage INTEGER,
    last_passage INTEGER,
    record BLOB NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY(segment, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX page_content ON page(content);
CREATE INDEX page_extra ON page(extra) WHERE extra IS NOT NULL;
CREATE INDEX page_call ON page(segment, call) WHERE call IS NOT NULL;

CREATE TABLE event(
    segment INTEGER NOT NULL REFERENCES segment(id),
    number INTEGER NOT NULL,
    act TEXT NOT NULL,
    body BLOB NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY(segment, number)
) STRICT, WITHOUT ROWID;
CREATE INDEX event_note ON event(segment, number) WHERE act = 'note';

CREATE TABLE passage(
    id INTEGER PRIMARY KEY,
    page INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL
) STRICT;

-- Which page is cited by which; derived from the pages. Of a page of a collection, its sources too.
CREATE TABLE citation(
    segment INTEGER NOT NULL,
    page INTEGER NOT NULL,
    citing_segment INTEGER NOT NULL,
    citing_page INTEGER NOT NULL,
    PRIMARY KEY(segment, page, citing_segment, citing_page)
) STRICT, WITHOUT ROWID;

-- Which events may name the pages of a block; derived from the ledger.
CREATE TABLE mention(
    segment INTEGER NOT NULL,
    node INTEGER NOT NULL,
    event INTEGER NOT NULL,
    PRIMARY KEY(segment, node, event)
) STRICT, WITHOUT ROWID;

-- The window of a segment after event `head`, so that the ledger need not be replayed from the beginning. It contains no words.
-- forked: a branch forked from there.
CREATE TABLE checkpoint(
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL,
    head INTEGER NOT NULL,
    forked INTEGER NOT NULL DEFAULT 0,
    size INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    data BLOB NOT NULL,
    seal BLOB NOT NULL,
    UNIQUE(segment, head)
) STRICT;

-- What a session has said up to a message, as a digest over that message and all before it: a history that a client sends
-- again is recognised by it. is_last: whether no later message follows; last_page: the session's last original then. Derived
-- from the pages. The row of a reply has the number of its note, negated, as `message`. tail: a digest over the last messages
-- alone, or NULL.
CREATE TABLE history(
    segment INTEGER NOT NULL,
    message INTEGER NOT NULL,
    tenant INTEGER NOT NULL,
    digest BLOB NOT NULL,
    is_last INTEGER NOT NULL,
    last_page INTEGER NOT NULL,
    tail BLOB,
    PRIMARY KEY(segment, message)
) STRICT, WITHOUT ROWID;
CREATE INDEX history_digest ON history(tenant, digest, is_last, segment);
CREATE INDEX history_tail ON history(tenant, tail, is_last, segment) WHERE tail IS NOT NULL;

-- The digest of a forgotten text is deleted, and so are the digests after it.
CREATE TRIGGER page_forgotten AFTER UPDATE OF content ON page WHEN NEW.content IS NULL BEGIN
    DELETE FROM history WHERE segment = NEW.segment;
END;

CREATE TABLE embedder(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    name TEXT NOT NULL,
    UNIQUE(tenant, name)
) STRICT;

-- The number of a vector is never used again, so that a reader knows which vectors are new to it.
CREATE TABLE vector(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    embedder INTEGER NOT NULL REFERENCES embedder(id),
    entry INTEGER NOT NULL,
    data BLOB NOT NULL,
    seal BLOB NOT NULL,
    UNIQUE(entry, embedder)
) STRICT;

-- passages_done: how many of a segment's passages, the first ones, need no vector any more.
CREATE TABLE embedded(
    embedder INTEGER NOT NULL REFERENCES embedder(id),
    segment INTEGER NOT NULL,
    passages_done INTEGER NOT NULL,
    PRIMARY KEY(embedder, segment)
) STRICT, WITHOUT ROWID;

-- Settings of a tenant as a whole.
CREATE TABLE setting(
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY(tenant, name)
) STRICT, WITHOUT ROWID;

-- Objects in a cold place that hold no text of a row: an object that is being written (0), one that must be
-- deleted (1), or one that was given up while somebody may be writing it (when, in seconds since the epoch).
CREATE TABLE cold_object(
    tenant INTEGER NOT NULL,
    name BLOB NOT NULL,
    deleting REAL NOT NULL,
    PRIMARY KEY(tenant, name)
) STRICT, WITHOUT ROWID;

-- The object of a text that is removed, or stored here again, must be deleted.
CREATE TRIGGER content_gone AFTER DELETE ON content WHEN OLD.codec = 3 BEGIN
    INSERT INTO cold_object(tenant, name, deleting) VALUES(OLD.tenant, OLD.data, 1) ON CONFLICT DO UPDATE SET deleting = 1;
END;
CREATE TRIGGER content_warm AFTER UPDATE OF codec ON content WHEN OLD.codec = 3 AND NEW.codec <> 3 BEGIN
    INSERT INTO cold_object(tenant, name, deleting) VALUES(OLD.tenant, OLD.data, 1) ON CONFLICT DO UPDATE SET deleting = 1;
END;

-- The records that `fsck --repair` removed, byte for byte.
CREATE TABLE quarantine(
    id INTEGER PRIMARY KEY,
    segment INTEGER NOT NULL,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    record BLOB NOT NULL
) STRICT;

-- One row while erased bytes may still be in the file or its write-ahead log.
CREATE TABLE erasure(id INTEGER PRIMARY KEY) STRICT;

-- One row: the time of the file's last modification, in nanoseconds, when all of its pages were wiped; see `slack`.
CREATE TABLE wiped(id INTEGER PRIMARY KEY, modified INTEGER NOT NULL) STRICT;
"""


def check_library(version: str) -> None:
    """Refuse an SQLite that can lose committed data.

    Raises:
        StoreVersion: older than 3.51.3.
    """
    if tuple(int(part) for part in version.split(".")) < OLDEST:
        raise StoreVersion(
            f"SQLite {version} can lose committed data (its WAL-reset race, fixed in 3.51.3)", advice="pip install -U apsw"
        )


def prepare_schema(db: apsw.Connection, path: str, note_made: Callable[[], None]) -> None:
    """Create the tables of a new file, or migrate a file with an older schema, in one transaction.

    Args:
        note_made: called in that transaction once a new file has its tables.

    Raises:
        StoreCorrupt: not a Kilburn file. StoreVersion: the file of a newer Kilburn, or of a development version.
    """
    if schema_number(db, path) == SCHEMA:
        return
    with write_transaction(db):
        # Another process may have done it while this one waited for the lock.
        number = schema_number(db, path)
        if number == 0:
            db.execute(TABLES)
            note_made()
        for step in range(number or SCHEMA, SCHEMA):
            MIGRATIONS[step](db)
        # PRAGMA takes no parameters; both are constants of this module.
        db.execute(f"PRAGMA application_id = {APPLICATION:d}")
        db.execute(f"PRAGMA user_version = {SCHEMA:d}")


def schema_number(db: apsw.Connection, path: str) -> int:
    """Return the number of the file's schema, or 0 for an empty file.

    Raises:
        StoreCorrupt: not a Kilburn file. StoreVersion: the file of a newer Kilburn, or of a development version.
    """
    if db.in_transaction:
        return _identify(db, path)
    # One snapshot for all queries: another process may be creating the file at this moment.
    with transaction_scope(db):
        db.execute("BEGIN")
        return _identify(db, path)


def _identify(db: apsw.Connection, path: str) -> int:
    application = int(db.pragma("application_id"))
    number = int(db.pragma("user_version"))
    if application == DEVELOPMENT:
        raise StoreVersion(
            f"{path} was written by a development version of Kilburn, before 0.1.0",
            advice="export it with the version that wrote it (`kilburn export --db FILE --out all.jsonl`), then import it into a"
            " new file (`kilburn import all.jsonl --db NEW`)",
        )
    if application != APPLICATION and (number or application or db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()):
        raise StoreCorrupt(f"{path} is an SQLite file, but not a Kilburn store", advice="give another path")
    if number > SCHEMA:
        raise StoreVersion(
            f"{path} has schema {number}, and this Kilburn supports schema {SCHEMA}",
            advice="use the Kilburn that wrote it, or a newer one",
        )
    return number

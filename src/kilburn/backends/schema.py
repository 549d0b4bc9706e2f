"""The SQLite file: its identity, its tables, and the migration of older files.

Migrations are ordered functions; `user_version` counts those done. A file of a newer Kilburn, and a file that is not
Kilburn's, are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from functools import cache
from types import NoneType
from typing import TypeVar

import apsw

from kilburn.backends import mentions
from kilburn.backends.connection import rows, transaction_scope, write_transaction
from kilburn.backends.contenttable import splice_excerpts
from kilburn.backends.records import UNREADABLE, page_of, seal_of
from kilburn.backends.textindex import TextIndex
from kilburn.errors import StoreCorrupt, StoreVersion
from kilburn.message import Kind

T = TypeVar("T")


log = logging.getLogger("kilburn")

APPLICATION = 0x4B494C42
"""`KILB`, in the file's header."""

OLDEST = (3, 51, 3)
"""The first SQLite with the fix for the WAL-reset race that loses committed data."""


def check_library(version: str) -> None:
    """Refuse an SQLite that can lose committed data.

    Raises:
        StoreVersion: older than 3.51.3.
    """
    if tuple(int(part) for part in version.split(".")) < OLDEST:
        raise StoreVersion(
            f"SQLite {version} can lose committed data (its WAL-reset race, fixed in 3.51.3)", advice="pip install -U apsw"
        )


TABLES = """
CREATE TABLE tenant(
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
) STRICT;

-- head, pages, tokens, used: what `processes` shows. passages: entries ever made in the text
-- index; characters: their length together, for the mean that ranking needs.
CREATE TABLE process(
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    name TEXT NOT NULL,
    created REAL NOT NULL,
    used REAL NOT NULL,
    head INTEGER NOT NULL DEFAULT 0,
    pages INTEGER NOT NULL DEFAULT 0,
    tokens INTEGER NOT NULL DEFAULT 0,
    passages INTEGER NOT NULL DEFAULT 0,
    characters INTEGER NOT NULL DEFAULT 0,
    UNIQUE(tenant, name)
) STRICT;

-- One row a text and tenant: two tenants with the same text have a row each, so that neither
-- can learn from time or size that the other has it.
CREATE TABLE content(
    id INTEGER PRIMARY KEY,
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    digest BLOB NOT NULL,
    size INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    data BLOB NOT NULL,
    UNIQUE(tenant, digest)
) STRICT;

-- first, last: its entries in the text index, or NULL.
CREATE TABLE page(
    process INTEGER NOT NULL REFERENCES process(id),
    id INTEGER NOT NULL,
    content INTEGER REFERENCES content(id),
    extra INTEGER REFERENCES content(id),
    at TEXT NOT NULL,
    pinned INTEGER NOT NULL,
    mark REAL NOT NULL,
    first INTEGER,
    last INTEGER,
    meta BLOB NOT NULL,
    PRIMARY KEY(process, id)
) STRICT, WITHOUT ROWID;
CREATE INDEX page_content ON page(content);
CREATE INDEX page_extra ON page(extra) WHERE extra IS NOT NULL;

CREATE TABLE event(
    process INTEGER NOT NULL REFERENCES process(id),
    number INTEGER NOT NULL,
    act TEXT NOT NULL,
    body BLOB NOT NULL,
    PRIMARY KEY(process, number)
) STRICT, WITHOUT ROWID;

CREATE TABLE passage(
    id INTEGER PRIMARY KEY,
    page INTEGER NOT NULL,
    start INTEGER NOT NULL,
    stop INTEGER NOT NULL
) STRICT;
"""

SEALS = """
-- seal: over what stays as it was made. tally, stand: over what changes: a session's counters, a page's state.
-- sessions: how many the tenant has, so that a lost one is seen. aside: set aside by `fsck --repair`.
ALTER TABLE tenant ADD COLUMN sessions INTEGER NOT NULL DEFAULT 0;
ALTER TABLE tenant ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE process ADD COLUMN aside INTEGER NOT NULL DEFAULT 0;
ALTER TABLE process ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE process ADD COLUMN tally BLOB NOT NULL DEFAULT x'';
ALTER TABLE page ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE page ADD COLUMN stand BLOB NOT NULL DEFAULT x'';
ALTER TABLE event ADD COLUMN seal BLOB NOT NULL DEFAULT x'';

-- What `fsck --repair` took out of its place, byte for byte.
CREATE TABLE quarantine(
    id INTEGER PRIMARY KEY,
    process INTEGER NOT NULL,
    kind TEXT NOT NULL,
    number INTEGER NOT NULL,
    record BLOB NOT NULL
) STRICT;

-- One row while erased bytes may still lie in the file or its write-ahead log.
CREATE TABLE erasure(id INTEGER PRIMARY KEY) STRICT;
"""

SEALING = """
UPDATE tenant SET sessions = (SELECT count(*) FROM process WHERE tenant = tenant.id),
    seal = seal_of('tenant', id, CAST(name AS BLOB));
UPDATE process SET seal = seal_of('process', id, tenant, CAST(name AS BLOB), created, aside),
    tally = seal_of('tally', id, used, head, pages, tokens, passages, characters);
UPDATE page SET seal = seal_of('page', process, id, meta),
    stand = seal_of('stand', process, id, CAST(at AS BLOB), pinned, mark);
UPDATE event SET seal = seal_of('event', process, number, CAST(act AS BLOB), body);
"""

NEWER = "needs_a_kilburn_of_format_5"
"""An SQL function that a Kilburn of an older format does not have. Such a Kilburn may still have the file open. One of
format 1 would write rows without seals, one of format 3 would forget pages and leave their vectors, one of format 4 would
leave their bytes, and not know what an excerpt is made of. Each of its commits writes to `process`, and now fails there, because
the function does not exist."""

GUARDS = """
CREATE TRIGGER tenant_made BEFORE INSERT ON tenant BEGIN SELECT needs_a_newer_kilburn(); END;
CREATE TRIGGER process_made BEFORE INSERT ON process BEGIN SELECT needs_a_newer_kilburn(); END;
CREATE TRIGGER process_written BEFORE UPDATE ON process BEGIN SELECT needs_a_newer_kilburn(); END;
"""

MEMORY = """
DROP TRIGGER tenant_made;
DROP TRIGGER process_made;
DROP TRIGGER process_written;

-- The seals of a process and of a page's state cover these columns where they have another value than here.
ALTER TABLE process ADD COLUMN kind TEXT NOT NULL DEFAULT 'session';
ALTER TABLE process ADD COLUMN user TEXT NOT NULL DEFAULT '';
ALTER TABLE page ADD COLUMN until REAL;

-- Which page is cited by which; derived from the pages. Of a page of a collection, its sources too.
CREATE TABLE citation(
    process INTEGER NOT NULL,
    page INTEGER NOT NULL,
    by_process INTEGER NOT NULL,
    by_page INTEGER NOT NULL,
    PRIMARY KEY(process, page, by_process, by_page)
) STRICT, WITHOUT ROWID;

CREATE TABLE embedder(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    name TEXT NOT NULL,
    UNIQUE(tenant, name)
) STRICT;

-- The number of a vector is never given again, so that a reader knows what is new to it.
CREATE TABLE vector(
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    embedder INTEGER NOT NULL REFERENCES embedder(id),
    entry INTEGER NOT NULL,
    data BLOB NOT NULL,
    seal BLOB NOT NULL,
    UNIQUE(entry, embedder)
) STRICT;

-- done: how many of a process's passages, the first ones, do not wait for a vector any more.
CREATE TABLE embedded(
    embedder INTEGER NOT NULL REFERENCES embedder(id),
    process INTEGER NOT NULL,
    done INTEGER NOT NULL,
    PRIMARY KEY(embedder, process)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER tenant_made BEFORE INSERT ON tenant BEGIN SELECT needs_a_kilburn_of_format_4(); END;
CREATE TRIGGER process_made BEFORE INSERT ON process BEGIN SELECT needs_a_kilburn_of_format_4(); END;
CREATE TRIGGER process_written BEFORE UPDATE ON process BEGIN SELECT needs_a_kilburn_of_format_4(); END;
"""

FLAT = """
DROP TRIGGER tenant_made;
DROP TRIGGER process_made;
DROP TRIGGER process_written;

-- call: of a call, its id; derived from the record.
ALTER TABLE page ADD COLUMN call TEXT;
CREATE INDEX page_call ON page(process, call) WHERE call IS NOT NULL;
CREATE INDEX event_note ON event(process, number) WHERE act = 'note';

-- The window of a process after event `head`, so that it need not be replayed from the beginning. It has no words.
-- kept: a branch forked from there.
CREATE TABLE checkpoint(
    id INTEGER PRIMARY KEY,
    process INTEGER NOT NULL,
    head INTEGER NOT NULL,
    kept INTEGER NOT NULL DEFAULT 0,
    size INTEGER NOT NULL,
    codec INTEGER NOT NULL,
    data BLOB NOT NULL,
    seal BLOB NOT NULL,
    UNIQUE(process, head)
) STRICT;

-- Which events may name the pages of a block; derived from the ledger.
CREATE TABLE mention(
    process INTEGER NOT NULL,
    node INTEGER NOT NULL,
    event INTEGER NOT NULL,
    PRIMARY KEY(process, node, event)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER tenant_made BEFORE INSERT ON tenant BEGIN SELECT needs_a_kilburn_of_format_5(); END;
CREATE TRIGGER process_made BEFORE INSERT ON process BEGIN SELECT needs_a_kilburn_of_format_5(); END;
-- With a function that it does not have, an older Kilburn does not even begin; this one need not call it at each commit.
CREATE TRIGGER process_written BEFORE UPDATE ON process WHEN 0 BEGIN SELECT needs_a_kilburn_of_format_5(); END;

-- An older Kilburn would take the row away when it has cut the log, and leave the file as it is.
CREATE TRIGGER erasure_done BEFORE DELETE ON erasure BEGIN SELECT needs_a_kilburn_of_format_5(); END;

-- What was forgotten so far may still lie there.
INSERT INTO erasure(id) SELECT 1 WHERE EXISTS(SELECT 1 FROM page) ON CONFLICT DO NOTHING;
"""

HISTORY = """
-- What a session has said up to a message, as a digest over that message and all before it: by this a history is recognised that
-- a client hands over again. last: whether it has said no more; page: its last original then. Derived from the pages.
CREATE TABLE history(
    process INTEGER NOT NULL,
    at INTEGER NOT NULL,
    tenant INTEGER NOT NULL,
    digest BLOB NOT NULL,
    last INTEGER NOT NULL,
    page INTEGER NOT NULL,
    PRIMARY KEY(process, at)
) STRICT, WITHOUT ROWID;
CREATE INDEX history_digest ON history(tenant, digest, last, process);

-- A digest of a forgotten text does not stay, and neither do those that come after it. An older Kilburn that has the file open
-- keeps to this, too.
CREATE TRIGGER page_forgotten AFTER UPDATE OF content ON page WHEN NEW.content IS NULL BEGIN
    DELETE FROM history WHERE process = NEW.process;
END;
"""

KEEPING = """
-- What is kept for a tenant as a whole.
CREATE TABLE setting(
    tenant INTEGER NOT NULL REFERENCES tenant(id),
    name TEXT NOT NULL,
    value TEXT NOT NULL,
    seal BLOB NOT NULL,
    PRIMARY KEY(tenant, name)
) STRICT, WITHOUT ROWID;

-- Objects in a cold place that are no text's: one that is being written, or one that is to be deleted (going).
CREATE TABLE stray(
    tenant INTEGER NOT NULL,
    name BLOB NOT NULL,
    going INTEGER NOT NULL,
    PRIMARY KEY(tenant, name)
) STRICT, WITHOUT ROWID;

-- Whoever removes a text that is cold, or takes it back, leaves its object to be deleted; an older Kilburn too.
CREATE TRIGGER content_gone AFTER DELETE ON content WHEN OLD.codec = 3 BEGIN
    INSERT INTO stray(tenant, name, going) VALUES(OLD.tenant, OLD.data, 1) ON CONFLICT DO UPDATE SET going = 1;
END;
CREATE TRIGGER content_warm AFTER UPDATE OF codec ON content WHEN OLD.codec = 3 AND NEW.codec <> 3 BEGIN
    INSERT INTO stray(tenant, name, going) VALUES(OLD.tenant, OLD.data, 1) ON CONFLICT DO UPDATE SET going = 1;
END;
"""

UNSEALED = """
CREATE TEMP VIEW tenant AS SELECT *, NULL AS sessions, NULL AS seal FROM main.tenant;
CREATE TEMP VIEW process AS
    SELECT *, 0 AS aside, NULL AS seal, NULL AS tally, 'session' AS kind, '' AS user FROM main.process;
CREATE TEMP VIEW page AS SELECT *, NULL AS seal, NULL AS stand, NULL AS until, NULL AS call FROM main.page;
CREATE TEMP VIEW event AS SELECT *, NULL AS seal FROM main.event;
"""

UNREMEMBERING = """
CREATE TEMP VIEW process AS SELECT *, 'session' AS kind, '' AS user FROM main.process;
CREATE TEMP VIEW page AS SELECT *, NULL AS until, NULL AS call FROM main.page;
"""

UNCALLED = """
CREATE TEMP VIEW page AS SELECT *, NULL AS call FROM main.page;
"""

EMPTY = """
CREATE TEMP VIEW citation AS SELECT 0 AS process, 0 AS page, 0 AS by_process, 0 AS by_page WHERE 0;
CREATE TEMP VIEW embedder AS SELECT 0 AS id, 0 AS tenant, '' AS name WHERE 0;
CREATE TEMP VIEW vector AS SELECT 0 AS id, 0 AS embedder, 0 AS entry, x'' AS data, x'' AS seal WHERE 0;
CREATE TEMP VIEW embedded AS SELECT 0 AS embedder, 0 AS process, 0 AS done WHERE 0;
"""

UNINDEXED = """
CREATE TEMP VIEW checkpoint AS SELECT 0 AS process, 0 AS head, 0 AS size, 0 AS codec, x'' AS data, x'' AS seal WHERE 0;
CREATE TEMP VIEW mention AS SELECT 0 AS process, 0 AS node, 0 AS event WHERE 0;
"""

UNKEPT = """
CREATE TEMP VIEW setting AS SELECT 0 AS tenant, '' AS name, '' AS value, x'' AS seal WHERE 0;
CREATE TEMP VIEW stray AS SELECT 0 AS tenant, x'' AS name, 0 AS going WHERE 0;
"""

UNRECOGNISED = """
CREATE TEMP VIEW history AS
    SELECT 0 AS process, 0 AS at, 0 AS tenant, x'' AS digest, 0 AS last, 0 AS page WHERE 0;
"""


def _first(db: apsw.Connection) -> None:
    db.execute(TABLES)


def _sealed(db: apsw.Connection) -> None:
    """Seal all rows as they are. Damage from before this migration can no longer be detected."""
    db.execute(SEALS)
    db.create_scalar_function("seal_of", seal_of)
    db.execute(SEALING)
    db.create_scalar_function("seal_of", None)


def _guarded(db: apsw.Connection) -> None:
    """Lock out writers that do not write seals."""
    db.execute(GUARDS)


def _remembering(db: apsw.Connection) -> None:
    """Add what long-term memory needs, and lock out writers that do not know it."""
    db.execute(MEMORY)


def _flat(db: apsw.Connection) -> None:
    """Add what keeps opening and forgetting flat, fill it from what is there, and store excerpts as pieces. What was forgotten
    so far is wiped, too."""
    db.execute(FLAT)
    for segment, number, record in rows(db, "SELECT process, id, meta FROM page WHERE content NOT NULL"):
        page = _decoded(page_of, record)
        if page is not None and page.kind is Kind.CALL and page.call is not None:
            db.execute("UPDATE page SET call = ? WHERE process = ? AND id = ?", (page.call, segment, number))
    mentions.fill(db)
    splice_excerpts(db)
    for (number,) in rows(db, "SELECT id FROM tenant"):
        try:
            TextIndex(db, number).reguide()
        except (apsw.CorruptError, apsw.ConstraintError, apsw.SQLError) as error:
            # A damaged index must not prevent reading, or the repair, which makes it anew.
            log.warning("the text index of tenant %d is damaged, run `kilburn fsck --repair`: %s", number, error)


def _recognising(db: apsw.Connection) -> None:
    """Add the index of histories. The digests of the sessions that are there are kept when they are first needed."""
    db.execute(HISTORY)


def _noting(db: apsw.Connection) -> None:
    """Notes may be here from now on. They need no table, but an older Kilburn does not know this kind of segment."""


def _keeping(db: apsw.Connection) -> None:
    """Add the settings of a tenant, and what says of which cold objects no text is left."""
    db.execute(KEEPING)


def _decoded(decode: Callable[[bytes], T], record: bytes) -> T | None:
    """A record that is read, or None: what is damaged stays as it is, and `fsck` reports it."""
    try:
        return decode(record)
    except UNREADABLE:
        return None


def admit(db: apsw.Connection) -> None:
    """Allow this connection to write to a file of the current format."""
    # The type of None is called for each commit, and gives None.
    db.create_scalar_function(NEWER, NoneType, 0, flags=apsw.SQLITE_INNOCUOUS)


def as_current(db: apsw.Connection, version: int) -> None:
    """Show an older file, opened for reading, with the tables of the current format; missing seals are NULL."""
    if version < INDEXED:
        db.execute(UNSEALED if version < SEALED else UNREMEMBERING if version < REMEMBERING else UNCALLED)
        db.execute(UNINDEXED if version >= REMEMBERING else EMPTY + UNINDEXED)
    if version < RECOGNISING:
        db.execute(UNRECOGNISED)
    if version < KEPT:
        db.execute(UNKEPT)


SEALED = 2
"""The first format with seals."""

INDEXED = 5
"""The first format with the index of mentions."""

RECOGNISING = 6
"""The first format with the index of histories."""

REMEMBERING = 4
"""The first format with long-term memory."""

KEPT = 8
"""The first format with settings."""

MIGRATIONS: tuple[Callable[[apsw.Connection], None], ...] = (
    _first,
    _sealed,
    _guarded,
    _remembering,
    _flat,
    _recognising,
    _noting,
    _keeping,
)


@cache
def _tables() -> str:
    """The tables of a new file, in one script: a quarter of the time of the migrations that lead to them."""
    with closing(apsw.Connection(":memory:")) as db:
        for step in MIGRATIONS:
            step(db)
        made = rows(db, "SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL AND name NOT LIKE 'sqlite%'")
    return ";".join(sql for (sql,) in made)


def migrate(db: apsw.Connection, path: str) -> None:
    """Migrate the file to this version, in one transaction; a current file is left as it is.

    Raises:
        StoreCorrupt: not a Kilburn file. StoreVersion: a newer Kilburn's.
    """
    if check_identity(db, path) == len(MIGRATIONS):
        return
    with write_transaction(db):
        # Another process may have done it while this one waited for the lock.
        done = check_identity(db, path)
        if done == 0:
            db.execute(_tables())
        for step in MIGRATIONS[done or len(MIGRATIONS) :]:
            step(db)
        # PRAGMA takes no parameters; both are constants of this module.
        db.execute(f"PRAGMA application_id = {APPLICATION:d}")
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS):d}")


def check_identity(db: apsw.Connection, path: str) -> int:
    """The file's version; 0 for an empty one.

    Raises:
        StoreCorrupt: not a Kilburn file. StoreVersion: a newer Kilburn's.
    """
    if db.in_transaction:
        return _identity(db, path)
    # One snapshot for all three queries: another process may be creating the file at this moment.
    with transaction_scope(db):
        db.execute("BEGIN")
        return _identity(db, path)


def _identity(db: apsw.Connection, path: str) -> int:
    application = int(db.pragma("application_id"))
    version = int(db.pragma("user_version"))
    if application != APPLICATION and (version or application or db.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone()):
        raise StoreCorrupt(f"{path} is an SQLite file, but not a Kilburn store", advice="give another path")
    if version > len(MIGRATIONS):
        raise StoreVersion(
            f"{path} has format {version}, this Kilburn knows up to {len(MIGRATIONS)}",
            advice="use the Kilburn that wrote it, or a newer one",
        )
    return version

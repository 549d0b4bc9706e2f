"""The schema `kilburn` in a database: its tables, the walls between tenants, and the migration of older ones.

Every key begins with the tenant. The tables are not partitioned: a partition for each tenant would make every statement plan
through all of them; as the tenant is in every key, they can be distributed by it later. Row-level security is the second wall:
the role `kilburn_rows` owns nothing, and sees only rows of the tenant that its transaction says; without one it sees none.

Migrations are ordered scripts, forwards only; `kilburn.version` counts those done.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from psycopg import errors, sql

from kilburn.backends.postgres import counting
from kilburn.backends.postgres.connection import ROLE, Connection, patient
from kilburn.errors import StoreCorrupt, StoreError, StoreReadOnly, StoreUnavailable, StoreVersion

OLDEST = 150000
"""The first PostgreSQL that is used, as `server_version_num` says it."""

MAINTAINS = 170000
"""The first in which who does not own a table may be allowed to vacuum it."""

TABLES = """
CREATE TABLE kilburn.tenant(
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name bytea NOT NULL UNIQUE
);

-- How many segments a tenant ever had: their numbers have no gaps, and come in the order of their commits.
CREATE TABLE kilburn.counter(
    tenant bigint PRIMARY KEY,
    segments bigint NOT NULL
);

-- epoch: counts the writes to a segment; each says the next number, and one that does not know the last is refused.
-- writer: what the last writes were marked with, so that who lost the reply knows whether it was done.
-- The other columns are those of SQLite's tables, see kilburn.backends.schema. Names are bytes: no collation plays a part.
CREATE TABLE kilburn.process(
    tenant bigint NOT NULL,
    id bigint NOT NULL,
    name bytea NOT NULL,
    created double precision NOT NULL,
    kind text NOT NULL,
    owner bytea NOT NULL,
    seal bytea NOT NULL,
    used double precision NOT NULL,
    head bigint NOT NULL,
    pages bigint NOT NULL,
    tokens bigint NOT NULL,
    passages bigint NOT NULL,
    characters bigint NOT NULL,
    tally bytea NOT NULL,
    epoch bigint NOT NULL,
    writer bytea NOT NULL,
    UNIQUE(tenant, name)
);
-- Of indexes that seem equally good, as in an empty table, PostgreSQL takes the one that was made last.
ALTER TABLE kilburn.process ADD PRIMARY KEY(tenant, id);
CREATE FUNCTION kilburn.check_epoch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.epoch <> OLD.epoch + 1 THEN
        RAISE EXCEPTION 'segment % is at write %, not %', OLD.id, OLD.epoch, NEW.epoch - 1 USING ERRCODE = 'KB001';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER process_fenced BEFORE UPDATE ON kilburn.process FOR EACH ROW EXECUTE FUNCTION kilburn.check_epoch();

CREATE TABLE kilburn.content(
    tenant bigint NOT NULL,
    digest bytea NOT NULL,
    size bigint NOT NULL,
    codec bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY(tenant, digest)
);

CREATE TABLE kilburn.page(
    tenant bigint NOT NULL,
    process bigint NOT NULL,
    id bigint NOT NULL,
    content bytea,
    extra bytea,
    call bytea,
    at text NOT NULL,
    pinned bigint NOT NULL,
    mark double precision NOT NULL,
    until double precision,
    stand bytea NOT NULL,
    first bigint,
    last bigint,
    meta bytea NOT NULL,
    seal bytea NOT NULL,
    FOREIGN KEY(tenant, process) REFERENCES kilburn.process(tenant, id),
    FOREIGN KEY(tenant, content) REFERENCES kilburn.content(tenant, digest),
    FOREIGN KEY(tenant, extra) REFERENCES kilburn.content(tenant, digest)
);
CREATE INDEX page_content ON kilburn.page(tenant, content);
CREATE INDEX page_extra ON kilburn.page(tenant, extra) WHERE extra IS NOT NULL;
CREATE INDEX page_call ON kilburn.page(tenant, process, call) WHERE call IS NOT NULL;
ALTER TABLE kilburn.page ADD PRIMARY KEY(tenant, process, id);

CREATE TABLE kilburn.event(
    tenant bigint NOT NULL,
    process bigint NOT NULL,
    number bigint NOT NULL,
    act text NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL,
    PRIMARY KEY(tenant, process, number)
);
CREATE INDEX event_note ON kilburn.event(tenant, process, number) WHERE act = 'note';

CREATE TABLE kilburn.passage(
    tenant bigint NOT NULL,
    id bigint NOT NULL,
    page bigint NOT NULL,
    start bigint NOT NULL,
    stop bigint NOT NULL,
    PRIMARY KEY(tenant, id)
);

-- The text index: which passage has which word.
CREATE TABLE kilburn.posting(
    tenant bigint NOT NULL,
    word bytea NOT NULL,
    entry bigint NOT NULL,
    PRIMARY KEY(tenant, word, entry)
);

CREATE TABLE kilburn.checkpoint(
    tenant bigint NOT NULL,
    process bigint NOT NULL,
    head bigint NOT NULL,
    kept boolean NOT NULL,
    size bigint NOT NULL,
    codec bigint NOT NULL,
    data bytea NOT NULL,
    seal bytea NOT NULL,
    PRIMARY KEY(tenant, process, head)
);

CREATE TABLE kilburn.mention(
    tenant bigint NOT NULL,
    process bigint NOT NULL,
    node bigint NOT NULL,
    event bigint NOT NULL,
    PRIMARY KEY(tenant, process, node, event)
);

CREATE TABLE kilburn.citation(
    tenant bigint NOT NULL,
    process bigint NOT NULL,
    page bigint NOT NULL,
    by_process bigint NOT NULL,
    by_page bigint NOT NULL,
    PRIMARY KEY(tenant, process, page, by_process, by_page)
);

CREATE TABLE kilburn.history(
    tenant bigint NOT NULL,
    process bigint NOT NULL,
    at bigint NOT NULL,
    digest bytea NOT NULL,
    last boolean NOT NULL,
    page bigint NOT NULL,
    PRIMARY KEY(tenant, process, at)
);
CREATE INDEX history_digest ON kilburn.history(tenant, digest, last, process);

-- vectors: how many it ever had; the number of a vector is never given again.
CREATE TABLE kilburn.embedder(
    tenant bigint NOT NULL,
    id bigint GENERATED ALWAYS AS IDENTITY,
    name bytea NOT NULL,
    size bigint NOT NULL,
    vectors bigint NOT NULL,
    PRIMARY KEY(tenant, id),
    UNIQUE(tenant, name)
);

CREATE TABLE kilburn.vector(
    tenant bigint NOT NULL,
    embedder bigint NOT NULL,
    id bigint NOT NULL,
    entry bigint NOT NULL,
    data bytea NOT NULL,
    seal bytea NOT NULL,
    PRIMARY KEY(tenant, embedder, id),
    UNIQUE(tenant, entry, embedder),
    FOREIGN KEY(tenant, embedder) REFERENCES kilburn.embedder(tenant, id) ON DELETE CASCADE
);

CREATE TABLE kilburn.embedded(
    tenant bigint NOT NULL,
    embedder bigint NOT NULL,
    process bigint NOT NULL,
    done bigint NOT NULL,
    PRIMARY KEY(tenant, embedder, process),
    FOREIGN KEY(tenant, embedder) REFERENCES kilburn.embedder(tenant, id) ON DELETE CASCADE
);

-- One row while erased bytes of a tenant may still lie in the server's files.
CREATE TABLE kilburn.erasure(
    tenant bigint PRIMARY KEY,
    number bigint NOT NULL,
    at xid8 NOT NULL
);

-- What is compressed already. CREATE TABLE says this from PostgreSQL 16 on.
ALTER TABLE kilburn.content ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE kilburn.checkpoint ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE kilburn.vector ALTER COLUMN data SET STORAGE EXTERNAL;

-- ANALYZE would keep samples of words and names.
ALTER TABLE kilburn.tenant ALTER COLUMN name SET STATISTICS 0;
ALTER TABLE kilburn.process ALTER COLUMN name SET STATISTICS 0, ALTER COLUMN owner SET STATISTICS 0;
ALTER TABLE kilburn.content ALTER COLUMN digest SET STATISTICS 0, ALTER COLUMN data SET STATISTICS 0;
ALTER TABLE kilburn.page ALTER COLUMN content SET STATISTICS 0, ALTER COLUMN extra SET STATISTICS 0,
    ALTER COLUMN call SET STATISTICS 0, ALTER COLUMN meta SET STATISTICS 0;
ALTER TABLE kilburn.event ALTER COLUMN body SET STATISTICS 0;
ALTER TABLE kilburn.posting ALTER COLUMN word SET STATISTICS 0;
ALTER TABLE kilburn.checkpoint ALTER COLUMN data SET STATISTICS 0;
ALTER TABLE kilburn.history ALTER COLUMN digest SET STATISTICS 0;
ALTER TABLE kilburn.embedder ALTER COLUMN name SET STATISTICS 0;
ALTER TABLE kilburn.vector ALTER COLUMN data SET STATISTICS 0;
"""

KEEPING = """
-- What is kept for a tenant as a whole.
CREATE TABLE kilburn.setting(
    tenant bigint NOT NULL,
    name bytea NOT NULL,
    value bytea NOT NULL,
    seal bytea NOT NULL,
    PRIMARY KEY(tenant, name)
);

-- Objects in a cold place that are no text's: one that is being written, or one that is to be deleted (going).
CREATE TABLE kilburn.stray(
    tenant bigint NOT NULL,
    name bytea NOT NULL,
    going boolean NOT NULL,
    PRIMARY KEY(tenant, name)
);

-- Whoever removes a text that is cold, or takes it back, leaves its object to be deleted.
CREATE FUNCTION kilburn.leave_object() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO kilburn.stray(tenant, name, going) VALUES(OLD.tenant, OLD.data, true)
        ON CONFLICT(tenant, name) DO UPDATE SET going = true;
    RETURN NULL;
END $$;
CREATE TRIGGER content_gone AFTER DELETE ON kilburn.content FOR EACH ROW WHEN (OLD.codec = 3)
    EXECUTE FUNCTION kilburn.leave_object();
CREATE TRIGGER content_warm AFTER UPDATE OF codec ON kilburn.content FOR EACH ROW WHEN (OLD.codec = 3 AND NEW.codec <> 3)
    EXECUTE FUNCTION kilburn.leave_object();
CREATE INDEX content_cold ON kilburn.content(tenant, digest) WHERE codec = 3;

ALTER TABLE kilburn.setting ALTER COLUMN name SET STATISTICS 0, ALTER COLUMN value SET STATISTICS 0;
ALTER TABLE kilburn.stray ALTER COLUMN name SET STATISTICS 0;
"""

WIPING = """
-- One row: what was erased by transactions before this one is in no table any more.
CREATE TABLE kilburn.wiped(
    before xid8 NOT NULL
);
INSERT INTO kilburn.wiped(before) VALUES('0');
"""

PACKING = """
-- Which passages of a block have a word: see kilburn.backends.postgres.postings. Before, each passage of a word had a row.
ALTER TABLE kilburn.posting NO FORCE ROW LEVEL SECURITY;
ALTER TABLE kilburn.posting RENAME TO loose;
ALTER INDEX kilburn.posting_pkey RENAME TO loose_pkey;
CREATE TABLE kilburn.posting(
    tenant bigint NOT NULL,
    word bytea NOT NULL,
    block bigint NOT NULL,
    lows bytea NOT NULL,
    PRIMARY KEY(tenant, word, block)
);
ALTER TABLE kilburn.posting ALTER COLUMN lows SET STORAGE PLAIN;
ALTER TABLE kilburn.posting ALTER COLUMN word SET STATISTICS 0;
INSERT INTO kilburn.posting SELECT tenant, word, block, string_agg(lows, '' ORDER BY lows) FROM (
    SELECT tenant, word, entry >> 12 AS block,
        decode(lpad(to_hex(((entry & 4095) >> 7 << 8) | 128 | (entry & 127)), 4, '0'), 'hex') AS lows
    FROM kilburn.loose
) AS every GROUP BY tenant, word, block;
DROP TABLE kilburn.loose;

-- The state of a page and the counters of a session change often: there is room for their new versions beside the old ones, so
-- the indexes stay as they are, and later writes take the room of the old ones.
ALTER TABLE kilburn.page SET (fillfactor = 70);
ALTER TABLE kilburn.process SET (fillfactor = 50);
"""

OF_TENANTS = (
    "counter",
    "process",
    "content",
    "page",
    "event",
    "passage",
    "posting",
    "checkpoint",
    "mention",
    "citation",
    "history",
    "embedder",
    "vector",
    "embedded",
    "erasure",
)
"""The tables with rows of tenants, as the first migration makes them."""

KEPT = ("setting", "stray")
"""Those that came later."""

KEEPS = 2
"""The first version of the schema that has them."""

_WALL = sql.SQL(
    "ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; ALTER TABLE {table} FORCE ROW LEVEL SECURITY;"
    " CREATE POLICY own ON {table} USING (tenant = (SELECT nullif(current_setting('kilburn.tenant', true), '')::bigint));"
    " GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}"
)

_TENANT_WALL = sql.SQL(
    "ALTER TABLE kilburn.tenant ENABLE ROW LEVEL SECURITY; ALTER TABLE kilburn.tenant FORCE ROW LEVEL SECURITY;"
    " CREATE POLICY own ON kilburn.tenant"
    " USING (name = convert_to(nullif(current_setting('kilburn.name', true), ''), 'UTF8'));"
    " GRANT SELECT, INSERT ON kilburn.tenant TO {role}"
)


def _wall(connection: Connection, tables: Sequence[str]) -> None:
    """Show each tenant only its own rows of these tables."""
    role = sql.Identifier(ROLE)
    for name in tables:
        table = sql.Identifier("kilburn", name)
        connection.execute(_WALL.format(table=table, role=role))
        if connection.info.server_version >= MAINTAINS:
            connection.execute(sql.SQL("GRANT MAINTAIN ON {table} TO {role}").format(table=table, role=role))


def _first(connection: Connection) -> None:
    connection.execute(TABLES)
    role = sql.Identifier(ROLE)
    _wall(connection, OF_TENANTS)
    connection.execute(_TENANT_WALL.format(role=role))
    for text in (
        "GRANT USAGE ON SCHEMA kilburn TO {role}",
        "GRANT SELECT ON kilburn.version TO {role}",
        "GRANT USAGE ON ALL SEQUENCES IN SCHEMA kilburn TO {role}",
    ):
        connection.execute(sql.SQL(text).format(role=role))


def _keeping(connection: Connection) -> None:
    """Add the settings of a tenant, and what says of which cold objects no text is left."""
    connection.execute(KEEPING)
    _wall(connection, KEPT)


def _sharing(connection: Connection) -> None:
    """Add what gateways share besides the store."""
    connection.execute(counting.SHARED)
    for name in counting.TABLES:
        grant = "GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}"
        connection.execute(sql.SQL(grant).format(table=sql.Identifier("kilburn", name), role=sql.Identifier(ROLE)))


def _wiping(connection: Connection) -> None:
    """Add what says up to which transaction the erased bytes of all tenants are gone."""
    connection.execute(WIPING)
    connection.execute(sql.SQL("GRANT SELECT, UPDATE ON kilburn.wiped TO {role}").format(role=sql.Identifier(ROLE)))


def _packing(connection: Connection) -> None:
    """Keep the words of passages in blocks."""
    connection.execute(PACKING)
    _wall(connection, ("posting",))


MIGRATIONS = (_first, _keeping, _sharing, _wiping, _packing)

_RACED = (
    errors.DuplicateSchema,
    errors.DuplicateTable,
    errors.DuplicateObject,
    errors.UniqueViolation,
    errors.SerializationFailure,
)
"""Another program does the same at this moment."""


def migrate(connection: Connection, place: str) -> None:
    """Make the schema, or bring it to this version; one that is current is left as it is.

    Raises:
        StoreVersion: the server is too old, or the schema a newer Kilburn's. StoreCorrupt: a schema that is not Kilburn's.
        StoreReadOnly: the user may not make it.
    """
    check_server(connection, place)
    for _ in range(20):
        try:
            if version(connection, place) == len(MIGRATIONS):
                return
            with patient(connection):
                done = _locked_version(connection, place)
                _make_role(connection)
                for step in MIGRATIONS[done:]:
                    step(connection)
                connection.execute("UPDATE kilburn.version SET number = %s", (len(MIGRATIONS),))
                return
        except _RACED:
            time.sleep(0.05)
    raise StoreUnavailable(f"opening {place}: others are changing its schema", advice="try again")


def check_server(connection: Connection, place: str) -> None:
    """Refuse a server that is too old.

    Raises:
        StoreVersion.
    """
    if connection.info.server_version < OLDEST:
        what = f"{place} is PostgreSQL {connection.info.server_version // 10000}"
        raise StoreVersion(what, advice=f"use PostgreSQL {OLDEST // 10000} or newer")


def version(connection: Connection, place: str) -> int:
    """How many migrations were done; 0 where there is no schema.

    Raises:
        StoreVersion: it is a newer Kilburn's. StoreCorrupt: it is not Kilburn's.
    """
    found = connection.execute(
        "SELECT to_regnamespace('kilburn') IS NOT NULL, to_regclass('kilburn.version') IS NOT NULL"
    ).fetchone()
    schema, table = found or (False, False)
    if not schema:
        return 0
    if not table:
        raise StoreCorrupt(f"{place} has a schema kilburn that is not Kilburn's", advice="give another database")
    return _known(connection.execute("SELECT number FROM kilburn.version").fetchone(), place)


def _known(found: tuple[int, ...] | None, place: str) -> int:
    number = found[0] if found else 0
    if number > len(MIGRATIONS):
        raise StoreVersion(
            f"{place} has format {number}, this Kilburn knows up to {len(MIGRATIONS)}",
            advice="use the Kilburn that wrote it, or a newer one",
        )
    return number


def _locked_version(connection: Connection, place: str) -> int:
    if version(connection, place) == 0 and not _exists(connection):
        connection.execute("CREATE SCHEMA kilburn")
        connection.execute("CREATE TABLE kilburn.version(number bigint NOT NULL)")
        connection.execute("INSERT INTO kilburn.version VALUES(0)")
    return _known(connection.execute("SELECT number FROM kilburn.version FOR UPDATE").fetchone(), place)


def _exists(connection: Connection) -> bool:
    found = connection.execute("SELECT to_regnamespace('kilburn') IS NOT NULL").fetchone()
    return bool(found and found[0])


def _make_role(connection: Connection) -> None:
    """Make the role that owns nothing, and let this user become it."""
    role = sql.Identifier(ROLE)
    try:
        with connection.transaction():
            if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (ROLE,)).fetchone() is None:
                connection.execute(sql.SQL("CREATE ROLE {role} NOLOGIN").format(role=role))
            found = connection.execute("SELECT pg_has_role(current_user, %s, 'USAGE')", (ROLE,)).fetchone()
            if not (found and found[0]):
                connection.execute(sql.SQL("GRANT {role} TO CURRENT_USER").format(role=role))
    except errors.InsufficientPrivilege as error:
        raise StoreReadOnly(
            f"the user {connection.info.user} may not make the role {ROLE}",
            advice=f"an administrator has to: CREATE ROLE {ROLE} NOLOGIN; GRANT {ROLE} TO {connection.info.user};",
        ) from error


def tenant_number(connection: Connection, name: str, *, create: bool) -> int:
    """The number of a tenant; 0 where it has none and none is made."""
    select = "SELECT id FROM kilburn.tenant WHERE name = %s"
    key = name.encode()
    with patient(connection):
        settings = (
            "SELECT set_config('role', %s, true), set_config('kilburn.name', %s, true), set_config('row_security', 'on', true)"
        )
        connection.execute(settings, (ROLE, name))
        found = connection.execute(select, (key,)).fetchone()
        if found is None and create:
            connection.execute("INSERT INTO kilburn.tenant(name) VALUES(%s) ON CONFLICT DO NOTHING", (key,))
            found = connection.execute(select, (key,)).fetchone()
    if found is None and create:
        raise StoreError(f"tenant {name!r} cannot be made", advice="try again")
    return int(found[0]) if found else 0

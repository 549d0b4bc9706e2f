"""The schema `kilburn` in a database: its tables, the walls between tenants, and its version.

Every key begins with the tenant. The tables are not partitioned: a partition for each tenant would make every statement plan
through all of them; as the tenant is in every key, they can be distributed by it later. Row-level security is the second wall:
the role `kilburn_rows` owns nothing, and sees only rows of the tenant that its transaction says; without one it sees none.

The single row of `kilburn.version` holds the number of the schema. A newer schema and one of a development version before the
first release are refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from psycopg import errors, sql

from kilburn.backends.postgres.connection import ROLE, Connection, patient
from kilburn.errors import StoreCorrupt, StoreError, StoreReadOnly, StoreUnavailable, StoreVersion

OLDEST = 150000
"""The first PostgreSQL that is used, as `server_version_num` says it."""

MAINTAINS = 170000
"""The first in which who does not own a table may be allowed to vacuum it."""

SCHEMA = 1
"""The number of the schema in `TABLES`."""

MIGRATIONS: Mapping[int, Callable[[Connection], None]] = {}
"""Functions that change a schema with this number to the next one; `prepare_schema` calls them in one transaction."""

TABLES = """
CREATE SCHEMA kilburn;

CREATE TABLE kilburn.version(number bigint NOT NULL);

CREATE TABLE kilburn.tenant(
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name bytea NOT NULL UNIQUE
);

-- segments: the number of segments that a tenant ever had. Their numbers have no gaps, and come in the order of their commits.
CREATE TABLE kilburn.counter(
    tenant bigint PRIMARY KEY,
    segments bigint NOT NULL
);

-- counters_seal: the seal of used, head, pages, tokens, passages and characters, which every write changes.
-- epoch: counts the writes to a segment. Each write states the next number; a writer that does not know the last is refused.
-- writer: the marks of the last writes, by which a writer that lost the reply to its commit finds out whether it was done.
-- The other columns are those of SQLite's tables, see kilburn.backends.schema. Names are bytes: no collation plays a part.
-- The counters of a segment and the states of pages change often. The fill factor leaves room for new row versions beside the
-- old ones, so indexes stay unchanged and later writes reuse the space.
CREATE TABLE kilburn.segment(
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
    counters_seal bytea NOT NULL,
    epoch bigint NOT NULL,
    writer bytea NOT NULL,
    UNIQUE(tenant, name)
) WITH (fillfactor = 50);
-- Of indexes that seem equally good, as in an empty table, PostgreSQL takes the one that was made last.
ALTER TABLE kilburn.segment ADD PRIMARY KEY(tenant, id);
CREATE FUNCTION kilburn.check_epoch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.epoch <> OLD.epoch + 1 THEN
        RAISE EXCEPTION 'segment % is at write %, not %', OLD.id, OLD.epoch, NEW.epoch - 1 USING ERRCODE = 'KB001';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER segment_fenced BEFORE UPDATE ON kilburn.segment FOR EACH ROW EXECUTE FUNCTION kilburn.check_epoch();

CREATE TABLE kilburn.content(
    tenant bigint NOT NULL,
    digest bytea NOT NULL,
    size bigint NOT NULL,
    codec bigint NOT NULL,
    data bytea NOT NULL,
    PRIMARY KEY(tenant, digest)
);
CREATE INDEX content_cold ON kilburn.content(tenant, digest) WHERE codec = 3;

-- Objects in a cold place that hold no text's only copy: one that is being written (0), one that is to be deleted (1), or one
-- that was given up while somebody may be writing it (when, in seconds since the epoch).
CREATE TABLE kilburn.cold_object(
    tenant bigint NOT NULL,
    name bytea NOT NULL,
    deleting double precision NOT NULL,
    PRIMARY KEY(tenant, name)
);
-- The object of a text that is removed, or is brought back from the cold place, is to be deleted.
CREATE FUNCTION kilburn.release_object() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO kilburn.cold_object(tenant, name, deleting) VALUES(OLD.tenant, OLD.data, 1)
        ON CONFLICT(tenant, name) DO UPDATE SET deleting = 1;
    RETURN NULL;
END $$;
CREATE TRIGGER content_deleted AFTER DELETE ON kilburn.content FOR EACH ROW WHEN (OLD.codec = 3)
    EXECUTE FUNCTION kilburn.release_object();
CREATE TRIGGER content_warmed AFTER UPDATE OF codec ON kilburn.content FOR EACH ROW WHEN (OLD.codec = 3 AND NEW.codec <> 3)
    EXECUTE FUNCTION kilburn.release_object();

CREATE TABLE kilburn.page(
    tenant bigint NOT NULL,
    segment bigint NOT NULL,
    id bigint NOT NULL,
    content bytea,
    extra bytea,
    call bytea,
    place text NOT NULL,
    pinned bigint NOT NULL,
    importance double precision NOT NULL,
    valid_until double precision,
    state_seal bytea NOT NULL,
    first_passage bigint,
    last_passage bigint,
    record bytea NOT NULL,
    seal bytea NOT NULL,
    FOREIGN KEY(tenant, segment) REFERENCES kilburn.segment(tenant, id),
    FOREIGN KEY(tenant, content) REFERENCES kilburn.content(tenant, digest),
    FOREIGN KEY(tenant, extra) REFERENCES kilburn.content(tenant, digest)
) WITH (fillfactor = 70);
CREATE INDEX page_content ON kilburn.page(tenant, content);
CREATE INDEX page_extra ON kilburn.page(tenant, extra) WHERE extra IS NOT NULL;
CREATE INDEX page_call ON kilburn.page(tenant, segment, call) WHERE call IS NOT NULL;
ALTER TABLE kilburn.page ADD PRIMARY KEY(tenant, segment, id);

CREATE TABLE kilburn.event(
    tenant bigint NOT NULL,
    segment bigint NOT NULL,
    number bigint NOT NULL,
    act text NOT NULL,
    body bytea NOT NULL,
    seal bytea NOT NULL,
    PRIMARY KEY(tenant, segment, number)
);
CREATE INDEX event_note ON kilburn.event(tenant, segment, number) WHERE act = 'note';

CREATE TABLE kilburn.passage(
    tenant bigint NOT NULL,
    id bigint NOT NULL,
    page bigint NOT NULL,
    start bigint NOT NULL,
    stop bigint NOT NULL,
    PRIMARY KEY(tenant, id)
);

-- The text index: the passages of a block that have a word, see kilburn.backends.postgres.postings.
CREATE TABLE kilburn.posting(
    tenant bigint NOT NULL,
    word bytea NOT NULL,
    block bigint NOT NULL,
    lows bytea NOT NULL,
    PRIMARY KEY(tenant, word, block)
);

-- forked: a branch is read from it, so it stays when a newer checkpoint is written.
CREATE TABLE kilburn.checkpoint(
    tenant bigint NOT NULL,
    segment bigint NOT NULL,
    head bigint NOT NULL,
    forked boolean NOT NULL,
    size bigint NOT NULL,
    codec bigint NOT NULL,
    data bytea NOT NULL,
    seal bytea NOT NULL,
    PRIMARY KEY(tenant, segment, head)
);

CREATE TABLE kilburn.mention(
    tenant bigint NOT NULL,
    segment bigint NOT NULL,
    node bigint NOT NULL,
    event bigint NOT NULL,
    PRIMARY KEY(tenant, segment, node, event)
);

CREATE TABLE kilburn.citation(
    tenant bigint NOT NULL,
    segment bigint NOT NULL,
    page bigint NOT NULL,
    citing_segment bigint NOT NULL,
    citing_page bigint NOT NULL,
    PRIMARY KEY(tenant, segment, page, citing_segment, citing_page)
);

CREATE TABLE kilburn.history(
    tenant bigint NOT NULL,
    segment bigint NOT NULL,
    message bigint NOT NULL,
    digest bytea NOT NULL,
    is_last boolean NOT NULL,
    last_page bigint NOT NULL,
    tail bytea,
    PRIMARY KEY(tenant, segment, message)
);
CREATE INDEX history_digest ON kilburn.history(tenant, digest, is_last, segment);
CREATE INDEX history_tail ON kilburn.history(tenant, tail, is_last, segment) WHERE tail IS NOT NULL;

-- vectors: the number of vectors that an embedder ever had. The number of a vector is never given again.
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
    segment bigint NOT NULL,
    passages_done bigint NOT NULL,
    PRIMARY KEY(tenant, embedder, segment),
    FOREIGN KEY(tenant, embedder) REFERENCES kilburn.embedder(tenant, id) ON DELETE CASCADE
);

-- What is kept for a tenant as a whole.
CREATE TABLE kilburn.setting(
    tenant bigint NOT NULL,
    name bytea NOT NULL,
    value bytea NOT NULL,
    seal bytea NOT NULL,
    PRIMARY KEY(tenant, name)
);

-- One row while erased bytes of a tenant may still lie in the server's files. xid: the transaction that erased last.
CREATE TABLE kilburn.erasure(
    tenant bigint PRIMARY KEY,
    number bigint NOT NULL,
    xid xid8 NOT NULL
);

-- One row: no table contains any more what transactions before this one erased.
CREATE TABLE kilburn.wiped(
    before xid8 NOT NULL
);
INSERT INTO kilburn.wiped(before) VALUES('0');

-- The keys of the gateways over this database. `changed` counts the changes: whoever knows some reads what came later.
CREATE TABLE kilburn.key(
    name text PRIMARY KEY,
    changed bigint NOT NULL UNIQUE,
    body bytea NOT NULL
);

-- What each key and end user has taken of its requests per minute. full_at: the time at which all would be there again.
CREATE UNLOGGED TABLE kilburn.allowance(
    name bytea PRIMARY KEY,
    full_at double precision NOT NULL
) WITH (fillfactor = 50);

-- How many requests of each the gateways are answering, and until when that holds if a gateway says nothing more.
-- Who changes or sums up the rows of a name has locked its allowance.
CREATE UNLOGGED TABLE kilburn.running(
    name bytea NOT NULL,
    gateway bytea NOT NULL,
    count bigint NOT NULL,
    until double precision NOT NULL,
    PRIMARY KEY(name, gateway)
) WITH (fillfactor = 50);
CREATE INDEX running_gateway ON kilburn.running(gateway);

-- See kilburn.backends.counting.Turnstile.count: demands come with the number of their request, and their own in it.
CREATE FUNCTION kilburn.take(
    mine bytea, lease double precision, held_names bytea[], held_counts bigint[],
    requests bigint[], places bigint[], names bytea[], rates bigint[], mosts bigint[]
) RETURNS TABLE(request bigint, refused bigint, wait double precision) LANGUAGE plpgsql AS $$
DECLARE
    moment double precision;
    known double precision;
    there bigint;
    demand record;
BEGIN
    -- Everyone locks in the same order.
    INSERT INTO kilburn.allowance AS old(name, full_at)
        SELECT each.name, 0 FROM (SELECT DISTINCT one AS name FROM unnest(names || held_names) AS one) AS each ORDER BY each.name
        ON CONFLICT ON CONSTRAINT allowance_pkey DO UPDATE SET full_at = old.full_at;
    moment := extract(epoch FROM clock_timestamp());
    INSERT INTO kilburn.running AS r(name, gateway, count, until)
        SELECT held.name, mine, held.count, moment + lease FROM unnest(held_names, held_counts) AS held(name, count)
        ON CONFLICT ON CONSTRAINT running_pkey DO UPDATE SET count = excluded.count;
    DELETE FROM kilburn.running AS r WHERE r.gateway = mine AND r.count = 0;
    UPDATE kilburn.running AS r SET until = moment + lease WHERE r.gateway = mine;
    FOR request IN SELECT DISTINCT one FROM unnest(requests) AS one ORDER BY one LOOP
        refused := -1;
        wait := 0;
        FOR demand IN SELECT * FROM unnest(requests, places, names, rates, mosts) AS one(request, place, name, rate, most)
                WHERE one.request = take.request ORDER BY one.place LOOP
            IF demand.rate > 0 THEN
                SELECT a.full_at INTO known FROM kilburn.allowance AS a WHERE a.name = demand.name;
                wait := greatest(0, known - moment - (greatest(1, demand.rate / 4.0) - 1) * 60.0 / demand.rate);
                IF wait > 0 THEN
                    refused := demand.place;
                    EXIT;
                END IF;
            END IF;
            IF demand.most > 0 THEN
                SELECT coalesce(sum(r.count), 0) INTO there FROM kilburn.running AS r
                    WHERE r.name = demand.name AND (r.until > moment OR r.gateway = mine);
                IF there >= demand.most THEN
                    refused := demand.place;
                    EXIT;
                END IF;
            END IF;
        END LOOP;
        IF refused = -1 THEN
            FOR demand IN SELECT * FROM unnest(requests, places, names, rates, mosts) AS one(request, place, name, rate, most)
                    WHERE one.request = take.request LOOP
                IF demand.rate > 0 THEN
                    UPDATE kilburn.allowance AS a SET full_at = greatest(a.full_at, moment) + 60.0 / demand.rate
                        WHERE a.name = demand.name;
                END IF;
                IF demand.most > 0 THEN
                    INSERT INTO kilburn.running AS r(name, gateway, count, until) VALUES(demand.name, mine, 1, moment + lease)
                        ON CONFLICT ON CONSTRAINT running_pkey DO UPDATE SET count = r.count + 1;
                END IF;
            END LOOP;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;

-- Columns that hold compressed bytes, or few. CREATE TABLE can set this from PostgreSQL 16 on.
ALTER TABLE kilburn.content ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE kilburn.checkpoint ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE kilburn.vector ALTER COLUMN data SET STORAGE EXTERNAL;
ALTER TABLE kilburn.posting ALTER COLUMN lows SET STORAGE PLAIN;

-- ANALYZE would keep samples of words and names.
ALTER TABLE kilburn.tenant ALTER COLUMN name SET STATISTICS 0;
ALTER TABLE kilburn.segment ALTER COLUMN name SET STATISTICS 0, ALTER COLUMN owner SET STATISTICS 0;
ALTER TABLE kilburn.content ALTER COLUMN digest SET STATISTICS 0, ALTER COLUMN data SET STATISTICS 0;
ALTER TABLE kilburn.cold_object ALTER COLUMN name SET STATISTICS 0;
ALTER TABLE kilburn.page ALTER COLUMN content SET STATISTICS 0, ALTER COLUMN extra SET STATISTICS 0,
    ALTER COLUMN call SET STATISTICS 0, ALTER COLUMN record SET STATISTICS 0;
ALTER TABLE kilburn.event ALTER COLUMN body SET STATISTICS 0;
ALTER TABLE kilburn.posting ALTER COLUMN word SET STATISTICS 0;
ALTER TABLE kilburn.checkpoint ALTER COLUMN data SET STATISTICS 0;
ALTER TABLE kilburn.history ALTER COLUMN digest SET STATISTICS 0;
ALTER TABLE kilburn.embedder ALTER COLUMN name SET STATISTICS 0;
ALTER TABLE kilburn.vector ALTER COLUMN data SET STATISTICS 0;
ALTER TABLE kilburn.setting ALTER COLUMN name SET STATISTICS 0, ALTER COLUMN value SET STATISTICS 0;
"""

OF_TENANTS = (
    "counter",
    "segment",
    "content",
    "cold_object",
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
    "setting",
    "erasure",
)
"""The tables with rows of tenants."""

SHARED = ("key", "allowance", "running")
"""The tables that the gateways over a database share, whatever tenants they serve."""

_RELATIONS = (
    "SELECT to_regnamespace('kilburn') IS NOT NULL, to_regclass('kilburn.version') IS NOT NULL,"
    " to_regclass('kilburn.process') IS NOT NULL"
)
"""Whether there are a schema, its number, and the table `process`, which only development versions had."""

_WALL = sql.SQL(
    "ALTER TABLE {table} ENABLE ROW LEVEL SECURITY; ALTER TABLE {table} FORCE ROW LEVEL SECURITY;"
    " CREATE POLICY own ON {table} USING (tenant = (SELECT nullif(current_setting('kilburn.tenant', true), '')::bigint));"
    " GRANT SELECT, INSERT, UPDATE, DELETE ON {table} TO {role}"
)

_RIGHTS = sql.SQL(
    "ALTER TABLE kilburn.tenant ENABLE ROW LEVEL SECURITY; ALTER TABLE kilburn.tenant FORCE ROW LEVEL SECURITY;"
    " CREATE POLICY own ON kilburn.tenant"
    " USING (name = convert_to(nullif(current_setting('kilburn.name', true), ''), 'UTF8'));"
    " GRANT USAGE ON SCHEMA kilburn TO {role};"
    " GRANT USAGE ON ALL SEQUENCES IN SCHEMA kilburn TO {role};"
    " GRANT SELECT, INSERT ON kilburn.tenant TO {role};"
    " GRANT SELECT ON kilburn.version TO {role};"
    " GRANT SELECT, UPDATE ON kilburn.wiped TO {role};"
    " GRANT SELECT, INSERT, UPDATE, DELETE ON {shared} TO {role}"
)


def _create(connection: Connection) -> None:
    """Make the schema, with row-level security and the rights of the role."""
    connection.execute(TABLES)
    _make_role(connection)
    role = sql.Identifier(ROLE)
    for name in OF_TENANTS:
        table = sql.Identifier("kilburn", name)
        connection.execute(_WALL.format(table=table, role=role))
        if connection.info.server_version >= MAINTAINS:
            connection.execute(sql.SQL("GRANT MAINTAIN ON {table} TO {role}").format(table=table, role=role))
    shared = sql.SQL(", ").join(sql.Identifier("kilburn", name) for name in SHARED)
    connection.execute(_RIGHTS.format(role=role, shared=shared))
    connection.execute("INSERT INTO kilburn.version(number) VALUES(%s)", (SCHEMA,))


def _migrate(connection: Connection) -> None:
    # Another program may have migrated the schema while this one waited for the lock.
    ((number,),) = connection.execute("SELECT number FROM kilburn.version FOR UPDATE").fetchall()
    for step in range(number, SCHEMA):
        MIGRATIONS[step](connection)
    connection.execute("UPDATE kilburn.version SET number = %s", (SCHEMA,))


_RACED = (
    errors.DuplicateSchema,
    errors.DuplicateTable,
    errors.DuplicateObject,
    errors.UniqueViolation,
    errors.SerializationFailure,
)
"""Another program does the same at this moment."""


def prepare_schema(connection: Connection, place: str) -> None:
    """Create the schema where there is none, or migrate an older one, in one transaction.

    Raises:
        StoreVersion: the server is too old, or the schema is a newer Kilburn's or a development version's.
        StoreCorrupt: not Kilburn's schema. StoreReadOnly: the user may not create it.
    """
    check_server(connection, place)
    for _ in range(20):
        number = schema_number(connection, place)
        if number == SCHEMA:
            return
        try:
            with patient(connection):
                if number == 0:
                    _create(connection)
                else:
                    _migrate(connection)
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
        problem = f"{place} is PostgreSQL {connection.info.server_version // 10000}"
        raise StoreVersion(problem, advice=f"use PostgreSQL {OLDEST // 10000} or newer")


def schema_number(connection: Connection, place: str) -> int:
    """Return the number of the database's schema, or 0 where there is none.

    Raises:
        StoreVersion: the schema of a newer Kilburn, or of a development version. StoreCorrupt: not Kilburn's schema.
    """
    ((schema, numbered, development),) = connection.execute(_RELATIONS).fetchall()
    if not schema:
        return 0
    if development:
        raise StoreVersion(
            f"{place} was written by a development version of Kilburn, before 0.1.0",
            advice="export each tenant with the version that wrote it (`kilburn export --db URL --out all.jsonl`), then import it"
            " into a new database (`kilburn import all.jsonl --db NEW`)",
        )
    numbers = connection.execute("SELECT number FROM kilburn.version").fetchall() if numbered else []
    if len(numbers) != 1 or numbers[0][0] < 1:
        raise StoreCorrupt(f"{place} has a schema kilburn that is not Kilburn's", advice="give another database")
    number = int(numbers[0][0])
    if number > SCHEMA:
        raise StoreVersion(
            f"{place} has schema {number}, and this Kilburn supports schema {SCHEMA}",
            advice="use the Kilburn that wrote it, or a newer one",
        )
    return number


def _make_role(connection: Connection) -> None:
    """Make the role that owns nothing, and let this user become it."""
    role = sql.Identifier(ROLE)
    try:
        with connection.transaction():
            if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (ROLE,)).fetchone() is None:
                connection.execute(sql.SQL("CREATE ROLE {role} NOLOGIN").format(role=role))
            row = connection.execute("SELECT pg_has_role(current_user, %s, 'USAGE')", (ROLE,)).fetchone()
            if not (row and row[0]):
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
        row = connection.execute(select, (key,)).fetchone()
        if row is None and create:
            connection.execute("INSERT INTO kilburn.tenant(name) VALUES(%s) ON CONFLICT DO NOTHING", (key,))
            row = connection.execute(select, (key,)).fetchone()
    if row is None and create:
        raise StoreError(f"tenant {name!r} cannot be made", advice="try again")
    return int(row[0]) if row else 0

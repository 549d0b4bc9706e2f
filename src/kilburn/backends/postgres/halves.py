"""The vectors of a tenant as pgvector's `halfvec`, and the nearest of them, found by the server.

The column `half` stands beside the stored bytes of a vector. The database fills it itself, so whoever writes need not know of it.
Float16 only chooses candidates: whoever asks puts them in order by the stored bytes, as over a file. A look through all
says how near each is to within `BAND`, and gives so many that no other can be among the nearest.

A tenant with more than `EXACT` vectors of an embedder gets an HNSW index of its own, so nobody else's vectors are in the way of
its searches. The index stands on a table of numbers, which name vectors, and not on the vectors' own table: that one can be
written anew after a forgetting without building the graph again, and VACUUM overwrites a vector that leaves the graph. Writers
do not touch it. What came after the last of its numbers is looked through until `tend` takes it in.

Without pgvector all of this is absent, and a program looks through the vectors in its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from kilburn.backends.postgres.connection import ROLE, Connection, Database, connected, patient
from kilburn.backends.postgres.schema import MAINTAINS
from kilburn.backends.postgres.statements import Statements
from kilburn.backends.ranked import entry_ranges
from kilburn.errors import MissingExtra
from kilburn.retrieval import EXACT

try:
    from psycopg import errors, sql
except ModuleNotFoundError as error:
    raise MissingExtra("psycopg", "postgres") from error

log = logging.getLogger("kilburn")

OLDEST = (0, 8)
"""The first pgvector whose index goes on until it has found enough."""

MAX_DIMENSIONS = 3800
"""Numbers of a vector that is kept as halves: a row must fit a page."""

BAND = 0.0011
"""Two products of vectors of length 1 in float16 can be further apart by so much than they are."""

EXTRA_CANDIDATES = 64
"""Candidates beyond those that are wanted."""

LOOK = 200
"""Candidates of the graph that are looked at, at least: see lab/benchmarks/nearest.py."""

WIDEN = 8
"""So many times more, where those do not do."""

MAX_UNINDEXED = 2000
"""Vectors that came after an index was built, before they are taken into it."""

STEP = 500
"""Vectors of a transaction of `tend`."""

MEMORY = 512 << 20
"""Bytes for building an index, at most."""

BUILDING = 6 * 3600.0
"""Seconds that this may take."""

_SELECT_EXTENSION = (
    "SELECT (SELECT nspname FROM pg_extension JOIN pg_namespace ON pg_namespace.oid = extnamespace WHERE extname = 'vector'),"
    " coalesce((SELECT extversion FROM pg_extension WHERE extname = 'vector'),"
    " (SELECT default_version FROM pg_available_extensions WHERE name = 'vector'), '0'),"
    " EXISTS(SELECT FROM pg_attribute WHERE attrelid = to_regclass('kilburn.vector') AND attname = 'half' AND NOT attisdropped)"
)

_HALVES = sql.SQL("""
-- The numbers of stored bytes: a float32 that is their scale, and an int8 for each. NULL where it cannot be one.
CREATE OR REPLACE FUNCTION kilburn.half(data bytea) RETURNS {s}.halfvec LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE RETURN (
    CASE WHEN length(data) BETWEEN 5 AND {longest} THEN (
        SELECT array_agg(((get_byte(data, place) + 128) % 256 - 128) * scale ORDER BY place)::{s}.halfvec
        FROM (
            SELECT CASE WHEN exponent > 0 THEN (1 + mantissa / 8388608.0::float8) * 2.0::float8 ^ (exponent - 127) ELSE 0 END
                AS scale
            FROM (
                SELECT ((get_byte(data, 3) & 127) << 1) | (get_byte(data, 2) >> 7) AS exponent,
                    ((get_byte(data, 2) & 127) << 16) | (get_byte(data, 1) << 8) | get_byte(data, 0) AS mantissa
            ) AS bits
            WHERE exponent <= 134 AND get_byte(data, 3) < 128
        ) AS scaled, generate_series(4, length(data) - 1) AS place
    ) END
);
ALTER TABLE kilburn.vector ADD COLUMN half {s}.halfvec;
ALTER TABLE kilburn.vector ALTER COLUMN half SET STORAGE PLAIN, ALTER COLUMN half SET STATISTICS 0;
CREATE INDEX vector_bare ON kilburn.vector(tenant, embedder, id) WHERE half IS NULL;
CREATE OR REPLACE FUNCTION kilburn.fill_half() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.half := kilburn.half(NEW.data);
    RETURN NEW;
END $$;
CREATE OR REPLACE TRIGGER vector_new BEFORE INSERT ON kilburn.vector FOR EACH ROW WHEN (NEW.half IS NULL)
    EXECUTE FUNCTION kilburn.fill_half();

-- What an index is made of. The number of a vector is never given again, and a vector never changes: it is always the same.
CREATE OR REPLACE FUNCTION kilburn.half_of(of_tenant bigint, of_embedder bigint, number bigint) RETURNS {s}.halfvec
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE AS $$
DECLARE
    found {s}.halfvec;
BEGIN
    SELECT half INTO found FROM kilburn.vector WHERE tenant = of_tenant AND embedder = of_embedder AND id = number;
    RETURN found;
END $$;

-- A vector that goes leaves the index.
CREATE OR REPLACE FUNCTION kilburn.leave_near() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    own record;
BEGIN
    FOR own IN
        SELECT tenant, embedder, to_regclass(format('kilburn.near_%s_%s', tenant, embedder)) AS place
        FROM (SELECT DISTINCT tenant, embedder FROM gone) AS owners
    LOOP
        IF own.place IS NOT NULL THEN
            EXECUTE format('DELETE FROM %s WHERE id IN (SELECT id FROM gone WHERE tenant = $1 AND embedder = $2)', own.place)
                USING own.tenant, own.embedder;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER vector_gone AFTER DELETE ON kilburn.vector REFERENCING OLD TABLE AS gone FOR EACH STATEMENT
    EXECUTE FUNCTION kilburn.leave_near();
""")

_INDEX = sql.SQL("""
-- One without an index is left where the extension was dropped.
DROP TABLE IF EXISTS {near};
CREATE TABLE {near}(id bigint PRIMARY KEY, entry bigint NOT NULL);
INSERT INTO {near} SELECT id, entry FROM kilburn.vector WHERE tenant = {tenant} AND embedder = {embedder};
CREATE INDEX {index} ON {near} USING hnsw (({half}) {s}.halfvec_ip_ops);
ALTER INDEX {whole} ALTER COLUMN 1 SET STATISTICS 0;
ALTER TABLE {near} ENABLE ROW LEVEL SECURITY;
ALTER TABLE {near} FORCE ROW LEVEL SECURITY;
CREATE POLICY own ON {near} USING ((SELECT nullif(current_setting('kilburn.tenant', true), '')::bigint) = {tenant});
GRANT SELECT, INSERT, DELETE ON {near} TO {role};
""")
_HALF = sql.SQL("kilburn.half_of({tenant}, {embedder}, id)::{s}.halfvec({size})")

_ABOUT = (
    "SELECT id, size, to_regclass(format('kilburn.near_%%s_%%s_half', tenant, id)) IS NOT NULL,"
    " EXISTS(SELECT FROM kilburn.vector WHERE vector.tenant = embedder.tenant AND embedder = embedder.id AND half IS NULL)"
    " FROM kilburn.embedder WHERE tenant = %s AND name = %s"
)
_SETTINGS = (
    "SELECT set_config('enable_sort', %s, true),"
    " set_config('hnsw.iterative_scan', 'relaxed_order', true), set_config('hnsw.ef_search', %s, true)"
)
_OF_ALL = "kilburn.vector WHERE tenant = %s AND embedder = %s AND id > %s"
_OF_LATE = f"{_OF_ALL} AND entry >> 32 = ANY(%s::bigint[])"
# In order of entries, as their index has them: the other one would read all vectors of the tenant.
_OF_RANGES = (
    "unnest(%s::bigint[], %s::bigint[]) AS range(low, high) CROSS JOIN LATERAL (SELECT id, entry, half FROM kilburn.vector"
    " WHERE tenant = %s AND embedder = %s AND entry BETWEEN low AND high ORDER BY entry OFFSET 0) AS one"
)
# What is put in order is narrow; the rest of a row is read for the best alone, each by itself (OFFSET 0).
_EXACT = sql.SQL(
    "WITH best AS MATERIALIZED (SELECT id, half OPERATOR({s}.<#>) %s::float8[]::{s}.halfvec AS far FROM {these}"
    " ORDER BY far, entry LIMIT %s) SELECT entry, data, seal, far FROM best CROSS JOIN LATERAL (SELECT entry, data, seal"
    " FROM kilburn.vector WHERE tenant = %s AND embedder = %s AND vector.id = best.id OFFSET 0) AS whole ORDER BY far, entry"
)
_BY_INDEX = sql.SQL(
    "WITH best AS MATERIALIZED (SELECT id FROM {near} {these} ORDER BY ({half}) OPERATOR({s}.<#>) %s::float8[]::{s}.halfvec"
    " LIMIT %s) SELECT entry, data, seal FROM best CROSS JOIN LATERAL (SELECT entry, data, seal"
    " FROM kilburn.vector WHERE tenant = %s AND embedder = %s AND vector.id = best.id OFFSET 0) AS whole"
)
_AMONG = sql.SQL("WHERE entry >> 32 = ANY(%s::bigint[])")

VectorRow = tuple[int, bytes, bytes]
"""Entry, stored bytes and seal of a vector."""


def add_halves(connection: Connection) -> str:
    """Let the database keep vectors as halves too, where pgvector is; returns the schema that this is in, or "" without it."""
    schema, version, has_halves = _look(connection)
    if has_halves:
        return schema
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        if version != "0":
            log.warning(
                "pgvector %s is too old: vectors are looked through in the program's memory. Install 0.8 or newer on the server;"
                " where a database has the extension, run ALTER EXTENSION vector UPDATE in it",
                version,
            )
        return ""
    try:
        with patient(connection):
            # Of two programs that do this, one waits here.
            connection.execute("SELECT number FROM kilburn.version FOR UPDATE")
            connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
            schema, _, has_halves = _look(connection)
            if not has_halves:
                connection.execute(_HALVES.format(s=sql.Identifier(schema), longest=sql.Literal(MAX_DIMENSIONS + 4)))
    except (errors.InsufficientPrivilege, errors.FeatureNotSupported, errors.UndefinedFile, errors.LockNotAvailable) as error:
        log.info("vectors are looked through in the program's memory: %s", error.diag.message_primary)
        return ""
    return schema


def _look(connection: Connection) -> tuple[str, str, bool]:
    ((schema, version, has_halves),) = connection.execute(_SELECT_EXTENSION).fetchall()
    return schema or "", version, has_halves


def read_schema(connection: Connection) -> str:
    """The schema of pgvector, where the database keeps vectors as halves; "" otherwise."""
    schema, _, has_halves = _look(connection)
    return schema if has_halves else ""


class HalfVectors:
    """Looks for the nearest vectors of one embedder, in one transaction of a tenant.

    Args:
        place: the schema of pgvector.
    """

    def __init__(self, statements: Statements, tenant: int, place: str) -> None:
        self._statements, self._tenant, self._place = statements, tenant, sql.Identifier(place)

    def near(self, name: bytes, vector: Sequence[float], limit: int, segments: Collection[int] | None) -> list[VectorRow] | None:
        """Vectors among which the nearest are; None where this cannot be said here."""
        row = self._statements.row(_ABOUT, self._tenant, name)
        if row is None:
            return []
        embedder, size, indexed, bare = row
        if bare or size != len(vector) + 4:
            return None
        if limit < 1 or (segments is not None and not segments):
            return []
        numbers = list(vector)
        if indexed and self._are_many(segments):
            hits = self._by_index(embedder, numbers, limit, segments)
            if len(hits) >= limit:
                return hits
        return self._exact(embedder, numbers, limit, segments)

    def _are_many(self, segments: Collection[int] | None) -> bool:
        """Whether these segments may have more vectors than are compared one by one."""
        if segments is None:
            return True
        select = "SELECT coalesce(sum(passages), 0)::bigint FROM kilburn.segment WHERE tenant = %s AND id = ANY(%s::bigint[])"
        ((passages,),) = self._statements.rows(select, self._tenant, list(segments))
        return bool(passages > EXACT)

    def _exact(
        self, embedder: int, vector: list[float], limit: int, segments: Collection[int] | None, after_id: int = 0
    ) -> list[VectorRow]:
        """Compare all vectors of these segments, or all with an id greater than `after_id`."""
        embedder_key = self._tenant, embedder
        values: tuple[object, ...]
        if segments is None:
            text, values = _OF_ALL, (*embedder_key, after_id)
        elif after_id:
            text, values = _OF_LATE, (*embedder_key, after_id, list(segments))
        else:
            ranges = entry_ranges(sorted(segments))
            text, values = _OF_RANGES, ([low for low, _ in ranges], [high for _, high in ranges], *embedder_key)
        select = _EXACT.format(s=self._place, these=sql.SQL(text))
        self._statements.send(_SETTINGS, "on", "40")
        row_limit = limit + EXTRA_CANDIDATES
        while True:
            rows = self._statements.rows(select, vector, *values, row_limit, *embedder_key)
            if len(rows) < row_limit or rows[-1][-1] - rows[limit - 1][-1] > BAND:
                return [(entry, data, seal) for entry, data, seal, _ in rows]
            row_limit *= WIDEN

    def _by_index(self, embedder: int, vector: list[float], limit: int, segments: Collection[int] | None) -> list[VectorRow]:
        embedder_key, row_limit = (self._tenant, embedder), limit + EXTRA_CANDIDATES
        near = near_table(*embedder_key)
        select = _BY_INDEX.format(
            s=self._place,
            near=near,
            these=sql.SQL("") if segments is None else _AMONG,
            half=indexed_expression(*embedder_key, len(vector), self._place),
        )
        last = self._statements.send(sql.SQL("SELECT coalesce(max(id), 0) FROM {near}").format(near=near))
        self._statements.send(_SETTINGS, "off", str(min(1000, max(LOOK, row_limit))))
        rows = self._statements.rows(select, *(() if segments is None else (list(segments),)), vector, row_limit, *embedder_key)
        ((last_id,),) = last.fetchall()
        return [*rows, *self._exact(embedder, vector, limit, segments, last_id)]

    def of(self, name: bytes, entries: Sequence[int]) -> list[VectorRow]:
        """The vectors of these entries."""
        select = (
            "SELECT own.* FROM kilburn.embedder CROSS JOIN unnest(%s::bigint[]) AS wanted(entry) CROSS JOIN LATERAL"
            " (SELECT entry, data, seal FROM kilburn.vector WHERE vector.tenant = embedder.tenant AND embedder = embedder.id"
            " AND vector.entry = wanted.entry OFFSET 0) AS own WHERE embedder.tenant = %s AND name = %s"
        )
        return self._statements.rows(select, list(dict.fromkeys(entries)), self._tenant, name)


def near_table(tenant: int, embedder: int) -> sql.Identifier:
    """The table of an index."""
    return sql.Identifier("kilburn", f"near_{tenant}_{embedder}")


def indexed_expression(tenant: int, embedder: int, size: int, place: sql.Identifier) -> sql.Composed:
    """Return the expression that an index of vectors with `size` numbers is built on."""
    numbers = {"tenant": sql.Literal(tenant), "embedder": sql.Literal(embedder), "size": sql.Literal(size)}
    return _HALF.format(s=place, **numbers)


def indexed(statements: Statements, tenant: int) -> list[tuple[int, int]]:
    """Tenant and embedder of each index of this tenant."""
    select = (
        "SELECT split_part(relname::text, '_', 3)::bigint FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace"
        " WHERE nspname = 'kilburn' AND relkind = 'i' AND relname::text LIKE format('near\\_%%s\\_%%%%\\_half', %s::bigint)"
    )
    return sorted((tenant, embedder) for (embedder,) in statements.rows(select, tenant))


def leave(statements: Statements, tenant: int) -> None:
    """Take numbers of vectors that are gone out of the indexes: they went while an index was built."""
    for embedder_key in indexed(statements, tenant):
        statements.send(
            sql.SQL(
                "DELETE FROM {near} AS known WHERE NOT EXISTS(SELECT FROM kilburn.vector"
                " WHERE tenant = {tenant} AND embedder = {embedder} AND vector.id = known.id)"
            ).format(near=near_table(*embedder_key), tenant=sql.Literal(embedder_key[0]), embedder=sql.Literal(embedder_key[1]))
        )


def tend(database: Database, place: str, above: int) -> list[str]:
    """Do what searches by meaning will need, however long it takes, and others go on meanwhile. It fills in halves of vectors
    that were stored before there were any, builds the index of an embedder with many vectors, takes late ones into it, and
    removes what is of no use any more. Whoever is killed in between has done a part, and the next call goes on there.

    Args:
        above: vectors of an embedder that are looked through without an index.

    Returns:
        What was done, in words.

    Raises:
        StoreReadOnly: the user may not build one. StoreBusy, StoreFull.
    """
    actions = []
    if filled := _fill(database):
        actions.append(f"filled in {filled:,} vectors")
    embedders = database.read("reading", lambda statements: statements.rows(_LARGE, database.tenant))
    built = database.read("reading", lambda statements: indexed(statements, database.tenant))
    for embedder_key in built:
        if embedder_key[1] not in {embedder for embedder, *_ in embedders}:
            with connected(database.url, "removing an index of") as connection:
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {near}").format(near=near_table(*embedder_key)))
            actions.append("removed an index")
    for embedder, size, vector_count in embedders:
        if (database.tenant, embedder) in built:
            if late := _take_late(database, embedder, vector_count):
                actions.append(f"took {late:,} vectors into an index")
        elif (
            vector_count > above and size - 4 <= MAX_DIMENSIONS and (count := _build(database, embedder, size - 4, place, above))
        ):
            database.write("indexing", lambda statements: leave(statements, database.tenant))
            actions.append(f"built an index of {count:,} vectors")
    return actions


_LARGE = "SELECT id, size, vectors FROM kilburn.embedder WHERE tenant = %s ORDER BY id"


def _fill(database: Database) -> int:
    """Fill in halves; returns how many."""
    update = (
        "UPDATE kilburn.vector SET half = kilburn.half(vector.data) FROM (SELECT embedder, id FROM kilburn.vector"
        " WHERE tenant = %s AND half IS NULL AND (embedder, id) > (%s, %s) ORDER BY embedder, id LIMIT %s FOR UPDATE) AS bare"
        " WHERE tenant = %s AND vector.embedder = bare.embedder AND vector.id = bare.id"
        " RETURNING vector.embedder, vector.id, half IS NULL"
    )
    last, filled = (0, 0), 0
    while True:
        values = database.tenant, *last, STEP, database.tenant
        rows = database.write("filling in", lambda statements, values=values: statements.rows(update, *values))  # type: ignore[misc]
        filled += sum(not bare for _, _, bare in rows)
        if len(rows) < STEP:
            return filled
        last = max(row[:2] for row in rows)


def _take_late(database: Database, embedder: int, vector_count: int) -> int:
    """Add vectors that are not in the index yet to it, if there are many of them, and return their number."""
    near = near_table(database.tenant, embedder)
    last = sql.SQL("SELECT coalesce(max(id), 0) FROM {near}").format(near=near)
    # Whoever forgets one of them waits, and then finds its number.
    insert = sql.SQL(
        "INSERT INTO {near} SELECT id, entry FROM kilburn.vector WHERE tenant = %s AND embedder = %s AND id > ({last})"
        " ORDER BY id LIMIT %s FOR SHARE OF vector RETURNING id"
    ).format(near=near, last=last)
    ((last_id,),) = database.read("reading", lambda statements: statements.rows(last))
    count = 0
    if vector_count - last_id < MAX_UNINDEXED:
        return 0
    while True:
        rows = database.write("indexing", lambda statements: statements.rows(insert, database.tenant, embedder, STEP))
        count += len(rows)
        if len(rows) < STEP:
            return count


def _build(database: Database, embedder: int, size: int, place: str, above: int) -> int:
    """Build an index in one transaction, so that of one that was killed nothing is left; returns how many vectors it has, or 0
    where it is not needed, or another builds it."""
    embedder_key = database.tenant, embedder
    name, role, schema = f"near_{embedder_key[0]}_{embedder_key[1]}", sql.Identifier(ROLE), sql.Identifier(place)
    with (
        connected(database.url, "building an index in", silence=BUILDING) as connection,
        patient(connection, snapshot=True, silence=BUILDING),
    ):
        connection.execute("SELECT set_config('kilburn.tenant', %s, true)", (str(embedder_key[0]),))
        # It only spares work: of two that build it, the second finds the table.
        ((free,),) = connection.execute("SELECT pg_try_advisory_xact_lock(hashtextextended(%s, 27))", (name,)).fetchall()
        ((count,),) = connection.execute(
            "SELECT count(*) FROM kilburn.vector WHERE tenant = %s AND embedder = %s", embedder_key
        ).fetchall()
        if not free or count <= above:
            return 0
        memory = min(MEMORY, count * (2 * size + 512) + (16 << 20))
        connection.execute("SELECT set_config('maintenance_work_mem', %s, true)", (f"{memory >> 10}kB",))
        numbers = {"tenant": sql.Literal(embedder_key[0]), "embedder": sql.Literal(embedder)}
        names = {"near": near_table(*embedder_key), "index": sql.Identifier(f"{name}_half")}
        whole = sql.Identifier("kilburn", f"{name}_half")
        half = indexed_expression(*embedder_key, size, schema)
        connection.execute(_INDEX.format(s=schema, role=role, whole=whole, half=half, **names, **numbers))
        if connection.info.server_version >= MAINTAINS:
            connection.execute(sql.SQL("GRANT MAINTAIN ON {near} TO {role}").format(near=names["near"], role=role))
    return int(count)

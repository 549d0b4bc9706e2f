"""Search by meaning in PostgreSQL: what pgvector finds, how much, in which order, and that it goes when it is forgotten."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.sql import SQL, Composed, Identifier

import kilburn
from backends.server_files import files_with_bytes
from kilburn.backend import Backend, Batch
from kilburn.backends.postgres import halves
from kilburn.backends.postgres.postings import Postings
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.statements import ServerAnswer, Statements
from kilburn.backends.postgres.store import Postgres
from kilburn.backends.ranked import Extents
from kilburn.backends.sqlite import Sqlite
from kilburn.errors import StoreError, StoreReadOnly
from kilburn.search.scan import Scan, pack, unpack
from kilburn.testing.stores import batch_of, start
from waiting import MINUTES, until

pytestmark = pytest.mark.slow

tenants = itertools.count()


def units(count: int, dimensions: int, seed: int, kinds: int = 0) -> Any:
    """Vectors of length 1 at random; around so many of them, where `kinds` is given."""
    chance = np.random.default_rng(seed)
    found = chance.normal(size=(count, dimensions))
    if kinds:
        found = found / 2 + chance.normal(size=(kinds, dimensions))[chance.integers(0, kinds, count)]
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def fill(backend: Backend, vectors: Any, shares: Collection[int], name: str = "made") -> list[int]:
    """A passage for each vector, in sessions with so many; returns their entries."""
    entries: list[int] = []
    for share in shares:
        part = vectors[len(entries) : len(entries) + share]
        segment = start(backend, f"session {len(backend.segments())}")
        backend.commit(segment, batch_of(0, {page: f"text {page}" for page in range(1, len(part) + 1)}))
        own = sorted((entry for entry, _ in backend.vectors.unembedded(name, len(part))), reverse=True)
        rows = list(zip(own, pack(part), strict=True))
        for place in range(0, share, 500):
            backend.vectors.add(name, rows[place : place + 500])
        entries += own
    return entries


def as_stored(vectors: Any) -> Any:
    """Vectors with what is lost when they are stored."""
    scales, numbers = unpack(pack(vectors), vectors.shape[1])
    return numbers * scales[:, None]


def split(count: int, parts: int) -> list[int]:
    return [len(part) for part in np.array_split(np.empty(count), parts)]


def ranked(
    backend: Postgres, vector: Any, limit: int, segments: Collection[int] | None = None, name: str = "made"
) -> list[tuple[int, float]]:
    """What the server finds, put in order."""
    rows = backend.vectors.near(name, vector.tolist(), limit, segments)
    assert rows is not None
    scan = Scan(len(vector))
    if rows:
        scan.add(*zip(*rows, strict=True))
    return scan.nearest(vector, limit)


def scan_of(backend: Backend, dimensions: int, name: str = "made") -> Scan:
    made = Scan(dimensions)
    rows = list(backend.vectors.read(name))
    if rows:
        made.add([row.entry for row in rows], [row.data for row in rows])
    return made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=15, deadline=None)
@given(
    count=st.integers(1, 150),
    dimensions=st.integers(1, 40),
    seed=st.integers(0, 999),
    kinds=st.integers(0, 3),
    same=st.booleans(),
    limit=st.integers(1, 60),
)
def test_both_find_the_same(url: str, count: int, dimensions: int, seed: int, kinds: int, same: bool, limit: int) -> None:
    made = units(count, dimensions, seed, kinds)
    if same:
        # Texts that were said again have equal vectors.
        made[count // 2 :] = made[0]
    with Sqlite(":memory:") as file, Postgres(url, tenant=f"tenant {next(tenants)}") as database:
        assert fill(file, made, split(count, 3)) == fill(database, made, split(count, 3))
        scan = scan_of(file, dimensions)
        for vector in (made[0], *units(2, dimensions, seed + 1)):
            for segments in (None, [1], [3, 1], [2, 77], []):
                assert ranked(database, vector, limit, segments) == scan.nearest(vector, limit, segments)


SIZE = 16
"""Numbers of a vector: few, as they are many."""

SHARES = (15_000, 6_500, 500, 40)
"""Vectors of the sessions of a large tenant: more than are compared one by one."""


class Explaining(Statements):
    """Also asks the server how it did what it was told."""

    def __init__(self, asked: Statements) -> None:
        super().__init__(asked.connection, prepares=False)
        self._asked = asked
        self.plans: list[dict[str, Any]] = []

    def send(self, sql: str | SQL | Composed, *values: object) -> ServerAnswer:
        """See `Statements`."""
        told = SQL(sql) if isinstance(sql, str) else sql  # type: ignore[arg-type]
        if "kilburn." in told.as_string():
            ((found,),) = self._asked.rows(SQL("EXPLAIN (ANALYZE, FORMAT JSON) ") + told, *values)
            self.plans += [one["Plan"] for one in found]
        return self._asked.send(sql, *values)

    def steps(self) -> Iterator[dict[str, Any]]:
        """All steps of all plans."""
        waiting = [*self.plans]
        while waiting:
            step = waiting.pop()
            yield step
            waiting += step.get("Plans", [])

    def indexes(self) -> set[str]:
        """The indexes that were used."""
        return {step["Index Name"] for step in self.steps() if "Index Name" in step}

    def looked_at(self) -> float:
        """Rows that were read."""
        return max(step["Actual Loops"] * step["Actual Rows"] for step in self.steps() if "Relation Name" in step)


def explained(backend: Postgres, do: Callable[[Explaining], object]) -> Explaining:
    """What the server did for this, in a transaction of the tenant."""

    def ask(statements: Statements) -> Explaining:
        explaining = Explaining(statements)
        do(explaining)
        return explaining

    return backend._db.read("explaining", ask)


class Large:
    """A tenant that has an index of its vectors, beside others who have many vectors just where it looks for some."""

    def __init__(self, url: str) -> None:
        self.backend = Postgres(url, tenant="large")
        self.vectors = as_stored(units(sum(SHARES), SIZE, 1, 40))
        self.entries = fill(self.backend, self.vectors, SHARES)
        self.done = self.backend.vectors.tend()
        self.crowd, self.small = Postgres(url, tenant="crowd"), Postgres(url, tenant="small")
        crowd = self.vectors[:1].repeat(3000, 0) + units(3000, SIZE, 2) / 100
        fill(self.crowd, crowd / np.linalg.norm(crowd, axis=1, keepdims=True), [3000])
        fill(self.small, units(30, SIZE, 3), [30])

    def exact(self, vector: Any, limit: int, segments: Collection[int] | None = None) -> list[int]:
        products = self.vectors @ vector
        if segments is not None:
            products = np.where(np.isin(np.array(self.entries) >> 32, list(segments)), products, -2)
        return [self.entries[place] for place in np.argsort(-products)[:limit]]

    def close(self) -> None:
        for backend in (self.backend, self.crowd, self.small):
            backend.close()


@pytest.fixture(scope="module")
def large(_databases: Any) -> Iterator[Large]:
    url = _databases.new()
    made = Large(url)
    yield made
    made.close()
    _databases.drop(url)


def recall(large: Large, segments: Collection[int] | None) -> float:
    chance = np.random.default_rng(4)
    found = []
    for place in range(0, len(large.vectors), 600):
        vector = large.vectors[place] + chance.normal(size=SIZE) / 8
        vector = (vector / np.linalg.norm(vector)).astype(np.float32)
        hits = ranked(large.backend, vector, 10, segments)
        assert len(hits) == 10
        assert [cosine for _, cosine in hits] == sorted((cosine for _, cosine in hits), reverse=True)
        found.append(len({entry for entry, _ in hits} & set(large.exact(vector, 10, segments))))
    return sum(found) / len(found) / 10


def test_an_index_finds_nearly_all_that_is_nearest(large: Large) -> None:
    assert large.done == [f"built an index of {sum(SHARES):,} vectors"]
    assert large.backend.vectors.tend() == []
    assert recall(large, None) >= 0.95
    assert recall(large, [1, 2]) >= 0.95
    assert recall(large, [2, 4]) > 0.999, "few are compared one by one"


@pytest.mark.parametrize("limit", [1, 10, 100, 700])
@pytest.mark.parametrize("segments", [None, [4], [3, 4], [2], [1, 2], [1, 2, 3, 4], [4, 99], [99]])
def test_as_many_come_back_as_were_asked_for(large: Large, limit: int, segments: list[int] | None) -> None:
    there = sum(SHARES[number - 1] for number in segments or (1, 2, 3, 4) if number < 9)
    for vector in (large.vectors[0], large.vectors[-1], -large.vectors[0]):
        hits = ranked(large.backend, vector, limit, segments)
        assert len(hits) == len(dict(hits)) == min(limit, there)
        assert segments is None or {entry >> 32 for entry, _ in hits} <= set(segments)


def test_others_are_not_in_the_way(large: Large) -> None:
    vector = large.vectors[0]
    assert len(ranked(large.small, vector, 20)) == 20
    assert len(ranked(large.crowd, vector, 20)) == 20
    # Numbers of sessions are those of each tenant.
    assert len(ranked(large.small, vector, 40, [1])) == 30
    with Postgres(large.backend._url, tenant="nobody") as nobody:
        assert nobody.vectors.near("made", vector.tolist(), 5) == []


def test_the_index_is_used_and_nobody_elses_rows_are_read(large: Large) -> None:
    vector = large.vectors[0].tolist()

    def near(backend: Postgres, segments: Collection[int] | None = None) -> Explaining:
        found = halves.HalfVectors
        return explained(
            backend, lambda statements: found(statements, backend._number, backend._halves).near(b"made", vector, 10, segments)
        )

    ((name,),) = large.backend._ask(
        "SELECT format('near_%%s_%%s_half', tenant, id) FROM kilburn.embedder WHERE tenant = %s", large.backend._number
    )
    for segments in (None, [1, 2]):
        told = near(large.backend, segments)
        assert name in told.indexes()
        assert "Seq Scan" not in {step["Node Type"] for step in told.steps()}
        assert told.looked_at() < 2000
    for backend, segments, most in ((large.small, None, 30), (large.small, [1], 30), (large.backend, [4], 40)):
        told = near(backend, segments)
        assert "Seq Scan" not in {step["Node Type"] for step in told.steps()}
        assert told.looked_at() <= most
        assert name not in told.indexes()


def test_a_search_by_words_reads_nobody_elses_rows(large: Large) -> None:
    def search(statements: Statements) -> object:
        return Postings(statements, large.small._number).search("text 7", Extents([(1, 30, 200)]), 10)

    told = explained(large.small, search)
    assert told.plans
    assert "Seq Scan" not in {step["Node Type"] for step in told.steps()}
    assert told.looked_at() <= 30


def test_what_comes_later_is_found_at_once_and_what_goes_is_not(large: Large) -> None:
    backend, vector = large.backend, units(1, SIZE, 77)[0]
    segment = start(backend, "late")
    backend.commit(segment, batch_of(0, {page: f"late {page}" for page in range(1, 31)}))
    late = [entry for entry, _ in backend.vectors.unembedded("made", 30)]
    backend.vectors.add("made", list(zip(late, pack(vector[None].repeat(30, 0)), strict=True)))
    for segments in (None, [segment], [segment, 1, 2]):
        assert [entry for entry, _ in ranked(backend, vector, 30, segments)] == sorted(late)
    backend.vectors.add("made", [(late[0], pack(-vector[None])[0])])
    assert late[0] not in dict(ranked(backend, vector, 30))
    assert ranked(backend, -vector, 1)[0][0] == late[0]
    assert backend.vectors.tend() == [], "few wait for the next time"
    backend.commit(segment, Batch(head=1, erase=range(1, 31)))
    assert not dict(ranked(backend, vector, 60)).keys() & set(late)


def tended(backend: Postgres) -> list[str]:
    """What was done, where an index is worth it sooner."""
    return backend.vectors.tend(above=200)


def halves_of(url: str, entry: int) -> bytes:
    """Some bytes of a vector's numbers as they stand in the server's files."""
    with psycopg.connect(url) as connection:
        ((text,),) = connection.execute("SELECT half::text FROM kilburn.vector WHERE entry = %s", (entry,)).fetchall()
    return np.array(json.loads(text), "<f2").tobytes()


def path_of(backend: Postgres) -> str:
    """The file of the index of its only embedder."""
    select = (
        "SELECT pg_relation_filepath(format('kilburn.near_%%s_%%s_half', tenant, id)::regclass) FROM kilburn.embedder"
        " WHERE tenant = %s"
    )
    ((path,),) = backend._ask(select, backend._number)
    return str(path)


def test_no_byte_of_a_forgotten_vector_stays_in_the_index(server: OwnServer, url: str) -> None:
    with Postgres(url) as backend:
        vectors = units(300, 24, 5)
        entries = fill(backend, vectors, [300])
        assert tended(backend) == ["built an index of 300 vectors"]
        numbers = halves_of(url, entries[7])
        path = path_of(backend)
        assert f"data/{path}" in files_with_bytes(server, numbers), "it is found where it is"
        backend.commit(1, Batch(head=1, erase=[8]))
        assert files_with_bytes(server, numbers) == []
        assert path_of(backend) == path, "the index was mended, and not built anew"
        assert len(ranked(backend, vectors[7], 299)) == 299
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ANALYZE")
        assert files_with_bytes(server, numbers) == []


def test_a_vector_that_is_made_anew_leaves_the_index(server: OwnServer, url: str) -> None:
    with Postgres(url) as backend:
        entries = fill(backend, units(300, 24, 5), [300])
        tended(backend)
        numbers = halves_of(url, entries[7])
        backend.vectors.add("made", [(entries[7], pack(units(1, 24, 6))[0])])
        backend.commit(1, Batch(head=1, erase=[1]))
        assert files_with_bytes(server, numbers) == []
        assert ranked(backend, units(1, 24, 6)[0], 1)[0][0] == entries[7]


def test_what_goes_while_an_index_is_built_leaves_it(server: OwnServer, url: str) -> None:
    with Postgres(url, busy_timeout=0.2) as backend:
        entries = fill(backend, units(300, 24, 5), [300])
        numbers = halves_of(url, entries[7])
        with building(url, backend) as go_on:
            backend.commit(1, Batch(head=1, erase=[8]))
            go_on()
        assert len(indexed_numbers(url, backend)) == 299
        assert files_with_bytes(server, numbers) == []


@contextmanager
def building(url: str, backend: Postgres) -> Iterator[Callable[[], None]]:
    """While an index is being built: its numbers are there, and it waits for what hinders it until told to go on."""
    made: list[Any] = []

    def build() -> None:
        try:
            made.extend(tended(backend))
        except StoreError as error:
            made.append(error)

    ((embedder,),) = backend._ask("SELECT id FROM kilburn.embedder WHERE tenant = %s", backend._number)
    with psycopg.connect(url) as hindering:
        # The name of the index is taken by what is not there in the end.
        name = SQL("CREATE TABLE kilburn.{name}()").format(name=Identifier(f"near_{backend._number}_{embedder}_half"))
        hindering.execute(name)
        thread = threading.Thread(target=build)
        thread.start()
        try:
            until(lambda: waiting(url))
            yield hindering.rollback
        finally:
            hindering.rollback()
            thread.join(MINUTES)
    assert made


def waiting(url: str) -> list[int]:
    """The connections that wait for others while they build an index."""
    select = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query ILIKE %s"
    with psycopg.connect(url) as connection:
        return [pid for (pid,) in connection.execute(select, ("%USING hnsw%",)).fetchall()]


def indexed_numbers(url: str, backend: Postgres) -> list[int]:
    """The numbers in the index of its only embedder."""
    with psycopg.connect(url) as connection:
        ((name,),) = connection.execute(
            "SELECT format('kilburn.near_%s_%s', tenant, id)::regclass::text FROM kilburn.embedder"
        ).fetchall()
        return [number for (number,) in connection.execute(SQL("SELECT id FROM ") + SQL(name)).fetchall()]


def test_of_a_build_that_was_killed_nothing_is_left(server: OwnServer, url: str) -> None:
    with Postgres(url) as backend:
        vectors = units(300, 24, 5)
        fill(backend, vectors, [300])
        with building(url, backend), psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", (waiting(url)[0],))
        assert backend._db.read("reading", lambda statements: halves.indexed(statements, backend._number)) == []
        assert len(ranked(backend, vectors[0], 300)) == 300
        assert tended(backend) == ["built an index of 300 vectors"]
        assert len(ranked(backend, vectors[0], 300)) == 300


def test_late_vectors_are_taken_into_the_index(url: str) -> None:
    with Postgres(url) as backend:
        vectors = units(halves.MAX_UNINDEXED + 300, 4, 5)
        fill(backend, vectors[:300], [300])
        tended(backend)
        fill(backend, vectors[300:], [halves.MAX_UNINDEXED])
        assert len(indexed_numbers(url, backend)) == 300
        assert tended(backend) == [f"took {halves.MAX_UNINDEXED:,} vectors into an index"]
        assert len(indexed_numbers(url, backend)) == halves.MAX_UNINDEXED + 300
        assert tended(backend) == []


def test_the_index_of_an_embedder_that_is_dropped_goes(url: str) -> None:
    with Postgres(url) as backend:
        fill(backend, units(300, 4, 5), [300])
        tended(backend)
        backend.vectors.drop("made")
        assert ranked(backend, units(1, 4, 5)[0], 10) == []
        assert tended(backend) == ["removed an index"]
        assert tended(backend) == []


UNDONE = """
DROP TRIGGER vector_new ON kilburn.vector;
DROP TRIGGER vector_gone ON kilburn.vector;
DROP FUNCTION kilburn.fill_half, kilburn.leave_near, kilburn.half_of, kilburn.half;
ALTER TABLE kilburn.vector DROP COLUMN half;
"""
"""Makes a database what it is where pgvector was installed after the store was made."""


def test_vectors_from_before_pgvector_are_filled_in_and_taken_up_again_where_that_was_cut_short(url: str) -> None:
    vectors = units(3 * halves.STEP, 8, 5)
    with Postgres(url) as backend:
        fill(backend, vectors, [len(vectors)])
        before = ranked(backend, vectors[0], 20)
    with psycopg.connect(url) as connection:
        connection.execute(UNDONE)
    with Postgres(url, readonly=True) as reader:
        assert reader.vectors.near("made", vectors[0].tolist(), 20) is None, "a program has to read them"
    with Postgres(url, busy_timeout=0.2) as backend:
        assert backend.vectors.near("made", vectors[0].tolist(), 20) is None
        with psycopg.connect(url) as connection:
            connection.execute("SELECT FROM kilburn.vector WHERE id = %s FOR UPDATE", (halves.STEP + 7,))
            with pytest.raises(StoreError):
                backend.vectors.tend()
        assert backend._ask("SELECT count(*) FROM kilburn.vector WHERE half IS NOT NULL") == [(halves.STEP,)]
        assert backend.vectors.near("made", vectors[0].tolist(), 20) is None
    with Postgres(url) as backend:
        assert backend.vectors.tend() == [f"filled in {2 * halves.STEP:,} vectors"]
        assert ranked(backend, vectors[0], 20) == before
        assert backend.vectors.tend() == []


def test_without_pgvector_a_program_looks_through_what_it_reads(url: str) -> None:
    with Postgres(url) as backend:
        vectors = units(40, 8, 5)
        fill(backend, vectors[:30], [30])
    plain = as_user(url, "reader of no extension")
    with psycopg.connect(url) as connection:
        connection.execute("DROP EXTENSION vector CASCADE")
    with Postgres(plain) as backend:
        assert backend.vectors.near("made", vectors[0].tolist(), 5) is None
        assert backend.vectors.tend() == []
        fill(backend, vectors[30:], [10])
        assert len(scan_of(backend, 8)) == 40
        backend.commit(1, Batch(head=1, erase=[1]))
        assert [hit.page for hit in backend.words.search("text 2", limit=1)] == [2]
    with Postgres(url) as backend:
        assert backend.vectors.near("made", vectors[0].tolist(), 5) is None
        assert backend.vectors.tend() == ["filled in 39 vectors"]
        assert len(ranked(backend, vectors[0], 50)) == 39


class Letters:
    """Texts with the same letters are near each other."""

    name, dimensions = "letters", 26

    def embed(self, texts: Sequence[str]) -> Any:
        counted = np.array([[1 + text.count(chr(97 + letter)) for letter in range(26)] for text in texts], dtype=np.float32)
        return counted / np.linalg.norm(counted, axis=1, keepdims=True)


def found_by_meaning(place: str, *, text: str = "") -> list[tuple[str, float]]:
    """What a question finds that shares no word with any text."""
    with kilburn.open(place, window=4000, tokenizer="chars/4", embedder=Letters()) as store:
        if text:
            for number in range(30):
                store.session("s").append({"role": "user", "content": f"{text} {'pump' * number} {'valve' * (30 - number)}"})
        return [(hit.address, hit.score) for hit in store.search("ppuummp vvallvee", limit=10)]


def take_back_to_0_7(url: str) -> None:
    """Give a database the extension as 0.7.4 made it: all that came with the next version is a cast of arrays. The library
    stays the new one, as where pgvector was installed anew and a database was forgotten."""
    with psycopg.connect(url) as connection:
        connection.execute("DROP EXTENSION vector CASCADE")
        connection.execute("CREATE EXTENSION vector SCHEMA public")
        for kind in ("integer[]", "real[]", "double precision[]", "numeric[]"):
            function = f"FUNCTION array_to_sparsevec({kind}, integer, boolean)"
            for what in (f"CAST ({kind} AS sparsevec)", function):
                connection.execute(SQL(f"ALTER EXTENSION vector DROP {what}"))
                connection.execute(SQL(f"DROP {what}"))
        connection.execute("UPDATE pg_extension SET extversion = '0.7.4' WHERE extname = 'vector'")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    caplog.clear()
    return said


def test_with_an_old_pgvector_a_search_is_exact_and_a_warning_says_what_to_do(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    take_back_to_0_7(url)
    wanted = found_by_meaning(str(tmp_path / "a.db"), text="It was")
    assert found_by_meaning(url, text="It was") == wanted
    assert len(wanted) == 10
    (said,) = warnings_of(caplog)
    assert said.startswith("pgvector 0.7.4 is too old: ")
    assert "run ALTER EXTENSION vector UPDATE" in said
    with Postgres(url, readonly=True) as backend:
        assert backend.vectors.near("letters", [1.0] * 26, 5) is None
    assert warnings_of(caplog) == []
    with psycopg.connect(url) as connection:
        connection.execute("ALTER EXTENSION vector UPDATE")
    with Postgres(url) as backend:
        assert backend.vectors.tend() == ["filled in 30 vectors"]
        assert len(backend.vectors.near("letters", [1.0] * 26, 5) or ()) >= 5
    assert found_by_meaning(url) == wanted
    assert warnings_of(caplog) == []


def test_an_old_pgvector_that_could_be_had_is_not_taken(url: str, server: OwnServer, caplog: pytest.LogCaptureFixture) -> None:
    """A server that offers it, and a database that has none."""
    with psycopg.connect(url) as connection:
        if connection.info.server_version < 18_00_00:
            pytest.skip("a server before PostgreSQL 18 looks for extensions in its own folder only")
        connection.execute("DROP EXTENSION vector CASCADE")
        offered = server.folder / "old" / "extension"
        offered.mkdir(parents=True)
        (offered / "vector.control").write_text("default_version = '0.7.4'\nmodule_pathname = '$libdir/vector'\n")
        path = f"{offered.parent}:$system"
        name = Identifier(connection.info.dbname)
        connection.execute(SQL("ALTER DATABASE {} SET extension_control_path = {}").format(name, path))
    with Postgres(url) as backend:
        assert backend.vectors.near("made", [1.0, 0.0], 5) is None
        assert backend._ask("SELECT count(*) FROM pg_extension WHERE extname = 'vector'") == [(0,)]
    (said,) = warnings_of(caplog)
    assert said.startswith("pgvector 0.7.4 is too old: ")
    assert "Install 0.8 or newer on the server" in said


def as_user(url: str, name: str) -> str:
    """The URL of a user who may use the store, and owns nothing."""
    with psycopg.connect(url) as connection:
        if connection.execute("SELECT FROM pg_roles WHERE rolname = %s", (name,)).fetchone() is None:
            connection.execute(SQL("CREATE ROLE {} LOGIN").format(Identifier(name)))
        connection.execute(SQL("GRANT kilburn_rows TO {}").format(Identifier(name)))
        connection.execute(SQL("GRANT USAGE ON SCHEMA kilburn TO {}").format(Identifier(name)))
    return url.replace("postgres@", quote(name) + "@")


def test_who_owns_nothing_is_told_that_it_cannot_build(url: str) -> None:
    with Postgres(url) as backend:
        fill(backend, units(300, 4, 5), [300])
    with Postgres(as_user(url, "builder of nothing")) as backend:
        with pytest.raises(StoreReadOnly):
            tended(backend)
        assert len(ranked(backend, units(1, 4, 5)[0], 300)) == 300


def test_what_is_no_vector_is_kept_and_not_looked_through(url: str) -> None:
    with Postgres(url) as backend:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {page: f"text {page}" for page in range(1, 4)}))
        entries = [entry for entry, _ in backend.vectors.unembedded("odd", 3)]
        for name, data in {
            "short": b"abc",
            "empty": b"\0\0\0\0",
            "not a number": b"\0\0\xc0\x7f\1\2",
            "endless": b"\0\0\x80\x7f\1\2",
            "huge": b"\0\0\0\x47\x7f\x7f",
            "long": bytes(halves.MAX_DIMENSIONS + 5),
        }.items():
            backend.vectors.add(name, [(entry, data) for entry in entries])
            assert [row.data for row in backend.vectors.read(name)] == [data] * 3
            assert backend.vectors.near(name, [0.0] * (len(data) - 4), 3) is None
        longest = units(3, halves.MAX_DIMENSIONS, 1)
        backend.vectors.add("longest", list(zip(entries, pack(longest), strict=True)))
        assert len(ranked(backend, longest[0], 3, name="longest")) == 3
        tiny = np.array([[1e-9, 1e-9, 1.0]], np.float32)
        backend.vectors.add("tiny", [(entries[0], pack(tiny)[0]), (entries[1], pack(np.zeros((1, 3), np.float32))[0])])
        assert [round(cosine, 3) for _, cosine in ranked(backend, tiny[0], 3, name="tiny")] == [1.0, 0.0]

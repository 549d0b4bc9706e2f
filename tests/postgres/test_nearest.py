"""Search by meaning in PostgreSQL: what pgvector finds, how much, in which order, and that it goes when it is forgotten."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kilburn.backend import Backend
from kilburn.backends.postgres.store import Postgres
from kilburn.search.scan import Scan, pack
from kilburn.testing import MemoryBackend
from kilburn.testing.stores import batch_of, start

tenants = itertools.count()


def units(count: int, dimensions: int, seed: int, kinds: int = 0) -> Any:
    """Vectors of length 1 at random; around so many of them, where `kinds` is given."""
    chance = np.random.default_rng(seed)
    found = chance.normal(size=(count, dimensions))
    if kinds:
        found = found / 2 + chance.normal(size=(kinds, dimensions))[chance.integers(0, kinds, count)]
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(np.float32)


def fill(backend: Backend, vectors: Any, segments: int, name: str = "made") -> list[int]:
    """A passage for each vector, in so many sessions; returns their entries."""
    entries: list[int] = []
    for number, part in enumerate(np.array_split(vectors, segments)):
        segment = start(backend, f"{name} {number}")
        backend.commit(segment, batch_of(0, {page: f"text {page}" for page in range(1, len(part) + 1)}))
        own = sorted((entry for entry, _ in backend.unembedded(name, len(part))), reverse=True)
        backend.keep_vectors(name, list(zip(own, pack(part), strict=True)))
        entries += own
    return entries


def ranked(
    backend: Postgres, vector: Any, limit: int, segments: Collection[int] | None = None, name: str = "made"
) -> list[tuple[int, float]]:
    """What the server finds, put in order."""
    rows = backend.near(name, vector.tolist(), limit, segments)
    assert rows is not None
    scan = Scan(len(vector))
    if rows:
        scan.add(*zip(*rows, strict=True))
    return scan.nearest(vector, limit)


def scan_of(backend: Backend, dimensions: int, name: str = "made") -> Scan:
    made = Scan(dimensions)
    rows = list(backend.vectors(name))
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
    with MemoryBackend() as file, Postgres(url, tenant=f"tenant {next(tenants)}") as database:
        assert fill(file, made, 3) == fill(database, made, 3)
        scan = scan_of(file, dimensions)
        for vector in (made[0], *units(2, dimensions, seed + 1)):
            for segments in (None, [1], [3, 1], [2, 77], []):
                assert ranked(database, vector, limit, segments) == scan.nearest(vector, limit, segments)

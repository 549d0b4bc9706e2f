"""The place of a store: an SQLite file, or the URL of a PostgreSQL database."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

from kilburn.backend import Backend
from kilburn.backends.anchor import Anchor
from kilburn.backends.sqlite import Sqlite

SCHEMES = ("postgresql://", "postgres://")


def is_url(place: object) -> bool:
    """Whether a place is the URL of a database."""
    return isinstance(place, str) and place.startswith(SCHEMES)


def canonical_name(place: str) -> str:
    """Return the canonical name of a place: a file's real path, or a database's URL without user and password.

    Raises:
        SpecError: an invalid URL. MissingExtra: a URL, and psycopg is not installed.
    """
    return shown(place) if is_url(place) else os.path.realpath(place)


def shown(place: str) -> str:
    """Return a place for messages: a path unchanged, a URL without user and password.

    Raises:
        SpecError: an invalid URL. MissingExtra: a URL, and psycopg is not installed.
    """
    if not is_url(place):
        return place
    from kilburn.backends.postgres.connection import checked_url, shown_url

    return shown_url(checked_url(place))


def open_backend(
    place: str | os.PathLike[str],
    *,
    tenant: str = "default",
    readonly: bool = False,
    durable: bool = True,
    busy_timeout: float = 5.0,
    anchor: str | os.PathLike[str] | None = None,
) -> Backend:
    """Open the backend of a place.

    Args:
        place: the path of a file, ":memory:", or `postgresql://user@host:port/database`.
        tenant: the partition to serve.
        readonly: refuse every write.
        durable: whether a commit waits for the disk; otherwise only `sync` does.
        busy_timeout: seconds to wait for another writer.
        anchor: a file outside the store that detects older copies; None for `$KILBURN_ANCHOR`. See `kilburn.backends.anchor`.

    Raises:
        StoreCorrupt: it is older than its anchor. StoreError: it cannot be opened. SpecError: an invalid URL or tenant name.
        MissingExtra: a URL, and psycopg is not installed.
    """
    scheme = "postgresql" if is_url(place) else ""
    backend: Any = OPENERS[scheme](place, tenant=tenant, readonly=readonly, durable=durable, busy_timeout=busy_timeout)
    if (configured := place_anchor(place, tenant, anchor)).file:
        try:
            configured.check(backend)
        except BaseException:
            backend.close()
            raise
        backend.anchor = configured
    return cast(Backend, backend)


def place_anchor(place: str | os.PathLike[str], tenant: str, file: str | os.PathLike[str] | None = None) -> Anchor:
    """Return the anchor of a place, in this file or the one that `$KILBURN_ANCHOR` names."""
    file = os.environ.get("KILBURN_ANCHOR", "") if file is None else os.fspath(file)
    return Anchor() if not file or place == ":memory:" else Anchor(file, canonical_name(os.fspath(place)), tenant)


def _open_file(place: str | os.PathLike[str], *, durable: bool, **options: Any) -> Backend:
    return Sqlite(place, synchronous="FULL" if durable else "NORMAL", **options)


def _open_database(place: str, **options: Any) -> Backend:
    from kilburn.backends.postgres.store import Postgres

    return Postgres(place, **options)


OPENERS: dict[str, Callable[..., Backend]] = {"": _open_file, "postgresql": _open_database}
"""The functions that open a file and a database."""

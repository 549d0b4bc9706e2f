"""Opens what the gateways over one store share: their common counts, and their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilburn.backends.counting import FileTurnstile, Turnstile
from kilburn.backends.places import is_url

if TYPE_CHECKING:
    from kilburn.backends.postgres.keys import StoredKeys


BESIDE = "-requests"
"""Suffix of the file, beside a store in a file, in which its gateways count together."""


def open_turnstile(place: str) -> Turnstile:
    """Open the common counts of the gateways over a store: in its database, or in a file beside its file.

    Raises:
        StoreError: it cannot be opened. SpecError: an invalid URL. MissingExtra: a URL, and psycopg is not installed.
    """
    if not is_url(place):
        return FileTurnstile(place if place == ":memory:" else f"{place}{BESIDE}")
    from kilburn.backends.postgres.counting import PostgresTurnstile

    return PostgresTurnstile(place)


def open_keys(url: str) -> StoredKeys:
    """Open the keys of gateways in a database.

    Raises:
        StoreError: it cannot be opened. SpecError: an invalid URL. MissingExtra: psycopg is not installed.
    """
    from kilburn.backends.postgres.keys import StoredKeys

    return StoredKeys(url)

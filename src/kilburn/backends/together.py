"""What the gateways over one store share besides it, by its place: where they count, and where their keys are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilburn.backends.counting import FileTurnstile, Turnstile
from kilburn.backends.places import is_url

if TYPE_CHECKING:
    from kilburn.backends.postgres.keys import StoredKeys


BESIDE = "-requests"
"""How the name of the file ends in which gateways over a store in a file count together; it stands beside the store."""


def open_turnstile(place: str) -> Turnstile:
    """Where the gateways over a store count together: in its database, or in a file beside its file.

    Raises:
        StoreError: it cannot be opened. SpecError: no URL. MissingExtra: a URL, and psycopg is not installed.
    """
    if not is_url(place):
        return FileTurnstile(place if place == ":memory:" else f"{place}{BESIDE}")
    from kilburn.backends.postgres.counting import PostgresTurnstile

    return PostgresTurnstile(place)


def open_keys(url: str) -> StoredKeys:
    """Where the keys of gateways are, in a database.

    Raises:
        StoreError: it cannot be opened. SpecError: no URL. MissingExtra: psycopg is not installed.
    """
    from kilburn.backends.postgres.keys import StoredKeys

    return StoredKeys(url)

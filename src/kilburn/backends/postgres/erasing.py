"""What happens to the bytes of what was forgotten."""

from __future__ import annotations

from kilburn.backends.postgres.connection import Database


def wipe(database: Database) -> None:
    """Remove erased bytes from the server's files."""

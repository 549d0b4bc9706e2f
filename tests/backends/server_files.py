"""A search of all files of a PostgreSQL server for the bytes that must be gone."""

from __future__ import annotations

import psycopg

from kilburn.backends.postgres.server import OwnServer


def files_with(server: OwnServer, word: str) -> list[str]:
    """The files of a server, its log among them, in which a word stands, in any case of letters."""
    return files_with_bytes(server, word.encode())


def files_with_bytes(server: OwnServer, data: bytes) -> list[str]:
    """The files in which these bytes stand, or would with other letters."""
    data = data.lower()
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CHECKPOINT")
    found = []
    for path in server.folder.rglob("*"):
        if path.is_file() and data in path.read_bytes().lower():
            found.append(str(path.relative_to(server.folder)))
    return sorted(found)

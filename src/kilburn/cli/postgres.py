"""`postgres`: runs a local PostgreSQL server, and maintains a store in PostgreSQL."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from kilburn.backends.places import is_url
from kilburn.cli.commands import command_group
from kilburn.cli.screen import show
from kilburn.cli.shell import Json, Tenant
from kilburn.errors import SpecError
from kilburn.terminal import line

postgres = command_group("postgres")

Dir = Annotated[Path, Option("--dir", metavar="DIR", help="The folder of the server.")]

FOLDER = Path("agent.pg")

BUSY_TIMEOUT = 60.0
"""Seconds to wait for locks of other clients."""


@postgres.command("start")
def start(folder: Dir = FOLDER, json: Json = False) -> None:
    """Start a PostgreSQL server in a folder, and print its URL for --db and KILBURN_DB. The folder is created if needed.

    The server listens on a socket in the folder and on no port, and runs until `kilburn postgres stop`.

    Example:

        kilburn postgres start --dir agent.pg
    """
    from kilburn.backends.postgres.server import OwnServer

    url = OwnServer(folder).start()
    show({"url": url}, url, json=json)


@postgres.command("stop")
def stop(folder: Dir = FOLDER, delete: bool = False, json: Json = False) -> None:
    """Stop the PostgreSQL server of a folder.

    Example:

        kilburn postgres stop --dir agent.pg

    Args:
        delete: Remove the folder with all its data.
    """
    from kilburn.backends.postgres.server import OwnServer

    if not folder.exists():
        raise SpecError(f"there is no folder {folder}", advice="give it with --dir")
    server = OwnServer(folder)
    server.stop()
    if delete:
        server.delete()
    show({"stopped": str(folder), "deleted": delete}, line(f"stopped: {folder}{', and removed' if delete else ''}"), json=json)


@postgres.command("wipe")
def wipe(url: str, tenant: Tenant = None, json: Json = False) -> None:
    """Rewrite the tables of a large store, so that no forgotten byte stays in the server's files. Other clients wait.

    In a small store, `forget` does this itself.

    Example:

        kilburn postgres wipe "$KILBURN_DB"

    Args:
        url URL: The URL of the store.
    """
    if not is_url(url):
        raise SpecError("a file has nothing to wipe", advice="give postgresql://user@host:5432/database")
    from kilburn.backends.postgres.store import Postgres

    with Postgres(url, tenant=tenant or "default", busy_timeout=BUSY_TIMEOUT) as backend:
        backend.wipe()
        places = backend.contents.unreached()
    lines = ["no forgotten text is left in the tables' files"]
    if places:
        lines.append(line(f"not reached: {'; '.join(places)}"))
    show({"wiped": True, "unreached": places}, lines, json=json)


@postgres.command("tend")
def tend(url: str, tenant: Tenant = None, json: Json = False) -> None:
    """Build or update a large store's index for search by meaning, while other clients use the store.

    A gateway does this itself, in the background.

    Example:

        kilburn postgres tend "$KILBURN_DB"

    Args:
        url URL: The URL of the store.
    """
    if not is_url(url):
        raise SpecError("a file has no such index", advice="give postgresql://user@host:5432/database")
    from kilburn.backends.postgres.parts import PostgresVectors
    from kilburn.backends.postgres.store import Postgres

    with Postgres(url, tenant=tenant or "default", busy_timeout=BUSY_TIMEOUT) as backend:
        steps = PostgresVectors(backend).tend()
    show({"done": steps}, steps or "nothing to do", json=json)

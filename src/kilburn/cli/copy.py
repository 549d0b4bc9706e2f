"""`copy`: everything of a store into another one."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

import kilburn
from kilburn.backends.places import shown
from kilburn.cli.access import existing
from kilburn.cli.screen import count, many, progress
from kilburn.cli.shell import Json, Tenant, app
from kilburn.terminal import emit, line, say, tell

PLURALS = {"session": "sessions", "memory": "memories", "document": "documents"}


@app.command("copy")
def copy_store(
    source: Annotated[str, Argument(metavar="SRC", help="The store: its file, or a URL.", show_default=False)],
    target: Annotated[str, Argument(metavar="DST", help="Where to copy it to; made where there is none.", show_default=False)],
    to: Annotated[str | None, Option("--to-tenant", metavar="NAME", help="The partition in DST; else the same.")] = None,
    note: Annotated[bool, Option("--note/--no-note", help="Note it in SRC, so that `forget` names this copy.")] = True,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Copy everything of a store into another, and compare both byte for byte: sessions, branches, memories, documents, notes,
    ledgers, vectors, what is forgotten, pins and settings. Every address stays what it was.

    It is all or nothing: after an error, or killed at any moment, DST is as it was. Agents may go on writing to SRC, and other
    writers of DST wait. Run again, it brings DST up to date, and what was forgotten in SRC is forgotten there. It refuses a DST
    that has other things under the same names.

    Example:

        kilburn copy agent.db moved.db
    """
    # A URL may have a password in it.
    ours, theirs = shown(source), shown(target)
    began = time.monotonic()
    with progress("copying", unit="pages and events") as done:

        def told(now: int, total: int, words: str) -> None:
            if total:
                spent = time.monotonic() - began
                left = f", about {spent * (total - now) / now:.0f} s left" if 0 < now < total and spent > 1 else ""
                done(now, total, words + left)
            else:
                say(f"kilburn: {line(words)}")

        origin = existing(source, advice="give the store to be copied as SRC")
        made = kilburn.copy(origin, target, tenant=tenant or "default", to=to, note=note, told=told)
    for name, why in made.left:
        say(line(f"kilburn: not copied: {name}: {why}"))
    if json:
        emit({"source": ours, "target": theirs} | msgspec.to_builtins(made))
    else:
        kinds = ", ".join(
            f"{count(number)} {kind if number == 1 else PLURALS.get(kind, kind)}" for kind, number in made.kinds.items()
        )
        tell(
            line(
                f"{theirs}: {kinds or 'nothing'}; {many(made.pages, 'page')}, {many(made.events, 'event')} and "
                f"{many(made.vectors, 'vector')}, the same as in {ours}"
            )
        )
        tell(f"written now: {count(made.new)}; sha256 {made.digest}")
    if made.left:
        raise typer.Exit(1)

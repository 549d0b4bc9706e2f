"""`copy`: copies a store into another one."""

from __future__ import annotations

import time

import msgspec
import typer

import kilburn
from kilburn.backends.places import shown
from kilburn.cli.access import existing
from kilburn.cli.screen import count, many, progress, show
from kilburn.cli.shell import Json, Tenant, app
from kilburn.terminal import line, say

PLURALS = {"session": "sessions", "memory": "memories", "document": "documents"}


@app.command("copy")
def copy_store(
    source: str, target: str, to: str | None = None, note: bool = True, tenant: Tenant = None, json: Json = False
) -> None:
    """Copy a store into another, and compare both byte for byte. The copy has all sessions, branches, memories, documents, notes,
    ledgers, vectors, records of forgetting, pins and settings. Addresses do not change.

    The copy is atomic: after an error or a kill, DST is unchanged. Agents may write to SRC meanwhile; writers of DST wait. Repeat
    the command to bring DST up to date; pages that were forgotten in SRC are then forgotten in DST. The command refuses a DST
    that has different data under the same names.

    Example:

        kilburn copy agent.db moved.db

    Args:
        source SRC: The file or URL of the store.
        target DST: The target; created if needed.
        to --to-tenant NAME: Copy to this partition of DST; by default the same name.
        note --note/--no-note: Record the copy in SRC, so that `forget` can name it.
    """
    source_name, target_name = shown(source), shown(target)  # without passwords
    start = time.monotonic()
    with progress("copying", unit="pages and events") as report:

        def copied(completed: int, total: int, step: str) -> None:
            if not total:
                say(f"kilburn: {line(step)}")
                return
            seconds = time.monotonic() - start
            if 0 < completed < total and seconds > 1:
                step += f", about {seconds * (total - completed) / completed:.0f} s left"
            report(completed, total, step)

        origin = existing(source, advice="give the store to be copied as SRC")
        result = kilburn.copy(origin, target, tenant=tenant or "default", to=to, note=note, progress=copied)
    for name, why in result.left:
        say(line(f"kilburn: not copied: {name}: {why}"))
    kinds = ", ".join(
        f"{count(number)} {kind if number == 1 else PLURALS.get(kind, kind)}" for kind, number in result.kinds.items()
    )
    sizes = f"{many(result.pages, 'page')}, {many(result.events, 'event')} and {many(result.vectors, 'vector')}"
    lines = (
        line(f"{target_name}: {kinds or 'nothing'}; {sizes}, the same as in {source_name}"),
        f"written now: {count(result.new)}; sha256 {result.digest}",
    )
    show({"source": source_name, "target": target_name} | msgspec.to_builtins(result), lines, json=json)
    if result.left:
        raise typer.Exit(1)

"""The export of the dashboard to one file, for example for an issue. It loads nothing and runs no script; by default it has no
text of any page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kilburn.backend import Backend
from kilburn.dashboard.look import environment, static
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.screens import MAX_ROWS, over_time, prices, receipts, window
from kilburn.file import write_file

MAX_SESSIONS = 10
"""Sessions that an export has if none is named."""

REPLAY_TIMEOUT = 600.0
"""Seconds to wait for the replay of a long session."""


def write(backend: Backend, path: Path, name: str | None = None, *, redact: bool = True, force: bool = False) -> int:
    """Write the export, and return its size in bytes.

    Args:
        backend: a read-only connection.
        name: export only this session; None for the first ones of the list.
        redact: leave out texts, labels and tool names. Names of sessions and policies are included.
        force: replace an existing file.

    Raises:
        SpecError: there is no such session, or the file exists. StoreError, OSError.
    """
    data = page(LedgerReader(backend), name, redact=redact).encode("utf-8")
    with write_file(path, force=force) as file:
        file.write(data)
    return len(data)


def page(reading: LedgerReader, name: str | None = None, *, redact: bool = True) -> str:
    """Return the export as text; see `write`."""
    if name is None:
        infos = reading.sessions()
        waiting = len(infos)
        while waiting:
            rows, remaining = reading.rows(infos)
            waiting = remaining if remaining < waiting else 0
        rows, _ = reading.rows(infos)
    else:
        rows = [reading.row(reading.info(name))]
    contexts: list[dict[str, Any]] = []
    for row in [row for row in rows if not row.info.damaged][:MAX_SESSIONS]:
        query = {"name": row.info.name}
        picture = over_time(reading, query)[1]
        if not picture["picture"].split and reading.replayed(row.info.number, REPLAY_TIMEOUT):
            picture = over_time(reading, query)[1]
        contexts.append(
            {
                "time": picture,
                "window": window(reading, query)[1],
                "receipts": receipts(reading, query)[1],
                "prices": prices(reading, query)[1],
            }
        )
    look = environment(redact=redact, links=False)
    return look.get_template("export.html").render(
        rows=rows[:MAX_ROWS],
        found=len(rows),
        sessions=contexts,
        style=static("dashboard.css"),
        now=time.time(),
        tenant=reading.backend.tenant,
    )

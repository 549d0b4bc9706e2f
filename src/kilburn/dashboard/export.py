"""One file of the dashboard, to attach to an issue: it loads nothing, runs nothing, and by default has no word of a page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kilburn.backend import Backend
from kilburn.dashboard.look import environment, static
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.screens import SHOWN, over_time, prices, receipts, window
from kilburn.file import write_file

SESSIONS = 10
"""Sessions whose screens a file has, where none is named."""

WAIT = 600.0
"""Seconds for the replay of a long session."""


def write(backend: Backend, path: Path, name: str | None = None, *, redact: bool = True, force: bool = False) -> int:
    """Write the file; returns its bytes.

    Args:
        backend: opened for reading.
        name: only this session; None for the first of the list.
        redact: whether no text, label, or tool's name of a page is in it. Names of sessions and policies are.
        force: replace a file that is there.

    Raises:
        SpecError: no such session, or the file is there. StoreError, OSError.
    """
    data = page(LedgerReader(backend), name, redact=redact).encode("utf-8")
    with write_file(path, force=force) as file:
        file.write(data)
    return len(data)


def page(reading: LedgerReader, name: str | None = None, *, redact: bool = True) -> str:
    """The file, as text; see `write`."""
    if name is None:
        infos = reading.sessions()
        waiting = len(infos)
        while waiting:
            rows, left = reading.rows(infos)
            waiting = left if left < waiting else 0
        rows, _ = reading.rows(infos)
    else:
        rows = [reading.row(reading.info(name))]
    shown: list[dict[str, Any]] = []
    for row in [row for row in rows if not row.info.damaged][:SESSIONS]:
        query = {"name": row.info.name}
        picture = over_time(reading, query)[1]
        if not picture["picture"].split and reading.replayed(row.info.number, WAIT):
            picture = over_time(reading, query)[1]
        shown.append(
            {
                "time": picture,
                "window": window(reading, query)[1],
                "receipts": receipts(reading, query)[1],
                "prices": prices(reading, query)[1],
            }
        )
    look = environment(redact=redact, links=False)
    return look.get_template("export.html").render(
        rows=rows[:SHOWN],
        found=len(rows),
        sessions=shown,
        style=static("dashboard.css"),
        now=time.time(),
        tenant=reading.backend.tenant,
    )

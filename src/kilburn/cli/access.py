"""How verbs reach a store: for reading beside its writer, or for writing without moving its windows.

A session's window belongs to the agent that works in it. A verb opens it wide, so that nothing is
evicted because somebody looked or forgot. It refuses to create a store that a verb was to read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import kilburn
from kilburn.budget import Budget
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.kernel.resolve import resolve
from kilburn.models.weights import Progress, catalogue, pull
from kilburn.stores.sqlite import Sqlite

__all__ = ["WIDE", "existing", "model_of", "opened", "reading", "session", "window_of", "writing"]

WIDE = 1 << 40
"""Tokens: a window that holds whatever there is."""


def existing(db: str | None) -> str:
    """The path of a store that is there.

    Raises:
        SpecError: there is none.
    """
    path = db or "agent.db"
    if not Path(path).exists():
        raise SpecError(f"there is no store at {path}", advice="give its file with --db, or in KILBURN_DB")
    return path


def reading(db: str | None, tenant: str | None) -> Hierarchy:
    """An existing store, opened for reading only: nothing that is asked is recorded."""
    return kilburn.open(existing(db), window=WIDE, policy="fifo", tenant=tenant or "default", readonly=True)


def writing(
    db: str | None, tenant: str | None, *, clock: Callable[[], float] | None = None, tokenizer: str = "auto", create: bool = False
) -> Hierarchy:
    """A store opened for changes made by a person; `clock` gives times other than now."""
    path = (db or "agent.db") if create else existing(db)
    if clock is None:
        return kilburn.open(path, window=WIDE, policy="fifo", tenant=tenant or "default", tokenizer=tokenizer)
    store = Sqlite(path, tenant=tenant or "default")
    try:
        return Hierarchy(store, Budget(WIDE), "fifo", tokenizer=tokenizer, clock=clock)
    except BaseException:
        store.close()
        raise


def session(store: Hierarchy, name: str) -> Process:
    """A session that exists.

    Raises:
        SpecError: there is none of that name.
    """
    infos = store.processes()
    known = [info.name for info in infos]
    if name not in known:
        near = (
            f"this tenant has {', '.join(map(repr, known[:5]))}{' ...' if len(known) > 5 else ''}"
            if known
            else "this tenant has no session"
        )
        raise SpecError(f"no session {name!r}", advice=near)
    return opened(store, infos[known.index(name)].number, name)


def opened(store: Hierarchy, number: int, name: str) -> Process:
    """A session that exists, counted by the counter that its agent used, so that nothing is counted again."""
    ruler = "auto"
    for event in store.store.events(number):
        if event.act is Act.NOTE:
            ruler = event.data.get("tokenizer", ruler)
    own = (
        store if ruler == store.counter.name else Hierarchy(store.store, store.budget, "fifo", tokenizer=ruler, clock=store.clock)
    )
    return own.process(name)


def window_of(process: Process) -> int | None:
    """Tokens that the last prompt of a session might take; None before the first prompt."""
    window = None
    for event in process.events():
        if event.act is Act.SHIP:
            window = int(event.data["window"])
    return window


def model_of(spec: str | None, fetch: Progress | None = None) -> Any:
    """The model of a spec; of a name of the catalogue, an `hf:` name or a GGUF file; None for "none".

    Args:
        fetch: where given, a file that is not on this machine yet is brought here first, and this is told how far it is.

    Raises:
        SpecError: it names nothing. ModelError, MissingExtra: it cannot be had.
    """
    if spec is None or spec == "none":
        return None
    if not (spec.startswith("hf:") or spec.endswith(".gguf") or spec in {item.name for item in catalogue()}):
        return resolve("models", spec)
    if fetch is not None:
        pull(spec, progress=fetch)
    return resolve("models", f"local({spec!r})")

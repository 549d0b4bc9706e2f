"""How verbs open a store: for reading beside its writer, or for writing without moving its windows.

A session's window belongs to the agent that works in it. A verb opens the session with a very large window, so that
nothing is evicted by looking or forgetting. A verb that reads never creates a store.
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
"""Tokens: a window that is always large enough."""


def existing(db: str | None) -> str:
    """The path of an existing store.

    Raises:
        SpecError: there is none.
    """
    path = db or "agent.db"
    if not Path(path).exists():
        raise SpecError(f"there is no store at {path}", advice="give its file with --db, or in KILBURN_DB")
    return path


def reading(db: str | None, tenant: str | None) -> Hierarchy:
    """An existing store, opened for reading only: nothing is recorded."""
    return kilburn.open(existing(db), window=WIDE, policy="fifo", tenant=tenant or "default", readonly=True)


def writing(
    db: str | None, tenant: str | None, *, clock: Callable[[], float] | None = None, tokenizer: str = "auto", create: bool = False
) -> Hierarchy:
    """A store opened for changes by a person; `clock` gives other times than now."""
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
    """An existing session, with the counter that its agent used, so that nothing is counted again."""
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
        fetch: if given, a missing file is downloaded first, and this function is called with the progress.

    Raises:
        SpecError: it names nothing. ModelError, MissingExtra: it is not available.
    """
    if spec is None or spec == "none":
        return None
    if not (spec.startswith("hf:") or spec.endswith(".gguf") or spec in {item.name for item in catalogue()}):
        return resolve("models", spec)
    if fetch is not None:
        pull(spec, progress=fetch)
    return resolve("models", f"local({spec!r})")

"""Opens stores and sessions for the commands.

A session's window belongs to the agent that works in it. A command opens the session with a very large window, so that reading or
forgetting evicts nothing. A command that only reads never creates a store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn.backend import SegmentKind
from kilburn.backends.places import is_url, open_backend
from kilburn.budget import Budget
from kilburn.cli.screen import Columns, progress, show, show_records
from kilburn.cli.shell import Db, Json, Tenant
from kilburn.errors import KilburnError, SpecError
from kilburn.kernel.ledger import counter_of
from kilburn.kernel.session import Session
from kilburn.kernel.store import DOCUMENT, MEMORY, NOTES
from kilburn.opening import Store
from kilburn.search.choice import vectors_for
from kilburn.terminal import line, say

WIDE = 1 << 40
"""Tokens of a window from which nothing has to be evicted."""

MAX_EMBEDDED = 2000
"""Passages that a command embeds, which takes about ten seconds."""


def existing(db: str | None, *, advice: str = "give its file with --db, or in KILBURN_DB; `kilburn chat` makes one") -> str:
    """Return the path or URL of an existing store.

    Raises:
        SpecError: there is no such file. The error has `advice`.
    """
    path = db or "agent.db"
    if not is_url(path) and not Path(path).exists():
        raise SpecError(f"there is no store at {path}", advice=advice)
    return path


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a command as the fields of one object; see `kilburn.cli.options`."""


class StorePlace(Options, frozen=True, kw_only=True):
    """The store of a command, and whether the command prints JSON."""

    db: Db = None
    tenant: Tenant = None
    json: Json = False

    def reading(self, *, meaning: bool = False) -> Store:
        """Open the store for reading; see `reading`."""
        return reading(self.db, self.tenant, meaning=meaning)

    def writing(self, *, new: bool = False, readonly: bool = False) -> Store:
        """Open the store for changes; see `writing`.

        Args:
            new: create the store if it does not exist.
            readonly: the changes are only tried, and nothing is written.
        """
        return writing((self.db or "agent.db") if new else existing(self.db), self.tenant, readonly=readonly)

    def show(self, value: Any, text: str | Iterable[str]) -> None:
        """Print a result; see `kilburn.cli.screen.show`."""
        show(value, text, json=self.json)

    def show_records(self, records: Sequence[dict[str, Any]], columns: Columns, noun: str = "") -> None:
        """Print records; see `kilburn.cli.screen.show_records`."""
        show_records(records, columns, noun, json=self.json)


def reading(db: str | None, tenant: str | None, *, meaning: bool = False) -> Store:
    """Open an existing store for reading. Recalls and searches are not recorded.

    Args:
        meaning: search by meaning, too, if the store has vectors and their embedder is installed.
    """
    return writing(existing(db), tenant, readonly=True, meaning=meaning)


def writing(
    path: str,
    tenant: str | None,
    *,
    clock: Callable[[], float] = time.time,
    tokenizer: str = "auto",
    readonly: bool = False,
    meaning: bool = False,
) -> Store:
    """Open a store for changes that a person makes.

    Args:
        clock: the time of the changes.
        meaning: see `reading`. New texts are embedded in the background while the store is open for writing; see `kilburn.open`.
    """
    backend = open_backend(path, tenant=tenant or "default", readonly=readonly)
    try:
        vectors = vectors_for(backend, "auto") if meaning else None
        store = Store(backend, Budget(WIDE), "fifo", tokenizer=tokenizer, clock=clock, vectors=vectors)
    except BaseException:
        backend.close()
        raise
    if vectors is not None:
        vectors.start()
    return store


def embed(store: Store, limit: int = MAX_EMBEDDED) -> None:
    """Embed up to `limit` new passages, if this machine has an embedder. Nothing else might embed them before the next search,
    which embeds only a few."""
    vectors = vectors_for(store.backend) if limit else None
    if vectors is None:
        return
    try:
        with progress("embedding", unit="passages") as report:
            vectors.catch_up(limit, report)
    except KilburnError as error:
        say(line(f"some passages cannot be found by meaning yet: {error}"))


def session(store: Store, name: str) -> Session:
    """Open an existing session.

    Raises:
        SpecError: there is no session of this name.
    """
    return with_agent_counter(store, name).session(name)


def with_agent_counter(store: Store, name: str) -> Store:
    """Return the store with the token counter of a session's agent, so that no page is counted again.

    Raises:
        SpecError: there is no session of this name.
    """
    infos = store.sessions()
    names = [info.name for info in infos]
    if name not in names:
        examples = ", ".join(map(repr, names[:5])) + (" ..." if len(names) > 5 else "")
        if name.startswith((MEMORY, DOCUMENT, NOTES)):
            raise SpecError(f"there is no {name!r}", advice="see `kilburn memories list`, `documents list` and `notes list`")
        raise SpecError(f"no session {name!r}", advice=f"this tenant has {examples or 'no session'}")
    return _counted_as(store, infos[names.index(name)].number)


def open_session(store: Store, number: int, name: str) -> Session:
    """Open a session by its number and name, with the token counter of its agent."""
    return _counted_as(store, number).session(name)


def _counted_as(store: Store, number: int) -> Store:
    counter = counter_of(store.backend, number)
    if counter == store.counter.name:
        return store
    return Store(store.backend, store.budget, "fifo", tokenizer=counter, clock=store.clock)


def collection_owners(store: Store, kind: SegmentKind) -> list[str]:
    """Return the owners of the collections of a kind; "" is the owner of what belongs to all users."""
    return [collection.info.user for collection in store.collections() if collection.info.kind is kind]


def no_collection(store: Store, kind: SegmentKind, owner: str, missing: str, command: str) -> SpecError:
    """Return the error that an owner has no collection of a kind. It names the owners that have one.

    Args:
        missing: the verb and noun, such as "is no memory". command: the command that creates such a collection.
    """
    whose = f"of {owner!r}" if owner else "of all users"
    owners = ", ".join(repr(name) for name in collection_owners(store, kind) if name)
    return SpecError(f"there {missing} {whose}", advice=f"give --user: {owners}" if owners else f"see {command} --help")

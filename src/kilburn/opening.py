"""Opening a store, and copying one: `kilburn.open` and `kilburn.copy`.

They stand apart from the package itself because they import the kernel and the SQLite backend, for which `kilburn --help` has no
use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from os import PathLike, fsencode
from os.path import exists, samefile
from typing import TYPE_CHECKING, Any

from kilburn import (
    answering,
    tracing,  # noqa: F401 -- from now on it sees each question to a model
)
from kilburn.backends.places import canonical_name, open_backend
from kilburn.budget import Budget
from kilburn.errors import SpecError, StoreBusy, StoreReadOnly
from kilburn.forgetting.erasure import copied_to, remember_copy
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.store import Store as Store
from kilburn.search.choice import vectors_for
from kilburn.selection import orders
from kilburn.tokens import choice, media
from kilburn.tokens.choice import counter_named
from kilburn.wire import form

if TYPE_CHECKING:
    from kilburn.collections.collection import Collection
    from kilburn.copying import Copied
    from kilburn.memory.notes import Notes
    from kilburn.memory.user_memory import UserMemory


class _Memories:
    """Makes memories and notes; what they are made of is imported with the first one."""

    def make_memory(self, store: Store, collection: Collection) -> UserMemory:
        from kilburn.memory.user_memory import UserMemory

        return UserMemory(store, collection)

    def make_notes(self, store: Store, owner: str) -> Notes:
        from kilburn.memory.notes import Notes

        return Notes(store, owner)


capabilities.register(forms=form, counters=choice, attachments=media, answers=answering, memories=_Memories(), orders=orders)


def open(
    path: str = "agent.db",
    *,
    window: int = 8000,
    policy: Any = "hybrid",
    tenant: str = "default",
    tokenizer: Any = "auto",
    file_tokens: int | None = None,
    reserve: int = 0,
    model: Any = None,
    embedder: Any = "auto",
    ranking: Any = "blend",
    readonly: bool = False,
    foreign: bool = True,
    durable: bool = True,
    anchor: str | PathLike[str] | None = None,
) -> Store:
    """Open a store for one tenant. The file is created if it does not exist.

    Args:
        path: an SQLite file, ":memory:", or the URL of a PostgreSQL database: "postgresql://user@host:5432/database".
        window: tokens that a prompt (and the `reserve` for its reply) may take.
        policy: what decides at the window: a spec such as "hybrid", "lru", "chain(mask(keep=3), fifo)",
            "your.module:Policy", or an object with `plan(view)`. The default suits small windows; the gateway, whose window is
            larger, has "cost".
        tenant: the partition; nothing of one tenant is ever seen by another.
        tokenizer: "auto" (the model's own; else a safe over-estimate), a model's name, "chars/4", or an object that counts.
        file_tokens: tokens of a file that a prompt names by an id or a URL, whose size nobody here knows; None for 2,000, a page
            of a PDF or an image. The usage that a provider reports corrects the window as a whole.
        reserve: tokens of the window that are kept free for the reply.
        model: answers when a policy asks for a text: a spec such as "local" or an object; None for no model.
        embedder: finds by meaning, besides by words: a spec such as "minilm" or "remote('text-embedding-3-small', 1536)", or
            an object; None for words alone. "auto" takes the one that made the store's vectors, or minilm where the extra
            `embed` is installed and its weights are here (`kilburn models pull minilm`), or else none. What is stored is
            embedded in the background, from the first search on (a full window searches, too) or after half a minute; what
            is left when the program ends is embedded by a later one. Nothing is downloaded.
        ranking: puts what a search finds in order: a spec such as "blend" or "words", or an object with `rank`.
        readonly: for reading beside a writer; nothing is recorded.
        foreign: whether a spec may name what is not Kilburn's own: `your.module:Policy`, or an entry point of an
            installed package. Importing a module runs its code, so say False if a policy's spec comes from someone
            else. A model's spec names files and hosts; never accept one from someone else.
        durable: whether a change survives a power cut when its call returns; with False, when `store.sync` of what is
            returned has returned, which may be one wait for many changes. No killed process loses a change either way.
        anchor: a file outside the store, which says how far it had come: an older copy in its place is refused. None for the one
            that `$KILBURN_ANCHOR` names, or none.

    Raises:
        InvalidBudget, SpecError: the arguments do not fit. StoreError: the file or the database does not.
        MissingExtra, Unavailable: the model or the embedder that is named cannot be made.
    """
    _check_path(path)
    budget = Budget(window, reserve)
    if file_tokens is not None and (isinstance(file_tokens, bool) or not isinstance(file_tokens, int) or file_tokens < 0):
        raise SpecError(f"file_tokens={file_tokens!r}"[:200], advice="give a whole number of tokens, 0 or more, or None")
    if tokenizer != "auto":
        tokenizer = counter_named(tokenizer)
    backend = open_backend(path, tenant=tenant, readonly=readonly, durable=durable, anchor=anchor)
    try:
        vectors = vectors_for(backend, embedder, foreign=foreign)
        store = Store(
            backend,
            budget,
            policy,
            tokenizer=tokenizer,
            file_tokens=file_tokens,
            model=model,
            foreign=foreign,
            ranking=ranking,
            vectors=vectors,
        )
    except BaseException:
        backend.close()
        raise
    if vectors is not None:
        vectors.start()
    return store


def _check_path(path: str) -> None:
    try:
        sound = b"\0" not in fsencode(path)
    except (TypeError, UnicodeEncodeError):
        sound = False
    if not sound:
        raise SpecError(f"path={path!a}"[:200], advice='give the path of a file, or ":memory:"')


def copy(
    source: str,
    target: str,
    *,
    tenant: str = "default",
    to: str | None = None,
    note: bool = True,
    progress: Callable[[int, int, str], object] = lambda done, total, words: None,
) -> Copied:
    """Copy all of a tenant into another store, and compare both byte for byte: sessions with their branches, memories, documents,
    notes, ledgers with their times, vectors, what is forgotten, pins and settings. Every address stays what it was.

    It is all or nothing: after an error, or a kill, the target is as it was. Agents may go on writing to the source, and other
    writers of the target wait. A later call brings the target up to date, and what is forgotten in the source is forgotten there
    too.

    Args:
        source, target: each the path of a file, or the URL of a PostgreSQL database, as for `open`; the target is made where
            there is none.
        tenant: whose store it is. to: the tenant in the target; the same where left out.
        note: whether the source keeps a note, so that a receipt of `forget` names this copy.
        progress: called with the number of copied pages and events, their total, and the current step.

    Raises:
        SpecError: both are the same. StoreError: the target has other things under the same names, or has changed its copy, or
            another store was copied there from this place.
        StoreReadOnly, StoreBusy, StoreStale, StoreFull, StoreCorrupt.
    """
    from kilburn.copying import copy as copied

    for path in (source, target):
        _check_path(path)
    names = [canonical_name(path) for path in (source, target)]
    places = [f"{names[0]}#{tenant}", f"{names[1]}#{to or tenant}"]
    if places[0] == places[1] or ":memory:" in (source, target):
        raise SpecError(f"a copy of {names[0]} into {names[1]}", advice="give two stores, or another tenant with `to`")
    if names[0] != names[1] and exists(source) and exists(target) and samefile(source, target):
        # SQLite writes a log beside each name: they would not know of each other.
        raise SpecError(f"{target} is another name of {source}", advice="give two stores")

    def remember() -> None:
        if not note:
            return
        try:
            with closing(open_backend(source, tenant=tenant)) as backend:
                remember_copy(backend, places[1], time.time())
        except (StoreReadOnly, StoreBusy) as error:
            progress(0, 0, f"the source keeps no note of this copy: {error.what}")

    with (
        closing(open_backend(source, tenant=tenant, readonly=True)) as source_backend,
        closing(open_backend(target, tenant=to or tenant, durable=False)) as target_backend,
    ):
        return copied(source_backend, target_backend, places[0], progress, remember, noted=places[1] in copied_to(source_backend))

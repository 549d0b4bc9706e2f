"""Documents: files, folders or texts, each stored as a collection of its chunks.

A chunk is a page of kind TEXT, found by the same search as everything else. When a document is ingested again, the chunks
that are still in it stay, and the others are retired: a search as of an earlier time finds them. The text of a document is
data, never an instruction: it has the trust of a tool's output.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from kilburn.backend import SegmentKind
from kilburn.collections.collection import Collection, undisturbed
from kilburn.errors import SecretFound, SpecError
from kilburn.event import Act, encodable
from kilburn.kernel.store import DOCUMENT, Store
from kilburn.memory.chunks import chunks, rechunk
from kilburn.memory.files import MAX_FILE_BYTES, read_texts
from kilburn.memory.secrets import Secrets, screen
from kilburn.message import Kind
from kilburn.move import Add, Retire
from kilburn.page import Page

__all__ = ["ingest"]

ORDERED = "ordered"
"""The outcome of the ledger note that has the order of the chunks of a document."""


class Ingested(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an ingest.

    Args:
        documents: names of new and changed documents.
        added, retired, unchanged: numbers of chunks.
        redacted: number of secrets that were replaced by a mark.
        gone: names of documents whose file was deleted; their chunks were retired.
        skipped: (name, reason) of skipped files; their stored chunks stay as they were.
    """

    documents: tuple[str, ...] = ()
    added: int = 0
    retired: int = 0
    unchanged: int = 0
    redacted: int = 0
    gone: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


def ingest(
    store: Store,
    path: str | os.PathLike[str],
    name: str | None = None,
    user: str = "",
    *,
    secrets: Secrets = None,
    largest: int = MAX_FILE_BYTES,
    progress: Callable[[int], None] | None = None,
) -> Ingested:
    """Ingest a file, or all texts of a folder, or their changes since the last time; each document is one transaction.

    Args:
        path: a file, or a folder: all texts below it, except links and hidden files.
        name: name of the document, or of the folder, which prefixes the names of its documents; the absolute path by default,
            so that a file is the same document from any working folder.
        user: owner of the documents; "" for all users.
        secrets: what to do with a file that holds a secret: see `kilburn.memory.secrets.screen`. In a folder, a
            refused file is skipped.
        largest: bytes of a file at most.
        progress: called with the number of finished files.

    Raises:
        SpecError: no such file or folder, an invalid name, or a document of another user.
        MissingExtra: the extra `documents` (or `secrets`) is not installed.
        StoreError: the documents before this one are stored; call again to continue.
    """
    place = Path(path)
    base = name if name is not None else place.absolute().as_posix()
    folder = os.path.isdir(place)  # also false for an invalid path
    parts: list[Ingested] = []
    visited: set[str] = set()
    for number, file in enumerate(read_texts(place, largest), 1):
        of = str(PurePosixPath(base) / file.path) if folder else base
        visited.add(of)
        try:
            parts.append(_skipped(of, file.skipped) if file.skipped else ingest_text(store, file.text, of, user, secrets=secrets))
        except (SecretFound, SpecError) as error:
            if not folder:
                raise
            parts.append(_skipped(of, error.what))
        if progress is not None:
            progress(number)
    if folder:
        for document in documents(store, user):
            of = document_name(document)
            # The files of a skipped folder were not looked at.
            if of.startswith(f"{base}/") and not any(
                str(above) in visited for above in (PurePosixPath(of), *PurePosixPath(of).parents)
            ):
                parts.append(_withdrawn(document))
    return Ingested(**{field: _sum(getattr(part, field) for part in parts) for field in Ingested.__struct_fields__ if parts})


def _sum(values: Iterable[Any]) -> Any:
    first, *rest = values
    return sum(rest, first)


def _skipped(name: str, why: str) -> Ingested:
    return Ingested(skipped=((name, why),))


def _withdrawn(document: Collection) -> Ingested:
    """Retire all chunks of a document, because its file was deleted."""
    pages = tuple(page.id for page, _ in document.pages())
    if not pages:
        return Ingested()
    document.apply(Retire(pages=pages, why="its file is gone"))
    return Ingested(retired=len(pages), gone=(document_name(document),))


def ingest_text(store: Store, text: str, name: str, user: str = "", *, secrets: Secrets = None) -> Ingested:
    """Ingest a text as the document of a name, or its changes since the last time, in one transaction.

    Raises:
        SpecError: a blank text, an invalid name, or a document of another user.
        SecretFound: see `kilburn.memory.secrets.screen`. MissingExtra. StoreError.
    """
    if not isinstance(text, str) or not text.strip():
        raise SpecError(f"document {str(name)[:80]!r} without a text", advice="give a text, or remove the document")
    clean, findings = screen(encodable(text), secrets)
    chunks("", name)  # a missing splitter is reported before the document is created
    document = store.document(name, user)
    result = undisturbed(lambda: _changed(document, clean, name))
    return msgspec.structs.replace(result, redacted=len(findings))


def _changed(document: Collection, text: str, name: str) -> Ingested:
    """Bring a document up to date with a text in one transaction: keep the chunks that did not change."""
    head = document.ledger.head
    old_pages = in_order(document)
    texts = document.backend.contents.texts({page.digest for page in old_pages})
    old = [texts[page.digest] for page in old_pages]
    new = rechunk(old, text, name) if old else chunks(text, name)
    if new == old:
        return Ingested(unchanged=len(old))
    reused = _match_chunks(old, new, [page.id for page in old_pages])
    stays = set(reused.values())
    removed = tuple(page.id for page in old_pages if page.id not in stays)
    changes: list[Add | Retire] = [
        Add(text=chunk, kind=Kind.TEXT, why="document") for at, chunk in enumerate(new) if at not in reused
    ]
    added = len(changes)
    if removed:
        changes.append(Retire(pages=removed, why="no longer in the document"))
    # The new pages have no numbers yet: -1, -2, ... stand for them, in their order.
    fresh = iter(range(-1, -added - 1, -1))
    order = [reused.get(at) or next(fresh) for at in range(len(new))]
    document.apply(*changes, seen=head, note={"outcome": ORDERED, "chunks": order})
    return Ingested(documents=(name,), added=added, retired=len(removed), unchanged=len(reused))


def _match_chunks(old: Sequence[str], new: Sequence[str], pages: Sequence[int]) -> dict[int, int]:
    """Map the places of new chunks that exist as pages to these pages, each page once."""
    spare: dict[str, list[int]] = {}
    for page, chunk in zip(reversed(pages), reversed(old), strict=True):
        spare.setdefault(chunk, []).append(page)
    return {at: spare[chunk].pop() for at, chunk in enumerate(new) if spare.get(chunk)}


def in_order(document: Collection) -> list[Page]:
    """Return the chunks of a document that are in force, as they stand in its text."""
    pages = {page.id: page for page, _ in document.pages()}
    order: list[int] = []
    added: tuple[int, ...] = ()
    for event in document.ledger.events():
        if event.act is Act.ADMIT:
            added = event.pages
        elif event.act is Act.NOTE and event.data.get("outcome") == ORDERED:
            order = [page if page > 0 else added[-page - 1] for page in event.data["chunks"]]
    ids = dict.fromkeys(page for page in (*order, *pages) if page in pages)
    return [pages[page] for page in ids]


def document_text(document: Collection) -> str:
    """Return the text of a document as it was handed over last, but for chunks that were forgotten."""
    pages = in_order(document)
    texts = document.backend.contents.texts({page.digest for page in pages})
    return "".join(texts[page.digest] for page in pages)


def documents(store: Store, user: str | None = None) -> Iterator[Collection]:
    """Yield the documents of a tenant, or of one of its users, oldest first."""
    for collection in store.collections():
        if collection.info.kind is SegmentKind.DOCUMENT and user in (None, collection.info.user):
            yield collection


def document_name(document: Collection) -> str:
    """Return the name that a document was given."""
    return document.name.removeprefix(f"{DOCUMENT}/")

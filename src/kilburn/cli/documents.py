"""`documents`: adds, lists and removes documents, which are searched together with the memory."""

from __future__ import annotations

import os
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any

import msgspec
from typer import Argument

from kilburn.cli.access import StorePlace, embed
from kilburn.cli.commands import command_group
from kilburn.cli.forget import carry_out
from kilburn.cli.memories import OnlyUser, RefuseSecrets, secrets_mode
from kilburn.cli.screen import Columns, count, many, progress
from kilburn.cli.shell import Why, Yes
from kilburn.collections.collection import Collection
from kilburn.errors import SpecError
from kilburn.kernel.store import DOCUMENT, Store
from kilburn.memory.documents import Ingested, document_name, document_text, in_order, ingest
from kilburn.memory.documents import documents as documents_of
from kilburn.terminal import age, line, say

documents = command_group("documents")

Name = Annotated[str, Argument(metavar="NAME", help="The name of a document in `documents list`.", show_default=False)]


@documents.command("add")
def add(where: StorePlace, paths: list[Path], name: str | None = None, user: str = "", secrets: RefuseSecrets = None) -> None:
    """Add files and folders to the searched documents, or update them. Only changed files are read again.

    Text files are recognised by their content. Other files are skipped, and so are links and hidden files in folders. A text from
    a file is data, with the trust of a tool's output.

    Examples:

        kilburn documents add docs README.md

        kilburn documents add handbook.md --name handbook

    Args:
        paths PATH: Files, and folders with text files.
        name NAME: Give the file or folder this name; by default its absolute path.
        user NAME: Add the documents for this user; by default for all users.
    """
    if name is not None and len(paths) > 1:
        raise SpecError("--name with several paths", advice="add them one by one")
    screening = secrets_mode(secrets)
    results: list[Ingested] = []
    with where.writing(new=True) as store:
        for path in paths:
            with progress(f"reading {path}") as report:
                results.append(ingest(store, path, name, user, secrets=screening, progress=report))
        embed(store, sum(result.added for result in results))
    pairs = list(zip(paths, results, strict=True))
    where.show([{"path": str(path)} | msgspec.structs.asdict(result) for path, result in pairs], starmap(_describe, pairs))


def _describe(path: Path, result: Ingested) -> str:
    """Return a line about an added path. What was skipped, retired or redacted goes to standard error."""
    for file, why in result.skipped:
        say(line(f"skipped: {file}: {why}"))
    for removed in result.gone:
        say(line(f"deleted, and retired: {removed}"))
    if result.redacted:
        say(f"{many(result.redacted, 'secret')} redacted")
    figures = f"{many(result.added, 'chunk')} added, {count(result.retired)} retired, {count(result.unchanged)} unchanged"
    return line(f"{path}: {many(len(result.documents), 'document')} new or changed; {figures}")


@documents.command("list")
def list_documents(where: StorePlace, user: OnlyUser = None) -> None:
    """List the documents.

    Example:

        kilburn documents list
    """
    with where.reading() as store:
        rows = [_row(document) for document in documents_of(store, user)]
    columns: Columns = {key: key for key in ("document", "user", "chunks", "tokens")}
    where.show_records(rows, {**columns, "changed": lambda row: f"{age(row['changed'])} ago"}, "document")


def _row(document: Collection) -> dict[str, Any]:
    pages = [page for page, _ in document.pages()]
    return {
        "document": document_name(document),
        "user": document.info.user,
        "chunks": len(pages),
        "tokens": sum(page.tokens for page in pages),
        "changed": document.info.used,
    }


@documents.command("show")
def show_document(where: StorePlace, name: Name) -> None:
    """Print the text of a document as it was last added.

    Example:

        kilburn documents show handbook
    """
    with where.reading() as store:
        document = _named(store, name)
        text, chunks = document_text(document), [page.address for page in in_order(document)]
    where.show({"document": name, "chunks": chunks, "text": text}, text.removesuffix("\n"))


@documents.command("remove")
def remove(where: StorePlace, name: Name, yes: Yes = False, why: Why = "") -> None:
    """Forget a document for ever, with everything derived from it. Prints a receipt. The file itself is not changed.

    Example:

        kilburn documents remove handbook --yes
    """
    with where.writing() as store:
        name = document_name(_named(store, name))
        carry_out(partial(store.forget, document=name, why=why), store, where, yes=yes)


def _named(store: Store, name: str) -> Collection:
    name = name.removeprefix(f"{DOCUMENT}/")  # the form in hits of `search`
    documents_by_name = {document_name(document): document for document in documents_of(store)}
    if name not in documents_by_name and os.path.abspath(name) in documents_by_name:
        name = os.path.abspath(name)  # the usual name of a file
    inside = [candidate for candidate in documents_by_name if candidate.startswith(f"{name.rstrip('/')}/")]
    if name not in documents_by_name and inside:
        raise SpecError(
            f"{name!r} is a folder of {many(len(inside), 'document')}", advice=f"name one of them, such as {inside[0]!r}"
        )
    if name not in documents_by_name:
        names = ", ".join(map(repr, list(documents_by_name)[:5])) + (" ..." if len(documents_by_name) > 5 else "")
        raise SpecError(f"no document {name!r}", advice=f"this tenant has {names or 'none'}")
    return documents_by_name[name]

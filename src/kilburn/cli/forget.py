"""`forget`: deletes pages and everything made from them, from every place that Kilburn reaches.

It first shows what would be deleted and what stays elsewhere, asks for confirmation, and prints a receipt.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime
from typing import Annotated, Any

import typer

from kilburn.cli.access import existing, session, writing
from kilburn.cli.screen import count, many
from kilburn.cli.session import Session
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.errors import SpecError, StoreCorrupt
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.page import Page, address_of
from kilburn.stores.sealed import QUARANTINED
from kilburn.stores.sqlite import Sqlite
from kilburn.terminal import emit, line, say, tell

__all__ = ["forget"]

NOT_REACHED = "not reached: providers' caches, file-system snapshots, and copies of the file made elsewhere"


@app.command()
def forget(
    name: Session,
    address: Annotated[str | None, typer.Argument(help="p17, a range p17-p42, or f3.", show_default=False)] = None,
    whole: Annotated[bool, typer.Option("--all", help="All of a session that `fsck --repair` quarantined.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    why: Annotated[str, typer.Option(metavar="TEXT", help="A reason for the ledger; say nothing of the content.")] = "",
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Forget pages, with their folds and index entries, for ever; prints a receipt.

    In a session that `kilburn fsck --repair` quarantined, pages have no addresses any more. --all erases what is left
    of it, including texts that no other session has.

    Example:

        kilburn forget session-1 p17 --yes
    """
    if whole == (address is not None):
        raise SpecError("forget takes an address, or --all for a session that was quarantined", advice="give one of the two")
    if address is None:
        _forget_quarantined(existing(db), tenant or "default", name, yes=yes, json=json)
        return
    with writing(existing(db), tenant) as store:
        process = session(store, name)
        pages = process.closure(address)
        copies, exports = _copies(store, process, pages), _exports(process, pages)
        if not json:
            _announce(pages, copies, exports)
        if not yes:
            _confirm(many(len(pages), "page"))
        gone = process.forget(address, why)
    receipt = {"session": name, "asked": address, "forgotten": gone, "time": time.time(), "copies": copies, "exports": exports}
    if json:
        emit(receipt)
        return
    tell(f"forgotten: {' '.join(gone)}")
    tell(NOT_REACHED)


def _forget_quarantined(path: str, tenant: str, name: str, *, yes: bool, json: bool) -> None:
    """Erase a session that was quarantined."""
    with Sqlite(path, tenant=tenant) as store:
        numbers = [info.number for info in store.processes() if info.name == name and info.damaged == QUARANTINED]
        if not numbers:
            raise SpecError(f"{name!r} is no session that was quarantined", advice="`kilburn fsck` lists them; give an address")
        if not yes:
            _confirm(f"all of {name!r}")
        for number in numbers:
            store.erase(number)
    if json:
        emit({"session": name, "asked": None, "forgotten": [name], "time": time.time(), "copies": [], "exports": []})
        return
    tell(line(f"forgotten: all of {name}"))
    tell(NOT_REACHED)


def _confirm(what: str) -> None:
    if not sys.stdin.isatty():
        raise SpecError("nothing was forgotten: there is nobody to ask", advice="give --yes")
    typer.confirm(f"Forget {what} for ever?", abort=True, err=True)


def _announce(pages: list[Page], copies: list[dict[str, str]], exports: list[dict[str, Any]]) -> None:
    for page in pages:
        made = f", made from {' '.join(map(address_of, page.sources))}" if page.sources else ""
        say(f"goes: {page.address}  {page.kind}, {page.role}, {count(page.tokens)} tokens{made}  {line(page.label)}")
    for copy in copies:
        say(f"stays: {line(copy['session'])} {copy['address']} has the same text as {copy['of']}")
    for export in exports:
        when = datetime.fromtimestamp(export["time"]).astimezone().isoformat(sep=" ", timespec="seconds")
        say(f"stays: an export of {when} to {line(export['to'])}")


def _copies(store: Hierarchy, process: Process, pages: list[Page]) -> list[dict[str, str]]:
    """Pages of this tenant that have the same text and stay."""
    going = {page.digest: page.address for page in pages if page.digest}
    gone = {page.id for page in pages}
    found = []
    for info in store.processes():
        try:
            pages_of = list(store.store.pages(info.number))
        except StoreCorrupt as error:
            say(line(f"kilburn: whether {info.name!r} has a copy cannot be said: {error.what}"))
            continue
        for page, _ in pages_of:
            if page.digest in going and not (info.name == process.name and page.id in gone):
                found.append({"session": info.name, "address": page.address, "of": going[page.digest]})
    return found


def _exports(process: Process, pages: list[Page]) -> list[dict[str, Any]]:
    """Exports that were made when these pages existed."""
    first = min((page.id for page in pages if page.id > 0), default=0)
    return [
        {"to": event.data["export"], "time": event.time}
        for event in process.events()
        if event.act is Act.NOTE and "export" in event.data and 0 < first <= int(event.data.get("last", 0))
    ]

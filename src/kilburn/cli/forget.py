"""`forget`: deletes pages and everything derived from them, in every place that Kilburn reaches.

It first shows what would be deleted and which copies remain, asks for confirmation, and prints a receipt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import typer

from kilburn.backends.places import is_url
from kilburn.backends.sealed import QUARANTINED
from kilburn.backends.sqlite import Sqlite
from kilburn.cli.access import StorePlace, existing, with_agent_counter
from kilburn.cli.moments import when
from kilburn.cli.screen import count, many, progress
from kilburn.cli.shell import Why, Yes, app
from kilburn.errors import SpecError
from kilburn.file import write_file
from kilburn.forgetting.erasure import UNREACHED, Erasure, described, find_copies, receipt_pages
from kilburn.forgetting.listed import listed, read_list, to_forget_again
from kilburn.kernel.store import Store
from kilburn.page import Page, address_of
from kilburn.terminal import line, say

MAX_ANNOUNCED = 50
"""Pages that are listed one by one before the confirmation."""


@app.command()
def forget(
    where: StorePlace,
    name: str | None = None,
    address: str | None = None,
    whole: bool = False,
    session_: str | None = None,
    user: str | None = None,
    document: str | None = None,
    tool: str | None = None,
    source: str | None = None,
    list_file: Path | None = None,
    list_: Path | None = None,
    yes: Yes = False,
    dry: bool = False,
    why: Why = "",
) -> None:
    """Forget pages for ever, with their folds, facts and index entries. Prints one receipt: the pages, a count for each
    place, and what is not reached. The store does not keep it.

    Give a session and an address, or one of the options. Everything derived from the pages is forgotten, too, in every session
    and memory.

    A backup still contains pages that were forgotten after it was made. --list writes a list of numbers and times, without texts:
    store it elsewhere, and replace it regularly. After a backup is restored, and before anything writes to it, --again forgets
    the pages in the list.

    Pages of a session that `kilburn fsck --repair` quarantined have no addresses. --all erases what remains of such a session,
    including texts that no other session has.

    Examples:

        kilburn forget session-1 p17 --yes

        kilburn forget --user ana --dry-run

        kilburn forget --list forgotten.json

    Args:
        name [SESSION]: The name of a session in `kilburn ps`.
        address [ADDRESS]: A page p17, a range p17-p42, a fold f3, or b1/p17 of a branch.
        whole --all: Forget everything of a session that `fsck --repair` quarantined.
        session_ --session NAME: Forget a whole session.
        user NAME: Forget a user's sessions, memory and documents.
        document NAME: Forget a document.
        tool NAME: Forget the results of a tool, in all sessions.
        source NAME: Forget what was learned from a session or document, but not the source.
        list_file --again FILE: Forget what a list of --list contains and this store still has.
        list_ --list FILE: Forget nothing; write a list of what is forgotten, for --again.
        dry --dry-run: Show what would be forgotten, and forget nothing.
    """
    if list_ is not None or list_file is not None:
        selectors = (name, address, session_, user, document, tool, source)
        if whole or (list_ and list_file) or any(value is not None for value in selectors):
            raise SpecError("--list and --again cannot be combined with other selections", advice="give one of them alone")
        if list_ is not None:
            _write_list(list_, where)
        elif list_file is not None:
            _forget_again(list_file, where, yes=yes, dry=dry)
        return
    targets = {"session": session_, "user": user, "document": document, "tool": tool, "source": source}
    chosen: dict[str, Any] = {word: value for word, value in targets.items() if value is not None}
    if name is None and not whole and address is None and len(chosen) == 1:
        with where.writing(readonly=dry) as store:
            carry_out(partial(store.forget, **chosen, why=why), store, where, yes=yes, dry=dry)
        return
    if name is None or chosen or whole == (address is not None):
        raise SpecError(
            "forget takes a session and an address, a session and --all if it was quarantined, or one of --session, --user, "
            "--document, --tool and --source",
            advice="give one of these",
        )
    if address is None:
        _forget_quarantined(where, name, yes=yes)
        return
    with where.writing(readonly=dry) as opened:
        store = with_agent_counter(opened, name)
        carry_out(partial(store.forget, session=name, address=address, why=why), store, where, yes=yes, dry=dry)


def _write_list(file: Path, where: StorePlace) -> None:
    """Write the list of forgotten pages."""
    with where.reading() as store:
        forgotten = listed(store.backend, store.clock())
    # Each segment has a line. To keep its pages in a restored backup, delete its line and that of "check".
    lines = ",\n".join(msgspec.json.encode(segment).decode() for segment in forgotten.gone)
    head = msgspec.json.encode(
        {"time": forgotten.time, "made": {str(number): created for number, created in forgotten.made.items()}}
    ).decode()
    with write_file(file, force=True) as out:
        out.write(f'{head[:-1]},\n"check":"{forgotten.check}",\n"gone":[\n{lines}\n]}}\n'.encode())
    summary = line(f"{file}: {many(len(forgotten.gone), 'segment')} forgotten in part or as a whole")
    where.show({"list": str(file), "segments": len(forgotten.gone)}, summary)


def _forget_again(file: Path, where: StorePlace, *, yes: bool, dry: bool) -> None:
    """Forget the pages in a list."""
    forgotten = read_list(file.read_bytes())
    with where.writing(readonly=dry) as store:
        roots, whole = to_forget_again(store.backend, forgotten)
        forget = partial(store.forget_pages, roots, whole, asked={"again": file.name}, why="forgotten before")
        carry_out(forget, store, where, yes=yes or not (roots or whole), dry=dry)


def _forget_quarantined(where: StorePlace, name: str, *, yes: bool) -> None:
    """Erase a quarantined session."""
    path = existing(where.db)
    if is_url(path):
        raise SpecError("only a file has quarantined sessions", advice="give an address, or --session")
    with Sqlite(path, tenant=where.tenant or "default") as backend:
        numbers = [info.number for info in backend.segments() if info.name == name and info.damaged == QUARANTINED]
        if not numbers:
            raise SpecError(f"{name!r} is no quarantined session", advice="`kilburn fsck` lists them; give an address")
        if not yes:
            confirm(f"all of {name!r}")
        for number in numbers:
            backend.erase(number)
    receipt = {"session": name, "asked": None, "forgotten": [name], "time": time.time(), "copies": [], "exports": []}
    where.show(receipt, (line(f"forgotten: all of {name}"), f"not reached: {'; '.join(UNREACHED)}"))


def confirm(description: str) -> None:
    """Ask on the terminal before something is forgotten.

    Raises:
        SpecError: there is no terminal. typer.Abort: the answer is no.
    """
    if not sys.stdin.isatty():
        raise SpecError("nothing was forgotten: no terminal to ask for confirmation", advice="give --yes")
    typer.confirm(f"Forget {description} for ever?", abort=True, err=True)


def carry_out(forget: Callable[..., Erasure], store: Store, where: StorePlace, *, yes: bool, dry: bool = False) -> None:
    """Announce what would be forgotten and which copies remain, ask, forget it, and print the receipt.

    Args:
        forget: forgets the pages; called with `dry=True`, it only returns what would be forgotten.
    """
    with progress("searching for derived pages"):
        receipt = forget(dry=True)
    going = receipt_pages(store.backend, receipt)
    copies = find_copies(store.backend, going)
    if not where.json:
        _announce(receipt, going, copies)
    if not dry:
        if not yes:
            confirm(many(len(going), "page"))
        with progress("forgetting"):
            receipt = forget(dry=False)
    session, address = receipt.asked.get("session"), receipt.asked.get("address")
    title = "would go" if dry else "forgotten"
    lines = []
    for name, ranges in receipt.pages.items():
        prefix = "" if name == session and address else f"{name} "
        lines.append(line(f"{title}: {prefix}{' '.join(ranges)}"))
    lines += [line(f"{title}: all of {name}, with its name and its ledger") for name in receipt.whole]
    if not going and not receipt.whole:
        lines.append("nothing to forget")
    if receipt.places:
        places = ", ".join(f"{count(number)} {_noun(place, number)}" for place, number in receipt.places.items())
        lines.append(f"in all: {places}")
    lines += [line(f"also notified: {place}") for place in receipt.told]
    for name, notes in receipt.concerned.items():
        lines.append(line(f"possibly related, and kept: {name} {', '.join(notes)} (an agent wrote it in no known session)"))
    where.show(described(receipt, going, copies, dry=dry), [*lines, f"not reached: {'; '.join(receipt.unreached)}"])


def _noun(place: str, number: int) -> str:
    singular = {"entities": "entity", "index entries": "index entry"}.get(place, place.removesuffix("s"))
    return singular if number == 1 else place


def _announce(receipt: Erasure, going: list[tuple[str, Page]], copies: list[dict[str, str]]) -> None:
    session = receipt.asked.get("session")
    for name, page in going[:MAX_ANNOUNCED]:
        prefix = "" if name == session else f"{name} "
        origin = f", made from {' '.join(map(address_of, page.sources))}" if page.sources else ""
        say(line(f"goes: {prefix}{page.address}  {page.kind}, {page.role}, {count(page.tokens)} tokens{origin}  {page.label}"))
    if len(going) > MAX_ANNOUNCED:
        say(f"goes: {many(len(going) - MAX_ANNOUNCED, 'more page')}")
    for copy in copies:
        say(f"stays: {line(copy['session'])} {copy['address']} has the same text as {copy['of']}")
    for export in receipt.exports:
        say(line(f"stays: an export of {when(export.time)} to {export.to}"))
    for name, reason in receipt.left:
        say(line(f"stays: {name}: {reason}"))

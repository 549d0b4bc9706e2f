"""`receipts`: what left a session's window, why, by which policy, and how to get it back.

The store is opened for reading; nothing changes.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from kilburn.cli.access import reading, session
from kilburn.cli.screen import many, table
from kilburn.cli.session import SessionName
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.kernel.receipts import Receipt
from kilburn.kernel.session import Session
from kilburn.page import parse_address
from kilburn.terminal import emit, line, tell

SHOWN = 3
"""Addresses of one receipt that the table shows; --json has all of them."""


@app.command()
def receipts(
    name: SessionName,
    address: Annotated[
        str | None, Argument(metavar="ADDRESS", help="Only what concerns these pages: p17, p17-p42 or f3.", show_default=False)
    ] = None,
    outcome: Annotated[str | None, Option(metavar="WORD", help="Only these: done, failed, no progress ...")] = None,
    last: Annotated[int | None, Option(min=1, help="Only the newest so many.")] = None,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """List what each compaction took out of the window, why, by which policy, and with which outcome.

    `kilburn recall` returns the whole text of every address under "left".

    Examples:

        kilburn receipts session-1

        kilburn receipts session-1 p17
    """
    with reading(db, tenant) as store:
        opened = session(store, name)
        found = opened.ledger.receipts()
        if address is not None:
            _check(opened, address)
            found = [receipt for receipt in found if _concerns(receipt, address)]
    if outcome is not None:
        found = [receipt for receipt in found if receipt.outcome == outcome]
    chosen = found[-last:] if last else found
    if json:
        emit({"session": name, "receipts": [_card(name, receipt) for receipt in chosen]})
        return
    heads = ("turn", "outcome", "policy", "freed", "left", "in its place", "why")
    table(heads, (_row(receipt) for receipt in chosen))
    tell(_footer(name, chosen))


def _check(session: Session, address: str) -> None:
    """Raise `UnknownAddress` for pages that never existed; forgotten pages still have their receipts."""
    if not set(parse_address(address)) <= session.window.pages.keys():
        session.contents.resolve(address)


def _concerns(receipt: Receipt, address: str) -> bool:
    first, last = parse_address(address)
    places = map(parse_address, (*receipt.left, *receipt.folds, *receipt.back))
    return any(start <= last and first <= end for start, end in places)


def _card(name: str, receipt: Receipt) -> dict[str, object]:
    """A receipt for a program, with the command lines that give back what left."""
    again = [f"kilburn recall {shlex.quote(name)} {address}" for address in receipt.left]
    return msgspec.structs.asdict(receipt) | {"recall": again}


def _row(receipt: Receipt) -> tuple[Any, ...]:
    why = receipt.why
    if receipt.asked:
        why += f"{'; ' if why else ''}the model: {', '.join(receipt.asked)}"
    figures = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in receipt.figures.items())
    return (
        receipt.turn,
        receipt.outcome,
        receipt.policy,
        receipt.freed,
        _short(receipt.left),
        _short(receipt.folds) or (f"back: {_short(receipt.back)}" if receipt.back else ""),
        f"{why} ({figures})" if figures else why,
    )


def _short(addresses: Sequence[str]) -> str:
    more = len(addresses) - SHOWN
    return " ".join(addresses[:SHOWN]) + (f" and {more} more" if more > 0 else "")


def _footer(name: str, chosen: Sequence[Receipt]) -> str:
    left = next((receipt.left[0] for receipt in reversed(chosen) if receipt.left), None)
    said = f"{many(len(chosen), 'receipt')}, {many(sum(receipt.freed for receipt in chosen), 'token')} freed"
    return said + (f"; to get text back: kilburn recall {line(shlex.quote(name))} {left}" if left else "")

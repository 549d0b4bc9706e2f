"""`receipts`: lists what left a session's window, why, by which policy, and how to get it back."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from typer import Option

from kilburn.cli.access import StorePlace, session
from kilburn.cli.screen import address_list, many, table
from kilburn.cli.session import SessionName
from kilburn.cli.shell import app
from kilburn.effect import Outcome
from kilburn.errors import SpecError
from kilburn.kernel.receipts import Receipt
from kilburn.kernel.session import Session
from kilburn.page import parse_address
from kilburn.terminal import emit, line, tell

MAX_ADDRESSES = 3
"""Addresses of one receipt in the table; --json has all of them."""


@app.command()
def receipts(
    where: StorePlace,
    name: SessionName,
    address: str | None = None,
    outcome: Annotated[
        str | None, Option(metavar="WORD", help=f"List only receipts with this outcome: {', '.join(Outcome)}.")
    ] = None,
    last: Annotated[int | None, Option(min=1)] = None,
) -> None:
    """List what compactions, the kernel (policy kernel) and changes by hand (policy user) moved: pages, reason, policy, outcome.
    A forget is not among them: it prints its own receipt.

    "freed" has the tokens by which the window shrank; it is negative where the window grew. `kilburn recall` returns the whole
    text of every address under "left".

    Examples:

        kilburn receipts session-1

        kilburn receipts session-1 p17

    Args:
        address [ADDRESS]: List only receipts of these pages: p17, p17-p42 or f3.
        last: List only this many of the newest receipts.
    """
    with where.reading() as store:
        opened = session(store, name)
        chosen = opened.ledger.receipts()
        if address is not None:
            _check(opened, address)
            chosen = [receipt for receipt in chosen if _concerns(receipt, address)]
    if outcome is not None:
        # Another version's words are known if a receipt has them.
        if outcome not in {*Outcome, *(receipt.outcome for receipt in chosen)}:
            raise SpecError(f"no outcome {outcome[:80]!r}", advice=f"give one of: {', '.join(Outcome)}")
        chosen = [receipt for receipt in chosen if receipt.outcome == outcome]
    chosen = chosen[-last:] if last else chosen
    if where.json:
        emit({"session": name, "receipts": [_card(name, receipt) for receipt in chosen]})
        return
    table(("turn", "outcome", "policy", "freed", "left", "in its place", "why"), map(_row, chosen))
    tell(_footer(name, chosen))


def _check(session: Session, address: str) -> None:
    """Raise `UnknownAddress` for pages that never existed. Forgotten pages still have receipts."""
    if not set(parse_address(address)) <= session.window.pages.keys():
        session.contents.resolve(address)


def _concerns(receipt: Receipt, address: str) -> bool:
    first, last = parse_address(address)
    ranges = map(parse_address, (*receipt.left, *receipt.folds, *receipt.brought, *receipt.back))
    return any(start <= last and first <= end for start, end in ranges)


def _card(name: str, receipt: Receipt) -> dict[str, object]:
    """Return a receipt as JSON, with the commands that recall the evicted pages."""
    commands = [f"kilburn recall {shlex.quote(name)} {address}" for address in receipt.left]
    return msgspec.structs.asdict(receipt) | {"recall": commands}


def _row(receipt: Receipt) -> tuple[Any, ...]:
    why = receipt.why
    if receipt.asked:
        why += f"{'; ' if why else ''}{_answers(receipt.asked)}"
    figures = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in receipt.figures.items())
    groups = {"": receipt.folds, "copy: ": receipt.brought, "back: ": receipt.back}
    places = [f"{title}{address_list(addresses, MAX_ADDRESSES)}" for title, addresses in groups.items() if addresses]
    return (
        receipt.turn,
        receipt.outcome,
        receipt.policy,
        receipt.freed or -receipt.added,
        address_list(receipt.left, MAX_ADDRESSES),
        "; ".join(places),
        f"{why} ({figures})" if figures else why,
    )


def _answers(outcomes: Sequence[str]) -> str:
    """Return the outcomes of the model's answers, in words."""
    answers = [outcome for outcome in outcomes if outcome != Outcome.NO_MODEL]
    return f"the model: {', '.join(answers)}" if answers else "there was no model to ask"


def _footer(name: str, receipts: Sequence[Receipt]) -> str:
    example = next((receipt.left[-1] for receipt in reversed(receipts) if receipt.left), None)
    total = f"{many(len(receipts), 'receipt')}, {many(sum(receipt.freed for receipt in receipts), 'token')} freed"
    return total + (f"; to get text back: kilburn recall {line(shlex.quote(name))} {example}" if example else "")

"""`window`: what a session's prompt holds, what would leave it, and changing that by hand.

The session is opened with a very large window, so that nothing moves but what is asked for. What must fit is measured by the
window that the agent's last prompt had.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from kilburn.agents import by_hand
from kilburn.agents.compaction import compact as compact_session
from kilburn.backends.places import open_backend
from kilburn.cli.access import StorePlace, closed_after, existing, fetched, session, stored
from kilburn.cli.commands import command_group
from kilburn.cli.screen import count, many, table
from kilburn.cli.session import SessionName
from kilburn.cli.shell import Why
from kilburn.effect import Outcome
from kilburn.kernel.shipments import shipments
from kilburn.terminal import emit, line, tell

window = command_group("window")

Address = Annotated[str, Argument(metavar="ADDRESS", help="p17, a range p17-p42, or f3.", show_default=False)]

SHOWN = 6
"""Addresses of a line; --json has all of them."""


@window.command("preview")
@stored
def preview(
    name: SessionName,
    tokens: Annotated[int, Option(min=0, help="What would leave if so many tokens came now.")] = 0,
    size: Annotated[
        int | None, Option("--window", min=1, help="Tokens of the window; else those of the last prompt, or 8,000.")
    ] = None,
    policy: Annotated[str | None, Option(help="Who decides; else the policy of the last compaction, or hybrid.")] = None,
    *,
    where: StorePlace,
) -> None:
    """Show what would leave the window now, and at which price. Nothing changes, and no model is asked.

    Examples:

        kilburn window preview session-1 --tokens 2000

        kilburn window preview session-1 --tokens 2000 --policy summarize --json
    """
    with closing(open_backend(existing(where.db), tenant=where.tenant or "default", readonly=True)) as backend:
        found, policy, window = by_hand.preview(backend, name, tokens, window=size, policy=policy)
    if where.json:
        emit({"session": name, "policy": policy, "tokens": tokens} | msgspec.to_builtins(found))
        return
    heads = ("policy", "outcome", "leaves", "freed", "why")
    rows = ((one.policy, one.outcome, _short(one.left), count(one.freed), one.why) for one in found.receipts)
    if found.receipts:
        table(heads, rows)
    room = found.capacity - found.use
    said = f"{count(found.use)} tokens now, {found.use / found.capacity:.0%} of what fits a window of {count(window)}"
    if not found.receipts:
        tell(f"nothing would leave: {said}, {count(room)} free")
        return
    asks = f"; a model would be asked {many(found.asks, 'time')}" if found.asks else ""
    tell(f"{said}, {count(found.after)} then; a provider would process {count(found.again)} of them again{asks}")


@window.command("diff")
@stored
def diff(
    name: SessionName,
    turn: Annotated[int, Argument(metavar="TURN", min=0, help="The earlier prompt: the number of its last message.")],
    until: Annotated[int | None, Argument(metavar="TURN", min=0, help="The later one; else the prompt as it is now.")] = None,
    *,
    where: StorePlace,
) -> None:
    """Show how two prompts of a session differ. Lists what left, what came, and how much of the beginning is the same.

    Examples:

        kilburn window diff session-1 3

        kilburn window diff session-1 3 5 --json
    """
    with where.reading() as store:
        found = session(store, name).ledger.difference(turn, until)
    if where.json:
        emit({"session": name, "turn": turn, "until": until} | msgspec.to_builtins(found))
        return
    for what, addresses in (("left", found.left), ("came", found.came), ("shown by a line or whole", found.changed)):
        if addresses:
            tell(line(f"{what}: {_short(addresses)}"))
    tell(f"{count(found.before)} tokens, then {count(found.after)}; the first {count(found.kept)} are the same")


@window.command("shipped")
@stored
def shipped(
    request: Annotated[
        str, Argument(metavar="REQUEST", help="An id of a request: its client's, the gateway's or a trace's.", show_default=False)
    ],
    name: Annotated[str | None, Option("--session", metavar="SESSION", help="Only of this session, which is faster.")] = None,
    *,
    where: StorePlace,
) -> None:
    """Show the prompts that were made for a request, and their pages.

    The gateway keeps its own id of a request with each prompt (the header x-kilburn-request of the answer), the client's
    (x-client-request-id or x-request-id) and that of the trace (traceparent). `kilburn recall` gives each page back.

    Examples:

        kilburn window shipped 61b2aea13ff33eef

        kilburn window shipped 61b2aea13ff33eef --session session-1 --json
    """
    with where.reading() as store:
        if name is not None:
            session(store, name)
        found = list(shipments(store.backend, store.counter, request, name))
    if where.json:
        emit({"request": request, "prompts": [one._asdict() for one in found]})
        return
    if not found:
        tell(line(f"no prompt here was made for {request[:80]!r}"))
        return
    heads = ("session", "turn", "tokens", "again", "cached", "pages", "out", "beside")
    table(
        heads,
        (
            (one.session, one.turn, one.tokens, one.again, one.cached, _short(one.pages), _short(one.out), _short(one.beside))
            for one in found
        ),
    )
    last = found[-1]
    if last.pages:
        tell(f"{many(len(found), 'prompt')}; to read a page: kilburn recall {line(shlex.quote(last.session))} {last.pages[-1]}")


@window.command("undo")
@stored
def undo(
    name: SessionName,
    size: Annotated[int | None, Option("--window", min=1, help="Tokens it may take; else those of the last prompt.")] = None,
    *,
    where: StorePlace,
) -> None:
    """Undo the newest compaction. The pages return exactly, and what stood in their place leaves. Again: the one before.

    A compaction comes because a window is full. Where what it took out does not fit any more, give --window with the size of a
    larger one, in which the agent goes on. The policy may take the same pages out when it makes room the next time;
    `kilburn window pin` keeps a page.

    Examples:

        kilburn window undo session-1

        kilburn window undo session-1 --window 16000 --json
    """
    with where.writing() as store:
        opened = session(store, name)
        receipt, use = by_hand.undo(opened, size), opened.prompts.use
    _changed(name, where.json, "taken back", [*receipt.left, *receipt.back], use, f", by {receipt.policy} at turn {receipt.turn}")


@window.command("compact")
@stored
def compact(
    name: SessionName,
    address: Annotated[str | None, Argument(metavar="RANGE", help="Only these pages: p3-p20.", show_default=False)] = None,
    model: Annotated[str | None, Option(help="Who writes the summary; else the most telling lines are kept as they are.")] = None,
    keep: Annotated[int, Option(min=1, help="Newest messages that stay as they are.")] = 2,
    *,
    where: StorePlace,
) -> None:
    """Put one summary in place of the older messages, or of a range. Nothing is lost, and `undo` takes it back.

    Examples:

        kilburn window compact session-1

        kilburn window compact session-1 p1-p4 --json
    """
    existing(where.db)
    answers = fetched(model) if model else None
    with closed_after(answers), where.writing() as store:
        opened = session(store, name)
        done = compact_session(opened, answers, keep=keep, pages=address)
        use = opened.prompts.use
    if where.json:
        emit({"session": name, "use": use} | msgspec.to_builtins(done))
    elif done.outcome is Outcome.DONE:
        tell(line(f"{done.address} stands for what left: {count(done.freed)} tokens freed, {count(use)} in the window"))
    else:
        tell(line(f"nothing changed: {done.outcome}{f', {done.why}' if done.why else ''}"))


@window.command("evict")
@stored
def evict(name: SessionName, address: Address, why: Why = "", *, where: StorePlace) -> None:
    """Evict pages from the window, with their calls and results. Their text stays under their address.

    Examples:

        kilburn window evict session-1 p7

        kilburn window evict session-1 p4-p5 --json
    """
    with where.writing() as store:
        opened = session(store, name)
        left, use = opened.edits.evict(address, why), opened.prompts.use
    _changed(name, where.json, "let go", left, use)


@window.command("pin")
@stored
def pin(name: SessionName, address: Address, *, where: StorePlace) -> None:
    """Pin pages. They return to the window, and no policy evicts them until they are unpinned.

    Examples:

        kilburn window pin session-1 p1

        kilburn window pin session-1 p1 --json
    """
    with where.writing() as store:
        opened = session(store, name)
        by_hand.keep(opened, address)
        use = opened.prompts.use
    _changed(name, where.json, "kept", [address], use)


@window.command("unpin")
@stored
def unpin(name: SessionName, address: Address, *, where: StorePlace) -> None:
    """Unpin pages, so that a policy can evict them again.

    Examples:

        kilburn window unpin session-1 p1

        kilburn window unpin session-1 p1 --json
    """
    with where.writing() as store:
        opened = session(store, name)
        opened.unpin(address)
        use = opened.prompts.use
    _changed(name, where.json, "may leave again", [address], use)


def _changed(name: str, json: bool, done: str, addresses: Sequence[str], use: int, more: str = "") -> None:
    if json:
        emit({"session": name, "done": done, "pages": list(addresses), "use": use})
        return
    tell(line(f"{done}{more}: {_short(addresses)}; {count(use)} tokens in the window of {shlex.quote(name)}"))


def _short(addresses: Sequence[Any]) -> str:
    more = len(addresses) - SHOWN
    return " ".join(addresses[:SHOWN]) + (f" and {more} more" if more > 0 else "")

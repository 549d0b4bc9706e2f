"""`window`: shows what a session's prompt holds and what would be evicted, and changes the window by hand.

A session is opened with a very large window, so that only the requested change moves pages; `preview` uses the window of the
last prompt. What must fit is measured by that window.
"""

from __future__ import annotations

import shlex
from contextlib import closing
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from kilburn.agents import by_hand
from kilburn.agents.compaction import compact as compact_session
from kilburn.backends.places import open_backend
from kilburn.cli.access import StorePlace, existing, session
from kilburn.cli.commands import command_group
from kilburn.cli.model_loading import closing_model, load_model
from kilburn.cli.screen import address_list, count, many, table
from kilburn.cli.session import SessionName
from kilburn.cli.shell import Why
from kilburn.cli.shipments import shipments
from kilburn.effect import Outcome
from kilburn.terminal import emit, line, tell

window = command_group("window")

PAST_TENSE = {"undo": "undone", "evict": "evicted", "pin": "pinned", "unpin": "unpinned"}

Address = Annotated[str, Argument(metavar="ADDRESS", help="A page p17, a range p17-p42, or a fold f3.", show_default=False)]


@window.command("preview")
def preview(
    where: StorePlace,
    name: SessionName,
    tokens: Annotated[int, Option(min=0)] = 0,
    size: Annotated[int | None, Option(min=1)] = None,
    policy: str | None = None,
) -> None:
    """Show which pages would leave the window now, and how many tokens a provider would then process again. Nothing changes, and
    no model is asked.

    Examples:

        kilburn window preview session-1 --tokens 2000

        kilburn window preview session-1 --tokens 2000 --policy summarize --json

    Args:
        tokens: Show what would be evicted if a message of this many tokens came.
        size --window: Assume a window of this many tokens; by default that of the last prompt.
        policy: Let this policy choose; by default the policy of the last compaction, or hybrid.
    """
    with closing(open_backend(existing(where.db), tenant=where.tenant or "default", readonly=True)) as backend:
        result, policy, window = by_hand.preview(backend, name, tokens, window=size, policy=policy)
    if where.json:
        emit({"session": name, "policy": policy, "tokens": tokens} | msgspec.to_builtins(result))
        return
    heads = ("policy", "outcome", "leaves", "freed", "why")
    if result.receipts:
        table(heads, ((row.policy, row.outcome, address_list(row.left), count(row.freed), row.why) for row in result.receipts))
    room = result.capacity - result.use
    use = f"{count(result.use)} tokens now, {result.use / result.capacity:.0%} of what fits a window of {count(window)}"
    if not result.receipts:
        tell(f"nothing would leave: {use}, {count(room)} free")
        return
    asks = f"; a model would be asked {many(result.asks, 'time')}" if result.asks else ""
    after, again = count(result.after), count(result.again)
    tell(f"{use}; {after} afterwards, without the message asked about, {again} of which a provider would process again{asks}")


@window.command("diff")
def diff(
    where: StorePlace,
    name: SessionName,
    turn: Annotated[int, Argument(min=0)],
    until: Annotated[int | None, Argument(min=0)] = None,
) -> None:
    """Compare two prompts of a session. Lists the pages that left and came, and the size of the common beginning.

    Examples:

        kilburn window diff session-1 3

        kilburn window diff session-1 3 5 --json

    Args:
        turn TURN: The earlier prompt, by the number of its last message.
        until [TURN]: The later prompt; by default the current one.
    """
    with where.reading() as store:
        difference = session(store, name).ledger.difference(turn, until)
    groups = {"left": difference.left, "came": difference.came, "shown by a line or whole": difference.changed}
    lines = [line(f"{title}: {address_list(addresses)}") for title, addresses in groups.items() if addresses]
    sizes = f"{count(difference.before)} tokens, then {count(difference.after)}; the first {count(difference.kept)} are the same"
    where.show({"session": name, "turn": turn, "until": until} | msgspec.to_builtins(difference), [*lines, sizes])


@window.command("shipped")
def shipped(where: StorePlace, request: str, name: str | None = None) -> None:
    """Show the prompts that were made for a request, and their pages.

    The gateway stores three ids with each prompt: its own (the header x-kilburn-request of the reply), the client's
    (x-client-request-id or x-request-id) and that of the trace (traceparent). `kilburn recall` returns the text of a page.

    Examples:

        kilburn window shipped 61b2aea13ff33eef

        kilburn window shipped 61b2aea13ff33eef --session session-1 --json

    Args:
        request REQUEST: The id of a request, given by its client, the gateway or a trace.
        name --session SESSION: Search only this session, which is faster.
    """
    with where.reading() as store:
        if name is not None:
            session(store, name)
        prompts = list(shipments(store.backend, store.counter, request, name))
    if where.json:
        emit({"request": request, "prompts": [prompt._asdict() for prompt in prompts]})
        return
    if not prompts:
        tell(line(f"no prompt here was made for {request[:80]!r}"))
        return
    addresses = ("pages", "out", "beside")
    figures = ("session", "turn", "tokens", "again", "cached")
    table(
        (*figures, *addresses),
        (
            (*(getattr(prompt, name) for name in figures), *(address_list(getattr(prompt, name)) for name in addresses))
            for prompt in prompts
        ),
    )
    last = prompts[-1]
    if last.pages:
        tell(f"{many(len(prompts), 'prompt')}; to read a page: kilburn recall {line(shlex.quote(last.session))} {last.pages[-1]}")


@window.command("undo")
def undo(where: StorePlace, name: SessionName, size: Annotated[int | None, Option(min=1)] = None) -> None:
    """Undo the newest compaction, or eviction by hand: its pages return exactly, and its summary leaves. Repeat it to undo the
    one before.

    A window is compacted because it is full. If the pages do not fit any more, give --window with the size of a larger window in
    which the agent continues. The policy may evict the same pages the next time; `kilburn window pin` prevents that.

    Examples:

        kilburn window undo session-1

        kilburn window undo session-1 --window 16000 --json

    Args:
        size --window: Let the prompt take this many tokens; by default the room that the last prompt had.
    """
    _change(name, where, "undo", tokens=size)


@window.command("compact")
def compact(
    where: StorePlace,
    name: SessionName,
    address: str | None = None,
    model: str | None = None,
    keep: Annotated[int, Option(min=1)] = 2,
) -> None:
    """Replace the older messages, or a range, by one summary. Nothing is lost, and `undo` brings the pages back.

    Examples:

        kilburn window compact session-1

        kilburn window compact session-1 p1-p4 --json

    Args:
        address [RANGE]: Compact only these pages, such as p3-p20.
        model: Let this model write the summary; by default, the most telling lines are quoted.
        keep: Keep this many of the newest messages as they are.
    """
    existing(where.db)
    writer = load_model(model) if model else None
    with closing_model(writer), where.writing() as store:
        opened = session(store, name)
        compaction = compact_session(opened, writer, keep=keep, pages=address)
        use = opened.prompts.use
    if compaction.outcome is Outcome.DONE:
        freed = f"{count(compaction.freed)} tokens freed, {count(use)} in the window"
        text = f"{compaction.address} stands for the evicted pages: {freed}"
    else:
        text = f"nothing changed: {compaction.outcome}{f', {compaction.why}' if compaction.why else ''}"
    where.show({"session": name, "use": use} | msgspec.to_builtins(compaction), line(text))


@window.command("evict")
def evict(where: StorePlace, name: SessionName, address: Address, why: Why = "") -> None:
    """Evict pages from the window, together with their calls and results. Their text can be recalled by its address.

    Examples:

        kilburn window evict session-1 p7

        kilburn window evict session-1 p4-p5 --json
    """
    _change(name, where, "evict", address, why=why)


@window.command("pin")
def pin(where: StorePlace, name: SessionName, address: Address) -> None:
    """Pin pages. They return to the window, and no policy evicts them until they are unpinned.

    Examples:

        kilburn window pin session-1 p1

        kilburn window pin session-1 p1 --json
    """
    _change(name, where, "pin", address)


@window.command("unpin")
def unpin(where: StorePlace, name: SessionName, address: Address) -> None:
    """Unpin pages, so that a policy can evict them again.

    Examples:

        kilburn window unpin session-1 p1

        kilburn window unpin session-1 p1 --json
    """
    _change(name, where, "unpin", address)


def _change(name: str, where: StorePlace, verb: str, address: str = "", **options: Any) -> None:
    """Change a window by hand, and print what was moved."""
    with where.writing() as store:
        change = by_hand.change(session(store, name), verb, address, **options)
    by = f", by {change.receipt.policy} at turn {change.receipt.turn}" if change.receipt is not None else ""
    window = f"{count(change.use)} tokens in the window of {shlex.quote(change.session)}"
    where.show(change.figures(), line(f"{PAST_TENSE[verb]}{by}: {address_list(change.pages)}; {window}"))

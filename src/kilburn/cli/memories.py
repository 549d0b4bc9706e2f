"""Long-term memory: `remember` writes a fact; `memories` lists facts, shows their sources, and changes or retires them."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from typer import Argument, Option

from kilburn.backend import SegmentKind
from kilburn.cli.access import StorePlace, collection_owners, embed, no_collection
from kilburn.cli.commands import app, command_group
from kilburn.cli.forget import carry_out
from kilburn.cli.moments import moment, seconds, when
from kilburn.cli.screen import Columns, count, many
from kilburn.cli.shell import Why, Yes
from kilburn.collections.collection import Collection
from kilburn.errors import SpecError, UnknownAddress
from kilburn.kernel.store import Store
from kilburn.memory.account import describe, progress, provenance, versions
from kilburn.memory.quota import Quota
from kilburn.memory.retention import sweep
from kilburn.memory.secrets import is_installed
from kilburn.move import Retire
from kilburn.page import Place
from kilburn.terminal import line, say, tell

Change = Callable[[Collection], object]


memories = command_group("memories")

User = Annotated[str, Option("--user", metavar="NAME", help="Use the memory of this user; by default that of all users.")]
OnlyUser = Annotated[str | None, Option("--user", metavar="NAME", help="Show only this user's memory.")]
Evict = Annotated[bool, Option("--evict", help="Retire the least valuable facts when the quota is reached, with --quota.")]
Fact = Annotated[str, Argument(metavar="ADDRESS", help="p17, a range p17-p42, or f3, as in `memories list`.", show_default=False)]
RefuseSecrets = Annotated[
    str | None,
    Option(
        "--secrets",
        metavar="WORD",
        help="Handle secrets in the text: refuse, redact or off; by default refuse if the extra `secrets` is installed.",
    ),
]
RedactSecrets = Annotated[
    str | None,
    Option(
        "--secrets",
        metavar="WORD",
        help="Handle secrets in the text: refuse, redact or off; by default redact if the extra `secrets` is installed.",
    ),
]


def secrets_mode(word: str | None, default: Literal["refuse", "redact"] = "refuse") -> Literal["refuse", "redact"] | None:
    """Return the mode that `--secrets` names; without it, `default` if the scanner is installed.

    Raises:
        SpecError: unknown mode.
    """
    if word is None:
        return default if is_installed() else None
    if word not in ("refuse", "redact", "off"):
        raise SpecError(f"--secrets {word[:40]!r}", advice="use refuse, redact or off")
    return "refuse" if word == "refuse" else "redact" if word == "redact" else None


@app.command()
def remember(
    where: StorePlace,
    text: str,
    user: User = "",
    since: str | None = None,
    until: str | None = None,
    importance: Annotated[float, Option(min=0.0, max=1.0)] = 0.0,
    pin: bool = False,
    quota_facts: Annotated[int | None, Option(min=0)] = None,
    evict: Evict = False,
    secrets: RefuseSecrets = None,
) -> None:
    """Remember a fact, for one user or for all. Searches find it at once.

    Example:

        kilburn remember "Ana prefers tea" --user ana

    Args:
        text TEXT: The fact, as a sentence.
        since WHEN: The fact is true from this time on: 2026-05-17, or 30d for 30 days ago.
        until WHEN: The fact is true until this time: 2026-05-17, or 30d from now.
        importance: Rank the fact higher in searches, 0 to 1.
        pin: Protect the fact from quotas and sweeps.
        quota_facts --quota FACTS: Refuse the fact if the memory has this many.
    """
    time_now = time.time()
    times = {"since": moment(since, "--since", time_now), "until": moment(until, "--until", time_now, 1)}
    screening = secrets_mode(secrets)
    quota = Quota(facts=quota_facts, evict=evict) if quota_facts is not None else None
    with where.writing(new=True) as store:
        memory = store.memory(user)
        address = memory.remember(text, **times, importance=importance, pin=pin, secrets=screening, quota=quota)
        facts = memory.collection
        page, state = facts.read(facts.contents.resolve(address)[0])
        row = describe(facts, page, state)
        embed(store)
    until_text = f"  (until {when(page.until)})" if page.until is not None else ""
    where.show(row, line(f"{address}{f' of {user}' if user else ''}  {row['text']}{until_text}"))


@memories.command("list")
def list_memories(
    where: StorePlace,
    user: OnlyUser = None,
    at: str | None = None,
    proposed: bool = False,
    history: bool = False,
    limit: Annotated[int, Option(min=1)] = 1000,
) -> None:
    """List the facts of all users or of one, now or at an earlier time.

    Examples:

        kilburn memories list --user ana

        kilburn memories list --at 2026-05-17

    Args:
        at WHEN: List facts that were true at this time: 2026-05-17, or 30d ago.
        proposed: List only proposed facts, which wait to be accepted.
        history: Include facts that are no longer true, or not yet.
        limit: List at most this many facts.
    """
    moment_at = moment(at, "--at", time.time())
    rows: list[dict[str, Any]] = []
    with where.reading() as store:
        if user is not None and not any(_memories(store, user)):
            raise _unknown(store, user)
        for memory in _memories(store, user):
            for page, state in memory.pages(moment_at, proposed=proposed or history, history=history):
                if len(rows) >= limit:
                    break
                if not proposed or state.at is Place.PROPOSED:
                    rows.append(describe(memory, page, state, moment_at))
    columns: Columns = {
        "user": "user",
        "address": "address",
        "what": "text",
        "from": lambda row: when(row["since"]),
        "until": lambda row: when(row["until"]),
        "trust": "trust",
        "is": marks,
    }
    where.show_records(rows, columns, "fact")
    if len(rows) >= limit and not where.json:
        say("there may be more: --limit")


def _memories(store: Store, user: str | None) -> Iterator[Collection]:
    for memory in store.collections():
        if memory.info.kind is SegmentKind.MEMORY and user in (None, memory.info.user):
            yield memory


def _unknown(store: Store, user: str) -> SpecError:
    return no_collection(store, SegmentKind.MEMORY, user, "is no memory", "kilburn remember")


def _memory(store: Store, user: str, address: str) -> Collection:
    """Return a user's memory that contains an address.

    Raises:
        SpecError: there is no such memory. UnknownAddress, Forgotten.
    """
    candidates = [memory for memory in _memories(store, None) if memory.info.user == user]
    if not candidates:
        raise _unknown(store, user)
    try:
        candidates[0].contents.resolve(address)
    except UnknownAddress as error:
        other_users = ", ".join(repr(owner) for owner in collection_owners(store, SegmentKind.MEMORY) if owner)
        if not user and other_users:
            raise UnknownAddress(error.what, advice=f"{error.advice}; for another memory give --user: {other_users}") from None
        raise
    return candidates[0]


def marks(row: dict[str, Any], title: str = "") -> str:
    """Describe the state of a fact, without what a title before it says."""
    words = []
    if row["at"] != Place.OUT:
        words.append(row["at"])
    elif not row["in_force"]:
        words.append("not true then" if row["until"] is None else "over")
    if row["pinned"]:
        words.append("pinned")
    if row["importance"]:
        words.append(f"importance {row['importance']:g}")
    return ", ".join(word for word in words if word != title)


@memories.command("show")
def show_memory(where: StorePlace, address: Fact, user: User = "") -> None:
    """Show facts with their provenance: the messages that support them, and the pages derived from them.

    Example:

        kilburn memories show f3 --user ana
    """
    with where.reading() as store:
        memory = _memory(store, user, address)
        rows = [provenance(store, memory, number) for number in memory.contents.resolve(address)]
    where.show(rows, "\n\n".join(map(_card, rows)))


def _card(row: dict[str, Any]) -> str:
    lines = [
        f"{row['address']}  {row['kind']}, {count(row['tokens'])} tokens, trust {row['trust']}",
        f"  written   {when(row['written'])}",
        f"  true      from {when(row['since'])}" + (f" until {when(row['until'])}" if row["until"] is not None else ""),
        f"  is        {', '.join(filter(None, ('in force' if row['in_force'] else '', marks(row))))}",
    ]
    if row["claim"]:
        lines.append(f"  says      {line(' | '.join(row['claim']))}")
    for cite in row["cites"]:
        citation = f"{cite['role']}, {when(cite['time'])}, trust {cite['trust']}: {cite['label']}"
        lines.append(f"  from      {line(cite['session'])} {cite['address']}  {line(citation)}")
        if not cite["session"].startswith("@"):
            lines.append(f"            kilburn recall {line(shlex.quote(cite['session']))} {cite['address']}")
    if row["sources"]:
        lines.append(f"  made from {' '.join(row['sources'])}")
    if not row["cites"] and not row["sources"]:
        lines.append("  from      a person")
    if row["made_from_it"]:
        lines.append(f"  used in   {line(' '.join(row['made_from_it']))}")
    return "\n".join([*lines, "", row["text"]])


@memories.command("state")
def show_state(where: StorePlace, user: OnlyUser = None) -> None:
    """Show how far each policy has learned, and the exchanges that wait for a retry. Each row is a session and a policy.

    Example:

        kilburn memories state --user ana
    """
    with where.reading() as store:
        if user is not None and not any(_memories(store, user)):
            raise _unknown(store, user)
        rows = [row for memory in _memories(store, user) for row in progress(store, memory)]
    columns: Columns = {
        "user": "user",
        "session": "session",
        "policy": "policy",
        "learned up to": lambda row: row["upto"] or "",
        "waits": lambda row: " ".join(row["waiting"]),
        "last try": lambda row: when(row["time"]),
        "ended": "outcome",
        "why": "why",
    }
    where.show_records(rows, columns)
    if not where.json:
        tell(many(sum(len(row["waiting"]) for row in rows), "exchange") + " to be tried again")


@memories.command("history")
def show_history(where: StorePlace, address: Fact, user: User = "") -> None:
    """Show the history of a fact: the facts that it superseded, those that superseded it, and all events of them.

    Example:

        kilburn memories history f3 --user ana
    """
    with where.reading() as store:
        memory = _memory(store, user, address)
        rows = versions(memory, address)
    lines = []
    for row in rows:
        lines.append(_fact_line(row))
        for event in row["events"]:
            by = "a person" if event["policy"] == "user" else event["policy"]
            why = f": {event['why']}" if event["why"] else ""
            lines.append(line(f"    {when(event['time'])}  {event['act']} by {by}{why}"))
    where.show(rows, lines)


def _fact_line(row: dict[str, Any], title: str = "") -> str:
    state = marks(row, title)
    return line(f"{row['address']}  {row['text']}" + (f"  ({state})" if state else ""))


def _change(address: str, user: str, change: Change, title: str, where: StorePlace) -> None:
    """Change the facts at an address, and print them."""
    with where.writing() as store:
        memory = _memory(store, user, address)
        numbers = memory.contents.resolve(address)
        change(memory)
        rows = [describe(memory, *memory.read(number)) for number in numbers]
    where.show(rows, (f"{title}: {_fact_line(row, title)}" for row in rows))


@memories.command("update")
def update(
    where: StorePlace, address: Fact, text: str, user: User = "", since: str | None = None, secrets: RefuseSecrets = None
) -> None:
    """Replace a fact by a new one. The old fact is retired, and stays readable as history.

    Example:

        kilburn memories update p1 "Ana's flight is on 14 May" --user ana

    Args:
        text TEXT: The new fact, as a sentence.
        since WHEN: The new fact is true from this time on; by default from now.
    """
    start, screening = moment(since, "--since", time.time()), secrets_mode(secrets)
    with where.writing() as store:
        memory = store.memory(_memory(store, user, address).info.user)
        new_address = memory.update(address, text, since=start, secrets=screening)
        facts = memory.collection
        row = describe(facts, *facts.read(facts.contents.resolve(new_address)[0]))
        embed(store)
    where.show(row, (line(f"{row['address']}  {row['text']}"), f"no longer true: {address}"))


@memories.command("undo")
def undo(where: StorePlace, address: Fact, user: User = "", why: Why = "") -> None:
    """Undo the last change of facts: restore superseded facts, or retire those that superseded them.

    A second undo reverses the first one.

    Example:

        kilburn memories undo f3 --user ana
    """
    _change(address, user, lambda memory: memory.undo(address, why), "undone", where)


@memories.command("accept")
def accept(where: StorePlace, address: Fact, user: User = "", why: Why = "") -> None:
    """Put proposed facts in force. A fact is proposed if the model had read untrusted text before it wrote the fact.

    Example:

        kilburn memories accept f3 --user ana
    """
    _change(address, user, lambda memory: memory.accept(address, why), "accepted", where)


@memories.command("retire")
def retire(where: StorePlace, address: Fact, user: User = "", why: Why = "") -> None:
    """Retire facts that are no longer true, or reject proposed facts. They stay readable as history.

    Example:

        kilburn memories retire f3 --user ana
    """

    def change(memory: Collection) -> None:
        memory.apply(Retire(pages=tuple(memory.contents.resolve(address)), why=why))

    _change(address, user, change, "retired", where)


@memories.command("pin")
def pin(where: StorePlace, address: Fact, user: User = "") -> None:
    """Pin facts, so that no policy, quota or sweep removes them.

    Example:

        kilburn memories pin p1 --user ana
    """
    _change(address, user, lambda memory: memory.pin(address), "pinned", where)


@memories.command("unpin")
def unpin(where: StorePlace, address: Fact, user: User = "") -> None:
    """Unpin facts, so that they can be retired again.

    Example:

        kilburn memories unpin p1 --user ana
    """
    _change(address, user, lambda memory: memory.unpin(address), "unpinned", where)


@memories.command("forget")
def forget_memory(where: StorePlace, address: Fact, user: User = "", yes: Yes = False, why: Why = "") -> None:
    """Forget facts for ever, with everything derived from them. Prints a receipt. Their sources stay.

    Example:

        kilburn memories forget f3 --user ana --yes
    """
    with where.writing() as store:
        memory = _memory(store, user, address)
        carry_out(partial(store.forget, session=memory.name, address=address, why=why), store, where, yes=yes)


@memories.command("sweep")
def sweep_memories(
    where: StorePlace, user: str | None = None, retention: str = "30d", history: str | None = None, yes: Yes = False
) -> None:
    """Forget facts that ended longer ago than their retention. Prints a receipt.

    Pinned facts and their sources stay.

    Example:

        kilburn memories sweep --retention 30d --yes

    Args:
        user NAME: Sweep only this user's memory.
        retention TIME: Keep a fact this long after its end: 30d, 12h, 0d.
        history TIME: Keep a superseded fact this long; by default for ever.
    """
    max_age = seconds(retention, "--retention")
    history_age = None if history is None else seconds(history, "--history")
    with where.writing() as store:
        carry_out(lambda dry: sweep(store, user, retention=max_age, history=history_age, dry=dry).receipt, store, where, yes=yes)

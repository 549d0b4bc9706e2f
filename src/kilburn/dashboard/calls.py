"""Branches, with what they may spend and what came back; and a recursive model, with its steps and what its code asked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.backend import SegmentInfo
from kilburn.dashboard.reading import LedgerReader, Listed
from kilburn.errors import Forgotten, UnknownAddress
from kilburn.event import Act, Event
from kilburn.kernel.branches import Fork, branches_in
from kilburn.kernel.session import Session
from kilburn.kernel.session_branches import is_return
from kilburn.message import Kind, Role
from kilburn.page import Page, Place, address_of, parse_address

NOTES = 4_000
"""Notes that are read of one session, at most: the newest ones."""

OWN = 8
"""First pages of a branch by which its return is looked for: some of them may be forgotten."""

BRANCHES = 2_000
"""Branches that are looked through, at most."""


class BranchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A branch in the tree: what it began with, what it may spend, what it spent, and how it ended."""

    row: Listed
    depth: int
    inherit: str
    limits: Mapping[str, float]
    spent: Mapping[str, float]
    returned: str
    ended: str
    calls: bool
    asked: bool


def tree_of(reading: LedgerReader, session: Session, most: int) -> tuple[list[BranchRow], int]:
    """The first branches below a session, each before those below it; and how many there are."""
    found = branches_in(reading.backend, session.info, {})
    first = session.name.count("/")
    holds = {(session.number, name) for name in _calling(_notes(reading, session.info))}
    rows = []
    for info, fork in found[:most]:
        notes = _notes(reading, info)
        holds |= {(info.number, name) for name in _calling(notes)}
        rows.append(
            BranchRow(
                row=reading.row(info),
                depth=info.name.count("/") - first,
                inherit=str(fork.inherit),
                limits=_limits(notes),
                spent=_spent(notes),
                returned=_returned(reading, info, fork),
                ended=next((word for event in reversed(notes) if (word := _ended(event))), ""),
                calls=(fork.forked, info.name.rpartition("/")[2]) in holds,
                asked=any("asked" in event.data for event in notes),
            )
        )
    return rows, len(found)


def _notes(reading: LedgerReader, info: SegmentInfo) -> list[Event]:
    """The newest notes of a session, oldest first."""
    return reading.of_act(info.number, Act.NOTE, info.head, NOTES)[0][::-1]


def _calling(notes: Iterable[Event]) -> set[str]:
    """The names of the branches that hold sub-calls."""
    return {str(event.data["branch"]) for event in notes if "branch" in event.data and event.data.get("calls")}


def _ended(event: Event) -> str:
    """How a branch, or a run of a recursive model, ended by a note; "" if it is none of that."""
    if "answered" in event.data:
        return str(event.data["answered"])
    return str(event.data["branch"]) if "branch" in event.data and "calls" not in event.data else ""


def _limits(notes: Sequence[Event]) -> dict[str, float]:
    """What the newest of some notes says that may be spent."""
    said: Any = next((event.data["limits"] for event in reversed(notes) if "limits" in event.data), {})
    names = ("steps", "calls", "tokens", "seconds", "money")
    return {name: said[name] for name in names if isinstance(said, Mapping) and _is_number(said.get(name))}


def _spent(notes: Iterable[Event]) -> dict[str, float]:
    """What a recursive run wrote down that it spent."""
    total = dict.fromkeys(("calls", "tokens", "money"), 0.0)
    for event in notes:
        if "spent" in event.data:
            for name, key in (("calls", "spent"), ("tokens", "tokens"), ("money", "money")):
                value: Any = event.data.get(key, 0)
                total[name] += value if _is_number(value) else 0
    return total if any(total.values()) else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: object) -> int:
    """A whole number of a ledger; 0 where it is none, because nothing checks what its writer put there."""
    return value if isinstance(value, int) else 0


def _returned(reading: LedgerReader, info: SegmentInfo, fork: Fork) -> str:
    """The address in the parent of what a branch returned; "" before."""
    own = range(fork.known + 1, fork.known + 1 + OWN)
    above = [key for key in reading.backend.citing(info.number, own) if key[0] == fork.forked]
    rows = reading.backend.read(above)
    return next((address_of(key[1]) for key in above if key in rows and is_return(rows[key][0], fork)), "")


# A recursive model


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """A reply of the root: the page of its code, and that of what it printed; how many calls its code made, and how many a limit
    refused."""

    code: Page
    output: Page | None
    calls: int
    refused: int


class MadeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A sub-call: the branch that it stands in, its prompt, its reply, or why there is none. Each text comes with the number of
    characters that are left out; -1 where it was forgotten."""

    branch: str
    prompt: Page
    asked: tuple[str, int]
    reply: Page | None
    said: tuple[str, int]
    why: str


def run_of(reading: LedgerReader, session: Session, begin: int, most: int) -> dict[str, Any] | None:
    """The newest question of a recursive model in a session, and its steps from a page on; None where nothing was asked."""
    notes = _notes(reading, session.info)
    at = next((at for at in reversed(range(len(notes))) if "asked" in notes[at].data), None)
    if at is None:
        return None
    notes, asked = notes[at:], notes[at].data
    first = _whole(asked["asked"])
    functions: Any = asked.get("functions", ())
    branches = {
        str(event.data["branch"]): bool(event.data["calls"]) for event in notes if {"branch", "calls"} <= event.data.keys()
    }
    below = [info for info, _ in branches_in(reading.backend, session.info, {}, below=False)][:BRANCHES]
    holding = {info.number: info for info in below if branches.get(info.name.rpartition("/")[2])}
    runs = [info.name for info in below if branches.get(info.name.rpartition("/")[2]) is False]
    spent = _spent([*notes, *(event for info in holding.values() for event in _notes(reading, info))])
    ended: Mapping[str, Any] = next((event.data for event in reversed(notes) if "answered" in event.data), {})
    refused: dict[int, int] = {}
    for event in notes:
        if "refused" in event.data and event.pages:
            refused[event.pages[0]] = refused.get(event.pages[0], 0) + _whole(event.data["refused"])
    answer = _page(session, _whole(ended.get("page", 0))) if ended else None
    last = answer.id - 1 if answer is not None and ended.get("answered") != "said" else session.window.last
    steps, later = _steps(reading, session, range(max(first + 1, begin), last + 1), most, set(holding), refused)
    return {
        "question": _page(session, first),
        "answer": answer,
        "ended": str(ended.get("answered", "")),
        "limit": str(ended.get("limit", "")),
        "limits": _limits(notes[:1]),
        "spent": spent | {"steps": _whole(ended.get("steps", 0))} if ended else spent,
        "functions": [str(name) for name in functions] if isinstance(functions, list | tuple) else [],
        "steps": steps,
        "later": later,
        "first": first,
        "runs": runs,
        "refused": sum(refused.values()),
    }


def _page(session: Session, number: int) -> Page | None:
    return session.window.pages[number] if number and number in session.window.states else None


def _steps(
    reading: LedgerReader, session: Session, pages: range, most: int, holding: set[int], refused: Mapping[int, int]
) -> tuple[list[RunStep], int]:
    """So many steps among some pages; and the page with which the next ones begin, or 0."""
    window, found = session.window, list[RunStep]()
    numbers = pages[: 4 * most]
    window.pages.fetch([one for one in numbers if one in window.states])
    for number in numbers:
        page = _page(session, number)
        if page is None or page.role is not Role.ASSISTANT:
            continue
        if len(found) == most:
            return found, number
        after = _page(session, number + 1)
        output = after if after is not None and after.role is not Role.ASSISTANT else None
        calls = [key for key in reading.backend.citing(session.number, [number]) if key[0] in holding]
        found.append(RunStep(code=page, output=output, calls=len(calls), refused=refused.get(number, 0)))
    return found, pages[len(numbers)] if len(numbers) < len(pages) else 0


def calls_in(reading: LedgerReader, session: Session, cell: str, begin: int, most: int, letters: int) -> dict[str, Any]:
    """The calls that the code of a page made, so many from one on, with the beginnings of their texts.

    Raises:
        UnknownAddress: there is no such page.
    """
    first, _ = parse_address(cell)
    code = _page(session, first)
    if code is None:
        raise UnknownAddress(f"there is no page {cell[:80]!r} in {session.name!r}", advice="see the steps of the run")
    notes = _notes(reading, session.info)
    names, holds = {}, _calling(notes)
    for info, _ in branches_in(reading.backend, session.info, {}, below=False)[:BRANCHES]:
        if info.name.rpartition("/")[2] in holds:
            names[info.number] = info
    keys = [key for key in reading.backend.citing(session.number, [first]) if key[0] in names]
    after = session.window.pages[first + 1] if first + 1 in session.window.states else None
    return {
        "code": code,
        "text": code_in(session, code, letters * 4),
        "output": after,
        "printed": _text(session, after, letters * 4) if after is not None and after.role is not Role.ASSISTANT else None,
        "calls": list(_calls(reading, names, keys[begin : begin + most], letters)),
        "found": len(keys),
    }


def _calls(
    reading: LedgerReader, names: Mapping[int, SegmentInfo], keys: Sequence[tuple[int, int]], letters: int
) -> Iterator[MadeCall]:
    why: dict[int, dict[int, str]] = {}
    for number, page in keys:
        info = names[number]
        if number not in why:
            why[number] = {event.pages[0]: event.why for event in _notes(reading, info) if event.pages}
        branch = reading.session(info.name)
        prompt, after = _page(branch, page), _page(branch, page + 1)
        if prompt is None:
            continue
        reply = after if after is not None and page in after.sources and not after.cites else None
        yield MadeCall(
            branch=info.name,
            prompt=prompt,
            asked=_text(branch, prompt, letters),
            reply=reply,
            said=_text(branch, reply, letters) if reply is not None else ("", 0),
            why="" if reply is not None else why[number].get(page, "it failed"),
        )


class _Code(msgspec.Struct):
    code: str


_decoder = msgspec.json.Decoder(_Code)


def code_in(session: Session, page: Page, most: int) -> tuple[str, int]:
    """The beginning of the code of a cell, and how many characters there are more; of another page its text."""
    text, more = _text(session, page, most)
    if page.kind is Kind.CALL and not more:
        try:
            return _decoder.decode(text).code, 0
        except (msgspec.ValidationError, msgspec.DecodeError):
            pass
    return text, more


def _text(session: Session, page: Page, most: int) -> tuple[str, int]:
    if session.window.at(page.id) is Place.DROPPED:
        return "", -1
    try:
        text = session.contents.text(page.id)
    except Forgotten:
        return "", -1
    return text[:most], max(0, len(text) - most)

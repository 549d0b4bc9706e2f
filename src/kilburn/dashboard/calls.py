"""Branches with their limits, spending and results; and the steps and sub-calls of a recursive model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.backend import SegmentInfo
from kilburn.dashboard.reading import LedgerReader, Listed, read_text
from kilburn.errors import UnknownAddress
from kilburn.event import Act, Event
from kilburn.kernel.branches import Fork, branches_in
from kilburn.kernel.session import Session
from kilburn.kernel.session_branches import is_return
from kilburn.message import Kind, Role
from kilburn.page import Page, address_of, parse_address

MAX_NOTES = 4_000
"""Newest notes that are read of one session."""

RETURN_PAGES = 8
"""First pages of a branch by which its return is found, as some of them may be forgotten."""

MAX_BRANCHES = 2_000
"""Branches that are searched."""


class BranchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A branch in the tree: its inherited pages, limits, spending, and outcome."""

    row: Listed
    depth: int
    inherit: str
    limits: Mapping[str, float]
    spent: Mapping[str, float]
    returned: str
    ended: str
    calls: bool
    question: bool


def branch_tree(reading: LedgerReader, session: Session, limit: int) -> tuple[list[BranchRow], int]:
    """Return the first `limit` branches below a session, depth first, and the number of all."""
    branches = branches_in(reading.backend, session.info, {})
    depth = session.name.count("/")
    holds = {(session.number, name) for name in _calling(_notes(reading, session.info))}
    rows = []
    for info, fork in branches[:limit]:
        notes = _notes(reading, info)
        holds |= {(info.number, name) for name in _calling(notes)}
        rows.append(
            BranchRow(
                row=reading.row(info),
                depth=info.name.count("/") - depth,
                inherit=str(fork.inherit),
                limits=_limits(notes),
                spent=_spent(notes),
                returned=_returned(reading, info, fork),
                ended=next((word for event in reversed(notes) if (word := _ended(event))), ""),
                calls=(fork.forked, info.name.rpartition("/")[2]) in holds,
                question=any("asked" in event.data for event in notes),
            )
        )
    return rows, len(branches)


def _notes(reading: LedgerReader, info: SegmentInfo) -> list[Event]:
    """Return the newest notes of a session, oldest first."""
    return reading.of_act(info.number, Act.NOTE, info.head, MAX_NOTES)[0][::-1]


def _calling(notes: Iterable[Event]) -> set[str]:
    """Return the names of the branches that hold sub-calls."""
    return {str(event.data["branch"]) for event in notes if "branch" in event.data and event.data.get("calls")}


def _ended(event: Event) -> str:
    """Return the outcome of a branch or run that a note records; "" if it records none."""
    if "answered" in event.data:
        return str(event.data["answered"])
    return str(event.data["branch"]) if "branch" in event.data and "calls" not in event.data else ""


def _limits(notes: Sequence[Event]) -> dict[str, float]:
    """Return the limits in the newest of some notes."""
    limits: Any = next((event.data["limits"] for event in reversed(notes) if "limits" in event.data), {})
    names = ("steps", "calls", "tokens", "seconds", "money")
    return {name: limits[name] for name in names if isinstance(limits, Mapping) and _is_number(limits.get(name))}


def _spent(notes: Iterable[Event]) -> dict[str, float]:
    """Add up what a recursive run spent, by its notes."""
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
    """Return a value of an event if it is an integer, else 0. The data of an event is not validated when it is written."""
    return value if isinstance(value, int) else 0


def _returned(reading: LedgerReader, info: SegmentInfo, fork: Fork) -> str:
    """Return the address of a branch's result in its parent; "" if there is none yet."""
    first_pages = range(fork.known + 1, fork.known + 1 + RETURN_PAGES)
    above = [key for key in reading.backend.citing(info.number, first_pages) if key[0] == fork.forked]
    rows = reading.backend.read(above)
    return next((address_of(key[1]) for key in above if key in rows and is_return(rows[key][0], fork)), "")


class RunStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step of the root model: the page of its code, the page of its output, the number of sub-calls, and of those that a limit
    refused."""

    code: Page
    output: Page | None
    calls: int
    refused: int


class MadeCall(msgspec.Struct, frozen=True, kw_only=True):
    """A sub-call: its branch, prompt, and reply, or the reason why there is none. Each text comes with the number of characters
    left out, which is -1 if the text was forgotten."""

    branch: str
    prompt: Page
    question: tuple[str, int]
    reply: Page | None
    answer: tuple[str, int]
    why: str


def read_run(reading: LedgerReader, session: Session, begin: int, limit: int) -> dict[str, Any] | None:
    """Return the newest question of a recursive model in a session, and up to `limit` steps from page `begin` on; None if there
    is no question."""
    notes = _notes(reading, session.info)
    at = next((at for at in reversed(range(len(notes))) if "asked" in notes[at].data), None)
    if at is None:
        return None
    notes, question = notes[at:], notes[at].data
    first = _whole(question["asked"])
    functions: Any = question.get("functions", ())
    branches = {
        str(event.data["branch"]): bool(event.data["calls"]) for event in notes if {"branch", "calls"} <= event.data.keys()
    }
    below = [info for info, _ in branches_in(reading.backend, session.info, {}, below=False)][:MAX_BRANCHES]
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
    steps, later = _steps(reading, session, range(max(first + 1, begin), last + 1), limit, set(holding), refused)
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
    reading: LedgerReader, session: Session, pages: range, limit: int, holding: set[int], refused: Mapping[int, int]
) -> tuple[list[RunStep], int]:
    """Return up to `limit` steps among some pages, and the page at which the next steps begin, or 0."""
    window, steps = session.window, list[RunStep]()
    numbers = pages[: 4 * limit]
    window.pages.fetch([number for number in numbers if number in window.states])
    for number in numbers:
        page = _page(session, number)
        if page is None or page.role is not Role.ASSISTANT:
            continue
        if len(steps) == limit:
            return steps, number
        next_page = _page(session, number + 1)
        output = next_page if next_page is not None and next_page.role is not Role.ASSISTANT else None
        calls = [key for key in reading.backend.citing(session.number, [number]) if key[0] in holding]
        steps.append(RunStep(code=page, output=output, calls=len(calls), refused=refused.get(number, 0)))
    return steps, pages[len(numbers)] if len(numbers) < len(pages) else 0


def read_calls(reading: LedgerReader, session: Session, cell: str, begin: int, limit: int, letters: int) -> dict[str, Any]:
    """Return up to `limit` calls that the code of a page made, from number `begin` on, with the beginnings of their texts.

    Raises:
        UnknownAddress: there is no such page.
    """
    first, _ = parse_address(cell)
    code = _page(session, first)
    if code is None:
        raise UnknownAddress(f"there is no page {cell[:80]!r} in {session.name!r}", advice="see the steps of the run")
    notes = _notes(reading, session.info)
    names, holds = {}, _calling(notes)
    for info, _ in branches_in(reading.backend, session.info, {}, below=False)[:MAX_BRANCHES]:
        if info.name.rpartition("/")[2] in holds:
            names[info.number] = info
    keys = [key for key in reading.backend.citing(session.number, [first]) if key[0] in names]
    output = session.window.pages[first + 1] if first + 1 in session.window.states else None
    return {
        "code": code,
        "text": read_code(session, code, letters * 4),
        "output": output,
        "printed": read_text(session, output, letters * 4) if output is not None and output.role is not Role.ASSISTANT else None,
        "calls": list(_calls(reading, names, keys[begin : begin + limit], letters)),
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
        prompt, reply = _page(branch, page), _page(branch, page + 1)
        if prompt is None:
            continue
        if reply is not None and (page not in reply.sources or reply.cites):
            reply = None
        yield MadeCall(
            branch=info.name,
            prompt=prompt,
            question=read_text(branch, prompt, letters),
            reply=reply,
            answer=read_text(branch, reply, letters) if reply is not None else ("", 0),
            why="" if reply is not None else why[number].get(page, "it failed"),
        )


class _Code(msgspec.Struct):
    code: str


_decoder = msgspec.json.Decoder(_Code)


def read_code(session: Session, page: Page, limit: int) -> tuple[str, int]:
    """Return the beginning of a cell's code, or of another page's text, and the number of characters left out."""
    text, more = read_text(session, page, limit)
    if page.kind is Kind.CALL and not more:
        try:
            return _decoder.decode(text).code, 0
        except (msgspec.ValidationError, msgspec.DecodeError):
            pass
    return text, more

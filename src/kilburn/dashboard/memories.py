"""Facts as bars of their validity, with where they are from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from kilburn.backend import SegmentKind
from kilburn.dashboard.reading import LedgerReader
from kilburn.errors import SpecError
from kilburn.memory.account import describe
from kilburn.page import Place, address_of, parse_address


class FactBar(msgspec.Struct, frozen=True, kw_only=True):
    """A fact: what `kilburn.memory.account.describe` says of it, and where its bar begins and ends, 0 to 1; `stands` says in a
    word whether it holds."""

    row: Mapping[str, Any]
    begin: float
    end: float
    stands: str
    cites: tuple[tuple[str, str], ...] = ()
    rivals: tuple[str, ...] = ()


def facts_of(reading: LedgerReader, query: Mapping[str, str], most: int) -> dict[str, Any]:
    """What the screen of the memory shows.

    Raises:
        SpecError: no such user.
    """
    collections = reading.store().collections()
    memories = [one for one in collections if one.info.kind is SegmentKind.MEMORY]
    user = query.get("user")
    chosen = [one for one in memories if user is None or one.info.user == user]
    if user is not None and not chosen:
        raise SpecError(f"there is no memory of {user[:80]!r}", advice="see the list of users")
    memory = chosen[0] if chosen else None
    after, at = _after(query.get("after", "")), _moment(query.get("at", ""))
    always = at is None
    found = list(memory.pages(at, history=always, proposed=always, after=after, limit=most + 1)) if memory is not None else []
    facts: list[FactBar] = []
    if memory is not None:
        rows = [(page, describe(memory, page, state, at)) for page, state in found[:most]]
        now = reading.clock()
        begins = [row["since"] for _, row in rows]
        first = min(begins, default=now)
        last = max([now, *(row["until"] for _, row in rows if row["until"] is not None)], default=now)
        wide = max(1.0, last - first)
        names = {info.number: info.name for info in reading.backend.segments()}
        for page, row in rows:
            until = row["until"] if row["until"] is not None else last
            facts.append(
                FactBar(
                    row=row,
                    begin=(row["since"] - first) / wide,
                    end=max(0.0, min(1.0, (until - first) / wide)),
                    stands=_stands(row),
                    cites=tuple((names.get(segment, "?"), address_of(source)) for segment, source in page.cites[:5]),
                    rivals=tuple(_rivals(page.id, row, rows)),
                )
            )
    return {
        "memories": memories,
        "memory": memory,
        "at": query.get("at", "") if at is not None else "",
        "facts": facts,
        "waiting": [fact for fact in facts if fact.row["at"] == Place.PROPOSED],
        "next": address_of(found[most - 1][0].id) if len(found) > most else "",
        "documents": [one for one in collections if one.info.kind is SegmentKind.DOCUMENT],
        "notes": [one for one in collections if one.info.kind is SegmentKind.NOTES],
    }


def _after(address: str) -> int:
    return parse_address(address)[0] if address else 0


def _moment(day: str) -> float | None:
    """The beginning of a day, in UTC; None where no day is given.

    Raises:
        SpecError: it is none.
    """
    if not day:
        return None
    try:
        return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise SpecError(f"{day[:40]!r} is no day", advice="give one such as 2026-05-17") from None


def collection_of(reading: LedgerReader, query: Mapping[str, str], most: int) -> dict[str, Any]:
    """What the screen of a document or of notes shows: its pages with their texts, those that ended too.

    Raises:
        SpecError: there is none of this name.
    """
    name = query.get("of", "")
    found = next((one for one in reading.store().collections() if one.name == name), None)
    if found is None or found.info.kind is SegmentKind.MEMORY:
        raise SpecError(f"there is no document and no notes {name[:80]!r}", advice="see the list below the memory")
    pages = list(found.pages(history=True, proposed=True, after=_after(query.get("after", "")), limit=most + 1))
    return {
        "collection": found,
        "rows": [(page, describe(found, page, state)) for page, state in pages[:most]],
        "next": address_of(pages[most - 1][0].id) if len(pages) > most else "",
    }


def _stands(row: Mapping[str, Any]) -> str:
    if row["at"] == Place.PROPOSED:
        return "proposed"
    return "holds" if row["in_force"] else "ended" if row["until"] is not None else "not in force"


def _rivals(number: int, row: Mapping[str, Any], rows: list[tuple[Any, dict[str, Any]]]) -> Iterator[str]:
    """Other facts on the screen that speak of the same thing and hold at the same time."""
    if not row["claim"] or not row["in_force"]:
        return
    subject, relation, said = row["claim"]
    for page, other in rows:
        if page.id == number or not other["in_force"] or not other["claim"] or (page.claim and page.claim.many):
            continue
        if other["claim"][:2] == [subject, relation] and other["claim"][2] != said:
            yield page.address

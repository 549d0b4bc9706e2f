"""Facts with their periods of validity and their sources."""

from __future__ import annotations

import time
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
    """A fact: its description by `kilburn.memory.account.describe`, the begin and end of its bar as shares of the time axis,
    and in `stands` a word for its state."""

    row: Mapping[str, Any]
    begin: float
    end: float
    stands: str
    cites: tuple[tuple[str, str], ...] = ()
    rivals: tuple[str, ...] = ()


def memory_screen(reading: LedgerReader, query: Mapping[str, str], limit: int) -> dict[str, Any]:
    """Return what the screen of the memory shows, up to `limit` facts.

    Raises:
        SpecError: there is no such user.
    """
    collections = reading.store().collections()
    memories = [collection for collection in collections if collection.info.kind is SegmentKind.MEMORY]
    user = query.get("user")
    chosen = [memory for memory in memories if user is None or memory.info.user == user]
    if user is not None and not chosen:
        raise SpecError(f"there is no memory of {user[:80]!r}", advice="see the list of users")
    memory = chosen[0] if chosen else None
    first_page, at = _after(query.get("after", "")), _moment(query.get("at", ""))
    always = at is None
    pages = (
        list(memory.pages(at, history=always, proposed=always, after=first_page, limit=limit + 1)) if memory is not None else []
    )
    facts: list[FactBar] = []
    if memory is not None:
        rows = [(page, describe(memory, page, state, at)) for page, state in pages[:limit]]
        today = time.time()
        begins = [row["since"] for _, row in rows]
        first = min(begins, default=today)
        last = max([today, *(row["until"] for _, row in rows if row["until"] is not None)], default=today)
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
        "next": address_of(pages[limit - 1][0].id) if len(pages) > limit else "",
        "documents": [collection for collection in collections if collection.info.kind is SegmentKind.DOCUMENT],
        "notes": [collection for collection in collections if collection.info.kind is SegmentKind.NOTES],
    }


def _after(address: str) -> int:
    return parse_address(address)[0] if address else 0


def _moment(day: str) -> float | None:
    """Return the beginning of a day in UTC; None for "".

    Raises:
        SpecError: it is not a date.
    """
    if not day:
        return None
    try:
        return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise SpecError(f"{day[:40]!r} is no day", advice="give one such as 2026-05-17") from None


def collection_screen(reading: LedgerReader, query: Mapping[str, str], limit: int) -> dict[str, Any]:
    """Return what the screen of a document or of notes shows: its pages with their texts, expired pages included.

    Raises:
        SpecError: there is none of this name.
    """
    name = query.get("of", "")
    collection = next((candidate for candidate in reading.store().collections() if candidate.name == name), None)
    if collection is None or collection.info.kind is SegmentKind.MEMORY:
        raise SpecError(f"there is no document and no notes {name[:80]!r}", advice="see the list below the memory")
    pages = list(collection.pages(history=True, proposed=True, after=_after(query.get("after", "")), limit=limit + 1))
    return {
        "collection": collection,
        "rows": [(page, describe(collection, page, state)) for page, state in pages[:limit]],
        "next": address_of(pages[limit - 1][0].id) if len(pages) > limit else "",
    }


def _stands(row: Mapping[str, Any]) -> str:
    if row["at"] == Place.PROPOSED:
        return "proposed"
    return "holds" if row["in_force"] else "ended" if row["until"] is not None else "not in force"


def _rivals(number: int, row: Mapping[str, Any], rows: list[tuple[Any, dict[str, Any]]]) -> Iterator[str]:
    """Yield the addresses of other facts on the screen with the same subject and relation that hold at the same time."""
    if not row["claim"] or not row["in_force"]:
        return
    subject, relation, value = row["claim"]
    for page, candidate in rows:
        if page.id == number or not candidate["in_force"] or not candidate["claim"] or (page.claim and page.claim.many):
            continue
        if candidate["claim"][:2] == [subject, relation] and candidate["claim"][2] != value:
            yield page.address

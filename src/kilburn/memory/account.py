"""Facts as rows for JSON: text and state, sources, and history."""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any

from kilburn.backend import State
from kilburn.collections.collecting import is_true, since_of, until_of
from kilburn.collections.collection import Collection
from kilburn.event import Act
from kilburn.kernel.store import Store
from kilburn.message import Trust
from kilburn.page import Page, address_of, span_of


def describe(memory: Collection, page: Page, state: State, at: float | None = None) -> dict[str, Any]:
    """Return all about a page of a collection."""
    return {
        "user": memory.info.user,
        "address": page.address,
        "text": memory.contents.text(page.id),
        "kind": str(page.kind),
        "since": since_of(page),
        "until": until_of(page, state),
        "written": page.time,
        "at": str(state.at),
        "in_force": is_true(page, state, time.time() if at is None else at, now=at is None),
        "pinned": state.pinned,
        "importance": state.importance,
        "trust": Trust(page.trust).name.lower(),
        "claim": None if page.claim is None else [page.claim.subject, page.claim.relation, page.claim.object],
        "sources": [address_of(source) for source in page.sources],
        "tokens": page.tokens,
    }


def progress(store: Store, memory: Collection) -> list[dict[str, Any]]:
    """Return how far each policy has learned from each session into a memory, which messages wait for another attempt, and how
    and why the last attempt ended. Deleted sessions are left out."""
    names = {info.number: info.name for info in store.backend.segments()}
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for event in memory.backend.events(memory.number):
        if event.act is Act.NOTE and event.data.get("learned") in names:
            waiting = [span_of(first, last) for first, last in event.data.get("waiting", ())]
            rows[event.data["learned"], event.policy] = {
                "user": memory.info.user,
                "session": names[event.data["learned"]],
                "policy": event.policy,
                "upto": address_of(event.data.get("upto", 0)) if event.data.get("upto") else None,
                "waiting": waiting,
                "time": event.time,
                "outcome": str(event.data.get("outcome", "")),
                "why": str(event.data.get("detail", "")),
            }
    return list(rows.values())


def provenance(store: Store, memory: Collection, number: int, hidden: Container[str] = ()) -> dict[str, Any]:
    """Return all about a page of a collection, with its sources and what was made from it.

    Args:
        number: the id of the page.
        hidden: names of sessions of which only the existence is shown.
    """
    page, state = memory.read(number)
    row = describe(memory, page, state)
    names = {info.number: info.name for info in store.backend.segments() if info.name not in hidden}
    cited = store.backend.read(page.cites)
    row["cites"] = [
        {
            "session": names.get(segment, "?"),
            "address": source.address,
            "role": str(source.role),
            "trust": Trust(source.trust).name.lower(),
            "time": source.time,
            "label": source.label if segment in names else "",
        }
        for (segment, _), (source, _) in cited.items()
    ]
    row["made_from_it"] = [
        address_of(citer) if segment == memory.number else f"{names.get(segment, '?')} {address_of(citer)}"
        for segment, citer in store.backend.citing(memory.number, [number])
    ]
    return row


def versions(memory: Collection, address: str) -> list[dict[str, Any]]:
    """Return the facts that a fact superseded and that superseded it, oldest first, each with its events.

    Raises:
        UnknownAddress, Forgotten.
    """
    rows = []
    for version in memory.history(address):
        events = [
            {"act": str(event.act), "time": event.time, "policy": event.policy, "cause": event.cause, "why": event.why}
            for event in version.events
        ]
        rows.append(describe(memory, version.page, version.state) | {"events": events})
    return rows

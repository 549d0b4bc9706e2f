"""Whether a store has what clients were told, and nothing else: lost, doubled and wrong are counted apart.

The clients' records are the measure. Of the store only its public reading is used: its sessions, and their messages.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import kilburn
from kilburn.message import Kind, Role
from kilburn_lab.evals.load_client import SaidEntry, SessionRecord, What
from kilburn_lab.evals.load_report import LoadVerdict
from kilburn_lab.evals.load_traffic import mark_of

OURS = ("recall", "search_memory")
"""Calls of the gateway's own tools, which no client hears of."""

TOLD = 50
"""Findings that are told in words."""


class _Findings:
    """Counts, and some in words."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.told: list[str] = []

    def add(self, kind: str, session: str, what: str, *, count: int = 1) -> None:
        self.counts[kind] += count
        if len(self.told) < TOLD:
            self.told.append(f"{kind}: {session}: {what}")


def read(place: str, tenant: str = "default") -> dict[str, list[SaidEntry]]:
    """What the sessions of a store hold, by their names; what only the model and the gateway said to each other is left out."""
    found: dict[str, list[SaidEntry]] = {}
    with kilburn.open(place, readonly=True, embedder=None, tokenizer="chars/4", tenant=tenant) as store:
        for info in store.sessions():
            found[info.name] = [*_entries(store.session(info.name))]
            store.release(info.name)
    return found


def _entries(session: kilburn.Session) -> Iterator[SaidEntry]:
    hidden: set[str] = set()
    for message in session.contents.originals():
        for part in message.parts:
            if part.kind is Kind.CALL:
                if part.name in OURS:
                    hidden.add(part.call or "")
                    continue
                text = part.text
                with suppress(ValueError):
                    text = json.dumps(json.loads(text), sort_keys=True)
                yield SaidEntry(What.CALL, _exchange_of(What.CALL, text), text)
            elif part.call not in hidden:
                what = (
                    What.OUTPUT if part.kind is Kind.RESULT else What.REPLY if message.role is Role.ASSISTANT else What.QUESTION
                )
                yield SaidEntry(what, _exchange_of(what, part.text), part.text)


def _exchange_of(what: What, text: str) -> int:
    """The number of the exchange that an entry says it is of; 0 if it says none."""
    if what is What.CALL:
        try:
            return int(json.loads(text)["at"].partition(".")[2])
        except (ValueError, KeyError, TypeError, AttributeError):
            return 0
    found = mark_of(text)
    return found[2] if found else 0


def compare(stored: Mapping[str, Sequence[SaidEntry]], records: Iterable[SessionRecord]) -> LoadVerdict:
    """Compare what is stored with what clients know."""
    known = list(records)
    owners = {entry: record.number for record in known for entry in (*record.said, *record.unsure)}
    left = dict(stored)
    findings, unsure = _Findings(), 0
    for record in known:
        for words in record.wrong:
            findings.add("wrong", f"session {record.number}", words)
        name = record.name or next((name for name, said in left.items() if {*record.unsure} & {*said}), "")
        unsure += _judge(record, name, left.pop(name, ()), owners, findings)
    for name, said in left.items():
        findings.add("branches", name, f"a session beside that of {sorted({owners.get(entry, 0) for entry in said})}")
        for entry in said:
            kind = "doubled" if entry in owners else "wrong"
            findings.add(kind, name, f"{_words(entry)} in a session that no client was told of")
    return LoadVerdict(
        acknowledged=sum(len(record.said) for record in known),
        unsure=unsure,
        findings=tuple(findings.told),
        **{kind: findings.counts[kind] for kind in ("lost", "doubled", "wrong", "branches")},
    )


def _judge(
    record: SessionRecord, name: str, said: Sequence[SaidEntry], owners: Mapping[SaidEntry, int], findings: _Findings
) -> int:
    """Compare one session; returns how many entries are there that were never acknowledged."""
    expected = {entry: at for at, entry in enumerate((*record.said, *record.unsure))}
    session = f"session {record.number} ({name or 'no name'})"
    counts = Counter(said)
    changed: set[tuple[What, int]] = set()
    for entry in counts:
        if entry in expected:
            continue
        if (owner := owners.get(entry, record.number)) != record.number:
            findings.add("wrong", session, f"{_words(entry)} is of session {owner}", count=counts[entry])
            continue
        changed.add(entry[:2])
        findings.add("wrong", session, f"{_words(entry)} was never said so", count=counts[entry])
    for entry in record.said:
        if not counts[entry] and entry[:2] not in changed:
            findings.add("lost", session, _words(entry))
        elif counts[entry] > 1:
            findings.add("doubled", session, _words(entry), count=counts[entry] - 1)
    there = [expected[entry] for entry in dict.fromkeys(said) if entry in expected]
    if there != sorted(there):
        findings.add("wrong", session, f"its order is {there}")
    more = [entry for entry in record.unsure if counts[entry]]
    if more != list(record.unsure[: len(more)]):
        findings.add("wrong", session, f"{_words(more[0])} without what came before")
    for entry in more:
        if counts[entry] > 1:
            findings.add("doubled", session, _words(entry), count=counts[entry] - 1)
    return len(more)


def _words(entry: SaidEntry) -> str:
    return f"{entry.what} {entry.exchange} ({entry.text[:60]!r})"

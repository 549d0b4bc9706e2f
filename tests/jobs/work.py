"""A store with work of every kind to be done, and what must be there when all of it is done once."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import kilburn
from kilburn import Store
from kilburn.backends.places import open_backend
from kilburn.budget import Budget
from kilburn.jobs.claims import kept
from kilburn.jobs.ending import TimeToLive, keep_rule
from kilburn.move import Add

EMBEDDER = "hashing(64)"

DAY = 86_400.0

LINES = [f"This is line {turn} of talk {talk}." for talk in range(2) for turn in range(2)]
"""What users said in sessions that stay."""

OLD = ("old 0", "old 1")
"""Sessions whose time is over."""


def exchange(text: str) -> list[dict[str, str]]:
    """What a user says, and the answer."""
    return [{"role": "user", "content": text}, {"role": "assistant", "content": "Noted."}]


def fill(place: str) -> None:
    """Make the work."""
    with Store(open_backend(place), Budget(4000), "fifo", tokenizer="chars/4", clock=lambda: time.time() - 9 * DAY) as store:
        for name in OLD:
            session = store.session(name, user="ana")
            session.append(*exchange(f"The secret of {name} is heliotrope."))
            store.memory("ana").collection.apply(Add(text=f"A fact of {name}", cites=((session.number, 1),)))
        branch = store.session(OLD[0]).fork("aside")
        branch.append(*exchange("In a branch."))
        branch.branches.exit("done")
        keep_rule(store.backend, TimeToLive(forget=DAY))
    with kilburn.open(place, window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        for at, line in enumerate(LINES):
            store.session(f"talk {at // 2}", user="ana").append(*exchange(line))


def check_done(place: str, receipts: Path) -> None:
    """Check that everything was done, and once in effect."""
    with kilburn.open(place, window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        backend = store.backend
        assert sorted(info.name for info in store.sessions()) == ["talk 0", "talk 1"]
        lines = store.notes("ana").read("core/human").text.split("\n")
        assert sorted(lines) == sorted(LINES), "each line was learned once"
        assert not [page for page, _ in store.memory("ana").pages() if page.digest], "the facts went with the sessions"
        assert backend.vectors.unembedded(EMBEDDER, 10) == []
        passages = [passage for info in backend.segments() for passage in _passages(store, info.number)]
        vectors = Counter(vector.entry for vector in backend.vectors.read(EMBEDDER))
        assert vectors == Counter(passages), "each passage has one vector"
        assert kept(backend) == {}
    said = Counter(receipts.read_text().splitlines()) if receipts.exists() else Counter[str]()
    assert not [line for line in said if line.startswith("error")], said
    assert max(said.values(), default=0) <= 1, "no session has two receipts"


def _passages(store: Store, number: int) -> list[int]:
    keys = [(number, page.id) for page, _ in store.backend.pages(number) if page.digest]
    return [one.entry for some in store.backend.words.entries(keys).values() for one in some]

"""What a store knows of its segments after any writes, its own and others', is what the file says."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kilburn.backend import Batch, Scope, SegmentKind, State
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import quarantine_segment
from kilburn.errors import StoreError
from kilburn.event import Act, Event
from kilburn.page import Place
from kilburn.testing.stores import batch_of

FILTERS = [
    (tuple(SegmentKind), None),
    ((SegmentKind.SESSION,), None),
    ((SegmentKind.SESSION, SegmentKind.MEMORY), "ana"),
    ((SegmentKind.MEMORY,), ""),
]
WORDS = ("alpha", "beta", "gamma")


def commit(backend: Sqlite, name: str, word: str) -> None:
    info = backend.segment(name, time=0.0, create=False)
    if info is not None:
        backend.commit(info.number, batch_of(info.head, {info.pages + 1: f"{word} {name} " * (1 + info.pages)}))


def begin(backend: Sqlite, name: str) -> None:
    backend.begin(name, batch_of(0, {1: f"begun {name}"}), time=1.0, user="ana")


def fail(backend: Sqlite, name: str) -> None:
    """A commit that is undone after it wrote."""
    info = backend.segment(name, time=0.0, create=False)
    if info is not None:
        batch = batch_of(info.head, {info.pages + 1: "never"}, states={info.pages + 9: State(Place.IN)})
        with suppress(StoreError):
            backend.commit(info.number, batch)


def forget(backend: Sqlite, name: str) -> None:
    info = backend.segment(name, time=0.0, create=False)
    if info is not None:
        pages = [page.id for page, state in backend.pages(info.number) if state.at is not Place.DROPPED]
        events = [Event(number=info.head + 1, act=Act.DROP, time=2.0, pages=tuple(pages))]
        backend.commit(info.number, Batch(head=info.head, events=events, erase=pages))
        backend.erase(info.number)


def embed(backend: Sqlite, name: str) -> None:
    waiting = backend.vectors.unembedded(f"of {name}", 5)
    backend.vectors.add(f"of {name}", [(entry, b"\1\2\3\4") for entry, _ in waiting])


class Broken(Exception):
    pass


def together(backend: Sqlite, name: str) -> None:
    with backend.together():
        backend.segment(f"{name} of many", time=3.0)
        commit(backend, name, "beta")
        fail(backend, name)


def undone(backend: Sqlite, name: str) -> None:
    with suppress(Broken), backend.together():
        backend.segment(f"{name} undone", time=3.0)
        commit(backend, name, "gamma")
        seen(backend)
        raise Broken


def quarantine(backend: Sqlite, name: str) -> None:
    info = backend.segment(name, time=0.0, create=False)
    if info is not None:
        quarantine_segment(backend, info.number)


def do(backend: Sqlite, what: str, name: str, word: str) -> None:
    with suppress(StoreError):
        match what:
            case "open" | "memory":
                kind = SegmentKind.MEMORY if what == "memory" else SegmentKind.SESSION
                backend.segment(name, time=0.0, kind=kind, user="ben" if word == "beta" else "")
            case "commit":
                commit(backend, name, word)
            case _:
                globals()[what](backend, name)


def as_told(scope: Scope) -> Any:
    return list(scope.infos.items()), scope.damaged, scope.everything


def seen(backend: Sqlite) -> Any:
    """All that it says of its segments, and what it finds in them."""
    numbers = [info.number for info in backend.segments()]
    return (
        backend.segments(),
        [as_told(backend.scope(*one)) for one in FILTERS],
        [backend.words.search(word, limit=50) for word in WORDS],
        [backend.words.search(word, segments=some, limit=50) for word in WORDS for some in (numbers, numbers[::2])],
        [backend.vectors.unembedded(f"of {name}", 50) for name in NAMES],
    )


NAMES = ("a", "b", "c")
DOING = ["open", "memory", "commit", "commit", "begin", "fail", "forget", "embed", "together", "undone", "quarantine"]
STEPS = st.tuples(
    st.sampled_from(DOING),
    st.sampled_from(NAMES),
    st.sampled_from(WORDS),
    st.sampled_from(["one", "one", "one", "other"]),
)


@given(st.lists(STEPS, max_size=12))
def test_a_store_knows_what_the_file_says(steps: list[tuple[str, str, str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "a.db")
        with Sqlite(path, synchronous="OFF") as one, Sqlite(path, synchronous="OFF") as other:
            for name in NAMES[:2]:
                one.segment(name, time=0.0)
            for what, name, word, who in steps:
                do(one if who == "one" else other, what, name, word)
                with Sqlite(path, readonly=True) as fresh:
                    assert seen(one) == seen(fresh)


def test_a_scope_goes_on_while_segments_come(tmp_path: Path) -> None:
    """Whoever searches has a scope in hand; what is written meanwhile may come into it."""
    with Sqlite(str(tmp_path / "a.db")) as backend:
        for name in NAMES:
            backend.segment(name, time=0.0)
        scope = backend.scope(tuple(SegmentKind))
        before = dict(scope.infos)
        backend.segment("d", time=0.0)
        forget(backend, "a")
        backend.scope(tuple(SegmentKind))
        assert scope.infos.keys() >= before.keys()
        assert msgspec.structs.asdict(scope)["everything"]


def steps_of(backend: Sqlite, work: Any) -> int:
    """The steps of SQLite's machine."""
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    backend._db.set_progress_handler(count, 1)
    work()
    backend._db.set_progress_handler(None)
    return steps


def test_what_a_search_costs_after_a_write_does_not_grow_with_the_segments(tmp_path: Path) -> None:
    """Neither in all segments, nor in some of them; nor does the look for what waits for a vector."""
    costs = []
    for many in (300, 1_200):
        with Sqlite(str(tmp_path / f"{many}.db"), synchronous="OFF") as backend:
            with backend.together():
                for number in range(many):
                    commit_one = backend.segment(f"s{number}", time=0.0)
                    assert commit_one is not None
                    backend.commit(commit_one.number, batch_of(0, {1: "rare" if number % 100 == 0 else "common"}))
            backend.vectors.add("e", [(entry, b"\1\2\3\4") for entry, _ in backend.vectors.unembedded("e", many)])

            def look(backend: Sqlite = backend) -> None:
                some = list(backend.scope((SegmentKind.SESSION,), "").infos)
                backend.words.search("absent", segments=some[1:])
                backend.words.search("absent")
                backend.vectors.unembedded("e", 30)

            look()
            commit(backend, "s5", "alpha")
            costs.append(steps_of(backend, look))
    assert costs[1] <= 1.5 * costs[0]

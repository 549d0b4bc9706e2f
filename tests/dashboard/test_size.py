"""What a screen costs does not grow with the store: rows that are read, and what is in the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from dashboard.visit import ask
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.dashboard.app import build
from kilburn.dashboard.marks import MIN_EVENTS
from kilburn.dashboard.reading import EFFORT, MAX_MOVED, LedgerReader
from kilburn.dashboard.screens import MAX_ROWS
from kilburn.dashboard.strip import MAX_BLOCKS, MAX_ITEMS, strip
from kilburn.event import Act
from kilburn.move import Fold


class CountedBackend(Sqlite):
    """Counts what is read of it."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.read_rows = Counter[str]()
        super().__init__(*given, **named)

    def events(self, *given: Any, **named: Any) -> Iterator[Any]:
        for event in super().events(*given, **named):
            self.read_rows["events"] += 1
            yield event

    def read(self, keys: Iterable[tuple[int, int]]) -> Any:
        found = super().read(keys)
        self.read_rows["pages"] += len(found)
        return found

    def pages(self, segment: int) -> Iterator[Any]:
        for row in super().pages(segment):
            self.read_rows["pages"] += 1
            yield row

    def checkpoint(self, *given: Any, **named: Any) -> Any:
        self.read_rows["checkpoints"] += 1
        return super().checkpoint(*given, **named)


def talk(path: Path, messages: int, sessions: int = 1, each: int = 4) -> None:
    with Store(Sqlite(path, synchronous="OFF"), Budget(2000), "fifo", tokenizer="chars/4") as store:
        for number in range(sessions):
            session = store.session(f"s{number}")
            for n in range(0, messages, each):
                session.append(*({"role": "user", "content": f"Message {n + more}: " + "words " * 20} for more in range(each)))
                session.render()


def costs_of(path: Path, *asked: str) -> dict[str, tuple[Counter[str], int]]:
    """For each request, what was read, and the bytes of the answer. A first one has opened the session."""
    found = {}
    with CountedBackend(path, readonly=True) as backend:
        app = build(backend)
        ask(app, "/prices?name=s0")
        for each in asked:
            backend.read_rows.clear()
            reply = ask(app, each)
            assert reply.status == 200, reply.text
            found[each] = backend.read_rows.copy(), len(reply.body)
    return found


SESSION = [f"{path}?{urlencode({'name': 's0', 'address': 'p90'})}" for path in
           ("/session", "/window", "/receipts", "/page", "/faults", "/prices")]  # fmt: skip


@pytest.mark.slow
def test_a_long_session_is_not_read_whole(tmp_path: Path) -> None:
    talk(tmp_path / "agent.db", 8_000)
    for each, (read, size) in costs_of(tmp_path / "agent.db", *SESSION).items():
        assert read["pages"] <= 3_000, each
        assert read["events"] <= 4_500, each
        assert size <= 400_000, each


@pytest.mark.slow
def test_a_long_session_is_replayed_once_and_shown_anywhere(tmp_path: Path) -> None:
    talk(tmp_path / "agent.db", 4_600, each=1)
    with CountedBackend(tmp_path / "agent.db", readonly=True) as backend:
        reading = LedgerReader(backend)
        session = reading.session("s0")
        first = strip(reading, session, session.ledger.head // 2, 20)
        assert len(first.columns) == 20
        assert not first.split
        assert reading.replayed(session.number, 600)
        backend.read_rows.clear()
        again = strip(reading, session, session.ledger.head // 2, 20)
        assert again.split
        assert [column.tokens for column in again.columns] == [column.tokens for column in first.columns]
        assert all(sum(piece.tokens for piece in column.pieces) == column.tokens for column in again.columns)
        assert backend.read_rows["events"] <= 2 * MIN_EVENTS + 500


def test_a_window_of_thousands_of_pages_is_a_picture_of_a_few_blocks(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with Store(Sqlite(path, synchronous="OFF"), Budget(1_000_000), "fifo", tokenizer="chars/4") as store:
        session, roles = store.session("s0"), ("user", "assistant")
        for at in range(80):
            session.append(*({"role": roles[n % 2], "content": f"{at} {n}: short"} for n in range(40 if at else 1600)))
            session.render()
    with Sqlite(path, readonly=True) as backend:
        reading = LedgerReader(backend)
        picture = strip(reading, reading.session("s0"), 0, 60)
        assert len(picture.columns) == 60
        assert len(picture.columns[-1].pieces) > 4_000
        assert sum(len(column.pieces) for column in picture.columns) <= MAX_ITEMS + 60
        assert len(picture.blocks) <= MAX_BLOCKS
        # What is drawn is all of each prompt, page by page or not.
        assert all(sum(piece.tokens for piece in column.pieces) == column.tokens for column in picture.columns)
        for at, column in enumerate(picture.columns):
            there = [block for block in picture.blocks if block.left <= at < block.right]
            assert sum(block.high - block.low for block in there) == column.tokens
        assert {block.shade for block in picture.blocks if block.left == 0} == {"plain"}
        assert picture.columns[1].cached is None
        assert picture.columns[-1].cached == picture.columns[-2].tokens
        reply = ask(build(backend), "/session?name=s0")
        assert reply.status == 200
        assert len(reply.body) <= 400_000


def test_what_came_with_few_events_is_counted_by_its_pages(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    talk(path, 9_000, each=1_500)
    with CountedBackend(path, readonly=True) as backend:
        reading = LedgerReader(backend)
        session = reading.session("s0")
        until = next(event.number for event in session.ledger.events() if event.turn == 7_500 and event.act is Act.SHIP)
        backend.read_rows.clear()
        first = strip(reading, session, until, 20)
        assert not first.split
        assert backend.read_rows["pages"] == 0
        assert reading.replayed(session.number, 600)
        backend.read_rows.clear()
        again = strip(reading, session, until, 20)
        assert again.split
        assert len(again.columns) == len(first.columns) == 5
        assert sum(piece.tokens for piece in again.columns[-1].pieces) == again.columns[-1].tokens
        assert backend.read_rows["pages"] <= MAX_MOVED + 2 * 1_500


def test_the_list_reads_a_bounded_part_of_the_store_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    talk(path, 4, sessions=3 * MAX_ROWS)
    with CountedBackend(path, readonly=True) as backend:
        app = build(backend)
        first = ask(app, "/")
        assert backend.read_rows["pages"] == 0
        assert backend.read_rows["events"] <= EFFORT
        assert first.text.count('role="rowheader"') == MAX_ROWS
        assert f"1 to {MAX_ROWS} of {3 * MAX_ROWS}" in first.text
        backend.read_rows.clear()
        ask(app, "/")
        assert backend.read_rows["events"] == 0
        last = ask(app, next(link for link in first.links if f"from={MAX_ROWS}" in link))
        assert last.text.count('role="rowheader"') == MAX_ROWS
        assert not set(first.links) & {link for link in last.links if link.startswith("/session")}


def test_figures_are_counted_over_several_requests(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    talk(path, 4, sessions=4)
    with CountedBackend(path, readonly=True) as backend:
        reading = LedgerReader(backend, effort=40)
        rows, waiting = reading.rows(reading.sessions())
        assert waiting == 2
        assert [row.stats is None for row in rows] == [False, False, True, True]
        assert reading.rows(reading.sessions())[1] == 0


def test_figures_are_those_of_the_session_itself(made: Path) -> None:
    with Sqlite(made, readonly=True) as backend:
        reading = LedgerReader(backend)
        for info in reading.sessions():
            told, counted = reading.row(info).stats, reading.session(info.name).ledger.figures
            assert told is not None
            for figure in (
                "prompts",
                "tokens_shipped",
                "tokens_reprefilled",
                "evictions",
                "folds",
                "faults",
                "refaults",
                "hit_rate",
            ):
                assert told[figure] == counted[figure], (info.name, figure)
            assert told.tokens_in_window == (counted.tokens_in_window if counted.prompts else told.tokens_in_window)


def test_what_a_search_and_a_fold_name_does_not_count_as_moved(tmp_path: Path) -> None:
    with Store(Sqlite(tmp_path / "agent.db", synchronous="OFF"), Budget(200_000), "fifo", tokenizer="chars/4") as store:
        session = store.session("s0")
        session.append(*({"role": "user", "content": f"{n}: short"} for n in range(MAX_MOVED + 300)))
        for at in range(8):
            session.append({"role": "user", "content": f"{at}: words"})
            session.render()
            if at == 3:
                session.edits.apply(Fold(tuple(range(2, MAX_MOVED + 200)), text="What was short."))
            for _ in range(10 if at > 3 else 0):
                session.search("short", limit=200, tokens=20_000)
    with Sqlite(tmp_path / "agent.db", readonly=True) as backend:
        reading = LedgerReader(backend)
        session = reading.session("s0")
        assert sum(len(event.pages) for event in session.ledger.events() if event.act is Act.SEARCH) > MAX_MOVED
        strip(reading, session, 0, 20)
        reading.replayed(session.number, 600)
        columns = strip(reading, session, 0, 20).columns
        assert len(columns) == 8
        assert not [column.turn for column in columns if {piece.shade for piece in column.pieces} == {"plain"}]

"""Opening is flat: what it costs is counted in events replayed, pages read and bytes written, in sessions of growing length."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apsw
import pytest

import kilburn
from effort import rounds
from kilburn.backend import State
from kilburn.backends.sqlite import Sqlite
from kilburn.errors import Forgotten
from kilburn.event import Act, Event
from kilburn.kernel.kernel import LONG, SHARE, SHORT
from kilburn.page import Page
from kilburn.testing.laws import check_laws

POLICIES = ["fifo", "hybrid", "mask"]
WORDS = [f"word{number}" for number in range(500)]


class Counting(Sqlite):
    """A store that counts what is read of it."""

    def __init__(self, path: Any, **options: Any) -> None:
        self.events_read = self.pages_read = self.whole = 0
        super().__init__(path, **options)

    def events(self, segment: int, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        for event in super().events(segment, after, act):
            self.events_read += 1
            yield event

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        found = super().read(keys)
        self.pages_read += len(found)
        return found

    def pages(self, segment: int) -> Iterator[tuple[Page, State]]:
        self.whole += 1
        yield from super().pages(segment)


def opened(backend: Sqlite, policy: str = "fifo") -> kilburn.Store:
    budget = kilburn.Budget(700)
    # An excerpt's heading says the minute: two stores that are compared must not have different ones.
    return kilburn.Store(backend, budget, policy, tokenizer="chars/4", clock=lambda: 1_700_000_000.0)


def talk(count: int, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [turn(at, " ".join(rng.choices(WORDS, k=20))) for at in range(count)]


def turn(at: int, words: str) -> dict[str, Any]:
    return {"role": ["user", "assistant"][at % 2], "content": f"{at}: {words}"}


def fill(path: Path, count: int, policy: str = "fifo", at_once: int = 1) -> None:
    messages = talk(count)
    with opened(Sqlite(path, synchronous="OFF"), policy) as store:
        p = store.session("s")
        for at in range(0, count, at_once):
            p.append(*messages[at : at + at_once])


@pytest.mark.parametrize("policy", POLICIES)
def test_opening_reads_what_is_in_the_window_and_not_what_is_in_the_session(tmp_path: Path, policy: str) -> None:
    read = {}
    for count in (250, 1000):
        path = tmp_path / f"{count}.db"
        fill(path, count, policy, at_once=2)
        text = sum(len(message["content"]) for message in talk(count))
        assert (path.stat().st_size - text) / count <= 2000, "checkpoints and excerpts take more than 2,000 bytes a message"
        with opened(Counting(path), policy) as store:
            p = store.session("s")
            assert str(p.recall("p1")).startswith("0: ")
            p.render()
            counting = store.backend
            assert isinstance(counting, Counting)
            assert counting.whole == 0, "every page was read"
            assert counting.events_read <= SHORT + 40
            read[count] = counting.pages_read
            check_laws(p, talk(count))
    assert read[1000] <= read[250] + 60, "four times as long a session reads more pages"


def test_a_killed_writer_leaves_a_short_rest_to_replay(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    store = opened(Sqlite(path, synchronous="OFF"))
    p = store.session("s")
    for message in talk(1500):
        p.append(message)
    # Nobody closes it: another program opens the file as it is.
    with opened(Counting(path)) as other:
        assert other.session("s").contents.messages() == talk(1500)
        counting = other.backend
        assert isinstance(counting, Counting)
        assert counting.events_read <= 2 * (LONG + 1500 // SHARE)
        check_laws(other.session("s"), talk(1500))
    store.backend.close()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    fill(path, 300, "hybrid")
    for change in ("UPDATE checkpoint SET data = x'00'", "UPDATE checkpoint SET head = head - 1", "DELETE FROM checkpoint"):
        with apsw.Connection(str(path)) as db:
            db.execute(change)
        db.close()
        with opened(Sqlite(path), "hybrid") as store:
            check_laws(store.session("s"), talk(300))


def test_a_checkpoint_has_no_word_and_forgetting_leaves_none(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    call = {"id": "call-canary-7", "type": "function", "function": {"name": "read", "arguments": '{"path": "canary"}'}}
    with opened(Sqlite(path), "hybrid") as store:
        p = store.session("s")
        p.append({"role": "user", "content": "read canary"}, {"role": "assistant", "content": None, "tool_calls": [call]})
        p.append({"role": "tool", "tool_call_id": "call-canary-7", "content": "canary " * 40})
        for message in talk(200):
            p.append(message)
    with opened(Sqlite(path), "hybrid") as store:
        p = store.session("s")
        assert "call-canary-7" in p.window.calls
        p.forget("p1-p3")
        assert "call-canary-7" not in p.window.calls
        with pytest.raises(Forgotten):
            p.recall("p2")
    assert b"canary" not in path.read_bytes()


def test_another_counter_replays_everything_once(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    fill(path, 200)
    budget = kilburn.Budget(700)
    for first in (True, False):
        store = Counting(path)
        with kilburn.Store(store, budget, "fifo", tokenizer="chars/3") as other:
            p = other.session("s")
            assert (store.whole > 0) is first
            check_laws(p, talk(200))


def test_branches_begin_at_their_parents_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with opened(Sqlite(path, synchronous="OFF"), "hybrid") as store:
        p = store.session("s")
        for at, message in enumerate(talk(400)):
            p.append(message)
            if at in (150, 300):
                branch = p.fork("go")
                branch.append({"role": "assistant", "content": f"went at {at}"})
    for name in ("s/b1", "s/b2"):
        store = Counting(path)
        with opened(store, "hybrid") as other:
            branch = other.session(name)
            assert store.events_read <= 2 * SHORT
            check_laws(branch)
            assert str(branch.recall("p1")).startswith("0: ")


def test_forgetting_reads_what_names_the_page_and_not_the_ledger(tmp_path: Path) -> None:
    read = {}
    for count in (300, 1200):
        path = tmp_path / f"{count}.db"
        fill(path, count, "fifo", at_once=2)
        store = Counting(path)
        with opened(store) as other:
            p = other.session("s")
            before = store.events_read, store.pages_read
            p.forget(f"p{count // 2}")
            read[count] = store.events_read - before[0], store.pages_read - before[1]
            assert store.whole == 0
    assert read[1200][0] <= read[300][0] + 16
    assert read[1200][1] <= read[300][1] + 16


@pytest.mark.parametrize("seed", range(rounds(1, 3)))
def test_a_session_opened_again_and_again_is_the_same_session(tmp_path: Path, seed: int) -> None:
    """Against one that is never closed: same windows, same prompts, whatever was done in between."""
    rng = random.Random(seed)
    again, once = tmp_path / "again.db", opened(Sqlite(tmp_path / "once.db", synchronous="OFF"), "hybrid")
    for step in range(rounds(6, 12)):
        with opened(Sqlite(again, synchronous="OFF"), "hybrid") as store:
            for p in (store.session("s"), once.session("s")):
                mine = random.Random(f"{seed} {step}")
                for message in talk(40, mine.randrange(999)):
                    p.append(message)
                for _ in range(3):
                    number = mine.randrange(1, p.window.last)
                    if p.window.at(number) != "dropped":
                        mine.choice([p.recall, p.pin, p.unpin, p.recall, p.forget])(f"p{number}")
            assert store.session("s").render() == once.session("s").render()
            assert store.session("s").window.states == once.session("s").window.states
            check_laws(store.session("s"))
        rng.random()
    once.close()

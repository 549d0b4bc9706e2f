"""A session that its first append begins: before it nothing is in the store, and of two programs one begins it."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn
from kernel.talk import assistant, user
from kilburn.errors import InvalidMessage, SpecError, StoreReadOnly, StoreStale
from kilburn.event import Act
from kilburn.kernel.store import Store, session_of
from kilburn.testing.laws import check_laws


def opened(path: Path) -> Store:
    return kilburn.open(str(path), window=500, policy="fifo", tokenizer="chars/4", embedder=None)


def test_it_is_there_with_its_first_message_and_not_before(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as store, opened(tmp_path / "a.db") as other:
        session = session_of(store, "work", "ana")
        assert other.sessions() == []
        with pytest.raises(InvalidMessage):
            session.append({"role": "user", "content": 3})
        assert other.sessions() == []
        session.append(user("one"))
        assert session_of(store, "work", "ana") is store.session("work") is session
        (info,) = other.sessions()
        assert (info.number, info.user, info.pages) == (session.number, "ana", 1)
        assert [event.act for event in session.ledger.events()][:2] == ["note", "admit"]
        other.session("work").append(assistant("two"))
        assert [message["content"] for message in session.contents.messages()] == ["one", "two"]
        check_laws(session)
    with opened(tmp_path / "a.db") as store:
        assert session_of(store, "work").contents.messages() == store.session("work").contents.messages()
        store.session("work").append(user("three"))


def test_a_session_that_nothing_was_said_in_leaves_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as store:
        session_of(store, "work")
        store.release("work")
        session_of(store, "more")
        with pytest.raises(SpecError, match="collection"):
            session_of(store, "@memory/ana")
        with pytest.raises(SpecError):
            session_of(store, "")
    with opened(tmp_path / "a.db") as store:
        assert store.sessions() == []


def test_of_two_programs_one_begins_it(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as one, opened(tmp_path / "a.db") as two:
        first, second = session_of(one, "work"), session_of(two, "work")
        first.append(user("one"), after=0)
        with pytest.raises(StoreStale):
            second.append(user("two"), after=0)
        again = session_of(two, "work")
        assert again is not second
        assert [message["content"] for message in again.contents.messages()] == ["one"]
        again.append(assistant("three"), after=1)
        assert len(one.sessions()) == 1


def test_one_that_never_began_is_in_nobodys_way(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as one, opened(tmp_path / "a.db") as two:
        for name in ("work", "more"):
            session_of(one, name, "ana").ledger.record(Act.NOTE, policy="test", why="it is given up before its first message")
        two.session("work", "bob").append(user("one"))
        assert [message["content"] for message in one.session("work", "bob").contents.messages()] == ["one"]
        with pytest.raises(SpecError, match="ana"):
            session_of(one, "work", "ana")
        session_of(one, "more", "bob").append(user("two"))
        assert [info.user for info in two.sessions()] == ["bob", "bob"]
        assert "given up" not in str([event.data for event in two.session("more").ledger.events()])
        session_of(one, "third")
        assert one.session("third").number
        assert len(two.sessions()) == 3


def test_a_store_that_is_opened_for_reading_prepares_none(tmp_path: Path) -> None:
    opened(tmp_path / "a.db").close()
    with kilburn.open(str(tmp_path / "a.db"), readonly=True, embedder=None) as store, pytest.raises(StoreReadOnly):
        session_of(store, "work")

"""A user's memory as one object: what is remembered, updated, searched, recalled and forgotten through it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kilburn
from kilburn.errors import Forgotten, KernelError, LawBroken, SpecError, UnknownAddress
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.brought import quotation
from kilburn.memory.user_memory import UserMemory
from kilburn.message import Trust
from kilburn.move import Add
from kilburn.page import Place
from kilburn.search.found import Findings

START = 1_000_000.0


class Clock:
    now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with kilburn.open(str(tmp_path / "agent.db"), tokenizer="chars/4") as opened:
        opened.clock = clock
        yield opened


def in_force(memory: UserMemory, at: float | None = None) -> list[str]:
    return [memory.collection.contents.text(page.id) for page, _ in memory.pages(at)]


def test_an_updated_fact_takes_the_place_of_the_old_one_which_stays_in_the_history(store: Store, clock: Clock) -> None:
    memory = store.memory("ana")
    assert memory.remember("Ana lives in Porto.", importance=0.5) == "p1"
    clock.now += 10
    head = memory.collection.ledger.head
    assert memory.update("p1", "Ana lives in Braga.") == "p2"
    assert {event.why for event in memory.collection.ledger.events(head) if event.act in (Act.ADMIT, Act.RETIRE)} == {
        "a person updated it"
    }
    assert in_force(memory) == ["Ana lives in Braga."]
    assert in_force(memory, START + 5) == ["Ana lives in Porto."]
    assert [version.page.address for version in memory.history("p2")] == ["p1", "p2"]
    assert [state.importance for _, state in memory.pages()] == [0.5]
    assert memory.recall("p1") == "Ana lives in Porto."
    assert [hit.text for hit in memory.search("Ana lives in")] == ["Ana lives in Braga."]
    assert memory.undo("p2") == ["p1"]
    assert in_force(memory) == ["Ana lives in Porto."]


def test_an_update_says_from_when_the_new_text_is_true(store: Store, clock: Clock) -> None:
    memory = store.memory("ana")
    memory.remember("Ana lives in Porto.")
    clock.now += 100
    memory.update("p1", "Ana lives in Braga.", since=START + 50)
    assert in_force(memory, START + 49) == ["Ana lives in Porto."]
    assert in_force(memory, START + 51) == ["Ana lives in Braga."]


def test_what_cannot_be_updated_is_refused_and_nothing_changes(store: Store) -> None:
    memory = store.memory("ana")
    memory.remember("one")
    memory.remember("two", pin=True)
    memory.remember("three")
    memory.forget("p3")
    (note,) = memory.collection.apply(Add(text="a model's word", sources=(1,)), policy="x", tainted=True)
    head = memory.collection.ledger.head
    for address, error in (
        ("p1-p2", KernelError),
        ("p2", LawBroken),
        ("p3", Forgotten),
        (note, KernelError),
        ("p9", UnknownAddress),
    ):
        with pytest.raises(error):
            memory.update(address, "new")
    with pytest.raises(KernelError):
        memory.update("p1", " ")
    with pytest.raises(SpecError):
        memory.update("p1", "new", since="now")  # type: ignore[arg-type]
    assert memory.collection.ledger.head == head
    memory.update("p1", "new")
    with pytest.raises(KernelError, match="p1 is retired, not in force"):
        memory.update("p1", "newer")


def test_a_memory_searches_its_own_facts_and_the_store_those_of_all_users_too(store: Store) -> None:
    memory = store.memory("ana")
    memory.remember("Ana's locker is number 12.")
    store.memory().remember("Every locker has a number on its door.")
    store.memory("bob").remember("Bob's locker is number 7.")
    hits = memory.search("locker number")
    assert isinstance(hits, Findings)
    assert [(hit.session, memory.recall(hit.address)) for hit in hits] == [("@memory/ana", "Ana's locker is number 12.")]
    assert {hit.session for hit in store.search("locker number", user="ana")} == {"@memory", "@memory/ana"}
    searches = [event for event in memory.collection.ledger.events() if event.act is Act.SEARCH]
    assert [event.pages for event in searches] == [(1,), (1,)]
    unlikely = memory.search("who painted the portrait of the minister by the number", abstain=True)
    assert unlikely == []
    assert unlikely.abstained
    assert [hit.address for hit in unlikely.withheld] == ["p1"]
    assert "locker" not in repr(unlikely)
    assert 0 < hits.confidence <= 1


def spoken(store: Store, *texts: tuple[str, str], session: str = "s") -> Session:
    talk = store.session(session, user="ana")
    talk.append(*({"role": role, "content": text} for role, text in texts))
    return talk


def test_what_an_agent_notes_in_the_users_words_holds_at_once(store: Store) -> None:
    talk = spoken(store, ("user", "Please remember that my locker is number 12."), ("assistant", "I will."), ("user", "Thanks."))
    memory = store.memory("ana")
    address = memory.note("The user's locker has the number 12.", talk)
    page, state = memory.collection.read(memory.collection.contents.resolve(address)[0])
    assert (state.at, page.trust, page.cites) == (Place.OUT, Trust.USER, ((talk.number, 1),))
    store.forget(session="s", address="p1")
    with pytest.raises(Forgotten):
        memory.recall(address)


def test_what_an_agent_notes_after_an_untrusted_read_waits_for_a_person(store: Store) -> None:
    talk = spoken(store, ("user", "Read this page."))
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    talk.append({"role": "assistant", "content": None, "tool_calls": [call]})
    talk.append({"role": "tool", "tool_call_id": "c", "content": "The refund account of Ana is 4711."})
    talk.append({"role": "assistant", "content": "It says that the account is 4711."})
    memory = store.memory("ana")
    address = memory.note("The refund account of Ana is 4711.", talk)
    assert memory.collection.read(memory.collection.contents.resolve(address)[0])[1].at is Place.PROPOSED
    assert not memory.search("refund account")


def test_what_nobody_said_is_the_agents_word(store: Store) -> None:
    talk = spoken(store, ("user", "I live in Porto."), ("assistant", "Porto is on the Douro."))
    memory = store.memory("ana")
    address = memory.note("Porto is on the Douro.", talk)
    page, state = memory.collection.read(memory.collection.contents.resolve(address)[0])
    assert (state.at, page.trust) == (Place.OUT, Trust.AGENT)
    with pytest.raises(KernelError, match="nothing was said"):
        memory.note("The user lives in Porto.", store.session("empty", user="ana"))


def test_what_is_brought_is_what_users_said_facts_and_documents_the_newest_first(store: Store, clock: Clock) -> None:
    spoken(store, ("user", "I drive a Volvo to the river."), ("assistant", "The river Volvo is blue."), session="old")
    store.memory("ana").learn("old")
    clock.now += 100 * 86_400
    spoken(store, ("user", "I sold the Volvo by the river."), session="new")
    store.memory("ana").learn("new")
    spoken(store, ("user", "Which Volvo by the river?"), session="running")
    text, hits = quotation(store, "Volvo by the river", 400, "ana", without="running")
    assert [hit.session for hit in hits if not hit.session.startswith("@")] == ["new", "old"]
    assert all(hit.origin == "user" for hit in hits), "an assistant's words may be a tool's"
    assert [hit.time for hit in hits] == sorted((hit.time for hit in hits), reverse=True)
    assert "may have changed, see @memory/ana f2" in text
    facts = quotation(store, "Volvo by the river", 400, "ana", where="facts")[1]
    assert {hit.session for hit in facts} == {"@memory/ana"}

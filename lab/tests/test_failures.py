"""The four failures of a memory: each is found where it is, not found where it is not, and counted in the ledger."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kilburn
from kilburn.kernel.store import Store
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Add
from kilburn.page import Claim
from kilburn.testing import FakeClock
from kilburn_lab.failures import STALE, Failing, contaminated, counted, decayed, examine, not_triggered, unattributed


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(time=1_700_000_000.0, tick=0.001)


@pytest.fixture
def store(clock: FakeClock) -> Iterator[Store]:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as made:
        made.clock = clock
        yield made


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def lives(store: Store, town: str, **fields: object) -> str:
    claim = Claim(subject="Ana", relation="lives in", object=town)
    return store.memory().collection.apply(Add(text=f"Ana lives in {town}", claim=claim, **fields))[0]  # type: ignore[arg-type]


def asked(store: Store, text: str, *, recall: str = "", search: str = "", later: bool = True) -> list[str]:
    session = store.session("s")
    session.append(user("Good morning."), assistant("Good morning."))
    session.append(user(text))
    if recall:
        session.recall(recall)
    if search:
        session.search(search)
    if later:
        session.append(assistant("So it is."), user("Thanks."))
    return [failure.why for failure in not_triggered(session, store.memory().collection)]


@pytest.mark.parametrize("text", ["Do you remember my flight?", "As I said, the usual.", "What did we discuss last time?"])
@pytest.mark.parametrize("later", [False, True])
def test_the_past_is_spoken_of_and_nothing_was_recalled(store: Store, text: str, later: bool) -> None:
    assert asked(store, text, later=later) == ["the user speaks of the past"]


def test_a_name_that_only_the_memory_knows(store: Store) -> None:
    lives(store, "Porto")
    assert asked(store, "Book a train to visit Ana, please.") == ["the memory knows a name that the session does not"]


def test_a_name_that_the_session_knows_needs_no_memory(store: Store) -> None:
    lives(store, "Porto")
    store.session("s").append(user("My friend is called ana."), assistant("I see."))
    assert len(asked(store, "Book a train to visit Ana, please.")) == 0


@pytest.mark.parametrize("how", [{"recall": "p1"}, {"search": "flight"}])
def test_what_was_recalled_or_searched_is_no_failure(store: Store, how: dict[str, str]) -> None:
    assert asked(store, "Do you remember my flight?", **how) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["Hello!", "Book a flight to Lisbon.", "🎸", ") or true or (", "Remember to water the plants."])
def test_what_needs_no_memory_is_no_failure(store: Store, text: str) -> None:
    assert asked(store, text) == []


def test_facts_with_an_origin_are_attributed(store: Store) -> None:
    session = store.session("s")
    session.append(user("Ana lives in Porto."))
    lives(store, "Porto")
    lives(store, "Porto", cites=((session.number, 1),))
    assert unattributed(store.memory().collection) == []


def test_a_fact_that_lost_its_origin(store: Store) -> None:
    session, memory = store.session("s"), store.memory().collection
    session.append(user("Ana lives in Porto."))
    lives(store, "Porto", cites=((session.number, 1),))
    lost = LosesPages(memory, session.number)
    (failure,) = unattributed(lost)  # type: ignore[arg-type]
    assert failure.kind is Failing.UNATTRIBUTED
    assert failure.address == "f1"


class LosesPages:
    """A collection over a store from which a session is gone: the kernel allows none, damage may."""

    def __init__(self, memory: object, segment: int) -> None:
        self._memory, self._segment = memory, segment

    def __getattr__(self, name: str) -> object:
        return getattr(self._memory, name)

    @property
    def backend(self) -> LosesPages:
        return LosesPages(self._memory.backend, self._segment)  # type: ignore[attr-defined]

    def read(self, keys: object) -> object:
        return self._memory.read(key for key in keys if key[0] != self._segment)  # type: ignore[attr-defined]


def test_what_nobody_used_for_long_has_decayed(store: Store, clock: FakeClock) -> None:
    memory = store.memory()
    lives(store, "Porto")
    used = memory.collection.add("Ana has a cat")
    assert decayed(memory.collection, clock.now) == []
    clock.advance(STALE)
    memory.recall(used)
    clock.advance(STALE / 2)
    assert [(failure.address, failure.why) for failure in decayed(memory.collection, clock.now)] == [("p1", "not used for long")]


@pytest.mark.parametrize("abstain", [False, True])
def test_what_a_search_of_the_store_finds_is_used(store: Store, clock: FakeClock, abstain: bool) -> None:
    lives(store, "Porto")
    clock.advance(200 * 86_400.0)
    assert len(decayed(store.memory().collection, store.clock())) == 1
    store.memory().collection.apply(*(Add(text=f"Number {n} of the list is {n * n}") for n in range(20)))
    assert list(store.search("Where does Ana live? In Porto?", where="facts", abstain=abstain))
    assert decayed(store.memory().collection, store.clock()) == []


@pytest.mark.parametrize("abstain", [False, True])
def test_a_search_of_the_store_for_the_user_is_a_recall(store: Store, abstain: bool) -> None:
    store.memory("ana")
    session = store.session("s", user="ana")
    session.append(user("Do you remember my flight?"))
    store.search("flight", user="ana", abstain=abstain)
    session.append(assistant("No."), user("Do you remember my train?"))
    assert [failure.address for failure in not_triggered(session, store.memory("ana").collection)] == ["p3"]
    store.search("flight", user="bob")
    assert store.backend.segment("@memory/bob", time=0.0, create=False) is None, "a search makes no memory"


def test_what_is_past_its_end_has_decayed(store: Store, clock: FakeClock) -> None:
    lives(store, "Porto", until=clock.now + 10)
    assert decayed(store.memory().collection, clock.now) == []
    assert [failure.why for failure in decayed(store.memory().collection, clock.now + 11)] == ["past its end"]


def test_what_only_an_older_embedder_knows_has_decayed(store: Store, clock: FakeClock) -> None:
    memory = store.memory().collection
    lives(store, "Porto")
    entries = [entry for entry, _ in memory.backend.vectors.unembedded("new", 10)]
    memory.backend.vectors.add("old", [(entry, np.zeros(4, dtype="float32").tobytes()) for entry in entries])
    assert [failure.why for failure in decayed(memory, clock.now, embedder="new")] == ["without a vector of this embedder"]
    assert decayed(memory, clock.now, embedder="old") == []


def test_facts_that_contradict_each_other_are_contaminated(store: Store, clock: FakeClock) -> None:
    lives(store, "Porto")
    assert contaminated(store.memory().collection, clock.now) == []
    lives(store, "Braga")
    assert [failure.why for failure in contaminated(store.memory().collection, clock.now)] == ["contradicts p2", "contradicts p1"]


def test_what_was_learned_from_recalled_text_is_contaminated(store: Store, clock: FakeClock) -> None:
    session = store.session("s")
    session.append(user("Ana lives in Porto."), assistant("I see."))
    session.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="Ana lives in Porto."),), sources=(1,)))
    number = session.number
    lives(store, "Porto", cites=((number, 1),))
    lives(store, "Porto", cites=((number, 3),))
    assert [(failure.address, failure.why) for failure in contaminated(store.memory().collection, clock.now)] == [
        ("f2", "it was learned from recalled text")
    ]


def test_an_examination_is_counted_in_the_ledger(store: Store) -> None:
    assert set(counted(store.memory().collection).values()) == {0}
    lives(store, "Porto")
    lives(store, "Braga")
    asked(store, "Do you remember my flight?")
    found = examine(store)
    assert counted(store.memory().collection) == {
        Failing.NOT_TRIGGERED: 1,
        Failing.UNATTRIBUTED: 0,
        Failing.DECAYED: 0,
        Failing.CONTAMINATED: 2,
    }
    assert not [failure for failure in found if "Porto" in failure.why]
    examine(store)
    assert sum(counted(store.memory().collection).values()) == 3


def test_an_empty_memory_has_no_failure(store: Store) -> None:
    assert examine(store, "ana") == []


def test_a_session_in_which_the_user_said_nothing_has_no_failure(store: Store) -> None:
    store.session("s", user="ana").append(assistant("Hello?"))
    lives(store, "Porto")
    assert examine(store, "ana") == []


@pytest.mark.parametrize("text", ["Remind me of my flight.", "What did I tell you about Rosa?", "When's my flight again?"])
def test_the_user_asks_for_what_they_told(store: Store, text: str) -> None:
    assert asked(store, text) == ["the user speaks of the past"]


def test_the_message_that_taught_a_name_needed_no_memory(store: Store) -> None:
    session = store.session("first")
    session.append(user("I met Mallory in Faro."), assistant("I see."), user("So I did."))
    claim = Claim(subject="user", relation="met", object="Mallory")
    store.memory().collection.apply(Add(text="The user met Mallory.", claim=claim, cites=((session.number, 1),)))
    assert not_triggered(session, store.memory().collection) == []
    assert asked(store, "Where is that friend Mallory of mine?") == ["the memory knows a name that the session does not"]

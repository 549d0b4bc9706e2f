"""Doubt: what was said may make a fact untrue. The fact stays in force, and is brought marked, after what doubts it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.claims import DOUBTS
from kilburn.memory.doubt import MAX_DOUBTS_PER_FACT
from kilburn.memory.user_memory import UserMemory
from kilburn.move import Retire
from kilburn.page import Place
from kilburn.testing import FakeClock, Scripted, check_laws


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(Sqlite(":memory:"), Budget(100_000), "fifo", tokenizer="chars/4", clock=FakeClock()) as opened:
        yield opened


def told(store: Store, *texts: str) -> UserMemory:
    """Say each in a session of its own, and learn from it without a model."""
    for text in texts:
        name = f"s{len(store.sessions())}"
        store.session(name, user="ana").append({"role": "user", "content": text}, {"role": "assistant", "content": "Noted."})
        store.memory("ana").learn(name)
    return store.memory("ana")


def marks(store: Store, query: str) -> list[tuple[str, bool]]:
    """What a search over facts brings, in its order, and whether it is doubted."""
    return [(hit.text, bool(hit.doubted)) for hit in store.search(query, where="facts", user="ana")]


CHANGES = [
    ("I drive a Volvo.", "I sold the Volvo.", "What does the user drive?"),
    ("I drive a Volvo.", "traded the car in for a Skoda", "What does the user drive?"),
    ("I live in Porto.", "so we gave up the flat, and home is Leeds", "Where does the user live?"),
    ("I work at Siemens.", "handed in my notice at Siemens today", "Where does the user work?"),
    ("I'm a vegetarian.", "I eat meat again, the vegetarian times are over", "Is the user a vegetarian?"),
    (
        "My budget for the kitchen is 500 euros.",
        "500. Sorry, I meant 600 euros for the kitchen budget.",
        "the budget for the kitchen",
    ),
    ("My sister lives in Dublin.", "my sister couldn't stand Dublin any longer", "Where does the user's sister live?"),
]


@pytest.mark.parametrize(("fact", "change", "question"), CHANGES)
def test_a_message_doubts_the_fact_that_it_speaks_of(store: Store, fact: str, change: str, question: str) -> None:
    memory = told(store, fact, change)
    found = marks(store, question)
    at = next(place for place, (_, doubted) in enumerate(found) if doubted)
    assert found[at - 1][0].startswith("The user said: "), "what was said stands before it"
    assert memory.collection.read(-1)[1].at is Place.OUT, "nothing is retired"
    check_laws(store.session("s1"))


UNTOUCHED = [
    ("I drive a Volvo.", "My neighbour Tom sold his Volvo."),
    ("I drive a Volvo.", 'Translate: "I sold the Volvo and drive a Fiat now."'),
    ("I drive a Volvo.", "The email reads: I sold my Volvo last week."),
    ("I drive a Volvo.", "If I sold the Volvo, would a Fiat be cheaper?"),
    ("I drive a Volvo.", "Write a story in which I sold the Volvo and drove a Fiat."),
    ("I drive a Volvo.", "The Volvo needs new tyres now."),
    ("I drive a Volvo.", "We moved the team meeting to Friday."),
    ("I live in Porto.", "My sister moved to Leeds."),
    ("My sister lives in Dublin.", "I moved to Leeds."),
    ("I live in Porto.", "Porto is lovely now that it rains less."),
    ("I work at Siemens.", "Explain how a heat pump works."),
    ("I'm a vegetarian.", "Do not use onions, please."),
]


@pytest.mark.parametrize(("fact", "said"), UNTOUCHED)
def test_what_is_about_something_else_doubts_nothing(store: Store, fact: str, said: str) -> None:
    told(store, fact, said)
    assert not [text for text, doubted in marks(store, fact) if doubted]


def test_forgetting_the_message_removes_the_doubt(store: Store) -> None:
    memory = told(store, "I drive a Volvo.", "I sold the Volvo.")
    assert ("The user drives a Volvo.", True) in marks(store, "drives a Volvo")
    store.forget(session="s1")
    assert marks(store, "drives a Volvo") == [("The user drives a Volvo.", False)]
    assert [memory.collection.contents.text(page.id) for page, _ in memory.pages(history=True)] == ["The user drives a Volvo."]


def test_forgetting_the_fact_removes_the_doubt(store: Store) -> None:
    memory = told(store, "I drive a Volvo.", "I sold the Volvo.")
    memory.forget("f1")
    assert not list(memory.pages(history=True))


def test_what_is_said_again_is_doubted_no_longer(store: Store) -> None:
    told(store, "I drive a Volvo.", "I sold the Volvo.", "I drive a Volvo.")
    assert marks(store, "drives a Volvo") == [("The user drives a Volvo.", False)]


def test_a_newer_doubt_takes_the_place_of_the_older(store: Store) -> None:
    told(store, "I drive a Volvo.", "my car was stolen, and a Fiat replaced the Volvo", "I sold my car and lost the Volvo keys")
    texts = [text for text, _ in marks(store, "drives a Volvo car")]
    assert sum(text.startswith("The user said: ") for text in texts) == 1


def test_an_older_doubt_returns_when_the_newest_message_is_forgotten(store: Store) -> None:
    changes = ["my car was stolen, and a Fiat replaced the Volvo", "I sold my car and lost the Volvo keys"]
    told(store, "I drive a Volvo.", *changes)
    for session, shown in (("s2", changes[1]), ("s1", changes[0])):
        texts = [text for text, _ in marks(store, "drives a Volvo car") if text.startswith("The user said: ")]
        assert texts == [f"The user said: {shown}"]
        assert ("The user drives a Volvo.", True) in marks(store, "drives a Volvo car")
        store.forget(session=session)
    assert marks(store, "drives a Volvo car") == [("The user drives a Volvo.", False)]


def test_so_many_doubts_stay_about_one_fact_and_no_more(store: Store) -> None:
    memory = told(store, "I drive a Volvo.", *(f"I sold the Volvo, buyer {number}" for number in range(6)))
    doubts = [page for page, _ in memory.pages() if page.claim is not None and page.claim.relation == DOUBTS]
    assert len(doubts) == MAX_DOUBTS_PER_FACT


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("I prefer dark mode", "I prefer light mode"),
        ("Ana lives in Porto.", "Ana lives in Braga."),
        ("Ana's favourite tea is chai.", "Ana's favourite tea is matcha."),
    ],
)
def test_remembering_twice_on_one_matter_marks_the_older(store: Store, one: str, other: str) -> None:
    memory = store.memory("ana")
    first, second = memory.remember(one), memory.remember(other)
    found = [(hit.address, hit.doubted) for hit in store.search(one, where="facts", user="ana")]
    assert found[:2] == [(second, ()), (first, (f"@memory/ana {second}",))]
    memory.update(first, other.replace("light", "grey"))
    assert not [hit for hit in store.search(one, where="facts", user="ana") if hit.doubted]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Ana likes tea.", "Ana likes coffee."),
        ("I prefer dark mode", "I prefer tea in the morning"),
        ("Ana lives in Porto.", "Bruno lives in Braga."),
        ("Ana lives in Porto.", "Ana lives in Porto, near the river."),
    ],
)
def test_remembering_beside_each_other_marks_nothing(store: Store, one: str, other: str) -> None:
    memory = store.memory("ana")
    memory.remember(one)
    memory.remember(other)
    assert not [hit for hit in store.search(one, where="facts", user="ana") if hit.doubted]


def test_what_is_told_is_compared_with_the_right_facts_among_many(store: Store) -> None:
    memory = store.memory("ana")
    homes = [memory.remember(f"Person{n} lives in Town{n % 7}") for n in range(60)]
    dark = memory.remember("I prefer dark mode")
    for n in range(60):
        memory.remember(f"I prefer dish{n} to soup{n}")
    for old, text in [(homes[3], "Person3 lives in Leeds"), (homes[5], "Person5 moved to York"), (dark, "I prefer light mode")]:
        new = memory.remember(text)
        marks = {hit.address: hit.doubted for hit in store.search(memory.recall(old), where="facts", user="ana")}
        assert marks[old] == (f"@memory/ana {new}",)


def test_a_doubt_is_found_only_from_when_it_was_said(store: Store) -> None:
    told(store, "I drive a Volvo.")
    before = store.clock()
    told(store, "I sold the Volvo.")
    hits = store.search("drives a Volvo", where="facts", user="ana", at=before)
    assert [(hit.text, hit.doubted) for hit in hits] == [("The user drives a Volvo.", ())]


def test_a_later_message_of_the_same_exchange_doubts_too(store: Store) -> None:
    talk = store.session("s", user="ana")
    talk.append({"role": "user", "content": "I drive a Volvo."}, {"role": "user", "content": "traded the car in for a Skoda"})
    store.memory("ana").learn(talk)
    assert marks(store, "drives a Volvo") == [
        ("The user said: traded the car in for a Skoda", False),
        ("The user drives a Volvo.", True),
    ]


def test_what_a_model_says_nothing_of_is_doubted_too(store: Store) -> None:
    store.memory("ana").remember("Ana drives a Volvo.")
    talk = store.session("s", user="ana")
    talk.append({"role": "user", "content": "I sold the Volvo."}, {"role": "assistant", "content": "I see."})
    store.memory("ana").learn(talk, policy="facts", model=Scripted(['{"facts": []}']))
    assert marks(store, "drives a Volvo") == [("The user said: I sold the Volvo", False), ("Ana drives a Volvo.", True)]


def test_a_fact_that_was_retired_doubts_no_other_and_is_not_shown(store: Store) -> None:
    memory = store.memory("ana")
    memory.remember("I live in Porto.")
    later = memory.remember("I live in Leeds.")
    assert marks(store, "Where do I live?") == [("I live in Leeds.", False), ("I live in Porto.", True)]
    memory.collection.apply(Retire((int(later[1:]),)))
    assert marks(store, "Where do I live?") == [("I live in Porto.", False)]


def test_a_fact_that_is_updated_goes_on_to_doubt_what_it_doubted(store: Store) -> None:
    memory = store.memory("ana")
    memory.remember("I live in Porto.")
    memory.update(memory.remember("I live in Leeds."), "I live in Leeds, in Yorkshire.")
    assert marks(store, "Where do I live?") == [("I live in Leeds, in Yorkshire.", False), ("I live in Porto.", True)]


def test_a_clock_that_lags_behind_hides_no_doubt() -> None:
    clock = FakeClock()
    with Store(Sqlite(":memory:"), Budget(100_000), "fifo", tokenizer="chars/4", clock=clock) as store:
        told(store, "I drive a Volvo.", "I sold the Volvo.")
        clock.now -= 100_000
        assert [doubted for _, doubted in marks(store, "What do I drive?")] == [False, True]

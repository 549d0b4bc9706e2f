"""The one search: sessions, facts and documents; validity, users, speakers, neighbours, folding, abstention."""

import datetime as dt
from collections.abc import Collection

import pytest

import kilburn
from kilburn.backend import Passage
from kilburn.errors import ModelError, SpecError
from kilburn.kernel.store import Store
from kilburn.move import Add, Retire
from kilburn.page import Place


def opened(**fields: object) -> Store:
    return kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4", **fields)


def said(name: str, text: str) -> dict[str, str]:
    return {"role": "user", "name": name, "content": text}


def texts(hits: Collection) -> list[str]:
    return [hit.text for hit in hits]


def test_a_hit_says_where_it_is_from() -> None:
    with opened() as store:
        store.session("s").append(said("Ana", "I moved to Porto in spring."), time=100.0)
        [hit] = store.search("Porto")
        assert (hit.reference, hit.speaker, hit.origin, hit.time) == ("s p1", "Ana", "user", 100.0)
        assert hit.age > 0
        assert sum(hit.why.values()) == pytest.approx(hit.score)


def test_a_speaker_whom_the_query_names_comes_first() -> None:
    with opened() as store:
        store.session("s").append(
            said("Bo", "Ana, which city do you like?"), said("Ana", "A city by the sea."), said("Bo", "My city is Rome.")
        )
        assert store.search("Which city does Ana like?")[0].speaker == "Ana"
        assert store.search("ana city")[0].speaker == "Ana"
        assert store.search("Ana")  # a name alone is searched for


def test_neighbours_are_recalled_and_not_searched() -> None:
    with opened() as store:
        store.session("s").append(said("Ana", "How old is the tortoise?"), said("Bo", "Sixty."))
        assert texts(store.search("tortoise")) == ["How old is the tortoise?"]
        found = store.search("tortoise age old", abstain=True)
        assert texts([*found, *found.withheld]) == ["How old is the tortoise?", "Sixty."]


def test_facts_documents_and_users_are_apart() -> None:
    with opened() as store:
        store.session("s").append(said("Ana", "zebra in a session"))
        store.memory("ana").collection.add("zebra of Ana")
        store.memory("bo").collection.add("zebra of Bo")
        store.memory().collection.add("zebra of all")
        store.document("handbook").apply(Add(text="zebra in a document"))
        assert len(store.search("zebra")) == 5
        assert set(texts(store.search("zebra", where="facts", user="ana"))) == {"zebra of Ana", "zebra of all"}
        assert texts(store.search("zebra", where="documents")) == ["zebra in a document"]
        assert len(store.search("zebra", where=["sessions", "documents"])) == 2
        for wrong in ("everywhere", [], ["facts", ") or true or ("]):
            with pytest.raises(SpecError):
                store.search("zebra", where=wrong)


def test_only_what_was_valid_then_is_found() -> None:
    now = dt.datetime(2024, 1, 1, tzinfo=dt.UTC).timestamp()
    with opened() as store:
        memory = store.memory("ana").collection
        [old] = memory.apply(Add(text="Ana lives in Porto", since=now))
        memory.apply(Add(text="Ana lives in Lisbon", since=now + 100), Retire((int(old[1:]),), why="moved", until=now + 100))
        assert texts(store.search("Ana lives")) == ["Ana lives in Lisbon"]
        assert texts(store.search("Ana lives", at=now + 50)) == ["Ana lives in Porto"]
        assert not store.search("Ana lives", at=now - 50)


def test_what_is_proposed_or_forgotten_is_not_found() -> None:
    with opened() as store:
        memory = store.memory()
        told = int(memory.collection.add("something else")[1:])
        memory.collection.apply(Add(text="a proposed walrus", sources=(told,)), policy="plain", tainted=True)
        gone = memory.collection.add("a forgotten walrus")
        memory.forget(gone, "")
        assert not store.search("walrus")
        assert not store.search("walrus", abstain=True).withheld


def test_a_text_is_recalled_once() -> None:
    with opened() as store:
        store.session("a").append(said("Ana", "The code is 7781."), said("Bo", "the code is 7781"))
        store.session("b").append(said("Ana", "The code is 7781!"))
        assert len(store.search("code 7781")) == 2
        found = store.search("What is the code 7781?", abstain=True)
        assert len([*found, *found.withheld]) == 1


def test_the_budget_is_kept() -> None:
    with opened() as store:
        store.session("s").append(*[said("Ana", f"walrus number {number} " + "x " * 50) for number in range(40)])
        for tokens in (0, 1, 30, 100, 500):
            found = store.search("walrus number", tokens, abstain=True)
            assert sum(hit.tokens for hit in [*found, *found.withheld]) <= tokens
        assert store.search("walrus", -5) == []


def test_reading_order() -> None:
    with opened() as store:
        store.session("late").append(said("Ana", "walrus one"), time=200.0)
        store.session("early").append(said("Ana", "walrus two"), said("Ana", "a walrus, a walrus"), time=100.0)
        found = store.search("walrus", abstain=True)
        assert [hit.reference for hit in [*found, *found.withheld]] == ["early p1", "early p2", "late p1"]


def test_facts_are_best_first_and_beside_no_passage() -> None:
    with opened() as store:
        store.session("s").append(said("Ana", "My flight is on Monday."), time=50.0)
        for user, text in (
            ("", "A flight takes an hour."),
            ("ana", "Ana likes a flight."),
            ("ana", "Ana's flight to Faro is on 12 May."),
        ):
            store.memory(user).remember(text)
        found = [hit for hit in store.search("Ana's flight to Faro on 12 May", abstain=True) if hit.session != "s"]
        assert found[0].text == "Ana's flight to Faro is on 12 May."
        assert [hit.score for hit in found] == sorted((hit.score for hit in found), reverse=True)


def test_it_abstains() -> None:
    with opened() as store:
        store.session("s").append(
            *[said("Ana", text) for text in ("The tortoise is sixty years old.", "I like tea.", "It rains.")]
        )
        found = store.search("What did the submarine captain whisper about tea?", abstain=True)
        assert found.abstained
        assert not found
        assert texts(found.withheld)
        assert found.confidence < 0.25
        nothing = store.search("submarine", abstain=True)
        assert not nothing.abstained
        assert nothing.confidence == 0.0


@pytest.mark.parametrize(
    "query", ["", "  ", '") or true or ("', "'; DROP TABLE page; --", "a AND NEAR(", "🙂", "\0", "日本語", "x" * 50_000]
)
def test_any_query(query: str) -> None:
    text = "a text 日本語 🙂"
    with opened() as store:
        session = store.session('") or true or ("', user="ana")
        session.append(said('") or true or ("', text))
        found = [store.search(query, abstain=True), store.search(query, user="ana"), session.search(query)]
        assert {hit.text for hits in found for hit in hits} <= {text}
        assert not store.search(query, user=query)
        assert texts(store.search("text")) == [text]


class Closing:
    """What the store closes."""

    def close(self) -> None:
        """Nothing is held."""


class Down(Closing):
    """An embedder's endpoint that is down."""

    def nearest(self, query: str, segments: Collection[int] | None, limit: int) -> list[tuple[Passage, float]]:
        raise ModelError("it is down", advice="wait")

    def similar(self, query: str, entries: Collection[int]) -> dict[int, float]:
        raise ModelError("it is down", advice="wait")


class Near(Closing):
    """Knows that one passage means what is asked, and nothing else."""

    def __init__(self, passage: Passage) -> None:
        self.passage = passage

    def nearest(self, query: str, segments: Collection[int] | None, limit: int) -> list[tuple[Passage, float]]:
        return [(self.passage, 0.9)]

    def similar(self, query: str, entries: Collection[int]) -> dict[int, float]:
        return {entry: 0.9 for entry in entries if entry == self.passage.entry}


def test_words_are_found_where_the_embedder_is_down() -> None:
    with opened() as store:
        store.vectors = Down()
        store.session("s").append(said("Ana", "a walrus"))
        assert texts(store.search("walrus")) == ["a walrus"]


def test_meaning_is_found() -> None:
    with opened() as store:
        session = store.session("s")
        session.append(said("Ana", "a walrus"), said("Ana", "a car"))
        store.vectors = Near(store.backend.words.entries([(session.number, 2)])[session.number, 2][0])
        [hit] = store.search("automobile")
        assert (hit.text, set(hit.why)) == ("a car", {"meaning", "session"})
        assert not store.search("automobile", abstain=True).abstained


def test_retired_pages_of_sessions_are_not_found() -> None:
    with opened() as store:
        session = store.session("s")
        session.append(said("Ana", "hello"), {"role": "assistant", "content": "walrus"}, said("Ana", "go on"))
        session.edits.apply(Retire((2,), why="wrong"))
        assert session.window.at(2) is Place.RETIRED
        assert not store.search("walrus")
        assert not session.search("walrus")

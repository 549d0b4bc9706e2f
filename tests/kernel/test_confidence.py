"""A recall abstains where nothing that it found is likely to answer, however small the store is."""

from __future__ import annotations

import pytest

import kilburn
from kilburn.move import Add


@pytest.fixture
def store() -> kilburn.Store:
    return kilburn.open(":memory:", window=4000, embedder="none")


def test_a_store_of_one_fact_answers_what_it_knows_and_nothing_else(store: kilburn.Store) -> None:
    with store:
        store.memory("ana").collection.apply(Add(text="Ana lives in Porto."))
        assert [hit.text for hit in store.search("Where does Ana live?", abstain=True)] == ["Ana lives in Porto."]
        assert not store.search("Who is the dentist of Ana's brother?", abstain=True)


@pytest.mark.parametrize("other", [0, 50])
def test_what_else_is_stored_changes_little(store: kilburn.Store, other: int) -> None:
    with store:
        memory = store.memory("ana").collection
        memory.apply(Add(text="The meeting about the budget of the museum is on Friday."))
        for number in range(other):
            memory.apply(Add(text=f"Number {number} of the parcels was left with a neighbour."))
        assert not store.search("When is the meeting about the museum's budget?", abstain=True).abstained
        assert not store.search("Which colour has the sofa that is in the kitchen?", abstain=True)


def test_scripts_without_blanks_are_compared_by_signs(store: kilburn.Store) -> None:
    with store:
        store.memory("ana").collection.apply(Add(text="安娜住在波尔图"))
        assert store.search("安娜住在波尔图", abstain=True).confidence > 0.5


@pytest.mark.parametrize(
    ("told", "asked", "answers"),
    [
        ("Ana's sister is called Eva.", "What is Ben's sister called?", False),
        ("Ana's sister is called Eva.", "What is Ana's sister called?", True),
        ("My sister is called Eva.", "What is my brother called?", False),
        ("My mum is called Eva.", "What is my mother called?", True),
        ("Meine Schwester heißt Eva.", "Wie heißt meine Schwester?", True),
        ("Eva arbeitet als Köchin.", "Als was arbeitet Eva?", True),
    ],
)
def test_a_question_about_another_person_is_not_answered(store: kilburn.Store, told: str, asked: str, answers: bool) -> None:
    with store:
        store.session("one", user="ana").append({"role": "user", "content": told})
        assert bool(store.search(asked, user="ana", abstain=True)) is answers


def test_what_stands_beside_who_is_asked_about_may_answer(store: kilburn.Store) -> None:
    with store:
        near = [{"role": "user", "content": text} for text in ("Do you know Ben?", "He works for the harbour office.")]
        far = [{"role": "user", "content": f"Let us talk about number {number}."} for number in range(8)]
        store.session("near").append(*near)
        assert store.search("Does Ben work for the harbour?", abstain=True)
        store.session("far").append(near[0], *far, near[1])
        store.forget(session="near")
        assert not store.search("Does Ben work for the harbour?", abstain=True)

"""A recall abstains where nothing that it found is likely to answer, however small the store is."""

from __future__ import annotations

import pytest

import kilburn
from kilburn.move import Add


@pytest.fixture
def store() -> kilburn.Hierarchy:
    return kilburn.open(":memory:", window=4000, embedder="none")


def test_a_store_of_one_fact_answers_what_it_knows_and_nothing_else(store: kilburn.Hierarchy) -> None:
    with store:
        store.memory("ana").apply(Add(text="Ana lives in Porto."))
        assert [hit.text for hit in store.recall("Where does Ana live?")] == ["Ana lives in Porto."]
        assert not store.recall("Who is the dentist of Ana's brother?")


@pytest.mark.parametrize("other", [0, 50])
def test_what_else_is_stored_changes_little(store: kilburn.Hierarchy, other: int) -> None:
    with store:
        memory = store.memory("ana")
        memory.apply(Add(text="The meeting about the budget of the museum is on Friday."))
        for number in range(other):
            memory.apply(Add(text=f"Number {number} of the parcels was left with a neighbour."))
        assert not store.recall("When is the meeting about the museum's budget?").abstained
        assert not store.recall("Which colour has the sofa that is in the kitchen?")


def test_scripts_without_blanks_are_compared_by_signs(store: kilburn.Hierarchy) -> None:
    with store:
        store.memory("ana").apply(Add(text="安娜住在波尔图"))
        assert store.recall("安娜住在波尔图").confidence > 0.5

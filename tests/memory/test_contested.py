"""An open contradiction in a search: both sides come one after the other, each names the other, and nothing else is marked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kilburn
from kilburn.kernel.store import Store
from kilburn.page import Claim


@pytest.fixture
def store() -> Iterator[Store]:
    with kilburn.open(":memory:", tokenizer="chars/4") as made:
        yield made


def put(store: Store, subject: str, relation: str, thing: str, user: str = "ana", **fields: object) -> str:
    claim = Claim(subject=subject, relation=relation, object=thing, many=relation == "likes")
    return store.memory(user).collection.add(f"{subject} {relation} {thing}", claim=claim, **fields)


def test_both_sides_are_found_and_marked(store: Store) -> None:
    one, other = put(store, "Rosa", "lives in", "Porto"), put(store, "Rosa", "lives in", "Braga")
    put(store, "Rosa", "likes", "Porto")
    put(store, "Rosa", "likes", "Braga")
    hits = {hit.address: hit for hit in store.search("Where does Rosa live?", where="facts", user="ana")}
    assert hits[one].contested == (f"@memory/ana {other}",)
    assert hits[other].contested == (f"@memory/ana {one}",)
    assert [hit.contested for address, hit in hits.items() if address not in (one, other)] == [(), ()]


def test_a_budget_for_two_gives_both_sides_before_anything_else(store: Store) -> None:
    put(store, "Rosa", "lives in", "Porto, where she lives in a house that Rosa lives in")
    for number in range(30):
        put(store, f"Rosa's friend {number}", "lives in", f"town {number} with Rosa")
    put(store, "Rosa", "lives in", "Braga")
    hits = store.search("Rosa lives in", 30, where="facts", user="ana")
    assert sum("Rosa's" not in hit.text for hit in hits[:2]) == 2


def test_a_side_that_does_not_fit_is_still_named(store: Store) -> None:
    one, other = put(store, "Rosa", "lives in", "Porto"), put(store, "Rosa", "lives in", f"Braga {'x' * 200}")
    (hit,) = store.search("Rosa lives in Porto", 20, where="facts", user="ana")
    assert (hit.address, hit.contested) == (one, (f"@memory/ana {other}",))


def test_what_is_over_contradicts_nothing(store: Store) -> None:
    put(store, "Rosa", "lives in", "Porto", since=1.0, until=2.0)
    put(store, "Rosa", "lives in", "Braga", since=2.0)
    assert [hit.contested for hit in store.search("Rosa lives in", where="facts")] == [()]
    assert [hit.text for hit in store.search("Rosa lives in", where="facts", at=1.5)] == ["Rosa lives in Porto"]


def test_two_users_are_two_speakers(store: Store) -> None:
    put(store, "user", "lives in", "Porto", "ana")
    put(store, "user", "lives in", "Braga", "bruno")
    assert [hit.contested for hit in store.search("user lives in", where="facts")] == [(), ()]
    put(store, "Rosa", "lives in", "Porto", "ana")
    put(store, "Rosa", "lives in", "Braga", "bruno")
    hits = [hit for hit in store.search("Rosa lives in", where="facts") if "Rosa" in hit.text]
    assert all(hit.contested for hit in hits)
    assert len(hits) == 2
    assert [hit.contested for hit in store.search("Rosa lives in", where="facts", user="ana") if "Rosa" in hit.text] == [()]

"""The graph: entities and edges from a model and without one, what a bad reply does, validity in both times, merging."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings, strategies

import kilburn
from kilburn.errors import KernelError
from kilburn.kernel.store import Store
from kilburn.memory.learning import Learned
from kilburn.message import Kind
from kilburn.move import Add, Retire
from kilburn.page import Claim, Place
from kilburn.testing import FakeClock, Scripted
from kilburn_lab.edges import entities, merge, neighbourhood, unmerge
from kilburn_lab.graph import ALIAS, Graph

DAY = 86_400.0


def opened(clock: FakeClock | None = None) -> Store:
    store = kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4")
    if clock is not None:
        store.clock = clock
    return store


@pytest.fixture
def store() -> Iterator[Store]:
    with opened() as made:
        yield made


def named(*names: tuple[str, str]) -> str:
    return json.dumps({"entities": [{"name": name, "kind": kind} for name, kind in names]})


def related(*edges: tuple[str, str, str], **more: Any) -> str:
    keys = ("subject", "relation", "object")
    flags = {"message": 1, "many": False, "correction": False, "over": False} | more
    return json.dumps({"relations": [dict(zip(keys, edge, strict=True)) | flags for edge in edges]})


def told(store: Store, text: str, *replies: Any, session: str = "s", **options: Any) -> Learned:
    """What is learned from one message with these replies of a model."""
    store.session(session).append({"role": "user", "content": text})
    model = Scripted(replies)
    learned = store.memory().learn(session, policy=Graph(**options), model=model)
    assert model.left == 0, "a reply was not asked for"
    return learned


def edges(store: Store, name: str, **options: Any) -> list[tuple[str, str, str]]:
    return [(edge.subject, edge.relation, edge.object) for edge in neighbourhood(store, name, **options)]


def facts(store: Store, **options: Any) -> list[str]:
    memory = store.memory()
    return [memory.collection.contents.text(page.id) for page, _ in memory.pages(**options) if page.kind is Kind.FACT]


PORTO = (named(("Ana", "person"), ("Porto", "place")), related(("Ana", "lives in", "Porto")))
BRAGA = (named(("Ana", "person"), ("Braga", "place")), related(("Ana", "lives in", "Braga")))


def test_two_stages_give_entities_and_edges_made_from_them(store: Store) -> None:
    learned = told(store, "Ana lives in Porto.", *PORTO)
    memory = store.memory()
    rows = {memory.collection.contents.text(page.id): page for page, _ in memory.pages()}
    edge = rows["Ana lives in Porto"]
    assert [rows[name].kind for name in ("Ana", "Porto")] == [Kind.ENTITY, Kind.ENTITY]
    assert set(edge.sources) == {rows["Ana"].id, rows["Porto"].id}
    assert edge.cites == ((store.session("s").number, 1),)
    assert len(learned.stored) == 3
    assert edges(store, "ana") == edges(store, "PORTO") == [("Ana", "lives in", "Porto")]
    assert edges(store, "Lyon") == []


def test_an_entity_has_one_page_however_it_is_written(store: Store) -> None:
    told(store, "Ana lives in Porto.", *PORTO)
    told(store, "The ANA knows Bea.", named(("ANA", "person"), ("Bea", "person")), related(("ANA", "knows", "Bea"), many=True))
    assert len(entities(store.memory().collection, "ana")) == 1
    assert len(edges(store, "Ana")) == 2


def test_the_second_stage_may_only_name_what_the_first_has(store: Store) -> None:
    model = Scripted(PORTO)
    store.session("s").append({"role": "user", "content": "Ana lives in Porto."})
    store.memory().learn("s", policy=Graph(), model=model)
    schema = json.dumps(model.requests[1].schema)
    assert '"enum": ["Ana", "Porto"]' in schema


def test_what_a_model_invents_is_left_out(store: Store) -> None:
    told(store, "Ana lives in Porto.", named(("Ana", "person"), ("Madrid", "place")), related(("Ana", "lives in", "Madrid")))
    assert facts(store) == []
    told(store, "Ana lives in Porto now.", PORTO[0], related(("Ana", "lives in", "Madrid"), ("Zoe", "lives in", "Porto")))
    assert facts(store) == []


@pytest.mark.parametrize(
    "bad", ["", "no", "[]", '{"entities": ', '{"entities": [{"kind": "x"}]}', '{"entities": "Ana"}', "null", "[" * 9000]
)
def test_a_malformed_reply_is_asked_for_again_and_then_failed_and_never_no_facts(store: Store, bad: str) -> None:
    again = told(store, "Ana lives in Porto.", bad, *PORTO)
    assert again.failed == ()
    assert facts(store) == ["Ana lives in Porto"]
    failed = told(store, "Ana lives in Braga.", bad, bad)
    assert failed.failed == ("p2",)
    assert facts(store) == ["Ana lives in Porto"]


def test_a_malformed_second_stage_writes_nothing_half(store: Store) -> None:
    failed = told(store, "Ana lives in Porto.", PORTO[0], "{", '{"relations": [{"subject": "Ana"}]}')
    assert failed.failed == ("p1",)
    assert list(store.memory().pages()) == []


def test_no_entities_are_nothing_to_learn(store: Store) -> None:
    assert told(store, "Hello!", named()).failed == ()


@pytest.mark.parametrize(
    "name", ['") or true or ("', "'; DROP TABLE page; --", "a* NEAR b", "🎸", "北京", "x" * 500, "\n", "NULL"]
)
def test_odd_names_do_no_harm(store: Store, name: str) -> None:
    told(store, f"Ana likes {name}.", named(("Ana", "person"), (name, "thing")), *([related(("Ana", "likes", name))]))
    assert all(edge[0] == "Ana" for edge in edges(store, name))


def test_an_update_closes_an_edge_and_keeps_it(store: Store) -> None:
    told(store, "Ana lives in Porto.", *PORTO)
    learned = told(store, "Ana lives in Braga.", *BRAGA)
    assert len(learned.retired) == 1
    assert edges(store, "Ana") == [("Ana", "lives in", "Braga")]
    assert sorted(facts(store, history=True)) == ["Ana lives in Braga", "Ana lives in Porto"]


def test_relations_that_may_have_several_objects_coexist(store: Store) -> None:
    told(store, "Ana likes tea.", named(("Ana", "person"), ("tea", "thing")), related(("Ana", "likes", "tea"), many=True))
    told(store, "Ana likes jazz.", named(("Ana", "person"), ("jazz", "idea")), related(("Ana", "likes", "jazz"), many=True))
    assert len(edges(store, "Ana")) == 2


def test_unrelated_edges_never_retire_each_other(store: Store) -> None:
    """Graphiti's users lost 41% of their facts so."""
    for number in range(12):
        one, place = f"Person{number}", f"Town{number}"
        told(
            store,
            f"{one} lives in {place} and works in {place}.",
            named((one, "person"), (place, "place")),
            related((one, "lives in", place), (one, "works in", place)),
        )
    assert len(facts(store)) == 24
    assert not [state for _, state in store.memory().pages(history=True) if state.at is Place.RETIRED]


def test_what_is_over_is_closed_and_nothing_else(store: Store) -> None:
    told(store, "Ana lives in Porto.", *PORTO)
    told(store, "Ana does not live in Porto any more.", PORTO[0], related(("Ana", "lives in", "Porto"), over=True))
    assert edges(store, "Ana") == []
    assert facts(store, history=True) == ["Ana lives in Porto"]


def test_nothing_is_over_or_corrected_on_the_models_word_alone(store: Store) -> None:
    told(store, "Ana lives in Porto.", *PORTO)
    told(store, "Ana lives in Porto and loves it.", PORTO[0], related(("Ana", "lives in", "Porto"), over=True))
    assert edges(store, "Ana") == [("Ana", "lives in", "Porto")]
    began = store.clock()
    told(store, "Ana lives in Braga.", BRAGA[0], related(("Ana", "lives in", "Braga"), correction=True))
    assert edges(store, "Ana") == [("Ana", "lives in", "Braga")]
    assert edges(store, "Ana", at=began) == [("Ana", "lives in", "Porto")], "an update does not rewrite the past"


def test_as_of_and_as_known() -> None:
    clock = FakeClock(time=1_000_000.0, tick=0.001)
    with opened(clock) as store:
        told(store, "Ana lives in Porto.", *PORTO)
        first = clock.now
        clock.advance(10 * DAY)
        told(store, "Ana lives in Braga.", *BRAGA)
        second = clock.now
        clock.advance(10 * DAY)
        told(store, "No, Ana lives in Faro, and always did.", named(("Ana", "person"), ("Faro", "place")),
             related(("Ana", "lives in", "Faro"), correction=True))  # fmt: skip
        porto, braga, faro = (("Ana", "lives in", town) for town in ("Porto", "Braga", "Faro"))
        assert edges(store, "Ana", at=first - DAY) == []
        assert edges(store, "Ana", at=first + DAY) == [porto]
        assert edges(store, "Ana", at=second + DAY) == [faro], "by all that is known now"
        assert edges(store, "Ana", at=second + DAY, known=second + DAY) == [braga], "as it was known then"
        assert edges(store, "Ana", at=second + DAY, known=first + DAY) == [porto]
        assert edges(store, "Ana", known=first - DAY) == []
        assert edges(store, "Ana") == [faro]


def test_an_open_contradiction_is_marked_on_both_sides(store: Store) -> None:
    told(store, "Ana lives in Porto. Ana lives in Braga.", named(("Ana", "person"), ("Porto", "place"), ("Braga", "place")),
         related(("Ana", "lives in", "Porto"), ("Ana", "lives in", "Braga")))  # fmt: skip
    one, other = neighbourhood(store, "Ana")
    assert (one.contested, other.contested) == ((other.address,), (one.address,))
    assert {one.object, other.object} == {"Porto", "Braga"}


def test_depth_goes_on_to_the_neighbours(store: Store) -> None:
    told(store, "Ana lives in Porto.", *PORTO)
    told(
        store, "Porto is in Portugal.", named(("Porto", "place"), ("Portugal", "place")), related(("Porto", "is in", "Portugal"))
    )
    assert len(edges(store, "Ana")) == 1
    assert len(edges(store, "Ana", depth=2)) == 2
    assert len(edges(store, "Ana", depth=9, limit=1)) == 1
    with pytest.raises(KernelError):
        neighbourhood(store, "Ana", depth=0)


def test_a_circle_of_edges_ends(store: Store) -> None:
    told(store, "Ana knows Bea. Bea knows Ana.", named(("Ana", "person"), ("Bea", "person")),
         related(("Ana", "knows", "Bea"), ("Bea", "knows", "Ana")))  # fmt: skip
    assert len(edges(store, "Ana", depth=50)) == 2


def test_a_first_name_becomes_the_only_person_who_has_it(store: Store) -> None:
    told(
        store,
        "Ana Silva lives in Porto.",
        named(("Ana Silva", "person"), ("Porto", "place")),
        related(("Ana Silva", "lives in", "Porto")),
    )
    told(store, "Ana works for Acme.", named(("Ana", "person"), ("Acme", "organisation")), related(("Ana", "works for", "Acme")))
    assert ("Ana", "works for", "Acme") in edges(store, "Ana Silva")
    assert ("Ana Silva", "lives in", "Porto") in edges(store, "Ana")


@pytest.mark.parametrize("others", [("Ana Silva", "Ana Costa"), ("Anabela Silva",)])
def test_a_name_that_may_be_two_people_is_merged_with_neither(store: Store, others: tuple[str, ...]) -> None:
    for other in others:
        told(
            store, f"{other} knows Bea.", named((other, "person"), ("Bea", "person")), related((other, "knows", "Bea"), many=True)
        )
    told(store, "Ana works for Acme.", named(("Ana", "person"), ("Acme", "organisation")), related(("Ana", "works for", "Acme")))
    assert edges(store, "Ana") == [("Ana", "works for", "Acme")]


def test_a_first_name_is_nobodys_again_when_a_second_person_has_it(store: Store) -> None:
    def knows(name: str) -> tuple[str, str]:
        return named((name, "person"), ("Bea", "person")), related((name, "knows", "Bea"), many=True)

    bus = named(("Ana", "person"), ("bus", "thing")), related(("Ana", "drives", "bus"))
    told(store, "Ana Silva knows Bea.", *knows("Ana Silva"))
    told(store, "Ana lives in Porto.", *PORTO)
    assert ("Ana", "lives in", "Porto") in edges(store, "Ana Silva")
    told(store, "Ana Silva knows Bea well.", *knows("Ana Silva"))
    assert ("Ana", "lives in", "Porto") in edges(store, "Ana Silva")
    told(store, "Ana Costa knows Bea.", *knows("Ana Costa"))
    told(store, "Ana drives a bus.", *bus)
    assert edges(store, "Ana Silva") == [("Ana Silva", "knows", "Bea")]
    assert edges(store, "Ana Costa") == [("Ana Costa", "knows", "Bea")]
    assert edges(store, "Ana") == [("Ana", "drives", "bus"), ("Ana", "lives in", "Porto")]


def test_places_are_never_merged_by_their_first_word(store: Store) -> None:
    told(store, "New York Times is in New York.", named(("New York Times", "organisation"), ("New York", "place")),
         related(("New York Times", "is in", "New York")))  # fmt: skip
    assert not [edge for edge in edges(store, "New York") if edge[1] == ALIAS]


def test_a_merge_by_hand_and_its_undoing(store: Store) -> None:
    told(store, "Bob lives in Porto.", named(("Bob", "person"), ("Porto", "place")), related(("Bob", "lives in", "Porto")))
    told(store, "Robert knows Bea.", named(("Robert", "person"), ("Bea", "person")), related(("Robert", "knows", "Bea")))
    memory = store.memory()
    address = merge(memory.collection, "Bob", "Robert")
    assert ("Bob", "lives in", "Porto") in edges(store, "Robert")
    assert [state.at for _, state in entities(memory.collection, "Bob")] == [Place.RETIRED]
    told(store, "Bob drives a bus.", named(("Bob", "person"), ("bus", "thing")), related(("Bob", "drives", "bus")))
    assert ("Bob", "drives", "bus") in edges(store, "Robert"), "a name that was merged stays merged"
    unmerge(memory.collection, address)
    assert ("Bob", "lives in", "Porto") not in edges(store, "Robert")
    assert edges(store, "Bob")[-1] == ("Bob", "lives in", "Porto")
    with pytest.raises(KernelError):
        unmerge(memory.collection, memory.pages(history=True).__next__()[0].address)
    with pytest.raises(KernelError):
        merge(memory.collection, "Bob", "Nobody")


def test_without_a_model_the_plain_extractor_gives_the_edges(store: Store) -> None:
    store.session("s").append({"role": "user", "content": "I live in Porto."})
    store.memory().learn("s", policy=Graph(extract="plain"))
    assert [(edge.subject, edge.object) for edge in neighbourhood(store, "Porto")] == [("user", "Porto")]
    store.session("s").append({"role": "user", "content": "I moved to Braga."})
    store.memory().learn("s", policy=Graph())
    assert edges(store, "Porto") == []
    assert [edge.object for edge in neighbourhood(store, "I")] == ["Braga"]
    assert [edge.object for edge in neighbourhood(store, "user")] == ["Braga"]


def test_an_edge_goes_with_each_message_that_its_names_are_from(store: Store) -> None:
    """A model may name any message as the one that says it."""
    session = store.session("s")
    session.append({"role": "user", "content": "My sister is Ana."}, {"role": "assistant", "content": "Noted."})
    session.append({"role": "user", "content": "She moved to Zanzibar."}, {"role": "assistant", "content": "I see."})
    replies = [named(("Ana", "person"), ("Zanzibar", "place")), related(("Ana", "lives in", "Zanzibar"))] * 2
    store.memory().learn("s", policy=Graph(), model=Scripted(replies))
    assert facts(store)
    session.forget("p3")
    assert not any(
        "Zanzibar" in store.memory().collection.contents.text(page.id) for page, _ in store.memory().pages(history=True)
    )


def test_a_first_name_is_no_longer_whom_a_forgotten_message_said(store: Store) -> None:
    told(store, "Ana Zanzibar lives in Porto.", named(("Ana Zanzibar", "person"), ("Porto", "place")),
         related(("Ana Zanzibar", "lives in", "Porto")), session="one")  # fmt: skip
    told(store, "Ana works at Acme.", named(("Ana", "person"), ("Acme", "organisation")),
         related(("Ana", "works at", "Acme")), session="two")  # fmt: skip
    assert any("Zanzibar" in fact and "Porto" not in fact for fact in facts(store))
    store.session("one").forget("p1")
    assert not any(
        "Zanzibar" in store.memory().collection.contents.text(page.id) for page, _ in store.memory().pages(history=True)
    )


def test_forgetting_a_message_takes_the_edges_and_the_names_that_only_they_had(store: Store) -> None:
    told(store, "Ana lives in Porto.", *PORTO)
    told(store, "Ana knows Bea.", named(("Ana", "person"), ("Bea", "person")), related(("Ana", "knows", "Bea")))
    store.session("s").forget("p1")
    assert edges(store, "Ana") == [("Ana", "knows", "Bea")]
    assert entities(store.memory().collection, "Porto") == []
    assert len(entities(store.memory().collection, "Ana")) == 1


@pytest.mark.parametrize("options", [{"extract": "both"}, {"tokens": 0}, {"tries": 0}, {"timeout": 0.0}])
def test_options_that_mean_nothing(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Graph(**options)


NAMES = strategies.sampled_from(["Ana", "ana", "Porto", "user", "I", "", "🎸", "Zoe", "Ana Porto", '") or (', "x" * 200])
WORDS = strategies.sampled_from(["lives in", "is another name of", "likes", "", "\n", "is"])
REPLIES = strategies.one_of(
    strategies.text(max_size=20),
    strategies.lists(
        strategies.fixed_dictionaries({"name": NAMES}, optional={"kind": WORDS | strategies.just("person")}), max_size=4
    ).map(lambda found: json.dumps({"entities": found})),
    strategies.lists(
        strategies.fixed_dictionaries(
            {"subject": NAMES, "relation": WORDS, "object": NAMES},
            optional={"message": strategies.integers(-2, 3), "many": strategies.booleans(), "over": strategies.booleans()},
        ),
        max_size=4,
    ).map(lambda found: json.dumps({"relations": found})),
)


@settings(max_examples=40, deadline=None)
@given(strategies.lists(REPLIES, max_size=8))
def test_whatever_a_model_replies_each_fact_has_its_origin_and_its_entities(replies: list[str]) -> None:
    with opened() as store:
        session = store.session("s")
        for text in ("Ana and Zoe live in Porto, Ana Porto likes it 🎸.", "I like Porto."):
            session.append({"role": "user", "content": text}, {"role": "assistant", "content": "Good."})
            store.memory().learn("s", policy=Graph(), model=Scripted(replies))
        memory = store.memory()
        for page, _ in memory.pages(history=True, proposed=True):
            assert page.claim is not None
            assert page.claim.subject
            if page.kind is Kind.FACT:
                rows = memory.collection.backend.read((memory.collection.number, source) for source in page.sources)
                assert {source.kind for source, _ in rows.values()} == {Kind.ENTITY}
                assert page.cites
            else:
                assert memory.collection.backend.citing(memory.collection.number, [page.id])


def test_what_was_only_proposed_is_no_edge_as_of_then() -> None:
    clock = FakeClock()
    with opened(clock) as store:
        session, memory = store.session("s"), store.memory("ana")
        session.append({"role": "user", "content": "hello"})
        cites = ((session.number, 1),)
        for town in ("Porto", "Braga"):
            named = Claim(subject="Ana", relation="likes", object=town, many=True)
            memory.collection.apply(Add(text=f"Ana likes {town}.", claim=named, cites=cites), policy="graph", tainted=True)
        clock.advance(DAY)
        proposed = clock.now
        clock.advance(DAY)
        memory.accept("f1")
        memory.collection.apply(Retire((-2,)))
        clock.advance(DAY)
        for known in (None, clock.now):
            assert [edge.object for edge in neighbourhood(store, "Ana", user="ana", known=known)] == ["Porto"]
        for at in (proposed, clock.now):
            assert neighbourhood(store, "Ana", user="ana", at=at, known=proposed) == []


def test_without_a_model_an_exchange_that_says_nothing_stops_nothing(store: Store) -> None:
    talk = store.session("s")
    for text in ("What is a drum memory?", "I live in Porto."):
        talk.append({"role": "user", "content": text}, {"role": "assistant", "content": "I see."})
    learned = store.memory().learn("s", policy=Graph())
    assert (learned.failed, bool(learned.stored)) == ((), True)
    assert ("user", "lives in", "Porto") in edges(store, "user")


def test_without_a_model_one_person_is_one_entity(store: Store) -> None:
    talk = store.session("s")
    for text in ("My sister lives in Leeds.", "My sister's name is Rosa.", "My sister Rosa is a nurse."):
        talk.append({"role": "user", "content": text}, {"role": "assistant", "content": "I see."})
    store.memory().learn("s", policy=Graph())
    reached = edges(store, "user", depth=2)
    assert {(relation, thing) for _, relation, thing in reached} >= {("lives in", "Leeds"), ("is", "a nurse")}
    assert ("Rosa", ALIAS, "user's sister") in reached

"""Facts by a model: exact sequences of operations, with guards against what a model invents; bad replies are failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Unavailable
from kilburn.event import Act
from kilburn.memory.extraction import SYSTEM
from kilburn.memory.learning import Learned
from kilburn.memory.words import agreement
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Finish, Reply
from kilburn.testing import FakeClock, Scripted

NOVEMBER_22 = 1795346400.0  # a Sunday, 2026


def opened() -> Store:
    return Store(Sqlite(":memory:"), Budget(8000), "fifo", tokenizer="chars/4", clock=FakeClock(NOVEMBER_22))


@pytest.fixture
def store() -> Iterator[Store]:
    with opened() as made:
        yield made


def fact(text: str, message: int = 1, claim: str = "", **more: Any) -> dict[str, Any]:
    subject, relation, thing = claim.split(" | ") if claim else ("", "", "")
    return {
        "message": message,
        "text": text,
        "subject": subject,
        "relation": relation,
        "object": thing,
        "correction": False,
        **more,
    }


def facts(*listed: dict[str, Any]) -> str:
    return json.dumps({"facts": list(listed)})


def op(name: str, number: int = 0) -> str:
    return json.dumps({"op": name, "id": number})


def said(store: Store, text: str, reply: str = "ok") -> None:
    store.session("a").append({"role": "user", "content": text}, {"role": "assistant", "content": reply})


def run(store: Store, *replies: Any, policy: str = "facts(summary=False)") -> tuple[Learned, Scripted]:
    model = Scripted(replies)
    learned = store.memory().learn("a", policy, model)
    assert not model.left
    return learned, model


def texts(store: Store, **options: Any) -> list[str]:
    memory = store.memory()
    return [memory.collection.contents.text(page.id) for page, _ in memory.pages(**options)]


def asked(model: Scripted, place: int) -> str:
    return "\n".join(str(message["content"]) for message in model.requests[place].messages)


def test_the_first_fact_is_added_without_a_decision(store: Store) -> None:
    said(store, "I live in Porto with my dog Biscuit")
    learned, model = run(store, facts(fact("user lives in Porto"), fact("user has a dog named Biscuit")))
    assert learned.stored == ("f1", "f2")
    assert len(model.requests) == 1
    assert texts(store) == ["user lives in Porto", "user has a dog named Biscuit"]


def test_one_decision_a_fact_with_small_numbers_for_what_is_known(store: Store) -> None:
    said(store, "I love hiking in the hills")
    run(store, facts(fact("user loves hiking in the hills")))
    said(store, "Now I love hiking at the coast instead of the hills")
    learned, model = run(store, facts(fact("user loves hiking at the coast instead of the hills")), op("UPDATE", 1))
    assert "1. user loves hiking in the hills" in asked(model, 1)
    schema = model.requests[1].schema
    assert schema is not None
    assert schema["properties"]["id"] == {"enum": [0, 1]}
    assert (learned.stored, learned.retired) == (("f2",), ("f1",))
    assert texts(store) == ["user loves hiking at the coast instead of the hills"]


def test_add_keeps_both(store: Store) -> None:
    said(store, "I love hiking")
    run(store, facts(fact("user loves hiking")))
    said(store, "I love hiking boots too")
    learned, _ = run(store, facts(fact("user loves hiking boots")), op("ADD"))
    assert learned.stored == ("f2",)
    assert len(texts(store)) == 2


def test_noop_is_followed_where_a_known_fact_says_it(store: Store) -> None:
    said(store, "I love long hikes in the hills")
    run(store, facts(fact("user loves long hikes in the hills")))
    said(store, "long hikes in hills are what I love")
    learned, _ = run(store, facts(fact("user loves hikes in hills that are long")), *[])
    assert learned == Learned(memory="@memory", unchanged=1)
    said(store, "I bought a canoe for the hills")
    learned, _ = run(store, facts(fact("user bought a canoe for the hills")), op("NOOP", 1))
    assert learned == Learned(memory="@memory", unchanged=1), "the model's word counts where a word is common to both"
    said(store, "I bought a canoe, and the hills are dull")
    learned, _ = run(store, facts(fact("user bought a canoe")))
    assert learned.stored == ("f2",), "what has no word of it is not compared with it"


def test_delete_is_followed_where_the_fact_says_that_it_ended(store: Store) -> None:
    said(store, "I study German every evening")
    run(store, facts(fact("user studies German every evening")))
    said(store, "I stopped to study German")
    learned, _ = run(store, facts(fact("user stopped to study German")), op("DELETE", 1))
    assert learned.retired == ("f1",)
    assert texts(store) == ["user stopped to study German"]
    assert texts(store, history=True) == ["user studies German every evening", "user stopped to study German"]


@pytest.mark.parametrize("decision", [op("DELETE", 1), op("UPDATE", 1)])
def test_nothing_is_retired_on_the_models_word_alone(store: Store, decision: str) -> None:
    said(store, "My sister Maria works in Braga")
    run(store, facts(fact("Maria works in Braga")))
    said(store, "I bought a red bicycle in Braga")
    learned, _ = run(store, facts(fact("user bought a red bicycle in Braga")), decision)
    assert (learned.stored, learned.retired) == (("f2",), ())
    assert len(texts(store)) == 2


@pytest.mark.parametrize(
    "decision",
    [op("UPDATE", 7), op("UPDATE", -1), op("DELETE", 0), op("EXPLODE", 1), '{"op": "UPDATE"}', op("NOOP", 99)],
)
def test_an_invented_id_or_operation_keeps_both(store: Store, decision: str) -> None:
    said(store, "I love hiking in hills")
    run(store, facts(fact("user loves hiking in hills")))
    said(store, "I love hiking at dawn")
    learned, _ = run(store, facts(fact("user loves hiking at dawn")), decision)
    assert (learned.stored, learned.retired) == (("f2",), ())


def test_a_relation_with_one_object_is_updated_whatever_the_model_would_say(store: Store) -> None:
    said(store, "I live in Porto")
    run(store, facts(fact("user lives in Porto", claim="user | lives in | Porto")))
    said(store, "I live in Lisbon now")
    learned, model = run(store, facts(fact("user lives in Lisbon", claim="user | lives in | Lisbon")))
    assert len(model.requests) == 1
    assert (learned.stored, learned.retired) == (("f2",), ("f1",))


def test_unrelated_facts_of_one_subject_do_not_retire_each_other(store: Store) -> None:
    said(store, "I like tea")
    run(store, facts(fact("user drinks tea", claim="user | drinks | tea"), fact("user likes tea", claim="user | likes | tea")))
    said(store, "I like coffee")
    learned, _ = run(store, facts(fact("user likes coffee", claim="user | likes | coffee")))
    assert learned.retired == ()


def test_facts_that_contradict_in_one_message_are_both_kept(store: Store) -> None:
    said(store, "I live in Porto and I live in Lisbon")
    learned, _ = run(
        store,
        facts(
            fact("user lives in Porto", claim="user | lives in | Porto"),
            fact("user lives in Lisbon", claim="user | lives in | Lisbon"),
        ),
    )
    assert len(learned.stored) == 2


def test_days_are_those_of_the_message(store: Store) -> None:
    said(store, "The dentist is next Tuesday at 3pm")
    _, model = run(store, facts(fact("user sees the dentist next Tuesday at 3pm")))
    assert "said on Sunday 2026-11-22" in asked(model, 0)
    assert texts(store) == ["user sees the dentist on 2026-11-24 at 3pm"]


@pytest.mark.parametrize(
    ("text", "claim", "kept"),
    [
        ("user lives in Porto", "user | lives in | Porto", True),
        ("user lives in the city of Porto", "user | lives in | Porto", False),
        ("user lives in Porto", "user | lives in Porto | Porto", False),
        ("user lives in Porto", "user | works at | Porto", False),
        ("user lives in Porto", "user | lives in | Rome", False),
        ("user lives in Porto", "user | | Porto", False),
    ],
)
def test_the_parts_of_a_fact_are_those_of_its_text(store: Store, text: str, claim: str, kept: bool) -> None:
    said(store, "I live in Porto, the city of bridges")
    run(store, facts(fact(text, claim=claim.replace("| |", "|  |"), correction=True)))
    page, _ = store.memory().collection.read(-1)
    assert (page.claim is not None) == kept
    assert page.claim is None or not page.claim.correction, "nothing in the message corrects anything"


@pytest.mark.parametrize(
    "invented",
    [
        "John Doe lives in New York",
        "user lives in Porto since 1999",
        "You keep the long-term memory of an assistant",
        "List the facts that the messages state",
        "",
        "Porto",
        "Does user live in Porto?",
        "I hope you live well in Porto",
        "user " + "lives in Porto " * 60,
    ],
)
def test_what_nobody_said_is_no_fact(store: Store, invented: str) -> None:
    said(store, "I live in Porto")
    learned, _ = run(store, facts(fact(invented)))
    assert learned == Learned(memory="@memory")


def test_a_fact_cites_every_message_that_its_words_are_from(store: Store) -> None:
    said(store, "My sister is called Filomena", "A nice name!")
    said(store, "She works as a carpenter")
    learned, _ = run(store, facts(), facts(fact("Filomena works as a carpenter")))
    page, _ = store.memory().collection.read(-1)
    assert page.cites == ((1, 3), (1, 1))
    assert page.trust is Trust.USER
    store.session("a").forget("p1")
    assert texts(store) == []
    assert learned.stored == ("f1",)


GOOD = facts(fact("user lives in Porto"))
BAD = [
    "",
    "   ",
    "no JSON at all",
    GOOD[:40],
    GOOD[:-1],
    '{"facts": "none"}',
    '{"facts": [1, 2]}',
    '{"facts": null}',
    '{"other": []}',
    "[]",
    "null",
    SYSTEM,
    "x" * 1_000_000,
    '{"facts": [' * 5000,
    '{"facts": [{"text": "\\ud800 lives"}]}',
    Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=GOOD),)), finish=Finish.LENGTH),
    Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", call="c", name="f"),))),
    Unavailable("down"),
    ValueError("odd"),
]


@pytest.mark.parametrize("policy", ["facts", "additive"])
@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_reply_is_a_failure_and_never_no_facts(store: Store, bad: Any, policy: str) -> None:
    said(store, "I live in Porto")
    learned = store.memory().learn("a", policy, Scripted([bad, bad]))
    assert learned.failed == ("p1-p2",)
    assert learned.stored == ()
    assert texts(store) == []
    (note,) = [event for event in store.memory().collection.ledger.events() if event.act is Act.NOTE]
    assert note.data["outcome"] != "done"
    assert store.memory().learn("a", policy, Scripted([GOOD])).stored == ("f1",)


@pytest.mark.parametrize("bad", [GOOD[:-1], "", "no JSON"])
def test_it_asks_once_more(store: Store, bad: str) -> None:
    said(store, "I live in Porto")
    learned, _ = run(store, bad, GOOD)
    assert learned.stored == ("f1",)


def test_what_a_fact_asks_is_cut_off(store: Store) -> None:
    said(store, "I'm vegetarian, can you suggest dinner?")
    run(store, facts(fact("user is vegetarian, can you suggest dinner?"), fact("can you suggest dinner?")))
    assert texts(store) == ["user is vegetarian"]


def test_the_first_person_is_the_user_and_what_the_assistant_notes_is_no_fact(store: Store) -> None:
    said(store, "My brother Henrik is allergic to peanuts and I'm vegetarian", "Noted: no peanuts.")
    run(store, facts(fact("My brother Henrik is allergic to peanuts"), fact("I'm vegetarian")))
    assert texts(store) == ["user's brother Henrik is allergic to peanuts", "user is vegetarian"]
    said(store, "thanks", "Noted: no peanuts.")
    run(store, facts(fact("Noted: no peanuts.", message=2, claim="assistant | noted | peanuts")))
    assert len(texts(store)) == 2


def test_a_fence_around_the_json_does_no_harm(store: Store) -> None:
    said(store, "I live in Porto")
    assert run(store, f"```json\n{GOOD}\n```")[0].stored == ("f1",)


def test_a_failed_decision_keeps_both(store: Store) -> None:
    said(store, "I love hiking in hills")
    run(store, facts(fact("user loves hiking in hills")))
    said(store, "I love hiking at dawn")
    learned, _ = run(store, facts(fact("user loves hiking at dawn")), "", "no")
    assert learned.stored == ("f2",)
    assert learned.failed == ()


@pytest.mark.parametrize(
    "text", ["我住在波尔图 🎉", 'I live in ") or true or ("', "'; DROP TABLE page; --", "x" * 1_000_000, "\u202e\x07"]
)
@pytest.mark.parametrize("policy", ["facts", "additive", "plain"])
def test_any_text_can_be_learned_from(store: Store, text: str, policy: str) -> None:
    said(store, text)
    model = Scripted([facts(fact(text[:200])), op("ADD")])
    store.memory().learn("a", policy, model)
    for request in model.requests:
        assert len(str(request.messages)) < 50_000
    for found in texts(store):
        assert policy == "plain" or found.replace("user", "I") in " ".join(text.split())


def test_a_running_summary_is_kept_and_superseded(store: Store) -> None:
    for n in range(12):
        said(store, f"This is message {n} about boats", "I see")
    replies: list[Any] = []
    for n in range(12):
        replies.append(facts())
        if n in (4, 9):
            replies.append(f"They spoke of boats, {n}.")
    model = Scripted(replies)
    learned = store.memory().learn("a", "facts", model)
    assert (learned.failed, model.left) == ((), 0)
    assert texts(store) == ["Summary of session a: They spoke of boats, 9."]
    assert "They spoke of boats, 4." in asked(model, 6)
    page, _ = store.memory().collection.read(-2)
    assert page.sources == (-1,)
    store.session("a").forget("p1")
    assert texts(store, history=True) == []


def test_a_summary_that_fails_loses_no_fact(store: Store) -> None:
    likes = ["loves tea", "owns a boat", "plays chess", "speaks Greek", "collects stamps"]
    for like in likes:
        said(store, f"I say: he {like}")
    model = Scripted([*(facts(fact(f"user {like}")) for like in likes), ""])
    learned = store.memory().learn("a", "facts", model)
    assert len(learned.stored) == 5
    assert learned.failed == ()


def test_additive_only_adds_and_says_nothing_twice(store: Store) -> None:
    said(store, "I live in Porto")
    run(store, GOOD, policy="additive")
    said(store, "I live in Lisbon, and I live in Porto")
    reply = facts(fact("user lives in Lisbon"), fact("user lives in Porto"), fact("User lives in Lisbon."))
    learned, model = run(store, reply, policy="additive")
    assert "user lives in Porto" in asked(model, 0)
    assert (learned.stored, learned.retired, learned.unchanged) == (("f2",), (), 1)
    assert texts(store) == ["user lives in Porto", "user lives in Lisbon"]


def test_five_facts_in_three_wordings() -> None:
    wordings = [
        ["user lives in Porto", "user works at Galp", "user has a dog called Biscuit", "user likes green tea", "user is 34"],
        ["user is living in Porto", "user works at Galp now", "user has the dog Biscuit", "user likes tea, green", "user is 34"],
        [
            "Porto is where user lives",
            "user works for Galp",
            "Biscuit is the dog of user",
            "user likes green tea",
            "user: 34 years",
        ],
    ]
    for policy in ("facts(summary=False)", "additive"):
        with opened() as store:
            for wording in wordings:
                said(store, ". ".join(wording))
                replies: list[Any] = [facts(*(fact(text) for text in wording)), *[op("ADD")] * 10]
                store.memory().learn("a", policy, Scripted(replies))
            # The model always says ADD; so this is what the guards alone do. 15 statements, 5 facts.
            assert len(texts(store)) <= 7, texts(store)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [("user lives in Porto", "user is living in Porto", 1.0), ("a", "b c", 0.0), ("", "x", 0.0), ("red bike", "blue bike", 0.5)],
)
def test_agreement(one: str, other: str, expected: float) -> None:
    assert agreement(one, other) == agreement(other, one) == expected


def test_the_opposite_of_a_known_fact_is_not_taken_for_it(store: Store) -> None:
    said(store, "I like jazz and I live in Porto")
    run(store, facts(fact("user likes jazz"), fact("user lives in Porto")))
    said(store, "I do not like jazz. I do not live in Porto.")
    learned, _ = run(
        store, facts(fact("user does not like jazz"), fact("user does not live in Porto")), op("DELETE", 1), op("DELETE", 1)
    )
    assert (learned.stored, learned.retired, learned.unchanged) == (("f3", "f4"), ("f1", "f2"), 0)
    assert texts(store) == ["user does not like jazz", "user does not live in Porto"]


@pytest.mark.parametrize("invented", ["user does not live in Porto", "user doesn't live in Porto", "user never lived in Porto"])
def test_the_opposite_of_what_was_said_is_no_fact(store: Store, invented: str) -> None:
    said(store, "I live in Porto")
    learned, _ = run(store, facts(fact(invented)))
    assert learned.stored == ()


@pytest.mark.parametrize(
    ("text", "kept", "invented"),
    [
        ("私はポルトに住んでいます。", "userはポルトに住んでいます", "userはリスボンで働いています"),
        ("我住在北京，在谷歌工作。", "user住在北京", "user是上海的医生"),
        ("저는 서울에 살아요", "user 서울에 살아요", "user 부산에서 일합니다"),
    ],
)
def test_facts_in_scripts_without_spaces(store: Store, text: str, kept: str, invented: str) -> None:
    said(store, text)
    learned, _ = run(store, facts(fact(kept), fact(invented)))
    assert texts(store) == [kept]
    assert learned.stored == ("f1",)


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("user went to Rome on Friday", "user went to Rome on 2026-11-20"),
        ("user visited Ana on Monday", "user visited Ana on 2026-11-16"),
        ("user's flight is scheduled on Friday", "user's flight is scheduled on 2026-11-27"),
        ("user has a meeting on Tuesday", "user has a meeting on 2026-11-24"),
    ],
)
def test_a_weekday_is_before_or_after_by_the_verb(store: Store, text: str, kept: str) -> None:
    said(store, text.replace("user's", "my").replace("user", "I"))
    run(store, facts(fact(text)))
    assert texts(store) == [kept]

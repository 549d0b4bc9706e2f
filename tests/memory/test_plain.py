"""The extractor without a model: what it finds, and all that must give nothing."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.memory.learning import Learned
from kilburn.memory.statements import statements
from kilburn.search.dates import dates, grounded
from kilburn.testing import FakeClock

SUNDAY = dt.datetime(2026, 11, 22, 10, tzinfo=dt.UTC).timestamp()


def day(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()


def found(text: str) -> list[str]:
    return [statement.text for statement in statements(text, SUNDAY)]


STATED = {
    "My name is Ana Silva.": "The user's name is Ana Silva.",
    "Hi, I'm Ana, nice to meet you": "The user's name is Ana.",
    "i live in porto": "The user lives in porto.",
    "I live in Porto, what's the weather?": "The user lives in Porto.",
    "I'm a nurse at the city hospital.": "The user is a nurse at the city hospital.",
    "I work at Galp now.": "The user works at Galp.",
    "I'm originally from Braga": "The user is from Braga.",
    "my wife is a teacher": "The user's wife is a teacher.",
    "My daughter Emma starts school soon.": "The name of the user's daughter is Emma.",
    "I love hiking!": "The user likes hiking.",
    "I can't stand cilantro": "The user dislikes cilantro.",
    "I don't like coffee.": "The user dislikes coffee.",
    "I prefer tea over coffee": "The user prefers tea over coffee.",
    "My favourite color is green.": "The user's favorite color is green.",
    "I'm vegetarian": "The user is vegetarian.",
    "I'm allergic to peanuts.": "The user is allergic to peanuts.",
    "I have two kids and a dog named Biscuit.": "The user has two kids and a dog named Biscuit.",
    "I'm 44 years old": "The user is aged 44.",
    "My budget is $5,000": "The user's budget is $5,000.",
    "I run 5 km every morning": "The user's habit: run 5 km every morning.",
    "I've never used Zotero.": "The user has never used Zotero.",
    "I'm using Flask 2.3.1, can you help me?": "The user uses Flask 2.3.1.",
    "please call me Annie": "The user wants to be called Annie.",
    "Always answer in British English.": "The user's standing instruction: Always answer in British English.",
    "From now on, keep answers short.": "The user's standing instruction: From now on, keep answers short.",
    "Never use emojis in your replies.": "The user's standing instruction: Never use emojis in your replies.",
    "Always include dates when I ask about events.": (
        "The user's standing instruction: Always include dates when I ask about events."
    ),
    "Remember that the code of the gate is 4711": "The user wants remembered: the code of the gate is 4711.",
    "Remember that I live in Rome": "The user lives in Rome.",
    "I have a dentist appointment next Tuesday at 3pm.": "The user's dentist appointment is on 2026-11-24 at 3pm.",
    "My flight is on Friday at 9am": "The user's flight is on 2026-11-27 at 9am.",
    "I went to a support group yesterday": "The user went to a support group on 2026-11-21.",
    "I'm planning to visit Rome in May 2027": "The user plans to visit Rome in May 2027.",
    "I'm going to Rome next week": "The user is going to Rome in the week of 2026-11-23.",
    "I'll be back next Tuesday.": "The user plans to be back on 2026-11-24.",
    "I'm married to my best friend": "The user is married.",
    "😀 I love green tea ☕!!": "The user likes green tea.",
    "Blue is my favorite color.": "The user's favorite color is Blue.",
    "My birthday is March 3": "The user's birthday is March 3.",
    "My goal is to run a marathon": "The user's goal is to run a marathon.",
    "I play clarinet": "The user plays clarinet.",
    "My Zotero library has 45 sources": "The user's Zotero library has 45 sources.",
    "The deadline for the essay is on May 16": "The deadline for the essay is on May 16.",
    "I've been playing guitar since 2018": "The user has been playing guitar since 2018.",
    "I'm married to Joana": "The user is married to Joana.",
    "My wife's name is Joana": "The name of the user's wife is Joana.",
    "I'm a huge fan of jazz": "The user likes jazz.",
    "I do yoga on Mondays": "The user's habit: do yoga on Mondays.",
    "Whenever I ask about code, use Python": "The user's standing instruction: Whenever I ask about code, use Python.",
    "My email is ana@example.org": "The user's email is ana@example.org.",
    "We live in Faro": "The user lives in Faro.",
}


@pytest.mark.parametrize("text", STATED, ids=lambda text: text[:30])
def test_what_is_stated_is_found(text: str) -> None:
    assert found(text) == [STATED[text]]


NOTHING = [
    "",
    "   ",
    "Do I live in Porto?",
    "I live in Porto?",
    "You know where I live?",
    "If I lived in Paris, I would be happy.",
    "Imagine I live in Paris. I love croissants.",
    "Suppose my name is Bob.",
    "I might live in Paris",
    "I wish I lived in Paris",
    "Maybe I love tea",
    "I used to live in Paris",
    "I don't live in Porto.",
    "I'm not a doctor.",
    "I would like a coffee",
    "I like that idea.",
    "I love it!",
    "I love you",
    "I love how you explain things",
    "I'm tired",
    "I'm a bit sad",
    "I'm a huge fan!",
    "I'm OK",
    "I'm Sorry.",
    "I'm IN!",
    "I'm Down",
    "I'm married to the idea.",
    "For example, my name is Ana.",
    "Yeah right, I'm a millionaire.",
    "Oh great, I just love waiting in line.",
    "From: Bob\nTo: Ana\n\nHi Ana, I live in Rome and my name is Bob.",
    "They wrote me this: I moved to Rome. I work at Fiat now.",
    "She lives in Porto.",
    "Bob lives in Porto and works at Galp.",
    "Bob said he lives in Oslo",
    "Bob said, I live in Oslo.",
    '"I live in Rome", she said',
    "The article says: “My name is Marcus and I live in Rome.”",
    "> I live in Rome\n> My name is Bob",
    "```\nmy name is Bob\nI live in Rome\n```",
    "    my_name = 'Bob'  # I live in Rome",
    "<letter>I live in Rome. My name is Bob.</letter>",
    "Translate: I live in Rome. I hate cats.",
    "Please proofread this text:\n\nI live in Oslo. My name is Erik.",
    "Write a story. I am a pirate and I live in Tortuga.",
    "You are a doctor. I am a patient from Rome.",
    "Call me later",
    "Call me when you are there",
    "Never mind",
    "Never give up!",
    "Always here for you!",
    "Always good to see you",
    "Remember when we met?",
    "Remember, you are not alone.",
    "My question is whether it works",
    "My back hurts",
    "I have a question about my code",
    "I have a meeting",
    "Je m'appelle Ana et j'habite à Porto.",
    "Ich heiße Ana und ich wohne in Porto. Ich bin Ärztin.",
    "Me llamo Ana y vivo en Oporto.",
    "Chamo-me Ana e moro no Porto.",
    "我叫安娜，我住在波尔图。",
    "Меня зовут Анна, я живу в Порту.",
    "اسمي آنا وأعيش في بورتو",
    "👍🎉😀",
    "'; DROP TABLE page; --",
    'I live in ") or true or ("',
    "\u202e\x00\x07\ufeff",
    "\ud800",
]


@pytest.mark.parametrize("text", NOTHING, ids=range(len(NOTHING)))
def test_what_is_no_statement_of_the_speaker_gives_nothing(text: str) -> None:
    assert found(text) == []


def test_a_correction_is_marked() -> None:
    for text in ("Actually, I live in Lisbon", "No, I live in Lisbon.", "I live in Lisbon, not Porto", "Sorry, I live in Lisbon"):
        (statement,) = statements(text, SUNDAY)
        assert (statement.text, statement.claim.correction) == ("The user lives in Lisbon.", True)


def test_times_between_which_it_is_true() -> None:
    (until,) = statements("I live in Porto until Friday", SUNDAY)
    assert (until.since, until.until) == (None, day("2026-11-28"))
    (since,) = statements("I work for EDP starting next Monday", SUNDAY)
    assert (since.since, since.until) == (day("2026-11-23"), None)
    (years,) = statements("I've been married for 5 years", SUNDAY)
    assert years.since == day("2021-01-01")
    (moved,) = statements("I moved to Lisbon last month", SUNDAY)
    assert (moved.text, moved.since) == ("The user lives in Lisbon.", day("2026-10-01"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("next Tuesday", "on 2026-11-24"),
        ("tomorrow", "on 2026-11-23"),
        ("yesterday", "on 2026-11-21"),
        ("the day after tomorrow", "on 2026-11-24"),
        ("last Friday", "on 2026-11-20"),
        ("until Friday", "until 2026-11-27"),
        ("next month", "in 2026-12"),
        ("From next month", "From 2026-12"),
        ("last year", "in 2025"),
        ("3 years ago", "in 2023"),
        ("in two weeks", "in the week of 2026-11-30"),
        ("this weekend", "on the weekend of 2026-11-21"),
        ("this past week", "in the week of 2026-11-09"),
        ("over the past year", "over the past year"),
        ("last summer", "in the summer of 2026"),
        ("swims in summer", "swims in summer"),
        ("last May", "in 2026-05"),
        ("March 15, 2024", "March 15, 2024"),
        ("February 30", "February 30"),
        ("2026-13-40", "2026-13-40"),
        ("in 9999 years", "in 9999 years"),
        ("I sat in the sun", "I sat in the sun"),
        ("I may 12 times march 4", "I may 12 times march 4"),
    ],
)
def test_dates_are_those_of_the_day_on_which_it_was_said(text: str, expected: str) -> None:
    assert grounded(text, SUNDAY)[0] == expected


def test_odd_times_have_no_dates() -> None:
    for said in (float("nan"), float("inf"), 1e20, -1e20):
        assert dates("tomorrow", said) == []
        assert statements("I live in Porto until tomorrow", said)


@given(st.text(max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_without_an_error(text: str) -> None:
    for statement in statements(text, SUNDAY):
        assert statement.text.strip()
        assert statement.claim.subject


def test_a_megabyte_is_read() -> None:
    """One that goes back in it for each of its words would take minutes, and be named as slow."""
    for text in ("I live in " * 100_000, "<a" * 500_000, '"' * 1_000_000, "my " * 300_000, ", I" * 300_000, "a" * 1_000_000):
        assert len(statements(text, SUNDAY)) < 1000
        assert len(statements(text[:20_000], SUNDAY)) < 1000


def conversation(*texts: str) -> tuple[Store, list[Learned]]:
    store = Store(Sqlite(":memory:"), Budget(8000), "fifo", tokenizer="chars/4", clock=FakeClock(SUNDAY))
    learned = []
    for text in texts:
        store.session("a").append({"role": "user", "content": text}, {"role": "assistant", "content": "ok, I live in Rome"})
        learned.append(store.memory().learn("a"))
    return store, learned


def held(store: Store, **options: Any) -> list[str]:
    memory = store.memory()
    return [memory.collection.contents.text(page.id) for page, _ in memory.pages(**options)]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["I live in Porto", "I moved to Lisbon"], ["The user lives in Lisbon."]),
        (["I live in Porto", "It's Lisbon, not Porto."], ["The user lives in Lisbon."]),
        (["I live in Porto", "I meant not Porto but Braga"], ["The user lives in Braga."]),
        (["I live in Porto", "No, I meant Faro."], ["The user lives in Faro."]),
        (["I live in Porto", "No, it's Faro"], ["The user lives in Faro."]),
        (["I live in Porto", "No, I meant Braga.", "Sorry, I meant Faro."], ["The user lives in Faro."]),
        (["I live in Porto", "No, I meant Braga.", "Thank you!", "Sorry, I meant Faro."], ["The user lives in Braga."]),
        (["Thank you!", "No, I meant Braga.", "Sorry, I meant Faro."], []),
        (["I live in Porto. Sorry, I meant Faro."], ["The user lives in Faro."]),
        (["I live in Porto", "Sorry, Mel!"], ["The user lives in Porto."]),
        (["I live in Porto", "hm", "No, it's Faro"], ["The user lives in Porto."]),
        (["I live in Porto and I work at Galp", "No, I meant Faro"], ["The user lives in Porto.", "The user works at Galp."]),
        (["My favorite color is red", "Actually, my favorite color is blue"], ["The user's favorite color is blue."]),
        (["I live in Porto", "I no longer live in Porto"], []),
        (["I like coffee", "I don't like coffee anymore"], []),
        (["I like coffee", "I don't like coffee"], ["The user dislikes coffee."]),
        (["I hate coffee", "I love coffee"], ["The user likes coffee."]),
        (["I like coffee", "I like tea"], ["The user likes coffee.", "The user likes tea."]),
        (["I like coffee", "I really like coffee!"], ["The user likes coffee."]),
        (["I live in Porto. No, I live in Lisbon."], ["The user lives in Lisbon."]),
        (["I like tea. I don't like tea anymore. I like tea."], ["The user likes tea."]),
        (["It's Lisbon, not Porto."], []),
        (["I have a dentist appointment next Tuesday", "My dentist appointment was moved to Friday"], None),
        (["I live in Porto and I live in Lisbon"], ["The user lives in Porto.", "The user lives in Lisbon."]),
    ],
)
def test_what_is_in_force_after_a_conversation(texts: list[str], expected: list[str] | None) -> None:
    store, learned = conversation(*texts)
    with store:
        assert held(store) == (["The user's dentist appointment is on 2026-11-27."] if expected is None else expected)
        assert all(not each.failed for each in learned)


def test_only_the_user_is_learned_from() -> None:
    store, _ = conversation("hello")
    with store:
        assert held(store) == []


def test_the_same_again_in_other_words_is_stored_once() -> None:
    wordings = [
        "I live in Porto. I work at Galp. I like green tea. I'm 34 years old. My favorite color is blue.",
        "I'm living in Porto now. I work for Galp. I love green tea. I am 34. My favourite color is blue.",
        "As for me: I am based in Porto. I'm working at Galp. I enjoy green tea. I'm 34 years old! Blue is my favorite color.",
    ]
    store, _ = conversation(*wordings)
    with store:
        assert len(held(store)) == 5, held(store)


TOWNS, FIRMS, FOODS = ("Porto", "Lisbon", "Braga"), ("Galp", "EDP"), ("tea", "rice", "figs")
FORMS = {
    TOWNS: ["I live in {}.", "I moved to {}.", "Actually, I live in {}.", "I no longer live in {}.", "Do I live in {}?"],
    ("Rome",): ["If I lived in {}, I'd sing.", "Bob lives in {}.", '"I live in {}", she said.'],
    FIRMS: ["I work at {}.", "No, I work at {}."],
    FOODS: ["I love {}!", "I like {}", "I hate {}.", "I don't like {}.", "I don't like {} anymore."],
}
TURN = st.one_of(st.tuples(st.sampled_from(forms), st.sampled_from(things)) for things, forms in FORMS.items())


def expected_after(turns: list[tuple[str, str]]) -> set[str]:
    """What is in force, by another way: the last word on each thing."""
    town = firm = ""
    foods: dict[str, str] = {}
    for form, thing in turns:
        if form in ("I live in {}.", "I moved to {}.", "Actually, I live in {}."):
            town = thing
        elif form.startswith("I no longer"):
            town = "" if town == thing else town
        elif "work at" in form:
            firm = thing
        elif form.startswith(("I love", "I like")):
            foods[thing] = "likes"
        elif form.endswith("anymore."):
            if foods.get(thing) == "likes":
                del foods[thing]
        elif form.startswith(("I hate", "I don't like")):
            foods[thing] = "dislikes"
    one = {f"The user lives in {town}.": town, f"The user works at {firm}.": firm}
    return {text for text, there in one.items() if there} | {f"The user {verb} {food}." for food, verb in foods.items()}


@given(st.lists(TURN, min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_last_word_on_each_thing_is_in_force(turns: list[tuple[str, str]]) -> None:
    store, _ = conversation(*(form.format(thing) for form, thing in turns))
    with store:
        assert set(held(store)) == expected_after(turns)
        assert len(held(store)) == len(expected_after(turns))

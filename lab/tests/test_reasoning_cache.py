"""Reasoning Cache: caps hold, no trace comes back, and a summariser can fail in every way without a loss."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import SpecError, Unavailable
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Reply, Request
from kilburn.testing import Scripted, check_laws
from kilburn_lab.cap import Cap, clip
from kilburn_lab.reasoning_cache import ReasoningCache, RoundPrompts, Schedule, boxed

WORDS = [
    f"{first}{second}" for first in ("root", "sum", "left", "bound", "even", "prime") for second in ("", "s", "ing", "ed", "like")
]
PROBLEM = "Which {number} is the root of f, and why?"


def trace(number: int, size: int = 12) -> str:
    lines = "".join(f"In attempt {number}, line {line} says that f({line}) is {line * number + 3}.\n" for line in range(size))
    return f"{lines}\\boxed{{{number}}}"


def summary(number: int) -> str:
    return f"I tried {number} times; the root seems to be {number}, and interval {number} is left to check."


def session_of(window: int = 4000, policy: str = "fifo") -> Session:
    return Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/4").session("s")


def rounds_of(count: int) -> list[str]:
    return [text for number in range(1, count + 1) for text in (trace(number), summary(number))]


@pytest.mark.parametrize("piece", [1, None])
def test_every_trace_is_addressable_and_none_comes_back(piece: int | None) -> None:
    session, model = session_of(), Scripted(rounds_of(6), piece=piece)
    made = ReasoningCache(model, session, Schedule(rounds=6, reason=400, summary=100)).run(PROBLEM)
    assert [session.recall(one.trace_address) for one in made.rounds] == [trace(number) for number in range(1, 7)]
    assert [one.summary for one in made.rounds] == [summary(number) for number in range(1, 7)]
    assert {one.summary_outcome for one in made.rounds} == {"done"}
    assert (made.answer, made.summary) == ("6", summary(6))
    assert made.reach == 6 * 400
    assert made.horizon == sum(one.trace_tokens for one in made.rounds)
    for number, request in enumerate(model.requests[2::2], 2):
        prompt = str(request.messages)
        assert summary(number - 1) in prompt
        assert "line 3 says" not in prompt
    for number, request in enumerate(model.requests[1::2], 1):
        prompt = str(request.messages)
        assert f"attempt {number}, line 3" in prompt
        assert f"attempt {number - 1}, line 3" not in prompt
    # The session's own window holds the problem and the last summary: any agent can go on from it.
    assert [message["role"] for message in session.render()] == ["user", "user"]
    assert summary(6) in str(session.render()[-1])
    check_laws(session)


def test_the_context_is_constant_while_the_horizon_grows() -> None:
    peaks = {}
    for count in (2, 4, 16):
        made = ReasoningCache(Scripted(rounds_of(count)), session_of(), Schedule(rounds=count, reason=400, summary=100)).run(
            PROBLEM
        )
        peaks[count] = made.peak
        assert made.horizon > count * 120
    assert peaks[16] <= peaks[2] + 4


def test_the_ledger_has_a_receipt_for_every_round() -> None:
    session = session_of()
    model = Scripted([trace(1), summary(1), trace(2), "", trace(3), summary(3)])
    ReasoningCache(model, session, Schedule(rounds=3, reason=400, summary=100)).run(PROBLEM)
    found = [receipt for receipt in session.ledger.receipts() if receipt.policy == "reasoning_cache"]
    assert [receipt.outcome for receipt in found] == ["done", "empty", "done"]
    assert found[0].left == ("p2",)
    assert "p3" in str(found[1].left)
    assert all(receipt.freed > 0 for receipt in found[:2])


class Heedless:
    """A model that speaks on whatever it is told, and knows no cap."""

    name, form, context, tokenizer = "heedless", "chat", None, "chars/4"

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        asked = str(request.messages)
        words = random.Random("<reasoning-" in asked).choices(WORDS, k=9000)
        text = " ".join(f"{word}{'.' * (number % 7 == 6)}" for number, word in enumerate(words))
        for at in range(0, len(text), 13):
            yield Delta(text[at : at + 13])
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)))


def test_a_model_that_ignores_its_caps_is_cut() -> None:
    session = session_of()
    made = ReasoningCache(Heedless(), session, Schedule(rounds=2, reason=300, summary=60)).run(PROBLEM)
    assert [one.outcome for one in made.rounds] == ["truncated"] * 2
    assert all(290 <= one.trace_tokens <= 300 for one in made.rounds)
    for one in made.rounds:
        assert one.summary_outcome == "truncated"
        assert one.summary_tokens <= 60
        assert one.summary.endswith(".")
    assert all(one.prompt_tokens < 250 for one in made.rounds)


@pytest.mark.parametrize(
    ("said", "outcome"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("?!", "rejected"),
        ("I'm sorry, I can't help with that.", "rejected"),
        ("no no " * 40, "rejected"),
        (trace(2), "rejected"),
        (lambda request: request.messages[-1]["content"], "rejected"),
        (RuntimeError("broken"), "failed"),
        (Unavailable("gone"), "failed"),
        (Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="No."),)), finish="refused"), "refused"),
        (Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", call="c1", name="read"),)), "failed"),
    ],
)
def test_a_summary_that_is_none_leaves_the_old_one(said: Any, outcome: str) -> None:
    session = session_of()
    model = Scripted([trace(1), summary(1), trace(2), said, trace(3), summary(3)])
    made = ReasoningCache(model, session, Schedule(rounds=3, reason=400, summary=400)).run(PROBLEM)
    assert [one.summary_outcome for one in made.rounds] == ["done", outcome, "done"]
    assert made.rounds[1].summary == summary(1)
    assert summary(1) in str(model.requests[4].messages)
    assert "line 3 says" not in str(model.requests[4].messages)
    assert session.recall(made.rounds[1].trace_address) == trace(2)
    check_laws(session)


def test_a_summariser_that_hangs_is_left_behind() -> None:
    gate = threading.Event()

    def hang(request: Request) -> str:
        gate.wait(600)
        return summary(9)

    session = session_of()
    schedule = Schedule(rounds=1, reason=400, summary=100, timeout=0.2)
    made = ReasoningCache(Scripted([trace(1)]), session, schedule, summariser=Scripted([hang])).run(PROBLEM)
    gate.set()
    assert made.rounds[0].summary_outcome == "failed"
    assert made.summary == ""
    assert session.recall(made.rounds[0].trace_address) == trace(1)


def test_a_model_that_raises_while_it_reasons_leaves_the_state_before() -> None:
    session = session_of()
    cache = ReasoningCache(
        Scripted([trace(1), summary(1), Unavailable("gone"), trace(2), summary(2)]),
        session,
        Schedule(rounds=3, reason=400, summary=100),
    )
    done = []
    with pytest.raises(Unavailable):
        done.extend(cache.rounds(PROBLEM))
    before = session.contents.messages()
    assert [message["role"] for message in before] == ["user", "assistant"]
    assert summary(1) in str(session.render())
    made = ReasoningCache(cache.model, session, Schedule(rounds=1, reason=400, summary=100)).run(PROBLEM, summary(1))
    assert made.summary == summary(2)
    assert [message["role"] for message in session.contents.messages()] == ["user", "assistant", "assistant"]


@pytest.mark.parametrize(
    ("said", "outcome", "kept"),
    [
        ("", "empty", False),
        (
            Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="I won't."),)), finish="refused"),
            "refused",
            True,
        ),
    ],
)
def test_no_reasoning_is_not_summarised(said: Any, outcome: str, kept: bool) -> None:
    session, model = session_of(), Scripted([trace(1), summary(1), said, trace(3), summary(3)])
    made = ReasoningCache(model, session, Schedule(rounds=3, reason=400, summary=100)).run(PROBLEM)
    assert made.rounds[1].outcome == outcome
    assert made.rounds[1].summary_outcome == "none"
    assert made.rounds[1].summary == summary(1)
    assert bool(made.rounds[1].trace_address) is kept
    assert made.rounds[2].summary == summary(3)


def test_it_may_stop_early_and_be_asked_in_own_words() -> None:
    model = Scripted(["it is 4", "so far: 4", "never asked"])
    prompts = RoundPrompts(
        reason="Q {problem}", resume="Q {problem} S {summary}", summarise="{problem}|{summary}|{trace}", system="Be brief."
    )
    made = ReasoningCache(model, session_of(), prompts=prompts, done=lambda text: "4" in text).run("2 + 2 {brace}")
    assert len(made.rounds) == 1
    assert model.requests[0].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q 2 + 2 {brace}"},
    ]
    assert model.requests[1].messages[-1]["content"] == "2 + 2 {brace}||it is 4"


@pytest.mark.parametrize(
    "resume", ["{problem}", "{problem} {summary} {trace}", "{summary}", "{problem} {summary} {", "{problem} {summary} {0}"]
)
def test_prompts_that_do_not_fit_are_refused(resume: str) -> None:
    with pytest.raises(SpecError, match="resume"):
        ReasoningCache(Scripted(), session_of(), prompts=RoundPrompts(resume=resume))


@pytest.mark.parametrize("name", ["rounds", "reason", "summary"])
def test_a_schedule_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Schedule(**{name: 0})


@pytest.mark.parametrize("policy", ["hybrid", "lru", "summarize", "memento"])
def test_the_process_may_have_any_policy_and_a_small_window(policy: str) -> None:
    session = session_of(150, policy)
    made = ReasoningCache(Scripted(rounds_of(8)), session, Schedule(rounds=8, reason=400, summary=100)).run(PROBLEM)
    assert made.answer == "8"
    assert [session.recall(one.trace_address) for one in made.rounds] == [trace(number) for number in range(1, 9)]
    assert session.render().tokens <= 150
    check_laws(session)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("", ""),
        ("so \\boxed{4} or \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("\\boxed{7} and then \\boxed{cut of", "7"),
        ("\\boxed{ 3 }", "3"),
    ],
)
def test_the_last_box_counts(text: str, answer: str) -> None:
    assert boxed(text) == answer


@given(st.lists(st.text(max_size=9), max_size=30), st.integers(1, 40))
def test_a_cap_holds_whatever_the_pieces(pieces: list[str], tokens: int) -> None:
    def count(text: str) -> int:
        return -(-len(text) // 3)

    cap = Cap(tokens, count)
    for piece in pieces:
        if cap.add(piece):
            assert count(cap.text) >= tokens
            break
    else:
        assert count("".join(pieces)) < tokens
    assert count(cap.kept) <= tokens
    assert cap.text.startswith(cap.kept)
    assert clip(cap.text, tokens, count) == cap.kept


@pytest.mark.parametrize("address", ["p1", "p2"])
def test_what_was_made_from_the_problem_or_a_trace_is_forgotten_with_it(address: str) -> None:
    session = session_of()
    made = ReasoningCache(Scripted(rounds_of(3)), session, Schedule(rounds=3, reason=400, summary=100)).run(PROBLEM)
    gone = session.forget(address)
    assert {one.trace_address for one in made.rounds} <= {*gone}
    assert "f" in {each[0] for each in gone}
    assert "attempt" not in str(session.render()) + str(session.contents.messages())
    check_laws(session)

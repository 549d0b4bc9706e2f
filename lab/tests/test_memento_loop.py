"""The loop over blocks: the cap holds, the window is a sawtooth, and a model that fails costs only its own reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kilburn import Store
from kilburn.agents.loop import Limits
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Unavailable
from kilburn.kernel.session import Session
from kilburn.model import Delta, Reply, Request
from kilburn.testing import Scripted, check_laws
from kilburn.wire.mementos import BLOCK_END, BLOCK_START, SUMMARY_END, SUMMARY_START, parse
from kilburn_lab.memento_loop import Closed, Finished, MementoLoop, Mode, Wording

THOUGHT = "the left side grows faster than the right one so the root lies between them "


def block(number: int, size: int = 20) -> str:
    return f"{BLOCK_START}step {number}: {THOUGHT * size}{BLOCK_END}{SUMMARY_START}x_{number} = {number * 7}{SUMMARY_END}"


def session_of(window: int = 4000, policy: str = "memento") -> Session:
    return Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/4").session("s")


def spoken(session: Session) -> list[str]:
    return [str(message["content"]) for message in session.contents.messages() if message["role"] == "assistant"]


@pytest.mark.parametrize("piece", [1, 3, 50, None])
def test_reasoning_far_beyond_the_window(piece: int | None) -> None:
    session = session_of(1600)
    model = Scripted([*(block(number, 25) + "never kept" for number in range(20)), "The root is 133."], piece=piece)
    outcome = MementoLoop(model, session).run("Find the root.")
    assert (outcome.finish, outcome.text, outcome.steps) == ("stop", "The root is 133.", 21)
    assert [closed.memento for closed in outcome.blocks] == [f"x_{number} = {number * 7}" for number in range(20)]
    assert not any(closed.forced for closed in outcome.blocks)
    assert sum(closed.tokens for closed in outcome.blocks) > 5 * 1600, "more was thought than the window holds"
    assert outcome.peak <= 1600
    assert all(after < before - 400 for before, after in outcome.shown), "every block left"
    assert spoken(session) == [*(block(number, 25) for number in range(20)), "The root is 133."]
    assert session.recall(outcome.blocks[3].address) == block(3, 25)
    # What is said after a restart moves it on, and is no part of the past.
    assert [request.messages[-1]["content"] for request in model.requests[1:]] == ["Continue."] * 20
    assert "Continue." not in str(session.contents.messages())
    check_laws(session)


def test_a_restart_sees_the_memento_and_not_the_block() -> None:
    session = session_of()
    model = Scripted([block(1), block(2), "done"])
    MementoLoop(model, session).run("Find the root.")
    second = str(model.requests[1].messages)
    assert "x_1 = 7" in second
    assert "step 1:" not in second


def test_a_stream_goes_on_and_its_blocks_leave_when_it_is_over() -> None:
    session = session_of()
    model = Scripted([block(1) + block(2) + "The root is 14."])
    events = list(MementoLoop(model, session, mode=Mode.STREAM).stream("Find the root."))
    closed = [event for event in events if isinstance(event, Closed)]
    assert isinstance(events[-1], Finished)
    outcome = events[-1].outcome
    assert (outcome.steps, outcome.text, len(outcome.blocks)) == (1, "The root is 14.", 2)
    assert closed == outcome.blocks
    assert "step 1:" not in str(session.render())
    assert "The root is 14." in str(session.render())


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("piece", [1, 7, None])
def test_the_cap_closes_a_block_that_never_ends(mode: Mode, piece: int | None) -> None:
    session = session_of()
    endless = BLOCK_START + "".join(f"Then x_{number} = {number}. " for number in range(900))
    model = Scripted([endless, "Result: x_5 = 5, and x_6 = 6 follows.", "The root is 6."], piece=piece)
    loop = MementoLoop(model, session, mode=mode, max_block_tokens=100, max_memento_tokens=30, limits=Limits(reply=2000))
    outcome = loop.run("Find the root.")
    assert outcome.text == "The root is 6."
    (closed,) = outcome.blocks
    assert closed.forced
    assert closed.tokens <= 100
    assert closed.memento == "Result: x_5 = 5, and x_6 = 6 follows."
    assert not parse(spoken(session)[0]).faults
    assert endless.startswith(session.recall(closed.address)[:100])
    assert "<block-" in model.requests[1].messages[-1]["content"]
    assert "The root is 6." in spoken(session)[1]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "I'm sorry, I can't help with that.",
        "no " * 300,
        RuntimeError("broken"),
        Unavailable("gone"),
        SUMMARY_END + BLOCK_START,
    ],
)
def test_a_forced_memento_comes_from_the_block_where_the_model_gives_none(said: Any) -> None:
    session = session_of()
    model = Scripted([BLOCK_START + "The path is src/parser.py, error E42. " * 40, said, "done"])
    outcome = MementoLoop(model, session, max_block_tokens=120, max_memento_tokens=40).run("Repair it.")
    (closed,) = outcome.blocks
    assert "src/parser.py" in closed.memento
    assert closed.memento_tokens <= 40
    assert outcome.malformed == 0
    assert outcome.text == "done"


def test_a_memento_that_never_ends_is_closed() -> None:
    session = session_of()
    model = Scripted([f"{BLOCK_START}{THOUGHT * 9}{BLOCK_END}{SUMMARY_START}{'x is 7. ' * 500}", "done"], piece=5)
    outcome = MementoLoop(model, session, max_memento_tokens=20).run("Find x.")
    assert outcome.blocks[0].memento_tokens <= 20
    assert outcome.blocks[0].memento.endswith("x is 7.")
    assert outcome.blocks[0].forced


def test_a_reply_cut_at_its_cap_is_closed_and_goes_on() -> None:
    session = session_of()
    model = Scripted([BLOCK_START + THOUGHT * 50, "Result: the root lies between the sides.", "done"])
    outcome = MementoLoop(model, session, limits=Limits(reply=100)).run("Find it.")
    assert outcome.blocks[0].forced
    assert outcome.blocks[0].tokens <= 100
    assert (outcome.finish, outcome.text) == ("stop", "done")


@pytest.mark.parametrize(
    "text", [f"a{BLOCK_END}b", BLOCK_START + THOUGHT, f"{BLOCK_START}a{BLOCK_START}b{BLOCK_END}", block(1) + BLOCK_END]
)
def test_malformed_tags_are_kept_as_they_came(text: str) -> None:
    session = session_of()
    outcome = MementoLoop(Scripted([text]), session, mode=Mode.STREAM).run("Go.")
    assert (outcome.malformed, outcome.blocks, outcome.finish) == (1, [], "stop")
    assert spoken(session) == [text]
    assert text in str(session.render()[-1]["content"])


def test_a_model_that_fails_costs_only_its_own_reply() -> None:
    session = session_of()
    loop = MementoLoop(Scripted([block(1), Unavailable("gone"), "The root is 7."]), session)
    with pytest.raises(Unavailable):
        loop.run("Find the root.")
    assert spoken(session) == [block(1)]
    assert loop.run().text == "The root is 7."


@pytest.mark.parametrize(
    ("limits", "finish"), [(Limits(steps=3), "steps"), (Limits(tokens=1500), "tokens"), (Limits(seconds=0), "seconds")]
)
def test_blocks_without_an_end_meet_a_limit(limits: Limits, finish: str) -> None:
    outcome = MementoLoop(Scripted([block(1)] * 50), session_of(), limits=limits).run("Go.")
    assert outcome.finish == finish


def test_nothing_said_ends_the_run() -> None:
    session = session_of()
    assert MementoLoop(Scripted([block(1), ""]), session).run("Go.").finish == "empty"
    assert len(spoken(session)) == 1


class Endless:
    """Speaks until its stream is closed."""

    name, form, context, tokenizer = "endless", "chat", None, "chars/4"
    closed = 0

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        try:
            while True:
                yield Delta("more and more ")
        finally:
            self.closed += 1


def test_a_reply_that_ignores_its_cap_is_cut_and_its_stream_closed() -> None:
    session, model = session_of(), Endless()
    outcome = MementoLoop(model, session, limits=Limits(reply=200)).run("Go.")
    assert outcome.finish == "length"
    assert session.counter.count(spoken(session)[0]) <= 200
    assert model.closed == 1


def test_caps_must_hold_something() -> None:
    with pytest.raises(ValueError, match="1 token"):
        MementoLoop(Scripted(), session_of(), max_block_tokens=0)


def test_a_trained_model_needs_no_words() -> None:
    session, model = session_of(), Scripted([block(1), "done"])
    MementoLoop(model, session, wording=Wording(instructions="", nudge="")).run("Go.")
    assert [message["role"] for message in model.requests[0].messages] == ["user"]
    assert [message["role"] for message in model.requests[1].messages] == ["user", "assistant"]

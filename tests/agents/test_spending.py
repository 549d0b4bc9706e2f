"""What a run may spend: limits, figures that lie, and branches, with what a stream shows of them."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import kilburn
from kilburn.agents.branch import Branching, SubAgent
from kilburn.agents.loop import UNLIMITED, Agent, Called, InBranch, Limits, Returned, Said, Stopped
from kilburn.errors import SpecError, Unavailable
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request, Tokens
from kilburn.prices import PRICES, Prices
from kilburn.testing import Scripted, check_laws
from kilburn.wire.validity import validate_chat


def opened(window: int = 20_000) -> Session:
    return kilburn.open(":memory:", window=window, policy="fifo", tokenizer="chars/4", embedder=None).session("work")


def look(path: str) -> str:
    """Read a file."""
    return f"{path}: a line of it"


def calls(*made: tuple[str, str, dict[str, Any]], usage: Any = None) -> Reply:
    parts = tuple(Part(kind=Kind.CALL, text=json.dumps(arguments), call=id, name=name) for id, name, arguments in made)
    return Reply(message=Message(role=Role.ASSISTANT, parts=parts), finish="calls", usage=usage)


def branch(id: str, prompt: str) -> tuple[str, str, dict[str, Any]]:
    return id, "branch", {"description": "a part", "prompt": prompt}


def returned(message: str) -> Reply:
    return calls(("r", "return", {"message": message}))


def by_task(**replies: list[Any]) -> Scripted:
    """A model that says these in turn to whoever works on the task: the first word of the user's last message."""
    lock = threading.Lock()

    def answer(request: Request) -> Any:
        task = [message["content"] for message in request.messages if message["role"] == "user"][-1].split()[0]
        with lock:
            reply = replies[task].pop(0)
        return reply(request) if callable(reply) else reply

    return Scripted([answer] * 200)


# Limits


def test_there_are_limits_where_none_is_given() -> None:
    limits = Agent(Scripted(), [], opened()).limits
    assert all(limits.most(name) for name in ("steps", "calls", "tokens", "seconds"))
    assert limits.most("money") is None, "what a call costs is not known"
    assert Limits(prices=PRICES["hosted"]).most("money") == 60
    assert Limits(prices=PRICES["hosted"], money=None).most("money") is None
    assert not any(UNLIMITED.most(name) for name in ("steps", "calls", "tokens", "seconds", "money"))
    assert msgspec.convert(msgspec.to_builtins(Limits(steps=3)) | {"prices": {}}, Limits) == Limits(steps=3)


@pytest.mark.parametrize("name", ["steps", "calls", "tokens", "seconds", "money", "reply"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "9", True, [], 1 << 60])
def test_limits_that_mean_nothing_are_refused(name: str, value: Any) -> None:
    if value == 1 << 60 and name in ("seconds", "money"):
        return
    with pytest.raises(SpecError, match=name):
        Limits(prices=PRICES["hosted"], **{name: value})


def test_money_without_prices_is_refused_with_a_way_out() -> None:
    for prices in (Prices(), Prices(ttl=5)):
        with pytest.raises(SpecError, match=r"prices=Prices\(input="):
            Limits(money=5, prices=prices)
    Limits(money=5, prices=Prices(output=1.0))
    Limits(money=None)


def test_what_are_no_limits_is_refused() -> None:
    for limits in (5, {"steps": 3}, "none"):
        with pytest.raises(SpecError, match="limits="):
            Agent(Scripted(), [], opened(), limits=limits)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["3", None, float("nan"), float("inf"), -1, True])
def test_prices_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(SpecError, match="no price"):
        Prices(input=value)
    with pytest.raises(SpecError, match="prices"):
        Limits(prices=value)


class Lying:
    """A model that calls a tool for ever, and reports what it is told to report."""

    name, form, context, tokenizer = "lying", "chat", None, "chars/4"

    def __init__(self, usage: Any) -> None:
        self.usage, self.asked = usage, 0

    def stream(self, request: Request) -> Iterator[Reply]:
        self.asked += 1
        yield calls((f"c{self.asked}", "look", {"path": "x" * 400}), usage=self.usage)


LIES = [
    None,
    "many",
    {"prompt": 3},
    Tokens(),
    Tokens(prompt=0, reply=9),
    Tokens(prompt=100, reply=0),
    Tokens(prompt=-500, reply=-500),
    Tokens(prompt="900", reply="10"),  # type: ignore[arg-type]
    Tokens(prompt=None, reply=None),  # type: ignore[arg-type]
    Tokens(prompt=1 << 39, reply=10),
    Tokens(prompt=1 << 80, reply=10),
    Tokens(prompt=900, reply=1 << 39),
    Tokens(prompt=900, reply=100, beside=Tokens(prompt=1 << 39)),
    Tokens(prompt=900, reply=100, cached=901),
    Tokens(prompt=float("nan"), reply=1),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("usage", LIES, ids=range(len(LIES)))
def test_a_limit_of_tokens_holds_whatever_is_reported(usage: Any) -> None:
    """A run that is reported to cost nothing ends, and one that is reported to cost everything does not end at once."""
    model = Lying(usage)
    session = opened()
    result = Agent(model, [look], session, limits=Limits(steps=None, tokens=20_000)).run("go")
    assert result.finish == "tokens"
    assert 3 < model.asked < 40
    assert 20_000 <= result.tokens < 30_000
    check_laws(session)


@pytest.mark.parametrize(
    ("limits", "finish", "steps"),
    [
        (Limits(steps=None, prices=Prices(input=1.0, output=1000.0)), "money", 20),
        (Limits(steps=None, calls=7), "calls", 7),
        (Limits(), "steps", 50),
    ],
)
def test_each_limit_ends_a_run_which_can_go_on(limits: Limits, finish: str, steps: int) -> None:
    model, session = Lying(Tokens(prompt=900, reply=1000)), opened(window=2500)
    agent = Agent(model, [look], session, limits=limits)
    for run in (1, 2):
        result = agent.run("go" if run == 1 else None)
        assert (result.finish, result.steps, result.calls, model.asked) == (finish, steps, steps, steps * run)
        assert not session.window.waiting()
        check_laws(session)


# Branches


def test_steps_of_branches_are_counted_apart() -> None:
    reads = [calls((f"d{number}", "look", {"path": "x"})) for number in range(5)]
    scripted = by_task(go=[calls(branch("c1", "PART")), "done"], PART=[*reads, returned("fine")])
    result = Branching(scripted, [look], opened(), limits=Limits(steps=2)).run("go")
    assert (result.finish, result.text, result.steps, result.calls) == ("stop", "done", 2, 8)


def test_the_last_step_of_the_main_line_may_be_a_branch() -> None:
    scripted = by_task(go=[calls(branch("c1", "PART"))], PART=[calls(("d", "look", {"path": "x"})), returned("fine")])
    session = opened()
    result = Branching(scripted, [look], session, limits=Limits(steps=1)).run("go")
    assert (result.finish, result.steps, result.calls) == ("steps", 1, 3)
    assert "fine" in json.dumps(session.render())


def test_a_limit_of_calls_holds_for_branches_at_once() -> None:
    forever = [calls((f"d{number}", "look", {"path": "x"})) for number in range(100)]
    scripted = by_task(go=[calls(*(branch(f"c{number}", "PART") for number in range(6)))], PART=forever)
    session = opened()
    result = Branching(scripted, [look], session, limits=Limits(calls=20)).run("go")
    assert result.finish == "calls"
    assert 20 <= result.calls < 20 + 6 * 2
    assert not session.window.waiting()
    check_laws(session)
    validate_chat(session.render())


def test_what_a_tool_runs_is_charged_to_the_run_that_called_it() -> None:
    """An agent that its own tool runs, and another one that the tool makes: neither spends beyond the limit."""
    asked = itertools.count()

    def model() -> Scripted:
        return Scripted([lambda request: calls((f"c{next(asked)}", "again", {}))] * 100)

    def again() -> str:
        """Run it again."""
        made = Agent(model(), [again], opened(), limits=Limits(calls=50)) if next(turn) % 2 else agent
        return made.run("nested").finish

    turn = itertools.count()
    agent = Agent(model(), [again], opened(), limits=Limits(steps=50, calls=5))
    assert agent.run("x").finish == "calls"
    assert next(asked) <= 6
    assert agent.account.outcome.calls == 5


def shown(events: list[Any], name: str) -> list[Any]:
    return [event.event for event in events if isinstance(event, InBranch) and event.branch == name]


def test_a_stream_shows_what_happens_in_branches_at_once_each_in_its_order() -> None:
    meet = threading.Barrier(2, timeout=600)

    def waits(request: Request) -> Reply:
        meet.wait()
        return returned("fine")

    scripted = by_task(
        go=[calls(branch("c1", "LEFT"), branch("c2", "RIGHT")), "done"],
        LEFT=[calls(("d", "look", {"path": "x"})), waits],
        RIGHT=[calls(branch("e", "DEEPER")), waits],
        DEEPER=["nothing wrong here"],
    )
    session = opened()
    events = list(Branching(scripted, [look], session, depth=2).stream("go"))
    for name in ("work/b1", "work/b2"):
        inside = shown(events, name)
        assert {event.depth for event in events if isinstance(event, InBranch) and event.branch == name} == {1}
        kinds = [type(event) for event in inside]
        assert kinds == [Called, Returned, Called, Returned, Stopped]
        assert (inside[-1].outcome.finish, inside[-1].outcome.text) == ("returned", "fine")
    deeper = next(event for event in events if isinstance(event, InBranch) and event.depth == 2)
    assert deeper.branch in ("work/b1/b1", "work/b2/b1")
    assert shown(events, deeper.branch) == [Said("nothing wrong here"), shown(events, deeper.branch)[-1]]
    at = [index for index, event in enumerate(events) if isinstance(event, InBranch)]
    called = [index for index, event in enumerate(events) if isinstance(event, Called)]
    back = [index for index, event in enumerate(events) if isinstance(event, Returned)]
    assert max(called) < min(at) < max(at) < min(back)
    assert isinstance(events[-1], Stopped)


def test_the_events_of_a_branch_come_while_it_works() -> None:
    seen = threading.Event()

    def waits(request: Request) -> Reply:
        assert seen.wait(600)
        return returned("fine")

    scripted = by_task(go=[calls(branch("c1", "PART")), "done"], PART=[calls(("d", "look", {"path": "x"})), waits])
    for event in Branching(scripted, [look], opened()).stream("go"):
        if isinstance(event, InBranch) and isinstance(event.event, Returned):
            seen.set()
    assert seen.is_set()


class Endless:
    """A model that branches, and in a branch never ends to speak."""

    name, form, context, tokenizer = "endless", "chat", None, "chars/4"

    def __init__(self) -> None:
        self.pieces = self.closed = 0

    def stream(self, request: Request) -> Iterator[Any]:
        if not any("PART" in str(message.get("content")) for message in request.messages):
            yield calls(branch("c1", "PART"), branch("c2", "PART"))
            return
        try:
            while True:
                self.pieces += 1
                yield kilburn.model.Delta("word ")
        finally:
            self.closed += 1


def closes_early(session: Session, model: Any) -> None:
    events = Branching(model, [look], session).stream("go")
    for event in events:
        if isinstance(event, InBranch):
            break
    events.close()  # type: ignore[attr-defined]


def test_closing_the_stream_stops_the_branches_which_stay_open() -> None:
    session, model = opened(), Endless()
    closes_early(session, model)
    pieces = model.pieces
    assert model.closed >= 1
    assert len(session.window.open) == 2
    for info, _ in session.branches.children():
        below = session.branches.open(info.name.removeprefix("work/"))
        assert not below.branches.returned()
        check_laws(below)
    second = by_task(go=["done"], PART=[returned("one"), returned("two")])
    result = Branching(second, [look], session).run()
    assert (result.text, model.pieces) == ("done", pieces)
    validate_chat(session.render())
    check_laws(session)


def test_cancelling_the_task_stops_the_branches() -> None:
    session, model = opened(), Endless()

    async def work() -> None:
        begun = asyncio.Event()

        async def read() -> None:
            async for event in Branching(model, [look], session).astream("go"):
                if isinstance(event, InBranch):
                    begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(work())
    assert model.closed >= 1
    assert len(session.window.open) == 2


@pytest.mark.parametrize("at", range(12))
def test_a_stream_that_is_closed_at_any_event_goes_on(at: int) -> None:
    session = opened()

    def script() -> Scripted:
        return by_task(
            go=[calls(branch("c1", "LEFT"), branch("c2", "RIGHT")), "done"],
            LEFT=[calls(("d", "look", {"path": "x"})), returned("left")],
            RIGHT=[calls(("d", "look", {"path": "y"})), returned("right")],
        )

    events = Branching(script(), [look], session).stream("go")
    for number, _ in enumerate(events):
        if number == at:
            break
    events.close()  # type: ignore[attr-defined]
    again = by_task(go=["done"] * 3, LEFT=[returned("left")] * 3, RIGHT=[returned("right")] * 3)
    assert Branching(again, [look], session).run().text == "done"
    text = json.dumps(session.render())
    assert not session.window.open
    assert "left" in text
    assert "right" in text
    check_laws(session)
    validate_chat(session.render())


def test_one_branch_that_fails_does_not_hide_the_events_of_the_other() -> None:
    failed = threading.Event()

    def fails(request: Request) -> Unavailable:
        failed.set()
        return Unavailable("down")

    def after(request: Request) -> Reply:
        assert failed.wait(600)
        return returned("right")

    scripted = by_task(go=[calls(branch("c1", "LEFT"), branch("c2", "RIGHT"))], LEFT=[fails], RIGHT=[after])
    session = opened()
    with pytest.raises(Unavailable):
        list(Branching(scripted, [look], session).stream("go"))
    again = by_task(go=["done"], LEFT=[returned("left")], RIGHT=[returned("right")])
    assert Branching(again, [look], session).run().text == "done"


def test_a_forced_branch_is_shown_to_its_end() -> None:
    reads = [calls((f"d{number}", "look", {"path": "x"})) for number in range(4)]
    scripted = by_task(go=[calls(branch("c1", "PART")), "done"], PART=reads, **{"[The": ["as far as I got"]})
    events = list(Branching(scripted, [look], opened(), agents=[SubAgent(limits=Limits(steps=4))]).stream("go"))
    inside = shown(events, "work/b1")
    assert [type(event) for event in inside[-2:]] == [Said, Stopped]
    assert inside[-1].outcome.finish == "steps"

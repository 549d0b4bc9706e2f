"""Agents that branch: what the main window sees, limits that hold for all, errors a model can act on, and crashes."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

import kilburn
from agents.test_loop import calls, talk
from kilburn.agents.branch import Branching, SubAgent
from kilburn.agents.loop import Limits, Returned
from kilburn.errors import SpecError, Unavailable
from kilburn.event import Act
from kilburn.kernel.branches import Inherit
from kilburn.kernel.session import Session
from kilburn.message import Trust
from kilburn.model import Reply, Request, Tokens
from kilburn.prices import Prices
from kilburn.testing import Scripted, check_laws
from kilburn.wire.validity import validate_chat
from waiting import until


def look(path: str) -> str:
    """What is in a file."""
    return f"{path}: " + "a line of it\n" * 40


def opened(path: str = ":memory:", window: int = 4000) -> Session:
    return kilburn.open(path, window=window, policy="hybrid", tokenizer="chars/4").session("work")


def branch(call: str, prompt: str, name: str = "branch") -> tuple[str, str, dict[str, Any]]:
    return call, name, {"description": "a part", "prompt": prompt}


def by_task(**replies: list[Any]) -> Scripted:
    """A model that says these in turn to whoever works on the task: the first word of the user's last message."""
    lock = threading.Lock()

    def answer(request: Request) -> Any:
        validate_chat(list(request.messages))
        task = [message["content"] for message in request.messages if message["role"] == "user"][-1].split()[0]
        with lock:
            reply = replies[task].pop(0)
        return reply(request) if callable(reply) else reply

    return Scripted([answer] * 200)


def returned(message: str, call: str = "r") -> Reply:
    return calls((call, "return", {"message": message}))


def outcomes(session: Session) -> list[str]:
    return [str(event.data["branch"]) for event in session.ledger.events() if event.act is Act.NOTE and "branch" in event.data]


def test_the_main_window_has_only_what_a_branch_returned() -> None:
    session = opened()
    scripted = Scripted(
        [
            calls(branch("c1", "read three files")),
            calls(("d1", "look", {"path": "a"}), ("d2", "look", {"path": "b"})),
            calls(("d3", "look", {"path": "c"})),
            calls(("d4", "return", {"message": "all three are fine"})),
            "done",
        ]
    )
    result = Branching(scripted, [look], session).run("check the files")
    assert (result.text, result.steps, result.calls) == ("done", 2, 5)
    assert "a line of it" not in json.dumps(session.render())
    assert session.render()[-2]["content"].startswith("all three are fine\n[b1: b1/p3-p")
    assert "a line of it" in session.recall("b1/p7")
    assert outcomes(session.branches.open("b1")) == ["returned"]
    # The branch's prompts begin with those of the main line, byte for byte.
    first, inside = scripted.requests[0], scripted.requests[1]
    assert list(inside.messages)[:1] == list(first.messages)
    assert inside.tools == first.tools
    check_laws(session)
    check_laws(session.branches.open("b1"))


def test_branches_of_one_reply_run_side_by_side_and_may_branch() -> None:
    session = opened()
    meet = threading.Barrier(2, timeout=600)

    def wait(request: Request) -> Reply:
        meet.wait()
        return returned("fine")

    scripted = by_task(
        go=[calls(branch("c1", "LEFT part"), branch("c2", "RIGHT part")), "done"],
        LEFT=[wait],
        RIGHT=[calls(branch("e", "DEEPER part")), wait],
        DEEPER=["nothing wrong here"],
    )
    result = Branching(scripted, [look], session, depth=2).run("go")
    assert (result.text, result.steps, result.calls) == ("done", 2, 6)
    names = [info.name for info, _ in session.branches.children()]
    assert names == ["work/b1", "work/b2"]
    below = [session.branches.open(name.removeprefix("work/")) for name in names]
    deep = next(branch.branches.open("b1") for branch in below if branch.branches.children())
    assert outcomes(deep) == ["said"]
    assert json.dumps(session.render()).count("fine") == 2
    for each in (session, *below, deep):
        check_laws(each)


def test_what_a_model_may_not_do_is_an_error_that_it_can_act_on() -> None:
    session = opened()
    scripted = by_task(
        go=[
            returned("too early"),
            calls(("c1", "branch", {"prompt": 3})),
            calls(branch("c2", "PART one")),
            calls(branch("c3", "PART two")),
            "done",
        ],
        PART=[calls(branch("d1", "DEEPER part")), calls(("d2", "return", {"text": "?"})), returned("fine")],
    )
    events = list(Branching(scripted, [look], session, max_branches=1).stream("go"))
    texts = [event.text for event in events if isinstance(event, Returned) and event.failed]
    assert [text.startswith("error:") for text in texts] == [True] * 3
    assert "this is no branch" in texts[0]
    assert "1 branches were begun" in texts[2]
    inside = json.dumps(session.branches.open("b1").contents.messages())
    assert "cannot branch again" in inside
    assert outcomes(session.branches.open("b1")) == ["returned"]
    with pytest.raises(SpecError, match="the same name"):
        Branching(scripted, [look], opened(), agents=[SubAgent(name="look")])


def test_at_its_limit_a_branch_is_rolled_back_and_told_to_return() -> None:
    session = opened()
    reads = [calls((f"d{number}", "look", {"path": f"file{number}"})) for number in range(4)]
    scripted = by_task(
        go=[calls(branch("c1", "PART")), "done"], PART=reads, **{"[The": [returned("two files are fine, two are left")]}
    )
    agents = [SubAgent(limits=Limits(steps=4))]
    result = Branching(scripted, [look], session, agents=agents).run("go")
    assert (result.steps, result.calls) == (2, 7)
    assert outcomes(session.branches.open("b1")) == ["forced"]
    asked = json.dumps(scripted.requests[-2].messages)
    assert ["file0" in asked, "file1" in asked, "file2" in asked, "file3" in asked] == [True, True, False, False]
    assert "two are left" in session.render()[-2]["content"]
    assert "a line of it" in session.recall("b1/p10")


@pytest.mark.parametrize(("own", "of_all"), [(Limits(steps=0), Limits()), (Limits(), Limits(calls=3))])
def test_where_nothing_is_left_to_spend_a_branch_has_no_result(own: Limits, of_all: Limits) -> None:
    session = opened()
    reads = [calls((f"d{number}", "look", {"path": "x"})) for number in range(9)]
    scripted = by_task(go=[calls(branch("c1", "PART")), "done"], PART=reads)
    result = Branching(scripted, [look], session, agents=[SubAgent(limits=own)], limits=of_all).run("go")
    assert result.finish == ("stop" if own.steps == 0 else "calls")
    assert result.calls == (2 if own.steps == 0 else 3)
    assert outcomes(session.branches.open("b1")) == ["nothing"]
    assert f"no result: the limit of {'steps' if own.steps == 0 else 'calls'}" in json.dumps(session.render())


def test_what_branches_spend_is_charged_to_the_run() -> None:
    session = opened()
    paid = Tokens(prompt=100, reply=10)
    scripted = by_task(
        go=[calls(branch("c1", "PART"), usage=paid), talk("done", usage=paid)],
        PART=[talk("fine", usage=paid)],
    )
    limits = Limits(prices=Prices(input=1e6, output=1e6))
    result = Branching(scripted, [look], session, limits=limits).run("go")
    assert (result.steps, result.calls, result.tokens, result.money) == (2, 3, 330, pytest.approx(330.0))


def test_a_crash_inside_a_branch_is_resumed(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    session = opened(path)
    down = Unavailable("the provider is down")
    first = by_task(
        go=[calls(branch("c1", "LEFT"), branch("c2", "RIGHT"))],
        LEFT=[returned("left is fine")],
        RIGHT=[calls(("d1", "look", {"path": "x"})), down],
    )
    with pytest.raises(Unavailable):
        Branching(first, [look], session).run("go")
    assert len(session.window.open) == 2
    again = opened(path)
    second = by_task(go=["done"], RIGHT=[returned("right is fine")])
    result = Branching(second, [look], again).run()
    assert (result.text, result.steps, result.calls) == ("done", 1, 2)
    shown = json.dumps(again.render())
    assert "left is fine" in shown
    assert "right is fine" in shown
    assert len(again.branches.children()) == 2
    assert not again.window.open
    check_laws(again)


def test_a_branch_that_was_left_open_is_closed_when_the_user_goes_on(tmp_path: Path) -> None:
    session = opened()
    scripted = by_task(go=[calls(branch("c1", "PART"))], PART=[Unavailable("down")], instead=["of course"])
    agent = Branching(scripted, [look], session)
    with pytest.raises(Unavailable):
        agent.run("go")
    assert agent.run("instead").text == "of course"
    assert outcomes(session.branches.open("b1")) == ["abandoned"]
    assert "the user went on" in json.dumps(session.render())
    validate_chat(session.render())


def test_branches_below_one_that_is_closed_are_closed_too() -> None:
    session = opened()
    scripted = by_task(
        go=[calls(branch("c1", "PART"))],
        PART=[calls(branch("d1", "DEEPER"), ("d2", "look", {"path": "x"}))],
        DEEPER=[Unavailable("down")],
        instead=["of course"],
    )
    agent = Branching(scripted, [look], session, depth=2)
    with pytest.raises(Unavailable):
        agent.run("go")
    assert agent.run("instead").text == "of course"
    part, deeper = session.branches.open("b1"), session.branches.open("b1/b1")
    assert [(outcomes(each), bool(each.branches.returned())) for each in (part, deeper)] == [(["abandoned"], True)] * 2
    for each in (session, part, deeper):
        validate_chat(each.render())
        check_laws(each)


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("text", [None, "instead"])
def test_a_result_that_a_crash_kept_back_is_not_lost(text: str | None, forgotten: bool) -> None:
    session, ended = opened(), threading.Event()

    def fails(_: Request) -> Unavailable:
        while not any(
            outcomes(session.branches.open(info.name.removeprefix("work/"))) for info, _ in session.branches.children()
        ):
            ended.wait(0.01)
        return Unavailable("down")

    scripted = by_task(
        go=[calls(branch("c1", "LEFT"), branch("c2", "RIGHT")), "done"],
        LEFT=[returned("left is fine")],
        RIGHT=[fails, returned("right is fine")],
        instead=["done"],
    )
    agent = Branching(scripted, [look], session)
    with pytest.raises(Unavailable):
        agent.run("go")
    left = next(each for each in map(session.branches.open, ("b1", "b2")) if outcomes(each))
    if forgotten:
        left.forget(f"p{left.window.last}")
    assert agent.run(text).text == "done"
    result = "[its result was forgotten]" if forgotten else "left is fine"
    assert outcomes(left) == ["returned"]
    assert [message["content"].split("\n")[0] for message in session.render() if message["role"] == "tool"] == [
        result,
        "right is fine" if text is None else "[it was not done: the user went on]",
    ]
    check_laws(session)


async def test_branches_of_a_run_that_is_cancelled_take_no_further_step() -> None:
    session, loop, told = opened(), asyncio.get_running_loop(), threading.Event()

    async def give_up() -> None:
        run.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        told.set()

    def step(_: Request) -> Reply:
        loop.call_soon_threadsafe(lambda: kept.append(asyncio.create_task(give_up())))
        assert told.wait(600)
        return calls(("d1", "look", {"path": "x"}))

    kept: list[asyncio.Task[None]] = []
    scripted = by_task(go=[calls(branch("c1", "PART")), "done"], PART=[step, returned("fine")])
    agent = Branching(scripted, [look], session)
    run = asyncio.create_task(agent.arun("go"))
    with pytest.raises(asyncio.CancelledError):
        await run
    assert len(scripted.requests) == 2
    # The branch stays open, and the next run goes on with it.
    assert (await agent.arun()).text == "done"
    assert outcomes(session.branches.open("b1")) == ["returned"]
    check_laws(session)


def test_after_a_ctrl_c_branches_take_no_further_step() -> None:
    session, begun = opened(), threading.Event()

    def stop() -> None:
        """What a Ctrl-C does."""
        assert begun.wait(600)
        raise KeyboardInterrupt

    def step(_: Request) -> Reply:
        begun.set()
        until(lambda: agent.account.given_up)
        return calls(("d1", "look", {"path": "x"}))

    scripted = by_task(
        go=[calls(("c1", "stop", {}), branch("c2", "PART")), "done"], PART=[step, returned("fine")], instead=["of course"]
    )
    agent = Branching(scripted, [look, stop], session)
    with pytest.raises(KeyboardInterrupt):
        agent.run("go")
    assert len(scripted.requests) == 2
    assert agent.run("instead").text == "of course"
    assert outcomes(session.branches.open("b1")) == ["abandoned"]


def test_another_agent_looks_like_a_function() -> None:
    session = opened()
    own = by_task(Find=[calls(("d1", "count", {"text": "abc"})), returned("three letters")])

    def count(text: str) -> int:
        """How many letters."""
        return len(text)

    agent = SubAgent(
        name="counter",
        purpose="Counts letters.",
        inherit=Inherit.NOTHING,
        tools=(count,),
        model=own,
        policy="fifo",
        system="Be exact.",
    )
    main = by_task(go=[calls(branch("c1", "Find how many", "counter")), "three"])
    result = Branching(main, [look], session, agents=[agent]).run("go")
    assert result.text == "three"
    asked = own.requests[0]
    assert [message["content"].split("\n")[0] for message in asked.messages] == ["Be exact.", "Find how many"]
    assert "look" not in {spec.name for spec in asked.tools}
    assert session.window.pages[session.window.last - 1].trust is Trust.TOOL
    check_laws(session.branches.open("b1"))


def again(request: Request) -> Reply:
    return calls(branch(f"again{len(request.messages)}", "LEFT part"))


def in_and_out(main: list[Any], inside: list[Any]) -> Scripted:
    """A model that says some things in the main line, and others in branches, in turn."""

    def answer(request: Request) -> Any:
        reply = (inside if "You work in a branch now" in json.dumps(request.messages) else main).pop(0)
        return reply(request) if callable(reply) else reply

    return Scripted([answer] * 200)


LEFT = "the left part is zeta\n" + "and a line of it\n" * 60
FILLER = [calls((f"f{number}", "look", {"path": f"m{number}"})) for number in range(12)]


def test_a_sub_agents_result_that_left_the_window_is_not_worked_out_again() -> None:
    """After a compaction the model does not know any more that it was done, and hands it out once more."""
    session = opened(window=2000)
    main = [calls(branch("c1", "LEFT part")), *FILLER, again, again, "done"]
    result = Branching(in_and_out(main, [returned(LEFT), returned("once more")]), [look], session).run("go")
    assert result.text == "done"
    results = [session.contents.text(page.id) for page, _ in session.contents.pages() if page.answers and page.id > 0]
    assert ["was done before" in text and "the left part is zeta" in text for text in results[-2:]] == [True, False]
    # The second time it sees the result, and calls again all the same: so it is done again.
    assert [info.name for info, _ in session.branches.children()] == ["work/b1", "work/b2"]
    check_laws(session)


def test_a_result_that_was_forgotten_is_worked_out_again() -> None:
    session = opened(window=2000)
    main = [calls(branch("c1", "LEFT part")), *FILLER, "done", again, "done"]
    scripted = in_and_out(main, [returned(LEFT), returned("once more")])
    Branching(scripted, [look], session).run("go")
    page = next(page for page, _ in session.contents.pages() if page.answers and "zeta" in session.contents.text(page.id))
    session.forget(page.address)
    Branching(scripted, [look], session).run("more")
    assert len(session.branches.children()) == 2

"""The agent loop against scripted models: order of events, parallel tools, limits, compaction, early ends."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kilburn
from kilburn.agents.loop import Agent, Called, Limits, Returned, Said, Stopped
from kilburn.errors import EmptyPrompt, Overlong, SpecError, Unavailable
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Reply, Request, Tokens
from kilburn.prices import Prices
from kilburn.testing import FakeClock, Scripted, check_laws
from kilburn.wire.validity import validate_chat, validate_messages


def opened(window: int = 4000, **options: Any) -> Session:
    return kilburn.open(":memory:", window=window, policy="fifo", tokenizer="chars/4", **options).session("a")


def calls(*wanted: tuple[str, str, dict[str, Any]], text: str = "", finish: str = "calls", usage: Tokens | None = None) -> Reply:
    parts = [Part(kind=Kind.TEXT, text=text)] if text else []
    parts += [Part(kind=Kind.CALL, text=json.dumps(arguments), call=call, name=name) for call, name, arguments in wanted]
    return Reply(message=Message(role=Role.ASSISTANT, parts=tuple(parts)), finish=finish, usage=usage)


def talk(text: str, *, finish: str = "stop", usage: Tokens | None = None) -> Reply:
    return Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)), finish=finish, usage=usage)


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def fail(text: str) -> str:
    """Always fails."""
    raise RuntimeError(f"no {text}")


def contents(session: Session) -> list[tuple[str, Any]]:
    return [(message["role"], message.get("content")) for message in session.contents.messages()]


def test_events_come_in_order() -> None:
    model = Scripted([calls(("c1", "double", {"number": 4}), text="let me see"), "it is 8"], piece=4)
    session = opened()
    events = list(Agent(model, [double], session, system="be brief").stream("twice four?"))
    said = "".join(event.text for event in events if isinstance(event, Said))
    assert said == "let me seeit is 8"
    kinds = [type(event).__name__ for event in events]
    assert kinds == ["Said"] * 3 + ["Called", "Returned"] + ["Said"] * 2 + ["Stopped"]
    called, returned, stopped = events[3], events[4], events[-1]
    assert called == Called("c1", "double", '{"number": 4}')
    assert returned == Returned("c1", "8", False)
    assert isinstance(stopped, Stopped)
    assert (stopped.outcome.finish, stopped.outcome.text, stopped.outcome.steps) == ("stop", "it is 8", 2)
    assert [role for role, _ in contents(session)] == ["system", "user", "assistant", "tool", "assistant"]
    assert contents(session)[3] == ("tool", "8")
    for request in model.requests:
        validate_chat(request.messages)
        assert {tool.name for tool in request.tools} == {"double", "recall", "search_memory", "pin", "note", "remember"}
    check_laws(session)


def test_the_messages_form_and_no_memory() -> None:
    model = Scripted([calls(("c1", "double", {"number": 4})), "8"], form="messages")
    session = opened()
    assert Agent(model, [double], session, system="be brief", memory=False).run("twice four?").text == "8"
    for request in model.requests:
        validate_messages(request.messages)
        assert request.system == "be brief"
        assert [tool.name for tool in request.tools] == ["double"]


def test_two_runs_of_one_process_share_its_past() -> None:
    session = opened()
    Agent(Scripted(["one"]), [], session, system="first").run("a")
    model = Scripted(["two"])
    Agent(model, [], session, system="never appended twice").run("b")
    assert [message["content"] for message in model.requests[0].messages] == ["first", "a", "one", "b"]


def test_going_on_without_a_new_message() -> None:
    session = opened()
    session.append({"role": "user", "content": "hello"})
    assert Agent(Scripted(["hi"]), [], session).run().text == "hi"
    assert Agent(Scripted(["again"]), [], session).run({"role": "user", "content": "as a dict"}).text == "again"
    assert len(session.contents.messages()) == 4


def test_parallel_tools_run_at_the_same_time_and_answer_in_order() -> None:
    together = threading.Barrier(3, timeout=600)
    left = [threading.Event() for _ in range(4)]
    left[3].set()

    def meet(number: int) -> str:
        """All are here at once, and the last one leaves first."""
        together.wait()
        assert left[number + 1].wait(600)
        left[number].set()
        return f"met {number}"

    model = Scripted([calls(*((f"c{number}", "meet", {"number": number}) for number in range(3))), "done"])
    session = opened()
    events = list(Agent(model, [meet], session).stream("go"))
    assert [event for event in events if isinstance(event, Returned)] == [
        Returned(f"c{number}", f"met {number}") for number in range(3)
    ]
    assert [type(event).__name__ for event in events] == ["Called"] * 3 + ["Returned"] * 3 + ["Said", "Stopped"]
    check_laws(session)


def test_failures_of_tools_are_told_to_the_model() -> None:
    bad = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text='{"text": ', call="c3", name="fail"),))
    model = Scripted([calls(("c1", "fail", {"text": "way"}), ("c2", "missing", {})), bad, "I give up"], form="messages")
    session = opened()
    events = [event for event in Agent(model, [fail], session).stream("go") if isinstance(event, Returned)]
    assert [event.failed for event in events] == [True, True, True]
    assert "RuntimeError: no way" in events[0].text
    assert "no tool 'missing'" in events[1].text
    assert "there are: fail" in events[1].text
    assert "fail: " in events[2].text
    failed = [
        block
        for message in model.requests[-1].messages
        for block in message["content"]
        if isinstance(block, dict) and block.get("is_error")
    ]
    assert len(failed) == 3, "Anthropic is told that they failed"
    for request in model.requests:
        validate_messages(request.messages)


def test_memory_tools_work_in_the_loop() -> None:
    model = Scripted(
        [
            calls(("m1", "note", {"note": "the port is 8471"})),
            calls(
                ("m2", "search_memory", {"query": "which port"}),
                ("m3", "recall", {"address": "p1"}),
                ("m4", "recall", {"address": "p999"}),
            ),
            "8471",
        ]
    )
    session = opened()
    returned = {
        event.call: event for event in Agent(model, [], session).stream("what is the port?") if isinstance(event, Returned)
    }
    assert "8471" in returned["m2"].text
    assert "what is the port?" in returned["m3"].text
    assert returned["m4"].failed
    assert not returned["m3"].failed
    copy = next(page for page, _ in session.contents.pages() if page.call == "m3" and page.kind is Kind.RESULT)
    assert copy.sources == (1,)
    check_laws(session)


def test_names_may_not_clash() -> None:
    def recall(address: str) -> str:
        return address

    with pytest.raises(SpecError):
        Agent(Scripted([]), [recall], opened())
    Agent(Scripted([]), [recall], opened(), memory=False)
    with pytest.raises(SpecError):
        Agent(Scripted([]), [double, double], opened())


def endless(number: int = 1000) -> list[Any]:
    return [
        calls((f"e{index}", "double", {"number": index}), usage=Tokens(prompt=100, reply=10, cached=40))
        for index in range(number)
    ]


@pytest.mark.parametrize(
    ("limits", "finish", "steps"),
    [
        (Limits(steps=3), "steps", 3),
        (Limits(steps=None, tokens=330), "tokens", 3),
        (Limits(steps=None, tokens=331), "tokens", 4),
        (Limits(steps=None, seconds=10.0), "seconds", None),
        (Limits(steps=None, money=0.001, prices=Prices(input=1.0, cached=0.1, output=10.0)), "money", 7),
        (Limits(steps=0), "steps", 0),
    ],
)
def test_limits(limits: Limits, finish: str, steps: int | None) -> None:
    session = opened()
    outcome = Agent(Scripted(endless()), [double], session, limits=limits, clock=FakeClock(tick=0.5)).run("go")
    assert outcome.finish == finish
    if steps is not None:
        assert outcome.steps == steps
        assert outcome.tokens == 110 * steps
    else:
        assert 1 <= outcome.steps < 20
        assert outcome.seconds >= 10.0
    if finish == "money":
        assert outcome.money == pytest.approx(steps * (60 * 1.0 + 40 * 0.1 + 10 * 10.0) / 1e6 if steps else 0)
    assert not session.window.waiting(), "no call is left without its result"
    check_laws(session)


def test_the_reply_cap_and_time_reach_the_model() -> None:
    model = Scripted(["hi"])
    Agent(model, [], opened(), limits=Limits(reply=77, seconds=30.0)).run("go")
    assert model.requests[0].max_tokens == 77
    timeout = model.requests[0].timeout
    assert timeout is not None
    assert 0 < timeout <= 30.0


@pytest.mark.parametrize("finish", ["stop", "length", "refused"])
def test_how_a_reply_ended_is_told(finish: str) -> None:
    assert Agent(Scripted([talk("x", finish=finish)]), [], opened()).run("go").finish == finish


def filled(window: int = 4000) -> Session:
    session = opened(window)
    session.append({"role": "user", "content": "the task"})
    for number in range(60):
        session.append({"role": "user", "content": f"{number} " + "w" * 400})
    return session


def test_an_overlong_prompt_is_compacted_and_tried_once_more() -> None:
    session = filled()
    model = Scripted([Overlong("too long"), "fits now"])
    outcome = Agent(model, [double], session).run("go")
    assert outcome.text == "fits now"
    first, second = model.requests
    size = [sum(len(json.dumps(message)) for message in request.messages) for request in (first, second)]
    assert size[1] < 0.85 * size[0]
    assert second.messages[0]["content"] == "the task"
    assert second.messages[-1]["content"] == "go"
    assert len(session.contents.messages()) == 63, "nothing was lost"
    check_laws(session)


def test_overlong_twice_raises_and_nothing_is_lost() -> None:
    session = filled()
    with pytest.raises(Overlong):
        Agent(Scripted([Overlong("too long"), Overlong("still too long")]), [double], session).run("go")
    assert len(session.contents.messages()) == 62
    assert session.contents.messages()[-1]["content"] == "go"
    assert Agent(Scripted(["later"]), [double], session).run().text == "later"
    check_laws(session)


def test_an_overlong_short_prompt() -> None:
    session = opened()
    model = Scripted([Overlong("too long"), "ok"])
    assert Agent(model, [], session, memory=False).run("hi").text == "ok"
    assert session.prompts.budget.capacity >= 1


def test_a_window_too_small_for_the_tools_says_so() -> None:
    session = opened(200)
    with pytest.raises(kilburn.errors.InvalidBudget) as caught:
        Agent(Scripted([]), [double], session)
    assert "overhead" in str(caught.value)
    assert session.prompts.budget.window == 200


def test_the_models_failure_leaves_what_came_before() -> None:
    session = opened()
    model = Scripted([calls(("c1", "double", {"number": 1})), Unavailable("gone")])
    with pytest.raises(Unavailable):
        Agent(model, [double], session).run("go")
    assert contents(session)[-1] == ("tool", "2")
    assert Agent(Scripted(["2"]), [double], session).run().text == "2"


def test_engines_that_count_call_ids_from_zero() -> None:
    again = [calls(("call_0", "double", {"number": 1}), ("call_1", "double", {"number": 2})) for _ in range(3)]
    model = Scripted(
        [
            *again,
            calls(("x", "double", {"number": 1}), ("x", "double", {"number": 2})),
            calls(("", "double", {"number": 3})),
            "done",
        ]
    )
    session = opened()
    events = list(Agent(model, [double], session).stream("go"))
    called = [event.call for event in events if isinstance(event, Called)]
    assert len(called) == len(set(called)) == 9
    assert called == [event.call for event in events if isinstance(event, Returned)]
    for request in model.requests:
        validate_chat(request.messages)
    check_laws(session)


def test_half_a_character_in_a_reply_does_not_end_the_run() -> None:
    session = opened()
    agent = Agent(Scripted(["It works \ud83d."]), [], session)
    assert agent.run("does it?").text == "It works \ufffd."
    assert session.contents.messages()[-1]["content"] == "It works \ufffd."


def test_fresh_ids_do_not_collide_with_ids_that_look_like_them() -> None:
    """A model may well use `call_3_0` itself."""
    guesses = [calls((f"call_{turn}_{index}", "double", {"number": 1})) for turn in range(1, 12) for index in range(2)]
    model = Scripted([*guesses, *([calls(("call_2_0", "double", {"number": 1}))] * 8), "done"])
    assert Agent(model, [double], opened(20_000)).run("go").text == "done"


def test_two_calls_of_one_reply_cannot_get_one_fresh_id() -> None:
    model = Scripted(
        [
            calls(("a", "double", {"number": 1})),
            calls(("a", "double", {"number": 1}), ("call_4_0", "double", {"number": 2})),
            "done",
        ]
    )
    assert Agent(model, [double], opened()).run("go").text == "done"


def test_a_fresh_id_is_none_that_was_used_long_before() -> None:
    model = Scripted([calls(("call_4_0", "double", {"number": 1})), calls(("", "double", {"number": 2})), "done"])
    session = opened()
    assert Agent(model, [double], session).run("go").text == "done"
    assert [text for role, text in contents(session) if role == "tool"] == ["2", "4"]


def test_an_empty_reply_and_one_without_a_final_reply() -> None:
    session = opened()
    outcome = Agent(Scripted([""]), [], session).run("go")
    assert (outcome.finish, outcome.text, outcome.steps) == ("stop", "", 1)
    check_laws(session)


class Counting:
    """A model that knows whether its stream was closed."""

    name, form, context, tokenizer = "counting", "chat", None, "chars/4"

    def __init__(self) -> None:
        self.closed = 0

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        try:
            for number in range(1000):
                yield Delta(f"{number} ")
            yield talk("never")
        finally:
            self.closed += 1


def test_closing_the_stream_early_stops_the_model() -> None:
    model, session = Counting(), opened()
    events = Agent(model, [], session).stream("go")
    assert next(events) == Said("0 ")
    events.close()  # type: ignore[attr-defined]
    assert model.closed == 1
    assert contents(session) == [("user", "go")]
    assert Agent(Scripted(["hi"]), [], session).run().text == "hi"


async def test_closing_the_async_stream_early_stops_the_model() -> None:
    model, session = Counting(), opened()
    events = Agent(model, [], session).astream("go")
    async for event in events:
        assert event == Said("0 ")
        break
    await events.aclose()  # type: ignore[attr-defined]
    assert model.closed == 1


def test_closing_between_call_and_result_leaves_a_valid_session() -> None:
    session = opened()
    events = Agent(Scripted([calls(("c1", "double", {"number": 1}))]), [double], session).stream("go")
    assert isinstance(next(events), Called)
    events.close()  # type: ignore[attr-defined]
    validate_chat(session.render())
    model = Scripted(["went on"])
    assert Agent(model, [double], session).run("and now?").text == "went on"
    validate_chat(model.requests[0].messages)
    check_laws(session)


async def test_async_runs_use_the_callers_loop_for_async_tools() -> None:
    own = asyncio.get_running_loop()
    together = asyncio.Event()

    async def wait(number: int) -> str:
        """Two of these must be waiting at once."""
        assert asyncio.get_running_loop() is own
        if number == 1:
            await asyncio.wait_for(together.wait(), 60)
        else:
            together.set()
        return f"waited {number}"

    model = Scripted([calls(("c1", "wait", {"number": 1}), ("c2", "wait", {"number": 2})), "done"])
    session = opened()
    outcome = await Agent(model, [wait], session).arun("go")
    assert outcome.text == "done"
    assert [text for role, text in contents(session) if role == "tool"] == ["waited 1", "waited 2"]


async def test_async_events_come_in_order_and_the_loop_stays_free() -> None:
    beaten = threading.Event()

    def slow(_: Request) -> str:
        """Answers once the loop has turned meanwhile."""
        beaten.clear()
        assert beaten.wait(600)
        return "slow answer"

    async def beat() -> None:
        while True:
            await asyncio.sleep(0.001)
            beaten.set()

    beating = asyncio.create_task(beat())
    names = [
        type(event).__name__
        async for event in Agent(Scripted([calls(("c", "double", {"number": 1})), slow]), [double], opened()).astream("go")
    ]
    beating.cancel()
    assert names == ["Called", "Returned", "Said", "Stopped"]


async def test_async_failures_reach_the_caller() -> None:
    with pytest.raises(Unavailable):
        await Agent(Scripted([]), [], opened()).arun("go")


def test_sync_run_of_async_tools() -> None:
    async def nap(number: int) -> int:
        await asyncio.sleep(0.001)
        return number

    session = opened()
    Agent(Scripted([calls(("a", "nap", {"number": 1}), ("b", "nap", {"number": 2})), "done"]), [nap], session).run("go")
    assert [text for role, text in contents(session) if role == "tool"] == ["1", "2"]


def test_a_tool_that_uses_the_process_itself() -> None:
    session = opened()

    def look(query: str) -> str:
        return " ".join(hit.address for hit in session.search(query))

    Agent(Scripted([calls(("c", "look", {"query": "needle"})), "done"]), [look], session).run("find the needle")
    assert "p1" in contents(session)[2][1].split()


def test_interrupting_a_tool_keeps_the_session() -> None:
    def stop() -> str:
        raise KeyboardInterrupt

    session = opened()
    with pytest.raises(KeyboardInterrupt):
        Agent(Scripted([calls(("c", "stop", {}))]), [stop], session).run("go")
    validate_chat(session.render())
    assert Agent(Scripted(["on"]), [stop], session).run("go on").text == "on"


def test_a_long_run_never_overflows() -> None:
    def read(number: int) -> str:
        """A long text."""
        return "\n".join(f"line {line} of {number}" for line in range(300))

    session = opened(3000)
    script: list[Any] = [calls((f"c{number}", "read", {"number": number})) for number in range(40)]
    model = Scripted([*script, "done"])
    outcome = Agent(model, [read], session, limits=Limits(steps=100), system="rules").run("the task")
    assert outcome.finish == "stop"
    overhead = session.prompts.budget.overhead
    for request in model.requests:
        validate_chat(request.messages)
        assert sum(len(str(message.get("content") or "")) // 4 for message in request.messages) + overhead <= 3000
        assert request.messages[0]["content"] == "rules"
        assert request.messages[1]["content"] == "the task"
    assert session.stats().overflow == 0
    assert session.recall("p4") == read(0)
    check_laws(session)


ODD: list[Any] = [-30_000, 2**70, 10_000_000, 0, 12.5, "twelve", [1], None]


@pytest.mark.parametrize("lie", ODD, ids=str)
@pytest.mark.parametrize("limit", ["tokens", "money"])
def test_no_usage_switches_a_limit_off(limit: str, lie: Any) -> None:
    usage = Tokens(prompt=lie, reply=10)
    limits = {"tokens": Limits(steps=30, tokens=25_000), "money": Limits(steps=30, money=0.025, prices=Prices(input=1.0))}
    session = filled()
    model = Scripted([calls((f"e{index}", "double", {"number": index}), usage=usage) for index in range(40)])
    outcome = Agent(model, [double], session, limits=limits[limit]).run("go")
    assert outcome.finish == limit
    assert 5 <= outcome.steps <= 15, "each call is charged what its prompt of some 3,000 tokens is counted as"
    assert not session.window.waiting()
    check_laws(session)


@pytest.mark.parametrize(
    "usage",
    [Tokens(prompt=300, cached=10_000), Tokens(prompt=300, written=-10_000), Tokens(prompt=300, beside=Tokens(prompt=-9000))],
    ids=str,
)
def test_no_part_of_a_usage_gives_money_back(usage: Tokens) -> None:
    outcome = Agent(Scripted([talk("x", usage=usage)]), [], opened(), limits=Limits(prices=Prices(input=1.0, written=1.0))).run(
        "go"
    )
    assert outcome.money > 0
    assert outcome.tokens > 0


def test_a_reply_without_usage_is_charged_whole() -> None:
    model = Scripted([calls(("c1", "double", {"number": 4}), text="let me see"), "it is 8"])
    session = opened()
    outcome = Agent(model, [double], session, limits=Limits(prices=Prices(input=1.0, output=1e6))).run("twice four?")
    spoken = sum(session.counter.count(text) for text in ("let me see", '{"number": 4}', "it is 8"))
    assert outcome.money == pytest.approx(spoken, abs=0.01)
    assert outcome.tokens > 2 * session.prompts.budget.overhead, "the tools' schemas are part of every prompt"


def test_a_session_of_which_all_is_forgotten_asks_no_model_and_goes_on() -> None:
    model = Scripted(["Hello.", "Again."])
    session = opened()
    agent = Agent(model, [], session)
    with pytest.raises(EmptyPrompt):
        agent.run()
    agent.run("Hello?")
    assert session.render()
    session.forget(f"p1-p{session.window.last}")
    assert session.render() == []
    assert session.render("messages") == []
    before = len(model.requests)
    with pytest.raises(EmptyPrompt, match="append a message"):
        agent.run()
    assert len(model.requests) == before
    assert agent.run("Are you there?").text == "Again."
    assert [message["content"] for message in session.render()] == ["Are you there?", "Again."]
    check_laws(session)


def test_a_model_is_named_as_where_a_store_is_opened() -> None:
    """One resolver: what `kilburn.open(model=...)` takes and refuses."""
    assert Agent("scripted(['it is 8'])", [], opened()).run("twice four?").text == "it is 8"
    model = Scripted(["yes"])
    assert Agent(model, [], opened()).model is model
    for wrong in ("gpt-5", "gpt-4.1", "nope", "echo(context='x')", "fifo", None, 7, Scripted, object()):
        said = []
        for take in (lambda spec: Agent(spec, [], opened()), lambda spec: kilburn.open(":memory:", model=spec or 0)):
            with pytest.raises(SpecError) as raised:
                take(wrong)
            said.append(str(raised.value).replace("0 is", "None is"))
        assert said[0] == said[1]
    with pytest.raises(SpecError, match=r"known: chat, .*; a provider's model is chat\('gpt-5'\) or messages\('gpt-5'\)"):
        Agent("gpt-5", [], opened())

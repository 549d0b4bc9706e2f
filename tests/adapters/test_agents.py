"""The OpenAI Agents SDK with its own scripted model: its sessions in sessions of a store."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kilburn

pytest.importorskip("agents.run", reason="the OpenAI Agents SDK is not installed: pip install '.[agents]' in the checkout")

from agents.run import ModelInputData
from agents.testing import ScriptedModel

from agents import Agent, RunConfig, Runner, UserError, function_tool
from kilburn.adapters.agents import AgentsSession, chat_messages, sdk_items, tools
from kilburn.testing import check_laws

WINDOW = 1500


@pytest.fixture
def store() -> Iterator[kilburn.Store]:
    with kilburn.open(":memory:", window=WINDOW, policy="lru", embedder=None) as store:
        yield store


def call(name: str, number: int, **arguments: str) -> Any:
    from openai.types.responses import ResponseFunctionToolCall

    return ResponseFunctionToolCall(
        type="function_call", name=name, call_id=f"call{number}", arguments=json.dumps(arguments), id=f"fc{number}"
    )


def text(words: str) -> Any:
    from openai.types.responses import ResponseOutputMessage, ResponseOutputText

    content = ResponseOutputText(type="output_text", text=words, annotations=[], logprobs=[])
    return ResponseOutputMessage(id="m", type="message", role="assistant", status="completed", content=[content])


@function_tool
def read(path: str) -> str:
    """Read a file."""
    if path == "bad":
        raise RuntimeError("no such file")
    return f"{path}: " + "words of the file " * 40


def config(session: AgentsSession) -> RunConfig:
    return RunConfig(call_model_input_filter=session.window, tracing_disabled=True)


async def test_a_long_run_stays_in_the_window(store: kilburn.Store) -> None:
    steps = [{"output": [call("read", 2 * n, path=f"a{n}"), call("read", 2 * n + 1, path=f"b{n}")]} for n in range(8)]
    model = ScriptedModel([*steps, {"output": [text("Done.")]}, {"output": [text("Yes.")]}])
    opened = store.session("s")
    session = AgentsSession(opened)
    agent = Agent(name="a", instructions="Be brief.", tools=[read, *tools(session)], model=model)
    done = await Runner.run(agent, "Read on.", session=session, run_config=config(session), max_turns=20)
    assert done.final_output == "Done."
    sizes = [opened.counter.count(json.dumps(each.input)) for each in model.calls]
    assert max(sizes) < 1.3 * WINDOW
    results = [page for page, _ in opened.contents.pages() if page.kind == "result"]
    assert len(results) == 16, "each result once"
    for each in model.calls:
        calls = [item["call_id"] for item in each.input if item.get("type") == "function_call"]
        answers = [item["call_id"] for item in each.input if item.get("type") == "function_call_output"]
        assert sorted(calls) == sorted(answers)
    again = AgentsSession(opened)
    await Runner.run(agent, "Sure?", session=again, run_config=config(again))
    assert [m["content"] for m in opened.contents.messages()][-3:] == ["Done.", "Sure?", "Yes."]


async def test_streams_errors_and_two_sessions(store: kilburn.Store) -> None:
    async def talk(name: str) -> list[Any]:
        model = ScriptedModel(
            [{"output": [call("read", 1, path="bad")]}, {"error": RuntimeError("upstream")}, {"output": [text(f"Hello {name}.")]}]
        )
        session = AgentsSession(store.session(name))
        agent = Agent(name="a", tools=[read], model=model)
        with pytest.raises(RuntimeError):
            async for _ in Runner.run_streamed(
                agent, f"I am {name}.", session=session, run_config=config(session)
            ).stream_events():
                pass
        run = Runner.run_streamed(agent, "Go on.", session=session, run_config=config(session))
        async for _ in run.stream_events():
            pass
        return [message["content"] for message in store.session(name).contents.messages()]

    for name, told in zip(("Ana", "Rui"), await asyncio.gather(talk("Ana"), talk("Rui")), strict=True):
        assert told[0] == f"I am {name}."
        assert "An error occurred" in told[2]
        assert told[-2:] == ["Go on.", f"Hello {name}."]


async def test_the_session_protocol(store: kilburn.Store) -> None:
    opened = store.session("s")
    session = AgentsSession(opened)
    reasoning = {"type": "reasoning", "id": "rs1", "summary": []}
    items = [{"role": "user", "content": "Hi."}, reasoning, {"role": "assistant", "content": "Hello."}]
    await session.add_items(items)
    assert await session.get_items() == items
    assert await session.get_items(limit=1) == items[-1:]
    assert await session.pop_item() == items[-1]
    assert await session.get_items() == items[:1], "reasoning does not stand alone"
    await session.clear_session()
    assert await session.get_items() == []
    assert await session.pop_item() is None
    assert opened.contents.messages()[0]["content"] == "Hi.", "it stays readable"


def test_items_come_back() -> None:
    image = {"type": "input_image", "image_url": "https://example.org/a.png", "detail": "auto"}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "See."}, image]}]
    assert sdk_items(chat_messages(items)) == items


async def test_a_run_that_is_cancelled_between_call_and_result(store: kilburn.Store) -> None:
    @function_tool(failure_error_function=None)
    async def wait(path: str) -> str:
        """Wait."""
        if path == "raise":
            raise ValueError("the disk is gone")
        await asyncio.sleep(60)
        return ""

    opened = store.session("s")
    for number, path in enumerate(("raise", "sleep")):
        session = AgentsSession(opened)
        model = ScriptedModel([{"output": [call("wait", number, path=path)]}, {"output": [text("Fine.")]}])
        agent = Agent(name="a", tools=[wait], model=model)
        with pytest.raises((UserError, ValueError, asyncio.TimeoutError)):
            await asyncio.wait_for(Runner.run(agent, "Wait.", session=session, run_config=config(session)), 1)
        done = await Runner.run(agent, "Do not wait.", session=session, run_config=config(session))
        assert done.final_output == "Fine."
        calls = [item["call_id"] for item in model.calls[-1].input if item.get("type") == "function_call"]
        answers = [item["call_id"] for item in model.calls[-1].input if item.get("type") == "function_call_output"]
        assert calls == answers
        check_laws(opened)


async def test_two_runs_with_one_session(store: kilburn.Store) -> None:
    opened = store.session("s")
    session = AgentsSession(opened)

    async def talk(name: str) -> None:
        model = ScriptedModel(
            [{"output": [call("read", number, path=f"{name}{number}")]} for number in range(3)] + [{"output": [text("Done.")]}]
        )
        agent = Agent(name=name, tools=[read], model=model)
        await Runner.run(agent, f"I am {name}.", session=session, run_config=config(session))

    await asyncio.gather(talk("Ana"), talk("Rui"))
    check_laws(opened)
    again = AgentsSession(opened)
    model = ScriptedModel([{"output": [text("Yes.")]}])
    await Runner.run(Agent(name="a", model=model), "Sure?", session=again, run_config=config(again))
    check_laws(opened)


def test_a_run_and_the_session_from_two_threads(store: kilburn.Store) -> None:
    session = AgentsSession(store.session("s"))
    given = ModelInputData(input=[{"role": "user", "content": "Hi."}], instructions=None)

    def work(what: Any) -> None:
        for _ in range(60):
            what()

    say = [{"role": "assistant", "content": "Hello."}]
    threads = [
        threading.Thread(target=work, args=(what,), daemon=True)
        for what in (
            lambda: session._window(given, None),
            lambda: session.history.append(say),
            lambda: session._window(given, None),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    check_laws(session.history.session)

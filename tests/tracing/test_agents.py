"""Spans of agents, their tools, branches, recursive calls and compactions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

import kilburn
from agents.test_branch import branch, look
from agents.test_loop import calls
from agents.test_rlm import ASK_ALL, Answering, cell
from kilburn import tracing
from kilburn.agents.branch import Branching
from kilburn.agents.loop import Agent
from kilburn.errors import SandboxRefused, Unavailable
from kilburn.kernel.session import Session
from kilburn.model import Reply, Tokens, build_request, complete
from kilburn.recursion.rlm import RecursiveModel
from kilburn.recursion.sandbox import open_sandbox
from kilburn.testing import Scripted
from startup import cost_of_import
from tracing.conftest import Told

CANARY = "canary-9d1c"

NEWER = {"gen_ai.conversation.compacted", "gen_ai.usage.cache_write.input_tokens"}
"""Names of v0.1.0 of the conventions that their Python package does not have yet."""

KNOWN = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")} | NEWER


def opened(window: int = 4000, policy: Any = "hybrid", model: Any = None) -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4", model=model, embedder=None).session("work")


def given(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def check_names(told: Told) -> None:
    """Every name is one of the conventions or our own, and nothing that was said is in any."""
    for span in told.spans:
        for name in given(span):
            assert name in KNOWN or name.startswith("kilburn.") or name == "error.type", name
        assert CANARY not in f"{span.name} {given(span)} {span.status.description} {[event.attributes for event in span.events]}"


def test_an_agent_its_model_and_its_tools_are_one_tree(told: Told) -> None:
    seen: list[Any] = []

    def tool(path: str) -> str:
        """Reads a file."""
        from opentelemetry import trace

        seen.append(trace.get_current_span().get_span_context().span_id)
        return f"{path}: {CANARY}"

    session = opened()
    reply = Reply(message=calls(("c1", "tool", {"path": CANARY})).message, usage=Tokens(prompt=40, cached=30, written=5, reply=7))
    model = Scripted([reply, f"done {CANARY}"], name="m-1")
    result = Agent(model, [tool], session, system=CANARY).run(CANARY)
    assert result.steps == 2
    [run], [first, second], [called] = told.named("invoke_agent"), told.named("chat"), told.named("execute_tool")
    assert {span.context.trace_id for span in told.spans} == {run.context.trace_id}
    assert [told.above(span) for span in (first, second, called)] == [["invoke_agent"]] * 3
    assert seen == [called.context.span_id], "what a tool calls belongs to its span"
    assert called.name == "execute_tool tool"
    assert given(called) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "tool",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.id": "c1",
        "gen_ai.conversation.id": "work",
    }
    chat = given(first)
    assert (chat["gen_ai.request.model"], chat["gen_ai.provider.name"], chat["gen_ai.conversation.id"]) == (
        "m-1",
        "scripted",
        "work",
    )
    assert chat["gen_ai.usage.input_tokens"] == 40
    assert chat["gen_ai.usage.cache_read.input_tokens"] == 30
    assert chat["gen_ai.usage.cache_write.input_tokens"] == chat["gen_ai.usage.cache_creation.input_tokens"] == 5
    assert chat["gen_ai.response.finish_reasons"] == ("stop",)
    assert chat["gen_ai.response.time_to_first_chunk"] >= 0
    assert given(run)["kilburn.steps"] == 2
    assert given(run)["kilburn.tokens"] == result.tokens
    check_names(told)


def test_a_failure_is_told_by_its_kind_and_not_by_its_words(told: Told) -> None:
    def tool() -> str:
        """Fails."""
        raise ValueError(CANARY)

    session = opened()
    model = Scripted([calls(("c1", "tool", {}), ("c2", "recall", {"address": "p99"}), ("c3", CANARY, {})), Unavailable(CANARY)])
    with pytest.raises(Unavailable):
        Agent(model, [tool], session).run("go")
    kinds = {span.name: given(span).get("error.type") for span in told.spans}
    assert kinds == {
        "invoke_agent": "Unavailable",
        "chat scripted": "Unavailable",
        "execute_tool tool": "tool_error",
        "execute_tool recall": "tool_error",
        "execute_tool unknown": "tool_error",
    }
    check_names(told)


def test_a_branch_and_what_it_does_is_in_the_call_that_began_it(told: Told) -> None:
    session = opened()
    model = Scripted(
        [
            calls(branch("c1", "read a file")),
            calls(("d1", "look", {"path": "a"})),
            calls(("d2", "return", {"message": "fine"})),
            "done",
        ]
    )
    Branching(model, [look], session).run("check")
    [inner] = told.named("invoke_agent branch")
    assert told.above(inner) == ["execute_tool branch", "invoke_agent"]
    assert given(inner)["gen_ai.conversation.id"] == "work/b1"
    [looked] = told.named("execute_tool look")
    assert told.above(looked) == ["invoke_agent branch", "execute_tool branch", "invoke_agent"]
    assert len({span.context.trace_id for span in told.spans}) == 1
    check_names(told)


def test_a_run_from_a_coroutine_is_in_the_span_of_its_caller(told: Told) -> None:
    async def tool() -> str:
        """Waits."""
        await asyncio.sleep(0)
        return "ok"

    async def run() -> None:
        with tracing.span("request", {}):
            await Agent(Scripted([calls(("c1", "tool", {})), "done"]), [tool], opened()).arun("go")

    asyncio.run(run())
    assert {tuple(told.above(span)) for span in told.named("chat")} == {("invoke_agent", "request")}
    assert told.above(told.named("execute_tool")[0]) == ["invoke_agent", "request"]


def test_the_calls_of_a_recursive_model_are_in_the_cell_that_made_them(told: Told) -> None:
    try:
        open_sandbox().close()
    except SandboxRefused as error:
        pytest.skip(str(error))
    sub = Answering(lambda prompt: f"read {CANARY}")
    agent = RecursiveModel(Scripted([cell(ASK_ALL)]), opened(), sub=sub)
    assert len(agent.ask(f"which? {CANARY}", f"one\ntwo\nthree {CANARY}").content) == 3
    made = told.named("chat answering")
    assert [told.above(span) for span in made] == [["execute_tool repl", "invoke_agent"]] * 3
    assert {given(span)["gen_ai.conversation.id"] for span in made} == {"work"}
    check_names(told)


def test_a_compaction_has_the_figures_of_the_ledger_and_the_model_that_it_asked(told: Told) -> None:
    session = opened(900, "summarize", Scripted([f"a summary {CANARY}"] * 50, name="summariser"))
    agent = Agent(Scripted([f"reply {number} " + "words of it " * 40 for number in range(12)]), [], session, memory=False)
    for number in range(12):
        agent.run(f"question {number} {CANARY}")
    receipts = [receipt for receipt in session.ledger.receipts() if receipt.policy == "summarize"]
    made = told.named("compact summarize")
    assert receipts
    assert [given(span)["kilburn.tokens.freed"] for span in made] == [receipt.freed for receipt in receipts]
    assert [given(span)["kilburn.outcome"] for span in made] == [str(receipt.outcome) for receipt in receipts]
    asked = told.named("chat summariser")
    assert asked
    assert all(told.above(span)[0] == "compact summarize" for span in asked)
    last = told.named("chat scripted")[-1]
    assert given(last)["gen_ai.conversation.compacted"] is True
    assert "gen_ai.conversation.compacted" not in given(told.named("chat scripted")[0])
    check_names(told)


class Broken(SpanProcessor):
    """A processor that fails at everything."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        raise RuntimeError(CANARY)

    def on_end(self, span: Any) -> None:
        raise RuntimeError(CANARY)


def test_a_broken_exporter_stops_no_agent(caplog: pytest.LogCaptureFixture) -> None:
    tracing.provider = provider = TracerProvider()
    provider.add_span_processor(Broken())
    try:
        model = Scripted([calls(("c1", "look", {"path": "a"})), "done"])
        assert Agent(model, [look], opened()).run("go").text == "done"
    finally:
        tracing.provider = None
    assert CANARY not in caplog.text


def test_a_stream_that_is_left_ends_its_spans(told: Told) -> None:
    events = Agent(Scripted(["a long reply " * 20], piece=5), [], opened()).stream("go")
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert {span.name for span in told.spans} == {"invoke_agent", "chat scripted"}
    assert not [span for span in told.spans if "error.type" in given(span)]


def test_without_opentelemetry_nothing_of_it_is_imported() -> None:
    modules, _ = cost_of_import("kilburn.agents.loop, kilburn.tracing")
    assert not [name for name in modules if name.startswith("opentelemetry")]
    code = """
import sys
import kilburn
from kilburn import tracing
from kilburn.agents.loop import Agent
from kilburn.testing import Scripted
session = kilburn.open(":memory:", window=4000, tokenizer="chars/4", embedder=None).session("s")
assert Agent(Scripted(["done"]), [], session).run("go").text == "done"
assert tracing.begin("x", {}) is tracing.NONE
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr


def test_a_program_that_imported_opentelemetry_and_set_nothing_up_is_told_nothing() -> None:
    import opentelemetry.trace

    assert isinstance(opentelemetry.trace.get_tracer_provider(), opentelemetry.trace.ProxyTracerProvider)
    assert tracing.begin("x", {}) is tracing.NONE
    model = Scripted(["hello"])
    assert complete(model, build_request(model, "hi")).text == "hello"

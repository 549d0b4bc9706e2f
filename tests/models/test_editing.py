"""The provider's context editing through the official SDK, against a real HTTP server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic import Anthropic
from anthropic.types.beta import BetaCompactionBlockParam
from pydantic import TypeAdapter

from kilburn import Store
from kilburn.agents.compaction import compact_at_provider
from kilburn.agents.loop import Agent
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import LawBroken, Refused, SpecError, Unavailable
from kilburn.event import Act
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.message import Kind
from kilburn.model import Reply, Request, Tokens, complete
from kilburn.models.editing import Editing
from kilburn.models.scripted import Scripted
from kilburn.prices import Prices
from kilburn.testing import check_laws
from kilburn.testing.models import check_model
from kilburn.wire.compaction import compaction_block, provider_report
from kilburn.wire.editing import provider_edits
from models.loopback import Answer, Loopback, loopback
from models.test_messages import block, event, open_messages, plain, start, text, told

EDITS = provider_edits(resolve("policies", "chain(clear_thinking, clear_tool_uses, compact)"))
SPENT = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 1000}
ITERATIONS = [
    {"type": "compaction", "input_tokens": 500, "output_tokens": 70, **SPENT},
    {"type": "message", "input_tokens": 10, "output_tokens": 2, **SPENT},
]
APPLIED = {"type": "clear_tool_uses_20250919", "cleared_tool_uses": 4, "cleared_input_tokens": 2000}


def compaction(index: int, content: Any, **more: Any) -> bytes:
    delta = {"type": "compaction_delta", "content": content, "encrypted_content": "eHg="}
    return block(index, {"type": "compaction", "content": None, **more}, delta)


def finish(reason: str = "end_turn", **more: Any) -> bytes:
    usage = {"output_tokens": 2, "iterations": ITERATIONS, **more.pop("usage", {})}
    return event("message_delta", delta={"stop_reason": reason}, usage=usage, **more) + event("message_stop")


def compacted(content: Any = "All so far: the parser.") -> Answer:
    applied = {"applied_edits": [APPLIED]}
    return told(start(), compaction(0, content), text(1, "Going", " on."), finish(context_management=applied))


def opened(policy: str = "compact(provider=True)") -> Session:
    session = Store(Sqlite(":memory:"), Budget(8000), policy, tokenizer="chars/4").session("a")
    session.append({"role": "system", "content": "Never touch the lock file."}, {"role": "user", "content": "Fix the parser."})
    for number in range(4):
        session.append({"role": "assistant", "content": f"step {number}"}, {"role": "user", "content": f"word {number} " * 40})
    return session


def request(session: Session, **options: Any) -> Request:
    prompt = session.render("messages")
    return Request(messages=prompt, system=prompt.system, max_tokens=64, options=options)


def exchange(session: Session, server: Loopback) -> Reply:
    with Editing(open_messages(server), EDITS) as model:
        reply = complete(model, request(session))
    session.append(reply.message)
    return reply


def test_contract() -> None:
    with loopback(plain(), forever=True) as server:
        check_model(lambda: Editing(open_messages(server), EDITS))


def test_the_request_carries_edits_and_headers_and_the_block_comes_back_first() -> None:
    session = opened()
    with loopback(compacted(), plain()) as server:
        reply = exchange(session, server)
        session.append({"role": "user", "content": "And then?"})
        exchange(session, server)
        first, second = server.asked
    assert first.path == "/v1/messages"
    assert first.headers["anthropic-beta"] == "context-management-2025-06-27,compact-2026-01-12"
    assert first.body["context_management"] == EDITS
    assert reply.text == "Going on."
    sent = second.body["messages"]
    TypeAdapter(BetaCompactionBlockParam).validate_python(sent[0]["content"][0], strict=True)
    assert sent[0] == {
        "role": "assistant",
        "content": [{"type": "compaction", "content": "All so far: the parser.", "encrypted_content": "eHg="}],
    }
    assert "Fix the parser." in json.dumps(sent[1]), "what is pinned stands where the provider reads it"
    assert "word 1 " not in json.dumps(sent)
    assert [message["role"] for message in sent] == ["assistant", "user", "assistant", "user"]
    assert second.body["system"] == "Never touch the lock file."
    assert session.recall("p4").startswith("word 0 ")
    check_laws(session)


def test_what_the_provider_did_is_recorded_and_its_cost_counted_apart() -> None:
    session = opened()
    with loopback(compacted()) as server:
        reply = exchange(session, server)
    assert reply.usage == Tokens(prompt=10, reply=2, beside=Tokens(prompt=1500, reply=70, cached=1000))
    assert reply.usage.total == 1582
    prices = Prices(input=1e6, cached=1e5, output=1e6)
    assert prices.cost(reply.usage) == pytest.approx(10 + 2 + 500 + 100 + 70)
    kept = provider_report(reply.message)
    assert kept.applied[0].cleared_input_tokens == 2000
    assert [iteration.type for iteration in kept.iterations] == ["compaction", "message"]
    assert session.contents.messages()[-1]["context_management"] == {"applied_edits": [APPLIED]}, (
        "it is in the transcript for good"
    )


def test_a_plain_reply_records_nothing() -> None:
    with loopback(plain()) as server, Editing(open_messages(server), EDITS) as model:
        reply = complete(model, request(opened()))
    assert reply.message.extra == '{"form":"messages","shape":"list"}'
    assert provider_report(reply.message).applied == ()


@pytest.mark.parametrize("content", [None, ""])
def test_a_compaction_that_failed_changes_nothing(content: Any) -> None:
    session = opened()
    before = session.render("messages")
    with loopback(compacted(content), plain()) as server:
        reply = exchange(session, server)
        assert compaction_block(reply.message) is not None
        session.append({"role": "user", "content": "And then?"})
        exchange(session, server)
        sent = server.asked[1].body["messages"]
    assert sent[: len(before)] == json.loads(json.dumps(list(before)))


def test_a_pause_ends_the_turn_and_says_so() -> None:
    session = opened()
    with loopback(told(start(), compaction(0, "Short."), finish("compaction"))) as server:
        reply = exchange(session, server)
    assert (reply.finish, reply.text) == ("stop", "")
    assert provider_report(reply.message).paused


def test_an_agent_goes_on_behind_the_block() -> None:
    session = opened()
    with loopback(compacted(), plain()) as server, Editing(open_messages(server), EDITS) as model:
        agent = Agent(model, [], session, memory=False)
        assert agent.run("Go on.").tokens == 1582, "the compaction's tokens are in the sum"
        outcome = agent.run("And then?")
        assert server.asked[1].body["messages"][0]["content"][0]["type"] == "compaction"
    assert outcome.text == "Hello"
    assert outcome.tokens == 12, "the second run had no compaction"


@pytest.mark.parametrize("bad", [3, ["x"]])
def test_a_malformed_block_is_no_reply(bad: Any) -> None:
    with loopback(compacted(bad)) as server, open_messages(server) as model, pytest.raises(Unavailable):
        complete(model, request(opened(), context_management=EDITS))


def test_what_the_provider_would_refuse_is_not_sent() -> None:
    with loopback() as server, open_messages(server) as model:
        for options in (
            {"context_management": EDITS, "compaction": {"type": "summarize"}},
            {"context_management": {"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 9}}]}},
            {"compaction": {"type": "forget"}},
        ):
            with pytest.raises(Refused):
                complete(model, request(opened(), **options))
        assert server.asked == []
        with pytest.raises(SpecError):
            Editing(model, {"edits": 3})
    with pytest.raises(SpecError):
        Editing(Scripted(), EDITS)


def signed(content: Any = "All so far: the parser.") -> Answer:
    delta = {"type": "compaction_delta", "content": content}
    return told(start(), block(0, {"type": "compaction", "content": None, "signature": "c2ln"}, delta), finish("compaction"))


def test_on_demand_at_the_provider() -> None:
    session = opened("fifo")
    with loopback(signed(), plain()) as server:
        with open_messages(server) as model:
            done = compact_at_provider(session, model, instructions="Briefly.")
        asked = server.asked[0]
        assert asked.body["compaction"] == {"type": "summarize", "instructions": "Briefly."}
        assert "context_management" not in asked.body
        assert asked.headers["anthropic-beta"] == "compact-2026-09-04"
        session.append({"role": "user", "content": "And then?"})
        with Editing(open_messages(server), {}) as model:
            complete(model, request(session))
        sent = server.asked[1].body["messages"]
        assert server.asked[1].headers["anthropic-beta"] == "compact-2026-09-04"
    assert (done.outcome, done.address) == ("done", "p11")
    assert done.freed > 100
    block = {"type": "compaction", "content": "All so far: the parser.", "signature": "c2ln"}
    assert sent[0]["content"] == [block, {"type": "text", "text": "step 3"}]
    said = json.dumps(sent)
    assert said.count('"compaction"') == 1
    assert "Fix the parser." in said
    assert "word 3 " in said, "the newest messages stay"
    assert "word 0 " not in said
    assert session.recall("p4").startswith("word 0 ")
    check_laws(session)


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (signed(None), "failed"),
        (told(start(), text(0, "No."), finish()), "rejected"),
        (told(start(), compaction(0, "a"), compaction(1, "b"), finish("compaction")), "rejected"),
        (Answer(400, {}, {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}), "refused"),
        (Answer(529, {}, {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}), "failed"),
    ],
)
def test_on_demand_that_fails_changes_nothing(answer: Answer, outcome: str) -> None:
    session = opened()
    before = session.render("messages")
    with loopback(answer) as server, open_messages(server) as model:
        assert compact_at_provider(session, model).outcome == outcome
    assert session.render("messages") == before
    assert [item.data["outcome"] for item in session.ledger.events() if item.act is Act.COMPACT] == [outcome]


def test_on_demand_waits_for_results() -> None:
    session = opened()
    session.append({"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]})
    with loopback() as server, open_messages(server) as model, pytest.raises(LawBroken):
        compact_at_provider(session, model)
    assert session.window.resident()[-1].kind is Kind.CALL


def test_the_official_client_reads_the_same_stream() -> None:
    with (
        loopback(compacted()) as server,
        Anthropic(base_url=server.url, api_key="key", max_retries=0) as client,
        client.beta.messages.stream(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hello"}], betas=["compact-2026-01-12"]
        ) as stream,
    ):
        message = stream.get_final_message()
    with loopback(compacted()) as server, open_messages(server) as model:
        reply = complete(model, request(opened(), context_management=EDITS))
    ours = compaction_block(reply.message)
    assert ours is not None
    assert (message.content[0].type, message.content[0].content) == ("compaction", ours.content)
    assert message.context_management is not None
    assert message.context_management.applied_edits[0].to_dict() == APPLIED

"""The official Anthropic SDK against the gateway: blocks, thinking, cache marks, page faults, errors."""

from __future__ import annotations

import itertools
from typing import Any

import anthropic
import pytest

from kilburn.models.scripted import Scripted
from kilburn.testing.upstream import Break, Refusal, Upstream, calling

FILLER = "The river carries sand, and the sand carries gold. "
READ = {"name": "read", "description": "Read a file.", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def claude(gateway: Any) -> Any:
    def start(*script: Any, **settings: Any) -> Any:
        return gateway(*script, form="messages", **settings)

    return start


def talk(turns: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        messages.append({"role": "user", "content": [{"type": "text", "text": f"Question {number}. " + FILLER * 10}]})
        messages.append({"role": "assistant", "content": [{"type": "text", "text": f"Answer {number}. " + FILLER * 10}]})
    return messages


def ask(setup: Any, messages: list[dict[str, Any]], *, streamed: bool, **more: Any) -> Any:
    if not streamed:
        return setup.anthropic.messages.create(model="m", max_tokens=200, messages=messages, **more)
    with setup.anthropic.messages.stream(model="m", max_tokens=200, messages=messages, **more) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_short_conversation_goes_through_byte_for_byte(claude: Any, streamed: bool) -> None:
    setup = claude(calling(("read", {"path": "a"}, "t1"), text="I read.", thinking="Which file?"), "Done.")
    system = [{"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral"}}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    more = {"system": system, "tools": [READ], "metadata": {"user_id": "u"}, "extra_body": {"x_unknown": [1]}}
    reply = ask(setup, messages, streamed=streamed, **more)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    result = [{"type": "tool_result", "tool_use_id": "t1", "content": "text", "cache_control": {"type": "ephemeral"}}]
    messages += [
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]},
        {"role": "user", "content": result},
    ]
    assert ask(setup, messages, streamed=streamed, **more).content[0].text == "Done."
    assert not setup.upstream.refused
    sent = setup.upstream.sent[1].body
    assert sent["messages"] == messages
    assert (sent["system"], sent["tools"], sent["x_unknown"]) == (system, [READ], [1])
    assert setup.upstream.sent[0].headers["authorization"] == "Bearer client-key"
    with setup.store() as store:
        (info,) = store.sessions()
        kept = store.session(info.name).contents.messages()
        assert [message["role"] for message in kept] == ["user", "assistant", "user", "assistant"]
        assert [block["type"] for block in kept[1]["content"]] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("streamed", [False, True])
def test_page_faults_with_thinking(claude: Any, streamed: bool) -> None:
    setup = claude(
        calling(("recall", {"address": "p1"}), text="Let me look.", thinking="It left."),
        calling(
            ("search_memory", {"query": "Question 2", "tokens": 300}), ("read", {"path": "x"}, "t9"), thinking="And one more."
        ),
        "Both.",
        window=2000,
    )
    messages = [*talk(12), {"role": "user", "content": "What was first?"}]
    reply = ask(setup, messages, streamed=streamed, tools=[READ])
    assert [block.type for block in reply.content] == ["thinking", "text", "thinking", "tool_use"]
    assert reply.content[-1].id == "t9"
    assert reply.stop_reason == "tool_use"
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert sum(getattr(reply.usage, name) or 0 for name in inputs) == setup.upstream.sent[-1].tokens
    if not streamed:  # of a stream, the SDK keeps the fields that it knows
        rounds = reply.usage.model_extra["kilburn_rounds"]
        assert [sum(each[name] for name in inputs) for each in rounds] == [sent.tokens for sent in setup.upstream.sent]
        assert reply.usage.output_tokens == rounds[-1]["output_tokens"]
    messages += [
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t9", "content": "file"}]},
    ]
    assert ask(setup, messages, streamed=streamed, tools=[READ]).content[0].text == "Both."
    assert not setup.upstream.refused
    last = setup.upstream.sent[-1]
    assert (
        sum(block["type"] == "tool_result" for m in last.body["messages"] for block in m["content"] if not isinstance(block, str))
        >= 3
    )
    with setup.store() as store:
        assert len(store.sessions()) == 1


def test_a_long_session_keeps_the_cache_warm(claude: Any) -> None:
    setup = claude(window=4000, upstream=Upstream(otherwise="Fine.", least=100))
    system = [{"type": "text", "text": "Rules. " * 20, "cache_control": {"type": "ephemeral"}}]
    messages: list[dict[str, Any]] = []
    for number in range(40):
        content = [{"type": "text", "text": f"Step {number}. " + FILLER * 8, "cache_control": {"type": "ephemeral"}}]
        messages.append({"role": "user", "content": content})
        ask(setup, messages, streamed=False, system=system)
        del content[0]["cache_control"]
        messages.append({"role": "assistant", "content": "Fine."})
    assert not setup.upstream.refused
    assert max(sent.tokens for sent in setup.upstream.sent) < 4300
    late = setup.upstream.sent[20:]
    assert sum(sent.cached for sent in late) > 0.6 * sum(sent.tokens for sent in late)
    with setup.store() as store:
        (info,) = store.sessions()
        assert len(store.session(info.name).contents.messages()) == 80


@pytest.mark.parametrize(
    ("system", "tools", "automatic", "old", "expected"),
    [
        ("1h", None, None, None, "1h"),
        (None, None, None, "1h", "1h"),
        ("1h", "1h", None, "5m", "1h"),
        ("5m", "1h", None, None, "5m"),
        (None, None, "1h", None, "1h"),
        ("1h", None, "5m", None, "5m"),
        ("5m", None, None, "1h", "5m"),
        (None, None, None, None, "5m"),
    ],
)
def test_cache_marks_have_the_longest_ttl_of_the_client_that_the_provider_takes(
    claude: Any, system: str | None, tools: str | None, automatic: str | None, old: str | None, expected: str
) -> None:
    def marks(ttl: str | None) -> dict[str, Any]:
        return {} if ttl is None else {"cache_control": {"type": "ephemeral"} | ({"ttl": ttl} if ttl != "5m" else {})}

    setup = claude(window=2000, upstream=Upstream(otherwise="Fine."))
    messages = [*talk(12), {"role": "user", "content": "What now?"}]
    messages[0] = {"role": "user", "content": [{"type": "text", "text": messages[0]["content"], **marks(old)}]}
    lead = [{"type": "text", "text": "Rules.", **marks(system)}]
    ask(setup, messages, streamed=False, system=lead, tools=[{**READ, **marks(tools)}], extra_body=marks(automatic))
    body = setup.upstream.sent[-1].body
    assert len(body["messages"]) < len(messages)
    content = [block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]]
    sent = [block["cache_control"] for block in content if "cache_control" in block]
    assert sent
    assert {mark.get("ttl", "5m") for mark in sent} == {expected}
    assert body["system"] == lead


def test_an_edit_leaves_the_cache_marks_of_the_client_where_they_were(claude: Any) -> None:
    setup = claude(window=2000, upstream=Upstream(otherwise="Fine."))
    lines = [{"type": "text", "text": f"Line {number}."} for number in range(3)]
    marked = [lines[0], {**lines[1], "cache_control": {"type": "ephemeral"}}, lines[2]]
    messages = [*talk(12), {"role": "user", "content": marked}]
    ask(setup, messages, streamed=False, system=[{"type": "text", "text": "Rules."}])
    body = setup.upstream.sent[-1].body
    assert len(body["messages"]) < len(messages)
    blocks = [block for message in body["messages"] if isinstance(message["content"], list) for block in message["content"]]
    assert [block["text"] for block in blocks if "cache_control" in block][-2:] == ["Line 1.", "Line 2."]


def test_what_is_brought_for_a_question_leaves_the_cache_warm(claude: Any) -> None:
    answer = "Fine. " * 80
    setup = claude(window=2500, policy="hybrid", upstream=Upstream(otherwise=answer, least=100))
    messages: list[dict[str, Any]] = []
    for number in range(60):
        story = " ".join(f"w{number}x{at}" for at in range(60))
        asked = f"Locker{number} has code K{number}Q: {story}." if number < 40 else f"What is the code of locker{number - 40}?"
        messages.append({"role": "user", "content": asked})
        ask(setup, messages, streamed=False)
        messages.append({"role": "assistant", "content": answer})
    late = setup.upstream.sent[40:]
    brought = [(before, sent) for before, sent in itertools.pairwise(late) if "in part" in str(before.body["messages"][-1])]
    # Where nothing was edited in front, the next prompt reads all from the cache but the question and what was brought for it.
    again = [before.tokens - sent.cached - len(str(before.body["messages"][-1])) // 4 for before, sent in brought]
    assert sum(tokens <= 0 for tokens in again) > len(again) / 2 > 3


def test_a_prompt_that_is_too_long_is_made_shorter_once(claude: Any) -> None:
    setup = claude(upstream=Upstream(otherwise="Fits.", window=2500), window=100_000)
    assert ask(setup, [*talk(10), {"role": "user", "content": "?"}], streamed=True).content[0].text == "Fits."
    assert [sent.status for sent in setup.upstream.sent] == [400, 200]


def test_errors_have_anthropics_form(claude: Any) -> None:
    setup = claude(Refusal(status=529), Break(how="error", after=3), Break(how="cut", after=3))
    with pytest.raises(anthropic.APIStatusError) as caught:
        ask(setup, [{"role": "user", "content": "Hi"}], streamed=True)
    assert caught.value.status_code == 529
    for _ in range(2):
        with pytest.raises(anthropic.APIError):
            ask(setup, [{"role": "user", "content": "Hi"}], streamed=True)
    with pytest.raises(anthropic.BadRequestError) as refused:
        ask(setup, [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "y"}]}], streamed=False)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["request_id"].startswith("req_")
    with setup.store() as store:
        (info,) = store.sessions()
        assert info.pages == 1


def test_tokens_are_counted(claude: Any) -> None:
    setup = claude()
    assert (
        setup.anthropic.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hello there"}]).input_tokens > 0
    )
    local = claude(model=Scripted([]))
    assert (
        local.anthropic.messages.count_tokens(model="m", messages=[{"role": "user", "content": "Hello there"}]).input_tokens > 0
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_a_local_model_of_the_other_form(claude: Any, streamed: bool) -> None:
    model = Scripted([calling(("read", {"path": "a"}, "c1"), text="I read."), "Done."])
    setup = claude(model=model)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    reply = ask(setup, messages, streamed=streamed, tools=[READ], system="Rules.")
    assert [block.type for block in reply.content] == ["text", "tool_use"]
    assert (reply.content[1].input, reply.stop_reason) == ({"path": "a"}, "tool_use")
    messages += [
        {"role": "assistant", "content": [b.model_dump(exclude_none=True) for b in reply.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": reply.content[1].id, "content": "file"}]},
    ]
    assert ask(setup, messages, streamed=streamed, tools=[READ], system="Rules.").content[0].text == "Done."
    assert [m["role"] for m in model.requests[1].messages] == ["system", "user", "assistant", "tool"]
    assert model.requests[1].tools[0].name == "read"


def test_claudes_client_on_an_openai_upstream(gateway: Any) -> None:
    setup = gateway(calling(("read", {"path": "a"}, "c1"), text="I read."), "Done.")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go"}]
    reply = ask(setup, messages, streamed=True, tools=[READ], system="Rules.")
    assert [block.type for block in reply.content] == ["text", "tool_use"]
    assert setup.upstream.sent[0].api == "chat"
    assert setup.upstream.sent[0].body["messages"][0] == {"role": "system", "content": "Rules."}


@pytest.mark.parametrize("shape", ["text", "list"])
def test_system_messages_in_the_conversation_are_kept(claude: Any, shape: str) -> None:
    setup = claude(window=2000, upstream=Upstream(otherwise="Fine."))
    ruled = "Answer in French from now on."
    content: Any = ruled if shape == "text" else [{"type": "text", "text": ruled, "cache_control": {"type": "ephemeral"}}]
    system: Any = {"role": "system", "content": content, "clear_at": "never"}
    bare: Any = {"role": "system", "output_config": {"effort": "low"}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for turn in range(16):
        reply = ask(setup, messages, streamed=turn % 2 == 0, system="Rules.")
        assert setup.upstream.sent[-1].wrong is None
        if turn < 3:
            assert setup.upstream.sent[-1].body["messages"] == messages
        messages.append({"role": "assistant", "content": reply.content[0].text})
        messages.append({"role": "user", "content": f"Question {turn}. " + FILLER * 8})
        messages += {1: [system], 14: [bare]}.get(turn, [])
    last = setup.upstream.sent[-1].body
    assert len(last["messages"]) < len(messages)
    assert last["system"] == "Rules."
    assert [message for message in last["messages"] if message["role"] == "system"][-1] == bare
    assert ruled in str(last["messages"])
    with setup.store() as store:
        assert len(store.sessions()) == 1


def test_a_system_message_in_front_stays_there(claude: Any) -> None:
    setup = claude(window=2000, upstream=Upstream(otherwise="Fine."))
    messages = [{"role": "system", "content": "Rules of old."}, *talk(9), {"role": "user", "content": "?"}]
    with pytest.raises(anthropic.BadRequestError, match="system"):  # the provider's own words
        ask(setup, messages, streamed=False)
    assert setup.upstream.sent[-1].body["messages"][0] == {"role": "system", "content": "Rules of old."}
    assert len(setup.upstream.sent[-1].body["messages"]) < 20

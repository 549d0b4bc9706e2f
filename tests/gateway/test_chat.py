"""The official OpenAI SDK against the gateway: streamed and not, within the window and beyond it."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kilburn.models.scripted import Scripted
from kilburn.testing.upstream import Break, Refusal, Upstream, calling
from waiting import until

FILLER = "The river carries sand, and the sand carries gold. "


def talk(turns: int, size: int = 10) -> list[dict[str, Any]]:
    """A conversation whose turns have a number each, and many words."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are brief."}]
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Question {turn}. " + FILLER * size})
        messages.append({"role": "assistant", "content": f"Answer {turn}. " + FILLER * size})
    return messages


def text(stream: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_short_conversation_goes_through_byte_for_byte(gateway: Any) -> None:
    setup = gateway("Hello.", "Again.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "ana"}]
    reply, headers = setup.chat(messages, temperature=0.3, seed=7, extra_body={"x_unknown": {"b": 1, "a": [1.50]}})
    assert reply.choices[0].message.content == "Hello."
    assert headers["x-kilburn-turn"] == "1"
    messages += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "More"}]
    again, more = setup.chat(messages)
    assert again.choices[0].message.content == "Again."
    assert more["x-kilburn-session"] == headers["x-kilburn-session"]
    first = setup.upstream.sent[0]
    assert first.body["x_unknown"] == {"b": 1, "a": [1.5]}
    assert first.body["messages"] == messages[:2]
    assert "tools" not in first.body
    assert first.headers["authorization"] == "Bearer client-key"
    assert not any(name.startswith("x-kilburn") for name in first.headers)
    with setup.store() as store:
        assert [info.name for info in store.sessions()] == [headers["x-kilburn-session"]]
        said = [m["content"] for m in store.session(headers["x-kilburn-session"]).contents.messages()]
        assert said == ["Hi", "Hello.", "More", "Again."]


def test_a_stream_comes_piece_by_piece(gateway: Any) -> None:
    setup = gateway("One, two, three, four.")
    chunks = list(setup.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "Count"}], stream=True))
    assert text(chunks) == "One, two, three, four."
    assert len(chunks) > 4
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_what_does_not_fit_leaves_the_prompt_and_stays_in_the_store(gateway: Any) -> None:
    setup = gateway(window=2000, upstream=Upstream(otherwise="Fine."))
    messages = talk(24)
    for end in range(2, len(messages) + 1, 2):
        setup.chat(messages[:end])
        messages[end : end + 1] = [{"role": "assistant", "content": "Fine."}] if end < len(messages) else []
    assert not setup.upstream.refused
    assert max(sent.tokens for sent in setup.upstream.sent) < 2060  # our tools among them; the provider counts a little more
    last = setup.upstream.sent[-1].body
    assert last["messages"][0] == messages[0]
    assert last["messages"][-1] == messages[-2]
    assert [tool["function"]["name"] for tool in last["tools"]] == ["recall", "search_memory"]
    with setup.store() as store:
        (info,) = store.sessions()
        kept = [m["content"] for m in store.session(info.name).contents.messages()]
        assert kept == [m["content"] for m in messages[1:]]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_page_fault_is_answered_within_the_request(gateway: Any, streamed: bool) -> None:
    setup = gateway(
        calling(("recall", {"address": "p1"}), text="Let me look."),
        calling(("search_memory", {"query": "Question 1", "tokens": 300})),
        "It was question 0.",
        "And more.",
        window=2000,
    )
    messages = [*talk(12), {"role": "user", "content": "What was first?"}]
    if streamed:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(setup.openai.chat.completions.create(model="m", messages=messages, **options))
        said = text(chunks)
        assert not any(chunk.choices and chunk.choices[0].delta.tool_calls for chunk in chunks)
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
            "stop"
        ]
        assert len({chunk.id for chunk in chunks}) == 1
        usage = chunks[-1].usage
    else:
        reply, _ = setup.chat(messages)
        said, usage = reply.choices[0].message.content, reply.usage
        assert reply.choices[0].finish_reason == "stop"
        assert not reply.choices[0].message.tool_calls
    assert said == "Let me look.\n\nIt was question 0."
    assert usage.prompt_tokens == setup.upstream.sent[-1].tokens
    rounds = usage.model_extra["kilburn_rounds"]
    assert [each["prompt_tokens"] for each in rounds] == [sent.tokens for sent in setup.upstream.sent]
    assert len(setup.upstream.sent) == 3
    assert not setup.upstream.refused
    results = [m["content"] for m in setup.upstream.sent[-1].body["messages"] if m["role"] == "tool"]
    assert "Question 0. The river" in results[0]
    # The client resends what it saw, and it is the same session.
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Go on"}]
    setup.chat(messages)
    assert not setup.upstream.refused
    with setup.store() as store:
        assert len(store.sessions()) == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_our_answers_wait_for_the_clients_results(gateway: Any, streamed: bool) -> None:
    setup = gateway(
        calling(("recall", {"address": "p1"}, "a"), ("read", {"path": "x"}, "b"), ("recall", {"address": "p3"}, "c")),
        "Both are known.",
        window=2000,
    )
    tool = {"type": "function", "function": {"name": "read", "parameters": {"type": "object", "properties": {}}}}
    messages = [*talk(12), {"role": "user", "content": "Compare."}]
    if streamed:
        chunks = setup.openai.chat.completions.create(model="m", messages=messages, tools=[tool], stream=True)
        pieces = [piece for chunk in chunks if chunk.choices for piece in chunk.choices[0].delta.tool_calls or ()]
        assert {piece.index for piece in pieces} == {0}
        assert pieces[0].id == "b"
    else:
        reply, _ = setup.chat(messages, tools=[tool])
        (call,) = reply.choices[0].message.tool_calls
        assert (call.id, reply.choices[0].finish_reason) == ("b", "tool_calls")
    assert len(setup.upstream.sent) == 1
    call = {"id": "b", "type": "function", "function": {"name": "read", "arguments": '{"path":"x"}'}}
    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    messages.append({"role": "tool", "tool_call_id": "b", "content": "the file"})
    reply, _ = setup.chat(messages, tools=[tool])
    assert reply.choices[0].message.content == "Both are known."
    assert not setup.upstream.refused
    results = [m["content"] for m in setup.upstream.sent[-1].body["messages"] if m["role"] == "tool"]
    assert len(results) == 3
    assert "the file" in results
    assert [tool["function"]["name"] for tool in setup.upstream.sent[-1].body["tools"]] == ["read", "recall", "search_memory"]


def test_faults_are_bounded(gateway: Any) -> None:
    setup = gateway(window=2000, rounds=3, upstream=Upstream(otherwise=calling(("recall", {"address": "p1"}))))
    reply, _ = setup.chat([*talk(12), {"role": "user", "content": "Loop"}], extra_headers={"idempotency-key": "k1"})
    assert reply.choices[0].finish_reason == "stop"
    assert len(setup.upstream.sent) == 5
    # A provider would answer the other questions with its first answer.
    assert [sent.headers.get("idempotency-key") for sent in setup.upstream.sent] == ["k1", None, None, None, None]
    assert "no more recalls" in setup.upstream.sent[-1].raw.decode()


def test_headers_switch_it_off(gateway: Any) -> None:
    setup = gateway(window=2000, upstream=Upstream(otherwise="Yes."))
    messages = [*talk(12), {"role": "user", "content": "?"}]
    setup.chat(messages, extra_headers={"x-kilburn": "OFF"})
    assert setup.upstream.sent[0].body["messages"] == messages
    setup.chat(messages, extra_headers={"x-kilburn-faults": "Off"})
    assert len(setup.upstream.sent[1].body["messages"]) < len(messages)
    assert "tools" not in setup.upstream.sent[1].body


def test_a_prompt_that_is_too_long_is_made_shorter_once(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="Fits.", window=2500), window=100_000)
    reply, _ = setup.chat([*talk(10), {"role": "user", "content": "?"}])
    assert reply.choices[0].message.content == "Fits."
    assert [sent.status for sent in setup.upstream.sent] == [400, 200]
    again = gateway(Refusal(overlong=True), Refusal(overlong=True), window=100_000)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        again.chat([*talk(10), {"role": "user", "content": "?"}])
    assert len(again.upstream.sent) == 2


@pytest.mark.parametrize(
    ("status", "error"), [(429, openai.RateLimitError), (500, openai.InternalServerError), (529, openai.InternalServerError)]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_what_the_provider_refuses_is_told_as_it_was(gateway: Any, status: int, error: Any, streamed: bool) -> None:
    setup = gateway(Refusal(status=status, words="Not now.", retry_after=3), "Now.")
    messages = [{"role": "user", "content": "Hi"}]
    with pytest.raises(error) as caught:
        setup.chat(messages, stream=streamed)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.body["message"] == "Not now."
    reply, _ = setup.chat(messages)
    assert reply.choices[0].message.content == "Now."
    with setup.store() as store:
        (info,) = store.sessions()
        assert info.pages == 2


@pytest.mark.parametrize("how", ["cut", "torn", "short", "garbled", "error"])
@pytest.mark.parametrize("streamed", [False, True])
def test_a_reply_that_breaks_leaves_a_valid_session(gateway: Any, how: Any, streamed: bool) -> None:
    if not streamed and how in ("short", "garbled", "error"):
        pytest.skip("a whole reply breaks by its connection")
    setup = gateway(Break(how=how, after=3, reply="This is a longer reply, é, of several pieces."), "Whole.")
    messages = [{"role": "user", "content": "Hi"}]

    def ask() -> None:
        if not streamed:
            setup.chat(messages)
            return
        with setup.openai.chat.completions.create(model="m", messages=messages, stream=True) as stream:
            list(stream)

    # An end that nothing announces is the provider's own, and so is an event that is no JSON: the client has them as they came.
    with nullcontext() if how == "short" else pytest.raises((openai.APIError, json.JSONDecodeError)):
        ask()
    reply, headers = setup.chat(messages)
    assert reply.choices[0].message.content == "Whole."
    with setup.store() as store:
        (info,) = store.sessions()
        assert [m["content"] for m in store.session(headers["x-kilburn-session"]).contents.messages()] == ["Hi", "Whole."]
        assert info.pages == 2


def ended(setup: Any) -> float:
    """Requests of chat completions that the gateway has done with."""
    text = httpx2.get(f"{setup.url}/metrics", timeout=600).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return sum(each.value for each in samples if each.name == "kilburn_requests_total" and "chat" in each.labels["route"])


# Of a long body the server stops reading in between, and reads on for the end of the connection.
@pytest.mark.parametrize("words", [1, 100_000])
def test_a_client_that_goes_away_ends_the_work_upstream(gateway: Any, words: int) -> None:
    setup = gateway(Break(how="silent", after=None), Break(how="silent", after=3), "Back.", window=1_000_000)
    messages = [{"role": "user", "content": "Hi " * words}]
    body = msgspec.json.encode({"model": "m", "messages": messages})
    with socket.create_connection(("127.0.0.1", int(setup.url.rpartition(":")[2]))) as client:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d"
        client.sendall(head % len(body) + b"\r\n\r\n" + body)
        until(lambda: setup.upstream.sent)
    assert setup.upstream.sent[0].over.wait(600)
    assert setup.upstream.sent[0].gone is not None
    # Who asks again before the gateway has tidied up gets a session of their own.
    until(lambda: ended(setup) == 1)
    stream = setup.openai.chat.completions.create(model="m", messages=messages, stream=True)
    next(iter(stream))
    stream.close()
    assert setup.upstream.sent[1].over.wait(600)
    until(lambda: ended(setup) == 2)
    reply, _ = setup.chat(messages)
    assert reply.choices[0].message.content == "Back."
    with setup.store() as store:
        assert len(store.sessions()) == 1


def test_an_upstream_that_is_silent_is_given_up(gateway: Any) -> None:
    setup = gateway(Break(how="silent", after=None), Break(how="silent", after=3), timeout=0.5)
    with pytest.raises(openai.InternalServerError) as caught:
        setup.chat([{"role": "user", "content": "Hi"}])
    assert caught.value.status_code == 504
    with pytest.raises(openai.APIError):
        list(setup.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hi"}], stream=True))


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ("hello", "messages"),
        ([{"role": "martian", "content": "x"}], "martian"),
        ([{"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "no", "content": "x"}], "no call"),
        ([1], "object"),
    ],
)
def test_bad_messages_are_refused_in_the_providers_form(gateway: Any, messages: Any, word: str) -> None:
    setup = gateway("Never.")
    with pytest.raises(openai.BadRequestError, match=word) as caught:
        setup.chat(messages)
    assert caught.value.body["type"] == "invalid_request_error"
    assert not setup.upstream.sent


def test_a_local_model_answers(gateway: Any) -> None:
    model = Scripted(["Hello.", calling(("look", {"at": 1}, "c1")), "Done."], piece=2)
    setup = gateway(model=model)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages: list[Any] = [{"role": "user", "content": "Hi"}]
    stream = setup.openai.chat.completions.create(model="m", messages=messages, stream=True)
    assert text(stream) == "Hello."
    messages += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Look"}]
    reply, _ = setup.chat(messages, tools=[tool])
    assert reply.choices[0].message.tool_calls[0].function.name == "look"
    messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "c1", "content": "7"}]
    reply, _ = setup.chat(messages, tools=[tool])
    assert reply.choices[0].message.content == "Done."
    assert len(model.requests) == 3
    with setup.store() as store:
        assert len(store.sessions()) == 1


def test_lists_and_embeddings_go_through(gateway: Any) -> None:
    setup = gateway()
    assert [model.id for model in setup.openai.models.list()] == ["scripted", "scripted-mini"]
    assert setup.openai.models.retrieve("scripted").id == "scripted"
    assert len(setup.openai.embeddings.create(model="e", input=["a", "b"]).data) == 2


def test_the_figures_of_a_session(gateway: Any) -> None:
    setup = gateway(calling(("recall", {"address": "p3"})), "It was question 0.", window=2000)
    _, headers = setup.chat([*talk(12), {"role": "user", "content": "What was first?"}])
    page = httpx2.get(f"{setup.url}/metrics").text
    assert 'kilburn_upstream_calls_total{tenant="default"} 2.0' in page
    assert 'kilburn_faults_total{tenant="default"} 1.0' in page
    (row,) = httpx2.get(f"{setup.url}/sessions").json()["sessions"]
    assert row["session"] == headers["x-kilburn-session"]
    assert httpx2.get(f"{setup.url}/health").json()["status"] == "ok"


def test_a_lying_host_header_gets_no_further(gateway: Any) -> None:
    setup = gateway("Never.")
    with pytest.raises(openai.APIStatusError) as caught:
        setup.chat([{"role": "user", "content": "Hi"}], extra_headers={"host": "evil.example"})
    assert caught.value.status_code == 421
    assert not setup.upstream.sent

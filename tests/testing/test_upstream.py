"""The scripted upstream, asked by the official SDKs, used unchanged."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai.types import CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kilburn.errors import Overlong, RateLimited, Unavailable
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Finish, Reply, Request
from kilburn.models.chat import Chat
from kilburn.models.messages import Messages
from kilburn.models.retry import Retry
from kilburn.testing.models import check_model
from kilburn.testing.upstream import Break, Refusal, Upstream, calling, serving

ASK = [{"role": "user", "content": "What is the weather?"}]
TEXT = "It rains in Zürich, 8 °C. 🌧 Take an umbrella."
THOUGHT = "They ask for the weather. I look it up."
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
LONG = "A sentence that is long enough to fill a cache. " * 200
APIS = ("chat", "messages", "responses")
TYPES: dict[str, tuple[Any, Any]] = {
    "chat": (ChatCompletion, ChatCompletionChunk),
    "messages": (AnthropicMessage, RawMessageStreamEvent),
    "responses": (Response, ResponseStreamEvent),
}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
SPOKEN = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.REASONING, text=THOUGHT), Part(kind=Kind.TEXT, text=TEXT)))
TWO = calling(("weather", {"city": "Zürich"}), ("weather", {"city": "Bern"}), text="Two cities.", thinking=THOUGHT)


def body_of(api: str, **more: Any) -> dict[str, Any]:
    asked = {"input": ASK} if api == "responses" else {"messages": ASK}
    return {"model": "scripted", **asked, **({"max_tokens": 1000} if api == "messages" else {}), **more}


def post(url: str, api: str, **more: Any) -> httpx2.Response:
    return httpx2.post(url + PATHS[api], json=body_of(api, **more), timeout=600)


def events_of(text: str) -> list[tuple[str | None, Any]]:
    found = []
    for event in text.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in event.split("\n"))
        found.append((lines.get("event"), lines["data"] if lines["data"] == "[DONE]" else json.loads(lines["data"])))
    return found


def openai_at(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600)


def anthropic_at(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=600)


def say(client: Any, **more: Any) -> Any:
    if isinstance(client, anthropic.Anthropic):
        return client.messages.create(**{"model": "scripted", "max_tokens": 1000, "messages": ASK, **more})
    return client.chat.completions.create(**{"model": "scripted", "messages": ASK, **more})


@pytest.fixture
def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
def url(upstream: Upstream) -> Iterator[str]:
    with serving(upstream) as at:
        yield at


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("entry", [TEXT, SPOKEN, TWO], ids=["text", "thinking", "calls"])
def test_bodies_and_events_are_of_the_sdks_types(upstream: Upstream, url: str, api: str, entry: Any) -> None:
    upstream.enqueue(entry, entry)
    kind, event = (TypeAdapter(each) for each in TYPES[api])
    kind.validate_python(post(url, api).json())
    stream = post(url, api, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    found = events_of(stream.text)
    assert (found[-1] == (None, "[DONE]")) is (api == "chat")
    for name, data in found[:-1] if api == "chat" else found:
        if name != "ping":
            event.validate_python(data)
        assert name == data.get("type")


@pytest.mark.parametrize("streamed", [False, True])
def test_chat_says_text_thinking_and_parallel_calls(upstream: Upstream, url: str, streamed: bool) -> None:
    upstream.enqueue(SPOKEN, TWO)
    with openai_at(url) as client:
        replies = []
        for _ in range(2):
            if streamed:
                with client.chat.completions.stream(
                    model="scripted", messages=ASK, stream_options={"include_usage": True}
                ) as stream:
                    replies.append(stream.get_final_completion())
            else:
                replies.append(say(client))
    first, second = (reply.choices[0] for reply in replies)
    assert first.message.content == TEXT
    assert first.message.to_dict()["reasoning_content"] == THOUGHT
    assert first.finish_reason == "stop"
    assert [json.loads(call.function.arguments)["city"] for call in second.message.tool_calls] == ["Zürich", "Bern"]
    assert len({call.id for call in second.message.tool_calls}) == 2
    assert second.finish_reason == "tool_calls"
    usage = replies[0].usage
    assert usage.prompt_tokens == upstream.sent[0].tokens > 0
    assert usage.completion_tokens_details.reasoning_tokens == -(-len(THOUGHT) // 4)


@pytest.mark.parametrize("streamed", [False, True])
def test_messages_say_text_signed_thinking_and_parallel_calls(upstream: Upstream, url: str, streamed: bool) -> None:
    upstream.enqueue(SPOKEN, TWO)
    with anthropic_at(url) as client:
        replies = []
        for _ in range(2):
            if streamed:
                with client.messages.stream(model="scripted", max_tokens=1000, messages=ASK) as stream:
                    replies.append(stream.get_final_message())
            else:
                replies.append(say(client))
        first, second = replies
        assert [block.type for block in first.content] == ["thinking", "text"]
        assert (first.content[0].thinking, first.content[1].text) == (THOUGHT, TEXT)
        assert [block.input["city"] for block in second.content[2:]] == ["Zürich", "Bern"]
        assert (first.stop_reason, second.stop_reason) == ("end_turn", "tool_use")
        results = [{"type": "tool_result", "tool_use_id": block.id, "content": "8 °C"} for block in second.content[2:]]
        history = [*ASK, {"role": "assistant", "content": second.content}, {"role": "user", "content": results}]
        assert say(client, messages=history).content[0].text == "OK."
        second.content[0].thinking = "Something else."
        with pytest.raises(anthropic.BadRequestError, match="signature"):
            say(client, messages=history)


@pytest.mark.parametrize("streamed", [False, True])
def test_responses_say_text_reasoning_and_parallel_calls(upstream: Upstream, url: str, streamed: bool) -> None:
    upstream.enqueue(SPOKEN, TWO)
    with openai_at(url) as client:
        replies = []
        for _ in range(2):
            if streamed:
                with client.responses.stream(model="scripted", input=ASK) as stream:
                    replies.append(stream.get_final_response())
            else:
                replies.append(client.responses.create(model="scripted", input=ASK))
        first, second = replies
        assert first.output_text == TEXT
        assert first.output[0].summary[0].text == THOUGHT
        calls = [item for item in second.output if item.type == "function_call"]
        assert [json.loads(call.arguments)["city"] for call in calls] == ["Zürich", "Bern"]
        results = [{"type": "function_call_output", "call_id": call.call_id, "output": "8 °C"} for call in calls]
        assert client.responses.create(model="scripted", input=results, previous_response_id=second.id).output_text == "OK."
        with pytest.raises(openai.BadRequestError, match="No tool call found"):
            client.responses.create(model="scripted", input=results)
        with pytest.raises(openai.BadRequestError, match="No tool output found"):
            client.responses.create(model="scripted", input=ASK, previous_response_id=second.id)


def test_choices_logprobs_stops_and_caps(upstream: Upstream, url: str) -> None:
    upstream.enqueue(("One two three.", "Two two."), "One two three.", "One two three.", "One two three.", "One two three.")
    with openai_at(url) as client, anthropic_at(url) as other:
        many = say(client, n=3, logprobs=True, top_logprobs=2)
        assert [choice.message.content for choice in many.choices] == ["One two three.", "Two two.", "Two two."]
        tokens = many.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == "One two three."
        assert all(len(token.top_logprobs) == 2 for token in tokens)
        stopped = say(client, stop=[" three"])
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == ("One two", "stop")
        cut = say(client, max_completion_tokens=1)
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("One ", "length")
        said = say(other, stop_sequences=["two"])
        assert (said.content[0].text, said.stop_reason, said.stop_sequence) == ("One ", "stop_sequence", "two")
        short = client.responses.create(model="scripted", input="Hello", max_output_tokens=1)
        assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_n_choices_are_streamed_interleaved(upstream: Upstream, url: str) -> None:
    upstream.enqueue(("first of all", "second of all"))
    said = {0: "", 1: ""}
    order = []
    with openai_at(url) as client:
        for chunk in say(client, n=2, stream=True, logprobs=True):
            choice = chunk.choices[0]
            said[choice.index] += choice.delta.content or ""
            order.append(choice.index)
    assert said == {0: "first of all", 1: "second of all"}
    assert order[:4] == [0, 1, 0, 1]


def test_a_refusal_of_the_model_has_its_own_fields(upstream: Upstream, url: str) -> None:
    said = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="I will not."),))
    upstream.enqueue(*[Reply(message=said, finish=Finish.REFUSED)] * 3)
    with openai_at(url) as client, anthropic_at(url) as other:
        assert say(client).choices[0].message.refusal == "I will not."
        assert client.responses.create(model="scripted", input="Do it.").output[0].content[0].refusal == "I will not."
        assert say(other).stop_reason == "refusal"


def test_lists_of_models_embeddings_and_counts(upstream: Upstream, url: str) -> None:
    with openai_at(url) as client, anthropic_at(url) as other:
        assert [model.id for model in client.models.list()] == ["scripted", "scripted-mini"]
        assert [model.id for model in other.models.list()] == ["scripted", "scripted-mini"]
        assert client.models.retrieve("scripted-9").id == "scripted-9"
        vectors = client.embeddings.create(model="scripted", input=["one", "two", "one"])
        assert vectors.data[0].embedding == vectors.data[2].embedding != vectors.data[1].embedding
        plain = client.embeddings.create(model="scripted", input="one", encoding_format="float")
        assert plain.data[0].embedding == pytest.approx(vectors.data[0].embedding)
        CreateEmbeddingResponse.model_validate(plain.to_dict())
        counted = other.messages.count_tokens(model="scripted", messages=ASK).input_tokens
        say(other)
    assert counted == upstream.prompts[-1].tokens > 0


def test_openai_caches_the_shared_prefix_in_steps(upstream: Upstream, url: str) -> None:
    history = [{"role": "system", "content": LONG}, *ASK]
    with openai_at(url) as client:
        cached = []
        for _ in range(3):
            cached.append(say(client, messages=history).usage.prompt_tokens_details.cached_tokens)
            history = [*history, {"role": "assistant", "content": LONG}, *ASK]
        edited = [{"role": "system", "content": "X" + LONG}, *history[1:]]
        cached.append(say(client, messages=edited).usage.prompt_tokens_details.cached_tokens)
    assert cached[0] == 0
    assert all(count % 128 == 0 for count in cached)
    for at in (1, 2):
        assert upstream.sent[at - 1].tokens - 160 < cached[at] <= upstream.sent[at - 1].tokens
    assert cached[3] == 0


def test_anthropic_caches_up_to_breakpoints(upstream: Upstream, url: str) -> None:
    marked = {"cache_control": {"type": "ephemeral"}}
    system = [{"type": "text", "text": LONG, **marked}]
    with anthropic_at(url) as client:
        usages = [say(client, system=system).usage for _ in range(2)]
        usages.append(say(client, system=[{"type": "text", "text": LONG}]).usage)
        usages.append(say(client, system=[{"type": "text", "text": "X" + LONG, **marked}]).usage)
        grown = [{"role": "user", "content": [{"type": "text", "text": LONG, **marked}]}]
        usages.append(say(client, system=system, messages=grown).usage)
        usages.append(say(client, system=[{"type": "text", "text": "short", **marked}]).usage)
    written = [usage.cache_creation_input_tokens for usage in usages]
    read = [usage.cache_read_input_tokens for usage in usages]
    assert written[0] > 1024
    assert read[:4] == [0, written[0], 0, 0]
    assert written[1] == written[2] == 0
    assert read[4] == written[0]
    assert written[4] > 1024
    assert (read[5], written[5]) == (0, 0)
    total = [usage.input_tokens + made + got for usage, made, got in zip(usages, written, read, strict=True)]
    assert total == [sent.tokens for sent in upstream.sent]


def test_what_no_provider_takes_is_refused_and_remembered(upstream: Upstream, url: str) -> None:
    orphan = [*ASK, {"role": "tool", "tool_call_id": "call_9", "content": "8 °C"}]
    twice = [*ASK, *ASK]
    with openai_at(url) as client, anthropic_at(url) as other:
        with pytest.raises(openai.BadRequestError) as refused:
            say(client, messages=orphan)
        assert refused.value.body["type"] == "invalid_request_error"
        with pytest.raises(anthropic.BadRequestError, match="in a row"):
            say(other, messages=twice)
    assert httpx2.post(f"{url}/v1/chat/completions", content=b"{").status_code == 400
    assert httpx2.post(f"{url}/v1/chat/completions", json=[]).status_code == 400
    assert httpx2.post(f"{url}/v1/messages", json={"model": "m", "messages": ASK}).json()["type"] == "error"
    assert httpx2.get(f"{url}/v1/chat/completions").status_code == 404
    assert httpx2.post(f"{url}/v1/nothing").status_code == 404
    assert len(upstream.refused) == 5
    assert upstream.sent[0].headers["authorization"] == "Bearer none"
    assert json.loads(upstream.sent[0].raw)["messages"] == orphan


@pytest.mark.parametrize(
    ("status", "ours", "theirs"),
    [
        (401, openai.AuthenticationError, anthropic.AuthenticationError),
        (429, openai.RateLimitError, anthropic.RateLimitError),
        (500, openai.InternalServerError, anthropic.InternalServerError),
        (529, openai.InternalServerError, anthropic.InternalServerError),
    ],
)
def test_statuses_are_told_in_the_forms_of_both(upstream: Upstream, url: str, status: int, ours: Any, theirs: Any) -> None:
    upstream.enqueue(*[Refusal(status=status, retry_after=7)] * 2)
    with openai_at(url) as client, anthropic_at(url) as other:
        with pytest.raises(ours) as refused:
            say(client, stream=True)
        assert refused.value.response.headers["retry-after"] == "7"
        assert set(refused.value.response.json()["error"]) == {"message", "type", "param", "code"}
        with pytest.raises(theirs) as refused_too:
            say(other)
        assert refused_too.value.body["type"] == "error"
        assert refused_too.value.body["request_id"]


def test_a_prompt_beyond_the_window_is_refused_in_the_providers_words() -> None:
    with serving(Upstream(window=100)) as url, openai_at(url) as client, anthropic_at(url) as other:
        long = [{"role": "user", "content": LONG}]
        with pytest.raises(openai.BadRequestError, match="maximum context length is 100 tokens") as refused:
            say(client, messages=long)
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="exceeds the context window"):
            client.responses.create(model="scripted", input=long)
        with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: .* > 100 maximum"):
            say(other, messages=long)
        assert say(client).choices[0].message.content == "OK."


def consumed(client: Any) -> list[Any]:
    with say(client, stream=True) as stream:
        return list(stream)


@pytest.mark.parametrize("make", [openai_at, anthropic_at], ids=["openai", "anthropic"])
@pytest.mark.parametrize("how", ["cut", "torn"])
def test_a_connection_that_breaks_is_an_error_of_the_client(
    upstream: Upstream, url: str, make: Callable[[str], Any], how: Any
) -> None:
    upstream.enqueue(Break(how=how, after=4, reply=TEXT), Break(how=how, reply=TEXT))
    with make(url) as client:
        with pytest.raises((openai.APIConnectionError, httpx2.HTTPError, anthropic.APIConnectionError)):
            consumed(client)
        with pytest.raises((openai.APIConnectionError, anthropic.APIConnectionError)):
            say(client)
    assert not upstream.refused


@pytest.mark.parametrize("api", APIS)
def test_a_torn_stream_ends_within_a_character(upstream: Upstream, url: str, api: str) -> None:
    upstream.enqueue(Break(how="torn", after=6, reply="ééééééééééééééééééééééé"))
    said: list[bytes] = []
    asked = httpx2.stream("POST", url + PATHS[api], json=body_of(api, stream=True))
    with asked as response, pytest.raises(httpx2.RemoteProtocolError):
        said.extend(response.iter_raw())
    with pytest.raises(UnicodeDecodeError):
        b"".join(said).decode()


def test_broken_short_and_failing_streams(upstream: Upstream, url: str) -> None:
    upstream.enqueue(Break(how="garbled"), Break(how="short"), Break(how="error"), Break(how="garbled"))
    with openai_at(url) as client:
        with pytest.raises(ValueError, match=r"."):
            consumed(client)
        assert all(chunk.choices[0].finish_reason is None for chunk in consumed(client))
        with pytest.raises(openai.APIError, match="Overloaded"):
            consumed(client)
        with pytest.raises(ValueError, match=r"."):
            say(client)
    upstream.enqueue(Break(how="short"), Break(how="error"), Break(how="error"))
    with anthropic_at(url) as other:
        assert consumed(other)[-1].type != "message_stop"
        with pytest.raises(anthropic.APIStatusError, match="Overloaded"):
            consumed(other)
        with pytest.raises(anthropic.InternalServerError):
            say(other)
    upstream.enqueue(Break(how="error", after=2))
    events = events_of(post(url, "responses", stream=True).text)
    assert (events[-1][0], events[-1][1]["type"]) == ("error", "error")


@pytest.mark.parametrize("after", [None, 3])
def test_a_client_that_hangs_up_is_noticed(upstream: Upstream, url: str, after: int | None) -> None:
    upstream.enqueue(Break(how="silent", after=after))
    with openai_at(url) as client, pytest.raises(openai.APITimeoutError):
        for _ in say(client, stream=True, timeout=0.3):
            pass
    sent = upstream.sent[0]
    assert sent.over.wait(600)
    assert sent.gone is not None


def test_a_slow_stream_takes_its_time(upstream: Upstream, url: str) -> None:
    upstream.pause, upstream.delay = 0.02, 0.05
    began = time.monotonic()
    with openai_at(url) as client:
        assert len(consumed(client)) >= 3
    assert time.monotonic() - began >= 0.05 + 2 * 0.02
    sent = upstream.sent[0]
    assert sent.over.wait(600)
    assert sent.gone is None


def test_an_entry_may_be_a_function_of_the_request(upstream: Upstream, url: str) -> None:
    upstream.otherwise = lambda sent: f"You said {sent.body['messages'][-1]['content']!r}"
    with openai_at(url) as client:
        assert say(client).choices[0].message.content == "You said 'What is the weather?'"
        upstream.enqueue({"role": "assistant", "content": "A dict."})
        assert say(client).choices[0].message.content == "A dict."
    assert upstream.left == 0


def test_requests_are_not_kept_where_nothing_is_measured() -> None:
    upstream = Upstream(measured=False)
    with serving(upstream) as url, openai_at(url) as client:
        assert say(client, messages=[*ASK, {"role": "tool", "content": ""}]).usage.prompt_tokens == 0
    assert upstream.sent == []


def test_kilburns_own_models_pass_their_kit_against_it(upstream: Upstream, url: str) -> None:
    once = Retry(attempts=1)
    check_model(lambda: Chat("scripted", f"{url}/v1", "none", retry=once))
    check_model(lambda: Messages("scripted", url, "none", retry=once))
    assert not upstream.refused


@pytest.mark.parametrize(
    ("entry", "error"),
    [(Refusal(overlong=True), Overlong), (Refusal(status=429), RateLimited), (Refusal(status=529), Unavailable)],
)
def test_kilburns_own_models_read_its_errors(upstream: Upstream, url: str, entry: Any, error: Any) -> None:
    upstream.enqueue(entry, entry)
    once = Retry(attempts=1)
    for model in (
        Chat("scripted", f"{url}/v1", "none", retry=once),
        Messages("scripted", url, "none", retry=once),
    ):
        with pytest.raises(error):
            list(model.stream(Request(messages=ASK)))
        model.close()


def test_an_application_that_does_not_start_is_told() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no disk"})

    with pytest.raises(Unavailable, match="did not start"), serving(broken):
        raise AssertionError("it is not served")

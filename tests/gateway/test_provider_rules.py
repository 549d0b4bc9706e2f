"""Providers that demand back what they attached to a message, or take no tools in JSON mode; attachments through the gateway."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import kilburn
from gateway.talk import said
from kilburn.gateway.app import Settings, build
from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.conversations import Conversation
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.faults import answered
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.logs import Log
from kilburn.message import Kind, Part
from kilburn.testing.upstream import serving
from kilburn.tokens.choice import counter_for
from tokens.test_media import document, pdf

Json = dict[str, Any]
CHINESE = "数据库升级计划已经通过评审，我们将在星期六凌晨两点开始迁移。请各部门提前备份重要文件。"
LONG = "The parser drops the last line of the file. " * 40


class StrictProvider:
    """Speaks the chat form. Each call that it makes has a signature and reasoning, and it refuses a history without them.

    `recalls` is how many replies begin with a call of the gateway's own tool.
    """

    def __init__(self, recalls: int = 0, beside: Json | None = None, tools_with_json: bool = False) -> None:
        self.recalls, self.tools_with_json, self.tool = recalls, tools_with_json, "recall"
        self.beside = beside or {"reasoning_content": "I should look at p1."}
        self.issued: dict[str, Json] = {}
        self.bodies: list[Json] = []
        self.refused: list[str] = []
        self.reports = True
        """Whether replies say what they cost."""
        self.failing, self.words = 0, "it did not work"
        """Requests that are refused without a reason of the provider's rules, and with what words."""

    @property
    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/chat/completions", self.answer, methods=["POST"])])

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        wrong = self.fault(body)
        if wrong:
            self.refused.append(wrong)
            return JSONResponse({"error": {"message": wrong}}, status_code=400)
        message: Json = {"role": "assistant", "content": "Noted."}
        finish = "stop"
        if body.get("tools") and self.recalls and body["messages"][-1]["role"] == "user":
            self.recalls -= 1
            call = {
                "id": f"call_{len(self.issued)}",
                "type": "function",
                "function": {"name": self.tool, "arguments": '{"address":"p1"}'},
                "extra_content": {"google": {"thought_signature": "c2ln" * 30}},
            }
            self.issued[call["id"]] = {"call": call, "beside": self.beside}
            message, finish = {"role": "assistant", "content": None, "tool_calls": [call], **self.beside}, "tool_calls"
        tokens = len(json.dumps(body["messages"])) // 4
        usage = {"usage": {"prompt_tokens": tokens, "completion_tokens": 5, "total_tokens": 5}} if self.reports else {}
        head = {"id": "x", "object": "chat.completion", "created": 1, "model": "m"}
        if not body.get("stream"):
            return JSONResponse({**head, "choices": [{"index": 0, "message": message, "finish_reason": finish}], **usage})
        return StreamingResponse(self.events(head, message, finish), media_type="text/event-stream")

    async def events(self, head: Json, message: Json, finish: str) -> Any:
        calls = [{**call, "index": index} for index, call in enumerate(message.pop("tool_calls", ()))]
        deltas = [
            {"role": "assistant"},
            *({key: value} for key, value in message.items() if value and key != "reasoning_details"),
            *({"reasoning_details": [piece]} for entry in message.get("reasoning_details", ()) for piece in pieces_of(entry)),
            {"tool_calls": calls} if calls else {},
        ]
        for delta in deltas:
            yield (
                b"data: "
                + json.dumps({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}).encode()
                + b"\n\n"
            )
        yield b"data: " + json.dumps({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def fault(self, body: Json) -> str:
        if self.failing:
            self.failing -= 1
            return self.words
        if body.get("response_format") and body.get("tools") and not self.tools_with_json:
            return "please choose one of structured output and function declarations"
        for message in body["messages"]:
            for call in message.get("tool_calls") or ():
                issued = next((entry for id, entry in self.issued.items() if id in call["id"]), None)
                if issued is None:
                    continue
                if call.get("extra_content") != issued["call"]["extra_content"]:
                    return "a function call is missing its thought_signature"
                if any(message.get(key) != value for key, value in issued["beside"].items()):
                    return "reasoning must be passed back"
        return ""


def pieces_of(entry: Json) -> list[Json]:
    """Return an entry of reasoning as it is streamed: its text in two pieces, and the signature with the last one."""
    if "text" not in entry:
        return [entry]
    first = {key: value for key, value in entry.items() if key != "signature"}
    return [{**first, "text": entry["text"][:5]}, {**entry, "text": entry["text"][5:]}]


class Front:
    """A gateway before a provider, and a client that appends."""

    def __init__(self, url: str, provider: StrictProvider) -> None:
        self.url, self.provider, self.talk = url, provider, list[Json]()
        self.http = httpx2.Client(timeout=600)

    def say(self, content: Any, **more: Any) -> httpx2.Response:
        self.talk.append({"role": "user", "content": content})
        answer = self.http.post(f"{self.url}/v1/chat/completions", json={"model": "m", "messages": self.talk, **more})
        if answer.status_code == 200:
            self.talk.append(said("Noted."))
        else:
            self.talk.pop()
        return answer


@pytest.fixture
def front(tmp_path: Path) -> Iterator[Callable[..., Front]]:
    with ExitStack() as stack:

        def start(provider: StrictProvider, **settings: Any) -> Front:
            far = stack.enter_context(serving(provider.app))
            given = {
                "db": str(tmp_path / "g.db"),
                "upstream": f"{far}/v1",
                "tokenizer": "chars/4",
                "embedder": None,
                "window": 4000,
            }
            app = build(Settings(**{**given, **settings}))
            made = Front(stack.enter_context(serving(app, **uvicorn_options(RequestBounds()))), provider)
            stack.callback(made.http.close)
            return made

        yield start


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "beside",
    [
        {"reasoning_content": "I should look at p1."},
        {"reasoning_details": [{"type": "reasoning.encrypted", "data": "AbCd" * 40, "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "I should look.", "index": 0, "signature": "c2ln" * 9}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "I should look."}]}]},
    ],
    ids=["reasoning_content", "reasoning_details", "signed details", "thinking chunk"],
)
def test_a_reasoning_model_goes_on_after_a_recall(front: Callable[..., Front], beside: Json, stream: bool) -> None:
    provider = StrictProvider(recalls=3, beside=beside)
    at = front(provider)
    for turn in range(14):
        answer = at.say(f"{turn}: {LONG}", stream=stream)
        assert answer.status_code == 200, answer.text
    assert provider.issued
    assert not provider.refused
    assert provider.recalls < 3


def test_our_tools_never_break_a_request(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    at = front(provider)
    for turn in range(10):
        answer = at.say(f"{turn}: {LONG}", response_format={"type": "json_object"})
        assert answer.status_code == 200, answer.text
    # It was refused once, and is remembered for this kind of request; a plain request is offered the tools.
    assert len(provider.refused) == 1
    assert at.say(f"plain: {LONG}").status_code == 200
    assert provider.bodies[-1]["tools"]


@pytest.mark.parametrize(
    ("form", "stream", "beside"),
    [
        ("messages", False, {"reasoning_content": "I should look at p1."}),
        ("messages", True, {"reasoning_details": [{"type": "reasoning.encrypted", "data": "AbCd" * 40, "index": 0}]}),
        ("responses", True, {"reasoning_content": "I should look at p1."}),
        ("responses", False, {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "I should look."}]}]}),
    ],
)
def test_a_client_of_another_form_sends_back_what_the_provider_attached(
    front: Callable[..., Front], form: str, stream: bool, beside: Json
) -> None:
    provider = StrictProvider(recalls=99, beside=beside)
    provider.tool = "look"
    at, talk = front(provider), list[Any]()
    schema = {"type": "object", "properties": {"address": {"type": "string"}}}
    options: Json
    client: Any
    if form == "messages":
        client = anthropic.Anthropic(base_url=at.url, api_key="kilburn", max_retries=0)
        options = {"max_tokens": 500, "tools": [{"name": "look", "input_schema": schema}]}
    else:
        client = openai.OpenAI(base_url=f"{at.url}/v1", api_key="kilburn", max_retries=0)
        options = {"store": False, "tools": [{"type": "function", "name": "look", "parameters": schema, "strict": False}]}

    sdk = client.messages if form == "messages" else client.responses

    def ask() -> Any:
        sent = {"model": "m", "messages" if form == "messages" else "input": talk, **options}
        if not stream:
            return sdk.create(**sent)
        with sdk.stream(**sent) as events:
            return events.get_final_message() if form == "messages" else events.get_final_response()

    for turn in range(6):
        provider.tool = "look" if turn % 2 else "recall"
        talk.append({"role": "user", "content": f"{turn}: {LONG}"})
        calls = True
        while calls:
            reply = ask()
            if form == "messages":
                talk.append({"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in reply.content]})
                calls = [block.id for block in reply.content if block.type == "tool_use"]
                results = [{"type": "tool_result", "tool_use_id": call, "content": LONG} for call in calls]
                talk += [{"role": "user", "content": results}] if calls else []
            else:
                talk += [item.model_dump(exclude_none=True) for item in reply.output]
                calls = [item.call_id for item in reply.output if item.type == "function_call"]
                talk += [{"type": "function_call_output", "call_id": call, "output": LONG} for call in calls]
    client.close()
    assert not provider.refused
    assert {call["call"]["function"]["name"] for call in provider.issued.values()} == {"look", "recall"}


def test_one_refusal_without_a_reason_does_not_end_the_tools_of_a_model(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    at = front(provider)
    for turn in range(10):
        assert at.say(f"{turn}: {LONG}").status_code == 200
    for number, offered in enumerate([True, False]):
        provider.failing = 1
        assert at.say(f"fails {number}").status_code == 200
        assert at.say(f"and after {number}?").status_code == 200
        assert bool(provider.bodies[-1].get("tools")) is offered


def test_a_window_that_was_refused_as_too_long_has_room_for_the_reply(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    at = front(provider, window=32_000)
    assert at.say(LONG, max_tokens=16_000).status_code == 200
    provider.failing = 1
    provider.words = "This model's maximum context length is 901 tokens. However, your messages resulted in 902 tokens."
    assert at.say(LONG, max_tokens=16_000).status_code == 200
    assert at.say(LONG, max_tokens=16_000).status_code == 200


def test_the_reserve_follows_each_request(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    at = front(provider, window=8000)

    def largest(turns: int, **more: Any) -> int:
        for _ in range(turns):
            assert at.say(LONG * 2, **more).status_code == 200
        return max(len(json.dumps(body["messages"])) // 4 for body in provider.bodies[-turns:])

    assert 6000 < largest(12) <= 8000
    assert largest(1, max_tokens=3500) <= 4500
    # The room that comes back is filled with what is new: the prompt only grows.
    short = provider.bodies[-1]["messages"]
    largest(2)
    assert provider.bodies[-1]["messages"][: len(short)] == short
    assert 6000 < largest(10) <= 8000


def test_a_reply_that_may_be_longer_than_the_window_takes_no_room_of_it(front: Callable[..., Front]) -> None:
    at = front(StrictProvider(), window=8000)
    for _ in range(16):
        answer = at.say(LONG * 2, max_tokens=64_000)
        assert "0 are reserved" in answer.headers["x-kilburn-warning"]
    assert max(len(json.dumps(body["messages"])) // 4 for body in at.provider.bodies) > 6000


def test_the_model_that_a_request_names_counts(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    provider.reports = False
    at = front(provider, window=4000, tokenizer="auto")
    for turn in range(12):
        assert at.say(f"{turn}: {CHINESE * 12}", model="gpt-4o").status_code == 200
    sentences = max(json.dumps(body, ensure_ascii=False).count(CHINESE) for body in provider.bodies)
    assert 0.8 * 4000 < counter_for("gpt-4o").count(CHINESE * sentences) <= 4000


def test_a_document_arrives_as_it_was_sent_or_is_refused_by_name(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    at = front(provider, window=12_000)
    file = {"type": "file", "file": {"filename": "report.pdf", "file_data": f"data:application/pdf;base64,{pdf(1)}"}}
    for turn in range(12):
        content = [file, {"type": "text", "text": LONG}] if turn == 3 else f"{turn}: {LONG * 3}"
        answer = at.say(content)
        assert answer.status_code == 200, answer.text
        if turn == 3:
            assert file in provider.bodies[-1]["messages"][-1]["content"]
            assert "x-kilburn-warning" not in answer.headers
    assert not any("in part" in json.dumps(body) and "base64" in json.dumps(body) for body in provider.bodies)
    assert "report.pdf, 1 page" in json.dumps(provider.bodies[-1])
    large = {"type": "file", "file": {"filename": "thesis.pdf", "file_data": f"data:application/pdf;base64,{pdf(40)}"}}
    bodies, talk = len(provider.bodies), len(at.talk)
    answer = at.say([large])
    assert answer.status_code == 400
    assert "thesis.pdf, 40 pages" in answer.json()["error"]["message"]
    assert len(provider.bodies) == bodies
    assert len(at.talk) == talk
    assert at.say("and without it?").status_code == 200


def test_what_is_shortened_is_said(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    at = front(provider)
    assert "x-kilburn-warning" not in at.say("short").headers
    answer = at.say(LONG * 20)
    assert "p3 shortened" in answer.headers["x-kilburn-warning"]
    assert "kilburn_shortened_total" in at.http.get(f"{at.url}/metrics").text
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": LONG, "parameters": {"type": "object"}}}
        for n in range(20)
    ]
    assert "and the window of 4000 has room for" in at.say("go on", tools=tools).headers["x-kilburn-warning"]


def test_the_log_has_no_words_of_what_was_left_out(front: Callable[..., Front]) -> None:
    provider, out = StrictProvider(), io.StringIO()
    at = front(provider, log=Log(out))
    file = {"type": "file", "file": {"filename": "divorce.pdf", "file_data": f"data:application/pdf;base64,{pdf(1)}"}}
    for n in range(8):
        at.say(f"{n}: {LONG}")
    provider.recalls = 1
    answer = at.say([file, file, {"type": "text", "text": "Compare them."}])
    # The warning of the first round is there, although the model recalled something in between.
    assert provider.recalls == 0
    assert "divorce" in answer.headers["x-kilburn-warning"]
    # One connection answers one request after the other, and the log of the first is written in between.
    assert at.say("And?").status_code == 200
    assert "left out" in out.getvalue()
    assert "divorce" not in out.getvalue()


def test_a_history_may_hold_an_attachment_that_no_window_holds(front: Callable[..., Front]) -> None:
    provider = StrictProvider()
    at = front(provider)
    large = {"type": "file", "file": {"filename": "thesis.pdf", "file_data": f"data:application/pdf;base64,{pdf(40)}"}}
    at.talk = [{"role": "user", "content": [large]}, said("I read it.")]
    assert at.say("What did it say?").status_code == 200
    assert "thesis.pdf, 40 pages" in json.dumps(provider.bodies[-1]["messages"])


def test_an_attachment_of_an_earlier_session_comes_back_whole() -> None:
    with kilburn.open(":memory:", window=16_000, policy="lru", tokenizer="chars/4", embedder=None) as store:
        earlier, session = store.session("a"), store.session("b")
        block = document(pdf(1), title="report.pdf")
        earlier.append({"role": "user", "content": [block]})
        session.append({"role": "user", "content": "What was in it?"})
        call = Part(kind=Kind.CALL, text='{"address":"a p1"}', call="c", name="recall")
        conversation = Conversation(session, "b", [earlier.number])
        [result] = answered(store, conversation, [call], Exchange(), over=False)
        assert [json.loads(part.text) for part in result.parts if part.kind is Kind.OPAQUE] == [block]
        assert result.cites == ((earlier.number, 1),)

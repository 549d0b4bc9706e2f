"""A session whose model changes: reasoning and signatures that the new one refuses are left out, and the session goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import Refusal, Sent, Upstream, serving

Json = dict[str, Any]
LONG = "The river carries sand, and the sand carries gold. " * 12
SIGNED = {"type": "thinking", "thinking": "Let me see.", "signature": "c2lnbmVkIGJ5IE9ORQ" * 4}
ITEM = {"type": "reasoning", "id": "rs_one", "summary": [], "encrypted_content": "gAAAAB" + "k3Jx" * 30}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}
WORDS = {
    "chat": "'messages.2' : for 'role:assistant' the following must be satisfied: property 'reasoning_content' is unsupported",
    "messages": "messages.1.content.0: Invalid `signature` in `thinking` block",
    "responses": "The encrypted content gAAA...k3Jx could not be verified.",
}


def reasoned(form: str, turn: int) -> list[Json]:
    """What the first model said in a turn, as a client sends it back: reasoning, a call, its result, and a text."""
    call, result = f"call_{turn}", f"Line {turn}."
    if form == "messages":
        return [
            {"role": "assistant", "content": [SIGNED, {"type": "tool_use", "id": call, "name": "read", "input": {"line": turn}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": result}]},
            {"role": "assistant", "content": [{"type": "text", "text": f"It says {turn}."}]},
        ]
    if form == "responses":
        return [
            ITEM | {"id": f"rs_{turn}"},
            {"type": "function_call", "id": f"fc_{turn}", "call_id": call, "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": call, "output": result},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": f"It says {turn}."}]},
        ]
    function = {"name": "read", "arguments": "{}"}
    signed = {"extra_content": {"google": {"thought_signature": "c2ln" * 30}}}
    return [
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Let me see.",
            "tool_calls": [{"id": call, "type": "function", "function": function, **signed}],
        },
        {"role": "tool", "tool_call_id": call, "content": result},
        {"role": "assistant", "content": f"It says {turn}."},
    ]


def refusing(form: str) -> Callable[[Sent], Any]:
    """A model that refuses every mark of another one's reasoning."""

    def answer(sent: Sent) -> Any:
        text = json.dumps(sent.body)
        marks = ("signature", "encrypted_content", "reasoning_content", '"id": "fc_')
        return Refusal(status=400, words=WORDS[form]) if any(mark in text for mark in marks) else "Fine."

    return answer


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Callable[..., tuple[Upstream, str]]]:
    with ExitStack() as stack:

        def start(form: str, answer: Any) -> tuple[Upstream, str]:
            upstream = Upstream(otherwise=answer)
            far = stack.enter_context(serving(upstream))
            given: Json = {"db": str(tmp_path / "g.db"), "tokenizer": "chars/4", "embedder": None, "window": 3000}
            app = build(Settings(upstream=far if form == "messages" else f"{far}/v1", **given))
            return upstream, stack.enter_context(serving(app)) + PATHS[form]

        yield start


@pytest.mark.parametrize(("form", "stream"), [("chat", True), ("messages", False), ("messages", True), ("responses", False)])
def test_reasoning_of_another_model_is_left_out_when_it_is_refused(
    gateway: Callable[..., tuple[Upstream, str]], form: str, stream: bool
) -> None:
    model: Json = {"name": "one"}
    refuse = refusing(form)
    upstream, url = gateway(form, lambda sent: "Noted." if model["name"] == "one" else refuse(sent))
    talk: list[Json] = []
    with httpx2.Client(timeout=600) as http:

        def ask(turn: int) -> httpx2.Response:
            talk.append({"role": "user", "content": f"{turn}: {LONG}"})
            body = {"model": model["name"], "max_tokens": 99, "stream": stream}
            return http.post(url, json={**body, "input" if form == "responses" else "messages": talk})

        for turn in range(8):
            assert ask(turn).status_code == 200
            talk.extend(reasoned(form, turn))
        model["name"] = "two"
        before = len(upstream.sent)
        for turn in range(8, 12):
            answer = ask(turn)
            assert answer.status_code == 200, answer.text
            talk.append({"role": "assistant", "content": "Fine."})
        bodies = [json.dumps(sent.body) for sent in upstream.sent[before:]]
    # One refusal, and then the session knows.
    assert len(bodies) == 5
    assert all("It says 7." in body for body in bodies)
    assert "Line 7." in bodies[1]


class BoundThinking:
    """Anthropic's preserved thinking: a thinking block is good only behind the system prompt, tools and messages that it was made
    behind, byte for byte; otherwise the request is refused."""

    def __init__(self) -> None:
        self.made: dict[str, str] = {}
        self.refused = self.good = 0

    def __call__(self, sent: Sent) -> Any:
        body = json.loads(json.dumps(sent.body, sort_keys=True).replace(', "cache_control": {"type": "ephemeral"}', ""))
        body = json.loads(json.dumps(body).replace('"cache_control": {"type": "ephemeral"}, ', ""))
        for at, message in enumerate(body["messages"]):
            for block in message["content"] if isinstance(message["content"], list) else []:
                if block["type"] == "thinking":
                    if self.made[block["thinking"]] != self.prefix(body, at):
                        self.refused += 1
                        words = "Invalid `signature` in `thinking` block. The block is bound to a different conversation."
                        return Refusal(status=400, words=f"messages.{at}.content.0: {words}")
                    self.good += 1
        thought = f"Thought {len(self.made)}."
        self.made[thought] = self.prefix(body, len(body["messages"]))
        said = {"type": "text", "text": f"Noted {len(self.made)}. {LONG}"}
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": thought, "signature": ""}, said]}

    @staticmethod
    def prefix(body: Json, end: int) -> str:
        messages = [
            {**message, "content": [{"type": "text", "text": text}] if isinstance(text := message["content"], str) else text}
            for message in body["messages"][:end]
        ]
        return json.dumps([body.get("system"), body.get("tools"), messages], sort_keys=True)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_that_is_bound_to_what_was_before_it_costs_one_refusal_an_edit(
    gateway: Callable[..., tuple[Upstream, str]], *, stream: bool
) -> None:
    bound = BoundThinking()
    _, url = gateway("messages", bound)
    talk: list[Json] = []
    with httpx2.Client(timeout=600) as http:
        for turn in range(40):
            talk.append({"role": "user", "content": f"{turn}: {LONG}"})
            answer = http.post(url, json={"model": "m", "max_tokens": 99, "stream": stream, "messages": talk})
            assert answer.status_code == 200, answer.text
            if stream:
                events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
                deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
                thinking = "".join(delta.get("thinking", "") for delta in deltas)
                signature = "".join(delta.get("signature", "") for delta in deltas)
                text = "".join(delta.get("text", "") for delta in deltas)
                block = {"type": "thinking", "thinking": thinking, "signature": signature}
                talk.append({"role": "assistant", "content": [block, {"type": "text", "text": text}]})
            else:
                talk.append({"role": "assistant", "content": answer.json()["content"]})
    assert bound.good > 40
    assert 0 < bound.refused < 20

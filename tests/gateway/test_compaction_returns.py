"""A provider's compaction goes back to it with each request, until it makes a newer one."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from kilburn.testing.upstream import Upstream

Json = dict[str, Any]


class Client:
    """Appends to one history and sends all of it each time."""

    def __init__(self, setup: Any, form: str) -> None:
        self.setup, self.form, self.history = setup, form, list[Json]()

    def say(self, text: str) -> httpx2.Response:
        self.history.append({"role": "user", "content": text})
        field = {"messages": "messages", "responses": "input"}[self.form]
        body = {"model": "m", field: self.history} | ({"max_tokens": 100} if field == "messages" else {})
        answer = httpx2.post(f"{self.setup.url}/v1/{self.form}", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        reply = answer.json()
        self.history += reply["output"] if field == "input" else [{"role": "assistant", "content": reply["content"]}]
        return answer

    def sent(self) -> str:
        return json.dumps(json.loads(self.setup.upstream.sent[-1].raw))


def block_of(form: str, size: int) -> Json:
    words = "c4f0" * size
    return {"type": "compaction", "content": words} if form == "messages" else {"type": "compaction", "encrypted_content": words}


@pytest.mark.parametrize("form", ["messages", "responses"])
def test_it_is_sent_back_until_a_newer_one_replaces_it(gateway: Any, form: str) -> None:
    setup = gateway(upstream=Upstream(otherwise="OK."), form=form if form == "messages" else "chat", window=4000)
    client = Client(setup, form)
    client.say("Hello.")
    for number in (50, 60):
        block = block_of(form, number)
        setup.upstream.enqueue({"role": "assistant", "content": [block, {"type": "text", "text": "Here I am."}]})
        client.say("And?")
        for turn in range(15):
            answer = client.say(f"{turn}: " + "What follows from that? " * 60)
            assert json.dumps(block)[1:-1] in client.sent(), turn
            assert "compaction" not in answer.headers.get("x-kilburn-warning", "")
    assert json.dumps(block_of(form, 50))[1:-1] not in client.sent()


def test_one_that_does_not_fit_is_named_in_a_warning(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="OK."), form="messages", window=4000)
    client = Client(setup, "messages")
    block = block_of("messages", 4000)
    setup.upstream.enqueue({"role": "assistant", "content": [block, {"type": "text", "text": "Here I am."}]})
    client.say("Hello.")
    answer = client.say("What follows from that?")
    assert "p2 left out: compaction by the provider" in answer.headers["x-kilburn-warning"]
    assert block["content"] not in client.sent()

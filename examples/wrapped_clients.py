"""The `openai` and `anthropic` clients, each wrapped in one line: 42 turns through a window of 2,000 tokens, and then a
question about the second.

A client's own loop is as anyone writes it: it keeps a list, and sends all of it. The provider is scripted and on this machine;
put `openai.OpenAI()` or `anthropic.Anthropic()` in its place and nothing else changes.

It prints:

    openai: a history of ... tokens, the largest prompt had ... of 2000
    The pump's serial number is K-4711.
    anthropic: a history of ... tokens, the largest prompt had ... of 2000
    The pump's serial number is K-4711.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import anthropic
import openai

import kilburn
from kilburn.adapters.clients import wrap
from kilburn.testing.upstream import Sent, Upstream, calling, serving

History = list[dict[str, str]]
Client = openai.OpenAI | anthropic.Anthropic


def by_openai(url: str, session: kilburn.Session) -> tuple[Client, Callable[[History], str]]:
    client = wrap(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), session)

    def ask(history: History) -> str:
        return client.chat.completions.create(model="gpt-5", messages=history).choices[0].message.content

    return client, ask


def by_anthropic(url: str, session: kilburn.Session) -> tuple[Client, Callable[[History], str]]:
    client = wrap(anthropic.Anthropic(base_url=url, api_key="none"), session)

    def ask(history: History) -> str:
        with client.messages.stream(model="claude-opus-4-8", max_tokens=500, messages=history) as stream:
            return "".join(stream.text_stream)

    return client, ask


def conclude(sent: Sent) -> str:
    """The last reply: it may use nothing but what the prompt shows."""
    assert "K-4711" in str(sent.body["messages"][-1]["content"]), "the search found it"
    return "The pump's serial number is K-4711."


def inspect(name: str, wrapped: Callable[[str, kilburn.Session], tuple[Client, Callable[[History], str]]]) -> None:
    upstream, history = Upstream(window=2000), History()
    with kilburn.open(":memory:", window=2000, policy="lru") as store, serving(upstream) as url:
        client, ask = wrapped(url, store.session("inspection"))

        def say(text: str) -> str:
            history.append({"role": "user", "content": text})
            history.append({"role": "assistant", "content": ask(history)})
            return history[-1]["content"]

        say("Inspect the boiler house.")
        say("The pump's serial number is K-4711.")
        for number in range(40):
            say(f"Valve {number} is closed, and here is its log: " + "pressure normal, " * 20)
        upstream.enqueue(calling(("search_memory", {"query": "pump serial number"})), conclude)
        answer = say("What is the serial number of the pump?")
        client.close()
    largest = max(sent.tokens for sent in upstream.sent)
    print(f"{name}: a history of {len(json.dumps(history)) // 4} tokens, the largest prompt had {largest} of 2000")
    print(answer)
    assert not upstream.refused


def main() -> None:
    os.environ["NO_PROXY"] = "127.0.0.1"
    inspect("openai", by_openai)
    inspect("anthropic", by_anthropic)


if __name__ == "__main__":
    main()

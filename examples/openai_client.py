"""The `openai` client, wrapped in one line: 40 turns through a window of 2,000 tokens, and a question about the first one.

The client's own loop is as anyone writes it: it keeps a list and sends all of it. The provider is scripted and on this machine;
put `openai.OpenAI()` in its place and nothing else changes.

It prints:

    the client's history: ... tokens
    largest prompt: ... tokens of 2000
    The pump's serial number is K-4711.
"""

from __future__ import annotations

import json
import os

import openai

import kilburn
from kilburn.adapters.openai import wrap
from kilburn.testing.upstream import Sent, Upstream, calling, serving


def conclude(sent: Sent) -> str:
    """The last reply: it may use nothing but what the prompt shows."""
    assert "K-4711" in sent.body["messages"][-1]["content"], "the search found it"
    return "The pump's serial number is K-4711."


def main() -> None:
    upstream = Upstream(window=2000)
    os.environ["NO_PROXY"] = "127.0.0.1"
    with kilburn.open(":memory:", window=2000, policy="lru") as store, serving(upstream) as url:
        client = wrap(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), store.process("inspection"))
        history: list[dict[str, str]] = [{"role": "system", "content": "You inspect a boiler house."}]

        def ask(text: str) -> str:
            history.append({"role": "user", "content": text})
            reply = client.chat.completions.create(model="gpt-5", messages=history).choices[0].message
            history.append({"role": "assistant", "content": reply.content})
            return reply.content

        ask("Inspect the boiler house.")
        ask("The pump's serial number is K-4711.")
        for number in range(40):
            ask(f"Valve {number} is closed, and here is its log: " + "pressure normal, " * 20)
        upstream.enqueue(calling(("search_memory", {"query": "pump serial number"})), conclude)
        answer = ask("What is the serial number of the pump?")
        client.close()
    print(f"the client's history: {len(json.dumps(history)) // 4} tokens")
    print(f"largest prompt: {max(sent.tokens for sent in upstream.sent)} tokens of 2000")
    print(answer)
    assert not upstream.refused


if __name__ == "__main__":
    main()

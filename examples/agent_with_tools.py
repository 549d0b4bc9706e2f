"""An agent reads logs that are far larger than its window, and gets a line back that had left it.

The model is scripted, so that the run is the same everywhere; put `kilburn.models.local.Local()` or
a hosted model in its place and nothing else changes. Each log is about twice the window. The agent
reads three, then asks for the first one again by searching what it has seen.

It prints:

    read boiler.log -> ... characters
    read pump.log -> ... characters
    read valve.log -> ... characters
    search_memory -> ...
    The boiler's relief valve opened at 14:07.
    largest prompt: ... tokens of 2500
"""

from __future__ import annotations

import json

import kilburn
from kilburn.agents.loop import Agent, Called, Returned, Said
from kilburn.message import Kind
from kilburn.model import Request
from kilburn.testing import Scripted

WINDOW = 2_500
LOGS = ("boiler.log", "pump.log", "valve.log")


def read(path: str) -> str:
    """Read a log file.

    Args:
        path: its name.
    """
    lines = [
        f"{hour:02}:{minute:02} {path} pressure {(hour * minute) % 17} bar, normal"
        for hour in range(10, 18)
        for minute in range(60)
    ]
    if path == "boiler.log":
        lines[4 * 60 + 7] = "14:07 boiler.log relief valve opened at 16 bar"
    return "\n".join(lines)


def calling(number: int, name: str, **arguments: str) -> kilburn.Message:
    """What a model says when it calls a tool."""
    part = kilburn.Part(kind=Kind.CALL, call=f"call-{number}", name=name, text=json.dumps(arguments))
    return kilburn.Message(role=kilburn.Role.ASSISTANT, parts=(part,))


def conclude(request: Request) -> str:
    """The last reply: it may use nothing but what the prompt shows."""
    found = request.messages[-1]["content"]
    assert "14:07 boiler.log relief valve opened" in found, "the line came back"
    return "The boiler's relief valve opened at 14:07."


def main() -> None:
    script = [
        *(calling(number, "read", path=path) for number, path in enumerate(LOGS)),
        calling(9, "search_memory", query="relief valve opened"),
        conclude,
    ]
    model = Scripted(script)
    with kilburn.open(":memory:", window=WINDOW, policy="lru", tokenizer="chars/4") as store:
        agent = Agent(model, [read], store.session("inspection"), system="You inspect a boiler house.")
        name = ""
        for event in agent.stream("When did a relief valve open?"):
            if isinstance(event, Called):
                name = " ".join([event.name, *json.loads(event.arguments).values()] if event.name == "read" else [event.name])
            elif isinstance(event, Returned):
                print(f"{name} -> {len(event.text)} characters")
            elif isinstance(event, Said):
                print(event.text)
        largest = max(sum(len(json.dumps(message)) for message in request.messages) // 4 for request in model.requests)
        print(f"largest prompt: {largest} tokens of {WINDOW}")
        assert largest <= WINDOW


if __name__ == "__main__":
    main()

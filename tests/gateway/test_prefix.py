"""What a provider gets keeps its beginning as the session's own measure says, and marks for its cache stand where that pays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from kilburn.event import Act
from kilburn.memory.memory_tools import OURS
from kilburn.testing.upstream import BLOCK

QUESTIONS = 30
WINDOW = 2900
RIVERS = ("Arno", "Besos", "Clyde", "Douro", "Ebro", "Forth", "Garonne", "Hudson", "Indus", "Jordan", "Kama", "Loire", "Meuse")


def answer(number: int) -> str:
    river = RIVERS[number % len(RIVERS)]
    return (
        f"The ferry {number} on the {river} costs {number + 11} pence. " + f"It carries sand past mile {number}, and gold. " * 9
    )


def talk(setup: Any, form: str) -> None:
    """A conversation in which some questions are about what was said long ago."""
    history: list[dict[str, Any]] = []
    for number in range(QUESTIONS):
        river = RIVERS[number % len(RIVERS) if number % 4 else number // 2 % len(RIVERS)]
        history.append({"role": "user", "content": f"Question {number}: what does the ferry on the {river} cost?"})
        setup.upstream.enqueue(answer(number))
        if form == "chat":
            said = setup.chat(history)[0].choices[0].message.content
        else:
            said = setup.anthropic.messages.create(model="m", max_tokens=500, messages=history).content[0].text
        assert said == answer(number)
        history.append({"role": "assistant", "content": said})


def bare(value: Any) -> Any:
    """Messages without marks, and texts of one block as plain texts: that is the same to a provider."""
    if isinstance(value, list):
        return [bare(each) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: bare(each) for key, each in value.items() if key != "cache_control"}
    content = kept.get("content")
    if isinstance(content, list) and all(block.keys() == {"type", "text"} for block in content):
        kept["content"] = "\n\n".join(block["text"] for block in content)
    return kept


def common(one: list[Any], other: list[Any]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_the_bytes_keep_their_beginning_as_the_ledger_says(gateway: Any, form: str) -> None:
    setup = gateway(form=form, window=WINDOW)
    talk(setup, form)
    assert not setup.upstream.refused
    prompts = [bare(sent.body["messages"]) for sent in setup.upstream.prompts]
    with setup.store(window=WINDOW) as store:
        [info] = store.sessions()
        shipped = [event for event in store.session(info.name).ledger.events() if event.act is Act.SHIP]
    assert len(shipped) == len(prompts) == QUESTIONS
    seen: set[bytes] = set()
    edits = 0
    for (before, now), event in zip(pairwise([[], *prompts]), shipped, strict=True):
        same = common(before, now)
        again = sum(len(message["content"]) // 4 for message in now[same:] if msgspec.json.encode(message) in seen)
        if not event.data["again"]:
            assert same == len(before), "nothing is read again, so the prompt before is the beginning of this one"
        else:
            edits += 1
            assert again <= event.data["again"], "no more is read again than the ledger says"
        seen |= {msgspec.json.encode(message) for message in now}
    assert 0 < edits < QUESTIONS / 2
    tools = [
        sorted(str(tool.get("name") or tool["function"]["name"]) for tool in sent.body.get("tools", ()))
        for sent in setup.upstream.prompts
    ]
    assert sum(one != other for one, other in pairwise(tools)) == 1, "our tools come once, and stay"
    assert tools[-1] == sorted(OURS)


def test_marks_stand_where_the_next_prompt_still_is_the_same(gateway: Any) -> None:
    setup = gateway(form="messages", window=WINDOW)
    talk(setup, "messages")
    sents = [sent for sent in setup.upstream.prompts if b"cache_control" in sent.raw]
    assert len(sents) > QUESTIONS / 3, "the client sets no marks; the gateway does, once the prompt is not the client's own"
    read = 0
    for before, sent in pairwise(sents):
        here, there = marks_of(sent), marks_of(before)
        assert here[-1] == len(sent.body["messages"]) - 1, "the next prompt goes on from here"
        assert len(here) <= 3
        same = common(bare(before.body["messages"]), bare(sent.body["messages"]))
        if same and same >= len(before.body["messages"]) - 1:
            # All stays but a copy, which was brought for one question and stood in its message.
            assert same - 1 in there, "a mark stands at the end of what stays"
            if sent.shared > setup.upstream.least:
                assert sent.cached >= sent.shared - BLOCK, "and the provider finds it again"
                read += 1
    assert read > len(sents) / 3


def marks_of(sent: Any) -> list[int]:
    """The messages that have a mark."""
    return [at for at, message in enumerate(sent.body["messages"]) if b'"cache_control"' in msgspec.json.encode(message)]

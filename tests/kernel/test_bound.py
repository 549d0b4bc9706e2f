"""What a provider takes back only whole moves whole, and what is counted is what is sent."""

from __future__ import annotations

from typing import Any

import pytest

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import LawBroken
from kilburn.kernel.session import Session
from kilburn.move import Evict, Fold
from kilburn.testing.clock import FakeClock
from wire.provider import check_chat, check_messages, weight

Dicts = dict[str, Any]

USER = {"role": "user", "content": "Fix it"}
SIGNED = {"type": "thinking", "thinking": "hm " * 30, "signature": "sig"}
HIDDEN = {"type": "redacted_thinking", "data": "EoZZ" * 20}
SAID = {"type": "text", "text": "I read it."}


def opened(window: int = 20_000, tokenizer: str = "chars/1") -> Session:
    return Store(Sqlite(":memory:"), Budget(window), "fifo", tokenizer=tokenizer, clock=FakeClock()).session("s")


def loop(session: Session, number: int, *thoughts: Dicts) -> list[Dicts]:
    """One step of a tool loop: thinking, text, a call, its result."""
    use = {"type": "tool_use", "id": f"t{number}", "name": "read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"output {number}"}
    made = [{"role": "assistant", "content": [*thoughts, SAID, use]}, {"role": "user", "content": [result]}]
    session.append(*made)
    return made


@pytest.mark.parametrize("thought", [SIGNED, HIDDEN])
def test_parts_of_a_thinking_message_leave_together(thought: Dicts) -> None:
    session = opened()
    session.append(USER)
    made = loop(session, 1, thought)
    for alone in (2, 3, 4):
        with pytest.raises(LawBroken):
            session.edits.apply(Evict((alone,)))
    for keep in (Fold((2,), keep=((0, 2),)), Fold((2,), text="thought"), Fold((3,), text="said")):
        with pytest.raises(LawBroken):
            session.edits.apply(keep)
    check_messages(session.render("messages"), None, made)
    session.edits.apply(Evict((2, 3, 4, 5)))
    assert len(session.render("messages")) == 1


def test_thinking_leaves_alone_once_the_turn_is_over_all_of_it() -> None:
    session = opened()
    session.append(USER)
    made = loop(session, 1, SIGNED, HIDDEN)
    session.append({"role": "assistant", "content": "Done."}, {"role": "user", "content": "And now?"})
    with pytest.raises(LawBroken):
        session.edits.apply(Evict((2,)))
    session.edits.apply(Evict((2, 3)))
    prompt = session.render("messages")
    check_messages(prompt, None, made)
    assert [block["type"] for block in prompt[1]["content"]] == ["text", "tool_use"]


def test_thinking_that_does_not_fit_leaves_before_the_append_is_refused() -> None:
    session = opened(window=600)
    session.append(USER)
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    session.append({"role": "assistant", "content": [{**SIGNED, "thinking": "hm " * 400}, use]})
    assert [block["type"] for block in session.render("messages")[1]["content"]] == ["tool_use"]


def test_thinking_begins_what_two_messages_of_the_assistant_become() -> None:
    session = opened()
    session.append(USER, {"role": "assistant", "content": "First of all,"})
    made = loop(session, 1, SIGNED)
    check_messages(session.render("messages"), None, made)


def test_a_message_keeps_its_form_when_its_first_part_has_left() -> None:
    session = opened()
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    session.append(USER, {"role": "user", "content": [{"type": "text", "text": "see"}, document]})
    session.append({"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Go on."})
    session.edits.apply(Evict((2,)))
    assert document in session.render("messages")[0]["content"]
    assert weight(list(session.render("messages"))) <= session.render().tokens


CITED = {"type": "char_location", "cited_text": "c" * 60, "document_index": 0, "start_char_index": 1, "end_char_index": 61}
CASES: list[tuple[str, list[Dicts]]] = [
    ("chat", [{"role": "user", "content": "hello", "name": "ann", "x_note": {"a": [1, "b"]}}]),
    ("chat", [{"role": "user", "content": [{"type": "text", "text": "hello", "x_y": "z" * 100}]}]),
    ("chat", [{"role": "assistant", "content": "hello", "reasoning_content": "hm"}]),
    (
        "messages",
        [{"role": "user", "content": [{"type": "text", "text": "hi", "citations": [{**CITED, "document_title": "t"}]}]}],
    ),
    ("messages", [USER, {"role": "assistant", "content": [SIGNED, HIDDEN, SAID], "stop_reason": None, "usage": {"input": 9}}]),
    ("messages", [USER, {"role": "assistant", "content": [{**SIGNED, "signature": ""}, SAID], "id": "msg_1" * 30}]),
    ("messages", [USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}, SAID]}]),
]


@pytest.mark.parametrize(("form", "messages"), CASES)
def test_what_is_sent_is_counted_once_and_nothing_else(form: str, messages: list[Dicts]) -> None:
    session = opened()
    session.append(*messages)
    prompt = session.render(form)
    sent = weight(list(prompt))
    opening = len("(conversation continues)") if messages[0]["role"] == "assistant" else 0
    # Words of leftovers are counted with a space between.
    assert sent <= prompt.tokens - opening <= sent + 12
    check_chat(session.render())


@pytest.mark.parametrize("call", ["c1", "a b", "x" * 90])
def test_ids_and_errors_are_counted_as_they_are_sent(call: str) -> None:
    session = opened()
    use = {"type": "tool_use", "id": call, "name": "read", "input": {"path": "a"}}
    failed = {"type": "tool_result", "tool_use_id": call, "is_error": True}
    session.append(USER, {"role": "assistant", "content": [use]})
    assert weight(list(session.render("messages"))) <= session.render().tokens
    session.append({"role": "user", "content": [failed]})
    sent = max(weight(list(session.render(form))) for form in ("chat", "messages"))
    assert sent <= session.render().tokens <= sent + 12
    session.edits.apply(Evict((3,)))
    assert weight(list(session.render("messages"))) <= session.render().tokens

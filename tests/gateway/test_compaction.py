"""Clients that compact by themselves are recognised; conversations that share much by chance are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kilburn
from gateway.talk import TALK, TOPICS, Talk, said, user, work
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.conversations import Conversation
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.faults import answered
from kilburn.gateway.history import Histories
from kilburn.gateway.messages import MessagesForm
from kilburn.message import Kind, Part
from kilburn.wire.form import parse

CHAT, MESSAGES = ChatForm(), MessagesForm()


SUMMARY = "\n".join(
    f"{n}. In the {topic} of atlas the check stands before the loop now; test {n} passes." for n, topic in enumerate(TOPICS)
)
REPLY = f"<analysis>{'I go through the conversation in order. ' * 3}</analysis>\n<summary>\n{SUMMARY}\n</summary>"
CONTINUED = f"This session is being continued from a previous one that ran out of context.\nSummary:\n{SUMMARY}\nGo on."
SUMMARISE = "Write a detailed summary of the conversation so far."


class Gateway:
    """Histories over a file, which may start again."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "a.db")
        self.start()

    def start(self) -> None:
        options: dict[str, Any] = {"window": 100_000, "policy": "fifo", "tokenizer": "chars/4", "embedder": None}
        self.store = kilburn.open(self.path, **options)
        self.histories = Histories(self.store)

    def again(self) -> None:
        self.store.close()
        self.start()

    def take(self, talk: Talk, *, form: Any = CHAT, of: str = "", **more: Any) -> Conversation:
        body = msgspec.json.encode({"model": "m", "max_tokens": 9, "messages": talk, **more})
        conversation = self.histories.take(form, form.open(body), None, of)
        self.histories.give(conversation)
        return conversation

    def turn(self, talk: Talk, reply: dict[str, Any], **more: Any) -> Conversation:
        conversation = self.take(talk, **more)
        conversation.busy = True
        self.histories.said(conversation, parse(reply))
        self.histories.give(conversation)
        return conversation

    def hold(self, talk: Talk, **more: Any) -> Conversation:
        """The conversation as it was, turn by turn; the last message is the assistant's."""
        for end in range(1, len(talk), 2):
            conversation = self.turn(talk[:end], talk[end], **more)
        return conversation


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Gateway]:
    made = Gateway(tmp_path)
    yield made
    made.store.close()


SUMMED = [*TALK, user(SUMMARISE), said(REPLY)]
LEFT_OUT = user("[Older messages were left out.]")

REAL: dict[str, tuple[Talk, Talk, dict[str, Any]]] = {
    "a summary comes first": (SUMMED, [user(CONTINUED)], {}),
    "a summary, and an answer to it": (SUMMED, [user(CONTINUED), said("Ok."), user("Go on with the linker.")], {}),
    "a summary and the last turns": (SUMMED, [user(CONTINUED), *TALK[-2:], user("Go on.")], {}),
    "a summary in the system prompt": (SUMMED, [{"role": "system", "content": f"Be brief. {SUMMARY}"}, user("Go on.")], {}),
    "a summary in Anthropic's system prompt": (
        SUMMED,
        [user("Go on.")],
        {"form": MESSAGES, "system": [{"type": "text", "text": f"You fix bugs.\n\n{SUMMARY}"}]},
    ),
    "head and tail": (TALK, [*TALK[:2], LEFT_OUT, said("Ok."), *TALK[-4:], user("Go on.")], {}),
    "another's summary for the middle": (TALK, [TALK[0], said("We did much."), *TALK[-2:], user("Go on.")], {}),
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("case", REAL)
def test_a_client_that_compacts_by_itself_is_recognised(gateway: Gateway, case: str, restart: bool) -> None:
    talk, compacted, more = REAL[case]
    old = gateway.hold(talk)
    gateway.hold(work("another"))
    if restart:
        gateway.again()
    conversation = gateway.take(compacted, **more)
    assert (conversation.name != old.name, conversation.earlier) == (True, (old.number,))
    gateway.again()
    assert gateway.take([*compacted, said("Fine."), user("On.")], **more).earlier == (old.number,)


def call(name: str, arguments: str, ident: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": ident, "type": "function", "function": function}]}


def result(text: str, ident: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": ident, "content": text}


README = "# Atlas\n" + "Atlas has one level of store, and nobody needs to know where a page is. " * 30
EXAMPLES = [user("Name a river."), said("The Irwell. " + "It runs through Manchester, past mills. " * 8)] * 2
READ = [call("read", '{"path": "README.md"}', "a"), result(README, "a")]

CHANCE: dict[str, tuple[Talk, Talk]] = {
    "greetings": (
        [user("Good day"), said("Hi"), user("hi"), said("hello"), user("hi"), said("hello")],
        [user("What is Atlas?"), said("A computer."), user("hi"), said("hello"), user("Which?")],
    ),
    "the same file, read by the same call": (
        [*[user(f"Step {n}") for n in range(6)], user("Review the project."), *READ],
        [user("Sum the project up."), *READ, user("Shorter.")],
    ),
    "the examples of a template": (
        [*EXAMPLES, user("Name a city."), said("Manchester. " * 30)],
        [user("Be brief."), said("Yes."), *EXAMPLES, user("Name a person.")],
    ),
    "a text that the user gave twice": (
        [user(f"Copy this: {README}"), said(README)],
        [user(f"Translate this: {README}")],
    ),
    "a well-known text": (
        [user("Write the licence."), said(SUMMARY)],
        [user(f"Explain this: {SUMMARY}")],
    ),
    "a message that was edited": (TALK, [*TALK[:4], user("Look at the manual."), *TALK[5:], user("Go on.")]),
    "an exchange that was taken back": (TALK, [*TALK[:4], *TALK[6:], user("Go on.")]),
    "the beginning": (TALK, [*TALK[:6], user("Something else.")]),
    "the same task again": (TALK, [TALK[0], said("I look."), user("Go on."), said("Done."), user("Thanks.")]),
    "a part of the end alone": (TALK, [*TALK[-6:-2], user("Go on.")]),
    "a few words of the summary": (SUMMED, [user(f"What did you mean by: {SUMMARY[:150]}")]),
}


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("case", CHANCE)
def test_what_conversations_share_by_chance_links_none(gateway: Gateway, case: str, restart: bool) -> None:
    talk, other = CHANCE[case]
    gateway.take(talk[:-1])
    gateway.turn(talk[:-1], talk[-1]) if talk[-1]["role"] == "assistant" else gateway.take(talk)
    if restart:
        gateway.again()
    assert gateway.take(other).earlier == ()


def test_another_users_session_is_never_linked(gateway: Gateway) -> None:
    gateway.hold(SUMMED, of="ana")
    for compacted in ([user(CONTINUED)], [*TALK[-6:], user("Go on.")]):
        assert gateway.take(compacted, of="bo").earlier == ()


def test_a_window_that_slides_stays_linked_and_the_list_of_earlier_sessions_bounded(gateway: Gateway) -> None:
    talk = work(turns=60)
    for end in range(1, len(talk), 2):
        conversation = gateway.turn([*[LEFT_OUT, said("Ok.")] * (end > 11), *talk[max(0, end - 11) : end]], talk[end])
    assert 4 <= len(conversation.earlier) <= 16
    held = [gateway.histories.store.sessions()[number - 1] for number in conversation.earlier]
    texts = {message["content"] for info in held for message in gateway.store.session(info.name).contents.messages()}
    assert {message["content"] for message in talk[-60:-12]} <= texts, "what the client left out is in a linked session"


def test_all_earlier_sessions_together_bring_half_of_the_window(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=1000, policy="hybrid", tokenizer="chars/4") as store:
        now, *others = [store.session(f"s{number}") for number in range(6)]
        for session in (now, *others):
            for number in range(20):
                session.append(user(f"{session.name}: the zebra number {number} has {number * 7} stripes\n" * 4))
        conversation = Conversation(now, "s", [session.number for session in others])
        call = Part(kind=Kind.CALL, name="search_memory", text='{"query": "zebra stripes"}', call="c")
        (found,) = answered(store, conversation, [call], Exchange(), over=False)
        assert {number for number, _ in found.cites} == {conversation.earlier[0]}, "the newest first"
        assert found.sources
        # The passages take half; their headings come on top.
        assert now.counter.count(found.parts[0].text) < 600


def test_what_a_search_brings_from_branches_is_forgotten_with_them(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=4000, policy="hybrid", tokenizer="chars/4") as store:
        now, old = store.session("now"), store.session("old")
        for session in (now, old):
            session.append(user("Hello."))
            session.fork("look").append(user(f"{session.name}: a canary"))
        call = {"id": "c", "type": "function", "function": {"name": "search_memory", "arguments": "{}"}}
        now.append({"role": "assistant", "content": None, "tool_calls": [call]})
        part = Part(kind=Kind.CALL, name="search_memory", text='{"query": "canary"}', call="c")
        (found,) = answered(store, Conversation(now, "now", [old.number]), [part], Exchange(), over=False)
        assert found.parts[0].text.count("a canary") == 2
        assert {number for number, _ in found.cites} >= {session.branches.open("b1").number for session in (now, old)}

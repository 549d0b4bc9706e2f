"""Taint is one rule: what an agent may do and what learning only proposes agree, whatever a session has read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from kilburn.agents.access import Rights
from kilburn.agents.loop import Agent
from kilburn.agents.tool import Tool
from kilburn.kernel.session import Session
from kilburn.memory.taint import lowest_read, tainted
from kilburn.memory.view import MemoryView
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Reply
from kilburn.move import Add
from kilburn.testing import Scripted

STEPS = ("user", "assistant", "tool", "clean", "recall", "elsewhere", "planted")
UNTRUSTED = {"tool", "clean", "elsewhere", "planted"}
"""What is an untrusted read; `clean` is none for an agent that says so of its tool."""


@dataclass
class Views:
    """A memory policy that learns each exchange as it was said, and keeps what it saw."""

    seen: list[MemoryView] = field(default_factory=list)

    def plan(self, view: MemoryView) -> Sequence[Add]:
        self.seen.append(view)
        return [Add(text=f"{said.address} {said.text}", cites=(said.cite,)) for said in view.new]


def said(role: Role, text: str, trust: Trust | None = None) -> Message:
    return Message(role=role, parts=(Part(kind=Kind.TEXT, text=text),), trust=trust)


def take(session: Session, step: str, number: int) -> None:
    """One step of a session: somebody says something, or a tool is called and answers."""
    if step in ("user", "planted"):
        session.append(said(Role.USER, f"word {number}", Trust.TOOL if step == "planted" else None))
    elif step == "assistant":
        session.append(said(Role.ASSISTANT, f"word {number}"))
    else:
        call = Part(kind=Kind.CALL, text="{}", call=f"c{number}", name=step)
        result = Part(kind=Kind.RESULT, text=f"result {number}", call=f"c{number}")
        sources = (1,) if step == "recall" else ()
        cites = ((session.number - 1, 1),) if step == "elsewhere" else ()
        session.append(Message(role=Role.ASSISTANT, parts=(call,)))
        session.append(Message(role=Role.TOOL, parts=(result,), sources=sources, cites=cites))


def sends(session: Session, clean: bool) -> bool:
    """Whether an agent in this session may still change something."""
    sent: list[str] = []

    def send(text: str) -> str:
        """Send a text."""
        sent.append(text)
        return "sent"

    def read() -> str:
        """Read a text that is nobody's."""
        return ""

    call = Part(kind=Kind.CALL, text=json.dumps({"text": "x"}), call="s", name="send")
    model = Scripted([Reply(message=Message(role=Role.ASSISTANT, parts=(call,)), finish="calls"), "done"])
    tools = [send, Tool(read, name="clean", does="read", clean=clean)]
    Agent(model, tools, session, rights=Rights(after_untrusted="deny")).run()
    return bool(sent)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(STEPS), max_size=8), st.booleans())
def test_an_agent_and_learning_ask_one_rule(steps: list[str], clean: bool) -> None:
    with kilburn.open(":memory:", window=100_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        store.session("other").append(said(Role.USER, "of another session"))
        session, dirty = store.session("a"), dict[int, bool]()
        session.append(said(Role.USER, "word 0"))
        for number, step in enumerate(steps, 1):
            take(session, step, number)
            dirty[session.window.last] = any(each in UNTRUSTED for each in steps[:number])
        assert {page: tainted(session, until=page) for page in dirty} == dirty
        policy = Views()
        learned = store.memory().learn("a", policy)
        for view in policy.seen:
            for one in view.new:
                assert one.role is Role.USER or (one.taint < Trust.AGENT) is dirty.get(one.page.id, False)
        memory = store.memory().collection
        proposed = {
            int(memory.contents.text(memory.contents.resolve(address)[0]).partition(" ")[0][1:]) for address in learned.proposed
        }
        assert all(dirty[page] for page in proposed)
        heeded = UNTRUSTED - {"clean"} if clean else UNTRUSTED
        assert sends(session, clean) is not any(step in heeded for step in steps)


def test_a_branch_that_was_written_after_an_untrusted_read_only_proposes() -> None:
    for steps, proposes in ((["tool"], True), ([], False)):
        with kilburn.open(":memory:", window=100_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
            session = store.session("a")
            session.append(said(Role.USER, "look"))
            for number, step in enumerate(steps, 1):
                take(session, step, number)
            session.append(Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", call="b", name="branch"),)))
            branch = session.fork("work on it", inherit="nothing", call="b")
            # What follows the prompt at once is about what was recalled, and is not learned.
            branch.append(said(Role.USER, "go on"), said(Role.ASSISTANT, "the keys go to Eve"))
            assert (lowest_read(branch)[0] < Trust.AGENT) is tainted(branch) is proposes
            learned = store.memory().learn(branch, Views())
            assert bool(learned.proposed) is proposes
            assert len(learned.stored) == 2 - proposes


SEARCH = {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "x"}}
FOUND = {"type": "web_search_result", "title": "Deploy on Friday", "url": "https://example.org", "encrypted_content": "abc"}
RESULT = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [FOUND]}
QUOTED = {"type": "text", "text": 'The block is {"type": "web_search_tool_result"}.'}


@pytest.mark.parametrize(("blocks", "low"), [([SEARCH, RESULT, QUOTED], True), ([SEARCH, QUOTED], False)])
def test_what_a_tool_returned_at_the_provider_is_a_tools_too(blocks: list[dict[str, object]], low: bool) -> None:
    with kilburn.open(":memory:", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        session.append([{"role": "user", "content": "Search."}, {"role": "assistant", "content": blocks}])
        assert tainted(session) is low

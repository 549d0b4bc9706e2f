"""A model that misbehaves, in each way there is, under every policy that ships: nothing breaks, nothing is lost,
each outcome is typed, and nobody asks again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec
import pytest

from effort import each_value
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.effect import Answer, Ask, Effect, Later
from kilburn.errors import Refused
from kilburn.event import Act, Event
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request
from kilburn.move import Move
from kilburn.policy import Policy, View
from kilburn.testing import FakeClock, Scripted, check_laws, trace
from policies.roster import specs_at

WINDOW = 700
OUTCOMES = {
    "done",
    "empty",
    "failed",
    "refused",
    "rejected",
    "truncated",
    "none",
    "no progress",
    "illegal",
    "started",
    "busy",
    "late",
}
MOVES = (Act.LOAD, Act.EVICT, Act.FOLD, Act.RETIRE)


def silent(spec: str) -> bool:
    return spec.partition("(")[0] in SILENT


EVERY = [*specs_at(WINDOW), "chain(mask(keep=1), summarize)"]
SILENT = (
    "fifo",
    "oldest",
    "lru",
    "importance",
    "tiered",
    "hybrid",
    "mask",
    "preprocess",
    "clear_thinking",
    "clear_tool_uses",
    "cost",
)
"""Policies that never ask a model, so that it cannot misbehave."""

ASKING = [spec for spec in EVERY if not silent(spec) and not spec.startswith("chain")]


class Hasty:
    """A policy that counts how often it is asked, and gives up a question after `patience` seconds."""

    def __init__(self, inner: Policy, patience: float) -> None:
        self.inner, self.consulted, self.patience = inner, 0, patience
        self.max_depth = int(getattr(inner, "max_depth", 1))

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        self.consulted += 1
        made = self.inner.plan(view)
        if not isinstance(made, Generator):
            return made
        try:
            effect = next(made)
            while True:
                effect = made.send((yield hasty(effect, self.patience)))
        except StopIteration as stop:
            moves: Sequence[Move] = stop.value or ()
            return moves


def hasty(effect: Effect, patience: float) -> Effect:
    if isinstance(effect, Later):
        compose = effect.compose
        return msgspec.structs.replace(effect, compose=lambda text: hasty(compose(text), patience))
    return msgspec.structs.replace(effect, timeout=patience) if isinstance(effect, Ask) else effect


def said(text: str, finish: str = "stop") -> Reply:
    return Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)), finish=finish)


CALL = Reply(
    message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text='{"path": "/"}', call="x", name="delete"),)),
    finish="calls",
)


def echo(request: Request) -> str:
    return str(request.messages[-1]["content"])


def boom(request: Request) -> str:
    raise RuntimeError("an error that nobody expects")


WAYS: dict[str, tuple[Any, str]] = {
    "says nothing": ("", "empty"),
    "says blanks": (" \n\t ", "empty"),
    "says garbage": ("\x00}{]] <|im_end|> \ud7ff 0x00 ,,,, ￿", ""),
    "says wrong JSON": ('{"range": [9000, 1], "summary": 7}', ""),
    "says anchors that match nowhere": ('[{"prefix": "no such words", "suffix": "nor these"}]', ""),
    "claims a range that is not its own": ('{"range": [1, 1000000], "summary": "all is well"}', ""),
    "calls a tool": (CALL, "failed"),
    "says its prompt": (echo, ""),
    "says half a character": ("The agent read src/m1.py, and then \ud83d it did \udc00 more.", ""),
    "says a megabyte": ("The agent read src/m1.py and went on. " * 30_000, "truncated"),
    "says ten times too much": (lambda request: " ".join(f"word{n}" for n in range(10 * request.max_tokens)), ""),
    "repeats itself": ("the same words again. " * 200, ""),
    "raises": (boom, "failed"),
    "refuses": (said("I cannot help with that.", "refused"), "refused"),
    "is refused": (Refused("no", advice="none"), "refused"),
    "is cut": (said("The agent read src/m1.py and then it", "length"), "truncated"),
}


def run(spec: str, model: Any, seed: int = 5, patience: float = 120.0) -> tuple[Session, Hasty, list[dict[str, Any]]]:
    """A trace through a small window; all that must hold whatever the model does."""
    policy = Hasty(resolve("policies", spec), patience)
    appended: list[dict[str, Any]] = []
    store = Store(Sqlite(":memory:"), Budget(WINDOW), policy, tokenizer="chars/4", model=model, clock=FakeClock())
    session = store.session("misbehaving")
    for message in trace(seed, steps=10):
        session.append(message)
        appended.append(message)
        for thread in threading.enumerate():
            if thread.name == "kilburn-later":
                thread.join()
        assert session.render().tokens <= WINDOW
    check_laws(session, appended)
    events = list(session.ledger.events())
    assert {event.data["outcome"] for event in events if event.act is Act.COMPACT} <= OUTCOMES
    assert not unexplained(events), "a policy did something, and the ledger has no outcome of it"
    return session, policy, appended


def unexplained(events: Sequence[Event]) -> list[Event]:
    """Questions and moves of the policy without the COMPACT event that ends its consultation."""
    waiting: list[Event] = []
    for event in events:
        if event.act is Act.COMPACT:
            waiting = []
        elif event.act is Act.ADMIT and waiting:
            return waiting
        elif event.policy == "hasty" and (event.act in MOVES or event.act in (Act.ASK, Act.REFUSE)):
            waiting.append(event)
    return waiting


@pytest.mark.parametrize("spec", EVERY)
def test_without_a_model_every_outcome_is_typed(spec: str) -> None:
    model = Scripted([]) if silent(spec) else None
    session, _, _ = run(spec, model)
    assert model is None or not model.requests, "a policy that needs no model asks none"
    compacted = [event for event in session.ledger.events() if event.act is Act.COMPACT]
    assert not [event.why for event in session.ledger.events() if event.act is Act.REFUSE]
    assert all(event.data["outcome"] != "illegal" for event in compacted)


@pytest.mark.parametrize(("spec", "way"), each_value(ASKING, list(WAYS)))
def test_whatever_the_model_says_nothing_is_lost_and_nobody_asks_again_and_again(spec: str, way: str) -> None:
    answer, outcome = WAYS[way]
    model = Scripted([answer] * 2000)
    session, policy, _ = run(spec, model)
    assert len(model.requests) <= policy.consulted
    asked = [event.data["outcome"] for event in session.ledger.events() if event.act is Act.ASK]
    # A policy that reviews an answer may reject what was cut.
    assert not outcome or set(asked) <= {outcome, "rejected"}
    assert not [event.why for event in session.ledger.events() if event.act is Act.REFUSE], "its moves broke a law"


@pytest.mark.parametrize("spec", ASKING)
def test_a_model_that_hangs_is_left_behind(spec: str) -> None:
    end = threading.Event()

    def hang(request: Request) -> str:
        end.wait(600)
        return "too late"

    model = Scripted([hang] * 2000)
    try:
        session, policy, _ = run(spec, model, patience=0.02)
    finally:
        end.set()
    assert len(model.requests) <= policy.consulted
    asked = [event.data["outcome"] for event in session.ledger.events() if event.act is Act.ASK]
    assert set(asked) <= {"failed"}
    assert "too late" not in str(session.render())


@pytest.mark.parametrize("spec", ASKING)
def test_a_summary_is_never_deeper_than_its_policy_says(spec: str) -> None:
    answers: list[Callable[[Request], str]] = [echo, lambda request: echo(request)[:60]]
    session, policy, _ = run(spec, Scripted(answers * 1000))
    assert all(page.depth <= policy.max_depth for page, _ in session.contents.pages())
    if policy.max_depth == 1:
        assert all(source > 0 for page, _ in session.contents.pages() for source in page.sources)


def test_the_summary_of_summaries_counts_its_depth_and_keeps_its_originals() -> None:
    session, _, appended = run("recursive", Scripted([lambda request: echo(request)[:60]] * 1000))
    depths = [page.depth for page, _ in session.contents.pages() if page.kind is Kind.FOLD and not page.message]
    assert depths == list(range(1, len(depths) + 1))
    assert len(depths) > 2
    assert session.contents.messages() == appended

"""The nested key-value task of MemGPT (arXiv 2310.08560): follow keys whose values are keys, with and without memory.

A conversation tells 140 pairs of UUIDs, in another order each time. Among them are chains: the value of a key is itself a key, up
to four times. A question gives the first key and asks for the last value. Each is asked in a branch of the conversation, so that
no question sees another.

- `whole`: the window holds all pairs;
- `window`: it holds a part of them, and there is no memory;
- `brought`: the same, and a search for the user's words is put beside the prompt;
- `tools`: the same, and the model searches by itself.

The model follows what its prompt shows, and searches where it may; or it is a real one.
"""

from __future__ import annotations

import json
import random
import re
import uuid
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.errors import SpecError
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Finish, Model, Reply, Request, takes_tools
from kilburn_lab.evals.intervals import wilson
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.report import EvalReport, table_of

WAYS = ("whole", "window", "brought", "tools")

PAIRS, ORDERINGS, HOPS = 140, 10, (0, 1, 2, 3, 4)

ROOM = 32_000
"""Tokens of the window that holds everything."""

UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

TOLD = re.compile(rf"The key ({UUID}) has the value ({UUID})\.")

ASKED = re.compile(rf"the key ({UUID}) leads to")


class NestedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One question: whether it was answered right, with how many calls of the model and tokens of prompts and replies."""

    way: str
    ordering: int
    hops: int
    right: bool
    calls: int
    tokens: int


class NestedRow(msgspec.Struct, frozen=True, kw_only=True):
    """The questions of one way and number of hops. `interval`: of the share of right ones, 95%."""

    way: str
    hops: int
    questions: int
    right: int
    interval: tuple[float, float]
    calls: float
    tokens: float


class NestedReport(EvalReport, frozen=True, kw_only=True):
    """Nested keys."""

    model: str
    pairs: int
    window: int
    seed: int
    rows: tuple[NestedRow, ...]
    answers: tuple[NestedAnswer, ...]

    def table(self) -> str:
        """For each way, how many are right after so many hops."""
        head = f"{self.pairs} pairs, a window of {self.window:,} tokens, {self.model}, seed {self.seed}\n\n"
        text = "way={way} | hops={hops} | questions={questions} | right={right}"
        text += " | from={interval[0]:.2f} | to={interval[1]:.2f} | calls={calls:.1f} | tokens={tokens:,.0f}"
        return head + table_of(self.rows, text, left=("way",))


class Follower:
    """A model that follows the pairs that its prompt shows, from the key that the user asks about. Where it may search, it looks
    for each key that it has not found yet, once."""

    name, form, tokenizer = "follower", "chat", "chars/4"
    context: int | None = None

    def __init__(self, *, takes_tools: bool) -> None:
        self.takes_tools = takes_tools

    def stream(self, request: Request) -> Iterator[Any]:
        """A search, or the last value that was found."""
        shown = json.dumps(request.messages)
        values = dict(TOLD.findall(shown))
        looked = re.findall(rf"query\W+({UUID})", shown)
        # What it followed up to its last search may have left the window.
        at = looked[-1] if looked else ASKED.findall(shown)[-1]
        while at in values:
            at = values[at]
        if self.takes_tools and request.tools and at not in looked:
            call = Part(kind=Kind.CALL, call=f"c{len(looked)}", name="search_memory", text=json.dumps({"query": at}))
            yield Reply(message=Message(role=Role.ASSISTANT, parts=(call,)), finish=Finish.CALLS)
            return
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=at),)), finish=Finish.STOP)


def nested(
    ways: Sequence[str] = WAYS,
    hops: Sequence[int] = HOPS,
    *,
    orderings: int = ORDERINGS,
    pairs: int = PAIRS,
    window: int = 2000,
    policy: str = "fifo",
    model: str = "",
    seed: int = 0,
    progress: Progress = unwatched,
) -> NestedReport:
    """Ask for the ends of chains.

    Args:
        hops: how often a value is a key again.
        pairs: of keys and values. window: tokens, for all ways but `whole`.
        model: a spec; "" for the scripted one.

    Raises:
        SpecError: no such way, fewer pairs than the chains have, or a model that takes no tools where it should search.
    """
    check_known("way", ways, WAYS)
    if min(hops, default=0) < 0 or sum(hops) + len(hops) > pairs:
        raise SpecError(f"{pairs} pairs for chains of {sum(hops) + len(hops)}", advice="give more --pairs, or fewer --hops")
    real: Model | None = resolve("models", model) if model else None
    if real is not None and "tools" in ways and not takes_tools(real):
        raise SpecError(f"{model} takes no tools", advice="give --way whole, window and brought")
    answers: list[NestedAnswer] = []
    progress(0, orderings)
    for ordering in range(orderings):
        chance = random.Random(f"nested {seed} {ordering}")
        told, chains = _pairs(chance, hops, pairs)
        for way in ways:
            room = ROOM if way == "whole" else window
            with kilburn.open(":memory:", window=room, policy=policy, tokenizer="chars/4", embedder=None) as store:
                session = store.session("told")
                session.append(*({"role": "user", "content": f"The key {key} has the value {value}."} for key, value in told))
                session.append({"role": "assistant", "content": "Noted."})
                answers += [_asked(session, way, ordering, many, chain, real) for many, chain in zip(hops, chains, strict=True)]
        progress(ordering + 1, orderings)
    return NestedReport(
        model=model or "scripted",
        pairs=pairs,
        window=window,
        seed=seed,
        rows=tuple(_row(answers, way, many) for way in ways for many in hops),
        answers=tuple(answers),
    )


def _pairs(chance: random.Random, hops: Sequence[int], count: int) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """The pairs in the order in which they are told, and the chains in them."""

    def drawn() -> str:
        return str(uuid.UUID(int=chance.getrandbits(128), version=4))

    chains = [[drawn() for _ in range(many + 2)] for many in hops]
    told = [pair for chain in chains for pair in pairwise(chain)]
    told += [(drawn(), drawn()) for _ in range(count - len(told))]
    chance.shuffle(told)
    return told, chains


def _asked(session: Session, way: str, ordering: int, hops: int, chain: Sequence[str], real: Model | None) -> NestedAnswer:
    question = (
        f"The value of a key may be a key again. What is the last value that the key {chain[0]} leads to? Reply with it alone."
    )
    agent = Agent(
        real or Follower(takes_tools=way != "brought"),
        [],
        session.fork(question),
        memory=way in ("brought", "tools"),
        limits=Limits(steps=20, reply=64),
    )
    done = agent.run()
    return NestedAnswer(way=way, ordering=ordering, hops=hops, right=chain[-1] in done.text, calls=done.calls, tokens=done.tokens)


def _row(answers: Sequence[NestedAnswer], way: str, hops: int) -> NestedRow:
    own = [one for one in answers if (one.way, one.hops) == (way, hops)]
    right = sum(one.right for one in own)
    return NestedRow(
        way=way,
        hops=hops,
        questions=len(own),
        right=right,
        interval=wilson(right, len(own)),
        calls=sum(one.calls for one in own) / max(1, len(own)),
        tokens=sum(one.tokens for one in own) / max(1, len(own)),
    )

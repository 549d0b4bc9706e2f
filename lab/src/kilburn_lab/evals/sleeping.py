"""Sleep-time compute (arXiv 2504.13171): the same questions with and without what was worked out before they were asked.

A user tells what they spent, sentence by sentence; the window holds the last of it. Questions ask for sums. `awake` searches for
what was said and adds it up when it is asked. For `slept`, `consolidate` has kept a note of the sums while nobody asked, and it
stands in the prompt. Both models are scripted, and add rightly what they are shown: so what differs is what each is shown, and
what that costs.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.kernel.session import Session
from kilburn.memory.consolidate import Consolidate
from kilburn.memory.sleep import SleepTime
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Finish, Reply, Request
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.report import EvalReport, row_of, table_of

WAYS = ("awake", "slept")

THINGS = ("tea", "books", "trains", "repairs", "music", "gifts")

NOTE = "prepared/sums"

SPENT = re.compile(r"I spent (\d+) euros on (\w+), (?:bill (\d+))")

SUM = re.compile(r"on (\w+) in all: (\d+) euros")

ASKED = re.compile(r"How much did I spend on (\w+)")


class SleepRow(msgspec.Struct, frozen=True, kw_only=True):
    """The questions of one way.

    Args:
        right: sums that are right.
        calls, tokens: of the model for a question, prompts and replies together, on average.
        asleep: tokens that were spent before, on all.
    """

    way: str
    questions: int
    right: int
    calls: float
    tokens: float
    asleep: int


class SleepReport(EvalReport, frozen=True, kw_only=True):
    """Sleep-time compute."""

    talks: int
    bills: int
    window: int
    seed: int
    rows: tuple[SleepRow, ...]

    def table(self) -> str:
        """What a question costs, with and without what was prepared."""
        text = "way={way} | questions={questions} | right={right} | calls={calls:.1f} | tokens={tokens:,.0f} | asleep={asleep:,}"
        table = table_of(self.rows, text, left=("way",))
        if {row.way for row in self.rows} == set(WAYS):
            awake, slept = (row_of(self.rows, way=way) for way in WAYS)
            saved = awake.tokens - slept.tokens
            each = slept.asleep / self.talks / saved if saved > 0 else float("inf")
            share = slept.tokens / awake.tokens
            table += f"\n\nA question takes {share:.0%} of the tokens; the sleep of a talk pays after {each:.0f}."
        return f"{self.talks} talks of {self.bills} bills, a window of {self.window:,} tokens, seed {self.seed}\n\n{table}"


class _Adding:
    """A model that adds up what it is shown: it takes a sum that stands there, else it searches once."""

    name, form, tokenizer = "adding", "chat", "chars/4"
    context: int | None = None

    def stream(self, request: Request) -> Iterator[Any]:
        """A search, or the sum."""
        shown = json.dumps(request.messages)
        thing = ASKED.findall(shown)[-1]
        known = dict(SUM.findall(shown))
        if thing not in known and '"query' not in shown.replace("\\", ""):
            call = Part(kind=Kind.CALL, call="c1", name="search_memory", text=json.dumps({"query": f"spent euros on {thing}"}))
            yield Reply(message=Message(role=Role.ASSISTANT, parts=(call,)), finish=Finish.CALLS)
            return
        found = int(known[thing]) if thing in known else _sums(shown)[thing]
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=f"{found} euros"),)))


class _Preparing:
    """A model that keeps the sums of all that it was shown; `tokens` is what that took."""

    name, form, tokenizer = "preparing", "chat", "chars/4"
    context: int | None = None

    def __init__(self) -> None:
        self.tokens = 0

    def stream(self, request: Request) -> Iterator[Any]:
        """The note with the new sums."""
        shown = json.dumps(request.messages)
        sums = _sums(shown)
        sums.update({thing: int(before) for thing, before in SUM.findall(shown)})
        text = "\n".join(f"on {thing} in all: {euros} euros" for thing, euros in sorted(sums.items()))
        self.tokens += (len(shown) + len(text)) // 4
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),)))


def _sums(shown: str) -> Counter[str]:
    """What was spent on each thing, by the bills that stand in a text; a bill that stands there twice counts once."""
    bills = {bill: (thing, int(euros)) for euros, thing, bill in SPENT.findall(shown)}
    sums = Counter[str]()
    for thing, euros in bills.values():
        sums[thing] += euros
    return sums


def sleeping(
    ways: Sequence[str] = WAYS,
    *,
    talks: int = 3,
    bills: int = 150,
    window: int = 2000,
    seed: int = 0,
    progress: Progress = unwatched,
) -> SleepReport:
    """Ask for sums.

    Args:
        talks: each with a user of its own. bills: sentences of each.
        window: tokens.
    """
    done: dict[str, list[tuple[bool, int, int]]] = {way: [] for way in ways}
    asleep = 0
    progress(0, talks)
    for talk in range(talks):
        chance = random.Random(f"sleeping {seed} {talk}")
        told = [(chance.choice(THINGS), chance.randint(1, 99)) for _ in range(bills)]
        sums = Counter[str]()
        for thing, euros in told:
            sums[thing] += euros
        with kilburn.open(":memory:", window=window, policy="fifo", tokenizer="chars/4", embedder=None) as store:
            session, writer = store.session("told", user="ana"), _Preparing()
            for at, (thing, euros) in enumerate(told):
                session.append({"role": "user", "content": f"I spent {euros} euros on {thing}, bill {at}."})
            if "slept" in ways:
                with SleepTime(
                    session, Consolidate(note=NOTE, task="The sums of what was spent."), model=writer, idle=0
                ) as sleep:
                    sleep.work()
            asleep += writer.tokens
            for way in ways:
                done[way] += [_asked(session, way, thing, sums) for thing in THINGS]
        progress(talk + 1, talks)
    rows = tuple(_row(way, done[way], asleep if way == "slept" else 0) for way in ways)
    return SleepReport(talks=talks, bills=bills, window=window, seed=seed, rows=rows)


def _asked(session: Session, way: str, thing: str, sums: Mapping[str, int]) -> tuple[bool, int, int]:
    notes = [NOTE] if way == "slept" else []
    branch = session.fork(f"How much did I spend on {thing}?")
    agent = Agent(_Adding(), [], branch, notes=notes, recall=300 if notes else 0, limits=Limits(steps=10, reply=64))
    done = agent.run()
    return done.text == f"{sums[thing]} euros", done.calls, done.tokens


def _row(way: str, done: Sequence[tuple[bool, int, int]], asleep: int) -> SleepRow:
    many = max(1, len(done))
    return SleepRow(
        way=way,
        questions=len(done),
        right=sum(right for right, _, _ in done),
        calls=sum(calls for _, calls, _ in done) / many,
        tokens=sum(tokens for _, _, tokens in done) / many,
        asleep=asleep,
    )

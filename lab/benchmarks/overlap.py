"""What a compaction costs the agent: beside it (`comem`) against in its way, and the turn that starts or swaps one.

Three parts. Two scripted models that sleep: the agent's for each step, the memory's for each summary, so
that only the overlap differs. The same with two local models, which share the cores of this machine. And
the time of a durable `append` that starts a question, that runs beside one, or that swaps its answer in,
beside one that does nothing of it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replaced

import kilburn
from corpus import SIZE, Turn, fill, turns
from figures import Row, emit, parser, quantile
from kilburn.effect import Answer, Ask, Effect, Later
from kilburn.event import Act
from kilburn.model import Model, Request, complete
from kilburn.models.local import Local
from kilburn.models.scripted import Scripted
from kilburn.move import Move
from kilburn.policies.comem import Comem
from kilburn.policies.fifo import Fifo
from kilburn.policy import Plan, View

Step = Callable[[kilburn.Session], None]
Review = Callable[[Callable[[int], str], Ask, Answer], Answer]

FILLER = Fifo()
SETTLING = 12
"""Turns before the measured ones."""
BESIDE = 1
"""Turns that are measured beside one question; then it is waited for."""


@dataclass(frozen=True)
class Blocking(Comem):
    """The same snapshots, the same questions, the same swap, but the agent waits for the words."""

    def plan(self, view: View) -> Plan:
        plan = super().plan(view)
        return self._at_once(view, plan) if isinstance(plan, Generator) else plan

    def _at_once(self, view: View, plan: Generator[Effect, Answer, Sequence[Move]]) -> Generator[Effect, Answer, Sequence[Move]]:
        effect = next(plan)
        if not isinstance(effect, Later):
            return []
        ask: Ask = effect.compose(view.text)
        answer = yield ask
        said = effect.review(view.text, ask, answer) if effect.review else answer
        return (yield from self._swap(view, effect.pages, said))


class Watched:
    """A `Comem` that tells what its last plan was for, and takes every answer for acceptable.

    The scripted memory says next to nothing; its words are judged, for the time that it takes, and swapped in.
    """

    def __init__(self, inner: Comem) -> None:
        self.inner, self.kind, self.filling = inner, "plain", True

    def plan(self, view: View) -> Plan:
        return FILLER.plan(view) if self.filling else self._told(view)

    def _told(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        if view.deferred is not None:
            self.kind = "beside one" if view.deferred.answer is None else "swaps"
        plan = self.inner.plan(view)
        if not isinstance(plan, Generator):
            return plan
        try:
            effect = next(plan)
            while True:
                answer = yield replaced(effect, review=_accepting(effect.review)) if isinstance(effect, Later) else effect
                self.kind = "starts" if answer.outcome == "started" else self.kind
                effect = plan.send(answer)
        except StopIteration as stop:
            moves: Sequence[Move] = stop.value
            return moves


def _accepting(review: Review | None) -> Review:
    def judged(read: Callable[[int], str], ask: Ask, answer: Answer) -> Answer:
        if review is not None:
            review(read, ask, answer)
        return answer

    return judged


def sleeping(seconds: float) -> Scripted:
    """A memory model that takes so long and then says something acceptable."""

    def say(request: Request) -> str:
        time.sleep(seconds)
        return gist(request.messages[-1]["content"])

    return Scripted([say] * 10_000, name="memory")


def gist(prompt: str) -> str:
    """The first words of some lines of a log: true, short, and no copy."""
    lines = [line.strip() for line in prompt.splitlines() if line.strip()][1:-2]
    return "Read so far: " + "; ".join(line[:48] for line in lines[:: max(1, len(lines) // 12)][:12]) + "."


def sleeper(seconds: float) -> Step:
    """A step of an agent whose model takes so long."""
    source: Iterator[Turn] = turns(SIZE)

    def step(session: kilburn.Session) -> None:
        session.render()
        time.sleep(seconds)
        session.append(*next(source))

    return step


def speaker(model: Model, tokens: int, results: int) -> Step:
    """A step of an agent whose model reads the window and writes; what it "calls" gives source text."""
    source: Iterator[Turn] = turns(results)

    def step(session: kilburn.Session) -> None:
        said = complete(model, Request(messages=list(session.render()), max_tokens=tokens, temperature=0.0))
        found = next(source)[1]["content"]
        session.append({"role": "assistant", "content": said.text or "."}, {"role": "user", "content": f"Read on: {found}"})

    return step


def run(policy: Any, model: Any, step: Step, steps: int, window: int) -> tuple[float, int, int]:
    """Seconds of so many steps, the questions that were answered, and the folds that came of them."""
    with kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4", model=model) as store:
        session = store.session("s")
        session.append(
            {"role": "system", "content": "You read source code."}, {"role": "user", "content": "Explain the library."}
        )
        start = time.perf_counter()
        for _ in range(steps):
            step(session)
        seconds = time.perf_counter() - start
        acts = [event.act for event in session.ledger.events()]
    return seconds, acts.count(Act.ASK), acts.count(Act.FOLD)


def walls(
    name: str, pair: Callable[[], tuple[Step, Any]], steps: int, window: int, comem: Comem, all_of: bool = True
) -> list[Row]:
    """Rows of one pair of models; the baseline is the agent whose questions are asked in its way."""
    blocking = Blocking(comem.every, comem.to, comem.show, comem.timeout)
    subjects: dict[str, Any] = {"in its way": blocking, "beside it": comem}
    if all_of:
        subjects |= {"summarize": f"summarize(to={comem.to}, trigger={window // 2})", "no memory": "fifo"}
    rows: list[Row] = []
    for how, policy in subjects.items():
        step, memory = pair()
        seconds, asked, folds = run(policy, memory, step, steps, window)
        base = float(rows[0]["wall s"]) if rows else seconds
        rows.append({"part": f"{name}, {how}", "wall s": seconds, "x": seconds / base, "asked": asked, "folds": folds})
    return rows


def local(agent: str, memory: str, steps: int) -> list[Row]:
    """Wall time with two models on this machine, each with its share of the cores."""
    threads = max(1, (os.cpu_count() or 2) // 2)
    # Another window makes another engine of one file, so that the two can run at once.
    with Local(agent, context=3072, threads=threads) as speaks, Local(memory, context=4096, threads=threads) as keeps:
        for model in (speaks, keeps):
            complete(model, Request(messages=[{"role": "user", "content": "Hello"}], max_tokens=2))
        comem = Comem(every=3, to=120, show=600)
        return walls(f"{agent} + {memory}", lambda: (speaker(speaks, 24, 240), keeps), steps, 2000, comem, all_of=False)


def turns_of(pages: int, rounds: int, every: int, pause: float) -> list[Row]:
    """How long an append takes, by what the policy did in it, on a file, in a session of so many pages."""
    walls: dict[str, list[float]] = {"plain": [], "starts": [], "beside one": [], "swaps": []}
    computed: dict[str, list[float]] = {kind: [] for kind in walls}
    policy = Watched(Comem(every=every, to=400))
    model = sleeping(pause)
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        kilburn.open(str(Path(folder) / "s.db"), window=8000, policy=policy, tokenizer="chars/4", model=model) as store,
    ):
        session = store.session("s")
        session.append({"role": "system", "content": "You read source code."}, {"role": "user", "content": "Explain it."})
        source = turns(SIZE)
        fill(session, source, pages)
        policy.filling, beside = False, 0
        for number, turn in enumerate(islice(source, rounds)):
            policy.kind = "plain"
            start, work = time.perf_counter(), time.thread_time()
            session.append(*turn)
            taken, own = time.perf_counter() - start, time.thread_time() - work
            if number < SETTLING:
                # The first memory takes the place of all pages that are out, later ones of the one before.
                _wait()
                continue
            walls[policy.kind].append(taken)
            computed[policy.kind].append(own)
            beside = beside + 1 if policy.kind in ("starts", "beside one") else 0
            if beside > BESIDE:
                _wait()
            time.sleep(pause)
        _wait()
    plain, own = quantile(walls["plain"], 0.5), quantile(computed["plain"], 0.5)
    return [
        {
            "part": f"append, {kind}, {pages} pages",
            "n": len(values),
            "p50 ms": quantile(values, 0.5) * 1e3,
            "p95 ms": quantile(values, 0.95) * 1e3,
            "max ms": max(values) * 1e3,
            "p50 ms over plain": (quantile(values, 0.5) - plain) * 1e3,
            "cpu p50 ms": quantile(computed[kind], 0.5) * 1e3,
            "cpu ms over plain": (quantile(computed[kind], 0.5) - own) * 1e3,
            "x": quantile(values, 0.5) / plain,
        }
        for kind, values in walls.items()
        if values
    ]


def _wait() -> None:
    """Until no question is on its way."""
    while any(thread.name == "kilburn-later" for thread in threading.enumerate()):
        time.sleep(0.001)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--quick", action="store_true", help="tiny sizes, and no local models")
    options.add_argument("--steps", type=int, default=40, help="steps of the agent whose models sleep")
    options.add_argument("--think", type=float, default=0.1, help="seconds that the sleeping agent takes for a step")
    options.add_argument("--remember", type=float, default=0.3, help="seconds that the sleeping memory takes for a summary")
    options.add_argument("--agent", default="smollm2", help="local model of the agent")
    options.add_argument("--memory", default="smollm2", help="local model of the memory")
    options.add_argument("--local-steps", type=int, default=10, help="steps with the local models; 0 leaves them out")
    options.add_argument("--pages", type=int, action="append", help="pages of the measured session; 100 and 1000")
    options.add_argument("--rounds", type=int, default=400)
    asked: argparse.Namespace = options.parse_args()
    comem = Comem(every=4, to=400)
    if asked.quick:
        asked.steps, asked.think, asked.remember, asked.local_steps, asked.pages, asked.rounds = 12, 0.002, 0.006, 0, [10], 24
        comem = replace(comem, every=2)
    rows = walls("sleeping", lambda: (sleeper(asked.think), sleeping(asked.remember)), asked.steps, 4000, comem)
    if asked.local_steps:
        rows += local(asked.agent, asked.memory, asked.local_steps)
    for pages in asked.pages or [100, 1000]:
        rows += turns_of(pages, asked.rounds, comem.every, 0.02)
    note = (
        f"A sleeping step takes {asked.think} s and a memory {asked.remember} s; {os.cpu_count()} cores; "
        "x is against the first row of each part."
    )
    emit("overlap", rows, asked.json, note)


if __name__ == "__main__":
    main()

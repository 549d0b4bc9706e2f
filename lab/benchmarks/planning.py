"""How long each policy thinks over a window of many resident pages.

A plan is one question to a policy, the making of its view included. Measured are a turn at which it acts,
in a warm session in which one turn was appended since the last plan ("acts"), the first of them, which
reads texts that no plan has read before ("first"), and a turn at which there is room ("rests"). No move is
carried out, so the window is the same for all. Baseline: one pass over the same pages that adds up their
tokens. With `--live` each policy keeps a session of its own, turn by turn, its moves are carried out, and
each of its plans is timed. A plan waits for nothing, so seconds are those of the processor: what else the
machine does is left out.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence

from corpus import SIZE, Turn, fill, open_store, turns
from figures import Row, emit, parser, quantile
from kilburn.budget import Budget
from kilburn.effect import Answer, Effect
from kilburn.errors import SpecError
from kilburn.kernel.planning import Planner
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.move import Move
from kilburn.policy import Cause, Policy, View

HEURISTIC = (
    "fifo", "lru", "importance", "tiered", "hybrid", "mask", "preprocess", "summarize(ask=False)",
    "chain(mask(keep=3), fifo)", "chain(preprocess, mask(keep=3), hybrid)",
)  # fmt: skip
ROOM = 1_000_000_000
GOAL = 10
"""Milliseconds of the processor that a plan over 10,000 resident pages may take."""


def plan(policy: Policy, view: View) -> int:
    """Drive one plan to its end, without a model; returns the number of moves."""
    made = policy.plan(view)
    if not isinstance(made, Generator):
        return len(made)
    try:
        next(made)
        while True:
            made.send(Answer(outcome="none"))
    except StopIteration as stop:
        return len(stop.value or ())


def timed(policy: Policy, session: Session, cause: Cause, wanted: tuple[int, ...] = ()) -> tuple[float, int]:
    """Seconds of one plan with its view, and the number of its moves."""
    with session.edits.batch() as kernel:
        planner = Planner(kernel, policy, "benchmark")
        start = time.thread_time()
        moves = plan(policy, planner.view(cause, wanted))
        return time.thread_time() - start, moves


def rebudget(session: Session, budget: Budget) -> None:
    """Give a session another budget; its window stays as it is."""
    with session.edits.batch() as kernel:
        kernel.rebudget(budget)


def measure(pages: int, policies: Sequence[str], repeat: int) -> list[Row]:
    """Rows; the baseline is the bare pass over the pages."""
    rows: list[Row] = []
    with open_store(":memory:", ROOM, "fifo", "chars/4") as store:
        session, source = store.session("s"), turns(SIZE)
        fill(session, source, pages, batch=500)
        window = session.window
        base = quantile([_adding(window) for _ in range(repeat)], 0.5)
        rows.append({"policy": "(adding up tokens)", "pages": pages, "acts p50 ms": base * 1e3, "x": 1.0})
        for spec in policies:
            try:
                policy = resolve("policies", spec)
            except SpecError as error:
                rows.append({"policy": spec, "note": error.what})
                continue
            rows.append(_row(spec, policy, session, source, repeat) | {"pages": pages})
            rows[-1]["x"] = float(rows[-1]["acts p50 ms"]) / (base * 1e3)
    return rows


def _adding(window: WindowState) -> float:
    start = time.thread_time()
    sum(page.tokens for page in window.resident())
    return time.thread_time() - start


def _row(spec: str, policy: Policy, session: Session, source: Iterator[Turn], repeat: int) -> Row:
    acts, rests = [], []
    moves = 0
    for _ in range(repeat + 1):
        rebudget(session, Budget(ROOM))
        before = session.window.last
        session.append(*next(source))
        came = tuple(range(before + 1, session.window.last + 1))
        rests.append(timed(policy, session, Cause.ADMIT, came)[0])
        rebudget(session, Budget(session.prompts.use - 100))  # from here on the window is over its capacity
        seconds, moves = timed(policy, session, Cause.ADMIT, came)
        acts.append(seconds)
    return {
        "policy": spec, "moves": moves, "first ms": acts[0] * 1e3, "acts p50 ms": quantile(acts[1:], 0.5) * 1e3, "goal ms": GOAL,
        "acts p95 ms": quantile(acts[1:], 0.95) * 1e3, "rests p50 ms": quantile(rests, 0.5) * 1e3,
    }  # fmt: skip


class Timed:
    """A policy whose plans are timed: seconds, pages seen, and whether it moved anything."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.max_depth = int(getattr(policy, "max_depth", 1))
        self.plans: list[tuple[float, int, bool]] = []

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Move]]:
        start, waited = time.thread_time(), 0.0
        moves = self.policy.plan(view)
        if isinstance(moves, Generator):
            try:
                effect = next(moves)
                while True:
                    asked = time.thread_time()
                    answer = yield effect
                    waited += time.thread_time() - asked
                    effect = moves.send(answer)
            except StopIteration as stop:
                moves = stop.value or ()
        self.plans.append((time.thread_time() - start - waited, len(view.pages), bool(moves)))
        return moves


def live(pages: int, policies: Sequence[str]) -> list[Row]:
    """A session for each policy, in a window that fills at `pages`, until it acted twice."""
    with open_store(":memory:", ROOM, "fifo", "chars/4") as store:
        session = store.session("s")
        fill(session, turns(SIZE), pages, batch=500)
        window = session.prompts.use
    return [_session(spec, window, 2 * pages) for spec in policies]


def _session(spec: str, window: int, most: int) -> Row:
    policy = Timed(resolve("policies", spec))
    with open_store(":memory:", window, policy, "chars/4") as store:
        session, source = store.session("s"), turns(SIZE)
        fill(session, source, 2)
        while session.window.last < most and sum(moved for *_, moved in policy.plans) < 2:
            session.append(*next(source))
    acts = [(seconds, seen) for seconds, seen, moved in policy.plans if moved]
    rests = [seconds for seconds, _, moved in policy.plans if not moved]
    return {
        "policy": spec, "plans": len(policy.plans), "acted": len(acts), "over pages": max((seen for _, seen in acts), default=0),
        "slowest act ms": max((seconds for seconds, _ in acts), default=0.0) * 1e3, "goal ms": GOAL,
        "rests p50 ms": quantile(rests, 0.5) * 1e3, "rests p95 ms": quantile(rests, 0.95) * 1e3,
    }  # fmt: skip


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, action="append", help="resident pages; 80 and 10000 where none is given")
    options.add_argument("--policy", action="append", help=f"where none is given: {', '.join(HEURISTIC)}")
    options.add_argument("--repeat", type=int, default=20)
    options.add_argument("--live", action="store_true", help="keep a session for each policy and carry its moves out")
    asked = options.parse_args()
    sizes, policies = asked.pages or [80, 10_000], asked.policy or list(HEURISTIC)
    if asked.live:
        rows = [row for pages in sizes for row in live(pages, policies)]
        emit("planning, live", rows, asked.json, "The making of the view is not included here.")
        return
    rows = [row for pages in sizes for row in measure(pages, policies, asked.repeat)]
    emit("planning", rows, asked.json, "The view is made anew for every plan; its making is included.")


if __name__ == "__main__":
    main()

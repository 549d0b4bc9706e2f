"""How long each policy thinks: `plan(view)` for a full window of many resident pages.

Only the policy runs: no move is carried out. The first plan of a policy reads pages' texts and counts
their words, later ones find them cached; both are shown. Baseline of the same run: one pass over the
same pages that adds up their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Generator

from corpus import SIZE, fill, open_store, turns
from figures import Row, emit, parser, quantile, seconds_of
from kilburn.budget import Budget
from kilburn.effect import Answer, Find
from kilburn.errors import SpecError
from kilburn.kernel.planning import Planner
from kilburn.kernel.process import Process
from kilburn.kernel.resolve import resolve
from kilburn.policy import Cause, Policy, View

HEURISTIC = ("fifo", "lru", "importance", "tiered", "hybrid", "mask", "chain(mask(keep=3), fifo)", "summarize")


def plan(policy: Policy, view: View, process: Process) -> int:
    """Drive one plan to its end, without a model; returns the number of moves."""
    made = policy.plan(view)
    if not isinstance(made, Generator):
        return len(made)
    planner = Planner(process.kernel, policy, "benchmark")
    try:
        effect = next(made)
        while True:
            effect = made.send(planner._find(effect) if isinstance(effect, Find) else Answer(outcome="none"))
    except StopIteration as stop:
        return len(stop.value or ())


def measure(pages: int, policies: list[str], repeat: int) -> list[Row]:
    """Rows; the baseline is the bare pass over the pages."""
    rows: list[Row] = []
    with open_store(":memory:", 1_000_000_000, "fifo", "chars/4") as store:
        process = store.process("s")
        fill(process, turns(SIZE), pages, batch=500)
        kernel = process.kernel
        kernel.budget = Budget(kernel.use - 100)  # from here on the window is over its capacity
        base = quantile(seconds_of(lambda: sum(page.tokens for page in kernel.tier.resident()), repeat), 0.5)
        rows.append({"policy": "(adding up tokens)", "pages": pages, "p50 ms": base * 1e3, "x": 1.0})
        for spec in policies:
            try:
                policy = resolve("policies", spec)
            except SpecError as error:
                rows.append({"policy": spec, "note": error.what})
                continue
            planner = Planner(kernel, policy, spec)
            start = time.perf_counter()
            moves = plan(policy, planner.view(Cause.PRESSURE, ()), process)
            first = time.perf_counter() - start
            times = seconds_of(
                lambda policy=policy, planner=planner: plan(policy, planner.view(Cause.PRESSURE, ()), process), repeat
            )
            p50 = quantile(times, 0.5)
            rows.append(
                {
                    "policy": spec, "pages": pages, "moves": moves, "first ms": first * 1e3,
                    "p50 ms": p50 * 1e3, "p95 ms": quantile(times, 0.95) * 1e3, "x": p50 / base,
                }
            )  # fmt: skip
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, action="append", help="resident pages; 80 and 10000 where none is given")
    options.add_argument("--policy", action="append", help=f"where none is given: {', '.join(HEURISTIC)}")
    options.add_argument("--repeat", type=int, default=20)
    asked = options.parse_args()
    rows = [row for pages in asked.pages or [80, 10_000] for row in measure(pages, asked.policy or list(HEURISTIC), asked.repeat)]
    emit("planning", rows, asked.json, "The view is made anew for every plan; its making is included.")


if __name__ == "__main__":
    main()

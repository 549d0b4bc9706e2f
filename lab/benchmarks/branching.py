"""How long it takes to begin a branch, to return from it, to let it go, and to forget what it forked from, beside an append."""

from __future__ import annotations

import json
import tempfile
import time

import kilburn
from figures import Row, emit, median, parser, quantile
from kilburn.kernel.session import Session

GOAL = 2
"""What a fork may take, compared with an append."""


def call(number: int, name: str) -> dict[str, object]:
    """A message that calls a tool."""
    function = {"name": name, "arguments": json.dumps({"path": f"file{number}"})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": f"{name}{number}", "type": "function", "function": function}],
    }


def filled(session: Session, pages: int) -> None:
    """Append calls and results until the session has about so many pages."""
    session.append({"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "Fix the parser, please."})
    for first in range(0, pages // 2, 50):
        numbers = range(first, min(first + 50, pages // 2))
        results = [{"role": "tool", "tool_call_id": f"read{n}", "content": f"a line of file {n}\n" * 5} for n in numbers]
        session.append(*[message for n, result in zip(numbers, results, strict=True) for message in (call(n, "read"), result)])


def main() -> None:
    """Measure with few and with many pages."""
    arguments = parser(str(__doc__))
    arguments.add_argument("--pages", type=int, action="append", help="pages of the session [default: 100 and 10000]")
    arguments.add_argument("--times", type=int, default=100, help="branches that are begun")
    arguments.add_argument("--forget", action="store_true", help="also forget a page, and then the session with its branches")
    arguments.add_argument("--policy", default="fifo", help="what decides at the window")
    given = arguments.parse_args()
    rows: list[Row] = []
    for pages in given.pages or [100, 10_000]:
        with tempfile.TemporaryDirectory() as folder:
            store = kilburn.open(f"{folder}/a.db", window=4000, policy=given.policy, tokenizer="chars/4")
            session = store.session("main")
            filled(session, pages)
            times: dict[str, list[float]] = {"append": [], "fork": [], "exit": [], "letting go": []}
            own: dict[str, list[float]] = {"append": [], "fork": []}
            for number in range(given.times):
                start, begun = time.perf_counter(), time.thread_time()
                session.append(call(number, "branch"))
                times["append"].append(time.perf_counter() - start)
                own["append"].append(time.thread_time() - begun)
                start, begun = time.perf_counter(), time.thread_time()
                branch = session.fork("Look into it.", call=f"branch{number}")
                times["fork"].append(time.perf_counter() - start)
                own["fork"].append(time.thread_time() - begun)
                branch.append({"role": "assistant", "content": "It is fine."})
                start = time.perf_counter()
                branch.branches.exit("fine")
                times["exit"].append(time.perf_counter() - start)
                start = time.perf_counter()
                del branch
                times["letting go"].append(time.perf_counter() - start)
            for what, took in times.items():
                rows.append(
                    {
                        "what": f"{what}, {pages:,} pages",
                        "p50 ms": round(1000 * median(took), 2),
                        "p95 ms": round(1000 * quantile(took, 0.95), 2),
                        "x": round(median(took) / median(times["append"]), 2),
                        "goal": GOAL if what == "fork" else "",
                        "x, processor": round(median(own[what]) / median(own["append"]), 2) if what in own else "",
                    }
                )
            for what, address in (("forget a page", "p2"), ("forget the session", None)) if given.forget else ():
                start = time.perf_counter()
                store.forget(session="main", address=address)
                took = 1000 * (time.perf_counter() - start)
                rows.append(
                    {
                        "what": f"{what}, {pages:,} pages, {given.times} branches",
                        "p50 ms": round(took, 1),
                        "p95 ms": "-",
                        "x": round(took / 1000 / median(times["append"]), 1),
                    }
                )
            store.close()
    emit("branching", rows, given.json, f"{given.times} branches each; x: p50 compared with an append to the same session")


if __name__ == "__main__":
    main()

"""What a session costs when it is opened again, recalled from and forgotten from, and on the disk, beside an empty one."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from typing import Any

import kilburn
from figures import Row, emit, median, parser

WORDS = [f"word{number}" for number in range(4000)]


def steps(count: int) -> list[dict[str, Any]]:
    """Calls and their results, as an agent makes them."""
    rng, made = random.Random(0), list[dict[str, Any]]()
    for number in range(count // 2):
        function = {"name": "read", "arguments": f'{{"path": "file{number}.py"}}'}
        call = {"id": f"call{number}", "type": "function", "function": function}
        made.append({"role": "assistant", "content": None, "tool_calls": [call]})
        made.append({"role": "tool", "tool_call_id": call["id"], "content": " ".join(rng.choices(WORDS, k=100))})
    return made


def seconds(work: Callable[[], object]) -> float:
    """The processor time of one run."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measured(path: str, policy: str, times: int) -> tuple[float, float, float]:
    """Processor seconds of opening the session, of opening it and recalling its first page, and of forgetting a page."""

    def opened() -> kilburn.Store:
        return kilburn.open(path, window=8000, policy=policy, tokenizer="chars/4", durable=False)

    def opening(address: str | None) -> Callable[[], None]:
        def work() -> None:
            with opened() as store:
                session = store.session("main")
                if address is not None:
                    session.recall(address)

        return work

    reading = [[seconds(opening(address)) for _ in range(times)] for address in (None, "p1")]
    with opened() as store:
        session = store.session("main")
        middle = session.window.last // 2
        forgetting = [seconds(lambda page=middle + 2 * at: session.forget(f"p{page}")) for at in range(times)]
    return median(reading[0]), median(reading[1]), median(forgetting)


def store_of(pages: int, times: int) -> Row:
    """What it costs to open a store of so many pages in a hundred sessions, and one of these, beside an empty one."""
    with tempfile.TemporaryDirectory() as folder:
        for path, many in ((f"{folder}/empty.db", 0), (f"{folder}/full.db", pages // 100)):
            with kilburn.open(path, policy="fifo", tokenizer="chars/4", durable=False) as store:
                for number in range(100 if many else 0):
                    opened = store.session(f"session-{number}")
                    for first in range(0, many, 500):
                        said = [{"role": "user", "content": f"{number} {at}"} for at in range(first, min(first + 500, many))]
                        opened.append(*said)
                    store.release(opened.name)

        def opening(name: str, session: str = "") -> Callable[[], None]:
            def work() -> None:
                with kilburn.open(f"{folder}/{name}.db", policy="fifo", tokenizer="chars/4") as store:
                    if session:
                        store.session(session).recall("p1")

            return work

        full, one, empty = [
            median([seconds(opening(*which)) for _ in range(times)]) for which in (("full",), ("full", "session-50"), ("empty",))
        ]
        return {
            "what": f"a store of {pages:,} pages",
            "open ms": round(1000 * full, 1),
            "x": round(full / empty, 2),
            "open and recall ms": round(1000 * one, 1),
            "forget ms": "-",
            "bytes a message beside its text": "-",
        }


def main() -> None:
    """Measure sessions of growing length."""
    arguments = parser(str(__doc__))
    arguments.add_argument("--messages", type=int, action="append", help="of a session [default: 1000, 10000, 100000]")
    arguments.add_argument("--at-once", type=int, default=1, help="messages of one append, in pairs beyond 1")
    arguments.add_argument("--policy", action="append", help="what decides at the window [default: fifo and hybrid]")
    arguments.add_argument("--times", type=int, default=3, help="of which the median counts")
    arguments.add_argument("--store", type=int, action="append", default=[], help="pages of a store of a hundred sessions")
    given = arguments.parse_args()
    rows: list[Row] = []
    for policy in given.policy or ["fifo", "hybrid"]:
        base: tuple[float, float, float] | None = None
        for count in [2, *(given.messages or [1000, 10_000, 100_000])]:
            with tempfile.TemporaryDirectory() as folder:
                path, said = f"{folder}/a.db", steps(count)
                with kilburn.open(path, window=8000, policy=policy, tokenizer="chars/4", durable=False) as store:
                    session = store.session("main")
                    session.append({"role": "user", "content": "Read all files, please."})
                    for at in range(0, len(said), given.at_once):
                        session.append(*said[at : at + given.at_once])
                text = sum(len(message["content"] or '{"path": "file0000.py"}') for message in said)
                found = measured(path, policy, given.times if count > 2 else 1)
                base = base or found
                rows.append(
                    {
                        "what": f"{policy}, {count:,} messages",
                        "open ms": round(1000 * found[0], 1),
                        "x": round(found[0] / base[0], 2),
                        "open and recall ms": round(1000 * found[1], 1),
                        "forget ms": round(1000 * found[2], 1),
                        "bytes a message beside its text": round((os.path.getsize(path) - text) / count),
                    }
                )
    rows += [store_of(pages, given.times) for pages in given.store]
    emit("opening", rows, given.json, "processor time; x: beside a session of two messages")


if __name__ == "__main__":
    main()

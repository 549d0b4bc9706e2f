"""What a session's operations cost in processor time, by the number of its pages: a chat of sentences that people wrote.

An append has room if it moves nothing; it is into a full window if it moves pages. A question is an append of the user's words,
and `render`. The baseline of the same run is a bare synced insert of the same bytes; the appends are interleaved with it.

    python lab/benchmarks/flat.py --data DIR              # DIR has recall/*.jsonl.gz; 100 to 1,000,000 pages, ten minutes
    python lab/benchmarks/flat.py --data DIR --pages 100 --pages 10000 --policy cost
"""

from __future__ import annotations

import gzip
import json
import random
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import kilburn
from figures import Row, emit, median, parser, quantile
from kilburn.page import Place
from turn import Bare

T = TypeVar("T")

SIZES = [100, 10_000, 100_000, 1_000_000]
BATCH = 500
"""Messages of one `append` while the session grows."""


class Chat:
    """Messages of one to four sentences, and questions, from recorded conversations."""

    def __init__(self, folder: Path) -> None:
        self.random = random.Random(1)
        self.sentences, self.questions = list[str](), list[str]()
        for path in sorted((folder / "recall").glob("*.jsonl.gz")):
            for line in gzip.decompress(path.read_bytes()).splitlines():
                record = json.loads(line)
                self.questions += [query["text"] for query in record["queries"] if len(query["text"]) < 200]
                for document in record["docs"]:
                    parts = (part.strip() for part in re.split(r"(?<=[.!?\n])\s+", document["text"]))
                    self.sentences += [part for part in parts if 20 <= len(part) <= 400]
        self.random.shuffle(self.questions)

    def message(self, number: int) -> dict[str, Any]:
        """The message of this number: the user's and the assistant's alternate."""
        text = " ".join(self.random.choices(self.sentences, k=self.random.randint(1, 4)))
        return {"role": "assistant" if number % 2 else "user", "content": text}


class Timings:
    """Processor time of each operation."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def take(self, name: str, work: Callable[[], T]) -> T:
        """Do the work, and note its time under a name."""
        start = time.process_time()
        result = work()
        self.seconds.setdefault(name, []).append(time.process_time() - start)
        return result


def grow(session: kilburn.Session, chat: Chat, pages: int) -> None:
    """Bring a session to so many pages."""
    while (last := session.window.last) < pages:
        session.append(*map(chat.message, range(last, min(pages, last + BATCH))))


def measure(session: kilburn.Session, bare: Bare, chat: Chat, rounds: int) -> Timings:
    """Time the operations of a session at its size."""
    timings = Timings()
    for number in range(2 * rounds):
        message, resident, start = chat.message(number), len(session.window.resident()), time.process_time()
        session.append(message)
        seconds = time.process_time() - start
        if number % 2:
            has_room = len(session.window.resident()) == resident + 1
            timings.seconds.setdefault("append with room" if has_room else "into a full window", []).append(seconds)
        session.render()
        timings.take("bare insert", lambda message=message: bare.turn((message,)))  # type: ignore[misc, arg-type]
    for question in chat.questions[:rounds]:
        asked = {"role": "user", "content": question}
        timings.take("question", lambda asked=asked: (session.append(asked), session.render()))  # type: ignore[misc]
        session.append(chat.message(1))
        timings.take("search", lambda question=question: session.search(question))  # type: ignore[misc]
    for _ in range(max(2, rounds // 10)):
        page = chat.random.randrange(2, session.window.last)
        if session.window.at(page) is not Place.DROPPED:
            timings.take("forget", lambda page=page: session.forget(f"p{page}"))  # type: ignore[misc]
        session.append(chat.message(1))
    for _ in range(max(2, rounds // 10)):
        timings.take("fork", lambda: session.fork("Look into it, please.")).branches.exit("fine")
    return timings


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--data", type=Path, required=True, help="a folder with recall/*.jsonl.gz")
    options.add_argument("--pages", type=int, action="append", help=f"may be given several times; {SIZES} where none is given")
    options.add_argument("--policy", default="hybrid")
    options.add_argument("--window", type=int, default=8000)
    options.add_argument("--rounds", type=int, default=100)
    asked = options.parse_args()
    chat, rows = Chat(asked.data), list[Row]()
    first: dict[str, float] = {}
    for pages in sorted(asked.pages or SIZES):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = Path(folder) / "flat.db"
            with kilburn.open(path, window=asked.window, policy=asked.policy, embedder=None) as store:
                grow(store.session("s"), chat, pages)
            bare = Bare(Path(folder) / "bare.db")
            with kilburn.open(path, window=asked.window, policy=asked.policy, embedder=None) as store:
                session = store.session("s")
                session.append(chat.message(0), chat.message(1))
                timings = measure(session, bare, chat, asked.rounds)
            bare.db.close()
        base = median(timings.seconds["bare insert"])
        for name, seconds in timings.seconds.items():
            middle = median(seconds)
            row: Row = {"pages": f"{pages:,}", "operation": name, "p50 ms": 1e3 * middle, "p95 ms": 1e3 * quantile(seconds, 0.95)}
            rows.append(
                row | {"x bare": middle / base, "x of the first size": middle / base / first.setdefault(name, middle / base)}
            )
    emit("flat", rows, asked.json, f"{asked.policy}, a window of {asked.window:,}; processor time.")


if __name__ == "__main__":
    main()

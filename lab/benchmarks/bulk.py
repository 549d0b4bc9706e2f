"""How fast many pages come in: one `append` of many messages, into a window that holds them all and
into one that does not.

Baselines of the same run: the store's own `commit` of the same pages without a kernel, the same rows
in a bare SQLite table, and the text index's words alone in a bare FTS5 table.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apsw

from corpus import SIZE, open_store, turns
from figures import Row, emit, median, parser
from kilburn.backend import Batch, State
from kilburn.backends.sqlite import Sqlite
from kilburn.event import Act, Event
from kilburn.message import Kind, Role, Trust
from kilburn.page import Page, digest_of

Bulk = list[list[dict[str, Any]]]

GOAL = 10_000
"""Pages a second."""


def batches(pages: int, size: int) -> Bulk:
    """The messages, `size` pages a batch."""
    source = (message for turn in turns(SIZE) for message in turn)
    made: Bulk = []
    while pages > 0:
        made.append(list(itertools.islice(source, min(size, pages))))
        pages -= size
    return made


def text_of(message: dict[str, Any]) -> str:
    """What the page of a message says."""
    return str(message["content"] or message["tool_calls"][0]["function"]["arguments"])


def by_append(path: str, bulk: Bulk, window: int, policy: str, tokenizer: str) -> None:
    """Through the whole of Kilburn."""
    with open_store(path, window, policy, tokenizer) as store:
        session = store.session("s")
        for batch in bulk:
            session.append(*batch)


def by_commit(path: str, bulk: Bulk) -> None:
    """Into the store alone: pages, texts, states, index, ledger."""
    number = itertools.count(1)
    with Sqlite(path) as backend:
        info = backend.segment("s", time=0.0)
        assert info is not None
        for head, batch in enumerate(bulk):
            pages, texts = [], {}
            for message in batch:
                text = text_of(message)
                at = next(number)
                digest = digest_of(text)
                texts[digest] = text
                pages.append(
                    Page(
                        id=at, digest=digest, kind=Kind.TEXT, role=Role.USER, message=at, tokens=100,
                        time=0.0, trust=Trust.USER, order=(at, 0),
                    )
                )  # fmt: skip
            ids = tuple(page.id for page in pages)
            event = Event(number=head + 1, act=Act.ADMIT, time=0.0, pages=ids)
            states = dict.fromkeys(ids, State(at="in"))
            backend.commit(
                info.number, Batch(head=head, events=[event], pages=pages, texts=texts, states=states, index=list(ids))
            )


def by_insert(path: str, bulk: Bulk) -> None:
    """Into one table."""
    _bare(path, bulk, "CREATE TABLE page(id INTEGER PRIMARY KEY, words TEXT)")


def by_words(path: str, bulk: Bulk) -> None:
    """Into one contentless FTS5 table."""
    _bare(
        path,
        bulk,
        "CREATE VIRTUAL TABLE page USING fts5(words, content='', columnsize=0, detail=none, tokenize='porter unicode61')",
    )


def _bare(path: str, bulk: Bulk, schema: str) -> None:
    db = apsw.Connection(path)
    db.pragma("journal_mode", "WAL")
    db.pragma("synchronous", "FULL")
    db.execute(schema)
    numbers: Iterator[int] = itertools.count(1)
    for batch in bulk:
        with db:
            db.executemany(
                "INSERT INTO page(rowid, words) VALUES(?, ?)", [(next(numbers), text_of(message)) for message in batch]
            )
    db.close()


def measure(pages: int, sizes: list[int], policies: list[str], tokenizer: str, repeat: int) -> list[Row]:
    """Rows; the baseline is the bare insert of the same batches."""
    rows: list[Row] = []
    for size in sizes:
        bulk = batches(pages, size)
        subjects: dict[str, Callable[[str], None]] = {"bare SQLite insert": lambda path, bulk=bulk: by_insert(path, bulk)}
        subjects["bare FTS5 insert"] = lambda path, bulk=bulk: by_words(path, bulk)
        subjects["store.commit"] = lambda path, bulk=bulk: by_commit(path, bulk)
        for policy in policies:
            for name, window in (("no pressure", 100_000_000), ("window 8000", 8000)):
                subjects[f"append, {policy}, {name}"] = lambda path, bulk=bulk, window=window, policy=policy: by_append(
                    path, bulk, window, policy, tokenizer
                )
        # Seconds, and those of the processor.
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
        for _ in range(repeat):
            for name, work in subjects.items():
                with tempfile.TemporaryDirectory(dir=".") as folder:
                    start, begun = time.perf_counter(), time.process_time()
                    work(str(Path(folder) / "bulk.db"))
                    times[name].append((time.perf_counter() - start, time.process_time() - begun))
        base, _ = map(median, zip(*times["bare SQLite insert"], strict=True))
        for name, values in times.items():
            middle, own = map(median, zip(*values, strict=True))
            rows.append(
                {
                    "import": name, "pages a call": size, "pages/s": pages / middle,
                    "goal": GOAL if name.startswith("append") else "", "us a page": middle / pages * 1e6,
                    "x bare insert": middle / base, "pages/s of the processor": pages / own,
                }
            )  # fmt: skip
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, default=10_000)
    options.add_argument("--size", type=int, action="append", help="pages a call; 100 and 1000 where none is given")
    options.add_argument("--policy", action="append", help="hybrid where none is given")
    options.add_argument("--tokenizer", default="auto")
    options.add_argument("--repeat", type=int, default=3)
    asked = options.parse_args()
    rows = measure(asked.pages, asked.size or [100, 1000], asked.policy or ["hybrid"], asked.tokenizer, asked.repeat)
    emit("bulk", rows, asked.json, f"{asked.pages} pages of {SIZE} characters, synced at every call; median of {asked.repeat}.")


if __name__ == "__main__":
    main()

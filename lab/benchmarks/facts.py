"""How fast facts come into a memory, and what a memory that is already large costs to open, to change and to forget in.

Baseline of the same run: the store's own `commit` of the same pages, without the kernel.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

import kilburn
from corpus import texts
from figures import Row, emit, parser
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.move import Add, Retire
from kilburn.page import Claim


def facts(number: int) -> list[Add]:
    """Facts of about 80 characters, each from the same message."""
    words = (" ".join(text.split()) for text in texts(80))
    return [
        Add(text=f"{n}: {next(words)}", claim=Claim(subject="Ana", relation="said", object=str(n)), cites=((1, 1),))
        for n in range(number)
    ]


class Watch:
    """Seconds on the clock and on the processor."""

    @contextmanager
    def timed(self) -> Iterator[None]:
        start, used = time.perf_counter(), time.process_time()
        yield
        self.seconds, self.processor = time.perf_counter() - start, time.process_time() - used


def measure(pages: int, size: int, tokenizer: str) -> list[Row]:
    """Rows; the last ones are single calls on the full memory."""
    rows: list[Row] = []
    watch = Watch()

    def row(what: str, times: int = 1) -> None:
        rows.append(
            {
                "what": what, "ms each": watch.seconds / times * 1e3, "a second": times / watch.seconds,
                "a second of processor time": times / max(watch.processor, 1e-9),
            }
        )  # fmt: skip

    made = facts(pages)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = str(Path(folder) / "facts.db")
        with kilburn.open(path, tokenizer=tokenizer) as store:
            store.session("s").append({"role": "user", "content": "I am Ana."})
            memory, collection = store.memory(), store.memory().collection
            with watch.timed():
                for at in range(0, pages, size):
                    collection.apply(*made[at : at + size], policy="facts")
            row(f"Collection.apply, {size} facts a call", pages)
            kept = list(collection.pages(history=True))
            events = list(collection.ledger.events())
        with Sqlite(str(Path(folder) / "bare.db")) as bare:
            number = bare.segment("s", time=0.0).number  # type: ignore[union-attr]
            with watch.timed():
                for head, event in enumerate(events):
                    some = kept[head * size : head * size + size]
                    whole = {page.digest: add.text for (page, _), add in zip(some, made[head * size :], strict=False)}
                    new = [msgspec.structs.replace(page, cites=()) for page, _ in some]
                    states = {page.id: state for page, state in some}
                    ids = [page.id for page in new]
                    bare.commit(number, Batch(head=head, events=[event], pages=new, texts=whole, states=states, index=ids))
            row(f"store.commit, {size} pages a call", pages)
        with watch.timed():
            store = kilburn.open(path, tokenizer=tokenizer)
            memory, collection = store.memory(), store.memory().collection
            collection.contents.resolve("f1")
        row("open the full memory, and find a page")
        with watch.timed():
            collection.add("Ana likes tea.")
        row("add one fact")
        with watch.timed():
            collection.apply(Add(text="Ana likes coffee."), Retire((1,), refers=0))
        row("update one fact")
        with watch.timed():
            memory.recall(f"f{pages // 2}")
        row("recall one fact")
        with watch.timed():
            memory.history("p1")
        row("history of one fact")
        with watch.timed():
            memory.undo("p1")
        row("undo one update")
        with watch.timed():
            memory.forget(f"f{pages // 2}")
        row("forget one fact")
        store.close()
    base = next(float(one["ms each"]) for one in rows if str(one["what"]).startswith("store.commit"))
    for one in rows:
        one["x store.commit"] = float(one["ms each"]) / base
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, default=100_000)
    options.add_argument("--size", type=int, default=1000, help="facts a call")
    options.add_argument("--tokenizer", default="auto")
    asked = options.parse_args()
    emit("facts", measure(asked.pages, asked.size, asked.tokenizer), asked.json, f"{asked.pages:,} facts, synced at every call.")


if __name__ == "__main__":
    main()

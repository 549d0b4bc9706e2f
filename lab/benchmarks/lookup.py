"""Reading back: recall by address, and text search, over sessions of different length.

Baselines of the same run: reading one row by its key from a bare SQLite table with as many pages,
and FTS5's own ranking (`ORDER BY rank`) over as many passages.
"""

from __future__ import annotations

import itertools
import random
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import apsw

import kilburn
from corpus import SIZE, fill, open_store, texts, turns
from figures import Row, emit, parser, quantile, seconds_of
from kilburn import remembered

WORD = re.compile(r"[A-Za-z_]{3,}")


class Bare:
    """The texts of the session's pages in a table, and in an ordinary FTS5 index."""

    def __init__(self, path: Path, pages: int) -> None:
        self.db = apsw.Connection(str(path))
        self.db.pragma("synchronous", "OFF")
        self.db.execute("CREATE TABLE page(id INTEGER PRIMARY KEY, body TEXT)")
        self.db.execute(
            "CREATE VIRTUAL TABLE words USING fts5(body, content='', detail=none, tokenize='porter unicode61 tokenchars _')"
        )
        with self.db:
            for number, text in enumerate(itertools.islice(texts(SIZE), pages), 1):
                self.db.execute("INSERT INTO page VALUES(?, ?)", (number, text))
                self.db.execute("INSERT INTO words(rowid, body) VALUES(?, ?)", (number, text))

    def read(self, page: int) -> object:
        """One row."""
        return self.db.execute("SELECT body FROM page WHERE id = ?", (page,)).fetchone()

    def search(self, query: str) -> object:
        """The best 20 by FTS5's rank."""
        either = " OR ".join(f'"{word}"' for word in query.split())
        return self.db.execute("SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT 20", (either,)).fetchall()


def queries(pages: int, lengths: Sequence[int], times: int) -> dict[str, list[str]]:
    """Queries of common words, of rare words, and as long as a message, from the session's own text."""
    counts: Counter[str] = Counter()
    for text in itertools.islice(texts(SIZE), 0, pages, max(1, pages // 5000)):
        counts.update(set(WORD.findall(text)))
    ranked = [word for word, _ in counts.most_common()]
    common, rare = ranked[:60], [word for word in ranked if counts[word] <= 2]
    chance = random.Random(1)
    made: dict[str, list[str]] = {}
    for length in lengths:
        for name, words in (("common", common), ("rare", rare), ("mixed", ranked[:2000])):
            made[f"{length} {name}"] = [" ".join(chance.choices(words, k=length)) for _ in range(times)]
    return made


def _timed(work: Callable[[str], object], asked: Sequence[str]) -> list[float]:
    left: Iterator[str] = iter(asked)
    return seconds_of(lambda: work(next(left)), len(asked))


def _row(pages: int, name: str, subject: str, values: Sequence[float], base: float) -> Row:
    p50 = quantile(values, 0.5)
    return {
        "lookup": name,
        "pages": pages,
        "by": subject,
        "p50 ms": p50 * 1e3,
        "p95 ms": quantile(values, 0.95) * 1e3,
        "x bare": p50 / base,
    }


def measure(pages: int, window: int, policy: str, times: int, lengths: Sequence[int]) -> list[Row]:
    """Rows for one session length."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        bare = Bare(Path(folder) / "bare.db", pages)
        with open_store(str(Path(folder) / "lookup.db"), window, policy) as store:
            session = store.session("s")
            fill(session, turns(SIZE), pages, batch=500)
            rows = [*_recalls(session, bare, pages, times), *_searches(store, session, bare, pages, times, lengths)]
        bare.db.close()
    return rows


def _recalls(session: kilburn.Session, bare: Bare, pages: int, times: int) -> list[Row]:
    chance = random.Random(2)
    numbers = [chance.randrange(3, pages) for _ in range(times)]
    with session.edits.batch() as kernel:
        # Or texts that were just appended would be read from memory.
        kernel.contents.clear()
        remembered.texts.clear()
    base = _timed(lambda at: bare.read(int(at)), [str(at) for at in numbers])
    once = _timed(lambda at: session.recall(f"p{at}"), [str(at) for at in numbers])
    ranges = _timed(lambda at: session.recall(f"p{at}-p{min(int(at) + 24, pages)}"), [str(at) for at in numbers])
    middle = quantile(base, 0.5)
    return [
        _row(pages, "one page", "bare SQLite read", base, middle),
        _row(pages, "one page", "recall", once, middle),
        _row(pages, "25 pages", "recall", ranges, middle),
    ]


def _searches(
    store: kilburn.Store, session: kilburn.Session, bare: Bare, pages: int, times: int, lengths: Sequence[int]
) -> list[Row]:
    rows = []
    for name, asked in queries(pages, lengths, times).items():
        base = _timed(bare.search, asked)
        middle = quantile(base, 0.5)
        rows.append(_row(pages, f"search {name}", "FTS5 rank", base, middle))
        rows.append(_row(pages, f"search {name}", "store.search", _timed(store.search, asked), middle))
        rows.append(_row(pages, f"search {name}", "session.search", _timed(session.search, asked), middle))
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, action="append", help="10000 and 100000 where none is given")
    options.add_argument("--words", type=int, action="append", help="words of a query; 1, 3, 10 and 40 where none is given")
    options.add_argument("--window", type=int, default=8000)
    options.add_argument("--policy", default="hybrid")
    options.add_argument("--times", type=int, default=100)
    asked = options.parse_args()
    rows = [
        row
        for pages in asked.pages or [10_000, 100_000]
        for row in measure(pages, asked.window, asked.policy, asked.times, asked.words or [1, 3, 10, 40])
    ]
    emit(
        "lookup",
        rows,
        asked.json,
        "Words: common are the 60 in most pages, rare those in one or two of 5,000, mixed the 2,000 commonest.",
    )


if __name__ == "__main__":
    main()

"""Facts of many users in one store, and their vectors: how fast they are written, found, and read for a scan.

Texts are random words by Zipf's law with a few common ones in each, 8 to 25 words. Baseline of the same run: the bare texts
in an SQLite table, one transaction a batch.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import apsw

from figures import Row, emit, parser, quantile, seconds_of
from kilburn.backend import Batch, SegmentKind
from kilburn.backends.sqlite import Sqlite
from kilburn.event import Act, Event
from kilburn.message import Kind, Role, Trust
from kilburn.page import Page, digest_of

SYLLABLES = ("ba", "co", "di", "fu", "ga", "he", "li", "mo", "nu", "pa", "re", "so", "ti", "vu", "za", "ke", "lo", "mi", "ra")
VOCABULARY = 30_000
BYTES = 384
"""Of a vector: MiniLM's, in int8."""


def word(number: int) -> str:
    """The word of that rank."""
    number, made = number + len(SYLLABLES), ""
    while number:
        number, at = divmod(number, len(SYLLABLES))
        made += SYLLABLES[at]
    return made


WORDS = [word(number) for number in range(VOCABULARY)]
WEIGHTS = list(itertools.accumulate(1 / (rank + 3) for rank in range(VOCABULARY)))


def facts(chance: random.Random, count: int) -> list[str]:
    """Made-up statements."""
    return [" ".join(chance.choices(WORDS, cum_weights=WEIGHTS, k=chance.randint(8, 25))) for _ in range(count)]


def batch(head: int, known: int, texts: Sequence[str], cited: tuple[int, int]) -> Batch:
    """One transaction that adds facts, each from a page of a session."""
    pages = [
        Page(
            id=-(known + at),
            digest=digest_of(text),
            kind=Kind.FACT,
            role=Role.USER,
            message=0,
            tokens=20,
            time=1.0,
            trust=Trust.USER,
            depth=1,
            cites=(cited,),
            label=text[:80],
        )
        for at, text in enumerate(texts, 1)
    ]
    ids = tuple(page.id for page in pages)
    event = Event(number=head + 1, act=Act.ADMIT, time=1.0, pages=ids, boundary="database", data={"at": "out"})
    given = dict(zip((page.digest for page in pages), texts, strict=True))
    return Batch(head=head, events=[event], pages=pages, texts=given, index=ids)


def fill(
    backend: Sqlite, bare: apsw.Connection, count: int, size: int, segments: int
) -> tuple[float, float, dict[str, list[int]]]:
    """Write so many facts; seconds in the store and in the bare table, and the sessions of each user."""
    chance = random.Random(1)
    talk = backend.segment("talk", time=1.0)
    assert talk is not None
    said = cited_page()
    backend.commit(talk.number, Batch(head=0, pages=[said], texts={said.digest: "said"}))
    users: dict[str, list[int]] = {}
    for number in range(segments):
        # Sessions of one user lie among those of the others.
        user = f"user{number % max(1, segments // 50)}"
        info = backend.segment(f"@memory/{number}", time=1.0, kind=SegmentKind.MEMORY, user=user)
        assert info is not None
        users.setdefault(user, []).append(info.number)
    numbers = [number for group in users.values() for number in group]
    written = 0
    mine = theirs = 0.0
    turn = 0
    while written < count:
        texts = facts(chance, min(size, count - written))
        round_, at = divmod(turn, len(numbers))
        made = batch(round_, round_ * size, texts, (talk.number, said.id))
        start = time.perf_counter()
        backend.commit(numbers[at], made)
        mine += time.perf_counter() - start
        start = time.perf_counter()
        with bare:
            bare.executemany("INSERT INTO fact(body) VALUES(?)", [(text,) for text in texts])
        theirs += time.perf_counter() - start
        written += len(texts)
        turn += 1
    return mine, theirs, users


def cited_page() -> Page:
    """The page that all facts cite."""
    return Page(
        id=1,
        digest=digest_of("said"),
        kind=Kind.TEXT,
        role=Role.USER,
        message=1,
        tokens=1,
        time=1.0,
        trust=Trust.USER,
    )


def queries(times: int) -> dict[str, list[str]]:
    """Questions of rare words, of words as they come, and of common ones."""
    chance = random.Random(2)
    return {
        "3 rare words": [" ".join(chance.choices(WORDS[3000:], k=3)) for _ in range(times)],
        "6 words": [" ".join(chance.choices(WORDS, cum_weights=WEIGHTS, k=6)) for _ in range(times)],
        "4 of the 60 commonest": [" ".join(chance.choices(WORDS[:60], k=4)) for _ in range(times)],
    }


def measure(count: int, size: int, segments: int, times: int) -> list[Row]:
    """Rows for so many facts."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder) / "facts.db"
        bare = apsw.Connection(str(Path(folder) / "bare.db"))
        bare.pragma("journal_mode", "WAL")
        bare.pragma("synchronous", "FULL")
        bare.execute("CREATE TABLE fact(id INTEGER PRIMARY KEY, body TEXT)")
        rows: list[Row] = []

        def row(what: str, seconds: float, many: int = 1, **more: object) -> None:
            rows.append(
                {"facts": count, "what": what, "ms": seconds * 1e3, "a second": many / seconds if many > 1 else "", **more}
            )

        with Sqlite(path) as backend:
            mine, theirs, users = fill(backend, bare, count, size, min(segments, max(1, count // size)))
            row(f"bare insert, {size} a transaction", theirs, count)
            rows[-1]["x bare"] = 1
            row(f"commit, {size} a batch, indexed, with a citation each", mine, count)
            rows[-1]["x bare"] = mine / theirs
            group = next(iter(users.values()))
            for where, numbers in (("one session", group[:1]), (f"a user's {len(group)} sessions", group), ("the tenant", None)):
                for name, asked in queries(times).items():
                    row(f"search {where}, {name}, p50", _searched(backend, asked, numbers))
            start = time.perf_counter()
            while waiting := backend.vectors.unembedded("made up", 20_000):
                backend.vectors.add("made up", [(entry, random.randbytes(BYTES)) for entry, _ in waiting])
            row(f"keep a vector of {BYTES} bytes each, the reading of the texts included", time.perf_counter() - start, count)
            start = time.perf_counter()
            read = sum(1 for _ in backend.vectors.read("made up"))
            row("read all vectors", time.perf_counter() - start, read)
            head = next(info.head for info in backend.segments() if info.number == group[0])
            start = time.perf_counter()
            backend.commit(group[0], Batch(head=head, erase=[-1]))
            row("forget one", time.perf_counter() - start)
        bare.close()
        rows[1]["bytes each, with vector"] = path.stat().st_size // count
    return rows


def _searched(backend: Sqlite, asked: Sequence[str], numbers: list[int] | None) -> float:
    left = iter([asked[0], *asked])

    def search() -> object:
        return backend.words.search(next(left), segments=numbers, limit=40)

    search()
    return quantile(seconds_of(search, len(asked)), 0.5)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--facts", type=int, action="append", help="10000 and 100000 where none is given")
    options.add_argument("--batch", type=int, default=1000)
    options.add_argument("--memories", type=int, default=1000, help="at most; each gets one batch at least")
    options.add_argument("--times", type=int, default=60)
    asked = options.parse_args()
    rows = [row for count in asked.facts or [10_000, 100_000] for row in measure(count, asked.batch, asked.memories, asked.times)]
    emit("passages", rows, asked.json, "Searches ask for 40 passages.")


if __name__ == "__main__":
    main()

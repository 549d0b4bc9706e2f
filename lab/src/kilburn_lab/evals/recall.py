"""E3: does a search over a past conversation bring the messages that answer a question, and at which cost in tokens?

Each conversation becomes a store of its own, each of its sessions a process, each message a page with its time. The
rankings are written to a file first; nothing that reads answers is called before (`kilburn_lab.evals.corpora`). Beside the
ranking that is measured stand `words`, the product without meaning and neighbours, and `floor`: SQLite's own FTS5 and,
where there are vectors, a scan with NumPy, ½ and ½ of their best scores.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import msgspec

from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.opening import Store
from kilburn.page import parse_address
from kilburn.retrieval import Embedder
from kilburn.search.choice import vectors_for
from kilburn.testing.clock import FakeClock
from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.corpora import Corpus, CorpusQuery, CorpusTurn, seconds

FLOOR = "floor"

BEGINNING = 1_600_000_000.0
"""The time of messages of which none is known, in seconds since the epoch; each is a second later than the one before."""

DAY = 86_400.0


class RankedTurn(msgspec.Struct, frozen=True):
    """A message that was found, and what the whole of it costs."""

    id: str
    score: float
    tokens: int


class RecallLine(msgspec.Struct, frozen=True):
    """One line of the file: what was found for one question, best first, in how many milliseconds.

    `confidence` is the product's; None for the floor.
    """

    name: str
    query: str
    ranked: list[RankedTurn]
    ms: float
    confidence: float | None = None


def cost_of(text: str) -> int:
    """Tokens of four characters."""
    return max(1, -(-len(text) // CHARACTERS))


def rank(
    corpora: Iterable[Corpus],
    *,
    ranking: Any = "blend",
    embedder: Embedder | None = None,
    budget: int = 4000,
    finished: Callable[[], None] = lambda: None,
) -> Iterator[RecallLine]:
    """What the product finds for each question.

    Args:
        ranking: a spec or an object, or `FLOOR`.
        embedder: None for words alone.
        budget: tokens for which there should be enough hits.
        finished: called after each conversation.
    """
    for corpus in corpora:
        yield from _by_floor(corpus, embedder) if ranking == FLOOR else _by_product(corpus, ranking, embedder, budget)
        finished()


def _by_product(corpus: Corpus, ranking: Any, embedder: Embedder | None, budget: int) -> Iterator[RecallLine]:
    backend = Sqlite(":memory:")
    vectors = None if embedder is None else vectors_for(backend, embedder)
    clock = FakeClock(BEGINNING, tick=0.0)
    whole = Budget(1 << 40)
    with Store(backend, whole, "fifo", tokenizer="chars/4", clock=clock, ranking=ranking, vectors=vectors) as levels:
        ids = conversation(levels, corpus.docs)
        if vectors is not None:
            vectors.catch_up()
        clock.now = max((time for _, time in ids.values()), default=BEGINNING) + DAY
        costs = {said.id: cost_of(said.text) for said in corpus.docs}
        for asked in corpus.queries:
            began = time.perf_counter()
            found = levels.search(asked.text, tokens=2 * budget, limit=None, abstain=True)
            ms = 1000 * (time.perf_counter() - began)
            hits = sorted([*found, *found.withheld], key=lambda hit: hit.score, reverse=True)
            best = {ids[hit.session, parse_address(hit.address)[0]][0]: hit.score for hit in reversed(hits)}
            listed = [RankedTurn(said, score, costs[said]) for said, score in reversed(best.items())]
            yield RecallLine(corpus.name, asked.id, listed, ms, found.confidence)


def conversation(levels: Store, docs: Sequence[CorpusTurn]) -> dict[tuple[str, int], tuple[str, float]]:
    """Append the messages; returns the id and time of each by its session and page."""
    ids: dict[tuple[str, int], tuple[str, float]] = {}
    runs: dict[str, list[tuple[CorpusTurn, float]]] = {}
    now = BEGINNING
    for said in docs:
        now = max(seconds(said.time) or 0.0, now + 1.0)
        runs.setdefault(said.session, []).append((said, now))
    for session, run in runs.items():
        opened = levels.session(session)
        for number, (said, at) in enumerate(run, 1):
            ids[session, number] = said.id, at
        same: list[dict[str, str]] = []
        for number, (said, at) in enumerate(run):
            same.append(_message(said))
            if number + 1 == len(run) or run[number + 1][1] - at > 1.0:
                opened.append(*same, time=at)
                same = []
    return ids


def _message(said: CorpusTurn) -> dict[str, str]:
    if said.speaker in ("user", "assistant"):
        return {"role": said.speaker, "content": said.text}
    return {"role": "user", "name": said.speaker, "content": said.text}


def _by_floor(corpus: Corpus, embedder: Embedder | None) -> Iterator[RecallLine]:
    db = apsw.Connection(":memory:")
    db.execute("CREATE VIRTUAL TABLE said USING fts5(text, tokenize='porter unicode61')")
    db.executemany("INSERT INTO said(rowid, text) VALUES(?, ?)", [(at, said.text) for at, said in enumerate(corpus.docs)])
    matrix = None if embedder is None else embedder.embed([said.text or " " for said in corpus.docs])
    for asked in corpus.queries:
        began = time.perf_counter()
        scores = _floor_scores(db, asked)
        top = max(scores.values(), default=1.0) or 1.0
        scores = {at: score / top for at, score in scores.items()}
        if matrix is not None and embedder is not None:
            cosines = (matrix @ embedder.embed([asked.text])[0]).tolist()
            scores = {at: (scores.get(at, 0.0) + cosine) / 2 for at, cosine in enumerate(cosines)}
        best = sorted(scores, key=lambda at: -scores[at])[:500]
        ms = 1000 * (time.perf_counter() - began)
        listed = [RankedTurn(corpus.docs[at].id, scores[at], cost_of(corpus.docs[at].text)) for at in best]
        yield RecallLine(corpus.name, asked.id, listed, ms)
    db.close()


def _floor_scores(db: apsw.Connection, asked: CorpusQuery) -> dict[int, float]:
    words = " OR ".join(f'"{word}"' for word in dict.fromkeys(re.findall(r"\w+", asked.text.lower())))
    if not words:
        return {}
    found = db.execute("SELECT rowid, -bm25(said) FROM said WHERE said MATCH ? ORDER BY rank LIMIT 500", (words,))
    return {int(at): float(score) for at, score in found}


def written(rows: Iterable[RecallLine], path: Path) -> None:
    """Write rankings as JSON lines, each with `name`, `query`, `ranked`, `ms`."""
    with path.open("wb") as file:
        for row in rows:
            file.write(msgspec.json.encode(row) + b"\n")

"""Long-term memory at scale: how fast facts are stored and found, and what they take.

Made-up facts are stored as one user's memory, in batches, and asked for. Beside Kilburn, in the same run: the plain
floor (SQLite's FTS5 and an exact scan with NumPy), and other systems where a Python that has them is named. All get
the same vectors, hashed from the words: no model takes part, so what is found says nothing about meaning. The
questions' vectors are made beforehand, so that times are beyond the embedding.

    report = evaluate([10_000])
    print(report.table())
"""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import chain, islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import KilburnError, MissingExtra, SpecError
from kilburn.move import Add
from kilburn.opening import Store
from kilburn.retrieval import Embedder
from kilburn.search.choice import vectors_for
from kilburn_lab.evals import scale_peers
from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.scale_facts import facts, questions
from kilburn_lab.evals.scale_peers import TOP, answered, memory_of
from kilburn_lab.evals.scale_report import ScaleReport, ScaleRow
from kilburn_lab.evals.scale_vectors import WordVectors

USER = "ana"
BATCH = 1000
"""Facts that are stored at once."""

HITS = 1000
"""Tokens that they may take; these facts take about 15 each."""

SINGLE = 200
"""Facts that are stored one by one, of the first tenth at most."""

CANDIDATES = 50
"""Of each arm of the floor."""

PEERS = tuple(scale_peers.SYSTEMS)
PEER_FACTS = 10_000  # other systems get no more: they are slow

Say = Callable[[int], None]


def evaluate(
    counts: Sequence[int] = (5000,),
    *,
    many: int = 200,
    seed: int = 0,
    peers: Mapping[str, str] | None = None,
    progress: Progress = unwatched,
) -> ScaleReport:
    """Measure each number of facts, each system in an operating-system process of its own.

    Args:
        counts: numbers of facts.
        many: questions.
        seed: of the facts and questions.
        peers: of the systems in `PEERS`, which Python has them.
        progress: called with the facts that are done, of all systems, and their total.

    Raises:
        SpecError: a number below 1, or no such system. MissingExtra: no NumPy. Unavailable: another system failed.
    """
    if not counts or min(*counts, many) < 1:
        raise SpecError(f"counts={list(counts)}, questions={many}", advice="give numbers of 1 or more")
    others = dict(peers or {})
    check_known("system", others, PEERS)
    try:
        import numpy as np  # noqa: F401 -- only whether it is there
    except ImportError:
        raise MissingExtra("numpy", "embed") from None
    done, total = 0, 2 * sum(counts)
    rows: list[ScaleRow] = []

    def say(number: int) -> None:
        progress(done + number, total)

    say(0)
    for count in dict.fromkeys(counts):
        with tempfile.TemporaryDirectory(prefix="kilburn-scale-") as folder:
            for system in (_Kilburn, _Floor):
                made = _apart(system.fill, say, str(Path(folder)), count, seed)
                rows.append(
                    ScaleRow(system=system.name, count=count, **made, **_apart(system.ask, say, folder, count, many, seed))
                )
                done += count
            for name, python in others.items():
                if count <= PEER_FACTS:
                    rows.append(ScaleRow(system=name, count=count, **_peer(name, python, Path(folder), count, many, seed)))
    return ScaleReport(questions=many, seed=seed, embedder=WordVectors().name, rows=rows)


def _apart(work: Callable[..., dict[str, float]], say: Say, *arguments: Any) -> dict[str, float]:
    """What a function returns, run in a process of its own, so that its memory is its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_working, args=(there, work, arguments), daemon=True)
    process.start()
    there.close()
    try:
        while isinstance(found := here.recv(), int):
            say(found)
    except EOFError:
        process.join()
        raise SpecError(f"the measurement died with status {process.exitcode}", advice="give it more memory") from None
    finally:
        process.join(timeout=5)
        process.kill()
    if isinstance(found, Exception):
        raise found
    return dict(found)


def _working(there: Connection, work: Callable[..., dict[str, float]], arguments: Sequence[Any]) -> None:
    try:
        there.send(work(there.send, *arguments))
    except KilburnError as error:
        there.send(error)


class _Ready:
    """An embedder with a memory of some texts' vectors, which also counts the seconds that the others took."""

    def __init__(self, inner: Embedder, texts: Sequence[str] = ()) -> None:
        self.inner, self.name, self.dimensions = inner, inner.name, inner.dimensions
        self.seconds = 0.0
        self.known = dict(zip(texts, inner.embed(list(texts)), strict=True)) if texts else {}

    def embed(self, texts: Sequence[str]) -> Any:
        """The rows that are known, or new ones."""
        import numpy as np

        if all(text in self.known for text in texts):
            return np.stack([self.known[text] for text in texts])
        began = time.perf_counter()
        made = self.inner.embed(texts)
        self.seconds += time.perf_counter() - began
        return made


def _parts(count: int, seed: int) -> tuple[list[str], Iterable[list[str]]]:
    """The facts that are stored one by one, and the others in batches."""
    every = facts(count, seed)
    first = list(islice(every, min(SINGLE, count // 10)))

    def batches() -> Iterator[list[str]]:
        while batch := list(islice(every, BATCH)):
            yield batch

    return first, batches()


def _rates(first: int, alone: float, rest: int, stored: float, embedded: float) -> dict[str, float]:
    """Facts a second: so many one by one in these seconds, and the rest in batches, whose vectors took further seconds."""
    rates = {"rate": rest / stored, "rate_vectors": rest / (stored + embedded)}
    return rates | ({"single": first / alone} if first else {})


class _Kilburn:
    """Kilburn: a user's memory in a file, filled by its collection, asked through the store."""

    name = "kilburn"

    @staticmethod
    def fill(say: Say, folder: str, count: int, seed: int) -> dict[str, float]:
        path = Path(folder) / "kilburn.db"
        first, batches = _parts(count, seed)
        done = len(first)
        with _opened(path, None) as store:
            memory = store.memory(USER)
            began = time.perf_counter()
            for text in first:
                memory.remember(text)
            alone = time.perf_counter() - began
            began = time.perf_counter()
            for batch in batches:
                memory.collection.apply(*(Add(text=text) for text in batch))
                done += len(batch)
                say(done // 2)
            stored = time.perf_counter() - began
            ready = _Ready(WordVectors())
            began = time.perf_counter()
            with closing(vectors_for(store.backend, ready)) as vectors:
                vectors.catch_up(progress=lambda at: say((count + at) // 2), batch=BATCH)
            embedded = time.perf_counter() - began - ready.seconds
            peak = memory_of("VmHWM")
        disk = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        rest = count - len(first)
        rates = _rates(len(first), alone, rest, stored, embedded * rest / count)
        return {**rates, "disk": float(disk), "peak": peak}

    @staticmethod
    def ask(say: Say, folder: str, count: int, many: int, seed: int) -> dict[str, float]:
        asked = questions(count, many, seed)
        found: dict[str, float] = {}
        for name, ready in (("words_", None), ("", _Ready(WordVectors(), [question for question, _ in asked]))):
            began = time.perf_counter()
            with _opened(Path(folder) / "kilburn.db", ready) as store:

                def find(question: str) -> list[str]:
                    hits = store.search(question, tokens=HITS, where="facts", user=USER, limit=TOP, abstain=True)
                    return [hit.text for hit in sorted(hits, key=lambda hit: -hit.score)]

                find(asked[0][0])
                found |= {f"{name}first": time.perf_counter() - began}
                found |= {f"{name}{figure}": value for figure, value in answered(asked, find).items()}
                found["rss"] = memory_of("VmRSS")
        return found


@contextmanager
def _opened(path: Path, embedder: Embedder | None) -> Iterator[Store]:
    backend = Sqlite(str(path))
    meanings = closing(vectors_for(backend, embedder)) if embedder is not None else nullcontext()
    with meanings as vectors, Store(backend, Budget(8000), tokenizer=f"chars/{CHARACTERS}", vectors=vectors) as store:
        yield store


class _Floor:
    """The plain floor: a table, FTS5 with its own rank, and all vectors in one array of NumPy."""

    name = "floor"

    @staticmethod
    def fill(say: Say, folder: str, count: int, seed: int) -> dict[str, float]:
        path, done, ready = Path(folder) / "floor.db", 0, _Ready(WordVectors())
        first, batches = _parts(count, seed)
        db = sqlite3.connect(path, isolation_level=None)
        db.executescript(
            "PRAGMA journal_mode = WAL; CREATE TABLE fact(number INTEGER PRIMARY KEY, text TEXT);"
            "CREATE TABLE vector(number INTEGER PRIMARY KEY, numbers BLOB);"
            "CREATE VIRTUAL TABLE words USING fts5(text, content='fact', content_rowid='number');"
        )
        # Of facts that come one by one, and of those in batches: of the texts, and of the vectors.
        single, many = [0.0, 0.0], [0.0, 0.0]
        for batch in chain(([text] for text in first), batches):
            seconds = single if done < len(first) else many
            began = time.perf_counter()
            numbered = list(enumerate(batch, done + 1))
            db.execute("BEGIN")
            db.executemany("INSERT INTO fact(number, text) VALUES(?, ?)", numbered)
            db.executemany("INSERT INTO words(rowid, text) VALUES(?, ?)", numbered)
            db.execute("COMMIT")
            seconds[0] += time.perf_counter() - began
            vectors = ready.embed(batch)
            began = time.perf_counter()
            rows = [(number, row.tobytes()) for (number, _), row in zip(numbered, vectors, strict=True)]
            db.execute("BEGIN")
            db.executemany("INSERT INTO vector(number, numbers) VALUES(?, ?)", rows)
            db.execute("COMMIT")
            seconds[1] += time.perf_counter() - began
            done += len(batch)
            say(done)
        peak = memory_of("VmHWM")
        db.close()
        disk = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
        rates = _rates(len(first), single[0], count - len(first), *many)
        return {**rates, "disk": float(disk), "peak": peak}

    @staticmethod
    def ask(say: Say, folder: str, count: int, many: int, seed: int) -> dict[str, float]:
        import numpy as np

        asked = questions(count, many, seed)
        ready = _Ready(WordVectors(), [question for question, _ in asked])
        began = time.perf_counter()
        db = sqlite3.connect(Path(folder) / "floor.db", isolation_level=None)
        every = np.empty((count, ready.dimensions), np.float32)
        for number, vector in db.execute("SELECT number, numbers FROM vector"):
            every[number - 1] = np.frombuffer(vector, np.float32)

        def words(question: str) -> dict[int, float]:
            query = " OR ".join(f'"{word}"' for word in question.strip("?").split())
            rows = db.execute("SELECT rowid, -rank FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?", (query, CANDIDATES))
            return dict(rows.fetchall())

        def meaning(question: str) -> dict[int, float]:
            scores = every @ ready.embed([question])[0]
            best = np.argpartition(scores, -min(CANDIDATES, count))[-CANDIDATES:]
            return {int(at) + 1: float(scores[at]) for at in best}

        def texts(scores: Mapping[int, float]) -> list[str]:
            best = sorted(scores, key=lambda number: -scores[number])[:TOP]
            return [db.execute("SELECT text FROM fact WHERE number = ?", (number,)).fetchone()[0] for number in best]

        def both(question: str) -> list[str]:
            blended: dict[int, float] = {}
            for arm in (words(question), meaning(question)):
                most = max(arm.values(), default=1.0)
                for number, score in arm.items():
                    blended[number] = blended.get(number, 0.0) + score / most / 2
            return texts(blended)

        both(asked[0][0])
        found = {"first": time.perf_counter() - began, **answered(asked, both)}
        found |= {f"words_{figure}": value for figure, value in answered(asked, lambda question: texts(words(question))).items()}
        found["rss"] = memory_of("VmRSS")
        db.close()
        return found


def _peer(name: str, python: str, folder: Path, count: int, many: int, seed: int) -> dict[str, float]:
    import numpy as np

    if not (folder / "facts.npy").exists():
        texts, asked, embedder = list(facts(count, seed)), questions(count, many, seed), WordVectors()
        (folder / "facts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
        (folder / "questions.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in asked), encoding="utf-8")
        np.save(folder / "facts.npy", embedder.embed(texts))
        np.save(folder / "questions.npy", embedder.embed([question for question, _ in asked]))
    ran = subprocess.run([python, scale_peers.__file__, name, str(folder)], capture_output=True, text=True, check=False)
    if ran.returncode:
        last = ran.stderr.strip().splitlines()[-1:] or ["no message"]
        raise SpecError(f"{name} failed: {last[0]}", advice=f"give a Python that has it: --peer {name}=/path/to/python")
    found: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
    return found

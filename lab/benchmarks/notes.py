"""What one edit of a note costs, durable, by how many notes and versions there are; and what opening them and their list cost.

Rounds of an edit and of a bare synced insert of the same text are interleaved, so that a noisy moment hits both.
"""

from __future__ import annotations

import tempfile
import time
from itertools import islice
from pathlib import Path

import apsw

import kilburn
from corpus import texts
from figures import Row, emit, median, parser, quantile

SIZE = 2000
"""Characters of a note."""


def measure(folder: Path, many: int, edits: int, rounds: int) -> Row:
    """The figures of an owner with so many notes, one of which was edited so often."""
    bare = apsw.Connection(str(folder / f"bare-{many}-{edits}.db"))
    bare.pragma("journal_mode", "WAL")
    bare.pragma("synchronous", "FULL")
    bare.execute("CREATE TABLE note(id INTEGER PRIMARY KEY, body TEXT)")
    source = texts(SIZE)
    path = folder / f"{many}-{edits}.db"
    with kilburn.open(str(path), tokenizer="chars/4", embedder=None, durable=False) as store:
        notes = store.notes("ana")
        for number, text in enumerate(islice(source, many)):
            notes.write(f"notes/{number}", text)
        for text in islice(source, edits):
            notes.write("notes/0", text)
    with kilburn.open(str(path), tokenizer="chars/4", embedder=None) as store:
        notes = store.notes("ana")
        start = time.thread_time()
        notes.list()
        first = time.thread_time() - start
        start = time.thread_time()
        notes.list()
        again = time.thread_time() - start
        took: list[tuple[float, float, float]] = []
        for text in islice(source, rounds):
            seen = notes.read("notes/0").digest
            begun, worked = time.perf_counter(), time.thread_time()
            notes.write("notes/0", text, seen=seen)
            written, spent = time.perf_counter() - begun, time.thread_time() - worked
            begun = time.perf_counter()
            bare.execute("INSERT INTO note(body) VALUES(?)", (text,))
            took.append((written, spent, time.perf_counter() - begun))
    bare.close()
    edited, worked_on, synced = zip(*took, strict=True)
    return {
        "notes": many,
        "versions": edits,
        "edit p50 ms": 1000 * median(edited),
        "p95 ms": 1000 * quantile(edited, 0.95),
        "edit cpu ms": 1000 * median(worked_on),
        "bare insert ms": 1000 * median(synced),
        "x bare": median(edited) / median(synced),
        "first list cpu ms": 1000 * first,
        "list cpu ms": 1000 * again,
    }


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--notes", type=int, action="append", help="notes; 10 and 1000 where none is given")
    options.add_argument("--versions", type=int, action="append", help="edits of one before; 10 and 2000 where none is given")
    options.add_argument("--rounds", type=int, default=200)
    asked = options.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for many in asked.notes or [10, 1000]:
            for edits in asked.versions or [10, 2000]:
                rows.append(measure(Path(folder), many, edits, asked.rounds))
    rows = [{**row, "x": float(row["edit cpu ms"]) / float(rows[0]["edit cpu ms"])} for row in rows]
    emit("notes", rows, asked.json, f"A note of {SIZE:,} characters; x: processor time against the first row.")


if __name__ == "__main__":
    main()

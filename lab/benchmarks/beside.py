"""What the memory part of a prompt costs, beside many facts: notes that stand there, and what a search for the words finds.

Baseline of the same run: the search alone. Times are of this thread's processor.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import kilburn
from corpus import texts
from figures import Row, emit, median, parser, quantile
from kilburn.kernel.store import Store
from kilburn.memory.brought import known
from kilburn.memory.core_memory import CoreMemory
from kilburn.move import Add

BATCH = 1000
"""Facts that are written at a time."""


def spent(work: Callable[[], object]) -> float:
    """Milliseconds of this thread's processor."""
    start = time.thread_time()
    work()
    return 1000 * (time.thread_time() - start)


def fill(store: Store, facts: int) -> list[str]:
    """Write facts of about 80 characters; returns questions, each with three words of one of them."""
    chance, memory = random.Random(0), store.memory("ana").collection
    said = [f"Fact {at}: {' '.join(text.split())}" for at, text in enumerate(islice(texts(80), facts))]
    for at in range(0, facts, BATCH):
        memory.apply(*(Add(text=text) for text in said[at : at + BATCH]))
    asked = [[word for word in text.split()[2:] if len(word) > 4] or ["nothing"] for text in chance.sample(said, min(200, facts))]
    return [f"What do you know about {' and '.join(chance.sample(words, min(3, len(words))))}?" for words in asked]


def measure(folder: Path, facts: int, notes: int, rounds: int, embedder: str | None) -> Row:
    """The figures beside so many facts."""
    with kilburn.open(str(folder / f"{facts}.db"), tokenizer="chars/4", embedder=embedder, durable=False) as store:
        questions = fill(store, facts)
        kept = store.notes("ana")
        names = [f"core/{at}" for at in range(notes)]
        for name, text in zip(names, texts(1000), strict=False):
            kept.write(name, text)
        core = CoreMemory(kept, "core")
        took: list[tuple[float, float, float]] = []
        for at in range(rounds):
            question = questions[at % len(questions)]
            shown = spent(core.shown)
            whole = shown + spent(lambda question=question: known(store, question, 1000, "ana", notes=core.shown()))  # type: ignore[misc]
            search = spent(lambda question=question: store.search(question, 1000, None, user="ana", abstain=True))  # type: ignore[misc]
            took.append((whole - shown, shown, search))
    part, shown_ms, search_ms = zip(*took, strict=True)
    return {
        "facts": facts,
        "notes": notes,
        "part p50 ms": median(part),
        "p95 ms": quantile(part, 0.95),
        "notes alone p50 ms": median(shown_ms),
        "search alone p50 ms": median(search_ms),
    }


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--facts", type=int, action="append", help="facts; 1000 and 100000 where none is given")
    options.add_argument("--notes", type=int, default=3, help="notes that stand in the prompt, of 1,000 characters each")
    options.add_argument("--rounds", type=int, default=200)
    options.add_argument("--embedder", help="finds by meaning too, such as minilm")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = [
            measure(Path(folder), facts, asked.notes, asked.rounds, asked.embedder) for facts in asked.facts or [1000, 100_000]
        ]
    rows = [{**row, "x": float(row["part p50 ms"]) / max(float(rows[0]["part p50 ms"]), 1e-9)} for row in rows]
    emit(
        "beside",
        rows,
        asked.json,
        "The memory part of a prompt, 1,000 tokens, in ms of processor time; x: against the first row.",
    )


if __name__ == "__main__":
    main()

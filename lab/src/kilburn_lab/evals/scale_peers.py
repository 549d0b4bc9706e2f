"""Other systems under the measurement of `kilburn_lab.evals.scale`, each in a Python of its own.

    python scale_peers.py SYSTEM FOLDER

The folder has `facts.jsonl` (one string a line), `questions.jsonl` (pairs of a question and its fact), and `facts.npy`
and `questions.npy` with their vectors. The figures go to standard output as one line of JSON. This file is run by
itself and imports nothing of Kilburn, which need not be installed there.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

TOP = 10
"""A hit is a fact among so many that were found first."""

Found = Callable[[str], list[str]]
System = Callable[[Path, list[str], Callable[[Sequence[str]], Any]], tuple[Callable[[], None], Found]]


def mem0(folder: Path, texts: list[str], embed: Callable[[Sequence[str]], Any]) -> tuple[Callable[[], None], Found]:
    """mem0's open-source package over its default, Qdrant in a folder; `infer=False`, so no model is asked."""
    os.environ.update(MEM0_TELEMETRY="False", OPENAI_API_KEY="none", MEM0_DIR=str(folder / "mem0"))
    from mem0 import Memory

    class Embedding:
        """The vectors that were made beforehand."""

        config = None

        def embed(self, text: str, action: str = "") -> list[float]:
            """One vector."""
            return list(map(float, embed([text])[0]))

        def embed_batch(self, several: list[str], action: str = "") -> list[list[float]]:
            """Several vectors."""
            return [list(map(float, row)) for row in embed(several)]

    store = {"collection_name": "facts", "path": str(folder / "qdrant"), "on_disk": True}
    store["embedding_model_dims"] = len(embed([texts[0]])[0])
    memory = Memory.from_config(
        {"vector_store": {"provider": "qdrant", "config": store}, "history_db_path": str(folder / "history.db")}
    )
    memory.embedding_model = Embedding()

    def fill() -> None:
        for text in texts:
            memory.add(text, user_id="ana", infer=False)

    def find(question: str) -> list[str]:
        try:
            found = memory.search(question, filters={"user_id": "ana"}, top_k=TOP)
        except (TypeError, ValueError):
            found = memory.search(question, user_id="ana", limit=TOP)
        return [hit["memory"] for hit in found["results"]]

    return fill, find


def langgraph(folder: Path, texts: list[str], embed: Callable[[Sequence[str]], Any]) -> tuple[Callable[[], None], Found]:
    """LangGraph's InMemoryStore with an index; it writes nothing to disk."""
    from langgraph.store.base import PutOp
    from langgraph.store.memory import InMemoryStore

    def rows(several: Sequence[str]) -> list[list[float]]:
        return [list(map(float, row)) for row in embed(several)]

    store = InMemoryStore(index={"dims": len(embed([texts[0]])[0]), "embed": rows, "fields": ["text"]})

    def fill() -> None:
        for start in range(0, len(texts), 500):
            store.batch([PutOp(("ana",), str(at), {"text": texts[at]}) for at in range(start, min(start + 500, len(texts)))])

    def find(question: str) -> list[str]:
        return [hit.value["text"] for hit in store.search(("ana",), query=question, limit=TOP)]

    return fill, find


SYSTEMS: dict[str, System] = {"mem0": mem0, "langgraph": langgraph}


def answered(asked: Sequence[tuple[str, str]], find: Callable[[str], Sequence[str]]) -> dict[str, float]:
    """The middle and the 95th of 100 of the milliseconds that questions take, the middle one of those that the processor
    worked for them, and the share that are answered."""
    waits, work, hits = [], [], 0
    for question, wanted in asked:
        began, worked = time.perf_counter(), time.process_time()
        found = find(question)
        work.append(1000 * (time.process_time() - worked))
        waits.append(1000 * (time.perf_counter() - began))
        hits += wanted in found[:TOP]
    return {
        "p50": median(waits),
        "cpu": median(work),
        "p95": quantiles(waits, n=20, method="inclusive")[-1] if len(waits) > 1 else waits[0],
        "hits": hits / len(asked),
    }


def memory_of(name: str) -> float:
    """Bytes of this process's memory: VmRSS, what it has now, or VmHWM, what it had at most."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").split()
    return 1024.0 * int(status[status.index(f"{name}:") + 1])


def main(name: str, folder: Path) -> dict[str, float]:
    """Fill the system, ask it everything, and return the figures."""
    import numpy as np

    texts = [json.loads(line) for line in (folder / "facts.jsonl").read_text(encoding="utf-8").splitlines()]
    asked = [json.loads(line) for line in (folder / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    known = dict(zip(texts, np.load(folder / "facts.npy", mmap_mode="r"), strict=True))
    known.update(zip((question for question, _ in asked), np.load(folder / "questions.npy"), strict=True))
    own = folder / name
    own.mkdir()
    fill, find = SYSTEMS[name](own, texts, lambda several: [known[text] for text in several])
    began = time.perf_counter()
    fill()
    filled = time.perf_counter() - began
    find(asked[0][0])
    return {
        "rate": len(texts) / filled,
        **answered(asked, find),
        "disk": float(sum(path.stat().st_size for path in own.rglob("*") if path.is_file())),
        "rss": memory_of("VmRSS"),
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], Path(sys.argv[2]))))

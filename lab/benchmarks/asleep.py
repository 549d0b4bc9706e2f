"""What a turn of a conversation costs while sleep-time work goes on beside it.

Baseline of the same run: the same turns without it. Turns of both are interleaved, so that a noisy moment hits both. The model
that works beside them waits for as long as it is told, outside the interpreter, as one behind a network does.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kilburn
from corpus import texts
from figures import Row, emit, parser, quantile
from kilburn.agents.loop import Agent
from kilburn.memory.sleep import SleepTime
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request

SIZE = 400
"""Characters of what the user says."""


class _Saying:
    """A model that says a text after so many seconds."""

    name, form, tokenizer = "saying", "chat", "chars/4"
    context: int | None = None

    def __init__(self, text: str, seconds: float = 0.0) -> None:
        self.text, self.seconds, self.asked = text, seconds, 0

    def stream(self, request: Request) -> Iterator[Any]:
        """The text."""
        self.asked += 1
        time.sleep(self.seconds)
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=f"{self.text} {self.asked}"),)))


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--turns", type=int, default=200)
    options.add_argument("--seconds", type=float, default=0.02, help="for one answer of the model that works beside")
    asked = options.parse_args()
    took: dict[str, list[tuple[float, float]]] = {"alone": [], "beside sleep time": []}
    with (
        tempfile.TemporaryDirectory(dir=".") as folder,
        kilburn.open(str(Path(folder) / "a.db"), window=8000, policy="fifo", tokenizer="chars/4", embedder=None) as store,
    ):
        sessions = [store.session(name, user=name) for name in ("alone", "beside")]
        for session in sessions:
            store.notes(session.info.user).write("core/human", "Ana drinks tea.")
        writer = _Saying("Ana drinks tea.", asked.seconds)
        with SleepTime(sessions[1], "consolidate", model=writer, turns=1, idle=0) as sleep:
            agents = [
                Agent(_Saying("Noted."), [], session, notes=["core/human"], recall=300, learn=learn)
                for session, learn in zip(sessions, (None, sleep), strict=True)
            ]
            for _, text in zip(range(asked.turns), texts(SIZE), strict=False):
                for agent, times in zip(agents, took.values(), strict=True):
                    begun, used = time.perf_counter(), time.thread_time()
                    agent.run(text)
                    times.append((time.perf_counter() - begun, time.thread_time() - used))
    rows: list[Row] = []
    for what, times in took.items():
        wall, used = ([1000 * each[at] for each in times] for at in (0, 1))
        rows.append(
            {"turns": what, "p50 ms": quantile(wall, 0.5), "p95 ms": quantile(wall, 0.95), "cpu p95 ms": quantile(used, 0.95)}
        )
    rows = [{**row, "x": float(row["p95 ms"]) / float(rows[0]["p95 ms"])} for row in rows]
    emit("asleep", rows, asked.json, f"{writer.asked} answers of the model beside them; x: p95 against the first row.")


if __name__ == "__main__":
    main()

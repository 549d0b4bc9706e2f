"""How far a Reasoning Cache carries at constant context: tasks solved, and steps reached, against rounds.

A recurrence of N steps is continued in rounds of H_R tokens with a summary of H_S between them. Baseline of
the same run: one reply that fills the same context. The public `Stepper` makes no mistakes, so its figures
are the mechanism's alone; `--model` puts a language model in its place, with additions only, which a small
one can nearly do.
"""

from __future__ import annotations

import time

from figures import Row, emit, parser
from kilburn.kernel.resolve import resolve
from kilburn.models.weights import catalogue
from kilburn_lab.reasoning_cache import Schedule
from recurrences import Recurrence, Run, Stepper, recurrences, solve


def rows_of(tasks: list[Recurrence], model: object, schedules: list[Schedule], context: int) -> list[Row]:
    """A row for one reply that takes all of the context, then one for each schedule."""
    rows: list[Row] = []
    most = context - 60 - max(len(task.problem) for task in tasks) // 3
    single = Schedule(rounds=1, reason=most, summary=1, temperature=0.0, seed=1)
    for name, schedule in [("one reply", single), *((f"T={schedule.rounds}", schedule) for schedule in schedules)]:
        began = time.perf_counter()
        runs: list[Run] = [solve(task, model, schedule) for task in tasks]  # type: ignore[arg-type]
        seconds = time.perf_counter() - began
        reached = sum(run.reached for run in runs) / len(runs)
        base = float(rows[0]["steps reached"]) if rows else reached
        rows.append(
            {
                "run": name, "H_R": schedule.reason, "solved": sum(run.right for run in runs), "of": len(runs),
                "steps reached": reached, "x": reached / base if base else 0.0,
                "horizon": max(run.reasoning.horizon for run in runs), "peak context": max(run.reasoning.peak for run in runs),
                "lost summaries": sum(
                    one.summary_outcome not in ("done", "truncated") for run in runs for one in run.reasoning.rounds
                ),
                "seconds": seconds,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, action="append", help="N; 50, 100, 200 and 400 where none is given")
    options.add_argument("--tasks", type=int, default=20)
    options.add_argument("--rounds", type=int, action="append", help="T; 1, 2, 4, 8 and 16 where none is given")
    options.add_argument("--reason", type=int, default=64, help="H_R in tokens")
    options.add_argument("--summary", type=int, default=16, help="H_S in tokens")
    options.add_argument("--context", type=int, default=256, help="tokens of prompt and reply together")
    options.add_argument("--model", default="", help="a model's spec or name, such as qwen; the Stepper where left out")
    options.add_argument("--seed", type=int, default=1)
    asked = options.parse_args()
    tasks = recurrences(asked.tasks, asked.steps or [50, 100, 200, 400], seed=asked.seed, factor=1 if asked.model else None)
    named = asked.model in {item.name for item in catalogue()}
    model = (
        resolve("models", f"local({asked.model!r}, context=1024)" if named else asked.model)
        if asked.model
        else Stepper(asked.context)
    )
    schedules = [
        Schedule(rounds=rounds, reason=asked.reason, summary=asked.summary, temperature=0.0, seed=1)
        for rounds in asked.rounds or [1, 2, 4, 8, 16]
    ]
    emit(
        "horizon",
        rows_of(tasks, model, schedules, asked.context),
        asked.json,
        "Peak context: prompt and the reply it was allowed.",
    )


if __name__ == "__main__":
    main()

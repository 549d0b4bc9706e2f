"""What AgentFold's window holds after many turns of recorded runs, folded by rule, against the raw transcript.

Runs are strung together, the longest first, until there are turns enough: of a file of recorded runs
(see kilburn_lab.evals.trajectories), or made up where none is given. The window is larger than all of them, so
that nothing leaves for want of room; a thought with its action is one message, what came back the next.
"""

from __future__ import annotations

import time
from itertools import islice

import kilburn
from figures import Row, emit, parser, quantile
from kilburn.wire.trajectory import Step, Trajectory
from kilburn_lab.evals.trajectories import read, synthetic

WINDOW = 1_000_000


def steps_of(path: str | None, turns: int) -> tuple[list[Step], list[Trajectory]]:
    """The steps to play, and the runs that they are of."""
    runs = list(read(path)) if path else list(synthetic(max(4, turns // 8), 0))
    runs.sort(key=lambda run: (-len(run.steps), run.id))
    steps: list[Step] = []
    used: list[Trajectory] = []
    for run in runs:
        if len(steps) >= turns:
            break
        steps += run.steps
        used.append(run)
    return steps[:turns], used


def measure(steps: list[Step], head: str, policy: str, marks: list[int]) -> list[Row]:
    """A row for each number of turns; the share is of what the same transcript costs with nothing folded."""
    rows: list[Row] = []
    with kilburn.open(":memory:", window=WINDOW, policy=policy, tokenizer="chars/4") as store:
        session = store.session("fold")
        session.append({"role": "user", "content": head})
        times: list[float] = []
        for turn, step in enumerate(steps, 1):
            start = time.perf_counter()
            session.append({"role": "assistant", "content": f"{step.thought}\n{step.action}"})
            times.append(time.perf_counter() - start)
            session.append({"role": "user", "content": step.observation})
            if turn in marks:
                tier = session.window
                raw, shown = tier.seen, session.render().tokens
                folds = [page for page in tier.resident() if page.depth]
                rows.append(
                    {
                        "turns": turn, "raw": raw, "x": 1.0, "window": shown, "x raw": shown / raw, "items": len(folds),
                        "folded tokens": sum(page.tokens for page in folds),
                        "p50 ms": quantile(times, 0.5) * 1e3, "p95 ms": quantile(times, 0.95) * 1e3,
                    }
                )  # fmt: skip
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--data", help="recorded runs, in any form that `kilburn replay` reads; made-up ones where none are given"
    )
    options.add_argument("--turns", type=int, action="append", help="after how many turns to look; 12 to 200 where none is given")
    options.add_argument("--policy", default="agentfold")
    asked = options.parse_args()
    marks = sorted(asked.turns or [12, 25, 50, 100, 200])
    steps, runs = steps_of(asked.data, marks[-1])
    named = ", ".join(run.id for run in islice(runs, 5))
    head = runs[0].head[-1].content if runs[0].head else "Go on."
    note = f"{len(runs)} runs, the longest first: {named}{', ...' if len(runs) > 5 else ''}. Tokens are of four characters."
    emit("fold", measure(steps, head, asked.policy, marks), asked.json, note)


if __name__ == "__main__":
    main()

"""Replay prompts of many sessions through a KV cache: hit rate, and regret to an optimum that knows the future.

Example:

    kilburn lab kv --capacity 1000000
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kilburn.errors import MissingExtra
from kilburn_lab.cli.verbs import HALF, Option, Work, verb
from kilburn_lab.evals.kv_report import CacheReport
from kilburn_lab.evals.measure import Progress

MADE = 60
"""Made-up traces where no file is given, and all are wanted."""


def _measured(
    *,
    data: Path | None = None,
    traces: int | None = 15,
    half: str = "",
    seed: int = 0,
    capacities: Sequence[int] = (),
    policies: Sequence[str] = (),
    progress: Progress,
    **options: Any,
) -> CacheReport:
    try:
        from kilburn_lab.evals.kv import CAPACITIES, POLICIES, evaluate, sample
        from kilburn_lab.evals.kv_traces import read, synthetic
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "kilburn_kv", "kv") from error
    every = synthetic(traces or MADE, seed) if data is None else read(data)
    return evaluate(
        sample(list(every), seed, traces, half),
        seed=seed,
        capacities=capacities or CAPACITIES,
        policies=policies or POLICIES,
        progress=progress,
        **options,
    )


def _arms(subs: bool | None) -> tuple[bool, ...]:
    return (True, False) if subs is None else (subs,)


verb(
    "kv",
    _measured,
    Work("replaying", "replay", 0.05, {"traces": None}),
    __doc__,
    data=Option("Traces, one per line, also .gz; by default synthetic.", "FILE"),
    capacities=Option("Tokens of the cache; may be repeated. 1, 2 and 4 million by default.", "TOKENS", "--capacity"),
    policies=Option("An eviction order; may be repeated. All by default; always lru and min.", "NAME", "--policy"),
    traces=Option("Only this many traces, chosen at random.", "N", "--sample", least=1),
    half=HALF._replace(help="Only the traces of this half, by their id; all by default."),
    weavings=Option("Merge them this many times, with consecutive seeds; hits are summed.", "N", least=1, kind=int, default=1),
    seed=Option("Random seed of the choice, the sessions' start times, synthetic traces and intervals."),
    hours=Option("Distribute the start of all sessions evenly over this many hours.", kind=float, default=10.0),
    subs=Option("With or without sub-agents; both by default.", name="--sub-agents/--no-sub-agents", kind=bool | None, by=_arms),
    hold=Option(
        "All of a prompt stays until its reply is complete, as in an engine; min is lower then.", kind=bool, default=False
    ),
)

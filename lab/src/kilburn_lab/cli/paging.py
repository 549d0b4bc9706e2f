"""Score policies by future-reference survival: the share of the names needed next that the window shows.

Example:

    kilburn lab paging --data runs.jsonl.gz --window 2000 --policy hybrid --policy lru

    kilburn lab paging --all

    kilburn lab paging --data runs.jsonl.gz --all --full --workers 2 --out cells.jsonl --plot pareto.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kilburn_lab.cli.verbs import DATA, HALF, SOURCES, TOLD, Option, Work, saved_in, verb
from kilburn_lab.evals.baselines import BASELINES
from kilburn_lab.evals.outcomes import PolicyCounts
from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.paging_report import PagingReport
from kilburn_lab.evals.roster import everybody
from kilburn_lab.evals.sample import sample_of


def _measured(
    *,
    data: Path | None = None,
    sources: Path | None = None,
    windows: Sequence[int] = (2000,),
    policies: Sequence[str] = (),
    everything: bool = False,
    sample: int | None = 20,
    referring: bool = False,
    shuffle: int | None = None,
    tools: bool = False,
    reply: bool = False,
    session: int | None = None,
    half: str = "",
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    **options: Any,
) -> PagingReport:
    runs = sample_of(
        data,
        sample,
        sources=sources,
        shuffle=shuffle,
        referring=referring,
        tools=tools,
        reply=reply,
        session=session,
        half=half,
        seed=seed,
    )
    saved = saved_in(out, runs.digest, PolicyCounts, resume=resume, force=force)
    chosen = [*everybody(), *policies] if everything else [*(policies or [*BASELINES, "hybrid"])]
    return evaluate(runs, windows, chosen, saved=saved, **options)


verb(
    "paging",
    _measured,
    Work("evaluating", "run", 0.05, {"windows": (1000, 2000, 4000, 8000), "sample": None}),
    __doc__,
    like=evaluate,
    data=DATA,
    sources=SOURCES,
    windows=Option("Tokens of four characters; may be given again. 2000 by default.", name="--window"),
    policies=Option("A policy, a baseline or belady; may be given again. Baselines and hybrid by default.", "SPEC", "--policy"),
    everything=Option("All baselines and policies, and the offline optimum.", name="--all"),
    sample=Option("Only this many runs, the first ones.", least=1),
    referring=Option("Only runs that have references."),
    shuffle=Option("Replace each name by that of another run: a measure of chance.", "SEED"),
    half=HALF,
    tools=TOLD,
    reply=Option("Score the prompt before thought and action together, as for real models."),
    session=Option("Interleave runs in sessions of about this many tokens, for large windows.", "TOKENS", least=1),
    model=Option("Also score policies that can ask a model with this model.", "SPEC"),
    workers=Option("Sessions to spread the work over.", least=1),
    seed=Option("Random seed of synthetic runs and intervals."),
    out=Option("Write the result of each policy and window to this file at once.", "FILE"),
    resume=Option("Continue from the results in the file of --out."),
    worth="survival",
)

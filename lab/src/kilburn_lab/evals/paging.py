"""Future-reference survival: of the names that the agent will need next, how many does the window show?

Recorded runs are fed, event by event, to candidates: the baselines, and Kilburn sessions. Just before each action
that refers to an older output, it is checked whether the name is in the window. The head of a run is left out. One
token is four characters for all candidates. No model takes part unless one is given.

    report = evaluate(sample_of("runs.jsonl.gz"), windows=[1000, 2000], policies=["tail", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

import msgspec

from kilburn.errors import SpecError
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.baselines import BASELINES, Contender
from kilburn_lab.evals.candidate import KilburnCandidate, contender_of, model_of, policy_for, prompts
from kilburn_lab.evals.cost import Rates, rates_of
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.outcomes import Counted, PolicyCounts, ReferenceOutcome, join_cells
from kilburn_lab.evals.paging_report import PagingReport
from kilburn_lab.evals.references import KINDS, Reference
from kilburn_lab.evals.roster import Entrant, entries
from kilburn_lab.evals.rows import model_differences_of, rows_of, verdicts_of
from kilburn_lab.evals.sample import Sample
from kilburn_lab.evals.saved import SavedCells

PARTS = 6
"""A cell is split into so many pieces, so that workers finish together and progress can be shown."""


class _Job(NamedTuple):
    """One cell to measure; `number` is its place in the report."""

    number: int
    entry: Entrant
    window: int


def evaluate(
    sample: Sample,
    windows: Sequence[int],
    policies: Sequence[str],
    *,
    model: str = "",
    rates: Rates | None = None,
    workers: int = 1,
    progress: Progress = unwatched,
    saved: SavedCells[PolicyCounts] | None = None,
) -> PagingReport:
    """Score each policy at each window on a sample of runs.

    Args:
        windows: in tokens of four characters.
        policies: names of baselines, or specs of Kilburn's policies, in which `{50%}` stands for that share of
            the window; "belady" for the offline optimum. "tail" is always scored too: all are paired with it.
        model: the spec of a model. Policies that can ask are then measured twice, without it and with it.
        rates: how prompts are priced; by default by "hosted" and "local".
        workers: operating-system processes for the work.
        progress: called with the finished and the total work, in runs times windows times policies.
        saved: cells that were measured before; new ones are added to it.

    Raises:
        SpecError: a window below 1, no such policy, or arguments that do not fit.
    """
    jobs = _jobs(windows, policies, model)
    if any(job.entry.model for job in jobs):
        model_of(model)  # an unavailable model is found here, and not in a worker
    done: dict[int, PolicyCounts] = {} if saved is None else _saved_cells(jobs, saved)
    total = len(jobs) * len(sample.runs)
    so_far = len(done) * len(sample.runs)
    parts: dict[int, dict[int, PolicyCounts]] = {}
    pieces = _pieces(sample)
    progress(so_far, total)
    for job, start, cell in _measure_pieces(sample, [job for job in jobs if job.number not in done], pieces, workers):
        parts.setdefault(job.number, {})[start] = cell
        so_far += pieces[start]
        progress(so_far, total)
        if len(parts[job.number]) == len(pieces):
            done[job.number] = join_cells([part for _, part in sorted(parts.pop(job.number).items())])
            if saved is not None:
                saved.add(done[job.number])
    return _report(sample, [done[job.number] for job in jobs], rates or rates_of())


def _jobs(windows: Sequence[int], policies: Sequence[str], model: str) -> list[_Job]:
    if any(window < 1 for window in windows) or not windows:
        raise SpecError(f"windows={list(windows)!r}", advice="give one window or more, each of at least 1 token")
    pairs = [(entry, window) for window in dict.fromkeys(windows) for entry in entries(list(policies), model, window)]
    return [_Job(number, *pair) for number, pair in enumerate(pairs)]


def _saved_cells(jobs: list[_Job], saved: SavedCells[PolicyCounts]) -> dict[int, PolicyCounts]:
    """The cells that need not be measured, by the number of their job."""
    found = {job.number: saved.find(job.entry.label, job.entry.at(job.window), job.entry.model, job.window) for job in jobs}
    return {number: cell for number, cell in found.items() if cell is not None}


def _report(sample: Sample, done: list[PolicyCounts], rates: Rates) -> PagingReport:
    rows = rows_of(done, rates, sample.seed)
    return PagingReport(
        sample=sample.words,
        runs=len(sample.runs),
        references=sample.references,
        copies=sample.count("copy"),
        rates=rates,
        rows=rows,
        verdicts=verdicts_of(rows),
        losses=model_differences_of(done, sample.seed),
        outcomes=[outcome for cell in done for outcome in cell.outcomes],
    )


def _pieces(sample: Sample) -> dict[int, int]:
    """Where each piece of the runs starts, and how many runs it has."""
    count = len(sample.runs)
    size = -(-count // PARTS)
    return {start: min(size, count - start) for start in range(0, count, size)}


def _measure_pieces(
    sample: Sample, jobs: list[_Job], pieces: dict[int, int], workers: int
) -> Iterator[tuple[_Job, int, PolicyCounts]]:
    """Each piece of each job when it is finished; those that are likely to take longest are started first."""
    order = sorted(jobs, key=lambda job: (not job.entry.model, job.entry.spec in BASELINES, job.window))
    if workers < 2 or not jobs:
        for job in order:
            for start, size in pieces.items():
                yield job, start, measure(sample, job.entry, job.window, slice(start, start + size))
        return
    with ProcessPoolExecutor(workers, get_context("spawn"), _keep_sample, (sample,)) as pool:
        waiting = {
            pool.submit(_piece, job.entry, job.window, start, size): (job, start)
            for job in order
            for start, size in pieces.items()
        }
        try:
            for future in as_completed(waiting):
                yield *waiting[future], future.result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


_samples: list[Sample] = []
"""The data of a worker process: sent once, not with each piece."""


def _keep_sample(sample: Sample) -> None:
    _samples[:] = [sample]


def _piece(entry: Entrant, window: int, start: int, size: int) -> PolicyCounts:
    return measure(_samples[0], entry, window, slice(start, start + size))


def measure(sample: Sample, entry: Entrant, window: int, which: slice = slice(None)) -> PolicyCounts:
    """Feed the runs of a sample, or some of them, to one policy at one window."""
    spec = entry.at(window)
    cell = PolicyCounts(policy=entry.label, window=window, spec=spec, model=entry.model)
    model = model_of(entry.model)
    for run in sample.runs[which]:
        due = sample.wanted.get(run.id, [])
        started = time.perf_counter()
        policy = policy_for(run, due, spec, reply=sample.reply, tools=sample.tools)
        with contender_of(window, policy, model, tools=sample.tools) as candidate:
            _feed(run, due, candidate, cell, reply=sample.reply)
        cell.seconds += time.perf_counter() - started
    return cell


def _feed(run: Trajectory, wanted: Sequence[Reference], candidate: Contender, cell: PolicyCounts, *, reply: bool) -> None:
    store = candidate if isinstance(candidate, KilburnCandidate) else None
    counted = Counted(candidate, cell)
    found: list[tuple[Reference, ReferenceOutcome]] = []
    for index, shown in prompts(run, counted, reply=reply):
        due = [reference for reference in wanted if reference.step == index]
        if due:
            found += zip(due, _outcomes(run, due, shown, store, cell), strict=True)
    if store is None:
        cell.outcomes += [outcome for _, outcome in found]
        return
    stats = store.stats()
    cell.acts += store.count_acts()
    cell.asks += stats.asks
    cell.unanswered += stats.asks_failed
    cell.refused += stats.refused_moves
    cell.failed += stats.policy_failures
    cell.fallbacks += stats.fallbacks
    for reference, outcome in found:
        reachable = bool(outcome.searched) or store.recalls(reference)
        cell.outcomes.append(msgspec.structs.replace(outcome, reachable=reachable))


def _outcomes(
    run: Trajectory, due: Sequence[Reference], shown: str, store: KilburnCandidate | None, cell: PolicyCounts
) -> Iterator[ReferenceOutcome]:
    there = {kind: read(shown) for kind, read in KINDS.items()}
    lines = {line.rstrip() for line in shown.split("\n")}
    for reference in due:
        name, read = reference.name, KINDS[reference.kind]
        outputs = (run.steps[at].observation for at in reference.origins)
        whole = any(
            line.rstrip() in lines and name in read(line) for output in outputs for line in output.split("\n") if name in line
        )
        seen = name in there[reference.kind]
        yield ReferenceOutcome(
            run=run.id,
            step=reference.step,
            name=name,
            policy=cell.policy,
            window=cell.window,
            shown=seen,
            line=whole,
            searched=(seen or store.finds(reference)) if store is not None else None,
            kind=reference.kind,
        )

"""Future-reference survival: of the names that the agent will need next, how many does the window show?

Recorded runs are fed, event by event, to showers: the baselines, and Kilburn processes. Just before
each action that refers to an older output, it is looked up whether the name stands in the window. No
model takes part. The head of a run is left out; one token is four characters for everybody.

    report = evaluate("runs.jsonl.gz", windows=[1000, 2000], policies=["tail", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import TracebackType
from typing import Self

import kilburn
from kilburn.errors import SpecError
from kilburn.evals.baselines import BASELINES, CHARACTERS, Shower
from kilburn.evals.outcomes import Cell, Outcome, Report, cells
from kilburn.evals.references import Reference, names, references, shuffled
from kilburn.evals.trajectories import Run, read, synthetic

__all__ = ["KilburnShower", "evaluate", "measure"]

SYNTHETIC = 60
"""Runs that are made up where no file is named."""


class KilburnShower:
    """A process of Kilburn in a store of its own; close it, or use it in a `with` block.

    Args:
        window: tokens of four characters.
        policy: a policy spec, as `kilburn.open` takes it.
    """

    def __init__(self, window: int, policy: str) -> None:
        self._store = kilburn.open(":memory:", window=window, policy=policy, tokenizer=f"chars/{CHARACTERS}")
        self._process = self._store.process("run")
        self._outputs: list[str] = []
        self.seams = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def thought(self, text: str) -> None:
        """The agent thinks."""
        self._process.append({"role": "assistant", "content": text})

    def action(self, text: str) -> None:
        """The agent acts."""
        self._process.append({"role": "assistant", "content": text})

    def observation(self, text: str) -> None:
        """The world answers."""
        self._outputs.append(self._process.append({"role": "user", "content": text}))

    def shown(self) -> str:
        """The text of the rendered prompt, a line break between messages."""
        texts = list(_texts(self._process.render(format="chat")))
        self.seams = max(0, len(texts) - 1)
        return "\n".join(texts)

    def searched(self, reference: Reference) -> bool:
        """Whether one search for the name, 1,000 tokens of hits, brings it back."""
        return any(reference.name in names(hit.text) for hit in self._process.search(reference.name, tokens=1000))

    def recalled(self, reference: Reference) -> bool:
        """Whether one fault by the address of an output that had it brings it back."""
        return reference.name in names(self._process.recall(self._outputs[reference.origins[-1]]))

    def close(self) -> None:
        """Close the store."""
        self._store.close()


def _texts(prompt: Iterable[dict[str, object]]) -> Iterator[str]:
    for message in prompt:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):
            yield from (part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def evaluate(
    path: str | Path | None,
    windows: Sequence[int],
    policies: Sequence[str],
    *,
    sample: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    shuffle: int | None = None,
    workers: int = 1,
    seed: int = 0,
) -> Report:
    """Score each policy at each window on the runs of a file.

    Args:
        path: JSON lines of runs (see `kilburn.evals.trajectories`); None for made-up ones.
        windows: in tokens of four characters.
        policies: names of baselines, or specs of Kilburn's policies. "tail" is always scored too: all are paired with it.
        sample: only the first so many runs; of made-up ones, how many.
        progress: called with what is done and what there is, in runs times windows times policies.
        shuffle: a seed; each name is swapped for one of another run, so that only chance is left.
        workers: processes to spread the policies and windows over.
        seed: for made-up runs and for the intervals.

    Raises:
        SpecError: no such file, no runs, a window below 1, no such policy.
        InvalidMessage: a line that is no run.
    """
    if any(window < 1 for window in windows) or not windows:
        raise SpecError(f"windows={list(windows)!r}", advice="give one window or more, each of at least 1 token")
    runs = list(synthetic(sample or SYNTHETIC, seed) if path is None else islice(read(path), sample))
    if not runs:
        raise SpecError(f"{path}: no runs", advice="give a file with one run a line")
    listed = [reference for run in runs for reference in references(run)]
    wanted: dict[str, list[Reference]] = {}
    for reference in listed if shuffle is None else shuffled(listed, shuffle):
        wanted.setdefault(reference.run, []).append(reference)
    jobs = [(policy, window) for window in windows for policy in dict.fromkeys(["tail", *policies])]
    done: list[Cell] = []
    for cell in _measured(runs, wanted, jobs, workers):
        done.append(cell)
        if progress is not None:
            progress(len(done) * len(runs), len(jobs) * len(runs))
    return Report(
        runs=len(runs),
        references=sum(map(len, wanted.values())),
        rows=cells(done, seed),
        outcomes=[o for c in done for o in c.outcomes],
    )


def _measured(runs: list[Run], wanted: dict[str, list[Reference]], jobs: list[tuple[str, int]], workers: int) -> Iterator[Cell]:
    if workers < 2:
        for policy, window in jobs:
            yield measure(runs, wanted, policy, window)
        return
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(measure, runs, wanted, policy, window) for policy, window in jobs]
        for future in waiting:
            yield future.result()


def measure(runs: Sequence[Run], wanted: dict[str, list[Reference]], policy: str, window: int) -> Cell:
    """Feed all runs to one policy at one window."""
    cell = Cell(policy=policy, window=window)
    for run in runs:
        started = time.perf_counter()
        if policy in BASELINES:
            _feed(run, wanted.get(run.id, []), BASELINES[policy](window), None, cell)
        else:
            with KilburnShower(window, policy) as shower:
                _feed(run, wanted.get(run.id, []), shower, shower, cell)
        cell.seconds += time.perf_counter() - started
    return cell


def _feed(run: Run, wanted: Sequence[Reference], shower: Shower, store: KilburnShower | None, cell: Cell) -> None:
    before, fresh = "", 0
    for index, step in enumerate(run.steps):
        shower.thought(step.thought)
        shown = shower.shown()
        fresh += len(step.thought)
        cell.ship(before, shown, fresh, store.seams if store is not None else 0)
        due = [reference for reference in wanted if reference.step == index]
        if due:
            cell.outcomes += _outcomes(run, due, shown, store, cell)
        before, fresh = shown, len(step.action) + len(step.observation)
        shower.action(step.action)
        shower.observation(step.observation)


def _outcomes(run: Run, due: Sequence[Reference], shown: str, store: KilburnShower | None, cell: Cell) -> Iterator[Outcome]:
    there = names(shown)
    lines = {line.rstrip() for line in shown.split("\n")}
    for reference in due:
        name = reference.name
        outputs = (run.steps[at].observation for at in reference.origins)
        whole = any(
            line.rstrip() in lines and name in names(line) for output in outputs for line in output.split("\n") if name in line
        )
        searched = name in there or (store is not None and store.searched(reference))
        yield Outcome(
            run=run.id,
            step=reference.step,
            name=name,
            policy=cell.policy,
            window=cell.window,
            shown=name in there,
            line=whole,
            searched=searched if store is not None else None,
            reachable=(searched or store.recalled(reference)) if store is not None else None,
        )

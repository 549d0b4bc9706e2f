"""Do agents get their work done, when all they know is what the window shows?

A scripted agent does small tasks in real source files (`kilburn.evals.tasks`). Before each edit it looks in its prompt for
the one line that has the fact it needs. If it is not there, the agent searches its memory, where it has one and may use
it; else it does again what brought the fact, which costs a step and room in the window; after so many times it gives up.
A task is solved if its own check program says so. No model takes part, so that success depends on the window
alone, and no policy's measure of a line decides what counts.

    report = evaluate(32, windows=[1000, 2000], policies=["tail", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path

import msgspec

from kilburn.errors import SpecError
from kilburn.evals.baselines import BASELINES, CHARACTERS, Contender, best_of
from kilburn.evals.candidate import KilburnCandidate
from kilburn.evals.cost import CostRow, Rates, cost_columns, figures_of, rates_of, units_of
from kilburn.evals.intervals import interval, mean
from kilburn.evals.outcomes import Cell, Counted
from kilburn.evals.report import EvalReport, best_words, row_of, table_of
from kilburn.evals.roster import entries
from kilburn.evals.tasks import KINDS, Command, Edit, Look, Say, Task, Workshop, tasks

__all__ = ["EVERYBODY", "ActingReport", "ActingRow", "TaskOutcome", "evaluate"]

EVERYBODY = ("tail", "truncated", "last3", "tail+bm25-older", "summarize", "cost", "hybrid")
"""The baselines and the policies that are compared unless told otherwise."""

FOUND = 400
"""Tokens that a search of the memory may bring."""


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one task went.

    Args:
        steps: replies of the agent. plan: those of an agent that has to look up nothing.
        facts: that it needed. missing: those that were not shown when they were needed. searched: found by a search of memory.
        again: done once more to get a fact. shipped: tokens of all prompts. refilled: those read again because of an edit.
    """

    task: str
    kind: str
    policy: str
    window: int
    solved: bool
    steps: int
    plan: int
    facts: int
    missing: int
    searched: int
    again: int
    shipped: int
    refilled: int


class ActingRow(CostRow, frozen=True, kw_only=True):
    """One policy at one window, over all tasks. Intervals are of 95%, resampled by task.

    Args:
        solved: share of the tasks; kinds: by kind of task.
        best: of the baselines that were measured at this window, the one that solves most. gain: share of the tasks less
            that of `best`, on the same tasks.
        shown: share of the facts that the prompt had when they were needed.
        steps: mean steps over those of the plan.
    """

    tasks: int
    solved: float
    low: float
    high: float
    best: str
    gain: float
    gain_low: float
    gain_high: float
    kinds: dict[str, float]
    shown: float
    steps: float


class ActingReport(EvalReport, frozen=True, kw_only=True):
    """All rows. `search` says whether the agent might search its memory, `rates` how prompts were priced, `sources` from what
    folder of C headers the tasks are (None: from Python's library)."""

    seed: int
    sources: str | None
    search: bool
    rates: Rates
    rows: list[ActingRow]
    outcomes: list[TaskOutcome]

    def row(self, policy: str, window: int) -> ActingRow:
        """The row of a policy at a window; KeyError if it was not measured."""
        return row_of(self.rows, policy=policy, window=window)

    def table(self) -> str:
        """Plain text: how much work was done, and what it cost."""
        body = [
            {
                "window": str(row.window),
                "policy": row.policy,
                "solved": f"{row.solved:.3f}",
                "95%": f"{row.low:.2f}-{row.high:.2f}",
                "to best, 95%": f"{row.gain:+.3f}  {row.gain_low:+.2f} {row.gain_high:+.2f}",
                **{kind: f"{row.kinds[kind]:.2f}" if kind in row.kinds else "" for kind in KINDS},
                "shown": f"{row.shown:.3f}",
                "whole": "" if row.sections is None else f"{row.sections:.3f}",
                "steps": f"{row.steps:.2f}",
            }
            for row in self.rows
        ]
        where = f"C headers of {self.sources}" if self.sources else "Python's library"
        those = "may search its memory" if self.search else "has no search"
        parts = [
            f"{self.rows[0].tasks} tasks in {where}, seed {self.seed}; the agent {those}; one token is {CHARACTERS} characters",
            best_words("share solved", self.rows),
            table_of(body),
            f"{units_of(self.rates)}; prompts over the window",
            table_of({**cost_columns(row, self.rates), "over": str(row.overflow)} for row in self.rows),
        ]
        return "\n\n".join(parts)


def evaluate(
    count: int = 32,
    *,
    windows: Sequence[int] = (1000, 2000, 4000),
    policies: Sequence[str] = EVERYBODY,
    search: bool = False,
    patience: int = 2,
    sources: Path | None = None,
    rates: Rates | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> ActingReport:
    """Do the tasks under each policy at each window; the tail always takes part.

    Args:
        count: tasks.
        windows: in tokens of four characters.
        policies: names of baselines, or specs of policies.
        patience: what the agent does again in one task; it gives up when more is needed.
        search: whether the agent may search its memory before it does something again. Baselines have none.
        sources: a folder of C headers that the tasks are made from; None for this Python's library.
        rates: how prompts are priced; by default by "hosted" and "local".
        seed: of the tasks and the intervals.
        progress: called with the tasks done and their total.

    Raises:
        SpecError: no tasks, a window below 1, no such policy, or too few sources.
    """
    if count < 1 or not windows or min(windows) < 1:
        raise SpecError(f"tasks={count}, windows={list(windows)}", advice="give one or more of each")
    made = list(tasks(count, seed, sources))
    jobs = [(window, entry) for window in dict.fromkeys(windows) for entry in entries(list(policies), "", window)]
    done: list[tuple[Cell, list[TaskOutcome]]] = []
    for window, entry in jobs:
        spec = entry.at(window)
        done.append((Cell(policy=entry.label, window=window, spec=spec), []))
        cell, outcomes = done[-1]
        for task in made:
            own = BASELINES[spec](window) if spec in BASELINES else KilburnCandidate(window, spec)
            with closing(own) if isinstance(own, KilburnCandidate) else nullcontext(own) as contender:
                outcomes.append(_Agent(task, contender, cell, search=search, patience=patience).work())
            if progress is not None:
                progress((len(done) - 1) * count + len(outcomes), len(jobs) * count)
    rates = rates or rates_of()
    found = [outcome for _, outcomes in done for outcome in outcomes]
    return ActingReport(
        seed=seed,
        sources=str(sources) if sources is not None else None,
        search=search,
        rates=rates,
        rows=_rows(done, rates, seed),
        outcomes=found,
    )


class _Agent:
    """Works at one task; it remembers its plan, and nothing else."""

    def __init__(self, task: Task, contender: Contender, cell: Cell, *, search: bool, patience: int) -> None:
        self.task, self.cell = task, cell
        self.contender = Counted(contender, cell)
        self.patience = patience
        self.memory = contender if search and isinstance(contender, KilburnCandidate) else None
        self.steps = self.missing = self.searched = self.again = 0

    def work(self) -> TaskOutcome:
        shipped, refilled = self.cell.shipped, self.cell.refilled
        with tempfile.TemporaryDirectory(prefix="kilburn-task-") as folder:
            self.workshop = Workshop(Path(folder), self.task)
            for step in self.task.plan:
                if isinstance(step, Say):
                    self.contender.user(step.text)
                elif isinstance(step, Look):
                    self._do(step.thought, step.command)
                else:
                    self._edit(step)
            solved, _ = self.workshop.check()
        plan = sum(1 + (isinstance(step, Edit) and step.near) for step in self.task.plan if not isinstance(step, Say))
        return TaskOutcome(
            task=self.task.id,
            kind=self.task.kind,
            policy=self.cell.policy,
            window=self.cell.window,
            solved=solved,
            steps=self.steps,
            plan=plan,
            facts=sum(isinstance(step, Edit) for step in self.task.plan),
            missing=self.missing,
            searched=self.searched,
            again=self.again,
            shipped=self.cell.shipped - shipped,
            refilled=self.cell.refilled - refilled,
        )

    def _do(self, thought: str, command: Command) -> None:
        self.contender.prompt_text()
        self._tell(thought, str(command), self.workshop.do(command))

    def _tell(self, thought: str, action: str, output: str) -> None:
        self.contender.reply(thought, action)
        self.contender.observation(output)
        self.steps += 1

    def _edit(self, edit: Edit) -> None:
        found = edit.fact.search(self.contender.prompt_text())
        if found is None:
            self.missing += 1
            if self.memory is not None:
                self._tell(edit.thought, "search_memory", self.memory.search(edit.thought, FOUND))
                found = edit.fact.search(self.contender.prompt_text())
                self.searched += found is not None
            if found is None and edit.again is not None and self.again < self.patience:
                self._tell(edit.thought, str(edit.again), self.workshop.do(edit.again))
                self.again += 1
                found = edit.fact.search(self.contender.prompt_text())
            if found is None:
                return
        command = edit.make(found)
        if edit.near:
            around = Command("read", command.path, command.line)
            self._tell(edit.thought, str(around), self.workshop.do(around))
            self.contender.prompt_text()
        self._tell(edit.thought, str(command), self.workshop.do(command))


def _rows(done: Sequence[tuple[Cell, list[TaskOutcome]]], rates: Rates, seed: int) -> list[ActingRow]:
    known = {(cell.window, cell.policy): own for cell, own in done}
    rows = []
    for cell, own in done:
        shares = {label: mean(one.solved for one in other) for (at, label), other in known.items() if at == cell.window}
        best = best_of(shares)
        low, high = interval([[float(one.solved)] for one in own], seed)
        gains = [float(one.solved) - float(other.solved) for one, other in zip(own, known[cell.window, best], strict=True)]
        gain_low, gain_high = interval([[gain] for gain in gains], seed)
        rows.append(
            ActingRow(
                **figures_of(cell, rates, ActingRow),
                tasks=len(own),
                solved=shares[cell.policy],
                low=low,
                high=high,
                best=best,
                gain=mean(gains),
                gain_low=gain_low,
                gain_high=gain_high,
                kinds={kind: mean(one.solved for one in own if one.kind == kind) for kind in {one.kind for one in own}},
                shown=1 - sum(one.missing for one in own) / sum(one.facts for one in own),
                steps=mean(one.steps / one.plan for one in own),
            )
        )
    return rows

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
from kilburn.evals.baselines import BASELINES, CHARACTERS, Contender
from kilburn.evals.candidate import KilburnCandidate
from kilburn.evals.intervals import interval, mean
from kilburn.evals.report import EvalReport, grid, row_of
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
        again: done once more to get a fact. shipped: tokens of all prompts. peak: of the largest one.
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
    peak: int


class ActingRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one window, over all tasks. Intervals are of 95%, resampled by task.

    Args:
        solved: share of the tasks. gain: less the tail's, on the same tasks; kinds: by kind of task.
        shown: share of the facts that the prompt had when they were needed.
        steps: mean steps over those of the plan. shipped: mean tokens of a task's prompts.
    """

    policy: str
    window: int
    tasks: int
    solved: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    kinds: dict[str, float]
    shown: float
    steps: float
    shipped: float
    overflow: int


class ActingReport(EvalReport, frozen=True, kw_only=True):
    """All rows. `search` says whether the agent might search its memory."""

    seed: int
    search: bool
    rows: list[ActingRow]
    outcomes: list[TaskOutcome]

    def row(self, policy: str, window: int) -> ActingRow:
        """The row of a policy at a window; KeyError if it was not measured."""
        return row_of(self.rows, policy=policy, window=window)

    def table(self) -> str:
        """Plain text: a line for each policy and window."""
        heads = ["window", "policy", "solved", "95%", "to tail", "95%", *KINDS, "shown", "steps", "shipped", "over"]
        body = [
            [
                str(row.window),
                row.policy,
                f"{row.solved:.3f}",
                f"{row.low:.3f}-{row.high:.3f}",
                f"{row.gain:+.3f}",
                f"{row.gain_low:+.3f} {row.gain_high:+.3f}",
                *(f"{row.kinds[kind]:.2f}" if kind in row.kinds else "" for kind in KINDS),
                f"{row.shown:.3f}",
                f"{row.steps:.2f}",
                f"{row.shipped:,.0f}",
                str(row.overflow),
            ]
            for row in self.rows
        ]
        those = "may search its memory" if self.search else "has no search"
        said = f"{self.rows[0].tasks} tasks from seed {self.seed}; the agent {those}; one token is {CHARACTERS} characters"
        return f"{said}\n\n{grid(heads, body)}"


def evaluate(
    count: int = 32,
    *,
    windows: Sequence[int] = (1000, 2000, 4000),
    policies: Sequence[str] = EVERYBODY,
    search: bool = False,
    patience: int = 2,
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
        seed: of the tasks and the intervals.
        progress: called with the tasks done and their total.

    Raises:
        SpecError: no tasks, a window below 1, no such policy, or a Python without sources.
    """
    if count < 1 or not windows or min(windows) < 1:
        raise SpecError(f"tasks={count}, windows={list(windows)}", advice="give one or more of each")
    made = list(tasks(count, seed))
    jobs = [(window, entry) for window in dict.fromkeys(windows) for entry in entries(list(policies), "", window)]
    outcomes: list[TaskOutcome] = []
    for window, entry in jobs:
        for task in made:
            spec = entry.at(window)
            own = BASELINES[spec](window) if spec in BASELINES else KilburnCandidate(window, spec)
            with closing(own) if isinstance(own, KilburnCandidate) else nullcontext(own) as contender:
                outcomes.append(_Agent(task, contender, entry.label, window, search=search, patience=patience).work())
            if progress is not None:
                progress(len(outcomes), len(jobs) * count)
    return ActingReport(seed=seed, search=search, rows=_rows(outcomes, seed), outcomes=outcomes)


class _Agent:
    """Works at one task; it remembers its plan, and nothing else."""

    def __init__(self, task: Task, contender: Contender, policy: str, window: int, *, search: bool, patience: int) -> None:
        self.task, self.contender, self.policy, self.window = task, contender, policy, window
        self.patience = patience
        self.memory = contender if search and isinstance(contender, KilburnCandidate) else None
        self.steps = self.missing = self.searched = self.again = self.shipped = self.peak = 0

    def work(self) -> TaskOutcome:
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
            policy=self.policy,
            window=self.window,
            solved=solved,
            steps=self.steps,
            plan=plan,
            facts=sum(isinstance(step, Edit) for step in self.task.plan),
            missing=self.missing,
            searched=self.searched,
            again=self.again,
            shipped=self.shipped,
            peak=self.peak,
        )

    def _prompt(self) -> str:
        text = self.contender.prompt_text()
        tokens = -(-len(text) // CHARACTERS)
        self.shipped += tokens
        self.peak = max(self.peak, tokens)
        return text

    def _do(self, thought: str, command: Command) -> None:
        self._prompt()
        self._tell(thought, str(command), self.workshop.do(command))

    def _tell(self, thought: str, action: str, output: str) -> None:
        self.contender.reply(thought, action)
        self.contender.observation(output)
        self.steps += 1

    def _edit(self, edit: Edit) -> None:
        found = edit.fact.search(self._prompt())
        if found is None:
            self.missing += 1
            if self.memory is not None:
                self._tell(edit.thought, "search_memory", self.memory.search(edit.thought, FOUND))
                found = edit.fact.search(self._prompt())
                self.searched += found is not None
            if found is None and edit.again is not None and self.again < self.patience:
                self._do(edit.thought, edit.again)
                self.again += 1
                found = edit.fact.search(self._prompt())
            if found is None:
                return
        command = edit.make(found)
        if edit.near:
            around = Command("read", command.path, command.line)
            self._tell(edit.thought, str(around), self.workshop.do(around))
            self._prompt()
        self._tell(edit.thought, str(command), self.workshop.do(command))


def _rows(outcomes: Sequence[TaskOutcome], seed: int) -> list[ActingRow]:
    cells: dict[tuple[int, str], list[TaskOutcome]] = {}
    for one in outcomes:
        cells.setdefault((one.window, one.policy), []).append(one)
    rows = []
    for (window, policy), own in cells.items():
        tail = cells[window, "tail"]
        low, high = interval([[float(one.solved)] for one in own], seed)
        gains = [float(one.solved) - float(other.solved) for one, other in zip(own, tail, strict=True)]
        gain_low, gain_high = interval([[gain] for gain in gains], seed)
        needed = sum(one.facts for one in own)
        rows.append(
            ActingRow(
                policy=policy,
                window=window,
                tasks=len(own),
                solved=mean(one.solved for one in own),
                low=low,
                high=high,
                gain=mean(gains),
                gain_low=gain_low,
                gain_high=gain_high,
                kinds={kind: mean(one.solved for one in own if one.kind == kind) for kind in {one.kind for one in own}},
                shown=1 - sum(one.missing for one in own) / needed,
                steps=mean(one.steps / one.plan for one in own),
                shipped=mean(one.shipped for one in own),
                overflow=sum(one.peak > window for one in own),
            )
        )
    return rows

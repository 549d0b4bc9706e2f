"""Do agents get their work done, when all they know is what the window shows?

A scripted agent does small tasks in real source files (`kilburn_lab.evals.tasks`). Before each edit it looks in its prompt for
the one line that has the fact it needs. If it is not there, the agent searches its memory, where it has one and may use
it; else it does again what brought the fact, which costs a step and room in the window; after so many times it gives up.
A task is solved if its own check program says so. No model takes part unless one is given, so that success depends on the
window alone, and no policy's measure of a line decides what counts.

With a model, the model decides in place of the script's search: it reads the window, and writes a line or looks once more,
under a JSON schema. All else is the same.

    report = evaluate(32, windows=[1000, 2000], policies=["tail", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn.kernel.resolve import resolve
from kilburn.model import Model
from kilburn_lab.evals.baselines import CHARACTERS, Contender, compared
from kilburn_lab.evals.candidate import KilburnCandidate, contender_of
from kilburn_lab.evals.cost import Bill, ComparedRow, Rates, bill_table, bills_of, cost_table, figures_of, rates_of, units_of
from kilburn_lab.evals.intervals import mean
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.metered import Metered, Spent, filled, name_of, spent_tables, total_of
from kilburn_lab.evals.outcomes import Counted, PolicyCounts
from kilburn_lab.evals.prefix import WORDS as PREFIX_WORDS
from kilburn_lab.evals.report import EvalReport, best_words, columns, table_of
from kilburn_lab.evals.roster import entries
from kilburn_lab.evals.tasks import KINDS, Command, Edit, Look, Say, Task, Workshop, tasks

EVERYBODY = ("tail", "truncated", "last3", "tail+turns", "tail+chunks", "tail+outputs", "summarize", "cost", "hybrid")
"""The baselines and the policies that are compared unless told otherwise."""

FOUND = 400
"""Tokens that a search of the memory may bring."""


ACTION = 160
"""Tokens of a model's action."""

LAST_LINE = 99_999
"""Of a file that a model may write to."""

RULES = """You are a coding agent. Your task: {ask}
Of what you did and saw before, you know only what the window shows. Do one thing now, as JSON:
- write: put a text in place of one line of a file; the text is the whole line as it will stand
  in the file, without the path and the number that a search or a read puts before it."""
LOOKS = """
- {looks}: only if what you need is not in the window."""


class TaskOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How one task went.

    Args:
        steps: replies of the agent. plan: those of an agent that has to look up nothing.
        facts: that it needed. missing: those that were not shown when they were needed. searched: found by a search of memory.
        again: done once more to get a fact. shipped: tokens of all prompts. refilled: those read again because of an edit.
        agent: what was asked of the model that decides. writer: of the model that answers the policy.
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
    agent: Spent
    writer: Spent


class ActingRow(ComparedRow, frozen=True, kw_only=True):
    """One policy at one window, over all tasks. Intervals are of 95%, resampled by task.

    Args:
        solved: share of the tasks; kinds: by kind of task.
        best: of the baselines that were measured at this window, the one that solves most. gain: share of the tasks less
            that of `best`, on the same tasks.
        shown: share of the facts that the prompt had when they were needed.
        steps: mean steps over those of the plan.
        agent: what was asked of the model that decides, in all tasks. writer: of the model that answers the policy.
    """

    tasks: int
    solved: float
    kinds: dict[str, float]
    shown: float
    steps: float
    agent: Spent
    writer: Spent


class ActingReport(EvalReport, frozen=True, kw_only=True):
    """All rows. `search` says whether the agent might search its memory, `tools` how its work was told, `rates` how prompts were
    priced, `sources` from what folder of C headers the tasks are (None: from Python's library); `model` decides and `writer`
    answers the policies, if any. `bills` have what providers are paid for each solved task."""

    seed: int
    sources: str | None
    search: bool
    tools: bool
    model: str
    writer: str
    rates: Rates
    rows: list[ActingRow]
    bills: list[Bill]
    outcomes: list[TaskOutcome]

    def table(self) -> str:
        """Plain text: how much work was done, and what it cost."""
        text = (
            "window={window} | policy={policy} | solved={solved:.3f} | 95%={low:.2f}-{high:.2f} | "
            "to best, 95%={gain:+.3f}  {gain_low:+.2f} {gain_high:+.2f} | "
            f"{columns('kinds', KINDS, '.2f')} | shown={{shown:.3f}} | kept={{kept:.2f}} | again={{thousands:.1f}} | "
            "share={again_share:.2f}"
        )
        where = f"C headers of {self.sources}" if self.sources else "Python's library"
        those = "may search its memory" if self.search else "has no search"
        those += ", told as tool calls" if self.tools else ""
        who = self.model or "the agent"
        parts = [
            f"{self.rows[0].tasks} tasks in {where}, seed {self.seed}; {who} {those}; one token is {CHARACTERS} characters",
            f"{best_words('share solved', self.rows)}\n{PREFIX_WORDS}",
            table_of(self.rows, text, thousands=lambda row: row.refilled / 1000),
            f"{units_of(self.rates)};\nshare of older outputs in whole sections; steps over those of the plan;\n"
            "prompts over the window, plans of the policy that failed",
            cost_table(self.rows, self.rates, "whole={sections:.3f} | steps={steps:.2f} | over={overflow} | failed={failed}"),
            bill_table(self.bills, "solved"),
            *spent_tables((row.window, row.policy, {"agent": row.agent, "writer": row.writer}) for row in self.rows),
        ]
        return "\n\n".join(parts)


def evaluate(
    count: int = 8,
    *,
    windows: Sequence[int] = (1000, 2000, 4000),
    policies: Sequence[str] = EVERYBODY,
    search: bool = False,
    tools: bool = False,
    patience: int = 2,
    model: str | Model = "",
    writer: str | Model = "",
    sources: Path | None = None,
    rates: Rates | None = None,
    seed: int = 0,
    progress: Progress = unwatched,
) -> ActingReport:
    """Do the tasks under each policy at each window; the tail always takes part.

    Args:
        count: tasks.
        windows: in tokens of four characters.
        policies: names of baselines, or specs of policies.
        tools: tell actions and outputs as tool calls and results. Then the user's last words are known as such, and stay.
        patience: what the agent does again in one task; it gives up when more is needed.
        search: whether the agent may search its memory before it does something again. Baselines have none.
        model: decides in place of the script: the spec of a model, or a model.
        writer: answers the policies' questions, likewise. Policies that can ask then have a second row.
        sources: a folder of C headers that the tasks are made from; None for this Python's library.
        rates: how prompts are priced; by default by "hosted" and "local".
        seed: of the tasks and the intervals.
        progress: called with the tasks done and their total.

    Raises:
        SpecError: no tasks, a window below 1, no such policy or model, or too few sources.
        Unavailable, Refused, Overlong: of the model that decides.
    """
    if count < 1 or not windows or min(windows) < 1:
        raise SpecError(f"tasks={count}, windows={list(windows)}", advice="give one or more of each")
    made = list(tasks(count, seed, sources))
    jobs = [(window, entry) for window in dict.fromkeys(windows) for entry in entries(list(policies), name_of(writer), window)]
    decides = resolve("models", model) if model else None
    answers = resolve("models", writer) if writer else None
    done: list[tuple[PolicyCounts, list[TaskOutcome]]] = []
    progress(0, len(jobs) * count)
    for window, entry in jobs:
        spec = entry.at(window)
        done.append((PolicyCounts(policy=entry.label, window=window, spec=spec, model=entry.model), []))
        cell, outcomes = done[-1]
        for task in made:
            asked = Metered(answers) if answers is not None and entry.model else None
            with contender_of(window, spec, asked, tools=tools) as own:
                agent = _Agent(task, own, cell, search=search, patience=patience, model=decides)
                outcomes.append(agent.work(asked.spent if asked is not None else Spent()))
                if isinstance(own, KilburnCandidate):
                    cell.failed += own.stats().policy_failures
            progress((len(done) - 1) * count + len(outcomes), len(jobs) * count)
    rates = rates or rates_of()
    found = [outcome for _, outcomes in done for outcome in outcomes]
    return ActingReport(
        seed=seed,
        sources=str(sources) if sources is not None else None,
        search=search,
        tools=tools,
        model=name_of(model),
        writer=name_of(writer),
        rates=rates,
        rows=_rows(done, rates, seed),
        bills=bills_of([(cell, sum(one.solved for one in own)) for cell, own in done], rates.pause),
        outcomes=found,
    )


class _Agent:
    """Works at one task; it remembers its plan, and nothing else."""

    def __init__(
        self, task: Task, contender: Contender, cell: PolicyCounts, *, search: bool, patience: int, model: Model | None
    ) -> None:
        self.task, self.cell = task, cell
        self.contender = Counted(contender, cell)
        self.patience = patience
        self.memory = contender if search and isinstance(contender, KilburnCandidate) else None
        self.model = Metered(model) if model is not None else None
        self.steps = self.missing = self.searched = self.again = 0

    def work(self, writer: Spent) -> TaskOutcome:
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
            agent=self.model.spent if self.model is not None else Spent(),
            writer=writer,
        )

    def _do(self, thought: str, command: Command) -> None:
        self.contender.prompt_text()
        self._tell(thought, str(command), self.workshop.do(command))

    def _tell(self, thought: str, action: str, output: str) -> None:
        self.contender.reply(thought, action)
        self.contender.observation(output)
        self.steps += 1

    def _edit(self, edit: Edit) -> None:
        shown = self.contender.prompt_text()
        self.missing += edit.fact.search(shown) is None
        looks = ["search_memory"] if self.memory is not None else []
        if edit.again is not None and self.again < self.patience:
            looks.append(edit.again.verb)
        command = self._decide(edit, shown, looks)
        while command is not None and command.verb in looks:
            looks.remove(command.verb)
            if command.verb == "search_memory" and self.memory is not None:
                self._tell(edit.thought, command.verb, self.memory.search(edit.thought, FOUND))
                shown = self.contender.prompt_text()
                self.searched += edit.fact.search(shown) is not None
            elif edit.again is not None:
                self._tell(edit.thought, str(edit.again), self.workshop.do(edit.again))
                self.again += 1
                shown = self.contender.prompt_text()
            command = self._decide(edit, shown, looks)
        if command is None:
            return
        if edit.near:
            around = Command("read", command.path, command.line)
            self._tell(edit.thought, str(around), self.workshop.do(around))
            self.contender.prompt_text()
        self._tell(edit.thought, str(command), self.workshop.do(command))

    def _decide(self, edit: Edit, shown: str, looks: Sequence[str]) -> Command | None:
        """What the agent does for an edit: write, or look in one of the ways that are left; None if it gives up."""
        if self.model is not None:
            return _answered(self.model, self.task, edit, shown, looks)
        found = edit.fact.search(shown)
        if found is not None:
            return edit.make(found)
        return Command(looks[0]) if looks else None


def _answered(model: Model, task: Task, edit: Edit, shown: str, looks: Sequence[str]) -> Command | None:
    """What a model does; None if its reply was cut or breaks the schema."""
    rules = RULES.format(ask=task.ask) + (LOOKS.format(looks=" or ".join(looks)) if looks else "")
    said = f"The window:\n{shown}\n\nNow: {edit.thought} {edit.form}"
    # Every file of the task, and the one that is to be written.
    paths = [*task.files, *re.findall(r"\w+\.\w+", task.ask)]
    write = {
        "verb": {"const": "write"},
        "path": {"enum": paths},
        "line": {"type": "integer", "minimum": 1, "maximum": LAST_LINE},
        "text": {"type": "string"},
    }
    forms: list[dict[str, Any]] = [write, *({"verb": {"const": look}} for look in looks)]
    command = filled(model, rules, said, forms, ACTION, Command)
    if command is None:
        return None
    fits = command.verb in looks or (command.verb == "write" and command.path in paths and 1 <= command.line <= LAST_LINE)
    return command if fits else None


def _rows(done: Sequence[tuple[PolicyCounts, list[TaskOutcome]]], rates: Rates, seed: int) -> list[ActingRow]:
    rows = []
    for cell, own in done:
        kinds = dict.fromkeys(one.kind for one in own)
        here = {other.policy: [float(one.solved) for one in theirs] for other, theirs in done if other.window == cell.window}
        rows.append(
            ActingRow(
                **figures_of(cell, rates, ActingRow),
                tasks=len(own),
                solved=mean(here[cell.policy]),
                **compared(here, cell.policy, range(len(own)), seed),
                kinds={kind: mean(one.solved for one in own if one.kind == kind) for kind in kinds},
                shown=1 - sum(one.missing for one in own) / sum(one.facts for one in own),
                steps=mean(one.steps / one.plan for one in own),
                agent=total_of(one.agent for one in own),
                writer=total_of(one.writer for one in own),
            )
        )
    return rows

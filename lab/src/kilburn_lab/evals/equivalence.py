"""Functional equivalence: how much better does a model foresee the agent's real next action, given what a policy shows?

CoMem (arXiv 2605.30842) rewards a summary if the agent acts from it as from full context. Here the actions are recorded:
a real model reads the task and what a policy shows, and the negative log-likelihood of what the agent really wrote next
is taken. Two views bound it: the *task* alone, and the *full* history. The tokens that matter are those that *depend* on older
outputs (`kilburn_lab.evals.references`). All tokens are told beside them, and a *stranger*, a window of another task's run,
which shows the form of a history and none of its content.

    report = evaluate(sample_of("runs.jsonl.gz"), forecaster_of("smollm2"), windows=[1000], policies=["tail", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from kilburn.errors import MissingExtra, SpecError
from kilburn.models.weights import find
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.baselines import BASELINES, CHARACTERS, HISTORY, Contender, History
from kilburn_lab.evals.candidate import contender_of, policy_for, prompts
from kilburn_lab.evals.intervals import grouped, interval, mean, resampled
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.outcomes import Counted, PolicyCounts
from kilburn_lab.evals.prefix import WORDS as PREFIX_WORDS
from kilburn_lab.evals.references import Reference
from kilburn_lab.evals.report import EvalReport, table_of
from kilburn_lab.evals.roster import Entrant, entries
from kilburn_lab.evals.sample import Sample
from kilburn_lab.evals.saved import Digested, SavedCells, asked_once

TASK, FULL, STRANGER = "task", "full", "stranger"

HEAD = 1000
"""Characters of each message of a run's head that the model reads; the rest is cut, for all alike."""

DIGITS = 4
"""Of nats, in the file of forecasts."""

_PLAIN = re.compile(r"(?:[A-Za-z]?[a-z]+|[A-Z]+)(?:-[a-z]+)*")
"""A name that may be a word of English. Most of those that a thought writes are, and need no older output."""


class Forecaster(Protocol):
    """A model that says how likely a text is after a prompt; `kilburn_kv.likelihood.Likelihood` is the real one.

    Attributes:
        name: tells its weights from others. context: tokens that it can read.
    """

    name: str
    context: int

    def count(self, text: str) -> int:
        """Tokens of a text."""
        ...

    def losses(self, prompt: str, text: str) -> Sequence[tuple[int, int, float]]:
        """Each token of the text: where it starts and stops, and its negative log-likelihood in nats."""
        ...


def forecaster_of(model: str, dtype: str = "bfloat16") -> Forecaster:
    """The forecaster of weights that are on this machine: a name of `kilburn models list`, a GGUF file, or a folder.

    Raises:
        Unavailable: they are not here. SpecError: no such weights, or no tokenizer. MissingExtra. UnsupportedModel.
    """
    where = Path(model).expanduser()
    try:
        from kilburn_kv.likelihood import load_likelihood
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "kilburn_kv", "torch") from error
    return load_likelihood(where if where.is_dir() else find(model), dtype)


class Forecast(Digested, frozen=True):
    """What a text cost after a prompt. `losses` of each token: where it starts and stops, and nats."""

    losses: list[tuple[int, int, float]]


class StepOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One step after one view: nats a token. `window` is 0 for the task alone and for full history."""

    run: str
    step: int
    policy: str
    window: int
    dependent: float
    all: float


class EquivalenceRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one window, over the steps whose history is longer than the window. Intervals are of 95%, by run.

    Args:
        steps, runs: how many.
        dependent, all: mean nats a token, each step counting alike.
        closed: share of the distance from the task alone to full history, over dependent tokens; closed_all: over all.
            None where the task alone is not worse than full history.
        best: whether it is the best plain baseline of this window, which is chosen on these same steps.
        gain: nats a dependent token below the best plain baseline; to_tail: below the tail.
        gap: share of the distance from the best plain baseline to full history that is closed; None where there is none.
        kept, again, again_share: the share of the prefix kept, tokens read again because of an edit, and their share of those
            shipped, over all prompts of the runs up to the steps (`kilburn_lab.evals.prefix`); None where no policy took part.
    """

    policy: str
    window: int
    steps: int
    runs: int
    dependent: float
    all: float
    closed: float | None
    closed_low: float | None
    closed_high: float | None
    closed_all: float | None
    best: bool
    gain: float
    gain_low: float
    gain_high: float
    to_tail: float
    to_tail_low: float
    to_tail_high: float
    gap: float | None
    kept: float | None
    again: int | None
    again_share: float | None


class Separation(msgspec.Struct, frozen=True, kw_only=True):
    """Nats a token by which full history is better than the task alone, with its 95% interval by run."""

    gain: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.gain:.3f} nats ({self.low:.3f} to {self.high:.3f})"


class EquivalenceReport(EvalReport, frozen=True, kw_only=True):
    """All rows.

    Args:
        sample: in words, which runs these are. model: in words.
        steps, runs: that were drawn. dependents, tokens: tokens that depend on older outputs, and all, of those steps.
        dependent, all: what separates full history from the task alone.
    """

    sample: str
    model: str
    seed: int
    steps: int
    runs: int
    dependents: int
    tokens: int
    dependent: Separation
    all: Separation
    rows: list[EquivalenceRow]
    outcomes: list[StepOutcome]

    @property
    def separates(self) -> bool:
        """Whether full history is better than the task alone over dependent tokens: else no row means anything."""
        return self.dependent.low > 0

    def table(self) -> str:
        """Plain text: whether the measure separates, then a line for each policy and window."""
        answer = "yes" if self.separates else "NO, so the rows say nothing"
        return "\n\n".join(
            [
                f"separates: {answer}. Full history is better than the task alone by\n{self.dependent} a dependent token,"
                f" {self.all} a token of all",
                f"{self.steps} steps of {self.runs} runs drawn by seed {self.seed}; {self.dependents} of {self.tokens} tokens"
                f" depend on older outputs\nmodel: {self.model}\nruns: {self.sample}",
                "Nats a token of what the agent wrote next, each step alike; share of the way from the task alone to full"
                " history;\nnats below the best plain baseline (it is chosen here, on the same steps);"
                "\nshare of the way from the best plain baseline to full history. One token of a window is"
                f" {CHARACTERS} characters.\n{PREFIX_WORDS}",
                self._rows_table(),
            ]
        )

    def _rows_table(self) -> str:
        columns = (
            "window={at} | policy={policy} | steps={steps} | nats={dependent:.3f} | closed={closed:+.2f} | "
            "95%={closed_low:+.2f} {closed_high:+.2f} | to best={to_best} | 95%={below.gain_low:+.2f} {below.gain_high:+.2f} | "
            "gap={below.gap:+.2f} | of all={closed_all:+.2f} | kept={kept:.2f} | again={thousands:.1f} | share={again_share:.2f}"
        )
        return table_of(
            self.rows,
            columns,
            at=lambda row: row.window or "",
            to_best=lambda row: "best" if row.best else f"{row.gain:+.2f}",
            below=lambda row: None if row.best else row,
            thousands=lambda row: None if row.again is None else row.again / 1000,
        )


class _Moment(NamedTuple):
    """A step that was drawn: its run, what the agent wrote, the characters of it that depend, and its two bounds."""

    run: Trajectory
    wanted: list[Reference]
    step: int
    text: str
    spans: tuple[tuple[int, int], ...]
    head: str
    """The task, and before an action its thought."""
    history: str


_Shipped = dict[tuple[str, int], PolicyCounts]
"""What was counted of the prompts, by policy and window."""

_Cell = dict[tuple[str, int], StepOutcome]
"""The outcomes of one view, by run and step."""


class _View(NamedTuple):
    policy: str
    window: int
    prompt: str


def evaluate(
    sample: Sample,
    forecaster: Forecaster,
    *,
    windows: Sequence[int] = (1000,),
    policies: Sequence[str] = EVERYBODY,
    steps: int = 1,
    context: int = 8192,
    model: str = "",
    progress: Progress = unwatched,
    saved: SavedCells[Forecast] | None = None,
) -> EquivalenceReport:
    """Measure each policy at each window on steps that are drawn by the sample's seed.

    Steps are drawn among those that refer to older outputs, whose history is longer than the smallest window, and
    whose history the model can read whole.

    Args:
        windows: in tokens of four characters.
        policies: names of baselines, or specs of policies; the tail always takes part.
        steps: how many are drawn; fewer if there are no more.
        context: tokens of the model that task, full history and action may take, at most its own context.
        model: the forecaster in words, for the report.
        progress: called with the finished and the total forecasts.
        saved: forecasts that were made before; new ones are added to it.

    Raises:
        SpecError: a window below 1, no such policy, or no step that fits.
    """
    if not windows or min(windows) < 1 or steps < 1:
        raise SpecError(f"windows={list(windows)}, steps={steps}", advice="give one or more of each, each of at least 1")
    wide = sorted(set(windows))
    listed = [(window, entry) for window in wide for entry in entries(list(policies), "", window)]
    entrants = [(window, entry) for window, entry in listed if entry.label != HISTORY]  # `FULL`, once for all windows
    drawn = _draw(sample, forecaster, wide[0] * CHARACTERS, steps, min(context, forecaster.context))
    if not drawn:
        raise SpecError("no step fits", advice="give runs with references to older outputs, smaller windows, or more context")
    forecasts: list[tuple[_Moment, dict[tuple[str, int], Forecast]]] = []
    shipped: _Shipped = {}
    total = sum(2 + sum(len(one.history) > window * CHARACTERS for window, _ in entrants) for one in drawn)
    done = 0
    progress(done, total)
    for at, moment in enumerate(drawn):
        views = sorted(_views(moment, drawn[at + 1 :] + drawn[:at], entrants, sample, shipped), key=lambda view: view.prompt)
        found: dict[tuple[str, int], Forecast] = {}
        for prompt, same in groupby(views, key=lambda view: view.prompt):
            forecast = _read(forecaster, prompt, moment.text, saved)
            found |= {(view.policy, view.window): forecast for view in same}
            progress(done + sum(policy != STRANGER for policy, _ in found), total)
        forecasts.append((moment, found))
        done += sum(policy != STRANGER for policy, _ in found)
    labels = [TASK, FULL, STRANGER, *(entry.label for _, entry in entrants)]
    return _report(sample, forecasts, list(dict.fromkeys(labels)), model or forecaster.name, shipped)


def _draw(sample: Sample, forecaster: Forecaster, shortest: int, steps: int, context: int) -> list[_Moment]:
    runs = {run.id: run for run in sample.runs}
    places = sorted({(one.run, one.step) for listed in sample.wanted.values() for one in listed})
    random.Random(f"{sample.seed}/equivalence").shuffle(places)
    drawn: list[_Moment] = []
    for run, step in places:
        moment = _moment(runs[run], sample.wanted[run], step, reply=sample.reply)
        # No token is longer than a few characters, so what is far too long need not be tokenised.
        fits = shortest < len(moment.history) < context * 2 * CHARACTERS
        if fits and moment.spans and forecaster.count(f"{moment.head}{moment.history}{moment.text}") + 2 <= context:
            drawn.append(moment)
            if len(drawn) == steps:
                break
    return drawn


def _moment(run: Trajectory, wanted: list[Reference], at: int, *, reply: bool) -> _Moment:
    step = run.steps[at]
    text = f"{step.thought}\n{step.action}" if reply else step.action
    told = _before(run, at, History(0), reply=reply)
    head = "\n".join(turn.content[:HEAD] for turn in run.head)
    return _Moment(run, wanted, at, text, tuple(_spans(text, wanted, at)), head, told)


def _spans(text: str, wanted: Iterable[Reference], at: int) -> Iterator[tuple[int, int]]:
    """Where the text first writes what it refers to; once written, it can be copied from there. Names that may be plain
    words are left out."""
    for one in wanted:
        if one.step == at and (one.kind == "copy" or not _PLAIN.fullmatch(one.name)):
            found = re.search(rf"(?<!\w){re.escape(one.name)}(?!\w)", text)
            if found is not None:
                yield found.span()


def _depends(moment: _Moment, start: int, stop: int) -> bool:
    """Whether a token of the text is part of what it refers to."""
    return any(start < end and stop > begin for begin, end in moment.spans)


def _views(
    moment: _Moment, others: Sequence[_Moment], entrants: list[tuple[int, Entrant]], sample: Sample, shipped: _Shipped
) -> Iterator[_View]:
    """What the model is given before the text: by label and window."""
    run, step = moment.run, moment.run.steps[moment.step]
    begin = moment.head + "\n\n"
    yield _View(TASK, 0, begin if sample.reply else f"{begin}{step.thought}\n")
    yield _View(FULL, 0, f"{begin}{moment.history}\n")
    for window in dict.fromkeys(window for window, _ in entrants):
        if len(moment.history) <= window * CHARACTERS:
            continue
        strange = (one.history for one in others if one.run.asked != run.asked and len(one.history) > window * CHARACTERS)
        foreign = next(strange, None)
        if foreign is not None:
            own = "" if sample.reply else f"{step.thought}\n"
            yield _View(STRANGER, window, f"{begin}{foreign[len(own) - window * CHARACTERS :]}\n{own}")
        for _, entry in (each for each in entrants if each[0] == window):
            yield _View(entry.label, window, f"{begin}{_shown(moment, entry, window, sample, shipped)}\n")


def _shown(moment: _Moment, entry: Entrant, window: int, sample: Sample, shipped: _Shipped) -> str:
    policy = policy_for(moment.run, moment.wanted, entry.at(window), reply=sample.reply, tools=sample.tools)
    cell = shipped.setdefault((entry.label, window), PolicyCounts(policy=entry.label, window=window))
    with contender_of(window, policy, tools=sample.tools) as contender:
        return _before(moment.run, moment.step, Counted(contender, cell), reply=sample.reply)


def _before(run: Trajectory, step: int, contender: Contender, *, reply: bool) -> str:
    return next(shown for at, shown in prompts(run, contender, reply=reply) if at == step)


def _read(forecaster: Forecaster, prompt: str, text: str, saved: SavedCells[Forecast] | None) -> Forecast:
    def ask(digest: str) -> Forecast:
        return Forecast(digest, [(start, stop, round(nats, DIGITS)) for start, stop, nats in forecaster.losses(prompt, text)])

    return asked_once(saved, (prompt, text), ask)


def _report(
    sample: Sample,
    forecasts: list[tuple[_Moment, dict[tuple[str, int], Forecast]]],
    order: list[str],
    model: str,
    shipped: _Shipped,
) -> EquivalenceReport:
    outcomes = [
        StepOutcome(
            run=moment.run.id,
            step=moment.step,
            policy=policy,
            window=window,
            dependent=mean(nats for start, stop, nats in one.losses if _depends(moment, start, stop)),
            all=mean(nats for _, _, nats in one.losses),
        )
        for moment, found in forecasts
        for (policy, window), one in sorted(found.items(), key=lambda item: order.index(item[0][0]))
    ]
    cells: dict[tuple[str, int], _Cell] = {}
    for outcome in outcomes:
        cells.setdefault((outcome.policy, outcome.window), {})[outcome.run, outcome.step] = outcome
    task, full = cells[TASK, 0], cells[FULL, 0]
    taken = [(moment, found[FULL, 0]) for moment, found in forecasts]
    return EquivalenceReport(
        sample=sample.words,
        model=model,
        seed=sample.seed,
        steps=len(forecasts),
        runs=len({moment.run.id for moment, _ in forecasts}),
        dependents=sum(_depends(moment, start, stop) for moment, one in taken for start, stop, _ in one.losses),
        tokens=sum(len(one.losses) for _, one in taken),
        dependent=_separation(task, full, sample.seed),
        all=_separation(task, full, sample.seed, "all"),
        rows=_rows(cells, shipped, sample.seed),
        outcomes=outcomes,
    )


def _rows(cells: dict[tuple[str, int], _Cell], shipped: _Shipped, seed: int) -> list[EquivalenceRow]:
    rows = []
    for window in sorted({window for _, window in cells if window}):
        found = {label: cells[label, of] for label, of in cells if of in (0, window)}
        tail = found["tail"]
        best = min(
            (label for label in found if label in BASELINES),
            key=lambda label: mean(one.dependent for one in found[label].values()),
        )
        ends = {TASK: -2, STRANGER: -1, FULL: 1}
        order = sorted(found, key=lambda label: ends.get(label, 0))
        for label in order:
            own = {at: found[label][at] for at in tail if at in found[label]}
            gain = _separation(found[best], own, seed)
            to_tail = _separation(tail, own, seed)
            counts = shipped.get((label, window))
            closed, low, high = _closed(found[TASK], own, found[FULL], "dependent", seed)
            rows.append(
                EquivalenceRow(
                    policy=label,
                    window=window,
                    steps=len(own),
                    runs=len({run for run, _ in own}),
                    dependent=mean(one.dependent for one in own.values()),
                    all=mean(one.all for one in own.values()),
                    closed=closed,
                    closed_low=low,
                    closed_high=high,
                    closed_all=_closed(found[TASK], own, found[FULL], "all", seed)[0],
                    best=label == best,
                    gain=gain.gain,
                    gain_low=gain.low,
                    gain_high=gain.high,
                    to_tail=to_tail.gain,
                    to_tail_low=to_tail.low,
                    to_tail_high=to_tail.high,
                    gap=_closed(found[best], own, found[FULL], "dependent", seed)[0],
                    kept=counts.kept if counts is not None else None,
                    again=counts.refilled if counts is not None else None,
                    again_share=counts.again_share if counts is not None else None,
                )
            )
    return rows


def _separation(worse: _Cell, better: _Cell, seed: int, kind: str = "dependent") -> Separation:
    """What the second view is better by, on the steps that it has."""
    groups = grouped((one.run, getattr(worse[at], kind) - getattr(one, kind)) for at, one in better.items())
    low, high = interval(groups, seed)
    return Separation(gain=mean(value for group in groups for value in group), low=low, high=high)


def _closed(floor: _Cell, own: _Cell, ceiling: _Cell, kind: str, seed: int) -> tuple[float | None, float | None, float | None]:
    """The share of the way from the floor to the ceiling that a view goes, with its interval by run."""
    ways = [(getattr(floor[at], kind), getattr(one, kind), getattr(ceiling[at], kind)) for at, one in own.items()]
    groups = grouped((one.run, (base - found, base - top)) for one, (base, found, top) in zip(own.values(), ways, strict=True))

    def share(drawn: Sequence[list[tuple[float, float]]]) -> float | None:
        whole = sum(way for group in drawn for _, way in group)
        return sum(gone for group in drawn for gone, _ in group) / whole if whole > 0 else None

    low, high = resampled(share, groups, seed) or (None, None)
    return share(groups), low, high

"""Are questions answered right by a reader who knows only what the window shows?

At the end of a session the user asks for one fact of it (`kilburn_lab.evals.questions`). The question is a message like any
other, so that policies see it as the request before the prompt is rendered. Then a reader answers from the prompt. Where
the reader is offered `recall` and `search_memory`, it may call them first; their results are messages too.

The exact reader (`kilburn_lab.evals.readers`) is no model: it is right where the prompt shows the whole text that has the answer,
so it is an upper bound. Beside the policies stand the question alone and the full history.

    report = evaluate(windows=[1000, 2000], policies=["tail", "hybrid"])
    print(report.table())
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kilburn.errors import SpecError
from kilburn.model import Model
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.baselines import CHARACTERS, HISTORY, Contender, compared
from kilburn_lab.evals.candidate import KilburnCandidate, contender_of
from kilburn_lab.evals.cost import Bill, bill_table, bills_of
from kilburn_lab.evals.intervals import mean
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.metered import Metered, Spent, name_of, spent_tables
from kilburn_lab.evals.outcomes import Counted, PolicyCounts, Shipping
from kilburn_lab.evals.prefix import WORDS as PREFIX_WORDS
from kilburn_lab.evals.prefix import length_of, text_of
from kilburn_lab.evals.questions import FAMILIES, TOKENS, Interview, RunQuestion, interviews, normal
from kilburn_lab.evals.readers import ANSWER, ARGUMENTS, ExactReader, Reader
from kilburn_lab.evals.report import EvalReport, best_words, columns, table_of
from kilburn_lab.evals.roster import Entrant, entries
from kilburn_lab.evals.saved import Digested, SavedCells, asked_once

ALONE = "question alone"
"""The floor; its window is 0."""

CALLS = 2
"""Of memory tools, for one question."""


class SavedReply(Digested, frozen=True):
    """What a reader said to one prompt, and the seconds that it took."""

    verb: str
    text: str
    seconds: float


class AnsweredQuestion(msgspec.Struct, frozen=True, kw_only=True):
    """How one question was answered.

    Args:
        language: of the source that states the fact; "" if it is none.
        said: the reader's answer.
        calls: of memory tools. shipped: tokens of all prompts of the question; peak: of the largest one.
        seconds: that the reader took. failed: plans in which the policy raised, or returned nonsense.
    """

    session: str
    kind: str
    language: str
    question: str
    policy: str
    window: int
    said: str
    right: bool
    calls: int
    shipped: int
    peak: int
    seconds: float
    failed: int = 0


class AnswerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy at one window, over all questions. Intervals are of 95%, resampled by session.

    Args:
        right: share of the questions. families: by where the answer is from. languages: of those from sources, by language.
        reached: right, as a share of the full history's.
        best: of the baselines that were measured at this window, the one with most right answers; itself without a window.
        gain: less the share of `best`, on the same questions.
        kept: the share of the prefix kept, over the prompts of the sessions and of the questions
            (`kilburn_lab.evals.prefix`); None if no prompt has one before it.
        again: tokens of these that were told before and are read again because of an edit. again_share: their share of all.
        edited, broken: prompts that do not begin with all, and with half, of the one before. prompts: all of them.
        calls: of memory tools, a question. shipped: tokens of a question's prompts. seconds: of reading, a question.
        overflow: prompts over the window. failed: plans in which the policy raised, or returned nonsense.
        writer: what was asked of the model that answers the policy, in all sessions.
    """

    policy: str
    window: int
    questions: int
    right: float
    low: float
    high: float
    families: dict[str, float]
    languages: dict[str, float]
    reached: float
    best: str
    gain: float
    gain_low: float
    gain_high: float
    kept: float | None
    again: int
    again_share: float
    edited: int
    broken: int
    prompts: int
    calls: float
    shipped: float
    seconds: float
    overflow: int
    failed: int
    writer: Spent


class AnswerReport(EvalReport, frozen=True, kw_only=True):
    """All rows; `words` says what was asked of whom. `bills` have what the prompts of the sessions and of the questions cost."""

    words: str
    rows: list[AnswerRow]
    bills: list[Bill]
    outcomes: list[AnsweredQuestion]

    def table(self) -> str:
        """Plain text: a line for each policy and window."""
        text = (
            "window={at} | policy={policy} | right={right:.3f} | 95%={low:.2f}-{high:.2f} | "
            "to best, 95%={against.gain:+.3f}  {against.gain_low:+.2f} {against.gain_high:+.2f} | "
            f"{columns('families', sorted(set(FAMILIES.values())), '.2f')} | {self._languages()}"
            "kept={kept:.2f} | again={thousands:.1f} | share={again_share:.2f} | "
            "calls={calls:.2f} | shipped={shipped:,.0f}"
            + " | s={seconds:.2f}" * any(row.seconds >= 0.01 for row in self.rows)
            + " | over={overflow} | failed={failed}"
        )
        rows = table_of(
            self.rows,
            text,
            at=lambda row: row.window or "-",
            against=lambda row: row if row.window else None,
            thousands=lambda row: row.again / 1000,
        )
        best = best_words("share of right answers", (row for row in self.rows if row.window))
        spent = spent_tables((row.window, row.policy, {"writer": row.writer}) for row in self.rows)
        return "\n\n".join([self.words, f"{best}\n{PREFIX_WORDS}", rows, *spent, bill_table(self.bills, "right answers")])

    def _languages(self) -> str:
        """The columns of languages, if there are several or it is not Python."""
        known = sorted({language for row in self.rows for language in row.languages})
        return "" if known in ([], ["Python"]) else f"{columns('languages', known, '.2f')} | "


def evaluate(
    sessions: int = 8,
    questions: int = 6,
    *,
    windows: Sequence[int] = (1000, 2000, 4000),
    policies: Sequence[str] = EVERYBODY,
    reader: Reader | None = None,
    tools: bool = False,
    swap: bool = False,
    writer: str | Model = "",
    data: str | Path | None = None,
    sources: Path | None = None,
    logs: str | Path | None = None,
    tokens: int = TOKENS,
    half: str = "",
    pause: float | None = None,
    seed: int = 0,
    progress: Progress = unwatched,
    saved: SavedCells[SavedReply] | None = None,
) -> AnswerReport:
    """Ask the questions under each policy at each window; the tail always takes part.

    Args:
        sessions, questions, data, sources, logs, tokens, half: what is asked; see `kilburn_lab.evals.questions.interviews`.
        windows: in tokens of four characters.
        policies: names of baselines, or specs of policies.
        reader: who answers; None for the exact reader.
        tools: whether the reader may call `recall` and `search_memory`, twice a question. Baselines have none.
        swap: ask each session the questions of the next one, so that only chance is left.
        writer: answers the policies' questions: a model or its spec. Policies that can ask then have a second row.
        pause: seconds between two prompts, for what providers are paid; None if a cached prefix never expires.
        seed: of the sessions, the questions and the intervals.
        progress: called with the questions asked and their total.
        saved: where replies are kept, and taken from.

    Raises:
        SpecError: a number below 1, no such policy, no sessions, or a Python without sources.
        InvalidMessage: a file that cannot be read, or a line that is no run.
    """
    if not windows or min(windows) < 1:
        raise SpecError(f"windows={list(windows)}", advice="give one or more, of 1 token or more")
    who = reader or ExactReader()
    held = interviews(sessions, questions, seed=seed, data=data, sources=sources, logs=logs, tokens=tokens, half=half)
    asked = [(one, question) for one in held for question in one.questions]
    if swap:
        others = {one.id: other for one, other in zip(held, [*held[1:], held[0]], strict=True)}
        asked = [(others[one.id], question) for one, question in asked]
    jobs = [(Entrant(ALONE, HISTORY), 0)]
    jobs += [(entry, window) for window in dict.fromkeys(windows) for entry in entries(list(policies), name_of(writer), window)]
    outcomes: list[AnsweredQuestion] = []
    writers: dict[tuple[str, int], Metered] = {}
    cells: dict[tuple[str, int], PolicyCounts] = {}
    progress(0, len(jobs) * len(asked))
    for entry, window in jobs:
        cell = cells.setdefault((entry.label, window), PolicyCounts(policy=entry.label, window=window))
        told: dict[str, Shipping] = {}
        # A session is told again for each question; what is written the same way again is not asked again.
        model = writers.setdefault((entry.label, window), Metered(writer)) if entry.model else None
        for one, question in asked:
            outcomes.append(_ask(who, saved, one, question, cell, entry.at(window), model, told, tools=tools))
            progress(len(outcomes), len(jobs) * len(asked))
    source = "made up" if data is None and sources is None else f"of {Path(data or sources or '').resolve().name}"
    words = f"{len(asked)} questions on {len(held)} sessions {source}, seed {seed}" + (f", half {half!r}" if half else "")
    words += f"; the {who.name} reader {'may call recall and search_memory' if tools else 'has no tools'}"
    words += f"; one token is {CHARACTERS} characters" + ("; asked of other sessions: chance alone" if swap else "")
    spoken = Counter(question.language for _, question in asked if question.language)
    words += "\nsources: " + (
        ", ".join(f"{count} questions in {language}" for language, count in sorted(spoken.items())) or "none"
    )
    spent = {cell: one.spent for cell, one in writers.items()}
    right = {at: sum(one.right for one in outcomes if (one.policy, one.window) == at) for at in cells}
    bills = bills_of([(cell, right[at]) for at, cell in cells.items() if at[0] != ALONE], pause)
    return AnswerReport(words=words, rows=_rows(outcomes, cells, spent, seed), bills=bills, outcomes=outcomes)


def _ask(
    reader: Reader,
    saved: SavedCells[SavedReply] | None,
    interview: Interview,
    question: RunQuestion,
    cell: PolicyCounts,
    spec: str,
    model: Metered | None,
    told: dict[str, Shipping],
    *,
    tools: bool,
) -> AnsweredQuestion:
    """Ask one question. The session's own prompts are counted with the first of its questions."""
    steps = () if cell.policy == ALONE else interview.steps
    with contender_of(cell.window, spec, model, tools=True) as own:
        counted = Counted(own, cell) if interview.id not in told else None
        teller: Contender = counted or own
        for step in steps:
            if step.user:
                teller.user(step.observation)
            else:
                teller.prompt()
                teller.reply(step.thought, step.action)
                teller.observation(step.observation)
        if counted is not None:
            told[interview.id] = counted.shipping
        asked = Counted(own, cell, told[interview.id].copy())
        asked.user(question.text)
        memory = own if tools and isinstance(own, KilburnCandidate) else None
        prompts: list[int] = []
        results: list[str] = []
        seconds = 0.0
        while True:
            prompt = asked.prompt()
            prompts.append(-(-length_of(prompt) // CHARACTERS))
            more = memory is not None and len(results) < CALLS
            reply = _read(reader, saved, question, text_of(prompt), results, tools=more)
            seconds += reply.seconds
            if memory is None or reply.verb == ANSWER:
                break
            results.append(memory.call(reply.verb, {ARGUMENTS[reply.verb]: reply.text}))
            asked.shipping.tell(results[-1])
        failed = own.stats().policy_failures if isinstance(own, KilburnCandidate) else 0
    return AnsweredQuestion(
        session=interview.id,
        kind=question.kind,
        language=question.language,
        question=question.text,
        policy=cell.policy,
        window=cell.window,
        said=reply.text,
        right=normal(reply.text) == normal(question.answer),
        calls=len(results),
        shipped=sum(prompts),
        peak=max(prompts),
        seconds=seconds,
        failed=failed,
    )


def _read(
    reader: Reader,
    saved: SavedCells[SavedReply] | None,
    question: RunQuestion,
    prompt: str,
    results: Sequence[str],
    *,
    tools: bool,
) -> SavedReply:
    def ask(digest: str) -> SavedReply:
        began = time.monotonic()
        verb, text = reader.reply(question, prompt, results, tools=tools)
        return SavedReply(digest, verb, text, time.monotonic() - began)

    return asked_once(saved, (reader.name, question, prompt, results, tools), ask)


def _rows(
    outcomes: Sequence[AnsweredQuestion],
    cells: dict[tuple[str, int], PolicyCounts],
    spent: dict[tuple[str, int], Spent],
    seed: int,
) -> list[AnswerRow]:
    groups: dict[tuple[int, str], list[AnsweredQuestion]] = {}
    for one in outcomes:
        groups.setdefault((one.window, one.policy), []).append(one)
    rights = {group: [float(one.right) for one in own] for group, own in groups.items()}
    rows = []
    for (window, policy), own in groups.items():
        cell = cells[policy, window]
        here = {label: values for (at, label), values in rights.items() if at == window}
        compares = compared(here, policy, [one.session for one in own], seed, "" if window else policy)
        known = {FAMILIES[one.kind] for one in own}
        spoken = sorted({one.language for one in own if one.language})
        rows.append(
            AnswerRow(
                policy=policy,
                window=window,
                questions=len(own),
                right=mean(here[policy]),
                **compares,
                languages={name: mean(one.right for one in own if one.language == name) for name in spoken},
                families={family: mean(one.right for one in own if FAMILIES[one.kind] == family) for family in sorted(known)},
                reached=mean(here[policy]) / (mean(here.get(HISTORY, ())) or 1.0),
                kept=cell.kept,
                again=cell.refilled,
                again_share=cell.again_share,
                edited=cell.edited,
                broken=cell.broken,
                prompts=cell.calls,
                calls=mean(one.calls for one in own),
                shipped=mean(one.shipped for one in own),
                seconds=mean(one.seconds for one in own),
                overflow=sum(one.peak > window > 0 for one in own),
                failed=sum(one.failed for one in own),
                writer=spent.get((policy, window), Spent()),
            )
        )
    return rows

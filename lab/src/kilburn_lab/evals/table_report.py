"""The report of `kilburn_lab.evals.table`: sessions, rows, the tested ordering, and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median, quantiles

import msgspec

from kilburn_lab.evals.baselines import CHARACTERS, PLAIN
from kilburn_lab.evals.intervals import interval
from kilburn_lab.evals.report import EvalReport, row_of, table_of

ENTRIES = "entries"
"""The name of the usual LRU buffer, which counts entries and not tokens."""

TIERS = "tiers"
"""The name of brief 002's hybrid, as its words describe it: tiers, with eviction by importance in each."""

TERMS = {
    "utilisation": "share of the window's capacity taken by pages that the session still needs, at this prompt or a later one; "
    "the mean over the prompts after the window was full for the first time. The sessions were made so that it is "
    "known which interaction needs which message. Of an excerpt or a summary, the lines of needed messages count. A baseline has "
    "no pages.",
    "accuracy": "share of the questions about this session whose answer was in the prompt, word for word. This is the headline: "
    "it is what the policy decided.",
    "+search": "the same, or one search of the session at the time of asking found it. It is what an agent gets that searches. "
    "A baseline has no search.",
    "earlier": "share of the questions about earlier sessions of this user that were answered by the prompt or one search of "
    "the session (off), or also by one search over all sessions of this user (on).",
    "kept": "share of the prefix kept: of the tokens of a prompt, those that are the same as the beginning of the prompt before.",
    "again": "thousands of tokens that were told before and are read again, because the prompt was edited before them.",
    "latency": "milliseconds from a question to its prompt and the hits of one search, over SQLite in memory: the append, with "
    " the policy's plan, the rendering, and the search. The middle one, and the 95th of 100.",
    "alone": "share of the sessions whose prompt would have exceeded the window if the policy had been alone: the kernel had "
    "to make room itself at least once.",
    "overflow": "share of the sessions in which a prompt did exceed the window. The kernel keeps it at 0.",
}
"""What the columns mean."""


class Published(msgspec.Struct, frozen=True):
    """One row of brief 002's table: shares, and milliseconds. Its method, model and definitions are unpublished."""

    utilisation: float
    latency: float
    accuracy: float
    overflow: float


BRIEF = {
    "lru": Published(0.71, 12, 0.67, 0.34),
    "importance": Published(0.84, 18, 0.74, 0.19),
    "tiered": Published(0.91, 31, 0.78, 0.08),
    TIERS: Published(0.93, 24, 0.81, 0.06),
}
"""Brief 002's figures, worst strategy first; it calls the last one "hybrid (tiered + importance)"."""

ORDER = (("importance", "lru"), ("tiered", "importance"), (TIERS, "tiered"), ("hybrid", "tiered"))
"""The ordering that is tested: brief 002's, and ours beside it for the `hybrid` that ships."""


class QuestionOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One question: about an earlier session or this one, whether its answer was shown, was shown or found by one
    search of the session, or by one recall over everything; and the milliseconds to the prompt and these hits."""

    earlier: bool
    shown: bool
    found: bool
    recalled: bool
    ms: float


class Streamed(msgspec.Struct, kw_only=True):
    """One session under one policy.

    Args:
        prompts, shipped: prompts and their tokens.
        later, cached: tokens of the prompts that have one before them, and those of its beginning that they kept; again:
            tokens read again after an edit (see `kilburn_lab.evals.prefix`).
        full, used: prompts since the window was full for the first time, and the sum of their utilisations.
        overflow: prompts over the window.
        alone: whether the kernel had to make room.
        acts: moves of the policy. refused: plans that broke a law. failed: plans in which the policy raised, or returned
            nonsense. asks: questions to a model.
    """

    policy: str
    session: str
    questions: list[QuestionOutcome] = []
    prompts: int = 0
    shipped: int = 0
    later: int = 0
    cached: int = 0
    again: int = 0
    full: int = 0
    used: float = 0.0
    overflow: int = 0
    alone: bool = False
    acts: int = 0
    refused: int = 0
    failed: int = 0
    asks: int = 0
    seconds: float = 0.0


class TableRow(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. See `TERMS`; `_low` and `_high` bound 95%, resampled by session. A figure is None where nothing was
    counted: no question, or no window that was full. `again` is in tokens of four characters."""

    policy: str
    sessions: int
    questions: int
    utilisation: float | None
    utilisation_low: float
    utilisation_high: float
    latency: float | None
    latency_95: float | None
    accuracy: float | None
    accuracy_low: float
    accuracy_high: float
    searched: float | None
    earlier_off: float | None
    earlier_on: float | None
    kept: float | None
    again: int
    alone: float
    alone_low: float
    alone_high: float
    overflow: float
    shipped: int
    acts: int
    refused: int
    failed: int
    asks: int
    seconds: float


class Margin(msgspec.Struct, frozen=True, kw_only=True):
    """How far one policy is ahead of another in one column, with the 95% interval, paired and resampled by session.

    `ahead` is positive where `better` is better, so for overflow fewer sessions count as ahead. `verdict` is "ahead",
    "behind", "equal" (no difference at all), or "undecided" if the interval holds 0.
    """

    column: str
    better: str
    worse: str
    ahead: float
    low: float
    high: float
    verdict: str


COLUMNS: dict[str, tuple[Callable[[Streamed], Sequence[float]], int]] = {
    "accuracy": (lambda one: [float(question.shown) for question in one.questions if not question.earlier], 1),
    "utilisation": (lambda one: [one.used / one.full] if one.full else [], 1),
    "alone": (lambda one: [float(one.alone)], -1),
}
"""What a session has of each column that is compared, and whether more is better (1) or worse (-1)."""


class TableReport(EvalReport, frozen=True, kw_only=True):
    """All rows. One token is four characters.

    Args:
        margins: of brief 002's ordering: each of its strategies against the one before, and hybrid against every other policy.
        terms: what the columns mean. published: brief 002's own figures.
    """

    window: int
    sessions: int
    interactions: int
    seed: int
    seconds: float
    rows: list[TableRow]
    margins: list[Margin]
    terms: dict[str, str] = msgspec.field(default_factory=TERMS.copy)
    published: dict[str, Published] = msgspec.field(default_factory=BRIEF.copy)

    @classmethod
    def of(
        cls, streamed: Mapping[str, Sequence[Streamed]], *, window: int, interactions: int, seed: int, seconds: float
    ) -> TableReport:
        """Add up the sessions of each policy; all policies have had the same ones, in the same order."""
        pairs = [*ORDER, *(("hybrid", other) for other in streamed if other != "hybrid")]
        return cls(
            window=window,
            sessions=max(map(len, streamed.values()), default=0),
            interactions=interactions,
            seed=seed,
            seconds=seconds,
            rows=[_row(policy, done, seed) for policy, done in streamed.items()],
            margins=[
                _margin(column, better, worse, streamed, seed)
                for column in COLUMNS
                for better, worse in dict.fromkeys(pairs)
                if better in streamed and worse in streamed and (column == "accuracy" or worse not in PLAIN)
            ],
        )

    def margin(self, better: str, worse: str, column: str = "accuracy") -> Margin:
        """One comparison; KeyError if it was not made."""
        return row_of(self.margins, better=better, worse=worse, column=column)

    def table(self) -> str:
        """Plain text: the rows, brief 002's beside them, its ordering, and what the columns mean."""
        known, words = {row.policy: row for row in self.rows}, ("column", "is it")
        parts = [
            f"{self.sessions} sessions of {self.interactions} interactions, seed {self.seed}; a window of {self.window:,} "
            f"tokens of {CHARACTERS} characters; {self.seconds:.0f} s",
            table_of(
                sorted(self.rows, key=lambda row: -(row.accuracy or 0)), _ROWS, none="-", thousands=lambda row: row.again / 1000
            ),
            f"Brief 002's figures (its method is unpublished), and ours; its hybrid is {TIERS!r}, the hybrid that ships is not",
            table_of((*BRIEF, "hybrid"), _BESIDE, none="-", policy=lambda name: name, theirs=self.published.get, ours=known.get),
            "The ordering: how far each strategy is ahead of the one before it",
            table_of([one for one in self.margins if (one.better, one.worse) in ORDER], _MARGINS, words),
            "hybrid and every other policy: how far it is ahead in accuracy",
            table_of([one for one in self.margins if one.better == "hybrid" and one.column == "accuracy"], _MARGINS, words),
            "\n".join(f"{name}: {meaning}" for name, meaning in self.terms.items()),
        ]
        return "\n\n".join(parts)


def _row(policy: str, done: Sequence[Streamed], seed: int) -> TableRow:
    here = [question for one in done for question in one.questions if not question.earlier]
    before = [question for one in done for question in one.questions if question.earlier]
    waits = [question.ms for one in done for question in one.questions]
    bounds = {name: interval([list(figures(one)) for one in done], seed) for name, (figures, _) in COLUMNS.items()}
    return TableRow(
        policy=policy,
        sessions=len(done),
        questions=len(here),
        utilisation=_mean([value for one in done for value in COLUMNS["utilisation"][0](one)]),
        utilisation_low=bounds["utilisation"][0],
        utilisation_high=bounds["utilisation"][1],
        latency=median(waits) if waits else None,
        latency_95=quantiles(waits, n=20, method="inclusive")[-1] if len(waits) > 1 else None,
        accuracy=_mean([question.shown for question in here]),
        accuracy_low=bounds["accuracy"][0],
        accuracy_high=bounds["accuracy"][1],
        searched=_mean([question.found for question in here]),
        earlier_off=_mean([question.found for question in before]),
        earlier_on=_mean([question.recalled for question in before]),
        kept=sum(one.cached for one in done) / later if (later := sum(one.later for one in done)) else None,
        again=sum(one.again for one in done),
        alone=_mean([one.alone for one in done]) or 0.0,
        alone_low=bounds["alone"][0],
        alone_high=bounds["alone"][1],
        overflow=_mean([one.overflow > 0 for one in done]) or 0.0,
        shipped=sum(one.shipped for one in done),
        acts=sum(one.acts for one in done),
        refused=sum(one.refused for one in done),
        failed=sum(one.failed for one in done),
        asks=sum(one.asks for one in done),
        seconds=sum(one.seconds for one in done),
    )


def _margin(column: str, better: str, worse: str, streamed: Mapping[str, Sequence[Streamed]], seed: int) -> Margin:
    figures, sign = COLUMNS[column]
    groups = [
        [sign * (a - b) for a, b in zip(figures(one), figures(two), strict=True)]
        for one, two in zip(streamed[better], streamed[worse], strict=True)
    ]
    flat = [value for group in groups for value in group]
    low, high = interval(groups, seed)
    equal = not any(flat)
    verdict = "equal" if equal else "ahead" if low > 0 else "behind" if high < 0 else "undecided"
    return Margin(column=column, better=better, worse=worse, ahead=_mean(flat) or 0.0, low=low, high=high, verdict=verdict)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


_ROWS = (
    "policy={policy} | utilisation={utilisation:.1%} | 95%={utilisation_low:.1%}-{utilisation_high:.1%} | "
    "latency={latency:.1f} ms | p95={latency_95:.1f} ms | accuracy={accuracy:.1%} | 95%={accuracy_low:.1%}-{accuracy_high:.1%} | "
    "+search={searched:.1%} | earlier off={earlier_off:.1%} | on={earlier_on:.1%} | kept={kept:.2f} | again={thousands:.1f} | "
    "alone={alone:.1%} | "
    "overflow={overflow:.1%} | moves={acts:,} | refused={refused} | failed={failed} | s={seconds:.0f}"
)
_BESIDE = (
    "policy={policy} | utilisation={theirs.utilisation:.1%} | ours={ours.utilisation:.1%} | latency={theirs.latency:.1f} ms | "
    "ours={ours.latency:.1f} ms | accuracy={theirs.accuracy:.1%} | ours={ours.accuracy:.1%} | overflow={theirs.overflow:.1%} | "
    "alone={ours.alone:.1%} | with the kernel={ours.overflow:.1%}"
)
_MARGINS = "column={column} | is={better} | ahead of={worse} | by={ahead:+.3f} | 95%={low:+.3f} to {high:+.3f} | is it={verdict}"

"""The scores of rankings that were written by `kilburn_lab.evals.recall`, and their report.

Recall at a budget takes whole messages at their whole cost, best first, and leaves out what does not fit; a question
without answers is not counted. The intervals are of 95%, with whole conversations drawn, and paired where they compare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from kilburn_lab.evals.corpora import Answers
from kilburn_lab.evals.intervals import grouped, interval, mean, percentile_95
from kilburn_lab.evals.recall import RecallLine
from kilburn_lab.evals.report import EvalReport, columns, grid, table_of

PLACES = (1, 5, 10, 20)
BUDGETS = (500, 1000, 2000, 4000)
"""Tokens."""


class RecallRow(msgspec.Struct, frozen=True, kw_only=True):
    """One ranking over all questions: shares of the answers found.

    Args:
        at: within so many places; `within` so many tokens.
        low, high: the interval of the difference to `words` at ten places, and at 1,000 tokens.
        p50, p95: milliseconds of a question, its embedding included.
    """

    ranking: str
    corpora: int
    questions: int
    at: dict[int, float]
    ndcg: float
    within: dict[int, float]
    gain: dict[str, tuple[float, float, float]]
    p50: float
    p95: float
    by_corpus: dict[str, float]


class RecallReport(EvalReport, frozen=True, kw_only=True):
    """All rankings of one run."""

    rows: list[RecallRow]

    def table(self) -> str:
        """Plain text for people."""
        text = (
            f"ranking={{ranking}} | {columns('at', PLACES, '.3f', 'R@{}')} | nDCG@10={{ndcg:.3f}} | "
            f"{columns('within', BUDGETS, '.3f', '{}t')} | p50 ms={{p50:.1f}} | p95 ms={{p95:.1f}}"
        )
        first = self.rows[0]
        lines = [f"{first.questions} questions to {first.corpora} conversations", "", table_of(self.rows, text, ("ranking",))]
        for row in self.rows:
            lines += [
                f"{row.ranking} over words, {what}: {gain:+.3f} [{low:+.3f}, {high:+.3f}]"
                for what, (gain, low, high) in row.gain.items()
            ]
        names = sorted(first.by_corpus)
        corpora = [[name, *(f"{row.by_corpus[name]:.3f}" for row in self.rows)] for name in names]
        head = "R@10 by conversation"
        lines += ["", grid([head, *(row.ranking for row in self.rows)], corpora, (head,))]
        return "\n".join(lines)


def read_rows(path: Path) -> list[RecallLine]:
    """The rankings of a file."""
    return [msgspec.json.decode(line, type=RecallLine) for line in path.read_bytes().splitlines() if line]


class _Scores(msgspec.Struct, frozen=True):
    at: dict[int, float]
    ndcg: float
    within: dict[int, float]


def _scores(row: RecallLine, gold: frozenset[str]) -> _Scores:
    ids = [one.id for one in row.ranked]
    at = {place: len(gold & set(ids[:place])) / len(gold) for place in PLACES}
    gained = sum(1 / math.log2(place + 2) for place, one in enumerate(ids[:10]) if one in gold)
    best = sum(1 / math.log2(place + 2) for place in range(min(10, len(gold))))
    within = {}
    for budget in BUDGETS:
        left, found = budget, 0
        for one in row.ranked:
            if one.tokens <= left:
                left -= one.tokens
                found += one.id in gold
        within[budget] = found / len(gold)
    return _Scores(at, gained / best, within)


def report(rankings: dict[str, Sequence[RecallLine]], answers: Answers, seed: int = 0) -> RecallReport:
    """Score rankings of the same questions. `words`, where it is there, is what the others are compared with."""
    scored: dict[str, dict[tuple[str, str], _Scores]] = {}
    for name, rows in rankings.items():
        scored[name] = {}
        for row in rows:
            gold = answers.get((row.name, row.query), (frozenset[str](), ""))[0]
            if gold:
                scored[name][row.name, row.query] = _scores(row, gold)
    base = scored.get("words")
    return RecallReport(rows=[_row(name, rankings[name], scores, base, seed) for name, scores in scored.items()])


def _row(
    name: str,
    rows: Sequence[RecallLine],
    scores: dict[tuple[str, str], _Scores],
    base: dict[tuple[str, str], _Scores] | None,
    seed: int,
) -> RecallRow:
    times = [row.ms for row in rows] or [0.0]
    gain = {}
    if base is not None and base is not scores:
        figures: dict[str, Callable[[_Scores], float]] = {
            "R@10": lambda one: one.at[10],
            "1,000 tokens": lambda one: one.within[1000],
        }
        for what, figure in figures.items():
            groups = grouped((key[0], figure(one) - figure(base[key])) for key, one in scores.items() if key in base)
            low, high = interval(groups, seed)
            gain[what] = (mean(value for group in groups for value in group), low, high)
    corpora = sorted({corpus for corpus, _ in scores})
    return RecallRow(
        ranking=name,
        corpora=len(corpora),
        questions=len(scores),
        at={place: mean(one.at[place] for one in scores.values()) for place in PLACES},
        ndcg=mean(one.ndcg for one in scores.values()),
        within={budget: mean(one.within[budget] for one in scores.values()) for budget in BUDGETS},
        gain=gain,
        p50=median(times),
        p95=percentile_95(times),
        by_corpus={each: mean(one.at[10] for (corpus, _), one in scores.items() if corpus == each) for each in corpora},
    )

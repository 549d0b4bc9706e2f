"""The report of `kilburn_lab.evals.scale`."""

from __future__ import annotations

import msgspec

from kilburn_lab.evals.report import EvalReport, grid, table_of

GOALS = {10_000: (1.0, 2.0), 100_000: (3.0, 6.0), 1_000_000: (10.0, 20.0)}
"""Milliseconds of processor time for a question that Kilburn aims at, by words and with vectors, by the number of facts."""

BATCHED, SINGLE = 5_000.0, 1_000.0
"""Facts that it aims to store in a second, in batches and one by one."""


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One system with so many facts. None where it was not measured.

    Args:
        rate: facts stored in a second, in batches, without vectors; of other systems, with theirs, made beforehand.
        rate_vectors: the same with vectors, the embedding itself not counted.
        single: facts stored in a second one by one, each in a transaction of its own, without vectors.
        first: seconds from opening the file to the first answer.
        p50, p95: milliseconds of a question, its embedding not counted, by words and vectors. cpu: the middle one of the
            milliseconds that the processor worked for it; it says more than p50 on a machine that does other work too.
        hits: share of the questions whose fact is among the first ten.
        words_first, words_p50, words_p95, words_cpu, words_hits: the same by words alone.
        disk: bytes of its files. rss: bytes of memory after the questions, in a session that only asks; peak: at most
            while it stored.
    """

    system: str
    count: int
    rate: float
    rate_vectors: float | None = None
    single: float | None = None
    first: float | None = None
    p50: float
    p95: float
    cpu: float
    hits: float
    words_first: float | None = None
    words_p50: float | None = None
    words_p95: float | None = None
    words_cpu: float | None = None
    words_hits: float | None = None
    disk: float
    rss: float
    peak: float | None = None


class ScaleReport(EvalReport, frozen=True, kw_only=True):
    """All rows."""

    questions: int
    seed: int
    embedder: str
    rows: list[ScaleRow]

    def table(self) -> str:
        """Plain text: a row for each system and number of facts."""
        columns = (
            "system={system} | facts={count:,} | stored/s={rate:,.0f} | with vectors={rate_vectors:,.0f} | "
            "one by one={single:,.0f} | first={first:.2f} s | p50={p50:ms} | p95={p95:ms} | cpu={cpu:ms} | top 10={hits:.1%} | "
            "words p50={words_p50:ms} | p95={words_p95:ms} | cpu={words_cpu:ms} | top 10={words_hits:.1%} | "
            "disk={disk:,.0f MiB} | memory={rss:,.0f MiB} | at most={peak:,.0f MiB}"
        )
        words = (
            f"{self.questions} questions a row, seed {self.seed}; synthetic vectors, worked out from the words: no model takes "
            "part; the time to make them is in no figure"
        )
        return f"{words}\n\n{table_of(self.rows, columns, ('system',), '-')}\n\n{self._against_goals()}"

    def _against_goals(self) -> str:
        """Kilburn's figures beside the goals and the floor's."""
        lines: list[list[str]] = []
        for row in self.rows:
            floor = next((one for one in self.rows if (one.system, one.count) == ("floor", row.count)), None)
            if row.system != "kilburn" or floor is None:
                continue
            words, vectors = GOALS.get(row.count, (None, None))
            for what, own, theirs, goal in (
                ("a question by words, ms of processor time", row.words_cpu, floor.words_cpu, words),
                ("a question with vectors, ms of processor time", row.cpu, floor.cpu, vectors),
                ("stored in a second, in batches", row.rate, floor.rate, BATCHED),
                ("stored in a second, one by one", row.single, floor.single, SINGLE),
            ):
                figures = (own, goal, own / goal if own and goal else None, own / theirs if own and theirs else None)
                lines.append([what, f"{row.count:,}", *("-" if one is None else f"{one:,.2f}" for one in figures)])
        return grid(["Kilburn", "facts", "figure", "goal", "x goal", "x floor"], lines, ("Kilburn",))

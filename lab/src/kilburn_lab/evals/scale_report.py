"""The report of `kilburn_lab.evals.scale`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kilburn.picture import picture
from kilburn_lab.evals.report import EvalReport, panel, row_of, table_of


class ScaleRow(msgspec.Struct, frozen=True, kw_only=True):
    """One system with so many facts. None where it was not measured.

    Args:
        rate: facts stored in a second, without vectors; of other systems, with theirs, made beforehand.
        rate_vectors: the same with vectors, the embedding itself not counted.
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

    def row(self, system: str, count: int) -> ScaleRow:
        """One system with so many facts; KeyError if it was not measured."""
        return row_of(self.rows, system=system, count=count)

    def table(self) -> str:
        """Plain text: a row for each system and number of facts."""
        columns = (
            "system={system} | facts={count:,} | stored/s={rate:,.0f} | with vectors={rate_vectors:,.0f} | "
            "first={first:.2f} s | p50={p50:ms} | p95={p95:ms} | cpu={cpu:ms} | top 10={hits:.1%} | words p50={words_p50:ms} | "
            "p95={words_p95:ms} | cpu={words_cpu:ms} | top 10={words_hits:.1%} | disk={disk:,.0f MiB} | memory={rss:,.0f MiB} | "
            "at most={peak:,.0f MiB}"
        )
        words = (
            f"{self.questions} questions a row, seed {self.seed}; synthetic vectors, worked out from the words: no model takes "
            "part; the time to make them is in no figure"
        )
        return f"{words}\n\n{table_of(self.rows, columns, ('system',), '-')}"


def draw(path: Path, report: ScaleReport, *, force: bool = False) -> None:
    """Draw the milliseconds of a question against the number of facts; the file's suffix gives the format.

    Raises:
        SpecError, MissingExtra, OSError: see `kilburn.picture.picture`.
    """
    with picture(path, 7, 4.4, force=force) as figure:
        axes = figure.add_subplot()
        for system in dict.fromkeys(row.system for row in report.rows):
            own = sorted((row for row in report.rows if row.system == system), key=lambda row: row.count)
            (line,) = axes.plot([row.count for row in own], [row.p50 for row in own], marker="o", label=f"{system}, p50")
            axes.plot([row.count for row in own], [row.p95 for row in own], "--", color=line.get_color(), label="p95")
        panel(axes, "One question, beyond its embedding", xscale="log", yscale="log", xlabel="facts", ylabel="milliseconds")

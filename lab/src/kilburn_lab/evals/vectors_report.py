"""The report of `kilburn_lab.evals.vectors`: a row for each codec and number of vectors, facts by exact words, the picture."""

from __future__ import annotations

from pathlib import Path

import msgspec

from kilburn_lab.evals.report import EvalReport, table_of
from kilburn_lab.picture import picture, plain_axes


class VectorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One codec over so many vectors.

    Args:
        bytes: of an encoded vector.
        alone: share of the ten nearest that are among the ten best by the codec's scores.
        rescored: the same after its best candidates were compared exactly with the originals.
        ms, ms_95: of one query with re-scoring: the middle, and the 95th of 100.
        fit: seconds. encoded: vectors encoded in a second.
        note: why another codec took its place.
    """

    codec: str
    count: int
    bytes: int
    alone: float
    rescored: float
    ms: float
    ms_95: float
    fit: float
    encoded: float
    note: str = ""


class FactShares(msgspec.Struct, frozen=True, kw_only=True):
    """Made-up facts that differ only in their identifiers: the shares that are found first, and among ten.

    `words`: by the identifier alone, in the store's text index. `meaning`: by the same query's vector; None without an
    embedder.
    """

    facts: int
    words: float
    meaning: float | None
    meaning_10: float | None


class VectorsReport(EvalReport, frozen=True, kw_only=True):
    """All rows. `data` says in words what the vectors are; `candidates` how many are re-scored."""

    data: str
    dimensions: int
    queries: int
    candidates: int
    seed: int
    seconds: float
    rows: list[VectorRow]
    facts: FactShares

    def table(self) -> str:
        """Plain text."""
        columns = (
            "vectors={count:,} | codec={codec} | bytes={bytes} | recall@10={alone:.3f} | re-scored={rescored:.3f} | "
            "ms={ms:.2f} | p95={ms_95:.2f} | encoded/s={encoded:,.0f} | fit s={fit:.1f}"
        )
        notes = [f"{row.count:,} {row.codec}: {row.note}" for row in self.rows if row.note]
        facts = self.facts
        meaning = "" if facts.meaning is None else f"; by meaning {facts.meaning:.3f} first, {facts.meaning_10 or 0:.3f} of ten"
        lines = [
            f"{self.data}; {self.dimensions} dimensions, {self.queries} queries, seed {self.seed}",
            f"{self.candidates} candidates are re-scored with the originals",
            "",
            table_of(self.rows, columns, ("codec",)),
            *notes,
            "",
            f"{facts.facts} facts that differ in their identifiers: by words {facts.words:.3f} are found first{meaning}",
        ]
        return "\n".join(lines)


def draw(path: Path, report: VectorsReport, *, force: bool = False) -> None:
    """Recall against bytes, and against milliseconds; a line for each codec, from the fewest vectors to the most."""
    with picture(path, 9, 4, force=force) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for codec in dict.fromkeys(row.codec for row in report.rows):
            rows = [row for row in report.rows if row.codec == codec]
            recall = [row.rescored for row in rows]
            left.plot([row.bytes for row in rows], recall, "o-", label=codec)
            right.plot([row.ms for row in rows], recall, "o-", label=codec)
        for axes, label in ((left, "bytes a vector"), (right, "ms a query, one thread")):
            axes.set_xscale("log")
            axes.set_xlabel(label)
            plain_axes(axes)
        left.set_ylabel(f"recall@10, {report.candidates} re-scored")
        left.legend(frameon=False)
        counts = ", ".join(f"{count:,}" for count in dict.fromkeys(row.count for row in report.rows))
        figure.suptitle(f"{counts} vectors: {report.data}", fontsize=9)

"""The report of `kilburn_lab.evals.load`."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, linear_regression

import msgspec

from kilburn_lab.evals.intervals import resampled
from kilburn_lab.evals.report import EvalReport, table_of

FLAT = 1 << 20
"""Bytes that a thousand requests may add to what is called flat."""


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds that clients waited for a whole answer, however often they had to ask for it.

    Args:
        when: "quiet", "disturbed" (while something was killed or began again, or within a second of that), or "all".
        first: the middle one until the first byte; of an answer that is not streamed, until its last.
    """

    when: str
    count: int
    first: float
    p50: float
    p95: float
    p99: float
    longest: float


class LoadVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What a comparison found.

    Args:
        acknowledged: entries that clients have heard the answer to: questions, calls, outputs and replies.
        lost: of those, how many are nowhere in their session.
        doubled: how many times one is there more often than once, or in a second session.
        wrong: entries that were changed, that are another session's, that nobody said, or that are not in order; and answers that
            were not what was to be answered.
        unsure: entries that were never acknowledged and are there, which is allowed.
        branches: sessions beside those that clients were told of.
        findings: some of them, in words.
    """

    acknowledged: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: int = 0
    unsure: int = 0
    branches: int = 0
    findings: tuple[str, ...] = ()


class MemoryGrowth(msgspec.Struct, frozen=True, kw_only=True):
    """Private memory of a process with its descendants, in bytes.

    Args:
        before, after: the mean of the first and of the second half of what came after the gateways' memory was full.
        growth: what a thousand answers added there, by the line of least squares. low, high: its interval of 95%.
    """

    of: str
    before: float | None = None
    after: float | None = None
    growth: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def flat(self) -> str:
        """In words."""
        if self.low is None or self.high is None:
            return "too short to say"
        return "yes" if self.high < FLAT else "no" if self.low > FLAT else "not certain"


def growth(of: str, points: Sequence[tuple[int, float]], warm: int | None) -> MemoryGrowth:
    """What memory did once so many answers were given; None: a gateway never had as many sessions as it keeps in memory."""
    later = [point for point in points if warm is not None and point[0] >= warm]
    half = len(later) // 2
    if half < 4:
        return MemoryGrowth(of=of)

    def slope(drawn: Sequence[tuple[int, float]]) -> float | None:
        if len({at for at, _ in drawn}) < 2:
            return None
        return 1000 * linear_regression([at for at, _ in drawn], [size for _, size in drawn]).slope

    low, high = resampled(slope, later, 0) or (None, None)
    return MemoryGrowth(
        of=of,
        before=fmean(size for _, size in later[:half]),
        after=fmean(size for _, size in later[half:]),
        growth=slope(later),
        low=low,
        high=high,
    )


class LoadRow(msgspec.Struct, frozen=True, kw_only=True):
    """The load on one store.

    Args:
        over: which. seconds: it took. requests: that were sent. answered: that were answered to their end.
        again: askings for the same answer after one that failed. left: times that a client hung up.
        unanswered: sessions whose clients gave up. failures: why askings failed, and how often.
        longest_failure: seconds until a failed asking was known to be so, at most.
        kills: of gateways. restarts: of PostgreSQL.
    """

    over: str
    seconds: float
    requests: int
    answered: int
    again: int
    left: int
    unanswered: int
    failures: dict[str, int]
    longest_failure: float
    kills: int
    restarts: int
    latencies: list[Latencies]
    verdict: LoadVerdict
    memory: list[MemoryGrowth]

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.answered / self.seconds


class LoadReport(EvalReport, frozen=True, kw_only=True):
    """All stores. `exchanges`: of each; `load`: of the machine in the last minute, this command's own work included."""

    sessions: int
    clients: int
    gateways: int
    window: int
    kill_gateways: float
    restart_postgres: float
    seed: int
    exchanges: int
    cores: int
    load: float
    rows: list[LoadRow]

    def table(self) -> str:
        """Plain text: what was lost, how long it took, and memory."""
        found = (
            "over={over} | requests={requests:,} | answered={answered:,} | a second={rate:.0f} | again={again} | left={left} | "
            "unanswered={unanswered} | kills={kills} | restarts={restarts} | acknowledged={verdict.acknowledged:,} | "
            "lost={verdict.lost} | doubled={verdict.doubled} | wrong={verdict.wrong} | branches={verdict.branches}"
        )
        waits = (
            "over={over} | when={one.when} | answers={one.count:,} | first byte={one.first:ms} | p50={one.p50:ms} | "
            "p95={one.p95:ms} | p99={one.p99:ms} | longest={one.longest:,.0f} ms"
        )
        memory = (
            "over={over} | memory of={one.of} | first half={one.before:.1f MiB} | second half={one.after:.1f MiB} | "
            "a thousand add={one.growth:+.2f MiB} | from={one.low:+.2f MiB} | to={one.high:+.2f MiB} | flat={flat}"
        )
        pairs = [(row, one) for row in self.rows for one in row.latencies]
        sizes = [(row, one) for row in self.rows for one in row.memory]
        both = {"over": lambda pair: pair[0].over, "one": lambda pair: pair[1]}
        why = [(row.over, words, count) for row in self.rows for words, count in row.failures.items()]
        parts = [
            f"{self.sessions:,} sessions of {self.exchanges:,} exchanges, {self.clients} clients at once, {self.gateways} "
            f"gateways with a window of {self.window:,} tokens; seed {self.seed}; {self.cores} cores for all, "
            f"load {self.load:.1f}",
            table_of(self.rows, found, ("over",), "-"),
            table_of(pairs, waits, ("over", "when"), "-", **both),
            table_of(sizes, memory, ("over", "memory of", "flat"), "-", **both, flat=lambda pair: pair[1].flat),
        ]
        if why:
            longest = "; ".join(f"{row.over}: known after {row.longest_failure:.1f} s at most" for row in self.rows)
            told = table_of(
                why,
                "over={over} | asked again after={words} | times={count}",
                ("over", "asked again after"),
                over=lambda each: each[0],
                words=lambda each: each[1],
                count=lambda each: each[2],
            )
            parts.append(f"{told}\n{longest}")
        parts += [f"{row.over}: {finding}" for row in self.rows for finding in row.verdict.findings[:10]]
        return "\n\n".join(parts)

    def complaints(self) -> list[str]:
        """What should not have been."""
        bad = [(row, name, getattr(row.verdict, name)) for row in self.rows for name in ("lost", "doubled", "wrong", "branches")]
        bad += [(row, "unanswered", row.unanswered) for row in self.rows]
        return [f"{row.over}: {count} {name}" for row, name, count in bad if count]

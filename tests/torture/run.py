"""Sessions under torture until the time is over, and what broke in them.

    report = torture(seconds=60, seed=1)
    assert not report.violations, report.table()

Each session has a seed of its own, by which it comes again, but for the moments at which the system lets threads and
processes go on. A session ends where a promise broke.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kilburn.errors import HitRateWarning
from kilburn_lab.evals.roster import SPECS, Entrant
from torture.mishaps import MISHAPS
from torture.onlooker import Onlooker
from torture.session import Session, Violation

__all__ = ["POLICIES", "Report", "torture"]

POLICIES = (
    *("summarize", "recursive", "compact(trigger=None)", "comem(every=2)", "mem1", "free(every=300)", "memento(pairs=True)"),
    *("agentfold", "hybrid", "cost", "chain(mask(keep=2), summarize)", "fifo", "lru", "importance", "tiered", "preprocess"),
    *("clear_thinking", Entrant("clear_tool_uses", SPECS["clear_tool_uses"]).at(1500)),
)
"""Every policy of the product that can act in a small window; those that ask a model come first."""


class Report(msgspec.Struct, kw_only=True):
    """What was done and what broke; `seed` of the first session, the others count up from it."""

    seed: int
    sessions: int = 0
    questions: int = 0
    violations: list[Violation] = []

    def table(self) -> str:
        """Every kind of violation with its count and one example, for people."""
        lines = [f"seed {self.seed}: {self.sessions} sessions, {self.questions} questions, {len(self.violations)} violations"]
        kinds = sorted({one.kind for one in self.violations})
        for kind in kinds:
            same = [one for one in self.violations if one.kind == kind]
            one = same[0]
            lines.append(f"{kind} x{len(same)}: {one.detail!a} after {one.after!a}, {one.policy}, seed {one.seed}")
        return "\n".join(lines)


@contextmanager
def _quiet() -> Iterator[None]:
    """The sessions' mishaps are wanted: neither the log nor a thread's end has to tell of them."""
    log, before = logging.getLogger("kilburn"), threading.excepthook
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    threading.excepthook = lambda told: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", HitRateWarning)
            yield
    finally:
        threading.excepthook = before
        log.setLevel(level)


def torture(
    *,
    seconds: float | None = None,
    sessions: int | None = None,
    seed: int = 0,
    policies: Sequence[str] = POLICIES,
    steps: int = 30,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Torture sessions one after the other, each under the next policy.

    Args:
        seconds: no session begins later than this.
        sessions: so many at most; where neither is given, one a policy.
        steps: mishaps in a session.
    """
    report, end = Report(seed=seed), None if seconds is None else time.monotonic() + seconds
    most = len(policies) if sessions is None and seconds is None else sessions
    onlooker = Onlooker()
    try:
        with _quiet():
            while (most is None or report.sessions < most) and (end is None or time.monotonic() < end):
                with tempfile.TemporaryDirectory(prefix="kilburn-torture-") as folder:
                    number = seed + report.sessions
                    session = Session(Path(folder), number, policies[number % len(policies)], onlooker)
                    report.violations += session.run(MISHAPS, steps)
                report.sessions += 1
                report.questions += session.liar.asked
                progress(report.sessions)
    finally:
        onlooker.close()
    return report

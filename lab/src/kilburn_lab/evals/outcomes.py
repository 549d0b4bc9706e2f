"""What `kilburn_lab.evals.paging` counts: an outcome a reference, a cell a policy and window."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import add

import msgspec

from kilburn_lab.evals.baselines import CHARACTERS, Contender
from kilburn_lab.evals.candidate import KilburnCandidate
from kilburn_lab.evals.structure import Sections


class ReferenceOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one reference: shown at all, shown in a whole line of an older output, found by one search, found
    by one search or one recall (None if there is no store)."""

    run: str
    step: int
    name: str
    policy: str
    window: int
    shown: bool
    line: bool
    searched: bool | None = None
    reachable: bool | None = None
    kind: str = "name"


@dataclass
class PolicyCounts:
    """The counts of one policy at one window. Tokens are of four characters.

    Args:
        policy: its label; `spec` is what it was made from, `model` answered its questions.
        calls: prompts. overflow: those longer than the window.
        shipped: tokens of all prompts. cached: those in the prefix shared with the previous prompt.
        refilled: tokens re-prefilled only because of an edit.
        told: characters of outputs in the prompts that could not hold all of the run. whole: those in whole sections
            (see `kilburn_lab.evals.structure`).
        plans: milliseconds of the processor for each plan that moved something; of a baseline, for each prompt that could
            not hold all of the run.
        acts: times that the policy itself moved something. asks: questions that it asked a model. unanswered: those
            without a usable answer.
        refused: plans of the policy that broke a law. failed: plans in which it raised, or returned nonsense.
        fallbacks: pages that the kernel evicted because the policy had not made room.
        seconds: wall time of all runs, including the measurement itself.
    """

    policy: str
    window: int
    spec: str = ""
    model: str = ""
    outcomes: list[ReferenceOutcome] = field(default_factory=list)
    plans: list[float] = field(default_factory=list)
    calls: int = 0
    overflow: int = 0
    shipped: int = 0
    cached: int = 0
    refilled: int = 0
    told: int = 0
    whole: int = 0
    acts: int = 0
    asks: int = 0
    unanswered: int = 0
    refused: int = 0
    failed: int = 0
    fallbacks: int = 0
    seconds: float = 0.0

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What tells it from the other cells of a sample."""
        return self.policy, self.spec, self.model, self.window

    def outcomes_of(self, kind: str) -> list[ReferenceOutcome]:
        """The outcomes of one kind of reference."""
        return [one for one in self.outcomes if one.kind == kind]

    def ship(self, before: str, shown: str, fresh: Sequence[str], seams: int = 0) -> None:
        """Count one prompt: `before` is the last one, `fresh` the texts of the events since then,
        `seams` those line breaks in `shown` that only stand between messages."""
        tokens = -(-(len(shown) - seams) // CHARACTERS)
        same = _common_prefix(before, shown)
        self.calls += 1
        self.overflow += tokens > self.window
        self.shipped += tokens
        # The seams are assumed to be spread evenly, which is wrong by a few characters.
        self.cached += (same - seams * same // max(1, len(shown))) // CHARACTERS
        self.refilled += max(0, len(shown) - same - _count_new(fresh, shown[same:])) // CHARACTERS


class Counted:
    """A contender whose prompts are counted in a cell."""

    def __init__(self, contender: Contender, cell: PolicyCounts) -> None:
        self._contender, self._cell = contender, cell
        self._sections = Sections()
        self._before = ""
        self._fresh: list[str] = []
        self._length = 0

    def thought(self, text: str) -> None:
        """The agent thinks."""
        self._contender.thought(text)
        self._tell(text)

    def action(self, text: str) -> None:
        """The agent acts."""
        self._contender.action(text)
        self._tell(text)

    def reply(self, thought: str, action: str) -> None:
        """The agent thinks and acts in one message."""
        self._contender.reply(thought, action)
        self._tell(thought, action)

    def user(self, text: str) -> None:
        """The user says something."""
        self._contender.user(text)
        self._tell(text)
        self._sections.add(text)

    def observation(self, text: str) -> None:
        """The world answers."""
        self._contender.observation(text)
        self._tell(text)
        self._sections.add(text)

    def prompt_text(self) -> str:
        """The window's text, which is counted."""
        full = self._length > self._cell.window * CHARACTERS
        started = time.thread_time()
        shown = self._contender.prompt_text()
        seams = 0
        if isinstance(self._contender, KilburnCandidate):
            seams = self._contender.seams
            self._cell.plans += self._contender.plans
            self._contender.plans.clear()
        elif full:
            self._cell.plans.append((time.thread_time() - started) * 1000)
        self._cell.ship(self._before, shown, self._fresh, seams)
        if full:
            whole, told = self._sections.count(shown)
            self._cell.whole += whole
            self._cell.told += told
        self._before, self._fresh = shown, []
        return shown

    def _tell(self, *texts: str) -> None:
        self._fresh += texts
        self._length += sum(map(len, texts))


def join_cells(parts: Sequence[PolicyCounts]) -> PolicyCounts:
    """One cell, joined from parts that were measured separately, in their order."""
    counts = [each.name for each in fields(PolicyCounts) if each.name not in ("policy", "window", "spec", "model")]
    return replace(parts[0], **{name: reduce(add, (getattr(part, name) for part in parts)) for name in counts})


def _count_new(fresh: Sequence[str], new: str) -> int:
    """Characters of `new` that are shown for the first time: fresh texts that are in it whole, else those of their lines
    that are."""
    lines = {line.rstrip() for line in new.split("\n")}
    total = 0
    for text in fresh:
        whole = text in new
        total += len(text) if whole else sum(len(line) + 1 for line in text.split("\n") if line.rstrip() in lines)
    return min(total, len(new))


def _common_prefix(one: str, other: str) -> int:
    """Length of the common prefix, found by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

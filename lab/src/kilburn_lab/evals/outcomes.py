"""What measures count of a policy at a window: the prompts of its sessions, and in `kilburn_lab.evals.paging` an outcome for
each reference."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from typing import Any

import msgspec

from kilburn_lab.evals.baselines import CHARACTERS, Contender
from kilburn_lab.evals.candidate import KilburnCandidate
from kilburn_lab.evals.prefix import Block, behind, common, length_of, text_of
from kilburn_lab.evals.providers import PROVIDERS, PromptCache, chain_of
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
        shipped: tokens of all prompts. later: of those that have a prompt of the same session before them.
        cached: tokens of these that are the same as the beginning of the prompt before (see `kilburn_lab.evals.prefix`).
        edited: prompts that do not begin with all of the prompt before. broken: with less than half of it.
        refilled: tokens behind the first difference that were told before the last prompt.
        read, written: by provider, what its cache reads and what it writes (see `kilburn_lab.evals.providers`).
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
    later: int = 0
    cached: int = 0
    edited: int = 0
    broken: int = 0
    refilled: int = 0
    read: dict[str, int] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
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

    @property
    def kept(self) -> float | None:
        """The share of the prefix kept; None if no prompt has one before it."""
        return self.cached / self.later if self.later else None

    @property
    def again_share(self) -> float:
        """The share of the tokens shipped that are read again after an edit; 0 where nothing was shipped."""
        return self.refilled / max(1, self.shipped)

    def outcomes_of(self, kind: str) -> list[ReferenceOutcome]:
        """The outcomes of one kind of reference."""
        return [one for one in self.outcomes if one.kind == kind]


class Shipping:
    """The prompts of one session, one after another: each is compared with the one before, and given to the caches."""

    def __init__(self) -> None:
        self._before: list[Block] = []
        self.fresh: list[str] = []
        """What was told since the last prompt."""
        self._caches = {name: PromptCache(provider) for name, provider in PROVIDERS.items()}

    def copy(self) -> Shipping:
        """The state of now; the copy goes on by itself, as a question that is asked of the session does."""
        made = Shipping()
        made._before, made.fresh = self._before, list(self.fresh)
        made._caches = {name: cache.copy() for name, cache in self._caches.items()}
        return made

    def tell(self, *texts: str) -> None:
        """What is new since the last prompt."""
        self.fresh += texts

    def ship(self, prompt: Sequence[Block], cell: PolicyCounts) -> None:
        """Count one prompt in a cell."""
        length, before = length_of(prompt), length_of(self._before)
        tokens = -(-length // CHARACTERS)
        blocks, same = common(self._before, prompt)
        cell.calls += 1
        cell.overflow += tokens > cell.window
        cell.shipped += tokens
        if self._before:
            cell.later += tokens
            cell.edited += same < before
            cell.broken += 2 * same < before
        cell.cached += same // CHARACTERS
        cell.refilled += max(0, length - same - _count_new(self.fresh, behind(prompt, blocks, same))) // CHARACTERS
        chain = chain_of(prompt)
        for name, cache in self._caches.items():
            read, written = cache.ship(prompt, chain)
            cell.read[name] = cell.read.get(name, 0) + read
            cell.written[name] = cell.written.get(name, 0) + written
        self._before, self.fresh = list(prompt), []


class Counted:
    """A contender whose prompts are counted in a cell.

    Args:
        shipping: what was shipped of the session before; None if nothing was.
    """

    def __init__(self, contender: Contender, cell: PolicyCounts, shipping: Shipping | None = None) -> None:
        self._contender, self._cell = contender, cell
        self._sections = Sections()
        self._length = 0
        self.shipping = shipping or Shipping()

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

    def prompt(self) -> list[Block]:
        """The window, which is counted."""
        full = self._length > self._cell.window * CHARACTERS
        started = time.thread_time()
        shown = self._contender.prompt()
        if isinstance(self._contender, KilburnCandidate):
            self._cell.plans += self._contender.plans
            self._contender.plans.clear()
        elif full:
            self._cell.plans.append((time.thread_time() - started) * 1000)
        self.shipping.ship(shown, self._cell)
        if full:
            whole, told = self._sections.count(text_of(shown))
            self._cell.whole += whole
            self._cell.told += told
        return shown

    def prompt_text(self) -> str:
        """The window's text, which is counted."""
        return text_of(self.prompt())

    def _tell(self, *texts: str) -> None:
        self.shipping.tell(*texts)
        self._length += sum(map(len, texts))


def join_cells(parts: Sequence[PolicyCounts]) -> PolicyCounts:
    """One cell, joined from parts that were measured separately, in their order."""
    counts = [each.name for each in fields(PolicyCounts) if each.name not in ("policy", "window", "spec", "model")]
    return replace(parts[0], **{name: reduce(_joined, (getattr(part, name) for part in parts)) for name in counts})


def _joined(one: Any, other: Any) -> Any:
    if isinstance(one, dict):
        return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
    return one + other


def _count_new(fresh: Sequence[str], new: str) -> int:
    """Characters of `new` that are shown for the first time: fresh texts that are in it whole, else those of their lines
    that are."""
    lines = {line.rstrip() for line in new.split("\n")}
    total = 0
    for text in fresh:
        whole = text in new
        total += len(text) if whole else sum(len(line) + 1 for line in text.split("\n") if line.rstrip() in lines)
    return min(total, len(new))

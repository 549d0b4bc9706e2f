"""Drift: what is left of facts and rules after 1, 5, 20 compactions, in the window and one step away from it.

Facts and standing rules are planted at the start of a seeded stream of work. After each compaction, it is checked
which of them are in the prompt verbatim. After some compactions it is also checked which of them one search finds,
and one recall of an address that the prompt shows. What a compaction did is read from the ledger.

    report = evaluate(["summarize", "recursive"], replicates=20)
    print(report.table())

Only exact words count: a paraphrase that a reader would accept is a loss here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import kilburn
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.receipts import ranges
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.message import Kind
from kilburn.page import Page, Place, parse_address, span_of
from kilburn.wire.recording import FORMS
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.candidate import append_and_wait
from kilburn_lab.evals.drift_report import DriftReport, Probe, Trial
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.outcomes import PolicyCounts, Shipping
from kilburn_lab.evals.plants import ARMS, Garden, garden, work
from kilburn_lab.evals.prefix import blocks_of
from kilburn_lab.evals.roster import MODEL, can_ask
from kilburn_lab.evals.trajectories import read

__all__ = ["measure"]

POLICIES = ("summarize", "recursive", "hybrid", "fifo")
PASSES = (1, 5, 20)
"""Replicates if a model answers, because it takes seconds for each question."""

LONGEST = 400
"""A stream ends after this many windows of work, even with too few compactions, because some policies act seldom."""

HITS = 1000
"""Tokens that the hits of one search may take."""

_LEAVING = {Act.EVICT, Act.FOLD, Act.RETIRE}
_HANDLE = re.compile(r"\[((?:[pf]\d+(?:-p\d+)? ?)+)(?:out|in short|in part):")
"""Text that the kernel itself writes into a prompt; addresses in the work do not count."""


def evaluate(
    policies: Sequence[str] = POLICIES,
    *,
    arms: Sequence[str] = ARMS,
    window: int = 2000,
    passes: Sequence[int] = PASSES,
    replicates: int = 3,
    seed: int = 0,
    data: str | Path | None = None,
    model: str | Any = "",
    progress: Progress = unwatched,
) -> DriftReport:
    """Measure each policy in each arm.

    Args:
        policies: specs of Kilburn's policies.
        arms: where the rules are, of `kilburn_lab.evals.plants.ARMS`.
        window: in tokens of four characters.
        passes: compactions after which search and recall are tried too.
        replicates: number of seeds.
        seed: the first of them; also for the intervals.
        data: recorded runs for the work, see `kilburn_lab.evals.trajectories.read`; None for made-up work.
        model: answers the policies that ask; they are measured a second time with it. A spec, or a model.
        progress: called with the number of finished trials and of all trials.

    Raises:
        SpecError: a number that means nothing, no such arm, policy or model, or a file without runs.
        InvalidMessage: a file that cannot be read, or a line that is no run.
    """
    if window < 500 or not passes or min(passes) < 1 or replicates < 1:
        raise SpecError(
            f"window={window}, passes={list(passes)}, replicates={replicates}",
            advice="give a window of 500 tokens or more, and numbers of 1 or more",
        )
    for arm in arms:
        garden(seed, arm)
    runs = list(read(data)) if data is not None else []
    if data is not None and not any(run.steps for run in runs):
        raise SpecError(f"{data}: no runs", advice=f"give {FORMS}")
    answering = resolve("models", model) if model else None
    jobs: list[tuple[str, Any, str, int]] = []
    for spec in dict.fromkeys(policies):
        asks = can_ask(resolve("policies", spec))
        for who in (None, answering) if asks and answering is not None else (None,):
            jobs += [(spec, who, arm, seed + number) for arm in dict.fromkeys(arms) for number in range(replicates)]
    trials: list[Trial] = []
    progress(0, len(jobs))
    for spec, who, arm, number in jobs:
        trials.append(measure(spec, arm, number, window=window, passes=passes, runs=runs, model=who))
        progress(len(trials), len(jobs))
    return DriftReport.of(trials, window=window, passes=sorted(set(passes)), seed=seed)


def measure(
    policy: str,
    arm: str,
    seed: int,
    *,
    window: int = 2000,
    passes: Sequence[int] = PASSES,
    runs: Sequence[Trajectory] = (),
    model: Any = None,
) -> Trial:
    """One stream through one window, up to the last of the `passes`."""
    planted = garden(seed, arm)
    trial = Trial(policy=policy + (MODEL if model is not None else ""), arm=arm, replicate=seed, window=window)
    with kilburn.open(
        ":memory:", window=window, policy=policy, tokenizer=f"chars/{CHARACTERS}", model=model, embedder=None
    ) as store:
        session = store.session("stream")
        stream = _Stream(session, planted, trial)
        for step in work(seed, planted.parts, runs):
            if len(trial.curve) >= max(passes) or session.window.seen > LONGEST * window:
                break
            if stream.add(step) and len(trial.curve) in passes:
                trial.probes += _probes(session, stream, trial)
        _audit(session, stream.appended, trial)
    return trial


class _Stream:
    """A session that the plants and then the work are appended to, with what the prompt showed after each compaction."""

    def __init__(self, session: Session, planted: Garden, trial: Trial) -> None:
        self.session, self.trial = session, trial
        self.appended: list[dict[str, Any]] = []
        self._last = 0
        self._cell, self._shipping = PolicyCounts(policy=trial.policy, window=trial.window), Shipping()
        addresses = []
        for number, message in enumerate(planted.messages):
            addresses.append(self._append(message))
            if number == planted.pin:
                session.pin(addresses[-1])
        # A message's last page is its text or its result.
        self.homes = [(plant, parse_address(addresses[at])[1]) for plant, at in planted.plants]
        self._something_left()

    def add(self, messages: Sequence[dict[str, Any]]) -> bool:
        """Append a step of work; returns whether something left the window."""
        for message in messages:
            self._append(message)
        trial, session, window = self.trial, self.session, self.session.window
        trial.prompts += 1
        trial.shipped += session.prompts.use
        trial.pinned += sum(window.cost(page) for page in window.pins)
        prompt = session.render()
        self._shipping.ship(list(blocks_of(prompt)), self._cell)
        trial.later, trial.cached, trial.again = self._cell.later, self._cell.cached, self._cell.refilled
        if not self._something_left():
            return False
        shown = "\n".join(texts_of(list(prompt)))
        trial.overflow += prompt.tokens > session.prompts.capacity
        trial.seen.append(window.seen)
        trial.curve.append([plant.value in shown for plant, _ in self.homes if plant.kind == "fact"])
        trial.changed += sum(
            len(text.encode("utf-8")) for page in window.pins if (text := session.contents.text(page)) not in shown
        )
        return True

    def _append(self, message: dict[str, Any]) -> str:
        self.appended.append(message)
        self._shipping.tell(*texts_of(message))
        return append_and_wait(self.session, message)

    def _something_left(self) -> bool:
        left = False
        for event in self.session.ledger.events(self._last):
            self._last = event.number
            left = left or event.act in _LEAVING
        return left


def texts_of(value: Any) -> Iterator[str]:
    """The text of a prompt as a model reads it; arguments of calls as they are, without JSON's quotes."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts_of(inner)


def _probes(session: Session, stream: _Stream, trial: Trial) -> Iterator[Probe]:
    """Each plant: in the window, in the hits of one search, in what one address of the prompt gives back.

    Reads as `Session.search` and `Session.recall` do, but records nothing: a policy sees how pages are used, and the
    measurement must not change that.
    """
    shown = "\n".join(texts_of(list(session.render())))
    handles = dict.fromkeys(address for handle in _HANDLE.findall(shown) for address in handle.split())
    spans = [parse_address(address) for address in handles]
    for plant, home in stream.homes:
        here = plant.value in shown
        hits = session.search(plant.query, tokens=HITS, limit=20, record=False)
        way = _way(home, spans, session.window.pages)
        last = "".join(map(session.contents.text, session.contents.resolve(way[-1]))) if way else ""
        there = here or plant.value in last
        yield Probe(
            kind=plant.kind,
            passes=len(trial.curve),
            shown=here,
            searched=here or any(plant.value in hit.text for hit in hits),
            recalled=here or (there and len(way) == 1),
            recalls=0 if here or not there else len(way),
            cost=0 if here else session.counter.count(last),
        )


def _way(home: int, spans: Sequence[tuple[int, int]], pages: Mapping[int, Page]) -> list[str]:
    """Addresses to recall one after another, from those in the prompt, to the shortest stretch with a page; each
    recalled summary names its own sources. Empty if there is no way."""
    way: list[str] = []
    while spans:
        around = [span for span in spans if span[0] <= home <= span[1]]
        if around:
            return [*way, span_of(*min(around, key=lambda span: span[1] - span[0]))]
        older = [pages[first] for first, _ in spans if first < 0]
        if not older:
            return []
        # The summary that reaches back farthest.
        chosen = min(older, key=lambda page: page.order)
        way.append(chosen.address)
        spans = [parse_address(address) for address in ranges(chosen.sources)]
    return []


def _audit(session: Session, appended: Sequence[dict[str, Any]], trial: Trial) -> None:
    """What the ledger and the page table say of the whole stream."""
    trial.lost = session.contents.messages() != list(appended)
    trial.failed = session.stats().policy_failures
    pages = {page.id: page for page, _ in session.contents.pages()}
    for page in pages.values():
        if page.kind not in (Kind.FOLD, Kind.EXCERPT):
            continue
        trial.folds += 1
        trial.depth = max(trial.depth, page.depth)
        leaves, waiting = set[int](), [page.id]
        while waiting:
            one = pages.get(waiting.pop())
            if one is None:
                leaves.clear()
                break
            leaves.update([one.id] if not one.depth else [])
            waiting += one.sources if one.depth else ()
        trial.resolved += bool(leaves) and all(bool(session.window.at(leaf) != Place.DROPPED) for leaf in leaves)
    trial.outcomes = dict(Counter(event.data["outcome"] for event in session.ledger.events() if event.act is Act.COMPACT))
    trial.asked = dict(Counter(event.data["outcome"] for event in session.ledger.events() if event.act is Act.ASK))

"""The report of `kilburn_lab.evals.drift`: trials, rows and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.intervals import grouped, interval, mean
from kilburn_lab.evals.report import EvalReport, row_of, table_of

__all__ = ["DriftReport"]


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one plant after so many compactions.

    Args:
        kind: "fact" or "rule".
        shown: in the prompt, verbatim; searched: there, or in the hits of one search; recalled: there, or
            in what one recall of an address of the prompt gives.
        recalls: how many recalls it takes, from the prompt on; 0 where it is shown, or no address leads there.
        cost: tokens of the last of them.
    """

    kind: str
    passes: int
    shown: bool
    searched: bool
    recalled: bool
    recalls: int
    cost: int


class Trial(msgspec.Struct, kw_only=True):
    """One stream through one window under one policy.

    Args:
        curve: after each compaction, which facts the prompt showed; `seen` the tokens seen by then.
        prompts: steps of work; `shipped` and `pinned` are the tokens of all their prompts and of the pins in them.
        later, cached: tokens of the prompts that have one before them, and those of its beginning that they kept; again:
            tokens read again after an edit (see `kilburn_lab.evals.prefix`).
        changed: bytes of pinned texts that a prompt did not show as they were.
        folds, resolved: derived pages, and those of which every source is an original that is there.
        depth: the deepest of them.
        overflow: prompts over the window.
        lost: whether the transcript below the window is not what was appended.
        outcomes, asked: of compactions, and of a model's answers, counted by type.
    """

    policy: str
    arm: str
    replicate: int
    window: int
    curve: list[list[bool]] = []
    seen: list[int] = []
    probes: list[Probe] = []
    prompts: int = 0
    shipped: int = 0
    pinned: int = 0
    later: int = 0
    cached: int = 0
    again: int = 0
    changed: int = 0
    folds: int = 0
    resolved: int = 0
    depth: int = 0
    overflow: int = 0
    failed: int = 0
    lost: bool = False
    outcomes: dict[str, int] = {}
    asked: dict[str, int] = {}


class KeptShare(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the plants of one kind after so many compactions; `low` and `high` bound 95%, resampled by
    replicate. `arm` is "" where all are taken together. `recalls` is how many a plant that is not shown takes at most,
    `cost` the mean tokens of the last, `seen` the mean tokens of the stream by then; `trials` those that came so far."""

    policy: str
    arm: str
    kind: str
    passes: int
    trials: int
    seen: int
    shown: float
    shown_low: float
    shown_high: float
    searched: float
    searched_low: float
    searched_high: float
    recalled: float
    recalls: int
    cost: int


class Decline(msgspec.Struct, frozen=True, kw_only=True):
    """How facts go from compaction to compaction.

    Args:
        rate: of the facts that a prompt showed, the share that it did not show after the next compaction.
        back: of those that it did not show, the share that it showed again after the next: 0 if summaries are made
            only from summaries.
        curve: the share shown after 1, 2, 3 ... compactions.
        compound: what would be left at the end if each compaction lost `rate` and nothing came back.
        kept: the share of the prefix kept, over all prompts of all streams; None if there are none. again: tokens read again
            after an edit.
    """

    policy: str
    rate: float
    low: float
    high: float
    back: float
    curve: list[float]
    compound: float
    kept: float | None
    again: int


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """What must hold whatever the policy: see `Trial`. `resolved` is a share, 1.0 where there is no summary;
    `pinned` the share of the prompts' tokens that pins took."""

    policy: str
    arm: str
    depth: int
    folds: int
    resolved: float
    changed: int
    overflow: int
    failed: int
    lost: int
    pinned: float
    pins: int
    outcomes: dict[str, int]
    asked: dict[str, int]


class DriftReport(EvalReport, frozen=True, kw_only=True):
    """All rows. One token is four characters."""

    window: int
    passes: list[int]
    replicates: int
    shares: list[KeptShare]
    losses: list[Decline]
    health: list[Health]

    def records(self) -> list[KeptShare]:
        """What was kept, a line for each policy, arm and number of compactions."""
        return self.shares

    @classmethod
    def of(cls, trials: Sequence[Trial], *, window: int, passes: Sequence[int], seed: int) -> DriftReport:
        """Add up the trials."""
        policies = dict.fromkeys(trial.policy for trial in trials)
        arms = dict.fromkeys(trial.arm for trial in trials)
        shares: list[KeptShare] = []
        losses: list[Decline] = []
        health: list[Health] = []
        for policy in policies:
            own = [trial for trial in trials if trial.policy == policy]
            shares += [made for number in passes if (made := _kept_share(own, "", "fact", number, seed)) is not None]
            losses.append(_decline(own, seed))
            for arm in arms:
                here = [trial for trial in own if trial.arm == arm]
                shares += [made for number in passes if (made := _kept_share(here, arm, "rule", number, seed)) is not None]
                health.append(_health(here, policy, arm))
        many = len({trial.replicate for trial in trials})
        return cls(window=window, passes=list(passes), replicates=many, shares=shares, losses=losses, health=health)

    def judged(self) -> list[Health]:
        """See `EvalReport`."""
        return self.health

    def share(self, policy: str, kind: str, passes: int, arm: str = "") -> KeptShare:
        """One row; KeyError if it was not measured. Rules have an arm, facts have none."""
        return row_of(self.shares, policy=policy, kind=kind, passes=passes, arm=arm)

    def loss(self, policy: str) -> Decline:
        """How one policy loses facts; KeyError if it was not measured."""
        return row_of(self.losses, policy=policy)

    def table(self) -> str:
        """Plain text: facts, rules, how they decline, and what must hold."""
        words = ("policy", "rules in", "outcomes")

        def shares(rows: Sequence[KeptShare]) -> str:
            return table_of(
                rows,
                _SHARES,
                words,
                where=lambda row: row.arm or "all",
                often=lambda row: row.recalls or "",
                tokens=lambda row: row.cost or "",
            )

        parts = [
            f"A window of {self.window} tokens, up to {self.replicates} replicates, compactions at which it was looked: "
            f"{', '.join(map(str, self.passes))}; one token is {CHARACTERS} characters",
            "Facts, verbatim: in the window, after one search, after one recall (recalls needed, tokens of the last)",
            shares([row for row in self.shares if row.kind == "fact"]),
            "Rules, verbatim, by where they stand",
            shares([row for row in self.shares if row.kind == "rule"]),
            f"Facts lost and regained from one compaction to the next, over {max(self.passes)};\n"
            "kept: share of the prefix kept; again: thousands of tokens read again after an edit",
            table_of(
                self.losses,
                _LOSSES,
                words,
                last=lambda row: row.curve[-1] if row.curve else None,
                thousands=lambda row: row.again / 1000,
            ),
            "What must hold: summaries that resolve to originals 1.000, pinned bytes changed 0, over 0, plans failed 0, lost 0",
            table_of(self.health, _HEALTH, words, said=_outcomes_of),
        ]
        return "\n\n".join(parts)


def _kept_share(trials: Sequence[Trial], arm: str, kind: str, passes: int, seed: int) -> KeptShare | None:
    """The share of one row; None where no stream came so far."""
    came = [trial for trial in trials if len(trial.curve) >= passes]
    probes = [[probe for probe in trial.probes if (probe.kind, probe.passes) == (kind, passes)] for trial in came]
    flat = [probe for group in probes for probe in group]
    if not flat:
        return None

    def bounds(value: Callable[[Probe], bool]) -> tuple[float, float]:
        pairs = ((trial.replicate, float(value(probe))) for trial, group in zip(came, probes, strict=True) for probe in group)
        return interval(grouped(pairs), seed)

    shown_low, shown_high = bounds(lambda probe: probe.shown)
    searched_low, searched_high = bounds(lambda probe: probe.searched)
    costs = [probe.cost for probe in flat if probe.cost]
    return KeptShare(
        policy=came[0].policy,
        arm=arm,
        kind=kind,
        passes=passes,
        trials=len(came),
        seen=round(mean(trial.seen[passes - 1] for trial in came)),
        shown=mean(probe.shown for probe in flat),
        shown_low=shown_low,
        shown_high=shown_high,
        searched=mean(probe.searched for probe in flat),
        searched_low=searched_low,
        searched_high=searched_high,
        recalled=mean(probe.recalled for probe in flat),
        recalls=max(probe.recalls for probe in flat),
        cost=round(mean(costs)),
    )


def _decline(trials: Sequence[Trial], seed: int) -> Decline:
    groups: dict[int, list[float]] = {}
    returns: list[bool] = []
    for trial in trials:
        own = groups.setdefault(trial.replicate, [])
        for before, after in zip([[True] * len(trial.curve[0]) if trial.curve else [], *trial.curve], trial.curve, strict=False):
            own += [float(not now) for was, now in zip(before, after, strict=True) if was]
            returns += [now for was, now in zip(before, after, strict=True) if not was]
    longest = max((len(trial.curve) for trial in trials), default=0)
    curve = [
        mean(shown for trial in trials if len(trial.curve) > number for shown in trial.curve[number]) for number in range(longest)
    ]
    low, high = interval(list(groups.values()), seed)
    rate = mean(value for group in groups.values() for value in group)
    later = sum(trial.later for trial in trials)
    return Decline(
        policy=trials[0].policy,
        rate=rate,
        low=low,
        high=high,
        back=mean(returns),
        curve=curve,
        compound=(1 - rate) ** longest,
        kept=sum(trial.cached for trial in trials) / later if later else None,
        again=sum(trial.again for trial in trials),
    )


def _health(trials: Sequence[Trial], policy: str, arm: str) -> Health:
    folds = sum(trial.folds for trial in trials)
    prompts = sum(trial.prompts for trial in trials)
    pinned = sum(trial.pinned for trial in trials)
    return Health(
        policy=policy,
        arm=arm,
        depth=max((trial.depth for trial in trials), default=0),
        folds=folds,
        resolved=sum(trial.resolved for trial in trials) / folds if folds else 1.0,
        changed=sum(trial.changed for trial in trials),
        overflow=sum(trial.overflow for trial in trials),
        failed=sum(trial.failed for trial in trials),
        lost=sum(trial.lost for trial in trials),
        pinned=pinned / max(1, sum(trial.shipped for trial in trials)),
        pins=round(pinned / max(1, prompts)),
        outcomes=_sum(trial.outcomes for trial in trials),
        asked=_sum(trial.asked for trial in trials),
    )


def _sum(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


_SHARES = (
    "policy={policy} | rules in={where} | after={passes} | seen={seen} | window={shown:.3f} | "
    "95%={shown_low:.3f}-{shown_high:.3f} | search={searched:.3f} | 95%={searched_low:.3f}-{searched_high:.3f} | "
    "recall={recalled:.3f} | recalls={often} | tokens={tokens}"
)
_LOSSES = (
    "policy={policy} | lost a pass={rate:.3f} | 95%={low:.3f}-{high:.3f} | back a pass={back:.3f} | "
    "left after 1={curve[0]:.3f} | 5={curve[4]:.3f} | 20={curve[19]:.3f} | last={last:.3f} | compound={compound:.3f} | "
    "kept={kept:.2f} | again={thousands:.1f}"
)
_HEALTH = (
    "policy={policy} | rules in={arm} | depth={depth} | summaries={folds} | resolve={resolved:.3f} | changed={changed} | "
    "over={overflow} | failed={failed} | lost={lost} | pins={pins} | of prompts={pinned:.1%} | outcomes={said}"
)


def _outcomes_of(row: Health) -> str:
    outcomes, asked = (", ".join(f"{name} {count}" for name, count in each.items()) for each in (row.outcomes, row.asked))
    return outcomes + (f"; the model: {asked}" if asked else "")

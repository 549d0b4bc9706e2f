"""Results from the counts of `kilburn.evals.paging`: one row for each policy and window, which policies beat the
baselines, what a model changed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kilburn.evals.cost import PER, Rates, cost_of
from kilburn.evals.intervals import interval, mean
from kilburn.evals.outcomes import COUNTS, Cell, ReferenceOutcome
from kilburn.evals.roster import BELADY, MODEL

__all__ = ["ENVELOPE", "BaselineMargins", "ModelDifference", "Row", "model_differences_of", "rows_of", "verdicts_of"]

ENVELOPE = ("tail", "truncated", "last3", "tail+bm25")
"""The baselines whose best survival, window by window, a policy should beat."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Shares are of `references`, which are names; intervals are of 95%, resampled by run.

    Args:
        policy: its label; `spec` is what it was made from, `model` who answered its questions.
        gain: survival minus that of the tail on the same references; `gain_low` and `gain_high` bound it.
        line: share present in a whole line of an older output.
        passages: `whole` over `told`; None where everything fits.
        copied: share of the copied lines and values that the prompt showed, with its interval; None where there are none.
        searched, reachable: after one search; after one search or one recall. None if there is no store.
        overflow: prompts that were longer than the window.
        shipped: tokens of all prompts. cached: those that continue the prompt before, from its beginning.
        refilled: tokens that had to be read again only because the prompt had changed before them.
        told: characters of outputs in prompts that could not hold all of the run. whole: those in whole passages.
        costs: by price table, of 1,000 prompts.
        regret: survival of the offline optimum minus this one; cost_regret: by price table, this cost over
            the optimum's, less 1. Both only where the optimum was measured.
        acts: times that the policy itself moved something; where it never did, the kernel kept the budget.
        asks: questions to a model. unanswered: those of them without a usable answer.
        refused: plans that broke a law. fallbacks: pages that the kernel evicted itself.
        seconds: wall time, with what the measurement itself takes.
    """

    policy: str
    window: int
    spec: str
    model: str
    references: int
    survival: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    line: float
    passages: float | None
    copied: float | None
    copied_low: float | None
    copied_high: float | None
    searched: float | None
    reachable: float | None
    overflow: int
    calls: int
    shipped: int
    cached: int
    refilled: int
    told: int
    whole: int
    costs: dict[str, float]
    regret: float | None
    cost_regret: dict[str, float]
    acts: int
    asks: int
    unanswered: int
    refused: int
    fallbacks: int
    seconds: float


class BaselineMargins(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a policy is worthwhile: at every measured window, compared with the baselines and `summarize`.

    Args:
        margins: by window, its survival minus the best of the baselines of `ENVELOPE`.
        above: whether it shows more at every window; showing all counts as more.
        refills: by window, its re-prefilled tokens over those of `summarize`; empty where that was not measured.
        fewer: whether all of them are under 1; None where they are not known.
    """

    policy: str
    margins: dict[int, float]
    above: bool
    refills: dict[int, float]
    fewer: bool | None


class ModelDifference(msgspec.Struct, frozen=True, kw_only=True):
    """What changed when a model answered a policy's questions, on the same references: survival and line
    survival with the model minus without, the first with its 95% interval by run."""

    policy: str
    window: int
    survival: float
    low: float
    high: float
    line: float
    asks: int
    unanswered: int


def rows_of(done: Sequence[Cell], rates: Rates, seed: int) -> list[Row]:
    """The rows of the cells, each paired with the cell of "tail" at its window, and with the optimum's."""
    tails = {cell.window: cell for cell in done if cell.policy == "tail"}
    best = {cell.window: cell for cell in done if cell.spec == BELADY}
    return [_row(cell, tails[cell.window], best.get(cell.window), rates, seed) for cell in done]


def _row(cell: Cell, tail: Cell, best: Cell | None, rates: Rates, seed: int) -> Row:
    outcomes, copies = cell.outcomes_of("name"), cell.outcomes_of("copy")
    low, high = interval(_by_run([(own.run, float(own.shown)) for own in outcomes]), seed)
    gain_low, gain_high = interval(_differences(outcomes, tail.outcomes_of("name")), seed)
    copied_low, copied_high = interval(_by_run([(own.run, float(own.shown)) for own in copies]), seed) if copies else (None, None)
    survival = mean([o.shown for o in outcomes])
    costs = _costs(cell, rates)
    optimum = _costs(best, rates) if best is not None else {}
    return Row(
        **{name: getattr(cell, name) for name in ("policy", "window", "spec", "model", *COUNTS)},
        references=len(outcomes),
        survival=survival,
        low=low,
        high=high,
        gain=survival - mean([o.shown for o in tail.outcomes_of("name")]),
        gain_low=gain_low,
        gain_high=gain_high,
        line=mean([o.line for o in outcomes]),
        passages=cell.whole / cell.told if cell.told else None,
        copied=mean([o.shown for o in copies]) if copies else None,
        copied_low=copied_low,
        copied_high=copied_high,
        searched=_share_of_known([o.searched for o in outcomes]),
        reachable=_share_of_known([o.reachable for o in cell.outcomes]),
        costs=costs,
        regret=None if best is None else mean([o.shown for o in best.outcomes_of("name")]) - survival,
        cost_regret={name: costs[name] / cost - 1 for name, cost in optimum.items() if cost > 0},
    )


def verdicts_of(rows: Sequence[Row]) -> list[BaselineMargins]:
    """One verdict a policy; none where not all baselines of the envelope were measured."""
    windows = sorted({row.window for row in rows})
    known = {(row.policy, row.window): row for row in rows}
    if any((name, window) not in known for name in ENVELOPE for window in windows):
        return []
    envelope = {window: max(known[name, window].survival for name in ENVELOPE) for window in windows}
    verdicts: list[BaselineMargins] = []
    for policy in dict.fromkeys(row.policy for row in rows if row.policy not in ENVELOPE):
        margins = {window: known[policy, window].survival - envelope[window] for window in windows}
        refills = {
            window: known[policy, window].refilled / max(1, known["summarize", window].refilled)
            for window in windows
            if ("summarize", window) in known
        }
        verdicts.append(
            BaselineMargins(
                policy=policy,
                margins=margins,
                above=all(margins[window] > 0 or known[policy, window].survival == 1.0 for window in windows),
                refills=refills,
                fewer=all(ratio < 1 for ratio in refills.values()) if refills else None,
            )
        )
    return verdicts


def model_differences_of(done: Sequence[Cell], seed: int) -> list[ModelDifference]:
    """What each policy's model changed, for those that were measured with one and without."""
    plain = {(cell.policy, cell.window): cell for cell in done if not cell.model}
    found: list[ModelDifference] = []
    for cell in done:
        without = plain.get((cell.policy.removesuffix(MODEL), cell.window))
        if not cell.model or without is None:
            continue
        own, other = cell.outcomes_of("name"), without.outcomes_of("name")
        low, high = interval(_differences(own, other), seed)
        found.append(
            ModelDifference(
                policy=without.policy,
                window=cell.window,
                survival=mean([o.shown for o in own]) - mean([o.shown for o in other]),
                low=low,
                high=high,
                line=mean([o.line for o in own]) - mean([o.line for o in other]),
                asks=cell.asks,
                unanswered=cell.unanswered,
            )
        )
    return found


def _costs(cell: Cell, rates: Rates) -> dict[str, float]:
    return {
        name: cost_of(cell.shipped, cell.cached, prices, rates.pause) * PER / max(1, cell.calls)
        for name, prices in rates.tables.items()
    }


def _differences(own: Sequence[ReferenceOutcome], other: Sequence[ReferenceOutcome]) -> list[list[float]]:
    return _by_run([(one.run, float(one.shown) - float(two.shown)) for one, two in zip(own, other, strict=True)])


def _by_run(values: Sequence[tuple[str, float]]) -> list[list[float]]:
    groups: dict[str, list[float]] = {}
    for run, value in values:
        groups.setdefault(run, []).append(value)
    return list(groups.values())


def _share_of_known(found: Sequence[bool | None]) -> float | None:
    answers = [one for one in found if one is not None]
    return mean(answers) if answers else None

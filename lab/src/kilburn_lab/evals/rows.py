"""Results from the counts of `kilburn_lab.evals.paging`: one row for each policy and window, which policies beat the
baselines, what a model changed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kilburn_lab.evals.baselines import BASELINES, PLAIN, best_of, compared
from kilburn_lab.evals.cost import ComparedRow, Rates, costs_of, figures_of
from kilburn_lab.evals.intervals import grouped, interval, mean
from kilburn_lab.evals.outcomes import PolicyCounts, ReferenceOutcome
from kilburn_lab.evals.references import KINDS
from kilburn_lab.evals.roster import BELADY, MODEL


class ActionShare(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy shows of what actions need, each action counting once: one that copies 26 lines is no more than one that
    copies a value. Intervals are of 95%, resampled by run.

    Args:
        actions: that need something of this kind.
        share: the mean over the actions of the share of what each needs that the prompt showed.
        best: of the baselines that were measured at this window, the one whose share is largest.
        gain: less the share of `best`, on the same actions.
    """

    actions: int
    share: float
    low: float
    high: float
    best: str
    gain: float
    gain_low: float
    gain_high: float


class PagingRow(ComparedRow, frozen=True, kw_only=True):
    """One line of the table. Shares are of `references`, which are names; intervals are of 95%, resampled by run.

    Args:
        policy: its label; `spec` is what it was made from, `model` who answered its questions.
        best: of the baselines that were measured at this window, the one that shows most.
        gain: survival minus that of `best` on the same references; `gain_low` and `gain_high` bound it.
        by_action: by kind of reference, "name" and "copy", with each action counting once; kinds that no action needs are left
            out. The other shares count each name, line and value.
        line: share present in a whole line of an older output.
        copied: share of the copied lines and values that the prompt showed, with its interval; None where there are none.
        searched, reachable: after one search; after one search or one recall. None if there is no store.
        regret: survival of the offline optimum minus this one; cost_regret: by price table, this cost over
            the optimum's, less 1. Both only where the optimum was measured.
        acts: times that the policy itself moved something; where it never did, the kernel kept the budget.
        asks: questions to a model. unanswered: those of them without a usable answer.
        refused: plans that broke a law. fallbacks: pages that the kernel evicted itself.
    """

    spec: str
    model: str
    references: int
    survival: float
    by_action: dict[str, ActionShare]
    line: float
    copied: float | None
    copied_low: float | None
    copied_high: float | None
    searched: float | None
    reachable: float | None
    regret: float | None
    cost_regret: dict[str, float]
    acts: int
    asks: int
    unanswered: int
    refused: int
    fallbacks: int


class BaselineMargins(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a policy is worthwhile: at every measured window, compared with the best baseline and with `summarize`.

    Args:
        margins: by window, its survival minus that of the best baseline.
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


def rows_of(done: Sequence[PolicyCounts], rates: Rates, seed: int) -> list[PagingRow]:
    """The rows of the cells, each paired with the cell of the best baseline at its window, and with the optimum's."""
    known = {(cell.window, cell.policy): cell for cell in done}
    optimum = {cell.window: cell for cell in done if cell.spec == BELADY}
    best = {
        window: best_of({label: _survival(cell) for (at, label), cell in known.items() if at == window})
        for window in {cell.window for cell in done}
    }
    shares = {window: _by_action([cell for cell in done if cell.window == window], seed) for window in best}
    return [
        _row(cell, known[cell.window, best[cell.window]], optimum.get(cell.window), shares[cell.window][cell.policy], rates, seed)
        for cell in done
    ]


def _by_action(cells: Sequence[PolicyCounts], seed: int) -> dict[str, dict[str, ActionShare]]:
    """By policy and kind, of all cells of one window. Their outcomes are of the same references."""
    found: dict[str, dict[str, ActionShare]] = {cell.policy: {} for cell in cells}
    for kind in KINDS:
        worth: dict[str, list[float]] = {}
        runs: list[str] = []
        for cell in cells:
            actions: dict[tuple[str, int], list[bool]] = {}
            for one in cell.outcomes_of(kind):
                actions.setdefault((one.run, one.step), []).append(one.shown)
            worth[cell.policy] = [mean(shown) for shown in actions.values()]
            runs = [run for run, _ in actions]
        for cell in cells if runs else ():
            own = worth[cell.policy]
            compares = compared(worth, cell.policy, runs, seed)
            found[cell.policy][kind] = ActionShare(actions=len(own), share=mean(own), **compares)
    return found


def _row(
    cell: PolicyCounts,
    rival: PolicyCounts,
    best: PolicyCounts | None,
    by_action: dict[str, ActionShare],
    rates: Rates,
    seed: int,
) -> PagingRow:
    outcomes, copies = cell.outcomes_of("name"), cell.outcomes_of("copy")
    worth = {one.policy: [float(each.shown) for each in one.outcomes_of("name")] for one in (cell, rival)}
    compares = compared(worth, cell.policy, [own.run for own in outcomes], seed, rival.policy)
    copied_low, copied_high = interval(grouped([(own.run, float(own.shown)) for own in copies]), seed) if copies else (None, None)
    survival = _survival(cell)
    figures = figures_of(cell, rates, PagingRow)
    optimum = costs_of(best, rates) if best is not None else {}
    return PagingRow(
        **figures,
        references=len(outcomes),
        survival=survival,
        **compares | {"gain": survival - _survival(rival)},
        by_action=by_action,
        line=mean([o.line for o in outcomes]),
        copied=mean([o.shown for o in copies]) if copies else None,
        copied_low=copied_low,
        copied_high=copied_high,
        searched=_share_of_known([o.searched for o in outcomes]),
        reachable=_share_of_known([o.reachable for o in cell.outcomes]),
        regret=None if best is None else _survival(best) - survival,
        cost_regret={name: figures["costs"][name] / cost - 1 for name, cost in optimum.items() if cost > 0},
    )


def _survival(cell: PolicyCounts) -> float:
    return mean([one.shown for one in cell.outcomes_of("name")])


def verdicts_of(rows: Sequence[PagingRow]) -> list[BaselineMargins]:
    """One verdict a policy; none where not all baselines were measured."""
    windows = sorted({row.window for row in rows})
    known = {(row.policy, row.window): row for row in rows}
    if any((name, window) not in known for name in BASELINES for window in windows):
        return []
    verdicts: list[BaselineMargins] = []
    for policy in dict.fromkeys(row.policy for row in rows if row.policy not in PLAIN):
        margins = {window: known[policy, window].gain for window in windows}
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


def model_differences_of(done: Sequence[PolicyCounts], seed: int) -> list[ModelDifference]:
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


def _differences(own: Sequence[ReferenceOutcome], other: Sequence[ReferenceOutcome]) -> list[list[float]]:
    return grouped([(one.run, float(one.shown) - float(two.shown)) for one, two in zip(own, other, strict=True)])


def _share_of_known(found: Sequence[bool | None]) -> float | None:
    answers = [one for one in found if one is not None]
    return mean(answers) if answers else None

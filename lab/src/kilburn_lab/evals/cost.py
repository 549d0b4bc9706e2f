"""What the prompts of a policy cost: in tokens, by price tables, in time of the processor, and for each right answer.

By a price table of `kilburn.prices`, all of the prefix that a prompt shares with the previous one is read at the price of a
cache; the rest is processed and written to it. By a provider's rules (`kilburn_lab.evals.providers`) only what its cache really
has is read. Replies are the same for every policy on recorded runs, so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn.prices import Prices, find_prices
from kilburn_lab.evals.baselines import HISTORY
from kilburn_lab.evals.intervals import percentile_95
from kilburn_lab.evals.outcomes import PolicyCounts
from kilburn_lab.evals.providers import PROVIDERS
from kilburn_lab.evals.report import columns, table_of

PER = 1000
"""Prompts that a cost is given for."""

UNITS = {"hosted": "$", "automatic": "$", "local": "s", **dict.fromkeys(PROVIDERS, "$")}
"""What a price table counts in."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are priced: by which tables, and how long the agent pauses between two prompts.

    Args:
        tables: price tables by name.
        pause: seconds between a prompt and the next; None if a cached prefix never expires.
    """

    tables: dict[str, Prices]
    pause: float | None = None


class CostRow(msgspec.Struct, frozen=True, kw_only=True):
    """What the prompts of one policy at one window cost. Tokens are of four characters.

    Args:
        calls: prompts. overflow: those that were longer than the window.
        failed: plans in which the policy raised, or returned nonsense: the kernel made room in its place.
        shipped: tokens of all prompts. later: of those that have a prompt of the same session before them.
        cached: tokens of these that are the same as the beginning of the prompt before. kept: their share of `later`, which is
            the share of the prefix kept; None if no prompt has one before it.
        edited: prompts that do not begin with all of the prompt before. broken: with less than half of it.
        refilled: tokens that had to be read again only because the prompt had changed before them. again_share: their share of
            all that were shipped.
        read, written: by provider, tokens that its cache reads and writes.
        costs: by price table, of 1,000 prompts.
        plan_p50, plan_p95: milliseconds of the processor for a plan that moved something; of a baseline, for a prompt
            that could not hold everything. None where there were none.
        told: characters of outputs in prompts that could not hold all of the run. whole: those in whole sections.
        sections: `whole` over `told`; None where everything fits.
        seconds: wall time, with what the measurement itself takes.
    """

    policy: str
    window: int
    calls: int
    overflow: int
    failed: int
    shipped: int
    later: int
    cached: int
    kept: float | None
    edited: int
    broken: int
    refilled: int
    again_share: float
    read: dict[str, int]
    written: dict[str, int]
    costs: dict[str, float]
    plan_p50: float | None
    plan_p95: float | None
    told: int
    whole: int
    sections: float | None
    seconds: float


class ComparedRow(CostRow, frozen=True, kw_only=True):
    """A row with the 95% interval of its mean, and with its difference from the best baseline: see
    `kilburn_lab.evals.baselines.compared`."""

    low: float
    high: float
    best: str
    gain: float
    gain_low: float
    gain_high: float


def figures_of(cell: PolicyCounts, rates: Rates, row: type[CostRow]) -> dict[str, Any]:
    """The fields of a row that follow from a cell alone."""
    return {
        **{name: getattr(cell, name) for name in row.__struct_fields__ if hasattr(cell, name)},
        "costs": costs_of(cell, rates),
        "plan_p50": median(cell.plans) if cell.plans else None,
        "plan_p95": percentile_95(cell.plans) if cell.plans else None,
        "sections": cell.whole / cell.told if cell.told else None,
    }


def cost_table(rows: Iterable[CostRow], rates: Rates, more: str) -> str:
    """A table of what the prompts cost, with more columns: see `kilburn_lab.evals.report.table_of`."""
    text = (
        "window={window} | policy={policy} | shipped={thousands:.1f} | "
        f"{columns('costs', rates.tables, '.3f')} | p50={{plan_p50:.1f}} | p95={{plan_p95:.1f}} | {more}"
    )
    return table_of(rows, text, thousands=lambda row: row.shipped / 1000)


def units_of(rates: Rates) -> str:
    """In words, what a table of costs counts."""
    units = ", ".join(f"{name} in {UNITS.get(name, 'its unit')}" for name in rates.tables)
    pause = "" if rates.pause is None else f", {rates.pause:g} s between two prompts"
    return (
        "What the prompts cost: thousands of tokens shipped;\n"
        f"cost of {PER:,} prompts without their replies ({units}{pause}); milliseconds of a plan"
    )


def rates_of(names: Sequence[str] | None = None, pause: float | None = None) -> Rates:
    """Rates by the names of their tables or providers, by default "hosted" and "local".

    Raises:
        SpecError: no such table, or a pause below 0.
    """
    if pause is not None and not pause >= 0:
        raise SpecError(f"a pause of {pause:g} s", advice="give 0 or more seconds")
    chosen = dict.fromkeys(names or ("hosted", "local"))
    tables = {name: PROVIDERS[name].prices if name in PROVIDERS else find_prices(name) for name in chosen}
    return Rates(tables=tables, pause=pause)


def cost_of(shipped: int, cached: int, prices: Prices, pause: float | None = None) -> float:
    """Cost of prompts of `shipped` tokens, of which `cached` are in the prefix shared with the previous prompt, in the
    table's unit.

    If the pause is longer than a cached prefix lives, all of them are fresh.
    """
    known = 0 if pause is not None and pause > prices.ttl else cached
    return (known * prices.cached + (shipped - known) * prices.written) / 1e6


def costs_of(cell: PolicyCounts, rates: Rates) -> dict[str, float]:
    """The cost of 1,000 of its prompts, by price table and by provider."""
    return {name: _cost_in(cell, name, rates) * PER / max(1, cell.calls) for name in rates.tables}


def _cost_in(cell: PolicyCounts, name: str, rates: Rates) -> float:
    """What all prompts of a cell cost by a price table, or by a provider's cache."""
    if name not in PROVIDERS:
        return cost_of(cell.shipped, cell.cached, rates.tables[name], rates.pause)
    prices = PROVIDERS[name].prices
    read, written = cell.read.get(name, 0), cell.written.get(name, 0)
    if rates.pause is not None and rates.pause > prices.ttl:
        read, written = 0, read + written
    return (read * prices.cached + written * prices.written + (cell.shipped - read - written) * prices.input) / 1e6


class Bill(msgspec.Struct, frozen=True, kw_only=True):
    """What a provider processes and is paid for one policy at one window. Tokens are of four characters.

    Args:
        right: right answers, or solved tasks.
        shipped: tokens of all prompts. read: those that its cache had; written: those that it wrote to its cache. The others are
            plain input.
        dollars: of all prompts. each: of 1,000 right answers; None without one.
        to_history, to_tail: `each` over that of the full history, and of the newest text; None where these were not measured.
    """

    policy: str
    window: int
    provider: str
    right: int
    shipped: int
    read: int
    written: int
    dollars: float
    each: float | None
    to_history: float | None
    to_tail: float | None


def bills_of(cells: Sequence[tuple[PolicyCounts, int]], pause: float | None = None) -> list[Bill]:
    """The bill of every provider for each cell, which comes with its right answers."""
    rates = Rates(tables={name: provider.prices for name, provider in PROVIDERS.items()}, pause=pause)
    bills: list[Bill] = []
    for name in PROVIDERS:
        dollars = [_cost_in(cell, name, rates) for cell, _ in cells]
        each = {
            (cell.policy, cell.window): PER * spent / right for (cell, right), spent in zip(cells, dollars, strict=True) if right
        }
        for (cell, right), spent in zip(cells, dollars, strict=True):
            own = each.get((cell.policy, cell.window))
            other = {label: each.get((label, cell.window)) for label in (HISTORY, "tail")}
            ratios = {label: own / base if own is not None and base else None for label, base in other.items()}
            bills.append(
                Bill(
                    policy=cell.policy,
                    window=cell.window,
                    provider=name,
                    right=right,
                    shipped=cell.shipped,
                    read=cell.read.get(name, 0),
                    written=cell.written.get(name, 0),
                    dollars=spent,
                    each=own,
                    to_history=ratios[HISTORY],
                    to_tail=ratios["tail"],
                )
            )
    return bills


def bill_table(bills: Sequence[Bill], what: str) -> str:
    """A table of bills, below a sentence on what it counts: thousands of tokens, and dollars of 1,000 of `what`."""
    text = (
        f"provider={{provider}} | window={{window}} | policy={{policy}} | {what}={{right}} | shipped={{thousands[0]:.1f}} | "
        "read={thousands[1]:.1f} | written={thousands[2]:.1f} | $ of 1,000={each:.2f} | to history={to_history:.2f} | "
        "to tail={to_tail:.2f}"
    )
    rows = table_of(
        bills,
        text,
        ("provider", "policy"),
        thousands=lambda row: (row.shipped / 1000, row.read / 1000, row.written / 1000),
    )
    return (
        "What a provider has to process, by its cache's rules: thousands of tokens shipped, read, and written; dollars of\n"
        f"1,000 {what}, over those of the full history, and of the newest text\n\n{rows}"
    )

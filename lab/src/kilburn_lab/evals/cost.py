"""What the prompts of a policy cost: in tokens, by price tables, and in time of the processor.

The prefix that a prompt shares with the previous one is read at the price of a cache; the rest is processed and
written to it. Replies are the same for every policy on recorded runs, so they are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn.prices import Prices, prices_of
from kilburn_lab.evals.intervals import percentile_95
from kilburn_lab.evals.outcomes import PolicyCounts
from kilburn_lab.evals.report import columns, table_of

PER = 1000
"""Prompts that a cost is given for."""

UNITS = {"hosted": "$", "automatic": "$", "local": "s"}
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
        shipped: tokens of all prompts. cached: those that continue the prompt before, from its beginning.
        refilled: tokens that had to be read again only because the prompt had changed before them.
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
    cached: int
    refilled: int
    costs: dict[str, float]
    plan_p50: float | None
    plan_p95: float | None
    told: int
    whole: int
    sections: float | None
    seconds: float


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
        "window={window} | policy={policy} | shipped={thousands[0]:.1f} | again={thousands[1]:.1f} | cached={known:.0%} | "
        f"{columns('costs', rates.tables, '.3f')} | p50={{plan_p50:.1f}} | p95={{plan_p95:.1f}} | {more}"
    )
    return table_of(
        rows,
        text,
        thousands=lambda row: (row.shipped / 1000, row.refilled / 1000),
        known=lambda row: row.cached / max(1, row.shipped),
    )


def units_of(rates: Rates) -> str:
    """In words, what a table of costs counts."""
    units = ", ".join(f"{name} in {UNITS.get(name, 'its unit')}" for name in rates.tables)
    pause = "" if rates.pause is None else f", {rates.pause:g} s between two prompts"
    return (
        "What the prompts cost: thousands of tokens shipped, and read again because of an edit; share that a cache had;\n"
        f"cost of {PER:,} prompts without their replies ({units}{pause}); milliseconds of a plan"
    )


def rates_of(names: Sequence[str] | None = None, pause: float | None = None) -> Rates:
    """Rates by the names of their tables, by default "hosted" and "local".

    Raises:
        SpecError: no such table, or a pause below 0.
    """
    if pause is not None and not pause >= 0:
        raise SpecError(f"a pause of {pause:g} s", advice="give 0 or more seconds")
    return Rates(tables={name: prices_of(name) for name in dict.fromkeys(names or ("hosted", "local"))}, pause=pause)


def cost_of(shipped: int, cached: int, prices: Prices, pause: float | None = None) -> float:
    """Cost of prompts of `shipped` tokens, of which `cached` are in the prefix shared with the previous prompt, in the
    table's unit.

    If the pause is longer than a cached prefix lives, all of them are fresh.
    """
    known = 0 if pause is not None and pause > prices.ttl else cached
    return (known * prices.cached + (shipped - known) * prices.written) / 1e6


def costs_of(cell: PolicyCounts, rates: Rates) -> dict[str, float]:
    """The cost of 1,000 of its prompts, by price table."""
    return {
        name: cost_of(cell.shipped, cell.cached, prices, rates.pause) * PER / max(1, cell.calls)
        for name, prices in rates.tables.items()
    }

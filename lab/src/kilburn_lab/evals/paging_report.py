"""The report of `kilburn_lab.evals.paging`: its rows as tables and as JSON."""

from __future__ import annotations

import msgspec

from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.cost import Rates, cost_columns, units_of
from kilburn_lab.evals.outcomes import ReferenceOutcome
from kilburn_lab.evals.report import EvalReport, best_words, grid, row_of, table_of
from kilburn_lab.evals.rows import BaselineMargins, ModelDifference, Row

__all__ = ["PagingReport"]


class PagingReport(EvalReport, frozen=True, kw_only=True):
    """All rows of one measurement, what follows from them, and each outcome behind them.

    Args:
        sample: in words, which runs these are.
        rates: how prompts were priced.
        copies: lines and values that are copied from older outputs, beside the names.
        verdicts: against the baselines; empty if not all of them were measured.
        losses: what a model's words changed; empty if none took part.
    """

    sample: str
    runs: int
    references: int
    copies: int
    rates: Rates
    rows: list[Row]
    verdicts: list[BaselineMargins]
    losses: list[ModelDifference]
    outcomes: list[ReferenceOutcome]

    def row(self, policy: str, window: int) -> Row:
        """The row of a policy at a window; KeyError if it was not measured."""
        return row_of(self.rows, policy=policy, window=window)

    def table(self) -> str:
        """Plain text: what the prompts showed, what they cost, and what follows."""
        taken = f"{self.references} references and {self.copies} copies in {self.runs} runs"
        parts = [
            f"{taken}; one token is {CHARACTERS} characters\nruns: {self.sample}",
            "What the next action names, or copies, and an older output had: shares of the references that the prompt showed;\n"
            + best_words("survival", self.rows),
            self._survival_table(),
            f"{units_of(self.rates)};\n{self._further_costs()}",
            self._cost_table(),
            *self._specs(),
        ]
        if self.losses:
            parts += ["With a model's words less without, on the same references", self._model_table()]
        if self.verdicts:
            parts += [
                "Survival less the best baseline's (+ is above), and re-prefilled tokens over those of summarize",
                self._verdict_table(),
            ]
        return "\n\n".join(parts)

    def _survival_table(self) -> str:
        regret = any(row.regret is not None for row in self.rows)
        return table_of(
            {
                "window": str(row.window),
                "policy": row.policy,
                "survival": f"{row.survival:.3f}",
                "95%": f"{row.low:.3f}-{row.high:.3f}",
                "to best, 95%": f"{row.gain:+.3f} {row.gain_low:+.3f} {row.gain_high:+.3f}",
                "copies": "" if row.copied is None else f"{row.copied:.3f}",
                "whole": "" if row.sections is None else f"{row.sections:.3f}",
                "search": "" if row.searched is None else f"{row.searched:.3f}",
                "fault": "" if row.reachable is None else f"{row.reachable:.3f}",
                "over": str(row.overflow),
                "failed": str(row.failed),
                **({"regret": "" if row.regret is None else f"{row.regret:+.3f}"} if regret else {}),
            }
            for row in self.rows
        )

    def _cost_table(self) -> str:
        regret = any(row.cost_regret for row in self.rows)
        return table_of(
            {
                **cost_columns(row, self.rates),
                **({f"+{name}": _percent(row.cost_regret.get(name)) for name in self.rates.tables} if regret else {}),
                "acted": str(row.acts),
                "asked": str(row.asks),
                "refused": str(row.refused),
            }
            for row in self.rows
        )

    def _further_costs(self) -> str:
        regret = "+: cost over the optimum's; " if any(row.cost_regret for row in self.rows) else ""
        return f"{regret}times that the policy itself acted, questions to a model, plans that broke a law"

    def _specs(self) -> list[str]:
        """The specs of labels that are not specs themselves."""
        specs: dict[str, dict[str, None]] = {}
        for row in self.rows:
            if row.spec != row.policy:
                model = f", asking {row.model}" if row.model else ""
                specs.setdefault(row.policy, {})[row.spec + model] = None
        lines = [f"{label} is {' / '.join(known)}" for label, known in specs.items()]
        return ["\n".join(lines)] if lines else []

    def _model_table(self) -> str:
        heads = ["window", "policy", "survival", "95%", "lines", "asked", "unanswered"]
        body = [
            [
                str(loss.window),
                loss.policy,
                f"{loss.survival:+.3f}",
                f"{loss.low:+.3f} {loss.high:+.3f}",
                f"{loss.line:+.3f}",
                str(loss.asks),
                str(loss.unanswered),
            ]
            for loss in self.losses
        ]
        return grid(heads, body)

    def _verdict_table(self) -> str:
        windows = sorted(self.verdicts[0].margins)
        heads = ["policy", *(f"{window}" for window in windows), "above", *(f"again {window}" for window in windows), "fewer"]
        body = [
            [
                one.policy,
                *(f"{one.margins[window]:+.3f}" for window in windows),
                _yes_or_no(one.above),
                *(f"{one.refills[window]:.2f}" if window in one.refills else "" for window in windows),
                _yes_or_no(one.fewer),
            ]
            for one in sorted(self.verdicts, key=lambda one: -min(one.margins.values()))
        ]
        return grid(heads, body, ("policy", "above", "fewer"))

    def to_json(self, *, outcomes: bool = False) -> str:
        """The whole report as one JSON object; optionally with each outcome."""
        kept = self if outcomes else msgspec.structs.replace(self, outcomes=[])
        return msgspec.json.encode(kept).decode()


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.0%}"


def _yes_or_no(known: bool | None) -> str:
    return "" if known is None else "yes" if known else "no"

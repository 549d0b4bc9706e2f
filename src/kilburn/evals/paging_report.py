"""The report of `kilburn.evals.paging`: its rows as tables and as JSON."""

from __future__ import annotations

import msgspec

from kilburn.evals.baselines import CHARACTERS
from kilburn.evals.cost import PER, UNITS, Rates
from kilburn.evals.outcomes import ReferenceOutcome
from kilburn.evals.report import EvalReport, grid, row_of
from kilburn.evals.rows import BaselineMargins, ModelDifference, Row

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
            "What the next action names, or copies, and an older output had: shares of the references that the prompt showed",
            self._survival_table(),
            self._cost_heading(),
            self._cost_table(),
            *self._specs(),
        ]
        if self.losses:
            parts += ["With a model's words less without, on the same references", self._model_table()]
        if self.verdicts:
            parts += [
                "Survival less the best of the four baselines (+ is above), and re-prefilled tokens over those of summarize",
                self._verdict_table(),
            ]
        return "\n\n".join(parts)

    def _survival_table(self) -> str:
        regret = any(row.regret is not None for row in self.rows)
        heads = ["window", "policy", "survival", "95%", "to tail", "95%", "copies", "whole", "search", "fault", "over"]
        body = [
            [
                str(row.window),
                row.policy,
                f"{row.survival:.3f}",
                f"{row.low:.3f}-{row.high:.3f}",
                f"{row.gain:+.3f}",
                f"{row.gain_low:+.3f} {row.gain_high:+.3f}",
                "" if row.copied is None else f"{row.copied:.3f}",
                "" if row.passages is None else f"{row.passages:.3f}",
                "" if row.searched is None else f"{row.searched:.3f}",
                "" if row.reachable is None else f"{row.reachable:.3f}",
                str(row.overflow),
                *([f"{row.regret:+.3f}" if row.regret is not None else ""] if regret else []),
            ]
            for row in self.rows
        ]
        return grid([*heads, *(["regret"] if regret else [])], body)

    def _cost_heading(self) -> str:
        units = ", ".join(f"{name} in {UNITS.get(name, 'its unit')}" for name in self.rates.tables)
        pause = "" if self.rates.pause is None else f", {self.rates.pause:g} s between two prompts"
        regret = ", and over the optimum's" if any(row.cost_regret for row in self.rows) else ""
        return (
            "What the prompts cost: thousands of tokens shipped, and read again because of an edit; share that a cache had;\n"
            f"cost of {PER:,} prompts without their replies ({units}{pause}){regret};\n"
            "times that the policy itself acted, questions to a model, plans that broke a law, seconds of wall time"
        )

    def _cost_table(self) -> str:
        tables = list(self.rates.tables)
        regret = any(row.cost_regret for row in self.rows)
        heads = ["window", "policy", "shipped", "again", "cached"]
        for name in tables:
            heads += [name, "over"] if regret else [name]
        body = []
        for row in self.rows:
            line = [
                str(row.window),
                row.policy,
                f"{row.shipped / 1000:.1f}",
                f"{row.refilled / 1000:.1f}",
                f"{row.cached / max(1, row.shipped):.0%}",
            ]
            for name in tables:
                line.append(f"{row.costs[name]:.3f}")
                if regret:
                    line.append(f"{row.cost_regret[name]:+.0%}" if name in row.cost_regret else "")
            body.append([*line, str(row.acts), str(row.asks), str(row.refused), f"{row.seconds:.1f}"])
        return grid([*heads, "acted", "asked", "refused", "s"], body)

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


def _yes_or_no(known: bool | None) -> str:
    return "" if known is None else "yes" if known else "no"

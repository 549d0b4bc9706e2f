"""The report of `kilburn_lab.evals.paging`: its rows as tables and as JSON."""

from __future__ import annotations

from textwrap import fill
from typing import NamedTuple

import msgspec

from kilburn_lab.evals.baselines import CHARACTERS
from kilburn_lab.evals.cost import Rates, cost_table, units_of
from kilburn_lab.evals.outcomes import ReferenceOutcome
from kilburn_lab.evals.prefix import WORDS as PREFIX_WORDS
from kilburn_lab.evals.report import WIDTH, EvalReport, best_named, best_words, columns, table_of
from kilburn_lab.evals.rows import BaselineMargins, ModelDifference, PagingRow


class _Best(NamedTuple):
    window: int
    best: str


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
    rows: list[PagingRow]
    verdicts: list[BaselineMargins]
    losses: list[ModelDifference]
    outcomes: list[ReferenceOutcome]

    def table(self) -> str:
        """Plain text: what the prompts showed, what they cost, and what follows."""
        taken = f"{self.references} references and {self.copies} copies in {self.runs} runs"
        parts = [
            f"{taken}; one token is {CHARACTERS} characters\nruns: {self.sample}",
            "What the next action names, or copies, and an older output had. Each action counts once, with the share of what\n"
            f"it needs that the prompt showed.\n{PREFIX_WORDS}\n{self._best_by_action()}",
            self._action_table(),
            "The same, each name and each copied line or value counting once;\n" + best_words("survival", self.rows),
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

    def _best_by_action(self) -> str:
        """Which baselines the columns by action compare with."""
        words = []
        for kind, what in (("name", "names"), ("copy", "copies")):
            shares = [(row.window, row.by_action[kind]) for row in self.rows if kind in row.by_action]
            if shares:
                named = best_named(_Best(window, share.best) for window, share in shares)
                words.append(f"{what} of {shares[0][1].actions} actions, the best baseline {named}")
        return fill(f"to best: less the share of the best baseline; {'; '.join(words)}", WIDTH)

    def _action_table(self) -> str:
        shares = " | ".join(
            f"{what}={{{kind}.share:.3f}} | 95%={{{kind}.low:.2f}}-{{{kind}.high:.2f}} | "
            f"to best, 95%={{{kind}.gain:+.2f}} {{{kind}.gain_low:+.2f}} {{{kind}.gain_high:+.2f}}"
            for kind, what in (("name", "names"), ("copy", "copies"))
        )
        prefix = "kept={kept:.2f} | again={thousands:.1f} | share={again_share:.2f}"
        text = f"window={{window}} | policy={{policy}} | {shares} | {prefix}"
        return table_of(
            self.rows,
            text,
            thousands=lambda row: row.refilled / 1000,
            name=lambda row: row.by_action.get("name"),
            copy=lambda row: row.by_action.get("copy"),
        )

    def _survival_table(self) -> str:
        regret = any(row.regret is not None for row in self.rows)
        text = (
            "window={window} | policy={policy} | survival={survival:.3f} | 95%={low:.3f}-{high:.3f} | "
            "to best, 95%={gain:+.3f} {gain_low:+.3f} {gain_high:+.3f} | copies={copied:.3f} | whole={sections:.3f} | "
            "search={searched:.3f} | fault={reachable:.3f} | over={overflow} | failed={failed}"
        )
        return table_of(self.rows, text + " | regret={regret:+.3f}" * regret)

    def _cost_table(self) -> str:
        regret = any(row.cost_regret for row in self.rows)
        more = f"{columns('cost_regret', self.rates.tables, '+.0%', '+{}')} | " * regret
        return cost_table(self.rows, self.rates, more + "acted={acts} | asked={asks} | refused={refused}")

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
        text = (
            "window={window} | policy={policy} | survival={survival:+.3f} | 95%={low:+.3f} {high:+.3f} | lines={line:+.3f} | "
            "asked={asks} | unanswered={unanswered}"
        )
        return table_of(self.losses, text)

    def _verdict_table(self) -> str:
        windows = sorted(self.verdicts[0].margins)
        text = (
            f"policy={{policy}} | {columns('margins', windows, '+.3f')} | above={{is_above}} | "
            f"{columns('refills', windows, '.2f', 'again {}')} | fewer={{is_fewer}}"
        )
        rows = sorted(self.verdicts, key=lambda one: -min(one.margins.values()))
        answers: dict[bool | None, str] = {True: "yes", False: "no"}
        words = ("policy", "above", "fewer")
        return table_of(rows, text, words, is_above=lambda one: answers[one.above], is_fewer=lambda one: answers.get(one.fewer))

    def to_json(self, *, outcomes: bool = False) -> str:
        """The whole report as one JSON object; optionally with each outcome."""
        kept = self if outcomes else msgspec.structs.replace(self, outcomes=[])
        return msgspec.json.encode(kept).decode()

"""What was measured of presses at each budget: shares of right answers, nats of the held-out text, their table and picture.

Contexts are the same for all, so each press is also compared with the full cache and with the page-aware
press case by case.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn_lab.evals.intervals import interval, wilson
from kilburn_lab.evals.report import EvalReport, grid, row_of
from kilburn_lab.picture import picture, plain_axes

FULL, OURS = "full", "pages"

WHENS = ("later", "first")
"""When the question comes: after the cache was pressed, or before, at the end of what is pressed."""

TEXTS = ("summary", "excerpts")
"""Ways that are a new start from a text, not a press."""

_OURS = "#2b6cb0"
_COLOURS = ("#c05621", "#d69e2e", "#2f855a", "#b83280", "#718096", "#805ad5", "#319795", "#90cdf4")

_ASKED = {"later": "pressed before the question was known", "first": "pressed with the question at the end"}


class PressResult(msgspec.Struct, frozen=True, kw_only=True):
    """One question, read behind one cache.

    Args:
        case: number of the context. kind: see `press_curves.needles.KINDS`. when: of `WHENS`.
        way: the press, as it was named. budget: share of the context's tokens.
        right: every token of the answer was the most probable one.
        logprob: of the answer's tokens, mean, nats.
        rest: of how the text goes on, nats a token; None where a question stood before it.
    """

    case: int
    kind: str
    when: str
    way: str
    budget: float
    right: bool
    logprob: float
    rest: float | None = None


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A press at a budget, over all cases.

    Args:
        share: of right answers. low, high: its 95% interval (Wilson).
        kinds: right answers and questions of each kind.
        logprob: see `PressResult`; the mean.
        rest: nats a token of the held-out text, the mean over cases; None where it was not read.
        rest_low, rest_high: what it is above the full cache, 95% (bootstrap over the pairs of a case).
        ours: by how much the share of the page-aware press is above this one; None where that was not measured.
        ours_low, ours_high: 95% (bootstrap over the pairs of a case).
    """

    when: str
    way: str
    budget: float
    asked: int
    right: int
    share: float
    low: float
    high: float
    kinds: dict[str, tuple[int, int]]
    logprob: float
    rest: float | None
    rest_low: float | None
    rest_high: float | None
    ours: float | None
    ours_low: float | None
    ours_high: float | None


class Pressed(EvalReport, frozen=True, kw_only=True):
    """All of it."""

    model: str
    cases: int
    tokens: int
    seed: int
    cells: list[Cell]
    outcomes: list[PressResult]

    @classmethod
    def of(
        cls,
        outcomes: Sequence[PressResult],
        ways: Sequence[str],
        budgets: Sequence[float],
        *,
        model: str,
        cases: int,
        tokens: int,
        seed: int,
    ) -> Pressed:
        """From what came of each question; that of the full cache is there once, under budget 1."""
        found: dict[tuple[str, str, float], list[PressResult]] = {}
        for one in outcomes:
            found.setdefault((one.when, one.way, one.budget), []).append(one)
        cells = []
        for when in WHENS:
            full = found[when, FULL, 1.0]
            for way in ways:
                for budget in budgets:
                    own = full if way == FULL else found[when, way, budget]
                    cells.append(_cell(own, full, found.get((when, OURS, budget)), way, budget))
        return cls(model=model, cases=cases, tokens=tokens, seed=seed, cells=cells, outcomes=list(outcomes))

    def cell(self, way: str, budget: float, when: str = "later") -> Cell:
        """What was counted; KeyError where it was not measured."""
        return row_of(self.cells, way=way, budget=budget, when=when)

    def table(self) -> str:
        """Plain text for people."""
        parts = [f"{self.model or 'a model'}: {self.cases} contexts of about {self.tokens:,} tokens (seed {self.seed})"]
        for when in WHENS:
            parts.append(f"Right answers, {_ASKED[when]}: share, 95%, nats of an answer's token\n\n{self._asked(when)}")
        parts.append(f"How the text goes on: nats a token, and above the full cache\n\n{self._rest()}")
        if any(one.way == OURS for one in self.cells):
            parts.append(f"Right answers of {OURS} above those of each, same contexts\n\n{self._against()}")
        return "\n\n".join(parts)

    def _budgets(self) -> list[float]:
        return list(dict.fromkeys(one.budget for one in self.cells))

    def _ways(self) -> list[str]:
        return list(dict.fromkeys(one.way for one in self.cells))

    def _asked(self, when: str) -> str:
        body = []
        for way in self._ways():
            row = [way]
            for budget in self._budgets():
                one = self.cell(way, budget, when)
                row.append(f"{one.share:.2f} {one.low:.2f}-{one.high:.2f} {one.logprob:.2f}")
            body.append(row)
        return grid(["press", *(f"{budget:.1%}" for budget in self._budgets())], body, ("press",))

    def _rest(self) -> str:
        body = []
        for way in self._ways():
            row = [way]
            for budget in self._budgets():
                one = self.cell(way, budget)
                assert one.rest is not None
                assert one.rest_low is not None
                same = one.rest_low == one.rest_high == 0
                row.append(f"{one.rest:.3f}" + ("" if same else f" {one.rest_low:+.2f} to {one.rest_high:+.2f}"))
            body.append(row)
        return grid(["press", *(f"{budget:.1%}" for budget in self._budgets())], body, ("press",))

    def _against(self) -> str:
        body = []
        for when in WHENS:
            for way in self._ways():
                if way == OURS:
                    continue
                row = [f"{way}, question {when}"]
                for budget in self._budgets():
                    one = self.cell(way, budget, when)
                    row.append("" if one.ours is None else f"{one.ours:+.2f} ({one.ours_low:+.2f} to {one.ours_high:+.2f})")
                body.append(row)
        return grid(["press", *(f"{budget:.1%}" for budget in self._budgets())], body, ("press",))


def _cell(
    own: Sequence[PressResult], full: Sequence[PressResult], ours: Sequence[PressResult] | None, way: str, budget: float
) -> Cell:
    right = sum(one.right for one in own)
    low, high = wilson(right, len(own))
    kinds: dict[str, tuple[int, int]] = {}
    for one in own:
        before = kinds.get(one.kind, (0, 0))
        kinds[one.kind] = (before[0] + one.right, before[1] + 1)
    pairs = [(mine.rest, whole.rest) for mine, whole in zip(own, full, strict=True)]
    above = [mine - whole for mine, whole in pairs if mine is not None and whole is not None]
    rests = [one.rest for one in own if one.rest is not None]
    worse = interval([[one] for one in above], 0) if above else (None, None)
    gains = [float(best.right) - one.right for best, one in zip(ours, own, strict=True)] if ours is not None else []
    gain = interval([[one] for one in gains], 0) if gains else (None, None)
    return Cell(
        when=own[0].when,
        way=way,
        budget=budget,
        asked=len(own),
        right=right,
        share=right / len(own),
        low=low,
        high=high,
        kinds=kinds,
        logprob=sum(one.logprob for one in own) / len(own),
        rest=sum(rests) / len(rests) if rests else None,
        rest_low=worse[0],
        rest_high=worse[1],
        ours=sum(gains) / len(gains) if gains else None,
        ours_low=gain[0],
        ours_high=gain[1],
    )


def draw(path: Path, report: Pressed, *, force: bool = False) -> None:
    """Draw the curves of a report to a file; the suffix says the format.

    Raises:
        SpecError, MissingExtra, OSError: see `kilburn_lab.picture.picture`.
    """
    # Letters as outlines would be most of the file.
    with picture(path, 13, 4.6, force=force, letters="none") as figure:
        for axes, when in zip(figure.subplots(1, 3), (*WHENS, ""), strict=True):
            _panel(axes, report, when)
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8.5)


def _panel(axes: Any, report: Pressed, when: str) -> None:
    """Right answers over budgets, or, without a `when`, the nats of the held-out text."""
    cells = [one for one in report.cells if one.when == (when or WHENS[0])]
    for at, way in enumerate(dict.fromkeys(one.way for one in cells)):
        own = sorted((one for one in cells if one.way == way), key=lambda one: one.budget)
        budgets = [one.budget for one in own]
        style: dict[str, Any] = {"color": _COLOURS[(at - 1) % len(_COLOURS)], "linewidth": 1.4, "label": way}
        if way == FULL:
            style |= {"color": "black", "linestyle": "--"}
        elif way == OURS:
            style |= {"color": _OURS, "linewidth": 2.6, "marker": "o", "markersize": 4, "zorder": 3}
        elif way in TEXTS:
            style |= {"linestyle": ":"}
        axes.plot(budgets, [one.share if when else one.rest for one in own], **style)
        if when and way == OURS:
            axes.fill_between(budgets, [one.low for one in own], [one.high for one in own], color=_OURS, alpha=0.12, linewidth=0)
    budgets = sorted({one.budget for one in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{budget:.3g}" for budget in budgets])
    axes.minorticks_off()
    axes.set(xlabel="share of the tokens that stay", ylabel="right answers" if when else "nats a token")
    if when:
        axes.set_ylim(-0.03, 1.03)
    axes.set_title(_ASKED[when] if when else "how the text goes on", loc="left", fontsize=10)
    plain_axes(axes)

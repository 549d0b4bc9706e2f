"""The picture of drift: the share of the facts that the prompt shows, compaction by compaction.

Drawn through matplotlib. It refuses to draw what was not measured: the dashed lines are what losing the
mean share at each compaction would leave, and say so.
"""

from __future__ import annotations

from pathlib import Path

from kilburn.evals.decay import Decay
from kilburn.evals.pareto import check_picture, save

__all__ = ["draw"]


def draw(path: Path, report: Decay, *, force: bool = False) -> None:
    """Draw the curves of a report to a file; the suffix says the format.

    Raises:
        SpecError: a format that is not drawn here, or a file that is there without `force`. MissingExtra: no
            matplotlib. OSError: the file cannot be written.
    """
    check_picture(path, force=force)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "kilburn", "svg.fonttype": "path"}):
        figure = Figure(figsize=(9, 4.8), dpi=120, layout="constrained")
        axes = figure.add_subplot()
        for row in report.losses:
            passes = range(len(row.curve) + 1)
            (line,) = axes.plot(passes, [1.0, *row.curve], linewidth=1.8, marker="o", markersize=3.5, label=row.policy)
            kept = [(1 - row.rate) ** number for number in passes]
            axes.plot(passes, kept, linewidth=1, linestyle="--", color=line.get_color())
        axes.set(ylim=(-0.02, 1.05), xlabel="compactions", ylabel="facts in the window, verbatim")
        axes.set_title(
            f"A window of {report.window:,} tokens; dashed: the mean loss a compaction, compounded", loc="left", fontsize=11
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
        save(figure, path, force=force)

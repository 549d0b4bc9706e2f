"""`lab`: measurements, each a verb of its own, made from the arguments of the function that measures.

Without options a verb measures a sample that takes two minutes at most; with `--full`, everything that the documentation
reports. Before it starts it says how many units of work there are and how long they should take.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from kilburn.cli.screen import many, progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import SpecError
from kilburn.file import check_target, write_file
from kilburn.terminal import say, show
from kilburn.wire.recording import FORMS
from kilburn_lab.evals.cost import Rates, rates_of
from kilburn_lab.evals.measure import Progress
from kilburn_lab.evals.pareto import REFILLED, draw
from kilburn_lab.evals.providers import PROVIDERS
from kilburn_lab.evals.report import EvalReport
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.saved import C, SavedCells
from kilburn_lab.picture import check_picture

Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows of the table to this file.")]

lab = typer.Typer(help="Measure policies, memory and caches.", no_args_is_help=True, rich_markup_mode=None)


@lab.callback()
def group() -> None:
    """Measure policies, memory and caches."""


class Option(NamedTuple):
    """The command-line option of an argument of a measure.

    Its name, default and type are those of the argument, except that a sequence is an option that may be repeated; without it,
    the measure's default applies.

    Args:
        help: the help text. metavar: the placeholder of its value.
        name: another name. least: the minimum.
        kind, default: type and default of an option that is not an argument of the measure, or that `by` converts to one.
    """

    help: str
    metavar: str | None = None
    name: str = ""
    least: int | None = None
    kind: Any = None
    default: Any = None
    by: Callable[[Any], Any] | None = None

    def parameter(self, argument: str, known: Parameter | None, *, sampled: bool = False) -> Parameter:
        """Return the parameter that typer reads.

        Args:
            sampled: `--full` has another default. Then None means that the option was not given.
        """
        kind, default = self.kind, self.default
        if kind is None and known is not None:
            kind, default = known.annotation, known.default
            if (sequence := _sequence_in(kind)) is not None:
                kind, default = list[get_args(sequence)[0]] | None, None  # type: ignore[misc]
            elif Path in get_args(kind):
                kind = Path | None
        words, shown = self.help, True
        if sampled and default is not None:
            words, shown = f"{words.removesuffix('.')}; {default} by default.", False
            kind, default = kind | None, None
        option = typer.Option(self.flag(argument), metavar=self.metavar, help=words, min=self.least, show_default=shown)
        default = ... if default is Parameter.empty else default
        return Parameter(argument, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])

    def flag(self, argument: str) -> str:
        """Return the name of the option on the command line."""
        return self.name or f"--{argument}"


def _sequence_in(annotation: Any) -> Any:
    """Return the `Sequence[...]` of an annotation, which may be a union with None; otherwise None."""
    return next((part for part in (annotation, *get_args(annotation)) if get_origin(part) is Sequence), None)


DATA = Option(f"Recorded runs: {FORMS}; or a folder of them. By default synthetic.", "FILE|DIR")
SOURCES = Option("Make runs from the Python, Java, C, Go and JavaScript sources in this folder.", "DIR")
WINDOWS = Option("Tokens of four characters; may be repeated. 1000, 2000 and 4000 by default.", name="--window")
HALF = Option("Only the runs of this half; all by default.", "|".join(HALVES))
TOLD = Option("Present actions and outputs as tool calls and results, for policies that act on them.", name="--tools")
WRITER = Option("Let this model answer the policies' questions, in additional rows.", "SPEC", "--writer", kind=str, default="")
READER = Option("Reader: exact without a model, local weights, or a model's spec.", "exact|qwen|smollm2|SPEC")
PRICES = Option(
    f"hosted, automatic, local, or the cache of {', '.join(PROVIDERS)}; may be repeated. hosted and local by default.",
    "NAME",
    kind=list[str] | None,
)
PAUSE = Option("Seconds between two prompts; longer than the cache's lifetime, nothing is cached.", "SECONDS", kind=float | None)
PRICED = {
    "prices": PRICES,
    "pause": PAUSE,
    "plot": Option("Plot the result against the cost; .svg, .png or .pdf.", "FILE", kind=Path | None),
    "axis": Option("Cost in the plot: refilled, or a price table.", "NAME", kind=str, default=REFILLED),
}
"""The options of a measure that has prices."""


class Work(NamedTuple):
    """The work of a measurement, by default and with `--full`.

    Args:
        doing: the title of the progress.
        unit: the unit of work that the progress counts, in the singular.
        cost: seconds per unit on one core, with the defaults.
        full: by argument, the values of the documentation's measurement: `--full` sets those that are not given. None means
            all.
    """

    doing: str
    unit: str
    cost: float
    full: Mapping[str, Any]


def policies_of(those: Sequence[str]) -> Option:
    """The option for policies and baselines; `those` are measured by default."""
    return Option(f"A policy or a baseline; may be repeated. {', '.join(those)} by default.", "SPEC", "--policy")


def verb(
    name: str,
    measure: Callable[..., EvalReport],
    work: Work,
    words: str | None,
    like: Callable[..., EvalReport] | None = None,
    among: typer.Typer = lab,
    worth: str = "",
    **options: Option,
) -> None:
    """Return a command that measures, prints the report, and writes its rows to a file on request.

    Args:
        name: the name of the command. measure: called with the options, `progress`, and `force` if it writes.
        words: the help text.
        like: the function that takes the options for which `measure` has no argument.
        worth: the field of the rows that a picture plots against the cost. If given, the command also has the options `PRICED`,
            and `measure` is called with `rates`.
        options: by the argument of `measure`.
    """
    options |= PRICED if worth else {}
    known = {**signature(like or measure, eval_str=True).parameters, **signature(measure, eval_str=True).parameters}
    parameters = [
        option.parameter(argument, known.get(argument), sampled=argument in work.full) for argument, option in options.items()
    ]
    parameters.append(_full_option(work.full, options).parameter("full", None))
    for argument, kind, default in (("csv", Csv, None), ("force", Force, False), ("json", Json, False)):
        parameters.append(Parameter(argument, Parameter.KEYWORD_ONLY, default=default, annotation=kind))

    def run(**given: Any) -> None:
        csv, force, plot = given["csv"], given["force"], given.get("plot")
        if csv is not None:
            check_target(csv, force=force)
        if plot is not None:
            check_picture(plot, force=force)
        chosen = {"force": force} if "force" in known else {}
        for argument, option in options.items():
            value = given[argument]
            if argument in work.full and value in (None, []):
                if given["full"]:
                    chosen[argument] = work.full[argument]
            elif option.by is not None:
                chosen[argument] = option.by(value)
            elif value or argument not in known or _sequence_in(known[argument].annotation) is None:
                chosen[argument] = value
        if worth:
            del chosen["plot"], chosen["axis"]
            chosen["rates"] = rates_of(chosen.pop("prices"), chosen.pop("pause"))
            _check_axis(plot, given["axis"], chosen["rates"])
        with progress(work.doing) as update:
            quiet = os.environ.get("KILBURN_QUIET")
            report: Any = measure(**chosen, progress=update if quiet else EstimatedProgress(update, work))
        if given.get("out") is not None:
            say(f"written: {given['out']}")
        show(report, given["json"])
        if csv is not None:
            with write_file(csv, force=force) as file:
                file.write(report.to_csv().encode("utf-8"))
            say(f"written: {csv}")
        if plot is not None:
            draw(plot, report, worth, given["axis"], force=force)
            say(f"written: {plot}")
        _end_if_failed(report)

    run.__doc__ = words
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    among.command(name)(run)


def _full_option(full: Mapping[str, Any], options: Mapping[str, Option]) -> Option:
    changes = []
    for argument, value in full.items():
        for each in value if isinstance(value, tuple) else (value,):
            flag = options[argument].flag(argument)
            changes.append(f"{flag} {each}" if each is not None else f"all of {flag}")
    return Option(f"Measure what the documentation reports: {', '.join(changes)}.", kind=bool, default=False)


class EstimatedProgress:
    """Progress that first says how many units there are and how long they should take.

    The time comes from the measured time of a unit. It is corrected once, after a twentieth of the units, if these take more
    than twice as long: recorded runs are longer than made-up ones, and models slower than scripts.

    Args:
        update: shows the progress. clock: in seconds.
    """

    def __init__(self, update: Progress, work: Work, clock: Callable[[], float] = time.monotonic) -> None:
        self._update, self._work, self._clock = update, work, clock
        self._began: float | None = None
        self._skipped = 0
        self._corrected = False

    def __call__(self, done: int, total: int) -> None:
        """Show that `done` of `total` units are done."""
        if self._began is None:
            self._began, self._skipped = self._clock(), done
            say(f"{many(total - done, self._work.unit)}, {_duration((total - done) * self._work.cost)}")
        elapsed, measured = self._clock() - self._began, done - self._skipped
        remaining = elapsed / max(1, measured) * (total - done)
        slow = min(elapsed, remaining) > CORRECTION and elapsed > 2 * measured * self._work.cost
        if slow and 20 * measured >= total - self._skipped and not self._corrected:
            self._corrected = True
            say(f"slower than usual: {_duration(remaining)} more")
        self._update(done, total)


CORRECTION = 10.0
"""Seconds after which an estimate may be corrected, if as many remain."""


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


def _end_if_failed(report: EvalReport) -> None:
    """End with status 1 where something went wrong: a policy failed, for example, and its figures are the kernel's."""
    complaints = report.complaints()
    for complaint in complaints:
        say(complaint)
    if complaints:
        raise typer.Exit(1)


def saved_in(out: Path | None, digest: str, kind: type[C], *, resume: bool, force: bool) -> SavedCells[C] | None:
    """The cells in the file of --out, if there is one.

    Raises:
        SpecError: --resume without --out, or a file that cannot be used.
    """
    if resume and out is None:
        raise SpecError("--resume without --out", advice="name the file to go on with")
    return SavedCells(out, digest, kind, resume=resume, force=force) if out is not None else None


def peers_of(given: Sequence[str] | None) -> dict[str, str]:
    """Which Python has which other system, from words like NAME=PYTHON.

    Raises:
        SpecError: a word without a Python.
    """
    named = [one.partition("=") for one in given or ()]
    if wrong := [name for name, _, python in named if not python]:
        raise SpecError(f"--peer {wrong[0]}", advice="say which Python has it: NAME=PYTHON")
    return {name: python for name, _, python in named}


def _check_axis(plot: Path | None, axis: str, rates: Rates) -> None:
    """Check before a measurement that the cost that its picture shows is known.

    Raises:
        SpecError: no such axis.
    """
    if plot is not None and axis != REFILLED and axis not in rates.tables:
        raise SpecError(f"no cost {axis!r} to draw", advice=f"give {REFILLED}, or one of --prices")

"""`lab`: measurements, each a verb of its own, made from the arguments of the function that measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import SpecError
from kilburn.file import check_target, write_file
from kilburn.picture import check_picture
from kilburn.terminal import say, show
from kilburn.wire.recording import FORMS
from kilburn_lab.evals.cost import Rates
from kilburn_lab.evals.pareto import REFILLED
from kilburn_lab.evals.providers import PROVIDERS
from kilburn_lab.evals.report import EvalReport
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.saved import C, SavedCells

Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows of the table there, for programs.")]

lab = typer.Typer(help="Measure policies, memory and caches.", no_args_is_help=True, rich_markup_mode=None)


@lab.callback()
def group() -> None:
    """Measure policies, memory and caches."""


class Option(NamedTuple):
    """How an argument of a measure is given on the command line.

    Its name and its default are those of the argument. So is its type, but a sequence is an option that may be given again; if
    it is not given, the measure's default holds.

    Args:
        help: what `--help` says of it. metavar: what stands for its value there.
        name: another name. least: the smallest number.
        kind, default: of an option that is not an argument of the measure, or of one that `by` turns into the argument.
    """

    help: str
    metavar: str | None = None
    name: str = ""
    least: int | None = None
    kind: Any = None
    default: Any = None
    by: Callable[[Any], Any] | None = None

    def parameter(self, argument: str, known: Parameter | None) -> Parameter:
        """The parameter that typer reads."""
        kind, default = self.kind, self.default
        if kind is None and known is not None:
            kind, default = known.annotation, known.default
            if get_origin(kind) is Sequence:
                kind, default = list[get_args(kind)[0]] | None, None  # type: ignore[misc]
            elif Path in get_args(kind):
                kind = Path | None
        option = typer.Option(self.name or f"--{argument}", metavar=self.metavar, help=self.help, min=self.least)
        default = ... if default is Parameter.empty else default
        return Parameter(argument, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


DATA = Option(f"Recorded runs: {FORMS}; or a folder of them. Made-up ones where left out.", "FILE|DIR")
SOURCES = Option("Make them from the Python, Java, C, Go and JavaScript sources in this folder.", "DIR")
WINDOWS = Option("Tokens of four characters; may be given again. 1000, 2000 and 4000 by default.", name="--window")
HALF = Option("Only the runs of this half; all by default.", "|".join(HALVES))
TOLD = Option("Tell actions and outputs as tool calls and results, for policies that act on those.", name="--tools")
WRITER = Option(
    "A model that answers the policies' questions; each that can ask has a second row.", "SPEC", "--writer", kind=str, default=""
)
PRICES = Option(
    f"hosted, automatic, local, or the cache of {', '.join(PROVIDERS)}; may be given again. hosted and local by default.", "NAME"
)
PAUSE = Option("Between two prompts; longer than a cache lives, nothing is cached.", "SECONDS")
PLOT = Option("Draw worth against cost; .svg, .png or .pdf.", "FILE")
AXIS = Option("The cost that is drawn: refilled, or a price table.", "NAME")


def policies_of(those: Sequence[str]) -> Option:
    """The option for policies and baselines; `those` are measured by default."""
    return Option(f"A policy or a baseline; may be given again. {', '.join(those)} by default.", "SPEC", "--policy")


def verb(
    name: str,
    measure: Callable[..., EvalReport],
    doing: str,
    words: str | None,
    draw: Callable[..., None] | None = None,
    drawn: str = "",
    like: Callable[..., EvalReport] | None = None,
    among: typer.Typer = lab,
    **options: Option,
) -> None:
    """Make a verb that measures, prints the report, and writes its rows and draws it where that is wanted.

    Args:
        name: of the verb. measure: gets the options as arguments, `progress` if it is to be shown, and `force` if it writes.
        doing: what the progress is called; "" if the measure shows it itself.
        words: what `--help` says.
        like: what gets the options for which the measure has no argument of that name.
        draw: draws the report; it gets those options that it has arguments for. drawn: what, for `--help`; "" if `plot` is one
            of the options.
        options: by the measure's argument.
    """
    known = {**signature(like or measure, eval_str=True).parameters, **signature(measure, eval_str=True).parameters}
    parameters = [option.parameter(argument, known.get(argument)) for argument, option in options.items()]
    if drawn:
        parameters.append(Option(f"Draw {drawn}; .svg, .png or .pdf.", "FILE", kind=Path | None).parameter("plot", None))
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
            if option.by is not None:
                chosen[argument] = option.by(value)
            elif value or argument not in known or get_origin(known[argument].annotation) is not Sequence:
                chosen[argument] = value
        if doing:
            with progress(doing) as done:
                report = measure(**chosen, progress=done)
        else:
            report = measure(**chosen)
        if given.get("out") is not None:
            say(f"written: {given['out']}")
        show(report, given["json"])
        if csv is not None:
            with write_file(csv, force=force) as file:
                file.write(report.to_csv().encode("utf-8"))
            say(f"written: {csv}")
        if plot is not None and draw is not None:
            wanted = signature(draw).parameters.keys() & chosen.keys()
            draw(plot, report, **{"force": force} | {argument: chosen[argument] for argument in wanted})
            say(f"written: {plot}")
        _end_if_failed(report)

    run.__doc__ = words
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    among.command(name)(run)


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


def check_axis(plot: Path | None, axis: str, rates: Rates) -> None:
    """Check before a measurement that the cost that its picture shows is known.

    Raises:
        SpecError: no such axis.
    """
    if plot is not None and axis != REFILLED and axis not in rates.tables:
        raise SpecError(f"no cost {axis!r} to draw", advice=f"give {REFILLED}, or one of --prices")

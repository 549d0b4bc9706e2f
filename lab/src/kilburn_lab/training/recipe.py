"""The command line of a recipe: its seeds one after the other, its report, and the picture of its curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from kilburn.cli.shell import Json
from kilburn.errors import MissingExtra, SpecError
from kilburn.file import write_file
from kilburn.terminal import say, show
from kilburn_lab.picture import check_picture
from kilburn_lab.training.course import TrainingRun
from kilburn_lab.training.report import Figure, Trained, draw
from kilburn_lab.training.transformer import Transformer, TransformerShape
from kilburn_lab.training.words import WordTokenizer

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "train") from error

if TYPE_CHECKING:
    from kilburn_lab.training.tuning import Tuning

Figures = dict[tuple[str, str], float]
"""The value of each figure, by arm and name."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe.

    Args:
        doc: what it does, in a line; for `--help`.
        train: trains all arms of one seed and measures them.
        drawn: the figures of the ledgers that are drawn, each with the arms that have it.
        reply: tokens of a reply, at most. note: for the report.
        tune: trains a small language model in the place of the toy, and measures it; None where there is no such training.
        spoken: tokens of a reply of that model, at most.
    """

    name: str
    doc: str
    words: WordTokenizer
    shape: TransformerShape
    reply: int
    train: Callable[[TrainingRun], Figures]
    drawn: Mapping[str, tuple[str, ...]]
    note: str = ""
    tune: Callable[[Tuning], Figures] | None = None
    spoken: int = 0

    def run(
        self, folder: Path, *, seeds: int = 3, smoke: bool = False, heard: Callable[[str], None] = lambda line: None
    ) -> Trained:
        """Train all seeds, measure them, and write report and curves into the folder."""
        if seeds < 1:
            raise SpecError(f"{seeds} seeds", advice="give 1 or more")
        torch.set_num_threads(1)
        found: list[Figures] = []
        courses = []
        began, trained = time.process_time(), 0.0
        for seed in range(seeds):
            course = TrainingRun(self.name, folder, self.words, self.shape, reply=self.reply, seed=seed, smoke=smoke, heard=heard)
            courses.append(course)
            found.append(self.train(course))
            trained += course.seconds()
            for (arm, figure), value in found[-1].items():
                heard(f"{self.name} seed {seed}: {arm}, {figure} {value:.3f}")
        size, seconds = Transformer(len(self.words), self.shape).size, max(time.process_time() - began, trained)
        report = self._report(folder, found, size, seconds, self.note)
        for figure, arms in self.drawn.items():
            curves = {arm: [[(line["step"], line[figure]) for line in course.lines(arm)] for course in courses] for arm in arms}
            draw(folder / f"{figure}.svg", f"{self.name}: {figure}", curves, figure)
        return report

    def run_tuning(
        self,
        folder: Path,
        base: str,
        *,
        seeds: int = 1,
        steps: int = 200,
        smoke: bool = False,
        heard: Callable[[str], None] = lambda line: None,
    ) -> Trained:
        """The same with a small language model: tune it with each seed, measure it, and write the report into the folder.

        Raises:
            SpecError: this recipe tunes no model; no such model. MissingExtra.
        """
        if self.tune is None:
            raise SpecError(f"{self.name} trains its toy alone", advice="run it without --model; mem1 takes one")
        if seeds < 1 or steps < 1:
            raise SpecError(f"{seeds} seeds of {steps} steps", advice="give 1 or more of each")
        from kilburn_lab.training.tuning import Tuning

        found: list[Figures] = []
        size, began, trained = 0, time.process_time(), 0.0
        for seed in range(seeds):
            tuning = Tuning(
                self.name,
                folder,
                base,
                tools=self.words.tools,
                reply=self.spoken,
                steps=2 if smoke else steps,
                seed=seed,
                smoke=smoke,
                heard=heard,
            )
            found.append(self.tune(tuning))
            for (arm, figure), value in found[-1].items():
                heard(f"{self.name} seed {seed}: {arm}, {figure} {value:.3f}")
            size, trained = max(size, tuning.parameters), trained + tuning.seconds()
        seconds = max(time.process_time() - began, trained)
        return self._report(folder, found, size, seconds, f"{self.note} The model is {base}.")

    def _report(self, folder: Path, found: Sequence[Figures], size: int, seconds: float, note: str) -> Trained:
        report = Trained(
            recipe=self.name,
            seeds=len(found),
            parameters=size,
            seconds=seconds,
            rows=tuple(Figure.of(*key, [figures[key] for figures in found]) for key in found[0]),
            note=note,
        )
        with write_file(folder / "report.json", force=True) as file:
            file.write(msgspec.json.format(report.to_json().encode(), indent=1))
        return report


def command(recipe: Recipe) -> typer.Typer:
    """The recipe as a program."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})

    def run(
        seeds: Annotated[
            int | None,
            typer.Option(min=1, show_default=False, help="How many, from 0 on; 3 by default, 1 with --smoke or --model."),
        ] = None,
        smoke: Annotated[
            bool, typer.Option("--smoke", help="A version of half a minute, which shows that it works and no more.")
        ] = False,
        out: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="For all that comes of it; a run there goes on. trained/NAME by default."),
        ] = None,
        model: Annotated[
            str,
            typer.Option(metavar="NAME", help="Tune this in place of the toy: smollm2, a GGUF file or a folder of transformers."),
        ] = "",
        steps: Annotated[int, typer.Option(min=1, help="With --model: of each stage.")] = 200,
        json: Json = False,
    ) -> None:
        folder = out or Path("trained") / (recipe.name + "-model" * bool(model) + "-smoke" * smoke)
        folder.mkdir(parents=True, exist_ok=True)
        seeds = seeds or (1 if smoke or model else 3)
        if model:
            report = recipe.run_tuning(folder, model, seeds=seeds, steps=steps, smoke=smoke, heard=say)
        else:
            check_picture(folder / "curves.svg", force=True)
            report = recipe.run(folder, seeds=seeds, smoke=smoke, heard=say)
        show(report, json)
        say(f"written: {folder}")

    run.__doc__ = recipe.doc
    app.command()(run)
    return app

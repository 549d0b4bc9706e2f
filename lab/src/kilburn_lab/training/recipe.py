"""The command line of a recipe: its seeds one after the other, its report, and the picture of its curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kilburn.cli.shell import Json
from kilburn.errors import MissingExtra, SpecError
from kilburn.file import write_file
from kilburn.picture import check_picture
from kilburn.terminal import say, show
from kilburn_lab.training.course import TrainingRun
from kilburn_lab.training.report import Figure, Trained, draw
from kilburn_lab.training.transformer import Transformer, TransformerShape
from kilburn_lab.training.words import WordTokenizer

try:
    import torch
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "train") from error

Figures = dict[tuple[str, str], float]
"""The value of each figure, by arm and name."""


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """A recipe.

    Args:
        doc: what it does, in a line; for `--help`.
        train: trains all arms of one seed and measures them.
        drawn: the figures of the ledgers that are drawn, each with the arms that have it.
        reply: tokens of a reply, at most. note: for the report.
    """

    name: str
    doc: str
    words: WordTokenizer
    shape: TransformerShape
    reply: int
    train: Callable[[TrainingRun], Figures]
    drawn: Mapping[str, tuple[str, ...]]
    note: str = ""

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
        report = Trained(
            recipe=self.name,
            seeds=seeds,
            parameters=Transformer(len(self.words), self.shape).size,
            seconds=max(time.process_time() - began, trained),
            rows=tuple(Figure.of(*key, [figures[key] for figures in found]) for key in found[0]),
            note=self.note,
        )
        with write_file(folder / "report.json", force=True) as file:
            file.write(msgspec.json.format(report.to_json().encode(), indent=1))
        for figure, arms in self.drawn.items():
            curves = {arm: [[(line["step"], line[figure]) for line in course.lines(arm)] for course in courses] for arm in arms}
            draw(folder / f"{figure}.svg", f"{self.name}: {figure}", curves, figure)
        return report


def command(recipe: Recipe) -> typer.Typer:
    """The recipe as a program."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})

    def run(
        seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 on; each is a whole training.")] = 3,
        smoke: Annotated[bool, typer.Option("--smoke", help="A short version, which shows that it works and no more.")] = False,
        out: Annotated[
            Path | None,
            typer.Option(metavar="DIR", help="For all that comes of it; a run there goes on. trained/NAME by default."),
        ] = None,
        json: Json = False,
    ) -> None:
        folder = out or Path("trained") / (recipe.name + "-smoke" * smoke)
        folder.mkdir(parents=True, exist_ok=True)
        check_picture(folder / "curves.svg", force=True)
        report = recipe.run(folder, seeds=seeds, smoke=smoke, heard=say)
        show(report, json)
        say(f"written: {folder}")

    run.__doc__ = recipe.doc
    app.command()(run)
    return app

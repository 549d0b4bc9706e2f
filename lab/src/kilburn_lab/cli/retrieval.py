"""`lab recall`: what a search over old conversations finds, at a budget of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import KilburnError, Unavailable
from kilburn.kernel.resolve import resolve
from kilburn.models.weights import pull
from kilburn.terminal import line, say
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown
from kilburn_lab.evals.corpora import answers_of, corpora, renamed, synthetic
from kilburn_lab.evals.recall import FLOOR, rank, written
from kilburn_lab.evals.recall_report import read_rows, report

__all__ = ["recall_eval"]


@lab.command("recall")
def recall_eval(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the rankings go, JSON lines, one a question.")],
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Conversations, one a line, .gz too; made-up ones where left out.")
    ] = None,
    budget: Annotated[int, typer.Option(min=100, help="Tokens of four characters that the hits may take.")] = 4000,
    ranking: Annotated[str, typer.Option(metavar="SPEC", help="blend, words, meaning, rrf, blend(near=0), ...")] = "blend",
    embedder: Annotated[
        str, typer.Option(metavar="SPEC", help="minilm, which is fetched if need be, hashing, ...; none for words alone.")
    ] = "auto",
    rename: Annotated[
        int | None, typer.Option(metavar="SEED", help="Give all people and places other names; the scores should stay.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the made-up conversations and of the intervals.")] = 0,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Search old conversations for the messages that answer questions about them.

    A line of the file is `{"name", "docs": [{"id", "text", "speaker", "session", "time"}], "queries": [{"id", "text",
    "gold", "category"}]}`. The rankings are written before any answer is read. Beside the ranking stand `words` and
    `floor` (SQLite's FTS5, and NumPy where there is an embedder), in files of their own beside FILE. Without the extra
    `embed` it is searched by words alone, and said so.

    Examples:

        kilburn lab recall --out rankings.jsonl

        kilburn lab recall --data locomo.jsonl.gz --out rankings.jsonl
    """
    check_outputs(csv, force=force)
    made = _embedder(embedder)
    known = list(corpora(data)) if data is not None else synthetic(seed)[0]
    asked = known if rename is None else [renamed(corpus, rename) for corpus in known]
    paths = {name: out if name == ranking else out.with_name(f"{out.name}.{name}") for name in (ranking, "words", FLOOR)}
    for name, path in paths.items():
        with progress(name, total=len(asked)) as done:
            written(rank(asked, ranking=name, embedder=made, budget=budget, progress=done), path)
    answers = answers_of(data) if data is not None else synthetic(seed)[1]
    shown(report({name: read_rows(path) for name, path in paths.items()}, answers, seed), json, csv, force=force)


def _embedder(spec: str) -> Any:
    """The embedder of a spec; of "auto" `minilm`, or None where this machine cannot have it."""
    if spec != "auto":
        return None if spec == "none" else resolve("memory.embedders", spec)
    try:
        try:
            return resolve("memory.embedders", "minilm")
        except Unavailable:
            with progress("minilm", unit="bytes") as done:
                pull("minilm", progress=lambda _, have, total: done(have, total or None))
            return resolve("memory.embedders", "minilm")
    except KilburnError as error:
        say(line(f"searched by words alone: {error}"))
        return None

"""Reasoning traces as training data with blocks and mementos.

    python lab/recipes/mementos.py trace.txt --out blocks.jsonl

What a trace proves is not judged. docs/mechanisms/memento.md says how blocks are cut and mementos graded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kilburn.answering import answerer
from kilburn.cli.model_loading import open_model
from kilburn.cli.screen import count, many, progress, sink
from kilburn.cli.shell import Force, main
from kilburn.errors import SpecError, WireError
from kilburn.file import check_target
from kilburn.kernel.drive import run
from kilburn.terminal import say
from kilburn.tokens.choice import counter_for
from kilburn.wire.recording import read_lines
from traces.annotation import Annotated as Trace
from traces.annotation import annotate

TRACES = ("trace", "reasoning", "reasoning_content", "thinking", "completion", "text")
PROBLEMS = ("problem", "question", "prompt")
LINES = (".jsonl", ".jsonl.gz", ".ndjson")


app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def mementos(
    source: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="One trace as plain text, or JSONL with a trace in each line.", show_default=False),
    ],
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE", help="Where to write; else standard output.")] = None,
    force: Force = False,
    key: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"The field that holds the trace; else the first of {', '.join(TRACES)}.")
    ] = None,
    least: Annotated[int, typer.Option(min=1, help="Tokens of a block, at least.")] = 200,
    share: Annotated[float, typer.Option(min=0.01, max=1.0, help="Of a block's tokens that its memento may have.")] = 0.2,
    model: Annotated[
        str, typer.Option(metavar="SPEC", help='Who scores borders and writes mementos; "none": signs, and extracted lines.')
    ] = "none",
    judged: Annotated[bool, typer.Option("--judged", help="Let the model grade the mementos too.")] = False,
    tokenizer: Annotated[str, typer.Option(metavar="NAME", help='Who counts: "auto", a model\'s name, or "chars/4".')] = "auto",
) -> None:
    """Turn reasoning traces into training data: blocks, a memento behind each, as JSONL.

    Nothing of a trace is changed: its blocks, joined, are the trace. Without a model the mementos are
    sentences of the blocks.

    Example:

        python lab/recipes/mementos.py trace.txt --out blocks.jsonl
    """
    if out is not None:
        check_target(out, force=force)
    speaker = open_model(model)
    counter = counter_for(speaker.tokenizer if speaker is not None and tokenizer == "auto" else tokenizer)
    answer = answerer(speaker)
    records: list[bytes] = []
    made: list[Trace] = []
    traces = list(_traces(source, key))
    if not traces:
        raise WireError(f"{source} holds no trace", advice="give a text, or JSONL with a trace in each line")
    with progress("annotating", len(traces)) as done:
        for number, (where, trace, kept) in enumerate(traces, 1):
            try:
                one = run(annotate(trace, counter.count, least=least, share=share, judged=judged), answer)
            except ValueError as error:
                raise WireError(f"{where}: {error}", advice="leave this trace out") from None
            made.append(one)
            records.append(msgspec.json.encode({"source": where, **kept, **msgspec.to_builtins(one)}) + b"\n")
            done(number)
    with sink(out, force) as file:
        file.write(b"".join(records))
    _report(made)


def _traces(source: Path, key: str | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Where it stands, the trace, and the fields that are kept."""
    if not source.name.endswith(LINES):
        text = _text(source)
        if text.strip():
            yield source.name, text, {}
        return
    for where, record in read_lines(source):
        found = next((name for name in ((key,) if key else TRACES) if isinstance(record.get(name), str)), None)
        if found is None:
            raise SpecError(f"{where} has no field {key or ' or '.join(TRACES)} with a text", advice="name it with --key")
        kept = {name: record[name] for name in ("id", *PROBLEMS) if name in record and name != found}
        if record[found].strip():
            yield where, record[found], kept


def _text(source: Path) -> str:
    try:
        return source.read_bytes().decode("utf-8")  # with its line ends as they are
    except OSError as error:
        raise WireError(f"cannot read {source}: {error.strerror}", advice="give the path of a text, or of JSONL") from error
    except UnicodeDecodeError as error:
        raise WireError(f"cannot read {source}: it is no text in UTF-8", advice="convert it first") from error


def _report(made: list[Trace]) -> None:
    blocks = [block for trace in made for block in trace.blocks]
    outcomes = {block.outcome: 0 for block in blocks}
    for block in blocks:
        outcomes[block.outcome] += 1
    told = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    tokens, left = sum(trace.tokens for trace in made), sum(trace.memento_tokens for trace in made)
    mean = sum(block.score for block in blocks) / max(1, len(blocks))
    say(
        f"{many(len(made), 'trace')}, {many(len(blocks), 'block')} ({told}), {count(tokens)} tokens in blocks, "
        f"{count(left)} in mementos, {mean:.1f} of 10 in the mean"
    )


if __name__ == "__main__":
    sys.exit(main(commands=app, name="mementos.py"))

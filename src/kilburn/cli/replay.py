"""`replay`: stream recorded runs through a window, and report what it cost and whether anything went wrong."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import kilburn
from kilburn.budget import Budget
from kilburn.cli.access import WIDE, closing_model, model_of
from kilburn.cli.measurement import Measured, Total, lost_bytes, stream, total_of
from kilburn.cli.screen import count, progress, table
from kilburn.cli.shell import Json, Tenant, app
from kilburn.errors import KilburnError, SpecError, WireError
from kilburn.kernel.store import Store
from kilburn.terminal import emit, line, say, tell
from kilburn.wire.recording import FORMS, RecordedRun, read_runs

SHOWN = 20
"""Runs that are listed one by one for people."""

COLUMNS = {
    "messages": "messages",
    "tokens": "tokens_seen",
    "shipped": "tokens_shipped",
    "re-prefilled": "tokens_reprefilled",
    "evictions": "evictions",
    "folds": "folds",
    "faults": "faults",
    "peak": "peak",
    "overflow": "overflow",
    "lost": "lost",
}
"""Heads of the table, and the figures of a run under them."""


@app.command()
def replay(
    source: Annotated[
        Path,
        Argument(metavar="FILE|DIR", help=FORMS.capitalize() + "; or a folder of them.", show_default=False),
    ],
    window: Annotated[int, Option(help="Tokens of the window.")] = 4000,
    policy: Annotated[str, Option(metavar="SPEC", help='What decides, such as "lru" or "chain(mask(keep=3), fifo)".')] = "hybrid",
    model: Annotated[str | None, Option(metavar="SPEC", help="Who answers when the policy asks; nobody by default.")] = None,
    tokenizer: Annotated[str, Option(metavar="NAME", help='"auto", a model\'s name, or "chars/4".')] = "auto",
    reserve: Annotated[int, Option(help="Tokens kept free for the reply.")] = 0,
    db: Annotated[str | None, Option(metavar="FILE", help="Keep the sessions in this store; in memory by default.")] = None,
    tenant: Tenant = None,
    limit: Annotated[int | None, Option(min=1, help="Runs at most.")] = None,
    form: Annotated[str, Option("--format", help='The provider\'s form, "chat" or "messages".')] = "chat",
    json: Json = False,
) -> None:
    """Stream recorded runs through a window: overflow and bytes lost (both must be 0), tokens shipped, evictions, folds, time.

    Exit status 1 if a prompt overflowed or a byte was lost.

    Example:

        kilburn replay run.jsonl --window 4000 --policy lru
    """
    runs = _runs(source, limit, form)
    with (
        closing_model(model_of(model)) as speaker,
        kilburn.open(
            db or ":memory:",
            window=window,
            policy=policy,
            tenant=tenant or "default",
            tokenizer=tokenizer,
            reserve=reserve,
            model=speaker,
            embedder=None,
        ) as store,
    ):
        measured = _measure(store, runs, form)
        counter = store.counter.name
    total = total_of(measured)
    if json:
        setting: dict[str, Any] = {"source": str(source), "window": window, "reserve": reserve, "policy": policy}
        emit(
            {
                **setting,
                "tokenizer": counter,
                "model": model,
                "total": total.figures(),
                "runs": [run.figures() for run in measured],
            }
        )
    else:
        _report(measured, total, f"{source.name} through a window of {window:,} tokens, policy {policy}, counted by {counter}")
    if total.policy_failures:
        say(f"policy {policy} failed {total.policy_failures} times: these figures are not its own")
    if total.overflow or total.lost or total.policy_failures:
        raise typer.Exit(1)


def _runs(source: Path, limit: int | None, form: str) -> list[RecordedRun]:
    """The runs to stream, all read before the first one starts."""
    if form not in ("chat", "messages"):
        raise SpecError(f"no format {form!r}", advice='use "chat" (OpenAI) or "messages" (Anthropic)')
    runs = list(islice(read_runs(source), limit))
    if not runs:
        raise WireError(f"{source} holds no run", advice=f"give {FORMS}")
    return runs


def _measure(store: Store, runs: list[RecordedRun], form: str) -> list[Measured]:
    existing = {info.name for info in store.sessions()} & {run.name for run in runs}
    if existing:
        raise SpecError(f"session {min(existing)!r} is in this store already", advice="give another --db, or none")
    measured = []
    with progress("replaying", sum(len(run.messages) for run in runs), unit="messages") as report:
        offset = 0
        for run in runs:
            session = store.session(run.name)
            try:
                measured_run = stream(session, run, form, lambda completed, offset=offset: report(offset + completed))  # type: ignore[misc]
            except KilburnError as error:
                error.add_note(f"in message {session.window.turn + 1} of run {run.name!r}")
                raise
            # Opened again, so that texts come from the store and places from the ledger.
            reader = Store(store.backend, Budget(WIDE), "fifo", tokenizer=store.counter)
            measured_run.lost = lost_bytes(reader.session(run.name), run)
            measured.append(measured_run)
            offset += measured_run.messages
    return measured


def _report(measured: list[Measured], total: Total, title: str) -> None:
    heads = ("run", *COLUMNS, "seconds")
    rows = [_row(run) for run in measured[:SHOWN]]
    if len(measured) > 1:
        rows.append(_row(total))
    tell(line(title))
    table(heads, rows, less=("re-prefilled", "shipped", "faults", "folds", "evictions", "messages", "seconds"))
    if len(measured) > SHOWN:
        tell(f"{len(measured) - SHOWN} more runs are in the total; --json lists all")
    verdict = "no overflow, nothing lost" if not total.overflow and not total.lost else "FAILED"
    tell(f"{verdict}: {total.overflow} of {count(total.prompts)} prompts over the window, {total.lost} bytes lost")


def _row(run: Measured) -> tuple[Any, ...]:
    return (run.name, *(getattr(run, name) for name in COLUMNS.values()), f"{run.seconds:.2f}")

"""`replay`: streams recorded runs through a window, and reports costs and errors."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

import kilburn
from kilburn.budget import Budget
from kilburn.cli.access import WIDE
from kilburn.cli.measurement import Measured, Total, add_up, lost_bytes, stream
from kilburn.cli.model_loading import closing_model, open_model
from kilburn.cli.screen import count, progress, table
from kilburn.cli.shell import Json, Tenant, app
from kilburn.errors import KilburnError, SpecError, WireError
from kilburn.opening import Store
from kilburn.terminal import emit, line, say, tell
from kilburn.wire.recording import FORMS, RecordedRun, read_runs

MAX_ROWS = 20
"""Runs in the table."""

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
"""Heads of the table, and the figures of a run in each column."""


@app.command()
def replay(
    source: Annotated[
        Path, Argument(metavar="FILE|DIR", help=FORMS[0].upper() + FORMS[1:] + "; or a folder of them.", show_default=False)
    ],
    window: int = 4000,
    policy: str = "hybrid",
    model: str | None = None,
    tokenizer: str = "auto",
    reserve: int = 0,
    db: str | None = None,
    tenant: Tenant = None,
    limit: Annotated[int | None, Option(min=1)] = None,
    form: str = "chat",
    json: Json = False,
) -> None:
    """Replay recorded runs through a window, and report overflow and lost bytes (both must be 0), tokens, evictions, folds and
    time.

    The exit status is 1 if a prompt overflowed or a byte was lost.

    Example:

        kilburn replay run.jsonl --window 4000 --policy lru

    Args:
        window: Replay in a window of this many tokens.
        policy SPEC: Let this policy manage the window, such as "lru" or "chain(mask(keep=3), fifo)".
        model SPEC: Let this model answer the policy's questions; by default they stay unanswered.
        tokenizer NAME: Count tokens by "auto", a model's name, or "chars/4".
        reserve: Reserve this many tokens for the reply.
        db FILE: Store the sessions in this file; by default in memory.
        limit: Replay at most this many runs.
        form --format: Render prompts in this form: "chat" or "messages".
    """
    runs = _runs(source, limit, form)
    with (
        closing_model(open_model(model)) as speaker,
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
    total = add_up(measured)
    if json:
        figures: dict[str, Any] = {"source": str(source), "window": window, "reserve": reserve, "policy": policy}
        figures |= {"tokenizer": counter, "model": model, "total": total.figures(), "runs": [run.figures() for run in measured]}
        emit(figures)
    else:
        _report(measured, total, f"{source.name} through a window of {window:,} tokens, policy {policy}, counted by {counter}")
    if total.policy_failures:
        say(f"policy {policy} failed {total.policy_failures} times, so these figures are not those of the policy")
    if total.overflow or total.lost or total.policy_failures:
        raise typer.Exit(1)


def _runs(source: Path, limit: int | None, form: str) -> list[RecordedRun]:
    """Read all runs before the first one is replayed."""
    if form not in ("chat", "messages"):
        raise SpecError(f"no format {form!r}", advice='use "chat" (OpenAI) or "messages" (Anthropic)')
    runs = list(islice(read_runs(source), limit))
    if not runs:
        raise WireError(f"{source} holds no run", advice=f"give {FORMS}")
    return runs


def _measure(store: Store, runs: list[RecordedRun], form: str) -> list[Measured]:
    existing = {info.name for info in store.sessions()} & {run.name for run in runs}
    if existing:
        raise SpecError(f"the store already has a session {min(existing)!r}", advice="give another --db, or none")
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
            # A second store reads the texts from the file and the places from the ledger.
            reader = Store(store.backend, Budget(WIDE), "fifo", tokenizer=store.counter)
            measured_run.lost = lost_bytes(reader.session(run.name), run)
            measured.append(measured_run)
            offset += measured_run.messages
    return measured


def _report(measured: list[Measured], total: Total, title: str) -> None:
    heads = ("run", *COLUMNS, "seconds")
    rows = [_row(run) for run in measured[:MAX_ROWS]]
    if len(measured) > 1:
        rows.append(_row(total))
    tell(line(title))
    table(heads, rows, less=("re-prefilled", "shipped", "faults", "folds", "evictions", "messages", "seconds"))
    if len(measured) > MAX_ROWS:
        tell(f"{len(measured) - MAX_ROWS} more runs are in the total; --json lists all")
    if total.fallbacks:
        tell(f"{count(total.fallbacks)} of these evictions were the kernel's, because the policy freed too little")
    verdict = "no overflow, nothing lost" if not total.overflow and not total.lost else "FAILED"
    tell(f"{verdict}: {total.overflow} of {count(total.prompts)} prompts over the window, {total.lost} bytes lost")


def _row(run: Measured) -> tuple[Any, ...]:
    return (run.name, *(getattr(run, name) for name in COLUMNS.values()), f"{run.seconds:.2f}")

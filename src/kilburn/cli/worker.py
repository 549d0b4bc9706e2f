"""`worker`: does what is to be done in the background, beside other workers."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from kilburn.cli.access import closing_model, existing, model_of, reading, writing
from kilburn.cli.memories import secrets_of
from kilburn.cli.moments import seconds
from kilburn.cli.screen import many, table
from kilburn.cli.shell import Json, app
from kilburn.errors import SpecError
from kilburn.jobs.worker import Did, JobKind, Ways, Worker, standing
from kilburn.kernel.claims import FAILED, try_again
from kilburn.terminal import emit, line, say, spelled, tell

SOON = 0.5
"""Seconds until what is to be done is looked for again at first; twice as long each time that nothing was."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)

WHAT = {
    JobKind.EXPIRE: ("session", "forgotten"),
    JobKind.LEARN: ("fact", "learned"),
    JobKind.EMBED: ("passage", "embedded"),
    JobKind.COOL: ("text", "moved to the cold place"),
}


@app.command()
def worker(
    ctx: typer.Context,
    place: Annotated[
        str | None, Argument(metavar="STORE", help="A file, or the URL of a database; else --db.", show_default=False)
    ] = None,
    single: Annotated[bool, Option("--once", help="Do what waits now, and end.")] = False,
    kinds: Annotated[
        str | None, Option("--kinds", metavar="KIND,...", help="Only these: erase, expire, learn, embed, cool.")
    ] = None,
    learn: Annotated[
        list[str] | None,
        Option(
            "--learn",
            metavar="SPEC",
            help="A memory policy that learns from every session, also `consolidate`; may be repeated. Without it, plain learns "
            "from the sessions whose gateway or key wants it.",
        ),
    ] = None,
    model: Annotated[str | None, Option("--model", metavar="SPEC", help="What answers the policies.")] = None,
    turns: Annotated[int, Option("--turns", min=1, help="Learn after so many messages of the user.")] = 1,
    idle: Annotated[str, Option("--idle", metavar="TIME", help="Or when nobody has spoken for so long: 60s, 5min.")] = "60s",
    embedder: Annotated[str, Option("--embedder", metavar="SPEC", help="Makes vectors; auto: the store's own.")] = "auto",
    cold: Annotated[
        str | None, Option("--cold-after", metavar="TIME", help="Move texts to the cold place that nobody read for so long: 30d.")
    ] = None,
    poll: Annotated[float, Option("--poll", min=0.01, metavar="SECONDS", help="The longest pause between two looks.")] = 10.0,
    status: Annotated[bool, Option("--status", help="Show what is being done and what failed, and end.")] = False,
    retry: Annotated[bool, Option("--retry", help="Let what failed be tried again, and end; with --once, do it.")] = False,
    tenants: Annotated[
        list[str] | None,
        Option("--tenant", metavar="NAME", help="Whose work; may be repeated. Else $KILBURN_TENANT, else default."),
    ] = None,
    db: Annotated[str | None, Option("--db", metavar="FILE", help="The store; else $KILBURN_DB, else agent.db.")] = None,
    json: Json = False,
) -> None:
    """Run background work: finish erasing, expire sessions by their rule, learn, embed. Any number of workers may run.

    What is to be done is read from the store, so a worker that is killed loses nothing, and the next one goes on. What fails is
    tried again with growing pauses; see --status, whose exit status is 1 if something has failed six times. SIGTERM ends it after
    the step in hand.

    Examples:

        kilburn worker agent.db --once

        kilburn worker agent.db --once --learn plain --kinds learn,embed

        kilburn worker agent.db --status
    """
    if status and (retry or single):
        raise SpecError("--status only shows", advice="give it alone; before it, --retry, and then --once")
    root_params = ctx.find_root().params
    where = existing(
        place or db or root_params.get("db"), advice="give its file or URL; `kilburn chat` and `kilburn serve` make one"
    )
    whose = list(dict.fromkeys(tenants or [root_params.get("tenant") or "default"]))
    if status:
        _show(where, whose, json=json)
        return
    if retry:
        _retry(where, whose, json=json)
        if not single:
            return
    with closing_model(model_of(model)) as speaker:
        ways = Ways(
            kinds=_kinds(kinds),
            learn=tuple(learn or ()),
            model=speaker,
            secrets=secrets_of(None, "redact"),
            turns=turns,
            idle=seconds(idle, "--idle"),
            embedder=None if embedder == "none" else embedder,
            cold_after=None if cold is None else seconds(cold, "--cold-after"),
        )
        failed = _work(where, whose, ways, single=single, poll=poll, json=json)
    if failed:
        raise typer.Exit(1)


def _kinds(text: str | None) -> tuple[JobKind, ...]:
    if text is None:
        return tuple(JobKind)
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in [*JobKind]]:
        raise SpecError(f"no kind of work {unknown[0][:40]!r}", advice=f"there are {', '.join(JobKind)}")
    return tuple(JobKind(word) for word in words)


def _work(where: str, whose: Sequence[str], ways: Ways, *, single: bool, poll: float, json: bool) -> int:
    """Work until a signal comes, or once; returns how much failed where it works once."""
    over, reporter = threading.Event(), _Told(json=json)
    handlers = {number: signal.signal(number, lambda *_: over.set()) for number in SIGNALS}
    try:
        with Worker(where, whose, ways, told=reporter, stopped=over.is_set) as works:
            if not single and not json:
                say(line(f"working for {', '.join(whose)}: {', '.join(ways.kinds)}; SIGTERM ends it after the step in hand"))
            pause, count = SOON, 0
            while not over.is_set():
                changed = single or bool(count) or works.has_changed()
                count = works.once() if changed else 0
                if single and not count:
                    break
                pause = min(SOON, poll) if count else min(2 * pause, poll)
                if not count:
                    over.wait(pause)
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):
                signal.signal(number, handler)
    return reporter.failed if single else 0


class _Told:
    """Says what was done, a line each."""

    def __init__(self, *, json: bool) -> None:
        self._json, self.failed = json, 0
        self._last: dict[tuple[str, str, int], str] = {}

    def __call__(self, did: Did) -> None:
        key = did.tenant, did.kind, did.segment
        repeated = did.error and not did.tries and self._last.get(key) == did.error
        self._last[key] = did.error
        self.failed += bool(did.error)
        if repeated:
            return  # the store is still out of reach
        self._say(did)
        sys.stdout.flush()  # who reads a pipe sees each at once

    def _say(self, did: Did) -> None:
        if self._json:
            tell(spelled(msgspec.json.encode(did).decode()))
            return
        about = f"session {did.session}: " if did.session else f"segment {did.segment}: " if did.segment else ""
        whose = f"{did.tenant}: {about}"
        if did.receipt is not None:
            places = ", ".join(f"{number} {place}" for place, number in did.receipt.places.items())
            tell(line(f"{whose}forgotten: {' '.join(did.receipt.whole)}{f': {places}' if places else ''}"))
        elif did.error:
            tries = f", {many(did.tries, 'time')} by now" if did.tries else ""
            say(line(f"{whose}{did.kind} failed{tries}: {did.error}"))
        else:
            noun, verb = WHAT[JobKind(did.kind)]
            tell(line(f"{whose}{many(did.count, noun)} {verb} in {did.seconds:.1f} s"))


def _show(where: str, whose: Sequence[str], *, json: bool) -> None:
    rows = []
    for tenant in whose:
        with reading(where, tenant) as store:
            rows += [msgspec.to_builtins(job) | {"tenant": tenant} for job in standing(store)]
    failed = sum(row["state"] == "failed" for row in rows)
    if json:
        emit(rows)
    else:
        heads = ("tenant", "kind", "session", "state", "tries", "for", "error")
        if rows:
            cells = ("tenant", "kind", "session", "state", "tries")
            table(heads, ((*(row[key] for key in cells), f"{row['seconds']:.0f} s", row["error"]) for row in rows))
        tell(f"{many(len(rows), 'job')} in hand or pausing, {failed} failed {FAILED} times or more")
    if failed:
        raise typer.Exit(1)


def _retry(where: str, whose: Sequence[str], *, json: bool) -> None:
    count = 0
    for tenant in whose:
        with writing(where, tenant) as store:
            count += try_again(store.backend)
    if json:
        emit({"retried": count})
    else:
        tell(f"{many(count, 'job')} to be tried again")

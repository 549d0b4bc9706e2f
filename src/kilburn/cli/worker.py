"""`worker`: runs background jobs. Any number of workers may run."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import msgspec
import typer
from typer import Option

from kilburn.cli.access import Options, existing, reading, writing
from kilburn.cli.memories import secrets_mode
from kilburn.cli.model_loading import closing_model, open_model
from kilburn.cli.moments import seconds
from kilburn.cli.screen import Columns, many, show, show_records
from kilburn.cli.shell import Json, app
from kilburn.errors import SpecError
from kilburn.jobs.claims import FAILED, try_again
from kilburn.jobs.worker import Did, JobKind, Ways, Worker, standing
from kilburn.terminal import line, say, spelled, tell

MIN_PAUSE = 0.5
"""Seconds before the next search for jobs; the pause doubles each time that there are none."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)

RESULTS = {
    JobKind.EXPIRE: ("session", "forgotten"),
    JobKind.LEARN: ("fact", "learned"),
    JobKind.EMBED: ("passage", "embedded"),
    JobKind.COOL: ("text", "moved to the cold place"),
}


class WorkerOptions(Options, frozen=True, kw_only=True):
    """The arguments and options of `worker`.

    Args:
        place [STORE]: The file or URL of the store; by default that of --db.
        single --once: Run the jobs that are due now, and exit.
        kinds KIND,...: Run only these jobs: erase, expire, learn, embed, cool.
        learn SPEC: Learn from every session with this memory policy; may be repeated. By default, plain learns from the sessions
            whose gateway or key has learning enabled.
        model SPEC: Let this model answer the policies.
        turns: Learn after this many messages of the user.
        idle TIME: Learn after this long without a message, too: 60s, 5min.
        embedder SPEC: Embed with this embedder; auto: that of the store.
        cold --cold-after TIME: Move texts to the cold place that nobody has read for this long: 30d.
        poll SECONDS: Search for jobs at least once in this time.
        status: Show running and failed jobs, and exit.
        retry: Release failed jobs for another attempt, and exit; with --once, run them first.
        tenants --tenant NAME: Work for this tenant; may be repeated. By default $KILBURN_TENANT, then default.
        db FILE: The store; by default $KILBURN_DB, then agent.db.
    """

    place: str | None = None
    single: bool = False
    kinds: str | None = None
    learn: list[str] | None = None
    model: str | None = None
    turns: Annotated[int, Option(min=1)] = 1
    idle: str = "60s"
    embedder: str = "auto"
    cold: str | None = None
    poll: Annotated[float, Option(min=0.01)] = 10.0
    status: bool = False
    retry: bool = False
    tenants: list[str] | None = None
    db: str | None = None
    json: Json = False


@app.command()
def worker(ctx: typer.Context, options: WorkerOptions) -> None:
    """Run background jobs: finish erasing, expire sessions by their rule, learn, embed. Any number of workers may run.

    The jobs are read from the store, so a killed worker loses nothing, and the next one continues. A failed job is repeated after
    growing pauses; --status lists them, and exits with status 1 if a job has failed six times. SIGTERM stops the worker after the
    current step.

    Examples:

        kilburn worker agent.db --once

        kilburn worker agent.db --once --learn plain --kinds learn,embed

        kilburn worker agent.db --status
    """
    if options.status and (options.retry or options.single):
        raise SpecError("--status only shows", advice="give it alone; before it, --retry, and then --once")
    program = ctx.find_root().params
    advice = "give its file or URL; `kilburn chat` and `kilburn serve` make one"
    where = existing(options.place or options.db or program.get("db"), advice=advice)
    tenants = list(dict.fromkeys(options.tenants or [program.get("tenant") or "default"]))
    if options.status:
        _show(where, tenants, json=options.json)
        return
    if options.retry:
        _retry(where, tenants, json=options.json)
        if not options.single:
            return
    with closing_model(open_model(options.model)) as model:
        ways = Ways(
            kinds=_kinds(options.kinds),
            learn=tuple(options.learn or ()),
            model=model,
            secrets=secrets_mode(None, "redact"),
            turns=options.turns,
            idle=seconds(options.idle, "--idle"),
            embedder=None if options.embedder == "none" else options.embedder,
            cold_after=None if options.cold is None else seconds(options.cold, "--cold-after"),
        )
        failed = _work(where, tenants, ways, single=options.single, poll=options.poll, json=options.json)
    if failed:
        raise typer.Exit(1)


def _kinds(text: str | None) -> tuple[JobKind, ...]:
    if text is None:
        return tuple(JobKind)
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in [*JobKind]]:
        raise SpecError(f"no kind of job {unknown[0][:40]!r}", advice=f"there are {', '.join(JobKind)}")
    return tuple(JobKind(word) for word in words)


def _work(where: str, tenants: Sequence[str], ways: Ways, *, single: bool, poll: float, json: bool) -> int:
    """Run jobs until a signal arrives. With `single`, run the jobs that are due, and return the number of failures."""
    stop, reporter = threading.Event(), _Reporter(json=json)
    handlers = {number: signal.signal(number, lambda *_: stop.set()) for number in SIGNALS}
    try:
        with Worker(where, tenants, ways, report=reporter, stopped=stop.is_set) as worker:
            if not single and not json:
                say(line(f"working for {', '.join(tenants)}: {', '.join(ways.kinds)}; SIGTERM stops it after the current step"))
            pause, count = MIN_PAUSE, 0
            while not stop.is_set():
                changed = single or bool(count) or worker.has_changed()
                count = worker.once() if changed else 0
                if single and not count:
                    break
                pause = min(MIN_PAUSE, poll) if count else min(2 * pause, poll)
                if not count:
                    stop.wait(pause)
    finally:
        for number, handler in handlers.items():
            with suppress(ValueError):
                signal.signal(number, handler)
    return reporter.failed if single else 0


class _Reporter:
    """Prints a line for each finished job."""

    def __init__(self, *, json: bool) -> None:
        self._json, self.failed = json, 0
        self._last: dict[tuple[str, str, int], str] = {}

    def __call__(self, job: Did) -> None:
        key = job.tenant, job.kind, job.segment
        repeated = job.error and not job.tries and self._last.get(key) == job.error
        self._last[key] = job.error
        self.failed += bool(job.error)
        if repeated:
            return  # the store is still unreachable
        self._print(job)
        sys.stdout.flush()  # a reader of a pipe gets each line at once

    def _print(self, job: Did) -> None:
        if self._json:
            tell(spelled(msgspec.json.encode(job).decode()))
            return
        segment = f"session {job.session}: " if job.session else f"segment {job.segment}: " if job.segment else ""
        prefix = f"{job.tenant}: {segment}"
        if job.receipt is not None:
            places = ", ".join(f"{number} {place}" for place, number in job.receipt.places.items())
            tell(line(f"{prefix}forgotten: {' '.join(job.receipt.whole)}{f': {places}' if places else ''}"))
        elif job.error:
            tries = f", {many(job.tries, 'time')} so far" if job.tries else ""
            say(line(f"{prefix}{job.kind} failed{tries}: {job.error}"))
        else:
            noun, verb = RESULTS[JobKind(job.kind)]
            tell(line(f"{prefix}{many(job.count, noun)} {verb} in {job.seconds:.1f} s"))


def _show(where: str, tenants: Sequence[str], *, json: bool) -> None:
    rows = []
    for tenant in tenants:
        with reading(where, tenant) as store:
            rows += [msgspec.to_builtins(job) | {"tenant": tenant} for job in standing(store)]
    failed = sum(row["state"] == "failed" for row in rows)
    columns: Columns = {key: key for key in ("tenant", "kind", "session", "state", "tries")}
    if rows or json:
        show_records(rows, {**columns, "for": lambda row: f"{row['seconds']:.0f} s", "error": "error"}, json=json)
    if not json:
        tell(f"{many(len(rows), 'job')} running or pausing, {failed} failed {FAILED} times or more")
    if failed:
        raise typer.Exit(1)


def _retry(where: str, tenants: Sequence[str], *, json: bool) -> None:
    count = 0
    for tenant in tenants:
        with writing(where, tenant) as store:
            count += try_again(store.backend)
    show({"retried": count}, f"{many(count, 'job')} released for another attempt", json=json)

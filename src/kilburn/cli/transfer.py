"""`export` and `import`: sessions as JSONL, without loss. An import never changes an existing session."""

from __future__ import annotations

import gzip
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.cli.access import WIDE, StorePlace, embed, session, writing
from kilburn.cli.archive import ArchivedSession, Clock, SharedBeginnings, gather, rebuild, write
from kilburn.cli.screen import Sink, many, progress, sink
from kilburn.cli.shell import Force, app
from kilburn.errors import SpecError, StoreBusy, StoreCorrupt, StoreReadOnly, WireError
from kilburn.event import Act
from kilburn.file import check_target
from kilburn.opening import Store
from kilburn.terminal import emit, line, plain, say
from kilburn.wire.recording import FORMS, MAX_FILE_BYTES, file_stem, read_lines


@app.command()
def export(where: StorePlace, name: str | None = None, out: Path | None = None, force: Force = False, note: bool = True) -> None:
    """Export sessions as JSONL, each message as it was appended; `import` creates the same sessions from it.

    The ledger records the export, so that `forget` can name this copy. An agent that has the session open must then reopen it.
    With --no-note, nothing is recorded, and no agent has to reopen the session.

    The branches of a named session are omitted. An exported branch contains all messages that it inherited, and an import makes
    it an independent session: `b1/p3` is no address there, and forgetting does not reach from one to the other. `kilburn copy`
    keeps branches as they are.

    Examples:

        kilburn export session-1 --out copy.jsonl

        kilburn export --out all.jsonl.gz --json

    Args:
        name [SESSION]: The name of a session; by default all sessions.
        out --out -o FILE: Write to this file, which may end in .gz; by default to standard output.
        note --note/--no-note: Record the export in the ledger; use --no-note while an agent works.
    """
    if out is not None:
        check_target(out, force=force)
    with where.reading() as store:
        infos = [info for info in store.sessions() if name in (None, info.name)]
        if name is not None:
            session(store, name)
        with _open_target(out, force) as file, progress("exporting", sum(info.pages for info in infos)) as report:
            lines_written = 0
            damaged, forked, beginnings = [], 0, SharedBeginnings()
            branches = len(store.session(name).branches.below()) if name is not None else 0
            for info in infos:
                try:
                    if info.damaged:
                        raise StoreCorrupt(f"session {info.name!r}: {info.damaged}", advice="run `kilburn fsck`")
                    opened = store.session(info.name)
                    lines = beginnings.shortened(info.name, list(write(opened, info)))
                    forked += opened.branches.forked is not None
                except StoreCorrupt as error:
                    if name is not None:
                        raise
                    damaged.append(info)
                    say(f"kilburn: not exported: {error.what}")
                    continue
                for line in lines:
                    file.write(line)
                    lines_written += 1
                    report(lines_written)
            infos = [info for info in infos if info not in damaged]
    if note:
        _note(where, [info.name for info in infos], plain(str(out.absolute())) if out else "standard output")
    if out and where.json:
        emit(
            {
                "file": str(out),
                "sessions": [info.name for info in infos],
                "lines": lines_written,
                "left_out": {"damaged": [info.name for info in damaged], "branches": branches},
                "branches": forked,
            }
        )
    elif out:
        say(f"{many(len(infos), 'session')}, {many(lines_written, 'line')}: {out}")
    if branches:
        say(f"kilburn: not exported: branches of {name!r}: {branches}; without a name, all sessions are exported")
    if forked:
        say(f"kilburn: exported branches: {forked}; an import makes each an independent session with the messages it inherited")
    if damaged:
        raise typer.Exit(1)


@contextmanager
def _open_target(out: Path | None, force: bool) -> Iterator[Sink]:
    """Open the file of an export, compressed if its name ends in .gz."""
    with sink(out, force) as whole:
        if out is not None and out.suffix == ".gz":
            with gzip.GzipFile(filename="", mode="wb", fileobj=whole, mtime=0) as packed:
                yield packed
        else:
            yield whole


def _note(where: StorePlace, names: list[str], target: str) -> None:
    """Record the export in the ledger of each session."""
    try:
        with where.writing() as store:
            for name in names:
                opened = session(store, name)
                with opened.edits.batch() as kernel:
                    kernel.record(Act.NOTE, policy="user", cause="user", export=target, last=opened.window.last)
    except (StoreReadOnly, StoreBusy) as error:
        say(f"kilburn: the export is complete, but its note could not be written: {error.what}")


@app.command("import")
def bring(
    where: StorePlace,
    source: Annotated[Path, Argument(metavar="FILE", help=FORMS[0].upper() + FORMS[1:] + ".", show_default=False)],
    name: str | None = None,
    tokenizer: str = "auto",
    size: Annotated[int, Option(min=1)] = MAX_FILE_BYTES,
) -> None:
    """Import sessions into a store: the whole file, or nothing of it, even if the program is killed. Other writers of the store
    wait until the import is complete.

    The sessions of an export are restored. A file with a message on each line becomes one session, and so does each recorded run.

    Example:

        kilburn import run.jsonl --session light

    Args:
        name --session NAME: Give the session this name; by default its own, or the file's.
        tokenizer NAME: Count tokens by "auto", a model's name, or "chars/4".
        size --max-size BYTES: Refuse a file with more bytes than this, unpacked.
    """
    with progress(f"reading {source.name}"):
        saved = gather(read_lines(source, size), file_stem(source), name)
    if not saved:
        raise WireError(f"{source} is empty", advice=f"give {FORMS}")
    with progress("checking the file"):
        _rehearse(saved, tokenizer)
    clock = Clock(time.time())
    with writing(where.db or "agent.db", where.tenant, clock=clock, tokenizer=tokenizer) as store:
        rows: list[dict[str, Any]] = []
        with store.backend.together(), progress("importing", sum(len(item.entries) for item in saved)) as report:
            existing_names = {info.name for info in store.sessions() if info.pages} & {item.name for item in saved}
            if existing_names:
                raise SpecError(
                    f"the store already has a session {min(existing_names)!r}", advice="give another name with --session"
                )
            lines = 0
            for item in saved:
                stats = rebuild(store, clock, item).stats()
                rows.append({"session": item.name, "pages": stats.pages, "tokens": stats.tokens_seen})
                lines += len(item.entries)
                report(lines)
        embed(store)
    texts = (f"{line(row['session'])}: {many(row['pages'], 'page')}, {many(row['tokens'], 'token')}" for row in rows)
    where.show({"source": str(source), "sessions": rows}, texts)


def _rehearse(saved: list[ArchivedSession], tokenizer: str) -> None:
    """Import everything into memory first, and read it back, so that an error leaves nothing in the store.

    Raises:
        SpecError: two sessions have one name. WireError, KernelError: see `rebuild`.
    """
    names = Counter(item.name for item in saved)
    name, times = names.most_common(1)[0]
    if times > 1:
        raise SpecError(f"{times} sessions are called {name!r}", advice="export them one by one")
    clock = Clock(time.time())
    with Store(Sqlite(":memory:"), Budget(WIDE), "fifo", tokenizer=tokenizer, clock=clock) as store:
        for item in saved:
            rebuild(store, clock, item)
        reader = Store(store.backend, Budget(WIDE), "fifo", tokenizer=store.counter)
        for info in store.sessions():
            for _ in write(reader.session(info.name), info):
                pass  # reading every page, state, event and text is the check

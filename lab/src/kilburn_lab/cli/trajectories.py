"""`trajectories`: the calls of a model out of a ledger, as lines to train on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kilburn.cli.access import reading, session
from kilburn.cli.shell import Db, Force, Json, Tenant
from kilburn.errors import SpecError
from kilburn.file import check_target, write_file
from kilburn.terminal import emit, say
from kilburn_lab.cli.verbs import lab
from kilburn_lab.training.calls import FORMS, LedgerCalls


@lab.command()
def trajectories(
    out: Annotated[Path, typer.Option(metavar="FILE", help="JSON lines, one for each call of the model.")],
    name: Annotated[
        list[str] | None, typer.Option("--session", metavar="NAME", help="A session; may be repeated. All sessions by default.")
    ] = None,
    form: Annotated[str, typer.Option(metavar="|".join(FORMS), help="TRL's form of an example.")] = FORMS[0],
    db: Db = None,
    tenant: Tenant = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Write each call of a model, with its prompt byte for byte as it was rendered, for TRL to train on.

    A call is left out if something of it was forgotten since, or if a search had brought something beside its prompt.

    Example:

        kilburn lab trajectories --db agent.db --out calls.jsonl
    """
    if form not in FORMS:
        raise SpecError(f"no form {form!r}", advice=f"there are {', '.join(FORMS)}")
    check_target(out, force=force)
    many = left_out = 0
    with reading(db, tenant) as store, write_file(out, force=force) as file:
        for each in name or [info.name for info in store.sessions()]:
            calls = LedgerCalls(session(store, each))
            for call in calls:
                file.write(msgspec.json.encode(call.example(form)) + b"\n")
                many += 1
            left_out += calls.left_out
    if json:
        emit({"out": str(out), "calls": many, "left_out": left_out})
    else:
        say(f"written: {out}, {many} calls" + (f"; {left_out} left out" if left_out else ""))
        if not many + left_out:
            say("No reply of a model is in these sessions: `kilburn ps` lists all; `kilburn chat` or `kilburn serve` makes some.")

"""`guidelines`: how to work, as notes that are learned from feedback and forgotten with it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
import typer
from typer import Argument, Option

from kilburn.cli.access import StorePlace, closing_model, embed, model_of, with_agent_counter, with_options
from kilburn.cli.commands import command_group
from kilburn.cli.forget import carry_out
from kilburn.cli.memories import secrets_of
from kilburn.cli.screen import count, many, progress
from kilburn.cli.session import SessionName
from kilburn.cli.shell import Why, Yes
from kilburn.cli.workflows import Owner
from kilburn.memory.guidelines import Guidelines
from kilburn.terminal import emit, line, say, tell

guidelines = command_group("guidelines")

Screened = Annotated[
    str | None,
    Option("--secrets", metavar="WORD", help="refuse, redact or off; else redact, where the extra `secrets` is installed."),
]
Writer = Annotated[str | None, Option("--model", metavar="SPEC", help="What writes the guidelines; else a rule does.")]


@guidelines.command("learn")
@with_options
def learn(
    name: SessionName,
    model: Writer = None,
    user: Owner = None,
    anew: Annotated[bool, Option("--anew", help="Look at all its feedback again, as after something was forgotten.")] = False,
    secrets: Screened = None,
    *,
    where: StorePlace,
) -> None:
    """Learn guidelines from the new feedback in a session. `kilburn notes list guidelines` and `notes list examples` show it.

    Example:

        kilburn guidelines learn session-1
    """
    looked = secrets_of(secrets, "redact")
    with closing_model(model_of(model)) as speaker, where.writing() as opened:
        store = with_agent_counter(opened, name)
        with progress(f"learning from {name}"):
            session = store.session(name)
            guidelines_of_user = Guidelines(store, session.info.user if user is None else user)
            result = guidelines_of_user.learn(session, model=speaker, anew=anew, secrets=looked)
            texts = {note: guidelines_of_user.notes.read(note).text for note in (*result.learned, *result.supported)}
        embed(opened)
    if where.json:
        emit(msgspec.structs.asdict(result) | {"session": name, "guidelines": texts})
    else:
        for note, text in texts.items():
            tell(line(f"{'learned' if note in result.learned else 'said again'}: {note}  {text}"))
        for address in result.refused:
            say(line(f"left out: {name} {address} holds a secret"))
        tell(f"{many(result.feedback, 'message')} of feedback, {count(len(result.examples))} kept as examples")
    if result.failed:
        say(line(f"kilburn: nothing could be learned yet: {result.failed}; run it again"))
        raise typer.Exit(1)


@guidelines.command("unalign")
@with_options
def unalign(
    name: SessionName,
    address: Annotated[str, Argument(metavar="ADDRESS", help="Of the feedback: p17.", show_default=False)],
    model: Writer = None,
    user: Owner = None,
    secrets: Screened = None,
    yes: Yes = False,
    why: Why = "",
    *,
    where: StorePlace,
) -> None:
    """Forget feedback, its example, and guidelines that rest on it alone. Prints a receipt.

    Example:

        kilburn guidelines unalign monday p1 --yes
    """
    looked = secrets_of(secrets, "redact")
    with closing_model(model_of(model)) as speaker, where.writing() as opened:
        store = with_agent_counter(opened, name)
        session = store.session(name)
        guidelines_of_user = Guidelines(store, session.info.user if user is None else user)
        forget = partial(guidelines_of_user.unalign, session, address, why, model=speaker, secrets=looked)
        carry_out(lambda only: forget(dry=only), store, yes=yes, json=where.json)

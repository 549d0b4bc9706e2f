"""`guidelines`: learns notes on how to work from feedback, and forgets them together with it."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
import typer
from typer import Option

from kilburn.cli.access import StorePlace, embed, with_agent_counter
from kilburn.cli.commands import command_group
from kilburn.cli.forget import carry_out
from kilburn.cli.memories import RedactSecrets, secrets_mode
from kilburn.cli.model_loading import closing_model, open_model
from kilburn.cli.screen import count, many, progress
from kilburn.cli.session import SessionName
from kilburn.cli.shell import Why, Yes
from kilburn.cli.workflows import Owner
from kilburn.memory.guidelines import Guidelines
from kilburn.terminal import line, say

guidelines = command_group("guidelines")

Writer = Annotated[
    str | None, Option("--model", metavar="SPEC", help="Let this model write the guidelines; by default a rule does.")
]


@guidelines.command("learn")
def learn(
    where: StorePlace,
    name: SessionName,
    model: Writer = None,
    user: Owner = None,
    anew: bool = False,
    secrets: RedactSecrets = None,
) -> None:
    """Learn guidelines from the new feedback in a session. `kilburn notes list guidelines` and `notes list examples` show them.

    Example:

        kilburn guidelines learn session-1

    Args:
        anew: Process all feedback of the session again, for example after pages were forgotten.
    """
    screening = secrets_mode(secrets, "redact")
    with closing_model(open_model(model)) as writer, where.writing() as opened:
        store = with_agent_counter(opened, name)
        with progress(f"learning from {name}"):
            session = store.session(name)
            collection = Guidelines(store, session.info.user if user is None else user)
            result = collection.learn(session, model=writer, anew=anew, secrets=screening)
            texts = {note: collection.notes.read(note).text for note in (*result.learned, *result.supported)}
        embed(opened)
    for address in () if where.json else result.refused:
        say(line(f"skipped: {name} {address} contains a secret"))
    lines = [
        line(f"{'learned' if note in result.learned else 'supported again'}: {note}  {text}") for note, text in texts.items()
    ]
    lines.append(f"{many(result.feedback, 'message')} of feedback, {count(len(result.examples))} kept as examples")
    where.show(msgspec.structs.asdict(result) | {"session": name, "guidelines": texts}, lines)
    if result.failed:
        say(line(f"kilburn: nothing could be learned yet: {result.failed}; repeat the command"))
        raise typer.Exit(1)


@guidelines.command("unalign")
def unalign(
    where: StorePlace,
    name: SessionName,
    address: str,
    model: Writer = None,
    user: Owner = None,
    secrets: RedactSecrets = None,
    yes: Yes = False,
    why: Why = "",
) -> None:
    """Forget feedback, its example, and the guidelines that rest on it alone. Prints a receipt.

    Example:

        kilburn guidelines unalign monday p1 --yes

    Args:
        address ADDRESS: The address of the feedback: p17.
    """
    screening = secrets_mode(secrets, "redact")
    with closing_model(open_model(model)) as writer, where.writing() as opened:
        store = with_agent_counter(opened, name)
        session = store.session(name)
        collection = Guidelines(store, session.info.user if user is None else user)
        forget = partial(collection.unalign, session, address, why, model=writer, secrets=screening)
        carry_out(forget, store, where, yes=yes)

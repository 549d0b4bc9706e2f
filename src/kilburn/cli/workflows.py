"""`workflows`: learns notes on how to do a task from successes."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from typer import Option

from kilburn.backend import SegmentKind
from kilburn.cli.access import StorePlace, embed, with_agent_counter
from kilburn.cli.commands import command_group
from kilburn.cli.model_loading import closing_model, open_model
from kilburn.cli.screen import count, progress
from kilburn.cli.session import SessionName
from kilburn.errors import SpecError
from kilburn.memory.workflows import Workflows
from kilburn.message import Trust
from kilburn.terminal import line, say

workflows = command_group("workflows")

Owner = Annotated[str | None, Option("--user", metavar="NAME", help="Use the notes of this user; by default the session's user.")]


@workflows.command("list")
def list_workflows(where: StorePlace, user: str = "") -> None:
    """List the workflows in force, with their numbers of successes and failures. They are notes: see `kilburn notes read`.

    Example:

        kilburn workflows list --user ana

    Args:
        user NAME: List the workflows of this user; by default those of all users.
    """
    with where.reading() as store:
        exists = any(info.info.kind is SegmentKind.NOTES and info.info.user == user for info in store.collections())
        records = Workflows(store, user).list() if exists else []
        rows = [
            {
                "note": record.note.name,
                "won": record.won,
                "lost": record.lost,
                "steps": len(record.workflow.steps),
                "trust": Trust(record.note.trust).name.lower(),
                "goal": record.workflow.goal,
            }
            for record in records
        ]
    where.show_records(rows, {key: key for key in ("note", "won", "lost", "steps", "trust", "goal")}, "workflow")
    if not rows and not where.json:
        say("`kilburn workflows learn SESSION` learns a workflow from each success")


@workflows.command("learn")
def learn(
    where: StorePlace,
    name: SessionName,
    succeeded: bool | None = None,
    model: str | None = None,
    induce: str = "rule",
    user: Owner = None,
    anew: bool = False,
) -> None:
    """Learn workflows from the new tasks of a session: count the results of workflows that were shown, and extract new ones.

    Examples:

        kilburn workflows learn session-1 --succeeded

        kilburn workflows learn session-1 --failed --user ana

    Args:
        succeeded --succeeded/--failed: Judge the tasks of the session; by default, the model judges.
        model SPEC: Let this model judge, and choose the steps with --induce model.
        induce NAME: Extract the steps of a success by a rule, or by the model.
        anew: Process all tasks of the session again, for example after pages were forgotten.
    """
    if induce not in ("rule", "model"):
        raise SpecError(f"--induce {induce}"[:80], advice="give rule or model")
    if model is None and (succeeded is None or induce == "model"):
        raise SpecError("no model judges, or chooses the steps", advice="give --succeeded, --failed or --model SPEC")
    with closing_model(open_model(model)) as speaker, where.writing() as opened:
        store = with_agent_counter(opened, name)
        with progress(f"learning from {name}"):
            session = store.session(name)
            flows = Workflows(store, session.info.user if user is None else user)
            judge = None if succeeded is None else lambda _: succeeded
            result = flows.learn(session, judge, model=speaker, induce="model" if induce == "model" else "rule", anew=anew)
        embed(opened)
    lines = [line(f"learned: {note}") for note in result.learned]
    lines += [line(f"retired, because it lost too often: {note}") for note in result.retired]
    lines.append(f"{count(result.won)} won, {count(result.lost)} lost, {count(result.known)} known already")
    where.show(msgspec.structs.asdict(result) | {"session": name}, lines)
    if not (result.won or result.lost or result.failed or where.json):
        say(line(f"no task of {name} is new: a task counts once, when it is over, if a tool was called for it"))
    if result.failed:
        say(line(f"kilburn: not all was judged: {result.failed}; run it again"))
        raise typer.Exit(1)

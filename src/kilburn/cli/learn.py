"""`learn`: learns facts from the messages of a session."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from typer import Option

from kilburn.cli.access import StorePlace, embed, with_agent_counter
from kilburn.cli.memories import Evict, RedactSecrets, secrets_mode
from kilburn.cli.model_loading import closing_model, open_model
from kilburn.cli.screen import many, progress
from kilburn.cli.session import SessionName
from kilburn.cli.shell import app
from kilburn.memory.account import describe
from kilburn.memory.quota import Quota
from kilburn.terminal import line, say


@app.command()
def learn(
    where: StorePlace,
    name: SessionName,
    policy: str = "plain",
    model: str | None = None,
    user: str | None = None,
    quota_facts: Annotated[int | None, Option(min=0)] = None,
    evict: Evict = False,
    secrets: RedactSecrets = None,
) -> None:
    """Learn facts, or a note, from the new messages of a session. No message is processed twice.

    Facts that follow an untrusted text, such as a tool's output, are only proposed; see `kilburn memories list --proposed`.

    Examples:

        kilburn learn session-1

        kilburn learn session-1 --policy "consolidate('core/human')" --model "chat('gpt-5')"

    Args:
        policy SPEC: Learn with this policy: plain needs no model; facts, additive and consolidate ask a model.
        model SPEC: Let this model answer the policy: "qwen", "chat('gpt-5')" ...
        user NAME: Write to the memory of this user; by default the session's user.
        quota_facts --quota FACTS: Stop if the memory has this many facts.
    """
    screening = secrets_mode(secrets, "redact")
    quota = Quota(facts=quota_facts, evict=evict) if quota_facts is not None else None
    with closing_model(open_model(model)) as speaker, where.writing() as opened:
        store = with_agent_counter(opened, name)
        with progress(f"learning from {name}"):
            session = store.session(name)
            memory = store.memory(session.info.user if user is None else user)
            learned = memory.learn(session, policy, speaker, secrets=screening, quota=quota)
        notes = store.notes(memory.user) if learned.memory != memory.name else None
        target = (notes or memory).collection
        new = [
            describe(target, *target.read(target.contents.resolve(address)[0]))
            for address in (*learned.stored, *learned.proposed)
        ]
        embed(opened)
    lines = [line(f"{row['address']}  {row['text']}" + ("  (proposed)" if row["at"] == "proposed" else "")) for row in new]
    lines += [f"no longer {'true' if notes is None else 'in force'}: {address}" for address in learned.retired]
    whose = f"for {memory.user}" if memory.user else "for all users"
    summary = many(len(learned.stored), "fact") + " learned" if notes is None else many(len(learned.stored), "note") + " written"
    lines.append(line(f"{summary} {whose}, {many(learned.unchanged, 'other')} known already"))
    where.show(msgspec.structs.asdict(learned) | {"session": name, "facts": new}, lines)
    if not where.json:
        if learned.proposed:
            say(f"{many(len(learned.proposed), 'proposed fact')}: see kilburn memories list --proposed")
        for address in learned.refused:
            say(line(f"skipped: {name} {address} contains a secret"))
    if learned.failed:
        say(line(f"kilburn: nothing could be learned yet from {' '.join(learned.failed)}: {learned.why}; repeat the command"))
        raise typer.Exit(1)

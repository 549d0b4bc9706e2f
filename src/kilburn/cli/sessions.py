"""`sessions`: archives and forgets old sessions."""

from __future__ import annotations

import msgspec

from kilburn.cli.access import StorePlace
from kilburn.cli.commands import command_group
from kilburn.cli.forget import confirm
from kilburn.cli.moments import seconds, when
from kilburn.cli.screen import count, many, progress
from kilburn.cli.shell import Yes
from kilburn.errors import SpecError
from kilburn.jobs.ending import Expired, TimeToLive, expire, keep_rule, kept_receipts, read_rule
from kilburn.terminal import line, say

sessions = command_group("sessions")

_OPTIONS = {"archive": "--archive-after", "forget": "--forget-after", "branches": "--forget-branches-after"}


@sessions.command("expire")
def expire_sessions(
    where: StorePlace, older: str | None = None, archive: bool = False, forget: bool = False, yes: Yes = False, dry: bool = False
) -> None:
    """Archive or forget the sessions that nobody has used for long. Without --older-than, the tenant's rule applies.

    A session with a page that a person pinned, or with an open branch, stays. Facts and notes that were derived from a forgotten
    session are forgotten, too.

    Examples:

        kilburn sessions expire --older-than 30d --forget --dry-run

        kilburn sessions expire --yes

    Args:
        older --older-than TIME: Select sessions unused for this long: 30d, 12h; by default by the rule.
        archive: Move their texts to the cold place; they stay readable.
        forget: Forget them, with their branches and everything derived from them.
        dry --dry-run: Show what would happen, and change nothing.
    """
    if (older is None) != (not archive and not forget) or (archive and forget):
        raise SpecError("--older-than goes with one of --archive and --forget", advice="give both, or neither to apply the rule")
    # First only read: a session that is opened for writing is counted again, by this program's tokenizer.
    with where.reading() as store:
        rule = read_rule(store.backend)
        if older is not None:
            age = seconds(older, "--older-than")
            rule = TimeToLive(archive=age) if archive else TimeToLive(forget=age)
        if rule is None:
            say("kilburn: this tenant has no rule; set one with: kilburn sessions rule --forget-after 365d")
            rule = TimeToLive()
        with progress("reading sessions"):
            due = expire(store, rule, dry=True)
    if not dry:
        if due.forgotten and not yes:
            for name in due.forgotten:
                say(line(f"goes: {name}"))
            confirm(many(len(due.forgotten), "session"))
        with where.writing() as store, progress("expiring sessions"):
            due = expire(store, rule)
    _report(due, dry, where)


def _report(due: Expired, dry: bool, where: StorePlace) -> None:
    lines = [line(f"{'would be archived' if dry else 'archived'}: {name}") for name in due.archived]
    for name, receipt in zip(due.forgotten, due.receipts, strict=True):
        places = ", ".join(f"{count(number)} {place}" for place, number in receipt.places.items())
        lines.append(line(f"{'would go' if dry else 'forgotten'}: all of {name}{f': {places}' if places else ''}"))
    if due.moved.texts:
        lines.append(f"to the cold place: {many(due.moved.texts, 'text')}, {many(due.moved.bytes, 'byte')}")
    where.show(msgspec.to_builtins(due) | {"dry": dry}, lines or "nothing is due")
    for name, why in () if where.json else due.kept:
        say(line(f"stays: {name}: {why}"))


@sessions.command("rule")
def rule(
    where: StorePlace, archive: str | None = None, forget: str | None = None, branches: str | None = None, never: bool = False
) -> None:
    """Show or set the retention rule of this tenant's sessions. `kilburn serve` applies the rule when it is idle, and `kilburn
    sessions expire --yes` applies it at once.

    Example:

        kilburn sessions rule --forget-after 365d

    Args:
        archive --archive-after TIME: Archive sessions after this long without use: 30d.
        forget --forget-after TIME: Forget sessions after this long without use: 365d.
        branches --forget-branches-after TIME: Forget a gateway's branches that nobody continued for this long: 7d.
        never: Remove the rule, so that sessions never expire.
    """
    options = {"archive": archive, "forget": forget, "branches": branches}
    seconds_by_name = {name: seconds(text, _OPTIONS[name]) for name, text in options.items() if text is not None}
    if never and seconds_by_name:
        raise SpecError("--never with a time", advice="give one of them")
    if not never and not seconds_by_name:
        with where.reading() as store:
            current = read_rule(store.backend)
    else:
        current = None if never else TimeToLive(**seconds_by_name)
        with where.writing() as store:
            if current is not None and current.archive is not None and "cold" not in store.backend.settings.all():
                raise SpecError("this tenant has no cold place", advice="name one: `kilburn cold set PLACE`")
            keep_rule(store.backend, current)
    effective = current or TimeToLive()
    events = {"archived": effective.archive, "forgotten": effective.forget, "lone branches forgotten": effective.branches}
    lines = (
        f"{event}: {'never' if length is None else f'{length / 86_400:g} days after the last use'}"
        for event, length in events.items()
    )
    where.show(msgspec.to_builtins(effective), lines)


@sessions.command("receipts")
def receipts(where: StorePlace) -> None:
    """Show the last 200 receipts of sessions that expired by a rule, also when `kilburn worker` or `kilburn serve` applied it.

    Sessions have numbers here, because their names are forgotten, too. `kilburn forget` prints its receipt at once.

    Example:

        kilburn sessions receipts
    """
    with where.reading() as store:
        rows = kept_receipts(store.backend)
    lines = []
    for receipt in rows:
        places = ", ".join(f"{count(number)} {place}" for place, number in receipt.places.items())
        more = f" with its branches, {many(receipt.segments, 'session')}" if receipt.segments > 1 else ""
        description = f"forgotten{more}{f': {places}' if places else ''}" if receipt.whole else "begun, completion unknown"
        lines.append(line(f"{when(receipt.time)}  session {receipt.segment}: {description}"))
    where.show(list(map(msgspec.structs.asdict, rows)), lines or "no session has expired by a rule")

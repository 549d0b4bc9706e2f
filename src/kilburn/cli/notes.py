"""`notes`: texts with names that a user or an agent keeps; with their versions, and as a folder of Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from kilburn.backend import SegmentKind
from kilburn.cli.access import StorePlace, collection_owners, embed, no_collection, with_options
from kilburn.cli.commands import command_group
from kilburn.cli.forget import carry_out
from kilburn.cli.memories import Look, secrets_of
from kilburn.cli.moments import when
from kilburn.cli.screen import count, many, table
from kilburn.cli.shell import Why, Yes
from kilburn.collections.names import LARGEST_NOTE
from kilburn.errors import SpecError
from kilburn.kernel.store import Store
from kilburn.memory.note_files import NoteFiles, export_notes, import_notes
from kilburn.memory.notes import Notes, NoteVersion
from kilburn.message import Trust
from kilburn.terminal import emit, line, say, tell

notes = command_group("notes")

Owner = Annotated[str, Option("--user", metavar="NAME", help="Whose notes: a user, or an agent; else those of all users.")]
Name = Annotated[str, Argument(metavar="NAME", help="Such as core/human, as `notes list` has it.", show_default=False)]
Version = Annotated[str, Option(metavar="ADDRESS", help="A version, as `notes history` has it: p1, f3.")]
Seen = Annotated[
    str | None, Option("--seen", metavar="DIGEST", help="Only if this is what it says now, by the digest that --json shows.")
]
Folder = Annotated[Path, Argument(metavar="FOLDER", help="A folder with a Markdown file for each note.", show_default=False)]


def _row(note: NoteVersion, *, text: bool = False) -> dict[str, Any]:
    row = {
        "note": note.name,
        "address": note.address,
        "digest": note.digest,
        "written": note.time,
        "trust": Trust(note.trust).name.lower(),
        "tokens": note.tokens,
        "in_force": note.in_force,
    }
    return row | {"text": note.text} if text else row


def _notes(store: Store, owner: str) -> Notes:
    """Notes that are there.

    Raises:
        SpecError: there are none of this owner.
    """
    if owner not in collection_owners(store, SegmentKind.NOTES):
        raise no_collection(store, SegmentKind.NOTES, owner, "are no notes", "kilburn notes write")
    return store.notes(owner)


def _show(note: NoteVersion, title: str, json: bool) -> None:
    if json:
        emit(_row(note))
        return
    tell(line(f"{title}: {note.name}  {note.address}, {many(note.tokens, 'token')}{_mark(note)}"))


def _mark(note: NoteVersion) -> str:
    """What is worth knowing of a note's trust."""
    return "" if note.trust >= Trust.USER else f", trust {Trust(note.trust).name.lower()}"


@notes.command("list")
@with_options
def list_notes(
    under: Annotated[str, Argument(metavar="NAME", help="Only those below this name.", show_default=False)] = "",
    user: Owner = "",
    *,
    where: StorePlace,
) -> None:
    """List the notes in force.

    Examples:

        kilburn notes list --user ana

        kilburn notes list core --user ana --json
    """
    with where.reading() as store:
        rows = [_row(note) for note in _notes(store, user).list(under)]
    if where.json:
        emit(rows)
        return
    heads = ("note", "version", "written", "trust", "tokens")
    table(heads, ((row["note"], row["address"], when(row["written"]), row["trust"], count(row["tokens"])) for row in rows))
    tell(many(len(rows), "note"))


@notes.command("read")
@with_options
def read(name: Name, user: Owner = "", version: Version = "", *, where: StorePlace) -> None:
    """Print the text of a note, or of an earlier version.

    Examples:

        kilburn notes read core/human --user ana

        kilburn notes read core/human --version p1 --user ana
    """
    with where.reading() as store:
        notes_of_user = _notes(store, user)
        note = _version(notes_of_user, name, version) if version else notes_of_user.read(name)
        row = _row(note, text=True)
    if where.json:
        emit(row)
        return
    tell(row["text"], end="" if row["text"].endswith("\n") else "\n")


def _version(notes: Notes, name: str, address: str) -> NoteVersion:
    versions = [note for note in notes.history(name) if note.address == address]
    if not versions:
        raise SpecError(f"{address[:40]!r} is no version of {name!r}", advice="see kilburn notes history")
    return versions[0]


@notes.command("write")
@with_options
def write(
    name: Name,
    text: Annotated[
        str | None, Argument(metavar="TEXT", help="What it says; else standard input is read.", show_default=False)
    ] = None,
    user: Owner = "",
    seen: Seen = None,
    new: Annotated[bool, Option("--new", help="Only if there is none of this name yet.")] = False,
    anew: Annotated[
        bool, Option("--anew", help="The text is all your own: nothing of what it said before is its source.")
    ] = False,
    secrets: Look = None,
    why: Why = "",
    *,
    where: StorePlace,
) -> None:
    """Write a note, new or in place of its present text. The former text stays in its history.

    Examples:

        kilburn notes write core/human "Ana drinks tea." --user ana

        kilburn notes write core/human "Ana drinks coffee." --user ana --anew
    """
    if new and seen is not None:
        raise SpecError("--new with --seen", advice="give one of the two")
    content = text if text is not None else _input()
    with where.writing(new=True) as store:
        expected = "" if new else seen
        note = store.notes(user).write(name, content, seen=expected, anew=anew, secrets=secrets_of(secrets), why=why)
        _show(note, "written", where.json)
        embed(store)


def _input() -> str:
    data = sys.stdin.buffer.read(4 * LARGEST_NOTE + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError("standard input is no text in UTF-8", advice="give text") from error


@notes.command("rename")
@with_options
def rename(
    name: Name,
    to: Annotated[str, Argument(metavar="NAME", help="What to call it from now on.", show_default=False)],
    user: Owner = "",
    expected: Seen = None,
    why: Why = "",
    *,
    where: StorePlace,
) -> None:
    """Rename a note. Its history goes on under the new name.

    Example:

        kilburn notes rename workflows/release workflows/ship --user ana
    """
    with where.writing() as store:
        _show(_notes(store, user).rename(name, to, seen=expected, why=why), "renamed", where.json)


@notes.command("delete")
@with_options
def delete(name: Name, user: Owner = "", expected: Seen = None, why: Why = "", *, where: StorePlace) -> None:
    """Take a note out of force. Its versions stay readable, and `restore` brings them back; `forget` erases them.

    Example:

        kilburn notes delete workflows/release --user ana
    """
    with where.writing() as store:
        _show(_notes(store, user).delete(name, seen=expected, why=why), "deleted", where.json)


@notes.command("history")
@with_options
def history(name: Name, user: Owner = "", *, where: StorePlace) -> None:
    """List the versions of a note, oldest first. Includes versions under another name and before a deletion.

    Example:

        kilburn notes history core/human --user ana
    """
    with where.reading() as store:
        rows = [_row(note, text=where.json) for note in _notes(store, user).history(name)]
    if where.json:
        emit(rows)
        return
    heads = ("version", "written", "note", "trust", "tokens", "is")
    cells = ((row["address"], when(row["written"]), row["note"], row["trust"], count(row["tokens"])) for row in rows)
    table(heads, ((*cell, "in force" if row["in_force"] else "") for cell, row in zip(cells, rows, strict=True)))


@notes.command("restore")
@with_options
def restore(
    name: Name,
    version: Annotated[str, Argument(metavar="ADDRESS", help="A version, as `notes history` has it.", show_default=False)],
    user: Owner = "",
    why: Why = "",
    *,
    where: StorePlace,
) -> None:
    """Put an earlier version of a note in force again.

    Example:

        kilburn notes restore core/human p1 --user ana
    """
    with where.writing() as store:
        _show(_notes(store, user).restore(name, version, why=why), "restored", where.json)


@notes.command("diff")
@with_options
def diff(
    name: Name,
    old: Annotated[str, Option(metavar="ADDRESS", help="A version; else the one before.")] = "",
    new: Annotated[str, Option(metavar="ADDRESS", help="A version; else what it says now.")] = "",
    user: Owner = "",
    *,
    where: StorePlace,
) -> None:
    """Show what changed between two versions of a note.

    Example:

        kilburn notes diff core/human --old p1 --user ana
    """
    with where.reading() as store:
        text = _notes(store, user).diff(name, old, new)
    if where.json:
        emit({"note": name, "diff": text})
        return
    tell(text, end="")


@notes.command("forget")
@with_options
def forget(name: Name, user: Owner = "", yes: Yes = False, why: Why = "", *, where: StorePlace) -> None:
    """Forget a note for ever, with all its versions. What was made from them goes too. Prints a receipt.

    Example:

        kilburn notes forget core/human --user ana --yes
    """
    with where.writing() as store:
        notes_of_user = _notes(store, user)
        pages = [note.page for note in notes_of_user.history(name)]
        request = {
            "session": notes_of_user.collection.name,
            "address": ", ".join(note.address for note in notes_of_user.history(name)),
        }
        roots = {notes_of_user.collection.number: pages}
        carry_out(lambda only: store.forget_pages(roots, asked=request, why=why, dry=only), store, yes=yes, json=where.json)


@notes.command("export")
@with_options
def export(folder: Folder, user: Owner = "", *, where: StorePlace) -> None:
    """Export the notes to a folder, as Markdown files, or update it. An edited file is not overwritten.

    Keep the folder in Git with its hidden list, which says what each file was written from; `import` brings edits back.

    Example:

        kilburn notes export notebook --user ana
    """
    with where.reading() as store:
        result = export_notes(_notes(store, user), folder)
    _report(result, folder, where.json, "kilburn notes import")


@notes.command("import")
@with_options
def bring(
    folder: Folder,
    user: Owner = "",
    resolved: Annotated[
        list[str] | None,
        Option("--resolved", metavar="NAME", help="A note whose file has both sides' words now; may be given again."),
    ] = None,
    delete: Annotated[bool, Option("--delete", help="Delete the notes whose files are gone.")] = False,
    secrets: Look = None,
    *,
    where: StorePlace,
) -> None:
    """Import what was edited in a folder. Each changed file becomes a new version, and each new file a note.

    Where the note was changed too, nothing is written, and the difference is shown: put both together in the file, and import it
    with --resolved.

    Examples:

        kilburn notes import notebook --user ana

        kilburn notes import notebook --user ana --resolved core/human
    """
    looked = secrets_of(secrets)
    with where.writing(new=True) as store:
        result = import_notes(store.notes(user), folder, resolved=resolved or (), delete=delete, secrets=looked)
        embed(store)
    _report(result, folder, where.json, "kilburn notes import --resolved NAME, when its file has both sides' words")


def _report(result: NoteFiles, folder: Path, json: bool, next_command: str) -> None:
    """Print what was done, and end with status 1 where there are conflicts."""
    if json:
        emit(msgspec.structs.asdict(result))
    else:
        for file, why in result.skipped:
            say(line(f"passed over: {file}: {why}"))
        for name in result.newer:
            say(line(f"newer in the store: {name}; see kilburn notes export"))
        for name in result.gone:
            say(line(f"its file is gone: {name}; --delete deletes it"))
        for name, difference in result.conflicts:
            say(line(f"changed on both sides, and left as it is: {name}"))
            tell(difference, end="")
        figures = f"{many(len(result.written), 'note')} written, {count(len(result.removed))} removed"
        figures += f", {count(result.unchanged)} unchanged, {many(len(result.conflicts), 'conflict')}"
        tell(line(f"{folder}: {figures}"))
        if result.conflicts:
            say(f"then: {next_command}")
    if result.conflicts:
        raise typer.Exit(1)

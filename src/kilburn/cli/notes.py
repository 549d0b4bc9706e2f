"""`notes`: reads and writes named notes of a user or an agent, with their versions, and as a folder of Markdown files."""

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
from kilburn.cli.memories import RefuseSecrets, secrets_mode
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

Owner = Annotated[
    str, Option("--user", metavar="NAME", help="Use the notes of this user or agent; by default those of all users.")
]
Name = Annotated[
    str, Argument(metavar="NAME", help="The name of a note in `notes list`, such as core/human.", show_default=False)
]
Version = Annotated[str, Option(metavar="ADDRESS", help="Print this version of `notes history`: p1, f3.")]
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
    """Return the notes of an owner.

    Raises:
        SpecError: this owner has no notes.
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
    """Return a remark on the trust of a note; "" if it is that of a user or higher."""
    return "" if note.trust >= Trust.USER else f", trust {Trust(note.trust).name.lower()}"


@notes.command("list")
@with_options
def list_notes(
    under: Annotated[str, Argument(metavar="NAME", help="List only notes below this name.", show_default=False)] = "",
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
    """Print the text of a note, or of an earlier version of it.

    Examples:

        kilburn notes read core/human --user ana

        kilburn notes read core/human --version p1 --user ana
    """
    with where.reading() as store:
        collection = _notes(store, user)
        note = _version(collection, name, version) if version else collection.read(name)
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
        str | None, Argument(metavar="TEXT", help="The text of the note; by default, standard input is read.", show_default=False)
    ] = None,
    user: Owner = "",
    anew: Annotated[bool, Option("--anew", help="Do not treat the former text as a source of the new one.")] = False,
    secrets: RefuseSecrets = None,
    why: Why = "",
    *,
    where: StorePlace,
) -> None:
    """Write a note, or replace its text. The former text stays in its history.

    Examples:

        kilburn notes write core/human "Ana drinks tea." --user ana

        kilburn notes write core/human "Ana drinks coffee." --user ana --anew
    """
    content = text if text is not None else _input()
    with where.writing(new=True) as store:
        note = store.notes(user).write(name, content, anew=anew, secrets=secrets_mode(secrets), why=why)
        _show(note, "written", where.json)
        embed(store)


def _input() -> str:
    data = sys.stdin.buffer.read(4 * LARGEST_NOTE + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError("standard input is not UTF-8 text", advice="give text") from error


@notes.command("rename")
@with_options
def rename(
    name: Name,
    to: Annotated[str, Argument(metavar="NAME", help="The new name.", show_default=False)],
    user: Owner = "",
    why: Why = "",
    *,
    where: StorePlace,
) -> None:
    """Rename a note. Its history continues under the new name.

    Example:

        kilburn notes rename workflows/release workflows/ship --user ana
    """
    with where.writing() as store:
        _show(_notes(store, user).rename(name, to, why=why), "renamed", where.json)


@notes.command("delete")
@with_options
def delete(name: Name, user: Owner = "", why: Why = "", *, where: StorePlace) -> None:
    """Delete a note. Its versions stay readable, and `restore` brings them back; `forget` erases them.

    Example:

        kilburn notes delete workflows/release --user ana
    """
    with where.writing() as store:
        _show(_notes(store, user).delete(name, why=why), "deleted", where.json)


@notes.command("history")
@with_options
def history(name: Name, user: Owner = "", *, where: StorePlace) -> None:
    """List the versions of a note, oldest first, including versions under another name and before a deletion.

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
    version: Annotated[str, Argument(metavar="ADDRESS", help="A version in `notes history`.", show_default=False)],
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
    old: Annotated[str, Option(metavar="ADDRESS", help="Compare with this version; by default the previous one.")] = "",
    new: Annotated[str, Option(metavar="ADDRESS", help="Compare this version; by default the current one.")] = "",
    user: Owner = "",
    *,
    where: StorePlace,
) -> None:
    """Show the difference between two versions of a note.

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
    """Forget a note for ever, with all its versions and everything derived from them. Prints a receipt.

    Example:

        kilburn notes forget core/human --user ana --yes
    """
    with where.writing() as store:
        owned = _notes(store, user)
        versions = list(owned.history(name))
        request = {"session": owned.collection.name, "address": ", ".join(note.address for note in versions)}
        roots = {owned.collection.number: [note.page for note in versions]}
        carry_out(lambda dry_run: store.forget_pages(roots, asked=request, why=why, dry=dry_run), store, yes=yes, json=where.json)


@notes.command("export")
@with_options
def export(folder: Folder, user: Owner = "", *, where: StorePlace) -> None:
    """Export the notes to a folder of Markdown files, or update the folder. An edited file is not overwritten.

    If you keep the folder in Git, include its hidden list, which records the version of each file. `import` brings edits back.

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
        Option("--resolved", metavar="NAME", help="Accept the file of this note, as it merges both versions; may be repeated."),
    ] = None,
    delete: Annotated[bool, Option("--delete", help="Delete the notes whose files were deleted.")] = False,
    secrets: RefuseSecrets = None,
    *,
    where: StorePlace,
) -> None:
    """Import the edited files of a folder. Each changed file becomes a new version, and each new file a note.

    If the note was changed, too, nothing is written, and the difference is printed: merge both in the file, and import it with
    --resolved.

    Examples:

        kilburn notes import notebook --user ana

        kilburn notes import notebook --user ana --resolved core/human
    """
    screening = secrets_mode(secrets)
    with where.writing(new=True) as store:
        result = import_notes(store.notes(user), folder, resolved=resolved or (), delete=delete, secrets=screening)
        embed(store)
    _report(result, folder, where.json, "kilburn notes import --resolved NAME, when its file merges both versions")


def _report(result: NoteFiles, folder: Path, json: bool, next_command: str) -> None:
    """Print the result, and exit with status 1 if there are conflicts."""
    if json:
        emit(msgspec.structs.asdict(result))
    else:
        for file, why in result.skipped:
            say(line(f"skipped: {file}: {why}"))
        for name in result.newer:
            say(line(f"newer in the store: {name}; see kilburn notes export"))
        for name in result.gone:
            say(line(f"its file was deleted: {name}; --delete deletes the note"))
        for name, difference in result.conflicts:
            say(line(f"changed on both sides, and not imported: {name}"))
            tell(difference, end="")
        figures = f"{many(len(result.written), 'note')} written, {count(len(result.removed))} removed"
        figures += f", {count(result.unchanged)} unchanged, {many(len(result.conflicts), 'conflict')}"
        tell(line(f"{folder}: {figures}"))
        if result.conflicts:
            say(f"then: {next_command}")
    if result.conflicts:
        raise typer.Exit(1)

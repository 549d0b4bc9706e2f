"""`notes`: reads and writes named notes of a user or an agent, with their versions, and as a folder of Markdown files."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from kilburn.backend import SegmentKind
from kilburn.cli.access import StorePlace, collection_owners, embed, no_collection
from kilburn.cli.commands import command_group
from kilburn.cli.forget import carry_out
from kilburn.cli.memories import RefuseSecrets, secrets_mode
from kilburn.cli.moments import when
from kilburn.cli.screen import Columns, count, many
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


def _written(row: dict[str, Any]) -> str:
    return when(row["written"])


def _notes(store: Store, owner: str) -> Notes:
    """Return the notes of an owner.

    Raises:
        SpecError: this owner has no notes.
    """
    if owner not in collection_owners(store, SegmentKind.NOTES):
        raise no_collection(store, SegmentKind.NOTES, owner, "are no notes", "kilburn notes write")
    return store.notes(owner)


def _show(note: NoteVersion, title: str, where: StorePlace) -> None:
    mark = "" if note.trust >= Trust.USER else f", trust {Trust(note.trust).name.lower()}"
    where.show(_row(note), line(f"{title}: {note.name}  {note.address}, {many(note.tokens, 'token')}{mark}"))


@notes.command("list")
def list_notes(where: StorePlace, under: str = "", user: Owner = "") -> None:
    """List the notes in force.

    Examples:

        kilburn notes list --user ana

        kilburn notes list core --user ana --json

    Args:
        under [NAME]: List only notes below this name.
    """
    with where.reading() as store:
        rows = [_row(note) for note in _notes(store, user).list(under)]
    columns: Columns = {"note": "note", "version": "address", "written": _written, "trust": "trust", "tokens": "tokens"}
    where.show_records(rows, columns, "note")


@notes.command("read")
def read(where: StorePlace, name: Name, user: Owner = "", version: Version = "") -> None:
    """Print the text of a note, or of an earlier version of it.

    Examples:

        kilburn notes read core/human --user ana

        kilburn notes read core/human --version p1 --user ana
    """
    with where.reading() as store:
        collection = _notes(store, user)
        note = _version(collection, name, version) if version else collection.read(name)
        row = _row(note, text=True)
    where.show(row, row["text"].removesuffix("\n"))


def _version(notes: Notes, name: str, address: str) -> NoteVersion:
    versions = [note for note in notes.history(name) if note.address == address]
    if not versions:
        raise SpecError(f"{address[:40]!r} is no version of {name!r}", advice="see kilburn notes history")
    return versions[0]


@notes.command("write")
def write(
    where: StorePlace,
    name: Name,
    text: str | None = None,
    user: Owner = "",
    anew: bool = False,
    secrets: RefuseSecrets = None,
    why: Why = "",
) -> None:
    """Write a note, or replace its text. The former text stays in its history.

    Examples:

        kilburn notes write core/human "Ana drinks tea." --user ana

        kilburn notes write core/human "Ana drinks coffee." --user ana --anew

    Args:
        text [TEXT]: The text of the note; by default, standard input is read.
        anew: Do not treat the former text as a source of the new one.
    """
    content = text if text is not None else _input()
    with where.writing(new=True) as store:
        note = store.notes(user).write(name, content, anew=anew, secrets=secrets_mode(secrets), why=why)
        _show(note, "written", where)
        embed(store)


def _input() -> str:
    data = sys.stdin.buffer.read(4 * LARGEST_NOTE + 1)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError("standard input is not UTF-8 text", advice="give text") from error


@notes.command("rename")
def rename(where: StorePlace, name: Name, to: str, user: Owner = "", why: Why = "") -> None:
    """Rename a note. Its history continues under the new name.

    Example:

        kilburn notes rename workflows/release workflows/ship --user ana

    Args:
        to NAME: The new name.
    """
    with where.writing() as store:
        _show(_notes(store, user).rename(name, to, why=why), "renamed", where)


@notes.command("delete")
def delete(where: StorePlace, name: Name, user: Owner = "", why: Why = "") -> None:
    """Delete a note. Its versions stay readable, and `restore` brings them back; `forget` erases them.

    Example:

        kilburn notes delete workflows/release --user ana
    """
    with where.writing() as store:
        _show(_notes(store, user).delete(name, why=why), "deleted", where)


@notes.command("history")
def history(where: StorePlace, name: Name, user: Owner = "") -> None:
    """List the versions of a note, oldest first, including versions under another name and before a deletion.

    Example:

        kilburn notes history core/human --user ana
    """
    with where.reading() as store:
        rows = [_row(note, text=where.json) for note in _notes(store, user).history(name)]
    columns: Columns = {"version": "address", "written": _written, "note": "note", "trust": "trust", "tokens": "tokens"}
    columns = {**columns, "is": lambda row: "in force" if row["in_force"] else ""}
    where.show_records(rows, columns)


@notes.command("restore")
def restore(where: StorePlace, name: Name, version: str, user: Owner = "", why: Why = "") -> None:
    """Put an earlier version of a note in force again.

    Example:

        kilburn notes restore core/human p1 --user ana

    Args:
        version ADDRESS: A version in `notes history`.
    """
    with where.writing() as store:
        _show(_notes(store, user).restore(name, version, why=why), "restored", where)


@notes.command("diff")
def diff(where: StorePlace, name: Name, old: str = "", new: str = "", user: Owner = "") -> None:
    """Show the difference between two versions of a note.

    Example:

        kilburn notes diff core/human --old p1 --user ana

    Args:
        old ADDRESS: Compare with this version; by default the previous one.
        new ADDRESS: Compare this version; by default the current one.
    """
    with where.reading() as store:
        text = _notes(store, user).diff(name, old, new)
    where.show({"note": name, "diff": text}, text.removesuffix("\n") if text else ())


@notes.command("forget")
def forget(where: StorePlace, name: Name, user: Owner = "", yes: Yes = False, why: Why = "") -> None:
    """Forget a note for ever, with all its versions and everything derived from them. Prints a receipt.

    Example:

        kilburn notes forget core/human --user ana --yes
    """
    with where.writing() as store:
        owned = _notes(store, user)
        versions = list(owned.history(name))
        request = {"session": owned.collection.name, "address": ", ".join(note.address for note in versions)}
        roots = {owned.collection.number: [note.page for note in versions]}
        carry_out(partial(store.forget_pages, roots, asked=request, why=why), store, where, yes=yes)


@notes.command("export")
def export(where: StorePlace, folder: Folder, user: Owner = "") -> None:
    """Export the notes to a folder of Markdown files, or update the folder. An edited file is not overwritten.

    If you keep the folder in Git, include its hidden list, which records the version of each file. `import` brings edits back.

    Example:

        kilburn notes export notebook --user ana
    """
    with where.reading() as store:
        result = export_notes(_notes(store, user), folder)
    _report(result, folder, where.json, "kilburn notes import")


@notes.command("import")
def bring(
    where: StorePlace,
    folder: Folder,
    user: Owner = "",
    resolved: list[str] | None = None,
    delete: bool = False,
    secrets: RefuseSecrets = None,
) -> None:
    """Import the edited files of a folder. Each changed file becomes a new version, and each new file a note.

    If the note was changed, too, nothing is written, and the difference is printed: merge both in the file, and import it with
    --resolved.

    Examples:

        kilburn notes import notebook --user ana

        kilburn notes import notebook --user ana --resolved core/human

    Args:
        resolved NAME: Accept the file of this note, as it merges both versions; may be repeated.
        delete: Delete the notes whose files were deleted.
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

"""Exports notes as a folder of Markdown that a person can edit and keep in Git, and imports the edits as new versions.

A hidden file of the folder records the version from which each file was written. So changes on both sides are known: a change on
one side is taken over; if both sides changed, nothing is written, and the difference is shown. Files are opened relative to the
descriptor of their folder, one part of the path at a time, and no link is followed.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import msgspec

from kilburn.collections.names import LARGEST_NOTE, checked_name
from kilburn.errors import KernelError, NoteConflict, SecretFound, SpecError
from kilburn.file import PART_NAME, remove_parts, write_file
from kilburn.memory.files import HIDDEN, File, read_texts
from kilburn.memory.notes import Notes, NoteVersion, unified_diff
from kilburn.memory.secrets import Secrets
from kilburn.page import digest_of

LIST = ".kilburn-notes.json"
"""The file that records from which versions the others were written; it belongs in Git with them."""

MAX_FILE_BYTES = 4 * LARGEST_NOTE
"""Bytes of a file at most: a character takes four bytes at most."""

SUFFIX = ".md"

BOM = "\ufeff"
"""The byte order mark with which a file may begin. A note may begin with it, too."""

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class FileBase(msgspec.Struct, frozen=True):
    """The origin of a file: the name of the note, and the digest of its text."""

    name: str
    digest: str


class _List(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    notes: dict[str, FileBase] = {}
    format: int = 1


class NoteFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an export or an import; notes are given by name.

    Args:
        written: files, or new versions of notes. removed: files, or notes that were deleted.
        unchanged: number of notes that are the same on both sides.
        newer: on import: notes with a newer version in the store and an unedited file. Export again to get it.
        gone: on import: notes whose file was deleted; they stay unless `delete` is set.
        conflicts: (name, diff from the store's version to the file's) of notes that both sides changed. Nothing of them was
            written.
        skipped: (file, reason) of skipped files.
    """

    written: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    unchanged: int = 0
    newer: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    conflicts: tuple[tuple[str, str], ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()


class _Report:
    """Collects a `NoteFiles`, and the new list of files."""

    def __init__(self, bases: dict[str, FileBase]) -> None:
        self.notes = dict(bases)
        self.written: list[str] = []
        self.removed: list[str] = []
        self.newer: list[str] = []
        self.gone: list[str] = []
        self.conflicts: list[tuple[str, str]] = []
        self.skipped: list[tuple[str, str]] = []
        self.unchanged = 0

    def conflict(self, name: str, file: str, note: NoteVersion | None, text: str) -> None:
        old = f"{name} {note.address}, in the store" if note is not None else f"{name}, deleted in the store"
        self.conflicts.append((name, unified_diff("" if note is None else note.text, text, old, f"{file}, in the folder")))

    def made(self) -> NoteFiles:
        lists = {name: tuple(getattr(self, name)) for name in ("written", "removed", "newer", "gone", "conflicts", "skipped")}
        return NoteFiles(unchanged=self.unchanged, **lists)


def note_file(name: str) -> str:
    """Return the file of a note, below its folder."""
    return name if name.endswith(SUFFIX) else name + SUFFIX


def export_notes(notes: Notes, folder: str | os.PathLike[str]) -> NoteFiles:
    """Write notes into a folder, one file each, or bring the folder up to date. A file that was edited since the last export or
    import is not overwritten, nor is any other file.

    Args:
        folder: created if there is none.

    Raises:
        SpecError: it is no folder, or has notes of another owner. OSError: it cannot be written.
    """
    place = Path(folder)
    if not os.path.lexists(place):
        place.mkdir(parents=True)
    with _open_folder(place) as root:
        bases, present = _read_list(root, notes), {file.path: file for file in read_texts(place, MAX_FILE_BYTES)}
        _remove_parts(root, present)
        report, owners = _Report(bases), dict[str, str]()
        for note in notes.list():
            file = note_file(note.name)
            owner = owners.setdefault(file.casefold(), note.name)
            if owner != note.name:
                report.skipped.append((file, f"the note {note.name!r} would have the file of {owner!r}: rename one"))
            elif _is_free(report, present.get(file), bases.get(file), note, file):
                try:
                    _write(root, file, note.text.encode("utf-8"))
                except OSError as error:
                    report.skipped.append((file, _reason(error)))
                    continue
                report.written.append(note.name)
                report.notes[file] = FileBase(note.name, note.digest)
        for file, base in bases.items():
            if file.casefold() not in owners:
                _remove(root, report, present.get(file), file, base)
        _write_list(root, notes, report)
    return report.made()


def _has_digest(file: File, digest: str) -> bool:
    """Return whether a file has a text; with line ends of Windows, or a mark in front, too, as an import reads it."""
    texts = [file.text, f"{BOM}{file.text}"] if file.marked else [file.text]
    return any(digest in (digest_of(text), digest_of(text.replace("\r\n", "\n"))) for text in texts)


def _is_free(report: _Report, current: File | None, base: FileBase | None, note: NoteVersion, file: str) -> bool:
    """Return whether the file of a note may be written; the report says why it may not."""
    if current is None:
        return True
    if current.skipped:
        report.skipped.append((file, current.skipped))
    elif _has_digest(current, note.digest):
        report.unchanged += 1
        report.notes[file] = FileBase(note.name, note.digest)
    elif base is not None and _has_digest(current, base.digest):
        return True
    else:
        report.conflict(note.name, file, note, current.text)
    return False


def _remove(root: int, report: _Report, current: File | None, file: str, base: FileBase) -> None:
    """Remove the file of a note that is not there any more, unless somebody edited it."""
    if current is not None and current.skipped:
        report.skipped.append((file, current.skipped))
        return
    if current is not None and not _has_digest(current, base.digest):
        report.conflict(base.name, file, None, current.text)
        return
    del report.notes[file]
    if current is not None:
        # Another export may have removed it.
        with _open_parent(root, file) as (parent, name), suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
        report.removed.append(base.name)


def import_notes(
    notes: Notes,
    folder: str | os.PathLike[str],
    *,
    resolved: Collection[str] = (),
    delete: bool = False,
    secrets: Secrets = None,
) -> NoteFiles:
    """Import what a person edited in a folder: each changed file becomes a new version of its note, each new file a new note.

    Args:
        resolved: names of notes whose conflict was resolved in the file, which becomes the next version.
        delete: delete the notes whose files were deleted.
        secrets: what to do with a file that holds a secret: see `kilburn.memory.secrets.screen`; a refused file is skipped.

    Raises:
        SpecError: no such folder, it has notes of another owner, or `resolved` names none of its notes. StoreError: the files
            before this one are imported; call again to continue.
    """
    place = Path(folder)
    with _open_folder(place) as root:
        bases = _read_list(root, notes)
        report, visited = _Report(bases), set[str]()
        for file in read_texts(place, MAX_FILE_BYTES):
            if file.skipped == HIDDEN:
                continue
            visited.add(file.path)
            try:
                _import_file(notes, report, file, bases.get(file.path), resolved, secrets)
            except (KernelError, SecretFound) as error:
                report.skipped.append((file.path, f"{error.what}: {error.advice}" if error.advice else error.what))
        for path, base in bases.items():
            # The files below a skipped folder were not looked at.
            if path not in visited and not any(str(above) in visited for above in PurePosixPath(path).parents):
                _handle_missing(notes, report, path, base, delete=delete)
        if strange := set(resolved) - {base.name for base in report.notes.values()}:
            raise SpecError(f"no file of the note {min(strange)!r} here", advice="give the name of a note, without .md")
        _write_list(root, notes, report)
    return report.made()


def _import_file(
    notes: Notes, report: _Report, file: File, base: FileBase | None, resolved: Collection[str], secrets: Secrets
) -> None:
    path, text = file.path, file.text
    if file.skipped or not path.endswith(SUFFIX):
        report.skipped.append((path, file.skipped or f"its name does not end in {SUFFIX}"))
        return
    name = checked_name(path.removesuffix(SUFFIX) if base is None else base.name)
    note = notes.find(name)
    if file.marked and note is not None and note.text.startswith(BOM):
        text = f"{BOM}{text}"  # the mark is part of the note
    if "\r" in text and digest_of(text) not in (base and base.digest, note and note.digest):
        text = text.replace("\r\n", "\n")
    digest = digest_of(text)
    if note is not None and note.digest == digest:
        report.unchanged += 1
        report.notes[path] = FileBase(name, digest)
    elif base is not None and base.digest == digest and name not in resolved:
        report.newer.append(name)
    elif name in resolved or (base is None if note is None else base is not None and base.digest == note.digest):
        try:
            version = notes.write(name, text, seen="" if note is None else note.digest, secrets=secrets, why=f"edited in {path}")
        except NoteConflict as error:
            report.conflict(name, path, error.note, text)
            return
        report.written.append(name)
        report.notes[path] = FileBase(name, version.digest)
    else:
        report.conflict(name, path, note, text)


def _handle_missing(notes: Notes, report: _Report, path: str, base: FileBase, *, delete: bool) -> None:
    """Handle a note whose file was deleted from the folder."""
    note = notes.find(base.name)
    if note is None:
        del report.notes[path]
    elif not delete:
        report.gone.append(base.name)
    elif note.digest != base.digest:
        report.conflict(base.name, path, note, "")
    else:
        notes.delete(base.name, seen=note.digest, why=f"{path} was deleted")
        report.removed.append(base.name)
        del report.notes[path]


@contextmanager
def _open_folder(place: Path) -> Iterator[int]:
    """Open a folder, which may itself be reached by a link, and yield its descriptor."""
    try:
        root = os.open(os.path.realpath(place), FOLDER)
    except (OSError, ValueError) as error:
        why = _reason(error) if isinstance(error, OSError) else str(error)
        raise SpecError(f"{str(place)[:200]!r}: {why}", advice="give a folder") from error
    try:
        yield root
    finally:
        os.close(root)


def _read_list(root: int, notes: Notes) -> dict[str, FileBase]:
    """Return from which note and version each file of a folder was written.

    Raises:
        SpecError: the list cannot be read, or belongs to another owner.
    """
    try:
        with open(os.open(LIST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=root), "rb") as file:
            listing = msgspec.json.decode(file.read(), type=_List)
        for path, base in listing.notes.items():
            checked_name(path.removesuffix(SUFFIX))
            checked_name(base.name)
            if not path.endswith(SUFFIX):
                raise KernelError(f"{path!r} is no file of a note", advice=f"those end in {SUFFIX}")
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, KernelError) as error:
        why = error.what if isinstance(error, KernelError) else str(error)
        raise SpecError(f"{LIST} cannot be used: {why}", advice="take it from Git, or export to another folder") from error
    if listing.owner != notes.owner:
        raise SpecError(f"these are notes of {listing.owner!r}", advice=f"give another folder for those of {notes.owner!r}")
    return listing.notes


def _write_list(root: int, notes: Notes, report: _Report) -> None:
    data = msgspec.json.encode(_List(owner=notes.owner, notes=dict(sorted(report.notes.items()))))
    _write(root, LIST, msgspec.json.format(data, indent=1) + b"\n")


@contextmanager
def _open_parent(root: int, path: str) -> Iterator[tuple[int, str]]:
    """Yield the descriptor of the folder that holds a path below `root`, and the last part of the path. Missing folders are
    made."""
    *parts, last = path.split("/")
    folder = os.dup(root)
    try:
        for part in parts:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=folder)
            inner = os.open(part, FOLDER, dir_fd=folder)
            os.close(folder)
            folder = inner
        yield folder, last
    finally:
        os.close(folder)


def _write(root: int, path: str, data: bytes) -> None:
    """Replace a whole file. It is never written in place, because it may be a hard link to another file."""
    with _open_parent(root, path) as (folder, name), write_file(_folder_path(folder) / name, force=True) as file:
        file.write(data)


def _folder_path(folder: int) -> Path:
    """Return a path to an open folder that stays valid if the folder is moved."""
    if sys.platform == "darwin":
        return Path(os.fsdecode(fcntl.fcntl(folder, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0")))
    return Path(f"/proc/self/fd/{folder}")


def _remove_parts(root: int, present: Iterable[str]) -> None:
    """Remove the part files of an export that was killed."""
    for path in present:
        if PART_NAME.fullmatch(path.rpartition("/")[2]):
            with suppress(OSError), _open_parent(root, path) as (folder, _):
                remove_parts(_folder_path(folder))


def _reason(error: OSError) -> str:
    return error.strerror or "it cannot be read"

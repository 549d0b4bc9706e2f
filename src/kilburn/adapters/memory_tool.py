"""Anthropic's memory tool (`memory_20250818`) over notes: the files below `/memories` are the notes of one owner.

`MemoryFiles.run` carries out one command and returns the model's result, in the words of Anthropic's own tool, which models know.
`memory_tool` makes the tool for the SDK's runner. Nothing of this is on unless it is handed to a model.

    notes, session = store.notes("ana"), store.session("monday", user="ana")
    client = wrap(Anthropic(), session)
    client.beta.messages.run_tools(model=..., messages=..., tools=[memory_tool(notes, session=session)])

An edit is a version of the note, by the policy `agent`: it is trusted as an agent's words, or as a tool's once the agent has read
what a tool returned. It is forgotten with the pages that the agent was shown. Writers take turns; an edit of a version that has
changed since is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from kilburn.errors import (
    KernelError,
    MemoryRefused,
    MissingExtra,
    NoteConflict,
    SpecError,
    StoreStale,
    ToolError,
)
from kilburn.kernel.session import Session
from kilburn.memory.notes import Notes, NoteVersion
from kilburn.memory.secrets import Secrets
from kilburn.memory.taint import shown_pages
from kilburn.memory.taint import tainted as is_tainted
from kilburn.message import Kind, Trust
from kilburn.move import Add, Retire
from kilburn.page import Place

__all__ = ["MemoryFiles", "memory_tool"]

ROOT = "/memories"

NAME = "memory"
"""The tool's name, as models call it."""

LINE_NUMBER_WIDTH = 6
"""Characters of a line number."""

LEVELS = 2
"""Levels below a folder that `view` lists."""

CONTEXT_LINES = 2
"""Lines before and after a replacement in the message about it."""

MAX_ATTEMPTS = 20
"""How often an edit is repeated because another writer was faster."""

_ENCODED = re.compile(r"%(?:2e|2f|5c|00)", re.IGNORECASE)
"""Percent-encoded dots, slashes and NULs: no note needs them."""


class _View(msgspec.Struct, tag_field="command", tag="view"):
    path: str
    view_range: list[int] | None = None


class _Create(msgspec.Struct, tag_field="command", tag="create"):
    path: str
    file_text: str


class _StrReplace(msgspec.Struct, tag_field="command", tag="str_replace"):
    path: str
    old_str: str
    new_str: str = ""


class _Insert(msgspec.Struct, tag_field="command", tag="insert"):
    path: str
    insert_line: int
    insert_text: str


class _Delete(msgspec.Struct, tag_field="command", tag="delete"):
    path: str


class _Rename(msgspec.Struct, tag_field="command", tag="rename"):
    old_path: str
    new_path: str


_Command = _View | _Create | _StrReplace | _Insert | _Delete | _Rename


class MemoryFiles:
    """Notes as files below `/memories`, for one run of an agent.

    Args:
        policy: who writes, for the ledger.
        session: where the conversation is kept. What the model is shown there is among the sources of what it writes, and a
            tool's result there taints it. Without one, a receipt of `forget` lists what was written as notes that
            may be concerned.
        clean: tools whose results in the session hold nobody else's words.
        tainted: see the attribute.
        secrets: what to do with a text that holds a secret: see `kilburn.memory.secrets.screen`.

    Attributes:
        tainted: whether the model has read what a tool returned, or the name or text of a note that a tool's text got into. Set
            it to True when a tool has run whose result is not kept in the session.
    """

    def __init__(
        self,
        notes: Notes,
        *,
        policy: str = "agent",
        session: Session | None = None,
        clean: Collection[str] = (),
        tainted: bool = False,
        secrets: Secrets = None,
    ) -> None:
        self.notes, self.policy, self.tainted, self.secrets = notes, policy, tainted, secrets
        self._session, self._clean = session, {NAME, *clean}
        self._read: set[int] = set()
        if session is not None and any(page.name == NAME for page in session.window.pages.originals()):
            # The conversation continues, and does not record which notes it has read.
            for note in notes.list():
                self._see(note)

    def run(self, command: Mapping[str, Any]) -> str:
        """Carry out a command; return the tool's result.

        Args:
            command: the input of the model's call: `{"command": "view", "path": "/memories"}`.

        Raises:
            ToolError: the command failed; `what` is the text for the model. StoreError.
        """
        if self._session is not None:
            self.tainted = self.tainted or is_tainted(self._session, self._clean)
        try:
            return self._carry_out(msgspec.convert(dict(command), _Command))
        except (msgspec.ValidationError, TypeError) as error:
            raise ToolError(f"not a command of the memory tool: {error}") from error
        except (KernelError, MemoryRefused) as error:
            raise ToolError(f"{error.what}: {error.advice}" if error.advice else error.what) from error
        except (SpecError, UnicodeEncodeError) as error:
            raise ToolError("a text with half a character in it: leave it out") from error

    def _carry_out(self, command: _Command) -> str:
        """Return the tool's result."""
        match command:
            case _View():
                return self._view(command)
            case _Create():
                return self._create(command)
            case _StrReplace():
                return self._edited(command.path, lambda text: _replaced(text, command))
            case _Insert():
                return self._edited(command.path, lambda text: _inserted(text, command))
            case _Delete():
                return self._again(lambda: self._delete(command))
            case _Rename():
                return self._again(lambda: self._rename(command))

    def _view(self, command: _View) -> str:
        name = _note_name(command.path)
        note = self._find(name)
        if note is None:
            return self._listing(command.path, name)
        self._see(note)
        lines, first = note.text.split("\n"), 1
        if command.view_range and len(command.view_range) == 2:
            first = max(1, command.view_range[0])
            lines = lines[first - 1 : None if command.view_range[1] == -1 else command.view_range[1]]
        return f"Here's the content of {command.path} with line numbers:\n" + _numbered(lines, first)

    def _listing(self, path: str, folder: str) -> str:
        notes = self.notes.list(folder)
        if not notes and folder:
            raise ToolError(f"The path {path} does not exist. Please provide a valid path.")
        # A name is text of its writer, too.
        self.tainted = self.tainted or any(note.trust < Trust.AGENT for note in notes)
        sizes: dict[str, int] = {}
        texts = self.notes.texts(notes)
        for note in notes:
            size = len(texts[note.digest].encode("utf-8"))
            parts = note.name.removeprefix(f"{folder}/" if folder else "").split("/")
            for depth in range(1, min(LEVELS, len(parts)) + 1):
                inner = "/".join(parts[:depth]) + ("/" if depth < len(parts) else "")
                sizes[inner] = sizes.get(inner, 0) + size
        head = f"Here're the files and directories up to {LEVELS} levels deep in {path}, excluding hidden items:"
        whole = sum(size for inner, size in sizes.items() if "/" not in inner.rstrip("/"))
        # A folder comes before its contents.
        order = sorted(sizes, key=lambda inner: [part for part in inner.split("/") if part])
        return "\n".join([head, f"{_size(whole)}\t{path}", *(f"{_size(sizes[inner])}\t{path}/{inner}" for inner in order)])

    def _create(self, command: _Create) -> str:
        name = _file_name(command.path)
        try:
            self._write(name, command.file_text, "")
        except NoteConflict:
            raise ToolError(f"File {command.path} already exists") from None
        return f"File created successfully at: {command.path}"

    def _edited(self, path: str, edit: Callable[[str], tuple[str, str]]) -> str:
        def edited() -> str:
            name = _note_name(path)
            note = self._find(name)
            if note is None:
                if not name or self.notes.list(name):
                    raise ToolError(f"The path {path} is not a file.")
                raise ToolError(f"The path {path} does not exist. Please provide a valid path.")
            self._see(note)
            text, answer = edit(note.text)
            self._write(name, text, note.digest)
            return answer

        return self._again(edited)

    def _delete(self, command: _Delete) -> str:
        head, pages = self.notes.head, self._below(command.path, "delete")
        if not pages:
            raise ToolError(f"The path {command.path} does not exist")
        retired = Retire(tuple(note.page for note in pages.values()), why="deleted")
        self._apply([note.name for note in pages.values()], retired, head=head)
        return f"Successfully deleted {command.path}"

    def _rename(self, command: _Rename) -> str:
        head, pages, to = self.notes.head, self._below(command.old_path, "rename"), _file_name(command.new_path)
        if self._find(to) is not None or self.notes.list(to):
            raise ToolError(f"The destination {command.new_path} already exists")
        if not pages:
            raise ToolError(f"The path {command.old_path} does not exist")
        cites = tuple(self._shown_pages())
        changes: list[Add | Retire] = [
            Add(text=note.text, kind=Kind.TEXT, name=_note_name(f"{ROOT}/{to}{rest}"), sources=(note.page,), cites=cites)
            for rest, note in pages.items()
        ]
        names = [note.name for note in pages.values()] + [add.name for add in changes if isinstance(add, Add)]
        changes += [Retire((note.page,), refers=at) for at, note in enumerate(pages.values())]
        self._apply(names, *changes, head=head)
        return f"Successfully renamed {command.old_path} to {command.new_path}"

    def _below(self, path: str, doing: str) -> dict[str, NoteVersion]:
        """Return the note at a path, or all notes in a folder, by their names without the path."""
        name = _note_name(path)
        if not name:
            raise ToolError(f"Cannot {doing} the {ROOT} directory itself")
        note = self._find(name)
        return {"": note} if note is not None else {note.name.removeprefix(name): note for note in self.notes.list(name)}

    def _write(self, name: str, text: str, digest: str) -> None:
        if not text.strip():
            raise ToolError(f"{ROOT}/{name} would be empty: write something into it, or delete it")
        write = partial(self.notes.write, policy=self.policy, tainted=self.tainted, secrets=self.secrets)
        write(name, text, seen=digest, sources=sorted(self._read_pages()), cites=self._shown_pages())

    def _find(self, name: str) -> NoteVersion | None:
        return self.notes.find(name) if name else None

    def _see(self, note: NoteVersion) -> None:
        """Remember that the model reads a note."""
        self._read.add(note.page)
        self.tainted = self.tainted or note.trust < Trust.AGENT

    def _read_pages(self) -> Iterator[int]:
        """Return the versions that the model has read, without forgotten ones."""
        rows = self.notes.collection.backend.read((self.notes.collection.number, page) for page in self._read)
        return (page for (_, page), (_, state) in rows.items() if state.at is not Place.DROPPED)

    def _shown_pages(self) -> Sequence[tuple[int, int]]:
        return () if self._session is None else shown_pages(self._session, self._clean)

    def _apply(self, names: Sequence[str], *changes: Add | Retire, head: int) -> None:
        self.notes.apply(names, *changes, policy=self.policy, tainted=self.tainted, seen=head)

    def _again(self, work: Callable[[], str]) -> str:
        for _ in range(MAX_ATTEMPTS):
            try:
                return work()
            except (NoteConflict, StoreStale):
                continue
        return work()


def _note_name(path: str) -> str:
    """Return the name of the note at a path, or "" for `/memories` itself.

    Raises:
        ToolError: it leads elsewhere. KernelError: it cannot be the name of a note.
    """
    if path != ROOT and not path.startswith(f"{ROOT}/"):
        raise ToolError(f"Path must start with {ROOT}, got: {path}")
    name = path[len(ROOT) :].strip("/")
    if ".." in name.split("/") or _ENCODED.search(name):
        raise ToolError(f"Path {path} would escape {ROOT} directory")
    return name


def _file_name(path: str) -> str:
    name = _note_name(path)
    if not name or path.endswith("/"):
        raise ToolError(f"The path {path} is not a file.")
    return name


def _replaced(text: str, command: _StrReplace) -> tuple[str, str]:
    """Return a text with one replacement, and the message about it."""
    old, positions = command.old_str, places(text, command.old_str)
    if not positions:
        raise ToolError(f"No replacement was performed, old_str `{old}` did not appear verbatim in {command.path}.")
    if len(positions) > 1:
        lines = ", ".join(str(text.count("\n", 0, at) + 1) for at in positions)
        raise ToolError(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines: {lines}. Please ensure it is unique"
        )
    changed, new_text = text.count("\n", 0, positions[0]), text.replace(old, command.new_str)
    first = max(0, changed - CONTEXT_LINES)
    snippet = new_text.split("\n")[first : changed + CONTEXT_LINES + 1]
    message = "The memory file has been edited. Here is the snippet showing the change (with line numbers):\n"
    return new_text, message + _numbered(snippet, first + 1)


def places(text: str, old: str) -> list[int]:
    """Return the positions of a text, overlapping ones too; none for an empty text."""
    positions = list[int]()
    at = text.find(old) if old else -1
    while at >= 0:
        positions.append(at)
        at = text.find(old, at + 1)
    return positions


def _inserted(text: str, command: _Insert) -> tuple[str, str]:
    """Return a text with another one inserted after a line, and the message about it."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if not 0 <= command.insert_line <= len(lines):
        raise ToolError(
            f"Invalid `insert_line` parameter: {command.insert_line}. It should be within the range [0, {len(lines)}]."
        )
    lines.insert(command.insert_line, command.insert_text.rstrip("\n"))
    return "\n".join(lines) + "\n", f"The file {command.path} has been edited."


def _numbered(lines: Sequence[str], first: int) -> str:
    return "\n".join(f"{number:>{LINE_NUMBER_WIDTH}}\t{line}" for number, line in enumerate(lines, first))


def _size(count: int) -> str:
    """Return a number of bytes as `ls -h` writes it."""
    step = min(max(0, count.bit_length() - 1) // 10, 3)
    size = count / 1024**step
    return f"{int(size) if size == int(size) else f'{size:.1f}'}{'BKMG'[step]}"


def memory_tool(notes: Notes, **options: Any) -> Any:
    """Return the memory tool for the runner of Anthropic's SDK (`client.beta.messages.run_tools`). Its attribute `files` is the
    `MemoryFiles` that carries out its calls.

    Args:
        notes: of the owner.
        options: the keyword arguments of `MemoryFiles`, such as `session`.

    Raises:
        MissingExtra: the SDK is not installed.
    """
    try:
        from anthropic.lib.tools import BetaAbstractMemoryTool
        from anthropic.lib.tools import ToolError as Told
    except ImportError:
        raise MissingExtra("anthropic", "anthropic") from None

    class NotesTool(BetaAbstractMemoryTool):
        """Anthropic's tool, whose files are notes."""

        files = MemoryFiles(notes, **options)

        def execute(self, command: Any) -> Any:
            """Carry out a command."""
            try:
                arguments = command.to_dict() if hasattr(command, "to_dict") else dict(command)
                return self.files.run(arguments)
            except ToolError as error:
                raise Told(error.what) from error

        view = create = str_replace = insert = delete = rename = execute

    return NotesTool()

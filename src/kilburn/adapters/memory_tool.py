"""Anthropic's memory tool (`memory_20250818`) over notes: the files below `/memories` are the notes of one owner.

`MemoryFiles.run` carries out one command and returns the model's result, in the words of Anthropic's own tool, which models know.
`memory_tool` makes the tool for the SDK's runner. Nothing of this is on unless it is handed to a model.

    notes, session = store.notes("ana"), store.session("monday", user="ana")
    client = wrap(Anthropic(), session)
    client.beta.messages.run_tools(model=..., messages=..., tools=[memory_tool(notes, session=session)])

An edit is a version of the note, by the policy `agent`: it is trusted as an agent's words, or as a tool's once the agent has read
what a tool returned. It is forgotten with what the agent was shown. Two writers edit one after the other; what does not
fit any more is refused.
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
    UnknownAddress,
)
from kilburn.kernel.session import Session
from kilburn.kernel.taint import shown_pages
from kilburn.kernel.taint import tainted as is_tainted
from kilburn.memory.notes import Notes, NoteVersion
from kilburn.memory.secrets import Secrets
from kilburn.message import Kind, Trust
from kilburn.move import Add, Retire
from kilburn.page import Place

__all__ = ["MemoryFiles", "memory_tool"]

ROOT = "/memories"

NAME = "memory"
"""Of the tool, as models call it."""

WIDTH = 6
"""Of the numbers of lines."""

LEVELS = 2
"""Below a folder that `view` lists."""

AROUND = 2
"""Lines that stand before and after a replacement in what is told of it."""

TRIES = 20
"""How often an edit is made anew because another writer was faster."""

_ENCODED = re.compile(r"%(?:2e|2f|5c|00)", re.IGNORECASE)
"""Dots, slashes and the like in disguise: no note needs them."""


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
            # The conversation goes on, and what it has read of them does not stand in it.
            for note in notes.list():
                self._see(note)

    def run(self, command: Mapping[str, Any]) -> str:
        """Carry out a command; return what the model is told.

        Args:
            command: the input of the model's call: `{"command": "view", "path": "/memories"}`.

        Raises:
            ToolError: it cannot be done; `what` is what the model is told. StoreError.
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

    def _carry_out(self, asked: _Command) -> str:
        """What the model is told."""
        match asked:
            case _View():
                return self._view(asked)
            case _Create():
                return self._create(asked)
            case _StrReplace():
                return self._edited(asked.path, lambda text: _replaced(text, asked))
            case _Insert():
                return self._edited(asked.path, lambda text: _inserted(text, asked))
            case _Delete():
                return self._again(lambda: self._delete(asked))
            case _Rename():
                return self._again(lambda: self._rename(asked))

    def _view(self, asked: _View) -> str:
        name = _name_of(asked.path)
        note = self._find(name)
        if note is None:
            return self._listing(asked.path, name)
        self._see(note)
        lines, first = note.text.split("\n"), 1
        if asked.view_range and len(asked.view_range) == 2:
            first = max(1, asked.view_range[0])
            lines = lines[first - 1 : None if asked.view_range[1] == -1 else asked.view_range[1]]
        return f"Here's the content of {asked.path} with line numbers:\n" + _numbered(lines, first)

    def _listing(self, path: str, folder: str) -> str:
        found = self.notes.list(folder)
        if not found and folder:
            raise ToolError(f"The path {path} does not exist. Please provide a valid path.")
        # A name is a text of its writer's, too.
        self.tainted = self.tainted or any(note.trust < Trust.AGENT for note in found)
        sizes: dict[str, int] = {}
        texts = self.notes.texts(found)
        for note in found:
            size = len(texts[note.digest].encode("utf-8"))
            parts = note.name.removeprefix(f"{folder}/" if folder else "").split("/")
            for depth in range(1, min(LEVELS, len(parts)) + 1):
                inner = "/".join(parts[:depth]) + ("/" if depth < len(parts) else "")
                sizes[inner] = sizes.get(inner, 0) + size
        head = f"Here're the files and directories up to {LEVELS} levels deep in {path}, excluding hidden items:"
        whole = sum(size for inner, size in sizes.items() if "/" not in inner.rstrip("/"))
        # A folder stands before what is in it.
        order = sorted(sizes, key=lambda inner: [part for part in inner.split("/") if part])
        return "\n".join([head, f"{_size(whole)}\t{path}", *(f"{_size(sizes[one])}\t{path}/{one}" for one in order)])

    def _create(self, asked: _Create) -> str:
        name = _file_of(asked.path)
        try:
            self._write(name, asked.file_text, "")
        except NoteConflict:
            raise ToolError(f"File {asked.path} already exists") from None
        return f"File created successfully at: {asked.path}"

    def _edited(self, path: str, edit: Callable[[str], tuple[str, str]]) -> str:
        def edited() -> str:
            name = _name_of(path)
            note = self._find(name)
            if note is None:
                if not name or self.notes.list(name):
                    raise ToolError(f"The path {path} is not a file.")
                raise ToolError(f"The path {path} does not exist. Please provide a valid path.")
            self._see(note)
            text, told = edit(note.text)
            self._write(name, text, note.digest)
            return told

        return self._again(edited)

    def _delete(self, asked: _Delete) -> str:
        head, pages = self.notes.head, self._below(asked.path, "delete")
        if not pages:
            raise ToolError(f"The path {asked.path} does not exist")
        retired = Retire(tuple(note.page for note in pages.values()), why="deleted")
        self._apply([note.name for note in pages.values()], retired, seen=head)
        return f"Successfully deleted {asked.path}"

    def _rename(self, asked: _Rename) -> str:
        head, pages, to = self.notes.head, self._below(asked.old_path, "rename"), _file_of(asked.new_path)
        if self._find(to) is not None or self.notes.list(to):
            raise ToolError(f"The destination {asked.new_path} already exists")
        if not pages:
            raise ToolError(f"The path {asked.old_path} does not exist")
        shown = tuple(self._shown())
        changes: list[Add | Retire] = [
            Add(text=note.text, kind=Kind.TEXT, name=_name_of(f"{ROOT}/{to}{rest}"), sources=(note.page,), cites=shown)
            for rest, note in pages.items()
        ]
        names = [note.name for note in pages.values()] + [add.name for add in changes if isinstance(add, Add)]
        changes += [Retire((note.page,), refers=at) for at, note in enumerate(pages.values())]
        self._apply(names, *changes, seen=head)
        return f"Successfully renamed {asked.old_path} to {asked.new_path}"

    def _below(self, path: str, doing: str) -> dict[str, NoteVersion]:
        """The notes that a path means: one, or all in a folder; by what is left of their names behind the path's."""
        name = _name_of(path)
        if not name:
            raise ToolError(f"Cannot {doing} the {ROOT} directory itself")
        note = self._find(name)
        return {"": note} if note is not None else {one.name.removeprefix(name): one for one in self.notes.list(name)}

    def _write(self, name: str, text: str, seen: str) -> None:
        if not text.strip():
            raise ToolError(f"{ROOT}/{name} would be empty: write something into it, or delete it")
        write = partial(self.notes.write, policy=self.policy, tainted=self.tainted, secrets=self.secrets)
        write(name, text, seen=seen, sources=sorted(self._there()), cites=self._shown())

    def _find(self, name: str) -> NoteVersion | None:
        try:
            return self.notes.read(name) if name else None
        except UnknownAddress:
            return None

    def _see(self, note: NoteVersion) -> None:
        """Remember that the model reads a note."""
        self._read.add(note.page)
        self.tainted = self.tainted or note.trust < Trust.AGENT

    def _there(self) -> Iterator[int]:
        """The versions that the model has read, without those that were forgotten since."""
        rows = self.notes.collection.backend.read((self.notes.collection.number, page) for page in self._read)
        return (page for (_, page), (_, state) in rows.items() if state.at is not Place.DROPPED)

    def _shown(self) -> Sequence[tuple[int, int]]:
        return () if self._session is None else shown_pages(self._session, self._clean)

    def _apply(self, names: Sequence[str], *changes: Add | Retire, seen: int) -> None:
        self.notes.apply(names, *changes, policy=self.policy, tainted=self.tainted, seen=seen)

    def _again(self, work: Callable[[], str]) -> str:
        for _ in range(TRIES):
            try:
                return work()
            except (NoteConflict, StoreStale):
                continue
        return work()


def _name_of(path: str) -> str:
    """The name of the note at a path; "" for `/memories` itself.

    Raises:
        ToolError: it leads elsewhere. KernelError: it cannot be the name of a note.
    """
    if path != ROOT and not path.startswith(f"{ROOT}/"):
        raise ToolError(f"Path must start with {ROOT}, got: {path}")
    name = path[len(ROOT) :].strip("/")
    if ".." in name.split("/") or _ENCODED.search(name):
        raise ToolError(f"Path {path} would escape {ROOT} directory")
    return name


def _file_of(path: str) -> str:
    name = _name_of(path)
    if not name or path.endswith("/"):
        raise ToolError(f"The path {path} is not a file.")
    return name


def _replaced(text: str, asked: _StrReplace) -> tuple[str, str]:
    """A text with one replacement, and what is told of it."""
    old, found = asked.old_str, places(text, asked.old_str)
    if not found:
        raise ToolError(f"No replacement was performed, old_str `{old}` did not appear verbatim in {asked.path}.")
    if len(found) > 1:
        lines = ", ".join(str(text.count("\n", 0, at) + 1) for at in found)
        raise ToolError(
            f"No replacement was performed. Multiple occurrences of old_str `{old}` in lines: {lines}. Please ensure it is unique"
        )
    changed, made = text.count("\n", 0, found[0]), text.replace(old, asked.new_str)
    first = max(0, changed - AROUND)
    shown = made.split("\n")[first : changed + AROUND + 1]
    told = "The memory file has been edited. Here is the snippet showing the change (with line numbers):\n"
    return made, told + _numbered(shown, first + 1)


def places(text: str, old: str) -> list[int]:
    """Where a text stands, those that overlap too; nowhere if it is empty."""
    found = list[int]()
    at = text.find(old) if old else -1
    while at >= 0:
        found.append(at)
        at = text.find(old, at + 1)
    return found


def _inserted(text: str, asked: _Insert) -> tuple[str, str]:
    """A text with a text inserted after a line, and what is told of it."""
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if not 0 <= asked.insert_line <= len(lines):
        raise ToolError(f"Invalid `insert_line` parameter: {asked.insert_line}. It should be within the range [0, {len(lines)}].")
    lines.insert(asked.insert_line, asked.insert_text.rstrip("\n"))
    return "\n".join(lines) + "\n", f"The file {asked.path} has been edited."


def _numbered(lines: Sequence[str], first: int) -> str:
    return "\n".join(f"{number:>{WIDTH}}\t{line}" for number, line in enumerate(lines, first))


def _size(count: int) -> str:
    """Bytes as `ls -h` writes them."""
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
                given = command.to_dict() if hasattr(command, "to_dict") else dict(command)
                return self.files.run(given)
            except ToolError as error:
                raise Told(error.what) from error

        view = create = str_replace = insert = delete = rename = execute

    return NotesTool()

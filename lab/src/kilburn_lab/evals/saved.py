"""Measured cells in a file of JSON lines, so that a long measurement can be continued.

A cell is used again only for the same runs, references, spec and model. It is not checked whether the code is still
the same: after a change, begin a new file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from kilburn.errors import SpecError
from kilburn.file import check_target, write_file

START = b'{"of":'
"""How a line begins."""


class Keyed(Protocol):
    """A struct of msgspec that knows what it was measured on, beside the sample."""

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The same for the same measurement."""
        ...


C = TypeVar("C", bound=Keyed)


class _SavedCell(msgspec.Struct, Generic[C]):
    of: str
    cell: C


class Digested(msgspec.Struct, frozen=True):
    """What came of a prompt. `digest` is over all that the prompt was made from, so a program that makes the same one
    need not ask again."""

    digest: str

    @property
    def key(self) -> tuple[str]:
        """Its digest."""
        return (self.digest,)


D = TypeVar("D", bound=Digested)


def asked_once(saved: SavedCells[D] | None, what: object, ask: Callable[[str], D]) -> D:
    """What came of asking this before, or what comes of asking it now, which is saved.

    Args:
        what: all that the answer depends on. ask: gets its digest.
    """
    digest = hashlib.sha256(msgspec.json.encode(what)).hexdigest()
    known = saved.find(digest) if saved is not None else None
    if known is None:
        known = ask(digest)
        if saved is not None:
            saved.add(known)
    return known


class SavedCells(Generic[C]):
    """A file of cells.

    Args:
        path: the file.
        digest: of the sample that they are measured on.
        kind: what a cell is.
        resume: whether to continue an existing file; otherwise a new one is begun.
        force: whether a new file may replace an existing one.

    Raises:
        SpecError: it cannot be read or written, is there without `resume` or `force`, or is no file of cells.
    """

    def __init__(self, path: Path, digest: str, kind: type[C], *, resume: bool, force: bool = False) -> None:
        self.path, self._digest, self._kind = path, digest, kind
        self._cells: dict[tuple[Hashable, ...], C] = {}
        try:
            if resume and path.exists():
                self._read()
            else:
                with write_file(path, force=force):
                    pass  # an empty file, so that an unwritable one is found before the work
        except OSError as error:
            raise SpecError(f"cannot use {path}: {error.strerror or error}", advice="give a file that can be written") from error

    def _read(self) -> None:
        check_target(self.path, force=True)
        raw = self.path.read_bytes()
        # Its writer may have been stopped in the middle of a line.
        if not all(START.startswith(line[: len(START)]) for line in raw.split(b"\n")):
            raise SpecError(f"{self.path} is no file of cells", advice="give the file that --out wrote")
        for line in raw.split(b"\n"):
            try:
                found: _SavedCell[C] = msgspec.json.decode(line, type=_SavedCell[self._kind])  # type: ignore[name-defined]
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if found.of == self._digest:
                self._cells[found.cell.key] = found.cell
        if raw and not raw.endswith(b"\n"):
            self._append(b"\n")

    def find(self, *key: Hashable) -> C | None:
        """The cell of a key, or None if it was not measured."""
        return self._cells.get(key)

    def add(self, cell: C) -> None:
        """Append a cell."""
        self._cells[cell.key] = cell
        self._append(msgspec.json.encode(_SavedCell(self._digest, cell)) + b"\n")

    def _append(self, line: bytes) -> None:
        with open(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), "ab") as file:
            file.write(line)

"""Cells that were measured already, kept in a file of JSON lines, so that a long measurement can go on.

A cell counts again only for the same runs, references, spec and model. Whether the code behind it is still
the same nobody checks: after a change, begin a new file.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kilburn.errors import SpecError
from kilburn.evals.outcomes import Cell

__all__ = ["Saved"]


class _Line(msgspec.Struct):
    of: str
    cell: Cell


class Saved:
    """A file of cells.

    Args:
        path: where they go.
        digest: of the sample that they are measured on.
        resume: whether to read what is there; else the file begins anew.

    Raises:
        SpecError: it cannot be read or written.
    """

    def __init__(self, path: Path, digest: str, *, resume: bool) -> None:
        self.path, self._digest = path, digest
        self._cells: dict[tuple[str, str, str, int], Cell] = {}
        try:
            if resume and path.exists():
                self._read()
            else:
                path.write_bytes(b"")
        except OSError as error:
            raise SpecError(f"cannot use {path}: {error.strerror or error}", advice="give a file that can be written") from error

    def _read(self) -> None:
        raw = self.path.read_bytes()
        for line in raw.split(b"\n"):
            try:
                found = msgspec.json.decode(line, type=_Line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue  # whoever wrote it was stopped in the middle of the line
            if found.of == self._digest:
                self._cells[_key(found.cell)] = found.cell
        if raw and not raw.endswith(b"\n"):
            with self.path.open("ab") as file:
                file.write(b"\n")

    def find(self, label: str, spec: str, model: str, window: int) -> Cell | None:
        """The cell, where it was measured."""
        return self._cells.get((label, spec, model, window))

    def add(self, cell: Cell) -> None:
        """Append a cell."""
        self._cells[_key(cell)] = cell
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(_Line(self._digest, cell)) + b"\n")


def _key(cell: Cell) -> tuple[str, str, str, int]:
    return cell.policy, cell.spec, cell.model, cell.window

"""The demo's tools: list, read and search a tree of Python sources. They only read, and only below its root."""

from __future__ import annotations

import re
import tokenize
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from kilburn.agents.tool import Tool

FOREIGN = frozenset({"__pycache__", "dist-packages", "ensurepip", "site-packages"})
"""Folders that are not part of the library."""

SKIPPED = FOREIGN | {"idle_test", "idlelib", "lib2to3", "test", "tests", "turtledemo"}
"""Folders that are skipped unless `whole` is set."""

COUNT = 60
"""Entries of one output."""


class Library:
    """Tools for a tree. `covered` has the last line read of each file.

    Args:
        root: the folder to which paths are relative.
        whole: include the folders of tests and applications.
    """

    def __init__(self, root: Path, *, whole: bool = False) -> None:
        self.root = root.resolve()
        self.covered: dict[str, int] = {}
        self._skipped = FOREIGN if whole else SKIPPED

    def tools(self) -> list[Tool]:
        """Return the three tools for an agent."""
        return [Tool(self.list_folder, name="list"), Tool(self.read), Tool(self.search)]

    def list_folder(self, path: str = ".", start: int = 1, count: int = COUNT) -> str:
        """List a folder: its sub-folders, and its Python files with their number of lines; go on with `start`."""
        entries = sorted(self._entries(path))
        descriptions = [
            f"{entry.name}/" if entry.is_dir() else f"{entry.name} {len(read_lines(entry))} lines" for entry in entries
        ]
        return self._show(f"folder {path} entries", descriptions, start, count)

    def read(self, path: str, start: int = 1, count: int = COUNT) -> str:
        """Read `count` lines of a file from line `start` on; each is shown behind its number and a tab."""
        lines = read_lines(self._below(path))
        self.covered[path] = max(self.covered.get(path, 0), min(start - 1 + count, len(lines)))
        return self._show(f"{path} lines", [f"{number}\t{line}" for number, line in enumerate(lines, start=1)], start, count)

    def search(self, pattern: str, path: str = ".", start: int = 1, count: int = COUNT) -> str:
        """Search the Python files of a folder for a regular expression: file, number and line of a match; go on with `start`."""
        expression = re.compile(pattern)
        matches = [
            f"{file.relative_to(self.root).as_posix()} {number}: {line}"
            for file in sorted(self._entries(path))
            if file.is_file()
            for number, line in enumerate(read_lines(file), start=1)
            if expression.search(line)
        ]
        return self._show(f"{path} matches", matches, start, count)

    def _entries(self, path: str) -> list[Path]:
        entries = [entry for entry in self._below(path).iterdir() if entry.name not in self._skipped]
        return [entry for entry in entries if (entry.suffix == ".py" if entry.is_file() else any(entry.glob("*.py")))]

    def _below(self, path: str) -> Path:
        target = (self.root / path).resolve()
        if not target.is_relative_to(self.root):
            raise ValueError(f"{path} is outside of the tree; give a path below it")
        return target

    def _show(self, title: str, entries: Sequence[str], start: int, count: int) -> str:
        """Return some of the entries, below a line with their range and total."""
        visible = entries[start - 1 : start - 1 + count]
        output = "\n".join([f"{title} {start}-{start - 1 + len(visible)} of {len(entries)}", *visible])
        return output.encode("utf-8", "backslashreplace").decode("utf-8")


@lru_cache(maxsize=64)
def read_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a Python file in its own encoding, without line ends. A form feed ends no line."""
    try:
        with path.open("rb") as source:
            encoding, _ = tokenize.detect_encoding(source.readline)
    except SyntaxError:
        encoding = "utf-8"
    lines = path.read_text(encoding, errors="replace").split("\n")
    return tuple(lines if lines[-1] else lines[:-1])

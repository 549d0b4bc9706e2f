"""The demo's tools: list, read, search and run, over one tree of Python sources.

They only read below the tree's root, and run nothing but this interpreter, without a shell. They
refuse to keep what they showed: they tell it to one listener, who may.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from kilburn.agents.tool import Tool

__all__ = ["READ", "Workshop", "lines_of"]

FOREIGN = frozenset({"__pycache__", "dist-packages", "ensurepip", "site-packages"})
"""Folders that are no part of the library, or only carry other packages."""

SKIPPED = FOREIGN | {"idle_test", "idlelib", "lib2to3", "test", "tests", "turtledemo"}
"""Further folders that are left out unless the whole is wanted."""

ENTRIES = 60
READ = 120
MATCHES = 60
LONGEST = 20_000
"""Characters of a command's output; what is longer is cut, and says so."""

SECONDS = 20.0


class Workshop:
    """Tools over a tree; `covered` has the last line read of each file.

    Args:
        root: the folder that paths are relative to.
        whole: also the folders that hold tests and applications rather than library.
        noted: told each output before anybody else sees it.
    """

    def __init__(self, root: Path, *, whole: bool = False, noted: Callable[[str], None] = lambda output: None) -> None:
        self.root = root.resolve()
        self._skipped = FOREIGN if whole else SKIPPED
        self.covered: dict[str, int] = {}
        self._noted = noted

    def tools(self) -> list[Tool]:
        """The four, as an agent takes them."""
        return [Tool(self.list_folder, name="list"), Tool(self.read), Tool(self.search), Tool(self.run)]

    def list_folder(self, path: str = ".", start: int = 1, count: int = ENTRIES) -> str:
        """List a folder: its sub-folders, and its Python files with their number of lines; go on with `start`."""
        folder = self._below(path)
        found = sorted(entry for entry in folder.iterdir() if self._wanted(entry))
        shown = found[start - 1 : start - 1 + count]
        head = f"{'root ' if path == '.' else ''}folder {path}: entries {start}-{start - 1 + len(shown)} of {len(found)}"
        return self._hand(
            [head, *(f"{entry.name}/" if entry.is_dir() else f"{entry.name} {len(lines_of(entry))} lines" for entry in shown)]
        )

    def read(self, path: str, start: int = 1, lines: int = READ) -> str:
        """Read `lines` lines of a file from line `start` on; each is shown behind its number and a tab."""
        every = lines_of(self._below(path))
        last = min(start - 1 + lines, len(every))
        body = [f"{number}\t{every[number - 1]}" for number in range(start, last + 1)]
        self.covered[path] = max(last, self.covered.get(path, 0))
        return self._hand([f"{path} lines {start}-{last} of {len(every)}", *body])

    def search(self, pattern: str, path: str = ".", start: int = 1) -> str:
        """Search the Python files of a folder for a regular expression; one line a match; go on with `start`."""
        folder = self._below(path)
        wanted = re.compile(pattern)
        found = [
            f"{file.relative_to(self.root).as_posix()}:{number}: {line}"
            for file in sorted(folder.iterdir())
            if file.is_file() and self._wanted(file)
            for number, line in enumerate(lines_of(file), start=1)
            if wanted.search(line)
        ]
        shown = found[start - 1 : start - 1 + MATCHES]
        return self._hand([f"matches {start}-{start - 1 + len(shown)} of {len(found)} in {path} for {pattern}", *shown])

    def run(self, arguments: list[str]) -> str:
        """Run this Python interpreter, isolated, with arguments such as ["-c", "print(1)"]; its output and status."""
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-I", "-B", *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=SECONDS,
                check=False,
            )
        said = done.stdout.decode("utf-8", "backslashreplace")
        cut = f"\n[cut at {LONGEST} of {len(said)} characters]" if len(said) > LONGEST else ""
        return self._hand([f"$ python {' '.join(arguments)}", said[:LONGEST] + cut, f"status {done.returncode}"])

    def _wanted(self, entry: Path) -> bool:
        if entry.name in self._skipped:
            return False
        return entry.suffix == ".py" if entry.is_file() else any(entry.glob("*.py"))

    def _below(self, path: str) -> Path:
        found = (self.root / path).resolve()
        if not found.is_relative_to(self.root):
            raise ValueError(f"{path} is outside of the tree; give a path below it")
        return found

    def _hand(self, lines: list[str]) -> str:
        output = "\n".join(lines).encode("utf-8", "backslashreplace").decode("utf-8")
        self._noted(output)
        return output


@lru_cache(maxsize=64)
def lines_of(path: Path) -> tuple[str, ...]:
    """The lines of a Python file, in its own encoding, without their ends; form feeds end no line."""
    try:
        with path.open("rb") as source:
            encoding, _ = tokenize.detect_encoding(source.readline)
    except SyntaxError:
        encoding = "utf-8"
    lines = path.read_text(encoding, errors="replace").split("\n")
    return tuple(lines if lines[-1] else lines[:-1])

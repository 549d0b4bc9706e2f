"""The input of a recursive model: a text, a file, several files, or a folder, as a variable of its sandbox.

It is never part of a window. The model is told its type, its size and its beginning. No copy of it is written to a disk: it is
passed in memory, so nothing of it remains if the program is killed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn.errors import SpecError

Source = str | Path | Sequence[Path] | Mapping[str, str]
"""A text; a file or a folder; several files and folders; or texts by name."""

MAX_HEAD_CHARS = 600
"""Characters of the beginning that the model sees."""

MAX_SAMPLE_CHARS = 100_000
"""Characters whose tokens are counted; the tokens of a longer text are extrapolated."""

MAX_NAMES = 10
"""Names of parts that the model sees."""


class Variable(msgspec.Struct, frozen=True, kw_only=True):
    """A text, ready for a sandbox.

    Args:
        data: the text, in UTF-8.
        index: name, start and end of each of several texts, in characters; empty for one text.
        characters: characters of all texts.
        tokens: approximate number of tokens.
        digest: SHA-256 of all texts and names.
        head: the beginning of the text.
    """

    data: bytes
    index: tuple[tuple[str, int, int], ...] = ()
    characters: int
    tokens: int
    digest: str
    head: str

    def describe(self) -> str:
        """Return the description of the text for the model: its type and size, and the names of its parts."""
        size = f"{self.characters:,} characters, about {self.tokens:,} tokens"
        if not self.index:
            return f"`context` is a str: {size}."
        names = [name for name, _, _ in self.index]
        listed = ", ".join(map(repr, names[:MAX_NAMES])) + (", ..." if len(names) > MAX_NAMES else "")
        return f"`context` is a dict of {len(names):,} texts by name: {size}. Names: {listed}"

    @property
    def setup(self) -> tuple[dict[str, Any], dict[str, bytes], str]:
        """For a sandbox: variables, files, and code that makes `context` of them."""
        if not self.index:
            return {}, {"context": self.data}, ""
        code = "context = {name: _text[start:end] for name, start, end in _index}\n_text = _index = None"
        return {"_index": [list(part) for part in self.index]}, {"_text": self.data}, code


def variable(source: Source, count: Callable[[str], int]) -> Variable:
    """Return a source as a variable.

    Bytes that are not UTF-8 become U+FFFD. A folder means all files below it, except hidden ones.

    Args:
        count: counts the tokens of a text.

    Raises:
        SpecError: no such file or folder, or nothing in it.
    """
    index: list[tuple[str, int, int]] = []
    if isinstance(source, str):
        text = source
    elif isinstance(source, Path) and not source.is_dir():
        text = _read(source)
    else:
        parts = source.items() if isinstance(source, Mapping) else read_files([source] if isinstance(source, Path) else source)
        pieces, at = list[str](), 0
        for name, piece in parts:
            index.append((name, at, at + len(piece)))
            pieces.append(piece)
            at += len(piece)
        text = "".join(pieces)
        if not index:
            raise SpecError("there is no file to ask about", advice="give a file, or a folder with files")
    data = text.encode("utf-8", "replace")
    sample = text[:MAX_SAMPLE_CHARS]
    tokens = count(sample) if len(text) <= MAX_SAMPLE_CHARS else round(count(sample) * len(text) / MAX_SAMPLE_CHARS)
    digest = hashlib.sha256(data + msgspec.json.encode(index)).hexdigest()
    return Variable(data=data, index=tuple(index), characters=len(text), tokens=tokens, digest=digest, head=text[:MAX_HEAD_CHARS])


def _read(path: Path) -> str:
    if path.is_char_device() or path.is_block_device():
        raise SpecError(f"{path} is a device", advice="give a file, a folder, or - for standard input")  # it may be endless
    try:
        return path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", advice="give a file that can be read") from None


def read_files(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of files, those of folders in the order of their names.

    Raises:
        SpecError: one cannot be read.
    """
    for path in paths:
        if not path.is_dir():
            yield str(path), _read(path)
            continue
        for inner in sorted(path.rglob("*")):
            below = inner.relative_to(path)
            if inner.is_file() and not any(part.startswith(".") for part in below.parts):
                yield below.as_posix(), _read(inner)

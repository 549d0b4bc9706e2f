"""Answers questions from memory alone: search, recall, and read the exact answer out of what came back.

It sees a question's text and two functions (`kilburn.demo.memory.Memory`). It imports nothing that
could reach a file, and never sees an expected answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from kilburn.demo.memory import Memory
from kilburn.demo.recollection import Chunk, NotFound, Recollection, Series, listing, outline, reads

__all__ = ["Answered", "answer"]

_SIGNATURE = re.compile(r"What is the exact signature of the function `(\w+)` in (\S+)\?")
_METHOD = re.compile(r"What is the exact signature of the method `(\w+)` of the class `(\w+)` in (\S+)\?")
_CONSTANT = re.compile(r"What is the value of the constant `(\w+)` in (\S+)\?")
_LINE = re.compile(r"What does line (\d+) of (\S+) say, exactly\?")
_PLACE = re.compile(r"Which file defines the (class|function) `(\w+)`\?")

_TOKEN = re.compile(
    r"""'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"|'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"|\#[^\n]*|[()\[\]{}:]""",
    re.DOTALL,
)


class Answered(NamedTuple):
    """An answer, "" where none was found; the page it was read from and the text around it there."""

    text: str
    address: str = ""
    context: str = ""


def answer(question: str, memory: Memory) -> Answered:
    """The exact answer to a question as `kilburn.demo.questions` asks them, from memory alone."""
    recollection = Recollection(memory)
    try:
        if found := _SIGNATURE.fullmatch(question):
            return _signature(recollection, found[2], found[1])
        if found := _METHOD.fullmatch(question):
            return _signature(recollection, found[3], found[1], found[2])
        if found := _CONSTANT.fullmatch(question):
            return _constant(recollection, found[2], found[1])
        if found := _LINE.fullmatch(question):
            return _line(recollection, found[2], int(found[1]))
        if found := _PLACE.fullmatch(question):
            return _place(recollection, found[1], found[2])
    except NotFound:
        pass
    return Answered("")


def _signature(memory: Recollection, path: str, name: str, owner: str = "") -> Answered:
    """The text from `def` to the colon, of a function or of a method of the class `owner`."""
    if owner:
        start = _find(memory, path, rf"class\s+{owner}\b", f"class {owner} {name}")
        number = _scan(memory, path, rf"[ \t]+(?:async\s+)?def\s+{name}\b", start)
    else:
        number = _find(memory, path, rf"(?:async\s+)?def\s+{name}\b", f"def {name}")
    text = ""
    for _, line in memory.lines(path, number):
        text += line + "\n"
        end = _colon(text)
        if end is not None:
            return _from(memory, path, number, text[:end].lstrip())
    raise NotFound(f"the end of {name}")


def _constant(memory: Recollection, path: str, name: str) -> Answered:
    """What stands behind the equals sign, without a comment."""
    number = _find(memory, path, rf"{name}\s*=[^=]", name)
    line = next(memory.lines(path, number))[1].split("=", 1)[1]
    comment = next((token.start() for token in _TOKEN.finditer(line) if token.group().startswith("#")), len(line))
    return _from(memory, path, number, line[:comment].strip())


def _line(memory: Recollection, path: str, number: int) -> Answered:
    return _from(memory, path, number, next(memory.lines(path, number))[1])


def _place(memory: Recollection, what: str, name: str) -> Answered:
    """The file in which a top-level definition was read, or which an outline names."""
    keyword = r"class" if what == "class" else r"(?:async\s+)?def"
    read = re.compile(rf"^\d+\t{keyword}\s+{name}\b.*", re.MULTILINE)
    outlined = re.compile(rf"^(\S+):\d+: {keyword}\s+{name}\b.*", re.MULTILINE)
    word = "class" if what == "class" else "def"
    for query in (f"{word} {name}", name):
        for hit in memory.search(query):
            if found := outlined.search(hit.text):
                return Answered(found[1], hit.address, found[0])
            if (found := read.search(hit.text)) and (path := memory.file_of(hit.address)):
                return Answered(path, hit.address, found[0])
    # A name that is an ordinary word drowns in a search: go through the outlines, folder by folder.
    folders = ["."]
    for folder in folders:
        within = "" if folder == "." else f"{folder}/"
        for chunk in _known(memory, listing(folder)):
            folders += [within + line[:-1] for line in memory.page(chunk.address).split("\n")[1:] if line.endswith("/")]
            if chunk.last == chunk.total:
                memory.follow(chunk, outline(folder))
        for chunk in _known(memory, outline(folder)):
            if found := outlined.search(memory.page(chunk.address)):
                return Answered(found[1], chunk.address, found[0])
    raise NotFound(name)


def _known(memory: Recollection, series: Series) -> Iterator[Chunk]:
    """As much of a series as memory holds: a folder may have been listed and not entered yet."""
    try:
        yield from memory.chunks(series)
    except NotFound:
        return


def _find(memory: Recollection, path: str, pattern: str, words: str) -> int:
    """The number of the first line of a file that begins like that: by search, else by going through the file again."""
    read = re.compile(rf"^(\d+)\t{pattern}", re.MULTILINE)
    outlined = re.compile(rf"^{re.escape(path)}:(\d+): {pattern}", re.MULTILINE)
    for hit in memory.search(f"{words} {path}"):
        if found := outlined.search(hit.text):
            return int(found[1])
        if (found := read.search(hit.text)) and memory.file_of(hit.address) == path:
            return int(found[1])
    return _scan(memory, path, pattern, 1)


def _scan(memory: Recollection, path: str, pattern: str, start: int) -> int:
    wanted = re.compile(pattern)
    for number, line in memory.lines(path, start):
        if wanted.match(line):
            return number
    raise NotFound(f"{pattern} in {path}")


def _from(memory: Recollection, path: str, number: int, text: str) -> Answered:
    chunk = memory.chunk(reads(path), number)
    near = [line for at, line in memory.numbered(chunk) if number - 2 <= at <= number + 8]
    return Answered(text, chunk.address, "\n".join(near))


def _colon(text: str) -> int | None:
    """Where the colon that ends a definition's header stands; None while it has not come yet."""
    depth = 0
    for token in _TOKEN.finditer(text):
        mark = token.group()
        if mark in "([{":
            depth += 1
        elif mark in ")]}":
            depth -= 1
        elif mark == ":" and not depth:
            return token.start()
    return None

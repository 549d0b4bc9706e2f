"""Answers questions from memory alone: searches, recalls, and reads the exact answer from the result.

This module gets only the text of a question, and a memory with two methods. It imports nothing that could read a file, and never
sees the expected answer. The memory of a rival has the same methods.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kilburn.demo.explorer import LINES_PER_READ
from kilburn.search.found import Found

MAX_TOKENS, MAX_HITS = 100_000, 200
"""Maximum tokens and hits of one search."""


class Searchable(Protocol):
    """The methods of a `Session` that find text."""

    def search(self, query: str, tokens: int = ..., limit: int = ...) -> Sequence[Found]:
        """Return passages for a query, best first."""
        ...

    def recall(self, address: str) -> str:
        """Return the exact text at an address."""
        ...


class Answered(NamedTuple):
    """An answer, or "", and the page from which it was read."""

    text: str = ""
    address: str = ""


class SourceLine(NamedTuple):
    """A line of a file, as memory has it."""

    path: str
    number: int
    text: str
    address: str


def answer(question: str, memory: Searchable) -> Answered:
    """Answer a question of `kilburn.demo.questions` from memory alone."""
    for pattern, find in _QUESTIONS.items():
        if match := re.fullmatch(pattern, question):
            return next(find(memory, **match.groupdict()), Answered())
    return Answered()


def _signature(memory: Searchable, path: str, name: str, owner: str = "") -> Iterator[Answered]:
    """Yield the text from `def` to the colon of a function, or of a method of the class `owner`."""
    for start in _defined(memory, f"class {owner}" if owner else f"def {name}", path):
        text = ""
        for line in _lines(memory, path, start.number):
            if text or re.match(rf"\s*(async )?def {name}\b", line.text):
                text += f"{line.text}\n"
                if _is_header(text.strip()):
                    yield Answered(text.strip()[:-1], line.address)
                    break


def _constant(memory: Searchable, path: str, name: str) -> Iterator[Answered]:
    return (Answered(line.text.removeprefix(f"{name} = "), line.address) for line in _defined(memory, f"{name} =", path))


def _line(memory: Searchable, path: str, number: str) -> Iterator[Answered]:
    return (Answered(line.text, line.address) for line in _lines(memory, path, int(number)))


def _place(memory: Searchable, kind: str, name: str) -> Iterator[Answered]:
    lines = _defined(memory, f"class {name}" if kind == "class" else f"def {name}")
    return (Answered(line.path, line.address) for line in lines)


_QUESTIONS: dict[str, Callable[..., Iterator[Answered]]] = {
    r"What is the exact signature of the function `(?P<name>\w+)` in (?P<path>\S+)\?": _signature,
    r"What is the exact signature of the method `(?P<name>\w+)` of the class `(?P<owner>\w+)` in (?P<path>\S+)\?": _signature,
    r"What is the value of the constant `(?P<name>\w+)` in (?P<path>\S+)\?": _constant,
    r"What does line (?P<number>\d+) of (?P<path>\S+) say, exactly\?": _line,
    r"Which file defines the (?P<kind>class|function) `(?P<name>\w+)`\?": _place,
}


def _defined(memory: Searchable, definition: str, path: str = "") -> Iterator[SourceLine]:
    """Yield the lines of an outline that name a definition, in one file or in any."""
    pattern = re.compile(rf"^({re.escape(path) or '.+'}) (\d+): ((?:async )?{definition}(?!\w).*)$", re.MULTILINE)
    for text, address in _search(memory, f"{path} {definition}"):
        for match in pattern.finditer(text):
            yield SourceLine(match[1], int(match[2]), match[3], address)


def _lines(memory: Searchable, path: str, number: int) -> Iterator[SourceLine]:
    """Yield the lines of a file from one line on, until memory has a gap."""
    while True:
        start = number - (number - 1) % LINES_PER_READ
        head = f"{path} lines {start}-"
        address = next((address for text, address in _search(memory, f"{path} lines {start}") if text.startswith(head)), "")
        lines = memory.recall(address).split("\n")[1 + number - start :] if address else []
        if not lines:
            return
        for line in lines:
            yield SourceLine(path, number, line.partition("\t")[2], address)
            number += 1


def _search(memory: Searchable, query: str) -> Iterator[tuple[str, str]]:
    """Yield the texts that a search finds, with their addresses: first the passages, then the whole pages, which are recalled
    one by one.

    The passage of a hit is only a part of its page, and the answer may be in another part.
    """
    hits = memory.search(query, MAX_TOKENS, MAX_HITS)
    yield from ((hit.text, hit.address) for hit in hits)
    yield from ((memory.recall(address), address) for address in dict.fromkeys(hit.address for hit in hits))


def _is_header(text: str) -> bool:
    """Return whether a text is the complete header of a function."""
    try:
        return text.endswith(":") and bool(ast.parse(f"{text} pass"))
    except SyntaxError:
        return False

"""Answers questions from memory alone: by `search`, `recall`, and reading the exact answer in the result.

It gets only a question's text and a memory with these two verbs. It imports nothing that could read a file, and never
sees an expected answer. A rival's memory has the same two verbs.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from kilburn.demo.explorer import READ
from kilburn.search.found import Found

TOKENS, HITS = 100_000, 200
"""Tokens that the hits of one search may take."""


class Searchable(Protocol):
    """What a `Session` offers to find text again."""

    def search(self, query: str, tokens: int = ..., limit: int = ...) -> Sequence[Found]:
        """Passages for a query, best first."""
        ...

    def recall(self, address: str) -> str:
        """The exact text at an address."""
        ...


class Answered(NamedTuple):
    """An answer, "" if none was found, and the page from which it was read."""

    text: str = ""
    address: str = ""


class SourceLine(NamedTuple):
    """A line of a file, as found in memory."""

    path: str
    number: int
    text: str
    address: str


def answer(question: str, memory: Searchable) -> Answered:
    """The exact answer to a question as `kilburn.demo.questions` asks them, from memory alone."""
    for pattern, find in _QUESTIONS.items():
        if asked := re.fullmatch(pattern, question):
            return next(find(memory, **asked.groupdict()), Answered())
    return Answered()


def _signature(memory: Searchable, path: str, name: str, owner: str = "") -> Iterator[Answered]:
    """The text from `def` to the colon, of a function or of a method of the class `owner`."""
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


def _place(memory: Searchable, what: str, name: str) -> Iterator[Answered]:
    found = _defined(memory, f"class {name}" if what == "class" else f"def {name}")
    return (Answered(line.path, line.address) for line in found)


_QUESTIONS: dict[str, Callable[..., Iterator[Answered]]] = {
    r"What is the exact signature of the function `(?P<name>\w+)` in (?P<path>\S+)\?": _signature,
    r"What is the exact signature of the method `(?P<name>\w+)` of the class `(?P<owner>\w+)` in (?P<path>\S+)\?": _signature,
    r"What is the value of the constant `(?P<name>\w+)` in (?P<path>\S+)\?": _constant,
    r"What does line (?P<number>\d+) of (?P<path>\S+) say, exactly\?": _line,
    r"Which file defines the (?P<what>class|function) `(?P<name>\w+)`\?": _place,
}


def _defined(memory: Searchable, definition: str, path: str = "") -> Iterator[SourceLine]:
    """Lines of an outline that say where something is defined, in one file or in any."""
    wanted = re.compile(rf"^({re.escape(path) or '.+'}) (\d+): ((?:async )?{definition}(?!\w).*)$", re.MULTILINE)
    for text, address in _found(memory, f"{path} {definition}"):
        for found in wanted.finditer(text):
            yield SourceLine(found[1], int(found[2]), found[3], address)


def _lines(memory: Searchable, path: str, number: int) -> Iterator[SourceLine]:
    """The lines of a file from one line on, as far as memory has them without a gap."""
    while True:
        start = number - (number - 1) % READ
        head = f"{path} lines {start}-"
        address = next((address for text, address in _found(memory, f"{path} lines {start}") if text.startswith(head)), "")
        lines = memory.recall(address).split("\n")[1 + number - start :] if address else []
        if not lines:
            return
        for line in lines:
            yield SourceLine(path, number, line.partition("\t")[2], address)
            number += 1


def _found(memory: Searchable, query: str) -> Iterator[tuple[str, str]]:
    """Texts that a search brings, and their addresses: the passages first, then the whole pages, each read when it is its turn.

    A hit shows a passage of its page, which need not be the one with the answer.
    """
    hits = memory.search(query, TOKENS, HITS)
    yield from ((hit.text, hit.address) for hit in hits)
    yield from ((memory.recall(address), address) for address in dict.fromkeys(hit.address for hit in hits))


def _is_header(text: str) -> bool:
    """Whether this is a function's whole definition, without its body."""
    try:
        return text.endswith(":") and bool(ast.parse(f"{text} pass"))
    except SyntaxError:
        return False

"""The key facts of a text: what a summary of it must not lose, each with its line.

They are found by patterns, so a fact is a verbatim string and its span, never an interpretation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from kilburn.page import Span
from kilburn.text.identifiers import Identifier, identifiers
from kilburn.text.lines import plain, sample, units
from kilburn.text.signs import Sign, sign_of, sign_of_prose

__all__ = ["Fact", "Facts", "facts"]

_LARGE = 2_000_000
_MOST_IN_A_LINE = 24


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: its kind ("path", "identifier", "number", "decision", "test", "error", "task"), its
    value as it stands in the text, the span of the line that it stands in, and how often the value
    was met."""

    kind: str
    value: str
    span: Span
    times: int = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts of a text by kind; each value once, with the span of its last line.

    `paths` include `path:line`; `identifiers` are dotted, snake_case and CamelCase names, calls, error
    classes and hashes; `tests` are totals, failed tests and exit codes; `errors` are exception lines
    and the last frame of each traceback; `decisions`, `errors`, `tests` and `tasks` have the whole line
    as value.
    """

    paths: tuple[Fact, ...] = ()
    identifiers: tuple[Fact, ...] = ()
    numbers: tuple[Fact, ...] = ()
    decisions: tuple[Fact, ...] = ()
    tests: tuple[Fact, ...] = ()
    errors: tuple[Fact, ...] = ()
    tasks: tuple[Fact, ...] = ()

    def __iter__(self) -> Iterator[Fact]:
        for group in (self.tests, self.errors, self.decisions, self.tasks, self.paths, self.identifiers, self.numbers):
            yield from group

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(slots=True)
class _Shelf:
    """Facts of one kind while they are gathered."""

    kind: str
    found: dict[str, tuple[Span, int]] = field(default_factory=dict)

    def put(self, value: str, span: Span) -> None:
        times = self.found[value][1] + 1 if value in self.found else 1
        self.found[value] = (span, times)

    def done(self) -> tuple[Fact, ...]:
        return tuple(Fact(self.kind, value, span, times) for value, (span, times) in self.found.items())


_FRAME = re.compile(r'^\s*File "|^\s+at \S|^\S+\.\w+:\d+: in ')


def facts(text: str, prose: bool | None = None) -> Facts:
    """The facts of a text.

    Args:
        prose: True for text of a person or a model, False for the output of a tool, None if unknown. Decisions and
            tasks are looked for in prose only.

    A text of more than 2 million characters is sampled: head, tail, surroundings of error words.
    """
    shelves = {kind: _Shelf(kind) for kind in ("path", "identifier", "number", "decision", "test", "error", "task")}
    frame: Span | None = None
    for low, high in sample(text, _LARGE):
        for start, end in units(text, 600, low, high):
            line = text[start:end]
            if not line.strip():
                continue
            span = (start, end)
            sign = _sign(line, prose)
            if _FRAME.match(line):
                frame = span
            elif sign == Sign.ERROR and frame is not None:
                shelves["error"].put(plain(text[frame[0] : frame[1]]), frame)
                frame = None
            _line(shelves, line, sign, span)
    gathered = [shelves[kind].done() for kind in ("path", "identifier", "number", "decision", "test", "error", "task")]
    return Facts(*gathered)


_SHELF = {Sign.SUMMARY: "test", Sign.FAILED: "test", Sign.ERROR: "error", Sign.DECISION: "decision", Sign.TASK: "task"}


def _sign(line: str, prose: bool | None) -> Sign:
    if prose:
        return sign_of_prose(line)
    sign = sign_of(line)
    if prose is None and sign in (Sign.NONE, Sign.DEFINITION, Sign.WARNING):
        other = sign_of_prose(line)
        return other if other in (Sign.DECISION, Sign.TASK) else sign
    return sign


def _line(shelves: dict[str, _Shelf], line: str, sign: Sign, span: Span) -> None:
    """Put the line and what it names on the shelves."""
    shelf = _SHELF.get(sign)
    if shelf is not None:
        shelves[shelf].put(plain(line), span)
    for place, found in enumerate(identifiers(line)):
        if place >= _MOST_IN_A_LINE:
            break
        shelves[_kind(found)].put(found.text, span)


def _kind(found: Identifier) -> str:
    if found.kind in ("path", "line"):
        return "path"
    return "number" if found.kind == "number" else "identifier"

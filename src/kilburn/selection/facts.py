"""The key facts of a text: what a summary of it must not lose, each with its line.

They are found by patterns, so a fact is a verbatim string and its span, never an interpretation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kilburn.page import Span
from kilburn.selection.identifiers import Identifier, identifiers
from kilburn.selection.lines import plain, sample, units
from kilburn.selection.signs import Sign, classify_line, sign_of_prose

_LARGE = 2_000_000
_MOST_IN_A_LINE = 24


class FactKind(StrEnum):
    """What a fact tells."""

    PATH = "path"
    """A file, `path:line` included."""
    IDENTIFIER = "identifier"
    """A dotted, snake_case or CamelCase name, a call, an error class or a hash."""
    NUMBER = "number"
    DECISION = "decision"
    """A whole line of prose."""
    TEST = "test"
    """The line of a total, a failed test or an exit code."""
    ERROR = "error"
    """The line of an exception, or of the last frame of its traceback."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: its value as it stands in the text, the span of the last line with that value, and how often it was met."""

    value: str
    span: Span
    times: int = 1


_FRAME = re.compile(r'^\s*File "|^\s+at \S|^\S+\.\w+:\d+: in ')
_TOLD_BY = {
    Sign.SUMMARY: FactKind.TEST,
    Sign.FAILED: FactKind.TEST,
    Sign.ERROR: FactKind.ERROR,
    Sign.DECISION: FactKind.DECISION,
}


def facts(text: str, *, prose: bool) -> Mapping[FactKind, Sequence[Fact]]:
    """The facts of a text by kind, in the order in which they were met first; each value once.

    Args:
        prose: whether a person or a model wrote it; else it is the output of a tool, which tells no decisions.

    A text of more than 2 million characters is sampled: head, tail, surroundings of error words.
    """
    by_kind: dict[FactKind, dict[str, Fact]] = {kind: {} for kind in FactKind}

    def note(kind: FactKind, value: str, span: Span) -> None:
        fact = by_kind[kind].get(value)
        by_kind[kind][value] = Fact(value, span, fact.times + 1 if fact else 1)

    frame: Span | None = None
    for low, high in sample(text, _LARGE):
        for span in units(text, 600, low, high):
            line = text[slice(*span)]
            if not line.strip():
                continue
            sign = sign_of_prose(line) if prose else classify_line(line)
            if _FRAME.match(line):
                frame = span
            elif sign is Sign.ERROR and frame is not None:
                note(FactKind.ERROR, plain(text[slice(*frame)]), frame)
                frame = None
            if sign in _TOLD_BY:
                note(_TOLD_BY[sign], plain(line), span)
            for mention, _ in zip(identifiers(line), range(_MOST_IN_A_LINE), strict=False):
                note(_kind(mention), mention.text, span)
    return {kind: tuple(by_value.values()) for kind, by_value in by_kind.items()}


def _kind(mention: Identifier) -> FactKind:
    if mention.kind in ("path", "line"):
        return FactKind.PATH
    return FactKind.NUMBER if mention.kind == "number" else FactKind.IDENTIFIER

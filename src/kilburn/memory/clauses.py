"""The plain statements of a message: clauses in which somebody says something in their own name.

Questions, hypotheses, quotations, code, reported speech and pasted texts are left out. The patterns are for English; a text in
another language yields at most a few clauses, in which no statement is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kilburn.memory import english

MAX_TEXT_CHARS = 20_000
"""Characters of a text that is read whole. Of a longer one, only the first and last `EDGE_CHARS` are read: most was pasted."""
EDGE_CHARS = 2_000

MAX_SENTENCE_CHARS = 800
"""Characters of a sentence; longer ones are skipped."""

HOLE = "\x1a"
"""Placeholder of a removed quotation."""

_BLOCKS = english.pattern("clauses.blocks", re.DOTALL)
_BLANK = english.pattern("clauses.blank")
"""Blank lines. They are joined first, because the two patterns below would take quadratic time on many of them."""
_LINES = english.pattern("clauses.lines", re.MULTILINE)
_BULLET = english.pattern("clauses.bullet", re.MULTILINE)
_QUOTED = english.pattern("clauses.quoted")
_ODD = english.pattern("clauses.odd")
_SENTENCE = english.pattern("clauses.sentence")

_TASK = english.pattern("clauses.task", re.IGNORECASE)
_FICTION = english.pattern("clauses.fiction", re.IGNORECASE)
_WRITING = english.pattern("clauses.writing", re.IGNORECASE)
"""A request to write something is no statement. What follows may be one."""
_ABOUT_ME = english.pattern("clauses.about_me", re.IGNORECASE)
_QUESTION = english.pattern("clauses.question", re.IGNORECASE | re.DOTALL)
_REQUEST = english.pattern("clauses.request", re.IGNORECASE | re.DOTALL)
_CUT = english.pattern("clauses.cut", re.IGNORECASE)
_PREFIX = english.pattern("clauses.prefix", re.IGNORECASE)
_UNREAL = english.pattern("clauses.unreal", re.IGNORECASE)
_OPENS_UNREAL = english.pattern("clauses.opens_unreal", re.IGNORECASE)
_REPORTS = english.pattern("clauses.reports", re.IGNORECASE)
_SUBORDINATE = english.pattern("clauses.subordinate", re.IGNORECASE)
_MARKS = " ,.:!-–—"


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause without its introduction ("and", "by the way").

    Args:
        fix: whether it is introduced as a correction ("no,").
        rest: the text from here to the end of the sentence, without questions.
    """

    text: str
    fix: bool
    rest: str


def clauses(text: str) -> Iterator[Clause]:
    """Yield the clauses that somebody says in their own name, in order."""
    if len(text) > MAX_TEXT_CHARS:
        text = f"{text[:EDGE_CHARS]}\n\n{text[-EDGE_CHARS:]}"
    text = text.translate(_PLAIN)
    text = _BULLET.sub("", _LINES.sub("", _BLANK.sub("\n\n", _BLOCKS.sub("\n", text))))
    text = _ODD.sub(" ", _QUOTED.sub(lambda match: HOLE if match[0].count(" ") > 1 else match[0], text))
    for sentence in _SENTENCE.split(text):
        sentence = " ".join(sentence.split())
        if not sentence or len(sentence) > MAX_SENTENCE_CHARS:
            continue
        if _FICTION.match(sentence) or _TASK.search(sentence):
            return  # the rest is the text to work on
        if _WRITING.match(sentence):
            continue
        yield from _split_sentence(sentence)
        if sentence.endswith(":") and not _ABOUT_ME.search(sentence):
            return


_PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"', "\x1a": " ", "\N{NO-BREAK SPACE}": " "})


def unasked(sentence: str) -> str:
    """Return a sentence without what it asks: "I'm vegetarian, can you help?" is "I'm vegetarian"; "" of a mere question."""
    if sentence.endswith("?"):
        rest = _QUESTION.sub("", sentence)
        sentence = "" if rest == sentence else rest
    return _REQUEST.sub("", sentence).strip(_MARKS)


def _split_sentence(sentence: str) -> Iterator[Clause]:
    sentence = unasked(sentence)
    previous = ""
    fix = False
    at = 0
    for cut in [*_CUT.finditer(sentence), None]:
        start, piece = at, sentence[at : cut.start() if cut else None]
        at = cut.end() if cut else at
        if _OPENS_UNREAL.match(piece) or _REPORTS.search(previous):
            return
        previous = piece
        match = _PREFIX.match(piece)
        body = piece[match.end() :] if match else piece
        fix = fix or bool(match and match["fix"])
        if body.strip(_MARKS) and not _UNREAL.search(body) and not _SUBORDINATE.match(body):
            rest = sentence[start + len(piece) - len(body) :]
            yield Clause(body.strip(_MARKS), fix, rest.strip(_MARKS))
        fix = fix and not body.strip(_MARKS)

"""Splits a text into adjacent chunks at natural boundaries. The joined chunks are exactly the text.

The library semantic-text-splitter (extra `documents`) finds the boundaries: of Markdown at headings and blocks, of other text at
paragraphs, lines and sentences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from kilburn.errors import MissingExtra

CAPACITY = (400, 800)
"""Characters of a chunk: it may end after the first number, and is no longer than the second, except for blanks at its end. That
is one passage of the index."""

MARKDOWN = {".markdown", ".md", ".mdown", ".mdx"}


def chunks(text: str, name: str = "") -> list[str]:
    """Return the chunks of a text; none is blank, and a blank text has none.

    Args:
        name: name of its file; the suffix says what kind of text it is.

    Raises:
        MissingExtra: semantic-text-splitter is not installed.
    """
    pieces: list[str] = []
    blank = ""
    for chunk in _splitter(PurePath(name).suffix.lower()).chunks(text):
        if not chunk.isspace():
            pieces.append(blank + chunk)
            blank = ""
        elif pieces:
            pieces[-1] += chunk
        else:
            blank += chunk
    return pieces


def rechunk(old: Sequence[str], text: str, name: str = "") -> list[str]:
    """Return the chunks of a text that was changed: those before its first change and behind its last one stay as they were.

    Args:
        old: the chunks of the text before the change.
    """
    head = 0
    start = 0
    while head < len(old) and text.startswith(old[head], start):
        start += len(old[head])
        head += 1
    tail = len(old)
    stop = len(text)
    while tail > head and stop - len(old[tail - 1]) >= start and text.endswith(old[tail - 1], start, stop):
        tail -= 1
        stop -= len(old[tail])
    # A short new piece joins a neighbour; otherwise a text that grows line by line would fall to pieces. So do blanks.
    if start < stop and (stop - start < CAPACITY[0] or text[start:stop].isspace()):
        if head:
            head -= 1
            start -= len(old[head])
        elif tail < len(old):
            stop += len(old[tail])
            tail += 1
    new = text[start:stop]
    pieces = [new] if new.strip() and len(new) <= CAPACITY[1] else chunks(new, name)
    if len(pieces) > 1 and len(pieces[-2]) + len(pieces[-1]) <= CAPACITY[1]:
        pieces[-2:] = [pieces[-2] + pieces[-1]]
    return [*old[:head], *pieces, *old[tail:]]


def _splitter(ending: str) -> Any:
    try:
        import semantic_text_splitter as library
    except ImportError as error:
        raise MissingExtra("semantic-text-splitter", "documents") from error
    if ending in MARKDOWN:
        return library.MarkdownSplitter(CAPACITY, trim=False)
    return library.TextSplitter(CAPACITY, trim=False)

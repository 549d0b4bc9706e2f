"""The most telling lines of each of many texts.

A text is read once. The places of its highlights are cached by its hash, so that a plan over ten thousand pages
weighs their best lines without reading the texts again. No text is cached.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import lru_cache

from kilburn.page import Page, Span
from kilburn.text.extract import piece_of, weighed
from kilburn.text.lines import merge

__all__ = ["highlights", "telling"]

LINES = 3
"""Highlights of a text, and `CHARACTERS` that they may have together."""

CHARACTERS = 300
SAMPLED = 8000
"""Characters of a text that are read: head, tail and what surrounds error words."""


class _Source:
    """A text under its hash; the text itself is dropped once it was read."""

    __slots__ = ("key", "page", "text")

    def __init__(self, page: Page, text: Callable[[int], str]) -> None:
        self.key = (page.digest, page.role, page.kind)
        self.page: Page | None = page
        self.text: Callable[[int], str] | None = text

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Source) and self.key == other.key


@lru_cache(maxsize=16_384)
def _read(source: _Source) -> tuple[float, tuple[Span, ...]]:
    page, text = source.page, source.text
    source.page = source.text = None
    if page is None or text is None:
        return 0.0, ()
    found = heapq.nlargest(LINES, weighed(piece_of(page, text(page.id)), SAMPLED), key=lambda line: line[0])
    spans: list[Span] = []
    left = CHARACTERS
    for _, (start, end) in found:
        left -= end - start
        if spans and left < 0:
            break
        spans.append((start, end))
    return (found[0][0] if found else 0.0), merge(spans)


def telling(page: Page, text: Callable[[int], str]) -> tuple[float, tuple[Span, ...]]:
    """What the most telling line of a page tells for its length, and the spans of that and the next ones.

    Args:
        text: gives the page's exact text; called where the page was not read before.
    """
    return _read(_Source(page, text))


def highlights(pages: Sequence[Page], most: int, text: Callable[[int], str]) -> dict[int, tuple[Span, ...]]:
    """The highlights of the pages that tell most, of `most` characters together, in the order of the pages."""
    found = [(page.id, *telling(page, text)) for page in pages]
    chosen: dict[int, tuple[Span, ...]] = {}
    for page, _, spans in sorted(found, key=lambda one: -one[1]):
        if not spans:
            continue
        most -= sum(end - start for start, end in spans)
        if most < 0:
            break
        chosen[page] = spans
    return {page.id: chosen[page.id] for page in pages if page.id in chosen}

"""Cutting a text into passages of one search result each.

Passages follow lines, so that a hit is readable; only a line that is longer than a passage is cut,
at a blank where there is one. It refuses to know what the text means.
"""

from __future__ import annotations

from kilburn.page import Span

__all__ = ["SIZE", "passages"]

SIZE = 800
"""Characters: about 200 tokens, so that five hits fit a 1,000-token recall."""


def passages(text: str, size: int = SIZE) -> list[Span]:
    """Adjacent spans of at most `size` characters that cover all of `text` but blank stretches."""
    spans: list[Span] = []
    start, end = 0, len(text)
    while start < end:
        stop = min(start + size, end)
        if stop < end:
            # A passage of less than half a size would make hits of single lines around a long one.
            cut = text.rfind("\n", start + size // 2, stop)
            if cut < 0:
                cut = text.rfind(" ", start + size // 2, stop)
            if cut >= 0:
                stop = cut + 1
        if not text[start:stop].isspace():
            spans.append((start, stop))
        start = stop
    return spans

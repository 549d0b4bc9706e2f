"""The usual ways when the window is full: cut the front off, or keep a summary of it.

Both get the same transcript and the same window, and have no store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kilburn.page import Page
from kilburn.selection.extract import Piece, extract, piece_of

FULL, TAIL, SUMMARY = 3 / 4, 1 / 4, 1 / 8
"""Shares of the window: when a summary is made, what stays unsummarised, and the size of the summary."""

Count = Callable[[str], int]
Transcript = Sequence[tuple[Page, str]]


def truncated(transcript: Transcript, capacity: int, count: Count) -> list[str]:
    """The last `capacity` tokens; the page on the edge is cut to its end."""
    kept: list[str] = []
    left = capacity
    for page, text in reversed(transcript):
        end = text
        if page.tokens > left:
            # An estimate of the characters that fit, reduced until they do.
            end = text[len(text) - int(len(text) * left / page.tokens) :]
            while end and count(end) > left:
                end = end[len(end) // 8 + 1 :]
        left -= page.tokens
        kept.append(end)
        if left <= 0:
            break
    return [text for text in reversed(kept) if text]


def summarised(transcript: Transcript, capacity: int, count: Count, told: Callable[[int], None] = lambda page: None) -> list[str]:
    """A rolling summary and the newest pages: when the window is three quarters full, all but its newest
    quarter and the summary so far become the next summary, extracted verbatim.

    Args:
        told: called with the number of each page as it is taken in.
    """
    summary = ""
    recent: list[tuple[Page, str]] = []
    used = 0
    for page, text in transcript:
        told(page.id)
        recent.append((page, text))
        used += page.tokens
        if used + count(summary) <= capacity * FULL:
            continue
        pieces = [Piece(0, "user", "fold", summary)] if summary else []
        used = sum(page.tokens for page, _ in recent)
        while len(recent) > 1 and used > capacity * TAIL:
            old, said = recent.pop(0)
            used -= old.tokens
            pieces.append(piece_of(old, said))
        summary = extract(pieces, int(capacity * SUMMARY), count).text
        if used > capacity * FULL:
            last, said = recent[0]
            recent, used = [(last, said[-len(said) * int(capacity * TAIL) // last.tokens :])], int(capacity * TAIL)
    return [text for text in (summary, *(said for _, said in recent)) if text]

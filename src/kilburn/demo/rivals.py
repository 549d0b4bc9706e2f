"""The usual ways to handle a full window: truncation and summarisation. Both get the same transcript and window, and have no
store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kilburn.page import Page
from kilburn.selection.extract import Piece, extract, page_piece

FULL, TAIL, SUMMARY = 3 / 4, 1 / 4, 1 / 8
"""Shares of the window: the fill at which a summary is made, the part that is not summarised, and the size of the summary."""

Count = Callable[[str], int]
Transcript = Sequence[tuple[Page, str]]


def truncated(transcript: Transcript, capacity: int, count: Count) -> list[str]:
    """Return the last `capacity` tokens. The first page is cut to its end."""
    texts: list[str] = []
    remaining = capacity
    for page, text in reversed(transcript):
        end = text
        if page.tokens > remaining:
            # Estimate how many characters fit, and reduce the number until they do.
            end = text[len(text) - int(len(text) * remaining / page.tokens) :]
            while end and count(end) > remaining:
                end = end[len(end) // 8 + 1 :]
        remaining -= page.tokens
        texts.append(end)
        if remaining <= 0:
            break
    return [text for text in reversed(texts) if text]


def summarised(
    transcript: Transcript, capacity: int, count: Count, report: Callable[[int], None] = lambda page: None
) -> list[str]:
    """Return a rolling summary and the newest pages. When the window is three quarters full, the previous summary and all but
    the newest quarter become the next summary, which quotes verbatim.

    Args:
        report: called with the number of each page when it is added.
    """
    summary = ""
    recent: list[tuple[Page, str]] = []
    tokens = 0
    for page, text in transcript:
        report(page.id)
        recent.append((page, text))
        tokens += page.tokens
        if tokens + count(summary) <= capacity * FULL:
            continue
        pieces = [Piece(0, "user", "fold", summary)] if summary else []
        tokens = sum(page.tokens for page, _ in recent)
        while len(recent) > 1 and tokens > capacity * TAIL:
            old, old_text = recent.pop(0)
            tokens -= old.tokens
            pieces.append(page_piece(old, old_text))
        summary = extract(pieces, int(capacity * SUMMARY), count).text
        if tokens > capacity * FULL:
            last, end = recent[0]
            recent, tokens = [(last, end[-len(end) * int(capacity * TAIL) // last.tokens :])], int(capacity * TAIL)
    return [text for text in (summary, *(text for _, text in recent)) if text]

"""Cuts a streamed text at a number of tokens, by our own counter.

It adds up the tokens of the pieces, and counts the whole text only when that sum reaches the cap. Counting the whole
of a growing text at every piece would take quadratic time.
"""

from __future__ import annotations

from collections.abc import Callable


class Cap:
    """Watches a growing text.

    Args:
        tokens: the cap.
        count: tokens of a text.

    Attributes:
        text: everything that was added; the last piece may exceed the cap.
    """

    def __init__(self, tokens: int, count: Callable[[str], int]) -> None:
        self.tokens, self.count = tokens, count
        self.text = ""
        self._used = 0

    def add(self, piece: str) -> bool:
        """Add a piece; whether the text now has as many tokens as it may have."""
        self.text += piece
        self._used += self.count(piece)
        if self._used >= self.tokens:
            self._used = self.count(self.text)
        return self._used >= self.tokens

    @property
    def kept(self) -> str:
        """The text, cut where it is over the cap."""
        return clip(self.text, self.tokens, self.count)


def clip(text: str, tokens: int, count: Callable[[str], int]) -> str:
    """The longest prefix of a text that costs no more than `tokens`."""
    if count(text) <= tokens:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if count(text[:middle]) <= tokens:
            low = middle
        else:
            high = middle - 1
    return text[:low]

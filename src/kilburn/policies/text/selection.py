"""Choosing lines of one text under a token budget, with the cost of the gaps between them.

The picker counts each line once and each gap once, and never trusts the sum: `Picker.fit` measures
the finished text. It refuses to decide which line matters; its caller offers them in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kilburn.page import Span
from kilburn.policies.text.lines import Mark, join, merge

__all__ = ["Picker"]


class Picker:
    """Lines of one text that were chosen so far, and what they cost.

    Args:
        text: the original.
        lines: candidate spans, sorted, not overlapping.
        count: tokens of a text.
        mark: the text for a gap.
    """

    def __init__(self, text: str, lines: Sequence[Span], count: Callable[[str], int], mark: Mark) -> None:
        self.text, self.lines, self.count, self.mark = text, lines, count, mark
        self.gap = max(1, count(mark(max(1, len(text)))))
        self.order: list[int] = []
        self.chosen: set[int] = set()
        self.spent = self.gap
        self._costs: dict[int, int] = {}

    def cost(self, index: int) -> int:
        """Tokens of one line alone, counted once."""
        known = self._costs.get(index)
        if known is None:
            start, end = self.lines[index]
            piece = self.text[start:end]
            known = self._costs[index] = max(1, self.count(piece)) + (0 if piece[-1:] == "\n" else 1)
        return known

    def price(self, index: int) -> int:
        """What choosing the line would add: its own tokens, and a gap more or less."""
        return self.cost(index) + self.gap * (1 - self._joined(index - 1, index) - self._joined(index, index + 1))

    def _joined(self, left: int, right: int) -> int:
        """1 where choosing the one beside the other, or beside the text's edge, leaves no gap between."""
        if left < 0:
            return int(self.lines[right][0] == 0)
        if right >= len(self.lines):
            return int(self.lines[left][1] == len(self.text))
        near = left in self.chosen or right in self.chosen
        return int(near and self.lines[left][1] == self.lines[right][0])

    def offer(self, indices: Iterable[int], cap: int) -> bool:
        """Take the lines in that order while the whole stays at or under `cap` tokens; one that does not
        fit is passed over, eight in a row end it. True where all were taken."""
        refused, all_taken = 0, True
        for index in indices:
            if index in self.chosen:
                continue
            price = self.price(index)
            if self.spent + price > cap:
                refused, all_taken = refused + 1, False
                if refused >= 8:
                    break
                continue
            refused = 0
            self.chosen.add(index)
            self.order.append(index)
            self.spent += price
        return all_taken

    def fit(self, tokens: int) -> tuple[Span, ...]:
        """The chosen spans, merged, the latest choices given up until the finished text fits `tokens`."""
        keep = len(self.order)
        while keep > 0:
            spans = merge(self.lines[index] for index in self.order[:keep])
            used = self.count(join(self.text, spans, self.mark))
            if used <= tokens:
                return spans
            keep = min(keep - 1, int(keep * tokens / used))
        return ()

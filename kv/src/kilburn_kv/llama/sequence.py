"""One sequence in a context of llama.cpp: what it has cached where, and what was done to it.

This is pure bookkeeping, which `kilburn_kv.llama.engine` keeps in step with llama.cpp. Two things that llama.cpp
cannot do raise: continuing after a gap, and moving one position onto another.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from kilburn.errors import FreedSequence, InvalidRange
from kilburn_kv.llama.cells import ALIGNED


class ChangeKind(StrEnum):
    """What was done to a sequence."""

    EVICT = "evict"
    TRUNCATE = "truncate"
    SHIFT = "shift"


class CacheChange(NamedTuple):
    """One change: of which kind, after how many tokens were taken, from where, to where, by how much."""

    kind: ChangeKind
    taken: int
    start: int
    stop: int
    by: int = 0


class LlamaSequence:
    """What `Llama.open`, `fork` and `restore` return.

    Attributes:
        number: identifies it among the live sequences of its context; a later sequence may get it again.
        logits: of the next token, or None if they are not known (nothing ran, or after `truncate`).
        tokens: the cached tokens, in order.
        positions: the position of each of them.
        taken: all tokens that it took, those that were evicted included.
        changes: what was done to it, so that two sequences of equal `taken` and `changes` are the same one.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.logits: array[float] | None = None
        self.tokens, self.positions, self.taken = array("i"), array("i"), array("i")
        self.changes: list[CacheChange] = []
        self.cells = array("q")
        self.pure = 0
        self.is_live = True
        self._end = 0

    def __len__(self) -> int:
        """Tokens that are cached."""
        return len(self.positions)

    def __repr__(self) -> str:
        return f"<Sequence {self.number}: {len(self)} tokens, next is {self.end}>" if self.is_live else "<Sequence: freed>"

    @property
    def end(self) -> int:
        """The position that the next token gets."""
        return self.positions[-1] + 1 if self.positions else self._end

    @property
    def exact(self) -> bool:
        """Whether logits are, bit for bit, those that the same tokens give alone in a context, in the same calls.

        False after `evict` and `shift`, and if its cells are scattered or at an odd place, as those of a second fork
        are: sums are then rounded differently. After `truncate` to a position before the first change it is exact
        again.
        """
        return self.pure == len(self)

    def copy(self, number: int) -> LlamaSequence:
        """The same past under another number. For the engine."""
        made = LlamaSequence(number)
        made.logits = self.logits
        made.tokens, made.positions, made.taken = self.tokens[:], self.positions[:], self.taken[:]
        made.changes, made.cells, made.pure, made._end = self.changes[:], self.cells[:], self.pure, self.end
        return made

    def take(self, tokens: Sequence[int], cells: array[int]) -> None:
        """Record that tokens were appended, in these cells. For the engine."""
        if self.exact and len(cells):
            begins = not self.end and cells[0] % ALIGNED == 0
            if cells[0] >= 0 and (cells[0] == self.cells[-1] + 1 if self.cells else begins):
                self.pure += len(cells)
        self.positions.extend(range(self.end, self.end + len(cells)))
        self.tokens.extend(tokens)
        self.taken.extend(tokens)
        self.cells.extend(cells)

    def load(self, tokens: Sequence[int], positions: Sequence[int], cells: array[int], *, exact: bool) -> None:
        """Record that a saved state was restored, in these cells. For the engine."""
        if exact:
            self.take(tokens, cells)
            return
        self.tokens, self.positions, self.cells = array("i", tokens), array("i", positions), cells

    def within(self, start: int, stop: int) -> range:
        """Which of the cached tokens have these positions.

        Raises:
            InvalidRange: not a range within 0 and `end`.
        """
        self.alive()
        if not 0 <= start <= stop <= self.end:
            raise InvalidRange(f"positions {start} to {stop} are not within 0 to {self.end} of sequence {self.number}")
        return range(bisect_left(self.positions, start), bisect_left(self.positions, stop))

    def evictable(self, start: int, stop: int) -> range:
        """As `within`, for an eviction, which must leave no gap before the next token.

        Raises:
            InvalidRange: the last cached token would leave, and others stay.
        """
        part = self.within(start, stop)
        if part.start < part.stop == len(self) and part.start:
            last = self.positions[part.start - 1]
            raise InvalidRange(
                f"llama.cpp goes on at the position behind the last cached token: without {start} to {stop} that is {last + 1}",
                advice=f"keep the last token, or truncate to {last + 1}",
            )
        return part

    def cuttable(self, position: int) -> range:
        """As `within`, for a roll-back to a position.

        Raises:
            InvalidRange: the token before that position was evicted, but earlier ones are cached.
        """
        part = self.within(position, self.end)
        if part.start and self.positions[part.start - 1] + 1 != position:
            last = self.positions[part.start - 1]
            raise InvalidRange(f"position {position - 1} of sequence {self.number} is gone", advice=f"truncate to {last + 1}")
        return part

    def movable(self, start: int, stop: int, delta: int) -> range:
        """As `within`, for a move by `delta`.

        Raises:
            InvalidRange: it would land below zero, or on or beyond a neighbour, or would leave a gap before the next token.
        """
        part = self.within(start, stop)
        if not part:
            return part
        low, high = self.positions[part.start] + delta, self.positions[part.stop - 1] + delta
        floor = self.positions[part.start - 1] if part.start else -1
        roof = self.positions[part.stop] if part.stop < len(self) else 1 << 30
        if not floor < low <= high < roof:
            raise InvalidRange(f"{start} to {stop} moved by {delta} would not lie between {floor} and {roof}")
        return part

    def drop(self, part: range, change: CacheChange | None) -> None:
        """Record that these cached tokens were dropped. For the engine."""
        end = self.end
        start, stop = part.start, part.stop
        del self.tokens[start:stop], self.positions[start:stop], self.cells[start:stop]
        self.pure = min(self.pure, start)
        self._end = end
        if change is not None:
            self.changes.append(change)

    def back(self, part: range, position: int) -> None:
        """Record that everything from a position on was dropped. For the engine."""
        if self.changes:
            self.changes.append(CacheChange(ChangeKind.TRUNCATE, len(self.taken), position, position))
        else:
            del self.taken[position:]
        if part:
            self.logits = None
        self.drop(part, None)
        self._end = position

    def move(self, part: range, change: CacheChange) -> None:
        """Record that these cached tokens have other positions now. For the engine."""
        for index in part:
            self.positions[index] += change.by
        self.pure = min(self.pure, part.start)
        self.changes.append(change)

    def alive(self) -> None:
        """Raise FreedSequence if it was freed."""
        if not self.is_live:
            raise FreedSequence(f"sequence {self.number} was freed", advice="open it anew, or restore it")

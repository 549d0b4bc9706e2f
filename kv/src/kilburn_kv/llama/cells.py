"""Which cells of llama.cpp's buffer are used, by how many sequences, and where they lie.

llama.cpp fills its buffer from the front, and does not say where a token went. As long as no free cell lies before a
used one, the place is known, and is tracked here. Otherwise a cell has a negative number, which means that its place
is unknown.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

ALIGNED = 256
"""A run of cells that begins at a multiple of this gives the same bits as at the beginning of the buffer. Sums over
cells run in vector lanes, so with another remainder they are rounded differently. The lanes are 8 to 64 wide, and
llama.cpp pads its buffer to 256."""


class Cells:
    """The cells of one context.

    Args:
        capacity: how many there are.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._owners: dict[int, int] = {}
        self._solid = True
        self._placeless = 0

    @property
    def free(self) -> int:
        """Cells that no sequence has."""
        return self.capacity - len(self._owners)

    def take(self, count: int) -> array[int]:
        """Note that llama.cpp gave cells to one sequence; returns their numbers."""
        if self._solid:
            start = len(self._owners)
            taken = array("q", range(start, start + count))
        else:
            start = self._placeless
            self._placeless -= count
            taken = array("q", range(start - 1, start - 1 - count, -1))
        self._owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, cells: Iterable[int]) -> None:
        """Add an owner to these cells."""
        for cell in cells:
            self._owners[cell] += 1

    def drop(self, cells: Iterable[int]) -> None:
        """Remove an owner from these cells; those without an owner are free."""
        owners = self._owners
        for cell in cells:
            owners[cell] -= 1
            if not owners[cell]:
                del owners[cell]
        self._solid = not owners or (min(owners) == 0 and max(owners) == len(owners) - 1)

    def are_shared(self, cells: Iterable[int]) -> bool:
        """Whether one of them has several owners."""
        return any(self._owners[cell] > 1 for cell in cells)

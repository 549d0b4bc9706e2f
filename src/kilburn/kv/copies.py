"""Collects the copies from slot to slot that an engine still has to make, over any number of operations.

The copies of one `take` are simultaneous: read all sources, then write all targets, as `cache[targets] =
cache[sources]` does on a tensor.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

__all__ = ["Copies"]


class Copies:
    """Pending copies. An engine takes and performs them before it next writes or reads a slot."""

    def __init__(self) -> None:
        self._sources = array("q")
        self._targets = array("q")
        self._written: set[int] = set()

    def __len__(self) -> int:
        return len(self._targets)

    def add(self, sources: array[int], targets: array[int], reads: Iterable[int], writes: Iterable[int]) -> None:
        """Copy these slots too, after all earlier copies; `reads` and `writes` are the blocks that contain them."""
        written = self._written
        if written.isdisjoint(reads) and written.isdisjoint(writes):
            self._sources += sources
            self._targets += targets
        else:
            # The target of an earlier copy is not written yet, so it is read where that copy reads it.
            pending = dict(zip(self._targets, self._sources, strict=True))
            origins = [pending.get(source, source) for source in sources]
            pending.update(zip(targets, origins, strict=True))
            pending = {target: origin for target, origin in pending.items() if target != origin}
            self._sources, self._targets = array("q", pending.values()), array("q", pending)
        written.update(writes)

    def take(self) -> tuple[array[int], array[int]]:
        """(sources, targets), without a target twice. Afterwards nothing is pending."""
        found = self._sources, self._targets
        self._sources, self._targets, self._written = array("q"), array("q"), set()
        return found

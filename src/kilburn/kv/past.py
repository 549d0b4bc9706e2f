"""The state of a sequence before a step that may fail, so that it can be restored.

It keeps what the table says of tokens, and the observed attention. The engine restores keys and values; blocks are
not kept here.
"""

from __future__ import annotations

from kilburn.kv.sequence import CachedSequence

__all__ = ["Past"]


class Past:
    """The state of a sequence, except its cached tokens."""

    def __init__(self, sequence: CachedSequence) -> None:
        watch = sequence.watch
        self.said, self.shifts = sequence.table.said(), dict(sequence.shifts)
        self.watched = watch.state() if watch is not None else None

    def restore(self, sequence: CachedSequence) -> None:
        """Restore it; the same positions must be cached again."""
        sequence.table.restore(self.said)
        sequence.shifts = dict(self.shifts)
        self.unwatch(sequence)

    def unwatch(self, sequence: CachedSequence) -> None:
        """Undo what was observed since."""
        if sequence.watch is not None and self.watched is not None:
            sequence.watch.restore(self.watched)

"""What a sequence was before something that may fail, so that it can be that again.

It remembers what is said of tokens, and the attention that was noted; keys and values are the engine's to
put back. It refuses to hold blocks.
"""

from __future__ import annotations

from kilburn.kv.sequence import CachedSequence

__all__ = ["Past"]


class Past:
    """What a sequence was, so that it can be that again: all but its cached tokens."""

    def __init__(self, sequence: CachedSequence) -> None:
        watch = sequence.watch
        self.said, self.shifts = sequence.table.said(), dict(sequence.shifts)
        self.watched = watch.state() if watch is not None else None

    def restore(self, sequence: CachedSequence) -> None:
        """The same positions are cached again."""
        sequence.table.restore(self.said)
        sequence.shifts = dict(self.shifts)
        self.unwatch(sequence)

    def unwatch(self, sequence: CachedSequence) -> None:
        """Forget what was noted since."""
        if sequence.watch is not None and self.watched is not None:
            sequence.watch.restore(self.watched)

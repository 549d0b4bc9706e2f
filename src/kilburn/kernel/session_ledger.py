"""The ledger of a session: what happened, what each compaction did, and how two prompts differ."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilburn.arguments import checked
from kilburn.backend import SegmentInfo
from kilburn.kernel.ledger import Stats
from kilburn.kernel.prompts import difference, snapshot
from kilburn.kernel.receipts import Difference, Receipt, receipts
from kilburn.kernel.segment import SegmentLedger

if TYPE_CHECKING:
    from kilburn.kernel.session import Session


__all__ = ["SessionLedger"]


@checked
class SessionLedger(SegmentLedger):
    """What happened in a session, and what its compactions did."""

    _segment: Session

    def knows(self, info: SegmentInfo) -> bool:
        """Return whether this session, as memory has it, is the one that the store describes in `info`, to its newest event."""
        return self._segment._kernel.pending.follows(info)

    @property
    def figures(self) -> Stats:
        """The ledger's figures without what waits to be written: nothing is read or written for their sake."""
        return self._segment._kernel.ledger.report(use=self._segment.prompts.use)

    def receipts(self) -> list[Receipt]:
        """Return the receipts of all compactions, oldest first: what left, why, by which policy, and how to get it back."""
        return list(receipts(self.events()))

    def difference(self, turn: int, until: int | None = None) -> Difference:
        """Compare the prompt after a turn with the one after an earlier turn.

        Args:
            turn: number of the last message before the earlier prompt.
            until: the same of the later one; None for the prompt as it is now.

        Raises:
            UnknownAddress: no such turn.
        """
        with self._segment._current():
            later = self._segment.window if until is None else self._segment._as_of(until)
            return difference(snapshot(self._segment._as_of(turn)), snapshot(later))

"""One sequence of an engine: what it has cached, and what comes next.

A handle: the engine does everything. After `free` it raises.
"""

from __future__ import annotations

from kilburn.errors import FreedSequence, InvalidRange
from kilburn.kv.lineage import Lineage
from kilburn.kv.table import Table
from kilburn.kv.tensors import Tensor
from kilburn.kv.watch import AttentionWatch

__all__ = ["CachedSequence", "Past"]


class CachedSequence:
    """What `Engine.open` and `Engine.fork` return.

    Attributes:
        logits: of the token that comes next, shape [vocabulary]; None before the first token, and where the last
            token is not what ran last (after `truncate`).
        watch: the attention that was noted, where it was opened for a press that asks for it.
        squeezed: the logical position before which what is cached stands for no single token any more.
        shifts: by how many positions the keys at a logical position were rotated on since they were computed.
        first: of each of those, the key as it was before the first rotation that was seen here, and its shift then;
            shape [layers, heads, dim].
        owners: whose windows it shows, as `Residence` names them; a fork has its own and those of its source.
        lineage: what it is computed from again, while its blocks are another's (preemption).
    """

    def __init__(self, table: Table, watch: AttentionWatch | None = None) -> None:
        self._table: Table | None = table
        self.number = table.number
        self.logits: Tensor | None = None
        self.watch = watch
        self.lineage: Lineage | None = None
        self.squeezed = 0
        self.shifts: dict[int, int] = {}
        self.first: dict[int, tuple[int, Tensor]] = {}
        self.owners: frozenset[str] = frozenset()

    @property
    def table(self) -> Table:
        """Its positions, slots, pages and evictions.

        Raises:
            FreedSequence: it was freed, or preempted and not resumed yet.
        """
        if self._table is None:
            what = "was preempted" if self.lineage is not None else "was freed"
            advice = "Engine.resume computes it again" if self.lineage is not None else "open it anew"
            raise FreedSequence(f"sequence {self.number} {what}", advice=advice)
        return self._table

    @property
    def recomputable(self) -> bool:
        """Whether its tokens and evictions say all about its keys and values, and nobody notes its attention."""
        return self.watch is None and self.table.recomputable

    @property
    def is_live(self) -> bool:
        """Whether its blocks are its own now."""
        return self._table is not None

    @property
    def end(self) -> int:
        """The logical position that the next token gets."""
        return self.table.end

    def __len__(self) -> int:
        """Tokens that are cached."""
        return len(self.table)

    def __repr__(self) -> str:
        return f"<Sequence of {self._table!r}>" if self._table is not None else f"<Sequence {self.number}: gone>"

    def leave(self, lineage: Lineage | None = None) -> None:
        """Its table was freed; with a lineage, to be resumed. For the engine."""
        self._table, self.lineage = None, lineage

    def check(self, position: int) -> Table:
        """Its table, where single tokens can be told apart from this logical position on.

        Raises:
            InvalidRange: they were squeezed, each head its own. FreedSequence.
        """
        if 0 <= position < self.squeezed:
            raise InvalidRange(
                f"before position {self.squeezed} each head of sequence {self.number} keeps other tokens",
                advice="truncate to 0 and compute it anew, or use what came behind",
            )
        return self.table

    def settle(self, table: Table) -> None:
        """It has a table again. For the engine."""
        self._table, self.lineage = table, None


class Past:
    """What a sequence was before something that may fail: all but its keys and values."""

    def __init__(self, sequence: CachedSequence) -> None:
        self.lineage, self.shifts = sequence.table.lineage(), dict(sequence.shifts)
        self._watched = sequence.watch.state() if sequence.watch is not None else None

    def restore(self, sequence: CachedSequence) -> None:
        """The same positions are cached again."""
        sequence.table.restore(self.lineage)
        sequence.shifts = dict(self.shifts)
        self.restore_watch(sequence)

    def restore_watch(self, sequence: CachedSequence) -> None:
        """Forget what attention was noted since."""
        if sequence.watch is not None and self._watched is not None:
            sequence.watch.restore(self._watched)

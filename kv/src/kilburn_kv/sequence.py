"""One sequence of an engine: what it has cached, and what comes next.

The engine does everything; this only names the sequence. After `free` it cannot be used.
"""

from __future__ import annotations

from kilburn.errors import FreedSequence, InvalidRange
from kilburn_kv.lineage import TableLineage
from kilburn_kv.table import Table
from kilburn_kv.tensors import Tensor
from kilburn_kv.watch import AttentionWatch


class CachedSequence:
    """What `Engine.open` and `Engine.fork` return.

    Attributes:
        logits: of the next token, shape [vocabulary]; None before the first token, and if the last token is not the
            one that ran last (after `truncate`).
        watch: the observed attention, if it was opened for a press that needs it.
        packed: the logical position before which cached entries do not stand for single tokens any more.
        shifts: by how many positions the keys at a logical position were rotated since they were computed.
        first: for each of those, the key before its first rotation here, and its shift then; shape [layers, heads,
            dim].
        owners: whose windows it shows, as `Residence` names them; a fork has its own and those of its source.
        lineage: what is needed to compute it again while it is preempted.
    """

    def __init__(self, table: Table, watch: AttentionWatch | None = None) -> None:
        self._table: Table | None = table
        self.number = table.number
        self.logits: Tensor | None = None
        self.watch = watch
        self.lineage: TableLineage | None = None
        self.packed = 0
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
        """Whether its keys and values follow from its tokens and evictions, and its attention is not observed."""
        return self.watch is None and self.table.recomputable

    @property
    def is_live(self) -> bool:
        """Whether it has blocks: it was not freed or preempted."""
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

    def detach(self, lineage: TableLineage | None = None) -> None:
        """Its table was freed; with a lineage, to be resumed. For the engine."""
        self._table, self.lineage = None, lineage

    def check(self, position: int) -> Table:
        """Its table, if entries stand for single tokens from this logical position on.

        Raises:
            InvalidRange: a press chose them for each head. FreedSequence.
        """
        if 0 <= position < self.packed:
            raise InvalidRange(
                f"before position {self.packed} each head of sequence {self.number} keeps other tokens",
                advice="truncate to 0 and compute it anew, or use what came behind",
            )
        return self.table

    def attach(self, table: Table) -> None:
        """It has a table again. For the engine."""
        self._table, self.lineage = table, None


class SequenceState:
    """The state of a sequence before a step that may fail, except its keys and values."""

    def __init__(self, sequence: CachedSequence) -> None:
        self.lineage, self.shifts = sequence.table.lineage(), dict(sequence.shifts)
        self._watched = sequence.watch.state() if sequence.watch is not None else None

    def restore(self, sequence: CachedSequence) -> None:
        """Restore it; the same positions must be cached again."""
        sequence.table.restore(self.lineage)
        sequence.shifts = dict(self.shifts)
        self.restore_watch(sequence)

    def restore_watch(self, sequence: CachedSequence) -> None:
        """Undo what was observed since."""
        if sequence.watch is not None and self._watched is not None:
            sequence.watch.restore(self._watched)

"""All sequences over one pool: they are opened, forked, freed, preempted and resumed here."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from kilburn.errors import FreedSequence, InvalidRange, OutOfBlocks
from kilburn_kv.blocks import Copies, Pool
from kilburn_kv.lineage import Alteration, TableLineage
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.table import Table

__all__ = ["Tables"]


class Tables:
    """The sequences of an engine, by number.

    Attributes:
        pool: the blocks.
        copies: what the engine has to copy before it next writes or reads a slot.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.copies = Copies()
        self._tables: dict[int, Table] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._tables)

    def __iter__(self) -> Iterator[Table]:
        return iter(list(self._tables.values()))

    def __getitem__(self, number: int) -> Table:
        found = self._tables.get(number)
        if found is None:
            raise FreedSequence(f"there is no live sequence {number}", advice="it was freed or preempted; open or resume it")
        return found

    def open(self, key: PrefixKey | None = None, prompt: Sequence[int] = ()) -> Table:
        """A new sequence, which already has the cached part of the prompt's prefix: append `prompt[len(table):]`.

        At least the last token of the prompt is left to compute. Without a key nothing is shared.
        """
        return self._opened(next(self._numbers), key, array("i", prompt))

    def fork(self, table: Table) -> Table:
        """A new sequence with the same past. It shares every block until one of the two writes to it.

        Raises:
            FreedSequence: it was freed; nothing was shared.
        """
        self._check(table)
        made = table.fork(next(self._numbers))
        self._tables[made.number] = made
        return made

    def free(self, table: Table, why: str = "") -> None:
        """Free its blocks. Those it published can still be found, until they are reused.

        Args:
            why: why the sequence ended, such as an engine's stop reason. It helps to tell which ones come back.

        Raises:
            FreedSequence: it was freed before.
        """
        self._check(table)
        table.free(why)
        del self._tables[table.number]

    def victims(self, blocks: int, keep: Collection[int] = ()) -> list[Table]:
        """The sequences that `reserve` would preempt now: the newest, until so many blocks are free (arXiv 2309.06180).

        Those that are not `recomputable` have to be spilled before. Sequences that would free nothing are not chosen.

        Raises:
            OutOfBlocks: preempting all others would not be enough.
        """
        references = self.pool.references
        missing = blocks - self.pool.free
        chosen: list[Table] = []
        # A block is freed with its last owner.
        owners: dict[int, int] = {}
        for number in sorted(self._tables.keys() - set(keep), reverse=True):
            if missing <= 0:
                break
            chosen.append(self._tables[number])
            for block in chosen[-1].blocks:
                owners[block] = owners.get(block, references[block]) - 1
                missing -= not owners[block]
        if missing > 0:
            raise OutOfBlocks(
                f"{blocks} blocks are needed, {self.pool.free} of {self.pool.capacity} are free,"
                f" and preempting all but {len(set(keep) & set(self._tables))} kept sequences would not do",
                needed=blocks,
                advice="evict from the sequence, keep fewer, or give the pool more blocks",
            )
        return [table for table in chosen if any(not owners[block] for block in table.blocks)]

    def reserve(self, blocks: int, keep: Collection[int] = ()) -> list[TableLineage]:
        """Preempt sequences, the newest first, until so many blocks are free; those numbered in `keep` are safe.

        A preempted sequence is resumed and computed again, or restored if it is not `recomputable`. What it published
        is likely to be still cached then.

        Raises:
            OutOfBlocks: preempting all others would not be enough; none was preempted.
        """
        chosen = self.victims(blocks, keep)
        lineages = [table.lineage() for table in chosen]
        for table in chosen:
            self.free(table, "preempted")
        return lineages

    def resume(self, lineage: TableLineage) -> Table:
        """Open a preempted sequence again, under its old number, with as much of it as is still cached.

        Append `lineage.tokens[len(table):]`, with its evictions at their times. If it is not recomputable, this
        finds at most the part before the change, and the rest has to be restored.

        Raises:
            ValueError: it is live: it was resumed before.
        """
        self._check_gone(lineage)
        borders = [eviction.at for eviction in lineage.evictions]
        borders += [since for why, since in lineage.altered.items() if why != Alteration.EVICTED]
        exact = min(borders, default=len(lineage.tokens))
        return self._opened(lineage.number, lineage.key, lineage.tokens[:exact])

    def adopt(self, lineage: TableLineage, positions: array[int]) -> Table:
        """A sequence whose KV comes from elsewhere, under the number of its lineage, or a new number if that is 0.

        `positions` are the cached logical positions, ascending. The sequence gets new blocks, shares nothing, and its
        slots are in order: write all of them before anything else.

        Raises:
            OutOfBlocks, InvalidRange: nothing was opened. ValueError: it is live.
        """
        self._check_gone(lineage)
        if positions and not 0 <= positions[0] <= positions[-1] < len(lineage.tokens):
            raise InvalidRange(f"positions {positions[0]} to {positions[-1]} of a sequence of {len(lineage.tokens)} tokens")
        made = Table(lineage.number or next(self._numbers), self.pool, self.copies, lineage.key)
        made.restore(lineage)
        made.take(positions)
        self._tables[made.number] = made
        return made

    def _opened(self, number: int, key: PrefixKey | None, prompt: array[int]) -> Table:
        made = Table(number, self.pool, self.copies, key)
        if key is not None:
            made.share_prefix(prompt)
        self._tables[number] = made
        return made

    def _check(self, table: Table) -> None:
        if self._tables.get(table.number) is not table:
            raise FreedSequence(f"sequence {table.number} was freed, or is not of this pool", advice="open or resume it anew")

    def _check_gone(self, lineage: TableLineage) -> None:
        if lineage.number in self._tables:
            raise ValueError(f"sequence {lineage.number} is live")

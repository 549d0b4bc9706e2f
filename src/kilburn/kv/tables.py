"""All sequences over one pool: they are opened, forked, freed, preempted and resumed here."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from itertools import count

from kilburn.errors import FreedSequence, InvalidRange, OutOfBlocks
from kilburn.kv.blocks import Pool
from kilburn.kv.copies import Copies
from kilburn.kv.preemption import Preempted, preempted, victims
from kilburn.kv.prefixes import Key, match
from kilburn.kv.ranges import Ranges
from kilburn.kv.table import Table

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

    def open(self, key: Key | None = None, prompt: Sequence[int] = ()) -> Table:
        """A new sequence, which already has the cached part of the prompt's prefix: append `prompt[len(table):]`.

        At least the last token of the prompt is left to compute. Without a key nothing is shared.
        """
        return self._made(next(self._numbers), key, array("i", prompt))

    def fork(self, table: Table) -> Table:
        """A new sequence with the same past. It shares every block until one of the two writes to it.

        Raises:
            FreedSequence: it was freed; nothing was shared.
        """
        self._own(table)
        made = Table(next(self._numbers), self.pool, self.copies, table.key)
        self.pool.share(table._blocks)
        made._blocks, made._bases, made._digests = table._blocks[:], table._bases[:], table._digests[:]
        made._slots, made._positions, made._tokens = table._slots[:], table._positions[:], table._tokens[:]
        made._evictions, made._altered, made.pages = table._evictions[:], table.altered, table.pages.copy()
        made.stood = dict(table.stood)
        self._tables[made.number] = made
        return made

    def free(self, table: Table) -> None:
        """Free its blocks. Those it published can still be found, until they are reused.

        Raises:
            FreedSequence: it was freed before.
        """
        self._own(table)
        self.pool.release(table._blocks)
        table._freed = True
        table._blocks, table._bases = [], []
        table._slots, table._positions = array("q"), array("q")
        del self._tables[table.number]

    def victims(self, blocks: int, keep: Collection[int] = ()) -> list[Table]:
        """The sequences that `reserve` would preempt now. Those that are not `recomputable` have to be spilled before.

        Raises:
            OutOfBlocks: preempting all others would not be enough.
        """
        newest = (self._tables[number] for number in sorted(self._tables, reverse=True) if number not in keep)
        chosen = victims(self.pool, newest, blocks)
        if chosen is None:
            raise OutOfBlocks(
                f"{blocks} blocks are needed, {self.pool.free} of {self.pool.capacity} are free,"
                f" and preempting all but {len(set(keep) & set(self._tables))} kept sequences would not do",
                needed=blocks,
                advice="evict from the sequence, keep fewer, or give the pool more blocks",
            )
        return chosen

    def reserve(self, blocks: int, keep: Collection[int] = ()) -> list[Preempted]:
        """Preempt sequences, the newest first, until so many blocks are free; those numbered in `keep` are safe.

        A preempted sequence is resumed and computed again, or restored if it is not `recomputable`. What it published
        is likely to be still cached then.

        Raises:
            OutOfBlocks: preempting all others would not be enough; none was preempted.
        """
        chosen = self.victims(blocks, keep)
        records = [preempted(table) for table in chosen]
        for table in chosen:
            self.free(table)
        return records

    def resume(self, record: Preempted) -> Table:
        """Open a preempted sequence again, under its old number, with as much of it as is still cached.

        Append `record.tokens[len(table):]`, with its evictions at their times. If a record is not recomputable, this
        finds at most the part before the change, and the rest has to be restored.

        Raises:
            ValueError: it is live: it was resumed before.
        """
        if record.number in self._tables:
            raise ValueError(f"sequence {record.number} is live")
        borders = [eviction.at for eviction in record.evictions]
        borders += [since for why, since in record.altered.items() if why != "evicted"]
        exact = min(borders, default=len(record.tokens))
        return self._made(record.number, record.key, record.tokens[:exact])

    def adopt(self, record: Preempted, positions: array[int]) -> Table:
        """A sequence whose KV comes from elsewhere, under the number of its record, or a new number if that is 0.

        `positions` are the cached logical positions, ascending. The sequence gets new blocks, shares nothing, and its
        slots are in order: write all of them before anything else.

        Raises:
            OutOfBlocks, InvalidRange: nothing was opened. ValueError: it is live.
        """
        if record.number in self._tables:
            raise ValueError(f"sequence {record.number} is live")
        if positions and not 0 <= positions[0] <= positions[-1] < len(record.tokens):
            raise InvalidRange(f"positions {positions[0]} to {positions[-1]} of a sequence of {len(record.tokens)} tokens")
        pages = Ranges()
        for page, (start, stop) in record.pages.items():
            pages.put(page, start, stop)
        size, count = self.pool.size, len(positions)
        made = Table(record.number or next(self._numbers), self.pool, self.copies, record.key)
        made._blocks = self.pool.take(-(-count // size))
        for block in made._blocks:
            made._slots.extend(self.pool.ramp[block * size : block * size + size])
        del made._slots[count:]
        made._positions, made._bases = positions[:], list(positions[::size])
        made._tokens, made._evictions = record.tokens[:], list(record.evictions)
        made._altered, made.pages, made.stood = dict(record.altered), pages, dict(record.stood)
        self._tables[made.number] = made
        return made

    def _made(self, number: int, key: Key | None, prompt: array[int]) -> Table:
        made = Table(number, self.pool, self.copies, key)
        if key is not None:
            blocks, digests = match(self.pool, made._root, prompt)
            self.pool.share(blocks)
            size = self.pool.size
            held = len(blocks) * size
            made._digests, made._blocks = digests, blocks
            made._bases = list(range(0, held, size))
            for block in blocks:
                made._slots.extend(self.pool.ramp[block * size : block * size + size])
            made._positions = self.pool.ramp[:held]
            made._tokens = prompt[:held]
        self._tables[number] = made
        return made

    def _own(self, table: Table) -> None:
        if self._tables.get(table.number) is not table:
            raise FreedSequence(f"sequence {table.number} was freed, or is not of this pool", advice="open or resume it anew")

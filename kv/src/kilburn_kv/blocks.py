"""The pool: fixed-size blocks, how many sequences refer to each, which one is taken next, and the copies that wait.

There are two kinds of blocks without an owner. A *blank* block holds nothing that can be found, and is taken first. A
*named* block still holds the KV of a known prefix, and can be shared again. It is taken only when no blank block is
left. Which one, an order of eviction decides (PagedAttention, arXiv 2309.06180, takes the least recently used).
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import count

from kilburn.errors import FreedBlock, OutOfBlocks
from kilburn_kv.eviction import EvictionOrder, LruOrder, PromptUse

__all__ = ["Pool"]

SIZE = 16
"""Slots in a block by default."""

SESSIONS = 4096
"""Sessions that a pool recognises by their prefixes; of more, the oldest are forgotten."""

SESSION_SHARE = 0.75
"""Share of a prompt that the next prompt of its session has at least. One that keeps less begins anew, or compacted its past."""


class Pool:
    """`capacity` blocks of `size` slots. Slot `s` lies in block `s // size`.

    Not safe for several threads: one engine step at a time.

    Args:
        capacity: blocks in all, at least 1.
        size: slots (tokens) in a block, at least 1.
        order: which named block is taken first; None for the least recently used one.
        clock: seconds, for the order.

    Attributes:
        references: owners of each block; for reading only.
        clock: seconds, when called.
        ramp: 0, 1, 2, ... for every slot, so that a run of slots is a slice; for reading only.
    """

    def __init__(
        self,
        capacity: int,
        size: int = SIZE,
        order: EvictionOrder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if capacity < 1 or size < 1:
            raise ValueError(f"a pool needs at least one block of one slot, not {capacity} of {size}")
        self.capacity, self.size = capacity, size
        self.references = [0] * capacity
        self.ramp = array("q", range(capacity * size))
        self._blank = list(range(capacity - 1, -1, -1))
        self._cached: set[int] = set()
        self._order, self.clock = order or LruOrder(), clock
        self._numbers = count(1)
        self._marks: dict[bytes, int] = {}  # the digest at the end of most of a sequence: its session
        self._names: dict[int, bytes] = {}
        self._holders: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks without an owner: what `take` can give."""
        return len(self._blank) + len(self._cached)

    @property
    def blank(self) -> int:
        """Free blocks that hold no known prefix."""
        return len(self._blank)

    @property
    def queue(self) -> list[int]:
        """The free blocks in the order in which `take` would give them all now; slow."""
        return [*reversed(self._blank), *deepcopy(self._order).evict(len(self._cached), ())]

    def take(self, count: int) -> list[int]:
        """`count` blocks with one owner each, whose content is not defined.

        Raises:
            OutOfBlocks: fewer are free; none was taken.
        """
        if count < 0:
            raise ValueError(f"cannot take {count} blocks")
        if count > self.free:
            raise OutOfBlocks(f"{count} blocks are needed and {self.free} of {self.capacity} are free", needed=count)
        blank = self._blank
        taken = blank[: -count - 1 : -1]
        del blank[len(blank) - len(taken) :]
        for block in self._order.evict(count - len(taken), ()) if count > len(taken) else ():
            self._cached.remove(block)
            del self._holders[self._names.pop(block)]
            taken.append(block)
        references = self.references
        for block in taken:
            references[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One owner more for each of these distinct blocks; a named one may be free, and is then taken out of the queue.

        Raises:
            FreedBlock: one of them is blank, or no block; nothing was shared.
        """
        self._check_blocks(blocks)
        references, names = self.references, self._names
        for block in blocks:
            if not references[block] and block not in names:
                raise FreedBlock(f"block {block} is free and holds nothing that could be shared")
        free = [block for block in blocks if not references[block]]
        self._cached.difference_update(free)
        self._order.forget(free)
        for block in blocks:
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each of these distinct blocks, given in the order of the sequence; the last is freed first.

        Raises:
            FreedBlock: one of them has no owner, or is no block; nothing was released.
        """
        self._drop(blocks, (), self.clock(), "")

    def retire(self, blocks: Sequence[int], digests: Sequence[bytes], began: float, why: str) -> None:
        """Release the blocks of a sequence that has ended.

        It went on with the session of an earlier one if it begins with most of what that one was. A prefix that many
        share, such as a system prompt, is less.

        Args:
            digests: of its full blocks. began: when it was opened, by `clock`.
            why: why it ended, as an engine calls it: sequences that ended alike come back alike.

        Raises:
            FreedBlock: as `release`.
        """
        self._drop(blocks, digests, began, why)

    def _drop(self, blocks: Sequence[int], digests: Sequence[bytes], began: float, why: str) -> None:
        self._check_owned(blocks)
        references, names, blank = self.references, self._names, self._blank
        named: list[int] = []
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                (named if block in names else blank).append(block)
        number = next(self._numbers)
        session = self._session(digests, number)
        if named:
            named.reverse()
            self._cached.update(named)
            use = PromptUse(began, number, session)
            self._order.used(named, use)
            self._order.ended(use, self.clock(), why)

    def _session(self, digests: Sequence[bytes], number: int) -> int:
        """The session that a sequence of these full blocks goes on with; a new one gets the number."""
        if not digests:
            return number
        marks = self._marks
        session = next((marks.pop(digest) for digest in reversed(digests) if digest in marks), number)
        marks[digests[math.ceil(len(digests) * SESSION_SHARE) - 1]] = session
        while len(marks) > SESSIONS:
            del marks[next(iter(marks))]
        return session

    def slots(self, blocks: Iterable[int]) -> array[int]:
        """The slots of some blocks, in their order."""
        found = array("q")
        for block in blocks:
            found.extend(self.ramp[block * self.size : block * self.size + self.size])
        return found

    def overwrite(self, blocks: Iterable[int]) -> array[int]:
        """The same, of blocks that are about to be written: they lose their names."""
        for block in blocks:
            self.unname(block)
        return self.slots(blocks)

    def name(self, blocks: Sequence[int], digests: Sequence[bytes]) -> int:
        """Name these full blocks by their contents; returns how many names are new. Each content is found in one block
        only.

        Raises:
            FreedBlock: one of them has no owner; none was named.
        """
        self._check_owned(blocks)
        names, holders = self._names, self._holders
        new = 0
        for block, digest in zip(blocks, digests, strict=True):
            if digest not in holders:
                if block in names:
                    del holders[names[block]]
                names[block] = digest
                holders[digest] = block
                new += 1
        return new

    def unname(self, block: int) -> None:
        """Remove the name of a block, because it is about to be written; a free block becomes blank."""
        digest = self._names.pop(block, None)
        if digest is not None:
            del self._holders[digest]
            if block in self._cached:
                self._cached.remove(block)
                self._order.forget((block,))
                self._blank.append(block)

    def holder(self, digest: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._holders.get(digest)

    def digest(self, block: int) -> bytes | None:
        """The name of this block, or None."""
        return self._names.get(block)

    def _check_owned(self, blocks: Sequence[int]) -> None:
        self._check_blocks(blocks)
        if blocks and min(map(self.references.__getitem__, blocks)) < 1:
            raise FreedBlock(f"a block that nobody owns among {_first_few(blocks)}")

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        if not blocks:
            return
        if min(blocks) < 0 or max(blocks) >= self.capacity:
            raise FreedBlock(f"this pool has blocks 0 to {self.capacity - 1}, not all of {_first_few(blocks)}")
        if len(blocks) > 1 and len(set(blocks)) != len(blocks):
            raise FreedBlock(f"the same block twice in {_first_few(blocks)}")


class Copies:
    """Collects the copies from slot to slot that an engine still has to make, over any number of operations.

    An engine takes and performs them before it next writes or reads a slot. The copies of one `take` are simultaneous:
    read all sources, then write all targets, as `cache[targets] = cache[sources]` does on a tensor.
    """

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
            # What an earlier copy is to write is not there yet: it is read where that copy reads it.
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


def _first_few(blocks: Sequence[int]) -> str:
    return f"{list(blocks[:8])}{' and more' if len(blocks) > 8 else ''}"

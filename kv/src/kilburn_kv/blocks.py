"""The pool: fixed-size blocks, how many sequences refer to each, which one is taken next, and the copies that wait.

There are two kinds of blocks without an owner. A *blank* block holds nothing that can be found, and is taken first. A
*named* block still holds the KV of a known prefix, and can be shared again. It is taken only when no blank block is
left: the least recently released first, and of one sequence the tail before the head (PagedAttention, arXiv
2309.06180).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kilburn.errors import FreedBlock, OutOfBlocks

__all__ = ["Pool"]

SIZE = 16
"""Slots in a block by default."""


class Pool:
    """`capacity` blocks of `size` slots. Slot `s` lies in block `s // size`.

    Not safe for several threads: one engine step at a time.

    Args:
        capacity: blocks in all, at least 1.
        size: slots (tokens) in a block, at least 1.

    Attributes:
        references: owners of each block; for reading only.
        ramp: 0, 1, 2, ... for every slot, so that a run of slots is a slice; for reading only.
    """

    def __init__(self, capacity: int, size: int = SIZE) -> None:
        if capacity < 1 or size < 1:
            raise ValueError(f"a pool needs at least one block of one slot, not {capacity} of {size}")
        self.capacity, self.size = capacity, size
        self.references = [0] * capacity
        self.ramp = array("q", range(capacity * size))
        self._blank = list(range(capacity - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
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
        """The free blocks in the order in which `take` gives them."""
        return [*reversed(self._blank), *self._cached]

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
        for _ in range(count - len(taken)):
            block, _none = self._cached.popitem(last=False)
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
        for block in blocks:
            if not references[block]:
                del self._cached[block]
            references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One owner less for each of these distinct blocks, given in the order of the sequence; the last is freed first.

        Raises:
            FreedBlock: one of them has no owner, or is no block; nothing was released.
        """
        self._check_owned(blocks)
        references, names, blank, cached = self.references, self._names, self._blank, self._cached
        for block in reversed(blocks):
            left = references[block] - 1
            references[block] = left
            if not left:
                if block in names:
                    cached[block] = None
                else:
                    blank.append(block)

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
                del self._cached[block]
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

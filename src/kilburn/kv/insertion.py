"""Finds slots for tokens that are inserted into a gap: free slots beside it, or new blocks; and says which tokens move.

The tokens of a block are contiguous in the sequence, and their slots ascend. So new blocks can be put between two
blocks. But if one block holds both sides of a gap, and has too few free slots between them, the tokens after the gap
move. The table checks the arguments.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import NamedTuple

from kilburn.kv.blocks import Pool
from kilburn.kv.copies import Copies

__all__ = ["Insertion", "planned", "put"]


class Insertion(NamedTuple):
    """How to place tokens, and those that move behind them.

    Args:
        at: how many of the sequence's blocks stay in front of the new ones.
        front: slots to write in the block before the new ones.
        more: new blocks, filled behind `front`.
        back: slots to write in the block behind the new ones, which are full then.
        moved: cached tokens behind the gap that move, behind the inserted ones.
    """

    at: int
    front: array[int]
    more: int
    back: array[int]
    moved: int


def planned(
    pool: Pool, blocks: list[int], bases: list[int], slots: array[int], positions: array[int], first: int, count: int
) -> Insertion:
    """Place `count` tokens before the `first`-th cached one, with as few new blocks as its neighbours' free slots allow.

    A block that others own too is never written: its free slots are not free for this sequence.
    """
    size, ramp, references = pool.size, pool.ramp, pool.references
    at = bisect_right(bases, positions[first - 1]) if first else 0
    behind = slots[first] if first < len(slots) else -1
    front = back = array("q")
    moved = 0
    if at:
        block = blocks[at - 1]
        own = references[block] == 1
        after = slots[first - 1] + 1
        if behind // size == block:
            if own and behind - after >= count:
                return Insertion(at, ramp[after : after + count], 0, back, 0)
            moved = (bisect_left(positions, bases[at], first) if at < len(bases) else len(slots)) - first
        if own:
            front = ramp[after : min(block * size + size, after + count + moved)]
    missing = count + moved - len(front)
    spare = behind % size if not moved and at < len(blocks) and references[blocks[at]] == 1 else 0
    more = max(0, -((spare - missing) // size))
    left = missing - more * size
    if left > 0:
        back = ramp[behind - left : behind]
    return Insertion(at, front, more, back, moved)


def put(
    pool: Pool,
    copies: Copies,
    blocks: list[int],
    bases: list[int],
    slots: array[int],
    positions: array[int],
    first: int,
    fresh: array[int],
) -> array[int]:
    """Insert the `fresh` positions before the `first`-th of a sequence that has none of them; returns their slots.

    Raises:
        OutOfBlocks: nothing was inserted.
    """
    size, ramp = pool.size, pool.ramp
    count = len(fresh)
    at, front, more, back, moved = planned(pool, blocks, bases, slots, positions, first, count)
    taken = pool.take(more) if more else []
    if front:
        pool.unname(blocks[at - 1])
    if back:
        pool.unname(blocks[at])
    placed = front[:]
    for block in taken:
        placed.extend(ramp[block * size : block * size + size])
    behind = count + moved - len(back)
    placed[behind:] = back
    if moved:
        targets = placed[count:]
        copies.add(slots[first : first + moved], targets, blocks[at - 1 : at], {target // size for target in targets})
    slots[first : first + moved] = placed
    positions[first:first] = fresh
    blocks[at:at] = taken
    bases[at:at] = positions[first + len(front) : first + behind : size]
    if at + more < len(bases) and (back or bases[at + more] <= fresh[-1]):
        # The gap may begin where that block did: from now on it begins with the first token it still holds.
        bases[at + more] = positions[first + behind]
    return placed[:count]

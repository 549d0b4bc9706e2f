"""One sequence: its tokens by logical position, and the physical slot of each that is still cached.

Logical positions count from 0 and never shift: an eviction leaves a gap, which `insert` can fill. Evicting only drops
this sequence's view of slots, so it copies nothing and needs no block. Whole blocks are freed at once, and `defragment`
closes the gaps in the others. A shared block is copied before it is written. The table says where to write, and what
to copy first; the engine does it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from kilburn.errors import FreedSequence, InvalidRange, PrefixRefused
from kilburn_kv.blocks import Copies, Pool
from kilburn_kv.lineage import Alteration, Eviction, TableLineage
from kilburn_kv.prefixes import PrefixKey, chain_digests, find_prefix, root_digest
from kilburn_kv.ranges import Ranges


class CachedSlots(NamedTuple):
    """The cached tokens of a sequence in order: `cache[physical]` gathers them, `logical` rotates them."""

    physical: array[int]
    logical: array[int]


class _Gap(NamedTuple):
    """Slots for tokens that are inserted into a gap: free slots beside it, or new blocks; and which tokens move.

    The tokens of a block are contiguous in the sequence, and their slots ascend. So new blocks can be put between two
    blocks. But if one block holds both sides of a gap, and has too few free slots between them, the tokens after the
    gap move.

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


class Table:
    """What `Tables.open` and `Tables.fork` return. Every method raises FreedSequence once it was freed.

    Attributes:
        number: identifies it among its `Tables`; a later sequence has a higher number.
        key: under which it shares prefixes, or None.
        pages: which positions belong to which page of the window; updated by `evict` and `truncate`.
        stood: page -> the first position at which it ever stood. Tokens cached from there on may have been computed
            while the page was visible, even if it left since. Updated by `label` and `truncate`.
    """

    def __init__(self, number: int, pool: Pool, copies: Copies, key: PrefixKey | None) -> None:
        self.number, self.key = number, key
        self._began = pool.clock()
        self.pages = Ranges()
        self.stood: dict[int, int] = {}
        self._pool, self._copies = pool, copies
        self._root = root_digest(key, pool.size) if key is not None else b""
        self._blocks: list[int] = []
        # The first position ever written to each block: finds the block of a position, also behind gaps.
        self._bases: list[int] = []
        self._slots = array("q")
        self._positions = array("q")
        self._tokens = array("i")
        self._digests: list[bytes] = []
        self._evictions: list[Eviction] = []
        self._altered: dict[Alteration, int] = {}
        self._freed = False

    def __len__(self) -> int:
        """Tokens that are cached."""
        return len(self._slots)

    def __repr__(self) -> str:
        state = "freed" if self._freed else f"{len(self)} of {self.end} tokens in {len(self._blocks)} blocks"
        return f"<Table {self.number}: {state}>"

    @property
    def end(self) -> int:
        """The logical position that the next token gets."""
        return len(self._tokens)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The blocks that it owns or shares, in order."""
        return tuple(self._blocks)

    @property
    def tokens(self) -> array[int]:
        """The token at each logical position, including evicted ones, unless others were inserted there."""
        return self._tokens[:]

    @property
    def evictions(self) -> tuple[Eviction, ...]:
        """What was evicted and when: with `tokens` it says how to compute a `recomputable` cache again.

        After the point from which it is not recomputable, evictions are not listed, because they would be useless.
        """
        return tuple(self._evictions)

    @property
    def altered(self) -> dict[Alteration, int]:
        """Why it may share no prefix, each with its first position; empty for an exact sequence."""
        return dict(self._altered)

    @property
    def recomputable(self) -> bool:
        """Whether `tokens` and `evictions` give the same cache. If not, it has to be spilled to survive a preemption."""
        return not self._altered.keys() - {Alteration.EVICTED}

    @property
    def gaps(self) -> int:
        """Unused slots of its blocks, including those after the last token."""
        return len(self._blocks) * self._pool.size - len(self._slots)

    def need(self, count: int) -> int:
        """Blocks that appending `count` tokens would take from the pool."""
        self._check_alive()
        room, shared = self._tail()
        return -((room - count) // self._pool.size) + (shared > 0) if count > room else int(count > 0 and shared > 0)

    def append(self, tokens: Sequence[int]) -> array[int]:
        """Take slots for tokens at the end; returns the physical slots to write their KV to, in order.

        Raises:
            OutOfBlocks: nothing was appended; `Tables.reserve` preempts others.
            OverflowError: a token id of more than 31 bits; nothing was appended.
        """
        self._check_alive()
        fresh = array("i", tokens)
        pool, slots = self._pool, self._slots
        count, end, size, ramp = len(fresh), len(self._tokens), pool.size, pool.ramp
        if count == 1 and slots and (after := slots[-1] + 1) % size and pool.references[self._blocks[-1]] == 1:
            # This is the usual decode step; the general way below takes twice as long.
            pool.unname(self._blocks[-1])
            slots.append(after)
            self._positions.append(end)
            self._tokens += fresh
            return slots[-1:]
        if not count:
            return array("q")
        room, shared = self._tail()
        more = -((room - count) // size) if count > room else 0
        taken = pool.take(more + (shared > 0)) if more or shared else []
        if shared:
            self._unshare(taken.pop(0), shared)
        elif room:
            pool.unname(self._blocks[-1])
        start = len(slots)
        if room:
            after = slots[-1] + 1
            slots.extend(ramp[after : after + min(room, count)])
        if taken:
            slots.extend(pool.slots(taken))
            del slots[start + count :]
            self._blocks += taken
            self._bases += range(end + room, end + count, size)
        self._positions.extend(ramp[end : end + count] if end + count <= len(ramp) else array("q", range(end, end + count)))
        self._tokens.extend(fresh)
        return slots[start:]

    def insert(self, position: int, tokens: Sequence[int]) -> array[int]:
        """Put tokens into a gap, from this logical position on; returns the physical slots to write their KV to, in order.

        For a fold: a memento goes where its block was evicted. All other tokens keep their positions. They keep their
        slots too, unless one block holds both sides of the gap; then the tokens after the gap may be added to the
        copies. The new tokens replace the evicted ones, so the sequence is altered and not `recomputable`. If a page
        is partly left around them, they belong to it.

        Raises:
            InvalidRange: one of these positions is cached, or not within the sequence; nothing was inserted.
            OutOfBlocks, OverflowError: as `append`.
        """
        self._check_alive()
        fresh = array("i", tokens)
        stop = position + len(fresh)
        self._check_range(position, stop)
        positions, ramp = self._positions, self._pool.ramp
        first = bisect_left(positions, position)
        if first < len(positions) and positions[first] < stop:
            raise InvalidRange(
                f"position {positions[first]} of sequence {self.number} is cached; nothing can be inserted over it",
                advice="evict it first, or insert less",
            )
        if not fresh:
            return array("q")
        logical = ramp[position:stop] if stop <= len(ramp) else array("q", range(position, stop))
        placed = self._fill_gap(first, logical)
        self._tokens[position:stop] = fresh
        self.alter(Alteration.FOLDED, position)
        return placed

    def _plan_gap(self, first: int, count: int) -> _Gap:
        """How `count` tokens go before the `first`-th cached one, with as few new blocks as its neighbours' free slots allow.

        A block that others own too is never written: its free slots are not free for this sequence.
        """
        blocks, bases, slots, positions = self._blocks, self._bases, self._slots, self._positions
        size, ramp, references = self._pool.size, self._pool.ramp, self._pool.references
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
                    return _Gap(at, ramp[after : after + count], 0, back, 0)
                moved = (bisect_left(positions, bases[at], first) if at < len(bases) else len(slots)) - first
            if own:
                front = ramp[after : min(block * size + size, after + count + moved)]
        missing = count + moved - len(front)
        spare = behind % size if not moved and at < len(blocks) and references[blocks[at]] == 1 else 0
        more = max(0, -((spare - missing) // size))
        left = missing - more * size
        if left > 0:
            back = ramp[behind - left : behind]
        return _Gap(at, front, more, back, moved)

    def _fill_gap(self, first: int, fresh: array[int]) -> array[int]:
        """Take slots for the `fresh` positions before the `first`-th cached one; returns these slots.

        Raises:
            OutOfBlocks: nothing was taken.
        """
        pool, blocks, bases, slots, positions = self._pool, self._blocks, self._bases, self._slots, self._positions
        size, count = pool.size, len(fresh)
        at, front, more, back, moved = self._plan_gap(first, count)
        taken = pool.take(more) if more else []
        if front:
            pool.unname(blocks[at - 1])
        if back:
            pool.unname(blocks[at])
        placed = front + pool.slots(taken)
        behind = count + moved - len(back)
        placed[behind:] = back
        if moved:
            targets = placed[count:]
            self._copies.add(slots[first : first + moved], targets, blocks[at - 1 : at], {target // size for target in targets})
        slots[first : first + moved] = placed
        positions[first:first] = fresh
        blocks[at:at] = taken
        bases[at:at] = positions[first + len(front) : first + behind : size]
        if at + more < len(bases) and (back or bases[at + more] <= fresh[-1]):
            # The gap may begin where that block did: from now on it begins with the first token it still holds.
            bases[at + more] = positions[first + behind]
        return placed[:count]

    def slots(self, start: int = 0) -> CachedSlots:
        """Where the cached tokens lie, from the `start`-th of them on: copies, good until the next change."""
        self._check_alive()
        return CachedSlots(self._slots[start:], self._positions[start:])

    def label(self, page: int, start: int, stop: int) -> None:
        """Assign these positions (half-open) to a page; `evict(*table.pages[page])` drops them.

        Raises:
            InvalidRange: not a range within the sequence, the page has one, or another page's overlaps it.
        """
        self._check_alive()
        self._check_range(start, stop)
        self.pages.put(page, start, stop)
        self.stood[page] = min(start, self.stood.get(page, start))

    def count(self, start: int, stop: int) -> int:
        """How many of these logical positions are cached."""
        self._check_alive()
        return max(0, bisect_left(self._positions, stop) - bisect_left(self._positions, start))

    def evict(self, start: int, stop: int) -> int:
        """Drop these logical positions (half-open); returns how many of them were cached.

        All others keep their positions and their slots. A block is freed when none of its slots is used, so a range
        that spans block borders leaves gaps in the first and the last block. Pages of which nothing is left lose
        their range. From now on the sequence is altered, unless nothing was dropped.

        Raises:
            InvalidRange: not a range within the sequence; nothing was dropped.
        """
        self._check_alive()
        self._check_range(start, stop)
        first, last = bisect_left(self._positions, start), bisect_left(self._positions, stop)
        if first == last:
            return 0
        size, slots, blocks = self._pool.size, self._slots, self._blocks
        head = bisect_right(self._bases, self._positions[first]) - 1
        tail = bisect_right(self._bases, self._positions[last - 1]) - 1
        head += first > 0 and slots[first - 1] // size == blocks[head]
        tail -= last < len(slots) and slots[last] // size == blocks[tail]
        if head <= tail:
            self._pool.release(blocks[head : tail + 1])
            del blocks[head : tail + 1], self._bases[head : tail + 1]
        del slots[first:last], self._positions[first:last]
        for page in self.pages.over(start, stop):
            if not self.count(*self.pages[page]):
                self.pages.remove(page)
        if start < self._recomputable_until():
            self._evictions.append(Eviction(self.end, start, stop))
        self.alter(Alteration.EVICTED, start)
        return last - first

    def truncate(self, position: int) -> int:
        """Roll back to a branch point: drop everything from this logical position on, which is then the next.

        What was evicted before that position does not come back; to branch and return, fork instead. A
        sequence that was altered only from there on is exact again. Returns how many tokens were dropped.

        Raises:
            InvalidRange: the sequence is not that long.
        """
        self._check_alive()
        self._check_range(position, self.end)
        first = bisect_left(self._positions, position)
        dropped = len(self._slots) - first
        if dropped:
            kept = bisect_right(self._bases, self._positions[first - 1]) if first else 0
            self._pool.release(self._blocks[kept:])
            del self._blocks[kept:], self._bases[kept:]
            del self._slots[first:], self._positions[first:]
        del self._tokens[position:], self._digests[position // self._pool.size :]
        self.pages.cut(position)
        self.stood = {page: start for page, start in self.stood.items() if start < position}
        self._evictions = [
            Eviction(min(at, position), start, min(stop, position)) for at, start, stop in self._evictions if start < position
        ]
        self._altered = {why: since for why, since in self._altered.items() if since < position}
        return dropped

    def renew(self, places: Sequence[int]) -> array[int]:
        """Slots to overwrite cached positions, in this order; the rest of the sequence stays as it is.

        A shared block is copied first. The keys and values no longer follow from the tokens, so the sequence is
        altered: "folded" from the first position on.

        Raises:
            InvalidRange: one is not cached. OutOfBlocks: nothing was changed.
        """
        self._check_alive()
        pool, blocks, bases, slots, positions = self._pool, self._blocks, self._bases, self._slots, self._positions
        at = [bisect_left(positions, place) for place in places]
        for place, index in zip(places, at, strict=True):
            if index == len(positions) or positions[index] != place:
                raise InvalidRange(f"position {place} of sequence {self.number} is not cached", advice="insert it instead")
        if not at:
            return array("q")
        size = pool.size
        rows = {bisect_right(bases, place) - 1 for place in places}
        shared = [row for row in rows if pool.references[blocks[row]] > 1]
        for row, block in zip(shared, pool.take(len(shared)) if shared else (), strict=True):
            first = bisect_left(positions, bases[row])
            stop = bisect_left(positions, bases[row + 1]) if row + 1 < len(bases) else len(positions)
            sources = slots[first:stop]
            targets = array("q", (block * size + slot % size for slot in sources))
            self._copies.add(sources, targets, blocks[row : row + 1], (block,))
            slots[first:stop] = targets
            pool.release(blocks[row : row + 1])
            blocks[row] = block
        for row in rows:
            pool.unname(blocks[row])
        self.alter(Alteration.FOLDED, min(places))
        return array("q", (slots[index] for index in at))

    def defragment(self) -> int:
        """Close the gaps that evictions left; returns how many blocks that frees.

        If it would free no block, nothing changes. What moves is added to the copies.

        Raises:
            OutOfBlocks: so much is shared that new blocks are needed; nothing was moved.
        """
        self._check_alive()
        pool, blocks, slots = self._pool, self._blocks, self._slots
        size, total = pool.size, len(slots)
        saved = len(blocks) - -(-total // size)
        if not saved:
            return 0
        ramp = pool.ramp
        kept = 0
        while slots[kept * size : kept * size + size] == ramp[blocks[kept] * size : blocks[kept] * size + size]:
            kept += 1
        first = kept * size
        old = blocks[kept:]
        own = [block for block in old if pool.references[block] == 1]
        wanted = len(old) - saved
        targets = own[:wanted] + pool.take(max(0, wanted - len(own)))
        placed = pool.overwrite(targets)
        del placed[total - first :]
        still = 0
        while still < len(placed) and slots[first + still] == placed[still]:
            still += 1
        self._copies.add(slots[first + still :], placed[still:], old, targets)
        reused = set(targets)
        pool.release([block for block in old if block not in reused])
        slots[first:] = placed
        blocks[kept:] = targets
        self._bases[kept:] = self._positions[first::size]
        return saved

    def pack(self, count: int) -> array[int]:
        """Make room for `count` entries that each head chose for itself; returns the physical slots to write, in order.

        The engine carries out the copies and reads the selected entries before this call, and writes all of these
        slots after it. The last `count` cached positions remain as dummies, in as few blocks as possible, none of
        them shared. No page has a range any more, and the sequence is altered from its start.

        Raises:
            InvalidRange: fewer are cached; nothing was dropped.
            OutOfBlocks: so much is shared that new blocks are needed; nothing was dropped.
        """
        self._check_alive()
        if not 0 <= count <= len(self._slots):
            raise InvalidRange(f"{count} entries cannot remain of the {len(self)} that sequence {self.number} has cached")
        pool, blocks, size = self._pool, self._blocks, self._pool.size
        wanted = -(-count // size)
        own = [block for block in blocks if pool.references[block] == 1]
        # The last ones, because the head of a published prefix is worth more than its tail.
        kept = own[max(0, len(own) - wanted) :]
        targets = kept + pool.take(wanted - len(kept))
        reused = set(kept)
        pool.release([block for block in blocks if block not in reused])
        placed = pool.overwrite(targets)
        del placed[count:]
        self._blocks, self._slots = targets, placed
        self._positions = self._positions[len(self._positions) - count :]
        self._bases = list(self._positions[::size])
        self.pages = Ranges()
        self.alter(Alteration.COMPRESSED)
        return placed[:]

    def alter(self, why: Alteration, since: int = 0) -> None:
        """Mark its KV from a position on as not following from its tokens; it then publishes no prefix.

        Raises:
            InvalidRange: the sequence is not that long.
        """
        self._check_alive()
        self._check_range(since, self.end)
        self._altered[why] = min(since, self._altered.get(why, since))
        if why != Alteration.EVICTED:
            told = self._recomputable_until()
            self._evictions = [eviction for eviction in self._evictions if eviction.start < told]

    def publish(self) -> int:
        """Let others find its full blocks by content; returns how many of them were new.

        For an engine to call when the KV of all appended tokens has been written, and never before.

        Raises:
            PrefixRefused: it has no key, or was evicted from, folded, blended or compressed.
        """
        self._check_alive()
        if self.key is None:
            raise PrefixRefused(f"sequence {self.number} has no key", advice="open it with a Key to share prefixes")
        if self._altered:
            since = min(self._altered.values())
            raise PrefixRefused(
                f"sequence {self.number} was {' and '.join(self._altered)};"
                f" from position {since} on its KV is not that of its tokens",
                advice=f"do not publish it; after truncate({since}) it is exact again",
            )
        size, pool, digests, tokens = self._pool.size, self._pool, self._digests, self._tokens
        done = len(digests)
        fresh = chain_digests(digests[-1] if digests else self._root, tokens[done * size : len(tokens) // size * size], size)
        digests += fresh
        return pool.name(self._blocks[done : len(digests)], digests[done:])

    def lineage(self) -> TableLineage:
        """What outlives its blocks: a snapshot, which later changes do not affect."""
        return TableLineage(
            self.number, self.key, self.tokens, self.evictions, self.pages.items(), self.altered, dict(self.stood)
        )

    def restore(self, lineage: TableLineage) -> None:
        """Restore a snapshot; the same positions must be cached as then."""
        self._tokens, self._evictions, self._altered = lineage.tokens[:], list(lineage.evictions), dict(lineage.altered)
        self.relabel(lineage)

    def relabel(self, lineage: TableLineage) -> None:
        """Restore only which positions belong to which page."""
        self.pages, self.stood = Ranges(lineage.pages), dict(lineage.stood)

    def share_prefix(self, prompt: array[int]) -> None:
        """Take what is known of a prompt's prefix; for `Tables`, of an empty table."""
        blocks, digests = find_prefix(self._pool, self._root, prompt)
        self._pool.share(blocks)
        self._hold(blocks, self._pool.ramp[: len(blocks) * self._pool.size])
        self._digests, self._tokens = digests, prompt[: len(self._positions)]

    def take(self, positions: array[int]) -> None:
        """Take blocks of its own for the positions that are cached; for `Tables`, of an empty table.

        Raises:
            OutOfBlocks: nothing was taken.
        """
        self._hold(self._pool.take(-(-len(positions) // self._pool.size)), positions[:])

    def fork(self, number: int) -> Table:
        """A table of the same positions in the same blocks; for `Tables`."""
        made = Table(number, self._pool, self._copies, self.key)
        self._pool.share(self._blocks)
        made._blocks, made._bases, made._digests = self._blocks[:], self._bases[:], self._digests[:]
        made._slots, made._positions = self._slots[:], self._positions[:]
        made.restore(self.lineage())
        return made

    def free(self, why: str = "") -> None:
        """Give its blocks back; for `Tables`."""
        self._pool.retire(self._blocks, self._digests, self._began, why)
        self._freed = True
        self._hold([], array("q"))

    def _hold(self, blocks: list[int], positions: array[int]) -> None:
        """Have these positions in these blocks, in order."""
        self._blocks, self._positions, self._bases = blocks, positions, list(positions[:: self._pool.size])
        self._slots = self._pool.slots(blocks)[: len(positions)]

    def _recomputable_until(self) -> int:
        """The position up to which the cache follows from tokens and evictions."""
        return min((since for why, since in self._altered.items() if why != Alteration.EVICTED), default=1 << 62)

    def _check_alive(self) -> None:
        if self._freed:
            raise FreedSequence(f"sequence {self.number} was freed", advice="open or resume it anew")

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= len(self._tokens):
            raise InvalidRange(f"positions {start} to {stop} are not within 0 to {self.end} of sequence {self.number}")

    def _tail(self) -> tuple[int, int]:
        """(slots to write after the last token, tokens to copy first because the last block is shared)."""
        if not self._blocks:
            return 0, 0
        size = self._pool.size
        room = -(self._slots[-1] + 1) % size
        if room and self._pool.references[self._blocks[-1]] > 1:
            shared = len(self._slots) - bisect_left(self._positions, self._bases[-1])
            return size - shared, shared
        return room, 0

    def _unshare(self, block: int, shared: int) -> None:
        """Put the last `shared` tokens into a block of its own."""
        start = block * self._pool.size
        targets = self._pool.ramp[start : start + shared]
        self._copies.add(self._slots[-shared:], targets, self._blocks[-1:], (block,))
        self._slots[-shared:] = targets
        self._pool.release(self._blocks[-1:])
        self._blocks[-1] = block

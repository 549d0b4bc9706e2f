"""The engine: a real model over paged keys and values.

It appends, evicts, inserts, forks, rolls back and presses sequences, many in one batch. Each token keeps its logical
position, whatever leaves around it. All blocks that a step needs are allocated before it runs, so an error leaves
every sequence as it was. It does not schedule requests, and is slower than a serving engine: here the moves of the
store are exact and can be inspected.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from kilburn.errors import FreedSequence, InvalidRange, KVError, OutOfBlocks, SpecError
from kilburn_kv.attention import ForwardPass, ForwardSegment
from kilburn_kv.blocks import SIZE, Pool
from kilburn_kv.eviction import EvictionOrder
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.sequence import CachedSequence, SequenceState
from kilburn_kv.storage import Storage, span_of
from kilburn_kv.tables import Tables
from kilburn_kv.tensors import Tensor, torch
from kilburn_kv.watch import AttentionWatch
from kilburn_kv.weights import Weights

__all__ = ["Engine"]

Feed = tuple[CachedSequence, Sequence[int]]
"""A sequence, and the tokens to append to it."""


class Engine:
    """Sequences over one pool of slots.

    Not safe for several threads: one step at a time.

    Args:
        weights: what `kilburn_kv.weights.load` returns.
        tokens: size of the pool, rounded up to whole blocks.
        size: tokens of a block.
        chunk: tokens that are prefilled at a time; another split changes the last bits of logits.
        tenant: whose sequences these are; prefixes are shared only within one tenant.
        share: whether prefixes are shared at all.
        order: which free block with a known prefix is reused first; None for the least recently used one.

    Raises:
        SpecError: there is not enough memory for so many tokens.
    """

    def __init__(
        self,
        weights: Weights,
        tokens: int,
        *,
        size: int = SIZE,
        chunk: int = 512,
        tenant: str = "",
        share: bool = True,
        order: EvictionOrder | None = None,
    ) -> None:
        if tokens < 1 or size < 1 or chunk < 1:
            raise SpecError(f"an engine with {tokens=}, {size=}, {chunk=} can hold nothing", advice="give at least 1 of each")
        self.weights, self.chunk = weights, chunk
        pool = Pool(-(-tokens // size), size, order)
        self.tables = Tables(pool)
        self.storage = Storage(weights.shape, pool.capacity * size, weights.dtype, weights.device)
        self._own_key, self._share = weights.key(tenant), share
        self._kept: frozenset[int] = frozenset()  # numbers of sequences that are not preempted at the moment
        self.sequences: dict[int, CachedSequence] = {}  # live and preempted, by number

    @property
    def pool(self) -> Pool:
        """The blocks."""
        return self.tables.pool

    @property
    def identity(self) -> PrefixKey:
        """Model, dtype and tenant of the keys and values. It never changes."""
        return self._own_key

    @property
    def tenant(self) -> str:
        """Whose sequences these are."""
        return self._own_key.tenant

    @property
    def key(self) -> PrefixKey | None:
        """The key under which prefixes are shared, or None."""
        return self._own_key if self._share else None

    @property
    def used(self) -> int:
        """Bytes of keys and values in blocks that sequences own, each block counted once."""
        pool = self.pool
        return (pool.capacity - pool.free) * pool.size * self.weights.shape.bytes(self.weights.dtype)

    def open(self, prompt: Sequence[int] = (), *, needs: Collection[str] = (), recent: int = 0) -> CachedSequence:
        """A new sequence, prefilled with a prompt. A cached part of its prefix is shared, not computed again.

        Args:
            needs: what a press that will be applied has to see ("attention", "recent"). It is then observed from the
                first token on. A sequence whose attention is summed shares nothing.
            recent: how many of the last queries are observed, if "recent" is needed.

        Raises:
            OutOfBlocks: nothing was opened. SpecError: the prompt does not fit the model, or `needs` cannot be
                observed.
        """
        if isinstance(needs, str) or not set(needs) <= {"keys", "attention", "recent"} or recent < 0:
            raise SpecError(f"needs={needs!r}, recent={recent}", advice="give some of keys, attention, recent")
        self._check_tokens(prompt)
        sums, rows = "attention" in needs, recent if "recent" in needs else 0
        # The last queries run here even if the whole prompt is cached, because their attention has to be observed.
        known = prompt[: max(0, len(prompt) - rows + 1)] if rows else prompt
        table = self.tables.open(None if sums else self.key, known)
        weights = self.weights
        watch = AttentionWatch(weights.shape, weights.device, sums=sums, rows=rows) if sums or rows else None
        if watch is not None:  # the shared part ran before, without being observed
            watch.make_room(0, len(table))
        made = self.sequences[table.number] = CachedSequence(table, watch)
        try:
            self.prefill(made, prompt[len(table) :])
        except BaseException:
            self.free(made)
            raise
        return made

    def fork(self, sequence: CachedSequence) -> CachedSequence:
        """A new sequence with the same past; it shares all blocks until one of the two writes.

        Raises:
            FreedSequence: there is nothing to fork.
        """
        made = CachedSequence(self.tables.fork(sequence.table), sequence.watch.copy() if sequence.watch is not None else None)
        made.logits, made.packed = sequence.logits, sequence.packed
        made.shifts, made.first, made.owners = dict(sequence.shifts), dict(sequence.first), sequence.owners
        self.sequences[made.number] = made
        return made

    def free(self, sequence: CachedSequence, why: str = "") -> None:
        """Free its blocks; also of a preempted sequence.

        Args:
            why: see `Tables.free`.

        Raises:
            FreedSequence: it was freed before.
        """
        self._check_own(sequence)
        if sequence.lineage is None:
            self.tables.free(sequence.table, why)
        sequence.detach()
        self.sequences.pop(sequence.number, None)

    def prefill(self, sequence: CachedSequence, tokens: Sequence[int]) -> None:
        """Append tokens, a chunk at a time; afterwards `sequence.logits` are those of the next token.

        Raises:
            OutOfBlocks, SpecError, FreedSequence: nothing was appended.
        """
        table = sequence.table
        self._check_tokens(tokens)
        self.reserve(table.need(len(tokens)), [sequence])
        with _undone_on_error([sequence]):
            for start in range(0, len(tokens), self.chunk):
                self.step([(sequence, tokens[start : start + self.chunk])])

    def step(self, feeds: Sequence[Feed]) -> Tensor:
        """One forward pass: appends tokens to each sequence; returns the next logits of each, shape [feeds, vocabulary].

        If blocks run out, the newest of the other sequences are preempted, as far as they can be computed again.

        Raises:
            OutOfBlocks: preempting did not help. SpecError: a token that the model does not know, or the same
                sequence twice. FreedSequence. In all cases nothing was appended.
        """
        sequences = [sequence for sequence, _ in feeds]
        if not feeds or len({id(sequence) for sequence in sequences}) < len(feeds) or not all(len(tokens) for _, tokens in feeds):
            raise SpecError("a step takes each sequence once, with at least one token")
        for sequence, tokens in feeds:
            self._check_own(sequence)
            self._check_tokens(tokens)
        # Two that share their last block both count its copy, though one of them will find it its own: never too few.
        self.reserve(sum(sequence.table.need(len(tokens)) for sequence, tokens in feeds), sequences)
        ends = [sequence.table.end for sequence in sequences]
        with _undone_on_error(sequences):
            logits = self._run_feeds(feeds)
        for row, sequence in enumerate(sequences):
            sequence.logits = logits[row]
            table = sequence.table
            if table.key is not None and not table.altered and table.end // self.pool.size > ends[row] // self.pool.size:
                table.publish()
        return logits

    def _run_feeds(self, feeds: Sequence[Feed]) -> Tensor:
        written = array("q")
        places: list[int] = []
        last: list[int] = []
        for sequence, tokens in feeds:
            end = sequence.table.end
            if sequence.watch is not None:
                sequence.watch.make_room(len(sequence.table), len(tokens))
            written.extend(sequence.table.append(tokens))
            places.extend(range(end, end + len(tokens)))
            last.append(len(places) - 1)
        # All tables have their slots now, so no slot that is read moves any more.
        spans = [sequence.table.slots().physical for sequence, _ in feeds]
        starts = [0, *[place + 1 for place in last]]
        segments = [
            ForwardSegment(starts[row], starts[row + 1], span_of(spans[row], self.weights.device), sequence.watch)
            for row, (sequence, _) in enumerate(feeds)
        ]
        return self._forward([token for _, tokens in feeds for token in tokens], places, written, segments, last)

    def _forward(
        self, tokens: list[int], places: list[int], written: array[int], segments: list[ForwardSegment], last: list[int]
    ) -> Tensor:
        self.storage.perform(self.tables.copies)
        step = ForwardPass(self.storage, span_of(written, self.weights.device), segments)
        return self.weights.decoder.run(tokens, places, last, step)

    def insert(self, sequence: CachedSequence, position: int, tokens: Sequence[int]) -> None:
        """Put tokens into a gap, at these logical positions; they see what is cached before them.

        For a fold: the memento goes where its block was. What follows is not computed again, so it does not see the
        new tokens; `logits` stay those of the end.

        Raises:
            InvalidRange: one of the positions is cached, or not within the sequence. OutOfBlocks, SpecError,
            FreedSequence: nothing was inserted.
        """
        self._check_own(sequence)
        table, watch = sequence.check(position), sequence.watch
        self._check_tokens(tokens)
        if not len(tokens):
            return
        before = SequenceState(sequence)
        slots = self.take_slots(sequence, lambda: table.insert(position, tokens))
        try:
            first = table.count(0, position)
            if watch is not None:
                watch.make_room(first, len(tokens))
            for place in range(position, position + len(tokens)):
                sequence.shifts.pop(place, None)
            span = span_of(table.slots().physical[: first + len(tokens)], self.weights.device)
            segment = ForwardSegment(0, len(tokens), span, watch)
            self._forward(list(tokens), list(range(position, position + len(tokens))), slots, [segment], [len(tokens) - 1])
        except BaseException:
            table.evict(position, position + len(tokens))
            before.restore(sequence)
            raise

    def evict(self, sequence: CachedSequence, start: int, stop: int) -> int:
        """Drop the keys and values of logical positions (half-open). Nothing else moves, and nothing is computed.

        Keys and values that were computed while they were visible stay: the implicit channel (Memento). Returns how
        many were cached.

        Raises:
            InvalidRange, FreedSequence: nothing was dropped.
        """
        table = sequence.check(start)
        if sequence.watch is None:
            return table.evict(start, stop)
        first = table.count(0, min(start, table.end)) if start >= 0 else 0
        total = len(table)
        gone = table.evict(start, stop)
        keep = [*range(first), *range(first + gone, total)]
        sequence.watch.select(torch.tensor(keep, dtype=torch.int64, device=self.weights.device))
        return gone

    def truncate(self, sequence: CachedSequence, position: int) -> int:
        """Roll back to a branch point: drop everything from this logical position on; returns how many tokens were
        cached.

        Raises:
            InvalidRange, FreedSequence: nothing was dropped.
        """
        table = sequence.table
        before = table.end
        gone = table.truncate(position)
        if table.end < before:
            sequence.logits = None
            sequence.shifts = {place: by for place, by in sequence.shifts.items() if place < position}
            sequence.packed = min(sequence.packed, position)
        if gone and sequence.watch is not None:
            sequence.watch.select(torch.arange(len(table), device=self.weights.device))
        return gone

    def preempt(self, sequence: CachedSequence) -> None:
        """Free its blocks; `resume` computes them again from its tokens and evictions.

        Raises:
            KVError: it was folded into or pressed, so it cannot be computed again: spill it instead. FreedSequence.
        """
        if not sequence.recomputable:
            raise KVError(f"sequence {sequence.number} cannot be computed again from its tokens", advice="spill it, or keep it")
        lineage = sequence.table.lineage()
        self.tables.free(sequence.table, "preempted")
        sequence.detach(lineage)

    def resume(self, sequence: CachedSequence) -> None:
        """Compute a preempted sequence again: its tokens in order, and each eviction at its time.

        Raises:
            OutOfBlocks: it stays preempted. KVError: it was spilled, not preempted.
        """
        self._check_own(sequence)
        lineage = sequence.lineage
        if lineage is None:
            _ = sequence.table
            return
        if not lineage.recomputable or sequence.watch is not None:
            raise KVError(f"tokens do not bring sequence {sequence.number} back", advice="kilburn_kv.spill.resume does")
        logits = sequence.logits
        table = self.tables.resume(lineage)
        sequence.attach(table)
        try:
            for eviction in lineage.evictions:
                if eviction.at > table.end:
                    self.prefill(sequence, lineage.tokens[table.end : eviction.at])
                self.evict(sequence, eviction.start, eviction.stop)
                # Its gaps may have been closed before; then it has to fit into as few blocks again.
                with suppress(OutOfBlocks):
                    table.defragment()
            if table.end < len(lineage.tokens):
                self.prefill(sequence, lineage.tokens[table.end :])
            table.relabel(lineage)
        except BaseException:
            self.tables.free(table)
            sequence.detach(lineage)
            raise
        finally:
            sequence.logits = logits  # also None: what was evicted since changes what `refresh` would find

    def refresh(self, sequence: CachedSequence) -> Tensor:
        """The logits of the next token; if they are not known, the last token is computed again.

        Raises:
            InvalidRange: nothing is cached, or the last token was evicted.
        """
        if sequence.logits is None:
            table = sequence.table
            if not table.end or not table.count(table.end - 1, table.end):
                raise InvalidRange(f"the last token of sequence {sequence.number} is not cached", advice="append one")
            if self.pool.references[table.blocks[-1]] > 1:
                self.reserve(1, [sequence])
            before, tokens = SequenceState(sequence), table.tokens[-1:]
            self.storage.perform(self.tables.copies)
            kept = self.storage.gather(span_of(table.slots(len(table) - 1).physical, self.weights.device))
            self.truncate(sequence, table.end - 1)
            try:
                self.step([(sequence, tokens)])
            except BaseException:
                slots = table.append(tokens)
                self.storage.perform(self.tables.copies)
                self.storage.scatter(span_of(slots, self.weights.device), *kept)
                before.restore(sequence)
                raise
            table.relabel(before.lineage)
            # What it looked at was noted when it ran first.
            before.restore_watch(sequence)
        assert sequence.logits is not None
        return sequence.logits

    def take_slots(self, sequence: CachedSequence, take: Callable[[], array[int]]) -> array[int]:
        """The slots that `take` finds for a sequence; if blocks run out, others are preempted, and it is called once more.

        Raises:
            OutOfBlocks: that did not help.
        """
        try:
            return take()
        except OutOfBlocks as error:
            self.reserve(error.needed, [sequence])
        return take()

    def reserve(self, blocks: int, keep: Sequence[CachedSequence]) -> None:
        """Make so many blocks free: preempt the newest sequences except these, as far as they can be computed again.

        Raises:
            OutOfBlocks: that is not enough; none was preempted.
        """
        if blocks <= self.pool.free:
            return
        safe = {sequence.number for sequence in keep} | self._kept
        safe |= {number for number, sequence in self.sequences.items() if sequence.is_live and not sequence.recomputable}
        for lineage in self.tables.reserve(blocks, safe):
            self.sequences[lineage.number].detach(lineage)

    @contextmanager
    def keeping(self, sequences: Sequence[CachedSequence]) -> Iterator[None]:
        """While it is entered, these sequences are not preempted for one another or for others."""
        before = self._kept
        self._kept = before | {sequence.number for sequence in sequences}
        try:
            yield
        finally:
            self._kept = before

    def _check_own(self, sequence: CachedSequence) -> None:
        """Another engine's sequence has its slots in other memory, so it would read and write the wrong slots."""
        if self.sequences.get(sequence.number) is not sequence:
            _ = sequence.lineage or sequence.table
            raise FreedSequence(f"sequence {sequence.number} is not of this engine", advice="use the engine that opened it")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        size = self.weights.decoder.vocabulary
        if len(tokens) and not (min(tokens) >= 0 and max(tokens) < size):
            raise SpecError(f"a token id outside 0 to {size - 1}", advice="use this model's own tokenizer")


@contextmanager
def _undone_on_error(sequences: Sequence[CachedSequence]) -> Iterator[None]:
    """What the block appends to sequences is taken back where it raises."""
    before = [
        (sequence, sequence.table.end, sequence.logits, sequence.watch.state() if sequence.watch is not None else None)
        for sequence in sequences
    ]
    try:
        yield
    except BaseException:
        for sequence, end, logits, watched in before:
            sequence.table.truncate(end)
            sequence.logits = logits
            if sequence.watch is not None and watched is not None:
                sequence.watch.restore(watched)
        raise

"""Random sequences over a small pool, against plain lists: paged is as contiguous, and no block is lost or overwritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import count as counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kilburn.errors import FreedSequence, InvalidRange, KVError, OutOfBlocks, PrefixRefused
from kilburn_kv.blocks import Pool
from kilburn_kv.eviction import EvictionOrder, LruK, LruOrder
from kilburn_kv.lineage import TableLineage
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.table import Table
from kilburn_kv.tables import Tables

KEYS = (PrefixKey("a", "float32"), PrefixKey("a", "bfloat16"), PrefixKey("a", "float32", "other"), None)
TOKENS = st.one_of(st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1), min_size=6, max_size=14))
CHOICE = st.integers(0, 1_000)

Cell = tuple[Any, ...]
"""What a model would have computed for a token: from the key, and from all it could see."""


@dataclass
class Plain:
    """A sequence as a list: (position, cell) of each cached token."""

    key: PrefixKey | None
    cells: list[tuple[int, Cell]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    evicted: set[int] = field(default_factory=set)
    folded: int | None = None
    blended: int | None = None
    packed: bool = False
    pages: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self, token: int) -> Cell:
        """The cell of a next token: like KV, it depends on every cached token before it."""
        seen = tuple(self.tokens) if not self.altered else ("altered", *(hash(cell) for _, cell in self.cells))
        return (self.key, len(self.tokens), token, seen)

    @property
    def altered(self) -> dict[str, int]:
        since = {
            "evicted": min(self.evicted, default=None),
            "folded": self.folded,
            "blended": self.blended,
            "compressed": 0 if self.packed else None,
        }
        return {why: position for why, position in since.items() if position is not None}

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The runs of positions that are not cached."""
        borders = [-1, *(position for position, _ in self.cells), len(self.tokens)]
        return [(a + 1, b) for a, b in pairwise(borders) if a + 1 < b]


def state_of(tables: Tables) -> object:
    """Everything that an error must leave as it was."""
    pool = tables.pool
    names = {block: pool.digest(block) for block in range(pool.capacity)}
    sequences = [(t.number, t.blocks, t.slots(), t.tokens, t.evictions, t.altered, t.pages.items(), t.gaps) for t in tables]
    return deepcopy((pool.references, pool.queue, names, sequences, len(tables.copies)))


class Engine(RuleBasedStateMachine):
    """Tables with a memory behind them that is written and copied as an engine would."""

    @initialize(capacity=st.integers(4, 24), size=st.integers(1, 4), order=st.sampled_from([LruOrder, LruK]))
    def start(self, capacity: int, size: int, order: type[EvictionOrder]) -> None:
        self.seconds, self.order = 0.0, order
        self.tables = Tables(Pool(capacity, size, order(), lambda: self.seconds))
        self.pool = self.tables.pool
        self.memory: dict[int, Cell] = {}
        self.plain: dict[int, Plain] = {}
        self.waiting: list[tuple[TableLineage, Plain]] = []
        self.dead: list[Table] = []
        self.page = 0
        self.pending: set[int] = set()
        self.inserted = counter()

    def pick(self, choice: int) -> tuple[Table, Plain]:
        number = sorted(self.plain)[choice % len(self.plain)]
        return self.tables[number], self.plain[number]

    def copied(self) -> dict[int, Cell]:
        """The memory as it is once what is pending was copied."""
        sources, targets = deepcopy(self.tables.copies).take()
        assert len(set(targets)) == len(targets)
        for target in targets:
            block = target // self.pool.size
            assert target in self.pending or self.pool.references[block] <= 1, "a copy into a shared block"
            assert self.pool.digest(block) is None, "a copy into a block with a known content"
        self.pending = set(targets)
        return self.memory | dict(zip(targets, [self.memory[source] for source in sources], strict=True))

    def copy(self) -> None:
        self.memory = self.copied()
        self.tables.copies.take()
        self.pending = set()

    def put(self, slot: int, cell: Cell) -> None:
        block = slot // self.pool.size
        assert self.pool.references[block] == 1, "a shared block was written"
        assert self.pool.digest(block) is None, "a block with a known content was written"
        self.memory[slot] = cell

    def write(self, table: Table, plain: Plain, tokens: Sequence[int]) -> None:
        """Append and compute; nothing changes where blocks run out."""
        before, need, free = state_of(self.tables), table.need(len(tokens)), self.pool.free
        if need > free:
            with pytest.raises(OutOfBlocks) as raised:
                table.append(tokens)
            assert raised.value.needed == need
            assert state_of(self.tables) == before
            return
        slots = table.append(tokens)
        assert self.pool.free == free - need
        self.copy()
        for slot, token in zip(slots, tokens, strict=True):
            self.put(slot, plain.run(token))
            plain.cells.append((len(plain.tokens), self.memory[slot]))
            plain.tokens.append(token)

    def adopt(self, table: Table, key: PrefixKey | None, prompt: Sequence[int]) -> Plain:
        """What was found of a prompt must be exactly what computing it gives."""
        held = len(table)
        assert held % self.pool.size == 0
        assert held < max(1, len(prompt))
        plain = Plain(key)
        for token in prompt[:held]:
            plain.cells.append((len(plain.tokens), plain.run(token)))
            plain.tokens.append(token)
        self.plain[table.number] = plain
        return plain

    @rule(key=st.sampled_from(KEYS), prompt=TOKENS)
    def open(self, key: PrefixKey | None, prompt: list[int]) -> None:
        table = self.tables.open(key, prompt)
        plain = self.adopt(table, key, prompt)
        self.write(table, plain, prompt[len(table) :])

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE, tokens=TOKENS)
    def append(self, choice: int, tokens: list[int]) -> None:
        self.write(*self.pick(choice), tokens)

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE)
    def fork(self, choice: int) -> None:
        table, plain = self.pick(choice)
        free = self.pool.free
        child = self.tables.fork(table)
        assert self.pool.free == free
        self.plain[child.number] = deepcopy(plain)

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE)
    def free(self, choice: int) -> None:
        table, _ = self.pick(choice)
        queue, references = self.pool.queue, list(self.pool.references)
        blocks = table.blocks
        self.tables.free(table)
        del self.plain[table.number]
        self.dead.append(table)
        freed = [block for block in reversed(blocks) if references[block] == 1]
        named = [block for block in freed if self.pool.digest(block)]
        blank = [block for block in freed if not self.pool.digest(block)]
        blanks = len(queue) - sum(1 for block in queue if self.pool.digest(block))
        assert self.pool.queue[: len(blank) + blanks] == [*reversed(blank), *queue[:blanks]]
        if self.order == "lru":
            assert self.pool.queue[len(blank) + blanks :] == [*queue[blanks:], *named]

    @rule(seconds=st.sampled_from([0.5, 20.0, 5000.0, 1e6]))
    def wait(self, seconds: float) -> None:
        self.seconds += seconds

    @precondition(lambda self: self.dead)
    @rule(choice=CHOICE)
    def touch_the_dead(self, choice: int) -> None:
        table = self.dead[choice % len(self.dead)]
        before = state_of(self.tables)
        calls = (
            lambda: table.append([1]),
            lambda: table.evict(0, 0),
            lambda: table.truncate(0),
            lambda: table.insert(0, []),
            lambda: table.pack(0),
            table.slots,
            table.defragment,
            table.publish,
            lambda: self.tables.fork(table),
            lambda: self.tables.free(table),
        )
        for call in calls:
            with pytest.raises(FreedSequence):
                call()
        assert state_of(self.tables) == before

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE, at=CHOICE, count=st.integers(-1, 7))
    def evict(self, choice: int, at: int, count: int) -> None:
        table, plain = self.pick(choice)
        start = at % (len(plain.tokens) + 2) - 1
        stop = start + count
        before = state_of(self.tables)
        if not 0 <= start <= stop <= len(plain.tokens):
            with pytest.raises(InvalidRange):
                table.evict(start, stop)
            assert state_of(self.tables) == before
            return
        kept = [(position, cell) for position, cell in plain.cells if not start <= position < stop]
        where = dict(zip(table.slots().logical, table.slots().physical, strict=True))
        gone = table.evict(start, stop)
        assert gone == len(plain.cells) - len(kept)
        assert all(where[position] == slot for slot, position in zip(*table.slots(), strict=True)), "a survivor moved"
        plain.cells = kept
        plain.evicted |= set(range(start, stop)) if gone else set()
        plain.pages = {
            page: (a, b)
            for page, (a, b) in plain.pages.items()
            if not (gone and a < stop and start < b) or any(a <= position < b for position, _ in kept)
        }

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE, gap=CHOICE, skip=st.integers(-1, 3), tokens=st.lists(st.integers(2, 3), max_size=9), fit=st.booleans())
    def insert(self, choice: int, gap: int, skip: int, tokens: list[int], fit: bool) -> None:
        """Into one of its gaps; where `fit` is not set, perhaps also over what is cached or behind its end."""
        table, plain = self.pick(choice)
        start, stop = plain.gaps[gap % len(plain.gaps)] if plain.gaps else (gap % (len(plain.tokens) + 1), 0)
        start = max(start, start + skip) if fit else start + skip
        tokens = tokens[: max(0, stop - start)] if fit else tokens
        stop = start + len(tokens)
        before, blocks, size = state_of(self.tables), len(table.blocks), self.pool.size
        free_before_it = not any(start <= position < stop for position, _ in plain.cells)
        where = dict(zip(table.slots().logical, table.slots().physical, strict=True))
        try:
            slots = table.insert(start, tokens)
        except InvalidRange:
            assert not (0 <= start <= stop <= len(plain.tokens) and free_before_it)
            assert state_of(self.tables) == before
            return
        except OutOfBlocks:
            assert self.pool.free < -(-(len(tokens) + size - 1) // size), "there was room"
            assert state_of(self.tables) == before
            return
        assert 0 <= start <= stop <= len(plain.tokens)
        assert free_before_it
        if not tokens:
            assert state_of(self.tables) == before
            return
        assert len(table.blocks) - blocks <= -(-(len(tokens) + size - 1) // size)
        now = dict(zip(table.slots().logical, table.slots().physical, strict=True))
        moved = [position for position in where if now[position] != where[position]]
        assert all(position >= stop for position in moved)
        assert len({where[position] // size for position in moved}) <= 1
        self.copy()
        cells = [
            (start + index, (plain.key, start + index, token, ("altered", next(self.inserted))))
            for index, token in enumerate(tokens)
        ]
        for slot, (_, cell) in zip(slots, cells, strict=True):
            self.put(slot, cell)
        plain.cells = sorted(plain.cells + cells, key=lambda item: item[0])
        plain.tokens[start:stop] = tokens
        plain.folded = start if plain.folded is None else min(start, plain.folded)

    @precondition(lambda self: self.plain)
    @rule(
        choice=CHOICE, at=CHOICE, size=st.integers(1, 12), skip=st.integers(0, 2), tokens=st.lists(st.integers(2, 3), min_size=1)
    )
    def fold(self, choice: int, at: int, size: int, skip: int, tokens: list[int]) -> None:
        """What a fold does: a memento into the gap that its block leaves."""
        _, plain = self.pick(choice)
        start = at % (len(plain.tokens) + 1)
        stop = min(start + size, len(plain.tokens))
        self.evict(choice, start + 1, stop - start)
        gaps = [index for index, (a, b) in enumerate(plain.gaps) if a <= start < b]
        if gaps:
            self.insert(choice, gaps[0], skip, tokens, True)

    @precondition(lambda self: any(len(plain.cells) > 4 for plain in self.plain.values()))
    @rule(choice=CHOICE, count=CHOICE, most=st.booleans())
    def pack(self, choice: int, count: int, most: bool) -> None:
        """The engine reads the first cached tokens and writes what it made of them where the table says."""
        table, plain = self.pick(choice)
        count = count % (len(plain.cells) + 2) if most else -(count % 2)
        self.copy()
        read = [self.memory[slot] for slot in table.slots().physical[: max(0, count)]]
        before = state_of(self.tables)
        own = sum(1 for block in table.blocks if self.pool.references[block] == 1)
        wanted = -(-count // self.pool.size)
        refused: type[KVError] | None = OutOfBlocks if wanted - own > self.pool.free else None
        if not 0 <= count <= len(plain.cells):
            refused = InvalidRange
        if refused:
            with pytest.raises(refused):
                table.pack(count)
            assert state_of(self.tables) == before
            return
        slots = table.pack(count)
        assert len(table.blocks) == wanted
        assert len(self.tables.copies) == 0
        places = [position for position, _ in plain.cells[len(plain.cells) - count :]]
        plain.cells = [(at, (plain.key, at, None, ("altered", hash(cell)))) for at, cell in zip(places, read, strict=True)]
        for slot, (_, cell) in zip(slots, plain.cells, strict=True):
            self.put(slot, cell)
        plain.packed, plain.pages = True, {}

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE, back=st.integers(-1, 8))
    def truncate(self, choice: int, back: int) -> None:
        table, plain = self.pick(choice)
        position = len(plain.tokens) - back
        before = state_of(self.tables)
        if not 0 <= position <= len(plain.tokens):
            with pytest.raises(InvalidRange):
                table.truncate(position)
            assert state_of(self.tables) == before
            return
        kept = [(at, cell) for at, cell in plain.cells if at < position]
        assert table.truncate(position) == len(plain.cells) - len(kept)
        plain.cells = kept
        del plain.tokens[position:]
        plain.evicted = {at for at in plain.evicted if at < position}
        plain.folded = plain.folded if plain.folded is not None and plain.folded < position else None
        plain.blended = plain.blended if plain.blended is not None and plain.blended < position else None
        plain.packed = plain.packed and position > 0
        plain.pages = {page: (a, min(b, position)) for page, (a, b) in plain.pages.items() if a < position}

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE)
    def defragment(self, choice: int) -> None:
        table, plain = self.pick(choice)
        before, blocks = state_of(self.tables), len(table.blocks)
        try:
            saved = table.defragment()
        except OutOfBlocks:
            assert state_of(self.tables) == before
            return
        assert len(table.blocks) == blocks - saved == -(-len(plain.cells) // self.pool.size)

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE, since=st.integers(0, 20))
    def blend(self, choice: int, since: int) -> None:
        table, plain = self.pick(choice)
        since = min(since, len(plain.tokens))
        table.alter("blended", since)
        plain.blended = since if plain.blended is None else min(since, plain.blended)

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE)
    def publish(self, choice: int) -> None:
        table, plain = self.pick(choice)
        self.copy()
        before = state_of(self.tables)
        if table.altered or plain.key is None:
            with pytest.raises(PrefixRefused):
                table.publish()
            assert state_of(self.tables) == before
            return
        assert not plain.altered
        table.publish()

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE, at=CHOICE, count=st.integers(0, 6))
    def label(self, choice: int, at: int, count: int) -> None:
        table, plain = self.pick(choice)
        start = at % (len(plain.tokens) + 1)
        stop = start + count
        self.page += 1
        fits = start < stop <= len(plain.tokens) and all(stop <= a or b <= start for a, b in plain.pages.values())
        before = state_of(self.tables)
        try:
            table.label(self.page, start, stop)
        except InvalidRange:
            assert not fits
            assert state_of(self.tables) == before
            return
        assert fits
        plain.pages[self.page] = (start, stop)

    @precondition(lambda self: self.plain)
    @rule(blocks=st.integers(0, 15), keep=st.sets(CHOICE, max_size=2))
    def reserve(self, blocks: int, keep: set[int]) -> None:
        safe = {sorted(self.plain)[choice % len(self.plain)] for choice in keep}
        before = state_of(self.tables)
        others: Counter[int] = Counter(block for number in safe for block in self.tables[number].blocks)
        try:
            chosen = [table.number for table in self.tables.victims(blocks, safe)]
            assert state_of(self.tables) == before
            records = self.tables.reserve(blocks, safe)
        except OutOfBlocks:
            assert self.pool.capacity - len(others) < blocks, "there was something to preempt"
            assert state_of(self.tables) == before
            return
        assert self.pool.free >= blocks
        assert [record.number for record in records] == chosen
        assert not safe & set(chosen)
        for record in records:
            plain = self.plain.pop(record.number)
            assert list(record.tokens) == plain.tokens
            assert record.pages == dict(sorted(plain.pages.items(), key=lambda item: item[1]))
            self.waiting.append((record, plain))

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        """Computed again with its evictions at their places, it is what it was; or it says that it would not be."""
        record, old = self.waiting.pop()
        table = self.tables.resume(record)
        plain = self.adopt(table, record.key, list(record.tokens))
        assert record.recomputable == (old.altered.keys() <= {"evicted"})
        if not record.recomputable:
            assert len(table) <= min(since for why, since in old.altered.items() if why != "evicted")
            return
        for at, start, stop in record.evictions:
            self.write(table, plain, record.tokens[len(plain.tokens) : at])
            if len(plain.tokens) < at:
                return
            assert len(plain.tokens) == at
            table.evict(start, stop)
            plain.cells = [(position, cell) for position, cell in plain.cells if not start <= position < stop]
            plain.evicted |= set(range(start, stop))
        self.write(table, plain, record.tokens[len(plain.tokens) :])
        if plain.tokens == old.tokens:
            assert [position for position, _ in plain.cells] == [position for position, _ in old.cells]

    @invariant()
    def paged_is_as_contiguous(self) -> None:
        memory = self.copied()
        for number, plain in self.plain.items():
            table = self.tables[number]
            physical, logical = table.slots()
            assert list(logical) == [position for position, _ in plain.cells]
            assert [memory[slot] for slot in physical] == [cell for _, cell in plain.cells]
            assert list(table.tokens) == plain.tokens
            assert table.altered == plain.altered
            assert table.recomputable == (plain.altered.keys() <= {"evicted"})
            assert table.pages.items() == dict(sorted(plain.pages.items(), key=lambda item: item[1]))
            assert list(dict.fromkeys(slot // self.pool.size for slot in physical)) == list(table.blocks)
            assert all(a < b for a, b in pairwise(physical) if a // self.pool.size == b // self.pool.size)

    @invariant()
    def owners_are_references_and_none_leaks(self) -> None:
        owners: Counter[int] = Counter(block for table in self.tables for block in table.blocks)
        assert self.pool.references == [owners[block] for block in range(self.pool.capacity)]
        queue = self.pool.queue
        assert len(queue) == len(set(queue)) == self.pool.free
        assert set(queue) == {block for block in range(self.pool.capacity) if not owners[block]}
        assert all(len(table.blocks) == len(set(table.blocks)) for table in self.tables)
        assert {table.number for table in self.tables} == set(self.plain)

    @invariant()
    def a_known_block_holds_what_its_prefix_gives(self) -> None:
        """Every cell of it was computed by an unaltered sequence, and two blocks hold the same only under one name."""
        for block in range(self.pool.capacity):
            if self.pool.digest(block):
                cells = [self.memory[slot] for slot in range(block * self.pool.size, (block + 1) * self.pool.size)]
                assert all("altered" not in cell[3] for cell in cells)
                assert [cell[1] % self.pool.size for cell in cells] == list(range(self.pool.size))

    def teardown(self) -> None:
        for table in list(self.tables) if hasattr(self, "tables") else []:
            self.tables.free(table)
        if hasattr(self, "tables"):
            assert self.pool.free == self.pool.capacity


TestEngine = Engine.TestCase
TestEngine.settings = settings(max_examples=100, stateful_step_count=40)

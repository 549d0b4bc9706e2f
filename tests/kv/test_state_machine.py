"""Random sequences over a small pool, against plain lists: paged is as contiguous, and no block is lost or overwritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kilburn.errors import FreedSequence, InvalidRange, OutOfBlocks, PrefixRefused
from kilburn.kv.blocks import Pool
from kilburn.kv.preemption import Preempted
from kilburn.kv.prefixes import Key
from kilburn.kv.table import Table
from kilburn.kv.tables import Tables

KEYS = (Key("a", "float32"), Key("a", "bfloat16"), Key("a", "float32", "other"), None)
TOKENS = st.one_of(st.lists(st.integers(0, 1), max_size=3), st.lists(st.integers(0, 1), min_size=6, max_size=14))
CHOICE = st.integers(0, 1_000)

Cell = tuple[Any, ...]
"""What a model would have computed for a token: from the key, and from all it could see."""


@dataclass
class Plain:
    """A sequence as a list: (position, cell) of each cached token."""

    key: Key | None
    cells: list[tuple[int, Cell]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    evicted: set[int] = field(default_factory=set)
    blended: int | None = None
    pages: dict[int, tuple[int, int]] = field(default_factory=dict)

    def run(self, token: int) -> Cell:
        """The cell of a next token: like KV, it depends on every cached token before it."""
        exact = not self.evicted and self.blended is None
        seen = tuple(self.tokens) if exact else ("altered", *(hash(cell) for _, cell in self.cells))
        return (self.key, len(self.tokens), token, seen)

    @property
    def altered(self) -> bool:
        return bool(self.evicted) or self.blended is not None


def state_of(tables: Tables) -> object:
    """Everything that an error must leave as it was."""
    pool = tables.pool
    names = {block: pool.digest(block) for block in range(pool.capacity)}
    sequences = [(t.number, t.blocks, t.slots(), t.tokens, t.evictions, t.altered, t.pages.items(), t.gaps) for t in tables]
    return deepcopy((pool.references, pool.queue, names, sequences, len(tables.copies)))


class Engine(RuleBasedStateMachine):
    """Tables with a memory behind them that is written and copied as an engine would."""

    @initialize(capacity=st.integers(4, 24), size=st.integers(1, 4))
    def start(self, capacity: int, size: int) -> None:
        self.tables = Tables(Pool(capacity, size))
        self.pool = self.tables.pool
        self.memory: dict[int, Cell] = {}
        self.plain: dict[int, Plain] = {}
        self.waiting: list[tuple[Preempted, Plain]] = []
        self.dead: list[Table] = []
        self.page = 0

    def pick(self, choice: int) -> tuple[Table, Plain]:
        number = sorted(self.plain)[choice % len(self.plain)]
        return self.tables[number], self.plain[number]

    def copy(self) -> None:
        sources, targets = self.tables.copies.take()
        assert len(set(targets)) == len(targets)
        for target in targets:
            assert self.pool.references[target // self.pool.size] <= 1, "a copy into a shared block"
        cells = [self.memory[source] for source in sources]
        self.memory.update(zip(targets, cells, strict=True))

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
            block = slot // self.pool.size
            assert self.pool.references[block] == 1, "a shared block was written"
            assert self.pool.digest(block) is None, "a block with a known content was written"
            self.memory[slot] = plain.run(token)
            plain.cells.append((len(plain.tokens), self.memory[slot]))
            plain.tokens.append(token)

    def adopt(self, table: Table, key: Key | None, prompt: Sequence[int]) -> Plain:
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
    def open(self, key: Key | None, prompt: list[int]) -> None:
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
        assert self.pool.queue == [*reversed(blank), *queue[:blanks], *queue[blanks:], *named]

    @precondition(lambda self: self.dead)
    @rule(choice=CHOICE)
    def touch_the_dead(self, choice: int) -> None:
        table = self.dead[choice % len(self.dead)]
        before = state_of(self.tables)
        calls = (
            lambda: table.append([1]),
            lambda: table.evict(0, 0),
            lambda: table.truncate(0),
            table.slots,
            table.compact,
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
            if not (a < stop and start < b and start < stop) or any(a <= position < b for position, _ in kept)
        }

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
        plain.blended = plain.blended if plain.blended is not None and plain.blended < position else None
        plain.pages = {page: (a, min(b, position)) for page, (a, b) in plain.pages.items() if a < position}

    @precondition(lambda self: self.plain)
    @rule(choice=CHOICE)
    def compact(self, choice: int) -> None:
        table, plain = self.pick(choice)
        before, blocks = state_of(self.tables), len(table.blocks)
        try:
            saved = table.compact()
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
            records = self.tables.reserve(blocks, safe)
        except OutOfBlocks:
            assert self.pool.capacity - len(others) < blocks, "there was something to preempt"
            assert state_of(self.tables) == before
            return
        assert self.pool.free >= blocks
        assert not safe & {record.number for record in records}
        for record in records:
            plain = self.plain.pop(record.number)
            assert list(record.tokens) == plain.tokens
            assert record.pages == dict(sorted(plain.pages.items(), key=lambda item: item[1]))
            self.waiting.append((record, plain))

    @precondition(lambda self: self.waiting)
    @rule()
    def resume(self) -> None:
        """Computed again with its evictions at their places, it is what it was."""
        record, old = self.waiting[-1]
        if old.blended is not None:
            return
        self.waiting.pop()
        table = self.tables.resume(record)
        plain = self.adopt(table, record.key, list(record.tokens))
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
        self.copy()
        for number, plain in self.plain.items():
            table = self.tables[number]
            physical, logical = table.slots()
            assert list(logical) == [position for position, _ in plain.cells]
            assert [self.memory[slot] for slot in physical] == [cell for _, cell in plain.cells]
            assert list(table.tokens) == plain.tokens
            assert bool(table.altered) == plain.altered
            assert table.pages.items() == dict(sorted(plain.pages.items(), key=lambda item: item[1]))
            assert {slot // self.pool.size for slot in physical} == set(table.blocks)

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

"""Tokens put into a gap, and a cache packed per head: where they go, what moves for them, what it costs others."""

from __future__ import annotations

import pytest

from kilburn.errors import FreedSequence, InvalidRange, OutOfBlocks, PrefixRefused
from kilburn_kv.blocks import Pool
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.table import Table
from kilburn_kv.tables import Tables

KEY = PrefixKey("smol", "float32")


def tables_of(capacity: int = 8, size: int = 4) -> Tables:
    return Tables(Pool(capacity, size))


def filled(tables: Tables, count: int) -> Table:
    table = tables.open(KEY)
    table.append(range(count))
    return table


def slots_of(table: Table) -> dict[int, int]:
    slots = table.slots()
    return dict(zip(slots.logical, slots.physical, strict=True))


def test_a_memento_goes_where_its_page_was_and_nothing_else_moves() -> None:
    """The page spans three blocks, of which the middle one was freed; two tokens fit behind what is left of the first."""
    tables = tables_of()
    table = filled(tables, 16)
    table.label(7, 2, 10)
    table.evict(*table.pages[7])
    before = slots_of(table)
    assert list(table.insert(2, [100, 101])) == [2, 3]
    table.label(8, 2, 4)
    assert {position: slot for position, slot in slots_of(table).items() if position in before} == before
    assert list(table.slots().logical) == [0, 1, 2, 3, *range(10, 16)]
    assert list(table.tokens) == [0, 1, 100, 101, *range(4, 16)]
    assert (table.altered, table.recomputable) == ({"evicted": 2, "folded": 2}, False)
    assert (len(tables.copies), len(table.blocks), table.end) == (0, 3, 16)
    assert table.evict(*table.pages[8]) == 2
    assert slots_of(table) == before
    assert 8 not in table.pages


def test_room_on_both_sides_of_a_gap_is_used_before_a_new_block() -> None:
    tables = tables_of()
    table = filled(tables, 16)
    table.evict(2, 10)
    free = tables.pool.free
    assert list(table.insert(3, [100, 101, 102, 103])) == [2, 3, 8, 9]
    assert tables.pool.free == free
    assert table.evict(5, 16) == 8
    assert list(table.slots().logical) == [0, 1, 3, 4]
    assert table.blocks == (0,)
    table.append([1])
    assert len(table.blocks) == 2


def test_a_whole_page_goes_back_into_its_gap_with_one_new_block() -> None:
    tables = tables_of()
    table = filled(tables, 16)
    table.evict(2, 10)
    free = tables.pool.free
    slots = table.insert(2, range(8))
    assert len(set(slots)) == 8
    assert tables.pool.free == free - 1
    assert list(table.slots().logical) == list(range(16))
    assert (table.gaps, len(tables.copies)) == (0, 0)
    assert table.evict(4, 8) == 4
    assert tables.pool.free == free


@pytest.mark.parametrize("count", [1, 2], ids=["in part", "wholly"])
def test_a_gap_within_one_block_is_filled_in_place(count: int) -> None:
    tables = tables_of()
    table = filled(tables, 8)
    table.evict(1, 3)
    assert list(table.insert(1, [100] * count)) == [1, 2][:count]
    assert (len(tables.copies), len(table.blocks)) == (0, 2)


def test_a_block_that_was_compacted_is_split_where_the_tokens_do_not_fit_between() -> None:
    tables = tables_of()
    table = filled(tables, 16)
    table.evict(1, 9)
    assert table.defragment() == 1
    tables.copies.take()
    before = slots_of(table)
    slots = table.insert(1, [100, 101, 102])
    sources, targets = tables.copies.take()
    assert list(sources) == [before[position] for position in (9, 10, 11)], "what stood behind the gap in its block"
    assert [slots_of(table)[position] for position in (9, 10, 11)] == list(targets)
    assert list(slots) == list(sources)
    assert list(table.slots().logical) == [0, 1, 2, 3, *range(9, 16)]
    assert len(table.blocks) == 3
    table.evict(3, 10)
    table.evict(14, 16)
    assert {slot // 4 for slot in table.slots().physical} == set(table.blocks)


def test_between_full_blocks_a_new_one_stands() -> None:
    tables = tables_of()
    table = filled(tables, 12)
    table.evict(4, 8)
    table.insert(5, [100])
    assert len(table.blocks) == 3
    assert len(tables.copies) == 0
    table.insert(6, [101, 102])
    assert len(table.blocks) == 3, "the rest of that block takes what follows"
    assert list(table.slots().logical) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(InvalidRange, match=r"position 5 of sequence 1 is cached.*\(evict it first, or insert less\)"):
        table.insert(4, [1, 2])
    table.insert(4, [99])
    assert list(table.slots().logical) == list(range(12))
    assert list(table.tokens[4:8]) == [99, 100, 101, 102]


def test_the_front_and_the_end_and_all_of_a_sequence_are_gaps_like_others() -> None:
    tables = tables_of()
    table = filled(tables, 12)
    table.evict(0, 6)
    assert list(table.insert(4, [100, 101])) == [4, 5]
    table.insert(0, [98, 99])
    assert list(table.slots().logical) == [0, 1, 4, 5, *range(6, 12)]
    table.evict(6, 12)
    assert list(table.insert(6, [102])) == [6]
    assert list(table.append([103])) == [7]
    assert table.slots().logical[-1] == 12
    table.evict(0, table.end)
    assert table.blocks == ()
    assert len(table.insert(3, [1, 2, 3, 4, 5])) == 5
    assert len(table.blocks) == 2
    assert list(table.slots().logical) == [3, 4, 5, 6, 7]


def test_what_a_fork_shares_is_not_written() -> None:
    tables = tables_of(12)
    table = filled(tables, 16)
    table.publish()
    fork = tables.fork(table)
    before = table.slots()
    fork.evict(2, 10)
    first = fork.insert(2, [100, 101, 102])
    assert not {slot // 4 for slot in first} & set(table.blocks)
    assert len(tables.copies) == 0
    fork.evict(13, 14)
    second = fork.insert(13, [103])
    assert not {slot // 4 for slot in second} & set(table.blocks)
    sources, targets = tables.copies.take()
    assert list(sources) == [before.physical[14], before.physical[15]]
    assert not {slot // 4 for slot in targets} & set(table.blocks)
    assert (table.slots(), table.altered, list(table.tokens)) == (before, {}, list(range(16)))
    assert len(tables.open(KEY, range(17))) == 16
    again = tables.fork(fork)
    assert (again.slots(), again.altered, again.recomputable) == (fork.slots(), fork.altered, False)


def test_a_published_block_that_gets_tokens_is_no_longer_found() -> None:
    tables = tables_of()
    table = filled(tables, 8)
    table.publish()
    table.evict(5, 7)
    assert len(tables.open(KEY, range(9))) == 8
    tables.free(list(tables)[-1])
    table.insert(5, [100])
    assert len(tables.open(KEY, range(9))) == 4


def test_without_blocks_nothing_is_inserted() -> None:
    tables = tables_of(4)
    table = filled(tables, 16)
    table.evict(2, 6)
    fork = tables.fork(table)
    before = (fork.blocks, fork.slots(), fork.altered, list(fork.tokens), list(tables.pool.references))
    with pytest.raises(OutOfBlocks) as raised:
        fork.insert(2, [100])
    assert raised.value.needed == 1
    assert (fork.blocks, fork.slots(), fork.altered, list(fork.tokens), list(tables.pool.references)) == before
    tables.free(table)
    fork.insert(2, [100])


@pytest.mark.parametrize(("position", "count"), [(-1, 1), (7, 2), (8, 1), (1, 2), (3, 2)])
def test_only_a_gap_takes_tokens(position: int, count: int) -> None:
    table = filled(tables_of(), 8)
    table.evict(2, 4)
    table.evict(7, 8)
    before = (table.slots(), table.altered, list(table.tokens))
    with pytest.raises(InvalidRange):
        table.insert(position, [100] * count)
    with pytest.raises(OverflowError):
        table.insert(2, [1, 2**31])
    assert len(table.insert(2, [])) == 0
    assert (table.slots(), table.altered, list(table.tokens)) == before


def test_rolled_back_to_before_the_memento_it_is_exact_again() -> None:
    tables = tables_of()
    table = filled(tables, 12)
    table.evict(5, 9)
    table.insert(6, [100, 101])
    table.truncate(7)
    assert (list(table.slots().logical), table.altered) == ([0, 1, 2, 3, 4, 6], {"evicted": 5, "folded": 6})
    table.insert(5, [99])
    assert list(table.tokens) == [0, 1, 2, 3, 4, 99, 100]
    table.append([1, 2])
    with pytest.raises(PrefixRefused, match="evicted and folded; from position 5 on"):
        table.publish()
    table.truncate(5)
    assert (table.altered, table.recomputable) == ({}, True)
    assert table.publish() == 1
    assert len(tables.open(KEY, range(5))) == 4


def test_compact_closes_what_a_memento_left() -> None:
    tables = tables_of()
    table = filled(tables, 16)
    table.evict(1, 13)
    table.insert(5, [100])
    table.insert(9, [101])
    assert table.defragment() == 0
    assert list(table.slots().logical) == [0, 5, 9, 13, 14, 15]
    table.append([1, 2, 3])
    assert len(table.blocks) == 3
    assert {slot // 4 for slot in table.slots().physical} == set(table.blocks)


def test_what_was_folded_cannot_be_computed_again_and_says_so_before_it_is_preempted() -> None:
    tables = tables_of()
    exact, folded = filled(tables, 12), filled(tables, 12)
    folded.publish()
    folded.evict(5, 11)
    folded.insert(5, [100])
    exact.evict(2, 3)
    assert [(table.number, table.recomputable) for table in tables.victims(8)] == [(2, False), (1, True)]
    newer, older = tables.reserve(8)
    assert (newer.recomputable, older.recomputable) == (False, True)
    assert dict(newer.altered) == {"evicted": 5, "folded": 5}
    again = tables.resume(newer)
    assert (len(again), again.recomputable) == (4, True), "only the block before the first alteration"


def test_a_packed_cache_lies_in_blocks_of_its_own() -> None:
    tables = tables_of(12)
    table = filled(tables, 15)
    table.publish()
    table.label(1, 0, 4)
    table.label(2, 8, 15)
    fork = tables.fork(table)
    fork.append([15, 16])
    tables.copies.take()
    before = table.slots()
    slots = fork.pack(6)
    assert slots == fork.slots().physical
    assert list(fork.slots().logical) == [11, 12, 13, 14, 15, 16]
    assert (len(fork.blocks), fork.altered, fork.pages.items()) == (2, {"compressed": 0}, {})
    assert not set(fork.blocks) & set(table.blocks)
    assert (table.slots(), len(tables.copies), fork.recomputable) == (before, 0, False)
    assert len(tables.open(KEY, range(16))) == 12, "what was published is still found"
    assert list(fork.append([17])) == [slots[-1] + 1]


def test_packing_alone_needs_no_block_and_forgets_what_it_overwrites() -> None:
    tables = tables_of(4)
    table = filled(tables, 16)
    table.publish()
    assert table.pack(5)[0] == 8
    assert tables.pool.free == 2
    assert len(tables.open(KEY, range(17))) == 8, "the head is still found, the tail is overwritten"
    assert len(table.pack(0)) == 0
    assert (table.blocks, table.end) == ((), 16)
    table.append([1])
    assert list(table.slots().logical) == [16]
    table.truncate(0)
    assert table.altered == {}


def test_packing_without_blocks_or_by_a_wrong_count_drops_nothing() -> None:
    tables = tables_of(4)
    table = filled(tables, 16)
    fork = tables.fork(table)
    fork.label(1, 2, 5)
    before = (fork.blocks, fork.slots(), fork.altered, fork.pages.items(), list(tables.pool.references))
    with pytest.raises(OutOfBlocks) as raised:
        fork.pack(5)
    assert raised.value.needed == 2
    for count in (-1, 17):
        with pytest.raises(InvalidRange, match=f"{count} entries cannot remain of the 16"):
            fork.pack(count)
    assert (fork.blocks, fork.slots(), fork.altered, fork.pages.items(), list(tables.pool.references)) == before
    tables.free(fork)
    with pytest.raises(FreedSequence):
        fork.pack(0)
    with pytest.raises(FreedSequence):
        fork.insert(0, [])

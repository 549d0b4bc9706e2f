"""Sequences over blocks: what is shared, what is copied, what stays where it was."""

from __future__ import annotations

import hashlib
import json
import struct
from array import array

import pytest

from kilburn.errors import FreedSequence, InvalidRange, OutOfBlocks, PrefixRefused
from kilburn_kv.blocks import Copies, Pool
from kilburn_kv.prefixes import PrefixKey, chain_digests, root_digest
from kilburn_kv.tables import Tables

KEY = PrefixKey("smol", "float32")


def tables_of(capacity: int = 8, size: int = 4) -> Tables:
    return Tables(Pool(capacity, size))


def test_a_page_that_spans_block_borders_frees_what_is_wholly_in_it() -> None:
    tables = tables_of()
    table = tables.open(KEY)
    table.append(range(16))
    table.label(7, 2, 10)
    before = table.blocks
    assert table.evict(*table.pages[7]) == 8
    assert table.blocks == (before[0], before[2], before[3])
    assert list(table.slots().logical) == [0, 1, *range(10, 16)]
    assert list(table.slots().physical) == [0, 1, *range(10, 16)]
    assert (table.end, len(table), table.gaps, len(tables.copies)) == (16, 8, 4, 0)
    assert 7 not in table.pages
    table.append([99])
    assert table.slots().logical[-1] == 16


def test_a_page_that_is_partly_gone_keeps_its_range() -> None:
    table = tables_of().open()
    table.append(range(10))
    table.label(1, 0, 6)
    table.label(2, 6, 10)
    table.evict(4, 8)
    assert table.pages.items() == {1: (0, 6), 2: (6, 10)}
    assert [table.count(*table.pages[page]) for page in (1, 2)] == [4, 2]
    table.truncate(9)
    assert table.pages[2] == (6, 9)


def test_compact_moves_only_what_stands_behind_a_gap() -> None:
    tables = tables_of()
    table = tables.open()
    table.append(range(16))
    table.evict(5, 9)
    table.evict(10, 12)
    assert table.defragment() == 1
    assert tables.copies.take() == (array("q", [9, 12, 13, 14, 15]), array("q", [5, 6, 7, 8, 9]))
    assert list(table.slots().logical) == [0, 1, 2, 3, 4, 9, 12, 13, 14, 15]
    assert table.defragment() == 0


def test_compact_leaves_what_others_share_and_forgets_what_it_overwrites() -> None:
    tables = tables_of(12)
    table = tables.open(KEY)
    table.append(range(16))
    table.publish()
    fork = tables.fork(table)
    before = table.slots()
    fork.evict(5, 7)
    fork.evict(9, 11)
    assert fork.defragment() == 1
    assert table.slots() == before
    assert not {slot // 4 for slot in tables.copies.take()[1]} & set(table.blocks)
    assert len(tables.open(KEY, range(17))) == 16
    tables.free(fork)
    tables.free(list(tables)[-1])
    table.evict(5, 7)
    table.evict(9, 11)
    assert table.defragment() == 1
    assert len(tables.open(KEY, range(17))) == 4


def test_after_compact_the_next_eviction_finds_its_blocks() -> None:
    tables = tables_of()
    table = tables.open()
    table.append(range(24))
    table.evict(2, 10)
    assert table.defragment() == 1
    assert list(table.slots().logical) == [0, 1, *range(10, 24)]
    table.evict(12, 16)
    assert (len(table.blocks), len(table)) == (3, 12)
    assert {slot // 4 for slot in table.slots().physical} == set(table.blocks)
    table.truncate(12)
    assert (len(table.blocks), list(table.slots().logical)) == (1, [0, 1, 10, 11])


def test_compact_without_a_block_to_spare_changes_nothing() -> None:
    tables = tables_of(3)
    table = tables.open()
    table.append(range(12))
    fork = tables.fork(table)
    fork.evict(1, 3)
    fork.evict(5, 7)
    before = (fork.blocks, fork.slots(), list(tables.pool.references))
    with pytest.raises(OutOfBlocks):
        fork.defragment()
    assert (fork.blocks, fork.slots(), tables.pool.references) == before
    assert len(tables.copies) == 0


def test_what_is_to_be_computed_again_follows_a_roll_back() -> None:
    table = tables_of().open()
    table.append(range(12))
    table.evict(2, 4)
    table.evict(6, 9)
    table.evict(10, 12)
    table.truncate(8)
    assert table.evictions == ((8, 2, 4), (8, 6, 8))


def test_evicting_needs_no_block_even_of_a_shared_sequence_in_a_full_pool() -> None:
    tables = tables_of(2)
    table = tables.open()
    table.append(range(8))
    fork = tables.fork(table)
    assert fork.evict(1, 7) == 6
    assert tables.pool.free == 0
    assert list(table.slots().logical) == list(range(8))
    table.evict(0, 4)
    assert tables.pool.free == 0
    fork.evict(0, 1)
    assert tables.pool.free == 1


def test_a_fork_shares_until_one_of_them_writes() -> None:
    tables = tables_of()
    table = tables.open()
    table.append(range(6))
    fork = tables.fork(table)
    assert fork.blocks == table.blocks
    assert fork.need(1) == 1
    (slot,) = fork.append([6])
    assert tables.copies.take() == (array("q", [4, 5]), array("q", [8, 9]))
    assert slot == 10
    assert fork.blocks[0] == table.blocks[0]
    assert fork.blocks[1] != table.blocks[1]
    assert list(table.append([7])) == [6]
    assert len(tables.copies) == 0


def test_a_fork_of_a_freed_sequence_is_refused() -> None:
    tables = tables_of()
    table = tables.open()
    table.append(range(6))
    tables.free(table)
    with pytest.raises(FreedSequence, match=r"kv: sequence 1 was freed, or is not of this pool \(open or resume it anew\)"):
        tables.fork(table)
    with pytest.raises(FreedSequence, match="no live sequence 1"):
        tables[1]
    assert tables.pool.free == 8
    assert "freed" in repr(table)


def test_a_sequence_of_another_pool_is_refused() -> None:
    mine, other = tables_of(), tables_of()
    table = other.open()
    mine.open()
    with pytest.raises(FreedSequence, match="not of this pool"):
        mine.free(table)
    assert (len(mine), len(other)) == (1, 1)


def test_a_branch_that_is_rolled_back_leaves_its_parent_as_it_was() -> None:
    tables = tables_of()
    table = tables.open(KEY)
    table.append(range(6))
    blocks, slots = table.blocks, table.slots()
    branch = tables.fork(table)
    branch.append(range(9))
    branch.evict(0, 5)
    tables.free(branch)
    assert (table.blocks, table.slots(), table.altered) == (blocks, slots, {})
    assert tables.pool.free == 6


def test_a_prompt_finds_the_full_blocks_of_the_same_prefix_under_the_same_key() -> None:
    tables = tables_of(16)
    table = tables.open(KEY)
    table.append(range(11))
    assert table.publish() == 2
    assert table.publish() == 0
    assert tables.open(KEY, range(11)).blocks == table.blocks[:2]
    assert len(tables.open(KEY, range(8))) == 4, "the last token has to run"
    assert len(tables.open(KEY, [0, 1, 2, 3, 9, 5, 6, 7, 8])) == 4
    assert len(tables.open(KEY, [9, 1, 2, 3, 4, 5, 6, 7, 8])) == 0
    for key in (PrefixKey("other", "float32"), PrefixKey("smol", "bfloat16"), PrefixKey("smol", "float32", "tenant"), None):
        assert len(tables.open(key, range(11))) == 0


def test_a_prefix_outlives_its_sequence_until_its_blocks_are_needed() -> None:
    tables = tables_of(3)
    table = tables.open(KEY)
    table.append(range(9))
    table.publish()
    tables.free(table)
    again = tables.open(KEY, range(9))
    assert len(again) == 8
    tables.free(again)
    tables.open().append(range(8))
    assert len(tables.open(KEY, range(9))) == 4, "the tail went first"


def test_a_published_block_that_is_written_again_is_no_longer_found() -> None:
    tables = tables_of()
    table = tables.open(KEY)
    table.append(range(8))
    table.publish()
    table.truncate(6)
    assert len(tables.open(KEY, range(9))) == 8
    for other in list(tables)[1:]:
        tables.free(other)
    table.append([9, 9])
    assert len(tables.open(KEY, range(9))) == 4
    tables.free(list(tables)[-1])
    assert table.publish() == 1
    assert len(tables.open(KEY, [0, 1, 2, 3, 4, 5, 9, 9, 1])) == 8


def test_a_published_block_is_also_forgotten_when_one_token_of_it_changes() -> None:
    tables = tables_of()
    table = tables.open(KEY)
    table.append(range(8))
    table.publish()
    table.truncate(7)
    table.append([9])
    assert len(tables.open(KEY, range(9))) == 4


@pytest.mark.parametrize("why", ["evicted", "blended", "compressed"])
def test_an_altered_sequence_shares_no_prefix_until_it_is_rolled_back(why: str) -> None:
    tables = tables_of()
    table = tables.open(KEY)
    table.append(range(12))
    if why == "evicted":
        table.evict(6, 8)
    else:
        table.alter(why, 6)  # type: ignore[arg-type]
    fork = tables.fork(table)
    for altered in (table, fork):
        with pytest.raises(PrefixRefused, match=f"was {why}; from position 6 on .*after truncate\\(6\\) it is exact again"):
            altered.publish()
    tables.free(fork)
    assert len(tables.open(KEY, range(12))) == 0
    table.truncate(7)
    assert table.altered == {why: 6}
    table.truncate(6)
    assert table.publish() == 1
    with pytest.raises(PrefixRefused, match="has no key"):
        tables.open().publish()


def test_out_of_blocks_preempts_the_newest_or_changes_nothing() -> None:
    tables = tables_of(6)
    old, middle, new = (tables.open(KEY) for _ in range(3))
    for table in (old, middle, new):
        table.append(range(table.number, table.number + 8))
        table.publish()
    with pytest.raises(OutOfBlocks):
        old.append(range(5))
    (record,) = tables.reserve(old.need(5), keep={old.number})
    assert (record.number, list(record.tokens)) == (3, list(range(3, 11)))
    old.append(range(5))
    with pytest.raises(OutOfBlocks, match=r"all but 2 kept sequences would not do \(evict from the sequence"):
        tables.reserve(1, keep={1, 2})
    assert {table.number for table in tables} == {1, 2}
    tables.free(old)
    assert tables.resume(record).number == 3
    with pytest.raises(ValueError, match="sequence 3 is live"):
        tables.resume(record)
    assert tables.open().number == 4


def test_a_preempted_sequence_finds_again_what_it_published() -> None:
    tables = tables_of()
    table = tables.open(KEY)
    table.append(range(10))
    table.publish()
    table.evict(1, 3)
    table.append([10, 11])
    (record,) = tables.reserve(8)
    assert (record.evictions, dict(record.altered)) == (((10, 1, 3),), {"evicted": 1})
    again = tables.resume(record)
    assert (len(again), again.altered) == (8, {})


def test_a_preempted_sequence_takes_over_nothing_that_was_computed_after_its_eviction() -> None:
    tables = tables_of()
    table = tables.open(KEY)
    table.append(range(10))
    table.evict(1, 3)
    table.append(range(10, 14))
    (record,) = tables.reserve(8)
    exact = tables.open(KEY)
    exact.append(range(14))
    assert exact.publish() == 3
    assert len(tables.resume(record)) == 8


def test_of_two_copies_to_one_slot_the_later_counts() -> None:
    copies = Copies()
    copies.add(array("q", [1]), array("q", [5]), [0], [1])
    copies.add(array("q", [2]), array("q", [5]), [0], [1])
    assert copies.take() == (array("q", [2]), array("q", [5]))


def test_preempting_spares_a_fork_that_would_free_nothing() -> None:
    tables = tables_of(4)
    kept, other = tables.open(), tables.open()
    kept.append(range(8))
    other.append(range(8))
    fork = tables.fork(kept)
    assert [record.number for record in tables.reserve(2, keep={kept.number})] == [other.number]
    assert list(tables) == [kept, fork]


@pytest.mark.parametrize(
    ("page", "start", "stop"), [(1, 4, 6), (2, 1, 3), (2, 0, 9), (2, 4, 4), (2, 6, 9), (2, -1, 1)],
    ids=["known", "overlaps", "covers", "empty", "beyond", "negative"],
)  # fmt: skip
def test_a_page_has_one_range_of_its_own(page: int, start: int, stop: int) -> None:
    table = tables_of().open()
    table.append(range(8))
    table.label(1, 2, 4)
    with pytest.raises(InvalidRange):
        table.label(page, start, stop)
    assert table.pages.items() == {1: (2, 4)}
    with pytest.raises(InvalidRange, match="page 5 has no range"):
        table.pages[5]


def test_a_token_that_is_none_changes_nothing() -> None:
    table = tables_of().open()
    table.append(range(3))
    with pytest.raises(OverflowError):
        table.append([1, 2**31])
    assert (len(table), table.end, len(table.append([]))) == (3, 3, 0)


def test_copies_that_read_what_is_yet_to_be_copied_read_where_it_comes_from() -> None:
    copies = Copies()
    copies.add(array("q", [1, 2]), array("q", [2, 3]), [0], [0])
    copies.add(array("q", [8]), array("q", [7]), [2], [1])
    copies.add(array("q", [2, 3]), array("q", [4, 1]), [0], [0, 1])
    assert len(copies) == 5
    sources, targets = copies.take()
    memory = dict(enumerate("abcdefghij"))
    memory.update(zip(targets, [memory[source] for source in sources], strict=True))
    assert "".join(memory[slot] for slot in range(8)) == "acbcbfgi"
    assert copies.take() == (array("q"), array("q"))


def test_a_digest_is_the_same_in_every_process() -> None:
    """From the definition, by other means: SHA-256 of the parent and of each token in four bytes, little-endian."""
    root = hashlib.sha256(json.dumps(["kilburn.kv", 1, "smol", "float32", "", 4], separators=(",", ":")).encode()).digest()
    assert root_digest(KEY, 4) == root
    first = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 70000)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 0, 0, 0, 1)).digest()
    assert list(chain_digests(root, array("i", [1, 2, 3, 70000, 0, 0, 0, 1, 5]), 4)) == [first, second]


def test_keys_do_not_run_together() -> None:
    keys = [PrefixKey("a", "b", "c"), PrefixKey("ab", "", "c"), PrefixKey("a", "bc", ""), PrefixKey('a","b', "c", "")]
    assert len({root_digest(key, size) for key in keys for size in (4, 8)}) == 8

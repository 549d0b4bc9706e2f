"""The pool: what is taken next, and what it refuses."""

from __future__ import annotations

import pytest

from kilburn.errors import FreedBlock, KVError, OutOfBlocks
from kilburn_kv.blocks import Pool


def test_blank_blocks_go_first_then_the_least_recently_released_tails_before_heads() -> None:
    pool = Pool(7, 4)
    first, second = pool.take(3), pool.take(2)
    pool.name([*first, *second], [b"%d" % block for block in (*first, *second)])
    pool.release(second)
    pool.release(first)
    assert pool.blank == 2
    assert pool.take(7)[2:] == [*reversed(second), *reversed(first)]


def test_a_block_that_is_shared_again_is_the_most_recent_when_it_is_released() -> None:
    pool = Pool(3, 4)
    blocks = pool.take(3)
    pool.name(blocks, [b"%d" % block for block in blocks])
    pool.release(blocks)
    pool.share([blocks[2]])
    pool.release([blocks[2]])
    assert pool.queue == [blocks[1], blocks[0], blocks[2]]


def test_a_block_that_is_taken_is_no_longer_found() -> None:
    pool = Pool(1, 4)
    (block,) = pool.take(1)
    assert pool.name([block], [b"a"]) == 1
    pool.release([block])
    assert pool.holder(b"a") == block
    pool.take(1)
    assert pool.holder(b"a") is None
    assert pool.digest(block) is None


def test_of_two_blocks_with_the_same_content_one_is_found() -> None:
    pool = Pool(2, 4)
    one, two = pool.take(2)
    assert pool.name([one, two], [b"a", b"a"]) == 1
    pool.release([one, two])
    assert (pool.holder(b"a"), pool.blank) == (one, 1)


def test_a_free_block_that_is_unnamed_becomes_blank() -> None:
    pool = Pool(2, 4)
    (block,) = pool.take(1)
    pool.name([block], [b"a"])
    pool.release([block])
    pool.unname(block)
    assert (pool.blank, pool.free, pool.holder(b"a")) == (2, 2, None)


def test_out_of_blocks_takes_none_and_says_what_to_do() -> None:
    pool = Pool(4, 4)
    pool.take(2)
    with pytest.raises(
        OutOfBlocks, match=r"kv: 3 blocks are needed and 2 of 4 are free \(.*preempt with Tables.reserve\)"
    ) as raised:
        pool.take(3)
    assert raised.value.needed == 3
    assert isinstance(raised.value, KVError)
    assert pool.free == 2


@pytest.mark.parametrize(
    "blocks", [[0, 2], [0, 0], [0, -1], [0, 4], [0, 3]], ids=["blank", "twice", "negative", "beyond", "free"]
)
def test_wrong_blocks_change_nothing(blocks: list[int]) -> None:
    pool = Pool(4, 4)
    assert pool.take(2) == [0, 1]
    before = (list(pool.references), pool.queue)
    for change in (pool.share, pool.release):
        with pytest.raises(FreedBlock):
            change(blocks)
        assert (pool.references, pool.queue) == before


def test_a_block_without_owner_cannot_be_named() -> None:
    pool = Pool(1)
    with pytest.raises(FreedBlock, match="nobody owns"):
        pool.name([0], [b"a"])
    assert pool.holder(b"a") is None


def test_a_block_that_is_named_anew_is_found_under_the_new_name_only() -> None:
    pool = Pool(1)
    pool.name(pool.take(1), [b"a"])
    pool.name([0], [b"b"])
    assert (pool.holder(b"a"), pool.holder(b"b"), pool.digest(0)) == (None, 0, b"b")


@pytest.mark.parametrize(("capacity", "size"), [(0, 16), (1, 0), (-1, 16)])
def test_a_pool_of_nothing_is_refused(capacity: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        Pool(capacity, size)


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot take -1"):
        Pool(1).take(-1)

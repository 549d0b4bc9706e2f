"""What block operations of the KV level cost: microseconds for each block that an operation touches.

The baseline of the same run is the least that an owner of blocks can do in Python: pop a number from a
list of free ones, and push it back. A decode step touches a block only every `size` tokens, so it is also
given for each token.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from figures import Row, emit, median, parser
from kilburn_kv.blocks import Pool
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.table import Table
from kilburn_kv.tables import Tables

KEY = PrefixKey("model", "float32", "tenant")
Prepared = tuple[Callable[[], object], int]
"""What is timed, and how many blocks it touches."""


def pop_and_push(blocks: int, size: int) -> Prepared:
    free = list(range(blocks))

    def work() -> None:
        held = [free.pop() for _ in range(blocks)]
        while held:
            free.append(held.pop())

    return work, 2 * blocks


def filled(blocks: int, size: int, spare: int = 2) -> tuple[Tables, Table]:
    """One sequence of so many full blocks, in a pool with `spare` times as many."""
    tables = Tables(Pool(blocks * spare + 64, size))
    table = tables.open(KEY)
    table.append(range(blocks * size))
    return tables, table


def take_and_release(blocks: int, size: int) -> Prepared:
    pool = Pool(blocks, size)
    return lambda: pool.release(pool.take(blocks)), 2 * blocks


def take_named(blocks: int, size: int) -> Prepared:
    tables, table = filled(blocks, size, 1)
    table.publish()
    tables.free(table)
    return lambda: tables.pool.take(tables.pool.free), tables.pool.free


def append_prompt(blocks: int, size: int) -> Prepared:
    tables = Tables(Pool(blocks, size))
    prompt = list(range(blocks * size))
    table = tables.open(KEY)
    return lambda: table.append(prompt), blocks


def append_tokens(blocks: int, size: int) -> Prepared:
    tables = Tables(Pool(blocks, size))
    table = tables.open(KEY)

    def work() -> None:
        append = table.append
        for token in range(blocks * size):
            append((token,))

    return work, blocks


def publish(blocks: int, size: int) -> Prepared:
    _, table = filled(blocks, size)
    return table.publish, blocks


def open_known(blocks: int, size: int) -> Prepared:
    tables, table = filled(blocks, size)
    table.publish()
    prompt = [*range(blocks * size), 0]
    return lambda: tables.open(KEY, prompt), blocks


def fork_and_free(blocks: int, size: int) -> Prepared:
    tables, table = filled(blocks, size)
    return lambda: tables.free(tables.fork(table)), 2 * blocks


def write_shared(blocks: int, size: int) -> Prepared:
    """Forks of a sequence whose last block is half full: each copies it and writes one token."""
    tables = Tables(Pool(2 * blocks + 8, size))
    table = tables.open(KEY)
    table.append(range(4 * size + size // 2))
    forks = [tables.fork(table) for _ in range(blocks)]

    def work() -> None:
        for fork in forks:
            fork.append((1,))
        tables.copies.take()

    return work, blocks


def evict_pages(blocks: int, size: int) -> Prepared:
    """Every second of pages of ten and a half blocks, in random order."""
    _, table = filled(blocks, size)
    page = 10 * size + size // 2
    starts = list(range(0, blocks * size - page + 1, 2 * page)) or [0]
    random.Random(0).shuffle(starts)

    def work() -> None:
        for start in starts:
            table.evict(start, min(start + page, table.end))

    return work, max(1, len(starts) * page // size)


def insert_into_gaps(blocks: int, size: int, count: int, shared: bool = False) -> Prepared:
    """So many tokens each into gaps of ten and a half blocks, in random order; what is touched are the blocks they fill."""
    tables, table = filled(blocks, size)
    page = 10 * size + size // 2
    starts = list(range(0, blocks * size - page + 1, 2 * page)) or [0]
    random.Random(0).shuffle(starts)
    count = min(count, page, table.end)
    for start in starts:
        table.evict(start, min(start + page, table.end))
    if shared:
        table = tables.fork(table)
    tokens = list(range(count))

    def work() -> None:
        for start in starts:
            table.insert(start, tokens)

    return work, max(1, len(starts) * count // size)


def insert_pages(blocks: int, size: int) -> Prepared:
    return insert_into_gaps(blocks, size, 10 * size + size // 2)


def insert_shared(blocks: int, size: int) -> Prepared:
    return insert_into_gaps(blocks, size, 10 * size + size // 2, shared=True)


def insert_mementos(blocks: int, size: int) -> Prepared:
    """Of two blocks each: the fixed cost of an insertion, and moving the positions behind it, fall on few blocks."""
    return insert_into_gaps(blocks, size, 2 * size)


def pack(blocks: int, size: int) -> Prepared:
    _, table = filled(blocks, size)
    return lambda: table.pack(blocks * size // 2), blocks


def pack_shared(blocks: int, size: int) -> Prepared:
    tables, table = filled(blocks, size)
    fork = tables.fork(table)
    return lambda: fork.pack(blocks * size // 2), blocks


def defragment(blocks: int, size: int) -> Prepared:
    """After every second half block was evicted: half of the tokens move."""
    _, table = filled(blocks, size)
    for start in range(0, blocks * size, size):
        table.evict(start, start + size // 2)
    return table.defragment, blocks


def truncate(blocks: int, size: int) -> Prepared:
    _, table = filled(blocks, size)
    return lambda: table.truncate(size // 2), blocks


def preempt(blocks: int, size: int) -> Prepared:
    """Until all of the pool is free, from sequences of 64 blocks."""
    tables = Tables(Pool(blocks, size))
    each = min(64, blocks)
    for _ in range(blocks // each):
        tables.open(KEY).append(range(each * size))
    return lambda: tables.reserve(blocks), blocks


OPERATIONS: dict[str, Callable[[int, int], Prepared]] = {
    "pop and push a number": pop_and_push,
    "take and release": take_and_release,
    "take, prefix known": take_named,
    "append a prompt": append_prompt,
    "append token by token": append_tokens,
    "publish prefixes": publish,
    "open on a known prefix": open_known,
    "fork and free": fork_and_free,
    "copy on write": write_shared,
    "evict pages": evict_pages,
    "insert pages": insert_pages,
    "insert pages, shared": insert_shared,
    "insert mementos": insert_mementos,
    "defragment": defragment,
    "pack to half": pack,
    "pack to half, shared": pack_shared,
    "truncate": truncate,
    "preempt": preempt,
}


def measure(blocks: int, size: int, repeat: int) -> list[Row]:
    """A row for each operation, in processor time; everything is made anew for each repetition, outside of the time."""
    rows: list[Row] = []
    base = 0.0
    for name, prepare in OPERATIONS.items():
        times = []
        touched = 1
        for _ in range(repeat):
            work, touched = prepare(blocks, size)
            start = time.process_time()
            work()
            times.append(time.process_time() - start)
        each = median(times) / touched * 1e6
        base = base or each
        rows.append({"operation": name, "blocks": touched, "us a block": each, "us a token": each / size, "x": each / base})
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--blocks", type=int, default=8192, help="of the sequence, or of all sequences")
    options.add_argument("--size", type=int, default=16, help="tokens in a block")
    options.add_argument("--repeat", type=int, default=7)
    options.add_argument("--quick", action="store_true", help="64 blocks, twice")
    asked = options.parse_args()
    blocks, repeat = (64, 2) if asked.quick else (asked.blocks, asked.repeat)
    rows = measure(blocks, asked.size, repeat)
    emit("blocks", rows, asked.json, f"Blocks of {asked.size} tokens; median of {repeat}.")


if __name__ == "__main__":
    main()

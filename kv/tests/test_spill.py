"""What is spilled comes back bit for bit, or is a miss: never an exception, never other keys and values."""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kilburn.errors import InvalidRange, KVError, OutOfBlocks, SpillFailed
from kilburn_kv.compression import compress
from kilburn_kv.engine import Engine
from kilburn_kv.generation import generate
from kilburn_kv.presses import press as press_of
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.spill import RestoredPage, Spill, Spilled, preempt, resume
from kilburn_kv.spill_file import Miss
from kilburn_kv.storage import span_of
from kilburn_kv.weights import Weights, weights_of

from .conftest import tiny_model

TOKENS = [1 + (7 * place * place + 3 * place) % 90 for place in range(400)]


def cached(engine: Engine, sequence: CachedSequence) -> tuple[Tensor, Tensor]:
    """All that a sequence has cached, in order."""
    engine.storage.perform(engine.tables.copies)
    return engine.storage.gather(span_of(sequence.table.slots().physical, engine.weights.device))


def same(left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> bool:
    return torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


def restored(found: CachedSequence | Miss) -> CachedSequence:
    assert isinstance(found, CachedSequence), found
    return found


def returned(found: RestoredPage | Miss) -> RestoredPage:
    assert isinstance(found, RestoredPage), found
    return found


def assert_alike(here: Engine, left: CachedSequence, there: Engine, right: CachedSequence) -> None:
    """Everything that a user can see of two sequences is equal."""
    one, other = left.table, right.table
    assert other.tokens == one.tokens
    assert other.slots().logical == one.slots().logical
    assert other.evictions == one.evictions
    assert other.altered == one.altered
    assert other.pages.items() == one.pages.items()
    assert right.shifts == left.shifts
    assert same(cached(here, left), cached(there, right))
    if left.logits is None or right.logits is None:
        assert left.logits is right.logits
    else:
        assert torch.equal(left.logits, right.logits)
    if left.watch is None or right.watch is None:
        assert left.watch is right.watch
    else:
        assert (left.watch.sums, left.watch.rows) == (right.watch.sums, right.watch.rows)
        assert all(torch.equal(a, b) for a, b in zip(left.watch.state(), right.watch.state(), strict=True))


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def moved(engine: Engine, data: st.DataObject) -> CachedSequence:
    """A sequence to which much was done."""
    needs = data.draw(st.sampled_from([(), ("attention",), ("recent",), ("attention", "recent")]), "needs")
    first = data.draw(st.integers(1, 40), "first")
    sequence = engine.open(TOKENS[:first], needs=needs, recent=3)
    for step in range(data.draw(st.integers(0, 6), "moves")):
        end = sequence.end
        act = data.draw(st.sampled_from(["append", "evict", "label", "fork", "truncate", "insert", "defragment"]), "act")
        if act == "append":
            engine.prefill(sequence, TOKENS[end : end + data.draw(st.integers(1, 20), "count")])
        elif act == "evict" and end > 1:
            start = data.draw(st.integers(0, end - 2), "start")
            engine.evict(sequence, start, data.draw(st.integers(start + 1, end - 1), "stop"))
        elif act == "label" and end:
            start = data.draw(st.integers(0, end - 1), "start")
            stop = data.draw(st.integers(start + 1, end), "stop")
            if not sequence.table.pages.over(start, stop):
                sequence.table.label(step + 1, start, stop)
        elif act == "fork":
            parent, sequence = sequence, engine.fork(sequence)
            if data.draw(st.booleans(), "alone"):
                engine.free(parent)
        elif act == "truncate":
            engine.truncate(sequence, data.draw(st.integers(0, end), "position"))
        elif act == "insert" and sequence.table.evictions:
            _, start, _ = sequence.table.evictions[-1]
            if start < sequence.end and not sequence.table.count(start, start + 1):
                engine.insert(sequence, start, [5])
        elif act == "defragment":
            # The copies are still to be made when it is saved.
            sequence.table.defragment()
    return sequence


@settings(max_examples=40)
@given(data=st.data())
def test_any_sequence_comes_back_as_it_was(tiny: Weights, data: st.DataObject) -> None:
    """Into another engine with other blocks; what both say to the same tokens afterwards is equal to the last bit."""
    sizes = st.sampled_from([1, 4, 16])
    here, there = (Engine(tiny, 320, size=data.draw(sizes, "size"), chunk=data.draw(st.integers(5, 20), "chunk")) for _ in "ab")
    there.chunk = here.chunk
    # Where it is restored somebody has moved, and the copies are still to be made: from blocks that are free by now.
    other = there.open(TOKENS[100:130])
    there.evict(other, 1, data.draw(st.integers(2, 29), "gone"))
    others = cached(there, other)
    other.table.defragment()
    sequence = moved(here, data)
    with TemporaryDirectory() as folder, Spill(folder).shelf:
        spill = Spill(folder)
        spilled = spill.save(here, sequence)
        found = restored(Spill(folder).restore(there, spilled.address))
        assert_alike(here, sequence, there, found)
        assert spilled.tokens == len(sequence)
        assert same(cached(there, other), others)
        if sequence.end > 1:
            start = data.draw(st.integers(0, sequence.end - 2), "start")
            stop = data.draw(st.integers(start + 1, sequence.end - 1), "stop")
            assert here.evict(sequence, start, stop) == there.evict(found, start, stop)
            size = there.pool.size
            assert {slot // size for slot in found.table.slots().physical} == set(found.table.blocks)
        for engine, one in ((here, sequence), (there, found)):
            engine.prefill(one, TOKENS[200:207])
            engine.step([(one, [3])])
        assert_alike(here, sequence, there, found)
        there.free(found)
        here.free(sequence)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_keys_before_their_rotation_come_back_too(kind: torch.dtype, tmp_path: Path) -> None:
    """Rotated keys are always made from the first ones: a restored sequence goes on as the one that stayed, bit for bit."""
    here, there = (Engine(weights_of(tiny_model().to(kind)), 200, size=4) for _ in "ab")
    sequence = here.open(TOKENS[:40])
    streaming = press_of("streaming(sinks=3)")
    compress(here, sequence, streaming, 20)
    assert sorted(sequence.first) == [0, 1, 2]
    found = restored(Spill(tmp_path).restore(there, Spill(tmp_path).save(here, sequence).address))
    assert {place: key[0] for place, key in found.first.items()} == {place: key[0] for place, key in sequence.first.items()}
    for engine, one in ((here, sequence), (there, found)):
        for token in range(5):
            engine.prefill(one, TOKENS[40 + 3 * token : 43 + 3 * token])
            compress(engine, one, streaming, 20)
    assert_alike(here, sequence, there, found)
    assert all(torch.equal(key, found.first[place][1]) for place, (_, key) in sequence.first.items())


def test_a_page_takes_its_first_keys_along(tmp_path: Path) -> None:
    engine = Engine(weights_of(tiny_model().to(torch.bfloat16)), 200, size=4)
    sequence = engine.open(TOKENS[:40])
    sequence.table.label(1, 0, 3)
    compress(engine, sequence, press_of("streaming(sinks=3)"), 20)
    first, spill = dict(sequence.first), Spill(tmp_path)
    saved = spill.save_page(engine, sequence, 1)
    engine.evict(sequence, 0, 3)
    returned(spill.restore_page(engine, sequence, saved))
    assert sequence.first.keys() == first.keys()
    assert all(found[0] == first[place][0] and torch.equal(found[1], first[place][1]) for place, found in sequence.first.items())


def test_a_gappy_sequence_gives_back_the_right_blocks_later(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 200, size=4)
    sequence = engine.open(TOKENS[:60])
    engine.evict(sequence, 4, 30)
    spill = Spill(tmp_path)
    found = restored(spill.restore(engine, spill.save(engine, sequence)))
    for one in (sequence, found):
        engine.evict(one, 32, 50)
    assert_alike(engine, sequence, engine, found)
    for one in (sequence, found):
        assert {slot // 4 for slot in one.table.slots().physical} == set(one.table.blocks)
        engine.free(one)
    assert engine.pool.free == engine.pool.capacity


@settings(max_examples=100)
@given(data=st.data())
def test_a_changed_byte_anywhere_is_a_miss(tiny: Weights, data: st.DataObject) -> None:
    engine = Engine(tiny, 64, size=4)
    sequence = engine.open(TOKENS[:9])
    sequence.table.label(1, 2, 5)
    with TemporaryDirectory() as folder:
        spill = Spill(folder)
        whole = data.draw(st.booleans(), "whole")
        spilled = spill.save(engine, sequence) if whole else spill.save_page(engine, sequence, 1)
        (path,) = Path(folder).iterdir()
        good = path.read_bytes()
        assert len(good) == spilled.bytes
        # The header is a small part of the file, and has the most ways to go wrong.
        place = data.draw(
            st.integers(0, 7) | st.integers(0, len(good) - 1) | st.integers(len(good) - 700, len(good) - 1), "place"
        )
        how = data.draw(st.sampled_from(["flip", "cut", "longer", "empty", "twice"]), "how")
        if how == "flip":
            bad = bytearray(good)
            bad[place] ^= data.draw(st.integers(1, 255), "bits")
        else:
            bad = bytearray({"cut": good[:place], "longer": good + good[place:], "empty": b"", "twice": good + good}[how])
        path.write_bytes(bad)
        engine.evict(sequence, 2, 5)
        free, before = engine.pool.free, cached(engine, sequence)
        for _ in range(2):
            found = spill.restore(engine, spilled) if whole else spill.restore_page(engine, sequence, spilled)
            assert isinstance(found, Miss)
            assert found.why in ("corrupt", "version")
        assert engine.pool.free == free
        assert same(cached(engine, sequence), before)
        path.write_bytes(good)
        found = spill.restore(engine, spilled) if whole else spill.restore_page(engine, sequence, spilled)
        assert not isinstance(found, Miss)


def test_what_somebody_else_wrote_is_a_miss(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 64)
    spill = Spill(tmp_path)
    spilled = spill.save(engine, engine.open(TOKENS[:20]))
    other = weights_of(tiny_model(seed=1).to(tiny.device))
    half = weights_of(tiny_model().to(tiny.device).to(torch.bfloat16), digest=tiny.digest)
    for stranger in (Engine(other, 64), Engine(half, 64), Engine(tiny, 64, tenant="somebody else")):
        free = stranger.pool.free
        found = spill.restore(stranger, spilled)
        assert isinstance(found, Miss)
        assert found.why == "foreign"
        assert stranger.pool.free == free
        own = stranger.open(TOKENS[:20])
        assert_alike(stranger, own, stranger, restored(spill.restore(stranger, spill.save(stranger, own))))
    assert restored(spill.restore(Engine(tiny, 64, share=False), spilled)).table.key is None
    for nowhere in ("0" * 64, "", "../" + spilled.address, "\0"):
        missing = spill.restore(engine, nowhere)
        assert isinstance(missing, Miss)
        assert missing.why == "absent"


def test_a_page_is_no_sequence_and_a_sequence_no_page(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 64)
    sequence = engine.open(TOKENS[:20])
    sequence.table.label(1, 2, 5)
    spill = Spill(tmp_path)
    assert isinstance(spill.restore(engine, spill.save_page(engine, sequence, 1)), Miss)
    assert isinstance(spill.restore_page(engine, sequence, spill.save(engine, sequence)), Miss)


@pytest.mark.parametrize("spec", ["h2o", "snapkv(window=4)", "streaming(sinks=2)"])
def test_what_cannot_be_computed_again_is_swapped(tiny: Weights, tmp_path: Path, spec: str) -> None:
    """Squeezed by head, or rotated on: its blocks go to another, and it comes back and goes on as if they had not."""
    press = press_of(spec)
    engine = Engine(tiny, 240, size=4)
    sequence = engine.open(TOKENS[:70], needs=press.needs, recent=press.recent)
    assert compress(engine, sequence, press, 40) == 30
    twin = engine.fork(sequence)
    engine.prefill(twin, TOKENS[100:110])
    spill = Spill(tmp_path, limit_bytes=10_000_000)
    before = engine.fork(sequence)
    spilled = preempt(engine, sequence, spill)
    assert isinstance(spilled, Spilled)
    assert not sequence.is_live
    with pytest.raises(KVError, match="spill"):
        engine.resume(sequence)
    anew = restored(spill.restore(engine, spilled))
    assert_alike(engine, before, engine, anew)
    assert resume(engine, sequence, spill, spilled) is None
    assert_alike(engine, before, engine, sequence)
    assert spill.shelf.used == 0
    engine.prefill(sequence, TOKENS[100:110])
    assert twin.logits is not None
    assert sequence.logits is not None
    assert torch.equal(sequence.logits, twin.logits)
    for one in (sequence, twin, before, anew):
        engine.free(one)
    assert engine.pool.free == engine.pool.capacity


def test_two_alike_wait_for_one_file(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 96, size=4)
    sequence = engine.open(TOKENS[:30], needs={"attention"})
    twin, third = engine.fork(sequence), engine.fork(sequence)
    spill = Spill(tmp_path)
    first, second = preempt(engine, sequence, spill), preempt(engine, twin, spill)
    assert first == second
    assert resume(engine, sequence, spill, first) is None
    assert resume(engine, twin, spill, second) is None
    assert_alike(engine, third, engine, twin)
    assert spill.shelf.used == 0


def test_what_can_be_computed_again_is_not_written(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 96, size=4)
    sequence = engine.open(TOKENS[:30])
    engine.evict(sequence, 3, 9)
    spill = Spill(tmp_path)
    assert preempt(engine, sequence, spill) is None
    assert spill.shelf.used == 0
    assert resume(engine, sequence, spill, None) is None
    assert len(sequence) == 24


def test_a_swapped_sequence_whose_file_is_gone_stays_away(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 96, size=4)
    sequence = engine.open(TOKENS[:30], needs={"attention"})
    other = engine.open(TOKENS[:31], needs={"attention"})
    spill = Spill(tmp_path)
    spilled, wrong = preempt(engine, sequence, spill), preempt(engine, other, spill)
    with pytest.raises(KVError, match="not of sequence"):
        resume(engine, sequence, spill, wrong)
    assert spilled is not None
    assert spill.shelf.drop(spilled.address)
    assert not spill.shelf.drop(spilled.address)
    assert isinstance(resume(engine, sequence, spill, spilled), Miss)
    assert not sequence.is_live
    engine.free(sequence)
    assert resume(engine, other, spill, wrong) is None
    engine.free(other)
    assert engine.pool.free == engine.pool.capacity


def test_no_block_is_taken_where_not_all_can_be(tiny: Weights, tmp_path: Path) -> None:
    large, small = Engine(tiny, 96, size=4), Engine(tiny, 32, size=4)
    spill = Spill(tmp_path)
    spilled = spill.save(large, large.open(TOKENS[:60]))
    held = small.open(TOKENS[:20])
    with pytest.raises(OutOfBlocks):
        spill.restore(small, spilled)
    assert held.is_live
    assert small.pool.free == 3
    # It would fit where the other leaves, which can be computed again.
    spilled = spill.save(large, large.open(TOKENS[100:120]))
    assert len(restored(spill.restore(small, spilled))) == 20
    assert not held.is_live


def test_a_full_disk_leaves_nothing_behind(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 96, size=4)
    sequence = engine.open(TOKENS[:60], needs={"attention"})
    sequence.table.label(1, 4, 50)
    spill = Spill(tmp_path)
    twin, free = engine.fork(sequence), engine.pool.free
    for size in (0, 1, 5000, 20_000):
        with full_disk(size):
            for act in (
                lambda: spill.save(engine, sequence, pin=True),
                lambda: spill.save_page(engine, sequence, 1),
                lambda: preempt(engine, sequence, spill),
            ):
                with pytest.raises(SpillFailed, match="make room"):
                    act()
        assert not list(tmp_path.iterdir())
        assert engine.pool.free == free
    assert_alike(engine, twin, engine, sequence)
    assert len(generate(engine, [sequence], 4, stops=())[0]) == 4
    assert isinstance(preempt(engine, sequence, spill), Spilled)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpillFailed, match="another folder"):
        Spill(tmp_path / "file")


def test_files_are_for_this_user_alone(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 32)
    spill = Spill(tmp_path / "made" / "here")
    spilled = spill.save(engine, engine.open(TOKENS[:20]))
    assert (spill.shelf.folder.stat().st_mode & 0o777) == 0o700
    (path,) = spill.shelf.folder.iterdir()
    assert (path.stat().st_mode & 0o777) == 0o600
    assert path.stat().st_size == spilled.bytes == spill.shelf.used


def test_the_least_recently_used_goes_unless_it_is_pinned(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 96)
    sequences = [engine.open(TOKENS[place : place + 16]) for place in range(0, 80, 16)]
    size = Spill(tmp_path).save(engine, sequences[0]).bytes
    spill = Spill(tmp_path / "limited", limit_bytes=3 * size + 300)
    saved = [spill.save(engine, sequence).address for sequence in sequences[:3]]
    for age, address in enumerate(saved):
        path = spill.shelf.folder / (address + ".kv")
        os.utime(path, ns=(age, age))
    restored(spill.restore(engine, saved[0]))
    with Spill(tmp_path / "limited").shelf as other:
        other.pin(saved[1])
        fourth = spill.save(engine, sequences[3]).address
        assert [address in spill.shelf for address in [*saved, fourth]] == [True, True, False, True]
        other.pin(saved[0])
        spill.shelf.pin(fourth)
        with pytest.raises(SpillFailed, match="pinned"):
            spill.save(engine, sequences[4])
        assert [address in spill.shelf for address in [*saved, fourth]] == [True, True, False, True]
    # Whoever pinned the other two has closed.
    spill.save(engine, sequences[4])
    assert [address in spill.shelf for address in [*saved, fourth]] == [True, False, False, True]
    assert spill.shelf.used <= 3 * size + 300
    with pytest.raises(SpillFailed, match="save it again"):
        spill.shelf.pin(saved[1])
    spill.shelf.close()


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    left, written = tmp_path / ".left.part", tmp_path / ".written.part"
    left.write_bytes(b"half")
    with written.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        Spill(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [".written.part"]
    Spill(tmp_path)
    assert not list(tmp_path.iterdir())


def page_of(engine: Engine, sequence: CachedSequence, start: int, stop: int) -> tuple[Tensor, Tensor]:
    keys, values = cached(engine, sequence)
    first, last = sequence.table.count(0, start), sequence.table.count(0, stop)
    return keys[:, :, first:last], values[:, :, first:last]


@settings(max_examples=40)
@given(data=st.data())
def test_a_page_comes_back_into_its_gap(tiny: Weights, data: st.DataObject) -> None:
    """Bit for bit; and where it is said to be exact, it is what its tokens and the evictions before them give."""
    engine = Engine(tiny, 400, size=data.draw(st.sampled_from([1, 4, 16]), "size"))
    sequence = engine.open(TOKENS[:12])
    spill_early = data.draw(st.booleans(), "evict before")
    if spill_early:
        engine.evict(sequence, 3, 7)
    start = sequence.end
    stop = start + data.draw(st.integers(1, 20), "page")
    engine.prefill(sequence, TOKENS[start:stop])
    sequence.table.label(7, start, stop)
    engine.prefill(sequence, TOKENS[stop : stop + 15])
    never = engine.fork(sequence)
    before = page_of(engine, sequence, start, stop)
    with TemporaryDirectory() as folder:
        spill = Spill(folder)
        spilled = spill.save_page(engine, sequence, 7)
        engine.evict(sequence, start, stop)
        act = data.draw(st.sampled_from(["nothing", "run", "evict earlier", "fold earlier", "fold later", "roll back"]), "act")
        expected = True
        if act == "run":
            engine.prefill(sequence, TOKENS[50:60])
        elif act == "evict earlier":
            # The page had been computed by then: it saw what goes.
            engine.evict(sequence, 0, 2)
        elif act == "fold earlier":
            engine.evict(sequence, 0, 2)
            engine.insert(sequence, 0, [9])
            expected = False
        elif act == "fold later":
            engine.evict(sequence, stop, stop + 2)
            engine.insert(sequence, stop, [9])
        elif act == "roll back":
            engine.truncate(sequence, start)
            expected = True
        found = returned(spill.restore_page(engine, sequence, spilled))
        assert found.exact == expected, found.why
        assert bool(found.why) != expected
        assert (found.start, found.stop) == (start, stop) == sequence.table.pages[7]
        assert same(page_of(engine, sequence, start, stop), before)
        if act == "nothing":
            assert same(cached(engine, sequence), cached(engine, never))
            engine.step([(sequence, [8])])
            engine.step([(never, [8])])
            assert sequence.logits is not None
            assert never.logits is not None
            assert torch.equal(sequence.logits, never.logits)
        if act == "roll back":
            # Nothing is left of what happened: what it gives is again what its tokens give.
            assert sequence.table.altered.keys() <= {"evicted"}
            engine.truncate(never, stop)
            assert torch.allclose(engine.refresh(sequence), engine.refresh(never), atol=1e-4)


@settings(max_examples=20)
@given(data=st.data())
def test_exact_is_only_said_where_it_is_so(tiny: Weights, data: st.DataObject) -> None:
    """Into a sequence with another past: never called exact, unless it gives the same keys and values."""
    engine = Engine(tiny, 400, size=4)
    pasts = []
    for _ in range(2):
        sequence = engine.open(TOKENS[:10])
        if data.draw(st.booleans(), "evict"):
            engine.evict(sequence, 2, 2 + data.draw(st.integers(1, 3), "count"))
        more = data.draw(st.sampled_from([[5, 6], [5, 9]]), "more")
        engine.prefill(sequence, more)
        if data.draw(st.booleans(), "evict later"):
            engine.evict(sequence, 7, 8)
        engine.prefill(sequence, TOKENS[20:30])
        sequence.table.label(1, 12, 20)
        pasts.append(sequence)
    left, right = pasts
    with TemporaryDirectory() as folder:
        spill = Spill(folder)
        spilled = spill.save_page(engine, left, 1)
        would = page_of(engine, right, 12, 20)
        engine.evict(right, 12, 20)
        found = returned(spill.restore_page(engine, right, spilled))
        assert same(page_of(engine, right, 12, 20), page_of(engine, left, 12, 20))
        gap = float((page_of(engine, right, 12, 20)[1] - would[1]).abs().max())
        assert found.exact == (gap < 1e-4), (found, gap)


def test_pages_that_come_back_last_first_are_all_exact(tiny: Weights, tmp_path: Path) -> None:
    """Before a page that came back nothing is in doubt; behind it, it is: the tokens say nothing of who saw it."""
    engine = Engine(tiny, 200, size=4)
    parent = engine.open(TOKENS[:60])
    for page, start in ((1, 10), (2, 30), (3, 50)):
        parent.table.label(page, start, start + 5)
    before = cached(engine, parent)
    spill = Spill(tmp_path)
    saved = [spill.save_page(engine, parent, page) for page in (1, 2, 3)]
    for start in (10, 30, 50):
        engine.evict(parent, start, start + 5)
    for order, exact in (((2, 1, 0), [True, True, True]), ((0, 1, 2), [True, False, False])):
        sequence = engine.fork(parent)
        found = [returned(spill.restore_page(engine, sequence, saved[page])) for page in order]
        assert [each.exact for each in found] == exact
        assert all("folded" in each.why for each in found if not each.exact)
        assert same(cached(engine, sequence), before)
        # What is computed again is split otherwise here: part of it is known, so its last bits may differ.
        again = cached(engine, engine.open(TOKENS[:60]))
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(again, before, strict=True))


def test_what_was_approximate_stays_so(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 200, size=4)
    sequence = engine.open(TOKENS[:60])
    sequence.table.label(1, 10, 20)
    spill = Spill(tmp_path)
    first = spill.save_page(engine, sequence, 1)
    engine.evict(sequence, 10, 20)
    assert not returned(spill.restore_page(engine, sequence, first, 60)).exact
    again = spill.save_page(engine, sequence, 1)
    engine.evict(sequence, 60, 70)
    found = returned(spill.restore_page(engine, sequence, again))
    assert (found.start, found.exact) == (60, False)


@settings(max_examples=30)
@given(data=st.data())
def test_a_page_elsewhere_is_rotated_and_said_to_be_approximate(tiny: Weights, data: st.DataObject) -> None:
    """Keys of the first layer depend on token and position alone: there rotation gives what computing would."""
    engine = Engine(tiny, 400, size=4)
    count = data.draw(st.integers(1, 12), "count")
    source = engine.open(TOKENS[:40], needs=data.draw(st.sampled_from([(), ("attention",)]), "source"))
    start = data.draw(st.integers(0, 40 - count), "start")
    source.table.label(3, start, start + count)
    target = engine.open(TOKENS[60:100], needs=data.draw(st.sampled_from([(), ("attention", "recent")]), "target"), recent=4)
    behind = data.draw(st.booleans(), "behind")
    position = 40 if behind else data.draw(st.integers(1, 40 - count - 1).filter(lambda place: place != start), "position")
    with TemporaryDirectory() as folder:
        spill = Spill(folder)
        spilled = spill.save_page(engine, source, 3)
        if not behind:
            engine.evict(target, position, position + count)
        others = cached(engine, target)
        found = returned(spill.restore_page(engine, target, spilled, position))
        assert not found.exact
        assert "rotated" in found.why
        assert "blended" in target.table.altered
        keys, values = page_of(engine, target, position, position + count)
        fresh = engine.open([*TOKENS[60 : 60 + position], *TOKENS[start : start + count]])
        computed = page_of(engine, fresh, position, position + count)
        assert torch.allclose(keys[0], computed[0][0], atol=1e-4)
        assert torch.equal(values, page_of(engine, source, start, start + count)[1])
        engine.evict(target, position, position + count)
        assert same(cached(engine, target), others)
        if not behind:
            returned(spill.restore_page(engine, target, spilled, position))
        # Whoever notes attention has a place for each cached token.
        assert target.watch is None or target.watch.received.shape[-1] == target.watch.recent.shape[-1] == len(target)
        engine.step([(target, [5])])


def test_a_page_is_put_only_where_nothing_is(tiny: Weights, tmp_path: Path) -> None:
    engine = Engine(tiny, 200, size=4)
    sequence = engine.open(TOKENS[:60])
    table = sequence.table
    table.label(1, 10, 20)
    table.label(2, 30, 40)
    spill = Spill(tmp_path)
    spilled = spill.save_page(engine, sequence, 1)
    engine.evict(sequence, 12, 14)
    with pytest.raises(InvalidRange, match="2 positions of page 1 were evicted"):
        spill.save_page(engine, sequence, 1)
    with pytest.raises(InvalidRange, match="page 9"):
        spill.save_page(engine, sequence, 9)
    free, before = engine.pool.free, cached(engine, sequence)
    for position in (None, 0, 25, 60):
        with pytest.raises(InvalidRange, match="page 1"):
            spill.restore_page(engine, sequence, spilled, position)
    engine.evict(sequence, 10, 20)
    for position in (0, 25, 51, -3, -30, 61, 1000):
        with pytest.raises(InvalidRange):
            spill.restore_page(engine, sequence, spilled, position)
    assert table.pages.items() == {2: (30, 40)}
    assert len(table) == 50
    assert returned(spill.restore_page(engine, sequence, spilled)).exact
    assert same(page_of(engine, sequence, 0, 12), (before[0][:, :, :12], before[1][:, :, :12]))
    assert engine.pool.free <= free


def test_smollm_goes_on_from_disk_as_from_the_cache(smollm: Weights, tmp_path: Path) -> None:
    """A fact leaves the cache with its page and comes back with it; a whole sequence goes on in another engine."""
    fact = "The code of the vault is 7214.\n"
    noise = "The weather was mild and nothing happened. " * 12
    question = "\nThe code of the vault is"
    engine = Engine(smollm, 1024)
    sequence = engine.open(smollm.tokens("Notes.\n"))
    start = sequence.end
    engine.prefill(sequence, smollm.tokens(fact))
    sequence.table.label(1, start, sequence.end)
    engine.prefill(sequence, smollm.tokens(noise))
    never = engine.fork(sequence)
    spill = Spill(tmp_path)
    page = spill.save_page(engine, sequence, 1)
    engine.evict(sequence, *sequence.table.pages[1])
    without = engine.fork(sequence)
    assert returned(spill.restore_page(engine, sequence, page)).exact
    replies = {}
    for name, one in (("never", never), ("without", without), ("back", sequence)):
        engine.prefill(one, smollm.tokens(question))
        replies[name] = smollm.text(generate(engine, [engine.fork(one)], 6)[0])
    assert "7214" in replies["never"]
    assert "7214" not in replies["without"]
    assert replies["back"] == replies["never"]
    assert sequence.logits is not None
    assert never.logits is not None
    assert torch.equal(sequence.logits, never.logits)
    whole = spill.save(engine, without)
    other = Engine(smollm, 512, size=32)
    found = restored(spill.restore(other, whole))
    assert_alike(engine, without, other, found)
    assert generate(other, [found], 12) == generate(engine, [without], 12)
    assert_alike(engine, without, other, found)
    assert whole.bytes - whole.tokens * smollm.shape.bytes(smollm.dtype) < 300_000

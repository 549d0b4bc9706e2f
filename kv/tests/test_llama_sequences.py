"""Sequences in a real llama.cpp: what is exact is equal bit for bit, what is not says so, and nothing ends the session."""

from __future__ import annotations

import math
import os
import random
import resource
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.errors import FreedSequence, InvalidRange, KVError, OutOfBlocks, SpecError, SpillFailed, Unavailable
from kilburn.extras import command
from kilburn.models.weights import pull
from kilburn_kv.engine import Engine
from kilburn_kv.llama.engine import Llama
from kilburn_kv.llama.sequence import LlamaSequence
from kilburn_kv.weights import Weights

from .tiny_gguf import VOCABULARY, write

pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(
        find_spec("llama_cpp") is None and "CI" not in os.environ,
        reason='llama-cpp-python is not here: apt install g++, then run "python3 run.py test" again',
    ),
]

TEXT = (
    "The keeper of the north lighthouse wrote a line into the book every evening. The lamp was lit at six and the sea was"
    " calm. The password of the signal room is marigold, and nobody but the keeper may know it. On Thursday a ship came in"
    " from Porto with salt and cork, and left again before the fog. The keeper counted the barrels twice. The lamp was put"
    " out at seven, the book was closed, and the stairs were swept once more, as on every other day."
)


@pytest.fixture(scope="module")
def gguf() -> Path:
    return pull("smollm2")


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, for what takes thousands of tokens."""
    return write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


Make = Callable[..., Llama]


@pytest.fixture
def make(gguf: Path, tmp_path: Path) -> Iterator[Make]:
    """Engines that are closed at the end; each is a context of its own, as in another process."""
    made = []

    def one(path: Path = gguf, tokens: int = 511, **more: object) -> Llama:
        engine = Llama(path, tokens, **{"batch": 32, "threads": 1, "folder": tmp_path / "kv", **more})  # type: ignore[arg-type]
        made.append(engine)
        return engine

    yield one
    for engine in made:
        engine.close()


@pytest.fixture(scope="module")
def tokens(gguf: Path) -> list[int]:
    with Llama(gguf, 16) as engine:
        found = engine.tokenize(TEXT)
    assert len(found) >= 96
    return found


def divergence(there: Sequence[float], here: Sequence[float]) -> float:
    """KL(there, here) of next-token distributions, in nats."""

    def logs(row: Sequence[float]) -> list[float]:
        top = max(row)
        total = math.log(math.fsum(math.exp(value - top) for value in row)) + top
        return [value - total for value in row]

    return math.fsum(math.exp(p) * (p - q) for p, q in zip(logs(there), logs(here), strict=True))


def logits_of(sequence: LlamaSequence) -> array[float]:
    assert sequence.logits is not None
    return sequence.logits


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process may grow beyond 100,000 bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_forks_share_cells_and_answer_as_if_they_did_not(make: Make, tokens: list[int]) -> None:
    alone = make()
    unshared = alone.open(tokens[:64])
    alone.prefill(unshared, tokens[64:80])
    engine = make()
    parent = engine.open(tokens[:64])
    before = engine.free_tokens
    first, second = engine.fork(parent), engine.fork(parent)
    assert engine.free_tokens == before
    assert logits_of(first) == logits_of(parent)
    engine.prefill(first, tokens[64:80])
    assert first.exact
    assert logits_of(first) == logits_of(unshared)
    # Its cells lie behind the first fork's: the same sums, rounded otherwise.
    engine.prefill(second, tokens[64:77])
    engine.prefill(parent, tokens[64:80])
    assert not parent.exact
    assert 0 < divergence(logits_of(unshared), logits_of(parent)) < 0.05
    engine.free(parent)
    engine.free(second)
    assert engine.free_tokens == engine.capacity - 80
    engine.prefill(first, tokens[80:84])
    alone.prefill(unshared, tokens[80:84])
    assert logits_of(first) == logits_of(unshared)


def test_a_fork_keeps_what_its_parent_evicts(make: Make, tokens: list[int]) -> None:
    engine = make()
    parent = engine.open(tokens[:64])
    fork = engine.fork(parent)
    assert engine.evict(parent, 10, 40) == 30
    assert engine.free_tokens == engine.capacity - 64
    assert list(fork.positions) == list(range(64))
    assert list(parent.positions) == [*range(10), *range(40, 64)]
    engine.prefill(fork, tokens[64:72])
    alone = make()
    whole = alone.open(tokens[:64])
    alone.prefill(whole, tokens[64:72])
    assert logits_of(fork) == logits_of(whole)
    engine.free(fork)
    assert engine.free_tokens == engine.capacity - 34


def test_eviction_is_that_of_the_exact_engine(make: Make, smollm: Weights, tokens: list[int]) -> None:
    """What was computed while the evicted tokens were there stays, and positions stay: another engine agrees."""
    engine, exact = make(), Engine(smollm, 256)
    question = engine.tokenize(" The password of the signal room is")
    ours, theirs, whole = engine.open(tokens), exact.open(tokens), engine.open(tokens + question)
    start, stop = 27, 46
    assert "marigold" in smollm.text(tokens[start:stop])
    assert engine.evict(ours, start, stop) == exact.evict(theirs, start, stop) == stop - start
    engine.prefill(ours, question)
    exact.prefill(theirs, question)
    assert theirs.logits is not None
    reference = theirs.logits.tolist()
    assert ours.end == theirs.end == len(tokens) + len(question)
    assert list(ours.positions)[start - 1 : start + 1] == [start - 1, stop]
    assert not ours.exact
    # Measured 0.003, because llama.cpp rounds weights' inputs to 8 bits, and 1.55.
    assert divergence(reference, logits_of(ours)) < 0.03
    assert divergence(reference, logits_of(whole)) > 0.5


def test_equal_moves_give_equal_bits(make: Make, tokens: list[int]) -> None:
    rows = []
    for _ in range(2):
        engine = make()
        sequence = engine.open(tokens[:60])
        engine.evict(sequence, 16, 37)
        engine.prefill(sequence, tokens[60:90])
        rows.append(logits_of(sequence))
    assert rows[0] == rows[1]


def test_going_back_and_on_again_is_exact(make: Make, tokens: list[int]) -> None:
    engine = make()
    sequence = engine.open(tokens[:48])
    engine.prefill(sequence, tokens[48:70])
    once = logits_of(sequence)
    assert engine.truncate(sequence, 48) == 22
    assert sequence.logits is None
    assert engine.free_tokens == engine.capacity - 48
    engine.prefill(sequence, list(reversed(tokens[:9])))
    engine.truncate(sequence, 48)
    engine.prefill(sequence, tokens[48:70])
    assert logits_of(sequence) == once
    # What began to differ at 30 is forgotten with it.
    engine.evict(sequence, 30, 40)
    assert not sequence.exact
    engine.truncate(sequence, 30)
    assert sequence.exact
    engine.prefill(sequence, tokens[30:48])
    engine.prefill(sequence, tokens[48:70])
    assert divergence(once, logits_of(sequence)) < 1e-3


def test_a_saved_sequence_comes_back_bit_for_bit_in_another_context(make: Make, tokens: list[int]) -> None:
    engine = make()
    sequence = engine.open(tokens[:70])
    saved = engine.save(sequence)
    assert (saved.tokens, saved.name) == (70, engine.states.name(tokens[:70]))
    assert saved.bytes < 70 * 23_500 + 200_000
    other = make()
    back = other.restore(saved.name)
    assert back is not None
    assert back.exact
    assert (list(back.tokens), back.end) == (tokens[:70], 70)
    assert logits_of(back) == logits_of(sequence)
    for cache, one in ((engine, sequence), (other, back)):
        cache.prefill(one, tokens[70:95])
    assert logits_of(back) == logits_of(sequence)
    assert back.exact


def test_restored_beside_others_or_with_gaps_it_says_that_it_is_approximate(make: Make, tokens: list[int]) -> None:
    engine = make()
    sequence = engine.open(tokens[:70])
    whole = engine.save(sequence)
    beside = engine.restore(whole.name)
    assert beside is not None
    assert not beside.exact
    assert logits_of(beside) == logits_of(sequence)
    engine.prefill(sequence, tokens[70:90])
    engine.prefill(beside, tokens[70:90])
    assert 0 < divergence(logits_of(sequence), logits_of(beside)) < 0.05

    holed = make()
    sequence = holed.open(tokens[:70])
    holed.evict(sequence, 20, 33)
    saved = holed.save(sequence)
    assert saved.name != whole.name
    other = make()
    back = other.restore(saved.name)
    assert back is not None
    assert not back.exact
    assert list(back.positions) == [*range(20), *range(33, 70)]
    assert list(back.changes) == list(sequence.changes)
    holed.prefill(sequence, tokens[70:90])
    other.prefill(back, tokens[70:90])
    assert divergence(logits_of(sequence), logits_of(back)) < 0.05


def test_another_models_or_tenants_state_is_a_miss(make: Make, gguf: Path, tokens: list[int], tmp_path: Path) -> None:
    engine = make()
    saved = engine.save(engine.open(tokens[:20]))
    other = tmp_path / "other.gguf"
    other.write_bytes(gguf.read_bytes() + b"\0")
    for stranger in (make(other), make(tenant="theirs")):
        before = stranger.free_tokens
        assert stranger.restore(saved.name) is None
        assert stranger.restore("../" + saved.name) is None
        stranger.states.forget(saved.name)
        # Not even a file that was renamed to what they would look for.
        wanted = stranger.states.name(tokens[:20])
        assert wanted != saved.name
        for end in (".json", ".kv"):
            (tmp_path / "kv" / (wanted + end)).write_bytes((tmp_path / "kv" / (saved.name + end)).read_bytes())
        assert stranger.restore(wanted) is None
        assert stranger.free_tokens == before
    assert engine.restore(saved.name) is not None
    engine.states.forget(saved.name)
    assert engine.restore(saved.name) is None


@pytest.mark.parametrize(
    ("end", "harm"),
    [
        (".kv", lambda data: data[: len(data) // 2]),
        (".kv", lambda data: b""),
        (".kv", lambda data: data + b"\0"),
        (".kv", lambda data: data[:-999] + bytes([data[-999] ^ 1]) + data[-998:]),
        (".kv", None),
        (".json", lambda data: data[: len(data) // 2]),
        (".json", lambda data: b"\xff\xfe"),
        (".json", lambda data: b"[]"),
        (".json", lambda data: data.replace(b'"version":1', b'"version":2')),
        (".json", lambda data: data.replace(b"llama-cpp-python 0", b"llama-cpp-python 9")),
        (".json", None),
    ],
)
def test_a_file_that_is_not_what_was_saved_is_a_miss(
    make: Make, tokens: list[int], tmp_path: Path, end: str, harm: Callable[[bytes], bytes] | None
) -> None:
    engine = make()
    sequence = engine.open(tokens[:8])
    saved = engine.save(sequence)
    file = tmp_path / "kv" / (saved.name + end)
    if harm is None:
        file.unlink()
    else:
        file.write_bytes(harm(file.read_bytes()))
    before = engine.free_tokens
    assert engine.restore(saved.name) is None
    assert engine.free_tokens == before
    # It is mended by saving again.
    assert engine.restore(engine.save(sequence).name) is not None


def test_a_full_disk_leaves_the_sequence_as_it_was(make: Make, tokens: list[int], tmp_path: Path) -> None:
    engine = make()
    sequence = engine.open(tokens[:40])
    with full_disk(), pytest.raises(SpillFailed):
        engine.save(sequence)
    assert list((tmp_path / "kv").iterdir()) == []
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    nowhere = make(folder=in_the_way / "kv")
    with pytest.raises(SpillFailed):
        nowhere.save(nowhere.open(tokens[:4]))
    engine.prefill(sequence, tokens[40:50])
    alone = make()
    same = alone.open(tokens[:40])
    alone.prefill(same, tokens[40:50])
    assert logits_of(sequence) == logits_of(same)
    assert engine.restore(engine.save(sequence).name) is not None


def test_out_of_cells_is_an_error_that_changes_nothing(make: Make, tokens: list[int]) -> None:
    engine = make(tokens=255)
    assert engine.capacity == 255
    sequence = engine.open(tokens[:90])
    saved = engine.save(sequence)
    other = engine.open(tokens[:90])
    third = engine.open(tokens[:60])
    with pytest.raises(OutOfBlocks) as caught:
        engine.prefill(sequence, tokens[:16])
    assert caught.value.needed == 16
    with pytest.raises(OutOfBlocks):
        engine.open(tokens[:16])
    with pytest.raises(OutOfBlocks):
        engine.restore(saved.name)
    assert (engine.free_tokens, len(sequence), sequence.end) == (15, 90, 90)
    engine.prefill(third, tokens[:15])
    assert engine.free_tokens == 0
    # A context that is full to the last cell can still be moved in.
    engine.evict(other, 10, 30)
    engine.prefill(third, tokens[:20])
    engine.shift(other, 30, 90, -20)
    engine.free(other)
    engine.free(third)
    engine.prefill(sequence, tokens[90:96])
    assert sequence.exact
    alone = make()
    same = alone.open(tokens[:90])
    alone.prefill(same, tokens[90:96])
    assert logits_of(sequence) == logits_of(same)


def test_too_many_sequences_are_an_error_that_changes_nothing(make: Make, tokens: list[int]) -> None:
    engine = make(sequences=2)
    first = engine.open(tokens[:5])
    saved = engine.save(first)
    second = engine.fork(first)
    for attempt in (lambda: engine.open(), lambda: engine.fork(second), lambda: engine.restore(saved.name)):
        with pytest.raises(OutOfBlocks):
            attempt()
    engine.free(first)
    assert engine.restore(saved.name) is not None


def test_a_shift_is_close_and_not_exact(make: Make, tokens: list[int]) -> None:
    engine = make()
    sequence = engine.open(tokens[:60])
    engine.evict(sequence, 20, 40)
    twin = engine.restore(engine.save(sequence).name)
    assert twin is not None
    assert engine.shift(twin, 40, 60, -20) == 20
    assert (twin.end, list(twin.positions)) == (40, list(range(40)))
    assert not twin.exact
    # The keys are on disk as they were rotated, though nothing ran since.
    saved = engine.save(twin)
    for one in (sequence, twin):
        engine.prefill(one, tokens[60:80])
    assert 0 < divergence(logits_of(sequence), logits_of(twin)) < 0.5
    back = engine.restore(saved.name)
    assert back is not None
    engine.prefill(back, tokens[60:80])
    assert divergence(logits_of(twin), logits_of(back)) < 0.03


def test_a_shift_that_would_move_others_is_refused(make: Make, tokens: list[int]) -> None:
    engine = make()
    sequence = engine.open(tokens[:30])
    engine.evict(sequence, 10, 20)
    for start, stop, delta in ((20, 30, -11), (20, 30, -25), (0, 10, -1), (0, 10, 11), (5, 31, 0), (0, 5, 5), (0, 30, 1 << 30)):
        with pytest.raises(InvalidRange):
            engine.shift(sequence, start, stop, delta)
    assert engine.shift(sequence, 10, 20, -5) == 0
    assert engine.shift(sequence, 20, 30, 0) == 0
    assert list(sequence.positions) == [*range(10), *range(20, 30)]
    fork = engine.fork(sequence)
    with pytest.raises(InvalidRange, match="fork"):
        engine.shift(sequence, 20, 30, -10)
    engine.free(fork)
    assert engine.shift(sequence, 20, 30, -10) == 10


def test_ranges_that_llama_cannot_go_on_from_are_refused(make: Make, tokens: list[int]) -> None:
    engine = make()
    sequence = engine.open(tokens[:30])
    with pytest.raises(InvalidRange, match="truncate to 25"):
        engine.evict(sequence, 25, 30)
    for start, stop in ((-1, 5), (5, 31), (9, 8)):
        with pytest.raises(InvalidRange):
            engine.evict(sequence, start, stop)
    engine.evict(sequence, 10, 20)
    assert engine.evict(sequence, 12, 15) == 0
    with pytest.raises(InvalidRange, match="truncate to 10"):
        engine.truncate(sequence, 15)
    for position in (-1, 31):
        with pytest.raises(InvalidRange):
            engine.truncate(sequence, position)
    engine.truncate(sequence, 10)
    engine.prefill(sequence, tokens[:3])
    assert engine.evict(sequence, 0, 13) == 13
    assert (len(sequence), sequence.end, engine.free_tokens) == (0, 13, engine.capacity)
    with pytest.raises(InvalidRange):
        engine.save(sequence)
    engine.prefill(sequence, tokens[:3])
    assert list(sequence.positions) == [13, 14, 15]
    assert not sequence.exact


def test_what_is_not_there_is_an_error(make: Make, tokens: list[int]) -> None:
    engine = make()
    sequence = engine.open(tokens[:10])
    fork = engine.fork(sequence)
    engine.free(fork)
    stranger = make().open(tokens[:10])
    for gone in (fork, stranger):
        for attempt in (
            lambda gone=gone: engine.fork(gone),
            lambda gone=gone: engine.free(gone),
            lambda gone=gone: engine.prefill(gone, tokens[:2]),
            lambda gone=gone: engine.evict(gone, 0, 1),
            lambda gone=gone: engine.truncate(gone, 0),
            lambda gone=gone: engine.shift(gone, 0, 1, 1),
            lambda gone=gone: engine.save(gone),
        ):
            with pytest.raises(FreedSequence):
                attempt()
    for unknown in (-1, 49_152):
        with pytest.raises(SpecError):
            engine.prefill(sequence, [5, unknown])
    engine.prefill(sequence, [])
    assert len(sequence) == 10
    with pytest.raises(SpecError, match="folder"):
        make(folder=None).restore("a")
    engine.close()
    engine.close()
    for attempt in (lambda: engine.open(), lambda: engine.prefill(sequence, tokens), lambda: engine.tokenize("a")):
        with pytest.raises(Unavailable):
            attempt()
    with pytest.raises(KVError):
        sequence.alive()


def test_what_cannot_be_loaded_is_an_error_and_prints_nothing(
    make: Make, gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "no.gguf").write_bytes(b"GGUF and nothing else")
    with gguf.open("rb") as file:
        (tmp_path / "half.gguf").write_bytes(file.read(20_000_000))
    for name in ("missing.gguf", "no.gguf", "half.gguf"):
        with pytest.raises(Unavailable):
            make(tmp_path / name)
    with pytest.raises(SpecError, match="one cell a token"):
        make(write(tmp_path / "window.gguf", window=16))
    for wrong in ({"tokens": 0}, {"sequences": 0}, {"sequences": 256}, {"batch": 0}, {"threads": -1}, {"tokens": 1 << 22}):
        with pytest.raises(SpecError):
            make(**wrong)
    engine = make()
    engine.open(engine.tokenize("Hello"))
    assert capfd.readouterr() == ("", "")


def test_two_threads_wait_for_each_other(make: Make, tokens: list[int]) -> None:
    engine = make()
    made = []

    def work() -> None:
        sequence = engine.open(tokens[:24])
        engine.evict(sequence, 3, 9)
        engine.prefill(sequence, tokens[24:30])
        made.append(sequence)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(sequence) for sequence in made] == [24, 24, 24]
    assert engine.free_tokens == engine.capacity - 72


def test_without_the_extra_it_says_what_to_install(gguf: Path) -> None:
    code = (
        "import sys; sys.modules['llama_cpp'] = None\n"
        "from kilburn_kv.llama.engine import Llama\n"
        "from kilburn.errors import MissingExtra\n"
        "try: Llama(sys.argv[1])\n"
        "except MissingExtra as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, os.fspath(gguf)], capture_output=True, text=True, check=True)
    assert command("llama") in run.stdout


def replayed(engine: Llama, history: list[tuple[str, list[int], int]]) -> LlamaSequence:
    """A sequence by the calls that another one was made with."""
    one = engine.open()
    for act, taken, position in history:
        if act == "prefill":
            engine.prefill(one, taken)
        else:
            engine.truncate(one, min(position, one.end))
    return one


NOISE = random.Random(1).choices(range(VOCABULARY), k=120)


def test_where_a_sequence_lies_shows_in_the_last_bits(tiny_file: Path) -> None:
    """Behind a multiple of 256 others it is exact again, though nobody has to ask for that."""
    with Llama(tiny_file, 1023, batch=16, threads=1) as alone:
        expected = alone.open(NOISE).logits
    odd = False
    for before, exact in ((1, False), (17, False), (31, False), (256, True), (512, True)):
        with Llama(tiny_file, 1023, batch=16, threads=1) as engine:
            engine.open((NOISE * 5)[:before])
            behind = engine.open(NOISE)
            assert behind.exact is exact
            odd |= behind.logits != expected and not exact
            assert behind.logits == expected or not exact
    assert odd


ACTS = ["open", "prefill", "prefill", "fork", "evict", "truncate", "shift", "free", "restore"]


@settings(max_examples=40)
@given(data=st.data())
def test_any_moves_leave_no_cell_behind_and_exact_is_exact(tiny_file: Path, data: st.DataObject) -> None:
    """At any time exactly as many tokens fit as are said to, and what says that it is exact is so, bit for bit."""
    with (
        TemporaryDirectory() as folder,
        Llama(tiny_file, 1023, sequences=4, batch=16, threads=1, folder=folder) as engine,
        Llama(tiny_file, 1023, batch=16, threads=1) as alone,
    ):
        live: dict[LlamaSequence, list[tuple[str, list[int], int]]] = {}
        for _ in range(data.draw(st.integers(2, 16), "moves")):
            act = data.draw(st.sampled_from(ACTS))
            if act == "open" or not live:
                if len(live) < 3:
                    live[engine.open()] = []
                continue
            one = data.draw(st.sampled_from(list(live)))
            start = data.draw(st.integers(0, one.end))
            stop = data.draw(st.integers(start, one.end))
            try:
                if act == "prefill" and one.end < 150:
                    first = data.draw(st.integers(0, 30))
                    taken = NOISE[first : first + data.draw(st.integers(0, 90))]
                    engine.prefill(one, taken)
                    live[one].append((act, taken, 0))
                elif act == "fork" and len(live) < 3:
                    live[engine.fork(one)] = live[one][:]
                elif act == "restore" and len(live) < 3 and len(one):
                    made = engine.restore(engine.save(one).name)
                    assert made is not None
                    assert (made.tokens, made.positions, made.logits) == (one.tokens, one.positions, one.logits)
                    live[made] = live[one][:]
                elif act == "evict":
                    engine.evict(one, start, stop)
                elif act == "truncate":
                    engine.truncate(one, start)
                    live[one].append((act, [], start))
                elif act == "shift":
                    engine.shift(one, start, stop, data.draw(st.integers(-9, 9)))
                elif act == "free":
                    del live[one]
                    engine.free(one)
            except InvalidRange:
                continue
        for one, history in live.items():
            if one.exact:
                engine.prefill(one, [1, 2, 3, 4, 5, 6, 7])
            if one.exact:
                same = replayed(alone, history)
                alone.prefill(same, [1, 2, 3, 4, 5, 6, 7])
                assert one.logits == same.logits
                alone.free(same)
        room = engine.free_tokens
        with pytest.raises(OutOfBlocks):
            engine.open([7] * (room + 1))
        engine.open([7] * room)
        assert engine.free_tokens == 0

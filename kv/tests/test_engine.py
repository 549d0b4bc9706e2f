"""The engine says what the model says: token for token, whatever happens to its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.errors import FreedSequence, InvalidRange, OutOfBlocks, SpecError
from kilburn_kv.attention import PART
from kilburn_kv.compression import compress
from kilburn_kv.engine import Engine
from kilburn_kv.generation import Sampling, generate, stream
from kilburn_kv.presses import press
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.storage import span_of
from kilburn_kv.weights import Weights

from .oracle import gap, masked_logits

PROMPTS = ["The capital of France is", "Once upon a time there was a small dog who", "def fibonacci(n):\n"]


def _plain(weights: Weights, prompt: list[int], limit: int) -> list[int]:
    """What transformers' own `generate` says."""
    ids = torch.tensor([prompt], device=weights.device)
    made = weights.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
    return [int(token) for token in made[0, len(prompt) :]]


@pytest.mark.slow
def test_greedy_decoding_is_token_exact_alone_and_in_a_batch(smollm: Weights) -> None:
    prompts = [smollm.tokens(text) for text in PROMPTS]
    expected = [_plain(smollm, prompt, 32) for prompt in prompts]
    engine = Engine(smollm, 1024)
    assert [generate(engine, [engine.open(prompt)], 32)[0] for prompt in prompts] == expected
    batch = [engine.open(prompt) for prompt in prompts]
    assert generate(engine, batch, 32) == expected
    assert list(stream(engine, engine.open(prompts[1]), 32)) == expected[1]


@pytest.mark.slow
def test_a_long_prompt_in_chunks_is_token_exact(smollm: Weights) -> None:
    prompt = smollm.tokens(" ".join(f"{number} is followed by {number + 1}." for number in range(90)))
    assert len(prompt) > 600
    engine = Engine(smollm, 1024, chunk=256)
    assert generate(engine, [engine.open(prompt)], 12)[0] == _plain(smollm, prompt, 12)


@settings(max_examples=25)
@given(data=st.data())
def test_any_moves_equal_masking(tiny: Weights, data: st.DataObject) -> None:
    """Append, evict, fork, roll back and preempt at random: the logits are those of a mask over plain transformers."""
    engine = Engine(tiny, 320, size=data.draw(st.sampled_from([1, 4, 16]), "block"), chunk=data.draw(st.integers(3, 20), "chunk"))
    token = st.integers(1, 96)
    live: dict[int, tuple[CachedSequence, list[int], list[tuple[int, int, int]]]] = {}
    for _ in range(data.draw(st.integers(3, 12), "moves")):
        act = data.draw(st.sampled_from(["open", "append", "append", "evict", "fork", "truncate", "preempt", "batch"]))
        if act == "open" or not live:
            tokens = data.draw(st.lists(token, min_size=1, max_size=24))
            made = engine.open(tokens)
            live[made.number] = (made, tokens, [])
            continue
        sequence, tokens, gone = live[data.draw(st.sampled_from(sorted(live)))]
        if act == "append":
            more = data.draw(st.lists(token, min_size=1, max_size=12))
            engine.prefill(sequence, more)
            tokens += more
        elif act == "batch":
            feeds = [(other, data.draw(st.lists(token, min_size=1, max_size=3))) for other, _, _ in live.values()]
            engine.step(feeds)
            for other, more in feeds:
                live[other.number][1].extend(more)
        elif act == "evict":
            start = data.draw(st.integers(0, len(tokens) - 1))
            stop = data.draw(st.integers(start, len(tokens) - 1))
            engine.evict(sequence, start, stop)
            gone.append((len(tokens), start, stop))
        elif act == "fork":
            made = engine.fork(sequence)
            live[made.number] = (made, list(tokens), list(gone))
        elif act == "truncate":
            at = data.draw(st.integers(1, len(tokens)))
            engine.truncate(sequence, at)
            live[sequence.number] = (
                sequence,
                tokens[:at],
                [(min(when, at), start, min(stop, at)) for when, start, stop in gone if start < at],
            )
        else:
            engine.preempt(sequence)
            with pytest.raises(FreedSequence):
                sequence.table  # noqa: B018
            engine.resume(sequence)
    for sequence, tokens, gone in live.values():
        engine.prefill(sequence, [5])
        assert sequence.logits is not None
        assert gap(sequence.logits, masked_logits(tiny, [*tokens, 5], gone)) <= 1e-3
    owners = sum(len(sequence.table.blocks) for sequence, _, _ in live.values())
    assert sum(engine.pool.references) == owners
    for sequence, _, _ in live.values():
        engine.free(sequence)
    assert engine.pool.free == engine.pool.capacity
    assert engine.used == 0


def test_a_scattered_sequence_says_the_same_as_one_in_a_row(tiny: Weights) -> None:
    """Paged equals contiguous, to the bit: the physical order of blocks is none of the model's business."""
    prompt = [1 + (7 * place) % 90 for place in range(75)]
    straight = Engine(tiny, 256, size=4, share=False)
    expected = straight.open(prompt).logits
    scattered = Engine(tiny, 256, size=4, share=False)
    fillers = [scattered.open([3] * 4) for _ in range(60)]
    for filler in fillers[::2] + fillers[1::4]:
        scattered.free(filler)
    found = scattered.open(prompt)
    blocks = list(found.table.blocks)
    assert blocks != list(range(blocks[0], blocks[0] + len(blocks)))
    assert found.logits is not None
    assert torch.equal(found.logits, expected)


def test_a_long_sequence_decodes_the_same_wherever_its_blocks_lie(tiny: Weights) -> None:
    """So many tokens that one looks at them in parts; in a row, scattered, and with a hole."""
    prompt = [1 + (7 * place) % 90 for place in range(PART + 100)]
    straight, scattered = Engine(tiny, 4096, share=False), Engine(tiny, 4096, share=False)
    blocks = scattered.pool.take(scattered.pool.free)
    scattered.pool.release(blocks[::2] + blocks[1::2])
    one, two = straight.open(prompt), scattered.open(prompt)
    for engine, sequence in ((straight, one), (scattered, two)):
        engine.step([(sequence, [5])])
        engine.evict(sequence, 8, 20)
        engine.step([(sequence, [6])])
    assert one.logits is not None
    assert two.logits is not None
    assert torch.equal(one.logits, two.logits)
    assert gap(one.logits, masked_logits(tiny, [*prompt, 5, 6], [(PART + 101, 8, 20)])) <= 1e-3


def test_a_known_prefix_is_shared_and_not_computed_again(tiny: Weights) -> None:
    engine = Engine(tiny, 512)
    prompt = [1 + place % 90 for place in range(70)]
    first = engine.open(prompt)
    used = engine.used
    second = engine.open(prompt)
    assert second.table.blocks[:4] == first.table.blocks[:4]
    assert engine.used == used + 16 * engine.weights.shape.bytes(torch.float32)
    assert first.logits is not None
    assert second.logits is not None
    assert gap(first.logits, second.logits) <= 1e-3
    stranger = Engine(tiny, 512, tenant="other")
    assert len(stranger.tables.open(stranger.key, prompt)) == 0


def test_an_evicted_sequence_shares_no_prefix(tiny: Weights) -> None:
    engine = Engine(tiny, 512)
    prompt = [1 + place % 90 for place in range(40)]
    sequence = engine.open(prompt)
    engine.evict(sequence, 4, 20)
    engine.prefill(sequence, [9] * 40)
    again = engine.tables.open(engine.key, [*prompt, *[9] * 40])
    assert len(again) == 32


def test_without_blocks_the_newest_are_preempted_and_come_back_the_same(tiny: Weights) -> None:
    engine = Engine(tiny, 64, size=4, share=False)
    old, new = engine.open([5, 6, 7] * 8), engine.open([8, 9] * 12)
    engine.evict(new, 2, 9)
    engine.prefill(old, [11] * 24)
    assert not new.is_live
    with pytest.raises(FreedSequence, match="preempted"):
        engine.prefill(new, [1])
    engine.free(old)
    engine.resume(new)
    engine.prefill(new, [4])
    assert new.logits is not None
    assert gap(new.logits, masked_logits(tiny, [*[8, 9] * 12, 4], [(24, 2, 9)])) <= 1e-3


def test_out_of_blocks_is_typed_and_leaves_all_usable(tiny: Weights) -> None:
    engine = Engine(tiny, 32, size=4)
    sequence = engine.open([5] * 20)
    logits = sequence.logits
    with pytest.raises(OutOfBlocks):
        engine.prefill(sequence, [6] * 13)
    with pytest.raises(OutOfBlocks):
        engine.open([7] * 40)
    assert sequence.end == 20
    assert sequence.logits is logits
    assert engine.pool.free == 3
    engine.prefill(sequence, [6] * 12)
    assert sequence.end == 32


def test_bad_input_changes_nothing(tiny: Weights) -> None:
    engine = Engine(tiny, 64)
    sequence = engine.open([1, 2, 3])
    with pytest.raises(SpecError, match="outside 0 to 96"):
        engine.prefill(sequence, [97])
    with pytest.raises(SpecError, match="once"):
        engine.step([(sequence, [1]), (sequence, [2])])
    with pytest.raises(SpecError, match="at least one token"):
        engine.step([(sequence, [])])
    with pytest.raises(InvalidRange):
        engine.evict(sequence, 2, 9)
    with pytest.raises(InvalidRange):
        engine.truncate(sequence, 4)
    assert sequence.end == 3
    gone = engine.fork(sequence)
    engine.free(gone)
    with pytest.raises(FreedSequence):
        engine.fork(gone)
    with pytest.raises(FreedSequence):
        engine.free(gone)
    with pytest.raises(SpecError):
        Engine(tiny, 0)
    with pytest.raises(InvalidRange):
        engine.refresh(engine.open())


def test_rolling_back_forgets_what_comes_next_and_finds_it_again(tiny: Weights) -> None:
    engine = Engine(tiny, 64)
    sequence = engine.open([1, 2, 3, 4, 5])
    expected = sequence.logits
    engine.prefill(sequence, [6, 7])
    engine.truncate(sequence, 5)
    assert sequence.logits is None
    assert expected is not None
    assert gap(engine.refresh(sequence), expected) <= 1e-3
    assert sequence.end == 5


def test_sampling_by_chance_repeats_with_its_seed(tiny: Weights) -> None:
    engine = Engine(tiny, 256)
    sampling = Sampling(temperature=1.5, top_k=20, top_p=0.9, seed=7)

    def drawn(how: Sampling) -> list[int]:
        return generate(engine, [engine.open([1, 2, 3])], 12, how, stops=())[0]

    assert drawn(sampling) == drawn(sampling)
    assert len({tuple(drawn(Sampling(temperature=1.5, seed=seed))) for seed in range(4)}) > 1
    with pytest.raises(ValueError, match="no way to choose"):
        Sampling(temperature=-1)


@given(
    rows=st.lists(st.lists(st.integers(-4, 4), min_size=6, max_size=6), min_size=1, max_size=3),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
)
def test_sampling_takes_only_what_it_may(rows: list[list[int]], top_k: int, top_p: float) -> None:
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=top_p)
    logits = torch.tensor(rows, dtype=torch.float32)
    for row, token in zip(rows, sampling.choose(logits, sampling.generator(torch.device("cpu"))).tolist(), strict=True):
        likely = sorted(row, reverse=True)
        if top_k:
            assert row[token] >= likely[top_k - 1]
        odds = torch.tensor(row, dtype=torch.float32).softmax(0)
        assert float(odds[torch.tensor(row) > row[token]].sum()) < top_p + 1e-6


@contextmanager
def failing(weights: Weights) -> Iterator[None]:
    """The second layer of the model fails, as a device that runs out of memory would make it."""

    def fail(module: torch.nn.Module, inputs: object) -> None:
        raise RuntimeError("out of memory")

    hook = weights.model.get_decoder().layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def test_a_failed_insertion_is_undone(tiny: Weights) -> None:
    engine = Engine(tiny, 128, size=4)
    sequence = engine.open(range(1, 31), needs={"attention"})
    sequence.table.label(7, 5, 20)
    engine.evict(sequence, 8, 14)
    table, watch = sequence.table, sequence.watch
    assert watch is not None
    before = (table.tokens, table.evictions, table.altered, table.pages.items(), table.slots().logical, watch.state())
    with failing(tiny), pytest.raises(RuntimeError):
        engine.insert(sequence, 9, [3, 4])
    assert (table.tokens, table.evictions, table.altered, table.pages.items(), table.slots().logical) == before[:5]
    assert all(torch.equal(left, right) for left, right in zip(watch.state(), before[5], strict=True))
    engine.prefill(sequence, [5])
    assert sequence.logits is not None
    assert gap(sequence.logits, masked_logits(tiny, [*range(1, 31), 5], [(30, 8, 14)])) <= 1e-3


def test_a_failed_refresh_is_undone(tiny: Weights) -> None:
    engine = Engine(tiny, 128, size=4)
    sequence = engine.open(range(1, 31))
    engine.evict(sequence, 8, 14)
    engine.truncate(sequence, 25)
    before = (sequence.table.tokens, sequence.table.evictions, sequence.table.slots().logical)
    with failing(tiny), pytest.raises(RuntimeError):
        engine.refresh(sequence)
    assert (sequence.table.tokens, sequence.table.evictions, sequence.table.slots().logical) == before
    engine.prefill(sequence, [5])
    assert sequence.logits is not None
    assert gap(sequence.logits, masked_logits(tiny, [*range(1, 26), 5], [(25, 8, 14)])) <= 1e-3


def test_attention_is_noted_once_though_the_last_token_runs_again(tiny: Weights) -> None:
    engine = Engine(tiny, 128)
    sequence = engine.open(range(1, 31), needs={"attention", "recent"}, recent=4)
    engine.prefill(sequence, [40])
    engine.truncate(sequence, 30)
    watch = sequence.watch
    assert watch is not None
    before = watch.state()
    engine.refresh(sequence)
    assert all(torch.equal(left, right) for left, right in zip(watch.state(), before, strict=True))


def test_the_last_queries_are_noted_though_their_prefix_is_known(tiny: Weights) -> None:
    prompt = [1 + place % 90 for place in range(64)]
    noted = []
    for share in (True, False):
        engine = Engine(tiny, 256, share=share)
        engine.open(prompt)
        watch = engine.open(prompt, needs={"recent"}, recent=20).watch
        assert watch is not None
        noted.append(watch.recent)
    assert float((noted[0] - noted[1]).abs().max()) <= 1e-4


def test_what_was_compacted_comes_back_into_as_few_blocks(tiny: Weights) -> None:
    engine = Engine(tiny, 16, size=4, share=False)
    sequence = engine.open(range(1, 17))
    for start in (0, 4, 8, 12):
        engine.evict(sequence, start, start + 3)
    sequence.table.defragment()
    engine.prefill(sequence, range(20, 32))
    assert sequence.logits is not None
    before = sequence.logits
    engine.preempt(sequence)
    engine.resume(sequence)
    assert sequence.logits is before
    engine.truncate(sequence, 26)
    expected = masked_logits(tiny, [*range(1, 17), *range(20, 30), 5], [(16, at, at + 3) for at in (0, 4, 8, 12)])
    engine.prefill(sequence, [5])
    assert gap(sequence.logits, expected) <= 1e-3


def test_unknown_logits_are_unknown_after_a_preemption_too(tiny: Weights) -> None:
    """What is evicted after a roll-back is out of sight when the last token runs again, preempted in between or not."""
    found = []
    for preempted in (True, False):
        engine = Engine(tiny, 128)
        sequence = engine.open(range(1, 31))
        engine.truncate(sequence, 20)
        if preempted:
            engine.preempt(sequence)
            engine.resume(sequence)
        engine.evict(sequence, 3, 9)
        found.append(engine.refresh(sequence))
    assert gap(*found) <= 1e-3


def test_an_insertion_preempts_no_more_than_it_needs(tiny: Weights) -> None:
    engine = Engine(tiny, 24, size=4, share=False)
    sequence, old, new = engine.open(range(1, 17)), None, None
    engine.evict(sequence, 4, 12)
    old, new = engine.open(range(8)), engine.open(range(4))
    engine.insert(sequence, 4, range(20, 28))
    assert (old.is_live, new.is_live) == (True, False)


def test_another_engines_sequence_is_refused(tiny: Weights) -> None:
    mine, other = Engine(tiny, 64), Engine(tiny, 64)
    own, sequence = mine.open([1, 2, 3]), other.open([4, 5, 6])
    for act in (mine.free, mine.resume, lambda it: mine.step([(it, [1])]), lambda it: mine.prefill(it, [1])):
        with pytest.raises(FreedSequence, match="not of this engine"):
            act(sequence)
    assert (len(own), len(sequence), mine.pool.free, other.pool.free) == (3, 3, 3, 3)


def test_what_cannot_be_asked_for_is_said(tiny: Weights) -> None:
    engine = Engine(tiny, 64)
    with pytest.raises(SpecError):
        Engine(tiny, 64, size=0)
    with pytest.raises(SpecError):
        engine.step([])
    with pytest.raises(SpecError, match="outside"):
        engine.open([2**40])
    with pytest.raises(SpecError, match="needs"):
        engine.open([1], needs={"atention"})
    with pytest.raises(SpecError, match="recent=-1"):
        engine.open([1], needs={"recent"}, recent=-1)
    assert engine.pool.free == engine.pool.capacity


def test_the_tenant_of_an_engine_is_for_good(tiny: Weights) -> None:
    """It is part of every key, those of prefixes and those of files: both would have to change at once."""
    engine = Engine(tiny, 64, tenant="one")
    with pytest.raises(AttributeError):
        engine.tenant = "other"  # type: ignore[misc]
    assert engine.tenant == "one"
    assert engine.key == engine.identity
    assert engine.identity.tenant == "one"
    assert Engine(tiny, 64, tenant="one", share=False).key is None


def test_without_blocks_generation_says_what_it_made_and_goes_on_later(tiny: Weights) -> None:
    prompts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]
    roomy = Engine(tiny, 256, size=4, share=False)
    expected = generate(roomy, [roomy.open(prompt) for prompt in prompts], 20, stops=())
    small = Engine(tiny, 56, size=4, share=False)
    batch = [small.open(prompt) for prompt in prompts]
    with pytest.raises(OutOfBlocks) as caught:
        generate(small, batch, 20, stops=())
    made = caught.value.made
    assert made is not None
    assert 0 < len(made[0]) < 20
    assert made == [tokens[: len(one)] for tokens, one in zip(expected, made, strict=True)]
    assert [list(one.table.tokens) for one in batch] == [prompt + one for prompt, one in zip(prompts, made, strict=True)]
    small.free(batch.pop())
    rest = generate(small, batch, 20 - len(made[0]), stops=())
    assert [made[row] + rest[row] for row in range(2)] == expected[:2]


def test_the_finished_of_a_batch_keep_their_results(tiny: Weights) -> None:
    """One stops early, another goes on until nothing is left: the first one's reply is not lost with the error."""
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    roomy, small = Engine(tiny, 256, share=False), Engine(tiny, 48, size=4, share=False)
    said = generate(roomy, [roomy.open(prompt) for prompt in prompts], 80, stops=())
    stop = next(token for token in said[0][2:] if token not in said[1])
    with pytest.raises(OutOfBlocks) as caught:
        generate(small, [small.open(prompt) for prompt in prompts], 80, stops=[stop])
    assert caught.value.made is not None
    assert caught.value.made[0] == said[0][: said[0].index(stop) + 1]
    assert caught.value.made[1] == said[1][: len(caught.value.made[1])]
    assert len(caught.value.made[1]) > len(caught.value.made[0])


def test_a_press_never_takes_the_blocks_of_a_batch_mate(tiny: Weights) -> None:
    """Shared blocks are rotated in blocks of their own: a batch-mate was preempted for those, and then asked to go on."""
    for tokens, enough in ((56, False), (72, True)):
        engine = Engine(tiny, tokens, size=4)
        base = engine.open([1 + (7 * place) % 90 for place in range(40)])
        batch = [engine.fork(base), engine.open([3, 4, 5])]
        engine.fork(base)

        def hold(sequence: CachedSequence, engine: Engine = engine) -> None:
            if len(sequence) > 30:
                compress(engine, sequence, press("streaming(sinks=4)"), 30)

        if enough:
            assert [len(made) for made in generate(engine, batch, 30, stops=(), between=hold)] == [30, 30]
            continue
        with pytest.raises(OutOfBlocks) as caught:
            generate(engine, batch, 30, stops=(), between=hold)
        made = caught.value.made
        assert made is not None
        assert len(made[0]) == len(made[1]) > 0
        assert all(one.is_live for one in batch)
        assert list(batch[1].table.tokens) == [3, 4, 5, *made[1]]


@pytest.mark.parametrize("slots", [[], [3], [3, 4, 5], [5, 4, 3], [1, 2, 9, 10], [0, 2, 1, 3], list(range(0, 40, 3))])
def test_a_span_is_the_slots_in_order(slots: list[int]) -> None:
    span = span_of(array("q", slots), torch.device("cpu"))
    assert torch.arange(50)[span].tolist() == slots
    assert isinstance(span, slice) == (slots == list(range(slots[0], slots[-1] + 1)) if slots else True)


def test_a_span_of_scattered_slots_outlives_their_array() -> None:
    slots = array("q", range(0, 400, 4))
    span = span_of(slots, torch.device("cpu"))
    assert isinstance(span, torch.Tensor)
    slots[0] = 9
    slots.extend(range(9))
    assert span.tolist() == list(range(0, 400, 4))


def test_a_long_span_is_viewed_and_not_read_number_by_number() -> None:
    class Counted(array):  # type: ignore[type-arg]
        """Counts the numbers that are read."""

        read = 0

        def __getitem__(self, at: Any) -> Any:
            Counted.read += 1
            return super().__getitem__(at)

        def __iter__(self) -> Iterator[Any]:
            Counted.read += len(self)
            return super().__iter__()

    slots = Counted("q", range(0, 200_000, 2))
    span = span_of(slots, torch.device("cpu"))
    assert Counted.read <= 10
    assert isinstance(span, torch.Tensor)
    assert span.tolist() == list(slots)

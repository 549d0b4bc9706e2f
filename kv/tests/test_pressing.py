"""A press at work on the engine: what it keeps is what the model sees from then on, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.errors import BudgetTooSmall, InvalidRange, KVError, SpecError
from kilburn_kv.compression import compress, observe
from kilburn_kv.engine import Engine
from kilburn_kv.generation import generate
from kilburn_kv.observation import Observation, Press, Selection
from kilburn_kv.presses import press as press_of
from kilburn_kv.rotation import rotate
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.weights import Weights, weights_of

from .conftest import tiny_model
from .oracle import gap, masked_logits, seen_logits

PROMPT = [1 + (place * place) % 90 for place in range(80)]
SPECS = ["window", "streaming(sinks=2)", "h2o", "snapkv(window=4)", "keynorm", "pages"]


def _opened(engine: Engine, press: Press, prompt: list[int] | None = None):  # type: ignore[no-untyped-def]
    return engine.open(PROMPT if prompt is None else prompt, needs=press.needs, recent=press.recent)


@pytest.mark.parametrize("spec", SPECS)
def test_a_budget_that_holds_everything_is_exact(tiny: Weights, spec: str) -> None:
    press = press_of(spec)
    engine = Engine(tiny, 512, share=False)
    plain, pressed = engine.open(PROMPT), _opened(engine, press)
    assert compress(engine, pressed, press, len(PROMPT)) == 0
    for token in (5, 6, 7):
        engine.step([(plain, [token]), (pressed, [token])])
        assert plain.logits is not None
        assert pressed.logits is not None
        assert gap(plain.logits, pressed.logits) <= 1e-3


@pytest.mark.parametrize("spec", SPECS)
def test_a_pressed_sequence_holds_its_budget_and_goes_on(tiny: Weights, spec: str) -> None:
    press = press_of(spec)
    engine = Engine(tiny, 512, size=4, share=False)
    sequence = _opened(engine, press)
    assert compress(engine, sequence, press, 40) == 40
    assert len(sequence) == 40
    assert len(sequence.table.blocks) == 10

    def hold(sequence: CachedSequence) -> None:
        if len(sequence) > 44:
            compress(engine, sequence, press, 40)

    made = generate(engine, [sequence], 20, stops=(), between=hold)
    assert len(made[0]) == 20
    assert len(sequence) <= 44
    assert sequence.end == 100
    engine.free(sequence)
    assert engine.pool.free == engine.pool.capacity


def test_the_window_press_is_a_mask_over_what_it_dropped(tiny: Weights) -> None:
    engine = Engine(tiny, 512)
    sequence = engine.open(PROMPT)
    compress(engine, sequence, press_of("window"), 24)
    engine.prefill(sequence, [3, 4])
    assert sequence.logits is not None
    assert gap(sequence.logits, masked_logits(tiny, [*PROMPT, 3, 4], [(80, 0, 56)])) <= 1e-3


def test_attention_is_noted_as_eager_attention_says(tiny: Weights) -> None:
    """Sums, counts and recent rows equal those of transformers' own attention maps, over chunks, single steps and groups."""
    engine = Engine(tiny, 512, chunk=13)
    sequence = engine.open(PROMPT[:60], needs={"attention", "recent"}, recent=7)
    for token in PROMPT[60:]:
        engine.step([(sequence, [token])])
    model = tiny.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            maps = model(torch.tensor([PROMPT], device=tiny.device), output_attentions=True, use_cache=False).attentions
    finally:
        model.set_attn_implementation(before)
    shape = tiny.shape
    grouped = torch.stack([one[0].view(shape.heads, shape.groups, 80, 80).mean(dim=1) for one in maps])
    watch = sequence.watch
    assert watch is not None
    assert float((watch.received - grouped.sum(dim=2)).abs().max()) <= 1e-3
    assert float((watch.recent - grouped[:, :, -7:]).abs().max()) <= 1e-4
    assert watch.queries.tolist() == list(range(80, 0, -1))


def test_a_press_that_chooses_by_head_keeps_those_entries(tiny: Weights) -> None:
    press = press_of("keynorm")
    engine = Engine(tiny, 512, share=False)
    sequence = engine.open(PROMPT)
    keys, values = engine.storage.gather(torch.tensor(sequence.table.slots().physical))
    chosen = press.keep(observe(engine, sequence, press), 33).keep
    compress(engine, sequence, press, 33)
    after = engine.storage.gather(torch.tensor(sequence.table.slots().physical))
    index = chosen[..., None].expand(-1, -1, -1, keys.shape[-1])
    assert torch.equal(after[0], keys.gather(2, index))
    assert torch.equal(after[1], values.gather(2, index))


@settings(max_examples=10)
@given(budget=st.integers(6, 30), rounds=st.lists(st.integers(1, 9), max_size=4))
def test_streaming_equals_rotating_everything_by_cache_index(tiny: Weights, budget: int, rounds: list[int]) -> None:
    """After any number of compressions, keys stand as if their cache index were their position."""
    press = press_of("streaming(sinks=3)")
    engine = Engine(tiny, 512)
    sequence = engine.open(PROMPT)
    for count in [0, *rounds]:
        engine.prefill(sequence, PROMPT[:count])
        compress(engine, sequence, press, budget)
    table = sequence.table
    places = [place + sequence.shifts.get(place, 0) for place in table.slots().logical]
    assert places == list(range(table.end - len(table), table.end))


def test_what_is_shared_is_never_rotated_or_packed_in_place(tiny: Weights) -> None:
    engine = Engine(tiny, 512, size=4)
    base = engine.open(PROMPT)
    expected = engine.fork(base)
    for spec in ("streaming(sinks=4)", "keynorm"):
        twin = engine.fork(base)
        compress(engine, twin, press_of(spec), 20)
        engine.prefill(twin, [7])
    engine.step([(base, [9]), (expected, [9])])
    assert base.logits is not None
    assert gap(base.logits, masked_logits(tiny, [*PROMPT, 9], [])) <= 1e-3


def test_a_press_that_cannot_see_says_how_to_open(tiny: Weights) -> None:
    engine = Engine(tiny, 512)
    sequence = engine.open(PROMPT)
    with pytest.raises(SpecError, match="without noting it"):
        compress(engine, sequence, press_of("h2o"), 20)
    with pytest.raises(BudgetTooSmall):
        compress(engine, sequence, press_of("streaming(sinks=4)"), 2)
    assert len(sequence) == 80
    with pytest.raises(SpecError):
        press_of("nonsense")


def test_a_fold_goes_into_the_gap_and_sees_what_is_before_it(tiny: Weights) -> None:
    """What follows a fold is not computed again; what comes after it sees it at its place."""
    engine = Engine(tiny, 512, size=4)
    sequence = engine.open(PROMPT)
    sequence.table.label(7, 10, 40)
    engine.evict(sequence, *sequence.table.pages[7])
    engine.insert(sequence, 12, [11, 12, 13])
    assert len(sequence) == 80 - 30 + 3
    engine.prefill(sequence, [5])
    assert list(sequence.table.slots().logical) == [*range(10), *range(12, 15), *range(40, 81)]
    seen = torch.ones((84, 84), dtype=torch.bool).tril()
    # The fold ran after all of the prompt and saw what stands before it; nobody saw what was evicted, from then on.
    seen[80:83, 10:80] = False
    seen[83, 10:40] = False
    expected = seen_logits(tiny, [*PROMPT, 11, 12, 13, 5], [*range(80), 12, 13, 14, 80], seen)
    assert sequence.logits is not None
    assert gap(sequence.logits, expected) <= 1e-3
    with pytest.raises(InvalidRange, match="cached"):
        engine.insert(sequence, 38, [1, 2, 3])


@dataclass(frozen=True)
class Chooses:
    """Somebody's own press."""

    selection: Selection
    needs: frozenset[str] = frozenset()
    recent: int = 0

    def keep(self, seen: Observation, budget: int) -> Selection:
        return self.selection


@pytest.mark.parametrize(
    "selection",
    [
        Selection(torch.tensor([3, 2])),
        Selection(torch.tensor([1, 1])),
        Selection(torch.tensor([-1, 4])),
        Selection(torch.tensor([4, 80])),
        Selection(torch.tensor([0.0, 1.0])),
        Selection(torch.zeros((1, 2, 4), dtype=torch.int64)),
        Selection(torch.tensor([1, 2]), torch.tensor([1])),
    ],
)
def test_what_is_no_selection_drops_nothing(tiny: Weights, selection: Selection) -> None:
    engine = Engine(tiny, 128)
    sequence = engine.open(PROMPT)
    with pytest.raises(SpecError, match="chose no tokens of the 80"):
        compress(engine, sequence, Chooses(selection), 2)
    assert len(sequence) == 80


def test_what_was_packed_is_not_rotated(tiny: Weights) -> None:
    engine = Engine(tiny, 128)
    sequence = engine.open(PROMPT)
    compress(engine, sequence, press_of("keynorm"), 40)
    with pytest.raises(KVError, match="packed"):
        compress(engine, sequence, press_of("streaming(sinks=2)"), 20)
    assert len(sequence) == 40
    assert compress(engine, sequence, press_of("streaming(sinks=2, rotate=False)"), 20) == 20


@pytest.mark.parametrize("spec", ["streaming(sinks=2)", "keynorm", "window"])
def test_a_full_pool_can_be_pressed(tiny: Weights, spec: str) -> None:
    engine = Engine(tiny, 80, size=4)
    sequence = engine.open(PROMPT)
    assert engine.pool.free == 0
    compress(engine, sequence, press_of(spec), 20)
    assert (len(sequence), engine.pool.free) == (20, 15)


def test_packing_preempts_others_before_it_gives_up(tiny: Weights) -> None:
    engine = Engine(tiny, 120, size=4, share=False)
    sequence, other = engine.open(PROMPT), engine.open(range(1, 41))
    twin = engine.fork(sequence)
    assert compress(engine, twin, press_of("keynorm"), 20) == 60
    assert (len(twin), sequence.is_live, other.is_live) == (20, True, False)


def test_half_precision_does_not_wear_off_by_rotating() -> None:
    """StreamingLLM turns its sinks at each compression: after many, they are still what one rotation would make of them."""
    weights = weights_of(tiny_model().to(torch.bfloat16))
    engine = Engine(weights, 512, share=False)
    press = press_of("streaming(sinks=2)")
    sequence = engine.open(PROMPT[:30])
    keys = engine.storage.gather(torch.tensor(sequence.table.slots().physical[:2]))[0]
    for token in range(150):
        engine.prefill(sequence, [1 + token % 90])
        compress(engine, sequence, press, 24)
    assert sequence.shifts == {0: 156, 1: 156}
    after = engine.storage.gather(torch.tensor(sequence.table.slots().physical[:2]))[0]
    expected = rotate(keys.float(), torch.tensor([156, 156]), weights.inv_freq)
    assert float((after.float() - expected).norm() / expected.norm()) < 0.01


def test_what_was_packed_has_no_single_tokens_to_evict(tiny: Weights) -> None:
    engine = Engine(tiny, 512, share=False)
    sequence = engine.open(PROMPT)
    compress(engine, sequence, press_of("keynorm"), 30)
    engine.prefill(sequence, [7, 8, 9])
    twin = engine.fork(sequence)
    for one in (sequence, twin):
        with pytest.raises(InvalidRange, match="each head"):
            engine.evict(one, 60, 70)
        with pytest.raises(InvalidRange, match="each head"):
            engine.insert(one, 3, [5])
        assert len(one) == 33
        assert engine.evict(one, 80, 81) == 1


def test_streaming_for_long_piles_up_no_records(tiny: Weights) -> None:
    """What cannot be computed again needs no list of what left it; what can be, has one record a press."""
    engine = Engine(tiny, 512)
    streaming = press_of("streaming(sinks=4)")
    sequence = engine.open(PROMPT)
    sizes = []
    for _ in range(12):
        compress(engine, sequence, streaming, 30)
        engine.prefill(sequence, [7, 8])
        sizes.append((len(sequence.table.evictions), len(sequence.first), len(sequence.shifts), len(sequence.table.stood)))
    assert sizes == [(0, 4, 4, 0)] * 12


def test_what_is_written_anew_keeps_all_else(tiny: Weights) -> None:
    """`renew` copies what others own too, and nothing else of the sequence moves."""
    engine = Engine(tiny, 512, size=4)
    base = engine.open(PROMPT)
    base.table.label(1, 2, 9)
    twin = engine.fork(base)
    keys, values = engine.storage.gather(torch.tensor(twin.table.slots().physical))
    slots = twin.table.renew([1, 5, 6])
    engine.storage.perform(engine.tables.copies)
    now = engine.storage.gather(torch.tensor(twin.table.slots().physical))
    assert torch.equal(now[0], keys)
    assert torch.equal(now[1], values)
    assert [twin.table.slots().physical[place] for place in (1, 5, 6)] == list(slots)
    assert not {slot // 4 for slot in slots} & set(base.table.blocks)
    assert twin.table.blocks[2:] == base.table.blocks[2:]
    assert (twin.table.pages.items(), twin.table.altered, twin.table.evictions) == ({1: (2, 9)}, {"folded": 1}, ())
    engine.evict(twin, 5, 6)
    with pytest.raises(InvalidRange, match="not cached"):
        twin.table.renew([4, 5])

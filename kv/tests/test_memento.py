"""Memento: what the reader makes of any stream of tokens, and that a block that left is as if it were masked."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kilburn.errors import OutOfBlocks, PrefixRefused, SpecError
from kilburn.wire.mementos import BLOCK_END, BLOCK_START, SUMMARY_END, SUMMARY_START, Where, parse
from kilburn_kv.engine import Engine
from kilburn_kv.generation import Sampling
from kilburn_kv.memento import BlockReader, DroppedRange, Instruction, Markers, MementoRules
from kilburn_kv.reasoning import reason, replay, stream
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.weights import Weights

from .oracle import gap, masked_logits

START, END, OPEN, CLOSE, THINK = 90, 91, 92, 93, 94
MARKERS = Markers((START,), (END,), (OPEN,), (CLOSE,), (THINK,))
LONG = Markers((1, 2, 3), (1, 2, 4), (5, 1), (2, 2, 6), (7, 7))
OVERLAPPING = Markers((1, 2), (2, 3), (3, 4), (4, 1), (5,))
RARE = Markers((90, 91, 92), (91, 90, 92), (92, 91, 90), (90, 92, 91))
"""What a model of random weights hardly ever says by itself."""

PROMPT = [1 + (7 * place) % 80 for place in range(40)]


def block(content: int, memento: int, token: int = 10) -> list[int]:
    return [START, *[token] * content, END, OPEN, *[token + 1] * memento, CLOSE]


def read(tokens: list[int], start: int = 0, **rules: Any) -> tuple[BlockReader, list[Instruction]]:
    reader = MementoRules(MARKERS, **rules).reader(start)
    return reader, [reader.feed(token) for token in tokens]


def test_a_block_leaves_when_its_memento_is_complete() -> None:
    reader, turns = read([8, *block(5, 2), 9], start=100)
    assert reader.drops == [DroppedRange(12, 2, 7)]
    assert [turn.evict for turn in turns if turn.drops] == [((102, 107),)]
    assert turns[11].evict
    assert reader.left == [8, START, END, OPEN, 11, 11, CLOSE, 9]
    assert reader.where is Where.OUTSIDE
    assert not reader.faults


def test_without_delimiters_only_the_memento_stays() -> None:
    reader, turns = read([8, *block(5, 2), 9], delimiters=False)
    assert turns[11].evict == ((1, 9), (11, 12))
    assert reader.left == [8, 11, 11, 9]


def test_the_newest_blocks_stay_whole() -> None:
    tokens = [*block(3, 1), *block(4, 1), *block(5, 1)]
    assert [drop.start for drop in read(tokens)[0].drops] == [1, 9, 18]
    assert [(drop.at, drop.start, drop.stop) for drop in read(tokens, keep_last_n_blocks=1)[0].drops] == [(17, 1, 4), (27, 9, 13)]
    assert read(tokens, keep_last_n_blocks=3)[0].drops == []
    assert read(tokens, keep_last_n_blocks=-1)[0].drops == []
    assert read(tokens, keep_last_n_blocks=-1, keep_last_block_for_answer=True)[0].drops == []


def test_the_last_block_stays_for_the_answer() -> None:
    tokens = [*block(3, 1), 9, *block(4, 1), THINK, 5, *block(2, 1)]
    reader, turns = read(tokens, keep_last_block_for_answer=True)
    # The first block leaves where the second opens; the second is there for the answer, in which markers mean nothing.
    assert reader.drops == [DroppedRange(10, 1, 4)]
    assert turns[9].evict == ((1, 4),)
    assert reader.where is Where.ANSWER
    assert len(reader.blocks) == 2
    assert not reader.faults
    assert len(read(tokens)[0].drops) == 2


def test_a_restart_says_what_is_to_be_computed_again() -> None:
    tokens = [8, *block(3, 2), *block(4, 1), 9]
    _, turns = read(tokens, start=50, restart_mode=True)
    restarts = [turn.restart for turn in turns if turn.drops]
    assert restarts == [
        (8, START, END, OPEN, 11, 11, CLOSE),
        (8, START, END, OPEN, 11, 11, CLOSE, START, END, OPEN, 11, CLOSE),
    ]
    assert all(not turn.evict for turn in turns)


@pytest.mark.parametrize(
    ("tokens", "fault"),
    [
        ([START, 5, START, 5, END], ("block_start inside a block", 2)),
        ([END], ("block_end outside of a block", 0)),
        ([8, OPEN, 6, CLOSE], ("summary_start outside of a block", 1)),
        ([START, 5, OPEN], ("summary_start inside a block", 2)),
        ([START, 5, END, START], ("block_start before a memento", 3)),
        ([START, 5, END, OPEN, END], ("block_end inside a memento", 4)),
        ([*block(4, 0)], ("an empty memento", 7)),
        ([START, 5, THINK], ("think_end inside a block", 2)),
    ],
)
def test_markers_out_of_place_change_nothing(tokens: list[int], fault: tuple[str, int]) -> None:
    reader, turns = read(tokens)
    assert reader.faults[0] == fault
    assert not any(turn.drops for turn in turns)


def test_a_nested_start_is_part_of_the_block() -> None:
    reader, _ = read([START, 5, START, 5, END, OPEN, 6, CLOSE])
    assert reader.drops == [DroppedRange(8, 1, 4)]


def test_the_end_in_the_middle_of_a_block_leaves_it_whole() -> None:
    for stop, where in ((3, Where.BLOCK), (7, Where.BETWEEN), (9, Where.MEMENTO)):
        reader, turns = read(block(5, 2)[:stop])
        assert reader.where is where
        assert not any(turn.drops for turn in turns)
        assert not reader.blocks


def test_long_blocks_and_mementos_are_closed_by_force() -> None:
    reader = MementoRules(LONG, max_block_tokens=6, max_summary_tokens=4, force_start=True).reader()
    force, said = reader.begin().force, []
    assert force == (1, 2, 3)
    while len(reader.blocks) < 2:
        # The sixth token of a block is the start of its end: only the rest of that is forced.
        token = force[0] if force else 1
        if not force:
            said.append(token)
        turn = reader.feed(token)
        force = force[1:] or turn.force
    first, second = reader.blocks
    assert reader.tokens[: first.end] == [1, 2, 3, 1, 1, 1, 1, 1, 1, 2, 4, 5, 1, 1, 1, 1, 1, 2, 2, 6]
    assert first.forced_end
    assert first.forced_summary
    assert (first.content, first.memento) == ((3, 8), (13, 17))
    assert second.start == first.end


def test_a_marker_that_is_forced_is_read_as_it_was_meant() -> None:
    reader = MementoRules(OVERLAPPING, max_block_tokens=2).reader()
    for token in (1, 2, 9):
        reader.feed(token)
    assert reader.feed(1).force == (2, 3)
    # 1, 2 is a block's start to a reader that does not know what it asked for.
    assert [reader.feed(token) for token in (2, 3)] == [Instruction(), Instruction(force=(3, 4))]
    assert reader.where is Where.BETWEEN
    assert not reader.faults


def test_what_is_asked_for_and_not_done_is_asked_for_again() -> None:
    reader = MementoRules(LONG, max_block_tokens=2).reader()
    turns = [reader.feed(token) for token in (1, 2, 3, 9, 9, 1, 9)]
    assert [turn.force for turn in turns] == [(), (), (), (), (1, 2, 4), (), (1, 2, 4)]
    assert reader.where is Where.BLOCK


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"keep_last_n_blocks": -2}, "keep_last_n_blocks"),
        ({"max_block_tokens": -1}, "max_block_tokens"),
        ({"max_summary_tokens": -1}, "max_summary_tokens"),
    ],
)
def test_rules_that_cannot_be(rules: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        MementoRules(MARKERS, **rules)  # type: ignore[arg-type]


def test_markers_that_cannot_be_told_apart() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Markers((1,), (), (3,), (4,))
    with pytest.raises(ValueError, match="part of"):
        Markers((1, 2), (2,), (3,), (4,))
    with pytest.raises(ValueError, match="part of"):
        Markers((1,), (2,), (3,), (1,))
    assert Markers((1,), (2,), (3,), (4,)).think_end == ()


def test_markers_from_their_texts(smollm: Weights) -> None:
    markers = Markers.of(smollm.tokens)
    assert smollm.text([*markers.block_start, *markers.summary_end]) == "<|block_start|><|summary_end|>"
    assert Markers.of(smollm.tokens, think_end="").think_end == ()
    assert Markers.of(smollm.tokens, block_start="<issue_start>").block_start == (8,)


TEXT = {START: BLOCK_START, END: BLOCK_END, OPEN: SUMMARY_START, CLOSE: SUMMARY_END, 5: "x", 6: "y"}


@given(st.lists(st.sampled_from(list(TEXT)), max_size=40))
@example([*block(1, 1), *block(2, 1)])
def test_any_stream_has_the_blocks_that_its_text_has(tokens: list[int]) -> None:
    """The reader of tokens and the parser of texts agree on every stream, well-formed or not."""
    tokens = [token if token in TEXT else 5 for token in tokens]
    places, at = {0: 0}, 0
    for number, token in enumerate(tokens, 1):
        at += len(TEXT[token])
        places[at] = number
    parsed = parse("".join(TEXT[token] for token in tokens))
    reader, _ = read(tokens)
    expected = [
        tuple(tuple(places[edge] for edge in span) for span in (found.content, found.memento, (found.start, found.end)))
        for found in parsed.blocks
    ]
    assert [(found.content, found.memento, (found.start, found.end)) for found in reader.blocks] == expected
    assert not parsed.faults or reader.faults or reader.where is not Where.OUTSIDE or _said_between(tokens)


def _said_between(tokens: list[int]) -> bool:
    """Whether plain tokens stand between a block and its memento, which a text may not and a cache does not mind."""
    return any(one == END and two in (5, 6) for one, two in pairwise(tokens))


@settings(max_examples=150)
@given(
    said=st.lists(st.integers(1, 9), min_size=1, max_size=120),
    markers=st.sampled_from([LONG, OVERLAPPING, Markers((1,), (2,), (3,), (4,))]),
    keep=st.integers(-1, 2),
    caps=st.tuples(st.integers(0, 9), st.integers(0, 5)),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
)
def test_whatever_a_model_says(
    said: list[int], markers: Markers, keep: int, caps: tuple[int, int], flags: tuple[bool, bool, bool, bool]
) -> None:
    for_answer, delimiters, restart, force_start = flags
    rules = MementoRules(markers, keep, for_answer, delimiters, restart, *caps, force_start)
    reader = rules.reader(7)
    begun = reader.begin().force
    force = begun
    cached = list(range(7))
    for token in said:
        for fed in force or (token,):
            turn = reader.feed(fed)
            cached.append(7 + len(reader.tokens) - 1)
        for start, stop in turn.evict:
            gone = [position for position in cached if start <= position < stop]
            assert len(gone) == stop - start
            cached = [position for position in cached if position not in gone]
        if turn.restart is not None:
            assert restart
            assert list(turn.restart) == reader.left
        force = turn.force
    if not restart:
        assert [reader.tokens[position - 7] for position in cached[7:]] == reader.left
    most, words = caps
    for found in reader.blocks:
        assert not most or found.content[1] - found.content[0] <= most
        assert not words or found.memento[1] - found.memento[0] <= words
        assert tuple(reader.tokens[found.start : found.content[0]]) == markers.block_start
        assert tuple(reader.tokens[found.memento[1] : found.end]) == markers.summary_end
    dropped = {place for drop in reader.drops for place in range(drop.start, drop.stop)}
    assert len(dropped) == sum(drop.stop - drop.start for drop in reader.drops)
    told = [found for found in reader.blocks if found.memento[0] < found.memento[1]]
    assert not any(place in dropped for found in reader.blocks for place in range(*found.memento))
    whole = [
        found for found in told if not dropped & set(range(found.start, found.memento[0])) and found.content[0] < found.content[1]
    ]
    if keep >= 0:
        assert len(whole) <= max(keep, int(for_answer))
    else:
        assert not dropped


def forced(keep: int = 0, restart: bool = False, size: int = 96, words: int = 12, **rules: Any) -> MementoRules:
    return MementoRules(
        RARE, keep, restart_mode=restart, max_block_tokens=size, max_summary_tokens=words, force_start=True, **rules
    )


def nats(expected: torch.Tensor, found: torch.Tensor) -> float:
    """KL(expected || found) of the next token."""
    left, right = expected.float().log_softmax(-1), found.float().log_softmax(-1)
    return float((left.exp() * (left - right)).sum())


def test_evicted_is_masked_and_the_cache_is_a_sawtooth(tiny: Weights) -> None:
    engine = Engine(tiny, 2048)
    sequence = engine.open(PROMPT)
    seen: dict[int, torch.Tensor] = {}
    used: list[int] = []

    def between(one: CachedSequence) -> None:
        used.append(engine.used)
        if one.end % 149 == 0:
            assert one.logits is not None
            seen[one.end] = one.logits.clone()

    run = reason(engine, [sequence], 1200, forced(), Sampling(temperature=1.0, seed=3), stops=(), between=between)[0]
    assert len(run.tokens) == 1200
    assert list(sequence.table.tokens) == PROMPT + run.tokens
    assert len(run.blocks) >= 10
    assert run.finish == "length"
    assert len(seen) >= 6
    gone = [(40 + drop.at, 40 + drop.start, 40 + drop.stop) for drop in run.drops]
    assert [tuple(found) for found in sequence.table.evictions] == gone
    worst = max(
        gap(logits, masked_logits(tiny, [*PROMPT, *run.tokens][:end], [one for one in gone if one[0] <= end]))
        for end, logits in seen.items()
    )
    assert worst <= 1e-3

    # Each memento gives the blocks of its block back, and nothing else ever does.
    falls = [before - after for before, after in pairwise(used) if after < before]
    assert len(falls) == len([drop for drop in run.drops if drop.stop - drop.start >= 16])
    assert min(falls) >= 0.5 * 96 * run.unit
    assert engine.used == len(sequence.table.blocks) * 16 * run.unit
    assert sequence.table.gaps < 16
    whole = replay(engine, engine.open(PROMPT), run.tokens, forced(-1))
    assert whole.peak_cached == 1240
    assert not whole.drops
    assert run.peak <= 0.45 * whole.peak
    assert run.peak_cached <= 0.45 * whole.peak_cached
    engine.free(sequence)


@pytest.mark.slow
def test_the_real_model_evicted_is_masked_and_a_restart_is_not(smollm: Weights) -> None:
    tokens = smollm.tokens
    markers = Markers.of(
        tokens,
        block_start="<issue_start>",
        block_end="<issue_closed>",
        summary_start="<jupyter_start>",
        summary_end="<empty_output>",
    )
    rules: dict[str, Any] = {"max_block_tokens": 64, "max_summary_tokens": 8, "force_start": True}
    prompt = tokens("Question: a farmer has 17 sheep and buys 5 more every week. When has he 100? Let us think.\n")
    engine = Engine(smollm, 1024)
    sequence = engine.open(prompt)
    start = reason(engine, [sequence], 160, MementoRules(markers, **rules), stops=())[0]
    assert len(start.drops) == 2
    assert len(start.blocks) == 2
    # What the model said, and three blocks more, which are given to it: each token that it says itself takes long.
    story = tokens(" ".join(f"In week {week} he has {17 + 5 * week} sheep." for week in range(1, 40)))
    said = start.tokens[: start.blocks[-1].end]
    for place in range(3):
        words = story[72 * place : 72 * place + 72]
        said += [*markers.block_start, *words[:64], *markers.block_end, *markers.summary_start, *words[64:], *markers.summary_end]
    said += [*markers.block_start, *story[216 : 216 + 9]]
    engine.prefill(sequence, [5])
    early = [(len(prompt) + drop.at, len(prompt) + drop.start, len(prompt) + drop.stop) for drop in start.drops]
    assert sequence.logits is not None
    assert gap(sequence.logits, masked_logits(smollm, [*prompt, *start.tokens, 5], early)) <= 1e-3

    sequence = engine.open(prompt)
    run = replay(engine, sequence, said, MementoRules(markers, **rules))
    assert len(run.tokens) == 390
    assert run.drops[:2] == start.drops
    count = len(prompt)
    gone = [(count + drop.at, count + drop.start, count + drop.stop) for drop in run.drops]
    assert len(gone) == 5
    assert sequence.logits is not None
    assert gap(sequence.logits, masked_logits(smollm, [*prompt, *run.tokens], gone)) <= 1e-3

    anew, kept = engine.open(prompt), engine.open(prompt)
    restarted = replay(engine, anew, run.tokens, MementoRules(markers, restart_mode=True, **rules))
    full = replay(engine, kept, run.tokens, MementoRules(markers, keep_last_n_blocks=-1, **rules))
    assert anew.logits is not None
    assert kept.logits is not None
    # The same words are cached; only what their keys and values were computed from differs.
    assert list(anew.table.tokens)[count:] == [
        token for place, token in enumerate(run.tokens) if not any(drop.start <= place < drop.stop for drop in run.drops)
    ]
    assert len(anew) == len(sequence)
    assert gap(anew.logits, sequence.logits) > 1e-2
    assert nats(sequence.logits, anew.logits) > 1e-4
    assert run.peak <= 0.45 * full.peak
    assert restarted.peak <= 0.45 * full.peak


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("delimiters", [True, False])
def test_blocks_across_the_borders_of_the_pool(tiny: Weights, size: int, delimiters: bool) -> None:
    tokens = [8, *block(37, 3), *block(5, 9), 7, *block(70, 1), 12, 13]
    for defragment in (True, False):
        engine = Engine(tiny, 512, size=size)
        sequence = engine.open(PROMPT)
        run = replay(engine, sequence, tokens, MementoRules(MARKERS, delimiters=delimiters), defragment=defragment)
        gone = [(40 + drop.at, 40 + drop.start, 40 + drop.stop) for drop in run.drops]
        assert sequence.logits is not None
        assert gap(sequence.logits, masked_logits(tiny, [*PROMPT, *tokens], gone)) <= 1e-3
        assert len(sequence) == 40 + len(tokens) - sum(drop.stop - drop.start for drop in run.drops)
        assert not defragment or sequence.table.gaps < 3 * size
        engine.free(sequence)
        assert engine.pool.free == engine.pool.capacity


def test_a_restart_is_a_new_start(tiny: Weights) -> None:
    tokens = [*block(40, 6), 9, *block(30, 5), 4]
    engine = Engine(tiny, 512)
    sequence = engine.open(PROMPT)
    run = replay(engine, sequence, tokens, MementoRules(MARKERS, restart_mode=True))
    left = [START, END, OPEN, *[11] * 6, CLOSE, 9, START, END, OPEN, *[11] * 5, CLOSE, 4]
    assert list(sequence.table.tokens) == PROMPT + left
    assert run.tokens == tokens
    fresh = engine.open([*PROMPT, *left])
    assert fresh.logits is not None
    assert sequence.logits is not None
    assert gap(sequence.logits, fresh.logits) <= 1e-3
    assert not sequence.table.altered
    evicted = engine.open(PROMPT)
    replay(engine, evicted, tokens, MementoRules(MARKERS))
    assert evicted.logits is not None
    assert gap(evicted.logits, fresh.logits) > 1e-2


def test_a_batch_says_what_each_says_alone(tiny: Weights) -> None:
    engine = Engine(tiny, 2048)
    prompts = [PROMPT, PROMPT[::-1][:23], [5]]
    rules = forced(1, size=20, words=4)
    alone = [reason(engine, [engine.open(prompt)], 150, rules, stops=())[0] for prompt in prompts]
    batch = reason(engine, [engine.open(prompt) for prompt in prompts], 150, rules, stops=())
    assert [run.tokens for run in batch] == [run.tokens for run in alone]
    assert [run.drops for run in batch] == [run.drops for run in alone]
    assert all(len(run.drops) >= 3 for run in batch)


def test_a_stream_says_the_same_as_it_comes(tiny: Weights) -> None:
    engine = Engine(tiny, 512)
    rules = forced(size=20, words=4)
    expected = reason(engine, [engine.open(PROMPT)], 60, rules, stops=())[0]
    pieces, coming = [], stream(engine, engine.open(PROMPT), 60, rules, stops=())
    while True:
        try:
            pieces.append(next(coming))
        except StopIteration as end:
            found = end.value
            break
    assert [token for piece in pieces for token in piece] == expected.tokens == found.tokens
    assert pieces[0] == RARE.block_start
    assert found.trace == expected.trace


def test_stops_and_limits(tiny: Weights) -> None:
    engine = Engine(tiny, 512)
    free = MementoRules(MARKERS)
    said = reason(engine, [engine.open(PROMPT)], 12, free, stops=())[0].tokens
    stop = said[4]
    run = reason(engine, [engine.open(PROMPT)], 12, free, stops={stop})[0]
    assert run.finish == "stop"
    assert run.tokens == said[: said.index(stop) + 1]
    nothing = reason(engine, [engine.open(PROMPT)], 0, free)[0]
    assert (nothing.tokens, nothing.finish, nothing.peak_cached) == ([], "length", 40)
    # What is forced stops nobody, and is cut where the limit is.
    cut = reason(engine, [engine.open(PROMPT)], 2, MementoRules(LONG, force_start=True), stops={1, 2})[0]
    assert (cut.tokens, cut.finish, cut.where) == ([1, 2], "length", Where.OUTSIDE)
    middle = reason(engine, [engine.open(PROMPT)], 30, forced(size=96), stops=())[0]
    assert (middle.where, middle.drops) == (Where.BLOCK, [])


def test_a_pool_that_is_too_small_for_all_of_it_is_enough(tiny: Weights) -> None:
    rules: dict[str, Any] = {"size": 48, "words": 6}
    engine = Engine(tiny, 256, share=False)
    sequence = engine.open(PROMPT)
    with pytest.raises(OutOfBlocks):
        reason(engine, [sequence], 600, forced(-1, **rules), stops=())
    assert sequence.end == 256
    engine.free(sequence)
    assert engine.pool.free == engine.pool.capacity
    sequence = engine.open(PROMPT)
    run = reason(engine, [sequence], 600, forced(**rules), stops=())[0]
    assert len(run.tokens) == 600
    assert run.peak <= engine.pool.capacity * 16 * run.unit


def test_an_evicted_sequence_publishes_nothing(tiny: Weights) -> None:
    engine = Engine(tiny, 1024)
    tokens = [*block(60, 6), *[12] * 60]
    sequence = engine.open(PROMPT)
    run = replay(engine, sequence, tokens, MementoRules(MARKERS))
    exact = 40 + run.drops[0].at
    with pytest.raises(PrefixRefused):
        sequence.table.publish()
    found = engine.tables.open(engine.key, [*PROMPT, *tokens])
    assert len(found) <= exact
    # Nor is anything found by the words that are left: they were never computed in that order.
    left = [*PROMPT, START, END, OPEN, *[11] * 6, CLOSE, *[12] * 60]
    assert len(engine.tables.open(engine.key, left)) <= 40


def test_gaps_stay_open_where_forks_share_what_would_move(tiny: Weights) -> None:
    engine = Engine(tiny, 256, share=False)
    prompt = (PROMPT * 4)[:128]
    sequence = engine.open(prompt)
    fork = engine.fork(sequence)
    holes = [(128, start, start + 8) for start in range(8, 112, 16)]
    for _, start, stop in holes:
        engine.evict(sequence, start, stop)
    filler = engine.open([3] * 112)
    assert engine.pool.free == 1
    replay(engine, sequence, block(2, 3), MementoRules(MARKERS))
    assert filler.is_live
    with pytest.raises(OutOfBlocks):
        sequence.table.defragment()
    for one, gone in ((sequence, [*holes, (136, 129, 131)]), (fork, [])):
        told = [*prompt, *block(2, 3)] if one is sequence else list(prompt)
        assert one.logits is not None
        if one is fork:
            engine.free(filler)
        engine.prefill(one, [12])
        assert gap(one.logits, masked_logits(tiny, [*told, 12], gone)) <= 1e-3


def test_preempted_behind_a_memento_it_comes_back_the_same(tiny: Weights) -> None:
    engine = Engine(tiny, 512)
    sequence = engine.open(PROMPT)
    reason(engine, [sequence], 140, forced(size=30, words=5), stops=())
    assert sequence.logits is not None
    expected = sequence.logits.clone()
    engine.preempt(sequence)
    engine.resume(sequence)
    assert sequence.logits is not None
    assert gap(sequence.logits, expected) <= 1e-3
    assert reason(engine, [sequence], 60, forced(size=30, words=5), stops=())[0].drops


def test_tokens_that_the_model_does_not_know(tiny: Weights) -> None:
    engine = Engine(tiny, 256)
    sequence = engine.open(PROMPT)
    with pytest.raises(SpecError, match="outside 0 to 96"):
        reason(engine, [sequence], 5, MementoRules(Markers((200,), (201,), (202,), (203,)), force_start=True))
    assert sequence.end == 40

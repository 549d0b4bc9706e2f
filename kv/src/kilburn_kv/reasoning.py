"""Reasoning in blocks on the engine: the model generates, and each block leaves the cache after its memento.

This carries out what `kilburn_kv.memento` says, token by token. Forced tokens are cached as they are. Blocks are
evicted and their slots freed, or the sequence starts again after its prompt. The model writes the mementos.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from kilburn.errors import OutOfBlocks
from kilburn.model import Finish
from kilburn.wire.mementos import Fault, ThoughtBlock, Where
from kilburn_kv.engine import Engine
from kilburn_kv.generation import GREEDY, Between, Sampling
from kilburn_kv.memento import BlockReader, DroppedRange, Instruction, MementoRules
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.tensors import torch

__all__ = ["reason"]


class Point(NamedTuple):
    """The cache at one moment.

    Args:
        made: tokens generated so far.
        cached: cached tokens, including the prompt's.
        slots: slots in the sequence's blocks, used or not.
    """

    made: int
    cached: int
    slots: int


@dataclass(frozen=True)
class ReasoningRun:
    """The result for one sequence.

    Args:
        tokens: all generated or forced tokens, in order, including those that left the cache and a stop token.
        blocks: the blocks with complete mementos. Their ranges count from the first generated token, as do those of
            `drops`.
        drops: what left the cache, and when.
        faults: markers out of place, and after how many tokens.
        where: what was open at the end; "answer" after the end of thinking.
        finish: "stop" or "length".
        trace: the cache before and after each change: the sawtooth.
        unit: bytes of keys and values of one slot.
    """

    tokens: list[int]
    blocks: list[ThoughtBlock]
    drops: list[DroppedRange]
    faults: list[Fault]
    where: Where
    finish: Finish
    trace: list[Point] = field(repr=False)
    unit: int

    @property
    def peak(self) -> int:
        """The most bytes that the sequence's blocks held."""
        return self.unit * max(point.slots for point in self.trace)

    @property
    def peak_cached(self) -> int:
        """The most tokens that were cached."""
        return max(point.cached for point in self.trace)


class _Run:
    """One sequence during a run."""

    def __init__(self, engine: Engine, sequence: CachedSequence, memento: MementoRules, defragment: bool) -> None:
        self.engine, self.sequence, self.defragment = engine, sequence, defragment
        self.start = sequence.end
        self.reader: BlockReader = memento.reader(self.start)
        self.force: tuple[int, ...] = self.reader.begin().force
        self.finish = Finish.LENGTH
        self.trace: list[Point] = []
        self.trace_point()

    def trace_point(self) -> None:
        table = self.sequence.table
        self.trace.append(Point(len(self.reader.tokens), len(table), len(table.blocks) * self.engine.pool.size))

    def read(self, tokens: Sequence[int]) -> None:
        """Read tokens that were cached; only after the last of them there may be something to do."""
        turn = Instruction()
        for token in tokens:
            turn = self.reader.feed(token)
        self.trace_point()
        self.force = turn.force
        self.follow(turn)

    def follow(self, turn: Instruction) -> None:
        """Carry out an instruction: evict, or start again."""
        if not turn.drops:
            return
        if turn.restart is not None:
            self.engine.truncate(self.sequence, self.start)
            self.engine.prefill(self.sequence, turn.restart)
        for start, stop in turn.evict:
            self.engine.evict(self.sequence, start, stop)
        if turn.evict and self.defragment:
            # If forks share what would move, closing the gaps needs new blocks. The gaps then stay open, which changes
            # no logit.
            with suppress(OutOfBlocks):
                self.sequence.table.defragment()
        self.trace_point()

    def result(self) -> ReasoningRun:
        reader, weights = self.reader, self.engine.weights
        unit = weights.shape.bytes(weights.dtype)
        return ReasoningRun(
            reader.tokens, reader.blocks, reader.drops, reader.faults, reader.where, self.finish, self.trace, unit
        )


def reason(
    engine: Engine,
    sequences: Sequence[CachedSequence],
    limit: int,
    memento: MementoRules,
    sampling: Sampling = GREEDY,
    *,
    stops: Collection[int] | None = None,
    between: Between | None = None,
    defragment: bool = True,
) -> list[ReasoningRun]:
    """Continue sequences in one batch, by at most `limit` tokens each, including forced ones.

    The token after a memento is still chosen while the block is visible: the marker that closes the memento is the
    last token that sees the block.

    Args:
        stops: tokens that end a sequence if the model writes them; None for those of the weights, empty for none.
        between: called with each sequence after each step, when everything that had to leave has left.
        defragment: whether the remaining slots are moved together after each eviction, so that all blocks but the last
            are full. Otherwise a block of the pool is freed only when all of its slots are unused.

    Raises:
        OutOfBlocks: the sequences keep what they generated before.
    """
    runs = [_Run(engine, sequence, memento, defragment) for sequence in sequences]
    for run in _steps(engine, runs, limit, sampling, stops):
        if between is not None:
            between(run.sequence)
    return [run.result() for run in runs]


def stream(
    engine: Engine,
    sequence: CachedSequence,
    limit: int,
    memento: MementoRules,
    sampling: Sampling = GREEDY,
    *,
    stops: Collection[int] | None = None,
    defragment: bool = True,
) -> Generator[tuple[int, ...], None, ReasoningRun]:
    """The same for one sequence: yields its tokens as soon as they are cached, several at once if they are forced;
    returns the result."""
    run = _Run(engine, sequence, memento, defragment)
    told = 0
    for _ in _steps(engine, [run], limit, sampling, stops):
        yield tuple(run.reader.tokens[told:])
        told = len(run.reader.tokens)
    return run.result()


def _steps(engine: Engine, runs: list[_Run], limit: int, sampling: Sampling, stops: Collection[int] | None) -> Iterator[_Run]:
    """Step by step, each run after each of its steps."""
    ends = engine.weights.stops if stops is None else frozenset(stops)
    chance = sampling.generator(engine.weights.device)
    going = runs if limit > 0 else []
    while going:
        free = [run for run in going if not run.force]
        chosen: list[int] = []
        if free:
            logits = torch.stack([engine.refresh(run.sequence) for run in free])
            chosen = sampling.choose(logits, chance).tolist()
        said = {id(run): token for run, token in zip(free, chosen, strict=True)}
        feeds = [run.force[: limit - len(run.reader.tokens)] or (said[id(run)],) for run in going]
        engine.step([(run.sequence, tokens) for run, tokens in zip(going, feeds, strict=True)])
        for run, tokens in zip(going, feeds, strict=True):
            run.read(tokens)
            if said.get(id(run)) in ends:
                run.finish = Finish.STOP
        yield from going
        going = [run for run in going if run.finish != Finish.STOP and len(run.reader.tokens) < limit]


def replay(
    engine: Engine, sequence: CachedSequence, tokens: Sequence[int], memento: MementoRules, *, defragment: bool = True
) -> ReasoningRun:
    """Use given tokens instead of the model's: compares settings on the same text.

    The given tokens are used even if others would have been forced.

    Raises:
        OutOfBlocks, SpecError: the sequence keeps what it took before.
    """
    run = _Run(engine, sequence, memento, defragment)
    ahead = memento.reader(run.start)
    waiting: list[int] = []
    for place, token in enumerate(tokens, 1):
        waiting.append(token)
        if ahead.feed(token).drops or place == len(tokens):
            engine.prefill(sequence, waiting)
            run.read(waiting)
            waiting = []
    return run.result()

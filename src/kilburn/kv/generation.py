"""Generation: the model continues sequences of an engine, token by token, in one batch.

Each sequence stops at its limit or at a stop token, which is then cached too. No template is added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from kilburn.errors import KVError, MissingExtra
from kilburn.kv.engine import Engine
from kilburn.kv.sampling import GREEDY, Sampling
from kilburn.kv.sequence import CachedSequence

try:
    import torch
except ModuleNotFoundError as error:  # pragma: no cover - the tests install the extra
    raise MissingExtra("torch", "kv") from error

__all__ = ["generate", "stream"]

Between = Callable[[CachedSequence], None]
"""Called with a sequence after each of its tokens: a press, or the reader of mementos."""


def generate(
    engine: Engine,
    sequences: Sequence[CachedSequence],
    limit: int,
    sampling: Sampling = GREEDY,
    *,
    stops: Collection[int] | None = None,
    between: Between | None = None,
) -> list[list[int]]:
    """Continue sequences, by at most `limit` tokens each; returns the tokens of each, including a stop token.

    Args:
        stops: tokens that end a sequence; None for those of the weights, empty for none.
        between: called with each sequence after each token that is cached.

    Sequences of the batch are not preempted for one another.

    Raises:
        OutOfBlocks, KVError: also errors of that kind from `between`. The error's `made` has the tokens of each
            sequence that were generated so far; all of them are cached. Make room, and continue those that are not
            finished.
    """
    ends = engine.weights.stops if stops is None else frozenset(stops)
    chance = sampling.generator(engine.weights.device)
    made: list[list[int]] = [[] for _ in sequences]
    going = [row for row in range(len(sequences)) if limit > 0]
    try:
        while going:
            with engine.keeping([sequences[row] for row in going]):
                logits = torch.stack([engine.refresh(sequences[row]) for row in going])
                tokens = sampling.choose(logits, chance).tolist()
                engine.step([(sequences[row], [token]) for row, token in zip(going, tokens, strict=True)])
                # All of them are cached now, even if `between` then fails for one.
                for row, token in zip(going, tokens, strict=True):
                    made[row].append(token)
                if between is not None:
                    for row in going:
                        between(sequences[row])
            going = [row for row, token in zip(going, tokens, strict=True) if token not in ends and len(made[row]) < limit]
    except KVError as error:
        error.made = made
        raise
    return made


def stream(
    engine: Engine,
    sequence: CachedSequence,
    limit: int,
    sampling: Sampling = GREEDY,
    *,
    stops: Collection[int] | None = None,
    between: Between | None = None,
) -> Iterator[int]:
    """The same for one sequence, each token as soon as it is cached."""
    ends = engine.weights.stops if stops is None else frozenset(stops)
    chance = sampling.generator(engine.weights.device)
    for _ in range(limit):
        token = int(sampling.choose(engine.refresh(sequence)[None], chance)[0])
        engine.step([(sequence, [token])])
        if between is not None:
            between(sequence)
        yield token
        if token in ends:
            return

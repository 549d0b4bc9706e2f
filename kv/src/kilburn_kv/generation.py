"""Generation: the model continues sequences of an engine, token by token, in one batch.

Each sequence stops at its limit or at a stop token, which is then cached too. No template is added.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from kilburn.errors import KVError
from kilburn_kv.engine import Engine
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.tensors import Tensor, torch

__all__ = ["generate"]

Between = Callable[[CachedSequence], None]
"""Called with a sequence after each of its tokens: a press, or the reader of mementos."""


@dataclass(frozen=True)
class Sampling:
    """Which token comes next.

    Args:
        temperature: 0 for the most likely token, always; else the logits are divided by it.
        top_k: only so many most likely tokens; 0 for all.
        top_p: only the most likely tokens that together have this probability.
        seed: of the generator that `generator` makes.

    Raises:
        ValueError: a number that cannot be.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.temperature < float("inf") and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ValueError(f"{self} is no way to choose: temperature >= 0, top_k >= 0, 0 < top_p <= 1")

    def generator(self, device: torch.device) -> torch.Generator:
        """A new random generator for the seed."""
        return torch.Generator(device=device).manual_seed(self.seed)

    def choose(self, logits: Tensor, chance: torch.Generator) -> Tensor:
        """The next token of each row: logits of shape [n, vocabulary], tokens of shape [n]."""
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        scaled = logits.float() / self.temperature
        if 0 < self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, float("-inf"))
        if self.top_p < 1:
            ordered, places = scaled.sort(dim=-1, descending=True, stable=True)
            odds = ordered.softmax(dim=-1)
            # A token stays while those before it have not reached the mass yet: the first always does.
            ordered = ordered.masked_fill(odds.cumsum(dim=-1) - odds >= self.top_p, float("-inf"))
            scaled = torch.empty_like(scaled).scatter_(-1, places, ordered)
        return torch.multinomial(scaled.softmax(dim=-1), 1, generator=chance)[:, 0]


GREEDY = Sampling()
"""The most likely token, always."""


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

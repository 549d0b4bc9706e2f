"""What all presses share: everything stays if it fits, the earlier of equal scores wins, never more than the budget
stays.

Bad parameters, an observation without what is needed, and scores that are not numbers are typed errors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from kilburn.errors import BudgetTooSmall, KVError, SpecError
from kilburn_kv.observation import Observation, Selection
from kilburn_kv.tensors import Tensor, torch


class BudgetPress(ABC):
    """A press that keeps all tokens where the budget holds them, and else what `choose` says."""

    @property
    def needs(self) -> frozenset[str]:
        """What it has to see, of "keys", "attention" and "recent"."""
        return frozenset()

    @property
    def recent(self) -> int:
        """How many of the last queries it has to see."""
        return 0

    def keep(self, seen: Observation, budget: int) -> Selection:
        """At most `budget` tokens; all of them, unshifted, where there are no more than that.

        Raises:
            BudgetTooSmall: it is no positive number, or does not hold what this press must keep.
        """
        afford(self.name, budget)
        if budget >= seen.count:
            return Selection(torch.arange(seen.count, device=seen.positions.device))
        return self.choose(seen, budget)

    @property
    def name(self) -> str:
        """What errors call it."""
        return type(self).__name__.lower()

    @abstractmethod
    def choose(self, seen: Observation, budget: int) -> Selection:
        """Which tokens stay, where not all can.

        Raises:
            BudgetTooSmall: the budget does not hold what this press must keep.
        """


class ScoringPress(BudgetPress):
    """A press that keeps, for each head, the last tokens and those before them with the highest scores. It says only the
    scores, and how many of the last tokens stay."""

    @abstractmethod
    def score(self, seen: Observation) -> Tensor:
        """The scores, shape [layers, heads, n], of the `n` tokens that may leave, which are all that is seen here."""

    @abstractmethod
    def last(self, budget: int) -> int:
        """How many of the last tokens stay whatever their score is."""

    def choose(self, seen: Observation, budget: int) -> Selection:
        """For each head its best tokens before the last ones, and these.

        Raises:
            BudgetTooSmall: it does not hold the last ones.
        """
        last = self.last(budget)
        room, start = afford(self.name, budget, in_the_window=last), seen.count - last
        best = top_indices(self.score(seen.before(start)), room)
        window = torch.arange(start, seen.count, device=best.device)
        return Selection(torch.cat((best, window.expand(*best.shape[:-1], last)), dim=-1))


def afford(press: str, budget: int, **must: int) -> int:
    """Tokens of a budget that are left after what must stay.

    Args:
        press: its name, for the error.
        budget: in tokens.
        must: tokens that must stay, each number under its name for the error.

    Raises:
        BudgetTooSmall: it is not a positive number, or smaller than the sum of `must`.
    """
    total = sum(must.values())
    if budget < max(1, total):
        parts = ", ".join(f"{count} {word.replace('_', ' ')}" for word, count in must.items() if count)
        raise BudgetTooSmall(
            f"{press} cannot keep {budget} tokens: it must keep {max(1, total)}" + (f" ({parts})" if parts else ""),
            advice="raise the budget, or lower what must stay",
        )
    return budget - total


def require(seen: Observation, name: str, press: str) -> Tensor:
    """What the press needs of an observation: "keys", "attention", "recent" or "queries".

    Raises:
        KVError: it was not observed.
    """
    found: Tensor | None = getattr(seen, name)
    if found is None:
        raise KVError(f"{press} needs {name}, and the observation has none", advice="observe what its `needs` and `recent` say")
    return found


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest along the last dimension, ascending; of equal scores the earlier ones.

    torch.topk may take any of equal scores, and a stable sort takes three times as long. So topk only finds the
    lowest score that stays.

    Raises:
        KVError: a score is not a number.
    """
    shape = scores.shape[:-1]
    if not count:
        return torch.empty((*shape, 0), dtype=torch.int64, device=scores.device)
    least = check_scores(scores).topk(count, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, equal = scores > least, scores == least
    room = count - above.sum(dim=-1, keepdim=True)
    kept = above | (equal & (equal.cumsum(dim=-1) <= room))
    return kept.nonzero()[:, -1].view(*shape, count)


def check_scores(scores: Tensor) -> Tensor:
    """The scores, checked: all of them are numbers.

    Raises:
        KVError: one is not.
    """
    if bool(torch.isnan(scores).any()):
        raise KVError("a score is not a number", advice="the model's attention or keys overflowed: run it in float32 or bfloat16")
    return scores


def pool_neighbours(scores: Tensor, kernel: int, pool: str) -> Tensor:
    """Each score pooled with its neighbours along the last dimension: their mean ("avg") or maximum ("max").

    `kernel` is odd. Beyond both ends the mean counts zeros, as the code released with SnapKV does.
    """
    if kernel == 1 or not scores.shape[-1]:
        return scores
    flat = scores.reshape(-1, 1, scores.shape[-1])
    pooling = torch.nn.functional.avg_pool1d if pool == "avg" else torch.nn.functional.max_pool1d
    return pooling(flat, kernel, stride=1, padding=kernel // 2).view(scores.shape)


def check_integer(press: str, name: str, value: object, least: int, *, odd: bool = False) -> None:
    """Refuse a parameter that is no whole number of at least `least`.

    Raises:
        SpecError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (odd and value % 2 == 0):
        raise SpecError(f"{press}({name}={value!r})", advice=f"give {'an odd' if odd else 'a whole'} number, {least} or more")


def check_number(press: str, name: str, value: object, least: float, most: float) -> None:
    """Refuse a parameter that is no number within bounds, both included.

    Raises:
        SpecError: it is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SpecError(f"{press}({name}={value!r})", advice=f"give a number from {least:g} to {most:g}")


def check_word(press: str, name: str, value: object, words: tuple[str, ...]) -> None:
    """Refuse a parameter that is none of these words.

    Raises:
        SpecError: it is not.
    """
    if value not in words:
        raise SpecError(f"{press}({name}={value!r})", advice=f"give one of {', '.join(words)}")


def check_flag(press: str, name: str, value: object) -> None:
    """Refuse a parameter that is neither True nor False.

    Raises:
        SpecError: it is not.
    """
    if not isinstance(value, bool):
        raise SpecError(f"{press}({name}={value!r})", advice="give True or False")

"""Our own press: keeps the spans and pages that get more attention from the last queries than usual.

It also uses what the store knows of pages. All heads keep the same tokens, because a slot of the cache holds a
token in all layers and heads: its room is free only when all heads let it go. Pins, tokens of no page, the sinks and
the window always stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kilburn.errors import InvalidRange
from kilburn_kv.observation import CachedPage, Observation, Selection
from kilburn_kv.presses.choice import (
    BudgetPress,
    afford,
    check_integer,
    check_number,
    check_scores,
    check_word,
    pool_neighbours,
    require,
)
from kilburn_kv.tensors import Tensor, torch

Ranged = tuple[CachedPage, int, int]
"""A page that may leave, and the part of it that may."""


class _Span(NamedTuple):
    """Neighbouring tokens of one page. Spans are ordered by which is kept first: the lowest one."""

    worth: float
    votes: float
    likely: float
    page: int
    score: float
    plain: float
    start: int
    stop: int


@dataclass(frozen=True)
class Pages(BudgetPress):
    """Keep the spans of the pages that the last queries look at, whole pages where those are best.

    The worth of a span is a factor from the store times (`1 - weight` of its own score plus `weight` of its
    page's). The best spans stay. If the last one fits only in part, its best stretch stays.

    Args:
        window: how many of the last queries vote, and how many of the last tokens stay.
        sinks: how many of the first tokens stay.
        span: tokens that stay or go together; 1 for single tokens.
        weight: of the page's score against the span's: 0 sees no pages, 1 fills up page by page.
        kernel: over how many neighbours attention is pooled before, odd; 1 for not at all.
        pool: how: "avg" or "max".
        heads: how layers and heads make one score of theirs: "mean", "max", or "rms", which lies between.
        page: how tokens make the score of their span, and spans that of their page: "max" or "mean".
        contrast: how much of the average attention from all queries is subtracted from the attention of the last
            ones, for each head, so that tokens that every query attends to do not count. The result is 0 for most
            pages; among these, plain attention decides.
        stale: factor for pages that a later one superseded; with 0 they leave first.
        folded: factor for pages of which a memento or an excerpt is cached too.
        halflife: turns of expected distance until the next use that halve the worth of a page.
        unasked: share of the room left by what must stay that is used for tokens that the last queries did not attend
            to: those with short keys (see `kilburn_kv.presses.keynorm`), each with its neighbours.
        around: how many neighbours on each side of such a token.
        unit: length of the stretches that take the place of pages if the observation has no pages.
    """

    window: int = 32
    sinks: int = 4
    span: int = 16
    weight: float = 0.5
    kernel: int = 5
    pool: str = "avg"
    heads: str = "max"
    page: str = "max"
    contrast: float = 0.75
    stale: float = 0.25
    folded: float = 0.0
    halflife: float = 8.0
    unasked: float = 0.3
    around: int = 12
    unit: int = 64

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("sinks", 0), ("span", 1), ("around", 0), ("unit", 1)):
            check_integer("pages", name, getattr(self, name), least)
        check_integer("pages", "kernel", self.kernel, 1, odd=True)
        for name in ("weight", "contrast", "stale", "folded", "unasked"):
            check_number("pages", name, getattr(self, name), 0.0, 1.0)
        check_number("pages", "halflife", self.halflife, 1e-3, float("inf"))
        check_word("pages", "pool", self.pool, ("avg", "max"))
        check_word("pages", "heads", self.heads, ("mean", "rms", "max"))
        check_word("pages", "page", self.page, ("mean", "max"))

    @property
    def needs(self) -> frozenset[str]:
        """Attention of the last queries; for `contrast` also accumulated attention, for `unasked` the keys."""
        wanted = {"recent": True, "attention": self.contrast > 0, "keys": self.unasked > 0}
        return frozenset(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def recent(self) -> int:
        """As many queries as the window has tokens."""
        return self.window

    def choose(self, seen: Observation, budget: int) -> Selection:
        """What must stay and the best of the rest, for all heads; exactly `budget` tokens if there are more.

        Raises:
            BudgetTooSmall: it does not hold the pins, the tokens of no page, the sinks and the window.
            InvalidRange: pages overlap, or reach beyond the cached tokens.
        """
        count, device = seen.count, seen.positions.device
        pages = seen.pages or self._units(count)
        free = list(self._free(pages, count))
        open_tokens = sum(stop - start for _, start, stop in free)
        window = min(self.window, count)
        sinks = min(self.sinks, count - window)
        room = afford(
            self.name, budget, sinks=sinks, in_the_window=window, pinned_or_of_no_page=count - open_tokens - sinks - window
        )
        kept = [True] * count
        for _, start, stop in free:
            kept[start:stop] = [False] * (stop - start)
        later = int(self.unasked * room)
        self._keep_asked(kept, free, self._scores(seen, free), room - later)
        if later:
            self._keep_unasked(kept, free, self._shortness(seen, free), later)
        return Selection(torch.tensor([index for index, stays in enumerate(kept) if stays], dtype=torch.int64, device=device))

    def _keep_asked(self, kept: list[bool], free: list[Ranged], scores: tuple[list[float], list[float]], room: int) -> None:
        """Mark the best spans as kept, and the part of the last one that fits."""
        for span in sorted(self._spans(free, *scores)):
            if not room:
                return
            start, stop = span.start, span.stop
            if stop - start > room:
                start = _best(*scores, start, stop, room)
                stop = start + room
            kept[start:stop] = [True] * (stop - start)
            room -= stop - start

    def _keep_unasked(self, kept: list[bool], free: list[Ranged], shortness: list[float], room: int) -> None:
        """Mark tokens with short keys as kept, and those around them on their page, the nearest first, while there is room."""
        ranked: list[tuple[float, float, int, int, int]] = []
        for page, start, stop in free:
            likely = self._likely(page)
            ranked += [(-likely * shortness[index], -likely, index, start, stop) for index in range(start, stop)]
        for _, _, index, start, stop in sorted(ranked):
            if kept[index]:
                continue
            near = range(max(start, index - self.around), min(stop, index + self.around + 1))
            fresh = sorted((other for other in near if not kept[other]), key=lambda other: abs(other - index))[:room]
            for other in fresh:
                kept[other] = True
            room -= len(fresh)
            if not room:
                return

    def _units(self, count: int) -> tuple[CachedPage, ...]:
        """Stretches that take the place of pages if the pages are not known."""
        return tuple(
            CachedPage(number, start, min(count, start + self.unit)) for number, start in enumerate(range(0, count, self.unit), 1)
        )

    def _free(self, pages: tuple[CachedPage, ...], count: int) -> Iterator[Ranged]:
        """The pages that may go, each with the range of it that is neither sink nor window."""
        behind = 0
        for page in pages:
            if not behind <= page.start <= page.stop <= count:
                raise InvalidRange(
                    f"page {page.page} at {page.start} to {page.stop} of {count} cached tokens, behind {behind}",
                    advice="give pages in order, as indices of cached tokens",
                )
            behind = page.stop
            start, stop = max(page.start, self.sinks), min(page.stop, count - self.window)
            if page.page and not page.pinned and start < stop:
                yield page, start, stop

    def _scores(self, seen: Observation, free: list[Ranged]) -> tuple[list[float], list[float]]:
        """The score of each token, with contrast and without; 0 for those that stay anyway."""
        votes = require(seen, "recent", self.name)[:, :, -self.window :].mean(dim=2)
        # Sinks draw so much that their neighbours would look asked for once scores are pooled.
        stays = torch.ones(seen.count, dtype=torch.bool)
        for _, start, stop in free:
            stays[start:stop] = False
        stays = stays.to(votes.device)
        plain = self._merged(votes.masked_fill(stays, 0.0))
        if not self.contrast:
            return plain, plain
        usual = require(seen, "attention", self.name) / require(seen, "queries", self.name).clamp(min=1)
        return self._merged((votes - self.contrast * usual).clamp_(min=0).masked_fill_(stays, 0.0)), plain

    def _shortness(self, seen: Observation, free: list[Ranged]) -> list[float]:
        """How short each token's keys are, by standard deviations of each head, over all heads; from 0 to 1."""
        norms = torch.linalg.vector_norm(require(seen, "keys", self.name).to(torch.float32), dim=-1)
        open_tokens = torch.cat([torch.arange(start, stop) for _, start, stop in free]).to(norms.device)
        own = norms[..., open_tokens]
        deviation = own.std(dim=-1, keepdim=True, correction=0).clamp(min=1e-12)
        short = check_scores((own.mean(dim=-1, keepdim=True) - own) / deviation).mean(dim=(0, 1))
        short = (short - short.min()) / (short.max() - short.min()).clamp(min=1e-12)
        found = torch.zeros(seen.count, device=norms.device)
        found[open_tokens] = short
        values: list[float] = found.tolist()
        return values

    def _merged(self, votes: Tensor) -> list[float]:
        """One score for each token, over all layers and heads."""
        votes = pool_neighbours(votes, self.kernel, self.pool).flatten(0, 1)
        if self.heads == "max":
            found = votes.amax(dim=0)
        elif self.heads == "mean":
            found = votes.mean(dim=0)
        else:
            found = votes.square().mean(dim=0).sqrt()
        scores: list[float] = check_scores(found).tolist()
        return scores

    def _spans(self, free: list[Ranged], scores: list[float], plain: list[float]) -> Iterator[_Span]:
        """The spans of all pages that may go, not yet in order."""
        for order, (page, start, stop) in enumerate(free):
            likely = self._likely(page)
            whole, usual = self._pooled(scores[start:stop]), self._pooled(plain[start:stop])
            for at in range(start, stop, self.span):
                end = min(stop, at + self.span)
                score, votes = self._pooled(scores[at:end]), self._pooled(plain[at:end])
                worth = likely * self._weighed(score, whole)
                yield _Span(-worth, -likely * self._weighed(votes, usual), -likely, order, -score, -votes, at, end)

    def _pooled(self, scores: list[float]) -> float:
        return max(scores) if self.page == "max" else sum(scores) / len(scores)

    def _weighed(self, own: float, page: float) -> float:
        return (1 - self.weight) * own + self.weight * page

    def _likely(self, page: CachedPage) -> float:
        """The store's factor for a page: 1 if it knows nothing against it."""
        likely = 1.0
        if page.folded:
            likely *= self.folded
        if page.stale:
            likely *= self.stale
        if page.distance is not None:
            likely *= 0.5 ** (max(0.0, page.distance) / self.halflife)
        return likely


def _best(scores: list[float], plain: list[float], start: int, stop: int, length: int) -> int:
    """The beginning of the stretch of this length with the highest sum; of equal ones by the plain scores, then the
    earlier."""
    return max(
        range(start, stop - length + 1),
        key=lambda at: (sum(scores[at : at + length]), sum(plain[at : at + length]), -at),
    )

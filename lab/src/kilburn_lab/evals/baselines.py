"""The usual strategies, as baselines: the tail, truncated outputs, the last outputs, a tail with BM25; and the full history.

Each gets a run's events, and returns what it would show before the next action, in a window of so many tokens of four
characters. Policies are compared with them. The full history has no window: it is what every bill is compared with.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from kilburn_lab.evals.intervals import grouped, interval, mean
from kilburn_lab.evals.prefix import Block, text_of

CHARACTERS = 4
"""Characters in a token, for every column of the table."""

LONGEST_OUTPUT = 2000
OUTPUTS = 3

HISTORY = "history"
"""The full history: no baseline of a window, but the ceiling of what can be shown, and the price to beat."""

_WORD = re.compile(r"[a-z0-9_]+")


@runtime_checkable
class Contender(Protocol):
    """Gets the events of one run in order, and says what is in the window before the next action."""

    def thought(self, text: str) -> None:
        """The agent thinks."""
        ...

    def action(self, text: str) -> None:
        """The agent acts."""
        ...

    def reply(self, thought: str, action: str) -> None:
        """The agent thinks and acts in one message."""
        ...

    def observation(self, text: str) -> None:
        """The world answers."""
        ...

    def user(self, text: str) -> None:
        """The user says something."""
        ...

    def prompt(self) -> list[Block]:
        """The window."""
        ...

    def prompt_text(self) -> str:
        """The window's text."""
        ...


def tell(contender: Contender, role: str, text: str) -> None:
    """Tell a contender a message of a chat."""
    ways = {"assistant": contender.thought, "tool": contender.observation}
    ways.get(role, contender.user)(text)


UNBOUNDED = 1 << 40
"""Tokens of a session's window in which everything stays: beside a baseline, whose prompts are looked at in its place."""


class Tail:
    """The last characters of everything."""

    def __init__(self, window: int) -> None:
        self.room = window * CHARACTERS
        self.events: list[Block] = []
        self.outputs: list[int] = []
        self.latest = ""
        """What was thought or said last: what passages are ranked by."""

    def thought(self, text: str) -> None:
        """The agent thinks."""
        self.latest = text
        self.events.append(Block("assistant", "", text))

    def action(self, text: str) -> None:
        """The agent acts."""
        self.events.append(Block("assistant", "", text))

    def reply(self, thought: str, action: str) -> None:
        """The agent thinks and acts in one message."""
        self.thought(f"{thought}\n{action}")

    def user(self, text: str) -> None:
        """The user says something."""
        self.latest = text
        self.events.append(Block("user", "", text))

    def observation(self, text: str) -> None:
        """The world answers."""
        self.outputs.append(len(self.events))
        self.events.append(Block("user", "", text))

    def prompt(self) -> list[Block]:
        """The last characters of the events."""
        return self.newest(self.room)

    def prompt_text(self) -> str:
        """Their text."""
        return text_of(self.prompt())

    def newest(self, room: int, *, whole: bool = False) -> list[Block]:
        """The last so many characters, a line break between events counted.

        Args:
            whole: leave out the first of several events if it would be cut.
        """
        blocks: list[Block] = []
        for event in reversed(self.events):
            if room <= 0 or (whole and blocks and len(event.text) > room):
                # Without a character left, only the line break behind this event is shown.
                blocks += [event._replace(text="")] if room == 0 else []
                break
            blocks.append(event if len(event.text) <= room else event._replace(text=event.text[-room:]))
            room -= len(event.text) + 1
        return blocks[::-1]


class History(Tail):
    """Everything, however long it is."""

    def prompt(self) -> list[Block]:
        """All events."""
        return list(self.events)


class Truncated(Tail):
    """The tail of the events, where a long output is its first and last 1,000 characters."""

    def observation(self, text: str) -> None:
        """An output comes; the middle of a long output is lost."""
        half = LONGEST_OUTPUT // 2
        super().observation(text if len(text) <= LONGEST_OUTPUT else f"{text[:half]}\n...\n{text[-half:]}")


class LastOutputs(Tail):
    """The tail of the events without the outputs before the last three."""

    def observation(self, text: str) -> None:
        """An output comes; old outputs are lost."""
        super().observation(text)
        if len(self.outputs) > OUTPUTS:
            at = self.outputs[-OUTPUTS - 1]
            self.events[at] = self.events[at]._replace(text="")


class Paged(Tail):
    """One half the newest messages, the other half whole messages of all older ones, ranked by BM25 for the latest words."""

    chunk: int | None = None
    """Characters of a passage; None for whole messages. The tail beside passages is cut to fill its half."""

    outputs_only = False
    """Whether passages come from outputs alone. The last of these is cut to fill the room; others have to fit."""

    def prompt(self) -> list[Block]:
        """Passages in their own order, then the tail; everything, while it fits. Nothing is shown twice."""
        if len(text_of(self.events)) <= self.room:
            return list(self.events)
        tail = self.newest(self.room // 2, whole=self.chunk is None)
        first = len(self.events) - len(tail)
        older = [event.text for event in self.events[:first]] + [self.events[first].text.removesuffix(tail[0].text)]
        sources = [n for n in self.outputs if n <= first] if self.outputs_only else range(len(older))
        places = [(n, at) for n in sources for at in range(0, len(older[n]), self.chunk or len(older[n]) or 1)]
        passages = [older[n][at : at + (self.chunk or len(older[n]))] for n, at in places]
        scores = bm25(self.latest, passages)
        room = self.room - len(text_of(tail)) - 1
        chosen: dict[tuple[int, int], str] = {}
        for index in sorted(range(len(passages)), key=lambda index: (-scores[index], -index)):
            text = passages[index][: max(0, room - 1)] if self.outputs_only else passages[index]
            if text and len(text) < room:
                chosen[places[index]] = text
                room -= len(text) + 1
        return [*(self.events[n]._replace(text=text) for n, text in _joined(chosen)), *tail]


class Chunked(Paged):
    """The same with passages of 300 characters of all older messages."""

    chunk = 300


class PagedOutputs(Paged):
    """The same with passages of 800 characters of older outputs: what an agent copies from is an output."""

    chunk, outputs_only = 800, True


def _joined(passages: Mapping[tuple[int, int], str]) -> list[tuple[int, str]]:
    """Passages by event and place, in order; those that adjoin are one."""
    joined: list[tuple[int, str]] = []
    end = (-1, -1)
    for (n, at), text in sorted(passages.items()):
        joined.append((n, joined.pop()[1] + text) if (n, at) == end else (n, text))
        end = (n, at + len(text))
    return joined


@lru_cache(maxsize=1 << 16)
def _counts(text: str) -> Counter[str]:
    """How often each word stands in a text."""
    return Counter(_WORD.findall(text.lower()))


def bm25(query: str, texts: Sequence[str], *, k: float = 1.2, b: float = 0.75) -> list[float]:
    """The score of each text for the query's words (Robertson and Zaragoza, 2009; the usual k and b)."""
    counts = [_counts(text) for text in texts]
    lengths = [count.total() for count in counts]
    middle = sum(lengths) / max(1, len(lengths)) or 1.0
    scores = [0.0] * len(texts)
    for word in set(_WORD.findall(query.lower())):
        holding = [index for index, count in enumerate(counts) if word in count]
        rarity = math.log(1 + (len(texts) - len(holding) + 0.5) / (len(holding) + 0.5))
        for index in holding:
            times = counts[index][word]
            scores[index] += rarity * times * (k + 1) / (times + k * (1 - b + b * lengths[index] / middle))
    return scores


BASELINES: dict[str, Callable[[int], Contender]] = {
    "tail": Tail,
    "truncated": Truncated,
    "last3": LastOutputs,
    "tail+turns": Paged,
    "tail+chunks": Chunked,
    "tail+outputs": PagedOutputs,
}
"""By name, those that keep to a window."""

PLAIN: dict[str, Callable[[int], Contender]] = {**BASELINES, HISTORY: History}
"""By name, everything that is no policy of Kilburn."""


def best_of(worth: Mapping[str, float]) -> str:
    """Of the labels that were measured, the baseline that is worth most; of equals the first in `BASELINES`."""
    return max((label for label in BASELINES if label in worth), key=worth.__getitem__)


def compared(
    worth: Mapping[str, Sequence[float]], label: str, keys: Sequence[Hashable], seed: int, best: str = ""
) -> dict[str, Any]:
    """The fields of a row that say how sure its mean is, and how it compares with the best baseline on the same cases.

    Args:
        worth: of each label, what each case was worth. keys: of the cases; those of one key are drawn together.
        best: what to compare with; "" for the best baseline.
    """
    best = best or best_of({each: mean(values) for each, values in worth.items()})
    gains = [one - other for one, other in zip(worth[label], worth[best], strict=True)]
    low, high = interval(grouped(zip(keys, worth[label], strict=True)), seed)
    gain_low, gain_high = interval(grouped(zip(keys, gains, strict=True)), seed)
    return {"low": low, "high": high, "best": best, "gain": mean(gains), "gain_low": gain_low, "gain_high": gain_high}

"""The usual strategies, as baselines: the tail, truncated outputs, the last outputs, a tail with BM25.

Each gets a run's events, and says what it would show before the next action, in a window of so many tokens of four
characters. Policies are compared with them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from kilburn_lab.evals.intervals import grouped, interval, mean
from kilburn_lab.evals.prefix import Block, text_of

CHARACTERS = 4
"""Characters in a token, for every column of the table."""

LONGEST_OUTPUT = 2000
OUTPUTS = 3
CHUNK = 800

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


class Tail:
    """The last characters of everything."""

    def __init__(self, window: int) -> None:
        self.room = window * CHARACTERS
        self.events: list[Block] = []
        self.outputs: list[int] = []
        self.latest = ""
        """What was thought or said last: what passages are ranked by."""
        self.everything = False
        """Whether passages come from all messages, as in a chat, and not from outputs alone."""

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

    def passages(self) -> Sequence[int]:
        """The events that passages may come from."""
        return range(len(self.events)) if self.everything else self.outputs

    def newest(self, room: int) -> list[Block]:
        """The last so many characters, a line break between events counted."""
        kept: list[Block] = []
        for event in reversed(self.events):
            if room <= 0:
                # Without a character left, only the line break behind this event is shown.
                kept += [event._replace(text="")] if room == 0 else []
                break
            kept.append(event if len(event.text) <= room else event._replace(text=event.text[-room:]))
            room -= len(event.text) + 1
        return kept[::-1]


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
    """One half the tail, the other half whole chunks of 800 characters of the outputs, ranked by the last thought."""

    def prompt(self) -> list[Block]:
        """Chunks in their own order, then the tail; everything, while it fits. A chunk may also be in the tail."""
        if len(text_of(self.events)) <= self.room:
            return list(self.events)
        half = self.room // 2
        outputs = [self.events[at].text for at in self.passages()]
        chunks = [output[at : at + CHUNK] for output in outputs for at in range(0, len(output), CHUNK)]
        scores = bm25(self.latest, chunks)
        room = self.room - half
        chosen: list[int] = []
        for index in sorted(range(len(chunks)), key=lambda at: (-scores[at], -at)):
            if len(chunks[index]) < room:
                chosen.append(index)
                room -= len(chunks[index]) + 1
        return [*(Block("user", "", chunks[index]) for index in sorted(chosen)), *self.newest(half)]


class PagedOlder(Tail):
    """As `Paged`, but only chunks that begin before the tail, and the last one cut so that the room is used.

    The stronger form of the same idea: nothing is shown twice.
    """

    def prompt(self) -> list[Block]:
        """Chunks in their own order, then the tail; everything, while it fits."""
        length = len(text_of(self.events))
        if length <= self.room:
            return list(self.events)
        half = self.room // 2
        starts = [0]
        for event in self.events:
            starts.append(starts[-1] + len(event.text) + 1)
        outputs = [(starts[at], self.events[at].text) for at in self.passages() if starts[at] < length - half]
        places = [(output, at) for start, output in outputs for at in range(0, len(output), CHUNK) if start + at < length - half]
        chunks = [output[at : at + CHUNK] for output, at in places]
        scores = bm25(self.latest, chunks)
        room = self.room - half
        chosen: list[tuple[int, str]] = []
        for index in sorted(range(len(chunks)), key=lambda at: (-scores[at], -at)):
            if room < 2:
                break
            chosen.append((index, chunks[index][: room - 1]))
            room -= len(chosen[-1][1]) + 1
        return [*(Block("user", "", chunk) for _, chunk in sorted(chosen)), *self.newest(half)]


def bm25(query: str, texts: Sequence[str], *, k: float = 1.2, b: float = 0.75) -> list[float]:
    """The score of each text for the query's words (Robertson and Zaragoza, 2009; the usual k and b)."""
    counts = [Counter(_WORD.findall(text.lower())) for text in texts]
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
    "tail+bm25": Paged,
    "tail+bm25-older": PagedOlder,
}
"""By name: the four that are measured everywhere, and a stronger form of the last."""


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

"""What a level may hold, and how tokens are counted.

A budget is the constraint that the caller really has, in tokens; nothing here is a ratio. Counting
is a one-method seam: `kilburn.tokens` holds the counters.
"""

from __future__ import annotations

import copy
from typing import Protocol, runtime_checkable

import msgspec

from kilburn.arguments import plain_number
from kilburn.errors import InvalidBudget

__all__ = ["Counter"]


@runtime_checkable
class Counter(Protocol):
    """Counts the tokens of a text for one family of models.

    `name` is what `kilburn.open(tokenizer=...)` takes; `envelope` is what one message costs beside
    its text (role, delimiters), in tokens.
    """

    name: str
    envelope: int

    def count(self, text: str) -> int:
        """Tokens of `text` alone, never negative, 0 for the empty text."""
        ...


class Budget(msgspec.Struct, frozen=True):
    """Tokens that a prompt may hold.

    Args:
        window: tokens that prompt and reply may hold together.
        reserve: of these, what is kept free for the reply.
        overhead: of these, what every prompt carries beside its pages (tool schemas).

    Raises:
        InvalidBudget: a negative number, or nothing left for the prompt.
    """

    window: int
    reserve: int = 0
    overhead: int = 0

    def __post_init__(self) -> None:
        for name in ("window", "reserve", "overhead"):
            value = plain_number(getattr(self, name))
            msgspec.structs.force_setattr(self, name, value)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidBudget(f"{name}={value!r} is not a number of tokens", advice="give a whole number, 0 or more")
        if self.capacity < 1:
            raise InvalidBudget(
                f"a window of {self.window} leaves nothing after reserve {self.reserve} and overhead {self.overhead}",
                advice="open a larger window, or a smaller reserve",
            )

    @property
    def capacity(self) -> int:
        """Tokens that the pages of a prompt may take."""
        return self.window - self.reserve - self.overhead


def text_cost(counter: Counter, text: str) -> int:
    """What a text costs as a message of its own, in tokens."""
    return counter.count(text) + counter.envelope


def repriced(counter: Counter, **prices: int | str) -> Counter:
    """Return a copy of a counter that prices attachments otherwise, and counts text alike.

    Args:
        prices: `family`, whose rules hold for images, documents and sound; or `file_tokens`, the tokens of a file that a prompt
            names by an id or a URL.
    """
    copied = copy.copy(counter)
    vars(copied).update(prices)
    return copied


def counts_alike(first: Counter, second: Counter) -> bool:
    """Whether two counters give every text the same count, whatever their names are."""
    return type(first) is type(second) and {**vars(first), "name": ""} == {**vars(second), "name": ""}

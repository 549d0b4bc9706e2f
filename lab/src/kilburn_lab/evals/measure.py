"""What all measurements take: names that they know, and who watches them; and the words that they make up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

from kilburn.errors import SpecError

SYLLABLES = ("bo", "cu", "da", "fe", "gi", "jo", "ka", "le", "mi", "no", "pu", "ro", "se", "tu", "va", "zi")

Progress = Callable[[int, int], None]
"""Gets what is done of a measurement, and all of it."""


def unwatched(done: int, total: int) -> None:
    """The progress that nobody watches."""


def check_known(kind: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Check that all names are known.

    Raises:
        SpecError: one is not; the advice lists those that are.
    """
    names = list(known)
    if unknown := next((name for name in given if name not in names), ""):
        raise SpecError(f"no {kind} {unknown!r}", advice=f"known: {', '.join(names)}")


def coined(chance: random.Random, syllables: Sequence[str], count: int, used: set[str] | None = None) -> str:
    """A made-up word of so many syllables that is not `used` yet; it is then."""
    while (word := "".join(chance.choices(syllables, k=count))) in (used or ()):
        pass
    if used is not None:
        used.add(word)
    return word

"""Made-up facts by number, and questions about some of them, for measurements at scale.

Fact n is worked out from n, so that a million of them need no memory. Each person has twenty things, and other persons
have things of the same names. The words of a question are the fact's own: what is measured is time and space, and whether
an answer that is surely there is found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

OF_ONE = 20
"""Facts about one person."""

_SYLLABLES = (
    "ba be bi bo bu da de di do du fa fe fi fo fu ga ge gi go gu ka ke ki ko ku la le li lo lu ma me mi mo mu na ne ni no nu "
    "pa pe pi po pu ra re ri ro ru sa se si so su ta te ti to tu va ve"
)
_LOOKS = "red blue green yellow brown white black grey old new round square tall heavy light small"
_THINGS = (
    "kettle ladder lantern bucket hammer compass blanket teapot basket mirror saddle anchor barrel candle carpet clock drum "
    "fiddle globe harp kite lamp loom oar pillow plough quilt rope scale spade stool telescope"
)
_PLACES = "attic barn cellar chapel garage garden kitchen library loft mill office pantry porch shed stable workshop"

SYLLABLES, LOOKS, THINGS, PLACES = (names.split() for names in (_SYLLABLES, _LOOKS, _THINGS, _PLACES))


def _parts(number: int, seed: int) -> tuple[str, str, str, str, int]:
    """The person, look, thing, place and year of a fact."""
    person, own = divmod(number, OF_ONE)
    size = len(SYLLABLES)
    # A walk through all names of four syllables, in an order that the seed changes.
    name = (person * 7_368_787 + seed * 1_299_709 + 104_729) % size**4
    spelled = "".join(SYLLABLES[name // size**at % size] for at in range(4)).capitalize()
    pair = (person * 37 + own * 7) % (len(LOOKS) * len(THINGS))
    place = (person * 11 + own * 5) % len(PLACES)
    return spelled, LOOKS[pair % len(LOOKS)], THINGS[pair // len(LOOKS)], PLACES[place], 1950 + (person + own * 3) % 75


def fact(number: int, seed: int = 0) -> str:
    """One fact, as a sentence."""
    person, look, thing, place, year = _parts(number, seed)
    return f"{person} keeps the {look} {thing} in the {place} since {year}."


def facts(count: int, seed: int = 0) -> Iterator[str]:
    """The first so many facts."""
    return (fact(number, seed) for number in range(count))


def questions(count: int, many: int, seed: int = 0) -> list[tuple[str, str]]:
    """Questions about some of the first `count` facts, each with the fact that answers it."""
    chance = random.Random(f"questions/{seed}/{count}")
    chosen = [chance.randrange(count) for _ in range(many)]
    asked = []
    for number in chosen:
        person, look, thing, _, _ = _parts(number, seed)
        asked.append((f"Where does {person} keep the {look} {thing}?", fact(number, seed)))
    return asked

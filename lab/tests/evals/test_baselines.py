"""What the baselines show: whole messages, passages of all messages, or of outputs alone; nothing twice."""

from __future__ import annotations

import random

import pytest

from kilburn_lab.evals.baselines import BASELINES, CHARACTERS, PLAIN, Contender
from kilburn_lab.evals.prefix import text_of

WINDOW = 300
OLD, ASKED = "The key of the attic is under the blue pot.", "Where is the key of the attic?"


def told(name: str, *, output: bool = False) -> Contender:
    """A chat, or work with a tool, in which something is said at the beginning that is asked for at the end."""
    contender, chance = PLAIN[name](WINDOW), random.Random(0)
    (contender.observation if output else contender.user)(OLD)
    for _ in range(60):
        words = " ".join(chance.choices(["roof", "door", "lamp", "fence", "stove", "gate", "boat", "tree", "wall", "road"], k=12))
        contender.thought(words)
        contender.user(words[::-1])
    contender.user(ASKED)
    return contender


PLACES = {"tail": (0, 0), "tail+turns": (1, 1), "tail+chunks": (1, 1), "tail+outputs": (0, 1)}
"""How often each shows what a user said long ago, and what a tool returned long ago."""


@pytest.mark.parametrize("name", PLACES)
def test_where_a_baseline_looks_for_what_is_asked(name: str) -> None:
    for output, count in zip((False, True), PLACES[name], strict=True):
        shown = told(name, output=output).prompt_text()
        assert (shown.count(OLD), shown.count(ASKED)) == (count, 1)
        assert len(shown) <= WINDOW * CHARACTERS


@pytest.mark.parametrize("name", [name for name in BASELINES if "+" in name])
def test_half_of_the_window_is_the_newest_text_and_nothing_stands_there_twice(name: str) -> None:
    contender, lines = PLAIN[name](WINDOW), [f"line {number}: {number * 7919}" for number in range(400)]
    for line in lines:
        contender.observation(line)
    shown = contender.prompt_text().split("\n")
    newest = [line for line in lines[-20:] if line in shown]
    assert newest == lines[-20:]
    assert all(shown.count(line) <= 1 for line in lines)


def test_passages_that_adjoin_are_one_so_that_a_long_message_can_be_whole() -> None:
    contender = PLAIN["tail+chunks"](WINDOW)
    long = " ".join(f"attic{number}" for number in range(60))
    assert len(long) > 300
    contender.user(long)
    for number in range(80):
        contender.user(f"Something else, number {number}.")
    contender.user(long[:60] + long[-60:])
    assert long in contender.prompt_text()


def test_the_full_history_has_no_window() -> None:
    contender = told("history")
    assert text_of(contender.prompt()).startswith(OLD)
    assert len(contender.prompt_text()) > WINDOW * CHARACTERS

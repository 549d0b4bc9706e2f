"""What is brought beside a prompt is not what the prompt shows: a policy's copies and excerpts come first."""

from __future__ import annotations

import pytest

import kilburn
from kilburn.kernel.session import Session
from kilburn.memory.brought import Brought, behind, bring
from kilburn.move import Bring
from kilburn.page import address_of

RIVERS = ("Arno", "Besos", "Clyde", "Douro", "Ebro", "Forth", "Garonne", "Hudson", "Indus", "Jordan", "Kama", "Loire", "Meuse")
WINDOW = 2000


def price(number: int) -> str:
    river = RIVERS[number % len(RIVERS)]
    return f"Turn {number}: the ferry on the {river} costs {number + 11} pence. " + "It carries sand and gold. " * 12


def talk(session: Session, turns: int) -> list[Brought | None]:
    """A conversation in which each third message asks for something old; what would stand beside each of these questions."""
    found = []
    for number in range(turns):
        asked = f"How much is the ferry on the {RIVERS[number * 7 % len(RIVERS)]}?"
        session.append({"role": "user", "content": price(number) if number % 3 else asked})
        if number % 3 == 0:
            found.append(bring(session, WINDOW // 4))
            text = "" if found[-1] is None else found[-1].text
            shown = "\n".join(message["content"] for message in session.render())
            twice = [line for line in price_lines(text) if line in shown]
            assert not twice
        session.append({"role": "assistant", "content": f"Noted {number}."})
    return found


def after_the_task(session: Session, text: str) -> int:
    """Something that the user says which is not the first thing, since that stays; its page."""
    for said in ("I am planning a trip.", text):
        session.append({"role": "user", "content": said}, {"role": "assistant", "content": "Noted."})
    return session.window.last - 1


def fill(session: Session) -> None:
    """So much that what came before has left."""
    for number in range(50):
        session.append({"role": "user", "content": price(number)}, {"role": "assistant", "content": "Noted."})


def price_lines(text: str) -> list[str]:
    return [line.partition(". ")[0] for line in text.splitlines() if line.startswith("Turn ")]


@pytest.mark.parametrize("policy", ["cost", "hybrid", "fifo"])
def test_no_passage_stands_in_a_prompt_and_beside_it(policy: str) -> None:
    with kilburn.open(":memory:", window=WINDOW, tokenizer="chars/4", embedder=None, policy=policy) as store:
        found = talk(store.session("a"), 60)
    assert sum(one is not None for one in found) > 3, "the search still brings what the window does not show"


def test_what_a_copy_shows_of_a_long_passage_is_left_out_and_the_rest_comes() -> None:
    with kilburn.open(":memory:", window=WINDOW, tokenizer="chars/4", embedder=None, policy="fifo") as store:
        session = store.session("a")
        first, rest = "The Yukon boat costs eleven pence. ", "The Yukon boat leaves at noon, and the Yukon boat has two oars. "
        said = after_the_task(session, first + rest)
        fill(session)
        session.append({"role": "user", "content": "What of the Yukon boat?"})
        before = bring(session, WINDOW // 4)
        session.edits.apply(Bring(((said, ((0, len(first)),)),)))
        after = bring(session, WINDOW // 4)
    assert before is not None
    assert first + rest in before.text
    assert after is not None
    assert first not in after.text
    assert rest.strip() in after.text


def test_what_the_window_shows_is_named_so_that_the_answer_cites_it() -> None:
    with kilburn.open(":memory:", window=WINDOW, tokenizer="chars/4", embedder=None, policy="fifo") as store:
        session = store.session("a")
        text = "The Yukon boat costs eleven pence."
        said = after_the_task(session, text)
        fill(session)
        session.append({"role": "user", "content": "What does the Yukon boat cost?"})
        session.edits.apply(Bring(((said, ((0, len(text)),)),)))
        found = bring(session, WINDOW // 4)
        assert found is not None
        assert text not in found.text
        assert (session.number, said) in found.pages
        prompt = session.render()
        assert behind(prompt, "") == list(prompt), "nothing is put beside it"


def test_a_passage_that_stands_beside_the_prompt_already_is_not_brought_again() -> None:
    with kilburn.open(":memory:", window=WINDOW, tokenizer="chars/4", embedder=None, policy="fifo") as store:
        session = store.session("a")
        said = after_the_task(session, "The Yukon boat costs eleven pence.")
        fill(session)
        session.append({"role": "user", "content": "What does the Yukon boat cost?"})
        alone, beside = bring(session, WINDOW // 4), bring(session, WINDOW // 4, beside=[(session.number, said)])
    assert alone is not None
    assert address_of(said) in alone.names
    assert beside is None or address_of(said) not in beside.names

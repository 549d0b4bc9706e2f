"""Gateways over one database: what they serve goes on, whichever is killed or begins again."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.talk import said, user
from gateway.test_crash import FILLER, Setup


@pytest.mark.slow
def test_one_of_two_gateways_is_killed_and_the_other_goes_on(setup: Setup) -> None:
    served, talk, names = [setup.serve(), setup.serve()], list[Any](), set[str]()
    for number in range(10):
        if number in (4, 7):
            served[0].kill()
            served = [served[1], setup.serve()]
        talk.append(user(f"q{len(talk)} {FILLER}"))
        text, name = served[number % 2].ask(talk, stream=number % 3 == 0)
        assert f"r{len(talk) - 1} " in text
        talk.append(said(text))
        names.add(name)
    assert not [sent.wrong for sent in setup.upstream.refused]
    found = setup.sessions()
    assert [text.strip() for text in found[name]] == [message["content"].strip() for message in talk]
    assert names == set(found) == {name}, "there is one session"


def test_a_gateway_that_begins_again_has_the_same_session(setup: Setup) -> None:
    served = setup.serve()
    talk: list[Any] = [user(f"q0 {FILLER}")]
    text, name = served.ask(talk)
    served.stop()
    talk += [said(text), user(f"q2 {FILLER}")]
    text, again = setup.serve().ask(talk)
    assert again == name
    assert [one.strip() for one in setup.sessions()[name]] == [message["content"].strip() for message in [*talk, said(text)]]

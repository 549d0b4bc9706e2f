"""Every odd value once, in every place where a caller passes one."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.errors import KilburnError, PinsExceedWindow
from torture.odd import CARELESS, ODD
from torture.oracle import RULER, look


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ODD, *CARELESS])
def test_an_odd_value_is_refused_by_type_or_does_no_harm(name: str, tmp_path: Path) -> None:
    path, window = str(tmp_path / "agent.db"), 1000
    given = [user("Fix it"), assistant("I read", call_of("c", path="m.py")), tool("c", "x " * 200), assistant("It is " * 100)]
    with kilburn.open(path, window=window, policy="hybrid", tokenizer=RULER) as store:
        session = store.session("a")
        for message in given:
            session.append(message)
        refusals = (KilburnError, *([TypeError, AttributeError, ValueError] if name in CARELESS else []))
        try:
            made = {**ODD, **CARELESS}[name](session)
        except refusals:
            made = None
        if not (name.startswith("append") and made is not None):
            assert session.contents.messages() == given
        before = session.contents.messages()
        assert look(session, window).faults == []
    with kilburn.open(path, window=window, policy="hybrid", tokenizer=RULER, readonly=True) as store:
        seen = look(store.session("a"), window)
        assert (seen.faults, seen.error) == ([], "")
    with kilburn.open(path, window=window, policy="hybrid", tokenizer=RULER) as store:
        session = store.session("a")
        assert session.contents.messages() == before
        session.append(user("and on"))
        assert look(session, window).faults == []
        assert session.contents.messages() == [*before, user("and on")]


@pytest.mark.parametrize("name", ["", " ", "half \ud83d", "a\x00b", None, 5, True, b"a", ["a"]], ids=repr)
@pytest.mark.parametrize("what", ["process", "tenant", "policy", "tokenizer"])
def test_an_odd_name_is_refused_by_type_or_works(what: str, name: object, tmp_path: Path) -> None:
    path = str(tmp_path / "agent.db")
    options = {} if what == "process" else {what: name}
    try:
        with kilburn.open(path, window=1000, **options) as store:  # type: ignore[arg-type]
            session = store.session(name if what == "process" else "a")  # type: ignore[arg-type]
            session.append(user("hello"))
            assert [info.name for info in store.sessions()] == [session.name]
    except KilburnError:
        pass
    with kilburn.open(path) as store:
        assert [info for info in store.sessions() if not isinstance(info.name, str)] == []
        store.session("b").append(user("the store works on"))


@pytest.mark.parametrize("tokens", [0, -1, 1, 2, True, None, 1.5, 2**70, "5"], ids=repr)
@pytest.mark.parametrize("what", ["window", "reserve"])
def test_an_odd_budget_is_refused_by_type_or_holds(what: str, tokens: object) -> None:
    options = {"window": 1000} | {what: tokens}
    try:
        with kilburn.open(":memory:", policy="fifo", tokenizer=RULER, **options) as store:  # type: ignore[arg-type]
            session = store.session("a")
            for number in range(4):
                try:
                    session.append(user(f"message {number}"))
                except PinsExceedWindow:
                    assert session.contents.messages() == []
            if what == "window":
                assert isinstance(tokens, int)
                assert look(session, tokens).faults == []
    except KilburnError:
        pass

"""Questions that are asked on an older state of a conversation: branches, which have the messages before by reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import kilburn
from gateway.talk import said, user, work
from gateway.test_compaction import Gateway
from gateway.test_histories_that_differ import Client, client
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.jobs.ending import TimeToLive, expire
from kilburn.testing import check_laws

__all__ = ["client"]

TALK = work(turns=60)


def test_a_branch_takes_little_beside_its_own_words(client: Callable[..., Client]) -> None:
    at = client(window=100_000)
    at.post([*TALK, user("Go on.")])
    at.restart()
    before, names, words = at.size(), set(), 0
    for number in range(20):
        asked = [*TALK, user(f"What about test {number}?")]
        answer = at.post(asked)
        assert at.upstream.sent[-1].body["messages"] == asked
        names.add(answer.headers["x-kilburn-session"])
        words += len(asked[-1]["content"]) + len(answer.json()["choices"][0]["message"]["content"])
        if number == 10:
            at.restart()
    assert len(names) == 20
    sessions = at.sessions()
    assert {*sessions} > names
    assert at.size() - before - words <= 20 * 4096
    with Sqlite(Path(at.db), readonly=True) as backend:
        assert inspect_store(backend) == []


def test_a_branch_goes_on_as_a_session_does(client: Callable[..., Client]) -> None:
    at = client(window=2000)
    at.history = [*TALK]
    main = at.ask("Where was I?")
    at.history = [*TALK]
    names = {at.ask(f"And what about test {turn}?") for turn in range(3)}
    at.restart()
    names |= {at.ask(f"And what of that for test {turn}?") for turn in range(3)}
    [name] = names
    assert name != main
    # A branch of the branch, and a copy where they are too deep.
    at.history = at.history[:-4]
    others = [at.ask("Or else?")]
    for _ in range(10):
        at.history = at.history[:-1]
        at.history = [*at.history[:-1]]
        others.append(at.ask(f"Or else, {len(others)}?"))
        at.ask("And then?")
    at.sessions()
    with kilburn.open(at.db, window=2000, policy="fifo", embedder=None) as store:
        for info in store.sessions():
            check_laws(store.session(info.name))
        history = store.session(others[-1]).contents.messages()
    assert [message["content"] for message in history] == [message["content"] for message in at.history]


def test_what_is_forgotten_in_a_session_is_forgotten_in_its_branches(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    main = gateway.turn([*TALK, user("Go on.")], said("Yes."))
    branch = gateway.turn([*TALK, user("Or else?")], said("No."))
    assert branch.name == f"{main.name}/b1"
    gateway.store.forget(session=main.name, address="p3")
    talk = [*TALK, user("Or else?"), said("No."), user("Why?")]
    after = gateway.turn(talk, said("Because."))
    # The client's history is the branch's otherwise, so the branch goes on.
    assert after.name == branch.name
    assert TALK[2]["content"] not in str(after.session.contents.messages())
    gateway.again()
    assert gateway.turn([*talk, said("Because."), user("Really?")], said("Yes.")).name == branch.name
    backend = gateway.store.backend
    assert not [owner for digest in after.chain for owner in backend.histories.owners(digest, 9)], "a digest of it is not kept"
    assert inspect_store(backend) == []
    gateway.store.close()


def test_a_branch_that_nobody_continued_ends_by_a_rule(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    store = gateway.store
    main = gateway.turn([*TALK, user("Go on.")], said("Yes.")).name
    lone = gateway.turn([*TALK, user("Or else?")], said("No.")).name
    short = gateway.turn([*TALK[:2], user("Or else?")], said("No.")).name
    talk = [*TALK, user("What else?"), said("This."), user("And?")]
    gateway.turn(talk[:-2], talk[-2])
    continued = gateway.turn(talk, said("That is so. " * 30)).name
    # A client's own compaction is no branch: the conversation goes on in it.
    compacted = gateway.turn([TALK[0], said("We did much."), *talk[-3:], said("That is so. " * 30), user("Go on.")], said("Yes."))
    assert compacted.earlier
    assert expire(store, TimeToLive(branches=1e9)).forgotten == ()
    rule = TimeToLive(branches=0.0)
    assert {*expire(store, rule, dry=True).forgotten} == {lone, short}
    assert {*expire(store, rule).forgotten} == {lone, short}
    assert {info.name for info in store.sessions()} == {main, continued, compacted.name}
    assert {*expire(store, TimeToLive(forget=0.0)).forgotten} == {main, compacted.name}, "a branch of a gateway is not open"
    assert store.sessions() == []
    store.close()

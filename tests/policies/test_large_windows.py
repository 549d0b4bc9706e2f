"""Policies over many resident pages: they look at what is near the border, and keep their promises all the same."""

from __future__ import annotations

from collections.abc import Sequence

from kernel.talk import assistant, call_of, tool, user
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.message import Kind
from kilburn.move import Evict
from kilburn.policies.summarize import MAX_CHARS_READ
from kilburn.policy import View
from kilburn.testing import FakeClock, check_policy

WINDOW = 60_000
"""Tokens of four characters: some 800 pages of the sizes below."""


def opened(policy: str) -> Session:
    session = Store(Sqlite(":memory:"), Budget(WINDOW), policy, tokenizer="chars/4", clock=FakeClock()).session("a")
    session.append({"role": "system", "content": "You read logs."}, user("Find the leak in src/pool.py"))
    return session


def fill(session: Session, until: Act, most: int = 3000) -> None:
    """Turns of an agent, until the policy has moved something."""
    while session.window.last < most:
        if any(event.act is until for event in session.ledger.events()):
            return
        batch = []
        for at in range(20):
            name = f"c{len(session.window.pages)}-{at}"
            batch += [assistant(f"Looking at part {name}", call_of(name)), tool(name, _log(name))]
        session.append(*batch)
    raise AssertionError("the policy never acted")


def _log(name: str) -> str:
    return "\n".join(f"{name} line {line} value_{name}_{line} read from /srv/{name}/{line}.log" for line in range(5))


def refused(session: Session) -> list[str]:
    return [event.why for event in session.ledger.events() if event.act is Act.REFUSE]


def test_a_summary_of_much_text_is_written_from_the_newest_of_it_and_from_what_the_user_said() -> None:
    session = opened("summarize(ask=False)")
    session.append(user("Decided: the service runs on host zeppelin."), assistant("Yes."), user("Go on."))
    fill(session, Act.FOLD)
    fold = next(page for page in session.window.resident() if page.kind is Kind.FOLD)
    text = session.contents.text(fold.id)
    assert "the service runs on host zeppelin" in text
    newest = max(page for page in fold.sources if session.window.pages[page].kind is Kind.RESULT)
    assert f"p{newest} " in text
    assert len(fold.sources) > 300, "it stands for all that is old, read or not"
    assert sum(len(session.contents.text(page)) for page in fold.sources) > 2 * MAX_CHARS_READ
    assert not refused(session)


def test_a_remade_summary_keeps_what_the_last_ones_held_however_old_it_is() -> None:
    session = Store(Sqlite(":memory:"), Budget(2000), "summarize(ask=False)", tokenizer="chars/4", clock=FakeClock()).session("a")
    session.append(user("Repair the nightly job."))
    for at in range(MAX_CHARS_READ // 8 // 300):
        session.append(assistant(f"Looking at part v{at}", call_of(f"v{at}")), tool(f"v{at}", _log(f"v{at}")))
    session.append(assistant("decided: the index of zuvoka is a b-tree in /srv/zuvoka/tree.idx"))
    session.append(assistant("looking", call_of("c0")), tool("c0", "ERROR: build 4f2e19aa77b0 of zuvoka failed, exit code 3"))
    at = 0
    while session.window.seen < MAX_CHARS_READ:
        at += 1
        session.append(assistant(f"Looking at part w{at}", call_of(f"w{at}")), tool(f"w{at}", _log(f"w{at}")))
    folds = [page for page in session.window.resident() if page.kind is Kind.FOLD]
    assert len(folds) <= 3
    shown = "".join(session.contents.text(page.id) for page in folds)
    assert "decided: the index of zuvoka is a b-tree in /srv/zuvoka/tree.idx" in shown
    assert "build 4f2e19aa77b0 of zuvoka failed" in shown
    assert all(page.depth == 1 for page in folds)
    assert not refused(session)


def test_compact_weighs_little_of_a_large_window_and_stands_for_all_of_it() -> None:
    session = Store(Sqlite(":memory:"), Budget(WINDOW), "compact(trigger=None)", tokenizer="chars/4", clock=FakeClock()).session(
        "a"
    )
    session.append(user("Find the leak."), assistant("decided: never restart the service on host zeppelin"))
    session.append(assistant("looking", call_of("c0")), tool("c0", "ERROR: build 4f2e19aa77b0 failed, exit code 3"))
    for _ in range(2):
        before = sum(event.act is Act.FOLD for event in session.ledger.events())
        while sum(event.act is Act.FOLD for event in session.ledger.events()) == before:
            fill_one(session)
    (fold,) = [page for page in session.window.resident() if page.kind is Kind.FOLD]
    assert "never restart the service on host zeppelin" in session.contents.text(fold.id)
    assert "build 4f2e19aa77b0 failed" in session.contents.text(fold.id)
    assert fold.depth == 1
    assert len(fold.sources) > 300
    assert not refused(session)


def fill_one(session: Session) -> None:
    name = f"c{len(session.window.pages)}"
    session.append(assistant(f"Looking at part {name}", call_of(name)), tool(name, "\n".join([_log(name)] * 4)))


def test_hybrid_stands_for_all_that_leaves_a_large_window() -> None:
    session = opened("hybrid")
    fill(session, Act.FOLD)
    fold = next(page for page in session.window.resident() if page.depth)
    assert len(fold.sources) > 300
    assert not [event for event in session.ledger.events() if event.act is Act.EVICT]
    assert 0.6 * WINDOW <= session.render().tokens <= WINDOW
    assert not refused(session)


def test_importance_among_many_pages_keeps_what_was_marked_and_frees_what_it_must() -> None:
    session = opened("importance")
    session.append(assistant("the deploy key lives in vault seven"))
    session.rate("p3", 1.0)
    fill(session, Act.EVICT)
    resident = {page.id for page in session.window.resident()}
    assert {1, 2, 3} <= resident, "the system's, the user's and the marked page are the oldest of all"
    assert session.prompts.use <= WINDOW * 9 // 10
    gone = [page for event in session.ledger.events() if event.act is Act.EVICT for page in event.pages]
    assert max(gone) < session.window.last // 2, "of much that is equally old and of no use, the oldest leaves"
    assert not refused(session)


class Compared:
    """Evicts the oldest, and compares the quick answer with the slow one at every look."""

    looks = 0

    def plan(self, view: View) -> Sequence[Evict]:
        held = view.held()
        for page in view.pages:
            if not view.is_latest(page):
                assert (page.id in held) is not view.is_movable(page)
                Compared.looks += 1
        assert view.latest() == [page for page in view.pages if view.is_latest(page)]
        older = [page for page in view.pages if not view.is_latest(page)]
        chosen = view.free(older, view.excess + view.handle) if view.excess else ()
        return [Evict(chosen)] if chosen else []


def test_what_is_held_is_what_may_not_move() -> None:
    check_policy(Compared, windows=(300,), seeds=(1,))
    assert Compared.looks > 100

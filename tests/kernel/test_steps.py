"""A session's windows, event by event: each is what a replay up to there gives, from wherever one begins."""

from __future__ import annotations

from pathlib import Path

import kilburn
from kilburn.backend import Batch
from kilburn.event import Act
from kilburn.kernel.checkpoint import checkpoint_of, figures_of
from kilburn.kernel.ledger import Ledger, Usage
from kilburn.kernel.prompts import pieces
from kilburn.kernel.render import items
from kilburn.kernel.replay import rebuild, steps
from kilburn.kernel.session import Session


def grown(session: Session, messages: int) -> None:
    for number in range(messages):
        session.append({"role": "user", "content": f"Message {number}. " + "More was said. " * (number % 7 + 3)})
        session.render()


def checked(session: Session, begin: tuple[int, bytes] | None = None, after: int = 0) -> int:
    """Compare each step with a replay up to it; returns how many there were."""
    counter, backend = session.counter, session.backend
    seen = 0
    for event, window in steps(backend, session.info, counter, after, session.ledger.head, begin):
        seen += 1
        if event.number % 5 and event.number < session.ledger.head:
            continue
        whole = rebuild(backend, session.info, counter, until=event.number, whole=True).window
        assert window.use == whole.use
        assert [(key, instead) for key, _, instead in items(window)] == [(key, instead) for key, _, instead in items(whole)]
        if event.act is Act.SHIP:
            assert sum(cost for _, cost in pieces(window, items(window))) == event.tokens
    return seen


def test_steps_are_what_a_replay_gives(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=300, policy="summarize", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        grown(session, 25)
        child = session.fork("Look into it.")
        grown(child, 6)
        for one in (session, child):
            one.ledger.flush()
        assert checked(session) == session.ledger.head
        assert checked(session, after=30) == session.ledger.head - 30
        # Of a branch, the first event says where it begins.
        assert checked(child) == child.ledger.head - 1


def test_steps_may_begin_at_a_checkpoint_of_the_callers(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=300, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        grown(session, 25)
        session.ledger.flush()
        kept = {
            event.number: checkpoint_of(window, Ledger(), Usage(session.counter))
            for event, window in steps(session.backend, session.info, session.counter, 0, session.ledger.head)
            if event.number == 21
        }
        assert checked(session, begin=(21, kept[21]), after=30) == session.ledger.head - 30


def test_the_figures_of_a_checkpoint_are_read_alone(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=300, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        grown(store.session("s"), 60)
    with kilburn.open(str(tmp_path / "a.db"), window=300, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        assert figures_of(session.backend, session.info) == (session.stats(), 0)
        session.backend.commit(session.number, Batch(head=session.ledger.head, checkpoint=b"nothing"))
        assert figures_of(session.backend, session.info) == (session.stats(), session.ledger.head)

"""`summarize` brings the window under its trigger, and leaves room for the summary that it has just made."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.models.scripted import Scripted


def work(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield steps of work without end: a call and its result, whose words and lengths vary."""
    chance = random.Random(seed)
    for number in itertools.count():
        lines = [f"part{chance.randrange(10**6)} on host-{chance.randrange(99)} is done" for _ in range(chance.randrange(8, 26))]
        call = call_of(f"c{number}", path=f"src/part{number}.py")
        yield [assistant(f"I look at part {number}.", call), tool(f"c{number}", "\n".join(lines))]


def played(store: kilburn.Store, steps: int) -> tuple[Session, list[int]]:
    session = store.session("a")
    session.append({"role": "system", "content": "You repair jobs."}, {"role": "user", "content": "Find why the job fails."})
    uses = []
    for number, step in enumerate(work(1)):
        if number == steps:
            break
        for message in step:
            session.append(message)
            uses.append(session.prompts.use)
    return session, uses


@pytest.mark.parametrize("trigger", [2500, 6000])
def test_after_acting_the_window_is_under_its_trigger_however_large_the_window_is(trigger: int) -> None:
    with kilburn.open(":memory:", window=60_000, policy=f"summarize(ask=False, trigger={trigger})", tokenizer="chars/4") as store:
        session, uses = played(store, 130)
        assert sum(event.act is Act.FOLD for event in session.ledger.events()) > 2
        # What just came stays whole, so one large output may stand over the trigger until the next message.
        over = [use for use in uses if use > trigger]
        assert max(uses) <= trigger + 200, max(uses)
        assert len(over) <= len(uses) // 20


def test_the_kernel_never_lets_go_of_a_summary_for_want_of_room() -> None:
    with kilburn.open(":memory:", window=1000, policy="summarize(ask=False)", tokenizer="chars/4") as store:
        session, uses = played(store, 250)
        pages = session.window.pages
        folds = sum(event.act is Act.FOLD and event.policy != "kernel" for event in session.ledger.events())
        lost = [
            event.number
            for event in session.ledger.events()
            if event.act is Act.EVICT
            and event.policy == "kernel"
            and any(page < 0 and not pages[page].message for page in event.pages)
        ]
        assert folds > 80
        assert not lost
        assert max(uses) <= 1000


@pytest.mark.parametrize("policy", ["summarize(timeout=0.05)", "recursive(timeout=0.05)", "compact(trigger=None, timeout=0.05)"])
def test_a_model_that_hangs_is_left_behind(policy: str) -> None:
    late = threading.Event()

    def hang(request: Any) -> str:
        late.wait(600)
        return "It is late."

    # Without an answer a policy takes the lines themselves, or waits.
    with kilburn.open(":memory:", window=1000, policy=policy, model=Scripted([hang] * 100), tokenizer="chars/4") as store:
        session, uses = played(store, 12)
        late.set()
        asked = [event.data["outcome"] for event in session.ledger.events() if event.act is Act.ASK]
        assert set(asked) == {"failed"}
        assert max(uses) <= 1000
        assert "It is late." not in str(list(session.render()))


@pytest.mark.parametrize("spec", ["summarize(timeout=0)", "recursive(timeout=-1)", "compact(timeout=0)"])
def test_a_question_without_time_is_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="timeout"):
        kilburn.open(":memory:", window=1000, policy=spec, tokenizer="chars/4")

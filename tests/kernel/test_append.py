"""The way of an append with room: it does what there is to do, and asks nobody who has nothing to do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import ClassVar

import pytest

import kilburn
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import StoreStale
from kilburn.kernel.session import Session
from kilburn.move import Move
from kilburn.policies.fifo import Fifo
from kilburn.policy import Acts, View

MOST = 116
"""Functions that an append with room may enter; five of them look for what the user says that is to stay, and one notes how long
the write-ahead log is."""


def entered(session: Session, text: str) -> Counter[tuple[str, str]]:
    """The functions of Kilburn that one append enters, with their calls; comprehensions are none."""
    found: Counter[tuple[str, str]] = Counter()
    home = str(Path(kilburn.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(home) and not code.co_name.startswith("<"):
            found[code.co_filename, code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        session.append({"role": "user", "content": text})
    finally:
        sys.setprofile(before)
    return found


def talk(session: Session, messages: int) -> None:
    for number in range(messages // 2):
        session.append({"role": "user", "content": f"question {number:04d} about things"})
        session.append({"role": "assistant", "content": f"answer {number:04d}"})


@pytest.mark.parametrize("policy", ["fifo", "hybrid", "cost"])
def test_an_append_with_room_enters_few_functions(policy: str, tmp_path: Path) -> None:
    with kilburn.open(tmp_path / "a.db", window=100_000, policy=policy, tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        talk(session, 20)
        found = entered(session, "question 0010 about things")
        assert len(found) <= MOST, sorted(found)
        talk(session, 40)
        # It looks through nothing that grows with the session.
        assert entered(session, "question 0011 about things").total() < found.total() + 20


@dataclass
class Asked:
    """Notes each time that it is asked."""

    acts: ClassVar[object]
    views: list[View] = field(default_factory=list)

    def plan(self, view: View) -> Sequence[Move]:
        self.views.append(view)
        return ()


@dataclass
class Always(Asked):
    pass


@dataclass
class Full(Asked):
    acts = Acts.FULL


@dataclass
class Folded(Asked):
    acts = Acts.FOLDED


@dataclass
class Odd(Asked):
    acts = "never"


@dataclass
class Anew(Full):
    """Inherits what another class says of its plan, and has a plan of its own."""

    def plan(self, view: View) -> Sequence[Move]:
        return super().plan(view)


def opened(policy: Asked, window: int) -> Session:
    return Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/1").session("s")


@pytest.mark.parametrize(("policy", "asked"), [(Always, 3), (Odd, 3), (Anew, 3), (Full, 0), (Folded, 0)])
def test_a_policy_that_has_nothing_to_do_with_room_is_not_asked(policy: type[Asked], asked: int) -> None:
    one = policy()
    session = opened(one, 10_000)
    for number in range(3):
        session.append({"role": "user", "content": f"message {number}"})
    assert len(one.views) == asked


@pytest.mark.parametrize("policy", [Always, Full, Folded])
def test_in_a_full_window_each_is_asked(policy: type[Asked]) -> None:
    one = policy()
    session = opened(one, 200)
    for number in range(4):
        session.append({"role": "user", "content": f"message {number} " + "x" * 60})
    assert any(view.excess for view in one.views)


def test_one_that_acts_on_folds_is_asked_where_there_is_one() -> None:
    one = Folded()
    session = opened(one, 400)
    session.append({"role": "user", "content": "the task"})
    session.append({"role": "assistant", "content": "y" * 700})
    assert session.window.last_derived, "the answer is larger than the window, so an excerpt stands for it"
    before = len(one.views)
    session.append({"role": "user", "content": "and now?"})
    assert len(one.views) > before


def test_what_is_wrong_only_in_an_old_state_says_that_the_state_is_old(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    with (
        kilburn.open(tmp_path / "a.db", window=10_000, policy=Fifo()) as one,
        kilburn.open(tmp_path / "a.db", window=10_000) as other,
    ):
        first = one.session("s")
        first.append({"role": "user", "content": "go"})
        other.session("s").append({"role": "assistant", "content": None, "tool_calls": [call]})
        with pytest.raises(StoreStale):
            first.append({"role": "tool", "tool_call_id": "c1", "content": "done"})
        with pytest.raises(StoreStale):
            first.edits.idle()
        first.ledger.refresh()
        first.append({"role": "tool", "tool_call_id": "c1", "content": "done"})


def test_what_must_follow_a_message_follows_it_or_is_not_appended(tmp_path: Path) -> None:
    with (
        kilburn.open(tmp_path / "a.db", window=10_000, tokenizer="chars/4", embedder=None) as one,
        kilburn.open(tmp_path / "a.db", window=10_000, tokenizer="chars/4", embedder=None) as other,
    ):
        one.session("s").append({"role": "user", "content": "go"}, after=0)
        with pytest.raises(StoreStale):
            one.session("s").append({"role": "user", "content": "go"}, after=0)
        other.session("s").append({"role": "assistant", "content": "gone"}, after=1)
        # The store has another last message, whether this session knows it yet or not.
        for known in (lambda: None, one.session("s").ledger.refresh):
            known()
            with pytest.raises(StoreStale):
                one.session("s").append({"role": "assistant", "content": "gone"}, after=1)
        one.session("s").append({"role": "user", "content": "back"}, after=2)
        assert [message["content"] for message in other.session("s").contents.messages()] == ["go", "gone", "back"]

"""Two gateways over one store that have the same conversation at the same moment, in the orders that their steps can have.

One gateway goes through a request. Before some call to its store the other one takes a request, and before a later call, or the
same, it answers that. So the order is given: no clock and no thread has a part in it.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from effort import rounds
from gateway.test_history import assistant, take, turn, user, visible
from kilburn import Store
from kilburn.backend import Backend
from kilburn.backends.places import open_backend
from kilburn.budget import Budget
from kilburn.errors import OrphanResult
from kilburn.event import Act
from kilburn.gateway.conversations import turn_before_reply
from kilburn.gateway.history import Histories
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.wire.digests import HIDDEN
from kilburn.wire.form import parse

Talk = list[dict[str, Any]]
Step = Callable[[], None]

PARTS = frozenset({"contents", "words", "vectors", "settings", "histories"})
STEPS = frozenset(vars(Backend)) - PARTS - {"close", "together", "erasing"}

ORDERS = int(os.environ.get("KILBURN_TEST_ORDERS", rounds(10, 40)))
"""Orders of a case that are tried: where there are more, these are drawn."""


class Stepped:
    """A store's backend that does what is due before it is called."""

    def __init__(self, backend: Backend) -> None:
        self.inner, self.made, self.due = backend, 0, list[tuple[int, Step]]()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)
        if name in PARTS:
            return SteppedPart(self, attribute)
        if name in STEPS and callable(attribute):
            self.step()
        return attribute

    def step(self) -> None:
        while self.due and self.due[0][0] <= self.made:
            self.due.pop(0)[1]()
        self.made += 1


class SteppedPart:
    """A part of that backend, such as its contents."""

    def __init__(self, stepped: Stepped, part: Any) -> None:
        self._stepped, self._part = stepped, part

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._part, name)
        if name != "all" and not name.startswith("_") and callable(attribute):
            self._stepped.step()
        return attribute


class Pair:
    """Two gateways over one store: `one` is stepped, and `other` comes between its steps."""

    def __init__(self, opened: Callable[[], Backend], stack: ExitStack) -> None:
        self.stepped = Stepped(opened())
        self.one, self.other = (self._serving(backend, stack) for backend in (self.stepped, opened()))

    def _serving(self, backend: Any, stack: ExitStack) -> Histories:
        store = Store(backend, Budget(100_000), "fifo", tokenizer="chars/4")
        stack.callback(store.close)
        return Histories(store)

    def said(self) -> list[list[str]]:
        """What the sessions say, to somebody who reads them anew."""
        store = self.other.store
        names = [info.name for info in store.sessions()]
        for name in names:
            store.session(name).ledger.refresh()
        return sorted(visible(store, name) for name in names)

    def run(self, talk: Talk, reply: str, steps: Sequence[tuple[int, Step]] = (), *, recalls: bool = False) -> int:
        """A request of the one, with steps of the other, each before a call of this number; returns how many calls there were."""
        stepped = self.stepped
        stepped.made, stepped.due = 0, list(steps)
        for step in request(self.one, talk, reply, recalls=recalls):
            step()
        left, stepped.due = stepped.due, []
        for _, step in left:
            step()
        return stepped.made


Pairs = Callable[[], Pair]


@pytest.fixture
def pairs(tmp_path: Path) -> Iterator[Pairs]:
    """Makes two gateways over an empty store."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def made() -> Pair:
            path = tmp_path / f"{next(numbers)}.db"
            return Pair(lambda: open_backend(path, durable=False), stack)

        yield made


def request(histories: Histories, talk: Talk, reply: str, *, recalls: bool = False, of: str = "") -> tuple[Step, ...]:
    """A request in steps: it is taken, the model recalls something, and it is answered."""
    found: list[Any] = []

    def begin() -> None:
        found.append(take(histories, talk, name="work", of=of))

    def recall() -> None:
        call = Part(kind=Kind.CALL, text='{"address":"p1"}', call=f"{HIDDEN}1", name="recall")
        result = Part(kind=Kind.RESULT, text="recalled", call=call.call)
        said = Message(role=Role.ASSISTANT, parts=(call,)), Message(role=Role.TOOL, parts=(result,), sources=(1,))
        histories.said(found[0], said, more=True)

    def end() -> None:
        histories.said(found[0], parse(assistant(reply)))
        histories.give(found[0])

    return (begin, recall, end) if recalls else (begin, end)


def texts(talk: Talk, reply: str) -> list[str]:
    return [*(message["content"] for message in talk), reply]


FIRST: Talk = [user("a")]
SECOND: Talk = [user("a"), assistant("b"), user("c")]

HOW = ("nothing was said", "the other knows the session", "the one does", "both do")


def begun(pair: Pair, how: str) -> Talk:
    """What both are asked next."""
    if how == "nothing was said":
        return FIRST
    turn(pair.other if how == "the other knows the session" else pair.one, FIRST, "b", name="work")
    if how == "both do":
        pair.other.give(take(pair.other, [*FIRST, assistant("b")], name="work"))
    return SECOND


@pytest.fixture
def most() -> int:
    """Orders of a case that are tried."""
    return ORDERS


def orders(pairs: Pairs, most: int, how: str, steps: int, *, recalls: bool = False) -> Sequence[tuple[int, ...]]:
    """Before which calls of the one, or behind all of them, the steps of the other come."""
    pair = pairs()
    # It makes some more calls where the other comes between.
    calls = range(pair.run(begun(pair, how), "r", recalls=recalls) + 12)
    every = [*itertools.combinations_with_replacement(calls, steps)]
    return every if len(every) <= most else random.Random(0).sample(every, most)


@pytest.mark.parametrize("how", HOW)
def test_the_same_reply_is_stored_once(pairs: Pairs, most: int, how: str) -> None:
    for order in orders(pairs, most, how, 2):
        pair = pairs()
        talk = begun(pair, how)
        pair.run(talk, "r", list(zip(order, request(pair.other, talk, "r"), strict=True)))
        assert pair.said() == [texts(talk, "r")], order


@pytest.mark.parametrize("how", HOW)
def test_another_reply_is_a_session_of_its_own(pairs: Pairs, most: int, how: str) -> None:
    for order in orders(pairs, most, how, 2):
        pair = pairs()
        talk = begun(pair, how)
        pair.run(talk, "r", list(zip(order, request(pair.other, talk, "s"), strict=True)))
        assert pair.said() == [texts(talk, "r"), texts(talk, "s")], order


@pytest.mark.parametrize("how", HOW)
def test_the_other_is_asked_again_and_goes_on_meanwhile(pairs: Pairs, most: int, how: str) -> None:
    for order in orders(pairs, most, how, 4):
        pair = pairs()
        talk = begun(pair, how)
        further = [*talk, assistant("r"), user("next")]
        steps = (*request(pair.other, talk, "r"), *request(pair.other, further, "s"))
        pair.run(talk, "r", list(zip(order, steps, strict=True)))
        # Asked when the other had gone on already, it is an old question, and begins a branch.
        assert pair.said() in ([texts(further, "s")], [texts(talk, "r"), texts(further, "s")]), order


@pytest.mark.parametrize("how", ["nothing was said", "both do"])
def test_what_the_model_recalls_makes_no_difference(pairs: Pairs, most: int, how: str) -> None:
    for order in orders(pairs, most, how, 3, recalls=True):
        pair = pairs()
        talk = begun(pair, how)
        steps = request(pair.other, talk, "r", recalls=True)
        pair.run(talk, "r", list(zip(order, steps, strict=True)), recalls=True)
        assert pair.said() == [texts(talk, "r")], order


@pytest.mark.parametrize("also", [SECOND, [*SECOND, assistant("r")]])
def test_who_looks_at_a_session_here_takes_nothing_in_for_its_requests(pairs: Pairs, also: Talk) -> None:
    pair = pairs()
    begun(pair, "both do")
    turn(pair.other, SECOND, "r", name="work")
    # A dashboard, a search or a learner reads the session that requests here go on with.
    assert visible(pair.one.store, "work") == texts(SECOND, "r")
    talk = [*also, user("next")] if also != SECOND else SECOND
    turn(pair.one, talk, "r", name="work")
    assert pair.said() == [texts(talk, "r")]


class Change:
    """Another thread that is in the middle of a change, which is undone at last."""

    def __init__(self, session: Session) -> None:
        self._session, self.inside, self._over = session, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OrphanResult), self._session.edits.batch() as kernel:
            kernel.take_in(parse(user("half")))
            self.inside.set()
            self._over.wait(600)
            raise OrphanResult("it is undone")

    def end(self) -> None:
        """Undo it."""
        self._over.set()
        self._thread.join(600)


def test_what_another_request_is_changing_is_not_seen_half(pairs: Pairs) -> None:
    pair = pairs()
    begun(pair, "both do")
    session = pair.one.store.session("work")
    change, found = Change(session), list[int]()
    change.inside.wait(600)
    reader = threading.Thread(target=lambda: found.append(turn_before_reply(session)))
    reader.start()
    # Who does not wait for the other is done by now.
    reader.join(0.3)
    change.end()
    reader.join(600)
    assert found == [1]


def test_what_another_request_is_changing_is_not_written_half(pairs: Pairs) -> None:
    pair = pairs()
    begun(pair, "both do")
    session = pair.one.store.session("work")
    session.ledger.record(Act.NOTE, policy="test", why="there is something to write")
    changes: list[Change] = []

    def begin() -> None:
        changes.append(Change(session))
        # Who does not wait for the writer is in the middle by now.
        changes[0].inside.wait(0.3)

    pair.stepped.made, pair.stepped.due = 0, [(0, begin)]
    pair.one.store.release("work")
    changes[0].end()
    assert pair.said() == [texts(FIRST, "b")]


def test_what_cannot_be_taken_in_takes_no_session_from_the_other(pairs: Pairs) -> None:
    orphan = [user("a"), {"role": "tool", "tool_call_id": "none", "content": "4"}]
    for at in itertools.count():
        pair = pairs()
        with pytest.raises(OrphanResult):
            pair.run(orphan, "r", [(at, lambda pair=pair: turn(pair.other, FIRST, "s", name="work") and None)])
        if pair.stepped.due:
            break
        assert pair.said() == [texts(FIRST, "s")], at
    assert at > 5


@pytest.mark.parametrize(("one", "other"), [("ana", "bo"), ("", "bo"), ("ana", "")])
def test_two_users_whose_clients_give_one_name(pairs: Pairs, one: str, other: str) -> None:
    """Whoever comes second has another session, whenever the other one comes."""
    talk = [user("of the other"), assistant("d"), user("e")]
    for at in itertools.count():
        pair = pairs()

        def come(pair: Pair = pair) -> None:
            turn(pair.other, talk, "f", name="work", of=other)

        pair.stepped.made, pair.stepped.due = 0, [(at, come)]
        turn(pair.one, FIRST, "r", name="work", of=one)
        if pair.stepped.due:
            break
        sessions = {info.user: visible(pair.other.store, info.name) for info in pair.other.store.sessions()}
        assert sessions == {one: texts(FIRST, "r"), other: texts(talk, "f")}, at
    assert at > 5


@pytest.mark.parametrize("other", ["", "bo"])
def test_what_others_have_begun_under_a_free_name_is_nobody_elses_beginning(pairs: Pairs, other: str) -> None:
    """Also where it has as many messages as this one begins with. Who gives no user could open it."""
    for at in itertools.count():
        pair = pairs()
        for step in (
            *request(pair.one, [user("a")], "b", recalls=True),
            *request(pair.one, [user("a"), assistant("b"), user("c")], "d"),
            *request(pair.other, [user("v")], "w", recalls=True, of=other),
            *request(pair.other, [user("v"), assistant("w"), user("x")], "y", of=other),
        ):
            step()
        begin, end = request(pair.other, [user("v"), assistant("w"), user("another x")], "z", of=other)
        pair.stepped.made, pair.stepped.due = 0, [(at, begin)]
        turn(pair.one, [user("a"), assistant("b"), user("c"), assistant("another d"), user("e")], "f", name="work")
        if pair.stepped.due:
            break
        end()
        mine, theirs = ["a", "b", "c", "another d", "e", "f"], ["v", "w", "another x", "z"]
        assert pair.said() == [mine, [*"abcd"], theirs, [*"vwxy"]], at
    assert at > 5


@pytest.mark.parametrize("late", ["the same reply", "no reply"])
def test_a_request_that_still_goes_on_here_and_was_answered_elsewhere_is_no_reason_for_a_branch(pairs: Pairs, late: str) -> None:
    """Its client has left or lost patience, asked the other gateway, and is back with its next message."""
    pair = pairs()
    left = take(pair.one, FIRST, name="work")
    turn(pair.other, FIRST, "b", name="work")
    assert turn(pair.one, SECOND, "d", name="work") == "work"
    if late == "the same reply":
        pair.one.said(left, parse(assistant("b")))
    pair.one.give(left)
    third = [*SECOND, assistant("d"), user("e")]
    assert turn(pair.other, third, "f", name="work") == "work"
    assert turn(pair.one, [*third, assistant("f"), user("g")], "h", name="work") == "work"
    assert pair.said() == [["a", "b", "c", "d", "e", "f", "g", "h"]]


def test_a_client_comes_back_while_the_request_that_it_left_comes_to_its_end(pairs: Pairs) -> None:
    came = 0
    for call in range(8):
        pair = pairs()
        left = take(pair.one, FIRST, name="work")
        turn(pair.other, FIRST, "b", name="work")
        pair.one.said(left, parse(assistant("b")))
        names: list[str] = []

        def back(one: Histories = pair.one, names: list[str] = names) -> None:
            names.append(turn(one, SECOND, "d", name="work"))

        pair.stepped.made, pair.stepped.due = 0, [(call, back)]
        pair.one.give(left)
        came += len(names)
        if not names:
            pair.stepped.due = []
            back()
        assert names == ["work"], call
        assert pair.said() == [["a", "b", "c", "d"]], call
    assert came

"""Odd values at every public method: each is refused by a typed error, or does no harm; a refusal changes nothing."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kilburn.agents.branch import Branching, SubAgent
from kilburn.agents.loop import Agent, Limits
from kilburn.budget import Budget
from kilburn.collections.collection import Collection
from kilburn.errors import KilburnError, SpecError, UnknownAddress
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.quota import Quota
from kilburn.model import Tokens
from kilburn.models.queue import Share
from kilburn.models.scheduler import Scheduler
from kilburn.move import Evict
from kilburn.policies.fifo import Fifo
from kilburn.recursion.rlm import RecursiveModel
from kilburn.recursion.sandbox import Bounds, open_sandbox
from kilburn.testing import Scripted, check_laws

ODD: tuple[Any, ...] = (
    *(None, 5, -1, 2**70, True, 1.5, math.nan, math.inf, "", "\ud800", "p1", "b1/\ud800", "\x00", b"x", object, object()),
    *([], ["x"], ["\ud800"], [1.5], [None], {}, {"x": object()}, Budget(10), Scripted(["x"]), Act.NOTE, lambda: 5),
)

GIVEN: dict[str, Any] = {
    "act": Act.NOTE,
    "address": "p1",
    "agent": "a",
    "budget": Budget(1000),
    "counted": 100,
    "gone": None,
    "message": {"role": "user", "content": "x"},
    "messages": {"role": "user", "content": "x"},
    "moves": Evict((2,)),
    "name": "other",
    "outcome": "done",
    "page": 1,
    "pages": (2,),
    "path": "b1",
    "policy": Fifo(),
    "prompt": "try it",
    "query": "harbour",
    "roots": {},
    "text": "done",
    "usage": Tokens(prompt=100, reply=5),
}
"""A sound value for each argument that has no default."""

ENDS = {"close", "release", "abandon"}
"""They end what is tested."""
SEAMS = {
    *("enter", "wait", "give_way", "leave", "ahead", "tokens_of", "tokens_in"),  # between the scheduler and its models
    *("decide_by", "view"),  # any policy, and any page, may be looked at
    *("part", "fetch"),
}
"""Between parts of Kilburn: they are given what another part has made."""


def methods(cls: type) -> Iterator[tuple[str, str]]:
    """The public methods of a class, each with one of its arguments."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if name.startswith("_") or name in ENDS | SEAMS:
            continue
        for parameter in list(inspect.signature(method).parameters.values())[1:]:
            if parameter.kind is not parameter.VAR_KEYWORD:
                yield name, parameter.name


def call(target: Any, name: str, odd: str, value: Any) -> Any:
    """Call a method with sound values for what it needs, and one that is odd."""
    given: list[Any] = []
    named: dict[str, Any] = {}
    for parameter in inspect.signature(getattr(target, name)).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD or (parameter.default is not parameter.empty and parameter.name != odd):
            continue
        chosen = value if parameter.name == odd else GIVEN.get(parameter.name, "x")
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL):
            given.append(chosen)
        else:
            named[parameter.name] = chosen
    positional = [*named.values(), *given] if given else []
    made = getattr(target, name)(*positional) if given else getattr(target, name)(**named)
    if inspect.iscoroutine(made):
        return asyncio.run(made)
    return list(made) if inspect.isgenerator(made) else made


def state(store: Store) -> list[Any]:
    """What stands in the store: what reading records does not count."""
    found: list[Any] = []
    for info in store.backend.segments():
        moves = [event for event in store.backend.events(info.number) if event.act not in (Act.FAULT, Act.SEARCH, Act.NOTE)]
        found.append((info.name, sorted(store.backend.pages(info.number), key=lambda row: row[0].id), moves))
    return found


@pytest.fixture
def store() -> Iterator[Store]:
    with kilburn.open(":memory:", window=1000, policy="fifo", tokenizer="chars/4", embedder=None) as made:
        session = made.session("a")
        session.append({"role": "user", "content": "the harbour"}, {"role": "assistant", "content": "is far"})
        session.fork("look")
        made.memory("ana").collection.add("the harbour is far")
        yield made


@pytest.mark.parametrize(("name", "odd"), [*methods(Session)], ids=":".join)
def test_odd_arguments_of_a_session(store: Store, name: str, odd: str) -> None:
    for value in ODD:
        _check(store, store.session("a"), name, odd, value)
    check_laws(store.session("a"))
    assert store.session("a").append({"role": "user", "content": "and on"})


@pytest.mark.parametrize(("name", "odd"), [*methods(Session)], ids=":".join)
def test_odd_arguments_of_a_branch(store: Store, name: str, odd: str) -> None:
    for value in ODD:
        if not store.session("a").branches.children():
            store.session("a").fork("again")
        branch = store.session("a").branches.children()[-1][0].name.removeprefix("a/")
        _check(store, store.session("a").branches.open(branch), name, odd, value)
    check_laws(store.session("a"))


@pytest.mark.parametrize(("name", "odd"), [*methods(Collection)], ids=":".join)
def test_odd_arguments_of_a_memory(store: Store, name: str, odd: str) -> None:
    for value in ODD:
        _check(store, store.memory("ana").collection, name, odd, value)
    store.memory("ana").collection.add("and on")


@pytest.mark.parametrize(("name", "odd"), [*methods(Store)], ids=":".join)
def test_odd_arguments_of_a_store(store: Store, name: str, odd: str) -> None:
    for value in ODD:
        _check(store, store, name, odd, value)
    check_laws(store.session("a"))


def _check(store: Store, target: Any, name: str, odd: str, value: Any) -> None:
    before = state(store)
    try:
        call(target, name, odd, value)
    except KilburnError:
        assert state(store) == before, (name, odd, value)


@pytest.mark.parametrize(("name", "odd"), [*methods(Scheduler)], ids=":".join)
def test_odd_arguments_of_a_scheduler(name: str, odd: str) -> None:
    with Scheduler(Scripted(["x"])) as scheduler:
        for value in ODD:
            try:
                call(scheduler, name, odd, value)
            except KilburnError:
                assert not scheduler.jobs()


@pytest.mark.parametrize("priority", [math.nan, math.inf, -math.inf, "x", True, None, 1j])
def test_a_priority_is_a_finite_number(priority: Any) -> None:
    with Scheduler(Scripted(["x"])) as scheduler, pytest.raises(SpecError, match=r"Scheduler.model: priority=.*a finite number"):
        scheduler.model("a", priority=priority)


@pytest.mark.parametrize("value", ["\ud800", None, 5, b"x"])
def test_a_branch_is_begun_and_returned_from_with_text(store: Store, value: Any) -> None:
    session, before = store.session("a"), state(store)
    with pytest.raises(SpecError, match=r"Session.fork: prompt="):
        session.fork(value)
    branch = session.branches.open("b1")
    with pytest.raises(SpecError, match=r"Branches.exit: text="):
        branch.branches.exit(value)
    assert state(store) == before
    assert branch.branches.exit("done") == "p3"


def test_parts_in_a_wrong_order_are_named(store: Store) -> None:
    with pytest.raises(SpecError, match=r"Agent: session=a Store \(give Session\)"):
        Agent(Scripted(["x"]), [], store)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="Agent: tools="):
        Agent(Scripted(["x"]), store.session("a"), [])  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 5.5, ["x"], "\ud800", "a\x00b", object()])
def test_a_path_that_is_none(path: Any) -> None:
    with pytest.raises(SpecError, match="path="):
        kilburn.open(path)


def test_what_fits_goes_through(store: Store, tmp_path: Path) -> None:
    assert store.session("a").append(*({"role": "user", "content": f"{n}"} for n in range(20))) == "p3-p22"
    assert store.session("a").search("harbour", tokens=100, limit=1)
    assert store.search("harbour", where=iter(["sessions"]))
    with kilburn.open(tmp_path / "a.db", embedder=None) as other:  # type: ignore[arg-type]
        other.session("a")


class Whole:
    """A whole number of another library."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


class Text(str):
    pass


class Number(int):
    pass


@pytest.mark.parametrize("of", [Whole, Number])
def test_whole_numbers_of_other_libraries(store: Store, of: Any) -> None:
    assert Budget(of(1000), of(10)) == Budget(1000, 10)
    with kilburn.open(":memory:", window=of(500), tokenizer="chars/4", embedder=None) as other:
        assert type(other.session("a").prompts.budget.window) is int
    found = store.session("a").search("harbour", tokens=of(100), limit=of(5))
    assert [each.address for each in found] == ["p1"]
    assert store.session("a").contents.drop([of(2)]) == [2]
    assert (Limits(steps=of(3)), Share(tokens=of(3)), Quota(facts=of(3))) == (Limits(steps=3), Share(tokens=3), Quota(facts=3))
    assert type(Bounds(calls=of(3)).calls) is int
    assert type(Scheduler(Scripted(), at_once=of(2)).queue.at_once) is int


def test_fractions_are_numbers(store: Store) -> None:
    store.session("a").append({"role": "user", "content": "x"}, time=Fraction(3, 2))  # type: ignore[arg-type]
    assert store.session("a").contents.pages()[-1][0].time == 1.5
    assert (Limits(seconds=Fraction(3, 2)), Bounds(seconds=Fraction(3, 2))) == (Limits(seconds=1.5), Bounds(seconds=1.5))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="time="):
        store.session("a").append({"role": "user", "content": "x"}, time=10**400)


def test_text_of_another_class_is_written_as_text(store: Store) -> None:
    store.session("a").forget("p2", Text("not needed"))
    assert any("not needed" in str(event) for event in store.session("a").ledger.events())


@pytest.mark.parametrize("value", [None, [], {}, "", "yes", 2, 0.0])
def test_what_is_neither_true_nor_false(store: Store, value: Any) -> None:
    before = state(store)
    with pytest.raises(SpecError, match="dry="):
        store.forget(session="a", dry=value)
    assert state(store) == before


@pytest.mark.parametrize("page", [0, -1, 99, 2**63, 10**400])
def test_pages_that_are_not_there(store: Store, page: int) -> None:
    before = state(store)
    for ask in (store.session("a").contents.drop, store.session("a").contents.made_from):
        with pytest.raises(UnknownAddress):
            ask([page])
    number = store.session("a").number
    with pytest.raises(UnknownAddress):
        store.forget_pages({number: [page]})
    assert state(store) == before


NUMBERS = (math.nan, math.inf, -1, True, None, "5", "\ud800", [1], 10**400)


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_bounds_shares_and_limits_that_cannot_be(value: Any) -> None:
    for name in ("seconds", "total", "memory", "output"):
        with pytest.raises(SpecError):
            Bounds(**{name: value})
    for name in ("steps", "calls", "tokens", "seconds"):
        if value not in (None, 10**400):
            with pytest.raises(SpecError):
                Limits(**{name: value})
    for name in ("weight", "tokens"):
        if value not in (None, 10**400):
            with pytest.raises(SpecError):
                Scheduler(Scripted(), shares={"a": Share(**{name: value})})
    with pytest.raises(SpecError):
        Limits(seconds=10**400)


@pytest.mark.parametrize("value", [5, math.nan, b"x", ["x"], object()], ids=["int", "nan", "bytes", "list", "object"])
def test_odd_arguments_of_agents_and_sandboxes(store: Store, value: Any) -> None:
    before, session = state(store), store.session("a")
    for named in ({"parallel": value}, {"depth": value}, {"limits": value}, {"bounds": value}, {"sandbox": value}):
        if value != 5 or not {"parallel", "depth"} & {*named}:
            with pytest.raises(SpecError):
                RecursiveModel(Scripted(), session, **named)
    for named in ({"question": value}, {"source": value}, {"past": value}, {"watch": value}):
        if named.get("source") != b"x":
            with pytest.raises(SpecError):
                RecursiveModel(Scripted(), session).ask(**{"question": "why?", "source": "a text", **named})
    for named in ({"agents": value}, {"agents": [value]}):
        with pytest.raises(SpecError):
            Branching(Scripted(), [], session, **named)
    for name in ("name", "purpose", "inherit", "limits", "rights"):
        with pytest.raises(SpecError):
            SubAgent(**{name: value})
    for name in ("name", "calls", "files", "bounds", "batched", "setup"):
        with pytest.raises(SpecError):
            open_sandbox(**{name: value})
    assert state(store) == before

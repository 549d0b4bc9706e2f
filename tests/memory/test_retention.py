"""How long and how much: what a person tells, quotas, sweeps, pins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from clocked import Clocked
from kilburn import Store
from kilburn.budget import Budget
from kilburn.errors import Forgotten, KernelError, QuotaExceeded, SecretFound, SpecError
from kilburn.memory.quota import Quota, make_room, worth
from kilburn.memory.retention import sweep
from kilburn.move import Add, Retire
from kilburn.page import Place
from kilburn.search.dates import DAY

START = 1_000_000.0


class Clock:
    now = START

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[Store]:
    with Store(Clocked(tmp_path / "agent.db", clock), Budget(8000), "hybrid", tokenizer="chars/4", clock=clock) as opened:
        yield opened


def facts(store: Store, user: str = "ana", at: float | None = None) -> list[str]:
    memory = store.memory(user)
    return [memory.collection.contents.text(page.id) for page, _ in memory.pages(at)]


def test_what_is_told_is_there_at_once_and_ends_when_it_was_said(store: Store, clock: Clock) -> None:
    assert store.memory("ana").remember("Ana is in Rome", until=START + DAY, importance=0.5) == "p1"
    assert store.memory("ana").remember("Ana was in Oslo", since=START - 9 * DAY, until=START) == "p2"
    assert store.memory().remember("Everyone has a key") == "p1"
    assert facts(store) == ["Ana is in Rome"]
    assert facts(store, "") == ["Everyone has a key"]
    assert facts(store, at=START - DAY) == ["Ana was in Oslo"]
    clock.now += DAY
    assert facts(store) == []
    assert facts(store, at=START) == ["Ana is in Rome"]


def test_a_quota_refuses_and_names_the_counts(store: Store) -> None:
    quota = Quota(facts=2)
    for number in range(2):
        store.memory("ana").remember(f"fact {number}", quota=quota)
    with pytest.raises(QuotaExceeded, match="'ana' has 2 facts, 1 more are too many: 2 are allowed") as refused:
        store.memory("ana").remember("fact 2", quota=quota)
    assert (refused.value.unit, refused.value.have, refused.value.more, refused.value.limit) == ("facts", 2, 1, 2)
    assert facts(store) == ["fact 0", "fact 1"]
    assert store.memory("bob").remember("fact 0", quota=quota) == "p1"
    with pytest.raises(QuotaExceeded, match="tokens"):
        store.memory("ana").remember("word " * 100, quota=Quota(tokens=100))
    with pytest.raises(QuotaExceeded):
        store.memory("eve").remember("one", quota=Quota(facts=0, evict=True))


def test_what_is_retired_makes_room_and_so_does_what_the_same_change_retires(store: Store) -> None:
    quota = Quota(facts=1)
    store.memory("ana").remember("Ana lives in Porto", quota=quota)
    memory = store.memory("ana").collection
    change = make_room(quota, memory, [Add(text="Ana lives in Rome"), Retire(pages=(1,), refers=0)], START)
    assert memory.apply(*change) == ["p2"]
    with pytest.raises(QuotaExceeded):
        store.memory("ana").remember("a third", quota=quota)
    memory.apply(Retire(pages=(2,)))
    assert store.memory("ana").remember("a third", quota=quota) == "p3"


def test_an_evicting_quota_retires_the_least_valuable_and_says_so(store: Store, clock: Clock) -> None:
    store.memory("ana").remember("important", importance=0.9)
    store.memory("ana").remember("pinned", pin=True)
    store.memory("ana").remember("old")
    clock.now += 60 * DAY
    store.memory("ana").remember("new")
    quota = Quota(facts=4, evict=True)
    store.memory("ana").remember("newest", quota=quota)
    assert facts(store) == ["important", "pinned", "new", "newest"]
    memory = store.memory("ana")
    assert memory.collection.contents.text(3) == "old"
    event = next(event for event in memory.collection.ledger.events() if 3 in event.pages and event.act == "retire")
    assert event.why == "over the quota: the least valuable"
    memory.undo("p3")
    assert "old" in facts(store)
    with pytest.raises(QuotaExceeded):
        store.memory("ana").remember("x", quota=Quota(facts=1, evict=True))
    assert len(facts(store)) == 5


def test_what_is_proposed_counts_and_is_not_evicted(store: Store) -> None:
    session = store.session("s")
    session.append({"role": "user", "content": "hello"})
    cites = ((session.number, 1),)
    store.memory("ana").collection.apply(Add(text="planted", cites=cites), policy="learner", tainted=True)
    assert facts(store) == []
    with pytest.raises(QuotaExceeded):
        store.memory("ana").remember("mine", quota=Quota(facts=1, evict=True))


def test_worth_is_importance_or_recency() -> None:
    with kilburn.open(":memory:") as store:
        store.memory().remember("x", importance=0.3)
        ((page, state),) = store.memory().pages()
    assert worth(page, state, page.time) == 1.0
    assert worth(page, state, page.time + 30 * DAY) == pytest.approx(0.5)
    assert worth(page, state, page.time + 3000 * DAY) == 0.3
    assert worth(page, state, page.time - 9 * DAY) == 1.0


def test_a_sweep_forgets_what_has_been_over_for_longer_than_its_retention(store: Store, clock: Clock) -> None:
    store.memory("ana").remember("over soon", until=START + DAY)
    store.memory("bob").remember("over later", until=START + 20 * DAY)
    store.memory("ana").remember("for ever")
    store.memory("ana").remember("over and pinned", until=START + DAY, pin=True)
    memory = store.memory("ana").collection
    memory.apply(Add(text="made from it", sources=(1,)))
    memory.apply(Add(text="made from the pinned one", sources=(3,)))
    clock.now += 31 * DAY - 1
    assert sweep(store).receipt.pages == {}
    clock.now += 1
    dry = sweep(store, dry=True)
    assert dry.receipt.pages == {"@memory/ana": ("f1", "p1")}
    assert memory.contents.text(1) == "over soon"
    swept = sweep(store)
    assert swept.receipt.pages == dry.receipt.pages
    assert swept.receipt.places == {"facts": 2, "index entries": 2}
    assert swept.kept == {"@memory/ana": ("p3",)}
    with pytest.raises(Forgotten):
        memory.contents.text(1)
    assert memory.contents.text(3) == "over and pinned"
    assert any(event.act == "drop" and event.why == "over for longer than its retention" for event in memory.ledger.events())
    assert sweep(store).receipt.pages == {}
    assert sweep(store, "bob", retention=11 * DAY).receipt.pages == {"@memory/bob": ("p1",)}


def test_history_is_kept_unless_it_is_asked_for(store: Store, clock: Clock) -> None:
    store.memory("ana").remember("Ana lives in Porto")
    memory = store.memory("ana").collection
    memory.apply(Add(text="Ana lives in Rome"), Retire(pages=(1,), refers=0))
    clock.now += 9999 * DAY
    assert sweep(store).receipt.pages == {}
    assert facts(store, at=START) == ["Ana lives in Rome"]
    assert sweep(store, history=DAY).receipt.pages == {"@memory/ana": ("p1",)}
    assert facts(store) == ["Ana lives in Rome"]


@pytest.mark.parametrize("retention", [-1.0, float("nan")])
def test_a_retention_that_is_none_is_refused(store: Store, retention: float) -> None:
    with pytest.raises(SpecError):
        sweep(store, retention=retention)


@pytest.mark.parametrize("most", [-1, -100])
def test_a_quota_that_is_none_is_refused(most: int) -> None:
    with pytest.raises(SpecError):
        Quota(facts=most)


@pytest.mark.parametrize("text", ["", "  \n", "x" * 10_001, "\ud800"])
def test_a_text_that_is_no_fact_is_refused(store: Store, text: str) -> None:
    with pytest.raises((KernelError, SpecError)):
        store.memory("ana").remember(text)
    assert facts(store) == []


@pytest.mark.parametrize("times", [{"since": 2.0, "until": 1.0}, {"until": float("inf")}, {"importance": 1.5}])
def test_numbers_that_cannot_be_are_refused(store: Store, times: dict[str, float]) -> None:
    with pytest.raises((KernelError, SpecError)):
        store.memory("ana").remember("Ana is in Rome", **times)  # type: ignore[arg-type]


INJECTIONS = [
    '") or true or ("',
    "'; DROP TABLE page; --",
    "NEAR(a b) OR *",
    "a\x1b[2J\u202e",
    "%",
    "é😀",
    "../x",
    "{'$ne': null}",
]


@pytest.mark.parametrize("text", INJECTIONS)
def test_an_injection_is_only_a_text_and_only_a_name(store: Store, text: str) -> None:
    store.memory("bob").remember("Bob's secret")
    store.memory(text).remember(text)
    assert facts(store, text) == [text]
    assert facts(store, "bob") == ["Bob's secret"]
    assert store.memory(text).user == text
    assert sweep(store, text, retention=0, history=0).receipt.pages == {}


@pytest.mark.parametrize("user", [" ", "a\0b", "x" * 600, "\ud800"])
def test_a_name_of_no_user_is_refused(store: Store, user: str) -> None:
    with pytest.raises(SpecError):
        store.memory(user).remember("x")


def test_a_secret_is_never_written(tmp_path: Path, store: Store) -> None:
    pytest.importorskip("betterleaks")
    token = "ghp_" + "a8Kd93hFk20skLq8xZpWm4NbV7cRt1YuIoP5"
    with pytest.raises(SecretFound):
        store.memory("ana").remember(f"the token is {token}", secrets="refuse")
    store.memory("ana").remember(f"the token is {token}", secrets="redact")
    assert facts(store) == ["the token is [secret: github-pat]"]
    store.close()
    assert not any(token.encode() in file.read_bytes() for file in tmp_path.iterdir())


@settings(max_examples=25)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "pin", "retire", "forget"]), st.integers(1, 12), st.floats(0, 1)), max_size=30
    ),
    most=st.integers(0, 5),
    evict=st.booleans(),
)
def test_a_quota_holds_and_what_is_pinned_stays(steps: list[tuple[str, int, float]], most: int, evict: bool) -> None:
    quota, pinned = Quota(facts=most, evict=evict), set()
    with kilburn.open(":memory:", tokenizer="chars/4") as store:
        memory = store.memory("ana")
        for what, number, importance in steps:
            try:
                if what == "add":
                    store.memory("ana").remember(f"fact {number}", importance=importance, quota=quota)
                elif what == "pin":
                    memory.pin(f"p{number}")
                    pinned.add(number)
                elif what == "retire":
                    memory.collection.apply(Retire(pages=(number,)))
                else:
                    memory.forget(f"p{number}")
                    pinned.discard(number)
            except (QuotaExceeded, KernelError):
                pass
            here = {page.id: state for page, state in memory.pages()}
            assert len(here) <= most
            assert all(number in here or memory.collection.read(number)[1].at is Place.RETIRED for number in pinned)

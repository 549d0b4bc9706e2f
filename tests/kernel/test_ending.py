"""How sessions end: what the rules decide, and what is archived, forgotten and left alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clocked import Clocked
from effort import rounds
from kernel.talk import user
from kilburn import Store
from kilburn.backends.cold import new_place
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import ClockSkew, ClockWarning, Forgotten, SpecError, StoreCorrupt, StoreError
from kilburn.jobs.ending import (
    MOST_RECEIPTS,
    Coolness,
    Ending,
    KeptReceipt,
    SessionUse,
    TextUse,
    TimeToLive,
    cool,
    expire,
    keep_rule,
    kept_receipts,
    read_rule,
)
from kilburn.move import Add
from kilburn.page import digest_of
from kilburn.testing import FakeClock

DAY = 86_400.0


def long(words: str) -> str:
    return words + " " + " ".join(digest_of(f"{words} {number}") for number in range(20))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    pytest.importorskip("obstore")
    backend = Clocked(tmp_path / "a.db")
    backend.settings.put("cold", msgspec.json.encode(new_place(str(tmp_path / "cold"))).decode())
    with Store(backend, Budget(100_000), "hybrid", tokenizer="chars/4", clock=backend.clock) as made:
        yield made


def later(store: Store, days: float) -> None:
    assert isinstance(store.clock, FakeClock)
    store.clock.advance(days * DAY)


def test_the_rule_decides_by_the_times_that_it_is_given() -> None:
    rule = TimeToLive(archive=10.0, forget=20.0)
    stages = [rule.decide(SessionUse("s", 100.0), now) for now in (100.0, 109.9, 110.0, 119.9, 120.0, 1e9)]
    assert stages == [None, None, Ending.ARCHIVE, Ending.ARCHIVE, Ending.FORGET, Ending.FORGET]
    assert rule.decide(SessionUse("s", 100.0, "it is held"), 1e9) is None
    assert TimeToLive().decide(SessionUse("s", 0.0), 1e9) is None
    for wrong in ({"archive": -1.0}, {"archive": 2.0, "forget": 1.0}, {"forget": float("nan")}):
        with pytest.raises(SpecError):
            TimeToLive(**wrong)


Uses = st.lists(st.builds(TextUse, st.sampled_from("abc"), st.floats(0, 100), st.integers(0, 200), st.booleans()), max_size=12)


@given(Uses, st.floats(0, 100), st.integers(0, 200))
def test_a_text_is_as_warm_as_the_warmest_page_with_it(texts: list[TextUse], after: float, least: int) -> None:
    chosen = Coolness(after=after, least=least).choose(texts, 100.0)
    assert len(chosen) == len(set(chosen))
    for digest in {one.digest for one in texts}:
        same = [one for one in texts if one.digest == digest]
        cold = all(not one.held and 100.0 - one.used >= after for one in same)
        assert (digest in chosen) == (cold and max(one.tokens for one in same) >= least)


def test_a_session_is_archived_and_then_forgotten_with_what_was_made_from_it(store: Store) -> None:
    old, shared = store.session("old"), long("said in both")
    old.append(user(long("only here")), user(shared))
    fact = store.memory("ana").collection.apply(Add(text="Ana lives in Porto", cites=((old.number, 1),)))[0]
    later(store, 31)
    store.session("new").append(user(shared))
    rule = TimeToLive(archive=30 * DAY, forget=90 * DAY)
    assert expire(store, rule, dry=True).archived == ("old",)
    assert store.backend.contents.cold() == {}
    done = expire(store, rule)
    assert (done.archived, done.forgotten, done.moved.texts) == (("old",), (), 1)
    assert store.backend.contents.cold().keys() == {digest_of(long("only here"))}
    assert store.session("old").recall("p1") == long("only here")
    assert expire(store, rule).moved.texts == 0
    later(store, 60)
    done = expire(store, rule, dry=True)
    assert done.forgotten == ("old",)
    assert store.memory("ana").recall(fact) == "Ana lives in Porto"
    done = expire(store, rule)
    assert done.receipts[0].whole == ("old",)
    assert done.receipts[0].places["facts"] == 1
    assert [info.name for info in store.sessions()] == ["new"]
    assert store.backend.contents.cold().keys() <= {digest_of(shared)}
    assert store.backend.contents.scrub() == []


def test_use_begins_the_time_anew(store: Store) -> None:
    session = store.session("work")
    session.append(user("one"))
    later(store, 29)
    session.append(user("two"))
    later(store, 29)
    assert expire(store, TimeToLive(forget=30 * DAY)).forgotten == ()
    later(store, 2)
    assert expire(store, TimeToLive(forget=30 * DAY)).forgotten == ("work",)


def test_what_holds_a_session_is_said(store: Store) -> None:
    pinned = store.session("pinned")
    pinned.append({"role": "system", "content": "Be kind."}, user("keep this"))
    pinned.pin("p2")
    branched = store.session("branched")
    branched.append(user("look into it"))
    branch = branched.fork("a branch")
    branch.append(user("in the branch"))
    store.session("plain").append({"role": "system", "content": "Be kind."}, user("let it go"))
    later(store, 100)
    rule = TimeToLive(forget=30 * DAY)
    done = expire(store, rule)
    assert done.forgotten == ("plain",)
    assert dict(done.kept) == {"pinned": "a person pinned a page of it", "branched": "its branch 'branched/b1' is open"}
    branch.branches.exit("nothing")
    pinned.unpin("p2")
    assert expire(store, rule).kept == ()
    later(store, 100)
    assert set(expire(store, rule).forgotten) == {"pinned", "branched"}
    assert store.sessions() == []


class Interrupted(Clocked):
    """A store where something else happens after the first session is gone."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.then: list[Callable[[], object]] = []
        self.gone = False

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        super().erase(segment, wipe=wipe)
        self.gone = True

    @contextmanager
    def together(self, segments: Collection[int] = ()) -> Iterator[None]:
        with super().together(segments):
            yield
        while self.gone and self.then:
            self.then.pop()()


def test_who_comes_back_while_others_are_forgotten_is_not_forgotten(tmp_path: Path) -> None:
    backend = Interrupted(tmp_path / "b.db")
    with Store(backend, Budget(1000), "hybrid", tokenizer="chars/4", clock=backend.clock) as store:
        for name in ("first", "back", "pinned", "gone", "last"):
            store.session(name).append({"role": "system", "content": "Be kind."}, user(f"said in {name}"))
        later(store, 100)
        with Store(Sqlite(tmp_path / "b.db"), Budget(1000), "hybrid", tokenizer="chars/4", clock=store.clock) as other:
            backend.then = [
                lambda: other.session("back").append(user("I am back")),
                lambda: other.session("pinned").pin("p2"),
                lambda: other.forget(session="gone"),
            ]
            done = expire(store, TimeToLive(forget=30 * DAY))
            assert done.forgotten == ("first", "last")
            assert [receipt.whole for receipt in done.receipts] == [("first",), ("last",)]
            assert {info.name for info in other.sessions()} == {"back", "pinned"}
            assert other.session("back").recall("p2") == "said in back"


class Stepping(Clocked):
    """A store where something else happens before one of the calls to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.at, self.then = -1, lambda: None

    def __getattribute__(self, name: str) -> object:
        if name in ("segment", "segments", "events", "pages", "citing", "commit", "erase", "settings", "replace_setting"):
            self.at -= 1
            if self.at == 0:
                self.then()
        return super().__getattribute__(name)


def test_who_comes_back_before_it_is_begun_keeps_a_session_at_every_step(tmp_path: Path) -> None:
    came = {"kept": 0, "too late": 0}
    for step in range(1, 1000, rounds(3, 1)):
        path = tmp_path / f"{step}.db"
        backend = Stepping(path)
        with Store(backend, Budget(1000), "hybrid", tokenizer="chars/4", clock=backend.clock) as store:
            session = store.session("work")
            session.append(user("said before"))
            branch = session.fork("a branch")
            branch.append(user("in the branch"))
            branch.branches.exit("done")
            fact = store.memory("ana").collection.apply(Add(text="Ana lives in Porto", cites=((session.number, 1),)))[0]
            later(store, 100)
            begun: list[bool] = []

            def come_back(
                path: Path = path, clock: Callable[[], float] = backend.clock, begun: list[bool] = begun, step: int = step
            ) -> None:
                with Store(Sqlite(path), Budget(1000), "hybrid", tokenizer="chars/4", clock=clock) as other:
                    names = {info.name: info for info in other.sessions()}
                    name = ("work", "work/b1")[step % 2]
                    if name not in names:
                        return
                    begun.append(any(event.why for event in other.backend.events(names[name].number) if event.policy == "kernel"))
                    with suppress(Forgotten, StoreError):
                        other.session(name).append(user("I am back"))
                        return
                    begun.clear()

            backend.then, backend.at = come_back, step
            done = expire(store, TimeToLive(forget=30 * DAY))
            over, backend.at = backend.at > 0, -1
            if over:
                break
            if begun == [False]:
                assert done.forgotten == ()
                assert "work" in {info.name for info in store.sessions()}
                assert store.memory("ana").recall(fact) == "Ana lives in Porto"
                came["kept"] += 1
            else:
                came["too late"] += 1
        path.unlink()
    assert all(came.values()), came


def test_the_receipts_of_a_rule_are_kept_without_a_name(store: Store) -> None:
    rule = TimeToLive(forget=30 * DAY)
    numbers = []
    for name in ("heliotrope", "anemone"):
        store.session(name).append(user(f"the secret of {name}"))
        numbers.append(store.session(name).number)
        later(store, 100)
    (first, second) = (expire(store, rule), expire(store, rule))
    assert (len(first.receipts), second.receipts) == (2, ())
    kept = kept_receipts(store.backend)
    assert [(one.segment, one.whole, one.segments, one.places) for one in kept] == [
        (number, True, 1, receipt.places) for number, receipt in zip(numbers, first.receipts, strict=True)
    ]
    assert not {"heliotrope", "anemone"} & set(re.findall("[a-z]+", store.backend.settings.all()["receipts"]))
    assert expire(store, rule, dry=True).receipts == ()
    store.backend.settings.put("receipts", "nonsense")
    assert kept_receipts(store.backend) == []
    older = [KeptReceipt(segment=1000 + number, time=1.0) for number in range(MOST_RECEIPTS)]
    store.backend.settings.put("receipts", msgspec.json.encode(older).decode())
    number = store.session("more").number
    store.session("more").append(user("x"))
    later(store, 100)
    expire(store, rule)
    assert [one.segment for one in kept_receipts(store.backend)] == [*(one.segment for one in older[1:]), number]


def test_a_receipt_of_what_a_kill_broke_off_says_that_it_was_begun(tmp_path: Path) -> None:
    backend = Interrupted(tmp_path / "b.db")
    with Store(backend, Budget(1000), "hybrid", tokenizer="chars/4", clock=backend.clock) as store:
        number = store.session("work").number
        store.session("work").append(user("one"))
        later(store, 100)

        def killed() -> None:
            raise KeyboardInterrupt

        backend.then = [killed]
        with pytest.raises(KeyboardInterrupt):
            expire(store, TimeToLive(forget=30 * DAY))
        assert kept_receipts(backend) == [KeptReceipt(segment=number, time=kept_receipts(backend)[0].time)]


@pytest.mark.parametrize("inherited", [False, True])
def test_a_page_that_a_person_pinned_in_a_branch_keeps_its_session(store: Store, inherited: bool) -> None:
    session = store.session("work")
    session.append(user("one"), user("two"))
    branch = session.fork("a branch")
    branch.append(user("in the branch"))
    page = "p1" if inherited else f"p{branch.window.last}"
    branch.pin(page)
    branch.branches.exit("done")
    later(store, 100)
    rule = TimeToLive(forget=30 * DAY)
    done = expire(store, rule)
    assert (done.forgotten, dict(done.kept)) == ((), {"work": "a person pinned a page of its branch 'work/b1'"})
    store.session("work/b1").unpin(page)
    assert expire(store, rule).kept == ()
    later(store, 100)
    assert expire(store, rule).forgotten == ("work",)
    assert store.sessions() == []


def test_a_branch_in_use_keeps_its_session(store: Store) -> None:
    session = store.session("work")
    session.append(user("one"))
    branch = session.fork("a branch")
    branch.append(user("in the branch"))
    branch.branches.exit("done")
    later(store, 100)
    store.session("work/b1").append(user("goes on"))
    assert expire(store, TimeToLive(forget=30 * DAY)).forgotten == ()


def test_without_a_cold_place_nothing_is_archived(tmp_path: Path) -> None:
    backend = Clocked(tmp_path / "b.db")
    with Store(backend, Budget(1000), "hybrid", tokenizer="chars/4", clock=backend.clock) as store:
        store.session("old").append(user("one"))
        later(store, 100)
        with pytest.raises(SpecError, match="no cold place"):
            expire(store, TimeToLive(archive=DAY))
        assert store.session("old").recall("p1") == "one"


def test_the_rule_of_a_tenant_is_kept(store: Store) -> None:
    assert read_rule(store.backend) is None
    keep_rule(store.backend, TimeToLive(archive=1.0, forget=2.0))
    assert read_rule(store.backend) == TimeToLive(archive=1.0, forget=2.0)
    store.backend.settings.put("retention", '{"archive": "soon"}')
    with pytest.raises(StoreCorrupt, match="sessions rule"):
        read_rule(store.backend)
    keep_rule(store.backend, None)
    assert read_rule(store.backend) is None


def test_texts_go_by_age_and_use(store: Store) -> None:
    session = store.session("work")
    session.append(*(user(long(f"page {number}")) for number in range(6)))
    later(store, 40)
    session.recall("p2")
    session.append(user(long("today")))
    store.memory("ana").collection.add(long("a fact"))
    rule = Coolness(after=30 * DAY)
    # The window of a session in use stays as it is.
    assert cool(store, rule, dry=True).texts == 0
    session.edits.evict("p2-p4")
    moved = cool(store, rule)
    cold = store.backend.contents.cold()
    assert moved.texts == len(cold) > 0
    assert digest_of(long("page 1")) not in cold
    assert digest_of(long("today")) not in cold
    assert [session.recall(f"p{number + 1}") for number in range(6)] == [long(f"page {number}") for number in range(6)]
    later(store, 40)
    assert cool(store, rule).texts > 0


def test_no_rule_decides_by_a_clock_that_is_an_hour_off(store: Store) -> None:
    store.session("work").append(user("one"))
    later(store, 1)
    database = store.clock
    store.clock = lambda: database() + 40 * DAY
    with pytest.raises(ClockSkew, match="differ by 3,45"):
        expire(store, TimeToLive(forget=30 * DAY))
    with pytest.raises(ClockSkew):
        cool(store, Coolness(after=30 * DAY))
    store.clock = lambda: database() + 90
    with pytest.warns(ClockWarning, match="more than a minute"):
        assert expire(store, TimeToLive(forget=30 * DAY)).forgotten == ()
    assert store.session("work").recall("p1") == "one"


def test_a_session_written_to_by_a_wrong_clock_ends_when_its_time_is_over(store: Store) -> None:
    clock, rule = store.clock, TimeToLive(forget=30 * DAY)
    assert isinstance(clock, FakeClock)
    for name in ("last", "between"):
        store.session(name).append(user("one"))
    clock.now += 70 * 365 * DAY
    for name in ("last", "between"):
        store.session(name).append(user("two"))
    clock.now -= 70 * 365 * DAY
    store.session("between").append(user("three"))
    later(store, 29)
    # Nobody knows when the first was really used: it counts from here.
    assert expire(store, rule, dry=True).forgotten == expire(store, rule).forgotten == ()
    later(store, 2)
    assert expire(store, rule).forgotten == ("between",)
    later(store, 26)
    assert expire(store, rule).forgotten == ()
    later(store, 3)
    assert expire(store, rule).forgotten == ("last",)


def test_a_message_dated_in_the_future_is_no_use_of_its_session(store: Store) -> None:
    session = store.session("work")
    session.append(user(long("plain")), time=store.clock() + 70 * 365 * DAY)
    later(store, 31)
    assert cool(store, Coolness(after=30 * DAY)).texts == 1
    assert expire(store, TimeToLive(forget=30 * DAY)).forgotten == ("work",)

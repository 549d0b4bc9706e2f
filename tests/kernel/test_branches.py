"""Branches: what they see, that nothing is copied or mixed up, what their return is, and that forgetting reaches them."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from effort import rounds
from kernel.talk import assistant, call_of, tool, user
from kilburn import Store
from kilburn.backend import Batch, SegmentInfo
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store, repair_store
from kilburn.budget import Budget
from kilburn.errors import (
    Forgotten,
    KernelError,
    KilburnError,
    LawBroken,
    OrphanResult,
    PinsExceedWindow,
    SpecError,
    StoreCorrupt,
    StoreStale,
    UnknownAddress,
)
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.memory import memory_tools
from kilburn.memory.view import MemoryView
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.move import Add, Bring, Evict
from kilburn.search.found import DamageWarning
from kilburn.testing import FakeClock, check_laws
from kilburn.wire.validity import validate_chat, validate_messages

Opener = Callable[..., Store]


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store, again and again."""
    kept, made = Sqlite(":memory:"), list[Store]()

    def open_it(window: int = 600, policy: str = "hybrid") -> Store:
        if request.param == "memory":
            return Store(kept, Budget(window), policy, tokenizer="chars/4", clock=FakeClock())
        made.append(kilburn.open(str(tmp_path / "a.db"), window=window, policy=policy, tokenizer="chars/4"))
        return made[-1]

    yield open_it
    for each in made:
        each.close()


def reads(session: Session, first: int, last: int, words: str = "line") -> None:
    for number in range(first, last):
        session.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", f"{words} {number}\n" * 20))


def begun(store: Store, name: str = "work") -> Session:
    session = store.session(name)
    session.append({"role": "system", "content": "You fix bugs."}, user("Fix the parser."))
    reads(session, 0, 12)
    return session


def test_a_branch_sees_what_its_parent_saw_and_the_parent_does_not_notice(opener: Opener) -> None:
    parent = begun(opener())
    before, pages = parent.render(), len(parent.window.pages)
    branch = parent.fork("look into the lexer")
    assert branch.name == "work/b1"
    assert branch.render()[: len(before)] == before
    assert branch.render()[-1] == user("look into the lexer")
    reads(branch, 20, 40, "other")
    branch.forget("p30")
    check_laws(branch)
    check_laws(parent)
    assert branch.recall("p4") == parent.recall("p4")
    assert parent.render() == before
    assert len(parent.window.pages) == pages
    parent.append(user("and now?"))
    assert "and now?" not in json.dumps(branch.render())
    assert branch.contents.messages()[:26] == parent.contents.messages()[:26]


def test_nothing_is_copied(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    rows = {info.name: info.pages for info in store.sessions()}
    parent.fork("look")
    assert {info.name: info.pages for info in store.sessions()} == rows | {"work/b1": 1}


def test_a_branch_is_the_same_after_reopening(opener: Opener) -> None:
    parent = begun(opener())
    branch = parent.fork("look")
    reads(branch, 20, 30, "other")
    branch.pin("p3")
    nested = branch.fork("deeper")
    reads(nested, 40, 50, "deep")
    reads(parent, 60, 80, "later")
    again = opener().session("work").branches.open("b1/b1")
    assert again.render() == nested.render()
    assert again.window.states == nested.window.states
    check_laws(again)
    assert [again.recall(page) for page in ("p4", "p30", f"p{again.window.last}")] == [
        nested.recall(page) for page in ("p4", "p30", f"p{nested.window.last}")
    ]


def test_the_return_stands_for_the_branch_and_can_be_opened(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    parent.append(assistant(None, call_of("x")))
    branch = parent.fork("look", call="x")
    validate_chat(branch.render())
    validate_messages(branch.render("messages"))
    reads(branch, 20, 24, "canary")
    assert branch.branches.returned() is None
    address = branch.branches.exit("the lexer drops a line")
    assert branch.branches.returned() == address
    page = parent.window.pages[parent.window.last]
    assert page.trust is Trust.TOOL
    assert {segment for segment, _ in page.cites} == {branch.number}
    assert parent.render()[-1]["content"] == "the lexer drops a line\n[b1: b1/p28-p37]"
    assert "canary 21" in parent.recall("b1/p28-p37")
    hits = parent.search("canary 22")
    assert hits[0].session == "work/b1"
    told = memory_tools.call(parent, "search_memory", '{"query": "canary 22"}')
    assert f"b1/{hits[0].address} " in told.text
    assert (branch.number, int(hits[0].address[1:])) in told.cites
    check_laws(parent)
    with pytest.raises(KernelError, match="returned already"):
        branch.branches.exit("again")


def test_a_branch_finds_its_own_words_and_its_parents_but_none_that_came_later(opener: Opener) -> None:
    parent = begun(opener())
    branch = parent.fork("look")
    reads(parent, 60, 64, "zebra")
    reads(branch, 20, 24, "heron")
    assert {hit.session for hit in branch.search("heron")} == {"work/b1"}
    assert branch.search("zebra") == []
    found = branch.search("line 7")
    assert found
    assert all(hit.text in branch.recall(hit.address) for hit in found)
    assert not {hit.address for hit in parent.search("zebra")} & {hit.address for hit in branch.search("zebra")}


@pytest.mark.parametrize("inherit", ["task", "nothing"])
def test_less_can_be_inherited(opener: Opener, inherit: str) -> None:
    parent = begun(opener())
    branch = parent.fork("look", inherit=inherit)
    shown = [message["content"] for message in branch.render()]
    assert shown == (["You fix bugs.", "Fix the parser.", "look"] if inherit == "task" else ["look"])
    with pytest.raises(UnknownAddress):
        branch.recall("p9")
    branch.append(assistant("done"))
    branch.branches.exit("it is fine")
    assert parent.render()[-1]["content"] == f"it is fine\n[b1: b1/p1-p{len(shown) + 1}]"


def test_parallel_branches_return_in_any_order(opener: Opener) -> None:
    parent = begun(opener())
    parent.append(assistant(None, call_of("x"), call_of("y")))
    first, second = parent.fork("left", call="x"), parent.fork("right", call="y")
    for branch in (first, second):
        validate_chat(branch.render())
        branch.append(assistant("looked"))
    second.branches.exit("right is fine")
    first.branches.exit("left is fine")
    validate_chat(parent.render())
    assert [info.name for info, _ in parent.branches.children()] == ["work/b1", "work/b2"]
    check_laws(parent)


def test_forgetting_reaches_branches(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    branch = parent.fork("look")
    reads(branch, 20, 24, "other")
    nested = branch.fork("deeper")
    gone = parent.forget("p4")
    assert {"p4", "work/b1 p4", "work/b1/b1 p4"} <= {*gone}
    for each in (parent, branch, nested):
        with pytest.raises(Forgotten):
            each.recall("p4")
        assert "line 0" not in json.dumps(each.render())
        check_laws(each)
    nested.append(assistant("looked"))
    nested.branches.exit("it is fine")
    branch.branches.exit("all is fine")
    assert "work/b1" in store.forget(session="work").whole
    assert not store.sessions()
    with pytest.raises(KilburnError):
        branch.append(user("still here"))


def test_pages_of_a_branch_are_forgotten_by_the_address_that_recalls_them(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    branch = parent.fork("look")
    reads(branch, 20, 24, "other")
    nested = branch.fork("deeper")
    reads(nested, 30, 31, "third")
    one, two, three = (f"b1/p{branch.branches.forked.known + at}" for at in (3, 5, 6))  # type: ignore[union-attr]
    deep = f"b1/b1/p{nested.window.last}"
    nested.edits.apply(Bring(((int(one[4:]), ((0, 9),)),)))
    assert "other 20" in parent.recall(one)
    assert ("work/b1", one[3:]) in [(name, page.address) for name, page in parent.contents.closure(one)]
    assert {name for name, _ in parent.contents.closure(one)} == {"work/b1", "work/b1/b1"}
    assert {f"work/b1 {one[3:]}", f"work/b1/b1 {one[3:]}"} <= {*parent.forget(one)}
    assert f"{two[3:]}-{three[3:]}" in store.forget(session="work", address=f"{two}-{three[3:]}").pages["work/b1"]
    assert f"work/b1/b1 {deep[6:]}" in parent.forget(deep)
    for address in (one, f"{two}-{three[3:]}", deep):
        with pytest.raises(Forgotten):
            parent.recall(address)
    for nothing in ("b2/p1", "b1/p999", "b1/", "/p1", "b1/p3-b1/p4", "b1/b9/p1", "work/p1"):
        with pytest.raises(UnknownAddress):
            parent.forget(nothing)
    assert "line 0" in parent.recall("p4")
    for each in (parent, branch, nested):
        check_laws(each)


@pytest.mark.parametrize("whole", [False, True])
def test_a_branch_forgets_what_it_inherited_everywhere(opener: Opener, whole: bool) -> None:
    store = opener()
    parent = begun(store)
    branch = parent.fork("look")
    nested = branch.fork("deeper")
    if whole:
        store.forget(session=nested.name, address="p4")
    else:
        assert {"p4", "work p4", "work/b1 p4"} <= {*nested.forget("p4")}
    for each in (parent, branch, nested):
        with pytest.raises(Forgotten):
            each.recall("p4")
        check_laws(each)


def test_what_was_returned_goes_with_what_it_was_made_from(opener: Opener) -> None:
    parent = begun(opener())
    branch = parent.fork("look")
    reads(branch, 20, 22, "canary")
    address = branch.branches.exit("canary 20 is it")
    gone = branch.forget("p28")
    assert f"work {address}" in gone
    assert "canary 20 is it" not in json.dumps(parent.render())


def test_a_branch_outlives_its_parent_with_a_typed_error(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    parent.append(assistant(None, call_of("x")))
    branch = parent.fork("look", call="x", inherit="nothing")
    branch.append(assistant("looked"))
    parent.append(tool("x", "never mind"))
    with pytest.raises(OrphanResult):
        branch.branches.exit("late")
    assert branch.branches.returned() is None
    store.forget(session="work")
    with pytest.raises(KilburnError):
        branch.branches.exit("later")


def test_what_cannot_be_forked_leaves_nothing_behind(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    for wrong in ({"call": "nobody"}, {"call": "c3"}):
        with pytest.raises(KernelError):
            parent.fork("look", **wrong)
    with pytest.raises(SpecError):
        parent.fork("look", inherit="everything")
    with pytest.raises(UnknownAddress):
        parent.branches.open("b1")
    store.session("work/b1").append(user("another session, which is no branch"))
    for path in ("b1", "../work", "b1/p1", ""):
        with pytest.raises(UnknownAddress):
            parent.branches.open(path)
    assert parent.fork("look").name == "work/b2"
    with pytest.raises(KernelError):
        parent.branches.exit("it is no branch")
    assert [info.name for info in store.sessions()] == ["work", "work/b1", "work/b2"]


def test_a_branch_that_does_not_fit_is_not_begun(opener: Opener) -> None:
    store = opener(window=100)
    parent = store.session("work")
    parent.append(user("go"), user("x" * 300))
    parent.pin("p2")
    parent.append(user("and now?"))
    before = parent.render()
    with pytest.raises(PinsExceedWindow):
        parent.fork("y" * 96)
    assert [info.name for info in store.sessions()] == ["work"]
    assert parent.render() == before
    parent.fork("look")


def test_threads_fork_at_once(opener: Opener) -> None:
    parent = begun(opener())
    made: list[Session] = []
    threads = [threading.Thread(target=lambda number=number: made.append(parent.fork(f"part {number}"))) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(branch.name for branch in made) == [f"work/b{number}" for number in range(1, 9)]
    for branch in made:
        check_laws(branch)


STEPS = st.lists(
    st.tuples(st.sampled_from(["say", "read", "fork", "exit", "forget", "pin", "reopen"]), st.integers(0, 30)), max_size=40
)


@settings(max_examples=rounds(25, 60))
@given(steps=STEPS, policy=st.sampled_from(["fifo", "hybrid", "summarize"]))
def test_any_family_of_branches_keeps_the_laws(steps: list[tuple[str, int]], policy: str) -> None:
    kept, clock = Sqlite(":memory:"), FakeClock()

    def opened() -> Store:
        return Store(kept, Budget(300), policy, tokenizer="chars/4", clock=clock)

    store = opened()
    store.session("work").append(user("begin"))
    for said, (what, number) in enumerate(steps):
        names = [info.name for info in store.sessions()]
        session = store.session(names[number % len(names)])
        if what == "say":
            session.append(user(f"{said} " + "word " * number))
        elif what == "read":
            session.append(assistant(None, call_of(f"c{said}")), tool(f"c{said}", f"line {said}\n" * number))
        elif what == "fork" and len(names) < 6:
            session.fork(f"part {said}", inherit=["history", "history", "task", "nothing"][number % 4])
        elif what == "exit" and session.branches.forked is not None and session.branches.returned() is None:
            session.branches.exit(f"result {said}")
        elif what == "pin":
            with suppress(Forgotten, LawBroken):
                session.pin(f"p{1 + number % session.window.last}")
        elif what == "forget":
            with suppress(Forgotten, LawBroken):
                session.forget(f"p{1 + number % session.window.last}")
        elif what == "reopen":
            store = opened()
    for info in store.sessions():
        check_laws(store.session(info.name))
        check_laws(opened().session(info.name))


class Meeting(Sqlite):
    """A store in which another program does something right before the next commit or session, or the next erasure."""

    def __init__(self) -> None:
        super().__init__(":memory:")
        self.before_commit: Callable[[], object] | None = None
        self.before_erase: Callable[[], object] | None = None

    def _meet(self) -> None:
        meanwhile, self.before_commit = self.before_commit, None
        if meanwhile is not None:
            meanwhile()

    def commit(self, segment: int, batch: Batch) -> None:
        self._meet()
        super().commit(segment, batch)

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> SegmentInfo:
        self._meet()
        return super().begin(name, batch, time=time, user=user)

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        meanwhile, self.before_erase = self.before_erase, None
        if meanwhile is not None:
            meanwhile()
        super().erase(segment, wipe=wipe)


def two_programs() -> tuple[Meeting, Store, Store]:
    kept = Meeting()
    first, second = (Store(kept, Budget(600), "hybrid", tokenizer="chars/4", clock=FakeClock()) for _ in range(2))
    begun(first)._kernel.flush()
    return kept, first, second


def test_a_page_that_goes_while_a_branch_begins_is_gone_in_the_branch() -> None:
    kept, first, second = two_programs()
    kept.before_commit = lambda: second.session("work").forget("p4")
    branch = first.session("work").fork("look")
    with pytest.raises(Forgotten):
        branch.recall("p4")
    check_laws(branch)
    assert [info.number for info, _ in first.session("work").branches.children()] == [branch.number]


def test_a_branch_that_begins_while_a_page_goes_loses_it_too() -> None:
    kept, first, second = two_programs()
    kept.before_commit = lambda: second.session("work").fork("look")
    first.session("work").forget("p4")
    for store in (first, second, Store(kept, Budget(600), "hybrid", tokenizer="chars/4", clock=FakeClock())):
        branch = store.session("work").branches.open("b1")
        with pytest.raises(Forgotten):
            branch.recall("p4")
        check_laws(branch)


def test_what_a_crash_left_in_a_branch_is_forgotten_when_it_is_opened() -> None:
    kept, first, second = two_programs()
    kept.before_commit = lambda: second.session("work").fork("look")
    # The second half of the forgetting never comes.
    first.session("work").contents.drop([4])
    branch = Store(kept, Budget(600), "hybrid", tokenizer="chars/4", clock=FakeClock()).session("work/b1")
    with pytest.raises(Forgotten):
        branch.recall("p4")
    check_laws(branch)


def test_what_a_branch_returned_goes_when_it_is_opened_if_it_was_made_from_what_is_gone() -> None:
    kept, first, second = two_programs()
    branch = second.session("work").fork("look")
    branch.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="line 0 it is"),), sources=(4,)))
    branch.branches.exit("it is fine")
    # Only a crash leaves it so: the parent has let go of the page, and the branch has not.
    first.session("work").contents.drop([4])
    again = Store(kept, Budget(600), "hybrid", tokenizer="chars/4", clock=FakeClock())
    assert len(again.session("work/b1").render()) > 20
    for name in ("work", "work/b1"):
        assert "line 0 it is" not in json.dumps(again.session(name).contents.messages())
        check_laws(again.session(name))


def test_a_branch_takes_the_next_name_if_another_program_took_its_own() -> None:
    kept, first, second = two_programs()
    kept.before_commit = lambda: second.session("work/b1").append(user("mine"))
    assert first.session("work").fork("look").name == "work/b2"
    assert [info.name for info, _ in second.session("work").branches.children()] == ["work/b2"]


def test_a_branch_begins_however_often_other_programs_take_its_name() -> None:
    kept, first, second = two_programs()

    def fork_first() -> None:
        taken = len(second.session("work").branches.children())
        second.session("work").fork("mine")
        kept.before_commit = fork_first if taken < 9 else None

    kept.before_commit = fork_first
    assert first.session("work").fork("look").name == "work/b11"
    assert len(second.session("work").branches.children()) == 11


def test_no_cache_keeps_what_was_forgotten() -> None:
    _, first, second = two_programs()
    parent = first.session("work")
    branch = parent.fork("look")
    digests = []
    for text in ("forgotten here", "forgotten by another program"):
        parent.append(user(text))
        digests.append(parent.window.pages[parent.window.last].digest)
    # The cache is full: another table takes its place.
    parent._kernel.contents._limit = 0
    parent.append(user("and now?"))
    parent.forget(f"p{parent.window.last - 2}")
    second.session("work").forget(f"p{parent.window.last - 1}")
    parent.ledger.refresh()
    for session in (branch, parent):
        for digest in digests:
            with pytest.raises(StoreCorrupt):
                session._kernel.contents.get(digest)


def test_a_fork_that_is_interrupted_leaves_nothing() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    kept, first, second = two_programs()
    kept.before_commit = interrupt
    with pytest.raises(KeyboardInterrupt):
        first.session("work").fork("look")
    assert [info.name for info in second.sessions()] == ["work"]
    assert first.session("work").fork("look").name == "work/b1"


def test_what_was_begun_and_let_go_is_freed_at_once() -> None:
    store = Store(Sqlite(":memory:"), Budget(600), "fifo", tokenizer="chars/4")
    branch = begun(store).fork("look")
    branch.branches.exit("fine")
    kernel = weakref.ref(branch._kernel)
    gc.disable()
    try:
        del branch
        assert kernel() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["before_commit", "before_erase"])
@pytest.mark.parametrize("inherit", ["history", "nothing"])
def test_no_branch_outlives_the_forgetting_of_what_it_forks_from(when: str, inherit: str) -> None:
    kept, first, second = two_programs()
    setattr(kept, when, lambda: second.session("work").fork("look", inherit=inherit))
    first.forget(session="work")
    assert not first.sessions()
    kept, first, second = two_programs()
    kept.before_commit = lambda: second.forget(session="work")
    with pytest.raises(StoreStale):
        first.session("work").fork("look", inherit=inherit)
    assert not first.sessions()


def test_forgetting_a_session_spares_what_only_has_a_name_like_its_branches(opener: Opener) -> None:
    store = opener()
    begun(store).fork("look").fork("deeper")
    others = ("work/backup", "work/b7", "work/b1/notes", "work/bob/b1")
    for name in others:
        store.session(name).append(user("another matter"))
    assert set(store.forget(session="work").whole) == {"work", "work/b1", "work/b1/b1"}
    assert [info.name for info in store.sessions()] == list(others)


def test_branches_are_found_beside_one_that_is_gone(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    for number in range(3):
        reads(parent.fork("look"), 20 + number, 21 + number, "heron")
    store.forget(session="work/b1")
    assert [info.name for info, _ in parent.branches.children()] == ["work/b2", "work/b3"]
    assert {hit.session for hit in parent.search("heron")} == {"work/b2", "work/b3"}
    assert {info.name for info in opener().session("work").branches.below()} == {"work/b2", "work/b3"}


def test_a_branch_returns_once_even_if_its_first_page_is_gone(opener: Opener) -> None:
    parent = begun(opener())
    branch = parent.fork("look")
    branch.append(assistant("looked"))
    branch.forget(f"p{parent.window.last + 1}")
    address = branch.branches.exit("it is fine")
    assert branch.branches.returned() == address
    with pytest.raises(KernelError, match="returned already"):
        branch.branches.exit("it is still fine")


def test_a_branch_returns_without_what_another_program_forgot(opener: Opener) -> None:
    parent = begun(opener())
    branch = parent.fork("look")
    reads(branch, 20, 22, "heron")
    gone = branch.window.last
    opener().session("work/b1").forget(f"p{gone}")
    branch.branches.exit("it is fine")
    assert gone not in {page for _, page in parent.window.pages[parent.window.last].cites}


def test_no_ledger_quotes_what_a_branch_inherited_and_is_forgotten(tmp_path: Path) -> None:
    store = kilburn.open(str(tmp_path / "a.db"), window=4000, policy="fifo", tokenizer="chars/4")
    parent = begun(store)
    branch = parent.fork("look")
    nested = branch.fork("deeper")
    branch.edits.apply(Evict((4,), why="it says heronry"))
    nested.ledger.record(Act.NOTE, [4], policy="user", why="it says heronry", quoted=parent.window.pages[4].digest)
    store.close()
    store = kilburn.open(str(tmp_path / "a.db"), window=4000, policy="fifo", tokenizer="chars/4")
    digest = store.session("work").window.pages[4].digest
    store.session("work/b1").forget("p4")
    for each in ("work", "work/b1", "work/b1/b1"):
        assert not any("heronry" in event.why or digest in str(event.data) for event in store.session(each).ledger.events())
        check_laws(store.session(each))
    store.close()
    assert b"heronry" not in b"".join(path.read_bytes() for path in tmp_path.iterdir())


def test_the_receipt_names_the_places_and_the_exports_of_branches_too(opener: Opener) -> None:
    store = opener()
    branch = begun(store).fork("look")
    erased: list[int] = []
    branch.erasers["spill"] = erased.extend
    branch.ledger.record(Act.NOTE, policy="user", export="copy.jsonl", last=branch.window.last)
    branch._kernel.flush()
    receipt = store.forget(session="work", address="p4")
    assert (receipt.told, [export.to for export in receipt.exports]) == (("spill",), ["copy.jsonl"])
    assert erased == [4]


def test_the_task_has_the_whole_system_prompt_of_which_the_parent_shows_an_excerpt(opener: Opener) -> None:
    parent = opener().session("work")
    parent.append({"role": "system", "content": "You fix bugs. " * 200}, user("Fix the parser."))
    branch = parent.fork("look", inherit="task")
    assert branch.recall("p1") == "You fix bugs. " * 200
    assert branch.window.pages[1].cites == ((parent.number, 1),)
    check_laws(branch)


def test_a_fact_that_is_learned_in_a_branch_cites_what_was_said_before_it(opener: Opener) -> None:
    class Names:
        def plan(self, view: MemoryView) -> list[Add]:
            return [Add(text="The user is Ana.", cites=tuple(said.cite for said in (*view.earlier, *view.new)))]

    store = opener()
    parent = store.session("work", user="ana")
    parent.append(user("I am Ana."), assistant("Hello."))
    branch = parent.fork("Where do I live?")
    branch.append(assistant("You did not say."))
    assert store.memory("ana").learn(branch, Names()).stored == ("f1",)
    parent.forget("p1")
    with pytest.raises(Forgotten):
        store.memory("ana").recall("f1")


def test_a_damaged_branch_blocks_no_other_session(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, window=4000, policy="fifo", tokenizer="chars/4") as store:
        begun(store).fork("look")
        begun(store, "other")
    damage = apsw.Connection(path)
    damage.execute("UPDATE event SET body = x'00' WHERE number = 1 AND segment = 2")
    damage.close()
    with kilburn.open(path, window=4000, policy="fifo", tokenizer="chars/4") as store:
        with pytest.warns(DamageWarning, match="work/b1"):
            assert store.session("work").search("line 7")
        with pytest.raises(StoreCorrupt, match="work/b1"):
            # It may have inherited the page, and nobody can say.
            store.session("work").forget("p4")
        assert store.session("other").forget("p4") == ["p4"]
        assert store.forget(session="other").whole == ("other",)
    with Sqlite(path) as raw:
        # A note instead of it would make the branch a session without what it inherited.
        assert [finding.derived for finding in inspect_store(raw)] == [False]
        assert [finding.derived for finding in repair_store(raw)] == [False]


def test_a_branch_without_the_ledger_that_it_forked_from_is_damaged() -> None:
    kept = Sqlite(":memory:")
    store = Store(kept, Budget(4000), "fifo", tokenizer="chars/4", clock=FakeClock())
    parent = begun(store)
    parent.fork("look")
    kept.commit(parent.number, Batch(head=parent.ledger.head, erase=[*parent.window.pages]))
    kept.erase(parent.number)
    with pytest.raises(StoreCorrupt, match="what session 'work/b1' forked from is gone"):
        Store(kept, Budget(4000), "fifo", tokenizer="chars/4", clock=FakeClock()).session("work/b1")


CANARY, LOST = "heronry", "p27"


class Dying(Sqlite):
    """A store whose program is killed after so many commits; it counts those that are left."""

    left = sys.maxsize

    def commit(self, segment: int, batch: Batch) -> None:
        super().commit(segment, batch)
        self._one_less()

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        super().erase(segment, wipe=wipe)
        self._one_less()

    def _one_less(self) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def in_file(path: Path) -> Store:
    return Store(Dying(path), Budget(4000), "fifo", tokenizer="chars/4", clock=FakeClock())


def talked(path: Path) -> None:
    """A session whose p27 is made into something by two branches, one below the other, and by what they return."""
    with in_file(path) as store:
        parent = begun(store)
        parent.append(user(f"the {CANARY} is at the lake"))
        page = parent.window.last
        branch = parent.fork("look")
        branch.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=f"a {CANARY}, I see"),), sources=(page,)))
        nested = branch.fork("deeper")
        nested.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=f"the {CANARY} again"),), sources=(page,)))
        nested.branches.exit(f"a {CANARY} below")
        branch.branches.exit(f"it is a {CANARY}")
        assert page == int(LOST.removeprefix("p"))


def die_in(work: Callable[[Store], object], path: Path, commits: int) -> bool:
    """Do it in a program of its own, which is killed after so many commits; whether it was."""
    child = os.fork()
    if not child:
        try:
            store = in_file(path)
            assert isinstance(store.backend, Dying)
            store.backend.left = commits
            work(store)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("asked", ["work", "work/b1", "work/b1/b1"])
def test_a_forgetting_that_was_killed_is_finished_when_asked_again(tmp_path: Path, asked: str) -> None:
    for commits in range(1, 20):
        path = tmp_path / f"{commits}.db"
        talked(path)
        if not die_in(lambda store: store.session(asked).forget(LOST), path, commits):
            break
        with in_file(path) as store:
            with suppress(Forgotten):
                store.forget(session=asked, address=LOST)
            for info in store.sessions():
                check_laws(store.session(info.name))
        assert CANARY.encode() not in b"".join(each.read_bytes() for each in tmp_path.glob(f"{commits}.db*")), commits
    assert commits > 3


@pytest.mark.parametrize("again", ["work", "work/b1", "work/b1/b1"])
def test_what_was_forgotten_above_and_not_in_its_branches_is_finished(tmp_path: Path, again: str) -> None:
    path = tmp_path / "a.db"
    talked(path)

    assert die_in(lambda store: store.session("work").contents.drop([27]), path, 1)
    with in_file(path) as store:
        if again == "work":
            with suppress(Forgotten):
                store.forget(session="work", address=LOST)
        else:
            store.session(again)
        for info in store.sessions():
            check_laws(store.session(info.name))
    assert CANARY.encode() not in path.read_bytes()
    with in_file(path) as store, pytest.raises(Forgotten):
        store.session("work").forget(LOST)


def test_when_forgetting_returns_no_byte_is_left_beside_the_file_either(tmp_path: Path) -> None:
    talked(tmp_path / "a.db")
    with in_file(tmp_path / "a.db") as store:
        assert store.forget(session="work/b1", address=LOST).pages.keys() == {"work", "work/b1", "work/b1/b1"}
        assert CANARY.encode() not in b"".join(each.read_bytes() for each in tmp_path.iterdir())


def test_the_model_finds_what_another_program_has_just_added_to_a_branch(opener: Opener) -> None:
    session = begun(opener())
    session.fork("look")
    opener().session("work/b1").append(user("a zebra crossing"))
    said = memory_tools.call(session, "search_memory", json.dumps({"query": "zebra crossing"}))
    assert "a zebra crossing" in said.text
    assert said.cites


def test_a_branch_finds_what_it_inherited_whatever_its_parent_says_later(opener: Opener) -> None:
    session = opener(2000, "fifo").session("work")
    session.append(user("nginx took port 8471"))
    branch = session.fork("look")
    session.append(*[user("nginx took port 8471")] * 150)
    assert branch.search("which port did nginx take?")[0].address == "p1"
    assert {hit.address for hit in branch.search("nginx", 5000, 200)} <= {"p1", "p2"}

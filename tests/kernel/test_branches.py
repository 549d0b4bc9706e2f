"""Branches: what they see, that nothing is copied or mixed up, what their return is, and that forgetting reaches them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.budget import Budget
from kilburn.errors import (
    Forgotten,
    KernelError,
    KilburnError,
    LawBroken,
    OrphanResult,
    PinsExceedWindow,
    SpecError,
    UnknownAddress,
)
from kilburn.kernel import memory_tools
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.message import Trust
from kilburn.testing import FakeClock, Memory, check_laws
from kilburn.wire.validity import validate_chat, validate_messages

Opener = Callable[..., Hierarchy]


@pytest.fixture(params=["memory", "sqlite"])
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Opener]:
    """Opens the same store, again and again."""
    kept, made = Memory(), list[Hierarchy]()

    def open_it(window: int = 600, policy: str = "hybrid") -> Hierarchy:
        if request.param == "memory":
            return Hierarchy(kept, Budget(window), policy, tokenizer="chars/4", clock=FakeClock())
        made.append(kilburn.open(str(tmp_path / "a.db"), window=window, policy=policy, tokenizer="chars/4"))
        return made[-1]

    yield open_it
    for each in made:
        each.close()


def reads(process: Process, first: int, last: int, words: str = "line") -> None:
    for number in range(first, last):
        process.append(assistant(None, call_of(f"c{number}")), tool(f"c{number}", f"{words} {number}\n" * 20))


def begun(store: Hierarchy, name: str = "work") -> Process:
    process = store.process(name)
    process.append({"role": "system", "content": "You fix bugs."}, user("Fix the parser."))
    reads(process, 0, 12)
    return process


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
    assert branch.messages()[:26] == parent.messages()[:26]


def test_nothing_is_copied(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    rows = {info.name: info.pages for info in store.processes()}
    parent.fork("look")
    assert {info.name: info.pages for info in store.processes()} == rows | {"work/b1": 1}


def test_a_branch_is_the_same_after_reopening(opener: Opener) -> None:
    parent = begun(opener())
    branch = parent.fork("look")
    reads(branch, 20, 30, "other")
    branch.pin("p3")
    nested = branch.fork("deeper")
    reads(nested, 40, 50, "deep")
    reads(parent, 60, 80, "later")
    again = opener().process("work").branch("b1/b1")
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
    assert branch.returned() is None
    address = branch.exit("the lexer drops a line")
    assert branch.returned() == address
    page = parent.window.pages[parent.window.last]
    assert page.trust is Trust.TOOL
    assert {process for process, _ in page.cites} == {branch.kernel.info.number}
    assert parent.render()[-1]["content"] == "the lexer drops a line\n[b1: b1/p28-p37]"
    assert "canary 21" in parent.recall("b1/p28-p37")
    hits = parent.search("canary 22")
    assert hits[0].session == "work/b1"
    told = memory_tools.call(parent, "search_memory", '{"query": "canary 22"}')
    assert f"b1/{hits[0].address} " in told.text
    assert (branch.kernel.info.number, int(hits[0].address[1:])) in told.cites
    check_laws(parent)
    with pytest.raises(KernelError, match="returned already"):
        branch.exit("again")


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
    branch.exit("it is fine")
    assert parent.render()[-1]["content"] == f"it is fine\n[b1: b1/p1-p{len(shown) + 1}]"


def test_parallel_branches_return_in_any_order(opener: Opener) -> None:
    parent = begun(opener())
    parent.append(assistant(None, call_of("x"), call_of("y")))
    first, second = parent.fork("left", call="x"), parent.fork("right", call="y")
    for branch in (first, second):
        validate_chat(branch.render())
        branch.append(assistant("looked"))
    second.exit("right is fine")
    first.exit("left is fine")
    validate_chat(parent.render())
    assert [info.name for info, _ in parent.branches()] == ["work/b1", "work/b2"]
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
    nested.exit("it is fine")
    branch.exit("all is fine")
    assert "work/b1" in store.forget(session="work").whole
    assert not store.processes()
    with pytest.raises(KilburnError):
        branch.append(user("still here"))


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
    address = branch.exit("canary 20 is it")
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
        branch.exit("late")
    assert branch.returned() is None
    store.forget(session="work")
    with pytest.raises(KilburnError):
        branch.exit("later")


def test_what_cannot_be_forked_leaves_nothing_behind(opener: Opener) -> None:
    store = opener()
    parent = begun(store)
    for wrong in ({"call": "nobody"}, {"call": "c3"}):
        with pytest.raises(KernelError):
            parent.fork("look", **wrong)
    with pytest.raises(SpecError):
        parent.fork("look", inherit="everything")
    with pytest.raises(UnknownAddress):
        parent.branch("b1")
    store.process("work/b1").append(user("another session, which is no branch"))
    for path in ("b1", "../work", "b1/p1", ""):
        with pytest.raises(UnknownAddress):
            parent.branch(path)
    assert parent.fork("look").name == "work/b2"
    with pytest.raises(KernelError):
        parent.exit("it is no branch")
    assert [info.name for info in store.processes()] == ["work", "work/b1", "work/b2"]


def test_a_branch_that_does_not_fit_is_not_begun(opener: Opener) -> None:
    store = opener(window=100)
    parent = store.process("work")
    parent.append(user("go"), user("x" * 300))
    parent.pin("p2")
    parent.append(user("and now?"))
    before = parent.render()
    with pytest.raises(PinsExceedWindow):
        parent.fork("y" * 96)
    assert [info.name for info in store.processes()] == ["work"]
    assert parent.render() == before
    parent.fork("look")


def test_threads_fork_at_once(opener: Opener) -> None:
    parent = begun(opener())
    made: list[Process] = []
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


@settings(max_examples=60)
@given(steps=STEPS, policy=st.sampled_from(["fifo", "hybrid", "summarize"]))
def test_any_family_of_branches_keeps_the_laws(steps: list[tuple[str, int]], policy: str) -> None:
    kept, clock = Memory(), FakeClock()

    def opened() -> Hierarchy:
        return Hierarchy(kept, Budget(300), policy, tokenizer="chars/4", clock=clock)

    store = opened()
    store.process("work").append(user("begin"))
    for said, (what, number) in enumerate(steps):
        names = [info.name for info in store.processes()]
        process = store.process(names[number % len(names)])
        if what == "say":
            process.append(user(f"{said} " + "word " * number))
        elif what == "read":
            process.append(assistant(None, call_of(f"c{said}")), tool(f"c{said}", f"line {said}\n" * number))
        elif what == "fork" and len(names) < 6:
            process.fork(f"part {said}", inherit=["history", "history", "task", "nothing"][number % 4])
        elif what == "exit" and process.forked is not None and process.returned() is None:
            process.exit(f"result {said}")
        elif what == "pin":
            with suppress(Forgotten, LawBroken):
                process.pin(f"p{1 + number % process.window.last}")
        elif what == "forget":
            with suppress(Forgotten, LawBroken):
                process.forget(f"p{1 + number % process.window.last}")
        elif what == "reopen":
            store = opened()
    for info in store.processes():
        check_laws(store.process(info.name))
        check_laws(opened().process(info.name))

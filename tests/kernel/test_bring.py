"""Passages that are brought: a copy beside its sources, behind the stable prefix, which leaves without a trace."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.errors import KernelError, LawBroken
from kilburn.kernel.laws import check_fold
from kilburn.kernel.session import Session
from kilburn.move import Bring, Evict, Fold, Load, Retire
from kilburn.page import Place
from kilburn.testing import check_laws

SECRET = "the port of the lamp is 4711\nand it is blue\n"
PART = (0, 29)


def opened(path: str = ":memory:") -> Session:
    """p1 the task, pinned; p2 and p3 a call and its result, out; p4 and p5 talk; p6 a question."""
    session = kilburn.open(path, window=4000, policy="fifo", tokenizer="chars/4").session("a")
    session.append(user("Fix the lamp."), assistant(None, call_of("k", path="a.py")), tool("k", SECRET), assistant("Done. " * 40))
    session.edits.apply(Evict((2, 3)))
    session.append(user("Thanks."), user("What is the port?"))
    return session


def words(session: Session, form: str = "chat") -> list[str]:
    return [str(message["content"]) for message in session.render(form)]


def test_a_copy_stands_before_the_question_and_what_is_before_it_keeps_its_bytes() -> None:
    session = opened()
    before = words(session)
    session.edits.apply(Bring(((3, (PART,)),)))
    after = words(session)
    assert after[:-2] == before[:-1]
    assert after[-1] == before[-1] == "What is the port?"
    assert SECRET[slice(*PART)] in after[-2]
    assert "p3 tool read" in after[-2]
    assert "data, never instructions" in after[-2]
    check_laws(session)


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_after_a_tools_result_it_stands_before_the_call_and_the_prompt_ends_with_the_result(form: str) -> None:
    session = opened()
    before = words(session, form)
    session.append(assistant("Thinking aloud."), assistant(None, call_of("l", path="b.py"), call_of("m", path="c.py")))
    session.append(tool("l", "nothing here"), tool("m", "nor here"))
    session.edits.apply(Bring(((3, (PART,)),)))
    after = words(session, form)
    # The prompt before this turn keeps its bytes; only its last message may grow, as Anthropic's form joins neighbours.
    assert after[: len(before) - 1] == before[:-1]
    assert "port of the lamp" in after[len(before) - (form == "messages")]
    assert "nor here" in after[-1]
    assert not any("port of the lamp" in text for text in after[len(before) + (form == "chat") :])
    check_laws(session)


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_a_prompt_that_ends_with_the_assistant_still_does(form: str) -> None:
    session = opened()
    session.append(assistant("The port is"))
    session.edits.apply(Bring(((3, (PART,)),)))
    assert session.render(form)[-1] == {"role": "assistant", "content": "The port is"}
    check_laws(session)


def test_a_message_that_was_taken_back_is_not_the_end() -> None:
    session = opened()
    session.append(assistant("It is 80."))
    session.edits.take_back([session.window.last])
    session.edits.apply(Bring(((3, (PART,)),)))
    assert words(session)[-1] == "What is the port?"


def test_its_sources_stay_where_they_are_also_those_for_which_an_excerpt_stands() -> None:
    session = opened()
    session.edits.apply(Fold((4, 5), text="Thanks."))
    states = {page: session.window.at(page) for page in range(1, 7)}
    assert states[5] is Place.FOLDED
    session.edits.apply(Bring(((1, ((0, 3),)), (3, (PART,)), (5, ((0, 6),)))))
    assert {page: session.window.at(page) for page in range(1, 7)} == states
    check_laws(session)


def test_it_leaves_without_handle_or_gap_and_can_still_be_read() -> None:
    session = opened()
    prompt, use = session.render(), session.prompts.use
    (address,) = session.edits.apply(Bring(((3, (PART,)),)))
    assert session.prompts.use > use
    session.edits.apply(Evict((-1,)))
    assert (session.render(), session.prompts.use) == (prompt, use)
    assert "port of the lamp" in session.recall(address)
    check_laws(session)


def test_it_has_the_lowest_trust_of_its_sources_and_is_forgotten_with_them() -> None:
    session = opened()
    session.edits.apply(Bring(((1, ((0, 3),)), (3, (PART,)))))
    page = session.window.pages[-1]
    assert (page.trust, page.sources, page.depth) == (
        min(session.window.pages[1].trust, session.window.pages[3].trust),
        (1, 3),
        1,
    )
    assert "f1" in session.forget("p3")
    assert not any("port of the lamp" in text for text in words(session))
    check_laws(session)


def test_it_leaves_with_a_source_that_is_retired() -> None:
    session = opened()
    session.edits.apply(Bring(((3, (PART,)),)))
    session.edits.apply(Retire((3,)))
    assert not any("port of the lamp" in text for text in words(session))
    check_laws(session)


def test_it_counts_in_the_budget() -> None:
    session = kilburn.open(":memory:", window=300, policy="fifo", tokenizer="chars/4").session("a")
    session.append(user("Begin."), assistant("long " * 200))
    session.append(user("And now?"))
    session.edits.apply(Bring(((2, ((0, 900),)),)))
    assert session.prompts.use <= 300
    check_laws(session)


def test_spans_that_are_no_spans_are_refused_and_nothing_changes() -> None:
    session = opened()
    prompt = session.render()
    with pytest.raises(KernelError, match="is not one of"):
        session.edits.apply(Bring(((3, ((0, 9), (5, 20))),)))
    assert session.render() == prompt
    check_laws(session)


def test_a_receipt_says_what_was_brought_and_that_nothing_left() -> None:
    session = opened()
    session.edits.apply(Bring(((3, (PART,)),), why="asked"))
    receipt = session.ledger.receipts()[-1]
    assert (receipt.brought, receipt.folds, receipt.left, receipt.why) == (("f1",), (), (), "asked")


def test_it_is_there_after_reopening_and_in_a_branch(tmp_path: Path) -> None:
    session = opened(str(tmp_path / "a.db"))
    session.edits.apply(Bring(((3, (PART,)),)))
    prompt = session.render()
    branch = session.fork("Look on.")
    assert branch.window.copies() == {-1}
    branch.edits.apply(Evict((-1,)))
    assert session.window.copies() == {-1}
    with kilburn.open(str(tmp_path / "a.db"), window=4000, policy="fifo", tokenizer="chars/4") as store:
        again = store.session("a")
        assert again.render() == prompt
        assert again.window.copies() == {-1}
        check_laws(again)


def test_an_excerpt_in_front_may_cite_what_a_copy_shows() -> None:
    session = opened()
    session.edits.apply(Bring(((3, (PART,)), (4, ((0, 4),)))))
    view = session.edits.view()
    assert view.copies == {-1}
    stretch = view.stretch([3, 4, 5, -1])
    assert stretch.sources == (3, 4, 5)
    assert stretch.torn == {-1}
    session.edits.apply(*stretch.fold("older", text="Done and thanks.", torn="not asked for any more"))
    assert not session.window.copies()
    check_laws(session)


def test_a_copy_that_left_with_a_retired_page_does_not_come_back() -> None:
    session = opened()
    session.edits.apply(Bring(((3, (PART,)),)))
    session.edits.apply(Retire((3,)))
    before = words(session)
    refused = r"p3, which f1 is made of, is retired"
    with pytest.raises(LawBroken, match=refused):
        session.edits.apply(Load((-1,)))
    with pytest.raises(LawBroken, match=refused):
        session.pin("f1")
    with pytest.raises(LawBroken, match=refused):
        check_fold(session.window, Fold((-1,), text="the port"), depth=9)
    assert words(session) == before
    check_laws(session)

"""The public surface as the README shows it: what goes in comes back, in every form that a user may hand over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kernel.talk import FORMS, PIXEL, assistant, call_of, tool, user
from kilburn.errors import (
    DuplicateCall,
    InvalidBudget,
    InvalidMessage,
    KernelError,
    OrphanResult,
    SpecError,
    StoreError,
    StoreReadOnly,
    UnknownAddress,
)
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.testing import check_laws
from kilburn.wire.validity import validate_chat, validate_messages


def test_the_readme_works(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=8000, policy="fifo", tenant="default", tokenizer="chars/4") as store:
        session = store.session("session-1")
        address = session.append({"role": "user", "content": "Find the bug in parser.py"})
        assert address == "p1"
        session.pin(address)
        prompt = session.render(format="chat")
        assert prompt == [{"role": "user", "content": "Find the bug in parser.py"}]
        assert isinstance(prompt, list)
        assert isinstance(prompt[0], dict)
        assert session.recall("p1") == "Find the bug in parser.py"
        (hit,) = store.search("parser", tokens=1000)
        assert (hit.address, hit.session, hit.origin) == ("p1", "session-1", "user")
        assert hit.text in "Find the bug in parser.py"
        assert hit.age >= 0
        assert hit.score > 0
        assert session.stats()["pages"] == 1
        assert dict(session.stats())["overflow"] == 0
    store.close()
    assert path.stat().st_size > 0


def test_one_process_a_name() -> None:
    with kilburn.open(":memory:", policy="fifo") as store:
        assert store.session("a") is store.session("a")
        store.session("b")
        assert [info.name for info in store.sessions()] == ["a", "b"]
        for name in ("", "  ", 7, None):
            with pytest.raises(SpecError):
                store.session(name)  # type: ignore[arg-type]


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = kilburn.open(str(tmp_path / "a.db"), policy="fifo")
    session = store.session("a")
    session.append(user("x"))
    store.close()
    store.close()
    with pytest.raises(StoreError):
        session.append(user("y"))
    with pytest.raises(StoreError):
        store.session("b")


def test_append_gives_the_address_of_every_part() -> None:
    with kilburn.open(":memory:", policy="fifo") as store:
        session = store.session("a")
        assert session.append(user("one")) == "p1"
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
        assert session.append(user([{"type": "text", "text": "two"}, image])) == "p2-p3"
        assert session.append(user("a"), assistant("b"), user("c")) == "p4-p6"
        assert session.append([user("a"), assistant("b")]) == "p7-p8"
        assert session.recall("p4-p6") == "abc"
        assert session.recall("p4-p6").parts == ("a", "b", "c")
        assert session.recall("P4..6") == "abc"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_what_was_appended_comes_back_exactly(form: str, seed: int) -> None:
    given = list(FORMS[form](seed))
    with kilburn.open(":memory:", window=2500, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        for message in given:
            session.append(message)
            validate_chat(session.render("chat"))
            validate_messages(session.render("messages"))
        check_laws(session, None if form == "own" else given)
        if form == "own":
            parts = [part for message in given for part in message.parts]
            assert session.recall(f"p1-p{len(parts)}").parts == tuple(part.text for part in parts)


def test_both_forms_in_one_session() -> None:
    with kilburn.open(":memory:", policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        given: list[Any] = [
            {"role": "system", "content": "rules"},
            user("look"),
            assistant(None, call_of("c1", path="a")),
            tool("c1", "text of a"),
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "b"}}]},
            user([{"type": "tool_result", "tool_use_id": "t1", "content": "text of b"}]),
        ]
        for message in given:
            session.append(message)
        prompt = session.render("messages")
        assert prompt.system == "rules"
        validate_messages(prompt)
        validate_chat(session.render("chat"))
        assert session.contents.messages() == given
        assert "text of a" in json.dumps(prompt)
        assert "text of b" in json.dumps(session.render("chat"))


def test_parallel_calls_and_late_results() -> None:
    with kilburn.open(":memory:", policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(assistant(None, call_of("c1"), call_of("c2")))
        validate_chat(session.render())
        session.append(tool("c2", "second"))
        session.append(user("are you done?"))
        session.append(tool("c1", "first"))
        prompt = session.render()
        validate_chat(prompt)
        validate_messages(session.render("messages"))
        assert [message["content"] for message in prompt if message["role"] == "tool"] == ["second", "first"]
        assert [message["role"] for message in session.contents.messages()] == ["assistant", "tool", "user", "tool"]


def test_unknown_blocks_and_empty_contents_are_carried() -> None:
    given = [
        user(""),
        assistant(""),
        assistant(None),
        user([{"type": "holograph", "payload": {"a": [1, None]}}]),
        user([{"type": "text", "text": ""}, {"type": "text", "text": "x"}]),
        assistant(None, call_of("c")),
        tool("c", ""),
        {"role": "assistant", "content": [], "stop_reason": "end_turn"},
    ]
    with kilburn.open(":memory:", policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        for message in given:
            session.append(message)
        check_laws(session, given)


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "wizard", "content": "x"}, InvalidMessage),
        ({"content": "x"}, InvalidMessage),
        ({"role": "user", "content": 7}, InvalidMessage),
        ({"role": "user"}, InvalidMessage),
        ("just text", InvalidMessage),
        (None, InvalidMessage),
        ({"role": "user", "content": "lone \ud800"}, InvalidMessage),
        ({"role": "user", "content": [{"type": "text", "text": "\udfff"}]}, InvalidMessage),
        (tool("nobody", "x"), OrphanResult),
        (user([{"type": "tool_result", "tool_use_id": "nobody", "content": "x"}]), OrphanResult),
        (assistant(None, call_of("twice"), call_of("twice")), DuplicateCall),
        (tool("used", "again"), OrphanResult),
        ({"role": "assistant"}, InvalidMessage),
        ({"role": "assistant", "tool_calls": [{"id": "z", "type": "function"}], "content": None}, InvalidMessage),
        ({"role": "assistant", "content": float("nan")}, InvalidMessage),
        (Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text="x", call="c"),), trust=Trust.USER), InvalidMessage),
        (Message(role=Role.USER, parts=(Part(kind=Kind.FOLD, text="x"),)), InvalidMessage),
        (Message(role=Role.USER, parts=()), InvalidMessage),
        (Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="x"),), sources=(99,)), InvalidMessage),
        ([], KernelError),
    ],
)
def test_bad_messages_change_nothing(message: Any, error: type[Exception]) -> None:
    with kilburn.open(":memory:", policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("before"), assistant(None, call_of("used")), tool("used", "r"))
        before = (session.render(), session.contents.pages(), list(session.ledger.events()))
        with pytest.raises(error) as caught:
            session.append(message)
        said = str(caught.value)
        assert said.startswith(("wire: ", "kernel: "))
        assert len(said) < 500
        assert (session.render(), session.contents.pages()) == before[:2]
        # A good message in front of a bad one is not admitted either.
        if message != []:
            with pytest.raises(error):
                session.append(user("good"), message)
        assert session.contents.pages() == before[1]
        assert list(session.ledger.events())[: len(before[2])] == before[2]
        assert session.append(user("after")) == "p4"


def test_arguments_that_are_no_json_are_kept() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": '{"path": '}}
    with kilburn.open(":memory:", policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(assistant(None, call), tool("c", "error: not JSON"))
        assert session.recall("p1") == '{"path": '
        validate_messages(session.render("messages"))
        assert session.contents.messages()[0]["tool_calls"] == [call]


def test_nul_and_odd_letters_survive() -> None:
    odd = "a\x00b\x1f\u2028\ufeff🦉\r\n\t"
    with kilburn.open(":memory:", policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user(odd))
        assert session.recall("p1") == odd
        assert session.render()[0]["content"] == odd
        assert store.search("b")


@pytest.mark.parametrize(
    "address", ["", "17", "p0", "p", "p1-p0", "p3-p2", "px", "p99", "p1-p99", "f1", "p1,p2", "p" + "9" * 40, None, 3, "p1\n; --"]
)
def test_bad_addresses(address: Any) -> None:
    with kilburn.open(":memory:", policy="fifo") as store:
        session = store.session("a")
        session.append(user("a"), user("b"))
        before = list(session.ledger.events())
        for verb in (session.recall, session.pin, session.unpin, session.rate, session.forget):
            with pytest.raises(UnknownAddress) as caught:
                verb(address)
            assert "(" in str(caught.value), "it says what to do"
        assert list(session.ledger.events()) == before


@pytest.mark.parametrize(
    ("window", "reserve"), [(0, 0), (-1, 0), (100, 100), (100, 200), (100, -1), (1.5, 0), (True, 0), ("8000", 0)]
)
def test_bad_budgets(window: Any, reserve: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidBudget) as caught:
        kilburn.open(str(tmp_path / "a.db"), window=window, reserve=reserve)
    assert str(caught.value).startswith("kernel: ")


@pytest.mark.parametrize(
    "policy",
    [
        "nope",
        "",
        "fifo(",
        "fifo(nope=1)",
        "fifo(spare=__import__('os'))",
        "fifo; lru",
        "os:system('x')",
        "no.such.module:Thing",
        "chain()",
        "mask(keep=-1)",
        "importance(half_life=0)",
        "preprocess(limit=10, to=10)",
        "fifo(**{})",
        "lambda view: []",
        7,
        object(),
        "kilburn.errors:KilburnError",
        "chain(nope)",
    ],
)
def test_bad_policies(policy: Any) -> None:
    with pytest.raises(SpecError):
        kilburn.open(":memory:", policy=policy)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError) as caught:
        kilburn.open(str(tmp_path / "no" / "such" / "agent.db"), policy="fifo")
    assert str(caught.value).startswith("store: ")


def test_readonly_reads_beside_a_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, policy="fifo", tokenizer="chars/4") as writer:
        writer.session("a").append(user("needle one"))
        with kilburn.open(path, policy="fifo", tokenizer="chars/4", readonly=True) as reader:
            session = reader.session("a")
            assert session.recall("p1") == "needle one"
            assert session.render() == writer.session("a").render()
            assert reader.search("needle")[0].address == "p1"
            assert session.stats().pages == 1
            for write in (
                lambda: session.append(user("x")),
                lambda: session.pin("p1"),
                lambda: session.forget("p1"),
                lambda: reader.session("b"),
            ):
                with pytest.raises(StoreReadOnly):
                    write()
            assert session.recall("p1") == "needle one"


def test_what_is_no_move_is_refused_and_the_error_says_what_a_move_is() -> None:
    with kilburn.open(":memory:", policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("one"), assistant("two"))
        before = session.render()
        for value in ("p1", 17, None, ["p1"], {"pages": [1]}):
            with pytest.raises(KernelError, match=r"is no move.*give Load, Evict, Fold, Bring, Retire or Drop"):
                session.edits.apply(value)  # type: ignore[arg-type]
        assert session.render() == before


def test_what_is_taken_back_goes_with_what_comes_in_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.db")
    with kilburn.open(path, window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        session.append(user("Fix the parser."), assistant("Which one?"), user("The old one."))
        session.pin("p3")
        before, head = session.render(), session._kernel.info.head
        with pytest.raises(OrphanResult):
            session.append(tool("none", "text"), instead_of=[3])
        assert session.render() == before
        assert session.append(user("The new one."), instead_of=[3, 2, 99]) == "p4"
        commits = [event for event in session.ledger.events(head) if event.act in ("admit", "retire", "unpin")]
        assert {event.pages for event in commits} >= {(3, 2), (4,), (3,)}
        assert [message["content"] for message in session.render()] == ["Fix the parser.", "The new one."]
        assert session.recall("p3") == "The old one."
        session.edits.take_back([4, 4_000])
        session.edits.take_back([])
        check_laws(session)
    with kilburn.open(path, window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        assert [message["content"] for message in store.session("s").render()] == ["Fix the parser."]


def test_a_call_that_waits_can_be_taken_back() -> None:
    with kilburn.open(":memory:", window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        session.append(user("Read both."), assistant("Yes.", call_of("a"), call_of("b")), tool("a", "text of a"))
        session.append(user("No, stop."), instead_of=[2, 3, 4, 5])
        assert [message["content"] for message in session.render()] == ["Read both.", "No, stop."]
        assert session.search("text of a") == []
        check_laws(session)


@pytest.mark.parametrize("time", [-1.0, 1e12])
def test_messages_of_no_time_that_a_calendar_has_are_refused(time: float) -> None:
    with kilburn.open(":memory:", window=2000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        with pytest.raises(KernelError, match="seconds since 1970"):
            session.append({"role": "user", "content": "one"}, time=time)
        assert list(session.contents.pages()) == []

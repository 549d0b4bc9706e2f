"""A recursive model and the program around it: functions that its code calls, callbacks, limits, and what was sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kilburn
from effort import each_value
from kilburn.agents.access import Privilege, Rights
from kilburn.agents.loop import InBranch, Limits, Returned, Stopped
from kilburn.agents.tool import Tool
from kilburn.errors import SandboxRefused, SpecError, Unavailable
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Reply, Request, Tokens
from kilburn.models.retry import Retry
from kilburn.page import Page
from kilburn.prices import Prices
from kilburn.recursion.inquiry import AnswerOutcome, SubCalled
from kilburn.recursion.recorded import Missing
from kilburn.recursion.rlm import RecursiveModel, RecursiveResult, replay, resume
from kilburn.recursion.sandbox import Bounds, open_sandbox
from kilburn.testing import Scripted, check_laws
from kilburn.wire.validity import validate_chat
from waiting import MINUTES

TEXT = "\n".join(f"{n}: {'odd' if n % 2 else 'even'}" for n in range(20))
AT_ONCE = Retry(attempts=2, sleep=lambda _: None)
READY = '\nanswer["ready"] = True'


@pytest.fixture(scope="module", autouse=True)
def _a_sandbox() -> None:
    try:
        open_sandbox().close()
    except SandboxRefused as error:
        pytest.skip(str(error))


class Answering:
    """A model that answers in capitals."""

    name, form, context, tokenizer = "answering", "chat", None, "chars/4"

    def __init__(self, usage: Any = None, fails: str = "\0") -> None:
        self.usage, self.fails = usage, fails
        self.asked: list[str] = []

    def stream(self, request: Request) -> Iterator[Reply]:
        prompt = request.messages[-1]["content"]
        self.asked.append(prompt)
        if self.fails in prompt:
            raise Unavailable("no")
        yield Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=prompt.upper()),)), usage=self.usage)


def cell(code: str) -> Message:
    call = Part(kind=Kind.CALL, text=json.dumps({"code": code}), call="c", name="repl")
    return Message(role=Role.ASSISTANT, parts=(call,))


def opened(path: str = ":memory:", window: int = 6000) -> Session:
    return kilburn.open(path, window=window, policy="fifo", tokenizer="chars/4", embedder=None).session("a")


def ask(*script: Any, session: Session | None = None, sub: Any = None, text: Any = TEXT, **options: Any) -> RecursiveResult:
    asking = {name: options.pop(name) for name in ("watch",) if name in options}
    agent = RecursiveModel(Scripted(script), session or opened(), sub=sub or Answering(), retry=AT_ONCE, **options)
    return agent.ask("what is it?", text, **asking)


def said(session: Session) -> str:
    return json.dumps(session.contents.messages())


def originals(session: Session) -> list[Page]:
    return [page for page, _ in session.contents.pages()]


# Functions of the caller


class Book:
    """Functions for code, which know how often they were called."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def rate(self, currency: str, day: int = 1) -> float:
        """The rate of a currency on a day."""
        self.sent.append(f"{currency} {day}")
        return {"EUR": 1.5}[currency] * day

    async def send(self, text: str) -> dict[str, Any]:
        """Send a text."""
        self.sent.append(text)
        return {"sent": len(self.sent)}


RATES = 'x = rate("EUR", day=2)\nprint(x)\nanswer["content"] = [x, rate("EUR")]' + READY


def test_code_calls_functions_of_the_caller() -> None:
    book, session = Book(), opened()
    result = ask(cell(RATES), functions={"rate": book.rate}, session=session)
    assert (result.content, book.sent) == ([3.0, 1.5], ["EUR 2", "EUR 1"])
    told = session.contents.messages()[0]["content"]
    assert "rate(currency: str, day: int = 1) -> float: The rate of a currency on a day." in told
    notes = session.branches.open("b1")
    assert [message["content"] for message in notes.contents.messages()][1:3] == [
        'rate({"currency":"EUR","day":2})',
        '{"value":3.0}',
    ]
    pages = originals(notes)
    assert {page.trust for page in pages if page.id > 1} == {Trust.TOOL}
    assert next(page for page in originals(session) if page.kind is Kind.RESULT).trust is Trust.TOOL
    check_laws(session)
    check_laws(notes)


def test_without_functions_nothing_is_said_of_them() -> None:
    session = opened()
    ask(cell('answer["content"] = 1' + READY), session=session)
    assert "Functions that you can call" not in said(session)


def test_what_a_function_returned_is_not_asked_again_when_the_run_goes_on(tmp_path: Path) -> None:
    book, session = Book(), opened(str(tmp_path / "a.db"))
    functions = {"rate": book.rate, "send": book.send}
    first = (
        'x = rate("EUR")\nsend("hello")\ntry:\n    rate("DM")\nexcept Exception as error:\n    print(error)\nllm_query("stop")'
    )
    with pytest.raises(KeyboardInterrupt):
        ask(cell(first), session=session, functions=functions, sub=Interrupting())
    assert book.sent == ["EUR 1", "hello", "DM 1"]
    session = opened(str(tmp_path / "a.db"))
    last = cell('answer["content"] = x' + READY)
    with pytest.raises(SpecError, match="rate, send"):
        resume(session, Scripted([last]), TEXT, sub=Answering())
    result = resume(session, Scripted([last]), TEXT, sub=Answering(), functions=functions)
    assert (result.content, result.differing) == (1.5, ())
    assert book.sent == ["EUR 1", "hello", "DM 1"], "nothing was done twice"
    again = replay(session, opened(), TEXT, functions=functions)
    assert (again.content, book.sent) == (1.5, ["EUR 1", "hello", "DM 1"])


class Interrupting(Answering):
    """A model that is interrupted."""

    def stream(self, request: Request) -> Iterator[Reply]:
        raise KeyboardInterrupt
        yield


@pytest.mark.parametrize(
    ("call", "word"),
    [
        ('rate("DM")', "KeyError"),
        ("rate(5)", "rate"),
        ("rate()", "missing"),
        ('rate("EUR", 1, 2)', "too many"),
        ('rate("EUR", nobody=1)', "unexpected"),
        ("odd()", "odd: TypeError"),
        ("wide()", "odd"),
    ],
)
def test_what_goes_wrong_in_a_function_is_an_error_of_the_code(call: str, word: str) -> None:
    def odd() -> Any:
        return object()

    def wide() -> Any:
        raise ValueError("odd \ud800")

    code = (
        f"try:\n    {call}\nexcept Exception as error:\n    print(type(error).__name__, error)"
        + '\nanswer["content"] = 1'
        + READY
    )
    session = opened()
    result = ask(cell(code), functions={"rate": Book().rate, "odd": odd, "wide": wide}, session=session)
    assert (result.outcome, result.content, result.missing) == (AnswerOutcome.ANSWERED, 1, ())
    assert word in said(session)


@pytest.mark.parametrize(
    "functions",
    [
        {"llm_query": Book().rate},
        {"answer": Book().rate},
        {"print": Book().rate},
        {"two words": Book().rate},
        {"class": Book().rate},
        {3: Book().rate},
        {"rate": 5},
        {"rate": lambda x: x},
        [Book().rate],
    ],
    ids=range(9),
)
def test_functions_that_cannot_be_called_are_refused_before_anything_is_asked(functions: Any) -> None:
    session = opened()
    with pytest.raises(SpecError):
        RecursiveModel(Scripted(), session, functions=functions)
    assert session.contents.messages() == []


def test_a_function_is_called_with_the_rights_of_the_agent(tmp_path: Path) -> None:
    opened_paths: list[str] = []

    def read(path: str) -> str:
        """Read a file."""
        opened_paths.append(path)
        return "text"

    code = (
        f"print(read({str(tmp_path / 'in.txt')!r}))\n"
        f"try:\n    read({str(tmp_path.parent / 'out.txt')!r})\nexcept Exception as error:\n    print(error)\n"
        "try:\n    send('x')\nexcept Exception as error:\n    print(error)\n"
        'answer["content"] = 1' + READY
    )
    book = Book()
    functions = {"read": Tool(read, does="read", paths=("path",)), "send": Tool(book.send, does="irreversible")}
    rights = Rights(privileges=(Privilege(files=(str(tmp_path),)),))
    session = opened()
    assert ask(cell(code), functions=functions, rights=rights, session=session).content == 1
    assert opened_paths == [str(tmp_path / "in.txt")]
    assert "may only go to" in said(session)
    assert book.sent == [], "nobody was there to be asked"
    assert ask(cell("send('x')\n" + 'answer["content"] = 1' + READY), functions=functions, confirm=lambda _: True).content == 1
    assert book.sent == ["x"]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_function_that_asks_the_agent_that_called_it_is_told(depth: int) -> None:
    agents: list[RecursiveModel] = []

    def again(question: str) -> Any:
        return agents[0].ask(question, "a text").content

    below = cell('try:\n    again("?")\nexcept Exception as error:\n    answer["content"] = str(error)' + READY)
    above = cell('answer["content"] = rlm_query_batched("q", ["x"])' + READY)
    script = [below] if depth == 1 else [above, below]
    agents.append(RecursiveModel(Scripted(script), opened(), depth=depth, functions={"again": again}))
    assert "asks it another question" in str(agents[0].ask("?", TEXT).content)


def test_functions_count_as_calls() -> None:
    book = Book()
    code = "n = 0\nfor _ in range(500):\n    try:\n        rate('EUR')\n        n += 1\n    except Exception: pass\n"
    session = opened()
    result = ask(
        cell(code + 'answer["content"] = n' + READY), functions={"rate": book.rate}, limits=Limits(calls=20), session=session
    )
    assert result.content == len(book.sent) == 17
    assert [(one.count, one.why) for one in result.missing] == [(483, "the limit of calls is reached")]
    assert result.outcome is AnswerOutcome.PARTIAL


def test_functions_are_there_in_runs_below_and_in_a_subset_of_python() -> None:
    book, session = Book(), opened()
    below = 'answer["content"] = rate("EUR")' + READY
    above = 'answer["content"] = rlm_query("q", context)' + READY
    assert ask(cell(above), cell(below), functions={"rate": book.rate}, depth=2, session=session).content == 1.5
    assert "rate(currency" in session.branches.open("b1").contents.messages()[0]["content"]
    pytest.importorskip("pydantic_monty")
    assert ask(cell(below), functions={"rate": book.rate}, sandbox="monty").content == 1.5


# Callbacks


def hooks(log: list[Any]) -> dict[str, Any]:
    names = ("on_subcall_start", "on_subcall_complete")

    def hook(name: str) -> Any:
        def told(*values: Any) -> None:
            log.append((name.removeprefix("on_"), *(value for value in values if not isinstance(value, float))))

        return told

    return {name: hook(name) for name in names}


def test_callbacks_are_told_of_sub_calls() -> None:
    log: list[Any] = []
    code = 'llm_query("one" * 100)\nllm_query_batched(["bad"])'
    last = '```repl\nanswer["content"] = 1' + READY + "\n```"
    ask(cell(code), last, sub=Answering(fails="bad"), **hooks(log))
    assert log == [
        ("subcall_start", 1, "answering", ("one" * 100)[:100]),
        ("subcall_complete", 1, "answering", None),
        ("subcall_start", 1, "answering", "bad"),
        ("subcall_complete", 1, "answering", "Unavailable 2 times"),
    ]


def test_callbacks_are_told_of_runs_below() -> None:
    log: list[Any] = []
    below = cell('answer["content"] = llm_query("x")' + READY)
    ask(cell('answer["content"] = rlm_query("q", context)' + READY), below, depth=2, **hooks(log))
    assert log == [
        ("subcall_start", 1, "scripted", "q"),
        ("subcall_start", 2, "answering", "x"),
        ("subcall_complete", 2, "answering", None),
        ("subcall_complete", 1, "scripted", None),
    ]


def test_a_callback_that_raises_is_logged_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    def breaks(*_: Any) -> None:
        raise ZeroDivisionError("in the callback")

    code = 'answer["content"] = llm_query_batched(["a", "b"])' + READY
    result = ask(cell(code), **dict.fromkeys(hooks([]), breaks))
    assert (result.outcome, result.content) == (AnswerOutcome.ANSWERED, ["A", "B"])
    assert len([record for record in caplog.records if "raised" in record.message]) == 4


def test_what_is_answered_from_a_record_calls_no_callback() -> None:
    session = opened()
    with pytest.raises(Unavailable):
        ask(cell('x = llm_query("one")'), Unavailable("gone"), session=session)
    log: list[Any] = []
    last = cell('answer["content"] = x + llm_query("two")' + READY)
    assert resume(session, Scripted([last]), TEXT, sub=Answering(), **hooks(log)).content == "ONETWO"
    assert [name for name, *_ in log] == ["subcall_start", "subcall_complete"]


def test_the_watch_is_shown_runs_below() -> None:
    events: list[Any] = []
    below = [cell(f'answer["content"] = {n}' + READY) for n in range(3)]
    code = 'answer["content"] = rlm_query_batched("q", ["a", "b", "c"])' + READY
    result = ask(cell(code), *below, depth=2, parallel=3, watch=events.append)
    assert sorted(result.content) == [0, 1, 2]
    inside = [event for event in events if isinstance(event, InBranch)]
    assert {event.branch for event in inside} == {"a/b1", "a/b2", "a/b3"}
    assert all(event.depth == 1 and not isinstance(event.event, Stopped) for event in inside)


# Limits


def test_refused_calls_are_one_note_and_no_pages() -> None:
    """1,200 calls in a loop in one cell."""
    session, sub = opened(), Answering()
    code = "n = 0\nfor i in range(1200):\n    try:\n        llm_query(f'call {i}')\n        n += 1\n    except Exception: pass\n"
    script = [cell(code + "print(n)"), cell('answer["content"] = n' + READY)]
    # On a busy machine the calls of one cell may take longer than the 60 seconds that a cell usually has.
    result = ask(*script, session=session, sub=sub, limits=Limits(calls=50), bounds=Bounds(seconds=MINUTES))
    assert result.content == len(sub.asked) == 44
    assert result.missing == (Missing(prompt="call 44", why="the limit of calls is reached", count=1200 - 44),)
    assert len(originals(session.branches.open("b1"))) == 1 + 2 * 44
    notes = [event for event in session.ledger.events() if "refused" in event.data]
    assert [(note.data["refused"], note.data["limit"]) for note in notes] == [(1200 - 44, "calls")]
    assert f"44 sub-calls answered, {1200 - 44:,} gave nothing" in said(session)
    ended = resume(session, Scripted(), TEXT, sub=sub)
    assert ended.missing == result.missing
    again = replay(session, opened(), TEXT)
    assert (again.content, again.missing) == (result.content, result.missing)
    check_laws(session)


def test_refused_calls_of_many_threads_and_runs_below_are_counted() -> None:
    session, sub = opened(), Answering()
    code = 'replies = llm_query_batched([f"call {i}" for i in range(3000)])\nprint(rlm_query_batched("q", ["x"] * 40)[-1])'
    script = [cell(code), cell('answer["content"] = replies.count(None)' + READY)]
    result = ask(*script, session=session, sub=sub, limits=Limits(calls=100), depth=2, parallel=8)
    assert result.content == 3000 - len(sub.asked)
    assert 89 <= len(sub.asked) < 90 + 8
    (missing,) = result.missing
    assert missing.count == 3000 - len(sub.asked) + 40
    assert len(session.branches.children()) == 1, "no run was begun"
    assert replay(session, opened(), TEXT).content == result.content
    check_laws(session)


def test_a_cell_with_refused_calls_is_the_same_when_the_run_goes_on() -> None:
    session, sub = opened(), Answering()
    code = 'replies = llm_query_batched([f"call {i}" for i in range(30)])\nprint(replies.count(None))'
    with pytest.raises(Unavailable):
        ask(cell(code), Unavailable("gone"), session=session, sub=sub, limits=Limits(calls=20), parallel=1)
    asked = len(sub.asked)
    last = cell('answer["content"] = [replies.count(None), llm_query("more")]' + READY)
    result = resume(session, Scripted([last]), TEXT, sub=sub, limits={"calls": 1000})
    assert (result.content, result.differing) == ([30 - asked, "MORE"], ())
    assert sub.asked[asked:] == ["more"]
    assert [one.count for one in result.missing] == [30 - asked]
    assert resume(session, Scripted(), TEXT, sub=sub).missing == result.missing


LOW_AND_HIGH: dict[str, tuple[Limits, dict[str, Any]]] = {
    "steps": (Limits(steps=2), {"steps": 10}),
    "calls": (Limits(calls=10), {"calls": None}),
    "tokens": (Limits(tokens=1), {"tokens": 10**6}),
    "money": (Limits(money=0.000001, prices=Prices(input=1.0)), {"money": 5}),
    "seconds": (Limits(seconds=0), {"seconds": 600}),
}


@pytest.mark.parametrize(("limit", "half"), each_value(list(LOW_AND_HIGH), ["", 'answer["content"] = "half"\n']))
def test_a_run_that_a_limit_ended_goes_on_when_it_is_higher(limit: str, half: str) -> None:
    low, high = LOW_AND_HIGH[limit]
    session, sub = opened(), Answering()
    script = [cell(f"{half}x = llm_query('{n}')") if n < 9 else cell("for n in range(40): llm_query('more')") for n in range(20)]
    first = ask(*script, session=session, sub=sub, limits=low)
    assert first.outcome in (AnswerOutcome.UNREADY, AnswerOutcome.NOTHING)
    assert first.limit == next(iter(high))
    same = resume(session, Scripted(), TEXT, sub=sub)
    assert (same.outcome, same.limit, same.content) == (first.outcome, first.limit, first.content)
    asked = len(sub.asked)
    last = cell('answer["content"] = llm_query("last")' + READY)
    second = resume(session, Scripted([last]), TEXT, sub=sub, limits=high)
    assert second.content == "LAST"
    assert len(sub.asked) <= asked + 2
    assert second.steps > first.steps
    third = resume(session, Scripted(), TEXT, sub=sub)
    assert (third.content, third.steps) == ("LAST", second.steps)
    assert replay(session, opened(), TEXT).content == "LAST"
    validate_chat(session.render())
    check_laws(session)


def test_limits_that_are_none_are_refused_and_change_nothing() -> None:
    session = opened()
    with pytest.raises(SpecError, match="limits="):
        RecursiveModel(Scripted(), session, limits={"steps": 3})  # type: ignore[arg-type]
    ask(*[cell("x = 1")] * 9, session=session, limits=Limits(steps=1))
    before = said(session)
    for limits in ({"turns": 3}, {"steps": -1}, {"steps": "many"}, {"money": 5}):
        with pytest.raises(SpecError):
            resume(session, Scripted(), TEXT, limits=limits)
    assert said(session) == before


def test_a_run_goes_on_twice_from_its_limits() -> None:
    session, sub = opened(), Answering()
    ask(*[cell('answer["content"] = "half"')] * 9, session=session, sub=sub, limits=Limits(steps=1))
    again = resume(session, Scripted([cell('answer["content"] = "more"')] * 9), TEXT, sub=sub, limits={"steps": 5})
    assert (again.outcome, again.content, again.limit) == (AnswerOutcome.UNREADY, "more", "steps")
    last = resume(session, Scripted([cell('answer["ready"] = True')]), TEXT, sub=sub, limits={"steps": 20})
    assert (last.outcome, last.content) == (AnswerOutcome.ANSWERED, "more")
    assert replay(session, opened(), TEXT).content == "more"


def test_a_run_that_ended_and_went_on_with_something_else_stays_ended() -> None:
    session = opened()
    ask(*[cell("x = 1")] * 9, session=session, limits=Limits(steps=1))
    session.append({"role": "user", "content": "something else"})
    with pytest.raises(SpecError, match="went on with something else"):
        resume(session, Scripted(), TEXT, limits={"steps": 20})
    assert resume(session, Scripted(), TEXT).outcome is AnswerOutcome.NOTHING


@pytest.mark.parametrize("usage", [None, "x", Tokens(), Tokens(prompt=-9), Tokens(prompt=1 << 39, reply=1 << 39)], ids=range(5))
def test_figures_that_lie_neither_end_a_run_nor_let_it_go_on(usage: Any) -> None:
    sub = Answering(usage)
    code = f'answer["content"] = llm_query_batched(["{"x" * 4000}"] * 60).count(None)' + READY
    result = ask(cell(code), sub=sub, limits=Limits(tokens=40_000), parallel=1)
    assert 10 < len(sub.asked) < 30
    assert result.content == 60 - len(sub.asked)
    assert [one.why for one in result.missing] == ["the limit of tokens is reached"]


# What was sent


class Counting:
    """A root that counts what it receives, by its own measure, and reports that."""

    name, form, context, tokenizer = "counting", "chat", None, "chars/4"

    def __init__(self, *codes: str) -> None:
        self.codes, self.received = list(codes), list[int]()

    def stream(self, request: Request) -> Iterator[Reply]:
        shipped = msgspec.json.encode(list(request.messages)) + msgspec.json.encode(request.tools)
        self.received.append(len(shipped) // 4)
        usage = Tokens(prompt=self.received[-1], reply=20)
        yield Reply(message=cell(self.codes.pop(0)), finish="calls", usage=usage)


def test_the_largest_prompt_is_the_largest_that_the_root_received() -> None:
    root = Counting(*["print('word ' * 300)"] * 6, 'answer["content"] = 1' + READY)
    session = opened(window=4000)
    result = RecursiveModel(root, session, sub=Answering()).ask("what?", TEXT)
    assert result.resident == max(root.received)
    ended = resume(session, Scripted(), TEXT)
    assert ended.resident == max(root.received)


def test_a_prompt_that_was_refused_was_not_the_largest() -> None:
    session, log = opened(), []
    with pytest.raises(Unavailable):
        ask(Unavailable("down"), session=session, watch=log.append)
    result = resume(session, Counting('answer["content"] = 1' + READY), TEXT)
    assert result.resident > 0
    assert not [event for event in log if isinstance(event, Returned | SubCalled)]


def test_many_threads_ask_and_call_at_once() -> None:
    lock, log = threading.Lock(), list[str]()

    def keep(key: str) -> int:
        """Keep a key."""
        with lock:
            log.append(key)
            return len(log)

    below = cell('answer["content"] = [keep(context), llm_query(context)]' + READY)
    code = 'answer["content"] = [one[1] for one in rlm_query_batched("q", [str(n) for n in range(9)])]' + READY
    session = opened()
    result = ask(cell(code), *[below] * 9, depth=2, functions={"keep": keep}, parallel=4, session=session)
    assert result.content == [str(n) for n in range(9)]
    assert sorted(log, key=int) == result.content
    assert replay(session, opened(), TEXT, functions={"keep": keep}).content == result.content
    assert len(log) == 9
    check_laws(session)

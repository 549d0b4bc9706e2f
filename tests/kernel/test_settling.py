"""An append that raised admitted nothing, one that returned admitted everything, and nobody ever sees a window over its
budget: whatever the model, the policy or the caller does meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kernel.talk import user
from kilburn import Store
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.effect import Answer, Ask, Effect, Find, Later, Note
from kilburn.errors import KernelError
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.kernel.standing import reminder
from kilburn.model import Reply, Request, Tokens
from kilburn.move import Evict, Fold, Load
from kilburn.policy import Cause, Policy, View
from kilburn.testing import Scripted, check_laws

WINDOW = 1000
GUARD = 60.0
"""Seconds after which a test that hangs is given up."""


def words(number: int, many: int = 100) -> dict[str, Any]:
    return user(f"message {number}: " + f"word{number} " * many)


def opened(path: Any, policy: Any, model: Any = None, window: int = WINDOW) -> kilburn.Store:
    return kilburn.open(path, window=window, policy=policy, tokenizer="chars/4", model=model)


class Asks:
    """Asks `times` questions where the window is over its capacity, and then evicts what it may."""

    def __init__(self, times: int = 1) -> None:
        self.times = times

    def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Any]]:
        if not view.excess:
            return []
        for number in range(self.times):
            yield Ask(prompt=f"question {number}", timeout=GUARD)
        older = [page for page in view.pages if page.message != view.turn]
        return [Evict(view.free(older, view.excess + 200))]


class Gate:
    """A model that says when it was asked, and answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def __call__(self, request: Request) -> str:
        self.asked.set()
        assert self.go_on.wait(GUARD)
        return "words"


RENDER = """
import sys, kilburn
with kilburn.open(sys.argv[1], window=1000, policy="fifo", tokenizer="chars/4", readonly=True) as store:
    session = store.session("a")
    print(session.render().tokens, len(session.contents.messages()))
"""


def test_nobody_sees_a_window_over_its_budget_while_a_model_is_waited_for(tmp_path: Path) -> None:
    gate = Gate()
    path = str(tmp_path / "a.db")
    with opened(path, Asks(), Scripted([gate])) as store:
        session = store.session("a")
        given = [words(number) for number in range(7)]
        for message in given[:-1]:
            session.append(message)
        before = session.render()
        worker = threading.Thread(target=session.append, args=(given[-1],))
        worker.start()
        assert gate.asked.wait(GUARD)
        assert session.render() == before
        assert session.render().tokens <= WINDOW
        assert session.contents.messages() == given[:-1]
        seen = subprocess.run([sys.executable, "-c", RENDER, path], capture_output=True, text=True, timeout=GUARD, check=True)
        tokens, messages = map(int, seen.stdout.split())
        assert (tokens <= WINDOW, messages) == (True, len(given) - 1)
        gate.go_on.set()
        worker.join(GUARD)
        assert session.contents.messages() == given
        assert session.render().tokens <= WINDOW
        check_laws(session, given)


def fill(session: Session, policy_starts: int = 6) -> list[dict[str, Any]]:
    given = [words(number) for number in range(policy_starts)]
    for message in given:
        session.append(message)
    return given


@pytest.mark.parametrize("wait", range(4))
def test_a_cancelled_append_admitted_nothing_and_can_be_tried_again(tmp_path: Path, wait: int) -> None:
    """Cancelled at each of the plan's questions in turn."""

    async def drive(session: Session, model: Scripted, gate: Gate) -> None:
        task = asyncio.create_task(session.aappend(words(6)))
        await asyncio.to_thread(gate.asked.wait, GUARD)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.go_on.set()

    path = tmp_path / "a.db"
    gate = Gate()
    model = Scripted([*["words"] * wait, gate, *["words"] * 50])
    with opened(path, Asks(4), model) as store:
        session = store.session("a")
        given = fill(session)
        before = (session.render(), session.contents.pages(), session.window.use)
        asyncio.run(drive(session, model, gate))
        assert (session.render(), session.contents.pages(), session.window.use) == before
        assert session.contents.messages() == given
        session.append(words(6))
        assert session.contents.messages() == [*given, words(6)]
        check_laws(session, [*given, words(6)])
    with opened(path, "fifo") as store:
        assert store.session("a").contents.messages() == [*given, words(6)]


def test_an_interrupt_while_a_model_is_waited_for_admits_nothing() -> None:
    def interrupt(request: Request) -> str:
        signal.raise_signal(signal.SIGINT)
        threading.Event().wait(0.2)  # the main thread takes the signal at its next step
        return "words"

    with opened(":memory:", Asks(), Scripted([interrupt])) as store:
        session = store.session("a")
        given = fill(session)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                session.append(words(6))
        finally:
            signal.signal(signal.SIGINT, before)
        assert session.contents.messages() == given
        assert session.render().tokens <= WINDOW
        session.append(words(6))
        check_laws(session, [*given, words(6)])


class Interrupted(Sqlite):
    """A store in which a Ctrl-C comes before or after the work of a commit."""

    when = ""

    def commit(self, segment: int, batch: Batch) -> None:
        when, self.when = self.when, ""
        if when == "before":
            raise KeyboardInterrupt
        super().commit(segment, batch)
        if when == "after":
            raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_commit_leaves_a_session_that_goes_on(when: str) -> None:
    """It admitted the message or not; either way the session and its store agree."""
    store = Interrupted(":memory:")
    with Store(store, Budget(WINDOW), "fifo", tokenizer="chars/4") as levels:
        session = levels.session("a")
        given = fill(session)
        store.when = when
        with pytest.raises(KeyboardInterrupt):
            session.append(words(6))
        given += [words(6)] if when == "after" else []
        assert session.contents.messages() == given
        session.append(words(7))
        check_laws(session, [*given, words(7)])


def test_a_plan_that_will_not_be_closed_does_not_hide_the_interrupt() -> None:
    gate = Gate()

    async def drive(session: Session) -> None:
        task = asyncio.create_task(session.aappend(words(0)))
        await asyncio.to_thread(gate.asked.wait, GUARD)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.go_on.set()

    with opened(":memory:", Plain(stubborn), Scripted([gate, "words"])) as store:
        session = store.session("a")
        asyncio.run(drive(session))
        assert session.contents.messages() == []
        session.append(words(1))
        check_laws(session, [words(1)])


def test_what_others_did_meanwhile_stays_and_the_words_come_too_late() -> None:
    gate = Gate()
    with opened(":memory:", Asks(), Scripted([gate, *["words"] * 50])) as store:
        session = store.session("a")
        given = fill(session)
        worker = threading.Thread(target=session.append, args=(words(6),))
        worker.start()
        assert gate.asked.wait(GUARD)
        session.append(user("from another thread"))
        session.forget("p2")
        gate.go_on.set()
        worker.join(GUARD)
        texts = [message["content"] for message in session.contents.messages()]
        assert texts == [given[0]["content"], *(message["content"] for message in given[2:]), texts[-2], texts[-1]]
        assert texts[-2:] == ["from another thread", words(6)["content"]]
        assert "late" in [event.data["outcome"] for event in session.ledger.events() if event.act is Act.COMPACT]
        check_laws(session)


def test_orders_that_another_writer_admits_while_a_model_is_asked_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "a.db"

    def admit_an_order(request: Request) -> str:
        with opened(path, "fifo", window=60_000) as other:
            other.session("a").append(user("Never push to main."), {"role": "assistant", "content": "word " * 12_000})
        assert len(session.contents.messages()) == 3
        return "words"

    def plan(view: View) -> Generator[Effect, Answer, Sequence[Any]]:
        if view.turn > 1:
            yield Ask(prompt="question", timeout=GUARD)
        return []

    with opened(path, Plain(plan), Scripted([admit_an_order]), window=60_000) as store:
        session = store.session("a")
        session.append(user("hello"))
        session.append(user("go on"))
        assert len(session.contents.messages()) == 4
        assert reminder(session.window) is not None
        check_laws(session)


def test_many_threads_append_beside_a_slow_model_and_each_message_is_there_once() -> None:
    def slow(request: Request) -> str:
        threading.Event().wait(0.002)
        return "words"

    with opened(":memory:", Asks(2), Scripted([slow] * 5000)) as store:
        session = store.session("a")
        errors: list[BaseException] = []
        over: list[int] = []

        def write(which: int) -> None:
            try:
                for number in range(12):
                    session.append(words(100 * which + number, 30))
                    over.append(session.render().tokens)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD)
        assert errors == []
        assert max(over) <= WINDOW
        texts = [message["content"] for message in session.contents.messages()]
        assert sorted(texts) == sorted(words(100 * which + number, 30)["content"] for which in range(4) for number in range(12))
        check_laws(session)


def test_a_resize_shows_its_budget_only_when_it_is_done() -> None:
    gate = Gate()
    with opened(":memory:", Asks(), Scripted([gate])) as store:
        session = store.session("a")
        fill(session)
        worker = threading.Thread(target=session.edits.resize, args=(Budget(400),))
        worker.start()
        assert gate.asked.wait(GUARD)
        assert session.prompts.capacity == WINDOW
        assert session.render().tokens <= session.prompts.capacity
        gate.go_on.set()
        worker.join(GUARD)
        assert session.prompts.capacity == 400
        assert session.render().tokens <= 400


# Interrupts in the middle of a step, and calls from within


def interrupted(
    session: Session, message: dict[str, Any], line: int, functions: tuple[str, ...] = ()
) -> tuple[bool, BaseException | None]:
    """Append with a Ctrl-C at the so-manieth line of our own code, or of functions of these names; whether that line was
    reached, and what was raised."""
    left = line

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal left
        if "/kilburn/" not in frame.f_code.co_filename:
            return None
        if event == "line" and (not functions or frame.f_code.co_name in functions):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        session.append(message)
    except BaseException as error:
        return True, error
    finally:
        sys.settrace(before)
    return left <= 0, None


def test_an_interrupt_at_a_border_of_a_batch_leaves_a_whole_session(tmp_path: Path) -> None:
    """Every line that begins and ends a batch, one after another."""
    with opened(tmp_path / "a.db", "fifo", window=400) as store:
        session = store.session("a")
        line, hit = 0, True
        while hit:
            line += 1
            hit, error = interrupted(session, words(line, 20), line, ("_settling", "begin", "end", "check_free"))
            assert error is None or isinstance(error, KeyboardInterrupt), (line, error)
            session.append(user(f"go on {line}"))
            check_laws(session)
        assert line > 10


@pytest.mark.parametrize("policy", ["fifo", "hybrid"])
def test_an_interrupt_at_any_line_leaves_a_whole_session(tmp_path: Path, policy: str) -> None:
    """Lines drawn from all of them; the message is there once or not at all, in memory and in the file, and all goes on."""
    rng = random.Random(7)
    path = tmp_path / "a.db"
    lines = sorted(rng.sample(range(1, 6000), 60))
    kept: list[str] = []
    reached = 0
    with opened(path, policy, window=400) as store:
        session = store.session("a")
        session.append(words(0, 20))
        kept.append(words(0, 20)["content"])
        for number, line in enumerate(lines, start=1):
            message = words(number, 20)
            hit, error = interrupted(session, message, line)
            reached += hit
            assert error is None or isinstance(error, KeyboardInterrupt), (line, error)
            texts = [each["content"] for each in session.contents.messages()]
            assert texts in (kept, [*kept, message["content"]]), line
            assert error is not None or texts[-1] == message["content"]
            assert session.render().tokens <= 400, line
            kept = texts
            session.append(user(f"go on {number}"))
            kept.append(f"go on {number}")
        check_laws(session)
    assert reached > 20
    with opened(path, "fifo", window=400) as store:
        assert [each["content"] for each in store.session("a").contents.messages()] == kept


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.render(),
        lambda session: session.forget("p1"),
        lambda session: session.pin("p1"),
        lambda session: session.append(user("from within")),
        lambda session: session.rate("p1"),
        lambda session: session.edits.apply(Evict((2,))),
        lambda session: session.recall("p1"),
        lambda session: session.edits.resize(Budget(500)),
        lambda session: session.edits.idle(),
    ],
)
def test_a_policy_that_calls_its_own_process_fails_and_loses_nothing(tmp_path: Path, call: Callable[[Session], Any]) -> None:
    box: list[Session] = []

    def plan(view: View) -> Any:
        call(box[0])
        return ()

    path = tmp_path / "a.db"
    with opened(path, Plain(plan), window=300) as store:
        box.append(store.session("a"))
        given = [words(number, 30) for number in range(12)]
        for message in given:
            box[0].append(message)
            assert box[0].render().tokens <= 300
        outcomes = {event.data["outcome"] for event in box[0].ledger.events() if event.act is Act.COMPACT}
        assert outcomes == {"failed"}
        check_laws(box[0], given)
    with opened(path, "fifo", window=300) as store:
        assert store.session("a").contents.messages() == given


# Policies that misbehave


class Plain:
    """Wants one thing, whatever it is shown."""

    def __init__(self, plan: Callable[[View], Any]) -> None:
        self._plan = plan

    def plan(self, view: View) -> Any:
        return self._plan(view)


def effects(*values: Any, moves: Any = ()) -> Callable[[View], Generator[Any, Any, Any]]:
    def plan(view: View) -> Generator[Any, Any, Any]:
        yield from values
        return moves

    return plan


def endless(view: View) -> Iterator[Any]:
    while True:
        yield Note(outcome="empty")


def boom(view: View) -> Any:
    raise RuntimeError("quotes " + view.text(view.pages[0].id))


def late_boom(view: View) -> Iterator[Any]:
    yield Ask(prompt="well?")
    raise RuntimeError("after the words")


def stubborn(view: View) -> Iterator[Any]:
    try:
        yield Ask(prompt="well?")
    finally:
        yield Note(outcome="empty")


class Sly(tuple[Any, ...]):
    """A tuple that will not be read."""

    def __iter__(self) -> Iterator[Any]:
        raise ValueError("no")


class Text(str):
    """A text that will not be encoded."""

    def encode(self, *args: Any, **named: Any) -> bytes:
        raise RuntimeError("no")


def leaves(error: type[BaseException]) -> Callable[[View], Any]:
    def plan(view: View) -> Any:
        raise error

    return plan


MISBEHAVING: dict[str, tuple[Callable[[View], Any], str]] = {
    "raises": (boom, "failed"),
    "raises after the words": (late_boom, "failed"),
    "stops the iteration": (lambda view: next(iter(())), "failed"),
    "passes for a closed generator": (leaves(GeneratorExit), "failed"),
    "passes for a cancelled task": (leaves(asyncio.CancelledError), "failed"),
    "ends the program": (leaves(SystemExit), "failed"),
    "gives moves that will not be read": (lambda view: Sly((Evict((2,)),)), "failed"),
    "writes a text of its own kind": (lambda view: [Fold((2, 3), text=Text("short"))], "illegal"),
    "returns a number": (lambda view: 5, "failed"),
    "returns None": (lambda view: None, "failed"),
    "returns a text": (lambda view: "p1", "failed"),
    "gives a number as a move": (lambda view: [17], "illegal"),
    "gives an address as a page": (lambda view: [Evict(("p1",))], "illegal"),  # type: ignore[arg-type]
    "gives no pages": (lambda view: [Evict(())], "illegal"),
    "gives pages as a number": (lambda view: [Load(5)], "illegal"),  # type: ignore[arg-type]
    "gives true as a page": (lambda view: [Evict((True,))], "illegal"),
    "writes what no store can hold": (lambda view: [Fold((2, 3), text="a \ud800 b")], "illegal"),
    "keeps spans that are texts": (lambda view: [Fold((2,), keep=(("0", "5"),))], "illegal"),  # type: ignore[arg-type]
    "wants a million moves": (lambda view: [Evict((2,))] * 1_000_000, "failed"),
    "yields for ever": (endless, "failed"),
    "yields a number": (effects(7), "failed"),
    "asks a number": (effects(Ask(prompt=5)), "failed"),  # type: ignore[arg-type]
    "asks with odd limits": (effects(Ask(prompt="x", max_tokens="many")), "failed"),  # type: ignore[arg-type]
    "searches for nothing": (effects(Find(query=None)), "failed"),  # type: ignore[arg-type]
    "asks in the background about texts": (effects(Later(pages=("p1",), compose=str)), "failed"),  # type: ignore[arg-type, call-overload]
    "asks in the background with no question": (effects(Later(pages=(1,), compose=None)), "failed"),  # type: ignore[arg-type]
    "notes figures that are none": (effects(Note(outcome="done", figures={"a": "b"})), "failed"),  # type: ignore[dict-item]
    "returns a number after its effects": (effects(Note(), moves=5), "failed"),
    "will not be closed": (stubborn, "empty"),
}


@pytest.mark.parametrize("way", MISBEHAVING)
def test_whatever_a_policy_does_is_an_outcome_and_a_fallback(tmp_path: Path, way: str) -> None:
    plan, outcome = MISBEHAVING[way]
    policy: Policy = Plain(plan)
    path = tmp_path / "a.db"
    with opened(path, policy, Scripted(["words"] * 100)) as store:
        session = store.session("a")
        given = [words(number) for number in range(10)]
        for message in given:
            session.append(message)
            assert session.render().tokens <= WINDOW
        check_laws(session, given)
        told = [event for event in session.ledger.events() if event.act is Act.COMPACT]
        assert {event.data["outcome"] for event in told} == {outcome}
        assert not any("word0" in json.dumps(event.data) + event.why for event in session.ledger.events())
    with opened(path, "fifo") as store:
        assert store.session("a").contents.messages() == given


def test_words_that_no_store_can_hold_are_written_plainly(tmp_path: Path) -> None:
    """A lone surrogate in a note or a purpose used to survive the undo, so that nothing could be appended any more."""
    path = tmp_path / "a.db"
    odd = "odd \udfff"
    plan = effects(Ask(prompt="x", purpose=odd), Note(outcome=odd, why=odd, figures={odd: 2**70}))
    with opened(path, Plain(plan), Scripted(["words"] * 100)) as store:
        session = store.session("a")
        given = [words(number) for number in range(3)]
        for message in given:
            session.append(message)
        assert any("odd \ufffd" in event.why for event in session.ledger.events())
        check_laws(session, given)
    with opened(path, "fifo") as store:
        assert store.session("a").contents.messages() == given


@pytest.mark.parametrize("moves", [("p1",), (None,), (5,), (Evict(("p1",)),), (Fold((1,), text="\udc00"),)])  # type: ignore[arg-type]
def test_what_is_no_move_is_a_typed_error(moves: tuple[Any, ...]) -> None:
    with opened(":memory:", "fifo") as store:
        session = store.session("a")
        given = fill(session, 3)
        with pytest.raises(KernelError, match=r"no move|odd"):
            session.edits.apply(*moves)
        check_laws(session, given)


# What providers report

ODD = [10_000_000, 3_000_000, 2**70, -5, True, 1.5, float("nan"), "many", None]


@pytest.mark.parametrize("prompt", ODD, ids=str)
def test_a_wrong_report_changes_nothing(tmp_path: Path, prompt: Any) -> None:
    path = tmp_path / "a.db"
    with kilburn.open(path, window=3000, policy="fifo", tokenizer="auto") as store:
        session = store.session("a")
        given = fill(session, 9)
        counted = session.render().tokens
        assert counted >= 256
        capacity = session.prompts.capacity
        session.prompts.observe(Tokens(prompt=prompt), counted)
        session.prompts.observe(Tokens(prompt=2 * counted, cached=prompt), counted)
        assert session.prompts.capacity == capacity or prompt in (10_000_000, 3_000_000)
        session.append(words(99))
    with kilburn.open(path, window=3000, policy="fifo", tokenizer="auto") as store:
        session = store.session("a")
        session.append(words(100))
        assert session.contents.messages() == [*given, words(99), words(100)]
        assert session.stats().overflow == 0
        check_laws(session, [*given, words(99), words(100)])


def test_the_largest_report_that_is_believed_leaves_the_pins_and_some_room(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with kilburn.open(path, window=3000, policy="hybrid", tokenizer="auto") as store:
        session = store.session("a")
        session.append({"role": "system", "content": "rule " * 1200})
        given = fill(session, 9)
        prompt = session.render()
        session.prompts.observe(Tokens(prompt=8 * prompt.tokens), prompt.tokens)
        assert prompt.tokens < 3000
        assert session.render().tokens <= session.prompts.capacity < 3000
        session.append(words(10))
        session.pin("p3")
    with kilburn.open(path, window=3000, policy="hybrid", tokenizer="auto") as store:
        session = store.session("a")
        session.append(words(11))
        assert session.contents.messages()[1:] == [*given, words(10), words(11)]
        check_laws(session)


def test_a_report_over_the_budget_is_settled_at_once_and_no_model_is_waited_for() -> None:
    model = Scripted([], tokenizer="auto")
    with kilburn.open(":memory:", window=3000, policy=Asks(), model=model) as store:
        session = store.session("a")
        fill(session, 10)
        prompt = session.render()
        session.prompts.observe(Tokens(prompt=3 * prompt.tokens), prompt.tokens)
        assert session.prompts.use <= session.prompts.capacity < 3000
        assert model.requests == []
        causes = [event.cause for event in session.ledger.events() if event.act is Act.EVICT]
        assert set(causes) == {"pressure"}


@pytest.mark.parametrize("window", [500, 3000])
def test_a_store_opened_for_reading_renders_within_its_own_window(tmp_path: Path, window: int) -> None:
    path = tmp_path / "a.db"
    with opened(path, "fifo", window=5000) as store:
        session = store.session("a")
        given = fill(session, 24)
        assert session.render().tokens > 3000
    for _ in range(2):
        with kilburn.open(str(path), window=window, tokenizer="chars/4", readonly=True) as store:
            session = store.session("a")
            assert session.render().tokens <= window
            assert session.render("messages").tokens <= window
            assert session.contents.messages() == given
            assert session.recall("p3") == given[2]["content"]


def test_a_reply_is_taken_as_plain_text() -> None:
    odd = "words with a lone \ud83d and a pair \ud83d\ude00"
    heard: list[str] = []

    class Hears:
        def plan(self, view: View) -> Generator[Effect, Answer, Sequence[Any]]:
            heard.append((yield Ask(prompt="well?")).text)
            return []

    with opened(":memory:", Hears(), Scripted([odd, "x" * 10_000_000])) as store:
        session = store.session("a")
        for number in (1, 2, 3):
            session.append(words(number))
        outcomes = [event.data["outcome"] for event in session.ledger.events() if event.act is Act.ASK]
    # What freed nothing is not asked again at once.
    assert heard[:2] == ["words with a lone \ufffd and a pair \U0001f600", ""]
    assert len(heard[2]) < 100_000
    assert outcomes == ["done", "truncated"]


def test_a_model_whose_reply_is_none_has_failed() -> None:
    class Odd(Scripted):
        def stream(self, request: Request) -> Iterator[Any]:
            yield Reply(message=5)  # type: ignore[arg-type]

    with opened(":memory:", Asks(), Odd()) as store:
        session = store.session("a")
        given = fill(session, 10)
        assert {event.data["outcome"] for event in session.ledger.events() if event.act is Act.ASK} == {"failed"}
        check_laws(session, given)


class Listens:
    """Remembers why it was asked, and about which pages; evicts what it must."""

    def __init__(self) -> None:
        self.heard: list[tuple[Cause, tuple[int, ...]]] = []

    def plan(self, view: View) -> Sequence[Evict]:
        self.heard.append((view.cause, view.wanted))
        return [Evict(view.free(view.pages, view.excess))] if view.excess else []


def test_a_policy_is_told_why_it_is_asked() -> None:
    policy = Listens()
    with kilburn.open(":memory:", window=3000, policy=policy, tokenizer="auto") as store:
        session = store.session("a")
        fill(session, 6)
        prompt = session.render()
        policy.heard.clear()
        session.pin("p2-p3")
        session.unpin("p2")
        session.rate("p4", 0.5)
        session.edits.idle()
        session.recall("p1-p3")
        session.search("message")
        assert policy.heard == [(Cause.ADVICE, (2, 3)), (Cause.ADVICE, (2,)), (Cause.ADVICE, (4,)), (Cause.IDLE, ())]
        policy.heard.clear()
        session.prompts.observe(Tokens(prompt=3 * prompt.tokens), prompt.tokens)
        assert {cause for cause, _ in policy.heard} == {Cause.PRESSURE}
        asked = {event.cause for event in session.ledger.events() if event.act in (Act.FAULT, Act.SEARCH)}
        assert asked == {Cause.FAULT}

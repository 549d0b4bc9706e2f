"""A question in the background: answered once, about what was asked, and the agent never waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import kilburn
from kernel.talk import user
from kilburn.effect import Ask, Deferred, Later
from kilburn.errors import PinsExceedWindow, StoreStale
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.model import Request
from kilburn.move import Fold
from kilburn.policies.chain import Chain
from kilburn.policy import Plan, View
from kilburn.testing import Scripted, check_laws
from waiting import until


@dataclass
class Swap:
    """Asks about the first `count` pages as soon as they are there, and puts the answer in their place."""

    count: int = 3

    def __post_init__(self) -> None:
        self.seen: list[Deferred] = []
        self.started: list[str] = []

    def plan(self, view: View) -> Plan:
        if view.deferred is not None:
            self.seen.append(view.deferred)
            answer = view.deferred.answer
            if answer is not None and answer.ok:
                return [Fold(pages=view.deferred.pages, text=answer.text)]
        elif view.turn > self.count and not any(page.depth for page in view.pages):
            pages = tuple(range(2, self.count + 2))  # the first is the task, which is pinned
            answer = yield Later(pages=pages, compose=_question(pages), purpose="a memory")
            self.started.append(answer.outcome)
        return []


def _question(pages: tuple[int, ...]) -> Callable[[Callable[[int], str]], Ask]:
    return lambda text: Ask(prompt=" ".join(text(page) for page in pages))


class Gate:
    """A model's script that answers when it is told to."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()

    def __call__(self, request: Request) -> str:
        self.asked.set()
        assert self.go_on.wait(600)
        return "in short"


def settled(session: Session) -> None:
    """Wait until the answer is there."""
    background = session._planner.background
    until(lambda: (errand := background._errand) is None or errand.answer is not None)


def opened(policy: Any, *script: Any, window: int = 2000) -> Any:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4", model=Scripted(list(script)))


def words(number: int) -> dict[str, str]:
    return user(f"message {number} " + "word " * 20)


def test_exactly_the_snapshot_is_swapped_whatever_came_meanwhile() -> None:
    gate, policy = Gate(), Swap()
    with opened(policy, gate) as store:
        session = store.session("a")
        given = [words(number) for number in range(8)]
        session.append(*given[:4])
        assert gate.asked.wait(600)
        for message in given[4:7]:
            session.append(message)
        assert all(deferred.answer is None for deferred in policy.seen)
        gate.go_on.set()
        settled(session)
        session.append(given[7])
        fold = session.contents.pages()[-1][0]
        assert fold.sources == (2, 3, 4)
        assert [page.id for page in session.window.resident()] == [1, -1, 5, 6, 7, 8]
        check_laws(session, given)
        assert policy.started == ["started"]
        assert [receipt.outcome for receipt in session.ledger.receipts()] == ["started", "done"]


def test_the_question_quotes_the_pages_exactly() -> None:
    heard: list[str] = []

    def listen(request: Request) -> str:
        heard.append(request.messages[-1]["content"])
        return "in short"

    with opened(Swap(), listen) as store:
        session = store.session("a")
        session.append(*(words(number) for number in range(4)))
        settled(session)
        assert heard == [" ".join(words(number)["content"] for number in range(1, 4))]


def test_a_second_question_is_refused_while_one_is_on_its_way() -> None:
    class Twice(Swap):
        def plan(self, view: View) -> Plan:
            for _ in range(2):
                answer = yield Later(pages=(1,), compose=_question((1,)))
                self.started.append(answer.outcome)
            return []

    gate, policy = Gate(), Twice()
    with opened(policy, gate) as store:
        store.session("a").append(words(1))
        gate.go_on.set()
    assert policy.started == ["started", "busy"]


def test_without_a_model_nothing_is_asked() -> None:
    policy = Swap()
    with kilburn.open(":memory:", window=2000, policy=policy, tokenizer="chars/4") as store:
        store.session("a").append(*(words(number) for number in range(4)))
    assert policy.started == ["none"]


def test_an_answer_after_the_end_of_the_session_comes_too_late(tmp_path: Any) -> None:
    gate = Gate()
    path = str(tmp_path / "a.db")
    with kilburn.open(path, window=2000, policy=Swap(), tokenizer="chars/4", model=Scripted([gate])) as store:
        session = store.session("a")
        given = [words(number) for number in range(4)]
        session.append(*given)
        assert gate.asked.wait(600)
    gate.go_on.set()
    with kilburn.open(path, window=2000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        assert session.ledger.receipts()[-1].outcome == "late"
        check_laws(session, given)


def test_what_was_forgotten_meanwhile_is_not_brought_back_by_a_summary() -> None:
    gate, policy = Gate(), Swap()
    with opened(policy, gate) as store:
        session = store.session("a")
        session.append(*(words(number) for number in range(4)))
        assert gate.asked.wait(600)
        session.forget("p2")
        gate.go_on.set()
        settled(session)
        session.append(words(9))
        answered = [deferred for deferred in policy.seen if deferred.answer is not None]
        assert [deferred.answer.outcome for deferred in answered if deferred.answer] == ["failed"]
        assert not any(page.depth for page, _ in session.contents.pages())


def test_a_question_of_a_batch_that_failed_was_never_asked() -> None:
    class Eager(Swap):
        def plan(self, view: View) -> Plan:
            if view.deferred is None:
                self.started.append((yield Later(pages=(view.turn,), compose=_question((view.turn,)))).outcome)
            else:
                self.seen.append(view.deferred)
            return []

    policy = Eager()
    with opened(policy, "one", "two", window=300) as store:
        session = store.session("a")
        session.append({"role": "system", "content": "word " * 150})
        settled(session)
        session.append(user("go on"))
        calls = [{"id": f"c{n}", "type": "function", "function": {"name": "x" * 200, "arguments": "{}"}} for n in range(8)]
        with pytest.raises(PinsExceedWindow):
            session.append({"role": "assistant", "content": None, "tool_calls": calls})
        session.append(user("go on"))
        settled(session)
        session.append(user("go on"))
        assert all(page in session.window.pages for deferred in policy.seen for page in deferred.pages)


def test_a_mistake_in_the_question_is_a_failed_answer() -> None:
    class Wrong(Swap):
        def plan(self, view: View) -> Plan:
            if view.deferred is None:
                yield Later(pages=(1,), compose=lambda text: Ask(prompt=text(77)))
            else:
                self.seen.append(view.deferred)
            return []

    policy = Wrong()
    with opened(policy, "never asked") as store:
        session = store.session("a")
        session.append(words(1))
        settled(session)
        session.append(words(2))
        asks = [event for event in session.ledger.events() if event.act is Act.ASK]
        assert [event.data["outcome"] for event in asks] == ["failed"]
        assert "UnknownAddress" in asks[0].data["detail"]


class Trio(Swap):
    """A `Swap` that says what its own answers were, and asks under a key."""

    def __init__(self, key: str = "own") -> None:
        super().__init__()
        self.key, self.own = key, []

    def plan(self, view: View) -> Plan:
        deferred = view.deferred
        if deferred is not None and deferred.key == self.key and deferred.answer is not None:
            self.own.append(deferred.answer)
            return [Fold(pages=deferred.pages, text=deferred.answer.text)] if deferred.answer.ok else []
        if deferred is None and not self.own and view.turn > self.count:
            pages = (2, 3, 4)
            self.started.append((yield Later(pages=pages, compose=_question(pages), key=self.key)).outcome)
        return []


def outcomes(session: Session) -> list[str]:
    return [event.data["outcome"] for event in session.ledger.events() if event.act is Act.ASK]


def test_each_of_two_policies_knows_its_own_answer() -> None:
    first, second = Trio("first"), Trio("second")
    with opened(Chain(first, second), "in short", "shorter") as store:
        session = store.session("a")
        given = [words(number) for number in range(8)]
        session.append(*given[:4])
        settled(session)
        session.append(given[4])
        assert (len(first.own), len(second.own)) == (1, 0)
        assert first.started == ["started"]
        assert second.started == ["busy"]
        assert session.contents.pages()[-1][0].sources == (2, 3, 4)
        for message in given[5:]:
            settled(session)
            session.append(message)
        assert (len(first.own), len(second.own)) == (1, 1)
        check_laws(session, given)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["compose", "model", "review"])
def test_whatever_ends_the_thread_the_next_question_is_asked(where: str) -> None:
    def leave(*_: object) -> Any:
        raise SystemExit(where)

    class Leaving(Swap):
        def plan(self, view: View) -> Plan:
            if view.deferred is None:
                compose = leave if where == "compose" else _question((1,))
                review = leave if where == "review" else None
                self.started.append((yield Later(pages=(1,), compose=compose, review=review)).outcome)
            return []

    policy = Leaving()
    with opened(policy, *([leave if where == "model" else "in short"] * 3)) as store:
        session = store.session("a")
        for number in range(3):
            session.append(words(number))
            settled(session)
        assert policy.started == ["started", "started"]
        assert outcomes(session) == ["failed"]
        detail = [event.data["detail"] for event in session.ledger.events() if event.act is Act.ASK]
        assert detail == ["its thread ended without an answer"]


def test_a_model_that_hangs_is_left_behind_when_the_time_of_its_question_is_over() -> None:
    gate = Gate()

    class Hurried(Trio):
        def plan(self, view: View) -> Plan:
            if view.deferred is not None and view.deferred.answer is not None:
                self.own.append(view.deferred.answer)
            elif view.deferred is None and not self.own:
                yield Later(pages=(1,), compose=lambda text: Ask(prompt=text(1), timeout=0.05))
            return []

    policy = Hurried()
    with opened(policy, gate) as store:
        session = store.session("a")
        session.append(words(1))
        settled(session)
        session.append(words(2))
        gate.go_on.set()
        assert [answer.outcome for answer in policy.own] == ["failed"]
        assert "no answer within 0.05 s" in policy.own[0].detail


def test_a_question_without_a_purpose_comes_too_late_too() -> None:
    gate = Gate()
    with opened(Trio(), gate) as store:
        session = store.session("a")
        session.append(*(words(number) for number in range(4)))
        assert gate.asked.wait(600)
        session.close()
        gate.go_on.set()
        assert session.ledger.receipts()[-1].outcome == "late"


def test_sessions_of_one_store_do_not_mix_their_answers() -> None:
    def echo(request: Request) -> str:
        return request.messages[-1]["content"].split()[1]

    names = ["a", "b", "c"]
    with opened(Swap(), *[echo] * 3) as store:
        for at, name in enumerate(names):
            store.session(name).append(*(words(10 * at + number) for number in range(4)))
        for name in names:
            settled(store.session(name))
        for name in names:
            store.session(name).append(words(99))
        folded = [str(store.session(name).recall("f1")).split()[-1] for name in names]
        assert folded == ["1", "11", "21"]


def test_two_that_write_one_session_lose_nothing(tmp_path: Any) -> None:
    path = str(tmp_path / "a.db")
    gate = Gate()
    with (
        kilburn.open(path, window=2000, policy=Swap(), tokenizer="chars/4", model=Scripted([gate, "in short"])) as one,
        kilburn.open(path, window=2000, policy="fifo", tokenizer="chars/4") as other,
    ):
        given = [words(number) for number in range(6)]
        behind = one.session("a")
        behind.append(*given[:4])
        assert gate.asked.wait(600)
        other.session("a").append(given[4])
        gate.go_on.set()
        settled(behind)
        with pytest.raises(StoreStale):
            behind.append(words(77))
        again = one.session("a")
        again.append(given[5])
        assert again.contents.messages() == given
        check_laws(again, given)


def test_many_threads_and_a_forget_beside_the_questions(tmp_path: Any) -> None:
    policy = "comem(every=1, to=60)"
    model = Scripted([lambda request: "the words of all messages, in short"] * 500)
    with kilburn.open(tmp_path / "a.db", window=1200, policy=policy, tokenizer="chars/4", model=model) as store:
        session = store.session("a")
        session.append(user("task"))
        errors: list[BaseException] = []

        def write(which: int) -> None:
            try:
                for number in range(12):
                    session.append({"role": "assistant", "content": f"{which} {number} " + "word " * 20})
                    if which == 0 and number % 4 == 3:
                        session.forget(f"p{number}")
                    session.render()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=write, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        settled(session)
        session.append(user("the end"))
        check_laws(session)
        assert len(session.contents.pages()) >= 50


def test_an_answer_handed_out_to_a_plan_that_then_asks_is_not_lost_to_another_thread() -> None:
    """While a plan waits for a model, appends of others are batches of their own: they are handed the answer
    that was handed to it, and it comes too late."""
    gate = Gate()

    class Further(Trio):
        def plan(self, view: View) -> Plan:
            deferred = view.deferred
            if deferred is not None and deferred.answer is not None:
                self.own.append(deferred.answer)
                yield Ask(prompt="and then?")
                self.started.append((yield Later(pages=(2,), compose=_question((2,)))).outcome)
            elif deferred is None and not self.own and view.turn > self.count:
                yield Later(pages=(1,), compose=_question((1,)))
            return []

    policy = Further()
    with opened(policy, "one", gate, "said to the other", "three") as store:
        session = store.session("a")
        session.append(*(words(number) for number in range(4)))
        settled(session)
        waiting = threading.Thread(target=session.append, args=(words(5),))
        waiting.start()
        assert gate.asked.wait(600)
        session.append(words(6))
        gate.go_on.set()
        waiting.join(600)
        assert not waiting.is_alive()
        assert policy.started == ["started"]
        settled(session)
        session.append(words(7))
        assert [answer.text for answer in policy.own] == ["one", "one", "three"]
        late = [event for event in session.ledger.events() if event.act is Act.COMPACT and event.data["outcome"] == "late"]
        assert len(late) == 1


def test_async_appends_drive_the_same_questions() -> None:
    async def drive(session: Session, given: list[dict[str, str]]) -> None:
        await session.aappend(*given[:4])
        await asyncio.to_thread(settled, session)
        await asyncio.gather(*(session.aappend(message) for message in given[4:]))

    with opened(Swap(), "in short") as store:
        session = store.session("a")
        given = [words(number) for number in range(7)]
        asyncio.run(drive(session, given))
        assert session.contents.pages()[-1][0].sources == (2, 3, 4)
        check_laws(session, given)

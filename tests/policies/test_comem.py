"""CoMem: exactly the snapshot is swapped, from originals, and a failure costs nothing."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import kilburn
from effort import rounds
from kernel.talk import assistant, call_of, tool, user
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply, Request
from kilburn.move import Load, Retire
from kilburn.page import Page
from kilburn.testing import Scripted, check_laws
from waiting import until

GOOD = "The agent read the modules one after another to find why the cache of the parser fails; nothing was changed so far."


def good(request: Request) -> str:
    """What a model would write that read its prompt."""
    paths = dict.fromkeys(re.findall(r"m\d+\.py", request.messages[-1]["content"]))
    return f"{GOOD} Seen: {', '.join(paths)}."


class Gate:
    """A memory model that speaks when it is told to."""

    def __init__(self, reply: Any = good) -> None:
        self.reply = reply
        self.asked, self.go_on = threading.Semaphore(0), threading.Semaphore(0)
        self.prompts: list[str] = []

    def __call__(self, request: Request) -> Any:
        self.prompts.append(request.messages[-1]["content"])
        self.asked.release()
        assert self.go_on.acquire(timeout=600)
        return self.reply(request) if callable(self.reply) else self.reply


def opened(policy: str, *script: Any, window: int = 4000, path: str = ":memory:") -> Iterator[Session]:
    model = Scripted(list(script)) if script else None
    with kilburn.open(path, window=window, policy=policy, tokenizer="chars/4", model=model) as store:
        session = store.session("a")
        if not session.contents.pages():
            session.append({"role": "system", "content": "You repair programs."}, user("Find out why the cache fails"))
        yield session


def filled(number: int) -> str:
    return f"the content of module {number} " * 12


def step(session: Session, number: int) -> None:
    session.append(
        assistant(f"I look at module {number}", call_of(f"c{number}", path=f"m{number}.py")), tool(f"c{number}", filled(number))
    )


def settled(session: Session) -> None:
    """Wait until no question is on its way."""
    background = session._planner.background
    until(lambda: (errand := background._errand) is None or errand.answer is not None)


def outcomes(session: Session) -> list[str]:
    return [event.data["outcome"] for event in session.ledger.events() if event.act is Act.COMPACT]


def memories(session: Session) -> list[Page]:
    return [page for page, state in session.contents.pages() if page.kind is Kind.FOLD and state.at == "in"]


def raw(session: Session) -> list[int]:
    return [page.id for page in session.window.resident() if page.id > 0]


def test_the_snapshot_leaves_the_latest_step_the_task_and_the_pins_and_later_steps_stay_raw() -> None:
    gate = Gate()
    for session in opened("comem(every=3)", gate):
        for number in range(4):
            step(session, number)
        assert gate.asked.acquire(timeout=600)
        for number in range(4, 6):
            step(session, number)
        assert memories(session) == [], "the agent goes on while the model speaks"
        gate.go_on.release()
        settled(session)
        step(session, 6)
        (memory,) = memories(session)
        assert memory.sources == tuple(range(3, 12)), "steps 0 to 2, whole"
        assert raw(session) == [1, 2, *range(12, 24)]
        text = session.contents.text(memory.id)
        assert GOOD in text
        assert "newer and holds" in text
        assert filled(2).strip() in gate.prompts[0]
        assert filled(3).strip() not in gate.prompts[0], "the step under way is not part of it"
        assert outcomes(session) == ["started", "done"]
        check_laws(session)


def test_a_memory_is_remade_from_all_raw_steps_never_from_a_memory() -> None:
    gate = Gate()
    for session in opened("comem(every=2)", *[gate] * 9):
        for number in range(9):
            step(session, number)
            gate.go_on.release()
            settled(session)
        assert len(gate.prompts) >= 3
        assert all(filled(0).strip() in prompt for prompt in gate.prompts)
        assert not any(GOOD in prompt for prompt in gate.prompts)
        (memory,) = memories(session)
        assert memory.depth == 1
        assert memory.sources[0] == 3
        assert len(memory.sources) % 3 == 0
        check_laws(session)


def test_a_log_too_long_for_the_memory_model_is_shown_as_an_extract_of_the_originals() -> None:
    gate = Gate()
    for session in opened("comem(every=2, show=120)", gate):
        for number in range(4):
            step(session, number)
        gate.go_on.release()
        settled(session)
        assert len(gate.prompts[0]) < 120 * 3 + 200


def _raise(request: Request) -> str:
    raise ZeroDivisionError("not ours")


CALL = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", call="x", name="run"),))
NO = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="No."),))
BAD: list[tuple[Any, str]] = [
    ("", "empty"),
    ("\n \n", "empty"),
    ("fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix fix", "rejected"),
    ("I'm sorry, but I cannot assist with that request at all.", "rejected"),
    (CALL, "failed"),
    (lambda request: request.messages[-1]["content"], "rejected"),
    (lambda request: " ".join(f"{GOOD} {number}" for number in range(100)), "rejected"),
    (Reply(message=NO, finish="refused"), "refused"),
    (_raise, "failed"),
]


@pytest.mark.parametrize(("reply", "outcome"), BAD)
def test_a_bad_memory_changes_nothing_has_a_typed_outcome_and_waits_for_its_turn(reply: Any, outcome: str) -> None:
    given: list[Any] = []
    for session in opened("comem(every=2)", *[reply] * 9, window=20_000):
        for number in range(8):
            step(session, number)
            settled(session)
        given = session.contents.messages()
        assert memories(session) == []
        assert len(raw(session)) == 2 + 8 * 3, "all is still there"
        assert set(outcomes(session)) == {"started", outcome}
        assert outcomes(session).count("started") <= 4, "it is not asked again at every step"
        check_laws(session, given)


def test_a_bad_memory_keeps_the_good_one_before_it() -> None:
    for session in opened("comem(every=2)", good, "", "", ""):
        for number in range(8):
            step(session, number)
            settled(session)
        (memory,) = memories(session)
        assert memory.sources == tuple(range(3, 9))
        assert outcomes(session)[:2] == ["started", "done"]
        assert "empty" in outcomes(session)


def test_a_reply_cut_at_its_cap_keeps_its_whole_sentences() -> None:
    cut = Reply(
        message=Message(
            role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=f"{GOOD} Seen: m0.py and m1.py. And then it sudd"),)
        ),
        finish="length",
    )
    for session in opened("comem(every=2)", cut):
        for number in range(4):
            step(session, number)
            settled(session)
        (memory,) = memories(session)
        assert "sudd" not in session.contents.text(memory.id)


def test_a_memory_that_hangs_is_given_up() -> None:
    gate = Gate()
    for session in opened("comem(every=2, timeout=0.05)", gate):
        for number in range(3):
            step(session, number)
        assert gate.asked.acquire(timeout=600)
        settled(session)
        step(session, 3)
        gate.go_on.release()
        assert outcomes(session) == ["started", "failed"]
        assert memories(session) == []


def test_without_a_memory_model_nothing_is_folded_and_the_window_holds() -> None:
    for session in opened("comem(every=2)", window=700):
        for number in range(12):
            step(session, number)
        assert memories(session) == []
        assert session.render().tokens <= 700
        assert "started" not in outcomes(session)
        check_laws(session)


def test_while_it_waits_the_oldest_raw_pages_make_room_and_the_memory_stays() -> None:
    gate = Gate()
    for session in opened("comem(every=2)", *[gate] * 20, window=900):
        gate.go_on.release()
        for number in range(3):
            step(session, number)
            settled(session)
        step(session, 3)
        (before,) = memories(session)
        for number in range(4, 16):
            step(session, number)
        assert memories(session) == [before]
        assert session.render().tokens <= 900
        check_laws(session)
        for _ in range(20):
            gate.go_on.release()


def test_two_at_once_the_second_is_told_that_the_model_is_busy() -> None:
    gate = Gate()
    for session in opened("chain(comem(every=2), comem(every=2))", *[gate] * 4):
        for number in range(3):
            step(session, number)
        assert gate.asked.acquire(timeout=600)
        assert outcomes(session) == ["busy"] or outcomes(session) == ["started"]
        assert len(gate.prompts) == 1
        gate.go_on.release()
        settled(session)
        step(session, 3)
        assert len(memories(session)) == 1
        check_laws(session)
        for _ in range(4):
            gate.go_on.release()


def test_what_is_pinned_meanwhile_stays_beside_the_memory() -> None:
    gate = Gate()
    for session in opened("comem(every=3)", *[gate] * 4):
        for number in range(4):
            step(session, number)
        session.pin("p7")
        gate.go_on.release()
        settled(session)
        step(session, 4)
        (memory,) = memories(session)
        assert memory.sources == (3, 4, 5, 6, 9, 10, 11)
        assert {7, 8} <= set(raw(session))
        check_laws(session)
        for _ in range(4):
            gate.go_on.release()


def test_a_page_pinned_after_the_memory_leaves_the_next_one() -> None:
    for session in opened("comem(every=2)", *[good] * 9):
        for number in range(4):
            step(session, number)
            settled(session)
        assert len(memories(session)) == 1
        session.pin("p4")
        for number in range(4, 8):
            step(session, number)
            settled(session)
        (memory,) = memories(session)
        assert 4 not in memory.sources
        assert 4 in raw(session)
        assert "illegal" not in outcomes(session)
        check_laws(session)


@pytest.mark.parametrize("how", ["forget", "retire"])
def test_words_about_a_page_that_is_gone_meanwhile_never_come_in(how: str) -> None:
    gate = Gate()
    for session in opened("comem(every=2)", *[gate] * 9):
        for number in range(3):
            step(session, number)
        assert gate.asked.acquire(timeout=600)
        if how == "forget":
            session.forget("p3")
        else:
            session.edits.apply(Retire((3,)))
        gate.go_on.release()
        settled(session)
        step(session, 3)
        assert memories(session) == []
        for number in range(4, 9):
            gate.go_on.release()
            step(session, number)
            settled(session)
        assert len(memories(session)) == 1, "the next snapshot is without it"
        assert 3 not in memories(session)[0].sources
        assert "illegal" not in outcomes(session)
        check_laws(session)


def test_undo_brings_every_raw_page_back() -> None:
    for session in opened("comem(every=2)", good):
        for number in range(4):
            step(session, number)
            settled(session)
        (memory,) = memories(session)
        session.edits.apply(Load(memory.sources))
        assert set(memory.sources) <= set(raw(session))


def test_a_session_that_ends_while_the_model_speaks_loses_nothing(tmp_path: Path) -> None:
    gate, path = Gate(), str(tmp_path / "s.db")
    given: list[Any] = []
    for session in opened("comem(every=2)", gate, path=path):
        for number in range(4):
            step(session, number)
        assert gate.asked.acquire(timeout=600)
        given = session.contents.messages()
    gate.go_on.release()
    for session in opened("comem(every=2)", good, path=path):
        assert session.contents.messages() == given
        assert outcomes(session) == ["started", "late"]
        assert memories(session) == []
        for number in range(4, 8):
            step(session, number)
            settled(session)
        assert len(memories(session)) == 1, "the work is taken up again"
        check_laws(session)


@settings(max_examples=rounds(20, 40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    turns=st.lists(st.sampled_from(["step", "step", "talk", "two", "parallel", "go", "go", "idle"]), min_size=20, max_size=50),
    replies=st.lists(st.sampled_from([good, good, good, "", "no " * 60]), min_size=12, max_size=12),
    every=st.integers(1, 3),
    window=st.sampled_from([600, 3000]),
)
def test_however_turns_and_answers_interleave_no_turn_is_lost_or_doubled(
    turns: list[str], replies: list[str], every: int, window: int
) -> None:
    gates = [Gate(reply) for reply in replies]
    speaking = iter(gates)
    given: list[dict[str, Any]] = []
    for session in opened(f"comem(every={every})", *gates, *[good] * 40, window=window):
        given = session.contents.messages()
        for number, turn in enumerate(turns):
            messages = {
                "step": [assistant(None, call_of(f"c{number}")), tool(f"c{number}", filled(number))],
                "two": [assistant(f"one {number}"), user("and?"), assistant(f"two {number}"), user("so?")],
                "parallel": [
                    assistant("both", call_of(f"a{number}"), call_of(f"b{number}")),
                    tool(f"b{number}", "b"),
                    tool(f"a{number}", "a"),
                ],
                "talk": [assistant(f"I think {number} " * 9), user(f"go on {number}")],
            }.get(turn, [])
            if turn == "go":
                gate = next(speaking, None)
                if gate is not None:
                    gate.go_on.release()
                settled(session) if session._planner.background.running and gate is not None and gate.prompts else None
            elif turn == "idle":
                session.edits.idle()
            elif turn == "two":
                session.append(*messages)
            else:
                for message in messages:
                    session.append(message)
            given += messages
            _check_each_turn_once(session)
        for gate in gates:
            gate.go_on.release()
        settled(session)
        event("swapped" if memories(session) else "never swapped")
        session.append(user("done?"))
        given.append(user("done?"))
        _check_each_turn_once(session)
        check_laws(session, given)
        assert not [event.why for event in session.ledger.events() if event.act is Act.REFUSE]


def _check_each_turn_once(session: Session) -> None:
    """Every original is in the window, behind exactly one memory, or below with its address."""
    tier = session.window
    shown = [source for page in tier.resident() if page.depth for source in page.sources]
    assert len(shown) == len(set(shown))
    assert not set(shown) & set(raw(session))
    for page in range(1, tier.last + 1):
        assert tier.at(page) in ("in", "out", "stub", "folded")
        if tier.at(page) == "folded":
            assert page in shown


@pytest.mark.parametrize("spec", ["comem(every=0)", "comem(to=0)", "comem(show=0)", "comem(timeout=0)"])
def test_bad_parameters_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        kilburn.open(":memory:", window=1000, policy=spec)

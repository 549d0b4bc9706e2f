"""Free(): what a pass deletes comes back bit by bit, and what it may not touch it does not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.effect import Answer, Effect
from kilburn.errors import SpecError
from kilburn.event import Act, Event
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Reply
from kilburn.move import Load
from kilburn.policies.free import Cleaner, Free, Heuristic, Prompted, Proposal
from kilburn.policy import Cause
from kilburn.selection.anchors import Anchors, Exact, Scanned
from kilburn.testing import Scripted, check_laws

NOISE = "".join(f"noise {number}: nothing of this is of any use to anybody\n" for number in range(12))
LOG = f"START of the log\nkept line above\nBEGIN-NOISE\n{NOISE}END-NOISE\nkept line below\nEND of the log\n"
CUT = Anchors("BEGIN-NOISE", "END-NOISE\n")


@dataclass(frozen=True)
class Fixed:
    """A cleaner that always says the same."""

    directives: tuple[Anchors | Exact, ...] = (CUT,)
    heard: list[Sequence[Scanned]] = field(default_factory=list, compare=False)

    def propose(self, scanned: Sequence[Scanned], task: str) -> Generator[Effect, Answer, Proposal]:
        yield from ()
        self.heard.append(scanned)
        return Proposal(self.directives)


def opened(policy: Any, *script: Any, window: int = 4000, path: str = ":memory:") -> Session:
    model = Scripted(list(script)) if script else None
    session = kilburn.open(path, window=window, policy=policy, tokenizer="chars/4", model=model).session("a")
    session.append(user("Find the reason in the log"))
    return session


def step(session: Session, number: int, text: str = LOG, name: str = "run", **arguments: Any) -> None:
    session.append(assistant(f"step {number}", call_of(f"c{number}", name, **(arguments or {"number": number}))))
    session.append(tool(f"c{number}", text))


def cross(session: Session) -> None:
    """Have a border of 300 tokens behind all that is there."""
    session.append(assistant("on " * 420))


def passes(session: Session) -> list[Event]:
    return [event for event in session.ledger.events() if event.act is Act.COMPACT]


def last_pass(session: Session) -> dict[str, Any]:
    data = dict(passes(session)[-1].data)
    data.pop("freed")
    return data


def outputs(session: Session) -> list[str]:
    return [message["content"] for message in session.render() if message["role"] == "tool"]


def test_a_pass_comes_with_every_so_many_tokens_and_not_between() -> None:
    cleaner = Fixed(())
    session = opened(Free(every=1000, cleaner=cleaner))
    borders = []
    for number in range(30):
        before, heard = session.window.seen, len(cleaner.heard)
        step(session, number, "x" * 400)
        if before // 1000 != session.window.seen // 1000:
            borders.append(number)
            assert len(cleaner.heard) == heard + 1, f"a border was crossed at {number}"
        else:
            assert len(cleaner.heard) == heard
    assert len(borders) >= 3


def test_the_span_goes_the_rest_is_identical_and_undo_brings_the_page_back_bit_by_bit() -> None:
    session = opened(Free(every=300, cleaner=Fixed()))
    step(session, 0)
    cross(session)
    assert last_pass(session) == {"outcome": "done", "moves": 1, "deleted": 1}
    head, _, tail = outputs(session)[0].partition("\n…\n")
    assert head == "[p4 in part:]\nSTART of the log\nkept line above"
    assert tail == "kept line below\nEND of the log\n"
    assert session.contents.text(4) == LOG, "what was deleted stays below"
    check_laws(session)
    session.edits.apply(Load((4,)))
    assert outputs(session)[0] == LOG
    check_laws(session)


def test_what_was_brought_back_is_not_cleaned_again() -> None:
    session = opened(Free(every=300, cleaner=Fixed()))
    step(session, 0)
    cross(session)
    assert outputs(session)[0] != LOG
    session.edits.apply(Load((4,)))
    for _ in range(4):
        cross(session)
    assert outputs(session)[0] == LOG


def test_a_page_is_cleaned_again_from_its_original() -> None:
    @dataclass(frozen=True)
    class Twice:
        def propose(self, scanned: Sequence[Scanned], task: str) -> Generator[Effect, Answer, Proposal]:
            yield from ()
            whole = any(page.page == 4 and page.is_whole for page in scanned)
            return Proposal([CUT if whole else Anchors("kept line below", "END of the log\n")])

    session = opened(Free(every=300, least=0, cleaner=Twice()))
    step(session, 0)
    cross(session)
    cross(session)
    excerpts = [page for page, state in session.contents.pages() if page.kind is Kind.EXCERPT and state.at == "in"]
    assert [(page.depth, page.sources) for page in excerpts] == [(1, (4,))]
    assert outputs(session)[0] == "[p4 in part:]\nSTART of the log\nkept line above\n…\n"
    check_laws(session)
    session.edits.apply(Load((4,)))
    assert outputs(session)[0] == LOG


def moves_of(session: Session) -> Sequence[Any]:
    """What a pass over the window as it is now would do."""
    last = session.window.last
    plan = Free(every=1, cleaner="heuristic", least=0).plan(session._planner.view(Cause.ADMIT, (last,)))
    assert isinstance(plan, Generator)
    try:
        next(plan)
        while True:
            plan.send(Answer(outcome="done"))
    except StopIteration as stop:
        moves: Sequence[Any] = stop.value
        return moves


def test_a_second_pass_with_the_same_cleaner_changes_nothing() -> None:
    session = opened("fifo")
    failed = "error: No such file or directory: x\n" + "  some usage that helps nobody\n" * 4
    for number in range(3):
        step(session, number, LOG, "read", path="a.log")
        step(session, 10 + number, failed if number == 1 else f"fine {number}\n{NOISE}")
    moves = moves_of(session)
    assert len(moves) >= 4
    session.edits.apply(*moves)
    assert moves_of(session) == []
    check_laws(session)


def test_superseded_output_leaves_a_handle() -> None:
    session = opened("free(every=500, cleaner='heuristic')")
    for number in range(3):
        step(session, number, LOG, "read", path="a.log")
    assert [text == LOG for text in outputs(session)].count(True) < 3
    assert " out: " in outputs(session)[0]
    assert outputs(session)[-1] == LOG
    check_laws(session)


@pytest.mark.parametrize(
    ("directive", "name"),
    [
        (Anchors("noise 3", "never there"), "unmatched"),
        (Anchors("noise", "END-NOISE"), "ambiguous"),
        (Anchors("BEGIN-NOISE", "noise"), "ambiguous"),
        (Anchors("END-NOISE", "BEGIN-NOISE"), "reversed"),
        (Anchors("BEGIN-NOISE", "second page"), "crossing"),
        (Anchors("", "END-NOISE"), "empty"),
        (Anchors("START of the log", "START of the log"), "small"),
    ],
)
def test_anchors_that_name_nothing_exactly_are_counted_and_change_nothing(directive: Anchors, name: str) -> None:
    session = opened(Free(every=300, cleaner=Fixed((directive,))))
    step(session, 0)
    session.append(assistant("second page " + "w " * 30))
    cross(session)
    data = last_pass(session)
    assert data["outcome"] == "no progress"
    assert data[name] == 1
    assert data["moves"] == 0
    assert outputs(session)[0] == LOG
    check_laws(session)


def test_overlapping_spans_count_once() -> None:
    session = opened(Free(every=300, cleaner=Fixed((CUT, Anchors("noise 3", "noise 5"), CUT))))
    step(session, 0)
    cross(session)
    assert last_pass(session) == {"outcome": "done", "moves": 1, "deleted": 1, "overlapping": 2}


def test_pins_the_users_words_the_latest_message_and_calls_are_not_offered() -> None:
    cleaner = Fixed(())
    session = opened(Free(every=200, cleaner=cleaner))
    session.append(user(f"please {NOISE}"))
    step(session, 0)
    session.pin("p5")
    step(session, 1, LOG + "one")
    step(session, 2, LOG + "two")
    offered = {page.page: page for page in cleaner.heard[-1] if not page.fixed}
    latest = session.window.last
    kinds = {session.window.pages[page].role for page in offered}
    assert latest not in offered
    assert 5 not in offered
    assert kinds <= {Role.ASSISTANT, Role.TOOL}
    assert all(session.window.pages[page].kind is not Kind.CALL for page in offered)


def test_no_pass_while_a_call_is_open_but_its_border_is_not_lost() -> None:
    cleaner = Fixed(())
    session = opened(Free(every=300, cleaner=cleaner))
    session.append(assistant("a long thought " * 100, call_of("c1"), call_of("c2")))
    session.append(tool("c1", "short"))
    assert cleaner.heard == []
    session.append(tool("c2", "short"))
    assert len(cleaner.heard) == 1


def test_thoughts_stay_whole() -> None:
    heard = []
    for extra in (None, '{"signature": "abc"}'):
        cleaner = Fixed(())
        session = opened(Free(every=200, cleaner=cleaner))
        thought = Part(kind=Kind.REASONING, text=f"hm {NOISE}", extra=extra)
        session.append(Message(role=Role.ASSISTANT, parts=(thought, Part(kind=Kind.TEXT, text="I look."))))
        session.append(assistant("b " * 300))
        session.append(assistant("c " * 300))
        heard.append({page.page: page.fixed for page in cleaner.heard[-1]}[2])
    assert heard == [True, True]


DELETE = json.dumps({"delete": [{"prefix": "BEGIN-NOISE", "suffix": "END-NOISE"}]})


def test_the_model_is_asked_with_a_schema_and_its_anchors_count() -> None:
    model = Scripted([DELETE] * 3)
    session = kilburn.open(":memory:", window=4000, policy="free(every=300)", tokenizer="chars/4", model=model).session("a")
    session.append(user("Find the reason in the log"))
    session.append(assistant("other words that stay " * 20))
    step(session, 0)
    cross(session)
    assert "noise" not in outputs(session)[0]
    request = model.requests[-1]
    assert request.schema is not None
    assert request.schema["properties"]["delete"]["items"]["required"] == ["prefix", "suffix"]
    assert "Find the reason in the log" in request.messages[-1]["content"]


def _raise(request: Any) -> str:
    raise ZeroDivisionError("not ours")


BAD: list[tuple[Any, str]] = [
    ("", "empty"),
    ("delete it all please", "rejected"),
    ('{"delete": [{"prefix": "BEGIN"}]}', "rejected"),
    ('{"delete": []}', "no progress"),
    (json.dumps([{"prefix": f"p{n}", "suffix": "s"} for n in range(500)]), "rejected"),
    (lambda request: request.messages[-1]["content"], "rejected"),
    (Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", call="x", name="run"),)), "failed"),
    (Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text="No."),)), finish="refused"), "refused"),
    (Reply(message=Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text='{"del'),)), finish="length"), "truncated"),
    (_raise, "failed"),
]


@pytest.mark.parametrize(("reply", "outcome"), BAD)
def test_a_bad_reply_changes_nothing_and_has_a_typed_outcome(reply: Any, outcome: str) -> None:
    session = opened("free(every=300)", *[reply] * 5)
    step(session, 0)
    cross(session)
    cross(session)
    # The second border comes soon after a pass that freed nothing: the model is spared.
    assert [event.data["outcome"] for event in passes(session)] == [outcome, "failed"]
    assert outputs(session)[0] == LOG
    assert all(state.at == "in" for _, state in session.contents.pages())
    check_laws(session)


def test_a_reply_that_would_delete_nearly_all_is_rejected() -> None:
    session = opened("free(every=300, cleaner='model')", *[json.dumps([{"prefix": "START of", "suffix": "END of the log"}])] * 3)
    step(session, 0)
    cross(session)
    assert last_pass(session)["outcome"] == "rejected"
    assert outputs(session)[0] == LOG


def test_a_model_that_hangs_is_not_waited_for_for_ever() -> None:
    never = threading.Event()

    def hang(request: Any) -> str:
        never.wait(600)
        return DELETE

    session = opened(Free(every=300, cleaner=Prompted(timeout=0.05)), hang, hang, hang)
    step(session, 0)
    cross(session)
    never.set()
    assert {event.data["outcome"] for event in passes(session)} == {"failed"}
    assert outputs(session)[0] == LOG


def test_without_a_model_rules_clean_unless_only_the_model_may() -> None:
    for cleaner, expected in (("auto", True), ("heuristic", True), ("model", False)):
        session = opened(f"free(every=500, cleaner={cleaner!r})")
        for number in range(3):
            step(session, number, LOG, "read", path="a.log")
        assert (" out: " in outputs(session)[0]) is expected


@pytest.mark.parametrize("make", [lambda: Free(every=150, least=0), lambda: Free(every=90, cleaner=Prompted())])
def test_whatever_the_model_says_it_breaks_no_law(make: Callable[[], Free]) -> None:
    model = Scripted([DELETE, "garbage", json.dumps([{"prefix": "1: ", "suffix": "3: "}])] * 300)
    session = kilburn.open(":memory:", window=600, policy=make(), tokenizer="chars/4", model=model).session("a")
    session.append(user("go"))
    for number in range(12):
        step(session, number, f"{number}: {LOG}")
    check_laws(session)
    assert not [event for event in session.ledger.events() if event.act is Act.REFUSE]


def test_cleaners_are_a_protocol() -> None:
    assert isinstance(Heuristic(), Cleaner)
    assert isinstance(Prompted(), Cleaner)
    assert isinstance(Fixed(), Cleaner)
    assert Free(cleaner=Prompted()) == Free(cleaner=Prompted())


@pytest.mark.parametrize("spec", ["free(every=0)", "free(reach=0)", "free(least=-1)", "free(cleaner='nobody')"])
def test_bad_parameters_are_refused(spec: str) -> None:
    with pytest.raises(SpecError):
        kilburn.open(":memory:", window=1000, policy=spec)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"most": 0.0}, {"most": 1.5}, {"timeout": 0}])
def test_bad_parameters_of_the_prompted_cleaner_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tokens"):
        Prompted(**wrong)

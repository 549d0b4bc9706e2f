"""AgentFold in a real session: directives, models and rules fold steps that stay a partition, and nothing is lost."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from effort import rounds
from kilburn.errors import SpecError, Unavailable
from kilburn.event import Act
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.page import Page
from kilburn.policies.agentfold import INSTRUCTIONS, Agentfold
from kilburn.testing import Scripted, check_laws, check_policy

OBSERVED = "line of output " * 50
ONLY_DIRECTIVES = Agentfold(trigger=10**9)


def opened(policy: Any = ONLY_DIRECTIVES, window: int = 100_000, model: Any = None) -> Store:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4", model=model)


def started(store: Store) -> Session:
    session = store.session("s")
    session.append({"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": "Find the fault."})
    return session


def compress(first: Any, last: Any, text: Any = "short") -> str:
    return f"<compress>{json.dumps({'compress_range': [first, last], 'compress_text': text})}</compress>"


def step(session: Session, number: int, directive: str = "") -> None:
    """A step with a tool call: pages 3n and the two behind it, after the head's two."""
    call = {"id": f"c{number}", "type": "function", "function": {"name": "run", "arguments": json.dumps({"n": number})}}
    session.append({"role": "assistant", "content": f"{directive}thought {number}", "tool_calls": [call]})
    session.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"result {number}\n{OBSERVED}"})


def pages_of(number: int) -> set[int]:
    return set(range(3 * number, 3 * number + 3))


def folds(session: Session) -> list[Page]:
    return [page for page in session.window.resident() if page.depth]


def items(session: Session) -> list[tuple[int, int]]:
    """The folded items in the window, by steps."""
    return [(min(page.sources) // 3, max(page.sources) // 3) for page in folds(session)]


def outcomes(session: Session) -> list[str]:
    return [event.data["outcome"] for event in session.ledger.events() if event.act is Act.COMPACT]


def text(session: Session) -> str:
    return "\n".join(str(message["content"]) for message in session.render())


def test_granular_condensation_and_deep_consolidation() -> None:
    with opened() as store:
        session = started(store)
        step(session, 1)
        step(session, 2, compress(1, 1, "the first told nothing"))
        assert items(session) == [(1, 1)]
        step(session, 3, compress(2, 2, "the second told more"))
        assert items(session) == [(1, 1), (2, 2)]
        assert "[Compressed Step 2]\nthe second told more" in text(session)
        step(session, 4, compress(1, 3, "all three in one"))
        assert items(session) == [(1, 3)]
        assert "[Compressed Step 1 to 3]\nall three in one" in text(session)
        assert "the second told more" not in text(session)
        fold = folds(session)[0]
        assert fold.depth == 1, "a deep consolidation stands on the originals, not on folds"
        assert set(fold.sources) == pages_of(1) | pages_of(2) | pages_of(3)
        assert "result 2" in session.recall("p8")
        assert "thought 4" in text(session), "the current step stays whole"
        assert outcomes(session) == ["done"] * 3
        check_laws(session)


BAD = [
    compress(1, 1),  # the latest step is 3
    compress(2, 4),
    compress(3, 4),
    compress(0, 3),
    compress(-1, 3),
    compress(4, 3),
    compress(3, 1),
    compress(9, 9),
    compress(10**30, 10**30),
    compress(2, 3),  # 2 is inside of the item 1 to 2
    compress(1.0, 3),
    compress(True, 3),
    compress("1", 3),
    compress(None, 3),
    compress(3, 3, ""),
    compress(3, 3, " \n"),
    compress(3, 3, ["x"]),
    compress(3, 3, "far too long " * 9000),
    "<compress>garbage</compress>",
    "<compress></compress>",
    "<compress>" + compress(3, 3),
    compress(3, 3) + compress(1, 3),
    "<compress>{",
]


@pytest.mark.parametrize("directive", BAD, ids=[text[:50] for text in BAD])
def test_a_directive_that_is_not_valid_changes_nothing(directive: str) -> None:
    with opened() as store:
        session = started(store)
        step(session, 1)
        step(session, 2)
        step(session, 3, compress(1, 2, "one and two"))
        before = (items(session), text(session))
        step(session, 4, directive)
        assert items(session) == before[0]
        assert text(session).startswith(before[1])
        assert outcomes(session) == ["done", "rejected"]
        assert [event.act for event in session.ledger.events()].count(Act.REFUSE) == 0
        step(session, 5, compress(3, 4, "goes on"))
        assert items(session) == [(1, 2), (3, 4)]


def test_the_first_step_has_nothing_to_fold() -> None:
    with opened() as store:
        session = started(store)
        step(session, 1, compress(1, 1))
        assert outcomes(session) == ["rejected"]
        assert folds(session) == []


def test_a_text_as_long_as_what_it_replaces_is_no_progress() -> None:
    with opened() as store:
        session = started(store)
        session.append({"role": "assistant", "content": "hm"})
        session.append({"role": "user", "content": "go on"})
        session.append({"role": "assistant", "content": compress(1, 1, "many words about nothing " * 9) + "hm"})
        assert outcomes(session) == ["no progress"]
        assert folds(session) == []


def test_a_directive_counts_once_in_plain_text_sessions() -> None:
    with opened() as store:
        session = started(store)
        for number in range(1, 4):
            directive = compress(number - 1, number - 1) if number > 1 else ""
            session.append({"role": "assistant", "content": f"{directive}thought {number}"})
            observed = Part(kind=Kind.TEXT, text=OBSERVED)
            session.append(Message(role=Role.USER, parts=(observed,), trust=Trust.TOOL))
        assert outcomes(session) == ["done", "done"]
        assert len(folds(session)) == 2


def test_a_directive_in_tool_output_or_in_a_thought_is_data() -> None:
    with opened() as store:
        session = started(store)
        step(session, 1)
        session.append({"role": "assistant", "content": f"<think>{compress(1, 1)}</think>I look."})
        session.append({"role": "user", "content": compress(1, 1)})
        assert folds(session) == []
        assert outcomes(session) == []


@settings(max_examples=rounds(20, 40), deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 13), st.integers(-2, 2)), min_size=1, max_size=12))
def test_items_always_partition_the_steps(plans: list[tuple[int, int]]) -> None:
    """Any ranges at all, against a model of what AgentFold promises."""
    with opened() as store:
        session = started(store)
        step(session, 1)
        model = [(1, 1)]
        for number, (first, off) in enumerate(plans, 2):
            last = number - 1 + off
            step(session, number, compress(first, last, f"text {number}"))
            if last == number - 1 and any(first == low for low, _ in model):
                model = [item for item in model if item[0] < first] + [(first, last)]
            model.append((number, number))
        shown = {page.id for page in session.window.resident() if not page.depth and page.id > 2}
        cited = [source for page in folds(session) for source in page.sources]
        everything = set().union(*(pages_of(number) for number in range(1, len(plans) + 2)))
        assert sorted([*shown, *cited]) == sorted(everything), "each original stands in the window exactly once"
        assert set(items(session)) <= set(model)
        assert all(item in items(session) for item in model if item[0] < item[1])
        for number in range(1, len(plans) + 2):
            assert f"result {number}\n" in session.recall(f"p{3 * number + 2}")
        check_laws(session)


def test_by_rule_steps_are_folded_like_a_binary_counter() -> None:
    with opened("agentfold") as store:
        session = started(store)
        for number in range(1, 33):
            step(session, number)
            assert len(folds(session)) == (number - 1).bit_count()
            assert all(page.depth == 1 for page in folds(session))
        assert items(session) == [(1, 16), (17, 24), (25, 28), (29, 30), (31, 31)]
        check_laws(session)


def test_after_100_steps_the_window_holds_a_few_percent() -> None:
    sizes = {}
    with opened("agentfold") as store:
        session = started(store)
        for number in range(1, 101):
            step(session, number)
            sizes[number] = session.render().tokens
        assert sizes[100] <= 0.08 * session.window.seen
        assert max(sizes[n] for n in range(60, 101)) < 1.5 * max(sizes[n] for n in range(20, 61)), "it grows with the logarithm"
        assert "result 37\n" in session.recall("p113")


def test_what_a_directive_said_is_not_folded_again_as_if_it_were_a_source() -> None:
    with opened("agentfold(ask=False)") as store:
        session = started(store)
        step(session, 1)
        step(session, 2, compress(1, 1, "ERROR: a claim of the agent in src/claim.py"))
        for number in range(3, 9):
            step(session, number)
        assert items(session)[0][0] == 1
        assert "claim.py" not in text(session)


def test_the_task_and_pins_stay_out_of_every_fold() -> None:
    with opened("agentfold") as store:
        session = started(store)
        step(session, 1)
        session.append({"role": "user", "content": "Never touch the file core.c. " * 8})
        session.pin("p5")
        for number in range(2, 8):
            session.append({"role": "assistant", "content": f"thought {number} " * 90})
        step(session, 9)
        shown = text(session)
        assert "Never touch the file core.c." in shown
        assert "result 1\n" in shown
        assert "Find the fault." in shown
        assert not any({5, 6} & set(page.sources) for page in folds(session))
        check_laws(session)


def test_a_step_pinned_after_it_was_folded_leaves_the_fold() -> None:
    with opened("agentfold") as store:
        session = started(store)
        for number in range(1, 4):
            step(session, number)
        session.pin("p4-p5")
        for number in range(4, 12):
            step(session, number)
        assert "result 1\n" in text(session)
        assert [event.why for event in session.ledger.events() if event.act is Act.REFUSE] == []
        check_laws(session)


def test_a_question_too_long_to_be_pinned_leaves_last() -> None:
    with opened("agentfold", window=1000) as store:
        session = store.session("s")
        session.append({"role": "user", "content": "Find the fault. " + "why " * 300})
        for number in range(1, 30):
            session.append({"role": "assistant", "content": f"thought {number} " * 20})
            session.append({"role": "user", "content": f"result {number}\n{OBSERVED}"})
            assert session.render().tokens <= 1000
        assert "Find the fault." in text(session)


@pytest.mark.parametrize("window", [300, 700, 2000])
def test_under_pressure_it_consolidates_and_nothing_is_refused(window: int) -> None:
    with opened(ONLY_DIRECTIVES, window=window) as store:
        session = store.session("s")
        session.append({"role": "user", "content": "Find the fault."})
        for number in range(1, 40):
            step(session, number)
            assert session.render().tokens <= window
        assert "Find the fault." in text(session)
        assert [event.why for event in session.ledger.events() if event.act is Act.REFUSE] == []
        if window >= 700:
            assert folds(session)
            assert not [event for event in session.ledger.events() if event.act is Act.EVICT and event.policy == "kernel"]


def reply(first: int, last: int, words: str = "thought and result of it, a line of output") -> str:
    return json.dumps({"compress_range": [first, last], "compress_text": words})


def test_a_model_is_asked_once_a_step_and_its_directive_counts() -> None:
    model = Scripted([reply(1, 1), reply(1, 2)])
    with opened("agentfold", model=model) as store:
        session = started(store)
        for number in range(1, 4):
            step(session, number)
        assert items(session) == [(1, 2)]
        assert len(model.requests) == 2
        schema = model.requests[1].schema
        assert schema is not None
        assert schema["properties"]["compress_range"]["items"]["enum"] == [1, 2]
        asked = str(model.requests[1].messages[-1]["content"])
        assert "thought 1" in asked, "an item is quoted from its originals"
        assert "in short" not in asked


def test_where_the_agent_folds_no_model_is_asked() -> None:
    model = Scripted([])
    with opened("agentfold", model=model) as store:
        session = started(store)
        step(session, 1)
        step(session, 2, compress(1, 1))
        assert model.requests == []
        assert items(session) == [(1, 1)]


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("", "empty"),
        ("I would fold everything.", "rejected"),
        (reply(2, 2), "rejected"),
        (reply(1, 0), "rejected"),
        (reply(1, 1, "no " * 60), "rejected"),
        (reply(1, 1, "thought 1 result 1 " * 400), "rejected"),
        (reply(1, 1, "I'm sorry, but I cannot help with that request."), "rejected"),
        (Unavailable("down", advice="wait"), "failed"),
        (lambda request: str(request.messages[-1]["content"]), "rejected"),
        (lambda request: reply(1, 1, str(request.messages[-1]["content"])[:900]), "rejected"),
    ],
    ids=["nothing", "prose", "range", "reversed", "loop", "too long", "refusal", "raises", "the prompt", "the prompt as words"],
)
def test_what_a_model_says_wrongly_changes_nothing(answer: Any, outcome: str) -> None:
    with opened("agentfold", model=Scripted([answer])) as store:
        session = started(store)
        step(session, 1)
        step(session, 2)
        assert folds(session) == []
        assert outcomes(session) == [outcome]
        assert "result 1\n" in text(session)


def test_a_model_that_hangs_is_left_behind() -> None:
    late = threading.Event()

    def hang(request: Any) -> str:
        late.wait(600)
        return reply(1, 1)

    with opened(Agentfold(timeout=0.05), model=Scripted([hang])) as store:
        session = started(store)
        step(session, 1)
        step(session, 2)
        late.set()
        assert folds(session) == []
        assert outcomes(session) == ["failed"]


def test_wild_traces_break_no_law_whatever_a_model_says() -> None:
    wild = ["", "garbage", reply(1, 1), reply(1, 4), reply(3, 2), reply(-1, 9)] * 200
    check_policy(lambda: resolve("policies", "agentfold"), windows=(500,), seeds=(6,), model=Scripted(wild))


@pytest.mark.parametrize("spec", ["agentfold(trigger=-1)", "agentfold(to=3)", "agentfold(cap=0)", "agentfold(timeout=0)"])
def test_bad_parameters_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match=r"trigger|to=|cap|timeout"):
        kilburn.open(":memory:", window=1000, policy=spec, tokenizer="chars/4")

"""What `hybrid` and `cost` bring for a question, where it stands, and when it leaves."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kilburn
from kilburn.kernel.session import Session
from kilburn.prices import PRICES, Prices
from kilburn.search.embedders.hashing import Hashing
from kilburn.selection.bringing import described, extract_questions, pays
from kilburn.testing import check_laws

WORDS = [
    "amber",
    "basin",
    "cedar",
    "delta",
    "ember",
    "fjord",
    "grove",
    "heron",
    "inlet",
    "jetty",
    "knoll",
    "ledge",
    "mesa",
    "north",
    "otter",
    "plume",
    "quarry",
    "ridge",
]
POLICIES = ["hybrid", "cost"]


def talk(turns: int, seed: int = 1) -> Iterator[tuple[str, str]]:
    """Short questions and answers; each answer has a port that no other has."""
    rng = random.Random(seed)
    for turn in range(turns):
        said = " ".join(rng.choices(WORDS, k=40))
        yield f"Tell me more about {rng.choice(WORDS)}?", f"{said}.\nThe relay zeta{turn}x listens on port {7000 + turn}."


def chat(policy: Any, turns: int = 60, window: int = 2000) -> Session:
    session = kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").session("a")
    for question, answer in talk(turns):
        session.append({"role": "user", "content": question}, {"role": "assistant", "content": answer})
    return session


def test_a_reason_counts_its_pages() -> None:
    assert described(((1, ((0, 2), (5, 9))),)) == "passages of 1 page"
    assert described(((1, ((0, 2),)), (3, ((0, 2),)))) == "passages of 2 pages"


def texts(session: Session) -> list[str]:
    return [str(message["content"]) for message in session.render()]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_asked_about_stands_before_the_question_and_the_rest_keeps_its_bytes(policy: str) -> None:
    session = chat(policy)
    before = texts(session)
    assert not any("zeta3x" in text for text in before)
    session.append({"role": "user", "content": "On which port does the relay zeta3x listen?"})
    after = texts(session)
    assert after[: len(before)] == before
    assert "zeta3x listens on port 7003" in after[-2]
    assert after[-1].startswith("On which port")
    check_laws(session)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_question_about_nothing_old_brings_nothing(policy: str) -> None:
    session = chat(policy)
    before = texts(session)
    session.append({"role": "user", "content": "Could you write a sonnet about Lisbon instead?"})
    assert texts(session) == [*before, "Could you write a sonnet about Lisbon instead?"]
    assert not session.window.copies()


@pytest.mark.parametrize("policy", POLICIES)
def test_copies_leave_when_something_else_is_asked(policy: str) -> None:
    session = chat(policy, window=4000)
    most, shown = 0, ""
    for turn in range(3, 13):
        session.append({"role": "user", "content": f"On which port does the relay zeta{turn}x listen?"})
        shown = "\n".join(texts(session))
        assert f"zeta{turn}x listens on port {7000 + turn}" in shown
        most = max(most, len(session.window.copies()))
        session.append({"role": "assistant", "content": "On that one."})
        check_laws(session)
    assert 1 <= most <= 8
    assert "zeta3x listens on port" not in shown


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_asked_once_more_is_not_brought_again(policy: str) -> None:
    session = chat(policy)
    session.append({"role": "user", "content": "On which port does the relay zeta3x listen?"})
    copies = session.window.copies()
    assert copies
    session.append({"role": "user", "content": "On which port does the relay zeta3x listen?"})
    assert session.window.copies() == copies


@pytest.mark.parametrize("policy", POLICIES)
def test_a_conversation_keeps_its_beginning(policy: str) -> None:
    session = kilburn.open(":memory:", window=4000, policy=policy, tokenizer="chars/4").session("a")
    edits = prompts = 0
    before: list[str] = []
    for turn, (question, answer) in enumerate(talk(120)):
        asked = f"On which port does the relay zeta{turn - 60}x listen?" if turn > 60 and turn % 5 == 0 else question
        session.append({"role": "user", "content": asked})
        after = texts(session)
        # What came last, a copy and the question, may go; an edit is what changes before that.
        edits += after[: len(before) - 2] != before[:-2] if before else 0
        prompts += 1
        before = after
        session.append({"role": "assistant", "content": answer})
    assert edits < prompts / 8
    stats = session.stats()
    # Each message is a question here, and brings something that the next prompt does not show.
    assert stats.tokens_reprefilled < 0.14 * stats.tokens_shipped


@given(
    own=st.integers(1, 2000),
    behind=st.integers(0, 20_000),
    prompts=st.integers(0, 50),
    prices=st.one_of(
        st.sampled_from(list(PRICES.values())),
        st.builds(Prices, cached=st.floats(0.01, 1), written=st.floats(0.01, 5), input=st.just(1.0)),
    ),
)
def test_a_page_is_taken_out_only_if_the_prompts_that_follow_cost_less(
    own: int, behind: int, prompts: int, prices: Prices
) -> None:
    keep = prompts * (own + behind) * prices.cached
    leave = (behind * max(prices.written, prices.cached) if prompts else 0) + max(0, prompts - 1) * behind * prices.cached
    if pays(own, behind, prompts, prices):
        assert leave < keep or leave == pytest.approx(keep)
    elif prompts:
        assert leave >= keep or leave == pytest.approx(keep)


def test_a_copy_stays_where_it_would_have_too_much_read_again() -> None:
    """Calls and their results came behind it: to take it out would have all of that read again."""
    session = chat("hybrid", window=4000)
    session.append({"role": "user", "content": "On which port does the relay zeta3x listen?"})
    copies = session.window.copies()
    assert copies
    for turn in range(24):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        session.append({"role": "assistant", "content": None, "tool_calls": [call]})
        session.append({"role": "tool", "tool_call_id": f"c{turn}", "content": " ".join(WORDS) * 2})
    assert sum(page.tokens for page in session.window.resident() if page.id > 121) > 150
    session.append({"role": "assistant", "content": "On port 7003."})
    session.append({"role": "user", "content": "Could you write a sonnet about Lisbon instead?"})
    assert session.window.copies() == copies


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_leaves_with_the_users_next_message_though_that_asks_nothing(policy: str) -> None:
    session = chat(policy, window=4000)
    session.append({"role": "user", "content": "On which port does the relay zeta3x listen?"})
    assert session.window.copies()
    session.append({"role": "assistant", "content": "On port 7003."})
    session.append({"role": "user", "content": "Here is what the documentation of the harbour says. " + "It rains. " * 90})
    assert not session.window.copies()
    check_laws(session)


def test_two_copies_are_the_same_for_the_same_view() -> None:
    first, second = (chat("hybrid") for _ in range(2))
    for session in (first, second):
        session.append({"role": "user", "content": "On which port does the relay zeta3x listen?"})
    assert texts(first) == texts(second)


def test_an_agents_words_bring_what_they_name() -> None:
    session = kilburn.open(":memory:", window=2000, policy="hybrid", tokenizer="chars/4").session("a")
    session.append({"role": "user", "content": "Please go on with the work. " * 40})
    for turn, (_, listing) in enumerate(talk(40)):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        said = "I need the port of zeta7x now." if turn == 39 else "Next."
        session.append({"role": "assistant", "content": said, "tool_calls": [call]})
        session.append({"role": "tool", "tool_call_id": f"c{turn}", "content": listing})
        assert session.render()[-1] == {"role": "tool", "tool_call_id": f"c{turn}", "content": listing}
    shown = texts(session)
    assert any("zeta7x listens on port 7007" in text for text in shown)
    assert any(event.data.get("cover", event.pages) == [] for event in session.ledger.events() if "fold" in event.data)
    check_laws(session)


@pytest.mark.parametrize("goes_on", [True, False])
def test_an_agent_that_goes_on_after_its_own_words_has_what_they_name(goes_on: bool) -> None:
    session = kilburn.open(":memory:", window=2000, policy="hybrid", tokenizer="chars/4").session("a")
    for turn, (_, listing) in enumerate(talk(40)):
        said = ["I look on.", f"look {turn}"] if goes_on else [f"I look on.\nlook {turn}"]
        session.append(*({"role": "assistant", "content": text} for text in said))
        session.append({"role": "user", "content": " ".join(WORDS) + listing})
    before = texts(session)
    assert not any("zeta7x" in text for text in before)
    session.append({"role": "assistant", "content": "I need the port of zeta7x now."})
    after = texts(session)
    assert after[: len(before)] == before
    assert ("zeta7x listens on port 7007" in after[-2]) == goes_on
    check_laws(session)


VIEW = "[File: src/relay.py]\n" + "\n".join(
    [f"{line}:    counter_{line} = {line}" for line in range(40, 60)] + ["60:def open_relay_port(address, backlog=128):"]
)

DEFINITION = "60:def open_relay_port(address, backlog=128):"
NOTE = "The data of gilefezi lies in /srv/a7."
ERROR = 'File "src/relay.py", line 9, in open_relay_port\nTypeError: a backlog is missing'
DEFINED = [
    ("The call of open_relay_port must get a backlog.", "ls", "src"),
    ("Next.", "grep -n open_relay_port src/relay.py", "grep: not found"),
    ("Next.", "python main.py", ERROR),
]
NOTED = [
    ("I still have to find out where gilefezi keeps it.", "ls", "src"),
    ("Next.", 'grep -n "gilefezi" -r .', "grep: not found"),
    ("Next.", "python main.py", "TypeError: bad operand: gilefezi"),
]


@pytest.mark.parametrize(
    ("policy", "fact", "said", "command", "output"),
    [
        *[(policy, DEFINITION, *step) for policy in POLICIES for step in DEFINED],
        *[("hybrid", NOTE, *step) for step in NOTED],  # the excerpt of `cost` has the note
    ],
)
def test_a_plan_a_call_or_an_error_brings_the_line_that_defines_or_has_what_it_names(
    policy: str, fact: str, said: str, command: str, output: str
) -> None:
    session = kilburn.open(":memory:", window=4000, policy=policy, tokenizer="chars/4").session("a")
    session.append({"role": "user", "content": "Please go on with the work. " * 40})
    answers = [VIEW, NOTE, *[listing for _, listing in talk(120)]]
    for turn, listing in enumerate([*answers, output]):
        is_last = turn == len(answers)
        arguments = json.dumps({"command": command if is_last else "look"})
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "shell", "arguments": arguments}}
        assert not is_last or fact not in str(texts(session))
        session.append({"role": "assistant", "content": said if is_last else "Next.", "tool_calls": [call]})
        session.append({"role": "tool", "tool_call_id": f"c{turn}", "content": listing})
    assert fact in str(texts(session)[:-1])
    check_laws(session)


def test_an_output_that_was_answered_with_a_call_stays_whole_beside_the_next_one() -> None:
    """An edit that the call causes takes older pages, not the output that the agent works with."""
    session = kilburn.open(":memory:", window=4000, policy="hybrid", tokenizer="chars/4").session("a")
    session.append({"role": "user", "content": "Please go on with the work. " * 40})
    listing, edits = "", 0
    for turn in range(60):
        arguments = json.dumps({"at": "x" * 300 * (turn % 7)})
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "look", "arguments": arguments}}
        folds = session.stats().folds
        session.append({"role": "assistant", "content": "Next.", "tool_calls": [call]})
        edits += session.stats().folds > folds
        assert listing in "\n".join(texts(session))
        listing = "\n".join([f"{turn}.{line} {word}" for line, word in enumerate(WORDS * 18)])
        session.append({"role": "tool", "tool_call_id": f"c{turn}", "content": listing})
    assert edits > 3
    check_laws(session)


class _Recorded(Hashing):
    """Keeps the texts that it embeds."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> Any:
        self.texts += texts
        return super().embed(texts)


def test_only_a_question_costs_the_embedder_a_query() -> None:
    embedder = _Recorded()
    with kilburn.open(":memory:", window=2000, policy="hybrid", tokenizer="chars/4", embedder=embedder) as store:
        session = store.session("a")
        for question, answer in talk(60):
            session.append({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "open_port"}'}}
        session.append({"role": "user", "content": "Please wait. On which port does zeta3x listen?"})
        session.append({"role": "assistant", "content": None, "tool_calls": [call]})
        session.append({"role": "tool", "tool_call_id": "c", "content": "Nothing."})
    assert embedder.texts.count("On which port does zeta3x listen?") == 1
    assert "open_port" not in embedder.texts


def test_the_line_that_defines_what_is_asked_is_brought_with_its_number() -> None:
    session = kilburn.open(":memory:", window=1000, policy="hybrid", tokenizer="chars/4").session("a")
    session.append({"role": "user", "content": "Please look at all files of the project."})
    for turn in range(12):
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "read", "arguments": f'{{"path": "src/m{turn}.py"}}'}}
        lines = [f"{n}: value_{n} = look_up(relay_{turn}, {n})" for n in range(40)]
        lines[20] = f"20: def relay_{turn}(first, second):"
        session.append({"role": "assistant", "content": None, "tool_calls": [call]})
        session.append({"role": "tool", "tool_call_id": f"c{turn}", "content": "\n".join(lines)})
    session.append({"role": "assistant", "content": "I have read them."})
    session.append({"role": "user", "content": "On which line does the definition of `relay_3` in src/m3.py begin?"})
    assert any("20: def relay_3(first, second):" in text for text in texts(session))
    check_laws(session)


def test_questions_are_the_sentences_with_a_question_mark() -> None:
    text = "I read simplify.py today. What is in it?\nThanks! 何ですか？ はい。"
    assert extract_questions(text) == ["What is in it?", "何ですか？"]


def test_a_remark_brings_less_than_a_question() -> None:
    asked, told = chat("hybrid"), chat("hybrid")
    asked.append({"role": "user", "content": "On which port does the relay zeta3x listen, and was it the amber basin?"})
    told.append(
        {
            "role": "user",
            "content": "The weather over the harbour was fine, and nobody has said a word about relays since we came home.",
        }
    )
    assert asked.window.copies()
    assert not told.window.copies()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    ("order", "stands", "tool", "arguments"),
    [
        ("I'd rather you left legacy/ alone.", True, "write_file", {"path": "legacy/dates.py", "content": "x = 1\n" * 50}),
        ("What is under contracts/ is for Dana.", False, "bash", {"command": "rm contracts/acme.md"}),
        ("The staging database belongs to Marta.", False, "bash", {"command": "psql staging -f clean.sql"}),
    ],
)
def test_what_the_user_said_about_a_call_comes_back_with_it(
    policy: str, order: str, stands: bool, tool: str, arguments: dict[str, str]
) -> None:
    session = kilburn.open(":memory:", window=2000, policy=policy, tokenizer="chars/4").session("a")
    for turn, (question, answer) in enumerate(talk(40)):
        remark = order if turn == 3 else f"The shelf{turn} of store{turn} is Owner{turn}'s."
        session.append({"role": "user", "content": f"{answer} {remark}"}, {"role": "assistant", "content": question})
    session.append({"role": "user", "content": "Now clean up."})
    call(session, "a", "bash", {"command": "date"})
    # A standing order is there at all times.
    assert any(order in text for text in texts(session)) is stands
    call(session, "b", tool, arguments)
    assert any(order in text for text in texts(session))
    assert session.render().tokens <= 2000


def call(session: Session, name: str, tool: str, arguments: dict[str, str]) -> None:
    """Tell a call and its result."""
    function = {"name": tool, "arguments": json.dumps(arguments)}
    calls = [{"id": name, "type": "function", "function": function}]
    session.append({"role": "assistant", "content": None, "tool_calls": calls})
    session.append({"role": "tool", "tool_call_id": name, "content": "done"})

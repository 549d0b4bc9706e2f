"""A short torture of every policy, and checks of the torture itself: its judge, its scheduler, and its seeds.

`python tests/torture --seconds 600` runs a long torture. The sessions need `kilburn_lab`, so all of this is slow.
"""

from __future__ import annotations

import random
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kilburn_lab", reason="the laboratory is not installed: pip install ./lab")

import kilburn as package
from cli.terminal import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.kernel.resolve import names
from torture.__main__ import app
from torture.foes import Brittle, Struck
from torture.onlooker import Onlooker
from torture.oracle import RULER, Book, Turn, faults_of_chat, faults_of_messages, look, weight
from torture.run import POLICIES, torture
from torture.talk import Talk
from torture.turns import take_turns

pytestmark = pytest.mark.slow

SEED = 1


def use(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "tool_use", "id": call, "name": "f", "input": {}} for call in ids]}


def result(*ids: str, before: tuple[Any, ...] = (), after: tuple[Any, ...] = ()) -> dict[str, Any]:
    return user([*before, *({"type": "tool_result", "tool_use_id": call, "content": "x"} for call in ids), *after])


HELLO = {"type": "text", "text": "hello"}


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        ([user("a"), assistant(None, call_of("c")), tool("c", "x"), user("b")], ""),
        ([user("a"), assistant(None, call_of("c"), call_of("d")), tool("d", "x"), tool("c", "x")], ""),
        ([user("a"), assistant(None, call_of("c"))], "no result"),
        ([user("a"), assistant(None, call_of("c")), user("b"), tool("c", "x")], "no result"),
        ([user("a"), tool("c", "x")], "answers no call"),
        ([user("a"), assistant(None, call_of("c")), tool("c", "x"), tool("c", "x")], "answers no call"),
        ([user("a"), assistant(None, call_of("c"), call_of("c")), tool("c", "x")], "may not make"),
        ([{"role": "robot", "content": "a"}], "role"),
    ],
)
def test_the_rules_of_the_chat_form(prompt: list[dict[str, Any]], wrong: str) -> None:
    found = list(faults_of_chat(prompt))
    assert (wrong in " ".join(found)) if wrong else found == []


@pytest.mark.parametrize(
    ("prompt", "wrong"),
    [
        ([user("a"), use("c"), result("c", after=(HELLO,)), assistant("b")], ""),
        ([user("a"), use("c", "d"), result("d", "c")], ""),
        ([user("a"), use("c")], "no result"),
        ([user("a"), use("c"), user("b")], "answers"),
        ([user("a"), use("c", "d"), result("c")], "answers"),
        ([user("a"), use("c"), result("c", before=(HELLO,))], "before its tool results"),
        ([user("a"), user("b")], "alternate"),
        ([assistant("a")], "alternate"),
        ([user("")], "empty text"),
        ([user([])], "is empty"),
    ],
)
def test_the_rules_of_the_messages_form(prompt: list[dict[str, Any]], wrong: str) -> None:
    found = list(faults_of_messages(prompt))
    assert (wrong in " ".join(found)) if wrong else found == []


def test_every_string_that_is_sent_weighs() -> None:
    assert weight([user("four")]) == 4
    assert weight([assistant("four", {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}})]) == 9
    assert weight([tool("c1", "four")]) == 6
    assert weight([user([{"type": "text", "text": "four", "cache_control": {"type": "ephemeral"}}])]) == 4
    assert weight([{"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": "b"}}]}]) == 12
    assert weight([{"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "1234"}]}]) == 6


def test_the_book_knows_what_is_lost_added_doubled_or_out_of_order() -> None:
    book = Book()
    one, two = (Turn(messages=[user(text)], texts=[text]) for text in ("one", "two"))
    assert list(book.admit("p2", two)) == list(book.admit("p1", one)) == []
    assert list(book.admit("p3-p4", Turn(messages=[user("three")], texts=["three"]))) != []
    said = [user("one"), user("two"), user("three")]
    assert list(book.faults(said)) == []
    for wrong, kind in (
        (said[:2], "lost"),
        ([*said, user("four")], "admitted"),
        ([*said, user("two")], "doubled"),
        ([said[1], said[0], said[2]], "disorder"),
    ):
        assert [fault.partition(":")[0].partition(",")[0] for fault in book.faults(wrong)] == [kind]
    book.forgotten.add(2)
    assert list(book.faults([user("one"), user("three")])) == []


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_talk_is_what_a_user_may_append_and_comes_back(form: str, tmp_path: Path) -> None:
    talk, book = Talk(random.Random(1), form, "s", 300), Book()
    with package.open(str(tmp_path / "agent.db"), window=100_000, policy="fifo", tokenizer=RULER) as store:
        session = store.session("a")
        for turn in [talk.first(), *(talk.plain("user") for _ in range(2))]:
            assert list(book.admit(session.append(*turn.messages), turn)) == []
        for _ in range(40):
            turn = talk.next(book.open_calls())
            assert list(book.admit(session.append(*turn.messages), turn)) == []
        assert list(book.unreadable(session)) == []
        seen = look(session, 100_000)
        assert (seen.faults, seen.error, list(book.faults(seen.messages))) == ([], "", [])
        assert look(session, 1000).faults[0].startswith("over")


def test_threads_take_turns_one_at_a_time_in_an_order_that_is_the_seeds() -> None:
    def order(seed: int) -> list[int]:
        lock, seen, inside = threading.RLock(), list[int](), threading.Lock()

        def work(me: int) -> None:
            with package.open(":memory:", window=1000, policy="fifo", tokenizer=RULER) as store:
                session = store.session(str(me))
                for number in range(4):
                    session.append(user(f"{number}"))
                    with inside:
                        seen.append(me)
                    with lock:
                        session.render()

        assert take_turns([lambda me=me: work(me) for me in range(3)], seed) == []  # type: ignore[misc]
        return seen

    orders = [order(seed) for seed in range(4)]
    assert all(sorted(one) == [0] * 4 + [1] * 4 + [2] * 4 for one in orders)
    assert any(one != sorted(one) for one in orders), "nobody was ever interrupted"


def test_a_thread_that_holds_a_lock_and_loses_its_turn_stops_nobody() -> None:
    lock, done = threading.Lock(), []

    def work(me: int) -> None:
        with package.open(":memory:", window=1000, policy="fifo", tokenizer=RULER) as store:
            for _ in range(3):
                with lock:
                    store.session(str(me)).append(user("x"))
                time.sleep(0)
        done.append(me)

    assert take_turns([lambda me=me: work(me) for me in range(3)], 1, share=0.5) == []  # type: ignore[misc]
    assert sorted(done) == [0, 1, 2]


def test_what_a_thread_raises_is_told() -> None:
    def fail() -> None:
        raise RuntimeError("no")

    (error,) = take_turns([fail, lambda: None], 1)
    assert str(error) == "no"


def test_the_counter_raises_where_it_is_told_and_in_no_other_thread() -> None:
    counter = Brittle()
    assert counter.count("four") == 4
    counter.arm(2, Struck())
    assert counter.count("four") == 4
    other = threading.Thread(target=lambda: [counter.count("four") for _ in range(9)])
    other.start()
    other.join(600)
    with pytest.raises(Struck):
        counter.count("four")
    assert counter.count("four") == 4


def test_the_other_process_looks_writes_dies_and_comes_again(tmp_path: Path) -> None:
    path, onlooker = str(tmp_path / "agent.db"), Onlooker()
    talk = Talk(random.Random(3), "chat", "s", 600)
    try:
        assert onlooker.look(path, "a", 900).error, "there is no store yet"
        said = [onlooker.append(path, "a", 900, "summarize", talk.plain("user").messages) for _ in range(3)]
        assert said == ["p1", "p2", "p3"]
        before = onlooker.look(path, "a", 900)
        assert (before.faults, before.error, len(before.messages)) == ([], "", 3)
        big = [user("word " * 120)]
        ends = [onlooker.append(path, "a", 900, "summarize", big, die=True) for _ in range(4)]
        assert "" in ends, "nobody was asked, so nobody died"
        onlooker.start_watching(path, "a", 900)
        assert onlooker.stop_watching().error == ""
    finally:
        onlooker.close()


@pytest.mark.parametrize("spec", POLICIES)
def test_every_promise_holds_under_torture(spec: str) -> None:
    report = torture(sessions=1, seed=SEED, policies=[spec], steps=10)
    assert not report.violations, report.table()


def test_every_policy_of_the_product_that_can_act_takes_part() -> None:
    tortured = set(re.findall(r"\w+", " ".join(POLICIES)))
    assert set(names("policies")) - tortured == {"belady", "oldest"}


def test_a_broken_promise_is_told_with_the_seed_that_brings_it_back() -> None:
    words = ("--sessions", 2, "--seed", 7, "--policy", "torture.cheats:Cheat", "--steps", 8)
    said = kilburn(*words, "--json", commands=app)
    assert (said.status, said.err) == (1, "seed 7\n")
    found = said.json["violations"]
    assert "over" in {one["kind"] for one in found}
    first = min(one["seed"] for one in found)
    again = torture(sessions=1, seed=first, policies=["torture.cheats:Cheat"], steps=8)
    mine = [(one["kind"], one["after"]) for one in found if one["seed"] == first]
    assert [(one.kind, one.after) for one in again.violations] == mine
    table = kilburn(*words, commands=app)
    assert table.status == 1
    assert table.out.startswith("seed 7: 2 sessions, ")
    assert re.search(r"^over x\d+: 'a prompt of \d+ in a window of \d+", table.out, re.MULTILINE)


def test_without_time_there_is_no_session_and_a_seed_all_the_same() -> None:
    said = kilburn("--seconds", 0, commands=app)
    assert (said.status, said.out.partition(":")[2]) == (0, " 0 sessions, 0 questions, 0 violations\n")
    assert re.fullmatch(r"seed \d+\n", said.err)

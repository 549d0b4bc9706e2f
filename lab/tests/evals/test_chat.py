"""`lab chat`: a chat in which a few questions need what was said long ago."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from cli.terminal import kilburn as command
from kilburn.errors import SpecError
from kilburn_lab.evals.chat import AGO, LENGTH, chat, evaluate

SHORT = 200


def test_each_question_has_one_answer_that_was_said_once_before_it() -> None:
    talk = chat(LENGTH, seed=2)
    text = "\n".join(f"{one.said}\n{one.reply}" for one in talk)
    asked = [(at, one.question) for at, one in enumerate(talk) if one.question is not None]
    assert len(asked) > 30
    for at, question in asked:
        assert re.findall(question.fact, text) == [question.answer]
        before = "\n".join(f"{one.said}\n{one.reply}" for one in talk[:at])
        assert question.answer in before
        assert question.answer not in question.text
        assert question.age > 0
    assert len({question.text for _, question in asked}) == len(asked)
    old = Counter(question.age > 5000 for _, question in asked)
    assert old[True] > old[False] > 0


def test_the_same_seed_has_the_same_chat_and_a_longer_one_begins_alike() -> None:
    assert chat(50, seed=1) == chat(50, seed=1) == chat(80, seed=1)[:50]
    assert chat(50, seed=1) != chat(50, seed=2)
    assert AGO < LENGTH


def test_a_window_that_holds_the_chat_answers_all_and_keeps_the_prefix() -> None:
    report = evaluate(SHORT, windows=[100_000], policies=["fifo", "hybrid"])
    for policy in ("tail", "fifo", "hybrid"):
        row = report.row(policy, 100_000)
        assert (row.right, row.edited, row.broken, row.again, row.overflow) == (1.0, 0, 0, 0, 0)
        assert row.kept is not None
        assert row.kept > 0.9
        assert row.exchanges == SHORT


def test_a_small_window_costs_answers_or_the_prefix() -> None:
    report = evaluate(SHORT, windows=[1500], policies=["fifo", "tail+chunks"])
    tail, fifo, paged = (report.row(policy, 1500) for policy in ("tail", "fifo", "tail+chunks"))
    assert tail.right < 1.0
    assert tail.old == fifo.old == 0.0
    assert paged.old is not None
    assert paged.old > 0.0
    assert tail.kept is not None
    assert fifo.kept is not None
    assert tail.kept < fifo.kept
    assert tail.again > fifo.again
    assert tail.edited == tail.broken > fifo.edited
    assert fifo.overflow == 0
    bills = {(one.policy, one.provider): one for one in report.bills}
    assert bills["fifo", "anthropic"].read > bills["tail", "anthropic"].read
    assert bills["tail", "openai"].to_tail == 1.0


def test_the_verb_makes_a_chat() -> None:
    small = ("lab", "chat", "--sample", SHORT, "--window", 1500, "--policy", "fifo")
    said = command(*small, "--json")
    assert said.status == 0, said.err
    assert {row["policy"] for row in said.json["rows"]} == {"tail", "fifo", "history"}
    table = command(*small)
    assert max(map(len, table.out.splitlines())) <= 130
    assert {"kept", "again", "broken", "ms"} <= set(table.out.split())
    with pytest.raises(SpecError, match="no question"):
        evaluate(1)
    with pytest.raises(SpecError):
        chat(0)

"""Aggregation and pairs over long texts: the generators, the oracle, and what each system makes of them."""

from __future__ import annotations

from collections import Counter

import pytest

from cli.terminal import kilburn
from kilburn.errors import SandboxRefused, SpecError
from kilburn.model import Request, complete
from kilburn.recursion.sandbox import open_sandbox
from kilburn_lab.evals.aggregation import TASKS, TOPICS, items, question_of, reports, tally, topic_of
from kilburn_lab.evals.recursion import PAIR, REPORTS, TELL, Oracle, RecursionReport, evaluate
from kilburn_lab.evals.report import row_of


@pytest.fixture(scope="module")
def report() -> RecursionReport:
    try:
        open_sandbox().close()
    except SandboxRefused as error:
        pytest.skip(str(error))
    return evaluate([1500, 30_000], window=4000, judged=[10, 20])


def test_items_are_the_same_for_the_same_seed_and_about_as_long_as_wanted() -> None:
    made = items(5000, 1)
    assert made == items(5000, 1) != items(5000, 2)
    assert abs(sum(len(item.line) + 1 for item in made) - 20_000) < 100
    assert {item.topic for item in made} == set(TOPICS)
    assert all(topic_of(item.remark) == item.topic for item in made)


@pytest.mark.parametrize("seed", range(3))
def test_answers_are_what_counting_by_hand_gives(seed: int) -> None:
    told = items(20_000, seed)
    by_hand = Counter(item.topic for item in told)
    assert question_of("most", told, seed).answer in [topic for topic, n in by_hand.items() if n == max(by_hand.values())]
    question = question_of("count", told, seed)
    topic = question.terms[0]
    assert topic in question.text
    assert question.answer == by_hand[topic]
    question = question_of("range", told, seed)
    first, second, months = question.terms
    assert question.answer == sum(item.topic in (first, second) and item.date[:7] in months for item in told)
    question = question_of("pairs", told, seed)
    first, second, months = question.terms
    by_user = Counter((item.user, item.topic) for item in told if item.date.startswith(months[0]))
    good = {user for user, _ in by_user if by_user[user, first] > by_user[user, second]}
    assert {tuple(pair) for pair in question.answer} == {(a, b) for a in good for b in good if a < b}


def test_a_question_about_pairs_stays_one_at_any_size() -> None:
    for tokens in (10_000, 400_000):
        pairs = question_of("pairs", items(tokens, 0), 0).answer
        assert 3 < len(pairs) < 700


def test_the_code_of_a_question_computes_its_answer() -> None:
    told = items(4000, 3)
    found = tally(told)
    with open_sandbox() as sandbox:
        sandbox.run(f"found = {dict(found)!r}")
        for task in TASKS:
            question = question_of(task, told, 3)
            sandbox.run(f"got = {question.code}")
            assert sandbox.get("got") == question.answer == question.compute(found), task
    with pytest.raises(SpecError):
        question_of("none", told, 3)


def said(prompt: str) -> str:
    return complete(Oracle(), Request(messages=[{"role": "user", "content": prompt}])).text


def test_the_oracle_labels_what_it_knows_and_nothing_else() -> None:
    told = items(1000, 5)[:20]
    lines = said(
        TELL + "\n" + "\n".join(f"{n}: {item.remark}" for n, item in enumerate(told)) + "\n20: my own words"
    ).splitlines()
    assert lines == [f"{n}: {item.topic}" for n, item in enumerate(told)]
    assert said("What is this about?") == "nothing to label"


def test_the_oracle_knows_which_reports_are_of_one_event() -> None:
    texts, same = reports(30, 1)
    assert same
    for a in range(30):
        for b in range(a + 1, 30):
            assert (said(f"{PAIR}\nA: {texts[a]}\nB: {texts[b]}") == "yes") == ([a, b] in same)


def test_sub_calls_answer_everything_at_any_size(report: RecursionReport) -> None:
    for row in report.rows:
        if row.system in ("depth 1", "depth 2"):
            assert row.exact, row
            assert row.f1 in (None, 1.0)
            assert row.outcome == "answered"


def test_what_a_window_shows_is_not_enough(report: RecursionReport) -> None:
    large = [row for row in report.rows if row.tokens > 29_000]
    for system in ("truncate", "search", "depth 0"):
        assert sum(row.exact for row in large if row.system == system) <= 2, system
    small = [row for row in report.rows if row.tokens < 2000 and row.system == "truncate"]
    assert all(row.exact for row in small)


def test_sub_calls_grow_as_the_task_demands(report: RecursionReport) -> None:
    small, large = (
        row_of(report.rows, system="depth 1", task="count", items=n)
        for n in sorted({r.items for r in report.rows if r.task == "count"})
    )
    assert [row.calls for row in (small, large)] == [-(-row.items // 50) for row in (small, large)]
    assert [row_of(report.rows, system="depth 1", task=REPORTS, items=n).calls for n in (10, 20)] == [45, 190]


def test_the_window_of_the_root_does_not_grow(report: RecursionReport) -> None:
    for task in TASKS:
        resident = [row.resident for row in report.rows if (row.system, row.task) == ("depth 1", task)]
        assert max(resident) - min(resident) < 20
        assert max(resident) < 2000


def test_names_that_there_are_not() -> None:
    with pytest.raises(SpecError):
        evaluate([1000], systems=["depth 3"])
    with pytest.raises(SpecError):
        evaluate([1000], systems=["truncate"], tasks=["none"])
    with pytest.raises(SpecError):
        evaluate([10])


def test_the_verb_fits_the_screen(report: RecursionReport) -> None:
    words = ("lab", "recursion", "--tokens", 1500, "--judged", 12)
    shown = kilburn(*words)
    assert shown.status == 0, shown.err
    assert max(map(len, shown.out.splitlines())) <= 120
    rows = kilburn(*words, "--json").json["rows"]
    assert {row["system"] for row in rows} == {"depth 0", "depth 1", "depth 2", "truncate", "search"}
    assert kilburn("lab", "recursion", "--system", "depth 9").status == 2

"""`eval table`: what the made-up sessions promise, what is counted of them, and the ordering that is tested."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from cli.terminal import kilburn
from kilburn.errors import SpecError
from kilburn.kernel.resolve import names
from kilburn_lab.evals.drift import texts_of
from kilburn_lab.evals.roster import Entrant
from kilburn_lab.evals.sessions import UserSession, sessions
from kilburn_lab.evals.table import EVERYBODY, evaluate, measure
from kilburn_lab.evals.table_report import BRIEF, ENTRIES, TIERS, QuestionOutcome, Streamed, TableReport


def texts(session: UserSession) -> list[str]:
    """The text of each message of a session, in order."""
    every = [message for one in session.interactions for message in (one.said, *one.done)]
    return ["\n".join(texts_of(message)) for message in every]


@pytest.fixture(scope="module")
def report() -> TableReport:
    return evaluate(["lru", "importance", "tiered", TIERS, "hybrid", ENTRIES, "mask", "belady"], count=3, window=1000)


def test_what_an_interaction_needs_is_there_and_nowhere_else() -> None:
    told = sessions(12, 40, 1, users=3)
    said: dict[str, list[str]] = {}
    changes = earlier = 0
    for session in told:
        here = texts(session)
        at = 0
        for interaction in session.interactions:
            at += 1
            assert all(page < at for page in interaction.uses)
            if asked := interaction.asked:
                if asked.earlier:
                    earlier += 1
                    assert not interaction.uses
                    assert not [text for text in here if asked.value in text]
                    assert any(asked.value in text for text in said[session.user])
                else:
                    holding = [number for number, text in enumerate(here, 1) if asked.value in text]
                    assert holding == list(interaction.uses)
                    changes += sum(
                        asked.question == one.asked.question and asked.value != one.asked.value
                        for one in session.interactions
                        if one.asked is not None and not one.asked.earlier
                    )
            at += len(interaction.done)
        assert len(here) == at
        said.setdefault(session.user, []).extend(here)
    assert earlier > 10
    assert changes
    assert sessions(12, 40, 1, users=3) == told != sessions(12, 40, 2, users=3)


def test_everybody_who_ships_takes_part() -> None:
    assert {*names("policies"), ENTRIES, TIERS} <= set(EVERYBODY)


def test_the_optimum_bounds_the_policies_and_nothing_is_lost(report: TableReport) -> None:
    best = report.row("belady")
    assert best.accuracy == 1.0
    for row in report.rows:
        assert row.accuracy is not None
        assert row.accuracy_low <= row.accuracy <= row.accuracy_high <= 1.0
        assert (row.searched, row.overflow, row.refused, row.questions) == (1.0, 0.0, 0, best.questions)
        assert row.earlier_off == 0.0
        assert row.earlier_on is not None
        assert row.earlier_on > 0.5


def test_what_a_policy_keeps_of_its_prefix_stands_beside_its_accuracy(report: TableReport) -> None:
    kept = {row.policy: row.kept for row in report.rows}
    assert all(share is not None and 0.0 <= share < 1.0 for share in kept.values())
    again = {row.policy: row.again for row in report.rows}
    # A buffer that evicts at every turn edits the beginning of every prompt.
    assert again[ENTRIES] > again["mask"] >= 0
    assert {"kept", "again"} <= set(report.table().split())


def test_an_answer_of_somebody_else_is_never_found() -> None:
    told = sessions(2, 50, 5, users=2)
    others = [one.asked.value for one in told[1].interactions if one.asked is not None]
    swapped = [
        replace(one, asked=replace(one.asked, value=others[at % len(others)])) if one.asked is not None else one
        for at, one in enumerate(told[0].interactions)
    ]
    (streamed,) = measure(Entrant("hybrid", "hybrid"), [replace(told[0], interactions=tuple(swapped))], 1000)
    assert len(streamed.questions) > 5
    assert not any(question.recalled for question in streamed.questions)


def test_a_buffer_of_entries_overflows_alone_and_policies_that_count_tokens_do_not(report: TableReport) -> None:
    assert report.row(ENTRIES).alone == 1.0
    assert [report.row(policy).alone for policy in (*BRIEF, "hybrid")] == [0.0] * 5


def test_the_table_names_its_terms_and_the_published_figures(report: TableReport) -> None:
    shown = report.table()
    for term in ("utilisation: ", "accuracy: ", "alone: ", "71.0%", "31.0 ms", "seed 0"):
        assert term in shown
    assert json.loads(report.to_json())["published"][TIERS]["accuracy"] == 0.81


def streamed(policy: str, shown: list[bool], alone: bool) -> Streamed:
    asked = [QuestionOutcome(earlier=False, shown=one, found=True, recalled=True, ms=2.0) for one in shown]
    return Streamed(policy=policy, session="s", questions=asked, full=2, used=0.5, alone=alone)


def test_margins_are_paired_and_fewer_overflows_are_better() -> None:
    made = TableReport.of(
        {
            "lru": [streamed("lru", [True, False], True)] * 20,
            "importance": [streamed("importance", [True, True], False)] * 20,
            "hybrid": [streamed("hybrid", [True, True], False)] * 20,
        },
        window=9,
        interactions=2,
        seed=0,
        seconds=1.0,
    )
    ahead = made.margin("importance", "lru")
    assert (ahead.ahead, ahead.low, ahead.high, ahead.verdict) == (0.5, 0.5, 0.5, "ahead")
    assert made.margin("importance", "lru", "alone").verdict == "ahead"
    assert made.margin("hybrid", "importance").verdict == "equal"
    assert made.row("lru").utilisation == 0.25
    with pytest.raises(KeyError):
        made.margin("tiered", "importance")


@pytest.mark.parametrize("wrong", [{"window": 100}, {"count": 0}, {"interactions": 0}, {"policies": ["nonsense"]}])
def test_numbers_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        evaluate(**{"policies": ["lru"], "count": 1, **wrong})  # type: ignore[arg-type]


def test_the_command_prints_the_same_as_json() -> None:
    size = ("--sample", "1", "--interactions", "12", "--window", "500", "--policy", "lru", "--policy", "fifo")
    said = kilburn("lab", "table", *size, "--json")
    assert said.status == 0
    assert {row["policy"] for row in json.loads(said.out)["rows"]} == {"lru", "fifo"}

"""`eval change`: the truth of a stream is what its statements plainly say, claims are answered exactly, and text honestly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.terminal import kilburn
from kilburn.errors import SpecError
from kilburn_lab.evals import streams
from kilburn_lab.evals.change import ChangeAnswer, ChangeReport, evaluate
from kilburn_lab.evals.streams import FAMILIES, Stream, Telling, stream

SEEDS = range(12)


@pytest.fixture(scope="module")
def report() -> ChangeReport:
    return evaluate(3, seed=100)


def test_the_same_seed_gives_the_same_stream() -> None:
    assert stream(3) == stream(3)
    assert stream(3) != stream(4)


def test_both_families_tell_the_same_story_in_other_sentences() -> None:
    for seed in SEEDS:
        one, other = (stream(seed, family) for family in FAMILIES)
        assert one.questions == other.questions
        strip = ("user", "time", "kind", "values", "since", "until")
        assert [[getattr(change, name) for name in strip] for change in one.changes] == [
            [getattr(change, name) for name in strip] for change in other.changes
        ]
        assert not {change.text for change in one.changes} & {change.text for change in other.changes if change.values}


def _asked_of(told: Stream, change: Telling) -> list[str]:
    return [
        value
        for question in told.questions
        if (question.user, question.subject, question.relation) == (change.user, change.subject, change.relation)
        and question.at is None
        for value in question.expected
    ]


def test_the_truth_is_what_was_said_last() -> None:
    kinds = set()
    for seed in SEEDS:
        told = stream(seed)
        last = {(change.user, change.subject, change.relation): change for change in told.changes if change.values}
        for change in last.values():
            now = _asked_of(told, change)
            kinds.add(change.kind)
            if change.kind == "retract":
                assert change.values[0] not in now
            elif change.kind != "late" and not change.many:
                assert tuple(now) == change.values
            elif change.many:
                assert change.values[0] in now
    assert {"state", "update", "correct", "retract", "contest", "late"} <= kinds


def test_a_message_has_its_values_and_its_text_no_other_users() -> None:
    for seed in SEEDS:
        told = stream(seed)
        for change in told.changes:
            assert all(value in change.text for value in change.values)
            others = [value for user, values in told.told.items() if user != change.user for value in values]
            assert not [value for value in others if value in change.text]
        assert [change.time for change in told.changes] == sorted(change.time for change in told.changes)


def test_every_sentence_of_a_topic_has_what_it_needs() -> None:
    for topic in streams.MATTERS:
        for sentences in (topic.plain, topic.casual):
            assert set(sentences) == ({"state", "retract"} if topic.many else {"state", "update", "correct", "retract", "late"})
            assert "{v}" in sentences["state"]
            assert "{old}" in sentences["retract"]


def test_claims_are_answered_exactly(report: ChangeReport) -> None:
    row = report.row("claims")
    assert row.now > 30
    assert row.past > 60
    assert (row.now_right, row.past_right) == (row.now, row.past)
    assert (row.stale, row.missing, row.leaks) == (0, 0, 0)
    assert row.both == row.marked == row.open > 0


@pytest.mark.parametrize(("mode", "family"), [("claims", "plain"), ("text", "plain"), ("text", "casual")])
def test_of_what_was_forgotten_nothing_is_left(report: ChangeReport, mode: str, family: str) -> None:
    row = report.row(mode, family)
    assert row.forgotten > 5
    assert (row.found, row.in_files) == (0, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_no_answer_has_another_users_value(report: ChangeReport, family: str) -> None:
    assert report.row("text", family).leaks == 0


def test_text_is_answered_better_than_by_silence(report: ChangeReport) -> None:
    row, floor = report.row("text", "plain"), report.row("sessions", "plain")
    assert row.now_right + row.past_right > 2 * row.empty > 0
    assert row.now_right + row.past_right > floor.now_right + floor.past_right


def test_an_answer_is_right_only_if_it_is_all_and_nothing_else() -> None:
    def answered(*returned: str) -> ChangeAnswer:
        return ChangeAnswer(
            mode="text", family="plain", stream=0, user="ana", text="?", at=None, expected=("a", "b"), returned=returned
        )

    assert answered("b", "a").right
    assert not answered("a").right
    assert not answered("a").stale
    assert answered("a", "b", "c").stale


@pytest.mark.parametrize("options", [{"streams": 0}, {"tokens": 0}, {"modes": ["x"]}, {"families": ["x"]}, {"policy": "nothing"}])
def test_options_that_mean_nothing(options: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        evaluate(**{"streams": 1, "modes": ["text"], **options})  # type: ignore[arg-type]


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "answers.jsonl"
    done = kilburn("lab", "change", "--sample", "1", "--mode", "claims", "--json", "--out", str(out))
    assert done.status == 0
    found = json.loads(done.out)
    assert found["rows"][0]["stale"] == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == found["rows"][0]["now"] + found["rows"][0]["past"]
    assert kilburn("lab", "change", "--sample", "1", "--mode", "claims", "--out", str(out)).status == 2
    assert "claims" in kilburn("lab", "change", "--sample", "1", "--mode", "claims").out

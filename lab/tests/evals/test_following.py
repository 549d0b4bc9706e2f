"""`eval change`, mode `talk`: the talk is what its sentences say, figures depend on nothing but the seed."""

from __future__ import annotations

import pytest

from kilburn.errors import SpecError
from kilburn_lab.evals.following import EXTRACTORS, PLACES, FollowReport, follow
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.talks import Talk, talk

SEEDS = range(20)


@pytest.fixture(scope="module")
def report() -> FollowReport:
    return follow(1, half="tune")


def _talks(half: str) -> list[Talk]:
    return [talk(seed, half) for seed in SEEDS]


def test_the_same_seed_gives_the_same_talk_and_the_same_figures(report: FollowReport) -> None:
    assert talk(3) == talk(3)
    assert talk(3) != talk(4)
    again = follow(1, half="tune", extractors=["rules"])
    assert again.asked == tuple(one for one in report.asked if one.extractor == "rules")


def test_the_halves_have_no_sentence_in_common() -> None:
    tune, told = ({turn.text for each in _talks(half) for turn in each.turns} for half in HALVES)
    assert tune
    assert not tune & told


@pytest.mark.parametrize("half", HALVES)
def test_what_is_true_at_the_end_was_said_last(half: str) -> None:
    kinds = set()
    for each in _talks(half):
        assert [turn.time for turn in each.turns] == sorted(turn.time for turn in each.turns)
        kinds |= {turn.kind for turn in each.turns}
        for question in each.asked:
            last = [turn for turn in each.turns if turn.topic == question.topic and turn.kind != "trap"][-1]
            assert question.value == ("" if last.kind == "date" else last.value)
            assert question.value not in question.stale
            assert last.value in last.text
        for trap in each.traps:
            assert all(trap.value not in turn.text for turn in each.turns if turn is not trap)
    assert kinds == {"state", "new", "negation", "correction", "event", "date", "trap", "task"}


def test_the_figures_are_of_all_extractors_and_places(report: FollowReport) -> None:
    assert [row.extractor for row in report.rows] == list(EXTRACTORS)
    for row in report.rows:
        assert set(row.current) == set(PLACES)
        assert 0 <= row.true + row.doubted <= row.facts
        assert all(row.current[where] + row.stale[where] <= row.questions for where in PLACES)
    nothing = report.row("none")
    assert (nothing.facts, nothing.current["facts"], nothing.stale["facts"]) == (0, nothing.over, 0)


@pytest.mark.parametrize("options", [{"talks": 0}, {"tokens": 0}, {"half": "x"}, {"extractors": ["x"]}, {"embedder": "nothing"}])
def test_options_that_mean_nothing(options: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        follow(**{"talks": 1, "extractors": ["none"], **options})  # type: ignore[arg-type]

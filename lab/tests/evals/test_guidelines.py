"""`lab guidelines`: accuracy rises with feedback, and falls back when it is forgotten."""

from __future__ import annotations

import pytest

from cli.terminal import kilburn
from kilburn.errors import SpecError
from kilburn_lab.evals.guidelines import FIELDS, USUAL, GuidelineReport, HiddenRule, decided, evaluate
from kilburn_lab.evals.sample import HALVES


@pytest.fixture(scope="module", params=HALVES)
def report(request: pytest.FixtureRequest) -> GuidelineReport:
    return evaluate(rules=1, tickets=15, half=request.param, seed=50)


def test_the_first_condition_that_fits_decides() -> None:
    rule = HiddenRule(3, "tune")
    assert len(rule.conditions) == 5
    for (field, value), label in rule.conditions[:1]:
        others = {other: values[0] for other, values in FIELDS.items()}
        assert rule.right({**others, field: value}) == label
    free = {
        field: next(value for value in values if ((field, value) not in dict(rule.conditions)))
        for field, values in FIELDS.items()
    }
    assert rule.right(free) == USUAL


@pytest.mark.parametrize("half", HALVES)
def test_a_user_names_all_that_matters_and_only_where_a_reason_is_given(half: str) -> None:
    rule = HiddenRule(3, half)
    (field, value), label = rule.conditions[0]
    ticket = {**rule.ticket(), field: value}
    assert value in rule.feedback(ticket, reason=True)
    bare = rule.feedback(ticket, reason=False)
    assert label in bare
    assert value not in bare


def test_the_script_knows_only_its_prompt() -> None:
    ticket = "A gold customer asks by mail about a refund, in a tone that is calm."
    example = "Request: A gold customer asks by mail about a refund, in a tone that is angry.\nFeedback: No, it should be later."
    assert decided("", ticket) == USUAL
    assert decided("If the customer is gold: urgent.", ticket) == "urgent"
    assert decided("If the customer is silver: urgent.", ticket) == USUAL
    assert decided("If the customer is gold: urgent.\nIf the customer is gold and it came by mail: refuse.", ticket) == "refuse"
    assert decided(example, ticket) == "later"
    assert decided(f"{example}\nIf the customer is gold: urgent.", ticket) == "urgent"


def test_accuracy_rises_with_feedback(report: GuidelineReport) -> None:
    before, after = report.row("both", 0), report.row("both", 32)
    assert before.right == report.row("none", 0).right
    assert after.right > before.right + 0.3
    assert report.row("guidelines", 32).right > report.row("examples", 4).right


def test_what_is_forgotten_leaves_nothing(report: GuidelineReport) -> None:
    gone = report.row("both", 32, 32)
    assert (gone.notes, gone.right) == (0, report.row("none", 0).right)
    assert gone.right <= report.row("both", 32, 16).right <= report.row("both", 32).right + 0.1


@pytest.mark.parametrize("options", [{"rules": 0}, {"feedback": 0}, {"tickets": 0}])
def test_what_cannot_be_measured(options: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        evaluate((), **options)  # type: ignore[arg-type]


def test_the_verb_prints_a_table() -> None:
    said = kilburn("lab", "guidelines", "--sample", "1", "--feedback", "2", "--tickets", "3")
    assert said.status == 0
    assert "Means over 1 hidden rules" in said.out

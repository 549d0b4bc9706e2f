"""Mementos of blocks: the rubric's points, the tries, what a useless model leaves, and whole traces as training data."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kilburn.answering import answerer
from kilburn.effect import Answer, Ask
from kilburn.kernel.drive import run
from kilburn.testing import Scripted
from kilburn.wire.mementos import BLOCK_START, parse
from traces.annotation import annotate
from traces.compression import POINTS, compress, extractive, grade

BLOCK = (
    "We look for the roots. By the quadratic formula with $x^2 - 5x + 6 = 0$ the discriminant is D = 25 - 24 = 1. "
    "There were some other ideas that lead nowhere, and I spend a while on them before I see that they are of no use to anybody. "
    "So the roots are x = 2 and x = 3, and their product is 12/2 = 6. I check by plugging in: 4 - 10 + 6 = 0 holds. "
    "Therefore the answer is x = 3, the larger root."
)
GOOD = (
    "Result: x = 3, the larger root. Quadratic formula with $x^2 - 5x + 6 = 0$, D = 25 - 24 = 1; roots are x = 2 and x = 3, "
    "product is 12/2 = 6. Checked: 4 - 10 + 6 = 0."
)


def words(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


def test_a_good_memento_is_worth_eight_and_each_loss_costs_its_points() -> None:
    assert grade(BLOCK, GOOD).total >= 8
    assert grade(BLOCK, BLOCK).formulas == POINTS["formulas"]
    assert grade(BLOCK, GOOD.replace("Checked: 4 - 10 + 6 = 0.", "")).validation == 0
    assert grade(BLOCK, GOOD.replace("Quadratic formula", "It")).methods < grade(BLOCK, GOOD).methods
    assert grade(BLOCK, GOOD.replace("D = 25 - 24 = 1", "")).formulas < grade(BLOCK, GOOD).formulas
    assert grade(BLOCK, GOOD + " It is 4711.").grounded == 0
    assert grade(BLOCK, GOOD + " It is 4711.").invented == ("4711",)
    assert grade(BLOCK, "We looked for roots. " + GOOD).result_first == 0
    assert grade(BLOCK, "").total == 0
    assert grade("We think about it for a while.", "Thought.").total == 10


@pytest.mark.parametrize("tokens", [5, 20, 60, 400])
def test_extracted_lines_are_the_blocks_own_and_fit(tokens: int) -> None:
    made = extractive(BLOCK, tokens, words)
    assert words(made) <= tokens
    assert all(part in BLOCK for part in re.split(r"(?<=\.) ", made))
    if tokens >= 60:
        assert made.startswith("Therefore the answer is x = 3")
        assert grade(BLOCK, made).total > 5
        assert "of no use" not in made or tokens == 400


def compressed(*said: Any, judged: bool = False) -> tuple[Any, Scripted]:
    model = Scripted(said)
    return run(compress(BLOCK, tokens=120, count=words, judged=judged), answerer(model)), model


def test_the_first_that_is_worth_eight_is_taken() -> None:
    made, model = compressed("Two roots were found somehow by us.", GOOD, "never asked")
    assert (made.memento, made.tries, made.outcome) == (GOOD, 2, "accepted")
    again = str(model.requests[1].messages)
    assert "It lacks:" in again
    assert "Two roots were found" in again


@pytest.mark.parametrize(
    "said",
    [
        "",
        "I'm sorry, I can't help with that.",
        "no " * 80,
        GOOD * 9,
        RuntimeError("broken"),
        lambda request: request.messages[-1]["content"],
    ],
)
def test_what_is_no_memento_leaves_the_extract_after_three_tries(said: Any) -> None:
    made, model = compressed(*[said] * 5)
    assert (made.outcome, made.tries) == ("extract", 0)
    assert made.memento == extractive(BLOCK, 120, words)
    assert model.left == 2


def test_an_invented_number_is_never_accepted() -> None:
    made, _ = compressed(*[GOOD + " Also 4711."] * 3)
    assert made.outcome != "accepted"


@pytest.mark.parametrize(
    ("judge", "outcome"),
    [
        (json.dumps(dict.fromkeys(POINTS, 0)), "extract"),
        (json.dumps(POINTS), "accepted"),
        (json.dumps(dict.fromkeys(POINTS, 99)), "accepted"),
        ("no JSON", "accepted"),
        ("", "accepted"),
    ],
)
def test_a_judge_can_only_lower_the_grade(judge: str, outcome: str) -> None:
    made, _ = compressed(*[GOOD, judge] * 3, judged=True)
    assert made.outcome == outcome


def test_without_a_model_nothing_is_asked_twice() -> None:
    asked: list[Ask] = []

    def none(ask: Ask) -> Answer:
        asked.append(ask)
        return Answer(outcome="none")

    assert run(compress(BLOCK, tokens=120, count=words), none).outcome == "extract"
    assert len(asked) == 1
    assert run(compress("  ", tokens=120, count=words), none).outcome == "empty"


def replies() -> Iterator[Any]:
    while True:
        yield lambda request: GOOD if "<block-" in request.messages[-1]["content"] else "no scores"


@pytest.mark.parametrize("model", [False, True])
def test_a_trace_becomes_training_data_without_losing_a_letter(model: bool) -> None:
    trace = "\n\n".join(f"Now part {number}. {BLOCK}" for number in range(6)) + "\n"
    speaker = Scripted([next(replies()) for _ in range(60)]) if model else None
    made = run(annotate(trace, words, least=100), answerer(speaker))
    assert len(made.blocks) >= 2
    assert "".join(block.text for block in made.blocks) == trace
    assert all(block.tokens >= 100 for block in made.blocks)
    found = parse(made.completion)
    assert found.faults == ()
    assert [made.completion[slice(*one.content)] for one in found.blocks] == [block.text for block in made.blocks]
    assert [made.completion[slice(*one.memento)] for one in found.blocks] == [block.memento for block in made.blocks]
    assert made.memento_tokens < made.tokens / 2
    if model:
        assert {block.outcome for block in made.blocks} <= {"accepted", "best", "extract"}
        assert any(block.memento == GOOD for block in made.blocks)


@pytest.mark.parametrize(("trace", "arguments"), [(f"a {BLOCK_START} b", {}), ("a", {"share": 0.0}), ("a", {"least": 0})])
def test_what_cannot_be_annotated_is_refused(trace: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tags|share"):
        run(annotate(trace, words, **arguments), answerer(None))

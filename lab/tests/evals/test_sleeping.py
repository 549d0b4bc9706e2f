"""`lab sleep`: what was worked out before is right, and makes a question cheaper."""

from __future__ import annotations

from kilburn_lab.evals.report import row_of
from kilburn_lab.evals.sleeping import THINGS, sleeping


def test_a_question_takes_fewer_tokens_after_sleep_and_its_answer_is_right() -> None:
    report = sleeping(talks=2, bills=60)
    awake, slept = row_of(report.rows, way="awake"), row_of(report.rows, way="slept")
    assert awake.questions == slept.questions == 2 * len(THINGS)
    assert slept.right == slept.questions
    assert slept.calls == 1.0
    assert slept.tokens < awake.tokens
    assert slept.asleep > 0 == awake.asleep
    assert sleeping(talks=2, bills=60) == report, "nothing depends on a clock or a thread"
    assert "of the tokens" in report.table()

"""`lab pleas`: the measure separates policies, and counts what happened."""

from __future__ import annotations

import pytest

from kilburn.errors import SpecError
from kilburn_lab.evals.pleas import pleas
from kilburn_lab.evals.report import row_of


def test_it_tells_a_policy_that_edits_at_every_turn_and_one_whose_model_is_of_no_use() -> None:
    report = pleas(["fifo", "oldest", "recursive"], windows=[3000], ways=["fails", "lies"])
    fifo, oldest = report.row("fifo", 3000), report.row("oldest", 3000)
    assert fifo.words == oldest.words == fifo.request == fifo.results == 1.0
    assert oldest.edited > 2 * fifo.edited > 0
    assert oldest.again > fifo.again > 0
    assert fifo.copies > 1
    assert {row.over for row in report.judged()} == {0}
    fails, lies = row_of(report.vain, way="fails"), row_of(report.vain, way="lies")
    assert 3 <= fails.vain <= fails.asks <= 10
    assert (lies.vain, lies.lost) == (0, 0)
    assert "the model" in report.table()
    assert not report.failures()


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="1,000"):
        pleas(["fifo"], windows=[500])
    with pytest.raises(SpecError, match="sings"):
        pleas(["fifo"], ways=["sings"])

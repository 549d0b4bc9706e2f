"""`lab pleas`: the measure separates policies, and counts what happened."""

from __future__ import annotations

import pytest

import kilburn
from kilburn.errors import SpecError
from kilburn_lab.evals.pleas import PleaDay, pleas
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


def test_an_edit_pays_if_what_it_takes_out_saves_more_than_what_is_written_again() -> None:
    with kilburn.open(":memory:", window=4000, tokenizer="chars/4") as store:
        day = PleaDay(store.session("day"), 4000, 0)
        # By the prices `hosted`, 10 tokens that are written again cost as much as 115 cached reads of a token.
        for out, prompts, unpaid in ((100, 1, 1), (100, 2, 0), (0, 50, 1)):
            day.edits, day.cell.calls = {5: (out, 10)}, 5 + prompts
            assert day.unpaid == unpaid
        day.edits, day.cell.calls = {5: (100, 10), 6: None, 9: (100, 10)}, 99
        assert day.unpaid == 1, "the edit at 5 saves until the next one; the one at 6 was forced"


def test_baselines_and_the_full_history_go_through_the_same_day() -> None:
    report = pleas(["tail", "tail+turns", "history"], windows=[3000], ways=["lies"])
    tail, turns, history = (report.row(policy, 3000) for policy in ("tail", "tail+turns", "history"))
    assert (history.words, history.request, history.edited, history.unpaid) == (1.0, 1.0, 0.0, 0.0)
    assert history.over > 0
    assert tail.over == turns.over == 0
    assert tail.words < turns.words < 1.0
    assert tail.again > turns.again > 0
    assert not report.vain


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="1,000"):
        pleas(["fifo"], windows=[500])
    with pytest.raises(SpecError, match="sings"):
        pleas(["fifo"], ways=["sings"])

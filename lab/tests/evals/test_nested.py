"""`lab nested`: chains of keys end where they were made to end, and memory is what reaches their ends."""

from __future__ import annotations

import pytest

from kilburn.errors import SpecError
from kilburn_lab.evals.nested import NestedReport, nested
from kilburn_lab.evals.report import row_of


@pytest.fixture(scope="module")
def report() -> NestedReport:
    return nested(hops=(0, 3), orderings=4)


def test_with_all_in_the_window_each_chain_is_followed_in_one_call(report: NestedReport) -> None:
    for hops in (0, 3):
        row = row_of(report.rows, way="whole", hops=hops)
        assert (row.right, row.questions, row.calls) == (4, 4, 1.0)


def test_only_the_model_that_may_search_reaches_the_end_from_a_small_window(report: NestedReport) -> None:
    right = {row.way: row.right for row in report.rows if row.hops == 3}
    assert right["whole"] == 4
    assert right["tools"] > max(right["window"], right["brought"])
    assert row_of(report.rows, way="tools", hops=3).calls > row_of(report.rows, way="tools", hops=0).calls


def test_the_same_seed_gives_the_same_figures(report: NestedReport) -> None:
    again = nested(["window", "tools"], hops=(0, 3), orderings=4)
    assert again.answers == tuple(one for one in report.answers if one.way in ("window", "tools"))
    assert "tools" in report.table()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="no way"):
        nested(["elsewhere"])
    with pytest.raises(SpecError, match="pairs for chains"):
        nested(pairs=3)

from __future__ import annotations

import pytest

from kilburn.errors import SpecError
from kilburn.prices import Prices
from kilburn_lab.evals.cost import cost_of, rates_of
from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.sample import sample_of

HAND = Prices(input=3.0, cached=1.0, written=4.0, output=100.0, ttl=60.0)


def test_a_shared_prefix_is_read_and_the_rest_is_written() -> None:
    assert cost_of(1_000_000, 400_000, HAND) == pytest.approx(0.4 * 1 + 0.6 * 4)


@pytest.mark.parametrize(("pause", "cost"), [(None, 2.8), (60.0, 2.8), (61.0, 4.0)])
def test_a_prefix_that_grew_too_old_is_written_again(pause: float | None, cost: float) -> None:
    assert cost_of(1_000_000, 400_000, HAND, pause) == pytest.approx(cost)


def test_rates_are_known_by_name() -> None:
    assert list(rates_of().tables) == ["hosted", "local"]
    assert list(rates_of(["local", "automatic", "local"]).tables) == ["local", "automatic"]
    with pytest.raises(SpecError, match="no price table"):
        rates_of(["free-lunch"])
    with pytest.raises(SpecError, match="pause"):
        rates_of(pause=-1.0)


def test_a_row_costs_what_its_tokens_cost_a_thousand_prompts() -> None:
    report = evaluate(sample_of(None, 4), [500], ["fifo"], rates=rates_of(["hosted"]))
    row, prices = report.row("fifo", 500), report.rates.tables["hosted"]
    spent = (row.cached * prices.cached + (row.shipped - row.cached) * prices.written) / 1e6
    assert row.costs == {"hosted": pytest.approx(spent / row.calls * 1000)}
    assert 0 < row.cached < row.shipped
    late = evaluate(sample_of(None, 4), [500], ["fifo"], rates=rates_of(["hosted", "local"], pause=301.0))
    assert late.row("fifo", 500).costs["hosted"] > row.costs["hosted"]
    assert late.row("fifo", 500).costs["local"] < late.row("tail", 500).costs["local"]


def test_what_grows_only_at_its_end_is_cached_but_for_what_is_new() -> None:
    report = evaluate(sample_of(None, 3), [100_000], ["fifo"])
    for row in report.rows:
        assert row.refilled == 0
        assert row.cached / row.shipped > 0.5

"""What gateways over one database let in together: as with a file, and by the database's clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psycopg
import pytest

from backends.test_counting import (
    Gateways,
    Pass,
    test_a_gateway_that_is_gone_holds_nothing_for_ever,
    test_a_request_takes_all_of_its_demands_or_none,
    test_any_order_of_requests_lets_in_no_more_than_the_limits,
    test_at_once_they_answer_what_one_would,
    test_one_that_closes_gives_back_what_it_has,
    test_together_they_let_in_what_one_would,
)
from kilburn.backends.counting import Turnstile
from kilburn.backends.gateways import open_turnstile

__all__ = [
    "test_a_gateway_that_is_gone_holds_nothing_for_ever",
    "test_a_request_takes_all_of_its_demands_or_none",
    "test_any_order_of_requests_lets_in_no_more_than_the_limits",
    "test_at_once_they_answer_what_one_would",
    "test_one_that_closes_gives_back_what_it_has",
    "test_together_they_let_in_what_one_would",
]


@pytest.fixture
def gateways(url: str) -> Iterator[Gateways]:
    """Makes gateways that count together."""
    with ExitStack() as stack:

        def made() -> Turnstile:
            counter = open_turnstile(url)
            stack.callback(counter.close)
            return counter

        yield made


@pytest.fixture
def now() -> Callable[[], float]:
    """What time it is."""
    return time.monotonic


@pytest.fixture
def passes(url: str) -> Pass:
    """Makes all that was counted so many seconds older."""

    def step(seconds: float) -> None:
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE kilburn.allowance SET full_at = full_at - %s", (seconds,))
            connection.execute("UPDATE kilburn.running SET until = until - %s", (seconds,))

    return step

"""A request that is made again at another gateway over the same database: as over a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from gateway.conftest import gateway as gateway
from gateway.test_repeats import (
    pool,
    test_a_first_try_that_failed_leaves_the_turn_to_the_second,
    test_a_gateway_that_was_stopped_for_longer_than_its_lease_doubles_nothing,
    test_a_turn_that_another_gateway_took_over_takes_no_reply_of_the_first,
    test_another_request_of_the_same_history_leaves_the_turn_to_the_first,
    test_both_tries_wait_for_whoever_holds_the_session,
    test_the_second_try_gets_the_reply_of_the_first,
    test_the_second_try_goes_on_where_a_gateway_was_killed,
    test_where_nobody_waits_the_second_try_is_refused,
)

__all__ = [
    "gateway",
    "pool",
    "test_a_first_try_that_failed_leaves_the_turn_to_the_second",
    "test_a_gateway_that_was_stopped_for_longer_than_its_lease_doubles_nothing",
    "test_a_turn_that_another_gateway_took_over_takes_no_reply_of_the_first",
    "test_another_request_of_the_same_history_leaves_the_turn_to_the_first",
    "test_both_tries_wait_for_whoever_holds_the_session",
    "test_the_second_try_gets_the_reply_of_the_first",
    "test_the_second_try_goes_on_where_a_gateway_was_killed",
    "test_where_nobody_waits_the_second_try_is_refused",
]

pytestmark = pytest.mark.slow


@pytest.fixture
def place(url: str) -> str:
    """The store of both gateways."""
    return url


@pytest.fixture
def lock(url: str) -> Iterator[Callable[[], Callable[[], None]]]:
    """Holds every session's row, as another writer does; returns what ends that."""
    with psycopg.connect(url) as connection:

        def hold() -> Callable[[], None]:
            connection.execute("SELECT FROM kilburn.segment FOR UPDATE")
            return connection.rollback

        yield hold


@pytest.fixture
def lapse(url: str) -> Callable[[], None]:
    """Ends all leases by the store's clock."""

    def end() -> None:
        with psycopg.connect(url) as connection:
            connection.execute("UPDATE kilburn.running SET until = 0")

    return end

"""Two gateways over one database, in the orders that their steps can have: as over a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from gateway.test_two_gateways import (
    ORDERS,
    Pair,
    Pairs,
    test_another_reply_is_a_session_of_its_own,
    test_the_same_reply_is_stored_once,
    test_who_looks_at_a_session_here_takes_nothing_in_for_its_requests,
)
from kilburn.backends.places import open_backend

pytestmark = pytest.mark.slow

__all__ = [
    "test_another_reply_is_a_session_of_its_own",
    "test_the_same_reply_is_stored_once",
    "test_who_looks_at_a_session_here_takes_nothing_in_for_its_requests",
]


@pytest.fixture
def pairs(url: str) -> Iterator[Pairs]:
    """Makes two gateways over a tenant of their own."""
    numbers = itertools.count()
    with ExitStack() as stack:

        def made() -> Pair:
            tenant = f"t{next(numbers)}"
            return Pair(lambda: open_backend(url, tenant=tenant), stack)

        yield made


@pytest.fixture
def most() -> int:
    """Orders of a case that are tried."""
    return max(1, ORDERS // 4)

"""The tests of replies that another gateway has answered, over PostgreSQL."""

from __future__ import annotations

import pytest

from gateway.test_replies_found import check_found, costs

pytestmark = pytest.mark.slow


def test_what_it_costs_to_find_a_reply_does_not_grow_with_sessions(url: str) -> None:
    few, *more = costs(url, (10, 100, 1000))
    # How often a server's answer is looked for depends on the server. To list the sessions takes thousands.
    assert max(more) < 2 * few


def test_a_reply_of_another_gateway_is_found(url: str) -> None:
    check_found(url)

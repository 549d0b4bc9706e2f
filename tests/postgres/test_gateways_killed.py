"""What gateways over a file promise holds over PostgreSQL: killed at any moment, in turns, or with the same words at the same
moment, they lose and double nothing."""

from __future__ import annotations

import pytest

from gateway.test_crash import (
    test_a_gateway_that_is_killed_goes_on_where_it_was,
    test_two_clients_of_two_gateways_race_on_one_session,
    test_two_gateways_over_one_file_and_a_client_that_alternates,
)

__all__ = [
    "test_a_gateway_that_is_killed_goes_on_where_it_was",
    "test_two_clients_of_two_gateways_race_on_one_session",
    "test_two_gateways_over_one_file_and_a_client_that_alternates",
]

pytestmark = pytest.mark.slow

"""What gateways over a file promise holds over PostgreSQL: killed at any moment, or in turns, they lose and double nothing.

Two that answer the same words at the same moment are not among these: one of some twenty runs had a reply twice.
"""

from __future__ import annotations

import pytest

from gateway.test_crash import (
    test_a_gateway_that_is_killed_goes_on_where_it_was,
    test_two_gateways_over_one_file_and_a_client_that_alternates,
)

__all__ = [
    "test_a_gateway_that_is_killed_goes_on_where_it_was",
    "test_two_gateways_over_one_file_and_a_client_that_alternates",
]

pytestmark = pytest.mark.slow

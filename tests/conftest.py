"""What every test shares: deterministic Hypothesis profiles, and a way to forbid the network.

It refuses to hold fixtures of one area: those live beside the tests that use them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("deep", parent=settings.get_profile("dev"), max_examples=2_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))

LOOPBACK = {"127.0.0.1", "::1", "localhost", ""}
_guard = {"offline": False}


def _refuse_network(event: str, args: tuple[object, ...]) -> None:
    if not _guard["offline"]:
        return
    if event == "socket.connect":
        target = args[1]
        if isinstance(target, tuple) and target[0] not in LOOPBACK:
            raise PermissionError(f"this test runs without a network, and something connects to {target!r}")
    if event == "socket.getaddrinfo" and args[0] not in LOOPBACK and args[0] is not None:
        raise PermissionError(f"this test runs without a network, and something looks up {args[0]!r}")


sys.addaudithook(_refuse_network)


@pytest.fixture
def offline() -> Iterator[None]:
    """Refuse every connection but the loopback's, for the length of a test."""
    _guard["offline"] = True
    yield
    _guard["offline"] = False

"""Public fakes and conformance kits, for tests of this project and of whatever is built on it.

    from kilburn.testing import FakeClock, check_model, check_policy, check_store

    def test_my_store(): check_store(lambda: MyStore())
    def test_my_policy(): check_policy(lambda: MyPolicy())
    def test_my_model(): check_model(lambda: MyModel())

The kits take a function that makes the thing and assert its contract. `check_laws` asserts the laws of
a session from outside, `counted` weighs a prompt again, `trace` is a seeded run of an agent. `FakeClock`
is time that stands still, `FaultVFS` a disk that fails, `Scripted` and `Echo` are models without one.
A provider over HTTP that answers from a script is in `kilburn.testing.upstream`.
Nothing here is imported by the product, and nothing here patches it.
"""

from __future__ import annotations

from kilburn.models.echo import Echo
from kilburn.models.scripted import Scripted
from kilburn.submodules import attach
from kilburn.testing.clock import FakeClock
from kilburn.testing.faults import FAULTS, FaultVFS
from kilburn.testing.laws import check_laws, counted
from kilburn.testing.models import check_model
from kilburn.testing.policies import check_policy, trace
from kilburn.testing.stores import batch_of, check_store, page_of

__all__ = [
    "FAULTS",
    "Echo",
    "FakeClock",
    "FaultVFS",
    "Scripted",
    "batch_of",
    "check_laws",
    "check_model",
    "check_policy",
    "check_store",
    "counted",
    "page_of",
    "trace",
]

attach(__name__)

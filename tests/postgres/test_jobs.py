"""Workers over one database: killed at any step, two and three at once, each for its tenant; none lost, none twice in effect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_are_killed_do_everything_once(url: str, tmp_path: Path, workers: int) -> None:
    given = [sys.executable, "-m", "jobs.killing", "together", url, str(tmp_path / "receipts"), str(workers), str(workers)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > workers, "some were killed"

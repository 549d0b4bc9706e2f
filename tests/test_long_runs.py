"""A text of one long run costs what its length says: no pattern reads the run again from each of its characters."""

from __future__ import annotations

import subprocess
import sys

import pytest

READ = """
import resource
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
from kilburn.memory.clauses import clauses
from kilburn.selection.bringing import extract_questions
for number in range(100):
    extract_questions({run!r} * 4000)
for number in range(10):
    list(clauses("I live in Porto." + {run!r} * 9000 + "I like tea."))
"""


@pytest.mark.parametrize("run", ["a", "漢", "\n", " \n", " ", "-", "a/", "."])
def test_a_long_run_is_read_once(run: str) -> None:
    """It takes a fraction of a second. What is read anew from each character takes ten times the time that is allowed."""
    done = subprocess.run([sys.executable, "-c", READ.format(run=run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

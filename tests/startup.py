"""What an import or a command costs, counted: which modules come, and how many functions are called meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys

COUNT = """
import sys
calls = 0
def count(frame, event, argument):
    global calls
    calls += event == "call"
before = set(sys.modules)
sys.setprofile(count)
import {module}
sys.setprofile(None)
print(calls, *sorted(set(sys.modules) - before))
"""

LIST = """
import sys
from kilburn.cli import main
before = sys.stdout
sys.stdout = sys.stderr
status = main(sys.argv[1:])
print(*sys.modules, file=before)
sys.exit(status)
"""


def modules_of_command(words: list[str]) -> list[str]:
    """Return the modules that a command of `kilburn` has imported at its end, in an interpreter of its own."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run([sys.executable, "-c", LIST, *words], env=plain, capture_output=True, text=True, check=True)
    return done.stdout.split()


def cost_of_import(module: str) -> tuple[list[str], int]:
    """The modules that an import brings into an interpreter of its own, and the calls of Python functions that it takes."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-c", COUNT.format(module=module)], env=plain, capture_output=True, text=True, check=True
    )
    calls, *modules = done.stdout.split()
    return modules, int(calls)

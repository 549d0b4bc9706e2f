"""The command line: `kilburn VERB`. A file for each group of verbs; `shell` is the program around them.

Only this package imports typer. Verbs are thin: the logic is in the public Python API.
"""

from __future__ import annotations

from kilburn.cli.shell import main
from kilburn.submodules import attach

__all__ = ["main"]

attach(__name__)

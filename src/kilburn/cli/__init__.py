"""The command line: `kilburn VERB`. A file for each group of verbs; `shell` is the program around them.

Only this package imports typer. Verbs are thin: the logic is in the public Python API.
"""

from __future__ import annotations

from kilburn.cli import (
    chat,
    demo,
    drift,
    evaluate,
    forget,
    fsck,
    kv,
    models,
    policies,
    recall,
    receipts,
    replay,
    session,
    top,
    transfer,
)
from kilburn.cli.shell import app, main

VERBS = (
    chat,
    demo,
    drift,
    evaluate,
    forget,
    fsck,
    kv,
    models,
    policies,
    recall,
    receipts,
    replay,
    session,
    top,
    transfer,
)
"""The modules whose import registers their verbs."""

__all__ = ["VERBS", "app", "main"]

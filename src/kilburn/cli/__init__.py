"""The command line: `kilburn VERB`. A file for each group of verbs; `shell` is the program around them.

Only this package imports typer. Verbs are thin: the logic is in the public Python API.
"""

from __future__ import annotations

from kilburn.cli import (  # noqa: F401 -- importing them registers their verbs
    answers,
    ask,
    bench,
    change,
    chat,
    demo,
    documents,
    drift,
    equivalence,
    evaluate,
    forget,
    fsck,
    keys,
    kv,
    learn,
    mcp,
    memories,
    models,
    poisoning,
    policies,
    recall,
    receipts,
    recursion,
    replay,
    retrieval,
    scale,
    serve,
    session,
    table,
    tasks,
    top,
    transfer,
    vectors,
)
from kilburn.cli.shell import app, main
from kilburn.submodules import attach

__all__ = ["app", "main"]

attach(__name__)

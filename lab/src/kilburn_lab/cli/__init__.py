"""The laboratory's verbs: `kilburn lab VERB`. A file for each, or for each group of them."""

from __future__ import annotations

from kilburn.submodules import attach
from kilburn_lab.cli import (  # noqa: F401 -- importing them registers their verbs
    answers,
    bench,
    change,
    drift,
    equivalence,
    evaluate,
    kv,
    poisoning,
    recursion,
    retrieval,
    scale,
    table,
    tasks,
    vectors,
)
from kilburn_lab.cli.evaluate import lab

__all__ = ["lab"]

attach(__name__)

"""The laboratory's verbs: `kilburn lab VERB`. A file for each, or for each group of them."""

from __future__ import annotations

import kilburn_lab.cli.paging  # noqa: F401 -- its verb stands first
from kilburn.submodules import attach
from kilburn_lab.cli import (  # noqa: F401 -- importing them registers their verbs, in this order
    answers,
    bench,
    change,
    chat,
    drift,
    guidelines,
    kv,
    natural,
    pleas,
    poisoning,
    recursion,
    retrieval,
    scale,
    sleep,
    table,
    tasks,
    trajectories,
    workflows,
)
from kilburn_lab.cli.verbs import lab

__all__ = ["lab"]

attach(__name__)

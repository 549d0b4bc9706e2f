"""A policy that makes the counter say too little, so that there is something for a judge to find."""

from __future__ import annotations

from kilburn.policies.fifo import Fifo
from kilburn.policy import View


class Cheat(Fifo):
    """Evicts the oldest; a thousand characters are one token from its first look on."""

    def plan(self, view: View) -> object:  # type: ignore[override]
        view.count.__self__.per_token = 1000  # type: ignore[attr-defined]
        return super().plan(view)

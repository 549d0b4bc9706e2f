"""Who takes part: baselines and policies, with what they need to be told in a window of a given size.

Most policies fit themselves to the window. Those whose trigger is a number of tokens of a large model
get a share of the window here, so that they act at all. Refuses to run anything.
"""

from __future__ import annotations

import inspect
import re

import msgspec

from kilburn.evals.baselines import BASELINES
from kilburn.kernel.resolve import names, resolve

__all__ = ["BELADY", "MODEL", "SPECS", "Entry", "entries", "everybody"]

BELADY = "belady"
"""The offline optimum: it is told each run's future, so it takes no spec."""

MODEL = " +model"
"""Ends the label of a policy whose questions a model answers."""

SPECS: dict[str, str] = {
    "chain": "chain(mask(keep=3), fifo)",
}
"""Arguments of policies that do not fit themselves to a small window; `{50%}` is a share of the window."""

_SHARE = re.compile(r"\{(\d{1,3})%\}")


class Entry(msgspec.Struct, frozen=True):
    """One line of the table.

    Args:
        label: what the report calls it.
        spec: a baseline's name, or a policy's spec in which `{50%}` stands for half of the window.
        model: the spec of the model that answers its questions, or "" for nobody.
    """

    label: str
    spec: str
    model: str = ""

    def at(self, window: int) -> str:
        """The spec at a window."""
        return _SHARE.sub(lambda share: str(max(1, window * int(share[1]) // 100)), self.spec)


def everybody() -> list[str]:
    """All baselines and all policies that ship with Kilburn, baselines first, the optimum last."""
    known = [name for name in names("policies") if name != BELADY]
    return [*BASELINES, *known, *([BELADY] if BELADY in names("policies") else [])]


def entries(specs: list[str], model: str, window: int) -> list[Entry]:
    """One entry a spec, the tail first; with a model, another one for each policy that could ask it.

    Raises:
        SpecError: no such policy, or arguments that do not fit.
    """
    listed: list[Entry] = []
    for label in dict.fromkeys(["tail", *specs]):
        plain = Entry(label, SPECS.get(label, label))
        listed.append(plain)
        if label in BASELINES or label == BELADY:
            continue
        policy = resolve("policies", plain.at(window))
        if model and inspect.isgeneratorfunction(policy.plan):
            listed.append(Entry(label + MODEL, plain.spec, model))
    return listed

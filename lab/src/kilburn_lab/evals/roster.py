"""Which baselines and policies take part, and their arguments in a window of a given size.

Most policies fit themselves to the window. Those whose trigger is a number of tokens of a large model
get a share of the window here, so that they act at all.
"""

from __future__ import annotations

import inspect
import re

import msgspec

from kilburn.errors import SpecError
from kilburn.kernel.resolve import names, resolve
from kilburn.policy import Policy
from kilburn_lab.evals.baselines import BASELINES, HISTORY, PLAIN

BELADY = "belady"
"""The offline optimum: it gets each run's future, so it has no spec."""

MODEL = " +model"
"""Ends the label of a policy whose questions a model answers."""

SPECS: dict[str, str] = {
    "chain": "chain(mask(keep=3), fifo)",
    "clear_tool_uses": "clear_tool_uses(trigger={75%})",
    "compact": "compact(trigger=None)",
    "free+hybrid": "chain(free, hybrid)",
    "memento": "memento(pairs=True)",
    "summarize80": "summarize(trigger={80%})",
}
"""Specs by label: of policies that need arguments to act here, where `{50%}` is a share of the window, and of
combinations that take part too."""

_SHARE = re.compile(r"\{(\d{1,3})%\}")


class Entrant(msgspec.Struct, frozen=True):
    """One line of the table.

    Args:
        label: what the report calls it.
        spec: a baseline's name, or a policy's spec in which `{50%}` stands for half of the window.
        model: the spec of the model that answers its questions, or "" for none.
    """

    label: str
    spec: str
    model: str = ""

    def at(self, window: int) -> str:
        """The spec at a window."""
        return _SHARE.sub(lambda share: str(max(1, window * int(share[1]) // 100)), self.spec)


def everybody() -> list[str]:
    """All baselines, all policies that ship with Kilburn and some combinations; baselines first, the optimum last."""
    return [*BASELINES, *sorted({*names("policies"), *SPECS} - {BELADY}), BELADY]


def entries(specs: list[str], model: str, window: int) -> list[Entrant]:
    """One entry for each spec, the tail first, the full history last; with a model, a second one for each policy that can ask it.

    Raises:
        SpecError: no such policy, or arguments that do not fit.
    """
    listed: list[Entrant] = []
    for label in dict.fromkeys(["tail", *specs, HISTORY]):
        if label.startswith(f"{BELADY}("):
            raise SpecError(f"{label!r}: the optimum is told each run's future", advice=f"write {BELADY} alone")
        plain = Entrant(label, SPECS.get(label, label))
        listed.append(plain)
        if label in PLAIN or label == BELADY:
            continue
        policy = resolve("policies", plain.at(window))
        if model and can_ask(policy):
            listed.append(Entrant(label + MODEL, plain.spec, model))
    return listed


def can_ask(policy: Policy) -> bool:
    """Whether its plan may be a generator: only such a policy can ask anything."""
    returned = str(inspect.signature(policy.plan).return_annotation)
    return inspect.isgeneratorfunction(policy.plan) or "Generator" in returned or "Plan" in returned

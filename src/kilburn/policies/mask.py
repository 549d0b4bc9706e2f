"""Observation masking: old tool outputs become handles; calls and text stay.

From Anthropic's `clear_tool_uses_20250919` and "The Complexity Trap" (arXiv 2508.21433), in which plain masking was
as good as summarising at half the cost. Masked outputs stay in the store, under their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.message import Kind, Role
from kilburn.move import Evict, Move
from kilburn.policy import Acts, View


@dataclass(frozen=True)
class Mask:
    """Turn tool outputs into handles, oldest first.

    Args:
        keep: how many of the last outputs stay whole.
        least: tokens that one masking must free, else it waits (every masking edits the prefix).
        trigger: tokens in the window from which on it acts; None for the capacity.
        exclude: names of tools whose outputs are never masked.
    """

    keep: int = 3
    least: int = 0
    trigger: int | None = None
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.keep < 0 or self.least < 0 or (self.trigger or 0) < 0:
            raise ValueError(f"keep={self.keep}, least={self.least} and trigger={self.trigger} must be 0 or more")

    @property
    def acts(self) -> Acts:
        """Only in a full window, unless it is to act sooner."""
        return Acts.FULL if self.trigger is None else Acts.ALWAYS

    def plan(self, view: View) -> Sequence[Move]:
        """Evict the results whose calls stay; nothing if that would free less than `least`."""
        trigger = view.budget.capacity if self.trigger is None else self.trigger
        if view.use <= trigger:
            return []
        outputs = [page for page in view.pages if page.role is Role.TOOL and not page.is_atomic]
        if self.exclude:
            names = {page.call: page.name for page in view.pages if page.kind is Kind.CALL}
            outputs = [page for page in outputs if names.get(page.call) not in self.exclude]
        pins, handle = view.pins, view.handle
        old = [page for page in outputs[: max(0, len(outputs) - self.keep)] if page.tokens > handle and page.id not in pins]
        freed = sum(page.tokens for page in old) - len(old) * handle
        if not old or freed < self.least:
            return []
        return [Evict(pages=tuple(page.id for page in old), why=f"all but the last {self.keep} tool outputs")]

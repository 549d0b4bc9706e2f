"""Specs of the policies that ship, with arguments by which each of them acts in a small window."""

from __future__ import annotations

from kilburn.kernel.resolve import names

SPECS = {
    "chain": "chain(mask(keep=3), fifo)",
    "clear_tool_uses": "clear_tool_uses(trigger={trigger})",
    "compact": "compact(trigger=None)",
    "memento": "memento(pairs=True)",
}
"""Specs by name, of policies that need arguments to act in a small window; `{trigger}` is three quarters of the window."""


def specs_at(window: int) -> list[str]:
    """Return a spec of every policy for a window of that many tokens."""
    return [SPECS.get(name, name).format(trigger=window * 3 // 4) for name in names("policies")]

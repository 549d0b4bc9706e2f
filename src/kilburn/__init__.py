"""Kilburn: a one-level store for LLM agents.

An agent can address its whole past as if it were in its context. Kilburn keeps the working set in the window, and
everything else, exactly, below it.

    import kilburn

    with kilburn.open("agent.db", window=8000) as store:
        p = store.session("session-1")
        address = p.append({"role": "user", "content": "Find the bug in parser.py"})
        prompt = p.render()            # a list of messages, never over the window
        p.recall(address)              # the exact text, whatever left the window
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilburn.submodules import attach

if TYPE_CHECKING:
    from kilburn.budget import Budget
    from kilburn.errors import HitRateWarning, KilburnError
    from kilburn.kernel.session import Session
    from kilburn.kernel.store import Store
    from kilburn.message import Message, Part, Role
    from kilburn.opening import copy, open

__all__ = ["Budget", "HitRateWarning", "KilburnError", "Message", "Part", "Role", "Session", "Store", "copy", "open"]

__version__ = "0.1.0"

attach(
    __name__,
    {
        "Budget": "kilburn.budget",
        "HitRateWarning": "kilburn.errors",
        "KilburnError": "kilburn.errors",
        "Message": "kilburn.message",
        "Part": "kilburn.message",
        "Role": "kilburn.message",
        "Session": "kilburn.kernel.session",
        "Store": "kilburn.opening",
        "copy": "kilburn.opening",
        "open": "kilburn.opening",
    },
)

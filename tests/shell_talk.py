"""Messages of sessions in which an agent works with a shell."""

from __future__ import annotations

import json
from typing import Any

from kilburn.kernel.session import Session

Steps = tuple[tuple[str, str], ...]


def ran(number: int, command: str, result: str = "") -> list[dict[str, Any]]:
    function = {"name": "shell", "arguments": json.dumps({"command": command})}
    call = {"id": f"c{number}", "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": result},
    ]


def work(session: Session, goal: str, *steps: tuple[str, str], shown: Any = None) -> None:
    """A task, what the agent was shown beside it, its commands with their results, and its answer."""
    first = session.window.last
    calls = [message for at, step in enumerate(steps, first + 1) for message in ran(at, *step)]
    beside = [] if shown is None else [shown]
    session.append({"role": "user", "content": goal}, *beside, *calls, {"role": "assistant", "content": "Done."})

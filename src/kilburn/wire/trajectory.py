"""A recorded run of an agent told as steps, and the same run told as messages.

A step is what the agent thought, what it did, and what came back. The form is that of SWE-agent's recordings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage

KEYS = frozenset(("thought", "action", "observation"))


class HeadMessage(msgspec.Struct, frozen=True):
    """One message of the head."""

    role: str
    content: str


class Step(msgspec.Struct, frozen=True):
    """One step: what the agent thought, what it did, what came back.

    Args:
        task: which of several tasks it belongs to.
        user: whether there is no thought and no action, and the observation is what the user says.
    """

    thought: str
    action: str
    observation: str
    task: str = ""
    user: bool = False


class Trajectory(msgspec.Struct, frozen=True):
    """One recorded run: the head (system, task), and the steps."""

    id: str
    head: tuple[HeadMessage, ...]
    steps: tuple[Step, ...]

    @property
    def asked(self) -> str:
        """What the user asked in the head: runs of one task have it in common."""
        return "\n".join(turn.content for turn in self.head if turn.role == "user")


class _HeadLine(msgspec.Struct):
    role: str
    content: Any = ""
    is_demo: bool = False


class _StepLine(msgspec.Struct):
    thought: str | None = None
    action: str | None = None
    observation: str | None = None
    response: str | None = None
    task: str = ""
    user: bool = False


class _RunLine(msgspec.Struct):
    """A line `{id, head, steps}`, or a file of SWE-agent, which has `history` and `trajectory`."""

    id: str | None = None
    head: list[_HeadLine] = []
    history: list[_HeadLine] = []
    steps: list[_StepLine] = []
    trajectory: list[_StepLine] = []


def read_trajectory(value: dict[str, Any], where: str, otherwise: str) -> Trajectory:
    """Return the run that a JSON object `{id, head, steps}`, or the one of SWE-agent's `.traj` file, is.

    The head of a `.traj` is what its history begins with, up to the agent's first reply; demonstrations are left out.

    Args:
        otherwise: the name of a run without an id.

    Raises:
        InvalidMessage: a value of another type, or a step without a thought, an action and an observation; `where` is
            in its message.
    """
    try:
        run = msgspec.convert(value, _RunLine)
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"{where}: {str(error)[:200]}", advice=ADVICE) from None
    name = "steps" if "steps" in value else "trajectory"
    for number, step in enumerate(value[name], start=1):
        if not KEYS & step.keys():
            raise InvalidMessage(f"{where}: {name}[{number - 1}] has no thought, action or observation", advice=ADVICE)
    head = tuple(HeadMessage(turn.role, _content_text(turn.content, where)) for turn in run.head or _first(run.history))
    return Trajectory(run.id or otherwise, head, tuple(map(_step, run.steps or run.trajectory)))


ADVICE = "a run is {id, head: [{role, content}], steps: [{thought, action, observation}]}, or SWE-agent's .traj"


def _first(history: Iterable[_HeadLine]) -> Iterator[_HeadLine]:
    """Yield what was said before the agent's first reply, without demonstrations."""
    for turn in history:
        if turn.is_demo:
            continue
        if turn.role == "assistant":
            return
        yield turn


def _content_text(content: Any, where: str) -> str:
    """Return the text of a message's content: a string, or blocks of text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list) and all(isinstance(block, dict) for block in content):
        return "\n".join(str(block["text"]) for block in content if isinstance(block.get("text"), str))
    raise InvalidMessage(f"{where}: a message of the head has a {type(content).__name__} as its content", advice=ADVICE)


def _step(line: _StepLine) -> Step:
    # A reply that could not be read as a thought and an action stands in `response` alone.
    thought = line.response if line.thought is None and not line.action else line.thought
    return Step(thought or "", line.action or "", line.observation or "", line.task, line.user)


def trajectory_messages(run: Trajectory) -> list[dict[str, Any]]:
    """Return a run as messages in the chat form: an action is a call of `run`, what came back its result."""
    return [*({"role": turn.role, "content": turn.content} for turn in run.head), *_told(run.steps)]


def _told(steps: Iterable[Step]) -> Iterator[dict[str, Any]]:
    for number, step in enumerate(steps, start=1):
        if step.user:
            yield {"role": "user", "content": step.observation}
        elif not step.action:
            yield {"role": "assistant", "content": step.thought}
            if step.observation:
                yield {"role": "user", "content": step.observation}
        else:
            arguments = msgspec.json.encode({"command": step.action}).decode()
            call = {"id": f"call_{number}", "type": "function", "function": {"name": "run", "arguments": arguments}}
            yield {"role": "assistant", "content": step.thought, "tool_calls": [call]}
            yield {"role": "tool", "tool_call_id": f"call_{number}", "content": step.observation}

"""The answer of a recursive model: the variable in which its code stores it, and the result of the question."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from kilburn.errors import KilburnError, NoValue
from kilburn.recursion.recorded import Missing
from kilburn.recursion.sandbox import Sandbox

EMPTY = {"content": None, "ready": False}
"""The initial value of the variable."""
EMPTY_CODE = '{"content": None, "ready": False}'
"""The same as code."""


class AnswerOutcome(StrEnum):
    """How a question ended."""

    ANSWERED = "answered"
    PARTIAL = "partial"
    """It was answered, but some sub-calls failed: see `RecursiveResult.missing`."""
    FORCED = "forced"
    """The limit of steps was reached; the model answered when it was asked to."""
    PROSE = "said"
    """The model answered in prose instead of by the variable `answer`; its text is the content."""
    UNREADY = "unready"
    """A limit was reached. The content is that of `answer`, which was not marked as ready."""
    NOTHING = "nothing"
    """There is no answer."""


class RecursiveResult(msgspec.Struct, kw_only=True):
    """The result of a question.

    Args:
        outcome: how it ended.
        content: the answer, a JSON value; None if there is none.
        limit: the limit that was reached: "steps" (of the root), "calls", "tokens", "seconds", "money"; or "".
        missing: failed sub-calls, those of runs below included.
        differing: of a resumed run: the outputs that changed when their cells were run again.
        address: address of the answer in the session; "" if there is none.
        steps: number of the root's replies.
        calls: number of answered sub-calls, those of runs below included.
        tokens, money: costs of all models together.
        resident: tokens of the root's largest prompt: as the provider reports it, otherwise as counted here.
        sandbox: name of the sandbox. lacks: protections and features that it does not have on this machine.
    """

    outcome: AnswerOutcome = AnswerOutcome.NOTHING
    content: Any = None
    limit: str = ""
    missing: tuple[Missing, ...] = ()
    differing: tuple[str, ...] = ()
    address: str = ""
    steps: int = 0
    calls: int = 0
    tokens: int = 0
    seconds: float = 0.0
    money: float = 0.0
    resident: int = 0
    sandbox: str = ""
    lacks: tuple[str, ...] = ()


class SubCalled(msgspec.Struct, frozen=True):
    """Numbers of answered and of failed sub-calls so far."""

    done: int
    failed: int


class AnswerVariable:
    """The variable `answer` of a sandbox.

    Args:
        kind: the type that its content must have.

    Attributes:
        ready: whether the code marked the content as the answer.
        content: the answer, a JSON value, once it is ready.
    """

    def __init__(self, sandbox: Sandbox, kind: Any) -> None:
        self._sandbox, self._kind = sandbox, kind
        self.ready, self.content = False, None

    def current(self) -> Any:
        """Return the content, ready or not; None if there is none."""
        try:
            value = self._sandbox.get("answer")
        except KilburnError:
            return None  # the sandbox has ended, or code replaced the variable
        return value.get("content") if isinstance(value, dict) else None

    def check(self) -> str:
        """Check the variable after a cell. Return what is wrong with it, in words for the model, or "". A wrong value is
        reset."""
        try:
            value = self._sandbox.get("answer")
        except NoValue as error:
            return self._again(f"answer could not be read, and is {EMPTY_CODE} again: {error.what}")
        if not isinstance(value, dict) or not EMPTY.keys() <= value.keys():
            return self._again(f'answer must be a dict with "content" and "ready"; it is {EMPTY_CODE} again')
        if value["ready"] is not True:
            return "" if value["ready"] is False else '[answer["ready"] must be True or False]'
        if value["content"] is None:
            return self._unready('answer["content"] is None: set it to the result, then answer["ready"] = True')
        try:
            self.content = msgspec.to_builtins(msgspec.convert(value["content"], self._kind))
        except msgspec.ValidationError as error:
            return self._unready(f'answer["content"] has the wrong type: {error}')
        self.ready = True
        return ""

    def _again(self, why: str) -> str:
        self._sandbox.run(f"answer = {EMPTY_CODE}")
        return f"[{why}]"

    def _unready(self, why: str) -> str:
        self._sandbox.run('answer["ready"] = False')
        return f"[{why}]"

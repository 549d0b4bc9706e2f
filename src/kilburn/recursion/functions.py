"""Functions of the caller that the code of a recursive model can call.

They run in this program, with the agent's rights. Their results are recorded in the branch of the run, so a resumed run does not
call them again.
"""

from __future__ import annotations

import builtins
import inspect
import keyword
import threading
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kilburn.agents.access import Deed
from kilburn.agents.loop import Agent
from kilburn.agents.tool import Tool
from kilburn.errors import AccessDenied, SpecError, ToolError
from kilburn.event import encodable
from kilburn.message import Kind, Part
from kilburn.model import Tokens
from kilburn.recursion.recorded import SubCallResult
from kilburn.recursion.sub_calls import SubCalls

RESERVED_NAMES = frozenset(
    {"context", "answer", "_text", "_index", "Memory", "memory", "memory_search", "memory_sessions", "memory_pages"}
    | {"llm_query", "llm_query_batched", "rlm_query", "rlm_query_batched"}
)
"""Names that have another meaning in the code."""

INSIDE = threading.local()
"""The agents whose code called the function that runs in this thread."""


class _Answer(msgspec.Struct):
    """The result of a function of the caller, or its error."""

    value: Any = None
    error: str = ""


class Functions:
    """The functions of one run.

    Args:
        tools: the functions, by name.
        agent: agent of the run. permitted: returns the values for a call that its rights allow.
        sub_calls: of the run: pays for the calls, and records the results.
    """

    def __init__(
        self, tools: Mapping[str, Tool], agent: Agent, permitted: Callable[[Tool, Part], dict[str, Any]], sub_calls: SubCalls
    ) -> None:
        self._agent, self._permitted, self._sub_calls = agent, permitted, sub_calls
        self.named = {name: self._callable(tool) for name, tool in tools.items()}

    def _callable(self, tool: Tool) -> Callable[..., Any]:
        signature = inspect.signature(tool.function)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as error:
                raise TypeError(f"{tool.name}: {error}") from None
            return self._called(tool, msgspec.json.encode(arguments).decode())

        return call

    def _called(self, tool: Tool, arguments: str) -> Any:
        """Call a function, or take its result from the record.

        Raises:
            ToolError: it raised, the arguments do not fit, the call is not allowed, or a limit is reached.
        """
        sub_calls, call = self._sub_calls, f"{tool.name}({arguments})"
        if refused := sub_calls.allow(call):
            raise ToolError(f"{tool.name} was not called: {refused}")
        result = sub_calls.known(call) or SubCallResult(self._carried_out(tool, arguments), "")
        if result.reply is None:
            raise ToolError(f"{tool.name}: {result.why}")
        sub_calls.note(call, "", (), result)
        if result.page is None and tool.deed is not Deed.READ:
            sub_calls.flush()
        answer = msgspec.json.decode(result.reply, type=_Answer)
        if answer.error:
            raise ToolError(answer.error)
        return answer.value

    def _carried_out(self, tool: Tool, arguments: str) -> str:
        """Call a function and return its result, or the error, as JSON."""
        try:
            values = self._permitted(tool, Part(kind=Kind.CALL, text=arguments, name=tool.name))
            self._sub_calls.pay(Tokens())
            outer_agents, INSIDE.agents = getattr(INSIDE, "agents", ()), _with_callers(self._agent)
            try:
                with self._sub_calls.account.working():
                    return f'{{"value":{tool.json(values)}}}'
            finally:
                INSIDE.agents = outer_agents
        except (AccessDenied, ToolError) as error:
            return msgspec.json.encode({"error": encodable(error.what)}).decode()


def _with_callers(agent: Agent) -> tuple[Agent, ...]:
    """Return an agent, and those that it works for."""
    return (agent, *(_with_callers(agent.caller) if agent.caller is not None else ()))


def is_called_by(agent: Agent) -> bool:
    """Return whether this thread is in a function that the code of this agent called, or of a run below it."""
    return agent in getattr(INSIDE, "agents", ())


def as_tools(functions: Mapping[str, Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """Return the functions that code may call, as tools of these names.

    Raises:
        SpecError: an invalid function or name.
    """
    if not isinstance(functions, Mapping):
        raise SpecError(f"functions={functions!r}"[:200], advice='give a dict: functions={"name": function}')
    tools = {}
    for name, function in functions.items():
        plain = isinstance(name, str) and name.isidentifier() and not keyword.iskeyword(name)
        if not plain or name in RESERVED_NAMES or hasattr(builtins, name):
            raise SpecError(f"a function cannot have the name {name!r}"[:200], advice="use another name: code needs this one")
        if not isinstance(function, Tool) and not callable(function):
            raise SpecError(f"{name} is no function"[:200], advice="give a typed Python function, or a Tool")
        tool = function if isinstance(function, Tool) else Tool(function, name=name)
        if tool.name != name:
            tool = Tool(tool.function, name=name, does=tool.deed, paths=tool.paths, clean=tool.clean)
        tools[name] = tool
    return tools

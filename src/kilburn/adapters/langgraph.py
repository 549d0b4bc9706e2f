"""LangChain's agents on LangGraph: a middleware that puts a session between the graph's messages and the model.

    agent = create_agent(model, tools, middleware=[WindowMiddleware(store)], checkpointer=...)

The graph's own state stays as it is. What the model gets is the session's window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from kilburn.adapters.history import KeptHistory, Recollections
from kilburn.errors import MissingExtra
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.memory_tools import OFFERED
from kilburn.model import Tokens, ToolSpec

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
    from langchain_core.messages import AIMessage, AnyMessage, convert_to_messages, convert_to_openai_messages
    from langchain_core.tools import StructuredTool
    from langgraph.config import get_config
except ImportError as error:
    raise MissingExtra("langchain", "langgraph") from error

__all__ = ["WindowMiddleware"]


class WindowMiddleware(AgentMiddleware):
    """A middleware for `create_agent`; give it last, so that it sees what the model will see.

    Args:
        where: a session; or a store, which has a session for each thread of the graph (`thread_id`).
        recollections: long-term memory to put before the user's messages.
        tools: whether the model is offered `recall` and `search_memory`.
    """

    def __init__(self, where: Session | Store, *, recollections: Recollections | None = None, tools: bool = True) -> None:
        super().__init__()
        self._where, self._recollections = where, recollections
        self._histories: dict[str, KeptHistory] = {}
        self.tools = [self._tool(spec) for spec in OFFERED] if tools else []

    def _history(self) -> KeptHistory:
        session = self._where
        if isinstance(session, Store):
            session = session.session(str(get_config()["configurable"]["thread_id"]))
        history = self._histories.get(session.name)
        if history is None or history.session is not session:
            history = self._histories[session.name] = KeptHistory(session, self._recollections)
        return history

    def _tool(self, spec: ToolSpec) -> StructuredTool:
        def answer(**arguments: Any) -> str:
            fields = {key: value for key, value in arguments.items() if value is not None}
            return self._history().answer(spec.name, msgspec.json.encode(fields).decode())

        return StructuredTool.from_function(
            func=answer, name=spec.name, description=spec.description, args_schema=spec.parameters, infer_schema=False
        )

    def wrap_model_call(self, request: ModelRequest[Any], handler: Callable[[Any], ModelResponse[Any]]) -> ModelResponse[Any]:
        """Send the window, and append the reply."""
        history = self._history()
        response = handler(_windowed(request, history))
        _keep(response, history)
        return response

    async def awrap_model_call(
        self, request: ModelRequest[Any], handler: Callable[[Any], Awaitable[ModelResponse[Any]]]
    ) -> ModelResponse[Any]:
        """`wrap_model_call` for async graphs."""
        history = self._history()
        response = await handler(await asyncio.to_thread(_windowed, request, history))
        await asyncio.to_thread(_keep, response, history)
        return response


def _windowed(request: ModelRequest[Any], history: KeptHistory) -> ModelRequest[Any]:
    messages = _chat(request.messages)
    originals = {_key(message): original for message, original in zip(messages, request.messages, strict=True)}
    specs = [
        message if isinstance(message, dict) else [message.name, message.description, message.args] for message in request.tools
    ]
    prompt = history.prompt(messages, "chat", [request.system_prompt, *specs], model=request.model)
    return request.override(messages=[originals.get(_key(message)) or convert_to_messages([message])[0] for message in prompt])


def _keep(response: ModelResponse[Any], history: KeptHistory) -> None:
    history.append(_chat(response.result))
    for message in response.result:
        if isinstance(message, AIMessage) and (usage := message.usage_metadata) is not None:
            cached = usage.get("input_token_details", {}).get("cache_read") or 0
            history.observe(Tokens(prompt=usage["input_tokens"], reply=usage["output_tokens"], cached=cached))


def _chat(messages: Sequence[AnyMessage]) -> list[dict[str, Any]]:
    """Return one chat dict for each message."""
    return [dict(convert_to_openai_messages(message)) for message in messages]


def _key(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message, order="sorted", enc_hook=str)

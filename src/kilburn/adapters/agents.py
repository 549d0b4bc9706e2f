"""The OpenAI Agents SDK: its `Session`, kept in a session of a store.

    session = AgentsSession(store.session("ana-1"))
    await Runner.run(agent, "Hello.", session=session, run_config=RunConfig(call_model_input_filter=session.window))

A run begins with the window instead of the whole past; `window` keeps also a long run within it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kilburn.adapters.history import GONE, KeptHistory, Recollections
from kilburn.errors import MissingExtra
from kilburn.kernel.memory_tools import OFFERED
from kilburn.kernel.session import Session
from kilburn.model import ToolSpec
from kilburn.wire.digests import digest
from kilburn.wire.form import parse
from kilburn.wire.plain import plain

try:
    from agents.run import CallModelData, ModelInputData

    from agents import FunctionTool, SessionABC
except ImportError as error:
    raise MissingExtra("openai-agents", "agents") from error

__all__ = ["AgentsSession", "tools"]

ITEM = "agents_item"
"""The block that carries an item which has no place in a chat message: reasoning, a hosted tool's call."""


class AgentsSession(SessionABC):
    """A session of the SDK in a session of a store. Popped and cleared items leave the window and are no longer found;
    `kilburn forget` erases.

    Args:
        recollections: long-term memory to put before the user's messages.
    """

    def __init__(self, session: Session, *, recollections: Recollections | None = None) -> None:
        self.history = KeptHistory(session, recollections)
        self.session_id, self.session_settings = session.name, None
        self._ahead: list[bytes] = []

    async def get_items(self, limit: int | None = None) -> list[Any]:
        """The window as items; with a limit, the last of all items."""
        self._ahead = []
        if limit is None:
            return items_of(await asyncio.to_thread(self.history.render))
        whole = items_of(await asyncio.to_thread(self.history.session.contents.messages))
        return whole[-limit:] if limit > 0 else []

    async def add_items(self, items: list[Any]) -> None:
        """Append items."""
        await asyncio.to_thread(self._add, list(items))

    def _add(self, items: list[Any]) -> None:
        new = []
        for message in parse(chat_of(items)):
            if (said := digest(message)) in self._ahead:
                self._ahead.remove(said)
            else:
                new.append(message)
        self.history.append(new)

    async def pop_item(self) -> Any | None:
        """Take the last item back, and return it."""
        return await asyncio.to_thread(self._pop)

    def _pop(self) -> Any | None:
        session = self.history.session
        with session.lock:
            pages = [page for page, state in session.contents.pages() if page.id > 0 and state.at not in GONE]
            if not pages:
                return None
            last = [page for page in pages if page.message == pages[-1].message]
            item = items_of(session.contents.messages()[-1:])
            self.history.session.edits.take_back(page.id for page in last)
        return item[-1] if item else None

    async def clear_session(self) -> None:
        """Take all items back."""
        session = self.history.session
        await asyncio.to_thread(self.history.session.edits.take_back, list(range(1, session.window.last + 1)))

    async def window(self, data: CallModelData[Any]) -> ModelInputData:
        """Give it to a run as `call_model_input_filter`: each call of the model gets the window, also within a long run."""
        given = data.model_data
        return ModelInputData(
            input=await asyncio.to_thread(self._window, given, data.agent.model), instructions=given.instructions
        )

    def _window(self, given: ModelInputData, model: object) -> list[Any]:
        with self.history.session.lock:
            self.history.count_for(model)
            # The SDK adds these items to the session later, when their turn has ended.
            self._ahead += map(digest, self.history.take(chat_of(given.input), rewinds=False))
            return items_of(self.history.prompt((), "chat", given.instructions, rewinds=False))


def chat_of(items: Sequence[Any] | str) -> list[dict[str, Any]]:
    """Items of the SDK as chat messages, one for each."""
    listed = [{"role": "user", "content": items}] if isinstance(items, str) else [plain(item, "item") for item in items]
    return [_message_of(item) for item in listed]


def _message_of(item: dict[str, Any]) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call":
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = item["output"]
        if not isinstance(output, str):
            output = "\n".join(part.get("text") or msgspec.json.encode(part).decode() for part in output)
        return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
    if kind != "message":
        return {"role": "assistant", "content": [{"type": ITEM, "item": item}], "refusal": None}
    content = item["content"]
    if item["role"] == "assistant" and not isinstance(content, str):
        content = "".join(part.get("text") or part.get("refusal") or "" for part in content)
    elif not isinstance(content, str):
        content = [_PARTS.get(part["type"], dict)(part) for part in content]
    return {"role": item["role"], "content": content}


_PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "input_text": lambda part: {"type": "text", "text": part["text"]},
    "input_image": lambda part: {"type": "image_url", "image_url": {"url": part["image_url"]}},
    "text": lambda part: {"type": "input_text", "text": part["text"]},
    "image_url": lambda part: {"type": "input_image", "image_url": part["image_url"]["url"], "detail": "auto"},
}
"""The parts of a user's message in one form and in the other."""


def items_of(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Chat messages as items of the SDK. Reasoning whose reply has left is left out, as the API refuses it alone."""
    items: list[Any] = []
    for message in messages:
        content = message.get("content")
        if message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
            continue
        if isinstance(content, list) and message["role"] != "assistant":
            content = [_PARTS.get(part["type"], dict)(part) for part in content]
        elif isinstance(content, list):
            items += [part["item"] for part in content if part.get("type") == ITEM]
            content = "".join(part.get("text", "") for part in content)
        if content:
            items.append({"role": message["role"], "content": content})
        for call in message.get("tool_calls") or ():
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    following = [*items[1:], {}]
    return [
        item
        for item, after in zip(items, following, strict=False)
        if item.get("type") != "reasoning" or after.get("type") == "function_call" or after.get("role") == "assistant"
    ]


def tools(session: AgentsSession) -> list[FunctionTool]:
    """`recall` and `search_memory`, for an `Agent`."""

    def tool(spec: ToolSpec) -> FunctionTool:
        async def answer(context: Any, arguments: str) -> str:
            return await asyncio.to_thread(session.history.answer, spec.name, arguments)

        return FunctionTool(spec.name, spec.description, spec.parameters, answer, strict_json_schema=False)

    return [tool(spec) for spec in OFFERED]

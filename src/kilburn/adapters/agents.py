"""The OpenAI Agents SDK: its `Session`, kept in a session of a store.

    session = AgentsSession(store.session("ana-1"))
    await Runner.run(agent, "Hello.", session=session, run_config=RunConfig(call_model_input_filter=session.window))

A run begins with the window instead of the whole past; `window` keeps also a long run within it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from kilburn.adapters.history import WITHDRAWN, KeptHistory, Recollections
from kilburn.errors import MissingExtra
from kilburn.kernel.session import Session
from kilburn.memory.memory_tools import OFFERED
from kilburn.model import ToolSpec
from kilburn.wire import responses
from kilburn.wire.digests import digest
from kilburn.wire.form import parse
from kilburn.wire.oddities import response_item
from kilburn.wire.plain import plain

try:
    from agents.run import CallModelData, ModelInputData

    from agents import FunctionTool, SessionABC
except ImportError as error:
    raise MissingExtra("openai-agents", "agents") from error

__all__ = ["AgentsSession", "tools"]

ITEM = "agents_item"
"""The type of the block around an item that has no place in a chat message, such as reasoning or the call of a hosted tool. A
message of reasoning alone would not be rendered."""


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
        """Return the window as items; with a limit, the last of all items."""
        self._ahead = []
        if limit is None:
            return sdk_items(await asyncio.to_thread(self.history.render))
        whole = sdk_items(await asyncio.to_thread(self.history.session.contents.messages))
        return whole[-limit:] if limit > 0 else []

    async def add_items(self, items: list[Any]) -> None:
        """Append items."""
        await asyncio.to_thread(self._add, list(items))

    def _add(self, items: list[Any]) -> None:
        new = []
        for message in parse(chat_messages(items)):
            if (key := digest(message)) in self._ahead:
                self._ahead.remove(key)
            else:
                new.append(message)
        self.history.append(new)

    async def pop_item(self) -> Any | None:
        """Take the last item back, and return it."""
        return await asyncio.to_thread(self._pop)

    def _pop(self) -> Any | None:
        session = self.history.session
        with session.lock:
            pages = [page for page, state in session.contents.pages() if page.id > 0 and state.at not in WITHDRAWN]
            if not pages:
                return None
            last = [page for page in pages if page.message == pages[-1].message]
            item = sdk_items(session.contents.messages()[-1:])
            self.history.session.edits.take_back(page.id for page in last)
        return item[-1] if item else None

    async def clear_session(self) -> None:
        """Take all items back."""
        session = self.history.session
        await asyncio.to_thread(self.history.session.edits.take_back, list(range(1, session.window.last + 1)))

    async def window(self, data: CallModelData[Any]) -> ModelInputData:
        """Give it to a run as `call_model_input_filter`: each call of the model gets the window, also within a long run."""
        prompt = data.model_data
        return ModelInputData(
            input=await asyncio.to_thread(self._window, prompt, data.agent.model), instructions=prompt.instructions
        )

    def _window(self, prompt: ModelInputData, model: object) -> list[Any]:
        with self.history.session.lock:
            self.history.count_for(model)
            # The SDK adds these items to the session later, when their turn has ended.
            self._ahead += map(digest, self.history.take(chat_messages(prompt.input), rewinds=False))
            return sdk_items(self.history.prompt((), "chat", prompt.instructions, rewinds=False))


def chat_messages(items: Sequence[Any] | str) -> list[dict[str, Any]]:
    """Return items of the SDK as chat messages, one for each."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    return [_flat(responses.read(response_item(plain(item, "item")))) for item in items]


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message with one text in place of its texts, or with a block around an item of another type."""
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, list):
        return message
    if {block["type"] for block in content} <= {"text", "refusal"}:
        return {**message, "content": "".join(block.get("text") or block.get("refusal") or "" for block in content)}
    return {**message, "content": [{"type": ITEM, "item": item} for item in content], "refusal": None}


def sdk_items(messages: Sequence[dict[str, Any]]) -> list[Any]:
    """Return chat messages as items of the SDK. Reasoning without its reply is left out: the API refuses it."""
    return [_short(item) for item in responses.write([_bare(message) for message in messages])]


def _bare(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its items in place of the blocks around them."""
    content = message.get("content")
    return {**message, "content": [block.get("item", block) for block in content]} if isinstance(content, list) else message


def _short(item: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the SDK's short form, without its type, and with one text in place of the assistant's blocks."""
    if item["type"] != "message":
        return item
    content = item["content"]
    if item["role"] == "assistant":
        content = "".join(block["text"] for block in content)
    return {"role": item["role"], "content": content}


def tools(session: AgentsSession) -> list[FunctionTool]:
    """`recall` and `search_memory`, for an `Agent`."""

    def tool(spec: ToolSpec) -> FunctionTool:
        async def answer(context: Any, arguments: str) -> str:
            return await asyncio.to_thread(session.history.answer, spec.name, arguments)

        return FunctionTool(spec.name, spec.description, spec.parameters, answer, strict_json_schema=False)

    return [tool(spec) for spec in OFFERED]

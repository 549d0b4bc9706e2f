"""LlamaIndex: a memory that is a session.

memory = SessionMemory.of(store.session("ana-1"))
agent = FunctionAgent(tools=tools(memory), llm=llm)
await agent.run("Hello.", memory=memory)
"""

from __future__ import annotations

from typing import Any

import msgspec

from kilburn.adapters.history import KeptHistory, Recollections
from kilburn.errors import MissingExtra, SpecError
from kilburn.kernel.session import Session
from kilburn.memory.memory_tools import OFFERED
from kilburn.wire.plain import load_object

try:
    from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock, ToolCallBlock
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.memory import BaseMemory
    from llama_index.core.tools import FunctionTool
except ImportError as error:
    raise MissingExtra("llama-index-core", "llamaindex") from error

__all__ = ["SessionMemory", "tools"]


OTHER_BLOCK = "input_llamaindex"
"""The type of the block around content that a chat message has no place for: a sound, a document, the model's thoughts. It is
named like blocks of OpenAI's form, so that it stays in that form."""


class SessionMemory(BaseMemory):
    """A memory of LlamaIndex in a session; make it with `of`. `get` gives the window, `get_all` everything."""

    _history: KeptHistory = PrivateAttr()

    @classmethod
    def of(cls, session: Session, *, recollections: Recollections | None = None) -> SessionMemory:
        """Return the memory in a session.

        Args:
            recollections: long-term memory to put before the user's messages.
        """
        memory = cls()
        memory._history = KeptHistory(session, recollections)
        return memory

    @classmethod
    def class_name(cls) -> str:
        """Return its name in LlamaIndex."""
        return "SessionMemory"

    @classmethod
    def from_defaults(cls, session: Session | None = None, **options: Any) -> SessionMemory:
        """See `of`."""
        if session is None:
            raise SpecError("a memory without a session", advice="give session=store.session(NAME)")
        return cls.of(session, **options)

    def get(self, input: str | None = None, **options: Any) -> list[ChatMessage]:
        """Return the window."""
        return [_chat_message(message) for message in self._history.render()]

    def get_all(self) -> list[ChatMessage]:
        """Return all messages, as they were put in."""
        return [_chat_message(message) for message in self._history.session.contents.messages()]

    def put(self, message: ChatMessage) -> None:
        """Append a message."""
        self._history.append([_chat(message)])

    def put_messages(self, messages: list[ChatMessage]) -> None:
        """Append messages, all or none."""
        self._history.append([_chat(message) for message in messages])

    def set(self, messages: list[ChatMessage]) -> None:
        """Make this the history: new messages are appended; those missing at the end are withdrawn, and stay readable."""
        self._history.take([_chat(message) for message in messages])

    def reset(self) -> None:
        """Withdraw all messages."""
        self._history.session.edits.take_back(range(1, self._history.session.window.last + 1))


def tools(memory: SessionMemory) -> list[FunctionTool]:
    """`recall` and `search_memory`, for an agent with this memory."""
    history = memory._history

    def recall(address: str, offset: int = 0) -> str:
        return history.answer("recall", msgspec.json.encode({"address": address, "offset": offset}).decode())

    def search_memory(query: str, tokens: int = 1000) -> str:
        return history.answer("search_memory", msgspec.json.encode({"query": query, "tokens": tokens}).decode())

    functions: dict[str, Any] = {"recall": recall, "search_memory": search_memory}
    return [FunctionTool.from_defaults(functions[spec.name], name=spec.name, description=spec.description) for spec in OFFERED]


def _chat(message: ChatMessage) -> dict[str, Any]:
    role = message.role.value
    blocks: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        if isinstance(block, TextBlock):
            blocks.append({"type": "text", "text": block.text})
        elif isinstance(block, ToolCallBlock):
            arguments = block.tool_kwargs
            text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
            calls.append({"id": block.tool_call_id, "type": "function", "function": {"name": block.tool_name, "arguments": text}})
        elif isinstance(block, ImageBlock):
            blocks.append({"type": "image_url", "image_url": {"url": str(block.url) if block.url else block.inline_url()}})
        else:
            blocks.append({"type": OTHER_BLOCK, "block": msgspec.json.decode(block.model_dump_json())})
    plain = all(block["type"] == "text" for block in blocks)
    content: Any = "".join(block["text"] for block in blocks) if plain else blocks
    if role == "tool":
        return {"role": role, "tool_call_id": message.additional_kwargs["tool_call_id"], "content": content}
    if role == "assistant":
        return {"role": role, "content": content} | ({"tool_calls": calls} if calls else {})
    return {"role": role if role in ("system", "developer") else "user", "content": content}


def _chat_message(message: dict[str, Any]) -> ChatMessage:
    content = message.get("content")
    listed: list[Any] = [{"type": "text", "text": content}] if isinstance(content, str) and content else list(content or ())
    blocks: list[Any] = []
    for block in listed:
        if block["type"] == "image_url":
            blocks.append(ImageBlock(url=block["image_url"]["url"]))
        elif block["type"] == OTHER_BLOCK:
            blocks += ChatMessage.model_validate({"role": "user", "blocks": [block["block"]]}).blocks
        else:
            blocks.append(TextBlock(text=block.get("text", "")))
    for call in message.get("tool_calls") or ():
        function = call["function"]
        blocks.append(
            ToolCallBlock(tool_call_id=call["id"], tool_name=function["name"], tool_kwargs=_arguments(function["arguments"]))
        )
    beside = {"tool_call_id": message["tool_call_id"]} if message["role"] == "tool" else {}
    return ChatMessage(role=message["role"], blocks=blocks, additional_kwargs=beside)


def _arguments(text: str) -> Any:
    value = load_object(text) if text.strip() else {}
    return text if value is None else value

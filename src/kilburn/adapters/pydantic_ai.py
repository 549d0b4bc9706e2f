"""pydantic-ai: a capability that sends the session's window instead of the whole history.

    agent = Agent(model, capabilities=[WindowCapability(session)])

The run's own messages stay as they are (`result.all_messages()`); only what the model gets is the window.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kilburn.adapters.history import KeptHistory, Recollections
from kilburn.errors import MissingExtra
from kilburn.kernel.session import Session
from kilburn.memory.memory_tools import OFFERED
from kilburn.model import Tokens, ToolSpec

try:
    from pydantic_ai import FunctionToolset, RunContext, Tool
    from pydantic_ai import messages as ai
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models import ModelRequestContext
except ImportError as error:
    raise MissingExtra("pydantic-ai", "pydantic-ai") from error

__all__ = ["WindowCapability"]


OTHER_BLOCK = "input_pydantic_ai"
"""The type of the block around content that a chat message has no place for: a file of a provider, a call that the provider
carried out. It is named like blocks of OpenAI's form, so that it stays in that form."""


class WindowCapability(AbstractCapability[Any]):
    """A capability of an agent.

    Args:
        session: keeps the history; one for each conversation.
        recollections: long-term memory to put before the user's messages.
        tools: whether the model is offered `recall` and `search_memory`.
    """

    def __init__(self, session: Session, *, recollections: Recollections | None = None, tools: bool = True) -> None:
        self.history, self._tools = KeptHistory(session, recollections), tools

    def get_toolset(self) -> FunctionToolset[Any] | None:
        """`recall` and `search_memory`."""
        return FunctionToolset([self._tool(spec) for spec in OFFERED]) if self._tools else None

    def _tool(self, spec: ToolSpec) -> Tool[Any]:
        def answer(**arguments: Any) -> str:
            return self.history.answer(spec.name, msgspec.json.encode(arguments).decode())

        return Tool.from_schema(answer, name=spec.name, description=spec.description, json_schema=spec.parameters)

    async def before_model_request(self, ctx: RunContext[Any], request_context: ModelRequestContext) -> ModelRequestContext:
        """Put the window in place of the messages."""
        window = await asyncio.to_thread(self._windowed, request_context)
        return dataclasses.replace(request_context, messages=window)

    async def after_model_request(
        self, ctx: RunContext[Any], *, request_context: ModelRequestContext, response: ai.ModelResponse
    ) -> ai.ModelResponse:
        """Append the reply."""
        await asyncio.to_thread(self._keep, response)
        return response

    def _keep(self, response: ai.ModelResponse) -> None:
        self.history.append([_response_message(response)])
        usage = response.usage
        self.history.observe(Tokens(prompt=usage.input_tokens, reply=usage.output_tokens, cached=usage.cache_read_tokens))

    def _windowed(self, context: ModelRequestContext) -> list[ai.ModelMessage]:
        originals: dict[bytes, Any] = {}
        system: list[Any] = []
        messages: list[dict[str, Any]] = []
        last: ai.ModelRequest | None = None
        for message in context.messages:
            if isinstance(message, ai.ModelResponse):
                messages.append(_response_message(message))
                originals[_key(messages[-1])] = message
                continue
            last = message
            for part in message.parts:
                if isinstance(part, ai.SystemPromptPart) and not messages:
                    system.append(part)
                elif (chat_message := _part_message(part)) is not None:
                    messages.append(chat_message)
                    originals[_key(chat_message)] = part
        parameters = context.model_request_parameters
        beside = [*(part.content for part in system), *(part.content for part in parameters.instruction_parts or ())]
        beside += [[tool.name, tool.description, tool.parameters_json_schema] for tool in parameters.function_tools]
        prompt = self.history.prompt(messages, "chat", beside, model=context.model)
        names = {call["id"]: call["function"]["name"] for message in prompt for call in message.get("tool_calls") or ()}
        return _messages(system, [originals.get(_key(message)) or _restored(message, names) for message in prompt], last)


def _messages(system: Sequence[Any], pieces: Sequence[Any], last: ai.ModelRequest | None) -> list[ai.ModelMessage]:
    """Return parts and responses as messages; the parts between two responses make one request."""
    requests: list[ai.ModelMessage] = []
    waiting = list(system)
    for piece in pieces:
        if isinstance(piece, ai.ModelResponse):
            if waiting:
                requests.append(ai.ModelRequest(parts=waiting))
            requests.append(piece)
            waiting = []
        else:
            waiting.append(piece)
    requests.append(ai.ModelRequest(parts=waiting) if last is None else dataclasses.replace(last, parts=waiting))
    return requests


def _response_message(response: ai.ModelResponse) -> dict[str, Any]:
    """Return a response as a chat message."""
    texts = "".join(part.content for part in response.parts if isinstance(part, ai.TextPart))
    thoughts = [part.content for part in response.parts if isinstance(part, ai.ThinkingPart) and part.content]
    calls = [
        {"id": part.tool_call_id, "type": "function", "function": {"name": part.tool_name, "arguments": part.args_as_json_str()}}
        for part in response.parts
        if isinstance(part, ai.ToolCallPart)
    ]
    foreign = [
        {"type": OTHER_BLOCK, "part": _plain(ai.ModelResponse(parts=[part]))}
        for part in response.parts
        if not isinstance(part, ai.TextPart | ai.ThinkingPart | ai.ToolCallPart)
    ]
    message: dict[str, Any] = {"role": "assistant", "content": texts}
    if foreign:
        message["content"] = [*([{"type": "text", "text": texts}] if texts else []), *foreign]
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _part_message(part: Any) -> dict[str, Any] | None:
    """Return a part of a request as a chat message, or None for a part without content."""
    if isinstance(part, ai.ToolReturnPart):
        output: Any = part.model_response_str()
        if part.files:
            output = [{"type": "text", "text": output}, *map(_block, part.files)]
        return {"role": "tool", "tool_call_id": part.tool_call_id, "content": output}
    if getattr(part, "tool_name", None) and hasattr(part, "model_response"):
        return {"role": "tool", "tool_call_id": part.tool_call_id, "content": part.model_response()}
    if hasattr(part, "model_response"):
        return {"role": "user", "content": part.model_response()}
    if isinstance(part, ai.SystemPromptPart):
        return {"role": "system", "content": part.content}
    if isinstance(part, ai.UserPromptPart):
        content: Any = part.content
        blocks = (
            [content] if isinstance(content, str) else [_block(item) for item in content if not isinstance(item, ai.CachePoint)]
        )
        return {"role": "user", "content": content if isinstance(content, str) else blocks}
    return None


def _block(content: Any) -> dict[str, Any]:
    """Return content of a user or a tool as a block. Files are sent like images: whole, and at the cost of an image."""
    if isinstance(content, str):
        return {"type": "text", "text": content}
    if isinstance(content, ai.ImageUrl):
        return {"type": "image_url", "image_url": {"url": content.url}}
    if isinstance(content, ai.BinaryContent):
        return {"type": "image_url", "image_url": {"url": content.data_uri}}
    if type(content) is ai.TextContent:
        return {"type": "text", "text": content.content}
    return {"type": OTHER_BLOCK, "part": _plain(ai.ModelRequest(parts=[ai.UserPromptPart([content])]))}


def _plain(message: ai.ModelMessage) -> Any:
    """Return a message as JSON, without its times."""
    part = msgspec.json.decode(ai.ModelMessagesTypeAdapter.dump_json([message]))[0]["parts"][0]
    return part["content"] if part["part_kind"] == "user-prompt" else part


def _content(block: dict[str, Any]) -> Any:
    """Return the user's content that a block holds."""
    if block["type"] == "image_url":
        url = block["image_url"]["url"]
        return ai.BinaryContent.from_data_uri(url) if url.startswith("data:") else ai.ImageUrl(url)
    if block["type"] != OTHER_BLOCK:
        return block.get("text", "")
    part = {"part_kind": "user-prompt", "content": block["part"]}
    return (
        ai.ModelMessagesTypeAdapter.validate_json(msgspec.json.encode([{"kind": "request", "parts": [part]}]))[0]
        .parts[0]
        .content[0]
    )


def _response_part(block: dict[str, Any]) -> Any:
    """Return the part of a response that a block holds."""
    if block["type"] != OTHER_BLOCK:
        return ai.TextPart(block.get("text", ""))
    whole = msgspec.json.encode([{"kind": "response", "parts": [block["part"]]}])
    return ai.ModelMessagesTypeAdapter.validate_json(whole)[0].parts[0]


def _restored(message: dict[str, Any], names: Mapping[str, str]) -> Any:
    """Return the part or response of a chat message that the session wrote, changed, or had before this run.

    Args:
        names: of the tools, by the ids of their calls.
    """
    content: Any = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) and content else list(content or ())
    if message["role"] == "assistant":
        parts: list[Any] = [_response_part(block) for block in blocks]
        for call in message.get("tool_calls") or ():
            parts.append(ai.ToolCallPart(call["function"]["name"], call["function"]["arguments"], call["id"]))
        return ai.ModelResponse(parts=parts or [ai.TextPart("")])
    items: list[Any] = [_content(block) for block in blocks]
    text: Any = "\n".join(items) if all(isinstance(item, str) for item in items) else items
    if message["role"] == "tool":
        number = message["tool_call_id"]
        return ai.ToolReturnPart(tool_name=names[number], content=text, tool_call_id=number)
    return ai.SystemPromptPart(text) if message["role"] == "system" else ai.UserPromptPart(text)


def _key(message: dict[str, Any]) -> bytes:
    return msgspec.json.encode(message, order="sorted")

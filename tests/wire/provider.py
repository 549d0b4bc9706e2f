"""What the providers demand of a request, written from their published rules and from their SDKs' types.

It imports nothing of what it judges: neither the renderer nor `kilburn.wire.validity`. Sources: the types of the packages
`openai` and `anthropic`, with their docstrings ("Thinking blocks must be passed back unmodified and in their original
order"); Anthropic's pages on tool use and extended thinking; OpenAI's chat-completions reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from anthropic.types import MessageParam, TextBlockParam
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter, ValidationError

__all__ = ["Refused", "check_chat", "check_messages", "check_speakers", "weight"]

Dicts = dict[str, Any]

_ANTHROPIC: TypeAdapter[Any] = TypeAdapter(MessageParam)
_SYSTEM: TypeAdapter[Any] = TypeAdapter(str | Iterable[TextBlockParam])
_OPENAI: TypeAdapter[Any] = TypeAdapter(ChatCompletionMessageParam)
_THOUGHT = ("thinking", "redacted_thinking")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}\Z")
_ID = re.compile(r"[a-zA-Z0-9_-]+\Z")


class Refused(AssertionError):
    """The provider would answer 400."""


def _demand(holds: object, what: str) -> None:
    if not holds:
        raise Refused(what)


def _typed(adapter: TypeAdapter[Any], value: Any, where: str) -> None:
    """Whether the SDK's type takes the value, with all that it reads lazily."""
    try:
        _consume(adapter.validate_python(value))
    except ValidationError as error:
        raise Refused(f"{where}: not of the SDK's type: {str(error)[:600]}") from None


def _consume(value: Any) -> None:
    if isinstance(value, dict):
        for inner in value.values():
            _consume(inner)
    elif not isinstance(value, str | bytes) and isinstance(value, Iterable):
        for inner in value:
            _consume(inner)


def check_chat(prompt: Sequence[Dicts]) -> None:
    """Whether OpenAI's chat-completions API takes these messages."""
    _demand(prompt, "no message")
    due: list[str] = []
    for index, message in enumerate(prompt):
        where = f"messages[{index}]"
        _typed(_OPENAI, message, where)
        role = message["role"]
        if role == "tool":
            _demand(message["tool_call_id"] in due, f"{where}: answers no call of the assistant message before it")
            due.remove(message["tool_call_id"])
        else:
            _demand(not due, f"{where}: the calls {due} are not answered directly behind their message")
        if "content" in message:
            content = message["content"]
            _demand(content != [], f"{where}: an empty list of parts")
        if role != "assistant":
            _demand("tool_calls" not in message, f"{where}: only the assistant calls")
            continue
        calls = message.get("tool_calls")
        if "tool_calls" in message:
            _demand(calls, f"{where}: an empty list of calls")
            due = [call["id"] for call in calls]
            _demand(len(set(due)) == len(due), f"{where}: two calls have one id")
            for call in calls:
                _demand(0 < len(call["id"]) <= 40, f"{where}: an id of {len(call['id'])} characters")
                _demand(_NAME.match(call[call["type"]]["name"]), f"{where}: the name of a call")
        said = calls or message.get("content") is not None or message.get("function_call") or message.get("audio")
        _demand(said or message.get("refusal") is not None, f"{where}: neither content nor calls")
    _demand(not due, f"the calls {due} are never answered")


def check_messages(prompt: Sequence[Dicts], system: Any = None, appended: Sequence[Dicts] = ()) -> None:
    """Whether Anthropic's messages API takes these messages, thinking enabled.

    Args:
        appended: all that came, in Anthropic's form: what the thinking must be equal to.
    """
    if system is not None:
        _typed(_SYSTEM, system, "system")
        for block in [{"text": system}] if isinstance(system, str) else system:
            _demand(block["text"].strip(), "system: a text without a visible character")
    _demand(prompt, "no message")
    _demand(prompt[0]["role"] == "user", "the first message is not the user's")
    ids: set[str] = set()
    due: set[str] = set()
    before = ""
    marks = 0
    for index, message in enumerate(prompt):
        where = f"messages[{index}]"
        _typed(_ANTHROPIC, message, where)
        _demand(set(message) == {"role", "content"}, f"{where}: keys {set(message)}")
        _demand(message["role"] in ("user", "assistant"), f"{where}: role {message['role']}")
        _demand(message["role"] != before, f"{where}: two of {before} in a row (allowed, but they are read as one)")
        before = message["role"]
        blocks = _blocks(message)
        _demand(blocks, f"{where}: empty")
        marks += sum(1 for block in _nested(blocks) if block.get("cache_control"))
        for block in _nested(blocks):
            if block["type"] == "text":
                _demand(block["text"].strip(), f"{where}: a text without a visible character")
        if before == "user":
            _answers(blocks, due, where)
            due = set()
        else:
            due = _calls(blocks, ids, where)
            _demand(blocks[-1]["type"] not in _THOUGHT, f"{where}: ends with thinking")
    _demand(not due, f"the calls {due} are never answered")
    _demand(marks <= 4, f"{marks} cache breakpoints")
    last = _blocks(prompt[-1])[-1]
    if before == "assistant" and last["type"] == "text" and index == len(prompt) - 1:
        pass  # whether the API takes a prefill, or its trailing space, is the caller's last word, not the window's
    _served(prompt)
    _thinking(prompt, appended)


def _blocks(message: Dicts) -> list[Dicts]:
    content = message.get("content")
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content or ())


def _nested(blocks: Sequence[Dicts]) -> list[Dicts]:
    inner = [
        item
        for block in blocks
        if block["type"] == "tool_result"
        for item in _blocks(block)
        if not isinstance(block.get("content"), str)
    ]
    return [*blocks, *inner]


def _answers(blocks: Sequence[Dicts], due: set[str], where: str) -> None:
    """Every call is answered here, results first, nothing answered twice or unasked."""
    answered: set[str] = set()
    other = False
    for block in blocks:
        _demand(block["type"] not in ("tool_use", *_THOUGHT), f"{where}: {block['type']} in a user message")
        if block["type"] != "tool_result":
            other = True
            continue
        call = block["tool_use_id"]
        _demand(not other, f"{where}: tool_result {call} is not among the first blocks")
        _demand(call in due and call not in answered, f"{where}: unexpected tool_use_id {call}")
        answered.add(call)
        if block.get("is_error"):
            _demand(block.get("content"), f"{where}: an error without content")
            _demand(all(item["type"] == "text" for item in _blocks(block)), f"{where}: an error that is not text")
    _demand(answered == due, f"{where}: tool_use ids without tool_result directly after: {due - answered}")


def _calls(blocks: Sequence[Dicts], ids: set[str], where: str) -> set[str]:
    due: set[str] = set()
    for block in blocks:
        _demand(block["type"] not in ("tool_result", "image", "document"), f"{where}: {block['type']} of the assistant")
        if block["type"] == "tool_use":
            _demand(_ID.match(block["id"]), f"{where}: the id {block['id']!r}")
            _demand(_NAME.match(block["name"]), f"{where}: the name {block['name']!r}")
            _demand(block["id"] not in ids, f"{where}: tool_use ids must be unique: {block['id']}")
            ids.add(block["id"])
            due.add(block["id"])
    return due


def _served(prompt: Sequence[Dicts]) -> None:
    """Calls that the provider carries out have their result behind them, in the same turn of the assistant."""
    for index, message in enumerate(prompt):
        asked = [block["id"] for block in _blocks(message) if block["type"] == "server_tool_use"]
        for block in _blocks(message):
            if block["type"].endswith("_tool_result") and block["type"] != "tool_result":
                _demand(block["tool_use_id"] in asked, f"messages[{index}]: {block['type']} without its server_tool_use")
                asked.remove(block["tool_use_id"])
        _demand(not asked or index == len(prompt) - 1, f"messages[{index}]: server_tool_use without its result")


def _thinking(prompt: Sequence[Dicts], appended: Sequence[Dicts]) -> None:
    """Thinking is as it came, of each message all or none, in order; a tool loop starts with what it came with."""
    whole = [thoughts for message in appended if (thoughts := _thoughts(_blocks(message)))]
    origin = {
        block["id"]: _blocks(message)
        for message in appended
        for block in _blocks(message)
        if message["role"] == "assistant" and block["type"] == "tool_use"
    }
    at = 0
    for index, message in enumerate(prompt):
        shown = _thoughts(_blocks(message))
        while shown:
            while at < len(whole) and whole[at] != shown[: len(whole[at])]:
                at += 1
            _demand(at < len(whole), f"messages[{index}]: thinking changed, incomplete or out of order: {shown[0][:80]}")
            shown = shown[len(whole[at]) :]
            at += 1
    last = next((message for message in reversed(prompt) if message["role"] == "assistant"), None)
    calls = [block["id"] for block in _blocks(last or {}) if block["type"] == "tool_use"]
    if last is not None and calls:
        first = origin.get(calls[0], [])
        if first and _thoughts(first[:1]):
            _demand(
                _blocks(last)[0]["type"] in _THOUGHT,
                f"Expected `thinking` or `redacted_thinking`, but found `{_blocks(last)[0]['type']}`: "
                "a final `assistant` message must start with a thinking block",
            )
        shown = _thoughts(_blocks(last))
        came = (_thoughts(origin.get(call, [])) for call in calls)
        _demand(all(_within(thoughts, shown) for thoughts in came), "thinking of the last calls is missing")


def _within(part: Sequence[str], whole: Sequence[str]) -> bool:
    return not part or any(whole[start : start + len(part)] == list(part) for start in range(len(whole)))


def _thoughts(blocks: Sequence[Dicts]) -> list[str]:
    """The thinking that a provider can have given: signed, or redacted."""
    return [
        json.dumps(block, sort_keys=True)
        for block in blocks
        if block["type"] == "redacted_thinking" or (block["type"] == "thinking" and block.get("signature"))
    ]


_OPENED = re.compile(r"\[[^\n]* (?:marks|until) (\w{6})(?:;[^\n]*)?\]\n")


def check_speakers(prompt: Sequence[Dicts]) -> None:
    """Nobody's words are another's: what a tool said ("tool-said") stands in a result, or under the user's name between marks
    with a nonce that it does not hold; what the assistant thought ("my-thought") is in no text of the assistant's.

    A summary by a model may say either; the run's own model says neither.
    """
    for index, message in enumerate(prompt):
        for text in _texts(message):
            where = f"messages[{index}]: {text[:200]!r}"
            if message["role"] == "assistant":
                _demand("my-thought" not in text, f"thinking became words of the assistant: {where}")
            elif message["role"] in ("user", "system"):
                _demand("tool-said" not in _outside(text), f"a tool's words under the name of the {message['role']}: {where}")


def _texts(message: Dicts) -> list[str]:
    content = message.get("content")
    return [content] if isinstance(content, str) else [block["text"] for block in content or () if block.get("type") == "text"]


def _outside(text: str) -> str:
    """A text without what stands between a heading that names a nonce and the line that ends it."""
    opened = _OPENED.match(text)
    end = text.find(f"[end {opened[1]}]") if opened else -1
    if opened is None or end < 0:
        return text
    return text[: opened.start()] + text[end:]


_DELIMITERS = frozenset({
    "role", "type", "content", "text", "tool_calls", "function", "custom", "id", "name", "arguments",
    "tool_use_id", "tool_call_id", "thinking", "signature", "data", "refusal", "image_url", "url", "source",
    "media_type", "is_error", "reasoning_content", "reasoning", "input", "detail", "citations",
})  # fmt: skip
"""Keys of the protocol: what they weigh is the message's envelope. A key that the caller made up is a word."""


def weight(value: Any, key: str = "") -> int:
    """Characters of everything that is sent but the protocol's own words, cache marks, and pictures.

    A call's input is weighed as JSON, since that is how a model reads it.
    """
    if isinstance(value, dict):
        total = 0
        for name, inner in value.items():
            if name == "cache_control" or (name in ("source", "image_url") and value.get("type") in ("image", "image_url")):
                continue
            if name == "input" and value.get("type") == "tool_use":
                total += len(json.dumps(inner, ensure_ascii=False, separators=(",", ":")))
            else:
                total += weight(inner, name) + (0 if name in _DELIMITERS else len(name))
        return total
    if isinstance(value, list):
        return sum(weight(inner, key) for inner in value)
    if key in ("role", "type", "media_type", "detail"):
        return 0
    if isinstance(value, str):
        # Ciphertexts are counted by their bytes.
        cipher = key in ("data", "signature") and len(value) >= 64 and value.isalnum() and any(map(str.isdigit, value))
        return len(value) * 3 // 16 if cipher else len(value)
    return 0 if value is None or isinstance(value, bool) else len(json.dumps(value))

"""Finds what a provider would refuse in a rendered transcript, before it is sent.

Nothing is repaired here; `chat.render` and `messages.render` do that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from kilburn.errors import DuplicateCall, InvalidMessage, OrphanResult
from kilburn.wire.chat import ROLES, UNVOICED, is_thinking_alone
from kilburn.wire.messages import BREAKPOINTS, SERVED, SETTINGS, THOUGHTS, as_blocks, marked
from kilburn.wire.parts import role_at

_CALL_ID = re.compile(r"[a-zA-Z0-9_-]+\Z")
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}\Z")
_RESULT_ADVICE = "put each result right behind the message that called"


def validate_chat(transcript: Sequence[dict[str, Any]]) -> None:
    """Whether OpenAI's chat API would take these messages.

    Raises:
        InvalidMessage: an empty transcript, an unknown role, content that the role may not have, a call without its
            result, an impossible tool name or id.
        OrphanResult: a tool message that answers no call of the assistant message before it.
        DuplicateCall: two calls of one message, or two calls that wait for results, have one id.
    """
    if not transcript:
        raise InvalidMessage("the transcript is empty")
    waiting: set[str] = set()
    for index, message in enumerate(transcript):
        where = f"messages[{index}]"
        role_at(message, ROLES, "chat", where)
        role = message["role"]
        if role == "tool":
            call = message.get("tool_call_id")
            if call not in waiting:
                raise OrphanResult(f"{where}: no open call has the id {str(call)[:80]!r}", advice=_RESULT_ADVICE)
            waiting.discard(call)
            _check_chat_content(message.get("content"), where, texts_only=True)
            continue
        _check_answered(waiting, where)
        if role == "assistant":
            waiting = _check_chat_calls(message, where)
            _check_chat_assistant(message, where)
        elif role != "function":
            _check_chat_content(message.get("content"), where, texts_only=role != "user")
    _check_answered(waiting, "the end")


def _check_answered(waiting: set[str], where: str) -> None:
    if waiting:
        raise InvalidMessage(f"{where}: the call {min(waiting)[:80]!r} has no result yet", advice=_RESULT_ADVICE)


def _check_chat_content(content: Any, where: str, *, texts_only: bool) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list) or not content:
        raise InvalidMessage(f"{where}.content: neither a string nor a list with a part in it")
    for index, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or (texts_only and kind != "text"):
            raise InvalidMessage(f"{where}.content[{index}]: {str(kind)[:40]!r} cannot stand here")
        if kind == "text" and not isinstance(block.get("text"), str):
            raise InvalidMessage(f"{where}.content[{index}].text is not a string")


def _check_chat_assistant(message: dict[str, Any], where: str) -> None:
    content = message.get("content")
    if content is None:
        if not message.get("tool_calls") and all(message.get(key) is None for key in UNVOICED):
            raise InvalidMessage(f"{where}: an assistant message without content and without calls")
        return
    _check_chat_content(content, where, texts_only=False)
    if is_thinking_alone(message):
        raise InvalidMessage(f"{where}: an assistant message of thinking alone", advice="leave it out")


def _check_chat_calls(message: dict[str, Any], where: str) -> set[str]:
    calls = message.get("tool_calls")
    if "tool_calls" not in message:
        return set()
    if not isinstance(calls, list) or not calls:
        raise InvalidMessage(f"{where}.tool_calls: not a list with a call in it", advice="leave the key out")
    ids: set[str] = set()
    for index, call in enumerate(calls):
        place = f"{where}.tool_calls[{index}]"
        body = call.get(call.get("type", "")) if isinstance(call, dict) else None
        text = body.get("arguments", body.get("input")) if isinstance(body, dict) else None
        if not isinstance(body, dict) or not isinstance(text, str):
            raise InvalidMessage(f"{place}: no call of a function or a custom tool")
        if not isinstance(body.get("name"), str) or not _TOOL_NAME.match(body["name"]):
            raise InvalidMessage(f"{place}: {str(body.get('name'))[:80]!r} is no name of a tool")
        if not isinstance(call.get("id"), str) or not 0 < len(call["id"]) <= 40:
            raise InvalidMessage(f"{place}.id: not a string of 1 to 40 characters")
        if call["id"] in ids:
            raise DuplicateCall(f"{place}: a second call with the id {call['id']!r}")
        ids.add(call["id"])
    return ids


def validate_messages(transcript: Sequence[dict[str, Any]]) -> None:
    """Whether Anthropic's messages API would take these messages.

    Raises:
        InvalidMessage: an empty transcript or message, a first message that is not the user's, roles that do not
            alternate, a system message in another place than between the user and the assistant, other keys than role and
            content, a call without its result in the next message, half of a server-side call, text without a visible
            character, thinking that is unsigned or comes last, an impossible id or name, too many cache breakpoints.
        OrphanResult: a tool_result that answers no call of the message before.
        DuplicateCall: two tool_use blocks have one id.
    """
    if not transcript:
        raise InvalidMessage("the transcript is empty")
    calls: set[str] = set()
    waiting: set[str] = set()
    previous = "assistant"
    for index, message in enumerate(transcript):
        where = f"messages[{index}]"
        role = message.get("role")
        if role == "system" and index:
            _check_system(message, previous, [following.get("role") for following in transcript[index + 1 : index + 2]], where)
            continue
        if role not in ("user", "assistant"):
            raise InvalidMessage(f"{where}.role: {str(role)[:40]!r} is no role of the messages form")
        if set(message) != {"role", "content"}:
            raise InvalidMessage(f"{where}: the API takes role and content and no other key")
        if role == previous:
            problem = "the first message is not the user's" if index == 0 else f"a second {role} message in a row"
            raise InvalidMessage(f"{where}: {problem}")
        previous = role
        blocks = _blocks(message.get("content"), where)
        if role == "user":
            _check_user(blocks, waiting, where)
            waiting = set()
        else:
            waiting = _check_assistant(blocks, calls, where)
    _check_answered(waiting, "the end")
    _check_served_calls(transcript)
    _check_breakpoints(transcript)


def _check_system(message: dict[str, Any], previous: str, following: Sequence[Any], where: str) -> None:
    """A system message among the others, as newer models take it."""
    if previous != "user" or following not in ([], ["assistant"]):
        raise InvalidMessage(f"{where}: a system message stands behind the user's, and before the assistant's")
    if set(message) - {"role", "content", *SETTINGS}:
        raise InvalidMessage(f"{where}: a system message has role, content and settings, and no other key")
    if "content" in message:
        _blocks(message["content"], where)
    elif not message.get("output_config"):
        raise InvalidMessage(f"{where}: a system message with neither content nor settings")


def _all_blocks(transcript: Sequence[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    for index, message in enumerate(transcript):
        if isinstance(message.get("content"), list):
            yield from ((index, block) for block in message["content"])


def _check_served_calls(transcript: Sequence[dict[str, Any]]) -> None:
    """Calls that the provider itself carries out; only the last message may wait for a result."""
    started = {block.get("id"): index for index, block in _all_blocks(transcript) if block["type"] in SERVED}
    ended = set()
    for index, block in _all_blocks(transcript):
        if block["type"].endswith("_tool_result"):
            ended.add(block.get("tool_use_id"))
            if block.get("tool_use_id") not in started:
                raise OrphanResult(f"messages[{index}]: a {block['type']} block without its call")
    for call, index in started.items():
        if call not in ended and index < len(transcript) - 1:
            raise InvalidMessage(f"messages[{index}]: the server-side call {str(call)[:80]!r} has no result")


def _check_breakpoints(transcript: Sequence[dict[str, Any]]) -> None:
    count = len(marked([message.get("content") for message in transcript]))
    if count > BREAKPOINTS:
        raise InvalidMessage(f"{count} cache breakpoints, and the API takes {BREAKPOINTS}")


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    blocks = as_blocks(content)
    if not isinstance(blocks, list) or not blocks:
        raise InvalidMessage(f"{where}.content: neither a string nor a list with a block in it")
    for index, block in enumerate(blocks):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidMessage(f"{where}.content[{index}]: not an object with a `type`")
        if block["type"] == "text" and not str(block.get("text", "")).strip():
            raise InvalidMessage(f"{where}.content[{index}].text: no visible character", advice="leave the block out")
    return blocks


def _check_user(blocks: Sequence[dict[str, Any]], waiting: set[str], where: str) -> None:
    has_other = False
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block["type"] == "tool_use" or block["type"] in THOUGHTS:
            raise InvalidMessage(f"{place}: a {block['type']} block in a user message")
        if block["type"] != "tool_result":
            has_other = True
            continue
        call = block.get("tool_use_id")
        if call not in waiting:
            raise OrphanResult(f"{place}: no call of the message before has the id {str(call)[:80]!r}", advice=_RESULT_ADVICE)
        if has_other:
            raise InvalidMessage(f"{place}: a tool_result behind other blocks", advice="results come first in their message")
        waiting.discard(call)
        _check_result(block, place)
    _check_answered(waiting, where)


def _check_result(block: dict[str, Any], where: str) -> None:
    content = block.get("content")
    failed = block.get("is_error") is True
    if "content" in block and not isinstance(content, str | list):
        raise InvalidMessage(f"{where}.content: neither a string nor a list of blocks", advice="leave the key out")
    if isinstance(content, list):
        for item in content:
            if item["type"] == "text" and not item["text"].strip():
                raise InvalidMessage(f"{where}.content: a text block without a visible character")
            if failed and item["type"] != "text":
                raise InvalidMessage(f"{where}.content: a {item['type']} block in a result that is an error")
    if failed and not content:
        raise InvalidMessage(f"{where}.content: an error without a text")


def _check_assistant(blocks: Sequence[dict[str, Any]], calls: set[str], where: str) -> set[str]:
    waiting: set[str] = set()
    for index, block in enumerate(blocks):
        place = f"{where}.content[{index}]"
        if block["type"] in ("tool_result", "image"):
            raise InvalidMessage(f"{place}: a {block['type']} block in an assistant message")
        if block["type"] == "thinking" and not block.get("signature"):
            raise InvalidMessage(f"{place}: unsigned thinking")
        if block["type"] != "tool_use":
            continue
        call, name = block.get("id"), block.get("name")
        if not isinstance(call, str) or not _CALL_ID.match(call):
            raise InvalidMessage(f"{place}.id: {str(call)[:80]!r} has characters that the API refuses")
        if not isinstance(name, str) or not _TOOL_NAME.match(name) or not isinstance(block.get("input"), dict):
            raise InvalidMessage(f"{place}: a call has a name and an object as its input")
        if call in calls:
            raise DuplicateCall(f"{place}: a second call with the id {call!r}")
        calls.add(call)
        waiting.add(call)
    if blocks[-1]["type"] in THOUGHTS:
        raise InvalidMessage(f"{where}: an assistant message ends with its thinking")
    return waiting

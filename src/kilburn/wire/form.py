"""Messages from anything that looks like one, and the exact originals back.

The form is recognised by its shape. The originals can be rebuilt, because `extra` keeps everything that the neutral
form has no place for. What is passed in is never changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kilburn.errors import InvalidMessage, SpecError
from kilburn.message import TRUST_OF_ROLE, Kind, Message, Part, Role
from kilburn.wire import chat, messages
from kilburn.wire.parts import claim_call
from kilburn.wire.plain import check_text, plain, unpack

_CHAT_ROLES = ("tool", "developer", "function")
_CHAT_KEYS = ("tool_calls", "tool_call_id", "annotations", *chat.ASIDES)
_CHAT_BLOCKS = ("refusal", "file")
_MESSAGE_KEYS = ("stop_reason", "stop_sequence")


def parse(value: Any) -> list[Message]:
    """Return the messages that a value is: a dict of OpenAI's chat form or of Anthropic's messages form, an
    SDK's message object, a `Message`, or a list of any of those. One dict may give several messages.

    A call's arguments are kept exactly as the model wrote them, valid JSON or not.

    Raises:
        InvalidMessage: what is wrong, and where.
        DuplicateCall: two calls of one message have the same id.
    """
    if isinstance(value, list | tuple):
        return [message for index, item in enumerate(value) for message in _parse_one(item, f"messages[{index}]")]
    return _parse_one(value, "message")


def _parse_one(value: Any, where: str) -> list[Message]:
    if isinstance(value, Message):
        return [_check(value, where)]
    source = None if isinstance(value, list | tuple) else plain(value, where)
    if not isinstance(source, dict):
        raise InvalidMessage(f"{where}: {type(value).__name__} is no message", advice="give a dict with `role` and `content`")
    if detect(source) == "messages":
        return messages.read(source, where)
    return [chat.read(source, where)]


def detect(source: dict[str, Any]) -> str:
    """ "chat" or "messages", by the shape of a dict; "chat" if the dict is valid in both."""
    if source.get("role") in _CHAT_ROLES or any(key in source for key in _CHAT_KEYS):
        return "chat"
    if source.get("type") == "message" or any(key in source for key in _MESSAGE_KEYS):
        return "messages"
    content = source.get("content")
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            continue
        if kind == "text":
            if "cache_control" in block or "citations" in block:
                return "messages"
        elif kind == "image":
            return "messages" if "source" in block else "chat"
        else:
            return "chat" if kind in _CHAT_BLOCKS or kind.startswith("input_") or kind.endswith("_url") else "messages"
    return "chat"


def _check(message: Message, where: str) -> Message:
    """Return a `Message`, unchanged, if it keeps the contract of `kilburn.message`."""
    role = message.role
    if not isinstance(role, Role):
        raise InvalidMessage(f"{where}.role: {str(role)[:40]!r} is no Role")
    if not isinstance(message.parts, tuple) or not message.parts:
        raise InvalidMessage(f"{where}.parts: a message has at least one part", advice="an empty message is one empty TEXT part")
    if message.trust is not None and message.trust > TRUST_OF_ROLE[role]:
        raise InvalidMessage(f"{where}.trust: {message.trust!r} is above what a {role} message may have", advice="leave it None")
    _check_extra(message.extra, f"{where}.extra")
    calls: set[str | None] = set()
    for index, part in enumerate(message.parts):
        place = f"{where}.parts[{index}]"
        _check_part(part, role, place)
        if part.kind is Kind.CALL and part.call is not None:
            claim_call(part.call, calls, place)
    return message


def render(prompt: list[Message], form: str) -> tuple[Any, list[dict[str, Any]]]:
    """Return a prompt in a provider's form: the system prompt, where the form has one beside the messages, and the messages.

    Raises:
        SpecError: no such form.
    """
    if form in ("chat", "responses"):
        # Items of OpenAI's responses are written from messages of the chat form.
        return None, chat.render(prompt, apart=form == "responses")
    if form == "messages":
        return messages.render(prompt)
    raise SpecError(f"no format {form!r}", advice='use "chat" (OpenAI) or "messages" (Anthropic)')


def check_fit(message: Message, where: str) -> None:
    """Check that the leftovers of a message can be rendered in both forms. Those that `parse` made can; a file may have been
    edited by hand, so whoever reads messages from one asks here.

    Raises:
        InvalidMessage: they cannot.
    """
    if message.extra is None and all(part.extra is None for part in message.parts):
        return
    try:
        chat.render([message])
        messages.render([message])
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise InvalidMessage(f"{where}.extra does not fit its message: {error!r}", advice="leave it None") from error


def _check_part(part: Part, role: Role, where: str) -> None:
    if not isinstance(part, Part) or not isinstance(part.kind, Kind) or not isinstance(part.text, str):
        raise InvalidMessage(f"{where}: not a Part with a Kind and a text")
    if part.kind in (Kind.FOLD, Kind.EXCERPT):
        raise InvalidMessage(f"{where}: a {part.kind} is derived by the kernel, never handed in", advice="use TEXT")
    if part.kind is Kind.CALL and (role is not Role.ASSISTANT or not part.call or not part.name):
        raise InvalidMessage(f"{where}: a CALL has an id and a name, and stands in an ASSISTANT message")
    if part.kind is Kind.RESULT and (role is not Role.TOOL or not part.call):
        raise InvalidMessage(f"{where}: a RESULT has a call's id, and stands in a TOOL message")
    for text in (part.text, part.call, part.name):
        if text is not None:
            if not isinstance(text, str):
                raise InvalidMessage(f"{where}: {type(text).__name__} where a string belongs")
            check_text(text, where)
    _check_extra(part.extra, f"{where}.extra")
    if part.kind is Kind.OPAQUE:
        _check_extra(part.text, f"{where}.text")


def _check_extra(extra: str | None, where: str) -> None:
    if extra is not None:
        unpack(check_text(extra, where))


def dump(parsed: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the original dicts of the messages that `parse` returned, equal in every key and in the order of keys.

    Messages that never had a wire form are returned in the chat form.

    Raises:
        InvalidMessage: messages that are not as `parse` returned them.
    """
    out: list[dict[str, Any]] = []
    waiting: list[Message] = []
    for message in parsed:
        extra = unpack(message.extra)
        form = extra.get("form")
        if waiting and form != "messages":
            break
        if form == "messages":
            waiting.append(message)
            if not extra.get("more"):
                out.append(messages.write(waiting))
                waiting = []
        elif form == "chat":
            out.append(chat.write(message))
        else:
            out.extend(chat.render([message]))
    if waiting:
        raise InvalidMessage(
            "a message of the messages form ends in the middle", advice="dump all messages of one parse together"
        )
    return out

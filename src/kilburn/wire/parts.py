"""What both wire forms have in common: roles, call ids, texts, and the blocks of a tool result.

Of a tool result the text blocks become one text, other blocks become parts that are attached to the result's call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.errors import DuplicateCall, InvalidMessage
from kilburn.message import Kind, Part, Role
from kilburn.wire.plain import pack, string_at, type_name, unpack


def role_at(source: dict[str, Any], roles: Mapping[str, Role], form: str, where: str) -> Role:
    """Return the role of a message.

    Raises:
        InvalidMessage: it is none of the form's.
    """
    role = source.get("role")
    if not isinstance(role, str) or role not in roles:
        raise InvalidMessage(
            f"{where}.role: {str(role)[:40]!r} is no role of the {form} form", advice=f"use one of {', '.join(roles)}"
        )
    return roles[role]


def kind_at(block: Any, where: str) -> str:
    """Return the type of a content block.

    Raises:
        InvalidMessage: it has none.
    """
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidMessage(f"{where}: a content block is an object with a `type`, not {type_name(block)}")
    return kind


def claim_call(call: str | None, ids: set[str | None], where: str) -> None:
    """Take a call's id into those that a message has.

    Raises:
        DuplicateCall: it is among them.
    """
    if call in ids:
        raise DuplicateCall(f"{where}: two calls have the id {str(call)[:80]!r}", advice="give each call its own id")
    ids.add(call)


def only_text(parts: Sequence[Part]) -> str:
    """Return the text of the one part that a message has whose content was one string.

    Raises:
        InvalidMessage: it has another number of parts.
    """
    if len(parts) != 1:
        raise InvalidMessage(f"a message whose content was one string has {len(parts)} parts", advice="dump whole messages only")
    return parts[0].text


def read_text(block: dict[str, Any], kind: str, where: str, into: Kind = Kind.TEXT) -> Part:
    """Return the part of a block whose text stands under its own type; a block that has more than a text leaves a template."""
    text = string_at(block, kind, where, empty=True)
    default = kind == "text" and list(block) == ["type", "text"]
    return Part(kind=into, text=text, extra=None if default else pack({"block": {**block, kind: None}}))


def call_slots(call: Mapping[str, Any]) -> tuple[str, str]:
    """Return where a call of the chat form has its name and its arguments: the key of its body, and the key in that."""
    return ("custom", "input") if call.get("type") == "custom" else ("function", "arguments")


def block_template(part: Part, key: str = "block") -> dict[str, Any] | None:
    """Return a fresh copy of the block that a part was read from, its texts taken out; None where it is the plain one."""
    return unpack(part.extra).get(key)


Layout = list[Any]
"""How a result's content is split: a length for a plain text block, {"n": length, "block": template} for one that
carries more, "+" for the next attached part."""

_JOINT = "\n"


def read_blocks(
    content: list[Any], call: str, where: str, read_block: Callable[[Any, str], Part]
) -> tuple[str, Layout, tuple[Part, ...]]:
    """Return the text of a result's blocks (joined by a line break), the lengths to split it again, and the other blocks."""
    texts: list[str] = []
    layout: Layout = []
    attached: list[Part] = []
    for index, block in enumerate(content):
        part = read_block(block, f"{where}[{index}]")
        if part.kind is Kind.TEXT:
            texts.append(part.text)
            template = None if part.extra is None else msgspec.json.decode(part.extra)["block"]
            layout.append(len(part.text) if template is None else {"n": len(part.text), "block": template})
        elif part.kind in (Kind.IMAGE, Kind.OPAQUE):
            attached.append(msgspec.structs.replace(part, call=call))
            layout.append("+")
        else:
            raise InvalidMessage(f"{where}[{index}]: a {block['type']} block cannot stand in a tool result")
    return _JOINT.join(texts), layout, tuple(attached)


def write_blocks(
    text: str, layout: Layout, attached: Sequence[Part], write_block: Callable[[Part], dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """Return the blocks that `read_blocks` read, or None if the text or the attached parts have changed since."""
    sizes = [item if isinstance(item, int) else item["n"] for item in layout if item != "+"]
    whole = sum(sizes) + len(_JOINT) * max(0, len(sizes) - 1)
    if len(text) != whole or len(attached) != sum(item == "+" for item in layout):
        return None
    blocks: list[dict[str, Any]] = []
    waiting = iter(attached)
    position = 0
    for item in layout:
        if item == "+":
            blocks.append(write_block(next(waiting)))
            continue
        size = item if isinstance(item, int) else item["n"]
        block = {"type": "text", "text": None} if isinstance(item, int) else item["block"]
        block[block["type"]] = text[position : position + size]
        blocks.append(block)
        position += size + len(_JOINT)
    return blocks

"""Tool results: text blocks become one text, other blocks become parts that are attached to the result's call.

The caller reads and writes single blocks, because the forms differ in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Part

__all__ = ["Layout", "read_blocks", "write_blocks"]

Layout = list[Any]
"""How a result's content is split: a length for a plain text block, {"n": length, "block": template} for one that
carries more, "+" for the next attached part."""

_JOINT = "\n"


def read_blocks(
    content: list[Any], call: str, where: str, read_block: Callable[[Any, str], Part]
) -> tuple[str, Layout, tuple[Part, ...]]:
    """The text of a result's blocks (joined by a line break), the lengths to split it again, and the other blocks."""
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
    """The blocks that `read_blocks` read, or None if the text or the attached parts have changed since."""
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

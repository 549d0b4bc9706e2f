"""What a prompt shares with the prompt before it: the one definition that all measures use.

Two consecutive prompts of a session are compared as they were rendered, block by block: a block is a text, a call or a result,
with its role and what else stands beside its text. What is equal from the beginning on, to the character, is *kept*. Its unit is
a token of four characters of text. The *share of the prefix kept* is what was kept over the tokens of the later prompt, summed
over all prompts that have one before them. *Read again* is what stands behind the first difference and was told before.

Neither the kernel's count of what it shipped nor any policy's estimate takes part.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

WORDS = "kept: share of the prefix kept; again: thousands of tokens read again after an edit; share: of those shipped"
"""What the columns of a table are."""


class Block(NamedTuple):
    """A part of a prompt: who speaks, what stands beside the text (names and ids), and the text."""

    role: str
    beside: str
    text: str


def blocks_of(prompt: Iterable[Mapping[str, Any]]) -> Iterator[Block]:
    """The blocks of a prompt in the chat form. Of a call of the shell the text is its command; of other calls there is none."""
    for message in prompt:
        role, content = str(message["role"]), message.get("content")
        beside = str(message.get("tool_call_id") or "")
        if isinstance(content, str):
            yield Block(role, beside, content)
        elif isinstance(content, list):
            texts = (part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
            yield from (Block(role, beside, text) for text in texts)
        for call in message.get("tool_calls") or ():
            arguments = json.loads(call["function"]["arguments"])
            command = arguments.pop("command", "") if isinstance(arguments, dict) else ""
            yield Block(role, json.dumps([call["id"], call["function"]["name"], arguments]), str(command))


def text_of(prompt: Iterable[Block]) -> str:
    """The text of a prompt, a line break between blocks."""
    return "\n".join(block.text for block in prompt)


def length_of(prompt: Iterable[Block]) -> int:
    """Characters of a prompt's text."""
    return sum(len(block.text) for block in prompt)


def common(one: Sequence[Block], other: Sequence[Block]) -> tuple[int, int]:
    """The equal beginning of two prompts: whole blocks, and characters of these and of the block that differs."""
    characters = 0
    for at, (here, there) in enumerate(zip(one, other, strict=False)):
        if here != there:
            if here[:2] == there[:2]:
                characters += _common_length(here.text, there.text)
            return at, characters
        characters += len(here.text)
    return min(len(one), len(other)), characters


def behind(prompt: Sequence[Block], blocks: int, characters: int) -> str:
    """The text of a prompt behind so many characters, which are all of its first `blocks` blocks and some of the next."""
    inner = characters - length_of(prompt[:blocks])
    return text_of(prompt[blocks:])[inner:]


def _common_length(one: str, other: str) -> int:
    """Characters of the equal beginning of two texts, found by bisection."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

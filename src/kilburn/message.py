"""Messages as Kilburn sees them: a role and parts, one neutral form for every provider's JSON.

A part is the unit that becomes a page. Both are plain, frozen data. The providers' own forms are in `kilburn.wire`.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

__all__ = ["Kind", "Message", "Part", "Role", "Trust"]


class Role(StrEnum):
    """Who speaks. A `developer` message is SYSTEM here; the wire form remembers the difference."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Kind(StrEnum):
    """What a part or page is."""

    TEXT = "text"
    IMAGE = "image"
    CALL = "call"
    RESULT = "result"
    REASONING = "reasoning"
    OPAQUE = "opaque"
    """A block of a provider that Kilburn carries without reading it."""
    FOLD = "fold"
    """A derived page that stands for its sources, with a text that was written: a summary, a memento."""
    EXCERPT = "excerpt"
    """A derived page whose text is spans of its sources, byte for byte."""
    FACT = "fact"
    """One statement that was noted or extracted, in a sentence; its parts are the page's `claim`."""
    ENTITY = "entity"
    """A person, place or thing that facts are about; its text is its name."""


class Trust(IntEnum):
    """How far a text may be believed, lowest first. A derived page has the lowest trust of its sources."""

    TOOL = 0
    """Output of tools, web pages, files: always data, never instructions."""
    AGENT = 1
    USER = 2
    OPERATOR = 3


TRUST_OF_ROLE = {
    Role.SYSTEM: Trust.OPERATOR,
    Role.USER: Trust.USER,
    Role.ASSISTANT: Trust.AGENT,
    Role.TOOL: Trust.TOOL,
}


class Part(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One part of a message, in the form that is hashed, counted, searched and recalled.

    Args:
        kind: TEXT, IMAGE, CALL, RESULT, REASONING or OPAQUE.
        text: the exact content. TEXT and REASONING: the text. CALL: the arguments exactly as the
            model wrote them (a JSON string). RESULT: the output as text. IMAGE: an URL, or a
            `data:` URL with the bytes in base64. OPAQUE: the block as JSON.
        call: CALL and RESULT: the call's id; an IMAGE inside a tool result: the id of that call.
        name: CALL: the tool's name.
        extra: what the wire form had beyond this, as a JSON object; None if it had nothing.
    """

    kind: Kind
    text: str
    call: str | None = None
    name: str | None = None
    extra: str | None = None


class Message(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """One message: a role and its parts, in order.

    Args:
        role: who speaks. Tool results are TOOL, also where a provider puts them into a user message.
        parts: at least one; an empty message is one empty TEXT part.
        extra: what the wire form had besides role and content, as a JSON object (its key `form` names the wire form,
            so that the original can be rebuilt exactly), or None.
        trust: None for the role's own trust. It may be lower than the role's; a higher one is an error.
        sources: page ids that this message's text was recalled from, or that an assistant's was answered from. What was
            recalled is not indexed again as if it were new.
        cites: pages of other segments of the tenant that it was recalled from: (number of the segment, page id). It is
            forgotten with them, and is not indexed either.
    """

    role: Role
    parts: tuple[Part, ...]
    extra: str | None = None
    trust: Trust | None = None
    sources: tuple[int, ...] = ()
    cites: tuple[tuple[int, int], ...] = ()

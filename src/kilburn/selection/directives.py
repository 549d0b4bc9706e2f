"""What an agent writes about its own context, in tags: a fold directive, an internal state.

Only well-formed tags count: opened once, closed once, in that order. Anything else is `Malformed`, with a
reason that quotes nothing of the reply. Whether a directive fits the steps of a window the policy checks.
"""

from __future__ import annotations

import msgspec


class Directive(msgspec.Struct, frozen=True):
    """Fold steps `compress_range[0]` to `compress_range[1]`, both included, into `compress_text`."""

    compress_range: tuple[int, int]
    compress_text: str


class Malformed(msgspec.Struct, frozen=True):
    """There is a directive or a state, but not in the right form."""

    why: str


_DECODER = msgspec.json.Decoder(Directive)


def within(text: str, tag: str) -> str | Malformed | None:
    """The text between `<tag>` and `</tag>`; None if neither tag is there."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    opened, closed = text.count(opening), text.count(closing)
    if not opened and not closed:
        return None
    if opened > 1 or closed > 1:
        return Malformed(f"{max(opened, closed)} times <{tag}>, where one is allowed")
    if not opened or not closed:
        return Malformed(f"<{tag}> is not {'closed' if opened else 'opened'}")
    start, end = text.index(opening) + len(opening), text.index(closing)
    return text[start:end] if start <= end else Malformed(f"<{tag}> is closed before it is opened")


def without(text: str, tag: str) -> str:
    """The text without the tags and what is between them; after a tag that is never closed, everything is left out."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    pieces: list[str] = []
    at = 0
    while (start := text.find(opening, at)) >= 0:
        pieces.append(text[at:start])
        end = text.find(closing, start)
        at = len(text) if end < 0 else end + len(closing)
    return "".join([*pieces, text[at:]])


def parse_directive(text: str) -> Directive | Malformed | None:
    """Return the fold directive of a reply: `<compress>{"compress_range": [a, b], "compress_text": "..."}</compress>`.

    A directive inside the reply's thinking, up to `</think>`, does not count.
    """
    content = within(text.rpartition("</think>")[2], "compress")
    return decode(content) if isinstance(content, str) else content


def decode(text: str) -> Directive | Malformed:
    """A directive from its JSON: two whole numbers, and a text."""
    try:
        directive = _DECODER.decode(text.encode("utf-8"))
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        field = str(error).rpartition(" - at ")[2] if isinstance(error, msgspec.ValidationError) else ""
        return Malformed(f"not a directive's JSON{f': {field}' if field.startswith('`$') else ''}")
    return directive if directive.compress_text.strip() else Malformed("a directive without words")


def parse_state(text: str) -> str | Malformed | None:
    """Return the internal state of a reply: `<IS>...</IS>`, or, without one, the `<think>...</think>` of MEM1's own code."""
    content = within(text, "IS")
    return within(text, "think") if content is None else content

"""From the window's tier to the messages that a provider takes.

What is rendered is exactly what was counted: resident pages, handles in place, and one line for
each stretch that is out. Between edits the prompt only grows at its end, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn.kernel.gaps import handle_of
from kilburn.kernel.tier import Tier, stub_of
from kilburn.message import Kind, Message, Part, Role
from kilburn.page import Page
from kilburn.wire import chat
from kilburn.wire import messages as anthropic

__all__ = ["PENDING", "Item", "Prompt", "items", "part_of", "render", "transcript"]

PENDING = "[no result]"
"""Stands for the result of a call that has none yet, or whose result was forgotten."""

Item = tuple[tuple[int, int, int], Page | None, str]
"""Where it stands, the page (None for a gap), and the text to show instead of it ("" for its own)."""


class Prompt(list[dict[str, Any]]):
    """A rendered prompt: a list of dicts.

    Attributes:
        system: for the "messages" form, where the system prompt stands beside the messages; else None.
        tokens: what it costs, by the process's counter.
        form: "chat" or "messages".
    """

    def __init__(self, messages: list[dict[str, Any]], *, system: Any, tokens: int, form: str) -> None:
        super().__init__(messages)
        self.system = system
        self.tokens = tokens
        self.form = form


def items(tier: Tier) -> list[Item]:
    """All that stands in the prompt, in order."""
    shown: list[Item] = [((*page.place, page.id), page, stub_of(page) if page.id in tier.stubs else "") for page in tier.visible()]
    shown += [((gap[0], 0, gap[0]), None, handle_of(gap)) for gap in tier.gaps]
    shown.sort(key=lambda item: item[0])
    return shown


def part_of(page: Page, text: str, extra: str) -> tuple[Part, str | None]:
    """The part that a page came from, and its message's leftovers where it was the message's first."""
    kept: dict[str, str] = msgspec.json.decode(extra) if extra else {}
    return Part(kind=page.kind, text=text, call=page.call, name=page.name, extra=kept.get("part")), kept.get("message")


def transcript(tier: Tier, part: Callable[[Page], tuple[Part, str | None]]) -> list[Message]:
    """The prompt as neutral messages: parts of one message joined again, every call with its result."""
    made: list[Message] = []
    waiting: dict[str, None] = {}
    key: tuple[Role, int] | None = None
    for _, page, instead in items(tier):
        role = Role.USER if page is None else page.role
        if waiting and role is not Role.TOOL and (page is None or page.message != (key or (0, 0))[1]):
            made.extend(_pending(waiting))
        if instead and page is not None and page.kind is Kind.IMAGE:
            continue  # an image inside a result whose call stays: the result's own text says enough
        shown, leftovers = _shown(page, instead, part, tier)
        if page is not None and page.message and key == (role, page.message):
            last = made[-1]
            made[-1] = msgspec.structs.replace(last, parts=(*last.parts, shown))
        else:
            made.append(Message(role=role, parts=(shown,), extra=leftovers))
        key = None if page is None else (role, page.message)
        if shown.kind is Kind.CALL and shown.call is not None:
            waiting[shown.call] = None
        elif shown.kind is Kind.RESULT and shown.call is not None:
            waiting.pop(shown.call, None)
    made.extend(_pending(waiting))
    return made


def _pending(waiting: dict[str, None]) -> Iterator[Message]:
    for call in list(waiting):
        yield Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text=PENDING, call=call),))
    waiting.clear()


def _shown(page: Page | None, instead: str, part: Callable[[Page], tuple[Part, str | None]], tier: Tier) -> tuple[Part, str | None]:
    if page is None:
        return Part(kind=Kind.TEXT, text=instead), None
    if instead:
        return Part(kind=page.kind, text=instead, call=page.call, name=page.name), None
    own, leftovers = part(page)
    if page.kind not in (Kind.FOLD, Kind.EXCERPT):
        return own, leftovers
    stands_for = tier.pages[page.sources[0]].kind if page.call is not None else Kind.TEXT
    if stands_for is Kind.CALL:
        short = msgspec.json.encode({"excerpt": own.text}).decode()
        return Part(kind=Kind.CALL, text=short, call=page.call, name=page.name), None
    if stands_for is Kind.RESULT:
        return Part(kind=Kind.RESULT, text=own.text, call=page.call, name=page.name), None
    return Part(kind=Kind.TEXT, text=own.text), None


def render(messages: list[Message], form: str, tokens: int) -> Prompt:
    """The provider's form of a transcript.

    Raises:
        SpecError: a form that is neither "chat" nor "messages".
    """
    if form == "chat":
        return Prompt(chat.render(messages), system=None, tokens=tokens, form=form)
    if form == "messages":
        system, rendered = anthropic.render(messages)
        return Prompt(rendered, system=system, tokens=tokens, form=form)
    raise SpecError(f"no format {form!r}", advice='use "chat" (OpenAI) or "messages" (Anthropic)')

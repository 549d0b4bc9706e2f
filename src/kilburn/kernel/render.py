"""Renders the window as messages for a provider.

What is rendered is exactly what was counted: resident pages, stubs, and one handle for each gap. Between edits the
prompt only grows at its end, byte for byte.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kilburn.errors import EmptyPrompt
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.folding import shown_part
from kilburn.kernel.window import PENDING, WindowState
from kilburn.message import Kind, Message, Part, Role
from kilburn.page import Page, searchable_words
from kilburn.wire.sent import unsigned

__all__ = ["Prompt"]

Item = tuple[tuple[int, int, int], Page | None, str]
"""Its place, the page (None for a gap), and the text to show instead of it ("" for its own)."""


class Prompt(list[dict[str, Any]]):
    """A rendered prompt: a list of dicts.

    Attributes:
        system: for the "messages" form, the system prompt; else None.
        tokens: what it costs, by the session's counter.
        form: "chat", "messages" or "responses".
        pages: ids of the pages whose text it shows. They are the sources of what a model makes of it.
    """

    def __init__(
        self, messages: list[dict[str, Any]], *, system: Any, tokens: int, form: str, pages: tuple[int, ...] = ()
    ) -> None:
        super().__init__(messages)
        self.pages = pages
        self.system = system
        self.tokens = tokens
        self.form = form


def to_send(prompt: Prompt) -> Prompt:
    """A prompt, for a model.

    Raises:
        EmptyPrompt: there is no message in it, and every provider would refuse it.
    """
    if not prompt:
        raise EmptyPrompt
    return prompt


def items(window: WindowState) -> list[Item]:
    """Everything in the prompt, in order."""
    entries: list[Item] = [
        ((*page.order, page.id), page, window.stub(page.id) if page.id in window.stubs else "") for page in window.visible()
    ]
    entries += [((gap[0], 0, gap[0]), None, window.handle(gap)) for gap in window.gaps]
    entries.sort(key=lambda item: item[0])
    return entries


def behind_compaction(entries: list[Item], window: WindowState) -> list[Item]:
    """Return the items with pins, folds and handles from before Anthropic's newest compaction right behind it: the provider
    ignores whatever stands before it. What the client said there stays, as the compaction stands for it."""
    place = next((at for at, (_, page, _) in enumerate(entries) if page is not None and page.id == window.compaction), None)
    if place is None:
        return entries
    pinned = {member for page in window.pins for member in (page, *window.group(page))}
    carried: list[Item] = []
    stay: list[Item] = []
    for item in entries[:place]:
        page = item[1]
        moves = page is None or ((page.id in pinned or page.id < 0) and page.role is not Role.SYSTEM)
        (carried if moves else stay).append(item)
    return [*stay, entries[place], *carried, *entries[place + 1 :]]


def part_of(page: Page, text: str, extra: str) -> tuple[Part, str | None]:
    """The part that a page came from, and its message's leftovers if it was the first part."""
    leftovers: dict[str, str] = msgspec.json.decode(extra) if extra else {}
    return Part(kind=page.kind, text=text, call=page.call, name=page.name, extra=leftovers.get("part")), leftovers.get("message")


def readable(page: Page, text: str, extra: str) -> str:
    """Return what can be read of a page as text: of an image what it is, of a provider's block also its text and that of its
    PDFs, of any other page the exact text. Spans of what a search finds are spans of this.

    Args:
        extra: the page's leftovers, as stored; "" for none.
    """
    if not page.is_atomic:
        return text
    words = capabilities.attachments.readable_text(text) if page.kind is Kind.OPAQUE else ""
    return searchable_words(extra) or (f"[{page.label}]\n{words}" if words else f"[{page.label}]")


def transcript(
    entries: list[Item], part: Callable[[Page], tuple[Part, str | None]], window: WindowState, unsigned_to: int = 0
) -> list[Message]:
    """The prompt as neutral messages: parts of one message joined again, every call with a result.

    A result that came late, and stands further down, is put after its call by the wire form.

    Args:
        entries: the window's items.
        unsigned_to: the last page whose reasoning and signatures are left out.
    """
    messages: list[Message] = []
    answered = {page.call for _, page, _ in entries if page is not None and page.role is Role.TOOL}
    key: tuple[Role, int] | None = None
    for _, page, instead in entries:
        if instead and page is not None and page.kind is not Kind.RESULT:
            continue  # something attached to a result whose call stays: the result's own handle is enough
        content, leftovers = _shown(page, instead, part, window)
        if page is not None and page.role is Role.ASSISTANT and page.id <= unsigned_to:
            if page.kind is Kind.REASONING:
                continue
            content, leftovers = msgspec.structs.replace(content, extra=unsigned(content.extra)), unsigned(leftovers)
        role = Role.USER if page is None else page.role
        if page is not None and page.message and key == (role, page.message):
            last = messages[-1]
            messages[-1] = msgspec.structs.replace(last, parts=(*last.parts, content), extra=last.extra or leftovers)
        else:
            messages.extend(_pending(messages, answered))
            messages.append(Message(role=role, parts=(content,), extra=leftovers))
        key = None if page is None else (role, page.message)
    messages.extend(_pending(messages, answered))
    return messages


def _pending(messages: list[Message], answered: set[str | None]) -> list[Message]:
    """`[no result]` for the last message's calls without a result in the prompt."""
    parts = messages[-1].parts if messages else ()
    calls = [part.call for part in parts if part.kind is Kind.CALL and part.call not in answered]
    return [Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text=PENDING, call=call),)) for call in calls]


def _shown(
    page: Page | None, instead: str, part: Callable[[Page], tuple[Part, str | None]], window: WindowState
) -> tuple[Part, str | None]:
    if page is None:
        return Part(kind=Kind.TEXT, text=instead), None
    if instead:
        return Part(kind=page.kind, text=instead, call=page.call, name=page.name), None
    content, leftovers = part(page)
    if page.kind not in (Kind.FOLD, Kind.EXCERPT):
        return content, leftovers
    return shown_part(page, content.text, window.pages), leftovers


def render(messages: list[Message], form: str, tokens: int) -> Prompt:
    """Return a transcript in a provider's form.

    Raises:
        SpecError: no such form.
    """
    system, rendered = capabilities.forms.render(messages, form)
    return Prompt(rendered, system=system, tokens=tokens, form=form)

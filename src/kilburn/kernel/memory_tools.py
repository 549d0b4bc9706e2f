"""The memory tools that a model is offered: `recall`, `search_memory`, `pin`, `remember`.

Recalled text is marked with its origin and age, and is data; it is never indexed again as if it were new (law 7). Bad
arguments give a text that says what to do, never an exception: the model reads it and tries again.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import Any

import msgspec

from kilburn.errors import KilburnError
from kilburn.kernel.process import Process
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import ToolSpec
from kilburn.page import Page, Place, parse_address
from kilburn.wire.quotation import nonce_of

__all__ = ["NAMES", "OFFERED", "OURS", "SPECS", "MemoryReply", "call"]

SPECS = (
    ToolSpec(
        name="recall",
        description=(
            "Read earlier pages of this session exactly as they were. Lines such as [p17-p42 out: ...] in the conversation are "
            "handles of pages that left your window. Long pages come in parts: go on with `offset`."
        ),
        parameters={
            "type": "object",
            "properties": {
                "address": {"type": "string", "description": "p17, a range p17-p42, f3, or b1/p17 of a branch"},
                "offset": {"type": "integer", "minimum": 0, "description": "first character to read, default 0"},
                "limit": {"type": "integer", "minimum": 1, "description": "characters to read at most"},
            },
            "required": ["address"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        name="search_memory",
        description="Search everything of this session, also what left your window, for words: names, paths, errors, numbers.",
        parameters={
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "the words to look for; rare ones count most"},
                "tokens": {"type": "integer", "minimum": 50, "description": "how much to return at most, default 1000"},
            },
            "required": ["query"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        name="pin",
        description="Keep pages in your window, word for word, until unpinned: what every later step depends on. Pins take room.",
        parameters={
            "type": "object",
            "properties": {
                "address": {"type": "string", "description": "p17 or a range p17-p42"},
                "unpin": {"type": "boolean", "description": "true to let them go again"},
            },
            "required": ["address"],
            "additionalProperties": False,
        },
    ),
    ToolSpec(
        name="remember",
        description="Keep a note, or mark pages as important so that they stay in your window longer.",
        parameters={
            "type": "object",
            "properties": {
                "note": {"type": "string", "description": "what to keep, in your own words"},
                "address": {"type": "string", "description": "pages to mark instead"},
                "importance": {
                    "type": "number",
                    "minimum": 0,
                    "maximum": 1,
                    "description": "1 (default) for what must stay longest",
                },
            },
            "additionalProperties": False,
        },
    ),
)
NAMES = frozenset(spec.name for spec in SPECS)

OFFERED = tuple(spec for spec in SPECS if spec.name in ("recall", "search_memory"))
"""The tools that the model of a client or of a framework is offered: they read, and move nothing."""

OURS = frozenset(spec.name for spec in OFFERED)


class MemoryReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a memory tool, and the pages that its text is from: `cites` are those of branches."""

    text: str
    sources: tuple[int, ...] = ()
    cites: tuple[tuple[int, int], ...] = ()

    def message(self, call: str) -> Message:
        """The tool result for a call's id; recalled text keeps its sources."""
        result = Part(kind=Kind.RESULT, text=self.text, call=call)
        return Message(role=Role.TOOL, parts=(result,), sources=self.sources, cites=self.cites)


class _Recall(msgspec.Struct, forbid_unknown_fields=True):
    address: str
    offset: int = 0
    limit: int | None = None


class _Search(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    tokens: int = 1000


class _Pin(msgspec.Struct, forbid_unknown_fields=True):
    address: str
    unpin: bool = False


class _Remember(msgspec.Struct, forbid_unknown_fields=True):
    note: str | None = None
    address: str | None = None
    importance: float = 1.0


def call(process: Process, name: str, arguments: str, call_id: str | None = None) -> MemoryReply:
    """Carry out a memory tool call.

    Args:
        arguments: JSON, as the model wrote it.
        call_id: the id of the call, which is in the process already; `remember` sets the importance of its text.
    """
    try:
        return _DO[name](process, arguments, call_id)
    except msgspec.ValidationError as error:
        return MemoryReply(text=f"error: {error}; see the parameters of {name}")
    except msgspec.DecodeError:
        return MemoryReply(text="error: the arguments are not JSON")
    except KilburnError as error:
        return MemoryReply(text=f"error: {error}")


def _decode(arguments: str, kind: Any) -> Any:
    return msgspec.json.decode(arguments or "{}", type=kind, strict=False)


def _recall(process: Process, arguments: str, call_id: str | None) -> MemoryReply:
    asked = _decode(arguments, _Recall)
    found = process.recall(asked.address)
    room = max(200, process.capacity)  # characters: about a quarter of the window
    limit = min(asked.limit or room, room)
    start = min(max(0, asked.offset), len(found))
    pieces: list[tuple[str, str]] = []
    sources: list[int] = []
    below = _below(process, found.process.name)
    at = 0
    for page, text in zip(found.pages, found.parts, strict=True):
        cut = text[max(0, start - at) : max(0, start + limit - at)]
        if cut or not text:
            pieces.append((f"{below}{page.address}, {origin_of(found.process, page)}", cut))
            sources.append(page.id)
        at += len(text)
    if not pieces:
        return MemoryReply(text=f"error: offset {asked.offset} is behind the end; {asked.address} has {at} characters")
    left = ""
    if start + limit < at:
        left = f"{at - start - limit} of {at} characters left: offset={start + limit}"
    return _reply(process, _told(pieces, left), [(found.process, page) for page in sources])


def _below(process: Process, name: str) -> str:
    """What stands before an address of a session: nothing for this one, `b1/` for a branch of it."""
    return name.removeprefix(f"{process.name}/") + "/" if name != process.name else ""


def _reply(process: Process, text: str, pages: Sequence[tuple[Process, int]]) -> MemoryReply:
    """A reply with the pages that its text is from. What a branch inherited is cited where it was made."""
    sources = [page for owner, page in pages if owner is process]
    cites = [(owner.kernel.lineage.owner(page), page) for owner, page in pages if owner is not process]
    here = process.kernel.info.number
    sources += [page for number, page in cites if number == here]
    return MemoryReply(
        text=text,
        sources=tuple(dict.fromkeys(sources)),
        cites=tuple(dict.fromkeys(key for key in cites if key[0] != here)),
    )


def _told(pieces: Sequence[tuple[str, str]], left: str = "") -> str:
    """Exact texts, each under its origin. The nonce in the headings occurs in none of the texts, so none can write a
    heading.

    Args:
        left: a last line, added by us.
    """
    nonce = nonce_of("".join(text for _, text in pieces))
    told = [f"[{nonce} {origin}]\n{text}" for origin, text in pieces]
    return "\n".join([*told, f"[{nonce} {left}]"] if left else told)


def origin_of(process: Process, page: Page) -> str:
    """Who said it, and when: `tool read, 2026-01-31 12:05 UTC`."""
    window = process.window
    who = f"tool {window.pages[page.answers].name}" if page.answers else str(page.role)
    when = dt.datetime.fromtimestamp(page.time, tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{who}, {when}" + (", superseded" if window.at(page.id) == Place.RETIRED else "")


def _search(process: Process, arguments: str, call_id: str | None) -> MemoryReply:
    asked = _decode(arguments, _Search)
    room = max(50, process.capacity // 4)
    hits = process.search(asked.query, tokens=min(asked.tokens, room))
    if not hits:
        return MemoryReply(text="nothing found; try other or fewer words")
    pieces: list[tuple[str, str]] = []
    found: list[tuple[Process, int]] = []
    for hit in hits:
        below = _below(process, hit.session)
        where = process.branch(below[:-1]) if below else process
        page = where.window.pages[parse_address(hit.address)[0]]
        start, end = hit.span
        pieces.append((f"{below}{hit.address} characters {start}-{end}, {origin_of(where, page)}", hit.text))
        found.append((where, page.id))
    return _reply(process, _told(pieces), found)


def _pin(process: Process, arguments: str, call_id: str | None) -> MemoryReply:
    asked = _decode(arguments, _Pin)
    if asked.unpin:
        process.unpin(asked.address)
        return MemoryReply(text=f"{asked.address} may leave the window again")
    process.pin(asked.address)
    return MemoryReply(text=f"{asked.address} stays in the window")


def _remember(process: Process, arguments: str, call_id: str | None) -> MemoryReply:
    asked = _decode(arguments, _Remember)
    if asked.address:
        process.remember(asked.address, asked.importance)
        return MemoryReply(text=f"{asked.address} is marked")
    if not asked.note:
        return MemoryReply(text="error: give a note, or an address")
    own = process.window.calls.get(call_id or "")
    if own is None:
        process.append({"role": "assistant", "content": asked.note})
        own = process.window.last
    page = process.window.pages[own]
    process.remember(page.address, asked.importance)
    return MemoryReply(text=f"kept at {page.address}")


_DO = {"recall": _recall, "search_memory": _search, "pin": _pin, "remember": _remember}

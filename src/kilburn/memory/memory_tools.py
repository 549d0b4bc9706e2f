"""The memory tools that a model is offered: `recall`, `search_memory`, `pin`, `note`, `remember`.

Recalled text is marked with its origin and age, and is data; it is never indexed again as if it were new (law 7). Bad
arguments give a text that says what to do, never an exception: the model reads it and tries again.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kilburn.backend import SegmentInfo, SegmentKind, State
from kilburn.collections.collection import MAX_ADDRESS_PAGES
from kilburn.errors import KernelError, KilburnError, UnknownAddress
from kilburn.kernel.render import readable
from kilburn.kernel.segment import Recalled
from kilburn.kernel.session import Session
from kilburn.kernel.store import DOCUMENT, MEMORY, NOTES
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import ToolSpec
from kilburn.page import Page, Place, parse_address
from kilburn.tokens.media import images_in
from kilburn.wire.plain import unpack
from kilburn.wire.quotation import nonce_of
from kilburn.wire.sent import form_of

TOKENS = 1000
"""What a search brings at most if its call does not say."""

ATTACHABLE = frozenset(
    {"document", "search_result", "file", "input_file", "input_image", "input_audio", "audio_url", "video_url", "input_video"}
)
"""Types of blocks that may stand in a tool result, or in a user's message behind it."""

EVERYWHERE = "*"
"""In place of a session's name: everything that may be read."""


SPECS = msgspec.json.decode(Path(__file__).with_name("memory_tools.json").read_bytes(), type=tuple[ToolSpec, ...])
NAMES = frozenset(spec.name for spec in SPECS)

_SEARCH_BEYOND = {
    "type": "string",
    "description": "another session or memory to search instead, or * for this session and all that you may read",
}
BEYOND = (
    msgspec.structs.replace(
        SPECS[0],
        description=SPECS[0].description + " Pages of another session, or of a memory, have its name before them: `work p17`.",
    ),
    msgspec.structs.replace(
        SPECS[1],
        parameters=SPECS[1].parameters | {"properties": SPECS[1].parameters["properties"] | {"session": _SEARCH_BEYOND}},
    ),
    *SPECS[2:],
)
"""The same tools, for an agent that may read other segments of its tenant too."""

OFFERED = tuple(spec for spec in SPECS if spec.name in ("recall", "search_memory"))
"""The tools that the model of a client or of a framework is offered: they read, and move nothing."""

OURS = frozenset(spec.name for spec in OFFERED)


class MemoryReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a memory tool, and the pages that its text is from: `cites` are those of branches."""

    text: str
    sources: tuple[int, ...] = ()
    cites: tuple[tuple[int, int], ...] = ()
    attached: tuple[Part, ...] = ()
    form: str | None = None
    """Images and provider's blocks that were recalled, and the wire form that they came in. A form whose tool results take no
    such block sends the text alone."""

    def message(self, call: str) -> Message:
        """Return the tool result for a call's id; recalled text keeps its sources."""
        result = Part(kind=Kind.RESULT, text=self.text, call=call)
        attached = tuple(msgspec.structs.replace(part, call=call) for part in self.attached)
        return Message(role=Role.TOOL, parts=(result, *attached), extra=self.form, sources=self.sources, cites=self.cites)


def without_gone(session: Session, messages: Sequence[Message]) -> list[Message]:
    """These messages, where what one of them was read from is forgotten meanwhile: a result that was read from such a page here,
    or from any page elsewhere, says so instead."""
    window = session.window

    def told(message: Message) -> Message:
        gone = any(page in window.pages and window.at(page) is Place.DROPPED for page in message.sources)
        if message.role is not Role.TOOL or not (gone or message.cites):
            return message
        return MemoryReply(text="[what was read here has just been forgotten]").message(message.parts[0].call or "")

    return [told(message) for message in messages]


class _Recall(msgspec.Struct, forbid_unknown_fields=True):
    address: str
    offset: int = 0
    limit: int | None = None


class _Search(msgspec.Struct, forbid_unknown_fields=True):
    query: str
    tokens: int = TOKENS
    session: str | None = None


class _Pin(msgspec.Struct, forbid_unknown_fields=True):
    address: str
    unpin: bool = False


class _Note(msgspec.Struct, forbid_unknown_fields=True):
    note: str | None = None
    address: str | None = None
    importance: float = 1.0


class _Remember(msgspec.Struct, forbid_unknown_fields=True):
    fact: str


Reach = Callable[[SegmentKind, str], bool]
"""Whether a segment beyond the session and its branches may be read: its kind, and its name as `named` gives it."""


def call(
    session: Session, name: str, arguments: str, call_id: str | None = None, reach: Reach = lambda kind, name: False
) -> MemoryReply:
    """Carry out a memory tool call.

    Args:
        arguments: JSON, as the model wrote it.
        call_id: the id of the call, which is in the session already; `note` sets the importance of its text.
        reach: which other segments of the tenant may be read, as a rule none. What may not be read is not found either.
    """
    try:
        return _DO[name](session, arguments, call_id, reach)
    except msgspec.ValidationError as error:
        return MemoryReply(text=f"error: {error}; see the parameters of {name}")
    except msgspec.DecodeError:
        return MemoryReply(text="error: the arguments are not JSON")
    except KilburnError as error:
        return MemoryReply(text=f"error: {error}")


def named(opened: Session, name: str, arguments: str) -> tuple[tuple[SegmentKind, str], ...]:
    """The segments beyond the session and its branches that a call names: kind and name; of a memory, the user, of a
    document, its own name. Whether they exist plays no part."""
    try:
        if name == "recall":
            away = _away(opened, _decode(arguments, _Recall).address)
            return () if away is None or _is_own(opened, away[0]) else (_parse_name(away[0]),)
        session = _decode(arguments, _Search).session if name == "search_memory" else None
    except (msgspec.ValidationError, msgspec.DecodeError):
        return ()
    return () if session in (None, EVERYWHERE) or _is_own(opened, session) else (_parse_name(session),)


def _parse_name(name: str) -> tuple[SegmentKind, str]:
    for kind, head in ((SegmentKind.MEMORY, MEMORY), (SegmentKind.DOCUMENT, DOCUMENT), (SegmentKind.NOTES, NOTES)):
        if name == head or name.startswith(f"{head}/"):
            return kind, name[len(head) + 1 :]
    return SegmentKind.SESSION, name


def _is_own(session: Session, name: str) -> bool:
    """Whether this is the session itself, or a branch below it."""
    if name.startswith(f"{session.name}/"):
        return any(info.name == name for info in session.branches.below())
    return name == session.name


def _away(session: Session, address: str) -> tuple[str, str] | None:
    """Return the name and address of a page beyond the session and its branches: `work p17`."""
    name, _, page_address = address.strip().rpartition(" ")
    try:
        parse_address(page_address)
    except UnknownAddress:
        return None
    try:
        parse_address(address.rpartition("/")[2])
    except UnknownAddress:
        return name.strip(), page_address
    return None


def _decode(arguments: str, kind: Any) -> Any:
    return msgspec.json.decode(arguments or "{}", type=kind, strict=False)


def _recall(session: Session, arguments: str, call_id: str | None, reach: Reach) -> MemoryReply:
    query = _decode(arguments, _Recall)
    away = _away(session, query.address)
    if away and not _is_own(session, away[0]):
        info = _readable_segment(session, away[0], reach)
        rows = _rows(session, info, away[1])
        texts = {"": ""} | session.backend.contents.texts(
            {digest for page, _ in rows for digest in (page.digest, page.extra) if digest}
        )
        pieces, indexes, remainder = _cut(
            query,
            session.prompts.capacity,
            [(_heading(info, page, state), readable(page, texts[page.digest], texts[page.extra])) for page, state in rows],
        )
        return MemoryReply(text=_told(pieces, remainder), cites=tuple((info.number, rows[index][0].id) for index in indexes))
    if away:
        below = _below(session, away[0])
        query = msgspec.structs.replace(query, address=f"{below}{away[1]}")
    recalled = session.recall(query.address)
    below = _below(session, recalled.session.name)
    attachments = {} if query.offset else _attachments(recalled, session.prompts.capacity // 2)
    texts_by_heading = []
    for index, (page, text) in enumerate(zip(recalled.pages, recalled.parts, strict=True)):
        if index in attachments and attachments[index][0][0].text == text:
            text = f"[{page.label}]"
        elif page.is_atomic:
            text = recalled.session.contents.readable_text(page.id)
        texts_by_heading.append((f"{below}{page.address}, {page_origin(recalled.session, page)}", text))
    pieces, indexes, remainder = _cut(query, session.prompts.capacity, texts_by_heading)
    reply = _reply(session, _told(pieces, remainder), [(recalled.session, recalled.pages[index].id) for index in indexes])
    attached = [attachments[index] for index in indexes if index in attachments]
    forms = [form for _, form in attached if form is not None]
    parts = tuple(part for attached_parts, _ in attached for part in attached_parts)
    return msgspec.structs.replace(reply, attached=parts, form=forms[0] if forms else None)


def _attachments(recalled: Recalled, room: int) -> dict[int, tuple[tuple[Part, ...], str | None]]:
    """Return what a tool result can show of the recalled images and provider's blocks, and fits so many tokens, by their index
    among the pages, with the wire form that it came in: the image, the block itself if its type may stand in a result, or the
    images in it."""
    attachments: dict[int, tuple[tuple[Part, ...], str | None]] = {}
    for index, page in enumerate(recalled.pages):
        if not page.is_atomic or page.tokens > room:
            continue
        part, leftovers = recalled.session.contents.part(page)
        if page.kind is Kind.IMAGE or unpack(part.text).get("type") in ATTACHABLE:
            attachments[index] = (part,), form_of(leftovers)
        elif images := images_in(part.text):
            attachments[index] = tuple(Part(kind=Kind.IMAGE, text=url) for url in images), None
        else:
            continue
        room -= page.tokens
    return attachments


def _cut(query: _Recall, capacity: int, texts: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str]], list[int], str]:
    """Return the requested stretch of pages' texts with their headings, the indexes of these pages, and a description of the
    remainder.

    Raises:
        KernelError: the offset is behind the end.
    """
    room = max(200, capacity)  # characters: about a quarter of the window
    limit = min(query.limit or room, room)
    start = min(max(0, query.offset), sum(len(text) for _, text in texts))
    pieces: list[tuple[str, str]] = []
    indexes: list[int] = []
    at = 0
    for index, (heading, text) in enumerate(texts):
        cut = text[max(0, start - at) : max(0, start + limit - at)]
        if cut or not text:
            pieces.append((heading, cut))
            indexes.append(index)
        at += len(text)
    if not pieces:
        raise KernelError(f"offset {query.offset} is behind the end", advice=f"{query.address} has {at} characters")
    remainder = f"{at - start - limit} of {at} characters left: offset={start + limit}" if start + limit < at else ""
    return pieces, indexes, remainder


def _readable_segment(session: Session, name: str, reach: Reach) -> SegmentInfo:
    """Another segment of the tenant; one that may not be read is as good as absent."""
    info = session.backend.segment(name, time=0.0, create=False) if reach(*_parse_name(name)) else None
    if info is None or info.kind != _parse_name(name)[0]:
        raise UnknownAddress(f"nothing called {name[:80]!r} can be read here", advice="see what search_memory finds")
    return info


def _rows(session: Session, info: SegmentInfo, address: str) -> list[tuple[Page, State]]:
    """Read pages of another segment from the store; no window changes."""
    first, last = parse_address(address)
    if last - first >= MAX_ADDRESS_PAGES:
        raise KernelError(f"{address} names {last - first + 1:,} pages", advice=f"name {MAX_ADDRESS_PAGES:,} at most")
    rows = session.backend.read((info.number, page) for page in range(first, last + 1))
    existing = [rows[key] for key in sorted(rows) if rows[key][1].at is not Place.DROPPED]
    if not existing:
        raise UnknownAddress(
            f"{address} does not exist in {info.name!r}, or was forgotten", advice="see what search_memory finds"
        )
    return existing


def _heading(info: SegmentInfo, page: Page, state: State) -> str:
    status = f", {state.at}" if state.at in (Place.RETIRED, Place.PROPOSED) else ""
    return f"{info.name} {page.address}, {page.role}, {_day(page.time)}{status}"


def _below(session: Session, name: str) -> str:
    """What stands before an address of a session: nothing for this one, `b1/` for a branch of it."""
    return name.removeprefix(f"{session.name}/") + "/" if name != session.name else ""


def _reply(session: Session, text: str, pages: Sequence[tuple[Session, int]]) -> MemoryReply:
    """Return a reply with the pages that its text is from. An inherited page of a branch is cited in the session that made it."""
    sources = [page for owner, page in pages if owner is session]
    cites = [(owner.contents.owner(page), page) for owner, page in pages if owner is not session]
    number_here = session.number
    sources += [page for number, page in cites if number == number_here]
    return MemoryReply(
        text=text,
        sources=tuple(dict.fromkeys(sources)),
        cites=tuple(dict.fromkeys(key for key in cites if key[0] != number_here)),
    )


def _told(pieces: Sequence[tuple[str, str]], remainder: str = "") -> str:
    """Exact texts, each under its origin. The nonce in the headings occurs in none of the texts, so none can write a
    heading.

    Args:
        remainder: a last line, added by us.
    """
    nonce = nonce_of("".join(text for _, text in pieces))
    blocks = [f"[{nonce} {origin}]\n{text}" for origin, text in pieces]
    return "\n".join([*blocks, f"[{nonce} {remainder}]"] if remainder else blocks)


def page_origin(session: Session, page: Page) -> str:
    """Return who said it, and when: `tool read, 2026-01-31 12:05 UTC`."""
    window = session.window
    who = f"tool {window.pages[page.answers].name}" if page.answers else str(page.role)
    return f"{who}, {_day(page.time)}" + (", superseded" if window.at(page.id) == Place.RETIRED else "")


def _day(time: float) -> str:
    return dt.datetime.fromtimestamp(time, tz=dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _search(session: Session, arguments: str, call_id: str | None, reach: Reach) -> MemoryReply:
    query = _decode(arguments, _Search)
    room = max(50, session.prompts.capacity // 2)
    if query.session is not None and query.session != session.name:
        return _search_away(session, query.query, query.session, min(query.tokens, room), reach)
    hits = session.search(query.query, tokens=min(query.tokens, room), unseen=query.session is None)
    if not hits:
        return MemoryReply(text="nothing found; try other or fewer words")
    pieces: list[tuple[str, str]] = []
    sources: list[tuple[Session, int]] = []
    for hit in hits:
        below = _below(session, hit.session)
        where = session.branches.open(below[:-1]) if below else session
        number = parse_address(hit.address)[0]
        if number not in where.window.pages:
            # Another program has just added it to the branch.
            where.ledger.refresh()
        page = where.window.pages[number]
        start, end = hit.span
        pieces.append((f"{below}{hit.address} characters {start}-{end}, {page_origin(where, page)}", hit.text))
        sources.append((where, page.id))
    return _reply(session, _told(pieces), sources)


def _search_away(opened: Session, query: str, session: str, tokens: int, reach: Reach) -> MemoryReply:
    """Search other segments of the tenant: exactly those that may be read."""

    def readable(info: SegmentInfo) -> bool:
        kind, name = _parse_name(info.name)
        return info.kind == kind and (_is_own(opened, info.name) or reach(kind, name))

    segments = opened.backend.segments()
    infos = [info for info in segments if session in (EVERYWHERE, info.name) and readable(info)]
    if not infos:
        raise UnknownAddress(f"nothing called {session[:80]!r} can be read here", advice="search for * or leave `session` out")
    hits = opened.search(query, tokens=tokens, among=infos)
    if not hits:
        return MemoryReply(text="nothing found; try other or fewer words")
    numbers = {info.name: info.number for info in infos}
    own_number = numbers.get(opened.name)
    keys = dict.fromkeys((numbers[hit.session], parse_address(hit.address)[0]) for hit in hits)
    pieces = [
        (f"{hit.reference} characters {hit.span[0]}-{hit.span[1]}, {hit.origin}, {_day(hit.time)}", hit.text) for hit in hits
    ]
    return MemoryReply(
        text=_told(pieces),
        sources=tuple(page for number, page in keys if number == own_number),
        cites=tuple(key for key in keys if key[0] != own_number),
    )


def _pin(session: Session, arguments: str, call_id: str | None, reach: Reach) -> MemoryReply:
    command = _decode(arguments, _Pin)
    if command.unpin:
        session.unpin(command.address)
        return MemoryReply(text=f"{command.address} may leave the window again")
    session.pin(command.address)
    return MemoryReply(text=f"{command.address} stays in the window")


def _note(session: Session, arguments: str, call_id: str | None, reach: Reach) -> MemoryReply:
    command = _decode(arguments, _Note)
    if command.address:
        session.rate(command.address, command.importance)
        return MemoryReply(text=f"{command.address} is marked")
    if not command.note:
        return MemoryReply(text="error: give a note, or an address")
    call_page = session.window.calls.get(call_id or "")
    if call_page is None:
        session.append({"role": "assistant", "content": command.note})
        call_page = session.window.last
    page = session.window.pages[call_page]
    session.rate(page.address, command.importance)
    return MemoryReply(text=f"kept at {page.address}")


def _remember(session: Session, arguments: str, call_id: str | None, reach: Reach) -> MemoryReply:
    fact = _decode(arguments, _Remember).fact
    memory = session._home.memory(session.info.user)
    address = memory.note(fact, session)
    waits = memory.collection.read(parse_address(address)[0])[1].at is Place.PROPOSED
    return MemoryReply(text=f"kept as {address}" + (", until a person accepts it" if waits else ""))


_DO = {"recall": _recall, "search_memory": _search, "pin": _pin, "note": _note, "remember": _remember}

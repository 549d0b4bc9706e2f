"""Sessions as JSONL. Importing an export and exporting it again gives the same file, byte for byte.

    {"kilburn": "session", "version": 1, "session": NAME, "created": SECONDS}
    {"same": {"session": NAME, "lines": N}}                the first N messages are those of that earlier session
    {"message": {...}, "time": SECONDS}                    a message as it was appended
    {"parts": [...], "role": ..., "time": SECONDS, ...}    a message that no wire form can express
    {"state": {"pinned": [...], "retired": [...], "marks": {...}}}

The original pages keep their addresses. A forgotten page is a `null` part, so that later pages keep their numbers. Folds and the
window are not exported, because they are made from the originals. An unknown line is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import msgspec

from kilburn.backend import SegmentInfo, check_name
from kilburn.errors import InvalidMessage, KilburnError, SpecError
from kilburn.event import Act
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import TRUST_OF_ROLE, Kind, Message, Part, Role, Trust
from kilburn.move import Drop, Retire
from kilburn.page import Page, Place, address_of, parse_address
from kilburn.terminal import line
from kilburn.wire.form import check_fit, dump, parse
from kilburn.wire.recording import Names, RecordedRun, SharedBeginning, is_run, parse_run, shared_beginning

VERSION = 1

Time = Annotated[float, msgspec.Meta(ge=0, le=253_402_214_400)]
"""Seconds since the epoch, up to the year 9999: the range of the store and of calendars."""


class Clock:
    """A clock that returns the time of a line of the file."""

    def __init__(self, time: float) -> None:
        self.now = time

    def __call__(self) -> float:
        """Return the time of the line."""
        return self.now


class ArchivedMessages(msgspec.Struct, kw_only=True):
    """The messages of one line, and the offsets of forgotten parts among theirs; 0 is the first part."""

    where: str
    messages: list[Message]
    time: float | None = None
    holes: list[int] = []


class _Header(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    kilburn: str
    version: int
    session: str
    created: Time


class _Appended(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message as it was appended."""

    message: dict[str, Any]
    time: Time


class _InParts(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message that no wire form can express, in Kilburn's own parts; a forgotten part is null."""

    parts: list[Part | None]
    role: Role
    time: Time
    kinds: list[Kind] = []
    calls: list[str | None] = []
    extra: str | None = None
    trust: Trust | None = None
    sources: list[str] = []


class _State(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pinned: list[str]
    retired: list[str]
    marks: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1)]]


class ArchivedSession(msgspec.Struct, kw_only=True):
    """A session of a file. An import gives its pages the same addresses. `where` is the line with its state."""

    name: str
    created: float | None = None
    entries: list[ArchivedMessages] = []
    state: _State | None = None
    where: str = ""


class SharedBeginnings:
    """Writes a beginning that several sessions of an export share only once.

    Only lines are compared, so exporting an import gives the same file. A line contains a time, so sessions that begin with the
    same line are branches of one history.
    """

    def __init__(self) -> None:
        self._shared: dict[bytes, dict[bytes, tuple[str, int]]] = {}
        # Sessions with a unique first line: the name, and a digest of each beginning.
        self._unique: dict[bytes, tuple[str, list[bytes]]] = {}

    def shortened(self, name: str, lines: list[bytes]) -> list[bytes]:
        """Replace the longest beginning that a session shares with an earlier one by a reference to that session. `lines` are
        those of `write`."""
        header, *messages, state = lines
        if not messages:
            return lines
        chain, digests = hashlib.sha256(), list[bytes]()
        for message in messages:
            chain.update(message)
            digests.append(chain.digest())
        first = digests[0]
        if first not in self._shared and first not in self._unique:
            self._unique[first] = name, digests
            return lines
        if first in self._unique:
            first_name, first_digests = self._unique.pop(first)
            self._shared[first] = {digest: (first_name, number) for number, digest in enumerate(first_digests, 1)}
        digest_origins = self._shared[first]
        shared = sum(digest in digest_origins for digest in digests)
        session, number = digest_origins[digests[shared - 1]]
        digest_origins.update((digest, (name, at)) for at, digest in enumerate(digests[shared:], shared + 1))
        same = msgspec.json.encode({"same": {"session": session, "lines": number}}) + b"\n"
        return [header, same, *messages[shared:], state]


def write(session: Session, info: SegmentInfo) -> Iterator[bytes]:
    """Yield the lines of a session, each with its line end."""
    encode = msgspec.json.Encoder().encode
    yield encode({"kilburn": "session", "version": VERSION, "session": info.name, "created": info.created}) + b"\n"
    waiting: list[tuple[Message, list[Page]]] = []
    for pages in _messages(session):
        remaining = [page for page in pages if session.window.at(page.id) != Place.DROPPED]
        session.contents.fetch(remaining)
        whole = len(remaining) == len(pages)
        waiting.append((_message(session, pages), pages))
        if whole and _goes_on(waiting[-1][0]):
            continue
        yield from (encode(line) + b"\n" for line in _lines(session, waiting))
        waiting = []
    yield from (encode(line) + b"\n" for line in _lines(session, waiting))
    states = [(page, state) for page, state in session.contents.pages() if page.id > 0]
    state = _State(
        pinned=[page.address for page, state in states if state.pinned],
        retired=[page.address for page, state in states if state.at == Place.RETIRED],
        marks={page.address: state.importance for page, state in states if state.importance},
    )
    yield encode({"state": state}) + b"\n"


def _messages(session: Session) -> Iterator[list[Page]]:
    """Yield the original pages, message by message."""
    tier = session.window
    pages: list[Page] = []
    for number in range(1, tier.last + 1):
        page = tier.pages[number]
        if pages and page.message != pages[0].message:
            yield pages
            pages = []
        pages.append(page)
    if pages:
        yield pages


def _goes_on(message: Message) -> bool:
    """Return whether the next message comes from the same dict."""
    return message.extra is not None and bool(msgspec.json.decode(message.extra).get("more"))


def _message(session: Session, pages: Sequence[Page]) -> Message:
    """Return the message as `parse` returned it, without its forgotten parts."""
    parts, extra = [], None
    for page in pages:
        if session.window.at(page.id) != Place.DROPPED:
            part, leftovers = session.contents.part(page)
            parts.append(part)
            extra = extra or leftovers
    first = pages[0]
    trust = None if first.trust == TRUST_OF_ROLE[first.role] else first.trust
    return Message(
        role=first.role, parts=tuple(parts), extra=extra, trust=trust, sources=tuple(page for page in first.sources if page > 0)
    )


def _lines(session: Session, group: Sequence[tuple[Message, list[Page]]]) -> Iterator[Any]:
    """Yield one line with the original dict if it contains everything, else a line for each message."""
    messages = [message for message, _ in group]
    if not messages:
        return
    at = session.window.at
    if all(at(page.id) != Place.DROPPED for _, pages in group for page in pages):
        original = _original(messages)
        if original is not None:
            yield {"message": original, "time": group[0][1][0].time}
            return
    for message, pages in group:
        remaining = iter(message.parts)
        parts = [None if at(page.id) == Place.DROPPED else next(remaining) for page in pages]
        holed = None in parts
        yield _InParts(
            parts=parts,
            role=message.role,
            time=pages[0].time,
            kinds=[page.kind for page in pages] if holed else [],
            calls=[_call_id(session, page) for page in pages] if holed else [],
            extra=message.extra,
            trust=message.trust,
            sources=[address_of(source) for source in message.sources],
        )


def _original(messages: list[Message]) -> dict[str, Any] | None:
    """Return the dict from which some messages were parsed, if parsing it gives the same messages again."""
    try:
        dicts = dump(messages)
        return dicts[0] if len(dicts) == 1 and parse(dicts[0]) == messages else None
    except InvalidMessage:
        return None


def _call_id(session: Session, page: Page) -> str | None:
    """Return the id of a call. If the call is forgotten, its result has the id; if both are, the id is made from the
    address."""
    tier = session.window
    call = page.id if page.kind is Kind.CALL else page.answers
    if page.call is not None or not call:
        return page.call
    # A message with reasoning is one group with all of its calls, so the group does not identify the call of a result.
    members = [tier.pages[member] for member in tier.groups.get(page.group, ())]
    ids = [member.call for member in members if member.call is not None and call in (member.id, member.answers)]
    name = f"forgotten {address_of(call)}"
    while name in tier.calls:
        name += "'"
    return ids[0] if ids else name


def gather(lines: Iterator[tuple[str, dict[str, Any]]], default_name: str, name: str | None = None) -> list[ArchivedSession]:
    """Return the sessions of a file: those of an export, one for each run, or one of plain messages, named `default_name`.

    Args:
        name: the name of the only session, instead of that in the file.

    Raises:
        InvalidMessage: a line is no part of an export, no run and no message.
        SpecError: `name` is no valid name of a session, or the file has several sessions.
    """
    if name is not None:
        check_name(name, "session")
    sessions: list[ArchivedSession] = []
    names = Names()
    shared = 0  # messages that sessions share with earlier ones
    whole = True  # whether the last session is complete
    for where, value in lines:
        if "kilburn" in value:
            sessions.append(_header(where, value, name))
            whole = False
        elif is_run(value) or (whole and "role" not in value):
            sessions.append(_recorded(parse_run(value, where, default_name), names, where, name))
            whole = True
        elif whole:
            sessions.append(ArchivedSession(name=name or names.given(_name(where, default_name))))
            whole = False
        if name is not None and len(sessions) > 1:
            raise SpecError(f"{where}: another session", advice="leave --session out")
        if whole or "kilburn" in value:
            continue
        if "same" in value:
            same = shared_beginning(value["same"], where, shared)
            sessions[-1].entries += _beginning(same, sessions, where)
            shared += same.lines
        elif "state" in value:
            sessions[-1].state, sessions[-1].where = _converted(value["state"], _State, where), where
        else:
            sessions[-1].entries.append(_entry(where, value))
    return sessions


def _beginning(same: SharedBeginning, sessions: Sequence[ArchivedSession], where: str) -> list[ArchivedMessages]:
    """Return the messages that a session shares with an earlier one.

    Raises:
        InvalidMessage: there is no such earlier session, it has too few messages, or the line is not the first one.
    """
    entries = next((item.entries for item in sessions[:-1] if item.name == same.session), [])
    if sessions[-1].entries or len(entries) < same.lines:
        raise InvalidMessage(
            f"{where}: there is no earlier session {same.session[:80]!r} with {same.lines} messages", advice="export it again"
        )
    return entries[: same.lines]


def _recorded(run: RecordedRun, names: Names, where: str, name: str | None) -> ArchivedSession:
    """Return a recorded run as a session."""
    if not run.messages:
        raise InvalidMessage(f"{where}: a run without messages", advice="leave it out")
    session = ArchivedSession(name=name or names.given(_name(where, run.name)))
    for number, message in enumerate(run.messages, start=1):
        session.entries.append(_entry(f"{where}, message {number}", message))
    return session


def _header(where: str, value: dict[str, Any], name: str | None) -> ArchivedSession:
    version = value.get("version")
    if version != VERSION:
        raise InvalidMessage(
            f"{where}: an export of version {version!r}, this Kilburn reads {VERSION}",
            advice="use the Kilburn that wrote it, or a newer one",
        )
    header = _converted(value, _Header, f"{where}: the header")
    return ArchivedSession(name=name or _name(where, header.session), created=header.created)


def _name(where: str, name: str) -> str:
    """Check the name of a session in a file, more strictly than a name that a program chooses."""
    try:
        check_name(name, "session")
    except SpecError as error:
        raise InvalidMessage(f"{where}: {error.what}", advice="name it with --session") from None
    if line(name) != name:
        raise InvalidMessage(f"{where}: the session name {name[:40]!r} has invisible characters", advice="name it with --session")
    return name


def _entry(where: str, value: dict[str, Any]) -> ArchivedMessages:
    try:
        if "parts" in value:
            return _from_parts(where, _converted(value, _InParts, where))
        if "role" in value:
            return ArchivedMessages(where=where, messages=parse(value))
        appended = _converted(value, _Appended, where)
        return ArchivedMessages(where=where, messages=parse(appended.message), time=appended.time)
    except KilburnError as error:
        if not error.what.startswith(where):
            error.add_note(f"in {where}")
        raise


def _from_parts(where: str, line: _InParts) -> ArchivedMessages:
    holes = [offset for offset, part in enumerate(line.parts) if part is None]
    if holes and not len(line.kinds) == len(line.calls) == len(line.parts):
        raise InvalidMessage("a line has forgotten parts without their kinds", advice="export it again")
    parts = [_hole(line.kinds[at], line.calls[at]) if part is None else part for at, part in enumerate(line.parts)]
    sources = tuple(parse_address(source)[0] for source in line.sources)
    # A message of forgotten parts only has no `extra`.
    message = Message(role=line.role, parts=tuple(parts), extra=line.extra, trust=line.trust, sources=sources)
    messages = parse(message)
    check_fit(message, where)
    return ArchivedMessages(where=where, messages=messages, time=line.time, holes=holes)


def _hole(kind: Kind, call: str | None) -> Part:
    """Return a placeholder for a forgotten part, which is forgotten again after the import."""
    if kind is Kind.CALL and call is not None:
        return Part(kind=Kind.CALL, text="{}", call=call, name="forgotten")
    if kind is Kind.RESULT and call is not None:
        return Part(kind=Kind.RESULT, text="", call=call)
    if kind is Kind.OPAQUE:
        return Part(kind=Kind.OPAQUE, text='{"type":"forgotten"}', call=call)
    return Part(kind=kind if kind in (Kind.REASONING, Kind.IMAGE) else Kind.TEXT, text="", call=call)


def _converted(value: Any, kind: Any, where: str) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise InvalidMessage(f"{where}: {error}", advice="export it again") from None


def rebuild(store: Store, clock: Clock, saved: ArchivedSession) -> Session:
    """Create a session from an archive: its pages at their addresses, with their times, trust, pins and marks.

    Raises:
        WireError, KernelError: a message does not fit its place. The error names the line.
    """
    start = clock.now
    clock.now = start if saved.created is None else saved.created
    session = store.session(saved.name)
    holes: list[int] = []
    with session.edits.batch() as kernel:
        for entry in saved.entries:
            clock.now = start if entry.time is None else entry.time
            try:
                first, _ = kernel.take_in(entry.messages, entry.time)
            except KilburnError as error:
                error.add_note(f"in {entry.where}")
                raise
            holes += [first + hole for hole in entry.holes]
    try:
        with session.edits.batch() as kernel:
            if holes:
                kernel.carry(Drop(pages=tuple(holes), why="forgotten before it was exported"))
            if saved.state is not None:
                _restore(session, kernel, saved.state)
    except KilburnError as error:
        error.add_note(f"in {saved.where or saved.name}")
        raise
    clock.now = start
    return session


def _restore(session: Session, kernel: Kernel, state: _State) -> None:
    """Restore which pages are retired or pinned, and their importance."""
    resolve = session.contents.resolve
    kernel.mark(Act.UNPIN, sorted(kernel.window.pins))
    retired = [page for address in state.retired for page in resolve(address)]
    if retired:
        kernel.carry(Retire(pages=tuple(retired)))
    for address in state.pinned:
        kernel.mark(Act.PIN, resolve(address))
    for address, importance in state.marks.items():
        kernel.mark(Act.RATE, resolve(address), importance=importance)

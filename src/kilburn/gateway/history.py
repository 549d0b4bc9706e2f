"""Which session a client's history continues, and what of it is new.

Clients resend everything. Each message has a digest of what it says: not of ids, of marks for a cache, or of reasoning, which
clients and gateways rewrite. The chained digests of a history lead to the process of which it is the continuation. What is new
is appended. A history that says something else from some point on gets a process of its own, with the part that both have in
common; nothing is overwritten. All this can be worked out again from the processes: what is in memory here is a cache.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from kilburn.errors import SpecError, StoreStale
from kilburn.event import Act
from kilburn.gateway.form import Asked, Form, listed
from kilburn.gateway.problems import Problem
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.message import Kind, Message, Role
from kilburn.wire.digests import HIDDEN, canonical

__all__ = ["Histories", "Session"]

SESSIONS = 256
"""Sessions that are kept in memory, for each tenant."""

KNOWN = 200_000
"""Messages whose digests are kept in memory, for each tenant."""

MEMOS = 64 << 20
"""Bytes of histories that are kept in memory, for each tenant."""

FORKS = 32
"""Sessions of one beginning that are read again after a restart, newest first."""

BESIDE = 8
"""System prompts and lists of tools whose cost is remembered, for each session."""

NEWEST = 8
"""Sessions that are read again after a restart to see whether a client has compacted one of them."""

QUOTE = 80
"""Characters by which a reply is recognised in the message of a client that made it the beginning of its next session."""

Said = tuple[bool, bytes]
"""Whether the assistant says it, and its digest."""


def _chained(digests: Iterable[bytes], start: bytes = b"") -> Iterator[bytes]:
    for digest in digests:
        start = hashlib.blake2b(start + digest, digest_size=16).digest()
        yield start


class Session:
    """What is known in memory of one session.

    Args:
        process: the process.
        root: the name that it was asked for by, or that its first message gives; forks have the same.
        digests: of all that the client sees of it.
        answered: whether it holds calls of our own.
        earlier: sessions that the client made this one of, newest first.
    """

    def __init__(
        self, process: Process, root: str, digests: Sequence[bytes], *, answered: bool, earlier: tuple[str, ...]
    ) -> None:
        self.process, self.root, self.earlier = process, root, earlier
        self.digests = list(digests)
        self.chain = list(_chained(self.digests))
        self.answered = answered
        self._costs: dict[bytes, int] = {}
        self.busy = False
        self.prefilled = False
        self.spoken: list[Message] = []
        """What was said in the request that goes on now."""
        self.last = ""
        """The last reply, by which the client's own compaction is recognised."""

    @property
    def name(self) -> str:
        """The session's name."""
        return self.process.name

    @property
    def user(self) -> str:
        """Whose it is."""
        return self.process.kernel.info.user

    @property
    def whole(self) -> bool:
        """Whether the client's own messages are exactly what is in the window: nothing has left, and nothing is hidden."""
        window = self.process.window
        return not self.answered and not window.last_derived and not window.stubs and len(window.shown) == window.last

    def cost(self, raw: bytes) -> int:
        """Tokens of what is sent beside the conversation."""
        known = self._costs.get(raw)
        if known is None:
            if len(self._costs) >= BESIDE:
                self._costs.clear()
            known = self._costs[raw] = self.process.counter.count(raw.decode("utf-8", "replace"))
        return known

    def extend(self, digests: Sequence[bytes]) -> None:
        """Add what was appended."""
        self.chain += _chained(digests, self.chain[-1] if self.chain else b"")
        self.digests += digests


class Memo:
    """The bytes of the history of a session's last request.

    Args:
        of: the form, the client's name of the session, and the user.
        asked: the request.
        digests: how many digests the session had then.
    """

    def __init__(self, session: Session, of: tuple[str, str | None, str], asked: Asked, digests: int) -> None:
        self.session, self.of, self.digests = session, of, digests
        self.prefix = asked.history.removesuffix(b"]").rstrip()
        self.lead = asked.lead


class Histories:
    """The sessions of one tenant, by what they say.

    Safe to use from several threads.
    """

    def __init__(self, hierarchy: Hierarchy, messages: int = 100_000) -> None:
        self.hierarchy = hierarchy
        self._messages = messages
        self._lock = threading.RLock()
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._known: OrderedDict[bytes, tuple[Said, ...]] = OrderedDict()
        self._memos: OrderedDict[str, Memo] = OrderedDict()
        self._kept = 0
        self._warm: set[str] = set()
        self._seen: set[tuple[str, str]] = set()
        """Roots, each with its user, whose sessions in the store were read since the start."""

    # What a history says

    def digests(self, form: Form, raws: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
        """The digests of a history, and for each how many of the messages it ends.

        Raises:
            WireError: a message is none.
        """
        with self._lock:
            said = [self._said(form, raw) for raw in raws]
        digests: list[bytes] = []
        ends: list[int] = []
        at = 0
        while at < len(said):
            end = at + 1
            spoken = [one for one in said[at] if one[0]]
            if spoken and spoken[-1] is said[at][-1]:
                while end < len(said) and said[end] and said[end][0][0]:
                    end += 1
            if end - at > 1:
                found = canonical([message for raw in raws[at:end] for message in form.read(raw)])
            else:
                found = [digest for _, digest in said[at]]
            digests += found
            ends += [end] * len(found)
            at = end
        return digests, ends

    def _said(self, form: Form, raw: bytes) -> tuple[Said, ...]:
        key = hashlib.blake2b(raw, digest_size=16, person=form.name.encode()[:16]).digest()
        known = self._known.get(key)
        if known is None:
            messages = form.read(raw)
            spoken = bool(messages) and messages[-1].role is Role.ASSISTANT
            known = tuple((spoken, digest) for digest in canonical(messages))
            self._known[key] = known
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return known

    # Which session it continues

    def take(self, form: Form, asked: Asked, name: str | None, user: str) -> Session:
        """The session that a request continues, with what is new appended; it is busy until `give`.

        Args:
            name: what the client calls it, or None.
            user: of the tenant, whose it is.

        Raises:
            WireError: a message is none, or cannot follow. SpecError: no name of a session. StoreError.
        """
        for attempt in (1, 2):
            found = self._remembered(form, asked, name, user) if attempt == 1 else None
            session, raws, digests = found or self._found(form, asked, name, user)
            try:
                if len(session.digests) + len(raws) > self._messages:
                    raise Problem(413, "too_many_messages", f"a history may have {self._messages:,} messages", param="messages")
                fresh = [message for raw in raws for message in form.read(raw)]
                session.prefilled = bool(fresh) and fresh[-1].role is Role.ASSISTANT
                if fresh:
                    session.process.append(*following(fresh, session.process))
                    session.extend(digests)
                self._remember(session, form, asked, name)
                return session
            except StoreStale:
                # Another gateway went on with it: it is read again, once.
                self.lose(session)
                if attempt == 2:
                    raise
            except BaseException:
                session.busy = False
                if not session.process.window.last:
                    # Nothing is left of a session that never began.
                    self.lose(session)
                    self.hierarchy.forget(session=session.name)
                raise
        raise AssertionError("a session is claimed or an error is raised")

    def _found(self, form: Form, asked: Asked, name: str | None, user: str) -> tuple[Session, list[bytes], list[bytes]]:
        """The session that a history continues; what is new of it, and its digests."""
        form.split(asked)
        if name and not name.isprintable():
            raise SpecError("a session name with control characters", advice="leave them out")
        digests, ends = self.digests(form, asked.messages)
        session, common = self._claim(name or _root(user, digests), user, digests, asked, form)
        return session, asked.messages[ends[common - 1] if common else 0 :], digests[common:]

    def _remembered(
        self, form: Form, asked: Asked, name: str | None, user: str
    ) -> tuple[Session, list[bytes], list[bytes]] | None:
        """The same for a history that begins, byte for byte, as that of an earlier request: only what follows is read."""
        history = asked.history
        with self._lock:
            best = max(
                (memo for memo in self._memos.values() if memo.of == (form.name, name, user) and history.startswith(memo.prefix)),
                key=lambda memo: len(memo.prefix),
                default=None,
            )
            if best is None or best.session.busy:
                return None
            rest = history[len(best.prefix) :].lstrip()
            session, raws = best.session, _rest(b"[" + rest.removeprefix(b","))
            digests, ends = self.digests(form, raws)
            since = session.digests[best.digests :]
            if len(digests) < len(since) or digests[: len(since)] != since:
                return None
            session.busy = True
            self._sessions.move_to_end(session.name)
            asked.lead = best.lead
            return session, raws[ends[len(since) - 1] if since else 0 :], digests[len(since) :]

    def _remember(self, session: Session, form: Form, asked: Asked, name: str | None) -> None:
        """Keep the bytes of a history, by which the next one is recognised."""
        with self._lock:
            self._forget(session.name)
            if session.prefilled or len(asked.history) > MEMOS:
                return
            memo = Memo(session, (form.name, name, session.process.kernel.info.user), asked, len(session.digests))
            self._memos[session.name] = memo
            self._kept += len(memo.prefix)
            while self._kept > MEMOS:
                self._forget(next(iter(self._memos)))

    def _forget(self, name: str) -> None:
        memo = self._memos.pop(name, None)
        if memo is not None:
            self._kept -= len(memo.prefix)

    def give(self, session: Session) -> None:
        """Its request is over."""
        spoken, session.spoken = session.spoken, []
        if session.prefilled and spoken:
            # The client sees it as one message with what it began itself.
            self.lose(session)
            return
        session.extend(canonical(spoken))
        session.last = _text_of(spoken)
        session.busy = False

    def lose(self, session: Session) -> None:
        """Keep nothing of a session in memory; it is read again from the store when it is asked for."""
        with self._lock:
            session.busy = False
            self._sessions.pop(session.name, None)
            self._forget(session.name)
            self._seen.discard((session.root, session.user))
            self.hierarchy.release(session.name)

    def _claim(self, root: str, user: str, digests: Sequence[bytes], asked: Asked, form: Form) -> tuple[Session, int]:
        """A session for a history, not busy with another request, and how many of its digests it has."""
        with self._lock:
            if (root, user) not in self._seen:
                self._read_again(root, user)
                self._seen.add((root, user))
            chain = list(_chained(digests))
            family = [session for session in self._sessions.values() if session.root == root and session.user == user]
            ends = {session.chain[-1]: session for session in family if session.chain and not session.busy}
            for at in range(len(chain), 0, -1):
                found = ends.get(chain[at - 1])
                if found is not None and len(found.chain) == at:
                    found.busy = True
                    self._sessions.move_to_end(found.name)
                    return found, at
            return self._fork(root, user, digests, chain, family, form, asked)

    def _fork(
        self,
        root: str,
        user: str,
        digests: Sequence[bytes],
        chain: Sequence[bytes],
        family: Sequence[Session],
        form: Form,
        asked: Asked,
    ) -> tuple[Session, int]:
        """A new session, with what it has in common with the nearest one."""
        parent, common = None, 0
        for session in family:
            shared = _common(session.chain, chain)
            if shared > common:
                parent, common = session, shared
        earlier = () if parent is None else parent.earlier
        before = self._compacted(form, asked, user, digests, common, parent)
        if before is not None:
            earlier = (before.name, *before.earlier)
        process = self.hierarchy.process(self._free_name(root), user)
        session = Session(process, root, (), answered=False, earlier=earlier)
        session.busy = True
        if parent is not None and parent.answered:
            kept = _kept(parent.process, common)
            process.append(*kept)
            session.extend(digests[:common])
            session.answered = True
        else:
            common = 0
        if parent is not None:
            process.record(Act.NOTE, policy="gateway", forked=parent.name)
        if earlier:
            process.record(Act.NOTE, policy="gateway", continues=list(earlier))
        self._sessions[process.name] = session
        self._trim()
        return session, common

    def _compacted(
        self, form: Form, asked: Asked, user: str, digests: Sequence[bytes], common: int, parent: Session | None
    ) -> Session | None:
        """The session that a client has compacted into this history by itself: the history quotes its last reply, the summary,
        or goes on with its last messages behind something else."""
        if user not in self._warm:
            self._warm.add(user)
            self._read_newest(user)
        tail = digests[-3:-1] if len(digests) > 3 else ()
        texts: list[str] | None = None
        for session in reversed(self._sessions.values()):
            if session.process.kernel.info.user != user or session.busy:
                continue
            if session is parent and not set(digests[common:]).isdisjoint(session.digests[common:]):
                return session
            if session is not parent and tail and _holds(session.digests, tail):
                return session
            if len(session.last) >= 2 * QUOTE:
                texts = _opening(form, asked) if texts is None else texts
                if _quoted(session.last, texts):
                    return session
        return None

    def _read_newest(self, user: str) -> None:
        """Read the sessions that were used last before a restart."""
        infos = sorted(self.hierarchy.processes(), key=lambda info: info.used)
        for info in [info for info in infos if info.user == user and not info.damaged][-NEWEST:]:
            if info.name not in self._sessions:
                self._sessions[info.name] = self._opened(info.name, info.name.partition("~")[0], user)

    def _free_name(self, root: str) -> str:
        return _numbered(root, self._forks(root) + 1)

    def _forks(self, root: str) -> int:
        """How many sessions of a root the store has; they are counted from 1, so that few questions find the last."""
        low, high = 0, 1
        while self._stored(_numbered(root, high)):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._stored(_numbered(root, middle)) else (low, middle)
        return low

    def _stored(self, name: str) -> bool:
        return self.hierarchy.store.process(name, time=0.0, create=False) is not None

    def _read_again(self, root: str, user: str) -> None:
        """Read a user's sessions of a root from the store, the newest ones."""
        last = self._forks(root)
        for name in [_numbered(root, number) for number in range(max(1, last - FORKS + 1), last + 1)]:
            info = self.hierarchy.store.process(name, time=0.0, create=False)
            if info is not None and info.user == user and name not in self._sessions:
                self._sessions[name] = self._opened(name, root, user)
        self._trim()

    def _opened(self, name: str, root: str, user: str) -> Session:
        process = self.hierarchy.process(name, user)
        earlier = tuple(name for event in process.events() if event.act is Act.NOTE for name in event.data.get("continues", ()))
        answered = any(call.startswith(HIDDEN) for call in process.window.calls)
        messages = process.originals()
        session = Session(process, root, canonical(messages), answered=answered, earlier=earlier)
        if messages and messages[-1].role is Role.ASSISTANT:
            session.last = _text_of(messages[-1:])
        return session

    def _trim(self) -> None:
        while len(self._sessions) > SESSIONS:
            session = next((each for each in self._sessions.values() if not each.busy), None)
            if session is None:
                return
            self.lose(session)

    def said(self, session: Session, messages: Sequence[Message]) -> None:
        """Append what the model said and what it was answered here."""
        try:
            session.process.append(*following(messages, session.process))
        except StoreStale:
            # Another writer went on with it. If it says the same still, only its window is another.
            self.lose(session)
            process = self.hierarchy.process(session.name)
            if canonical(process.originals()) != session.digests + canonical(session.spoken):
                raise
            process.append(*following(messages, process))
            session.process = process
        session.spoken += messages
        session.answered = session.answered or any(
            (part.call or "").startswith(HIDDEN) for message in messages for part in message.parts
        )


def _rest(raw: bytes) -> list[bytes]:
    return [] if raw == b"[]" else listed(raw, "messages")


def _text_of(messages: Iterable[Message]) -> str:
    return "".join(part.text for message in messages for part in message.parts if part.kind is Kind.TEXT)


def _holds(digests: Sequence[bytes], tail: Sequence[bytes]) -> bool:
    """Whether two messages stand behind each other in a session."""
    first, second = tail
    return any(one == first and other == second for one, other in itertools.pairwise(digests))


def _opening(form: Form, asked: Asked) -> list[str]:
    """The texts of the user with which a history begins."""
    messages = [message for raw in asked.messages[:3] for message in form.read(raw)]
    return [_text_of([message]) for message in messages if message.role is Role.USER]


def _quoted(reply: str, texts: Sequence[str]) -> bool:
    """Whether two of three stretches of a reply are in a text."""
    ends = [len(reply) * share // 8 for share in (1, 4, 6)]
    stretches = [reply[start : start + QUOTE].strip() for start in ends]
    return any(sum(stretch in text for stretch in stretches) >= 2 for text in texts)


def _common(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many members two chains have in common; a chained digest says all that came before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _numbered(root: str, number: int) -> str:
    return root if number == 1 else f"{root}~{number}"


def _root(user: str, digests: Sequence[bytes]) -> str:
    first = digests[0] if digests else b""
    return f"chat-{hashlib.blake2b(user.encode() + bytes(1) + first, digest_size=8).hexdigest()}"


def _kept(process: Process, common: int) -> list[Message]:
    """The first messages of a process, with hidden ones, of which the client sees so many."""
    messages = process.originals()
    for end in range(len(messages), -1, -1):
        if len(canonical(messages[:end])) <= common:
            return messages[:end]
    return []


def following(messages: Sequence[Message], process: Process) -> list[Message]:
    """The messages with call ids that are their own in this process.

    Some models count their calls from 0 in every reply. A call whose id is taken gets another one, and so does its result,
    which answers the latest call of that id.
    """
    known = process.window.calls
    seen: set[str] = set()
    latest: dict[str, str] = {}
    out = []
    for message in messages:
        parts = []
        for part in message.parts:
            call = part.call
            if call and part.kind is Kind.CALL:
                number, new = 1, call
                while new in known or new in seen:
                    number += 1
                    new = f"{call}_{number}"
                seen.add(new)
                latest[call] = new
                part = part if new == call else msgspec.structs.replace(part, call=new)
            elif call:
                new = latest.get(call) or _latest(call, known)
                part = part if new == call else msgspec.structs.replace(part, call=new)
            parts.append(part)
        out.append(message if tuple(parts) == message.parts else msgspec.structs.replace(message, parts=tuple(parts)))
    return out


def _latest(call: str, known: Any) -> str:
    number, found = 1, call
    while f"{call}_{number + 1}" in known:
        number += 1
        found = f"{call}_{number}"
    return found

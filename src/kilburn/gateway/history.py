"""Finds the session that a client's history continues, and appends what is new.

Clients resend the whole conversation. Each message has a digest of its content, without ids, cache marks and reasoning, which
clients and gateways rewrite. The chain of a history's digests identifies the session that it continues. A history that differs
from some message on becomes a branch, which has the common messages; nothing is overwritten. The state in memory is a cache: the
sessions themselves have everything that it is made of.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import takewhile
from typing import NamedTuple

import msgspec

from kilburn.backend import Digests, HistoryOwner, SegmentInfo, root_name
from kilburn.errors import (
    Forgotten,
    KilburnError,
    OrphanResult,
    SpecError,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreStale,
    StoreUnavailable,
)
from kilburn.event import Act
from kilburn.gateway.conversations import (
    Conversation,
    brought_over,
    check_attachments,
    copy_messages,
    last_reply,
    renamed,
    said_after,
    turn_after,
    turn_before_reply,
)
from kilburn.gateway.form import Form, ParsedRequest, listed
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.problems import Problem
from kilburn.gateway.repeats import Hold
from kilburn.gateway.replies import ReplyPlace, ReplyPlaces
from kilburn.gateway.sayings import WIDTH, Sayings, message_key
from kilburn.kernel.branches import BRANCH, origin_in
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store, session_of
from kilburn.memory.brought import keep
from kilburn.message import Kind, Message, Part, Role
from kilburn.page import Place
from kilburn.tracing import compacting
from kilburn.wire.digests import HIDDEN, canonical, is_spoken, visible
from kilburn.wire.histories import (
    OPENING,
    chain_seed,
    chained,
    find_summary,
    index_places,
    is_linkable,
    is_own,
    json_texts,
    session_end,
    shared,
    tails,
)
from kilburn.wire.sent import is_compaction

log = logging.getLogger("kilburn.gateway")

BOUNDS = RequestBounds()

SESSIONS = 256
"""Maximum number of sessions in memory, for each tenant."""

MESSAGE = 150
"""Bytes that the digests of one message take in such a session."""

FORKS = 32
"""Maximum number of sessions with the same messages that are compared with one request: the newest, or the last used."""

NEWEST = 8
"""Number of a user's newest sessions that are read after a restart, because a client may have compacted one of them."""

WARM = 10_000
"""Maximum number of users whose newest sessions are known to have been read."""

LEADS = 1_000
"""Maximum number of system prompts that are known to contain no summary; later replies cannot be in them."""

SUMMED = 32
"""Number of last used sessions whose last reply is searched for in a new history."""

LINKED = 16
"""Maximum number of earlier sessions that a search covers."""

MAX_NAME_CHARS = 200
"""Maximum length of a client's name for a session, in characters."""

PAUSES = (0.005, 0.02, 0.08, 0.3, 1.0)
"""Seconds between attempts to record the place of a reply while other programs hold the store."""

SHARED = 8
"""Minimum number of messages that a branch shares with its session by reference. Fewer are copied."""

DEPTH = 8
"""Maximum depth of branches of branches that share messages by reference; a deeper branch has copies."""

MIN_OVERLAP = 4
"""Minimum number of messages that a history without the session's first messages must share with the session."""

MAX_READ_ATTEMPTS = 5
"""Attempts to read a session again after another gateway has changed it."""


class Histories:
    """The sessions of one tenant, found by the digests of their messages.

    Safe to use from several threads.

    Args:
        store: the tenant's store.
        bounds: limits of a history's messages and of the memory that sessions take.
        sayings: the table of message digests that tenants share; None for a table of this tenant's own.
    """

    def __init__(
        self,
        store: Store,
        bounds: RequestBounds = BOUNDS,
        sayings: Sayings | None = None,
    ) -> None:
        self.store, self._sayings = store, Sayings() if sayings is None else sayings
        self._messages, self._most = bounds.messages, bounds.held
        self._lock = threading.RLock()
        self._sessions: OrderedDict[str, Conversation] = OrderedDict()
        """Sessions in memory by name, the last used last. A session is busy while a request uses it."""
        self._held = 0
        """Bytes of these sessions, measured at the end of their last requests."""
        self._beginnings: dict[str, _Beginning] = {}
        """The answered part of each session's last history, so that it is not parsed again."""
        self._kept = 0
        """Total size of the cached histories in bytes."""
        self._warm: set[str] = set()
        """Users whose newest sessions were read since the start. A client's own summary of a session is recognised by its words,
        of which the store has no index."""
        self._leads: OrderedDict[bytes, None] = OrderedDict()
        """Digests of system prompts without a summary. A client sends the same long prompt with every new session."""
        self._replies = ReplyPlaces()
        """Places of the replies that their provider stores."""

    # Digests of a history

    @property
    def held(self) -> int:
        """Number of sessions in memory."""
        return len(self._sessions)

    @property
    def size(self) -> int:
        """Estimated bytes of these sessions and of their histories, measured at the end of their last requests."""
        return self._held + self._kept

    def digests(
        self, form: Form, raws: Sequence[bytes], parsed: dict[bytes, list[Message]] | None = None
    ) -> tuple[list[bytes], list[int]]:
        """Return the digests of a history, and for each digest the number of messages up to its end.

        Args:
            parsed: receives the messages that are read for this, by their JSON.

        Raises:
            WireError: a message cannot be parsed.
        """
        rows = [self._said(form, raw, {} if parsed is None else parsed) for raw in raws]
        digests: list[bytes] = []
        ends: list[int] = []
        for run in _runs(rows):
            if len(run) > 1:
                part = canonical([message for raw in raws[run.start : run.stop] for message in form.read(raw)])
            else:
                only = rows[run.start]
                part = [only[at + 1 : at + WIDTH] for at in range(0, len(only), WIDTH)]
            digests += part
            ends += [run.stop] * len(part)
        return digests, ends

    def _said(self, form: Form, raw: bytes, parsed: dict[bytes, list[Message]]) -> bytes:
        key = message_key(form.name.encode(), raw)
        row = self._sayings.get(key)
        if row is None:
            messages = parsed[raw] = form.read(raw)
            spoken = b"\1" if messages and messages[-1].role is Role.ASSISTANT else b"\0"
            row = b"".join(spoken + digest for digest in canonical(messages))
            self._sayings.keep(key, row)
        return row

    # Replies that their provider stores

    def replied(self, conversation: Conversation, reply: str) -> None:
        """Record the place of a reply by the provider's id of it: a client may continue from it by this id alone.

        Raises:
            StoreBusy: the record cannot be written. Without it, another gateway would pass the next request on unread.
        """
        session, key = conversation.session, _key(reply)
        session.ledger.record(Act.NOTE, policy="gateway", reply=key, turn=conversation.turn, calls=conversation.heard)
        for pause in PAUSES:
            if session.ledger.flush():
                break
            time.sleep(pause)
        else:
            raise StoreBusy("the id of a reply cannot be stored", advice="ask again")
        with self._lock:
            # Evicted places remain in the store's index.
            self._replies.keep(key, ReplyPlace(session.name, conversation.number, conversation.turn, conversation.heard))

    def has(self, form: Form, raw: bytes, headers: Mapping[str, str], user: str) -> bool:
        """Return whether a request continues a reply in a session of this user, and of the name that the client gives."""
        reply = form.after(raw)
        return bool(reply) and self._place(reply, named(headers.get("x-kilburn-session", "")), user) is not None

    def _place(self, reply: str, name: str | None, user: str) -> tuple[SegmentInfo, int, tuple[str, ...]] | None:
        """Return the session with a reply, its number of messages up to the reply, and the client's ids of the reply's calls."""
        key = _key(reply)
        with self._lock:
            place = self._replies.get(key) or self._find_reply(key, user)
        session, number, turn, calls = place or ("", 0, 0, ())
        info = self._stored(session) if session else None
        if info is None or info.number != number or info.user != user or info.damaged:
            return None
        return (info, turn, calls) if name is None or root_name(name) == root_name(session) else None

    def _find_reply(self, key: str, user: str) -> ReplyPlace | None:
        """Find a reply of another gateway, or of this one before its restart, in the store, and cache its place."""
        for owner in self.store.backend.histories.owners(key.encode(), FORKS):
            with suppress(StoreCorrupt):
                info = self._stored(owner.name)
                if info is not None and info.user == user:
                    for event in self.store.backend.events(info.number, -owner.at - 1, Act.NOTE):
                        if event.data.get("reply") == key:
                            place = ReplyPlace(info.name, info.number, event.data["turn"], tuple(event.data["calls"]))
                            self._replies.keep(key, place)
                            return place
                    return None
        return None

    def _before(self, req: ParsedRequest, name: str | None, user: str) -> _Before | None:
        """Return the earlier part of the history of a request that continues a reply by its id, or None for other requests.

        Raises:
            Problem: the session was forgotten meanwhile.
        """
        if not req.previous:
            return None
        place = self._place(req.previous, name, user)
        if place is None:
            raise Problem(404, "previous_response_not_found", "the session with this response was forgotten")
        info, turn, calls = place
        req.calls = calls
        with self._lock:
            conversation = self._sessions.get(info.name)
            if (
                conversation is not None
                and not conversation.busy
                and conversation.turn == turn
                and not conversation.session.ledger.knows(info)
            ):
                # A killed database lost messages of this session, and as many others have been appended since.
                self.lose(conversation)
                conversation = None
            if conversation is None:
                conversation = self._opened(info.name, root_name(info.name), user)
                self._hold(conversation)
            if not conversation.busy and conversation.turn == turn:
                return _Before(conversation, turn, tuple(conversation.digests))
            return _Before(conversation, turn, tuple(canonical(copy_messages(conversation.session, turn))))

    # The session that a history continues

    def take(
        self,
        form: Form,
        req: ParsedRequest,
        name: str | None,
        user: str,
        *,
        link: bool = True,
        hold: Hold | None = None,
        prepare: Callable[[Conversation], object] = id,
    ) -> Conversation:
        """Return the session that a request continues, with its new messages appended; it is busy until `give`.

        Args:
            name: the client's name for the session, or None.
            user: the tenant's user who owns it.
            link: whether it may be linked to an earlier session with the same messages.
            hold: the request's lease: if an equal request was just answered, that session is continued instead of branched.
            prepare: called before anything is appended, to fit the window to the request.

        Raises:
            WireError: a message cannot be parsed, or cannot follow. SpecError: the session's name is invalid. StoreError.
        """
        with self._lock:
            self._trim()
        for remaining in reversed(range(MAX_READ_ATTEMPTS)):
            conversation, repeated = None, hold is not None and hold.repeated
            try:
                request = self._request(form, req, name, user, link=link, repeated=repeated)
                conversation, common = self._claim(request, in_memory=remaining == MAX_READ_ATTEMPTS - 1)
                raws, digests = request.raws(common, len(request.digests)), request.digests[common:]
                conversation.linked, conversation.hold = link, hold
                self._check_length(len(conversation.digests) + len(raws))
                fresh = form.together([message for raw in raws for message in req.parsed.get(raw) or form.read(raw)])
                conversation.met = conversation.session.ledger.figures, conversation.session.ledger.head
                prepare(conversation)
                check_attachments(conversation.session, fresh, req.model)
                conversation.prefilled = bool(fresh) and fresh[-1].role is Role.ASSISTANT
                for batch, words in _apart(fresh, digests, conversation.turn):
                    self._append(form, req, conversation, batch, len(raws), conversation.kept_with(words))
                    conversation.newest = dict(enumerate(visible(batch), len(conversation.digests)))
                    conversation.extend(words)
                conversation.renewed = bool(fresh)
                conversation.start = conversation.turn
                if hold is not None and not fresh:
                    self._take_over(conversation, hold)
                conversation.reserved = conversation.session.ledger.head
                conversation.remember = partial(self._remember, conversation, request)
                return conversation
            except (StoreStale, Forgotten) as error:
                # Another gateway has changed the session, or its messages are being forgotten: it is read again.
                if conversation is not None:
                    self.lose(conversation)
                if not remaining and isinstance(error, Forgotten):
                    raise StoreStale(f"the session cannot be read: {error.what}", advice="ask again") from error
                if not remaining:
                    raise
            except BaseException:
                if conversation is not None:
                    self._take_back(conversation)
                raise
            finally:
                if conversation is not None:
                    conversation.taken.set()
        raise AssertionError("a session is claimed or an error is raised")

    def _take_over(self, conversation: Conversation, hold: Hold) -> None:
        """Reserve a turn that another request has reserved and that has no reply. If that request is equal, its reply can no
        longer be appended.

        Raises:
            StoreStale: the turn has a reply by now.
        """
        session = conversation.session
        with session.lock:
            if session.window.turn != conversation.turn:
                return
            try:
                session.ledger.refresh()
                if session.window.turn != conversation.turn:
                    raise StoreStale("another gateway has answered, or the database has lost the request", advice="ask again")
                with session.edits.batch() as kernel:
                    kernel.record(Act.NOTE, policy="gateway", takes_over=hold.key)
            except StoreStale:
                hold.note_answer()
                raise

    def _check_reserved(self, conversation: Conversation) -> None:
        """Check that no other gateway has taken over the turn that a request has reserved.

        Raises:
            StoreBusy: another gateway has taken it over.
        """
        if (hold := conversation.hold) is not None and conversation.number:
            notes = self.store.backend.events(conversation.number, conversation.reserved, Act.NOTE)
            if any(event.data.get("takes_over") == hold.key for event in notes):
                raise StoreBusy("another gateway answers this request", advice="ask again")

    def _check_length(self, messages: int) -> None:
        if messages > self._messages:
            raise Problem(413, "too_many_messages", f"a history may have {self._messages:,} messages", param="messages")

    def _append(
        self,
        form: Form,
        req: ParsedRequest,
        conversation: Conversation,
        fresh: Sequence[Message],
        count: int,
        history: Digests | None,
    ) -> None:
        """Append the last `count` messages of a history. A result may carry the client's own id of a call.

        A compaction from the client is taken to summarise the session that this one was forked from, and cites all its pages. A
        later compaction cites the previous one (see `pages_of`).
        """
        session, turn = conversation.session, conversation.turn
        first = next((at for at, message in enumerate(fresh) if any(map(is_compaction, message.parts))), None)
        if first is not None:
            # Later messages cite the compaction.
            cites = (*fresh[first].cites, *self._pages_before(session))
            fresh = [*fresh[:first], msgspec.structs.replace(fresh[first], cites=cites), *fresh[first + 1 :]]
        try:
            with compacting(session):
                session.append(*fresh, said=history, after=turn)
        except OrphanResult:
            form.split(req)
            earlier = form.together([message for raw in req.messages[:-count] for message in form.read(raw)])
            if req.calls:
                parts = tuple(Part(kind=Kind.CALL, text="", name="-", call=call) for call in req.calls)
                earlier = [Message(role=Role.ASSISTANT, parts=parts)]
            with compacting(session):
                session.append(*renamed(fresh, earlier, session), said=history, after=turn)
        conversation.turn = turn + len(fresh)
        conversation.note_kept(history)

    def _pages_before(self, session: Session) -> tuple[tuple[int, int], ...]:
        """Return the original pages of the session from which this one was forked, by its ledger."""
        number = origin_in(session.ledger.events()).get("forked")
        if number is None:
            return ()
        rows = self.store.backend.pages(number)
        return tuple((number, page.id) for page, state in rows if page.id > 0 and state.at is not Place.DROPPED)

    def _take_back(self, conversation: Conversation) -> None:
        """Remove a session that has no message. If that fails, the next request of its root uses the session."""
        conversation.busy = False
        with suppress(KilburnError):
            conversation.session.ledger.refresh()
            if not conversation.number or not conversation.session.window.last:
                self.lose(conversation)
                self.store.release(conversation.name)
                if conversation.number:
                    # Nothing is wiped: otherwise a client whose requests are refused could cause a scan of the whole store. The
                    # store refuses the erasure if another gateway has begun the session meanwhile.
                    self.store.backend.erase(conversation.number, wipe=False)

    def _request(self, form: Form, req: ParsedRequest, name: str | None, user: str, *, link: bool, repeated: bool) -> _Request:
        """Parse a request's history, except for a cached beginning."""
        asker, rest = (form.name, name, user), None
        with self._lock:
            prior = self._before(req, name, user)
            beginnings = [] if prior else [entry for entry in self._beginnings.values() if entry.asker == asker]
        beginning = max(
            (entry for entry in beginnings if req.history.startswith(entry.prefix)),
            key=lambda entry: len(entry.prefix),
            default=_Beginning(asker),
        )
        if beginning.prefix:
            rest = _rest(b"[" + req.history[len(beginning.prefix) :].lstrip().removeprefix(b",") + b"]")
            if not rest or self._said(form, rest[0], req.parsed)[:1] != b"\0":
                # It may belong to the assistant's last message in the beginning.
                beginning, rest = _Beginning(asker), None
        if rest is None:
            form.split(req)
            rest = req.messages
        else:
            req.lead = [*beginning.lead]
        self._check_length(beginning.size + len(rest))
        new_digests, ends = self.digests(form, rest, req.parsed)
        digests = [*beginning.digests, *new_digests]
        root = root_name(name) if name else _root(user, digests)
        if prior is not None:
            root, digests, ends = prior.conversation.root, [*prior.digests, *digests], [*[0] * len(prior.digests), *ends]
        return _Request(
            form, req, user, digests, ends, root, link=link, repeated=repeated, prior=prior, beginning=beginning, rest=rest
        )

    def _ending(self, digests: Sequence[bytes], end: int, root: str, user: str) -> dict[str, int] | None:
        """Return the sessions that may end with the first `end` digests of a history, each with its number of digests. They may
        also have the rest of the history, or the rest and its answer. None if there are too many to tell."""
        rest = len(digests) - end
        *_, tail = tails(digests[:end], root, user, max(0, end - 1))
        owners = self.store.backend.histories.owners(tail or b"", FORKS, tail=True)
        if len(owners) == FORKS:
            return None
        return {owner.name: owner.count for owner in owners if owner.count - owner.at in (0, rest, rest + 1)}

    def _remember(self, conversation: Conversation, request: _Request) -> None:
        """Cache the answered part of a history while its session is in memory. This runs after the request, so no client
        waits."""
        self._forget(conversation.name)
        answered = request.answered_part()
        if answered.prefix and conversation.name in self._sessions:
            self._beginnings[conversation.name] = answered
            self._kept += len(answered.prefix)

    def _forget(self, name: str) -> None:
        self._kept -= len(self._beginnings.pop(name, _NO_BEGINNING).prefix)

    def give(self, conversation: Conversation) -> None:
        """Release a session at the end of its request."""
        spoken, words, remember = conversation.spoken, conversation.words, conversation.remember
        conversation.spoken, conversation.words, conversation.remember = [], [], None
        with self._lock:
            for candidate in {conversation, self._sessions.get(conversation.name, conversation)}:
                if candidate.turn != conversation.session.window.turn and (candidate is conversation or not candidate.busy):
                    # The request was answered twice, and this object does not have the other answer.
                    self.lose(candidate)
            if conversation.prefilled and spoken:
                # The client sees the reply as one message with the beginning that it sent itself.
                self.lose(conversation)
                return
            # Other threads see all of this or nothing: another gateway may have answered, and the client may be back already.
            conversation.extend(words)
            conversation.last = _joined_text(spoken) or conversation.last
            conversation.busy = False
            if self._sessions.get(conversation.name) is conversation:
                self._hold(conversation)
                if conversation.kept != len(conversation.chain):
                    self._keep(conversation)
            if remember is not None:
                remember()

    def served(self, name: str) -> Session | None:
        """Return the session of that name, if it is in memory. Changes by hand use this object, so that requests need not read
        the session again."""
        with self._lock:
            conversation = self._sessions.get(name)
            return None if conversation is None else conversation.session

    def lose(self, conversation: Conversation) -> None:
        """Drop a session from memory. The next request reads it from the store."""
        with self._lock:
            conversation.busy = False
            self._drop(conversation.name, conversation)
            self._forget(conversation.name)
            self.store.release(conversation.name)

    def _hold(self, conversation: Conversation) -> None:
        """Keep a session in memory, and add its size to the total."""
        size = conversation.session.contents.size + MESSAGE * len(conversation.digests)
        self._held += size - conversation.held
        conversation.held = size
        self._sessions[conversation.name] = conversation

    def _drop(self, name: str, conversation: Conversation) -> None:
        """Remove a session from memory, if it is the one of that name, and subtract its size."""
        if self._sessions.get(name) is conversation:
            self._held -= conversation.held
            conversation.held = 0
            del self._sessions[name]

    def _claim(self, request: _Request, *, in_memory: bool) -> tuple[Conversation, int]:
        """Return an idle session for a history, and the number of the history's digests that it has.

        A repeated request gets the session that already has it, unless it may be a branch: see `Conversation.again`.

        Args:
            in_memory: accept a session in memory without reading the store. If the store has more events, it refuses the append.
        """
        while True:
            with self._lock:
                asks_store = not in_memory or request.repeated or request.before is not None
                claim = (None if asks_store else self._recalled(request)) or self._claimed(request)
            if not isinstance(claim, Conversation):
                return claim
            claim.taken.wait()

    def _recalled(self, request: _Request) -> tuple[Conversation, int] | None:
        """Return the same for a history that continues an idle session in memory."""
        chain, end = request.chain, max(request.answered, 1)
        matches = [
            conversation
            for conversation in self._sessions.values()
            if end <= (at := len(conversation.chain)) <= len(chain) and conversation.chain[-1] == chain[at - 1]
        ]
        if matches:
            longest = max(reversed(matches), key=lambda conversation: len(conversation.chain))
            return None if longest.busy else self._continue(longest, request, len(longest.chain))
        # The session's messages contain text that this history and the last one omit.
        differs = any(not entry.busy and not entry.verbatim and entry.before in chain for entry in self._sessions.values())
        return self._continued(request) if differs else None

    def _continue(self, conversation: Conversation, request: _Request, at: int) -> tuple[Conversation, int]:
        """Claim an idle session that has the first `at` digests of a history."""
        conversation.begin(request.chain[-1])
        self._sessions.move_to_end(conversation.name)
        return conversation, at

    def _claimed(self, request: _Request) -> tuple[Conversation, int] | Conversation:
        """Return the same, or a session that is appending the same request at this moment."""
        chain = request.chain
        if request.repeated and (answered := self._answered(request)) is not None:
            return answered, len(chain)
        busy = [entry for entry in self._sessions.values() if entry.busy and entry.user == request.user]
        unkept = self._unkept(request)
        alike: list[HistoryOwner] = []
        whole: set[str] = set()
        for at in range(len(chain), max(request.answered, 1) - 1, -1):
            owners = self.store.backend.histories.owners(chain[at - 1], FORKS)
            alike = alike or owners
            having = [*self._having(request, owners, at)]
            if (free := self._claim_free([*unkept, *having], request, at)) is not None:
                return free
            if at == len(chain):
                whole = {entry.name for entry in owners}
                for conversation in (*busy, *unkept, *having, *self._having(request, owners, at + 1)):
                    if conversation.busy and conversation.asked == chain[-1] and not conversation.taken.is_set():
                        return conversation
                    if (repeat := _asked_before(conversation, chain)) is not None:
                        return conversation.again(*repeat), at
        if not alike and (continued := self._continued(request)) is not None:
            return continued
        if not alike and (common := self._longest(chain[: request.answered - 1])):
            alike = self.store.backend.histories.owners(chain[common - 1], FORKS)
            having = [*unkept, *self._having(request, alike, common)]
            for at in sorted(
                {len(entry.chain) for entry in having if common <= len(entry.chain) < request.answered}, reverse=True
            ):
                if (free := self._claim_free(having, request, at)) is not None:
                    return free
        conversation, at = self._fork(request, *self._nearest(request, [*busy, *unkept], alike), whole)
        conversation.begin(chain[-1] if chain else b"")
        return conversation, at

    def _answered(self, request: _Request) -> Conversation | None:
        """Return a session that has more messages behind the whole history, as it was before them; None if there is none."""
        count = len(request.chain)
        for owner in self.store.backend.histories.owners(request.chain[-1], FORKS) if count else ():
            conversation = self._current(owner.name, request)
            if (
                conversation is not None
                and len(conversation.chain) > count
                and conversation.chain[count - 1] == request.chain[-1]
            ):
                return conversation.again(turn_after(conversation.session, count), count)
        return None

    def _claim_free(self, conversations: Iterable[Conversation], request: _Request, at: int) -> tuple[Conversation, int] | None:
        """Claim the first idle session that ends with the first `at` links of a history's chain; None if there is none."""
        for conversation in conversations:
            # Another gateway may have continued it since the store was queried.
            if not conversation.busy and len(conversation.chain) == at and conversation.chain[-1] == request.chain[at - 1]:
                # The store has these links, by its own answer or by the last write.
                conversation.kept = at
                return self._continue(conversation, request, at)
        return None

    def _longest(self, chain: Sequence[bytes]) -> int:
        """Return the length of the longest prefix of a chain that a session in the store has."""
        return bisect_left(chain, 1, key=lambda digest: not self.store.backend.histories.owners(digest, 1))

    def _continued(self, request: _Request) -> tuple[Conversation, int] | None:
        """Return the session that a history continues although it differs, and the number of digests in common: the client cut
        the beginning, or omits text added to an earlier user message. None if no session fits, or if several do: conversations
        with the same beginning may differ in the omitted part."""
        end, digests = request.answered, request.digests
        if not request.link or request.before is not None or not end:
            return None
        rest = digests[end:]
        counts = self._ending(digests, end, request.root, request.user)
        if counts is None:
            return None
        # The store has no digests of sessions with forgotten messages.
        candidates = [entry for entry in self._sessions.values() if digests[end - 1] in entry.digests[-len(rest) - 2 :]]
        matches: list[tuple[bool, Conversation, int]] = []
        for name, count in ({entry.name: 0 for entry in candidates if is_linkable(entry.root, request.root)} | counts).items():
            conversation = self._current(name, request)
            if conversation is None or conversation.busy:
                continue
            if len(conversation.chain) == count:
                conversation.kept = count
            for at in {len(conversation.digests) - more for more in (0, len(rest), len(rest) + 1)}:
                tail = conversation.digests[at:] if at > 0 else [b""]
                if tail == rest[: len(tail)] or (tail[:-1] == rest and is_spoken(tail[-1])):
                    skipped = conversation.has(digests[:end], at, request.read)
                    # A forgotten message may have had any content.
                    sure = skipped == 0 and not conversation.gaps
                    if sure or (skipped is not None and end >= MIN_OVERLAP and is_own(request.spoken(end))):
                        matches.append((bool(skipped), conversation, at))
        best = [match for match in matches if not match[0]] or matches
        if len(best) != 1:
            return None
        [(_, conversation, at)] = best
        if len(conversation.digests) - at > len(rest):
            turn = turn_before_reply(conversation.session)
            twin = conversation.again(turn, len(conversation.digests) - 1)
            twin.verbatim = False
            return twin, len(digests)
        count = end + len(conversation.digests) - at
        conversation.begin(request.chain[-1], digests[:count])
        conversation.before = request.chain[count - 1]
        self._sessions.move_to_end(conversation.name)
        return conversation, count

    def _current(self, name: str, request: _Request) -> Conversation | None:
        """Return a session in its present state, if it may be linked for the request's user; None if it is damaged."""
        conversation, info = self._sessions.get(name), self._stored(name)
        if conversation is not None and not conversation.busy and (info is None or not conversation.session.ledger.knows(info)):
            # Another gateway has continued it.
            self.lose(conversation)
        return self._conversation(name, request)

    def _linkable(self, request: _Request) -> list[Conversation]:
        """Return the sessions in memory to which a request may be linked by its content, last used first. After a start, the
        user's newest sessions are read first."""
        if request.user not in self._warm:
            if len(self._warm) >= WARM:
                self._warm.clear()
            self._warm.add(request.user)
            self._read_newest(request.user)
        idle = [
            conversation
            for conversation in reversed(self._sessions.values())
            if conversation.user == request.user and not conversation.busy
        ]
        return [conversation for conversation in idle if is_linkable(conversation.root, request.root)]

    def _having(self, request: _Request, owners: Iterable[HistoryOwner], count: int) -> Iterator[Conversation]:
        """Yield the owners of a digest whose sessions have `count` digests and the history's prefix up to it."""
        for owner in owners:
            if owner.count == count:
                conversation = self._conversation(owner.name, request)
                if conversation is not None and self._is_old(conversation, owner, request.chain):
                    # The request that uses it keeps its own state.
                    if conversation.busy:
                        self._drop(conversation.name, conversation)
                    else:
                        self.lose(conversation)
                    conversation = self._conversation(owner.name, request)
                if conversation is not None and shared(conversation.chain, request.chain) >= owner.at:
                    yield conversation

    def _is_old(self, conversation: Conversation, owner: HistoryOwner, chain: Sequence[bytes]) -> bool:
        """Return whether memory has an outdated state of a session that begins with a chain by the store's index: another gateway
        has continued it, or a killed database has lost its last messages."""
        if len(conversation.chain) < owner.count:
            return not conversation.busy or conversation.taken.is_set()
        if conversation.busy or conversation.gaps:
            return False
        if conversation.chain[owner.at - 1] != chain[owner.at - 1]:
            return True
        if len(conversation.chain) == owner.count:
            return False
        info, session = self._stored(conversation.name), conversation.session
        return info is None or not session.ledger.knows(info) or session.window.turn != conversation.turn

    def _nearest(
        self, request: _Request, conversations: Iterable[Conversation], alike: Iterable[HistoryOwner]
    ) -> tuple[Conversation | None, int]:
        """Return the session with the longest common prefix with a history, and its length, from memory or the store."""
        near, common = None, 0
        for conversation in conversations:
            overlap = shared(conversation.chain, request.chain)
            if overlap > common:
                near, common = conversation, overlap
        for owner in alike:
            candidate = self._conversation(owner.name, request) if owner.at > common else None
            if candidate is not None and shared(candidate.chain, request.chain) > common:
                return candidate, shared(candidate.chain, request.chain)
        return near, common

    def _unkept(self, request: _Request) -> list[Conversation]:
        """Return the sessions of this root whose history is incomplete in the store's index: messages were forgotten, the last
        request broke off, or they were imported. Completes the index, unless messages were forgotten."""
        conversations = []
        for name in self.store.backend.histories.missing(request.root, request.user, FORKS):
            conversation = self._conversation(name, request)
            if conversation is not None and not conversation.busy:
                conversation.fill(request.digests)
                self._keep(conversation)
                conversations.append(conversation)
        return conversations

    def _conversation(self, name: str, request: _Request) -> Conversation | None:
        """Return the session of a name, if it has the request's user and root; None if it is damaged."""
        if name not in self._sessions and is_linkable(root_name(name), request.root):
            info = self._stored(name)
            if info is not None and info.user == request.user:
                self._read(name, root_name(name), request.user)
        conversation = self._sessions.get(name)
        return conversation if conversation is not None and conversation.user == request.user else None

    def _keep(self, conversation: Conversation) -> None:
        """Store the history index of a session that was imported or whose request broke off. No request fails if this fails: the
        index can be rebuilt from the pages."""
        backend, session = self.store.backend, conversation.session
        with suppress(StoreError):
            with session.lock:
                window, page = session.window, session.window.last
                if window.turn != conversation.turn or any(window.at(dropped) is Place.DROPPED for dropped in window.gone):
                    return  # another gateway has continued it, or messages were forgotten
            for start in () if conversation.gaps else dict.fromkeys((conversation.kept, 0)):
                ends = tails(conversation.digests, conversation.root, conversation.user, start)
                history = Digests(start, tuple(conversation.chain[start:]), tuple(ends))
                if backend.histories.put(conversation.number, history, page=page):
                    conversation.kept = len(conversation.chain)
                    return

    def _fork(self, request: _Request, parent: Conversation | None, common: int, whole: set[str]) -> tuple[Conversation, int]:
        """Return a new session that begins with the messages in common with the nearest one, and their number.

        Args:
            whole: names of the sessions that have the whole history and have continued differently.

        Raises:
            StoreStale: another gateway has appended the same request meanwhile.
        """
        root, user = request.root, request.user
        compacted, summary = self._compacted(request) if request.link and request.before is None else (None, 0)
        earlier = () if parent is None or not request.link else parent.linked_to
        if compacted is not None:
            earlier = (compacted.number, *compacted.linked_to)[:LINKED]
        copied = common
        if request.before is not None:
            # The client does not send the earlier part.
            parent, copied = request.before.conversation, len(request.before.digests)
        if compacted is None and parent is not None:
            branch = self._share(request, parent, copied, earlier, whole)
            if branch is not None:
                return branch
        if request.before is not None and parent is not None:
            copies = copy_messages(parent.session, request.before.turn)
        else:
            copied = min((common, *parent.gaps)) if parent is not None and parent.own_pages else 0
            copies = copy_messages(parent.session, turn_after(parent.session, copied)) if parent is not None and copied else []
        name = self._free(partial(_numbered, root), user)
        # Two gateways that look for a free name at the same time find the same one, and only one can begin it; or the second one
        # finds the first one's request here.
        self._check_untaken(request, whole)
        # The first append creates it.
        session = self._unbegun(partial(session_of, self.store), name, user)
        conversation = Conversation(session, root, earlier)
        origin, occupied = compacted or parent, conversation.turn > 0
        if not occupied and origin is not None:
            old = [*copies, *request.read(copied, max(common, summary))]
            try:
                self._begin(session, origin.session, earlier, old, copies)
            except BaseException:
                self.store.release(name)
                raise
            conversation = Conversation(session, root, earlier) if copies else conversation
        if occupied or conversation.turn != len(copies):
            raise StoreStale(f"another gateway has begun session {session.name!r}", advice="read it again")
        self._drop(session.name, self._sessions.get(session.name, conversation))
        self._hold(conversation)
        conversation.busy = True
        self._trim()
        return conversation, copied

    def _share(
        self, request: _Request, parent: Conversation, common: int, earlier: Sequence[int], whole: set[str]
    ) -> tuple[Conversation, int] | None:
        """Return a new branch that shares the common messages of a history and a session by reference, and their number; None if
        a copy is smaller, or if some of them are forgotten or taken back.

        Raises:
            StoreStale: another gateway has appended the same request meanwhile.
        """
        session, prior = parent.session, request.before
        # At least one message is appended.
        common = min(common, len(request.digests) - 1)
        if not _has_shares(parent, common):
            return None
        self._check_untaken(request, whole)
        turn = prior.turn if prior is not None and len(prior.digests) == common else turn_after(session, common)
        branch = Conversation(self._prepare(parent, turn, earlier), parent.root, earlier)
        if len(branch.digests) != common:
            # Several messages were appended at once, so no event separates them.
            self.store.release(branch.name)
            return None
        branch.kept = common
        self._hold(branch)
        branch.busy = True
        self._trim()
        return branch, common

    def _prepare(self, parent: Conversation, turn: int, earlier: Sequence[int]) -> Session:
        """Prepare a branch of a session as of a turn, under a free name."""
        session = parent.session
        return session.branches._prepare(self._free(f"{session.name}/{BRANCH}{{}}".format, parent.user), turn, earlier)

    def _check_untaken(self, request: _Request, whole: set[str]) -> None:
        """Check that no session has the whole history except those in `whole`.

        Raises:
            StoreStale: another gateway has appended the same request meanwhile.
        """
        owners = self.store.backend.histories.owners(request.chain[-1], FORKS) if request.chain else ()
        if not whole.issuperset(owner.name for owner in owners):
            raise StoreStale("another gateway has appended the same request", advice="read the session again")

    def _unbegun(self, opened: Callable[[str, str], Session], name: str, user: str) -> Session:
        """Open the session of a free name for a user.

        Raises:
            StoreStale: another gateway has begun it meanwhile, for this user or another one.
        """
        try:
            session = opened(name, user)
            if session.info.user == user and not session.window.turn:
                return session
        except SpecError:
            info = self._stored(name)
            if info is None or info.user == user:
                raise
        raise StoreStale(f"another gateway has begun session {name!r}", advice="read it again")

    def _free(self, make_name: Callable[[int], str], user: str) -> str:
        """Return the first free name, counted from 1."""
        free = 1
        while self._is_taken(make_name(free), user):
            free *= 2
        occupied = free // 2
        while free - occupied > 1:
            middle = (occupied + free) // 2
            free, occupied = (free, middle) if self._is_taken(make_name(middle), user) else (middle, occupied)
        return make_name(free)

    def _is_taken(self, name: str, user: str) -> bool:
        """Return whether a name is in use. An empty session belongs to the first request that appends to it."""
        conversation = self._sessions.get(name)
        if conversation is not None:
            return conversation.busy or conversation.user != user or conversation.session.window.last > 0
        try:
            info = self._stored(name)
            return info is not None and (info.user != user or info.pages > 0)
        except StoreCorrupt:
            return True

    def _begin(
        self, session: Session, origin: Session, earlier: Sequence[int], messages: Sequence[Message], copies: Sequence[Message]
    ) -> None:
        """Begin a session: record its origin in its ledger, and append the messages that it takes over.

        Raises:
            StoreStale: another gateway has begun it.
        """
        shared = sum(len(message.parts) for message in messages)
        number = origin.number
        session.ledger.record(Act.NOTE, policy="gateway", forked=number, continues=list(earlier), known=shared)
        if copies:
            session.append(*copies, after=0)

    def _compacted(self, request: _Request) -> tuple[Conversation | None, int]:
        """Return the session that a client has compacted into this history, if any, and the number of digests at the history's
        beginning that belong to the compaction."""
        candidates = self._linkable(request)
        ends: list[tuple[range, Conversation]] = []
        for conversation in candidates:
            common = shared(conversation.chain, request.chain)
            if span := session_end(conversation.digests, request.digests, request.places, common):
                ends.append((span, conversation))
        for span, conversation in sorted(ends, key=lambda pair: pair[0].stop, reverse=True):
            if is_own(request.read(span.start, span.stop)):
                return conversation, span.stop
        opening = list(request.opening(self._leads))
        for conversation in candidates[:SUMMED] if opening else ():
            at = find_summary(conversation.last, (text for _, text in opening), conversation.session.contents.originals)
            if at is not None:
                return conversation, opening[at][0]
        self._leads.update(dict.fromkeys(request.leads))
        while len(self._leads) > LEADS:
            self._leads.popitem(last=False)
        return None, 0

    def _read_newest(self, user: str) -> None:
        """Read the user's last used sessions after a restart."""
        infos = sorted(self.store.sessions(), key=lambda info: info.used)
        for info in [info for info in infos if info.user == user and not info.damaged][-NEWEST:]:
            if info.name not in self._sessions:
                self._read(info.name, root_name(info.name), user)

    def _stored(self, name: str) -> SegmentInfo | None:
        return self.store.backend.segment(name, time=0.0, create=False)

    def _read(self, name: str, root: str, user: str) -> None:
        """Read a session into memory. A damaged session stays as it is: its client's next request begins another session."""
        try:
            self._hold(self._opened(name, root, user))
        except StoreCorrupt as error:
            log.warning("session %r is skipped because it is damaged: %s", name, error)

    def _opened(self, name: str, root: str, user: str) -> Conversation:
        session = self.store.session(name, user)
        conversation = Conversation(session, root, session.branches.origin().get("continues", ()))
        conversation.last = last_reply(session)
        return conversation

    def _trim(self) -> None:
        """Evict the least recently used idle sessions until memory is within its bounds. The last used one stays."""
        for conversation in [*self._sessions.values()][:-1] if self._is_full() else ():
            if not conversation.busy:
                self.lose(conversation)
            if not self._is_full():
                return

    def _is_full(self) -> bool:
        return len(self._sessions) > SESSIONS or self.size > self._most

    def said(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        pages: Sequence[tuple[int, int]] = (),
        *,
        more: bool = False,
    ) -> None:
        """Append the model's reply, and the results of our own tools.

        If other requests have continued the session since this request began, our own calls wait until the reply is complete. An
        equal reply is then not written again, and a different one begins a branch.

        Args:
            pages: pages that a search put beside the question, from which the first of these messages was answered.
            more: whether another round follows, so that the reply is not complete yet.

        Raises:
            StoreBusy: another gateway has taken over the turn. StoreUnavailable: the database has lost the request.
        """
        words = canonical([*conversation.spoken, *messages])
        new, cited = list(messages), list(pages)
        with conversation.saying:
            for remaining in reversed(range(MAX_READ_ATTEMPTS)):
                try:
                    # If others have continued it, nothing is written, and the session is read again.
                    session = conversation.session if remaining == MAX_READ_ATTEMPTS - 1 else self.current(conversation)
                    with session.lock:
                        foreign = said_after(session, conversation.start) if session.window.turn != conversation.turn else []
                        last = session.window.turn
                    foreign_digests = canonical(message for _, message in foreign)
                    conversation.repeated = conversation.repeated or bool(foreign_digests)
                    conversation.heard = ()
                    if last < conversation.turn:
                        # A killed database has lost the request, so the reply cannot follow it.
                        self.lose(conversation)
                        raise StoreUnavailable("the database has lost the request", advice="ask again")
                    if foreign_digests and more:
                        conversation.waiting += new
                    elif foreign_digests and foreign_digests[: len(words)] == words:
                        conversation.heard = tuple(part.call or "" for message in new for part in message.parts if part.call)
                        conversation.turn, conversation.waiting = _last_number(foreign, len(words), conversation.start), []
                    else:
                        if foreign_digests:
                            self._check_reserved(conversation)
                            new, cited = self._branch(conversation, new, cited)
                            last = conversation.turn
                        self._append_said(conversation, new, cited, words, last)
                    break
                except StoreStale:
                    if not remaining:
                        raise
        conversation.spoken += messages
        conversation.words = words
        conversation.answered = conversation.answered or any(
            (part.call or "").startswith(HIDDEN) for message in messages for part in message.parts
        )

    def _append_said(
        self,
        conversation: Conversation,
        messages: Sequence[Message],
        pages: Sequence[tuple[int, int]],
        words: list[bytes],
        last: int,
    ) -> None:
        """Append the messages of a reply behind message `last`."""
        session = conversation.session
        if conversation.waiting:
            history = conversation.kept_with(conversation.words)
            session.append(*conversation.waiting, said=history, after=last)
            conversation.note_kept(history)
            last += len(conversation.waiting)
            conversation.turn, conversation.waiting = last, []
        new = list(messages)
        history = conversation.kept_with(words)
        with compacting(session):
            keep(session, new[0], pages, *new[1:], said=history, after=last)
        conversation.note_kept(history)
        conversation.turn = last + len(new)

    def refresh(self, conversation: Conversation) -> None:
        """Read what other gateways have done with the session of a busy conversation.

        Raises:
            StoreStale: the session was forgotten. StoreBusy: another gateway has taken over its turn.
        """
        if conversation.session.ledger.refresh():
            self._check_reserved(conversation)

    def current(self, conversation: Conversation) -> Session:
        """Return the session of a busy conversation as it is now.

        Raises:
            StoreStale: the session was forgotten. StoreBusy: another gateway has taken over its turn.
        """
        conversation.session.ledger.refresh()
        session = self.store.session(conversation.name)
        if session is not conversation.session:
            session.ledger.refresh()
            conversation.session = session
        self._check_reserved(conversation)
        return session

    def _branch(
        self, conversation: Conversation, messages: Sequence[Message], pages: Sequence[tuple[int, int]]
    ) -> tuple[list[Message], list[tuple[int, int]]]:
        """Move a request to a branch of its session, as it was before others continued it. Return the new messages, and the
        sources of the reply as pages of the branch.

        Raises:
            StoreStale: another gateway took the branch's name.
        """
        session, turn, old = conversation.session, conversation.turn, conversation.name
        copies, start = copy_messages(session, turn), len(copy_messages(session, conversation.start))
        sources = tuple(page for number, page in pages if number == conversation.number)
        waiting = brought_over(conversation.waiting, session, turn)
        carried = brought_over(messages, session, turn)
        [first] = brought_over([msgspec.structs.replace(messages[0], sources=sources)], session, turn)
        with self._lock:
            if shares := _has_shares(conversation, len(conversation.digests)):
                branch = self._prepare(conversation, turn, conversation.linked_to)
            else:
                name = self._free(partial(_numbered, conversation.root), conversation.user)
                branch = self._unbegun(self.store.session, name, conversation.user)
                self._begin(branch, session, conversation.linked_to, copies, copies)
            self._drop(old, conversation)
            self._forget(old)
            conversation.session = branch
            self._hold(conversation)
        conversation.repeated, conversation.waiting = False, waiting
        if shares:
            conversation.kept = len(conversation.digests)
        else:
            conversation.turn, conversation.kept, conversation.start = len(copies), 0, start
        return carried, [*pages, *((conversation.number, page) for page in first.sources)]


class _Before(NamedTuple):
    """The earlier part of the history of a request that continues a reply: a session up to a turn, and its digests."""

    conversation: Conversation
    turn: int
    digests: tuple[bytes, ...]


class _Beginning(NamedTuple):
    """The beginning of a history, up to a message of the assistant.

    Args:
        asker: the clients that may continue it: a form, the client's name of the session, and the user.
        prefix: its JSON, a list without its end. lead: the system prompt before it.
        digests, ends, chain: see `_Request`.
    """

    asker: tuple[str, str | None, str] = ("", None, "")
    prefix: bytes = b""
    lead: Sequence[bytes] = ()
    digests: Sequence[bytes] = ()
    ends: Sequence[int] = ()
    chain: Sequence[bytes] = ()

    @property
    def size(self) -> int:
        """Number of its messages."""
        return self.ends[-1] if self.ends else 0


_NO_BEGINNING = _Beginning()


class _Request:
    """A history for which a session is searched.

    Args:
        digests, ends: the history's digests, and for each the number of messages up to its end.
        root: the common name of its sessions and their branches.
        link: whether its session may be linked to another one.
        repeated: whether an equal request was just answered.
        prior: the earlier part of the history, if the client does not send it.
        beginning: the part of the history that was parsed before. rest: the other messages, as JSON.
    """

    def __init__(
        self,
        form: Form,
        req: ParsedRequest,
        user: str,
        digests: list[bytes],
        ends: list[int],
        root: str,
        *,
        link: bool,
        repeated: bool,
        prior: _Before | None,
        beginning: _Beginning,
        rest: Sequence[bytes],
    ) -> None:
        self._form, self._asked, self._beginning, self._rest, self.before = form, req, beginning, rest, prior
        self._ends = [*beginning.ends, *(beginning.size + end for end in ends)] if beginning.size else ends
        self.user, self.digests, self.root, self.link, self.repeated = user, digests, root, link, repeated
        start = beginning.chain[-1] if beginning.chain else chain_seed(root, user)
        self.chain = [*beginning.chain, *chained(digests[len(beginning.digests) :], start)]
        self.answered = next((at for at in range(len(digests), 0, -1) if is_spoken(digests[at - 1])), 0)
        """Number of digests up to the last message of the assistant."""

    @cached_property
    def places(self) -> dict[bytes, list[int]]:
        """The positions of each digest."""
        return index_places(self.digests)

    def raws(self, start: int, stop: int) -> Sequence[bytes]:
        """Return the messages of a range of digests, as JSON."""
        first, last = self._ends[start - 1] if start else 0, self._ends[stop - 1] if stop else 0
        if first >= self._beginning.size:
            return self._rest[first - self._beginning.size : max(last - self._beginning.size, 0)]
        return self.messages[first:last]

    @property
    def messages(self) -> list[bytes]:
        """All messages as JSON."""
        if not self._asked.messages:
            self._form.split(self._asked)
        return self._asked.messages

    def read(self, start: int, stop: int) -> list[Message]:
        """Parse the messages of a range of digests."""
        return [message for raw in self.raws(start, stop) for message in self._form.read(raw)]

    def answered_part(self) -> _Beginning:
        """Return the history up to the assistant's last message."""
        answered = 0 if self.before is not None else self.answered
        if not answered:
            return _NO_BEGINNING
        end = len(self._asked.history)
        for raw in reversed(self.raws(answered, len(self.digests))):
            end = self._asked.history.rfind(raw, 0, end)
        prefix = self._asked.history[:end].rstrip().removesuffix(b",")
        digests, ends, chain = self.digests[:answered], self._ends[:answered], self.chain[:answered]
        return _Beginning(self._beginning.asker, prefix, self._asked.lead, digests, ends, chain)

    def spoken(self, end: int) -> Iterator[Message]:
        """Yield the assistant's messages among the first `end` digests, last first."""
        for at in reversed(range(end)):
            if is_spoken(self.digests[at]):
                yield from self.read(at, at + 1)

    @cached_property
    def leads(self) -> dict[bytes, bytes]:
        """The system prompts before the history, by digest."""
        return {hashlib.blake2b(raw, digest_size=16).digest(): raw for raw in self._asked.system}

    def opening(self, leads: Container[bytes]) -> Iterator[tuple[int, str]]:
        """Yield the texts at the history's beginning, each with the number of digests up to its end.

        Args:
            leads: digests of system prompts to skip.
        """
        for key, raw in self.leads.items():
            if key not in leads:
                yield from ((0, text) for text in json_texts(raw))
        for at, raw in enumerate(self.messages[:OPENING], 1):
            yield from ((bisect_right(self._ends, at), text) for text in json_texts(raw))


def _has_shares(conversation: Conversation, common: int) -> bool:
    """Return whether a branch can share the first `common` messages of a session by reference, and whether that saves space."""
    session = conversation.session
    whole = session.number and not conversation.gaps and not session.window.gone
    return bool(whole) and common >= SHARED and session.name.count(f"/{BRANCH}") < DEPTH


def _apart(
    messages: Sequence[Message], digests: Sequence[bytes], turn: int
) -> Iterator[tuple[Sequence[Message], Sequence[bytes]]]:
    """Yield the new messages of a history with their digests. The earlier messages of a long new history are one append, and the
    newest another: branches begin between two appends."""
    newest = sum(1 for _ in takewhile(lambda message: message.role is not Role.ASSISTANT, reversed(messages)))
    older = len(messages) - newest
    if turn or not newest or older < SHARED:
        yield from [(messages, digests)] if messages else ()
        return
    count = len(digests) - sum(1 for _ in visible(messages[older:]))
    yield messages[:older], digests[:count]
    yield messages[older:], digests[count:]


def _asked_before(conversation: Conversation, chain: Sequence[bytes]) -> tuple[int, int] | None:
    """Return the numbers of messages and digests of a session up to the request with this chain, if the session answers that
    request now or answered it last; else None."""
    if conversation.busy:
        return (conversation.start, len(conversation.digests)) if conversation.asked == chain[-1] else None
    if conversation.chain[-2:-1] != chain[-1:]:
        return None
    turn = turn_before_reply(conversation.session)
    return (turn, len(chain)) if len(canonical(copy_messages(conversation.session, turn))) == len(chain) else None


def _last_number(messages: Iterable[tuple[int, Message]], count: int, end: int) -> int:
    """Return the number of the last message of the first `count` digests behind message `end`."""
    collected: list[Message] = []
    for number, message in messages:
        collected.append(message)
        if len(canonical(collected)) > count:
            break
        end = number
    return end


def _runs(rows: Sequence[bytes]) -> Iterator[range]:
    """Yield the ranges of messages that count as one: consecutive messages of the assistant, with the reasoning before, between
    and behind them, which has no digest of its own."""
    start, spoken = 0, None
    for at, row in enumerate(rows):
        joins = spoken is None or (spoken and (not row or row[0]))
        if not joins:
            yield range(start, at)
            start, spoken = at, None
        spoken = row[-WIDTH] if row else spoken
    if rows:
        yield range(start, len(rows))


def _numbered(root: str, number: int) -> str:
    """Return the name of the session of a root with a number."""
    return f"{root}~{number}" if number > 1 else root


def _key(reply: str) -> str:
    return hashlib.blake2b(reply.encode("utf-8", "replace"), digest_size=12).hexdigest()


def _rest(raw: bytes) -> list[bytes]:
    return [] if raw == b"[]" else listed(raw, "messages")


def _joined_text(messages: Iterable[Message]) -> str:
    return "".join(part.text for message in messages for part in message.parts if part.kind is Kind.TEXT)


def _root(user: str, digests: Sequence[bytes]) -> str:
    first = digests[0] if digests else b""
    return f"chat-{hashlib.blake2b(user.encode() + bytes(1) + first, digest_size=8).hexdigest()}"


def named(header: str) -> str | None:
    """Return the session name in a client's header, whose bytes are UTF-8, or None for an empty one.

    Raises:
        SpecError: a client may not use this name.
    """
    try:
        name = header.encode("latin-1").decode().strip()
    except UnicodeError:
        raise SpecError("a session name that is not UTF-8", advice="send the bytes of its UTF-8, or letters of ASCII") from None
    if len(name) > MAX_NAME_CHARS:
        raise SpecError(f"a session name of {len(name):,} characters", advice=f"give one of {MAX_NAME_CHARS} at most")
    if not name.isprintable():
        raise SpecError("a session name with invisible characters", advice="leave them out")
    if name.startswith("@"):
        raise SpecError("a session name that begins with @", advice="these names are of collections; give another one")
    return name or None

"""Which session a client's history continues, and what of it is new.

Clients resend everything. Each message has a digest of what it says: not of ids, of marks for a cache, or of reasoning, which
clients and gateways rewrite. The chained digests of a history lead to the session of which it is the continuation. What is new
is appended. A history that says something else from some point on gets a process of its own, with the part that both have in
common; nothing is overwritten. All this can be worked out again from the sessions: what is in memory here is a cache.
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
from itertools import compress, takewhile
from typing import NamedTuple

import msgspec

from kilburn.backend import Digests, HistoryOwner, SegmentInfo, root_of
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
from kilburn.gateway.compaction import OPENING, end_of, is_own, is_summary, quotes, texts_of
from kilburn.gateway.conversations import (
    Asker,
    Conversation,
    Memo,
    brought_over,
    chained,
    check_attachments,
    copy_of,
    is_linkable,
    last_reply,
    renamed,
    said_after,
    seed_of,
    shared,
    tails,
    turn_after,
    turn_before_reply,
)
from kilburn.gateway.form import Asked, Form, listed
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.problems import Problem
from kilburn.gateway.repeats import Hold
from kilburn.gateway.replies import ReplyPlace, ReplyPlaces
from kilburn.gateway.sayings import WIDTH, Sayings, key_of
from kilburn.kernel.branches import BRANCH, origin_in
from kilburn.kernel.brought import keep
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store, session_of
from kilburn.message import Kind, Message, Part, Role
from kilburn.page import Place
from kilburn.tracing import compacting
from kilburn.wire.compaction import is_compaction
from kilburn.wire.digests import HIDDEN, canonical, is_spoken, visible

log = logging.getLogger("kilburn.gateway")

BOUNDS = RequestBounds()

SESSIONS = 256
"""Sessions that are kept in memory, for each tenant."""

MESSAGE = 150
"""Bytes that a message's digests take in such a session."""

FORKS = 32
"""Sessions that have said the same, or may have, and are looked at for one request: the newest, or those that were used last."""

NEWEST = 8
"""Sessions that are read again after a restart to see whether a client has compacted one of them."""

WARM = 10_000
"""Users of whom it is known that this was done."""

LEADS = 1_000
"""System prompts that are known to have no summary: what is said later cannot be in them."""

SUMMED = 32
"""Sessions whose last reply is looked for in a new history: those that were used last."""

LINKED = 16
"""Earlier sessions that a search covers."""

LONGEST_NAME = 200
"""Characters of a client's name for a session."""

PAUSES = (0.005, 0.02, 0.08, 0.3, 1.0)
"""Seconds between tries to note where a reply is, while others hold the store."""

SHARED = 8
"""Messages that a branch has in common with its session at least, if it has them by reference. Fewer are copied."""

DEPTH = 8
"""Branches of branches that have messages by reference; a deeper one has copies."""

MIN_OVERLAP = 4
"""Messages that a history which begins later than its session must have in common with it."""

TRIES = 5
"""How often a session is read again because another gateway went on with it."""


class Histories:
    """The sessions of one tenant, by what they say.

    Safe to use from several threads.

    Args:
        store: where they are.
        bounds: of a history's messages, and of what stays in memory.
        sayings: what messages say, for several tenants; None for this one's own.
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
        """By name. A request has its session for itself as long as it goes on, and the next one need not read it again."""
        self._held = 0
        """Bytes of these, as they were when their last requests were over."""
        self._memos: OrderedDict[str, Memo] = OrderedDict()
        """The bytes of histories, by session: one that begins with them is not taken apart, however long it is."""
        self._beginnings: dict[Asker, dict[str, bytes]] = {}
        """The same bytes, by who may go on from them."""
        self._kept = 0
        """Bytes of these."""
        self._warm: set[str] = set()
        """Users whose newest sessions were read since the start: a summary that a client made of one is recognised by its words,
        and the store has no index of those."""
        self._leads: OrderedDict[bytes, None] = OrderedDict()
        """System prompts without a summary, by digest: a client sends the same one with every new session, and it may be long."""
        self._replies = ReplyPlaces()
        """Where a reply is that its provider keeps."""

    # What a history says

    @property
    def held(self) -> int:
        """Sessions in memory."""
        return len(self._sessions)

    @property
    def size(self) -> int:
        """Bytes of these and of their histories, about, as they were when their last requests were over."""
        return self._held + self._kept

    def digests(
        self, form: Form, raws: Sequence[bytes], read: dict[bytes, list[Message]] | None = None
    ) -> tuple[list[bytes], list[int]]:
        """The digests of a history, and for each how many of the messages it ends.

        Args:
            read: takes what is read for it, by its JSON.

        Raises:
            WireError: a message is none.
        """
        name, known = form.name.encode(), self._sayings.get
        said = [known(key_of(name, raw)) or self._said(form, raw, {} if read is None else read) for raw in raws]
        digests: list[bytes] = []
        ends: list[int] = []
        for run in _runs(said):
            if len(run) > 1:
                found = canonical([message for raw in raws[run.start : run.stop] for message in form.read(raw)])
            else:
                only = said[run.start]
                found = [only[at + 1 : at + WIDTH] for at in range(0, len(only), WIDTH)]
            digests += found
            ends += [run.stop] * len(found)
        return digests, ends

    def _said(self, form: Form, raw: bytes, read: dict[bytes, list[Message]]) -> bytes:
        key = key_of(form.name.encode(), raw)
        said = self._sayings.get(key)
        if said is None:
            messages = read[raw] = form.read(raw)
            spoken = b"\1" if messages and messages[-1].role is Role.ASSISTANT else b"\0"
            said = b"".join(spoken + digest for digest in canonical(messages))
            self._sayings.keep(key, said)
        return said

    # Replies that their provider keeps

    def replied(self, conversation: Conversation, reply: str) -> None:
        """Remember where a reply is, by the id that its provider gave it: a client may go on from there by this id alone.

        Raises:
            StoreBusy: the store does not take it. Another gateway would pass on unread what follows.
        """
        session, key = conversation.session, _key(reply)
        session.ledger.record(Act.NOTE, policy="gateway", reply=key, turn=conversation.turn, calls=conversation.heard)
        for pause in PAUSES:
            if session.ledger.flush():
                break
            time.sleep(pause)
        else:
            raise StoreBusy("the id of a reply is not kept", advice="ask again")
        with self._lock:
            self._note(key, ReplyPlace(session.name, conversation.number, conversation.turn, conversation.heard))

    def _note(self, key: str, place: ReplyPlace) -> None:
        # Those that go for it are found in the store's index.
        self._replies.keep(key, place)

    def has(self, form: Form, raw: bytes, headers: Mapping[str, str], user: str) -> bool:
        """Whether a request goes on from a reply that is in a session of this user, and of this name if it names one."""
        reply = form.after(raw)
        return bool(reply) and self._place(reply, named(headers.get("x-kilburn-session", "")), user) is not None

    def _place(self, reply: str, name: str | None, user: str) -> tuple[SegmentInfo, int, tuple[str, ...]] | None:
        """The session with a reply, how many messages it has with it, and the ids of its calls if the session has others."""
        key = _key(reply)
        with self._lock:
            place = self._replies.get(key) or self._find_reply(key, user)
        session, number, turn, calls = place or ("", 0, 0, ())
        info = self._stored(session) if session else None
        if info is None or info.number != number or info.user != user or info.damaged:
            return None
        return (info, turn, calls) if name is None or root_of(name) == root_of(session) else None

    def _find_reply(self, key: str, user: str) -> ReplyPlace | None:
        """Find where a reply is that another gateway has answered, or this one before it was started again."""
        for owner in self.store.backend.histories.owners(key.encode(), FORKS):
            with suppress(StoreCorrupt):
                info = self._stored(owner.name)
                if info is not None and info.user == user:
                    return next((place for noted, place in self._notes(info, -owner.at - 1) if noted == key), None)
        return None

    def _notes(self, info: SegmentInfo, after: int) -> Iterator[tuple[str, ReplyPlace]]:
        """Read where replies are from the notes of a session behind event `after`, and remember it."""
        for event in self.store.backend.events(info.number, after, Act.NOTE):
            if "reply" in event.data:
                place = ReplyPlace(info.name, info.number, event.data["turn"], tuple(event.data["calls"]))
                self._note(event.data["reply"], place)
                yield event.data["reply"], place

    def _before(self, asked: Asked, name: str | None, user: str) -> _Before | None:
        """What came before a request that goes on from a reply.

        Raises:
            Problem: it was forgotten meanwhile.
        """
        if not asked.after:
            return None
        place = self._place(asked.after, name, user)
        if place is None:
            raise Problem(404, "previous_response_not_found", "the session with this response was forgotten")
        info, turn, calls = place
        asked.calls = calls
        with self._lock:
            known = self._sessions.get(info.name)
            if known is not None and not known.busy and known.turn == turn and not known.session.ledger.knows(info):
                # A database that was killed has lost what this has, and has got as much else since.
                self._put_away(known)
                known = None
            if known is None:
                known = self._opened(info.name, root_of(info.name), user)
                self._hold(known)
            if not known.busy and known.turn == turn:
                return _Before(known, turn, tuple(known.digests))
            return _Before(known, turn, tuple(canonical(copy_of(known.session, turn))))

    # Which session it continues

    def take(
        self,
        form: Form,
        asked: Asked,
        name: str | None,
        user: str,
        *,
        link: bool = True,
        hold: Hold | None = None,
        prepare: Callable[[Conversation], object] = id,
    ) -> Conversation:
        """The session that a request continues, with what is new appended; it is busy until `give`.

        Args:
            name: what the client calls it, or None.
            user: of the tenant, whose it is.
            link: whether it may be linked to an earlier session because it says the same.
            hold: its place among equal requests: if one was just answered, a session that has gone on behind it is no branch.
            prepare: called before anything is appended, to fit the window to the request.

        Raises:
            WireError: a message is none, or cannot follow. SpecError: no name of a session. StoreError.
        """
        with self._lock:
            self._trim()
        for left in reversed(range(TRIES)):
            conversation, repeated = None, hold is not None and hold.repeated
            try:
                found = self._remembered(form, asked, name, user) if left == TRIES - 1 and not repeated else None
                conversation, raws, digests = found or self._found(form, asked, name, user, link=link, repeated=repeated)
                conversation.linked, conversation.hold = link, hold
                self._check_length(len(conversation.digests) + len(raws))
                fresh = form.together([message for raw in raws for message in asked.read.get(raw) or form.read(raw)])
                conversation.met = conversation.session.ledger.figures, conversation.session.ledger.head
                prepare(conversation)
                check_attachments(conversation.session, fresh, asked.model)
                conversation.prefilled = bool(fresh) and fresh[-1].role is Role.ASSISTANT
                seen = len(conversation.seen)
                for some, words in _apart(fresh, digests, conversation.turn):
                    self._append(form, asked, conversation, some, len(raws), conversation.kept_with(words))
                    conversation.newest = dict(enumerate(visible(some), len(conversation.digests)))
                    conversation.extend(words)
                conversation.renewed = bool(fresh)
                conversation.start = conversation.turn
                recognised = not asked.after and (conversation.verbatim or conversation.before)
                conversation.memo = Memo(conversation, (form.name, name, user), asked, raws, seen) if recognised else None
                return conversation
            except (StoreStale, Forgotten) as error:
                # Another gateway went on with it, or what it takes over is just being forgotten: it is read again.
                if conversation is not None:
                    self.lose(conversation)
                if not left and isinstance(error, Forgotten):
                    raise StoreStale(f"the session cannot be read: {error.what}", advice="ask again") from error
                if not left:
                    raise
            except BaseException:
                if conversation is not None:
                    self._take_back(conversation)
                raise
            finally:
                if conversation is not None:
                    conversation.taken.set()
        raise AssertionError("a session is claimed or an error is raised")

    def _check_length(self, messages: int) -> None:
        if messages > self._messages:
            raise Problem(413, "too_many_messages", f"a history may have {self._messages:,} messages", param="messages")

    def _append(
        self, form: Form, asked: Asked, conversation: Conversation, fresh: Sequence[Message], count: int, said: Digests | None
    ) -> None:
        """Append what is new of a history: its last messages, so many. A result may have the id that the client gave a call.

        A compaction that a client brings was made, as far as anybody knows, of the session that this one is from: it cites all
        of it. A later one cites the one before it (see `pages_of`).
        """
        session, turn = conversation.session, conversation.turn
        first = next((at for at, message in enumerate(fresh) if any(map(is_compaction, message.parts))), None)
        if first is not None:
            # Those behind it cite it.
            cites = (*fresh[first].cites, *self._pages_before(session))
            fresh = [*fresh[:first], msgspec.structs.replace(fresh[first], cites=cites), *fresh[first + 1 :]]
        try:
            with compacting(session):
                session.append(*fresh, said=said, after=turn)
        except OrphanResult:
            form.split(asked)
            before = form.together([message for raw in asked.messages[:-count] for message in form.read(raw)])
            if asked.calls:
                parts = tuple(Part(kind=Kind.CALL, text="", name="-", call=call) for call in asked.calls)
                before = [Message(role=Role.ASSISTANT, parts=parts)]
            with compacting(session):
                session.append(*renamed(fresh, before, session), said=said, after=turn)
        conversation.turn = turn + len(fresh)
        conversation.note_kept(said)

    def _pages_before(self, session: Session) -> tuple[tuple[int, int], ...]:
        """The originals of the session that another one is from, by its ledger."""
        number = origin_in(session.ledger.events()).get("forked")
        if number is None:
            return ()
        rows = self.store.backend.pages(number)
        return tuple((number, page.id) for page, state in rows if page.id > 0 and state.at is not Place.DROPPED)

    def _take_back(self, conversation: Conversation) -> None:
        """Leave nothing of a session that never began. If even that fails, the next request of its root uses it."""
        conversation.busy = False
        with suppress(KilburnError):
            conversation.session.ledger.refresh()
            if not conversation.number or not conversation.session.window.last:
                self.lose(conversation)
                self.store.release(conversation.name)
                if conversation.number:
                    # Somebody has made it with nothing in it. Whoever sends what is refused cannot have the whole store read for
                    # it, so nothing is wiped. The store refuses it if another gateway has begun the session meanwhile.
                    self.store.backend.erase(conversation.number, wipe=False)

    def _found(
        self, form: Form, asked: Asked, name: str | None, user: str, *, link: bool, repeated: bool
    ) -> tuple[Conversation, list[bytes], list[bytes]]:
        """The session that a history continues; what is new of it, and its digests."""
        form.split(asked)
        self._check_length(len(asked.messages))
        digests, ends = self.digests(form, asked.messages, asked.read)
        root = root_of(name) if name else _root(user, digests)
        before = self._before(asked, name, user)
        if before is not None:
            root, digests, ends = before.conversation.root, [*before.digests, *digests], [*[0] * len(before.digests), *ends]
        request = _Request(form, asked, user, digests, ends, root, link=link, repeated=repeated, before=before)
        conversation, common = self._claim(request)
        return conversation, asked.messages[ends[common - 1] if common else 0 : ends[-1] if ends else 0], digests[common:]

    def _remembered(
        self, form: Form, asked: Asked, name: str | None, user: str
    ) -> tuple[Conversation, list[bytes], list[bytes]] | None:
        """The same for a history that begins with the bytes of an earlier one. Only the bytes that follow are read."""
        history = asked.history
        if asked.after:
            return None
        with self._lock:
            known = self._beginnings.get((form.name, name, user), {})
            # There may be hundreds, and a request waits for the one that looks.
            found = max(compress(known, map(history.startswith, known.values())), key=lambda name: len(known[name]), default="")
            if not found or self._memos[found].conversation.busy:
                return None
            best = self._memos[found]
            rest = history[len(best.prefix) :].lstrip()
            conversation, raws = best.conversation, _rest(b"[" + rest.removeprefix(b",") + b"]")
            digests, ends = self.digests(form, raws, asked.read)
            asked.lead = best.lead
            if best.chain:
                return self._resumed(best, form, raws, digests, ends)
            since = conversation.digests[best.digests :]
            if len(digests) < len(since) or digests[: len(since)] != since:
                return None
            *_, end = conversation.chain[-1] if conversation.chain else b"", *conversation.chained(digests[len(since) :])
            conversation.begin(end)
            self._sessions.move_to_end(conversation.name)
            return conversation, raws[ends[len(since) - 1] if since else 0 : ends[-1] if ends else 0], digests[len(since) :]

    def _resumed(
        self, memo: Memo, form: Form, raws: list[bytes], digests: list[bytes], ends: list[int]
    ) -> tuple[Conversation, list[bytes], list[bytes]] | None:
        """The same for a history that leaves out what it had added to a user's message, and begins with the bytes before that.

        Args:
            raws, digests, ends: the messages behind these bytes, as `digests` gives them.
        """
        known, before = memo.conversation, memo.digests
        history = [*known.seen[:before], *digests]
        end = next((at for at in range(len(history), before, -1) if is_spoken(history[at - 1])), 0)

        def read(start: int, stop: int) -> list[Message]:
            first = ends[start - before - 1] if start > before else 0
            return [message for raw in raws[first : ends[stop - before - 1]] for message in form.read(raw)]

        if not end or known.gaps or known.has(history[:end], len(known.digests), read) != 0:
            return None
        if self._ending(history, end, known.root, known.user) != {known.name: len(known.chain)}:
            return None
        known.before, *_ = reversed([*chained(digests[: end - before], memo.chain)])
        *_, asked = known.before, *chained(history[end:], known.before)
        known.begin(asked, history[:end])
        self._sessions.move_to_end(known.name)
        return known, raws[ends[end - before - 1] :], history[end:]

    def _ending(self, digests: Sequence[bytes], end: int, root: str, user: str) -> dict[str, int] | None:
        """Return the sessions that may have the first digests of a history, so many, at their end, with the number of their own.
        What else they have is the rest, or the rest and its answer. None if there may be more."""
        rest = len(digests) - end
        *_, tail = tails(digests[:end], root, user, max(0, end - 1))
        owners = self.store.backend.histories.owners(tail or b"", FORKS, tail=True)
        if len(owners) == FORKS:
            return None
        return {each.name: each.count for each in owners if each.count - each.at in (0, rest, rest + 1)}

    def _remember(self, conversation: Conversation) -> None:
        """Keep the bytes of a history, so that the next one is recognised by them. It happens after the request, so nobody waits
        for it."""
        memo, conversation.memo = conversation.memo, None
        if memo is None:
            return
        memo.prefix, memo.history = memo.history, b""
        with self._lock:
            self._forget(conversation.name)
            if conversation.prefilled or self._sessions.get(conversation.name) is not conversation:
                return
            self._memos[conversation.name] = memo
            self._beginnings.setdefault(memo.of, {})[conversation.name] = memo.prefix
            self._kept += len(memo.prefix)

    def _forget(self, name: str) -> None:
        memo = self._memos.pop(name, None)
        if memo is not None:
            self._kept -= len(memo.prefix)
            del self._beginnings[memo.of][name]
            if not self._beginnings[memo.of]:
                del self._beginnings[memo.of]

    def give(self, conversation: Conversation) -> None:
        """Its request is over."""
        spoken, words = conversation.spoken, conversation.words
        conversation.spoken, conversation.words = [], []
        with self._lock:
            for each in {conversation, self._sessions.get(conversation.name, conversation)}:
                if each.turn != conversation.session.window.turn and (each is conversation or not each.busy):
                    # The same request was answered twice, and this one does not know what the other said.
                    self.lose(each)
            if conversation.prefilled and spoken:
                # The client sees it as one message with what it began itself.
                self.lose(conversation)
                return
            # Whoever looks for a session sees all of this or nothing: another gateway may have answered, and its client be back.
            conversation.extend(words)
            conversation.last = _text_of(spoken) or conversation.last
            conversation.busy = False
            if self._sessions.get(conversation.name) is conversation:
                self._hold(conversation)
                if conversation.kept != len(conversation.chain):
                    self._keep(conversation)
            self._remember(conversation)

    def served(self, name: str) -> Session | None:
        """The session of that name, if it is in memory. Whoever changes it by hand changes the one that requests go on with, so
        none of them has to read it again."""
        with self._lock:
            known = self._sessions.get(name)
            return None if known is None else known.session

    def lose(self, conversation: Conversation) -> None:
        """Drop what memory holds of a session. The next request reads the session from the store."""
        with self._lock:
            self._put_away(conversation)

    def _put_away(self, conversation: Conversation) -> None:
        conversation.busy = False
        self._drop(conversation.name, conversation)
        self._forget(conversation.name)
        self.store.release(conversation.name)

    def _hold(self, conversation: Conversation) -> None:
        """Keep a session in memory, and count its bytes."""
        size = conversation.session.contents.size + MESSAGE * len(conversation.digests)
        self._held += size - conversation.held
        conversation.held = size
        self._sessions[conversation.name] = conversation

    def _drop(self, name: str, conversation: Conversation) -> None:
        """The opposite, if it is the one of that name."""
        if self._sessions.get(name) is conversation:
            self._held -= conversation.held
            conversation.held = 0
            del self._sessions[name]

    def _claim(self, request: _Request) -> tuple[Conversation, int]:
        """A session for a history, not busy with another request, and how many of its digests it has.

        A request that is made again gets the session that has it, as long as that can be told apart from a branch: see
        `Conversation.again`.
        """
        while True:
            with self._lock:
                found = self._claimed(request)
            if not isinstance(found, Conversation):
                return found
            found.taken.wait()

    def _claimed(self, request: _Request) -> tuple[Conversation, int] | Conversation:
        """The same, or a session that takes the same request in just now."""
        chain = request.chain
        if request.repeated and (answered := self._answered(request)) is not None:
            return answered, len(chain)
        busy = [each for each in self._sessions.values() if each.busy and each.user == request.user]
        others = self._unkept(request)
        alike: list[HistoryOwner] = []
        whole: set[str] = set()
        for at in range(len(chain), max(request.answered, 1) - 1, -1):
            said = self.store.backend.histories.owners(chain[at - 1], FORKS)
            alike = alike or said
            having = [*self._having(request, said, at)]
            if (found := self._free_of([*others, *having], chain, at)) is not None:
                return found, at
            if at == len(chain):
                whole = {each.name for each in said}
                for conversation in (*busy, *others, *having, *self._having(request, said, at + 1)):
                    if conversation.busy and conversation.asked == chain[-1] and not conversation.taken.is_set():
                        return conversation
                    if (asked := _asked_before(conversation, chain)) is not None:
                        return conversation.again(*asked), at
        if not alike and (continued := self._continued(request)) is not None:
            return continued
        if not alike and (longest := self._longest(chain[: request.answered - 1])):
            alike = self.store.backend.histories.owners(chain[longest - 1], FORKS)
            having = [*others, *self._having(request, alike, longest)]
            for at in sorted({len(each.chain) for each in having if longest <= len(each.chain) < request.answered}, reverse=True):
                if (found := self._free_of(having, chain, at)) is not None:
                    return found, at
        conversation, at = self._fork(request, *self._nearest(request, [*busy, *others], alike), whole)
        conversation.begin(chain[-1] if chain else b"")
        return conversation, at

    def _answered(self, request: _Request) -> Conversation | None:
        """Return a session that has gone on behind a whole history, as it was then; None if there is none."""
        count = len(request.chain)
        for owner in self.store.backend.histories.owners(request.chain[-1], FORKS) if count else ():
            known = self._current(owner.name, request)
            if known is not None and len(known.chain) > count and known.chain[count - 1] == request.chain[-1]:
                return known.again(turn_after(known.session, count), count)
        return None

    def _free_of(self, conversations: Iterable[Conversation], chain: Sequence[bytes], at: int) -> Conversation | None:
        """Begin with the first of some sessions that ends with the first digests of a chain, so many; None if there is none."""
        for each in conversations:
            # Since the store was asked, another gateway may have gone on with it.
            if not each.busy and len(each.chain) == at and each.chain[-1] == chain[at - 1]:
                # The store has said so, or has just been given them.
                each.kept = at
                each.begin(chain[-1])
                self._sessions.move_to_end(each.name)
                return each
        return None

    def _longest(self, chain: Sequence[bytes]) -> int:
        """Return how many digests of a chain a session in the store has at most. One that has a digest has those before it."""
        return bisect_left(chain, 1, key=lambda digest: not self.store.backend.histories.owners(digest, 1))

    def _continued(self, request: _Request) -> tuple[Conversation, int] | None:
        """Return the session that a history continues although it differs, and how much of the history it has: the client cut the
        beginning, or leaves out what it had added to a user's message. None if there is none, or if there are several: two
        conversations that began with the same words differ in what the client left out."""
        end, digests = request.answered, request.digests
        if not request.link or request.before is not None or not end:
            return None
        rest = digests[end:]
        counts = self._ending(digests, end, request.root, request.user)
        if counts is None:
            return None
        # The store has no digests of a session of which something was forgotten.
        held = [each for each in self._sessions.values() if digests[end - 1] in each.digests[-len(rest) - 2 :]]
        matches: list[tuple[bool, Conversation, int]] = []
        for name, count in ({each.name: 0 for each in held if is_linkable(each.root, request.root)} | counts).items():
            known = self._current(name, request)
            if known is None or known.busy:
                continue
            if len(known.chain) == count:
                known.kept = count
            for at in {len(known.digests) - more for more in (0, len(rest), len(rest) + 1)}:
                there = known.digests[at:] if at > 0 else [b""]
                if there == rest[: len(there)] or (there[:-1] == rest and is_spoken(there[-1])):
                    skipped = known.has(digests[:end], at, request.read)
                    # What was forgotten may have been anything.
                    sure = skipped == 0 and not known.gaps
                    if sure or (skipped is not None and end >= MIN_OVERLAP and is_own(request.spoken(end))):
                        matches.append((bool(skipped), known, at))
        best = [match for match in matches if not match[0]] or matches
        if len(best) != 1:
            return None
        [(_, known, at)] = best
        if len(known.digests) - at > len(rest):
            turn = turn_before_reply(known.session)
            twin = known.again(turn, len(known.digests) - 1)
            twin.verbatim = False
            return twin, len(digests)
        count = end + len(known.digests) - at
        known.begin(request.chain[-1], digests[:count])
        known.before = request.chain[count - 1]
        self._sessions.move_to_end(known.name)
        return known, count

    def _current(self, name: str, request: _Request) -> Conversation | None:
        """Return a session as the store has it by now, if the request's user may have it linked; None where it is damaged."""
        known, info = self._sessions.get(name), self._stored(name)
        if known is not None and not known.busy and (info is None or not known.session.ledger.knows(info)):
            # Another gateway has gone on with it.
            self._put_away(known)
        return self._conversation(name, request)

    def _linkable(self, request: _Request) -> list[Conversation]:
        """Return the sessions in memory that a request may be linked to by what it says, last used first. After a start the
        newest are read."""
        if request.user not in self._warm:
            if len(self._warm) >= WARM:
                self._warm.clear()
            self._warm.add(request.user)
            self._read_newest(request.user)
        idle = [each for each in reversed(self._sessions.values()) if each.user == request.user and not each.busy]
        return [each for each in idle if is_linkable(each.root, request.root)]

    def _having(self, request: _Request, said: Iterable[HistoryOwner], count: int) -> Iterator[Conversation]:
        """The sessions that have so many digests, among those that have one of a history."""
        for each in said:
            if each.count == count:
                conversation = self._conversation(each.name, request)
                if conversation is not None and self._is_old(conversation, each, request.chain):
                    # A request that goes on with it here has what it knows for itself.
                    if conversation.busy:
                        self._drop(conversation.name, conversation)
                    else:
                        self._put_away(conversation)
                    conversation = self._conversation(each.name, request)
                if conversation is not None and shared(conversation.chain, request.chain) >= each.at:
                    yield conversation

    def _is_old(self, conversation: Conversation, owner: HistoryOwner, chain: Sequence[bytes]) -> bool:
        """Whether memory has another state of a session than the store, which says that it has the beginning of a chain: another
        gateway went on with it, or a database that was killed has lost what was said last."""
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
        """The session that has most in common with a history, and how much: one of these, or one of the store's."""
        near, common = None, 0
        for conversation in conversations:
            both = shared(conversation.chain, request.chain)
            if both > common:
                near, common = conversation, both
        for each in alike:
            found = self._conversation(each.name, request) if each.at > common else None
            if found is not None and shared(found.chain, request.chain) > common:
                return found, shared(found.chain, request.chain)
        return near, common

    def _unkept(self, request: _Request) -> list[Conversation]:
        """Sessions of this root without a complete history in the store: something was forgotten, their last request was cut
        short, or they were imported. Completes it, unless something was forgotten."""
        found = []
        for name in self.store.backend.histories.missing(request.root, request.user, FORKS):
            conversation = self._conversation(name, request)
            if conversation is not None and not conversation.busy:
                conversation.fill(request.digests)
                self._keep(conversation)
                found.append(conversation)
        return found

    def _conversation(self, name: str, request: _Request) -> Conversation | None:
        """The session of that name, if it is of the same user and root; None where it is damaged."""
        if name not in self._sessions and is_linkable(root_of(name), request.root):
            info = self._stored(name)
            if info is not None and info.user == request.user:
                self._read(name, root_of(name), request.user)
        conversation = self._sessions.get(name)
        return conversation if conversation is not None and conversation.user == request.user else None

    def _keep(self, conversation: Conversation) -> None:
        """Store the history of a session that was imported or cut short, which no append has stored. No request fails by it: it
        can be made again from the pages."""
        backend, session = self.store.backend, conversation.session
        with suppress(StoreError):
            with session.lock:
                window, page = session.window, session.window.last
                if session.window.turn != conversation.turn or any(window.at(each) is Place.DROPPED for each in window.gone):
                    return  # another gateway went on with it, or something was forgotten
            for after in () if conversation.gaps else dict.fromkeys((conversation.kept, 0)):
                ends = tails(conversation.digests, conversation.root, conversation.user, after)
                said = Digests(after, tuple(conversation.chain[after:]), tuple(ends))
                if backend.histories.put(conversation.number, said, page=page):
                    conversation.kept = len(conversation.chain)
                    return

    def _fork(self, request: _Request, parent: Conversation | None, common: int, whole: set[str]) -> tuple[Conversation, int]:
        """A new session, with what it has in common with the nearest one.

        Args:
            whole: the sessions that have said all of it already, and have gone on in another way.

        Raises:
            StoreStale: another gateway has taken the same request meanwhile.
        """
        root, user = request.root, request.user
        before, known = self._compacted(request) if request.link and request.before is None else (None, 0)
        earlier = () if parent is None or not request.link else parent.linked_to
        if before is not None:
            earlier = (before.number, *before.linked_to)[:LINKED]
        copied = common
        if request.before is not None:
            # The client has none of it.
            parent, copied = request.before.conversation, len(request.before.digests)
        if before is None and parent is not None:
            branch = self._share(request, parent, copied, earlier, whole)
            if branch is not None:
                return branch
        if request.before is not None and parent is not None:
            kept = copy_of(parent.session, request.before.turn)
        else:
            copied = min((common, *parent.gaps)) if parent is not None and parent.own_pages else 0
            kept = copy_of(parent.session, turn_after(parent.session, copied)) if parent is not None and copied else []
        name = self._free(partial(_numbered, root), user)
        # Of two that look for a free name at the same time, both find the same one, and only one begins it; or the second one
        # finds here what the first has taken in.
        self._check_untaken(request, whole)
        # What is appended first begins it.
        session = self._unbegun(partial(session_of, self.store), name, user)
        conversation = Conversation(session, root, earlier)
        origin, others = before or parent, conversation.turn > 0
        if not others and origin is not None:
            old = [*kept, *request.read(copied, max(common, known))]
            try:
                self._begin(session, origin.session, earlier, old, kept)
            except BaseException:
                self.store.release(name)
                raise
            conversation = Conversation(session, root, earlier) if kept else conversation
        if others or conversation.turn != len(kept):
            raise StoreStale(f"another gateway has begun session {session.name!r}", advice="read it again")
        self._drop(session.name, self._sessions.get(session.name, conversation))
        self._hold(conversation)
        conversation.busy = True
        self._trim()
        return conversation, copied

    def _share(
        self, request: _Request, parent: Conversation, common: int, earlier: Sequence[int], whole: set[str]
    ) -> tuple[Conversation, int] | None:
        """Return a new branch that has what a history has in common with a session by reference, and how much that is; None where
        a copy takes less, or where something of it is forgotten or taken back.

        Raises:
            StoreStale: another gateway has taken the same request meanwhile.
        """
        session, before = parent.session, request.before
        # Something is appended in any case.
        common = min(common, len(request.digests) - 1)
        if not _has_shares(parent, common):
            return None
        self._check_untaken(request, whole)
        turn = before.turn if before is not None and len(before.digests) == common else turn_after(session, common)
        branch = Conversation(self._prepare(parent, turn, earlier), parent.root, earlier)
        if len(branch.digests) != common:
            # Several messages came at once, and no event is between them.
            self.store.release(branch.name)
            return None
        branch.kept = common
        self._hold(branch)
        branch.busy = True
        self._trim()
        return branch, common

    def _prepare(self, parent: Conversation, turn: int, earlier: Sequence[int]) -> Session:
        """Prepare a branch of a session as it was after a turn, under a name that is free."""
        session = parent.session
        return session.branches._prepare(self._free(f"{session.name}/{BRANCH}{{}}".format, parent.user), turn, earlier)

    def _check_untaken(self, request: _Request, whole: set[str]) -> None:
        """Check that no session has said what a history says but those of which this is known.

        Raises:
            StoreStale: another gateway has taken the same request meanwhile.
        """
        said = self.store.backend.histories.owners(request.chain[-1], FORKS) if request.chain else ()
        if not whole.issuperset(each.name for each in said):
            raise StoreStale("another gateway has taken the same request", advice="read it again")

    def _unbegun(self, opened: Callable[[str, str], Session], name: str, user: str) -> Session:
        """The session of a name that was free, opened for a user.

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

    def _free(self, name_of: Callable[[int], str], user: str) -> str:
        """The first name that is free of those with the numbers from 1."""
        free = 1
        while self._is_taken(name_of(free), user):
            free *= 2
        taken = free // 2
        while free - taken > 1:
            middle = (taken + free) // 2
            free, taken = (free, middle) if self._is_taken(name_of(middle), user) else (middle, taken)
        return name_of(free)

    def _is_taken(self, name: str, user: str) -> bool:
        """Whether a name is. A session in which nothing was said yet is for whoever says something first."""
        here = self._sessions.get(name)
        if here is not None:
            return here.busy or here.user != user or here.session.window.last > 0
        try:
            known = self._stored(name)
            return known is not None and (known.user != user or known.pages > 0)
        except StoreCorrupt:
            return True

    def _begin(
        self, session: Session, origin: Session, earlier: Sequence[int], known: Sequence[Message], kept: Sequence[Message]
    ) -> None:
        """Begin a session: note in its ledger where it comes from, and append the messages that it takes over.

        Raises:
            StoreStale: another gateway has begun it.
        """
        shared = sum(len(message.parts) for message in known)
        number = origin.number
        session.ledger.record(Act.NOTE, policy="gateway", forked=number, continues=list(earlier), known=shared)
        if kept:
            session.append(*kept, after=0)

    def _compacted(self, request: _Request) -> tuple[Conversation | None, int]:
        """The session whose history a client has compacted into this one by itself, if any; and how many digests at its
        beginning belong to the compaction."""
        others = self._linkable(request)
        ends: list[tuple[range, Conversation]] = []
        for conversation in others:
            common = shared(conversation.chain, request.chain)
            if found := end_of(conversation.digests, request.digests, request.places, common):
                ends.append((found, conversation))
        for found, conversation in sorted(ends, key=lambda each: each[0].stop, reverse=True):
            if is_own(request.read(found.start, found.stop)):
                return conversation, found.stop
        opening = list(request.opening(self._leads))
        for conversation in others[:SUMMED] if opening else ():
            for known, text in opening:
                quoted = quotes(conversation.last, text)
                if quoted and is_summary(conversation.last, quoted, conversation.session.contents.originals()):
                    return conversation, known
        self._leads.update(dict.fromkeys(request.leads))
        while len(self._leads) > LEADS:
            self._leads.popitem(last=False)
        return None, 0

    def _read_newest(self, user: str) -> None:
        """Read the sessions that were used last before a restart."""
        infos = sorted(self.store.sessions(), key=lambda info: info.used)
        for info in [info for info in infos if info.user == user and not info.damaged][-NEWEST:]:
            if info.name not in self._sessions:
                self._read(info.name, root_of(info.name), user)

    def _stored(self, name: str) -> SegmentInfo | None:
        return self.store.backend.segment(name, time=0.0, create=False)

    def _read(self, name: str, root: str, user: str) -> None:
        """Read a session into memory. One that is damaged stays as it is: what its client sends becomes another one."""
        try:
            self._hold(self._opened(name, root, user))
        except StoreCorrupt as error:
            log.warning("session %r is left out: %s", name, error)

    def _opened(self, name: str, root: str, user: str) -> Conversation:
        session = self.store.session(name, user)
        conversation = Conversation(session, root, session.branches.origin().get("continues", ()))
        conversation.last = last_reply(session)
        return conversation

    def _trim(self) -> None:
        """Keep in memory no more than is allowed: those that were used last, and in any case the very last one."""
        for conversation in [*self._sessions.values()][:-1] if self._is_full() else ():
            if not conversation.busy:
                self._put_away(conversation)
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
        """Append the reply of the model, and the results that were made here.

        If others went on with the session since its request began, it waits until the reply is whole. If that says what is there,
        nothing is written; else it is a branch. Our own calls make no such difference.

        Args:
            pages: that a search brought beside the question, which the first of these messages was answered from.
            more: whether the model goes on, and the reply is not whole yet.
        """
        words = canonical([*conversation.spoken, *messages])
        new, cited = list(messages), list(pages)
        with conversation.saying:
            for left in reversed(range(TRIES)):
                try:
                    # If others went on with it, nothing is written, and it is read again.
                    session = conversation.session if left == TRIES - 1 else self.current(conversation)
                    with session.lock:
                        others = said_after(session, conversation.start) if session.window.turn != conversation.turn else []
                        last = session.window.turn
                    told = canonical(message for _, message in others)
                    conversation.repeated = conversation.repeated or bool(told)
                    conversation.heard = ()
                    if last < conversation.turn:
                        # A database that was killed has lost what was asked: a reply to it has no place.
                        self.lose(conversation)
                        raise StoreUnavailable("what was asked is lost", advice="ask again")
                    if told and more:
                        conversation.waiting += new
                    elif told and told[: len(words)] == words:
                        conversation.heard = tuple(part.call or "" for message in new for part in message.parts if part.call)
                        conversation.turn, conversation.waiting = _end_of(others, len(words), conversation.start), []
                    else:
                        if told and conversation.hold is not None and conversation.hold.lost:
                            raise StoreBusy("another gateway has answered this request", advice="ask again")
                        if told:
                            new, cited = self._branch(conversation, new, cited)
                            last = conversation.turn
                        self._append_said(conversation, new, cited, words, last)
                    break
                except StoreStale:
                    if not left:
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
        """Append what was said, behind message `last`."""
        session = conversation.session
        if conversation.waiting:
            said = conversation.kept_with(conversation.words)
            session.append(*conversation.waiting, said=said, after=last)
            conversation.note_kept(said)
            last += len(conversation.waiting)
            conversation.turn, conversation.waiting = last, []
        new = list(messages)
        said = conversation.kept_with(words)
        with compacting(session):
            keep(session, new[0], pages, *new[1:], said=said, after=last)
        conversation.note_kept(said)
        conversation.turn = last + len(new)

    def current(self, conversation: Conversation) -> Session:
        """The session of a busy conversation as it is now.

        Raises:
            StoreStale: it was forgotten.
        """
        conversation.session.ledger.refresh()
        session = self.store.session(conversation.name)
        if session is not conversation.session:
            session.ledger.refresh()
            conversation.session = session
        return session

    def _branch(
        self, conversation: Conversation, messages: Sequence[Message], pages: Sequence[tuple[int, int]]
    ) -> tuple[list[Message], list[tuple[int, int]]]:
        """Give a session a process of its own, because others went on with the old one: it begins as the old one was before.
        Returns the new messages, and the sources of the reply as pages there.

        Raises:
            StoreStale: others are faster again.
        """
        session, turn, old = conversation.session, conversation.turn, conversation.name
        kept, start = copy_of(session, turn), len(copy_of(session, conversation.start))
        own = tuple(page for number, page in pages if number == conversation.number)
        waiting = brought_over(conversation.waiting, session, turn)
        said = brought_over(messages, session, turn)
        [shown] = brought_over([msgspec.structs.replace(messages[0], sources=own)], session, turn)
        with self._lock:
            if shares := _has_shares(conversation, len(conversation.digests)):
                branch = self._prepare(conversation, turn, conversation.linked_to)
            else:
                name = self._free(partial(_numbered, conversation.root), conversation.user)
                branch = self._unbegun(self.store.session, name, conversation.user)
                self._begin(branch, session, conversation.linked_to, kept, kept)
            self._drop(old, conversation)
            self._forget(old)
            conversation.session = branch
            self._hold(conversation)
        conversation.repeated, conversation.waiting = False, waiting
        if shares:
            conversation.kept = len(conversation.digests)
        else:
            conversation.turn, conversation.kept, conversation.start = len(kept), 0, start
        return said, [*pages, *((conversation.number, page) for page in shown.sources)]


class _Before(NamedTuple):
    """What came before a request that goes on from a reply: so many messages of a session, and what they say."""

    conversation: Conversation
    turn: int
    digests: tuple[bytes, ...]


class _Request:
    """A history that asks for a session.

    Args:
        digests, ends: what it says, and how many messages end with each digest.
        root: what its sessions are called.
        link: whether its session may be linked to another one.
        repeated: whether an equal request was just answered.
        before: what came before it, if the client does not send that.
    """

    def __init__(
        self,
        form: Form,
        asked: Asked,
        user: str,
        digests: list[bytes],
        ends: list[int],
        root: str,
        *,
        link: bool,
        repeated: bool,
        before: _Before | None = None,
    ) -> None:
        self._form, self._asked, self._ends, self.before = form, asked, ends, before
        self.user, self.digests, self.root, self.link, self.repeated = user, digests, root, link, repeated
        self.chain = list(chained(digests, seed_of(root, user)))
        self.answered = next((at for at in range(len(digests), 0, -1) if is_spoken(digests[at - 1])), 0)
        """How many of them there are up to the last one of the assistant."""

    @cached_property
    def places(self) -> dict[bytes, list[int]]:
        """Where each digest is."""
        places: dict[bytes, list[int]] = {}
        for at, digest in enumerate(self.digests):
            places.setdefault(digest, []).append(at)
        return places

    def read(self, start: int, stop: int) -> list[Message]:
        """The messages of some of the digests."""
        raws = self._asked.messages[self._ends[start - 1] if start else 0 : self._ends[stop - 1] if stop else 0]
        return [message for raw in raws for message in self._form.read(raw)]

    def spoken(self, end: int) -> Iterator[Message]:
        """Yield the assistant's messages of the first digests, so many, from the last."""
        for at in reversed(range(end)):
            if is_spoken(self.digests[at]):
                yield from self.read(at, at + 1)

    @cached_property
    def leads(self) -> dict[bytes, bytes]:
        """What stands before the history, by digest."""
        return {hashlib.blake2b(raw, digest_size=16).digest(): raw for raw in self._asked.system}

    def opening(self, leads: Container[bytes]) -> Iterator[tuple[int, str]]:
        """The texts with which it begins, each with how many digests it ends.

        Args:
            leads: digests of what needs no look.
        """
        for key, raw in self.leads.items():
            if key not in leads:
                yield from ((0, text) for text in texts_of(raw))
        for at, raw in enumerate(self._asked.messages[:OPENING], 1):
            yield from ((bisect_right(self._ends, at), text) for text in texts_of(raw))


def _has_shares(conversation: Conversation, common: int) -> bool:
    """Return whether a branch can have so many messages of a session by reference, and it is worth it."""
    session = conversation.session
    whole = session.number and not conversation.gaps and not session.window.gone
    return bool(whole) and common >= SHARED and session.name.count(f"/{BRANCH}") < DEPTH


def _apart(
    messages: Sequence[Message], digests: Sequence[bytes], turn: int
) -> Iterator[tuple[Sequence[Message], Sequence[bytes]]]:
    """Yield the new messages of a history with their digests. A long history that was said elsewhere comes before its newest
    messages: branches begin between two appends."""
    newest = sum(1 for _ in takewhile(lambda message: message.role is not Role.ASSISTANT, reversed(messages)))
    said = len(messages) - newest
    if turn or not newest or said < SHARED:
        yield from [(messages, digests)] if messages else ()
        return
    count = len(digests) - sum(1 for _ in visible(messages[said:]))
    yield messages[:said], digests[:count]
    yield messages[said:], digests[count:]


def _asked_before(conversation: Conversation, chain: Sequence[bytes]) -> tuple[int, int] | None:
    """Return how many messages and digests a session had with a request that has this chain: one that it answers now, or that it
    answered last. None if it had not."""
    if conversation.busy:
        return (conversation.start, len(conversation.digests)) if conversation.asked == chain[-1] else None
    if conversation.chain[-2:-1] != chain[-1:]:
        return None
    turn = turn_before_reply(conversation.session)
    return (turn, len(chain)) if len(canonical(copy_of(conversation.session, turn))) == len(chain) else None


def _end_of(messages: Iterable[tuple[int, Message]], count: int, end: int) -> int:
    """The number of the last message of so many digests after message `end`."""
    said: list[Message] = []
    for number, message in messages:
        said.append(message)
        if len(canonical(said)) > count:
            break
        end = number
    return end


def _runs(said: Sequence[bytes]) -> Iterator[range]:
    """Which messages of a history are one: what the assistant says in a row, with the reasoning before, between and behind it,
    which says nothing by itself."""
    start, spoken = 0, None
    for at, here in enumerate(said):
        joins = spoken is None or (spoken and (not here or here[0]))
        if not joins:
            yield range(start, at)
            start, spoken = at, None
        spoken = here[-WIDTH] if here else spoken
    if said:
        yield range(start, len(said))


def _numbered(root: str, number: int) -> str:
    """The name of a session of a root."""
    return f"{root}~{number}" if number > 1 else root


def _key(reply: str) -> str:
    return hashlib.blake2b(reply.encode("utf-8", "replace"), digest_size=12).hexdigest()


def _rest(raw: bytes) -> list[bytes]:
    return [] if raw == b"[]" else listed(raw, "messages")


def _text_of(messages: Iterable[Message]) -> str:
    return "".join(part.text for message in messages for part in message.parts if part.kind is Kind.TEXT)


def _root(user: str, digests: Sequence[bytes]) -> str:
    first = digests[0] if digests else b""
    return f"chat-{hashlib.blake2b(user.encode() + bytes(1) + first, digest_size=8).hexdigest()}"


def named(header: str) -> str | None:
    """The session's name that a client gives in a header, as HTTP has it: the bytes of its UTF-8. None for none.

    Raises:
        SpecError: no name that a client may give.
    """
    try:
        name = header.encode("latin-1").decode().strip()
    except UnicodeError:
        raise SpecError("a session name that is not UTF-8", advice="send the bytes of its UTF-8, or letters of ASCII") from None
    if len(name) > LONGEST_NAME:
        raise SpecError(f"a session name of {len(name):,} characters", advice=f"give one of {LONGEST_NAME} at most")
    if not name.isprintable():
        raise SpecError("a session name with characters that cannot be seen", advice="leave them out")
    if name.startswith("@"):
        raise SpecError("a session name that begins with @", advice="these names are of collections; give another one")
    return name or None

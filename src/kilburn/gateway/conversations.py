"""A session in the gateway's memory: the digests of its messages, and copies of its messages for other sessions."""

from __future__ import annotations

import hashlib
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from kilburn.backend import Digests
from kilburn.errors import StoreStale
from kilburn.gateway.problems import Problem
from kilburn.gateway.repeats import Hold
from kilburn.kernel.admission import attachments_above
from kilburn.kernel.render import Prompt
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.message import TRUST_OF_ROLE, Kind, Message, Role, Trust
from kilburn.page import ATOMIC, Page, Place, address_of
from kilburn.terminal import line
from kilburn.wire.digests import HIDDEN, canonical, is_spoken, visible
from kilburn.wire.histories import chain_seed, chained, tails

if TYPE_CHECKING:
    from kilburn.gateway.figures import SessionState

BESIDE = 8
"""Maximum number of system prompts and tool lists whose cost is cached, for each session."""


Reader = Callable[[int, int], list[Message]]


class Conversation:
    """A session in memory, and the state of the request that uses it.

    Args:
        session: the session.
        root: the name that the client gave it, or that its first message determines; forks have the same root.
        earlier: numbers of the sessions that the client compacted into this one, newest first.
    """

    def __init__(self, session: Session, root: str, earlier: Sequence[int] = ()) -> None:
        self.session, self.root, self.linked_to = session, root, tuple(earlier)
        self.linked = True
        """Whether the present request may search the linked sessions."""
        with session.lock:
            head = -1
            while head != session.ledger.head:
                # Reading a session may refresh it with other gateways' changes.
                head = session.ledger.head
                self.turn = session.window.turn
                """Number of its messages known here; later ones are of another gateway."""
                self.digests, self.gaps = _said_in(session)
                """Digests of the messages that the client sees, and the indexes of those with forgotten pages."""
        self.seed = chain_seed(root, self.user)
        self.chain = list(chained(self.digests, self.seed))
        """For each digest, a chained digest that also covers all earlier ones and the session's owner."""
        self.kept = 0
        """Number of these links that the store is known to have."""
        self.seen = [*self.digests]
        """Digests of the client's last history and of the reply: the client may omit messages of the session."""
        self.before = b""
        """The last link of such a history's chain before the newest messages."""
        self.newest: dict[int, Message] = {}
        """The client's last messages by their index: a client shortens these in its next request."""
        self.verbatim = True
        """Whether the present request has all messages as the session has them."""
        self.unsigned = False
        """Whether reasoning from the client is omitted because the upstream refused it."""
        self.answered = any(call.startswith(HIDDEN) for call in session.window.calls)
        """Whether it has calls of our own tools."""
        self._costs: dict[tuple[str, bytes], int] = {}
        """Costs by the counter's name and the digest of the counted text, which may be long."""
        self.state: SessionState | None = None
        """The session's figures after the last request; see `kilburn.gateway.figures`."""
        self.held = 0
        """Its share of the bytes that are counted as in memory."""
        self.busy = False
        self.hold: Hold | None = None
        """The lease of the present request."""
        self.reserved = 0
        """The last event of its ledger when the present request had reserved its turn."""
        self.asked = b""
        """The last link of its chain once the present request is appended."""
        self.taken = threading.Event()
        """Set when the present request has been appended or has failed."""
        self.start = self.turn
        """Number of its messages before the reply."""
        self.met = session.ledger.figures, session.ledger.head
        """Its figures and its last event before the present request."""
        self.saying = threading.Lock()
        """Held while a reply is compared and appended."""
        self.repeated = False
        """Whether others have continued the session, so that the present reply is not in it: see `again`."""
        self.waiting: list[Message] = []
        """Our own calls and results that are not in the session: a branch gets them, if one begins."""
        self.prefilled = False
        self.renewed = False
        """Whether messages were just appended, so that the session is known to be current."""
        self.remember: Callable[[], None] | None = None
        """Called at the end of the current request to store its history."""
        self.spoken: list[Message] = []
        """Messages appended for the present request's reply."""
        self.words: list[bytes] = []
        """Digests of these messages."""
        self.heard: tuple[str, ...] = ()
        """Ids under which the client has the calls of a reply that was stored already."""
        self.last = ""
        """Text of the last reply, by which a client's own compaction is recognised."""

    def begin(self, tail: bytes, history: Sequence[bytes] | None = None) -> None:
        """Mark the session as busy with a request.

        Args:
            tail: last link of the chain of the request's history.
            history: digests of the session that the history has; None for all messages as the session has them.
        """
        self.busy, self.asked, self.taken = True, tail, threading.Event()
        self.verbatim, self.seen = history is None, [*(self.digests if history is None else history)]

    def again(self, turn: int, count: int) -> Conversation:
        """Return the session for a repeated request, as it was then: with the first `turn` messages and `count` digests. It is
        the same session, whose prompt omits later messages; only a different reply begins a branch."""
        twin = Conversation.__new__(Conversation)
        twin.__dict__.update(self.__dict__)
        twin.turn = twin.start = turn
        twin.digests, twin.chain = self.digests[:count], self.chain[:count]
        twin._costs, twin.spoken, twin.words, twin.waiting, twin.remember, twin.prefilled = {}, [], [], [], None, False
        twin.state = None
        twin.held = 0
        twin.kept = min(self.kept, count)
        twin.repeated = True
        twin.begin(twin.chain[-1], None if self.verbatim else twin.digests)
        return twin

    @property
    def name(self) -> str:
        """Name of the session."""
        return self.session.name

    @property
    def earlier(self) -> tuple[int, ...]:
        """Numbers of the linked sessions, if the present request may search them."""
        return self.linked_to if self.linked else ()

    @property
    def number(self) -> int:
        """Number of its segment."""
        return self.session.number

    @property
    def user(self) -> str:
        """The user who owns it."""
        return self.session.info.user

    @property
    def own_pages(self) -> bool:
        """Whether it has facts that a client's history lacks: our own calls, sources of replies, or lowered trust."""
        pages = _live(self.session)
        return self.answered or any(page.sources or page.cites or page.trust < TRUST_OF_ROLE[page.role] for page in pages)

    def has(self, digests: Sequence[bytes], at: int, reader: Reader) -> int | None:
        """Return how many of the session's first `at` messages a history omits, if it has the others; None if it does not
        continue the session. A client may omit the oldest messages, and text that it had added to a user's message or beside it,
        such as retrieved passages.

        Args:
            digests: digests of the history, up to a message of the assistant.
            reader: parses the messages of a range of these digests.
        """
        cached = dict(self.newest)
        end, earlier = len(digests), self.seen[: len(self.seen) - len(self.digests) + at]
        while end and at:
            if digests[end - 1] != self.digests[at - 1]:
                return None
            first, start = _start_of_turn(digests, end - 1), _start_of_turn(self.digests, at - 1)
            if not self._has_turn(cached, range(start, at - 1), digests, range(first, end - 1), reader):
                return None
            earlier = earlier[: len(earlier) - (at - start)]
            end, at = first, start
            if earlier[len(earlier) - end :] == digests[:end] and len(earlier) >= end:
                # The client had omitted the same before.
                at, end = len(earlier) - end, 0
        return None if end else at

    def _has_turn(
        self, cached: dict[int, Message], places: range, digests: Sequence[bytes], history: range, reader: Reader
    ) -> bool:
        """Return whether a history has the session's messages between two messages of the assistant, except for added text.

        Args:
            cached: messages of the session by their index, read so far; this function adds to it.
        """
        if self.digests[places.start : places.stop] == digests[history.start : history.stop] or (
            not history and not history.start
        ):
            return True
        if not cached.keys() >= {*places}:
            cached.update(enumerate(visible(self.session.contents.originals("forgotten"))))
        added = list(places)
        for index in reversed(history):
            messages = reader(index, index + 1)
            while added:
                place = added.pop()
                if self.digests[place] == digests[index] or place in self.gaps:
                    break
                # A message may have been forgotten meanwhile.
                if len(messages) != 1 or place not in cached:
                    return False
                if _is_contained(messages[0], cached[place]):
                    break
                if cached[place].role is Role.TOOL:
                    return False
            else:
                return False
        return bool(history) and all(place in cached and cached[place].role is not Role.TOOL for place in added)

    @property
    def whole(self) -> bool:
        """Whether the window has exactly the client's own messages: none evicted, and none hidden from the client."""
        return not self.answered and self.session.window.whole

    def cost(self, raw: bytes) -> int:
        """Return the tokens of JSON that is sent beside the conversation."""
        counter = self.session.counter
        key = counter.name, hashlib.blake2b(raw, digest_size=16).digest()
        tokens = self._costs.get(key)
        if tokens is None:
            if len(self._costs) >= BESIDE:
                self._costs.clear()
            tokens = self._costs[key] = counter.count(raw.decode("utf-8", "replace"))
        return tokens

    @property
    def then(self) -> int | None:
        """The turn as of which the present request's prompt is rendered; None for the latest."""
        gone_on = self.session.window.turn != self.turn and (self.repeated or self.spoken)
        return self.turn if self.waiting or gone_on else None

    def render(self, form: str, request: Mapping[str, str] | None = None) -> Prompt:
        """Render the prompt of the present request, without messages that others have appended since it began.

        Args:
            request: the request's ids, which the ledger stores with the prompt.

        Raises:
            StoreStale: others have continued the session before the first reply to this request.
        """
        session = self.session
        if (turn := self.then) is not None:
            with session.lock:
                return session.prompts.render_from(turn, self.waiting, form, request=request)
        prompt = session.render(form, request=request)
        if session.window.turn != self.turn:
            raise StoreStale("another gateway has continued the session", advice="read it again")
        return prompt

    def reply(self) -> Message | None:
        """Return the session's stored reply to the present request, as the client sees it; None if there is none."""
        messages = (message for _, message in said_after(self.session, self.start))
        first = next(visible(messages), None)
        return first if first is not None and first.role is Role.ASSISTANT else None

    def fill(self, digests: Sequence[bytes]) -> None:
        """Fill in the digests of forgotten messages from a history whose other digests are equal. Nothing is stored."""
        prefix = digests[: len(self.digests)]
        if self.gaps and _agree(self.digests, self.gaps, prefix):
            self.digests, self.seen, self.chain = list(prefix), list(prefix), list(chained(prefix, self.seed))

    def kept_with(self, digests: Sequence[bytes]) -> Digests | None:
        """Return the history index that the store gets with an append of these digests; None if the client's next history will
        differ: messages were forgotten, or the client sees a reply as one message with the beginning that it sent itself."""
        if self.gaps or self.prefilled:
            return None
        chain = [*self.chain, *self.chained(digests)]
        # Consecutive messages of the assistant count as one: a further round may change the digest of the one before.
        start = self.kept if self.words == digests[: len(self.words)] else 0
        ends = tuple(tails([*self.digests, *digests], self.root, self.user, start))
        return Digests(start, tuple(chain[start:]), ends, inherits=start > 0 and not self.number)

    def note_kept(self, history: Digests | None) -> None:
        """Note the history index that the store got with an append."""
        if history is not None:
            self.kept = history.offset + len(history.added)

    def extend(self, digests: Sequence[bytes]) -> None:
        """Add the digests of appended messages."""
        self.chain += self.chained(digests)
        self.digests += digests
        self.seen += digests

    def chained(self, digests: Iterable[bytes]) -> list[bytes]:
        """Return the links that these digests add to the chain."""
        return [*chained(digests, self.chain[-1] if self.chain else self.seed)]


def _start_of_turn(digests: Sequence[bytes], end: int) -> int:
    """Return the start of the run of other messages behind the assistant's last message before `end`."""
    while end and not is_spoken(digests[end - 1]):
        end -= 1
    return end


def _is_contained(message: Message, longer: Message) -> bool:
    """Return whether a user's message is contained in a longer one. Spaces and line breaks do not count, because templates change
    them."""
    if message.role is not Role.USER or longer.role is not Role.USER or any(part.kind is not Kind.TEXT for part in message.parts):
        return False
    words, longer_words = (
        " ".join(" ".join(part.text for part in msg.parts if part.kind is Kind.TEXT).split()) for msg in (message, longer)
    )
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", longer_words) is not None


def shortened(window: WindowState) -> list[str]:
    """Return one line for each page that the prompt omits or shortens, among the leading system prompt, the provider's newest
    compaction, and the messages after the assistant's last one."""
    newest: list[int] = []
    for page in range(window.last, 0, -1):
        if window.pages[page].role is Role.ASSISTANT:
            break
        newest.append(page)
    leading: list[int] = []
    for page in range(1, newest[-1] if newest else window.last + 1):
        if window.pages[page].role is not Role.SYSTEM:
            break
        leading.append(page)
    lines: list[str] = []
    compaction = window.compaction
    for page in (*leading, *(() if compaction is None else (compaction,)), *reversed(newest)):
        place, label = window.at(page), window.pages[page].label
        if place in (Place.OUT, Place.STUB):
            lines.append(line(f"{address_of(page)} left out: {label}" if label else f"{address_of(page)} left out"))
        elif place is Place.FOLDED:
            lines.append(f"{address_of(page)} shortened")
    return lines


def check_attachments(session: Session, messages: Sequence[Message], model: str) -> None:
    """Price attachments by the rules of the request's model, and refuse an attachment of the newest request that does not fit
    into any prompt of this session: the model would answer without having seen it. Earlier attachments may be evicted like other
    pages.

    Raises:
        Problem: 400, which names the attachment. Nothing was appended.
    """
    if any(part.kind in ATOMIC for message in messages for part in message.parts):
        session.prompts.price_attachments_for(model)
    newest = reversed([*takewhile(lambda message: message.role is not Role.ASSISTANT, reversed(messages))])
    for label, tokens in attachments_above(newest, session.counter, session.prompts.capacity):
        raise Problem(
            400,
            "attachment_too_large",
            f"an attachment ({line(label)}) takes about {tokens:,} tokens, and the window leaves {session.prompts.capacity:,} "
            "for the conversation; send a smaller part of it, or raise the gateway's --window",
            param="messages",
        )


def last_reply(session: Session) -> str:
    """Return the text of a session's last message, if it is the assistant's; else an empty text."""
    last = [page for page in _live(session) if page.message == session.window.turn]
    return "".join(session.contents.text(page.id) for page in last if page.role is Role.ASSISTANT and page.kind is Kind.TEXT)


def turn_before_reply(session: Session) -> int:
    """Return the number of a session's messages before the assistant's last reply."""
    for page in reversed(_live(session)):
        if page.role is not Role.ASSISTANT and not (page.call or "").startswith(HIDDEN):
            return page.message
    return 0


def _said_in(session: Session) -> tuple[list[bytes], frozenset[int]]:
    """Return the digests of the messages that the client sees, and the indexes of those unknown because of forgotten pages."""
    if len(_live(session)) == session.window.last:
        return canonical(session.contents.originals()), frozenset()
    first, second = (canonical(session.contents.originals(marker)) for marker in ("one", "other"))
    return first, frozenset(at for at, pair in enumerate(zip(first, second, strict=True)) if pair[0] != pair[1])


def _agree(digests: Sequence[bytes], gaps: frozenset[int], expected: Sequence[bytes]) -> bool:
    """Return whether all digests outside the gaps are equal."""
    return len(digests) == len(expected) and all(
        at in gaps or digest == expected_digest
        for at, (digest, expected_digest) in enumerate(zip(digests, expected, strict=True))
    )


def turn_after(session: Session, count: int) -> int:
    """Return the number of the message, hidden ones counted, up to which the client sees `count` messages."""
    messages = session.contents.originals()
    numbers = range(len(messages) + 1)
    end = bisect_right(numbers, count, key=lambda end: sum(1 for _ in visible(messages[:end]))) - 1
    return end and _numbers(session)[end - 1]


def copy_messages(session: Session, turn: int) -> list[Message]:
    """Copy the messages of a session up to a turn for another one. Recalled text keeps its citations, and no message gains
    trust."""
    trusts: dict[int, Trust] = {}
    with session.lock:
        # Reading may refresh the session with another program's messages, so this comes first.
        numbered = _numbered(session)
        for page in _live(session):
            trusts[page.message] = min(trusts.get(page.message, page.trust), page.trust)
        copied = [
            msgspec.structs.replace(message, trust=min(trusts[at], TRUST_OF_ROLE[message.role]))
            for at, message in numbered
            if at <= turn
        ]
        return brought_over(copied, session, turn)


def brought_over(messages: Iterable[Message], session: Session, turn: int) -> list[Message]:
    """Return messages that cite pages of a session for a copy of it up to a turn: they also cite the copied pages."""
    window, number = session.window, session.number
    live = _live(session)
    ids = {original.id: at for at, original in enumerate((original for original in live if original.message <= turn), 1)}
    live_ids = {original.id for original in live}
    out = []
    for message in messages:
        sources: set[int] = set()
        waiting = list(message.sources)
        while waiting:
            page = waiting.pop()
            waiting += window.pages[page].sources if page < 0 else ()
            sources |= {page} & live_ids
        local = sorted(ids[page] for page in sources if page in ids)
        cites = tuple({*message.cites, *((number, page) for page in sources)})
        out.append(msgspec.structs.replace(message, sources=tuple(local), cites=cites))
    return out


def said_after(session: Session, turn: int) -> list[tuple[int, Message]]:
    """Return the messages of a session after a turn, each with its number."""
    return [(number, message) for number, message in _numbered(session) if number > turn]


def _live(session: Session) -> list[Page]:
    """Return the transcript's pages that are not forgotten."""
    # Another thread may be changing the session.
    with session.lock:
        window = session.window
        return [page for page in window.pages.originals() if window.at(page.id) is not Place.DROPPED]


def _numbers(session: Session) -> list[int]:
    """Return the numbers of the messages that are not forgotten."""
    return list(dict.fromkeys(page.message for page in _live(session)))


def _numbered(session: Session) -> list[tuple[int, Message]]:
    """Return the messages that are not forgotten, each with its number."""
    with session.lock:
        # Reading may refresh the session with others' erasures, so the numbers are read afterwards.
        messages = session.contents.originals()
        return [*zip(_numbers(session), messages, strict=True)]


def renamed(messages: Sequence[Message], earlier: Iterable[Message], session: Session) -> list[Message]:
    """Return messages in which the client's ids of calls are replaced by the session's ids.

    Args:
        earlier: the client's earlier messages of the session, with its own ids. The calls are in the same order.
    """
    ours = [page.call for page in _live(session) if page.kind is Kind.CALL and not (page.call or "").startswith(HIDDEN)]
    theirs = [part.call for message in earlier for part in message.parts if part.kind is Kind.CALL]
    names = dict(reversed([*zip(reversed(theirs), reversed(ours), strict=False)]))
    return [
        msgspec.structs.replace(
            message,
            parts=tuple(
                part if part.kind is Kind.CALL else msgspec.structs.replace(part, call=names.get(part.call, part.call))
                for part in message.parts
            ),
        )
        for message in messages
    ]

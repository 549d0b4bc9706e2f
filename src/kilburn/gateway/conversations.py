"""A session as the gateway knows it: what it says in digests, and its messages as another session takes them over."""

from __future__ import annotations

import hashlib
import re
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

import msgspec

from kilburn.backend import Digests
from kilburn.errors import StoreStale
from kilburn.gateway.form import Asked
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

OF_WORDS = re.compile("chat-[0-9a-f]{16}")
"""The name of a session that its client gave none."""

BESIDE = 8
"""System prompts and lists of tools whose cost is remembered, for each session."""


Reader = Callable[[int, int], list[Message]]

Asker = tuple[str, str | None, str]
"""Who may go on from what was said before: a form, the client's name of the session, and the user."""


class Conversation:
    """A session as far as it is in memory.

    Args:
        session: the session.
        root: the name that it was asked for by, or that its first message gives; forks have the same.
        earlier: numbers of the sessions that the client made this one of, newest first.
    """

    def __init__(self, session: Session, root: str, earlier: Sequence[int] = ()) -> None:
        self.session, self.root, self.linked_to = session, root, tuple(earlier)
        self.linked = True
        """Whether the request that goes on now may see those."""
        with session.lock:
            head = -1
            while head != session.ledger.head:
                # Who reads a session learns what other gateways have done meanwhile.
                head = session.ledger.head
                self.turn = session.window.turn
                """Messages that it has, as far as is known here; more are of another gateway."""
                self.digests, self.gaps = _said_in(session)
                """Of all that the client sees of it; and which of them are of messages with forgotten pages."""
        self.seed = seed_of(root, self.user)
        self.chain = list(chained(self.digests, self.seed))
        """For each digest, one that says all that came before it too, and whose it is."""
        self.kept = 0
        """How many of these the store has, as far as is known here."""
        self.seen = [*self.digests]
        """The digests of the client's last history and of what followed: the client may have left out what the session has."""
        self.before = b""
        """What the chain of such a history has before the newest messages."""
        self.newest: dict[int, Message] = {}
        """The last messages that a client sent, by their places: these are the ones that a client shortens next."""
        self.verbatim = True
        self.unsigned = False
        """Whether reasoning that the client sends is left out, because the upstream refused it."""
        """Whether the request that goes on now has all messages as the session has them."""
        self.answered = any(call.startswith(HIDDEN) for call in session.window.calls)
        """Whether it holds calls of our own."""
        self._costs: dict[tuple[str, bytes], int] = {}
        """By the name of the counter and the digest of what is counted: it may be as long as a body."""
        self.held = 0
        """Bytes of it that are counted among those in memory."""
        self.busy = False
        self.hold: Hold | None = None
        """The place of the request that goes on now among equal ones."""
        self.asked = b""
        """What its chain ends with once the request that goes on now is in it."""
        self.taken = threading.Event()
        """Set once it is, or never will be."""
        self.start = self.turn
        """Messages that it had then, before the reply."""
        self.met = session.ledger.figures, session.ledger.head
        """Its figures and its last event before the request that goes on now."""
        self.saying = threading.Lock()
        """Held while a reply is appended, if it is not there yet."""
        self.repeated = False
        """Whether others went on with the session, and what is said here is not in it: see `again`."""
        self.waiting: list[Message] = []
        """Our own calls and their results that are said here and not in the session: a branch has them, if it comes to one."""
        self.prefilled = False
        self.renewed = False
        """Whether something was appended just now, so that the session is known as it is."""
        self.memo: Memo | None = None
        """Of the request that goes on now."""
        self.spoken: list[Message] = []
        """What was said in the request that goes on now."""
        self.words: list[bytes] = []
        """The digests of that."""
        self.heard: tuple[str, ...] = ()
        """Calls of a reply that was there already, by the ids that the client heard."""
        self.last = ""
        """The last reply, by which the client's own compaction is recognised."""

    def begin(self, asked: bytes, seen: Sequence[bytes] | None = None) -> None:
        """Note that a request goes on with it.

        Args:
            asked: what the chain of the history ends with.
            seen: what the history has of the session; None for all messages as the session has them.
        """
        self.busy, self.asked, self.taken = True, asked, threading.Event()
        self.verbatim, self.seen = seen is None, [*(self.digests if seen is None else seen)]

    def again(self, turn: int, count: int) -> Conversation:
        """The session for a request that it had before, as it was then: with so many messages and digests. It is the same
        session, and its prompt is made without what came after; only a reply that says something else begins a branch."""
        twin = Conversation.__new__(Conversation)
        twin.__dict__.update(self.__dict__)
        twin.turn = twin.start = turn
        twin.digests, twin.chain = self.digests[:count], self.chain[:count]
        twin._costs, twin.spoken, twin.words, twin.waiting, twin.memo, twin.prefilled = {}, [], [], [], None, False
        twin.held = 0
        twin.kept = min(self.kept, count)
        twin.repeated = True
        twin.begin(twin.chain[-1], None if self.verbatim else twin.digests)
        return twin

    @property
    def name(self) -> str:
        """The session's name."""
        return self.session.name

    @property
    def earlier(self) -> tuple[int, ...]:
        """Numbers of the sessions that this one goes on from, if it may see them now."""
        return self.linked_to if self.linked else ()

    @property
    def number(self) -> int:
        """The number of its segment."""
        return self.session.number

    @property
    def user(self) -> str:
        """Whose it is."""
        return self.session.info.user

    @property
    def own_pages(self) -> bool:
        """Whether it holds what a client's history does not say: calls of our own, what something was answered from, or that
        something is believed less."""
        pages = _live(self.session)
        return self.answered or any(page.sources or page.cites or page.trust < TRUST_OF_ROLE[page.role] for page in pages)

    def has(self, digests: Sequence[bytes], at: int, read: Reader) -> int | None:
        """Return how many of the session's first `at` messages are not in a history that has the others; None if it is another
        one. A client may have left out the oldest messages, and what it had added to a user's message or beside it, such as
        retrieved passages.

        Args:
            digests: of the history, which ends with the assistant's message; `read` gives the messages of some of them, by the
                first and the one behind the last.
        """
        said = dict(self.newest)
        end, before = len(digests), self.seen[: len(self.seen) - len(self.digests) + at]
        while end and at:
            if digests[end - 1] != self.digests[at - 1]:
                return None
            first, start = _start_of_turn(digests, end - 1), _start_of_turn(self.digests, at - 1)
            if not self._has_turn(said, range(start, at - 1), digests, range(first, end - 1), read):
                return None
            before = before[: len(before) - (at - start)]
            end, at = first, start
            if before[len(before) - end :] == digests[:end] and len(before) >= end:
                # The client had left out the same before.
                at, end = len(before) - end, 0
        return None if end else at

    def _has_turn(self, said: dict[int, Message], places: range, digests: Sequence[bytes], others: range, read: Reader) -> bool:
        """Return whether what a history has between two messages of the assistant is what the session has there, but for what
        was added.

        Args:
            said: messages of the session that are read already; it grows.
        """
        if self.digests[places.start : places.stop] == digests[others.start : others.stop] or (not others and not others.start):
            return True
        if not said.keys() >= {*places}:
            said.update(enumerate(visible(self.session.contents.originals("forgotten"))))
        added = list(places)
        for other in reversed(others):
            messages = read(other, other + 1)
            while added:
                place = added.pop()
                if self.digests[place] == digests[other] or place in self.gaps:
                    break
                # Something may have been forgotten meanwhile.
                if len(messages) != 1 or place not in said:
                    return False
                if _is_part_of(messages[0], said[place]):
                    break
                if said[place].role is Role.TOOL:
                    return False
            else:
                return False
        return bool(others) and all(place in said and said[place].role is not Role.TOOL for place in added)

    @property
    def whole(self) -> bool:
        """Whether the client's own messages are exactly what is in the window: nothing has left, and nothing is hidden."""
        return not self.answered and self.session.window.whole

    def cost(self, raw: bytes) -> int:
        """Tokens of what is sent beside the conversation."""
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
        """The turn as of which the prompt of the request that goes on now is made; None for now."""
        gone_on = self.session.window.turn != self.turn and (self.repeated or self.spoken)
        return self.turn if self.waiting or gone_on else None

    def render(self, form: str, request: Mapping[str, str] | None = None) -> Prompt:
        """The prompt for the request that goes on now, without what others said since it began.

        Args:
            request: its ids, which the ledger keeps with the prompt.

        Raises:
            StoreStale: they went on with it before anything was said here.
        """
        session = self.session
        if (turn := self.then) is not None:
            with session.lock:
                return session.prompts.render_from(turn, self.waiting, form, request=request)
        prompt = session.render(form, request=request)
        if session.window.turn != self.turn:
            raise StoreStale("another gateway went on with the session", advice="read it again")
        return prompt

    def reply(self) -> Message | None:
        """Return what the session has replied already to the request that goes on now, as the client sees it; None if nothing."""
        messages = (message for _, message in said_after(self.session, self.start))
        first = next(visible(messages), None)
        return first if first is not None and first.role is Role.ASSISTANT else None

    def fill(self, digests: Sequence[bytes]) -> None:
        """Take the digests of forgotten messages from a history, if all other digests are equal. Nothing is stored."""
        there = digests[: len(self.digests)]
        if self.gaps and _agree(self.digests, self.gaps, there):
            self.digests, self.seen, self.chain = list(there), list(there), list(chained(there, self.seed))

    def kept_with(self, digests: Sequence[bytes]) -> Digests | None:
        """What the store keeps with an append that says this behind what is said already; None where a history will not say so:
        something was forgotten, or the client sees a reply as one message with what it began itself."""
        if self.gaps or self.prefilled:
            return None
        chain = [*self.chain, *self.chained(digests)]
        # What the assistant says in a row is one message: a further round may change what the one before it said.
        after = self.kept if self.words == digests[: len(self.words)] else 0
        ends = tuple(tails([*self.digests, *digests], self.root, self.user, after))
        return Digests(after, tuple(chain[after:]), ends, inherits=after > 0 and not self.number)

    def note_kept(self, said: Digests | None) -> None:
        """The store was given this with an append."""
        if said is not None:
            self.kept = said.offset + len(said.added)

    def extend(self, digests: Sequence[bytes]) -> None:
        """Add what was appended."""
        self.chain += self.chained(digests)
        self.digests += digests
        self.seen += digests

    def chained(self, digests: Iterable[bytes]) -> list[bytes]:
        """What these add to its chain."""
        return [*chained(digests, self.chain[-1] if self.chain else self.seed)]


def _start_of_turn(digests: Sequence[bytes], end: int) -> int:
    """Return where what is said between two messages of the assistant starts, if it ends here."""
    while end and not is_spoken(digests[end - 1]):
        end -= 1
    return end


def _is_part_of(message: Message, longer: Message) -> bool:
    """Return whether a user's message has the words of another one, without what was added to them. Spaces and line breaks do not
    count: templates set them anew."""
    if message.role is not Role.USER or longer.role is not Role.USER or any(part.kind is not Kind.TEXT for part in message.parts):
        return False
    words, others = (
        " ".join(" ".join(part.text for part in each.parts if part.kind is Kind.TEXT).split()) for each in (message, longer)
    )
    return bool(words) and re.search(rf"(?<!\w){re.escape(words)}(?!\w)", others) is not None


class Memo:
    """The bytes of a session's last history, by which the next one is recognised.

    Args:
        of: who asked.
        asked: the request.
        newest: its new messages, as JSON. The next history may have less of them if this one has less than the session.
        seen: digests of the history before these.
    """

    def __init__(self, conversation: Conversation, of: Asker, asked: Asked, newest: Sequence[bytes], seen: int) -> None:
        self.conversation, self.of, self.digests = conversation, of, len(conversation.digests)
        self.history, self.lead, self.chain = asked.history, asked.lead, b""
        if not conversation.verbatim:
            end = len(self.history)
            for raw in reversed(newest):
                end = self.history.rfind(raw, 0, end)
            self.history = self.history[:end].rstrip().removesuffix(b",")
            self.digests, self.chain = seen, conversation.before
        self.prefix = b""


def shortened(window: WindowState) -> list[str]:
    """Return what the prompt does not show whole of the newest request: of the system prompt, of what came after the assistant's
    last message, and the provider's newest compaction if it did not fit."""
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
    """Price attachments by the rules of the model that a request names, and refuse an attachment of the newest request that no
    prompt of this session can show: the model would answer without having seen it. What a history has before the assistant's last
    message is out like any other page.

    Raises:
        Problem: 400, which names it. Nothing was appended.
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


def is_linkable(root: str, other: str) -> bool:
    """Whether two sessions of one user may be linked, by their roots. A session that the client named has a past of its own,
    which no other session shares."""
    return root == other or bool(OF_WORDS.fullmatch(root) and OF_WORDS.fullmatch(other))


def chained(digests: Iterable[bytes], start: bytes = b"") -> Iterator[bytes]:
    """For each digest, a digest of it and of all before it."""
    for digest in digests:
        start = hashlib.blake2b(start + digest, digest_size=16).digest()
        yield start


def tails(digests: Sequence[bytes], root: str, user: str, after: int = 0) -> Iterator[bytes | None]:
    """Yield, for each digest behind the first ones that is of the assistant, a digest of that message and of the assistant's last
    one before it; None for the others. It finds sessions of a user that may be linked to one of this root."""
    seed = seed_of("" if OF_WORDS.fullmatch(root) else root, user)
    last = next(filter(is_spoken, reversed(digests[:after])), b"")
    for digest in digests[after:]:
        if is_spoken(digest):
            yield hashlib.blake2b(seed + last + digest, digest_size=16).digest()
            last = digest
        else:
            yield None


def seed_of(root: str, user: str) -> bytes:
    """What the chains of a user's sessions of one root begin with: nobody else's are ever the same."""
    return hashlib.blake2b(f"{user}\0{root}".encode(), digest_size=16).digest()


def shared(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many members two chains have in common; a chained digest says all that came before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def last_reply(session: Session) -> str:
    """What a session ends with, if the assistant says it."""
    last = [page for page in _live(session) if page.message == session.window.turn]
    return "".join(session.contents.text(page.id) for page in last if page.role is Role.ASSISTANT and page.kind is Kind.TEXT)


def turn_before_reply(session: Session) -> int:
    """How many messages a session had before what the assistant said last."""
    for page in reversed(_live(session)):
        if page.role is not Role.ASSISTANT and not (page.call or "").startswith(HIDDEN):
            return page.message
    return 0


def _said_in(session: Session) -> tuple[list[bytes], frozenset[int]]:
    """The digests of what the client sees of a session, and which of them nobody knows, because something was forgotten."""
    if len(_live(session)) == session.window.last:
        return canonical(session.contents.originals()), frozenset()
    one, other = (canonical(session.contents.originals(gone)) for gone in ("one", "other"))
    return one, frozenset(at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])


def _agree(digests: Sequence[bytes], gaps: frozenset[int], others: Sequence[bytes]) -> bool:
    """Whether all are the same but for the gaps."""
    return len(digests) == len(others) and all(
        at in gaps or one == other for at, (one, other) in enumerate(zip(digests, others, strict=True))
    )


def turn_after(session: Session, count: int) -> int:
    """Return the number of the last of a session's first messages, with hidden ones, of which the client sees so many."""
    messages = session.contents.originals()
    numbers = range(len(messages) + 1)
    end = bisect_right(numbers, count, key=lambda end: sum(1 for _ in visible(messages[:end]))) - 1
    return end and _numbers(session)[end - 1]


def copy_of(session: Session, turn: int) -> list[Message]:
    """The messages of a session up to a turn, for another one. What was recalled cites what it is from, there and here, and
    nothing is believed more than it was."""
    trusts: dict[int, Trust] = {}
    with session.lock:
        # Whoever reads them learns what another program has said meanwhile, so this comes first.
        said = _numbered(session)
        for each in _live(session):
            trusts[each.message] = min(trusts.get(each.message, each.trust), each.trust)
        copied = [
            msgspec.structs.replace(message, trust=min(trusts[at], TRUST_OF_ROLE[message.role]))
            for at, message in said
            if at <= turn
        ]
        return brought_over(copied, session, turn)


def brought_over(messages: Iterable[Message], session: Session, turn: int) -> list[Message]:
    """Messages that cite pages of a session, as another one with its messages up to a turn has them: they cite these pages there
    too."""
    window, number = session.window, session.number
    live = _live(session)
    ids = {each.id: at for at, each in enumerate((each for each in live if each.message <= turn), 1)}
    there = {each.id for each in live}
    out = []
    for message in messages:
        sources: set[int] = set()
        waiting = list(message.sources)
        while waiting:
            page = waiting.pop()
            waiting += window.pages[page].sources if page < 0 else ()
            sources |= {page} & there
        here = sorted(ids[page] for page in sources if page in ids)
        cites = tuple({*message.cites, *((number, page) for page in sources)})
        out.append(msgspec.structs.replace(message, sources=tuple(here), cites=cites))
    return out


def said_after(session: Session, turn: int) -> list[tuple[int, Message]]:
    """The messages of a session after a turn, each with its number."""
    return [(number, message) for number, message in _numbered(session) if number > turn]


def _live(session: Session) -> list[Page]:
    """The transcript's pages that are not forgotten."""
    # Another request may be in the middle of a change.
    with session.lock:
        window = session.window
        return [page for page in window.pages.originals() if window.at(page.id) is not Place.DROPPED]


def _numbers(session: Session) -> list[int]:
    """The numbers of the messages that are not forgotten."""
    return list(dict.fromkeys(page.message for page in _live(session)))


def _numbered(session: Session) -> list[tuple[int, Message]]:
    """The messages that are not forgotten, each with its number."""
    with session.lock:
        # Who reads them learns what others have forgotten meanwhile, so they are numbered afterwards.
        said = session.contents.originals()
        return [*zip(_numbers(session), said, strict=True)]


def renamed(messages: Sequence[Message], before: Iterable[Message], session: Session) -> list[Message]:
    """The messages with the ids that the session has for calls to which the client gave others.

    Args:
        before: what the client sent of the session before these, with its own ids. The calls are in the same order.
    """
    ours = [page.call for page in _live(session) if page.kind is Kind.CALL and not (page.call or "").startswith(HIDDEN)]
    theirs = [part.call for message in before for part in message.parts if part.kind is Kind.CALL]
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

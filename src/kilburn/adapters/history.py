"""A framework's history and the session that keeps it: what is new is appended, and the prompt is rendered from the session.

Frameworks hand over their whole history before each call of a model. Messages are recognised by what they say: not by ids, or
by reasoning, which frameworks and providers rewrite. So a program that starts again goes on where it was, and a call that is
tried again appends nothing twice. If the framework took back the end of its history (a cancelled turn, a reply that is asked
for again), these pages are retired: the model no longer sees them, and they stay readable.

A program may ask other things by the same client: a title, a judge, another agent. Such a history is foreign (see
`KeptHistory.is_foreign`), and goes past the session.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import msgspec

from kilburn.budget import Budget
from kilburn.errors import StoreError
from kilburn.gateway.conversations import last_reply
from kilburn.gateway.form import hidden
from kilburn.kernel.render import Prompt
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory import memory_tools
from kilburn.memory.brought import known
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.model import Tokens
from kilburn.page import Page, Place
from kilburn.wire.digests import HIDDEN, apart, digest
from kilburn.wire.form import parse
from kilburn.wire.histories import OPENING, chained, find_summary, index_places, is_own, session_end

log = logging.getLogger("kilburn")

WITHDRAWN = (Place.RETIRED, Place.DROPPED)

LEADS = 8
"""System prompts that are remembered: agents that take turns have one each."""

PASSED = 256
"""Foreign histories that are remembered, to tell which of them go on."""


class Recollections(NamedTuple):
    """Where long-term memory comes from: what a store knows about the user's message is put before it.

    Args:
        store: holds the facts and documents.
        tokens: what they may take in the prompt, for each message of the user.
        user: whose facts; None for everyone's.
    """

    store: Store
    tokens: int = 500
    user: str | None = None

    def about(self, query: str, running: str = "") -> Message | None:
        """What is remembered about it outside of the running session, marked with origin and age, as a message that cites its
        pages; None for nothing."""
        memories = known(self.store, query, self.tokens, self.user, without=running)
        if memories is None:
            return None
        return Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=memories.text),), trust=Trust.TOOL, cites=memories.pages)


class _StoredMessage(NamedTuple):
    """A message of the session that the framework has too."""

    digests: tuple[bytes, ...]
    first: int
    calls: tuple[str, ...]


class KeptHistory:
    """What a framework says to its model, in a session. Safe to use from several threads.

    Args:
        session: keeps it.
        recollections: long-term memory to put before the user's messages; None for none.
    """

    def __init__(self, session: Session, recollections: Recollections | None = None) -> None:
        self.session, self.recollections = session, recollections
        self._digests: dict[int, tuple[bytes, ...]] = {}
        self._shown: set[bytes] = set()
        self._recalled: dict[str, tuple[int, ...]] = {}
        self._leads: deque[str] = deque(maxlen=LEADS)
        """What stood before the last histories that were the session's own."""
        self._counted = 0
        """Tokens of the last prompt, and of all that was sent beside it."""
        self._began = False
        """Whether the session began here: another history may then turn out to be the conversation."""
        self._passed: OrderedDict[bytes, tuple[str, bool]] = OrderedDict()
        """Foreign histories by their chained digests: what stood before them, and whether it was said that they go on."""

    def count_for(self, model: object) -> None:
        """Count by the tokenizer of a framework's model, which is a name, or has one as `model_name` or `model`; what has no name
        changes nothing. See `Session.prompts.count_for`."""
        names = (model, getattr(model, "model_name", None), getattr(model, "model", None))
        name = next((name for name in names if isinstance(name, str) and name), None)
        if name is not None:
            self.session.prompts.count_for(name)

    def prompt(
        self, messages: Iterable[Any], form: str = "chat", beside: Any = None, *, model: object = None, rewinds: bool = True
    ) -> Prompt:
        """Append what is new of a history, and render the window.

        Args:
            messages: the whole history: dicts, SDK objects or `Message`s. What was rendered here before is recognised.
            form: "chat" or "messages".
            beside: what is sent with every request besides the messages, such as instructions and tools: room is kept for it.
            model: what the prompt is for: see `count_for`.
            rewinds: whether the end of the session that the history does not have was taken back.

        Raises:
            WireError, PinsExceedWindow, StoreError: nothing was appended.
        """
        with self.session.lock:
            self.count_for(model)
            self._leave_room(beside)
            self.take(messages, rewinds=rewinds)
            return self.render(form)

    def is_foreign(self, messages: Iterable[Any], lead: str = "") -> bool:
        """Return whether a history is not this session's: then it is sent on as it is, and nothing was changed here.

        The session's own history begins as the session does, and takes back no more than its last exchange. Or it keeps the
        session's end and puts something else in place of what came before, as clients do that sum up. Or it answers a call
        that waits here. One that begins alike and takes back more is the session's where it would not fit the window, or once
        it goes on. Under another system prompt it must share the first exchange at least.

        Of a session that begins here, the first history need not be the conversation. If it never goes on, and one that was
        foreign does, that one takes its place.

        Args:
            messages: the whole history, as for `prompt`.
            lead: the system prompt that stands before it and is not among the messages.
        """
        history = [message for message in apart(parse(list(messages))) if message.role is not Role.SYSTEM]
        with self.session.lock:
            self.session.ledger.refresh()
            entries = [(entry, self.session.window.pages[entry.first].role) for entry in self._stored_messages()]
            entries = [(entry, role) for entry, role in entries if role is not Role.SYSTEM]
            digests = [digest(message) for message in history]
            chain = list(chained(digests))
            # How much of it was foreign before, and came back.
            passed = next((at for at in reversed(range(1, len(chain))) if self._has_passed(chain[at - 1], lead)), 0)
            if not entries:
                self._began = True
            elif not self._is_own(entries, history, digests, lead, passed):
                roles = [role for _, role in entries]
                answered = roles.index(Role.ASSISTANT) if Role.ASSISTANT in roles else len(roles)
                went_on = any(role is not Role.ASSISTANT for role in roles[answered:])
                if not passed or went_on or not self._began:
                    self._pass(chain, lead, passed)
                    return True
                mine = [page.id for page, _ in self.session.contents.pages() if page.id > 0 and page.role is not Role.SYSTEM]
                self.session.edits.take_back(mine)
            if lead not in self._leads:
                self._leads.append(lead)
            return False

    def _is_own(
        self,
        entries: Sequence[tuple[_StoredMessage, Role]],
        history: Sequence[Message],
        digests: Sequence[bytes],
        lead: str,
        passed: int,
    ) -> bool:
        """Return whether a history is this session's by what both say; see `is_foreign`."""
        if self._answers(history):
            return True
        alike = [value in entry.digests for (entry, _), value in zip(entries, digests, strict=False)]
        same = alike.index(False) if False in alike else len(alike)
        near = not self._leads or any(_alike(value, lead) for value in self._leads)
        if same == len(entries) and (near or same > 1 or same < len(digests)):
            return True
        last = max((at for at, (_, role) in enumerate(entries) if role is Role.USER), default=0)
        if same > (not near) and (same >= last or passed > same or not self._fits(history)):
            return True
        return near and (self._keeps_the_end(entries, last, history, digests, same) or self._sums_up(history))

    def _keeps_the_end(
        self,
        entries: Sequence[tuple[_StoredMessage, Role]],
        last: int,
        history: Sequence[Message],
        digests: Sequence[bytes],
        same: int,
    ) -> bool:
        """Whether a history has the session's last request beside something else, or enough of what was said at its end."""
        if len(digests) > 1 and not {*entries[last][0].digests}.isdisjoint(digests):
            return True
        present = set(digests)
        session = [next(filter(present.__contains__, entry.digests), b"") for entry, _ in entries]
        end = session_end(session, digests, index_places(digests), same)
        return is_own(history[end.start : end.stop])

    def _sums_up(self, history: Sequence[Message]) -> bool:
        """Return whether a history begins with a summary that the session itself gave last."""
        texts = ("".join(part.text for part in message.parts if part.kind is Kind.TEXT) for message in history[:-1][:OPENING])
        return find_summary(last_reply(self.session), texts, self.session.contents.originals) is not None

    def _answers(self, history: Sequence[Message]) -> bool:
        """Whether a history has the result of a call that is open here, and not the call. So do clients whose provider keeps the
        earlier messages."""
        window = self.session.window
        calls = {call for message in history for call in _calls(message)}
        results = [part.call or "" for message in history for part in message.parts if part.kind is Kind.RESULT]
        return any(window.calls.get(call) in window.open for call in results if call not in calls)

    def _fits(self, history: Sequence[Message]) -> bool:
        """Return whether a history is no longer than the window."""
        counter, remaining = self.session.counter, self.session.prompts.capacity
        for message in history:
            remaining -= counter.envelope + sum(counter.count(part.text) for part in message.parts)
            if remaining < 0:
                return False
        return True

    def _has_passed(self, end: bytes, lead: str) -> bool:
        """Return whether a history that ends so was foreign, under such a system prompt."""
        return end in self._passed and _alike(self._passed[end][0], lead)

    def _pass(self, chain: Sequence[bytes], lead: str, passed: int) -> None:
        """Remember a foreign history; of one that goes on, say so once."""
        if passed and not self._passed[chain[passed - 1]][1]:
            advice = "wrap a client for it, with a session of its own"
            log.warning("a conversation that is none of session %r goes past it, without a window: %s", self.session.name, advice)
        self._passed.update({end: (lead, bool(passed)) for end in chain[-1:]})
        while len(self._passed) > PASSED:
            self._passed.popitem(last=False)

    def render(self, form: str = "chat") -> Prompt:
        """Return the window, as it is."""
        prompt = self.session.render(form)
        self._counted = prompt.tokens + self.session.prompts.budget.overhead
        self._shown.update(digest(message) for message in apart(parse(list(prompt))))
        return prompt

    def observe(self, usage: Tokens | None) -> None:
        """Report what the provider says that the last prompt cost; None if it said nothing. The window is corrected by that."""
        if usage is not None and usage.prompt:
            # The reply is stored already, and the session is made to fit when it is rendered.
            with suppress(StoreError):
                self.session.prompts.observe(usage, self._counted)

    def take(self, messages: Iterable[Any], *, rewinds: bool = True) -> list[Message]:
        """Append what is new of a whole history, and return it; see `prompt`."""
        history = apart(parse(list(messages)))
        with self.session.lock:
            self.session.ledger.refresh()
            if not self._shown and self.session.window.last:
                self.render()
            entries = self._stored_messages()
            digests = [digest(message) for message in history]
            present = set(digests)
            pairs = _pairs([next(filter(present.__contains__, entry.digests), b"") for entry in entries], digests)
            while (repeat := self._first_changed_call(history, entries, pairs)) is not None:
                pairs = {at: place for at, place in pairs.items() if at < repeat}
            ids: dict[str, str] = {}
            new: list[Message] = []
            for at, message in enumerate(history):
                if at in pairs:
                    ids.update(zip(_calls(message), entries[pairs[at]].calls, strict=True))
                elif (rewinds or digests[at] not in self._shown) and not self._is_answered(message, ids):
                    new.append(self._renamed(message, ids))
            last = max(pairs.values(), default=len(entries))
            lost = list(range(last + 1, len(entries))) if rewinds else []
            if new and history[-1].role is Role.USER and len(history) - 1 in pairs:
                # Something new stands before the request, a summary for example: the request comes last all the same.
                new.append(history[-1])
                lost.append(pairs[len(history) - 1])
            ends = [*(entry.first for entry in entries[1:]), self.session.window.last + 1]
            pages = [page for place in lost for page in range(entries[place].first, ends[place])]
            if new:
                self.session.append(*self._with_recollections(new), instead_of=pages)
            elif pages:
                self.session.edits.take_back(pages)
            return new

    def _first_changed_call(
        self, history: Sequence[Message], entries: Sequence[_StoredMessage], pairs: dict[int, int]
    ) -> int | None:
        """The first message whose calls got other results at the end of the history than they have in the process: both are
        new then, because a call has one result."""
        window, last = self.session.window, max(pairs.values(), default=-1)
        behind = {window.pages[entry.first].answers for entry in entries[last + 1 :]} - {0}
        for at, message in enumerate(history):
            if at in pairs or message.role is not Role.TOOL:
                continue
            call = message.parts[0].call or ""
            caller = next((n for n in reversed(range(at)) if call in _calls(history[n])), None)
            if caller in pairs and window.calls.get(entries[pairs[caller]].calls[_calls(history[caller]).index(call)]) in behind:
                return caller
        return None

    def _is_answered(self, message: Message, ids: dict[str, str]) -> bool:
        """Return whether it is another version of a result that the session has, such as one that was cleared."""
        window, call = self.session.window, message.parts[0].call or ""
        page = window.calls.get(ids.get(call, call))
        return message.role is Role.TOOL and page is not None and page not in window.open

    def append(self, messages: Iterable[Any]) -> None:
        """Append messages that are new, a reply for example."""
        with self.session.lock:
            self.session.ledger.refresh()
            ids: dict[str, str] = {}
            new = [self._renamed(message, ids) for message in apart(parse(list(messages)))]
            if new:
                self.session.append(*self._with_recollections(new))

    def answer(self, name: str, arguments: str) -> str:
        """Return what `recall` or `search_memory` returns, for a framework that runs the tool and appends the result itself."""
        result = memory_tools.call(self.session, name, arguments)
        self._recalled[result.text] = result.sources
        return result.text

    def answered(self, reply: Message) -> Message | None:
        """Append a reply that calls tools of ours, with their results; the framework never sees either.

        Returns:
            The reply without these calls, or None if nothing of it is for the framework.
        """
        ours = [part for part in reply.parts if part.kind is Kind.CALL and part.name in memory_tools.OURS]
        results = [
            memory_tools.call(self.session, part.name or "", part.text).message(HIDDEN + (part.call or "")) for part in ours
        ]
        self.append([hidden(reply), *results])
        remaining = tuple(part for part in reply.parts if part not in ours)
        return msgspec.structs.replace(reply, parts=remaining) if any(part.kind is Kind.CALL for part in remaining) else None

    def _with_recollections(self, new: Sequence[Message]) -> Iterator[Message]:
        last = max((at for at, message in enumerate(new) if message.role is Role.USER), default=-1)
        for at, message in enumerate(new):
            if at == last and self.recollections is not None:
                query = "\n".join(part.text for part in message.parts if part.kind is Kind.TEXT)
                if query and (remembered := self.recollections.about(query, self.session.name)) is not None:
                    yield remembered
            # What a framework's tool recalled keeps its sources, so that it is not indexed as if it were new.
            sources = self._recalled.pop(message.parts[0].text, ()) if message.role is Role.TOOL else ()
            yield msgspec.structs.replace(message, sources=sources) if sources else message

    def _renamed(self, message: Message, ids: dict[str, str]) -> Message:
        """Return the message with call ids that the session does not have yet, and results with the ids that their calls got."""
        used_ids, turn = self.session.window.calls, self.session.window.turn
        for call in _calls(message):
            new, number = call, 0
            while new in used_ids or new in ids.values():
                number += 1
                new = f"{call}_{turn}_{number}"
            ids[call] = new
        if all(ids.get(part.call or "", part.call) == part.call for part in message.parts):
            return message
        parts = (msgspec.structs.replace(part, call=ids.get(part.call or "", part.call)) for part in message.parts)
        return msgspec.structs.replace(message, parts=tuple(parts))

    def _stored_messages(self) -> list[_StoredMessage]:
        """The messages of the session that the framework has too, in order: those that are neither hidden from it nor taken
        back."""
        groups: list[list[Page]] = []
        for page, state in self.session.contents.pages():
            if page.id < 0 or state.at in WITHDRAWN or page.cites:
                continue
            if groups and groups[-1][0].message == page.message and page.kind is not Kind.RESULT:
                groups[-1].append(page)
            else:
                groups.append([page])
        self.session.contents.fetch(page for group in groups if group[0].id not in self._digests for page in group)
        entries: list[_StoredMessage] = []
        preamble = ""
        for group in groups:
            calls = [page.call or "" for page in group if page.kind is Kind.CALL]
            if group[0].role is Role.TOOL and (group[0].call or "").startswith(HIDDEN):
                continue
            if calls and all(call.startswith(HIDDEN) for call in calls):
                # A stream has shown these words to the framework, as the beginning of the reply.
                preamble += "".join(self.session.contents.text(page.id) for page in group if page.kind is Kind.TEXT)
                continue
            key = group[0].id
            if key not in self._digests:
                parts = [self.session.contents.part(page)[0] for page in group]
                self._digests[key] = (digest(Message(role=group[0].role, parts=tuple(parts))),)
                if preamble and group[0].role is Role.ASSISTANT:
                    whole = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=preamble), *parts))
                    self._digests[key] += (digest(whole),)
            preamble = ""
            visible = tuple(call for call in calls if not call.startswith(HIDDEN))
            entries.append(_StoredMessage(self._digests[key], key, visible))
        return entries

    def _leave_room(self, beside: Any) -> None:
        session, counter = self.session, self.session.counter
        overhead = int(getattr(counter, "overhead", 0))
        if beside:
            text = beside if isinstance(beside, str) else msgspec.json.encode(beside, enc_hook=str).decode()
            overhead += counter.count(text)
        budget = session.prompts.budget
        if overhead != budget.overhead:
            session.edits.resize(Budget(budget.window, budget.reserve, overhead))


def _alike(first: str, second: str) -> bool:
    """Return whether two system prompts are the same but for a date, or the like: two thirds of the longer one."""
    start = _begin_alike(first, second)
    end = _begin_alike(first[start:][::-1], second[start:][::-1])
    return 3 * (start + end) >= 2 * max(len(first), len(second))


def _begin_alike(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginning."""
    return next(
        (at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), min(len(first), len(second))
    )


def _calls(message: Message) -> list[str]:
    return [part.call or "" for part in message.parts if part.kind is Kind.CALL]


def _pairs(session: Sequence[bytes], history: Sequence[bytes]) -> dict[int, int]:
    """Which of the given is which of the known: the index of the one for that of the other, in order in both."""
    aligned = list(zip(session, history, strict=False))
    same = next((at for at, (first, second) in enumerate(aligned) if first != second), len(aligned))
    pairs = {at: at for at in range(same)}
    match = SequenceMatcher(None, session[same:], history[same:], autojunk=False)
    for block in match.get_matching_blocks():
        pairs.update({same + block.b + at: same + block.a + at for at in range(block.size)})
    return pairs

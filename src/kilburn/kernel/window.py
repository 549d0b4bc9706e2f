"""One session's window: which page is where, in what order, at what cost, and what changes it.

The prompt has resident pages, stubs for results whose calls stay, and one handle for each gap. Every change is made
by `WindowState.enact`, from an event: when it happens, and again when the ledger is replayed (law 8). Each step is in a
journal, so that a failed batch can be undone. `laws` checks what is allowed.
"""

from __future__ import annotations

import copy
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from functools import partial
from typing import NamedTuple

import msgspec

from kilburn.backend import State
from kilburn.budget import Counter, text_cost
from kilburn.errors import StoreCorrupt
from kilburn.event import Act, Event
from kilburn.kernel.gaps import Gap, Gaps, Key, handle_of
from kilburn.kernel.pages import Calls, PagesById
from kilburn.kernel.sheets import sheets_of
from kilburn.kernel.stand_ins import StandIns
from kilburn.kernel.standing import unpacked
from kilburn.message import Kind, Role, Trust
from kilburn.page import ATOMIC, Page, Place, Span, make_tombstone
from kilburn.wire.sent import COMPACTION, OPENING, sent_name

IN = State(at=Place.IN)

NO_RESULT = "[no result]"
"""The text in a prompt for a call without a result, or whose result was forgotten."""

PATIENCE = 8
"""Messages of the user and the assistant after which a call that still has no result counts as abandoned: four
exchanges. Its result may still come later."""

VISIBLE = frozenset({Place.IN, Place.STUB})
GONE = frozenset({Place.RETIRED, Place.DROPPED})
BELOW = {place: State(at=place) for place in (Place.OUT, Place.FOLDED)}
"""Where a page is that left the window and can come back."""

BULK = 16
"""A move of so many pages or more moves, in one step, those that are below the window (`_set_plain`)."""

MAX_LABELS = 2
"""Attachments that one handle names."""


def stub_of(page: Page, label: str) -> str:
    """The line of a stub: in place of a result that left while its call, with that label, stayed."""
    label = f": {label}" if label else ""
    return f"[{page.address} out: {page.tokens} tokens{label}]"


class _Former(NamedTuple):
    """The fields of a window before pages are added, for `_remove_added`.

    A message's later parts are appended to the same `request`, so the length says what it had; `atomic` is a length, too.
    """

    last: int
    last_derived: int
    turn: int
    spoken_messages: int
    request: list[int]
    request_length: int
    seen: int
    atomic: int


class WindowState:
    """The state of one session's window.

    Args:
        counter: counts handles and stubs.
        pages: its pages; for a new session, none.
        calls: the calls among them.
    """

    def __init__(self, counter: Counter, pages: PagesById | None = None, calls: Calls | None = None) -> None:
        self.counter = counter
        self.pages = PagesById() if pages is None else pages
        self.states: MutableMapping[int, State] = {}
        # By the counter of this session, which need not be that of the pages' own tokens; see `cost`.
        self.costs: MutableMapping[int, int] = {}
        self.stand_ins = StandIns()
        # The same as `states`, by place: a fold of thousands of pages is checked set against set.
        self.shown: set[int] = set()
        # Of these, the derived pages.
        self.made: set[int] = set()
        self.folded: set[int] = set()
        self.gone: set[int] = set()
        self.groups: MutableMapping[int, list[int]] = {}
        # None while no branch shares the lists of `groups`; then the groups whose list was copied here since, and may be changed.
        self._own_groups: set[int] | None = None
        # The members of `groups` as tuples: of the groups asked for since they last changed.
        self._together: dict[int, tuple[int, ...]] = {}
        self.pins: set[int] = set()
        self.importance: dict[int, float] = {}
        # Calls without a result, each with the number of messages before it.
        self.open: dict[int, int] = {}
        self.calls = Calls() if calls is None else calls
        # The ids of the last original and the last derived page, and the number of the last message.
        self.last = self.last_derived = self.turn = 0
        # Messages of the user and the assistant so far; `open` and `awaited` compare with it.
        self.spoken_messages = 0
        self.request: list[int] = []
        # The standing orders of the user, oldest first: pages, each with the spans of its orders.
        self.orders: Mapping[int, tuple[Span, ...]] = {}
        self.seen = 0
        # The keys of what is in the prompt, pages and stubs, in window order.
        self.order: list[Key] = []
        # Results that stand as a handle in place, with what the handle costs.
        self.stubs: dict[int, int] = {}
        self._taken = 0
        # The stretches that are out.
        self.gaps = Gaps(self._cost_of_gap, self.order)
        # Originals that are in the prompt whole or not at all, in order; handles name the newest.
        self.atomic: list[int] = []
        # Of these, the providers' compactions.
        self.compactions: list[int] = []
        self._resident: list[Page] | None = None
        self._use: int | None = None
        # Of `use`, what open calls in the prompt take: each, and all together; None where that is not known.
        self._waiting: dict[int, int] | None = None
        self._waited = 0
        # Of `order`, the pages that each provider's form sends as somebody's words.
        self._spoken: list[Key] = []
        # Steps that undo the batch so far, the last one first; each undoes a change here or, by the kernel, beside the window.
        self.journal: list[Callable[[], object]] = []
        # The states before the batch of what it has moved so far; None of what is new.
        self._before: dict[int, State | None] = {}

    def copy(self) -> WindowState:
        """The same window, to be changed by itself. The pages are shared; nothing may be waiting in the journal."""
        # What has an entry for each page that there ever was is shared too, until one of the two changes it.
        for name in ("states", "costs", "groups"):
            setattr(self, name, sheets_of(getattr(self, name)))
        twin = copy.copy(self)
        sets = ("shown", "made", "folded", "gone", "pins")
        for name in (*sets, "states", "costs", "groups", "importance", "open", "calls", "request", "atomic", "compactions"):
            setattr(twin, name, getattr(self, name).copy())
        twin.pages = self.pages.part([*self.shown, *self.open, *self.request, *self.orders])
        self._own_groups, twin._own_groups, twin._together = set(), set(), {}
        twin.stand_ins, twin.stubs, twin.order = self.stand_ins.copy(), self.stubs.copy(), self.order.copy()
        twin._spoken, twin._waiting = self._spoken.copy(), None
        twin.gaps, twin.journal, twin._before = self.gaps.copy(twin._cost_of_gap, twin.order), [], {}
        twin._resident = self._resident and self._resident.copy()
        return twin

    def adopt(
        self, states: MutableMapping[int, State], folds: Mapping[int, set[int]], stubs: dict[int, int], gaps: Sequence[Gap]
    ) -> None:
        """Take the states of all pages, and what follows from them, in place of none.

        Args:
            folds: what each fold stands for.
            gaps: the stretches that are out.
        """
        self.states, self.stubs = states, stubs
        out = []
        for page, state in states.items():
            if state.at in VISIBLE:
                self.shown.add(page)
            elif state.at is Place.OUT:
                out.append(page)
            elif state.at is Place.FOLDED:
                self.folded.add(page)
            elif state.at in GONE:
                self.gone.add(page)
            if state.pinned:
                self.pins.add(page)
            if state.importance:
                self.importance[page] = state.importance
        for fold, pages in folds.items():
            self.stand_ins.put(pages, fold)
        self.made.update(page for page in self.shown if page < 0)
        self.pages.fetch([*self.shown, *self.open, *self.request])
        self.order[:] = sorted((*self.pages[page].order, page) for page in self.shown)
        self._spoken = [key for key in self.order if _speaks(self.pages[key[2]])]
        self._taken = sum(stubs[page] if page in stubs else self.cost(page) for page in self.shown)
        self.gaps.adopt({page: self.costs[page] for page in out if page > 0}, gaps)

    # What is where

    @property
    def use(self) -> int:
        """Tokens that the prompt takes now: resident pages, handles, stubs, and what the providers' forms add."""
        if self._use is None:
            use = self._taken + self.gaps.cost
            if self.open:
                use += self._waits()
            self._use = use if self._opens_with_user() else use + text_cost(self.counter, OPENING)
        return self._use

    def _waits(self) -> int:
        """Tokens for the calls in the prompt that have no result yet."""
        if self._waiting is None:
            self._waiting, self._waited = {}, 0
            for call in self.open:
                self._wait(call)
        return self._waited

    def _wait(self, call: int) -> None:
        """Take note of whether a call waits in the prompt now."""
        if self._waiting is None:
            return
        self._waited -= self._waiting.pop(call, 0)
        if self._is_waiting(call):
            name = sent_name(None, self.pages[call].call)
            self._waiting[call] = cost = text_cost(self.counter, NO_RESULT) + self.counter.count(name)
            self._waited += cost

    def _is_waiting(self, call: int) -> bool:
        return call in self.open and (call in self.shown or (call in self.stand_ins and self.stands_itself(call) is not None))

    def at(self, page: int) -> Place:
        """Where a page is."""
        return self.states[page].at

    def cost(self, page: int) -> int:
        """What a page costs when it is resident and whole, in tokens of this session's counter."""
        cost = self.costs.get(page)
        return self.pages[page].tokens if cost is None else cost

    def priced(self, page: int) -> Page:
        """A page with its cost in this window."""
        row, cost = self.pages[page], self.cost(page)
        return row if row.tokens == cost else msgspec.structs.replace(row, tokens=cost)

    def resident(self) -> tuple[Page, ...]:
        """The resident pages, in window order, with their costs in this window."""
        if self._resident is None:
            self._resident = [self.priced(key[2]) for key in self.order if key[2] not in self.stubs]
        return tuple(self._resident)

    def visible(self) -> Iterator[Page]:
        """Resident pages and stubs, in window order."""
        return (self.pages[key[2]] for key in self.order)

    def group(self, page: int) -> tuple[int, ...]:
        """All pages that move together with this one, itself included."""
        number = self.pages[page].group
        if number not in self.groups:
            return (page,)
        if number not in self._together:
            self._together[number] = tuple(self.groups[number])
        return self._together[number]

    def stands(self, page: int) -> int | None:
        """What is in the prompt for a page: itself or its stub, a fold that cites it, or nothing."""
        if page in self.shown:
            return page
        fold = self.stand_ins.get(page)
        return fold if fold is not None and fold in self.shown else None

    def stands_itself(self, page: int) -> int | None:
        """What is in a page's place in the transcript: itself, its stub, or an excerpt or summary of it alone."""
        standing = self.stands(page)
        return standing if standing is not None and self.pages[standing].message else None

    @property
    def request_page(self) -> int:
        """The page of the user's latest text, or 0."""
        return self.request[-1] if self.request else 0

    def request_shown(self) -> list[int]:
        """The pages that stand for the user's latest message, which stays until the next one."""
        return [standing for page in self.request if (standing := self.stands_itself(page)) is not None]

    @property
    def compaction(self) -> int | None:
        """The newest compaction by a provider that is not forgotten or retired, in the prompt or not: the provider knows what was
        before only from it. None if there is none."""
        return next((page for page in reversed(self.compactions) if page not in self.gone), None)

    def copies(self) -> frozenset[int]:
        """The copies beside their sources that are in the prompt (see `Bring`): excerpts that stand for nothing."""
        return frozenset(
            page
            for page in self.made
            if not self.stand_ins.of(page) and self.pages[page].kind is Kind.EXCERPT and not self.pages[page].message
        )

    @property
    def whole(self) -> bool:
        """Whether all that was ever appended stands here as it came."""
        return not self.last_derived and not self.stubs and len(self.shown) == self.last

    def waiting(self) -> list[int]:
        """Calls in the prompt that have no result yet."""
        return sorted(filter(self._is_waiting, self.open))

    def awaited(self, patience: int = PATIENCE) -> set[int]:
        """Open calls: less than `patience` messages of the user and the assistant came after them. They may not leave;
        calls that wait longer are abandoned."""
        return {call for call, spoken in self.open.items() if self.spoken_messages - spoken < patience}

    def handle(self, gap: Gap) -> str:
        """Return the handle of a gap. It says what the newest attachments are that are out there."""
        labels: dict[int, str] = {}
        for page in self.atomic[bisect_left(self.atomic, gap[0]) : bisect_right(self.atomic, gap[1])][::-1]:
            if page in self.gaps and (label := self.pages[page].label):
                labels[page] = label
            if len(labels) == MAX_LABELS:
                break
        return handle_of(gap, dict(sorted(labels.items())))

    def _cost_of_gap(self, gap: Gap) -> int:
        return text_cost(self.counter, self.handle(gap))

    def stub(self, page: int) -> str:
        """The text of a result's stub."""
        row = self.pages[page]
        call = self.pages.get(row.answers)
        return stub_of(row, call.label if call else row.label)

    def _opens_with_user(self) -> bool:
        """Whether the first message after the system messages is a user's, or there is none."""
        if self._spoken:
            key = self._spoken[0]
            if self.pages[key[2]].role is Role.USER:
                return True
            first = next(iter(self.gaps), None)
            return first is not None and first[0] < key[0]
        return not self.order or len(self.gaps) > 0

    # What changes it

    def enact(self, event: Event, pages: Mapping[int, Page]) -> None:
        """Make the change that an event says; an observation changes nothing.

        Args:
            pages: the pages that came with it, by id, and any others.

        Raises:
            StoreCorrupt: a page that came with it is not among `pages`, or was there before.
        """
        match event.act:
            case Act.ADMIT:
                state = State(at=Place(event.data["at"])) if "at" in event.data else IN
                if len(set(event.pages)) < len(event.pages) or not self.states.keys().isdisjoint(event.pages):
                    raise StoreCorrupt(f"event {event.number} admits a page that was there", advice="run `kilburn fsck`")
                self._add([_page_of(event, number, pages) for number in event.pages], state)
            case Act.RETIRE | Act.RESTORE | Act.DROP if "at" in event.data:
                # In a collection nothing else moves.
                for number in event.pages:
                    self._set(number, _after(event, self.states[number]))
            case Act.LOAD | Act.EVICT | Act.FOLD | Act.RETIRE | Act.DROP:
                self._enact_move(event, pages)
            case Act.PIN | Act.UNPIN:
                for number in event.pages:
                    self._set(number, msgspec.structs.replace(self.states[number], pinned=event.act is Act.PIN))
            case Act.RATE:
                for number in event.pages:
                    self._set(number, msgspec.structs.replace(self.states[number], importance=event.data["importance"]))
        if "standing" in event.data:
            orders = unpacked(event.data["standing"])
            if not self.pages.has_all(set(orders)):
                raise StoreCorrupt(f"event {event.number} keeps a page that is missing", advice="run kilburn fsck")
            self.journal.append(partial(setattr, self, "orders", self.orders))
            self.orders = orders

    def _enact_move(self, event: Event, pages: Mapping[int, Page]) -> None:
        for where, members in event.data.get("to", {}).items():
            for number in self._set_plain(members, Place(where)) if len(members) >= BULK else members:
                state = self.states[number]
                dropped = where == Place.DROPPED
                self._set(number, State(at=Place.DROPPED) if dropped else msgspec.structs.replace(state, at=Place(where)))
                if dropped and (cost := self.cost(number)) != (tokens := self.pages[number].tokens):
                    # There is no text any more that a replay could count again: it costs what it cost when it was made.
                    self.journal.append(partial(self._reprice, number, cost))
                    self._reprice(number, tokens)
        if "uncover" in event.data:
            self.journal.append(self.stand_ins.take(event.data["uncover"]))
            self._waiting = None
        for back, covered in event.data.get("covers", ()):
            self.journal.append(self.stand_ins.put(covered, back))
            self._waiting = None
        fold = event.data.get("fold")
        if fold is not None:
            # The event says what it stands for only if that differs from what it cites.
            self.journal.append(self.stand_ins.put(event.data.get("cover", event.pages), fold))
            self._add([_page_of(event, fold, pages)], IN)
        self._use = None

    def _add(self, pages: Sequence[Page], state: State) -> None:
        """Add new pages in their state."""
        length, atomic = len(self.request), len(self.atomic)
        former = _Former(self.last, self.last_derived, self.turn, self.spoken_messages, self.request, length, self.seen, atomic)
        added: list[tuple[Page, int | None]] = []
        self.journal.append(partial(self._remove_added, added, former))
        for page in pages:
            self.pages[page.id] = page
            self.costs.setdefault(page.id, page.tokens)
            if page.id > 0:
                self._take_note_of(page)
            else:
                self.last_derived = min(self.last_derived, page.id)
            if page.group:
                self._group_to_change(page.group).append(page.id)
            answered = self._note_call(page) if page.kind in (Kind.CALL, Kind.RESULT) and page.id > 0 else None
            added.append((page, answered))
            self._put(page.id, None, state)

    def _group_to_change(self, group: int) -> list[int]:
        """The members of a group, as a list that no branch has."""
        self._together.pop(group, None)
        members = self.groups.setdefault(group, [])
        if self._own_groups is not None and group not in self._own_groups:
            members = self.groups[group] = members.copy()
            self._own_groups.add(group)
        return members

    def _take_note_of(self, page: Page) -> None:
        """Update who spoke last, from a new original."""
        if page.role in (Role.USER, Role.ASSISTANT) and page.message > self.turn:
            self.spoken_messages += 1
        has_words = page.kind is Kind.TEXT and not page.is_blank
        if page.role is Role.USER and has_words and page.trust >= Trust.USER:
            same = bool(self.request) and self.pages[self.request[-1]].message == page.message
            # A message of so many parts is so many pages: what the journal holds of each must not grow with them.
            if same:
                self.request.append(page.id)
            else:
                self.request = [page.id]
        if page.kind in ATOMIC:
            self.atomic.append(page.id)
            if page.label == COMPACTION and page.role is Role.ASSISTANT:
                self.compactions.append(page.id)
        self.last = max(self.last, page.id)
        self.turn = max(self.turn, page.message)
        self.seen += self.cost(page.id)

    def _reprice(self, page: int, cost: int) -> None:
        """Give a page that is not in the prompt another cost."""
        self.seen += (cost - self.cost(page)) * (page > 0)
        self.costs[page] = cost

    def _note_call(self, page: Page) -> int | None:
        """Keep track of calls without a result; a forgotten page has lost its call's id, not what it answers. Returns how many
        messages there were before the call that this page answers, if it waited."""
        if page.kind is Kind.CALL:
            self.open[page.id] = self.spoken_messages
            if page.call is not None:
                self.calls[page.call] = page.id
            return None
        return self._close(page.answers) if page.answers in self.open else None

    def _close(self, call: int) -> int:
        spoken = self.open.pop(call)
        self._wait(call)
        return spoken

    def _remove_added(self, added: Sequence[tuple[Page, int | None]], former: _Former) -> None:
        """Undo `_add`: the pages, each with how many messages there were before the call that it answered."""
        for page, answered in reversed(added):
            if page.kind is Kind.CALL and page.id > 0:
                self._close(page.id)
                if page.call is not None:
                    self.calls.pop(page.call)
            elif answered is not None:
                self.open[page.answers] = answered
                self._wait(page.answers)
            self._put(page.id, self.states[page.id], None)
            if page.group:
                self._group_to_change(page.group).pop()
                if not self.groups[page.group]:
                    del self.groups[page.group]
            del self.pages[page.id], self.costs[page.id]
        self.last, self.last_derived, self.turn = former.last, former.last_derived, former.turn
        self.spoken_messages, self.request, self.seen = former.spoken_messages, former.request, former.seen
        del self.atomic[former.atomic :]
        while self.compactions and self.compactions[-1] > self.last:
            self.compactions.pop()
        del self.request[former.request_length :]

    def _set(self, page: int, state: State) -> None:
        old_state = self.states[page]
        if old_state != state:
            self.journal.append(lambda: self._put(page, state, old_state))
            self._put(page, old_state, state)

    def _set_plain(self, pages: Sequence[int], where: Place) -> Sequence[int]:
        """Move those of many pages that go from one place below the window to another and have nothing but a place, all in
        one step; returns the others."""
        candidates: Set[int] = self.folded if where is Place.OUT else self.gaps.out() if where is Place.FOLDED else frozenset()
        plain = {page for page in candidates & set(pages) if page > 0}.difference(self.pins, self.importance, self.open)
        if plain:
            chosen, origin = [page for page in pages if page in plain], Place.FOLDED if where is Place.OUT else Place.OUT
            self.journal.append(partial(self._shift, chosen, where, origin))
            self._shift(chosen, origin, where)
            return [page for page in pages if page not in plain]
        return pages

    def _shift(self, pages: Sequence[int], origin: Place, target: Place) -> None:
        """Move pages from one place below the window to another."""
        old_states: dict[int, State | None] = dict.fromkeys(pages, BELOW[origin])
        self._before = old_states | self._before
        self.states.update(dict.fromkeys(pages, BELOW[target]))
        self._use = None
        if origin is Place.OUT:
            self.gaps.remove_all(pages)
        else:
            self.folded.difference_update(pages)
        if target is Place.OUT:
            costs = self.costs
            self.gaps.add_all({page: costs.get(page) or self.cost(page) for page in pages})
        else:
            self.folded.update(pages)

    def _put(self, page: int, old_state: State | None, new_state: State | None) -> None:
        """Set a page's state, or remove the page if it is None, and update the order, the gaps and the use."""
        origin, target = old_state.at if old_state else None, new_state.at if new_state else None
        self._before.setdefault(page, old_state)
        if new_state is None:
            del self.states[page]
        else:
            self.states[page] = new_state
        (self.pins.add if new_state and new_state.pinned else self.pins.discard)(page)
        if new_state and new_state.importance:
            self.importance[page] = new_state.importance
        else:
            self.importance.pop(page, None)
        self._use = None
        if origin == target:
            return
        for places, members in ((VISIBLE, self.shown), (GONE, self.gone), ((Place.FOLDED,), self.folded)):
            if target in places:
                members.add(page)
            elif origin in places:
                members.discard(page)
        if page in self.open:
            self._wait(page)
        elif page < 0:
            # It may stand for one.
            self._waiting = None
        if origin in VISIBLE or target in VISIBLE:
            if page < 0:
                (self.made.add if target in VISIBLE else self.made.discard)(page)
            self._put_in_order(page, origin, target)
        elif origin == Place.OUT and page > 0:
            self.gaps.remove(page)
        if target == Place.OUT and page > 0:
            self.gaps.add(page, self.cost(page))

    def _put_in_order(self, page: int, old: Place | None, new: Place | None) -> None:
        key = (*self.pages[page].order, page)
        # Usually a page is added at the end. Otherwise the list is rebuilt on next use.
        if self._resident is not None and new == Place.IN and old not in VISIBLE and (not self.order or key > self.order[-1]):
            self._resident.append(self.priced(page))
        else:
            self._resident = None
        if old in VISIBLE:
            self._taken -= self.stubs.pop(page) if old == Place.STUB else self.cost(page)
            if new not in VISIBLE:
                del self.order[bisect_left(self.order, key)]
                if (at := bisect_left(self._spoken, key)) < len(self._spoken) and self._spoken[at] == key:
                    del self._spoken[at]
                self.gaps.close(key)
        if new in VISIBLE:
            if old not in VISIBLE:
                if old == Place.OUT and page > 0:
                    self.gaps.remove(page)
                insort(self.order, key)
                if _speaks(self.pages[page]):
                    insort(self._spoken, key)
                self.gaps.part(key)
            if new == Place.STUB:
                self.stubs[page] = self._cost_of_stub(self.pages[page])
            self._taken += self.stubs[page] if new == Place.STUB else self.cost(page)

    def _cost_of_stub(self, page: Page) -> int:
        """A stub is sent with the id of its call, as the result was; attachments of the result are not shown."""
        if page.kind is not Kind.RESULT:
            return 0
        return text_cost(self.counter, self.stub(page.id)) + text_cost(self.counter, sent_name(None, page.call))

    # The journal

    def rollback(self, position: int = 0) -> None:
        """Undo, back to a position in the journal."""
        while len(self.journal) > position:
            self.journal.pop()()
        if not position:
            self._before.clear()
        self._use = None

    def keep(self) -> bool:
        """Keep all changes, and begin a new journal. Returns whether there were any."""
        changed = bool(self.journal)
        self.journal.clear()
        self._before.clear()
        return changed

    def changed(self) -> dict[int, State]:
        """The pages whose states the batch has changed so far, with the states that they have now."""
        states = self.states
        return {page: states[page] for page, old_state in self._before.items() if page in states and states[page] != old_state}

    def scrub(self, pages: Iterable[int]) -> None:
        """Remove every word of forgotten pages, outside of any batch."""
        for page in pages:
            call = self.pages[page].call
            if call is not None and self.calls.get(call) == page:
                self.calls.pop(call)
            if page in self.compactions:
                self.compactions.remove(page)
            self.pages[page] = make_tombstone(self.pages[page])
        self._resident = self._use = self._waiting = None


def _speaks(page: Page) -> bool:
    """Whether each of the forms sends a page as somebody's words; one of them may send nothing for a blank text, for thinking,
    and for another provider's blocks."""
    return page.role is not Role.SYSTEM and page.kind not in (Kind.REASONING, Kind.OPAQUE) and not page.is_blank


def _after(event: Event, state: State) -> State:
    """The state of a collection's page after an event."""
    at = Place(event.data["at"])
    if at is Place.DROPPED:
        return State(at=at)
    return msgspec.structs.replace(state, at=at, until=event.data.get("until"))


def _page_of(event: Event, number: int, pages: Mapping[int, Page]) -> Page:
    try:
        return pages[number]
    except KeyError:
        raise StoreCorrupt(f"event {event.number} names page {number}, which is missing", advice="run kilburn fsck") from None

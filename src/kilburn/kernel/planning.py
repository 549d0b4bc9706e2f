"""Consults the policy and keeps the budget: what happens between admitting pages and the commit.

The policy is asked at an admission, unless it has nothing to do while there is room (`Acts`) or a call waits for its result. It
is asked again as long as the window is over its capacity and its moves make progress. Moves that break a law are undone and
recorded. If the window is then still over its capacity, the kernel makes room itself, oldest pages first, so that law 2 never
depends on a policy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence, Set
from dataclasses import replace
from types import MappingProxyType

from kilburn.budget import Budget, text_cost
from kilburn.effect import Answer, Ask, Deferred, Outcome
from kilburn.errors import KernelError, PinsExceedWindow
from kilburn.event import Act
from kilburn.kernel.admission import LABEL
from kilburn.kernel.background import Background
from kilburn.kernel.consultation import Consultation
from kilburn.kernel.gaps import handle_of
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.laws import FORCED_PATIENCE, open_loop, pins_exceed, unread_pages
from kilburn.kernel.resolve import resolve
from kilburn.kernel.standing import FRAME, excerpt_tokens, order_pages, reminder, shows, stays_whole
from kilburn.kernel.window import GONE, MAX_LABELS, PATIENCE
from kilburn.message import Kind, Role
from kilburn.move import Bring, Evict, Fold, Load, Move
from kilburn.page import Page, Place, Span
from kilburn.policy import Acts, Cause, Policy, View

log = logging.getLogger("kilburn")


ROUNDS = 4
"""Times a policy is asked with cause PRESSURE in one batch, at most; the question with the batch's own cause comes before."""

STAYS = "the user said that it is to stay"

FAR = 8000
"""Tokens behind the standing orders from which on they are repeated before the user's newest message."""

FALLBACK = "oldest"
"""The policy that is asked where the session's own frees too little."""


class Planner:
    """One policy at one session's window.

    Args:
        answer: asks the model in the background; None where there is none.
    """

    def __init__(self, kernel: Kernel, policy: Policy, name: str, answer: Callable[[Ask], Answer] | None = None) -> None:
        self.kernel, self.policy, self.name = kernel, policy, name
        self.background = Background(kernel, answer)
        self._acts = _acts_of(policy)
        self._consultation = Consultation(kernel, name, _depth_of(policy), self.background)
        gap, labels = (1000, 2000, 1001, 1_000_000), dict.fromkeys(range(1000, 1000 + MAX_LABELS), "word " * (LABEL // 5))
        # Without attachments in the session, and with some.
        self._handle_costs = [text_cost(kernel.counter, line) for line in (handle_of(gap), handle_of(gap, labels))]

    def settle(
        self, cause: Cause, change: Callable[[], tuple[int, ...]], *, waits: bool = True, eases: bool = False
    ) -> Generator[Ask, Answer, tuple[int, ...]]:
        """Make a change, consult the policy, and bring the window within its capacity.

        Args:
            change: begins the batch; says which pages it is about. It is made again where others changed
                the session while a model was waited for.
            waits: whether a model may be waited for.
            eases: whether the change asks for no room: then it is made also where pins exceed the window before and after it.

        Returns:
            The pages that the change is about.

        Raises:
            PinsExceedWindow: nothing unpinned is left to move. Whatever `change` raises.
        """
        kernel, window = self.kernel, self.kernel.window
        pages = self._begin(cause, change)
        if eases and not self._fits():
            return pages
        rests = self._acts is Acts.FULL or (self._acts is Acts.FOLDED and not window.last_derived)
        asks = (kernel.excess or not rests) and not (window.open and window.awaited())
        if asks and not (yield from self._consult(cause, pages, waits=waits)):
            pages = self._begin(cause, change)
        rounds, old_use = 0, -1
        while kernel.excess and rounds < ROUNDS and kernel.window.use != old_use:
            old_use = kernel.window.use
            if not (yield from self._consult(Cause.PRESSURE, pages, waits=waits)):
                pages, old_use = self._begin(cause, change), -1
            rounds += 1
        # Not `window`: while a model was asked, all may have been read again.
        if kernel.window.orders:
            self._hold_orders()
            if cause is Cause.ADMIT:
                self._repeat_orders()
        if kernel.excess:
            self.enforce(eases=eases)
            if cause is Cause.ADMIT:
                self._spare()
        return pages

    def _spare(self) -> None:
        """Where the policy freed too little, free an eighth of the capacity, oldest groups first: else the next message would
        change the beginning of the prompt again."""
        kernel = self.kernel
        room = kernel.capacity // 8 - (kernel.capacity - kernel.window.use)
        if room <= 0:
            return
        moves = resolve("policies", f"{FALLBACK}(spare={room})").plan(self.view(Cause.PRESSURE, ()))
        for move in moves:
            if kernel.capacity - kernel.window.use < kernel.capacity // 8:
                self._try(move)

    def _begin(self, cause: Cause, change: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        kernel, window = self.kernel, self.kernel.window
        pages = change()
        arrivals = pages if cause is Cause.ADMIT else ()
        if any(window.pages[number].role is Role.SYSTEM for number in arrivals):
            self._pin_system_excerpt(arrivals)
        # First the large things that may stay: the provider's compaction, then the request.
        if kernel.excess:
            self._evict_oversized_compaction()
        if kernel.excess or (not window.shown.issuperset(window.request) and len(window.request_shown()) < len(window.request)):
            self._hold_request()
        if window.use + self._handle > kernel.capacity:
            self._shorten_oversized(arrivals)
        return pages

    def load(self, pages: Sequence[int]) -> None:
        """Load pages into the window whole, before they are pinned."""
        below = tuple(page for page in pages if self.kernel.window.at(page) != Place.IN)
        if below:
            self.kernel.carry(Load(pages=below, why="pinned"), cause=Cause.ADVICE)

    def enforce(self, *, eases: bool = False) -> None:
        """Settle the budget without asking the policy.

        Args:
            eases: whether the change asks for no room; see `settle`.

        Raises:
            PinsExceedWindow: nothing unpinned is left to move.
        """
        kernel = self.kernel
        if not kernel.excess or (eases and not self._fits()):
            return
        point = kernel.savepoint()
        try:
            self._fall_back()
        except PinsExceedWindow:
            if not eases:
                raise
            # What could leave would leave for nothing.
            kernel.undo(point)

    def _fits(self) -> bool:
        """Whether the pins, and one handle for the rest, fit the window."""
        try:
            self.kernel.check_pins()
        except PinsExceedWindow:
            return False
        return True

    def reopen(self) -> None:
        """Fit a reopened session to this budget and counter. Where its pins need a larger window, it stays as it is: it can
        be read, and mended by `unpin`, and the log says so."""
        kernel = self.kernel
        with kernel.batch():
            kernel.note_counter()
        try:
            with kernel.batch():
                # Where all of it fits, nothing moves: what was live, and what is opened again, are the same.
                if kernel.excess:
                    kernel.check_pins()
                    self._hold_request()
                    self.enforce()
        except PinsExceedWindow as error:
            log.warning("session %s: %s", kernel.info.name, error)

    @property
    def _handle(self) -> int:
        """What a handle costs at most, in tokens."""
        return self._handle_costs[bool(self.kernel.window.atomic)]

    def view(self, cause: Cause, subject: tuple[int, ...], deferred: Deferred | None = None) -> View:
        """The frozen view for one plan."""
        kernel, window = self.kernel, self.kernel.window
        request = window.request_page
        return View(
            cause=cause,
            pages=window.resident(),
            budget=Budget(kernel.capacity),
            use=window.use,
            wanted=subject,
            turn=window.turn,
            now=kernel.clock(),
            pins=self._immovable(),
            open=self._open(PATIENCE) if window.open else frozenset(),
            stubs=frozenset(window.stubs),
            importance=MappingProxyType(window.importance),
            uses=MappingProxyType(kernel.usage.pages),
            page=window.pages.__getitem__,
            text=kernel.readable_text,
            group=window.group,
            count=kernel.counter.count,
            handle=self._handle,
            task=kernel.text(request) if request and window.at(request) != Place.DROPPED else "",
            seen=window.seen,
            deferred=deferred,
            gone=window.gone.__contains__,
            task_page=request,
            copies=window.copies(),
        )

    def _immovable(self) -> frozenset[int]:
        """Pages that no policy may move: pins, the provider's newest compaction, the user's latest message, and what excerpts
        among them stand for.

        While that message is the latest of all, it may be shortened.
        """
        window = self.kernel.window
        older = (page for page in (*window.request_shown(), *unread_pages(window)) if window.pages[page].message != window.turn)
        pins = self._pinned().union(older, order_pages(window))
        if window.orders and (copy := reminder(window)) is not None:
            pins = pins.union((copy,))
        return pins.union(*(window.stand_ins.of(page) for page in pins if page < 0))

    def _pinned(self) -> frozenset[int]:
        """The pins, and the provider's newest compaction if it is in the prompt."""
        window = self.kernel.window
        compaction = window.compaction if window.compactions else None
        return frozenset(window.pins).union((compaction,) if compaction in window.shown else ())

    def _open(self, patience: int) -> frozenset[int]:
        """The resident pages of calls whose results may still come."""
        window = self.kernel.window
        return frozenset(standing for call in window.awaited(patience) if (standing := window.stands(call)) is not None)

    def _consult(self, cause: Cause, pages: tuple[int, ...], *, waits: bool) -> Generator[Ask, Answer, bool]:
        # A policy must not quote to a model what another segment has forgotten.
        self.kernel.check_current()
        view = self.view(cause, pages, self.background.look())
        return (yield from self._consultation.hold(self.policy, view, waits=waits))

    def abandon(self) -> None:
        """The session ends: record that a pending answer comes too late."""
        purpose = self.background.abandon()
        if purpose is not None:
            self.kernel.record(
                Act.COMPACT, policy=self.name, cause=Cause.IDLE, why=purpose, outcome=Outcome.LATE, freed=0, moves=0
            )

    def _pin_system_excerpt(self, arrivals: tuple[int, ...]) -> None:
        """Pin head and tail of a leading system prompt that is too long to pin (law 3)."""
        kernel, window = self.kernel, self.kernel.window
        for number in arrivals:
            page = window.pages[number]
            if (
                page.role is not Role.SYSTEM
                or number in window.pins
                or page.tokens <= kernel.capacity // 4
                or page.kind is not Kind.TEXT
            ):
                continue
            if all(window.pages[earlier].role is Role.SYSTEM for earlier in range(1, number)) and self._shorten(
                page, kernel.capacity // 4
            ):
                kernel.mark(Act.PIN, [window.last_derived], why="the system prompt is too long to pin whole")

    def _evict_oversized_compaction(self) -> None:
        """Evict the provider's newest compaction if it takes more than three quarters of what pins leave: it would leave no room
        for what is said."""
        window = self.kernel.window
        compaction = window.compaction if window.compactions else None
        if compaction is not None and compaction in window.shown and compaction not in window.pins:
            cost = window.cost(compaction)
            if 4 * cost > 3 * (self._room() + cost):
                self._try(Evict((compaction,), why="a compaction by the provider that does not fit"))

    def _hold_request(self) -> None:
        """Keep the user's latest message in the window: whole, or its head and tail if it takes more than its share.

        It stays until the next one (law 3), and yields before a pin does. While it is the latest message of all, it
        is treated like any such message. When other messages have followed and the window is full, it is cut to its
        share. If it had to leave, it comes back when there is room again.
        """
        kernel, window = self.kernel, self.kernel.window
        request = [page for page in window.request if page not in window.pins and window.at(page) not in GONE]
        whole = sum(map(window.cost, request)) <= self._share()
        for page in request:
            standing = window.stands_itself(page)
            share = window.cost(page) if whole else self._share() // len(request)
            if standing is None:
                share = min(share, max(kernel.capacity - window.use, 0))
            gone_on = kernel.excess and window.pages[page].message != window.turn
            if standing is not None and (window.cost(standing) <= share or not gone_on):
                continue
            if standing == page:
                self._shorten(window.pages[page], share)
            else:
                freed = 0 if standing is None else window.cost(standing)
                point = kernel.savepoint()
                fits = share + window.use - freed <= kernel.capacity and self._try(Load((page,), why="the user's latest message"))
                if fits and window.cost(page) > share and (not self._shorten(window.pages[page], share) or kernel.excess):
                    kernel.undo(point)

    def _hold_orders(self) -> None:
        """Keep what the user said that is to stay (`kilburn.kernel.standing`) in the window: what had to leave comes back when
        there is room. Of a long message an excerpt comes back; it is put in the place of the whole one only if the policy has
        not made room."""
        kernel, window = self.kernel, self.kernel.window
        for page, sentences in window.orders.items():
            if page in window.request or window.at(page) in GONE:
                continue
            standing = window.stands(page)
            partial = not stays_whole(window.pages[page], sentences)
            visible = standing is not None and shows(window.pages[standing], page, sentences)
            tokens = FRAME if partial else window.cost(page)
            if standing == page and partial and kernel.excess:
                point, old_use = kernel.savepoint(), window.use
                if self._try(Fold((page,), keep=sentences, why=STAYS)) and window.use >= old_use:
                    kernel.undo(point)
            elif not visible and window.use + tokens <= kernel.capacity:
                point = kernel.savepoint()
                loaded = self._try(Load((page,), why=STAYS))
                loaded = loaded and (not partial or self._try(Fold((page,), keep=sentences, why=STAYS)))
                if not loaded or kernel.excess:
                    kernel.undo(point)

    def _repeat_orders(self) -> None:
        """Copy the standing orders to a place before the user's newest message where they are far in front of it. Models follow
        an order less the further it is away (arXiv 2606.22528, 2608.11242)."""
        kernel, window = self.kernel, self.kernel.window
        if kernel.capacity <= FAR or window.request_page != window.last:
            return
        behind = 0
        near = {reminder(window), *order_pages(window)}
        for page in reversed(window.resident()):
            behind += window.cost(page.id)
            if page.id in near:
                return
            if behind > FAR:
                break
        orders = [(page, spans) for page, spans in window.orders.items() if window.at(page) not in GONE and page != window.last]
        tokens = sum(excerpt_tokens(spans) for _, spans in orders)
        if orders and behind > FAR and window.use + tokens <= kernel.capacity:
            self._try(Bring(tuple(orders), why="standing orders, repeated"))

    def _share(self) -> int:
        """Tokens that the user's latest message may take: a quarter of the capacity, and half of what pins leave."""
        return max(0, min(self.kernel.capacity // 4, self._room() // 2))

    def _room(self) -> int:
        """The capacity less pins, the provider's newest compaction, and one handle."""
        return self.kernel.capacity - sum(map(self.kernel.window.cost, self._pinned())) - self._handle

    def _shorten_oversized(self, arrivals: tuple[int, ...]) -> None:
        """Replace pages that cannot fit by their heads and tails, all of which fit together."""
        window = self.kernel.window
        room = self._room()
        calls = [number for number in arrivals if number in window.open and number not in window.pins]
        if sum(map(window.cost, calls)) > room:
            # None of them may leave before its result comes, so each gets its share.
            for number in calls:
                if window.cost(number) > room // len(calls):
                    self._shorten(window.pages[number], room // (len(calls) + 1))
        resident = [window.pages[number] for number in arrivals if number not in window.pins and window.at(number) == Place.IN]
        oversized = [page for page in resident if page.tokens > room and not page.is_atomic]
        for page in oversized:
            self._shorten(page, room // (len(oversized) + 1))

    def _shorten(self, page: Page, tokens: int) -> bool:
        """Put head and tail in place of a page; False if not even this helps."""
        if page.is_atomic or page.depth:
            return False
        text = self.kernel.text(page.id)
        point = self.kernel.savepoint()
        for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05):
            budget = int(tokens * share)
            keep = _head_and_tail(text, int(len(text) * budget / max(1, page.tokens)))
            if not keep or budget < 2 * self._handle:
                return False
            try:
                excerpt = self.kernel.carry(
                    Fold(pages=(page.id,), keep=keep, why="larger than the window"), policy="kernel", cause=Cause.PRESSURE
                )
            except KernelError:
                self.kernel.undo(point)
                return False
            if excerpt is not None and self.kernel.window.cost(excerpt) <= tokens:
                return True
            self.kernel.undo(point)
        return False

    def _fall_back(self) -> None:
        """Make room: first from everything else; then from an open tool loop, if the newest message is not part of it;
        then from the user's latest message; then from the thinking that the provider needs; and last from its compaction.

        Raises:
            PinsExceedWindow: everything left is pinned, or waits for its result.
        """
        kernel, window = self.kernel, self.kernel.window
        self._evict_oversized_compaction()
        # If not even an excerpt of the latest message fits its share, it is treated like any other page.
        small = sum(map(window.cost, window.request_shown())) <= 2 * self._share()
        stays = self._immovable() if small else self._pinned().union(order_pages(window), unread_pages(window))
        loop = open_loop(window, FORCED_PATIENCE)
        if all(window.pages[page].message != window.turn for page in loop):
            self._make_room(stays | loop)
        self._make_room(stays)
        self._crowd_out(stays - set(unread_pages(window)))
        point = kernel.savepoint()
        self._crowd_out(self._pinned())
        if kernel.excess:
            # The user's latest message comes back if thinking has to leave in any case.
            kernel.undo(point)
            self._evict_thinking(window.last + 1)
            self._crowd_out(self._pinned())
            self._crowd_out(frozenset(window.pins))
        if kernel.excess:
            raise pins_exceed(window, kernel.budget, kernel.capacity, window.use)

    def _make_room(self, stays: Set[int]) -> None:
        """Evict the oldest groups that may leave, the user's words last; then calls without a result after which other
        messages came; then shorten or evict the newest pages."""
        window = self.kernel.window
        self._relieve(stays, PATIENCE)
        self._relieve(stays, FORCED_PATIENCE, window.open.keys() - window.awaited(FORCED_PATIENCE))
        self._crowd_out(stays)
        for page in self.view(Cause.PRESSURE, ()).pages if self.kernel.excess else ():
            if self.kernel.excess and page.answers and page.id not in stays:
                self._try(Evict(pages=(page.id,), why="over capacity"))
        self._evict_thinking(window.request_page)
        # Stubs leave with calls that nothing else keeps in the window.
        self._relieve(stays, FORCED_PATIENCE, {window.pages[stub].answers for stub in window.stubs})
        self._crowd_out(stays)

    def _evict_thinking(self, end: int) -> None:
        """Evict thinking before a page, message by message, as long as the window is over its capacity."""
        kernel, window = self.kernel, self.kernel.window
        for page in self.view(Cause.PRESSURE, ()).pages if kernel.excess else ():
            if kernel.excess and page.kind is Kind.REASONING and page.id < end and window.at(page.id) == Place.IN:
                together = map(window.pages.__getitem__, window.group(page.id))
                thoughts = tuple(
                    member.id for member in together if member.kind is Kind.REASONING and window.at(member.id) == Place.IN
                )
                self._try(Evict(pages=thoughts, why="thinking that does not fit"))

    def _relieve(self, stays: Set[int], patience: int, calls: Set[int] | None = None) -> None:
        """Carry out what the fallback plans, move by move, as long as the window is over its capacity.

        Args:
            calls: it sees only these, with what moves together with them; None for all pages.
        """
        kernel, window = self.kernel, self.kernel.window
        fallback: Policy = resolve("policies", FALLBACK)
        while kernel.excess:
            view = replace(self.view(Cause.PRESSURE, ()), pins=stays, open=self._open(patience))
            if calls is not None:
                standing = {page for call in calls if (page := window.stands_itself(call)) is not None}
                view = replace(view, pages=[page for page in view.pages if not standing.isdisjoint(window.group(page.id))])
            moves = fallback.plan(view)
            if isinstance(moves, Generator) or not moves:
                return
            for move in moves:
                if kernel.excess and not self._try(move):
                    stays = stays | set(move.pages)

    def _crowd_out(self, stays: Set[int]) -> None:
        """Shorten pages to the room that is left for them, or evict them, as long as the window is over its capacity."""
        kernel = self.kernel
        if not kernel.excess:
            return
        opened, tried = set(self._open(FORCED_PATIENCE)), set[int]()
        view = replace(self.view(Cause.PRESSURE, ()), pins=stays, open=opened)
        for page in view.pages:
            if not kernel.excess:
                return
            if kernel.window.at(page.id) == Place.IN and page.id not in stays:
                target = max(page.tokens - kernel.excess - self._handle, 3 * self._handle)
                # A shorter excerpt of the user's latest message is better than none.
                whole = kernel.window.pages[page.sources[0]] if page.depth and page.id in kernel.window.request_shown() else page
                if page.tokens <= target or not self._shorten(whole, target):
                    self._evict(page, view, tried)
                elif page.id in opened:
                    opened.add(kernel.window.stands(whole.id) or page.id)

    def _evict(self, page: Page, view: View, tried: set[int]) -> None:
        """Evict a page's group, or the part of it that may leave.

        Args:
            view: of this turn, with what stays. Of its pages only the group's are looked at, as they are now: thousands of
                groups may leave one after the other.
            tried: groups that were looked at and stay: of such a one, which may have thousands of pages too, results alone may
                leave. It is added to.
        """
        window = self.kernel.window
        if window.at(page.id) != Place.IN or (page.group in tried and not page.answers):
            return
        group = [window.priced(member) for member in window.group(page.id) if window.at(member) == Place.IN]
        chosen = replace(view, pages=group).free([page], 1)
        if page.group and not chosen:
            tried.add(page.group)
        if chosen:
            self._try(Evict(pages=chosen, why="over capacity"))

    def _try(self, move: Move) -> bool:
        """Carry out a move of the kernel's own, if the laws allow it."""
        point = self.kernel.savepoint()
        try:
            self.kernel.carry(move, policy="kernel", cause=Cause.PRESSURE)
        except KernelError:
            self.kernel.undo(point)
            return False
        return True


def _acts_of(policy: Policy) -> Acts:
    """When a policy acts. A class that plans anew does not inherit what another one says of its own plan."""
    for kind in type(policy).__mro__:
        if "acts" in vars(kind):
            acts = getattr(policy, "acts", None)
            return acts if isinstance(acts, Acts) else Acts.ALWAYS
        if "plan" in vars(kind):
            break
    return Acts.ALWAYS


def _depth_of(policy: Policy) -> int:
    """How deep a policy's folds may be."""
    depth = getattr(policy, "max_depth", 1)
    return depth if isinstance(depth, int) and depth >= 1 else 1


def _head_and_tail(text: str, size: int) -> tuple[Span, ...]:
    """Spans of about `size` characters: two thirds from the head, one third from the tail, at line ends where near."""
    if size < 8 or len(text) <= size:
        return ((0, min(len(text), max(size, 1))),) if text else ()
    head, tail = size * 2 // 3, len(text) - size // 3
    line = text.rfind("\n", head // 2, head)
    head = line + 1 if line >= 0 else head
    line = text.find("\n", tail, tail + size // 6)
    tail = line + 1 if 0 <= line < len(text) - 1 else tail
    return ((0, head), (tail, len(text)))

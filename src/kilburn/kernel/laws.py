"""The laws of moves, checked at run time: from a move to its changes, or a typed error.

Every function here reads the window and returns a `LegalMove`; none changes anything. The numbers in the errors are
those of docs/design/architecture.md. Laws 1, 5 and 8 are kept by the kernel's batches, 2 by its planning, 10 by the
store.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from functools import partial

import msgspec

from kilburn.budget import Budget
from kilburn.errors import Forgotten, KernelError, LawBroken, PinsExceedWindow, UnknownAddress
from kilburn.kernel.standing import order_pages
from kilburn.kernel.window import GONE, PATIENCE, WindowState
from kilburn.message import Kind, Role
from kilburn.move import Bring, Evict, Fold, Load, Move, Retire
from kilburn.page import Page, Place, address_of

DERIVED = (Kind.FOLD, Kind.EXCERPT)

FORCED_PATIENCE = 1
"""Messages of the user and the assistant after which the kernel may evict a call without a result, if nothing else makes
room: then it is not in the latest message."""

MAX_NAMED_PAGES = 5
"""Pages that an error names."""


class LegalMove(msgspec.Struct, kw_only=True):
    """What a legal move does: pages' new places, and for a fold what it stands for (`cited`: exactly what it cites),
    its `order` (see `Page.order`), and how deep its sources are. `covers` is what folds that come back stand for again."""

    at: dict[int, Place] = {}
    uncover: list[int] = []
    covers: dict[int, list[int]] = {}
    cover: Collection[int] = ()
    cited: bool = False
    depth: int = 0
    order: tuple[int, int] | None = None

    @property
    def places(self) -> dict[str, list[int]]:
        """The new places, each with its pages."""
        return {where: [page for page, going in self.at.items() if going is where] for where in dict.fromkeys(self.at.values())}


def as_move(value: object) -> Move:
    """A value as a move, with its fields checked.

    Raises:
        KernelError: not a move, fields of wrong types, or text that no store can keep.
    """
    if not isinstance(value, Move):
        raise KernelError(f"a {type(value).__name__} is no move", advice="give Load, Evict, Fold, Bring, Retire or Drop")
    try:
        move = msgspec.convert(msgspec.structs.asdict(value), type(value))
        if isinstance(move, Fold) and move.text is not None:
            if type(move.text) is not str:
                raise KernelError("the text of a fold is no plain string", advice="give a str")
            move.text.encode("utf-8")
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
        raise KernelError(
            f"an odd {type(value).__name__}: {error}", advice="name pages by their ids, give text without lone surrogates"
        ) from None
    return move


def known(window: WindowState, pages: Sequence[int]) -> list[Page]:
    """The pages of these ids.

    Raises:
        UnknownAddress, Forgotten, KernelError: no such page, a dropped one, none or one twice.
    """
    check_known(window, pages)
    # Those that are not in memory come by one query.
    window.pages.fetch(pages)
    return [window.pages[page] for page in pages]


def check_known(window: WindowState, pages: Sequence[int]) -> None:
    """Check that there are pages of these ids; none is read.

    Raises:
        UnknownAddress, Forgotten, KernelError: see `known`.
    """
    if not pages:
        raise KernelError("a move of no pages", advice="return no move at all")
    if len(set(pages)) != len(pages):
        raise KernelError("a move that names a page twice", advice="name each page once")
    for page in pages:
        if page not in window.pages:
            raise UnknownAddress(
                f"{address_of(page)} does not exist in this session", advice="use an address that a handle shows"
            )
        if window.at(page) == Place.DROPPED:
            raise Forgotten(f"{address_of(page)} was forgotten", advice="nothing of it is kept")


def _in_force(window: WindowState, page: int, advice: str) -> None:
    """Refuse a retired page, and one that was made of a retired page: that left with it (law 9)."""
    pending, visited = [page], {page}
    while pending:
        number = pending.pop()
        if window.at(number) == Place.RETIRED:
            of = "" if number == page else f", which {address_of(page)} is made of,"
            raise LawBroken(9, f"{address_of(number)}{of} is retired", advice=advice)
        new = [source for source in window.pages[number].sources if number < 0 and source not in visited]
        visited.update(new)
        pending += new


def _unpinned(window: WindowState, pages: Iterable[int]) -> None:
    for page in pages:
        if page in window.pins:
            raise LawBroken(3, f"{address_of(page)} is pinned", advice="unpin it first")


def check_held(window: WindowState, change: LegalMove) -> None:
    """Check that the user's latest message stays until the next one; pages that come back may replace an excerpt."""
    for page in window.request:
        standing = window.stands_itself(page)
        if standing is not None and change.at.get(standing, Place.IN) != Place.IN and change.at.get(page) != Place.IN:
            raise LawBroken(
                3, f"{address_of(page)} is the user's latest message", advice="it may leave when the next one is there"
            )


def pins_exceed(window: WindowState, budget: Budget, capacity: int, minimum: int) -> PinsExceedWindow:
    """Return the error that names what may not leave, what of it to unpin, and the window that would hold it all.

    Args:
        capacity: tokens that the prompt may take.
        minimum: tokens that it takes in any case.
    """

    def priced(pages: Sequence[int]) -> str:
        listing = ", ".join(f"{address_of(page)} ({window.cost(page):,} tokens)" for page in pages[:MAX_NAMED_PAGES])
        return listing + (f" and {len(pages) - MAX_NAMED_PAGES:,} more" if len(pages) > MAX_NAMED_PAGES else "")

    pins = sorted(window.pins, key=lambda page: (-window.cost(page), page))
    waiting = [
        page
        for call in sorted(window.awaited(FORCED_PATIENCE))
        if (page := window.stands_itself(call)) and page not in window.pins
    ]
    over, remaining = list[int](), minimum
    while remaining > capacity and len(over) < len(pins):
        over.append(pins[len(over)])
        remaining -= window.cost(over[-1])
    parts = [f"{reason}: {priced(pages)}" for reason, pages in (("pinned", pins), ("waiting for a result", waiting)) if pages]
    larger = budget.window - budget.capacity + -(-minimum * budget.capacity // capacity)
    return PinsExceedWindow(
        f"what may not leave takes {minimum:,} of {capacity:,} tokens; {'; '.join(parts)}",
        advice=(f"unpin {', '.join(map(address_of, over[:MAX_NAMED_PAGES]))}, or " if over else "")
        + f"open a window of {larger:,} tokens or more",
    )


def check_paired(window: WindowState, pages: Iterable[int]) -> None:
    """Check that the prompt shows the calls of these pages' groups and their results together, or neither (law 6)."""
    for page in {member for number in pages for member in window.group(number) if member > 0}:
        call = window.pages[page].answers
        if call and (window.stands_itself(page) is None) != (window.stands_itself(call) is None):
            raise LawBroken(
                6, f"{address_of(page)} would not stand behind its call {address_of(call)}", advice="move both or neither"
            )


def check_standing(window: WindowState, move: Move, change: LegalMove) -> None:
    """Check that what the user said that is to stay does stay, the provider's newest compaction, and what nobody has read yet of
    sub-agents' results; such a result may be shortened."""
    for page in order_pages(window):
        if change.at.get(page, Place.IN) != Place.IN:
            raise LawBroken(
                3, f"{address_of(page)} is what the user said that is to stay", advice="leave it: it is among view.pins"
            )
    compaction = window.compaction if window.compactions else None
    if compaction in window.shown and change.at.get(compaction, Place.IN) != Place.IN:
        raise LawBroken(
            3, f"{address_of(compaction)} is the provider's newest compaction", advice="it may leave when a newer one is there"
        )
    for page in unread_pages(window):
        if change.at.get(page, Place.IN) != Place.IN and not (isinstance(move, Fold) and move.pages == (page,)):
            raise LawBroken(3, f"{address_of(page)} was not read yet", advice="shorten it, or wait for the next reply")


def unread_pages(window: WindowState) -> list[int]:
    """Return the results of sub-agents, and of memory's tools, that came since the assistant's last words: nobody has read
    them."""
    results = []
    for key in reversed(window.order):
        page = window.pages[key[2]]
        if page.role is Role.ASSISTANT and page.message:
            break
        if page.answers and (page.cites or page.sources) and page.id > 0 and page.id not in window.stubs:
            results.append(page.id)
    return results


def open_loop(window: WindowState, patience: int) -> set[int]:
    """Return the resident part of the open tool loop: open calls, each with its group."""
    members = {member for call in window.awaited(patience) for member in window.group(call)}
    return {standing for member in members if (standing := window.stands_itself(member)) is not None}


def _is_awaited(window: WindowState, page: int, patience: int = PATIENCE) -> bool:
    """Whether a page is among `WindowState.awaited`; without looking at the others."""
    spoken = window.open.get(page)
    return spoken is not None and window.spoken_messages - spoken < patience


def _rest(window: WindowState, page: int) -> Place:
    """Where a page is after it leaves: folded, if a fold stands for it, or out."""
    fold = window.stand_ins.get(page)
    return Place.FOLDED if fold is not None and fold in window.shown else Place.OUT


def _acts_as(window: WindowState, page: Page) -> Kind:
    """An excerpt or summary of one call or result stands in its place in the transcript."""
    if page.kind in DERIVED and len(page.sources) == 1 and page.message:
        return window.pages[page.sources[0]].kind
    return page.kind


def _call_stays(window: WindowState, page: Page, leaving: set[int]) -> bool:
    standing = window.stands_itself(page.answers) if page.answers else None
    return standing is not None and standing not in leaving


def check_load(window: WindowState, move: Load) -> LegalMove:
    """A load brings whole groups, never a retired page (law 9) or a result without its call (law 6)."""
    change = LegalMove(at={}, uncover=[])
    loaded_groups: set[int] = set()
    for page in known(window, move.pages):
        _in_force(window, page.id, "recall it by address; it stays readable as history")
        if page.id > 0 and page.group in loaded_groups:
            continue
        if page.id > 0 and page.group:
            loaded_groups.add(page.group)
        for member in window.group(page.id) if page.id > 0 else (page.id,):
            if window.at(member) in (Place.OUT, Place.STUB, Place.FOLDED) and (member > 0 or member in move.pages):
                change.at[member] = Place.IN
                _replace_stand_in(window, member, change)
    answered: dict[int, set[int]] = {}
    for member in change.at:
        page = window.pages[member]
        if (
            page.answers
            and change.at[member] == Place.IN
            and change.at.get(page.answers) != Place.IN
            and window.stands_itself(page.answers) is None
        ):
            raise LawBroken(6, f"the call of {page.address} is not there any more", advice="recall it by address")
        if page.kind is not Kind.CALL or page.id in window.open:
            continue
        if page.group not in answered:
            answered[page.group] = _answered(window, page, change)
        if page.id not in answered[page.group]:
            raise LawBroken(6, f"the result of {page.address} is not there any more", advice="recall it by address")
    return change


def _answered(window: WindowState, call: Page, change: LegalMove) -> set[int]:
    """The calls of a call's group whose results will be there."""
    members = window.group(call.id)
    visible = (member for member in members if change.at.get(member) == Place.IN or window.stands_itself(member) is not None)
    return {window.pages[member].answers for member in visible}


def _replace_stand_in(window: WindowState, page: int, change: LegalMove) -> None:
    """A fold no longer stands for a page that comes back beside it; an excerpt of this page alone leaves."""
    fold = window.stand_ins.get(page)
    if fold is None or fold not in window.shown:
        return
    change.uncover.append(page)
    if window.pages[fold].sources == (page,):
        _unpinned(window, [fold])
        change.at[fold] = Place.OUT


def check_evict(window: WindowState, move: Evict, patience: int = PATIENCE, *, forced: bool = False) -> LegalMove:
    """An evicted call takes its results along; a result whose call stays becomes a handle in place.

    Args:
        patience: how long a call waits for its result (see `WindowState.awaited`).
        forced: thinking may leave an open tool loop, all of a message's: it does not fit the window.
    """
    pages = known(window, move.pages)
    leaving = {page.id for page in pages}
    _unpinned(window, leaving)
    checked = _Seen()
    for page in pages:
        if page.id not in window.shown:
            raise KernelError(f"{page.address} is not in the window", advice="evict pages of view.pages only")
        leaving.update(_followers(window, page, leaving, partial(_is_awaited, window, patience=patience), checked, forced=forced))
    return LegalMove(at=_departures(window, leaving), uncover=_uncovered(window, leaving))


class _Seen:
    """Which groups of one move were checked. Each group is checked once, however many of its pages leave."""

    def __init__(self) -> None:
        self.whole: set[int] = set()
        """Those of which nothing is left behind."""
        self.thoughts: dict[int, tuple[bool, bool]] = {}
        """Whether no call waits for its result, and whether all thinking leaves."""


def _followers(
    window: WindowState, page: Page, leaving: set[int], awaited: Callable[[int], bool], checked: _Seen, *, forced: bool = False
) -> list[int]:
    """Handles in place that must leave with a call; everything else the move has to name itself."""
    acts_as = _acts_as(window, page)
    if acts_as is Kind.CALL and any(map(awaited, (page.id, *page.sources))):
        raise LawBroken(6, f"{page.address} is a call without a result yet", advice="wait for its result")
    if page.answers or page.group in checked.whole or _leave_alone(window, page, leaving, checked, forced=forced):
        return []
    stubs = []
    for member in window.group(page.id):
        if member in leaving or member not in window.shown:
            continue
        if member not in window.stubs:
            raise LawBroken(
                6, f"{page.address} would leave {address_of(member)} behind", advice="move the whole group (view.group)"
            )
        stubs.append(member)
    if page.group:
        checked.whole.add(page.group)
    return stubs


def is_bound(page: Page) -> bool:
    """Whether a provider accepts a page only unchanged: thinking, or a block of its own in an assistant's message."""
    return page.role is Role.ASSISTANT and page.kind in (Kind.REASONING, Kind.OPAQUE)


def _leave_alone(window: WindowState, page: Page, leaving: set[int], checked: _Seen, *, forced: bool) -> bool:
    """Whether thinking may leave without its message: all of it, once the user has spoken since and its calls have their
    results. In an open tool loop the provider needs it."""
    if _acts_as(window, page) is not Kind.REASONING:
        return False
    number = page.group or page.id
    if number not in checked.thoughts:
        group = window.group(page.id)
        visible = [member for member in group if member in window.shown]
        thoughts = [member for member in visible if _acts_as(window, window.pages[member]) is Kind.REASONING]
        checked.thoughts[number] = (not any(_is_awaited(window, member) for member in group), leaving.issuperset(thoughts))
    over, all_leave = checked.thoughts[number]
    return (forced or (over and page.id < window.request_page)) and all_leave


def _departures(window: WindowState, leaving: set[int]) -> dict[int, Place]:
    at: dict[int, Place] = {}
    for member in leaving:
        page = window.pages[member]
        if page.kind in DERIVED:
            at[member] = Place.OUT
            folded = window.stand_ins.of(member) & window.folded
            at.update(dict.fromkeys(sorted(folded), Place.OUT))
            at.update(dict.fromkeys(_behind_calls(window, folded, leaving), Place.STUB))
        elif page.kind in (Kind.RESULT, Kind.IMAGE, Kind.OPAQUE) and _call_stays(window, page, leaving):
            at[member] = Place.STUB
        else:
            rest = _rest(window, member)
            at[member] = Place.OUT if window.stand_ins.get(member) in leaving else rest
    states = window.states
    return {page: where for page, where in at.items() if states[page].at != where}


def _behind_calls(window: WindowState, folded: Set[int], leaving: set[int]) -> list[int]:
    """Of pages that a fold stands for, the results whose calls stay in the prompt."""
    near = folded
    if len(folded) > len(window.shown):
        # Groups are the same from either side: the window is short where the fold is long.
        near = {member for page in window.shown - leaving for member in window.group(page) if member in folded}
    return [page for page in near if window.pages[page].kind is Kind.RESULT and _call_stays(window, window.pages[page], leaving)]


def _covered_by(window: WindowState, fold: int) -> list[int]:
    return sorted(window.stand_ins.of(fold))


def _uncovered(window: WindowState, leaving: Iterable[int]) -> list[int]:
    return [source for fold in leaving if fold < 0 for source in _covered_by(window, fold)]


def check_fold(window: WindowState, move: Fold, depth: int) -> LegalMove:
    """A fold cites originals (unless `depth` allows more), keeps the transcript valid, adds words.

    Its `order` is that of the first source that leaves, or None for the window's end.
    """
    chosen, fresh = _named(window, move.pages)
    derived = [page for page in move.pages if page < 0] if min(move.pages) < 0 else []
    if (move.text is not None) + bool(move.keep) + bool(move.parts) != 1:
        raise KernelError("a fold needs either text or spans to keep", advice="give exactly one of text, keep and parts")
    if {page for page, _ in move.parts} - set(move.pages):
        raise LawBroken(4, "an excerpt keeps spans of a page that it does not cite", advice="name the page among the sources")
    if move.text is not None and not move.text.strip():
        raise LawBroken(5, "an empty summary replaces nothing", advice="return no move when the model said nothing")
    excerpted = [page for page, _ in move.parts] or (list(chosen) if move.keep else [])
    if any(window.pages[page].is_atomic for page in excerpted):
        raise LawBroken(4, "an excerpt of an image or a provider's block", advice="keep it whole, or evict it")
    if move.keep and len(chosen) != 1:
        raise KernelError("an excerpt has exactly one source", advice="return one fold a page")
    deepest = max((window.pages[page].depth for page in derived), default=0)
    if deepest >= depth:
        raise LawBroken(4, "a fold of a fold", advice="fold from originals, or set max_depth on the policy")
    subsumed = _subsumed(window, chosen)
    leaving = (chosen & window.shown) | subsumed
    for page in chosen & window.gone | {page for page in chosen if page < 0}:
        _in_force(window, page, "fold what supersedes it")
    if not leaving:
        if window.awaited():
            raise LawBroken(6, "the window's end is between a call and its result", advice="wait for the results")
        return LegalMove(depth=deepest)
    _unpinned(window, leaving)
    first = window.pages[move.pages[0]]
    if not (len(chosen) == 1 and ((move.keep and not is_bound(first)) or first.kind is Kind.RESULT)):
        _whole_groups(window, chosen, subsumed)
    at = {page: Place.FOLDED for page in sorted(fresh) if page > 0}
    at.update({page: Place.OUT for page in sorted(leaving) if page < 0})
    covered: Collection[int] = chosen
    if derived:
        further = [source for page in derived for source in _covered_by(window, page) if source not in chosen]
        covered = [*(page for page in move.pages if page > 0), *further]
    # These include what the replaced folds stood for, so nothing has to be uncovered first.
    order = min(window.pages[page].order for page in leaving)
    return LegalMove(at=at, cover=covered, cited=not derived, order=order, depth=deepest)


def _named(window: WindowState, pages: Sequence[int]) -> tuple[set[int], set[int]]:
    """The ids that a fold names, and those of them that no fold stands for yet; raises what `known` does.

    A remade fold names thousands of pages that an earlier fold stands for; these are not checked again.
    """
    chosen = set(pages)
    fresh = chosen - window.folded
    if not pages or len(chosen) != len(pages) or not window.pages.has_all(fresh) or not window.gone.isdisjoint(fresh):
        known(window, pages)
    return chosen, fresh


def _subsumed(window: WindowState, chosen: set[int]) -> set[int]:
    """Resident folds that the new one replaces whole; a partial overlap would show a page twice."""
    folds = window.stand_ins.over(chosen) & window.shown
    for fold in folds - chosen:
        uncovered = window.stand_ins.of(fold) - chosen
        if uncovered:
            raise LawBroken(
                4,
                f"overlaps {address_of(fold)}, which also stands for {address_of(min(uncovered))}",
                advice="fold all of its sources, or none",
            )
    return folds


def _whole_groups(window: WindowState, chosen: set[int], subsumed: set[int]) -> None:
    for page in [page for page in chosen if page in window.open and _is_awaited(window, page)]:
        raise LawBroken(6, f"{address_of(page)} is a call without a result yet", advice="wait for its result")
    # Groups are the same from either side: the window is short where the fold is long.
    near = chosen if len(chosen) <= len(window.shown) else window.shown - chosen - subsumed
    checked: set[int] = set()
    for page in near:
        if page in checked:
            continue
        group = window.group(page)
        checked.update(group)
        folded = next((member for member in group if member in chosen), None)
        stays = (member for member in group if member not in chosen and member not in subsumed and member in window.shown)
        behind = next(stays, None)
        if folded is not None and behind is not None:
            raise LawBroken(
                6, f"folding {address_of(folded)} would leave {address_of(behind)} behind", advice="fold the whole group"
            )


def check_undo(window: WindowState, earlier: WindowState, moved_pages: Set[int], since: Set[int]) -> LegalMove:
    """Pages go back to where they were before the newest moves, and so do the folds that stand for them.

    A result that came since, or that moved since with its call, comes back together with its call. Where its call would leave
    and the result stands in the prompt, the group stays as it is. A group also stays if a page of it was forgotten or retired.
    If a page stays and the fold that stands for it leaves, the page is out.

    Args:
        earlier: the window before these moves.
        moved_pages: the pages that they moved or made.
        since: pages that were moved later, to keep the transcript whole.
    """
    states = earlier.states

    def late(page: int) -> set[int]:
        return {member for member in window.group(page) if member > 0 and (member not in states or member in since)}

    def stays(page: int) -> bool:
        if page < 0 and page not in states:
            # What stands for one page of the transcript goes as that page comes back; any other fold goes.
            fold = window.pages[page]
            return bool(fold.message) and stays(fold.sources[0])
        originals = _originals(window, page)
        if any(not window.gone.isdisjoint(window.group(original)) for original in originals):
            return True
        if earlier.stands_itself(page) is not None:
            return False
        return any(window.stands_itself(member) is not None for original in originals for member in late(original))

    staying = {page for page in moved_pages if stays(page)}
    at: dict[int, Place] = {}
    uncover, covers = list[int](), dict[int, list[int]]()
    for page in sorted(moved_pages):
        was, fold = earlier.at(page) if page in states else Place.OUT, earlier.stand_ins.get(page)
        if page in staying:
            over = window.stand_ins.get(page)
            if page not in states or window.at(page) != Place.FOLDED or over in staying or over not in moved_pages:
                continue
            was, fold = Place.OUT, None
        if window.at(page) in GONE:
            continue
        if window.at(page) != was:
            at[page] = was
        if window.stand_ins.get(page) != fold:
            (uncover if fold is None else covers.setdefault(fold, [])).append(page)
    for page in [page for page in moved_pages - staying if page in states and earlier.stands_itself(page) is not None]:
        at |= {member: Place.IN for member in late(page) if member not in at and window.stands_itself(member) is None}
    _unpinned(window, [page for page, where in at.items() if where not in (Place.IN, Place.STUB)])
    return LegalMove(at=at, uncover=uncover, covers=covers)


def _originals(window: WindowState, page: int) -> set[int]:
    """The originals that a page is made of."""
    originals, below = set[int](), [page]
    while below:
        number = below.pop()
        if number > 0:
            originals.add(number)
        else:
            below += window.pages[number].sources
    return originals


def check_bring(window: WindowState, move: Bring) -> LegalMove:
    """Check a copy of passages: it cites originals that are in force, and stands before the prompt's last message."""
    pages = known(window, move.pages)
    for page in pages:
        if page.id < 0:
            raise LawBroken(4, f"{page.address} is made from others", advice="bring passages of originals")
        if window.at(page.id) == Place.RETIRED:
            raise LawBroken(9, f"{page.address} is retired", advice="recall it by address; it stays readable as history")
    if not all(spans for _, spans in move.parts):
        raise KernelError("a page of which nothing is brought", advice="give its spans, or leave it out")
    if window.awaited():
        raise LawBroken(6, "the window's end is between a call and its result", advice="wait for the results")
    end = _prompt_end(window)
    # A rank below that of the originals: before all parts of the message.
    return LegalMove(order=(window.last, 1 - window.last_derived) if end is None else (end, -1))


def _prompt_end(window: WindowState) -> int | None:
    """Return the first page of the prompt's last message, or None if the prompt has no message.

    Results follow their calls in every provider's form, and reasoning its calls: so behind results, or if the assistant spoke
    last, it is the first page of the assistant's last messages in a row.
    """
    end: Page | None = None
    for key in reversed(window.order):
        page = window.pages[key[2]]
        if end is None:
            if page.message and not (page.role is Role.TOOL and page.answers):
                end = page
        elif page.message and page.role is end.role and (page.role is Role.ASSISTANT or page.message == end.message):
            end = page
        else:
            break
    return None if end is None else end.order[0]


def check_retire(window: WindowState, move: Retire) -> LegalMove:
    """A retired page leaves the window, and so does every fold that quotes it (law 9)."""
    pages = known(window, move.pages)
    chosen = {page.id for page in pages}
    leaving = {page for page in chosen if page in window.shown}
    leaving |= window.stand_ins.over(chosen) & window.shown
    leaving |= {page.id for page in window.resident() if page.kind in DERIVED and chosen & set(page.sources)}
    _unpinned(window, leaving | chosen)
    checked = _Seen()
    for page in pages:
        leaving.update(_followers(window, page, leaving, window.open.__contains__, checked))
    # A retired result whose call stays would leave an orphan call: the call goes too.
    for page in pages:
        if page.kind is Kind.RESULT and _call_stays(window, page, leaving):
            partners = {member for member in window.group(page.id) if member in window.shown} - leaving
            # One that waits for its result stays, as when a page is forgotten.
            partners -= {standing for call in window.awaited() if (standing := window.stands(call)) is not None}
            _unpinned(window, partners)
            leaving |= partners
    at = _departures(window, leaving) | dict.fromkeys(chosen, Place.RETIRED)
    return LegalMove(
        at={page: where for page, where in at.items() if window.at(page) != where}, uncover=_uncovered(window, leaving)
    )


def partners_of(window: WindowState, forgotten: Set[int]) -> set[int]:
    """What leaves the window because a page of its group is forgotten."""
    # What is not in memory comes by one query, and not page by page.
    window.pages.fetch(forgotten)
    stays = forgotten | {standing for call in window.awaited() - forgotten if (standing := window.stands(call)) is not None}
    return {member for page in forgotten for member in window.group(page) if member in window.shown and member not in stays}


def check_drop(window: WindowState, forgotten: set[int]) -> LegalMove:
    """What else moves when `forgotten` leave the store: partners of a dropped call or result leave the window.

    A call that waits for its result stays, because the result will need it.
    """
    partners = partners_of(window, forgotten)
    _unpinned(window, partners)
    leaving = {page for page in forgotten if page in window.shown} | partners
    at = {page: where for page, where in _departures(window, leaving).items() if page not in forgotten}
    for fold in forgotten:
        if fold < 0:
            at.update(
                {
                    source: Place.OUT
                    for source in _covered_by(window, fold)
                    if source not in forgotten and window.at(source) == Place.FOLDED
                }
            )
    at.update(dict.fromkeys(forgotten, Place.DROPPED))
    uncover = _uncovered(window, leaving | forgotten) + [page for page in forgotten if page in window.stand_ins]
    return LegalMove(at=at, uncover=sorted(set(uncover)))

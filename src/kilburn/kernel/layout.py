"""The layout of a window: which page is where, in what order, at what cost. Reading only.

What stands in the prompt is resident pages, handles in place of results whose calls stay, and one
handle for all that is out between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec

from kilburn.kernel.cover import Cover
from kilburn.kernel.gaps import Gaps, Key
from kilburn.message import Kind, Role
from kilburn.page import Page, Place
from kilburn.store import State
from kilburn.wire.sent import sent_name

__all__ = ["GONE", "OUT", "PATIENCE", "VISIBLE", "Layout", "stub_of"]

OUT = State()

PATIENCE = 8
"""Messages of the user and the assistant after which a call that still has no result counts as abandoned: four
exchanges, in which a tool that runs beside the talk may well end. Its result may come later all the same."""

VISIBLE = frozenset({Place.IN, Place.STUB})
GONE = frozenset({Place.RETIRED, Place.DROPPED})


def _may_be_blank(page: Page) -> bool:
    """Whether nothing of a page may be sent in one of the forms: no visible character, or what is another provider's."""
    return page.kind in (Kind.REASONING, Kind.OPAQUE) or (page.kind is Kind.TEXT and not page.label)


def stub_of(page: Page, label: str) -> str:
    """The line that stands in place of a result that left while its call, of that label, stayed."""
    label = f": {label}" if label else ""
    return f"[{page.address} out: {page.tokens} tokens{label}]"


class Layout:
    """What stands where in one process's window.

    Args:
        count: what a line of handle costs in the prompt, in tokens, envelope included.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        self._count = count
        self.pages: dict[int, Page] = {}
        self.states: dict[int, State] = {}
        self.costs: dict[int, int] = {}
        self.cover = Cover()
        # The same as `states`, by place: a fold of thousands of pages is checked set against set.
        self.shown: set[int] = set()
        self.folded: set[int] = set()
        self.gone: set[int] = set()
        self.groups: dict[int, tuple[int, ...]] = {}
        self.pins: set[int] = set()
        self.marks: dict[int, float] = {}
        # Calls without a result, each with how much had been said when it was made.
        self.open: dict[int, int] = {}
        self.calls: dict[str, int] = {}
        self.last = 0
        self.last_derived = 0
        self.turn = 0
        self.said = 0
        self.request: tuple[int, ...] = ()
        self.seen = 0
        self._order: list[Key] = []
        self._stubs: dict[int, int] = {}
        self._held = 0
        self._gaps = Gaps(count, self._order)
        self._kept: list[Page] | None = None

    @property
    def use(self) -> int:
        """Tokens that the prompt takes now: resident pages, stubs and the handles of all gaps."""
        return self._held + self._gaps.cost

    @property
    def gaps(self) -> Gaps:
        """The stretches that are out."""
        return self._gaps

    @property
    def stubs(self) -> Mapping[int, int]:
        """Results that stand as a handle in place, with what the handle costs."""
        return self._stubs

    def at(self, page: int) -> Place:
        """Where a page is."""
        return self.states[page].at

    def cost(self, page: int) -> int:
        """What a page costs when it is resident and whole, in tokens of this process's counter."""
        return self.costs.get(page) or self.pages[page].tokens

    def resident(self) -> tuple[Page, ...]:
        """The pages that are in, in window order, with this tier's costs."""
        if self._kept is None:
            self._kept = [self.priced(key[2]) for key in self._order if key[2] not in self._stubs]
        return tuple(self._kept)

    def visible(self) -> Iterator[Page]:
        """Resident pages and stubs, in window order."""
        return (self.pages[key[2]] for key in self._order)

    def group(self, page: int) -> tuple[int, ...]:
        """All pages that move together with this one, itself included."""
        return self.groups.get(self.pages[page].group, (page,)) if self.pages[page].group else (page,)

    def is_visible(self, page: int) -> bool:
        """Whether a page, or its handle in place, stands in the prompt."""
        return self.states[page].at in VISIBLE

    def stands(self, page: int) -> int | None:
        """What stands in the prompt for a page: itself or its handle, a fold over it, or nothing."""
        if self.is_visible(page):
            return page
        fold = self.cover.get(page)
        return fold if fold is not None and self.is_visible(fold) else None

    def stands_itself(self, page: int) -> int | None:
        """What stands in a page's place in the transcript: itself, its handle, or an excerpt or summary of it alone."""
        standing = self.stands(page)
        return standing if standing is not None and self.pages[standing].message else None

    @property
    def task(self) -> int:
        """The page of the user's latest text, or 0."""
        return self.request[-1] if self.request else 0

    def held(self) -> list[int]:
        """What stands for the user's latest message: it stays until the next one."""
        return [standing for page in self.request if (standing := self.stands_itself(page)) is not None]

    def waiting(self) -> list[int]:
        """Calls in the prompt that have no result yet."""
        shown, cover = self.shown, self.cover
        return sorted(call for call in self.open if call in shown or (call in cover and self.stands_itself(call) is not None))

    def awaited(self, patience: int = PATIENCE) -> set[int]:
        """Calls whose result may still come soon: less than `patience` messages of the user and the assistant
        came after them. Those may not leave; the others are abandoned."""
        return {call for call, said in self.open.items() if self.said - said < patience}

    def loop(self, patience: int) -> set[int]:
        """What stands of the open tool loop: calls whose result is awaited, each with all of its group."""
        members = {member for call in self.awaited(patience) for member in self.group(call)}
        return {standing for member in members if (standing := self.stands_itself(member)) is not None}

    def stub(self, page: int) -> str:
        """The handle of a result that stands in place."""
        known = self.pages[page]
        call = self.pages.get(known.answers)
        return stub_of(known, call.label if call else known.label)

    def opens_with_user(self) -> bool:
        """Whether the first thing behind the system messages is a user's, or nothing is there at all."""
        for key in self._order:
            page = self.pages[key[2]]
            if page.role is not Role.SYSTEM and not _may_be_blank(page):
                first = next(iter(self._gaps), None)
                return page.role is Role.USER or (first is not None and first[0] < key[0])
        return len(self._order) == 0 or len(self._gaps) > 0

    def priced(self, page: int) -> Page:
        """A page with this window's cost of it."""
        known = self.pages[page]
        cost = self.cost(page)
        return known if known.tokens == cost else msgspec.structs.replace(known, tokens=cost)

    def _cost_of_stub(self, page: Page) -> int:
        """A result's handle is sent with the id of its call, as the result was; what hung on the result is not shown."""
        if page.kind is not Kind.RESULT:
            return 0
        return self._count(self.stub(page.id)) + self._count(sent_name(None, page.call))

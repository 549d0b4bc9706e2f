"""Plans how a cached sequence gets to hold what the window shows now: by edits in place, or by computing again.

An edit evicts the tokens of lines that left the window, and puts new lines into the gap. What follows is not computed
again, and still depends on what left (the implicit channel). Computing again drops everything from the first
difference on. It is exact, and costs a prefill. The cheaper way is taken. This is a pure plan; `Residence` carries it
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from kilburn.errors import SpecError
from kilburn_kv.template import WindowLine


class How(StrEnum):
    """How a sequence comes to hold the window: what is asked for, and what was done."""

    AUTO = "auto"
    """The cheaper way."""
    EDIT = "edit"
    """Lines leave and come where they stand; what follows stays as it is."""
    PREFILL = "prefill"
    """Everything is computed again from the first difference on."""
    APPEND = "append"
    """Nothing but new lines at the end was needed."""
    SAME = "same"
    """Nothing was needed."""

    @classmethod
    def asked(cls, how: str) -> How:
        """One of those that can be asked for.

        Raises:
            SpecError: it is none of "auto", "edit", "prefill".
        """
        if how not in (cls.AUTO, cls.EDIT, cls.PREFILL):
            raise SpecError(f"how={how!r} is none of auto, edit, prefill")
        return cls(how)


class PlacedLine(NamedTuple):
    """A line that has positions in the sequence, `start` to `stop`; its keys and values may have left."""

    line: WindowLine
    start: int
    stop: int


@dataclass(frozen=True)
class Price:
    """The price of both ways, in tokens of prefill.

    Args:
        edit: for each place at which the sequence is edited: bookkeeping, and a block that is split.
        stale: for each kept token after an edit, because it was computed while the evicted tokens were visible: 0
            always prefers edits, 1 always computes again.

    Raises:
        SpecError: an impossible price.
    """

    edit: float = 8.0
    stale: float = 0.02

    def __post_init__(self) -> None:
        if not (self.edit >= 0 and self.stale >= 0):
            raise SpecError(f"{self} is no price", advice="give 0 or more, in tokens of prefill")


@dataclass(frozen=True)
class EditPlan:
    """What to do, in this order.

    Args:
        how: any but "auto".
        evict: lines whose keys and values leave.
        insert: lines that go into gaps, each with its first position.
        cut: logical position from which on everything is dropped, or None.
        append: lines that are computed at the end.
        edited, anew: what editing and computing again would cost, in tokens of prefill.
    """

    how: How
    evict: tuple[PlacedLine, ...] = ()
    insert: tuple[tuple[WindowLine, int], ...] = ()
    cut: int | None = None
    append: tuple[WindowLine, ...] = ()
    edited: float = 0.0
    anew: float = 0.0


def plan_edits(placed: Sequence[PlacedLine], wanted: Sequence[WindowLine], price: Price, how: str = How.AUTO) -> EditPlan:
    """The plan that turns the placed lines into the wanted ones.

    Raises:
        SpecError: see `How.asked`.
    """
    asked = How.asked(how)
    same = 0
    while same < min(len(placed), len(wanted)) and placed[same].line == wanted[same]:
        same += 1
    fresh = wanted[same:]
    if same == len(placed):
        size = float(sum(len(line.tokens) for line in fresh))
        return EditPlan(How.APPEND if fresh else How.SAME, append=tuple(fresh), edited=size, anew=size)
    anew = float(sum(len(line.tokens) for line in fresh))
    edit = _edit_in_place(placed, wanted, price)
    if asked is How.PREFILL or (asked is How.AUTO and anew <= edit.edited):
        return EditPlan(How.PREFILL, cut=placed[same].start, append=tuple(fresh), edited=edit.edited, anew=anew)
    return replace(edit, anew=anew)


def _edit_in_place(placed: Sequence[PlacedLine], wanted: Sequence[WindowLine], price: Price) -> EditPlan:
    """Keep every line that is still wanted. If a new line does not fit its gap, compute again from there."""
    kept = _kept_lines(placed, wanted)
    insert: list[tuple[WindowLine, int]] = []
    waiting: list[WindowLine] = []
    cut: int | None = None
    edges = 0
    before, last = 0, -1
    at = len(wanted)
    for index, line in enumerate(wanted):
        place = kept.get(index)
        if place is None:
            waiting.append(line)
            continue
        room = placed[place].start - before
        if sum(len(one.tokens) for one in waiting) > room:
            cut, at = before, index - len(waiting)
            break
        # A gap that an earlier edit left does not count as an edited place.
        edges += bool(waiting) or place > last + 1
        position = placed[place].start - sum(len(one.tokens) for one in waiting)
        for one in waiting:
            insert.append((one, position))
            position += len(one.tokens)
        waiting = []
        before, last = placed[place].stop, place
    else:
        at = len(wanted) - len(waiting)
        # What left at the very end is simply cut off.
        cut = before if placed and before < placed[-1].stop else None
    stay = {place for index, place in kept.items() if index < at}
    evict = tuple(one for place, one in enumerate(placed) if place not in stay and (cut is None or one.start < cut))
    append = tuple(wanted[at:])
    first = min((one.start for one in evict), default=None)
    behind = sum(placed[place].stop - placed[place].start for place in stay if first is not None and placed[place].start > first)
    computed = sum(len(line.tokens) for line, _ in insert) + sum(len(line.tokens) for line in append)
    cost = computed + price.edit * edges + price.stale * behind
    return EditPlan(How.EDIT, evict, tuple(insert), cut, append, edited=cost)


def _kept_lines(placed: Sequence[PlacedLine], wanted: Sequence[WindowLine]) -> dict[int, int]:
    """Index in `wanted` -> index in `placed` of the same line; both ascend, because keys do."""
    known = {one.line.key: index for index, one in enumerate(placed)}
    found: dict[int, int] = {}
    last = -1
    for index, line in enumerate(wanted):
        place = known.get(line.key)
        if place is not None and place > last and placed[place].line == line:
            found[index] = last = place
    return found

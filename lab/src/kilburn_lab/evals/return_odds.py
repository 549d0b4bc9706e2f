"""An order of eviction that estimates how soon each session comes back.

A session that waits for a tool comes back within seconds. One that waits for its user comes back in minutes or never.
A sub-agent that has ended almost never comes back. And some sessions are slower than others. How fast each kind comes
back, and how that changes during the wait, is counted at run time; nothing is fitted beforehand. Units that a
session's latest prompt no longer contains leave first. Times come with the uses; there is no clock here.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import pairwise

from kilburn.errors import SpecError
from kilburn_kv.blocks import SESSION_SHARE
from kilburn_kv.eviction import EvictionOrder, LruOrder, PromptUse

_RUNNING = "..."
"""Kind of a wait whose stop reason is not known yet."""

_EDGES = [0.0, *(float(2**power) for power in range(1, 20))]
"""Seconds of waiting at which one band of a count ends and the next begins; the last is six days."""

_LAST = len(_EDGES) - 1
FOREVER = _EDGES[-1]

_SOON = 10.0
"""Seconds. Returns are counted over the logarithm of the wait plus so much: on this scale, most kinds come back evenly."""

_LOGS = [math.log(edge + _SOON) for edge in _EDGES]
_MIDDLES = [(edge + after) / 2 + _SOON for edge, after in pairwise(_EDGES)] + [FOREVER + _SOON]

_GUESS = 0.5
"""Returns for each unit of that scale that are assumed before any is counted."""

_TRUST = 2.0
"""For how much of the scale a band's guess counts: of a kind against `_GUESS`, of a pace against its kind."""

_MEMORY = 0.9
"""Weight of the older waits in a session's pace when the next one is counted."""

_DOUBT = 3.0
"""Imagined waits at the average with which a session's pace begins."""

_QUICKEST, _SLOWEST = -2, 3
_LEVELS = _SLOWEST - _QUICKEST + 1

_LONG = 45.0
"""Seconds after which a wait is long: then prompts come back cut down more often, each size at its own rate."""

_SIZES = 6
"""Sizes of prompts that are told apart in each doubling."""

_ANY_SIZE = -1

_FRESH = 512
"""Evicted units after which the rates are computed again."""

_GONE = 256
"""Sessions whose return is waited for although nothing of them is cached."""


class _Mean:
    """A running mean that starts at a value; each time, the older values keep this weight."""

    __slots__ = ("keep", "total", "weight")

    def __init__(self, value: float, keep: float, weight: float = 1.0) -> None:
        self.keep = keep
        self.total = value * weight
        self.weight = weight

    def add(self, value: float) -> None:
        self.total = self.keep * self.total + value
        self.weight = self.keep * self.weight + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


class _Kind:
    """Waits of one kind: returns and time waited, by band of age and by pace; and the average of the wait's logarithm."""

    __slots__ = ("average", "back", "waited", "worths")

    def __init__(self) -> None:
        self.back = [[0.0] * (_LAST + 1) for _ in range(_LEVELS)]
        self.waited = [[0.0] * (_LAST + 1) for _ in range(_LEVELS)]
        self.average = _Mean(math.log1p(_SOON), 1.0)
        self.worths: list[list[float]] = []

    def add(self, wait: float, pace: float, back: bool) -> None:
        level, share = _level(pace)
        band = _add_wait(self.waited, level, share, wait)
        if back:
            self.back[level][band] += 1.0 - share
            self.back[level + 1][band] += share

    def work_out(self, still: Iterable[tuple[float, float]]) -> None:
        """The worth at each edge and pace; `still` are the waits that have not ended, each with its pace."""
        waited = [list(row) for row in self.waited]
        for wait, pace in still:
            _add_wait(waited, *_level(pace), wait)
        guesses = [
            (sum(back) + _TRUST * _GUESS) / (sum(spent) + _TRUST)
            for back, spent in zip(zip(*self.back, strict=True), zip(*waited, strict=True), strict=True)
        ]
        self.worths = [
            _indices([(b + _TRUST * g) / (w + _TRUST) / middle for b, w, g, middle in zip(*rows, guesses, _MIDDLES, strict=True)])
            for rows in zip(self.back, waited, strict=True)
        ]

    def worth(self, wait: float, pace: float) -> float:
        """Of one unit of a prompt whose session has waited so long: between the nearest edges and paces."""
        if not self.worths:
            return _GUESS / (wait + _SOON)
        level, share = _level(pace)
        slow, quick = self.worths[level + 1], self.worths[level]
        band = bisect_right(_EDGES, wait) - 1
        if band >= _LAST:
            return quick[_LAST] * (1 - share) + slow[_LAST] * share
        through = (wait - _EDGES[band]) / (_EDGES[band + 1] - _EDGES[band])
        before = quick[band] * (1 - share) + slow[band] * share
        after = quick[band + 1] * (1 - share) + slow[band + 1] * share
        return before * (1 - through) + after * through


def _level(pace: float) -> tuple[int, float]:
    """The next quicker whole pace, as a row; and how far the pace lies towards the row after it."""
    place = min(max(pace, _QUICKEST), _SLOWEST) - _QUICKEST
    level = min(int(place), _LEVELS - 2)
    return level, place - level


def _add_wait(waited: list[list[float]], level: int, share: float, wait: float) -> int:
    """Add a wait to the bands that it went through, in two rows; the band in which it ended."""
    ended = bisect_right(_EDGES, wait) - 1
    for row, part in ((waited[level], 1.0 - share), (waited[level + 1], share)):
        for band in range(ended):
            row[band] += part * (_LOGS[band + 1] - _LOGS[band])
        row[ended] += part * (math.log(wait + _SOON) - _LOGS[ended])
    return ended


def _indices(rates: Sequence[float]) -> list[float]:
    """Gittins' index at each edge: the best chance of a return for each second of room, over all times to give up at.

    From the last edge back: what comes later joins as long as it improves on the chance so far.
    """
    found = [rates[_LAST]] * (_LAST + 1)
    later: list[tuple[float, float, float]] = []
    for band in range(_LAST - 1, -1, -1):
        there = math.exp(-rates[band] * (_EDGES[band + 1] - _EDGES[band]))
        gained = 1.0 - there
        spent = gained / rates[band]
        while later and later[-1][0] * spent >= gained * later[-1][1]:
            more, longer, left = later.pop()
            gained, spent, there = gained + there * more, spent + there * longer, there * left
        later.append((gained, spent, there))
        found[band] = gained / spent
    return found


class _Session:
    """What is known of a session: its pace in each kind of wait, and its latest prompt."""

    __slots__ = ("paces", "prompt", "sub")

    def __init__(self, sub: bool) -> None:
        self.sub = sub
        self.paces: dict[str, _Mean] = {}
        self.prompt: _Wait | None = None

    def pace(self, why: str) -> float:
        """0 where its waits of this kind are as long as the others', 1 where about e times as long."""
        pace = self.paces.get(why)
        return 0.0 if pace is None else pace.value


class _Wait:
    """One prompt and the wait for the next of its session. `held` units are its own and resident; none lie at `left` or after."""

    __slots__ = ("began", "held", "left", "open", "place", "request", "session", "since", "units", "why")

    def __init__(self, units: Sequence[int], session: _Session, use: PromptUse) -> None:
        self.units = units
        self.left = self.held = len(units)
        self.began = self.since = use.time
        self.session = session
        self.request = use.request
        self.why = _RUNNING
        self.open = True
        self.place = 0


class ReturnOdds(EvictionOrder):
    """Evicts first what the sessions' latest prompts no longer contain; then by the index of the session, tail first.

    A unit belongs to the prompt that used it last. Rates are counted by stop reason and by the session's pace, for
    sub-agents apart (hazard rates, with the waits that have not ended; the index is Gittins', J. R. Stat. Soc. B 41,
    1979). A prompt of a size that often comes back cut down is worth less.

    Sessions are ranked anew when as many units have left as there were sessions to rank, and rates are computed anew
    when some hundreds have left. So a decision costs the same for each unit, however many sessions there are.

    Attributes:
        looked: how often it looked at a session to rank it, or at a wait to compute rates, ever.
    """

    def __init__(self) -> None:
        self.looked = 0
        self._of: dict[int, _Wait] = {}
        self._sessions: dict[int, _Session] = {}
        self._kinds: dict[tuple[bool, str], _Kind] = {}
        self._cuts: dict[tuple[int, bool], list[int]] = {}
        self._behind: deque[_Wait] = deque()
        self._ranked: list[tuple[float, float, int, _Wait]] = []
        self._places = 0
        self._until_ranked = 0
        self._until_fresh = 0
        self._now = 0.0

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`. A prompt has each unit once."""
        self._now = max(self._now, use.time)
        if len(self._behind) > 2 * len(self._of) + _GONE:
            self._behind = deque(prompt for prompt in self._behind if prompt.held)
        if len(self._sessions) > 2 * (len(self._of) + _GONE):
            self._refresh()
        if len(self._ranked) > 2 * (len(self._sessions) + _GONE):
            self._ranked.clear()
            self._until_ranked = 0
        session = self._sessions.pop(use.session, None) or _Session(use.sub)
        self._sessions[use.session] = session  # the one that was used last is the last
        old = session.prompt
        if old is not None:
            self._note(old, use.time, True)
            self._leave(old)
        session.prompt = prompt = _Wait(units, session, use)
        of = self._of
        for unit in units:
            before = of.get(unit)
            if before is not None:
                before.held -= 1
            of[unit] = prompt
        if old is not None:
            self._note_cut(old, use.time - old.since > _LONG)
        insort(self._ranked, self._placed(prompt))

    def _note(self, prompt: _Wait, time: float, back: bool) -> None:
        """Count a wait that has ended, also as one that began with the prompt."""
        session = prompt.session
        for why, since in {_RUNNING: prompt.began, prompt.why: prompt.since}.items():
            wait, kind = max(0.0, time - since), self._kind(session.sub, why)
            kind.add(wait, session.pace(why), back)
            if back:
                pace = session.paces.setdefault(why, _Mean(0.0, _MEMORY, _DOUBT))
                pace.add(math.log1p(wait) - kind.average.value)
                kind.average.add(math.log1p(wait))

    def _note_cut(self, prompt: _Wait, long: bool) -> None:
        """Count a return by what it leaves behind of what was cached."""
        cut = prompt.held > (1.0 - SESSION_SHARE) * len(prompt.units)
        for size in (_size(prompt), _ANY_SIZE):
            counted = self._cuts.setdefault((size, long), [0, 0])
            counted[0] += cut
            counted[1] += 1

    def _kind(self, sub: bool, why: str) -> _Kind:
        kind = self._kinds.get((sub, why))
        if kind is None:
            kind = self._kinds[sub, why] = _Kind()
        return kind

    def _leave(self, prompt: _Wait) -> None:
        """Nobody waits for it any more: what only it holds leaves first."""
        prompt.open = False
        self._behind.append(prompt)

    def ended(self, use: PromptUse, time: float, why: str) -> None:
        """See `EvictionOrder`."""
        session = self._sessions.get(use.session)
        prompt = None if session is None else session.prompt
        if prompt is not None and prompt.request == use.request:
            self._now = max(self._now, time)
            prompt.why, prompt.since = why, time
            insort(self._ranked, self._placed(prompt))

    def forget(self, units: Iterable[int]) -> None:
        """See `EvictionOrder`."""
        for unit in units:
            prompt = self._of.pop(unit, None)
            if prompt is not None:
                prompt.held -= 1

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `EvictionOrder`."""
        chosen: list[int] = []
        for _ in range(len(self._behind)):
            if len(chosen) == count:
                break
            prompt = self._behind[0]
            self._take(prompt, count, busy, chosen)
            if not prompt.held:
                self._behind.popleft()
            elif len(chosen) < count:  # the rest of it is busy
                self._behind.rotate(-1)
        if len(chosen) < count and self._until_ranked > 0:
            self._take_ranked(count, busy, chosen)
        if len(chosen) < count:
            self._rank()
            self._take_ranked(count, busy, chosen)
        self._until_fresh -= len(chosen)
        return chosen

    def _take_ranked(self, count: int, busy: Container[int], chosen: list[int]) -> None:
        before = len(chosen)
        while self._ranked:
            _, _, place, prompt = self._ranked[-1]
            if prompt.open and prompt.place == place:
                self._take(prompt, count, busy, chosen)
            if len(chosen) == count:
                break
            self._ranked.pop()
        self._until_ranked -= len(chosen) - before

    def _take(self, prompt: _Wait, count: int, busy: Container[int], chosen: list[int]) -> None:
        """Victims of one prompt, from its tail on."""
        of, units = self._of, prompt.units
        at = left = prompt.left
        while prompt.held and at and len(chosen) < count:
            at -= 1
            unit = units[at]
            mine = of.get(unit) is prompt
            if mine and unit in busy:
                continue
            if mine:
                del of[unit]
                chosen.append(unit)
                prompt.held -= 1
            if left == at + 1:
                left = at
        prompt.left = left

    def _rank(self) -> None:
        """Rank all sessions of which something is cached; the one that is worth least is the last."""
        if self._until_fresh <= 0:
            self._refresh()
        self._ranked = [
            self._placed(session.prompt)
            for session in self._sessions.values()
            if session.prompt is not None and session.prompt.held
        ]
        self._ranked.sort()
        self._until_ranked = len(self._ranked)

    def _placed(self, prompt: _Wait) -> tuple[float, float, int, _Wait]:
        """Its place among the sessions: among equals, the longest wait leaves first, so the same run gives the same victims."""
        self.looked += 1
        self._places -= 1
        prompt.place = self._places
        return -self._worth(prompt), -prompt.since, prompt.place, prompt

    def _worth(self, prompt: _Wait) -> float:
        wait = max(0.0, self._now - prompt.since)
        worth = self._kind(prompt.session.sub, prompt.why).worth(wait, prompt.session.pace(prompt.why))
        cut, back = self._cuts.get((_size(prompt), wait > _LONG), (0, 0))
        cuts, backs = self._cuts.get((_ANY_SIZE, wait > _LONG), (0, 1))
        return worth * (1.0 - (cut + _DOUBT * cuts / backs) / (back + _DOUBT))

    def _refresh(self) -> None:
        """Compute the rates again, from everything counted and the open waits.

        A session of which nothing is cached is given up when it is silent for too long, or when there are too many.
        """
        waiting = [(number, session.prompt) for number, session in self._sessions.items() if session.prompt is not None]
        many = len(waiting) - sum(prompt.held > 0 for _, prompt in waiting) - _GONE
        still: dict[tuple[bool, str], list[tuple[float, float]]] = {}
        for number, prompt in waiting:
            session, silent = prompt.session, self._now - prompt.since
            if silent > FOREVER or (many > 0 and not prompt.held):
                many -= 1
                self._note(prompt, self._now, False)
                self._leave(prompt)
                del self._sessions[number]
                continue
            for why, since in {_RUNNING: prompt.began, prompt.why: prompt.since}.items():
                still.setdefault((session.sub, why), []).append((max(0.0, self._now - since), session.pace(why)))
        for key in still.keys() | self._kinds.keys():
            self._kind(*key).work_out(still.get(key, ()))
        self.looked += len(waiting)
        self._until_fresh = max(_FRESH, 4 * len(waiting))


def _size(prompt: _Wait) -> int:
    return int(_SIZES * math.log2(len(prompt.units) + 1))


_ORDERS: dict[str, Callable[[], EvictionOrder]] = {"lru": LruOrder, "returning": ReturnOdds}


def order_of(spec: str | EvictionOrder) -> EvictionOrder:
    """The order that a spec names; an order is returned as it is.

    Raises:
        SpecError: there is no such order.
    """
    if isinstance(spec, EvictionOrder):
        return spec
    if spec not in _ORDERS:
        raise SpecError(f"{spec!r} is no order of eviction", advice=f"known: {', '.join(_ORDERS)}; or give an EvictionOrder")
    return _ORDERS[spec]()

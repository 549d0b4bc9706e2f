"""An order of eviction that estimates how soon each session comes back.

A session that waits for a tool comes back within seconds. One that waits for its user comes back in minutes or never.
A sub-agent that has ended almost never comes back. And some sessions are slower than others. How fast each kind comes
back, and how that changes during the wait, is counted at run time; nothing is fitted beforehand. Units that a
session's latest prompt no longer contains leave first. Times come with the uses; there is no clock here.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Sequence

from kilburn.errors import SpecError
from kilburn_kv.eviction import EvictionOrder, PromptUse

Group = tuple[bool, int]
"""Whether it is a sub-agent's, and the session's pace compared with all: 0 for average, 1 for about e times as slow."""

Kind = tuple[str, Group]
"""Kind of wait: the stop reason (`_RUNNING` until it is known), and the kind of session."""

_RUNNING = "..."
_EDGES = [0.0, *(2 ** (half / 2) for half in range(38))]
"""Seconds of waiting at which one bucket of a count ends and the next begins; the last is six days."""

_LAST = len(_EDGES) - 1
_FRESH = 64
"""Number of ends and returns after which rates are computed again."""

_TRUST = 1.0
"""Imagined returns in each bucket, at the rate `_guess_rate`, before the first real one."""

_FOREVER = _EDGES[-1]

_MEMORY = 0.7
"""Weight of the older waits in a session's pace when the next one is counted."""

_SLOWEST, _QUICKEST = 3, -2


def _guess_rate(wait: float) -> float:
    """Assumed returns a second after waiting so long, before anything is counted: long waits go on."""
    return 0.5 / (wait + 10.0)


class _Count:
    """Returns of one kind of session by how long they waited, and the total waiting time."""

    __slots__ = ("back", "waited", "worth")

    def __init__(self) -> None:
        self.back = [0.0] * len(_EDGES)
        self.waited = [0.0] * len(_EDGES)
        self.worth: list[float] = []

    def add(self, wait: float, back: bool) -> None:
        self.back[_add_wait(self.waited, wait)] += back

    def work_out(self, still: Sequence[float]) -> None:
        """The worth of a session that has waited up to each edge; `still` are the waits that have not ended."""
        waited = list(self.waited)
        for wait in still:
            _add_wait(waited, wait)
        rates = []
        for at, edge in enumerate(_EDGES):
            middle = edge if at == _LAST else (edge + _EDGES[at + 1]) / 2
            rates.append((self.back[at] + _TRUST) / (waited[at] + _TRUST / _guess_rate(middle)))
        self.worth = [_gittins_index(rates, at) for at in range(_LAST)] + [rates[_LAST]]


def _add_wait(waited: list[float], wait: float) -> int:
    """Add a wait's seconds to the buckets that it went through; the bucket in which it ended."""
    ended = bisect_right(_EDGES, wait) - 1
    for at in range(ended):
        waited[at] += _EDGES[at + 1] - _EDGES[at]
    waited[ended] += wait - _EDGES[ended]
    return ended


def _gittins_index(rates: Sequence[float], start: int) -> float:
    """Gittins' index: the best chance of a return for each second of room, over all times to give up at."""
    best = gained = spent = 0.0
    there = 1.0
    for at in range(start, _LAST):
        back = 1.0 - math.exp(-rates[at] * (_EDGES[at + 1] - _EDGES[at]))
        spent += there * back / rates[at]
        gained += there * back
        there *= 1.0 - back
        best = max(best, gained / spent)
    return best


class _Mean:
    """A running mean that starts at a value; each time, the older values keep this weight."""

    __slots__ = ("keep", "total", "weight")

    def __init__(self, value: float, keep: float) -> None:
        self.keep = keep
        self.total = value
        self.weight = 1.0

    def add(self, value: float) -> None:
        self.total = self.keep * self.total + value
        self.weight = self.keep * self.weight + 1.0

    @property
    def value(self) -> float:
        return self.total / self.weight


class _Wait:
    """One prompt and the wait for the next of its session. `held` units are its own and resident; none lie at `left` or after."""

    __slots__ = ("began", "held", "kind", "left", "open", "since", "units", "whose")

    def __init__(self, units: Sequence[int], whose: Group, now: float) -> None:
        self.units = units
        self.left = len(units)
        self.held = len(units)
        self.began = self.since = now
        self.kind: Kind = (_RUNNING, whose)
        self.whose = whose
        self.open = True


class ReturnOdds(EvictionOrder):
    """Evicts first what the sessions' latest prompts no longer contain; then by the index of the session, tail first.

    A unit belongs to the prompt that used it last. Rates are counted by stop reason and by the session's
    pace, for sub-agents apart (hazard rates, with the waits that have not ended; the index is Gittins', J. R. Stat.
    Soc. B 41, 1979).
    """

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._prompts: dict[int, _Wait] = {}
        self._latest: dict[int, int] = {}
        self._counts: dict[Kind, _Count] = {}
        self._paces: dict[int, _Mean] = {}
        self._pace = _Mean(3.0, 1.0)
        self._now = 0.0
        self._news = _FRESH

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `Eviction`. A request has a number of its own, and a prompt each unit once.

        Raises:
            SpecError: a request's number that was used before and still holds units.
        """
        if use.request in self._prompts:
            raise SpecError(f"request {use.request} was used before", advice="number each request anew")
        self._now = max(self._now, use.time)
        self._news += 1
        self._come_back(use)
        of, prompts, request = self._of, self._prompts, use.request
        prompts[request] = _Wait(units, self._whose(use), self._now)
        self._latest[use.session] = request
        last = -1
        run = 0
        for unit in units:
            before = of.get(unit, -1)
            of[unit] = request
            if before == last:
                run += 1
            else:
                self._lose(last, run)
                last, run = before, 1
        self._lose(last, run)

    def _come_back(self, use: PromptUse) -> None:
        before = self._latest.get(use.session)
        if before is None:
            return
        prompt = self._prompts[before]
        self._count((_RUNNING, prompt.whose)).add(self._now - prompt.began, True)
        if prompt.kind[0] != _RUNNING:
            self._count(prompt.kind).add(max(0.0, self._now - prompt.since), True)
        prompt.open = False
        prompt.since = self._now
        wait = math.log1p(self._now - prompt.began)
        pace = self._paces.get(use.session)
        if pace is None:
            pace = self._paces[use.session] = _Mean(0.0, _MEMORY)
        pace.add(wait - self._pace.value)
        self._pace.add(wait)
        self._lose(before, 0)

    def _whose(self, use: PromptUse) -> Group:
        pace = self._paces.get(use.session)
        slow = 0 if pace is None else round(pace.value)
        return use.sub, max(_QUICKEST, min(_SLOWEST, slow))

    def _lose(self, request: int, count: int) -> None:
        """A prompt has so many units fewer; it is forgotten if none are left and no wait is open."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            prompt.held -= count
            if not prompt.held and not prompt.open:
                del self._prompts[request]

    def _count(self, kind: Kind) -> _Count:
        count = self._counts.get(kind)
        if count is None:
            count = self._counts[kind] = _Count()
        return count

    def ended(self, use: PromptUse, time: float, why: str) -> None:
        """See `Eviction`."""
        prompt = self._prompts.get(use.request)
        if prompt is not None and prompt.open:
            self._now = max(self._now, time)
            prompt.kind = (why, prompt.whose)
            prompt.since = self._now
            self._news += 1

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `Eviction`."""
        if self._news >= _FRESH:
            self._work_out()
        # Among equals, the longest wait leaves first, and then the oldest prompt, so the same run gives the same
        # victims.
        ranked = sorted((self._worth(prompt), prompt.since, request) for request, prompt in self._prompts.items() if prompt.held)
        chosen: list[int] = []
        for _, _, request in ranked:
            if len(chosen) == count:
                break
            self._take(request, count, busy, chosen)
        return chosen

    def _take(self, request: int, count: int, busy: Container[int], chosen: list[int]) -> None:
        """Victims of one prompt, from its tail on."""
        prompt, of = self._prompts[request], self._of
        taken, at, left = 0, prompt.left, prompt.left
        while at and len(chosen) < count:
            at -= 1
            unit = prompt.units[at]
            mine = of.get(unit) == request
            if mine and unit in busy:
                continue
            if mine:
                del of[unit]
                chosen.append(unit)
                taken += 1
            if left == at + 1:
                left = at
        prompt.left = left
        self._lose(request, taken)

    def _worth(self, prompt: _Wait) -> float:
        if not prompt.open:
            return 0.0
        wait = max(0.0, self._now - prompt.since)
        count = self._counts.get(prompt.kind)
        if count is None or not count.worth:
            return _guess_rate(wait)
        at = bisect_right(_EDGES, wait) - 1
        if at >= _LAST:
            return count.worth[_LAST]
        through = (wait - _EDGES[at]) / (_EDGES[at + 1] - _EDGES[at])
        return count.worth[at] * (1 - through) + count.worth[at + 1] * through

    def _work_out(self) -> None:
        """Compute rates again, from everything counted and the open waits; sessions that are silent too long are given
        up."""
        self._news = 0
        still: dict[Kind, list[float]] = {}
        for session, request in list(self._latest.items()):
            prompt = self._prompts[request]
            silent = self._now - prompt.since
            if silent > _FOREVER:
                self._count(prompt.kind).add(silent, False)
                prompt.open = False
                del self._latest[session]
                self._paces.pop(session, None)
                self._lose(request, 0)
                continue
            still.setdefault(prompt.kind, []).append(silent)
            if prompt.kind[0] != _RUNNING:
                still.setdefault((_RUNNING, prompt.whose), []).append(self._now - prompt.began)
        for kind in still.keys() | self._counts.keys():
            self._count(kind).work_out(still.get(kind, ()))

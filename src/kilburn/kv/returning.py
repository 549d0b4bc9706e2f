"""An order of eviction that asks of each session: how likely is it to come back soon?

A session that waits for a tool comes back within seconds, one whose user has the word comes back in
minutes or never, a sub-agent that has ended hardly at all. How fast each kind comes back, and how that
changes while one waits, is counted while it runs; nothing is fitted beforehand. What a session's
latest prompt no longer holds leaves first. It refuses to know tokens, texts or the time: uses carry it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Container, Sequence

from kilburn.kv.eviction import Use

__all__ = ["Returning"]

Kind = tuple[str, bool]
"""Stop reason (`_RUNNING` until it is known), and whether it is a sub-agent's."""

_RUNNING = "..."
_EDGES = [0.0, *(2 ** (half / 2) for half in range(38))]
"""Seconds of waiting at which one bucket of a count ends and the next begins; the last is six days."""

_LAST = len(_EDGES) - 1
_FRESH = 64
"""Ends and returns after which rates are worked out anew."""

_TRUST = 1.0
"""Imagined returns in each bucket, at the rate `_guess`, before the first real one."""

_BACK = "back"
_FOREVER = _EDGES[-1]


def _guess(wait: float) -> float:
    """Returns a second after waiting so long, where nothing was counted: those who waited long will wait long."""
    return 0.5 / (wait + 10.0)


class _Count:
    """Returns of one kind of session by how long they waited, and how long any waited at all."""

    __slots__ = ("back", "waited", "worth")

    def __init__(self) -> None:
        self.back = [0.0] * len(_EDGES)
        self.waited = [0.0] * len(_EDGES)
        self.worth: list[float] = []

    def add(self, wait: float, back: bool) -> None:
        self.back[_wait(self.waited, wait)] += back

    def work_out(self, still: Sequence[float]) -> None:
        """The worth of one who has waited up to each edge; `still` are the waits that have not ended."""
        waited = list(self.waited)
        for wait in still:
            _wait(waited, wait)
        rates = []
        for at, edge in enumerate(_EDGES):
            middle = edge if at == _LAST else (edge + _EDGES[at + 1]) / 2
            rates.append((self.back[at] + _TRUST) / (waited[at] + _TRUST / _guess(middle)))
        self.worth = [_index(rates, at) for at in range(_LAST)] + [rates[_LAST]]


def _wait(waited: list[float], wait: float) -> int:
    """Add a wait's seconds to the buckets that it went through; the bucket in which it ended."""
    ended = bisect_right(_EDGES, wait) - 1
    for at in range(ended):
        waited[at] += _EDGES[at + 1] - _EDGES[at]
    waited[ended] += wait - _EDGES[ended]
    return ended


def _index(rates: Sequence[float], start: int) -> float:
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


class _Wait:
    """One prompt and the wait for the next of its session; `left` units of it may be resident, head first."""

    __slots__ = ("began", "held", "kind", "left", "open", "since", "sub", "units")

    def __init__(self, units: Sequence[int], use: Use) -> None:
        self.units = units
        self.left = len(units)
        self.held = len(units)
        self.began = self.since = use.time
        self.kind: Kind = (_RUNNING, use.sub)
        self.sub = use.sub
        self.open = True


class Returning:
    """First what the sessions' latest prompts no longer hold; then by the index of the session, tail first.

    A unit belongs to the prompt that used it last. Rates are counted by stop reason, for sub-agents apart
    (hazard rates, with the waits that have not ended; the index is Gittins', J. R. Stat. Soc. B 41, 1979).
    """

    def __init__(self) -> None:
        self._of: dict[int, int] = {}
        self._prompts: dict[int, _Wait] = {}
        self._latest: dict[int, int] = {}
        self._counts: dict[Kind, _Count] = {}
        self._news = _FRESH

    def used(self, units: Sequence[int], use: Use) -> None:
        """See `Eviction`."""
        self._come_back(use)
        of, prompts, request = self._of, self._prompts, use.request
        prompt = _Wait(units, use)
        for unit in units:
            before = of.get(unit)
            if before is not None:
                prompts[before].held -= 1
            of[unit] = request
        prompts[request] = prompt
        self._latest[use.session] = request
        for old in {self._last, request} - {request}:
            self._drop(old)

    _last = -1

    def _come_back(self, use: Use) -> None:
        self._last = before = self._latest.get(use.session, -1)
        if before < 0:
            return
        prompt = self._prompts[before]
        self._count((_RUNNING, prompt.sub)).add(use.time - prompt.began, True)
        if prompt.kind[0] != _RUNNING:
            self._count(prompt.kind).add(use.time - prompt.since, True)
        prompt.open = False
        prompt.since = use.time
        self._news += 1

    def _count(self, kind: Kind) -> _Count:
        count = self._counts.get(kind)
        if count is None:
            count = self._counts[kind] = _Count()
        return count

    def _drop(self, request: int) -> None:
        """Forget a prompt of which nothing is resident and nothing is waited for."""
        prompt = self._prompts.get(request)
        if prompt is not None and not prompt.held and not prompt.open:
            del self._prompts[request]

    def ended(self, use: Use, time: float, why: str) -> None:
        """See `Eviction`."""
        prompt = self._prompts.get(use.request)
        if prompt is not None and prompt.open:
            prompt.kind = (why, use.sub)
            prompt.since = time
            self._news += 1

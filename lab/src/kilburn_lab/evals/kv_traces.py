"""Recorded prompts of many sessions as units of a KV cache, merged into one stream of events.

Read from JSON lines, plain or gzip, a trace a line: requests with their time, what they read as
`[first, count]` stretches of block ids, their stop reason, and sub-agents with requests of their own.
Or made up from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.wire.recording import read_as
from kilburn_kv.eviction import PromptUse

BLOCK = 64
"""Tokens of a block in a trace."""

UNIT = 1024
"""Tokens of a unit of the cache."""

_BLOCKS = UNIT // BLOCK
_FORM = "each line is {id, block_size: 64, requests: [{t, hash_ranges: [[first, count]], api_time, stop}]}"


class RecordedPrompt(msgspec.Struct, frozen=True):
    """One request of a trace.

    Args:
        time: seconds since the trace began. agent: 0, or the number of a sub-agent.
        units: its whole units, head first, numbered within the trace; equal numbers have equal prefixes.
        ran: seconds until the reply was complete. why: its stop reason, "" if it was not recorded.
    """

    time: float
    agent: int
    units: tuple[int, ...]
    ran: float
    why: str


class Trace(msgspec.Struct, frozen=True):
    """One session with its sub-agents, in order of time."""

    id: str
    prompts: tuple[RecordedPrompt, ...]


class Moment(msgspec.Struct, frozen=True):
    """A prompt that begins, with its units; or, with `units` None, the end of its reply for the reason `why`."""

    time: float
    use: PromptUse
    trace: int
    units: tuple[int, ...] | None
    why: str = ""


class _Request(msgspec.Struct):
    t: float
    hash_ranges: list[tuple[int, int]] = []
    api_time: float | None = None
    stop: str | None = None
    requests: list[_Request] = []


class _TraceLine(msgspec.Struct):
    id: str
    requests: list[_Request]
    block_size: int = BLOCK


def read(path: str | Path) -> Iterator[Trace]:
    """The traces of a file, one line at a time.

    Raises:
        InvalidMessage: no such file, it cannot be read, or a line is no trace, or has blocks of another size.
    """
    for where, line in read_as(path, _TraceLine, _FORM):
        yield _trace_of(line, where)


def _trace_of(found: _TraceLine, where: str) -> Trace:
    if found.block_size != BLOCK:
        raise InvalidMessage(f"{where}: blocks of {found.block_size} tokens", advice=_FORM)
    agents = count(1)
    prompts: list[RecordedPrompt] = []
    for request in found.requests:
        agent = next(agents) if request.requests else 0
        for one in request.requests or [request]:
            began = request.t + one.t if agent else one.t
            stretches = one.hash_ranges
            if not math.isfinite(began) or any(first < 0 or many < 0 or many > 10**7 for first, many in stretches):
                raise InvalidMessage(f"{where}: a request that cannot be", advice=_FORM)
            prompts.append(RecordedPrompt(began, agent, _units(stretches), max(0.0, one.api_time or 0.0), one.stop or ""))
    return Trace(found.id, tuple(sorted(prompts, key=lambda prompt: prompt.time)))


def _units(stretches: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Whole units: a block's id identifies the whole prefix, so the id of a unit's last block identifies the unit."""
    blocks: list[int] = []
    for first, many in stretches:
        blocks.extend(range(first, first + many))
    return tuple(blocks[_BLOCKS - 1 :: _BLOCKS])


def weave(traces: Sequence[Trace], seed: int, hours: float, *, subs: bool = True) -> list[Moment]:
    """All traces as sessions of one cache, in order of time; each begins at a time drawn evenly from so many hours.

    Args:
        subs: whether the sub-agents' prompts take part.
    """
    chance = random.Random(seed)
    events: list[Moment] = []
    requests, sessions = count(), count()
    for number, trace in enumerate(traces):
        began = chance.uniform(0.0, 3600.0 * hours)
        session: dict[int, int] = {}
        for prompt in trace.prompts:
            if not prompt.units or (prompt.agent and not subs):
                continue
            if prompt.agent not in session:
                session[prompt.agent] = next(sessions)
            time = began + prompt.time
            use = PromptUse(time, next(requests), session[prompt.agent], prompt.agent > 0)
            units = tuple(number << 32 | unit for unit in prompt.units)
            events.append(Moment(time, use, number, units))
            events.append(Moment(time + prompt.ran, use, number, None, prompt.why))
    events.sort(key=lambda event: (event.time, event.use.request, event.units is None))
    return events


def synthetic(traces: int, seed: int) -> Iterator[Trace]:
    """`traces` made-up sessions: a prompt that grows, quick tools and slow ones, a user who comes back late or never.

    The same seed gives the same traces. The waits are lognormal; no figure is taken from a recording.
    """
    for number in range(traces):
        yield _session(random.Random(f"{seed}/{number}"), f"made-{seed}-{number}")


def _session(chance: random.Random, name: str) -> Trace:
    fresh = count()
    units = [next(fresh) for _ in range(chance.randint(15, 30))]
    time, pace = 0.0, chance.uniform(0.5, 2.0)
    prompts: list[RecordedPrompt] = []
    for _ in range(min(200, int(chance.lognormvariate(3.3, 1.0)) + 2)):
        units = units + [next(fresh) for _ in range(min(40, int(chance.expovariate(0.4))))]
        ran = chance.lognormvariate(1.8, 0.6)
        asks = chance.random() < 0.9
        prompts.append(RecordedPrompt(time, 0, tuple(units), ran, "tool_use" if asks else "end_turn"))
        if asks and chance.random() < 0.01:
            prompts += _errand(chance, fresh, time + ran, len(prompts))
        time += ran + pace * (chance.lognormvariate(1.8, 1.0) if asks else chance.lognormvariate(5.5, 1.6))
        if len(units) > 170:
            units = units[:15]
    return Trace(name, tuple(sorted(prompts, key=lambda prompt: prompt.time)))


def _errand(chance: random.Random, fresh: Iterator[int], time: float, agent: int) -> Iterator[RecordedPrompt]:
    """A sub-agent's prompts, quick one after another, the last without a return."""
    units = [next(fresh) for _ in range(9)]
    last = chance.randint(3, 9)
    for number in range(last + 1):
        units = units + [next(fresh) for _ in range(chance.randint(0, 4))]
        ran = chance.lognormvariate(0.9, 0.4)
        yield RecordedPrompt(time, agent, tuple(units), ran, "end_turn" if number == last else "tool_use")
        time += ran + chance.lognormvariate(1.2, 0.5)

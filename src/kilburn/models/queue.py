"""The queue before a model: jobs of many agents, of which some run.

A discipline chooses and the queue moves. It has no thread and no clock: who calls it says what time it is. So the
scheduler and a simulation run the same code.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from kilburn.arguments import check_fields
from kilburn.errors import Cancelled, ModelError, Overlong, SpecError, TokensSpent
from kilburn.kernel.resolve import resolve

log = logging.getLogger("kilburn")

__all__ = ["Discipline", "Job", "Share"]


class Stage(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """The model raised an error."""
    CANCELLED = "cancelled"
    """It was taken out, its deadline passed, or its caller stopped reading."""


class Job(msgspec.Struct, kw_only=True):
    """One step of an agent, as a queue sees it: one request, until its reply is complete. Only the queue changes it.

    Args:
        agent: who asks; `tenant`: for whom.
        priority: higher is served first, by the disciplines that look at it.
        size: tokens of the prompt and of the longest reply; 0 if nothing limits them.
        came: when, in seconds.
        place: its place in the line: a later one is higher. A job that gave way gets a new one.
        since: when it came to its stage, in seconds.
        waited: seconds in the line; `ran`: seconds on the model.
        tokens: that were charged for it so far.
        slices: how often it was started.
        error: why it may not run, or not go on.
    """

    agent: str
    tenant: str = "default"
    priority: float = 0
    size: int = 0
    came: float = 0.0
    place: int = 0
    stage: Stage = Stage.WAITING
    since: float = 0.0
    waited: float = 0.0
    ran: float = 0.0
    tokens: int = 0
    slices: int = 0
    error: ModelError | None = None

    @property
    def turnaround(self) -> float:
        """Seconds from when it came to where it is now."""
        return self.waited + self.ran


@dataclass(frozen=True, slots=True)
class Line:
    """All that a discipline sees.

    Args:
        waiting: the jobs that may start, in the order of their places; one at least.
        last: by agent, the place that was next when it was started last.
        holder: the agent that was started last, and `in_a_row` how often without another between.
        used: by tenant, the tokens that it was charged, divided by its weight.
    """

    waiting: Sequence[Job]
    last: Mapping[str, int]
    holder: str
    in_a_row: int
    used: Mapping[str, float]


@runtime_checkable
class Discipline(Protocol):
    """Which job runs next. A frozen dataclass, made from a spec string such as `round_robin(slice=64)`.

    `slice` is after how many tokens a running job goes back into the line, where the model can be interrupted; None
    for never. If it is chosen again at once, it goes on as if nothing had happened.
    """

    @property
    def slice(self) -> int | None:
        """Tokens, or None."""
        ...

    def choose(self, line: Line) -> Job:
        """One of the waiting jobs. The same line gives the same job."""
        ...


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What a tenant may have.

    Args:
        weight: in comparison with other tenants, for `fair_share`.
        tokens: of all its prompts and replies together; None for no limit.
    """

    weight: float = 1.0
    tokens: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)


class Served(msgspec.Struct, kw_only=True):
    """What an agent has had so far: its finished jobs, their seconds, tokens and slices."""

    jobs: int = 0
    waited: float = 0.0
    ran: float = 0.0
    tokens: int = 0
    slices: int = 0


class Queue:
    """Jobs that wait, and jobs that run.

    Not safe for several threads.

    Args:
        discipline: a spec, or an object with `choose`.
        at_once: jobs that may run side by side.
        kv: tokens that running jobs may take together, prompts and replies; None for no limit.
        shares: of tenants; who is not named has the weight 1 and no limit.

    Attributes:
        waiting: in the order of their places.
        running: those that run.
        served: by agent, what it has had.
        spent: by tenant, the tokens that it was charged.
        decisions: how often the discipline was asked; `faults`: how often it failed, or chose what does not wait.

    Raises:
        SpecError: no such discipline, or a number that cannot be.
    """

    def __init__(
        self, discipline: Any = "fifo", *, at_once: int = 1, kv: int | None = None, shares: Mapping[str, Share] | None = None
    ) -> None:
        self.shares = dict(shares or {})
        if at_once < 1 or (kv is not None and kv < 1):
            raise SpecError(f"a queue with {at_once=}, {kv=} runs nothing", advice="give 1 or more")
        for tenant, share in self.shares.items():
            if not 0 < share.weight < math.inf or (share.tokens is not None and share.tokens < 0):
                raise SpecError(f"tenant {tenant!r} cannot have {share}", advice="give a weight over 0, and tokens of 0 or more")
        self.discipline: Discipline = resolve("models.disciplines", discipline)
        self.at_once, self.kv = at_once, kv
        self.waiting: dict[int, Job] = {}
        self.running: dict[int, Job] = {}
        self.served: dict[str, Served] = {}
        self.spent: dict[str, int] = {}
        self.decisions = self.faults = 0
        self._limited = any(share.tokens is not None for share in self.shares.values())
        self._used: dict[str, float] = {}
        self._last: dict[str, int] = {}
        self._holder, self._in_a_row = "", 0
        self._places = self._largest = 0
        self._present = Counter[str]()  # by tenant, its jobs that wait or run
        self._floor = 0.0  # what the tenant that was served least had, when it was served

    @property
    def bounded(self) -> bool:
        """Whether the sizes of jobs matter: there is a limit of tokens."""
        return self._limited or self.kv is not None

    def submit(self, job: Job, time: float) -> None:
        """Put a new job at the end of the line.

        Raises:
            Overlong: it alone is larger than the KV budget. TokensSpent: its tenant may not have so many tokens more.
        """
        if self.kv is not None and job.size > self.kv:
            raise Overlong(
                f"a prompt and its reply may take {job.size} tokens, and the KV budget is {self.kv}",
                advice="send a shorter prompt, lower max_tokens, or raise kv",
            )
        if error := self._refusal(job):
            raise error
        charged = self._used.get(job.tenant, 0.0)
        self._used[job.tenant] = charged if self._present[job.tenant] else max(charged, self._floor)
        self._present[job.tenant] += 1
        self._largest = max(self._largest, job.size)
        job.came = time
        self._line_up(job, time)

    def start(self, time: float) -> Job | None:
        """Start the job that the discipline chooses; None if nothing may start now.

        If the chosen one does not fit the KV budget yet, it waits for room and nobody overtakes it.
        """
        if len(self.running) >= self.at_once:
            return None
        waiting = self._admissible() if self._limited else [*self.waiting.values()]
        if not waiting:
            return None
        job = self._choose(waiting)
        if self.kv is not None and job.size + sum(running.size for running in self.running.values()) > self.kv:
            return None
        del self.waiting[job.place]
        self.running[job.place] = job
        job.stage, job.waited, job.since = Stage.RUNNING, job.waited + time - job.since, time
        job.slices += 1
        self._in_a_row = self._in_a_row + 1 if job.agent == self._holder else 1
        self._holder = job.agent
        self._places += 1
        self._last[job.agent] = self._places
        self._floor = max(self._floor, self._used[job.tenant])
        return job

    def give_way(self, job: Job, tokens: int, time: float) -> None:
        """Charge a running job for a slice, and put it at the end of the line."""
        self._stop(job, tokens, time)
        self._line_up(job, time)

    def end(self, job: Job, tokens: int, time: float, stage: Stage = Stage.DONE) -> list[Job]:
        """Take a job out of the queue, wherever it is; `tokens` is what it took since it was charged last.

        Returns:
            Waiting jobs that were taken out with it, because their tenant has no tokens left; their `error` says so.
        """
        if not self._take_out(job, tokens, time, stage) or self._left(job.tenant) > self._largest:
            return []
        refused = []
        for waiting in [waiting for waiting in self.waiting.values() if waiting.tenant == job.tenant]:
            if error := self._refusal(waiting):
                waiting.error = error
                self._take_out(waiting, 0, time, Stage.FAILED)
                refused.append(waiting)
        return refused

    def cancel(self, agent: str, time: float) -> list[Job]:
        """Take an agent's waiting jobs out, and tell its running ones to stop; returns all of them."""
        jobs = [job for job in (*self.waiting.values(), *self.running.values()) if job.agent == agent]
        for job in jobs:
            job.error = Cancelled(f"a job of {agent!r} was cancelled", advice="ask again, if it is still wanted")
            if job.stage is Stage.WAITING:
                self._take_out(job, 0, time, Stage.CANCELLED)
        return jobs

    def _take_out(self, job: Job, tokens: int, time: float, stage: Stage) -> bool:
        if job.place in self.running:
            self._stop(job, tokens, time)
        elif self.waiting.pop(job.place, None) is not None:
            job.waited += time - job.since
        else:
            return False
        job.stage, job.since = stage, time
        total = self.served.setdefault(job.agent, Served())
        total.jobs += 1
        total.waited += job.waited
        total.ran += job.ran
        total.tokens += job.tokens
        total.slices += job.slices
        self._present[job.tenant] -= 1
        return True

    def _choose(self, waiting: list[Job]) -> Job:
        """Return the discipline's choice, or the first job if it fails: no agent may wait for ever because of that."""
        self.decisions += 1
        try:
            job = self.discipline.choose(Line(waiting, self._last, self._holder, self._in_a_row, self._used))
        except Exception as error:  # noqa: BLE001 -- it goes to the log, and the jobs go on
            log.warning("discipline %s failed: %r", type(self.discipline).__name__, error)
        else:
            if any(candidate is job for candidate in waiting):
                return job
            log.warning("discipline %s chose what does not wait", type(self.discipline).__name__)
        self.faults += 1
        return waiting[0]

    def _line_up(self, job: Job, time: float) -> None:
        self._places += 1
        job.place, job.stage, job.since = self._places, Stage.WAITING, time
        self.waiting[job.place] = job

    def _stop(self, job: Job, tokens: int, time: float) -> None:
        del self.running[job.place]
        job.ran += time - job.since
        job.tokens += tokens
        self.spent[job.tenant] = self.spent.get(job.tenant, 0) + tokens
        self._used[job.tenant] += tokens / self.shares.get(job.tenant, Share()).weight

    def _left(self, tenant: str) -> float:
        limit = self.shares.get(tenant, Share()).tokens
        return math.inf if limit is None else limit - self.spent.get(tenant, 0)

    def _refusal(self, job: Job) -> TokensSpent | None:
        """Return the error of a job that may never run, because its tenant's tokens do not suffice; None if it may."""
        if job.size - job.tokens <= (remaining := self._left(job.tenant)) and remaining > 0:
            return None
        return TokensSpent(
            f"tenant {job.tenant!r} has {max(0, remaining)} tokens left, and a job of {job.agent!r} may take {job.size}",
            advice="give the tenant more tokens, or lower max_tokens",
        )

    def _admissible(self) -> list[Job]:
        """Return the waiting jobs whose tenants have the tokens for them, beside what their running jobs may take."""
        room = {tenant: self._left(tenant) for tenant in self.shares}
        for job in self.running.values():
            if job.tenant in room:
                room[job.tenant] -= job.size - job.tokens
        tight = {tenant: tokens for tenant, tokens in room.items() if tokens < self._largest}
        if not tight:
            return [*self.waiting.values()]
        return [job for job in self.waiting.values() if job.tenant not in tight or job.size - job.tokens <= tight[job.tenant]]

"""A scheduler: many agents over one model.

Each agent gets a model of its own from `Scheduler.model`, and needs no change: its thread waits in `stream` until the
discipline chooses its job. A job is one step of an agent. Between two steps an agent always gives way; a model that can
be interrupted also gives way at a token, and goes on later with the token that would have come next.

    scheduler = Scheduler(model, "round_robin(slice=64)")
    agent = Agent(scheduler.model("pilot", tenant="harbour"), tools, process)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from queue import Empty, SimpleQueue
from typing import Any

import msgspec

from kilburn.arguments import checked
from kilburn.errors import Cancelled, DeadlinePassed
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.model import Delta, Model, Reply, Request, takes_tools
from kilburn.models.queue import Job, Queue, Served, Share, Stage
from kilburn.tokens.choice import counter_for

__all__ = ["Scheduler"]

PATIENCE = 1.0
"""Seconds that a job waits or runs before its session's ledger says so. What is shorter costs no write of its own."""


class JobNote(msgspec.Struct, frozen=True, kw_only=True):
    """What a session's ledger says of a job: a note whose data has it as `job`.

    Args:
        stage: where it was when the note was written; `ahead` is how many jobs waited before it then.
        discipline: the scheduler's; `slice` is its slice in tokens, None if jobs run to their end.
        waited: seconds in the line until then; `ran`: on the model; `tokens`: that were charged; `slices`: how often it
            was started.
    """

    stage: Stage
    agent: str
    tenant: str
    discipline: str = ""
    slice: int | None = None
    ahead: int = 0
    waited: float = 0.0
    ran: float = 0.0
    tokens: int = 0
    slices: int = 0


@checked
class Scheduler:
    """Runs the jobs of many agents on one model, some at a time.

    Safe to use from several threads.

    Args:
        model: any model. If its `interruptible` is true, its stream may be left between two pieces for as long as
            wanted, while others run.
        discipline: which job runs next: `fifo`, `round_robin`, `priority`, `fair_share`, or an object with `choose`.
        at_once: jobs that may run side by side.
        kv: tokens that running jobs may take together, prompts and replies; None for no limit.
        shares: of tenants: weights and limits of tokens.
        clock: monotonic seconds.

    Raises:
        SpecError: no such discipline, or a number that cannot be.
    """

    def __init__(
        self,
        model: Model,
        discipline: Any = "fifo",
        *,
        at_once: int = 1,
        kv: int | None = None,
        shares: Mapping[str, Share] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.inner, self.clock = model, clock
        self.queue = Queue(discipline, at_once=at_once, kv=kv, shares=shares)
        self.name = discipline if isinstance(discipline, str) else type(discipline).__name__.lower()
        self.slice = self.queue.discipline.slice if getattr(model, "interruptible", False) else None
        self._count = counter_for(model.tokenizer).count
        self._lock = threading.Lock()
        self._called: dict[int, SimpleQueue[None]] = {}  # by the job's identity: where its thread waits
        self._closed = False

    def model(
        self,
        agent: str,
        *,
        tenant: str = "default",
        priority: float = 0,
        deadline: float | None = None,
        session: Session | None = None,
    ) -> ScheduledModel:
        """Return the model as one agent sees it.

        Args:
            agent: whose jobs they are, for `cancel` and for the disciplines that serve agents in turn.
            tenant: for whom it works, for `fair_share` and limits of tokens.
            priority: higher is served first, by the disciplines that look at it.
            deadline: seconds that each job may take, the wait included; None for no end. A request's own time-out
                counts the same way.
            session: its ledger says what each job waited and ran; `kilburn ps` and `kilburn top` show it.
        """
        return ScheduledModel(self, Job(agent=agent, tenant=tenant, priority=priority), deadline, session)

    def jobs(self) -> list[Job]:
        """Return what runs and what waits now, in the order of their places; as copies."""
        with self._lock:
            moment = self.clock()
            copies = [msgspec.structs.replace(job) for job in (*self.queue.running.values(), *self.queue.waiting.values())]
        for job in copies:
            if job.stage is Stage.RUNNING:
                job.ran += moment - job.since
            else:
                job.waited += moment - job.since
        return copies

    def served(self, agent: str) -> Served:
        """Return what the finished jobs of an agent waited, ran and took together."""
        with self._lock:
            return msgspec.structs.replace(self.queue.served.get(agent, Served()))

    def cancel(self, agent: str) -> int:
        """Cancel an agent's jobs; returns how many there were. Its thread gets `Cancelled`.

        A waiting job ends at once, a running one at the model's next piece. Nothing of its reply is kept.
        """
        with self._lock:
            return self._cancel(agent)

    def close(self) -> None:
        """Cancel all jobs; a later one is refused. The model itself stays open."""
        with self._lock:
            self._closed = True
            for agent in {job.agent for jobs in (self.queue.running, self.queue.waiting) for job in jobs.values()}:
                self._cancel(agent)

    def __enter__(self) -> Scheduler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, job: Job, request: Request) -> None:
        """Put a job in the line."""
        if self.queue.bounded:
            job.size = request.max_tokens + self.count_tokens(request)
        with self._lock:
            if self._closed:
                raise Cancelled("the scheduler is closed", advice="make a new one")
            self.queue.submit(job, self.clock())
            self._called[id(job)] = SimpleQueue()
            self._dispatch()

    def wait(self, job: Job, seconds: float | None) -> bool:
        """Wait until a job runs, so long at most; returns whether it does.

        Raises:
            Cancelled, TokensSpent: it will not.
        """
        called = True
        try:
            self._called[id(job)].get(timeout=seconds)
        except Empty:
            called = False
        if job.error is not None:
            raise job.error
        return called

    def give_way(self, job: Job, tokens: int) -> None:
        """Put a running job back into the line after a slice. It may be chosen again at once.

        Raises:
            Cancelled: it stays where it is.
        """
        with self._lock:
            if job.error is not None:
                raise job.error
            self.queue.give_way(job, tokens, self.clock())
            self._dispatch()

    def leave(self, job: Job, tokens: int, stage: Stage) -> None:
        """A job is over: charge it, and start what may start now."""
        with self._lock:
            self._called.pop(id(job), None)
            for refused in self.queue.end(job, tokens, self.clock(), stage):
                self._called[id(refused)].put(None)
            self._dispatch()

    def count_tokens(self, request: Request) -> int:
        """Return the tokens of a prompt: those that its session counted, or counted here."""
        counted = getattr(request.messages, "tokens", None)
        return counted if isinstance(counted, int) else self.tokens_in(msgspec.json.encode(list(request.messages)).decode())

    def tokens_in(self, text: str) -> int:
        """Return the tokens of a text, by the model's counter."""
        return self._count(text)

    def ahead(self, job: Job) -> int:
        """Jobs that came to the line before this one and still wait."""
        with self._lock:
            return sum(waiting.place < job.place for waiting in self.queue.waiting.values())

    def _cancel(self, agent: str) -> int:
        jobs = self.queue.cancel(agent, self.clock())
        for job in jobs:
            if job.stage is Stage.CANCELLED:
                self._called[id(job)].put(None)
        self._dispatch()
        return len(jobs)

    def _dispatch(self) -> None:
        while (job := self.queue.start(self.clock())) is not None:
            self._called[id(job)].put(None)


class ScheduledModel:
    """The model of a scheduler, as one agent sees it; made by `Scheduler.model`."""

    def __init__(self, scheduler: Scheduler, job: Job, deadline: float | None, session: Session | None) -> None:
        inner = scheduler.inner
        self.name, self.form, self.context, self.tokenizer = inner.name, inner.form, inner.context, inner.tokenizer
        self.scheduler, self.deadline, self.session = scheduler, deadline, session
        self._job = job

    @property
    def takes_tools(self) -> bool:
        """Whether the model may be offered tools."""
        return takes_tools(self.scheduler.inner)

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        """Yield the model's reply, when the discipline chooses this job.

        A job that is cancelled, fails or is closed early frees its place in the same moment.

        Raises:
            Cancelled: by `Scheduler.cancel` or `Scheduler.close`.
            DeadlinePassed: the deadline, or the request's time-out, passed in the line or between two pieces.
            TokensSpent: the tenant has too few tokens left for it.
            Overlong: it is larger than the scheduler's KV budget, or than the model's context.
            ModelError: what the model raises.
        """
        return _Run(self, msgspec.structs.replace(self._job), request).stream()

    def cancel(self) -> int:
        """Cancel the agent's jobs; see `Scheduler.cancel`."""
        return self.scheduler.cancel(self._job.agent)


class _Run:
    """One job from its request to its reply."""

    def __init__(self, model: ScheduledModel, job: Job, request: Request) -> None:
        self.scheduler, self.session, self.job, self.request = model.scheduler, model.session, job, request
        seconds = [limit for limit in (model.deadline, request.timeout) if limit is not None]
        self.seconds = min(seconds, default=None)
        self.began = time.monotonic()
        self.told = Stage.DONE

    def stream(self) -> Iterator[Delta | Reply]:
        self._check_time()
        self.scheduler.enter(self.job, self.request)
        reply, charged, text, stage = None, 0, "", Stage.CANCELLED
        try:
            self._wait()
            prompt = self.scheduler.count_tokens(self.request) if self.scheduler.slice else 0
            with closing(self.scheduler.inner.stream(self._timed())) as pieces:  # type: ignore[type-var]
                for count, piece in enumerate(pieces, 1):
                    self._check()
                    if isinstance(piece, Reply):
                        reply, stage = piece, Stage.DONE
                        break
                    text += piece.text
                    yield piece
                    self._tell()
                    if self.scheduler.slice and count % self.scheduler.slice == 0:
                        # The prompt is charged with the first slice; what the reply really took, at its end.
                        fresh = self.scheduler.slice + (0 if charged else prompt)
                        charged += fresh
                        self.scheduler.give_way(self.job, fresh)
                        self._wait()
        except (Cancelled, DeadlinePassed, GeneratorExit):
            raise
        except BaseException:
            stage = Stage.FAILED
            raise
        finally:
            self.scheduler.leave(self.job, max(0, self._cost(reply, text) - charged), stage)
            self._tell(final=True)
        if reply is None:
            raise AssertionError(f"model {self.scheduler.inner.name} ended its stream without a reply")
        yield reply

    def _cost(self, reply: Reply | None, text: str) -> int:
        """Return the tokens that the provider counted, or counted here; 0 if the model said nothing."""
        if reply is not None:
            if reply.usage is not None and reply.usage.sound:
                return reply.usage.total
            text = "".join(part.text for part in reply.message.parts)
        return self.scheduler.count_tokens(self.request) + self.scheduler.tokens_in(text) if text else 0

    def _left(self) -> float | None:
        return None if self.seconds is None else self.seconds - (time.monotonic() - self.began)

    def _timed(self) -> Request:
        remaining = self._left()
        return self.request if remaining is None else msgspec.structs.replace(self.request, timeout=max(remaining, 0.001))

    def _check_time(self) -> None:
        remaining = self._left()
        if remaining is not None and remaining <= 0:
            raise DeadlinePassed(
                f"a job of {self.job.agent!r} had {self.seconds:g} seconds and waited {self.job.waited:.1f} of them",
                advice="give it more time, a higher priority, or run fewer agents",
            )

    def _check(self) -> None:
        if self.job.error is not None:
            raise self.job.error
        self._check_time()

    def _wait(self) -> None:
        """Wait in the line; after a while the ledger says so."""
        while True:
            remaining = self._left()
            patience = PATIENCE if self.session is not None and self.told is not Stage.WAITING else None
            limits = [limit for limit in (remaining, patience) if limit is not None]
            if self.scheduler.wait(self.job, max(0.0, min(limits)) if limits else None):
                return
            self._check_time()
            self._tell()

    def _tell(self, final: bool = False) -> None:
        """Say in the ledger where the job is: at its end with the next commit, before that at once, if it takes long."""
        job, session = self.job, self.session
        if session is None or not (final or (job.stage is not self.told and self.scheduler.clock() - job.since >= PATIENCE)):
            return
        note = msgspec.structs.replace(
            msgspec.convert(job, JobNote, from_attributes=True),
            discipline=self.scheduler.name,
            slice=self.scheduler.slice,
            ahead=self.scheduler.ahead(job) if job.stage is Stage.WAITING else 0,
        )
        session.ledger.record(Act.NOTE, policy="scheduler", why=f"a job is {job.stage}", job=msgspec.to_builtins(note))
        self.told = job.stage
        if job.stage is not Stage.DONE:  # else the append of the reply writes it
            session.ledger.flush()

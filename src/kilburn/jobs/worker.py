"""A worker: does what is to be done in the background for the tenants of a store, beside other workers.

Nothing is queued: what is to be done is what the store says. A session has been said more in than was learned from; a passage has
no vector; a session is past its time; erased bytes still lie about. So no job is lost, whatever is killed. The write of each step
checks by itself that it is the first, so none is done twice in effect, and a claim (`kilburn.jobs.claims`) only spares others
the same work. What fails is tried again with growing pauses that are kept in the store, and holds up nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Any

import msgspec

from kilburn.backend import SegmentInfo, SegmentKind
from kilburn.backends.places import open_backend
from kilburn.budget import Budget
from kilburn.effect import Answer, Ask
from kilburn.errors import KilburnError
from kilburn.event import Act
from kilburn.forgetting.erasure import Erasure
from kilburn.jobs.claims import FAILED, KILLED, LEASE, JobClaim, JobName, JobState, kept, named, renewing, settle, take
from kilburn.jobs.ending import FORGET, Coolness, Ending, cool, due, expire, read_rule
from kilburn.kernel.drive import run
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.memory.learning import LearningJob, make_answerer
from kilburn.memory.retention import rule_time
from kilburn.memory.secrets import Secrets
from kilburn.message import Kind, Role
from kilburn.native import ending
from kilburn.opening import Store
from kilburn.search.choice import vectors_for

log = logging.getLogger("kilburn")

WIDE = 1 << 40
"""Tokens of a window in which nothing has to move."""

BATCH, BATCHES = 32, 8
"""Passages that are embedded at once, and how often before other work is looked for."""

LOOK = 60.0
"""Seconds after which a worker looks for what is due although nothing was written."""

UPKEEP = 600.0
"""Seconds between two looks at whether erased bytes lie about, or texts are to go to the cold place: each costs something."""


class JobKind(StrEnum):
    """What is done in the background."""

    ERASE = "erase"
    """Finish what a forgetting has left: bytes in files, objects in the cold place, claims of sessions that are gone."""
    EXPIRE = "expire"
    """Archive and forget sessions as the rule of the tenant says."""
    LEARN = "learn"
    """Learn from sessions: facts, notes, consolidation."""
    EMBED = "embed"
    """Make the vectors of passages that have none."""
    COOL = "cool"
    """Move texts that nobody has read for long to the cold place."""


class Ways(msgspec.Struct, kw_only=True, frozen=True):
    """How a worker does its work.

    Args:
        kinds: what it does.
        learn: the memory policies that learn, from every session; none for "plain", from the sessions whose gateway wants it.
        model: answers what they ask, as an object or a spec.
        secrets: see `UserMemory.learn`.
        turns: messages of the user after which they learn, once the assistant has answered.
        idle: seconds without a word after which they learn anyway.
        embedder: see `kilburn.open`.
        cold_after: seconds after which a text that nobody has read is cold; None for never.
        lease: seconds for which a claim holds.
    """

    kinds: tuple[JobKind, ...] = tuple(JobKind)
    learn: tuple[Any, ...] = ()
    model: Any = None
    secrets: Secrets = None
    turns: int = 1
    idle: float = 60.0
    embedder: Any = "auto"
    cold_after: float | None = None
    lease: float = LEASE


class Did(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """One thing that was done, or failed.

    Args:
        segment: the number of what it was about; 0 for the tenant as a whole.
        session: its name. It is forgotten with the session: what keeps it is not reached.
        count: facts, passages, texts or sessions.
        error: why it failed. tries: how often by now.
        receipt: of a session that was forgotten.
    """

    tenant: str
    kind: str
    segment: int = 0
    session: str = ""
    count: int = 0
    seconds: float = 0.0
    error: str = ""
    tries: int = 0
    receipt: Erasure | None = None


class StandingJob(msgspec.Struct, kw_only=True, frozen=True):
    """Is a job that a worker has claimed, or that failed, as the store has it.

    Args:
        state: "working", "pausing" (it failed, and is tried again) or "failed" (it is still tried again, now and then).
        seconds: until the claim ends, or until it is tried again, by the clock of the store; at least 0.
    """

    kind: str
    segment: int
    session: str
    state: str
    tries: int
    seconds: float
    error: str


def standing(store: Store) -> list[StandingJob]:
    """Return the jobs of a tenant that a worker has claimed, or that failed."""
    now, names = store.backend.now(), {info.number: info.name for info in store.backend.segments()}
    return [
        StandingJob(
            kind=job.kind,
            segment=job.segment,
            session=names.get(job.segment, ""),
            state=_state(entry, now),
            tries=entry.tries,
            seconds=max(0.0, round(entry.until - now, 1)),
            error=entry.error or KILLED * (bool(entry.holder) and now >= entry.until),
        )
        for job, entry in sorted(kept(store.backend).items())
        if job.kind != MEMORY
    ]


def _state(entry: JobState, now: float) -> str:
    if entry.tries >= FAILED:
        return "failed"
    return "working" if entry.holder and now < entry.until else "pausing"


MEMORY = "memory"
"""The kind of the claim under which a worker learns into a collection. Of two workers, one would ask its model in vain."""


class Worker:
    """Does background work for tenants of one store. Use it as a context manager, or close it.

    Args:
        place: a file, or the URL of a database.
        report: called with each job that was done.
        stopped: whether to stop the present job where that is possible, and to begin no other.

    Raises:
        SpecError, MissingExtra, Unavailable: a policy, model or embedder cannot be made. StoreError: the store cannot be opened.
    """

    def __init__(
        self,
        place: str,
        tenants: Sequence[str] = ("default",),
        ways: Ways | None = None,
        *,
        report: Callable[[Did], object] = lambda did: None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._told, self._stopped = report, stopped
        self.ways = ways or Ways()
        with ExitStack() as opened:
            self._offices = [opened.enter_context(_Office(self, place, tenant)) for tenant in tenants]
            self._opened = opened.pop_all()

    def is_over(self) -> bool:
        """Return whether the worker should stop its present job."""
        return self._stopped() or ending()

    def has_changed(self) -> bool:
        """Return whether something was written since the last call, or `LOOK` seconds are over, as jobs also become due by time.
        The store is asked once for each tenant."""
        changed = [office.has_changed() for office in self._offices]
        return any(changed)

    def once(self) -> int:
        """Look once for what is to be done, and do it; returns how much was done or tried."""
        count = 0
        for office in self._offices:
            for kind in self.ways.kinds:
                if self.is_over():
                    return count
                try:
                    count += office.work(kind)
                except KilburnError as error:
                    # Nobody knows of what: the store may be out of reach. It is looked at again.
                    self.tell(Did(tenant=office.tenant, kind=kind, error=named(error)))
        return count

    def tell(self, did: Did) -> None:
        """Say what was done."""
        self._told(did)

    def close(self) -> None:
        """Close the stores; idempotent."""
        self._opened.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _Office:
    """The work for one tenant."""

    def __init__(self, worker: Worker, place: str, tenant: str) -> None:
        self._worker, self._ways, self.tenant = worker, worker.ways, tenant
        with ExitStack() as opened:
            backend = open_backend(place, tenant=tenant)
            opened.callback(backend.close)
            self._backend = backend
            self._vectors = vectors_for(backend, self._ways.embedder) if self._needs_vectors else None
            self._store = Store(backend, Budget(WIDE), "fifo", vectors=self._vectors)
            opened.callback(self._store.close)
            # A session is only read: its own program's window, and how it counts, are not touched.
            reading = open_backend(place, tenant=tenant, readonly=True)
            self._reading = Store(reading, Budget(WIDE), "fifo")
            opened.callback(self._reading.close)
            self._policies = [(spec, resolve("memory", spec)) for spec in self._ways.learn or ("plain",)]
            self._answer = make_answerer(self._store, self._ways.model, worker.is_over)
            self._opened = opened.pop_all()
        # The last events of all segments, and when they were looked at in full.
        self._heads: list[tuple[int, int]] | None = None
        self._looked = 0.0
        # How far a session's ledger was when nothing was left to learn from it.
        self._learned: dict[int, int] = {}
        self._tended: dict[JobKind, float] = {}
        # Passages at which the embedder failed: why.
        self._left: dict[int, str] = {}
        # Whether the store has prepared what searches by vectors need.
        self._prepared = False

    def __enter__(self) -> _Office:
        return self

    def __exit__(self, *raised: object) -> None:
        self._opened.close()

    @property
    def _needs_vectors(self) -> bool:
        return JobKind.EMBED in self._ways.kinds or bool(self._ways.learn)

    def has_changed(self) -> bool:
        """See `Worker`. An error is ignored here, as the job itself will raise it."""
        now, heads = time.monotonic(), None
        with suppress(KilburnError):
            heads = [(info.number, info.head) for info in self._backend.segments()]
        if heads is not None and heads == self._heads and now - self._looked < LOOK:
            return False
        self._heads, self._looked = heads, now
        return True

    def work(self, kind: JobKind) -> int:
        """Do the jobs of a kind that are due; return how many jobs were done or tried."""
        return {
            JobKind.ERASE: self._erase,
            JobKind.EXPIRE: self._expire,
            JobKind.LEARN: self._learn,
            JobKind.EMBED: self._embed,
            JobKind.COOL: self._cool,
        }[kind]()

    def _do(self, job: JobName, work: Callable[[JobClaim], Did | None]) -> int:
        """Do a job if it can be claimed; return whether it was tried. `work` returns what it did, or None for nothing."""
        claim = take(self._backend, job, lease=self._ways.lease)
        if claim is None:
            return 0
        began, did, error = time.monotonic(), None, ""
        try:
            with renewing(claim):
                did = work(claim)
                error = "" if did is None else did.error
        except KilburnError as raised:
            error = named(raised)
        except Exception as raised:  # noqa: BLE001 - policies, models and embedders are anybody's; its words may quote what was said
            log.error("a job of kind %s failed: %s", job.kind, type(raised).__name__)
            error = named(raised)
        except BaseException:
            claim.give_back()
            raise
        if error:
            claim.failed(error)
            did = did or Did(tenant=self.tenant, kind=job.kind, segment=job.segment, error=error)
            did = msgspec.structs.replace(did, error=error, tries=claim.tries)
        elif self._worker.is_over() and did is None:
            claim.give_back()
        else:
            claim.done()
        if did is not None:
            self._worker.tell(msgspec.structs.replace(did, seconds=round(time.monotonic() - began, 3)))
        return 1 if did is not None else 0

    def _is_time(self, kind: JobKind) -> bool:
        last, now = self._tended.get(kind), time.monotonic()
        if last is not None and now - last < UPKEEP:
            return False
        self._tended[kind] = now
        return True

    def _did(self, kind: str, count: int, **more: Any) -> Did:
        return Did(tenant=self.tenant, kind=kind, count=count, **more)

    def _is_over(self, claim: JobClaim) -> bool:
        return claim.lost or self._worker.is_over()

    # The kinds

    def _erase(self) -> int:
        every = kept(self._backend)
        if every:
            numbers = {info.number for info in self._backend.segments() if info.kind is not SegmentKind.FORGOTTEN}
            settle(self._backend, {job for job in every if job.kind == MEMORY or (job.segment and job.segment not in numbers)})

        def work(claim: JobClaim) -> Did | None:
            with self._backend.erasing(strict=True):
                return None  # the end of the block finishes open erasures, or raises

        has_begun = JobName(JobKind.ERASE) in every
        return self._do(JobName(JobKind.ERASE), work) if self._is_time(JobKind.ERASE) or has_begun else 0

    def _expire(self) -> int:
        rule = read_rule(self._backend)
        due_sessions = due(self._backend, rule, rule_time(self._store)) if rule is not None else {}
        awake = self._awake(JobKind.EXPIRE, FORGET)
        resting = {job.segment for job in kept(self._backend) if job.kind == FORGET} - {job.segment for job in awake}
        # An archived session is due as long as it exists, and every page of it is read then.
        has_begun = bool(due_sessions.get(Ending.FORGET, set()) - resting or due_sessions.get(Ending.DATE))
        has_begun = has_begun or (bool(due_sessions.get(Ending.ARCHIVE)) and self._is_time(JobKind.EXPIRE))
        if rule is None or not has_begun:
            settle(self._backend, awake)
            return 0

        def tell(receipt: Erasure) -> None:
            self._worker.tell(self._did(FORGET, 1, receipt=receipt))

        def work(claim: JobClaim) -> Did | None:
            over = partial(self._is_over, claim)
            ended = expire(self._store, rule, told=tell, stopped=over, lease=self._ways.lease)
            if ended.moved.texts:
                self._worker.tell(self._did(JobKind.COOL, ended.moved.texts))
            return self._did(JobKind.EXPIRE, len(ended.forgotten)) if ended.forgotten else None

        return self._do(JobName(JobKind.EXPIRE), work)

    def _cool(self) -> int:
        seconds = self._ways.cold_after
        if seconds is None or not self._is_time(JobKind.COOL):
            return 0

        def work(claim: JobClaim) -> Did | None:
            result = cool(self._store, Coolness(after=seconds))
            return self._did(JobKind.COOL, result.texts) if result.texts else None

        return self._do(JobName(JobKind.COOL), work)

    def _embed(self) -> int:
        vectors = self._vectors
        if vectors is None:
            return 0
        # Where there are vectors, NumPy is installed.
        from kilburn.search.vectors import Nearby

        # A passage at which the embedder fails rests, and the others go on.
        awake = self._awake(JobKind.EMBED)
        resting = {job.segment for job in kept(self._backend) if job.kind == JobKind.EMBED} - {job.segment for job in awake}
        self._left = {entry: why for entry, why in self._left.items() if entry >> 32 in resting}
        nearby = self._backend.vectors if isinstance(self._backend.vectors, Nearby) else None
        untended = nearby is not None and not self._prepared
        if not vectors.behind(self._left) and not untended:
            settle(self._backend, awake)
            return 0

        def work(claim: JobClaim) -> Did | None:
            count, failures = 0, dict(self._left)
            for _ in range(BATCHES):
                if self._is_over(claim):
                    break
                embedded = vectors.catch_up(BATCH, batch=BATCH, skipped=failures)
                count += embedded
                if not embedded:
                    break
            self._leave({entry: why for entry, why in failures.items() if entry not in self._left}, awake)
            if nearby is not None and (count or untended):
                self._prepared = True
                nearby.tend()
            return self._did(JobKind.EMBED, count) if count else None

        return self._do(JobName(JobKind.EMBED), work)

    def _leave(self, failures: Mapping[int, str], awake: Sequence[JobName]) -> None:
        """Pause passages at which the embedder failed, and report each of their segments once; segments that were tried again
        without a failure are settled."""
        self._left |= failures
        why = {entry >> 32: error for entry, error in failures.items()}
        for segment, error in sorted(why.items()):
            self._do(JobName(JobKind.EMBED, segment), partial(self._failed, error=error))
        settle(self._backend, [job for job in awake if job.segment and job.segment not in why])

    def _failed(self, claim: JobClaim, error: str) -> Did:
        return self._did(claim.job.kind, 0, segment=claim.job.segment, error=error)

    def _awake(self, *kinds: str) -> list[JobName]:
        """Return the jobs of these kinds that have an entry and may be tried now."""
        entries = kept(self._backend)
        now = self._backend.now() if entries else 0.0
        return [job for job, entry in entries.items() if job.kind in kinds and now >= entry.until]

    def _learn(self) -> int:
        count, awake = 0, self._awake(JobKind.LEARN)
        resting = {job for job in kept(self._backend) if job.kind == JobKind.LEARN}.difference(awake)
        rule = read_rule(self._backend)
        # A fact that is learned from a session that expires would be forgotten with it.
        leaving = set[int]() if rule is None else due(self._backend, rule, self._backend.now())[Ending.FORGET]
        for info in self._reading.sessions():
            if self._worker.is_over():
                break
            job = JobName(JobKind.LEARN, info.number)
            is_current = self._learned.get(info.number) == info.head and job not in awake
            if is_current or job in resting or info.number in leaving or info.damaged or info.name.startswith("@"):
                continue
            try:
                count += self._learn_from(info, job, awake)
            except KilburnError as error:
                # The session could not even be read.
                count += self._do(job, partial(self._failed, error=named(error)))
            finally:
                self._reading.release(info.name)
        return count

    def _learn_from(self, info: SegmentInfo, job: JobName, awake: Sequence[JobName]) -> int:
        if not self._ways.learn and not self._is_wanted(info):
            self._learned[info.number] = info.head
            return 0
        session = self._reading.session(info.name)
        jobs = [self._learning(session, policy) for policy, _ in self._policies]
        unread = [job_of_policy.waiting()[0] for job_of_policy in jobs]
        if not any(unread):
            self._learned[info.number] = info.head
            settle(self._backend, [job] if job in awake else [])
            return 0
        quiet = self._store.clock() - info.used >= self._ways.idle
        if not quiet and (max(unread) < self._ways.turns or not _is_answered(session)):
            return 0
        # One worker at a time learns into a collection.
        with ExitStack() as claims:
            for number in sorted({job_of_policy.memory.number for job_of_policy in jobs}):
                claim = take(self._backend, JobName(MEMORY, number), lease=self._ways.lease, rests=False)
                if claim is None:
                    return 0
                claims.callback(claim.done)
                claims.enter_context(renewing(claim))
            return self._do(job, lambda claim: self._learn_now(claim, info, session))

    def _learn_now(self, claim: JobClaim, info: SegmentInfo, session: Session) -> Did | None:
        count, why, over = 0, "", partial(self._is_over, claim)
        for spec, _ in self._policies:
            if over():
                break
            try:
                learned = run(self._learning(session, spec, over).learn(), self._answered)
            except KilburnError as error:
                # The other policies may still learn.
                why = named(error)
                continue
            count += len(learned.stored) + len(learned.proposed) + len(learned.retired)
            if learned.failed:
                # The error may quote messages. It is in the ledger of the memory, and is forgotten with it.
                why = f"{learned.why.partition(':')[0]}: see `kilburn memories state`"
        if not why and not over():
            self._learned[info.number] = info.head
        elif not why and not count:
            return None
        return self._did(JobKind.LEARN, count, segment=info.number, session=info.name, error=why)

    def _answered(self, ask: Ask) -> Answer:
        return self._answer(ask)

    def _learning(self, session: Session, policy: Any, stopped: Callable[[], bool] = lambda: False) -> LearningJob:
        return LearningJob(self._store, session, policy, None, self._ways.secrets, stopped=stopped)

    def _is_wanted(self, info: SegmentInfo) -> bool:
        """Return whether a gateway wants policies to learn from this session."""
        return any("learns" in event.data for event in self._backend.events(info.number, act=Act.NOTE))


def _is_answered(session: Session) -> bool:
    """Return whether the last message is the assistant's."""
    with session.lock:
        pages = session.window.pages.originals()
        last = pages[-1] if pages else None
    return last is not None and last.role is Role.ASSISTANT and last.kind is Kind.TEXT

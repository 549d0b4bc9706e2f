"""Who does which work in the background now, and what failed: kept in the store, so that any worker goes on.

What is to be done is derived from the store, and the write of each work checks by itself that it comes once. So a claim only
saves work. It is a setting of the tenant, which is replaced if it is what its writer knows, and it ends at a time by the clock of
the store: whoever is killed has it no longer than that. It holds numbers and the names of errors, no words of anybody's.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from kilburn.backend import Backend
from kilburn.errors import KilburnError, ModelError, SpecError, StoreReadOnly

log = logging.getLogger("kilburn")

PREFIX = "job "
"""How the settings begin that are claims."""

LEASE = 60.0
"""Seconds for which a claim holds; whoever works renews it three times in that."""

FAILED = 6
"""Times that a job was tried in vain, from which on it stands among those that failed: some three quarters of an hour after the
first."""

KILLED = "its worker was killed"
"""Why a job failed whose worker has not been heard of since."""

PAUSE, MAX_PAUSE = 10.0, 86_400.0
"""Seconds until a job is tried again; four times as long each time, up to the second."""


class JobState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a job that a worker holds, or that failed.

    Args:
        tries: how often it was begun since it last ended.
        until: when the claim of `holder` ends, by the clock of the store; without a holder, when the job is tried again.
        holder: a random name for each try; "" for nobody.
        error: why the last try failed: the name of an error, and what to do.
    """

    tries: int
    until: float
    holder: str = ""
    error: str = ""


class JobName(msgspec.Struct, frozen=True, order=True):
    """A work in the background: its kind, and the number of the segment that it is about; 0 for the tenant as a whole."""

    kind: str
    segment: int = 0

    @property
    def name(self) -> str:
        """The name of its setting."""
        return f"{PREFIX}{self.kind} {self.segment}"


class JobClaim:
    """A job that is this worker's for a while.

    Args:
        previous: its state before this claim.
    """

    def __init__(self, backend: Backend, job: JobName, mine: JobState, previous: JobState | None, lease: float) -> None:
        self.job = job
        self._backend, self._mine, self._before, self._lease = backend, mine, previous, lease
        self.lost = False
        """Whether another may have it by now."""

    @property
    def tries(self) -> int:
        """How often it was begun in a row, this time included."""
        return self._mine.tries

    def _replace(self, new: JobState | None) -> bool:
        fits = self._backend.settings.replace(self.job.name, _encoded(self._mine), None if new is None else _encoded(new))
        self.lost = self.lost or not fits
        return fits

    def renew(self) -> bool:
        """Extend the claim by its lease, and return whether no other worker has taken the job."""
        new = msgspec.structs.replace(self._mine, until=self._backend.now() + self._lease)
        fits = self._replace(new)
        if fits:
            self._mine = new
        return fits

    def done(self) -> None:
        """Remove the state of the job, which has ended."""
        self._replace(None)

    def give_back(self) -> None:
        """Release the job without a failure, so that the next worker may take it at once."""
        previous = self._before
        self._replace(None if previous is None else msgspec.structs.replace(previous, holder="", until=0.0))

    def failed(self, error: str) -> None:
        """Record a failure; the job is retried after a pause."""
        mine, now = self._mine, self._backend.now()
        self._replace(JobState(mine.tries, now + pause_after(mine.tries), error=error))


def pause_after(tries: int) -> float:
    """Return the seconds until a job that was begun `tries` times is tried again."""
    return min(PAUSE * 4.0 ** (min(tries, 20) - 1), MAX_PAUSE)


def named(error: BaseException) -> str:
    """Return the name of an error, with its advice if the error is about a model, an option or a permission. The message is
    omitted, because it may quote a conversation."""
    advice = error.advice if isinstance(error, ModelError | SpecError | StoreReadOnly) else ""
    return f"{type(error).__name__}: {advice}" if advice else type(error).__name__


def _encoded(entry: JobState) -> str:
    return msgspec.json.encode(entry).decode()


def kept(backend: Backend) -> dict[JobName, JobState]:
    """Return the state of each job of a tenant that a worker holds, or that failed."""
    entries = {}
    for name, value in backend.settings.all().items():
        job = _job(name)
        if job is not None:
            entries[job] = _entry(value)
    return entries


def _job(name: str) -> JobName | None:
    kind, _, segment = name.removeprefix(PREFIX).partition(" ")
    return JobName(kind, int(segment)) if name.startswith(PREFIX) and segment.isdecimal() else None


def _entry(value: str) -> JobState:
    try:
        return msgspec.json.decode(value, type=JobState)
    except msgspec.MsgspecError:
        # Whoever wrote that: it is tried, and then replaced.
        return JobState(0, 0.0)


def take(backend: Backend, job: JobName, *, lease: float = LEASE, rests: bool = True) -> JobClaim | None:
    """Claim a job for a while. Returns None if another worker has it, or if it pauses after a failure.

    Args:
        rests: whether it rests that has killed its workers; not so what is only held while jobs are done that rest themselves.

    Raises:
        StoreBusy, StoreFull, StoreReadOnly.
    """
    value = backend.settings.all().get(job.name)
    previous, now = None if value is None else _entry(value), backend.now()
    if previous is not None and now < previous.until:
        return None
    error = "" if previous is None else KILLED if previous.holder else previous.error
    tries = previous.tries if previous is not None and rests else 0
    mine = JobState(tries + 1, now + lease, secrets.token_hex(8), error)
    if previous is not None and previous.holder and mine.tries > 2:
        # It may be what kills them.
        pause = previous.until + pause_after(previous.tries - 1)
        if now < pause:
            backend.settings.replace(job.name, value, _encoded(JobState(previous.tries, pause, error=error)))
            return None
    return JobClaim(backend, job, mine, previous, lease) if backend.settings.replace(job.name, value, _encoded(mine)) else None


@contextmanager
def renewing(claim: JobClaim) -> Iterator[JobClaim]:
    """Have a claim for as long as this takes. Where it cannot be renewed in time, it is lost, and nothing else happens."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(claim._lease / 3):
            try:
                if not claim.renew():
                    return
            except KilburnError as error:
                log.warning("a claim could not be renewed: %s", type(error).__name__)

    thread = threading.Thread(target=renew, name="kilburn-claim", daemon=True)
    thread.start()
    try:
        yield claim
    finally:
        over.set()
        thread.join()


def settle(backend: Backend, jobs: Collection[JobName]) -> None:
    """Remove the states of jobs that are no longer to be done, except those that a worker holds.

    Raises:
        StoreBusy, StoreFull, StoreReadOnly.
    """
    now = backend.now() if jobs else 0.0
    for name, value in backend.settings.all().items() if jobs else ():
        entry = _entry(value)
        if _job(name) in jobs and not (entry.holder and now < entry.until):
            backend.settings.replace(name, value, None)


def try_again(backend: Backend) -> int:
    """Make failed jobs due at once and return their number. Jobs that a worker holds stay as they are.

    Raises:
        StoreBusy, StoreFull, StoreReadOnly.
    """
    count = 0
    for name, value in backend.settings.all().items():
        entry = _entry(value)
        if _job(name) is not None and not entry.holder:
            # That it was begun is still known.
            retried = msgspec.structs.replace(entry, tries=min(entry.tries, 1), until=0.0)
            count += backend.settings.replace(name, value, _encoded(retried))
    return count

"""Threads for what may wait for a lock or for the disk, so that the event loop does not.

They do what anyio's do, and take less of the processor: a request changes threads twice, which is a good part of its cost.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

from kilburn.tracing import carried

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

MAX_THREADS = 40
"""Threads of one event loop."""


async def in_thread(work: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
    """Run `work` in a thread, and return its result or raise its error.

    What has begun goes on to its end: a task that is cancelled gets the result first, and ends at the next thing that it waits
    for. So nothing that the work took is lost.
    """
    loop = asyncio.get_running_loop()
    threads = _threads.get(loop)
    if threads is None:
        threads = _threads[loop] = _Threads()
        weakref.finalize(loop, threads.end)
    future = _Whole(loop=loop)
    threads.take(_Job(carried(work), arguments, loop, future))
    try:
        result: Result = await future
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not future.done():
            raise
        task.uncancel()
        task.cancel()
        result = future.result()
    return result


class _Whole(asyncio.Future[Any]):
    """A future that completes even if no task waits for it any more."""

    def cancel(self, msg: Any = None) -> bool:
        return False


class _Job(NamedTuple):
    work: Callable[..., Any]
    arguments: tuple[Any, ...]
    loop: asyncio.AbstractEventLoop
    future: _Whole


class _Threads:
    """The threads of one event loop, which alone uses this object. The last used thread is used first, because its data is still
    in the processor's cache."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._waiting: deque[_Job] = deque()
        self._count = 0

    def take(self, job: _Job) -> None:
        """Run a job."""
        if self._idle:
            self._idle.pop().put(job)
        elif self._count < MAX_THREADS:
            self._count += 1
            jobs: SimpleQueue[_Job | None] = SimpleQueue()
            jobs.put(job)
            threading.Thread(target=_work, args=(jobs, weakref.ref(self)), name="kilburn-gateway", daemon=True).start()
        else:
            self._waiting.append(job)

    def done(self, jobs: SimpleQueue[_Job | None], future: _Whole, result: Any, error: BaseException | None) -> None:
        """Note that a thread has finished its job."""
        if self._waiting:
            jobs.put(self._waiting.popleft())
        else:
            self._idle.append(jobs)
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def end(self) -> None:
        """End the idle threads."""
        while self._idle:
            self._idle.pop().put(None)


def _work(jobs: SimpleQueue[_Job | None], of: weakref.ref[_Threads]) -> None:
    while (job := jobs.get()) is not None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = job.work(*job.arguments)
        except BaseException as raised:  # noqa: BLE001 -- whoever waits for it gets it
            # No future takes a StopIteration.
            error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
        threads = of()
        try:
            if threads is not None:
                job.loop.call_soon_threadsafe(threads.done, jobs, job.future, result, error)
        except RuntimeError:
            threads = None
        if threads is None:  # the event loop is closed
            return
        # Nothing of it is held while the thread waits.
        del threads, job, result, error


_threads: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Threads] = weakref.WeakKeyDictionary()

"""Scheduling in simulated time: what each discipline makes jobs wait.

The queue is the one that the scheduler uses. Only the model is simulated: it makes so many tokens a second for each of
its places, can be interrupted at a token, and takes no time to change from one job to the next.

    jobs = simulate([Course("hog", steps=(4000,)), Course("short", at=1.0, steps=(20,))], "round_robin(slice=64)")
    print(waits(jobs, "short"))
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import heappop, heappush
from typing import Any

import msgspec

from kilburn.errors import ModelError, SpecError
from kilburn.models.queue import Job, Queue, Share, Stage

__all__ = ["Course", "simulate", "waits"]


class Course(msgspec.Struct, frozen=True):
    """What one agent asks of the model.

    Args:
        agent: its name.
        at: when its first step comes, in seconds.
        steps: tokens of each of its steps.
        pause: seconds from a reply to the next step, such as its tools take; None if all steps come at once.
    """

    agent: str
    steps: tuple[int, ...]
    at: float = 0.0
    pause: float | None = 0.0
    tenant: str = "default"
    priority: float = 0


def simulate(
    courses: Iterable[Course],
    discipline: Any = "fifo",
    *,
    at_once: int = 1,
    rate: float = 100.0,
    kv: int | None = None,
    shares: Mapping[str, Share] | None = None,
    until: float = float("inf"),
) -> list[Job]:
    """Serve all steps; returns their jobs in the order in which they ended, those that were refused included.

    Args:
        discipline, at_once, kv, shares: see `Queue`.
        rate: tokens a second of one place.
        until: seconds after which no slice begins.

    Raises:
        SpecError: a rate that makes no token, or what `Queue` refuses.
    """
    if not 0 < rate < float("inf"):
        raise SpecError(f"a model of {rate} tokens a second", advice="give a rate over 0")
    queue = Queue(discipline, at_once=at_once, kv=kv, shares=shares)
    known = list(courses)
    ended: list[Job] = []
    # What happens when: a course's step comes, or a job has made tokens.
    agenda: list[tuple[float, int, Course, int, Job | None, int]] = []
    lengths: dict[int, tuple[Course, int, int]] = {}  # by the job's identity: whose step it is, and the tokens that are left
    happened = 0

    def plan(time: float, course: Course, step: int, job: Job | None = None, tokens: int = 0) -> None:
        nonlocal happened
        happened += 1
        heappush(agenda, (time, happened, course, step, job, tokens))

    for course in known:
        for step in range(len(course.steps) if course.pause is None else min(1, len(course.steps))):
            plan(course.at, course, step)
    while agenda:
        now = agenda[0][0]
        while agenda and agenda[0][0] == now:
            _, _, course, step, job, tokens = heappop(agenda)
            if job is None:
                job = Job(agent=course.agent, tenant=course.tenant, priority=course.priority, size=course.steps[step])
                lengths[id(job)] = (course, step, course.steps[step])
                try:
                    queue.submit(job, now)
                except ModelError as error:
                    job.error, job.stage = error, Stage.FAILED
                    ended.append(job)
                continue
            left = lengths[id(job)][2] - tokens
            lengths[id(job)] = (course, step, left)
            if left:
                queue.give_way(job, tokens, now)
                continue
            ended += [job, *queue.end(job, tokens, now)]
            if course.pause is not None and step + 1 < len(course.steps):
                plan(now + course.pause, course, step + 1)
        while now < until and (started := queue.start(now)) is not None:
            course, step, left = lengths[id(started)]
            tokens = min(left, queue.discipline.slice or left)
            plan(now + tokens / rate, course, step, started, tokens)
    return ended


def waits(jobs: Iterable[Job], agents: str | Collection[str] | None = None) -> list[float]:
    """Seconds that finished jobs waited, in rising order; of some agents, or of all."""
    names = {agents} if isinstance(agents, str) else agents
    return sorted(job.waited for job in jobs if job.stage is Stage.DONE and (names is None or job.agent in names))

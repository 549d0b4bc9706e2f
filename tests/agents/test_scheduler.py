"""Many agents over one model: the order that each discipline promises, and nothing lost whatever ends a job."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from heapq import heapify, heappop, heappush
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.errors import Cancelled, DeadlinePassed, SpecError, TokensSpent, Unavailable
from kilburn.event import Act
from kilburn.model import Delta, Reply, Request, complete
from kilburn.models.disciplines.fair_share import FairShare
from kilburn.models.disciplines.priority import Priority
from kilburn.models.disciplines.round_robin import RoundRobin
from kilburn.models.queue import Job, Line, Queue, Share, Stage
from kilburn.models.scheduler import ScheduledModel, Scheduler
from kilburn.testing import FakeClock, Scripted, check_model
from waiting import until

SPECS = ["fifo", "round_robin", "round_robin(slice=8)", "round_robin(steps=3)", "priority", "priority(slice=4)", "fair_share"]
ASK = Request(messages=[{"role": "user", "content": "Go on."}], max_tokens=8)


def order_of(queue: Queue, jobs: list[Job]) -> list[str]:
    """The agents in the order in which they are served, one job after the other."""
    for job in jobs:
        queue.submit(job, 0.0)
    served = []
    while (job := queue.start(0.0)) is not None:
        served.append(job.agent)
        queue.end(job, 1, 0.0)
    return served


# The disciplines, in simulated time.


def serve(
    jobs: Iterable[Job], discipline: Any = "fifo", *, rate: float = 100.0, until: float = math.inf, **options: Any
) -> list[Job]:
    """Serve jobs, each of which comes at its time `came`, and return them in the order in which they end.

    Args:
        rate: tokens a second of each place.
        until: seconds after which no slice begins.
        options: see `Queue`.
    """
    queue = Queue(discipline, **options)
    ended: list[Job] = []
    numbers = itertools.count()
    # What happens when: a job comes (no tokens), or has made tokens.
    agenda = [(job.came, next(numbers), job, 0) for job in jobs]
    heapify(agenda)
    while agenda:
        now = agenda[0][0]
        while agenda and agenda[0][0] == now:
            _, _, job, tokens = heappop(agenda)
            if not tokens:
                try:
                    queue.submit(job, now)
                except TokensSpent as error:
                    job.error, job.stage = error, Stage.FAILED
                    ended.append(job)
            elif job.tokens + tokens < job.size:
                queue.give_way(job, tokens, now)
            else:
                ended += [job, *queue.end(job, tokens, now)]
        while now < until and (started := queue.start(now)) is not None:
            tokens = min(started.size - started.tokens, queue.discipline.slice or started.size)
            heappush(agenda, (now + tokens / rate, next(numbers), started, tokens))
    return ended


def jobs_of(agent: str, *sizes: int, **fields: Any) -> list[Job]:
    return [Job(agent=agent, size=size, **fields) for size in sizes]


def waits(jobs: Iterable[Job], agent: str) -> list[float]:
    """Return the seconds that jobs of agents with this name, or a name that begins with it, waited; in rising order."""
    return sorted(job.waited for job in jobs if job.stage is Stage.DONE and job.agent.startswith(agent))


def test_round_robin_lowers_what_short_jobs_wait_behind_a_hog() -> None:
    fifo, robin = (
        serve(jobs_of("hog", 4000) + [Job(agent=f"short{n}", size=20, came=0.5 + n / 10) for n in range(50)], discipline)
        for discipline in ("fifo", "round_robin(slice=20)")
    )
    assert waits(robin, "short")[47] < waits(fifo, "short")[47] / 4
    assert sum(job.tokens for job in robin) == sum(job.tokens for job in fifo) == 5000
    assert max(job.turnaround for job in robin) == pytest.approx(50.0)  # all the work takes as long in any order


def test_an_agent_with_many_jobs_does_not_hold_up_the_others() -> None:
    fifo, robin = (
        serve(jobs_of("hog", *[20] * 100) + jobs_of("other", *[20] * 5, came=0.1), discipline)
        for discipline in ("fifo", "round_robin")
    )
    assert min(waits(fifo, "other")) > 19
    assert max(waits(robin, "other")) <= 2


def test_round_robin_serves_agents_in_turn_and_a_new_one_last() -> None:
    jobs = [Job(agent=name) for name in "aaabbc"]
    assert order_of(Queue("round_robin"), jobs) == ["a", "b", "c", "a", "b", "a"]
    assert order_of(Queue("round_robin(steps=2)"), [Job(agent=name) for name in "aaabbc"]) == ["a", "a", "b", "b", "c", "a"]


def test_a_high_priority_is_first_and_a_low_one_is_not_starved() -> None:
    strict, aging = (
        serve([Job(agent="high", size=100, came=float(n), priority=5) for n in range(200)] + jobs_of("low", 100), discipline)
        for discipline in ("priority(aging=0)", "priority(aging=0.1)")
    )
    assert waits(strict, "low") == [pytest.approx(200.0)]
    assert waits(aging, "low")[0] <= 52  # 5 levels at a tenth a second, and the job that runs


def test_a_high_priority_interrupts_at_the_slice() -> None:
    whole, sliced = (
        serve(jobs_of("low", 1000) + jobs_of("high", 10, came=1.0, priority=1), discipline)
        for discipline in ("priority", "priority(slice=10)")
    )
    assert waits(whole, "high") == [pytest.approx(9.0)]
    assert waits(sliced, "high")[0] <= 0.1


@pytest.mark.parametrize(("slice", "at_once"), [(None, 3), (16, 1)])
def test_tenants_get_tokens_by_their_weights_however_many_agents_they_have(slice: int | None, at_once: int) -> None:
    jobs = [
        *(job for number in range(30) for job in jobs_of(f"a{number}", *[100] * 50, tenant="a")),
        *(job for number in range(2) for job in jobs_of(f"b{number}", *[40] * 200, tenant="b")),
    ]
    serve(jobs, FairShare(slice), at_once=at_once, shares={"b": Share(weight=3.0)}, until=100 / at_once)
    took = {tenant: sum(job.tokens for job in jobs if job.tenant == tenant) for tenant in "ab"}
    assert 2.7 < took["b"] / took["a"] < 3.3


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    busy, late = jobs_of("busy", *[10] * 400, tenant="busy"), jobs_of("late", *[10] * 100, came=20.0, tenant="late")
    both = [job.tenant for job in serve(busy + late, "fair_share")[210:390]]
    assert 80 <= both.count("late") <= 100


JOBS = st.lists(
    st.builds(
        Job,
        agent=st.sampled_from("abcd"),
        tenant=st.sampled_from("xy"),
        priority=st.integers(0, 3),
        size=st.integers(1, 30),
        came=st.floats(0, 5),
    ),
    max_size=30,
)


@given(JOBS, st.sampled_from(SPECS), st.integers(1, 3), st.none() | st.integers(30, 60))
def test_every_job_is_served_once_and_in_full(jobs: list[Job], spec: str, at_once: int, kv: int | None) -> None:
    ended = serve(jobs, spec, at_once=at_once, kv=kv)
    assert sorted(map(id, ended)) == sorted(map(id, jobs))
    assert all(job.stage is Stage.DONE and job.tokens == job.size for job in jobs)
    assert all(job.waited >= -1e-9 and job.ran == pytest.approx(job.tokens / 100) for job in jobs)


@given(JOBS, st.sampled_from(SPECS), st.integers(0, 100), st.integers(1, 3))
def test_no_tenant_takes_more_tokens_than_it_may(jobs: list[Job], spec: str, most: int, at_once: int) -> None:
    serve(jobs, spec, shares={"x": Share(tokens=most)}, at_once=at_once)
    assert sum(job.tokens for job in jobs if job.tenant == "x") <= most
    assert all(isinstance(job.error, TokensSpent) for job in jobs if job.stage is Stage.FAILED)
    assert {job.stage for job in jobs if job.tenant == "y"} <= {Stage.DONE}


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=20), st.dictionaries(st.sampled_from("abc"), st.integers(1, 30)))
def test_round_robin_is_the_longest_unserved(agents: list[str], last: dict[str, int]) -> None:
    waiting = [Job(agent=agent, place=place) for place, agent in enumerate(agents, 5)]
    line = Line(waiting, last, "", 1, {})
    expected = min(waiting, key=lambda job: (max(job.place, last.get(job.agent, 0)), job.place))
    assert RoundRobin().choose(line) is expected


def test_who_does_not_fit_yet_is_not_overtaken() -> None:
    queue = Queue("fifo", at_once=3, kv=100)
    jobs = [Job(agent="a", size=60), Job(agent="b", size=60), Job(agent="c", size=10)]
    for job in jobs:
        queue.submit(job, 0.0)
    assert queue.start(0.0) is jobs[0]
    assert queue.start(0.0) is None
    queue.end(jobs[0], 60, 1.0)
    assert [queue.start(1.0), queue.start(1.0)] == jobs[1:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Queue(at_once=0),
        lambda: Queue(kv=0),
        lambda: Queue("round_robin(slice=0)"),
        lambda: Queue("round_robin(steps=0)"),
        lambda: Queue("priority(aging=-1)"),
        lambda: Queue("fair_share(slice=0)"),
        lambda: Queue("lottery"),
        lambda: Queue(shares={"a": Share(weight=0)}),
        lambda: Queue(shares={"a": Share(tokens=-1)}),
    ],
)
def test_what_serves_nobody_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(SpecError):
        make()


class Liar:
    """Fails, or chooses a job of its own, or one that runs."""

    slice = 2

    def __init__(self) -> None:
        self.seen: list[Job] = []

    def choose(self, line: Line) -> Job:
        self.seen.append(line.waiting[0])
        if len(self.seen) % 3 == 0:
            raise ZeroDivisionError
        return Job(agent="nobody") if len(self.seen) % 3 == 1 else self.seen[0]


def test_a_discipline_that_fails_holds_nobody_up() -> None:
    jobs = serve([job for name in "abc" for job in jobs_of(name, 7, 3)], Liar(), at_once=2)
    assert [job.tokens for job in jobs if job.stage is Stage.DONE].count(7) == 3
    assert len(jobs) == 6
    queue = Queue(Liar())
    queue.submit(Job(agent="a"), 0.0)
    queue.start(0.0)
    assert (queue.decisions, queue.faults) == (1, 1)


# The scheduler, with threads.


class Slow:
    """A model that says one word at a time, each when it is allowed to; `said` is the order over all calls."""

    name, form, context, tokenizer, interruptible = "slow", "chat", None, "chars/4", True

    def __init__(self, words: int = 6, gate: threading.Semaphore | None = None) -> None:
        self.words, self.gate = words, gate
        self.said: list[str] = []
        self.open = 0

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        who = str(request.messages[-1]["content"])
        self.open += 1
        try:
            for _ in range(self.words):
                if self.gate is not None:
                    assert self.gate.acquire(timeout=600)
                self.said.append(who)
                yield Delta(f"{who} ")
            yield complete(Scripted([f"{who} " * self.words]), request)
        finally:
            self.open -= 1


def ask(who: str) -> Request:
    return Request(messages=[{"role": "user", "content": who}], max_tokens=8)


def test_a_scheduled_model_is_a_model() -> None:
    check_model(lambda: Scheduler(Scripted(["Red."] * 20, piece=1), "round_robin(slice=1)").model("a"))


@pytest.mark.parametrize("spec", SPECS)
def test_200_agents_on_one_model_get_their_own_replies(spec: str) -> None:
    model = Slow(words=3)
    scheduler = Scheduler(model, spec, at_once=2)
    with ThreadPoolExecutor(64) as pool:
        names = [f"agent{number}" for number in range(200)]
        replies = list(pool.map(lambda name: complete(scheduler.model(name), ask(name)).text, names))
    assert replies == [f"{name} " * 3 for name in names]
    assert scheduler.jobs() == []
    assert model.open == 0


def test_a_model_that_can_be_interrupted_gives_way_at_a_slice() -> None:
    gate = threading.Semaphore(0)
    model = Slow(6, gate)
    scheduler = Scheduler(model, "round_robin(slice=2)")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, scheduler.model("a"), ask("a"))
        until(lambda: model.open == 1)
        second = pool.submit(complete, scheduler.model("b"), ask("b"))
        until(lambda: len(scheduler.jobs()) == 2)
        gate.release(12)
        assert (first.result().text, second.result().text) == ("a " * 6, "b " * 6)
    assert "".join(model.said) == "aabbaabbaabb"
    assert scheduler.served("a").slices == 4  # the last one is for the end of the reply


def test_a_model_that_cannot_be_interrupted_is_not() -> None:
    scheduler = Scheduler(Scripted(["one two", "three"], piece=1), "round_robin(slice=1)")
    assert complete(scheduler.model("a"), ASK).text == "one two"
    assert (scheduler.slice, scheduler.served("a").slices) == (None, 1)


def test_the_times_of_each_job_are_known() -> None:
    clock = FakeClock(time=0.0, tick=0.0)
    gate = threading.Semaphore(0)
    model = Slow(1, gate)
    scheduler = Scheduler(model, clock=clock)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(complete, scheduler.model("a"), ask("a"))
        until(lambda: model.open == 1)
        clock.advance(1)
        second = pool.submit(complete, scheduler.model("b"), ask("b"))
        until(lambda: len(scheduler.jobs()) == 2)
        clock.advance(2)
        assert [(job.agent, job.stage, job.waited, job.ran) for job in scheduler.jobs()] == [
            ("a", Stage.RUNNING, 0, 3),
            ("b", Stage.WAITING, 2, 0),
        ]
        gate.release()
        first.result()
        until(lambda: [job.stage for job in scheduler.jobs()] == [Stage.RUNNING])
        clock.advance(4)
        gate.release()
        second.result()
    served = scheduler.served("b")
    assert (served.jobs, served.waited, served.ran) == (1, 2, 4)


def test_a_cancelled_job_leaves_nothing_behind() -> None:
    gate = threading.Semaphore(0)
    model = Slow(4, gate)
    with Scheduler(model) as scheduler, kilburn.open(":memory:", window=2000, tokenizer="chars/4") as store:
        agents = {name: Agent(scheduler.model(name), [], store.session(name), memory=False) for name in "abc"}
        with ThreadPoolExecutor(3) as pool:
            runs = {}
            for number, name in enumerate("abc"):
                runs[name] = pool.submit(agents[name].run, name)
                until(lambda number=number: len(scheduler.jobs()) == number + 1)
            assert (scheduler.cancel("b"), scheduler.cancel("nobody")) == (1, 0)
            with pytest.raises(Cancelled):  # it waited
                runs["b"].result(timeout=600)
            gate.release()
            until(lambda: model.said == ["a"])
            assert scheduler.cancel("a") == 1
            gate.release(8)
            with pytest.raises(Cancelled):  # it ran
                runs["a"].result(timeout=600)
            assert runs["c"].result(timeout=600).text == "c " * 4
        assert scheduler.jobs() == []
        assert model.open == 0
        for name in "ab":
            assert [message["role"] for message in store.session(name).contents.messages()] == ["user"]
            assert agents[name].session.prompts.use <= agents[name].session.prompts.capacity
        gate.release(4)
        assert agents["b"].run().text == "b " * 4  # it can go on where it stands


async def test_a_cancelled_task_does_not_wait_for_its_turn() -> None:
    gate = threading.Semaphore(0)
    model = Slow(1, gate)
    scheduler = Scheduler(model)
    with ThreadPoolExecutor(1) as pool, kilburn.open(":memory:", window=2000, tokenizer="chars/4") as store:
        first = pool.submit(complete, scheduler.model("a"), ask("a"))
        until(lambda: model.open == 1)
        agent = Agent(scheduler.model("b"), [], store.session("b"), memory=False)
        run = asyncio.create_task(agent.arun("b"))
        while len(scheduler.jobs()) < 2:
            await asyncio.sleep(0.001)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert [job.agent for job in scheduler.jobs()] == ["a"]
        gate.release(2)
        first.result()
        assert agent.run().text == "b "


def test_a_caller_that_stops_reading_makes_room() -> None:
    scheduler = Scheduler(Slow(4))
    pieces = scheduler.model("a").stream(ask("a"))
    assert isinstance(next(pieces), Delta)
    pieces.close()  # type: ignore[attr-defined]
    assert scheduler.jobs() == []
    assert complete(scheduler.model("b"), ask("b")).text == "b " * 4


def test_an_error_of_the_model_makes_room() -> None:
    scheduler = Scheduler(Scripted([Unavailable("down"), "up"]))
    with pytest.raises(Unavailable):
        complete(scheduler.model("a"), ASK)
    assert scheduler.queue.spent == {"default": 0}  # it said nothing
    assert complete(scheduler.model("a"), ASK).text == "up"


def test_a_deadline_counts_the_wait() -> None:
    gate = threading.Semaphore(0)
    model = Slow(1, gate)
    scheduler = Scheduler(model)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(complete, scheduler.model("a"), ask("a"))
        until(lambda: model.open == 1)
        for late in (scheduler.model("b", deadline=0.02), scheduler.model("b", deadline=0)):
            with pytest.raises(DeadlinePassed):
                complete(late, ask("b"))
        with pytest.raises(DeadlinePassed):
            complete(scheduler.model("b"), Request(messages=[{"role": "user", "content": "b"}], timeout=0.02))
        assert [job.agent for job in scheduler.jobs()] == ["a"]
        gate.release()
        first.result()
    assert model.said == ["a"]


def test_a_tenant_without_tokens_is_refused_and_others_are_served() -> None:
    # The question takes some 11 tokens here, and the reply 8 at most; what it took is some 15.
    model = Scripted(["one two three"] * 9)
    scheduler = Scheduler(model, shares={"poor": Share(tokens=0), "some": Share(tokens=25)})
    with pytest.raises(TokensSpent):
        complete(scheduler.model("a", tenant="poor"), ASK)
    some = scheduler.model("b", tenant="some")
    complete(some, ASK)
    with pytest.raises(TokensSpent):
        complete(some, ASK)
    assert 0 < scheduler.queue.spent["some"] <= 25
    assert complete(scheduler.model("c", tenant="rich"), ASK).text == "one two three"
    assert len(model.requests) == 2


def test_an_agent_whose_prompt_exceeds_the_kv_budget_makes_its_window_smaller() -> None:
    with kilburn.open(":memory:", window=4000, tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(40):
            session.append({"role": "user" if number % 2 == 0 else "assistant", "content": f"{number} " + "words " * 60})
        before = session.render("chat").tokens
        model = Scripted(["Done."])
        agent = Agent(Scheduler(model, kv=before).model("a"), [], session, memory=False, limits=Limits(reply=200))
        assert agent.run("Go on.").text == "Done."
        assert session.render("chat").tokens < before - 200


def test_a_job_that_is_cancelled_before_it_gives_way_ends_at_once() -> None:
    scheduler = Scheduler(Slow(6), "round_robin(slice=1)")
    pieces = scheduler.model("a").stream(ask("a"))
    next(pieces)
    assert scheduler.cancel("a") == 1
    with pytest.raises(Cancelled):
        next(pieces)
    assert scheduler.jobs() == []


@pytest.mark.parametrize("spec", SPECS)
def test_whatever_ends_jobs_nobody_waits_for_ever(spec: str) -> None:
    model = Slow(4)
    scheduler = Scheduler(model, spec, at_once=2, kv=60, shares={"t1": Share(tokens=400)})
    over = threading.Event()

    def work(number: int) -> int:
        chance, whole = random.Random(number), 0
        for _ in range(10):
            limit = chance.choice([None, None, 0.001, 0.01])
            speaker = scheduler.model(f"a{number}", tenant=f"t{number % 3}", deadline=limit, priority=chance.randrange(3))
            try:
                pieces = speaker.stream(ask(f"a{number}"))
                if chance.random() < 0.2:
                    next(pieces)
                    pieces.close()  # type: ignore[attr-defined]
                else:
                    (reply,) = [piece for piece in pieces if isinstance(piece, Reply)]
                    assert reply.text == f"a{number} " * 4
                    whole += 1
            except (Cancelled, DeadlinePassed, TokensSpent):
                pass
        return whole

    def disturb() -> None:
        chance = random.Random(0)
        while not over.wait(0.001):
            scheduler.cancel(f"a{chance.randrange(12)}")

    with ThreadPoolExecutor(13) as pool:
        disturbing = pool.submit(disturb)
        assert sum(pool.map(work, range(12))) > 0
        over.set()
        disturbing.result()
    assert scheduler.jobs() == []
    assert model.open == 0
    assert scheduler.queue.spent.get("t1", 0) <= 400


def test_a_closed_scheduler_refuses_and_lets_nobody_wait() -> None:
    gate = threading.Semaphore(0)
    model = Slow(1, gate)
    scheduler = Scheduler(model)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(complete, scheduler.model(name), ask(name)) for name in "ab"]
        until(lambda: len(scheduler.jobs()) == 2)
        scheduler.close()
        gate.release(2)
        for job in jobs:
            with pytest.raises(Cancelled):
                job.result(timeout=600)
    with pytest.raises(Cancelled):
        complete(scheduler.model("c"), ASK)


def test_the_ledger_has_each_job() -> None:
    with kilburn.open(":memory:", window=2000, tokenizer="chars/4") as store:
        session = store.session("pilot")
        scheduler = Scheduler(Scripted(["Aye."]), Priority())
        model: ScheduledModel = scheduler.model("pilot", tenant="harbour", session=session)
        Agent(model, [], session, memory=False).run("Can we enter?")
        notes = [event.data["job"] for event in session.ledger.events() if event.act is Act.NOTE and "job" in event.data]
    assert [(note["stage"], note["tenant"], note["discipline"], note["slices"]) for note in notes] == [
        ("done", "harbour", "priority", 1)
    ]


def test_200_agents_in_threads_on_one_store_lose_no_page() -> None:
    with kilburn.open(":memory:", window=2000, tokenizer="chars/4") as store:
        scheduler = Scheduler(Slow(words=1), "round_robin", at_once=4)

        def work(name: str) -> list[str]:
            session = store.session(name)
            agent = Agent(scheduler.model(name, session=session), [], session, memory=False)
            return [agent.run(f"{name} {step}").text for step in range(3)]

        with ThreadPoolExecutor(200) as pool:
            names = [f"agent{number}" for number in range(200)]
            texts = list(pool.map(work, names))
        assert texts == [[f"{name} {step} " for step in range(3)] for name in names]
        for name in names:
            said = [message["content"] for message in store.session(name).contents.messages()]
            assert said == [text for step in range(3) for text in (f"{name} {step}", f"{name} {step} ")]

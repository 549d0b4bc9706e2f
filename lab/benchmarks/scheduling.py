"""The scheduler: what a decision costs, what jobs wait under each discipline, and 200 agents at once on one store.

    python lab/benchmarks/scheduling.py

A wait and an order of eviction are simulated: they are the same on every machine. All else is timed.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kilburn
from figures import Row, emit, parser, quantile
from kilburn.agents.loop import Agent
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Model, Reply, Request, complete
from kilburn.models.queue import Job, Queue, Share
from kilburn.models.scheduler import Scheduler
from kilburn.models.scripted import Scripted
from kilburn_kv.eviction import EvictionOrder, LruK, LruOrder, PromptUse
from kilburn_lab.evals.kv_orders import LfuOrder, S3Fifo
from kilburn_lab.evals.scheduling import Course, simulate, waits

DECIDED = ("fifo", "round_robin", "round_robin(slice=64)", "priority(slice=64)", "fair_share(slice=64)")
WAITED = ("fifo", "round_robin(slice=256)", "round_robin(slice=64)", "round_robin(slice=16)", "priority(slice=64)")


def decide(spec: str, agents: int, tenants: int, limited: bool, rounds: int) -> list[float]:
    """Seconds of each decision: the next job is chosen and started, and the one before it ended."""
    share = Share(tokens=10**9) if limited else Share()
    queue = Queue(spec, shares={f"t{number}": share for number in range(tenants)})
    chance = random.Random(14)
    for number in range(agents):
        queue.submit(Job(agent=f"a{number}", tenant=f"t{number % tenants}", priority=chance.randrange(5), size=100), 0.0)
    found = []
    for number in range(rounds):
        start = time.perf_counter()
        job = queue.start(1.0 + number)
        assert job is not None
        queue.end(job, chance.randrange(1, 100), 1.5 + number)
        found.append(time.perf_counter() - start)
        queue.submit(Job(agent=job.agent, tenant=job.tenant, priority=job.priority, size=100), 1.5 + number)
    return found


def overhead(agents: int, rounds: int) -> list[Row]:
    rows: list[Row] = []
    for spec in DECIDED:
        base = 0.0
        for many, tenants, limited in ((10, 2, False), (agents, 10, False), (agents, agents, False), (agents, 10, True)):
            found = decide(spec, many, tenants, limited, rounds)
            base = base or quantile(found, 0.5)
            rows.append(
                {
                    "discipline": spec,
                    "agents": many,
                    "tenants": tenants,
                    "limits": "tokens" if limited else "-",
                    "p50 ms": quantile(found, 0.5) * 1e3,
                    "p95 ms": quantile(found, 0.95) * 1e3,
                    "x 10 agents": quantile(found, 0.5) / base,
                }
            )
    return rows


class Locked:
    """A model behind a lock: what an application would do without a scheduler."""

    def __init__(self, model: Scripted) -> None:
        self.name, self.form, self.context, self.tokenizer = model.name, model.form, model.context, model.tokenizer
        self.model, self.lock = model, threading.Lock()
        self.waiting = 0

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        self.waiting += 1
        with self.lock:
            yield from self.model.stream(request)


def threads(many: int, jobs: int) -> list[Row]:
    """What a whole job takes while as many agents wait, each in its thread, behind a scheduler and behind a lock."""
    rows: list[Row] = []
    request = Request(messages=[{"role": "user", "content": "Go on."}])
    for agents in dict.fromkeys((1, many)):
        each = max(2, jobs // agents)
        for spec in ("a lock", *DECIDED):
            gate = threading.Event()

            def held(_: Request, gate: threading.Event = gate) -> str:
                gate.wait()
                return "Done."

            model = Scripted([held, *["Done."] * (agents * each)])
            scheduler, locked = Scheduler(model, "fifo" if spec == "a lock" else spec), Locked(model)

            def speaker(name: str, spec: str = spec, scheduler: Scheduler = scheduler, locked: Locked = locked) -> Model:
                return locked if spec == "a lock" else scheduler.model(name, tenant=name[-1])

            def work(model: Model, times: int = each) -> None:
                for _ in range(times):
                    complete(model, request)

            with ThreadPoolExecutor(agents + 1) as pool:
                first = pool.submit(complete, speaker("first"), request)
                rest = [pool.submit(work, speaker(f"a{number}")) for number in range(agents)]
                while locked.waiting + len(scheduler.queue.waiting) < agents:
                    time.sleep(0.01)
                start = time.perf_counter()
                gate.set()
                for one in (first, *rest):
                    one.result()
                took = (time.perf_counter() - start) / (agents * each)
            base = took if spec == "a lock" else float(rows[-1]["ms a job"]) / float(rows[-1]["x a lock"]) * 1e-3
            rows.append({"agents": agents, "discipline": spec, "ms a job": took * 1e3, "x a lock": took / base})
    return rows


def hog() -> list[Row]:
    """What 100 short jobs wait, of which one comes every 0.4 seconds, beside a few very long ones; 100 tokens a second."""
    chance = random.Random(14)
    short = [Course(f"s{number}", (chance.randrange(10, 30),), at=0.4 * number, priority=1) for number in range(100)]
    long = [Course(f"hog{number}", (2000,), at=5.0 * number) for number in range(4)]
    rows: list[Row] = []
    for spec in WAITED:
        jobs = simulate([*short, *long], spec)
        waited = waits(jobs, {course.agent for course in short})
        hogs = [job.turnaround for job in jobs if job.agent.startswith("hog")]
        rows.append(
            {
                "discipline": spec,
                "short p50 s": quantile(waited, 0.5),
                "short p95 s": quantile(waited, 0.95),
                "hogs' mean turnaround s": sum(hogs) / len(hogs),
                "slices": sum(job.slices for job in jobs),
                "p95 x fifo": quantile(waited, 0.95) / (float(rows[0]["short p95 s"]) if rows else quantile(waited, 0.95)),
            }
        )
    return rows


def scanned(capacity: int) -> list[Row]:
    """Agents that come back, of which some come more often, and between them a scan of agents that come once."""
    chance = random.Random(14)
    often = [1 / (1 + rank) ** 0.8 for rank in range(200)]
    trace: list[int] = []
    for number in range(20_000):
        trace += chance.choices(range(200), often)
        if number % 500 < 250:
            trace.append(1000 + number)
    orders: dict[str, Callable[[], EvictionOrder]] = {
        "lru": LruOrder,
        "lru-2": lambda: LruK(2),
        "lru-2, no history": lambda: LruK(2, 0),
        "lru-3": lambda: LruK(3),
        "lfu": LfuOrder,
        "s3-fifo": lambda: S3Fifo(capacity),
    }
    returning = [place for place, unit in enumerate(trace) if unit < 1000]
    rows: list[Row] = []
    for name, make in orders.items():
        hit = hits(make(), trace, capacity)
        share = sum(hit[place] for place in returning) / len(returning)
        rows.append({"order": name, "hit rate": share, "x lru": share / float(rows[0]["hit rate"]) if rows else 1.0})
    return rows


def hits(order: EvictionOrder, trace: Sequence[int], capacity: int) -> list[bool]:
    resident: set[int] = set()
    found = []
    for unit in trace:
        found.append(unit in resident)
        if unit not in resident and len(resident) == capacity:
            resident.difference_update(order.evict(1, ()))
        resident.add(unit)
        order.used([unit], PromptUse(0.0))
    return found


def scripted(request: Request) -> Message | str:
    """Calls a tool once, then answers with what the tool said."""
    last = request.messages[-1]
    if last["role"] == "tool":
        return f"so {last['content']}"
    call = Part(kind=Kind.CALL, text=json.dumps({"text": last["content"]}), name="echo", call="c")
    return Message(role=Role.ASSISTANT, parts=(call,))


def echo(text: str) -> str:
    """Says it again."""
    return f"{text}, again"


def crowd(agents: int, runs: int, at_once: int) -> list[Row]:
    """Agents, each in its thread, on one SQLite store and one model; then every message is read again and compared."""
    rows: list[Row] = []
    for many in dict.fromkeys((1, agents)):
        with tempfile.TemporaryDirectory(dir=".") as folder:
            path = Path(folder) / "agents.db"
            with kilburn.open(str(path), window=4000, policy="lru", tokenizer="chars/4", embedder=None) as store:
                scheduler = Scheduler(Scripted([scripted] * (2 * many * runs)), "round_robin", at_once=at_once)

                def work(name: str, store=store, scheduler=scheduler) -> None:  # type: ignore[no-untyped-def]
                    session = store.session(name)
                    agent = Agent(scheduler.model(name, session=session), [echo], session, memory=False)
                    for run in range(runs):
                        agent.run(f"{name} {run}")

                names = [f"agent{number}" for number in range(many)]
                start = time.perf_counter()
                with ThreadPoolExecutor(many) as pool:
                    list(pool.map(work, names))
                took = time.perf_counter() - start
            with kilburn.open(str(path), tokenizer="chars/4", readonly=True, embedder=None) as store:
                missing = sum(not complete_log(store.session(name), name, runs) for name in names)
                pages = sum(len(store.session(name).contents.pages()) for name in names)
            checked = subprocess.run(
                [sys.executable, "-m", "kilburn", "fsck", "--db", str(path), "--json"],
                capture_output=True,
                text=True,
                check=False,
            )
            rows.append(
                {
                    "agents": many,
                    "pages": pages,
                    "agents with a page missing": missing,
                    "fsck": "clean" if checked.returncode == 0 else f"status {checked.returncode}",
                    "seconds": took,
                    "ms a step": took / (2 * many * runs) * 1e3,
                }
            )
            rows[-1]["x 1 agent"] = float(rows[-1]["ms a step"]) / float(rows[0]["ms a step"])
    return rows


def complete_log(session: kilburn.kernel.session.Process, name: str, runs: int) -> bool:
    """Whether all messages of an agent are there, in order and byte for byte."""
    said = [(message["role"], message.get("content")) for message in session.contents.messages()]
    expected: list[tuple[str, str | None]] = []
    for run in range(runs):
        text = f"{name} {run}"
        expected += [("user", text), ("assistant", None), ("tool", f"{text}, again"), ("assistant", f"so {text}, again")]
    return said == expected


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--many", type=int, default=1000, help="agents of a decision")
    options.add_argument("--rounds", type=int, default=3000, help="decisions of a row")
    options.add_argument("--agents", type=int, default=200, help="agents in threads on one store")
    options.add_argument("--runs", type=int, default=3, help="of each of them; a run has two steps and four pages")
    options.add_argument("--at-once", type=int, default=4, help="jobs that run side by side")
    options.add_argument("--capacity", type=int, default=50, help="agents that the cache of the trace holds")
    options.add_argument(
        "--part", choices=("decisions", "threads", "waits", "order", "store"), action="append", help="all where none is given"
    )
    asked = options.parse_args()
    parts: dict[str, tuple[Callable[[], list[Row]], str]] = {
        "decisions": (lambda: overhead(asked.many, asked.rounds), "A decision: choose, start, end."),
        "threads": (
            lambda: threads(asked.many, asked.rounds),
            "Whole jobs, thread changes included.",
        ),
        "waits": (hog, "Simulated: 100 short jobs and 4 of 2,000 tokens, at 100 tokens a second."),
        "order": (lambda: scanned(asked.capacity), f"200 agents come back, a scan comes once; the cache holds {asked.capacity}."),
        "store": (lambda: crowd(asked.agents, asked.runs, asked.at_once), "One SQLite store, one thread an agent."),
    }
    rows: list[Row] = []
    for name, (measure, note) in parts.items():
        if asked.part and name not in asked.part:
            continue
        found = measure()
        if asked.json:
            rows += [{"part": name, **row} for row in found]
        else:
            emit(f"scheduling, {name}", found, False, note)
    if asked.json:
        emit("scheduling", rows, True)


if __name__ == "__main__":
    main()

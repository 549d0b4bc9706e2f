"""What the dashboard works out from a ledger: regret, what another policy would have taken, what edits saved, agents' calls."""

from __future__ import annotations

import hashlib
import random
import re
import threading
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import kilburn
from dashboard.made import SCRIPT, work
from dashboard.visit import ask, ok, to, walk, words_of
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.dashboard.later import WAITING, Errands
from kilburn.dashboard.optimum import regret_of
from kilburn.dashboard.otherwise import CHOICES, otherwise
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.screens import SCREENS
from kilburn.errors import KilburnError, SpecError
from kilburn.event import Act, Event
from kilburn.kernel.resolve import locate
from kilburn.model import Tokens
from kilburn.models.scripted import Scripted


def ledger(pages: int, capacity: int, asked: list[int], missed: set[int]) -> list[Event]:
    """A prompt, then pages one by one, each of one token, then recalls."""
    acts: list[dict[str, Any]] = [{"act": Act.SHIP, "data": {"again": 0, "window": capacity}}]
    acts += [{"act": Act.ADMIT, "pages": (page,)} for page in range(1, pages + 1)]
    acts += [{"act": Act.FAULT, "pages": (page,), "data": {"missed": [page] if page in missed else []}} for page in asked]
    return [Event(number=number, time=0.0, **each) for number, each in enumerate(acts, 1)]


def most_hits(pages: int, capacity: int, asked: list[int]) -> int:
    """The best that any choice of what stays can do: all of them are tried."""
    steps = [*range(1, pages + 1), *asked]

    @cache
    def best(at: int, there: frozenset[int]) -> int:
        if at == len(steps):
            return 0
        page, admitted = steps[at], at < pages
        wide = sorted(there | {page})
        found = []
        for size in range(min(capacity, len(wide)) + 1):
            found += [best(at + 1, frozenset(left)) for left in combinations(wide, size) if not admitted or page in left]
        return max(found) + (not admitted and page in there)

    return best(0, frozenset())


def test_the_optimum_is_the_best_that_any_choice_can_do() -> None:
    chance = random.Random(26)
    for _ in range(60):
        pages, capacity = chance.randint(2, 5), chance.randint(1, 3)
        asked = [chance.randint(1, pages) for _ in range(chance.randint(1, 6))]
        found = regret_of(ledger(pages, capacity, asked, set()), dict.fromkeys(range(1, 6), 1), (), 0, 99)
        assert found.optimum == most_hits(pages, capacity, asked), (pages, capacity, asked)
        assert (found.recalled, found.hits, found.cold) == (len(asked), len(asked), 0)


def test_regret_is_what_the_window_missed_and_the_optimum_had() -> None:
    found = regret_of(ledger(4, 2, [1, 1, 4], {1}), dict.fromkeys(range(1, 5), 1), (), 0, 8)
    assert (found.hits, found.optimum, found.missed) == (1, 3, (1,))
    assert found.regret == pytest.approx(2 / 3)
    pinned = regret_of(ledger(4, 2, [1, 1, 4], {1}), {**dict.fromkeys(range(1, 5), 1), 9: 1}, (9,), 0, 8)
    assert pinned.optimum == 1
    # What came before the stretch is not blamed on the window, the first time.
    later = regret_of(ledger(4, 2, [7, 7], {7}), dict.fromkeys(range(1, 9), 1), (), 100, 110)
    assert (later.cold, later.recalled, later.optimum) == (1, 1, 1)
    assert regret_of([], {}, (), 0, 0).regret is None


def test_the_regret_of_a_session_is_worked_out_when_it_is_asked_for(app: Any) -> None:
    first = ok(app, "/faults", name="misses")
    assert "Of 37 pages" not in words_of(first)
    asked = next(link for link in first.links if "regret=" in link)
    assert ask(app, asked).status == 200
    said = words_of(ok(app, "/faults", name="misses", regret=re.findall(r"regret=(\d+)", asked)[0]))
    assert (
        "Of 37 pages that were recalled by their address, the window had 0. One that knows the future would have had 37" in said
    )
    assert "a regret of 100%" in said
    assert "No page was recalled by its address" in words_of(ok(app, "/faults", name="quiet", regret=99))


def test_the_same_policy_replayed_gives_what_the_ledger_says(made: Path) -> None:
    before = hashlib.sha256(made.read_bytes()).hexdigest()
    with Sqlite(made, readonly=True) as backend:
        reading = LedgerReader(backend)
        session = reading.session("misses")
        told: list[float] = []
        found = otherwise(backend, session, "fifo", session.ledger.head, told.append)
        assert found is not None
        for figure in ("prompts", "shipped", "again", "fresh", "left", "folds"):
            assert getattr(found.was, figure) == getattr(found.other, figure), figure
        assert (found.pages, found.all, found.window, found.forgotten) == (126, 126, 900, 0)
        assert found.whole.shipped > found.was.shipped
        assert found.whole.again == 0
        assert max(told) < 1
        other = otherwise(backend, session, "hybrid", session.ledger.head, told.append)
        assert other is not None
        assert other.was == found.was
        assert other.other.again < found.other.again
        part = otherwise(backend, session, "fifo", session.ledger.head, told.append, most=30)
        assert part is not None
        assert (part.pages, part.was.shipped) == (30, part.other.shipped)
    assert hashlib.sha256(made.read_bytes()).hexdigest() == before


def test_another_policy_is_chosen_in_a_form(app: Any) -> None:
    shown = ok(app, "/prices", name="misses")
    assert re.findall(r"<option[^>]*>(\w+)", shown.text) == list(CHOICES)
    assert all(locate("policies", each) for each in CHOICES)
    said = words_of(ok(app, "/prices", name="misses", policy="hybrid", upto=9_999))
    assert "as it was 26,315" in said
    assert "nothing ever leaves" in said
    assert "Of all 126 pages, up to message 86." in said
    # What was worked out before stands beside it.
    assert re.search(r"lru 26,315 .* hybrid ", words_of(ok(app, "/prices", name="misses", policy="lru", upto=9_999)))
    for foreign in ("os:system", "kilburn.policies.lru:Lru", "belady", "chain(lru)", "<b>"):
        assert "as it was" not in words_of(ok(app, "/prices", name="misses", policy=foreign, upto=9_999))


def test_a_replay_leaves_out_what_was_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("a")
        work(session, 12)
        session.forget("p5")
        with Sqlite(path, readonly=True) as backend:
            reading = LedgerReader(backend)
            found = otherwise(backend, reading.session("a"), "lru", session.ledger.head, lambda share: None)
    assert found is not None
    assert found.forgotten >= 1
    assert found.other.prompts == found.was.prompts


def test_tokens_that_a_cache_lost_by_edits_are_an_alarm(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with kilburn.open(str(path), window=500, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        for name, cached in (("dear", 200), ("without a cache", 0)):
            session = store.session(name)
            work(session, 39)
            session.prompts.observe(Tokens(prompt=400, reply=5, cached=cached), 400)
            session.append({"role": "user", "content": "And then?"})
            session.render()
    with kilburn.open(str(path), window=90_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        work(store.session("wide"), 40)
    with Sqlite(path, readonly=True) as backend:
        reading = LedgerReader(backend)
        alarms = {row.info.name: " ".join(row.alarms) for row in reading.rows(reading.sessions())[0]}
        shown = ok(build(backend), "/prices", name="dear").text
    assert re.fullmatch(r"\d+% of the tokens read again", alarms["dear"])
    assert (alarms["wide"], alarms["without a cache"]) == ("", "")
    assert 'class="outcome bad">no<' in shown, "an edit that did not pay"


class Mute(Scripted):
    """A model that never answers."""

    def stream(self, request: Any) -> Any:
        raise KilburnError("no")


def test_a_breaker_that_is_open_is_an_alarm(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with kilburn.open(str(path), window=700, policy="summarize", model=Mute([]), tokenizer="chars/4", embedder=None) as store:
        session = store.session("a")
        for number in range(40):
            session.append({"role": "user", "content": f"{number}: " + "words that take room " * 12})
            session.render()
            if session.stats().asks_failed >= 3:
                break
    with Sqlite(path, readonly=True) as backend:
        said = words_of(ok(build(backend), "/"))
    assert "the breaker is open, after 3 questions that failed" in said


def test_agents_have_budgets_and_returns(worked: Path) -> None:
    with Sqlite(worked, readonly=True) as backend:
        app = build(backend)
        said = words_of(ok(app, "/branches", name="work"))
        assert "5 steps, 10,000 calls, 9,000 tokens" in said
        assert re.search(r"work/b1 .* returned p3 ", said)
        assert re.search(r"work/b2 .* returned p5 said", said)
        assert "its steps and their calls" in words_of(ok(app, "/branches", name="ask"))


def test_each_call_of_a_recursive_model_can_be_opened(worked: Path) -> None:
    with Sqlite(worked, readonly=True) as backend:
        app = build(backend)
        run = ok(app, "/calls", name="ask")
        said = words_of(run)
        assert "What is the largest number?" in said
        assert "steps 3 of 8 at most" in said
        assert "calls 14 of 40 at most" in said
        assert "partial" in said
        assert 'found = llm_query_batched([f"What is in {line}?"' in said
        cell = next(link for link in run.links if "cell=" in link)
        calls = ask(app, cell)
        told = words_of(calls)
        assert "12 calls" in told
        assert told.count("answered") - told.count("sub-calls answered") == 11
        assert "no reply Unavailable 2 times" in told
        assert "WHAT IS IN LINE 4: 16?" in told
        assert SCRIPT not in calls.text
        page = next(link for link in calls.links if "/page" in link and "b1" in link)
        assert ask(app, page).status == 200
        below = words_of(ok(app, "/calls", name="ask/b2"))
        assert "Which line is the first?" in below
        assert "no recursive model" in words_of(ok(app, "/calls", name="work")).lower()
        assert ask(app, to("/calls", name="ask", cell="p999")).status == 404
        assert ask(app, to("/calls", name="ask", cell="<b>")).status == 404
        assert {*SCREENS} - {link.partition("?")[0] for link in walk(app)} <= {"/search", "/collection", "/receipt"}


def test_a_run_whose_pages_were_forgotten_can_be_looked_at(worked: Path, tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    path.write_bytes(worked.read_bytes())
    with kilburn.open(str(path), window=6000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        store.session("ask/b1").forget("p2")
        store.session("work/b1").forget("p2")
    with Sqlite(path, readonly=True) as backend:
        app = build(backend)
        for name in ("ask", "ask/b2", "work"):
            ok(app, "/calls", name=name)
            ok(app, "/branches", name=name)
        assert {"/calls", "/branches"} <= {link.partition("?")[0] for link in walk(app)}


def test_what_is_worked_out_is_bounded_and_a_failure_is_kept() -> None:
    errands, go = Errands(), threading.Event()

    def wait(told: Any) -> str:
        told(0.5)
        go.wait()
        return "done"

    def fail(told: Any) -> str:
        raise SpecError("it cannot be", advice="leave it")

    def raises(told: Any) -> str:
        raise ZeroDivisionError

    assert errands.ask("first", wait)[0] is None
    for number in range(2 * WAITING):
        errands.ask(number, fail)
    errands.ask("late", raises)
    go.set()
    assert errands.finish("first", 600)
    assert errands.ask("first", wait) == ("done", 1.0)
    assert errands.finish(0, 600)
    assert isinstance(errands.found(0), SpecError)
    assert errands.found(2 * WAITING - 1) is None
    errands.ask("late", raises)
    assert errands.finish("late", 600)
    assert "ZeroDivisionError" in str(errands.found("late"))


def test_a_ledger_that_says_nonsense_is_shown_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    wrong: Any = {
        "asked": "<b>",
        "limits": [1],
        "functions": 7,
        "branch": 3,
        "calls": "x",
        "answered": SCRIPT,
        "page": "p",
        "spent": "x",
    }
    with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("odd")
        work(session, 6)
        session.ledger.record(Act.NOTE, **wrong)
        session.ledger.record(Act.NOTE, [3], refused="many", limit=SCRIPT, prompt="")
        session.ledger.record(Act.NOTE, files="none", how="forgotten")
        session.ledger.record(Act.FAULT, [3, 999_999, -7], missed="p3")
        session.ledger.record(
            Act.CACHE, [1, 999_999], policy=SCRIPT, cause="pressure", how=SCRIPT, prefilled="x", evicted=-3, cached=5
        )
    with Sqlite(path, readonly=True) as backend:
        app = build(backend)
        for screen in SCREENS:
            reply = ask(app, to(screen, name="odd", address="p3", cell="p4", regret=9_999, policy="lru", upto=9_999, q="x"))
            assert reply.status in (200, 404), reply.text
            assert SCRIPT not in reply.text
        assert "edits of the cache 1" in words_of(ok(app, "/cache", name="odd"))
        said = words_of(ok(app, "/faults", name="odd", regret=9_999))
        assert "Of 1 pages" in said or "Of 1 page" in said

"""What the dashboard computes from a ledger: alarms, the calls of agents, screens of a damaged ledger."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import kilburn
from dashboard.made import SCRIPT, work
from dashboard.visit import ask, ok, to, walk, words_of
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.screens import SCREENS
from kilburn.errors import KilburnError
from kilburn.event import Act
from kilburn.model import Tokens
from kilburn.models.scripted import Scripted


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
    assert re.fullmatch(r"\d+% of the tokens read again", alarms["dear"])
    assert (alarms["wide"], alarms["without a cache"]) == ("", "")


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
        assert "the steps and their calls" in words_of(ok(app, "/branches", name="ask"))


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
        assert "no question to a recursive model" in words_of(ok(app, "/calls", name="work")).lower()
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
            reply = ask(app, to(screen, name="odd", address="p3", cell="p4", q="x"))
            assert reply.status in (200, 404), reply.text
            assert SCRIPT not in reply.text
        assert "edits of the cache 1" in words_of(ok(app, "/cache", name="odd"))

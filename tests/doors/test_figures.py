"""The figures of a session are the same wherever they are shown, and each is what its ledger says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kilburn as library
from cli.terminal import kilburn
from dashboard.visit import ask, to, words_of
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.dashboard.look import short
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.strip import strip
from kilburn.event import Act
from kilburn.kernel.checkpoint import figures_of
from kilburn.kernel.session import Session
from kilburn.model import Tokens
from kilburn.move import Fold, Retire
from kilburn.prices import PRICES

WINDOW, RESERVE = 3_000, 200


def converse(session: Session, turns: int) -> None:
    for turn in range(turns):
        session.append({"role": "user", "content": f"Question {turn}: " + "what does the harbour log say of it? " * 8})
        prompt = session.render()
        # The provider counts fewer tokens than this session does.
        session.prompts.observe(Tokens(prompt=int(0.7 * prompt.tokens), reply=5), prompt.tokens)
        session.append({"role": "assistant", "content": f"Answer {turn}: " + "the wind was south-west, and it rained. " * 6})


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("figures") / "agent.db"
    with library.open(str(path), window=WINDOW, reserve=RESERVE, policy="fifo", embedder=None) as store:
        session = store.session("harbour")
        converse(session, 6)
        session.edits.apply(Fold((3, 4, 5, 6), text="Early questions, answered."))
        session.edits.apply(Retire((7,)))
        converse(session, 50)
        session.forget("p8")
        session.recall("p2")
        converse(session, 3)
        branch = session.fork("Look at the rain alone.")
        converse(branch, 4)
        stats = session.stats()
        assert min(stats.evictions + stats.folds, stats.derived, stats.faults, stats.retired, stats.dropped) > 0
        # The correction makes room for more tokens than the window has.
        assert stats.room > WINDOW - RESERVE
    return path


@pytest.fixture
def backend(db: Path) -> Iterator[Sqlite]:
    with closing(Sqlite(db, readonly=True)) as opened:
        yield opened


def counted(backend: Sqlite, name: str) -> dict[str, Any]:
    """The figures, from the ledger's events and the stored pages alone."""
    info = backend.segment(name, time=0.0, create=False)
    assert info is not None
    events = list(backend.events(info.number))
    rows = {page.id: (page, state) for page, state in backend.pages(info.number)}
    appended = [page for event in events if event.act is Act.ADMIT for page in event.pages]
    made = [page for page in rows if page < 0]
    assert sorted(appended) == sorted(page for page in rows if page > 0)
    assert len(appended) + len(made) == info.pages
    ships = [event for event in events if event.act is Act.SHIP]
    return {
        "pages": len(appended),
        "derived": len(made),
        "tokens": sum(rows[page][0].tokens for page in appended),
        "window": WINDOW,
        "prompts": len(ships),
        "shipped": sum(event.tokens for event in ships),
        "again": sum(event.data["again"] for event in ships),
        "faults": sum(len(event.data["missed"]) for event in events if event.act is Act.FAULT),
    }


@pytest.mark.parametrize("name", ["harbour", "harbour/b1"])
def test_every_program_shows_the_figures_of_the_ledger(db: Path, backend: Sqlite, name: str) -> None:
    expected = counted(backend, name)
    info = backend.segment(name, time=0.0, create=False)
    assert info is not None
    # The library, and what is read without opening the session.
    stats, _ = figures_of(backend, info)
    with library.open(str(db), window=WINDOW, reserve=RESERVE, policy="cost", embedder=None, readonly=True) as store:
        session = store.session(name)
        assert session.stats() == stats
        capacity, use = session.prompts.capacity, session.prompts.use
    assert stats.pages == expected["pages"]
    assert stats.derived == expected["derived"]
    assert stats.tokens_seen == expected["tokens"]
    assert (stats.prompts, stats.tokens_shipped) == (expected["prompts"], expected["shipped"])
    assert (stats.tokens_reprefilled, stats.faults) == (expected["again"], expected["faults"])
    assert (stats.window, stats.beside) == (WINDOW, RESERVE)
    assert 0 < stats.tokens_in_window <= WINDOW - RESERVE
    # The command line.
    assert kilburn("stats", name, "--db", db, "--json").json == {key: stats[key] for key in stats.keys()}  # noqa: SIM118
    rows = {row["session"]: row for row in kilburn("ps", "--db", db, "--json").json}
    row = rows[name]
    for key in ("pages", "derived", "tokens", "window", "faults"):
        assert row[key] == expected[key], key
    assert row["tokens_in_window"] == stats.tokens_in_window
    assert sum(row["places"].values()) == expected["pages"]
    watched = kilburn("top", "--once", "--db", db, "--json").json["sessions"]
    assert {one["session"]: one for one in watched} == rows
    both = sum(one["pages"] for one in rows.values())
    assert f"2 sessions, {both:,} pages" in kilburn("top", "--once", "--db", db).out
    preview = kilburn("window", "preview", name, "--db", db, "--json").json
    assert (preview["use"], preview["capacity"]) == (use, capacity)
    assert f"of what fits a window of {WINDOW:,}" in kilburn("window", "preview", name, "--db", db).out
    # The dashboard.
    app = build(backend)
    assert f"2 sessions, {short(both)} pages" in words_of(ask(app, "/"))
    words = words_of(ask(app, to("/session", name=name)))
    assert f"in the window {short(stats.tokens_in_window)} of {short(WINDOW)} pages {short(expected['pages'])}" in words
    assert f"tokens seen {short(expected['tokens'])} prompts {expected['prompts']}" in words


def test_the_price_is_that_of_the_prompts(backend: Sqlite) -> None:
    expected = counted(backend, "harbour")
    reading = LedgerReader(backend)
    session = reading.session("harbour")
    columns = strip(reading, session, limit=10_000).columns
    assert len(columns) == expected["prompts"]
    ships = {event.number: event for event in session.ledger.events(act=Act.SHIP)}
    new = before = 0
    for column in columns:
        if "fresh" in ships[column.event].data:
            new += column.tokens - (column.cached or 0) - column.reprocessed
        else:
            # The first prompt, and the first one after a page was forgotten: what was appended since the one before.
            since = [event for event in session.ledger.events(act=Act.ADMIT) if before < event.number < column.event]
            new += sum(session.window.pages[page].tokens for event in since for page in event.pages)
        before = column.event
    cached = expected["shipped"] - new - expected["again"]
    app = build(backend)
    words = words_of(ask(app, to("/prices", name="harbour")))
    for tokens, what in (
        (cached, "in a cache of the prefix"),
        (new, "new"),
        (expected["again"], "read again because of an edit"),
    ):
        assert f"{what} {tokens:,}" in words
    for name, table in PRICES.items():
        price = (cached * table.cached + (new + expected["again"]) * table.written) / 1e6
        found = re.search(rf"{name} ([\d.,]+)", words)
        assert found is not None
        assert float(found[1].replace(",", "")) == pytest.approx(price, rel=0.02), name

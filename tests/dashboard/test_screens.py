"""What each screen shows, and what it never does: write, take others' requests, or run what stands in a store."""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import apsw
import pytest

import kilburn
from dashboard.made import ESCAPE, HOSTILE, LONG, SCRIPT, work
from dashboard.visit import ask, ok, to, walk, words_of
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.dashboard.screens import MAX_TEXT, SCREENS
from kilburn.event import Act, Event


def test_sessions_come_with_alarms_first(app: Any) -> None:
    rows = re.findall(r'<th role="rowheader".*?</th>', ok(app, "/").text, re.DOTALL)
    assert len(rows) == 9
    assert "misses" in rows[0]
    assert "hit rate 52%" in rows[0]
    alarmed = ["alarm" in row for row in rows]
    assert alarmed == sorted(alarmed, reverse=True)
    assert 1 <= sum(alarmed) < 9


def test_what_left_by_a_fold_stands_in_the_list_too(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy="summarize", tokenizer="chars/4", embedder=None) as store:
        session = store.session("a")
        for number in range(20):
            session.append({"role": "user", "content": f"{number}: keep src/m{number}.py. " + "More was said. " * 8})
        session.render()
        stats = session.stats()
    with Sqlite(tmp_path / "a.db", readonly=True) as backend:
        assert stats.folds > 1
        assert f"{stats.evictions} {stats.folds} folds" in words_of(ok(build(backend), "/"))


def test_a_prompt_is_a_column_with_its_pages_and_what_a_cache_had(app: Any) -> None:
    shown = ok(app, "/session", name="parser", many=60).text
    assert len(re.findall(r"Prompt at message \d+: [\d,]+ tokens", shown)) == 60
    assert re.search(r"Prompt at message 128: 991 tokens, 855 of them cached|tokens, [\d,]+ of them cached", shown)
    assert {"k-system", "k-user", "k-result", "k-fold"} <= set(re.findall(r'class="(k-\w+)"', shown))
    assert 'class="cached"' in shown


def test_the_strip_says_what_the_ledger_says(made: Path, app: Any) -> None:
    with kilburn.open(str(made), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        ships = list(store.session("misses").ledger.events(act=Act.SHIP))
    shown = ok(app, "/session", name="misses", many=120).text
    told = re.findall(r"Prompt at message (\d+): ([\d,]+) tokens", shown)
    assert [(int(turn), int(tokens.replace(",", ""))) for turn, tokens in told] == [(ship.turn, ship.tokens) for ship in ships]


def test_a_range_of_prompts_leads_to_earlier_ones(app: Any) -> None:
    newest = ok(app, "/session", name="parser", many=20)
    earlier = next(link for link in newest.links if "until=" in link and "many=20" in link)
    before = ask(app, earlier)
    turns = [[int(turn) for turn in re.findall(r"Prompt at message (\d+):", reply.text)] for reply in (before, newest)]
    assert len(turns[0]) == len(turns[1]) == 20
    assert turns[0][-1] < turns[1][0]
    assert "Newest" in before.text


def test_the_window_now_says_why_and_what_could_leave(made: Path, app: Any) -> None:
    with kilburn.open(str(made), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        session = store.session("parser")
        use, shown = session.prompts.use, [page.address for page in session.window.resident()]
    said = words_of(ok(app, "/window", name="parser"))
    assert f"{use:,} tokens, {use / 1500:.0%} of what fits" in said
    assert all(address in said for address in shown)
    assert "pinned" in said
    assert "Pages that could leave now" in said


def test_a_window_can_be_seen_as_it_was(app: Any) -> None:
    at = re.findall(r"/window\?name=parser&amp;at=(\d+)", ok(app, "/session", name="parser").text)
    first = words_of(ok(app, "/window", name="parser", at=at[0]))
    assert "The window at message 4" in first
    assert "What could leave" not in first


def test_every_event_can_be_looked_at(made: Path, app: Any) -> None:
    for name in ("misses", "parser", "parser/b1", HOSTILE):
        with Sqlite(made, readonly=True) as backend:
            info = backend.segment(name, time=0.0, create=False)
            assert info is not None
        for event in [*range(1, min(10, info.head)), *range(10, info.head + 1, 13), info.head]:
            assert ask(app, to("/window", name=name, at=event)).status == (404 if name == "parser/b1" and event == 1 else 200)
            assert ok(app, "/session", name=name, until=event, many=20)
            assert ask(app, to("/receipt", name=name, event=event)).status in (200, 404)


def test_a_receipt_shows_both_sides_and_the_way_back(made: Path, app: Any) -> None:
    listed = ok(app, "/receipts", name="parser")
    with kilburn.open(str(made), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        session = store.session("parser")
        told = session.ledger.receipts()
        text = str(session.recall("p4"))
    found = [link for link in dict.fromkeys(listed.links) if link.startswith("/receipt?")]
    assert len(found) == len(told)
    first = ask(app, found[-1])
    said = words_of(first)
    assert "Before and after" in said
    assert f"freed {told[0].freed} tokens" in said
    before, after = (int(one.replace(",", "")) for one in re.findall(r"(?:before|after) <strong>([\d,]+)", first.text))
    assert before - after == told[0].freed
    assert "kilburn recall parser p4" in said
    assert text[:10] in said.replace("&#34;", '"')


def test_a_transcript_is_whole(made: Path, app: Any) -> None:
    with kilburn.open(str(made), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        last = store.session("parser").window.last
    said, reply = "", ok(app, "/transcript", name="parser", **{"from": 1})
    while True:
        said += words_of(reply)
        later = [link for link in reply.links if "/transcript" in link and f"from={said.count('kilburn recall') + 1}" in link]
        if not later:
            break
        reply = ask(app, later[0])
    assert [int(number) for number in re.findall(r"kilburn recall parser p(\d+)", said)] == list(range(1, last + 1))


def test_a_pages_life_is_told(app: Any) -> None:
    said = words_of(ok(app, "/page", name="parser", address="p4"))
    for deed in ("admitted", "folded", "recalled, a fault", "derived pages", "kilburn recall parser p4"):
        assert deed in said
    made = words_of(ok(app, "/page", name="parser", address="f1"))
    assert "sources" in made
    assert "made by summarize" in made


def test_a_long_text_comes_in_parts_and_whole(app: Any) -> None:
    first = ok(app, "/page", name=HOSTILE, address="p16")
    assert len(first.body) < 2 * MAX_TEXT
    assert f"{len(LONG) - MAX_TEXT:,} more characters" in first.text
    assert ask(app, next(link for link in first.links if "from=" in link)).status == 200
    whole = ask(app, next(link for link in first.links if link.startswith("/text?")))
    assert whole.text == LONG
    assert whole.headers["content-type"].startswith("text/plain")


def test_memory_faults_branches_prices_and_the_cache(app: Any) -> None:
    memory = words_of(ok(app, "/memory", user="ana"))
    assert "Ana lives in Rome holds" in re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d(?: to)?", "", memory).replace("  ", " ").replace(
        "  ", " "
    )
    assert "Proposed facts" in memory
    assert "kilburn memories accept f3 --user ana" in memory
    assert "37 faults" in words_of(ok(app, "/faults", name="misses"))
    branches = words_of(ok(app, "/branches", name="parser"))
    assert "parser/b1" in branches
    assert "returned p189" in branches
    assert "open" in branches
    assert "read again because of an edit" in words_of(ok(app, "/prices", name="misses"))
    handbook = next(link for link in ok(app, "/memory", user="ana").links if "handbook" in link)
    assert "Ring the bell in fog." in ask(app, handbook).text
    cached = words_of(ok(app, "/cache", name="cached"))
    assert "12 tokens, as the model counts them, had their keys and values on the device" in cached
    assert "left the device to make room 1 50%" in cached
    assert "edited in place 12 7 30 kernel p1" in cached
    assert "not on the device since they left it to make room: p2" in cached
    assert "no records of keys and values" in words_of(ok(app, "/cache", name="parser"))


def test_memory_is_shown_as_of_a_day(app: Any) -> None:
    then = words_of(ok(app, "/memory", user="ana", at="2024-02-01"))
    assert "Ana prefers tea" in then
    assert "Ana lives in Rome" not in then
    assert "known to be true then" in words_of(ok(app, "/memory", user="ana", at="2001-01-01"))
    assert ask(app, to("/memory", user="ana", at="yesterday")).status == 404


def test_one_search_finds_sessions_and_facts(app: Any) -> None:
    assert "parser" in words_of(ok(app, "/search", q="strips too much"))
    assert "prefers tea" in words_of(ok(app, "/search", q="tea"))


def test_every_link_leads_somewhere(app: Any) -> None:
    assert {link.partition("?")[0] for link in walk(app)} == {*SCREENS, "/text"} - {"/search", "/calls"}


def test_hostile_contents_are_text(app: Any) -> None:
    for link in [to(path, name=HOSTILE, address=f"p{n}", q=SCRIPT) for path in SCREENS for n in (2, 3, 5, 7, 9, 13, 15, 16)]:
        reply = ask(app, link)
        assert reply.status in (200, 404)
        body = reply.text.replace('<script src="/own/dashboard.js" defer></script>', "")
        for wrong in ("<script", "<img", "<b ", "\x1b", "\u202e", "\u2066", "\x07"):
            assert wrong not in body, link
        assert not re.search(r'\son\w+=|style="|javascript:', re.sub(r'"[^"]*"|>[^<]*<', '""', body)), link
    shown = ok(app, "/page", name=HOSTILE, address="p5").text
    assert "\\x1b[31mred" in shown
    assert ESCAPE not in shown


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading_is_answered(app: Any, method: str) -> None:
    assert ask(app, "/", method=method).status == 405


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8765", "localhost@evil", "", None, "[::2]:8765"])
def test_a_name_that_is_not_ours_is_refused(app: Any, host: str | None) -> None:
    assert ask(app, "/", host=host).status == 421


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:1", "localhost:8765", "LOCALHOST", "[::1]:8765", "[::1]"])
def test_our_names_are_answered(app: Any, host: str) -> None:
    assert ask(app, "/own/mark.svg", host=host).status == 200


def test_other_sites_may_link_here_and_not_read_here(app: Any) -> None:
    assert ask(app, "/", sec_fetch_site="cross-site", sec_fetch_mode="no-cors").status == 403
    assert ask(app, "/own/dashboard.js", sec_fetch_site="same-site", sec_fetch_mode="cors").status == 403
    assert ask(app, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate").status == 200


@pytest.mark.parametrize("path", ["/", "/session?name=parser", "/nothing", "/text?name=parser&address=p4", "/own/dashboard.css"])
def test_every_answer_is_protected(app: Any, path: str) -> None:
    headers = ask(app, path).headers
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'self'; script-src 'self'; ")
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "same-origin"


@pytest.mark.parametrize(
    "path",
    [
        "/session",
        "/session?name=nobody",
        "/session?name=@memory/ana",
        "/page?name=parser&address=p99999",
        "/page?name=parser&address=p1-p9",
        "/page?name=parser&address=%3Cscript%3E",
        "/receipt?name=parser&event=1",
        "/receipt?name=parser&event=99999999",
        "/memory?user=nobody",
        "/text?name=parser&address=p1-p3",
        "/own/..%2fapp.py",
        "/own/app.py",
        "/session/?name=parser",
        "/nothing",
    ],
)
def test_what_is_not_there_is_said_plainly(app: Any, path: str) -> None:
    reply = ask(app, path)
    assert reply.status == 404
    assert "Traceback" not in reply.text


@pytest.mark.parametrize(
    "query",
    [
        "name=%ff%fe",
        "name=%ED%A0%BD",
        "until=-1&name=parser",
        "until=99999999999999999999&name=parser",
        "many=7&name=parser",
        "from=%D9%A3&name=parser",
        "name=a&name=parser",
        "&".join(f"a{n}=1" for n in range(90)),
        "name=" + "a" * 9000,
    ],
)
def test_odd_queries_break_nothing(app: Any, query: str) -> None:
    for path in SCREENS:
        assert ask(app, f"{path}?{query}").status in (200, 404, 414)


def test_nothing_is_written(made: Path, app: Any) -> None:
    before = hashlib.sha256(made.read_bytes()).hexdigest()
    for path in SCREENS:
        ask(app, to(path, name="parser", address="p4", q="strip", event=70))
    assert hashlib.sha256(made.read_bytes()).hexdigest() == before


def test_a_writer_goes_on_while_pages_are_read(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("busy")
        work(session, 5)
        with Sqlite(path, readonly=True) as backend, Sqlite(path, busy_timeout=0.0) as other:
            app = build(backend)
            for n in range(20):
                assert ask(app, to(list(SCREENS)[n % len(SCREENS)], name="busy", address="p3")).status in (200, 404)
                session.append({"role": "user", "content": f"More {n}."})
                # Who would not wait a moment for a lock gets it too.
                assert other.segment(f"new-{n}", time=0.0) is not None
            assert f">{session.window.last}</dd>" in ok(app, "/session", name="busy").text


def test_it_follows_what_others_write(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=900, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("busy")
        work(session, 3)
        with Sqlite(path, readonly=True) as backend:
            app = build(backend)
            before = ok(app, "/window", name="busy").text
            session.append({"role": "user", "content": "A new question."})
            assert "A new question." not in before
            assert "A new question." in ok(app, "/window", name="busy").text
            session.forget(f"p{session.window.last}")
            assert "A new question." not in ok(app, "/window", name="busy").text
            gone = ok(app, "/page", name="busy", address=f"p{session.window.last}").text
            assert "The page was forgotten" in gone
            assert "A new question." not in gone


def test_a_damaged_session_blocks_no_other(tmp_path: Path, made: Path) -> None:
    path = tmp_path / "agent.db"
    path.write_bytes(made.read_bytes())
    with apsw.Connection(str(path)) as db:
        db.execute("UPDATE event SET body = x'00' WHERE segment = (SELECT id FROM segment WHERE name = 'misses') AND number = 9")
        db.execute("UPDATE segment SET created = 1 WHERE name = 'quiet'")
    with Sqlite(path, readonly=True) as backend:
        app = build(backend)
        said = words_of(ok(app, "/"))
        assert "damaged" in said
        assert ok(app, "/session", name="parser").status == 200
        assert ask(app, to("/session", name="quiet")).status in (404, 500)


def test_a_ledger_with_odd_figures_blocks_no_other_session(tmp_path: Path, made: Path) -> None:
    path = tmp_path / "agent.db"
    path.write_bytes(made.read_bytes())
    with Sqlite(path) as backend:
        info = backend.segment("parser", time=0.0, create=False)
        assert info is not None
        odd = Event(
            number=info.head + 1, act=Act.COMPACT, time=info.used, turn=1, pages=(1,), policy="x", cause="admit", tokens=1,
            data={"outcome": "done", "freed": "many", "moves": None, "asked": 5},
        )  # fmt: skip
        backend.commit(info.number, Batch(head=info.head, events=[odd]))
    with Sqlite(path, readonly=True) as backend:
        app = build(backend)
        assert "misses" in words_of(ok(app, "/"))
        assert ok(app, "/session", name="misses").status == 200


def test_many_may_look_while_the_ledger_grows(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=900, policy="summarize", tokenizer="chars/4", embedder=None) as store:
        sessions = [store.session(f"s{number}") for number in range(9)]
        for session in sessions:
            work(session, 4)
        with Sqlite(path, readonly=True) as backend, ThreadPoolExecutor(6) as readers:
            app = build(backend)
            asked = [to(screen, name=f"s{n}", address="p3") for n in range(9) for screen in ("/", "/session", "/window", "/page")]
            replies = readers.map(lambda path: ask(app, path).status, asked)
            for number in range(90):
                sessions[number % 9].append({"role": "user", "content": f"More {number}. " * 20})
                sessions[number % 9].render()
            assert set(replies) == {200}

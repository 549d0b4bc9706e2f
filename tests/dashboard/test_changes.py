"""Changes by hand: what a form does, which forms are taken, and that following a link changes nothing."""

from __future__ import annotations

import asyncio
import hashlib
import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

import kilburn
from dashboard.made import HOSTILE, SCRIPT, make
from dashboard.visit import Reply, ask
from kilburn.backends.sqlite import Sqlite
from kilburn.dashboard.app import build
from kilburn.dashboard.changes import MAX_FORM_BYTES, VERBS, OwnHands, Visit
from kilburn.dashboard.screens import SCREENS
from kilburn.kernel.receipts import newest_moves
from kilburn.move import Bring

HOST = "127.0.0.1:8765"
OURS = {"host": HOST, "origin": f"http://{HOST}", "content-type": "application/x-www-form-urlencoded"}


@pytest.fixture
def db(made: Path, tmp_path: Path) -> Path:
    """A store of its own for one test."""
    path = tmp_path / "agent.db"
    path.write_bytes(made.read_bytes())
    return path


@pytest.fixture
def app(db: Path) -> Iterator[Any]:
    with Sqlite(db, readonly=True) as backend:
        yield build(backend, visit=Visit("the word", OwnHands(db, "default")))


def post(app: Any, path: str, body: bytes, headers: dict[str, str], pieces: int = 1) -> Reply:
    """One POST and its answer."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8765),
    }
    size = max(1, -(-len(body) // pieces))
    sent = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    got: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": sent.pop(0), "more_body": bool(sent)} if sent else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        got.append(message)

    asyncio.run(app(scope, receive, send))
    told = {name.decode().lower(): value.decode() for name, value in got[0]["headers"]}
    return Reply(got[0]["status"], told, b"".join(message.get("body", b"") for message in got[1:]))


def do(app: Any, verb: str, headers: dict[str, str] | None = None, **fields: object) -> Reply:
    given = {"word": "the word", "back": "/window", **fields}
    return post(app, f"/do/{verb}", urlencode(given).encode(), OURS if headers is None else headers)


def pressed(app: Any, path: str, button: str) -> Reply:
    """Press a button of a screen, by its label, as a browser without scripts does."""
    shown = ask(app, path).text
    for action, inner in re.findall(r'<form class="change" method="post" action="([^"]+)"[^>]*>(.*?)</form>', shown, re.DOTALL):
        if re.search(rf'<button[^>]*(?:aria-label="{button}"[^>]*>|>{button}<)', inner):
            fields = re.findall(r'<input[^>]*?name="([^"]+)"(?: value="([^"]*)")?', inner)
            given = {name: html.unescape(value) for name, value in fields}
            return post(app, action, urlencode(given).encode(), OURS)
    raise AssertionError(f"{path} has no button {button!r}")


def shown(db: Path, name: str = "parser") -> list[tuple[str, str, bool]]:
    with kilburn.open(str(db), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        session = store.session(name)
        return [
            (page.address, instead, session.window.states[page.id].pinned) if page else ("", instead, False)
            for _, page, instead in session.contents.shown()
        ]


def test_a_page_is_let_go_taken_back_kept_and_let_move_by_buttons(app: Any, db: Path) -> None:
    before = shown(db)
    offered = re.findall(r'aria-label="Evict: (p\d+)"', ask(app, "/window?name=parser").text)
    held = {address for address, _, pinned in before if pinned}
    assert offered
    assert not held & set(offered)
    address = offered[-1]
    done = pressed(app, "/window?name=parser", f"Evict: {address}")
    assert done.status == 303
    assert done.headers["location"] == "/window?name=parser&done=evict"
    assert "The text can be recalled by its address." in ask(app, done.headers["location"]).text
    assert (address, "", False) not in shown(db)
    assert shown(db) != before
    page = ask(app, "/change?name=parser&show=undo")
    assert "By user" in page.text
    assert pressed(app, "/change?name=parser&show=undo", "Undo now").status == 303
    assert shown(db) == before
    assert pressed(app, f"/page?name=parser&address={address}", f"Pin: {address}").status == 303
    assert (address, "", True) in shown(db)
    assert pressed(app, "/window?name=parser", f"Unpin: {address}").status == 303
    assert shown(db) == before


def test_an_undo_that_does_not_fit_is_not_offered(app: Any, db: Path) -> None:
    # What the newest compaction took out was more than the window has room for.
    page = ask(app, "/change?name=parser&show=undo").text
    assert "tokens more than the window has: recall or pin single pages, or allow more tokens" in page
    assert "Undo now" not in page
    assert do(app, "undo", name="parser", event=newest_event(db)).status == 409


def test_the_receipt_of_a_copy_says_what_it_added(app: Any, db: Path) -> None:
    with kilburn.open(str(db), window=100_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("parser")
        session.edits.apply(Bring(((2, ((0, 9),)),)))
        receipt = session.ledger.receipts()[-1]
    assert receipt.brought
    page = ask(app, f"/receipt?name=parser&event={receipt.events[1]}").text
    assert f"<dt>added</dt><dd>{receipt.added} tokens" in page
    assert f'data-label="freed" class="n">-{receipt.added}</td>' in ask(app, "/receipts?name=parser").text


def newest_event(db: Path) -> str:
    with kilburn.open(str(db), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        newest, *_ = newest_moves(list(store.session("parser").ledger.events()))
        assert newest is not None
        return str(newest.events[1])


def test_a_range_is_compacted_after_its_price_was_shown(app: Any, db: Path) -> None:
    before = shown(db)
    kept = [address for address, instead, pinned in before if address.startswith("p") and not instead and not pinned]
    first, last = kept[0], kept[-4]
    path = f"/change?name=parser&show=compact&pages={first}-{last}&keep=2"
    seen = ask(app, path).text
    told = {
        name: int(number.replace(",", ""))
        for name, number in re.findall(r"<dt>(in the prompt now|in the prompt afterwards)</dt><dd>([\d,]+)", seen)
    }
    assert "processed again" in seen
    assert shown(db) == before
    done = pressed(app, path, "Compact now")
    assert done.headers["location"] == "/receipts?name=parser&done=compact"
    with kilburn.open(str(db), window=1500, policy="fifo", tokenizer="chars/4", embedder=None, readonly=True) as store:
        session = store.session("parser")
        assert session.ledger.receipts()[-1].freed == told["in the prompt now"] - told["in the prompt afterwards"]
        assert session.ledger.receipts()[-1].policy == "compact on demand"
    assert pressed(app, "/change?name=parser&show=undo", "Undo now").status == 303
    assert shown(db) == before


def test_facts_are_accepted_and_rejected_by_a_click(app: Any, db: Path) -> None:
    def waiting() -> list[str]:
        with kilburn.open(str(db), window=1500, policy="fifo", embedder=None, readonly=True) as store:
            return [
                str(state.at) for page, state in store.memory("ana").pages(proposed=True, history=True) if "Eve" in page.label
            ]

    assert waiting() == ["proposed"]
    done = pressed(app, "/memory?user=ana", "Reject: f3")
    assert done.headers["location"] == "/memory?user=ana&done=reject"
    assert waiting() == ["retired"]
    assert do(app, "reject", user="ana", pages="f3").status == 409
    assert do(app, "accept", user="ana", pages="f3").status == 409
    with kilburn.open(str(db), window=1500, policy="fifo", embedder=None) as store:
        store.memory("ana").undo("f3")
    assert waiting() == ["proposed"]
    assert pressed(app, "/memory?user=ana", "Accept: f3").status == 303
    assert waiting() == ["out"]
    assert do(app, "reject", user="ana", pages="f3").status == 409, "what is in force is not rejected by an old page"
    assert do(app, "accept", user="nobody", pages="f3").status == 404


def test_what_a_link_leads_to_changes_nothing(app: Any, db: Path) -> None:
    before = hashlib.sha256(db.read_bytes()).hexdigest()
    for path in [*SCREENS, *(f"/do/{verb}" for verb in VERBS)]:
        for show in ("leaves", "diff", "compact", "undo", ""):
            query = {
                "name": "parser",
                "pages": "p100-p120",
                "show": show,
                "word": "the word",
                "turn": 3,
                "tokens": 400,
                "user": "ana",
            }
            assert ask(app, f"{path}?{urlencode(query)}").status in (200, 404, 405)
    assert hashlib.sha256(db.read_bytes()).hexdigest() == before


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": f"http://{HOST}.evil.example"},
        {"origin": "http://127.0.0.1:8766"},
        {"origin": f"ftp://{HOST}"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
        {"origin": f"http://{HOST}", "sec-fetch-site": "same-site"},
        {"origin": f"http://{HOST}", "content-type": "text/plain"},
        {"origin": f"http://{HOST}", "content-type": "application/json"},
        {"origin": f"http://{HOST}", "host": "evil.example"},
    ],
)
def test_a_form_of_another_page_is_refused(app: Any, db: Path, headers: dict[str, str]) -> None:
    before = shown(db)
    given = {"host": HOST, "content-type": "application/x-www-form-urlencoded", **headers}
    assert do(app, "evict", given, name="parser", pages=before[5][0]).status in (403, 404, 421)
    assert shown(db) == before


@pytest.mark.parametrize("word", ["", "the wor", "the word ", "\u00e9", "x" * 900])
def test_a_form_without_our_word_is_refused(app: Any, db: Path, word: str) -> None:
    before = shown(db)
    assert do(app, "evict", name="parser", pages=before[5][0], word=word).status == 403
    assert shown(db) == before


@pytest.mark.parametrize(
    ("verb", "fields", "status"),
    [
        ("evict", {"pages": "p9999"}, 404),
        ("evict", {"pages": ""}, 404),
        ("evict", {"pages": "p1", "name": "nobody"}, 404),
        ("evict", {"pages": "p1", "name": "@memory/ana"}, 404),
        ("evict", {"pages": "p2"}, 409),
        ("pin", {"pages": "p1-p120"}, 409),
        ("compact", {"keep": "many"}, 404),
        ("compact", {"keep": "9" * 5000}, 404),
        ("compact", {"pages": "p1-p2"}, 409),
        ("undo", {"event": "1"}, 409),
        ("undo", {"name": "quiet"}, 409),
        ("forget", {"pages": "p1"}, 404),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    app: Any, db: Path, verb: str, fields: dict[str, str], status: int
) -> None:
    before = shown(db)
    refused = do(app, verb, **{"name": "parser", **fields})
    assert refused.status == status, refused.text
    assert "Traceback" not in refused.text
    assert shown(db) == before


def test_a_form_is_bounded_and_leads_nowhere_else(app: Any, db: Path) -> None:
    word = {"word": "the word", "name": "parser", "pages": shown(db)[5][0]}
    assert post(app, "/do/pin", urlencode({**word, "why": "x" * MAX_FORM_BYTES}).encode(), OURS).status == 404
    assert post(app, "/do/pin", b"a=1&" * 99, OURS).status == 404
    assert post(app, "/do/pin", b"\xff=%ff&word=%ff", OURS).status in (403, 404)
    for back in ("https://evil.example/", "//evil.example", "/do/undo", "/window\r\nset-cookie: a=b", ""):
        done = do(app, "pin", **{**word, "back": back})
        assert done.headers["location"].startswith("/?")
        assert "evil" not in done.headers["location"]
    odd = do(app, "pin", **{**word, "back": "/page", "address": "p1\r\nset-cookie: a=b", "from": "//evil.example"})
    assert odd.status == 303
    assert "\n" not in odd.headers["location"]
    assert post(app, "/do/pin", urlencode({**word, "back": "/window"}).encode(), OURS, pieces=9).status == 303


def test_hostile_names_stay_text_in_forms(app: Any) -> None:
    for path in SCREENS:
        for address in ("p3", "p5", "p13", "f1"):
            query = {"name": HOSTILE, "address": address, "pages": SCRIPT, "user": HOSTILE, "show": "compact", "done": SCRIPT}
            reply = ask(app, f"{path}?{urlencode(query)}")
            assert reply.status in (200, 404)
            body = reply.text.replace('<script src="/own/dashboard.js" defer></script>', "")
            assert not re.search(r"<script|<img|<b ", body), path
    assert (
        f'value="{html.escape(HOSTILE)}"'.replace("&quot;", "&#34;").replace("&#x27;", "&#39;")
        in ask(app, f"/change?{urlencode({'name': HOSTILE})}").text
    )
    assert do(app, "pin", name=HOSTILE, pages="p2", back="/window").headers["location"].startswith("/window?name=%3Cb")


def test_without_hands_there_is_no_form_and_no_change(made: Path, tmp_path: Path) -> None:
    path = make(tmp_path / "agent.db")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with Sqlite(path, readonly=True) as backend:
        app = build(backend)
        for screen in SCREENS:
            said = ask(app, f"{screen}?name=parser&address=p4&user=ana&show=undo").text
            assert 'method="post"' not in said
        assert do(app, "undo", name="parser").status == 405
        assert "kilburn window evict parser p7" in ask(app, "/change?name=parser").text
        assert "read-only" in ask(app, "/").text
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before

"""The verbs of a window over HTTP: what would leave, two prompts compared, a compaction taken back, pages kept and let go."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import kilburn
from gateway.place import Json, Place
from gateway.talk import user
from kilburn.agents.compaction import compact, preview
from kilburn.event import Act
from kilburn.gateway.keys import Key
from kilburn.kernel.receipts import Preview


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[..., Place]]:
    with ExitStack() as stack:
        yield lambda keys=None, **settings: Place(tmp_path, stack, keys or {}, **settings)


def texts(body: Json) -> str:
    return json.dumps(body["messages"])


def test_what_was_let_go_does_not_go_upstream_and_comes_back_exactly(place: Callable[..., Place]) -> None:
    it = place()
    for number in range(6):
        before = it.say(f"Number {number}: the file src/m{number}.py has a fault. " * 4)
    assert "src/m1.py" in texts(before)
    done = it.do("evict", body={"pages": "p3", "why": "it is done"})
    assert done.status_code == 200, done.text
    assert done.json()["pages"] == ["p3"]
    sent = it.say("What next?")
    assert "src/m1.py" not in texts(sent)
    assert "[p3 out" in texts(sent)
    assert "src/m2.py" in texts(sent)
    assert it.do("undo").json()["done"] == "taken back"
    sent = it.say("And now?")
    assert "src/m1.py" in texts(sent)
    assert sent["messages"] == it.talk[:-1]
    with it.store() as store:
        evict = next(event for event in store.session("work").ledger.events() if event.act is Act.EVICT)
    assert evict.why == "it is done"
    assert evict.policy == "user"


def test_a_range_is_compacted_and_the_next_prompt_has_the_summary(place: Callable[..., Place]) -> None:
    it = place()
    for number in range(8):
        whole = it.say(f"Number {number}: src/m{number}.py fails since Monday, line {number}. " + "More was said about it. " * 20)
    seen = it.shown()
    done = it.do("compact", body={"pages": "p1-p8"}).json()
    assert done["outcome"] == "done"
    assert done["address"] == "f1"
    assert done["freed"] > 0
    sent = it.say("Go on.")
    assert len(texts(sent)) < len(texts(whole)) - 3 * done["freed"]
    assert "src/m7.py fails since Monday" in texts(sent)
    assert it.do("undo").status_code == 200
    assert it.shown()[: len(seen)] == seen


def test_a_page_is_kept_while_others_leave(place: Callable[..., Place]) -> None:
    it = place(window=1500)
    it.say("Hello.")
    it.say("The rule: never touch src/kept.py. " + "It is generated. " * 4)
    assert it.do("pin", body={"pages": "p3"}).json()["done"] == "kept"
    for number in range(12):
        sent = it.say(f"Number {number}: src/m{number}.py has a fault. " + "It fails since Monday. " * 20)
    assert "src/kept.py" in texts(sent)
    assert "src/m1.py has" not in texts(sent)
    refused = it.do("evict", body={"pages": "p3"})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "law_broken"
    assert it.do("unpin", body={"pages": "p3"}).status_code == 200
    assert it.do("evict", body={"pages": "p3"}).status_code == 200
    assert "src/kept.py" not in texts(it.say("Go on."))


def test_a_preview_tells_the_price_and_changes_no_byte(place: Callable[..., Place]) -> None:
    it = place(window=2000)
    for number in range(5):
        it.say(f"Number {number}: src/m{number}.py has a fault. " * 12)
    for again in (False, True):
        if again:
            it.again()
        before = it.db.read_bytes()
        wal = Path(f"{it.db}-wal")
        logged = wal.read_bytes() if wal.exists() else b""
        told = it.get("work/preview?tokens=1500").json()
        assert told["receipts"][0]["left"]
        assert told["after"] < told["use"]
        assert it.get("work/preview").json()["receipts"] == []
        diff = it.get("work/diff?turn=2&until=4").json()
        assert diff["came"] == ["p3-p4"]
        assert it.db.read_bytes() == before
        assert (wal.read_bytes() if wal.exists() else b"") == logged


def test_a_preview_of_a_compaction_says_what_the_compaction_does(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=8000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("work")
        for number in range(12):
            session.append(user(f"{number}: decided to keep src/m{number}.py. " + "More was said. " * 30))
        for pages in ("p3-p6", None):
            before, head = session.prompts.use, session.ledger.head
            told = preview(session, pages=pages)
            assert (session.prompts.use, session.ledger.head, session.ledger.receipts()) == (
                before,
                head,
                session.ledger.receipts(),
            )
            assert isinstance(told, Preview)
            done = compact(session, None, pages=pages)
            assert told.after == session.prompts.use
            assert told.use - told.after == done.freed
            assert told.receipts[0].left == session.ledger.receipts()[-1].left
            session.edits.undo()
            assert session.prompts.use == before


@pytest.mark.parametrize(
    ("verb", "body", "status", "code"),
    [
        ("evict", {"pages": "p99"}, 404, "unknown_address"),
        ("evict", {"pages": "x"}, 404, "unknown_address"),
        ("evict", {}, 400, "invalid_request"),
        ("evict", {"pages": "p1", "more": 1}, 400, "invalid_request"),
        ("evict", {"pages": ["p1"]}, 400, "invalid_request"),
        ("evict", {"pages": "p3"}, 409, "law_broken"),
        ("undo", {}, 409, "not_possible"),
        ("undo", {"tokens": 0}, 400, "invalid_request"),
        ("compact", {"keep": 0}, 400, "invalid_request"),
        ("compact", {"pages": "p1-p99"}, 404, "unknown_address"),
        ("pin", {"pages": "p1-p3", "tokens": 3}, 400, "invalid_request"),
        ("forget", {"pages": "p1"}, 404, "unknown_url"),
        ("preview", {}, 405, "method_not_allowed"),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(
    place: Callable[..., Place], verb: str, body: Json, status: int, code: str
) -> None:
    it = place()
    it.say("Hello.")
    it.say("And again.")
    before = it.shown()
    refused = it.do(verb, body=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
    assert str(it.db) not in refused.text
    assert it.shown() == before
    assert it.get("work/diff").status_code == 400
    assert it.get("work/diff?turn=99").status_code == 404
    assert it.get("work/preview?tokens=-1").status_code == 400
    assert it.get("work/preview?tokens=99999").status_code == 400
    assert it.do("undo", name="nobody").status_code == 404
    assert it.do("undo", name="@responses").status_code == 404
    assert it.do("undo", name="").status_code == 404


def test_a_key_reaches_the_sessions_that_it_may_see_and_no_other(place: Callable[..., Place]) -> None:
    keys = {
        "app": Key(tenant="acme"),
        "ana": Key(tenant="acme", user="ana"),
        "bob": Key(tenant="acme", user="bob"),
        "other": Key(tenant="other"),
        "figures": Key(figures=True),
    }
    it = place(keys)
    made = {"ana": ("ana", {}), "bob": ("bob", {}), "of nobody": ("app", {}), "of carol": ("app", {"user": "carol"})}
    for name, (key, more) in made.items():
        it.talk = []
        it.say(f"I am {name}. " * 5, key, name, **more)
        it.say("Go on.", key, name, **more)
    seen = {
        ("app", ""): {"of nobody", "of carol"},
        ("app", "carol"): {"of carol"},
        ("app", "dora"): set(),
        ("ana", ""): {"ana"},
        ("bob", ""): {"bob"},
        ("other", ""): set(),
    }
    for (key, end_user), names in seen.items():
        more = {"user": end_user} if end_user else {}
        for name in made:
            told = it.get(f"{quote(name)}/preview", key, **more)
            assert told.status_code == (200 if name in names else 404), (key, end_user, name)
            nothing = it.get("nothing/preview", key, **more)
            assert name in names or told.json() == nothing.json(), "a refusal tells what exists"
            before = it.shown("acme", name)
            done = it.do("evict", key, name, {"pages": "p2"}, **more)
            assert done.status_code == (200 if name in names else 404)
            assert (it.shown("acme", name) != before) == (name in names)
            if name in names:
                assert it.do("undo", key, name, **more).status_code == 200
    assert it.get("ana/preview", "figures").status_code == 403
    assert it.do("undo", "figures", "ana").status_code == 403
    for headers in ({}, {"x-api-key": "kilburn-00000000-" + "A" * 43}):
        assert it.http.post(f"{it.url}/sessions/ana/undo", headers=headers).status_code == 401


def test_a_web_page_changes_nothing(place: Callable[..., Place]) -> None:
    it = place()
    it.say("Hello.")
    it.say("Go on.")
    before = it.shown()
    for origin in ("https://evil.example", "null", it.url):
        refused = it.http.post(f"{it.url}/sessions/work/evict", content='{"pages": "p1"}', headers={"origin": origin})
        assert refused.status_code == 403
    assert it.shown() == before


def test_a_session_of_another_program_keeps_its_own_window(place: Callable[..., Place]) -> None:
    it = place(window=1000)
    with kilburn.open(str(it.db), window=9000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("an agent's/b 1")
        for number in range(8):
            session.append(user(f"{number}: " + "said by an agent. " * 50))
        session.render()
        held = len(session.window.resident())
        assert session.prompts.use > 1000
        assert it.do("evict", name="an agent's/b 1", body={"pages": "p2"}).json()["pages"] == ["p2"]
        session.ledger.refresh()
        assert len(session.window.resident()) == held - 1
        assert it.do("undo", name="an agent's/b 1").status_code == 200
        assert it.do("undo", name="an agent's/b 1").status_code in (200, 409)


def test_a_change_beside_a_running_request_waits_for_nobody_and_breaks_nothing(place: Callable[..., Place]) -> None:
    it = place()
    for number in range(4):
        it.say(f"Number {number}: src/m{number}.py has a fault. " * 4)
    asked, goes_on = threading.Event(), threading.Event()

    def slow(sent: Any) -> str:
        asked.set()
        goes_on.wait(600)
        return "It took a while."

    it.upstream.otherwise = slow
    answer: list[Json] = []
    running = threading.Thread(target=lambda: answer.append(it.say("Take your time.")))
    running.start()
    try:
        assert asked.wait(600)
        assert it.do("evict", body={"pages": "p3"}).status_code == 200
        assert it.do("pin", body={"pages": "p5"}).status_code == 200
    finally:
        goes_on.set()
        running.join()
    assert "src/m1.py" in texts(answer[0]), "the request had gone out before"
    it.upstream.otherwise = "Noted."
    sent = it.say("And now?")
    assert "src/m1.py" not in texts(sent)
    with it.store() as store:
        assert len(store.sessions()) == 1, "no branch was begun"
        assert store.session("work").window.turn == len(it.talk)


def test_changes_at_once_are_all_made_or_refused_whole(place: Callable[..., Place]) -> None:
    it = place()
    for number in range(8):
        it.say(f"Number {number}: src/m{number}.py has a fault. " * 4)
    told: list[int] = []

    def change(number: int) -> None:
        for _ in range(4):
            told.append(it.do("evict", body={"pages": f"p{number}"}).status_code)
            told.append(it.do("undo").status_code)

    threads = [threading.Thread(target=change, args=(number,)) for number in (3, 5, 7)]
    for thread in threads:
        thread.start()
    for number in range(4):
        it.say(f"Meanwhile {number}.")
    for thread in threads:
        thread.join()
    assert set(told) <= {200, 409}
    assert told.count(200) > 6
    with it.store() as store:
        session = store.session("work")
        assert [message["content"] for message in session.contents.messages()] == [message["content"] for message in it.talk]
        assert len(store.sessions()) == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_examples_of_the_page_run(place: Callable[..., Place]) -> None:
    it = place({"ana": Key(user="ana")})
    for number in range(8):
        it.say(f"Number {number}: src/m{number}.py fails since Monday. " + "More was said about it. " * 20, "ana")
    page = (Path(__file__).parents[2] / "docs" / "howto" / "gateway-dashboard.md").read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) for line in block.splitlines() if line]
    told = []
    for command in commands:
        assert command.startswith("curl ")
        words = ["bash", "-c", command.replace("http://127.0.0.1:8000", it.url)]
        ran = subprocess.run(
            words, env={**os.environ, "KILBURN_KEY": it.keys["ana"]}, capture_output=True, timeout=600, check=True
        )
        told.append(json.loads(ran.stdout))
    assert [answer.get("error") for answer in told] == [None] * 7
    preview, diff, compact_, undo, evict, pin, unpin = told
    assert (preview["tokens"], diff["came"], compact_["outcome"]) == (2000, ["p4-p9"], "done")
    assert [one["done"] for one in (undo, evict, pin, unpin)] == ["taken back", "let go", "kept", "may leave again"]

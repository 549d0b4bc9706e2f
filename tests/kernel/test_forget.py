"""Forgetting is the one loss there is, and it is whole: no byte of it in any place that Kilburn writes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import apsw
import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Forgotten, OrphanResult
from kilburn.kernel.session import Session
from kilburn.memory import memory_tools
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Evict, Fold, Retire
from kilburn.page import Place
from kilburn.testing import check_laws

CANARY = "zanzibar-canary-7731"


def bytes_below(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.iterdir()))


def everything_shown(session: Session) -> str:
    texts = [
        json.dumps(session.render()),
        json.dumps(session.render("messages")),
        json.dumps(session.contents.messages()),
        repr(session.contents.pages()),
    ]
    texts += [repr(list(session.ledger.events())), repr(session.search(CANARY, tokens=10_000)), repr(session.stats())]
    return "".join(texts)


def test_every_derived_place_is_reached(tmp_path: Path) -> None:
    store = kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4")
    session = store.session("a")
    session.append(user("go"), assistant(f"the key is {CANARY}"), assistant(None, call_of("c")), tool("c", "harmless"))
    session.append(assistant("more words " * 40))
    (fold,) = session.edits.apply(Fold((2, 5), text=f"In short: {CANARY}"))
    session.append(assistant(None, call_of("r", "recall", address="p2")))
    session.append(memory_tools.call(session, "recall", '{"address": "p2"}', "r").message("r"))
    assert CANARY in session.recall("p7")
    assert store.search(CANARY)
    session.pin("p7")
    session.rate("p2")
    session.render()
    gone = session.forget("p2", why="a person asked")
    assert {"p2", fold, "p7"} <= set(gone)
    for address in gone:
        with pytest.raises(Forgotten):
            session.recall(address)
    assert CANARY not in everything_shown(session)
    assert session.recall("p4") == "harmless"
    assert session.recall("p5") == "more words " * 40
    check_laws(session)
    session.append(user("go on"))
    store.close()
    assert CANARY.encode() not in bytes_below(tmp_path)
    assert b"zanzibar" not in bytes_below(tmp_path)
    with kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4") as again:
        reopened = again.session("a")
        assert CANARY not in everything_shown(reopened)
        with pytest.raises(Forgotten):
            reopened.recall("p2")
        check_laws(reopened)


@pytest.mark.parametrize("place", ["arguments", "name", "id", "result", "extra", "thinking", "image", "opaque", "title"])
def test_canaries_in_every_corner(place: str, tmp_path: Path) -> None:
    """Labels, call ids, leftovers of the wire form: all of it was the page's."""
    canary = CANARY
    messages: dict[str, list[dict[str, Any]]] = {
        "arguments": [assistant(None, call_of("c", path=canary)), tool("c", "x")],
        "name": [assistant(None, call_of("c", canary)), tool("c", "x")],
        "id": [assistant(None, call_of(canary)), tool(canary, "x")],
        "result": [assistant(None, call_of("c")), tool("c", canary)],
        "extra": [{"role": "user", "name": canary, "content": "x"}, user("y")],
        "thinking": [
            {
                "role": "assistant",
                "content": [{"type": "thinking", "thinking": canary, "signature": canary}, {"type": "text", "text": "x"}],
            },
            user("y"),
        ],
        "image": [
            user([{"type": "image_url", "image_url": {"url": f"https://example.org/{canary}.png", "detail": "low"}}]),
            user("y"),
        ],
        "opaque": [user([{"type": "document", "title": canary}]), user("y")],
        "title": [user([{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", "note": canary}}]), user("y")],
    }
    with kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("go"))
        for message in messages[place]:
            session.append(message)
        session.append(user("more"))
        session.edits.apply(Evict((2, 3)))
        session.render()
        last = session.window.last - 1
        session.forget(f"p2-p{last}")
        assert canary not in everything_shown(session)
        check_laws(session)
        session.append(user("after"))
    assert canary.encode() not in bytes_below(tmp_path)


def test_a_result_for_a_forgotten_call_has_no_place() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("go"), assistant(None, call_of("c")))
        session.forget("p2")
        with pytest.raises(OrphanResult):
            session.append(tool("c", "late"))
        check_laws(session)


def test_same_text_elsewhere_stays() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        one, two = store.session("one"), store.session("two")
        one.append(user(CANARY), user("x"), user(CANARY))
        two.append(user(CANARY))
        one.forget("p1")
        assert one.recall("p3") == CANARY
        assert two.recall("p1") == CANARY
        assert {(hit.session, hit.address) for hit in store.search(CANARY)} == {("one", "p3"), ("two", "p1")}


def test_a_recalled_copy_is_reached() -> None:
    """What a session's own message cites is forgotten with it; the citing pages of one session only."""
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user(CANARY))
        session.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=f"you said {CANARY}"),), sources=(1,)))
        session.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=f"and again {CANARY}"),), sources=(2,)))
        assert session.forget("p1") == ["p1", "p2", "p3"]
        assert CANARY not in everything_shown(session)


def test_tenants_never_see_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "shared.db")
    rng = random.Random(5)
    tenants = ["alice", "bob", "alice ", "ALICE", "alice'; --", "", "%"]
    canaries = {tenant: f"canary{number}secret" for number, tenant in enumerate(tenants)}
    opened = {}
    for tenant in tenants:
        try:
            opened[tenant] = kilburn.open(path, window=500, policy="fifo", tokenizer="chars/4", tenant=tenant)
        except kilburn.KilburnError:
            assert not tenant.strip(), "only an empty tenant is refused"
    assert len(opened) >= 6
    for _ in range(40):
        tenant = rng.choice(list(opened))
        session = opened[tenant].session(rng.choice(["session", f"private of {canaries[tenant]}"]))
        session.append(user(f"shared words {canaries[tenant]} " + "common " * rng.randrange(60)))
    for tenant, store in opened.items():
        others = [canary for other, canary in canaries.items() if other != tenant]
        seen = repr(store.sessions()) + repr(store.search("shared words common " + " ".join(others), tokens=10**6, limit=1000))
        for info in store.sessions():
            session = store.session(info.name)
            seen += "".join(session.recall(f"p1-p{session.window.last}").parts) if session.window.last else ""
            seen += json.dumps(session.contents.messages()) + repr(list(session.ledger.events()))
        assert not [canary for canary in others if canary in seen]
        assert canaries[tenant] in seen or not store.sessions()
    forgetful = opened["alice"].session("session")
    if forgetful.window.last:
        forgetful.forget(f"p1-p{forgetful.window.last}")
    assert opened["bob"].search("shared", tokens=10**6)
    for store in opened.values():
        store.close()


def test_a_corrupt_page_is_named_and_the_rest_is_readable(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.db")
    texts = [f"page {number}: " + "".join(random.Random(number).choices("abcdefgh", k=3000)) for number in range(5)]
    with kilburn.open(path, window=200, policy="fifo", tokenizer="chars/4") as store:
        for text in texts:
            store.session("a").append(user(text))
    with apsw.Connection(path) as db:
        find = "SELECT content.id, data FROM content JOIN page ON page.content = content.id WHERE page.id = 2"
        ((number, data),) = db.execute(find)
        flipped = bytes([*data[:50], data[50] ^ 0xFF, *data[51:]])
        db.execute("UPDATE content SET data = ? WHERE id = ?", (flipped, number))
    db.close()
    with kilburn.open(path, window=200, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        with pytest.raises(kilburn.errors.StoreCorrupt, match="fsck"):
            session.recall("p2")
        assert [session.recall(f"p{page}") for page in (1, 3, 4, 5)] == [texts[0], *texts[2:]]
        session.append(user("still at work"))
        assert session.render().tokens <= 200


def read_all(path: Path) -> str:
    with kilburn.open(str(path), policy="fifo", tokenizer="chars/4") as store:
        return store.session("a").recall("p1-p50")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=200, policy="fifo", tokenizer="chars/4") as store:
        for number in range(50):
            store.session("a").append(user(f"{number} " + "x" * 2000))
    whole = path.read_bytes()
    for size in (100, 5000, len(whole) // 2):
        cut = tmp_path / f"cut{size}.db"
        cut.write_bytes(whole[:size])
        with pytest.raises(kilburn.errors.StoreCorrupt) as caught:
            read_all(cut)
        assert str(caught.value).startswith("store: ")
    (tmp_path / "text.db").write_text("no database at all, " * 100)
    with pytest.raises(kilburn.errors.StoreCorrupt):
        kilburn.open(str(tmp_path / "text.db"), policy="fifo")


def test_forgetting_only_the_call_leaves_none_of_its_words_at_its_result(tmp_path: Path) -> None:
    """A result is labelled with what was asked; the label is the call's and goes with it."""
    with kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("go"), assistant(None, call_of("c", path=CANARY)), tool("c", "harmless"), user("more"))
        session.edits.apply(Evict((3,)))
        if "p3" not in session.forget("p2"):
            assert session.recall("p3") == "harmless"
        assert CANARY not in everything_shown(session)
        check_laws(session)
    assert CANARY.encode() not in bytes_below(tmp_path)


def test_a_forgotten_thought_leaves_the_call_that_waits_for_its_result(tmp_path: Path) -> None:
    """Thinking and calls of one message move together, but a result that is still to come needs its call."""
    with kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        thought = {"type": "thinking", "thinking": CANARY, "signature": "s"}
        calls = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in ("c1", "c2")]
        session.append(user("go"), {"role": "assistant", "content": [thought, *calls]})
        session.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2", "content": "two"}]})
        assert session.forget("p2") == ["p2"]
        check_laws(session)
        session.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "one"}]})
        check_laws(session)
        assert "one" in json.dumps(session.render())
        assert CANARY not in everything_shown(session)
    assert CANARY.encode() not in bytes_below(tmp_path)


def test_a_retired_result_leaves_a_call_of_the_same_thought_that_still_waits() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        thought = {"type": "thinking", "thinking": "both at once", "signature": "s"}
        calls = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in ("c1", "c2")]
        session.append(user("go"), {"role": "assistant", "content": [thought, *calls]})
        session.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2", "content": "two"}]})
        session.edits.apply(Retire(pages=(5,), why="outdated"))
        check_laws(session)
        session.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "one"}]})
        check_laws(session)
        shown = json.dumps(session.render())
        assert "one" in shown
        assert "two" not in shown
        assert session.recall("p5") == "two"


def test_a_forgotten_blank_message_is_no_request() -> None:
    """Live, and when the ledger is replayed."""
    backend = Sqlite(":memory:")
    session = Store(backend, Budget(200), "fifo", tokenizer="chars/4").session("a")
    session.append(user("what I want"), assistant("yes"), user(" "))
    assert session.window.request == [1]
    session.forget("p3")
    assert session.window.request == [1]
    check_laws(session)
    assert Store(backend, Budget(200), "fifo", tokenizer="chars/4").session("a").window.request == [1]


def test_a_pin_of_what_belongs_to_it_does_not_leave_a_forgetting_half_done() -> None:
    store = Store(Sqlite(":memory:"), Budget(4000), "fifo", tokenizer="chars/4")
    session = store.session("a")
    session.append(user("go"), assistant(None, call_of("c", key=CANARY)), tool("c", "harmless"), assistant("Done."))
    branch = session.fork("look at it")
    session.pin("p3")
    assert session.forget("p2") == ["p2", "a/b1 p2"]
    for each in (session, branch):
        with pytest.raises(Forgotten):
            each.recall("p2")
        assert each.window.at(3) is Place.OUT
        assert 3 not in each.window.pins
        assert CANARY not in everything_shown(each)
        check_laws(each)
    assert session.recall("p3") == "harmless"

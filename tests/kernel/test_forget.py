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
from kilburn.budget import Budget
from kilburn.errors import Forgotten, OrphanResult
from kilburn.kernel import memory_tools
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Evict, Fold, Retire
from kilburn.testing import Memory, check_laws

CANARY = "zanzibar-canary-7731"


def bytes_below(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted(folder.iterdir()))


def everything_shown(process: Process) -> str:
    texts = [
        json.dumps(process.render()),
        json.dumps(process.render("messages")),
        json.dumps(process.messages()),
        repr(process.pages()),
    ]
    texts += [repr(list(process.events())), repr(process.search(CANARY, tokens=10_000)), repr(process.stats())]
    return "".join(texts)


def test_every_derived_place_is_reached(tmp_path: Path) -> None:
    store = kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4")
    process = store.process("a")
    process.append(user("go"), assistant(f"the key is {CANARY}"), assistant(None, call_of("c")), tool("c", "harmless"))
    process.append(assistant("more words " * 40))
    (fold,) = process.apply(Fold((2, 5), text=f"In short: {CANARY}"))
    process.append(assistant(None, call_of("r", "recall", address="p2")))
    process.append(memory_tools.call(process, "recall", '{"address": "p2"}', "r").message("r"))
    assert CANARY in process.recall("p7")
    assert store.search(CANARY)
    process.pin("p7")
    process.rate("p2")
    process.render()
    gone = process.forget("p2", why="a person asked")
    assert {"p2", fold, "p7"} <= set(gone)
    for address in gone:
        with pytest.raises(Forgotten):
            process.recall(address)
    assert CANARY not in everything_shown(process)
    assert process.recall("p4") == "harmless"
    assert process.recall("p5") == "more words " * 40
    check_laws(process)
    process.append(user("go on"))
    store.close()
    assert CANARY.encode() not in bytes_below(tmp_path)
    assert b"zanzibar" not in bytes_below(tmp_path)
    with kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4") as again:
        reopened = again.process("a")
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
        process = store.process("a")
        process.append(user("go"))
        for message in messages[place]:
            process.append(message)
        process.append(user("more"))
        process.apply(Evict((2, 3)))
        process.render()
        last = process.window.last - 1
        process.forget(f"p2-p{last}")
        assert canary not in everything_shown(process)
        check_laws(process)
        process.append(user("after"))
    assert canary.encode() not in bytes_below(tmp_path)


def test_a_result_for_a_forgotten_call_has_no_place() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        process.append(user("go"), assistant(None, call_of("c")))
        process.forget("p2")
        with pytest.raises(OrphanResult):
            process.append(tool("c", "late"))
        check_laws(process)


def test_same_text_elsewhere_stays() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        one, two = store.process("one"), store.process("two")
        one.append(user(CANARY), user("x"), user(CANARY))
        two.append(user(CANARY))
        one.forget("p1")
        assert one.recall("p3") == CANARY
        assert two.recall("p1") == CANARY
        assert {(hit.session, hit.address) for hit in store.search(CANARY)} == {("one", "p3"), ("two", "p1")}


def test_a_recalled_copy_is_reached() -> None:
    """What a session's own message cites is forgotten with it; the citing pages of one process only."""
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        process.append(user(CANARY))
        process.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=f"you said {CANARY}"),), sources=(1,)))
        process.append(Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=f"and again {CANARY}"),), sources=(2,)))
        assert process.forget("p1") == ["p1", "p2", "p3"]
        assert CANARY not in everything_shown(process)


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
        process = opened[tenant].process(rng.choice(["session", f"private of {canaries[tenant]}"]))
        process.append(user(f"shared words {canaries[tenant]} " + "common " * rng.randrange(60)))
    for tenant, store in opened.items():
        others = [canary for other, canary in canaries.items() if other != tenant]
        seen = repr(store.processes()) + repr(store.search("shared words common " + " ".join(others), tokens=10**6, limit=1000))
        for info in store.processes():
            process = store.process(info.name)
            seen += "".join(process.recall(f"p1-p{process.window.last}").parts) if process.window.last else ""
            seen += json.dumps(process.messages()) + repr(list(process.events()))
        assert not [canary for canary in others if canary in seen]
        assert canaries[tenant] in seen or not store.processes()
    forgetful = opened["alice"].process("session")
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
            store.process("a").append(user(text))
    with apsw.Connection(path) as db:
        find = "SELECT content.id, data FROM content JOIN page ON page.content = content.id WHERE page.id = 2"
        ((number, data),) = db.execute(find)
        flipped = bytes([*data[:50], data[50] ^ 0xFF, *data[51:]])
        db.execute("UPDATE content SET data = ? WHERE id = ?", (flipped, number))
    db.close()
    with kilburn.open(path, window=200, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        with pytest.raises(kilburn.errors.StoreCorrupt, match="fsck"):
            process.recall("p2")
        assert [process.recall(f"p{page}") for page in (1, 3, 4, 5)] == [texts[0], *texts[2:]]
        process.append(user("still at work"))
        assert process.render().tokens <= 200


def read_all(path: Path) -> str:
    with kilburn.open(str(path), policy="fifo", tokenizer="chars/4") as store:
        return store.process("a").recall("p1-p50")


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with kilburn.open(str(path), window=200, policy="fifo", tokenizer="chars/4") as store:
        for number in range(50):
            store.process("a").append(user(f"{number} " + "x" * 2000))
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
        process = store.process("a")
        process.append(user("go"), assistant(None, call_of("c", path=CANARY)), tool("c", "harmless"), user("more"))
        process.apply(Evict((3,)))
        if "p3" not in process.forget("p2"):
            assert process.recall("p3") == "harmless"
        assert CANARY not in everything_shown(process)
        check_laws(process)
    assert CANARY.encode() not in bytes_below(tmp_path)


def test_a_forgotten_thought_leaves_the_call_that_waits_for_its_result(tmp_path: Path) -> None:
    """Thinking and calls of one message move together, but a result that is still to come needs its call."""
    with kilburn.open(str(tmp_path / "agent.db"), window=4000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        thought = {"type": "thinking", "thinking": CANARY, "signature": "s"}
        calls = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in ("c1", "c2")]
        process.append(user("go"), {"role": "assistant", "content": [thought, *calls]})
        process.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2", "content": "two"}]})
        assert process.forget("p2") == ["p2"]
        check_laws(process)
        process.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "one"}]})
        check_laws(process)
        assert "one" in json.dumps(process.render())
        assert CANARY not in everything_shown(process)
    assert CANARY.encode() not in bytes_below(tmp_path)


def test_a_retired_result_leaves_a_call_of_the_same_thought_that_still_waits() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        thought = {"type": "thinking", "thinking": "both at once", "signature": "s"}
        calls = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in ("c1", "c2")]
        process.append(user("go"), {"role": "assistant", "content": [thought, *calls]})
        process.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c2", "content": "two"}]})
        process.apply(Retire(pages=(5,), why="outdated"))
        check_laws(process)
        process.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "one"}]})
        check_laws(process)
        shown = json.dumps(process.render())
        assert "one" in shown
        assert "two" not in shown
        assert process.recall("p5") == "two"


def test_a_forgotten_blank_message_is_no_request() -> None:
    """Live, and when the ledger is replayed."""
    store = Memory()
    process = Hierarchy(store, Budget(200), "fifo", tokenizer="chars/4").process("a")
    process.append(user("what I want"), assistant("yes"), user(" "))
    assert process.window.request == [1]
    process.forget("p3")
    assert process.window.request == [1]
    check_laws(process)
    assert Hierarchy(store, Budget(200), "fifo", tokenizer="chars/4").process("a").window.request == [1]

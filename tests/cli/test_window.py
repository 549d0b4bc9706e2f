"""`window`: what would leave a prompt, two prompts compared, and changes by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn as package
from cli.terminal import kilburn
from kernel.talk import user
from kilburn.model import Tokens


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A store whose session `night shift` was summarised twice."""
    path = tmp_path / "agent.db"
    with package.open(str(path), window=600, policy="summarize", tokenizer="chars/4") as store:
        session = store.session("night shift")
        for number in range(20):
            session.append(user(f"{number}: decided to keep src/m{number}.py. " + "More was said. " * (14 if number > 15 else 8)))
            session.render()
    return path


def shown(db: Path) -> list[tuple[str, str]]:
    with package.open(str(db), window=600, policy="fifo", tokenizer="chars/4", readonly=True) as store:
        return [(page.address if page else "", instead) for _, page, instead in store.session("night shift").contents.shown()]


def test_a_preview_names_the_policy_and_the_price_and_changes_no_byte(db: Path) -> None:
    before = db.read_bytes()
    free = kilburn("window", "preview", "night shift", "--db", db)
    assert free.status == 0
    assert "nothing would leave" in free.out
    found = kilburn("window", "preview", "night shift", "--tokens", "400", "--db", db, "--json").json
    assert found["policy"] == "summarize"
    assert found["receipts"][0]["left"]
    assert found["after"] <= found["capacity"] - 400
    said = kilburn("window", "preview", "night shift", "--tokens", "400", "--db", db).out
    assert f"{found['after']} afterwards, without the message asked about, {found['again']} of which" in said
    other = kilburn("window", "preview", "night shift", "--tokens", "400", "--policy", "fifo", "--db", db, "--json").json
    assert {one["policy"] for one in other["receipts"]} == {"fifo"}
    assert db.read_bytes() == before


def test_what_was_let_go_pinned_or_compacted_by_hand_is_undone(db: Path) -> None:
    before = shown(db)
    for words in (("evict", "p18"), ("pin", "p3"), ("compact", "p17-p18"), ("undo",)):
        done = kilburn("window", words[0], "night shift", *words[1:], "--db", db)
        assert (done.status, done.err) == (0, "")
        assert shown(db) != before
        if words[0] == "pin":
            assert ("p3", "") in shown(db)
            assert kilburn("window", "unpin", "night shift", "p3", "--db", db).status == 0
        if words[0] != "undo":
            assert kilburn("window", "undo", "night shift", "--db", db).status == 0
            assert shown(db) == before
    assert kilburn("fsck", "--db", db).status == 0


def test_what_the_agents_window_cannot_hold_is_refused(db: Path) -> None:
    assert kilburn("window", "undo", "night shift", "--db", db).status == 0
    before = shown(db)
    for words in (("undo", "night shift"), ("pin", "night shift", "p1-p20"), ("evict", "night shift", "p20")):
        refused = kilburn("window", *words, "--db", db)
        assert refused.status == 2
        assert "law" in refused.err
        assert shown(db) == before
    assert kilburn("window", "undo", "night shift", "--window", "2000", "--db", db).status == 0
    assert len(shown(db)) > len(before)
    assert kilburn("window", "preview", "night shift", "--tokens", "900", "--db", db).status == 2
    assert kilburn("window", "diff", "night shift", "99", "--db", db).status == 2


def test_two_prompts_are_compared(db: Path) -> None:
    found = kilburn("window", "diff", "night shift", "12", "13", "--db", db, "--json").json
    assert found["came"] == ["p13"]
    assert found["left"] == []
    assert 0 < found["kept"] == found["before"]
    assert "the same" in kilburn("window", "diff", "night shift", "5", "--db", db).out


def test_what_a_provider_reported_corrects_a_preview_and_a_pin_once(tmp_path: Path) -> None:
    """The gateway and the dashboard have the same function."""
    db = tmp_path / "a.db"
    with package.open(str(db), window=1000, policy="fifo", embedder=None) as store:
        session = store.session("a")
        for number in range(60):
            session.append(user(f"{number}: " + "valve " * 20))
            tokens = session.render().tokens
            session.prompts.observe(Tokens(prompt=tokens // 2), tokens)
        session.render()
        capacity, use = session.prompts.capacity, session.prompts.use
        assert 1800 < capacity < 2000
    found = kilburn("window", "preview", "a", "--tokens", str(capacity - use - 30), "--db", db, "--json").json
    assert (found["capacity"], found["use"], found["receipts"]) == (capacity, use, [])
    assert kilburn("window", "preview", "a", "--tokens", str(capacity - use + 30), "--db", db, "--json").json["receipts"]
    assert kilburn("window", "pin", "a", "p1-p60", "--db", db).status == 2
    assert kilburn("window", "pin", "a", "p1-p10", "--db", db).status == 0

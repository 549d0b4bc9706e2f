"""`sessions` and `cold`: what they say, what they refuse, and that nothing happens without a yes."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn as package
from cli.terminal import kilburn, program, write_jsonl
from kilburn.page import digest_of


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path, words = tmp_path / "agent.db", " ".join(digest_of(str(number)) for number in range(30))
    for name in ("one", "two"):
        rows = [{"role": "user", "content": f"{name}: {words}"}, {"role": "assistant", "content": "Well."}]
        done = kilburn("import", write_jsonl(tmp_path / "talk.jsonl", rows), "--session", name, "--db", path)
        assert done.status == 0, done.err
    return path


def names(db: Path) -> list[str]:
    return [row["session"] for row in kilburn("ps", "--db", db, "--json").json]


def test_sessions_end_on_command(db: Path) -> None:
    dry = kilburn("sessions", "expire", "--older-than", "0s", "--forget", "--dry-run", "--db", db)
    assert dry.out.count("would go: all of") == 2
    refused = program("sessions", "expire", "--older-than", "0s", "--forget", "--db", db, folder=db.parent)
    assert refused.status == 2
    assert "nothing was forgotten" in refused.err
    assert names(db) == ["one", "two"]
    done = kilburn("sessions", "expire", "--older-than", "0s", "--forget", "--yes", "--json", "--db", db).json
    assert done["forgotten"] == ["one", "two"]
    assert [receipt["whole"] for receipt in done["receipts"]] == [["one"], ["two"]]
    assert names(db) == []
    assert kilburn("fsck", "--db", db).status == 0


def test_whoever_is_asked_and_says_nothing_has_changed_nothing(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    with package.open(str(db), window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        store.session("work").append({"role": "user", "content": "Book a table. " * 20})
    before = kilburn("stats", "work", "--db", db, "--json").json
    refused = program("sessions", "expire", "--older-than", "0s", "--forget", "--db", db, folder=tmp_path)
    assert "nothing was forgotten" in refused.err
    assert kilburn("stats", "work", "--db", db, "--json").json == before
    with package.open(str(db), window=2000, policy="fifo", embedder=None, readonly=True) as store:
        told = [event.data["tokenizer"] for event in store.session("work").ledger.events() if "tokenizer" in event.data]
    assert told == ["chars/4"]
    assert kilburn("fsck", "--db", db).status == 0


def test_a_rule_is_kept_and_applied(db: Path) -> None:
    assert "no rule" in kilburn("sessions", "expire", "--yes", "--db", db).err
    assert names(db) == ["one", "two"]
    refused = kilburn("sessions", "rule", "--archive-after", "1d", "--db", db)
    assert refused.status == 2
    assert "no cold place" in refused.err
    assert kilburn("sessions", "rule", "--forget-after", "2d", "--json", "--db", db).json == {
        "archive": None,
        "forget": 172800.0,
        "branches": None,
    }
    assert "nothing is due" in kilburn("sessions", "expire", "--yes", "--db", db).out
    assert kilburn("sessions", "rule", "--forget-after", "0s", "--db", db).status == 0
    assert "no session has expired" in kilburn("sessions", "receipts", "--db", db).out
    assert kilburn("sessions", "expire", "--yes", "--db", db).status == 0
    assert names(db) == []
    shown = kilburn("sessions", "receipts", "--db", db).out
    assert "forgotten: " in shown
    assert "one" not in shown.split()
    assert {one["whole"] for one in kilburn("sessions", "receipts", "--json", "--db", db).json} == {True}
    assert kilburn("sessions", "rule", "--never", "--db", db).status == 0
    assert kilburn("sessions", "rule", "--json", "--db", db).json == {"archive": None, "forget": None, "branches": None}


@pytest.mark.parametrize(
    "words",
    [
        ("sessions", "expire", "--older-than", "30d"),
        ("sessions", "expire", "--forget"),
        ("sessions", "expire", "--older-than", "30d", "--archive", "--forget"),
        ("sessions", "expire", "--older-than", "soon", "--forget"),
        ("sessions", "rule", "--never", "--forget-after", "1d"),
        ("sessions", "rule", "--archive-after", "2d", "--forget-after", "1d"),
        ("cold", "move"),
        ("cold", "set", "nowhere://at/all"),
    ],
)
def test_what_makes_no_sense_is_refused(db: Path, words: tuple[str, ...]) -> None:
    before = kilburn("export", "--db", db, "--no-note").raw
    done = kilburn(*words, "--db", db)
    assert done.status in (1, 2)
    assert done.err.strip()
    assert kilburn("export", "--db", db, "--no-note").raw == before


def test_a_cold_place_of_no_store_is_refused(tmp_path: Path) -> None:
    done = kilburn("cold", "set", tmp_path / "place", "--db", tmp_path / "none.db")
    assert done.status == 2
    assert "there is no store" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_move_that_moves_nothing_says_what_stays(db: Path, tmp_path: Path) -> None:
    assert kilburn("cold", "set", tmp_path / "place", "--db", db).status == 0
    done = kilburn("cold", "move", "--older-than", "30d", "--db", db)
    assert done.out == "moved: 0 texts, 0 bytes\n"
    assert "fewer than 100 tokens" in done.err


def test_texts_go_and_come_back(db: Path) -> None:
    pytest.importorskip("obstore")
    before = kilburn("recall", "one", "p1", "--db", db).raw
    place, key = db.parent / "cold", db.parent / "key"
    assert kilburn("cold", "set", place, "--key", key, "--db", db).status == 0
    assert kilburn("cold", "move", "--older-than", "0s", "--dry-run", "--json", "--db", db).json["texts"] >= 2
    assert kilburn("cold", "move", "--older-than", "0s", "--json", "--db", db).json["texts"] == 2
    assert kilburn("recall", "one", "p1", "--db", db).raw == before
    assert kilburn("cold", "set", db.parent / "other", "--db", db).status == 2
    (object_, *_) = [path for path in place.rglob("*") if path.is_file()]
    kept = object_.read_bytes()
    object_.unlink()
    scrubbed = kilburn("cold", "scrub", "--db", db)
    assert scrubbed.status == 1
    assert object_.name in scrubbed.out
    checked = kilburn("fsck", "--db", db)
    assert checked.status == 1
    assert object_.name in checked.out
    object_.write_bytes(kept)
    assert kilburn("cold", "scrub", "--json", "--db", db).json == {"texts": 2, "findings": []}
    assert kilburn("cold", "back", "--db", db).status == 0
    assert not [path for path in place.rglob("*") if path.is_file()]
    assert kilburn("recall", "one", "p1", "--db", db).raw == before

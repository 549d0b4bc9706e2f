"""`workflows` and `guidelines`, as a newcomer runs them."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn as library
from cli.terminal import kilburn
from shell_talk import work


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "agent.db"
    with library.open(str(path), tokenizer="chars/4", embedder=None) as store:
        session = store.session("monday", user="ana")
        work(session, "Sort a.txt into b.txt.", ("ls bin", "ord"), ("ord a.txt b.txt", ""))
        session.append({"role": "user", "content": "No, it should be reversed, because the list is long."})
    return path


def test_a_success_is_learned_and_listed(db: Path) -> None:
    none = kilburn("workflows", "list", "--user", "ana", "--db", db)
    assert none.out.endswith("0 workflows\n")
    assert "kilburn workflows learn SESSION" in none.err
    told = kilburn("workflows", "learn", "monday", "--succeeded", "--db", db)
    assert (told.status, told.out) == (0, "learned: workflows/sort\n1 won, 0 lost, 0 known already\n")
    (row,) = kilburn("workflows", "list", "--user", "ana", "--db", db, "--json").json
    assert row == {
        "note": "workflows/sort",
        "won": 0,
        "lost": 0,
        "steps": 1,
        "trust": "tool",
        "goal": "Sort {file1} into {file2}.",
    }
    again = kilburn("workflows", "learn", "monday", "--succeeded", "--db", db)
    assert again.out == "0 won, 0 lost, 0 known already\n"
    assert "no task of monday is new" in again.err
    assert kilburn("workflows", "learn", "monday", "--succeeded", "--db", db, "--json").json["learned"] == []


@pytest.mark.parametrize("words", [("monday",), ("monday", "--succeeded", "--induce", "model"), ("monday", "--induce", "guess")])
def test_somebody_must_judge(db: Path, words: tuple[str, ...]) -> None:
    said = kilburn("workflows", "learn", *words, "--db", db)
    assert said.status != 0
    assert "give" in said.err
    assert kilburn("workflows", "list", "--user", "ana", "--db", db, "--json").json == []


def test_feedback_is_learned_and_unaligned(db: Path) -> None:
    told = kilburn("guidelines", "learn", "monday", "--db", db)
    assert told.out.splitlines() == [
        "learned: guidelines/list-long  If the list is long: reversed.",
        "1 message of feedback, 1 kept as examples",
    ]
    assert kilburn("guidelines", "unalign", "monday", "p7", "--db", db).status != 0
    gone = kilburn("guidelines", "unalign", "monday", "p7", "--yes", "--db", db)
    assert gone.status == 0
    assert "forgotten: p7\n" in gone.out
    assert "2 notes" in gone.out
    assert kilburn("notes", "list", "--user", "ana", "--db", db, "--json").json == []


def test_a_session_that_is_not_there(db: Path) -> None:
    for words in (("workflows", "learn", "no", "--failed"), ("guidelines", "learn", "no"), ("guidelines", "unalign", "no", "p1")):
        said = kilburn(*words, "--db", db)
        assert (said.status != 0, "no session 'no'" in said.err) == (True, True)

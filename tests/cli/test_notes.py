"""`notes`, as a newcomer runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.terminal import kilburn

ANA = ("--user", "ana")


@pytest.fixture
def db(tmp_path: Path) -> Path:
    path = tmp_path / "agent.db"
    assert kilburn("notes", "write", "core/human", "Ana drinks tea.", *ANA, "--db", path).status == 0
    return path


def run(*words: object, db: Path) -> Any:
    said = kilburn("notes", *words, *ANA, "--db", db, "--json")
    assert said.status == 0, said.err
    return said.json


def test_versions_of_a_note_are_written_compared_and_restored(db: Path) -> None:
    second = run("write", "core/human", "Ana drinks coffee.", db=db)
    assert (second["address"], second["trust"], second["in_force"]) == ("f1", "user", True)
    assert [(row["address"], row["text"]) for row in run("history", "core/human", db=db)] == [
        ("p1", "Ana drinks tea."),
        ("f1", "Ana drinks coffee."),
    ]
    assert run("diff", "core/human", db=db)["diff"].splitlines()[-2:] == ["-Ana drinks tea.", "+Ana drinks coffee."]
    assert run("read", "core/human", "--version", "p1", db=db)["text"] == "Ana drinks tea."
    assert run("restore", "core/human", "p1", db=db)["address"] == "p1"
    assert kilburn("notes", "read", "core/human", *ANA, "--db", db).out == "Ana drinks tea.\n"
    assert run("rename", "core/human", "core/ana", db=db)["note"] == "core/ana"
    assert run("delete", "core/ana", db=db)["in_force"] is False
    assert run("list", db=db) == []
    assert run("forget", "core/ana", "--yes", db=db)["places"]["notes"] == 3
    assert kilburn("notes", "history", "core/ana", *ANA, "--db", db).status == 2


def test_what_cannot_be_done_says_why_and_ends_with_2(db: Path) -> None:
    for words, said in (
        (("write", "../x", "x"), "leads elsewhere"),
        (("read", "core/robot"), "core/human"),
        (("read", "core/human", "--version", "p9"), "no version"),
        (("import", "nowhere"), "nowhere"),
    ):
        done = kilburn("notes", *words, *ANA, "--db", db)
        assert done.status == 2, words
        assert said in done.err
    done = kilburn("notes", "list", "--db", db)
    assert (done.status, "--user: 'ana'" in done.err) == (2, True)


def test_a_folder_goes_out_and_its_edits_come_back(db: Path, tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    assert run("export", folder, db=db)["written"] == ["core/human"]
    (folder / "core" / "human.md").write_text("Ana drinks milk.\n", encoding="utf-8")
    run("write", "core/human", "Ana drinks water.", db=db)
    done = kilburn("notes", "import", folder, *ANA, "--db", db)
    assert done.status == 1
    assert "-Ana drinks water." in done.out
    assert "+Ana drinks milk." in done.out
    assert "--resolved" in done.err
    assert json.loads(kilburn("notes", "import", folder, *ANA, "--db", db, "--json").out)["conflicts"]
    assert run("import", folder, "--resolved", "core/human", db=db)["written"] == ["core/human"]
    assert run("read", "core/human", db=db)["text"] == "Ana drinks milk.\n"

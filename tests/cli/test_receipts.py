"""`receipts`: what left, why, by which policy, and how to get it back."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import kilburn as package
from cli.terminal import kilburn
from kernel.talk import user
from kilburn.errors import Unavailable
from kilburn.move import Bring
from kilburn.testing import Scripted


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A store whose session `two words` was summarised, and whose session `cut off` had a model that failed."""
    path = tmp_path / "agent.db"
    with package.open(str(path), window=600, policy="summarize", tokenizer="chars/4") as store:
        session = store.session("two words")
        for number in range(40):
            session.append(user(f"{number} decided to keep src/m{number}.py " + "word " * 30))
    model = Scripted([Unavailable("no connection")] * 100)
    with package.open(str(path), window=600, policy="summarize", tokenizer="chars/4", model=model) as store:
        session = store.session("cut off")
        for number in range(12):
            session.append(user(f"{number} decided to keep src/m{number}.py " + "word " * 30))
    return path


def test_every_command_line_of_a_receipt_gives_its_text_back(db: Path) -> None:
    receipts = kilburn("receipts", "two words", "--db", db, "--json").json["receipts"]
    assert len(receipts) > 3
    told = 0
    for receipt in receipts:
        assert (receipt["policy"], receipt["outcome"], receipt["why"]) == ("summarize", "done", "extract")
        assert receipt["freed"] > 0
        assert receipt["folds"]
        for line in receipt["recall"]:
            words = shlex.split(line)
            assert words[:3] == ["kilburn", "recall", "two words"]
            said = kilburn(*words[1:], "--db", db)
            assert said.status == 0
            assert "decided to keep src/m" in said.out
            told += 1
    assert told >= len(receipts)


def test_the_table_says_what_the_json_says(db: Path) -> None:
    receipts = kilburn("receipts", "two words", "--db", db, "--json").json["receipts"]
    lines = kilburn("receipts", "two words", "--db", db).out.splitlines()
    assert lines[0].split() == ["turn", "outcome", "policy", "freed", "left", "in", "its", "place", "why"]
    assert len(lines) == len(receipts) + 2
    for line, receipt in zip(lines[1:], receipts, strict=False):
        assert str(receipt["turn"]) == line.split()[0]
        assert receipt["left"][0] in line
        assert receipt["folds"][0] in line
    assert f"{len(receipts)} receipts" in lines[-1]
    assert f"kilburn recall 'two words' {receipts[-1]['left'][0]}" in lines[-1]


def test_a_receipt_says_that_the_model_failed(db: Path) -> None:
    first = kilburn("receipts", "cut off", "--db", db, "--json").json["receipts"][0]
    assert first["asked"] == ["failed"]
    assert "failed" in first["why"]
    assert "the model: failed" in kilburn("receipts", "cut off", "--db", db).out
    without = kilburn("receipts", "two words", "--db", db).out
    assert "there was no model to ask" in without
    assert "the model: none" not in without


def test_only_what_was_asked_for(db: Path) -> None:
    everything = kilburn("receipts", "two words", "--db", db, "--json").json["receipts"]
    assert kilburn("receipts", "two words", "--last", 2, "--db", db, "--json").json["receipts"] == everything[-2:]
    some = kilburn("receipts", "two words", "p3", "--db", db, "--json").json["receipts"]
    assert 0 < len(some) < len(everything)
    fold = everything[1]["folds"][0]
    assert everything[1] in kilburn("receipts", "two words", fold, "--db", db, "--json").json["receipts"]
    assert kilburn("receipts", "two words", "--outcome", "failed", "--db", db, "--json").json["receipts"] == []
    assert (
        kilburn("receipts", "two words", "--outcome", "failed", "--db", db).out.splitlines()[-1] == "0 receipts, 0 tokens freed"
    )


def test_a_copy_is_listed_and_found(db: Path) -> None:
    with package.open(str(db), window=600, policy="summarize", tokenizer="chars/4") as store:
        (copy,) = store.session("two words").edits.apply(Bring(((3, ((0, 9),)),)))
    (receipt,) = kilburn("receipts", "two words", copy, "--db", db, "--json").json["receipts"]
    assert (receipt["brought"], receipt["left"], receipt["freed"]) == ([copy], [], 0)
    row = kilburn("receipts", "two words", copy, "--db", db).out.splitlines()[1]
    assert f"copy: {copy}" in row
    assert f" -{receipt['added']} " in row


def test_an_outcome_that_does_not_exist_is_refused(db: Path) -> None:
    refused = kilburn("receipts", "two words", "--outcome", "fialed", "--db", db)
    assert (refused.status, refused.out) == (2, "")
    assert "no progress" in refused.err


def test_forgotten_pages_keep_their_receipts(db: Path) -> None:
    with package.open(str(db), window=600, policy="summarize", tokenizer="chars/4") as store:
        store.session("two words").forget("p3")
    said = kilburn("receipts", "two words", "p3", "--db", db)
    assert said.status == 0
    assert "p2-" in said.out


def test_looking_changes_nothing_and_wrong_input_exits_2(db: Path) -> None:
    before = db.read_bytes()
    assert kilburn("receipts", "two words", "--db", db).status == 0
    assert db.read_bytes() == before
    for words in (("nobody",), ("two words", "p999"), ("two words", "f999"), ("two words", "pages"), ("two words", "p9-p2")):
        said = kilburn("receipts", *words, "--db", db)
        assert (said.status, said.out) == (2, ""), words
        assert "Traceback" not in said.err

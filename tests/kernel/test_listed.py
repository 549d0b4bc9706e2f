"""The list of what is forgotten says no word of it, and forgets the same in an older copy of the store, and nothing else."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import kilburn
from cli.terminal import kilburn as command
from kernel.talk import user
from kilburn.errors import SpecError
from kilburn.forgetting.listed import ForgottenList, listed, read_list, to_forget_again

PROMPT: dict[str, Any] = {"window": 4000, "policy": "fifo", "tokenizer": "chars/4", "embedder": None}


def opened(path: Path) -> kilburn.Store:
    return kilburn.open(str(path), **PROMPT)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """A store in which something is forgotten, and beside it, in `old.db`, a copy from before."""
    path = tmp_path / "agent.db"
    with opened(path) as store:
        work = store.session("work of ana", user="ana")
        work.append(user("the secret heliotrope"), user("stays"))
        store.memory("ana").collection.add("Ana knows the heliotrope.")
        trip = store.session("trip")
        trip.append(user("to the sea"))
        branch = trip.fork("look for trains")
        branch.append(user("at noon"))
        branch.branches.exit("one at noon")
        store.session("kept").append(user("hello"))
    shutil.copy(path, tmp_path / "old.db")
    with opened(path) as store:
        store.forget(session="work of ana", address="p1")
        store.forget(session="@memory/ana", address="p1")
        store.forget(session="trip")
    return path


def names(path: Path) -> list[str]:
    with opened(path) as store:
        return [info.name for info in store.backend.segments() if info.kind != "forgotten"]


def test_what_was_forgotten_since_is_forgotten_in_the_older_copy(db: Path) -> None:
    old, listing = db.with_name("old.db"), db.with_name("list.json")
    assert command("forget", "--list", listing, "--db", db, "--json").json == {"list": str(listing), "segments": 4}
    said = listing.read_text()
    for word in ("heliotrope", "ana", "trip", "work"):
        assert word not in said
    assert listing.stat().st_mode & 0o077 == 0
    dry = command("forget", "--again", listing, "--dry-run", "--db", old)
    assert "would go: work of ana p1" in dry.out
    assert len(names(old)) == 5
    assert command("forget", "--again", listing, "--yes", "--db", old).status == 0
    assert names(old) == names(db) == ["work of ana", "@memory/ana", "kept"]
    with opened(old) as store:
        assert store.session("work of ana").recall("p2") == "stays"
        assert listed(store.backend, 1.0).gone == read_list(listing.read_bytes()).gone
        assert to_forget_again(store.backend, read_list(listing.read_bytes())) == ({}, [])
    assert b"heliotrope" not in old.read_bytes()
    assert command("fsck", "--db", old).status == 0


def test_what_is_younger_than_the_list_stays(db: Path) -> None:
    old = db.with_name("old.db")
    with opened(db) as store:
        for name in ("new", "newer"):
            store.session(name).append(user(name))
            store.forget(session=name)
        store.session("work of ana").append(user("said later"))
        store.forget(session="work of ana", address="p3")
        known = listed(store.backend, store.clock())
    with opened(old) as store:
        store.session("work of ana").append(user("said after the restore"))
        store.session("other").append(user("made after the restore"))
        roots, whole = to_forget_again(store.backend, known)
    assert roots == {1: [1], 2: [1]}
    assert sorted(info.name for info in whole) == ["trip", "trip/b1"]


def test_one_line_taken_out_is_one_session_that_comes_back(db: Path) -> None:
    old, listing = db.with_name("old.db"), db.with_name("list.json")
    assert command("forget", "--list", listing, "--db", db).status == 0
    lines = listing.read_text().splitlines(keepends=True)
    left = [line for line in lines if '"segment":1,' not in line]
    listing.write_text("".join(left))
    refused = command("forget", "--again", listing, "--yes", "--db", old)
    assert refused.status == 2
    assert 'takes out that of "check"' in refused.err
    listing.write_text("".join(line for line in left if '"check"' not in line))
    assert command("forget", "--again", listing, "--yes", "--db", old).status == 0
    with opened(old) as store:
        assert store.session("work of ana").recall("p1") == "the secret heliotrope"
    assert names(old) == ["work of ana", "@memory/ana", "kept"]


def another(known: ForgottenList) -> ForgottenList:
    return msgspec.structs.replace(known, made={number: made + 0.5 for number, made in known.made.items()})


def unknown(known: ForgottenList) -> ForgottenList:
    return msgspec.structs.replace(known, made={})


@pytest.mark.parametrize("change", [another, unknown])
def test_a_list_of_another_store_is_refused(db: Path, change: Callable[[ForgottenList], ForgottenList]) -> None:
    with opened(db) as store:
        known = change(listed(store.backend, store.clock()))
    with opened(db.with_name("old.db")) as store, pytest.raises(SpecError, match=r"of (this|another) store"):
        to_forget_again(store.backend, known)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"time":1,"made":{},"gone":[{"segment":1,"pages":["p1"]}', '{"time":"x","made":{},"gone":[]}', "\xff"],
)
def test_what_is_no_list_is_refused(db: Path, text: str) -> None:
    listing = db.with_name("list.json")
    listing.write_bytes(text.encode("latin-1"))
    done = command("forget", "--again", listing, "--yes", "--db", db)
    assert done.status == 2
    assert "forget --list" in done.err


def test_a_range_without_end_costs_nothing_and_a_wrong_address_is_refused(db: Path) -> None:
    listing = db.with_name("list.json")
    assert command("forget", "--list", listing, "--db", db).status == 0
    text = "".join(line for line in listing.read_text().splitlines(keepends=True) if '"check"' not in line)
    listing.write_text(text.replace('"p1"', '"p1-p999999999999999"', 1))
    assert "work of ana p1-p2" in command("forget", "--again", listing, "--dry-run", "--db", db.with_name("old.db")).out
    listing.write_text(text.replace('"p1"', '"every"', 1))
    assert command("forget", "--again", listing, "--dry-run", "--db", db.with_name("old.db")).status == 2


@pytest.mark.parametrize(
    "words",
    [("--list", "l", "--again", "l"), ("--list", "l", "work"), ("--again", "l", "--user", "ana"), ("--again", "l", "--all")],
)
def test_they_stand_alone(db: Path, words: tuple[str, ...]) -> None:
    done = command("forget", *words, "--db", db)
    assert done.status == 2
    assert "alone" in done.err

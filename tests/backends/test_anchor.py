"""The anchor of a store, and keyed seals: what was done to the file behind the store's back is noticed."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

import kilburn
from kilburn.backends.anchor import SPARE_LINES, Anchor
from kilburn.backends.places import place_anchor
from kilburn.backends.records import compute_seal
from kilburn.backends.sqlite import Sqlite
from kilburn.errors import StoreCorrupt, StoreError


class Place:
    """A store with an anchor beside its folder."""

    def __init__(self, folder: Path) -> None:
        self.store, self.anchor, self.copy = folder / "store", folder / "anchor", folder / "copy"
        self.store.mkdir()
        self.anchor.touch()
        self.db = str(self.store / "agent.db")

    def open(self, tenant: str = "default") -> kilburn.Store:
        return kilburn.open(self.db, tokenizer="chars/4", embedder=None, tenant=tenant, anchor=self.anchor)

    def say(self, *texts: str, session: str = "s", tenant: str = "default") -> None:
        with self.open(tenant) as store:
            store.session(session).append([{"role": "user", "content": text} for text in texts])

    def keep(self) -> None:
        shutil.copytree(self.store, self.copy, dirs_exist_ok=True)

    def roll_back(self) -> None:
        shutil.rmtree(self.store)
        shutil.copytree(self.copy, self.store)

    def findings(self) -> list[str]:
        with Sqlite(self.db, readonly=True) as backend:
            return [finding.what for finding in place_anchor(self.db, "default", self.anchor).findings(backend)]


@pytest.fixture
def at(tmp_path: Path) -> Place:
    return Place(tmp_path)


def test_an_older_copy_in_its_place_is_refused_and_fsck_says_so(at: Place) -> None:
    at.say("one")
    at.keep()
    at.say("two")
    assert at.findings() == []
    at.roll_back()
    with pytest.raises(StoreCorrupt, match=r"older than its anchor .*'s' has \d+ events, and the anchor has"):
        at.open()
    assert len(at.findings()) == 1
    at.anchor.write_bytes(b"")
    at.say("three")
    assert at.findings() == []


def test_a_copy_without_a_session_is_refused(at: Place) -> None:
    at.say("one")
    at.keep()
    at.say("two", session="t")
    at.roll_back()
    with pytest.raises(StoreCorrupt, match="segment 2 is missing"):
        at.open()


def test_another_history_of_the_same_length_is_found_by_fsck(at: Place) -> None:
    at.say("one")
    at.keep()
    at.say("two")
    at.roll_back()
    with kilburn.open(at.db, tokenizer="chars/4", embedder=None) as store:  # a writer without the anchor
        store.session("s").append([{"role": "user", "content": "three"}])
    (wrong,) = at.findings()
    assert "differs from the one in the anchor" in wrong


def test_what_is_forgotten_folded_and_undone_is_no_finding(at: Place) -> None:
    with at.open() as store:
        session = store.session("s")
        session.append([{"role": "user", "content": "My PIN is 4711."}, {"role": "assistant", "content": "Noted."}])
        store.memory("ana").remember("Ana lives in Porto.")
        store.session("gone").append([{"role": "user", "content": "Hello."}])
        store.forget(session="s", address="p1")
        store.forget(session="gone")
        with suppress(RuntimeError), store.backend.together():
            session.append([{"role": "user", "content": "never"}])
            raise RuntimeError
    at.say("later", session="t")
    assert at.findings() == []


def test_tenants_threads_and_two_stores_have_one_file(at: Place, tmp_path: Path) -> None:
    def talk(number: int) -> None:
        for text in "abcde":
            at.say(text, session=f"s{number}", tenant=f"t{number % 2}")

    threads = [threading.Thread(target=talk, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other = str(tmp_path / "other.db")
    with kilburn.open(other, tokenizer="chars/4", embedder=None, anchor=at.anchor) as store:
        store.session("s").append([{"role": "user", "content": "x"}])
    heads = dict[str, dict[int, int]]()
    for line in filter(None, at.anchor.read_bytes().split(b"\n")):
        place, segment, head, *_ = msgspec.json.decode(line)
        heads.setdefault(place, {})[segment] = max(head, heads.get(place, {}).get(segment, 0))
    written = []
    for tenant in ("t0", "t1"):
        with at.open(tenant) as store:
            written.append({info.number: info.head for info in store.backend.segments()})
            assert place_anchor(at.db, tenant, at.anchor).findings(store.backend) == []
    with kilburn.open(other, tokenizer="chars/4", embedder=None, anchor="") as store:
        written.append({info.number: info.head for info in store.backend.segments()})
    assert sorted(heads.values(), key=repr) == sorted(written, key=repr)


def test_what_a_killed_writer_has_left_of_a_line_is_passed_over_and_an_altered_line_is_not(at: Place) -> None:
    at.say("one")
    with at.anchor.open("ab") as file:
        file.write(b'["00')
    at.say("two")
    assert at.findings() == []
    lines = at.anchor.read_bytes()
    at.anchor.write_bytes(lines.replace(b",1,", b",0,", 1))
    with pytest.raises(StoreCorrupt, match="is altered"):
        at.open()
    assert "is altered" in at.findings()[0]


def test_a_file_that_is_not_there_is_no_anchor(at: Place) -> None:
    at.anchor.unlink()
    with pytest.raises(StoreError, match="create an empty file there"):
        at.open()
    assert "cannot be read" in at.findings()[0]


def test_it_does_not_grow_for_ever(at: Place) -> None:
    at.say("one")
    whole = [line for line in at.anchor.read_bytes().split(b"\n") if line]
    at.anchor.write_bytes(b"\n".join(whole * SPARE_LINES))
    at.say("two")
    assert len(at.anchor.read_bytes().split(b"\n")) < 20
    assert at.findings() == []


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    assert not place_anchor(":memory:", "default", tmp_path / "anchor").file
    assert not Anchor().file


def kilburn_with(key: str, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "KILBURN_SEAL_KEY"}
    environment |= {"KILBURN_SEAL_KEY": key} if key else {}
    return subprocess.run([sys.executable, "-m", "kilburn", *words], env=environment, capture_output=True, text=True, check=False)


def test_a_row_that_was_sealed_without_the_key_is_refused(tmp_path: Path) -> None:
    db = tmp_path / "agent.db"
    assert kilburn_with("secret", "notes", "write", "plan", "Deploy on Monday.", "--db", str(db)).returncode == 0
    assert kilburn_with("secret", "fsck", str(db)).returncode == 0
    before = db.read_bytes()
    for key in ("", "another"):
        for words in (["fsck", str(db), "--repair"], ["notes", "write", "plan", "x", "--db", str(db)]):
            refused = kilburn_with(key, *words)
            assert refused.returncode
            assert "no row is sealed with the key of this process" in refused.stderr + refused.stdout
    assert db.read_bytes() == before
    with sqlite3.connect(db) as raw:  # an attacker who knows how seals are made
        segment, number, record = raw.execute("SELECT segment, id, record FROM page").fetchone()
        record = record.replace(b"Deploy", b"Delete")
        raw.execute("UPDATE page SET record = ?, seal = ?", (record, compute_seal("page", segment, number, record)))
    raw.close()
    found = kilburn_with("secret", "fsck", str(db))
    assert found.returncode == 1
    assert "its record is not what was written" in found.stderr + found.stdout

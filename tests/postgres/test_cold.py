"""Cold texts of a store in PostgreSQL: read back exactly, deleted when they are forgotten, and never lost."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

import kilburn
from backends.server_files import files_with
from backends.test_cold import (
    DIGESTS,
    TEXTS,
    Held,
    objects,
    test_a_cold_text_is_read_back_exactly,
    test_a_place_that_cannot_be_written_leaves_everything_where_it_was,
    test_a_receipt_says_what_is_late_and_what_cannot_be_looked_at,
    test_a_short_text_stays,
    test_a_text_that_is_said_again_comes_back,
    test_another_key_or_none_is_refused_and_to_forget_nobody_needs_it,
    test_damage_is_said_and_never_hidden,
    test_forgetting_deletes_the_object_when_no_page_has_the_text_and_every_byte,
    test_readers_never_miss_a_text_that_goes_and_comes,
    test_texts_on_their_way_do_not_go_to_a_place_that_is_the_tenants_no_more,
    test_what_is_rolled_back_deletes_nothing,
    test_what_two_move_at_once_and_one_cannot_write_is_deleted,
    test_without_a_place_nothing_moves,
)
from cli.terminal import kilburn as command
from kernel.talk import user
from kilburn.backends.codec import parted, unpack
from kilburn.backends.cold import MARK
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreCorrupt

pytestmark = pytest.mark.slow

pytest.importorskip("obstore")

__all__ = [
    "test_a_cold_text_is_read_back_exactly",
    "test_a_place_that_cannot_be_written_leaves_everything_where_it_was",
    "test_a_receipt_says_what_is_late_and_what_cannot_be_looked_at",
    "test_a_short_text_stays",
    "test_a_text_that_is_said_again_comes_back",
    "test_another_key_or_none_is_refused_and_to_forget_nobody_needs_it",
    "test_damage_is_said_and_never_hidden",
    "test_forgetting_deletes_the_object_when_no_page_has_the_text_and_every_byte",
    "test_readers_never_miss_a_text_that_goes_and_comes",
    "test_texts_on_their_way_do_not_go_to_a_place_that_is_the_tenants_no_more",
    "test_what_is_rolled_back_deletes_nothing",
    "test_what_two_move_at_once_and_one_cannot_write_is_deleted",
    "test_without_a_place_nothing_moves",
]

PROMPT: dict[str, Any] = {"window": 4000, "policy": "fifo", "tokenizer": "chars/4", "embedder": None}


class HeldThere(Held):
    """A store in PostgreSQL."""

    def check_index(self) -> None:
        with psycopg.connect(self.place) as connection:
            left = connection.execute(
                "SELECT count(DISTINCT (block, substr(lows, at, 2)))"
                " FROM kilburn.posting, generate_series(1, length(lows), 2) AS at"
            ).fetchone()
            passages = connection.execute("SELECT count(*) FROM kilburn.passage").fetchone()
        assert left == passages


@pytest.fixture
def held(url: str, server: OwnServer) -> Held:
    return HeldThere(url, lambda letters: bool(files_with(server, letters)), reads=False)


KILLED = """
import os, signal, sys
from kilburn.backend import Batch
from kilburn.backends.postgres.store import Postgres
from backends.test_cold import DIGESTS

url, what, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

# Every object that is written is then opened, to be synced.
sys.addaudithook(lambda event, given: step() if event == "open" and "/cold" in str(given[0]) else None)

backend = Postgres(url)
write = backend._db.write

def stepping(*given, **more):
    step()
    made = write(*given, **more)
    step()
    return made

backend._db.write = stepping
if what == "chill":
    backend.contents.chill(DIGESTS.values())
elif what == "warm":
    backend.contents.warm()
else:
    with backend.erasing():
        for segment, pages in ((2, [1]), (1, [1, 2, 3])):
            there = set(pages) - set(backend.forgotten(segment))
            if there:
                backend.commit(segment, Batch(head=1, erase=sorted(there)))
"""


@pytest.mark.parametrize("what", ["chill", "warm", "forget"])
def test_killed_at_some_steps_nothing_is_lost_and_nothing_stays(tmp_path: Path, url: str, held: Held, what: str) -> None:
    tests, folder = str(Path(__file__).parents[1]), tmp_path / "cold"
    environment = os.environ | {"PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"}
    with held.filled(folder) as backend:
        if what != "chill":
            backend.contents.chill(DIGESTS.values())
    kills = 0
    for left in {"chill": (1, 2, 3, 10, 26, 27, 28, 29, 1000)}.get(what, (1, 2, 3, 4, 5, 6, 1000)):
        words = [sys.executable, "-c", KILLED, url, what, str(left)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode in (0, -9), done.stderr
        kills += done.returncode == -9
        with Postgres(url) as backend:
            gone = set(backend.forgotten(1)) - ({1} - set(backend.forgotten(2)))
            kept = {digest: TEXTS[number] for number, digest in DIGESTS.items() if number not in gone}
            assert backend.contents.texts(kept) == kept
            assert backend.contents.scrub(repair=True) == []
            assert len(objects(folder)) == len(backend.contents.cold())
            if what == "warm":
                backend.contents.chill(kept)
            elif what == "chill" and left < 1000:
                backend.contents.warm()
    assert kills >= 3


def test_the_verbs_move_texts_and_a_copy_reads_them(tmp_path: Path, url: str) -> None:
    with kilburn.open(url, **PROMPT) as store:
        for number, text in TEXTS.items():
            store.session(f"s{number}").append(user(text))
    assert command("cold", "set", tmp_path / "cold", "--key", tmp_path / "key", "--db", url).status == 0
    moved = command("cold", "move", "--older-than", "0s", "--least", 10, "--db", url, "--json")
    assert moved.json["texts"] == 6, moved.err
    assert command("recall", "s3", "p1", "--db", url).out.strip() == TEXTS[3]
    kilburn.copy(url, str(tmp_path / "whole.db"))
    with kilburn.open(str(tmp_path / "whole.db"), **PROMPT) as store:
        assert store.session("s5").recall("p1") == TEXTS[5]
        assert store.backend.contents.cold() == {}
    assert command("cold", "scrub", "--db", url).status == 0
    assert command("forget", "--session", "s3", "--yes", "--db", url).status == 0
    assert len(objects(tmp_path / "cold")) == 5
    assert command("cold", "back", "--db", url).status == 0
    assert objects(tmp_path / "cold") == []


def test_a_backup_forgets_again_what_has_no_object_any_more(tmp_path: Path, url: str) -> None:
    with kilburn.open(url, **PROMPT) as store:
        for number, text in TEXTS.items():
            store.session(f"s{number}").append(user(text), user("That is all."))
    assert command("cold", "set", tmp_path / "cold", "--db", url).status == 0
    assert command("forget", "--list", tmp_path / "list", "--db", url).status == 0
    assert command("cold", "move", "--older-than", "0s", "--least", 10, "--db", url).status == 0
    # As it is in a backup from before p1 of s3 was forgotten.
    (gone,) = (path for path in objects(tmp_path / "cold") if b"canaryword3" in unpacked(path))
    gone.unlink()
    text = re.sub('"check":.*\n', "", (tmp_path / "list").read_text())
    (tmp_path / "list").write_text(text.replace('"gone":[\n', '"gone":[\n{"segment":3}'))
    done = command("forget", "--again", tmp_path / "list", "--yes", "--db", url)
    assert done.status == 0, done.err
    assert "forgotten: all of s3" in done.out
    assert command("cold", "scrub", "--db", url).status == 0


def unpacked(path: Path) -> bytes:
    """The text of an object that is not encrypted."""
    body = path.read_bytes()[len(MARK) + 1 :]
    for number, digest in DIGESTS.items():
        try:
            return unpack(*parted(body), len(TEXTS[number]), bytes.fromhex(digest)).encode()
        except StoreCorrupt:
            continue
    raise AssertionError(path)
